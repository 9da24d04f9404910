//! The machine on which the program runs: the model kernel, and the program's threads, which may come on whenever the pager asks the kernel for something.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use gms_pager::kernel::{
    Event, Faults, Installed, Messages, Occupant, Occupied, PageTables, Probe, ReadError,
    Registration,
};
use gms_pager::page_map::PAGE;
use gms_pager::range_set::RangeSet;
use gms_pager::space::Space;
use gms_pager::victims::{Evicted, MovedPages, Sweep};
use gms_policy::ids::PageAddr;
use gms_tests::Dice;
use nix::errno::Errno;
use nix::sys::eventfd::EventFd;

use crate::kernel::{Kernel, Page};
use crate::program::Program;
use crate::workers::{self, Watch};

/// Of so many calls of the pager one finds that something has happened just before.
const INTERRUPTED: u64 = 6;
/// Pages that the outbox holds: of two batches.
const OUTBOX: u32 = 16;

/// See the module's documentation.
pub(crate) struct Machine {
    pub kernel: Kernel,
    pub program: Program,
    /// Calls of the pager before which something happened.
    pub interrupted: u64,
    /// What went wrong, for a failure.
    pub story: Vec<String>,
    /// What outlives the pager: the memory into which its events are read, and the outbox.
    pub journal: Journal,
    outbox: BTreeMap<u32, Page>,
    /// Calls of the pager after which it dies at the first such moment.
    pub dies: Option<(u64, Moment)>,
    dice: Dice,
}

/// Events that are not applied, and their generation.
#[derive(Default)]
pub(crate) struct Journal {
    pub generation: u64,
    pub events: Vec<Event>,
}

impl Journal {
    /// What of them is not applied, for whose tables have this generation.
    pub(crate) fn take_up(&mut self, generation: u64) -> Vec<Event> {
        if std::mem::replace(&mut self.generation, generation) != generation {
            self.events.clear();
        }
        self.events.iter().map(copy).collect()
    }
}

fn copy(event: &Event) -> Event {
    match event {
        Event::Changed(change) => Event::Changed(change.clone()),
        Event::Remove(range) => Event::Remove(range.clone()),
        Event::Fork(_) => unreachable!("the program does not fork"),
    }
}

/// With which the pager unwinds when it dies.
pub(crate) struct Death;

/// When it does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Moment {
    /// In any call.
    Any,
    /// It has read of a change.
    Read,
    /// All that it has read is applied, and the journal does not say so.
    Applied,
    /// Pages are in the outbox.
    Moved,
    /// A marker was left or taken away.
    Marked,
    /// Pages were installed.
    Installed,
}

pub(crate) const MOMENTS: [Moment; 6] =
    [Moment::Any, Moment::Read, Moment::Applied, Moment::Moved, Moment::Marked, Moment::Installed];

impl Machine {
    pub(crate) fn new(program: Program, dice: Dice) -> Machine {
        let kernel = Kernel::default();
        let (journal, outbox) = (Journal::default(), BTreeMap::new());
        let story = Vec::new();
        Machine { kernel, program, interrupted: 0, story, journal, outbox, dies: None, dice }
    }

    /// A moment in which everybody may come on.
    pub(crate) fn step(&mut self) {
        if self.dice.below(4) == 0 {
            self.remove_next();
        }
        if self.dice.below(3) == 0 {
            self.kernel.tell(&mut self.dice);
        }
        self.program.step(&mut self.kernel);
    }

    /// What everybody is at, for a failure.
    pub(crate) fn stand(&self) -> String {
        format!("{:?}, {:?}", self.program, self.kernel)
    }

    fn remove_next(&mut self) {
        if let Some(page) = self.kernel.remove_next() {
            self.program.note_removed(page);
        }
    }

    /// What happens between two calls of the pager.
    fn interrupt(&mut self) {
        if self.dice.below(INTERRUPTED) == 0 {
            self.interrupted += 1;
            match self.dice.below(4) {
                0 => self.remove_next(),
                1 => self.kernel.tell(&mut self.dice),
                _ => self.program.step_of_one(&mut self.kernel),
            }
        }
    }
}

