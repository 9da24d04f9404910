//! What is registered in a space, and what is being removed there.
//!
//! **Quarantine.** REMOVE arrives before the pages go. If such a page were evicted in between, the workload would later get its
//! old bytes instead of zeros. So the range is quarantined: a page in it is not evicted until it has been seen absent or been
//! installed anew, both of which prove that the removal is over. Pages that MADV_FREE left in place show neither: for them the evict
//! thread proves that no thread is in madvise any more (`age_quarantine`, `end_quarantine`).

use std::ops::Range;

use gms_policy::ids::PageAddr;

use crate::range_set::RangeSet;

/// See the module's documentation.
#[derive(Default)]
pub(super) struct SpaceState {
    pub(super) registered: RangeSet,
    quarantine: RangeSet,
    /// What was in quarantine when the search for threads in madvise began.
    aging: RangeSet,
    /// Removals that are not proved to be over, whatever was installed since: a page may still go there.
    removing: RangeSet,
    /// The same for what is `aging`.
    aging_removing: RangeSet,
    /// Removals begun so far.
    pub(super) removals: u64,
}

impl SpaceState {
    /// A space with these ranges, nothing of which is being removed.
    pub(super) fn new(registered: RangeSet) -> SpaceState {
        SpaceState { registered, ..SpaceState::default() }
    }

    /// The range is another mapping now: what was told of it is over.
    pub(super) fn renew(&mut self, range: Range<u64>) {
        self.release(range.clone());
        self.removing.remove(range.clone());
        self.aging_removing.remove(range);
    }

    /// What was there has gone.
    pub(super) fn release(&mut self, range: Range<u64>) {
        if !self.quarantine.is_empty() {
            self.quarantine.remove(range.clone());
        }
        if !self.aging.is_empty() {
            self.aging.remove(range);
        }
    }

    /// What is registered of the range is about to be removed.
    pub(super) fn remove(&mut self, range: Range<u64>) {
        self.removals += 1;
        for part in self.registered.overlaps(range) {
            self.removing.insert(part.clone());
            self.quarantine.insert(part);
        }
    }

    /// A removal of the page is not proved to be over.
    pub(super) fn is_being_removed(&self, page: PageAddr) -> bool {
        self.removing.contains(page.get()) || self.aging_removing.contains(page.get())
    }

    /// The page is registered and not in quarantine.
    pub(super) fn is_evictable(&self, page: PageAddr) -> bool {
        let page = page.get();
        self.registered.contains(page)
            && !self.quarantine.contains(page)
            && !self.aging.contains(page)
    }

    /// The search for threads in madvise begins; false if there is nothing to prove.
    pub(super) fn age(&mut self) -> bool {
        let young = std::mem::take(&mut self.quarantine);
        young.iter().for_each(|range| self.aging.insert(range));
        let young = std::mem::take(&mut self.removing);
        young.iter().for_each(|range| self.aging_removing.insert(range));
        !self.aging.is_empty()
    }

    /// It has found none.
    pub(super) fn end_aging(&mut self) {
        self.aging = RangeSet::default();
        self.aging_removing = RangeSet::default();
    }
}
