//! The program: threads that read and write pages, discard some, and map, unmap and move rooms; they check every byte that they read. Some fork: a child, which has
//! one thread, does the same with what it has inherited.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::time::{Duration, Instant};

use gms_pager::page_map::PAGE;
use gms_pager::range_set::RangeSet;
use gms_policy::ids::PageAddr;
use gms_tests::Dice;

use crate::kernel::{FIRST_ROOM, Kernel, PAGES, Page, ROOM_PAGES, ROOMS, room, zeros};

/// Threads of the program that was started.
const THREADS: usize = 5;
/// Steps of each thread while nothing is waited for.
pub(crate) const STEPS: usize = 120;
/// Steps of the thread of a child, and for how many of one that forks it is one.
const CHILD_STEPS: usize = 60;
const FORKS_IN: u64 = 60;
/// A child ends in one of so many of its steps.
const ENDS_IN: u64 = 100;
/// Of so many threads signals come to one without end, where they come at all.
const HARRIED_IN: u64 = 3;
/// Pages that there are at most.
const ALL_PAGES: usize = PAGES as usize + ROOMS * ROOM_PAGES as usize;
/// Longest rest of a thread that ambles.
const REST_US: u64 = 400_000;
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
    /// It has changed the address space; what it has moved has reached this room.
    Change(Option<usize>),
    /// It has borne the process of this number.
    Fork(usize),
}

struct Thread {
    act: Act,
    left: usize,
    /// Where signals come, they come to it without end: where it would sleep at a page it faults again and again, and it cannot be stopped there.
    harried: bool,
    /// When it came on last.
    moved: Instant,
    /// If it ambles, it begins nothing before this.
    rests_until: Instant,
}

impl Thread {
    fn new(left: usize, now: Instant) -> Thread {
        Thread { act: Act::Ready, left, harried: false, moved: now, rests_until: now }
    }
}

