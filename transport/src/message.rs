//! The control message: exactly 128 bytes, little-endian, versioned, with an optional payload behind it.
//!
//! The layout is documented byte by byte in `docs/protocol.md`. The form (a short fixed control message with an
//! attached payload of up to a page or a vector of pages) is that of Trapeze/GMS (Duke, 1997).
//!
//! A [`Control`] can only be had from a constructor or from [`Control::decode`], so its operation, status and
//! version are always valid; what its lengths promise is checked by [`Control::check`] on both sides of the wire.

use std::fmt;

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

/// Length of a control message in bytes.
pub const CONTROL_LEN: usize = 128;
/// First four bytes of every control message: `GMS1`.
pub const MAGIC: u32 = u32::from_le_bytes(*b"GMS1");
/// Version of the protocol that this build speaks.
pub const VERSION: u8 = 1;
/// Bytes of a page frame.
pub const PAGE_LEN: usize = 4096;
/// log2 of [`PAGE_LEN`].
pub const PAGE_SHIFT: u8 = 12;
/// Greatest `page_shift` that a message may name (8 KiB pages).
pub const PAGE_SHIFT_MAX: u8 = 13;
/// Most pages that one message may carry.
pub const PAGES_MAX: usize = 64;
/// Most payload bytes that one message may carry: 64 descriptors and 64 pages of 8 KiB.
pub const PAYLOAD_MAX: usize = PAGES_MAX * (size_of::<PageDescriptor>() + (1 << PAGE_SHIFT_MAX));
/// Most page ids that one discard may carry.
pub const DISCARD_MAX: usize = 4096;

/// Bits of [`Control::flags`].
pub mod flags {
    /// The message is a reply.
    pub const REPLY: u16 = 1;
    /// Every flag of this version; any other bit is refused.
    pub const ALL: u16 = REPLY;
}

/// What a message asks for, or answers.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    TryFromBytes,
    IntoBytes,
    KnownLayout,
    Immutable,
    Unaligned,
)]
#[repr(u8)]
pub enum Op {
    /// Opens a workload's session on this link; `value` is the lease asked for in ms.
    Hello = 1,
    /// Fetch one page (named in the header) or a vector of 2 to 64 (named by descriptors).
    Get = 2,
    /// Store 1 to 64 pages: their descriptors, then the pages.
    Put = 3,
    /// Forget 1 to [`DISCARD_MAX`] pages: their ids, 8 bytes each.
    Discard = 4,
    /// Ask for credits to put `value` pages.
    Grant = 5,
    /// Ask for the agent's state; the reply's header carries it.
    Status = 6,
    /// End of the workload: its pages are freed.
    Goodbye = 7,
    /// Reserved: a request that a third node answers.
    Delegate = 8,
    /// Reserved: global memory management's epochs.
    Epoch = 9,
    /// Reserved: remote atomics.
    Atomic = 10,
}

/// How a request ended.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    TryFromBytes,
    IntoBytes,
    KnownLayout,
    Immutable,
    Unaligned,
)]
#[repr(u8)]
pub enum Status {
    /// Done; for vectors: as far as the `done` mask says.
    Ok = 0,
    /// The agent holds no such page for this tenant.
    NotFound = 1,
    /// The agent has no frame free: choose another one.
    Full = 2,
    /// The agent is about to leave: it serves gets, but takes no pages.
    Draining = 3,
    /// No session (hello first), or its lease was lost.
    Denied = 4,
    /// The request contradicts itself or the agent's limits.
    Invalid = 5,
    /// An operation which this agent does not do.
    Unsupported = 6,
    /// The agent failed at it; the page's state is unknown.
    Failed = 7,
}

/// The workload within a client: with the client's certificate it names the tenant. Random, so never guessed.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    FromBytes,
    IntoBytes,
    KnownLayout,
    Immutable,
    Unaligned,
)]
#[repr(transparent)]
pub struct WorkloadId(pub [u8; 16]);

