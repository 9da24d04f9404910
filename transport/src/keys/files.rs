//! Files of a key directory: bounded when they are read, whole when they are written.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::KeysError;

/// Most bytes of a key file.
const FILE_MAX: u64 = 64 * 1024;

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
        let (file, mut bytes) = (fs::File::open(path)?, Vec::new());
        let metadata = file.metadata()?;
        io::Read::read_to_end(&mut io::Read::take(file, max), &mut bytes)?;
        Ok((bytes, metadata))
    };
    read().map_err(|error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => KeysError::Missing { path: path.to_owned() },
        _ => KeysError::Unreadable { path: path.to_owned(), error },
    })
}

fn unwritable(path: &Path, error: impl Into<io::Error>) -> KeysError {
    KeysError::Unwritable { path: path.to_owned(), error: error.into() }
}

/// Writes all files, none of which may exist; private ones are for their owner only.
pub(super) fn write_new(dir: &Path, files: &[(PathBuf, String, bool)]) -> Result<(), KeysError> {
    if let Some((path, ..)) = files.iter().find(|(path, ..)| path.symlink_metadata().is_ok()) {
        return Err(KeysError::Exists { path: path.clone() });
    }
    fs::create_dir_all(dir).map_err(|error| unwritable(dir, error))?;
    for (path, content, private) in files {
        create(path, content.as_bytes(), *private).map_err(|error| unwritable(path, error))?;
    }
    Ok(())
}

/// Writes all files in the place of those which are there. Each is replaced in one step, once all have been written.
pub(super) fn replace(files: &[(PathBuf, &[u8], bool)]) -> Result<(), KeysError> {
    for (path, content, private) in files {
        let draft = draft(path);
        // What a writer that was killed has left.
        match fs::remove_file(&draft) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(unwritable(&draft, error));
            }
            _ => create(&draft, content, *private).map_err(|error| unwritable(&draft, error))?,
        }
    }
    for (path, ..) in files {
        let renamed = fs::rename(draft(path), path);
        // The name too must outlive a crash.
        let dir = path.parent().unwrap_or(Path::new("."));
        renamed
            .and_then(|()| fs::File::open(dir)?.sync_all())
            .map_err(|error| unwritable(path, error))?;
    }
    Ok(())
}

fn draft(path: &Path) -> PathBuf {
    path.with_extension("new")
}

fn create(path: &Path, content: &[u8], private: bool) -> io::Result<()> {
    let mode = if private { 0o600 } else { 0o644 };
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Keeps other commands from changing a key directory.
pub(super) struct Lock(#[expect(dead_code, reason = "held")] Flock<fs::File>);

impl Lock {
    pub(super) fn of(dir: &Path) -> Result<Lock, KeysError> {
        let file = fs::File::open(dir).map_err(|error| unwritable(dir, error))?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(Lock(lock)),
            Err((_, Errno::EWOULDBLOCK)) => Err(KeysError::InUse { path: dir.to_owned() }),
            Err((_, error)) => Err(unwritable(dir, error)),
        }
    }
}
