//! The fault thread: from the kernel's message to the remote page and back.
//!
//! `read_space` reads messages (events first, then faults) -> `fault` asks the tables what to do -> zeros, write-back buffer, or
//! `fetch` sends a request to the agent -> `payload` installs the page as soon as its bytes are there, which wakes the thread.
//!
//! Nothing on this path waits: what cannot be done now (page on its way out, no room, event unread) is left to whoever can, and the
//! thread is woken then and faults again.

mod events;
mod follow;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use gms_policy::ids::{AgentId, PageAddr, SpaceId};
use gms_policy::limits::SLACK_MIN;
use gms_policy::prefetch::{Prefetch, Streams};
use gms_transport::message::{Control, PAGES_MAX, PageDescriptor, Status};
use gms_transport::{ExchangeId, Transport};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use userfaultfd::{Event, EventBuffer, ReadWrite};
use zerocopy::IntoBytes;

use self::follow::Follow;
use crate::lane::{Lane, LaneEvent};
use crate::page_map::{Content, PAGE};
use crate::proc;
use crate::shared::{EvictCommand, FaultCommand, Shared, Space, drain, lock};
use crate::tables::{FaultAction, Place};
use crate::trace::Trace;
use crate::uffd::{Faults, Installed};

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
/// Most pages filled with zeros for one fault.
const ZERO_RUN_MAX: u64 = 64;
/// A fetch without an answer is sent again after this.
const FETCH_RETRY: Duration = Duration::from_secs(2);
/// After this long without its page the workload is stopped: the page is lost.
const FETCH_DEADLINE: Duration = Duration::from_secs(15);
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
/// Streams of first touches followed in each space.
const ZERO_STREAMS: usize = 8;

struct SpaceFaults {
    space: Arc<Space>,
    prefetch: Streams,
    prefetch_totals: (u64, u64),
    /// Where sequential first touches are expected to go on, and how many pages the last filled.
    zero_streams: Vec<(u64, u64)>,
}

/// One page of a fetch.
#[derive(Clone, Copy)]
struct Wanted {
    place: Place,
    content: Content,
}

/// A fetch in flight or waiting to be sent.
struct Fetch {
    pages: Vec<Wanted>,
    /// Whether a thread waits for the first page. All others are fetched ahead.
    demanded: bool,
    began: Instant,
    sent: Instant,
    mismatches: u32,
    /// Payload as far as it did not come in one piece.
    bytes: Vec<u8>,
    /// Pages installed so far.
    installed: usize,
    accepted: bool,
}

impl Fetch {
    fn new(now: Instant, pages: Vec<Wanted>, demanded: bool) -> Fetch {
        Fetch {
            pages,
            demanded,
            began: now,
            sent: now,
            mismatches: 0,
            bytes: Vec::new(),
            installed: 0,
            accepted: false,
        }
    }

    /// Bytes of descriptors before the first page.
    fn head(&self) -> usize {
        if self.pages.len() > 1 { self.pages.len() * size_of::<PageDescriptor>() } else { 0 }
    }

    /// Forgets what came of a reply, but for the pages that are installed; `None` if those are all.
    fn restart(&mut self) -> Option<()> {
        self.demanded &= self.installed == 0;
        self.pages.drain(..self.installed);
        self.installed = 0;
        self.bytes.clear();
        self.accepted = false;
        (!self.pages.is_empty()).then_some(())
    }

    /// Bytes of the whole payload.
    fn payload(&self) -> usize {
        self.head() + self.pages.len() * PAGE as usize
    }
}

/// See the module's documentation.
pub struct FaultThread<T> {
    shared: Arc<Shared>,
    commands: Receiver<FaultCommand>,
    lane: Lane<T>,
    spaces: HashMap<SpaceId, SpaceFaults>,
    inflight: HashMap<ExchangeId, Fetch>,
    /// Fetches for which there was no link, or no room on it.
    unsent: Vec<Fetch>,
    /// Pages in `inflight` and `unsent`: threads that fault on the same page share one fetch.
    pending: HashSet<Place>,
    /// Faults to be tried again once the events have been read.
    again: Vec<(Place, bool, i32)>,
    /// Kicks, the lane and the spaces.
    epoll: Epoll,
    /// Spaces with something to read.
    readable: Vec<SpaceId>,
    buffer: EventBuffer,
    buffer_of_one: EventBuffer,
    zeros: Box<[u8]>,
    trace: Option<Trace>,
    follow: Follow,
}

