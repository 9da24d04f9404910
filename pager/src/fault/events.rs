//! Changes of an address space: what the kernel tells of forks, unmaps, remaps and removals, applied to the tables.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::forks::inherit;
use super::{Fault, FaultCore, SpaceFaults, Told};
use crate::kernel::journal::{Caveat, MESSAGES_MAX};
use crate::kernel::{Event, Messages, PageFault, Registration};
use crate::page_map::PAGE;
use crate::range_set::RangeSet;
use crate::space::Space;
use crate::sync::lock;
use crate::tables::{
    Change, Doubt, FaultAction, Orders, Remap, Seen, Step, Tables, contested, drop_echoes,
};
use crate::torture::{self, Point};
use gms_policy::ids::{PageAddr, SpaceId};
use gms_transport::Transport;

/// For changes that have begun to be told. Threads that change one address space without end must not keep others from being served.
const CHANGE_PATIENCE: Duration = Duration::from_millis(5);
/// For changes that wait for others to be told; and so many wait at most.
const BACKLOG_DEADLINE: Duration = Duration::from_secs(15);
const BACKLOG_MAX: usize = 1 << 20;
/// If faults have waited this long for an event, one of their threads may be the one that is to report it: they are let through.
const STUCK_AFTER: Duration = Duration::from_millis(20);
/// A page that came and could not be installed is asked for again, by a new fault, within this time.
const REFUSED_LASTS: Duration = Duration::from_millis(10);
/// If nobody could be served for so long, because others change the address space without pause, those are stopped for a moment.
const RESTLESS_AFTER: Duration = Duration::from_millis(3);
/// So many changes are applied in one hold of the tables: what is given up in it cannot be used anew, and others wait. More than the journal keeps.
const PORTION: usize = 256;
const _: () = assert!(PORTION > MESSAGES_MAX);
/// Most memory taken out of a userfaultfd for such a thread at once.
const RELIEF_MAX: u64 = 64 << 20;

/// Faults of a space that wait for an event. mremap of locked memory populates what it gains before it reports REMAP: then the thread that
/// faults is the one that is to report, and nothing can be installed until it has.
pub(super) struct Stuck {
    since: Instant,
    /// Taken out of the userfaultfd so that the thread can go on; to be put back before it does.
    relief: Option<Range<u64>>,
}

impl Stuck {
    /// Whether something is taken out of the userfaultfd for it.
    pub(super) fn is_let_through(&self) -> bool {
        self.relief.is_some()
    }
}

/// In which order several threads have made changes that meet.
#[derive(Default)]
pub(super) struct Proof {
    /// Of unmaps and remaps; none if it is that in which they were told.
    orders: Orders,
    /// What there is now in what they concern.
    seen: Seen,
    concerned: RangeSet,
}

impl Proof {
    /// In the order in which they were made. `change` tells what change one is, if it is one.
    fn sort<T>(&self, events: impl IntoIterator<Item = T>, change: impl Fn(&T) -> bool) -> Vec<T> {
        let order = &self.orders.first;
        let mut places = vec![0; order.len()];
        order.iter().enumerate().for_each(|(place, &index)| places[index] = place + 1);
        // Each change with the removals that come behind it. What is removed is told before it is: what had been told before that had been made.
        let mut places = places.into_iter();
        let mut last = 0;
        let placed = events.into_iter().map(|event| {
            let place = if change(&event) { places.next() } else { None };
            last = last.max(place.unwrap_or_default());
            (place.unwrap_or(last), event)
        });
        let mut placed: Vec<(usize, T)> = placed.collect();
        placed.sort_by_key(|(place, _)| *place);
        placed.into_iter().map(|(_, event)| event).collect()
    }
}

