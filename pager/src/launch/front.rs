//! The process which the shell sees.
//!
//! `gms run` splits in two. The front stays in the shell's job: it passes signals on, and is stopped when the command
//! stops. The pager behind it is in a process group of its own, so that it keeps serving faults, and its agents keep
//! its leases, however long the job is stopped.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{ForkResult, fork};
use serde::{Deserialize, Serialize};

use super::child::{self, End, State};
use super::signals::Signals;
use crate::exit::EXIT_GMS;
use crate::handed::{Descriptors, Number};
use crate::keeper::{Keeper, KeeperRecord};
use crate::kernel::pidfd::pidfd_open;
use crate::kernel::proc;
use crate::kernel::proc::self_pid;
use crate::privilege::Part;
use crate::shared::Outcome;
use crate::speech::{self, say};

/// For evictors to execute their wills. They are known by their name only, which anybody can have.
const WILL_DEADLINE: Duration = Duration::from_secs(1);
/// Looks at everything at least this often, in case a notice is lost.
const LOOK_MS: u16 = 1000;

/// Which of the two processes this is.
pub enum Side {
    /// Before the shell.
    Front(Front),
    /// Behind it.
    Pager(Link, Signals),
}

/// The process before the shell.
pub struct Front {
    pager: i32,
    keeper: Keeper,
    /// Children that were this process's before it became gms. Of their descendants nothing is known.
    foreign: Vec<i32>,
    signals: Signals,
}

/// The pager's hold on the front.
pub struct Link {
    front: OwnedFd,
    keeper: Keeper,
    /// The keeper's process.
    process: OwnedFd,
}

/// Splits this process, which must have one thread only, with all signals blocked in both.
pub fn split() -> io::Result<Side> {
    let signals = Signals::block()?;
    let front = pidfd_open(self_pid())?;
    let keeper = Keeper::new()?;
    let foreign = proc::children(self_pid());
    // Were the pager killed, its children come here.
    nix::sys::prctl::set_child_subreaper(true)?;
    // SAFETY: there is no other thread whose locks the child could miss.
    match unsafe { fork()? } {
        ForkResult::Parent { child } => {
            Ok(Side::Front(Front { pager: child.as_raw(), keeper, foreign, signals }))
        }
        ForkResult::Child => {
            let process = keeper.spawn(true)?;
            Ok(Side::Pager(Link { front, keeper, process }, signals))
        }
    }
}

/// What the next binary of the pager is told of its link.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LinkRecord {
    front: Number,
    keeper: KeeperRecord,
}

impl Link {
    /// What the next binary needs.
    pub(super) fn hand_over(&self, to: &mut Descriptors) -> Option<LinkRecord> {
        let keeper = self.keeper.hand_over(&self.process, to)?;
        Some(LinkRecord { front: to.give(&self.front), keeper })
    }

    /// The link again, with another keeper; and the keeper before. This process must have one thread only.
    pub(super) fn again(record: LinkRecord) -> io::Result<(Link, OwnedFd)> {
        let (front, (keeper, before)) = (record.front.take()?, Keeper::again(&record.keeper)?);
        let process = keeper.spawn(true)?;
        Ok((Link { front, keeper, process }, before))
    }

    /// See [`Keeper::dismiss`].
    pub fn dismiss_keeper(&self, outcome: &Outcome) {
        self.keeper.dismiss(outcome);
    }

    /// Sends the front a signal: SIGSTOP when the command stopped, SIGCONT when it goes on.
    pub fn send(&self, signal: i32) {
        // SAFETY: pidfd_send_signal reads no memory when the info is null. A front which is gone is seen by poll.
        unsafe {
            libc::syscall(libc::SYS_pidfd_send_signal, self.front.as_raw_fd(), signal, 0_usize, 0);
        }
    }

    /// Readable when the front is gone.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.front.as_fd()
    }
}

impl Front {
    /// Stands in for the command until the pager ends; returns the exit status.
    pub fn stand_in(mut self) -> u8 {
        // Best effort: the pager tells if that cannot be.
        let _ = Part::Front.give_up_rest();
        loop {
            let mut fds = [PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
            let _ = poll(&mut fds, PollTimeout::from(LOOK_MS));
            while let Some(arrival) = self.signals.next() {
                if arrival.is_for_the_command(self.pager) {
                    child::send(self.pager, arrival.number);
                }
            }
            let mut end = None;
            child::reap(|pid, how| {
                end = end.or((pid == self.pager).then_some(how));
                self.foreign.retain(|&foreign| foreign != pid);
            });
            match end {
                Some(End::Exited(status)) => return status,
                Some(End::Killed(signal)) => return self.forsaken(signal),
                None if child::state(self.pager) == State::Gone => return EXIT_GMS,
                None => {}
            }
        }
    }

    /// The pager was killed: evictors kill their processes then, and this what has no evictor.
    fn forsaken(&self, signal: i32) -> u8 {
        // Not the keeper: memory that nobody else serves would read as zeros.
        let spared = [&self.foreign[..], &[self.keeper.pid()]].concat();
        child::kill_all(&self.signals, &spared, WILL_DEADLINE);
        // The shell waits for this process, and must not for somebody who reads.
        speech::begin();
        say(format!(
            "the pager was ended by signal {signal}, so the command was killed: start it again"
        ));
        speech::end();
        EXIT_GMS
    }
}
