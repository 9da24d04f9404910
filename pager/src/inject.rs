//! Starts the evictor inside a running process: stops its running threads for about a millisecond, lets one of them issue a few system
//! calls, and sets them going again as if nothing had happened.
//!
//! Every ptrace request of one injection must come from the thread that began it.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::unistd::Pid;

use crate::{arch, proc};

/// Longest that a thread may take to stop.
const STOP_DEADLINE: Duration = Duration::from_millis(30);
/// Longest that one injected system call may take.
const SYSCALL_DEADLINE: Duration = Duration::from_secs(2);
/// How often running threads are looked for.
const FREEZE_ROUNDS: usize = 4;
/// Most threads that are stopped: each costs some 10 us.
const FROZEN_MAX: usize = 256;

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
    /// Its process ids are not ours.
    #[error("it is in another PID namespace: run gms in there")]
    Namespace,
    /// 32-bit code.
    #[error("it runs 32-bit code: only 64-bit processes can be paged")]
    NotNative,
    /// No thread could be stopped in time (vfork wait, uninterruptible sleep, job control stop).
    #[error("no thread of it could be stopped in time")]
    Unstoppable,
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

type Result<T> = std::result::Result<T, InjectError>;

/// An evictor that has just been started.
#[derive(Debug)]
pub struct Injected {
    /// Base of the blob's mapping in the process.
    pub base: u64,
    /// Process id of the evictor.
    pub evictor: Pid,
}

/// Threads of a process that were running, stopped until this is dropped, so that the process does not outgrow its budget while it is
/// being attached. Blocked threads are left alone.
pub struct Frozen {
    pid: i32,
    threads: Vec<Stopped>,
    since: Instant,
}

impl Frozen {
    /// Stops what runs. A thread may have started another before it stopped: looks again until none is new.
    pub fn new(pid: i32) -> Result<Frozen> {
        may_be_traced(pid)?;
        let mut frozen = Frozen { pid, threads: Vec::new(), since: Instant::now() };
        for _ in 0..FREEZE_ROUNDS {
            let mut running = proc::threads(pid);
            running.retain(|&tid| proc::state(tid) == Some('R') && !frozen.holds(tid));
            if running.is_empty() {
                break;
            }
            let room = FROZEN_MAX.saturating_sub(frozen.threads.len());
            let seized = running.into_iter().take(room).filter_map(|tid| Stopped::seize(tid).ok());
            frozen.threads.extend(seized);
        }
        Ok(frozen)
    }

    fn holds(&self, tid: i32) -> bool {
        self.threads.iter().any(|thread| thread.tid.as_raw() == tid)
    }

    /// How long the threads have been stopped.
    pub fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    /// Starts an evictor: by a thread that ran, so that no system call is interrupted, or else by one that is blocked.
    pub fn inject(&mut self) -> Result<Injected> {
        let mut failure = InjectError::Unstoppable;
        let running = std::mem::take(&mut self.threads);
        let mut injected = None;
        for mut thread in running {
            if injected.is_none() {
                match thread.settle() {
                    Ok(()) => injected = Some(thread.inject(self.pid)),
                    Err(InjectError::Unstoppable) => {}
                    Err(other) => failure = other,
                }
            }
            self.threads.push(thread);
        }
        if let Some(injected) = injected {
            return injected;
        }
        for tid in blocked_threads(self.pid) {
            match Stopped::new(tid) {
                Ok(mut thread) => {
                    let injected = thread.inject(self.pid);
                    self.threads.push(thread);
                    return injected;
                }
                Err(InjectError::Unstoppable) => {}
                Err(other) => failure = other,
            }
        }
        Err(failure)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.threads.drain(..).for_each(Stopped::let_go);
    }
}

fn may_be_traced(pid: i32) -> Result<()> {
    match proc::status_field(pid, "TracerPid:") {
        None => return Err(InjectError::Gone),
        Some(0) => {}
        Some(tracer) if tracer == i64::from(std::process::id()) => {
            return Err(InjectError::Unstoppable);
        }
        Some(tracer) => return Err(InjectError::Traced(tracer)),
    }
    // The evictor tells its process id as it knows it.
    if !proc::shares_pid_namespace(pid) {
        return Err(InjectError::Namespace);
    }
    match proc::status_field(pid, "Seccomp:") {
        Some(mode) if mode != 0 => Err(InjectError::Seccomp),
        _ => Ok(()),
    }
}

