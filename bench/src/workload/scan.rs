//! Fills memory, then reads all of it page by page, in order or shuffled.

use std::time::{Duration, Instant};

use gms_tests::Dice;
use serde::{Deserialize, Serialize};

use super::Memory;
use crate::error::BenchError;
use crate::region::WORDS;

/// Reads between two looks at what is absent, which are not timed.
const BLOCK: usize = 8192;
/// Words of a page that are read: each names its page.
const CHECKED: usize = 8;

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Orders {
    /// Memory.
    pub mib: usize,
    /// Pages from one read to the next; when the end is reached the scan begins again one page further, until all have been read.
    pub stride: usize,
    /// Shuffles each [`BLOCK`] of the order, so that no two distances of reads follow a trend and nothing can be fetched ahead.
    pub shuffled: bool,
}

/// What was found in the second pass; the first one is to warm up.
#[derive(Debug, Serialize, Deserialize)]
pub struct Found {
    /// Pages read.
    pub pages: usize,
    /// Of these, how many were absent at the beginning of their block.
    pub absent: usize,
    /// Time which that took.
    pub seconds: f64,
}

/// Does it.
pub fn run(orders: &Orders) -> Result<Found, BenchError> {
    let memory = Memory::paged(orders.mib)?;
    let order = order(memory.pages(), orders);
    pass(&memory, &order)?;
    pass(&memory, &order)
}

fn order(pages: usize, orders: &Orders) -> Vec<usize> {
    let stride = orders.stride.clamp(1, pages);
    let mut order: Vec<usize> =
        (0..stride).flat_map(|first| (first..pages).step_by(stride)).collect();
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
            let mut pages = order(3000, &Orders { mib: 0, stride, shuffled });
            assert_eq!(pages[1] - pages[0] == stride, !shuffled, "stride {stride}");
            pages.sort_unstable();
            assert!(pages.into_iter().eq(0..3000), "stride {stride}, shuffled {shuffled}");
        }
    }
}
