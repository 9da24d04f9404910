//! A request which is coming in: its payload goes straight into frames, and is seen by nobody until it is whole.

use crate::clients::ClientId;
use crate::limits::{FRAME_LEN, PAGE_LEN_MAX};
use crate::store::{Put, Reserved, Store};
use gms_transport::message::{Control, Op, PageDescriptor};
use std::time::Instant;
use zerocopy::FromBytes;
use zerocopy::byteorder::little_endian::U64;

/// The transport broke its word: payload with gaps, or beyond its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OutOfOrder;

/// A request and what has come of its payload.
#[derive(Debug)]
pub(crate) struct Exchange {
    /// The request.
    pub control: Control,
    /// When it began.
    pub began: Instant,
    /// Whose it is.
    pub client: ClientId,
    /// Descriptors or ids.
    head: Vec<u8>,
    head_len: usize,
    received: usize,
    /// Ids of a discard that are done with.
    ids_taken: usize,
    /// Whether it was put off once.
    pub has_waited: bool,
    /// The page whose bytes come next, and how many of it have come.
    cursor: (usize, usize),
    /// Lengths of its pages contradict each other, the message or our limits: nothing of it is used.
    is_odd: bool,
    /// Frames for the first pages of a put; what is taken, or beyond, is `None`.
    frames: Vec<Option<Reserved>>,
}

impl Exchange {
    /// A request whose payload is still to come.
    pub(crate) fn new(now: Instant, client: ClientId, control: Control) -> Self {
        let payload_len = control.payload_len as usize;
        let head_len = match control.op() {
            Some(Op::Put) => usize::from(control.count()) * PageDescriptor::LEN,
            _ => payload_len,
        };
        Self {
            control,
            began: now,
            client,
            head: Vec::new(),
            head_len: head_len.min(payload_len),
            received: 0,
            ids_taken: 0,
            has_waited: false,
            cursor: (0, 0),
            is_odd: false,
            frames: Vec::new(),
        }
    }

    /// Sets frames aside for the first `count` pages of a put, of thread `home`'s if they can be; returns how many.
    pub(crate) fn set_aside(&mut self, store: &Store, home: usize, count: u64) -> u64 {
        self.frames.reserve_exact(count as usize);
        self.frames.extend((0..count).map_while(|_| store.reserve(home)).map(Some));
        self.frames.len() as u64
    }

    /// Frames that are set aside.
    pub(crate) fn frames(&self) -> u64 {
        self.frames.iter().flatten().count() as u64
    }

    /// Takes in the payload's bytes from `offset` on.
    pub(crate) fn deposit(
        &mut self,
        store: &Store,
        offset: u32,
        bytes: &[u8],
    ) -> Result<(), OutOfOrder> {
        let start = offset as usize;
        let end = start.checked_add(bytes.len()).ok_or(OutOfOrder)?;
        if start != self.received || end > self.control.payload_len as usize {
            return Err(OutOfOrder);
        }
        self.received = end;
        let (head, mut pages) = bytes.split_at((self.head_len - self.head.len()).min(bytes.len()));
        if !head.is_empty() {
            self.head.reserve_exact(self.head_len - self.head.len());
            self.head.extend_from_slice(head);
            if self.head.len() == self.head_len {
                self.is_odd = !self.fits();
            }
        }
        while !pages.is_empty() && !self.is_odd {
            let (index, within) = self.cursor;
            let length = self.descriptors().get(index).map(|named| self.length_of(named));
            let left = length.ok_or(OutOfOrder)? - within;
            let (part, rest) = pages.split_at(left.min(pages.len()));
            if let Some(Some(frame)) = self.frames.get_mut(index) {
                store.write(frame, within, part);
            }
            self.cursor =
                if part.len() == left { (index + 1, 0) } else { (index, within + part.len()) };
            pages = rest;
        }
        Ok(())
    }

    /// Bytes that a page takes in this request.
    fn length_of(&self, named: &PageDescriptor) -> usize {
        match named.length() {
            0 => FRAME_LEN,
            length => length.into(),
        }
    }

    /// Whether the descriptors, all of which have come, name pages such as are stored, and as many bytes as the payload has.
    /// What comes with other operations names none.
    fn fits(&self) -> bool {
        let named = self.descriptors();
        let lengths = || named.iter().map(|named| self.length_of(named));
        match self.control.op() {
            Some(Op::Put) if self.control.has_lengths() => {
                lengths().all(|length| length <= PAGE_LEN_MAX)
                    && self.head_len + lengths().sum::<usize>() == self.control.payload_len as usize
            }
            Some(Op::Get | Op::Put) => named.iter().all(|named| named.length() == 0),
            _ => true,
        }
    }

    /// See the field.
    pub(crate) fn is_odd(&self) -> bool {
        self.is_odd
    }

    /// Bytes that its descriptors or ids take.
    pub(crate) fn head_len(&self) -> usize {
        self.head_len
    }

    /// Whether all of the payload has come.
    pub(crate) fn is_whole(&self) -> bool {
        self.received == self.control.payload_len as usize
    }

    /// Its payload, if it brings no pages.
    pub(crate) fn head(&self) -> &[u8] {
        &self.head
    }

    /// The pages named by descriptors; none if the request names none so.
    pub(crate) fn descriptors(&self) -> &[PageDescriptor] {
        <[PageDescriptor]>::ref_from_bytes(&self.head).unwrap_or_default()
    }

    /// The page ids of a discard that are left.
    pub(crate) fn ids(&self) -> &[U64] {
        let ids = <[U64]>::ref_from_bytes(&self.head).unwrap_or_default();
        ids.get(self.ids_taken..).unwrap_or_default()
    }

    /// The next `count` of them, or all: they are not left any more.
    pub(crate) fn take_ids(&mut self, count: usize) -> impl Iterator<Item = u64> {
        let count = count.min(self.ids().len());
        self.ids_taken += count;
        let from = self.ids_taken - count;
        let ids = <[U64]>::ref_from_bytes(&self.head).unwrap_or_default();
        ids.iter().skip(from).take(count).map(|id| id.get())
    }

    /// Page `index` of a put that is whole: its id, what else is known of it, and its bytes, which are the caller's then.
    pub(crate) fn take(&mut self, index: usize) -> Option<(u64, Put, Reserved)> {
        let named = *self.descriptors().get(index)?;
        let put = Put { length: self.length_of(&named) as u16, check: named.check() };
        Some((named.page(), put, self.frames.get_mut(index)?.take()?))
    }

    /// Gives back the frames which were not taken; returns how many.
    pub(crate) fn release(&mut self, store: &Store) -> u64 {
        let left = self.frames.drain(..).flatten();
        left.map(|frame| store.release(frame)).count() as u64
    }
}
