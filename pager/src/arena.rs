//! Memory that is changed in transactions, so that the death of the process at any moment leaves it as it was at the end of one: words in a memfd.
//!
//! Behind the words lies an undo log. A word's old value is noted there before the word is changed; [`Arena::commit`] empties the log, and with that all
//! changes since the last commit have been made at once. Whoever maps the memory after a death takes back what was noted, the latest first
//! ([`Arena::recover`]); whoever dies doing so leaves the log to the next.
//!
//! Of a killed thread's stores all are done that stand before some instruction, in the order of the program, and none behind it: the kernel and the
//! memory go on. So nothing but the compiler can change the order, and the stores are volatile. (Nothing of this survives a loss of power.)
//!
//! What nothing refers to that was committed may be filled without a note ([`Arena::copy_fresh`], [`Arena::set_fresh`]): taken back, nothing refers to it
//! again. So what is given up can be used anew only after the commit.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{Ordering, compiler_fence};

use memmap2::{MmapOptions, MmapRaw, UncheckedAdvice};
use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use zerocopy::FromBytes;

/// Bytes of a word.
const WORD: usize = size_of::<u64>();
/// Most notes between two commits: 256 MiB, sparse. After more of them the memory cannot be recovered until the next commit.
const NOTES_MAX: usize = 1 << 24;
/// Words of a note: which word, and what it was.
const NOTE: usize = 2;
/// Words of a page of memory.
const PAGE_WORDS: usize = 512;
/// The log: a page that says how many notes there are, and the notes.
const LOG_WORDS: usize = PAGE_WORDS + NOTES_MAX * NOTE;
/// What the number of notes says when there were too many.
const TOO_MANY: u64 = u64::MAX;
/// A log that has become longer gives its memory back at the next commit.
const NOTES_KEPT: usize = 1 << 16;

/// See the module's documentation.
pub(crate) struct Arena {
    file: File,
    memory: MmapRaw,
    /// How many there are before the log.
    words: usize,
    /// Notes since the last commit.
    noted: usize,
    #[cfg(test)]
    commits: usize,
}

impl Arena {
    /// The words of a file, which is made longer if it must be. Nothing is noted there: it is new, or was left in order.
    pub(crate) fn of(file: File, words: usize) -> io::Result<Arena> {
        let words = words.next_multiple_of(PAGE_WORDS);
        let length = (words + LOG_WORDS) * WORD;
        if file.metadata()?.len() < length as u64 {
            file.set_len(length as u64)?;
        }
        let memory = MmapOptions::new().len(length).map_raw(&file)?;
        Ok(Arena {
            file,
            memory,
            words,
            noted: 0,
            #[cfg(test)]
            commits: 0,
        })
    }

    /// The words as they were at the last commit of a process that has ended.
    ///
    /// # Errors
    /// If that cannot be known, or the memory cannot be had.
    pub(crate) fn recover(file: File, words: usize) -> io::Result<Arena> {
        let mut arena = Arena::of(file, words)?;
        let words = arena.words;
        let noted = arena.read(words);
        if noted > NOTES_MAX as u64 {
            return Err(io::Error::other("more was being changed than can be taken back"));
        }
        for note in (0..noted as usize).rev() {
            let note = words + PAGE_WORDS + note * NOTE;
            let at = usize::try_from(arena.read(note)).ok().filter(|at| *at < words);
            arena.write(at.ok_or(io::ErrorKind::InvalidData)?, arena.read(note + 1));
        }
        arena.write(words, 0);
        Ok(arena)
    }

    /// The memory with the words.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Some of the words.
    pub(crate) fn words(&self, range: Range<usize>) -> &[u64] {
        assert!(range.start <= range.end && range.end <= self.words);
        // SAFETY: in bounds (checked above), aligned, and any bits are a word. Words are changed through `&mut self` alone: no other process writes the
        // memory while this one lives.
        unsafe { std::slice::from_raw_parts(self.place(range.start), range.len()) }
    }

