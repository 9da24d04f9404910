//! The evict thread: measures the tree, attaches its processes, registers their memory and moves pages out ahead of need, so that a
//! fault finds room. It also writes pages to the agents, and fetches them back when the workload is let go, over the bulk lane.
//!
//! `look` (look.rs) measures and decides -> `evict_batch` marks, moves, reads and hashes pages -> [`WriteBack`] sends them.

mod detach;
mod end;
mod halt;
mod hand_over;
mod heir;
mod look;
mod presence;
mod reconcile;
mod room;
mod schedule;
pub mod write_back;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use gms_policy::budget::Budget;
use gms_policy::full::WhenFull;
use gms_policy::ids::{AgentId, Bytes, PageAddr, SpaceId};
use gms_transport::Transport;
use gms_transport::client::{Client, ClientEvent};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CpuSet, sched_getaffinity};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;

use self::detach::Homecoming;
use self::halt::Halt;
pub(crate) use self::hand_over::EvictRecord;
use self::heir::Heirs;
use self::look::{Refusal, Sharing};
use self::presence::Presence;
pub use self::reconcile::reconcile;
use self::room::Fullness;
use self::schedule::give_way;
use self::write_back::WriteBack;
use crate::inject::{Frozen, Outside};
use crate::kernel::pidfd::has_ended;
use crate::own_agent::OwnAgent;
use crate::page_map::PAGE;
use crate::process::{Buried, Process};
use crate::pulse::Pulse;
use crate::reminder::Reminder;
use crate::shared::{EvictCommand, Gauges, Shared};
use crate::space::Space;
use crate::speech::{self, note};
use crate::stopped::release_late;
use crate::sync::{drain, lock};
use crate::tables::{EvictOutcome, Place};
use crate::torture::{self, Point};
use crate::tree::{Root, Tree};
use crate::victims::{
    BATCH, Evicted, MovedPages, choose_victims, finish, finish_marked, move_out, next_batch,
    read_moved,
};

/// What came of an attempt to evict.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Went {
    /// So many pages have gone.
    Moved(u64),
    /// None, but what is shared since a fork can go next.
    Shared,
    /// None, and those are not chosen again soon.
    Refused,
    /// There is nothing to be chosen.
    Nowhere,
}

/// A forked child is looked for after this.
const MET_AFTER: Duration = Duration::from_millis(1);
/// Longest wait for anything to do.
const WAIT_MAX: Duration = Duration::from_secs(1);
/// If nothing can be evicted for so long, the workload may exceed its budget, and its user is told so.
const STUCK: Duration = Duration::from_millis(50);
/// The same if there only is no place for evicted pages until agents answer.
const STUCK_WRITING: Duration = Duration::from_secs(1);
/// How often it may be asked, when nothing else can be evicted, whether removals are over: running threads are stopped for it.
const PROOF_EVERY: Duration = Duration::from_millis(20);
/// For faults to be served, or markers to be left, while threads are stopped that left no moment for it. If they are not, it is tried again after the
/// pause.
const CALM_AFTER: Duration = Duration::from_millis(3);
const CALM_MAX: Duration = Duration::from_millis(10);
const CALM_PAUSE: Duration = Duration::from_millis(100);
/// For changes of an address space that began while pages were moved out to be told.
const MARK_DEADLINE: Duration = Duration::from_secs(15);

/// An agent that is woken runs at once (its slice is shorter), and the evict thread where programs run.
const EVICT_SLICE: Duration = Duration::from_micros(400);

/// Chunks of the page map let go at once: 0.1 ms at most.
const BURY_CHUNKS: usize = 8;

