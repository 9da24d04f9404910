//! Removals of pages that are leaving, and have no markers yet.
//!
//! A removal is told before it is made, a remap after: a page that one thread's remap has taken elsewhere may seem to be removed by another, whose memory
//! has grown to where it was. Of a page with a marker that tells. Of others nothing does, but if nobody has memory where a remap that is told later leaves from,
//! none has grown there before, and what was removed was the page.

use std::ops::Range;

use gms_policy::ids::{PageAddr, SpaceId};

use super::Tables;
use super::order::{Change, Doubt};
use crate::page_map::PAGE;
use crate::range_set::RangeSet;

/// What is done to an address space.
#[derive(Clone, Copy, Debug)]
pub enum Step<'a> {
    /// What was in the range is given up, which stays mapped.
    Remove(&'a Range<u64>),
    /// The range is, or has moved.
    Change(&'a Change),
}

impl Tables {
    /// Whether a removal concerns pages that have no markers yet.
    pub fn is_unmarked(&self, space: SpaceId, range: &Range<u64>) -> bool {
        self.unmarked_of(space).any(|page| range.contains(&page.get()))
    }

    /// Where no memory may be now, if the removals are to be taken for made in this order; it is in doubt if some must have been there.
    pub fn vacated<'a>(
        &self,
        space: SpaceId,
        steps: impl Iterator<Item = Step<'a>>,
    ) -> Result<RangeSet, Doubt> {
        let unmarked = self.unmarked_ranges(space);
        if unmarked.is_empty() {
            return Ok(unmarked);
        }
        vacated(unmarked, steps)
    }

    /// Pages without markers that may be removed, and that a child may have. They are elsewhere, perhaps, if any may have been moved or unmapped: that is in doubt.
    pub fn removed_unmarked<'a>(
        &self,
        space: SpaceId,
        steps: impl Iterator<Item = Step<'a>>,
    ) -> Result<RangeSet, Doubt> {
        let mut unmarked = self.unmarked_ranges(space);
        // Those a child does not have in any case.
        let private = self.private_of(space);
        private.into_iter().for_each(|(_, page)| unmarked.remove(page.get()..page.get() + PAGE));
        removed(unmarked, steps)
    }

    fn unmarked_ranges(&self, space: SpaceId) -> RangeSet {
        let mut unmarked = RangeSet::default();
        let pages = self.unmarked_of(space).map(PageAddr::get);
        pages.for_each(|page| unmarked.insert(page..page + PAGE));
        unmarked
    }
}

/// Makes a change of where pages are.
fn make(pages: &mut RangeSet, change: &Change) {
    let moved: Vec<Range<u64>> = pages.overlaps(change.left()).collect();
    pages.remove(change.left());
    if let Change::Remap(remap) = change {
        pages.remove(remap.target());
        let there = |at: u64| at - remap.from + remap.to;
        moved.into_iter().for_each(|part| pages.insert(there(part.start)..there(part.end)));
    }
}

/// `unmarked` grows: pages may have been moved, or not.
fn removed<'a>(
    mut unmarked: RangeSet,
    steps: impl Iterator<Item = Step<'a>>,
) -> Result<RangeSet, Doubt> {
    let (mut removed, mut stay) = (RangeSet::default(), true);
    for step in steps {
        match step {
            Step::Remove(range) => {
                unmarked.overlaps(range.clone()).for_each(|part| removed.insert(part));
            }
            Step::Change(change) => {
                let concerns = |part: Range<u64>| unmarked.overlaps(part).next().is_some();
                stay &= !change.left_and_reached().any(concerns);
                let left: Vec<Range<u64>> = unmarked.overlaps(change.left()).collect();
                if let Change::Remap(remap) = change {
                    let there = |at: u64| at - remap.from + remap.to;
                    left.into_iter().for_each(|p| unmarked.insert(there(p.start)..there(p.end)));
                }
            }
        }
    }
    if stay || removed.is_empty() { Ok(removed) } else { Err(Doubt) }
}

fn vacated<'a>(
    mut unmarked: RangeSet,
    steps: impl Iterator<Item = Step<'a>>,
) -> Result<RangeSet, Doubt> {
    let (mut removed, mut vacated) = (RangeSet::default(), RangeSet::default());
    let meet = |set: &RangeSet, range: Range<u64>| set.overlaps(range).collect::<Vec<_>>();
    for step in steps {
        let change = match step {
            Step::Change(change) => change,
            Step::Remove(range) => {
                meet(&unmarked, range.clone()).into_iter().for_each(|part| removed.insert(part));
                unmarked.remove(range.clone());
                continue;
            }
        };
        let left = change.left();
        // What has left it must have come there.
        if !meet(&vacated, left.clone()).is_empty() {
            return Err(Doubt);
        }
        make(&mut unmarked, change);
        if let Change::Remap(remap) = change {
            meet(&removed, left.clone()).into_iter().for_each(|part| vacated.insert(part));
            vacated.remove(remap.target());
            removed.remove(remap.target());
        }
        removed.remove(left);
    }
    Ok(vacated)
}

