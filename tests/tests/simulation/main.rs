//! Simulation: the pager's tables, its clients of agents and whole agents, on a model kernel and a network in memory, in virtual time. Messages
//! are lost, late and doubled, links are cut, agents stop, slow down and restart empty, all from a seed; programs check every byte that they read.
//!
//! A seed that fails is tried again by `GMS_SIM_SEED=N cargo test --release -p gms-tests --test simulation seeds -- --nocapture`, which tells the last steps.
//! `GMS_SIM_SEEDS=N` tries so many from a random one on.

mod agents;
mod kernel;
mod machine;
mod owner;
mod program;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use gms_pager::sync::lock;
use gms_tests::Dice;
use gms_transport::client::AgentAddress;
use gms_transport::sim::{Conditions, Net};

use crate::agents::SimAgent;
use crate::kernel::PAGES;
use crate::machine::{Handle, Machine};
use crate::owner::{Owner, address};
use crate::program::Program;

/// Seeds tried unless the environment says otherwise.
const SEEDS: u64 = 1000;
/// A thread that has not come on after this, when nothing is wrong any more, hangs.
const PATIENCE: Duration = Duration::from_secs(40);
/// Timers of the pager are looked at this often.
const TICK: Duration = Duration::from_millis(10);
/// Names the dice that draw how many fault threads there are, and what workers do.
const WORKERS_DICE: usize = 100;
/// A run has some 10,000 steps.
const STEPS_MAX: u64 = 2_000_000;

/// What goes wrong, and when.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    Cut(usize, usize),
    Mend(usize, usize),
    Pause(usize, Duration),
    Crash(usize),
    Restart(usize),
}

struct World {
    dice: Dice,
    now: Instant,
    net: Net,
    handle: Handle,
    owner: Owner,
    agents: Vec<SimAgent>,
    troubles: Vec<(Instant, Trouble)>,
    /// Names of agents that have lost what they were given.
    bereft: BTreeSet<String>,
    steps: u64,
}

impl World {
    fn new(seed: u64) -> World {
        let mut dice = Dice::new(seed);
        let start = Instant::now();
        let conditions = Conditions {
            delay_us: 5..=5 + dice.below(300),
            bandwidth: 1 << (24 + dice.below(8)),
            lost_ppm: dice.below(10_000),
            twice_ppm: dice.below(20_000),
            late_ppm: dice.below(30_000),
            late: Duration::from_micros(dice.below(1_500_000)),
        };
        let mut fates = Dice::new(dice.bits());
        let net = Net::new(conditions, Box::new(move || fates.bits()));
        let count = 1 + dice.below(3) as usize;
        let frames = (PAGES * 2 / count as u64).max(64) + dice.below(64);
        let agents: Vec<SimAgent> =
            // Its own dice, so that agents of one thread leave a seed what it was.
            (0..count)
                .map(|n| {
                    let dice = Dice::of_thread(seed, n);
                    SimAgent::new(&net, start, n as u8 + 1, frames, dice)
                })
                .collect();
        let address = |agent: &SimAgent| AgentAddress::new(agent.addr.to_string(), agent.addr);
        let addresses: Vec<AgentAddress> = agents.iter().map(address).collect();
        let program = Program::new(start, Dice::new(dice.bits()));
        let handle = Handle::new(Machine::new(program, Dice::new(dice.bits())));
        let budget = 16 + dice.below(48);
        // Its own dice, so that a pager of one fault thread leaves a seed what it was.
        let mut workers = Dice::of_thread(seed, WORKERS_DICE);
        let owner =
            Owner::new(&net, start, &addresses, handle.clone(), budget, &mut dice, &mut workers);
        let mut troubles = troubles(&mut dice, start, count, 1 + owner.fault_threads());
        troubles.sort_by_key(|trouble| trouble.0);
        World {
            dice,
            now: start,
            net,
            handle,
            owner,
            agents,
            troubles,
            bereft: BTreeSet::new(),
            steps: 0,
        }
    }

