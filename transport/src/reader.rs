//! Takes one message from a stream's chunks: a pure state machine, no buffer but the control message's own.

use bytes::{Buf, Bytes};

use crate::message::{CONTROL_LEN, Control, DecodeError};

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
    /// The request, if a reply is due.
    answers: Option<Control>,
    head: [u8; CONTROL_LEN],
    /// Bytes of `head` filled.
    head_len: usize,
    /// Payload bytes that the control message announced.
    payload_len: u32,
    /// Payload bytes that came.
    received: u32,
}

impl MessageReader {
    /// A reader of a request.
    pub fn request() -> Self {
        Self { answers: None, head: [0; CONTROL_LEN], head_len: 0, payload_len: 0, received: 0 }
    }

    /// A reader of the reply to `request`.
    pub fn reply_to(request: Control) -> Self {
        Self { answers: Some(request), ..Self::request() }
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
        let control = Control::decode(&self.head)?;
        match &self.answers {
            Some(request) => request.check_reply(&control)?,
            None if control.is_reply() => return Err(DecodeError::Direction),
            None => {}
        }
        self.payload_len = control.payload_len.get();
        Ok(control)
    }
}
