//! Fills memory, then touches random pages which are absent, and times each touch.
//!
//! Whether a page is absent is asked of /proc/self/pagemap just before the touch; only touches of absent pages count. Of those gms
//! may still have a few in its write-back buffer: the caller learns how many from gms's own figures.

use std::path::PathBuf;
use std::sync::Barrier;
use std::time::Instant;

use nix::sys::resource::{UsageWho, getrusage};
use serde::{Deserialize, Serialize};

use super::{Dice, Memory};
use crate::error::{BenchError, Trying};
use crate::gate;
use crate::region::WORDS;
use crate::samples::Samples;

/// Touches of resident pages in a row, after which the memory is taken not to be paged at all.
const RESIDENT_MAX: u32 = 10_000;

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Orders {
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
    /// Where to wait before it is measured: see [`gate`].
    pub gate: Option<PathBuf>,
}

/// How long to go on.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Measured {
    /// For so many faults.
    Faults(u64),
    /// For this time.
    Seconds(f64),
}

impl Measured {
    fn is_over(self, faults: u64, began: Instant) -> bool {
        match self {
            Measured::Faults(most) => faults >= most,
            Measured::Seconds(most) => began.elapsed().as_secs_f64() >= most,
        }
    }
}

/// What the workload found.
#[derive(Debug, Serialize, Deserialize)]
pub struct Found {
    /// Latencies: see [`Samples::counts`].
    counts: Vec<(u64, u64)>,
    /// From the first measured fault to the last.
    pub seconds: f64,
    /// Pages that were not touched because they were resident.
    skipped: u64,
    /// Measured faults for which the kernel had to read from a device: those of swap.
    #[serde(default)]
    major: u64,
}

impl Found {
    /// The latencies.
    pub fn samples(&self) -> Result<Samples, BenchError> {
        Samples::from_counts(&self.counts)
    }

    /// Faults that were measured.
    pub fn faults(&self) -> u64 {
        self.counts.iter().map(|(_, count)| count).sum()
    }

    /// Measured faults for which the kernel had to read from a device, in percent.
    pub fn major_percent(&self) -> f64 {
        100.0 * self.major as f64 / self.faults().max(1) as f64
    }

    /// Random choices which fell on resident pages, in percent.
    pub fn skipped_percent(&self) -> f64 {
        100.0 * self.skipped as f64 / (self.skipped + self.faults()).max(1) as f64
    }
}

/// Does it.
pub fn run(orders: &Orders) -> Result<Found, BenchError> {
    let memory = Memory::filled(orders.mib)?;
    let barrier = Barrier::new(orders.threads);
    let all: Result<Vec<Part>, BenchError> = std::thread::scope(|scope| {
        let spawn = |thread: usize| {
            let (memory, barrier) = (&memory, &barrier);
            scope.spawn(move || part(memory, barrier, orders, Dice::new(orders.seed, thread)))
        };
        // All must run before the first is waited for.
        let threads: Vec<_> = (0..orders.threads).map(spawn).collect();
        let panicked = |_| Err(BenchError::Invalid("a thread panicked".into()));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
    });
    let all = all?;
    let mut samples = Samples::new();
    all.iter().for_each(|part| samples.merge(&part.samples));
    Ok(Found {
        counts: samples.counts(),
        seconds: all.iter().map(|part| part.seconds).fold(0.0, f64::max),
        skipped: all.iter().map(|part| part.skipped).sum(),
        major: all.iter().map(|part| part.major).sum(),
    })
}

struct Part {
    samples: Samples,
    seconds: f64,
    skipped: u64,
    major: u64,
}

/// One thread's share.
fn part(
    memory: &Memory,
    barrier: &Barrier,
    orders: &Orders,
    mut dice: Dice,
) -> Result<Part, BenchError> {
    let mut part = Part { samples: Samples::new(), seconds: 0.0, skipped: 0, major: 0 };
    let warm = warm_up(memory, &mut dice, orders.warm_up);
    // Who fails comes to the barriers too: others wait there.
    let opened = match (barrier.wait().is_leader(), &orders.gate) {
        (true, Some(path)) => gate::pass(path),
        _ => Ok(()),
    };
    barrier.wait();
    warm.and(opened)?;
    let (began, major) = (Instant::now(), major_faults()?);
    let mut faults = 0;
    while !orders.measured.is_over(faults, began) {
        let (page, skipped) = absent(memory, &mut dice)?;
        part.skipped += skipped;
        touch(memory, page, &mut dice, &mut part.samples)?;
        faults += 1;
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

/// So many faults which are not timed.
pub fn warm_up(memory: &Memory, dice: &mut Dice, faults: usize) -> Result<(), BenchError> {
    (0..faults).try_for_each(|_| memory.check(absent(memory, dice)?.0))
}

/// Times the touch of one page, and checks it.
pub fn touch(
    memory: &Memory,
    page: usize,
    dice: &mut Dice,
    samples: &mut Samples,
) -> Result<(), BenchError> {
    let word = dice.below(WORDS);
    let start = Instant::now();
    std::hint::black_box(memory.load(page, word));
    samples.add(start.elapsed());
    memory.check(page)
}

/// A random page which is absent, and how many were looked at before it.
pub fn absent(memory: &Memory, dice: &mut Dice) -> Result<(usize, u64), BenchError> {
    for skipped in 0..RESIDENT_MAX {
        let page = dice.below(memory.pages());
        if memory.absent(page, 1)?[0] {
            return Ok((page, u64::from(skipped)));
        }
    }
    Err(BenchError::Invalid("the memory is not paged".into()))
}
