//! The command as a child process: forked early, executed late, watched without disturbing a tracer.

use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, poll};
use nix::unistd::{ForkResult, fork, pipe2, read, write};

use super::signals::{Inherited, Signals, restore_pipe};
use crate::board::End;
use crate::inject::is_named_evictor;
use crate::kernel::proc;
use crate::kernel::proc::self_pid;
use crate::own_agent;

/// For evictors to execute their wills when the pager has ended. They are known by their name only, which anybody can have.
const WILL_DEADLINE: Duration = Duration::from_secs(1);
/// For killed processes to end.
const KILL_DEADLINE: Duration = Duration::from_secs(5);
/// Between two looks for processes that were forked while their parent was being killed.
const KILL_LOOK_MS: u8 = 100;

/// A child which will become the command, or end, as this is used or dropped; once the front has given its consent too.
pub(super) struct Held {
    consent: Consent,
    report: OwnedFd,
}

/// One of those without which the child does not become the command.
pub(super) struct Consent(OwnedFd);

/// Of the pager and of the front.
const CONSENTS: usize = 2;

/// That child's side of it.
pub(super) struct Hold {
    wait: OwnedFd,
    tell: OwnedFd,
}

/// The child after it was told to execute the command.
pub(super) struct Launched {
    report: OwnedFd,
}

/// What a wait would tell of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// It runs, or somebody traces it and has to see its end first.
    Running,
    /// Stopped by this signal.
    Stopped(i32),
    /// Ended, not yet reaped.
    Ended(End),
    /// Not a child (any more).
    Gone,
}

/// Turns this process, which has changed nothing yet, into the command. Returns only when that cannot be executed.
pub(super) fn execute(command: &[OsString]) -> io::Error {
    let error = |arguments: Vec<CString>| match nix::unistd::execvp(&arguments[0], &arguments) {
        Ok(never) => match never {},
        Err(error) => error.into(),
    };
    restore_pipe().and_then(|()| c_strings(command)).map_or_else(|error| error, error)
}

fn c_strings(command: &[OsString]) -> io::Result<Vec<CString>> {
    let arguments = command.iter().map(|argument| CString::new(argument.as_bytes()));
    Ok(arguments.collect::<Result<Vec<_>, _>>()?)
}

/// All sides of a child to be: the pager's, the front's, its own.
pub(super) fn sides() -> io::Result<(Held, Consent, Hold)> {
    let (wait, go) = pipe2(OFlag::O_CLOEXEC)?;
    let (report, tell) = pipe2(OFlag::O_CLOEXEC)?;
    let of_front = Consent(go.try_clone()?);
    Ok((Held { consent: Consent(go), report }, of_front, Hold { wait, tell }))
}

impl Hold {
    /// Forks the child and returns its process id. This process must have one thread only, and have opened and changed nothing but what `inherited`
    /// restores: the command inherits what gms was given and no more.
    pub(super) fn fork(self, command: &[OsString], inherited: &Inherited) -> nix::Result<i32> {
        let arguments = c_strings(command).map_err(|_| Errno::EINVAL)?;
        // SAFETY: there is no other thread whose locks the child could miss.
        match unsafe { fork()? } {
            ForkResult::Parent { child } => Ok(child.as_raw()),
            ForkResult::Child => {
                let error = become_command(&arguments, &self.wait, inherited);
                let _ = write(&self.tell, &error.raw_os_error().unwrap_or(libc::EIO).to_ne_bytes());
                // SAFETY: _exit does not return and runs no code of this process.
                unsafe { libc::_exit(127) }
            }
        }
    }
}

/// Returns only when the command cannot be executed.
fn become_command(arguments: &[CString], wait: &OwnedFd, inherited: &Inherited) -> io::Error {
    if let Err(error) = inherited.restore() {
        return error;
    }
    let (mut byte, mut consents) = ([0], 0);
    while consents < CONSENTS {
        match read(wait, &mut byte) {
            Ok(1) => consents += 1,
            Err(Errno::EINTR) => {}
            // SAFETY: _exit does not return. gms gave up; nobody waits for a report.
            _ => unsafe { libc::_exit(125) },
        }
    }
    match nix::unistd::execvp(&arguments[0], arguments) {
        Ok(never) => match never {},
        Err(error) => error.into(),
    }
}

