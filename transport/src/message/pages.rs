//! Gets, puts and discards.

use std::ops::RangeInclusive;

use zerocopy::byteorder::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{
    Body, DISCARD_MAX, Op, PAGE_SHIFT, PAGE_SHIFT_MAX, PAGES_MAX, PAYLOAD_MAX, TAG_LEN, flags,
};

/// Names one page of a vector: precedes the pages in the payload, one for each page, in order.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct PageDescriptor {
    /// Page id in the lower 48 bits; above it the bytes that the page takes in this message (0 = all of its frame).
    page: U64,
    check: U64,
}

impl PageDescriptor {
    /// Length of a descriptor in bytes.
    pub const LEN: usize = size_of::<PageDescriptor>();
    /// Page ids are below this.
    pub const ID_END: u64 = 1 << 48;

    /// Names page `page`, below [`PageDescriptor::ID_END`], whose content has checksum `check`.
    pub fn new(page: u64, check: u64) -> PageDescriptor {
        debug_assert!(page < PageDescriptor::ID_END);
        PageDescriptor { page: U64::new(page), check: U64::new(check) }
    }

    /// The same page, which takes `length` bytes in this message.
    pub fn with_length(self, length: u16) -> PageDescriptor {
        PageDescriptor { page: U64::new(self.page() | u64::from(length) << 48), ..self }
    }

    /// The page's id.
    pub fn page(&self) -> u64 {
        self.page.get() & (PageDescriptor::ID_END - 1)
    }

    /// The requester's checksum of the page; stored and returned, never interpreted by agents.
    pub fn check(&self) -> u64 {
        self.check.get()
    }

    /// Bytes that the page takes in this message; 0: all of its frame.
    pub fn length(&self) -> u16 {
        (self.page.get() >> 48) as u16
    }
}

/// The body of a get or a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct PagesRequest {
    /// Id of the page, if there is just one and it is fetched.
    pub page: u64,
    /// Pages that the operation names.
    pub count: u16,
    /// log2 of the frame length: 12 or 13.
    pub page_shift: u8,
    pub(super) zero: [u8; 5],
    /// Reserved: the version of the page that is wanted or stored.
    pub(super) version: u64,
    /// Reserved: the node which shall get the reply of a delegated exchange.
    pub(super) reply_to: u64,
    /// Reserved: proves to the other node that the request was delegated.
    pub(super) capability: [u8; 16],
    /// Reserved: when that expires.
    pub(super) expires_s: u64,
    /// Reserved: the tenant of a delegated request.
    pub(super) tenant: [u8; 16],
    pub(super) zero_end: u64,
}

impl PagesRequest {
    /// `count` frames of the usual length.
    pub(super) fn new(count: u16) -> PagesRequest {
        PagesRequest {
            page: 0,
            count,
            page_shift: PAGE_SHIFT,
            zero: [0; 5],
            version: 0,
            reply_to: 0,
            capability: [0; 16],
            expires_s: 0,
            tenant: [0; 16],
            zero_end: 0,
        }
    }

    /// Payload lengths of the request.
    pub(super) fn payload_due(&self, op: Op, message_flags: u8) -> RangeInclusive<u32> {
        let count = u32::from(self.count);
        match op {
            Op::Get if count == 1 => 0..=0,
            Op::Get => exactly(count * PageDescriptor::LEN as u32),
            _ => vector(count, self.page_shift, message_flags),
        }
    }

    /// Most bytes that the payload of a get's reply may have.
    pub(super) fn reply_max(&self) -> usize {
        let page = (1 << self.page_shift) + TAG_LEN;
        match self.count {
            1 => page,
            count => usize::from(count) * (PageDescriptor::LEN + page),
        }
    }
}

impl Body for PagesRequest {
    fn is_valid(&self) -> bool {
        let bounded = PagesRequest {
            page: self.page,
            page_shift: self.page_shift,
            ..PagesRequest::new(self.count)
        };
        *self == bounded
            && self.page < PageDescriptor::ID_END
            && are_valid(self.count, self.page_shift)
    }
}

