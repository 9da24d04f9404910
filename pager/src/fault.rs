//! The fault thread: from the kernel's message to the remote page and back.
//!
//! `read_space` reads messages (events first, then faults) -> `fault` asks the tables what to do -> zeros, write-back buffer, or
//! `fetch` sends a request to the agent -> `payload` installs the page as soon as its bytes are there, which wakes the thread.
//!
//! Nothing on this path waits: what cannot be done now (page on its way out, no room, event unread) is left to whoever can, and the
//! thread is woken then and faults again.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use gms_policy::ids::{AgentId, PageAddr, SpaceId};
use gms_policy::prefetch::{Prefetch, Streams};
use gms_transport::message::{Control, PageDescriptor, Status};
use gms_transport::{ExchangeId, Transport};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use userfaultfd::{Event, EventBuffer, ReadWrite};
use zerocopy::IntoBytes;

use crate::lane::{Lane, LaneEvent};
use crate::page_map::{Content, PAGE};
use crate::proc;
use crate::shared::{EvictCommand, FaultCommand, Shared, Space, drain, lock};
use crate::tables::{FaultAction, Place};
use crate::uffd::{Faults, Installed};

/// Messages read at once.
const MESSAGES: usize = 32;
/// Longest that the thread polls before it blocks: waking an idle CPU costs more than a whole fault.
const SPIN: Duration = Duration::from_micros(50);
/// Most pages filled with zeros for one fault.
const ZERO_RUN_MAX: u64 = 64;
/// A fetch without an answer is sent again after this.
const FETCH_RETRY: Duration = Duration::from_secs(2);
/// After this long without its page the workload is stopped: the page is lost.
const FETCH_DEADLINE: Duration = Duration::from_secs(15);
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
struct Wanted {
    place: Place,
    content: Content,
}

/// A fetch in flight or waiting to be sent. The first page is the one that faulted; others came along.
struct Fetch {
    pages: Vec<Wanted>,
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
    /// Bytes of descriptors before the first page.
    fn head(&self) -> usize {
        if self.pages.len() > 1 { self.pages.len() * size_of::<PageDescriptor>() } else { 0 }
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
    buffer: EventBuffer,
    zeros: Box<[u8]>,
}

impl<T: Transport> FaultThread<T> {
    /// A thread's state; [`FaultThread::run`] runs it.
    pub fn new(
        shared: Arc<Shared>,
        commands: Receiver<FaultCommand>,
        lane: Lane<T>,
    ) -> FaultThread<T> {
        FaultThread {
            shared,
            commands,
            lane,
            spaces: HashMap::new(),
            inflight: HashMap::new(),
            unsent: Vec::new(),
            pending: HashSet::new(),
            again: Vec::new(),
            buffer: EventBuffer::new(MESSAGES),
            zeros: vec![0; (ZERO_RUN_MAX * PAGE) as usize].into(),
        }
    }

    /// Serves faults until the session stops.
    pub fn run(mut self) {
        let mut spin_until = Instant::now();
        while !self.shared.stop.load(Ordering::Relaxed) {
            let now = Instant::now();
            let mut busy = self.obey();
            busy |= self.network(now);
            busy |= self.read_all();
            self.send_again(now);
            if let Err(error) = self.lane.flush(now) {
                self.shared.fail(format!("sending to the agents failed: {error}"));
            }
            if busy {
                spin_until = Instant::now() + SPIN;
            } else if now < spin_until {
                std::thread::yield_now();
            } else {
                self.wait(now);
            }
        }
        self.lane.close(Instant::now());
    }

    /// Blocks until a message, a packet, a command or a deadline.
    fn wait(&mut self, now: Instant) {
        let deadline =
            self.lane.deadline().map_or(FETCH_RETRY, |d| d.saturating_duration_since(now));
        let limit = if self.again.is_empty() { FETCH_RETRY } else { Duration::from_millis(1) };
        // Rounded up: a time-out of 0 would spin until the deadline.
        let millis = deadline.min(limit).as_micros().div_ceil(1000) as u16;
        let mut fds = vec![
            PollFd::new(self.shared.fault_kicks().as_fd(), PollFlags::POLLIN),
            PollFd::new(self.lane.fd(), PollFlags::POLLIN),
        ];
        fds.extend(
            self.spaces.values().map(|s| PollFd::new(s.space.faults.as_fd(), PollFlags::POLLIN)),
        );
        // An interrupted or failed poll only means to look sooner.
        let _ = poll(&mut fds, PollTimeout::from(millis));
    }

