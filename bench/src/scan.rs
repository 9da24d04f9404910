//! `gms-bench scan`: reads of all pages in order through the whole stack, beside the bulk throughput of the same run.
//!
//! gms has no switch for its prefetch. "Without prefetch" is the same scan with each block of 8192 reads shuffled: nothing can be
//! foreseen, as gms's own count of pages fetched ahead shows, and all else is as in the scan.

use crate::cli::{PageSize, ScanOptions};
use crate::error::BenchError;
use crate::floor::{self, bulk::Bulk};
use crate::gate::Gates;
use crate::memory;
use crate::network::Network;
use crate::region::PAGE;
use crate::report::{Report, Target};
use crate::stack::Stack;
use crate::turn::rotated;
use crate::workload::Orders;
use crate::workload::scan::{self as workload, Found};

/// Share of the bulk throughput that a scan should reach.
const OF_BULK_MIN: f64 = 0.6;
/// What prefetch should make of a scan.
const OF_SHUFFLED_MIN: f64 = 5.0;
/// Least share of the pages, in percent, that must have been absent: else it was no scan of remote memory.
const ABSENT_PERCENT_MIN: f64 = 50.0;

/// Measures.
pub(crate) fn run(
    options: &ScanOptions,
    network: &Network,
    report: &mut Report,
) -> Result<(), BenchError> {
    let (local, mib) = options.paging.mib(&options.effort, 64);
    for run in 0..options.effort.runs() {
        report.run("a run", |report| once(options, network, (local, mib), run, report))?;
    }
    Ok(())
}

/// Both scans once.
fn once(
    options: &ScanOptions,
    network: &Network,
    (local, mib): (u32, u32),
    run: u32,
    report: &mut Report,
) -> Result<(), BenchError> {
    let bulk = floor::bulk(network, &options.effort, Bulk::Get, report)?;
    memory::touch(local + local + mib)?;
    let _losing = network.losing()?;
    let programs = options.paging.programs.dir();
    let stack = Stack::start_over(network, None, programs, 1, local + mib)?;
    let stride = options.stride as usize;
    let (mut in_order, mut random) = (0.0, 0.0);
    for shuffled in rotated([false, true], run) {
        let suffix = if shuffled { ", shuffled" } else { "" };
        let name = format!("scan, stride {stride}{suffix}");
        let orders = workload::Orders {
            mib: mib as usize,
            threads: 1,
            stride,
            shuffled,
            gates: Gates::default(),
        };
        let (found, stats): (Found, _) =
            stack.run(PageSize::Small, local, &Orders::Scan(orders))?;
        // Pages that were there already were read in the same time, but needed no scan.
        let rate = (found.absent * PAGE) as f64 / found.seconds / 1e6;
        let absent = 100.0 * found.absent as f64 / found.pages as f64;
        let ahead = 100.0 * stats.prefetched as f64 / stats.pages_in.max(1) as f64;
        report.figure(&name, "MB/s", rate);
        report.figure(&format!("{name}: absent"), "%", absent);
        report.figure(&format!("{name}: fetched ahead"), "%", ahead);
        if absent < ABSENT_PERCENT_MIN {
            let text = format!("{name}: only {absent:.0} % of the pages were absent");
            return Err(BenchError::Refused(text));
        }
        *(if shuffled { &mut random } else { &mut in_order }) = rate;
    }
    // The targets are for scans of one page after the other.
    let judged = |least| (stride == 1).then_some(Target::AtLeast(least));
    report.judged("scan / bulk", "x", in_order / bulk, judged(OF_BULK_MIN));
    let target = judged(OF_SHUFFLED_MIN);
    report.judged("scan with / without prefetch", "x", in_order / random, target);
    Ok(())
}
