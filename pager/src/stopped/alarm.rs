//! A deadline for PTRACE_SEIZE, which has none: it sleeps until an exec of the process is over. A signal wakes it, but the kernel begins the call anew
//! after the handler; so the handler sends the thread past it.

use std::mem::MaybeUninit;
use std::time::Duration;

use crate::arch;

/// The signal of the timer. It is blocked but while an alarm is set, as others are in all our threads, because they are for the workload.
fn signal() -> libc::c_int {
    libc::SIGRTMAX()
}

thread_local! {
    static TIMER: Timer = Timer::new();
}

/// While this lives the calling thread is in time for one PTRACE_SEIZE, which fails with EINTR afterwards. Best effort: without a timer it sleeps on.
pub(super) struct Alarm {
    /// Of a process that has the variables of a thread of another one ([`super::apart`]), but not its timers.
    own: Option<Timer>,
}

/// Makes the calling thread's timer: what is apart must not.
pub(super) fn prepare() {
    TIMER.with(|_| {});
}

impl Alarm {
    pub(super) fn set(limit: Duration) -> Alarm {
        let is_apart = TIMER.with(|timer| timer.process != std::process::id());
        let alarm = Alarm { own: is_apart.then(Timer::new) };
        mask(libc::SIG_UNBLOCK);
        alarm.timer(|timer| timer.set(limit));
        alarm
    }

    fn timer(&self, use_it: impl FnOnce(&Timer)) {
        match &self.own {
            Some(timer) => use_it(timer),
            None => TIMER.with(use_it),
        }
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        self.timer(|timer| timer.set(Duration::ZERO));
        mask(libc::SIG_BLOCK);
    }
}

/// A timer which signals the thread that made it.
struct Timer {
    process: u32,
    timer: Option<libc::timer_t>,
}

impl Timer {
    fn new() -> Timer {
        handle();
        // SAFETY: all-zero is a valid sigevent; the kernel writes one id, to a live one.
        unsafe {
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = signal();
            event.sigev_notify_thread_id = nix::unistd::gettid().as_raw();
            let mut timer = MaybeUninit::uninit();
            let made =
                libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, timer.as_mut_ptr());
            let timer = (made == 0).then(|| timer.assume_init());
            Timer { process: std::process::id(), timer }
        }
    }

    /// Signals after `limit`, and then as often; never if it is zero.
    fn set(&self, limit: Duration) {
        let Some(timer) = self.timer else { return };
        let time = libc::timespec { tv_sec: 0, tv_nsec: limit.subsec_nanos().into() };
        let spec = libc::itimerspec { it_interval: time, it_value: time };
        // SAFETY: the timer lives, the kernel reads one live itimerspec.
        unsafe { libc::timer_settime(timer, 0, &raw const spec, std::ptr::null_mut()) };
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        if let Some(timer) = self.timer.filter(|_| self.process == std::process::id()) {
            // SAFETY: nobody else has it.
            unsafe { libc::timer_delete(timer) };
        }
    }
}

/// Blocks the signal in the calling thread, or lets it through.
fn mask(how: libc::c_int) {
    // SAFETY: a set of signals, which sigemptyset makes valid, on this stack frame.
    unsafe {
        let mut set = MaybeUninit::uninit();
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal());
        libc::pthread_sigmask(how, set.as_ptr(), std::ptr::null_mut());
    }
}

fn handle() {
    // SAFETY: all-zero is a valid sigaction; the handler changes registers of the interrupted thread only.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = skip_seize as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        libc::sigaction(signal(), &raw const action, std::ptr::null_mut());
    }
}

extern "C" fn skip_seize(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a ucontext of the interrupted thread.
    unsafe { arch::skip_call(&mut *context.cast(), libc::SYS_ptrace, libc::PTRACE_SEIZE.into()) };
}
