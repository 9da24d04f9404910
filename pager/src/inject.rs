//! Starts the evictor inside a running process: stops its running threads for about a millisecond, lets one of them issue a few system
//! calls, and sets them going again as if nothing had happened.
//!
//! Every ptrace request of one injection must come from the thread that began it: of a process apart, which finishes it if this one is killed ([`apart`]).

use std::cell::Cell;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use crate::arch;
use crate::board;
use crate::evictor::{Evictor, Injected};
use crate::kernel::pidfd::{self, has_ended, pidfd_open, same_memory};
use crate::kernel::proc::descends;
use crate::kernel::{cgroup, proc};
use crate::page_map::PAGE;
use crate::stopped::apart::{Caller, apart};
use crate::stopped::{InjectError, Stopped, refused};
use crate::torture::{self, Point};

/// Name of the evictor's process: not one by which people end gms.
const EVICTOR_NAME: &str = "far-evictor";

/// Whether a process has the name of evictors. Anybody can have it.
pub(crate) fn is_named_evictor(pid: i32) -> bool {
    proc::thread_name(pid).is_some_and(|name| name.trim_end() == EVICTOR_NAME)
}
/// PR_GET_TID_ADDRESS.
const GET_TID_ADDRESS: u64 = 40;
/// For an evictor to get ready.
const READY_DEADLINE: Duration = Duration::from_secs(2);
/// For the evictor of an injection that has failed to be cloned. If it comes later it ends by itself ([`arch::PATIENCE_S`]).
const ABANDONED_DEADLINE: Duration = Duration::from_millis(100);
/// For one of the threads of a process to stop: meanwhile nobody makes room for faults.
const INJECT_DEADLINE: Duration = Duration::from_millis(100);
/// How often running threads are looked for.
const FREEZE_ROUNDS: usize = 4;
/// Most threads that are stopped: each costs some 10 us.
const FROZEN_MAX: usize = 256;

type Result<T> = std::result::Result<T, InjectError>;

/// Whose child an evictor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Parent {
    /// Nobody's in the workload: not even `wait4(-1, __WALL)` sees it.
    Adopted,
    /// The process's, where an adopted one would be seen by others in the workload, who reap orphans: a subreaper, the first process of
    /// a PID namespace. An ordinary wait of the process does not see it.
    Process,
}

/// Threads of a process that were running, stopped until this is dropped, so that the process does not outgrow its budget while it is
/// being attached. Blocked threads are left alone.
pub struct Frozen {
    pid: i32,
    threads: Vec<Stopped>,
    /// The one which has started an evictor.
    injected: Option<i32>,
    since: Instant,
}

impl Frozen {
    /// Stops what runs. A thread may have started another before it stopped: looks again until none is new.
    pub fn new(pid: i32) -> Result<Frozen> {
        may_be_traced(pid)?;
        let mut frozen = Frozen::none(pid);
        frozen.stop_running()?;
        Ok(frozen)
    }

    fn none(pid: i32) -> Frozen {
        Frozen { pid, threads: Vec::new(), injected: None, since: Instant::now() }
    }

    /// The same for a process that may not run, and none at all if it does not: many are stopped in little time.
    pub fn if_running(pid: i32) -> Result<Option<Frozen>> {
        let mut frozen = Frozen::none(pid);
        frozen.stop_running()?;
        Ok((!frozen.threads.is_empty()).then_some(frozen))
    }

    /// Stops threads that change the address space too, most of which sleep until that has been read: they stop when it has.
    pub fn restless(pid: i32) -> Option<Frozen> {
        let mut frozen = Frozen::none(pid);
        frozen.stop_in("RD").ok()?;
        (!frozen.threads.is_empty()).then_some(frozen)
    }

    /// The same for those who have begun since.
    pub fn stop_restless(&mut self) -> Result<()> {
        self.stop_in("RD")
    }

    /// Stops what runs and has not been stopped before. Fails if the process executes a program, and that takes long: its lock, for which each of
    /// its threads would be waited for, is the process's.
    pub fn stop_running(&mut self) -> Result<()> {
        self.stop_in("R")
    }

