//! `gms-bench idle-cpu`: what gms does while its program sleeps.

use std::thread;
use std::time::{Duration, Instant};

use crate::cli::IdleCpuOptions;
use crate::error::{BenchError, Trying};
use crate::floor;
use crate::gate::Gate;
use crate::memory;
use crate::procfs::cpu_us;
use crate::report::{Report, Target};
use crate::room::Room;
use crate::stack::{Stack, read};
use crate::turn::rotated;
use crate::workload::Orders;
use crate::workload::sleep::{self, Found};

/// What gms may take, in percent of one CPU.
const PERCENT_MAX: f64 = 1.0;
/// How long the program is left alone first: what filling it has left to do is done then.
const SETTLE: Duration = Duration::from_secs(2);
/// Least share of the program's memory that must be absent, in percent.
const ABSENT_PERCENT_MIN: f64 = 50.0;

/// Measures.
pub(crate) fn run(options: &IdleCpuOptions, report: &mut Report) -> Result<(), BenchError> {
    for run in 0..options.effort.runs() {
        floor::zero_fill(&options.effort, report)?;
        for local in rotated(options.budgets(), run) {
            let name = format!("budget {local} MiB");
            report.run(&name, |report| once(options, local, report))?;
        }
    }
    Ok(())
}

/// One budget.
fn once(options: &IdleCpuOptions, local: u32, report: &mut Report) -> Result<(), BenchError> {
    let mib = local * options.times;
    memory::touch(2 * mib)?;
    let stack = Stack::start(options.programs.dir(), 1, mib + local)?;
    let (path, found) = (stack.path("gate"), stack.path("found.json"));
    let gate = Gate::new(&path)?;
    let orders = Orders::Sleep(sleep::Orders { mib: mib as usize, gate: path });
    let room = Room::Gms(&stack, local);
    let mut running = room.start(&mut room.command(&orders.command(&found)?))?;
    let waiting = gate.gather(1, || {
        let ended = running.process.0.try_wait().trying("cannot ask for gms")?;
        let problem = "ended before the program slept".to_owned();
        let early = BenchError::Program { program: "gms run".into(), problem };
        if ended.is_some() { Err(early) } else { Ok(()) }
    })?;
    thread::sleep(SETTLE);
    // All that runs in the cgroup: the program, which sleeps, its evictor, and all else is gms's.
    let own = running.pids()?;
    let agents = stack.agent_pids();
    let cpu = |pids: &[u32]| pids.iter().map(|pid| cpu_us(*pid)).sum::<f64>();
    let (start, before) = (Instant::now(), [cpu(&own), cpu(&agents)]);
    thread::sleep(options.looked_at());
    let (after, took_us) = ([cpu(&own), cpu(&agents)], start.elapsed().as_secs_f64() * 1e6);
    let percent = |at: usize| 100.0 * (after[at] - before[at]) / took_us;
    waiting.open()?;
    running.finish()?;
    let found: Found = read(&found)?;
    if found.absent_percent < ABSENT_PERCENT_MIN {
        let text = format!("only {:.0} % of the program were away", found.absent_percent);
        return Err(BenchError::Refused(text));
    }
    let name = format!("idle CPU, budget {local} MiB, program {mib} MiB");
    let target = Some(Target::AtMost(PERCENT_MAX));
    report.judged(&name, "%", percent(0), target);
    report.figure(&format!("{name}: gms-agent"), "%", percent(1));
    report.figure(&format!("{name}: of it absent"), "%", found.absent_percent);
    Ok(())
}
