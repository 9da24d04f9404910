//! A model of the kernel, as far as the pager can tell: the pages of one address space, their markers, faults and removals.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use gms_pager::page_map::PAGE;
use gms_pager::range_set::RangeSet;
use gms_pager::uffd::{Installed, Probe};
use gms_policy::ids::PageAddr;

/// Bytes of a page.
pub type Page = Vec<u8>;

/// A page of zeros.
pub fn zeros() -> Page {
    vec![0; PAGE as usize]
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
    /// A removal that has not been read: until then nothing may be installed or moved.
    event: Option<Range<u64>>,
    /// One that has been read and is not done yet.
    removing: Option<Range<u64>>,
}

impl Kernel {
    // ---- of the program

    /// A thread touches a page: its bytes, or `None` if the thread sleeps now.
    pub fn touch(&mut self, thread: usize, page: PageAddr) -> Option<&mut Page> {
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
    pub fn remove(&mut self, range: Range<u64>) -> bool {
        let free = self.removes().is_none();
        if free {
            self.event = Some(range);
        }
        free
    }

    /// What is being removed.
    pub fn removes(&self) -> Option<&Range<u64>> {
        self.event.as_ref().or(self.removing.as_ref())
    }

    /// The removal that has been read is done: the addresses of its pages.
    pub fn finish_removal(&mut self) -> impl Iterator<Item = u64> + use<> {
        let range = self.removing.take().unwrap_or_default();
        self.memory.retain(|page, _| !range.contains(&page.get()));
        self.markers.retain(|page| !range.contains(&page.get()));
        range.step_by(PAGE as usize)
    }

    // ---- of the pager

    /// Pages in memory.
    pub fn resident(&self) -> impl ExactSizeIterator<Item = PageAddr> + '_ {
        self.memory.keys().copied()
    }

    /// Whether an event has not been read.
    pub fn has_event(&self) -> bool {
        self.event.is_some()
    }

    /// Reads the removal that has been told.
    pub fn read_event(&mut self) -> Option<Range<u64>> {
        let range = self.event.take()?;
        self.removing = Some(range.clone());
        Some(range)
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

    /// UFFDIO_MOVE, with the marker that is left; `None` if the page stays.
    pub fn take(&mut self, page: PageAddr) -> Option<Page> {
        if self.has_event() {
            return None;
        }
        let bytes = self.memory.remove(&page)?;
        self.markers.insert(page);
        Some(bytes)
    }

    /// Takes a marker away; false if an event must be read first.
    pub fn unmark(&mut self, page: PageAddr) -> bool {
        !self.has_event() && {
            self.markers.remove(&page);
            true
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
