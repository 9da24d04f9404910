//! One run: rounds in which the program works while something goes wrong, each followed by the time in which copies are restored.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use gms_pager::sync::lock;
use gms_policy::ids::AgentId;
use gms_policy::redundancy::{AgentSet, Copies, Redundancy, Shortage};
use gms_policy::stripes::{PARTS_MORE_MAX, PARTS_PERCENT_MAX, Shape};
use gms_tests::Dice;
use gms_transport::client::AgentAddress;
use gms_transport::sim::{Conditions, Net};

use crate::agents::SimAgent;
use crate::kernel::PAGES;
use crate::machine::{Death, Handle, MOMENTS, Machine, PROCESSES_MAX};
use crate::owner::{Owner, REFUSED, address, draw_fault_threads};
use crate::program::{Program, STEPS};
use crate::troubles::{Loss, Trouble, draw_hiccups, draw_loss, draw_redundancy, draw_restart};
use crate::workers;

/// A thread that has not come on after this, when nothing is wrong any more, hangs.
const PATIENCE: Duration = Duration::from_secs(40);
/// Copies that are not there after this, when nothing is wrong any more, are never made.
const RESTORED_AFTER: Duration = Duration::from_secs(60);
/// Timers of the pager are looked at this often.
const TICK: Duration = Duration::from_millis(10);
/// Names the dice that draw how many fault threads there are, and what workers do.
const WORKERS_DICE: usize = 100;
/// Names the dice that draw when the pager dies: in so many of its calls on average, if it does.
const DEATHS_DICE: usize = 101;
const LIFE: u64 = 4000;
/// Names the dice that draw when a process forks or ends.
const FORKS_DICE: usize = 102;
/// Names the dice that draw to whom signals come.
const SIGNALS_DICE: usize = 103;
/// For another pager to begin.
const SUCCESSION: Duration = Duration::from_millis(20);
/// A run has some 10,000 steps.
const STEPS_MAX: u64 = 2_000_000;
/// Rounds of a run at most.
const ROUNDS_MAX: u64 = 3;
/// An agent for all pages, with what it has not heard yet that it may forget.
const FRAMES: u64 = 320;
/// A loss that would break the promise is put off by this.
const PUT_OFF: Duration = Duration::from_millis(50);
/// How long a slow agent rests between two turns.
const SLOW_PACE: Duration = Duration::from_millis(60);

/// See the module's documentation.
pub(crate) struct World {
    dice: Dice,
    now: Instant,
    net: Net,
    conditions: Conditions,
    pub handle: Handle,
    pub owner: Owner,
    agents: Vec<SimAgent>,
    redundancy: Redundancy,
    /// Agents have room for one copy of each page, perhaps not for two.
    tight: bool,
    /// Requests come twice: what has been forgotten may be put once more.
    doubled: bool,
    troubles: Vec<(Instant, Trouble)>,
    /// How often a lane's links to an agent are cut: each is to be mended.
    cuts: BTreeMap<(usize, usize), u32>,
    losses: Vec<(Instant, Loss)>,
    /// Agents that others stand in for, until there are enough copies again without them.
    failed: AgentSet,
    /// Those that have given wrong pages.
    liars: AgentSet,
    /// More agents are lost than parity makes good.
    beyond_parity: bool,
    /// Names of agents whose pages may be gone, where there is one copy.
    bereft: BTreeSet<String>,
    pub happened: BTreeMap<&'static str, u64>,
    /// Draws when the pager dies; without them it does not.
    pub deaths: Option<Dice>,
    start: Instant,
    pub steps: u64,
}