/// See the module's documentation.
pub struct EvictThread<T> {
    shared: Arc<Shared>,
    commands: Receiver<EvictCommand>,
    write_back: WriteBack<T>,
    /// The agent of the session's own, until it has ended.
    own: Option<(AgentId, Arc<OwnAgent>)>,
    tree: Tree,
    /// Whether the budget has been met once.
    settled: bool,
    processes: BTreeMap<i32, Process>,
    pub(crate) spaces: BTreeMap<SpaceId, Arc<Space>>,
    /// Spaces that have ended, of which the fault thread may still have read a fork.
    leaving: BTreeMap<SpaceId, Arc<Space>>,
    /// Those that were dropped, and may be named in what this pager leaves if it dies.
    former: Vec<Arc<Space>>,
    orphans: Vec<Arc<Space>>,
    /// Spaces in which threads are to be stopped for a moment.
    restless: BTreeSet<SpaceId>,
    /// Evictors of address spaces that have gone, see [`Process::bury`].
    ending: Vec<Buried>,
    refused: BTreeMap<i32, Refusal>,
    halt: Halt,
    /// Spaces of a pager that has died, of which not all is known yet.
    heirs: Heirs,
    /// Processes that have pages in their outboxes, the latest last.
    outboxes: VecDeque<i32>,
    budget: Budget,
    home: Homecoming,
    zero_hash: u64,
    // Clockwork.
    pulse: Pulse,
    next_look: Instant,
    next_tree: Instant,
    next_all: Instant,
    next_measure: Instant,
    next_status: Instant,
    next_proof: Instant,
    /// Since when another binary is to go on.
    handing_since: Option<Instant>,
    /// When it may be written down again what another pager needs if this one dies.
    next_estate: Instant,
    /// How many agents are named there.
    agents_told: usize,
    /// When eviction, tried in vain until then, counts as stuck.
    stuck_at: Option<Instant>,
    goal: u64,
    full: Fullness,
    /// Faults woken because there is room for them, since the last look: they have not taken it yet.
    granted: u64,
    /// Where the thread may run, and the CPU which it leaves to the faults.
    allowed: CpuSet,
    avoided: i32,
    nice: libc::c_int,
    /// For how many looks nothing has grown but by faults, which are counted as they come.
    calm: u32,
    sharing: Sharing,
    unpageable: BTreeMap<i32, u64>,
    warned: bool,
    /// Why processes could not be attached, as far as it has been told.
    unpaged: BTreeSet<String>,
    presence: Presence,
    /// Of the keys for the agents, if they are anybody's.
    pub(crate) reminder: Option<Reminder>,
    gauges: Gauges,
}

impl<T: Transport> EvictThread<T> {
    /// A thread's state; [`EvictThread::run`] runs it.
    pub fn new(
        shared: Arc<Shared>,
        commands: Receiver<EvictCommand>,
        agents: Client<T>,
        root: Root,
        gauges: Gauges,
    ) -> EvictThread<T> {
        let now = Instant::now();
        let budget = Budget::new(Bytes(shared.config.budget_bytes));
        let zero_hash = shared.checksum(&[0; PAGE as usize]);
        EvictThread {
            commands,
            write_back: WriteBack::new(now, shared.clone(), agents),
            own: None,
            settled: !matches!(root, Root::Process(_)),
            tree: Tree::new(root),
            processes: BTreeMap::new(),
            spaces: BTreeMap::new(),
            leaving: BTreeMap::new(),
            former: Vec::new(),
            orphans: Vec::new(),
            restless: BTreeSet::new(),
            ending: Vec::new(),
            refused: BTreeMap::new(),
            halt: Halt::default(),
            heirs: Heirs::default(),
            outboxes: VecDeque::new(),
            budget,
            home: Homecoming::new(now, shared.config.redundancy.shape().is_some()),
            zero_hash,
            pulse: Pulse::new(now),
            next_look: now,
            next_tree: now,
            next_all: now,
            next_measure: now,
            next_status: now,
            next_proof: now,
            handing_since: None,
            next_estate: now,
            agents_told: 0,
            stuck_at: None,
            goal: 0,
            full: Fullness::default(),
            granted: 0,
            allowed: sched_getaffinity(Pid::from_raw(0)).unwrap_or_default(),
            avoided: -1,
            nice: 0,
            calm: 0,
            sharing: Sharing { sum: 0, shared: 0, earliest: now, expires: now },
            unpageable: BTreeMap::new(),
            warned: false,
            unpaged: BTreeSet::new(),
            presence: Presence::default(),
            reminder: None,
            gauges,
            shared,
        }
    }

    /// Misses the session's own agent as soon as it has ended.
    pub(crate) fn watch(&mut self, own: Option<(AgentId, Arc<OwnAgent>)>) {
        self.own = own;
    }

