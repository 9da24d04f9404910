//! The command as a child process: forked early, executed late, watched without disturbing a tracer.

use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, poll};
use nix::unistd::{ForkResult, fork, pipe2, read, write};
use serde::{Deserialize, Serialize};

use super::signals::{Inherited, Signals, restore_pipe};
use crate::inject::EVICTOR_NAME;
use crate::kernel::proc;
use crate::kernel::proc::self_pid;

/// For killed processes to end.
const KILL_DEADLINE: Duration = Duration::from_secs(5);
/// Between two looks for processes that were forked while their parent was being killed.
const KILL_LOOK_MS: u8 = 100;

/// A child which will become the command, or end with this value.
///
/// It was forked before gms opened or changed anything, so that the command inherits what gms was given and no more.
pub(super) struct Held {
    /// Its process.
    pub pid: i32,
    go: OwnedFd,
    report: OwnedFd,
}

/// The child after it was told to execute the command.
pub(super) struct Launched {
    report: OwnedFd,
}

/// What a wait would tell of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// It runs, or its state is the business of a tracer.
    Running,
    /// Stopped by this signal.
    Stopped(i32),
    /// Ended, not yet reaped.
    Ended(End),
    /// Not a child (any more).
    Gone,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum End {
    /// By itself, with this status.
    Exited(u8),
    /// By this signal.
    Killed(i32),
}

impl End {
    /// The exit status as a shell gives it.
    pub(super) fn status(self) -> u8 {
        match self {
            End::Exited(status) => status,
            End::Killed(signal) => 128_u8.wrapping_add(signal as u8),
        }
    }
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

/// Forks the child. This process must have one thread only.
pub(super) fn hold(command: &[OsString], inherited: &Inherited) -> io::Result<Held> {
    let arguments = c_strings(command)?;
    let (wait, go) = pipe2(OFlag::O_CLOEXEC)?;
    let (report, tell) = pipe2(OFlag::O_CLOEXEC)?;
    // SAFETY: there is no other thread whose locks the child could miss.
    match unsafe { fork()? } {
        ForkResult::Parent { child } => Ok(Held { pid: child.as_raw(), go, report }),
        ForkResult::Child => {
            drop((go, report));
            let error = become_command(&arguments, &wait, inherited);
            let _ = write(&tell, &error.raw_os_error().unwrap_or(libc::EIO).to_ne_bytes());
            // SAFETY: _exit does not return and runs no code of this process.
            unsafe { libc::_exit(127) }
        }
    }
}

/// Returns only when the command cannot be executed.
fn become_command(arguments: &[CString], wait: &OwnedFd, inherited: &Inherited) -> io::Error {
    if let Err(error) = inherited.restore() {
        return error;
    }
    let mut byte = [0];
    loop {
        match read(wait, &mut byte) {
            Ok(1) => break,
            Err(nix::errno::Errno::EINTR) => {}
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
        // If it was killed meanwhile, its end will tell.
        let _ = write(&self.go, &[1]);
        Launched { report: self.report }
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

/// Looks at a child without consuming anything: while a thread of this process traces it, an ordinary wait would
/// take the tracer's stops away.
pub(super) fn state(pid: i32) -> State {
    look(libc::P_PID, pid as u32, libc::WSTOPPED | libc::WNOWAIT).1
}

/// Reaps every ended child. Calls `ended` with the process and its end; false when no child is left.
pub(super) fn reap(mut ended: impl FnMut(i32, End)) -> bool {
    let mut take = |pid: i32| {
        if let (_, State::Ended(end)) = look(libc::P_PID, pid as u32, 0) {
            ended(pid, end);
        }
    };
    loop {
        match look(libc::P_ALL, 0, libc::WNOWAIT) {
            (pid, State::Ended(_)) => take(pid),
            (_, State::Gone) => return false,
            (0, _) => return true,
            // A traced child hides the ended ones behind it.
            _ => break,
        }
    }
    let ended =
        proc::children(self_pid()).into_iter().filter(|&pid| matches!(state(pid), State::Ended(_)));
    ended.for_each(take);
    true
}

/// Kills and reaps every process of the workload: the children of those that end become ours. Not those that are `spared`, and what is
/// named like evictors only after a while.
pub(super) fn kill_all(signals: &Signals, spared: &[i32], spared_for: Duration) {
    let start = Instant::now();
    let is_named_ours =
        |pid| proc::thread_name(pid).is_some_and(|name| name.trim_end() == EVICTOR_NAME);
    loop {
        reap(|_, _| ());
        let mut left = proc::children(self_pid());
        left.retain(|pid| !spared.contains(pid));
        if left.is_empty() || start.elapsed() > KILL_DEADLINE {
            return;
        }
        left.retain(|&pid| start.elapsed() > spared_for || !is_named_ours(pid));
        left.into_iter().for_each(|pid| send(pid, libc::SIGKILL));
        let _ = poll(&mut [PollFd::new(signals.as_fd(), PollFlags::POLLIN)], KILL_LOOK_MS);
        while signals.next().is_some() {}
    }
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