impl World {
    pub(crate) fn new(seed: u64) -> World {
        let mut dice = Dice::new(seed);
        let start = Instant::now();
        let doubled = dice.below(2) == 0;
        let conditions = Conditions {
            delay_us: 5..=5 + dice.below(300),
            bandwidth: 1 << (24 + dice.below(8)),
            lost_ppm: dice.below(10_000),
            twice_ppm: if doubled { dice.below(20_000) } else { 0 },
            late_ppm: dice.below(30_000),
            late: Duration::from_micros(dice.below(1_500_000)),
        };
        let mut fates = Dice::new(dice.bits());
        let net = Net::new(conditions.clone(), Box::new(move || fates.bits()));
        let count = 1 + dice.place(4);
        let redundancy = draw_redundancy(&mut dice, count);
        let tight = matches!(redundancy, Redundancy::None | Redundancy::Auto) && dice.below(3) == 0;
        // Its own dice, as those of workers: who serves a child where there are several fault threads is not simulated.
        let mut forks = Dice::of_thread(seed, FORKS_DICE);
        let may_fork = draw_fault_threads(&mut Dice::of_thread(seed, WORKERS_DICE)) == 1;
        let forks = (may_fork && forks.below(2) == 0).then_some(forks);
        let frames = if tight { (PAGES * 2 / count as u64).max(64) } else { FRAMES };
        let frames = frames * forks.as_ref().map_or(1, |_| PROCESSES_MAX as u64);
        let agent = |n: usize| {
            let mut dice = Dice::of_thread(seed, n);
            let frames = frames + dice.below(64);
            SimAgent::new(&net, start, n as u8 + 1, frames, dice)
        };
        let agents: Vec<SimAgent> = (0..count).map(agent).collect();
        let named = |agent: &SimAgent| AgentAddress::new(agent.addr.to_string(), agent.addr);
        let addresses: Vec<AgentAddress> = agents.iter().map(named).collect();
        let program = Program::new(start, Dice::new(dice.bits()));
        let handle = Handle::new(Machine::new(program, Dice::new(dice.bits())));
        let budget = 16 + dice.below(48);
        let given = (&addresses[..], redundancy);
        // Its own dice, so that a pager of one fault thread leaves a seed what it was.
        let mut workers = Dice::of_thread(seed, WORKERS_DICE);
        let owner = Owner::new(&net, start, given, handle.clone(), budget, &mut dice, &mut workers);
        handle.lock().tasks[0].program.forks = forks;
        let mut signals = Dice::of_thread(seed, SIGNALS_DICE);
        if signals.below(2) == 0 {
            handle.lock().have_signals(signals);
        }
        World {
            dice,
            now: start,
            net,
            conditions,
            handle,
            owner,
            agents,
            redundancy,
            tight,
            doubled,
            troubles: Vec::new(),
            cuts: BTreeMap::new(),
            losses: Vec::new(),
            failed: AgentSet::EMPTY,
            liars: AgentSet::EMPTY,
            beyond_parity: false,
            bereft: BTreeSet::new(),
            happened: WHAT.into_iter().map(|what| (what, 0)).collect(),
            // Stripes are not adopted yet.
            deaths: redundancy.shape().is_none().then(|| Dice::of_thread(seed, DEATHS_DICE)),
            start,
            steps: 0,
        }
    }

    /// Until the program has ended, or was ended for want of what an agent has lost, or in doubt.
    pub(crate) fn run(&mut self) {
        let runs = self.run_rounds();
        if self.beyond_parity {
            return *self.happened.entry(BEYOND).or_default() += u64::from(!runs);
        }
        if runs && self.converge() {
            return self.leave();
        }
        let reason = self.owner.killed().expect("why it was ended");
        let end = end_of(&reason);
        let lost = self.bereft.iter().any(|agent| reason.contains(agent));
        assert!(
            lost || end != End::OfAgent,
            "the workload was ended for nothing after {:?}: {reason}; {}",
            self.now - self.start,
            self.stand()
        );
    }

    /// False if the workload was ended.
    fn run_rounds(&mut self) -> bool {
        let rounds = 1 + self.dice.below(ROUNDS_MAX);
        for _ in 0..rounds {
            self.plan();
            self.handle.lock().run(STEPS / rounds as usize);
            if !self.pass(|world| world.handle.lock().is_over()) {
                return false;
            }
            if self.beyond_parity {
                return true;
            }
            self.handle.lock().amble();
            if !self.pass(World::is_calm) || !self.restore() {
                return false;
            }
        }
        true
    }

