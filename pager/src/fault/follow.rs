//! Keeps the fault thread on the CPU of the thread that faults: that one sleeps meanwhile, and to wake a thread on another CPU, which is
//! idle, costs more than all else in a fault (measured: 6 us of 25).
//!
//! Where a thread was last is asked of /proc now and then, while its page is awaited. Threads which fault on several CPUs are not followed:
//! then the scheduler decides.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicI32, Ordering};

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// Of so many faults one is looked at.
const EVERY: u32 = 16;
/// So many in a row must agree.
const AGREE: u32 = 3;
/// Field of /proc/PID/stat, counted from behind the command's name: the CPU.
const PROCESSOR: usize = 36;

/// See the module's documentation.
pub(super) struct Follow {
    /// Where this thread may run at all.
    allowed: CpuSet,
    pinned: Option<usize>,
    /// The CPU of the last looks, and how many of them agreed.
    seen: (usize, u32),
    count: u32,
    /// To be looked at.
    next: Option<i32>,
    stat: Option<(i32, File)>,
}

impl Follow {
    /// For the calling thread.
    pub(super) fn new() -> Follow {
        let me = Pid::from_raw(0);
        let allowed = sched_getaffinity(me).unwrap_or_default();
        Follow { allowed, pinned: None, seen: (0, 0), count: 0, next: None, stat: None }
    }

    /// A thread waits for a page from afar.
    pub(super) fn fault(&mut self, tid: i32) {
        self.count += 1;
        if self.count >= EVERY {
            (self.count, self.next) = (0, Some(tid));
        }
    }

    /// Looks, if it is time to, and goes where the faults are; `fault_cpu` is told.
    pub(super) fn look(&mut self, fault_cpu: &AtomicI32) {
        let Some(cpu) = self.next.take().and_then(|tid| self.cpu_of(tid)) else { return };
        self.seen = if self.seen.0 == cpu { (cpu, self.seen.1 + 1) } else { (cpu, 1) };
        if self.pinned.is_some_and(|pinned| pinned != cpu) {
            self.release(fault_cpu);
        }
        if self.pinned.is_none() && self.seen.1 >= AGREE {
            let mut only = CpuSet::new();
            let may = self.allowed.is_set(cpu).unwrap_or(false) && only.set(cpu).is_ok();
            if may && sched_setaffinity(Pid::from_raw(0), &only).is_ok() {
                self.pinned = Some(cpu);
                fault_cpu.store(cpu as i32, Ordering::Relaxed);
            }
        }
    }

    /// Runs wherever the scheduler likes.
    pub(super) fn release(&mut self, fault_cpu: &AtomicI32) {
        if self.pinned.take().is_some() {
            // Fails only if those CPUs have gone, and then the kernel has moved the thread already.
            let _ = sched_setaffinity(Pid::from_raw(0), &self.allowed);
            fault_cpu.store(-1, Ordering::Relaxed);
        }
    }

    fn cpu_of(&mut self, tid: i32) -> Option<usize> {
        if self.stat.as_ref().is_none_or(|(known, _)| *known != tid) {
            self.stat = Some((tid, File::open(format!("/proc/{tid}/stat")).ok()?));
        }
        let mut text = [0u8; 512];
        let length = self.stat.as_ref()?.1.read_at(&mut text, 0).ok()?;
        processor(&text[..length])
    }
}

/// The CPU on which the thread of this /proc/PID/stat ran last.
fn processor(stat: &[u8]) -> Option<usize> {
    let behind = stat.iter().rposition(|&byte| byte == b')')? + 2;
    let field = stat.get(behind..)?.split(|&byte| byte == b' ').nth(PROCESSOR)?;
    std::str::from_utf8(field).ok()?.trim_end().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_is_the_one_of_this_thread() {
        let mut one = CpuSet::new();
        let cpu = (0..CpuSet::count())
            .find(|&cpu| Follow::new().allowed.is_set(cpu).unwrap_or(false))
            .unwrap();
        one.set(cpu).unwrap();
        sched_setaffinity(Pid::from_raw(0), &one).unwrap();
        let stat = std::fs::read("/proc/thread-self/stat").unwrap();
        assert_eq!(processor(&stat), Some(cpu));
        assert_eq!(processor(b"7 (a) b) R 1"), None);
    }

    #[test]
    fn faults_in_one_place_are_followed_and_others_not() {
        let mut follow = Follow::new();
        let tid = nix::unistd::gettid().as_raw();
        let cpu = AtomicI32::new(-1);
        let faults = |follow: &mut Follow, tid| {
            for _ in 0..EVERY * AGREE {
                follow.fault(tid);
                follow.look(&cpu);
            }
        };
        // Between two looks it may be moved to another CPU.
        for _ in 0..100 {
            if follow.pinned.is_none() {
                faults(&mut follow, tid);
            }
        }
        assert!(follow.pinned.is_some() && cpu.load(Ordering::Relaxed) >= 0);
        follow.release(&cpu);
        assert_eq!(cpu.load(Ordering::Relaxed), -1);
        let back = sched_getaffinity(Pid::from_raw(0)).unwrap();
        assert_eq!(back, follow.allowed);
        faults(&mut follow, i32::MAX);
        assert!(follow.pinned.is_none(), "a thread that has gone was followed");
    }
}