#[cfg(test)]
mod tests {
    use super::super::order::Remap;
    use super::*;

    fn pages(range: Range<u64>) -> Range<u64> {
        range.start * PAGE..range.end * PAGE
    }

    fn remap(from: u64, to: u64, length: u64) -> Change {
        Change::Remap(Remap { from: from * PAGE, to: to * PAGE, length: length * PAGE })
    }

    /// Of pages 0 to 3 which are leaving.
    fn seen(removed: Range<u64>, before: &[Change], after: &[Change]) -> Option<Vec<Range<u64>>> {
        let mut unmarked = RangeSet::default();
        unmarked.insert(pages(0..4));
        let removed = pages(removed);
        let steps = before.iter().map(Step::Change).chain([Step::Remove(&removed)]);
        let steps = steps.chain(after.iter().map(Step::Change));
        vacated(unmarked, steps).ok().map(|vacated| vacated.iter().collect())
    }

    #[test]
    fn a_removal_is_made_before_a_later_remap_if_nobody_has_memory_there() {
        let [away, back] = [remap(0, 100, 4), remap(100, 0, 4)];
        assert_eq!(seen(1..3, &[], std::slice::from_ref(&away)), Some(vec![pages(1..3)]));
        // Of what was elsewhere already, or is no page that leaves, nothing is in doubt.
        assert_eq!(seen(1..3, std::slice::from_ref(&away), &[]), Some(Vec::new()));
        assert_eq!(seen(8..9, &[], std::slice::from_ref(&away)), Some(Vec::new()));
        // Another remap has brought what is there now.
        assert_eq!(seen(0..2, &[], &[away.clone(), back.clone()]), Some(Vec::new()));
        // What has left it meanwhile had come there by itself.
        let gone = Change::Unmap(pages(1..2));
        assert_eq!(seen(1..3, &[], &[away.clone(), gone.clone()]), None);
        assert_eq!(seen(1..3, &[], &[away.clone(), remap(2, 50, 1)]), None);
        assert_eq!(seen(1..3, &[], &[away.clone(), back, gone.clone()]), Some(Vec::new()));
        // It was the page's own memory.
        assert_eq!(seen(1..3, &[], &[gone, remap(3, 50, 1)]), Some(Vec::new()));
        // The same where the page had been moved before.
        let seen = seen(101..102, std::slice::from_ref(&away), &[remap(100, 200, 4)]);
        assert_eq!(seen, Some(vec![pages(101..102)]));
    }

    /// A child has what was there before some of the remaps.
    #[test]
    fn a_removal_may_be_of_a_page_that_leaves_wherever_that_may_be() {
        let (mut unmarked, away) = (RangeSet::default(), remap(1, 100, 1));
        unmarked.insert(pages(1..2));
        let seen = |before: &[&Change], removes: u64| {
            let removes = pages(removes..removes + 1);
            let steps = before.iter().map(|change| Step::Change(change));
            let removed = removed(unmarked.clone(), steps.chain([Step::Remove(&removes)]));
            removed.ok().map(|removed| removed.iter().collect::<Vec<_>>())
        };
        assert_eq!(seen(&[], 1), Some(vec![pages(1..2)]));
        assert_eq!((seen(&[&away], 1), seen(&[&away], 100)), (None, None));
        for (before, removes) in [(&[][..], 2), (&[], 100), (&[&away], 101)] {
            assert_eq!(seen(before, removes), Some(Vec::new()));
        }
        let rounds = [&away, &remap(100, 1, 1), &away, &remap(100, 1, 1)];
        let seen_then = [seen(&rounds, 1), seen(&rounds[..3], 1), seen(&rounds[..1], 100)];
        assert_eq!(seen_then, [None, None, None]);
        // What was unmapped, or moved away over, may be other memory now.
        let over = [Change::Unmap(pages(0..2)), remap(8, 1, 1), remap(2, 3, 1)];
        let seen = [seen(&[&over[0]], 1), seen(&[&over[1]], 1), seen(&[&over[2]], 1)];
        assert_eq!(seen, [None, None, Some(vec![pages(1..2)])]);
    }
}
