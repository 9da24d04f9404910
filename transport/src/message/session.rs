//! Sessions: hellos, grants and the state of an agent.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{Body, Version};

/// The least version of the protocol that this build speaks.
pub const VERSION_MIN: u8 = Version::V1 as u8;
/// The greatest.
pub const VERSION_MAX: u8 = Version::V2 as u8;
/// Feature of a hello: pages have lengths of their own, see [`flags::LENGTHS`](super::flags::LENGTHS).
pub const FEATURE_LENGTHS: u64 = 1;
/// Feature of a hello: the feedback says which part of the pages is to be taken away ([`Feedback::recall`](super::Feedback::recall)).
pub const FEATURE_RECALL: u64 = 2;
/// What this build can do beyond its version, bit by bit.
const FEATURES: u64 = FEATURE_LENGTHS | FEATURE_RECALL;

/// The body of a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct HelloRequest {
    /// The lease asked for.
    pub lease_ms: u32,
    /// The versions that the requester speaks.
    pub version_min: u8,
    /// See [`HelloRequest::version_min`].
    pub version_max: u8,
    pub(super) zero: u16,
    /// What the requester can do: bits of which the other end knows no meaning are ignored.
    pub features: u64,
    /// Reserved: the requester's node. Its id is in its certificate.
    pub node: [u8; 16],
    /// Greater in each pager of a workload than in the one before it; 0: unknown. What an earlier one has sent and comes later is denied.
    pub incarnation: u64,
    pub(super) zero_end: [u8; 40],
}

impl HelloRequest {
    /// This build's.
    pub(super) fn new() -> HelloRequest {
        HelloRequest {
            lease_ms: 0,
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            zero: 0,
            features: FEATURES,
            node: [0; 16],
            incarnation: 0,
            zero_end: [0; 40],
        }
    }
}

impl Body for HelloRequest {
    fn is_valid(&self) -> bool {
        let ordered = self.version_min <= self.version_max;
        self.zero == 0 && self.zero_end == [0; 40] && ordered
    }
}

/// What follows the feedback in the reply to a hello. The number of the session is in the header.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
#[repr(C)]
pub struct HelloReply {
    /// The lease granted.
    pub lease_ms: u32,
    pub(super) zero: u32,
    /// What both ends can do.
    pub features: u64,
    /// Reserved: the agent's node. Its id is in its certificate.
    pub node: [u8; 16],
    /// Counts the starts of that node.
    pub incarnation: u64,
    pub(super) zero_end: u64,
}

impl HelloReply {
    /// Grants a lease to whoever can do `features`.
    pub fn new(lease_ms: u32, features: u64) -> HelloReply {
        HelloReply { lease_ms, features: features & FEATURES, ..HelloReply::default() }
    }
}

impl Body for HelloReply {
    fn is_valid(&self) -> bool {
        self.zero == 0 && self.zero_end == 0
    }
}

/// The body of a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct GrantRequest {
    /// Pages that will be put.
    pub pages: u64,
    pub(super) zero: [u64; 9],
}

impl GrantRequest {
    pub(super) fn new(pages: u64) -> GrantRequest {
        GrantRequest { pages, zero: [0; 9] }
    }
}

impl Body for GrantRequest {
    fn is_valid(&self) -> bool {
        self.zero == [0; 9]
    }
}

/// What follows the feedback in the reply to a status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct StatusReply {
    /// Frames exported.
    pub frames: u64,
    pub(super) zero: [u64; 5],
}

impl StatusReply {
    /// Of an agent that exports `frames`.
    pub fn new(frames: u64) -> StatusReply {
        StatusReply { frames, zero: [0; 5] }
    }
}

impl Body for StatusReply {
    fn is_valid(&self) -> bool {
        self.zero == [0; 5]
    }
}
