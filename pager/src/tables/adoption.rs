//! What a pager that takes over does about the tables of the one that has died ([`Tables::recover`]), before it serves anybody.

use std::collections::BTreeSet;
use std::ops::Range;

use gms_policy::ids::{PageAddr, SpaceId};

use super::{EvictOutcome, FaultAction, Place, SpaceState, Tables};

/// More than are counted of a thread that sleeps until it is served, unless its memory is being changed: then each try is.
const FAULTS_OFTEN: u32 = 8;

impl Tables {
    /// A space that the dead pager has had, whatever is known of it.
    pub fn adopt_space(&mut self, space: SpaceId) {
        self.spaces.insert(space, SpaceState::adopted());
        self.faulted.get_or_insert_default();
    }

    /// The last space that began, whether there is anything of it or not.
    pub fn newest(&self) -> SpaceId {
        self.newest
    }

    /// No space begins that is not newer than this one.
    pub fn note_newest(&mut self, space: SpaceId) {
        self.newest = self.newest.max(space);
    }

    /// Whether it has not been proved yet that nothing is being removed of which the dead pager was told.
    pub fn is_unproved(&self, space: SpaceId) -> bool {
        self.spaces.get(&space).is_some_and(|state| state.unproved)
    }

    /// What [`Tables::fault`] says to a thread, which is in no removal that the dead pager was told of: that would have ended before it faulted.
    pub fn fault_of(&mut self, place: Place, tid: i32) -> FaultAction {
        if let Some(faulted) = &mut self.faulted {
            let (last, count) = faulted.entry((place.0, tid)).or_insert((place.1, 0));
            *count = if *last == place.1 { count.saturating_add(1) } else { 1 };
            *last = place.1;
        }
        self.fault(place)
    }

    /// Threads that have faulted at one page again and again since this pager has gone on, or were looked at so often: where, and by which id. Others than those of
    /// the space, who look at its memory, seldom do.
    pub fn faulting(&self) -> BTreeSet<(SpaceId, i32)> {
        let often = self.faulted.iter().flatten().filter(|(_, last)| last.1 >= FAULTS_OFTEN);
        often.map(|(&who, _)| who).collect()
    }

    /// All is proved: nobody needs to know who has faulted.
    pub fn forget_faulted(&mut self) {
        self.faulted = None;
    }

    /// It has been proved. What has been discarded meanwhile is looked for. Returns the pages for which somebody waits.
    pub fn prove(&mut self, space: SpaceId) -> Vec<Place> {
        let Some(state) = self.spaces.get_mut(&space).filter(|state| state.unproved) else {
            return Vec::new();
        };
        state.unproved = false;
        let registered = state.registered.clone();
        registered.iter().for_each(|range| state.stale.insert(range));
        let mut waiting: Vec<Place> = self.waiters.extract_if(|place| place.0 == space).collect();
        waiting.sort_unstable();
        waiting
    }

    /// Where the pages that leave go in the outbox of a space: one behind the other, from a place on.
    pub fn note_places(&mut self, space: SpaceId, leaving: &[(PageAddr, u32)], first: u32) {
        for (&(_, slot), place) in leaving.iter().zip(first..) {
            let slot = &mut self.slots[slot as usize];
            (slot.outbox, slot.place) = (space, place);
        }
    }

    /// Whether it can be found out what has become of each page that was leaving: if nobody has it any more, or one of those who do is the space to whose outbox it
    /// went; and if all of them had markers, or none.
    pub fn are_leaving_known(&self) -> bool {
        self.leaving.iter().all(|&slot| {
            let slot = &self.slots[slot as usize];
            let is_at_home = slot.owners.iter().any(|owner| owner.place.0 == slot.outbox);
            slot.owners.is_empty() || is_at_home && slot.had_markers.is_some()
        })
    }

    /// The spaces to whose outboxes pages were leaving.
    pub fn leaving_spaces(&self) -> BTreeSet<SpaceId> {
        let owned = self.leaving.iter().map(|&slot| &self.slots[slot as usize]);
        owned.filter(|slot| !slot.owners.is_empty()).map(|slot| slot.outbox).collect()
    }