    /// Draws what goes wrong in the next round.
    fn plan(&mut self) {
        self.net.set_conditions(self.conditions.clone());
        self.let_die();
        let (count, lanes) = (self.agents.len(), self.owner.lanes());
        for (after, trouble) in draw_hiccups(&mut self.dice, count, lanes) {
            self.schedule(after, trouble);
        }
        let fit: Vec<usize> = self.fit().agents().map(|agent| usize::from(agent.0)).collect();
        if let Some(shape) = self.redundancy.shape() {
            return self.plan_of_stripes(shape, fit);
        }
        let copies = self.copies().min(fit.len());
        // What is to have one copy is lost with its agent: that is not what most runs are about.
        let losses = match copies {
            1 if self.copies() == 1 => usize::from(self.dice.below(4) == 0),
            0 | 1 => 0,
            _ if self.tight => 0,
            copies => self.dice.place(copies + 1).min(copies - 1),
        };
        let mut victims = fit.clone();
        self.dice.shuffle(&mut victims);
        for agent in victims.into_iter().take(losses) {
            let loss = draw_loss(&mut self.dice, agent, lanes, fit.len() > losses);
            self.losses.push((self.now + loss.after, loss));
        }
    }

    /// Of so many agents that the others take stripes still; now and then of more than parity makes good.
    fn plan_of_stripes(&mut self, shape: Shape, mut victims: Vec<usize>) {
        let (lanes, fit) = (self.owner.lanes(), victims.len());
        self.dice.shuffle(&mut victims);
        self.beyond_parity = fit == self.agents.len() && self.dice.below(8) == 0;
        let most = shape.parity().min(fit.saturating_sub(shape.parity() + 1));
        let losses = match self.beyond_parity {
            true => shape.parity() + 1,
            false => self.dice.place(shape.parity() + 2).min(most),
        };
        for agent in victims.into_iter().take(losses) {
            let loss = match self.beyond_parity {
                true => draw_restart(&mut self.dice, agent),
                false => draw_loss(&mut self.dice, agent, lanes, true),
            };
            self.losses.push((self.now + loss.after, loss));
        }
    }

    fn schedule(&mut self, after: Duration, trouble: Trouble) {
        self.troubles.push((self.now + after, trouble));
        self.troubles.sort_by_key(|trouble| trouble.0);
    }

    /// Goes on until something is so; false if the workload was ended before.
    fn pass(&mut self, until: impl Fn(&World) -> bool) -> bool {
        while self.owner.killed().is_none() {
            if until(self) {
                return true;
            }
            self.step();
            let is_calm = self.is_calm();
            let mut machine = self.handle.lock();
            if !is_calm {
                machine.excuse();
            }
            if let Some((n, moved)) = machine.laggard() {
                assert!(self.now - moved < PATIENCE, "thread {n:?} hangs: {}", machine.stand());
            }
        }
        false
    }

    /// Nothing is wrong any more that ends by itself.
    fn is_calm(&self) -> bool {
        let is_awake = |agent: &SimAgent| agent.paused_until.max(agent.slow.0) <= self.now;
        self.troubles.is_empty() && self.losses.is_empty() && self.agents.iter().all(is_awake)
    }

