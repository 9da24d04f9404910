//! What the pager must be able to do to a workload, tried on a child of this process before any command is started.
//!
//! Each check makes the system calls that the pager makes later, in the process that makes them: nothing is concluded from user ids,
//! kernel versions or capability sets, which do not tell of security modules, user namespaces or seccomp. The child has the rights
//! which a command will have.

use std::fs::{self, File};
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use linux_raw_sys::general as sys;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::{ForkResult, Pid, fork, geteuid, getuid, pipe2, read};

use crate::kernel::pagemap;
use crate::kernel::pidfd::{pidfd_getfd, pidfd_open, same_memory};
use crate::kernel::proc;
use crate::kernel::uffd::{self, USERFAULTFD_IOC_NEW, Userfaultfd};
use crate::privilege;

/// For the child to answer and to stop.
const DEADLINE: Duration = Duration::from_secs(2);
/// First pause between two looks whether the child has stopped; each is twice as long as the one before. There is no wait for a ptrace
/// stop with a time-out.
const LOOK: Duration = Duration::from_micros(10);

const SECCOMP: &str = "seccomp";

/// One thing that was tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Check {
    /// What it is, in the kernel's words.
    pub name: &'static str,
    /// What there is to say if it worked.
    pub good: &'static str,
    /// Why paging cannot work, and what to do; `None` if it worked.
    pub problem: Option<Problem>,
}

/// Why paging cannot work here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{finding}; cure: {cure}")]
pub(crate) struct Problem {
    /// What was refused.
    pub finding: String,
    /// What to do.
    pub cure: String,
}

/// Tries everything. This process must have one thread only, unless it is a test.
pub(crate) fn checks() -> io::Result<Vec<Check>> {
    let device = File::options().read(true).write(true).open(DEVICE).ok();
    let child = Child::fork(device.as_ref())?;
    Ok(vec![
        checked("/proc", own_proc()),
        checked(SECCOMP, seccomp()),
        checked("userfaultfd", child.userfaultfd()),
        checked("ptrace", child.ptrace().map_err(refused("stopping a program's thread by ptrace"))),
        checked("pidfd_getfd", child.pidfd_getfd().map_err(refused("pidfd_getfd"))),
        checked("process_vm_readv", child.read_memory().map_err(refused("process_vm_readv"))),
        checked("/proc/PID/mem", child.open_memory().map_err(refused("opening /proc/PID/mem"))),
        checked("PAGEMAP_SCAN", child.scan().map_err(no_scan)),
        checked("kcmp", child.compare().map_err(no_kcmp)),
        checked("/proc/PID/task/TID/children", child.children()),
    ])
}

/// The first thing for which paging cannot work, if there is one.
pub(crate) fn problem() -> io::Result<Option<Problem>> {
    Ok(checks()?.into_iter().find_map(|check| check.problem))
}

/// Makes userfaultfds for those who may open it.
pub(crate) const DEVICE: &str = "/dev/userfaultfd";

fn checked(name: &'static str, result: Result<(), Problem>) -> Check {
    let good = if name == SECCOMP { "no filter" } else { "works" };
    Check { name, good, problem: result.err() }
}

fn problem_of(finding: impl ToString, cure: impl ToString) -> Problem {
    Problem { finding: finding.to_string(), cure: cure.to_string() }
}

fn refused(what: &'static str) -> impl Fn(Errno) -> Problem {
    move |errno| {
        let cure = match errno {
            Errno::ENOSYS => "boot Linux 6.8 or later".into(),
            _ => privilege::cure(),
        };
        let lacks = if privilege::has_sys_ptrace() { "" } else { "CAP_SYS_PTRACE is missing: " };
        problem_of(format!("{lacks}{what} is refused ({errno})"), cure)
    }
}

fn no_scan(errno: Errno) -> Problem {
    match errno {
        Errno::ENOTTY | Errno::EINVAL => {
            problem_of("the kernel has no PAGEMAP_SCAN", "boot Linux 6.8 or later")
        }
        other => refused("reading /proc/PID/pagemap")(other),
    }
}

fn no_kcmp(errno: Errno) -> Problem {
    match errno {
        Errno::ENOSYS => problem_of("the kernel has no kcmp", "boot one with CONFIG_KCMP"),
        other => refused("kcmp")(other),
    }
}

/// By its numbers processes are told that are named to the kernel: in another PID namespace's they are strangers.
fn own_proc() -> Result<(), Problem> {
    let link = fs::read_link("/proc/self").ok();
    let seen = link.and_then(|link| link.to_str()?.parse().ok());
    if seen == Some(Pid::this().as_raw()) {
        return Ok(());
    }
    let finding = match seen {
        Some(seen) => format!(
            "/proc is of another PID namespace (this process, {}, is {seen} there)",
            Pid::this()
        ),
        None => "/proc does not tell which process this is".into(),
    };
    Err(problem_of(finding, "mount it anew where gms runs (unshare --mount-proc)"))
}

