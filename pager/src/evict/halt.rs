//! The halt: holds a tree back that grows by other ways than faults.
//!
//! What is registered cannot outgrow the budget, because its faults wait for room. New mappings and new processes are found by looking, and fill memory
//! until then. If so much is resident that not all of it can have come by faults (`Budget::strays`), or if one of several processes must be attached,
//! which may take long, the threads of the tree that run are stopped (`halt`). Then one process after the other is attached, or its new mappings
//! registered (`attend`), while pages are evicted; when there is room the tree goes on, and what it touches next faults.
//!
//! A thread that is busy in the kernel stops when that is done, and one system call can fill much memory (MAP_POPULATE, a read): nothing holds that
//! back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use gms_transport::Transport;

use super::EvictThread;
use crate::inject::Frozen;
use crate::kernel::pidfd::has_ended;
use crate::sync::lock;
use crate::victims::Evicted;

/// Longest that a tree is stopped for evictions when nothing is left to be registered.
const HALT_MAX: Duration = Duration::from_millis(500);
/// Longest that it is stopped in all, however many are born meanwhile who must be attended to: somebody that is not stopped may go on forking.
const HALT_WHOLE_MAX: Duration = Duration::from_secs(5);
/// Pause after the tree was stopped, doubled each time that nothing came of it; and where there was no room for it to go on.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(64);
const PAUSE_VAIN: Duration = Duration::from_secs(2);
/// Between two searches for threads that run while the tree is stopped, as a multiple of what one takes.
const STOP_PAUSE: u32 = 3;
/// For so long after a halt of which something came the tree is looked at often: what grew so once does again.
const WARY: Duration = Duration::from_secs(2);
/// Processes that have pages in their outboxes, 1 MiB each at most.
const OUTBOXES_MAX: usize = 4;
/// How often it is looked for births, at most so many at a time, before a tree counts as stopped.
const BIRTH_ROUNDS: usize = 32;
/// A process that could not be stopped because it executes a program is left alone for so long: to try takes longer than all else.
const EXEC_PAUSE: Duration = Duration::from_millis(100);
/// While the tree is stopped.
const LOOK: Duration = Duration::from_millis(2);

/// Processes whose running threads are stopped, and what is still to be done.
#[derive(Default)]
pub(super) struct Halt {
    frozen: BTreeMap<i32, Frozen>,
    /// Those that are to be attached or looked at, the next last.
    queue: Vec<i32>,
    /// Since when nothing is left to be done but to evict; `None` if the tree runs.
    since: Option<Instant>,
    began: Option<Instant>,
    /// Whether anything was attached, registered or evicted.
    found: bool,
    /// Not again before, and how long that was last time.
    next: Option<Instant>,
    pause: Duration,
    wary_until: Option<Instant>,
    /// When it is looked for others who run.
    next_stop: Option<Instant>,
    /// Processes that execute a program, and until when they are left alone.
    executing: BTreeMap<i32, Instant>,
}

impl Halt {
    pub(super) fn is_on(&self) -> bool {
        self.since.is_some()
    }

    /// Takes note of an eviction.
    pub(super) fn note_evicted(&mut self) {
        self.found |= self.is_on();
    }

    /// Whether the tree runs, and may be stopped.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        !self.is_on() && self.next.is_none_or(|next| now >= next)
    }

    /// Whether the process ran, and has been stopped.
    pub(super) fn holds(&self, pid: i32) -> bool {
        self.frozen.contains_key(&pid)
    }

    fn leave_alone(&mut self, pid: i32) {
        self.executing.insert(pid, Instant::now() + EXEC_PAUSE);
    }

    /// Whether the tree has lately grown by other ways than faults.
    pub(super) fn is_wary(&self, now: Instant) -> bool {
        self.wary_until.is_some_and(|until| now < until)
    }
}

impl<T: Transport> EvictThread<T> {
    /// Whether the tree runs, and may be stopped.
    pub(super) fn may_halt(&self, now: Instant) -> bool {
        self.halt.is_due(now) && !self.shared.handover.is_asked() && self.heirs.is_empty()
    }

    /// Stops the tree if it holds more than can have come by faults, and sees it through that. True if anything was done.
    pub(super) fn hold_back(&mut self, now: Instant) -> bool {
        if self.is_detaching() || self.shared.has_failed() {
            self.halt = Halt::default();
            return false;
        }
        let load = |figure: &AtomicI64| figure.load(Ordering::Relaxed).max(0) as u64;
        // Where nothing can be evicted, faults may go beyond.
        let (resident, raised) = (load(&self.shared.resident), load(&self.shared.ceiling));
        let beyond = raised.saturating_sub(self.budget.ceiling().0);
        if !self.halt.is_on() {
            if !self.may_halt(now) || resident <= self.budget.strays().0 + beyond {
                return false;
            }
            let all: Vec<i32> = self.tree.pids().collect();
            self.halt(now, all);
        } else if self.halt.next_stop.is_some_and(|at| now >= at) {
            // Those who slept and have woken up, or were born.
            self.stop_members(true);
        }
        self.next_look = self.next_look.min(now + LOOK);
        if self.halt.began.is_some_and(|began| now.duration_since(began) > HALT_WHOLE_MAX) {
            self.halt.queue.clear();
        }
        let next = self.halt.queue.pop();
        match next {
            Some(pid) => self.attend(now, pid),
            None => self.release(now, resident <= self.budget.high().0 + beyond),
        }
        next.is_some()
    }