    /// Works until the session stops.
    pub fn run(mut self) {
        self.heirs.begin(&self.shared.journal);
        self.shared.evict_thread.store(nix::unistd::gettid().as_raw(), Ordering::Relaxed);
        speech::begin();
        gms_agent::spin::prefer_latency(EVICT_SLICE);
        let mut packets = true;
        while !self.shared.stop.load(Ordering::Relaxed) {
            let now = Instant::now();
            self.excuse(now);
            self.hand_over(now);
            self.leave(now);
            if self.shared.is_let_go() {
                self.idle(now);
                continue;
            }
            self.be_nice(now);
            let mut busy = self.obey(now);
            busy |= packets && self.network(now);
            if now >= self.next_look {
                self.look_counted(now);
            } else if self.goal == 0 && self.shared.is_high() {
                let resident = self.shared.resident.load(Ordering::Relaxed).max(0) as u64;
                self.goal = self.budget.decide(Bytes(resident)).evict.0;
            }
            if self.halt.is_on() {
                busy |= self.hold_back(now);
            }
            self.calm(now);
            torture::raise_goal(&mut self.goal, self.shared.faults.load(Ordering::Relaxed));
            busy |= self.work(now);
            self.make_room(now);
            let late = release_late();
            busy |= self.tidy_tables();
            // On its way home a page in the buffer is at its end.
            busy |= self.write_back.turn(now, self.may_put());
            self.write_back.agents.expire(now);
            self.write_back.agents.send_unsent(now);
            busy |= self.handle_events(now);
            if let Err(error) = self.write_back.agents.flush(now) {
                self.shared.fail(format!("sending to the agents failed: {error}"));
            }
            packets = busy || self.wait(late);
        }
        self.end();
    }

    /// What this thread is for just now. True if anything has come of it.
    fn work(&mut self, now: Instant) -> bool {
        if self.shared.has_failed() {
            self.kill_members();
        } else if !self.heirs.is_empty() {
            return self.inherit(now);
        } else if self.is_detaching() {
            return self.bring_home(now);
        } else if self.goal > 0 {
            self.make_way();
            let went = self.evict(now);
            let none = matches!(went, Went::Nowhere | Went::Refused);
            if (none && now >= self.next_proof) || torture::one_in(256) {
                self.end_quarantines(now);
            }
            return went != Went::Nowhere;
        }
        false
    }

    /// Nobody is blamed for the time in which this process was stopped.
    fn excuse(&mut self, now: Instant) {
        let missed = self.pulse.beat(now, WAIT_MAX);
        if !missed.is_zero() {
            self.write_back.excuse(now, missed);
            self.home.excuse(missed);
            self.heirs.excuse(missed);
            self.full.excuse(missed);
            self.presence.excuse(now, missed);
            self.stuck_at = self.stuck_at.map(|at| at + missed);
        }
    }

    /// True if there is more to be done.
    fn tidy_tables(&self) -> bool {
        let mut tables = lock(&self.shared.tables);
        // Then nobody is served any more.
        if let Some(full) = tables.exhausted.filter(|_| !self.is_detaching()) {
            self.shared.fail(full.to_string());
        }
        tables.bury(BURY_CHUNKS)
    }

    /// A look, and what it costs.
    fn look_counted(&mut self, now: Instant) {
        let before = thread_cpu();
        self.miss_own();
        self.look(now);
        self.gauges.looks += 1;
        self.gauges.looks_cpu += thread_cpu().saturating_sub(before);
    }

