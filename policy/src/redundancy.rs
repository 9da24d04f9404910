//! Which agents hold a page: a set of them, which has a number.
//!
//! A page's entry has room for a few bits. The agents of a workload form few sets in the life of a session, since pages are placed by the batch: a number
//! for each that was ever used is enough.

use crate::ids::AgentId;
use crate::limits::AGENTS_MAX;
use std::collections::BTreeMap;

const _: () = assert!(AGENTS_MAX <= u64::BITS as usize, "a bit for each agent");
const _: () = assert!(AGENTS_MAX <= 1 << PlacementId::BITS, "a number for each agent alone");

/// Agents of one pager, as a set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AgentSet(u64);

impl AgentSet {
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
        (0..AGENTS_MAX as u8).map(AgentId).filter(move |&agent| self.has(agent))
    }
}

impl FromIterator<AgentId> for AgentSet {
    fn from_iter<I: IntoIterator<Item = AgentId>>(agents: I) -> Self {
        agents.into_iter().fold(Self::default(), |set, agent| set.union(Self::of(agent)))
    }
}

/// The number of a set of agents, in one session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacementId(u16);

impl PlacementId {
    /// Bits that it takes.
    pub const BITS: u32 = 10;
    /// Those bits, the lowest of a word.
    pub const MASK: u64 = (1 << Self::BITS) - 1;

    /// The number in the lowest bits of a word.
    pub const fn from_bits(word: u64) -> Self {
        Self((word & Self::MASK) as u16)
    }

    /// The number, in the lowest bits of a word.
    pub const fn bits(self) -> u64 {
        self.0 as u64
    }
}

/// The sets of a session and their numbers: the first ones are of each agent alone, the others of sets in the order in which they were used first.
#[derive(Clone, Debug)]
pub struct Placements {
    sets: Vec<AgentSet>,
    ids: BTreeMap<AgentSet, PlacementId>,
}

impl Default for Placements {
    fn default() -> Self {
        let sets = (0..AGENTS_MAX as u8).map(|agent| AgentSet::of(AgentId(agent))).collect();
        Self { sets, ids: BTreeMap::new() }
    }
}

impl Placements {
    /// The number of a set; `None` if it has none and there is none left.
    pub fn id(&mut self, set: AgentSet) -> Option<PlacementId> {
        if set.len() == 1 {
            return Some(PlacementId(set.0.trailing_zeros() as u16));
        }
        if let Some(id) = self.ids.get(&set) {
            return Some(*id);
        }
        let id = u16::try_from(self.sets.len()).ok().filter(|id| *id < 1 << PlacementId::BITS)?;
        self.sets.push(set);
        self.ids.insert(set, PlacementId(id));
        Some(PlacementId(id))
    }

    /// The set of a number; empty if there is none.
    pub fn agents(&self, id: PlacementId) -> AgentSet {
        self.sets.get(usize::from(id.0)).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_number_stands_for_one_set_as_long_as_there_are_numbers(
            sets in prop::collection::vec(any::<u64>().prop_map(AgentSet), 1..2000),
        ) {
            let mut placements = Placements::default();
            let ids: Vec<_> = sets.iter().map(|&set| placements.id(set)).collect();
            for (&set, id) in sets.iter().zip(&ids) {
                prop_assert_eq!(placements.id(set), *id);
                if let Some(id) = *id {
                    prop_assert_eq!(placements.agents(id), set);
                    prop_assert_eq!(PlacementId::from_bits(id.bits() | 1 << PlacementId::BITS), id);
                }
            }
            let several: std::collections::BTreeSet<_> =
                sets.iter().filter(|set| set.len() != 1).collect();
            let numbered = several.iter().filter(|&&&set| placements.ids.contains_key(&set));
            let room = (1 << PlacementId::BITS) - AGENTS_MAX;
            prop_assert_eq!(numbered.count(), several.len().min(room));
        }

        #[test]
        fn a_set_is_its_agents(numbers in prop::collection::btree_set(0..AGENTS_MAX as u8, 0..20)) {
            let agents: Vec<AgentId> = numbers.into_iter().map(AgentId).collect();
            let set: AgentSet = agents.iter().copied().collect();
            prop_assert_eq!(set.agents().collect::<Vec<_>>(), agents.clone());
            prop_assert_eq!(set.len() as usize, agents.len());
            for agent in agents {
                let rest = set.without(AgentSet::of(agent));
                prop_assert!(!rest.has(agent) && rest.union(AgentSet::of(agent)) == set);
            }
        }
    }

    #[test]
    fn an_agent_alone_has_a_number_when_no_other_set_has_one_left() {
        let mut placements = Placements::default();
        let pair = |n: u64| AgentSet(n << 6 | 1 << 5);
        let left = (1..4000).filter(|&n| placements.id(pair(n)).is_none()).count();
        assert_eq!(left, 3999 - ((1 << PlacementId::BITS) - AGENTS_MAX));
        let last = AgentSet::of(AgentId(AGENTS_MAX as u8 - 1));
        let id = placements.id(last).expect("a number");
        assert_eq!(placements.agents(id), last);
    }
}
