//! When and where the evict thread runs: behind those who fault, or before all.

use std::sync::atomic::Ordering;
use std::time::Instant;

use gms_transport::Transport;
use nix::sched::sched_setaffinity;
use nix::unistd::Pid;

use super::EvictThread;
use crate::sync::lock;

/// The evict thread looks before the workload runs on: best effort. Not so the fault thread: while it spins, its yields must let an agent on the
/// same CPU run (p50 30 us instead of 60 to 75 us).
const NICE: libc::c_int = -19;
/// While it makes room ahead of need, it shares a CPU with an agent for which faults wait: those met by it would wait for milliseconds.
const NICE_AHEAD: libc::c_int = 0;

impl<T: Transport> EvictThread<T> {
    /// Takes CPU time only where it is spare, or as soon as it can, by what waits.
    pub(super) fn be_nice(&mut self, now: Instant) {
        let waits = || !self.shared.has_room(1) || lock(&self.shared.tables).roomless() > 0;
        let ahead = self.goal > 0 && !self.is_detaching() && !waits();
        let nice = match ahead && now < self.next_look && !self.halt.is_on() {
            true => NICE_AHEAD,
            false => NICE,
        };
        if std::mem::replace(&mut self.nice, nice) != nice {
            // SAFETY: no memory is involved; who 0 is the calling thread. Without the privilege nothing changes.
            unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
        }
    }

    /// Leaves the CPU on which faults are handled to them.
    pub(super) fn make_way(&mut self) {
        let cpu = self.shared.fault_cpu.load(Ordering::Relaxed);
        if std::mem::replace(&mut self.avoided, cpu) == cpu {
            return;
        }
        let mut cpus = self.allowed;
        if cpu >= 0 && cpus.unset(cpu as usize).is_err() {
            return;
        }
        // Where there is but one CPU the empty set is refused, and nothing changes.
        let _ = sched_setaffinity(Pid::from_raw(0), &cpus);
    }
}

/// While no page is leaving, in an eviction for which nobody waits: somebody may be waiting for an agent on the same CPU.
pub(super) fn give_way(nice: libc::c_int) {
    if nice == NICE_AHEAD {
        std::thread::yield_now();
    }
}
