//! What the log says of handshakes that failed: strangers cause those at will, so that there is a bound a second.

use std::time::{Duration, Instant};

use super::limits::FAILURES_LOGGED_MAX;
use crate::CloseReason;

/// The lines of this second.
#[derive(Debug, Default)]
pub(super) struct Failures {
    began: Option<Instant>,
    lines: u32,
    /// Every failure, logged or not.
    #[cfg(test)]
    pub all: std::collections::VecDeque<CloseReason>,
}

impl Failures {
    /// Logs why no link was made, unless enough was said in this second.
    pub(super) fn tell(&mut self, now: Instant, reason: CloseReason) {
        if self.began.is_none_or(|began| now >= began + Duration::from_secs(1)) {
            if let Some(left_out @ 1..) = self.lines.checked_sub(FAILURES_LOGGED_MAX) {
                tracing::info!(left_out, "more handshakes failed");
            }
            (self.began, self.lines) = (Some(now), 0);
        }
        self.lines = self.lines.saturating_add(1);
        if self.lines <= FAILURES_LOGGED_MAX {
            tracing::info!(%reason, "no link was made");
        }
        #[cfg(test)]
        self.all.push_back(reason);
    }
}
