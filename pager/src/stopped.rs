//! A thread stopped by ptrace: asked to stop, awaited, made to issue system calls, and set going again as if nothing had happened.
//!
//! Every request must come from the thread that made the first one. Only the dead may be reaped by others ([`reap_ended`]).

mod alarm;
pub(crate) mod apart;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::unistd::Pid;

use self::alarm::Alarm;
use crate::arch;
use crate::kernel::proc;
use crate::sync::lock;

/// Longest that a thread may take to stop.
const STOP_DEADLINE: Duration = Duration::from_millis(30);
/// Longest that a thread may execute a program while it is asked to stop: the kernel lets nobody attach meanwhile, and what the exec waits for (a page of
/// the old memory, a server of a filesystem, a tracer) may wait for us.
const SEIZE_DEADLINE: Duration = Duration::from_millis(50);
/// Longest that one injected system call may take.
const SYSCALL_DEADLINE: Duration = Duration::from_secs(2);
/// What a call returns inside the kernel that is to be begun anew: ERESTARTSYS to ERESTART_RESTARTBLOCK of include/linux/errno.h.
const RESTARTS: std::ops::RangeInclusive<i64> = -516..=-512;
/// Threads that stop late are looked at after this, and less often the later it gets.
const LATE_MIN: Duration = Duration::from_millis(1);
const LATE_MAX: Duration = Duration::from_millis(50);
/// Share of the time since a late thread was asked to stop, that passes until it is looked at again.
const LATE_SHARE: u32 = 8;

/// A thread that executes a program takes over the id of its process's first thread, which is killed for that. If both are traced, what is asked of that
/// id must not be done to the other: with PTRACE_O_TRACEEXEC the kernel refuses it until the exec has been taken note of ([`Stopped::wait`]).
const OPTIONS: libc::c_int = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACEEXEC;

type Result<T> = std::result::Result<T, InjectError>;

/// Why a process could not be attached.
#[derive(Debug, thiserror::Error)]
pub enum InjectError {
    /// No such process, or it ended meanwhile.
    #[error("it has ended")]
    Gone,
    /// ptrace was refused.
    #[error("ptrace is not permitted ({0}): run as root or with CAP_SYS_PTRACE, see `gms doctor`")]
    NotPermitted(Errno),
    /// Somebody else traces it.
    #[error("it is being traced by process {0} (a debugger?)")]
    Traced(i64),
    /// Its system calls are filtered.
    #[error("it has a seccomp filter, under which the evictor cannot work")]
    Seccomp,
    /// Its system calls are dispatched to itself.
    #[error(
        "its system calls come back to it (syscall user dispatch; Wine?), as those of an injection would"
    )]
    Dispatch,
    /// Its next child is to be the first process of a PID namespace, which an evictor must not become.
    #[error("it is about to start a PID namespace")]
    Namespace,
    /// It is not any more what gms was told to attach to.
    #[error("{0}")]
    Changed(String),
    /// 32-bit code.
    #[error("it runs 32-bit code: only 64-bit processes can be paged")]
    NotNative,
    /// No thread could be stopped in time (vfork wait, uninterruptible sleep, job control stop).
    #[error("no thread of it could be stopped in time")]
    Unstoppable,
    /// A fork that has been told of is not applied yet: perhaps it is this process's.
    #[error("it may have been forked just now")]
    Forking,
    /// What is left is for forks of processes that are paged, which cannot go on without one.
    #[error("too few descriptors are left to page it: raise the limit (ulimit -Hn)")]
    Descriptors,
    /// An injected system call failed.
    #[error("injected {call} failed: {errno}")]
    Syscall {
        /// Its name.
        call: &'static str,
        /// Its error.
        errno: Errno,
    },
    /// A ptrace request or /proc access failed.
    #[error("{what} failed: {errno}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// The error.
        errno: Errno,
    },
}

