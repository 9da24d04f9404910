//! Takes one message from a stream's chunks: a pure state machine, no buffer but the control message's own.

use bytes::{Buf, Bytes};

use crate::message::{CONTROL_LEN, Control, DecodeError, Version, v1};

/// A part of a message.
#[derive(Debug, PartialEq)]
pub enum Piece {
    /// The control message; comes first.
    Control(Control),
    /// Payload from `offset` on, in order and without gaps.
    Payload {
        /// Offset in the payload.
        offset: u32,
        /// A slice of the chunk that was fed.
        bytes: Bytes,
    },
}

/// Reads one message. After an error it must not be fed again.
pub struct MessageReader {
    version: Version,
    /// The request, if a reply is due.
    answers: Option<Control>,
    head: [u8; CONTROL_LEN],
    /// Bytes of `head` filled.
    head_len: usize,
    /// Payload bytes that the control message announced.
    payload_len: u32,
    /// Payload bytes that came.
    received: u32,
    /// Bytes that the reply may have, if it is a request that is read.
    reply_max: usize,
}

impl MessageReader {
    /// A reader of a request of this version.
    pub fn request(version: Version) -> Self {
        Self {
            version,
            answers: None,
            head: [0; CONTROL_LEN],
            head_len: 0,
            payload_len: 0,
            received: 0,
            reply_max: 0,
        }
    }

    /// A reader of the reply to `request`, which is of the same version.
    pub fn reply_to(version: Version, request: Control) -> Self {
        Self { answers: Some(request), ..Self::request(version) }
    }

    /// Whether the control message has come.
    pub fn has_control(&self) -> bool {
        self.head_len == CONTROL_LEN
    }

    /// Most bytes that the reply may have, once the control message of a request has come; else zero.
    pub fn reply_max(&self) -> usize {
        self.reply_max
    }

