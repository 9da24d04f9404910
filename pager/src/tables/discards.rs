//! Contents that agents may forget: who waits to be told, and what is written down of it, so that a pager that takes over can tell it.
//!
//! What is written stays until nothing that was told is unanswered; then what waits is written anew, unless most of what is written waits. So an agent may be told
//! twice, which does no harm: no content has the id of another.

use std::collections::BTreeMap;

use gms_policy::ids::{AgentId, ContentId};
use gms_policy::limits::AGENTS_MAX;

use super::Tables;
use crate::page_map::CONTENT_ID_MAX;

/// Words that are written at most. Of more than so many contents agents are told only as long as this process lives.
pub(super) const WRITTEN_MAX: usize = 1 << 20;
/// What is written anew in one hold.
const REWRITTEN_MAX: usize = 1 << 14;
/// Behind an id follows the agent.
const AGENT_SHIFT: u32 = CONTENT_ID_MAX.count_ones();

fn word(agent: AgentId, id: ContentId) -> u64 {
    u64::from(agent.0) << AGENT_SHIFT | id.0
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Discards {
    waiting: BTreeMap<AgentId, Vec<ContentId>>,
    /// How many words are written, and what is to be written behind them.
    written: usize,
    unwritten: Vec<u64>,
    /// Agents have been told of some since they were written.
    told: bool,
}

impl Discards {
    fn push(&mut self, agent: AgentId, id: ContentId) {
        self.waiting.entry(agent).or_default().push(id);
        self.unwritten.push(word(agent, id));
    }

    /// Nobody need tell the agent.
    pub(super) fn forget(&mut self, agent: AgentId) {
        self.told |= self.waiting.remove(&agent).is_some();
    }

    /// All that waits.
    pub(super) fn waiting(&self) -> impl Iterator<Item = (AgentId, &[ContentId])> {
        self.waiting.iter().map(|(&agent, ids)| (agent, &ids[..]))
    }

    /// Writes down what is not yet: words, and where they belong. Returns how many there are then.
    pub(super) fn write(&mut self, each: impl FnOnce(usize, &[u64])) -> u64 {
        if !self.unwritten.is_empty() {
            self.unwritten.truncate(WRITTEN_MAX - self.written);
            each(self.written, &self.unwritten);
            self.written += self.unwritten.len();
            self.unwritten.clear();
        }
        self.written as u64
    }

    /// What was written down; `None` if it makes no sense.
    pub(super) fn read(words: &[u64]) -> Option<Discards> {
        let mut discards = Discards { written: words.len(), ..Discards::default() };
        for word in words {
            let agent = u8::try_from(word >> AGENT_SHIFT).ok();
            let agent = agent.filter(|agent| usize::from(*agent) < AGENTS_MAX).map(AgentId)?;
            let id = ContentId(word & CONTENT_ID_MAX);
            discards.waiting.entry(agent).or_default().push(id);
        }
        Some(discards)
    }
}

impl Tables {
    pub(super) fn may_forget(&mut self, agent: AgentId, id: ContentId) {
        self.discards.push(agent, id);
    }

    /// Gives up to `max` contents that the agent may forget.
    pub fn take_discards(&mut self, agent: AgentId, max: usize) -> Vec<ContentId> {
        let Some(queue) = self.discards.waiting.get_mut(&agent) else { return Vec::new() };
        let rest = queue.len().saturating_sub(max);
        self.discards.told |= !queue.is_empty();
        queue.split_off(rest)
    }

    /// Of these the agent has not heard. If more than `max` were to wait then, nobody tells it.
    pub fn return_discards(&mut self, agent: AgentId, ids: Vec<ContentId>, max: usize) {
        let queue = self.discards.waiting.entry(agent).or_default();
        if queue.len() + ids.len() <= max {
            queue.extend(ids);
        }
    }

    /// All that agents were told they have answered, or it waits again: what does not wait need not be written any more.
    pub fn discards_heard(&mut self) {
        let count = self.discards_waiting();
        let discards = &mut self.discards;
        // Not where a few of many went, and not while others wait for the tables for long.
        if discards.told && count <= REWRITTEN_MAX && discards.written >= 2 * count {
            let words = discards.waiting().flat_map(|(agent, ids)| {
                let word = move |&id: &ContentId| word(agent, id);
                ids.iter().map(word)
            });
            discards.unwritten = words.collect();
            (discards.written, discards.told) = (0, false);
        }
    }

    /// The agent need not be told what it may forget.
    pub fn forget_discards(&mut self, agent: AgentId) {
        self.discards.forget(agent);
    }

    /// How many contents the agent may forget.
    pub fn discards_of(&self, agent: AgentId) -> usize {
        self.discards.waiting.get(&agent).map_or(0, Vec::len)
    }

    /// How many some agent may forget.
    pub fn discards_waiting(&self) -> usize {
        self.discards.waiting.values().map(Vec::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGENT: AgentId = AgentId(63);

    fn recovered(tables: &Tables) -> Tables {
        let file = tables.file().try_clone().expect("a descriptor");
        Tables::recover(file, 1024).expect("tables")
    }

    #[test]
    fn what_agents_may_forget_is_told_by_the_next_pager_until_they_have_heard_of_it() {
        let mut tables = Tables::new(4, 1024).expect("a memfd");
        let ids = [1, 2, CONTENT_ID_MAX].map(ContentId);
        ids.into_iter().for_each(|id| tables.may_forget(AGENT, id));
        tables.commit();
        // It has been sent, and not answered yet.
        assert_eq!(tables.take_discards(AGENT, 2), ids[1..]);
        tables.commit();
        let mut tables = recovered(&tables);
        assert_eq!(tables.take_discards(AGENT, 9), ids);
        tables.return_discards(AGENT, vec![ids[1]], 9);
        tables.may_forget(AgentId(0), ids[0]);
        tables.commit();
        tables.discards_heard();
        tables.commit();
        let mut tables = recovered(&tables);
        assert_eq!(tables.take_discards(AGENT, 9), [ids[1]]);
        assert_eq!(tables.take_discards(AgentId(0), 9), [ids[0]]);
        tables.discards_heard();
        tables.commit();
        assert_eq!(recovered(&tables).discards_waiting(), 0);
    }
}
