//! Processes that end while something of them has been read and not been handled yet. The address space is the test's own.

use std::cell::Cell;
use std::os::fd::{AsFd, FromRawFd, IntoRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU8};

use crossbeam_channel::Receiver;
use gms_policy::full::WhenFull;
use gms_policy::ids::PageAddr;
use gms_policy::redundancy::Redundancy;
use gms_transport::client::Checksum;
use gms_transport::client::script::Script;
use linux_raw_sys::general as sys;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use userfaultfd::Uffd;

use super::forks::inherit;
use super::*;
use crate::config::SessionConfig;
use crate::evict::EvictThread;
use crate::kernel::pagemap::Pagemap;
use crate::kernel::proc;
use crate::kernel::uffd::{Userfaultfd, uffdio_api};
use crate::kernel::{Faults, Installed, PageTables};
use crate::page_map::PAGE;
use crate::range_set::RangeSet;
use crate::shared::Outcome;
use crate::shared::{Commands, Gauges};
use crate::tables::{Change, EvictOutcome, Others, Remap};
use crate::target::Target;
use crate::tree::Root;
use crate::victims;

pub(super) const ID: SpaceId = SpaceId(1);
/// Without forks: other tests may fork this process.
const FEATURES: u64 = (sys::UFFD_FEATURE_PAGEFAULT_FLAG_WP
    | sys::UFFD_FEATURE_WP_UNPOPULATED
    | sys::UFFD_FEATURE_EVENT_REMAP) as u64;
const NEW: libc::c_int =
    libc::O_CLOEXEC | libc::O_NONBLOCK | sys::UFFD_USER_MODE_ONLY as libc::c_int;

fn enabled(fd: libc::c_long) -> Uffd {
    let fd = Errno::result(fd).expect("a userfaultfd") as RawFd;
    let mut api = sys::uffdio_api { api: 0xAA, features: FEATURES, ioctls: 0 };
    // SAFETY: `api` is a live struct of the layout which the request expects.
    unsafe { uffdio_api(fd, &raw mut api) }.expect("its features");
    // SAFETY: a new descriptor, given away here.
    unsafe { Uffd::from_raw_fd(fd) }
}

pub(crate) fn own_userfaultfd() -> Uffd {
    // SAFETY: no pointer is passed.
    enabled(unsafe { libc::syscall(libc::SYS_userfaultfd, NEW) })
}

/// Of a process that has ended.
pub(super) fn dead_userfaultfd() -> Uffd {
    let flags = libc::c_long::from(libc::CLONE_FILES | libc::SIGCHLD);
    // SAFETY: a fork, but for the table of descriptors; the child makes two system calls.
    let child = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    if child == 0 {
        // SAFETY: no pointer is passed.
        unsafe { libc::_exit(libc::syscall(libc::SYS_userfaultfd, NEW) as libc::c_int) };
    }
    let mut status = 0;
    // SAFETY: one status is written, to a live integer.
    let waited = unsafe { libc::waitpid(child as libc::pid_t, &raw mut status, 0) };
    assert!(libc::c_long::from(waited) == child && libc::WIFEXITED(status));
    enabled(libc::WEXITSTATUS(status).into())
}

/// New memory, which stays.
pub(crate) fn map(bytes: u64) -> u64 {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping, which stays.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes as usize, access, flags, -1, 0) };
    assert!((start as u64).is_multiple_of(PAGE));
    start as u64
}

/// The two threads' states and a space with one page, which has a marker.
pub(super) struct Play {
    pub(super) shared: Arc<Shared>,
    pub(super) fault: FaultCore<Script>,
    commands: Vec<Receiver<FaultCommand>>,
    evict: EvictThread<Script>,
    pub(super) space: Arc<Space>,
    pub(super) page: u64,
}

/// What the threads of a session share, at its beginning.
pub(crate) fn shared() -> (Arc<Shared>, Commands) {
    shared_by(1)
}

/// The same with so many fault threads.
pub(super) fn shared_by(fault_threads: usize) -> (Arc<Shared>, Commands) {
    shared_of(fault_threads, Redundancy::None)
}

/// The same with so many copies of each page.
pub(crate) fn shared_redundant(copies: u8) -> (Arc<Shared>, Commands) {
    shared_of(1, Redundancy::Replica(copies))
}

