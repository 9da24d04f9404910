//! Chaos: agents, each in a network namespace, are killed, stopped, cut off, drained and restarted empty under programs whose pages they have, some at
//! once, but always fewer than each page has copies, or no more than its stripe has parity, and the next ones when all has been restored.
//!
//! `tests/chaos.sh SECONDS SEED` runs longer. What happened is told on standard error.

use std::thread;
use std::time::{Duration, Instant};

use gms_tests::*;
use nix::sys::signal::Signal;

/// Seconds of each test, and what is drawn, unless the environment says otherwise.
const SECONDS: u64 = 12;
const SEED: u64 = 12;
/// Longest time for which an agent is stopped or cut off, but for [`LONG`].
const SHORT_MS: u64 = 3000;
/// An agent that has been away for 10 s is not expected back, and a page that nobody gives for 15 s is lost.
const LONG: Duration = Duration::from_secs(20);
/// Where a page has a copy that can be reached, nobody waits as long as for a link to be given up: 5 s.
const STALL_MAX: Duration = Duration::from_secs(4);
/// For what comes before and after.
const AROUND: Duration = Duration::from_secs(300);
/// Longer than an agent may live: one that waits for it has not been left by its workload, and fails the test.
const GRACE: [&str; 2] = ["--drain", "3600"];

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().expect(name))
}

/// An agent, and the network that leads to it.
struct Host {
    namespace: Namespace,
    agent: Option<AgentProc>,
    address: String,
}

impl Host {
    fn new(index: u8, limit: Duration) -> Host {
        let namespace = Namespace::new(index);
        let agent = start_agent(&namespace, limit);
        Host { address: agent.addr(), namespace, agent: Some(agent) }
    }

    fn agent(&self) -> &AgentProc {
        self.agent.as_ref().expect("an agent that runs")
    }
}

fn start_agent(namespace: &Namespace, limit: Duration) -> AgentProc {
    AgentSetup::new(Mib(256)).inside(namespace).args(GRACE).limit(limit).start()
}

/// How an agent fails.
#[derive(Clone, Copy, Debug)]
enum Failure {
    /// Killed, and restarted with nothing.
    Kill,
    Stop(Duration),
    Cut(Duration),
    /// Asked to end, and replaced.
    Drain,
}

impl Failure {
    fn draw(dice: &mut Dice, left: Duration) -> Failure {
        let short = Duration::from_millis(dice.below(SHORT_MS));
        let away = if left > 2 * LONG && dice.below(4) == 0 { LONG } else { short };
        match dice.below(4) {
            0 => Failure::Kill,
            1 => Failure::Stop(away),
            2 => Failure::Cut(away),
            _ => Failure::Drain,
        }
    }
}

/// What is tried, on how many agents, of which so many may fail at once.
struct Mode {
    redundancy: &'static str,
    agents: u8,
    losses: usize,
}

/// The seed chooses copies for the one test and parity for the other. With parity there is an agent more, so that stripes can be dealt while as many as may fail have.
const ONE_FAILS: [Mode; 2] = [
    Mode { redundancy: "replica:2", agents: 3, losses: 1 },
    Mode { redundancy: "parity:2+1", agents: 4, losses: 1 },
];
const TWO_FAIL: [Mode; 2] = [
    Mode { redundancy: "replica:3", agents: 4, losses: 2 },
    Mode { redundancy: "parity:2+2", agents: 5, losses: 2 },
];

impl Mode {
    fn of(seed: u64, stream: usize, modes: &'static [Mode; 2]) -> &'static Mode {
        &modes[(seed as usize).wrapping_add(stream) % modes.len()]
    }
}

struct Chaos {
    hosts: Vec<Host>,
    mode: &'static Mode,
    dice: Dice,
    began: Instant,
    span: Duration,
    failures: u32,
    killer: Option<Killer>,
    pagers: u32,
}

impl Chaos {
    fn new(modes: &'static [Mode; 2], stream: usize) -> Chaos {
        let seed = number("GMS_CHAOS_SEED", SEED);
        let mode = Mode::of(seed, stream, modes);
        let span = Duration::from_secs(number("GMS_CHAOS_SECONDS", SECONDS));
        told(&format!("{} s of chaos with seed {seed} and {}", span.as_secs(), mode.redundancy));
        let hosts = (0..mode.agents).map(|index| Host::new(index, span + AROUND)).collect();
        let dice = Dice::of_thread(seed, stream);
        Chaos {
            hosts,
            mode,
            dice,
            began: Instant::now(),
            span,
            failures: 0,
            killer: None,
            pagers: 0,
        }
    }

    fn run(&mut self, stage: &Stage, program: &Program) -> (Gms, Proc) {
        let agents: Vec<&AgentProc> = self.hosts.iter().map(Host::agent).collect();
        let gms = Gms::run(stage, &program.clone().limit(self.span + AROUND));
        let gms = gms.local(Mib(24)).agents(&agents).redundancy(self.mode.redundancy);
        let proc = gms.spawn();
        let is_taken_over = self.mode.redundancy.starts_with("replica");
        self.killer = is_taken_over.then(|| Killer::new(proc.pid(), self.dice.bits()));
        (gms, proc)
    }

