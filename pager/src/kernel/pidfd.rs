//! Processes held by descriptors, whose numbers cannot become another's meanwhile.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::Pid;

/// For a process that was told to end, and again for one that was killed.
pub const END_DEADLINE: Duration = Duration::from_secs(1);

/// A descriptor of the process.
pub fn pidfd_open(pid: i32) -> nix::Result<OwnedFd> {
    // SAFETY: no pointer is passed.
    let fd = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    // SAFETY: the kernel has just given us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Kills a process.
pub fn kill(process: &OwnedFd) {
    // SAFETY: pidfd_send_signal reads no memory when the info is null. Fails only if the process has ended.
    unsafe {
        libc::syscall(libc::SYS_pidfd_send_signal, process.as_raw_fd(), libc::SIGKILL, 0usize, 0);
    }
}

/// A duplicate of descriptor `number` of another process.
pub fn pidfd_getfd(process: BorrowedFd<'_>, number: RawFd) -> nix::Result<OwnedFd> {
    // SAFETY: no pointer is passed.
    let fd = Errno::result(unsafe {
        libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0)
    })?;
    // SAFETY: the kernel has just given us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Whether the process behind a pidfd has ended (all its threads).
pub fn has_ended(process: BorrowedFd<'_>) -> bool {
    let mut ready = [PollFd::new(process, PollFlags::POLLIN)];
    matches!(poll(&mut ready, PollTimeout::ZERO), Ok(n) if n > 0)
}

/// Whether two processes share one address space (kcmp(2)).
pub fn same_memory(a: Pid, b: Pid) -> nix::Result<bool> {
    const KCMP_VM: libc::c_int = 1;
    // SAFETY: no pointer is passed.
    let order = Errno::result(unsafe {
        libc::syscall(libc::SYS_kcmp, a.as_raw(), b.as_raw(), KCMP_VM, 0, 0)
    })?;
    Ok(order == 0)
}

/// Whether two descriptors of this process are of one open file (kcmp(2)). Not, if that cannot be known.
pub fn is_same_file(a: BorrowedFd<'_>, b: BorrowedFd<'_>) -> bool {
    const KCMP_FILE: libc::c_int = 0;
    let (own, a, b) = (std::process::id(), a.as_raw_fd(), b.as_raw_fd());
    // SAFETY: no pointer is passed.
    unsafe { libc::syscall(libc::SYS_kcmp, own, own, KCMP_FILE, a, b) == 0 }
}

/// Kills a process, and waits for a second at most until its memory is in use no more.
pub fn end(process: &OwnedFd) {
    kill(process);
    await_end(process);
}

/// Waits for the end of a process; whether it came in time.
pub fn await_end(process: &OwnedFd) -> bool {
    let mut ended = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
    let timeout = PollTimeout::try_from(END_DEADLINE).unwrap_or(PollTimeout::MAX);
    matches!(poll(&mut ended, timeout), Ok(1..))
}
