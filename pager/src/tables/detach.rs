//! The way home of all pages, before the workload is let go.

use std::ops::Range;

use gms_policy::ids::{PageAddr, SpaceId};

use super::{Phase, Place, Tables};
use crate::page_map::{Content, PAGE, State};

impl Tables {
    /// Pages that are not in the workload's memory: in the write-back buffer or only at an agent.
    pub fn away_pages(&self) -> u64 {
        self.map.away()
    }

    /// Pages in the write-back buffer whose bytes are there, each with its slot.
    pub fn buffered(&self) -> Vec<(Place, u32)> {
        let there = |phase| matches!(phase, Phase::Ready | Phase::Dealt(_) | Phase::Sent { .. });
        let slots = self.slots.iter().enumerate().filter(|(_, slot)| there(slot.phase));
        slots
            .flat_map(|(i, slot)| slot.owners.iter().map(move |owner| (owner.place, i as u32)))
            .collect()
    }

    /// Calls `each` for the pages of a space that are only at an agent, in address order from `from` on, until it returns false or
    /// `entries` of the page map have been looked at. Returns the address to go on from; `None` at the end of the space.
    pub fn visit_remote(
        &self,
        space: SpaceId,
        from: u64,
        mut entries: usize,
        mut each: impl FnMut(PageAddr, Content) -> bool,
    ) -> Option<u64> {
        let mut next = None;
        self.map.visit(space, from..u64::MAX, |page, state| {
            entries = entries.saturating_sub(1);
            let more = match state {
                State::Remote(content) => each(page, content),
                State::Slot(_) | State::Kept(_) | State::Empty => true,
            };
            let stop = !more || entries == 0;
            next = stop.then_some(page.get() + PAGE);
            !stop
        });
        next
    }

    /// Whether the page is only at an agent, as this content.
    pub fn is_away(&self, place: Place, content: Content) -> bool {
        self.map.get(place.0, place.1) == State::Remote(content)
    }

    /// Nobody has the page any more, and its address has no marker: whoever faults there waits until it is poisoned.
    pub fn doom(&mut self, place: Place) {
        self.doomed.insert(place);
    }

    /// Whether only the poison is missing.
    pub fn is_doomed(&self, place: Place) -> bool {
        self.doomed.contains(&place)
    }

    /// What is discarded needs no poison.
    pub(super) fn reprieve(&mut self, space: SpaceId, range: &Range<u64>) {
        if !self.doomed.is_empty() {
            self.doomed.retain(|place| place.0 != space || !range.contains(&place.1.get()));
        }
    }

