//! The program: threads that read and write pages, discard some, and map, unmap and move rooms; they check every byte that they read.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::time::Instant;

use gms_pager::page_map::PAGE;
use gms_policy::ids::PageAddr;
use gms_tests::Dice;

use crate::kernel::{FIRST_ROOM, Kernel, PAGES, Page, ROOM_PAGES, ROOMS, room, zeros};

/// Threads of the program, and what each does.
pub(crate) const THREADS: usize = 5;
const STEPS: usize = 120;
/// Steps that a failure tells.
const TOLD: usize = 60;

/// What a thread of the program is at.
#[derive(Debug)]
enum Act {
    Ready,
    /// It touches the page; with a number it writes that there.
    Touch(PageAddr, Option<u64>),
    /// It has a range removed.
    Remove,
    /// It has changed the address space.
    Change,
}

struct Thread {
    act: Act,
    left: usize,
    /// When it came on last.
    moved: Instant,
}

/// See the module's documentation.
pub(crate) struct Program {
    threads: Vec<Thread>,
    /// What every page must hold that is not zeros.
    truth: BTreeMap<u64, Page>,
    dice: Dice,
    start: Instant,
    pub now: Instant,
    pub log: VecDeque<String>,
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.threads.iter().map(|thread| &thread.act)).finish()
    }
}

impl Program {
    pub(crate) fn new(start: Instant, dice: Dice) -> Program {
        let thread = |_| Thread { act: Act::Ready, left: STEPS, moved: start };
        Program {
            threads: (0..THREADS).map(thread).collect(),
            truth: BTreeMap::new(),
            dice,
            start,
            now: start,
            log: VecDeque::new(),
        }
    }

    /// Notes a step, for the log of a failure.
    pub(crate) fn tell(&mut self, text: String) {
        let at = self.now - self.start;
        self.log.push_back(format!("{:>12.6} {text}", at.as_secs_f64()));
        if self.log.len() > TOLD {
            self.log.pop_front();
        }
    }

    /// Whether all threads have ended.
    pub(crate) fn is_over(&self) -> bool {
        self.threads.iter().all(|thread| thread.left == 0)
    }

    /// Whether any thread can come on.
    pub(crate) fn is_busy(&self, kernel: &Kernel) -> bool {
        (0..THREADS).any(|n| self.threads[n].left > 0 && !kernel.sleeps(n))
    }

    /// The thread that has not come on for longest, and since when.
    pub(crate) fn laggard(&self) -> Option<(usize, Instant)> {
        let running = self.threads.iter().enumerate().filter(|(_, thread)| thread.left > 0);
        running.map(|(n, thread)| (n, thread.moved)).min_by_key(|(_, moved)| *moved)
    }

    /// Nobody is blamed for what was before.
    pub(crate) fn excuse(&mut self) {
        self.threads.iter_mut().for_each(|thread| thread.moved = self.now);
    }

    /// Each thread comes on, if it can.
    pub(crate) fn step(&mut self, kernel: &mut Kernel) {
        (0..THREADS).for_each(|n| self.go(kernel, n));
    }

    /// One thread does.
    pub(crate) fn step_of_one(&mut self, kernel: &mut Kernel) {
        let n = self.dice.place(THREADS);
        self.go(kernel, n);
    }

    /// The removal of a page is done.
    pub(crate) fn note_removed(&mut self, page: u64) {
        self.truth.remove(&page);
    }

    fn go(&mut self, kernel: &mut Kernel, n: usize) {
        if self.threads[n].left == 0 || kernel.sleeps(n) {
            return;
        }
        let came_on = match &self.threads[n].act {
            Act::Ready => {
                self.begin(kernel, n);
                true
            }
            &Act::Touch(page, value) => self.touch(kernel, n, page, value),
            Act::Remove | Act::Change => {
                let resumed = self.dice.below(3) > 0 && kernel.resume(n);
                let removes = matches!(self.threads[n].act, Act::Remove);
                let over = resumed && !(removes && kernel.removes().is_some());
                if over {
                    self.end(n);
                }
                over
            }
        };
        if came_on {
            self.threads[n].moved = self.now;
        }
    }

