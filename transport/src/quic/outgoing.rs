//! A message on its way out: its parts lie where they are until QUIC has them acknowledged.

use bytes::Bytes;
use quinn_proto::{SendStream, WriteError};
use zerocopy::IntoBytes;

use crate::message::{PAYLOAD_MAX, Version, v1};
use crate::{Control, TransportError};

/// What comes behind the control message.
pub(super) enum Payload<'a> {
    /// The caller's, to be copied.
    Slices(&'a [&'a [u8]]),
    /// To be kept.
    Parts(Vec<Bytes>),
}

impl Payload<'_> {
    fn len(&self) -> usize {
        match self {
            Payload::Slices(slices) => slices.iter().map(|slice| slice.len()).sum(),
            Payload::Parts(parts) => parts.iter().map(Bytes::len).sum(),
        }
    }
}

/// What is left of a message that QUIC has not taken yet.
#[derive(Default)]
pub(super) struct Outgoing {
    parts: Vec<Bytes>,
    /// Parts that QUIC has taken.
    taken: usize,
    len: usize,
}

impl Outgoing {
    /// A message, after checking that the peer will accept it; and its control message.
    pub(super) fn new(
        version: Version,
        control: &Control,
        payload: Payload<'_>,
    ) -> Result<(Control, Outgoing), TransportError> {
        let payload_len = payload.len();
        let mut control = *control;
        control.payload_len = u32::try_from(payload_len).unwrap_or(u32::MAX);
        control.check()?;
        debug_assert!(payload_len <= PAYLOAD_MAX);
        let copied = if matches!(payload, Payload::Slices(_)) { payload_len } else { 0 };
        let mut head = Vec::with_capacity(size_of::<Control>() + copied);
        match version {
            Version::V1 => head.extend_from_slice(&v1::encode(&control)?),
            Version::V2 => head.extend_from_slice(control.as_bytes()),
        }
        let len = head.len() + payload_len;
        let parts = match payload {
            Payload::Slices(slices) => {
                slices.iter().for_each(|slice| head.extend_from_slice(slice));
                vec![Bytes::from(head)]
            }
            Payload::Parts(parts) => {
                let mut all = Vec::with_capacity(1 + parts.len());
                all.push(Bytes::from(head));
                all.extend(parts);
                all
            }
        };
        Ok((control, Outgoing { parts, taken: 0, len }))
    }

    /// Bytes that are left.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Hands as much to QUIC as it takes; returns how many bytes that were.
    pub(super) fn write(&mut self, to: &mut SendStream<'_>) -> Result<usize, WriteError> {
        let written = to.write_chunks(&mut self.parts[self.taken..])?;
        self.taken += written.chunks;
        self.len -= written.bytes;
        Ok(written.bytes)
    }
}
