//! A model of the kernel, as far as the pager can tell: the pages of one address space, their markers, faults, removals, and rooms that are mapped,
//! unmapped and moved about. Of several threads' changes the later may be told first.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use gms_pager::kernel::{Installed, Probe};
use gms_pager::page_map::PAGE;
use gms_pager::range_set::RangeSet;
use gms_pager::tables::Remap;
use gms_policy::ids::PageAddr;
use gms_tests::Dice;

/// Bytes of a page.
pub type Page = Vec<u8>;

/// A page of zeros.
pub fn zeros() -> Page {
    vec![0; PAGE as usize]
}

/// Rooms, each of so many pages, the first behind so many others.
pub const ROOMS: usize = 8;
pub const ROOM_PAGES: u64 = 8;
pub const FIRST_ROOM: u64 = 1 << 12;

/// The addresses of a room.
pub fn room(number: usize) -> Range<u64> {
    let start = (FIRST_ROOM + number as u64 * ROOM_PAGES) * PAGE;
    start..start + ROOM_PAGES * PAGE
}

/// What is told of a change of the address space.
#[derive(Clone, Debug)]
pub enum Event {
    /// It is about to be made: MADV_DONTNEED.
    Remove(Range<u64>),
    /// These have been made.
    Unmap(Range<u64>),
    Remap(Remap),
}

/// A thread that sleeps until what it changes has been read. Nothing may be installed or moved before it runs again.
struct Changer {
    thread: usize,
    /// What is still to be read, in order. The first can be read once it is told.
    events: VecDeque<Event>,
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
pub struct Kernel {
    memory: BTreeMap<PageAddr, Page>,
    markers: BTreeSet<PageAddr>,
    /// Faults that have not been read.
    faults: VecDeque<PageAddr>,
    /// Threads that sleep until a page is there or they are woken.
    sleepers: BTreeMap<PageAddr, BTreeSet<usize>>,
    rooms: [Room; ROOMS],
    /// Until all of these has been read, nothing may be installed or moved.
    changers: Vec<Changer>,
    /// Threads whose events can be read, in the order in which they were told.
    told: VecDeque<usize>,
    /// A removal that has been read and is not done yet.
    removing: Option<Range<u64>>,
}

impl Kernel {
    // ---- of the program

    /// A thread touches a page: its bytes, or `None` if the thread sleeps now.
    pub fn touch(&mut self, thread: usize, page: PageAddr) -> Option<&mut Page> {
        if self.is_in(page, Room::Mapped) {
            // Nobody is asked.
            return Some(self.memory.entry(page).or_insert_with(zeros));
        }
        if !self.memory.contains_key(&page) {
            self.faults.push_back(page);
            self.sleepers.entry(page).or_default().insert(thread);
        }
        self.memory.get_mut(&page)
    }

    /// Whether a thread sleeps.
    pub fn sleeps(&self, thread: usize) -> bool {
        self.sleepers.values().any(|threads| threads.contains(&thread))
    }

    /// A thread begins to remove a range (MADV_DONTNEED); false if another one's removal is under way.
    pub fn remove(&mut self, thread: usize, range: Range<u64>) -> bool {
        let free = self.removes().is_none();
        if free {
            self.change(thread, [Event::Remove(range.clone())]);
            self.changers
                .iter_mut()
                .rev()
                .take(1)
                .for_each(|changer| changer.removes = Some(range.clone()));
        }
        free
    }

    /// What is being removed.
    pub fn removes(&self) -> Option<&Range<u64>> {
        let begun = self.changers.iter().find_map(|changer| changer.removes.as_ref());
        begun.or(self.removing.as_ref())
    }

    fn change<const N: usize>(&mut self, thread: usize, events: [Event; N]) {
        self.changers.push(Changer { thread, events: events.into(), told: false, removes: None });
    }

    /// A thread goes on if what it changes has been read: true then.
    pub fn resume(&mut self, thread: usize) -> bool {
        let Some(at) = self.changers.iter().position(|changer| changer.thread == thread) else {
            return true;
        };
        let read = self.changers[at].events.is_empty();
        if read {
            self.removing = self.changers.remove(at).removes.or(self.removing.take());
        }
        read
    }

    /// Whether anybody sleeps in the room.
    pub fn is_occupied(&self, number: usize) -> bool {
        self.sleepers.keys().any(|page| room(number).contains(&page.get()))
    }

    /// Whether the room is there, and whether that is known to the pager.
    pub fn is_mapped(&self, number: usize) -> (bool, bool) {
        (self.rooms[number] != Room::Unmapped, self.rooms[number] == Room::Registered)
    }

    fn is_in(&self, page: PageAddr, state: Room) -> bool {
        (0..ROOMS).any(|n| self.rooms[n] == state && room(n).contains(&page.get()))
    }

    /// A thread maps the room, of which nothing is told.
    pub fn map(&mut self, number: usize) {
        self.rooms[number] = Room::Mapped;
    }

    /// A thread unmaps the room.
    pub fn unmap(&mut self, thread: usize, number: usize) {
        let range = room(number);
        self.memory.retain(|page, _| !range.contains(&page.get()));
        self.markers.retain(|page| !range.contains(&page.get()));
        if std::mem::take(&mut self.rooms[number]) == Room::Registered {
            self.change(thread, [Event::Unmap(range)]);
        }
    }

