//! A set of addresses kept as disjoint, non-adjacent ranges.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Disjoint ranges of addresses in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RangeSet {
    /// Start -> end.
    ranges: BTreeMap<u64, u64>,
}

impl RangeSet {
    /// Adds a range; empty ones are ignored.
    pub fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.start, range.end);
        while let Some((&s, &e)) = self.ranges.range(..=end).next_back() {
            if e < start {
                break;
            }
            self.ranges.remove(&s);
            start = start.min(s);
            end = end.max(e);
        }
        self.ranges.insert(start, end);
    }

    /// Removes a range.
    pub fn remove(&mut self, range: Range<u64>) {
        while let Some((&s, &e)) = self.ranges.range(..range.end).next_back() {
            if e <= range.start || range.is_empty() {
                break;
            }
            self.ranges.remove(&s);
            if s < range.start {
                self.ranges.insert(s, range.start);
            }
            if e > range.end {
                self.ranges.insert(range.end, e);
            }
        }
    }

    /// The range which holds the address.
    pub fn containing(&self, address: u64) -> Option<Range<u64>> {
        let (&start, &end) = self.ranges.range(..=address).next_back()?;
        (address < end).then_some(start..end)
    }

    /// Whether the address is in the set.
    pub fn contains(&self, address: u64) -> bool {
        self.containing(address).is_some()
    }

    /// The parts of `range` which are not in the set.
    pub fn gaps(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = range.start;
        for covered in self.overlaps(range.clone()) {
            if at < covered.start {
                gaps.push(at..covered.start);
            }
            at = covered.end;
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }

    /// The parts of `range` which are in the set, in order.
    pub fn overlaps(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let first = self.containing(range.start).map_or(range.start, |r| r.start);
        self.ranges
            .range(first..range.end.max(first))
            .map(move |(&s, &e)| s.max(range.start)..e.min(range.end))
            .filter(|r| !r.is_empty())
    }

    /// All ranges in order.
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> + Clone + '_ {
        self.ranges.iter().map(|(&s, &e)| s..e)
    }

    /// Whether nothing is in the set.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Number of addresses in the set.
    pub fn len(&self) -> u64 {
        self.iter().map(|r| r.end - r.start).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn behaves_like_a_set_of_numbers(ops in prop::collection::vec((any::<bool>(), 0u64..64, 0u64..16), 0..40),
                                         probe in 0u64..64, length in 0u64..32) {
            let mut set = RangeSet::default();
            let mut oracle = BTreeSet::new();
            for (insert, start, length) in ops {
                let range = start..start + length;
                if insert {
                    set.insert(range.clone());
                    oracle.extend(range);
                } else {
                    set.remove(range.clone());
                    oracle.retain(|x| !range.contains(x));
                }
            }
            let flat: BTreeSet<u64> = set.iter().flatten().collect();
            prop_assert_eq!(&flat, &oracle);
            prop_assert_eq!(set.len(), oracle.len() as u64);
            prop_assert_eq!(set.contains(probe), oracle.contains(&probe));
            let window = probe..probe + length;
            let gaps: BTreeSet<u64> = set.gaps(window.clone()).into_iter().flatten().collect();
            let inside: BTreeSet<u64> = set.overlaps(window.clone()).flatten().collect();
            prop_assert!(gaps.iter().all(|x| !oracle.contains(x)));
            prop_assert!(inside.iter().all(|x| oracle.contains(x)));
            prop_assert_eq!(gaps.len() + inside.len(), window.count());
            let adjacent = set.iter().zip(set.iter().skip(1)).all(|(a, b)| a.end < b.start);
            prop_assert!(adjacent);
        }
    }
}
