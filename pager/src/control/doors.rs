//! Where control sockets are, and who listens behind them.
//!
//! Root asks the pagers of all users, whose directories they can fill and exchange at will. So a directory is used only if
//! it belongs to the user that its path names, and by a descriptor, so that it cannot be exchanged; and a socket only if
//! the process that listens is the one that its name says.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt,
};
use nix::unistd::{UnlinkatFlags, geteuid, unlinkat};

use super::REQUEST_DEADLINE;
use crate::kernel::proc;
use crate::kernel::proc::descends;

/// Sockets looked at in one directory.
pub(super) const SOCKETS_MAX: usize = 256;

/// A control socket.
#[derive(Debug)]
pub(super) struct Door {
    dir: Arc<File>,
    /// Whose directory it is.
    owner: u32,
    pid: i32,
}

impl Door {
    /// The pager that its name says.
    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    fn name(&self) -> String {
        format!("{}.sock", self.pid)
    }

    /// Connects, without waiting for a pager whose queue is full. A socket at which nobody listens any more is removed.
    pub(super) fn connect(&self) -> io::Result<UnixStream> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        let path = format!("/proc/self/fd/{}/{}", self.dir.as_raw_fd(), self.name());
        if let Err(error) = connect(fd.as_raw_fd(), &UnixAddr::new(path.as_str())?) {
            if error == nix::Error::ECONNREFUSED {
                let _ = unlinkat(&*self.dir, self.name().as_str(), UnlinkatFlags::NoRemoveDir);
            }
            return Err(error.into());
        }
        let peer = getsockopt(&fd, sockopt::PeerCredentials)?;
        if (peer.pid(), peer.uid()) != (self.pid, self.owner) {
            return Err(ErrorKind::PermissionDenied.into());
        }
        let stream = UnixStream::from(fd);
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(REQUEST_DEADLINE))?;
        Ok(stream)
    }

    /// Whether the pager may say that it pages this process: one of its user's, or one below it that has gained rights.
    pub(super) fn may_page(&self, pid: i32) -> bool {
        let user = proc::status_field(pid, "Uid:");
        [0, geteuid().as_raw()].contains(&self.owner)
            || user.is_none_or(|user| user == i64::from(self.owner))
            || descends(pid, self.pid)
    }
}

/// Where this user's sockets can be, best first.
pub(super) fn own_directories() -> Vec<PathBuf> {
    let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|dir| dir.is_absolute());
    let mut dirs: Vec<PathBuf> = runtime.map(|dir| dir.join("gms")).into_iter().collect();
    if geteuid().is_root() {
        dirs.push("/run/gms".into());
    }
    dirs.push(format!("/tmp/gms-{}", geteuid()).into());
    dirs
}

/// Every socket which this user may ask: root sees all users'.
pub(super) fn all() -> Vec<Door> {
    let own = geteuid().as_raw();
    let mut dirs: Vec<(PathBuf, u32)> =
        own_directories().into_iter().map(|dir| (dir, own)).collect();
    if geteuid().is_root() {
        let users = numbered("/run/user".as_ref(), "");
        dirs.extend(users.map(|(dir, user)| (dir.join("gms"), user)));
        dirs.extend(numbered("/tmp".as_ref(), "gms-"));
    }
    dirs.sort();
    dirs.dedup_by(|one, other| one.0 == other.0);
    // One that root made in a user's directory is root's.
    dirs.iter().flat_map(|(dir, owner)| of(dir, &[*owner, own])).collect()
}

/// The sockets in a directory of one of these users.
pub(super) fn of(dir: &Path, owners: &[u32]) -> Vec<Door> {
    let Ok((dir, owner)) = private(dir, owners) else { return Vec::new() };
    let dir = Arc::new(dir);
    let within = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()));
    let socket = |path: &PathBuf| path.extension().is_some_and(|end| end == "sock");
    let pids = list(&within).filter(socket).filter_map(|path| number(path.file_stem()?, ""));
    pids.take(SOCKETS_MAX).map(|pid| Door { dir: Arc::clone(&dir), owner, pid }).collect()
}

/// Opens a directory that one of these users alone can enter, and which is no link. Returns whose it is.
pub(super) fn private(dir: &Path, owners: &[u32]) -> io::Result<(File, u32)> {
    let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(dir)?;
    let meta = file.metadata()?;
    if !owners.contains(&meta.uid()) || meta.mode() & 0o077 != 0 {
        return Err(io::Error::other("not a directory of this user's alone"));
    }
    Ok((file, meta.uid()))
}

/// The files of a directory that have a number behind `prefix` in their names, and that number.
pub(super) fn numbered(dir: &Path, prefix: &str) -> impl Iterator<Item = (PathBuf, u32)> {
    list(dir).filter_map(move |path| number(path.file_name()?, prefix).map(|n| (path, n)))
}

/// The number behind `prefix`, if it is written as gms writes it: with zeros or a sign before it, one number would have many names.
fn number<N: FromStr + ToString>(name: &OsStr, prefix: &str) -> Option<N> {
    let text = name.to_str()?.strip_prefix(prefix)?;
    text.parse().ok().filter(|number: &N| number.to_string() == text)
}

fn list(dir: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(dir).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Server;
    use crate::control::tests::scratch;
    use nix::sys::stat::{Mode, SFlag, mknod};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    /// A socket that nobody has ever listened at: a child of another test could still have a closed listener.
    fn deserted(path: &Path) {
        mknod(path, SFlag::S_IFSOCK, Mode::S_IRWXU, 0).unwrap();
    }

    #[test]
    fn sockets_of_the_dead_are_removed() {
        let dir = scratch("stale");
        let path = dir.join("1.sock");
        deserted(&path);
        let doors = of(&dir, &[geteuid().as_raw()]);
        assert_eq!(doors[0].connect().unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert!(!path.exists());
        fs::remove_dir(&dir).unwrap();
    }

    #[test]
    fn only_private_directories_are_used() {
        let dir = scratch("private");
        let own = [geteuid().as_raw()];
        assert!(private(&dir, &own).is_ok());
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(Server::open_in(&dir, i32::MAX).is_err());
        let link = dir.join("link");
        symlink("/", &link).unwrap();
        assert!(Server::open_in(&link, i32::MAX).is_err());
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn nothing_is_touched_where_a_directory_or_link_is_of_another() {
        if !geteuid().is_root() {
            return eprintln!("SKIPPED: only root looks into directories of others");
        }
        let (dir, link) = (scratch("foreign"), scratch("way").join("gms"));
        deserted(&dir.join("7.sock"));
        symlink(&dir, &link).unwrap();
        assert!(of(&link, &[0]).is_empty(), "a link was followed");
        let doors = of(&dir, &[0]);
        chown(&dir, Some(65534), Some(65534)).unwrap();
        assert!(of(&dir, &[0, 65533]).is_empty(), "not the user that the path names");
        assert_eq!(of(&dir, &[65534]).len(), 1);
        // The directory is exchanged after it was listed.
        let (other, aside) = (scratch("docker"), dir.with_extension("aside"));
        deserted(&other.join("7.sock"));
        fs::rename(&dir, &aside).unwrap();
        symlink(&other, &dir).unwrap();
        assert_eq!(doors[0].connect().unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert!(other.join("7.sock").exists(), "another's socket was removed");
        fs::remove_file(&dir).unwrap();
        let used = [aside.as_path(), &other, link.parent().unwrap()];
        used.iter().for_each(|dir| fs::remove_dir_all(dir).unwrap());
    }
}
