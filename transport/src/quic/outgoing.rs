//! A message on its way out.

use std::slice;

use bytes::Bytes;
use quinn_proto::{SendStream, WriteError};
use zerocopy::IntoBytes;

use super::limits::PIECES_MAX;
use crate::message::{PAYLOAD_MAX, Version, v1};
use crate::{Control, TransportError};

/// What is left of a message that QUIC has not taken yet.
#[derive(Default)]
pub(super) struct Outgoing {
    left: Bytes,
    /// Pieces in which it was taken.
    pieces: u32,
}

impl Outgoing {
    /// One buffer of a message, after checking that the peer will accept it; and its control message.
    pub(super) fn new(
        version: Version,
        control: &Control,
        payload: &[&[u8]],
    ) -> Result<(Control, Outgoing), TransportError> {
        let len = payload.iter().map(|slice| slice.len()).sum::<usize>();
        let mut control = *control;
        control.payload_len = u32::try_from(len).unwrap_or(u32::MAX);
        control.check()?;
        debug_assert!(len <= PAYLOAD_MAX);
        let mut message = Vec::with_capacity(size_of::<Control>() + len);
        match version {
            Version::V1 => message.extend_from_slice(&v1::encode(&control)?),
            Version::V2 => message.extend_from_slice(control.as_bytes()),
        }
        payload.iter().for_each(|slice| message.extend_from_slice(slice));
        Ok((control, Outgoing { left: message.into(), pieces: 0 }))
    }

    /// Bytes that are left.
    pub(super) fn len(&self) -> usize {
        self.left.len()
    }

    /// Hands as much to QUIC as it takes; returns how many bytes that were.
    pub(super) fn write(&mut self, to: &mut SendStream<'_>) -> Result<usize, WriteError> {
        let written = to.write_chunks(slice::from_mut(&mut self.left))?;
        self.pieces += 1;
        Ok(written.bytes)
    }

    /// Whether its peer allows so little at a time that it costs too much: QUIC keeps each piece, and looks through all of them for each that it sends.
    pub(super) fn is_crumbled(&self) -> bool {
        self.pieces > PIECES_MAX
    }
}
