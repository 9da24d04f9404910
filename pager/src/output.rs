//! Files that gms writes beside the workload: `--stats` and `--trace`. Whatever goes wrong with them is told, and changes nothing else.

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat, readlinkat, renameat};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::Mode;
use nix::sys::statfs::{PROC_SUPER_MAGIC, fstatfs};
use nix::unistd::{UnlinkatFlags, geteuid, unlinkat};
use serde::{Deserialize, Serialize};

use crate::handed::{Descriptors, Number};

/// For the reader of a pipe to take what is written.
const READER_DEADLINE: Duration = Duration::from_secs(5);
/// Links followed in one path: as many as the kernel follows.
const LINKS_MAX: usize = 40;

/// Where something will be written, tested.
#[derive(Debug)]
pub(crate) enum Output {
    /// A file, replaced in one step.
    Replaced(Place),
    /// A device or a pipe, open.
    Open(Stream),
}

/// A name in a directory that is held open, so that nobody can put another directory into its path.
#[derive(Debug)]
pub(crate) struct Place {
    dir: OwnedFd,
    name: OsString,
}

/// A device or a pipe, written to with a deadline.
#[derive(Debug)]
pub(crate) struct Stream(File);

/// What the next binary of the pager is told of it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum OutputRecord {
    Replaced { dir: Number, name: Vec<u8> },
    Open(Number),
}

impl Output {
    /// What the next binary needs.
    pub(crate) fn hand_over(&self, to: &mut Descriptors) -> OutputRecord {
        match self {
            Output::Replaced(Place { dir, name }) => {
                OutputRecord::Replaced { dir: to.give(dir), name: name.as_bytes().to_vec() }
            }
            Output::Open(Stream(file)) => OutputRecord::Open(to.give(file)),
        }
    }

    /// The same again.
    pub(crate) fn again(record: OutputRecord) -> io::Result<Output> {
        Ok(match record {
            OutputRecord::Replaced { dir, name } => {
                Output::Replaced(Place { dir: dir.take()?, name: OsString::from_vec(name) })
            }
            OutputRecord::Open(file) => Output::Open(Stream(file.take()?.into())),
        })
    }

    /// Tests that it can be written, by what writing it takes: a file beside it, or to open the pipe, which needs a reader.
    pub(crate) fn open(given: &Path) -> io::Result<Output> {
        let (place, there) = resolve(given)?;
        let Some(there) = there else { return place.tested() };
        let kind = there.metadata()?.file_type();
        if kind.is_file() {
            return place.tested();
        }
        if !kind.is_fifo() && !kind.is_char_device() {
            return Err(io::Error::other("is no file, pipe or terminal"));
        }
        // By its descriptor: its name may be another's by now.
        let path = format!("/proc/self/fd/{}", there.as_raw_fd());
        match OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(path) {
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => {
                Err(io::Error::other("nobody reads the pipe"))
            }
            file => Ok(Output::Open(Stream(file?))),
        }
    }

    /// Writes it. Readers of a file see the old one or the new one, never a part.
    pub(crate) fn write(
        self,
        text: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        match self {
            Output::Open(mut stream) => text(&mut stream),
            Output::Replaced(place) => place.replace(text),
        }
    }
}

impl Place {
    fn tested(self) -> io::Result<Output> {
        let (draft, _) = self.draft()?;
        self.remove(&draft)?;
        Ok(Output::Replaced(self))
    }

    fn replace(&self, text: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        let (draft, mut file) = self.draft()?;
        let written = text(&mut file).and_then(|()| {
            Ok(renameat(&self.dir, draft.as_os_str(), &self.dir, self.name.as_os_str())?)
        });
        written.inspect_err(|_| {
            let _ = self.remove(&draft);
        })
    }

    /// A new file beside it, so that a rename puts it into its place. A name that others can foresee may be theirs already: then this
    /// fails.
    fn draft(&self) -> io::Result<(OsString, File)> {
        let random = RandomState::new().build_hasher().finish();
        let name = OsString::from(format!(".gms-{random:016x}.tmp"));
        let how = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_WRONLY;
        let mode = Mode::from_bits_truncate(0o666);
        let file = openat(&self.dir, name.as_os_str(), how | OFlag::O_CLOEXEC, mode)?;
        Ok((name, file.into()))
    }

    fn remove(&self, name: &OsStr) -> io::Result<()> {
        Ok(unlinkat(&self.dir, name, UnlinkatFlags::NoRemoveDir)?)
    }
}

/// Where a path leads, and what is there. Links of other users are not followed, wherever they are: whoever made one
/// would choose the file that is replaced with this user's rights.
fn resolve(given: &Path) -> io::Result<(Place, Option<File>)> {
    let look = OFlag::O_PATH | OFlag::O_CLOEXEC;
    let parts = |path: &Path| -> Vec<OsString> {
        path.components().rev().map(|part| part.as_os_str().to_owned()).collect()
    };
    let mut dir = open(".", look, Mode::empty())?;
    let (mut left, mut links) = (parts(given), 0);
    while let Some(name) = left.pop() {
        let there = openat(&dir, name.as_os_str(), look | OFlag::O_NOFOLLOW, Mode::empty());
        let there = match there {
            Err(Errno::ENOENT) if left.is_empty() => return Ok((Place { dir, name }, None)),
            there => File::from(there?),
        };
        let meta = there.metadata()?;
        if meta.is_dir() {
            dir = there.into();
        } else if meta.is_symlink() {
            links += 1;
            if links > LINKS_MAX {
                return Err(Errno::ELOOP.into());
            }
            if ![0, geteuid().as_raw()].contains(&meta.uid()) {
                let (name, uid) = (PathBuf::from(name), meta.uid());
                let text = format!(
                    "{} is a link of user {uid}'s, which may lead anywhere",
                    name.display()
                );
                return Err(io::Error::other(text));
            }
            if let Some(stream) = opened_by_proc(&there, &dir, &name)? {
                return Ok((Place { dir, name }, Some(stream)));
            }
            left.extend(parts(readlinkat(&there, "")?.as_ref()));
        } else if left.is_empty() {
            return Ok((Place { dir, name }, Some(there)));
        } else {
            return Err(Errno::ENOTDIR.into());
        }
    }
    Err(Errno::EISDIR.into())
}