/// The machine, as the pager asks for things.
#[derive(Clone)]
pub(crate) struct Handle {
    machine: Arc<Mutex<Machine>>,
    /// Never readable: whether there is anything to read is asked.
    event: Arc<EventFd>,
    pub watch: Arc<Watch>,
}

impl Handle {
    pub(crate) fn new(machine: Machine) -> Handle {
        let event = Arc::new(EventFd::new().expect("a descriptor"));
        Handle { machine: Arc::new(Mutex::new(machine)), event, watch: Arc::default() }
    }

    /// The machine as it stands.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same, unless somebody has it.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, Machine>> {
        match self.machine.try_lock() {
            Ok(machine) => Some(machine),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Something may happen before the pager's call, and a worker have its turn.
    fn call(&self) -> MutexGuard<'_, Machine> {
        let now = self.lock().program.now;
        workers::come_between(now);
        self.call_alone()
    }

    /// The pager dies here, if it is time.
    fn may_die(&self, moment: Moment) {
        let mut machine = self.lock();
        let Some((calls, at)) = &mut machine.dies else { return };
        *calls = calls.saturating_sub(1);
        if *calls == 0 && [moment, Moment::Any].contains(at) {
            machine.dies = None;
            drop(machine);
            resume_unwind(Box::new(Death));
        }
    }

    /// The same without workers.
    fn call_alone(&self) -> MutexGuard<'_, Machine> {
        self.may_die(Moment::Any);
        let mut machine = self.lock();
        machine.interrupt();
        machine
    }

    fn install(
        &self,
        range: Range<u64>,
        wake: bool,
        mut one: impl FnMut(&mut Kernel, PageAddr) -> Installed,
    ) -> (u64, Installed) {
        let mut machine = self.call();
        let kernel = &mut machine.kernel;
        let mut outcome = Installed::Done;
        let mut at = range.start;
        while at < range.end && outcome == Installed::Done {
            outcome = one(kernel, PageAddr::containing(at));
            at += PAGE * u64::from(outcome == Installed::Done);
        }
        if wake {
            kernel.wake(&(range.start..at));
        }
        drop(machine);
        self.may_die(Moment::Installed);
        ((at - range.start) / PAGE, outcome)
    }
}

impl AsFd for Handle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl Faults for Handle {
    fn read(&self, several: bool, into: &mut Messages) -> Result<(), ReadError> {
        if !self.watch.note_read() {
            let before = into.events.len();
            let mut machine = self.call_alone();
            machine.kernel.read(several, into);
            machine.journal.events.extend(into.events[before..].iter().map(copy));
            drop(machine);
            if into.events.len() > before {
                self.may_die(Moment::Read);
            }
        }
        Ok(())
    }

    fn next_generation(&self) -> Option<(u32, u64)> {
        Some((0, self.lock().journal.generation + 1))
    }

    fn applied(&self) {
        if !self.lock().journal.events.is_empty() {
            self.may_die(Moment::Applied);
        }
        let journal = &mut self.lock().journal;
        journal.events.clear();
        journal.generation += 1;
    }

    fn has_event(&self) -> bool {
        self.call().kernel.has_event()
    }

    fn is_alive(&self) -> bool {
        true
    }

    fn register(&self, range: Range<u64>) -> bool {
        self.call().kernel.register(&range);
        true
    }

    fn register_outbox(&self, _: Range<u64>) -> bool {
        false
    }

    fn unregister(&self, range: Range<u64>) -> bool {
        self.call().kernel.unregister(&range);
        true
    }

    fn registration(&self, range: Range<u64>) -> Registration {
        self.call().kernel.registration(&range)
    }

    fn mark(&self, range: Range<u64>, marked: bool) -> Result<(), Errno> {
        let done = self.call().kernel.mark(&range, marked);
        self.may_die(Moment::Marked);
        done
    }

    fn probe(&self, page: u64) -> Probe {
        self.call().kernel.probe(PageAddr::containing(page))
    }

    fn wake(&self, range: Range<u64>) {
        self.call().kernel.wake(&range);
    }

    fn copy_run(&self, range: Range<u64>, bytes: &[u8], wake: bool) -> (u64, Installed) {
        self.watch.note_install();
        let mut pages = bytes.chunks_exact(PAGE as usize);
        self.install(range, wake, |kernel, page| {
            kernel.copy(page, pages.next().expect("bytes for each page"))
        })
    }