/// The same with two agents, and as many copies as there is room for.
pub(crate) fn shared_auto() -> (Arc<Shared>, Commands) {
    let mut config = config_of(1, Redundancy::Auto);
    config.agents = vec!["a".into(), "b".into()];
    Shared::new(config, 7).expect("memory")
}

pub(crate) fn shared_of(fault_threads: usize, redundancy: Redundancy) -> (Arc<Shared>, Commands) {
    Shared::new(config_of(fault_threads, redundancy), 7).expect("memory")
}

fn config_of(fault_threads: usize, redundancy: Redundancy) -> SessionConfig {
    SessionConfig {
        budget_bytes: 64 << 20,
        page_shift: 12,
        fault_threads,
        agents: Vec::new(),
        keys: None,
        seal: false,
        export_bytes: 0,
        when_full: WhenFull::Grow,
        redundancy,
        disk: None,
        trace: None,
        verbose: false,
        quiet: true,
    }
}

impl Play {
    pub(super) fn new(space_of: Option<Uffd>) -> Play {
        Play::with(space_of, 0, 1)
    }

    /// The same with agents, and with several pages that have markers.
    pub(super) fn with(space_of: Option<Uffd>, agents: u16, pages: u64) -> Play {
        Play::by(shared(), space_of, agents, pages)
    }

    /// With two copies of each page, and a page that has a marker.
    pub(super) fn redundant(agents: u16) -> Play {
        Play::by(shared_redundant(2), None, agents, 1)
    }

    pub(super) fn by(
        (shared, commands): (Arc<Shared>, Commands),
        space_of: Option<Uffd>,
        agents: u16,
        pages: u64,
    ) -> Play {
        let client = || Client::scripted(agents, Checksum::new(7));
        let mut fault =
            FaultCore::new(Instant::now(), shared.clone(), 0, client(), Asks::nobody(), None);
        let root = Root::Process(Target::nobody());
        let evict =
            EvictThread::new(shared.clone(), commands.evict, client(), root, Gauges::default());
        let page = map(pages * PAGE);
        let range = || page..page + pages * PAGE;
        let owner = Userfaultfd::of_child(own_userfaultfd());
        assert!(owner.register(range()));
        owner.mark(range(), true).expect("marked");
        let faults = match space_of {
            None => owner,
            Some(other) => {
                // The marker stays as long as the mapping is registered.
                std::mem::forget(owner);
                Userfaultfd::of_child(other)
            }
        };
        let space = Arc::new(Space::new(shared.new_space(), Box::new(faults)));
        let page_tables = Pagemap::open(std::process::id() as i32).expect("own page tables");
        assert!(
            space.page_tables.set(Box::new(page_tables)).is_ok()
                && space.has_marker(PageAddr::containing(page))
        );
        let mut tables = lock(&shared.tables);
        tables.add_space(ID);
        tables.register(ID, range(), &RangeSet::default());
        drop(tables);
        shared.homes.bear(ID, 0);
        fault.add(space.clone());
        Play { shared, fault, commands: commands.fault, evict, space, page }
    }

    pub(super) fn obey(&mut self) {
        while let Ok(command) = self.commands[0].try_recv() {
            self.fault.handle_command(command);
        }
    }

    /// A thread that waits for the page: its fault can be read.
    fn with_fault(&self) -> std::thread::JoinHandle<u8> {
        let page = self.page;
        let thread = std::thread::spawn(move || {
            // SAFETY: the page is mapped and never unmapped.
            unsafe { AtomicU8::from_ptr(page as *mut u8) }.fetch_add(1, Ordering::Relaxed)
        });
        let mut told = [PollFd::new(self.space.faults.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut told, PollTimeout::NONE), Ok(1));
        thread
    }

    fn page(&self) -> PageAddr {
        PageAddr::containing(self.page)
    }

    /// As after an attach: the evict thread knows the space too.
    fn known(mut self) -> Play {
        self.shared.tell_forked(self.space.clone());
        self.evict.await_forks(Instant::now());
        self
    }

    /// Whether the tree counts as gone, after as many looks as that takes.
    fn is_gone(&mut self) -> bool {
        (0..3).for_each(|_| self.evict.refresh_tree(Instant::now()));
        matches!(self.shared.outcome(), Some(Outcome::TreeGone))
    }

