//! What a thread writes: in each page a word of its own, so that threads share pages and yet each knows what its word must hold.

use gms_tests::Dice;

use super::Memory;
use crate::error::BenchError;
use crate::region::WORDS;

/// One thread's.
pub(super) struct Pen {
    thread: usize,
    /// Words at the beginning of each page that are written: one a thread, or none if nobody writes.
    written: usize,
    percent: usize,
    /// How often this thread has written to each page.
    times: Vec<u32>,
}

impl Pen {
    /// That of a thread which only reads, as all do.
    pub(super) fn none() -> Pen {
        Pen { thread: 0, written: 0, percent: 0, times: Vec::new() }
    }

    /// That of thread `thread` of `threads`, all of which write at `percent` of their touches.
    pub(super) fn new(percent: usize, pages: usize, (thread, threads): (usize, usize)) -> Pen {
        assert!(threads < WORDS, "the command line allows fewer threads");
        match percent {
            0 => Pen::none(),
            _ => Pen { thread, written: threads, percent, times: vec![0; pages] },
        }
    }

    /// Whether the next touch writes.
    pub(super) fn writes(&self, dice: &mut Dice) -> bool {
        self.percent > 0 && dice.place(100) < self.percent
    }

    /// A word that nobody writes.
    pub(super) fn word_to_read(&self, dice: &mut Dice) -> usize {
        self.written + dice.place(WORDS - self.written)
    }

    /// The word to write, and what to write: never what is there.
    pub(super) fn word_to_write(&mut self, page: usize) -> (usize, u64) {
        self.times[page] = self.times[page].wrapping_add(1);
        (self.thread, self.expected(page))
    }

    /// Checks all words but those of other threads.
    pub(super) fn check(&self, memory: &Memory, page: usize) -> Result<(), BenchError> {
        (self.written..WORDS).try_for_each(|word| memory.check_word(page, word))?;
        self.check_written(memory, page)
    }

    /// Checks, of all pages to which this thread has written, what it wrote last; shuffled, so that gms's own figures stay those of
    /// random faults.
    pub(super) fn check_all(&self, memory: &Memory, dice: &mut Dice) -> Result<(), BenchError> {
        let written = self.times.iter().enumerate().filter(|(_, times)| **times > 0);
        let mut written: Vec<usize> = written.map(|(page, _)| page).collect();
        dice.shuffle(&mut written);
        written.into_iter().try_for_each(|page| self.check_written(memory, page))
    }

    fn check_written(&self, memory: &Memory, page: usize) -> Result<(), BenchError> {
        match self.written == 0 || memory.load(page, self.thread) == self.expected(page) {
            true => Ok(()),
            false => Err(BenchError::WrongBytes(format!("what was written to page {page}"))),
        }
    }

    fn expected(&self, page: usize) -> u64 {
        super::pattern(page, self.thread).wrapping_add(u64::from(self.times[page]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_write_is_found() {
        let memory = Memory::filled(1).expect("memory");
        let mut dice = Dice::of_thread(1, 0);
        let (mut pen, mut other) = (Pen::new(50, 256, (0, 2)), Pen::new(50, 256, (1, 2)));
        for (pen, times) in [(&mut pen, 2), (&mut other, 1)] {
            for _ in 0..times {
                let (word, value) = pen.word_to_write(7);
                memory.store(7, word, value);
            }
            pen.check(&memory, 7).expect("what was written");
            pen.check_all(&memory, &mut dice).expect("what was written");
        }
        pen.word_to_write(7);
        assert!(pen.check(&memory, 7).is_err() && pen.check_all(&memory, &mut dice).is_err());
        other.check_all(&memory, &mut dice).expect("another word");
        assert!(Pen::none().check(&memory, 7).is_err(), "who does not know of the writes");
    }
}