    /// Waits for the next look, a kick, or packets (or that the transport's timers are due): true if for those. Not longer than it takes
    /// until threads that stop late are to be looked at.
    fn wait(&mut self, late: Option<Duration>) -> bool {
        let now = Instant::now();
        let deadline =
            self.write_back.agents.deadline().unwrap_or(self.next_look).min(self.next_look);
        let deadline = self.write_back.shortage_left().1.map_or(deadline, |due| due.min(deadline));
        let limit = deadline.saturating_duration_since(now).min(late.unwrap_or(Duration::MAX));
        let (kicks, agents) = (self.shared.evict_kicks().as_fd(), self.write_back.agents.fd());
        let own = self.own.as_ref().map_or(kicks, |(_, own)| own.ended());
        let mut fds = [kicks, agents, own].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let millis = limit.min(WAIT_MAX).as_micros().div_ceil(1000) as u16;
        // An interrupted or failed poll only means to look sooner.
        let _ = poll(&mut fds[..2 + usize::from(self.own.is_some())], PollTimeout::from(millis));
        let [kicked, received, ended] = fds.map(|fd| fd.any().unwrap_or(true));
        if kicked {
            drain(self.shared.evict_kicks());
        }
        if ended {
            self.miss_own();
        }
        received
            || self.write_back.agents.deadline().is_some_and(|deadline| deadline <= Instant::now())
    }

    fn miss_own(&mut self) {
        if let Some((agent, own)) = self.own.take_if(|(_, own)| has_ended(own.ended())) {
            let name = self.write_back.agents.lane().name(agent);
            self.shared.agent_ended(agent, &format!("agent {name}: its {own} has ended"));
        }
    }

    fn network(&mut self, now: Instant) -> bool {
        let busy = self.write_back.agents.drive(now).unwrap_or_else(|error| {
            self.shared.fail(format!("receiving from the agents failed: {error}"));
            false
        });
        self.handle_events(now) || busy
    }

    /// True if there were any but of write-back.
    fn handle_events(&mut self, now: Instant) -> bool {
        let mut busy = false;
        while let Some(event) = self.write_back.poll(now) {
            busy = true;
            self.handle(now, event);
        }
        busy
    }

    /// What is fetched is on its way home: see [`detach`].
    fn handle(&mut self, now: Instant, event: ClientEvent) {
        let lane = self.write_back.agents.lane();
        match event {
            ClientEvent::Arrived { get, pages, bytes } => self.arrived(get, pages, &bytes),
            ClientEvent::Wrong { get, page } => self.wrong(get, page),
            ClientEvent::Failed { get, pages, failure } => self.missed(get, pages, failure),
            ClientEvent::Ended { get } => self.ended(now, get),
            // Nobody waited for the embedded agent; of others one was up before the command was started.
            ClientEvent::Down { agent, reason }
                if self.shared.config.is_embedded()
                    && !lane.has_been_up(agent)
                    && !self.is_detaching() =>
            {
                self.shared.fail(format!("agent {}: {reason}", lane.name(agent)));
            }
            ClientEvent::Down { .. } => self.tell_presence(now),
            ClientEvent::Up { agent, .. } => {
                self.tell_presence(now);
                self.is_back(agent);
            }
            ClientEvent::Answered { .. }
            | ClientEvent::Members { .. }
            | ClientEvent::Stored { .. } => {}
        }
    }

    fn obey(&mut self, now: Instant) -> bool {
        let mut busy = false;
        while let Ok(command) = self.commands.try_recv() {
            match command {
                EvictCommand::Forked(space) => {
                    busy = true;
                    self.spaces.insert(space.id, space.clone());
                    self.orphans.push(space);
                    self.shared.estate.extend();
                    // It may live for a short time only.
                    self.next_tree = now;
                    self.next_look = self.next_look.min(now + MET_AFTER);
                }
                EvictCommand::Dropped(id) => {
                    let gone = self.leaving.remove(&id);
                    // Where nothing is left to another pager nothing names it.
                    self.former.extend(gone.filter(|_| self.shared.estate.may_name()));
                }
                EvictCommand::Restless(id) => drop(self.restless.insert(id)),
            }
        }
        busy
    }

    /// Stops threads for a moment that leave none to those who wait for pages.
    fn calm(&mut self, now: Instant) {
        let restless = |space: &Space| space.restless.load(Ordering::Relaxed);
        let (spaces, processes) = (&self.spaces, &mut self.processes);
        let next_look = &mut self.next_look;
        self.restless.retain(|id| {
            let Some(space) = spaces.get(id).filter(|space| restless(space)) else { return false };
            let process = processes.get_mut(&space.pid.load(Ordering::Relaxed));
            let Some(process) = process.filter(|process| process.calm_at <= now) else {
                return true;
            };
            let mut pause = CALM_MAX;
            if let Some(mut frozen) = Frozen::restless(process.pid) {
                // Who was asleep until it was read of its change stops after it.
                while restless(space)
                    && frozen.elapsed() < CALM_MAX
                    && frozen.stop_restless().is_ok()
                {
                    std::thread::yield_now();
                }
                pause = CALM_PAUSE;
            }
            if !restless(space) {
                return false;
            }
            process.calm_at = Instant::now() + pause;
            *next_look = (*next_look).min(process.calm_at);
            true
        });
    }

