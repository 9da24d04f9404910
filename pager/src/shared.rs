//! What the threads of a supervisor share.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use gms_policy::budget::Budget;
use gms_policy::ids::{AgentId, Bytes, PageAddr, SpaceId};
use gms_policy::limits::SLACK_MIN;
use gms_transport::client::Checksum;
use gms_transport::message::PAGES_MAX;
use hdrhistogram::Histogram;
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::frames::Frames;
use crate::kernel::{Faults, PageTables};
use crate::page_map::PAGE;
use crate::range_set::RangeSet;
use crate::session::{Outcome, SessionConfig};
use crate::stats::AgentStats;
use crate::tables::{Place, Tables};

/// Pages of the write-back buffer: 16 MiB.
const SLOTS: u32 = 4096;
/// See [`Sizes::room_kept`]. Less than the slack of any budget, so that eviction is under way by then.
const ROOM_KEPT: u64 = 128;
const _: () = assert!(ROOM_KEPT * PAGE < SLACK_MIN);
/// Longest fault latency that is told apart from longer ones.
const LATENCY_MAX: Duration = Duration::from_secs(60);

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
    /// Where memory was taken out of the userfaultfd, until all changes begun by then have been told.
    pub relieved: Mutex<RangeSet>,
    /// What was registered while a change was under way, and is perhaps not recorded, until all changes begun by then have been told.
    pub unrecorded: Mutex<RangeSet>,
    /// Threads change it without a moment in between in which somebody could be served: they are to be stopped for one.
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

/// While pages are being moved faults are read without the gate, so that they need not wait for it: if something was readable and then no
/// event waits, it is a fault. But it may go (its thread got a signal) and an event come in between. Who moved pages meanwhile finds that
/// out here.
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

/// For the fault thread.
pub enum FaultCommand {
    /// Serve this space too.
    Add(Arc<Space>),
    /// The space has ended.
    Drop(SpaceId),
}

/// For the evict thread.
pub enum EvictCommand {
    /// A child was forked; its process is to be found.
    Forked(Arc<Space>),
    /// The space has been dropped: nothing of it is told any more.
    Dropped(SpaceId),
    /// See [`Space::restless`].
    Restless(SpaceId),
}

/// How much of what there is in a session.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Pages of the write-back buffer.
    pub slots: u32,
    /// Room that first touches and prefetches leave to demand fetches, in pages, so that those need not wait for an eviction while another
    /// thread fills memory.
    pub room_kept: u64,
    /// Most pages put at once.
    pub put_pages: usize,
}

impl Default for Sizes {
    fn default() -> Sizes {
        Sizes { slots: SLOTS, room_kept: ROOM_KEPT, put_pages: PAGES_MAX }
    }
}

/// See the module's documentation.
pub struct Shared {
    /// What the user asked for.
    pub config: SessionConfig,
    /// What is known of the pages.
    pub tables: Mutex<Tables>,
    /// Bytes of the write-back slots.
    pub frames: Frames,
    /// Secret seed of the page checksums.
    pub seed: u64,
    /// Resident bytes of the tree: measured by the evict thread, advanced by both in between.
    pub resident: AtomicI64,
    /// Faults must not bring residents above this; the budget's ceiling, unless nothing can be evicted.
    pub ceiling: AtomicI64,
    /// How much of what there is.
    pub sizes: Sizes,
    /// Above this eviction begins.
    high: i64,
    /// The CPU on which all faults of late were, and where they are handled; none if negative.
    pub fault_cpu: AtomicI32,
    /// Processes of ours inside the workload: they are not a part of it.
    pub evictors: Mutex<Vec<i32>>,
    /// What the evict thread reads of the workload may fault too, and must not wait for the room that it makes.
    pub evict_thread: AtomicI32,
    next_space: AtomicU64,
    to_fault: Sender<FaultCommand>,
    to_evict: Sender<EvictCommand>,
    kick_fault: EventFd,
    kick_evict: EventFd,
    done: EventFd,
    outcome: Mutex<Option<Outcome>>,
    failed: AtomicBool,
    /// The threads shall end.
    pub stop: AtomicBool,
    /// All pages shall be brought home.
    pub detaching: AtomicBool,
    /// Page faults handled.
    pub faults: AtomicU64,
    /// Pages filled with zeros.
    pub zero_fills: AtomicU64,
    /// Pages fetched.
    pub pages_in: AtomicU64,
    /// Pages fetched ahead.
    pub prefetched: AtomicU64,
    /// Of those, used.
    pub prefetch_hits: AtomicU64,
    /// Latency of fetches in ns.
    pub latency: Mutex<Histogram<u64>>,
    /// Figures which only the evict thread can tell.
    pub gauges: Mutex<Gauges>,
    /// Beginning of the session.
    pub started: Instant,
}