impl fmt::Display for WorkloadId {
    /// The first eight bytes: enough to tell workloads apart in a log, too few to speak for one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().take(8).try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A control message as it travels. All integers are little-endian; unused fields are zero.
#[derive(
    Clone, Copy, PartialEq, Eq, TryFromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Control {
    /// [`MAGIC`].
    magic: U32,
    /// [`VERSION`].
    version: u8,
    /// What is asked for or answered.
    pub op: Op,
    /// [`flags`].
    pub flags: U16,
    /// Chosen by the requester, echoed by the reply.
    pub request: U64,
    /// The workload within the client: with the client's certificate it names the tenant.
    pub workload: WorkloadId,
    /// Page id of a single-page operation.
    pub page: U64,
    /// Epoch of global memory management (0 = none).
    pub epoch: U64,
    /// Bytes of payload behind this message; set by the transport.
    pub payload_len: U32,
    /// Pages that the operation names.
    pub count: U16,
    /// log2 of the page length: 12 or 13.
    pub page_shift: u8,
    /// How the request ended (replies).
    pub status: Status,
    /// Checksum (the requester's own, opaque to agents) of a single-page payload.
    pub check: U64,
    /// Node which shall get the reply of a delegated exchange (0 = the sender).
    pub reply_to: U64,
    /// Bit i is set if page i of the operation succeeded (replies).
    pub done: U64,
    /// Time which the request waited at the agent, in ns (replies).
    pub queue_ns: U32,
    /// Time which the agent worked on the request, in ns (replies).
    pub service_ns: U32,
    /// Frames free at the agent (replies).
    pub frames_free: U64,
    /// Age of the agent's oldest page in ms (replies).
    pub oldest_age_ms: U32,
    /// Pages which the sender may put before it is granted more (replies).
    pub credits: U32,
    /// Atomics: the value expected; hello reply: number of the session, another one if the workload's pages are gone.
    pub compare: U64,
    /// Atomics: the value to store or to add; hello: lease in ms; grant: pages announced; status reply: frames exported.
    pub value: U64,
    /// Zero.
    reserved: U64,
}

const _: () = assert!(size_of::<Control>() == CONTROL_LEN);
const _: () = assert!(align_of::<Control>() == 1);
const _: () = assert!(PAYLOAD_MAX <= u32::MAX as usize);
const _: () = assert!(DISCARD_MAX * 8 <= PAYLOAD_MAX && DISCARD_MAX <= u16::MAX as usize);
const _: () = assert!(PAGES_MAX <= u64::BITS as usize, "the done mask has a bit for each page");
const _: () = assert!(PAGE_LEN == 1 << PAGE_SHIFT);

/// Names one page of a vector: precedes the pages in the payload, one for each page, in order.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct PageDescriptor {
    /// Page id.
    pub page: U64,
    /// The requester's checksum of the page; stored and returned, never interpreted by agents.
    pub check: U64,
}

impl PageDescriptor {
    /// Length of a descriptor in bytes.
    pub const LEN: usize = size_of::<Self>();

    /// Names page `page` whose content has checksum `check`.
    pub fn new(page: u64, check: u64) -> Self {
        Self { page: U64::new(page), check: U64::new(check) }
    }
}

