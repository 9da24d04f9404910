//! The evictor seen from the pager: a process inside the workload's address space which serves lists of system calls.
//!
//! It exists for what cannot be done from outside: `UFFDIO_MOVE`, `MADV_DONTNEED` and `MADV_POPULATE_WRITE` act on the caller's own
//! memory. If the pager dies and no other goes on, its socket closes and the evictor executes its will: it says so and kills the workload,
//! before anything could be read as zeros.

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gms_transport::client::LEASE;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::socket::{ControlMessage, MsgFlags, recv, sendmsg};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use crate::arch;
use crate::handed::{Descriptors, Number};
use crate::kernel::cgroup;
use crate::kernel::pidfd::{END_DEADLINE, await_end, end, has_ended, kill, pidfd_getfd};
use crate::kernel::proc;
use crate::pulse::Pulse;
use crate::stopped::InjectError;

/// Longest that a call list may take. Moving pages takes microseconds; only a fault inside a call waits longer.
const CALL_DEADLINE: Duration = Duration::from_secs(5);
/// The same for an evictor that is seen to want a CPU and has none: a program of low priority on a busy machine. Whoever waits for it, and for the
/// gate that is closed meanwhile, does not drive its links to the agents: their lease must not end.
const STARVED_DEADLINE: Duration = Duration::from_secs(30);
const _: () = assert!(STARVED_DEADLINE.as_secs() + CALL_DEADLINE.as_secs() < LEASE.as_secs());
/// Answers that several pagers may have left which have died one after the other.
const LATE_MAX: u32 = 32;
/// Between two looks whether it is frozen.
const CALL_LOOK_MS: u16 = 500;
/// Not even one that is frozen is waited for any longer.
static HURRY: AtomicBool = AtomicBool::new(false);
const CALL_LEN: usize = 64;
/// Behind a list and its memory: its name, which comes back with the answer.
const NAME_LEN: usize = size_of::<u64>();
/// Most calls of one list.
pub(crate) const CALLS_MAX: usize = 256;
const _: () = assert!(8 + CALLS_MAX * (CALL_LEN + 48) + NAME_LEN <= arch::BUFFER_LEN);

/// A system call to be made inside the workload, and its result.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Call {
    /// Its number.
    pub nr: i64,
    /// Its arguments.
    pub args: [u64; 6],
    /// What it returned (negative errno on failure), once the list has run.
    pub result: i64,
}

impl Call {
    /// A call with up to six arguments.
    pub(crate) fn new(nr: i64, args: &[u64]) -> Call {
        let mut call = Call { nr, ..Call::default() };
        call.args[..args.len()].copy_from_slice(args);
        call
    }

    /// The result as the C library would give it.
    pub(crate) fn outcome(&self) -> nix::Result<u64> {
        if (-4095..0).contains(&self.result) {
            Err(Errno::from_raw(-self.result as i32))
        } else {
            Ok(self.result as u64)
        }
    }
}

/// An evictor that has just been started, proved to be one of this process.
#[derive(Debug)]
pub struct Injected {
    /// Base of the blob's mapping in the process.
    pub base: u64,
    /// Process id of the evictor.
    pub evictor: Pid,
    /// Its process.
    pub process: OwnedFd,
    /// Its process id in the namespace of the workload.
    pub own_id: i32,
    /// The memory that it runs in, which is that of the process.
    pub memory: File,
    /// Where the kernel notes the end of the thread that was stopped; for musl's programs the lock of the list of threads.
    pub tid_address: Option<u64>,
}

/// Connection to one evictor.
pub(crate) struct Evictor {
    socket: OwnedFd,
    process: OwnedFd,
    pid: Pid,
    base: u64,
    buffer: Vec<u8>,
    /// Where it runs; -1 is wherever the scheduler likes.
    cpu: i32,
    /// That of the last list: one more than of the list before.
    name: u64,
    /// Answers that may come for which nobody has waited.
    late: u32,
}

/// See [`Evictor::hand_over`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct EvictorRecord {
    socket: Number,
    process: Number,
    pid: i32,
    base: u64,
}

