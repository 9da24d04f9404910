//! The fault thread: from the kernel's message to the remote page and back.
//!
//! `read_space` reads messages (events first, then faults) -> `fault` asks the tables what to do -> zeros, write-back buffer, or
//! `fetch` sends a request to the agent -> `arrived` installs the page as soon as its bytes are there, and wakes the thread: at once, or where several
//! wait with all whose pages have come.
//!
//! Nothing on this path waits: what cannot be done now (page on its way out, no room, event unread) is left to whoever can, and the
//! thread is woken then and faults again.

mod events;
mod fetch;
mod follow;
mod local;
#[cfg(test)]
pub(crate) mod tests;
mod unread;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use gms_policy::ids::{AgentId, PageAddr, SpaceId};
use gms_policy::limits::SLACK_MIN;
use gms_policy::prefetch::Streams;
use gms_transport::Transport;
use gms_transport::client::{Client, GetId, RETRY};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use userfaultfd::{Event, EventBuffer, ReadWrite};

use self::events::{Proof, Stuck};
use self::fetch::Fetch;
use self::follow::Follow;
pub(crate) use self::local::look;
use self::unread::Unread;
use crate::commands::say;
use crate::page_map::{Content, PAGE};
use crate::pulse::Pulse;
use crate::shared::{FaultCommand, Shared, Space, drain, lock};
use crate::tables::{FaultAction, Place};
use crate::torture::{self, Point};
use crate::trace::Trace;

/// Messages read at once.
const MESSAGES: usize = 32;
/// Longest that the thread polls before it blocks: waking an idle CPU costs more than a whole fault.
const SPIN: Duration = Duration::from_micros(50);
/// The same while pages are awaited.
const SPIN_AWAITED: Duration = Duration::from_millis(1);
/// Commands and timers are looked at once in so many turns, however busy the thread is.
const TURNS: u32 = 16;
/// A yield that takes longer has given the CPU to somebody who keeps it. Then the thread blocks, which brings it back sooner, for a while.
const YIELD_MAX: Duration = Duration::from_millis(2);
const NO_SPIN: Duration = Duration::from_millis(10);
/// Faults which met an unread event are tried again after this at the latest.
const AGAIN: Duration = Duration::from_millis(1);
/// Room that first touches and prefetches leave to demand fetches, in pages, so that those need not wait for an eviction while another
/// thread fills memory. Less than the slack of any budget, so that eviction is under way by then.
pub const ROOM_KEPT: u64 = 128;
const _: () = assert!(ROOM_KEPT * PAGE < SLACK_MIN);
/// What is waited for: commands, packets, and from here on the spaces.
const KICKS: u64 = 0;
const PACKETS: u64 = 1;
const SPACES: u64 = 2;

struct SpaceFaults {
    space: Arc<Space>,
    prefetch: Streams,
    prefetch_totals: (u64, u64),
    /// What recent first touches filled: where they are sequential, upwards or downwards, the next fills twice as much.
    zero_streams: Vec<Range<u64>>,
    /// What was told of changes and is not applied yet: of a later one it may have been told first. Nobody is served meanwhile, or evicted from.
    backlog: Vec<Told>,
    /// Since when that has taken long.
    late: Option<Instant>,
    /// Since when its faults, or what it has told, have been waiting for that.
    waits: Option<Instant>,
    /// When a page that somebody waits for came last and could not be installed.
    refused: Option<Instant>,
    /// A child in the middle of the application of its parent's changes.
    unborn: bool,
    /// Several threads were seen.
    threaded: bool,
}

/// What an address space has told of itself.
struct Told {
    event: Event,
    /// If it is a remap, it has been told too that its source is no longer mapped.
    echoed: bool,
}

// SAFETY: its addresses are of another process: numbers to us.
unsafe impl Send for Told {}

/// One thread waits for one page.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Fault {
    place: Place,
    write: bool,
    /// As the kernel tells it, in the thread's own PID namespace: good for hints only.
    tid: i32,
}

