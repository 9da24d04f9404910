//! Keeps the userfaultfds of forked children that have no evictor yet, in a process other than the pager: were the pager killed, its own
//! descriptors would close, and these children would read zeros where pages are away. With a keeper they wait there, and are killed.

use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use gms_policy::ids::SpaceId;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg,
    sendmsg, socketpair,
};
use nix::unistd::{ForkResult, Pid, fork};
use userfaultfd::{Event, EventBuffer, Uffd};

use crate::commands::say;
use crate::uffd::Faults;

/// How often a keeper without a pager looks whether its children have ended.
const LOOK_MS: u16 = 50;
/// Messages read at once.
const MESSAGES: usize = 32;

/// The pager's end.
#[derive(Debug)]
pub struct Holder(OwnedFd);

/// The other end.
#[derive(Debug)]
pub struct Keeper {
    socket: OwnedFd,
    held: HashMap<u32, OwnedFd>,
}

/// Both ends.
pub fn pair() -> nix::Result<(Holder, Keeper)> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
    Ok((Holder(ours), Keeper { socket: theirs, held: HashMap::new() }))
}

/// For pagers without a front: the keeper in a process of its own. This process must have one thread only.
pub fn spawn() -> nix::Result<Holder> {
    let (holder, keeper) = pair()?;
    // SAFETY: there is no other thread whose locks the child could miss.
    match unsafe { fork()? } {
        ForkResult::Parent { .. } => Ok(holder),
        ForkResult::Child => {
            drop(holder);
            keeper.keep();
            // SAFETY: _exit does not return and runs no code of this process.
            unsafe { libc::_exit(0) }
        }
    }
}

impl Holder {
    /// Gives the keeper a duplicate. If it cannot take it now (its process is stopped), the child is as if there were no keeper.
    pub fn hold(&self, space: SpaceId, faults: BorrowedFd<'_>) {
        let fds = [faults.as_raw_fd()];
        self.send(space, &[ControlMessage::ScmRights(&fds)]);
    }

    /// The child is gone, or has an evictor.
    pub fn release(&self, space: SpaceId) {
        self.send(space, &[]);
    }

    fn send(&self, space: SpaceId, rights: &[ControlMessage<'_>]) {
        let name = space.0.to_le_bytes();
        let flags = MsgFlags::MSG_NOSIGNAL;
        let _ = sendmsg::<()>(self.0.as_raw_fd(), &[IoSlice::new(&name)], rights, flags, None);
    }
}

impl Keeper {
    /// Readable when there is something to take, or the pager has gone.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Takes what was sent; false when the pager has gone.
    pub fn take(&mut self) -> bool {
        loop {
            let mut name = [0; 4];
            let mut space = nix::cmsg_space!([RawFd; 1]);
            let mut into = [IoSliceMut::new(&mut name)];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            let message =
                recvmsg::<()>(self.socket.as_raw_fd(), &mut into, Some(&mut space), flags);
            let (bytes, fd) = match message {
                Ok(message) => (message.bytes, message.cmsgs().ok().and_then(descriptor)),
                Err(Errno::EINTR) => continue,
                Err(errno) => return errno == Errno::EAGAIN,
            };
            match fd {
                _ if bytes == 0 => return false,
                Some(fd) => drop(self.held.insert(u32::from_le_bytes(name), fd)),
                None => drop(self.held.remove(&u32::from_le_bytes(name))),
            }
        }
    }

    /// Takes until the pager has gone; then kills the children that fault, until their address spaces have gone.
    fn keep(mut self) {
        raise_descriptor_limit();
        // Signals are for the pager, which decides when to go.
        // SAFETY: no memory is involved.
        unsafe { libc::setpgid(0, 0) };
        while self.take() {
            let _ = poll(&mut [PollFd::new(self.fd(), PollFlags::POLLIN)], PollTimeout::NONE);
        }
        let mut left: Vec<Faults> = self.held.drain().map(|(_, fd)| faults(fd)).collect();
        let mut buffer = EventBuffer::new(MESSAGES);
        loop {
            left.retain(Faults::is_alive);
            if left.is_empty() {
                return;
            }
            let mut fds: Vec<PollFd> =
                left.iter().map(|faults| PollFd::new(faults.as_fd(), PollFlags::POLLIN)).collect();
            let _ = poll(&mut fds, PollTimeout::from(LOOK_MS));
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
}

fn kill_at_fault(thread: i32) {
    say(format!(
        "the pager has died: process {thread} is killed, because its evicted pages are lost"
    ));
    // Fails only if it is gone.
    let _ = kill(Pid::from_raw(thread), Signal::SIGKILL);
}

fn faults(fd: OwnedFd) -> Faults {
    use std::os::fd::IntoRawFd;
    // SAFETY: the descriptor is a userfaultfd (the pager sends no other), owned and given away here.
    Faults::of_child(unsafe { Uffd::from_raw_fd(fd.into_raw_fd()) })
}

fn descriptor(mut messages: nix::sys::socket::CmsgIterator<'_>) -> Option<OwnedFd> {
    messages.find_map(|message| match message {
        // SAFETY: the kernel has just given us this descriptor.
        ControlMessageOwned::ScmRights(fds) => {
            fds.first().map(|&fd| unsafe { OwnedFd::from_raw_fd(fd) })
        }
        _ => None,
    })
}

/// A descriptor or more for each process of the workload: as many as the system lets us have.
pub fn raise_descriptor_limit() {
    if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // Best effort.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_kept_until_they_are_released() {
        let (holder, mut keeper) = pair().expect("a socket pair");
        let (ours, theirs) = nix::unistd::pipe().expect("a pipe");
        holder.hold(SpaceId(7), theirs.as_fd());
        holder.hold(SpaceId(8), theirs.as_fd());
        drop(theirs);
        assert!(keeper.take());
        assert_eq!(keeper.held.len(), 2);
        holder.release(SpaceId(7));
        assert!(keeper.take());
        assert_eq!(keeper.held.len(), 1);
        drop(holder);
        assert!(!keeper.take());
        let mut ended = [PollFd::new(ours.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut ended, PollTimeout::ZERO), Ok(0), "the last duplicate is kept");
        drop(keeper);
        assert_eq!(poll(&mut ended, PollTimeout::ZERO), Ok(1), "and closed with the keeper");
    }
}
