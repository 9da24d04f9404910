//! `gms-bench fault`: random or strided remote faults through the whole stack (`gms run`, `gms-agent`, each a process of its own),
//! beside the floors measured just before.

use std::ffi::OsStr;

use gms_tests::Stats;

use crate::cli::{Effort, FaultOptions, PageSize, Protocol};
use crate::error::BenchError;
use crate::floor::udp;
use crate::floor::uffd::{Answer, Handler, faults};
use crate::gate::Gates;
use crate::network::Network;
use crate::placement::{Wait, placements, two_cpus};
use crate::region::pages;
use crate::report::{Report, Target};
use crate::samples::Latency;
use crate::stack::{Stack, check_remote, second_percent};
use crate::turn::rotated;
use crate::workload::Orders;
use crate::workload::fault::{self as workload, Found};
use crate::{memory, stages};

/// Samples of a floor in each run.
const FLOORS: usize = 20_000;
/// Touches measured in each run, all threads together, usual and `--quick`.
const TOUCHES: (usize, usize) = (20_000, 2_000);
/// Touches before them, as a multiple of the budget: then clean pages have taken the place of all that the filling has left dirty.
pub(crate) const WARM_UP_TIMES: usize = 2;
/// Most faults, in percent, that the write-back buffer may have met, so that they were not remote: usual, and for `--quick`, where
/// what was written last is a large part of all.
pub(crate) const LOCAL_PERCENT_MAX: [f64; 2] = [2.0, 50.0];
/// p50 of a fault as a multiple of the floors' p50.
const P50_MAX: f64 = 1.35;
/// p99 of a fault as a multiple of the same.
const P99_MAX: f64 = 2.5;
/// p50 of a fault of 8 KiB as a multiple of that of one of 4 KiB.
const LARGE_MAX: f64 = 1.25;

/// p50 of the floors, in us.
struct Floors {
    /// uffd and UDP, each on one CPU.
    sum: f64,
    /// The same with UDP spinning on two CPUs, if there are two.
    apart: Option<f64>,
}