/// See the module's documentation.
pub struct FaultThread<T> {
    shared: Arc<Shared>,
    commands: Receiver<FaultCommand>,
    agents: Client<T>,
    spaces: BTreeMap<SpaceId, SpaceFaults>,
    fetches: BTreeMap<GetId, Fetch>,
    /// Replies in which wrong pages came, by agent.
    mismatches: BTreeMap<AgentId, u32>,
    /// Pages in `fetches` for which threads wait: those that fault on the same page share one fetch.
    pending: BTreeSet<Place>,
    /// Faults to be tried again once the events have been read.
    again: Vec<Fault>,
    /// Spaces with a backlog.
    behind: BTreeSet<SpaceId>,
    /// Those in which somebody has been waiting.
    waiting: BTreeSet<SpaceId>,
    /// Those in which a thread may be waiting for itself.
    stuck: BTreeMap<SpaceId, Stuck>,
    /// Removals told of so far.
    removals: u64,
    /// Pages that were installed without a word, and when they were asked for: their threads are woken together.
    installed: Vec<(Arc<Space>, Range<u64>, Instant)>,
    /// Demanded pages whose markers have not been looked for yet, and when they were asked for.
    unproved: Vec<(Place, Content, Instant)>,
    /// Kicks, the lane and the spaces.
    epoll: Epoll,
    /// Spaces with something to read.
    readable: Vec<SpaceId>,
    /// And those of which it cannot be read.
    unread: BTreeMap<SpaceId, Unread>,
    buffer: EventBuffer,
    buffer_of_one: EventBuffer,
    zeros: Box<[u8]>,
    trace: Option<Trace>,
    follow: Follow,
    pulse: Pulse,
}

