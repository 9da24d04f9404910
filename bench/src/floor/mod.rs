//! `gms-bench floor`: the least that the parts of a remote fault cost on this machine.

pub mod bulk;
pub mod kernel;
pub mod quic;
pub mod udp;
pub mod uffd;

use crate::cli::Effort;
use crate::error::BenchError;
use crate::placement::{Placement, placements};
use crate::report::Report;
use crate::scratch::Scratch;
use bulk::Bulk;
use uffd::Handler;

/// Samples of each subject and run.
const COUNT: usize = 20_000;
/// The same for `--quick`.
const COUNT_QUICK: usize = 300;

/// Exchanges of 64 pages in each run, usual and `--quick`.
const BULK: (usize, usize) = (4000, 100);

/// Measures everything.
pub fn run(effort: &Effort, report: &mut Report) -> Result<(), BenchError> {
    let count = effort.count(COUNT, COUNT_QUICK);
    let keys = Scratch::new()?;
    quic::make_keys(keys.as_ref())?;
    for _ in 0..effort.runs() {
        report.latency("zero-fill fault, kernel", kernel::zero_fill(count)?.latency());
        for placement in placements()? {
            for handler in [Handler::Thread, Handler::Process] {
                let name = format!("uffd fault + COPY, {}, {}", handler.name(), placement.name);
                report.latency(&name, uffd::faults(&placement, handler, count)?.latency());
            }
        }
        for placement in placements()? {
            let name = format!("UDP 128/4224 B, {}", placement.name);
            report.latency(&name, udp::exchanges(&placement, count)?.latency());
        }
        for placement in placements()? {
            let name = format!("QUIC 128/4224 B, {}", placement.name);
            report.latency(&name, quic::exchanges(&placement, keys.as_ref(), count)?.latency());
        }
        for placement in placements()? {
            for bulk in [Bulk::Get, Bulk::Put] {
                let count = effort.count(BULK.0, BULK.1);
                let rate = bulk::throughput(&placement, keys.as_ref(), bulk, count)?;
                report.figure(&format!("{}, {}", bulk.name(), placement.name), "MB/s", rate);
            }
        }
    }
    Ok(())
}

/// What the transport moves at best where the scheduler likes, as it may with gms: the denominator of the throughputs. Adds the
/// row and returns it.
pub fn bulk(effort: &Effort, bulk: Bulk, report: &mut Report) -> Result<f64, BenchError> {
    let keys = Scratch::new()?;
    quic::make_keys(keys.as_ref())?;
    let count = effort.count(BULK.0, BULK.1);
    let rate = bulk::throughput(&Placement::ANYWHERE, keys.as_ref(), bulk, count)?;
    report.figure(&format!("floor: {}", bulk.name()), "MB/s", rate);
    Ok(rate)
}