    fn stop_in(&mut self, states: &str) -> Result<()> {
        for _ in 0..FREEZE_ROUNDS {
            let running = proc::in_state(self.pid, states, |tid| self.holds(tid));
            let room = FROZEN_MAX.saturating_sub(self.threads.len());
            if running.is_empty() || room == 0 {
                break;
            }
            for tid in running.into_iter().take(room) {
                match Stopped::seize(tid) {
                    Ok(thread) => self.threads.push(thread),
                    Err(InjectError::Unstoppable) => return Err(InjectError::Unstoppable),
                    // It has ended, or is traced by somebody else.
                    Err(_) => {}
                }
            }
        }
        Ok(())
    }

    fn holds(&self, tid: i32) -> bool {
        self.threads.iter().any(|thread| thread.tid.as_raw() == tid)
    }

    /// How long the threads have been stopped.
    pub fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    /// A thread of the process that has its memory.
    pub fn witness(&self) -> i32 {
        self.injected.unwrap_or(self.pid)
    }

    /// Starts an evictor: by a thread that ran, so that no system call is interrupted, or else by one that is blocked. Before it does anything, that
    /// thread has stopped, and `may_be` tells whether it is one of the process that is meant (`Unstoppable`: another one is to be tried).
    pub fn inject(&mut self, may_be: impl Fn(i32) -> Result<()>) -> Result<Injected> {
        may_be_injected(self.pid)?;
        let pid = self.pid;
        let (tid, injected) = self.by_one(&may_be, |thread, caller| thread.inject(pid, caller))?;
        self.injected = Some(tid);
        // It has run on. What fails here is found when it is looked for again.
        let _ = self.stop_running();
        Ok(injected)
    }

    /// Unmaps these ranges (address, length) again. Best effort: they stay if no thread of the process stops.
    pub fn unmap(&mut self, ranges: &[(u64, u64)], may_be: impl Fn(i32) -> Result<()>) {
        let _ = self.by_one(&may_be, |thread, _| {
            let (instruction, _) = syscall_instruction(thread.tid.as_raw())?;
            for &(at, length) in ranges {
                let arguments = [at, length, 0, 0, 0, 0];
                let _ = thread.syscall(instruction, "munmap", libc::SYS_munmap, arguments);
            }
            thread.restore()
        });
    }

    /// Has one thread do something that leaves it as it was, by a process that finishes that if this one is killed.
    fn by_one<R>(
        &mut self,
        may_be: &impl Fn(i32) -> Result<()>,
        work: impl Fn(&mut Stopped, &Caller) -> Result<R>,
    ) -> Result<(i32, R)> {
        let deadline = Instant::now() + INJECT_DEADLINE;
        let mut failure = InjectError::Unstoppable;
        let mut running = std::mem::take(&mut self.threads).into_iter();
        while let Some(mut thread) = running.next() {
            if Instant::now() > deadline || thread.interrupted().is_err() {
                self.threads.push(thread);
                continue;
            }
            let tid = thread.tid.as_raw();
            match do_apart(thread, may_be, &work) {
                Ok(done) => {
                    self.threads.extend(running);
                    return done.map(|made| (tid, made));
                }
                Err(InjectError::Unstoppable) => {}
                Err(other) => failure = other,
            }
        }
        for (tried, tid) in blocked_threads(self.pid).into_iter().enumerate() {
            // One is tried in any case: those that run may never stop.
            if tried > 0 && Instant::now() > deadline {
                break;
            }
            // Whoever stops late is let go by this process, in whatever call it is.
            let stopped = Stopped::seize(tid).and_then(|mut thread| match thread.interrupted() {
                Ok(()) => Ok(thread),
                Err(error) => {
                    thread.let_go();
                    Err(error)
                }
            });
            match stopped.and_then(|thread| do_apart(thread, may_be, &work)) {
                Ok(done) => return done.map(|made| (tid, made)),
                Err(InjectError::Unstoppable) => {}
                Err(other) => failure = other,
            }
        }
        Err(failure)
    }
}

