//! Pages that the kernel refuses to move, which nothing cheap tells of: those of locked memory (mlock; left out with their mappings), and pinned ones. They
//! would be chosen again and again: who has locked its memory need not touch it.

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::range_set::RangeSet;

/// A page counts that is refused twice within this time. Once is nothing: memory that was just protected is refused too, and may be written again soon.
const ONCE_FOR: Duration = Duration::from_secs(3);
/// When it is tried again.
const TWICE_FOR: Duration = Duration::from_secs(10);

pub(super) struct Refusals {
    once: RangeSet,
    once_until: Instant,
    twice: RangeSet,
    twice_until: Instant,
}

impl Refusals {
    pub(super) fn none(now: Instant) -> Refusals {
        let (once, twice) = Default::default();
        Refusals { once, once_until: now, twice, twice_until: now }
    }

    /// This range was refused. True if part of it was before, so that its mapping does not move.
    pub(super) fn note(&mut self, now: Instant, range: Range<u64>) -> bool {
        if now >= self.once_until {
            (self.once, self.once_until) = (RangeSet::default(), now + ONCE_FOR);
        }
        self.expire(now);
        if self.once.overlaps(range.clone()).next().is_none() {
            self.once.insert(range);
            return false;
        }
        if self.twice.is_empty() {
            self.twice_until = now + TWICE_FOR;
        }
        self.twice.insert(range);
        true
    }

    /// What was refused long ago is tried again.
    pub(super) fn expire(&mut self, now: Instant) {
        if now >= self.twice_until {
            self.twice = RangeSet::default();
        }
    }

    /// Memory that is protected now was refused for that.
    pub(super) fn forgive(&mut self, range: Range<u64>) {
        self.once.remove(range.clone());
        self.twice.remove(range);
    }

    /// What was refused twice.
    pub(super) fn lasting(&self) -> impl Iterator<Item = Range<u64>> {
        self.twice.iter()
    }

    /// Whether a mapping does not move.
    pub(super) fn are_of(&self, mapping: &Range<u64>) -> bool {
        self.twice.overlaps(mapping.clone()).next().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_left_out_for_a_while_if_a_page_of_it_is_refused_twice() {
        let now = Instant::now();
        let mut refusals = Refusals::none(now);
        let (page, mapping) = (0x5000..0x6000, 0x4000..0x9000);
        assert!(!refusals.note(now, page.clone()) && !refusals.note(now, 0x7000..0x8000));
        assert!(!refusals.are_of(&mapping));
        assert!(!refusals.note(now + ONCE_FOR, page.clone()), "long ago");
        assert!(refusals.note(now + ONCE_FOR, page.clone()) && refusals.are_of(&mapping));
        assert!(!refusals.are_of(&(0x9000..0xa000)));
        refusals.expire(now + ONCE_FOR + TWICE_FOR - Duration::from_millis(1));
        assert!(refusals.are_of(&mapping));
        refusals.expire(now + ONCE_FOR + TWICE_FOR);
        assert!(!refusals.are_of(&mapping));
    }

    #[test]
    fn memory_that_was_protected_is_not_left_out() {
        let now = Instant::now();
        let mut refusals = Refusals::none(now);
        let page = 0x5000..0x6000;
        assert!(!refusals.note(now, page.clone()));
        refusals.forgive(0x4000..0x9000);
        assert!(!refusals.note(now, page.clone()) && refusals.note(now, page.clone()));
        refusals.forgive(page.clone());
        assert!(!refusals.are_of(&page));
    }
}