impl<T: Transport> FaultThread<T> {
    /// A thread's state; [`FaultThread::run`] runs it.
    pub fn new(
        shared: Arc<Shared>,
        commands: Receiver<FaultCommand>,
        agents: Client<T>,
        trace: Option<Trace>,
    ) -> nix::Result<FaultThread<T>> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(shared.fault_kicks(), EpollEvent::new(EpollFlags::EPOLLIN, KICKS))?;
        epoll.add(agents.fd(), EpollEvent::new(EpollFlags::EPOLLIN, PACKETS))?;
        Ok(FaultThread {
            shared,
            commands,
            agents,
            spaces: BTreeMap::new(),
            fetches: BTreeMap::new(),
            mismatches: BTreeMap::new(),
            pending: BTreeSet::new(),
            again: Vec::new(),
            behind: BTreeSet::new(),
            waiting: BTreeSet::new(),
            stuck: BTreeMap::new(),
            removals: 0,
            unproved: Vec::new(),
            epoll,
            readable: Vec::new(),
            unread: BTreeMap::new(),
            buffer: EventBuffer::new(MESSAGES),
            buffer_of_one: EventBuffer::new(1),
            zeros: local::zeros(),
            trace,
            follow: Follow::new(),
            pulse: Pulse::new(Instant::now()),
            installed: Vec::new(),
        })
    }

    /// Serves faults until the session stops.
    pub fn run(mut self) {
        gms_agent::spin::prefer_latency(gms_agent::spin::SLICE);
        let mut now = Instant::now();
        let (mut spin_until, mut no_spin_until) = (now, now);
        let mut turn = 0u32;
        while !self.shared.stop.load(Ordering::Relaxed) {
            let spin = now < spin_until;
            turn = turn.wrapping_add(1);
            let mut busy = spin && self.glance(now);
            if !busy || turn.is_multiple_of(TURNS) {
                busy |= self.wait(now, spin);
                now = Instant::now();
            }
            for id in std::mem::take(&mut self.readable) {
                self.read_space(id, true);
                // Where several threads wait, their requests go out together.
                let mut more = MESSAGES;
                while more > 0
                    && (2..MESSAGES).contains(&self.pending.len())
                    && self.read_space(id, false)
                {
                    more -= 1;
                }
            }
            self.settle();
            for fault in std::mem::take(&mut self.again) {
                self.fault(fault);
            }
            self.relieve(now);
            self.calm(now);
            self.excuse(now);
            self.repeat(now);
            if let Err(error) = self.agents.flush(now) {
                self.shared.fail(format!("sending to the agents failed: {error}"));
            }
            self.trace(Trace::sent);
            self.prove_demanded(now);
            self.follow.look(&self.shared.fault_cpu);
            if busy && now >= no_spin_until {
                spin_until = now + if self.agents.lane().awaits() { SPIN_AWAITED } else { SPIN };
            }
            // Also after a page was installed: perhaps the thread that waited for it shares our CPU.
            if spin && (!busy || !self.agents.lane().awaits()) {
                std::thread::yield_now();
                let before = std::mem::replace(&mut now, Instant::now());
                if now - before > YIELD_MAX {
                    (spin_until, no_spin_until) = (now, now + NO_SPIN);
                    self.follow.release(&self.shared.fault_cpu);
                }
            }
        }
        self.agents.close_links(Instant::now());
        if let Some(Err(error)) = self.trace.map(Trace::write) {
            say(format!("--trace: cannot be written: {error}"));
        }
    }

    fn trace(&mut self, stamp: impl FnOnce(&mut Trace)) {
        self.trace.as_mut().map(stamp);
    }

    /// What is most likely to come next is looked for without asking whether it is there; false if nothing came.
    fn glance(&mut self, now: Instant) -> bool {
        if self.agents.lane().awaits() {
            return self.network(now);
        }
        let mut ids = self.spaces.keys();
        match (ids.next(), ids.next()) {
            (Some(&only), None) => self.read_space(only, false),
            _ => false,
        }
    }

    /// Blocks (or, spinning, only looks) until a message, a packet, a command or a deadline; false if nothing came.
    fn wait(&mut self, now: Instant, spin: bool) -> bool {
        let mut limit = match self.agents.deadline() {
            Some(deadline) => deadline.saturating_duration_since(now).min(RETRY),
            None => RETRY,
        };
        if spin {
            limit = Duration::ZERO;
        } else if [&self.behind, &self.waiting].into_iter().any(|spaces| !spaces.is_empty())
            || !self.again.is_empty()
            || !self.unread.is_empty()
            || !self.unproved.is_empty()
        {
            limit = AGAIN;
        }
        let millis = limit.as_micros().div_ceil(1000) as u16;
        let mut events = [EpollEvent::empty(); MESSAGES];
        // An interrupted or failed wait only means to look sooner.
        let ready = self.epoll.wait(&mut events, EpollTimeout::from(millis)).unwrap_or(0);
        let now = if spin { now } else { Instant::now() };
        let mut packets = self.agents.deadline().is_some_and(|deadline| deadline <= now);
        for event in &events[..ready] {
            match event.data() {
                KICKS => self.obey(),
                PACKETS => packets = true,
                space => self.readable.push(SpaceId(space - SPACES)),
            }
        }
        if packets {
            self.network(now);
        }
        self.unread_again(now);
        ready > 0
    }

    fn obey(&mut self) {
        drain(self.shared.fault_kicks());
        while let Ok(command) = self.commands.try_recv() {
            match command {
                FaultCommand::Add(space) => self.add(space),
                FaultCommand::Drop(id) => {
                    // It may have forked.
                    if let Some(space) = self.spaces.get(&id).map(|state| state.space.clone()) {
                        let _gate = lock(&space.gate);
                        self.apply(&space, &Proof::default());
                    }
                    if let Some(state) = self.spaces.remove(&id) {
                        // Nothing is lost by failing: messages of unknown spaces are not read.
                        let _ = self.epoll.delete(&state.space.faults);
                    }
                    self.forget_unread(id);
                    self.waiting.remove(&id);
                    self.stuck.remove(&id);
                    // Here, where nothing is half done: of what has been read no fault meets a space of which nothing is known, no fork copies one.
                    lock(&self.shared.tables).drop_space(id);
                    self.shared.tell_dropped(id);
                }
            }
        }
    }

    fn add(&mut self, space: Arc<Space>) {
        let state = SpaceFaults {
            prefetch: Streams::new(12),
            prefetch_totals: (0, 0),
            zero_streams: Vec::with_capacity(local::ZERO_STREAMS),
            backlog: Vec::new(),
            late: None,
            waits: None,
            refused: None,
            unborn: false,
            threaded: false,
            space,
        };
        let event = EpollEvent::new(EpollFlags::EPOLLIN, SPACES + state.space.id.0);
        if let Err(errno) = self.epoll.add(&state.space.faults, event) {
            self.shared.fail(format!("faults cannot be waited for: {errno}"));
        }
        self.spaces.insert(state.space.id, state);
    }

    // ---- from the kernel

    /// Reads the messages of a space: events are applied before the gate is opened, faults afterwards. False if there were none.
    /// `polled` says that something was readable.
    fn read_space(&mut self, id: SpaceId, polled: bool) -> bool {
        let faults = self.read_faults(id, polled);
        let found = faults.is_some();
        faults.into_iter().flatten().for_each(|fault| self.fault(fault));
        found
    }

    /// The same, but for the faults, which are returned.
    fn read_faults(&mut self, id: SpaceId, polled: bool) -> Option<Vec<Fault>> {
        let state = self.spaces.get(&id)?;
        let space = state.space.clone();
        let mut messages: Vec<Event> = Vec::new();
        torture::at(Point::BeforeRead);
        let gate = self.read_messages(&space, polled, &mut messages);
        let state = self.spaces.get(&id)?;
        if messages.is_empty() && (state.backlog.is_empty() || gate.is_none()) {
            return None;
        }
        self.trace(Trace::read);
        let mut faults = Vec::new();
        self.sort(id, messages, &mut faults);
        let state = self.spaces.get(&id)?;
        if gate.is_some() && !state.backlog.is_empty() {
            let told = !state.unborn && self.read_changes(&space, &mut faults);
            torture::at(Point::AfterRead);
            match told.then(|| self.prove_order(&space)).flatten() {
                Some(proof) => self.apply(&space, &proof),
                None => space.ungated.hold(),
            }
        }
        torture::at(Point::BeforeGateOpens);
        drop(gate);
        if self.shared.has_failed() {
            // What is known may be wrong: nobody is served any more.
            return Some(Vec::new());
        }
        self.shared.faults.fetch_add(faults.len() as u64, Ordering::Relaxed);
        let fault = |message| match message {
            Event::Pagefault { rw, addr, thread_id, .. } => {
                let place = (id, PageAddr::containing(addr as u64));
                Some(Fault { place, write: rw == ReadWrite::Write, tid: thread_id.as_raw() })
            }
            _ => None,
        };
        Some(faults.into_iter().filter_map(fault).collect())
    }

    /// Reads one fault, or what there is if an event is unread or (with the gate) other threads wait already. Returns the gate, closed, if an event
    /// may have been read.
    fn read_messages<'a>(
        &mut self,
        space: &'a Space,
        polled: bool,
        messages: &mut Vec<Event>,
    ) -> Option<MutexGuard<'a, ()>> {
        let mut gate = space.gate.try_lock().ok();
        if gate.is_none() && !polled {
            return None;
        }
        let changing = space.faults.has_event();
        if changing && gate.is_none() {
            gate = Some(lock(&space.gate));
        }
        self.repair(space);
        torture::at(Point::BetweenLookAndRead);
        // One fault is read faster alone; without the gate nothing else may be read.
        let several = changing || (gate.is_some() && !self.pending.is_empty());
        let mut read = || {
            self.read(space, several, messages);
            messages.iter().any(|m| !matches!(m, Event::Pagefault { .. }))
        };
        if gate.is_some() {
            read();
        } else if space.ungated.read(read, |&event| event) {
            gate = Some(lock(&space.gate));
        }
        gate
    }

    /// One thread waits for one page.
    fn fault(&mut self, fault: Fault) {
        let place = fault.place;
        let Some(state) = self.spaces.get(&place.0) else { return };
        if self.shared.has_failed() {
            return;
        }
        let never_waits = self.shared.is_ours(fault.tid, &state.space);
        if !state.backlog.is_empty() {
            // Each event wakes it, and it faults anew.
            if !self.again.contains(&fault) {
                self.again.push(fault);
            }
            return;
        }
        let same_ids = state.space.same_ids.load(Ordering::Relaxed);
        let action = lock(&self.shared.tables).fault(place);
        let room = match action {
            FaultAction::Zero => 1 + ROOM_KEPT,
            FaultAction::Buffered(_) | FaultAction::Fetch(_) => 1,
            FaultAction::Wait | FaultAction::Resident => 0,
        };
        if !self.shared.has_room(room) && !never_waits {
            lock(&self.shared.tables).wait_for_room(place);
            return self.shared.kick_evict();
        }
        torture::at(Point::AfterDecision);
        match action {
            FaultAction::Zero => self.fill_zeros(fault),
            FaultAction::Resident => self.look_at_resident(fault),
            FaultAction::Buffered(_) => self.second_chance(fault),
            FaultAction::Fetch(content) => {
                if self.pending.is_empty() && same_ids {
                    self.follow.fault(fault.tid);
                } else {
                    self.follow.release(&self.shared.fault_cpu);
                }
                self.fetch(place, content);
            }
            FaultAction::Wait => {}
        }
    }
}
