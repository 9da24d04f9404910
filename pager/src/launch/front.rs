//! The process which the shell sees.
//!
//! `gms run` splits in three. The front stays in the shell's job: it passes signals on, and is stopped when the command
//! stops. Behind it, in a process group and a session of their own, are the pager, which keeps serving faults, and whose agents keep its
//! leases, however long the job is stopped, and the command's parent, the [`Reaper`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{ForkResult, Pid, fork, getpgid, getpgrp, getppid, pipe2, read};
use serde::{Deserialize, Serialize};

use super::child::{self, Consent, Held, State};
use super::reaper::Reaper;
use super::signals::Signals;
use crate::board::{self, Board, End};
use crate::exit::EXIT_GMS;
use crate::handed::{Descriptors, Number};
use crate::keeper::{self, KeeperRecord};
use crate::kernel::pidfd::{self, pidfd_open};
use crate::kernel::proc;
use crate::kernel::proc::self_pid;
use crate::privilege::Part;
use crate::shared::Outcome;
use crate::speech::{self, say};

/// Looks at everything at least this often, in case a notice is lost.
const LOOK_MS: u16 = 1000;

/// Which of the three processes this is.
pub enum Side {
    /// Before the shell.
    Front(Front),
    /// The command's parent.
    Reaper(Reaper),
    /// Serves the command's memory.
    Pager(Link, Signals),
}

/// The process before the shell.
pub struct Front {
    board: &'static Board,
    reaper: i32,
    /// Children that were this process's before it became gms. Of their descendants nothing is known.
    foreign: Vec<i32>,
    signals: Signals,
    /// To the start of the command.
    consent: Option<Consent>,
}

/// The pager's hold on the command, by way of its parent.
pub struct Link {
    board: &'static Board,
    /// Until it is told to execute the command.
    held: Option<Held>,
    /// Until the reaper has ended.
    news: Option<OwnedFd>,
    /// The keeper, once it is started.
    keeper: Option<OwnedFd>,
}

/// Splits this process, which must have one thread only, with all signals blocked in all.
pub fn split() -> io::Result<Side> {
    let signals = Signals::block()?;
    let front_pid = self_pid();
    let front = pidfd_open(front_pid)?;
    let board = Board::new()?;
    let (held, consent, hold) = child::sides()?;
    let (heard, news) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
    let foreign = proc::children(front_pid);
    // Were the reaper killed, its children come here.
    nix::sys::prctl::set_child_subreaper(true)?;
    // SAFETY: there is no other thread whose locks the child could miss.
    let pager_pid = match unsafe { fork()? } {
        ForkResult::Parent { child } => child.as_raw(),
        ForkResult::Child => {
            let link = Link { board, held: Some(held), news: Some(heard), keeper: None };
            return Ok(Side::Pager(link, signals));
        }
    };
    drop((held, heard));
    // SAFETY: as above.
    let forked = pidfd_open(pager_pid).and_then(|process| Ok((process, unsafe { fork()? })));
    board.set_pager(pager_pid);
    match forked.inspect_err(|_| child::send(pager_pid, libc::SIGKILL))? {
        (_, ForkResult::Parent { child }) => {
            let reaper = child.as_raw();
            let consent = Some(consent);
            Ok(Side::Front(Front { board, reaper, foreign, signals, consent }))
        }
        (pager, ForkResult::Child) => {
            let reaper = Reaper { board, front_pid, front, pager_pid, pager, hold, news, signals };
            Ok(Side::Reaper(reaper))
        }
    }
}

/// What the next binary of the pager is told of its link.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LinkRecord {
    board: Number,
    news: Number,
    keeper: KeeperRecord,
}

/// The keeper of the binary before.
pub(super) struct Former {
    pub(super) process: OwnedFd,
    pid: i32,
}