impl Held {
    /// Lets the child execute the command.
    pub(super) fn launch(self) -> Launched {
        self.consent.give();
        Launched { report: self.report }
    }
}

impl Consent {
    /// Lets the child execute the command as far as this side goes.
    pub(super) fn give(self) {
        // If it was killed meanwhile, its end will tell.
        let _ = write(&self.0, &[1]);
    }
}

impl Launched {
    /// Readable when [`Launched::executed`] will not block.
    pub(super) fn report(&self) -> BorrowedFd<'_> {
        self.report.as_fd()
    }

    /// Whether the command was executed (or the child ended before), or why not.
    pub(super) fn executed(&self) -> io::Result<()> {
        let mut errno = [0; 4];
        match read(&self.report, &mut errno) {
            Ok(4) => Err(io::Error::from_raw_os_error(i32::from_ne_bytes(errno))),
            _ => Ok(()),
        }
    }
}

/// Sends a signal to a child which was not reaped yet.
pub(super) fn send(child: i32, signal: i32) {
    // SAFETY: kill touches no memory; it fails only if the child has changed its user, which nobody can help.
    unsafe { libc::kill(child, signal) };
}

/// Looks at a child without consuming anything.
pub(super) fn state(pid: i32) -> State {
    look(libc::P_PID, pid as u32, libc::WSTOPPED | libc::WNOWAIT).1
}

/// Reaps every ended child. Calls `ended` with the process and its end; false when no child is left. One that somebody traces ends for its parent when its
/// tracer has seen that.
pub(super) fn reap(mut ended: impl FnMut(i32, End)) -> bool {
    loop {
        match look(libc::P_ALL, 0, 0) {
            (pid, State::Ended(end)) => ended(pid, end),
            (_, State::Gone) => return false,
            _ => return true,
        }
    }
}

/// Kills and reaps every child, and their children, which become ours when they end. Not those that are spared, and what is named like evictors only
/// after a while.
pub(super) fn kill_all(signals: &Signals, mut is_spared: impl FnMut(i32) -> bool) {
    let start = Instant::now();
    loop {
        reap(|_, _| ());
        let mut left = proc::children(self_pid());
        left.retain(|&pid| !is_spared(pid));
        if left.is_empty() || start.elapsed() > KILL_DEADLINE {
            return;
        }
        left.retain(|&pid| start.elapsed() > WILL_DEADLINE || !is_named_evictor(pid));
        left.into_iter().for_each(|pid| send(pid, libc::SIGKILL));
        let _ = poll(&mut [PollFd::new(signals.as_fd(), PollFlags::POLLIN)], KILL_LOOK_MS);
        while signals.next().is_some() {}
    }
}

/// Whether a process has a name of those that gms's own have beside this one. Anybody can have it.
pub(super) fn is_named_like_ours(pid: i32) -> bool {
    let name = proc::thread_name(pid);
    name.is_some() && name == proc::thread_name(self_pid())
        || name.is_some_and(|name| own_agent::is_name(name.trim_end()))
}

/// Whether a process is to be taken for an evictor. Anybody can have the name: then it blocks all signals as well, so that none would reach it.
pub(super) fn is_evictor(pid: i32) -> bool {
    const NEVER_BLOCKED: u64 = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);
    let blocked = || u64::from_str_radix(proc::status_line(pid, "SigBlk:")?.trim(), 16).ok();
    is_named_evictor(pid) && blocked().is_some_and(|mask| mask | NEVER_BLOCKED == u64::MAX)
}

/// waitid; the process is 0 if there is nothing to tell.
fn look(kind: libc::idtype_t, id: u32, flags: i32) -> (i32, State) {
    let flags = flags | libc::WEXITED | libc::WNOHANG | libc::__WALL;
    // SAFETY: a zeroed siginfo_t is valid; waitid writes no more than that, and the fields read are those of SIGCHLD.
    let (result, pid, code, status) = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let result = libc::waitid(kind, id, &raw mut info, flags);
        (result, info.si_pid(), info.si_code, info.si_status())
    };
    let state = match code {
        _ if result < 0 => State::Gone,
        _ if pid == 0 => State::Running,
        libc::CLD_EXITED => State::Ended(End::Exited(status as u8)),
        libc::CLD_KILLED | libc::CLD_DUMPED => State::Ended(End::Killed(status)),
        libc::CLD_STOPPED => State::Stopped(status),
        _ => State::Running,
    };
    (pid, state)
}
