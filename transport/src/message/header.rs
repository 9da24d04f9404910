//! What all messages have in common.

use std::fmt;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Versions of the protocol that this build speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Version {
    /// The version before.
    V1 = 1,
    /// This build's own.
    V2 = 2,
}

/// Bits of the header's flags.
pub mod flags {
    /// The message is a reply.
    pub const REPLY: u8 = 1;
    /// The [`Priority`](super::Priority): two bits.
    pub const PRIORITY: u8 = 6;
    /// Each page has a length of its own, named by its descriptor.
    pub const LENGTHS: u8 = 8;
    /// Every flag of this version; any other bit is refused.
    pub const ALL: u8 = REPLY | PRIORITY | LENGTHS;
}

/// How urgent a message is. On the wire the more urgent goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// A thread waits for it.
    #[default]
    Demand = 0,
    /// Fetched ahead of need.
    Ahead = 1,
    /// Write-back, discards, all else.
    Bulk = 2,
}

impl Priority {
    pub(super) fn bits(self) -> u8 {
        (self as u8) << flags::PRIORITY.trailing_zeros()
    }

    pub(super) fn from_bits(bits: u8) -> Priority {
        match (bits & flags::PRIORITY) >> flags::PRIORITY.trailing_zeros() {
            0 => Priority::Demand,
            1 => Priority::Ahead,
            _ => Priority::Bulk,
        }
    }
}

/// What a message asks for, or answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// Opens a workload's session on this link.
    Hello = 1,
    /// Fetch one page (named in the body) or a vector of 2 to 64 (named by descriptors).
    Get = 2,
    /// Store 1 to 64 pages: their descriptors, then the pages.
    Put = 3,
    /// Forget pages: their ids, 8 bytes each.
    Discard = 4,
    /// Ask for credits.
    Grant = 5,
    /// Ask for the agent's state.
    Status = 6,
    /// End of the workload: its pages are freed.
    Goodbye = 7,
    /// Reserved: a request that a third node answers.
    Delegate = 8,
    /// Reserved: global memory management's epochs.
    Epoch = 9,
    /// Reserved: remote atomics.
    Atomic = 10,
    /// Reserved: a block of the cluster's file cache.
    Block = 11,
    /// What an agent tells another of the members: a packet of SWIM.
    Gossip = 12,
    /// Ask which agents are members.
    Members = 13,
}

impl Op {
    /// Every operation that this build knows.
    pub const ALL: [Op; 13] = [
        Op::Hello,
        Op::Get,
        Op::Put,
        Op::Discard,
        Op::Grant,
        Op::Status,
        Op::Goodbye,
        Op::Delegate,
        Op::Epoch,
        Op::Atomic,
        Op::Block,
        Op::Gossip,
        Op::Members,
    ];

    /// Whether version 1 of the protocol has it.
    pub(super) fn is_of_version_1(self) -> bool {
        (self as u8) < Op::Block as u8
    }

    pub(super) fn from_byte(byte: u8) -> Option<Op> {
        Op::ALL.into_iter().find(|op| *op as u8 == byte)
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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

impl Status {
    /// Every status.
    pub const ALL: [Status; 8] = [
        Status::Ok,
        Status::NotFound,
        Status::Full,
        Status::Draining,
        Status::Denied,
        Status::Invalid,
        Status::Unsupported,
        Status::Failed,
    ];

    pub(super) fn from_byte(byte: u8) -> Option<Status> {
        Status::ALL.get(usize::from(byte)).copied()
    }
}

/// The workload within a client: with the client's certificate it names the tenant. Random, so never guessed.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
#[repr(transparent)]
pub struct WorkloadId(pub [u8; 16]);

impl fmt::Display for WorkloadId {
    /// The first eight bytes: enough to tell workloads apart in a log, too few to speak for one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().take(8).try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Why bytes are not a message of this protocol. The peer is told by a [`CloseCode`](crate::CloseCode).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Neither `GMS2` nor, where that was agreed on, `GMS1`.
    #[error("it does not begin as a gms message of the version agreed on")]
    Magic,
    /// Another version of the protocol.
    #[error(
        "it is of protocol version {theirs}, this build speaks versions 1 and 2: use gms releases that are next to each other"
    )]
    Version {
        /// The version that the message names.
        theirs: u8,
    },
    /// A status that does not exist, or (version 1) an operation.
    #[error("operation {op} or status {status} does not exist")]
    Unknown {
        /// Byte of the operation.
        op: u8,
        /// Byte of the status.
        status: u8,
    },
    /// A flag of no meaning, or a status in a request.
    #[error("its reserved bits are not zero")]
    Reserved,
    /// A request where a reply is due, or the reverse.
    #[error("it is a request where a reply is due, or the reverse")]
    Direction,
    /// The reply does not match what was requested.
    #[error("the reply names another request than the one it answers")]
    Mismatch,
    /// A value outside its bounds, a reserved field that is not zero, or a `done` mask that names pages which were not asked for.
    #[error("{op:?} of {count} pages: its body is outside the limits")]
    Body {
        /// The operation.
        op: Op,
        /// Pages named.
        count: u16,
    },
    /// The payload's length is not one that the operation has.
    #[error("operation {op} announces {len} bytes of payload where {expected} are due")]
    PayloadLen {
        /// Byte of the operation.
        op: u8,
        /// Length announced.
        len: u32,
        /// Length that the other fields imply; the greatest, where they allow several.
        expected: u32,
    },
    /// It needs what came with version 2, and the peer speaks version 1.
    #[error("the peer speaks version 1 of the protocol, which has no such message")]
    TooNew,
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
