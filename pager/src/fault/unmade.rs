//! Unmaps that were told of and not made. The kernel tells of one before it knows whether the process's limits, or a sealed mapping in the range, allow it; it is
//! made wholly or not at all. So what has a marker is still there, and what has not is taken for unmapped.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use super::FaultCore;
use crate::kernel::{Probe, Registration};
use crate::page_map::PAGE;
use crate::range_set::RangeSet;
use crate::space::Space;
use crate::sync::lock;
use crate::tables::{Change, Part, contested, if_unmade};
use gms_transport::Transport;

/// Of more changes together all unmaps are taken for made.
const CHANGES_MAX: usize = 256;
/// Pages of an unmap that are looked at in a child that nobody has met yet.
const PROBES_MAX: usize = 16;

impl<T: Transport> FaultCore<T> {
    /// Drops the unmaps that were not made. False if other changes have begun meanwhile and it matters. The gate is closed.
    pub(super) fn drop_unmade(&mut self, space: &Space) -> bool {
        let Some(backlog) = self.spaces.get(&space.id).map(|state| &state.backlog) else {
            return true;
        };
        let changes = backlog.iter().filter(|told| told.event.change().is_some());
        let made = changes.clone().enumerate().filter(|(_, told)| told.made);
        let mut made: BTreeSet<usize> = made.map(|(place, _)| place).collect();
        let changes: Vec<Change> =
            changes.filter_map(|told| told.event.change().cloned()).collect();
        if changes.len() > CHANGES_MAX {
            return true;
        }
        let unmaps = self.unmaps(space, &changes, &made);
        if unmaps.is_empty() {
            return true;
        }
        let (mut unmade, mut is_known) = (BTreeSet::new(), true);
        for (place, range) in unmaps {
            // Of what was told before it is known by now whether it was made.
            let parts = match changes.iter().any(|change| change.reached().is_some()) {
                true => if_unmade(&changes, place, &unmade),
                false => vec![(range.clone(), range.start)],
            };
            let there: Option<Vec<bool>> =
                parts.iter().map(|part| self.is_there(space, part)).collect();
            match there {
                Some(there) if there.contains(&true) => drop(unmade.insert(place)),
                Some(_) => drop(made.insert(place)),
                None => {
                    is_known = false;
                    break;
                }
            }
        }
        // What was seen, or not, may have been moved there, or away, by what is not told yet. But a child that nobody has met goes on, and cannot be stopped: what it has
        // not any more is not looked for again.
        let is_met = space.page_tables.get().is_some();
        let matters = is_met || !unmade.is_empty();
        is_known &= !(matters && space.faults.has_event());
        if let Some(state) = self.spaces.get_mut(&space.id) {
            let mut changes = 0..;
            state.backlog.retain_mut(|told| {
                let change = told.event.change().and_then(|_| changes.next());
                told.made = !is_met && change.is_some_and(|change| made.contains(&change));
                !is_known || change.is_none_or(|change| !unmade.contains(&change))
            });
        }
        is_known
    }

    /// The unmaps that are not known as made, and concern pages of which something is known, but for those of which others' changes concern the same: for each its place
    /// among the changes.
    fn unmaps(
        &self,
        space: &Space,
        changes: &[Change],
        made: &BTreeSet<usize>,
    ) -> Vec<(usize, Range<u64>)> {
        let knows = |range: Range<u64>| lock(&self.shared.tables).knows(space.id, range);
        let has_moved = changes.iter().any(|change| change.reached().is_some());
        let mut unmaps = Vec::new();
        for (place, change) in changes.iter().enumerate() {
            let Change::Unmap(range) = change else { continue };
            if !made.contains(&place) && (has_moved || knows(range.clone())) {
                unmaps.push((place, range.clone()));
            }
        }
        if has_moved && !unmaps.is_empty() && !self.is_alone(space) {
            let concerned = contested(changes);
            unmaps.retain(|(_, range)| concerned.overlaps(range.clone()).next().is_none());
        }
        unmaps
    }

    /// Whether a part of the address space, which was elsewhere before the changes, has not been unmapped; `None` if it is being changed.
    fn is_there(&self, space: &Space, part: &Part) -> Option<bool> {
        let (now, before) = (&part.0, part.1..part.1 + (part.0.end - part.0.start));
        if self.has_marker(space, part)? {
            return Some(true);
        }
        let unmarked = lock(&self.shared.tables).unmarked_in(space.id, &before);
        let mut is_mapped = false;
        for page in unmarked {
            is_mapped |= is_registered(space, page.get() - part.1 + now.start)?;
        }
        if !is_mapped {
            return Some(false);
        }
        // Memory may have grown over what was unmapped: that is empty, as nobody is served.
        let taken = space.page_tables.get().and_then(|tables| tables.taken(now.clone()).ok());
        let is_known = |set: &Mutex<RangeSet>, range: &Range<u64>| {
            lock(set).overlaps(range.clone()).next().is_none()
        };
        for range in taken.unwrap_or_default().iter() {
            if is_known(&space.relieved, &range)
                && is_known(&space.unrecorded, &range)
                && is_registered(space, range.start)?
            {
                return Some(true);
            }
        }
        let pid = space.pid.load(Ordering::Relaxed);
        if pid == 0 || (self.asks.refuses)(pid) {
            let name = space.name();
            let why = format!("{name} unmaps memory, and it is not known which pages are there");
            self.shared.fail(why);
        }
        Some(false)
    }

    /// Whether an evicted page of a part has its marker.
    fn has_marker(&self, space: &Space, (now, began): &Part) -> Option<bool> {
        let mut before = *began..began + (now.end - now.start);
        if let Some(page_tables) = space.page_tables.get() {
            return Some(page_tables.marked(now.clone()).is_ok_and(|marked| !marked.is_empty()));
        }
        // Of a child that nobody has met yet. A probe fills what is empty: not where a marker, or poison, is still to come.
        for _ in 0..PROBES_MAX {
            let tables = lock(&self.shared.tables);
            let Some(page) = tables.first_evicted(space.id, before.clone()) else { break };
            let is_doomed = tables.is_doomed((space.id, page));
            drop(tables);
            before.start = page.get() + PAGE;
            if is_doomed {
                continue;
            }
            match space.faults.probe(page.get() - began + now.start) {
                Probe::Occupied => return Some(true),
                Probe::Changing => return None,
                Probe::Gone => break,
                Probe::Absent | Probe::Taken => {}
            }
        }
        Some(false)
    }
}

/// Whether memory is registered at a page; `None` if the address space is being changed.
fn is_registered(space: &Space, page: u64) -> Option<bool> {
    match space.faults.registration(page..page + PAGE) {
        Registration::Whole => Some(true),
        Registration::Changing => None,
        Registration::Not => Some(false),
    }
}

#[cfg(test)]
mod tests;
