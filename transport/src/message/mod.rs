//! The control message: exactly 128 bytes, little-endian, versioned, with an optional payload behind it.
//!
//! A message is a header of 48 bytes, the same for all, and a body of 80. A request's body belongs to its operation
//! ([`pages`], [`session`], [`reserved`]); a reply's begins with [`Feedback`], and 48 bytes of its operation follow.
//! The layout is documented byte by byte in `docs/protocol.md`. The form (a short fixed control message with an attached
//! payload of up to a page or a vector of pages) is that of Trapeze/GMS (Duke, 1997).
//!
//! A [`Control`] can only be had from a constructor or from [`Control::decode`], so its version, flags and status are
//! valid, and its lengths are those of its operation; [`Control::check`] says what that means. Operations that this build
//! does not know are passed on, for [`Status::Unsupported`] to be answered.
//!
//! This build speaks version 2 and the one before it ([`v1`]): which is agreed on when the link is made.

mod feedback;
mod header;
pub mod members;
mod pages;
mod reserved;
mod session;
#[cfg(test)]
mod tests;
pub(crate) mod v1;

use std::fmt;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub use self::feedback::Feedback;
pub use self::header::{DecodeError, Op, Priority, Status, Version, WorkloadId, flags};
pub use self::members::{GossipReply, MemberEntry, MembersReply, Zone};
pub use self::pages::{DiscardReply, DiscardRequest, PageDescriptor, PagesReply, PagesRequest};
pub use self::reserved::{AtomicReply, AtomicRequest, BlockRequest, EpochRequest};
pub use self::session::{
    FEATURE_LENGTHS, FEATURE_RECALL, GrantRequest, HelloReply, HelloRequest, StatusReply,
    VERSION_MAX, VERSION_MIN,
};

/// Length of a control message in bytes.
pub const CONTROL_LEN: usize = 128;
/// First four bytes of every control message: `GMS2`.
pub const MAGIC: u32 = u32::from_le_bytes(*b"GMS2");
/// Bytes of a page frame.
pub const PAGE_LEN: usize = 4096;
/// log2 of [`PAGE_LEN`].
pub const PAGE_SHIFT: u8 = 12;
/// Greatest `page_shift` that a message may name (8 KiB pages).
pub const PAGE_SHIFT_MAX: u8 = 13;
/// Bytes by which a page may be longer than its frame when it carries a tag.
pub const TAG_LEN: usize = 16;
/// Most pages that one message may carry.
pub const PAGES_MAX: usize = 64;
/// Most payload bytes that one message may carry: 64 descriptors and 64 pages of 8 KiB with their tags.
pub const PAYLOAD_MAX: usize = PAGES_MAX * (PageDescriptor::LEN + (1 << PAGE_SHIFT_MAX) + TAG_LEN);
/// Most page ids that one discard may carry.
pub const DISCARD_MAX: usize = 4096;

const BODY_LEN: usize = 80;
const ANSWER_LEN: usize = BODY_LEN - size_of::<Feedback>();

#[cfg(not(target_endian = "little"))]
compile_error!("messages are read in place: gms needs a little-endian CPU");

/// A control message as it travels.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C, align(8))]
pub struct Control {
    magic: u32,
    version: u8,
    op: u8,
    status: u8,
    flags: u8,
    /// Chosen by the requester, unique for its node; echoed by the reply.
    pub request: u64,
    /// The session in which the request is made: the link's if 0. In the reply to a hello, the number of the session:
    /// another one than before means that the workload's pages are gone.
    pub session: u64,
    /// The workload within the client: with the client's certificate it names the tenant. Echoed.
    pub workload: WorkloadId,
    /// After this time, in us, nobody waits for the reply any more (0 = not known).
    pub deadline_us: u32,
    /// Bytes of payload behind this message; set by the transport.
    pub payload_len: u32,
    body: [u8; BODY_LEN],
}

const _: () = assert!(size_of::<Control>() == CONTROL_LEN);
const _: () = assert!(PAYLOAD_MAX <= u32::MAX as usize);
const _: () = assert!(DISCARD_MAX * 8 <= PAYLOAD_MAX && DISCARD_MAX <= u16::MAX as usize);
const _: () = assert!(PAGES_MAX <= u64::BITS as usize, "the done mask has a bit for each page");
const _: () = assert!(PAGE_LEN == 1 << PAGE_SHIFT);