/// What follows the feedback in the reply to a get or a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct PagesReply {
    /// As asked.
    pub page: u64,
    /// As asked.
    pub count: u16,
    /// As asked.
    pub page_shift: u8,
    pub(super) zero: u8,
    /// Bytes of the single page's payload (0 = all of its frame).
    pub length: u16,
    pub(super) zero_too: u16,
    /// Bit i is set if page i of the operation succeeded.
    pub done: u64,
    /// The requester's checksum of the single page's payload, as it was stored.
    pub check: u64,
    /// Reserved: the version of the page.
    pub(super) version: u64,
    pub(super) zero_end: u64,
}

impl PagesReply {
    /// Nothing done yet of what was asked.
    pub(super) fn to(asked: &PagesRequest) -> PagesReply {
        PagesReply {
            page: asked.page,
            count: asked.count,
            page_shift: asked.page_shift,
            zero: 0,
            length: 0,
            zero_too: 0,
            done: 0,
            check: 0,
            version: 0,
            zero_end: 0,
        }
    }

    /// Whether `reply` echoes what this one, which has done nothing, does.
    pub(super) fn echoes(&self, reply: &PagesReply) -> bool {
        let echoed = |reply: &PagesReply| (reply.page, reply.count, reply.page_shift);
        echoed(self) == echoed(reply)
    }

    /// Payload lengths of the reply to a get.
    pub(super) fn payload_due(&self, message_flags: u8) -> RangeInclusive<u32> {
        let done = self.done.count_ones();
        match (self.count, message_flags & flags::LENGTHS) {
            (1, 0) => exactly(done << self.page_shift),
            (1, _) if self.length > 0 => exactly(done * u32::from(self.length)),
            (1, _) => exactly(done << self.page_shift),
            _ => vector(done, self.page_shift, message_flags),
        }
    }
}

impl Body for PagesReply {
    fn is_valid(&self) -> bool {
        let frame = (1 << self.page_shift.min(PAGE_SHIFT_MAX)) + TAG_LEN;
        self.zero == 0
            && self.zero_too == 0
            && self.version == 0
            && self.zero_end == 0
            && usize::from(self.length) <= frame
            && are_valid(self.count, self.page_shift)
            && self.done.checked_shr(self.count.into()).unwrap_or(0) == 0
    }
}

fn are_valid(count: u16, page_shift: u8) -> bool {
    (1..=PAGES_MAX).contains(&usize::from(count))
        && (PAGE_SHIFT..=PAGE_SHIFT_MAX).contains(&page_shift)
}

/// Lengths of `count` descriptors and their pages.
fn vector(count: u32, page_shift: u8, message_flags: u8) -> RangeInclusive<u32> {
    let descriptors = count * PageDescriptor::LEN as u32;
    match message_flags & flags::LENGTHS {
        0 => exactly(descriptors + (count << page_shift)),
        // Which of these it is, the descriptors say.
        _ => descriptors + count..=descriptors + count * ((1 << page_shift) + TAG_LEN as u32),
    }
}

fn exactly(length: u32) -> RangeInclusive<u32> {
    length..=length
}

const _: () =
    assert!(PAGES_MAX * (PageDescriptor::LEN + (1 << PAGE_SHIFT_MAX) + TAG_LEN) <= PAYLOAD_MAX);
const _: () = assert!((1 << PAGE_SHIFT_MAX) + TAG_LEN <= u16::MAX as usize);

/// What follows the feedback in the reply to a discard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct DiscardReply {
    /// As asked.
    pub count: u16,
    pub(super) zero: [u8; 46],
}

impl DiscardReply {
    pub(super) fn to(asked: &DiscardRequest) -> DiscardReply {
        DiscardReply { count: asked.count, zero: [0; 46] }
    }
}

impl Body for DiscardReply {
    fn is_valid(&self) -> bool {
        self.zero == [0; 46] && (1..=DISCARD_MAX).contains(&usize::from(self.count))
    }
}

/// The body of a discard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct DiscardRequest {
    /// Page ids in the payload.
    pub count: u16,
    pub(super) zero: [u8; 78],
}

impl DiscardRequest {
    pub(super) fn new(count: u16) -> DiscardRequest {
        DiscardRequest { count, zero: [0; 78] }
    }
}

impl Body for DiscardRequest {
    fn is_valid(&self) -> bool {
        *self == DiscardRequest::new(self.count)
            && (1..=DISCARD_MAX).contains(&usize::from(self.count))
    }
}
