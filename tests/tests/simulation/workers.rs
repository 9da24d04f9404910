//! The workers of the home. They have their turns also in the midst of those of the pager's other threads, whenever these ask the kernel for something, but
//! for what locks exclude: while messages are read, and while the tables are locked.
//!
//! That nothing is read of a space while a worker is between its last look and the installation of a page is a test of its own: just then a thread tries to.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::ThreadId;
use std::time::Instant;

use gms_pager::fault::FaultCore;
use gms_pager::kernel::Messages;
use gms_pager::kernel::proc::blocked_in;
use gms_pager::shared::Shared;
use gms_pager::sync::lock;
use gms_tests::Dice;
use gms_transport::sim::Sim;

use crate::owner::turn;
use crate::world::World;

/// In one of so many calls of the pager a worker has its turn.
const BETWEEN: u64 = 8;

thread_local! {
    /// Of the world that this thread simulates.
    static WORKERS: RefCell<Option<Workers>> = const { RefCell::new(None) };
}

/// See the module's documentation.
pub(crate) struct Workers {
    shared: Arc<Shared>,
    threads: Vec<FaultCore<Sim>>,
    watch: Arc<Watch>,
    dice: Dice,
    /// The end of the last turn.
    last: Instant,
}

impl Workers {
    pub(crate) fn new(
        now: Instant,
        shared: Arc<Shared>,
        threads: Vec<FaultCore<Sim>>,
        watch: Arc<Watch>,
        seed: u64,
    ) -> Workers {
        Workers { shared, threads, watch, dice: Dice::new(seed), last: now }
    }

    /// From now on they have their turns.
    pub(crate) fn begin(self) {
        WORKERS.set(Some(self));
    }

    fn serve(&mut self, worker: usize, now: Instant) -> Instant {
        let before = self.watch.is_worker.swap(true, Ordering::SeqCst);
        self.last = turn(&mut self.threads[worker], now.max(self.last), |_, _| ());
        self.watch.is_worker.store(before, Ordering::SeqCst);
        self.last
    }

    fn come_between(&mut self, now: Instant) {
        let none = self.threads.is_empty() || self.dice.below(BETWEEN) > 0;
        if !none && !self.shared.tables.is_held() {
            let worker = self.dice.place(self.threads.len());
            self.serve(worker, now);
        }
    }
}

/// A turn of a worker; returns when it ends.
pub(crate) fn serve(worker: usize, now: Instant) -> Instant {
    WORKERS.with_borrow_mut(|workers| workers.as_mut().expect("workers").serve(worker, now))
}

/// A worker may have its turn, unless one has it already.
pub(crate) fn come_between(now: Instant) {
    WORKERS.with(|workers| {
        if let Ok(mut workers) = workers.try_borrow_mut() {
            workers.iter_mut().for_each(|workers| workers.come_between(now));
        }
    });
}

/// When something of theirs is due.
pub(crate) fn deadline(now: Instant) -> Option<Instant> {
    WORKERS.with_borrow(|workers| {
        let threads = workers.iter().flat_map(|workers| &workers.threads);
        threads.map(|thread| thread.deadline(now)).min()
    })
}

/// The world ends.
pub(crate) fn end() {
    WORKERS.set(None);
}

/// Runs in which a thread has tried to read while a worker installed a page.
const TRIES: u64 = 20;

/// Looks on while the pager has its turn; does nothing unless there is a reader.
#[derive(Default)]
pub(crate) struct Watch {
    /// Whether a worker has its turn.
    is_worker: AtomicBool,
    /// Told when a worker is about to install a page, once; and its id.
    reader: Mutex<Option<(Sender<()>, i32)>>,
    reads_in: OnceLock<ThreadId>,
    begun: AtomicBool,
    has_read: AtomicBool,
}

impl Watch {
    /// A page is about to be installed: the first by a worker waits until the reader does.
    pub(crate) fn note_install(&self) {
        if !self.is_worker.load(Ordering::SeqCst) {
            return;
        }
        let Some((begin, tid)) = lock(&self.reader).take() else { return };
        begin.send(()).expect("the reader waits");
        let is_blocked =
            || self.begun.load(Ordering::SeqCst) && blocked_in(tid) == Some(libc::SYS_futex);
        while !is_blocked() {
            assert!(!self.has_read.load(Ordering::SeqCst), "read while a worker installed a page");
            std::thread::yield_now();
        }
    }

    /// The pager has died, perhaps in a worker's turn.
    pub(crate) fn begin_anew(&self) {
        self.is_worker.store(false, Ordering::SeqCst);
    }

    /// Messages are about to be read: true if by the reader, which gets none.
    pub(crate) fn note_read(&self) -> bool {
        let is_reader = self.reads_in.get() == Some(&std::thread::current().id());
        self.has_read.fetch_or(is_reader, Ordering::SeqCst);
        is_reader
    }
}

/// Whether a worker installed a page in this run, which the reader waited for.
fn is_waited_for(seed: u64) -> bool {
    let mut world = World::new(seed);
    world.deaths = None;
    if world.owner.fault_threads() < 2 {
        return false;
    }
    let (watch, space) = (world.handle.watch.clone(), world.owner.space());
    let (begin, begins) = channel();
    let (tell, told) = channel();
    let reader = Arc::clone(&watch);
    let thread = std::thread::spawn(move || {
        let _ = reader.reads_in.set(std::thread::current().id());
        tell.send(nix::unistd::gettid().as_raw()).expect("the test waits");
        if begins.recv().is_ok() {
            reader.begun.store(true, Ordering::SeqCst);
            space.read(true, &mut Messages::default()).expect("a model does not fail");
        }
    });
    *lock(&watch.reader) = Some((begin, told.recv().expect("its id")));
    world.run();
    drop(lock(&watch.reader).take());
    thread.join().expect("no panic");
    watch.has_read.load(Ordering::SeqCst)
}

#[test]
fn nothing_is_read_while_a_worker_installs_a_page() {
    let tries = (1..1000).filter(|&seed| is_waited_for(seed)).take(TRIES as usize).count();
    assert_eq!(tries as u64, TRIES, "hardly any worker installed a page");
}
