//! Which absent page a thread touches next: a random one, or the next one in strides.

use std::collections::VecDeque;

use gms_tests::Dice;

use super::Memory;
use crate::error::BenchError;

/// Resident pages in a row, after which the memory is taken not to be paged at all.
const RESIDENT_MAX: u64 = 10_000;
/// Pages of a stride that are looked at together, before the first of them is touched: gms fetches ahead only what is touched.
const BLOCK: usize = 1024;

/// An order of pages.
pub(super) enum Walk {
    /// Each as likely as the other.
    Random,
    /// One after the other.
    Strided(Stride),
}

/// See [`Walk::Strided`].
pub(super) struct Stride {
    stride: usize,
    /// Where it goes on; at the end it begins again one page further than last time.
    at: usize,
    /// What was absent of the last block and has not been touched.
    absent: VecDeque<usize>,
}

/// A page to be touched.
pub(super) struct Step {
    /// Its number.
    pub page: usize,
    /// Whether it is absent now; of a stride it was when its block was looked at.
    pub absent: bool,
    /// Resident pages that were passed over.
    pub skipped: u64,
}

impl Walk {
    /// That of thread `thread` of `threads`; without a `stride` random.
    pub(super) fn new(
        stride: Option<usize>,
        pages: usize,
        (thread, threads): (usize, usize),
    ) -> Walk {
        let at = pages / threads * thread;
        stride.map_or(Walk::Random, |stride| {
            Walk::Strided(Stride { stride, at, absent: VecDeque::new() })
        })
    }

    /// The next page.
    pub(super) fn next(&mut self, memory: &Memory, dice: &mut Dice) -> Result<Step, BenchError> {
        match self {
            Walk::Random => {
                for skipped in 0..RESIDENT_MAX {
                    let page = dice.place(memory.pages());
                    if memory.is_absent(page)? {
                        return Ok(Step { page, absent: true, skipped });
                    }
                }
            }
            Walk::Strided(stride) => {
                let mut skipped = 0;
                while skipped < RESIDENT_MAX {
                    if let Some(page) = stride.absent.pop_front() {
                        return Ok(Step { page, absent: memory.is_absent(page)?, skipped });
                    }
                    skipped += stride.look(memory)?;
                }
            }
        }
        Err(BenchError::Invalid("the memory is not paged".into()))
    }
}

impl Stride {
    /// Looks at the next block: how many pages of it are resident.
    fn look(&mut self, memory: &Memory) -> Result<u64, BenchError> {
        let mut skipped = 0;
        for _ in 0..BLOCK {
            let page = self.step(memory.pages());
            match memory.is_absent(page)? {
                true => self.absent.push_back(page),
                false => skipped += 1,
            }
        }
        Ok(skipped)
    }

    fn step(&mut self, pages: usize) -> usize {
        let page = self.at;
        self.at = match page + self.stride {
            next if next < pages => next,
            _ => (page + 1) % self.stride.min(pages),
        };
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_come_by_every_page() {
        for (stride, pages) in [(1, 10), (3, 10), (4, 8), (512, 100)] {
            let mut stride = Stride { stride, at: pages / 4, absent: VecDeque::new() };
            let mut seen: Vec<usize> = (0..2 * pages).map(|_| stride.step(pages)).collect();
            assert!(
                seen[0] == pages / 4 && (stride.stride > 4 || seen[1] == seen[0] + stride.stride)
            );
            seen.sort_unstable();
            seen.dedup();
            assert!(seen.into_iter().eq(0..pages), "stride {}", stride.stride);
        }
    }
}
