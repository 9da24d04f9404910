//! When a page that two agents have is asked of the second one too: hedged requests (Dean and Barroso, "The Tail at Scale", CACM 2013).
//!
//! After the time within which 95 % of the reads before were answered, and for one read in twenty at most, so that a cluster which is slow as a whole
//! does not get twice the load. The quantile is followed by steps: up by 19 parts where a read took longer, down by one where it did not, which
//! are in balance where one read in twenty takes longer.

use std::time::Duration;

use crate::limits::{HEDGE_AFTER_MAX, HEDGE_AFTER_MIN, HEDGE_CREDIT_MAX};

/// Reads for each that may be hedged.
const READS_PER_HEDGE: u32 = 20;
/// A step down is this part of the estimate.
const STEP: u32 = 1000;

/// See the module's documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hedge {
    p95_ns: u64,
    /// In reads: [`READS_PER_HEDGE`] are worth a hedge.
    credit: u32,
}

impl Default for Hedge {
    fn default() -> Self {
        let p95_ns = HEDGE_AFTER_MAX.as_nanos() as u64;
        Self { p95_ns, credit: HEDGE_CREDIT_MAX * READS_PER_HEDGE }
    }
}

impl Hedge {
    /// A read was answered.
    pub fn on_read(&mut self, took: Duration) {
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let step = (self.p95_ns / u64::from(STEP)).max(1);
        let limit = HEDGE_AFTER_MAX.as_nanos() as u64;
        self.p95_ns = match took > self.p95_ns {
            true => (self.p95_ns + step * u64::from(READS_PER_HEDGE - 1)).min(limit),
            false => self.p95_ns - step,
        }
        .max(STEP.into());
        self.credit = (self.credit + 1).min(HEDGE_CREDIT_MAX * READS_PER_HEDGE);
    }

    /// How long a read may take until it is hedged.
    pub fn after(&self) -> Duration {
        Duration::from_nanos(self.p95_ns).clamp(HEDGE_AFTER_MIN, HEDGE_AFTER_MAX)
    }

    /// Whether another read may be hedged, which then counts as such. One that has waited for [`HEDGE_AFTER_MAX`] may be in any case.
    pub fn take(&mut self, waited: Duration) -> bool {
        let paid = self.credit >= READS_PER_HEDGE;
        if paid {
            self.credit -= READS_PER_HEDGE;
        }
        paid || waited >= HEDGE_AFTER_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOW: Duration = Duration::from_millis(8);

    #[test]
    fn one_read_in_twenty_is_slower_than_the_time_after_which_it_is_hedged() {
        let mut hedge = Hedge::default();
        // Between 2 and 4 ms, all as often: 95 % are below 3.9 ms.
        let times = (0..100_000u64).map(|n| Duration::from_micros(2000 + n * 7919 % 2000));
        times.for_each(|took| hedge.on_read(took));
        let after = hedge.after().as_micros();
        assert!((3700..4000).contains(&after), "{after} us");
        // Agents that are all slower are not asked more for that.
        (0..20_000).for_each(|_| hedge.on_read(SLOW));
        assert!(hedge.after() > SLOW * 9 / 10, "{:?}", hedge.after());
    }

    #[test]
    fn reads_of_a_fast_network_are_not_hedged_before_the_least_time() {
        let mut hedge = Hedge::default();
        (0..20_000).for_each(|_| hedge.on_read(Duration::from_micros(20)));
        assert_eq!(hedge.after(), HEDGE_AFTER_MIN);
    }

    #[test]
    fn few_reads_are_hedged_but_none_waits_for_long() {
        let mut hedge = Hedge::default();
        let hedged = (0..10_000).filter(|_| {
            hedge.on_read(SLOW);
            hedge.take(SLOW)
        });
        let count = hedged.count() as u32;
        assert!((500..=500 + HEDGE_CREDIT_MAX).contains(&count), "{count} of 10,000");
        assert!(!hedge.take(SLOW) && hedge.take(HEDGE_AFTER_MAX));
    }
}