impl<T: Transport> FaultThread<T> {
    /// A thread's state; [`FaultThread::run`] runs it.
    pub fn new(
        shared: Arc<Shared>,
        commands: Receiver<FaultCommand>,
        lane: Lane<T>,
        trace: Option<Trace>,
    ) -> nix::Result<FaultThread<T>> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(shared.fault_kicks(), EpollEvent::new(EpollFlags::EPOLLIN, KICKS))?;
        epoll.add(lane.fd(), EpollEvent::new(EpollFlags::EPOLLIN, PACKETS))?;
        Ok(FaultThread {
            shared,
            commands,
            lane,
            spaces: HashMap::new(),
            inflight: HashMap::new(),
            unsent: Vec::new(),
            pending: HashSet::new(),
            again: Vec::new(),
            epoll,
            readable: Vec::new(),
            buffer: EventBuffer::new(MESSAGES),
            buffer_of_one: EventBuffer::new(1),
            zeros: vec![0; (ZERO_RUN_MAX * PAGE) as usize].into(),
            trace,
            follow: Follow::new(),
        })
    }

    /// Serves faults until the session stops.
    pub fn run(mut self) {
        gms_agent::spin::prefer_latency();
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
            }
            for (place, write, tid) in std::mem::take(&mut self.again) {
                self.fault(place, write, tid);
            }
            self.send_again(now);
            if let Err(error) = self.lane.flush(now) {
                self.shared.fail(format!("sending to the agents failed: {error}"));
            }
            self.trace(Trace::sent);
            self.follow.look(&self.shared);
            if busy && now >= no_spin_until {
                spin_until = now + if self.inflight.is_empty() { SPIN } else { SPIN_AWAITED };
            }
            // Also after a page was installed: perhaps the thread that waited for it shares our CPU.
            if spin && (!busy || self.inflight.is_empty()) {
                std::thread::yield_now();
                let before = std::mem::replace(&mut now, Instant::now());
                if now - before > YIELD_MAX {
                    (spin_until, no_spin_until) = (now, now + NO_SPIN);
                    self.follow.release(&self.shared);
                }
            }
        }
        self.lane.close(Instant::now());
        if let Some(Err(error)) = self.trace.map(Trace::write) {
            eprintln!("gms: --trace: cannot be written: {error}");
        }
    }

    fn trace(&mut self, stamp: impl FnOnce(&mut Trace)) {
        self.trace.as_mut().map(stamp);
    }

    /// What is most likely to come next is looked for without asking whether it is there; false if nothing came.
    fn glance(&mut self, now: Instant) -> bool {
        if !self.inflight.is_empty() {
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
        let mut limit = match self.lane.deadline() {
            Some(deadline) => deadline.saturating_duration_since(now).min(FETCH_RETRY),
            None => FETCH_RETRY,
        };
        if spin {
            limit = Duration::ZERO;
        } else if !self.again.is_empty() {
            limit = AGAIN;
        }
        let millis = limit.as_micros().div_ceil(1000) as u16;
        let mut events = [EpollEvent::empty(); MESSAGES];
        // An interrupted or failed wait only means to look sooner.
        let ready = self.epoll.wait(&mut events, EpollTimeout::from(millis)).unwrap_or(0);
        let now = if spin { now } else { Instant::now() };
        let mut packets = self.lane.deadline().is_some_and(|deadline| deadline <= now);
        for event in &events[..ready] {
            match event.data() {
                KICKS => self.obey(),
                PACKETS => packets = true,
                space => self.readable.push(SpaceId((space - SPACES) as u32)),
            }
        }
        if packets {
            self.network(now);
        }
        ready > 0
    }

    fn obey(&mut self) {
        drain(self.shared.fault_kicks());
        while let Ok(command) = self.commands.try_recv() {
            match command {
                FaultCommand::Add(space) => self.add(space),
                FaultCommand::Drop(id) => {
                    if let Some(state) = self.spaces.remove(&id) {
                        // Nothing is lost by failing: messages of unknown spaces are not read.
                        let _ = self.epoll.delete(&state.space.faults);
                    }
                }
            }
        }
    }

    fn add(&mut self, space: Arc<Space>) {
        let state = SpaceFaults {
            prefetch: Streams::new(12),
            prefetch_totals: (0, 0),
            zero_streams: Vec::with_capacity(ZERO_STREAMS),
            space,
        };
        let event = EpollEvent::new(EpollFlags::EPOLLIN, SPACES + u64::from(state.space.id.0));
        if let Err(errno) = self.epoll.add(&state.space.faults, event) {
            self.shared.fail(format!("faults cannot be waited for: {errno}"));
        }
        self.spaces.insert(state.space.id, state);
    }

    // ---- from the kernel

    /// Reads the messages of a space: events are applied before the gate is opened, faults afterwards. False if there were none.
    /// `polled` says that something was readable.
    fn read_space(&mut self, id: SpaceId, polled: bool) -> bool {
        let Some(state) = self.spaces.get(&id) else { return false };
        let space = state.space.clone();
        let mut messages: Vec<Event> = Vec::new();
        let mut gate = space.gate.try_lock().ok();
        if gate.is_none() && !polled {
            return false;
        }
        let changing = space.faults.has_event();
        if changing && gate.is_none() {
            gate = Some(lock(&space.gate));
        }
        let mut fork = if changing { self.fork_under_way(&space) } else { None };
        // Without an event, what is readable is a fault: only that one, so that no fork which begins now is read without the look.
        let mut read = || {
            self.read(&space, changing, &mut messages);
            messages.iter().any(|m| !matches!(m, Event::Pagefault { .. }))
        };
        if gate.is_some() {
            read();
        } else if space.ungated.read(read, |&event| event) {
            gate = Some(lock(&space.gate));
        }
        if messages.is_empty() {
            return false;
        }
        self.read_changes(&space, &mut messages);
        self.trace(Trace::read);
        let mut faults = Vec::new();
        let mut events = Vec::new();
        let mut children = Vec::new();
        for (order, message) in messages.into_iter().enumerate() {
            match message {
                Event::Pagefault { rw, addr, thread_id, .. } => {
                    let page = PageAddr::containing(addr as u64);
                    faults.push((page, rw == ReadWrite::Write, thread_id.as_raw()));
                }
                Event::Fork { uffd } => {
                    let child = self.fork(&space, Faults::of_child(uffd), &mut fork);
                    children.push((order, child));
                }
                event => events.push((order, event)),
            }
        }
        for (order, event) in events {
            for (forked, child) in &children {
                self.event_around_fork(child, *forked > order, &event);
            }
            self.event(&space, event);
        }
        for (_, child) in children {
            if self.shared.to_evict.try_send(EvictCommand::Forked(child)).is_err() {
                self.shared.fail("too many processes were forked at once");
            }
            self.shared.kick_evict();
        }
        if gate.is_some() {
            space.ungated.applied();
        }
        drop(gate);
        if space.pid.load(Ordering::Relaxed) == 0
            && let Some(tgid) = faults.first().and_then(|f| proc::status_field(f.2, "Tgid:"))
        {
            space.pid.store(tgid as i32, Ordering::Relaxed);
        }
        self.shared.faults.fetch_add(faults.len() as u64, Ordering::Relaxed);
        for (page, write, tid) in faults {
            self.fault((id, page), write, tid);
        }
        true
    }

    /// One thread waits for one page.
    fn fault(&mut self, place: Place, write: bool, tid: i32) {
        let action = lock(&self.shared.tables).fault(place);
        let room = match action {
            FaultAction::Zero => 1 + ROOM_KEPT,
            FaultAction::Buffered(_) | FaultAction::Fetch(_) => 1,
            FaultAction::Wait => 0,
        };
        if !self.shared.has_room(room) && !lock(&self.shared.evictors).contains(&tid) {
            lock(&self.shared.tables).wait_for_room(place);
            return self.shared.kick_evict();
        }
        match action {
            FaultAction::Zero => self.fill_zeros(place, write, tid),
            FaultAction::Buffered(_) => self.second_chance(place, write, tid),
            FaultAction::Fetch(content) => {
                self.follow.fault(tid);
                self.fetch(place, content);
            }
            FaultAction::Wait => {}
        }
    }

    fn fill_zeros(&mut self, place: Place, write: bool, tid: i32) {
        let Some(state) = self.spaces.get_mut(&place.0) else { return };
        let address = place.1.get();
        let wanted = state.expected_run(address);
        let mut tables = lock(&self.shared.tables);
        let mut pages = tables.empty_run(place.0, place.1, wanted);
        if !self.shared.has_room(pages + ROOM_KEPT) {
            pages = 1;
        }
        let range = address..address + pages * PAGE;
        // A write gets its own page at once; a read gets the shared zero page, which costs no memory.
        let (installed, outcome) = match write {
            true => state.space.faults.copy_run(range, &self.zeros),
            false => state.space.faults.zero(range),
        };
        tables.installed(place.0, address..address + installed * PAGE);
        drop(tables);
        state.zero_streams.insert(0, (address + installed.max(1) * PAGE, installed));
        state.zero_streams.truncate(ZERO_STREAMS);
        self.shared.zero_fills.fetch_add(installed, Ordering::Relaxed);
        if write {
            self.shared.count_resident(installed as i64);
        }
        if installed == 0 {
            self.not_installed(place, outcome, write, tid);
        }
    }

    /// A page was not installed although its thread waits for it.
    fn not_installed(&mut self, place: Place, outcome: Installed, write: bool, tid: i32) {
        match outcome {
            Installed::Changing => self.again.push((place, write, tid)),
            // Somebody was faster, or the mapping has gone: the thread finds out by itself.
            _ => self.wake(place),
        }
    }

    /// The page is still in the write-back buffer. The lock is held over the copy, so that the slot cannot be reused.
    fn second_chance(&mut self, place: Place, write: bool, tid: i32) {
        let Some(state) = self.spaces.get(&place.0) else { return };
        let mut tables = lock(&self.shared.tables);
        let FaultAction::Buffered(slot) = tables.fault(place) else {
            drop(tables);
            return self.again.push((place, write, tid));
        };
        let outcome = state.space.faults.copy(place.1.get(), self.shared.frames.read(slot));
        if outcome == Installed::Done {
            tables.second_chance(place);
        }
        drop(tables);
        if outcome == Installed::Done {
            self.shared.count_resident(1);
            // Only a hint: dropped when the queue is full.
            let _ = self.shared.to_evict.try_send(EvictCommand::Referenced(place));
        } else {
            self.not_installed(place, outcome, write, tid);
        }
    }

    // ---- to the agent

    /// Fetches the page, and behind it in the same exchange what will be needed next: the faulting thread is woken as soon as its own
    /// page is there.
    fn fetch(&mut self, place: Place, content: Content) {
        if !self.pending.insert(place) {
            return;
        }
        self.trace(|trace| trace.looked_up(place));
        let now = Instant::now();
        let ahead = self.look_ahead(place);
        if ahead.is_empty() {
            return self.send(now, Fetch::new(now, vec![Wanted { place, content }], true));
        }
        let mut by_agent = BTreeMap::from([(content.agent, vec![Wanted { place, content }])]);
        for (page, content) in ahead {
            let wanted = Wanted { place: (place.0, page), content };
            by_agent.entry(content.agent).or_default().push(wanted);
        }
        let first = by_agent.remove(&content.agent).map(|pages| Fetch::new(now, pages, true));
        let ahead = by_agent.into_values().map(|pages| Fetch::new(now, pages, false));
        for fetch in first.into_iter().chain(ahead) {
            self.send(now, fetch);
        }
    }

    /// Pages to be fetched along: the other half of an 8 KiB page, and what the stream of faults will touch next. They are marked, so
    /// that threads which fault on them wait for this fetch.
    fn look_ahead(&mut self, place: Place) -> Vec<(PageAddr, Content)> {
        let Some(state) = self.spaces.get_mut(&place.0) else { return Vec::new() };
        let window = state.prefetch.on_fault(place.1);
        let (issued, hits) = state.prefetch.totals();
        let (_, hits_before) = std::mem::replace(&mut state.prefetch_totals, (issued, hits));
        self.shared.prefetch_hits.fetch_add(hits - hits_before, Ordering::Relaxed);
        let mut pages: Vec<PageAddr> = Vec::new();
        if self.shared.config.page_shift == 13 {
            pages.push(PageAddr::containing(place.1.get() ^ PAGE));
        }
        if self.shared.has_room(u64::from(window.count) + ROOM_KEPT) {
            pages.extend(window.pages(place.1));
        }
        pages.truncate(PAGES_MAX - 1);
        if pages.is_empty() {
            return Vec::new();
        }
        lock(&self.shared.tables).begin_prefetch(place.0, &pages)
    }

    fn send(&mut self, now: Instant, mut fetch: Fetch) {
        if fetch.restart().is_none() {
            return;
        }
        let first = &fetch.pages[0].content;
        let descriptors: Vec<PageDescriptor> = match fetch.pages.len() {
            1 => Vec::new(),
            _ => fetch.pages.iter().map(|p| PageDescriptor::new(p.content.id.0, 0)).collect(),
        };
        let sent = self.lane.send(
            now,
            first.agent,
            |request, workload| match descriptors.len() {
                0 => Control::get(request, workload, first.id.0),
                n => Control::get_many(request, workload, n as u16),
            },
            &[descriptors.as_bytes()],
            fetch.pages.len() as u32,
        );
        fetch.sent = now;
        match sent {
            Ok(exchange) => drop(self.inflight.insert(exchange, fetch)),
            Err(_) => self.unsent.push(fetch),
        }
    }

    /// Sends what could not be sent, or was not answered.
    fn send_again(&mut self, now: Instant) {
        let late = |fetch: &Fetch| now.duration_since(fetch.sent) > FETCH_RETRY;
        if !self.inflight.is_empty() && self.inflight.values().any(late) {
            let exchanges: Vec<ExchangeId> =
                self.inflight.iter().filter(|(_, f)| late(f)).map(|(e, _)| *e).collect();
            for exchange in exchanges {
                self.lane.abandon(exchange);
                let late = self.inflight.remove(&exchange);
                self.requeue(late);
            }
        }
        for fetch in std::mem::take(&mut self.unsent) {
            if !fetch.demanded {
                self.give_up(&fetch.pages);
                continue;
            }
            let agent = fetch.pages[0].content.agent;
            if now.duration_since(fetch.began) > FETCH_DEADLINE {
                let (name, reason) = (self.lane.name(agent), self.lane.reason(agent));
                self.shared.fail(format!("agent {name} does not give a page back: {reason}"));
            }
            if self.lane.is_up(agent) {
                self.send(now, fetch);
            } else {
                self.unsent.push(fetch);
            }
        }
    }

    /// What is missing of a fetch is to be sent again.
    fn requeue(&mut self, fetch: Option<Fetch>) {
        if let Some(mut fetch) = fetch
            && fetch.restart().is_some()
        {
            self.unsent.push(fetch);
        }
    }

    /// Pages fetched ahead do not come: threads that wait for them try by themselves.
    fn give_up(&self, pages: &[Wanted]) {
        for page in pages {
            let waited = lock(&self.shared.tables).end_prefetch(page.place);
            if waited {
                self.wake(page.place);
            }
        }
    }

    fn wake(&self, place: Place) {
        if let Some(state) = self.spaces.get(&place.0) {
            state.space.faults.wake(place.1.get()..place.1.get() + PAGE);
        }
    }

    // ---- and back

    /// True if anything came or was due.
    fn network(&mut self, now: Instant) -> bool {
        self.trace(Trace::receiving);
        let busy = self.lane.drive(now).unwrap_or_else(|error| {
            self.shared.fail(format!("receiving from the agents failed: {error}"));
            false
        });
        while let Some(event) = self.lane.poll(now) {
            match event {
                LaneEvent::Reply { exchange, control } => self.reply(exchange, &control),
                LaneEvent::Payload { exchange, offset, bytes } => {
                    self.payload(exchange, offset, &bytes);
                }
                LaneEvent::Complete { exchange } => self.complete(exchange),
                LaneEvent::Failed { exchange } => {
                    let failed = self.inflight.remove(&exchange);
                    self.requeue(failed);
                }
                LaneEvent::Up { agent, lost } if lost => self.agent_lost(agent),
                LaneEvent::Up { .. } | LaneEvent::Down { .. } => {}
            }
        }
        busy
    }

    fn agent_lost(&mut self, agent: AgentId) {
        let mut tables = lock(&self.shared.tables);
        if tables.depends_on(agent) {
            drop(tables);
            let name = self.lane.name(agent);
            self.shared
                .fail(format!("agent {name} was restarted and has lost the workload's pages"));
        } else {
            tables.forget_copies(agent);
        }
    }

    fn reply(&mut self, exchange: ExchangeId, control: &Control) {
        let Some(fetch) = self.inflight.get_mut(&exchange) else { return };
        if let Some(trace) = &mut self.trace {
            let (queue, service) = (control.queue_ns.get(), control.service_ns.get());
            trace.answered(fetch.pages[0].place, queue, service);
        }
        let all = u64::MAX >> (64 - fetch.pages.len());
        match control.status {
            Status::Ok if control.done.get() == all => fetch.accepted = true,
            // No session (yet): asked again when the link is up.
            Status::Denied => {}
            _ => self.lost(exchange, control),
        }
    }

    /// The agent does not have every page that was asked for.
    fn lost(&mut self, exchange: ExchangeId, control: &Control) {
        let Some(mut fetch) = self.inflight.remove(&exchange) else { return };
        self.lane.abandon(exchange);
        if fetch.restart().is_none() {
            return;
        }
        if !fetch.demanded {
            return self.give_up(&fetch.pages);
        }
        if fetch.pages.len() > 1 {
            // Perhaps only pages for which nobody waits: ask for the other alone.
            self.give_up(&fetch.pages.split_off(1));
            return self.unsent.push(fetch);
        }
        let Wanted { place, content } = fetch.pages[0];
        self.pending.remove(&place);
        if lock(&self.shared.tables).is_remote(place, content) {
            let name = self.lane.name(content.agent);
            self.shared.fail(format!("agent {name} has lost a page ({:?})", control.status));
        } else {
            self.wake(place);
        }
    }

    /// Bytes of pages, as they arrive. A page that comes in one piece is installed from the buffer in which it was received.
    fn payload(&mut self, exchange: ExchangeId, offset: usize, bytes: &[u8]) {
        let Some(mut fetch) = self.inflight.remove(&exchange) else { return };
        let page = PAGE as usize;
        if !fetch.accepted {
        } else if fetch.bytes.is_empty() && offset == 0 && bytes.len() == fetch.payload() {
            let head = fetch.head();
            bytes[head..].chunks_exact(page).all(|one| self.install(&mut fetch, one));
        } else if offset == fetch.bytes.len() && offset + bytes.len() <= fetch.payload() {
            let mut all = std::mem::take(&mut fetch.bytes);
            all.extend_from_slice(bytes);
            let from = (fetch.head() + fetch.installed * page).min(all.len());
            all[from..].chunks_exact(page).all(|one| self.install(&mut fetch, one));
            fetch.bytes = all;
        }
        self.inflight.insert(exchange, fetch);
    }

    /// Installs the next page of the fetch; false if it must be fetched again.
    fn install(&mut self, fetch: &mut Fetch, bytes: &[u8]) -> bool {
        let Wanted { place, content } = fetch.pages[fetch.installed];
        let demanded = fetch.demanded && fetch.installed == 0;
        if self.shared.checksum(bytes) != content.hash {
            fetch.mismatches += 1;
            if fetch.mismatches > 2 {
                let name = self.lane.name(content.agent);
                self.shared.fail(format!("agent {name} gives back a page with a wrong checksum"));
            }
            return false;
        }
        fetch.installed += 1;
        self.trace(|trace| trace.opened(place));
        // The lock is held from the look to the copy: in between nobody may install, change and evict the page.
        let mut tables = lock(&self.shared.tables);
        let outcome = match self.spaces.get(&place.0) {
            Some(state) if tables.is_remote(place, content) => {
                state.space.faults.copy(place.1.get(), bytes)
            }
            _ => Installed::Gone,
        };
        if matches!(outcome, Installed::Done | Installed::Exists) {
            tables.fetched(place, content);
        }
        let waited =
            if demanded { self.pending.remove(&place) } else { tables.end_prefetch(place) };
        drop(tables);
        self.trace(|trace| trace.installed(place, outcome == Installed::Done));
        if outcome == Installed::Done {
            self.count_installed(fetch.began, demanded);
        } else if waited {
            self.wake(place);
        }
        true
    }

    fn count_installed(&self, began: Instant, demanded: bool) {
        self.shared.count_resident(1);
        self.shared.pages_in.fetch_add(1, Ordering::Relaxed);
        if demanded {
            let took = began.elapsed().as_nanos() as u64;
            lock(&self.shared.latency).saturating_record(took);
        } else {
            self.shared.prefetched.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn complete(&mut self, exchange: ExchangeId) {
        let Some(fetch) = self.inflight.remove(&exchange) else { return };
        // Not all came in good order: ask again for what is missing.
        self.requeue(Some(fetch));
    }
}

impl SpaceFaults {
    /// How many pages to fill at a first touch: twice as many as at the last, if this one goes on where that one ended.
    fn expected_run(&mut self, address: u64) -> u64 {
        let Some(at) = self.zero_streams.iter().position(|s| s.0 == address) else { return 1 };
        let (_, last) = self.zero_streams.remove(at);
        (last * 2).clamp(1, ZERO_RUN_MAX)
    }
}
