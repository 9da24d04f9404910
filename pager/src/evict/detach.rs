//! Detaching: every page comes home, then nothing is registered and no evictor is left.
//!
//! `bring_home`: `copy_buffered`, `scan` queues what is away, `ask` fetches it, `arrived`, `ended`, `install`; `let_go` when nothing is away.
//! A page that its agent has lost is poisoned: the workload is let go, and gets SIGBUS where it touches that page. Else it would read zeros there.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gms_policy::ids::{AgentId, PageAddr, SpaceId};
use gms_policy::stripes::Read;
use gms_transport::Transport;
use gms_transport::client::{self, Failure, GET_DEADLINE, GetId, Urgency};
use gms_transport::message::{PAGES_MAX, Status};

use self::home::{Fetch, Lost};
use super::EvictThread;
use crate::fault::look_for_marker;
use crate::kernel::{Installed, Probe};
use crate::page_map::{Content, PAGE};
use crate::shared::Outcome;
use crate::space::Space;
use crate::sync::lock;
use crate::tables::{Place, Tables};

mod home;

pub(super) use self::home::Homecoming;

/// Exchanges under way with one agent: 2 MiB, less than its bound of unread replies.
const EXCHANGES_MAX: usize = 8;
/// The scan goes on when fewer pages than this are queued, up to `QUEUE_HIGH`.
const QUEUE_LOW: usize = 4096;
const QUEUE_HIGH: usize = 16_384;
/// Entries of the page map looked at while its lock is held: about 20 us.
const ENTRIES_MAX: usize = 2048;
/// Such looks before the agents' replies are seen to again.
const LOOKS_MAX: u32 = 32;
/// Pages copied, or poisoned, while the gate is closed.
const GATED_MAX: usize = 64;
/// Pause before what was missed by a scan (its agent was away, an event came in between) is looked for again.
const PASS_PAUSE: Duration = Duration::from_millis(10);
/// If nothing comes home and nothing is given up for this long, the workload is killed: it cannot be let go.
const STALLED: Duration = Duration::from_secs(60);
const _: () = assert!(STALLED.as_secs() > 2 * GET_DEADLINE.as_secs());
/// Processes named in a message.
const NAMED_MAX: usize = 4;

impl<T: Transport> EvictThread<T> {
    /// Brings pages home a step further; when all are, lets the workload go. True if anything was done.
    pub(super) fn bring_home(&mut self, now: Instant) -> bool {
        if self.home.began.is_none() {
            self.home.began = Some(now);
            self.write_back.begin_detach(now);
        }
        let copied = self.copy_buffered();
        for ((space, page), content) in self.write_back.take_unmade() {
            self.lose(space, &[(page, content)]);
        }
        let scanned = self.scan(now);
        let asked = self.ask(now);
        let away = lock(&self.shared.tables).away_pages();
        if away == 0 && self.home.fetches.is_empty() {
            self.let_go(now);
        } else if away != self.home.progress.0 {
            self.home.progress = (away, now);
        } else if now.duration_since(self.home.progress.1) > STALLED {
            self.shared.fail("its pages do not come home, and it cannot be let go without them: check that its agents run and can be reached");
        }
        copied || scanned || asked
    }

    /// From the write-back buffer, a few at a time.
    fn copy_buffered(&mut self) -> bool {
        if lock(&self.shared.tables).is_buffer_free() {
            return false;
        }
        let owners = lock(&self.shared.tables).buffered();
        let ids: BTreeSet<SpaceId> = owners.into_iter().map(|((space, _), _)| space).collect();
        let mut copied = 0;
        for space in ids.into_iter().filter_map(|id| self.spaces.get(&id)) {
            let _gate = lock(&space.gate);
            if !space.ungated.is_intact() {
                continue;
            }
            let mut tables = lock(&self.shared.tables);
            let buffered = tables.buffered();
            let ours = buffered.into_iter().filter(|(place, _)| place.0 == space.id);
            for (place, slot) in ours.take(GATED_MAX) {
                if !is_there(&mut tables, space, place) {
                    continue;
                }
                let outcome = space.faults.copy(place.1.get(), self.shared.frames.read(slot));
                if matches!(outcome, Installed::Done | Installed::Exists) {
                    tables.second_chance(place);
                    copied += i64::from(outcome == Installed::Done);
                }
            }
            drop(tables);
            self.still_intact(space);
        }
        self.shared.count_resident(copied);
        copied > 0
    }

