//! The programs which run under gms: this program again, as `gms-bench workload`. What to do is told as JSON, what was found is
//! written as JSON.

pub(crate) mod bfs;
pub(crate) mod dirty;
pub(crate) mod fault;
pub(crate) mod fill;
mod pen;
pub(crate) mod scan;
pub(crate) mod shape;
pub(crate) mod sleep;
pub(crate) mod sort;
mod touch;
mod walk;

use std::ffi::OsString;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use gms_tests::{Dice, mix};
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::error::{BenchError, Trying};
use crate::region::{PAGE, Region, WORDS, pages};

/// Bit of a pagemap entry: the page is in memory.
const PRESENT: u64 = 1 << 63;

/// What a workload shall do.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Orders {
    /// Touch random absent pages.
    Fault(fault::Orders),
    /// Read all pages in order.
    Scan(scan::Orders),
    /// Sort numbers.
    Sort(sort::Orders),
    /// Sleep, with memory of which most is away.
    Sleep(sleep::Orders),
    /// Search a graph.
    Bfs(bfs::Orders),
    /// Dirty fresh memory.
    Dirty(dirty::Orders),
    /// Touch random absent pages while another thread dirties fresh memory.
    Duel(dirty::DuelOrders),
    /// Fill memory at a pace.
    Fill(fill::Orders),
    /// Have many threads, mappings, processes or pages.
    Shape(shape::Orders),
}

impl Orders {
    /// The command which follows them and writes what it finds to `found`.
    pub(crate) fn command(&self, found: &Path) -> Result<Vec<OsString>, BenchError> {
        let own = std::env::current_exe().trying("cannot find gms-bench")?;
        let orders = serde_json::to_string(self).map_err(|e| BenchError::Invalid(e.to_string()))?;
        Ok(vec![own.into(), "workload".into(), orders.into(), found.into()])
    }
}

/// `gms-bench workload ORDERS FOUND`.
pub(crate) fn run(orders: &str, found: &Path) -> Result<(), BenchError> {
    let orders = serde_json::from_str(orders);
    match orders.map_err(|error| BenchError::Invalid(format!("orders: {error}")))? {
        Orders::Fault(orders) => write(&fault::run(&orders)?, found),
        Orders::Scan(orders) => write(&scan::run(&orders)?, found),
        Orders::Sort(orders) => write(&sort::run(orders)?, found),
        Orders::Sleep(orders) => write(&sleep::run(&orders)?, found),
        Orders::Bfs(orders) => write(&bfs::run(&orders)?, found),
        Orders::Dirty(orders) => write(&dirty::run(&orders)?, found),
        Orders::Duel(orders) => write(&dirty::duel(&orders)?, found),
        Orders::Fill(orders) => write(&fill::run(&orders)?, found),
        Orders::Shape(orders) => write(&shape::run(&orders)?, found),
    }
}

fn write(found: &impl Serialize, to: &Path) -> Result<(), BenchError> {
    let text = serde_json::to_string(found).map_err(|e| BenchError::Invalid(e.to_string()))?;
    fs::write(to, text).trying("cannot write what was found")
}

/// A memory of which one page in so many is absent is paged.
const PAGED_SHARE: usize = 8;
/// Reads between two looks whether it is.
const PAGED_READS: usize = 64;
/// The longest that gms may take to page a program.
const PAGED_WITHIN: Duration = Duration::from_secs(10);

/// Memory whose words are all different, and which tells what of it is absent.
pub(crate) struct Memory {
    region: Region,
    pagemap: File,
}

impl Memory {
    /// Of `mib` MiB, every word written.
    pub(crate) fn filled(mib: usize) -> Result<Memory, BenchError> {
        let region = Region::new(pages(mib))?;
        for page in 0..region.pages() {
            (0..WORDS).for_each(|word| region.store(page, word, pattern(page, word)));
        }
        Memory::of(region)
    }

