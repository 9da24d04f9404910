//! One address space of the workload, as the threads of a pager share it.

mod record;

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard};

use gms_policy::ids::{PageAddr, SpaceId};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

pub(crate) use self::record::SpaceRecord;
use crate::kernel::{Faults, Messages, PageTables, ReadError};
use crate::range_set::RangeSet;
use crate::sync::{lock, lock_alone, lock_shared};

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
    /// Several threads of it were seen.
    pub threaded: AtomicBool,
    /// Its threads change it so often that no fault could be served for 3 ms: the evict thread stops them for a moment.
    pub restless: AtomicBool,
    /// Removals that have been applied.
    pub removals: AtomicU64,
    /// A worker could not install a page that somebody waits for: its home is to serve it alone until it has installed one.
    pub only_home: AtomicBool,
    /// Excludes reading messages from what a worker does between its last look and the installation. Taken after the gate, before the tables' lock.
    installing: RwLock<()>,
    /// Workers that may install pages of it, and loans on their way to them. Only its home adds to them.
    lent: AtomicU64,
}

impl Space {
    /// A space that nobody has met yet.
    pub fn new(id: SpaceId, faults: Box<dyn Faults>) -> Space {
        faults.belongs_to(id);
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
            threaded: AtomicBool::new(false),
            restless: AtomicBool::new(false),
            removals: AtomicU64::new(0),
            only_home: AtomicBool::new(false),
            installing: RwLock::default(),
            lent: AtomicU64::new(0),
        }
    }

    /// Reads messages, for the space's home, which holds the gate. No worker is between its last look and the installation of a page meanwhile, and
    /// none installs anything from then on until the events that were read are applied.
    ///
    /// # Errors
    /// As [`Faults::read`].
    pub fn read(&self, several: bool, into: &mut Messages) -> Result<(), ReadError> {
        let _alone = self.without_workers();
        self.read_alone(several, into)
    }

    /// The same without the gate: reads a fault, if there is one. It may have been woken since something was readable, and an event come in its place.
    ///
    /// # Errors
    /// As [`Faults::read`].
    pub fn read_ungated(&self, into: &mut Messages) -> Result<(), ReadError> {
        // First, because whoever holds the tables' lock, for which a worker may wait, may wait for the end of such a read.
        let _alone = self.without_workers();
        // An event counts before it can be read: if none does afterwards, what is readable is a fault, which now only a signal can take back.
        if !self.is_readable() || self.faults.has_event() {
            return Ok(());
        }
        let read = || {
            let read = self.read_alone(false, into);
            (read, !into.events.is_empty())
        };
        self.ungated.read(read, |(_, is_event)| *is_event).0
    }

    fn is_readable(&self) -> bool {
        let mut fds = [PollFd::new(self.faults.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    fn without_workers(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        (self.lent.load(Ordering::Acquire) > 0).then(|| lock_alone(&self.installing))
    }

    fn read_alone(&self, several: bool, into: &mut Messages) -> Result<(), ReadError> {
        let before = into.events.len();
        let read = self.faults.read(several, into);
        if into.events.len() > before {
            self.ungated.hold();
        }
        read
    }

    /// For a worker: nothing is read of the space until the guard is dropped. Events that were read are waited for until they are applied, as long as
    /// `is_patient`; then nothing may be installed.
    pub fn keep_unread(&self, is_patient: impl Fn() -> bool) -> RwLockReadGuard<'_, ()> {
        loop {
            let unread = lock_shared(&self.installing);
            if self.ungated.is_applied() || !is_patient() {
                return unread;
            }
            drop(unread);
            std::thread::yield_now();
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
        self.is_marked(page) == Some(true)
    }

    /// Whether a page's address has a marker; `None` without page tables, of a child that nobody has met yet.
    pub fn is_marked(&self, page: PageAddr) -> Option<bool> {
        Some(self.page_tables.get()?.is_marked(page.get()).unwrap_or(false))
    }
}

/// A space of which a worker may install pages as long as this lives.
pub struct Lent {
    space: Arc<Space>,
}

impl Lent {
    /// For the space's home.
    pub fn new(space: Arc<Space>) -> Lent {
        space.lent.fetch_add(1, Ordering::Relaxed);
        Lent { space }
    }

    /// The space.
    pub fn space(&self) -> &Arc<Space> {
        &self.space
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // What the worker has done is done before the home reads without the lock.
        self.space.lent.fetch_sub(1, Ordering::Release);
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

    /// Events have been read and are not applied for the time being.
    pub fn hold(&self) {
        self.torn.store(true, Ordering::SeqCst);
    }

    /// What was read has been applied, by the gate's holder.
    pub fn applied(&self) {
        self.torn.store(false, Ordering::SeqCst);
    }

    /// For the home, and for a worker that keeps the space unread: whether no event that was read is yet to be applied.
    pub fn is_applied(&self) -> bool {
        !self.torn.load(Ordering::SeqCst)
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::fault::tests::{map, own_userfaultfd};
    use crate::kernel::hooked::Hooked;
    use crate::kernel::proc;
    use crate::kernel::uffd::Userfaultfd;
    use crate::page_map::PAGE;

    fn space() -> Arc<Space> {
        Arc::new(Space::new(SpaceId(1), Box::new(Userfaultfd::of_child(own_userfaultfd()))))
    }

    /// Whoever waits for the end of a read may hold the tables' lock, for which the worker may wait.
    #[test]
    fn a_read_has_not_begun_while_it_waits_for_a_worker() {
        let (space, told) = (space(), AtomicI32::new(0));
        let lent = Lent::new(space.clone());
        std::thread::scope(|scope| {
            let unread = space.keep_unread(|| false);
            scope.spawn(|| {
                told.store(nix::unistd::gettid().as_raw(), Ordering::SeqCst);
                space.read_ungated(&mut Messages::default()).expect("nothing to read");
            });
            let waits = || proc::blocked_in(told.load(Ordering::SeqCst)) == Some(libc::SYS_futex);
            while !waits() {
                std::thread::yield_now();
            }
            let begun = space.ungated.reads.load(Ordering::SeqCst);
            drop(unread);
            assert_eq!(begun, 0);
        });
        drop(lent);
        assert_eq!(space.lent.load(Ordering::SeqCst), 0);
        let alone = lock_shared(&space.installing);
        space.read(true, &mut Messages::default()).expect("nobody is waited for");
        drop(alone);
    }

    /// By a page that came with an answer just now, say: its thread may go on to change its memory.
    #[test]
    fn no_event_is_read_in_the_place_of_a_fault_that_was_woken() {
        let (from, to) = (map(PAGE), map(PAGE));
        let mut faults = Hooked::new(Userfaultfd::of_child(own_userfaultfd()));
        assert!(faults.register(from..from + PAGE));
        let (begin, begun) = std::sync::mpsc::channel::<()>();
        let fd = faults.as_fd().try_clone_to_owned().expect("a descriptor");
        faults.after_has_event = Some(Box::new(move || {
            let _ = begin.send(());
            let mut event = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
            assert_eq!(poll(&mut event, PollTimeout::from(10_000u16)), Ok(1));
        }));
        let space = Arc::new(Space::new(SpaceId(1), Box::new(faults)));
        std::thread::scope(|scope| {
            scope.spawn(move || {
                begun.recv().expect("the hook");
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                let (from, to) = (from as *mut libc::c_void, to as *mut libc::c_void);
                // SAFETY: both pages are the test's own.
                unsafe { libc::mremap(from, PAGE as usize, PAGE as usize, flags, to) };
            });
            // As it was found by whoever looked first, when the fault was there.
            let mut messages = Messages::default();
            space.read_ungated(&mut messages).expect("read");
            assert!(messages.is_empty() && space.ungated.is_intact());
            assert!(!space.faults.has_event());
            space.read_ungated(&mut messages).expect("read");
            assert!(messages.is_empty() && space.ungated.is_intact());
            space.read(true, &mut messages).expect("read");
            assert_eq!(messages.events.len(), 1);
        });
    }

    #[test]
    fn a_worker_waits_for_what_was_read_as_long_as_it_is_patient() {
        let space = space();
        let looks = AtomicU64::new(0);
        let patience = || looks.fetch_add(1, Ordering::SeqCst) < 9;
        space.ungated.hold();
        drop(space.keep_unread(patience));
        assert!(looks.load(Ordering::SeqCst) == 10 && !space.ungated.is_applied());
        space.ungated.applied();
        drop(space.keep_unread(patience));
        assert_eq!(looks.load(Ordering::SeqCst), 10);
    }
}
