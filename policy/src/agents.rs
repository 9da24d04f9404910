//! Agents, as a set.

use crate::ids::AgentId;
use crate::limits::AGENTS_MAX;

const _: () = assert!(AGENTS_MAX <= u64::BITS as usize, "a bit for each agent");

/// Agents of one pager, as a set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AgentSet(pub(crate) u64);

impl AgentSet {
    /// A bit for each agent.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// The agents whose bits are set.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// No agent.
    pub const EMPTY: Self = Self(0);

    /// Just this agent.
    ///
    /// # Panics
    /// If it is not one of [`AGENTS_MAX`].
    pub const fn of(agent: AgentId) -> Self {
        assert!((agent.0 as usize) < AGENTS_MAX, "more agents than there may be");
        Self(1 << agent.0)
    }

    /// Whether the agent is one of them.
    pub const fn has(self, agent: AgentId) -> bool {
        self.0 & Self::of(agent).0 != 0
    }

    /// These, and those.
    pub const fn union(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    /// These, but for those.
    pub const fn without(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }

    /// How many there are.
    pub const fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Whether there is none.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Each of them, in the order of their numbers.
    pub fn agents(self) -> impl Iterator<Item = AgentId> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let next = left.trailing_zeros();
            left &= left.checked_sub(1)?;
            Some(AgentId(next as u8))
        })
    }
}

impl FromIterator<AgentId> for AgentSet {
    fn from_iter<I: IntoIterator<Item = AgentId>>(agents: I) -> Self {
        agents.into_iter().fold(Self::default(), |set, agent| set.union(Self::of(agent)))
    }
}