    fn zero(&self, range: Range<u64>) -> (u64, Installed) {
        self.install(range, true, Kernel::zero)
    }

    fn poison(&self, _: u64) -> Installed {
        Installed::Gone
    }
}

impl PageTables for Handle {
    fn occupied(
        &self,
        range: Range<u64>,
        pages_max: u64,
        into: &mut Vec<Occupied>,
    ) -> Result<u64, Errno> {
        let mut left = if pages_max == 0 { u64::MAX } else { pages_max };
        for part in self.call().kernel.present(&range).iter() {
            let end = part.end.min(part.start.saturating_add(left.saturating_mul(PAGE)));
            into.push(Occupied { range: part.start..end, by: Occupant::Present });
            left -= (end - part.start) / PAGE;
            if left == 0 {
                return Ok(end);
            }
        }
        Ok(range.end)
    }

    fn marked(&self, range: Range<u64>) -> Result<RangeSet, Errno> {
        Ok(self.call().kernel.marked(&range))
    }

    fn taken(&self, range: Range<u64>) -> Result<RangeSet, Errno> {
        let kernel = &self.call().kernel;
        let mut taken = kernel.present(&range);
        kernel.marked(&range).iter().for_each(|part| taken.insert(part));
        Ok(taken)
    }

    fn is_anonymous(&self, address: u64) -> bool {
        self.call().kernel.is_there(address)
    }
}

/// The program's process, as pages are moved out of it.
pub(crate) struct Process {
    pub space: Arc<Space>,
    pub sweep: Sweep,
    handle: Handle,
    /// Places of the outbox with pages.
    used: u32,
    dice: Dice,
}

impl Process {
    /// Perhaps there is something in the outbox.
    pub(crate) fn new(space: Arc<Space>, handle: Handle, dice: Dice) -> Process {
        Process { space, sweep: Sweep::default(), handle, used: OUTBOX, dice }
    }
}

impl Evicted for Process {
    fn space(&self) -> &Arc<Space> {
        &self.space
    }

    fn sweep(&mut self) -> &mut Sweep {
        &mut self.sweep
    }

    fn make_way(&mut self, count: usize) -> Result<(), Errno> {
        if self.used + count as u32 > OUTBOX {
            self.handle.call().outbox.clear();
            self.used = 0;
        }
        Ok(())
    }

    fn next_place(&self) -> u32 {
        self.used
    }

    fn find_left(&self, places: &[u32]) -> Result<MovedPages, Errno> {
        let machine = self.handle.call();
        let is_left = |&place: &u32| machine.outbox.contains_key(&place).then_some(place);
        Ok(MovedPages { places: places.iter().map(is_left).collect(), ..MovedPages::none(0) })
    }

    fn move_out(&mut self, pages: &[PageAddr]) -> Result<MovedPages, Errno> {
        let first = self.used;
        self.used = first + pages.len() as u32;
        let mut places = Vec::new();
        for (&page, place) in pages.iter().zip(first..) {
            // Now and then somebody has a page pinned.
            let pinned = self.dice.below(20) == 0;
            let machine = &mut *self.handle.call();
            let taken = (!pinned).then(|| machine.kernel.take(page)).flatten();
            places.push(taken.map(|bytes| {
                machine.outbox.insert(place, bytes);
                place
            }));
        }
        self.handle.may_die(Moment::Moved);
        Ok(MovedPages { places, ..MovedPages::none(0) })
    }

    fn read_outbox(&self, places: &[u32], into: &mut [&mut [u8]]) -> Result<(), Errno> {
        for (&place, frame) in places.iter().zip(into) {
            frame.copy_from_slice(&self.handle.lock().outbox[&place]);
        }
        Ok(())
    }

    fn not_inherited(&self) -> Option<Vec<Range<u64>>> {
        Some(Vec::new())
    }

    fn ends(&self) -> bool {
        false
    }

    fn unanswered(&self, errno: Errno) -> String {
        format!("the model does not answer: {errno}")
    }

    fn look_again(&mut self) {
        self.sweep.ranges = RangeSet::default();
    }
}