/// Has a thread that has stopped do something, by another process. Fails if nothing was done.
fn do_apart<R>(
    thread: Stopped,
    may_be: impl Fn(i32) -> Result<()>,
    work: impl Fn(&mut Stopped, &Caller) -> Result<R>,
) -> Result<Result<R>> {
    let tid = thread.tid.as_raw();
    // Whom another process is to stop must be ours no longer.
    thread.let_go();
    let done = apart(|caller| {
        let mut thread = Stopped::new(tid)?;
        let done =
            may_be(tid).and_then(|()| may_make_calls(tid)).map(|()| work(&mut thread, caller));
        thread.let_go();
        done
    });
    // There may be room for one more process later.
    done.unwrap_or(Err(InjectError::Unstoppable))
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
        // The kernel names the thread that traces, not its process. A pager that has died may have left one that finishes an attach.
        Some(tracer)
            if tracer == i64::from(nix::unistd::gettid().as_raw()) || is_of_gms(tracer) =>
        {
            return Err(InjectError::Unstoppable);
        }
        Some(tracer) => return Err(InjectError::Traced(tracer)),
    }
    Ok(())
}

/// Whether a process executes the binary that this one does.
fn is_of_gms(pid: i64) -> bool {
    let binary = |pid: &str| std::fs::metadata(format!("/proc/{pid}/exe")).ok();
    let (Some(its), Some(own)) = (binary(&pid.to_string()), binary("self")) else { return false };
    (its.dev(), its.ino()) == (own.dev(), own.ino())
}

fn may_be_injected(pid: i32) -> Result<()> {
    if cgroup::is_frozen(pid) {
        return Err(InjectError::Unstoppable);
    }
    may_make_calls(pid)
}

/// Whether a thread may make calls that its program does not. Each thread has filters of its own, and a namespace of its own for its children.
fn may_make_calls(tid: i32) -> Result<()> {
    if proc::starts_pid_namespace(tid) {
        return Err(InjectError::Namespace);
    }
    match proc::status_field(tid, "Seccomp:") {
        Some(mode) if mode != 0 => Err(InjectError::Seccomp),
        _ => Ok(()),
    }
}

/// Which threads have been outside madvise since some moment, as far as that removes anything.
#[derive(Default)]
pub struct Outside {
    /// Those that were seen there.
    seen: BTreeSet<i32>,
    /// Ids by which threads that have the memory of the process have told of fault after fault since then, each in its own PID namespace.
    pub faulting: BTreeSet<i32>,
}

impl Outside {
    /// Whether all threads of a process have been. Those of which that is not known and that run are stopped for a moment; those that are blocked are not disturbed.
    pub fn has(&mut self, pid: i32) -> bool {
        let threads = proc::threads(pid);
        // That none can be read proves nothing else.
        (!threads.is_empty() || has_gone(pid))
            && threads.into_iter().all(|tid| {
                self.seen.contains(&tid) || (self.is_outside(tid) && self.seen.insert(tid))
            })
    }

    fn is_outside(&self, tid: i32) -> bool {
        match (proc::is_worker(tid), proc::blocked_in(tid)) {
            _ if has_gone(tid) => true,
            // Workers of io_uring issue system calls that /proc does not tell of.
            ((true, idle), _) => idle || self.is_faulting(tid),
            (_, Some(libc::SYS_madvise | libc::SYS_process_madvise)) => proc::waits_for_page(tid),
            (_, Some(_)) => true,
            (_, None) if matches!(proc::state(tid), Some('Z' | 'X')) => true,
            // One that faults in the kernel with a signal pending does not sleep, nor stop: it faults anew until it is served, and has removed nothing meanwhile.
            (_, None) => Stopped::see_outside(tid).is_ok() || self.is_faulting(tid),
        }
    }

    fn is_faulting(&self, tid: i32) -> bool {
        proc::own_id(tid).is_some_and(|id| self.faulting.contains(&id))
    }
}

/// Whether nobody has this id any more.
fn has_gone(tid: i32) -> bool {
    kill(Pid::from_raw(tid), None) == Err(Errno::ESRCH)
}

