//! `gms-bench shape`: how what gms does for a program grows with the program's threads, mappings, processes and memory.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Deserialize;

use crate::cli::{Dimension, ShapeOptions};
use crate::error::{BenchError, Trying};
use crate::peer::Process;
use crate::procfs::cpu_us;
use crate::report::{Report, Target};
use crate::samples::Samples;
use crate::scratch::Scratch;
use crate::stack::{program, read};
use crate::turn::rotated;
use crate::workload::Orders as Workload;
use crate::workload::shape::{Ask, Found, Orders, Ready, Shape};

/// What a cost may grow by from 10 times to 100 times as much.
const GROWTH_MAX: f64 = 2.0;
/// The same of a cost that must be in proportion.
const LINEAR_MAX: f64 = 10.0;
/// Scales, usual and `--quick`.
const SCALES: [&[usize]; 2] = [&[1, 10, 100], &[1, 10]];
/// The budget of a workload without a shape, in MiB, and by how much it is exceeded.
const LOCAL_MIB: usize = 16;
const EXCESS_MIB: usize = 16;
/// Memory of a process that sleeps and of a thread's stack, in KiB, which is not to press on the budget.
const PROCESS_KIB: usize = 128;
const THREAD_KIB: usize = 16;
/// Room of the agent of gms's own.
const EXPORT_MIB: usize = 2048;
/// Changes of each kind, and forks, usual and `--quick`.
const CHANGES: (usize, usize) = (300, 50);
const FORKS: (usize, usize) = (30, 5);
/// How long a workload that does nothing is looked at, usual and `--quick`, and how long it is left alone before.
const IDLE: [Duration; 2] = [Duration::from_millis(1500), Duration::from_millis(200)];
const SETTLE: [Duration; 2] = [Duration::from_millis(1500), Duration::from_millis(200)];

/// For a pager to look at a workload that does nothing.
const LOOK_DEADLINE: Duration = Duration::from_secs(10);
/// How often it is looked whether a workload lives that has not come.
const LOOK_MS: u16 = 200;

impl Dimension {
    fn name(self) -> &'static str {
        match self {
            Dimension::Threads => "threads",
            Dimension::Mappings => "mappings",
            Dimension::Processes => "processes",
            Dimension::Gib => "GiB",
        }
    }

    fn count(self, scale: usize) -> usize {
        match self {
            Dimension::Threads | Dimension::Processes => 10 * scale,
            Dimension::Mappings => 100 * scale,
            Dimension::Gib => scale,
        }
    }

    fn shape(self, scale: usize) -> Shape {
        let of = |dimension| if self == dimension { self.count(scale) } else { 0 };
        Shape {
            threads: of(Dimension::Threads),
            mappings: of(Dimension::Mappings),
            processes: of(Dimension::Processes),
            chunks: of(Dimension::Gib) * 512,
        }
    }
}

/// What is measured of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cost {
    Discard,
    Unmap,
    LookIdle,
    LookChanging,
    Fork,
    ForkAlone,
    BehindFork,
    Exit,
    ForkCpu,
    Detach,
}

impl Cost {
    const ALL: [Cost; 10] = [
        Cost::Discard,
        Cost::Unmap,
        Cost::LookIdle,
        Cost::LookChanging,
        Cost::Fork,
        Cost::ForkAlone,
        Cost::BehindFork,
        Cost::Exit,
        Cost::ForkCpu,
        Cost::Detach,
    ];

    fn name(self) -> &'static str {
        match self {
            Cost::Discard => "event (MADV_DONTNEED)",
            Cost::Unmap => "event (munmap)",
            Cost::LookIdle => "look, idle (CPU)",
            Cost::LookChanging => "look, changes (CPU)",
            Cost::Fork => "fork",
            Cost::ForkAlone => "fork without gms",
            Cost::BehindFork => "event behind a fork",
            Cost::Exit => "exit",
            Cost::ForkCpu => "gms's CPU, a fork and exit",
            Cost::Detach => "detach",
        }
    }

    /// From 10 times to 100 times as much of it. The kernel itself copies and frees mappings and page tables in proportion.
    fn target(self, of: Dimension) -> Option<f64> {
        let of_the_kernel = of != Dimension::Processes;
        match self {
            Cost::ForkAlone => None,
            Cost::Fork | Cost::Exit | Cost::ForkCpu if of_the_kernel => Some(LINEAR_MAX),
            Cost::LookIdle | Cost::LookChanging if of == Dimension::Processes => Some(LINEAR_MAX),
            // Each page comes home, and each mapping is unregistered: a thread's stack is one.
            Cost::Detach => Some(LINEAR_MAX),
            _ => Some(GROWTH_MAX),
        }
    }
}

/// Costs of one shape in us.
type Costs = Vec<(Cost, f64)>;

