//! Which resident pages go out: generalized CLOCK (Smith, "Sequentiality and prefetching in database systems", 1978) with
//! refault distances (as in Linux's mm/workingset.c) in the place of accessed bits, which nobody can read from outside a workload.
//!
//! What is seen is a page which came back: how many pages had gone out since it did is how soon it was used again. A page gets heat
//! by that; whoever looks for victims takes a degree of heat from each page that is met and leaves it, and takes those without.
//! A page which never came back, or was fetched ahead of its use, has none.

/// When a page went out, in epochs, or how hot it is: a page away has the one, a resident page the other.
pub type Mark = u8;
/// Bits of a mark.
pub const MARK_BITS: u32 = 7;

/// Epochs in which as many pages go out as the budget holds.
const EPOCHS: u64 = 32;
const _: () = assert!(4 * EPOCHS == 1 << MARK_BITS);

/// Counts evictions.
#[derive(Clone, Debug)]
pub struct Ages {
    evicted: u64,
    epoch: u64,
}

impl Ages {
    /// For a budget of so many pages.
    pub fn new(budget: u64) -> Ages {
        Ages { evicted: 0, epoch: (budget / EPOCHS).max(1) }
    }

    /// A page goes out: its mark while it is away.
    pub fn evict(&mut self) -> Mark {
        self.evicted += 1;
        self.now()
    }

    /// The heat of a page that is used, and went out at `mark`: how many times it would have been used while as many pages go out as the
    /// budget holds, so that it stays for so long. (Marks repeat after four times that: then it is taken for hotter than it is.)
    pub fn heat(&self, mark: Mark) -> Mark {
        let distance = self.now().wrapping_sub(mark) & ((1 << MARK_BITS) - 1);
        (EPOCHS / u64::from(distance.max(1))) as Mark
    }

    fn now(&self) -> Mark {
        ((self.evicted / self.epoch) & ((1 << MARK_BITS) - 1)) as Mark
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// Every other use is of 100 hot pages, the rest of 1100 cold ones, of which `cold` says which; 600 of the 1200 are resident. Returns how
    /// often pages came back, hot and cold ones.
    fn faults(with_heat: bool, cold: impl Fn(u64) -> u64) -> (u32, u32) {
        let mut ages = Ages::new(600);
        let (mut resident, mut away) = (BTreeMap::new(), BTreeMap::new());
        let (mut hand, mut hot_faults, mut cold_faults) = (0, 0, 0);
        for step in 0..200_000u64 {
            let page = if step % 2 == 0 { step / 2 % 100 } else { 100 + cold(step / 2) };
            if resident.contains_key(&page) {
                continue;
            }
            let heat = away.remove(&page).map_or(0, |mark| {
                let faults = if page < 100 { &mut hot_faults } else { &mut cold_faults };
                *faults += 1;
                ages.heat(mark)
            });
            resident.insert(page, if with_heat { heat } else { 0 });
            while resident.len() > 600 {
                let Some((&met, heat)) = resident.range_mut(hand..).next() else {
                    hand = 0;
                    continue;
                };
                hand = met + 1;
                match heat {
                    0 => {
                        resident.remove(&met);
                        away.insert(met, ages.evict());
                    }
                    _ => *heat -= 1,
                }
            }
        }
        (hot_faults, cold_faults)
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
        let mut ages = Ages::new(3200);
        let mark = ages.evict();
        let mut heats = Vec::new();
        for _ in 0..2 * 3200 {
            heats.push(ages.heat(mark));
            ages.evict();
        }
        assert!(heats.is_sorted_by(|a, b| a >= b));
        assert_eq!((heats[0], heats[1500], heats[3100], heats[3400]), (32, 2, 1, 0));
    }

    proptest! {
        #[test]
        fn heat_is_bounded(budget in any::<u64>(), mark in 0..1u8 << MARK_BITS, evicted in 0..5000) {
            let mut ages = Ages::new(budget);
            for _ in 0..evicted {
                prop_assert!(ages.evict() < 1 << MARK_BITS);
            }
            prop_assert!(u64::from(ages.heat(mark)) <= EPOCHS);
        }
    }
}
