//! Kills the pagers of a workload, one after the other.

use std::time::Duration;

use gms_pager::kernel::proc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::dice::Dice;
use crate::procfs::{exists, name};
use crate::program::poll_until;
use crate::stage::told;

/// For another pager to go on, on a busy machine.
const SOON: Duration = Duration::from_secs(30);
/// Between two kills, in ms.
const PAUSE_MAX: u64 = 300;

/// Kills pagers of one workload.
pub struct Killer {
    front: i32,
    dice: Dice,
    dead: Vec<i32>,
}

impl Killer {
    /// Those of `gms run`, whose process id is `front`, at moments that the seed says.
    pub fn new(front: i32, seed: u64) -> Killer {
        told(&format!("kills by seed {seed}"));
        Killer { front, dice: Dice::new(seed), dead: Vec::new() }
    }

    /// The pager that goes on for the last that was killed; `None` if nothing is left of gms.
    pub fn await_next(&mut self) -> Option<i32> {
        let front = self.front;
        poll_until("another pager", SOON, || match self.pager() {
            Some(pid) => Some(Some(pid)),
            None => (!exists(front)).then_some(None),
        })
    }

    /// The one that has begun: of those that are about to go on none has threads yet.
    pub fn pager(&self) -> Option<i32> {
        let is_pager = |pid: &i32| {
            let threads = proc::threads(*pid).into_iter();
            let mut names = threads.filter_map(proc::thread_name);
            let mut has_begun = || names.any(|name| name.trim_end() == "evict");
            !self.dead.contains(pid) && name(*pid) == "gms" && has_begun()
        };
        proc::children(self.front).into_iter().find(is_pager)
    }

    /// Kills one, some time after it has begun. False if there is none.
    pub fn kill(&mut self) -> bool {
        let Some(pid) = self.await_next() else { return false };
        // Nothing is awaited: it may be doing anything by then.
        std::thread::sleep(Duration::from_millis(self.dice.below(PAUSE_MAX)));
        self.note(pid);
        kill(Pid::from_raw(pid), Signal::SIGKILL).is_ok()
    }

    /// One has been killed by somebody else.
    pub fn note(&mut self, dead: i32) {
        self.dead.push(dead);
    }
}
