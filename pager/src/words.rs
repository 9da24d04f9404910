//! What the tables know as words, one behind the other: for the next binary of this process, which reads them in the order in which they were written.

use std::ops::Range;

use crate::range_set::RangeSet;

/// Words that are read.
pub struct Words<'a>(&'a [u64]);

impl<'a> Words<'a> {
    /// These.
    pub fn new(words: &'a [u64]) -> Words<'a> {
        Words(words)
    }

    /// The next; `None` at the end.
    pub fn word(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*word)
    }

    /// The next `count` words.
    pub fn take(&mut self, count: u64) -> Option<&'a [u64]> {
        let (words, rest) = self.0.split_at_checked(usize::try_from(count).ok()?)?;
        self.0 = rest;
        Some(words)
    }

    /// What [`put_list`] has written.
    pub fn list(&mut self) -> Option<&'a [u64]> {
        let count = self.word()?;
        self.take(count)
    }

    /// As many values as the next word says, each of which is one word at least.
    pub fn several<T>(&mut self, mut each: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let count = self.word().filter(|count| *count <= self.0.len() as u64)?;
        (0..count).map(|_| each(self)).collect()
    }

    /// What [`put_ranges`] has written.
    pub fn ranges(&mut self) -> Option<RangeSet> {
        let mut set = RangeSet::default();
        let pairs = self.list()?.chunks_exact(2);
        pairs.for_each(|pair| set.insert(pair[0]..pair[1]));
        Some(set)
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// How many words there are, and they themselves.
pub(crate) fn put_list(out: &mut Vec<u64>, words: impl IntoIterator<Item = u64>) {
    let at = out.len();
    out.push(0);
    out.extend(words);
    out[at] = (out.len() - at - 1) as u64;
}

/// The ranges of a set.
pub(crate) fn put_ranges(out: &mut Vec<u64>, set: &RangeSet) {
    put_list(out, set.iter().flat_map(|Range { start, end }| [start, end]));
}
