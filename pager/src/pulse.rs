//! Time in which this process did not run: it was stopped (SIGSTOP, a debugger), or frozen with its cgroup. What is asked of others in that time
//! they may have answered; nobody was there to hear it.

use std::time::{Duration, Instant};

/// A shorter pause is that of a busy machine.
const PAUSE_MIN: Duration = Duration::from_secs(1);

/// Beats once in each turn of a thread.
#[derive(Debug)]
pub(crate) struct Pulse {
    last: Instant,
}

impl Pulse {
    /// It begins to beat.
    pub(crate) fn new(now: Instant) -> Pulse {
        Pulse { last: now }
    }

    /// Another turn. The thread may have waited for `longest` since the last one; returns for how long it did not run beyond that.
    pub(crate) fn beat(&mut self, now: Instant, longest: Duration) -> Duration {
        let since = now.saturating_duration_since(self.last);
        self.last = now;
        let missed = since.saturating_sub(longest);
        if missed > PAUSE_MIN { missed } else { Duration::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_no_wait_explains_was_missed() {
        let start = Instant::now();
        let mut pulse = Pulse::new(start);
        let mut at = |millis| {
            pulse.beat(start + Duration::from_millis(millis), Duration::from_secs(2)).as_millis()
        };
        assert_eq!((at(10), at(2_010), at(5_010)), (0, 0, 0));
        assert_eq!((at(22_010), at(22_010)), (15_000, 0));
    }
}
