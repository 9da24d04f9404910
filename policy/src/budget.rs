//! Watermarks for the resident budget: when to page a workload, to evict, and to look again.
//!
//! ```text
//!  0 ........ page ......... low ..... budget ..... high ........ ceiling ... strays ... limit
//!             headroom       budget                 budget        high        3/8        budget + overshoot
//!             < R            - slack/2              + slack/2     + slack
//! ```
//! R = max(budget/8, 16 MiB), at most budget/2; slack = budget/32 within 1..64 MiB. Below `page` a workload
//! is not touched at all. Above `high` pages are evicted down to `low`, so that the budget is what is resident on
//! average, and a program which needs just as much is not evicted at all. Faults may fill memory up to `ceiling`,
//! so that a burst as large as the slack need not wait. Above `strays` not all can have come by faults: the tree is stopped until its new
//! mappings and processes are registered.

use crate::ids::Bytes;
use crate::limits::{
    ALLOCATION_BYTES_PER_S, BUDGET_MIN, CALM_BYTES_PER_S, LOOK_MAX, LOOK_MIN, OVERSHOOT_MIN,
    PAGE_HEADROOM_MIN, SLACK_MAX, SLACK_MIN,
};
use std::time::Duration;

/// What to do at the present amount of resident memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The workload should be attached (its evictor started) and its memory registered, so that its pages can be evicted.
    pub page: bool,
    /// Bytes that should go out now.
    pub evict: Bytes,
    /// Look again after this time at the latest.
    pub look_again: Duration,
}

/// A budget of resident bytes and its watermarks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    budget: u64,
    slack: u64,
    page_headroom: u64,
}

impl Budget {
    /// A budget of `budget` bytes; less than [`BUDGET_MIN`] is treated as [`BUDGET_MIN`].
    pub fn new(budget: Bytes) -> Self {
        let budget = budget.0.max(BUDGET_MIN);
        let slack = (budget / 32).clamp(SLACK_MIN, SLACK_MAX);
        let page_headroom = (budget / 8).max(PAGE_HEADROOM_MIN).min(budget / 2);
        Self { budget, slack, page_headroom }
    }

    /// The budget itself.
    pub const fn bytes(&self) -> Bytes {
        Bytes(self.budget)
    }

    /// Eviction starts above this.
    pub const fn high(&self) -> Bytes {
        Bytes(self.budget.saturating_add(self.slack / 2))
    }

    /// Eviction goes down to this.
    pub const fn low(&self) -> Bytes {
        Bytes(self.budget - self.slack / 2)
    }

    /// Faults wait rather than make more than this resident.
    pub const fn ceiling(&self) -> Bytes {
        Bytes(self.budget.saturating_add(self.slack + self.slack / 2))
    }

    /// Above this memory grows that does not come by faults: its owners should be stopped until it is registered.
    pub fn strays(&self) -> Bytes {
        Bytes(self.ceiling().0.saturating_add(self.beyond_ceiling() / 8 * 3))
    }

    fn beyond_ceiling(&self) -> u64 {
        self.limit().saturating_sub(self.ceiling()).0
    }

    /// The most that may ever be resident: a tenth more than the budget, or 32 MiB if that is more.
    pub fn limit(&self) -> Bytes {
        Bytes(self.budget.saturating_add((self.budget / 10).max(OVERSHOOT_MIN)))
    }

    /// How long a calm workload may go unseen: in this time it does not exceed the limit.
    pub fn calm(&self) -> Duration {
        let overshoot = self.limit().saturating_sub(self.bytes()).0;
        time_for(overshoot, CALM_BYTES_PER_S)
    }

    /// What to do when `resident` bytes are resident.
    pub fn decide(&self, resident: Bytes) -> Decision {
        let headroom = self.bytes().saturating_sub(resident).0;
        let evict = match resident > self.high() {
            true => resident.saturating_sub(self.low()),
            false => Bytes(0),
        };
        Decision {
            page: headroom < self.page_headroom,
            evict,
            look_again: time_for(headroom, ALLOCATION_BYTES_PER_S),
        }
    }
}

/// How long a workload which allocates `bytes_per_s` needs for `bytes`, within the bounds of looks.
fn time_for(bytes: u64, bytes_per_s: u64) -> Duration {
    let micros = u128::from(bytes) * 1_000_000 / u128::from(bytes_per_s);
    Duration::from_micros(micros.try_into().unwrap_or(u64::MAX)).clamp(LOOK_MIN, LOOK_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_program_under_its_budget_is_left_alone() {
        let decision = Budget::new(Bytes(256 * MIB)).decide(Bytes(64 * MIB));
        assert!(!decision.page);
        assert_eq!(decision.evict, Bytes(0));
    }

    #[test]
    fn the_watermarks_of_64_mib() {
        let budget = Budget::new(Bytes(64 * MIB));
        assert_eq!((budget.low(), budget.high()), (Bytes(63 * MIB), Bytes(65 * MIB)));
        assert_eq!(budget.ceiling(), Bytes(67 * MIB));
        assert_eq!(budget.limit(), Bytes(96 * MIB));
        assert_eq!(budget.strays().0 / MIB, 77);
        assert!(!budget.decide(Bytes(48 * MIB)).page);
        assert!(budget.decide(Bytes(49 * MIB)).page);
        assert_eq!(budget.decide(Bytes(65 * MIB)).evict, Bytes(0));
        assert_eq!(budget.decide(Bytes(66 * MIB)).evict, Bytes(3 * MIB));
    }

    #[test]
    fn the_calm_are_looked_at_as_seldom_as_their_budget_allows() {
        let calm = |mib| Budget::new(Bytes(mib * MIB)).calm();
        assert_eq!(calm(64), Duration::from_micros(10_416));
        assert_eq!(calm(800), Duration::from_micros(26_041));
        assert_eq!(calm(1 << 20), LOOK_MAX);
    }

    #[test]
    fn looks_follow_the_headroom() {
        let budget = Budget::new(Bytes(1 << 30));
        assert_eq!(budget.decide(Bytes(0)).look_again, LOOK_MAX);
        assert_eq!(
            budget.decide(Bytes((1 << 30) - 64 * MIB)).look_again,
            Duration::from_micros(3906)
        );
        assert_eq!(budget.decide(Bytes(2 << 30)).look_again, LOOK_MIN);
    }

    proptest! {
        /// The marks are in order, and each step implies the ones before it, for any amounts.
        #[test]
        fn marks_are_ordered(budget: u64, resident: u64) {
            let budget = Budget::new(Bytes(budget));
            prop_assert!(Bytes(0) < budget.low() && budget.low() < budget.high());
            prop_assert!(budget.low() < budget.bytes() && budget.bytes() <= budget.high());
            prop_assert!(budget.high() <= budget.ceiling() && budget.ceiling() <= budget.strays());
            prop_assert!(budget.strays() <= budget.limit());
            let decision = budget.decide(Bytes(resident));
            prop_assert!(decision.evict == Bytes(0) || decision.page);
            prop_assert!(decision.evict.0 <= resident);
            prop_assert!((LOOK_MIN..=LOOK_MAX).contains(&decision.look_again));
            let after = Bytes(resident).saturating_sub(decision.evict);
            prop_assert_eq!(budget.decide(after).evict, Bytes(0));
        }
    }
}
