//! `gms-bench fault`: random remote faults through the whole stack (`gms run`, `gms-agent`, each a process of its own), beside the
//! floors measured just before.

use crate::cli::{FaultOptions, Protocol};
use crate::error::BenchError;
use crate::floor::udp;
use crate::floor::uffd::{Answer, Handler, faults};
use crate::placement::{Wait, placements};
use crate::report::{Report, Target};
use crate::stack::Stack;
use crate::workload::Orders;
use crate::workload::fault::{self as workload, Found};

/// Samples of a floor in each run.
const FLOORS: usize = 20_000;
/// Faults measured in each run, all threads together.
const FAULTS: usize = 20_000;
/// Faults before them.
const WARM_UP: usize = 4_000;
/// Most faults, in percent, that the write-back buffer may have met, so that they were not remote: usual, and for `--quick`, where
/// what was written last is a large part of all.
pub const LOCAL_PERCENT_MAX: [f64; 2] = [2.0, 50.0];
/// p50 of a fault as a multiple of the floors.
const RATIO_MAX: f64 = 2.5;

/// Measures.
pub fn run(options: &FaultOptions, report: &mut Report) -> Result<(), BenchError> {
    let effort = &options.effort;
    let (local, all) = options.paging.mib(effort, 64);
    let threads = options.threads as usize;
    let size = options.page_size.name();
    for run in 0..effort.runs() {
        let same = placements()?[0];
        let floors = effort.count(FLOORS, 300);
        let uffd = faults(&same, Handler::Thread, Answer::Copy, floors)?.latency();
        report.latency(&format!("floor: uffd fault + COPY, {}", same.name), uffd);
        let udp = udp::exchanges(&same, Protocol::Udp, floors)?.latency();
        report.latency(&format!("floor: UDP 128/4224 B, {}", same.name), udp);

        let two_cpus = placements()?.into_iter().find(|placement| placement.wait == Wait::Spin);
        let least = match two_cpus {
            Some(spinning) => {
                let udp = udp::exchanges(&spinning, Protocol::Udp, floors)?.latency();
                report.latency(&format!("floor: UDP 128/4224 B, {}", spinning.name), udp);
                Some(udp.p50)
            }
            None => None,
        };

        let stack = Stack::start(options.paging.programs.dir(), 1, local + all)?;
        let per_thread = effort.count(FAULTS, 600).div_ceil(threads);
        let orders = workload::Orders {
            mib: all as usize,
            threads,
            warm_up: effort.count(WARM_UP, 100).div_ceil(threads),
            measured: workload::Measured::Faults(per_thread as u64),
            seed: u64::from(run) + 1,
            gate: None,
        };
        let counted = (orders.threads * (orders.warm_up + per_thread)) as u64;
        let (found, stats): (Found, _) =
            stack.run(options.page_size, local, &Orders::Fault(orders))?;
        let latency = found.samples()?.latency();
        report.latency(&format!("remote fault, {size}, threads: {threads}"), latency);

        let target = (threads == 1).then_some(Target::AtMost(RATIO_MAX));
        let floor = uffd.p50 + udp.p50;
        report.judged("p50 / (uffd + UDP floors)", "x", latency.p50 / floor, target);
        if let Some(least) = least {
            let name = "p50 / (uffd + UDP floors), UDP on two CPUs";
            report.figure(name, "x", latency.p50 / (uffd.p50 + least));
        }
        report.figure("p99 / (uffd + UDP floors)", "x", latency.p99 / floor);
        report.figure("faults/s", "1/s", latency.count as f64 / found.seconds);
        report.figure("touches of resident pages, not counted", "%", found.skipped_percent());
        report.figure("pager's own p50, read to wake", "us", stats.fault_us.p50);
        report.figure("pager's own p99, read to wake", "us", stats.fault_us.p99);
        report.figure("pages written back", "pages", stats.pages_out as f64);
        report.figure("clean drops", "pages", stats.clean_drops as f64);
        report.figure("faults met by the write-back buffer", "%", stats.second_percent());
        stats.check(counted, LOCAL_PERCENT_MAX[usize::from(effort.is_quick())])?;
    }
    Ok(())
}