impl<T: Transport> FaultCore<T> {
    /// A thread that forks, unmaps or moves memory tells of it when it has done so: of several that do so at once, the later may tell first.
    /// So what is told waits until all that has begun is; false if that takes long. Removals need not wait, but those of pages without markers: a program that
    /// removes what another thread moves cannot know which comes first. The gate is closed. Appends faults that were met.
    pub(super) fn read_changes(
        &mut self,
        clock: &impl Fn() -> Instant,
        space: &Space,
        faults: &mut Vec<PageFault>,
    ) -> bool {
        let begun = clock();
        let Some(state) = self.spaces.get_mut(&space.id) else { return true };
        let patience = if state.late.is_some() { Duration::ZERO } else { CHANGE_PATIENCE };
        state.late.get_or_insert(begun);
        loop {
            let now = clock();
            let Some(state) = self.spaces.get_mut(&space.id) else { return true };
            let only_removals =
                state.backlog.iter().all(|told| matches!(told.event, Event::Remove(_)));
            let length = state.backlog.len();
            if only_removals && !self.removes_unmarked(space) || !space.faults.has_event() {
                return true;
            }
            if length > BACKLOG_MAX || self.is_late(now, space.id) {
                // A remap would have been told long ago.
                if only_removals {
                    return true;
                }
                let name = space.name();
                self.shared.fail(format!("{name} changes its address space without any pause"));
                return false;
            }
            if now.saturating_duration_since(begun) >= patience {
                return false;
            }
            let mut messages = Messages::default();
            let read = space.read(true, &mut messages);
            self.note_read(now, space, read, &messages);
            faults.append(&mut messages.faults);
            self.note_told(space.id, messages.events);
            std::thread::yield_now();
        }
    }

    /// Whether pages without markers are removed, perhaps after another thread has moved them.
    fn removes_unmarked(&self, space: &Space) -> bool {
        let Some(state) = self.spaces.get(&space.id) else { return false };
        let tables = lock(&self.shared.tables);
        let is_unmarked = |told: &Told| matches!(&told.event, Event::Remove(range) if tables.is_unmarked(space.id, range));
        let removes = state.backlog.iter().any(is_unmarked);
        drop(tables);
        removes && !self.is_known_alone(space)
    }

    /// Whether what has been told has waited for too long, but for the time in which this process was stopped.
    fn is_late(&mut self, now: Instant, id: SpaceId) -> bool {
        let late = |core: &Self| {
            let since = core.spaces.get(&id).and_then(|state| state.late);
            since.is_some_and(|late| now.saturating_duration_since(late) > BACKLOG_DEADLINE)
        };
        if late(self) {
            self.excuse(now);
        }
        late(self)
    }

    /// Applies what has been told, if no more changes are under way; what faults meanwhile is added to `faults`. The gate is closed.
    pub(super) fn handle_told(
        &mut self,
        clock: &impl Fn() -> Instant,
        space: &Arc<Space>,
        faults: &mut Vec<PageFault>,
    ) {
        let is_unborn = self.spaces.get(&space.id).is_none_or(|state| state.unborn);
        let told = !is_unborn && self.read_changes(clock, space, faults);
        torture::at(Point::AfterRead);
        let told = told && self.drop_unmade(space);
        let proof = told.then(|| self.prove_order(space)).flatten();
        match proof.filter(|proof| self.prove_removals(space, proof)) {
            Some(proof) => self.apply(space, &proof),
            None => space.ungated.hold(),
        }
    }