impl Link {
    /// What the next binary needs, if somebody is left to tell it how the command fares.
    pub(super) fn hand_over(&self, to: &mut Descriptors) -> Option<LinkRecord> {
        let keeper = keeper::hand_over(self.keeper.as_ref()?, to)?;
        let (board, news) = (to.give(board::memory()?), to.give(self.news()?));
        Some(LinkRecord { board, news, keeper })
    }

    /// The link again, with another keeper; and the keeper before. This process must have one thread only.
    pub(super) fn again(record: &LinkRecord) -> io::Result<(Link, Former)> {
        let board = Board::again(record.board.take()?)?;
        let former = Former { process: keeper::again(&record.keeper)?, pid: board.keeper() };
        let mut link = Link { board, held: None, news: Some(record.news.take()?), keeper: None };
        link.spawn_keeper()?;
        Ok((link, former))
    }

    /// This binary cannot go on: the keeper before is the keeper again.
    pub(super) fn give_way(&self, former: &Former) {
        self.keeper.iter().for_each(pidfd::end);
        self.board.set_keeper(former.pid);
    }

    /// What it shares with the other processes of gms.
    pub(super) fn board(&self) -> &'static Board {
        self.board
    }

    /// See [`Board::hand_over`].
    pub(super) fn set_handing_over(&self, is: bool) {
        self.board.hand_over(is);
    }

    /// Starts the keeper beside this process, which must have one thread only.
    pub(super) fn spawn_keeper(&mut self) -> nix::Result<()> {
        self.keeper = Some(keeper::spawn(self.board, true)?);
        Ok(())
    }

    /// See [`keeper::dismiss`].
    pub(super) fn dismiss_keeper(&self, outcome: &Outcome) {
        keeper::dismiss(self.board, outcome);
    }

    /// Waits until the command waits to be executed; the process ids of it and of its parent.
    pub(super) fn command(&mut self) -> nix::Result<(i32, i32)> {
        loop {
            if let Some(command) = self.board.command() {
                return command;
            }
            let news = self.news().ok_or(Errno::ECHILD)?;
            let _ = poll(&mut [PollFd::new(news, PollFlags::POLLIN)], PollTimeout::NONE);
            self.hear();
        }
    }

    /// The command, to be executed.
    pub(super) fn take_held(&mut self) -> Option<Held> {
        self.held.take()
    }

    /// Readable when [`Link::end`] or [`Link::has_children`] may have changed.
    pub(super) fn news(&self) -> Option<BorrowedFd<'_>> {
        self.news.as_ref().map(AsFd::as_fd)
    }

    /// Takes note of what has made [`Link::news`] readable.
    pub(super) fn hear(&mut self) {
        let mut bytes = [0; 64];
        while let Some(news) = &self.news {
            match read(news, &mut bytes) {
                Ok(0) => self.be_forsaken(),
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }

    /// The front kills what is left, but while it is stopped with the command it does not see that it has to.
    fn be_forsaken(&mut self) {
        self.news = None;
        self.board.give_up();
        // If it has ended, this goes to who has adopted this process, and does nothing to one that runs.
        child::send(getppid().as_raw(), libc::SIGCONT);
    }

    /// How the command ended, once it did; its background children may live on.
    pub(super) fn end(&self) -> Option<End> {
        self.board.end()
    }

    /// Whether the command or something that it has left has not ended, as far as is known.
    pub(super) fn has_children(&self) -> bool {
        !self.board.is_childless()
    }

    /// Whether nobody is left to tell how the command fares. The front kills it then; its memory has to be served until that is done.
    pub(super) fn is_forsaken(&self) -> bool {
        self.news.is_none()
    }
}

impl Front {
    /// Stands in for the command until the pager and what is left of the command have ended; returns the exit status.
    pub fn stand_in(mut self) -> u8 {
        // Best effort: the pager tells if that cannot be.
        let _ = Part::Front.give_up_rest();
        let (mut pager, mut reaper) = (None, None);
        // What has come reached no command: it was not there yet. What comes once it is there does.
        self.heed(|| false);
        if let Some(consent) = self.consent.take() {
            consent.give();
        }
        loop {
            let mut fds = [PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
            let _ = poll(&mut fds, PollTimeout::from(LOOK_MS));
            if reaper.is_none() {
                self.heed(|| self.shares_job());
            }
            child::reap(|pid, how| {
                if pid == self.board.pager() {
                    pager = Some((pid, how));
                }
                reaper = reaper.or((pid == self.reaper).then_some(how));
                self.foreign.retain(|&foreign| foreign != pid);
                if pid == self.board.keeper() {
                    self.board.set_keeper(0);
                }
            });
            // One that has died, and for which another has gone on, is the pager no more.
            let ended = pager.filter(|(pid, _)| *pid == self.board.pager()).map(|(_, how)| how);
            // It ends after the pager, unless it is killed.
            match (reaper, ended) {
                (Some(End::Exited(_)), Some(End::Exited(status))) => {
                    // Another binary may end with any status. Unless the session is over the command was killed.
                    let is_its_own = !self.board.was_handed_over() || self.board.is_over();
                    return if is_its_own { status } else { EXIT_GMS };
                }
                (Some(End::Exited(_)), Some(End::Killed(signal))) => {
                    let seen_through = self.board.is_childless() || self.board.is_over();
                    let end = self.board.end().filter(|_| seen_through);
                    return end.map_or_else(|| forsaken("pager", signal), End::status);
                }
                (Some(how), _) => {
                    self.kill_all();
                    return forsaken("command's parent", i32::from(how.status()) & 0x7f);
                }
                (None, _) if child::state(self.reaper) == State::Gone => return EXIT_GMS,
                (None, _) => {}
            }
        }
    }
}

impl Front {
    /// Kills what the reaper has left, and whoever of gms's own serves it.
    fn kill_all(&self) {
        // Not the keeper, nor one that has another pager go on: memory that nobody else serves would read as zeros.
        let mut spared = self.foreign.clone();
        let mut is_spared = |pid| {
            // Whoever was one once may still be needed.
            let is_keeper = pid == self.board.keeper() || Some(pid) == self.board.adopter();
            if is_keeper && !spared.contains(&pid) {
                spared.push(pid);
            }
            spared.contains(&pid)
        };
        // First the workload: if this process is killed meanwhile, a pager, or another that goes on, has to end it.
        child::kill_all(&self.signals, |pid| is_spared(pid) || child::is_named_like_ours(pid));
        self.board.give_up();
        child::kill_all(&self.signals, is_spared);
    }

    /// Passes on the signals that have come. `in_job` tells whether what the kernel sends to the job reaches the command.
    fn heed(&self, in_job: impl Fn() -> bool) {
        while self.signals.has_next() {
            // Before it is taken: a stop that waits is void when the job is continued. One that was taken is not, and the command may have ended since.
            let in_job = in_job();
            let Some(arrival) = self.signals.next() else { break };
            if arrival.is_for_the_command(self.reaper, || in_job) {
                let pass_on = || child::send(self.reaper, arrival.number);
                if arrival.is_terminal_stop() {
                    // For the shell, whatever the command makes of it.
                    self.signals.stop(pass_on);
                } else {
                    pass_on();
                }
            }
        }
    }

    /// Whether the command is in the shell's job; once it has ended, whether something is that it has left.
    fn shares_job(&self) -> bool {
        let group = |pid| getpgid(Some(Pid::from_raw(pid)));
        if let (Some(Ok((root, _))), None) = (self.board.command(), self.board.end())
            && let Ok(group) = group(root)
        {
            return group == getpgrp();
        }
        let mut left = proc::children(self.reaper).into_iter();
        left.any(|pid| group(pid) == Ok(getpgrp()) && !child::is_evictor(pid))
    }
}

/// Tells why the command was killed.
fn forsaken(by: &str, signal: i32) -> u8 {
    // The shell waits for this process, and must not for somebody who reads.
    speech::begin();
    say(format!(
        "the {by} was ended by signal {signal}, so the command was killed: start it again"
    ));
    speech::end();
    EXIT_GMS
}