/// Why bytes are not a message of this protocol. The peer is told by a [`CloseCode`](crate::CloseCode).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Not `GMS1`.
    #[error("it does not start with GMS1, so it is no gms message")]
    Magic,
    /// Another version of the protocol.
    #[error(
        "it is of protocol version {theirs}, this build speaks version {VERSION}: use the same gms release on both sides"
    )]
    Version {
        /// The version that the message names.
        theirs: u8,
    },
    /// Operation or status outside their enums.
    #[error("operation {op} or status {status} does not exist")]
    Unknown {
        /// Byte of the operation.
        op: u8,
        /// Byte of the status.
        status: u8,
    },
    /// A flag of no meaning or a reserved field which is not zero.
    #[error("its reserved bits are not zero")]
    Reserved,
    /// A request where a reply is due, or the reverse.
    #[error("it is a request where a reply is due, or the reverse")]
    Direction,
    /// The reply does not match what was requested.
    #[error("the reply names another request than the one it answers")]
    Mismatch,
    /// `count` or `page_shift` outside the operation's limits.
    #[error("{op:?} of {count} pages of 2^{page_shift} bytes is outside the limits")]
    Pages {
        /// The operation.
        op: Op,
        /// Pages named.
        count: u16,
        /// log2 of their length.
        page_shift: u8,
    },
    /// Bits in the `done` mask beyond `count`.
    #[error("its done mask names pages which were not asked for")]
    Done,
    /// The payload's length is not the one that the operation has.
    #[error("{op:?} announces {len} bytes of payload where {expected} are due")]
    PayloadLen {
        /// The operation.
        op: Op,
        /// Length announced.
        len: u32,
        /// Length that the other fields imply.
        expected: u32,
    },
    /// The stream ended early.
    #[error("it ended after {got} of {expected} bytes")]
    Truncated {
        /// Bytes which came.
        got: u32,
        /// Bytes which were due.
        expected: u32,
    },
    /// The stream went on after the payload.
    #[error("bytes follow after its payload")]
    Trailing,
}

impl Control {
    /// A request without pages: sets operation, request id and workload, all else zero.
    pub fn request(op: Op, request: u64, workload: WorkloadId) -> Self {
        Self {
            magic: U32::new(MAGIC),
            version: VERSION,
            op,
            flags: U16::ZERO,
            request: U64::new(request),
            workload,
            page: U64::ZERO,
            epoch: U64::ZERO,
            payload_len: U32::ZERO,
            count: U16::ZERO,
            page_shift: 0,
            status: Status::Ok,
            check: U64::ZERO,
            reply_to: U64::ZERO,
            done: U64::ZERO,
            queue_ns: U32::ZERO,
            service_ns: U32::ZERO,
            frames_free: U64::ZERO,
            oldest_age_ms: U32::ZERO,
            credits: U32::ZERO,
            compare: U64::ZERO,
            value: U64::ZERO,
            reserved: U64::ZERO,
        }
    }

    /// Opens a session which shall outlive a silence of `lease_ms`.
    pub fn hello(request: u64, workload: WorkloadId, lease_ms: u64) -> Self {
        Self { value: U64::new(lease_ms), ..Self::request(Op::Hello, request, workload) }
    }

    /// Fetches page `page` of [`PAGE_LEN`] bytes.
    pub fn get(request: u64, workload: WorkloadId, page: u64) -> Self {
        Self { page: U64::new(page), ..Self::pages(Op::Get, request, workload, 1) }
    }

    /// Fetches `count` (2 to 64) pages; their descriptors are the payload.
    pub fn get_many(request: u64, workload: WorkloadId, count: u16) -> Self {
        Self::pages(Op::Get, request, workload, count)
    }

    /// Stores `count` (1 to 64) pages; their descriptors, then the pages, are the payload.
    pub fn put(request: u64, workload: WorkloadId, count: u16) -> Self {
        Self::pages(Op::Put, request, workload, count)
    }

    /// Forgets `count` (1 to [`DISCARD_MAX`]) pages; their ids (`u64`, little-endian) are the payload.
    pub fn discard(request: u64, workload: WorkloadId, count: u16) -> Self {
        Self { count: U16::new(count), ..Self::request(Op::Discard, request, workload) }
    }

    /// Announces `pages` pages to be put and asks for credits.
    pub fn grant(request: u64, workload: WorkloadId, pages: u64) -> Self {
        Self { value: U64::new(pages), ..Self::request(Op::Grant, request, workload) }
    }

    /// A reply to `self` with `status`: echoes what the requester checks, all else zero.
    pub fn reply(&self, status: Status) -> Self {
        Self {
            flags: U16::new(flags::REPLY),
            page: self.page,
            count: self.count,
            page_shift: self.page_shift,
            status,
            ..Self::request(self.op, self.request.get(), self.workload)
        }
    }

    /// True for replies.
    pub fn is_reply(&self) -> bool {
        self.flags.get() & flags::REPLY != 0
    }

