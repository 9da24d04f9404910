//! Page faults: from the kernel's message to the remote page and back.
//!
//! `read_space` reads messages (events first, then faults) -> `fault` asks the tables what to do -> zeros, write-back buffer, or
//! `fetch` sends a request to the agent -> `arrived` installs the page as soon as its bytes are there, and wakes the thread: at once, or where several
//! wait with all whose pages have come.
//!
//! No fault waits here: what cannot be done now (page on its way out, no room, event unread) is left to whoever can, and the thread is
//! woken then and faults again. Changes of the address space are waited for: up to 5 ms with the gate closed (`read_changes`), and at a
//! birth (forks.rs). [`FaultCore`] decides, and has neither clock nor descriptor of its own; [`FaultThread`] has it turn.

mod demand;
mod driver;
mod events;
mod fetch;
mod follow;
mod forks;
mod lend;
mod local;
#[cfg(test)]
pub(crate) mod tests;
mod unmade;
mod unread;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use gms_policy::hedge::Hedge;
use gms_policy::ids::{AgentId, SpaceId};
use gms_policy::limits::AGENTS_MAX;
use gms_policy::prefetch::Streams;
use gms_transport::Transport;
use gms_transport::client::{Client, GetId, RETRY, Urgency};

use self::demand::Demand;
pub use self::driver::FaultThread;
use self::events::{Proof, Stuck};
use self::fetch::Fetch;
pub(crate) use self::fetch::look_for_marker;
use self::unread::Unread;
use crate::decode::Decoder;
use crate::homes::{FaultCommand, ThreadIndex};
use crate::kernel::{Event, Messages, PageFault, ReadError};
use crate::page_map::Content;
use crate::pulse::Pulse;
use crate::shared::Shared;
use crate::space::{Lent, Space};
use crate::sync::lock;
use crate::tables::{FaultAction, Place};
use crate::torture::{self, Point};
use crate::trace::Trace;

/// Faults which met an unread event are tried again after this at the latest.
const AGAIN: Duration = Duration::from_millis(1);
/// Where several threads wait, so many messages are read before their requests go out.
const READ_TOGETHER: usize = 32;

struct SpaceFaults {
    space: Arc<Space>,
    prefetch: Streams,
    prefetch_hits: u64,
    /// What recent first touches filled: where they are sequential, upwards or downwards, the next fills twice as much.
    zero_streams: Vec<Range<u64>>,
    /// Events read and not applied yet. The kernel may report concurrent changes in another order than they were made, so all wait until none is
    /// under way; until then no fault here is served and nothing is evicted.
    backlog: Vec<Told>,
    /// Since when the backlog could not be applied.
    late: Option<Instant>,
    /// Since when faults or backlog have been stuck.
    waits: Option<Instant>,
    /// When COPY last failed for an awaited page.
    refused: Option<Instant>,
    /// Forked; its parent's events are being applied: its own must wait.
    unborn: bool,
}

impl SpaceFaults {
    /// Adds the hits of prefetched pages since this was called last.
    fn count_hits(&mut self, shared: &Shared) {
        let (_, hits) = self.prefetch.totals();
        let new = hits - std::mem::replace(&mut self.prefetch_hits, hits);
        shared.prefetch_hits.fetch_add(new, Ordering::Relaxed);
    }
}

/// What an address space has told of itself.
struct Told {
    event: Event,
    /// If it is a remap, it has been told too that its source is no longer mapped.
    echoed: bool,
    /// If it is an unmap, it has been found to have been made.
    made: bool,
}

/// One thread waits for one page.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Fault {
    place: Place,
    write: bool,
    /// As the kernel tells it, in the thread's own PID namespace: good for hints only.
    tid: i32,
}

/// What is to be listened to from now on.
pub enum Listen {
    /// The space.
    Begin(Arc<Space>),
    /// The space, but not for the time being: it cannot be read.
    Pause(Arc<Space>),
    /// The space, again.
    Resume(Arc<Space>),
    /// The space no more.
    End(Arc<Space>),
}

