//! `gms-bench evict`: how fast pages leave, and what that costs those who wait for pages to come.

use crate::cli::{EvictOptions, PageSize};
use crate::error::BenchError;
use crate::fault::WARM_UP_TIMES;
use crate::floor::{self, bulk::Bulk};
use crate::gate::Gates;
use crate::memory;
use crate::network::Network;
use crate::region::{PAGE, pages};
use crate::report::{Report, Target};
use crate::samples::Samples;
use crate::stack::{Stack, second_percent};
use crate::turn::rotated;
use crate::workload::Orders;
use crate::workload::dirty::{self as workload, DuelFound, Found};

/// Share of the bulk throughput that write-back should reach.
const OF_BULK_MIN: f64 = 0.5;
/// p99 of a fault beside eviction at full rate, as a multiple of p99 without.
const P99_MAX: f64 = 3.0;
/// Faults measured in each of the two states, usual and `--quick`.
const FAULTS: (usize, usize) = (10_000, 300);
/// What is dirtied to measure the throughput, as a multiple of the memory that is faulted.
const DIRTY_TIMES: u32 = 4;
/// Least pages evicted per page dirtied: else eviction did not go at full rate.
const EVICTED_MIN: f64 = 0.5;
/// Least pages written per page evicted: else what left was not written back but is buffered.
const WRITTEN_MIN: f64 = 0.5;

/// Measures.
pub(crate) fn run(
    options: &EvictOptions,
    network: &Network,
    report: &mut Report,
) -> Result<(), BenchError> {
    let effort = &options.effort;
    let (local, mib) = options.paging.mib(effort, 64);
    for run in 0..effort.runs() {
        report.run("a run", |report| {
            let bulk = floor::bulk(network, effort, Bulk::Put, report)?;
            let room = DIRTY_TIMES * mib + local;
            memory::touch(room + local)?;
            let _losing = network.losing()?;
            let programs = options.paging.programs.dir();
            let stack = Stack::start_over(network, None, programs, 1, room)?;
            for is_duel in rotated([false, true], run) {
                if is_duel {
                    let orders = workload::DuelOrders {
                        mib: mib as usize,
                        warm_up: WARM_UP_TIMES * pages(local as usize),
                        faults: effort.count(FAULTS.0, FAULTS.1),
                        seed: u64::from(run) + 1,
                    };
                    duel(&stack, local, orders, report)?;
                } else {
                    write_back(&stack, local, DIRTY_TIMES * mib, bulk, report)?;
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn write_back(
    stack: &Stack,
    local: u32,
    mib: u32,
    bulk: f64,
    report: &mut Report,
) -> Result<(), BenchError> {
    let orders = workload::Orders {
        mib: mib as usize,
        untimed_mib: local as usize,
        threads: 1,
        gates: Gates::default(),
    };
    let (found, stats): (Found, _) = stack.run(PageSize::Small, local, &Orders::Dirty(orders))?;
    // Those of the whole session: what was still buffered when the time ended was not sent.
    let written = stats.pages_out as f64 / found.absent.max(1) as f64;
    let rate = found.evicted as f64 * PAGE as f64 / found.seconds / 1e6;
    let share = found.evicted as f64 / found.dirtied as f64;
    report.figure("write-back", "MB/s", rate);
    report.figure("pages evicted / dirtied in the time", "x", share);
    report.figure("pages written / evicted, whole session", "x", written);
    report.judged("write-back / bulk", "x", rate / bulk, Some(Target::AtLeast(OF_BULK_MIN)));
    let text = if share < EVICTED_MIN {
        format!("only {share:.2} of the pages dirtied were evicted in the time")
    } else if written < WRITTEN_MIN {
        format!("only {written:.2} of the pages evicted were written")
    } else {
        return Ok(());
    };
    Err(BenchError::Refused(text))
}

fn duel(
    stack: &Stack,
    local: u32,
    orders: workload::DuelOrders,
    report: &mut Report,
) -> Result<(), BenchError> {
    let faults = orders.faults;
    let (found, stats): (DuelFound, _) =
        stack.run(PageSize::Small, local, &Orders::Duel(orders))?;
    let idle = Samples::from_counts(&found.idle)?.latency();
    let evicting = Samples::from_counts(&found.evicting)?.latency();
    report.latency("remote fault, no eviction of dirty pages", idle);
    report.latency("remote fault, another thread dirties", evicting);
    let target = Some(Target::AtMost(P99_MAX));
    report.judged("p99 while evicting / idle", "x", evicting.p99 / idle.p99, target);
    report.figure("p50 while evicting / idle", "x", evicting.p50 / idle.p50);
    let rate = (found.dirtied * PAGE) as f64 / found.seconds / 1e6;
    report.figure("dirtied beside the faults", "MB/s", rate);
    report.figure("faults met by the write-back buffer", "%", second_percent(&stats));
    // Whoever keeps the other thread from dirtying has nothing to evict.
    if found.dirtied < faults {
        let text = format!("only {} pages were dirtied beside {faults} faults", found.dirtied);
        return Err(BenchError::Refused(text));
    }
    Ok(())
}