    /// Waits until all forks that have been read of are told of, false if one of them is not applied yet. The first of a chain of forks is told of before
    /// the next is read.
    pub(crate) fn await_forks(&mut self, now: Instant) -> bool {
        self.obey(now);
        let applied = |space: &Arc<Space>| {
            let _gate = lock(&space.gate);
            space.ungated.is_intact()
        };
        let all =
            self.spaces.values().chain(self.leaving.values()).map(applied).fold(true, |a, b| a & b);
        self.obey(now);
        all
    }

    pub(super) fn is_detaching(&self) -> bool {
        self.shared.detaching.load(Ordering::Relaxed)
    }

    // ---- evicting

    /// Evicts one batch from the process with the most resident memory.
    fn evict(&mut self, now: Instant) -> Went {
        let room = lock(&self.shared.tables).free_slots();
        if room < BATCH {
            // Who may grow does so at once where too few agents answer, and need not be told that they are full.
            let grows = self.shared.config.when_full == WhenFull::Grow;
            let is_full = self.write_back.agents_are_full();
            let limit = match is_full || grows && self.write_back.too_few_answer() {
                true => STUCK,
                false => STUCK_WRITING,
            };
            self.stuck_at.get_or_insert(now + limit);
            return Went::Nowhere;
        }
        let mut by_size: Vec<(u64, i32)> =
            self.processes.values().map(|p| (p.size.resident, p.pid)).collect();
        by_size.sort_unstable_by(|a, b| b.cmp(a));
        torture::shuffle(&mut by_size);
        let mut went = Went::Nowhere;
        for (_, pid) in by_size {
            match self.evict_batch(pid, now).unwrap_or(Went::Nowhere) {
                Went::Nowhere => {}
                // Smaller ones do not wait for that.
                Went::Refused => went = Went::Refused,
                Went::Shared => return Went::Shared,
                Went::Moved(pages) => {
                    self.halt.note_evicted();
                    self.stuck_at = None;
                    self.goal = self.goal.saturating_sub(pages * PAGE);
                    return Went::Moved(pages);
                }
            }
        }
        self.stuck_at.get_or_insert(now + STUCK);
        went
    }

    /// Nothing can be evicted: perhaps because pages are in quarantine although their removals are over.
    fn end_quarantines(&mut self, now: Instant) {
        self.next_proof = now + PROOF_EVERY;
        let is_aged =
            |process: &&Process| lock(&self.shared.tables).age_quarantine(process.space.id);
        let aged: Vec<SpaceId> =
            self.processes.values().filter(is_aged).map(|process| process.space.id).collect();
        if aged.is_empty() {
            return;
        }
        self.tree.refresh(&self.evictors(), true);
        for process in self.processes.values().filter(|process| aged.contains(&process.space.id)) {
            if self.are_outside_madvise(process, &mut Outside::default()) {
                lock(&self.shared.tables).end_quarantine(process.space.id);
            }
        }
    }

