//! The agent of a session's own, in a process of its own: where no other agent is given (`far-agent`), or with a last copy of each page on a local
//! disk (`far-disk`). It ends with the session, or with the pager if no other goes on, and to the session its end is the loss of an agent like any other. So is that of a disk:
//! were it to fail to give a page back, the kernel would end that process.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::path::Path;

use gms_agent::{Agent, AgentError, Config};
use gms_policy::Bytes;
use gms_transport::keys::Identity;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, clone};
use nix::unistd::{Pid, pipe2};
use serde::{Deserialize, Serialize};

use crate::board;
use crate::handed::{Descriptors, Number};
use crate::privilege::Part;

const STACK_LEN: usize = 1 << 20;
/// For its memory, or its file's room, to be taken.
const START_MS: u16 = 60_000;
/// Longest word of the process on how it has begun, in bytes.
const WORD_MAX: usize = 4096;

/// Where its frames lie.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind<'a> {
    /// In memory.
    Embedded,
    /// In a file in this directory.
    Disk(&'a Path),
}

impl Kind<'_> {
    const EMBEDDED: &'static CStr = c"far-agent";
    const DISK: &'static CStr = c"far-disk";

    /// The name of its process: not one by which people end gms, because the workload may depend on it.
    fn name(self) -> &'static CStr {
        match self {
            Kind::Embedded => Kind::EMBEDDED,
            Kind::Disk(_) => Kind::DISK,
        }
    }

    fn part(self) -> Part {
        match self {
            Kind::Embedded => Part::Agent,
            Kind::Disk(_) => Part::Disk,
        }
    }

    /// What to do if it cannot be started, where the error does not say so.
    fn cure(self) -> &'static str {
        match self {
            Kind::Embedded => "",
            Kind::Disk(_) => ": give another directory, or less by --disk-size",
        }
    }

    /// Starts the agent in this process. No workload is without a link for so long that its pages are given up: the pager may be stopped, and when it
    /// ends, so does the agent.
    fn start(self, bytes: Bytes, node: &Identity) -> Result<Agent, AgentError> {
        let config = Config::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), bytes);
        let config = Config { endless_leases: true, ..config };
        let give_up = || Ok(self.part().give_up_rest()?);
        match self {
            Kind::Embedded => Agent::spawn_bound(&config, node, give_up),
            Kind::Disk(dir) => {
                let told = dir.display().to_string();
                Agent::spawn_in_file(&config, node, give_up, dir, move |error| fail(&told, &error))
            }
        }
    }
}

/// Whether a process of this name may be one.
pub(crate) fn is_name(name: &str) -> bool {
    [Kind::EMBEDDED, Kind::DISK].into_iter().any(|own| own.to_bytes() == name.as_bytes())
}

/// The process. It ends when this is dropped, or this process and its keeper have ended.
#[derive(Debug)]
pub(crate) struct OwnAgent {
    /// Where it listens.
    pub addr: SocketAddr,
    process: Pid,
    name: &'static CStr,
    /// Its other end is the process's alone.
    word: OwnedFd,
    life: OwnedFd,
}

/// See [`OwnAgent::hand_over`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct OwnAgentRecord {
    addr: SocketAddr,
    process: i32,
    is_disk: bool,
    word: Number,
    life: Number,
}

impl OwnAgent {
    /// Starts it. This process must have one thread only.
    ///
    /// # Errors
    /// Why it cannot be, with what to do.
    pub(crate) fn spawn(kind: Kind<'_>, bytes: Bytes, node: &Identity) -> Result<Self, String> {
        let cannot = |error: io::Error| format!("cannot be started: {error}");
        let (word, outlet) = pipe2(OFlag::O_CLOEXEC).map_err(|error| cannot(error.into()))?;
        // The keeper has the pipe too, so that another pager can go on with the agent; without one it closes all that it needs not.
        let (lives, life) = pipe2(OFlag::O_CLOEXEC).map_err(|error| cannot(error.into()))?;
        // Where there is a front, that reaps it.
        let mut flags = CloneFlags::empty();
        flags.set(CloneFlags::CLONE_PARENT, board::reaper().is_some());
        let serve = Box::new(|| {
            let kept = [outlet.as_raw_fd(), lives.as_raw_fd()];
            match leave_alone(kind.name(), &kept) {
                Ok(()) => serve(kind, bytes, node, outlet.as_fd(), lives.as_fd()),
                Err(errno) => {
                    let text = format!("cannot be parted from gms (close_range: {errno})");
                    let _ = nix::unistd::write(&outlet, text.as_bytes());
                }
            }
            // SAFETY: it does not return: nothing of what belongs to the pager is dropped here.
            unsafe { libc::_exit(0) }
        });
        let mut stack = vec![0; STACK_LEN];
        // SAFETY: there is no other thread whose locks the child could miss; it has a copy of the stack, as of all memory.
        let process = unsafe { clone(serve, &mut stack, flags, None) };
        let process = process.map_err(|error| cannot(error.into()))?;
        drop(outlet);
        let text = read_word(&word).map_err(cannot)?;
        let addr = text.strip_prefix("at ").and_then(|addr| addr.parse().ok()).ok_or(text)?;
        Ok(Self { addr, process, name: kind.name(), word, life })
    }

