//! A last copy of each page, on a local disk: an agent in a process of its own, whose frames lie in a file. Were the disk to fail to give one back, the
//! kernel would end that process, which to the session is the loss of an agent like any other.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Read};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::path::Path;

use gms_agent::{Agent, Config};
use gms_policy::Bytes;
use gms_transport::keys::Identity;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, clone};
use nix::unistd::{Pid, pipe2};

use crate::kernel::pidfd::pidfd_open;
use crate::kernel::proc::self_pid;
use crate::privilege::Part;

/// Its name: not one by which people end gms, because the workload may depend on it.
const NAME: &CStr = c"far-disk";
const STACK_LEN: usize = 1 << 20;
/// For the file's room to be taken.
const START_MS: u16 = 60_000;
/// Longest word of the process on how it has begun, in bytes.
const WORD_MAX: u64 = 4096;

/// The process. It ends when this is dropped, or this process ends.
#[derive(Debug)]
pub(crate) struct DiskProcess {
    /// Where it listens.
    pub addr: SocketAddr,
    _life: OwnedFd,
}

/// Starts it. This process must have one thread only.
///
/// # Errors
/// Why it cannot be, with what to do.
pub(crate) fn spawn(dir: &Path, bytes: Bytes, node: &Identity) -> Result<DiskProcess, String> {
    let cannot = |error: io::Error| format!("cannot be started: {error}");
    let (word, outlet) = pipe2(OFlag::O_CLOEXEC).map_err(|error| cannot(error.into()))?;
    let (lives, life) = pipe2(OFlag::O_CLOEXEC).map_err(|error| cannot(error.into()))?;
    // The keeper has the pipe too, and may outlive the pager.
    let pager = pidfd_open(self_pid()).map_err(|error| cannot(error.into()))?;
    // Where all our children are the workload's, it must not be one of them.
    let mut flags = CloneFlags::empty();
    let sibling = nix::sys::prctl::get_child_subreaper().unwrap_or(false);
    flags.set(CloneFlags::CLONE_PARENT, sibling);
    let serve = Box::new(|| {
        leave_alone(&[outlet.as_raw_fd(), lives.as_raw_fd(), pager.as_raw_fd()]);
        serve(dir, bytes, node, outlet.as_fd(), [lives.as_fd(), pager.as_fd()]);
        // SAFETY: it does not return: nothing of what belongs to the pager is dropped here.
        unsafe { libc::_exit(0) }
    });
    let mut stack = vec![0; STACK_LEN];
    // SAFETY: there is no other thread whose locks the child could miss; it has a copy of the stack, as of all memory.
    unsafe { clone(serve, &mut stack, flags, None) }.map_err(|error| cannot(error.into()))?;
    drop(outlet);
    let text = read_word(word).map_err(cannot)?;
    let addr = text.strip_prefix("at ").and_then(|addr| addr.parse().ok()).ok_or(text)?;
    Ok(DiskProcess { addr, _life: life })
}

fn read_word(word: OwnedFd) -> io::Result<String> {
    let mut ready = [PollFd::new(word.as_fd(), PollFlags::POLLIN)];
    if poll(&mut ready, PollTimeout::from(START_MS))? == 0 {
        return Err(io::Error::other("its file is not there after a minute: try another disk"));
    }
    let mut text = String::new();
    File::from(word).take(WORD_MAX).read_to_string(&mut text)?;
    match text.is_empty() {
        true => Err(io::Error::other("it ended at once")),
        false => Ok(text),
    }
}

/// Parts the process from the pager: from its descriptors but these and standard error, its name and its signals.
fn leave_alone(kept: &[RawFd]) {
    let _ = nix::unistd::setpgid(Pid::from_raw(0), Pid::from_raw(0));
    let _ = nix::sys::prctl::set_name(NAME);
    let null = File::options().read(true).write(true).open("/dev/null").map(IntoRawFd::into_raw_fd);
    for standard in [libc::STDIN_FILENO, libc::STDOUT_FILENO] {
        // SAFETY: both are numbers of descriptors; nobody in this process uses what is replaced.
        let _ = null.as_ref().map(|&null| unsafe { libc::dup2(null, standard) });
    }
    let mut kept = kept.to_vec();
    kept.sort_unstable();
    let mut from = libc::STDERR_FILENO + 1;
    for next in kept.into_iter().chain([RawFd::MAX]) {
        if from < next {
            // SAFETY: their owners are the pager's, and none of them is dropped in this process.
            unsafe { libc::close_range(from as u32, (next - 1) as u32, 0) };
        }
        from = next.saturating_add(1);
    }
}

/// Serves until one of the last descriptors says that it is no longer wanted, or the agent has ended by itself.
fn serve(
    dir: &Path,
    bytes: Bytes,
    node: &Identity,
    word: BorrowedFd<'_>,
    [life, pager]: [BorrowedFd<'_>; 2],
) {
    let told = dir.display().to_string();
    let failed = move |error: io::Error| {
        let text = format!("gms: the copies in {told} are lost: the disk fails: {error}\n");
        let stderr = io::stderr();
        let mut ready = [PollFd::new(stderr.as_fd(), PollFlags::POLLOUT)];
        // Nobody who does not read is waited for.
        if poll(&mut ready, PollTimeout::ZERO) == Ok(1) {
            let _ = nix::unistd::write(&stderr, text.as_bytes());
        }
        // SAFETY: it does not return. The links end with the process, and with them the use of what it has.
        unsafe { libc::_exit(1) }
    };
    let config = Config::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), bytes);
    let give_up = || Ok(Part::Disk.give_up_rest()?);
    let agent = Agent::spawn_in_file(&config, node, give_up, dir, failed);
    let text = match &agent {
        Ok(agent) => format!("at {}", agent.addr()),
        Err(error) => format!("{error}: give another directory, or less by --disk-size"),
    };
    let _ = nix::unistd::write(word, text.as_bytes());
    // SAFETY: the pager reads to its end; nobody else uses it here.
    unsafe { libc::close(word.as_raw_fd()) };
    if let Ok(agent) = &agent {
        let ends = [life, pager, agent.ended()];
        let mut ends = ends.map(|end| PollFd::new(end, PollFlags::POLLIN));
        while poll(&mut ends, PollTimeout::NONE).is_err() {}
    }
    // What is on its way to the disk may hold the process up: nobody who reads is to wait for that.
    // SAFETY: both are numbers of descriptors; the first has been of /dev/null since `leave_alone`.
    unsafe { libc::dup2(libc::STDOUT_FILENO, libc::STDERR_FILENO) };
}
