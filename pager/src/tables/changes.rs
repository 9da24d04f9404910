//! Changes of an address space, applied to the tables in the order in which they were made (see `order`).

use std::ops::Range;

use gms_policy::ids::{PageAddr, SpaceId};

use super::order::{Change, Doubt, Orders, Places, Remap, Seen, contests, images, order};
use super::{Owner, Phase, Place, SpaceState, Tables};
use crate::page_map::State;
use crate::range_set::RangeSet;

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
    pub fn forget_leaving(&mut self, space: SpaceId, range: &Range<u64>) {
        let within = |place: &Place| range.contains(&place.1.get());
        for place in self.leaving_of(space).filter(within).collect::<Vec<Place>>() {
            self.disown(place);
        }
    }

    /// Pages of a space that are leaving and have no marker yet.
    pub(super) fn leaving_of(&self, space: SpaceId) -> impl Iterator<Item = Place> + '_ {
        let unmarked = self.leaving.iter().flat_map(|&index| self.unmarked(index));
        unmarked.filter(move |place| place.0 == space)
    }

    /// Those, and the pages that are about to be poisoned: nor have they markers.
    pub(super) fn unmarked_of(&self, space: SpaceId) -> impl Iterator<Item = PageAddr> + '_ {
        let doomed = self.doomed.iter().filter(move |place| place.0 == space).copied();
        self.leaving_of(space).chain(doomed).map(|(_, page)| page)
    }

    /// Those of a range.
    pub fn unmarked_in(&self, space: SpaceId, range: &Range<u64>) -> Vec<PageAddr> {
        self.unmarked_of(space).filter(|page| range.contains(&page.get())).collect()
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

    /// Where the pages may be that have no markers yet, as far as it depends on the order of the changes.
    pub fn unmarked_places(&self, space: SpaceId, changes: &[Change]) -> RangeSet {
        let mut all = RangeSet::default();
        for group in contests(changes) {
            let (members, places) = self.places(space, changes, &group, &[]);
            let images = images(&members, places.leaving());
            places.leaving().iter().chain(images.iter()).for_each(|range| all.insert(range));
        }
        all
    }

    /// The order in which changes were made that are given in the order in which they were told. No other change is under way.
    pub fn order(&self, space: SpaceId, changes: &[Change], seen: &Seen) -> Result<Orders, Doubt> {
        let mut orders = Orders::as_told(changes.len());
        for group in contests(changes) {
            let (members, places) = self.places(space, changes, &group, &[]);
            let mut there = Seen { marked: RangeSet::default(), mapped: seen.mapped.clone() };
            for range in places.concerned() {
                seen.marked.overlaps(range).for_each(|part| there.marked.insert(part));
            }
            orders.set(&group, order(&places, &members, &there)?);
        }
        Ok(orders)
    }

    /// Whether none of the changes, made in the order in which they were told, reaches what is taken.
    pub fn is_free(&self, space: SpaceId, changes: &[Change]) -> bool {
        contests(changes).iter().all(|group| {
            let (members, mut places) = self.places(space, changes, group, &[]);
            places.are_made_way_for(&members)
        })
    }

    /// The changes of a group, and where the pages are that are away and that they concern, but for `others`.
    pub(super) fn places(
        &self,
        space: SpaceId,
        changes: &[Change],
        group: &[usize],
        others: &[Place],
    ) -> (Vec<Change>, Places) {
        let members: Vec<Change> = group.iter().map(|&index| changes[index].clone()).collect();
        let mut concerned = RangeSet::default();
        for range in members.iter().flat_map(Change::left_and_reached) {
            concerned.insert(range);
        }
        let known = concerned.iter().flat_map(|range| self.map.known(space, range));
        let away = known.filter(|(page, state)| {
            !matches!(state, State::Kept(_)) && !others.contains(&(space, *page))
        });
        let away: Vec<PageAddr> = away.map(|(page, _)| page).collect();
        let mut registered = RangeSet::default();
        if let Some(state) = self.spaces.get(&space) {
            for range in concerned.iter() {
                state.registered.overlaps(range).for_each(|part| registered.insert(part));
            }
        }
        let leaving = self.unmarked_of(space).filter(|page| !others.contains(&(space, *page)));
        let leaving = leaving.filter(|page| concerned.contains(page.get())).collect::<Vec<_>>();
        let places = Places::new(away.into_iter(), leaving.into_iter(), registered, concerned);
        (members, places)
    }

    /// The range is no longer mapped.
    pub fn unmap(&mut self, space: SpaceId, range: Range<u64>) {
        self.forget(space, range.clone());
        if let Some(state) = self.spaces.get_mut(&space) {
            state.unregister(range.clone());
            state.release(range);
        }
    }

    /// Pages have moved. Threads that wait for a page of either range must be woken.
    pub fn remap(&mut self, space: SpaceId, remap: Remap) {
        // What is still known there has been discarded.
        self.forget(space, remap.target());
        self.shift(space, &remap);
        if let Some(state) = self.spaces.get_mut(&space) {
            state.unregister(remap.source());
            state.register(remap.target());
            // A removal that another thread has begun acts on the old addresses, where nothing is any more.
            state.release(remap.source());
            state.release(remap.target());
        }
    }

    /// `child` begins as a copy of `parent`. What it does not inherit has no markers there.
    pub fn fork(&mut self, parent: SpaceId, child: SpaceId) {
        let registered = self.registered(parent);
        if let Err(full) = self.map.fork(parent, child) {
            self.exhausted = Some(full);
        }
        for (_, owners) in self.slots.owners_mut().filter(|(phase, _)| **phase != Phase::Free) {
            let of_parent = owners.iter().filter(|owner| owner.place.0 == parent);
            let copies: Vec<Owner> =
                of_parent.map(|o| Owner { place: (child, o.place.1), ..*o }).collect();
            owners.extend(copies);
        }
        self.spaces.insert(child, SpaceState::new(registered));
        self.note_newest(child);
        self.private_of(child).into_iter().for_each(|place| self.disown(place));
        let doomed = self.doomed.iter().filter(|place| place.0 == parent);
        let inherited: Vec<Place> = doomed.map(|place| (child, place.1)).collect();
        self.doomed.extend(inherited);
    }

    /// Whether another space than this one, whatever has been changed there, has the slot's page.
    pub fn is_inherited(&self, index: u32, space: SpaceId) -> bool {
        self.slots[index as usize].owners.iter().any(|owner| owner.place.0 != space)
    }

    /// Pages of a space that are leaving, without a marker yet, and are not inherited.
    pub(super) fn private_of(&self, space: SpaceId) -> Vec<Place> {
        let private = self.leaving.iter().filter(|&&index| self.slots[index as usize].private);
        let unmarked = private.flat_map(|&index| self.unmarked(index));
        unmarked.filter(|place| place.0 == space).collect()
    }

    /// Moves what is known to another place, of which nothing is known.
    fn shift(&mut self, space: SpaceId, remap: &Remap) {
        let source = remap.source();
        let doomed = self.doomed.iter().filter(|place| place.0 == space).map(|place| place.1);
        let doomed = doomed.filter(|page| source.contains(&page.get()));
        self.map.shift(space, source.clone(), remap.to, doomed);
        for (page, state) in self.map.known(space, source) {
            let (place, target) = ((space, page), (space, remap.moved(page)));
            let mark = self.map.get_marked(space, page).1;
            let moved = self.put_marked(target, state, mark);
            if let Err(full) = moved.and_then(|()| self.put(place, State::Empty)) {
                self.exhausted = Some(full);
                return;
            }
            if self.doomed.remove(&place) {
                self.doomed.insert(target);
            }
            if let State::Slot(index) = state {
                let owners = &mut self.slots[index as usize].owners;
                let owner = owners.iter_mut().find(|owner| owner.place == place);
                owner.into_iter().for_each(|owner| owner.place = target);
            }
        }
    }
}