/// Figures which the evict thread publishes.
#[derive(Clone, Debug, Default)]
pub struct Gauges {
    /// Root process.
    pub root: i32,
    /// Its command line.
    pub command: String,
    /// Highest resident bytes measured.
    pub resident_peak: u64,
    /// Bytes that could not be paged.
    pub unpageable: u64,
    /// No agent takes pages, though some must go.
    pub full: bool,
    /// For how long that was so.
    pub full_time: Duration,
    /// Longest stop for an attach.
    pub attach: Duration,
    /// Looks at the tree's size.
    pub looks: u64,
    /// CPU time of those.
    pub looks_cpu: Duration,
    /// Processes seen.
    pub processes: u64,
    /// Processes attached.
    pub attached: u64,
    /// The agents.
    pub agents: Vec<AgentStats>,
}

/// The other ends of the command channels.
pub struct Commands {
    /// For the fault thread.
    pub fault: Receiver<FaultCommand>,
    /// For the evict thread.
    pub evict: Receiver<EvictCommand>,
}

impl Shared {
    /// Everything at its beginning.
    pub fn new(config: SessionConfig, seed: u64) -> std::io::Result<(Arc<Shared>, Commands)> {
        Shared::sized(config, seed, Sizes::default())
    }

    /// The same with other sizes: for simulations.
    pub fn sized(
        config: SessionConfig,
        seed: u64,
        sizes: Sizes,
    ) -> std::io::Result<(Arc<Shared>, Commands)> {
        // Their commands concern address spaces, each of which needs a descriptor: that is their bound.
        let (to_fault, fault) = unbounded();
        let (to_evict, evict) = unbounded();
        let event_fd =
            || EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let budget = Budget::new(Bytes(config.budget_bytes));
        let latency = Histogram::new_with_max(LATENCY_MAX.as_nanos() as u64, 3)
            .map_err(|e| std::io::Error::other(e.to_string()))?;
        let shared = Shared {
            tables: Mutex::new(Tables::new(sizes.slots, config.budget_bytes / PAGE)?),
            frames: Frames::new(sizes.slots)?,
            seed,
            resident: AtomicI64::new(0),
            ceiling: AtomicI64::new(budget.ceiling().0 as i64),
            sizes,
            high: budget.high().0 as i64,
            fault_cpu: AtomicI32::new(-1),
            evictors: Mutex::default(),
            evict_thread: AtomicI32::new(0),
            next_space: AtomicU64::new(1),
            to_fault,
            to_evict,
            kick_fault: event_fd()?,
            kick_evict: event_fd()?,
            done: event_fd()?,
            outcome: Mutex::new(None),
            failed: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            detaching: AtomicBool::new(false),
            faults: AtomicU64::new(0),
            zero_fills: AtomicU64::new(0),
            pages_in: AtomicU64::new(0),
            prefetched: AtomicU64::new(0),
            prefetch_hits: AtomicU64::new(0),
            latency: Mutex::new(latency),
            gauges: Mutex::default(),
            started: Instant::now(),
            config,
        };
        Ok((Arc::new(shared), Commands { fault, evict }))
    }

    /// A name for a new space.
    pub fn new_space(&self) -> SpaceId {
        SpaceId(self.next_space.fetch_add(1, Ordering::Relaxed))
    }

    /// Checksum of a page.
    pub fn checksum(&self, page: &[u8]) -> u64 {
        Checksum::new(self.seed).of(page)
    }

    /// Whether `pages` more may become resident now.
    pub fn has_room(&self, pages: u64) -> bool {
        let after = self.resident.load(Ordering::Relaxed) + (pages * PAGE) as i64;
        after <= self.ceiling.load(Ordering::Relaxed)
    }

    /// Pages that may become resident now.
    pub fn room(&self) -> u64 {
        let left = self.ceiling.load(Ordering::Relaxed) - self.resident.load(Ordering::Relaxed);
        left.max(0) as u64 / PAGE
    }

    /// Pages have become resident, or (negative) are no longer.
    pub fn count_resident(&self, pages: i64) {
        let bytes = pages * PAGE as i64;
        let before = self.resident.fetch_add(bytes, Ordering::Relaxed);
        if before <= self.high && before + bytes > self.high {
            self.kick_evict();
        }
    }

