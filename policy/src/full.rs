//! What becomes of a workload that must give pages away while no agent has room for them, or none can be reached.

use std::time::Duration;

/// The user's choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// Faults wait until an agent takes pages: the budget holds, the workload is slowed or stands still.
    Wait,
    /// The workload exceeds its budget.
    #[default]
    Grow,
    /// The workload is killed.
    Kill,
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FullAction {
    /// Let faults wait.
    Wait,
    /// Let the workload exceed its budget.
    Grow,
    /// Kill the workload.
    Kill,
}

/// A spell that is shorter kills nobody: an agent restarts in this time, or another workload frees what it held.
pub const KILL_AFTER: Duration = Duration::from_secs(1);

impl WhenFull {
    /// What to do when no agent has taken pages for the time `spell`.
    pub fn action(self, spell: Duration) -> FullAction {
        match self {
            WhenFull::Wait => FullAction::Wait,
            WhenFull::Grow => FullAction::Grow,
            WhenFull::Kill if spell < KILL_AFTER => FullAction::Wait,
            WhenFull::Kill => FullAction::Kill,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_long_spell_kills() {
        for spell in [Duration::ZERO, KILL_AFTER - Duration::from_nanos(1), KILL_AFTER] {
            assert_eq!(WhenFull::Wait.action(spell), FullAction::Wait);
            assert_eq!(WhenFull::default().action(spell), FullAction::Grow);
            let killed = WhenFull::Kill.action(spell) == FullAction::Kill;
            assert_eq!(killed, spell == KILL_AFTER);
        }
    }
}