    /// As after an eviction: the page is in the write-back buffer.
    pub(super) fn evicted(self) -> Play {
        let (mut leaving, mut wake) = (Vec::new(), Vec::new());
        let mut tables = lock(&self.shared.tables);
        tables.begin_evict(ID, &[self.page()], &mut leaving);
        tables.finish_evict(leaving[0].1, EvictOutcome::Moved(7), &mut wake);
        drop(tables);
        self
    }

    /// The page has been moved out and holds zeros or not; nobody has ended its leaving yet. Returns its slot.
    fn leaving(&self) -> u32 {
        let mut leaving = Vec::new();
        lock(&self.shared.tables).begin_evict(ID, &[self.page()], &mut leaving);
        leaving[0].1
    }

    /// Ends the page's leaving.
    fn finish(&self, slot: u32, outcome: EvictOutcome) -> Option<EvictOutcome> {
        let spaces = [(ID, self.space.clone())].into();
        victims::finish(&self.shared, &spaces, slot, outcome, 7, &mut Vec::new())
    }

    /// Whether the workload has been stopped because a page with a marker is not known.
    fn is_stopped_by_a_marker(&mut self) -> bool {
        let fault = Fault { place: (ID, self.page()), write: true, tid: 0 };
        self.fault.not_installed(fault, Installed::Exists);
        self.shared.has_failed()
    }
}

#[test]
fn a_fault_read_before_the_end_of_its_process_stops_nobody() {
    let mut play = Play::new(None).evicted();
    let (page, thread) = (play.page, play.with_fault());
    // The process is killed, and seen to have ended, while the fault thread goes on to read.
    play.evict.drop_space(ID);
    assert_eq!(play.fault.read_space(&Instant::now, ID, true), 1);
    assert!(!play.shared.has_failed(), "{:?}", play.shared.outcome());
    play.obey();
    let tables = lock(&play.shared.tables);
    assert!(
        !tables.knows(ID, 0..u64::MAX) && tables.free_slots() == play.shared.sizes.slots as usize
    );
    drop(tables);
    // Wakes the thread, if it still waits.
    assert!(play.space.faults.unregister(page..page + PAGE));
    thread.join().expect("no panic");
}

#[test]
fn a_child_whose_parent_ends_at_once_has_its_pages() {
    let mut play = Play::new(None).evicted();
    // The fork has been read, which lets the parent go on. It exits before that is applied.
    play.evict.drop_space(ID);
    let (space, fork) =
        (play.space.clone(), Event::Fork(Box::new(Userfaultfd::of_child(own_userfaultfd()))));
    play.tell(&space, vec![fork]);
    let child = *play.fault.spaces.keys().find(|&&id| id != ID).expect("a child");
    let has_page = |play: &Play| {
        let action = lock(&play.shared.tables).fault((child, play.page()));
        matches!(action, FaultAction::Buffered(_))
    };
    assert!(has_page(&play));
    play.obey();
    assert!(has_page(&play) && !lock(&play.shared.tables).knows(ID, 0..u64::MAX));
}

#[test]
fn a_fork_that_was_read_is_waited_for_although_the_parent_has_ended() {
    let mut play = Play::new(None).known();
    let (parent, shared) = (play.space.clone(), play.shared.clone());
    let child = Arc::new(Space::new(
        shared.new_space(),
        Box::new(Userfaultfd::of_child(own_userfaultfd())),
    ));
    let (read, waited) = (AtomicBool::new(false), AtomicBool::new(false));
    let evict_thread = nix::unistd::gettid().as_raw();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let gate = lock(&parent.gate);
            read.store(true, Ordering::SeqCst);
            let waits = || proc::blocked_in(evict_thread) == Some(libc::SYS_futex);
            while !waited.load(Ordering::SeqCst) && !waits() {
                std::thread::yield_now();
            }
            shared.tell_forked(child.clone());
            drop(gate);
        });
        while !read.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        play.evict.drop_space(ID);
        play.evict.await_forks(Instant::now());
        let known = play.evict.spaces.contains_key(&child.id);
        waited.store(true, Ordering::SeqCst);
        assert!(known);
    });
}

