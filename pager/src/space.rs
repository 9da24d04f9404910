//! One address space of the workload, as the threads of a pager share it.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};

use gms_policy::ids::{PageAddr, SpaceId};

use crate::kernel::{Faults, PageTables};
use crate::page_map::PAGE;
use crate::range_set::RangeSet;
use crate::sync::lock;

/// One address space of the workload.
pub struct Space {
    /// Its name.
    pub id: SpaceId,
    /// Its userfaultfd.
    pub faults: Box<dyn Faults>,
    /// Excludes reading events from moving pages and leaving their markers: `UFFDIO_MOVE` would take pages of a mapping that came into place
    /// of the one whose pages were meant. Taken before the tables' lock.
    pub gate: Mutex<()>,
    /// Reads without the gate, which expect a fault.
    pub ungated: Ungated,
    /// Process whose memory it is, for messages to people; 0 while unknown (a child just forked).
    pub pid: AtomicI32,
    /// Thread id of its evictor as its faults tell it, in the PID namespace of the workload.
    pub evictor: AtomicI32,
    /// Whether thread ids in its faults mean to us what they mean there; only ever a hint.
    pub same_ids: AtomicBool,
    /// Its page tables; unknown until its process has been attached.
    pub page_tables: OnceLock<Box<dyn PageTables>>,
    /// Events that changed the mappings, so that they must be looked at again.
    pub changes: AtomicU64,
    /// Ranges that were taken out of the userfaultfd so that a thread could tell of its change. Emptied when no change is under way.
    pub relieved: Mutex<RangeSet>,
    /// Ranges registered while a change was under way, which the tables may not know as registered. Emptied when no change is under way.
    pub unrecorded: Mutex<RangeSet>,
    /// Its threads change it so often that no fault could be served for 3 ms: the evict thread stops them for a moment.
    pub restless: AtomicBool,
}

impl Space {
    /// A space that nobody has met yet.
    pub fn new(id: SpaceId, faults: Box<dyn Faults>) -> Space {
        Space {
            id,
            faults,
            gate: Mutex::default(),
            ungated: Ungated::default(),
            pid: AtomicI32::new(0),
            evictor: AtomicI32::new(0),
            same_ids: AtomicBool::new(false),
            page_tables: OnceLock::new(),
            changes: AtomicU64::new(0),
            relieved: Mutex::default(),
            unrecorded: Mutex::default(),
            restless: AtomicBool::new(false),
        }
    }

    /// Closes the gate when all events that have been read are applied.
    pub fn settled_gate(&self) -> MutexGuard<'_, ()> {
        loop {
            let gate = lock(&self.gate);
            if self.ungated.is_intact() {
                return gate;
            }
            // Read without the gate, for which the reader waits now.
            drop(gate);
            std::thread::yield_now();
        }
    }

    /// For messages.
    pub fn name(&self) -> String {
        match self.pid.load(Ordering::Relaxed) {
            0 => "a forked child".into(),
            pid => format!("process {pid}"),
        }
    }

    /// Whether private anonymous memory is at a page's address, as far as is known.
    pub fn is_anonymous(&self, page: PageAddr) -> bool {
        self.page_tables.get().is_some_and(|tables| tables.is_anonymous(page.get()))
    }

    /// Whether a page's address is known to have a marker.
    pub fn has_marker(&self, page: PageAddr) -> bool {
        let range = page.get()..page.get() + PAGE;
        let marked = self.page_tables.get().and_then(|tables| tables.marked(range).ok());
        marked.is_some_and(|marked| !marked.is_empty())
    }
}

/// Reads of single faults without the gate, so that they need not wait while pages are being moved out. A message that was readable when no
/// event was waiting is a fault. But before it is read the fault may vanish (its thread got a signal), and an event come in its place. Whoever
/// holds the gate and has moved pages meanwhile learns that from `is_intact`.
#[derive(Default)]
pub struct Ungated {
    /// Odd while such a read is under way.
    reads: AtomicU64,
    /// An event was read so and has not been applied yet.
    torn: AtomicBool,
}

impl Ungated {
    /// Reads, and notes if `is_event` says that it was no fault.
    pub fn read<R>(&self, read: impl FnOnce() -> R, is_event: impl FnOnce(&R) -> bool) -> R {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let result = read();
        if is_event(&result) {
            self.torn.store(true, Ordering::SeqCst);
        }
        self.reads.fetch_add(1, Ordering::SeqCst);
        result
    }

    /// What was read, by the gate's holder, is not applied for the time being.
    pub fn hold(&self) {
        self.torn.store(true, Ordering::SeqCst);
    }

    /// What was read has been applied, by the gate's holder.
    pub fn applied(&self) {
        self.torn.store(false, Ordering::SeqCst);
    }

    /// For the gate's holder: whether no event had been read without the gate when this was called.
    pub fn is_intact(&self) -> bool {
        let seen = self.reads.load(Ordering::SeqCst);
        while seen % 2 == 1 && self.reads.load(Ordering::SeqCst) == seen {
            std::thread::yield_now();
        }
        !self.torn.load(Ordering::SeqCst)
    }
}
