//! The pager: what its threads have turn, on the model kernel and the network in memory. What the threads do besides, to measure, to wait and to find
//! what has been mapped, is written here as in pager/src/evict and pager/src/process.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gms_pager::config::SessionConfig;
use gms_pager::evict::reconcile;
use gms_pager::evict::write_back::WriteBack;
use gms_pager::fault::{Asks, FaultCore, Listen};
use gms_pager::kernel::{Event, Faults, PageTables, Registration};
use gms_pager::page_map::PAGE;
use gms_pager::shared::{Commands, EvictCommand, Outcome, Shared, Sizes};
use gms_pager::space::Space;
use gms_pager::sync::lock;
use gms_pager::victims::{
    Fates, choose_victims, finish, finish_marked, move_out, next_batch, read_moved, settle_zeros,
    take_up,
};
use gms_policy::full::WhenFull;
use gms_policy::ids::SpaceId;
use gms_policy::redundancy::Redundancy;
use gms_tests::Dice;
use gms_transport::client::{AgentAddress, Checksum, Client, Lane, Seal};
use gms_transport::message::WorkloadId;
use gms_transport::sim::{Net, Sim};

use crate::kernel::{tid, zeros};
use crate::ledger::{LANE_OF_WRITES, Ledger, Puts};
use crate::machine::{Handle, Left, Process};
use crate::workers::{self, Workers};

/// What is secret in a simulation.
const SECRET: u64 = 7;
const SIZES: Sizes = Sizes { slots: 24, room_kept: 2, put_pages: 8, own_pages: 1 };
/// Most pages moved at once.
const BATCH: u64 = 8;
/// Fault threads.
const FAULT_THREADS_MAX: usize = 3;
/// Pages that may be resident beyond the budget.
const SLACK: u64 = 6;
/// Time goes by while the fault thread works: so much for each look at the clock.
const LOOK: Duration = Duration::from_micros(1);
/// Why a pager does not go on for one that has died, as gms says it.
pub(crate) const REFUSED: &str = "pages were leaving";
const WORKLOAD: WorkloadId = WorkloadId([7; 16]);

/// Address of a lane: of the home (0), the thread that writes back or a worker.
pub(crate) fn address(number: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 1, 1 + number as u8], 1))
}

/// How many fault threads there are.
pub(crate) fn draw_fault_threads(dice: &mut Dice) -> usize {
    1 + dice.place(FAULT_THREADS_MAX)
}

/// A turn of a fault thread, which takes as long as it looks at the clock; returns when it ends.
pub(crate) fn turn(
    fault: &mut FaultCore<Sim>,
    now: Instant,
    read: impl FnOnce(&mut FaultCore<Sim>, &dyn Fn() -> Instant),
) -> Instant {
    let time = Cell::new(now);
    let clock = || time.replace(time.get() + LOOK);
    while fault.poll_listen().is_some() {}
    read(fault, &clock);
    fault.network(&clock);
    fault.turn(&clock);
    fault.drain_served();
    time.get()
}

/// What is the same in every run.
fn config(agents: &[AgentAddress]) -> SessionConfig {
    SessionConfig {
        budget_bytes: 0,
        page_shift: 12,
        fault_threads: 1,
        agents: agents.iter().map(|agent| agent.name.clone()).collect(),
        keys: None,
        seal: true,
        export_bytes: 0,
        when_full: WhenFull::Wait,
        redundancy: Redundancy::None,
        disk: None,
        trace: None,
        verbose: false,
        quiet: true,
    }
}

/// What is the same in all pagers of one workload.
#[derive(Clone)]
struct Estate {
    config: SessionConfig,
    agents: Vec<AgentAddress>,
    seal: Arc<Seal>,
    put: Puts,
    budget: u64,
}

/// See the module's documentation.
pub(crate) struct Owner {
    pub shared: Arc<Shared>,
    commands: Commands,
    fault_threads: usize,
    /// The first of them, the home of the space. The others are its workers.
    home: FaultCore<Sim>,
    /// What it listens to: each space, and its process.
    listens: BTreeMap<SpaceId, Handle>,
    write_back: WriteBack<Ledger>,
    handle: Handle,
    spaces: BTreeMap<SpaceId, Arc<Space>>,
    /// Those whose process has been met.
    processes: BTreeMap<SpaceId, Process>,
    dice: Dice,
    /// Pages that were moved, and are not noted as such yet.
    leaving: Fates,
    /// Threads that were seen to remove nothing since this pager has gone on for another one.
    outside: BTreeMap<SpaceId, BTreeSet<usize>>,
    /// Threads of which nothing but their faults told that, in this pager and those before it.
    pub told_by_faults: u64,
    /// What another pager begins with if this one dies.
    estate: Estate,
    zero_hash: u64,
    /// Pages that are to be resident, about.
    budget: u64,
    /// The workload has ended.
    is_over: bool,
}