/// Who has asked for remote pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Asked {
    /// Nobody.
    #[default]
    Nobody,
    /// A thread of this id, while nobody else waited.
    One(i32),
    /// Several threads, or one whose id means nothing here.
    Others,
}

/// What the core asks of processes. The simulation has none.
#[derive(Clone, Copy, Debug)]
pub struct Asks {
    /// How many threads a process has, as far as that can be told.
    pub threads: fn(i32) -> Option<i64>,
    /// Whether an unmap of a process may be refused when it has been told.
    pub refuses: fn(i32) -> bool,
}

impl Asks {
    /// Nothing is known.
    pub fn nobody() -> Asks {
        Asks { threads: |_| None, refuses: |_| true }
    }
}

/// See the module's documentation.
pub struct FaultCore<T> {
    shared: Arc<Shared>,
    /// Which of the session's fault threads has it turn.
    thread: ThreadIndex,
    agents: Client<T>,
    spaces: BTreeMap<SpaceId, SpaceFaults>,
    /// Spaces with another home, of which this thread fetches pages.
    guests: BTreeMap<SpaceId, Lent>,
    /// Threads that have been lent something since they were kicked last.
    to_kick: BTreeSet<ThreadIndex>,
    fetches: BTreeMap<GetId, Fetch>,
    /// Pages for which threads wait: those that fault on the same page share what was asked.
    pending: BTreeMap<Place, Demand>,
    hedge: Hedge,
    /// When it is looked again whether threads wait for what does not come.
    silence_at: Instant,
    /// Makes pages of parity.
    decoder: Decoder,
    /// Faults to be tried again once the events have been read.
    again: Vec<Fault>,
    /// Spaces with a backlog.
    behind: BTreeSet<SpaceId>,
    /// Those in which somebody has been waiting.
    waiting: BTreeSet<SpaceId>,
    /// Those in which a thread may be waiting for itself.
    stuck: BTreeMap<SpaceId, Stuck>,
    /// Pages that were installed without a word, and when they were asked for: their threads are woken together.
    installed: Vec<(Arc<Space>, Range<u64>, Instant)>,
    /// Several threads waited when the last page was installed: they will soon wait again.
    crowd: bool,
    /// Demanded pages whose markers have not been looked for yet, and when they were asked for.
    unproved: Vec<(Place, Content, Instant)>,
    /// Spaces with something of which it cannot be read.
    unread: BTreeMap<SpaceId, Unread>,
    zeros: Box<[u8]>,
    pulse: Pulse,
    asks: Asks,
    // For the driver.
    listen: Vec<Listen>,
    asked: Asked,
    /// How long threads have waited for the pages that they have got.
    served: Vec<Duration>,
    trace: Option<Trace>,
}

impl<T: Transport> FaultCore<T> {
    /// Of a session that begins, for one of its fault threads. `threads` tells how many threads a process has, as far as that is known.
    pub fn new(
        now: Instant,
        shared: Arc<Shared>,
        thread: ThreadIndex,
        agents: Client<T>,
        asks: Asks,
        trace: Option<Trace>,
    ) -> FaultCore<T> {
        // Also those that nobody has told of yet: nothing is put at one before this thread can fetch it there.
        let known = agents.lane().agents().count();
        for agent in (0..AGENTS_MAX).map(|agent| AgentId(agent as u8)) {
            let is_up = usize::from(agent.0) < known && agents.lane().is_up(agent);
            shared.homes.tell_link(thread, agent, is_up);
        }
        let shape = shared.config.redundancy.shape();
        FaultCore {
            shared,
            thread,
            agents,
            spaces: BTreeMap::new(),
            guests: BTreeMap::new(),
            to_kick: BTreeSet::new(),
            fetches: BTreeMap::new(),
            pending: BTreeMap::new(),
            hedge: Hedge::default(),
            silence_at: now,
            decoder: Decoder::new(now, shape, Urgency::Demand),
            again: Vec::new(),
            behind: BTreeSet::new(),
            waiting: BTreeSet::new(),
            stuck: BTreeMap::new(),
            installed: Vec::new(),
            crowd: false,
            unproved: Vec::new(),
            unread: BTreeMap::new(),
            zeros: local::zeros(),
            pulse: Pulse::new(now),
            asks,
            listen: Vec::new(),
            asked: Asked::Nobody,
            served: Vec::new(),
            trace,
        }
    }

