//! Changes of an address space: what the kernel tells of forks, unmaps, remaps and removals, applied to the tables.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gms_policy::ids::{PageAddr, SpaceId};
use gms_transport::Transport;
use userfaultfd::Event;

use super::{Fault, FaultThread, Told};
use crate::page_map::PAGE;
use crate::proc;
use crate::range_set::RangeSet;
use crate::shared::{Space, lock};
use crate::tables::{FaultAction, Remap};
use crate::torture::{self, Point};
use crate::uffd::{Faults, Probe, Registration};

/// For changes that have begun to be told, so that their order can be known. Threads that change the address space without end must not
/// keep the others from being served.
const CHANGE_PATIENCE: Duration = Duration::from_millis(5);
/// For a forked child to stop changing its address space.
const CHILD_DEADLINE: Duration = Duration::from_secs(2);
/// A fault which can be served for so long only when an event is told, although none is, waits for the very thread that is to tell.
const STUCK_AFTER: Duration = Duration::from_millis(20);
/// Most memory taken out of a userfaultfd for such a thread at once.
const RELIEF_MAX: u64 = 64 << 20;

/// A thread in mremap of locked memory populates what it gains before it tells of the change, and nothing can be installed until it has told.
pub(super) struct Stuck {
    since: Instant,
    /// Taken out of the userfaultfd so that the thread can go on; to be put back before it does.
    relief: Option<Range<u64>>,
}

impl<T: Transport> FaultThread<T> {
    pub(super) fn read(&mut self, space: &Space, several: bool, into: &mut Vec<Event>) {
        let buffer = if several { &mut self.buffer } else { &mut self.buffer_of_one };
        if let Err(error) = space.faults.read(buffer, into) {
            self.shared.fail(format!("reading faults of {} failed: {error}", space.name()));
        }
    }

    /// A thread that forks, unmaps or moves memory tells of it when it has done so: of several that do so at once, the later may tell first.
    /// So all that has begun is read together; false if that does not end.
    pub(super) fn read_changes(&mut self, space: &Space, messages: &mut Vec<Event>) -> bool {
        let begun = Instant::now();
        while space.faults.has_event() {
            if begun.elapsed() > CHANGE_PATIENCE {
                return false;
            }
            self.read(space, true, messages);
            std::thread::yield_now();
        }
        true
    }

    /// Applies what was read together; `settled` says that no other change is under way. The gate is closed. What a child does is applied when
    /// all that its parent did before the fork has been.
    pub(super) fn change(&mut self, space: &Arc<Space>, messages: Vec<Event>, settled: bool) {
        match self.spaces.get_mut(&space.id) {
            Some(state) if space.is_young() => state.backlog.extend(messages.into_iter().map(Told)),
            _ => self.apply(space, messages, settled),
        }
    }

    fn apply(&mut self, space: &Arc<Space>, messages: Vec<Event>, settled: bool) {
        let mut events = Vec::new();
        let mut born = Vec::new();
        for (order, message) in messages.into_iter().enumerate() {
            match message {
                Event::Fork { uffd } => {
                    let child = self.fork(space, Faults::of_child(uffd));
                    born.push((order, child));
                }
                event => events.push((order, event)),
            }
        }
        for (order, event) in events {
            for child in self.young(space) {
                let birth = born.iter().find(|(_, newborn)| newborn.id == child.id);
                self.event_around_fork(&child, birth.is_some_and(|(o, _)| *o > order), &event);
            }
            self.event(space, &event, settled);
        }
        for (_, child) in &born {
            self.shared.tell_forked(child.clone());
        }
        if lock(&self.shared.tables).exhausted {
            self.shared.fail("the page map is full");
        }
        let Some(state) = self.spaces.get_mut(&space.id) else { return };
        state.unsettled = !settled;
        if settled {
            self.settled(space);
        }
    }

    /// All changes that had begun have been told.
    fn settled(&mut self, space: &Space) {
        let Some(state) = self.spaces.get_mut(&space.id) else { return };
        state.unsettled = false;
        let grown_up = std::mem::take(&mut state.young);
        self.let_go(&grown_up);
        *lock(&space.relieved) = RangeSet::default();
        lock(&self.shared.tables).settle_changes(space.id);
    }

