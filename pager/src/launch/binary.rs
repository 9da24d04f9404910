//! A binary that is to go on, by its file: whether it may be executed with what the pager has.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::unistd::{AccessFlags, access, geteuid};

use crate::privilege::{capabilities, file_capabilities, named};

/// Written to by others than its owner.
const WRITABLE: u32 = 0o022;

/// See the module's documentation.
pub(super) struct Binary {
    file: File,
    state: State,
}

/// What changes when a file does: its device, inode, length and times.
#[derive(PartialEq, Eq)]
struct State([i64; 7]);

impl State {
    fn of(file: &File) -> io::Result<State> {
        let now = file.metadata()?;
        Ok(State([
            now.dev() as i64,
            now.ino() as i64,
            now.size() as i64,
            now.mtime(),
            now.mtime_nsec(),
            now.ctime(),
            now.ctime_nsec(),
        ]))
    }
}

impl Binary {
    /// The file of that name, which is looked up and not opened: a device, or a pipe without a writer, is left alone.
    ///
    /// # Errors
    /// Why it is not to be executed. With the pager's memory and capabilities it may do all that the pager may: so whoever could change it must be able to
    /// do so anyway, or be root, and where capabilities come by the file only root can have meant this one.
    pub(super) fn open(path: &Path) -> Result<Binary, String> {
        let text = |error: io::Error| error.to_string();
        // By the user's rights, whatever the pager's capabilities would allow.
        let may = |path: &Path, what| access(path, what).map_err(|errno| text(errno.into()));
        may(path, AccessFlags::F_OK)?;
        let file = by_name(path).map_err(text)?;
        let state = State::of(&file).map_err(text)?;
        let found = file.metadata().map_err(text)?;
        if !found.is_file() {
            return Err("is no file".into());
        }
        may(Path::new(&path_of(&file)), AccessFlags::X_OK)?;
        let user = geteuid();
        if ![0, user.as_raw()].contains(&found.uid()) || found.mode() & WRITABLE != 0 {
            return Err(
                "must belong to root or to the pager's user, and be writable by nobody else".into(),
            );
        }
        if !user.is_root() {
            let lacking = capabilities("CapPrm:") & !file_capabilities(&file);
            if lacking != 0 {
                return Err(format!(
                    "needs {} as a capability of the file (setcap), because the pager's user is not root; \
                     or gms detach, and start it anew",
                    named(lacking)
                ));
            }
        }
        Ok(Binary { file, state })
    }

    /// It itself.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Its name for execv(2), whatever it is called by now.
    pub(super) fn path(&self) -> String {
        path_of(&self.file)
    }

    /// Whether it is still what it was.
    pub(super) fn is_unchanged(&self) -> bool {
        State::of(&self.file).is_ok_and(|now| now == self.state)
    }
}

fn path_of(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// A file by its name alone: neither read nor opened.
pub(super) fn by_name(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    fn in_dir(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("gms-binary-{}-{name}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    /// Why it is refused, where whoever runs the test is root; else capabilities may be missing.
    fn refused(path: &Path) -> Option<String> {
        Binary::open(path).err()
    }

    #[test]
    fn a_pipe_is_refused_at_once_and_so_is_what_others_may_write_to() {
        let dir = in_dir("kinds");
        let fifo = dir.join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for path in [&fifo, &dir, &PathBuf::from("/dev/null")] {
            assert_eq!(refused(path).as_deref(), Some("is no file"), "{path:?}");
        }
        let file = dir.join("file");
        fs::write(&file, "x").unwrap();
        for (mode, is_trusted) in [(0o755, true), (0o775, false), (0o757, false), (0o500, true)] {
            fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
            let is_refused = refused(&file).is_some_and(|reason| reason.contains("nobody else"));
            assert_eq!(!is_refused, is_trusted, "{mode:o}");
        }
        assert!(refused(&dir.join("none")).is_some_and(|reason| reason.contains("No such file")));
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_file_that_is_written_to_has_changed() {
        let dir = in_dir("changed");
        let path = dir.join("file");
        fs::write(&path, "x").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        let file = by_name(&path).unwrap();
        let state = State::of(&file).unwrap();
        let binary = Binary { file, state };
        assert!(binary.is_unchanged());
        fs::write(&path, "longer").unwrap();
        assert!(!binary.is_unchanged());
        fs::remove_dir_all(dir).unwrap();
    }
}