    /// Applies what has been told of changes: all that had begun. The gate is closed. What they are is found out first; then the tables change, in one
    /// transaction, unless there are more than are kept.
    pub(super) fn apply(&mut self, space: &Arc<Space>, proof: &Proof) {
        self.behind.remove(&space.id);
        let Some(state) = self.spaces.get_mut(&space.id) else { return };
        state.late = None;
        let mut events = Vec::new();
        let mut born = Vec::new();
        for (order, told) in std::mem::take(&mut state.backlog).into_iter().enumerate() {
            match told.event {
                Event::Fork(faults) => born.push((order, self.bear(faults))),
                event => events.push((order, event)),
            }
        }
        let had_failed = self.shared.has_failed();
        // Looked up for nobody but children.
        let alone = !born.is_empty() && self.is_alone(space);
        let events = proof.sort(events, |(_, event)| event.change().is_some());
        let made = born.iter().map(|(birth, child)| {
            (
                *birth,
                child.id,
                self.inherited(space, child, (*birth, &proof.orders.others), &events, alone),
            )
        });
        let made: Vec<(usize, SpaceId, Vec<bool>)> = made.collect();
        if !born.is_empty() && !self.is_known_alone(space) {
            born.iter().for_each(|(birth, child)| {
                self.doubt_removals((space.id, child), *birth, &events);
            });
        }
        // Whoever goes on if this process dies now is to find the same. The children's userfaultfds are kept until they have been killed.
        if !had_failed && self.shared.has_failed() {
            born.into_iter().for_each(|(_, child)| self.shared.tell_forked(child));
            return space.ungated.hold();
        }
        let mut tables = lock(&self.shared.tables);
        for (birth, child, made) in made {
            inherit(&mut tables, (space.id, child), birth, &events, made);
        }
        for portion in events.chunks(PORTION) {
            portion.iter().for_each(|(_, event)| self.change(&mut tables, space, event));
            if portion.len() == PORTION {
                drop(tables);
                tables = lock(&self.shared.tables);
            }
        }
        for range in proof.concerned.iter() {
            tables.forget_unmarked(space.id, range, &proof.seen.marked);
        }
        if let Some((line, generation)) = space.faults.next_generation() {
            tables.note_applied(line, generation);
        }
        let full = tables.exhausted;
        drop(tables);
        space.faults.applied();
        // Before anybody is served by what could not be noted whole.
        if let Some(full) = full {
            self.shared.fail(full.to_string());
        }
        events.iter().for_each(|(_, event)| tell_changed(space, event));
        for (_, child) in born {
            if let Some(state) = self.spaces.get_mut(&child.id) {
                state.unborn = false;
            }
            // Before another thread can tell of the child's own.
            self.shared.tell_forked(child.clone());
            self.send_away(&child);
        }
        // Removals are applied although others are under way.
        if !space.faults.has_event() {
            for set in [&space.relieved, &space.unrecorded] {
                *lock(set) = RangeSet::default();
            }
            space.faults.note(Caveat::Relieved, false);
        }
        space.ungated.applied();
    }

    /// What could not be applied yet is, as soon as no change is under way.
    pub(super) fn settle(&mut self, clock: &impl Fn() -> Instant) {
        if self.behind.is_empty() {
            return;
        }
        // Who has been let through must have gone on before anything is read.
        for id in self.behind.clone() {
            let relieved = self.stuck.get(&id).is_some_and(|stuck| stuck.relief.is_some());
            let changing = |state: &SpaceFaults| state.space.faults.has_event();
            if !relieved || !self.spaces.get(&id).is_some_and(changing) {
                self.read_space(clock, id, true);
            }
        }
    }

