//! The agents: what they store, forget and lose.

use std::collections::{BTreeMap, BTreeSet};

use gms_policy::ids::{AgentId, ContentId};

use super::{AGENTS, Model, hash};

impl Model {
    pub(super) fn restart(&mut self, agent: AgentId) {
        if self.tables.depends_on(agent) {
            return;
        }
        // What was under way ends before the agent is heard of again.
        while let Some(at) = self.writes.iter().position(|(to, _)| *to == agent) {
            let (_, batch) = self.writes.remove(at);
            batch.into_iter().for_each(|(slot, ..)| self.tables.written(slot, agent, false));
        }
        self.agents.get_mut(&agent).unwrap().clear();
        self.tables.forget_copies(agent);
    }

    /// One of them: those of a batch end in any order.
    pub(super) fn end_write(&mut self, stored: u32) {
        if self.writes.is_empty() {
            return;
        }
        let (agent, batch) = self.writes.remove(stored as usize % self.writes.len());
        for (i, (slot, id, check)) in batch.into_iter().enumerate() {
            let stored = stored >> (i % 32) & 1 == 1;
            if stored {
                let tag = self.frames[&slot];
                assert_eq!(hash(tag), check, "a slot was reused before its write ended");
                let before = self.agents.get_mut(&agent).unwrap().insert(id, tag);
                assert!(before.is_none_or(|b| b == tag), "a content id was used twice");
            }
            self.tables.written(slot, agent, stored);
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