    fn end(&mut self, n: usize) {
        self.threads[n].act = Act::Ready;
        self.threads[n].left -= 1;
    }

    fn begin(&mut self, kernel: &mut Kernel, n: usize) {
        let left = self.threads[n].left;
        let page = match left as u64 {
            // At the end each thread reads its share of all.
            left if left <= PAGES / THREADS as u64 + 1 => (left - 1) * THREADS as u64 + n as u64,
            _ => self.dice.below(PAGES),
        }
        .min(PAGES - 1);
        let ends = left as u64 <= PAGES / THREADS as u64 + 1;
        let address = PageAddr::containing(page * PAGE);
        self.threads[n].act = match self.dice.below(20) {
            0 if !ends => {
                let range = address.get()..(page + 1 + self.dice.below(8)).min(PAGES) * PAGE;
                if !kernel.remove(n, range.clone()) {
                    return;
                }
                self.tell(format!("thread {n} removes {range:x?}"));
                Act::Remove
            }
            1..=3 if !ends => return self.change_rooms(kernel, n),
            4..=7 if !ends => {
                let number = self.dice.place(ROOMS);
                if !kernel.is_mapped(number).0 {
                    return;
                }
                let page = FIRST_ROOM + number as u64 * ROOM_PAGES + self.dice.below(ROOM_PAGES);
                let value = (self.dice.below(2) == 0).then(|| self.dice.bits());
                Act::Touch(PageAddr::containing(page * PAGE), value)
            }
            8..=12 if !ends => Act::Touch(address, Some(self.dice.bits())),
            _ => Act::Touch(address, None),
        };
    }

    /// A thread maps, unmaps or moves a room in which no other thread is at work.
    fn change_rooms(&mut self, kernel: &mut Kernel, n: usize) {
        let (from, to) = (self.dice.place(ROOMS), self.dice.place(ROOMS));
        let free = |number: usize| {
            let touched = self.threads.iter().any(|thread| match thread.act {
                Act::Touch(page, _) => room(number).contains(&page.get()),
                _ => false,
            });
            !touched && !kernel.is_occupied(number)
        };
        if !free(from) || !free(to) {
            return;
        }
        match (kernel.is_mapped(from), kernel.is_mapped(to)) {
            ((false, _), _) => {
                self.tell(format!("thread {n} maps room {from}"));
                kernel.map(from);
            }
            ((true, true), (false, _)) => {
                self.tell(format!("thread {n} moves room {from} to room {to}"));
                kernel.remap(n, from, to);
                let mut truth = self.truth.split_off(&room(from).start);
                let mut rest = truth.split_off(&room(from).end);
                self.truth.append(&mut rest);
                let by = |address| address - room(from).start + room(to).start;
                self.truth.extend(truth.into_iter().map(|(address, page)| (by(address), page)));
            }
            _ if self.dice.below(3) == 0 => {
                self.tell(format!("thread {n} unmaps room {from}"));
                kernel.unmap(n, from);
                self.truth.retain(|address, _| !room(from).contains(address));
            }
            _ => return,
        }
        self.threads[n].act = Act::Change;
    }

    fn touch(&mut self, kernel: &mut Kernel, n: usize, page: PageAddr, value: Option<u64>) -> bool {
        let removed = kernel.removes().is_some_and(|range| range.contains(&page.get()));
        if removed {
            // What another thread removes is left alone: nobody could say what it must hold.
            return false;
        }
        let truth = self.truth.entry(page.get()).or_insert_with(zeros);
        let Some(bytes) = kernel.touch(n, page, value.is_some()) else { return false };
        assert!(*bytes == *truth, "thread {n} finds wrong bytes in page {:#x}", page.get());
        if let Some(value) = value {
            let at = (value % (PAGE / 8)) as usize * 8;
            // Some pages become zeros again.
            let zero = value >> 60 == 0;
            if zero {
                bytes.fill(0);
            } else {
                bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
            truth.copy_from_slice(bytes);
        }
        self.tell(format!("thread {n} touches {:#x}, writes: {}", page.get(), value.is_some()));
        self.end(n);
        true
    }
}
