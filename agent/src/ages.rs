//! How old the oldest page is, to the second, at four bytes a second and none a page.

use crate::limits::AGE_SECONDS_MAX;
use std::collections::VecDeque;

/// Counts the pages stored in each second.
///
/// Seconds beyond [`AGE_SECONDS_MAX`] ago share one count; their pages are all as old as that bound.
#[derive(Debug, Default)]
pub(crate) struct Ages {
    /// The second of the first count.
    base: u32,
    counts: VecDeque<u32>,
    /// Pages stored before `base`.
    older: u32,
}

impl Ages {
    /// A page was stored in second `now`. Seconds never go back.
    pub(crate) fn add(&mut self, now: u32) {
        if self.counts.is_empty() && self.older == 0 {
            self.base = now;
        }
        // After a long silence the seconds without a page are skipped, not counted one by one.
        if now.saturating_sub(self.base) as usize >= 2 * AGE_SECONDS_MAX {
            self.older += self.counts.drain(..).sum::<u32>();
            self.base = now;
        }
        let index = now.saturating_sub(self.base) as usize;
        if index >= self.counts.len() {
            self.counts.resize(index + 1, 0);
        }
        self.counts[index] += 1;
        while self.counts.len() > AGE_SECONDS_MAX {
            self.older += self.counts.pop_front().unwrap_or(0);
            self.base += 1;
        }
    }

    /// A page which was stored in second `stored` is gone.
    pub(crate) fn remove(&mut self, stored: u32) {
        match stored.checked_sub(self.base).and_then(|index| self.counts.get_mut(index as usize)) {
            Some(count) => *count -= 1,
            None => self.older = self.older.saturating_sub(1),
        }
        while self.older == 0 && self.counts.front() == Some(&0) {
            self.counts.pop_front();
            self.base += 1;
        }
    }

    /// What tells the age of the oldest page, for others than the owner.
    pub(crate) fn oldest(&self) -> Oldest {
        match (self.older, self.counts.is_empty()) {
            (0, true) => Oldest(u64::MAX),
            (0, false) => Oldest(self.base.into()),
            _ => Oldest(Oldest::OLDER | u64::from(self.base)),
        }
    }
}

/// The second in which the oldest page was stored, [`Oldest::OLDER`] if it was before that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Oldest(pub u64);

impl Oldest {
    const OLDER: u64 = 1 << 32;

    /// Its age in second `now`, in seconds; zero without pages.
    pub(crate) fn age(self, now: u32) -> u32 {
        let since = now.saturating_sub(self.0 as u32);
        match self.0 {
            u64::MAX => 0,
            0..Self::OLDER => since,
            _ => since.max(AGE_SECONDS_MAX as u32),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Equals a sorted list, within the bound.
        #[test]
        fn equals_a_list(ops in prop::collection::vec((any::<bool>(), 0..200_000u32, any::<prop::sample::Index>()), 1..60)) {
            let (mut ages, mut stored, mut now) = (Ages::default(), Vec::<u32>::new(), 0);
            for (add, step, index) in ops {
                now += step / 100 * u32::from(step % 2 == 0) + step * u32::from(step % 100 == 7);
                if add || stored.is_empty() {
                    ages.add(now);
                    stored.push(now);
                } else {
                    ages.remove(stored.swap_remove(index.index(stored.len())));
                }
                let oldest = stored.iter().min().map_or(0, |s| now - s);
                let age = ages.oldest().age(now);
                prop_assert!(age == oldest || age.min(oldest) >= AGE_SECONDS_MAX as u32, "{age} for {oldest}");
                prop_assert!(ages.counts.len() <= AGE_SECONDS_MAX);
            }
            stored.into_iter().for_each(|s| ages.remove(s));
            prop_assert_eq!(ages.oldest().age(now), 0);
        }
    }
}