    /// One moment.
    fn step(&mut self) {
        self.steps += 1;
        assert!(self.steps < STEPS_MAX, "time stands still: {}", self.stand());
        let busy = {
            let machine = self.handle.lock();
            machine.is_busy()
        };
        let pace = Duration::from_micros(1 + self.dice.below(40));
        let next = self.now + if busy { pace } else { TICK };
        let trouble = self.troubles.first().map(|trouble| trouble.0);
        let due = [self.net.deadline(), Some(self.owner.deadline(self.now)), trouble];
        self.now = due.into_iter().flatten().fold(next, Instant::min).max(self.now);
        self.handle.lock().set_now(self.now);
        self.begin_losses();
        while let Some(&(_, trouble)) = self.troubles.first().filter(|t| t.0 <= self.now) {
            self.troubles.remove(0);
            self.tell(format!("{trouble:?}"));
            self.meet(trouble);
        }
        self.agents.iter_mut().for_each(|agent| agent.turn(&self.net, self.now));
        // Each of the pager's threads is late now and then.
        let turns = catch_unwind(AssertUnwindSafe(|| {
            for thread in 0..self.owner.fault_threads() {
                if self.dice.below(8) > 0 {
                    self.now = self.owner.serve(thread, self.now);
                }
            }
            if self.dice.below(4) > 0 {
                self.owner.evict(self.now, &mut self.dice);
            }
        }));
        match turns {
            Err(death) if death.is::<Death>() => self.succeed(),
            Err(panic) => resume_unwind(panic),
            Ok(()) => {}
        }
        self.handle.lock().step();
        let blamed = self.owner.shared.unsound_agents().without(self.liars);
        assert!(blamed.is_empty(), "{blamed:?} are blamed for nothing");
    }

    /// The pager has died: another takes its place.
    fn succeed(&mut self) {
        self.tell("the pager dies".into());
        *self.happened.entry(DEATHS).or_default() += 1;
        self.now += SUCCESSION;
        self.handle.watch.begin_anew();
        // Whoever waits for a page that nobody gives any more waits until a pager has lived for so long that it ends the workload.
        let mut machine = self.handle.lock();
        machine.excuse();
        machine.begin_succession();
        drop(machine);
        self.owner = self.owner.heir(&self.net, self.now, &mut self.dice);
        self.let_die();
    }

    /// Draws when the pager dies, if it does.
    fn let_die(&mut self) {
        let Some(dice) = &mut self.deaths else { return };
        let dies = (1 + dice.below(2 * LIFE), MOMENTS[dice.place(MOMENTS.len())]);
        self.handle.lock().dies = (dice.below(3) > 0).then_some(dies);
    }

    fn tell(&mut self, text: String) {
        let at = (self.now - self.start).as_secs_f64();
        self.handle.lock().story.push(format!("{at:>12.6} {text}"));
    }

    fn begin_losses(&mut self) {
        let (due, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.losses).into_iter().partition(|(at, _)| *at <= self.now);
        self.losses = later;
        for (_, loss) in due {
            if !self.is_promised(&loss) {
                // Others that have failed may be gone for good: then it fails in no other way.
                let tries = loss.tries - 1;
                let later = (self.now + PUT_OFF, Loss { tries, ..loss });
                self.losses.extend((tries > 0).then_some(later));
                continue;
            }
            self.tell(format!("{loss:?}"));
            self.failed = self.failed.union(agent_set(loss.agent));
            *self.happened.entry(kind_of(&loss.plan[0].1)).or_default() += 1;
            if self.copies() == 1 && loss.is_lost {
                self.bereft.insert(self.agents[loss.agent].addr.to_string());
            }
            loss.plan.into_iter().for_each(|(after, trouble)| self.schedule(after, trouble));
        }
    }

    /// Whether no page is lost with the agent, if the pager has done what it is to do. Where there is one copy there is no promise.
    fn is_promised(&self, loss: &Loss) -> bool {
        let failed = self.unfit().union(self.failed).union(agent_set(loss.agent));
        let is_filled = self.agents.iter().any(SimAgent::is_filled);
        self.copies() == 1
            || self.beyond_parity
            || !is_filled && !lock(&self.owner.shared.tables).rests_on(failed)
    }