/// Measures.
pub(crate) fn run(options: &ShapeOptions, report: &mut Report) -> Result<(), BenchError> {
    let scales = SCALES[usize::from(options.effort.is_quick())];
    for run in 0..options.effort.runs() {
        for of in rotated(options.dimensions(), run) {
            for scale in rotated(scales, run) {
                let name = format!("{} {}", of.count(*scale), of.name());
                report.run(&name, |report| {
                    for (cost, us) in measure(options, of.shape(*scale))? {
                        report.figure(&row(of, *scale, cost), "us", us);
                    }
                    Ok(())
                })?;
            }
        }
    }
    for of in options.dimensions() {
        scales.iter().for_each(|scale| report.noise(&row(of, *scale, Cost::ForkAlone)));
        judge(of, scales, report);
    }
    Ok(())
}

fn row(of: Dimension, scale: usize, cost: Cost) -> String {
    format!("{} {}: {}", of.count(scale), of.name(), cost.name())
}

/// How the costs of each run have grown over the last step.
fn judge(of: Dimension, scales: &[usize], report: &mut Report) {
    let &[.., below, most] = scales else { return };
    for cost in Cost::ALL {
        let [less, more] = [below, most].map(|scale| report.values(&row(of, scale, cost)));
        let linear = cost.target(of) == Some(LINEAR_MAX);
        let name = format!("{}, {most}x / {below}x: {}", of.name(), cost.name());
        for (less, more) in less.into_iter().zip(more) {
            report.judged(&name, "x", more / less, cost.target(of).map(Target::AtMost));
            if linear {
                let each = (more - less) / (of.count(most) - of.count(below)) as f64;
                report.figure(&format!("{}, each: {}", of.name(), cost.name()), "us", each);
            }
        }
    }
}

// ---- one shape

fn measure(options: &ShapeOptions, shape: Shape) -> Result<Costs, BenchError> {
    let effort = &options.effort;
    let needed_kib = shape.processes * PROCESS_KIB + shape.threads * THREAD_KIB;
    let local_mib = LOCAL_MIB + needed_kib / 1024;
    let scratch = Scratch::new()?;
    let orders = Orders {
        shape,
        filled_mib: local_mib + EXCESS_MIB,
        events: effort.count(CHANGES.0, CHANGES.1),
        forks: effort.count(FORKS.0, FORKS.1),
        paged: true,
        socket: scratch.path("orders"),
    };
    let mut costs = Costs::new();
    alone(&orders, &scratch, &mut costs)?;
    let gms = program(options.programs.dir(), "gms")?;
    let mut command = Command::new(&gms);
    command.args(["run", "-q", "--local", &format!("{local_mib}M")]);
    command.args(["--export", &format!("{EXPORT_MIB}M"), "--"]);
    let mut subject = Subject::start(command, &orders, &scratch)?;
    let paging = Paging { gms, front: subject.process.0.id() };
    let quick = usize::from(effort.is_quick());
    std::thread::sleep(SETTLE[quick]);
    let before = paging.now()?;
    std::thread::sleep(IDLE[quick]);
    let idle = paging.looked_since(&before)?;
    subject.ask(Ask::Change)?;
    subject.ask(Ask::ChangeSlowly)?;
    let changed = paging.now()?;
    subject.ask(Ask::Fork)?;
    let forked = paging.now()?;
    costs.push((Cost::LookIdle, idle.look_us_since(&before)));
    costs.push((Cost::LookChanging, changed.look_us_since(&idle)));
    costs.push((Cost::ForkCpu, (forked.cpu_us - changed.cpu_us) / orders.forks as f64));
    let start = Instant::now();
    paging.detach()?;
    costs.push((Cost::Detach, start.elapsed().as_secs_f64() * 1e6));
    let found = subject.finish()?;
    let mut p50 = |cost, counts: &[(u64, u64)]| -> Result<(), BenchError> {
        costs.push((cost, Samples::from_counts(counts)?.latency().p50));
        Ok(())
    };
    p50(Cost::Discard, &found.discard)?;
    p50(Cost::Unmap, &found.unmap)?;
    p50(Cost::Fork, &found.fork)?;
    p50(Cost::BehindFork, &found.behind)?;
    p50(Cost::Exit, &found.exit)?;
    Ok(costs)
}

/// What the kernel itself takes for a fork of this shape.
fn alone(orders: &Orders, scratch: &Scratch, costs: &mut Costs) -> Result<(), BenchError> {
    let orders = Orders { paged: false, socket: scratch.path("alone"), ..orders.clone() };
    let command = Command::new("env");
    let mut subject = Subject::start(command, &orders, scratch)?;
    subject.ask(Ask::Change)?;
    subject.ask(Ask::Fork)?;
    let found = subject.finish()?;
    costs.push((Cost::ForkAlone, Samples::from_counts(&found.fork)?.latency().p50));
    Ok(())
}