    /// The agents.
    pub fn agents(&self) -> &Client<T> {
        &self.agents
    }

    /// What is to be listened to has changed.
    pub fn poll_listen(&mut self) -> Option<Listen> {
        (!self.listen.is_empty()).then(|| self.listen.remove(0))
    }

    /// Who has asked for remote pages since this was called last.
    pub fn take_asked(&mut self) -> Asked {
        std::mem::take(&mut self.asked)
    }

    /// How long threads have waited for the pages that they have got since this was called last.
    pub fn drain_served(&mut self) -> std::vec::Drain<'_, Duration> {
        self.served.drain(..)
    }

    /// When [`FaultCore::turn`] must be called although nothing can be read.
    pub fn deadline(&self, now: Instant) -> Instant {
        let unfinished = [&self.behind, &self.waiting].iter().any(|spaces| !spaces.is_empty())
            || !self.again.is_empty()
            || !self.unread.is_empty()
            || !self.unproved.is_empty();
        let own = now + if unfinished { AGAIN } else { RETRY };
        let due = [self.hedge_due(), self.silence_due(), self.decoder.due()];
        let own = due.into_iter().flatten().fold(own, |own, due| due.clamp(now, own));
        self.agents.deadline().map_or(own, |deadline| deadline.min(own))
    }

    /// Whether all that was read is applied, and nothing is taken out of a userfaultfd for a moment: another binary could go on here.
    pub fn is_at_rest(&self) -> bool {
        let is_born = |state: &SpaceFaults| state.backlog.is_empty() && !state.unborn;
        self.spaces.values().all(is_born) && !self.stuck.values().any(Stuck::is_let_through)
    }

    /// A space comes or goes.
    pub fn handle_command(&mut self, command: FaultCommand) {
        match command {
            FaultCommand::Add(space) => self.add(space),
            FaultCommand::Inherit(space, events) => {
                self.add(space.clone());
                self.take_up(&space, events);
            }
            FaultCommand::Drop(id) => {
                if self.shared.homes.has_left(id, self.thread) {
                    return;
                }
                // It may have forked.
                if let Some(space) = self.spaces.get(&id).map(|state| state.space.clone()) {
                    let _gate = lock(&space.gate);
                    self.apply(&space, &Proof::default());
                }
                // Nothing is lost: messages of unknown spaces are not read.
                self.listen.extend(self.spaces.remove(&id).map(|state| Listen::End(state.space)));
                self.forget_unread(id);
                self.waiting.remove(&id);
                self.stuck.remove(&id);
                // Here, where nothing is half done: of what has been read no fault meets a space of which nothing is known, no fork copies one.
                lock(&self.shared.tables).drop_space(id);
                self.shared.tell_dropped(id);
            }
        }
    }

    /// What the pager before has read of a space's events and not applied.
    pub fn take_up(&mut self, space: &Space, events: Vec<Event>) {
        space.ungated.hold();
        self.note_told(space.id, events);
    }

    fn add(&mut self, space: Arc<Space>) {
        let state = SpaceFaults {
            prefetch: Streams::default(),
            prefetch_hits: 0,
            zero_streams: Vec::with_capacity(local::ZERO_STREAMS),
            backlog: Vec::new(),
            late: None,
            waits: None,
            refused: None,
            unborn: false,
            space: space.clone(),
        };
        self.spaces.insert(space.id, state);
        self.listen.push(Listen::Begin(space));
    }

    /// Something of the space can be read.
    pub fn handle_readable(&mut self, clock: &impl Fn() -> Instant, id: SpaceId) {
        // Where several threads wait, their requests go out together. What was read together was all that there was, unless it was all that is read at once.
        for turn in 0..READ_TOGETHER {
            let read = self.read_space(clock, id, turn == 0);
            let may_be_more = read == 1 || read == READ_TOGETHER;
            if !may_be_more || !(2..READ_TOGETHER).contains(&self.pending.len()) {
                break;
            }
        }
    }

    /// What is most likely to come next is looked for without asking whether it is there; false if nothing came.
    pub fn glance(&mut self, clock: &impl Fn() -> Instant) -> bool {
        if self.agents.awaits() {
            return self.network(clock);
        }
        let mut ids = self.spaces.keys();
        match (ids.next().copied(), ids.next()) {
            // What cannot be applied yet is for `settle`, which gives those time who are to tell of more.
            (Some(only), None) if !self.behind.contains(&only) => {
                self.read_space(clock, only, false) > 0
            }
            _ => false,
        }
    }

    /// What could not be done before, and what is due; requests go out. Those of the faults go first: threads wait for them.
    pub fn turn(&mut self, clock: &impl Fn() -> Instant) {
        self.unread_again(clock);
        self.settle(clock);
        let now = clock();
        for fault in std::mem::take(&mut self.again) {
            self.fault(now, fault);
        }
        self.take_loans(now);
        self.kick_workers();
        self.flush(now);
        self.trace(Trace::sent);
        self.prove_demanded(now);
        self.relieve(now);
        self.calm(now);
        self.excuse(now);
        self.repeat(now, clock);
        self.hedge(now);
        self.make_on(now);
        self.flush(now);
        self.let_guests_go();
    }

    fn flush(&mut self, now: Instant) {
        if let Err(error) = self.agents.flush(now) {
            self.shared.fail(format!("sending to the agents failed: {error}"));
        }
    }

    /// The session is over.
    pub fn end(mut self, now: Instant) -> Option<Trace> {
        self.agents.close_links(now);
        if self.shared.has_failed() {
            // Its userfaultfds, and those of children that nobody else knows of, stay open until nobody has the memory.
            std::mem::forget(self.spaces);
        }
        self.trace
    }

    /// A space that this thread serves, or fetches pages of.
    fn space_of(&self, id: SpaceId) -> Option<&Arc<Space>> {
        let own = self.spaces.get(&id).map(|state| &state.space);
        own.or_else(|| self.guests.get(&id).map(Lent::space))
    }

    fn trace(&mut self, stamp: impl FnOnce(&mut Trace)) {
        self.trace.as_mut().map(stamp);
    }

    // ---- from the kernel

    /// Reads the messages of a space, and serves its faults; returns how many, and at least one if there was anything. `polled` says that something was
    /// readable.
    fn read_space(&mut self, clock: &impl Fn() -> Instant, id: SpaceId, polled: bool) -> usize {
        let Some(faults) = self.read_faults(clock, id, polled) else { return 0 };
        let (now, count) = (clock(), faults.len());
        faults.into_iter().for_each(|fault| self.fault(now, fault));
        count.max(1)
    }

    /// The same, but for the faults, which are returned.
    fn read_faults(
        &mut self,
        clock: &impl Fn() -> Instant,
        id: SpaceId,
        polled: bool,
    ) -> Option<Vec<Fault>> {
        let space = self.spaces.get(&id)?.space.clone();
        let mut messages = Messages::default();
        torture::at(Point::BeforeRead);
        let gate = self.read_messages(clock(), &space, polled, &mut messages);
        let is_empty = messages.is_empty();
        let mut faults = messages.faults;
        let is_behind = self.note_told(id, messages.events) && gate.is_some();
        if is_empty && !is_behind {
            return None;
        }
        self.trace(Trace::read);
        if is_behind {
            self.handle_told(clock, &space, &mut faults);
        }
        torture::at(Point::BeforeGateOpens);
        drop(gate);
        self.shared.faults.fetch_add(faults.len() as u64, Ordering::Relaxed);
        let fault = |PageFault { page, write, tid }| Fault { place: (id, page), write, tid };
        Some(faults.into_iter().map(fault).collect())
    }

    /// Reads one fault, or what there is if an event is unread or (with the gate) other threads wait already. Returns the gate, closed, if an event
    /// may have been read.
    fn read_messages<'a>(
        &mut self,
        now: Instant,
        space: &'a Space,
        polled: bool,
        messages: &mut Messages,
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
        // Without the gate nothing but one fault may be read.
        let several = changing || (gate.is_some() && (self.crowd || !self.pending.is_empty()));
        let read = match gate {
            Some(_) => space.read(several, messages),
            None => space.read_ungated(messages),
        };
        self.note_read(now, space, read, messages);
        if gate.is_none() && !messages.events.is_empty() {
            gate = Some(lock(&space.gate));
        }
        gate
    }

    /// Something was read of the space, or could not be.
    fn note_read(
        &mut self,
        now: Instant,
        space: &Space,
        read: Result<(), ReadError>,
        messages: &Messages,
    ) {
        match read {
            Ok(()) => self.end_unread(now, space, &messages.events),
            Err(ReadError::NoDescriptor) => self.leave_unread(now, space),
            Err(error) => {
                self.shared.fail(format!("reading faults of {} failed: {error}", space.name()));
            }
        }
    }

    /// What is to be applied; returns whether anything is.
    fn note_told(&mut self, id: SpaceId, events: Vec<Event>) -> bool {
        let Some(state) = self.spaces.get_mut(&id) else { return false };
        state.backlog.extend(events.into_iter().map(|event| Told {
            event,
            echoed: false,
            made: false,
        }));
        let is_behind = !state.backlog.is_empty();
        if is_behind {
            self.behind.insert(id);
        }
        is_behind
    }

    /// One thread waits for one page.
    fn fault(&mut self, now: Instant, fault: Fault) {
        let place = fault.place;
        let Some(state) = self.spaces.get(&place.0) else { return };
        // Else what is known may be wrong: nobody is served any more.
        if self.shared.has_failed() {
            return;
        }
        if !state.backlog.is_empty() {
            return self.try_again(fault);
        }
        let never_waits = self.shared.is_ours(fault.tid, &state.space);
        let action = lock(&self.shared.tables).fault_of(place, fault.tid);
        if !self.has_room(action) && !never_waits {
            lock(&self.shared.tables).wait_for_room(place);
            return self.shared.kick_evict();
        }
        torture::at(Point::AfterDecision);
        match action {
            FaultAction::Zero => self.fill_zeros(fault),
            FaultAction::Resident => self.look_at_resident(fault),
            FaultAction::Buffered(_) => self.second_chance(fault),
            FaultAction::Fetch(content) => {
                self.note_asked(fault);
                self.fetch(now, place, content);
            }
            FaultAction::Wait => {}
        }
    }

    fn note_asked(&mut self, Fault { place, tid, .. }: Fault) {
        let same_ids = |state: &SpaceFaults| state.space.same_ids.load(Ordering::Relaxed);
        let alone = self.pending.is_empty() && self.asked == Asked::Nobody;
        let known = alone && self.spaces.get(&place.0).is_some_and(same_ids);
        self.asked = if known { Asked::One(tid) } else { Asked::Others };
    }

    /// Whether there is room under the ceiling for what a fault needs.
    fn has_room(&self, action: FaultAction) -> bool {
        self.shared.has_room(match action {
            FaultAction::Zero => 1 + self.shared.sizes.room_kept,
            FaultAction::Buffered(_) | FaultAction::Fetch(_) => 1,
            FaultAction::Wait | FaultAction::Resident => 0,
        })
    }

    /// Serves a fault when the events have been read.
    fn try_again(&mut self, fault: Fault) {
        // Each event wakes it, and it faults anew.
        if !self.again.contains(&fault) {
            self.again.push(fault);
        }
    }
}
