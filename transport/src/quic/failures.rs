//! What the log says of handshakes that failed. Strangers cause those at will, and a peer whose key is refused tries again for ever: there is a bound a second, and
//! a bound a minute for each source and kind of reason.

use std::collections::HashMap;
use std::mem::{Discriminant, discriminant};
use std::time::{Duration, Instant};

use gms_policy::pace::Pace;

use super::admission::Source;
use super::limits::{FAILURE_KINDS_MAX, FAILURES_LOGGED_MAX};
use crate::CloseReason;

/// What a source has in common with its other failures.
type Kind = (Source, Discriminant<CloseReason>);

/// The lines of this second, and those of each source.
#[derive(Debug, Default)]
pub(super) struct Failures {
    began: Option<Instant>,
    lines: u32,
    paces: HashMap<Kind, Pace>,
    /// Every failure, logged or not.
    #[cfg(test)]
    pub all: std::collections::VecDeque<CloseReason>,
}

impl Failures {
    /// Logs why no link was made, unless enough was said.
    pub(super) fn tell(&mut self, now: Instant, source: Source, reason: CloseReason) {
        if self.may_log(now, (source, discriminant(&reason))) {
            tracing::info!(%reason, "no link was made");
        }
        #[cfg(test)]
        self.all.push_back(reason);
    }

    fn may_log(&mut self, now: Instant, kind: Kind) -> bool {
        if !self.pace_allows(now, kind) {
            return false;
        }
        if self.began.is_none_or(|began| now >= began + Duration::from_secs(1)) {
            if let Some(left_out @ 1..) = self.lines.checked_sub(FAILURES_LOGGED_MAX) {
                tracing::info!(left_out, "more handshakes failed");
            }
            (self.began, self.lines) = (Some(now), 0);
        }
        self.lines = self.lines.saturating_add(1);
        self.lines <= FAILURES_LOGGED_MAX
    }

    /// Kinds beyond those that are remembered have the bound a second only.
    fn pace_allows(&mut self, now: Instant, kind: Kind) -> bool {
        if self.paces.len() >= FAILURE_KINDS_MAX && !self.paces.contains_key(&kind) {
            self.paces.retain(|_, pace| !pace.is_over(now));
            if self.paces.len() >= FAILURE_KINDS_MAX {
                return true;
            }
        }
        let pace = self.paces.entry(kind).or_default();
        let left_out = pace.left_out();
        if pace.is_over(now) && left_out > 0 {
            tracing::info!(left_out, "more handshakes of one source failed so");
        }
        pace.allows(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gms_policy::pace::LINES_MAX;
    use std::net::Ipv4Addr;

    fn kind(n: u32) -> Kind {
        let addr = (Ipv4Addr::from_bits(n), 1).into();
        (Source::of(Ipv4Addr::from_bits(n).into()), discriminant(&CloseReason::Unfinished { addr }))
    }

    #[test]
    fn a_peer_that_fails_for_ever_has_some_lines_a_minute_and_others_have_theirs() {
        let (start, mut failures) = (Instant::now(), Failures::default());
        let minutes = 10;
        let at = |n| start + Duration::from_millis(300) * n;
        let lines = (0..minutes * 200).filter(|&n| failures.may_log(at(n), kind(1))).count();
        assert_eq!(lines, (minutes * LINES_MAX) as usize);
        assert!(failures.may_log(at(minutes * 200), kind(2)));
    }

    #[test]
    fn a_crowd_of_strangers_is_not_remembered_without_bound() {
        let (now, mut failures) = (Instant::now(), Failures::default());
        let lines = (0..100_000).filter(|&n| failures.may_log(now, kind(n))).count();
        assert_eq!(lines, FAILURES_LOGGED_MAX as usize);
        assert_eq!(failures.paces.len(), FAILURE_KINDS_MAX);
    }
}