/// The body of a request, or what follows the feedback in that of a reply.
///
/// Reserved fields are zero: [`Body::is_valid`] says so of what came from outside.
pub trait Body: FromBytes + IntoBytes + Immutable + Copy {
    /// Whether its values are within their bounds, and its reserved fields zero.
    fn is_valid(&self) -> bool;
}

/// A body without fields.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Nothing<const LEN: usize>([u8; LEN]);

impl<const LEN: usize> Body for Nothing<LEN> {
    fn is_valid(&self) -> bool {
        self.0 == [0; LEN]
    }
}

impl Control {
    /// A request without pages.
    pub fn request(op: Op, request: u64, workload: WorkloadId) -> Control {
        Control {
            magic: MAGIC,
            version: Version::V2 as u8,
            op: op as u8,
            status: Status::Ok as u8,
            flags: 0,
            request,
            session: 0,
            workload,
            deadline_us: 0,
            payload_len: 0,
            body: [0; BODY_LEN],
        }
    }

    /// Opens a session which shall outlive a silence of `lease_ms`.
    pub fn hello(request: u64, workload: WorkloadId, lease_ms: u64) -> Control {
        Control::hello_of(request, workload, lease_ms, 0)
    }

    /// The same, of that [incarnation](HelloRequest::incarnation) of the workload's pager.
    pub fn hello_of(
        request: u64,
        workload: WorkloadId,
        lease_ms: u64,
        incarnation: u64,
    ) -> Control {
        let lease_ms = lease_ms.try_into().unwrap_or(u32::MAX);
        let hello = HelloRequest { lease_ms, incarnation, ..HelloRequest::new() };
        Control::request(Op::Hello, request, workload).with(hello)
    }

    /// Fetches page `page` of [`PAGE_LEN`] bytes.
    pub fn get(request: u64, workload: WorkloadId, page: u64) -> Control {
        let pages = PagesRequest { page, ..PagesRequest::new(1) };
        Control::request(Op::Get, request, workload).with(pages)
    }

    /// Fetches `count` (2 to 64) pages; their descriptors are the payload.
    pub fn get_many(request: u64, workload: WorkloadId, count: u16) -> Control {
        Control::request(Op::Get, request, workload).with(PagesRequest::new(count))
    }

    /// Stores `count` (1 to 64) pages; their descriptors, then the pages, are the payload.
    pub fn put(request: u64, workload: WorkloadId, count: u16) -> Control {
        Control::request(Op::Put, request, workload).with(PagesRequest::new(count))
    }

    /// Forgets `count` (1 to [`DISCARD_MAX`]) pages; their ids (`u64`) are the payload.
    pub fn discard(request: u64, workload: WorkloadId, count: u16) -> Control {
        Control::request(Op::Discard, request, workload).with(DiscardRequest::new(count))
    }

    /// Announces `pages` pages to be put and asks for credits.
    pub fn grant(request: u64, workload: WorkloadId, pages: u64) -> Control {
        Control::request(Op::Grant, request, workload).with(GrantRequest::new(pages))
    }

    /// A reply to `self` with `status`: echoes what the requester checks, all else zero.
    pub fn reply(&self, status: Status) -> Control {
        let mut reply =
            Control { op: self.op, ..Control::request(Op::Status, self.request, self.workload) };
        (reply.status, reply.flags) = (status as u8, flags::REPLY | (self.flags & flags::PRIORITY));
        (reply.session, reply.version, reply.magic) = (self.session, self.version, self.magic);
        match self.op() {
            Some(Op::Get | Op::Put) => reply.with_answer(PagesReply::to(&self.body())),
            Some(Op::Discard) => reply.with_answer(DiscardReply::to(&self.body())),
            _ => reply,
        }
    }

    /// The same message of another session.
    pub fn with_session(self, session: u64) -> Control {
        Control { session, ..self }
    }

    /// The same request with this body.
    pub fn with<B: Body>(mut self, body: B) -> Control {
        self.body.copy_from_slice(body.as_bytes());
        self
    }

    /// The same reply with this answer behind its feedback.
    pub fn with_answer<B: Body>(mut self, answer: B) -> Control {
        self.body[size_of::<Feedback>()..].copy_from_slice(answer.as_bytes());
        self
    }

    /// The same reply to a get or a put, which has succeeded for the pages `done`; others have no such mask.
    pub fn with_done(self, done: u64) -> Control {
        match self.op() {
            Some(Op::Get | Op::Put) => self.with_answer(PagesReply { done, ..self.answer() }),
            _ => self,
        }
    }

    /// The same reply to a get of one page, whose checksum was stored as `check`.
    pub fn with_check(self, check: u64) -> Control {
        self.with_answer(PagesReply { check, ..self.answer() })
    }