    /// What is known of the order of the changes that have been told; `None` if others have begun meanwhile and it matters.
    pub(super) fn prove_order(&mut self, space: &Space) -> Option<Proof> {
        let backlog = &mut self.spaces.get_mut(&space.id)?.backlog;
        // All of a remap has been told.
        let fresh = |told: &Told| {
            let change = told.event.change().cloned();
            change.filter(|change| !(told.echoed && matches!(change, Change::Remap(_))))
        };
        drop_echoes(backlog, fresh);
        backlog.iter_mut().for_each(|told| told.echoed = true);
        let changes: Vec<Change> =
            backlog.iter().filter_map(|told| told.event.change().cloned()).collect();
        let concerned = contested(&changes);
        if concerned.is_empty() {
            return Some(Proof::default());
        }
        let Some(page_tables) = space.page_tables.get() else {
            // Of a space that nobody has met yet markers cannot be seen. A child has one thread to begin with, and perhaps more by now.
            if !lock(&self.shared.tables).is_free(space.id, &changes) {
                self.fail_in_doubt(space);
            }
            return Some(Proof { orders: Orders::unknown(&changes), ..Proof::default() });
        };
        if self.is_alone(space) {
            return Some(Proof::default());
        }
        let mut seen = Seen::default();
        for range in concerned.iter() {
            // Without an address space there is nothing to be mistaken about.
            let found = page_tables.marked(range).unwrap_or_default();
            found.iter().for_each(|range| seen.marked.insert(range));
        }
        let unmarked = lock(&self.shared.tables).unmarked_places(space.id, &changes);
        seen.mapped = mapped_of(space, &unmarked)?;
        if space.faults.has_event() {
            // What was seen may be of afterwards.
            let free = lock(&self.shared.tables).is_free(space.id, &changes);
            return (free && unmarked.is_empty()).then(Proof::default);
        }
        if !unmarked.is_empty() && !space.faults.is_alive() {
            // But for its children.
            return Some(Proof { orders: Orders::unknown(&changes), ..Proof::default() });
        }
        let mut proof = Proof { orders: Orders::default(), seen, concerned };
        match lock(&self.shared.tables).order(space.id, &changes, &proof.seen) {
            Ok(orders) => proof.orders = orders,
            Err(Doubt) => self.fail_in_doubt(space),
        }
        Some(proof)
    }

    /// Whether it is known that what is removed is what was there when that was told, or that it is not to be known (see `removals`); false if
    /// others have begun meanwhile and it matters.
    fn prove_removals(&mut self, space: &Space, proof: &Proof) -> bool {
        let Some(state) = self.spaces.get(&space.id) else { return true };
        if !state.backlog.iter().any(|told| matches!(told.event, Event::Remove(_))) {
            return true;
        }
        let tables = lock(&self.shared.tables);
        let steps = state.backlog.iter().filter_map(|told| match &told.event {
            Event::Remove(range) => Some(Step::Remove(range)),
            event => event.change().map(Step::Change),
        });
        let steps = proof.sort(steps, |step| matches!(step, Step::Change(_)));
        let vacated = tables.vacated(space.id, steps.into_iter());
        drop(tables);
        let is_empty = vacated.as_ref().is_ok_and(RangeSet::is_empty);
        if is_empty || self.is_known_alone(space) {
            return true;
        }
        let is_mapped = match vacated {
            Err(Doubt) => true,
            Ok(vacated) => match mapped_of(space, &vacated) {
                None => return false,
                Some(mapped) => {
                    !mapped.is_empty() || {
                        let relieved = lock(&space.relieved);
                        vacated.iter().any(|part| relieved.overlaps(part).next().is_some())
                    }
                }
            },
        };
        // Of a process that has ended nothing is mapped, and only its children matter.
        let forks = || state.backlog.iter().any(|told| matches!(told.event, Event::Fork(_)));
        let is_in_doubt = if space.faults.is_alive() { is_mapped } else { forks() };
        if is_in_doubt {
            self.fail_in_doubt(space);
        }
        true
    }

    fn fail_in_doubt(&self, space: &Space) {
        self.shared.fail(format!(
            "{} moves memory about in several threads, and it is not known which pages are where",
            space.name()
        ));
    }

    fn change(&self, tables: &mut Tables, space: &Space, event: &Event) {
        match event {
            Event::Remove(range) => {
                note_markers(tables, space, range);
                tables.remove(space.id, range.clone());
            }
            Event::Changed(Change::Unmap(range)) => tables.unmap(space.id, range.clone()),
            Event::Changed(Change::Remap(remap)) => {
                if is_spoilt(tables, space, remap) {
                    let name = space.name();
                    self.shared
                        .fail(format!("{name} moved memory to where a thread was let through"));
                }
                tables.remap(space.id, *remap);
            }
            Event::Fork(_) => {}
        }
    }