/// Stops a thread that is proved to have the memory of the evictor, among those of the process of thread `tid`: an id may have become somebody
/// else's. While the thread is stopped its id cannot.
pub fn stop_beside(tid: i32, evictor: Pid) -> Result<Stopped> {
    let is_beside = |tid: &i32| {
        same_memory(Pid::from_raw(*tid), evictor) == Ok(true) && may_make_calls(*tid).is_ok()
    };
    let running = proc::in_state(tid, "R", |_| false).into_iter().find(is_beside);
    let tid = running.or_else(|| blocked_threads(tid).into_iter().find(is_beside));
    let thread = Stopped::new(tid.ok_or(InjectError::Unstoppable)?)?;
    if !is_beside(&thread.tid.as_raw()) {
        thread.let_go();
        return Err(InjectError::Gone);
    }
    Ok(thread)
}

/// Unmaps the blob of an evictor which has ended, by a stopped thread, and lets that go.
pub fn remove_blob(mut thread: Stopped, base: u64) -> Result<()> {
    let args = [base, arch::BLOB_LEN as u64, 0, 0, 0, 0];
    let unmapped = syscall_instruction(thread.tid.as_raw())
        .and_then(|(at, _)| thread.syscall(at, "munmap", libc::SYS_munmap, args));
    thread.resume()?;
    unmapped.map(drop)
}

/// A syscall instruction in the vdso, so that no text of the program is patched, and the memory of the thread: its process's first thread may
/// have ended.
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

/// Blocked threads which can be stopped: not one that waits for its vfork child or for the program that it executes (PTRACE_SEIZE waits for
/// the end of that), is uninterruptible, or is stopped.
fn blocked_threads(pid: i32) -> Vec<i32> {
    const WAITS: [i64; 5] =
        [libc::SYS_vfork, libc::SYS_clone, libc::SYS_clone3, libc::SYS_execve, libc::SYS_execveat];
    let mut threads = proc::in_state(pid, "S", |_| false);
    threads.retain(|&tid| !proc::blocked_in(tid).is_some_and(|nr| WAITS.contains(&nr)));
    threads.truncate(8);
    threads
}

impl Stopped {
    /// Lets the thread start an evictor; it stays stopped, as it was before.
    fn inject(&mut self, pid: i32, caller: &Caller) -> Result<Injected> {
        let foreign = !proc::shares_pid_namespace(pid) || IN_TREE_REAPER.get();
        let parent = if foreign { Parent::Process } else { Parent::Adopted };
        // Found only now: while it ran, the process might have executed another program.
        let injected = syscall_instruction(self.tid.as_raw()).and_then(|(instruction, memory)| {
            let mut started = self.start_evictor(pid, instruction, &memory, parent)?;
            if parent == Parent::Adopted && is_seen_in_workload(&started, pid) {
                IN_TREE_REAPER.set(true);
                self.take_back(instruction, started);
                started = self.start_evictor(pid, instruction, &memory, Parent::Process)?;
            }
            if caller.is_dead() {
                self.take_back(instruction, started);
                return Err(InjectError::Gone);
            }
            Ok(started)
        });
        let restored = self.restore();
        if let Ok(injected) = &injected
            && (restored.is_err() || caller.is_dead())
        {
            // The process is being killed, and its evictor would outlive it; or nobody will know of that.
            pidfd::end(&injected.process);
        }
        restored?;
        injected
    }

    /// An evictor that has done nothing yet ends, and its memory goes.
    fn take_back(&mut self, instruction: u64, injected: Injected) {
        let args = [injected.base, arch::BLOB_LEN as u64, 0, 0, 0, 0];
        // Somebody gets its end from wait: it is a good one.
        match Evictor::connect(&injected) {
            Ok(evictor) => evictor.dismiss().wait(),
            Err(_) => pidfd::end(&injected.process),
        }
        // It has ended or will; what is left otherwise is 44 KiB of address space.
        let _ = self.syscall(instruction, "munmap", libc::SYS_munmap, args);
    }