/// See the module's documentation.
pub(crate) struct Program {
    threads: Vec<Thread>,
    /// What every page must hold that is not zeros.
    truth: BTreeMap<u64, Page>,
    /// Pages of which a removal had begun when it was born, and of which nothing is known yet: zeros, or not.
    removed_or_not: BTreeSet<u64>,
    /// What was told to be removed before its birth was: the pager may not know whether it has that.
    pub deniable: RangeSet,
    dice: Dice,
    /// When it forks; it does not without them.
    pub forks: Option<Dice>,
    is_child: bool,
    /// It has ended because of a page that it has or not: nobody could know.
    pub was_denied: bool,
    /// Its parent's call has not returned yet.
    pub held: bool,
    /// Signals come now. They are not to make good a wake that is lost.
    pub is_signalled: bool,
    /// The number of the next process to be born, if one may be.
    pub next_child: Option<usize>,
    /// What has been born since it was looked, and children whose parent's call has returned since.
    pub born: Option<Box<(Kernel, Program)>>,
    pub let_go: Vec<usize>,
    start: Instant,
    /// Threads without steps left go on, with rests between them.
    pub ambles: bool,
    /// The steps that are left are the last ones: each thread reads its share of all pages.
    last: bool,
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
        let threads = (0..THREADS).map(|_| Thread::new(0, start)).collect();
        Program {
            threads,
            truth: BTreeMap::new(),
            removed_or_not: BTreeSet::new(),
            deniable: RangeSet::default(),
            dice,
            forks: None,
            is_child: false,
            was_denied: false,
            held: false,
            is_signalled: false,
            next_child: None,
            born: None,
            let_go: Vec::new(),
            start,
            ambles: false,
            last: false,
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

    /// What a child begins with. There is none once the last steps have begun.
    fn child(&mut self, kernel: &Kernel) -> Program {
        let mut bits = || self.forks.as_mut().map_or(0, Dice::bits);
        let (dice, forks) = (Dice::new(bits()), Dice::new(bits()));
        let removed = kernel.removes_as_told().cloned().unwrap_or_default().step_by(PAGE as usize);
        Program {
            threads: vec![Thread::new(CHILD_STEPS, self.now)],
            truth: self.truth.clone(),
            removed_or_not: self.removed_or_not.iter().copied().chain(removed).collect(),
            deniable: self.deniable.clone(),
            is_child: true,
            held: true,
            is_signalled: self.is_signalled,
            log: self.log.clone(),
            ambles: self.ambles,
            now: self.now,
            forks: Some(forks),
            ..Program::new(self.start, dice)
        }
    }

    /// If signals come, they come to some of the threads without end, or to none.
    pub(crate) fn harry(&mut self, dice: &mut Dice) {
        self.threads.iter_mut().for_each(|thread| thread.harried = dice.below(HARRIED_IN) == 0);
    }

    /// Each thread, and whether it can be seen that it removes nothing.
    pub(crate) fn are_outside(&self) -> Vec<(usize, bool)> {
        let is_outside = |thread: &Thread| match thread.act {
            Act::Remove => false,
            Act::Touch(..) => !(thread.harried && self.is_signalled),
            Act::Ready | Act::Change(_) | Act::Fork(_) => true,
        };
        self.threads.iter().map(is_outside).enumerate().collect()
    }

    /// Each thread is to make so many steps.
    pub(crate) fn run(&mut self, steps: usize) {
        self.ambles = false;
        self.excuse();
        self.threads.iter_mut().for_each(|thread| thread.left = steps);
    }

    /// Each thread is to read its share of all pages, and nothing else.
    pub(crate) fn run_last(&mut self) {
        self.last = true;
        self.run(ALL_PAGES.div_ceil(self.threads.len().max(1)));
    }

    /// Whether all threads have made their steps, and are at nothing.
    pub(crate) fn is_over(&self) -> bool {
        let is_over = |thread: &Thread| thread.left == 0 && matches!(thread.act, Act::Ready);
        self.threads.iter().all(is_over)
    }

    /// Whether any thread can come on.
    pub(crate) fn is_busy(&self, kernel: &Kernel) -> bool {
        !self.held && (0..self.threads.len()).any(|n| self.goes_on(n) && !kernel.sleeps(n))
    }

    fn goes_on(&self, n: usize) -> bool {
        let Thread { act, left, rests_until, .. } = &self.threads[n];
        *left > 0 || !matches!(act, Act::Ready) || self.ambles && *rests_until <= self.now
    }

    /// The thread that has not come on for longest although it should, and since when.
    pub(crate) fn laggard(&self) -> Option<(usize, Instant)> {
        let is_at = |thread: &Thread| thread.left > 0 || !matches!(thread.act, Act::Ready);
        let running = self.threads.iter().enumerate().filter(|(_, thread)| is_at(thread));
        running.map(|(n, thread)| (n, thread.moved)).min_by_key(|(_, moved)| *moved)
    }

    /// Nobody is blamed for what was before.
    pub(crate) fn excuse(&mut self) {
        self.threads.iter_mut().for_each(|thread| thread.moved = self.now);
    }

    /// Each thread comes on, if it can.
    pub(crate) fn step(&mut self, kernel: &mut Kernel) {
        (0..self.threads.len()).for_each(|n| self.go(kernel, n));
    }

    /// One thread does.
    pub(crate) fn step_of_one(&mut self, kernel: &mut Kernel) {
        if !self.threads.is_empty() {
            let n = self.dice.place(self.threads.len());
            self.go(kernel, n);
        }
    }

    /// The removal of a page is done.
    pub(crate) fn note_removed(&mut self, page: u64) {
        self.truth.remove(&page);
    }

    fn go(&mut self, kernel: &mut Kernel, n: usize) {
        let is_harried = self.threads.get(n).is_some_and(|thread| thread.harried);
        if is_harried && self.is_signalled && self.dice.below(2) == 0 {
            kernel.signal(n);
        }
        if self.held || kernel.ended || !self.goes_on(n) || kernel.sleeps(n) {
            return;
        }
        let came_on = match &self.threads[n].act {
            Act::Ready => {
                self.begin(kernel, n);
                true
            }
            &Act::Touch(page, value) => self.touch(kernel, n, page, value),
            Act::Remove | Act::Change(_) | Act::Fork(_) => {
                let resumed = self.dice.below(3) > 0 && kernel.resume(n);
                let removes = matches!(self.threads[n].act, Act::Remove);
                let over = resumed && !(removes && kernel.removes().is_some());
                if over {
                    if let Act::Fork(child) = self.threads[n].act {
                        self.let_go.push(child);
                    }
                    self.end(n);
                }
                over
            }
        };
        if let Some(thread) = self.threads.get_mut(n).filter(|_| came_on) {
            thread.moved = self.now;
        }
    }

    fn end(&mut self, n: usize) {
        self.threads[n].act = Act::Ready;
        self.threads[n].left = self.threads[n].left.saturating_sub(1);
    }

    fn begin(&mut self, kernel: &mut Kernel, n: usize) {
        if self.last {
            return self.begin_last(kernel, n);
        }
        if self.threads[n].left == 0 {
            let rest = Duration::from_micros(self.dice.below(REST_US));
            self.threads[n].rests_until = self.now + rest;
        }
        if self.forks_or_ends(kernel, n) {
            return;
        }
        let page = self.dice.below(PAGES);
        let address = PageAddr::containing(page * PAGE);
        self.threads[n].act = match self.dice.below(20) {
            0 => {
                let range = address.get()..(page + 1 + self.dice.below(8)).min(PAGES) * PAGE;
                if !kernel.remove(n, range.clone()) {
                    return;
                }
                self.tell(format!("thread {n} removes {range:x?}"));
                Act::Remove
            }
            1..=3 => return self.change_rooms(kernel, n),
            4..=7 => {
                let number = self.dice.place(ROOMS);
                if !kernel.is_mapped(number).0 {
                    return;
                }
                let page = FIRST_ROOM + number as u64 * ROOM_PAGES + self.dice.below(ROOM_PAGES);
                let value = (self.dice.below(2) == 0).then(|| self.dice.bits());
                Act::Touch(PageAddr::containing(page * PAGE), value)
            }
            8..=12 => Act::Touch(address, Some(self.dice.bits())),
            13..=16 => Act::Touch(address, None),
            // What another thread is removing, if one is.
            _ => {
                let removed =
                    kernel.removes().cloned().unwrap_or(address.get()..address.get() + PAGE);
                let pages = (removed.end - removed.start) / PAGE;
                let at = removed.start + self.dice.below(pages) * PAGE;
                Act::Touch(PageAddr::containing(at), None)
            }
        };
    }

    /// Whether the thread forks, or has its process end.
    fn forks_or_ends(&mut self, kernel: &mut Kernel, n: usize) -> bool {
        let Some(dice) = &mut self.forks else { return false };
        if self.is_child && dice.below(ENDS_IN) == 0 {
            self.tell("it ends".into());
            self.threads.clear();
            kernel.end();
            return true;
        }
        let child = self.next_child.filter(|_| dice.below(FORKS_IN) == 0);
        let Some((child, inherited)) =
            child.and_then(|child| Some((child, kernel.fork(n, child)?)))
        else {
            return false;
        };
        self.tell(format!("thread {n} bears process {child}"));
        self.next_child = None;
        self.born = Some(Box::new((inherited, self.child(kernel))));
        self.threads[n].act = Act::Fork(child);
        true
    }

    /// Reads the next page of the thread's share.
    fn begin_last(&mut self, kernel: &Kernel, n: usize) {
        let number = (self.threads[n].left - 1) * self.threads.len() + n;
        let in_rooms = number.checked_sub(PAGES as usize);
        let page = in_rooms.map_or(number as u64, |number| FIRST_ROOM + number as u64);
        let is_there = in_rooms.is_none_or(|at| {
            at < ROOMS * ROOM_PAGES as usize && kernel.is_mapped(at / ROOM_PAGES as usize).0
        });
        match is_there {
            true => self.threads[n].act = Act::Touch(PageAddr::containing(page * PAGE), None),
            false => self.end(n),
        }
    }

    /// A thread maps, unmaps or moves a room in which no other thread is at work. To where another moves one is not known before its call returns.
    fn change_rooms(&mut self, kernel: &mut Kernel, n: usize) {
        let (from, to) = (self.dice.place(ROOMS), self.dice.place(ROOMS));
        let free = |number: usize| {
            let used = self.threads.iter().any(|thread| match thread.act {
                Act::Touch(page, _) => room(number).contains(&page.get()),
                Act::Change(reached) => reached == Some(number),
                Act::Ready | Act::Remove | Act::Fork(_) => false,
            });
            !used && !kernel.is_occupied(number)
        };
        if !free(from) || !free(to) {
            return;
        }
        let mut reached = None;
        match (kernel.is_mapped(from), kernel.is_mapped(to)) {
            ((false, _), _) => {
                self.tell(format!("thread {n} maps room {from}"));
                kernel.map(from);
            }
            ((true, true), (false, _)) => {
                self.tell(format!("thread {n} moves room {from} to room {to}"));
                kernel.remap(n, from, to);
                reached = Some(to);
                let mut truth = self.truth.split_off(&room(from).start);
                let mut rest = truth.split_off(&room(from).end);
                self.truth.append(&mut rest);
                let by = |address| address - room(from).start + room(to).start;
                self.truth.extend(truth.into_iter().map(|(address, page)| (by(address), page)));
            }
            ((true, true), _) if self.dice.below(24) == 0 => {
                self.tell(format!("thread {n} may not unmap room {from}"));
                kernel.refuse(n, from);
            }
            _ if self.dice.below(3) == 0 => {
                self.tell(format!("thread {n} unmaps room {from}"));
                kernel.unmap(n, from);
                self.truth.retain(|address, _| !room(from).contains(address));
            }
            _ => return,
        }
        self.threads[n].act = Act::Change(reached);
    }

    fn touch(&mut self, kernel: &mut Kernel, n: usize, page: PageAddr, value: Option<u64>) -> bool {
        let removed = kernel.removes().is_some_and(|range| range.contains(&page.get()));
        if removed && value.is_some() {
            // Nobody could say what it must hold then.
            return false;
        }
        if kernel.is_poisoned(page) {
            self.tell(format!("thread {n} gets SIGBUS at {:#x}", page.get()));
            let deniable = self.deniable.contains(page.get());
            assert!(deniable, "process without page {:#x}, which it has", page.get());
            self.threads.clear();
            kernel.end();
            self.was_denied = true;
            return false;
        }
        let truth = self.truth.entry(page.get()).or_insert_with(zeros);
        let Some(bytes) = kernel.touch(n, page, value.is_some()) else { return false };
        let perhaps = self.removed_or_not.remove(&page.get());
        if (removed || perhaps) && bytes.iter().all(|&byte| byte == 0) {
            // From the call on, and for good.
            truth.fill(0);
        }
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
