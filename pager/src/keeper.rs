//! A process beside the pager that shares its table of descriptors. If the pager is killed the userfaultfds stay open in it, so that
//! nobody reads zeros where pages are away: evictors kill their processes, and the keeper kills those that have none (forked children not met
//! yet, or not attachable) as soon as they fault.

use std::fs;
use std::ops::Range;
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, clone};
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;
use userfaultfd::{Event, EventBuffer, Uffd};

use crate::commands::say;
use crate::evictor::{has_ended, pidfd_open};
use crate::page_map::PAGE;
use crate::session::Outcome;
use crate::target::self_pid;
use crate::uffd::Faults;

/// Its name, by which it is told from processes of the workload.
pub const NAME: &str = "gms-keeper";
/// Pause between two looks at what is left: evictors, which can say more, go first.
const LOOK_MS: u8 = 20;
/// Messages read at once.
const MESSAGES: usize = 32;
/// Where programs can have memory.
const USER_SPACE: Range<u64> = 1 << 16..(1 << 47) - PAGE;
const STACK_LEN: usize = 256 << 10;

/// The pager's hold on its keeper.
#[derive(Debug)]
pub struct Keeper {
    /// Shared with it: nothing is left to be kept.
    over: &'static AtomicBool,
}

impl Keeper {
    /// Starts the keeper, as a sibling of this process or as its child. This process must have one thread only.
    pub fn spawn(sibling: bool) -> nix::Result<Keeper> {
        raise_descriptor_limit();
        let over = shared_flag()?;
        let pager = pidfd_open(self_pid())?;
        let mut stack = vec![0; STACK_LEN];
        let mut flags = CloneFlags::CLONE_FILES;
        flags.set(CloneFlags::CLONE_PARENT, sibling);
        let keep = Box::new(|| {
            keep(&pager, over);
            0
        });
        // SAFETY: there is no other thread whose locks the child could miss; it has a copy of the stack, as of all memory.
        unsafe { clone(keep, &mut stack, flags, None)? };
        // Its descriptor must stay open: the table is shared.
        std::mem::forget(pager);
        Ok(Keeper { over })
    }

    /// The session has ended. Unless the workload had to be killed, no process depends on a page any more.
    pub fn dismiss(&self, outcome: &Outcome) {
        self.over.store(!matches!(outcome, Outcome::Killed(_)), Ordering::Release);
    }
}

/// A flag which both processes see.
fn shared_flag() -> nix::Result<&'static AtomicBool> {
    let length = std::num::NonZeroUsize::MIN;
    let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new mapping; it is never unmapped, and all-zero is a value of the type.
    unsafe {
        let page = mmap_anonymous(None, length, access, MapFlags::MAP_SHARED)?;
        Ok(page.cast::<AtomicBool>().as_ref())
    }
}

/// A descriptor or more for each process of the workload: as many as the system lets us have.
fn raise_descriptor_limit() {
    if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // Best effort.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
    }
}

/// Waits for the end of the pager; then kills who faults, until the address spaces have gone.
fn keep(pager: &OwnedFd, over: &AtomicBool) {
    // Best effort, like all here: signals and job control are for the pager.
    let _ = SigSet::all().thread_block();
    let _ = nix::unistd::setpgid(Pid::from_raw(0), Pid::from_raw(0));
    let _ = fs::write("/proc/self/comm", NAME);
    while !has_ended(pager.as_fd()) {
        let _ = poll(&mut [PollFd::new(pager.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE);
    }
    if over.load(Ordering::Acquire) {
        return;
    }
    let mut left = inherit();
    // The pager may have read of faults which it did not get to serve: they are made anew.
    left.iter().for_each(|faults| faults.wake(USER_SPACE));
    let mut buffer = EventBuffer::new(MESSAGES);
    loop {
        left.retain(Faults::is_alive);
        if left.is_empty() {
            return;
        }
        let _ = poll(&mut [], PollTimeout::from(LOOK_MS));
        let mut messages = Vec::new();
        // What cannot be read has ended, or waits for the next turn.
        left.iter().for_each(|faults| drop(faults.read(&mut buffer, &mut messages)));
        for message in messages {
            match message {
                Event::Pagefault { thread_id, .. } => kill_at_fault(thread_id.as_raw()),
                Event::Fork { uffd } => left.push(Faults::of_child(uffd)),
                Event::Remap { .. } | Event::Remove { .. } | Event::Unmap { .. } => {}
            }
        }
    }
}

/// The userfaultfds of the table. All else is closed but for stderr, which ends the evictors' sockets: their wills are executed.
fn inherit() -> Vec<Faults> {
    let mut left = Vec::new();
    let numbers: Vec<RawFd> = fs::read_dir("/proc/self/fd")
        .map(|entries| entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok()).collect())
        .unwrap_or_default();
    for number in numbers.into_iter().filter(|&number| number != libc::STDERR_FILENO) {
        let name = fs::read_link(format!("/proc/self/fd/{number}")).unwrap_or_default();
        if name.as_os_str() == "anon_inode:[userfaultfd]" {
            // SAFETY: the pager, which owned the descriptor, is gone.
            left.push(Faults::of_child(unsafe { Uffd::from_raw_fd(number) }));
        } else {
            // SAFETY: as above. One is closed already: that of the directory.
            unsafe { libc::close(number) };
        }
    }
    left
}

fn kill_at_fault(thread: i32) {
    // The first of several threads, or an evictor, may have been faster.
    if kill(Pid::from_raw(thread), Signal::SIGKILL) != Err(Errno::ESRCH) {
        say(format!(
            "the pager has died: process {thread} is killed, because its evicted pages are lost"
        ));
    }
}