    /// The spaces of which anything is known.
    pub fn all_spaces(&self) -> Vec<SpaceId> {
        self.spaces.keys().copied().collect()
    }

    /// Whether all agents that have pages are among the first so many.
    pub fn are_known(&self, agents: usize) -> bool {
        let holders = self.map.placements.sets().flat_map(|set| set[0].agents());
        holders.into_iter().all(|agent| usize::from(agent.0) < agents)
    }

    /// Whether anybody has the slot's page.
    pub fn is_owned(&self, slot: u32) -> bool {
        !self.slots[slot as usize].owners.is_empty()
    }

    /// Whether a page that leaves was only at an agent, as far as was known.
    pub fn was_remote(&self, slot: u32) -> bool {
        self.slots[slot as usize].was_remote
    }

    /// Pages of a space that were leaving to its outbox, each with its slot and its place there.
    pub fn left_leaving(&self, space: SpaceId) -> Vec<(PageAddr, u32, u32)> {
        let page = |&slot: &u32| {
            let left = &self.slots[slot as usize];
            if left.outbox != space {
                return None;
            }
            let owner = left.owners.iter().find(|owner| owner.place.0 == space)?;
            Some((owner.place.1, slot, left.place))
        };
        self.leaving.iter().filter_map(page).collect()
    }

    /// Pages of a space in the range that are leaving and, as far as is noted, have no markers: each with its slot.
    pub fn left_unmarked(&self, space: SpaceId, range: &Range<u64>) -> Vec<(u32, Place)> {
        let of_slot = |&index: &u32| self.unmarked(index).map(move |place| (index, place));
        let unmarked = self.leaving.iter().flat_map(of_slot);
        unmarked.filter(|(_, at)| at.0 == space && range.contains(&at.1.get())).collect()
    }

    /// Ends the leaving of what nobody owns any more: there is nothing to be found out.
    pub fn end_unowned(&mut self) {
        let unowned = |slot: &&u32| self.slots[**slot as usize].owners.is_empty();
        for slot in self.leaving.iter().filter(unowned).copied().collect::<Vec<u32>>() {
            self.finish_evict(slot, EvictOutcome::Stayed, &mut Vec::new());
        }
    }

    /// The generation of a line of the journal: another than that of what was read and kept there says that all of that is applied.
    pub fn generation(&self, line: u32) -> u64 {
        let at = super::recover::GENERATIONS + line as usize;
        self.map.beside(at..at + 1)[0]
    }
}

#[cfg(test)]
mod tests {
    use gms_policy::ids::AgentId;
    use gms_policy::redundancy::AgentSet;

    use super::*;
    use crate::page_map::PAGE;
    use crate::range_set::RangeSet;
    use crate::tables::WriteOutcome;

    const SPACE: SpaceId = SpaceId(1);

    fn page(number: u64) -> PageAddr {
        PageAddr::containing(number * PAGE)
    }

    /// Of a pager that has died: page 1 is at an agent, page 2 in the buffer, and page 3 was leaving, to place 5 of the outbox.
    fn adopted() -> Tables {
        let mut tables = Tables::new(4, 1024).expect("a memfd");
        tables.add_space(SPACE);
        tables.register(SPACE, 0..8 * PAGE, &RangeSet::default());
        let (mut leaving, mut wake) = (Vec::new(), Vec::new());
        for number in [1, 2] {
            leaving.clear();
            tables.begin_evict(SPACE, &[page(number)], &mut leaving);
            tables.finish_evict(leaving[0].1, EvictOutcome::Moved(number), &mut wake);
            for (slot, ..) in tables.start_write(AgentSet::of(AgentId(0)), 2 - number as usize) {
                tables.written(slot, AgentId(0), WriteOutcome::Stored);
            }
        }
        leaving.clear();
        tables.begin_evict(SPACE, &[page(3)], &mut leaving);
        tables.note_places(SPACE, &leaving, 5);
        tables.note_applied(7, 9);
        tables.fork(SPACE, SpaceId(4));
        tables.drop_space(SpaceId(4));
        tables.commit();
        let file = tables.file().try_clone().expect("a descriptor");
        let mut tables = Tables::recover(file, 1024).expect("tables");
        tables.adopt_space(SPACE);
        let mut marked = RangeSet::default();
        marked.insert(PAGE..3 * PAGE);
        tables.register(SPACE, 0..8 * PAGE, &marked);
        tables
    }