    /// The same as what they are made of.
    pub(crate) fn slice<T: FromBytes>(&self, range: Range<usize>) -> &[T] {
        assert!(size_of::<T>() <= NOTE * WORD && align_of::<T>() <= WORD);
        let (words, count) = (self.words(range.clone()), range.len() * WORD / size_of::<T>());
        // SAFETY: the words are there, are aligned for `T`, and any bits are a `T`.
        unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), count) }
    }

    /// Changes a word.
    #[inline]
    pub(crate) fn set(&mut self, at: usize, word: u64) {
        assert!(at < self.words);
        let old = self.read(at);
        if old != word {
            self.note(at, old);
            self.write(at, word);
        }
    }

    /// Changes a word of those to which nothing refers.
    #[inline]
    pub(crate) fn set_fresh(&mut self, at: usize, word: u64) {
        assert!(at < self.words);
        self.write(at, word);
    }

    /// Changes a word to one that is as good: after a death it may be either. (If it was noted before, it is what it was then.)
    #[inline]
    pub(crate) fn set_hint(&mut self, at: usize, word: u64) {
        assert!(at < self.words);
        self.write(at, word);
    }

    #[inline]
    fn note(&mut self, at: usize, old: u64) {
        let count = if self.noted < NOTES_MAX {
            let note = self.words + PAGE_WORDS + self.noted * NOTE;
            self.write(note, at as u64);
            self.write(note + 1, old);
            self.noted += 1;
            self.noted as u64
        } else {
            TOO_MANY
        };
        self.write(self.words, count);
    }

    /// Fills words to which nothing refers from others.
    pub(crate) fn copy_fresh(&mut self, from: Range<usize>, to: usize) {
        assert!(from.end <= self.words && to + from.len() <= self.words);
        let half = from.len() / 2;
        for (from, to) in
            [(from.start..from.start + half, to), (from.start + half..from.end, to + half)]
        {
            step();
            // SAFETY: both are in bounds (checked above) and aligned; `copy` allows them to overlap.
            unsafe {
                std::ptr::copy(self.place(from.start).cast_const(), self.place(to), from.len());
            };
        }
        // What refers to them comes later.
        compiler_fence(Ordering::SeqCst);
    }

    /// Empties words to which nothing refers.
    pub(crate) fn empty_fresh(&mut self, range: Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.words);
        step();
        // SAFETY: in bounds (checked above), and any bits are a word.
        unsafe { self.place(range.start).write_bytes(0, range.len()) };
        compiler_fence(Ordering::SeqCst);
    }

    /// Empties whole pages to which nothing refers, and gives their memory back.
    pub(crate) fn clear(&mut self, range: Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.words);
        self.discard(range);
    }

    /// Empties all words from one on, which begins a page, and the log.
    pub(crate) fn forget(&mut self, from: usize) {
        assert!(from <= self.words);
        self.discard(from..self.words + LOG_WORDS);
    }

    /// All changes since the last commit have been made.
    #[inline]
    pub(crate) fn commit(&mut self) {
        if self.noted > 0 {
            compiler_fence(Ordering::SeqCst);
            self.write(self.words, 0);
            #[cfg(test)]
            {
                self.commits += 1;
            }
            if self.noted > NOTES_KEPT {
                self.discard(self.words + PAGE_WORDS..self.words + LOG_WORDS);
            }
            self.noted = 0;
        }
    }

    /// How often a death has ceased to take anything back.
    #[cfg(test)]
    pub(crate) fn commits(&self) -> usize {
        self.commits
    }

    /// Notes since the last commit.
    #[cfg(test)]
    pub(crate) fn noted(&self) -> usize {
        self.noted
    }

    /// Whether a word has changed since the last commit that was noted.
    #[inline]
    pub(crate) fn has_changed(&self) -> bool {
        self.noted > 0
    }

    /// The parts of a range that have memory. The words between are 0.
    pub(crate) fn filled(&self, range: Range<usize>) -> io::Result<Vec<Range<usize>>> {
        let mut parts = Vec::new();
        let mut at = range.start;
        let offset = |at: usize| (at * WORD) as i64;
        while at < range.end {
            let start = match lseek(&self.file, offset(at), Whence::SeekData) {
                Ok(start) => start as usize / WORD,
                Err(Errno::ENXIO) => break,
                Err(error) => return Err(error.into()),
            };
            let end = lseek(&self.file, offset(start), Whence::SeekHole)? as usize / WORD;
            if start < range.end {
                parts.push(start.max(at)..end.min(range.end));
            }
            at = end;
        }
        Ok(parts)
    }

    fn discard(&mut self, range: Range<usize>) {
        // More than it says would be emptied.
        assert!(range.start.is_multiple_of(PAGE_WORDS) && range.end.is_multiple_of(PAGE_WORDS));
        let (offset, length) = (range.start * WORD, range.len() * WORD);
        step();
        // SAFETY: the range is within the mapping (who calls has checked that), and nothing refers to it.
        let removed =
            unsafe { self.memory.unchecked_advise_range(UncheckedAdvice::Remove, offset, length) };
        if removed.is_err() {
            // SAFETY: in bounds, as above.
            unsafe { self.place(range.start).write_bytes(0, range.len()) };
        }
    }

    #[inline]
    fn read(&self, at: usize) -> u64 {
        // SAFETY: every caller gives a place of the words or of the log; aligned, and any bits are a word.
        unsafe { self.place(at).read() }
    }

    #[inline]
    fn write(&mut self, at: usize, word: u64) {
        step();
        // SAFETY: as in `read`; nobody else has a reference, since this one is `&mut`.
        unsafe { self.place(at).write_volatile(word) };
    }

    #[inline]
    fn place(&self, at: usize) -> *mut u64 {
        debug_assert!(at <= self.words + LOG_WORDS);
        // SAFETY: within the mapping.
        unsafe { self.memory.as_mut_ptr().cast::<u64>().add(at) }
    }
}