impl Evictor {
    /// Connects to an evictor that has just been injected.
    pub(crate) fn connect(injected: &Injected) -> Result<Evictor, InjectError> {
        let os = |what| move |errno| InjectError::Os { what, errno };
        let process = injected.process.try_clone().map_err(|_| Errno::EMFILE);
        let process = process.map_err(os("keeping the evictor's process"))?;
        // The evictor's table was empty when it made the pair: the ends are 0 (its own) and 1 (ours).
        let socket = pidfd_getfd(process.as_fd(), 1).map_err(os("taking the evictor's socket"))?;
        let buffer = Vec::with_capacity(arch::BUFFER_LEN);
        let mut evictor = Evictor {
            socket,
            process,
            pid: injected.evictor,
            base: injected.base,
            buffer,
            cpu: -1,
            name: first_name(),
            late: 1,
        };
        // From now on it waits for as long as there is a pager.
        let (level, name) = (libc::SOL_SOCKET as u64, libc::SO_RCVTIMEO as u64);
        let mut forever = [0; size_of::<libc::timeval>()];
        let patience = [0, level, name, evictor.aux_address(2), forever.len() as u64];
        let mut calls =
            [Call::new(libc::SYS_close, &[1]), Call::new(libc::SYS_setsockopt, &patience)];
        evictor.run(&mut calls, &mut forever, &[]).map_err(os("first call"))?;
        calls[1].outcome().map_err(os("first call"))?;
        Ok(evictor)
    }

    /// What the next binary of this process needs. No list is under way.
    pub(crate) fn hand_over(&self, to: &mut Descriptors) -> EvictorRecord {
        let (socket, process) = (to.give(&self.socket), to.give(&self.process));
        EvictorRecord { socket, process, pid: self.pid.as_raw(), base: self.base }
    }

    /// The connection again. If a list of a process before this one is under way, its answer is taken for none of this one's.
    pub(crate) fn again(record: &EvictorRecord) -> std::io::Result<Evictor> {
        let &EvictorRecord { socket, process, pid, base } = record;
        let buffer = Vec::with_capacity(arch::BUFFER_LEN);
        let (socket, process) = (socket.take()?, process.take()?);
        let (pid, name) = (Pid::from_raw(pid), first_name());
        Ok(Evictor { socket, process, pid, base, buffer, cpu: -1, name, late: LATE_MAX })
    }

    /// Its process id: it must not be taken for a part of the workload.
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// The evictor's process.
    pub(crate) fn process(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }

    /// Base of the blob.
    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    /// Address at which `aux` of a list of `calls` calls lies in the workload.
    pub(crate) fn aux_address(&self, calls: usize) -> u64 {
        self.base + arch::BUFFER + 8 + (calls * CALL_LEN) as u64
    }

    /// Executes the calls in order and waits for their results. `aux` is memory which the calls may point to (see
    /// [`Evictor::aux_address`]) and is read back; `fds` arrive in the evictor's table at its lowest free numbers.
    pub(crate) fn run(
        &mut self,
        calls: &mut [Call],
        aux: &mut [u8],
        fds: &[RawFd],
    ) -> nix::Result<()> {
        self.run_within((CALL_DEADLINE, STARVED_DEADLINE), calls, aux, fds)
    }

    /// Waits until it is over what a pager that has died has told it.
    pub(crate) fn drain(&mut self) -> nix::Result<()> {
        self.run(&mut [Call::new(libc::SYS_getpid, &[])], &mut [], &[])
    }

    fn run_within(
        &mut self,
        (limit, starved): (Duration, Duration),
        calls: &mut [Call],
        aux: &mut [u8],
        fds: &[RawFd],
    ) -> nix::Result<()> {
        let length = 8 + calls.len() * CALL_LEN + aux.len() + NAME_LEN;
        if calls.len() > CALLS_MAX || length > arch::BUFFER_LEN {
            return Err(Errno::E2BIG);
        }
        self.name = self.name.wrapping_add(1);
        encode(&mut self.buffer, calls, aux);
        self.buffer.extend_from_slice(&self.name.to_le_bytes());
        let rights = [ControlMessage::ScmRights(fds)];
        let control = if fds.is_empty() { &[][..] } else { &rights[..] };
        let message = [IoSlice::new(&self.buffer)];
        // Never blocking: the workload can reach the other end, and fill it, or take the reply that has been seen.
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        sendmsg::<()>(self.socket.as_raw_fd(), &message, control, flags, None).map_err(late)?;
        self.receive(limit, starved)?;
        decode(&self.buffer[..length - NAME_LEN], calls, aux);
        Ok(())
    }