    /// A thread moves a registered room to where none is. It is told, too, that nothing is mapped any more where it was.
    pub fn remap(&mut self, thread: usize, from: usize, to: usize) {
        let remap = Remap { from: room(from).start, to: room(to).start, length: ROOM_PAGES * PAGE };
        let within = |page: &PageAddr| remap.source().contains(&page.get());
        let pages: Vec<PageAddr> = self.memory.keys().copied().filter(within).collect();
        for page in pages {
            let bytes = self.memory.remove(&page).unwrap_or_default();
            self.memory.insert(remap.moved(page), bytes);
        }
        let markers: Vec<PageAddr> = self.markers.iter().copied().filter(within).collect();
        for marker in markers {
            self.markers.remove(&marker);
            self.markers.insert(remap.moved(marker));
        }
        self.rooms[to] = std::mem::take(&mut self.rooms[from]);
        self.change(thread, [Event::Remap(remap), Event::Unmap(remap.source())]);
    }

    /// Some thread tells of its change.
    pub fn tell(&mut self, dice: &mut Dice) {
        let untold = |&n: &usize| {
            let changer = &self.changers[n];
            !changer.told && !changer.events.is_empty()
        };
        let untold: Vec<usize> = (0..self.changers.len()).filter(untold).collect();
        if untold.is_empty() {
            return;
        }
        let changer = &mut self.changers[untold[dice.place(untold.len())]];
        changer.told = true;
        self.told.push_back(changer.thread);
    }

    /// A page of the removal that is under way goes: its address.
    pub fn remove_next(&mut self) -> Option<u64> {
        let range = self.removing.as_mut()?;
        let page = PageAddr::containing(range.start);
        range.start += PAGE;
        if range.is_empty() {
            self.removing = None;
        }
        self.memory.remove(&page);
        self.markers.remove(&page);
        Some(page.get())
    }

    // ---- of the pager

    /// Pages in memory.
    pub fn resident(&self) -> impl ExactSizeIterator<Item = PageAddr> + '_ {
        self.memory.keys().copied()
    }

    /// Whether a change has begun that has not been read, or whose thread has not run since.
    pub fn has_event(&self) -> bool {
        !self.changers.is_empty()
    }

    /// Reads an event that has been told.
    pub fn read_event(&mut self) -> Option<Event> {
        let thread = self.told.pop_front()?;
        let at = self.changers.iter().position(|changer| changer.thread == thread)?;
        let changer = &mut self.changers[at];
        let event = changer.events.pop_front()?;
        changer.told = false;
        Some(event)
    }

    /// Rooms of which the pager does not know.
    pub fn unregistered(&self) -> impl Iterator<Item = usize> + use<> {
        let rooms = self.rooms;
        (0..ROOMS).filter(move |&n| rooms[n] == Room::Mapped)
    }

    /// UFFDIO_REGISTER, proved.
    pub fn register(&mut self, number: usize) {
        self.rooms[number] = Room::Registered;
    }

    /// Reads a fault.
    pub fn read_fault(&mut self) -> Option<PageAddr> {
        self.faults.pop_front()
    }

    /// UFFDIO_COPY, which takes a marker's place and wakes.
    pub fn copy(&mut self, page: PageAddr, bytes: &[u8]) -> Installed {
        if self.has_event() {
            return Installed::Changing;
        }
        if self.memory.contains_key(&page) {
            return Installed::Exists;
        }
        self.markers.remove(&page);
        self.memory.insert(page, bytes.to_vec());
        self.wake(page);
        Installed::Done
    }

    /// What is there: zeros from now on if nothing is. Wakes nobody.
    pub fn probe(&mut self, page: PageAddr) -> Probe {
        if self.has_event() {
            return Probe::Changing;
        }
        if self.memory.contains_key(&page) || self.has_marker(page) {
            return Probe::Occupied;
        }
        self.memory.insert(page, zeros());
        Probe::Absent
    }

    /// Whether the page has a marker.
    pub fn has_marker(&self, page: PageAddr) -> bool {
        self.markers.contains(&page)
    }

    /// UFFDIO_MOVE; `None` if the page stays.
    pub fn take(&mut self, page: PageAddr) -> Option<Page> {
        if self.has_event() {
            return None;
        }
        self.memory.remove(&page)
    }

    /// Leaves a marker; false if an event must be read first.
    pub fn mark(&mut self, page: PageAddr) -> bool {
        !self.has_event() && {
            assert!(!self.memory.contains_key(&page), "a marker for a page that is there");
            self.markers.insert(page);
            true
        }
    }

    /// Lets the threads that sleep at pages of a range try again.
    pub fn wake_range(&mut self, range: &Range<u64>) {
        for page in range.clone().step_by(PAGE as usize) {
            self.wake(PageAddr::containing(page));
        }
    }

    /// Lets the threads that sleep at a page try again.
    pub fn wake(&mut self, page: PageAddr) {
        self.sleepers.remove(&page);
        self.faults.retain(|fault| *fault != page);
    }

    /// The markers of a range, and all that is not empty.
    pub fn look(&self, range: &Range<u64>) -> (RangeSet, RangeSet) {
        let (mut marked, mut taken) = (RangeSet::default(), RangeSet::default());
        let within = |page: &&PageAddr| range.contains(&page.get());
        for page in self.markers.iter().filter(within) {
            marked.insert(page.get()..page.get() + PAGE);
            taken.insert(page.get()..page.get() + PAGE);
        }
        for page in self.memory.keys().filter(within) {
            taken.insert(page.get()..page.get() + PAGE);
        }
        (marked, taken)
    }
}
