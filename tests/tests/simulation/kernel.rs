//! A model of the kernel, as far as the pager can tell: the pages of one address space, their markers, faults, removals, and rooms that are mapped,
//! unmapped and moved about; and its forks. Of several threads' changes the later may be told first.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::ops::Range;

use gms_pager::kernel::{Installed, PageFault, Probe, Registration};
use gms_pager::page_map::PAGE;
use gms_pager::range_set::RangeSet;
use gms_pager::tables::{Change, Remap};
use gms_policy::ids::PageAddr;
use gms_tests::Dice;
use nix::errno::Errno;

/// Bytes of a page.
pub(crate) type Page = Vec<u8>;

/// A page of zeros.
pub(crate) fn zeros() -> Page {
    vec![0; PAGE as usize]
}

/// Pages of the program's main memory, which stays.
pub(crate) const PAGES: u64 = 96;
const MAIN: Range<u64> = 0..PAGES * PAGE;
/// Rooms, each of so many pages, the first behind so many others.
pub(crate) const ROOMS: usize = 8;
pub(crate) const ROOM_PAGES: u64 = 8;
pub(crate) const FIRST_ROOM: u64 = 1 << 12;

/// The addresses of a room.
pub(crate) fn room(number: usize) -> Range<u64> {
    let start = (FIRST_ROOM + number as u64 * ROOM_PAGES) * PAGE;
    start..start + ROOM_PAGES * PAGE
}

/// The id by which a thread tells of its faults.
pub(crate) fn tid(thread: usize) -> i32 {
    1 + thread as i32
}

/// What is told of a change.
#[derive(Clone, Debug)]
pub(crate) enum Told {
    Changed(Change),
    Remove(Range<u64>),
    /// The process of this number has been born.
    Fork(usize),
}

/// What was read.
#[derive(Default)]
pub(crate) struct Read {
    pub faults: Vec<PageFault>,
    pub told: Vec<Told>,
}

/// A thread that sleeps until what it changes has been read. Nothing may be installed or moved before it runs again.
struct Changer {
    thread: usize,
    /// What is still to be read, in order. The first can be read once it is told.
    events: VecDeque<Told>,
    told: bool,
    /// What it is about to remove.
    removes: Option<Range<u64>>,
}

/// What is known of a room.
#[derive(Clone, Copy, Default, PartialEq)]
enum Room {
    #[default]
    Unmapped,
    Mapped,
    Registered,
}

/// See the module's documentation. Threads are numbers.
#[derive(Default)]
pub(crate) struct Kernel {
    memory: BTreeMap<PageAddr, Page>,
    markers: BTreeSet<PageAddr>,
    /// Pages of which whoever touches them gets SIGBUS.
    poisoned: BTreeSet<PageAddr>,
    /// Faults that have not been read.
    faults: VecDeque<PageFault>,
    /// Threads that sleep until a page is there or they are woken.
    sleepers: BTreeMap<PageAddr, BTreeSet<usize>>,
    rooms: [Room; ROOMS],
    /// What was taken out of the userfaultfd.
    unregistered: RangeSet,
    /// Until all of these has been read, nothing may be installed or moved.
    changers: Vec<Changer>,
    /// Threads whose events can be read, in the order in which they were told.
    told: VecDeque<usize>,
    /// A removal that has been read and is not done yet.
    removing: Option<Range<u64>>,
    /// The process has ended.
    pub ended: bool,
    /// Changes told before others that were made before.
    pub overtaken: u64,
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let changers = self.changers.iter().map(|c| (c.thread, c.told, c.events.len()));
        f.debug_struct("Kernel")
            .field("pages in memory", &self.memory.len())
            .field("asleep", &self.sleepers)
            .field("faults", &self.faults)
            .field("changers (thread, told, events left)", &changers.collect::<Vec<_>>())
            .field("removing", &self.removing)
            .field("unregistered", &self.unregistered)
            .finish()
    }
}

impl Kernel {
    // ---- of the program

    /// A thread touches a page: its bytes, or `None` if the thread sleeps now.
    pub(crate) fn touch(
        &mut self,
        thread: usize,
        page: PageAddr,
        write: bool,
    ) -> Option<&mut Page> {
        if !self.is_registered(page.get()) {
            // Nobody is asked.
            self.markers.remove(&page);
            return Some(self.memory.entry(page).or_insert_with(zeros));
        }
        if !self.memory.contains_key(&page) {
            self.faults.push_back(PageFault { page, write, tid: tid(thread) });
            self.sleepers.entry(page).or_default().insert(thread);
        }
        self.memory.get_mut(&page)
    }

    /// Whether whoever touches the page gets SIGBUS.
    pub(crate) fn is_poisoned(&self, page: PageAddr) -> bool {
        self.poisoned.contains(&page)
    }

