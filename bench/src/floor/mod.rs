//! `gms-bench floor`: the least that the parts of a remote fault cost on this machine.

pub mod kernel;
pub mod quic;
pub mod udp;
pub mod uffd;

use crate::cli::Effort;
use crate::error::BenchError;
use crate::placement::placements;
use crate::report::Report;
use crate::scratch::Scratch;
use uffd::Handler;

/// Samples of each subject and run.
const COUNT: usize = 20_000;
/// The same for `--quick`.
const COUNT_QUICK: usize = 300;

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
    }
    Ok(())
}
