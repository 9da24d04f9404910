//! Files that gms writes beside the workload: `--stats` and `--trace`. Whatever goes wrong with them is told, and changes nothing else.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::target::self_pid;

/// For the reader of a pipe to take what is written.
const READER_DEADLINE: Duration = Duration::from_secs(5);

/// Where something will be written, tested.
#[derive(Debug)]
pub enum Output {
    /// A file, replaced in one step.
    Replaced(PathBuf),
    /// A device or a pipe, open.
    Open(Stream),
}

/// A device or a pipe, written to with a deadline.
#[derive(Debug)]
pub struct Stream(File);

impl Output {
    /// Tests that it can be written, by what writing it takes: a file beside it, or to open the pipe, which needs a reader.
    pub fn open(given: &Path) -> io::Result<Output> {
        // Through links, so that what they lead to is replaced.
        let path = fs::canonicalize(given).or_else(|_| std::path::absolute(given))?;
        match fs::metadata(&path) {
            Ok(meta) if meta.is_dir() => Err(io::Error::from_raw_os_error(libc::EISDIR)),
            Ok(meta) if !meta.is_file() => {
                let special = meta.file_type().is_fifo() || meta.file_type().is_char_device();
                let how = OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(&path);
                match (special, how) {
                    (false, _) => Err(io::Error::other("is no file, pipe or terminal")),
                    (true, Err(error)) if error.raw_os_error() == Some(libc::ENXIO) => {
                        Err(io::Error::other("nobody reads the pipe"))
                    }
                    (true, file) => Ok(Output::Open(Stream(file?))),
                }
            }
            _ => {
                let draft = draft(&path);
                File::create(&draft)?;
                fs::remove_file(&draft)?;
                Ok(Output::Replaced(path))
            }
        }
    }

    /// Writes it. Readers of a file see the old one or the new one, never a part.
    pub fn write(self, text: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        match self {
            Output::Open(mut stream) => text(&mut stream),
            Output::Replaced(path) => {
                let draft = draft(&path);
                let written = File::create(&draft)
                    .and_then(|mut file| text(&mut file))
                    .and_then(|()| fs::rename(&draft, &path));
                written.inspect_err(|_| {
                    let _ = fs::remove_file(&draft);
                })
            }
        }
    }
}

/// Beside the file, so that a rename puts it into its place.
fn draft(path: &Path) -> PathBuf {
    let mut draft = path.to_path_buf().into_os_string();
    draft.push(format!(".{}.tmp", self_pid()));
    draft.into()
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
    use std::io::Read;

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
        std::os::unix::fs::symlink(&file, &link).unwrap();
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
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "figures");
        Output::open("/dev/null".as_ref()).unwrap().write(|out| out.write_all(b"x")).unwrap();
        assert!(!Path::new("/dev/null").is_file());
        fs::remove_dir_all(&dir).unwrap();
    }
}