    /// Waits for the answer to the last list, which is as long. Those to lists before may come first, for which nobody has waited.
    ///
    /// Its time does not run while it is frozen (its list runs when it is thawed, and its processes with it), while it waits for a CPU or for a lock of the
    /// kernel's (a fork of a large process holds that of its memory for seconds), nor while this process does not run.
    fn receive(&mut self, limit: Duration, starved: Duration) -> nix::Result<()> {
        let (began, mut late_ones) = (Instant::now(), self.late);
        let (mut pulse, mut deadline) = (Pulse::new(began), began + limit);
        loop {
            let mut ready = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
            match poll(&mut ready, PollTimeout::from(CALL_LOOK_MS)) {
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno),
                Ok(1..) => {
                    let socket = self.socket.as_raw_fd();
                    let got =
                        recv(socket, &mut self.buffer, MsgFlags::MSG_DONTWAIT).map_err(late)?;
                    let is_ours = self.buffer[..got].ends_with(&self.name.to_le_bytes());
                    if is_ours && got == self.buffer.len() {
                        return Ok(());
                    }
                    if is_ours || got < NAME_LEN || late_ones == 0 {
                        return Err(Errno::EPIPE);
                    }
                    late_ones -= 1;
                }
                Ok(_) => {}
            }
            let now = Instant::now();
            deadline += pulse.beat(now, Duration::from_millis(CALL_LOOK_MS.into()));
            let waits = matches!(proc::state(self.pid.as_raw()), Some('R' | 'D'));
            let starves = now < began + starved && waits;
            let frozen = cgroup::is_frozen(self.pid.as_raw());
            if (starves || frozen) && !HURRY.load(Ordering::Relaxed) {
                deadline = now + limit;
            }
            if now > deadline {
                return Err(Errno::ETIMEDOUT);
            }
        }
    }

    /// Makes the evictor run on this thread's CPU: while a call list runs, that one waits, and to wake an idle CPU costs more than the list.
    pub(crate) fn come_here(&mut self) {
        // SAFETY: no memory is involved.
        let cpu = unsafe { libc::sched_getcpu() };
        if cpu < 0 || cpu == self.cpu {
            return;
        }
        let mut only = CpuSet::new();
        // It is only faster so.
        if only.set(cpu as usize).is_ok() && sched_setaffinity(self.pid, &only).is_ok() {
            self.cpu = cpu;
        }
    }

    /// Sets what the evictor does when this process is gone. `memory` is that of the process, in which it runs.
    pub(crate) fn set_will(&self, memory: &File, calls: &[Call], aux: &[u8]) -> nix::Result<()> {
        let mut will = Vec::new();
        encode(&mut will, calls, aux);
        if will.len() > arch::WILL_LEN {
            return Err(Errno::E2BIG);
        }
        memory.write_all_at(&will, self.base + arch::WILL).map_err(|_| Errno::EFAULT)
    }

    /// Address at which the aux memory of a will of `calls` calls lies.
    pub(crate) fn will_aux_address(&self, calls: usize) -> u64 {
        self.base + arch::WILL + 8 + (calls * CALL_LEN) as u64
    }

    /// Lets the evictor exit without touching the workload.
    pub(crate) fn dismiss(mut self) -> Ending {
        // No reply comes: the list ends the process. A send error means that it is gone already, or is killed in time.
        encode(&mut self.buffer, &[Call::new(libc::SYS_exit_group, &[0])], &[]);
        let message = [IoSlice::new(&self.buffer)];
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        let _ = sendmsg::<()>(self.socket.as_raw_fd(), &message, &[], flags, None);
        let Evictor { socket, process, pid, .. } = self;
        Ending { _socket: socket, process, pid, since: Instant::now(), killed: false }
    }
}

/// An evictor that was told to end. The last who has the memory ends when the kernel has freed that, which takes long if it is large.
pub(crate) struct Ending {
    /// Closed before it has read what it was told, it might execute its will: the process may run another program by now.
    _socket: OwnedFd,
    process: OwnedFd,
    pid: Pid,
    since: Instant,
    killed: bool,
}

