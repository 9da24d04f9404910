//! Nothing is read of a space while a worker is between its last look and the installation of a page. Just then a thread tries to.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::ThreadId;

use gms_pager::kernel::Messages;
use gms_pager::kernel::proc::blocked_in;
use gms_pager::sync::lock;

use crate::World;

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
    /// This fault thread has its turn.
    pub(crate) fn note_turn(&self, thread: usize) {
        self.is_worker.store(thread > 0, Ordering::SeqCst);
    }

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