impl Owner {
    /// A pager of a workload of which about `budget` pages are to be resident.
    pub(crate) fn new(
        net: &Net,
        now: Instant,
        (agents, redundancy): (&[AgentAddress], Redundancy),
        handle: Handle,
        budget: u64,
        dice: &mut Dice,
        workers_dice: &mut Dice,
    ) -> Owner {
        let fault_threads = draw_fault_threads(workers_dice);
        let config = SessionConfig {
            budget_bytes: budget * PAGE,
            page_shift: 12 + dice.below(2) as u8,
            fault_threads,
            redundancy,
            ..config(agents)
        };
        // Of a key that nobody foresees: the bytes that travel are others each time, what happens is not.
        let seal = Arc::new(Seal::new(WORKLOAD).expect("random numbers"));
        let (agents, put) = (agents.to_vec(), Puts::default());
        let estate = Estate { config, agents, seal, put, budget };
        let config = estate.config.clone();
        let pager = Shared::sized(config, SECRET, SIZES).expect("memory");
        let id = pager.0.new_space();
        lock(&pager.0.tables).add_space(id);
        let seeds = [dice.bits(), workers_dice.bits()];
        let mut owner = Owner::of(net, now, estate, pager, vec![(id, handle, Vec::new())], seeds);
        owner.meet(owner.space(), Dice::new(seeds[0]));
        owner
    }

    /// A pager with what another has left that has died.
    pub(crate) fn heir(&self, net: &Net, now: Instant, dice: &mut Dice) -> Owner {
        (0..self.lanes()).for_each(|lane| net.crash(now, address(lane)));
        let (handle, estate) = (self.handle.clone(), self.estate.clone());
        let map = lock(&self.shared.tables).file().try_clone().expect("a descriptor");
        let frames = self.shared.frames.file().try_clone().expect("a descriptor");
        let pager = Shared::adopted(estate.config.clone(), SECRET, SIZES, (map, frames));
        let pager = pager.expect("what it has left");
        let mut tables = lock(&pager.0.tables);
        let mut left = handle.lock().take_up(|number| tables.generation(number));
        // A child of whose birth was read, and that is not born yet, is born anew.
        let unborn: BTreeSet<usize> = left.iter().flat_map(|left| left.children()).collect();
        left.retain(|left| !unborn.contains(&left.number));
        left.iter().for_each(|left| tables.adopt_space(left.space));
        tables.end_unowned();
        let is_known = tables.are_leaving_known();
        let leaving = tables.leaving_spaces();
        drop(tables);
        let events = |left: &Left| left.told.iter().map(|told| handle.event(told)).collect();
        let spaces = left.iter().map(|left| (left.space, handle.of(left.number), events(left)));
        let seeds = [dice.bits(), dice.bits()];
        let mut heir = Owner::of(net, now, estate, pager, spaces.collect(), seeds);
        heir.told_by_faults = self.told_by_faults;
        for (id, space) in heir.spaces.clone() {
            let has_ended = heir.handle.of_space(&space).task().kernel.ended;
            if self.processes.contains_key(&id) && !has_ended {
                let dice = Dice::new(heir.dice.bits());
                heir.meet(space, dice);
            }
        }
        // As `evict/heir.rs`, `EvictThread::inherited`.
        if !is_known || leaving.iter().any(|id| !heir.processes.contains_key(id)) {
            heir.shared.fail(format!("{REFUSED}: a process was being born, or had ended"));
            return heir;
        }
        for process in heir.processes.values_mut() {
            let left = take_up(&heir.shared, process, heir.zero_hash);
            let (fates, zeros) = left.expect("what was leaving is known");
            heir.leaving.extend(fates);
            process.zeros = zeros;
        }
        // Whoever waits for a page faults again: the dead may have read of it.
        heir.handle.lock().tasks.iter_mut().for_each(|task| task.kernel.wake(&(0..u64::MAX)));
        heir
    }

