//! Fills memory, then touches pages which are absent, and times each touch.
//!
//! Whether a page is absent is asked of /proc/self/pagemap just before the touch; only touches of absent pages count. Of those gms
//! may still have a few in its write-back buffer: the caller learns how many from gms's own figures.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use gms_tests::Dice;
use nix::sys::resource::{UsageWho, getrusage};
use serde::{Deserialize, Serialize};

use super::pen::Pen;
use super::touch::{Touch, Toucher};
use super::walk::Walk;
use super::{Memory, in_threads};
use crate::error::{BenchError, Trying};
use crate::gate::{self, Gates};
use crate::placement::Pinned;
use crate::samples::Samples;

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Orders {
    /// Memory.
    pub mib: usize,
    /// Threads which fault.
    pub threads: usize,
    /// Faults of each thread before it measures.
    pub warm_up: usize,
    /// How much each thread measures.
    pub measured: Measured,
    /// Of the order.
    pub seed: u64,
    /// Where to wait.
    pub gates: Gates,
    /// How pages are touched.
    pub manner: Manner,
}

/// How pages are touched: unless told otherwise reads of random pages, where the scheduler likes.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Manner {
    /// Pages from one touch to the next.
    pub stride: Option<usize>,
    /// Share of the touches that write.
    pub writes_percent: usize,
    /// CPU on which the threads stay.
    pub cpu: Option<usize>,
    /// Whether the times of each measured fault are handed over.
    pub stamped: bool,
}

/// One measured fault. Times are CLOCK_MONOTONIC in ns.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Stamp {
    /// Address of the page.
    pub page: u64,
    /// Just before the touch.
    pub before: u64,
    /// Just after it.
    pub after: u64,
}

/// How long to go on.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Measured {
    /// For so many touches of pages that were absent when they were chosen.
    Faults(u64),
    /// For this time.
    Seconds(f64),
}

impl Measured {
    fn is_over(self, touches: u64, began: Instant) -> bool {
        match self {
            Measured::Faults(most) => touches >= most,
            Measured::Seconds(most) => began.elapsed().as_secs_f64() >= most,
        }
    }
}

/// What the workload found. Latencies: see [`Samples::counts`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Found {
    /// Of faults that read.
    reads: Vec<(u64, u64)>,
    /// Of faults that wrote.
    writes: Vec<(u64, u64)>,
    /// Of touches of pages that were fetched ahead meanwhile, so that they were no faults.
    early: Vec<(u64, u64)>,
    /// From the first measured fault to the last.
    pub seconds: f64,
    /// Pages that were not touched because they were resident.
    skipped: u64,
    /// Measured faults for which the kernel had to read from a device: those of swap.
    #[serde(default)]
    major: u64,
    /// Each measured fault, where that was asked for.
    pub stamps: Vec<Stamp>,
}

impl Found {
    /// Latencies of all faults.
    pub(crate) fn samples(&self) -> Result<Samples, BenchError> {
        let mut samples = self.reads()?;
        samples.merge(&self.writes()?);
        Ok(samples)
    }

    /// Latencies of faults that read.
    pub(crate) fn reads(&self) -> Result<Samples, BenchError> {
        Samples::from_counts(&self.reads)
    }

    /// Latencies of faults that wrote.
    pub(crate) fn writes(&self) -> Result<Samples, BenchError> {
        Samples::from_counts(&self.writes)
    }

    /// Latencies of all touches, whether they were faults or the pages had been fetched ahead.
    pub(crate) fn touches(&self) -> Result<Samples, BenchError> {
        let mut samples = self.samples()?;
        samples.merge(&Samples::from_counts(&self.early)?);
        Ok(samples)
    }

    /// Faults that were measured.
    pub(crate) fn faults(&self) -> u64 {
        total(&self.reads) + total(&self.writes)
    }

    /// Touches of pages that had been fetched ahead, in percent of all measured touches.
    pub(crate) fn early_percent(&self) -> f64 {
        let early = total(&self.early);
        100.0 * early as f64 / (early + self.faults()).max(1) as f64
    }

    /// Measured faults for which the kernel had to read from a device, in percent.
    pub(crate) fn major_percent(&self) -> f64 {
        100.0 * self.major as f64 / self.faults().max(1) as f64
    }

