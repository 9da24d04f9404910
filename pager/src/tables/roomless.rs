//! Faults that wait until room is made.

use std::collections::{HashSet, VecDeque};

use gms_policy::ids::SpaceId;

use super::Place;

/// A queue, the oldest first, with each page once.
#[derive(Default)]
pub(super) struct Roomless {
    queue: VecDeque<Place>,
    known: HashSet<Place>,
}

impl Roomless {
    /// Appends a page; one that waits already keeps its place.
    pub(super) fn push(&mut self, place: Place) {
        if self.known.insert(place) {
            self.queue.push_back(place);
        }
    }

    /// Pages waiting.
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Takes up to `max` of the oldest.
    pub(super) fn take(&mut self, max: usize) -> Vec<Place> {
        let taken: Vec<Place> = self.queue.drain(..max.min(self.queue.len())).collect();
        for place in &taken {
            self.known.remove(place);
        }
        taken
    }

    /// The space has ended.
    pub(super) fn forget(&mut self, space: SpaceId) {
        self.queue.retain(|place| place.0 != space);
        self.known.retain(|place| place.0 != space);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page_map::PAGE;
    use gms_policy::ids::PageAddr;

    #[test]
    fn the_oldest_are_taken_and_no_more_than_asked() {
        let place = |space, page| (SpaceId(space), PageAddr::containing(page * PAGE));
        let mut waiting = Roomless::default();
        for page in [5, 3, 9, 3, 1] {
            waiting.push(place(1, page));
        }
        waiting.push(place(2, 3));
        assert_eq!(waiting.take(2), [place(1, 5), place(1, 3)]);
        waiting.push(place(1, 5));
        assert_eq!(waiting.len(), 4);
        waiting.forget(SpaceId(2));
        assert_eq!(waiting.take(usize::MAX), [place(1, 9), place(1, 1), place(1, 5)]);
        assert_eq!(waiting.len(), 0);
    }
}
