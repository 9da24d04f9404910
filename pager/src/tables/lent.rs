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
