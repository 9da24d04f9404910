//! Newtypes for ids, addresses and amounts, so that no bare `u64` crosses a module.

use crate::limits::FRAME_BYTES;

/// A page-aligned virtual address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageAddr(u64);

impl PageAddr {
    /// The page which contains the byte `address`.
    pub const fn containing(address: u64) -> Self {
        Self(address & !(FRAME_BYTES - 1))
    }

    /// The address in bytes.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The page `bytes` further (backwards when negative); `None` beyond the ends of the address range.
    pub fn offset(self, bytes: i64) -> Option<Self> {
        self.0.checked_add_signed(bytes).map(Self::containing)
    }
}

/// An address space of the workload (a process, or processes which share their memory): never used again, however long the workload forks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpaceId(pub u64);

/// Names the content of one evicted page: unique within a workload, never used again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContentId(pub u64);

/// An agent, as numbered by its pager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AgentId(pub u8);

/// A number of page frames of 4096 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageCount(pub u64);

impl PageCount {
    /// The same amount in bytes.
    pub const fn bytes(self) -> Bytes {
        Bytes(self.0.saturating_mul(FRAME_BYTES))
    }
}

/// An amount of memory in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Whole frames that fit in this amount.
    pub const fn pages(self) -> PageCount {
        PageCount(self.0 / FRAME_BYTES)
    }

    /// What is left after `other` is taken away; zero at least.
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}