#[test]
fn a_tree_is_not_gone_while_a_fork_may_be_told_of() {
    let mut play = Play::new(None).known();
    play.evict.drop_space(ID);
    // The fault thread has read a fork, and not applied it yet.
    assert!(!play.is_gone());
    let (space, fork) =
        (play.space.clone(), Event::Fork(Box::new(Userfaultfd::of_child(own_userfaultfd()))));
    play.tell(&space, vec![fork]);
    let child = *play.fault.spaces.keys().find(|&&id| id != ID).expect("a child");
    play.obey();
    play.evict.await_forks(Instant::now());
    assert!(!play.is_gone() && play.evict.spaces.contains_key(&child));
    play.evict.drop_space(child);
    play.obey();
    play.evict.await_forks(Instant::now());
    assert!(play.is_gone());
}

#[test]
fn faults_of_a_child_wait_until_it_is_told_of() {
    let mut play = Play::new(None).evicted();
    let (page, thread) = (play.page, play.with_fault());
    play.shared.ceiling.store(0, Ordering::Relaxed);
    // Not the thread id of these faults, who is never made to wait.
    play.space.evictor.store(-1, Ordering::Relaxed);
    play.shared.evict_thread.store(-1, Ordering::Relaxed);
    // What a child has of its parent's changes cannot be seen before something of it has been read.
    let (child, looks) = (play.space.clone(), Cell::new(0));
    let look = |_: &_, _: &dyn Faults| (looks.replace(looks.get() + 1) > 0).then_some(());
    assert!(play.fault.when_settled(&child, look).is_some());
    assert_eq!(lock(&play.shared.tables).roomless(), 0, "who makes room does not know the child");
    assert_eq!(play.fault.again.len(), 1);
    assert!(play.space.faults.unregister(page..page + PAGE));
    thread.join().expect("no panic");
}

impl Play {
    pub(super) fn fork() -> Event {
        Event::Fork(Box::new(Userfaultfd::of_child(own_userfaultfd())))
    }

    /// The child's address space is the parent's, which is the test's own.
    pub(super) fn fork_here(&self) -> Event {
        let fd = self.space.faults.as_fd().try_clone_to_owned().expect("a descriptor");
        // SAFETY: a duplicate, given away here.
        let uffd = unsafe { Uffd::from_raw_fd(fd.into_raw_fd()) };
        Event::Fork(Box::new(Userfaultfd::of_child(uffd)))
    }

    /// As after these have been read, and nothing else is under way.
    pub(super) fn tell(&mut self, space: &Arc<Space>, events: Vec<Event>) {
        self.fault.note_told(space.id, events);
        self.fault.apply(space, &Proof::default());
    }

    fn forked(&mut self, parent: &Space) -> Arc<Space> {
        let child = self.fault.bear(Box::new(Userfaultfd::of_child(own_userfaultfd())));
        inherit(&mut lock(&self.shared.tables), (parent.id, child.id), 0, &[], Vec::new());
        child
    }

    pub(super) fn remap(from: u64, to: u64) -> Event {
        Event::Changed(Change::Remap(Remap { from, to, length: PAGE }))
    }

    /// The child told of last.
    pub(super) fn child(&self) -> Arc<Space> {
        let youngest = self.fault.spaces.values().max_by_key(|state| state.space.id.0);
        youngest.expect("a space").space.clone()
    }

    pub(super) fn action(&self, space: &Space, page: u64) -> FaultAction {
        lock(&self.shared.tables).fault((space.id, PageAddr::containing(page)))
    }
}

#[test]
fn nobody_is_served_while_what_was_told_is_not_applied() {
    let mut play = Play::new(None).known().evicted();
    let (space, page, away) = (play.space.clone(), play.page, map(PAGE));
    let (slot, fault) = (0, Fault { place: (ID, play.page()), write: true, tid: -1 });
    play.shared.evict_thread.store(-2, Ordering::Relaxed);
    space.evictor.store(-2, Ordering::Relaxed);
    play.fault.note_told(ID, vec![Play::remap(page, away)]);
    space.ungated.hold();
    play.fault.fault(Instant::now(), fault);
    assert_eq!(play.fault.again.len(), 1);
    let content = lock(&play.shared.tables).fault((ID, play.page()));
    assert_eq!(content, FaultAction::Buffered(slot));
    assert!(!play.evict.await_forks(Instant::now()), "one of them may be a fork");
    // As soon as no change is under way.
    play.fault.settle(&Instant::now);
    assert!(play.evict.await_forks(Instant::now()) && space.ungated.is_intact());
    assert_eq!(play.action(&space, away), FaultAction::Buffered(slot));
    assert_eq!(play.action(&space, page), FaultAction::Zero);
}