impl AsFd for Ending {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }
}

impl Ending {
    /// Its process id: until it has ended it must not be taken for a part of the workload.
    pub(crate) fn pid(&self) -> i32 {
        self.pid.as_raw()
    }

    /// Whether it has ended. It is killed if it does not in time.
    pub(crate) fn is_over(&mut self, now: Instant) -> bool {
        if has_ended(self.process.as_fd()) {
            return true;
        }
        if !self.killed && now.saturating_duration_since(self.since) >= END_DEADLINE {
            self.killed = true;
            kill(&self.process);
        }
        false
    }

    /// Waits for its end, as far as that comes in time.
    pub(crate) fn wait(self) {
        if !await_end(&self.process) {
            end(&self.process);
        }
    }
}

/// One that no process before this one has used, as good as sure.
fn first_name() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

fn late(errno: Errno) -> Errno {
    if errno == Errno::EAGAIN { Errno::ETIMEDOUT } else { errno }
}

fn encode(buffer: &mut Vec<u8>, calls: &[Call], aux: &[u8]) {
    buffer.clear();
    buffer.extend_from_slice(&(calls.len() as u64).to_le_bytes());
    for call in calls {
        buffer.extend_from_slice(&call.nr.to_le_bytes());
        for argument in call.args {
            buffer.extend_from_slice(&argument.to_le_bytes());
        }
        buffer.extend_from_slice(&0u64.to_le_bytes());
    }
    buffer.extend_from_slice(aux);
}

fn decode(buffer: &[u8], calls: &mut [Call], aux: &mut [u8]) {
    for (call, record) in calls.iter_mut().zip(buffer[8..].chunks_exact(CALL_LEN)) {
        let mut result = [0u8; 8];
        result.copy_from_slice(&record[CALL_LEN - 8..]);
        call.result = i64::from_le_bytes(result);
    }
    aux.copy_from_slice(&buffer[8 + calls.len() * CALL_LEN..]);
}

