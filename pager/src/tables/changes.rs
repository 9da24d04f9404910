//! Changes of an address space, applied to the tables.
//!
//! **Order.** Unmaps and remaps are told after the kernel has let its locks go: of several threads' changes a later one may be told first. What
//! programs do with memory that is theirs leads to one kind of surprise: a range that one thread has given up (by an unmap, or a remap
//! to elsewhere), of which is told late, has meanwhile become the target of another's remap. So while changes are under way that have not been told,
//!
//! * what is known at the target of a remap goes aside, as another *generation* of these addresses, instead of being forgotten;
//! * a change that concerns the target of such a remap is *contested*: markers tell which generation it means.
//!
//! If the space has one thread only, a remap to where nothing was, as far as was told, is no such surprise: the thread may move the same memory many
//! times while it is read of that.
//!
//! When all changes have been told (`settle_changes`) what is still aside has gone.

use std::collections::BTreeSet;
use std::ops::Range;

use gms_policy::ids::{PageAddr, SpaceId};

use super::{Owner, Phase, Place, SpaceState, Tables};
use crate::page_map::{PAGE, State};
use crate::range_set::RangeSet;

/// It cannot be known which pages a remap has moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doubt;

/// A part of an address space that has moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remap {
    /// Where it was.
    pub from: u64,
    /// Where it is.
    pub to: u64,
    /// Bytes.
    pub length: u64,
}

impl Remap {
    /// The addresses that have been left.
    pub fn source(&self) -> Range<u64> {
        self.from..self.from + self.length
    }

    /// The addresses now.
    pub fn target(&self) -> Range<u64> {
        self.to..self.to + self.length
    }

    /// What it has done to a part of its source.
    fn part(&self, source: Range<u64>) -> Remap {
        let to = source.start - self.from + self.to;
        Remap { from: source.start, to, length: source.end - source.start }
    }

    fn moved(&self, page: PageAddr) -> PageAddr {
        PageAddr::containing(page.get() - self.from + self.to)
    }
}

/// The name under which a space's older generation is kept: what was where a remap has led.
fn aside(space: SpaceId) -> SpaceId {
    SpaceId(space.0 | 1 << 63)
}

/// The name under which is kept what was unmapped while other changes were under way: a child that was forked before may have it.
fn gone(space: SpaceId) -> SpaceId {
    SpaceId(space.0 | 1 << 62)
}

/// What is known of a page in one generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Nothing,
    Resident,
    /// Moved out, without a marker yet.
    Leaving,
    /// Its address has a marker, if it is the workload's.
    Evicted,
}

impl Tables {
    /// MADV_DONTNEED, MADV_FREE or MADV_REMOVE is about to act on the range. What becomes of its pages their markers will tell.
    pub fn remove(&mut self, space: SpaceId, range: Range<u64>) {
        self.forget_leaving(space, &range);
        self.reprieve(space, &range);
        let known = self.map.knows(space, range.clone());
        if let Some(state) = self.spaces.get_mut(&space) {
            state.remove(range, known);
        }
    }

    /// Pages that were moved out and have no marker yet, which would be left after the removal: what is removed is theirs.
    fn forget_leaving(&mut self, space: SpaceId, range: &Range<u64>) {
        let within = |place: &Place| place.0 == space && range.contains(&place.1.get());
        let unmarked = self.leaving.iter().flat_map(|&index| self.unmarked(index));
        for place in unmarked.filter(within).collect::<Vec<Place>>() {
            self.disown(place);
        }
    }

    /// Ranges of a space in which something known may have been discarded, each told once.
    pub fn take_stale(&mut self, space: SpaceId) -> RangeSet {
        self.spaces.get_mut(&space).map(SpaceState::take_stale).unwrap_or_default()
    }

    /// What may have been discarded in the range could not be seen yet.
    pub fn look_again(&mut self, space: SpaceId, range: Range<u64>) {
        if let Some(state) = self.spaces.get_mut(&space) {
            state.stale.insert(range);
        }
    }

