//! How often something may be done: a bucket of tokens, kept as the time at which it is full again (the generic cell rate algorithm).

use std::time::{Duration, Instant};

/// One bucket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    full_at: Instant,
}

impl Pace {
    /// Full.
    pub(crate) fn new(now: Instant) -> Self {
        Self { full_at: now }
    }

    /// Takes one of `burst` tokens, of which one comes back `every` so often; false if there is none.
    pub(crate) fn admits(&mut self, now: Instant, every: Duration, burst: u32) -> bool {
        let full_at = self.full_at.max(now) + every;
        let admits = full_at <= now + every * burst;
        if admits {
            self.full_at = full_at;
        }
        admits
    }

    /// Whether it is full, as a new one is.
    pub(crate) fn is_full(&self, now: Instant) -> bool {
        self.full_at <= now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_admitted_and_then_one_each_period() {
        let (mut now, every) = (Instant::now(), Duration::from_millis(20));
        let mut pace = Pace::new(now);
        let burst =
            std::iter::repeat_with(|| pace.admits(now, every, 5)).take_while(|admits| *admits);
        assert_eq!(burst.count(), 5);
        let mut admitted = 0;
        for _ in 0..1000 {
            now += Duration::from_millis(1);
            admitted += u32::from(pace.admits(now, every, 5));
        }
        assert_eq!(admitted, 50);
        assert!(!pace.is_full(now) && pace.is_full(now + every * 5));
    }
}
