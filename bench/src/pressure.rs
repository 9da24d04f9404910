//! `gms-bench pressure`: a program fills the memory of its host, a cgroup, alone and beside an agent that follows the host.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::cli::{PageSize, PressureOptions};
use crate::error::{BenchError, Trying};
use crate::gate::Gate;
use crate::memcg::Memcg;
use crate::memory;
use crate::peer::Process;
use crate::report::{Report, Target};
use crate::scratch::Scratch;
use crate::stack::{Stack, read};
use crate::turn::rotated;
use crate::workload::{Orders, dirty, fill, sleep};

/// Memory of the host in MiB, usual and `--quick`.
const HOST_MIB: (usize, usize) = (1024, 384);
/// Budget of the program whose pages the agent has, in MiB, usual and `--quick`.
const LOCAL_MIB: (usize, usize) = (64, 16);
/// What an agent leaves to a host of this size, in MiB (docs/agent.md).
const RESERVE_MIB: usize = 64;
/// As much of the reserve may be missing before anything is given back.
const SLACK_MIB: usize = RESERVE_MIB / 8 + 2;
/// MiB per second.
const PACE: f64 = 2048.0;
/// How much slower the program may be, in percent.
const SLOWER_MAX: f64 = 3.0;
/// When the host has its reserve again at the latest, in ms.
const BACK_MAX: f64 = 1000.0;
/// After so long it is no result.
const BACK_WITHIN: Duration = Duration::from_secs(30);

/// What else the host has.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Beside {
    Nothing,
    /// An agent with frames that pages have left.
    Free,
    /// An agent that has pages, which can move to another one elsewhere.
    Held,
}

impl Beside {
    fn name(self) -> &'static str {
        match self {
            Beside::Nothing => "alone",
            Beside::Free => "beside free frames",
            Beside::Held => "beside pages",
        }
    }
}

/// Measures.
pub(crate) fn run(options: &PressureOptions, report: &mut Report) -> Result<(), BenchError> {
    let mib = options.effort.count(HOST_MIB.0, HOST_MIB.1);
    memory::touch(mib as u32)?;
    let mut paces = [f64::NAN; 2];
    for run in 0..options.effort.runs() {
        for beside in rotated([Beside::Nothing, Beside::Free, Beside::Held], run) {
            let done = report.run(beside.name(), |report| once(options, mib, beside, report))?;
            match (beside, done) {
                (Beside::Nothing, Some(pace)) => paces[0] = pace,
                (Beside::Free, Some(pace)) => paces[1] = pace,
                _ => {}
            }
        }
        let slower = (paces[0] / paces[1] - 1.0) * 100.0;
        if slower.is_finite() {
            let target = Some(Target::AtMost(SLOWER_MAX));
            report.judged("beside free frames: slower", "%", slower, target);
        }
    }
    report.noise(&format!("{}: filled at", Beside::Nothing.name()));
    Ok(())
}

/// Fills once; returns at which pace, in MiB per second.
fn once(
    options: &PressureOptions,
    mib: usize,
    beside: Beside,
    report: &mut Report,
) -> Result<f64, BenchError> {
    let (name, host) = (beside.name(), Memcg::new(mib as u32)?);
    let programs = options.programs.dir();
    let local = options.effort.count(LOCAL_MIB.0, LOCAL_MIB.1);
    if beside == Beside::Nothing {
        return filled(&host, name, mib - 2 * RESERVE_MIB, report, || Ok(()));
    }
    let stack = Stack::beside(programs, &host, mib as u32, beside == Beside::Held)?;
    if beside == Beside::Free {
        let orders = dirty::Orders {
            mib: mib * 5 / 8,
            untimed_mib: local,
            threads: 1,
            gates: Default::default(),
        };
        let orders = Orders::Dirty(orders);
        let options = ["--redundancy", "none"];
        stack.run_with::<dirty::Found, _>(&options, PageSize::Small, local as u32, &orders)?;
        let used = host.used_mib()?;
        if used < mib as f64 / 4.0 {
            return Err(BenchError::Refused(format!("the agent has {used:.0} MiB only")));
        }
        return filled(&host, name, mib - 2 * RESERVE_MIB, report, || Ok(()));
    }
    let path = stack.path("gate");
    let gate = Gate::new(&path)?;
    let orders = Orders::Sleep(sleep::Orders { mib: mib * 5 / 16, gate: path });
    let mut session = stack.spawn(PageSize::Small, local as u32, &orders)?;
    let waiting = gate.gather(1, || session.check_alive())?;
    // All but a part of the reserve.
    let room = mib.saturating_sub(host.used_mib()?.ceil() as usize + RESERVE_MIB / 2);
    let back = || {
        let (began, before) = (Instant::now(), host.used_mib()?);
        let most = (mib - RESERVE_MIB + SLACK_MIB) as f64;
        while host.used_mib()? > most {
            if began.elapsed() > BACK_WITHIN {
                return Err(BenchError::Refused("the reserve does not come back".into()));
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok((before - host.used_mib()?, began.elapsed().as_secs_f64()))
    };
    let mut given = (0.0, 0.0);
    let pace = filled(&host, name, room, report, || back().map(|back| given = back))?;
    let target = Some(Target::AtMost(BACK_MAX));
    report.judged(&format!("{name}: reserve back after"), "ms", given.1 * 1e3, target);
    report.figure(&format!("{name}: given back"), "MiB/s", given.0 / given.1);
    waiting.open()?;
    session.finish::<sleep::Found>()?;
    Ok(pace)
}

/// Has a program in `host` fill `mib` MiB, and keep them until `then` is done; returns at which pace that was, in MiB per second.
fn filled(
    host: &Memcg,
    name: &str,
    mib: usize,
    report: &mut Report,
    then: impl FnOnce() -> Result<(), BenchError>,
) -> Result<f64, BenchError> {
    let scratch = Scratch::new()?;
    let (path, found) = (scratch.path("gate"), scratch.path("found.json"));
    let gate = Gate::new(&path)?;
    let words = Orders::Fill(fill::Orders { mib, pace: PACE, gate: path }).command(&found)?;
    let mut command = Command::new(&words[0]);
    host.enter(command.args(&words[1..]));
    let mut program = Process::start(&mut command)?;
    let early = |ended| BenchError::Program {
        program: "the program that fills memory".into(),
        problem: format!("ended with {ended}"),
    };
    let waiting = gate.gather(1, || match program.0.try_wait().trying("cannot ask for it")? {
        None => Ok(()),
        Some(ended) => Err(early(ended)),
    })?;
    then()?;
    waiting.open()?;
    let ended = program.0.wait().trying("cannot wait for it")?;
    if !ended.success() || host.kills()? > 0 {
        return Err(early(ended));
    }
    let found: fill::Found = read(&found)?;
    let pace = mib as f64 / found.seconds;
    report.figure(&format!("{name}: filled at"), "MiB/s", pace);
    report.figure(&format!("{name}: longest for 2 MiB"), "ms", found.longest_ms);
    Ok(pace)
}