    /// The same reply to a get of one page, which takes `length` bytes in this message.
    pub fn with_length(self, length: u16) -> Control {
        self.with_lengths().with_answer(PagesReply { length, ..self.answer() })
    }

    /// The same get or put, or reply to one, whose pages have lengths of their own.
    pub fn with_lengths(mut self) -> Control {
        self.flags |= flags::LENGTHS;
        self
    }

    /// The same reply with this feedback.
    pub fn with_feedback(mut self, feedback: Feedback) -> Control {
        self.body[..size_of::<Feedback>()].copy_from_slice(feedback.as_bytes());
        self
    }

    /// The same message with this priority.
    pub fn with_priority(mut self, priority: Priority) -> Control {
        self.flags = (self.flags & !flags::PRIORITY) | priority.bits();
        self
    }

    // ---- what it says

    /// What is asked for or answered; `None` if this build does not know it.
    pub fn op(&self) -> Option<Op> {
        Op::from_byte(self.op)
    }

    /// How the request ended (replies).
    pub fn status(&self) -> Status {
        Status::from_byte(self.status).unwrap_or(Status::Failed)
    }

    /// How urgent it is.
    pub fn priority(&self) -> Priority {
        Priority::from_bits(self.flags)
    }

    /// Whether each of its pages has a length of its own.
    pub fn has_lengths(&self) -> bool {
        self.flags & flags::LENGTHS != 0
    }

    /// True for replies.
    pub fn is_reply(&self) -> bool {
        self.flags & flags::REPLY != 0
    }

    /// The body of a request, whose operation must be the one that has it.
    pub fn body<B: Body>(&self) -> B {
        B::read_from_bytes(&self.body).expect("a body has 80 bytes")
    }

    /// What follows the feedback in the body of a reply, whose operation must be the one that has it.
    pub fn answer<B: Body>(&self) -> B {
        let answer = &self.body[size_of::<Feedback>()..];
        B::read_from_bytes(answer).expect("an answer has 48 bytes")
    }

    /// What a reply says of its node.
    pub fn feedback(&self) -> Feedback {
        let feedback = &self.body[..size_of::<Feedback>()];
        Feedback::read_from_bytes(feedback).expect("feedback has 32 bytes")
    }

    /// Pages that it names: by descriptors, by ids, or the single one.
    pub fn count(&self) -> u16 {
        match (self.op(), self.is_reply()) {
            (Some(Op::Get | Op::Put), false) => self.body::<PagesRequest>().count,
            (Some(Op::Get | Op::Put), true) => self.answer::<PagesReply>().count,
            (Some(Op::Discard), false) => self.body::<DiscardRequest>().count,
            (Some(Op::Discard), true) => self.answer::<DiscardReply>().count,
            _ => 0,
        }
    }

    // ---- from outside

    /// Reads a control message and checks all that it says about itself.
    ///
    /// # Errors
    /// What is wrong with it; nothing of it may be used.
    pub fn decode(bytes: &[u8; CONTROL_LEN]) -> Result<Control, DecodeError> {
        if bytes[..4] != MAGIC.to_le_bytes() {
            return Err(DecodeError::Magic);
        }
        let control = Control::read_from_bytes(bytes).expect("a message has 128 bytes");
        if control.version != Version::V2 as u8 {
            return Err(DecodeError::Version { theirs: control.version });
        }
        control.check()?;
        Ok(control)
    }