    /// Releases what has been discarded in the range: `marked` are its markers, `taken` holds pages, markers or anything. All events have been read.
    pub fn reconcile(
        &mut self,
        space: SpaceId,
        range: Range<u64>,
        marked: &RangeSet,
        taken: &RangeSet,
    ) {
        for (page, state) in self.map.known(space, range) {
            let place = (space, page);
            let gone = match state {
                State::Remote(_) | State::Slot(_) => {
                    !marked.contains(page.get())
                        && !self.is_leaving(place)
                        && !self.prefetching.contains(&place)
                        && !self.doomed.contains(&place)
                }
                State::Kept(_) => !taken.contains(page.get()),
                State::Empty => false,
            };
            if gone {
                self.forget_page(place, state);
            }
        }
    }

    /// Whether it is in question what a change of the range means: then the markers there must be looked up for it.
    pub fn is_contested(&self, space: SpaceId, range: &Range<u64>) -> bool {
        self.spaces.get(&space).is_some_and(|s| s.is_contested(range))
    }

    /// The range is no longer mapped. `marked` are the markers there, if it is contested. `settled` says that no other change is under way.
    pub fn unmap(
        &mut self,
        space: SpaceId,
        range: Range<u64>,
        marked: Option<&RangeSet>,
        settled: bool,
    ) {
        match marked {
            Some(marked) => self.unmap_contested(space, range.clone(), marked),
            None if !settled => self.keep_as(gone(space), space, range.clone()),
            None => self.forget(space, range.clone()),
        }
        if let Some(state) = self.spaces.get_mut(&space) {
            state.unregister(range.clone());
            state.release(range);
        }
    }

    /// If pages are there, it was the older generation that went. If not, they have gone, or moved on, of which will be told.
    fn unmap_contested(&mut self, space: SpaceId, range: Range<u64>, marked: &RangeSet) {
        // That the range is longer than the targets of remaps proves nothing: what was moved there may have grown since.
        let mut left = false;
        for (page, state) in self.map.known(space, range.clone()) {
            let place = (space, page);
            match state {
                State::Kept(_) | State::Empty => {}
                _ if marked.contains(page.get()) || self.is_leaving(place) => left = true,
                _ => self.keep_as(gone(space), space, page.get()..page.get() + PAGE),
            }
        }
        if left {
            self.forget(aside(space), range);
        }
    }

    /// Pages have moved. Threads that wait for a page of either range must be woken. `marked` are the markers in both, if one is contested. `alone` says that
    /// the space has one thread only, whose changes are told in their order.
    pub fn remap(
        &mut self,
        space: SpaceId,
        remap: Remap,
        marked: Option<&RangeSet>,
        alone: bool,
    ) -> Result<(), Doubt> {
        let contested = self.contested_parts(space, remap.source());
        let moved = match marked {
            Some(marked) => self.moved_pages(space, &remap, &contested, marked)?,
            // Nobody knows better than what is told.
            None => self.pages(space, &contested).map(|page| (space, page)).collect(),
        };
        self.forget_clean(space, remap.target());
        if self.map.knows(aside(space), remap.target()) && self.map.knows(space, remap.target()) {
            return Err(Doubt);
        }
        let occupied = !alone
            || self.registered_in(space, remap.target())
            || self.map.knows(space, remap.target());
        self.keep_as(aside(space), space, remap.target());
        for (generation, page) in moved {
            self.shift(generation, &remap.part(page.get()..page.get() + PAGE), space);
        }
        for part in contested.gaps(remap.source()) {
            self.shift(space, &remap.part(part), space);
        }
        if let Some(state) = self.spaces.get_mut(&space) {
            state.unregister(remap.source());
            state.unregister(remap.target());
            if marked.is_none() {
                state.register(remap.target());
            }
            // A removal that another thread has begun acts on the old addresses, where nothing is any more.
            state.release(remap.source());
            state.release(remap.target());
            if occupied {
                state.contested.insert(remap.target());
            }
            state.remaps.push(remap);
        }
        Ok(())
    }

