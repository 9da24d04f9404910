//! Which resident pages go out: CLOCK over the address order (Corbató, "A paging experiment with the Multics
//! system", 1968).
//!
//! No accessed bit can be read from outside a workload. What is seen is a page which came back: it faulted
//! soon after its eviction, or it was touched while it still sat in the write-back buffer (a second chance). That
//! sets the page's reference; the hand clears it instead of evicting the page when it next comes by. A page
//! which never came back goes out when the hand first meets it.

use crate::ids::{PageAddr, SpaceId};
use crate::limits::{CLOCK_SLOTS_MAX, CLOCK_SLOTS_MIN, CLOCK_WAYS, FRAME_BYTES};
use std::ops::Range;

/// An order of eviction. The driver owns the hand: it sets it down anywhere in the present pages, so that a program which
/// reads its memory over and over does not meet a hand that evicts just what is read next, and offers them from there in
/// windows of up to [`SCAN_WINDOW_MAX`](crate::limits::SCAN_WINDOW_MAX).
pub trait Eviction {
    /// The page was used: it came back soon after it had been chosen. (A page which comes back after more than
    /// a lap of the hand tells nothing: a scan of everything would mark everything.)
    fn referenced(&mut self, page: (SpaceId, PageAddr));

    /// Appends those pages of `window` to `out` which should go out now. Every page of a window that is
    /// passed over is chosen when it is next offered, unless it has been referenced in between; so a second
    /// lap always yields victims.
    fn pick(&mut self, window: &[(SpaceId, PageAddr)], out: &mut Vec<(SpaceId, PageAddr)>);

    /// The addresses `range` of `space` are gone (unmapped, discarded, or the space has ended).
    fn forget(&mut self, space: SpaceId, range: Range<PageAddr>);
}

/// The clock: a bounded set of references, 8 bytes each, in sets of [`CLOCK_WAYS`].
///
/// A set which is full forgets its oldest reference: that page merely loses its second chance, so that a
/// working set beyond the bound turns CLOCK into FIFO and breaks nothing.
#[derive(Clone, Debug)]
pub struct Clock {
    /// Each set is in order of age, youngest first; zero is an empty slot.
    slots: Box<[u64]>,
}

impl Clock {
    /// A clock which remembers references of about `pages` pages (rounded up to a power of two, within the
    /// bounds), at 8 bytes each.
    pub fn new(pages: usize) -> Self {
        let slots = pages.clamp(CLOCK_SLOTS_MIN, CLOCK_SLOTS_MAX).next_power_of_two();
        Self { slots: vec![0; slots].into_boxed_slice() }
    }

    fn set(&mut self, key: u64) -> &mut [u64] {
        let sets = self.slots.len() / CLOCK_WAYS;
        // Fibonacci hashing (Knuth, vol. 3, 6.4): its high bits are the well-mixed ones.
        let index = (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize & (sets - 1);
        &mut self.slots[index * CLOCK_WAYS..(index + 1) * CLOCK_WAYS]
    }

    /// Removes the reference; returns whether there was one.
    fn take(&mut self, key: u64) -> bool {
        let set = self.set(key);
        let Some(at) = set.iter().position(|&slot| slot == key) else { return false };
        set[at..].rotate_left(1);
        set[CLOCK_WAYS - 1] = 0;
        true
    }
}

/// Packs a page in 63 bits: 45 of page number (57-bit addresses), 18 of space, never zero. Spaces which are
/// equal in those 18 bits share references, which costs a second chance and nothing else.
fn key((space, page): (SpaceId, PageAddr)) -> u64 {
    space_bits(space) | ((page.get() / FRAME_BYTES) & ((1 << 45) - 1))
}

fn space_bits(space: SpaceId) -> u64 {
    1 << 63 | (u64::from(space.0) & 0x3FFFF) << 45
}

impl Eviction for Clock {
    fn referenced(&mut self, page: (SpaceId, PageAddr)) {
        let key = key(page);
        let set = self.set(key);
        let at = set.iter().position(|&slot| slot == key || slot == 0).unwrap_or(CLOCK_WAYS - 1);
        set[..=at].rotate_right(1);
        set[0] = key;
    }

    fn pick(&mut self, window: &[(SpaceId, PageAddr)], out: &mut Vec<(SpaceId, PageAddr)>) {
        out.extend(window.iter().copied().filter(|&page| !self.take(key(page))));
    }