/// The pipe or device to which a link in /proc leads (/dev/stdout is one): it may have no path.
fn opened_by_proc(link: &File, dir: &OwnedFd, name: &OsStr) -> io::Result<Option<File>> {
    if fstatfs(link)?.filesystem_type() != PROC_SUPER_MAGIC {
        return Ok(None);
    }
    let file = File::from(openat(dir, name, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?);
    let kind = file.metadata()?.file_type();
    Ok(Some(file).filter(|_| !kind.is_dir() && !kind.is_file()))
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let deadline = Instant::now() + READER_DEADLINE;
        loop {
            match self.0.write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                other => return other,
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::Error::other("its reader does not read"));
            }
            let patience = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
            // An interruption only makes the next try early.
            let _ = poll(&mut [PollFd::new(self.0.as_fd(), PollFlags::POLLOUT)], patience);
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::proc::self_pid;
    use std::fs;
    use std::io::Read;
    use std::os::unix::fs::{PermissionsExt, lchown, symlink};

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("gms-output-{}-{name}", self_pid()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).unwrap();
        dir
    }

    #[test]
    fn a_file_is_replaced_whole_and_through_links() {
        let dir = scratch("file");
        let (file, link) = (dir.join("s.json"), dir.join("link"));
        symlink(&file, &link).unwrap();
        fs::write(&file, "old").unwrap();
        let output = Output::open(&link).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "old", "the test changed it");
        output.write(|out| out.write_all(b"new")).unwrap();
        assert!(link.is_symlink(), "the link was replaced");
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
        let failed = Output::open(&file).unwrap().write(|_| Err(io::Error::other("no")));
        assert_eq!(failed.unwrap_err().to_string(), "no");
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 2, "a temporary file stayed");
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn what_cannot_be_written_is_found_at_once() {
        let dir = scratch("cannot");
        assert!(Output::open(&dir).is_err());
        assert!(Output::open(&dir.join("no/s.json")).is_err());
        assert!(Output::open("/proc/gms-stats".as_ref()).is_err());
        let pipe = dir.join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(Output::open(&pipe).unwrap_err().to_string().contains("nobody reads"));
        let mut reader =
            OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&pipe).unwrap();
        Output::open(&pipe).unwrap().write(|out| out.write_all(b"figures")).unwrap();
        // Not to its end: a child that another test forks holds the pipe until its exec.
        let mut text = [0; 64];
        let length = reader.read(&mut text).unwrap();
        assert_eq!(&text[..length], b"figures");
        Output::open("/dev/null".as_ref()).unwrap().write(|out| out.write_all(b"x")).unwrap();
        assert!(!Path::new("/dev/null").is_file());
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn links_of_strangers_are_not_followed() {
        if !geteuid().is_root() {
            return eprintln!("SKIPPED: only root can make files of another user's");
        }
        let dir = scratch("strangers");
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o1777)).unwrap();
        let (target, link, way) = (dir.join("target"), dir.join("s.json"), dir.join("way"));
        fs::write(&target, "precious").unwrap();
        symlink(&target, &link).unwrap();
        symlink(&dir, &way).unwrap();
        [&link, &way].iter().for_each(|link| lchown(link, Some(65534), Some(65534)).unwrap());
        for path in [&link, &way.join("new")] {
            let error = Output::open(path).map(drop).unwrap_err();
            assert!(error.to_string().contains("is a link of user 65534"), "{error}");
        }
        // A link that comes after the look is replaced, not followed.
        let output = Output::open(&dir.join("late")).unwrap();
        symlink(&target, dir.join("late")).unwrap();
        output.write(|out| out.write_all(b"figures")).unwrap();
        assert_eq!(fs::read_to_string(dir.join("late")).unwrap(), "figures");
        assert_eq!(fs::read_to_string(&target).unwrap(), "precious");
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_draft_that_was_foreseen_changes_nothing() {
        let dir = scratch("foreseen");
        let (file, target) = (dir.join("s.json"), dir.join("target"));
        fs::write(&target, "precious").unwrap();
        symlink(&target, dir.join(format!("s.json.{}.tmp", self_pid()))).unwrap();
        Output::open(&file).unwrap().write(|out| out.write_all(b"figures")).unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "precious");
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn links_of_proc_lead_to_pipes() {
        let (mut reader, writer) = io::pipe().unwrap();
        let path = format!("/proc/self/fd/{}", writer.as_raw_fd());
        Output::open(path.as_ref()).unwrap().write(|out| out.write_all(b"figures")).unwrap();
        drop(writer);
        // Not to its end: a child that another test forks holds the pipe until its exec.
        let mut text = [0; 64];
        let length = reader.read(&mut text).unwrap();
        assert_eq!(&text[..length], b"figures");
    }
}
