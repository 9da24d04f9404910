//! Changes of an address space: what the kernel tells of forks, unmaps, remaps and removals, brought into an order and applied to the tables.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gms_transport::Transport;
use userfaultfd::Event;

use super::FaultThread;
use crate::page_map::PAGE;
use crate::proc;
use crate::shared::{Space, lock};
use crate::uffd::{Faults, Registration};

/// For a thread that changes its address space to say so when it has done it.
const CHANGE_DEADLINE: Duration = Duration::from_secs(2);
/// The same if no fork has been told of with which it must be compared.
const CHANGE_PATIENCE: Duration = Duration::from_millis(5);

impl<T: Transport> FaultThread<T> {
    /// If a process with this space is blocked in fork: what its child will not inherit.
    pub(super) fn fork_under_way(&self, space: &Space) -> Option<Vec<Range<u64>>> {
        let pid = space.pid.load(Ordering::Relaxed);
        if pid != 0 {
            return proc::is_forking(pid).then(|| proc::not_inherited(pid)).flatten();
        }
        // A forked child that has not been met yet: one of those unknown that are blocked in fork.
        let mut known = lock(&self.shared.evictors).clone();
        known.extend(self.spaces.values().map(|s| s.space.pid.load(Ordering::Relaxed)));
        let forking = |pids: Vec<i32>| -> Vec<i32> {
            let unknown = |pid: &i32| !known.contains(pid) && proc::is_forking(*pid);
            pids.into_iter().filter(unknown).collect()
        };
        let root = lock(&self.shared.gauges).root;
        let mut candidates = forking(proc::descendants(std::process::id() as i32));
        candidates.extend(forking(proc::descendants(root)));
        if candidates.is_empty() {
            candidates = forking(proc::all());
        }
        candidates.sort_unstable();
        candidates.dedup();
        if let [only] = candidates[..] {
            space.pid.store(only, Ordering::Relaxed);
        }
        let mut seen = candidates.into_iter().filter_map(proc::not_inherited);
        let first = seen.next()?;
        if seen.any(|other| other != first) {
            self.shared.fail("several processes fork at once, and it is not known which is which");
        }
        Some(first)
    }

    pub(super) fn read(&mut self, space: &Space, several: bool, into: &mut Vec<Event>) {
        let buffer = if several { &mut self.buffer } else { &mut self.buffer_of_one };
        if let Err(error) = space.faults.read(buffer, into) {
            self.shared.fail(format!("reading faults of process {:?} failed: {error}", space.pid));
        }
    }

    /// A thread that forks, unmaps or moves memory tells of it when it has done so: of several that do so at once, the later may tell first.
    /// So all that has begun is read together.
    pub(super) fn read_changes(&mut self, space: &Space, messages: &mut Vec<Event>) {
        let begun = Instant::now();
        let is_change = |m: &Event| !matches!(m, Event::Pagefault { .. } | Event::Remove { .. });
        let is_fork = |m: &Event| matches!(m, Event::Fork { .. });
        while messages.iter().any(is_change) && space.faults.has_event() {
            self.read(space, true, messages);
            std::thread::yield_now();
            let forked = messages.iter().any(is_fork);
            if forked && begun.elapsed() > CHANGE_DEADLINE {
                return self.shared.fail("a change of the address space does not end");
            }
            // Threads that unmap without end must not keep the others from being served.
            if !forked && begun.elapsed() > CHANGE_PATIENCE {
                return;
            }
        }
    }

    pub(super) fn event(&mut self, space: &Arc<Space>, event: Event) {
        let mut tables = lock(&self.shared.tables);
        // Threads that wait for a page of the range (on its way, or being fetched) try again: what they wait for may never come.
        let wake = match event {
            Event::Remove { start, end } => {
                tables.remove(space.id, start as u64..end as u64);
                start as u64..end as u64
            }
            Event::Unmap { start, end } => {
                tables.unmap(space.id, start as u64..end as u64);
                space.changes.fetch_add(1, Ordering::Relaxed);
                start as u64..end as u64
            }
            Event::Remap { from, to, len } => {
                tables.remap(space.id, from as u64, to as u64, len as u64);
                space.changes.fetch_add(1, Ordering::Relaxed);
                from as u64..from as u64 + len as u64
            }
            Event::Fork { .. } | Event::Pagefault { .. } => return,
        };
        drop(tables);
        space.faults.wake(wake);
    }

    /// A child begins with the map of its parent, less what it does not inherit (`seen`): that must have been looked up before the message
    /// was read, because the parent is blocked in fork until then, and may change it afterwards.
    pub(super) fn fork(
        &mut self,
        parent: &Arc<Space>,
        faults: Faults,
        seen: &mut Option<Vec<Range<u64>>>,
    ) -> Arc<Space> {
        let pid = parent.pid.load(Ordering::Relaxed);
        // The fork began between the look and the read: looked up late is better than not at all.
        let not_inherited = seen.take().or_else(|| proc::not_inherited(pid)).unwrap_or_default();
        let child = Arc::new(Space {
            id: self.shared.new_space(),
            faults,
            gate: Default::default(),
            ungated: Default::default(),
            pid: AtomicI32::new(0),
            changes: AtomicU64::new(0),
        });
        lock(&self.shared.tables).fork(parent.id, child.id, &not_inherited);
        self.add(child.clone());
        child
    }

    /// An event of the parent which was read together with the fork (`told`: before it). The child begins with the tables from before
    /// both; whether the change came before the fork, its address space tells.
    pub(super) fn event_around_fork(&mut self, child: &Arc<Space>, told: bool, event: &Event) {
        match *event {
            Event::Unmap { start, end } => self.forked_without(child, start as u64..end as u64),
            Event::Remap { from, to, len } => {
                let (from, to, length) = (from as u64, to as u64, len as u64);
                let is_there = |at: u64| self.registration(child, at..at + PAGE);
                let moved = match [from, to].map(is_there) {
                    [Registration::Whole, Registration::Whole] => told,
                    [there, _] => there != Registration::Whole,
                };
                if moved {
                    lock(&self.shared.tables).remap(child.id, from, to, length);
                }
            }
            // Removals are told before they are made: a fork that is told earlier has the pages.
            Event::Remove { start, end } if told => {
                lock(&self.shared.tables).remove(child.id, start as u64..end as u64);
            }
            _ => {}
        }
    }

    /// What of the range the child's address space does not have is not in its tables either.
    fn forked_without(&mut self, child: &Arc<Space>, range: Range<u64>) {
        let registered = lock(&self.shared.tables).registered(child.id);
        let mut parts: Vec<Range<u64>> = registered.overlaps(range).collect();
        while let Some(part) = parts.pop() {
            let pages = (part.end - part.start) / PAGE;
            match self.registration(child, part.clone()) {
                Registration::Whole => {}
                _ if pages > 1 => {
                    let middle = part.start + pages / 2 * PAGE;
                    parts.extend([part.start..middle, middle..part.end]);
                }
                _ => lock(&self.shared.tables).unmap(child.id, part),
            }
        }
    }

    /// What the range is to a child. Events of its own are read first.
    fn registration(&mut self, child: &Arc<Space>, range: Range<u64>) -> Registration {
        let deadline = Instant::now() + CHANGE_DEADLINE;
        loop {
            let found = child.faults.registration(range.clone());
            if found != Registration::Changing {
                return found;
            }
            if Instant::now() > deadline {
                self.shared.fail("a forked child does not stop changing its address space");
                return Registration::Whole;
            }
            self.read_space(child.id, true);
        }
    }
}