/// The command inherits the filter, under which no evictor can be started. And each evictor gets one of its own.
fn seccomp() -> Result<(), Problem> {
    let action = libc::SECCOMP_RET_ERRNO;
    // SAFETY: the kernel reads a live number, and changes nothing.
    let known = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &raw const action)
    };
    if Errno::result(known).is_err_and(|errno| errno != Errno::EPERM) {
        let cure = "boot one with CONFIG_SECCOMP_FILTER";
        return Err(problem_of(
            "the kernel has no seccomp filters, of which evictors need one",
            cure,
        ));
    }
    match proc::status_field(std::process::id() as i32, "Seccomp:") {
        None | Some(0) => Ok(()),
        Some(_) => Err(problem_of(
            "gms, and so the command, is under a seccomp filter",
            privilege::NO_FILTER,
        )),
    }
}

/// A process with the rights of a command, which waits until it is killed.
struct Child {
    pid: Pid,
    process: OwnedFd,
    /// What came of its userfaultfd: the number of the descriptor, or the error.
    answer: nix::Result<RawFd>,
    /// Closed by the child's end; it ends when ours does.
    _go: OwnedFd,
}

impl Child {
    fn fork(device: Option<&File>) -> io::Result<Child> {
        let device = device.map(AsRawFd::as_raw_fd);
        let ambient = ambient_after_exec();
        let (wait, go) = pipe2(OFlag::O_CLOEXEC)?;
        let (answer, tell) = pipe2(OFlag::O_CLOEXEC)?;
        // SAFETY: the child only makes system calls with arguments on its stack.
        let pid = match unsafe { fork()? } {
            ForkResult::Parent { child } => child,
            ForkResult::Child => {
                be_probed(wait.as_raw_fd(), go.as_raw_fd(), &tell, device, ambient)
            }
        };
        drop(tell);
        let process = pidfd_open(pid.as_raw());
        let answer = receive(answer.as_fd());
        match process {
            Ok(process) => Ok(Child { pid, process, answer: answer?, _go: go }),
            Err(errno) => {
                end(pid);
                Err(errno.into())
            }
        }
    }

    fn userfaultfd(&self) -> Result<(), Problem> {
        let number = self.answer.map_err(|errno| match errno {
            Errno::ENOSYS => problem_of(
                "the kernel has no userfaultfd",
                "boot Linux 6.8 or later, built with CONFIG_USERFAULTFD",
            ),
            other if privilege::has_sys_ptrace() => problem_of(
                format!("a command may not make a userfaultfd ({other})"),
                privilege::LET_COMMANDS,
            ),
            other => refused("making a userfaultfd")(other),
        })?;
        let fd = pidfd_getfd(self.process.as_fd(), number).map_err(refused("pidfd_getfd"))?;
        let spare = fd.try_clone().map_err(|_| refused("a descriptor")(Errno::EMFILE))?;
        match Userfaultfd::enable(fd) {
            Ok(_) => Ok(()),
            Err(Errno::EPERM) => Err(refused("telling forks by userfaultfd")(Errno::EPERM)),
            Err(errno) => Err(match missing(offered(&spare).unwrap_or(0)) {
                names if names.is_empty() => refused("userfaultfd")(errno),
                names => problem_of(
                    format!("userfaultfd is without {}", names.join(", ")),
                    "boot Linux 6.8 or later, built with CONFIG_USERFAULTFD and CONFIG_PTE_MARKER_UFFD_WP",
                ),
            }),
        }
    }

    fn ptrace(&self) -> nix::Result<()> {
        self.request(libc::PTRACE_SEIZE)?;
        self.request(libc::PTRACE_INTERRUPT)?;
        self.wait_for_stop()?;
        self.request(libc::PTRACE_DETACH)
    }

    fn request(&self, request: libc::c_uint) -> nix::Result<()> {
        // SAFETY: these three requests take no pointers.
        Errno::result(unsafe { libc::ptrace(request, self.pid.as_raw(), 0_usize, 0_usize) })
            .map(drop)
    }