    /// Stops what runs, until these and all who ran and are not paged have been attended to.
    pub(super) fn halt(&mut self, now: Instant, queue: Vec<i32>) {
        (self.halt.since, self.halt.began) = (Some(now), Some(now));
        self.halt.queue = queue;
        // Those who are not known yet would have the CPUs for themselves.
        for _ in 0..BIRTH_ROUNDS {
            let seen = self.tree.seen();
            self.stop_members(false);
            self.refresh_tree(now);
            if self.tree.seen() == seen {
                break;
            }
        }
        self.halt.queue.sort_unstable();
        self.halt.queue.dedup();
        self.halt.queue.sort_by_cached_key(|&pid| self.tree.measure(pid));
    }

    /// Stops the members who run; of those that are stopped already, threads that have woken up, if it is to be done `again`.
    fn stop_members(&mut self, again: bool) {
        let began = Instant::now();
        // Those first that are not paged: nothing else holds them back.
        let (paged, others): (Vec<i32>, Vec<i32>) =
            self.tree.pids().partition(|pid| self.processes.contains_key(pid));
        self.halt.executing.retain(|_, until| began < *until);
        for pid in others.into_iter().chain(paged) {
            if self.halt.executing.contains_key(&pid) {
                continue;
            }
            if let Some(frozen) = self.halt.frozen.get_mut(&pid) {
                if again && frozen.stop_running().is_err() {
                    self.halt.leave_alone(pid);
                }
                continue;
            }
            if self.is_guest(pid) {
                // What it touches faults as its host's does.
                continue;
            }
            let frozen = Frozen::if_running(pid);
            if frozen.is_err() {
                self.halt.leave_alone(pid);
            }
            // Who has got its id since is let go at once.
            let is_member = self.tree.process(pid).is_some_and(|process| !has_ended(process));
            if let Some(frozen) = frozen.ok().flatten().filter(|_| is_member) {
                self.halt.frozen.insert(pid, frozen);
                self.halt.queue.push(pid);
            }
        }
        self.halt.next_stop = Some(Instant::now() + began.elapsed() * STOP_PAUSE);
    }

    /// Attaches a process, or registers what it has mapped since it was looked at.
    fn attend(&mut self, now: Instant, pid: i32) {
        self.halt.since = Some(Instant::now());
        if let Some(process) = self.processes.get_mut(&pid) {
            process.measure();
            process.look_again();
            let id = process.space.id;
            let before = lock(&self.shared.tables).registered(id);
            if let Some(unpageable) = process.register_new(&self.shared, now) {
                self.unpageable.insert(pid, unpageable);
            }
            self.halt.found |= !Arc::ptr_eq(&before, &lock(&self.shared.tables).registered(id));
            return;
        }
        if !self.is_candidate(now, pid) || self.is_vfork_child(now, pid) {
            return;
        }
        let frozen = self.halt.frozen.remove(&pid);
        let attached = match frozen {
            Some(mut frozen) => {
                // However small: whoever ran when the tree grew may be about to grow.
                let attached = self.attach_frozen(pid, &mut frozen);
                // It goes on with the others.
                self.halt.frozen.insert(pid, frozen);
                attached
            }
            None => self.attach(pid),
        };
        match attached {
            Ok(()) => self.halt.found = true,
            Err(error) => self.not_attached(pid, error),
        }
    }

    /// All that can be registered is: the tree goes on when there is room, or nothing more can be done for it.
    fn release(&mut self, now: Instant, has_room: bool) {
        let since = self.halt.since.unwrap_or(now);
        let stuck = self.stuck_at.is_some_and(|at| now > at) || self.full.spell(now).is_some();
        if !has_room && !stuck && now.duration_since(since) < HALT_MAX {
            return;
        }
        let pause = match (has_room, self.halt.found) {
            (true, true) => PAUSE_MIN,
            (true, false) => (self.halt.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX),
            // To stop it would not help soon.
            (false, true) => PAUSE_MAX,
            (false, false) => (self.halt.pause * 2).clamp(PAUSE_MAX, PAUSE_VAIN),
        };
        let wary_until = if self.halt.found { Some(now + WARY) } else { self.halt.wary_until };
        let executing = std::mem::take(&mut self.halt.executing);
        let next = Some(now + pause);
        self.halt = Halt { next, pause, wary_until, executing, ..Halt::default() };
    }

    /// Few processes have pages in their outboxes, which count as theirs: those of hundreds would be more than a budget.
    pub(super) fn clear_old_outbox(&mut self, pid: i32) {
        if self.outboxes.back() == Some(&pid) {
            return;
        }
        self.outboxes.retain(|&other| other != pid);
        self.outboxes.push_back(pid);
        if self.outboxes.len() <= OUTBOXES_MAX {
            return;
        }
        let oldest = self.outboxes.pop_front().and_then(|pid| self.processes.get_mut(&pid));
        let Some(process) = oldest else { return };
        if let Err(errno) = process.clear_outbox()
            && !process.ends()
        {
            self.shared.fail(process.unanswered(errno));
        }
    }

    /// Whether the process has the memory of one that is paged, until it executes something else.
    pub(super) fn is_vfork_child(&mut self, now: Instant, pid: i32) -> bool {
        // If it was forked from a space of ours, that event has been read.
        self.await_forks(now);
        let host = self.processes.values().find(|process| process.shares_memory_with(pid));
        let host = host.map(|process| process.pid);
        if let Some(host) = host {
            self.refuse_vfork_child(pid, host);
        }
        host.is_some()
    }
}
