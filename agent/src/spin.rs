//! Whether to spin before blocking. Waking an idle CPU costs more than an exchange, so spinning pays when the next
//! request comes soon; it only burns time when none does.

use std::time::Duration;

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

/// For threads which others wait for.
pub const SLICE: Duration = Duration::from_micros(100);

/// Asks the scheduler to let the calling thread run soon rather than long: a custom slice (sched_setattr(2), since Linux 6.12). Then it need
/// not wait until another has used up a slice of some milliseconds. Without effect on older kernels.
pub fn prefer_latency(slice: Duration) {
    prefer_latency_of(0, slice);
}

/// The same for another thread.
pub fn prefer_latency_of(tid: i32, slice: Duration) {
    // SAFETY: all zero is a valid sched_attr. The kernel writes and reads at most `size` bytes of it; 0 is the calling thread.
    unsafe {
        let mut attr: libc::sched_attr = std::mem::zeroed();
        attr.size = size_of::<libc::sched_attr>() as u32;
        if libc::syscall(libc::SYS_sched_getattr, tid, &raw mut attr, attr.size, 0) == 0 {
            attr.sched_runtime = slice.as_nanos() as u64;
            libc::syscall(libc::SYS_sched_setattr, tid, &raw const attr, 0);
        }
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
