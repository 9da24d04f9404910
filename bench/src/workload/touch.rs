//! One thread touches absent pages, one after the other, times each touch, and checks the page after it.

use gms_tests::Dice;

use super::pen::Pen;
use super::walk::{Step, Walk};
use super::{Memory, now_ns};
use crate::error::BenchError;

/// A thread's way through memory.
pub(super) struct Toucher<'a> {
    memory: &'a Memory,
    dice: Dice,
    walk: Walk,
    pen: Pen,
}

/// A touch. Times are CLOCK_MONOTONIC, in ns.
pub(super) struct Touch {
    /// The page.
    pub step: Step,
    /// Whether it wrote.
    pub wrote: bool,
    /// Just before it.
    pub before: u64,
    /// Just after it.
    pub after: u64,
}

impl<'a> Toucher<'a> {
    /// Touches as `walk` and `pen` say.
    pub(super) fn new(memory: &'a Memory, dice: Dice, walk: Walk, pen: Pen) -> Toucher<'a> {
        Toucher { memory, dice, walk, pen }
    }

    /// Reads random pages.
    pub(super) fn random(memory: &'a Memory, dice: Dice) -> Toucher<'a> {
        Toucher::new(memory, dice, Walk::Random, Pen::none())
    }

    /// The next touch.
    pub(super) fn touch(&mut self) -> Result<Touch, BenchError> {
        let step = self.walk.next(self.memory, &mut self.dice)?;
        let (page, wrote) = (step.page, self.pen.writes(&mut self.dice));
        let (before, after);
        if wrote {
            let (word, value) = self.pen.word_to_write(page);
            before = now_ns();
            self.memory.store(page, word, value);
            after = now_ns();
        } else {
            let word = self.pen.word_to_read(&mut self.dice);
            before = now_ns();
            std::hint::black_box(self.memory.load(page, word));
            after = now_ns();
        }
        self.pen.check(self.memory, page)?;
        Ok(Touch { step, wrote, before, after })
    }

    /// So many touches which do not count.
    pub(super) fn warm_up(&mut self, touches: usize) -> Result<(), BenchError> {
        (0..touches).try_for_each(|_| self.touch().map(drop))
    }

    /// Checks in the end what was written to any page.
    pub(super) fn check_all(&mut self) -> Result<(), BenchError> {
        self.pen.check_all(self.memory, &mut self.dice)
    }
}