    fn forget(&mut self, space: SpaceId, range: Range<PageAddr>) {
        let pages = range.end.get().saturating_sub(range.start.get()) / FRAME_BYTES;
        if pages <= self.slots.len() as u64 / 4 {
            for page in 0..pages {
                self.take(key((
                    space,
                    PageAddr::containing(range.start.get() + page * FRAME_BYTES),
                )));
            }
            return;
        }
        let first = key((space, range.start));
        let last = space_bits(space)
            | (range.end.get().saturating_sub(1) / FRAME_BYTES).min((1 << 45) - 1);
        for set in self.slots.chunks_exact_mut(CLOCK_WAYS) {
            let mut kept = 0;
            for at in 0..CLOCK_WAYS {
                if set[at] != 0 && !(first..=last).contains(&set[at]) {
                    set[kept] = set[at];
                    kept += 1;
                }
            }
            set[kept..].fill(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeSet, HashSet, VecDeque};

    fn page(space: u32, number: u64) -> (SpaceId, PageAddr) {
        (SpaceId(space), PageAddr::containing(number * FRAME_BYTES))
    }

    fn picked(clock: &mut Clock, window: &[(SpaceId, PageAddr)]) -> Vec<(SpaceId, PageAddr)> {
        let mut out = Vec::new();
        clock.pick(window, &mut out);
        out
    }

    #[test]
    fn a_lap_of_referenced_pages_yields_them_on_the_next() {
        let mut clock = Clock::new(1 << 16);
        let window: Vec<_> = (0..4096).map(|n| page(1, n)).collect();
        window.iter().for_each(|&p| clock.referenced(p));
        let first: usize = window.chunks(512).map(|w| picked(&mut clock, w).len()).sum();
        assert!(first < 100, "sets overflow rarely at a sixteenth of the capacity: {first}");
        assert_eq!(picked(&mut clock, &window), window);
    }

    #[test]
    fn beyond_the_bound_pages_only_lose_their_second_chance() {
        let mut clock = Clock::new(0);
        let window: Vec<_> = (0..100_000).map(|n| page(1, n)).collect();
        window.iter().for_each(|&p| clock.referenced(p));
        let skipped = window.len() - picked(&mut clock, &window).len();
        assert!(skipped > CLOCK_SLOTS_MIN / 2 && skipped <= CLOCK_SLOTS_MIN, "{skipped}");
    }

    /// Every other use is of 100 hot pages, the rest scan 1100 cold ones; 600 of the 1200 are resident, and an
    /// evicted page can be had back from a write-back buffer of 200. Returns how often hot pages went out.
    fn hot_evictions(clock: &mut Clock, second_chances: bool) -> u32 {
        let (mut resident, mut buffer) = (BTreeSet::new(), VecDeque::new());
        let (mut hand, mut evictions) = (0, 0);
        for step in 0..200_000u64 {
            let number = if step % 2 == 0 { step / 2 % 100 } else { 100 + step / 2 % 1100 };
            resident.insert(number);
            if let Some(at) = buffer.iter().position(|&n| n == number) {
                buffer.remove(at);
                if second_chances {
                    clock.referenced(page(0, number));
                }
            }
            while resident.len() > 600 {
                let window: Vec<_> = resident.range(hand..).take(64).map(|&n| page(0, n)).collect();
                hand = window.last().map_or(0, |p| p.1.get() / FRAME_BYTES + 1);
                for (_, gone) in picked(clock, &window) {
                    resident.remove(&(gone.get() / FRAME_BYTES));
                    evictions += u32::from(gone.get() / FRAME_BYTES < 100);
                    buffer.push_back(gone.get() / FRAME_BYTES);
                }
                buffer.drain(..buffer.len().saturating_sub(200));
            }
        }
        evictions
    }

    #[test]
    fn second_chances_keep_the_pages_in_use() {
        let fifo = hot_evictions(&mut Clock::new(1 << 14), false);
        let clock = hot_evictions(&mut Clock::new(1 << 14), true);
        assert!(3 * clock < 2 * fifo, "{clock} evictions, {fifo} without second chances");
    }

    #[derive(Clone, Debug)]
    enum Op {
        Reference(u32, u64),
        Pick(u32, u64, u64),
        Forget(u32, u64, u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (0..3u32, 0..64u64).prop_map(|(s, n)| Op::Reference(s, n)),
            (0..3u32, 0..64u64, 0..32u64).prop_map(|(s, n, len)| Op::Pick(s, n, len)),
            (0..3u32, 0..64u64, prop_oneof![0..32u64, Just(1 << 40)])
                .prop_map(|(s, n, len)| Op::Forget(s, n, len)),
        ]
    }

    proptest! {
        /// Well below its capacity the clock is exactly a set of references.
        #[test]
        fn equals_a_set(ops in prop::collection::vec(op(), 0..200)) {
            let (mut clock, mut oracle) = (Clock::new(1 << 16), HashSet::new());
            for op in ops {
                match op {
                    Op::Reference(s, n) => {
                        clock.referenced(page(s, n));
                        oracle.insert(page(s, n));
                    }
                    Op::Pick(s, n, len) => {
                        let window: Vec<_> = (n..n + len).map(|n| page(s, n)).collect();
                        let expected: Vec<_> =
                            window.iter().copied().filter(|p| !oracle.remove(p)).collect();
                        prop_assert_eq!(picked(&mut clock, &window), expected);
                    }
                    Op::Forget(s, n, len) => {
                        clock.forget(SpaceId(s), page(s, n).1..page(s, n + len).1);
                        oracle.retain(|p| p.0.0 != s || !(n..n + len).contains(&(p.1.get() / FRAME_BYTES)));
                    }
                }
            }
        }
    }
}
