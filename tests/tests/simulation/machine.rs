//! The machine on which the program runs: processes, each with its address space in the model kernel and threads, which may come on whenever the pager asks the
//! kernel for something.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

use gms_pager::kernel::{
    Event, Faults, Installed, Messages, Occupant, Occupied, PageTables, Probe, ReadError,
    Registration,
};
use gms_pager::page_map::PAGE;
use gms_pager::range_set::RangeSet;
use gms_pager::space::Space;
use gms_pager::victims::{Evicted, MovedPages, Sweep};
use gms_policy::ids::{PageAddr, SpaceId};
use gms_tests::Dice;
use nix::errno::Errno;
use nix::sys::eventfd::EventFd;

use crate::kernel::{Kernel, Page, Told};
use crate::program::Program;
use crate::workers::{self, Watch};

/// Of so many calls of the pager one finds that something has happened just before.
const INTERRUPTED: u64 = 6;
/// Of so many moments in which a page could be removed one is used, of what the pager knew is being removed when it died.
const SLOW_REMOVAL: u64 = 400;
/// Pages that the outbox holds: of two batches.
const OUTBOX: u32 = 16;

/// Processes that there are at most, with those that have ended.
pub(crate) const PROCESSES_MAX: usize = 5;

/// A process, and what outlives the pager of what it had of it: the memory into which its events are read, and the outbox.
pub(crate) struct Task {
    pub kernel: Kernel,
    pub program: Program,
    journal: Journal,
    outbox: BTreeMap<u32, Page>,
    /// Of so many moments in which a page could be removed one is used.
    removal_pace: u64,
    /// Never readable: whether there is anything to read is asked.
    event: Arc<EventFd>,
}

impl Task {
    fn new(kernel: Kernel, program: Program) -> Task {
        let event = Arc::new(EventFd::new().expect("a descriptor"));
        let (journal, outbox) = (Journal::default(), BTreeMap::new());
        Task { kernel, program, journal, outbox, removal_pace: 1, event }
    }
}

/// See the module's documentation.
pub(crate) struct Machine {
    /// By number. The first is the program that was started.
    pub tasks: Vec<Task>,
    /// Calls of the pager before which something happened.
    pub interrupted: u64,
    /// What went wrong, for a failure.
    pub story: Vec<String>,
    /// Calls of the pager after which it dies at the first such moment.
    pub dies: Option<(u64, Moment)>,
    /// Draws to whom signals come; without them none do.
    pub signals: Option<Dice>,
    dice: Dice,
}

/// Events that are not applied, and their generation.
#[derive(Default)]
pub(crate) struct Journal {
    generation: u64,
    told: Vec<Told>,
    /// The name that the pager has given the process's memory.
    space: Option<SpaceId>,
}

/// What a pager that has died had of a process.
pub(crate) struct Left {
    pub number: usize,
    pub space: SpaceId,
    /// What it had read and not applied.
    pub told: Vec<Told>,
}