    /// Takes the stream's next bytes and passes on what they are. At most two pieces come of it.
    pub fn feed(
        &mut self,
        mut bytes: Bytes,
        mut take: impl FnMut(Piece),
    ) -> Result<(), DecodeError> {
        if self.head_len < CONTROL_LEN {
            let n = bytes.len().min(CONTROL_LEN - self.head_len);
            self.head[self.head_len..self.head_len + n].copy_from_slice(&bytes[..n]);
            self.head_len += n;
            bytes.advance(n);
            if self.head_len < CONTROL_LEN {
                return Ok(());
            }
            take(Piece::Control(self.control()?));
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let left = self.payload_len - self.received;
        let len = u32::try_from(bytes.len()).ok().filter(|len| *len <= left);
        let len = len.ok_or(DecodeError::Trailing)?;
        take(Piece::Payload { offset: self.received, bytes });
        self.received += len;
        Ok(())
    }

    /// The stream has ended: checks that the message is whole.
    pub fn finish(&self) -> Result<(), DecodeError> {
        let got = self.head_len as u32 + self.received;
        let expected = CONTROL_LEN as u32 + self.payload_len;
        if got != expected {
            return Err(DecodeError::Truncated { got, expected });
        }
        Ok(())
    }

    fn control(&mut self) -> Result<Control, DecodeError> {
        let control = match self.version {
            Version::V1 => v1::decode(&self.head, self.answers.as_ref())?,
            Version::V2 => Control::decode(&self.head)?,
        };
        match &self.answers {
            Some(request) => request.check_reply(&control)?,
            None if control.is_reply() => return Err(DecodeError::Direction),
            None => self.reply_max = control.reply_max(),
        }
        self.payload_len = control.payload_len;
        Ok(control)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zerocopy::IntoBytes;

    use super::*;
    use crate::message::{PAYLOAD_MAX, PageDescriptor, WorkloadId};

    const WORKLOAD: WorkloadId = WorkloadId([3; 16]);

    /// Feeds `bytes` in chunks of the given lengths; returns what came, and whether all was well to the end.
    fn read(bytes: &[u8], chunks: &[usize]) -> (Vec<Piece>, Result<(), DecodeError>) {
        let (mut reader, mut pieces, mut rest) =
            (MessageReader::request(Version::V2), Vec::new(), bytes);
        let mut lens = chunks.iter().copied().chain(std::iter::repeat(usize::MAX));
        while !rest.is_empty() {
            let (chunk, after) = rest.split_at(lens.next().unwrap().min(rest.len()));
            rest = after;
            let fed = reader.feed(Bytes::copy_from_slice(chunk), |piece| pieces.push(piece));
            if fed.is_err() {
                return (pieces, fed);
            }
        }
        (pieces, reader.finish())
    }

    fn put(count: u16) -> Vec<u8> {
        let len = usize::from(count) * (PageDescriptor::LEN + crate::message::PAGE_LEN);
        let mut control = Control::put(1, WORKLOAD, count);
        control.payload_len = len as u32;
        let payload = (0..len).map(|i| i as u8);
        control.as_bytes().iter().copied().chain(payload).collect()
    }

    proptest! {
        #[test]
        fn a_whole_message_is_read_whole_however_it_is_cut(count in 1u16..=4, chunks in prop::collection::vec(1usize..3000, 0..40)) {
            let bytes = put(count);
            let (pieces, end) = read(&bytes, &chunks);
            prop_assert_eq!(end, Ok(()));
            let mut payload = Vec::new();
            for piece in &pieces[1..] {
                let Piece::Payload { offset, bytes } = piece else { panic!("{piece:?}") };
                prop_assert_eq!(*offset as usize, payload.len());
                payload.extend_from_slice(bytes);
            }
            prop_assert_eq!(&payload, &bytes[CONTROL_LEN..]);
        }

        #[test]
        fn whatever_comes_nothing_out_of_bounds_is_passed_on(
            damage in prop::collection::vec((0usize..CONTROL_LEN, any::<u8>()), 0..4),
            cut in 0usize..9000, extra in prop::collection::vec(any::<u8>(), 0..200),
            noise in any::<bool>(), chunks in prop::collection::vec(0usize..3000, 0..40),
        ) {
            let mut bytes = if noise { Vec::new() } else { put(2) };
            for (at, byte) in damage {
                bytes.get_mut(at).into_iter().for_each(|old| *old = byte);
            }
            bytes.truncate(cut);
            bytes.extend(&extra);
            let (pieces, end) = read(&bytes, &chunks);
            let announced = match pieces.first() {
                Some(Piece::Control(control)) => control.payload_len as usize,
                Some(other) => panic!("{other:?} before the control message"),
                None => 0,
            };
            prop_assert!(announced <= PAYLOAD_MAX);
            let mut came = 0;
            for piece in pieces.iter().skip(1) {
                let Piece::Payload { offset, bytes } = piece else { panic!("{piece:?} twice") };
                prop_assert!(*offset as usize == came && !bytes.is_empty());
                came += bytes.len();
            }
            prop_assert!(came <= announced);
            prop_assert!(end.is_err() || (came == announced && !pieces.is_empty()));
        }
    }

    #[test]
    fn a_stream_that_ends_early_or_late_is_refused() {
        let bytes = put(1);
        let early = read(&bytes[..200], &[]).1;
        let expected = bytes.len() as u32;
        assert_eq!(early, Err(DecodeError::Truncated { got: 200, expected }));
        let late = read(&[&bytes[..], &[0]].concat(), &[bytes.len()]).1;
        assert_eq!(late, Err(DecodeError::Trailing));
        assert_eq!(
            MessageReader::request(Version::V2).finish(),
            Err(DecodeError::Truncated { got: 0, expected: 128 })
        );
    }

    #[test]
    fn a_reply_is_no_request() {
        let reply = Control::get(1, WORKLOAD, 1).reply(crate::message::Status::NotFound);
        assert_eq!(read(reply.as_bytes(), &[]).1, Err(DecodeError::Direction));
    }
}