    /// All changes of their parent have been told, or it has gone: what they did themselves is applied.
    pub(super) fn let_go(&mut self, young: &[Arc<Space>]) {
        for child in young {
            let Some(state) = self.spaces.get_mut(&child.id) else { continue };
            let (backlog, ended) = (std::mem::take(&mut state.backlog), state.ended);
            if !backlog.is_empty() {
                let _gate = lock(&child.gate);
                let settled = !child.faults.has_event();
                self.apply(child, backlog.into_iter().map(|told| told.0).collect(), settled);
            }
            child.young.store(false, Ordering::Release);
            if ended {
                self.drop_space(child.id);
            }
        }
    }

    /// Changes that were still under way when they were told of are over some time, and perhaps no other follows that would show it.
    pub(super) fn settle(&mut self) {
        let unsettled = self.spaces.values().filter(|state| state.unsettled);
        for space in unsettled.map(|state| state.space.clone()).collect::<Vec<_>>() {
            let Ok(_gate) = space.gate.try_lock() else { continue };
            if !space.faults.has_event() {
                self.settled(&space);
            }
        }
    }

    fn young(&self, space: &Space) -> Vec<Arc<Space>> {
        self.spaces.get(&space.id).map(|state| state.young.clone()).unwrap_or_default()
    }

    fn event(&mut self, space: &Arc<Space>, event: &Event, settled: bool) {
        // Threads that wait for a page of the range (on its way, or being fetched) try again: what they wait for may never come.
        let wake = match *event {
            Event::Remove { start, end } => {
                let range = start as u64..end as u64;
                lock(&self.shared.tables).remove(space.id, range.clone());
                self.removals += 1;
                range
            }
            Event::Unmap { start, end } => {
                let range = start as u64..end as u64;
                let marked = self.contested_markers(space, [range.clone()]);
                lock(&self.shared.tables).unmap(space.id, range.clone(), marked.as_ref(), settled);
                space.changes.fetch_add(1, Ordering::Relaxed);
                range
            }
            Event::Remap { from, to, len } => {
                let remap = Remap { from: from as u64, to: to as u64, length: len as u64 };
                if self.is_spoilt(space, &remap) {
                    let name = space.name();
                    self.shared
                        .fail(format!("{name} moved memory to where a thread was let through"));
                }
                let marked = self.contested_markers(space, [remap.source(), remap.target()]);
                let alone = self.is_alone(space);
                let done = lock(&self.shared.tables).remap(space.id, remap, marked.as_ref(), alone);
                if done.is_err() {
                    let name = space.name();
                    self.shared.fail(format!(
                        "{name} moves memory about in several threads, and it is not known which pages are where"
                    ));
                }
                space.changes.fetch_add(1, Ordering::Relaxed);
                remap.source()
            }
            Event::Fork { .. } | Event::Pagefault { .. } => return,
        };
        space.faults.wake(wake);
    }

    /// Whether the space has had one thread only, as far as has been seen.
    fn is_alone(&mut self, space: &Space) -> bool {
        let Some(state) = self.spaces.get_mut(&space.id) else { return false };
        if !state.threaded {
            let pid = space.pid.load(Ordering::Relaxed);
            // A child that has not been met yet begins with one.
            state.threaded = pid != 0 && proc::status_field(pid, "Threads:") != Some(1);
        }
        !state.threaded
    }

    /// The markers in the ranges, if it is in question what a change of one of them means.
    fn contested_markers<const N: usize>(
        &mut self,
        space: &Space,
        ranges: [Range<u64>; N],
    ) -> Option<RangeSet> {
        let tables = lock(&self.shared.tables);
        if !ranges.iter().any(|range| tables.is_contested(space.id, range)) {
            return None;
        }
        drop(tables);
        self.spaces.get_mut(&space.id)?.contested = true;
        // Of a space that nobody has met yet markers cannot be seen, but a child has one thread to begin with.
        let page_tables = space.page_tables.get()?;
        let mut marked = RangeSet::default();
        for range in ranges {
            // Without an address space there is nothing to be mistaken about.
            let found = page_tables.marked(range).unwrap_or_default();
            found.iter().for_each(|range| marked.insert(range));
        }
        Some(marked)
    }

    // ---- forks

