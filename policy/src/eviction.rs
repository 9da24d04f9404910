//! Which resident pages are evicted: generalized CLOCK (Smith, "Sequentiality and prefetching in database systems", 1978)
//! with refault distances (as in Linux's mm/workingset.c) in place of accessed bits, which nobody can read from outside a
//! workload.
//!
//! All of the algorithm is here; who uses it stores a [`Mark`] with each page and scans memory:
//! - [`Clock::evict`] gives a page that leaves its mark, [`Clock::refault`] one that comes back because it is used: the
//!   fewer pages left in between, the more heat it has. A page that never left, or was fetched ahead of need, has none.
//! - A [`Search`] for victims begins at a random page and looks at windows of resident pages. [`Mark::cool`] takes a degree
//!   of heat from each page with any; the pages without are the victims. After a lap of hot pages the last window goes.

use std::ops::Range;

use crate::ids::PageAddr;
use crate::limits::FRAME_BYTES;

/// What CLOCK keeps of a page. For an evicted page: the epoch in which it left; for a resident page: its heat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark(u8);

impl Mark {
    /// Bits of a mark.
    pub const BITS: u32 = 7;
    /// The mark of a resident page without heat.
    pub const COLD: Mark = Mark(0);
    /// The bits of a mark at the lowest end of a word.
    pub const MASK: u64 = (1 << Mark::BITS) - 1;

    /// The mark in the lowest [`Mark::BITS`] of a word.
    pub const fn from_bits(word: u64) -> Mark {
        Mark((word & Mark::MASK) as u8)
    }

    /// As a number below 2^[`Mark::BITS`].
    pub const fn bits(self) -> u64 {
        self.0 as u64
    }

    /// A search has met this resident page: it loses a degree of heat. False if it has none.
    pub fn cool(&mut self) -> bool {
        let hot = self.0 > 0;
        self.0 -= u8::from(hot);
        hot
    }
}

/// Epochs in which as many pages leave as the budget holds. The heat of a page is at most this.
const EPOCHS: u64 = 32;
const _: () = assert!(4 * EPOCHS == Mark::MASK + 1);

/// Counts evictions.
#[derive(Clone, Debug)]
pub struct Clock {
    evicted: u64,
    /// Evictions in an epoch.
    epoch: u64,
}

impl Clock {
    /// For a budget of this many pages.
    pub fn new(budget: u64) -> Clock {
        Clock { evicted: 0, epoch: (budget / EPOCHS).max(1) }
    }

    /// The same after so many evictions.
    pub fn after(self, evicted: u64) -> Clock {
        Clock { evicted, ..self }
    }

    /// Evictions so far.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// A page leaves: its mark while it is away.
    pub fn evict(&mut self) -> Mark {
        self.evicted += 1;
        self.now()
    }

    /// A page that left at `left` is used: its heat. That is how many times it would have been used while as many pages
    /// leave as the budget holds, so that it stays for that long. (Marks repeat after four budgets: a page that was away
    /// for longer is taken for hotter than it is.)
    pub fn refault(&self, left: Mark) -> Mark {
        let distance = self.now().0.wrapping_sub(left.0) & Mark::MASK as u8;
        Mark((EPOCHS / u64::from(distance.max(1))) as u8)
    }

    fn now(&self) -> Mark {
        Mark::from_bits(self.evicted / self.epoch)
    }
}

/// A search for victims in one address space. It begins anywhere: a hand that went round in the order of addresses would
/// go ahead of a program that reads its memory over and over, and evict just what is read next.
#[derive(Debug)]
pub struct Search {
    wrapped: bool,
}

/// What a search does next.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Look at the resident pages from this address on.
    Scan(u64),
    /// The search is over: evict these.
    Evict(Vec<PageAddr>),
}

impl Search {
    /// A search in these address ranges, each page of which is as likely to be the first; and the address to scan from.
    pub fn begin(random: u64, ranges: impl Iterator<Item = Range<u64>> + Clone) -> (Search, u64) {
        let total: u64 = ranges.clone().map(|range| range.end - range.start).sum();
        let mut at = random % total.max(1);
        let mut start = 0;
        for range in ranges {
            let length = range.end - range.start;
            if at < length {
                start = (range.start + at) / FRAME_BYTES * FRAME_BYTES;
                break;
            }
            at -= length;
        }
        (Search { wrapped: false }, start)
    }