    /// Checks flags, page counts, mask and payload length against each other.
    ///
    /// # Errors
    /// What contradicts what.
    pub fn check(&self) -> Result<(), DecodeError> {
        let reply = self.is_reply();
        let priority = self.flags & flags::PRIORITY;
        if self.flags & !flags::ALL != 0
            || priority == flags::PRIORITY
            || (!reply && self.status != 0)
        {
            return Err(DecodeError::Reserved);
        }
        if Status::from_byte(self.status).is_none() {
            return Err(DecodeError::Unknown { op: self.op, status: self.status });
        }
        let Some(op) = self.op() else {
            // Not ours to judge. Its payload is bounded, and nobody looks at it.
            return self.check_payload(0..=PAYLOAD_MAX as u32);
        };
        let of_pages = matches!(op, Op::Get | Op::Put);
        if self.has_lengths() && !of_pages {
            return Err(DecodeError::Reserved);
        }
        let valid = match (op, reply) {
            (Op::Get | Op::Put, false) => self.body::<PagesRequest>().is_valid(),
            (Op::Get | Op::Put, true) => {
                let pages: PagesReply = self.answer();
                let has_length = op == Op::Get && pages.count == 1 && self.has_lengths();
                pages.is_valid() && (has_length || pages.length == 0)
            }
            (Op::Discard, false) => self.body::<DiscardRequest>().is_valid(),
            (Op::Discard, true) => self.answer::<DiscardReply>().is_valid(),
            (Op::Hello, false) => self.body::<HelloRequest>().is_valid(),
            (Op::Hello, true) => self.answer::<HelloReply>().is_valid(),
            (Op::Grant, false) => self.body::<GrantRequest>().is_valid(),
            (Op::Status | Op::Grant, true) => self.answer::<StatusReply>().is_valid(),
            (Op::Atomic, false) => self.body::<AtomicRequest>().is_valid(),
            (Op::Atomic, true) => self.answer::<AtomicReply>().is_valid(),
            (Op::Epoch, false) => self.body::<EpochRequest>().is_valid(),
            (Op::Block, false) => self.body::<BlockRequest>().is_valid(),
            (Op::Gossip, true) => self.answer::<GossipReply>().is_valid(),
            (Op::Members, true) => self.answer::<MembersReply>().is_valid(),
            (Op::Status | Op::Goodbye | Op::Delegate | Op::Gossip | Op::Members, false) => {
                self.body::<Nothing<BODY_LEN>>().is_valid()
            }
            (_, true) => self.answer::<Nothing<ANSWER_LEN>>().is_valid(),
        };
        if !valid || (reply && !self.feedback().is_valid()) {
            return Err(DecodeError::Body { op, count: self.count() });
        }
        self.check_payload(self.payload_due(op))
    }

    fn check_payload(&self, due: std::ops::RangeInclusive<u32>) -> Result<(), DecodeError> {
        match due.contains(&self.payload_len) {
            true => Ok(()),
            false => Err(DecodeError::PayloadLen {
                op: self.op,
                len: self.payload_len,
                expected: *due.end(),
            }),
        }
    }

    /// Checks that `reply` answers `self`.
    ///
    /// # Errors
    /// If it is no reply, or to something else.
    pub fn check_reply(&self, reply: &Control) -> Result<(), DecodeError> {
        if !reply.is_reply() {
            return Err(DecodeError::Direction);
        }
        let echoed = |c: &Control| (c.op, c.request, c.workload);
        let session = self.op() == Some(Op::Hello) || self.session == reply.session;
        // An operation that is not known has no pages to echo.
        let pages = match self.op() {
            Some(Op::Get | Op::Put) => {
                PagesReply::to(&self.body()).echoes(&reply.answer::<PagesReply>())
            }
            _ => self.count() == reply.count(),
        };
        let lengths = self.has_lengths() || !reply.has_lengths();
        match echoed(self) == echoed(reply) && session && pages && lengths {
            true => Ok(()),
            false => Err(DecodeError::Mismatch),
        }
    }

    /// Most bytes that the reply to this request may have, control message included.
    pub fn reply_max(&self) -> usize {
        let payload = match (self.op(), self.is_reply()) {
            (Some(Op::Get), false) => self.body::<PagesRequest>().reply_max(),
            (Some(Op::Members), false) => members::MEMBERS_MAX * MemberEntry::LEN,
            _ => 0,
        };
        CONTROL_LEN + payload
    }

    /// Payload lengths that the other fields allow.
    fn payload_due(&self, op: Op) -> std::ops::RangeInclusive<u32> {
        match (op, self.is_reply()) {
            (Op::Get | Op::Put, false) => self.body::<PagesRequest>().payload_due(op, self.flags),
            (Op::Get, true) => self.answer::<PagesReply>().payload_due(self.flags),
            (Op::Discard, false) => {
                let ids = u32::from(self.body::<DiscardRequest>().count) * 8;
                ids..=ids
            }
            (Op::Gossip, false) => 1..=members::GOSSIP_LEN_MAX as u32,
            (Op::Members, true) => {
                let entries = usize::from(self.answer::<MembersReply>().count) * MemberEntry::LEN;
                entries as u32..=entries as u32
            }
            _ => 0..=0,
        }
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct(if self.is_reply() { "Reply" } else { "Request" });
        match self.op() {
            Some(op) => debug.field("op", &op),
            None => debug.field("op", &self.op),
        };
        debug
            .field("request", &self.request)
            .field("session", &self.session)
            .field("count", &self.count())
            .field("status", &self.status())
            .field("payload_len", &self.payload_len)
            .finish_non_exhaustive()
    }
}
