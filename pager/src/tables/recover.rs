//! The tables of a process that has died: what is written down of them beside the page map, and how the rest is made of that.
//!
//! Whoever holds the tables need not write anything down: what has changed is written at the end of the hold, before it is committed. Counts and owners
//! are found in the entries of the page map. Who waits, what is on its way and what is registered the dead knew alone.

use std::collections::HashMap;
use std::fs::File;
use std::io;

use gms_policy::ids::{AgentId, ContentId, SpaceId};
use gms_policy::limits::AGENTS_MAX;
use gms_policy::redundancy::{AgentSet, PlacementId, Placements};

use super::discards::{Discards, WRITTEN_MAX};
use super::slots::{Phase, SLOT_WORDS, SLOTS_MAX, Slots};
use super::{IDS_SKIPPED, SESSIONS_MAX, SpaceState, Tables};
use crate::kernel::journal::LINES_MAX;
use crate::page_map::{CHUNKS_MAX, Content, PageMap, State};

/// Words that stand for themselves.
const ROOT_WORDS: usize = 16;
/// Two words of each set of agents: the set, and who of it counts.
const SETS: usize = ROOT_WORDS;
const SETS_MAX: usize = 1 << PlacementId::BITS;
/// The sessions of each agent: how many, and they.
const SESSIONS: usize = SETS + 2 * SETS_MAX;
const SESSION_WORDS: usize = 1 + SESSIONS_MAX;
/// The slots.
const SLOTS: usize = SESSIONS + AGENTS_MAX * SESSION_WORDS;
/// The generation of each line of the journal.
pub(super) const GENERATIONS: usize = SLOTS + SLOTS_MAX as usize * SLOT_WORDS;
/// What agents may forget.
const DISCARDS: usize = GENERATIONS + LINES_MAX;
/// Words beside those of the page map.
pub(super) const BESIDE_WORDS: usize = DISCARDS + WRITTEN_MAX;

impl Tables {
    /// What was done since the last commit is done, whenever the process dies: whoever has the tables then finds all of it, and before none.
    pub fn commit(&mut self) {
        let map = &mut self.map;
        self.slots.write(|at, words| map.write_beside(SLOTS + at, words));
        if self.sets_written != map.placements.changes() {
            self.sets_written = map.placements.changes();
            let sets: Vec<u64> =
                map.placements.sets().flat_map(|set| set.map(AgentSet::bits)).collect();
            map.write_beside(SETS, &sets);
        }
        for agent in std::mem::take(&mut self.greeted).agents() {
            let sessions = &self.sessions[&agent];
            let words: Vec<u64> =
                [sessions.len() as u64].into_iter().chain(sessions.iter().copied()).collect();
            map.write_beside(SESSIONS + usize::from(agent.0) * SESSION_WORDS, &words);
        }
        let discards = self.discards.write(|at, words| map.write_beside(DISCARDS + at, words));
        map.write_beside(
            0,
            &[
                self.slots.len() as u64,
                self.next_content,
                u64::from(self.stripes.is_some()),
                self.losers.bits(),
                self.clock.evicted(),
                self.remote_pages_peak,
                u64::from(self.exhausted.is_some()),
                self.newest.0,
                discards,
            ],
        );
        self.map.commit();
    }

    /// What was read of a userfaultfd is applied, and is another generation of its line: see [`crate::kernel::journal`].
    pub fn note_applied(&mut self, line: u32, generation: u64) {
        self.map.write_beside(GENERATIONS + line as usize, &[generation]);
    }

    /// The tables in the memory, as of their last commit. No page is registered, and nobody waits. Pages that were leaving are leaving, and it is not known
    /// which of their addresses have markers; those that were being written are to be written again.
    ///
    /// # Errors
    /// If what is there cannot be known, or makes no sense, or an entry could not be changed for want of room; or the memory cannot be had.
    pub fn recover(file: File, budget: u64) -> io::Result<Tables> {
        let (map, graveyard) = PageMap::recover(file, CHUNKS_MAX, BESIDE_WORDS)?;
        let mut tables = Tables { map, graveyard, ..Tables::new(0, budget)? };
        tables.find().ok_or(io::ErrorKind::InvalidData)?;
        Ok(tables)
    }

