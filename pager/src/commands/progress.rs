//! How far a detach has come, on a terminal.

use std::io::{IsTerminal, Write, stderr};
use std::time::{Duration, Instant};

use crate::size::Human;

/// How often it is shown.
pub(super) const EVERY: Duration = Duration::from_millis(200);

/// A line that is written over; nothing where stderr is no terminal.
pub(super) struct Progress {
    terminal: bool,
    total_bytes: u64,
    /// When it was shown last.
    shown: Option<Instant>,
}

impl Progress {
    /// Nothing is shown yet.
    pub(super) fn new(quiet: bool) -> Progress {
        Progress { terminal: stderr().is_terminal() && !quiet, total_bytes: 0, shown: None }
    }

    /// Shows that `away_bytes` are not home yet, unless it has shown something just before.
    pub(super) fn show(&mut self, now: Instant, away_bytes: u64) {
        let early = self.shown.is_some_and(|last| now.duration_since(last) < EVERY);
        if self.terminal && !early {
            self.shown = Some(now);
            let line = self.line(away_bytes);
            let _ = write!(stderr(), "\r{line}\x1b[K");
        }
    }

    fn line(&mut self, away_bytes: u64) -> String {
        self.total_bytes = self.total_bytes.max(away_bytes);
        let home = self.total_bytes - away_bytes;
        format!("gms: bringing pages home: {} of {}", Human(home), Human(self.total_bytes))
    }

    /// Ends the line.
    pub(super) fn end(&mut self) {
        if self.shown.take().is_some() {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_how_much_of_how_much() {
        let mut progress = Progress::new(true);
        assert_eq!(progress.line(8 << 20), "gms: bringing pages home: 0 B of 8 MiB");
        assert_eq!(progress.line(2 << 20), "gms: bringing pages home: 6 MiB of 8 MiB");
        assert_eq!(progress.line(0), "gms: bringing pages home: 8 MiB of 8 MiB");
    }
}