    /// A child begins with the map of its parent. What it does not inherit has no markers in its address space.
    fn fork(&mut self, parent: &Arc<Space>, faults: Faults) -> Arc<Space> {
        torture::at(Point::BeforeFork);
        let child = Arc::new(Space::new(self.shared.new_space(), faults));
        let mut tables = lock(&self.shared.tables);
        tables.fork(parent.id, child.id);
        let remaps = tables.unsettled_remaps(parent.id);
        drop(tables);
        self.add(child.clone());
        if let Some(state) = self.spaces.get_mut(&parent.id) {
            state.young.push(child.clone());
            child.young.store(true, Ordering::Release);
        }
        // Told of before, but perhaps it came after the fork. What is at neither place cannot have come to the second.
        for remap in remaps.into_iter().rev() {
            let back = Remap { from: remap.to, to: remap.from, length: remap.length };
            if self.has_moved(&child, &remap, remap.target(), false) == Some(false) {
                self.remap_child(&child, back);
            }
        }
        child
    }

    /// An event of the parent which was read together with the fork (`told`: before it). The child begins with the tables from before
    /// both; whether the change came before the fork, its address space tells.
    fn event_around_fork(&mut self, child: &Arc<Space>, told: bool, event: &Event) {
        // What was unmapped or removed before the fork has no markers in the child.
        if let Event::Remap { from, to, len } = *event {
            let remap = Remap { from: from as u64, to: to as u64, length: len as u64 };
            // What is at neither place has moved on since, if anything is thought to be at the first.
            if self.has_moved(child, &remap, remap.source(), true).unwrap_or(told) {
                self.remap_child(child, remap);
            }
        }
    }

    fn remap_child(&mut self, child: &Space, remap: Remap) {
        let mut tables = lock(&self.shared.tables);
        // What is not there, because it came only after the fork, displaces nothing.
        if !tables.knows(child.id, remap.source()) {
            return;
        }
        if tables.remap(child.id, remap, None, false).is_err() {
            self.shared
                .fail("a child was forked while its parent moved memory about in several threads");
        }
        drop(tables);
        if let Some(state) = self.spaces.get_mut(&child.id) {
            // What is contested now is the child's until nothing of its own is unread.
            state.unsettled = true;
        }
    }

    /// Whether a child was forked after the remap; `neither` if it had nothing at either place. Its tables have the pages in the range `known`.
    fn has_moved(
        &mut self,
        child: &Arc<Space>,
        remap: &Remap,
        known: Range<u64>,
        neither: bool,
    ) -> Option<bool> {
        let mut was_there = |at: u64| {
            // Events of its own are read first.
            let is_there = self.registration(child, at..at + PAGE) == Registration::Whole;
            self.was_there(child.id, at).unwrap_or(is_there)
        };
        match (was_there(remap.from), was_there(remap.to)) {
            (false, true) => Some(true),
            (true, false) => Some(false),
            (false, false) => Some(neither),
            (true, true) => {
                let page = lock(&self.shared.tables).first_evicted(child.id, known.clone())?;
                let offset = page.get() - known.start;
                match (self.has(child, remap.from + offset)?, self.has(child, remap.to + offset)?) {
                    (true, false) => Some(false),
                    (false, true) => Some(true),
                    _ => None,
                }
            }
        }
    }

    /// Whether anything was at the address when the child was born; `None` if what it has told of itself does not concern the address.
    fn was_there(&self, child: SpaceId, at: u64) -> Option<bool> {
        let concerns = |told: &Told| match told.0 {
            Event::Unmap { start, end } => (start as u64..end as u64).contains(&at).then_some(true),
            Event::Remap { from, to, len } => {
                let remap = Remap { from: from as u64, to: to as u64, length: len as u64 };
                let (left, came) = (remap.source().contains(&at), remap.target().contains(&at));
                (left || came).then_some(left)
            }
            _ => None,
        };
        self.spaces.get(&child)?.backlog.iter().find_map(concerns)
    }

    /// Whether a page or a marker of the child was at the address when it was born; `None` if that cannot be known.
    fn has(&mut self, child: &Arc<Space>, at: u64) -> Option<bool> {
        let place = (child.id, PageAddr::containing(at));
        // Where a page is leaving there is nothing yet, and a probe would leave zeros there.
        if lock(&self.shared.tables).is_leaving(place) {
            return Some(false);
        }
        let probe = self.probe(child, at);
        let untouched = self.was_there(child.id, at).is_none();
        untouched.then_some(probe == Probe::Occupied)
    }

    /// What the range is to a child.
    fn registration(&mut self, child: &Arc<Space>, range: Range<u64>) -> Registration {
        self.when_settled(child, |faults| {
            Some(faults.registration(range.clone())).filter(|r| *r != Registration::Changing)
        })
        .unwrap_or(Registration::Not)
    }