    fn find(&mut self) -> Option<()> {
        let &[slots, next, striped, losers, evicted, peak, exhausted, newest, discards] =
            self.map.beside(0..9)
        else {
            return None;
        };
        let slots = u32::try_from(slots).ok().filter(|slots| *slots <= SLOTS_MAX)?;
        if striped != 0 || exhausted != 0 {
            return None;
        }
        self.next_content = next.checked_add(IDS_SKIPPED)?;
        (self.losers, self.newest) = (AgentSet::from_bits(losers), SpaceId(newest));
        (self.clock, self.remote_pages_peak) = (self.clock.clone().after(evicted), peak);
        let sets = self.map.beside(SETS..SETS + 2 * SETS_MAX).chunks_exact(2);
        self.map.placements = Placements::of(
            sets.map(|set| [set[0], set[1]].map(AgentSet::from_bits))
                .take_while(|set| !set[0].is_empty()),
        );
        for agent in 0..AGENTS_MAX {
            let at = SESSIONS + agent * SESSION_WORDS;
            let (count, sessions) = self.map.beside(at..at + SESSION_WORDS).split_first()?;
            let known = sessions.get(..usize::try_from(*count).ok()?)?;
            if !known.is_empty() {
                self.sessions.insert(AgentId(agent as u8), known.iter().copied().collect());
            }
        }
        let discards = usize::try_from(discards).ok().filter(|count| *count <= WRITTEN_MAX)?;
        self.discards = Discards::read(self.map.beside(DISCARDS..DISCARDS + discards))?;
        self.find_slots(slots)?;
        self.count()
    }

    fn find_slots(&mut self, slots: u32) -> Option<()> {
        self.slots = Slots::new(slots);
        let mut unknown = Vec::new();
        for index in 0..slots {
            let at = SLOTS + index as usize * SLOT_WORDS;
            let words = self.map.beside(at..at + SLOT_WORDS);
            unknown.extend(self.slots.read(index, words, &self.map)?);
        }
        for (space, page, index) in self.map.slotted() {
            self.slots.own(index, (space, page))?;
        }
        for index in 0..slots {
            let slot = &self.slots[index as usize];
            match slot.phase {
                Phase::Free => self.free.push(index),
                Phase::Leaving => self.leaving.push(index),
                // The last of its pages went while it was being written: nobody else would free it.
                _ if slot.owners.is_empty() => self.settle(index, State::Empty, None),
                _ => self.ready.push_back(index),
            }
        }
        let spaces: Vec<SpaceId> = self.map.spaces().collect();
        self.spaces.extend(spaces.into_iter().map(|space| (space, SpaceState::adopted())));
        for page in unknown {
            page.reached.agents().for_each(|agent| self.may_forget(agent, page.id));
        }
        Some(())
    }

    /// Counts who refers to which content, and how many there are.
    fn count(&mut self) -> Option<()> {
        let contents = || {
            let kept = self.slots.iter().filter_map(|slot| slot.kept);
            self.map.contents().chain(kept)
        };
        let mut seen = Seen::new(contents().count());
        contents().for_each(|content| seen.note(content.id));
        let mut shared: HashMap<ContentId, u32> = HashMap::new();
        let mut held = vec![0; SETS_MAX];
        let mut is_first = |content: &Content| {
            let count =
                seen.may_be_again(content.id).then(|| shared.entry(content.id).or_default());
            count.is_none_or(|count| {
                *count += 1;
                *count == 1
            })
        };
        contents()
            .filter(|content| is_first(content))
            .for_each(|content| held[content.placement.bits() as usize] += 1);
        shared.retain(|_, count| *count > 1);
        self.shared = shared;
        for (number, &pages) in held.iter().enumerate().filter(|(_, pages)| **pages > 0) {
            self.map.placements.hold(PlacementId::from_bits(number as u64), pages)?;
        }
        Some(())
    }
}

/// Which of many ids are there more than once, and some that are not: a bit for a few ids each.
struct Seen {
    bits: u32,
    once: Vec<u64>,
    again: Vec<u64>,
}

impl Seen {
    fn new(ids: usize) -> Seen {
        let bits = (ids.max(1 << 10) * 8).next_power_of_two().ilog2();
        let words = vec![0; 1 << (bits - u64::BITS.ilog2())];
        Seen { bits, once: words.clone(), again: words }
    }

    fn place(&self, id: ContentId) -> (usize, u64) {
        let hash = id.0.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (u64::BITS - self.bits);
        ((hash / u64::from(u64::BITS)) as usize, 1 << (hash % u64::from(u64::BITS)))
    }

    fn note(&mut self, id: ContentId) {
        let (word, bit) = self.place(id);
        self.again[word] |= self.once[word] & bit;
        self.once[word] |= bit;
    }

    fn may_be_again(&self, id: ContentId) -> bool {
        let (word, bit) = self.place(id);
        self.again[word] & bit != 0
    }
}