/// An address of nothing.
fn hole() -> u64 {
    let hole = map(PAGE);
    // SAFETY: the test's own, which nobody uses.
    assert_eq!(unsafe { libc::munmap(hole as *mut _, PAGE as usize) }, 0);
    hole
}

/// Where there was something before, and is again, markers do not tell whose; but one thread tells in its order.
#[test]
fn a_child_has_what_changed_places_before_it_was_born() {
    for (birth, first, second) in [(0, 0, 1), (3, 1, 0)] {
        let mut play = Play::with(None, 0, 3).evicted();
        let (page, parent) = (play.page, play.space.clone());
        let other = page + 2 * PAGE;
        let mut leaving = Vec::new();
        let mut tables = lock(&play.shared.tables);
        tables.begin_evict(ID, &[PageAddr::containing(other)], &mut leaving);
        tables.finish_evict(leaving[0].1, EvictOutcome::Moved(9), &mut Vec::new());
        drop(tables);
        let slots = [page, other].map(|page| play.action(&parent, page));
        let aside = hole();
        let moves = [(page, aside), (other, page), (aside, other)];
        let mut events = Vec::from(moves.map(|(from, to)| Play::remap(from, to)));
        events.insert(birth, play.fork_here());
        play.tell(&parent, events);
        let child = play.child();
        assert_eq!(play.action(&child, page), slots[first], "fork at {birth}");
        assert_eq!(play.action(&child, other), slots[second], "fork at {birth}");
        assert_eq!(play.action(&parent, page), slots[1]);
        assert!(!play.shared.has_failed());
    }
}

/// Its marker would be left in memory that has come there since.
#[test]
fn a_child_does_not_have_what_was_replaced_while_it_was_leaving() {
    let mut play = Play::new(None);
    let (page, parent, other) = (play.page, play.space.clone(), hole());
    parent.faults.mark(page..page + PAGE, false).expect("no marker");
    let slot = play.leaving();
    let gone = Event::Changed(Change::Unmap(page..page + PAGE));
    play.tell(&parent, vec![gone, Play::remap(other, page), play.fork_here()]);
    let child = play.child();
    let spaces = [(ID, parent), (child.id, child.clone())].into();
    let moved = EvictOutcome::Moved(8);
    victims::finish(&play.shared, &spaces, slot, moved, 7, &mut Vec::new()).expect("ended");
    assert_eq!(play.action(&child, page), FaultAction::Zero);
    assert!(!play.space.has_marker(play.page()) && !play.shared.has_failed());
}

/// The child's memory is where the page is, whatever its parent did after the fork.
#[test]
fn a_child_keeps_its_pages_while_its_parent_moves_its_own_there_and_back() {
    for (name, order) in [("first", 0), ("between", 1), ("last", 2)] {
        let mut play = Play::new(None).evicted();
        let (page, parent) = (play.page, play.space.clone());
        play.fault.spaces[&ID].space.threaded.store(true, Ordering::Relaxed);
        // In the child the page is where it was before both moves.
        let away = hole();
        let mut events = vec![Play::remap(page, away), Play::remap(away, page)];
        events.insert(order, play.fork_here());
        play.tell(&parent, events);
        let child = play.child();
        assert_ne!(child.id, parent.id);
        let action = play.action(&child, page);
        assert!(matches!(action, FaultAction::Buffered(_)), "fork {name}: {action:?}");
        assert!(!play.shared.has_failed());
    }
}

impl Play {
    /// A child in the middle of the application of its parent's changes, which moves the page at `from` to `to`.
    fn unborn(&mut self, from: u64, to: u64) -> Arc<Space> {
        let child = self.fault.bear(Box::new(Userfaultfd::of_child(own_userfaultfd())));
        assert!(child.faults.register(to..to + PAGE));
        self.fault.note_told(child.id, vec![Play::remap(from, to)]);
        child
    }

    /// Its parent has moved a page, perhaps before the fork.
    fn born(&mut self, child: &Arc<Space>, from: u64, to: u64) {
        let (parent, events) = (self.space.clone(), [(0, Play::remap(from, to))]);
        let made = self.fault.inherited(&parent, child, (0, &Others::new()), &events, false);
        inherit(&mut lock(&self.shared.tables), (parent.id, child.id), 0, &events, made);
        self.fault.spaces.get_mut(&child.id).expect("a child").unborn = false;
        self.fault.settle(&Instant::now);
        assert!(!self.shared.has_failed());
    }
}