    /// What the next binary of this process needs, and must keep for as long as the agent is wanted.
    pub(crate) fn hand_over(&self, to: &mut Descriptors) -> OwnAgentRecord {
        let (word, life) = (to.give(&self.word), to.give(&self.life));
        let is_disk = self.name == Kind::DISK;
        OwnAgentRecord { addr: self.addr, process: self.process.as_raw(), is_disk, word, life }
    }

    /// The process again.
    pub(crate) fn again(record: &OwnAgentRecord) -> io::Result<Self> {
        let name = if record.is_disk { Kind::DISK } else { Kind::EMBEDDED };
        let (word, life) = (record.word.take()?, record.life.take()?);
        Ok(Self { addr: record.addr, process: Pid::from_raw(record.process), name, word, life })
    }

    /// Readable when the process has ended.
    pub(crate) fn ended(&self) -> BorrowedFd<'_> {
        self.word.as_fd()
    }
}

impl std::fmt::Display for OwnAgent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} ({})", self.process, self.name.to_string_lossy())
    }
}

fn read_word(word: &OwnedFd) -> io::Result<String> {
    let mut ready = [PollFd::new(word.as_fd(), PollFlags::POLLIN)];
    if poll(&mut ready, PollTimeout::from(START_MS))? == 0 {
        return Err(io::Error::other(
            "it is not ready after a minute: its disk or the machine is too slow",
        ));
    }
    let mut text = [0; WORD_MAX];
    match nix::unistd::read(word, &mut text)? {
        0 => Err(io::Error::other("it ended at once")),
        read => Ok(String::from_utf8_lossy(&text[..read]).into_owned()),
    }
}

/// Parts the process from the pager: from its descriptors but these and standard error, its name and its signals. With the others it would not see the end of
/// the session: it has the other end of that pipe.
fn leave_alone(name: &CStr, kept: &[RawFd]) -> nix::Result<()> {
    let _ = nix::unistd::setpgid(Pid::from_raw(0), Pid::from_raw(0));
    let _ = nix::sys::prctl::set_name(name);
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
            Errno::result(unsafe { libc::close_range(from as u32, (next - 1) as u32, 0) })?;
        }
        from = next.saturating_add(1);
    }
    Ok(())
}

/// Serves until it is no longer wanted, or the agent has ended by itself.
fn serve(
    kind: Kind<'_>,
    bytes: Bytes,
    node: &Identity,
    word: BorrowedFd<'_>,
    life: BorrowedFd<'_>,
) {
    let agent = kind.start(bytes, node);
    let text = match &agent {
        Ok(agent) => format!("at {}", agent.addr()),
        Err(error) => format!("{error}{}", kind.cure()),
    };
    let _ = nix::unistd::write(word, text.as_bytes());
    if let Ok(agent) = &agent {
        let ends = [life, agent.ended()];
        let mut ends = ends.map(|end| PollFd::new(end, PollFlags::POLLIN));
        while poll(&mut ends, PollTimeout::NONE).is_err() {}
    }
    // What is on its way to the disk may hold the process up: nobody who reads is to wait for that.
    // SAFETY: both are numbers of descriptors; the first has been of /dev/null since `leave_alone`.
    unsafe { libc::dup2(libc::STDOUT_FILENO, libc::STDERR_FILENO) };
}

/// The disk does not take what was written to it: the process ends.
fn fail(dir: &str, error: &io::Error) -> ! {
    let text = format!("gms: the copies in {dir} are lost: the disk fails: {error}\n");
    let stderr = io::stderr();
    let mut ready = [PollFd::new(stderr.as_fd(), PollFlags::POLLOUT)];
    // Nobody who does not read is waited for.
    if poll(&mut ready, PollTimeout::ZERO) == Ok(1) {
        let _ = nix::unistd::write(&stderr, text.as_bytes());
    }
    // SAFETY: it does not return. The links end with the process, and with them the use of what it has.
    unsafe { libc::_exit(1) }
}
