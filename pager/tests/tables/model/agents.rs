//! The agents: what they store, forget and lose.

use std::collections::{BTreeMap, BTreeSet};

use gms_pager::tables::WriteOutcome;
use gms_policy::ids::{AgentId, ContentId, SpaceId};
use gms_policy::redundancy::{AgentSet, Copies, Shortage};

use super::{AGENTS, Model, hash};

impl Model {
    pub(super) fn restart(&mut self, agent: AgentId) {
        if self.tables.depends_on(agent) {
            return;
        }
        // What it has stored it may have said, which is heard of later.
        self.writes.iter_mut().filter(|(to, ..)| *to == agent).for_each(|write| write.2 = false);
        self.agents.get_mut(&agent).unwrap().clear();
        self.tables.lose(agent);
    }

    /// One of them: those of a batch end in any order. Two bits of `outcomes` for each page say what becomes of it.
    pub(super) fn end_write(&mut self, outcomes: u32) {
        if self.writes.is_empty() {
            return;
        }
        let (agent, batch, lasts) = self.writes.remove(outcomes as usize % self.writes.len());
        for (i, (slot, id, check)) in batch.into_iter().enumerate() {
            let (is_kept, outcome) = match outcomes >> (2 * i % 32) & 3 {
                3 => (true, WriteOutcome::Stored),
                2 => (true, WriteOutcome::Failed),
                1 => (false, WriteOutcome::Failed),
                _ => (false, WriteOutcome::Unsent),
            };
            if is_kept && lasts {
                let tag = self.frames[&slot];
                assert_eq!(hash(tag), check, "a slot was reused before its write ended");
                let before = self.agents.get_mut(&agent).unwrap().insert(id, tag);
                assert!(before.is_none_or(|b| b == tag), "a content id was used twice");
            }
            self.tables.written(slot, agent, outcome);
        }
    }

    /// Copies are made anew where there are fewer than `copies` without those of the agents that are `leaving`.
    pub(super) fn repair(&mut self, space: SpaceId, copies: u32, leaving: AgentSet, max: usize) {
        let mut from = Some((space, 0));
        let mut steps = 0;
        while let Some(at) = from {
            let shortage = Shortage {
                copies: Copies::at_agents(copies),
                leaving,
                recalling: AgentSet::EMPTY,
                sources: (0..AGENTS).map(AgentId).collect(),
            };
            let short = self.tables.find_short(at, &shortage, (3, max));
            steps += 1;
            assert!(steps < 10_000, "the search does not end");
            for (place, content) in short.pages {
                let holder = self.tables.holders(content).agents().next().expect("a copy");
                let tag = *self.agents[&holder].get(&content.id).expect("referenced but discarded");
                if let Some(slot) = self.tables.rewrite(place, content) {
                    self.frames.insert(slot, tag);
                }
            }
            from = short.next;
        }
    }

    pub(super) fn discard(&mut self, agent: AgentId, max: usize) {
        for id in self.tables.take_discards(agent, max) {
            self.agents.get_mut(&agent).unwrap().remove(&id);
        }
    }

    pub(super) fn check_remote(&mut self) {
        while self.tables.bury(1) {}
        (0..AGENTS).for_each(|agent| self.discard(AgentId(agent), usize::MAX));
        let held: BTreeSet<ContentId> =
            self.agents.values().flat_map(BTreeMap::keys).copied().collect();
        assert_eq!(self.tables.remote_pages(), held.len() as u64, "pages at agents");
        for (&agent, pages) in &self.agents {
            assert_eq!(self.tables.held_by(agent), pages.len() as u64, "pages at {agent:?}");
        }
    }
}