    /// `window` are the resident pages from the address scanned to `next`, or to the end of the memory; of them `cold` have
    /// no heat, the others have cooled.
    pub fn handle_window(
        &mut self,
        window: Vec<PageAddr>,
        cold: Vec<PageAddr>,
        next: Option<u64>,
    ) -> Step {
        if !cold.is_empty() {
            return Step::Evict(cold);
        }
        match next {
            Some(next) => Step::Scan(next),
            None if std::mem::replace(&mut self.wrapped, true) => Step::Evict(window),
            None => Step::Scan(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// Memory of which a workload uses pages, by number, and whose resident pages are `budget` at most.
    struct Memory {
        clock: Clock,
        budget: usize,
        window: usize,
        resident: BTreeMap<u64, Mark>,
        away: BTreeMap<u64, Mark>,
        random: u64,
        faults: BTreeMap<u64, u32>,
    }

    impl Memory {
        fn new(budget: usize, window: usize) -> Memory {
            let (resident, away, faults) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
            let clock = Clock::new(budget as u64);
            Memory { clock, budget, window, resident, away, random: 1, faults }
        }

        fn touch(&mut self, page: u64, with_heat: bool) {
            if self.resident.contains_key(&page) {
                return;
            }
            let heat = self.away.remove(&page).map_or(Mark::COLD, |left| {
                *self.faults.entry(page).or_default() += 1;
                self.clock.refault(left)
            });
            self.resident.insert(page, if with_heat { heat } else { Mark::COLD });
            if self.resident.len() > self.budget {
                for page in self.search().0 {
                    self.evict(page);
                }
            }
        }

        fn evict(&mut self, page: u64) {
            self.resident.remove(&page).expect("a victim is resident");
            self.away.insert(page, self.clock.evict());
        }

        /// The victims, and how often each page was met.
        fn search(&mut self) -> (Vec<u64>, BTreeMap<u64, u32>) {
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let end = self.resident.last_key_value().map_or(0, |(&page, _)| page + 1);
            let all = std::iter::once(0..end * FRAME_BYTES);
            let (mut search, mut hand) = Search::begin(self.random >> 20, all);
            let mut met = BTreeMap::new();
            for _ in 0..3 * self.resident.len() + 3 {
                let mut from = self.resident.range_mut(hand / FRAME_BYTES..);
                let (mut window, mut cold) = (Vec::new(), Vec::new());
                for (&page, mark) in from.by_ref().take(self.window) {
                    *met.entry(page).or_default() += 1;
                    window.push(PageAddr::containing(page * FRAME_BYTES));
                    if !mark.cool() {
                        cold.push(PageAddr::containing(page * FRAME_BYTES));
                    }
                }
                let next = from.next().map(|(&page, _)| page * FRAME_BYTES);
                match search.handle_window(window, cold, next) {
                    Step::Scan(next) => hand = next,
                    Step::Evict(pages) => {
                        let numbers = pages.into_iter().map(|page| page.get() / FRAME_BYTES);
                        return (numbers.collect(), met);
                    }
                }
            }
            panic!("the search does not end");
        }
    }

    /// Every other use is of 100 hot pages, the rest of 1100 cold ones, of which `cold` says which; 600 of the 1200 are
    /// resident. Returns how often pages came back, hot and cold ones.
    fn faults(with_heat: bool, cold: impl Fn(u64) -> u64) -> (u32, u32) {
        let mut memory = Memory::new(600, 32);
        for step in 0..200_000u64 {
            let page = if step % 2 == 0 { step / 2 % 100 } else { 100 + cold(step / 2) };
            memory.touch(page, with_heat);
        }
        let sum = |pages: Range<u64>| memory.faults.range(pages).map(|(_, faults)| faults).sum();
        (sum(0..100), sum(100..1200))
    }

    #[test]
    fn pages_in_use_stay() {
        for cold in [|n| n % 1100, |n: u64| n.wrapping_mul(0x9E37_79B9_7F4A_7C15) % 1100] {
            let ((hot, of_all), (before, _)) = (faults(true, cold), faults(false, cold));
            assert!(3 * hot < before, "{hot} faults of hot pages, {before} without heat");
            assert!(20 * hot < of_all, "{hot} faults of hot pages, {of_all} of cold ones");
        }
    }

    #[test]
    fn a_page_is_the_hotter_the_sooner_it_comes_back() {
        let mut clock = Clock::new(3200);
        let left = clock.evict();
        let mut heats = Vec::new();
        for _ in 0..2 * 3200 {
            heats.push(clock.refault(left).bits());
            clock.evict();
        }
        assert!(heats.is_sorted_by(|a, b| a >= b));
        assert_eq!((heats[0], heats[1500], heats[3100], heats[3400]), (32, 2, 1, 0));
    }

    #[test]
    fn a_program_that_reads_its_memory_over_and_over_keeps_some_of_it() {
        let mut memory = Memory::new(500, 16);
        (0..1000 * 20).for_each(|step| memory.touch(step % 1000, true));
        let faults: u32 = memory.faults.values().sum();
        assert!(faults < 19_000 * 9 / 10, "{faults} of 19,000 uses after the first were faults");
    }

    /// The oracle: the same rules with numbers that do not wrap, for each page.
    #[derive(Default)]
    struct Oracle {
        evicted: u64,
        left: BTreeMap<u64, u64>,
        heat: BTreeMap<u64, u64>,
    }

    impl Oracle {
        fn refault(&mut self, page: u64, epoch: u64) -> Option<u64> {
            let away = self.evicted / epoch - self.left.remove(&page)? / epoch;
            // Later the marks repeat.
            (away < 4 * EPOCHS).then(|| EPOCHS / away.max(1))
        }
    }

    #[derive(Clone, Debug)]
    enum Op {
        Touch(u64),
        /// Fetched ahead of need.
        Guess(u64),
        Search,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            6 => (0u64..60).prop_map(Op::Touch),
            1 => (0u64..60).prop_map(Op::Guess),
            3 => Just(Op::Search),
        ]
    }

    proptest! {
        #[test]
        fn behaves_like_its_rules(
            budget in 0u64..200, window in 1usize..20, ops in prop::collection::vec(op(), 0..400),
        ) {
            let (mut memory, mut oracle) = (Memory::new(usize::MAX, window), Oracle::default());
            memory.clock = Clock::new(budget);
            for op in ops {
                match op {
                    Op::Touch(page) if !memory.resident.contains_key(&page) => {
                        memory.touch(page, true);
                        let heat = oracle.refault(page, (budget / EPOCHS).max(1));
                        let new = memory.faults.remove(&page).is_none();
                        let heat = if new { Some(0) } else { heat };
                        let is = memory.resident[&page].bits();
                        prop_assert!(heat.is_none_or(|heat| heat == is) && is <= EPOCHS);
                        oracle.heat.insert(page, is);
                    }
                    Op::Touch(_) => {}
                    Op::Guess(page) => {
                        memory.away.remove(&page);
                        oracle.left.remove(&page);
                        memory.resident.entry(page).or_insert(Mark::COLD);
                        oracle.heat.entry(page).or_insert(0);
                    }
                    Op::Search => {
                        let (victims, met) = memory.search();
                        prop_assert_eq!(victims.is_empty(), memory.resident.is_empty());
                        let heat = &oracle.heat;
                        let cold = met.iter().filter(|(page, times)| heat[page] < u64::from(**times));
                        let cold: Vec<u64> = cold.map(|(&page, _)| page).collect();
                        if cold.is_empty() {
                            prop_assert!(victims.iter().all(|page| met.contains_key(page)));
                        } else {
                            prop_assert_eq!(&victims, &cold);
                        }
                        for (page, times) in met {
                            let heat = oracle.heat.get_mut(&page).unwrap();
                            *heat = heat.saturating_sub(times.into());
                            prop_assert_eq!(memory.resident[&page].bits(), *heat);
                        }
                        for page in victims {
                            memory.evict(page);
                            oracle.evicted += 1;
                            oracle.heat.remove(&page);
                            oracle.left.insert(page, oracle.evicted);
                        }
                    }
                }
            }
        }
    }
}
