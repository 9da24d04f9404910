//! The endpoints of one listener, one a thread, share its bounds: what each link may hold depends on the links of all.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::limits::{HANDSHAKES_MAX, RETRY_MARK};

/// Links of all endpoints of a listener.
#[derive(Debug, Default)]
struct Totals {
    established: AtomicUsize,
    /// Those in their handshake, or being closed, as well.
    begun: AtomicUsize,
}

/// One endpoint among those of its listener.
#[derive(Debug)]
pub(super) struct Crowd {
    totals: Arc<Totals>,
    /// What this endpoint has added to the totals.
    established: usize,
    begun: usize,
    /// Which of the endpoints it is.
    pub index: usize,
    endpoints: usize,
}

impl Crowd {
    /// The `endpoints` of a new listener.
    pub(super) fn of(endpoints: usize) -> impl Iterator<Item = Self> {
        let totals = Arc::new(Totals::default());
        (0..endpoints).map(move |index| Self {
            totals: totals.clone(),
            established: 0,
            begun: 0,
            index,
            endpoints,
        })
    }

    /// The only endpoint of its listener, or one that does not listen.
    pub(super) fn alone() -> Self {
        Self { totals: Arc::default(), established: 0, begun: 0, index: 0, endpoints: 1 }
    }

    /// This endpoint's part of [`HANDSHAKES_MAX`] and of [`RETRY_MARK`].
    pub(super) fn handshakes(&self) -> (usize, usize) {
        (HANDSHAKES_MAX.div_ceil(self.endpoints), RETRY_MARK.div_ceil(self.endpoints))
    }

    /// Established links of the other endpoints.
    pub(super) fn others(&self) -> usize {
        self.totals.established.load(Relaxed).wrapping_sub(self.established)
    }

    /// Counts a link that begins here; returns how many the other endpoints have, its rank among all being certain.
    pub(super) fn begin(&mut self) -> usize {
        let others = self.totals.begun.fetch_add(1, Relaxed).wrapping_sub(self.begun);
        self.begun += 1;
        others
    }

    /// Tells the other endpoints how many links this one has: established, and begun in all.
    pub(super) fn tell(&mut self, established: usize, begun: usize) {
        for (total, told, now) in [
            (&self.totals.established, &mut self.established, established),
            (&self.totals.begun, &mut self.begun, begun),
        ] {
            if *told != now {
                total.fetch_add(now.wrapping_sub(*told), Relaxed);
                *told = now;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_know_how_many_links_the_others_have() {
        let [mut a, mut b] = Crowd::of(2).collect::<Vec<_>>().try_into().unwrap();
        assert_eq!((a.begin(), b.begin()), (0, 1));
        a.tell(7, 9);
        b.tell(2, 2);
        assert_eq!((a.others(), b.others(), a.begin(), b.begin()), (2, 7, 2, 10));
        a.tell(0, 0);
        assert_eq!((b.others(), b.begin()), (0, 0));
        assert_eq!(a.handshakes(), (HANDSHAKES_MAX / 2, RETRY_MARK / 2));
    }
}