/// Its parent's move was before the fork, and is applied after the child's own was read.
#[test]
fn what_a_child_does_follows_what_its_parent_did() {
    let mut play = Play::new(None).evicted();
    let [first, second, third] = [play.page, map(PAGE), map(PAGE)];
    // What the child has is at the third address, in the one address space that both have here.
    assert!(play.space.faults.unregister(first..first + PAGE));
    let child = play.unborn(second, third);
    play.born(&child, first, second);
    let actions = [first, second, third].map(|page| play.action(&child, page));
    assert!(matches!(actions[2], FaultAction::Buffered(_)), "{actions:?}");
    assert_eq!(actions[..2], [FaultAction::Zero, FaultAction::Zero]);
}

/// What the child had at birth is told by what it has done since.
#[test]
fn a_child_that_moves_on_had_what_it_moved() {
    let mut play = Play::new(None).evicted();
    let [first, second, third] = [play.page, map(PAGE), map(PAGE)];
    assert!(play.space.faults.unregister(first..first + PAGE));
    let child = play.unborn(first, third);
    // Of after the fork.
    play.born(&child, first, second);
    assert!(matches!(play.action(&child, third), FaultAction::Buffered(_)));
}

/// Its pages and its end are the other thread's, also if its end was told to the first before it moved.
#[test]
fn a_child_is_served_by_the_thread_that_has_fewer_spaces() {
    for told_before in [false, true] {
        let mut play = Play::by(shared_by(2), None, 0, 1).evicted();
        let parent = play.space.clone();
        let client = Client::scripted(0, Checksum::new(7));
        let mut other =
            FaultCore::new(Instant::now(), play.shared.clone(), 1, client, Asks::nobody(), None);
        let child = play.forked(&parent);
        if told_before {
            play.shared.homes.end(child.id);
        }
        play.fault.send_away(&child);
        assert!(!play.fault.spaces.contains_key(&child.id));
        let listens = std::iter::from_fn(|| play.fault.poll_listen());
        assert!(matches!(listens.last(), Some(Listen::End(space)) if space.id == child.id));
        if !told_before {
            play.commands[1].try_iter().for_each(|command| other.handle_command(command));
            assert!(other.spaces.contains_key(&child.id));
            play.shared.homes.end(child.id);
        }
        play.obey();
        assert!(lock(&play.shared.tables).knows(child.id, 0..u64::MAX), "it is the other's to end");
        play.commands[1].try_iter().for_each(|command| other.handle_command(command));
        assert!(!lock(&play.shared.tables).knows(child.id, 0..u64::MAX));
        assert!(lock(&play.shared.tables).knows(parent.id, 0..u64::MAX));
        // The next child stays where there is room again, or goes there.
        let next = play.forked(&parent);
        play.fault.send_away(&next);
        assert!(
            matches!(play.commands[1].try_recv(), Ok(FaultCommand::Add(space)) if space.id == next.id)
        );
    }
}

/// A probe would leave zeros where there is nothing yet.
#[test]
fn nothing_is_left_where_a_page_of_a_child_is_leaving() {
    let mut play = Play::with(None, 0, 2).evicted();
    let (parent, first) = (play.space.clone(), play.page);
    let second = first + PAGE;
    // At the second address the child's page has been moved out, and has no marker yet.
    parent.faults.mark(second..second + PAGE, false).expect("no marker");
    let mut leaving = Vec::new();
    lock(&play.shared.tables).begin_evict(ID, &[PageAddr::containing(second)], &mut leaving);
    play.tell(&parent, vec![play.fork_here(), Play::remap(first, second)]);
    let page_tables = Pagemap::open(std::process::id() as i32).expect("own page tables");
    assert!(page_tables.taken(second..second + PAGE).expect("a scan").is_empty());
}

#[test]
fn a_marker_of_which_nothing_is_known_matters_while_somebody_has_the_memory() {
    assert!(Play::new(None).is_stopped_by_a_marker());
    // The page tables can be read until the kernel has emptied them: here they are the test's own.
    assert!(!Play::new(Some(dead_userfaultfd())).is_stopped_by_a_marker());
}