    /// The page is the kernel's again, for good: installed from `content`, or poisoned because nobody has its bytes any more. The agent
    /// may forget it. Nothing happens if the entry has changed meanwhile.
    pub fn leave_to_kernel(&mut self, place: Place, content: Content) {
        if self.is_away(place, content) {
            self.forget_page(place, State::Remote(content));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::range_set::RangeSet;
    use crate::tables::{EvictOutcome, FaultAction, Remap, WriteOutcome};
    use gms_policy::ids::AgentId;
    use gms_policy::redundancy::AgentSet;

    const SPACE: SpaceId = SpaceId(1);

    /// A space whose first `pages` pages are at agent 0.
    fn away(pages: u64) -> Tables {
        let mut tables = Tables::new(pages as u32, 1024).expect("a memfd");
        tables.add_space(SPACE);
        tables.register(SPACE, 0..pages * PAGE, &RangeSet::default());
        let all: Vec<PageAddr> = (0..pages).map(|n| PageAddr::containing(n * PAGE)).collect();
        let (mut leaving, mut wake) = (Vec::new(), Vec::new());
        tables.begin_evict(SPACE, &all, &mut leaving);
        for &(page, slot) in &leaving {
            tables.finish_evict(slot, EvictOutcome::Moved(page.get()), &mut wake);
        }
        assert_eq!((tables.buffered().len() as u64, tables.away_pages()), (pages, pages));
        for (slot, ..) in tables.start_write(AgentSet::of(AgentId(0)), pages as usize) {
            tables.written(slot, AgentId(0), WriteOutcome::Stored);
        }
        assert_eq!((tables.buffered().len(), tables.away_pages()), (0, pages));
        tables
    }

    #[test]
    fn a_scan_goes_on_where_it_stood() {
        let tables = away(10);
        let (mut seen, mut from) = (Vec::new(), Some(0));
        let mut calls = 0;
        while let Some(at) = from {
            from = tables.visit_remote(SPACE, at, 4, |page, _| {
                seen.push(page.get() / PAGE);
                seen.len() != 6
            });
            calls += 1;
        }
        assert_eq!(seen, (0..10).collect::<Vec<u64>>());
        // After 4 entries, after 2 more (`each` said so), after 4 more, and at the end.
        assert_eq!(calls, 4);
    }

    #[test]
    fn what_is_home_is_no_longer_away_and_may_be_forgotten() {
        let mut tables = away(3);
        for n in 0..3 {
            let place = (SPACE, PageAddr::containing(n * PAGE));
            let FaultAction::Fetch(content) = tables.fault(place) else { panic!("not away") };
            tables.leave_to_kernel(place, content);
            tables.leave_to_kernel(place, content);
            assert_eq!((tables.away_pages(), tables.remote_pages()), (2 - n, 2 - n));
            assert_eq!(tables.take_discards(AgentId(0), 9), [content.id]);
        }
    }

    #[test]
    fn a_page_of_parent_and_child_is_forgotten_when_both_have_it() {
        let mut tables = away(1);
        tables.fork(SPACE, SpaceId(2));
        let page = PageAddr::containing(0);
        let FaultAction::Fetch(content) = tables.fault((SPACE, page)) else { panic!("not away") };
        tables.leave_to_kernel((SPACE, page), content);
        assert_eq!((tables.away_pages(), tables.discards_waiting()), (1, 0));
        tables.leave_to_kernel((SpaceId(2), page), content);
        assert_eq!((tables.away_pages(), tables.discards_waiting()), (0, 1));
    }

    #[test]
    fn faults_on_a_lost_page_wait_for_its_poison_wherever_it_goes() {
        let mut tables = away(3);
        let page = |n: u64| PageAddr::containing(n * PAGE);
        let FaultAction::Fetch(content) = tables.fault((SPACE, page(0))) else { panic!("home") };
        (0..3).for_each(|n| tables.doom((SPACE, page(n))));
        let child = SpaceId(2);
        tables.fork(SPACE, child);
        for space in [SPACE, child] {
            assert_eq!(tables.fault((space, page(0))), FaultAction::Wait);
            assert!(!tables.is_remote((space, page(0)), content));
            assert_eq!(tables.begin_prefetch(space, (0..3).map(page), 3), []);
        }
        let moved = Remap { from: 0, to: 64 * PAGE, length: PAGE };
        tables.remap(SPACE, moved);
        assert!(tables.is_doomed((SPACE, page(64))) && !tables.is_doomed((SPACE, page(0))));
        // What the program discards meanwhile is zeros, and nothing is left to be poisoned.
        tables.remove(SPACE, PAGE..2 * PAGE);
        tables.unmap(SPACE, 2 * PAGE..3 * PAGE);
        assert!(!tables.is_doomed((SPACE, page(1))) && !tables.is_doomed((SPACE, page(2))));
        tables.leave_to_kernel((child, page(0)), content);
        assert!(!tables.is_doomed((child, page(0))) && tables.is_empty((child, page(0))));
    }

    /// Its neighbours go as a whole chunk would.
    #[test]
    fn a_lost_page_moves_with_its_chunk() {
        let mut tables = away(3);
        let place = |base: u64, n: u64| (SPACE, PageAddr::containing(base + n * PAGE));
        let there = 1 << 30;
        tables.doom(place(0, 1));
        tables.remap(SPACE, Remap { from: 0, to: there, length: 2 << 20 });
        assert!(tables.is_doomed(place(there, 1)) && !tables.is_doomed(place(0, 1)));
        assert_eq!(tables.fault(place(there, 1)), FaultAction::Wait);
        for n in [0, 2] {
            assert!(matches!(tables.fault(place(there, n)), FaultAction::Fetch(_)));
        }
        assert!(!tables.knows(SPACE, 0..there));
    }
}
