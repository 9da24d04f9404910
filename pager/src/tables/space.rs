//! What is registered in a space, and what is being removed there.
//!
//! **Quarantine.** REMOVE arrives before the pages go. A page that was evicted in between would be moved out, miss the removal, and get its marker
//! after it: the workload would later get its old bytes instead of zeros. So the range is quarantined: a page in it is not evicted until
//! the address has been seen empty or been filled with zeros. Pages that MADV_FREE left in place show neither: for them the evict
//! thread proves that no thread is in madvise any more (`age_quarantine`, `end_quarantine`).
//!
//! Nor is a page of it installed: the removal, told but not done, would leave its old bytes behind if the install came later. It went out before
//! the removal was told, which allows zeros from then on.

use std::ops::Range;
use std::sync::Arc;

use gms_policy::ids::PageAddr;

use crate::range_set::RangeSet;
use crate::words::{Words, put_ranges};

/// See the module's documentation.
#[derive(Default)]
pub(super) struct SpaceState {
    /// Shared with the parent until one of the two changes, and with who looks at it.
    pub(super) registered: Arc<RangeSet>,
    quarantine: RangeSet,
    /// What was in quarantine when the search for threads in madvise began.
    aging: RangeSet,
    /// What has been removed while something was known of it: perhaps the program has discarded that.
    pub(super) stale: RangeSet,
    /// Removals begun so far.
    pub(super) removals: u64,
    /// See [`SpaceState::adopted`].
    pub(super) unproved: bool,
}

impl SpaceState {
    /// A space with these ranges, nothing of which is being removed.
    pub(super) fn new(registered: Arc<RangeSet>) -> SpaceState {
        SpaceState { registered, ..SpaceState::default() }
    }

    /// The space of a pager that has died, which alone knew of what is being removed. Until it is proved that nothing is any more, no page of it that is away
    /// is installed, and none goes out. (Were all in quarantine, what is away would be zeros.)
    pub(super) fn adopted() -> SpaceState {
        SpaceState { unproved: true, ..SpaceState::default() }
    }

    /// All of it as words.
    pub(super) fn put_words(&self, out: &mut Vec<u64>) {
        for set in [&*self.registered, &self.quarantine, &self.aging, &self.stale] {
            put_ranges(out, set);
        }
        out.push(self.removals);
    }

    /// What these words tell of a space.
    pub(super) fn from_words(words: &mut Words<'_>) -> Option<SpaceState> {
        let registered = Arc::new(words.ranges()?);
        let (quarantine, aging, stale) = (words.ranges()?, words.ranges()?, words.ranges()?);
        let removals = words.word()?;
        Some(SpaceState { registered, quarantine, aging, stale, removals, unproved: false })
    }

    /// The range is registered.
    pub(super) fn register(&mut self, range: Range<u64>) {
        Arc::make_mut(&mut self.registered).insert(range);
    }

    /// The range is not registered.
    pub(super) fn unregister(&mut self, range: Range<u64>) {
        match range {
            Range { start: 0, end: u64::MAX } => self.registered = Arc::default(),
            part => Arc::make_mut(&mut self.registered).remove(part),
        }
    }

    /// A removal there is over, or concerns another mapping.
    pub(super) fn release(&mut self, range: Range<u64>) {
        if !self.quarantine.is_empty() {
            self.quarantine.remove(range.clone());
        }
        if !self.aging.is_empty() {
            self.aging.remove(range);
        }
    }

    /// What is registered of the range is about to be removed.
    pub(super) fn remove(&mut self, range: Range<u64>, known: bool) {
        self.removals += 1;
        // The kernel tells of what is registered with it, which we may not have recorded yet.
        self.quarantine.insert(range.clone());
        if known {
            self.stale.insert(range);
        }
    }

    /// What may have been discarded since the last call.
    pub(super) fn take_stale(&mut self) -> RangeSet {
        std::mem::take(&mut self.stale)
    }

    /// Whether anything of the range is in quarantine.
    pub(super) fn has_quarantine(&self, range: &Range<u64>) -> bool {
        let within = |set: &RangeSet| set.overlaps(range.clone()).next().is_some();
        within(&self.quarantine) || within(&self.aging)
    }

    /// Whether the page is in quarantine.
    pub(super) fn is_quarantined(&self, page: PageAddr) -> bool {
        self.quarantine.contains(page.get()) || self.aging.contains(page.get())
    }

    /// The page is registered and not in quarantine.
    pub(super) fn is_evictable(&self, page: PageAddr) -> bool {
        self.registered.contains(page.get()) && !self.is_quarantined(page) && !self.unproved
    }

    /// The search for threads in madvise begins; false if there is nothing to prove.
    pub(super) fn age(&mut self) -> bool {
        let young = std::mem::take(&mut self.quarantine);
        young.iter().for_each(|range| self.aging.insert(range));
        !self.aging.is_empty()
    }

    /// It has found none.
    pub(super) fn end_aging(&mut self) {
        self.aging = RangeSet::default();
    }
}