impl Left {
    /// Children of whose birth was read.
    pub(crate) fn children(&self) -> impl Iterator<Item = usize> + '_ {
        self.told.iter().filter_map(|told| match told {
            Told::Fork(child) => Some(*child),
            Told::Changed(_) | Told::Remove(_) => None,
        })
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
        let tasks = vec![Task::new(Kernel::default(), program)];
        Machine { tasks, interrupted: 0, story: Vec::new(), dies: None, signals: None, dice }
    }

    /// Signals will come, to some threads without end, when another pager goes on.
    pub(crate) fn have_signals(&mut self, mut dice: Dice) {
        self.programs().for_each(|program| program.harry(&mut dice));
        self.signals = Some(dice);
    }

    /// A signal comes to a thread of a process that sleeps, if any does.
    fn signal(&mut self, number: usize) {
        let Task { kernel, program, .. } = &mut self.tasks[number];
        if let (Some(dice), asleep @ [_, ..]) = (&mut self.signals, &kernel.asleep()[..])
            && program.is_signalled
        {
            kernel.signal(asleep[dice.place(asleep.len())]);
        }
    }

    /// A moment in which everybody may come on.
    pub(crate) fn step(&mut self) {
        for number in 0..self.tasks.len() {
            if self.dice.below(4) == 0 {
                self.remove_next(number);
            }
            if self.dice.below(3) == 0 {
                self.tell(number);
            }
            self.come_on(number, Program::step);
        }
    }

    /// Threads of a process come on.
    fn come_on(&mut self, number: usize, step: impl Fn(&mut Program, &mut Kernel)) {
        let next = Some(self.tasks.len()).filter(|&next| next < PROCESSES_MAX);
        let Task { kernel, program, .. } = &mut self.tasks[number];
        program.next_child = next;
        step(program, kernel);
        let (born, let_go) = (program.born.take(), std::mem::take(&mut program.let_go));
        self.tasks.extend(born.map(|born| {
            let (kernel, mut program) = *born;
            self.signals.iter_mut().for_each(|dice| program.harry(dice));
            Task::new(kernel, program)
        }));
        let_go.into_iter().for_each(|child| self.tasks[child].program.held = false);
    }

    /// Some thread of a process tells of its change. If that is a birth, the child may have or not what was told to be removed before, and is not applied.
    fn tell(&mut self, number: usize) {
        let Task { kernel, journal, .. } = &mut self.tasks[number];
        let Some(child) = kernel.tell(&mut self.dice) else { return };
        let told = journal.told.iter().filter_map(|told| match told {
            Told::Remove(range) => Some(range.clone()),
            Told::Changed(_) | Told::Fork(_) => None,
        });
        let removed: Vec<Range<u64>> = told.chain(kernel.removes_told()).collect();
        let Task { kernel, program, .. } = &mut self.tasks[child];
        for page in removed.into_iter().flat_map(|range| range.step_by(PAGE as usize)) {
            if kernel.is_empty(PageAddr::containing(page)) {
                program.deniable.insert(page..page + PAGE);
            }
        }
    }

    fn remove_next(&mut self, number: usize) {
        if self.dice.below(self.tasks[number].removal_pace) == 0 {
            self.remove_to(number, 0);
        }
    }

    /// What is being removed goes up to this page, and at least one.
    fn remove_to(&mut self, number: usize, last: u64) {
        let Task { kernel, program, removal_pace, .. } = &mut self.tasks[number];
        while let Some(page) = kernel.remove_next() {
            program.note_removed(page);
            if page >= last {
                break;
            }
        }
        if kernel.removes_as_told().is_none() {
            *removal_pace = 1;
        }
    }

    /// The pager has died. What it was told is being removed is often not gone before the next one serves, and signals come, if they do, until that one has proved
    /// that it is.
    pub(crate) fn begin_succession(&mut self) {
        for task in &mut self.tasks {
            if task.kernel.removes_as_told().is_some() {
                task.removal_pace = SLOW_REMOVAL;
            }
            task.program.is_signalled = self.signals.is_some();
        }
    }

    /// All is proved.
    pub(crate) fn end_signals(&mut self) {
        self.programs().for_each(|program| program.is_signalled = false);
    }

    /// The worst moment for a page to be removed is just before something is done about it.
    fn remove_before(&mut self, number: usize, page: u64) {
        let removed = self.tasks[number].kernel.removes_now();
        if removed.is_some_and(|range| range.contains(&page)) && self.dice.below(4) == 0 {
            self.remove_to(number, page);
        }
    }

    /// What happens between two calls of the pager.
    fn interrupt(&mut self) {
        if self.dice.below(INTERRUPTED) == 0 {
            self.interrupted += 1;
            let count = self.tasks.len();
            let number = if count > 1 { self.dice.place(count) } else { 0 };
            self.signal(number);
            match self.dice.below(4) {
                0 => self.remove_next(number),
                1 => self.tell(number),
                _ => self.come_on(number, Program::step_of_one),
            }
        }
    }

    /// What a pager that has died had; in the tables a process's journal has the generation that `applied` tells.
    pub(crate) fn take_up(&mut self, applied: impl Fn(u32) -> u64) -> Vec<Left> {
        let left = self.tasks.iter_mut().enumerate().filter_map(|(number, task)| {
            let (journal, generation) = (&mut task.journal, applied(number as u32));
            if std::mem::replace(&mut journal.generation, generation) != generation {
                journal.told.clear();
            }
            Some(Left { number, space: journal.space?, told: journal.told.clone() })
        });
        left.collect()
    }

    // ---- all processes

    fn programs(&mut self) -> impl Iterator<Item = &mut Program> {
        self.tasks.iter_mut().map(|task| &mut task.program)
    }

    /// The time.
    pub(crate) fn set_now(&mut self, now: Instant) {
        self.programs().for_each(|program| program.now = now);
    }

    /// Each thread is to make so many steps.
    pub(crate) fn run(&mut self, steps: usize) {
        self.programs().for_each(|program| program.run(steps));
    }

    /// The threads of each process are to read all of its pages, and nothing else.
    pub(crate) fn run_last(&mut self) {
        self.programs().for_each(Program::run_last);
    }

    /// Threads without steps left go on, with rests between them.
    pub(crate) fn amble(&mut self) {
        self.programs().for_each(|program| program.ambles = true);
    }

    /// Nobody is blamed for what was before.
    pub(crate) fn excuse(&mut self) {
        self.programs().for_each(Program::excuse);
    }

    /// Whether all threads have made their steps, and are at nothing.
    pub(crate) fn is_over(&self) -> bool {
        self.tasks.iter().all(|task| task.program.is_over())
    }

    /// Whether any thread can come on.
    pub(crate) fn is_busy(&self) -> bool {
        self.tasks.iter().any(|task| task.program.is_busy(&task.kernel))
    }

    /// The process and the thread that has not come on for longest although it should, and since when.
    pub(crate) fn laggard(&self) -> Option<((usize, usize), Instant)> {
        let laggards = self.tasks.iter().enumerate().filter_map(|(number, task)| {
            let (thread, moved) = task.program.laggard()?;
            Some(((number, thread), moved))
        });
        laggards.min_by_key(|(_, moved)| *moved)
    }

    /// Pages in memory.
    pub(crate) fn resident(&self) -> u64 {
        self.tasks.iter().map(|task| task.kernel.resident()).sum()
    }

    /// The last steps of all.
    pub(crate) fn log(&self) -> impl Iterator<Item = String> {
        let log = |(n, task): (usize, &Task)| {
            let steps = task.program.log.iter().map(move |step| format!("process {n}: {step}"));
            steps.collect::<Vec<String>>()
        };
        self.tasks.iter().enumerate().flat_map(log)
    }

    /// What everybody is at, for a failure.
    pub(crate) fn stand(&self) -> String {
        let stand = |task: &Task| format!("{:?}, {:?}", task.program, task.kernel);
        self.tasks.iter().map(stand).collect::<Vec<String>>().join("\n")
    }
}

