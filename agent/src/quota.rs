//! How much the log says of what clients do: they can connect and leave, begin and end as often as they like.

use crate::limits::CLIENT_LINES_MAX;
use std::time::{Duration, Instant};

/// The lines of this second.
#[derive(Debug, Default)]
pub(crate) struct Quota {
    began: Option<Instant>,
    lines: u32,
}

impl Quota {
    /// Whether there may be another line now. Says how many were left out when there may again.
    pub(crate) fn admits(&mut self, now: Instant) -> bool {
        if self.began.is_none_or(|began| now >= began + Duration::from_secs(1)) {
            if let Some(left_out @ 1..) = self.lines.checked_sub(CLIENT_LINES_MAX) {
                tracing::info!(left_out, "more links and workloads came or went");
            }
            (self.began, self.lines) = (Some(now), 0);
        }
        self.lines = self.lines.saturating_add(1);
        self.lines <= CLIENT_LINES_MAX
    }
}
