//! The command's parent: it starts the command, reaps what it leaves, and stands between it and the front.
//!
//! It is in a session of its own and pages nothing: neither a stop of the job nor the end of the pager keeps it from seeing how the command fares.

use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};
use nix::unistd::{Pid, getpgid, setsid, write};

use super::child::{self, Hold, State};
use super::signals::Signals;
use super::{wait, wait_ms};
use crate::board::{Board, End};
use crate::kernel::pidfd::{has_ended, pidfd_open};
use crate::kernel::proc;
use crate::kernel::proc::self_pid;
use crate::privilege::Part;

/// For another pager to go on for one that has died: more than the keeper waits for it.
const HEIR_DEADLINE: Duration = Duration::from_secs(45);
/// Between two looks whether it has.
const HEIR_LOOK_MS: u16 = 5;
const HEIR_LOOKS_MIN: u32 = 4500;

/// What the reaper is started with.
pub struct Reaper {
    pub(super) board: &'static Board,
    pub(super) front_pid: i32,
    pub(super) front: OwnedFd,
    pub(super) pager_pid: i32,
    pub(super) pager: OwnedFd,
    pub(super) hold: Hold,
    /// A byte for each change of the board. The pager has the other end.
    pub(super) news: OwnedFd,
    pub(super) signals: Signals,
}

impl Reaper {
    /// Sees the command from before its start to the end of the pager, which outlives what the command leaves; kills what is left if the pager ends
    /// before and no other goes on, unless it is paged no more.
    pub fn serve(self, command: &[OsString]) {
        let Reaper { board, front_pid, front, pager_pid, pager, hold, news, signals } = self;
        let root = nix::sys::prctl::set_child_subreaper(true)
            .and_then(|()| hold.fork(command, &signals.inherited()));
        // Out of the shell's job, so that stopping it does not stop this process; the command stays in it. Out of its session too: to the kernel a parent in
        // another group of the session is a shell, which would continue the job. It is no leader, so that it can.
        let _ = setsid();
        // Best effort: the pager tells if that cannot be.
        let _ = Part::Front.give_up_rest();
        board.set_command(root, self_pid());
        let root = root.unwrap_or(0);
        let (stopped, front_stopped) = (false, false);
        let mut tree = Family {
            root,
            board,
            front_pid,
            front,
            pager_pid,
            pager,
            news,
            signals,
            stopped,
            front_stopped,
            end: None,
            childless: false,
            pagerless: None,
        };
        tree.tell();
        let mut front_alive = true;
        while tree.is_sound() {
            let pager = (!has_ended(tree.pager.as_fd())).then(|| tree.pager.as_fd());
            let front = front_alive.then(|| tree.front.as_fd());
            let fds = [tree.signals.as_fd()].into_iter().chain(pager).chain(front);
            let mut fds: Vec<_> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
            match tree.pagerless {
                None => wait(&mut fds),
                Some(_) => wait_ms(&mut fds, HEIR_LOOK_MS),
            }
            let (heard, child_changed) = tree.heed();
            if front_alive && has_ended(tree.front.as_fd()) {
                front_alive = false;
                tree.pass_on(libc::SIGKILL);
            }
            tree.reap();
            tree.mirror_stop(child_changed);
            // What the front had to pass on when it was continued has come by now.
            tree.front_stopped &= heard || tree.stopped;
        }
        tree.board.give_up();
        tree.reap();
        child::kill_all(&tree.signals, |_| false);
        // While it is stopped, perhaps without the command, it does not see how this ends.
        tree.send_to_front(libc::SIGCONT);
    }
}

/// The command and what it leaves.
struct Family {
    root: i32,
    board: &'static Board,
    front_pid: i32,
    front: OwnedFd,
    pager_pid: i32,
    pager: OwnedFd,
    news: OwnedFd,
    signals: Signals,
    /// The command is, as far as the front was told.
    stopped: bool,
    /// The front was, and has passed on no continuation since.
    front_stopped: bool,
    /// How the command has ended, and whether nothing is left of it; told while there is a pager.
    end: Option<End>,
    childless: bool,
    /// Since when there is none, though another is to go on, and how often it was looked for.
    pagerless: Option<(Instant, u32)>,
}

impl Family {
    /// Passes on the signals that have come. Whether there were any, and whether they tell of a child.
    fn heed(&mut self) -> (bool, bool) {
        let (mut heard, mut child_changed, mut continued) = (false, false, false);
        while let Some(arrival) = self.signals.next() {
            heard = true;
            child_changed |= arrival.number == libc::SIGCHLD;
            continued |= arrival.tells_of_continuation();
            // What the kernel has sent came before this process left the job; the command was not executed yet, or not there.
            if !arrival.is_for_the_command(self_pid(), || false) {
                continue;
            }
            match arrival.number {
                libc::SIGCONT => self.pass_on_continuation(continued),
                other => self.pass_on(other),
            }
        }
        (heard, child_changed)
    }