/// Whether no thread of the process is inside madvise at some moment during the call. Threads that run are stopped for that; those
/// that are blocked are not disturbed.
pub fn is_outside_madvise(pid: i32) -> bool {
    proc::threads(pid).into_iter().all(|tid| {
        // Workers of io_uring issue system calls that /proc does not tell of.
        let worker = proc::thread_name(tid).is_none_or(|name| name.starts_with("iou-"));
        match proc::blocked_in(tid) {
            Some(call) => {
                ![libc::SYS_madvise, libc::SYS_process_madvise].contains(&call) && !worker
            }
            None => !worker && Stopped::new(tid).and_then(Stopped::resume).is_ok(),
        }
    })
}

/// Unmaps the blob of an evictor which has ended.
pub fn remove_blob(pid: i32, base: u64) -> Result<()> {
    let runs = |tid: &i32| proc::state(*tid) == Some('R');
    let running = proc::threads(pid).into_iter().find(runs);
    let tid = running.or_else(|| blocked_threads(pid).first().copied());
    let mut thread = Stopped::new(tid.ok_or(InjectError::Unstoppable)?)?;
    let args = [base, arch::BLOB_LEN as u64, 0, 0, 0, 0];
    let unmapped = syscall_instruction(pid)
        .and_then(|(at, _)| thread.syscall(at, "munmap", libc::SYS_munmap, args));
    thread.resume()?;
    unmapped.map(drop)
}

/// A syscall instruction in the vdso, so that no text of the program is patched, and the memory of the process.
fn syscall_instruction(pid: i32) -> Result<(u64, File)> {
    let memory = File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/{pid}/mem"))
        .map_err(|e| refused(Errno::from_raw(e.raw_os_error().unwrap_or(libc::EIO))))?;
    let vdso = proc::maps(pid)
        .ok_or(InjectError::Gone)?
        .into_iter()
        .find(|m| m.name == "[vdso]")
        .ok_or(InjectError::Gone)?;
    let length = (vdso.range.end - vdso.range.start).min(64 * 1024) as usize;
    let mut code = vec![0; length];
    memory.read_exact_at(&mut code, vdso.range.start).map_err(|_| InjectError::Gone)?;
    let offset = code
        .windows(arch::SYSCALL_INSTRUCTION.len())
        .position(|window| window == arch::SYSCALL_INSTRUCTION)
        .ok_or(InjectError::NotNative)?;
    Ok((vdso.range.start + offset as u64, memory))
}

fn refused(errno: Errno) -> InjectError {
    match errno {
        Errno::ESRCH | Errno::ENOENT => InjectError::Gone,
        Errno::EPERM | Errno::EACCES => InjectError::NotPermitted(errno),
        Errno::ECHILD => InjectError::Gone,
        _ => InjectError::Os { what: "attaching", errno },
    }
}

/// Blocked threads which can be stopped: not one that waits for its vfork child, is uninterruptible, or is stopped.
fn blocked_threads(pid: i32) -> Vec<i32> {
    const VFORKS: [i64; 3] = [libc::SYS_vfork, libc::SYS_clone, libc::SYS_clone3];
    let mut threads = proc::threads(pid);
    threads.retain(|&tid| proc::state(tid) == Some('S'));
    threads.retain(|&tid| !proc::blocked_in(tid).is_some_and(|nr| VFORKS.contains(&nr)));
    threads.truncate(8);
    threads
}

/// A thread stopped by us, or about to stop. To be ended with [`Stopped::resume`] or [`Stopped::let_go`].
struct Stopped {
    tid: Pid,
    saved: arch::Registers,
    mask: u64,
    /// Whether registers and mask are to be put back.
    altered: bool,
    /// Whether it has stopped, and that has been taken note of.
    settled: bool,
    niceness: Option<Niceness>,
}