/// The session ends: an evictor that is frozen is not waited for until it is thawed.
pub(crate) fn hurry() {
    HURRY.store(true, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

    use super::*;

    /// A process that ends with its test.
    struct Sleeper(Child);

    impl Sleeper {
        fn new() -> Sleeper {
            let mut sleep = Command::new("sleep");
            Sleeper(sleep.arg("600").stdout(Stdio::null()).spawn().expect("sleep"))
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            // One that has ended needs no end.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// An evictor that a test has made of some process, and the other end of its socket.
    fn evictor_of(pid: i32) -> (Evictor, OwnedFd) {
        let (unix, kind) = (AddressFamily::Unix, SockType::SeqPacket);
        let pair = socketpair(unix, kind, None, SockFlag::SOCK_CLOEXEC);
        let (socket, theirs) = pair.expect("a socket");
        let evictor = Evictor {
            socket,
            process: crate::kernel::pidfd::pidfd_open(pid).expect("its process"),
            pid: Pid::from_raw(pid),
            base: 0,
            buffer: Vec::new(),
            cpu: -1,
            name: 1,
            late: 1,
        };
        (evictor, theirs)
    }

    #[test]
    fn an_evictor_that_wants_a_cpu_has_longer_to_answer() {
        let mut busy =
            Command::new("sh").args(["-c", "while :; do :; done"]).spawn().expect("a shell");
        let (mut evictor, _theirs) = evictor_of(busy.id() as i32);
        // Before it runs it may sleep.
        while proc::state(busy.id() as i32) != Some('R') {
            std::thread::yield_now();
        }
        let (began, starved) = (Instant::now(), Duration::from_millis(1800));
        let answer = evictor.receive(Duration::from_millis(10), starved);
        assert_eq!(answer, Err(Errno::ETIMEDOUT));
        assert!(began.elapsed() >= starved, "{:?}", began.elapsed());
        busy.kill().expect("killed");
        busy.wait().expect("its end");
    }

    /// One that has forked by vfork waits in the kernel as one does that waits for a lock there.
    #[test]
    fn an_evictor_that_waits_in_the_kernel_has_longer_to_answer() {
        // SAFETY: the child, and its child, which ends with it, make system calls alone.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: as above. Without CLONE_VM each has its own stack.
            unsafe {
                let flags = libc::CLONE_VFORK | libc::SIGCHLD;
                if libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) == 0 {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    loop {
                        libc::pause();
                    }
                }
                libc::_exit(0);
            }
        }
        assert!(pid > 0);
        let (mut evictor, _theirs) = evictor_of(pid);
        while proc::state(pid) != Some('D') {
            std::thread::yield_now();
        }
        let (began, starved) = (Instant::now(), Duration::from_millis(1800));
        let answer = evictor.receive(Duration::from_millis(10), starved);
        assert_eq!(answer, Err(Errno::ETIMEDOUT));
        assert!(began.elapsed() >= starved, "{:?}", began.elapsed());
        nix::sys::signal::kill(Pid::from_raw(pid), nix::sys::signal::SIGKILL).expect("killed");
        nix::sys::wait::waitpid(Pid::from_raw(pid), None).expect("its end");
    }

    /// Nobody has waited for it, perhaps because the pager that had sent its list has died.
    #[test]
    fn an_answer_that_comes_late_is_not_taken_for_that_to_another_list() {
        let sleeper = Sleeper::new();
        let (mut evictor, theirs) = evictor_of(sleeper.0.id() as i32);
        let flags = MsgFlags::MSG_DONTWAIT;
        let send = |list: &[u8]| {
            nix::sys::socket::send(theirs.as_raw_fd(), list, flags).expect("an answer");
        };
        let mut run =
            |calls: &mut [Call], limit| evictor.run_within((limit, limit), calls, &mut [], &[]);
        let list = || {
            let mut list = vec![0; arch::BUFFER_LEN];
            let got = nix::sys::socket::recv(theirs.as_raw_fd(), &mut list, flags).expect("a list");
            list.truncate(got);
            list
        };
        let (short, mut calls) = (Duration::from_millis(1), [Call::new(libc::SYS_getpid, &[]); 2]);
        assert_eq!(run(&mut calls[..1], short), Err(Errno::ETIMEDOUT));
        let late = list();
        assert_eq!(run(&mut calls, short), Err(Errno::ETIMEDOUT));
        let mut later = list();
        later[8 + 2 * CALL_LEN - 8] = 7;
        assert_eq!(late.len() + CALL_LEN, later.len());
        send(&late);
        send(&later);
        assert_eq!(run(&mut calls, CALL_DEADLINE), Err(Errno::EPIPE), "one may be late, not two");
        send(&late);
        *later.last_chunk_mut().expect("a name") = 5_u64.to_le_bytes();
        send(&later);
        assert_eq!(run(&mut calls, CALL_DEADLINE), Ok(()), "that to the fourth list");
        assert_eq!(calls[1].result, 7);
        // As long, and not ours.
        send(&late);
        assert_eq!(run(&mut calls[..1], short), Err(Errno::ETIMEDOUT));
    }

    /// Like the last who has a large memory: told to end, it does not at once.
    #[test]
    fn nobody_waits_for_an_evictor_that_ends_slowly() {
        let mut sleeper = Sleeper::new();
        let pid = sleeper.0.id() as i32;
        let (evictor, theirs) = evictor_of(pid);
        let mut ending = evictor.dismiss();
        let told = ending.since;
        assert!(!ending.is_over(told), "it was waited for, or killed at once");
        assert!(!ending.is_over(told + END_DEADLINE / 2) && !ending.killed);
        let mut list = [0; 8 + CALL_LEN];
        let got = nix::sys::socket::recv(theirs.as_raw_fd(), &mut list, MsgFlags::MSG_DONTWAIT);
        assert_eq!((got, list[8]), (Ok(list.len()), libc::SYS_exit_group as u8));
        // Still connected: it executes no will.
        let more = nix::sys::socket::recv(theirs.as_raw_fd(), &mut list, MsgFlags::MSG_DONTWAIT);
        assert_eq!(more, Err(Errno::EAGAIN));
        ending.is_over(told + END_DEADLINE);
        assert!(ending.killed);
        ending.wait();
        assert_eq!(
            sleeper.0.try_wait().expect("a child").map(|status| status.success()),
            Some(false)
        );
    }
}