    /// All changes that have begun have been told.
    pub fn settle_changes(&mut self, space: SpaceId) {
        self.forget(aside(space), 0..u64::MAX);
        self.forget(gone(space), 0..u64::MAX);
        if let Some(state) = self.spaces.get_mut(&space) {
            state.remaps.clear();
            state.contested = RangeSet::default();
        }
    }

    /// Remaps told of since all changes had been.
    pub fn unsettled_remaps(&self, space: SpaceId) -> Vec<Remap> {
        self.spaces.get(&space).map(|s| s.remaps.clone()).unwrap_or_default()
    }

    /// `child` begins as a copy of `parent`. What it does not inherit has no markers there.
    pub fn fork(&mut self, parent: SpaceId, child: SpaceId) {
        let registered = self.registered(parent);
        self.map.fork(parent, child);
        for slot in self.slots.iter_mut().filter(|slot| slot.phase != Phase::Free) {
            let of_parent = slot.owners.iter().filter(|owner| owner.place.0 == parent);
            let copies: Vec<Owner> =
                of_parent.map(|o| Owner { place: (child, o.place.1), ..*o }).collect();
            slot.owners.extend(copies);
        }
        self.spaces.insert(child, SpaceState::new(registered));
        self.disinherit(child);
        let doomed = self.doomed.iter().filter(|place| place.0 == parent);
        let inherited: Vec<Place> = doomed.map(|place| (child, place.1)).collect();
        self.doomed.extend(inherited);
        // Perhaps it was forked before these went.
        for older in [aside(parent), gone(parent)] {
            for (page, state) in self.map.known(older, 0..u64::MAX) {
                if self.is_empty((child, page)) {
                    self.copy_entry((older, page), state, (child, page));
                }
            }
        }
    }

    /// Whether another space than this one, whatever has been changed there, has the slot's page.
    pub fn is_inherited(&self, index: u32, space: SpaceId) -> bool {
        let own = [space, aside(space), gone(space)];
        self.slots[index as usize].owners.iter().any(|owner| !own.contains(&owner.place.0))
    }

    /// Takes the pages away from a new child that are leaving, without a marker yet, and are not inherited.
    fn disinherit(&mut self, child: SpaceId) {
        let private = self.leaving.iter().filter(|&&index| self.slots[index as usize].private);
        let unmarked = private.flat_map(|&index| self.unmarked(index));
        for place in unmarked.filter(|place| place.0 == child).collect::<Vec<Place>>() {
            self.disown(place);
        }
    }

    fn copy_entry(&mut self, from: Place, state: State, to: Place) {
        match state {
            State::Slot(index) => {
                let owners = &mut self.slots[index as usize].owners;
                let marked = owners.iter().all(|owner| owner.place != from || owner.marked);
                owners.push(Owner { place: to, marked });
            }
            State::Remote(content) | State::Kept(content) => self.share(content.id, 1),
            State::Empty => {}
        }
        if !self.put_marked(to, state, self.map.mark(from.0, from.1)) {
            self.exhausted = true;
        }
    }

    /// The contested parts of the range.
    fn contested_parts(&self, space: SpaceId, range: Range<u64>) -> RangeSet {
        let mut parts = RangeSet::default();
        if let Some(state) = self.spaces.get(&space) {
            state.contested.overlaps(range).for_each(|part| parts.insert(part));
        }
        parts
    }

    fn registered_in(&self, space: SpaceId, range: Range<u64>) -> bool {
        self.spaces.get(&space).is_some_and(|s| s.registered.overlaps(range).next().is_some())
    }

    fn pages(&self, space: SpaceId, ranges: &RangeSet) -> impl Iterator<Item = PageAddr> {
        let known: Vec<PageAddr> = ranges
            .iter()
            .flat_map(|range| self.map.known(space, range))
            .map(|(page, _)| page)
            .collect();
        known.into_iter()
    }