/// A process of the machine, as the pager asks for things.
#[derive(Clone)]
pub(crate) struct Handle {
    machine: Arc<Mutex<Machine>>,
    pub number: usize,
    event: Arc<EventFd>,
    pub watch: Arc<Watch>,
}

/// The machine in a call of the pager, which is about one process.
struct Call<'a> {
    machine: MutexGuard<'a, Machine>,
    number: usize,
}

impl Deref for Call<'_> {
    type Target = Task;

    fn deref(&self) -> &Task {
        &self.machine.tasks[self.number]
    }
}

impl DerefMut for Call<'_> {
    fn deref_mut(&mut self) -> &mut Task {
        &mut self.machine.tasks[self.number]
    }
}

impl Handle {
    /// Of the program that was started.
    pub(crate) fn new(machine: Machine) -> Handle {
        let event = machine.tasks[0].event.clone();
        Handle { machine: Arc::new(Mutex::new(machine)), number: 0, event, watch: Arc::default() }
    }

    /// Of another process.
    pub(crate) fn of(&self, number: usize) -> Handle {
        let event = self.lock().tasks[number].event.clone();
        Handle { number, event, ..self.clone() }
    }

    /// Of the process whose memory a space is.
    pub(crate) fn of_space(&self, space: &Space) -> Handle {
        let fd = space.faults.as_fd().as_raw_fd();
        let is = |task: &Task| task.event.as_fd().as_raw_fd() == fd;
        let number = self.lock().tasks.iter().position(is);
        self.of(number.expect("a process"))
    }