    #[test]
    fn nothing_comes_or_goes_until_it_is_known_that_nothing_is_being_removed() {
        let mut tables = adopted();
        assert!(tables.is_unproved(SPACE));
        for number in [1, 2, 3] {
            assert_eq!(tables.fault((SPACE, page(number))), FaultAction::Wait);
        }
        for _ in 0..FAULTS_OFTEN {
            assert!(tables.faulting().is_empty());
            assert_eq!(tables.fault_of((SPACE, page(1)), 7), FaultAction::Wait);
            assert_eq!(tables.fault_of((SPACE, page(1)), 8), FaultAction::Wait);
            assert_eq!(tables.fault_of((SPACE, page(2)), 8), FaultAction::Wait);
        }
        assert_eq!(tables.fault((SPACE, page(4))), FaultAction::Zero);
        assert_eq!(tables.faulting(), BTreeSet::from([(SPACE, 7)]));
        let mut leaving = Vec::new();
        tables.begin_evict(SPACE, &[page(5)], &mut leaving);
        assert!(leaving.is_empty());
        assert_eq!(tables.prove(SPACE), [1, 2, 3].map(|number| (SPACE, page(number))));
        assert!(matches!(tables.fault((SPACE, page(1))), FaultAction::Fetch(_)));
        assert!(matches!(tables.fault((SPACE, page(2))), FaultAction::Buffered(_)));
        assert_eq!(tables.fault((SPACE, page(3))), FaultAction::Wait, "it leaves still");
        tables.begin_evict(SPACE, &[page(5)], &mut leaving);
        assert_eq!(leaving.len(), 1);
        assert_eq!(tables.take_stale(SPACE).len(), 8 * PAGE, "the dead was told of what is gone");
        assert!(tables.prove(SPACE).is_empty());
        tables.forget_faulted();
        for _ in 0..FAULTS_OFTEN {
            assert_eq!(tables.fault_of((SPACE, page(4)), 7), FaultAction::Zero);
        }
        assert!(tables.faulting().is_empty(), "nobody asks any more");
    }

    #[test]
    fn what_was_leaving_is_known_with_its_place_until_nobody_owns_it() {
        let mut tables = adopted();
        let left = tables.left_leaving(SPACE);
        assert!(matches!(left[..], [(at, _, 5)] if at == page(3)));
        tables.end_unowned();
        assert_eq!(tables.left_leaving(SPACE), left);
        tables.unmap(SPACE, 3 * PAGE..4 * PAGE);
        assert!(tables.left_leaving(SPACE).is_empty());
        tables.end_unowned();
        assert_eq!(tables.free_slots(), 3);
        assert_eq!(tables.generation(7), 9);
        assert_eq!(tables.newest(), SpaceId(4), "it has ended");
    }

    #[test]
    fn a_page_whose_marker_was_noted_is_not_forgotten_when_it_is_removed() {
        let (mut tables, all) = (adopted(), 0..8 * PAGE);
        let [(slot, place)] = tables.left_unmarked(SPACE, &all)[..] else { panic!("none leaves") };
        tables.marked(slot, place);
        tables.commit();
        let file = tables.file().try_clone().expect("a descriptor");
        let mut tables = Tables::recover(file, 1024).expect("tables");
        tables.adopt_space(SPACE);
        assert!(tables.left_unmarked(SPACE, &all).is_empty());
        tables.remove(SPACE, all);
        assert_eq!(tables.left_leaving(SPACE).len(), 1, "its marker would be nobody's");
    }
}
