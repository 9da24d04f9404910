//! Simulation: the pager's tables, its clients of agents and whole agents, on a model kernel and a network in memory, in virtual time. Messages
//! are lost, late and doubled, links are cut, agents stop, slow down and restart empty, all from a seed; programs check every byte that they read.
//!
//! A seed that fails is tried again by `GMS_SIM_SEED=N cargo test --release -p gms-tests --test simulation seeds -- --nocapture`, which tells the last steps.
//! `GMS_SIM_SEEDS=N` tries so many from a random one on.

mod agents;
mod kernel;
mod owner;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use gms_pager::page_map::PAGE;
use gms_policy::ids::PageAddr;
use gms_tests::Dice;
use gms_transport::client::AgentAddress;
use gms_transport::sim::{Conditions, Net};

use crate::agents::SimAgent;
use crate::kernel::{FIRST_ROOM, Kernel, Page, ROOM_PAGES, ROOMS, room, zeros};
use crate::owner::Owner;

/// Seeds tried unless the environment says otherwise.
const SEEDS: u64 = 1000;
/// Threads of the program, and what each does.
const THREADS: usize = 5;
const STEPS: usize = 120;
/// Pages of the program.
const PAGES: u64 = 96;
/// A thread that has not come on after this, when nothing is wrong any more, hangs.
const PATIENCE: Duration = Duration::from_secs(40);
/// Timers of the pager are looked at this often.
const TICK: Duration = Duration::from_millis(10);
/// A run has some 10,000 steps.
const STEPS_MAX: u64 = 2_000_000;
/// Steps that a failure tells.
const TOLD: usize = 60;

/// What a thread of the program is at.
enum Act {
    Ready,
    /// It touches the page; with a number it writes that there.
    Touch(PageAddr, Option<u64>),
    /// It has a range removed.
    Remove,
    /// It has changed the address space.
    Change,
}

struct Thread {
    act: Act,
    left: usize,
}

/// What goes wrong, and when.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    Cut(u8, usize),
    Mend(u8, usize),
    Pause(usize, Duration),
    Crash(usize),
    Restart(usize),
}