    /// First touches were filled; only written ones cost memory.
    pub fn count_zeros(&self, pages: u64, written: bool) {
        self.zero_fills.fetch_add(pages, Ordering::Relaxed);
        if written {
            self.count_resident(pages as i64);
        }
    }

    /// Whether so much is resident that pages should go out.
    pub fn is_high(&self) -> bool {
        self.resident.load(Ordering::Relaxed) > self.high
    }

    /// Asks the fault thread for something.
    pub fn tell_fault(&self, command: FaultCommand) {
        // The receiver lives as long as the thread: nobody needs to be told any more.
        let _ = self.to_fault.send(command);
        self.kick_fault();
    }

    /// Tells the evict thread of a new child.
    pub fn tell_forked(&self, child: Arc<Space>) {
        let _ = self.to_evict.send(EvictCommand::Forked(child));
        self.kick_evict();
    }

    /// Tells the evict thread that all of a space which has ended has been told.
    pub fn tell_dropped(&self, id: SpaceId) {
        // Nobody waits for it.
        let _ = self.to_evict.send(EvictCommand::Dropped(id));
    }

    /// An agent can be used. If it was restarted (`lost`: the lane had an older session with it), the first lane to see it has its copies forgotten; if any
    /// page is only there, the workload is stopped.
    pub fn agent_up(&self, agent: AgentId, name: &str, session: u64, lost: bool) {
        let mut tables = lock(&self.tables);
        if !tables.begin_session(agent, session, lost) {
            return;
        }
        // Who detaches asks for each page, and poisons those that have gone.
        let detaching = self.detaching.load(Ordering::Relaxed);
        if !detaching && tables.depends_on(agent) {
            drop(tables);
            self.fail(format!("agent {name} was restarted and has lost the workload's pages"));
            return;
        }
        tables.forget_copies(agent);
        let full = tables.exhausted;
        drop(tables);
        // Who detaches evicts nothing any more.
        if full && !detaching {
            self.fail("the page map is full");
        }
    }

    /// Tells the evict thread of a space that is restless.
    pub fn tell_restless(&self, id: SpaceId) {
        let _ = self.to_evict.send(EvictCommand::Restless(id));
        self.kick_evict();
    }

    /// Whether a fault is by a thread of ours: of the evictor in that space, or of the evict thread, which reads the workload's memory.
    pub fn is_ours(&self, tid: i32, space: &Space) -> bool {
        tid == space.evictor.load(Ordering::Relaxed)
            || tid == self.evict_thread.load(Ordering::Relaxed)
    }

    /// Wakes the fault thread.
    pub fn kick_fault(&self) {
        // The counter can only be full if the thread is awake anyway.
        let _ = self.kick_fault.write(1);
    }

    /// Wakes the evict thread.
    pub fn kick_evict(&self) {
        let _ = self.kick_evict.write(1);
    }

    /// What the fault thread's kicks arrive on.
    pub fn fault_kicks(&self) -> &EventFd {
        &self.kick_fault
    }

    /// What the evict thread's kicks arrive on.
    pub fn evict_kicks(&self) -> &EventFd {
        &self.kick_evict
    }

    /// Readable once there is an outcome.
    pub fn done_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.done.as_fd()
    }

    /// The session has ended by itself; the first outcome stands.
    pub fn finish(&self, outcome: Outcome) {
        let mut slot = lock(&self.outcome);
        if slot.is_none() {
            self.failed.store(matches!(outcome, Outcome::Killed(_)), Ordering::SeqCst);
            *slot = Some(outcome);
            let _ = self.done.write(1);
        }
    }

    /// Data could not be had or kept: the workload must be stopped before it sees a wrong byte.
    pub fn fail(&self, reason: impl Into<String>) {
        self.finish(Outcome::Killed(reason.into()));
        self.kick_evict();
    }

    /// How the session ended, if it did.
    pub fn outcome(&self) -> Option<Outcome> {
        lock(&self.outcome).clone()
    }

    /// Whether the workload is being killed: nothing may be installed any more.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Wakes the threads which wait for these pages; they fault again and are served by what is known then.
    pub fn wake(&self, spaces: &BTreeMap<SpaceId, Arc<Space>>, places: &[Place]) {
        for (space, page) in places {
            if let Some(space) = spaces.get(space) {
                space.faults.wake(page.get()..page.get() + PAGE);
            }
        }
    }
}

/// Locks; a panic of another thread ends the process anyway (see `session`).
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Empties an event counter.
pub fn drain(event: &EventFd) {
    let mut count = [0u8; 8];
    // Fails with EAGAIN when it is empty already.
    let _ = nix::unistd::read(event.as_fd(), &mut count);
}