/// A workload which takes orders.
struct Subject {
    process: Process,
    socket: UnixStream,
    lines: std::io::Lines<BufReader<UnixStream>>,
    found: PathBuf,
}

impl Subject {
    /// Starts it behind `command`, and waits until it has its shape.
    fn start(mut command: Command, orders: &Orders, scratch: &Scratch) -> Result<Self, BenchError> {
        let listener = UnixListener::bind(&orders.socket).trying("no socket for orders")?;
        let found = scratch.path("found.json");
        command.args(Workload::Shape(orders.clone()).command(&found)?);
        let mut process = Process::start(&mut command)?;
        let socket = accept(&listener, &mut process)?;
        let lines = BufReader::new(socket.try_clone().trying("no second socket")?).lines();
        let mut subject = Subject { process, socket, lines, found };
        let ready: Result<Ready, _> = serde_json::from_str(&subject.answer()?);
        ready.map_err(|error| BenchError::Invalid(format!("workload: {error}")))?;
        Ok(subject)
    }

    fn answer(&mut self) -> Result<String, BenchError> {
        let ended = || BenchError::Invalid("the workload ended too early".into());
        self.lines.next().ok_or_else(ended)?.trying("no answer of the workload")
    }

    fn order(&mut self, ask: Ask) -> Result<(), BenchError> {
        let text = serde_json::to_string(&ask).map_err(|e| BenchError::Invalid(e.to_string()))?;
        writeln!(self.socket, "{text}").trying("cannot order")
    }

    /// Has an order carried out.
    fn ask(&mut self, ask: Ask) -> Result<(), BenchError> {
        self.order(ask)?;
        self.answer().map(drop)
    }

    fn finish(mut self) -> Result<Found, BenchError> {
        self.order(Ask::End)?;
        let ended = self.process.0.wait().trying("cannot wait for the workload")?;
        match ended.success() {
            true => read(&self.found),
            false => Err(BenchError::Invalid(format!("the workload ended with {ended}"))),
        }
    }
}

/// Waits for a workload to come, as long as it lives.
fn accept(listener: &UnixListener, process: &mut Process) -> Result<UnixStream, BenchError> {
    loop {
        let mut fds = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::from(LOOK_MS)) {
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(listener.accept().trying("no workload")?.0),
            Err(error) => return Err(error).trying("cannot wait for the workload"),
        }
        if let Some(ended) = process.0.try_wait().trying("cannot ask for the workload")? {
            return Err(BenchError::Invalid(format!("the workload ended early with {ended}")));
        }
    }
}

/// The gms which pages a workload.
struct Paging {
    gms: PathBuf,
    front: u32,
}

/// Of the figures of `gms status` those which matter here.
#[derive(Debug, Deserialize)]
struct Status {
    supervisor_pid: u32,
    looks: u64,
    looks_cpu_us: f64,
    away_bytes: u64,
}

/// How much gms has done so far.
struct Work {
    looks: u64,
    looks_cpu_us: f64,
    /// Of all threads of the pager.
    cpu_us: f64,
}

impl Work {
    fn look_us_since(&self, before: &Work) -> f64 {
        (self.looks_cpu_us - before.looks_cpu_us) / (self.looks - before.looks).max(1) as f64
    }
}

impl Paging {
    fn now(&self) -> Result<Work, BenchError> {
        let front = self.front.to_string();
        let asked = Command::new(&self.gms).args(["status", "--json", &front]).output();
        let output = asked.trying("cannot run gms status")?;
        let list: Result<Vec<Status>, _> = serde_json::from_slice(&output.stdout);
        let list = list.map_err(|error| BenchError::Invalid(format!("gms status: {error}")))?;
        let status = list.first().filter(|status| status.away_bytes > 0);
        let nothing = || BenchError::Invalid("nothing is paged".into());
        let Status { supervisor_pid, looks, looks_cpu_us, .. } = *status.ok_or_else(nothing)?;
        Ok(Work { looks, looks_cpu_us, cpu_us: cpu_us(supervisor_pid) })
    }

    /// What it has done when it has looked again: on a busy machine that may take longer than the time for which it was left alone.
    fn looked_since(&self, before: &Work) -> Result<Work, BenchError> {
        let end = Instant::now() + LOOK_DEADLINE;
        loop {
            let now = self.now()?;
            if now.looks > before.looks || Instant::now() > end {
                return Ok(now);
            }
        }
    }

    fn detach(&self) -> Result<(), BenchError> {
        let front = self.front.to_string();
        let asked = Command::new(&self.gms).args(["detach", &front]).status();
        match asked.trying("cannot run gms detach")?.success() {
            true => Ok(()),
            false => Err(BenchError::Invalid("gms detach has failed".into())),
        }
    }
}