    /// Whether a thread sleeps.
    pub(crate) fn sleeps(&self, thread: usize) -> bool {
        self.sleepers.values().any(|threads| threads.contains(&thread))
    }

    /// A signal comes to a thread. If it sleeps at a page, it faults again when it comes on, and what has not been read of it is told no more.
    pub(crate) fn signal(&mut self, thread: usize) {
        self.sleepers.retain(|_, threads| {
            threads.remove(&thread);
            !threads.is_empty()
        });
        self.faults.retain(|fault| fault.tid != tid(thread));
    }

    /// The threads that sleep.
    pub(crate) fn asleep(&self) -> Vec<usize> {
        self.sleepers.values().flatten().copied().collect()
    }

    /// A thread begins to remove a range (MADV_DONTNEED); false if another one's removal is under way.
    pub(crate) fn remove(&mut self, thread: usize, range: Range<u64>) -> bool {
        let free = self.removes().is_none();
        if free {
            self.change(thread, [Told::Remove(range.clone())], Some(range));
        }
        free
    }

    /// What is being removed.
    pub(crate) fn removes(&self) -> Option<&Range<u64>> {
        let begun = self.changers.iter().find_map(|changer| changer.removes.as_ref());
        begun.or(self.removing.as_ref())
    }

    /// What goes page by page now.
    pub(crate) fn removes_now(&self) -> Option<&Range<u64>> {
        self.removing.as_ref()
    }

    /// What is being removed of which has been read: whoever is forked now may have it or not.
    pub(crate) fn removes_as_told(&self) -> Option<&Range<u64>> {
        let told = self.changers.iter().filter(|changer| changer.events.is_empty());
        told.filter_map(|changer| changer.removes.as_ref()).next().or(self.removing.as_ref())
    }

    /// What is being removed of which has been told, whether or not it was read.
    pub(crate) fn removes_told(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let told = self.changers.iter().filter(|changer| changer.told || changer.events.is_empty());
        told.filter_map(|changer| changer.removes.clone()).chain(self.removing.clone())
    }

    /// Whether there is neither a page nor a marker.
    pub(crate) fn is_empty(&self, page: PageAddr) -> bool {
        !self.memory.contains_key(&page) && !self.markers.contains(&page)
    }

    fn change<const N: usize>(
        &mut self,
        thread: usize,
        events: [Told; N],
        removes: Option<Range<u64>>,
    ) {
        self.changers.push(Changer { thread, events: events.into(), told: false, removes });
    }

    /// A thread goes on if what it changes has been read: true then.
    pub(crate) fn resume(&mut self, thread: usize) -> bool {
        let Some(at) = self.changers.iter().position(|changer| changer.thread == thread) else {
            return true;
        };
        let read = self.changers[at].events.is_empty();
        if read {
            self.removing = self.changers.remove(at).removes.or(self.removing.take());
        }
        read
    }

    /// A thread forks: what the child, of this number, begins with. `None` while pages are being removed.
    pub(crate) fn fork(&mut self, thread: usize, number: usize) -> Option<Kernel> {
        if self.removing.is_some() {
            return None;
        }
        self.change(thread, [Told::Fork(number)], None);
        Some(Kernel {
            memory: self.memory.clone(),
            markers: self.markers.clone(),
            poisoned: self.poisoned.clone(),
            rooms: self.rooms,
            unregistered: self.unregistered.clone(),
            ..Kernel::default()
        })
    }

    /// The process ends.
    pub(crate) fn end(&mut self) {
        *self = Kernel { ended: true, overtaken: self.overtaken, ..Kernel::default() };
    }

    /// Whether anybody sleeps in the room.
    pub(crate) fn is_occupied(&self, number: usize) -> bool {
        self.sleepers.keys().any(|page| room(number).contains(&page.get()))
    }

    /// Whether the room is there, and whether it is registered.
    pub(crate) fn is_mapped(&self, number: usize) -> (bool, bool) {
        (self.rooms[number] != Room::Unmapped, self.rooms[number] == Room::Registered)
    }

    /// A thread maps the room, of which nothing is told.
    pub(crate) fn map(&mut self, number: usize) {
        self.rooms[number] = Room::Mapped;
    }

    /// A thread unmaps the room.
    pub(crate) fn unmap(&mut self, thread: usize, number: usize) {
        let range = room(number);
        self.memory.retain(|page, _| !range.contains(&page.get()));
        self.markers.retain(|page| !range.contains(&page.get()));
        self.poisoned.retain(|page| !range.contains(&page.get()));
        if std::mem::take(&mut self.rooms[number]) == Room::Registered {
            self.change(thread, [Told::Changed(Change::Unmap(range))], None);
        }
    }

