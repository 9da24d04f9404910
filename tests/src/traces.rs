//! What gms leaves in a process that it has let go: nothing.

use crate::mib::Mib;
use crate::procfs::{evictors_of, exists, has_uffd, mappings, rss_anon};

/// Fails the test unless nobody pages the process any more, and at least so much of its memory is resident.
pub fn assert_let_go(pid: i32, least: Mib) {
    assert!(exists(pid), "{pid} has ended");
    assert!(!has_uffd(pid), "memory of {pid} is still registered");
    let evictors = evictors_of(pid);
    assert!(evictors.is_empty(), "evictors still have the memory of {pid}: {evictors:?}");
    let resident = rss_anon(pid).unwrap_or(0);
    assert!(
        resident >= least.bytes(),
        "not all pages of {pid} came home: {resident} B of {least:?}"
    );
}

/// The mappings of a process before it was attached. It must not map or unmap anything itself from then on.
pub struct Before {
    pid: i32,
    mappings: Vec<String>,
}

impl Before {
    /// The process as it is.
    pub fn of(pid: i32) -> Before {
        let mappings = mappings(pid);
        assert!(!mappings.is_empty(), "{pid} has no mappings");
        Before { pid, mappings }
    }

    /// Fails the test unless it has those mappings and no others.
    pub fn assert_unchanged(&self) {
        let now = mappings(self.pid);
        let not_in = |these: &[String], those: &[String]| -> Vec<String> {
            these.iter().filter(|mapping| !those.contains(mapping)).cloned().collect()
        };
        let (left, missing) = (not_in(&now, &self.mappings), not_in(&self.mappings, &now));
        assert!(
            left.is_empty() && missing.is_empty(),
            "the mappings of {} are not as before: {left:#?} instead of {missing:#?}",
            self.pid
        );
    }
}
