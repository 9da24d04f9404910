//! Signals as file descriptors, and what gms was given by its parent so that the command can be given the same.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{
    SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal, raise, sigaction,
};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{Pid, getsid};

use crate::kernel::proc::descends;

static PIPE_IGNORED: AtomicBool = AtomicBool::new(false);

/// Notes how SIGPIPE was given to gms, and keeps closed standard streams closed for the command.
///
/// Rust's start-up sets SIGPIPE to ignored and opens /dev/null on closed standard streams, both of which the command
/// would inherit; the binary calls this before that, from `.init_array`.
pub extern "C" fn note_inheritance() {
    // SAFETY: a zeroed sigaction is valid, and sigaction with no new action only writes to it.
    let before = unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut before);
        before
    };
    PIPE_IGNORED.store(before.sa_sigaction == libc::SIG_IGN, Ordering::Relaxed);
    for stream in 0..=2 {
        // SAFETY: plain system calls with a constant path; open takes the lowest free number, which is `stream`.
        unsafe {
            if libc::fcntl(stream, libc::F_GETFD) < 0 {
                libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
            }
        }
    }
}

/// One signal which came.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// Its number.
    pub number: i32,
    /// Above zero if the kernel sent it.
    code: i32,
    sender: i32,
}

impl Arrival {
    /// Whether the kernel tells that a child was continued.
    pub fn tells_of_continuation(&self) -> bool {
        self.number == libc::SIGCHLD && self.code == libc::CLD_CONTINUED
    }

    /// Whether the command has to be told: somebody outside of the tree below its parent sent it here. A sender that has gone counts as outside. What the
    /// kernel sends goes to the whole job, and so to the command if that is `in_job`; but a timer, which outlives exec, is for this process alone, and so is
    /// the end of the terminal where this process leads its session.
    pub fn is_for_the_command(&self, reaper: i32, in_job: impl FnOnce() -> bool) -> bool {
        match self.number {
            libc::SIGCHLD => false,
            _ if self.code <= 0 => !descends(self.sender, reaper),
            libc::SIGALRM | libc::SIGVTALRM | libc::SIGPROF => true,
            libc::SIGHUP | libc::SIGCONT if getsid(None) == Ok(Pid::this()) => true,
            _ => !in_job(),
        }
    }

    /// Whether a terminal has its job stop.
    pub fn is_terminal_stop(&self) -> bool {
        self.number == libc::SIGTSTP && self.code > 0
    }
}

/// All signals of this process, blocked and read from a descriptor, and the settings it had before.
pub struct Signals {
    fd: SignalFd,
    inherited: Inherited,
}

/// What gms changes of itself, as this process was given it.
#[derive(Clone, Copy, Debug)]
pub struct Inherited {
    mask: SigSet,
    child_ignored: bool,
    hangup_ignored: bool,
    /// Soft and hard limit of their number.
    descriptors: (u64, u64),
}

impl Signals {
    /// Blocks every signal which can be awaited. To be called before any thread is started.
    pub fn block() -> io::Result<Signals> {
        let mut all = SigSet::all();
        // These tell of errors of the thread itself.
        for own in [
            Signal::SIGSEGV,
            Signal::SIGBUS,
            Signal::SIGFPE,
            Signal::SIGILL,
            Signal::SIGTRAP,
            Signal::SIGSYS,
        ] {
            all.remove(own);
        }
        let mask = all.thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
        // An ignored SIGCHLD would lose the exit status.
        let old = set_handler(Signal::SIGCHLD, SigHandler::SigDfl)?;
        let child_ignored = matches!(old.handler(), SigHandler::SigIgn);
        let descriptors = getrlimit(Resource::RLIMIT_NOFILE)?;
        let old = set_handler(Signal::SIGHUP, SigHandler::SigDfl)?;
        let hangup_ignored = matches!(old.handler(), SigHandler::SigIgn);
        set_handler(Signal::SIGHUP, pick(hangup_ignored))?;
        let inherited = Inherited { mask, child_ignored, hangup_ignored, descriptors };
        let fd = SignalFd::with_flags(&all, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        Ok(Signals { fd, inherited })
    }

    /// The settings before [`Signals::block`].
    pub fn inherited(&self) -> Inherited {
        self.inherited
    }

    /// Stops this process as a terminal does: not where that was ignored or blocked, nor where nobody would continue it. Calls `tell` before. Whoever
    /// hears may stop this process too, and then one continuation has to undo both: it takes back what is pending, so the stop is by then.
    pub fn stop(&self, tell: impl FnOnce()) {
        let mut stop = SigSet::empty();
        stop.add(Signal::SIGTSTP);
        let stops = !self.inherited.mask.contains(Signal::SIGTSTP);
        // Best effort. It is delivered as soon as it is not blocked.
        let pending = stops && raise(Signal::SIGTSTP).is_ok();
        tell();
        if pending {
            let _ = stop.thread_unblock();
            let _ = stop.thread_block();
        }
    }

    /// Whether one came.
    pub fn has_next(&self) -> bool {
        let mut fds = [PollFd::new(self.fd.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    /// Next signal, if one came.
    pub fn next(&self) -> Option<Arrival> {
        let info = self.fd.read_signal().ok()??;
        let (number, sender) = (info.ssi_signo as i32, info.ssi_pid as i32);
        Some(Arrival { number, code: info.ssi_code, sender })
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Inherited {
    /// Whether the end of the terminal was ignored, as under nohup.
    pub fn ignores_hangup(&self) -> bool {
        self.hangup_ignored
    }

    /// Gives this process the settings back.
    pub fn restore(&self) -> io::Result<()> {
        restore_pipe()?;
        let (soft, hard) = self.descriptors;
        setrlimit(Resource::RLIMIT_NOFILE, soft, hard)?;
        set_handler(Signal::SIGCHLD, pick(self.child_ignored))?;
        self.mask.thread_set_mask()?;
        Ok(())
    }
}

/// Handles SIGPIPE as it was given to gms; nothing else has changed before [`Signals::block`].
pub(super) fn restore_pipe() -> io::Result<()> {
    set_handler(Signal::SIGPIPE, pick(PIPE_IGNORED.load(Ordering::Relaxed)))?;
    Ok(())
}

fn pick(ignored: bool) -> SigHandler {
    if ignored { SigHandler::SigIgn } else { SigHandler::SigDfl }
}

fn set_handler(signal: Signal, handler: SigHandler) -> io::Result<SigAction> {
    let action = SigAction::new(handler, SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler is one of the two constants, no function.
    Ok(unsafe { sigaction(signal, &action)? })
}