    /// Until the program has ended, or was ended for want of what an agent has lost, or in doubt.
    fn run(&mut self) {
        while self.owner.killed().is_none() && !self.handle.lock().program.is_over() {
            self.step();
            let mut machine = self.handle.lock();
            if !self.troubles.is_empty() {
                machine.program.excuse();
            }
            if let Some((n, moved)) = machine.program.laggard() {
                assert!(self.now - moved < PATIENCE, "thread {n} hangs: {}", machine.stand());
            }
        }
        if let Some(reason) = self.owner.killed() {
            let end = end_of(&reason);
            let lost = self.bereft.iter().any(|agent| reason.contains(agent));
            assert!(lost || end != End::OfAgent, "the workload was ended for nothing: {reason}");
            return;
        }
        self.leave();
    }

    /// One moment.
    fn step(&mut self) {
        self.steps += 1;
        assert!(self.steps < STEPS_MAX, "time stands still: {}", self.handle.lock().stand());
        let busy = {
            let machine = self.handle.lock();
            machine.program.is_busy(&machine.kernel)
        };
        let pace = Duration::from_micros(1 + self.dice.below(40));
        let next = self.now + if busy { pace } else { TICK };
        let trouble = self.troubles.first().map(|trouble| trouble.0);
        let due = [self.net.deadline(), Some(self.owner.deadline(self.now)), trouble];
        self.now = due.into_iter().flatten().fold(next, Instant::min).max(self.now);
        self.handle.lock().program.now = self.now;
        while let Some(&(_, trouble)) = self.troubles.first().filter(|t| t.0 <= self.now) {
            self.troubles.remove(0);
            self.handle.lock().program.tell(format!("{trouble:?}"));
            self.meet(trouble);
        }
        self.agents.iter_mut().for_each(|agent| agent.turn(self.now));
        // Each of the pager's threads is late now and then.
        for thread in 0..self.owner.fault_threads() {
            if self.dice.below(8) > 0 {
                self.now = self.owner.serve(thread, self.now);
            }
        }
        if self.dice.below(4) > 0 {
            self.owner.evict(self.now, &mut self.dice);
        }
        self.handle.lock().step();
    }

    fn meet(&mut self, trouble: Trouble) {
        match trouble {
            Trouble::Cut(end, agent) => {
                self.net.cut(self.now, address(end), self.agents[agent].addr);
            }
            Trouble::Mend(end, agent) => self.net.mend(address(end), self.agents[agent].addr),
            Trouble::Pause(agent, span) => self.agents[agent].paused_until = self.now + span,
            Trouble::Crash(agent) => {
                self.bereft.insert(self.agents[agent].addr.to_string());
                self.agents[agent].crash(&self.net, self.now);
            }
            Trouble::Restart(agent) if !self.agents[agent].is_up() => {
                self.agents[agent].start(&self.net, self.now);
            }
            Trouble::Restart(_) => {}
        }
    }

    /// The program has ended: no agent keeps anything of it, now that nothing goes wrong any more.
    fn leave(&mut self) {
        self.net.set_conditions(Conditions::lan());
        self.troubles
            .retain(|(_, trouble)| matches!(trouble, Trouble::Mend(..) | Trouble::Restart(_)));
        let end = self.now + PATIENCE;
        // Agents say twice a second what they hold.
        let told = self.now + Duration::from_secs(1);
        let mut said = self.now;
        self.owner.goodbye(self.now);
        while self.now < told || self.agents.iter().any(|agent| agent.is_up() && agent.used() > 0) {
            assert!(self.now < end, "an agent keeps frames of a workload that has ended");
            self.step();
            if self.now > said + Duration::from_secs(1) {
                said = self.now;
                self.owner.goodbye(self.now);
            }
        }
    }
}

/// Why a workload was ended.
#[derive(Clone, Copy, PartialEq)]
enum End {
    /// It could not be known in which order its memory was changed.
    InDoubt,
    /// An agent has not given a page back.
    OfAgent,
}

fn end_of(reason: &str) -> End {
    match reason {
        _ if reason.contains("it is not known which pages are where") => End::InDoubt,
        _ => End::OfAgent,
    }
}