    /// Queues pages that are away, by their agents, and poisons those of agents that have had their time. True if it found any.
    fn scan(&mut self, now: Instant) -> bool {
        let before = self.home.queued();
        if before >= QUEUE_LOW || !self.begin_pass(now, before) {
            return false;
        }
        let mut ids: Vec<SpaceId> = self.spaces.keys().copied().collect();
        ids.sort_unstable();
        let (mut looks, mut poisoned) = (LOOKS_MAX, 0);
        for id in ids {
            while looks > 0
                && self.home.queued() < QUEUE_HIGH
                && self.write_back.may_make()
                && let Some(from) = *self.home.cursors.entry(id).or_insert(Some(0))
            {
                looks -= 1;
                let doomed = self.scan_from(now, id, from);
                poisoned += self.lose(id, &doomed);
            }
        }
        poisoned > 0 || looks == 0 || self.home.queued() > before
    }

    /// One look at the page map. Returns pages that are lost.
    fn scan_from(&mut self, now: Instant, id: SpaceId, from: u64) -> Vec<(PageAddr, Content)> {
        let read = self.write_back.reader(now, Duration::ZERO);
        // Who has been away for longer is not expected back.
        let patient = self.write_back.reader(now, self.home.patience(now));
        let could_read = |tables: &Tables, content| {
            let read = patient.as_ref().map(|read| read(tables, content));
            matches!(read, Some(Read::At(_) | Read::Decode(..)))
        };
        let (home, lane) = (&mut self.home, self.write_back.agents.lane());
        let (mut doomed, mut unread) = (Vec::new(), Vec::new());
        let tables = lock(&self.shared.tables);
        let making = |page| self.write_back.makes((id, page));
        let next = tables.visit_remote(id, from, ENTRIES_MAX, |page, content| {
            if making(page) {
                return true;
            }
            let holders = home.sources(content);
            if let Some(read) = read.as_ref().filter(|_| !lane.is_any_up(holders)) {
                match read(&tables, content) {
                    _ if tables.is_doomed((id, page)) => doomed.push((page, content)),
                    Read::At(_) | Read::Decode(..) => unread.push((page, content)),
                    Read::Later if could_read(&tables, content) => {}
                    Read::Later | Read::Lost => doomed.push((page, content)),
                    Read::Unknown => {}
                }
                return doomed.len().max(unread.len()) < GATED_MAX;
            }
            if holders.is_empty() || tables.is_doomed((id, page)) {
                doomed.push((page, content));
                return doomed.len() < GATED_MAX;
            }
            let agent = lane.nearest(holders);
            home.want(now, agent);
            if lane.is_up(agent) {
                home.queued.entry(agent).or_default().push_back((id, page));
            }
            doomed.len() < GATED_MAX
        });
        drop(tables);
        let mut make = |(page, content): (PageAddr, Content)| {
            let failed = content.holders.without(self.home.sources(content));
            let is_made = self.write_back.make(now, (id, page), content, failed);
            if is_made {
                self.home.forgive(id, &[(page, content)]);
            }
            is_made
        };
        // The scan goes on where there was no room for another.
        let left = unread.iter().position(|&page| !make(page)).map(|at| unread[at].0.get());
        self.home.cursors.insert(id, left.or(next));
        doomed
    }

    /// Whether the scan has something to do: it has not come to its end, or begins again because something was missed.
    fn begin_pass(&mut self, now: Instant, queued: usize) -> bool {
        let home = &mut self.home;
        home.cursors.retain(|id, _| self.spaces.contains_key(id));
        let ended = |id| matches!(home.cursors.get(id), Some(None));
        if !self.spaces.keys().all(ended) {
            return true;
        }
        if queued > 0 || !home.fetches.is_empty() || now < home.next_pass {
            return false;
        }
        home.cursors.clear();
        home.next_pass = now + PASS_PAUSE;
        true
    }