/// An event is read without the gate: what it says of the address is not known yet.
#[test]
fn no_marker_is_left_or_taken_away_while_an_event_is_not_applied() {
    let play = Play::new(None);
    let slot = play.leaving();
    lock(&play.shared.tables).marked(slot, (ID, play.page()));
    play.space.ungated.read(|| (), |()| true);
    assert_eq!(play.finish(slot, EvictOutcome::Zero), None);
    assert!(play.space.has_marker(play.page()), "perhaps it was another page's");
    play.space.ungated.applied();
    assert_eq!(play.finish(slot, EvictOutcome::Zero), Some(EvictOutcome::Zero));
    assert!(!play.space.has_marker(play.page()) && !play.shared.has_failed());

    let slot = play.leaving();
    play.space.ungated.read(|| (), |()| true);
    assert_eq!(play.finish(slot, EvictOutcome::Moved(8)), None);
    assert!(!play.space.has_marker(play.page()), "a child may inherit what nobody knows of");
    play.space.ungated.applied();
    assert_eq!(play.finish(slot, EvictOutcome::Moved(8)), Some(EvictOutcome::Moved(8)));
    assert!(play.space.has_marker(play.page()));
}

/// Longer than what is taken out of a userfaultfd at once, so that all of that is the test's.
const FREE: u64 = 80 << 20;

impl Play {
    /// A thread that waits inside mremap until that is read of, its id, and free memory in the userfaultfd.
    pub(super) fn with_mremap(&self) -> (std::thread::JoinHandle<()>, i32, u64) {
        let (moved, free) = (map(PAGE), map(FREE));
        for range in [moved..moved + PAGE, free..free + FREE] {
            assert!(self.space.faults.register(range));
        }
        let (tell, told) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let target = map(PAGE) as *mut libc::c_void;
            tell.send(nix::unistd::gettid().as_raw()).expect("the test waits");
            let (bytes, flags) = (PAGE as usize, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
            // SAFETY: two mappings of the test, which nobody uses.
            let at = unsafe { libc::mremap(moved as *mut _, bytes, bytes, flags, target) };
            assert_eq!(at, target);
        });
        let tid = told.recv().expect("the thread's id");
        while !self.space.faults.has_event() || proc::blocked_in(tid) != Some(libc::SYS_mremap) {
            std::thread::yield_now();
        }
        (thread, tid, free)
    }

    /// A thread waits for a page for so long that it may be the one that is to tell of a change.
    fn wait_long(&mut self, page: u64, tid: i32) {
        let place = (ID, PageAddr::containing(page));
        self.fault.again.push(Fault { place, write: true, tid });
        let now = Instant::now();
        self.fault.relieve(now);
        self.fault.relieve(now + Duration::from_secs(1));
        self.fault.again.clear();
        self.fault.relieve(now);
    }
}

/// Nobody of the address space is served meanwhile.
#[test]
fn changes_do_not_wait_for_ever_for_others() {
    let mut play = Play::new(None);
    let (thread, ..) = play.with_mremap();
    let (space, page, away) = (play.space.clone(), play.page, map(PAGE));
    play.fault.note_told(ID, vec![Play::remap(page, away)]);
    // Longer ago than it may be.
    let long_ago = Instant::now().checked_sub(Duration::from_secs(60)).expect("an uptime");
    for (late, stopped) in [(Instant::now(), false), (long_ago, true)] {
        play.fault.spaces.get_mut(&ID).expect("the space").late = Some(late);
        assert!(!play.fault.read_changes(&Instant::now, &space, &mut Vec::new()));
        assert_eq!(play.shared.has_failed(), stopped);
    }
    assert_eq!(play.fault.read_space(&Instant::now, ID, true), 1);
    thread.join().expect("no panic");
}

#[test]
fn pages_that_were_moved_to_where_a_thread_was_let_through_are_missed() {
    let mut play = Play::new(None).evicted();
    let (thread, tid, free) = play.with_mremap();
    play.wait_long(free, tid);
    let space = play.space.clone();
    play.fault.repair(&space);
    let remap = Play::remap(play.page, free);
    play.tell(&space, vec![remap]);
    assert!(play.shared.has_failed(), "it has no marker, and would be zeros");
    assert_eq!(play.fault.read_space(&Instant::now, ID, true), 1);
    thread.join().expect("no panic");
}
