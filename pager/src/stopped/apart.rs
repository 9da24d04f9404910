//! Work that is finished though this process be killed meanwhile: by another one, which shares its memory and descriptors, while the calling thread sleeps
//! as after vfork. A thread that is in the middle of an injected call would be killed with its tracer.

use std::io;
use std::time::Duration;

use nix::errno::Errno;
use nix::sched::{CloneFlags, clone};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, getppid};

use super::{LINGERING, TRACES, forget, release_all};

const STACK_LEN: usize = 256 * 1024;
/// For threads that have not come back from an injected call when the work is done.
const RELEASE_DEADLINE: Duration = Duration::from_secs(10);
/// Seconds after which that process is ended, and with it whom it traces in the middle of a call: if this one is killed, whoever holds a lock of its memory
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

/// Does `work` in such a process. It has the thread-local variables of the calling thread, but none of its tracees.
///
/// # Errors
/// There can be none, or it was killed.
pub(crate) fn apart<R>(work: impl FnOnce(&Caller) -> R) -> io::Result<R> {
    let caller = Caller(Pid::this());
    let (mut work, mut made) = (Some(work), None);
    let mut stack = vec![0; STACK_LEN];
    let run = Box::new(|| {
        end_in_time();
        let (late, traces) = (LINGERING.take(), TRACES.replace(false));
        made = work.take().map(|work| work(&caller));
        release_all(RELEASE_DEADLINE);
        // The kernel lets them go with this process.
        LINGERING.take().into_iter().for_each(|thread| forget(thread.tid));
        LINGERING.set(late);
        TRACES.set(traces);
        0
    });
    // Signals are not shared: an alarm is for one process only.
    let flags = CloneFlags::CLONE_VM | CloneFlags::CLONE_VFORK | CloneFlags::CLONE_FILES;
    // SAFETY: it has a stack of its own, and all else that it touches is there for as long as it runs: the calling thread goes on, or ends, after it has; or
    // that was killed, and with its whole process, so that nobody frees anything.
    let pid = unsafe { clone(run, &mut stack, flags, None)? };
    // Its end is told to nobody who does not ask for such processes.
    match waitpid(pid, Some(WaitPidFlag::__WALL))? {
        WaitStatus::Exited(_, 0) => made.ok_or_else(|| Errno::ECHILD.into()),
        _ => Err(Errno::ECHILD.into()),
    }
}

/// This process ends by a signal when its time is over.
fn end_in_time() {
    // SAFETY: all-zero is a valid set of signals, which sigemptyset makes empty; the others change signals of this process, which has none of another's.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGALRM);
        libc::signal(libc::SIGALRM, libc::SIG_DFL);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
        libc::alarm(ALARM_S);
    }
}