    /// Asks the agents for what is queued.
    fn ask(&mut self, now: Instant) -> bool {
        let mut asked = false;
        for agent in self.home.queued.keys().copied().collect::<Vec<AgentId>>() {
            if !self.write_back.agents.lane().is_up(agent) || self.home.is_silent(agent) {
                // The next pass finds them again.
                self.home.queued.remove(&agent);
                continue;
            }
            let mut under_way = self.home.under_way(agent);
            while under_way < EXCHANGES_MAX
                && let Some((space, pages)) = self.next_pages(agent)
            {
                asked = true;
                under_way += usize::from(self.fetch(now, agent, space, &pages));
            }
        }
        asked
    }

    /// Takes pages for one exchange from the agent's queue.
    fn next_pages(&mut self, agent: AgentId) -> Option<(SpaceId, Vec<PageAddr>)> {
        let queue = self.home.queued.get_mut(&agent)?;
        let space = queue.front()?.0;
        let of_space = queue.iter().take(PAGES_MAX).take_while(|place| place.0 == space).count();
        Some((space, queue.drain(..of_space).map(|place| place.1).collect()))
    }

    /// Fetches those of the pages that still are only at the agent; false if that needs no exchange.
    fn fetch(&mut self, now: Instant, agent: AgentId, space: SpaceId, pages: &[PageAddr]) -> bool {
        let mut begun =
            lock(&self.shared.tables).begin_prefetch(space, pages.iter().copied(), pages.len());
        // Since the scan another page may have come to this address, which another agent has.
        let strays: Vec<(PageAddr, Content)> =
            begun.extract_if(.., |(_, content)| !content.holders.has(agent)).collect();
        self.give_up(space, &strays);
        if begun.is_empty() {
            self.home.excuse_agent(agent, false);
            return false;
        }
        let wanted = |&(_, content): &(PageAddr, Content)| client::Wanted {
            id: content.id,
            check: Some(content.hash),
        };
        let pages = begun.iter().map(wanted).collect();
        let get = self.write_back.agents.get(now, agent, pages, Urgency::Bulk);
        let (came, bytes) = (Vec::new(), Vec::new());
        let fetch = Fetch { space, agent, pages: begun, answered: false, came, bytes };
        self.home.fetches.insert(get, fetch);
        true
    }

    /// Pages that have come, or do not: what is not home is left to the next pass. Threads that wait for it try by themselves.
    fn give_up(&mut self, space: SpaceId, pages: &[(PageAddr, Content)]) {
        let mut tables = lock(&self.shared.tables);
        let places = pages.iter().map(|&(page, _)| (space, page));
        let waited: Vec<Place> = places.filter(|&place| tables.end_prefetch(place)).collect();
        drop(tables);
        self.shared.wake(&self.spaces, &waited);
    }

    /// Pages have come.
    pub(super) fn arrived(&mut self, get: GetId, pages: Range<usize>, bytes: &[u8]) {
        let Some(fetch) = self.home.fetches.get_mut(&get) else { return };
        fetch.answered = true;
        fetch.came.extend_from_slice(&fetch.pages[pages]);
        fetch.bytes.extend_from_slice(bytes);
    }

    /// No more of its pages come: installs those that have.
    pub(super) fn ended(&mut self, now: Instant, get: GetId) {
        let Some(fetch) = self.home.end(now, get) else { return };
        self.home.forgive(fetch.space, &fetch.came);
        if let Some(space) = self.spaces.get(&fetch.space).filter(|_| !fetch.came.is_empty()) {
            self.install(space, &fetch.came, &fetch.bytes);
        }
        self.give_up(fetch.space, &fetch.came);
    }

    /// A page has come that is not the one which was put.
    pub(super) fn wrong(&mut self, get: GetId, page: usize) {
        let home = &mut self.home;
        let Some(fetch) = home.fetches.get(&get) else { return };
        let (id, agent, lost) = (fetch.space, fetch.agent, fetch.pages[page]);
        self.shared.blame(
            agent,
            self.write_back.agents.lane().name(agent),
            "gives back a wrong page",
            false,
        );
        home.unsound = self.shared.unsound_agents();
        if home.mismatch((id, lost.0)) {
            home.fetches.entry(get).and_modify(|fetch| fetch.answered = true);
            if !home.fail(lost.1, agent) {
                self.lose(id, &[lost]);
            }
        }
    }