    /// Bytes of one page of this message.
    pub fn page_len(&self) -> usize {
        1 << self.page_shift.min(PAGE_SHIFT_MAX)
    }

    /// Reads a control message and checks all that it says about itself.
    pub fn decode(bytes: &[u8; CONTROL_LEN]) -> Result<Self, DecodeError> {
        if bytes[..4] != MAGIC.to_le_bytes() {
            return Err(DecodeError::Magic);
        }
        let theirs = bytes[std::mem::offset_of!(Control, version)];
        if theirs != VERSION {
            return Err(DecodeError::Version { theirs });
        }
        let control = Self::try_read_from_bytes(bytes).map_err(|_| DecodeError::Unknown {
            op: bytes[std::mem::offset_of!(Control, op)],
            status: bytes[std::mem::offset_of!(Control, status)],
        })?;
        control.check()?;
        Ok(control)
    }

    /// Checks flags, page counts, mask and payload length against each other.
    pub fn check(&self) -> Result<(), DecodeError> {
        if self.flags.get() & !flags::ALL != 0 || self.reserved != U64::ZERO {
            return Err(DecodeError::Reserved);
        }
        let (count, page_shift) = (self.count.get(), self.page_shift);
        let in_limits = match self.op {
            Op::Get | Op::Put => {
                (1..=PAGES_MAX).contains(&usize::from(count))
                    && (PAGE_SHIFT..=PAGE_SHIFT_MAX).contains(&page_shift)
            }
            Op::Discard => (1..=DISCARD_MAX).contains(&usize::from(count)),
            _ => count == 0 && page_shift == 0,
        };
        if !in_limits {
            return Err(DecodeError::Pages { op: self.op, count, page_shift });
        }
        if self.done.get().checked_shr(u32::from(count)).unwrap_or(0) != 0 {
            return Err(DecodeError::Done);
        }
        let (len, expected) = (self.payload_len.get(), self.payload_due());
        if len != expected {
            return Err(DecodeError::PayloadLen { op: self.op, len, expected });
        }
        Ok(())
    }

    /// Checks that `reply` answers `self`.
    pub fn check_reply(&self, reply: &Control) -> Result<(), DecodeError> {
        let echoed = |c: &Control| (c.op, c.request, c.workload, c.page, c.count, c.page_shift);
        if !reply.is_reply() {
            return Err(DecodeError::Direction);
        }
        if echoed(self) != echoed(reply) {
            return Err(DecodeError::Mismatch);
        }
        Ok(())
    }

    /// Most bytes that the reply to this request may have, control message included.
    pub fn reply_max(&self) -> usize {
        let count = usize::from(self.count.get());
        CONTROL_LEN
            + match self.op {
                Op::Get if count == 1 => self.page_len(),
                Op::Get => count * (PageDescriptor::LEN + self.page_len()),
                _ => 0,
            }
    }

    /// Payload length which the other fields imply, in bytes. Fits as [`Control::check`] has bounded `count`.
    fn payload_due(&self) -> u32 {
        let (count, page) = (u32::from(self.count.get()), self.page_len() as u32);
        let descriptor = PageDescriptor::LEN as u32;
        match (self.op, self.is_reply()) {
            (Op::Get, false) if count == 1 => 0,
            (Op::Get, false) => count * descriptor,
            (Op::Get, true) if count == 1 => self.done.get().count_ones() * page,
            (Op::Get, true) => self.done.get().count_ones() * (descriptor + page),
            (Op::Put, false) => count * (descriptor + page),
            (Op::Discard, false) => count * 8,
            _ => 0,
        }
    }