    fn meet(&mut self, trouble: Trouble) {
        match trouble {
            Trouble::Cut(lane, agent) => {
                *self.cuts.entry((lane, agent)).or_default() += 1;
                self.net.cut(self.now, address(lane), self.agents[agent].addr);
            }
            Trouble::Mend(lane, agent) => {
                let cuts = self.cuts.entry((lane, agent)).or_default();
                *cuts -= 1;
                if *cuts == 0 {
                    self.net.mend(address(lane), self.agents[agent].addr);
                }
            }
            Trouble::Pause(agent, span) => self.agents[agent].paused_until = self.now + span,
            Trouble::Slow(agent, span) => self.agents[agent].slow = (self.now + span, SLOW_PACE),
            // What is written meanwhile might come to be at agents alone that have failed.
            Trouble::Fill(..) if self.copies() > 1 && self.failed != AgentSet::EMPTY => {}
            Trouble::Fill(agent, left) => self.agents[agent].fill(left),
            Trouble::Empty(agent) => self.agents[agent].empty(),
            Trouble::Lie(agent) => {
                self.liars = self.liars.union(agent_set(agent));
                self.agents[agent].lie(true);
            }
            Trouble::Honest(agent) => self.agents[agent].lie(false),
            Trouble::Crash(agent) => self.agents[agent].crash(&self.net, self.now),
            Trouble::Drain(agent, grace) => self.agents[agent].drain(self.now, grace),
            Trouble::Start(agent) if !self.agents[agent].is_up() => {
                self.agents[agent].start(&self.net, self.now);
            }
            Trouble::Start(_) => {}
        }
    }

    // ---- redundancy

    fn copies(&self) -> usize {
        self.redundancy.copies(self.agents.len()) as usize
    }

    /// Agents that cannot have copies any more.
    fn unfit(&self) -> AgentSet {
        let is_gone = |agent: &SimAgent| !agent.is_up() || agent.is_draining();
        let agents = self.agents.iter().enumerate();
        let gone: AgentSet =
            agents.filter(|(_, agent)| is_gone(agent)).map(|(n, _)| AgentId(n as u8)).collect();
        gone.union(self.owner.shared.unsound_agents())
    }

    fn fit(&self) -> AgentSet {
        let all: AgentSet = (0..self.agents.len() as u8).map(AgentId).collect();
        all.without(self.unfit())
    }

    /// Pages of which there are fewer copies than there can be.
    fn lacking(&self) -> u64 {
        let (fit, leaving, recalling) = (self.fit(), self.unfit(), AgentSet::EMPTY);
        let copies = if self.tight { 1 } else { self.copies().min(fit.len() as usize) };
        let is_whole = copies == self.copies() && leaving.is_empty();
        let (copies, sources) = (Copies::at_agents(copies as u32), fit.union(leaving));
        let shortage = Shortage { copies, leaving, recalling, sources };
        let tables = lock(&self.owner.shared.tables);
        // What an agent has lost by a restart lacks copies also before the pager knows of it.
        let lost = |agent: AgentId| {
            tables.held_by(agent).saturating_sub(self.agents[usize::from(agent.0)].used())
        };
        let lacking = tables.short_of(&shortage) + fit.agents().map(lost).sum::<u64>();
        drop(tables);
        lacking.max(if is_whole { self.owner.short(self.now) } else { 0 })
    }

    /// Nothing goes wrong, no message is lost: waits until each page has its copies again, and no thread waits any more for what went wrong before.
    /// False if the workload was ended.
    fn restore(&mut self) -> bool {
        self.net.set_conditions(Conditions::lan());
        let (begun, end) = (self.now, self.now + RESTORED_AFTER);
        let restored = self.pass(|world| {
            let lacking = world.lacking();
            assert!(world.now < end, "{lacking} pages lack copies: {}", world.stand());
            let laggard = world.handle.lock().laggard();
            lacking == 0 && laggard.is_none_or(|(_, moved)| moved > begun)
        });
        self.failed = AgentSet::EMPTY;
        restored
    }