/// The niceness of a thread while it is stopped: every step of an injection waits for the thread to be scheduled, and its siblings go on
/// allocating meanwhile. The evictor inherits it.
struct Niceness {
    tid: Pid,
    before: libc::c_int,
}

impl Niceness {
    fn raise(tid: Pid) -> Niceness {
        // SAFETY: no memory is involved.
        let before = unsafe { libc::getpriority(libc::PRIO_PROCESS, tid.as_raw() as libc::id_t) };
        let niceness = Niceness { tid, before };
        niceness.set(-20);
        niceness
    }

    /// Best effort: without the privilege nothing changes.
    fn set(&self, nice: libc::c_int) {
        // SAFETY: no memory is involved.
        unsafe { libc::setpriority(libc::PRIO_PROCESS, self.tid.as_raw() as libc::id_t, nice) };
    }
}

impl Stopped {
    /// Stops a thread and waits until it has stopped.
    fn new(tid: i32) -> Result<Stopped> {
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
    fn seize(tid: i32) -> Result<Stopped> {
        let tid = Pid::from_raw(tid);
        request(libc::PTRACE_SEIZE, tid, 0, libc::PTRACE_O_TRACESYSGOOD as usize)
            .map_err(refused)?;
        // Fails only if the thread has been killed, which is found later.
        let _ = request(libc::PTRACE_INTERRUPT, tid, 0, 0);
        // SAFETY: a struct of integers, for which all-zero is a value.
        let saved = unsafe { std::mem::zeroed() };
        Ok(Stopped { tid, saved, mask: 0, altered: false, settled: false, niceness: None })
    }

    /// Whether the thread, which did not stop in time, is ours no longer. It stops as soon as it can, and must not stay so.
    fn try_release(&mut self) -> bool {
        match self.wait(Duration::ZERO) {
            Err(InjectError::Unstoppable) => false,
            Err(_) => true,
            Ok(status) => {
                let ours = is_event_stop(status) || is_syscall_stop(status);
                let signal = if ours { 0 } else { signal_of(status) };
                if self.altered {
                    self.put_back();
                } else if let Ok(mut registers) = self.registers()
                    && ours
                    && !proc::has_deliverable_signal(self.tid.as_raw())
                    && arch::restart_interrupted(&mut registers)
                {
                    // Fails only if the thread has been killed meanwhile.
                    let _ = self.set_registers(&registers);
                }
                let _ = request(libc::PTRACE_DETACH, self.tid, 0, signal);
                true
            }
        }
    }

    /// Waits until the thread has stopped at the boundary between kernel and program, ready for injected calls.
    fn settle(&mut self) -> Result<()> {
        self.niceness = Some(Niceness::raise(self.tid));
        self.interrupted()?;
        // If we die in the middle of an injected call, the thread must not run on from there.
        let options = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_EXITKILL;
        request(libc::PTRACE_SETOPTIONS, self.tid, 0, options as usize).map_err(refused)?;
        self.settled = true;
        self.saved = self.registers()?;
        if !arch::is_native(&self.saved) {
            return Err(InjectError::NotNative);
        }
        self.leave_restartable_sequence()?;
        if !proc::has_deliverable_signal(self.tid.as_raw()) {
            arch::restart_interrupted(&mut self.saved);
        }
        self.mask = self.signal_mask()?;
        self.altered = true;
        self.set_signal_mask(u64::MAX)
    }

    /// Waits for the stop that was asked for, passing on the signals met on the way.
    fn interrupted(&self) -> Result<()> {
        loop {
            let status = self.wait(STOP_DEADLINE)?;
            if is_event_stop(status) {
                return Ok(());
            }
            request(libc::PTRACE_CONT, self.tid, 0, signal_of(status)).map_err(refused)?;
        }
    }

    /// Waits for the next stop. There is no wait for a ptrace stop with a time-out, so it looks again at growing intervals.
    fn wait(&self, limit: Duration) -> Result<i32> {
        let deadline = Instant::now() + limit;
        let mut pause = Duration::from_micros(5);
        loop {
            // SAFETY: a struct of integers, for which all-zero is a value.
            let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
            // Stops only: the end of a child of ours is for whoever waits for that. __WALL is implied for traced threads.
            let flags = libc::WSTOPPED | libc::WNOHANG | libc::__WALL | libc::__WNOTHREAD;
            // SAFETY: waitid writes one siginfo, which lives on this stack frame.
            let waited = unsafe {
                libc::waitid(libc::P_PID, self.tid.as_raw() as libc::id_t, &raw mut info, flags)
            };
            // SAFETY: after a successful waitid these fields are set, or all of it is still zero.
            let (stopped, status) = unsafe { (info.si_pid() != 0, info.si_status()) };
            if waited == 0 && stopped {
                return match info.si_code {
                    libc::CLD_TRAPPED | libc::CLD_STOPPED => Ok(status),
                    _ => Err(InjectError::Gone),
                };
            }
            if waited < 0 && Errno::last() != Errno::EINTR {
                return Err(InjectError::Gone);
            }
            if Instant::now() > deadline {
                return Err(InjectError::Unstoppable);
            }
            std::thread::yield_now();
            if pause > Duration::from_micros(40) {
                if matches!(proc::state(self.tid.as_raw()), None | Some('Z' | 'X')) {
                    self.reap();
                    return Err(InjectError::Gone);
                }
                std::thread::park_timeout(pause);
            }
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    /// The thread has ended while we traced it: takes note, or nobody else could. Only the end of a child of ours is left alone: its
    /// exit status is for another thread of this process.
    fn reap(&self) {
        let tid = self.tid.as_raw();
        let leader = proc::status_field(tid, "Tgid:") == Some(tid.into());
        let ours = proc::status_field(tid, "PPid:") == Some(std::process::id().into());
        if leader && ours {
            return;
        }
        // SAFETY: a struct of integers, for which all-zero is a value.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let flags = libc::WEXITED | libc::WNOHANG | libc::__WALL | libc::__WNOTHREAD;
        // SAFETY: waitid writes one siginfo, which lives on this stack frame.
        unsafe { libc::waitid(libc::P_PID, tid as libc::id_t, &raw mut info, flags) };
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
    fn syscall(&mut self, at: u64, name: &'static str, nr: i64, args: [u64; 6]) -> Result<i64> {
        self.set_registers(&arch::prepare_syscall(&self.saved, at, nr, args))?;
        for _entry_then_exit in 0..2 {
            loop {
                request(libc::PTRACE_SYSCALL, self.tid, 0, 0).map_err(refused)?;
                let status = self.wait(SYSCALL_DEADLINE)?;
                if is_syscall_stop(status) {
                    break;
                }
                // All signals are blocked: only a fault at the instruction itself gets here, or a job control stop.
                if !is_event_stop(status) {
                    return Err(InjectError::Os { what: name, errno: Errno::EFAULT });
                }
            }
        }
        let result = arch::syscall_result(&self.registers()?);
        if (-4095..0).contains(&result) {
            return Err(InjectError::Syscall {
                call: name,
                errno: Errno::from_raw(-result as i32),
            });
        }
        Ok(result)
    }

    /// Lets the thread start an evictor; it stays stopped, as it was before.
    fn inject(&mut self, pid: i32) -> Result<Injected> {
        // Found only now: while it ran, the process might have executed another program.
        let injected = syscall_instruction(pid)
            .and_then(|(instruction, memory)| self.start_evictor(instruction, &memory));
        self.restore()?;
        injected
    }

    fn start_evictor(&mut self, instruction: u64, memory: &File) -> Result<Injected> {
        const PRIVATE: u64 = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
        const READ_WRITE: u64 = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        const READ_EXEC: u64 = (libc::PROT_READ | libc::PROT_EXEC) as u64;
        let length = arch::BLOB_LEN as u64;
        let base = self.syscall(
            instruction,
            "mmap",
            libc::SYS_mmap,
            [0, length, READ_WRITE, PRIVATE, u64::MAX, 0],
        )? as u64;
        let started = self.run_blob(instruction, memory, base, READ_EXEC);
        if started.is_err() {
            // Best effort: the error that matters is the first one.
            let _ =
                self.syscall(instruction, "munmap", libc::SYS_munmap, [base, length, 0, 0, 0, 0]);
        }
        let evictor = started?;
        Ok(Injected { base, evictor })
    }

    fn run_blob(&mut self, instruction: u64, memory: &File, base: u64, exec: u64) -> Result<Pid> {
        let os = |what| move |_| InjectError::Os { what, errno: Errno::EIO };
        memory.write_all_at(&arch::blob_image(base), base).map_err(os("writing the blob"))?;
        self.syscall(
            instruction,
            "mprotect",
            libc::SYS_mprotect,
            [base, arch::DATA, exec, 0, 0, 0],
        )?;
        let dontfork = [base, arch::BLOB_LEN as u64, libc::MADV_DONTFORK as u64, 0, 0, 0];
        self.syscall(instruction, "madvise", libc::SYS_madvise, dontfork)?;
        let flags = (libc::CLONE_VM | libc::CLONE_FILES) as u64;
        let stack = base + arch::BLOB_LEN as u64;
        let child = self.syscall(base, "clone", libc::SYS_clone, [flags, stack, 0, 0, 0, 0])?;
        let reap = [child as u64, 0, libc::__WALL as u64, 0, 0, 0];
        self.syscall(instruction, "wait4", libc::SYS_wait4, reap)?;
        let mut words = [0u8; 8];
        memory.read_exact_at(&mut words, base + arch::READY).map_err(os("reading the blob"))?;
        let [ready, pid] =
            [&words[..4], &words[4..]].map(|w| i32::from_le_bytes([w[0], w[1], w[2], w[3]]));
        if ready != 1 || pid <= 0 {
            return Err(InjectError::Os { what: "starting the evictor", errno: Errno::ETIMEDOUT });
        }
        Ok(Pid::from_raw(pid))
    }

    /// Puts everything back and lets the thread go.
    fn resume(mut self) -> Result<()> {
        let restored = self.restore();
        self.let_go();
        restored
    }

    /// Registers go back at a fresh stop on the way out of the kernel: there, and only there, the kernel restarts a system call that
    /// the first stop interrupted.
    fn restore(&mut self) -> Result<()> {
        self.set_registers(&self.saved)?;
        request(libc::PTRACE_INTERRUPT, self.tid, 0, 0).map_err(refused)?;
        request(libc::PTRACE_CONT, self.tid, 0, 0).map_err(refused)?;
        while !is_event_stop(self.wait(SYSCALL_DEADLINE)?) {
            request(libc::PTRACE_CONT, self.tid, 0, 0).map_err(refused)?;
        }
        self.set_registers(&self.saved)?;
        self.set_signal_mask(self.mask)?;
        self.altered = false;
        Ok(())
    }

    /// In the middle of an injected call. Fails only if the thread has been killed meanwhile.
    fn put_back(&self) {
        let _ = self.set_registers(&self.saved);
        let _ = self.set_signal_mask(self.mask);
    }

    fn let_go(mut self) {
        if let Some(niceness) = &self.niceness {
            niceness.set(niceness.before);
        }
        if self.settled && self.altered {
            self.put_back();
        }
        if self.settled && request(libc::PTRACE_DETACH, self.tid, 0, 0).is_ok() {
            return;
        }
        if !self.try_release() {
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

/// The signal of a stop.
fn signal_of(status: i32) -> usize {
    (status & 0x7f) as usize
}

thread_local! {
    /// Threads that were asked to stop and have not done so yet: only a stopped thread can be detached.
    static LINGERING: RefCell<Vec<Stopped>> = const { RefCell::new(Vec::new()) };
}

/// Detaches threads which stopped too late for an injection. To be called often by the thread that injects; true if some are left.
pub fn release_late() -> bool {
    LINGERING.with_borrow_mut(|lingering| {
        lingering.retain_mut(|thread| !thread.try_release());
        !lingering.is_empty()
    })
}

fn request(request: libc::c_uint, tid: Pid, address: usize, data: usize) -> nix::Result<()> {
    // SAFETY: callers pass integers, or the address and length of a live local which the kernel fills; ptrace changes only
    // the traced thread otherwise.
    let result = unsafe { libc::ptrace(request, tid.as_raw(), address, data) };
    Errno::result(result).map(drop)
}
