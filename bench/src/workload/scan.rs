//! Fills memory, then reads all of it page by page, in order or shuffled.

use std::ops::Range;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use gms_tests::Dice;
use serde::{Deserialize, Serialize};

use super::{Memory, in_threads, share};
use crate::error::BenchError;
use crate::gate::{self, Gates};
use crate::region::WORDS;

/// Reads between two looks at what is absent, which are not timed.
const BLOCK: usize = 8192;
/// Words of a page that are read: each names its page.
const CHECKED: usize = 8;

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Orders {
    /// Memory.
    pub mib: usize,
    /// Threads which read, each its own part.
    pub threads: usize,
    /// Pages from one read to the next; when the end is reached the scan begins again one page further, until all have been read.
    pub stride: usize,
    /// Shuffles each [`BLOCK`] of the order, so that no two distances of reads follow a trend and nothing can be fetched ahead.
    pub shuffled: bool,
    /// Where to wait.
    pub gates: Gates,
}

/// What was found in the second pass; the first one is to warm up.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Found {
    /// Pages read.
    pub pages: usize,
    /// Of these, how many were absent at the beginning of their block.
    pub absent: usize,
    /// Time which that took.
    pub seconds: f64,
}

/// Does it.
pub(crate) fn run(orders: &Orders) -> Result<Found, BenchError> {
    let (memory, barrier) = (Memory::paged(orders.mib)?, Barrier::new(orders.threads));
    let part = |thread: usize| {
        let pages = share(0..memory.pages(), thread, orders.threads);
        let order = order(pages, orders);
        let warm = pass(&memory, &order);
        let opened = gate::pass_together(&barrier, orders.gates.before.as_ref());
        let found = warm.and(opened).and_then(|()| pass(&memory, &order));
        gate::pass_together(&barrier, orders.gates.after.as_ref())?;
        found
    };
    let all = in_threads(orders.threads, part)?;
    Ok(Found {
        pages: all.iter().map(|part| part.pages).sum(),
        absent: all.iter().map(|part| part.absent).sum(),
        seconds: all.iter().map(|part| part.seconds).fold(0.0, f64::max),
    })
}

fn order(pages: Range<usize>, orders: &Orders) -> Vec<usize> {
    let stride = orders.stride.clamp(1, pages.len().max(1));
    let from = |first: usize| (pages.start + first..pages.end).step_by(stride);
    let mut order: Vec<usize> = (0..stride).flat_map(from).collect();
    if orders.shuffled {
        let mut dice = Dice::of_thread(1, 0);
        order.chunks_mut(BLOCK).for_each(|block| dice.shuffle(block));
    }
    order
}

fn pass(memory: &Memory, order: &[usize]) -> Result<Found, BenchError> {
    let (mut absent, mut took) = (0, Duration::ZERO);
    for block in order.chunks(BLOCK) {
        let first = block.iter().copied().min().unwrap_or(0);
        let last = block.iter().copied().max().unwrap_or(0);
        let map = memory.absent(first, last - first + 1)?;
        absent += block.iter().filter(|&page| map[page - first]).count();
        let start = Instant::now();
        for &page in block {
            (0..CHECKED).try_for_each(|n| memory.check_word(page, n * WORDS / CHECKED))?;
        }
        took += start.elapsed();
    }
    Ok(Found { pages: order.len(), absent, seconds: took.as_secs_f64() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_is_read_once() {
        for (stride, shuffled) in [(1, false), (7, false), (1, true), (7, true)] {
            let orders = Orders { mib: 0, threads: 1, stride, shuffled, gates: Gates::default() };
            let mut pages = order(100..3000, &orders);
            assert_eq!(pages[1] - pages[0] == stride, !shuffled, "stride {stride}");
            pages.sort_unstable();
            assert!(pages.into_iter().eq(100..3000), "stride {stride}, shuffled {shuffled}");
        }
    }
}