    fn wait_for_stop(&self) -> nix::Result<()> {
        let deadline = Instant::now() + DEADLINE;
        let mut pause = LOOK;
        loop {
            // SAFETY: a zeroed siginfo_t is valid; waitid writes no more than that.
            let (waited, stopped) = unsafe {
                let mut info: libc::siginfo_t = std::mem::zeroed();
                let flags = libc::WSTOPPED | libc::WNOHANG | libc::__WALL;
                let id = self.pid.as_raw() as libc::id_t;
                (libc::waitid(libc::P_PID, id, &raw mut info, flags), info.si_pid() != 0)
            };
            Errno::result(waited)?;
            if stopped {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Errno::ETIMEDOUT);
            }
            std::thread::sleep(pause);
            pause *= 2;
        }
    }

    fn pidfd_getfd(&self) -> nix::Result<()> {
        pidfd_getfd(self.process.as_fd(), libc::STDERR_FILENO).map(drop)
    }

    fn read_memory(&self) -> nix::Result<()> {
        static WORD: u64 = 0x6d67_735f_776f_7264;
        let mut bytes = [0; size_of::<u64>()];
        let remote = [RemoteIoVec { base: &raw const WORD as usize, len: bytes.len() }];
        process_vm_readv(self.pid, &mut [IoSliceMut::new(&mut bytes)], &remote)?;
        if u64::from_ne_bytes(bytes) == WORD { Ok(()) } else { Err(Errno::EIO) }
    }

    fn open_memory(&self) -> nix::Result<()> {
        let path = format!("/proc/{}/mem", self.pid);
        File::options().read(true).write(true).open(path).map(drop).map_err(errno_of)
    }

    fn scan(&self) -> nix::Result<()> {
        let pagemap = File::open(format!("/proc/{}/pagemap", self.pid)).map_err(errno_of)?;
        // SAFETY: all fields are numbers, for which zero is valid.
        let mut arg: sys::pm_scan_arg = unsafe { std::mem::zeroed() };
        arg.size = size_of::<sys::pm_scan_arg>() as u64;
        // SAFETY: PAGEMAP_SCAN reads and writes one pm_scan_arg; its range and its vector are empty.
        unsafe { pagemap::pagemap_scan(pagemap.as_raw_fd(), &raw mut arg) }.map(drop)
    }

    fn compare(&self) -> nix::Result<()> {
        same_memory(self.pid, Pid::this()).map(drop)
    }

    fn children(&self) -> Result<(), Problem> {
        let path = format!("/proc/{0}/task/{0}/children", self.pid);
        fs::read(path).map(drop).map_err(|error| {
            problem_of(
                format!("the children of a process are not told ({error})"),
                "boot a kernel with CONFIG_PROC_CHILDREN, and mount /proc",
            )
        })
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        end(self.pid);
    }
}

fn end(pid: Pid) {
    // Ours, not reaped yet; it cannot fail to die.
    let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
    let _ = nix::sys::wait::waitpid(pid, Some(nix::sys::wait::WaitPidFlag::__WALL));
}

fn receive(answer: BorrowedFd<'_>) -> io::Result<nix::Result<RawFd>> {
    let patience = PollTimeout::try_from(DEADLINE).unwrap_or(PollTimeout::MAX);
    poll(&mut [PollFd::new(answer, PollFlags::POLLIN)], patience)?;
    let mut bytes = [0; size_of::<i64>()];
    match read(answer, &mut bytes) {
        Ok(count) if count == bytes.len() => Ok(match i64::from_ne_bytes(bytes) {
            errno @ ..0 => Err(Errno::from_raw(-errno as i32)),
            number => Ok(number as RawFd),
        }),
        _ => Err(io::Error::other("a child of gms died before it could be tried")),
    }
}

fn errno_of(error: io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO))
}

/// The capabilities that are left to a command if an exec takes some away: those which gms has by its file only. An exec by root
/// takes none.
fn ambient_after_exec() -> Option<u64> {
    let root = getuid().is_root() || geteuid().is_root();
    if root { None } else { Some(privilege::capabilities("CapAmb:")) }
}

/// The child: gives up what an exec would take, makes a userfaultfd as an evictor would, tells its number, and waits.
fn be_probed(
    wait: RawFd,
    go: RawFd,
    tell: &OwnedFd,
    device: Option<RawFd>,
    ambient: Option<u64>,
) -> ! {
    const FLAGS: libc::c_int = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: system calls whose pointers are to live variables of this frame; _exit does not return.
    unsafe {
        libc::close(go);
        if let Some(ambient) = ambient {
            // To give capabilities up is always allowed.
            let _ = privilege::set_capabilities(ambient, ambient, ambient);
        }
        // As after an exec.
        libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0);
        let made = match device {
            Some(device) => libc::ioctl(device, USERFAULTFD_IOC_NEW, FLAGS).into(),
            None => libc::syscall(libc::SYS_userfaultfd, FLAGS),
        };
        let answer: i64 = if made < 0 { -i64::from(Errno::last_raw()) } else { made };
        let bytes = answer.to_ne_bytes();
        libc::write(tell.as_raw_fd(), bytes.as_ptr().cast(), bytes.len());
        let mut byte = 0u8;
        // Ends when gms does, whatever ends it.
        while libc::read(wait, (&raw mut byte).cast(), 1) < 0 && Errno::last_raw() == libc::EINTR {}
        libc::_exit(0)
    }
}