    fn tell(&self, what: &str) {
        told(&format!("{:7.2} s: {what}", self.began.elapsed().as_secs_f64()));
    }

    /// Lets agents fail until the time is over.
    fn rage(&mut self, proc: &Proc) {
        self.began = Instant::now();
        wait_until_copied(proc);
        while self.failures == 0 || self.began.elapsed() < self.span {
            let count = 1 + self.dice.place(self.mode.losses);
            let mut victims: Vec<usize> = (0..self.hosts.len()).collect();
            self.dice.shuffle(&mut victims);
            let left = self.span.saturating_sub(self.began.elapsed());
            let fails = |&host: &usize| (host, Failure::draw(&mut self.dice, left));
            let failures: Vec<(usize, Failure)> = victims[..count].iter().map(fails).collect();
            self.fail(proc, &failures);
        }
    }

    /// Agents fail at once, and come back when that is known, or their time is over.
    fn fail(&mut self, proc: &Proc, failures: &[(usize, Failure)]) {
        for &(host, failure) in failures {
            self.tell(&format!("agent {host}: {failure:?}"));
            self.failures += 1;
            self.begin(host, failure);
        }
        if self.dice.below(2) == 0 {
            self.kill_pager();
        }
        for &(host, failure) in failures {
            self.end(proc, host, failure);
            self.tell(&format!("agent {host} is back"));
        }
        wait_until_copied(proc);
        self.tell("every page has its copies");
    }

    fn kill_pager(&mut self) {
        let Some(killer) = &mut self.killer else { return };
        assert!(killer.kill(), "nothing is left of gms");
        killer.await_next().expect("another pager");
        self.pagers += 1;
        self.tell("another pager goes on");
    }

    fn begin(&mut self, host: usize, failure: Failure) {
        let host = &mut self.hosts[host];
        match failure {
            Failure::Kill => host.agent.take().expect("an agent that runs").kill(),
            Failure::Stop(_) => host.agent().signal(Signal::SIGSTOP),
            Failure::Cut(_) => host.namespace.cut(),
            // Asked once only: who asks again is not waited for.
            Failure::Drain => {}
        }
    }

    fn end(&mut self, proc: &Proc, host: usize, failure: Failure) {
        let limit = self.span + AROUND;
        let host = &mut self.hosts[host];
        match failure {
            Failure::Kill => wait_until_missed(proc, &host.address),
            Failure::Drain => {
                let agent = host.agent.take().expect("an agent that runs");
                agent.terminate().expect_code(0);
            }
            // The outage lasts that long: nothing is waited for by these two sleeps.
            Failure::Stop(span) => {
                thread::sleep(span);
                host.agent().signal(Signal::SIGCONT);
            }
            Failure::Cut(span) => {
                thread::sleep(span);
                host.namespace.mend();
            }
        }
        if host.agent.is_none() {
            host.agent = Some(start_agent(&host.namespace, limit));
        }
    }

    fn report(&self, stall: Duration) {
        let (failures, pagers) = (self.failures, self.pagers);
        self.tell(&format!(
            "{failures} failures, {pagers} pagers killed; the worst stall: {stall:?}"
        ));
        assert!(stall < patience(STALL_MAX), "the worst stall: {stall:?}");
    }
}

fn worst_fault(outcome: &Outcome) -> Duration {
    Duration::from_nanos((outcome.stats().fault_us.max * 1000.0) as u64)
}

#[test]
fn a_program_that_verifies_each_page_finds_none_wrong_while_an_agent_fails() {
    let Some(stage) = Stage::set() else { return };
    let mut chaos = Chaos::new(&ONE_FAILS, 1);
    let program = Program::new([c_program("verify")]).args(["64", "forever"]).stdin_open();
    let (gms, mut proc) = chaos.run(&stage, &program);
    proc.wait_output(0, "round 1\n");
    chaos.rage(&proc);
    proc.wait_output(proc.output_len(), "round ");
    proc.close_stdin();
    let outcome = gms.finish_proc(proc).expect_code(0);
    assert!(outcome.text().ends_with("ended, every page right\n"), "{}", outcome.text());
    chaos.report(worst_fault(&outcome));
}

#[test]
fn redis_keeps_its_digest_while_two_agents_fail() {
    let Some(stage) = Stage::set() else { return };
    let data = Mib(64);
    let mut chaos = Chaos::new(&TWO_FAIL, 2);
    let (server, socket) = Redis::server(&stage, "chaos");
    let (gms, mut proc) = chaos.run(&stage, &server);
    let mut redis = Redis::connect(&mut proc, &socket);
    redis.fill(data);
    let digest = redis.digest();
    let stall = redis.check_while(data, || {
        wait_until_copied(&proc);
        // In each run, however short.
        chaos.fail(&proc, &[(0, Failure::Cut(LONG)), (1, Failure::Kill)]);
        chaos.rage(&proc);
    });
    assert_eq!(redis.digest(), digest);
    redis.shut_down();
    let outcome = gms.finish_proc(proc).expect_code(0);
    chaos.report(stall.max(worst_fault(&outcome)));
}
