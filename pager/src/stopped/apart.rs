//! Work that is finished though this process be killed meanwhile: by another one, which shares its memory and descriptors, while the calling thread sleeps
//! as after vfork. A thread that is in the middle of an injected call would be killed with its tracer.

use std::io;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::sched::{CloneFlags, clone};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, getppid, setpgid};

use super::{LINGERING, TRACES, alarm, forget, release_all};

const STACK_LEN: usize = 256 * 1024;
/// For threads that have not come back from an injected call when the work is done: the kernel holds some locks for as long as it takes to fork a large process.
const RELEASE_DEADLINE: Duration = Duration::from_secs(300);
/// The same if this process has been killed: another pager is to have them.
const ORPHAN_RELEASE_DEADLINE: Duration = Duration::from_secs(10);
/// Seconds after which that process is ended, and with it whom it traces in the middle of a call, if this one has been killed: whoever holds a lock of its memory
/// may have been killed too.
const ALARM_S: libc::c_uint = 30;

/// The process for which something is done.
pub(crate) struct Caller(Pid);

impl Caller {
    /// Whether it has been killed meanwhile: nobody will get what is made.
    pub(crate) fn is_dead(&self) -> bool {
        getppid() != self.0
    }
}

/// Does `work` in such a process. It has the thread-local variables of the calling thread, but none of its tracees. If that process is killed, so is this one: a lock
/// may never be free again.
///
/// # Errors
/// There can be none.
pub(crate) fn apart<R>(work: impl FnOnce(&Caller) -> R) -> io::Result<R> {
    let caller = Caller(Pid::this());
    alarm::prepare();
    let (mut work, mut made) = (Some(work), None);
    let mut stack = vec![0; STACK_LEN];
    let run = Box::new(|| {
        begin(&caller);
        made = work.take().map(|work| work(&caller));
        let limit = if caller.is_dead() { ORPHAN_RELEASE_DEADLINE } else { RELEASE_DEADLINE };
        release_all(limit);
        0
    });
    let (late, traces) = (LINGERING.take(), TRACES.replace(false));
    // Signals are not shared: an alarm is for one process only.
    let flags = CloneFlags::CLONE_VM | CloneFlags::CLONE_VFORK | CloneFlags::CLONE_FILES;
    // SAFETY: it has a stack of its own, and all else that it touches is there for as long as it runs: the calling thread goes on, or ends, after it has; or
    // that was killed, and with its whole process, so that nobody frees anything.
    let cloned = unsafe { clone(run, &mut stack, flags, None) };
    // Its end is told to nobody who does not ask for such processes.
    let ended = cloned.and_then(|pid| waitpid(pid, Some(WaitPidFlag::__WALL)));
    // The kernel has let them go with it.
    LINGERING.replace(late).into_iter().for_each(|thread| forget(thread.tid));
    TRACES.set(traces);
    match ended? {
        WaitStatus::Exited(..) => made.ok_or_else(|| Errno::ECHILD.into()),
        WaitStatus::Signaled(_, Signal::SIGKILL, _) => end(Signal::SIGKILL),
        _ => end(Signal::SIGABRT),
    }
}

fn end(signal: Signal) -> ! {
    let _ = kill(Pid::this(), signal);
    std::process::abort()
}

/// This process is not of the caller's group, which may be killed as one, and ends by an alarm if the caller does.
fn begin(caller: &Caller) {
    static CALLER: AtomicI32 = AtomicI32::new(0);
    extern "C" fn is_late(_: libc::c_int) {
        // SAFETY: these concern this process only, and are allowed in a handler; errno is as it was.
        unsafe {
            let errno = *libc::__errno_location();
            if libc::getppid() != CALLER.load(Ordering::Relaxed) {
                libc::kill(libc::getpid(), libc::SIGKILL);
            }
            libc::alarm(ALARM_S);
            *libc::__errno_location() = errno;
        }
    }
    let own = Pid::from_raw(0);
    let _ = setpgid(own, own);
    CALLER.store(caller.0.as_raw(), Ordering::Relaxed);
    // SAFETY: all-zero is a valid set of signals, which sigemptyset makes empty; the others change signals of this process, which has none of another's.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGALRM);
        // It stays (SA_RESTART).
        libc::signal(libc::SIGALRM, is_late as *const () as libc::sighandler_t);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
        libc::alarm(ALARM_S);
    }
}