#[cfg(not(test))]
#[inline]
fn step() {}
#[cfg(test)]
use death::step;

/// Lets a test die before any of the stores.
#[cfg(test)]
pub(crate) mod death {
    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    thread_local!(static LEFT: Cell<Option<usize>> = const { Cell::new(None) });

    struct Died;

    pub(super) fn step() {
        LEFT.with(|left| match left.get() {
            Some(0) => {
                left.set(None);
                resume_unwind(Box::new(Died));
            }
            Some(stores) => left.set(Some(stores - 1)),
            None => {}
        });
    }

    /// What `act` returns; `None` if it has died after so many stores.
    pub(crate) fn after<T>(stores: usize, act: impl FnOnce() -> T) -> Option<T> {
        LEFT.with(|left| left.set(Some(stores)));
        let result = catch_unwind(AssertUnwindSafe(act));
        LEFT.with(|left| left.set(None));
        match result {
            Ok(value) => Some(value),
            Err(reason) if reason.is::<Died>() => None,
            Err(reason) => resume_unwind(reason),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::memfd::{MFdFlags, memfd_create};

    fn file() -> File {
        memfd_create("arena", MFdFlags::MFD_CLOEXEC).expect("a memfd").into()
    }

    fn again(arena: &Arena) -> io::Result<Arena> {
        Arena::recover(arena.file().try_clone()?, arena.words)
    }

    #[test]
    fn whatever_dies_in_a_transaction_or_in_its_recovery_leaves_what_was_committed() {
        for stores in 0.. {
            let mut arena = Arena::of(file(), 600).expect("memory");
            (0..4).for_each(|at| arena.set(at, at as u64 + 10));
            arena.commit();
            let died = death::after(stores, || {
                arena.copy_fresh(0..4, 16);
                // The same word twice: the first note is the one that counts.
                [(1, 5), (2, 6), (1, 7), (599, 8)]
                    .into_iter()
                    .for_each(|(at, word)| arena.set(at, word));
                arena.commit();
            })
            .is_none();
            let again =
                (0..).find_map(|stores| death::after(stores, || again(&arena).expect("memory")));
            let again = again.expect("recovered");
            let expected = if died { [10, 11, 12, 13, 0] } else { [10, 7, 6, 13, 8] };
            assert_eq!(
                (again.words(0..4), again.words(599..600)[0]),
                (&expected[..4], expected[4])
            );
            if !died {
                assert!(stores > 16, "{stores}");
                break;
            }
        }
    }

    #[test]
    fn a_hint_is_not_taken_back_by_itself_but_with_a_change_before_it() {
        let mut arena = Arena::of(file(), 2).expect("memory");
        (0..2).for_each(|at| arena.set(at, 10));
        arena.commit();
        arena.set_hint(0, 11);
        assert!(!arena.has_changed());
        arena.set(1, 20);
        arena.set_hint(1, 21);
        arena.set(0, 12);
        assert_eq!(again(&arena).expect("memory").words(0..2), [11, 10]);
    }

    #[test]
    fn what_is_too_much_to_be_taken_back_is_refused_until_it_is_committed() {
        let mut arena = Arena::of(file(), 2).expect("memory");
        (0..=NOTES_MAX as u64).for_each(|word| arena.set(1, word + 1));
        assert!(again(&arena).is_err());
        arena.commit();
        assert_eq!(again(&arena).expect("memory").words(0..2), [0, NOTES_MAX as u64 + 1]);
        let log = arena.words + PAGE_WORDS..arena.words + LOG_WORDS;
        assert!(arena.filled(log).expect("parts").is_empty(), "the log has kept its memory");
    }
}