impl InjectError {
    /// Whether it will not go otherwise as long as the process runs this program: it has no right to make a userfaultfd.
    pub fn lasts(&self) -> bool {
        matches!(self, InjectError::Os { what: "making a userfaultfd", errno: Errno::EPERM })
    }
}

/// What a refused request means.
pub fn refused(errno: Errno) -> InjectError {
    match errno {
        Errno::ESRCH | Errno::ENOENT => InjectError::Gone,
        Errno::EPERM | Errno::EACCES => InjectError::NotPermitted(errno),
        Errno::ECHILD => InjectError::Gone,
        // It executes a program, and that takes long.
        Errno::EINTR => InjectError::Unstoppable,
        _ => InjectError::Os { what: "attaching", errno },
    }
}

/// A thread stopped by us, or about to stop. To be ended with [`Stopped::resume`] or [`Stopped::let_go`].
pub struct Stopped {
    /// The thread.
    pub tid: Pid,
    saved: arch::Registers,
    mask: u64,
    /// Whether registers and mask are to be put back.
    altered: bool,
    /// The stop that it is in.
    stop: Option<i32>,
    /// Whether it stands where system calls can be injected.
    settled: bool,
    niceness: Option<Niceness>,
    since: Instant,
}

/// The niceness of a thread while it is stopped: every step of an injection waits for the thread to be scheduled, and its siblings go on
/// allocating meanwhile.
struct Niceness {
    tid: Pid,
    before: libc::c_int,
}

impl Niceness {
    fn raise(tid: Pid) -> Niceness {
        // SAFETY: no memory is involved.
        let before = unsafe { libc::getpriority(libc::PRIO_PROCESS, tid.as_raw() as libc::id_t) };
        set_niceness(tid, -20);
        Niceness { tid, before }
    }
}

/// Best effort: without the privilege nothing changes.
fn set_niceness(tid: Pid, nice: libc::c_int) {
    // SAFETY: no memory is involved.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, tid.as_raw() as libc::id_t, nice) };
}

impl Stopped {
    /// Stops a thread and waits until it has stopped.
    pub fn new(tid: i32) -> Result<Stopped> {
        let mut thread = Stopped::seize(tid)?;
        match thread.settle() {
            Ok(()) => Ok(thread),
            Err(error) => {
                thread.let_go();
                Err(error)
            }
        }
    }

    /// Asks a thread to stop: it leaves user mode at once, and stops when it has finished what it does in the kernel.
    pub fn seize(tid: i32) -> Result<Stopped> {
        let tid = Pid::from_raw(tid);
        TRACES.set(true);
        // Before it can end as ours.
        let new = lock(&TRACED).insert(tid.as_raw());
        let seized = {
            let _alarm = Alarm::set(SEIZE_DEADLINE);
            request(libc::PTRACE_SEIZE, tid, 0, OPTIONS as usize)
        };
        // One that is traced already, because it stops late, is refused too.
        seized
            .inspect_err(|_| {
                if new {
                    forget(tid);
                }
            })
            .map_err(refused)?;
        // Fails only if the thread has been killed, which is found later.
        let _ = request(libc::PTRACE_INTERRUPT, tid, 0, 0);
        // SAFETY: a struct of integers, for which all-zero is a value.
        let saved = unsafe { std::mem::zeroed() };
        let since = Instant::now();
        Ok(Stopped {
            tid,
            saved,
            mask: 0,
            altered: false,
            stop: None,
            settled: false,
            niceness: None,
            since,
        })
    }

