//! How often lines about the same thing may be written: what changes without end would otherwise fill a log.

use std::time::{Duration, Instant};

/// For how long lines are counted.
pub const WINDOW: Duration = Duration::from_secs(60);
/// Lines of one window.
pub const LINES_MAX: u32 = 6;

/// The lines about one thing in this window.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    began: Option<Instant>,
    lines: u32,
}

impl Pace {
    /// Whether a line may be written `now`, which is counted then.
    pub fn allows(&mut self, now: Instant) -> bool {
        if self.is_over(now) {
            (self.began, self.lines) = (Some(now), 0);
        }
        self.lines = self.lines.saturating_add(1);
        self.lines <= LINES_MAX
    }

    /// Lines of this window that were not allowed.
    pub fn left_out(&self) -> u32 {
        self.lines.saturating_sub(LINES_MAX)
    }

    /// Whether the window is over.
    pub fn is_over(&self, now: Instant) -> bool {
        self.began.is_none_or(|began| now >= began + WINDOW)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_lines_a_window_are_allowed_however_many_there_would_be() {
        let start = Instant::now();
        let mut pace = Pace::default();
        let allowed = (0..600).filter(|tenth| pace.allows(start + WINDOW * *tenth / 200)).count();
        assert_eq!(allowed, 3 * LINES_MAX as usize);
        assert_eq!(pace.left_out(), 200 - LINES_MAX);
        assert!(pace.is_over(start + 3 * WINDOW) && !pace.is_over(start + 3 * WINDOW - WINDOW / 9));
    }
}
