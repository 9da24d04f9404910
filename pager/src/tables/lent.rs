//! Pages that a worker fetches for a thread that waits. Another fault on such a page waits for that, as long as the page is at its agent: what has
//! come in its place meanwhile is served by itself.

use super::{Place, Tables};

impl Tables {
    /// A worker fetches the page from now on.
    pub fn begin_loan(&mut self, place: Place) {
        self.lent.insert(place);
    }

    /// It does so no more. Whoever waits for the page is to be woken, unless it was installed.
    pub fn end_loan(&mut self, place: Place) {
        if !self.lent.is_empty() && self.lent.remove(&place) {
            self.waiters.remove(&place);
        }
    }

    /// Whether a worker fetches the page.
    pub fn is_lent(&self, place: Place) -> bool {
        self.lent.contains(&place)
    }
}

#[cfg(test)]
mod tests {
    use gms_policy::ids::{AgentId, PageAddr, SpaceId};
    use gms_policy::redundancy::AgentSet;

    use super::*;
    use crate::page_map::PAGE;
    use crate::range_set::RangeSet;
    use crate::tables::{EvictOutcome, WriteOutcome};

    /// As for a page that is being made, which would be thrown away.
    #[test]
    fn a_page_that_is_awaited_already_is_not_fetched_ahead() {
        let (space, page) = (SpaceId(1), PageAddr::containing(PAGE));
        let mut tables = Tables::new(2, 1024).expect("a memfd");
        tables.add_space(space);
        tables.register(space, 0..4 * PAGE, &RangeSet::default());
        let (mut leaving, mut wake) = (Vec::new(), Vec::new());
        tables.begin_evict(space, &[page], &mut leaving);
        tables.finish_evict(leaving[0].1, EvictOutcome::Moved(7), &mut wake);
        for (slot, ..) in tables.start_write(AgentSet::of(AgentId(0)), 1) {
            tables.written(slot, AgentId(0), WriteOutcome::Stored);
        }
        tables.begin_loan((space, page));
        assert_eq!(tables.begin_prefetch(space, [page].into_iter(), 1), []);
        tables.end_loan((space, page));
        assert_eq!(tables.begin_prefetch(space, [page].into_iter(), 1).len(), 1);
    }
}
