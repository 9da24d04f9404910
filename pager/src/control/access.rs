//! Who may have a pager execute another binary: it gets all that the pager has, its memory and its rights, so only who has as many may choose it.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::sys::socket::{getsockopt, sockopt};

use super::above::is_launched_beside;
use crate::kernel::pidfd::has_ended;
use crate::kernel::proc::{ancestors, self_pid, status_field, status_line};
use crate::privilege::capabilities;

/// SO_PEERPIDFD of asm-generic/socket.h: since Linux 6.5.
const PEER_PIDFD: libc::c_int = 77;

/// Whether the process at the other end may choose the binary of this pager, whose workload has the root process `root`.
///
/// # Errors
/// Why not. It is held by a descriptor while it is looked at, so that its number is nobody else's.
pub(super) fn may_upgrade(stream: &UnixStream, root: i32) -> Result<(), String> {
    let unknown = || {
        String::from(
            "whoever asks is not known: it must see the pager's processes, and wait for the answer",
        )
    };
    let peer = getsockopt(stream, sockopt::PeerCredentials).map_err(|_| unknown())?;
    let process = process_of(stream).map_err(|_| unknown())?;
    let pid = Some(peer.pid()).filter(|pid| *pid > 0).ok_or_else(unknown)?;
    let user = status_line(pid, "Uid:").unwrap_or_default();
    let has_rights = has_all(pid, capabilities("CapPrm:"));
    let same_users = user.split_ascii_whitespace().all(|uid| uid.parse() == Ok(peer.uid()));
    let (above, again) = (ancestors(pid), ancestors(pid));
    let is_known =
        above == again && above.last().is_some_and(|&top| status_field(top, "PPid:") == Some(0));
    let same_namespace = namespace("self") == namespace(pid);
    if user.is_empty() || !is_known || has_ended(process.as_fd()) {
        return Err(unknown());
    }
    if above.contains(&root) || is_launched_beside(self_pid(), &above) {
        return Err("a process of the workload itself may not ask for it".into());
    }
    if !same_namespace || !same_users || !has_rights {
        return Err("whoever asks must have all capabilities that the pager has, in the same user namespace: \
            ask as root, or with the same gms"
            .into());
    }
    Ok(())
}

/// The process that has connected.
fn process_of(stream: &UnixStream) -> nix::Result<OwnedFd> {
    let mut number: RawFd = -1;
    let mut length = size_of::<RawFd>() as libc::socklen_t;
    // SAFETY: the kernel writes a number of this length.
    Errno::result(unsafe {
        let to = (&raw mut number).cast();
        libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, PEER_PIDFD, to, &raw mut length)
    })?;
    // SAFETY: the kernel has just given us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Whether a process has these capabilities in effect.
fn has_all(pid: i32, needed: u64) -> bool {
    let line = status_line(pid, "CapEff:").unwrap_or_default();
    u64::from_str_radix(line.trim(), 16).is_ok_and(|has| needed & !has == 0)
}

/// The user namespace of a process.
fn namespace(pid: impl std::fmt::Display) -> Option<(u64, u64)> {
    let found = fs::metadata(format!("/proc/{pid}/ns/user")).ok()?;
    Some((found.dev(), found.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_as_many_rights_and_is_not_of_the_workload_may_upgrade() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        assert_eq!(may_upgrade(&ours, i32::MAX), Ok(()));
        for root in ancestors(self_pid()) {
            let refused = may_upgrade(&ours, root).expect_err("it asks for itself");
            assert!(refused.contains("of the workload itself"), "{refused}");
        }
    }

    #[test]
    fn who_lacks_a_right_is_known() {
        let has = capabilities("CapEff:");
        assert!(has_all(self_pid(), has));
        assert!(!has_all(self_pid(), u64::MAX) && !has_all(i32::MAX, 0));
        assert!(namespace("self").is_some() && namespace(i32::MAX).is_none());
    }
}