    /// Whether the space has had one thread only, as far as has been seen.
    pub(super) fn is_alone(&self, space: &Space) -> bool {
        if !self.spaces.contains_key(&space.id) {
            return false;
        }
        if !space.threaded.load(Ordering::Relaxed) {
            let pid = space.pid.load(Ordering::Relaxed);
            // A child that has not been met yet begins with one.
            let threaded = pid != 0 && (self.asks.threads)(pid) != Some(1);
            space.threaded.store(threaded, Ordering::Relaxed);
        }
        !space.threaded.load(Ordering::Relaxed)
    }

    /// The same of a space whose process has been met: another may have begun threads that nobody has seen.
    fn is_known_alone(&self, space: &Space) -> bool {
        space.page_tables.get().is_some() && self.is_alone(space)
    }

    // ---- threads that wait for themselves

    /// Has those stopped who keep others from being served.
    pub(super) fn calm(&mut self, now: Instant) {
        if self.waiting.is_empty() && self.behind.is_empty() && self.again.is_empty() {
            return;
        }
        self.waiting.extend(&self.behind);
        self.waiting.extend(self.again.iter().map(|fault| fault.place.0));
        self.waiting.retain(|id| {
            let Some(state) = self.spaces.get_mut(id) else { return false };
            let refused = state.refused.is_some_and(|at| now.duration_since(at) < REFUSED_LASTS);
            let again = self.again.iter().any(|fault| fault.place.0 == *id);
            if state.backlog.is_empty() && !refused && !again {
                state.waits = None;
                state.space.restless.store(false, Ordering::Relaxed);
                return false;
            }
            let waits = now.duration_since(*state.waits.get_or_insert(now));
            if waits > RESTLESS_AFTER && !state.space.restless.swap(true, Ordering::Relaxed) {
                self.shared.tell_restless(*id);
            }
            true
        });
    }

    /// Faults that wait for an event, none of which comes: their threads are let through to the kernel's own zeros.
    pub(super) fn relieve(&mut self, now: Instant) {
        if self.stuck.is_empty() && self.again.is_empty() {
            return;
        }
        let again = &self.again;
        let waits = |id| again.iter().any(|fault| fault.place.0 == id);
        self.stuck.retain(|&id, stuck| stuck.relief.is_some() || waits(id));
        let mut due = BTreeSet::new();
        for fault in &self.again {
            let fresh = Stuck { since: now, relief: None };
            let stuck = self.stuck.entry(fault.place.0).or_insert(fresh);
            if now.duration_since(stuck.since) > STUCK_AFTER {
                stuck.since = now;
                due.insert(fault.place.0);
            }
        }
        // One of them may be the thread that is to tell.
        let waiting: Vec<Fault> =
            self.again.iter().filter(|fault| due.contains(&fault.place.0)).copied().collect();
        waiting.into_iter().for_each(|fault| self.let_through(fault));
    }