    fn of(
        net: &Net,
        now: Instant,
        estate: Estate,
        (shared, commands): (Arc<Shared>, Commands),
        spaces: Vec<(SpaceId, Handle, Vec<Event>)>,
        [seed, workers_seed]: [u64; 2],
    ) -> Owner {
        let fault_threads = estate.config.fault_threads;
        let ceiling = (estate.budget + SLACK) * PAGE;
        shared.ceiling.store(ceiling as i64, Ordering::Relaxed);
        let incarnation = lock(&shared.tables).incarnation();
        let session = |agent| lock(&shared.tables).session_of(agent);
        let node = |number| net.node(address(number), 99).expect("a descriptor");
        let client = |number| {
            let lane = Lane::new(now, node(number), WORKLOAD, &estate.agents)
                .resuming(incarnation, session);
            Client::new(lane, Checksum::new(SECRET)).sealed(estate.seal.clone())
        };
        let ledger = Ledger::new(node(LANE_OF_WRITES), estate.put.clone());
        let lane = Lane::new(now, ledger, WORKLOAD, &estate.agents).resuming(incarnation, session);
        let evict_agents = Client::new(lane, Checksum::new(SECRET)).sealed(estate.seal.clone());
        let handle = spaces[0].1.clone();
        let core = |n, client| FaultCore::new(now, shared.clone(), n, client, Asks::nobody(), None);
        let mut home = core(0, client(0));
        let workers = (1..fault_threads).map(|n| core(n, client(1 + n))).collect();
        Workers::new(now, shared.clone(), workers, handle.watch.clone(), workers_seed).begin();
        let mut made = BTreeMap::new();
        for (id, handle, events) in spaces {
            let space = Arc::new(Space::new(id, Box::new(handle)));
            shared.homes.add(space.clone());
            commands.fault[0].try_iter().for_each(|command| home.handle_command(command));
            if !events.is_empty() {
                home.take_up(&space, events);
            }
            made.insert(id, space);
        }
        Owner {
            fault_threads,
            home,
            listens: BTreeMap::new(),
            write_back: WriteBack::new(now, shared.clone(), evict_agents),
            spaces: made,
            processes: BTreeMap::new(),
            dice: Dice::new(seed),
            zero_hash: shared.checksum(&zeros()),
            shared,
            commands,
            handle,
            leaving: Vec::new(),
            outside: BTreeMap::new(),
            told_by_faults: 0,
            budget: estate.budget,
            estate,
            is_over: false,
        }
    }

    /// A process is attached. It is known to have several threads from then on.
    fn meet(&mut self, space: Arc<Space>, dice: Dice) {
        let handle = self.handle.of_space(&space);
        space.pid.store(1 + handle.number as i32, Ordering::Relaxed);
        assert!(space.page_tables.set(Box::new(handle.clone())).is_ok());
        self.processes.insert(space.id, Process::new(space, handle, dice));
    }

    /// The address space of the program that was started.
    pub(crate) fn space(&self) -> Arc<Space> {
        self.spaces.values().next().expect("it does not end").clone()
    }

    /// Why the workload was ended, if it was.
    pub(crate) fn killed(&self) -> Option<String> {
        match self.shared.outcome()? {
            Outcome::Killed(reason) => Some(reason),
            other => panic!("{other:?}"),
        }
    }

    /// Pages that lack copies, as `gms status` tells.
    pub(crate) fn short(&self, now: Instant) -> u64 {
        self.write_back.short(now)
    }

    // ---- the fault threads

    /// How many there are.
    pub(crate) fn fault_threads(&self) -> usize {
        self.fault_threads
    }

    /// Endpoints of the pager: those of the fault threads, and that of the thread that writes back.
    pub(crate) fn lanes(&self) -> usize {
        self.fault_threads + 1
    }

    /// A turn of one of them, which takes as long as it looks at the clock; returns when it ends.
    pub(crate) fn serve(&mut self, thread: usize, now: Instant) -> Instant {
        if let Some(worker) = thread.checked_sub(1) {
            return workers::serve(worker, now);
        }
        self.commands.fault[0].try_iter().for_each(|command| self.home.handle_command(command));
        while let Some(listen) = self.home.poll_listen() {
            match listen {
                Listen::Begin(space) | Listen::Resume(space) => {
                    self.listens.insert(space.id, self.handle.of_space(&space));
                }
                Listen::Pause(space) | Listen::End(space) => drop(self.listens.remove(&space.id)),
            }
        }
        let listens = &self.listens;
        turn(&mut self.home, now, |home, clock| {
            for (&id, handle) in listens {
                if handle.task().kernel.is_readable() {
                    home.handle_readable(&clock, id);
                }
            }
        })
    }

