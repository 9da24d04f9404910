//! `gms-bench redundancy`: what copies of pages, parity and sealing cost a remote fault and write-back, on the same agents, one mode after the other.

use gms_tests::Stats;

use crate::cli::{PageSize, RedundancyOptions};
use crate::error::BenchError;
use crate::fault::{LOCAL_PERCENT_MAX, WARM_UP_TIMES};
use crate::gate::Gates;
use crate::memory;
use crate::network::Network;
use crate::placement::two_cpus;
use crate::region::{PAGE, pages};
use crate::report::{Report, Target};
use crate::stack::{Stack, check_remote};
use crate::turn::rotated;
use crate::workload::{Orders, dirty, fault};

/// Touches measured in each run, usual and `--quick`.
const TOUCHES: (usize, usize) = (20_000, 2_000);
/// What is dirtied to measure write-back, as a multiple of the memory that is faulted.
const DIRTY_TIMES: u32 = 4;
/// p50 of a fault as a multiple of that without copies and seals.
const FAULT_MAX: f64 = 1.1;
/// Write-back with two copies of each page, as a share of that with one.
const TWO_COPIES_MIN: f64 = 0.45;

/// What an agent is given of a page.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Mode {
    /// As `gms run` takes it.
    redundancy: &'static str,
    is_sealed: bool,
    /// What agents are given of a page: whole copies, and with parity its share of that.
    given: f64,
}

/// The others are compared with the first one.
const MODES: [Mode; 5] = [
    Mode { redundancy: "none", is_sealed: false, given: 1.0 },
    Mode { redundancy: "none", is_sealed: true, given: 1.0 },
    Mode { redundancy: "replica:2", is_sealed: true, given: 2.0 },
    Mode { redundancy: "replica:3", is_sealed: true, given: 3.0 },
    Mode { redundancy: "parity:4+1", is_sealed: true, given: 1.25 },
];

impl Mode {
    fn name(self) -> String {
        format!("{}{}", self.redundancy, if self.is_sealed { "" } else { ", not sealed" })
    }

    fn options(self) -> [&'static str; 4] {
        ["--redundancy", self.redundancy, "--seal", if self.is_sealed { "on" } else { "off" }]
    }
}

/// Measures.
pub(crate) fn run(
    options: &RedundancyOptions,
    network: &Network,
    report: &mut Report,
) -> Result<(), BenchError> {
    let effort = &options.effort;
    let (local, all) = options.paging.mib(effort, 64);
    // All that the modes write is at the agents until each session ends.
    let room = (local + DIRTY_TIMES * all) * 3;
    for run in 0..effort.runs() {
        report.run("a run", |report| {
            let (cpu, agents_cpu) = two_cpus()?.unzip();
            memory::touch(local + all + room)?;
            let _losing = network.losing()?;
            let (programs, agents) = (options.paging.programs.dir(), options.agents as usize);
            let stack = Stack::start_over(network, agents_cpu, programs, agents, room)?;
            let mut measured = Vec::new();
            for mode in rotated(MODES, run) {
                let p50 = faults(options, &stack, mode, (cpu, u64::from(run) + 1), report)?;
                let rate = write_back(options, &stack, mode, report)?;
                measured.push((mode, p50, rate));
            }
            ratios(&measured, report);
            Ok(())
        })?;
    }
    Ok(())
}

/// Remote faults of one thread: their p50.
fn faults(
    options: &RedundancyOptions,
    stack: &Stack,
    mode: Mode,
    (cpu, seed): (Option<usize>, u64),
    report: &mut Report,
) -> Result<f64, BenchError> {
    let effort = &options.effort;
    let (local, all) = options.paging.mib(effort, 64);
    let count = effort.count(TOUCHES.0, TOUCHES.1);
    let orders = fault::Orders {
        mib: all as usize,
        threads: 1,
        warm_up: WARM_UP_TIMES * pages(local as usize),
        measured: fault::Measured::Faults(count as u64),
        seed,
        gates: Gates::default(),
        manner: fault::Manner { cpu, ..fault::Manner::default() },
    };
    let touched = (orders.warm_up + count) as u64;
    let orders = Orders::Fault(orders);
    let ran = stack.run_with(&mode.options(), PageSize::Small, local, &orders)?;
    let (found, stats): (fault::Found, Stats) = ran;
    check_remote(&stats, touched, LOCAL_PERCENT_MAX[usize::from(effort.is_quick())])?;
    check_mode(&stats, mode)?;
    let latency = found.samples()?.latency();
    report.latency(&format!("remote fault, {}", mode.name()), latency);
    Ok(latency.p50)
}

/// MB of the program's pages that are written back in a second.
fn write_back(
    options: &RedundancyOptions,
    stack: &Stack,
    mode: Mode,
    report: &mut Report,
) -> Result<f64, BenchError> {
    let (local, all) = options.paging.mib(&options.effort, 64);
    let orders = dirty::Orders {
        mib: (DIRTY_TIMES * all) as usize,
        untimed_mib: local as usize,
        threads: 1,
        gates: Gates::default(),
    };
    let orders = Orders::Dirty(orders);
    let ran = stack.run_with(&mode.options(), PageSize::Small, local, &orders)?;
    let (found, stats): (dirty::Found, Stats) = ran;
    check_mode(&stats, mode)?;
    let rate = found.evicted as f64 * PAGE as f64 / found.seconds / 1e6;
    report.figure(&format!("write-back, {}", mode.name()), "MB/s", rate);
    let most = stats.taken_peak_bytes.max((mode.given * stats.remote_peak_bytes as f64) as u64);
    let memory = most as f64 / stats.remote_peak_bytes.max(1) as f64;
    report.figure(&format!("memory at agents / pages there, {}", mode.name()), "x", memory);
    Ok(rate)
}

/// That the pages were sealed, and as much of each was given to agents, as the mode says.
fn check_mode(stats: &Stats, mode: Mode) -> Result<(), BenchError> {
    let given: u64 = stats.agents.iter().map(|agent| agent.pages).sum();
    let given = given as f64 / stats.pages_out.max(1) as f64;
    if stats.sealed != mode.is_sealed || (given / mode.given - 1.0).abs() > 0.05 {
        let text = format!("{}: {given:.2} of each page, sealed: {}", mode.name(), stats.sealed);
        return Err(BenchError::Invalid(text));
    }
    Ok(())
}

fn ratios(measured: &[(Mode, f64, f64)], report: &mut Report) {
    let of = |mode: Mode| measured.iter().find(|(other, ..)| *other == mode);
    let (Some((bare, bare_p50, _)), Some((single, _, single_rate))) = (of(MODES[0]), of(MODES[1]))
    else {
        return;
    };
    for (mode, p50, rate) in measured.iter().filter(|(mode, ..)| mode != bare) {
        let name = format!("p50, {} / {}", mode.name(), bare.name());
        report.judged(&name, "x", p50 / bare_p50, Some(Target::AtMost(FAULT_MAX)));
        if mode != single {
            let name = format!("write-back, {} / {}", mode.name(), single.name());
            let target =
                (mode.redundancy == "replica:2").then_some(Target::AtLeast(TWO_COPIES_MIN));
            report.judged(&name, "x", rate / single_rate, target);
        }
    }
}