    /// Takes what lies free from the page on out of the userfaultfd, if nothing is known of it.
    fn let_through(&mut self, fault: Fault) {
        let (id, page) = (fault.place.0, fault.place.1);
        let Some(state) = self.spaces.get(&id) else { return };
        let space = state.space.clone();
        let _gate = lock(&space.gate);
        // What is known is of before what has been told and is not applied.
        let (mut left, mut reached) = (RangeSet::default(), RangeSet::default());
        for change in state.backlog.iter().filter_map(|told| told.event.change()) {
            left.insert(change.left());
            change.reached().into_iter().for_each(|range| reached.insert(range));
        }
        let mut tables = lock(&self.shared.tables);
        let unknown = left.contains(page.get()) || tables.fault(fault.place) == FaultAction::Zero;
        if !unknown || reached.contains(page.get()) || !space.faults.has_event() {
            return;
        }
        let Some(page_tables) = space.page_tables.get() else { return };
        let range = page.get()..page.get().saturating_add(RELIEF_MAX);
        let mut taken = page_tables.taken(range.clone()).unwrap_or_default();
        reached.overlaps(range.clone()).for_each(|part| taken.insert(part));
        let end = taken.iter().next().map_or(range.end, |taken| taken.start);
        let mut next = page.get();
        while let Some(gap) = left.containing(next) {
            next = gap.end;
        }
        next = tables.next_known(id, next.min(end)..end);
        let free = page.get()..next;
        tables.unregister(id, free.clone());
        drop(tables);
        space.faults.note(Caveat::Relieved, true);
        // Wakes the thread. Holes behind the mapping are no error; what is not mapped any more needs no relief.
        if space.faults.unregister(free.clone())
            && let Some(stuck) = self.stuck.get_mut(&id)
        {
            let before = stuck.relief.take().unwrap_or(free.clone());
            stuck.relief = Some(before.start.min(free.start)..before.end.max(free.end));
        }
        space.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// What was taken out is put back before the thread that waited is told to go on: split mappings would make its next mremap fail.
    pub(super) fn repair(&mut self, space: &Space) {
        if let Some(relief) = self.stuck.get_mut(&space.id).and_then(|stuck| stuck.relief.take()) {
            // It is recorded as registered when it is next looked at. A mapping that cannot be registered is left resident.
            let _ = space.faults.register(relief.clone());
            lock(&space.relieved).insert(relief);
        }
    }
}

/// Where memory is registered, of these ranges; `None` if the address space is being changed.
fn mapped_of(space: &Space, ranges: &RangeSet) -> Option<RangeSet> {
    let mut mapped = RangeSet::default();
    let mut parts: Vec<Range<u64>> = ranges.iter().collect();
    while let Some(part) = parts.pop() {
        let pages = (part.end - part.start) / PAGE;
        let middle = part.start + pages / 2 * PAGE;
        match space.faults.registration(part.clone()) {
            Registration::Whole => mapped.insert(part),
            Registration::Changing => return None,
            Registration::Not if pages > 1 => {
                parts.extend([part.start..middle, middle..part.end]);
            }
            Registration::Not => {}
        }
    }
    Some(mapped)
}

/// A pager that dies may have left a marker that it has not noted. Its page is not forgotten when it is removed: while the marker is there somebody must know whose
/// it is.
fn note_markers(tables: &mut Tables, space: &Space, range: &Range<u64>) {
    for (slot, place) in tables.left_unmarked(space.id, range) {
        if space.has_marker(place.1) {
            tables.marked(slot, place);
        }
    }
}

/// What was told has been applied.
fn tell_changed(space: &Space, event: &Event) {
    // Threads that wait for a page of the range (on its way, or being fetched) try again: what they wait for may never come.
    let (count, wake) = match event {
        Event::Remove(range) => (&space.removals, range.clone()),
        Event::Changed(change) => (&space.changes, change.left()),
        Event::Fork(_) => return,
    };
    count.fetch_add(1, Ordering::Relaxed);
    space.faults.wake(wake);
}

/// Whether evicted pages were moved to where memory was being taken out of the userfaultfd: that took their markers away. Of such a move is told before all
/// changes have been.
fn is_spoilt(tables: &Tables, space: &Space, remap: &Remap) -> bool {
    let relieved: Vec<Range<u64>> = lock(&space.relieved).overlaps(remap.target()).collect();
    relieved.into_iter().any(|part| {
        let source = part.start - remap.to + remap.from..part.end - remap.to + remap.from;
        let evicted = tables.first_evicted(space.id, source);
        evicted.is_some_and(|page| {
            let there = PageAddr::containing(page.get() - remap.from + remap.to);
            !space.has_marker(there)
        })
    })
}

#[cfg(test)]
mod tests;