    fn pages(op: Op, request: u64, workload: WorkloadId, count: u16) -> Self {
        Self {
            count: U16::new(count),
            page_shift: PAGE_SHIFT,
            ..Self::request(op, request, workload)
        }
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(if self.is_reply() { "Reply" } else { "Request" })
            .field("op", &self.op)
            .field("request", &self.request.get())
            .field("page", &self.page.get())
            .field("count", &self.count.get())
            .field("status", &self.status)
            .field("done", &format_args!("{:#x}", self.done.get()))
            .field("payload_len", &self.payload_len.get())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKLOAD: WorkloadId = WorkloadId([7; 16]);

    fn bytes(control: &Control) -> [u8; CONTROL_LEN] {
        control.as_bytes().try_into().unwrap()
    }

    #[test]
    fn what_constructors_make_decodes_to_itself() {
        let mut put = Control::put(1, WORKLOAD, 64);
        put.payload_len = U32::new(64 * (16 + 4096));
        let mut many = Control::get_many(2, WORKLOAD, 2);
        many.payload_len = U32::new(32);
        let mut discard = Control::discard(3, WORKLOAD, 4096);
        discard.payload_len = U32::new(4096 * 8);
        let mut got = Control::get(4, WORKLOAD, 9).reply(Status::Ok);
        got.done = U64::new(1);
        got.payload_len = U32::new(4096);
        let missed = Control::get(5, WORKLOAD, 9).reply(Status::NotFound);
        let hello = Control::hello(6, WORKLOAD, 5000);
        for control in [put, many, discard, got, missed, hello, Control::grant(7, WORKLOAD, 64)] {
            assert_eq!(Control::decode(&bytes(&control)), Ok(control));
        }
    }

    #[test]
    fn a_message_has_the_documented_bytes() {
        let control = Control::get(0x0102, WORKLOAD, 0x0a0b);
        let bytes = bytes(&control);
        assert_eq!(&bytes[..16], b"GMS1\x01\x02\0\0\x02\x01\0\0\0\0\0\0");
        assert_eq!(bytes[16..32], [7; 16]);
        assert_eq!(bytes[32..34], [0x0b, 0x0a]);
        assert_eq!(bytes[52..56], [1, 0, 12, 0]);
    }

    #[test]
    fn each_malformed_field_is_named() {
        let good = bytes(&Control::get(1, WORKLOAD, 9));
        let with = |at: usize, value: u8| {
            let mut bad = good;
            bad[at] = value;
            Control::decode(&bad).unwrap_err()
        };
        assert_eq!(with(0, b'X'), DecodeError::Magic);
        assert_eq!(with(4, 9), DecodeError::Version { theirs: 9 });
        assert_eq!(with(5, 0), DecodeError::Unknown { op: 0, status: 0 });
        assert_eq!(with(55, 99), DecodeError::Unknown { op: 2, status: 99 });
        assert_eq!(with(7, 0x80), DecodeError::Reserved);
        assert_eq!(with(127, 1), DecodeError::Reserved);
        let op = Op::Get;
        assert_eq!(with(52, 65), DecodeError::Pages { op, count: 65, page_shift: 12 });
        assert_eq!(with(54, 14), DecodeError::Pages { op, count: 1, page_shift: 14 });
        assert_eq!(with(48, 1), DecodeError::PayloadLen { op, len: 1, expected: 0 });
        assert_eq!(with(72, 2), DecodeError::Done);
    }

    #[test]
    fn no_reply_is_longer_than_its_request_allows() {
        for request in [
            Control::get(1, WORKLOAD, 9),
            Control::get_many(1, WORKLOAD, 64),
            Control::put(1, WORKLOAD, 64),
            Control::hello(1, WORKLOAD, 0),
        ] {
            let mut reply = request.reply(Status::Ok);
            reply.done =
                U64::new(u64::MAX.checked_shr(64 - u32::from(request.count.get())).unwrap_or(0));
            assert_eq!(CONTROL_LEN + reply.payload_due() as usize, request.reply_max());
        }
    }

    #[test]
    fn a_reply_to_another_request_is_refused() {
        let asked = Control::get(1, WORKLOAD, 9);
        assert_eq!(asked.check_reply(&asked), Err(DecodeError::Direction));
        assert_eq!(asked.check_reply(&asked.reply(Status::Ok)), Ok(()));
        let other = Control::get(1, WORKLOAD, 10).reply(Status::Ok);
        assert_eq!(asked.check_reply(&other), Err(DecodeError::Mismatch));
    }
}