    /// A thread is to unmap a registered room, of which is told, and may not.
    pub(crate) fn refuse(&mut self, thread: usize, number: usize) {
        self.change(thread, [Told::Changed(Change::Unmap(room(number)))], None);
    }

    /// A thread moves a registered room to where none is. It is told, too, that nothing is mapped any more where it was.
    pub(crate) fn remap(&mut self, thread: usize, from: usize, to: usize) {
        let remap = Remap { from: room(from).start, to: room(to).start, length: ROOM_PAGES * PAGE };
        let within = |page: &PageAddr| remap.source().contains(&page.get());
        let pages: Vec<PageAddr> = self.memory.keys().copied().filter(within).collect();
        for page in pages {
            let bytes = self.memory.remove(&page).unwrap_or_default();
            self.memory.insert(remap.moved(page), bytes);
        }
        for left in [&mut self.markers, &mut self.poisoned] {
            for marker in left.iter().copied().filter(within).collect::<Vec<PageAddr>>() {
                left.remove(&marker);
                left.insert(remap.moved(marker));
            }
        }
        self.rooms[to] = std::mem::take(&mut self.rooms[from]);
        let events = [Change::Remap(remap), Change::Unmap(remap.source())].map(Told::Changed);
        self.change(thread, events, None);
    }

    /// Some thread tells of its change; returns the process that is born, if it is a birth.
    pub(crate) fn tell(&mut self, dice: &mut Dice) -> Option<usize> {
        let untold = |&n: &usize| {
            let changer = &self.changers[n];
            !changer.told && !changer.events.is_empty()
        };
        let untold: Vec<usize> = (0..self.changers.len()).filter(untold).collect();
        if untold.is_empty() {
            return None;
        }
        let chosen = dice.place(untold.len());
        self.overtaken += u64::from(chosen > 0);
        let changer = &mut self.changers[untold[chosen]];
        changer.told = true;
        self.told.push_back(changer.thread);
        match changer.events.front() {
            Some(&Told::Fork(child)) => Some(child),
            _ => None,
        }
    }

    /// A page of the removal that is under way goes: its address.
    pub(crate) fn remove_next(&mut self) -> Option<u64> {
        let range = self.removing.as_mut()?;
        let page = PageAddr::containing(range.start);
        range.start += PAGE;
        if range.is_empty() {
            self.removing = None;
        }
        self.memory.remove(&page);
        self.markers.remove(&page);
        self.poisoned.remove(&page);
        Some(page.get())
    }

    // ---- of the pager

    /// Pages in memory.
    pub(crate) fn resident(&self) -> u64 {
        self.memory.len() as u64
    }

    /// What is mapped.
    pub(crate) fn mappings(&self) -> Vec<Range<u64>> {
        let rooms = (0..ROOMS).filter(|&n| self.rooms[n] != Room::Unmapped).map(room);
        std::iter::once(MAIN).filter(|_| !self.ended).chain(rooms).collect()
    }

    /// Whether a change has begun that has not been read, or whose thread has not run since.
    pub(crate) fn has_event(&self) -> bool {
        !self.changers.is_empty()
    }

    /// Whether anything can be read.
    pub(crate) fn is_readable(&self) -> bool {
        !self.faults.is_empty() || !self.told.is_empty()
    }

    /// Reads a message, or all that there are.
    pub(crate) fn read(&mut self, several: bool) -> Read {
        let (mut read, mut count) = (Read::default(), 0);
        while self.is_readable() && (several || count == 0) {
            count += 1;
            match self.faults.pop_front() {
                Some(fault) => read.faults.push(fault),
                None => read.told.extend(self.read_event()),
            }
        }
        read
    }

    fn read_event(&mut self) -> Option<Told> {
        let thread = self.told.pop_front()?;
        let at = self.changers.iter().position(|changer| changer.thread == thread)?;
        let changer = &mut self.changers[at];
        changer.told = false;
        changer.events.pop_front()
    }

    fn mapping(&self, address: u64) -> Option<Range<u64>> {
        self.mappings().into_iter().find(|mapping| mapping.contains(&address))
    }

    /// Whether anything is mapped at the address.
    pub(crate) fn is_there(&self, address: u64) -> bool {
        self.mapping(address).is_some()
    }

    fn is_registered(&self, address: u64) -> bool {
        let in_room = |n: usize| self.rooms[n] == Room::Registered && room(n).contains(&address);
        let is_out = self.ended || self.unregistered.contains(address);
        !is_out && (MAIN.contains(&address) || (0..ROOMS).any(in_room))
    }

    /// UFFDIO_REGISTER.
    pub(crate) fn register(&mut self, range: &Range<u64>) {
        self.unregistered.remove(range.clone());
        for n in 0..ROOMS {
            if self.rooms[n] == Room::Mapped
                && range.start <= room(n).start
                && room(n).end <= range.end
            {
                self.rooms[n] = Room::Registered;
            }
        }
    }