    fn start_evictor(
        &mut self,
        pid: i32,
        instruction: u64,
        memory: &File,
        parent: Parent,
    ) -> Result<Injected> {
        // Not where the kernel would choose: a program may be about to map something where it has just made room.
        const PRIVATE: u64 =
            (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE) as u64;
        const READ_WRITE: u64 = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let length = arch::BLOB_LEN as u64;
        let base = self.syscall(
            instruction,
            "mmap",
            libc::SYS_mmap,
            [random_address(), length, READ_WRITE, PRIVATE, u64::MAX, 0],
        )? as u64;
        torture::at(Point::WhileAttaching);
        let started = self.run_blob(pid, instruction, memory, base, parent);
        if started.is_err() {
            // Best effort: the error that matters is the first one.
            let _ =
                self.syscall(instruction, "munmap", libc::SYS_munmap, [base, length, 0, 0, 0, 0]);
        }
        started
    }

    fn run_blob(
        &mut self,
        pid: i32,
        instruction: u64,
        memory: &File,
        base: u64,
        parent: Parent,
    ) -> Result<Injected> {
        const READ_EXEC: u64 = (libc::PROT_READ | libc::PROT_EXEC) as u64;
        let os = |what| move |_| InjectError::Os { what, errno: Errno::EIO };
        let image = arch::blob_image(base, parent == Parent::Process);
        memory.write_all_at(&image, base).map_err(os("writing the blob"))?;
        let protect = [base, arch::DATA, READ_EXEC, 0, 0, 0];
        self.syscall(instruction, "mprotect", libc::SYS_mprotect, protect)?;
        let dontfork = [base, arch::BLOB_LEN as u64, libc::MADV_DONTFORK as u64, 0, 0, 0];
        self.syscall(instruction, "madvise", libc::SYS_madvise, dontfork)?;
        let tid_address = [GET_TID_ADDRESS, base + arch::TID_ADDRESS, 0, 0, 0, 0];
        // Kernels without CONFIG_CHECKPOINT_RESTORE do not tell.
        let knows = self.syscall(instruction, "prctl", libc::SYS_prctl, tid_address).is_ok();
        let started = self.clone_evictor(instruction, memory, base, parent);
        if started.is_err() {
            end_abandoned(memory, base);
        }
        let own_id = started?;
        let tid_address =
            read_word(memory, base + arch::TID_ADDRESS).ok().filter(|&at| knows && at != 0);
        let found = self.find_evictor(pid, own_id, parent);
        if found.is_none() {
            end_abandoned(memory, base);
        }
        let what = "finding the evictor";
        let (evictor, process) = found.ok_or(InjectError::Os { what, errno: Errno::ESRCH })?;
        self.share_niceness(evictor);
        // It works for microseconds, and the program runs on meanwhile.
        gms_agent::spin::prefer_latency_of(evictor.as_raw(), gms_agent::spin::SLICE);
        let memory = memory.try_clone().map_err(os("keeping the memory"))?;
        Ok(Injected { base, evictor, process, own_id, memory, tid_address })
    }

    /// Clones the evictor and waits until it can be talked to; returns its process id in the namespace of the workload.
    fn clone_evictor(
        &mut self,
        instruction: u64,
        memory: &File,
        base: u64,
        parent: Parent,
    ) -> Result<i32> {
        let mut flags = (libc::CLONE_VM | libc::CLONE_FILES) as u64;
        if parent == Parent::Process {
            flags |= libc::CLONE_PARENT_SETTID as u64;
        }
        let arguments = [flags, base + arch::BLOB_LEN as u64, base + arch::EVICTOR_PID, 0, 0, 0];
        let child = self.syscall(base, "clone", libc::SYS_clone, arguments)?;
        if parent == Parent::Adopted {
            let reap = [child as u64, 0, libc::__WALL as u64, 0, 0, 0];
            self.syscall(instruction, "wait4", libc::SYS_wait4, reap)?;
        }
        let word = || {
            let os = |_| InjectError::Os { what: "reading the blob", errno: Errno::EIO };
            read_word(memory, base + arch::READY).map_err(os)
        };
        let deadline = Instant::now() + READY_DEADLINE;
        loop {
            let what = "starting the evictor";
            match word()? as u32 as i32 {
                1 => break,
                0 => {}
                failed => return Err(InjectError::Os { what, errno: Errno::from_raw(-failed) }),
            }
            if parent == Parent::Adopted || Instant::now() > deadline {
                return Err(InjectError::Os { what, errno: Errno::ETIMEDOUT });
            }
            std::thread::yield_now();
        }
        Ok((word()? >> 32) as i32)
    }

