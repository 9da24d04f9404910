//! Faults that no agent is needed for: first touches, pages in the write-back buffer, pages that the program has discarded.
//!
//! Everything is decided and done under the tables' lock: what was true when the fault was read may no longer be.

use std::ops::Range;

use gms_transport::Transport;

use super::fetch::{look, look_for_marker};
use super::{Fault, FaultCore, SpaceFaults};
use crate::kernel::{Installed, Probe};
use crate::page_map::PAGE;
use crate::sync::lock;
use crate::tables::{FaultAction, Place};

/// Most pages filled with zeros for one fault.
const ZERO_RUN_MAX: u64 = 64;
/// Streams of first touches followed in each space.
pub(super) const ZERO_STREAMS: usize = 8;

/// As many zeros as are filled at once.
pub(super) fn zeros() -> Box<[u8]> {
    vec![0; (ZERO_RUN_MAX * PAGE) as usize].into()
}

impl<T: Transport> FaultCore<T> {
    pub(super) fn fill_zeros(&mut self, fault: Fault) {
        let (place, write) = (fault.place, fault.write);
        let Some(state) = self.spaces.get_mut(&place.0) else { return };
        let one = place.1.get()..place.1.get() + PAGE;
        let expected = state.expected_run(&one);
        let wanted = state.free_part(expected, &one);
        let mut tables = lock(&self.shared.tables);
        // Since the fault was read it may have been filled, changed and moved out.
        if tables.fault(place) != FaultAction::Zero {
            drop(tables);
            return self.again.push(fault);
        }
        let mut range = tables.empty_run(place.0, wanted, &one);
        if !self.shared.has_room((range.end - range.start) / PAGE + self.shared.sizes.room_kept) {
            range = one.clone();
        }
        // A copy takes the place of a marker or a guard without a word.
        if write && range == one && state.holds(&one) {
            // What came there may have come by a change that has not been told yet.
            let changing = state.space.faults.has_event();
            drop(tables);
            let outcome = if changing { Installed::Changing } else { Installed::Exists };
            return self.not_installed(fault, outcome);
        }
        // A write gets its own page at once; a read gets the shared zero page, which costs no memory.
        let faults = &state.space.faults;
        let (installed, outcome) = match write {
            true => faults.copy_run(range.clone(), &self.zeros, true),
            false => faults.zero(range.clone()),
        };
        range.end = range.start + installed * PAGE;
        tables.zeroed(place.0, range.clone());
        // Before another fault thread looks for room.
        self.shared.count_zeros(installed, write);
        drop(tables);
        let filled = range.contains(&one.start);
        state.note_filled(if installed > 0 { range } else { one });
        if !filled {
            match installed {
                0 => self.not_installed(fault, outcome),
                // Something below it has come meanwhile.
                _ => self.again.push(fault),
            }
        }
    }

    /// A page was not installed although its thread waits for it.
    pub(super) fn not_installed(&mut self, fault: Fault, outcome: Installed) {
        let place = fault.place;
        match outcome {
            Installed::Changing => self.again.push(fault),
            Installed::Exists if self.is_lost(place) => {
                let name = self.spaces.get(&place.0).map(|state| state.space.name());
                let name = name.unwrap_or_default();
                self.shared.fail(format!("an evicted page of {name} was lost track of"));
            }
            // Somebody was faster, or the mapping has gone: the thread finds out by itself.
            _ => self.wake(place),
        }
    }

    /// A page has a marker, and nothing is known of it.
    fn is_lost(&self, place: Place) -> bool {
        let Some(state) = self.spaces.get(&place.0) else { return false };
        let tables = lock(&self.shared.tables);
        let faults = &state.space.faults;
        // While an event is unread it may have come from elsewhere. The markers of an address space that ends can be seen for a while after nobody has it.
        tables.is_empty(place)
            && state.space.has_marker(place.1)
            && !faults.has_event()
            && faults.is_alive()
    }

    /// The page is still in the write-back buffer. The lock is held over the copy, so that the slot cannot be reused.
    pub(super) fn second_chance(&mut self, fault: Fault) {
        let place = fault.place;
        let Some(state) = self.spaces.get(&place.0) else { return };
        let mut tables = lock(&self.shared.tables);
        let FaultAction::Buffered(slot) = tables.fault(place) else {
            drop(tables);
            return self.again.push(fault);
        };
        let probe = look_for_marker(&mut tables, &state.space, place);
        if probe != Probe::Occupied {
            drop(tables);
            return self.probed(fault, probe);
        }
        let outcome = state.space.faults.copy(place.1.get(), self.shared.frames.read(slot));
        if outcome == Installed::Done {
            tables.second_chance(place);
            self.shared.count_resident(1);
        }
        drop(tables);
        if outcome != Installed::Done {
            self.not_installed(fault, outcome);
        }
    }

    /// The page was resident when it was heard of last.
    pub(super) fn look_at_resident(&mut self, fault: Fault) {
        let place = fault.place;
        let Some(state) = self.spaces.get(&place.0) else { return };
        let mut tables = lock(&self.shared.tables);
        if tables.fault(place) != FaultAction::Resident {
            drop(tables);
            return self.again.push(fault);
        }
        let probe = look(&mut tables, &state.space, place);
        drop(tables);
        self.probed(fault, probe);
    }

    fn probed(&mut self, fault: Fault, probe: Probe) {
        match probe {
            Probe::Changing => return self.again.push(fault),
            Probe::Absent => self.shared.count_zeros(1, false),
            Probe::Occupied | Probe::Taken | Probe::Gone => {}
        }
        self.wake(fault.place);
    }
}

impl SpaceFaults {
    /// What to fill at a first touch of the page `one`.
    fn expected_run(&mut self, one: &Range<u64>) -> Range<u64> {
        let next_to = |last: &Range<u64>| last.end == one.start || last.start == one.end;
        let Some(at) = self.zero_streams.iter().position(next_to) else { return one.clone() };
        let last = self.zero_streams.remove(at);
        let bytes = (2 * (last.end - last.start)).min(ZERO_RUN_MAX * PAGE);
        match last.end == one.start {
            true => one.start..one.start + bytes,
            false => one.end.saturating_sub(bytes)..one.end,
        }
    }

    /// Whether anything is at the address: a page, a marker, a guard.
    fn holds(&self, one: &Range<u64>) -> bool {
        match self.space.page_tables.get() {
            Some(page_tables) => page_tables.taken(one.clone()).is_ok_and(|t| !t.is_empty()),
            // Of a child that has not been met yet. A probe leaves zeros where there was nothing: then the thread tries again.
            None => self.space.faults.probe(one.start) == Probe::Occupied,
        }
    }

    /// Of `wanted` the part around the page `one` which holds nothing: no page, no marker, and no guard, which a copy would overwrite.
    fn free_part(&self, wanted: Range<u64>, one: &Range<u64>) -> Range<u64> {
        if wanted == *one {
            return wanted;
        }
        let Some(Ok(taken)) = self.space.page_tables.get().map(|t| t.taken(wanted.clone())) else {
            return one.clone();
        };
        let mut free = wanted;
        for taken in taken.iter() {
            if taken.start < one.end && one.start < taken.end {
                return one.clone();
            }
            match taken.end <= one.start {
                true => free.start = free.start.max(taken.end),
                false => free.end = free.end.min(taken.start),
            }
        }
        free
    }

    fn note_filled(&mut self, range: Range<u64>) {
        self.zero_streams.insert(0, range);
        self.zero_streams.truncate(ZERO_STREAMS);
    }
}