    /// An agent can be used again.
    pub(super) fn is_back(&mut self, agent: AgentId) {
        self.home.is_back(agent);
    }

    /// Pages do not come by this get.
    pub(super) fn missed(&mut self, get: GetId, pages: u64, failure: Failure) {
        let Some(fetch) = self.home.fetches.get_mut(&get) else { return };
        let (id, is_lost) = (fetch.space, failure == Failure::NotHeld(Status::NotFound));
        fetch.answered |= is_lost;
        let missed = fetch.pages.iter().enumerate().filter(|(i, _)| pages >> i & 1 == 1);
        let mut missed: Vec<(PageAddr, Content)> = missed.map(|(_, &page)| page).collect();
        let agent = fetch.agent;
        self.give_up(id, &missed);
        if failure == Failure::GivenUp {
            // Asked of others that have them, if there are any.
            missed.iter().for_each(|&(_, content)| self.home.note_late(content, agent));
        }
        if is_lost {
            // The next pass asks others for what they have.
            missed.retain(|&(_, content)| !self.home.fail(content, agent));
            self.lose(id, &missed);
        }
    }

    /// The gate is closed, so that no removal comes in between.
    fn install(&self, space: &Space, pages: &[(PageAddr, Content)], bytes: &[u8]) {
        let _gate = lock(&space.gate);
        if !space.ungated.is_intact() {
            return;
        }
        let mut at = 0;
        while at < pages.len() {
            // What is not home now comes with the next pass.
            at += self.install_run(space, &pages[at..], &bytes[at * PAGE as usize..]).max(1);
        }
        self.still_intact(space);
    }

    /// For the gate's holder, after it has installed pages.
    fn still_intact(&self, space: &Space) {
        if !space.ungated.is_intact() {
            self.shared.fail("the workload's memory changed while its pages were brought home");
        }
    }

    /// Installs the first of the pages and those that are adjacent to it; returns how many.
    ///
    /// The tables' lock is not held over the copy: with the gate closed no page can be removed, and this thread is the one that moves them
    /// out. The fault thread may install the same page meanwhile: then the copy finds it present.
    fn install_run(&self, space: &Space, pages: &[(PageAddr, Content)], bytes: &[u8]) -> usize {
        let start = pages[0].0.get();
        let tables = lock(&self.shared.tables);
        let follows = |item: &(usize, &(PageAddr, Content))| {
            let (n, &(page, content)) = *item;
            let adjacent = page.get() == start + n as u64 * PAGE;
            adjacent
                && tables.is_away((space.id, page), content)
                && (n == 0 || !tables.is_being_removed((space.id, page)))
        };
        let count = pages.iter().enumerate().take_while(follows).count();
        drop(tables);
        let count = self.proved(space, start, count);
        if count == 0 {
            return 0;
        }
        let copy =
            |count: usize| space.faults.copy_run(start..start + count as u64 * PAGE, bytes, true);
        let (mut copied, mut outcome) = copy(count);
        if copied == 0 && outcome == Installed::Gone && count > 1 {
            // A copy must lie in one mapping.
            (copied, outcome) = copy(1);
        }
        // A page that is present is the workload's, wherever it came from.
        let present = outcome == Installed::Exists && (copied as usize) < count;
        let home = copied as usize + usize::from(present);
        let mut tables = lock(&self.shared.tables);
        for &(page, content) in &pages[..home] {
            tables.leave_to_kernel((space.id, page), content);
        }
        drop(tables);
        self.shared.count_installed(copied);
        home
    }

    /// How many of the adjacent pages from `start` on still have their markers, with the gate closed.
    fn proved(&self, space: &Space, start: u64, count: usize) -> usize {
        let place = (space.id, PageAddr::containing(start));
        let mut tables = lock(&self.shared.tables);
        let marked = |pages: u64| {
            space.page_tables.get().and_then(|t| t.marked(start..start + pages * PAGE).ok())
        };
        let run = marked(count as u64).and_then(|marked| marked.containing(start));
        match run {
            Some(run) if !tables.is_being_removed(place) => ((run.end - start) / PAGE) as usize,
            _ if count > 0 => usize::from(is_there(&mut tables, space, place)),
            _ => 0,
        }
    }