    /// The process as it stands.
    pub(crate) fn task(&self) -> impl DerefMut<Target = Task> + '_ {
        Call { machine: self.lock(), number: self.number }
    }

    /// What is told, as the pager reads it.
    pub(crate) fn event(&self, told: &Told) -> Event {
        match told {
            Told::Changed(change) => Event::Changed(change.clone()),
            Told::Remove(range) => Event::Remove(range.clone()),
            Told::Fork(child) => Event::Fork(Box::new(self.of(*child))),
        }
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
    fn call(&self) -> Call<'_> {
        let now = self.task().program.now;
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
    fn call_alone(&self) -> Call<'_> {
        self.may_die(Moment::Any);
        let mut machine = self.lock();
        machine.interrupt();
        Call { machine, number: self.number }
    }

    fn install(
        &self,
        range: Range<u64>,
        wake: bool,
        mut one: impl FnMut(&mut Kernel, PageAddr) -> Installed,
    ) -> (u64, Installed) {
        let mut call = self.call();
        call.machine.remove_before(self.number, range.start);
        let kernel = &mut call.kernel;
        let mut outcome = Installed::Done;
        let mut at = range.start;
        while at < range.end && outcome == Installed::Done {
            outcome = one(kernel, PageAddr::containing(at));
            at += PAGE * u64::from(outcome == Installed::Done);
        }
        if wake {
            kernel.wake(&(range.start..at));
        }
        drop(call);
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
            let mut call = self.call_alone();
            let mut read = call.kernel.read(several);
            call.journal.told.extend(read.told.iter().cloned());
            drop(call);
            into.faults.append(&mut read.faults);
            into.events.extend(read.told.iter().map(|told| self.event(told)));
            if !read.told.is_empty() {
                self.may_die(Moment::Read);
            }
        }
        Ok(())
    }

    fn next_generation(&self) -> Option<(u32, u64)> {
        Some((self.number as u32, self.task().journal.generation + 1))
    }

    fn belongs_to(&self, space: SpaceId) {
        self.task().journal.space = Some(space);
    }

    fn take_left(&mut self) -> Vec<Event> {
        let told = self.task().journal.told.clone();
        told.iter().map(|told| self.event(told)).collect()
    }

    fn applied(&self) {
        if !self.task().journal.told.is_empty() {
            self.may_die(Moment::Applied);
        }
        let journal = &mut self.task().journal;
        journal.told.clear();
        journal.generation += 1;
    }

    fn has_event(&self) -> bool {
        self.call().kernel.has_event()
    }

    fn is_alive(&self) -> bool {
        !self.call().kernel.ended
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
        let mut call = self.call();
        call.machine.remove_before(self.number, range.start);
        let done = call.kernel.mark(&range, marked);
        drop(call);
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

    fn poison(&self, page: u64) -> Installed {
        self.call().kernel.poison(PageAddr::containing(page))
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
        let others = [kernel.marked(&range), kernel.poison_in(&range)];
        others.iter().flat_map(RangeSet::iter).for_each(|part| taken.insert(part));
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
    pub handle: Handle,
    /// Removals that were told, and are not known to be over.
    pub aging: bool,
    /// Pages that have perhaps moved, and are zeros then.
    pub zeros: Vec<u32>,
    /// Places of the outbox with pages.
    used: u32,
    dice: Dice,
}

impl Process {
    /// Perhaps there is something in the outbox.
    pub(crate) fn new(space: Arc<Space>, handle: Handle, dice: Dice) -> Process {
        Process {
            space,
            sweep: Sweep::default(),
            handle,
            aging: false,
            zeros: Vec::new(),
            used: OUTBOX,
            dice,
        }
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
        let task = self.handle.call();
        let is_left = |&place: &u32| task.outbox.contains_key(&place).then_some(place);
        Ok(MovedPages { places: places.iter().map(is_left).collect(), ..MovedPages::none(0) })
    }

    fn move_out(&mut self, pages: &[PageAddr]) -> Result<MovedPages, Errno> {
        let first = self.used;
        self.used = first + pages.len() as u32;
        let mut places = Vec::new();
        for (&page, place) in pages.iter().zip(first..) {
            // Now and then somebody has a page pinned.
            let pinned = self.dice.below(20) == 0;
            let mut task = self.handle.call();
            task.machine.remove_before(self.handle.number, page.get());
            let taken = (!pinned).then(|| task.kernel.take(page)).flatten();
            places.push(taken.map(|bytes| {
                task.outbox.insert(place, bytes);
                place
            }));
        }
        self.handle.may_die(Moment::Moved);
        Ok(MovedPages { places, ..MovedPages::none(0) })
    }

    fn read_outbox(&self, places: &[u32], into: &mut [&mut [u8]]) -> Result<(), Errno> {
        for (&place, frame) in places.iter().zip(into) {
            frame.copy_from_slice(&self.handle.task().outbox[&place]);
        }
        Ok(())
    }

    fn not_inherited(&self) -> Option<Vec<Range<u64>>> {
        Some(Vec::new())
    }

    fn ends(&self) -> bool {
        self.handle.task().kernel.ended
    }

    fn unanswered(&self, errno: Errno) -> String {
        format!("the model does not answer: {errno}")
    }

    fn look_again(&mut self) {
        self.sweep.ranges = RangeSet::default();
    }
}