    /// What a child has at the address.
    fn probe(&mut self, child: &Arc<Space>, at: u64) -> Probe {
        self.when_settled(child, |faults| {
            Some(faults.probe(at)).filter(|probe| *probe != Probe::Changing)
        })
        .unwrap_or(Probe::Gone)
    }

    pub(super) fn when_settled<R>(
        &mut self,
        child: &Arc<Space>,
        look: impl Fn(&Faults) -> Option<R>,
    ) -> Option<R> {
        let deadline = Instant::now() + CHILD_DEADLINE;
        loop {
            let found = look(&child.faults);
            if found.is_some() {
                return found;
            }
            if Instant::now() > deadline {
                self.shared.fail("a forked child does not stop changing its address space");
                return None;
            }
            // The evict thread may not know it yet, nor its tables what its parent has done: its faults are for later.
            let faults = self.read_faults(child.id, true);
            self.again.extend(faults.into_iter().flatten());
        }
    }

    // ---- threads that wait for themselves

    /// Faults that wait for an event, none of which comes: their threads are let through to the kernel's own zeros.
    pub(super) fn relieve(&mut self, now: Instant) {
        for state in self.spaces.values_mut() {
            let waits = |fault: &&Fault| fault.place.0 == state.space.id;
            if state.stuck.is_some() && !self.again.iter().any(|fault| waits(&fault)) {
                state.stuck.take_if(|stuck| stuck.relief.is_none());
            }
        }
        for fault in self.again.clone() {
            let state = self.spaces.get_mut(&fault.place.0);
            // Who is young waits for changes of another.
            let Some(state) = state.filter(|state| !state.space.is_young()) else { continue };
            let stuck = state.stuck.get_or_insert(Stuck { since: now, relief: None });
            if now.duration_since(stuck.since) > STUCK_AFTER {
                stuck.since = now;
                self.let_through(fault);
            }
        }
    }

    /// Takes what lies free from the page on out of the userfaultfd, if nothing is known of it.
    fn let_through(&mut self, fault: Fault) {
        let (id, page) = (fault.place.0, fault.place.1);
        let Some(state) = self.spaces.get_mut(&id) else { return };
        let space = state.space.clone();
        let _gate = lock(&space.gate);
        let mut tables = lock(&self.shared.tables);
        if tables.fault(fault.place) != FaultAction::Zero || !space.faults.has_event() {
            return;
        }
        let Some(page_tables) = space.page_tables.get() else { return };
        let range = page.get()..page.get().saturating_add(RELIEF_MAX);
        let taken = page_tables.taken(range.clone()).unwrap_or_default();
        let end = taken.iter().next().map_or(range.end, |taken| taken.start);
        let free = page.get()..tables.next_known(id, page.get()..end);
        tables.unregister(id, free.clone());
        drop(tables);
        // Wakes the thread. Holes behind the mapping are no error; what is not mapped any more needs no relief.
        if space.faults.unregister(free.clone()).is_ok()
            && let Some(stuck) = &mut state.stuck
        {
            let before = stuck.relief.take().unwrap_or(free.clone());
            stuck.relief = Some(before.start.min(free.start)..before.end.max(free.end));
        }
        space.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// What was taken out is put back before the thread that waited is told to go on: split mappings would make its next mremap fail.
    pub(super) fn repair(&mut self, space: &Space) {
        let Some(state) = self.spaces.get_mut(&space.id) else { return };
        if let Some(relief) = state.stuck.as_mut().and_then(|stuck| stuck.relief.take()) {
            // It is recorded as registered when it is next looked at. A mapping that cannot be registered is left resident.
            let _ = space.faults.register(relief.clone());
            lock(&space.relieved).insert(relief);
        }
    }

    /// Whether evicted pages were moved to where memory was being taken out of the userfaultfd: that took their markers away. Of such a move is told
    /// before all changes have been.
    fn is_spoilt(&self, space: &Space, remap: &Remap) -> bool {
        let relieved: Vec<Range<u64>> = lock(&space.relieved).overlaps(remap.target()).collect();
        relieved.into_iter().any(|part| {
            let source = part.start - remap.to + remap.from..part.end - remap.to + remap.from;
            let evicted = lock(&self.shared.tables).first_evicted(space.id, source);
            evicted.is_some_and(|page| {
                let there = PageAddr::containing(page.get() - remap.from + remap.to);
                !space.has_marker(there)
            })
        })
    }
}