    /// Which pages of the contested parts have moved, of which generation.
    fn moved_pages(
        &self,
        space: SpaceId,
        remap: &Remap,
        contested: &RangeSet,
        marked: &RangeSet,
    ) -> Result<Vec<(SpaceId, PageAddr)>, Doubt> {
        let generations = [space, aside(space), gone(space)];
        let pages: BTreeSet<PageAddr> =
            generations.into_iter().flat_map(|of| self.pages(of, contested)).collect();
        let mut moved = Vec::new();
        let mut open = Vec::new();
        // That more has moved than came there by remaps proves nothing: it may have grown since.
        let (mut young_moved, mut older_moved) = (false, false);
        for page in pages {
            let stayed = marked.contains(page.get());
            let arrived = marked.contains(remap.moved(page).get());
            let young = self.generation_of(space, page);
            let older = match (
                self.generation_of(aside(space), page),
                self.generation_of(gone(space), page),
            ) {
                (Known::Evicted, Known::Evicted) if !older_moved => return Err(Doubt),
                (Known::Evicted, _) => Some(aside(space)),
                (_, Known::Evicted) => Some(gone(space)),
                _ => None,
            };
            match (young, stayed, arrived, older) {
                // A clean copy is what it is, wherever it is thought to be: it is compared when it is evicted.
                (Known::Nothing | Known::Resident, _, true, Some(older))
                | (Known::Evicted, true, true, Some(older)) => {
                    older_moved = true;
                    moved.push((older, page));
                }
                (Known::Evicted, true, true, None) => return Err(Doubt),
                (Known::Evicted, false, true, None) => {
                    young_moved = true;
                    moved.push((space, page));
                }
                // It was the older generation's change, of which nothing is known here: who makes a change waits until it is told, and
                // would find the page at the target. This one has moved by another, of which will be told.
                (Known::Evicted, false, false, _) => {}
                (Known::Leaving, ..) | (Known::Evicted, false, true, Some(_)) => {
                    open.push((page, older));
                }
                (Known::Evicted, true, false, _) | (Known::Nothing | Known::Resident, ..) => {}
            }
        }
        for (page, older) in open {
            match (young_moved, older_moved, older) {
                (true, false, _) => moved.push((space, page)),
                (false, true, Some(older)) => moved.push((older, page)),
                (false, true, None) => {}
                _ => return Err(Doubt),
            }
        }
        Ok(moved)
    }

    fn generation_of(&self, space: SpaceId, page: PageAddr) -> Known {
        match self.map.get(space, page) {
            State::Empty => Known::Nothing,
            State::Kept(_) => Known::Resident,
            State::Slot(_) if self.is_leaving((space, page)) => Known::Leaving,
            State::Slot(_) | State::Remote(_) => Known::Evicted,
        }
    }

    /// What is known of the range belongs to an older generation of it.
    fn keep_as(&mut self, generation: SpaceId, space: SpaceId, range: Range<u64>) {
        self.forget_clean(space, range.clone());
        if !self.map.knows(space, range.clone()) {
            return;
        }
        self.forget(generation, range.clone());
        let length = range.end - range.start;
        let stay = Remap { from: range.start, to: range.start, length };
        self.shift(space, &stay, generation);
    }

    /// Resident pages of the range are not known to have clean copies any more: where they are is the kernel's, and a doubt about them would be none.
    fn forget_clean(&mut self, space: SpaceId, range: Range<u64>) {
        for (page, state) in self.map.known(space, range) {
            if matches!(state, State::Kept(_)) {
                self.forget_page((space, page), state);
            }
        }
    }

