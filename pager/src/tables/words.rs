//! The tables as words, for the next binary of this process: all that they know, but for who waits. Nothing is leaving then, no write is under way, and
//! no page is about to be poisoned.

use std::collections::HashMap;
use std::fs::File;
use std::io;

use gms_policy::eviction::Mark;
use gms_policy::ids::{AgentId, ContentId, PageAddr, SpaceId};
use gms_policy::limits::AGENTS_MAX;
use gms_policy::redundancy::AgentSet;
use gms_policy::stripes::Stripes;

use super::recover::BESIDE_WORDS;
use super::slots::{SLOTS_MAX, Slot, Slots};
use super::space::SpaceState;
use super::{Counters, IDS_SKIPPED, Owner, Phase, SESSIONS_MAX, Tables};
use crate::page_map::{CONTENT_ID_MAX, PageMap};
use crate::words::{Words, put_list};

/// Contents that several pages share, and stripes. More of them are not handed over: it would take seconds, in which all wait.
const SHARED_MAX: usize = 4 << 20;
const STRIPES_MAX: usize = 4 << 20;

impl Tables {
    /// The memory of the page map.
    pub fn file(&self) -> &File {
        self.map.file()
    }

    /// Of what there are too many words, if of anything.
    pub fn vast(&self) -> Option<&'static str> {
        let stripes = self.stripes.as_ref().map_or(0, Stripes::len);
        match () {
            () if self.shared.len() > SHARED_MAX => {
                Some("its processes share too many pages after forks")
            }
            () if stripes > STRIPES_MAX => Some("its pages are in too many stripes"),
            () => None,
        }
    }

    /// Why they cannot be handed over, if so.
    pub fn unfit(&self) -> Option<&'static str> {
        let is_sent = |slot: &Slot| matches!(slot.phase, Phase::Sent { .. });
        match () {
            () if self.exhausted.is_some() => Some("its page map is full"),
            () if !self.doomed.is_empty() => Some("pages of it are lost"),
            () if !self.leaving.is_empty() => Some("pages of it are leaving"),
            () if self.spaces.values().any(|state| state.unproved) => {
                Some("its pager has just died, and not all is known yet of what that was told")
            }
            () if self.slots.iter().any(is_sent) || !self.dealt.is_empty() => {
                Some("pages of it are on their way to agents")
            }
            () => None,
        }
    }

    /// All of it but the entries of the page map. The agents have not been heard to forget `discards`.
    pub fn put_words<'a>(
        &'a self,
        discards: impl Iterator<Item = (AgentId, &'a [ContentId])>,
        out: &mut Vec<u64>,
    ) {
        self.map.put_words(&self.graveyard, out);
        out.push(self.spaces.len() as u64);
        for (space, state) in &self.spaces {
            out.push(space.0);
            state.put_words(out);
        }
        out.push(self.slots.len() as u64);
        out.push(self.ready.len() as u64);
        for &index in &self.ready {
            let slot = &self.slots[index as usize];
            out.extend([index.into(), slot.mark.bits(), slot.hash]);
            let owner = |owner: &Owner| [owner.place.0.0, owner.place.1.get()];
            put_list(out, slot.owners.iter().flat_map(owner));
        }
        put_list(out, self.shared.iter().flat_map(|(id, &count)| [id.0, count.into()]));
        out.push(self.sessions.len() as u64);
        for (agent, sessions) in &self.sessions {
            out.push(agent.0.into());
            put_list(out, sessions.iter().copied());
        }
        put_list(out, self.losers.agents().map(|agent| agent.0.into()));
        let waiting = self.discards.waiting().chain(discards);
        put_list(
            out,
            waiting.flat_map(|(a, ids)| ids.iter().flat_map(move |id| [a.0.into(), id.0])),
        );
        let Counters { pages_out, clean_drops, zero_drops, second_chances } = self.counters;
        out.extend([pages_out, clean_drops, zero_drops, second_chances]);
        out.extend([self.next_content, self.remote_pages_peak, self.clock.evicted()]);
        if let Some(stripes) = &self.stripes {
            put_list(out, stripes.words());
        }
    }

    /// The tables as they were. `file` has the entries of their page map; the budget is one of `budget` pages.
    ///
    /// # Errors
    /// If the words do not fit, or the memory cannot be had.
    pub fn from_words(file: File, budget: u64, words: &mut Words<'_>) -> io::Result<Tables> {
        let (map, graveyard) = PageMap::from_words(file, words, BESIDE_WORDS)?;
        let mut tables = Tables { map, graveyard, ..Tables::new(0, budget)? };
        match tables.take_words(words) {
            Some(()) => {
                tables.commit();
                Ok(tables)
            }
            None => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    fn take_words(&mut self, words: &mut Words<'_>) -> Option<()> {
        let spaces = words
            .several(|words| Some((SpaceId(words.word()?), SpaceState::from_words(words)?)))?;
        self.spaces = spaces.into_iter().collect();
        self.read_slots(words)?;
        let shared = words.list()?.chunks_exact(2);
        let shared = shared.map(|pair| (ContentId(pair[0]), pair[1] as u32));
        self.shared = shared.collect::<HashMap<_, _>>();
        let agent = |word: u64| u8::try_from(word).ok().map(AgentId);
        let is_known = |agent: &AgentId| usize::from(agent.0) < AGENTS_MAX;
        let sessions = words.several(|words| {
            let (agent, sessions) = (agent(words.word()?)?, words.list()?);
            let is_possible = is_known(&agent) && sessions.len() <= SESSIONS_MAX;
            is_possible.then(|| (agent, sessions.iter().copied().collect()))
        })?;
        self.sessions = sessions.into_iter().collect();
        self.greeted = self.sessions.keys().copied().collect();
        let losers = words.list()?.iter().map(|&word| agent(word).filter(is_known));
        self.losers = losers.collect::<Option<AgentSet>>()?;
        for pair in words.list()?.chunks_exact(2) {
            self.may_forget(agent(pair[0])?, ContentId(pair[1]));
        }
        let [pages_out, clean_drops, zero_drops, second_chances] = *words.take(4)?.first_chunk()?;
        self.counters = Counters { pages_out, clean_drops, zero_drops, second_chances };
        self.next_content = words.word()?.checked_add(IDS_SKIPPED)?;
        self.remote_pages_peak = words.word()?;
        self.clock = self.clock.clone().after(words.word()?);
        if self.map.placements.shape().is_some() {
            let stripes = words.list()?;
            let stripes = Stripes::from_words(stripes, &self.map.placements, IDS_SKIPPED)?;
            self.stripes = Some(stripes).filter(|stripes| stripes.next_id().0 < CONTENT_ID_MAX);
            self.stripes.as_ref()?;
        }
        words.is_empty().then_some(())
    }

    fn read_slots(&mut self, words: &mut Words<'_>) -> Option<()> {
        let count: u32 = words.word()?.try_into().ok().filter(|count| *count <= SLOTS_MAX)?;
        self.slots = Slots::new(count);
        let ready = words.several(|words| {
            let (index, mark) = (words.word()?, Mark::from_bits(words.word()?));
            let index = u32::try_from(index).ok().filter(|index| *index < count)?;
            let slot = &mut self.slots[index as usize];
            (slot.phase, slot.mark, slot.hash) = (Phase::Ready, mark, words.word()?);
            let owner = |pair: &[u64]| {
                let place = (SpaceId(pair[0]), PageAddr::containing(pair[1]));
                Owner { place, marked: true }
            };
            slot.owners = words.list()?.chunks_exact(2).map(owner).collect();
            Some(index)
        })?;
        let is_free = |&index: &u32| self.slots[index as usize].phase == Phase::Free;
        self.free = (0..count).rev().filter(is_free).collect();
        self.ready = ready.into();
        Some(())
    }

    /// The last session that an agent has given the workload.
    pub fn session_of(&self, agent: AgentId) -> Option<u64> {
        self.sessions.get(&agent)?.back().copied()
    }

    /// What tells agents this pager from those before it that have given page ids, a greater number: the first that it gives. Ask before it gives one.
    pub fn incarnation(&self) -> u64 {
        self.next_content
    }

    /// Pages of the write-back buffer.
    pub fn slots(&self) -> u32 {
        self.slots.len() as u32
    }
}

#[cfg(test)]
mod tests {
    use gms_policy::stripes::{Answer, Read, Shape};

    use super::*;
    use crate::page_map::PAGE;
    use crate::range_set::RangeSet;
    use crate::tables::{EvictOutcome, FaultAction, WriteOutcome};

    const BUDGET: u64 = 1024;

    fn words_of(tables: &Tables) -> Vec<u64> {
        let mut words = Vec::new();
        tables.put_words(std::iter::empty(), &mut words);
        words
    }

    /// Parent and child, with pages of every kind, some of which wait to be released.
    fn tables() -> Tables {
        let (parent, child) = (SpaceId(1), SpaceId(2));
        let mut tables = Tables::new(64, BUDGET).expect("a memfd");
        tables.add_space(parent);
        tables.register(parent, 0..1 << 31, &RangeSet::default());
        let page = |n: u64| PageAddr::containing(n * 600 * PAGE);
        let (mut leaving, mut wake) = (Vec::new(), Vec::new());
        tables.begin_evict(parent, &(0..40).map(page).collect::<Vec<_>>(), &mut leaving);
        for &(page, slot) in &leaving {
            tables.finish_evict(slot, EvictOutcome::Moved(page.get() + 1), &mut wake);
        }
        let agents = AgentSet::of(AgentId(0)).union(AgentSet::of(AgentId(3)));
        for (slot, ..) in tables.start_write(agents, 30) {
            agents.agents().for_each(|agent| tables.written(slot, agent, WriteOutcome::Stored));
        }
        tables.fork(parent, child);
        for (space, n) in [(parent, 3), (child, 4), (parent, 35)] {
            match tables.fault((space, page(n))) {
                FaultAction::Fetch(content) => {
                    assert!(tables.fetched((space, page(n)), content, true));
                }
                FaultAction::Buffered(_) => tables.second_chance((space, page(n))),
                action => panic!("{action:?}"),
            }
        }
        tables.remove(parent, page(9).get()..page(12).get());
        tables.unmap(child, page(20).get()..page(24).get());
        tables.age_quarantine(parent);
        tables.remove(parent, page(14).get()..page(15).get());
        tables.fork(child, SpaceId(3));
        tables.drop_space(SpaceId(3));
        tables.begin_session(AgentId(3), 77);
        tables.begin_session(AgentId(3), 78);
        tables.lose(AgentId(3));
        tables.commit();
        tables
    }

    fn entries(tables: &Tables) -> Vec<(SpaceId, PageAddr, crate::page_map::State)> {
        let known = |space| {
            let known = tables.map.known(space, 0..u64::MAX);
            known.into_iter().map(move |(page, state)| (space, page, state))
        };
        (1..4).map(SpaceId).flat_map(known).collect()
    }

    #[test]
    fn tables_are_the_same_after_their_way_through_words() {
        let mut tables = tables();
        assert!(tables.unfit().is_none() && !tables.graveyard.is_empty());
        let (words, known) = (words_of(&tables), entries(&tables));
        // Their order is chance.
        let shared = std::mem::take(&mut tables.shared);
        let rest = words_of(&tables);
        let file = tables.file().try_clone().expect("a descriptor");
        // From here on the memory is the other's.
        let again = Tables::from_words(file, BUDGET, &mut Words::new(&words));
        let mut again = again.expect("the same tables");
        assert_eq!(again.next_content, tables.next_content + IDS_SKIPPED);
        again.next_content = tables.next_content;
        assert_eq!(again.shared, shared);
        again.shared.clear();
        assert_eq!(words_of(&again), rest);
        again.shared = shared;
        assert!(known.len() > 60, "{}", known.len());
        assert_eq!(entries(&again), known);
        assert_eq!(
            (again.away_pages(), again.remote_pages()),
            (tables.away_pages(), tables.remote_pages())
        );
        assert_eq!(again.session_of(AgentId(3)), Some(78));
        // A chunk that is freed by the one loses its memory for the other.
        drop(tables);
        while again.bury(1) {}
        (1..3).for_each(|space| again.drop_space(SpaceId(space)));
        while again.bury(1) {}
        assert_eq!((again.away_pages(), again.remote_pages(), again.map.bytes()), (0, 0, 0));
        assert_eq!(again.discards_of(AgentId(0)), 30, "each content is released once");
    }

    /// With parity, pages of stripes that were written, one of which has died, and one that waits for another; an agent has lost its parts.
    #[test]
    fn stripes_are_the_same_after_their_way_through_words() {
        let (space, shape) = (SpaceId(1), Shape::new(2, 1).expect("a shape"));
        let mut tables = Tables::new(64, BUDGET).expect("a memfd").striped(shape);
        tables.add_space(space);
        tables.register(space, 0..1 << 31, &RangeSet::default());
        let page = |n: u64| PageAddr::containing(n * PAGE);
        let (mut leaving, mut wake) = (Vec::new(), Vec::new());
        tables.begin_evict(space, &(0..21).map(page).collect::<Vec<_>>(), &mut leaving);
        for &(page, slot) in &leaving {
            tables.finish_evict(slot, EvictOutcome::Moved(page.get() + 1), &mut wake);
        }
        let agents: AgentSet = (0..3).map(AgentId).collect();
        let dealt = tables.deal(agents, 64);
        assert!(tables.unfit().is_some_and(|reason| reason.contains("on their way")));
        for part in dealt.into_iter().flat_map(|stripe| stripe.parts) {
            tables.answered(part.id, Answer::Stored);
        }
        tables.remove(space, page(4).get()..page(5).get());
        tables.age_quarantine(space);
        tables.begin_session(AgentId(1), 77);
        tables.lose(AgentId(1));
        assert_eq!(tables.unfit(), None);
        tables.commit();
        let words = words_of(&tables);
        let askable: AgentSet = [0, 2].map(AgentId).into_iter().collect();
        let known = |tables: &Tables| {
            let all = tables.map.known(space, 0..u64::MAX).into_iter();
            let read = |state| match state {
                crate::page_map::State::Remote(content) => tables.read(content, askable),
                _ => None,
            };
            all.map(|(page, state)| (page, state, read(state))).collect::<Vec<_>>()
        };
        let before = known(&tables);
        let file = tables.file().try_clone().expect("a descriptor");
        // From here on the memory is the other's.
        let again = Tables::from_words(file, BUDGET, &mut Words::new(&words));
        let mut again = again.expect("the same tables");
        assert_eq!(known(&again), before);
        let made =
            known(&again).into_iter().filter(|(.., read)| matches!(read, Some(Read::Decode(..))));
        assert!(made.count() > 4, "pages of the agent that has lost them are made");
        assert_eq!((again.frames_taken(), again.ready.len()), (tables.frames_taken(), 1));
        // No id is used again.
        let next = again.deal(agents, 1);
        assert!(next.is_empty(), "one page is no stripe");
        drop(tables);
        again.drop_space(space);
        while again.bury(1) {}
        assert_eq!((again.away_pages(), again.frames_taken(), again.map.bytes()), (0, 0, 0));
        assert_eq!(again.discards_of(AgentId(0)), 10, "a part of each stripe");
    }

    #[test]
    fn what_the_agents_have_not_heard_is_told_again() {
        let tables = tables();
        let (mut words, ids) = (Vec::new(), [ContentId(5), ContentId(6)]);
        tables.put_words([(AgentId(2), &ids[..])].into_iter(), &mut words);
        let file = tables.file().try_clone().expect("a descriptor");
        let mut again = Tables::from_words(file, BUDGET, &mut Words::new(&words)).expect("tables");
        assert_eq!(again.take_discards(AgentId(2), 9), ids);
    }

    #[test]
    fn words_that_were_cut_or_are_others_are_refused() {
        let tables = tables();
        let words = words_of(&tables);
        for cut in (0..words.len()).step_by(7) {
            let file = tables.file().try_clone().expect("a descriptor");
            assert!(Tables::from_words(file, BUDGET, &mut Words::new(&words[..cut])).is_err());
        }
        for at in (0..words.len()).step_by(5) {
            let mut words = words.clone();
            words[at] = u64::MAX;
            let file = tables.file().try_clone().expect("a descriptor");
            // It need not be seen, and never ends this process.
            let _ = Tables::from_words(file, BUDGET, &mut Words::new(&words));
        }
    }

    #[test]
    fn what_is_under_way_cannot_be_told() {
        let mut tables = tables();
        let started = tables.start_write(AgentSet::of(AgentId(1)), 1);
        assert!(tables.unfit().is_some_and(|reason| reason.contains("on their way")));
        tables.written(started[0].0, AgentId(1), WriteOutcome::Failed);
        assert_eq!(tables.unfit(), None);
        tables.doom((SpaceId(1), PageAddr::containing(0)));
        assert!(tables.unfit().is_some());
    }
}