    // ---- the evict thread

    /// A turn of it.
    pub(crate) fn evict(&mut self, now: Instant, dice: &mut Dice) {
        self.obey();
        self.write_back.agents.drive(now).expect("a network in memory does not fail");
        while self.write_back.poll(now).is_some() {}
        match self.is_over {
            true => self.write_back.agents.expire(now),
            false => self.page(now, dice),
        }
        self.write_back.agents.flush(now).expect("a network in memory does not fail");
    }

    /// As `EvictThread::obey`.
    fn obey(&mut self) {
        while let Ok(command) = self.commands.evict.try_recv() {
            match command {
                EvictCommand::Forked(space) => drop(self.spaces.insert(space.id, space)),
                EvictCommand::Dropped(id) => drop(self.spaces.remove(&id)),
                EvictCommand::Restless(_) => {}
            }
        }
    }

    /// Meets children, some later than others, and finds that some have ended.
    fn look(&mut self) {
        let unmet = self.spaces.values().filter(|space| !self.processes.contains_key(&space.id));
        for space in unmet.cloned().collect::<Vec<_>>() {
            let is_unmet = space.page_tables.get().is_none();
            let has_ended = self.handle.of_space(&space).task().kernel.ended;
            if is_unmet && has_ended {
                self.end(&space);
            } else if is_unmet && self.dice.below(4) == 0 {
                let dice = Dice::new(self.dice.bits());
                self.meet(space, dice);
            }
        }
        let ended = self.processes.values().filter(|process| process.handle.task().kernel.ended);
        for space in ended.map(|process| process.space.clone()).collect::<Vec<_>>() {
            self.processes.remove(&space.id);
            self.end(&space);
        }
    }

    /// As `EvictThread::drop_space`.
    fn end(&self, space: &Space) {
        self.shared.homes.end(space.id);
    }

    /// As long as the workload goes on.
    fn page(&mut self, now: Instant, dice: &mut Dice) {
        self.write_back.distrust_agents(now);
        self.look();
        self.register();
        self.inherit();
        self.finish_leaving();
        let resident = self.handle.lock().resident();
        if resident > self.budget && self.leaving.is_empty() {
            self.move_out(dice);
        }
        self.reconcile(dice);
        // What a process that has ended had.
        lock(&self.shared.tables).bury(1);
        self.write_back.turn(now, true);
        if dice.below(50) == 0 {
            self.write_back.agents.ask_status(now);
        }
        self.write_back.agents.expire(now);
        self.write_back.agents.send_unsent(now);
        while self.write_back.poll(now).is_some() {}
        let resident = self.handle.lock().resident();
        self.shared.resident.store((resident * PAGE) as i64, Ordering::Relaxed);
        self.make_room();
    }

    /// Finds out what the pager before was told when it died.
    fn inherit(&mut self) {
        for (&id, process) in &mut self.processes {
            if !process.zeros.is_empty() {
                match settle_zeros(&self.shared, process, &process.zeros) {
                    Ok(Some(fates)) => {
                        process.zeros.clear();
                        self.leaving.extend(fates);
                    }
                    Ok(None) => {}
                    Err(reason) => self.shared.fail(reason),
                }
            }
            let mut tables = lock(&self.shared.tables);
            if !process.zeros.is_empty() || !tables.is_unproved(id) {
                continue;
            }
            let (seen, faulting) = (self.outside.entry(id).or_default(), tables.faulting());
            let threads = process.handle.task().program.are_outside();
            seen.extend(
                threads.iter().filter(|(_, is_outside)| *is_outside).map(|(thread, _)| thread),
            );
            // As `Outside`: of who cannot be stopped where it faults its faults tell.
            let unseen = threads.iter().filter(|(thread, _)| !seen.contains(thread));
            let is_told = |(thread, _): &(usize, bool)| faulting.contains(&(id, tid(*thread)));
            if unseen.clone().all(is_told) {
                self.told_by_faults += unseen.count() as u64;
                let waiting = tables.prove(id);
                drop(tables);
                self.shared.wake(&self.spaces, &waiting);
            }
        }
        let tables = lock(&self.shared.tables);
        if !self.spaces.keys().any(|&id| tables.is_unproved(id)) {
            self.handle.lock().end_signals();
        }
    }