    fn obey(&mut self) -> bool {
        let mut busy = false;
        while let Ok(command) = self.commands.try_recv() {
            drain(self.shared.fault_kicks());
            busy = true;
            match command {
                FaultCommand::Add(space) => self.add(space),
                FaultCommand::Drop(id) => drop(self.spaces.remove(&id)),
            }
        }
        busy
    }

    fn add(&mut self, space: Arc<Space>) {
        let state = SpaceFaults {
            prefetch: Streams::new(12),
            prefetch_totals: (0, 0),
            zero_streams: Vec::with_capacity(ZERO_STREAMS),
            space,
        };
        self.spaces.insert(state.space.id, state);
    }

    // ---- from the kernel

    fn read_all(&mut self) -> bool {
        let again = std::mem::take(&mut self.again);
        let ids: Vec<SpaceId> = self.spaces.keys().copied().collect();
        let mut busy = false;
        for id in ids {
            busy |= self.read_space(id);
        }
        for (place, write, tid) in again {
            self.fault(place, write, tid);
        }
        busy
    }

    /// Reads the messages of a space: events are applied before the gate is opened, faults afterwards.
    fn read_space(&mut self, id: SpaceId) -> bool {
        let Some(state) = self.spaces.get(&id) else { return false };
        let space = state.space.clone();
        let mut messages: Vec<Event> = Vec::new();
        let gate = lock(&space.gate);
        let mut fork = None;
        if space.faults.has_event() {
            fork = proc::fork_under_way(space.pid.load(Ordering::Relaxed));
        }
        if let Err(error) = space.faults.read(&mut self.buffer, &mut messages) {
            self.shared.fail(format!("reading faults of process {:?} failed: {error}", space.pid));
        }
        let mut faults = Vec::new();
        let busy = !messages.is_empty();
        for message in messages {
            match message {
                Event::Pagefault { rw, addr, thread_id, .. } => {
                    let page = PageAddr::containing(addr as u64);
                    faults.push((page, rw == ReadWrite::Write, thread_id.as_raw()));
                }
                Event::Fork { uffd } => self.fork(&space, Faults::of_child(uffd), &mut fork),
                event => self.event(&space, event),
            }
        }
        drop(gate);
        self.shared.faults.fetch_add(faults.len() as u64, Ordering::Relaxed);
        for (page, write, tid) in faults {
            self.fault((id, page), write, tid);
        }
        busy
    }

