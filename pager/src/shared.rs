//! What the threads of a pager share.

mod record;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use crossbeam_channel::{Receiver, Sender, unbounded};
use gms_policy::budget::Budget;
use gms_policy::ids::{AgentId, Bytes, SpaceId};
use gms_policy::limits::{AGENTS_MAX, SLACK_MIN};
use gms_policy::redundancy::AgentSet;
use gms_transport::client::Checksum;
use gms_transport::message::PAGES_MAX;
use hdrhistogram::Histogram;
use nix::sys::eventfd::EventFd;
use serde::{Deserialize, Serialize};

pub(crate) use self::record::SharedRecord;
use crate::board;
use crate::config::SessionConfig;
use crate::estate::Estate;
use crate::frames::Frames;
use crate::handover::Handover;
use crate::homes::{FaultCommand, Homes};
use crate::kernel::journal::Journal;
use crate::page_map::PAGE;
use crate::space::Space;
use crate::speech::note;
use crate::stats::AgentStats;
use crate::sync::{event_fd, lock};
use crate::tables::{Place, SLOTS_MAX, Tables, TablesLock};

/// Pages of the write-back buffer: 16 MiB.
const SLOTS: u32 = 4096;
const _: () = assert!(SLOTS <= SLOTS_MAX);
/// See [`Sizes::room_kept`]. Less than the slack of any budget, so that eviction is under way by then.
const ROOM_KEPT: u64 = 128;
const _: () = assert!(ROOM_KEPT * PAGE < SLACK_MIN);
/// An agent that has given wrong pages this often is not used any more.
pub(crate) const BLAME_MAX: u32 = 3;
/// An agent that has lost all that it had this often under one workload, which uses up numbers of sets, is not used any more either.
const LOSSES_MAX: u32 = 64;
/// What to do when the disk has ended, the only own agent beside which there are others.
pub(crate) const NEW_DISK: &str = "for a copy on a disk again, 'gms detach PID' and 'gms attach PID --local SIZE --agent HOST:PORT --disk DIR'";
/// See [`Sizes::own_pages`]: an exchange takes 25 us, 8 of which are the fault thread's, so that about so many keep it busy.
const OWN_PAGES: usize = 4;
/// Longest fault latency that is told apart from longer ones.
const LATENCY_MAX: Duration = Duration::from_secs(60);

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
    /// Pages that a fault thread fetches for threads that wait before it lends any to another.
    pub own_pages: usize,
}

impl Default for Sizes {
    fn default() -> Sizes {
        Sizes { slots: SLOTS, room_kept: ROOM_KEPT, put_pages: PAGES_MAX, own_pages: OWN_PAGES }
    }
}

/// How a session ended by itself.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// No process of the tree is left.
    TreeGone,
    /// All pages that agents still had are home, nothing is registered any more: the workload runs on by itself.
    Detached {
        /// What to tell of pages that nobody has any more; they are poisoned.
        lost: Option<String>,
        /// Not because it was asked for: gms's own agent has ended, and there is no other.
        is_forced: bool,
    },
    /// The process cannot be paged, and is as it was. The text says why.
    Refused(String),
    /// Data could not be had or kept; the workload was killed. The text says why.
    Killed(String),
}

/// See the module's documentation.
pub struct Shared {
    /// What the user asked for.
    pub config: SessionConfig,
    /// What is known of the pages.
    pub tables: TablesLock,
    /// Bytes of the write-back slots.
    pub frames: Frames,
    /// Where what is read of changes is kept.
    pub journal: Arc<Journal>,
    /// Secret seed of the page checksums.
    pub seed: u64,
    /// Resident bytes of the tree: measured by the evict thread, advanced by both in between.
    pub resident: AtomicI64,
    /// Faults must not bring residents above this; the budget's ceiling, unless nothing can be evicted.
    pub ceiling: AtomicI64,
    /// How much of what there is.
    pub sizes: Sizes,
    /// Agents that are to have each page, beside a disk.
    pub copies: u32,
    /// How often each agent has given something else than what it was given.
    blamed: Mutex<BTreeMap<AgentId, u32>>,
    /// How often each agent has come back without what it had, or left with it.
    losses: Mutex<BTreeMap<AgentId, u32>>,
    /// Agents for which either was too often, a bit each.
    unsound: AtomicU64,
    /// Agents that have lost what they had, which was not told yet, a bit each.
    emptied: AtomicU64,
    /// The session's own agent, once it has ended.
    ended: Mutex<Option<AgentId>>,
    /// Above this eviction begins.
    high: i64,
    /// The CPU on which all faults of late were, and where they are handled; none if negative.
    pub fault_cpu: AtomicI32,
    /// Processes of ours inside the workload: they are not a part of it.
    pub evictors: Mutex<Vec<i32>>,
    /// What the evict thread reads of the workload may fault too, and must not wait for the room that it makes.
    pub evict_thread: AtomicI32,
    next_space: AtomicU64,
    /// The fault threads, and which spaces each of them serves.
    pub homes: Homes,
    to_evict: Sender<EvictCommand>,
    kick_evict: EventFd,
    done: EventFd,
    outcome: Mutex<Option<Outcome>>,
    failed: AtomicBool,
    /// Whether another binary is to go on in the place of this one.
    pub(crate) handover: Handover,
    /// What this pager leaves if it dies.
    pub(crate) estate: Estate,
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
    /// Pages made of the other parts of their stripes.
    pub pages_made: AtomicU64,
    /// Pages that workers installed for threads that waited.
    pub lent_faults: AtomicU64,
    /// See [`Stats`](crate::stats::Stats).
    pub lent_hedges: AtomicU64,
    /// Latency of fetches in ns.
    pub latency: Mutex<Histogram<u64>>,
    /// Figures which only the evict thread can tell.
    pub gauges: Mutex<Gauges>,
    /// Beginning of the session.
    pub started: Instant,
}