    fn make_room(&self) {
        let room = self.shared.room().saturating_sub(SIZES.room_kept);
        let places = lock(&self.shared.tables).take_roomless(room as usize);
        self.shared.wake(&self.spaces, &places);
    }

    /// Rooms that were mapped are found by looking. As `Process::register_new`.
    fn register(&mut self) {
        for process in self.processes.values_mut() {
            let (space, handle) = (process.space.clone(), process.handle.clone());
            let mappings = handle.task().kernel.mappings();
            for mapping in &mappings {
                let parts = lock(&self.shared.tables).unregistered_parts(space.id, mapping.clone());
                let _gate = lock(&space.gate);
                if parts.is_empty() || !space.ungated.is_intact() {
                    continue;
                }
                lock(&space.unrecorded).insert(mapping.clone());
                handle.register(mapping.clone());
                record(&self.shared, process, mapping, parts);
                if !handle.has_event() && space.ungated.is_intact() {
                    lock(&space.unrecorded).remove(mapping.clone());
                }
            }
            let registered = lock(&self.shared.tables).registered(space.id);
            process.sweep.ranges = Default::default();
            for mapping in mappings {
                if registered.gaps(mapping.clone()).is_empty() {
                    process.sweep.ranges.insert(mapping);
                }
            }
        }
    }

    /// As `EvictThread::evict_batch`.
    fn move_out(&mut self, dice: &mut Dice) {
        if lock(&self.shared.tables).free_slots() == 0 {
            return;
        }
        let count = self.processes.len();
        let chosen = if count > 1 { dice.place(count) } else { 0 };
        let process = self.processes.values_mut().nth(chosen).expect("the first does not end");
        if process.sweep.victims.is_empty() {
            choose_victims(&self.shared, process, dice.bits());
        }
        let mut pages = next_batch(&self.shared, &mut process.sweep.victims);
        let count = 1 + dice.below(BATCH) as usize;
        while pages.len() > count {
            process.sweep.victims.extend(pages.pop());
        }
        let Some((leaving, moved)) = move_out(&self.shared, process, &pages) else { return };
        let outcomes = read_moved(&self.shared, process, &leaving, &moved, self.zero_hash);
        let slots = leaving.into_iter().map(|(_, slot)| slot);
        self.leaving = slots.zip(outcomes.expect("the outbox can be read")).collect();
        let mut wake = Vec::new();
        finish_marked(&self.shared, &mut self.leaving, &mut wake);
        self.shared.wake(&self.spaces, &wake);
    }

    /// As `EvictThread::finish`.
    fn finish_leaving(&mut self) {
        let (mut wake, shared, zero_hash) = (Vec::new(), &self.shared, self.zero_hash);
        let spaces = &self.spaces;
        self.leaving.retain(|&(slot, outcome)| {
            finish(shared, spaces, slot, outcome, zero_hash, &mut wake).is_none()
        });
        self.shared.wake(spaces, &wake);
    }

    fn reconcile(&mut self, dice: &mut Dice) {
        for (&id, process) in &mut self.processes {
            if !process.aging && dice.below(4) == 0 {
                process.aging = lock(&self.shared.tables).age_quarantine(id);
            }
            if process.aging && process.handle.task().kernel.removes().is_none() {
                lock(&self.shared.tables).end_quarantine(id);
                process.aging = false;
            }
            let stale = lock(&self.shared.tables).take_stale(id);
            for range in stale.iter() {
                if !reconcile(&self.shared, &process.space, range.clone()) {
                    lock(&self.shared.tables).look_again(id, range);
                }
            }
        }
    }

    // ---- the end

    /// When something of it is due.
    pub(crate) fn deadline(&self, now: Instant) -> Instant {
        let others = [self.write_back.agents.deadline(), workers::deadline(now)];
        others.into_iter().flatten().fold(self.home.deadline(now), Instant::min)
    }

    /// Frees all that agents hold; from now on nothing else is asked of them.
    pub(crate) fn goodbye(&mut self, now: Instant) {
        self.is_over = true;
        self.write_back.agents.goodbye(now);
        self.write_back.agents.flush(now).expect("a network in memory does not fail");
    }
}

fn record(shared: &Shared, process: &Process, mapping: &Range<u64>, parts: Vec<Range<u64>>) {
    let marked = process.handle.marked(mapping.clone()).expect("a model does not fail");
    if process.handle.registration(mapping.clone()) == Registration::Whole {
        let mut tables = lock(&shared.tables);
        parts.into_iter().for_each(|part| tables.register(process.space.id, part, &marked));
    }
}