/// All features that the kernel has, for a userfaultfd that has not been enabled.
fn offered(fd: &OwnedFd) -> nix::Result<u64> {
    let mut api = sys::uffdio_api { api: u64::from(sys::UFFD_API), features: 0, ioctls: 0 };
    // SAFETY: UFFDIO_API reads and writes one uffdio_api.
    unsafe { uffd::uffdio_api(fd.as_raw_fd(), &raw mut api)? };
    Ok(api.features)
}

/// Names of the needed features which are not offered.
fn missing(offered: u64) -> Vec<String> {
    let bits = (0..u64::BITS).map(|bit| 1 << bit);
    bits.filter(|bit| uffd::FEATURES & !offered & bit != 0).map(feature_name).collect()
}

fn feature_name(bit: u64) -> String {
    let known = FEATURE_NAMES.iter().find(|(known, _)| u64::from(*known) == bit);
    known.map_or_else(|| format!("feature {bit:#x}"), |(_, name)| (*name).into())
}

const FEATURE_NAMES: [(u32, &str); 17] = [
    (sys::UFFD_FEATURE_PAGEFAULT_FLAG_WP, "PAGEFAULT_FLAG_WP"),
    (sys::UFFD_FEATURE_EVENT_FORK, "EVENT_FORK"),
    (sys::UFFD_FEATURE_EVENT_REMAP, "EVENT_REMAP"),
    (sys::UFFD_FEATURE_EVENT_REMOVE, "EVENT_REMOVE"),
    (sys::UFFD_FEATURE_MISSING_HUGETLBFS, "MISSING_HUGETLBFS"),
    (sys::UFFD_FEATURE_MISSING_SHMEM, "MISSING_SHMEM"),
    (sys::UFFD_FEATURE_EVENT_UNMAP, "EVENT_UNMAP"),
    (sys::UFFD_FEATURE_SIGBUS, "SIGBUS"),
    (sys::UFFD_FEATURE_THREAD_ID, "THREAD_ID"),
    (sys::UFFD_FEATURE_MINOR_HUGETLBFS, "MINOR_HUGETLBFS"),
    (sys::UFFD_FEATURE_MINOR_SHMEM, "MINOR_SHMEM"),
    (sys::UFFD_FEATURE_EXACT_ADDRESS, "EXACT_ADDRESS"),
    (sys::UFFD_FEATURE_WP_HUGETLBFS_SHMEM, "WP_HUGETLBFS_SHMEM"),
    (sys::UFFD_FEATURE_WP_UNPOPULATED, "WP_UNPOPULATED"),
    (sys::UFFD_FEATURE_POISON, "POISON"),
    (sys::UFFD_FEATURE_WP_ASYNC, "WP_ASYNC"),
    (sys::UFFD_FEATURE_MOVE, "MOVE"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_missing_feature_is_named() {
        assert_eq!(missing(uffd::FEATURES), Vec::<String>::new());
        for bit in (0..64).map(|bit| 1u64 << bit).filter(|bit| uffd::FEATURES & bit != 0) {
            let names = missing(uffd::FEATURES & !bit);
            assert!(names.len() == 1 && !names[0].starts_with("feature"), "{bit:#x}: {names:?}");
        }
        assert_eq!(missing(0).len(), uffd::FEATURES.count_ones() as usize);
        assert_eq!(feature_name(1 << 60), "feature 0x1000000000000000");
    }

    #[test]
    fn everything_is_tried_and_the_child_is_gone() {
        // Of this thread: other tests have children too.
        let children = || fs::read_to_string("/proc/thread-self/children").unwrap();
        let before = children();
        let checks = checks().unwrap();
        assert_eq!(checks.len(), 10);
        if geteuid().is_root() && privilege::has_sys_ptrace() {
            assert!(checks.iter().all(|check| check.problem.is_none()), "{checks:?}");
        }
        for Problem { finding, cure } in checks.into_iter().filter_map(|check| check.problem) {
            assert!(!finding.contains('\n') && !cure.is_empty() && !cure.contains('\n'), "{cure}");
        }
        assert_eq!(children(), before);
    }
}