/// Figures which the evict thread publishes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
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
    /// Pages of which there are too few copies.
    pub short: u64,
    /// When the keys for the agents end, if they are anybody's.
    pub key_until: Option<SystemTime>,
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
    /// For each of the fault threads.
    pub fault: Vec<Receiver<FaultCommand>>,
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
        let tables = Tables::new(sizes.slots, config.budget_bytes / PAGE)?;
        let tables = match config.redundancy.shape() {
            Some(shape) => tables.striped(shape),
            None => tables,
        };
        let frames = Frames::new(sizes.slots)?;
        let (shared, commands) = Shared::of(config, seed, sizes, tables, frames)?;
        Ok((Arc::new(shared), commands))
    }

    /// With what a pager that has died has left: its page map with all beside it, and the bytes of its slots.
    ///
    /// # Errors
    /// As [`Tables::recover`].
    pub fn adopted(
        config: SessionConfig,
        seed: u64,
        sizes: Sizes,
        (map, frames): (File, File),
    ) -> std::io::Result<(Arc<Shared>, Commands)> {
        let tables = Tables::recover(map, config.budget_bytes / PAGE)?;
        let frames = Frames::of(frames, tables.slots())?;
        let next_space = tables.newest().0 + 1;
        let (mut shared, commands) = Shared::of(config, seed, sizes, tables, frames)?;
        shared.next_space = next_space.into();
        Ok((Arc::new(shared), commands))
    }

    fn of(
        config: SessionConfig,
        seed: u64,
        sizes: Sizes,
        tables: Tables,
        frames: Frames,
    ) -> std::io::Result<(Shared, Commands)> {
        // Their commands concern address spaces, each of which needs a descriptor: that is their bound.
        let (homes, fault) = Homes::new(config.fault_threads)?;
        let (to_evict, evict) = unbounded();
        let budget = Budget::new(Bytes(config.budget_bytes));
        let latency = Histogram::new_with_max(LATENCY_MAX.as_nanos() as u64, 3)
            .map_err(|e| std::io::Error::other(e.to_string()))?;
        let shared = Shared {
            tables: TablesLock::new(tables),
            frames,
            journal: Journal::new()?,
            seed,
            resident: AtomicI64::new(0),
            ceiling: AtomicI64::new(budget.ceiling().0 as i64),
            sizes,
            copies: config.redundancy.copies(config.agents.len()),
            blamed: Mutex::default(),
            losses: Mutex::default(),
            unsound: AtomicU64::new(0),
            emptied: AtomicU64::new(0),
            ended: Mutex::default(),
            high: budget.high().0 as i64,
            fault_cpu: AtomicI32::new(-1),
            evictors: Mutex::default(),
            evict_thread: AtomicI32::new(0),
            next_space: AtomicU64::new(1),
            homes,
            to_evict,
            kick_evict: event_fd()?,
            done: event_fd()?,
            outcome: Mutex::new(None),
            failed: AtomicBool::new(false),
            handover: Handover::default(),
            estate: Estate::default(),
            stop: AtomicBool::new(false),
            detaching: AtomicBool::new(false),
            faults: AtomicU64::new(0),
            zero_fills: AtomicU64::new(0),
            pages_in: AtomicU64::new(0),
            prefetched: AtomicU64::new(0),
            prefetch_hits: AtomicU64::new(0),
            pages_made: AtomicU64::new(0),
            lent_faults: AtomicU64::new(0),
            lent_hedges: AtomicU64::new(0),
            latency: Mutex::new(latency),
            gauges: Mutex::default(),
            started: Instant::now(),
            config,
        };
        Ok((shared, Commands { fault, evict }))
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

    /// Pages have come back from agents.
    pub fn count_installed(&self, pages: u64) {
        self.count_resident(pages as i64);
        self.pages_in.fetch_add(pages, Ordering::Relaxed);
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

    /// An agent can be used. If its session is another than before it has lost what it was given: the first lane that sees it has its copies forgotten, and
    /// if any page is only there, the workload is stopped.
    pub fn agent_up(&self, agent: AgentId, name: &str, session: u64) {
        let mut tables = lock(&self.tables);
        if !tables.begin_session(agent, session) {
            return;
        }
        // Who detaches asks for each page, and poisons those that have gone.
        let detaching = self.detaching.load(Ordering::Relaxed);
        if !detaching && tables.depends_on(agent) {
            // Before the session is noted for who goes on after this pager: it would not look for a loss.
            board::withdraw();
            drop(tables);
            self.fail(format!(
                "agent {name} has lost the workload's pages: it was restarted, or had no link to gms for over a minute (a cut, or gms was frozen); \
                 copies outlive both (--redundancy, --disk), a longer --drain there a restart"
            ));
            return;
        }
        if tables.held_by(agent) > 0 {
            self.note_emptied(agent, true);
        }
        let had_pages = tables.lose(agent);
        drop(tables);
        if had_pages {
            self.note_loss(agent, name);
        }
    }

    /// An agent has lost pages that others have, or leaves with them.
    pub fn note_loss(&self, agent: AgentId, name: &str) {
        let mut losses = lock(&self.losses);
        let count = losses.entry(agent).or_default();
        *count += 1;
        if *count >= LOSSES_MAX && self.has_copies() && self.do_without(agent) {
            note(format!(
                "agent {name} has lost what it had, or left with it, {count} times: others are used in its place"
            ));
        }
    }

    /// The agent has lost what it had, or that was told.
    pub fn note_emptied(&self, agent: AgentId, is_so: bool) {
        let bit = 1 << agent.0;
        match is_so {
            true => self.emptied.fetch_or(bit, Ordering::Relaxed),
            false => self.emptied.fetch_and(!bit, Ordering::Relaxed),
        };
    }

    /// Whether the agent has lost what it had, and that was not told yet.
    pub fn is_emptied(&self, agent: AgentId) -> bool {
        self.emptied.load(Ordering::Relaxed) >> agent.0 & 1 == 1
    }

    /// The session's own agent, once it has ended.
    pub fn ended_agent(&self) -> Option<AgentId> {
        *lock(&self.ended)
    }

    /// The session's own agent does not come back, as `what` says: what it had is lost. If any page was only there, the workload is stopped. The embedded agent,
    /// which is the only one, leaves it without any: it is let go.
    pub fn agent_ended(&self, agent: AgentId, what: &str) {
        *lock(&self.ended) = Some(agent);
        let mut tables = lock(&self.tables);
        let detaching = self.detaching.load(Ordering::Relaxed);
        let is_needed = tables.depends_on(agent);
        if is_needed && !detaching {
            drop(tables);
            return self.fail(format!("{what}, and with it pages that were only there"));
        }
        tables.lose(agent);
        drop(tables);
        let is_only = self.config.is_embedded();
        note(match (is_needed, is_only) {
            (true, _) => format!("{what}, and with it pages that were only there"),
            (false, true) => format!("{what}: the workload goes on without paging"),
            (false, false) => format!(
                "{what}: the workload goes on with the copies that are elsewhere; {NEW_DISK}"
            ),
        });
        if is_only {
            self.detaching.store(true, Ordering::Relaxed);
            board::withdraw();
        }
    }

    /// Whether a page has more than one holder.
    fn has_copies(&self) -> bool {
        self.copies > 1 || self.config.disk.is_some()
    }

    /// An agent does `what`: gives a page that is not the one it was given, or does not have it any more. The first time is told. After some it is used no
    /// more, where other agents have pages too. Else what it gives ends the workload, if it is `for_threads`, and not while that is let go: then it is asked again.
    pub fn blame(&self, agent: AgentId, name: &str, what: &str, for_threads: bool) {
        let mut blamed = lock(&self.blamed);
        let count = blamed.entry(agent).or_default();
        *count += 1;
        let (count, text) = (*count, format!("agent {name} {what}"));
        drop(blamed);
        let advice = "test its machine's memory, or do without it";
        match count {
            1 => note(format!("{text}: {advice}")),
            BLAME_MAX if self.has_copies() => {
                note(format!("{text} again: others are used in its place; {advice}"));
                self.do_without(agent);
            }
            BLAME_MAX..
                if for_threads && !self.has_copies() && !self.detaching.load(Ordering::Relaxed) =>
            {
                self.fail(format!("{text}: {advice}"));
            }
            _ => {}
        }
    }

    /// The agent is used no more: also by who goes on after this pager. False if it was not before.
    fn do_without(&self, agent: AgentId) -> bool {
        let bit = 1 << agent.0;
        let is_news = self.unsound.fetch_or(bit, Ordering::Relaxed) & bit == 0;
        self.estate.extend();
        self.kick_evict();
        is_news
    }

    /// Agents that have given wrong pages.
    pub fn unsound_agents(&self) -> AgentSet {
        let bits = self.unsound.load(Ordering::Relaxed);
        (0..AGENTS_MAX as u8).filter(|n| bits >> n & 1 == 1).map(AgentId).collect()
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

    /// Wakes the evict thread.
    pub fn kick_evict(&self) {
        let _ = self.kick_evict.write(1);
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
            // Nobody goes on from here.
            board::withdraw();
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

    /// Whether the session has ended, and the workload is not being killed.
    pub fn is_let_go(&self) -> bool {
        lock(&self.outcome).as_ref().is_some_and(|how| !matches!(how, Outcome::Killed(_)))
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
