//! `gms-bench floor`: the least that the parts of a remote fault cost on this machine.

pub(crate) mod bulk;
pub(crate) mod cpu;
pub(crate) mod kernel;
mod pages;
pub(crate) mod quic;
pub(crate) mod quinn;
pub(crate) mod serve;
pub(crate) mod udp;
pub(crate) mod uffd;
mod wake;

use crate::cli::{Effort, Protocol};
use crate::error::BenchError;
use crate::network::Network;
use crate::placement::{Placement, Wait, placements};
use crate::report::Report;
use crate::scratch::Scratch;
use crate::turn::rotated;
use bulk::Bulk;
use uffd::{Answer, Handler};

/// Samples of each subject and run.
const COUNT: usize = 20_000;
/// The same for `--quick`.
const COUNT_QUICK: usize = 300;

/// The row of [`zero_fill`].
const ZERO_FILL: &str = "zero-fill fault, kernel";
/// Exchanges of 64 pages in each run, usual and `--quick`.
const BULK: (usize, usize) = (4000, 100);
/// Tries of which the best is the denominator of a throughput.
const BULK_TRIES: usize = 3;

/// Measures everything.
pub(crate) fn run(effort: &Effort, report: &mut Report) -> Result<(), BenchError> {
    let (count, here) = (effort.count(COUNT, COUNT_QUICK), &Network::LOOPBACK);
    let keys = Scratch::new()?;
    quic::make_keys(keys.as_ref())?;
    for run in 0..effort.runs() {
        zero_fill(effort, report)?;
        memory(run, count, report)?;
        cpu(count, report)?;
        for placement in rotated(placements()?, run) {
            for (protocol, lengths) in [(Protocol::Udp, "128/4224"), (Protocol::Udp8k, "128/8320")]
            {
                let name = format!("UDP {lengths} B, {}", placement.name);
                report.latency(&name, udp::exchanges(here, &placement, protocol, count)?.latency());
            }
        }
        for placement in rotated(placements()?, run) {
            let name = format!("QUIC 128/4224 B, {}", placement.name);
            report
                .latency(&name, quic::exchanges(here, &placement, keys.as_ref(), count)?.latency());
        }
        // Its runtime always blocks.
        let blocking = placements()?.into_iter().filter(|placement| placement.wait == Wait::Block);
        for placement in rotated(blocking, run) {
            let name = format!("QUIC by the quinn crate, 128/4224 B, {}", placement.name);
            report.latency(
                &name,
                quinn::exchanges(here, &placement, keys.as_ref(), count)?.latency(),
            );
        }
        for placement in rotated(placements()?, run) {
            for bulk in [Bulk::Get, Bulk::Put] {
                let count = effort.count(BULK.0, BULK.1);
                let rate = bulk::throughput(here, &placement, keys.as_ref(), bulk, count)?.rate;
                report.figure(&format!("{}, {}", bulk.name(), placement.name), "MB/s", rate);
            }
        }
    }
    Ok(())
}

/// Faults, and pages that are taken away.
fn memory(run: u32, count: usize, report: &mut Report) -> Result<(), BenchError> {
    for placement in rotated(placements()?, run) {
        for (answer, handler) in [
            (Answer::Copy, Handler::Thread),
            (Answer::Copy, Handler::Process),
            (Answer::Continue, Handler::Thread),
            (Answer::Move, Handler::Thread),
        ] {
            let (how, who) = (answer.name(), handler.name());
            let name = format!("uffd fault + {how}, {who}, {}", placement.name);
            report.latency(&name, uffd::faults(&placement, handler, answer, count)?.latency());
        }
    }
    report.latency("MOVE of a page, no fault", uffd::moves(count)?.latency());
    Ok(())
}

/// A fault that the kernel alone serves. As nothing but the kernel is in it, its range over the runs
/// is noise.
pub(crate) fn zero_fill(effort: &Effort, report: &mut Report) -> Result<(), BenchError> {
    let samples = kernel::zero_fill(effort.count(COUNT, COUNT_QUICK))?;
    report.latency(ZERO_FILL, samples.latency());
    report.noise(ZERO_FILL);
    Ok(())
}

/// What the CPU does, and how long it sleeps on.
fn cpu(count: usize, report: &mut Report) -> Result<(), BenchError> {
    let (seals, opens) = cpu::aead(count)?;
    report.latency("AES-128-GCM, seal 4 KiB", seals.latency());
    report.latency("AES-128-GCM, open 4 KiB", opens.latency());
    report.latency("checksum (xxh3) of 4 KiB", cpu::checksums(count).latency());
    if let Some(wakes) = wake::wakes(count)? {
        report.latency("wake of a thread on an idle CPU", wakes.latency());
    }
    Ok(())
}

/// What the transport moves over `network` at best where the scheduler likes, as it may with gms: the denominator of the throughputs. Of a few
/// tries the best, since each is short. Adds the row and returns it.
pub(crate) fn bulk(
    network: &Network,
    effort: &Effort,
    bulk: Bulk,
    report: &mut Report,
) -> Result<f64, BenchError> {
    let keys = Scratch::new()?;
    quic::make_keys(keys.as_ref())?;
    let count = effort.count(BULK.0, BULK.1);
    let mut rate = 0f64;
    for _ in 0..BULK_TRIES {
        let tried = bulk::throughput(network, &Placement::ANYWHERE, keys.as_ref(), bulk, count)?;
        rate = rate.max(tried.rate);
    }
    report.figure(&format!("floor: {}", bulk.name()), "MB/s", rate);
    // gms-transport is a part of gms: what differs without gms is had beside it.
    zero_fill(effort, report)?;
    Ok(rate)
}