    /// Nobody has these pages any more. Returns how many were poisoned; the rest is left to the next pass.
    fn lose(&mut self, id: SpaceId, pages: &[(PageAddr, Content)]) -> usize {
        let Some(space) = self.spaces.get(&id).filter(|_| !pages.is_empty()) else { return 0 };
        let _gate = lock(&space.gate);
        if !space.ungated.is_intact() {
            return 0;
        }
        let mut tables = lock(&self.shared.tables);
        let mut poisoned = 0;
        for &(page, content) in pages {
            let place = (id, page);
            if !tables.is_away(place, content) {
                continue;
            }
            // In between a change of the address space may begin: then the poison comes with the next pass.
            if !tables.is_doomed(place) {
                let marked = is_there(&mut tables, space, place);
                if !marked || space.faults.mark(page.get()..page.get() + PAGE, false).is_err() {
                    continue;
                }
                tables.doom(place);
            }
            // Its threads are woken by that, and get SIGBUS.
            let outcome = space.faults.poison(page.get());
            if matches!(outcome, Installed::Done | Installed::Exists) {
                tables.leave_to_kernel((id, page), content);
            }
            if outcome == Installed::Done {
                poisoned += 1;
                self.home.lost.agents.extend(tables.losers().union(content.holders).agents());
            }
        }
        drop(tables);
        self.still_intact(space);
        if poisoned > 0 {
            self.home.lost.pages += poisoned as u64;
            self.home.lost.processes.insert(space.pid.load(Ordering::Relaxed));
        }
        poisoned
    }

    /// What to tell of lost pages.
    fn loss(&self) -> Option<String> {
        let Lost { pages, processes, agents } = &self.home.lost;
        if *pages == 0 {
            return None;
        }
        let named: Vec<String> = processes.iter().take(NAMED_MAX).map(i32::to_string).collect();
        let more = if processes.len() > NAMED_MAX { " and others" } else { "" };
        let lane = self.write_back.agents.lane();
        let losers = lock(&self.shared.tables).losers();
        let reason = |agent| match lane.failure(agent) {
            Some(reason) => reason,
            None if losers.has(agent) => {
                "it was restarted, or had no link to gms for over a minute"
            }
            None => "its link is up, but it does not give them",
        };
        let agents: Vec<String> = agents
            .iter()
            .take(NAMED_MAX)
            .map(|&agent| format!("agent {}: {}", lane.name(agent), reason(agent)))
            .collect();
        Some(format!(
            "{pages} pages are lost ({}): process {}{more} gets SIGBUS where it touches one of them",
            agents.join("; "),
            named.join(", ")
        ))
    }

    fn let_go(&mut self, now: Instant) {
        let lost = self.loss();
        for (_, process) in std::mem::take(&mut self.processes) {
            let id = process.space.id;
            lock(&self.shared.evictors).retain(|&e| e != process.evictor_pid());
            process.release(&self.shared, now);
            self.drop_space(id);
        }
        for space in std::mem::take(&mut self.orphans) {
            for range in lock(&self.shared.tables).registered(space.id).iter() {
                let _ = space.faults.unregister(range);
            }
            self.drop_space(space.id);
        }
        self.publish();
        let is_forced = self.own.is_none() && self.shared.config.is_embedded();
        self.shared.finish(Outcome::Detached { lost, is_forced });
    }
}

/// Whether a page that is away has its marker, with the gate closed. Without one it is the program's no longer.
fn is_there(tables: &mut Tables, space: &Space, place: Place) -> bool {
    let range = place.1.get()..place.1.get() + PAGE;
    let marked = match space.page_tables.get() {
        // A guard must not be taken for a marker.
        Some(page_tables) if !tables.is_being_removed(place) => page_tables.marked(range.clone()),
        _ => {
            let probe = look_for_marker(tables, space, place);
            if matches!(probe, Probe::Absent | Probe::Taken) {
                space.faults.wake(range);
            }
            return probe == Probe::Occupied;
        }
    };
    let marked = marked.is_ok_and(|marked| !marked.is_empty());
    // While an event is unread, it may just have moved.
    if !marked && !space.faults.has_event() {
        tables.discarded(place);
        space.faults.wake(range);
    }
    marked
}