    /// UFFDIO_UNREGISTER, which takes markers away.
    pub(crate) fn unregister(&mut self, range: &Range<u64>) {
        self.unregistered.insert(range.clone());
        self.markers.retain(|page| !range.contains(&page.get()));
        self.wake(range);
    }

    /// UFFDIO_COPY from an unreadable source.
    pub(crate) fn registration(&self, range: &Range<u64>) -> Registration {
        let whole = self.mapping(range.start).is_some_and(|mapping| range.end <= mapping.end)
            && range.clone().step_by(PAGE as usize).all(|page| self.is_registered(page));
        match (self.has_event(), whole) {
            (true, _) => Registration::Changing,
            (false, true) => Registration::Whole,
            (false, false) => Registration::Not,
        }
    }

    /// UFFDIO_WRITEPROTECT.
    pub(crate) fn mark(&mut self, range: &Range<u64>, marked: bool) -> Result<(), Errno> {
        match self.registration(range) {
            Registration::Changing => return Err(Errno::EAGAIN),
            Registration::Not if self.ended => return Err(Errno::ESRCH),
            Registration::Not => return Err(Errno::ENOENT),
            Registration::Whole => {}
        }
        for page in range.clone().step_by(PAGE as usize).map(PageAddr::containing) {
            if marked {
                assert!(!self.memory.contains_key(&page), "a marker for a page that is there");
                if !self.is_poisoned(page) {
                    self.markers.insert(page);
                }
            } else {
                self.markers.remove(&page);
            }
        }
        Ok(())
    }

    /// UFFDIO_COPY of a page, which takes a marker's place, and poison's.
    pub(crate) fn copy(&mut self, page: PageAddr, bytes: &[u8]) -> Installed {
        match self.registration(&(page.get()..page.get() + PAGE)) {
            Registration::Changing => return Installed::Changing,
            Registration::Not => return Installed::Gone,
            Registration::Whole if self.memory.contains_key(&page) => return Installed::Exists,
            Registration::Whole => {}
        }
        self.markers.remove(&page);
        self.poisoned.remove(&page);
        self.memory.insert(page, bytes.to_vec());
        Installed::Done
    }

    /// UFFDIO_ZEROPAGE of a page, which takes no marker's place.
    pub(crate) fn zero(&mut self, page: PageAddr) -> Installed {
        let is_marked = self.markers.contains(&page) || self.is_poisoned(page);
        match self.registration(&(page.get()..page.get() + PAGE)) {
            Registration::Whole if is_marked => Installed::Exists,
            _ => self.copy(page, &zeros()),
        }
    }

    /// UFFDIO_POISON of a page, which takes no marker's place, and wakes who sleeps there.
    pub(crate) fn poison(&mut self, page: PageAddr) -> Installed {
        let outcome = self.zero(page);
        if outcome == Installed::Done {
            self.memory.remove(&page);
            self.poisoned.insert(page);
            self.wake(&(page.get()..page.get() + PAGE));
        }
        outcome
    }

    /// What is there: zeros from now on if nothing is. Wakes nobody.
    pub(crate) fn probe(&mut self, page: PageAddr) -> Probe {
        match self.zero(page) {
            Installed::Done => Probe::Absent,
            Installed::Exists => Probe::Occupied,
            Installed::Changing => Probe::Changing,
            Installed::Gone => Probe::Gone,
        }
    }

    /// UFFDIO_MOVE; `None` if the page stays.
    pub(crate) fn take(&mut self, page: PageAddr) -> Option<Page> {
        if self.has_event() {
            return None;
        }
        self.memory.remove(&page)
    }

    /// Lets the threads that sleep at pages of a range try again.
    pub(crate) fn wake(&mut self, range: &Range<u64>) {
        self.sleepers.retain(|page, _| !range.contains(&page.get()));
        self.faults.retain(|fault| !range.contains(&fault.page.get()));
    }

    /// What is in memory in the range.
    pub(crate) fn present(&self, range: &Range<u64>) -> RangeSet {
        pages_of(self.memory.keys(), range)
    }

    /// What is poisoned in the range.
    pub(crate) fn poison_in(&self, range: &Range<u64>) -> RangeSet {
        pages_of(self.poisoned.iter(), range)
    }

    /// The markers of a range.
    pub(crate) fn marked(&self, range: &Range<u64>) -> RangeSet {
        pages_of(self.markers.iter(), range)
    }
}

fn pages_of<'a>(pages: impl Iterator<Item = &'a PageAddr>, range: &Range<u64>) -> RangeSet {
    let mut found = RangeSet::default();
    for page in pages.map(|page| page.get()).filter(|page| range.contains(page)) {
        found.insert(page..page + PAGE);
    }
    found
}
