//! Whose turn it is.

/// `subjects` in the order of run number `run`. Each run begins with another one, and of more than two every second run goes backwards, so that what a
/// machine does over time meets all of them, and what one subject leaves behind not always the same one.
pub(crate) fn rotated<T>(subjects: impl IntoIterator<Item = T>, run: u32) -> Vec<T> {
    let mut subjects: Vec<T> = subjects.into_iter().collect();
    let first = run as usize % subjects.len().max(1);
    subjects.rotate_left(first);
    if subjects.len() > 2 && run % 2 == 1 {
        subjects[1..].reverse();
    }
    subjects
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_begins_once() {
        assert_eq!([0, 1, 2, 3].map(|run| rotated("abc".chars(), run)[0]), ['a', 'b', 'c', 'a']);
        assert_eq!(rotated([1, 2, 3], 1), [2, 1, 3]);
        assert_eq!([rotated([1, 2], 0), rotated([1, 2], 1)], [[1, 2], [2, 1]]);
        assert!(rotated([0; 0], 5).is_empty());
    }
}
