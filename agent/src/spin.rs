//! Whether to spin before blocking. Waking an idle CPU costs more than an exchange, so spinning pays when the next
//! request comes soon; it only burns time when none does.

/// Remembers how recent spins ended.
#[derive(Clone, Copy, Debug)]
pub struct Spin {
    score: u8,
    skipped: u8,
}

impl Spin {
    /// Highest score; each failure takes one, each success gives two.
    const SCORE_MAX: u8 = 32;
    /// With no score left one spin in this many is tried.
    const PROBE: u8 = 16;

    /// Starts hopeful.
    pub fn new() -> Self {
        Self { score: Self::SCORE_MAX / 2, skipped: 0 }
    }

    /// Whether to spin this time.
    pub fn is_worthwhile(&mut self) -> bool {
        if self.score > 0 {
            return true;
        }
        self.skipped = (self.skipped + 1) % Self::PROBE;
        self.skipped == 0
    }

    /// A spin ended: something came (`success`), or its time was over.
    pub fn report(&mut self, success: bool) {
        self.score = match success {
            true => (self.score + 2).min(Self::SCORE_MAX),
            false => self.score.saturating_sub(1),
        };
    }
}

impl Default for Spin {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spins_while_it_pays() {
        let mut spin = Spin::new();
        (0..100).for_each(|_| spin.report(false));
        let tries = (0..160).filter(|_| spin.is_worthwhile()).count();
        assert_eq!(tries, 10);
        spin.report(true);
        assert!(spin.is_worthwhile() && spin.is_worthwhile());
        spin.report(false);
        spin.report(false);
        assert!(!spin.is_worthwhile());
    }
}