/// What goes wrong in a run, also between one of the pager's `ends` and an agent: little in most, an agent that loses all in some.
fn troubles(
    dice: &mut Dice,
    start: Instant,
    agents: usize,
    ends: usize,
) -> Vec<(Instant, Trouble)> {
    let mut troubles = Vec::new();
    for _ in 0..dice.below(5) {
        let at = start + Duration::from_micros(dice.below(400_000));
        let longest = if dice.below(4) == 0 { 6_000_000 } else { 1_000_000 };
        let span = Duration::from_micros(dice.below(longest));
        let (agent, end) = (dice.place(agents), dice.place(ends));
        match dice.below(8) {
            0 => {
                troubles.push((at, Trouble::Crash(agent)));
                troubles.push((at + span, Trouble::Restart(agent)));
            }
            1..=4 => {
                troubles.push((at, Trouble::Cut(end, agent)));
                troubles.push((at + span, Trouble::Mend(end, agent)));
            }
            _ => troubles.push((at, Trouble::Pause(agent, span))),
        }
    }
    troubles
}

/// How a seed ended.
#[derive(Debug, PartialEq)]
struct Ended {
    steps: u64,
    log: Vec<String>,
    /// What happened in it: these and how often.
    happened: [(&'static str, u64); 11],
}

/// How a seed ended, or why it failed.
fn outcome(seed: u64) -> Result<Ended, String> {
    let mut world = World::new(seed);
    let run = catch_unwind(AssertUnwindSafe(|| world.run()));
    match run {
        Ok(()) => {
            let (shared, killed) = (&world.owner.shared, world.owner.killed());
            let counters = lock(&shared.tables).counters;
            let ended = |end| u64::from(killed.as_deref().map(end_of) == Some(end));
            let ahead = shared.prefetched.load(Ordering::Relaxed);
            let machine = world.handle.lock();
            let (overtaken, interrupted) = (machine.kernel.overtaken, machine.interrupted);
            let log = machine.program.log.clone();
            let happened = [
                ("pages put", counters.pages_out),
                ("unchanged pages dropped", counters.clean_drops),
                ("zero pages dropped", counters.zero_drops),
                ("pages that came back from the buffer", counters.second_chances),
                ("pages fetched for a thread", shared.pages_in.load(Ordering::Relaxed) - ahead),
                ("pages fetched ahead", ahead),
                ("pages fetched by workers", shared.lent_faults.load(Ordering::Relaxed)),
                ("orders that could not be known", ended(End::InDoubt)),
                ("changes told before others that were made before", overtaken),
                ("calls of the pager in which something happened", interrupted),
                ("workloads ended for what an agent had lost", ended(End::OfAgent)),
            ];
            Ok(Ended { steps: world.steps, log: log.into(), happened })
        }
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or_default();
            let mut failure = format!("seed {seed}: {text}\n");
            for step in &world.handle.lock().program.log {
                let _ = writeln!(failure, "{step}");
            }
            Err(failure)
        }
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect(name))
}

#[test]
fn seeds_find_every_byte_right_and_no_thread_hangs() {
    let (first, count) = match (number("GMS_SIM_SEED"), number("GMS_SIM_SEEDS")) {
        (Some(seed), _) => (seed, 1),
        (None, Some(count)) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            (now.as_nanos() as u64, count)
        }
        (None, None) => (1, SEEDS),
    };
    let cpus = std::thread::available_parallelism().map_or(1, |n| n.get() as u64).min(count);
    let part = |cpu| {
        let seeds = (cpu..count).step_by(cpus as usize).map(|n| first.wrapping_add(n));
        seeds.map(outcome).collect::<Result<Vec<Ended>, String>>()
    };
    let parts: Vec<_> = std::thread::scope(|scope| {
        let parts: Vec<_> = (0..cpus).map(|cpu| scope.spawn(move || part(cpu))).collect();
        parts.into_iter().map(|part| part.join().expect("panics are caught")).collect()
    });
    let mut totals = BTreeMap::new();
    for part in parts {
        let ended = part.unwrap_or_else(|failure| panic!("{failure}"));
        for (name, times) in ended.into_iter().flat_map(|ended| ended.happened) {
            *totals.entry(name).or_insert(0) += times;
        }
    }
    println!("{count} seeds from {first} on: {totals:#?}");
    // A simulation in which nothing happens finds nothing.
    assert!(count < SEEDS || totals.values().all(|&times| times > 0), "{totals:#?}");
}

#[test]
fn a_seed_is_the_same_each_time() {
    for seed in 1..=20 {
        assert_eq!(outcome(seed), outcome(seed));
    }
}