    /// Whether the thread is ours no longer: it is let go as it was, if it has stopped.
    fn try_release(&mut self) -> bool {
        match self.wait(Duration::ZERO) {
            Ok(_) | Err(InjectError::Unstoppable) => {}
            Err(_) => return reap(self.tid.as_raw(), libc::__WNOTHREAD),
        }
        let Some(status) = self.stop else { return false };
        // What fails here says that the thread has been killed.
        if self.altered && !is_event_stop(status) {
            let _ = self.leave_call(status);
            return false;
        }
        if self.altered {
            self.put_back();
        } else if !self.settled
            && is_event_stop(status)
            && let Ok(mut registers) = self.registers()
            && arch::is_native(&registers)
            && arch::restart_interrupted(&mut registers)
        {
            let _ = self.set_registers(&registers);
        }
        let signal = if is_ours(status) { 0 } else { signal_of(status) };
        if request(libc::PTRACE_DETACH, self.tid, 0, signal).is_ok() {
            return true;
        }
        self.stop = None;
        reap(self.tid.as_raw(), libc::__WNOTHREAD)
    }

    /// Has a thread at an injected call stop again on its way out of the kernel. At the beginning of one the kernel would issue the call which
    /// stands in the registers that are put back.
    fn leave_call(&mut self, status: i32) -> Result<()> {
        let mut registers = self.registers()?;
        arch::skip_syscall(&mut registers);
        self.set_registers(&registers)?;
        request(libc::PTRACE_INTERRUPT, self.tid, 0, 0).map_err(refused)?;
        self.go_on(libc::PTRACE_CONT, stop_signal(status))
    }

    fn go_on(&mut self, how: libc::c_uint, signal: usize) -> Result<()> {
        request(how, self.tid, 0, signal).map_err(refused)?;
        self.stop = None;
        Ok(())
    }

    /// Sees a thread stop at the boundary between kernel and program, and lets it go on.
    pub fn see_outside(tid: i32) -> Result<()> {
        let mut thread = Stopped::seize(tid)?;
        thread.niceness = Some(Niceness::raise(thread.tid));
        let seen = thread.interrupted().and_then(|()| {
            let mut registers = thread.registers()?;
            let is_altered =
                arch::is_native(&registers) && arch::restart_interrupted(&mut registers);
            if is_altered { thread.set_registers(&registers) } else { Ok(()) }
        });
        thread.let_go();
        seen
    }

    /// If we die in the middle of an injected call, the thread must not run on from there.
    pub(crate) fn die_with_us(&self, is_to: bool) -> Result<()> {
        let options = if is_to { OPTIONS | libc::PTRACE_O_EXITKILL } else { OPTIONS };
        request(libc::PTRACE_SETOPTIONS, self.tid, 0, options as usize).map_err(refused)
    }

    /// Waits until the thread has stopped at the boundary between kernel and program, ready for injected calls.
    pub fn settle(&mut self) -> Result<()> {
        self.niceness = Some(Niceness::raise(self.tid));
        self.interrupted()?;
        self.die_with_us(true)?;
        self.saved = self.registers()?;
        if !arch::is_native(&self.saved) {
            return Err(InjectError::NotNative);
        }
        self.mask = self.signal_mask()?;
        self.altered = arch::restart_interrupted(&mut self.saved);
        if self.dispatches_syscalls() {
            return Err(InjectError::Dispatch);
        }
        self.leave_restartable_sequence()?;
        self.block_signals()?;
        self.settled = true;
        Ok(())
    }

    /// Whether its system calls come back to it as signals (Syscall User Dispatch): an injected one would, too.
    fn dispatches_syscalls(&self) -> bool {
        const GET_SYSCALL_USER_DISPATCH_CONFIG: libc::c_uint = 0x4210;
        // struct ptrace_sud_config: the mode comes first. Kernels before 6.4 do not tell.
        let mut config = [0u64; 4];
        let (size, to) = (size_of_val(&config), (&raw mut config) as usize);
        request(GET_SYSCALL_USER_DISPATCH_CONFIG, self.tid, size, to).is_ok() && config[0] != 0
    }

