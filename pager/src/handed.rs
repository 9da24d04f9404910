//! What a process hands to the next binary that it executes: descriptors, which stay open, and a record, in a memfd.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The form of the record: the next binary must know it.
pub const VERSION: u32 = 1;

/// A descriptor that is handed over, by its number.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Number(RawFd);

impl Number {
    /// A duplicate: what was handed over stays open, so that it can be handed on if this binary cannot use it.
    pub fn take(self) -> io::Result<OwnedFd> {
        // SAFETY: only its number is used, and one that is not open is refused.
        let handed = unsafe { BorrowedFd::borrow_raw(self.checked()?) };
        handed.try_clone_to_owned()
    }

    fn checked(self) -> io::Result<RawFd> {
        if self.0 < 0 { Err(io::ErrorKind::InvalidData.into()) } else { Ok(self.0) }
    }
}

/// All that are handed over. Their owners keep them open until the binary is executed.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Descriptors(Vec<Number>);

impl Descriptors {
    /// One more.
    pub fn give(&mut self, fd: impl AsFd) -> Number {
        let number = Number(fd.as_fd().as_raw_fd());
        self.0.push(number);
        number
    }

    /// Those, and these.
    pub fn add(&mut self, others: Descriptors) {
        self.0.extend(others.0);
    }

    /// Whether they outlive an exec from now on.
    pub fn outlive_exec(&self, outlive: bool) -> io::Result<()> {
        let flags = if outlive { FdFlag::empty() } else { FdFlag::FD_CLOEXEC };
        for number in &self.0 {
            // SAFETY: only its number is used, and one that is not open is refused.
            let fd = unsafe { BorrowedFd::borrow_raw(number.checked()?) };
            fcntl(fd, FcntlArg::F_SETFD(flags))?;
        }
        Ok(())
    }

    /// Closes what was handed to this process, which has taken duplicates of all that it needs.
    pub fn close(self) {
        for number in self.0 {
            // SAFETY: no value of this process owns these numbers: they were open before it was executed. One that is there twice is refused.
            unsafe { libc::close(number.0) };
        }
    }

    /// Takes note of it on the way in: a number that is handed over twice would be closed twice, when it may be another's.
    pub fn once(mut self) -> Descriptors {
        self.0.sort_unstable_by_key(|number| number.0);
        self.0.dedup_by_key(|number| number.0);
        self
    }
}

/// A record in a memfd: its length in bytes and itself in JSON, then `words`.
pub fn write(record: &impl Serialize, words: &[u64]) -> io::Result<File> {
    let mut file = File::from(memfd_create("gms-handed", MFdFlags::MFD_CLOEXEC)?);
    let json = serde_json::to_vec(record)?;
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    for part in [&(json.len() as u64).to_le_bytes(), &json[..], &bytes] {
        file.write_all(part)?;
    }
    Ok(file)
}

/// What [`write`] has written.
pub fn read<R: DeserializeOwned>(file: &mut File) -> io::Result<(R, Vec<u64>)> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0))?;
    file.read_to_end(&mut bytes)?;
    let odd = || io::Error::from(io::ErrorKind::InvalidData);
    let (length, rest) = bytes.split_first_chunk().ok_or_else(odd)?;
    let length = usize::try_from(u64::from_le_bytes(*length)).map_err(|_| odd())?;
    let (json, words) = rest.split_at_checked(length).ok_or_else(odd)?;
    let (words, _) = words.as_chunks();
    Ok((
        serde_json::from_slice(json)?,
        words.iter().map(|word| u64::from_le_bytes(*word)).collect(),
    ))
}

/// The record whose number is `number`.
pub fn open(number: RawFd) -> io::Result<File> {
    // SAFETY: the number is a decimal of the command line, given by the binary before; nobody else in this process owns it.
    let file = unsafe { File::from_raw_fd(Number(number).checked()?) };
    fcntl(&file, FcntlArg::F_GETFD)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let record = ("a name", vec![1u64, u64::MAX], Some(3.5));
        let words: Vec<u64> = (0..10_000).map(|n| n << 40 | n).collect();
        let mut file = write(&record, &words).unwrap();
        let (read, again): ((String, Vec<u64>, Option<f64>), _) = read(&mut file).unwrap();
        assert_eq!((read.0.as_str(), read.1, read.2, again), (record.0, record.1, record.2, words));
        let mut none = write(&"", &[]).unwrap();
        none.set_len(7).unwrap();
        assert!(super::read::<String>(&mut none).is_err());
    }

    #[test]
    fn what_is_handed_over_outlives_an_exec_and_is_taken_as_a_duplicate() {
        let file = File::open("/dev/null").unwrap();
        let mut handed = Descriptors::default();
        let number = handed.give(&file);
        let is_kept = || fcntl(&file, FcntlArg::F_GETFD).unwrap() == 0;
        handed.outlive_exec(true).unwrap();
        assert!(is_kept());
        handed.outlive_exec(false).unwrap();
        assert!(!is_kept());
        let taken = number.take().unwrap();
        assert_ne!(taken.as_raw_fd(), file.as_raw_fd());
        assert!(Number(-1).take().is_err() && Number(1 << 20).take().is_err());
    }
}
