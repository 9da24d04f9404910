//! What a process hands to the next binary that it executes: descriptors, which stay open, and a record, in a memfd.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The form of the record: the next binary must know it.
pub const VERSION: u32 = 4;

/// A descriptor that is handed over, by its number.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Number(RawFd);

impl Number {
    /// That of a descriptor.
    pub fn of(fd: impl AsFd) -> Number {
        Number(fd.as_fd().as_raw_fd())
    }

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
        let number = Number::of(fd);
        self.0.push(number);
        number
    }

    /// Those, and these.
    pub fn add(&mut self, others: Descriptors) {
        self.0.extend(others.0);
    }

    /// Whether this is one of them.
    pub fn has(&self, number: RawFd) -> bool {
        self.0.iter().any(|handed| handed.0 == number)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
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

/// What is at the start of what is handed over. Its form never changes: by it a binary of another version, too, finds the way back.
#[derive(Debug)]
pub struct Header {
    /// The form of all else: [`VERSION`].
    pub version: u32,
    /// The binary before.
    pub before: Number,
    /// All that outlive the exec.
    pub descriptors: Descriptors,
}

/// First word of a header.
const MAGIC: u64 = u64::from_le_bytes(*b"gmshand\n");

/// A memfd with a header, then parts in JSON, each behind its length in bytes, then words.
pub fn write(header: &Header, parts: &[Vec<u8>], words: &[u64]) -> io::Result<File> {
    let Header { version, before, descriptors } = header;
    let count = descriptors.0.len() as u64;
    let numbers = descriptors.0.iter().map(|number| number.0 as u64);
    let head = [MAGIC, u64::from(*version), before.0 as u64, count].into_iter().chain(numbers);
    let bytes = |words: &mut dyn Iterator<Item = u64>| words.flat_map(u64::to_le_bytes).collect();
    let mut file = File::from(memfd_create("gms-handed", MFdFlags::MFD_CLOEXEC)?);
    let head: Vec<u8> = bytes(&mut head.into_iter());
    file.write_all(&head)?;
    for part in parts {
        file.write_all(&(part.len() as u64).to_le_bytes())?;
        file.write_all(part)?;
    }
    let words: Vec<u8> = bytes(&mut words.iter().copied());
    file.write_all(&words)?;
    Ok(file)
}

/// What [`write`] has written, read in its order.
pub struct Handed {
    file: File,
    len: u64,
}

impl Handed {
    /// By its number; its header is read.
    pub fn open(number: RawFd) -> io::Result<(Handed, Header)> {
        // SAFETY: the number is a decimal of the command line, given by the binary before; nobody else in this process owns it.
        let file = unsafe { File::from_raw_fd(Number(number).checked()?) };
        fcntl(&file, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        Handed::of(file)
    }

    fn of(mut file: File) -> io::Result<(Handed, Header)> {
        file.seek(SeekFrom::Start(0))?;
        let len = file.metadata()?.len();
        let mut handed = Handed { file, len };
        if handed.word()? != MAGIC {
            return Err(odd());
        }
        let version = handed.word()?.try_into().map_err(|_| odd())?;
        let number = |word: u64| word.try_into().map(Number).map_err(|_| odd());
        let before = number(handed.word()?)?;
        let count = handed.word()?;
        let numbers = handed.bytes(count.checked_mul(8).ok_or_else(odd)?)?;
        let numbers = numbers.as_chunks().0.iter().map(|word| number(u64::from_le_bytes(*word)));
        let descriptors = Descriptors(numbers.collect::<io::Result<_>>()?);
        Ok((handed, Header { version, before, descriptors }))
    }

    /// The next part.
    pub fn part<R: DeserializeOwned>(&mut self) -> io::Result<R> {
        let length = self.word()?;
        Ok(serde_json::from_slice(&self.bytes(length)?)?)
    }

    /// The words behind the last part.
    pub fn words(&mut self) -> io::Result<Vec<u64>> {
        let mut bytes = Vec::new();
        self.file.read_to_end(&mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }

    /// The memfd, to be closed with what it tells of.
    pub fn into_descriptors(self) -> Descriptors {
        Descriptors(vec![Number(self.file.into_raw_fd())])
    }

    /// The memfd, to be handed on.
    pub fn file(&self) -> &File {
        &self.file
    }

    fn word(&mut self) -> io::Result<u64> {
        let mut word = [0; 8];
        self.file.read_exact(&mut word)?;
        Ok(u64::from_le_bytes(word))
    }

    fn bytes(&mut self, length: u64) -> io::Result<Vec<u8>> {
        if length > self.len {
            return Err(odd());
        }
        let mut bytes = vec![0; length as usize];
        self.file.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

/// Executes a binary with what it is handed in the place of this one; `further` are options. Returns only if that cannot be: why.
pub fn execute(binary: &File, handed: &File, further: Option<String>) -> io::Error {
    let arguments = ["gms", "adopt", &handed.as_raw_fd().to_string()].map(String::from);
    let words: Result<Vec<CString>, _> =
        arguments.into_iter().chain(further).map(CString::new).collect();
    let set = |flags| fcntl(handed, FcntlArg::F_SETFD(flags)).map_err(io::Error::from);
    let executed = set(FdFlag::empty()).and_then(|_| {
        let path = CString::new(format!("/proc/self/fd/{}", binary.as_raw_fd()))?;
        Ok(nix::unistd::execv(&path, &words?)?)
    });
    let _ = set(FdFlag::FD_CLOEXEC);
    match executed {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

/// Executes the binary of a pager which has died, and has written that down in descriptor `number`, in the place of this one; `died` is when that was seen. All
/// else is closed. Returns only if that cannot be: why.
pub fn execute_heir(number: RawFd, died: u64) -> io::Error {
    let executed = || {
        let (handed, header) = Handed::open(number)?;
        header.descriptors.outlive_exec(true)?;
        let binary = File::from(header.before.take()?);
        Ok(execute(&binary, handed.file(), Some(format!("--died={died}"))))
    };
    executed().unwrap_or_else(|error| error)
}

/// Whether a descriptor is handed over by what is written in descriptor `number`.
pub fn names(number: RawFd, descriptor: RawFd) -> io::Result<bool> {
    Ok(Handed::of(File::from(Number(number).take()?))?.1.descriptors.has(descriptor))
}

fn odd() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let record = ("a name", vec![1u64, u64::MAX], Some(3.5));
        let words: Vec<u64> = (0..10_000).map(|n| n << 40 | n).collect();
        let descriptors = Descriptors(vec![Number(3), Number(70)]);
        let header = Header { version: 9, before: Number(5), descriptors };
        let parts = [serde_json::to_vec(&record).unwrap(), b"{\"of another\":\"form\"}".into()];
        let file = write(&header, &parts, &words).unwrap();
        let (mut read, header) = Handed::of(file.try_clone().unwrap()).unwrap();
        let number = |number: &Number| number.0;
        assert_eq!((header.version, number(&header.before)), (9, 5));
        assert_eq!(header.descriptors.0.iter().map(number).collect::<Vec<_>>(), [3, 70]);
        let part: (String, Vec<u64>, Option<f64>) = read.part().unwrap();
        assert_eq!((part.0.as_str(), part.1, part.2), record);
        assert!(read.part::<(u8, u8)>().is_err(), "it is of another form");
        assert_eq!(read.words().unwrap(), words);
        // What is cut off or is none is an error, and takes no memory.
        for len in [0, 7, 31, 40] {
            file.set_len(len).unwrap();
            assert!(Handed::of(file.try_clone().unwrap()).is_err(), "{len}");
        }
        let vast: Vec<u8> =
            [MAGIC, 1, 5, u64::MAX].into_iter().flat_map(u64::to_le_bytes).collect();
        let mut file = File::from(memfd_create("vast", MFdFlags::MFD_CLOEXEC).unwrap());
        file.write_all(&vast).unwrap();
        assert!(Handed::of(file).is_err());
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