    /// Choices which fell on resident pages, in percent.
    pub(crate) fn skipped_percent(&self) -> f64 {
        let touched = self.faults() + total(&self.early);
        100.0 * self.skipped as f64 / (self.skipped + touched).max(1) as f64
    }
}

fn total(counts: &[(u64, u64)]) -> u64 {
    counts.iter().map(|(_, count)| count).sum()
}

/// Does it.
pub(crate) fn run(orders: &Orders) -> Result<Found, BenchError> {
    let memory = Memory::paged(orders.mib)?;
    let barrier = Barrier::new(orders.threads);
    let all = in_threads(orders.threads, |thread| part(&memory, &barrier, orders, thread))?;
    let merged = |of: fn(&Part) -> &Samples| {
        let mut samples = Samples::new();
        all.iter().for_each(|part| samples.merge(of(part)));
        samples.counts()
    };
    Ok(Found {
        reads: merged(|part| &part.reads),
        writes: merged(|part| &part.writes),
        early: merged(|part| &part.early),
        seconds: all.iter().map(|part| part.seconds).fold(0.0, f64::max),
        skipped: all.iter().map(|part| part.skipped).sum(),
        major: all.iter().map(|part| part.major).sum(),
        stamps: all.into_iter().flat_map(|part| part.stamps).collect(),
    })
}

/// What one thread found.
struct Part {
    reads: Samples,
    writes: Samples,
    early: Samples,
    seconds: f64,
    skipped: u64,
    major: u64,
    stamps: Vec<Stamp>,
}

impl Part {
    fn new() -> Part {
        let (reads, writes, early) = (Samples::new(), Samples::new(), Samples::new());
        Part { reads, writes, early, seconds: 0.0, skipped: 0, major: 0, stamps: Vec::new() }
    }

    fn count(&mut self, touch: &Touch) {
        let samples = match (touch.step.absent, touch.wrote) {
            (false, _) => &mut self.early,
            (true, true) => &mut self.writes,
            (true, false) => &mut self.reads,
        };
        samples.add(Duration::from_nanos(touch.after - touch.before));
        self.skipped += touch.step.skipped;
    }
}

/// One thread's share.
fn part(
    memory: &Memory,
    barrier: &Barrier,
    orders: &Orders,
    thread: usize,
) -> Result<Part, BenchError> {
    let (manner, of) = (orders.manner, (thread, orders.threads));
    let pinned = Pinned::to(manner.cpu);
    let walk = Walk::new(manner.stride, memory.pages(), of);
    let pen = Pen::new(manner.writes_percent, memory.pages(), of);
    let mut toucher = Toucher::new(memory, Dice::of_thread(orders.seed, thread), walk, pen);
    let warm = toucher.warm_up(orders.warm_up);
    // Who fails comes to the barriers too: others wait there.
    let opened = gate::pass_together(barrier, orders.gates.before.as_ref());
    let measured =
        warm.and(opened).and(pinned).and_then(|_pinned| measure(&mut toucher, orders, memory));
    gate::pass_together(barrier, orders.gates.after.as_ref())?;
    let part = measured?;
    toucher.check_all()?;
    Ok(part)
}

fn measure(
    toucher: &mut Toucher<'_>,
    orders: &Orders,
    memory: &Memory,
) -> Result<Part, BenchError> {
    let mut part = Part::new();
    let (began, major) = (Instant::now(), major_faults()?);
    let mut touches = 0;
    while !orders.measured.is_over(touches, began) {
        let touch = toucher.touch()?;
        part.count(&touch);
        if orders.manner.stamped && touch.step.absent {
            let page = memory.address(touch.step.page);
            part.stamps.push(Stamp { page, before: touch.before, after: touch.after });
        }
        touches += 1;
    }
    part.seconds = began.elapsed().as_secs_f64();
    part.major = major_faults()? - major;
    Ok(part)
}

/// Of the calling thread, so far.
fn major_faults() -> Result<u64, BenchError> {
    let usage = getrusage(UsageWho::RUSAGE_THREAD).trying("no usage of resources")?;
    Ok(usage.major_page_faults() as u64)
}