    /// Waits for the stop that was asked for, passing on the signals met on the way.
    pub(crate) fn interrupted(&mut self) -> Result<()> {
        loop {
            let status = self.wait(STOP_DEADLINE)?;
            if is_event_stop(status) {
                return Ok(());
            }
            // The stop at the end of an exec takes the place of this one.
            request(libc::PTRACE_INTERRUPT, self.tid, 0, 0).map_err(refused)?;
            self.go_on(libc::PTRACE_CONT, if is_ours(status) { 0 } else { signal_of(status) })?;
        }
    }

    /// Waits for the next stop. There is no wait for a ptrace stop with a time-out, so it looks again at growing intervals.
    fn wait(&mut self, limit: Duration) -> Result<i32> {
        let deadline = Instant::now() + limit;
        let mut pause = Duration::from_micros(5);
        loop {
            // Stops only: the end of a child of ours is for whoever waits for that.
            let flags = libc::WSTOPPED | libc::__WNOTHREAD;
            match report(libc::P_PID, self.tid.as_raw(), flags) {
                Ok(Some(report))
                    if is_exec_stop(report.status) && (self.settled || self.altered) =>
                {
                    // What is known of it was another's.
                    self.stop = None;
                    let _ = request(libc::PTRACE_DETACH, self.tid, 0, 0);
                    return Err(InjectError::Gone);
                }
                Ok(Some(report)) if report.has_stopped() => {
                    self.stop = Some(report.status);
                    return Ok(report.status);
                }
                // It has ended, or is not ours: asked for stops only, the kernel does not tell of tracees that have ended.
                Ok(Some(_)) => return Err(InjectError::Gone),
                Err(errno) if errno != Errno::EINTR => return Err(InjectError::Gone),
                Ok(None) | Err(_) => {}
            }
            if Instant::now() > deadline {
                return Err(InjectError::Unstoppable);
            }
            std::thread::yield_now();
            if pause > Duration::from_micros(40) {
                std::thread::park_timeout(pause);
            }
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    /// A thread inside a restartable sequence is sent to its abort handler, as the kernel would do: it may not go on in
    /// the middle, because the kernel forgets the sequence as soon as it sees the thread elsewhere.
    fn leave_restartable_sequence(&mut self) -> Result<()> {
        // SAFETY: a struct of integers, for which all-zero is a value.
        let mut config: libc::ptrace_rseq_configuration = unsafe { std::mem::zeroed() };
        let size = size_of_val(&config);
        let got = request(
            libc::PTRACE_GET_RSEQ_CONFIGURATION,
            self.tid,
            size,
            (&raw mut config) as usize,
        );
        if got.is_err() || config.rseq_abi_pointer == 0 {
            return Ok(());
        }
        let word = |address: u64| self.peek(address);
        let section = word(config.rseq_abi_pointer + 8)?;
        if section == 0 {
            return Ok(());
        }
        let (start, length, abort) = (word(section + 8)?, word(section + 16)?, word(section + 24)?);
        let ip = arch::instruction_pointer(&self.saved);
        if ip.wrapping_sub(start) < length {
            arch::set_instruction_pointer(&mut self.saved, abort);
        }
        Ok(())
    }

    fn peek(&self, address: u64) -> Result<u64> {
        nix::sys::ptrace::read(self.tid, address as *mut libc::c_void)
            .map(|word| word as u64)
            .map_err(refused)
    }

    fn registers(&self) -> Result<arch::Registers> {
        nix::sys::ptrace::getregs(self.tid).map_err(refused)
    }

    fn set_registers(&self, registers: &arch::Registers) -> Result<()> {
        nix::sys::ptrace::setregs(self.tid, *registers).map_err(refused)
    }

    fn signal_mask(&self) -> Result<u64> {
        let mut mask = 0u64;
        request(libc::PTRACE_GETSIGMASK as _, self.tid, 8, (&raw mut mask) as usize)
            .map_err(refused)?;
        Ok(mask)
    }

    fn set_signal_mask(&self, mask: u64) -> Result<()> {
        request(libc::PTRACE_SETSIGMASK as _, self.tid, 8, (&raw const mask) as usize)
            .map_err(refused)
    }

    /// Lets the thread issue one system call.
    pub fn syscall(&mut self, at: u64, name: &'static str, nr: i64, args: [u64; 6]) -> Result<i64> {
        if self.stop.is_none() {
            // It has not come back from the last one.
            return Err(InjectError::Unstoppable);
        }
        let deadline = Instant::now() + SYSCALL_DEADLINE;
        let result = loop {
            self.set_registers(&arch::prepare_syscall(&self.saved, at, nr, args))?;
            for _entry_then_exit in 0..2 {
                self.reach_syscall_stop(name, deadline)?;
            }
            let result = arch::syscall_result(&self.registers()?);
            // A stop of the process, the freezer or work of io_uring has interrupted it.
            if !RESTARTS.contains(&result) || Instant::now() > deadline {
                break result;
            }
        };
        if (-4095..0).contains(&result) {
            return Err(InjectError::Syscall {
                call: name,
                errno: Errno::from_raw(-result as i32),
            });
        }
        Ok(result)
    }

    fn reach_syscall_stop(&mut self, name: &'static str, deadline: Instant) -> Result<()> {
        let mut signal = 0;
        while Instant::now() < deadline {
            self.go_on(libc::PTRACE_SYSCALL, signal)?;
            let status = self.wait(deadline.saturating_duration_since(Instant::now()))?;
            if is_syscall_stop(status) {
                return Ok(());
            }
            signal = stop_signal(status);
            // All that can be are blocked: what else gets here is a fault at the instruction itself.
            if signal == 0 && !is_ours(status) {
                return Err(InjectError::Os { what: name, errno: Errno::EFAULT });
            }
        }
        Err(InjectError::Unstoppable)
    }

    /// Gets ready for more injected calls after [`Stopped::restore`].
    pub fn block_signals(&mut self) -> Result<()> {
        self.altered = true;
        self.set_signal_mask(u64::MAX)
    }

    /// Gives a process that was cloned from the thread the niceness which that had before it was stopped.
    pub fn share_niceness(&self, process: Pid) {
        if let Some(niceness) = &self.niceness {
            set_niceness(process, niceness.before);
        }
    }

    /// Puts everything back and lets the thread go.
    pub fn resume(mut self) -> Result<()> {
        let restored = self.restore();
        self.let_go();
        restored
    }

    /// Registers go back at a fresh stop on the way out of the kernel: there, and only there, the kernel begins a system call anew that
    /// the first stop interrupted.
    pub fn restore(&mut self) -> Result<()> {
        let deadline = Instant::now() + SYSCALL_DEADLINE;
        // If it has not come back from an injected call it is let go when it has.
        let mut status = self.stop.ok_or(InjectError::Unstoppable)?;
        while !is_event_stop(status) {
            self.leave_call(status)?;
            status = self.wait(deadline.saturating_duration_since(Instant::now()))?;
        }
        self.set_registers(&self.saved)?;
        self.set_signal_mask(self.mask)?;
        self.altered = false;
        // It is as it was. Fails only if it has been killed.
        let _ = self.die_with_us(false);
        Ok(())
    }

    /// In the middle of an injected call. Fails only if the thread has been killed meanwhile.
    fn put_back(&self) {
        let _ = self.set_registers(&self.saved);
        let _ = self.set_signal_mask(self.mask);
    }

    /// Lets the thread go; one that has not stopped yet as soon as it has ([`release_late`]).
    pub fn let_go(mut self) {
        if let Some(niceness) = &self.niceness {
            set_niceness(niceness.tid, niceness.before);
        }
        if self.try_release() {
            forget(self.tid);
        } else {
            if self.altered && self.stop.is_none() {
                // Out of a frozen cgroup too. What fails here says that it has been killed.
                let _ = request(libc::PTRACE_INTERRUPT, self.tid, 0, 0);
            }
            LINGERING.with_borrow_mut(|lingering| lingering.push(self));
        }
    }
}

/// Whether a stop (as waitid reports it) is an answer to PTRACE_INTERRUPT, or a job control stop.
fn is_event_stop(status: i32) -> bool {
    status >> 8 == libc::PTRACE_EVENT_STOP
}

/// Whether a stop is at the beginning or the end of an injected call.
fn is_syscall_stop(status: i32) -> bool {
    status == libc::SIGTRAP | 0x80
}

/// The signal of a stop if it is the one that nobody can block: it is for the program.
fn stop_signal(status: i32) -> usize {
    if status == libc::SIGSTOP { libc::SIGSTOP as usize } else { 0 }
}

/// Whether a stop tells that a thread has executed a program.
fn is_exec_stop(status: i32) -> bool {
    status == libc::SIGTRAP | libc::PTRACE_EVENT_EXEC << 8
}

/// Whether a stop is none of a signal's.
fn is_ours(status: i32) -> bool {
    is_event_stop(status) || is_syscall_stop(status) || is_exec_stop(status)
}

/// The signal of a stop.
fn signal_of(status: i32) -> usize {
    (status & 0x7f) as usize
}

thread_local! {
    /// Threads that were asked to stop and have not done so yet: only a stopped thread can be detached.
    static LINGERING: RefCell<Vec<Stopped>> = const { RefCell::new(Vec::new()) };
    /// Whether this thread may trace others.
    static TRACES: Cell<bool> = const { Cell::new(false) };
}

/// Threads that this process traces.
static TRACED: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());

fn forget(tid: Pid) {
    lock(&TRACED).remove(&tid.as_raw());
}

/// Detaches threads which stopped too late for an injection, and reaps those that have ended. To be called often by the thread that injects;
/// if some are left it tells when to call again.
pub fn release_late() -> Option<Duration> {
    if !TRACES.get() {
        return None;
    }
    let late = LINGERING.with_borrow_mut(|lingering| {
        lingering.retain_mut(|thread| {
            let released = thread.try_release();
            if released {
                forget(thread.tid);
            }
            !released
        });
        let pause =
            |thread: &Stopped| (thread.since.elapsed() / LATE_SHARE).clamp(LATE_MIN, LATE_MAX);
        lingering.iter().map(pause).min()
    });
    late.into_iter().chain(release_strays()).min()
}

/// The calling thread ends. With it the kernel kills whom it traces in the middle of an injected call: waits until none is, for so long at most. For others,
/// whom the kernel lets go as they are, a moment.
pub fn release_all(limit: Duration) {
    let began = Instant::now();
    let is_one_left = || LINGERING.with_borrow(|lingering| lingering.iter().any(|one| one.settled));
    while release_late().is_some() {
        let most = if is_one_left() { limit } else { SEIZE_DEADLINE.min(limit) };
        if began.elapsed() > most {
            return;
        }
        std::thread::park_timeout(LATE_MIN);
    }
}

/// Detaches whom the calling thread traces without having asked for it: a child by CLONE_PTRACE of a thread that was traced, and a thread that
/// has executed a program, which gives it the id of its process's first thread.
fn release_strays() -> Option<Duration> {
    loop {
        // Only looked at, because a stop may be one that is awaited.
        let flags = libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT | libc::__WNOTHREAD;
        let Ok(report) = report(libc::P_ALL, 0, flags) else {
            TRACES.set(false);
            return None;
        };
        let traced = lock(&TRACED);
        let Some(report) = report else {
            // Others may hide it while they are stopped, but are not for long.
            return Some(if traced.is_empty() { LATE_MIN } else { LATE_MAX });
        };
        if report.has_stopped() && traced.contains(&report.pid) {
            return Some(LATE_MAX);
        }
        drop(traced);
        let released = match report.has_stopped() {
            true => {
                let signal = if is_ours(report.status) { 0 } else { signal_of(report.status) };
                // An exec must have been taken note of.
                let _ = self::report(libc::P_PID, report.pid, libc::WSTOPPED | libc::__WNOTHREAD);
                request(libc::PTRACE_DETACH, Pid::from_raw(report.pid), 0, signal).is_ok()
            }
            false => {
                is_left_to_others(report.pid) == Some(false) && reap(report.pid, libc::__WNOTHREAD)
            }
        };
        if !released {
            // It is being killed, or has ended and is awaited elsewhere.
            return Some(LATE_MAX);
        }
    }
}

/// Takes note of traced threads that have ended; until then their process cannot end or execute another program, and its parent waits.
/// For a thread that is woken by SIGCHLD: the one that traces may sleep in PTRACE_SEIZE until the exec of another thread of that
/// process is over, which is when the dead ones have been reaped.
pub fn reap_ended() {
    let traced: Vec<i32> = lock(&TRACED).iter().copied().collect();
    for tid in traced {
        // The tracees of other threads.
        reap(tid, 0);
    }
}

/// Takes note of a traced thread that has ended. True if it is ours no longer. `whose` is __WNOTHREAD for the tracees of the calling thread only: the id of
/// one that has gone may be that of a child of ours. The end of a child is left alone: its exit status is for whoever started it.
fn reap(tid: i32, whose: libc::c_int) -> bool {
    let look = |flags| report(libc::P_PID, tid, libc::WEXITED | whose | flags);
    match look(libc::WNOWAIT) {
        Err(_) => true,
        // A stop, which the kernel tells of whether asked for or not, is for the tracer and must not be taken from it.
        Ok(report) if !report.as_ref().is_some_and(Report::has_ended) => false,
        Ok(_) => {
            let left = is_left_to_others(tid);
            if left == Some(false) {
                // It has been seen.
                let _ = look(0);
            }
            left.is_some()
        }
    }
}

/// Whether one that has ended is a child of ours; unknown for want of a descriptor to look. The first thread of a process ends when all others have.
fn is_left_to_others(tid: i32) -> Option<bool> {
    let is_leader = proc::status_field(tid, "Tgid:")? == i64::from(tid);
    Some(is_leader && proc::status_field(tid, "PPid:")? == i64::from(std::process::id()))
}

/// What waitid tells.
struct Report {
    pid: i32,
    code: i32,
    status: i32,
}

impl Report {
    fn has_stopped(&self) -> bool {
        [libc::CLD_TRAPPED, libc::CLD_STOPPED].contains(&self.code)
    }

    fn has_ended(&self) -> bool {
        [libc::CLD_EXITED, libc::CLD_KILLED, libc::CLD_DUMPED].contains(&self.code)
    }
}

/// Asks, without waiting, for the stop or end of a child or tracee. __WALL is implied for traced threads.
fn report(ids: libc::idtype_t, id: i32, flags: libc::c_int) -> nix::Result<Option<Report>> {
    // SAFETY: a struct of integers, for which all-zero is a value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = flags | libc::WNOHANG | libc::__WALL;
    // SAFETY: waitid writes one siginfo, which lives on this stack frame.
    let waited = unsafe { libc::waitid(ids, id as libc::id_t, &raw mut info, flags) };
    Errno::result(waited)?;
    // SAFETY: after a successful waitid these fields are set, or all of it is still zero.
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    Ok((pid != 0).then_some(Report { pid, code: info.si_code, status }))
}

fn request(request: libc::c_uint, tid: Pid, address: usize, data: usize) -> nix::Result<()> {
    // SAFETY: callers pass integers, or the address and length of a live local which the kernel fills; ptrace changes only
    // the traced thread otherwise.
    let result = unsafe { libc::ptrace(request, tid.as_raw(), address, data) };
    Errno::result(result).map(drop)
}
