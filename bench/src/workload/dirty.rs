//! Dirties fresh memory as fast as it can: one word a page, so that all the rest of the time is gms's.

use std::ops::Range;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use gms_tests::Dice;
use serde::{Deserialize, Serialize};

use super::touch::Toucher;
use super::{Memory, in_threads, pattern, share};
use crate::error::BenchError;
use crate::gate::{self, Gates};
use crate::region::{Region, WORDS, pages};
use crate::samples::Samples;

/// Pages looked at in the end.
const CHECKED: usize = 256;

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Orders {
    /// Memory.
    pub mib: usize,
    /// Of it, what is dirtied before the time counts: the budget, which needs no eviction.
    pub untimed_mib: usize,
    /// Threads which dirty, each its own part.
    pub threads: usize,
    /// Where to wait.
    pub gates: Gates,
}

/// What was found.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Found {
    /// Time for all but the untimed part.
    pub seconds: f64,
    /// Pages dirtied in that time.
    pub dirtied: usize,
    /// Pages that left the program in that time.
    pub evicted: usize,
    /// Pages that were absent when it ended: each was evicted once, as none is touched twice.
    pub absent: usize,
}

/// Does it.
pub(crate) fn run(orders: &Orders) -> Result<Found, BenchError> {
    let memory = Memory::of(Region::new(pages(orders.mib))?)?;
    let untimed = pages(orders.untimed_mib).min(memory.pages());
    let absent_of = |pages: Range<usize>| -> Result<usize, BenchError> {
        Ok(memory.absent(pages.start, pages.len())?.iter().filter(|absent| **absent).count())
    };
    (0..untimed).for_each(|page| dirty(&memory.region, page));
    let (before, barrier) = (absent_of(0..untimed)?, Barrier::new(orders.threads));
    let part = |thread: usize| {
        let pages = share(untimed..memory.pages(), thread, orders.threads);
        let opened = gate::pass_together(&barrier, orders.gates.before.as_ref());
        let start = Instant::now();
        pages.for_each(|page| dirty(&memory.region, page));
        let seconds = start.elapsed().as_secs_f64();
        barrier.wait();
        let absent = absent_of(share(0..memory.pages(), thread, orders.threads));
        gate::pass_together(&barrier, orders.gates.after.as_ref())?;
        opened.and(absent).map(|absent| (seconds, absent))
    };
    let all = in_threads(orders.threads, part)?;
    let seconds = all.iter().map(|(seconds, _)| *seconds).fold(0.0, f64::max);
    let absent: usize = all.iter().map(|(_, absent)| *absent).sum();
    let mut dice = Dice::of_thread(1, 0);
    for page in (0..CHECKED).map(|_| dice.place(memory.pages())) {
        memory.check_word(page, page % WORDS)?;
    }
    let dirtied = memory.pages() - untimed;
    Ok(Found { seconds, dirtied, evicted: absent.saturating_sub(before), absent })
}

fn dirty(region: &Region, page: usize) {
    region.store(page, page % WORDS, pattern(page, page % WORDS));
}

/// What to do when one thread faults and another one dirties.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DuelOrders {
    /// Memory in which random pages are touched; as much again is dirtied, discarded, and dirtied again.
    pub mib: usize,
    /// Faults before the first are measured: enough for clean pages to have taken the place of all dirty ones.
    pub warm_up: usize,
    /// Faults measured, first alone, then beside the other thread.
    pub faults: usize,
    /// Of the order.
    pub seed: u64,
}

/// What was found of both.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct DuelFound {
    /// Latencies without the other thread: see [`Samples::counts`].
    pub idle: Vec<(u64, u64)>,
    /// Latencies beside it.
    pub evicting: Vec<(u64, u64)>,
    /// Pages dirtied meanwhile.
    pub dirtied: usize,
    /// Time which that took.
    pub seconds: f64,
}

/// Does it.
pub(crate) fn duel(orders: &DuelOrders) -> Result<DuelFound, BenchError> {
    let memory = Memory::paged(orders.mib)?;
    let mut toucher = Toucher::random(&memory, Dice::of_thread(orders.seed, 0));
    toucher.warm_up(orders.warm_up)?;
    let idle = faults(&mut toucher, orders.faults)?;
    let region = Region::new(memory.pages())?;
    let (stop, dirtied) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let dirtier = scope.spawn(|| {
            for page in (0..region.pages()).cycle() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                if page == 0 {
                    region.discard()?;
                }
                dirty(&region, page);
                dirtied.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
        let found =
            beside(&mut toucher, orders, (memory.pages(), &dirtied), || dirtier.is_finished());
        stop.store(true, Ordering::Relaxed);
        dirtier.join().unwrap_or_else(|_| Err(BenchError::Invalid("a thread panicked".into())))?;
        found.map(|found| DuelFound { idle: idle.counts(), ..found })
    })
}

/// Measures while another thread counts what it has `dirtied`, which before is half of `pages`.
fn beside(
    toucher: &mut Toucher<'_>,
    orders: &DuelOrders,
    (pages, dirtied): (usize, &AtomicUsize),
    is_over: impl Fn() -> bool,
) -> Result<DuelFound, BenchError> {
    // Until eviction is well under way.
    while dirtied.load(Ordering::Relaxed) < pages / 2 && !is_over() {
        toucher.warm_up(1)?;
    }
    let (before, start) = (dirtied.load(Ordering::Relaxed), Instant::now());
    let evicting = faults(toucher, orders.faults)?.counts();
    let dirtied = dirtied.load(Ordering::Relaxed) - before;
    Ok(DuelFound { idle: vec![], evicting, dirtied, seconds: start.elapsed().as_secs_f64() })
}

fn faults(toucher: &mut Toucher<'_>, count: usize) -> Result<Samples, BenchError> {
    let mut samples = Samples::new();
    for _ in 0..count {
        let touch = toucher.touch()?;
        samples.add(Duration::from_nanos(touch.after - touch.before));
    }
    Ok(samples)
}