    fn event(&mut self, space: &Arc<Space>, event: Event) {
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
    fn fork(&mut self, parent: &Arc<Space>, faults: Faults, seen: &mut Option<Vec<Range<u64>>>) {
        let pid = parent.pid.load(Ordering::Relaxed);
        // The fork began between the look and the read: looked up late is better than not at all.
        let not_inherited = seen.take().or_else(|| proc::not_inherited(pid)).unwrap_or_default();
        let child = Arc::new(Space {
            id: self.shared.new_space(),
            faults,
            gate: Default::default(),
            pid: AtomicI32::new(0),
            changes: AtomicU64::new(0),
        });
        lock(&self.shared.tables).fork(parent.id, child.id, &not_inherited);
        self.add(child.clone());
        if self.shared.to_evict.try_send(EvictCommand::Forked(child)).is_err() {
            self.shared.fail("too many processes were forked at once");
        }
        self.shared.kick_evict();
    }

    /// One thread waits for one page.
    fn fault(&mut self, place: Place, write: bool, tid: i32) {
        if !self.shared.has_room(1) && !lock(&self.shared.evictors).contains(&tid) {
            lock(&self.shared.tables).wait_for_room(place);
            return self.shared.kick_evict();
        }
        let action = lock(&self.shared.tables).fault(place);
        match action {
            FaultAction::Zero => self.fill_zeros(place, write, tid),
            FaultAction::Buffered(_) => self.second_chance(place, write, tid),
            FaultAction::Fetch(content) => self.fetch(place, content),
            FaultAction::Wait => {}
        }
    }

    fn fill_zeros(&mut self, place: Place, write: bool, tid: i32) {
        let Some(state) = self.spaces.get_mut(&place.0) else { return };
        let address = place.1.get();
        let wanted = state.expected_run(address);
        let mut tables = lock(&self.shared.tables);
        let mut pages = tables.empty_run(place.0, place.1, wanted);
        if !self.shared.has_room(pages) {
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
            _ => {
                if let Some(state) = self.spaces.get(&place.0) {
                    state.space.faults.wake(place.1.get()..place.1.get() + PAGE);
                }
            }
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

    fn fetch(&mut self, place: Place, content: Content) {
        if !self.pending.insert(place) {
            return;
        }
        let now = Instant::now();
        let mut pages = vec![Wanted { place, content }];
        if self.shared.config.page_shift == 13 {
            pages.extend(self.other_half(place, content.agent));
        }
        self.look_ahead(place);
        let fetch = Fetch {
            pages,
            began: now,
            sent: now,
            mismatches: 0,
            bytes: Vec::new(),
            installed: 0,
            accepted: false,
        };
        self.send(now, fetch);
    }

    /// The other half of an 8 KiB page, if the same agent has it. It comes behind the half that faulted.
    fn other_half(&self, place: Place, agent: AgentId) -> Option<Wanted> {
        let half = PageAddr::containing(place.1.get() ^ PAGE);
        let mut tables = lock(&self.shared.tables);
        let (page, content) = tables.begin_prefetch(place.0, &[half]).pop()?;
        if content.agent != agent {
            tables.end_prefetch((place.0, page));
            return None;
        }
        Some(Wanted { place: (place.0, page), content })
    }

    /// Has the bulk lane fetch what the stream of faults will need next.
    fn look_ahead(&mut self, place: Place) {
        let Some(state) = self.spaces.get_mut(&place.0) else { return };
        let window = state.prefetch.on_fault(place.1);
        let (issued, hits) = state.prefetch.totals();
        let (_, hits_before) = std::mem::replace(&mut state.prefetch_totals, (issued, hits));
        self.shared.prefetch_hits.fetch_add(hits - hits_before, Ordering::Relaxed);
        let pages: Vec<PageAddr> = window.pages(place.1).collect();
        if !pages.is_empty()
            && self.shared.to_evict.try_send(EvictCommand::Prefetch(place.0, pages)).is_ok()
        {
            self.shared.kick_evict();
        }
    }

    fn send(&mut self, now: Instant, mut fetch: Fetch) {
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
                self.unsent.extend(self.inflight.remove(&exchange));
            }
        }
        for mut fetch in std::mem::take(&mut self.unsent) {
            let agent = fetch.pages[0].content.agent;
            if now.duration_since(fetch.began) > FETCH_DEADLINE {
                let (name, reason) = (self.lane.name(agent), self.lane.reason(agent));
                self.shared.fail(format!("agent {name} does not give a page back: {reason}"));
            }
            fetch.bytes.clear();
            fetch.accepted = false;
            if self.lane.is_up(agent) {
                self.send(now, fetch);
            } else {
                self.unsent.push(fetch);
            }
        }
    }

    // ---- and back

    fn network(&mut self, now: Instant) -> bool {
        let mut busy = match self.lane.drive(now) {
            Ok(busy) => busy,
            Err(error) => {
                self.shared.fail(format!("receiving from the agents failed: {error}"));
                false
            }
        };
        while let Some(event) = self.lane.poll(now) {
            busy = true;
            match event {
                LaneEvent::Reply { exchange, control } => self.reply(exchange, &control),
                LaneEvent::Payload { exchange, offset, bytes } => {
                    self.payload(exchange, offset, &bytes)
                }
                LaneEvent::Complete { exchange } => self.complete(exchange),
                LaneEvent::Failed { exchange } => {
                    self.unsent.extend(self.inflight.remove(&exchange))
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
        if fetch.pages.len() > 1 {
            // Perhaps only the half that nobody waits for: ask for the other alone.
            for page in fetch.pages.drain(1..) {
                lock(&self.shared.tables).end_prefetch(page.place);
                self.not_installed(page.place, Installed::Gone, false, 0);
            }
            return self.unsent.push(fetch);
        }
        let wanted = &fetch.pages[0];
        self.pending.remove(&wanted.place);
        if lock(&self.shared.tables).is_remote(wanted.place, wanted.content) {
            let name = self.lane.name(wanted.content.agent);
            self.shared.fail(format!("agent {name} has lost a page ({:?})", control.status));
        } else {
            self.not_installed(wanted.place, Installed::Gone, false, 0);
        }
    }

    /// Bytes of pages: a page that comes in one piece is installed from the buffer in which it was received.
    fn payload(&mut self, exchange: ExchangeId, offset: usize, bytes: &[u8]) {
        let Some(mut fetch) = self.inflight.remove(&exchange) else { return };
        if fetch.accepted {
            let page = PAGE as usize;
            let single = fetch.pages.len() == 1 && offset == 0 && bytes.len() == page;
            if single {
                self.install(&mut fetch, bytes);
            } else if offset == fetch.bytes.len()
                && offset + bytes.len() <= fetch.head() + fetch.pages.len() * page
            {
                fetch.bytes.extend_from_slice(bytes);
                while fetch.bytes.len() >= fetch.head() + (fetch.installed + 1) * page {
                    let at = fetch.head() + fetch.installed * page;
                    let one = fetch.bytes[at..at + page].to_vec();
                    if !self.install(&mut fetch, &one) {
                        break;
                    }
                }
            }
        }
        self.inflight.insert(exchange, fetch);
    }

    /// Installs the next page of the fetch; false if it must be fetched again.
    fn install(&mut self, fetch: &mut Fetch, bytes: &[u8]) -> bool {
        let Wanted { place, content } = fetch.pages[fetch.installed];
        if self.shared.checksum(bytes) != content.hash {
            fetch.mismatches += 1;
            if fetch.mismatches > 2 {
                let name = self.lane.name(content.agent);
                self.shared.fail(format!("agent {name} gives back a page with a wrong checksum"));
            }
            return false;
        }
        let Some(state) = self.spaces.get(&place.0) else {
            fetch.installed += 1;
            return true;
        };
        let demanded = fetch.installed == 0;
        fetch.installed += 1;
        // The lock is held from the look to the copy: in between nobody may install, change and evict the page.
        let mut tables = lock(&self.shared.tables);
        let outcome = match tables.is_remote(place, content) {
            true => state.space.faults.copy(place.1.get(), bytes),
            false => Installed::Gone,
        };
        if matches!(outcome, Installed::Done | Installed::Exists) {
            tables.fetched(place, content);
        }
        if !demanded {
            tables.end_prefetch(place);
        }
        drop(tables);
        if demanded {
            self.pending.remove(&place);
        }
        if outcome == Installed::Done {
            self.shared.count_resident(1);
            self.shared.pages_in.fetch_add(1, Ordering::Relaxed);
            if demanded {
                let took = fetch.began.elapsed().as_nanos() as u64;
                lock(&self.shared.latency).saturating_record(took);
            } else {
                self.shared.prefetched.fetch_add(1, Ordering::Relaxed);
            }
        } else {
            self.not_installed(place, outcome, false, 0);
        }
        true
    }

    fn complete(&mut self, exchange: ExchangeId) {
        let Some(mut fetch) = self.inflight.remove(&exchange) else { return };
        // Not all came in good order: ask again for what is missing.
        fetch.pages.drain(..fetch.installed);
        fetch.installed = 0;
        if !fetch.pages.is_empty() {
            self.unsent.push(fetch);
        }
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