    /// Whether there is a pager, or another is to go on, or the command needs none any more and something is left of it.
    fn is_sound(&mut self) -> bool {
        // Not by /proc, where whoever has more rights than this process may be hidden (hidepid).
        let lives = |&pid: &i32| pidfd_open(pid).is_ok_and(|process| !has_ended(process.as_fd()));
        let is_left = || {
            let children = proc::children(self_pid());
            children.into_iter().any(|pid| lives(&pid) && !child::is_evictor(pid))
        };
        if self.has_pager() {
            if self.pagerless.take().is_some() {
                // What was seen meanwhile is told.
                self.reap();
            }
            return true;
        }
        // A list of children can miss those of one that ends meanwhile.
        if self.board.is_over() {
            return is_left() || is_left();
        }
        let (since, looks) = *self.pagerless.get_or_insert_with(|| (Instant::now(), 0));
        self.pagerless = Some((since, looks + 1));
        // Of much time all may have been frozen.
        let is_late = since.elapsed() > HEIR_DEADLINE && looks > HEIR_LOOKS_MIN;
        let keepers = [self.board.keeper()].into_iter().chain(self.board.adopter());
        let is_kept = keepers.into_iter().any(|pid| pid != 0 && lives(&pid));
        // One may have begun meanwhile.
        self.board.estate().is_some() && is_kept && !is_late || self.has_pager()
    }

    /// Whether the pager lives: the one that has gone on, if one has died.
    fn has_pager(&mut self) -> bool {
        let pid = self.board.pager();
        if pid != self.pager_pid
            && let Ok(pager) = pidfd_open(pid)
        {
            (self.pager_pid, self.pager) = (pid, pager);
        }
        !has_ended(self.pager.as_fd())
    }

    /// Reaps who has ended, and tells the pager what that changes.
    fn reap(&mut self) {
        let (root, board) = (self.root, self.board);
        let mut end = self.end.take();
        self.childless |= !child::reap(|pid, how| end = end.or((pid == root).then_some(how)));
        // They may have ended for want of a pager: evictors kill once its descriptors are closed, which is before it has ended.
        let is_gone = proc::is_ending(self.pager_pid) || has_ended(self.pager.as_fd());
        if is_gone && !board.is_over() {
            self.end = end;
            return;
        }
        end.into_iter().for_each(|how| board.set_end(how));
        let childless = self.childless && !board.is_childless();
        if childless {
            board.set_childless();
        }
        if end.is_some() || childless {
            self.tell();
        }
    }

    fn tell(&self) {
        // A full pipe is news enough; if the pager has ended, that is seen.
        let _ = write(&self.news, &[0]);
    }

    /// To the command; once it has ended, to what it left in the background.
    fn pass_on(&self, signal: i32) {
        self.addressees().into_iter().for_each(|pid| child::send(pid, signal));
    }

    fn addressees(&self) -> Vec<i32> {
        if !self.has_ended() {
            return vec![self.root];
        }
        let mut orphans = proc::children(self_pid());
        orphans.retain(|&pid| !child::is_evictor(pid));
        orphans
    }

    /// A SIGCONT of the front, which a shell sends to its whole job, command and front: passed on, it must not undo a stop that the user asked for since.
    /// `continued`: the command was.
    fn pass_on_continuation(&mut self, continued: bool) {
        let resumed = std::mem::take(&mut self.front_stopped);
        let job = self.job();
        // One look: a stop can come at any moment.
        if self.is_stopped() {
            // By the stop that was mirrored last, if the front is not stopped by that.
            if !continued && self.stopped && !self.is_front_stopped() {
                self.pass_on(libc::SIGCONT);
            }
            return;
        }
        let mut others = self.addressees();
        others.retain(|&pid| !resumed || !is_in(job, pid));
        others.into_iter().for_each(|pid| child::send(pid, libc::SIGCONT));
    }

    /// Whether the command has ended, which need not have been reaped.
    fn has_ended(&self) -> bool {
        self.board.end().is_some()
            || !matches!(child::state(self.root), State::Running | State::Stopped(_))
    }

    /// Whether the command is stopped; once it has ended, what it left in the shell's job, all of it.
    fn is_stopped(&self) -> bool {
        let is_stopped = |pid| matches!(child::state(pid), State::Stopped(_));
        if !self.has_ended() {
            return is_stopped(self.root);
        }
        let job = self.job();
        let mut of_job = self.addressees();
        of_job.retain(|&pid| is_in(job, pid));
        !of_job.is_empty() && of_job.into_iter().all(is_stopped)
    }

    /// The shell's job: the front's process group, while there is a front.
    fn job(&self) -> Option<Pid> {
        group(self.front_pid)
    }

    /// Whether the front is stopped, or about to be: what it has sent came before that.
    fn is_front_stopped(&self) -> bool {
        let pending = proc::status_line(self.front_pid, "ShdPnd:");
        let pending = pending.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        // A stop that is not pending any more has been done.
        pending.is_some_and(|mask| mask & 1 << (libc::SIGSTOP - 1) != 0)
            || proc::state(self.front_pid) == Some('T')
    }

    /// Stops and continues the front with the command, so that the shell sees it. A change may have been followed by
    /// its opposite before this looks.
    fn mirror_stop(&mut self, child_changed: bool) {
        let stopped = self.is_stopped();
        if stopped && (child_changed || !self.stopped) {
            self.front_stopped = true;
            self.send_to_front(libc::SIGSTOP);
        } else if !stopped && self.stopped {
            self.send_to_front(libc::SIGCONT);
        }
        self.stopped = stopped;
    }

    fn send_to_front(&self, signal: i32) {
        // SAFETY: pidfd_send_signal reads no memory when the info is null. A front which is gone is seen by poll.
        unsafe {
            libc::syscall(libc::SYS_pidfd_send_signal, self.front.as_raw_fd(), signal, 0_usize, 0);
        }
    }
}

fn group(pid: i32) -> Option<Pid> {
    getpgid(Some(Pid::from_raw(pid))).ok()
}

fn is_in(job: Option<Pid>, pid: i32) -> bool {
    job.is_some() && group(pid) == job
}
