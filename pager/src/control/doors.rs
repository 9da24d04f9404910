//! Where control sockets are, and who listens behind them.
//!
//! Root asks the pagers of all users, whose directories they can fill and exchange at will. So a directory is used only if
//! it belongs to the user that its path names, and by a descriptor, so that it cannot be exchanged; and a socket only if
//! the process that listens is the one that its name says.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, DirEntry, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt,
};
use nix::unistd::{UnlinkatFlags, geteuid, unlinkat};

use super::REQUEST_DEADLINE;
use crate::kernel::proc;
use crate::kernel::proc::{descends, self_pid};

/// Sockets looked at in one directory.
pub(super) const SOCKETS_MAX: usize = 256;
/// Files looked at in one directory.
const FILES_MAX: usize = 16 * SOCKETS_MAX;
/// Sockets of other users that are looked at: eight full directories.
const OTHERS_MAX: usize = 8 * SOCKETS_MAX;

/// A control socket. Its directory is open.
#[derive(Debug)]
pub(super) struct Door {
    dir: Arc<File>,
    /// Whose directory it is.
    owner: u32,
    pid: i32,
}

impl Door {
    /// Its directory, as long as that is open.
    #[cfg(test)]
    pub(super) fn watch(&self) -> std::sync::Weak<File> {
        Arc::downgrade(&self.dir)
    }

    /// Whose socket it is.
    pub(super) fn owner(&self) -> u32 {
        self.owner
    }

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

    /// Whether somebody else listens here: in another PID namespace, a process of the same id that has the same directory.
    pub(super) fn is_anothers(&self) -> bool {
        self.connect().is_err_and(|error| {
            !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused)
        })
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

/// This user's sockets.
pub(super) fn own() -> impl Iterator<Item = Door> {
    let user = geteuid().as_raw();
    own_directories().into_iter().flat_map(move |dir| of(&dir, &[user]))
}

/// The sockets of other users which root may ask, as far as they are found by `until`. One directory is open, beside those of
/// the doors that the caller holds.
pub(super) fn others(until: Instant) -> impl Iterator<Item = Door> {
    let is_root = geteuid().is_root();
    let others = is_root.then(|| others_in("/run/user".as_ref(), "/tmp".as_ref(), until));
    others.into_iter().flatten()
}

/// Below `run` only root makes directories: what is there comes before the rest.
fn others_in(run: &Path, tmp: &Path, until: Instant) -> impl Iterator<Item = Door> {
    let (own, user) = (own_directories(), geteuid().as_raw());
    let runtime = numbered(run, "", until).map(|(dir, owner)| (dir.join("gms"), owner));
    let others = runtime.chain(numbered(tmp, "gms-", until));
    // One that root made in a user's directory is root's.
    let doors = others
        .filter(move |(dir, _)| !own.contains(dir))
        .flat_map(move |(dir, owner)| of(&dir, &[owner, user]));
    doors.take(OTHERS_MAX)
}

/// Where the socket of this process is to be, in a directory of this user's alone.
pub(super) fn own_in(dir: &Path) -> io::Result<Door> {
    let (dir, owner) = private(dir, &[geteuid().as_raw()])?;
    Ok(Door { dir: Arc::new(dir), owner, pid: self_pid() })
}

/// The sockets in a directory of one of these users.
pub(super) fn of(dir: &Path, owners: &[u32]) -> Vec<Door> {
    let Ok((dir, owner)) = private(dir, owners) else { return Vec::new() };
    let dir = Arc::new(dir);
    let within = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()));
    let is_socket = |file: &DirEntry| file.file_type().is_ok_and(|kind| kind.is_socket());
    let pid = |file: DirEntry| {
        let path = file.path();
        path.extension().filter(|end| *end == "sock").and_then(|_| number(path.file_stem()?, ""))
    };
    let pids = list(&within).take(FILES_MAX).filter(is_socket).filter_map(pid);
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

/// The files of a directory that have a number behind `prefix` in their names, and that number; as far as they are found by `until`.
pub(super) fn numbered(
    dir: &Path,
    prefix: &str,
    until: Instant,
) -> impl Iterator<Item = (PathBuf, u32)> {
    let in_time = move |_: &DirEntry| Instant::now() < until;
    let named = move |file: DirEntry| Some((file.path(), number(&file.file_name(), prefix)?));
    list(dir).take_while(in_time).filter_map(named)
}

/// The number behind `prefix`, if it is written as gms writes it: with zeros or a sign before it, one number would have many names.
fn number<N: FromStr + ToString>(name: &OsStr, prefix: &str) -> Option<N> {
    let text = name.to_str()?.strip_prefix(prefix)?;
    text.parse().ok().filter(|number: &N| number.to_string() == text)
}

fn list(dir: &Path) -> impl Iterator<Item = DirEntry> + use<> {
    fs::read_dir(dir).into_iter().flatten().filter_map(Result::ok)
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
    fn files_that_are_no_sockets_hide_none() {
        let dir = scratch("files");
        (1..=SOCKETS_MAX).for_each(|n| drop(File::create(dir.join(format!("{n}.sock"))).unwrap()));
        deserted(&dir.join("2000000000.sock"));
        let pids: Vec<i32> = of(&dir, &[geteuid().as_raw()]).iter().map(|door| door.pid).collect();
        assert_eq!(pids, [2_000_000_000]);
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn others_are_looked_for_in_bounded_time_and_number() {
        let (dir, own) = (scratch("others"), geteuid().as_raw());
        let (run, tmp) = (dir.join("run"), dir.join("tmp"));
        for (dir, first) in
            [(run.join(format!("{own}/gms")), 1), (tmp.join(format!("gms-{own}")), 2)]
        {
            fs::create_dir_all(&dir).unwrap();
            fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).unwrap();
            deserted(&dir.join(format!("{first}.sock")));
        }
        let found =
            |until| -> Vec<i32> { others_in(&run, &tmp, until).map(|door| door.pid).collect() };
        let now = Instant::now();
        assert_eq!(
            found(now + REQUEST_DEADLINE),
            [1, 2],
            "where only root makes directories first"
        );
        assert!(found(now).is_empty());
        fs::remove_dir_all(&dir).unwrap();
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