/// Measures.
pub(crate) fn run(
    options: &FaultOptions,
    network: &Network,
    report: &mut Report,
) -> Result<(), BenchError> {
    let sizes = match options.page_size {
        PageSize::Small => vec![PageSize::Small],
        PageSize::Large => vec![PageSize::Small, PageSize::Large],
    };
    for run in 0..options.effort.runs() {
        report.run("a run", |report| {
            let floors = floors(network, &options.effort, report)?;
            let (mut small, mut large) = (None, None);
            for size in rotated(sizes.iter().copied(), run) {
                let p50 = measure(options, network, size, u64::from(run) + 1, &floors, report)?;
                *(if size == PageSize::Small { &mut small } else { &mut large }) = Some(p50);
            }
            if let (Some(small), Some(large)) = (small, large) {
                let target = options.is_usual().then_some(Target::AtMost(LARGE_MAX));
                report.judged("p50, 8k / 4k", "x", large / small, target);
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn floors(network: &Network, effort: &Effort, report: &mut Report) -> Result<Floors, BenchError> {
    let same = placements()?[0];
    let count = effort.count(FLOORS, 300);
    let uffd = faults(&same, Handler::Thread, Answer::Copy, count)?.latency();
    let row = format!("floor: uffd fault + COPY, {}", same.name);
    report.latency(&row, uffd);
    report.noise(&row);
    let mut exchanges = |placement| {
        let udp = udp::exchanges(network, placement, Protocol::Udp, count)?.latency();
        let row = format!("floor: UDP 128/4224 B, {}", placement.name);
        report.latency(&row, udp);
        report.noise(&row);
        Ok::<f64, BenchError>(uffd.p50 + udp.p50)
    };
    let sum = exchanges(&same)?;
    let spinning = placements()?.into_iter().find(|placement| placement.wait == Wait::Spin);
    Ok(Floors { sum, apart: spinning.as_ref().map(exchanges).transpose()? })
}

/// Measures faults of one size: their p50.
fn measure(
    options: &FaultOptions,
    network: &Network,
    size: PageSize,
    seed: u64,
    floors: &Floors,
    report: &mut Report,
) -> Result<f64, BenchError> {
    let effort = &options.effort;
    let (local, all) = options.paging.mib(effort, 64);
    let threads = options.threads as usize;
    // As the floors have it: agents stand for other machines, as far as two CPUs can tell that.
    let pinned = threads == 1 && !options.unpinned;
    let (cpu, agents_cpu) = if pinned { two_cpus()?.unzip() } else { (None, None) };
    memory::touch(local + local + all)?;
    let programs = options.paging.programs.dir();
    let _losing = network.losing()?;
    let agents = options.agents as usize;
    let stack = Stack::start_over(network, agents_cpu, programs, agents, local + all)?;
    let per_thread = effort.count(TOUCHES.0, TOUCHES.1).div_ceil(threads);
    let orders = workload::Orders {
        mib: all as usize,
        threads,
        warm_up: (WARM_UP_TIMES * pages(local as usize)).div_ceil(threads),
        measured: workload::Measured::Faults(per_thread as u64),
        seed,
        gates: Gates::default(),
        manner: workload::Manner {
            stride: options.stride.map(|stride| stride as usize),
            writes_percent: options.writes as usize,
            cpu,
            stamped: options.stages,
        },
    };
    let touched = (threads * (orders.warm_up + per_thread)) as u64;
    let orders = Orders::Fault(orders);
    let (found, stats): (Found, Stats) = if options.stages {
        let trace = stack.path("trace.csv");
        let ran: (Found, Stats) =
            stack.run_with(&[OsStr::new("--trace"), trace.as_ref()], size, local, &orders)?;
        stages::report(size.name(), &trace, &ran.0.stamps, report)?;
        ran
    } else {
        stack.run(size, local, &orders)?
    };
    let p50 = rows(options, size, &found, floors, report)?;
    counts(size, &stats, report);
    check_remote(&stats, touched, LOCAL_PERCENT_MAX[usize::from(effort.is_quick())])?;
    Ok(p50)
}

/// What the workload has found: p50 of all faults.
fn rows(
    options: &FaultOptions,
    size: PageSize,
    found: &Found,
    floors: &Floors,
    report: &mut Report,
) -> Result<f64, BenchError> {
    let name = format!("remote fault, {}, {}", size.name(), options.manner());
    let latency = found.samples()?.latency();
    report.latency(&name, latency);
    if options.writes > 0 {
        report.latency(&format!("{name}: reads"), found.reads()?.latency());
        report.latency(&format!("{name}: writes"), found.writes()?.latency());
    }
    let size = size.name();
    let touches = found.touches()?.latency();
    if options.stride.is_some() {
        let name = format!("touch, fault or not, {size}, {}", options.manner());
        report.latency(&name, touches);
        let early = found.early_percent();
        report.figure(&format!("{size}: fetched ahead in time, of all touches"), "%", early);
    }
    if options.stride.is_none() {
        ratios(options, size, latency, floors, report);
    }
    let rate = touches.count as f64 / found.seconds;
    let what = if options.stride.is_some() { "touches/s" } else { "faults/s" };
    report.figure(&format!("{size}: {what}"), "1/s", rate);
    let skipped = found.skipped_percent();
    report.figure(&format!("{size}: resident pages passed over"), "%", skipped);
    Ok(latency.p50)
}

/// The latency as a multiple of the floors. Not of strides: many of their faults find the page on its way.
fn ratios(
    options: &FaultOptions,
    size: &str,
    latency: Latency,
    floors: &Floors,
    report: &mut Report,
) {
    let judged = |most| {
        let is_judged = options.is_usual() && size == PageSize::Small.name();
        is_judged.then_some(Target::AtMost(most))
    };
    let floor = "(uffd + UDP floors)";
    let ratio = latency.p50 / floors.sum;
    report.judged(&format!("{size}: p50 / {floor}"), "x", ratio, judged(P50_MAX));
    let ratio = latency.p99 / floors.sum;
    report.judged(&format!("{size}: p99 / {floor}"), "x", ratio, judged(P99_MAX));
    if let Some(apart) = floors.apart {
        let name = format!("{size}: p50 / {floor}, UDP on two CPUs");
        report.figure(&name, "x", latency.p50 / apart);
    }
}

/// gms's own figures, of the whole session.
fn counts(size: PageSize, stats: &Stats, report: &mut Report) {
    let mut figure = |name: &str, unit: &str, value: f64| {
        report.figure(&format!("{}: {name}", size.name()), unit, value);
    };
    figure("pager's own p50, read to wake", "us", stats.fault_us.p50);
    figure("pager's own p99, read to wake", "us", stats.fault_us.p99);
    figure("pages written back", "pages", stats.pages_out as f64);
    figure("clean drops", "pages", stats.clean_drops as f64);
    let ahead = 100.0 * stats.prefetched as f64 / stats.pages_in.max(1) as f64;
    figure("fetched ahead, of all pages fetched", "%", ahead);
    figure("faults met by the write-back buffer", "%", second_percent(stats));
}

impl FaultOptions {
    /// Whether it is what the targets are for.
    fn is_usual(&self) -> bool {
        let alone = self.threads == 1 && self.agents == 1;
        alone && self.stride.is_none() && self.writes == 0 && !self.stages
    }

    /// For the names of the rows.
    fn manner(&self) -> String {
        let mut name = format!("threads: {}", self.threads);
        if self.agents > 1 {
            name += &format!(", agents: {}", self.agents);
        }
        if let Some(stride) = self.stride {
            name += &format!(", stride {stride}");
        }
        if self.writes > 0 {
            name += &format!(", writes {} %", self.writes);
        }
        name
    }
}