struct World {
    dice: Dice,
    start: Instant,
    now: Instant,
    net: Net,
    kernel: Kernel,
    owner: Owner,
    agents: Vec<SimAgent>,
    threads: Vec<Thread>,
    /// What every page must hold that is not zeros.
    truth: BTreeMap<u64, Page>,
    troubles: Vec<(Instant, Trouble)>,
    /// Agents that have lost what they were given.
    bereft: BTreeSet<u8>,
    log: VecDeque<String>,
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
            (0..count).map(|n| SimAgent::new(&net, start, n as u8 + 1, frames)).collect();
        let address = |agent: &SimAgent| AgentAddress::new(agent.addr.to_string(), agent.addr);
        let addresses: Vec<AgentAddress> = agents.iter().map(address).collect();
        let owner = Owner::new(&net, start, &addresses, PAGES, 16 + dice.place(48));
        let mut world = World {
            troubles: troubles(&mut dice, start, count),
            dice,
            start,
            now: start,
            net,
            kernel: Kernel::default(),
            owner,
            agents,
            threads: (0..THREADS).map(|_| Thread { act: Act::Ready, left: STEPS }).collect(),
            truth: BTreeMap::new(),
            bereft: BTreeSet::new(),
            log: VecDeque::new(),
            steps: 0,
        };
        world.troubles.sort_by_key(|trouble| trouble.0);
        world
    }

    fn tell(&mut self, text: String) {
        let at = self.now - self.start;
        self.log.push_back(format!("{:>12.6} {text}", at.as_secs_f64()));
        if self.log.len() > TOLD {
            self.log.pop_front();
        }
    }

    /// Until the program has ended, or was ended for want of what an agent has lost.
    fn run(&mut self) {
        let mut moved = [self.now; THREADS];
        while self.owner.killed.is_none() && self.threads.iter().any(|thread| thread.left > 0) {
            let came_on = self.step();
            let calm = self.troubles.is_empty();
            for n in 0..THREADS {
                if came_on[n] || self.threads[n].left == 0 || !calm {
                    moved[n] = self.now;
                }
                assert!(self.now - moved[n] < PATIENCE, "thread {n} hangs");
            }
        }
        if let Some((agent, reason)) = &self.owner.killed {
            let lost = agent.is_some_and(|agent| self.bereft.contains(&agent.0));
            let doubt = self.owner.count.doubts > 0;
            assert!(
                lost || doubt,
                "the workload was ended for {agent:?}, which has lost nothing: {reason}"
            );
            return;
        }
        self.leave();
    }

    /// One moment. Returns which threads of the program came on.
    fn step(&mut self) -> [bool; THREADS] {
        self.steps += 1;
        assert!(self.steps < STEPS_MAX, "time stands still");
        let busy = (0..THREADS).any(|n| self.threads[n].left > 0 && !self.kernel.sleeps(n));
        let pace = Duration::from_micros(1 + self.dice.below(40));
        let next = self.now + if busy { pace } else { TICK };
        let due = [self.net.deadline(), self.owner.deadline(), self.troubles.first().map(|t| t.0)];
        self.now = due.into_iter().flatten().fold(next, Instant::min).max(self.now);
        while let Some(&(at, trouble)) = self.troubles.first().filter(|t| t.0 <= self.now) {
            self.troubles.remove(0);
            self.tell(format!("{trouble:?}, which was due at {:?}", at - self.start));
            self.meet(trouble);
        }
        self.agents.iter_mut().for_each(|agent| agent.turn(self.now));
        // Each of the pager's threads is late now and then.
        if self.dice.below(8) > 0 {
            self.owner.serve(self.now, &mut self.kernel, &mut self.dice);
        }
        if self.dice.below(4) > 0 {
            self.owner.evict(self.now, &mut self.kernel, &mut self.dice);
        }
        if self.dice.below(4) == 0
            && let Some(page) = self.kernel.remove_next()
        {
            self.truth.remove(&page);
        }
        if self.dice.below(3) == 0 {
            self.kernel.tell(&mut self.dice);
        }
        std::array::from_fn(|n| self.go(n))
    }

    fn meet(&mut self, trouble: Trouble) {
        let owner = |number: u8| SocketAddr::from(([10, 0, 1, number], 1));
        match trouble {
            Trouble::Cut(end, agent) => self.net.cut(self.now, owner(end), self.agents[agent].addr),
            Trouble::Mend(end, agent) => self.net.mend(owner(end), self.agents[agent].addr),
            Trouble::Pause(agent, span) => self.agents[agent].paused_until = self.now + span,
            Trouble::Crash(agent) => {
                self.bereft.insert(agent as u8);
                self.agents[agent].crash(&self.net, self.now);
            }
            Trouble::Restart(agent) if !self.agents[agent].is_up() => {
                self.agents[agent].start(&self.net, self.now);
            }
            Trouble::Restart(_) => {}
        }
    }

    // ---- the program

    /// A thread goes on, if it can: true then.
    fn go(&mut self, n: usize) -> bool {
        if self.threads[n].left == 0 || self.kernel.sleeps(n) {
            return false;
        }
        match &self.threads[n].act {
            Act::Ready => {
                self.begin(n);
                true
            }
            &Act::Touch(page, value) => self.touch(n, page, value),
            Act::Remove | Act::Change => {
                let resumed = self.dice.below(3) > 0 && self.kernel.resume(n);
                let removes = matches!(self.threads[n].act, Act::Remove);
                let over = resumed && !(removes && self.kernel.removes().is_some());
                if over {
                    self.end(n);
                }
                over
            }
        }
    }

    fn end(&mut self, n: usize) {
        self.threads[n].act = Act::Ready;
        self.threads[n].left -= 1;
    }

    fn begin(&mut self, n: usize) {
        let left = self.threads[n].left;
        let page = match left as u64 {
            // At the end each thread reads its share of all.
            left if left <= PAGES / THREADS as u64 + 1 => (left - 1) * THREADS as u64 + n as u64,
            _ => self.dice.below(PAGES),
        }
        .min(PAGES - 1);
        let ends = left as u64 <= PAGES / THREADS as u64 + 1;
        let address = PageAddr::containing(page * PAGE);
        self.threads[n].act = match self.dice.below(20) {
            0 if !ends => {
                let range = address.get()..(page + 1 + self.dice.below(8)).min(PAGES) * PAGE;
                if !self.kernel.remove(n, range.clone()) {
                    return;
                }
                self.tell(format!("thread {n} removes {range:x?}"));
                Act::Remove
            }
            1..=3 if !ends => return self.change_rooms(n),
            4..=7 if !ends => {
                let number = self.dice.place(ROOMS);
                if !self.kernel.is_mapped(number).0 {
                    return;
                }
                let page = FIRST_ROOM + number as u64 * ROOM_PAGES + self.dice.below(ROOM_PAGES);
                let value = (self.dice.below(2) == 0).then(|| self.dice.bits());
                Act::Touch(PageAddr::containing(page * PAGE), value)
            }
            8..=12 if !ends => Act::Touch(address, Some(self.dice.bits())),
            _ => Act::Touch(address, None),
        };
    }

    /// A thread maps, unmaps or moves a room in which no other thread is at work.
    fn change_rooms(&mut self, n: usize) {
        let (from, to) = (self.dice.place(ROOMS), self.dice.place(ROOMS));
        let free = |number: usize| {
            let touched = self.threads.iter().any(|thread| match thread.act {
                Act::Touch(page, _) => room(number).contains(&page.get()),
                _ => false,
            });
            !touched && !self.kernel.is_occupied(number)
        };
        if !free(from) || !free(to) {
            return;
        }
        match (self.kernel.is_mapped(from), self.kernel.is_mapped(to)) {
            ((false, _), _) => {
                self.tell(format!("thread {n} maps room {from}"));
                self.kernel.map(from);
            }
            ((true, true), (false, _)) => {
                self.tell(format!("thread {n} moves room {from} to room {to}"));
                self.kernel.remap(n, from, to);
                let mut truth = self.truth.split_off(&room(from).start);
                let mut rest = truth.split_off(&room(from).end);
                self.truth.append(&mut rest);
                let by = |address| address - room(from).start + room(to).start;
                self.truth.extend(truth.into_iter().map(|(address, page)| (by(address), page)));
            }
            _ if self.dice.below(3) == 0 => {
                self.tell(format!("thread {n} unmaps room {from}"));
                self.kernel.unmap(n, from);
                self.truth.retain(|address, _| !room(from).contains(address));
            }
            _ => return,
        }
        self.threads[n].act = Act::Change;
    }

    fn touch(&mut self, n: usize, page: PageAddr, value: Option<u64>) -> bool {
        let removed = self.kernel.removes().is_some_and(|range| range.contains(&page.get()));
        if removed {
            // What another thread removes is left alone: nobody could say what it must hold.
            return false;
        }
        let truth = self.truth.entry(page.get()).or_insert_with(zeros);
        let Some(bytes) = self.kernel.touch(n, page) else { return false };
        assert!(*bytes == *truth, "thread {n} finds wrong bytes in page {:#x}", page.get());
        if let Some(value) = value {
            let at = (value % (PAGE / 8)) as usize * 8;
            // Some pages become zeros again.
            let zero = value >> 60 == 0;
            if zero {
                bytes.fill(0);
            } else {
                bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
            truth.copy_from_slice(bytes);
        }
        self.tell(format!("thread {n} touches {:#x}, writes: {}", page.get(), value.is_some()));
        self.end(n);
        true
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

/// What goes wrong in a run: little in most, an agent that loses all in some.
fn troubles(dice: &mut Dice, start: Instant, agents: usize) -> Vec<(Instant, Trouble)> {
    let mut troubles = Vec::new();
    for _ in 0..dice.below(5) {
        let at = start + Duration::from_micros(dice.below(400_000));
        let longest = if dice.below(4) == 0 { 6_000_000 } else { 1_000_000 };
        let span = Duration::from_micros(dice.below(longest));
        let (agent, end) = (dice.place(agents), 1 + dice.below(2) as u8);
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
            let counters = world.owner.tables.counters;
            let bereaved = world.owner.killed.is_some() && world.owner.count.doubts == 0;
            let happened = [
                ("pages put", counters.pages_out),
                ("unchanged pages dropped", counters.clean_drops),
                ("zero pages dropped", counters.zero_drops),
                ("pages that came back from the buffer", counters.second_chances),
                ("pages fetched for a thread", world.owner.count.demanded),
                ("pages fetched ahead", world.owner.count.ahead),
                ("pages that came when they were no longer wanted", world.owner.count.unwanted),
                ("puts that failed", world.owner.count.failed_puts),
                ("changes told in another order than made", world.owner.count.reordered),
                ("orders that could not be known", world.owner.count.doubts),
                ("workloads ended for what an agent had lost", bereaved.into()),
            ];
            Ok(Ended { steps: world.steps, log: world.log.into(), happened })
        }
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or_default();
            let mut failure = format!("seed {seed}: {text}\n");
            for step in &world.log {
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