    /// Moves what is known of `from` to another place, of which nothing is known.
    fn shift(&mut self, from: SpaceId, remap: &Remap, to: SpaceId) {
        for (page, state) in self.map.known(from, remap.source()) {
            let target = (to, remap.moved(page));
            let mark = self.map.mark(from, page);
            if !self.put_marked(target, state, mark) || !self.put((from, page), State::Empty) {
                self.exhausted = true;
                return;
            }
            if self.doomed.remove(&(from, page)) {
                self.doomed.insert(target);
            }
            if let State::Slot(index) = state {
                let owners = &mut self.slots[index as usize].owners;
                let owner = owners.iter_mut().find(|owner| owner.place == (from, page));
                owner.into_iter().for_each(|owner| owner.place = target);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gms_policy::ids::AgentId;

    use crate::tables::{EvictOutcome, FaultAction};

    /// That a block has grown is not told: it is longer when it moves again than it was when it came.
    #[test]
    fn a_block_that_grew_moves_with_its_own_pages() {
        let mut tables = Tables::new(8, 64).unwrap();
        let (space, at) = (SpaceId(1), |page: u64| (1 << 30) + page * PAGE);
        let first = |page| PageAddr::containing(at(page));
        tables.add_space(space);
        tables.register(space, at(0)..at(8), &RangeSet::default());
        let (mut leaving, mut wake) = (Vec::new(), Vec::new());
        tables.begin_evict(space, &[first(0), first(4)], &mut leaving);
        for (tag, &(_, slot)) in leaving.iter().enumerate() {
            tables.finish_evict(slot, EvictOutcome::Moved(tag as u64), &mut wake);
        }
        // What was at 4 is freed; what was at 0 comes there, grows, and moves on.
        tables.unmap(space, at(4)..at(8), None, false);
        let comes = Remap { from: at(0), to: at(4), length: 4 * PAGE };
        assert!(tables.remap(space, comes, None, false).is_ok());
        let moves = Remap { from: at(4), to: at(16), length: 8 * PAGE };
        let mut marked = RangeSet::default();
        marked.insert(at(16)..at(17));
        if tables.remap(space, moves, Some(&marked), false).is_ok() {
            assert_eq!(tables.fault((space, first(16))), FaultAction::Buffered(leaving[0].1));
        }
    }

    /// Blocks may come to the same place again and again, as long as what was there is resident.
    #[test]
    fn clean_pages_raise_no_doubt() {
        let mut tables = Tables::new(8, 64).unwrap();
        let (space, at) = (SpaceId(1), |page: u64| (1 << 30) + page * PAGE);
        tables.add_space(space);
        let place = (space, PageAddr::containing(at(0)));
        for tag in 0..3 {
            tables.register(space, at(0)..at(4), &RangeSet::default());
            let (mut leaving, mut wake) = (Vec::new(), Vec::new());
            tables.begin_evict(space, &[place.1], &mut leaving);
            let slot = leaving[0].1;
            tables.finish_evict(slot, EvictOutcome::Moved(tag), &mut wake);
            assert_eq!(tables.start_write(AgentId(0), 1).len(), 1);
            tables.written(slot, true);
            let FaultAction::Fetch(content) = tables.fault(place) else { panic!("not evicted") };
            assert!(tables.fetched(place, content, true));
            let comes = Remap { from: at(8), to: at(0), length: PAGE };
            assert!(tables.remap(space, comes, Some(&RangeSet::default()), false).is_ok(), "{tag}");
        }
    }

    #[test]
    fn spaces_are_never_taken_for_generations_of_others() {
        let mut tables = Tables::new(8, 64).unwrap();
        // After a thousand million forks, and after four.
        for forks in [1 << 30, 1 << 31] {
            let (old, young) = (SpaceId(1), SpaceId(forks + 1));
            tables.add_space(old);
            tables.add_space(young);
            let page = PageAddr::containing(PAGE);
            tables.register(young, PAGE..2 * PAGE, &RangeSet::default());
            tables.begin_evict(young, &[page], &mut Vec::new());
            assert!(tables.knows(young, 0..u64::MAX));
            tables.settle_changes(old);
            assert!(tables.knows(young, 0..u64::MAX), "{forks}");
        }
    }
}
