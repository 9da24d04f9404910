//! Operations that are laid out and not done yet: agents answer them by [`Status::Unsupported`](super::Status).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Body;

/// The body of an atomic.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
#[repr(C)]
pub struct AtomicRequest {
    /// The page.
    pub page: u64,
    /// Byte in it of the word, a multiple of eight.
    pub offset: u32,
    /// 0: compare and swap; 1: add.
    pub kind: u32,
    /// The value expected.
    pub compare: u64,
    /// The value to store or to add.
    pub operand: u64,
    pub(super) zero: [u64; 6],
}

impl Body for AtomicRequest {
    fn is_valid(&self) -> bool {
        self.zero == [0; 6] && self.kind <= 1 && self.offset.is_multiple_of(8)
    }
}

/// What follows the feedback in the reply to an atomic.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
#[repr(C)]
pub struct AtomicReply {
    /// The value before.
    pub before: u64,
    pub(super) zero: [u64; 5],
}

impl Body for AtomicReply {
    fn is_valid(&self) -> bool {
        self.zero == [0; 5]
    }
}

/// The body of an epoch.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
#[repr(C)]
pub struct EpochRequest {
    /// The epoch.
    pub epoch: u64,
    /// The node's weight in it: the share of all evicted pages that it takes, in 2^-32.
    pub weight: u32,
    /// Pages younger than this are not replaced, in ms.
    pub age_min_ms: u32,
    pub(super) zero: [u64; 8],
}

impl Body for EpochRequest {
    fn is_valid(&self) -> bool {
        self.zero == [0; 8]
    }
}

/// The body of a request for a block of a file.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
#[repr(C)]
pub struct BlockRequest {
    /// The object.
    pub object: [u8; 16],
    /// The block in it.
    pub block: u64,
    /// The version of the object that is wanted.
    pub version: u64,
    pub(super) zero: [u64; 6],
}

impl Body for BlockRequest {
    fn is_valid(&self) -> bool {
        self.zero == [0; 6]
    }
}