    /// On a sound network: the program reads every page, then agents hold what the pager refers to, and nothing else.
    fn converge(&mut self) -> bool {
        self.handle.lock().run_last();
        let is_over = |world: &World| world.handle.lock().is_over();
        if !self.pass(is_over) || !self.restore() {
            return false;
        }
        let end = self.now + PATIENCE;
        self.pass(|world| {
            let (leaks, wasted) = (world.leaks(), world.wasted());
            assert!(world.now < end, "agents hold too much: {leaks:?}, {}", world.stand());
            leaks.is_empty() && wasted == 0
        })
    }

    /// Parts of stripes that agents hold beyond what the law allows, where there are agents for whole stripes.
    fn wasted(&self) -> u64 {
        let tables = lock(&self.owner.shared.tables);
        let fit = self.fit().len() as usize;
        let Some(shape) = self.redundancy.shape().filter(|shape| fit >= shape.parts()) else {
            return 0;
        };
        let (data, parts) = (shape.data() as u64, shape.parts() as u64);
        let dense = PARTS_PERCENT_MAX * parts * tables.remote_pages() / data / 100;
        tables.frames_taken().saturating_sub(dense + parts * (data + PARTS_MORE_MAX))
    }

    /// Agents that hold more or less than the pager refers to: how much, and what it is to be.
    fn leaks(&self) -> Vec<(usize, u64, u64)> {
        let tables = lock(&self.owner.shared.tables);
        let agents = self.agents.iter().enumerate().filter(|(_, agent)| agent.is_up());
        let held = agents.map(|(n, agent)| (n, agent.used(), tables.held_by(AgentId(n as u8))));
        held.filter(|(_, used, held)| used < held || used > held && !self.doubled).collect()
    }

    fn stand(&self) -> String {
        let tables = lock(&self.owner.shared.tables);
        let agent = |(n, agent): (usize, &SimAgent)| {
            let (held, waiting) =
                (tables.held_by(AgentId(n as u8)), tables.discards_of(AgentId(n as u8)));
            let (up, draining) = (agent.is_up(), agent.is_draining());
            format!(
                "agent {n}: up {up}, draining {draining}, {} used, {held} held, {waiting} to be discarded",
                agent.used()
            )
        };
        let agents: Vec<String> = self.agents.iter().enumerate().map(agent).collect();
        format!(
            "{}, {}; unsound: {:?}; {} slots free",
            self.redundancy,
            agents.join("; "),
            self.owner.shared.unsound_agents(),
            tables.free_slots(),
        )
    }

    /// The program has ended: no agent keeps anything of it.
    fn leave(&mut self) {
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

impl Drop for World {
    fn drop(&mut self) {
        workers::end();
    }
}

fn agent_set(agent: usize) -> AgentSet {
    AgentSet::of(AgentId(agent as u8))
}

/// What losses begin with.
const WHAT: [&str; 7] = [
    "agents that crashed",
    "agents that stopped",
    "agents cut off",
    "agents that drained",
    "agents that lied",
    BEYOND,
    DEATHS,
];

const DEATHS: &str = "pagers that died";

const BEYOND: &str = "workloads ended for more losses than parity makes good";

fn kind_of(trouble: &Trouble) -> &'static str {
    match trouble {
        Trouble::Crash(_) => WHAT[0],
        Trouble::Pause(..) => WHAT[1],
        Trouble::Drain(..) => WHAT[3],
        Trouble::Lie(_) => WHAT[4],
        _ => WHAT[2],
    }
}

/// Why a workload was ended.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum End {
    /// It could not be known in which order its memory was changed.
    InDoubt,
    /// Its pager died, and it could not be known which pages have left.
    Refused,
    /// An agent has not given a page back.
    OfAgent,
}

pub(crate) fn end_of(reason: &str) -> End {
    match reason {
        _ if reason.contains("it is not known which pages") => End::InDoubt,
        _ if reason.contains(REFUSED) => End::Refused,
        _ => End::OfAgent,
    }
}