    /// Moves up to [`BATCH`] pages of a process out.
    fn evict_batch(&mut self, pid: i32, now: Instant) -> Option<Went> {
        let random = self.write_back.next_random();
        self.clear_old_outbox(pid);
        let process = self.processes.get_mut(&pid)?;
        if process.sweep.victims.is_empty() {
            choose_victims(&self.shared, process, random);
        }
        let pages = next_batch(&self.shared, &mut process.sweep.victims);
        give_way(self.nice);
        let (leaving, moved) = move_out(&self.shared, process, &pages)?;
        torture::at(Point::BeforeOutboxRead);
        let outcomes = read_moved(&self.shared, process, &leaving, &moved, self.zero_hash)?;
        let MovedPages { shared, refused, .. } = moved;
        let leaving = leaving.into_iter().map(|(_, slot)| slot).zip(outcomes).collect();
        torture::at(Point::BeforeEvictionIsNoted);
        let moved = self.finish(leaving, now);
        self.shared.count_resident(-(moved as i64));
        give_way(self.nice);
        if !shared.is_empty() {
            // Now that they are no longer marked, so that a fault on them is served.
            self.unshare(pid, &shared);
        }
        Some(match moved {
            1.. => Went::Moved(moved),
            0 if !shared.is_empty() => Went::Shared,
            0 if refused > 0 => Went::Refused,
            0 => Went::Nowhere,
        })
    }

    /// Sees pages through their leaving; returns how many have gone. Changes of the address space that came in between are told meanwhile.
    fn finish(&mut self, mut leaving: Vec<(u32, EvictOutcome)>, now: Instant) -> u64 {
        let mut wake: Vec<Place> = Vec::new();
        let mut moved = finish_marked(&self.shared, &mut leaving, &mut wake);
        let (mut pulse, mut deadline) = (Pulse::new(now), now + MARK_DEADLINE);
        let (mut still, mut calm_at) = (Vec::new(), now + CALM_AFTER);
        loop {
            leaving.retain(|&(slot, outcome)| {
                let spaces = &self.spaces;
                let ended = finish(&self.shared, spaces, slot, outcome, self.zero_hash, &mut wake);
                moved += u64::from(ended.is_some_and(|ended| ended != EvictOutcome::Stayed));
                ended.is_none()
            });
            self.wake(&std::mem::take(&mut wake));
            let ended = self.shared.stop.load(Ordering::Relaxed) || self.shared.has_failed();
            if leaving.is_empty() || ended {
                break;
            }
            deadline += pulse.beat(Instant::now(), Duration::ZERO);
            if Instant::now() > deadline {
                self.shared.fail("a change of the workload's address space does not end");
                break;
            }
            if Instant::now() > calm_at {
                // Whoever changes that memory without pause. Those are let go again before the next attempt.
                still = match still.is_empty() {
                    true => self.restless_owners(&leaving),
                    false => Vec::new(),
                };
                calm_at = Instant::now() + if still.is_empty() { CALM_PAUSE } else { CALM_MAX };
            }
            still.retain_mut(|frozen: &mut Frozen| frozen.stop_restless().is_ok());
            // Who is to tell of the change may wait for room.
            self.stuck_at.get_or_insert(now + STUCK);
            self.make_room(Instant::now());
            std::thread::yield_now();
            self.obey(now);
        }
        let full = lock(&self.shared.tables).exhausted;
        if let Some(full) = full {
            self.shared.fail(full.to_string());
        }
        moved
    }

    /// Those who change the memory in which markers are to be left, stopped.
    fn restless_owners(&self, leaving: &[(u32, EvictOutcome)]) -> Vec<Frozen> {
        let tables = lock(&self.shared.tables);
        let unmarked = leaving.iter().flat_map(|(slot, _)| tables.unmarked(*slot));
        let owners: BTreeSet<SpaceId> = unmarked.map(|place| place.0).collect();
        drop(tables);
        let pid = |id: &SpaceId| self.spaces.get(id).map(|s| s.pid.load(Ordering::Relaxed));
        let pids = owners.iter().filter_map(pid).filter(|pid| self.processes.contains_key(pid));
        pids.filter_map(Frozen::restless).collect()
    }

    fn unshare(&mut self, pid: i32, pages: &[PageAddr]) {
        torture::at(Point::BeforeUnshare);
        let Some(process) = self.processes.get_mut(&pid) else { return };
        if let Err(errno) = process.unshare(pages)
            && !process.has_ended()
            && !process.ends()
        {
            self.shared.fail(process.unanswered(errno));
        }
    }

    /// Tells the user, who may have asked not to be told.
    fn notice(&self, text: std::fmt::Arguments<'_>) {
        if !self.shared.config.quiet {
            note(text);
        }
    }
}

/// CPU time of this thread so far.
fn thread_cpu() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from).unwrap_or_default()
}
