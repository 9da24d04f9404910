//! Files of a key directory: bounded when they are read, whole when they are written.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};

use super::KeysError;

/// Most bytes of a key file.
pub(super) const FILE_MAX: u64 = 64 * 1024;
/// Is locked while a directory is changed.
const LOCK: &str = ".lock";
/// A pipe or a terminal is opened at once, and does not become ours.
const NO_WAIT: OFlag = OFlag::O_NONBLOCK.union(OFlag::O_NOCTTY);

pub(super) fn read(path: &Path) -> Result<Vec<u8>, KeysError> {
    read_up_to(path, FILE_MAX)
}

/// Reads no more than `max` bytes.
pub(super) fn read_up_to(path: &Path, max: u64) -> Result<Vec<u8>, KeysError> {
    contents(path, max).map(|(bytes, _)| bytes)
}

/// Reads a private key, which must be its owner's alone; one of root may be shared with its group, so that a service
/// can be given a key which it cannot change.
pub(super) fn read_private(path: &Path) -> Result<Vec<u8>, KeysError> {
    let (bytes, metadata) = contents(path, FILE_MAX)?;
    let mode = metadata.mode() & 0o777;
    let shared = if metadata.uid() == 0 { 0o037 } else { 0o077 };
    match mode & shared {
        0 => Ok(bytes),
        _ => Err(KeysError::Exposed { path: path.to_owned(), mode }),
    }
}

fn contents(path: &Path, max: u64) -> Result<(Vec<u8>, fs::Metadata), KeysError> {
    let read = || {
        // Nobody may ever write into a pipe.
        let file = fs::OpenOptions::new().read(true).custom_flags(NO_WAIT.bits()).open(path)?;
        let (metadata, mut bytes) = (file.metadata()?, Vec::new());
        if !metadata.is_file() {
            return Err(io::Error::other("it is no regular file"));
        }
        io::Read::read_to_end(&mut io::Read::take(file, max + 1), &mut bytes)?;
        Ok((bytes, metadata))
    };
    match read() {
        Ok((bytes, _)) if bytes.len() as u64 > max => {
            Err(KeysError::TooLong { path: path.to_owned(), max })
        }
        Ok(read) => Ok(read),
        Err(error) => Err(match error.kind() {
            // A link that leads nowhere is not taken for a list that nobody has made.
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                if path.symlink_metadata().is_err() =>
            {
                KeysError::Missing { path: path.to_owned() }
            }
            _ => KeysError::Unreadable { path: path.to_owned(), error },
        }),
    }
}

fn unwritable(path: &Path, error: impl Into<io::Error>) -> KeysError {
    KeysError::Unwritable { path: path.to_owned(), error: error.into() }
}

/// A file to be written.
pub(super) struct File {
    path: PathBuf,
    content: Vec<u8>,
    mode: u32,
}

impl File {
    /// For everybody to read.
    pub(super) fn public(path: PathBuf, content: impl Into<Vec<u8>>) -> File {
        File { path, content: content.into(), mode: 0o644 }
    }

    /// For its owner only.
    pub(super) fn private(path: PathBuf, content: impl Into<Vec<u8>>) -> File {
        File { path, content: content.into(), mode: 0o600 }
    }

    /// Where it is written before it takes the place of another. No name of keys begins with a `.`.
    fn draft(&self) -> PathBuf {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        self.path.with_file_name(format!(".{name}.new"))
    }

    /// Writes it to `path`, where nothing may be.
    fn create(&self, path: &Path) -> Result<(), KeysError> {
        let write = || {
            let mut options = fs::OpenOptions::new();
            let mut file = options.write(true).create_new(true).mode(self.mode).open(path)?;
            file.write_all(&self.content)?;
            file.sync_all()
        };
        write().map_err(|error| unwritable(path, error))
    }

    /// Refuses a path where a rename fails, or does what is not meant.
    fn check_replaceable(&self) -> Result<(), KeysError> {
        match self.path.symlink_metadata() {
            Ok(found) if found.is_symlink() => Err(KeysError::Link { path: self.path.clone() }),
            Ok(found) if found.is_dir() => Err(unwritable(&self.path, Errno::EISDIR)),
            _ => Ok(()),
        }
    }
}

/// Writes all files, none of which may exist.
pub(super) fn write_new(dir: &Path, files: &[File]) -> Result<(), KeysError> {
    if let Some(file) = files.iter().find(|file| file.path.symlink_metadata().is_ok()) {
        return Err(KeysError::Exists { path: file.path.clone() });
    }
    fs::create_dir_all(dir).map_err(|error| unwritable(dir, error))?;
    files.iter().try_for_each(|file| file.create(&file.path))
}

/// Writes all files in the place of those which are there. Each is replaced in one step, once all have been written.
pub(super) fn replace(files: &[File]) -> Result<(), KeysError> {
    files.iter().try_for_each(File::check_replaceable)?;
    for file in files {
        let draft = file.draft();
        // What a writer that was killed has left.
        match fs::remove_file(&draft) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(unwritable(&draft, error));
            }
            _ => file.create(&draft)?,
        }
    }
    for file in files {
        let path = &file.path;
        let renamed = fs::rename(file.draft(), path);
        // The name too must outlive a crash.
        let dir = path.parent().unwrap_or(Path::new("."));
        renamed
            .and_then(|()| fs::File::open(dir)?.sync_all())
            .map_err(|error| unwritable(path, error))?;
    }
    Ok(())
}

/// Keeps other commands from changing a key directory, by a file that only its owner can open: whoever may read a file or a directory can lock it.
pub(super) struct Lock(#[expect(dead_code, reason = "held")] Flock<fs::File>);

impl Lock {
    pub(super) fn of(dir: &Path) -> Result<Lock, KeysError> {
        let path = dir.join(LOCK);
        let mut options = fs::OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        let file = options.custom_flags((NO_WAIT | OFlag::O_NOFOLLOW).bits()).open(&path);
        let file = file.map_err(|error| unwritable(&path, error))?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(Lock(lock)),
            Err((_, Errno::EWOULDBLOCK)) => Err(KeysError::InUse { path: dir.to_owned() }),
            Err((_, error)) => Err(unwritable(&path, error)),
        }
    }
}
