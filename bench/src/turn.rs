//! Whose turn it is.

/// `subjects` in the order of run number `run`. Each run begins with another one, so that what a
/// machine does over time, and what one subject leaves behind for the next, meets all of them.
pub fn rotated<T>(subjects: impl IntoIterator<Item = T>, run: u32) -> Vec<T> {
    let mut subjects: Vec<T> = subjects.into_iter().collect();
    let first = run as usize % subjects.len().max(1);
    subjects.rotate_left(first);
    subjects
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_begins_once() {
        assert_eq!([0, 1, 2, 3].map(|run| rotated("abc".chars(), run)[0]), ['a', 'b', 'c', 'a']);
        assert_eq!(rotated([1, 2, 3], 1), [2, 3, 1]);
        assert!(rotated([0; 0], 5).is_empty());
    }
}