    /// As `region` is.
    pub(crate) fn of(region: Region) -> Result<Memory, BenchError> {
        let pagemap = File::open("/proc/self/pagemap").trying("cannot open the pagemap")?;
        Ok(Memory { region, pagemap })
    }

    /// The same, and read until some of it is absent: a small memory is filled before gms has looked at it once.
    pub(crate) fn paged(mib: usize) -> Result<Memory, BenchError> {
        let memory = Memory::filled(mib)?;
        let (began, mut dice) = (Instant::now(), Dice::of_thread(1, 0));
        loop {
            let absent = memory.absent(0, memory.pages())?.iter().filter(|one| **one).count();
            if absent >= memory.pages() / PAGED_SHARE {
                return Ok(memory);
            }
            if began.elapsed() > PAGED_WITHIN {
                return Err(BenchError::Invalid("the memory is not paged".into()));
            }
            // At random, so that nothing is fetched ahead.
            (0..PAGED_READS).try_for_each(|_| memory.check_word(dice.place(memory.pages()), 0))?;
        }
    }

    /// Pages.
    pub(crate) fn pages(&self) -> usize {
        self.region.pages()
    }

    /// Reads a word: the access that is measured.
    pub(crate) fn load(&self, page: usize, word: usize) -> u64 {
        self.region.load(page, word)
    }

    /// Address of a page.
    pub(crate) fn address(&self, page: usize) -> u64 {
        self.region.word(page, 0) as u64
    }

    /// Writes a word. No other thread uses it.
    pub(crate) fn store(&self, page: usize, word: usize, value: u64) {
        self.region.store(page, word, value);
    }

    /// Whether a page is absent now.
    pub(crate) fn is_absent(&self, page: usize) -> Result<bool, BenchError> {
        Ok(self.absent(page, 1)?[0])
    }

    /// Whether each page is absent now, of `count` pages from `page` on.
    pub(crate) fn absent(&self, page: usize, count: usize) -> Result<Vec<bool>, BenchError> {
        let first = self.region.start() as usize / PAGE + page;
        let mut entries = vec![0; count * size_of::<u64>()];
        let read = self.pagemap.read_exact_at(&mut entries, (first * size_of::<u64>()) as u64);
        read.trying("cannot read the pagemap")?;
        let (entries, _) = entries.as_chunks();
        Ok(entries.iter().map(|&entry| u64::from_ne_bytes(entry) & PRESENT == 0).collect())
    }

    /// Reads and checks one word.
    pub(crate) fn check_word(&self, page: usize, word: usize) -> Result<(), BenchError> {
        match self.load(page, word) == pattern(page, word) {
            true => Ok(()),
            false => Err(BenchError::WrongBytes(format!("word {word} of page {page}"))),
        }
    }
}

/// Runs `part` in this many threads, by number. All run before the first is waited for.
fn in_threads<R: Send>(
    threads: usize,
    part: impl Fn(usize) -> Result<R, BenchError> + Sync,
) -> Result<Vec<R>, BenchError> {
    std::thread::scope(|scope| {
        let part = &part;
        let spawn = |thread: usize| scope.spawn(move || part(thread));
        let running: Vec<_> = (0..threads).map(spawn).collect();
        let panicked = |_| Err(BenchError::Invalid("a thread panicked".into()));
        running.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
    })
}

/// The pages of part `n` when `pages` pages are shared out among `parts`.
fn share(pages: Range<usize>, n: usize, parts: usize) -> Range<usize> {
    let at = |n: usize| pages.start + pages.len() * n / parts;
    at(n)..at(n + 1)
}

/// CLOCK_MONOTONIC, which all programs of a machine share.
fn now_ns() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("a clock that every Linux has");
    time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64
}

/// What a word holds: different in every word, and never compressible.
fn pattern(page: usize, word: usize) -> u64 {
    mix((page * WORDS + word) as u64)
}
