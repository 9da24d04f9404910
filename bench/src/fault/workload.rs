//! The program which faults: fills memory, then touches random pages which are absent, and times each touch.
//!
//! Whether a page is absent is asked of /proc/self/pagemap just before the touch; only touches of absent pages count. Of those gms
//! may still have a few in its write-back buffer: the caller learns how many from gms's own figures.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::Barrier;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::cli::WorkloadOptions;
use crate::error::{BenchError, Trying};
use crate::region::{PAGE, Region, WORDS};
use crate::samples::Samples;

/// Bit of a pagemap entry: the page is in memory.
const PRESENT: u64 = 1 << 63;
/// Touches of resident pages in a row, after which the memory is taken not to be paged at all.
const RESIDENT_MAX: u32 = 10_000;

/// What the workload found.
#[derive(Debug, Serialize, Deserialize)]
pub struct Found {
    /// Latencies: see [`Samples::counts`].
    counts: Vec<(u64, u64)>,
    /// From the first measured fault to the last.
    pub seconds: f64,
    /// Pages that were not touched because they were resident.
    skipped: u64,
}

impl Found {
    /// The latencies.
    pub fn samples(&self) -> Result<Samples, BenchError> {
        Samples::from_counts(&self.counts)
    }

    /// Random choices which fell on resident pages, in percent.
    pub fn skipped_percent(&self) -> f64 {
        let faults: u64 = self.counts.iter().map(|(_, count)| count).sum();
        100.0 * self.skipped as f64 / (self.skipped + faults).max(1) as f64
    }
}

impl WorkloadOptions {
    /// The arguments by which gms-bench becomes this workload.
    pub fn command_line(&self) -> Vec<OsString> {
        let numbers = [
            ("--mib", self.mib as u64),
            ("--threads", self.threads as u64),
            ("--warm-up", self.warm_up as u64),
            ("--faults", self.faults as u64),
            ("--seed", self.seed),
        ];
        let mut line: Vec<OsString> = vec!["fault-workload".into()];
        for (name, value) in numbers {
            line.extend([name.into(), value.to_string().into()]);
        }
        line.extend(["--found".into(), self.found.clone().into()]);
        line
    }
}

/// `gms-bench fault-workload`.
pub fn run(options: &WorkloadOptions) -> Result<(), BenchError> {
    let region = Region::new((options.mib << 20) / PAGE)?;
    for page in 0..region.pages() {
        (0..WORDS).for_each(|word| region.store(page, word, pattern(page, word)));
    }
    let barrier = Barrier::new(options.threads);
    let all: Result<Vec<Part>, BenchError> = std::thread::scope(|scope| {
        let spawn = |thread: usize| {
            let seed = mix(options.seed ^ (thread as u64) << 32);
            let (region, barrier) = (&region, &barrier);
            scope.spawn(move || part(region, barrier, options, seed))
        };
        // All must run before the first is waited for.
        let threads: Vec<_> = (0..options.threads).map(spawn).collect();
        let panicked = |_| Err(BenchError::Invalid("a thread panicked".into()));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
    });
    let all = all?;
    let mut samples = Samples::new();
    all.iter().for_each(|part| samples.merge(&part.samples));
    let found = Found {
        counts: samples.counts(),
        seconds: all.iter().map(|part| part.seconds).fold(0.0, f64::max),
        skipped: all.iter().map(|part| part.skipped).sum(),
    };
    let text = serde_json::to_string(&found).map_err(|e| BenchError::Invalid(e.to_string()))?;
    fs::write(&options.found, text).trying("cannot write what was found")
}

struct Part {
    samples: Samples,
    seconds: f64,
    skipped: u64,
}

/// One thread's share.
fn part(
    region: &Region,
    barrier: &Barrier,
    options: &WorkloadOptions,
    seed: u64,
) -> Result<Part, BenchError> {
    let mut dice = Dice(seed);
    let pagemap = File::open("/proc/self/pagemap").trying("cannot open the pagemap")?;
    let mut part = Part { samples: Samples::new(), seconds: 0.0, skipped: 0 };
    for _ in 0..options.warm_up {
        let page = absent(region, &pagemap, &mut dice)?.0;
        check(region, page)?;
    }
    barrier.wait();
    let began = Instant::now();
    for _ in 0..options.faults {
        let (page, skipped) = absent(region, &pagemap, &mut dice)?;
        part.skipped += skipped;
        let word = dice.below(WORDS);
        let start = Instant::now();
        std::hint::black_box(region.load(page, word));
        part.samples.add(start.elapsed());
        check(region, page)?;
    }
    part.seconds = began.elapsed().as_secs_f64();
    Ok(part)
}

/// A random page which is absent, and how many were looked at before it.
fn absent(region: &Region, pagemap: &File, dice: &mut Dice) -> Result<(usize, u64), BenchError> {
    let first = region.start() as usize / PAGE;
    for skipped in 0..RESIDENT_MAX {
        let page = dice.below(region.pages());
        let mut entry = [0; size_of::<u64>()];
        let offset = ((first + page) * size_of::<u64>()) as u64;
        pagemap.read_exact_at(&mut entry, offset).trying("cannot read the pagemap")?;
        if u64::from_ne_bytes(entry) & PRESENT == 0 {
            return Ok((page, u64::from(skipped)));
        }
    }
    Err(BenchError::Invalid("the memory is not paged".into()))
}

/// Every word of a page.
fn check(region: &Region, page: usize) -> Result<(), BenchError> {
    match (0..WORDS).find(|&word| region.load(page, word) != pattern(page, word)) {
        Some(word) => Err(BenchError::WrongBytes(format!("word {word} of page {page}"))),
        None => Ok(()),
    }
}

/// What a word holds: different in every word, and never compressible.
fn pattern(page: usize, word: usize) -> u64 {
    mix((page * WORDS + word) as u64)
}

/// The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// SplitMix64.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (mix(self.0) % limit as u64) as usize
    }
}
