//! The kernel, as it is asked from outside the workload: one interface a file. Of [`Faults`] and [`PageTables`] the simulation has a model.

pub mod cgroup;
#[cfg(test)]
pub(crate) mod hooked;
pub mod journal;
pub mod pagemap;
pub mod pidfd;
pub mod proc;
pub mod uffd;

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use gms_policy::ids::{PageAddr, SpaceId};
use nix::errno::Errno;

use self::journal::Caveat;
use crate::page_map::PAGE;
use crate::range_set::RangeSet;
use crate::tables::Change;

/// A thread waits for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageFault {
    /// Its page.
    pub page: PageAddr,
    /// Whether it writes.
    pub write: bool,
    /// Its id in its own PID namespace: good for hints only.
    pub tid: i32,
}

/// An address space changes. The thread that changes it waits until that is read.
pub enum Event {
    /// A process was forked; its memory faults here.
    Fork(Box<dyn Faults>),
    /// It has been changed.
    Changed(Change),
    /// The pages of a range are about to be discarded.
    Remove(Range<u64>),
}

impl Event {
    /// What it says of where pages are.
    pub fn change(&self) -> Option<&Change> {
        match self {
            Event::Changed(change) => Some(change),
            Event::Fork(_) | Event::Remove(_) => None,
        }
    }
}

/// What was read. Faults may have been queued before or after the events: these are applied first.
#[derive(Default)]
pub struct Messages {
    /// In the order in which they were queued.
    pub faults: Vec<PageFault>,
    /// In the order in which they were queued.
    pub events: Vec<Event>,
}

impl Messages {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.faults.is_empty() && self.events.is_empty()
    }
}

/// Why nothing could be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// Of a fork. The kernel keeps the message.
    #[error("no descriptor is left for the memory of a forked child")]
    NoDescriptor,
    /// Of a kernel that is not understood.
    #[error("{0}")]
    Failed(String),
}

/// What an address range is to a userfaultfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Registration {
    /// One mapping, registered, and all events have been read.
    Whole,
    /// Not so: not mapped, not registered, or several mappings.
    Not,
    /// An event must be read first.
    Changing,
}

/// What an attempt to put the shared zero page somewhere has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// Neither page nor marker was there: now zeros are. Nobody has been woken.
    Absent,
    /// A page, a marker or a guard is there.
    Occupied,
    /// A page or a guard is there, and no marker: an evicted page does not belong there any more.
    Taken,
    /// An event must be read first.
    Changing,
    /// No such mapping any more, or the process has ended.
    Gone,
}

/// How an attempt to install a page ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Installed {
    /// The page is there now and its waiters are awake.
    Done,
    /// A page was there already (another thread's fault was served first).
    Exists,
    /// An event must be read first.
    Changing,
    /// No such mapping any more, or the process has ended.
    Gone,
}

/// The faults and changes of one address space, and what can be done about them: a userfaultfd ([`uffd::Userfaultfd`]).
pub trait Faults: AsFd + Send + Sync {
    /// Reads one message, or `several`. Nothing is read if there is none.
    fn read(&self, several: bool, into: &mut Messages) -> Result<(), ReadError>;

    /// Whose memory it is, for whoever finds it when this process has died.
    fn belongs_to(&self, _space: SpaceId) {}

    /// If what was read of events outlives this process: which line of the journal that is, and its generation when all of it is applied.
    fn next_generation(&self) -> Option<(u32, u64)> {
        None
    }

    /// All that was read is applied, and that is committed.
    fn applied(&self) {}

    /// Notes for whoever finds it when this process has died that it is so, or is not any more. For the gate's holder.
    fn note(&self, _caveat: Caveat, _is: bool) {}

    /// What a pager that has died had read of it and not applied.
    fn take_left(&mut self) -> Vec<Event> {
        Vec::new()
    }

    /// Whether an event has not been read yet: until then nothing can be installed, marked or moved.
    fn has_event(&self) -> bool;

    /// Whether the address space still exists.
    fn is_alive(&self) -> bool;

    /// Registers whole mappings: their missing pages fault to us from now on, and can be marked. False if they cannot be registered.
    fn register(&self, range: Range<u64>) -> bool;

    /// Registers memory of ours, which is never marked.
    fn register_outbox(&self, range: Range<u64>) -> bool;

    /// Gives a range back to the kernel, which wakes who waits there. False if there is no mapping.
    fn unregister(&self, range: Range<u64>) -> bool;

    /// What the range is, proved by the kernel.
    fn registration(&self, range: Range<u64>) -> Registration;

    /// Leaves markers at absent pages, or takes them away without waking anybody. The caller has made sure that no page of the range is present.
    fn mark(&self, range: Range<u64>, marked: bool) -> Result<(), Errno>;

    /// What is at a page for which a thread waits, or has waited.
    fn probe(&self, page: u64) -> Probe;

    /// Lets the threads that wait for a page of the range try again.
    fn wake(&self, range: Range<u64>);

    /// Installs the pages of the range from `bytes`, in the place of markers, up to the first that is present; returns how many, and why it stopped
    /// if not at the end. Without `wake`, the threads that wait for them sleep on.
    fn copy_run(&self, range: Range<u64>, bytes: &[u8], wake: bool) -> (u64, Installed);

    /// Installs zero pages from the start of the range up to the first page that is present; returns how many, and
    /// why it stopped if not at the end.
    fn zero(&self, range: Range<u64>) -> (u64, Installed);

    /// Notes an absent page, whose marker has been taken away, as lost: whoever touches it gets SIGBUS, as for a memory error of the hardware. That outlives the
    /// registration and is inherited by forked children; unmapping or discarding the page ends it. Linux 6.6 has it without being asked.
    fn poison(&self, page: u64) -> Installed;

    /// Installs one page.
    fn copy(&self, page: u64, bytes: &[u8]) -> Installed {
        self.copy_run(page..page + PAGE, bytes, true).1
    }
}

/// What an address holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occupant {
    /// A page in memory.
    Present,
    /// A guard of MADV_GUARD_INSTALL (told by Linux 6.15 and later).
    Guard,
    /// A page that was swapped out or is being migrated (or, before Linux 6.15, a guard).
    Elsewhere,
}

/// Addresses which hold the same kind of thing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Occupied {
    /// The addresses.
    pub range: Range<u64>,
    /// What they hold.
    pub by: Occupant,
}

/// The page tables of one address space ([`pagemap::Pagemap`]).
pub trait PageTables: Send + Sync {
    /// Appends what is there and private (not file-backed, not the shared zero page, no marker) of `range` to `into`, up to
    /// `pages_max`; returns where the scan ended.
    fn occupied(
        &self,
        range: Range<u64>,
        pages_max: u64,
        into: &mut Vec<Occupied>,
    ) -> Result<u64, Errno>;

    /// The markers in `range`: where evicted pages belong.
    fn marked(&self, range: Range<u64>) -> Result<RangeSet, Errno>;

    /// Whether a marker is at `page`.
    fn is_marked(&self, page: u64) -> Result<bool, Errno> {
        Ok(!self.marked(page..page + PAGE)?.is_empty())
    }

    /// What of `range` holds a page (the shared zero page too), a marker, a guard, anything.
    fn taken(&self, range: Range<u64>) -> Result<RangeSet, Errno>;

    /// Whether private anonymous memory is mapped at the address; in doubt it is.
    fn is_anonymous(&self, address: u64) -> bool;

    /// What it is read from, if that is a file of the kernel's.
    fn file(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