    /// The evictor as seen from here. What it is has to be proved: ids are names that may mean somebody else.
    fn find_evictor(&self, pid: i32, own_id: i32, parent: Parent) -> Option<(Pid, OwnedFd)> {
        let candidates = match parent {
            Parent::Adopted => vec![own_id],
            Parent::Process => proc::children(pid),
        };
        candidates.into_iter().find_map(|candidate| {
            let process = pidfd_open(candidate).ok()?;
            let is_it = proc::own_id(candidate) == Some(own_id)
                && is_named_evictor(candidate)
                && same_memory(Pid::from_raw(candidate), self.tid) == Ok(true)
                && !has_ended(process.as_fd());
            is_it.then_some((Pid::from_raw(candidate), process))
        })
    }
}

/// A random page-aligned address in the upper half of user space's lower 2^46 bytes.
pub fn random_address() -> u64 {
    let mut random = [0u8; 8];
    // SAFETY: the kernel writes 8 bytes to a live array.
    unsafe { libc::getrandom(random.as_mut_ptr().cast(), random.len(), 0) };
    (1 << 45 | u64::from_le_bytes(random) & ((1 << 45) - 1)) & !(PAGE - 1)
}

fn read_word(memory: &File, at: u64) -> std::io::Result<u64> {
    let mut bytes = [0u8; 8];
    memory.read_exact_at(&mut bytes, at).map(|()| u64::from_le_bytes(bytes))
}

/// Ends the evictor of an injection that has failed, if there is or will be one: as a process of its own it outlives what it was started in.
/// The open file has the memory for as long as anybody has.
fn end_abandoned(memory: &File, base: u64) {
    let mut secret = [0u8; 8];
    // SAFETY: the kernel writes 8 bytes to a live array.
    unsafe { libc::getrandom(secret.as_mut_ptr().cast(), secret.len(), 0) };
    // What fails here says that the memory has gone, and with it whoever ran in it.
    if memory.write_all_at(&secret, base + arch::SECRET).is_err() {
        return;
    }
    let has_memory = |pid: i32| {
        let mut seen = [0u8; 8];
        let remote = [RemoteIoVec { base: (base + arch::SECRET) as usize, len: seen.len() }];
        process_vm_readv(Pid::from_raw(pid), &mut [IoSliceMut::new(&mut seen)], &remote).is_ok()
            && seen == secret
    };
    let deadline = Instant::now() + ABANDONED_DEADLINE;
    // The kernel writes its id before it runs.
    while let Ok(word) = read_word(memory, base + arch::READY)
        && Instant::now() < deadline
    {
        let own_id = (word >> 32) as i32;
        if own_id != 0 {
            let processes =
                proc::all().into_iter().filter(|&pid| proc::own_id(pid) == Some(own_id));
            let processes = processes.filter_map(|pid| Some((pid, pidfd_open(pid).ok()?)));
            let evictor = processes.into_iter().find(|(pid, _)| has_memory(*pid));
            return evictor.iter().for_each(|(_, process)| pidfd::end(process));
        }
        std::thread::yield_now();
    }
}

/// Whether somebody in the workload would get the evictor's end from wait: whoever is its parent now, unless that is of gms or above us.
fn is_seen_in_workload(injected: &Injected, pid: i32) -> bool {
    let Some(parent) = proc::status_field(injected.evictor.as_raw(), "PPid:") else { return false };
    let parent = parent as i32;
    let us = std::process::id() as i32;
    if board::reaper() == Some(parent) {
        return false;
    }
    // Above the workload's first process, or above us: an init, a service manager. They know how to deal with orphans.
    parent != us && parent != 0 && !descends(us, parent) && descends(pid, parent) || parent == pid
}

thread_local! {
    /// Whether an orphan of the workload was seen to be adopted by a process of the workload: those to come will be too.
    static IN_TREE_REAPER: Cell<bool> = const { Cell::new(false) };
}
