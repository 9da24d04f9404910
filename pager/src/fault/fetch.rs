//! Pages from the agents: which are fetched, and where what arrives is installed.
//!
//! `fetch` -> `fetch_here` -> `ask` ... `network` -> `handle_events` -> `arrived` -> `install_awaited`. How they are asked for and checked is the client's;
//! what becomes of pages that do not come is in `demand`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use gms_policy::ids::{AgentId, PageAddr, SpaceId};
use gms_transport::Transport;
use gms_transport::client::{self, ClientEvent, GetId, Urgency};
use gms_transport::message::{Control, PAGES_MAX};
use nix::errno::Errno;

use super::FaultCore;
use crate::kernel::{Installed, Probe};
use crate::loans::Wanted;
use crate::page_map::{Content, PAGE};
use crate::range_set::RangeSet;
use crate::space::Space;
use crate::sync::lock;
use crate::tables::{Place, Tables};
use crate::torture::{self, Point};
use crate::trace::Trace;

/// Most pages come within this, also where many are asked for at once.
const SOON: Duration = Duration::from_millis(1);
/// A page that comes later than this after it was asked for has its marker looked for again: MADV_GUARD_INSTALL replaces a marker without an
/// event, and COPY would overwrite the guard.
const PROOF_LASTS: Duration = Duration::from_micros(100);

/// What is fetched by one get.
pub(super) struct Fetch {
    /// Who was asked.
    pub agent: AgentId,
    pub pages: Vec<Wanted>,
    /// Pages that may still come: bit i is page i.
    open: u64,
    /// Whether a thread waits for the first page. All others are fetched ahead.
    demanded: bool,
    began: Instant,
    /// When it was asked for, or something of it came last.
    pub heard: Instant,
    /// Removals in the space when it began.
    removals: u64,
    /// A wrong page has come in the reply under way.
    pub spoiled: bool,
}

impl Fetch {
    /// Whose pages are fetched.
    pub(super) fn space(&self) -> SpaceId {
        self.pages[0].place.0
    }

    /// The page for which a thread waits.
    pub(super) fn demanded(&self) -> Option<Place> {
        self.demanded.then_some(self.pages[0].place)
    }

    /// Whether a thread waits for this page, which is open.
    pub(super) fn is_awaited(&self, page: usize) -> bool {
        self.demanded && page == 0
    }

    /// The pages that may still come.
    pub(super) fn open(&self) -> impl Iterator<Item = Wanted> {
        self.pages
            .iter()
            .enumerate()
            .filter(|(page, _)| self.open >> page & 1 == 1)
            .map(|(_, &w)| w)
    }

    /// These have come.
    fn came(&mut self, now: Instant, pages: Range<usize>) {
        self.heard = now;
        pages.for_each(|page| self.open &= !(1 << page));
    }

    /// Ends the wait for pages; returns those of them that were open.
    pub(super) fn close(&mut self, pages: u64) -> Vec<usize> {
        let closed = self.open & pages;
        self.open &= !pages;
        (0..self.pages.len()).filter(|page| closed >> page & 1 == 1).collect()
    }
}

impl<T: Transport> FaultCore<T> {
    /// Fetches the page, and behind it in the same exchange what will be needed next: the faulting thread does not wait for that.
    pub(super) fn fetch(&mut self, now: Instant, place: Place, content: Content) {
        if self.pending.contains_key(&place) {
            return;
        }
        let demanded = Wanted { place, content };
        let worker = self.worker_for(demanded);
        if worker.is_none() {
            self.trace(|trace| trace.looked_up(place));
        }
        let ahead = self.look_ahead(place);
        match worker {
            Some(worker) => self.lend(now, worker, demanded, ahead),
            None => self.fetch_here(now, now, demanded, ahead),
        }
    }

    /// This thread does, for a fault that was met at `began`.
    pub(super) fn fetch_here(
        &mut self,
        now: Instant,
        began: Instant,
        demanded: Wanted,
        ahead: Vec<Wanted>,
    ) {
        self.demand(began, demanded);
        self.unproved.push((demanded.place, demanded.content, now));
        match self.source(demanded.content) {
            None => self.not_held(now, demanded, &ahead),
            Some(agent) if ahead.is_empty() => self.ask(now, agent, vec![demanded], true),
            Some(agent) => self.ask_all(now, agent, demanded, ahead),
        }
    }

    /// Asks an agent for a page for which a thread waits, and for those `ahead` that it has too; others for the rest.
    fn ask_all(&mut self, now: Instant, first: AgentId, demanded: Wanted, ahead: Vec<Wanted>) {
        let mut along = vec![demanded];
        let mut by_agent: BTreeMap<AgentId, Vec<Wanted>> = BTreeMap::new();
        for wanted in ahead {
            if wanted.content.holders.has(first) {
                along.push(wanted);
            } else if let Some(agent) = self.source(wanted.content) {
                by_agent.entry(agent).or_default().push(wanted);
            }
        }
        let mut awaited = true;
        for (agent, pages) in std::iter::once((first, along)).chain(by_agent) {
            for pages in pages.chunks(PAGES_MAX) {
                self.ask(now, agent, pages.to_vec(), std::mem::take(&mut awaited));
            }
        }
    }

    /// Whom of those that have a page to ask for it, if anybody has. Who gives wrong pages is asked where nobody else can be.
    fn source(&self, content: Content) -> Option<AgentId> {
        let sound = content.holders.without(self.shared.unsound_agents());
        let holders = if sound.is_empty() { content.holders } else { sound };
        (!holders.is_empty()).then(|| self.agents.lane().nearest(holders))
    }

    /// Asks an agent for pages; a thread waits for the first of those that are `demanded`.
    pub(super) fn ask(&mut self, now: Instant, agent: AgentId, pages: Vec<Wanted>, demanded: bool) {
        let wanted =
            |page: &Wanted| client::Wanted { id: page.content.id, check: Some(page.content.hash) };
        let urgency = if demanded { Urgency::Demand } else { Urgency::Ahead };
        let get = self.agents.get(now, agent, pages.iter().map(wanted).collect(), urgency);
        let (began, removals) = match demanded {
            true => self.note_demanded(now, pages[0].place, get, agent),
            false => (now, 0),
        };
        let fetch = Fetch {
            agent,
            open: u64::MAX >> (64 - pages.len()),
            pages,
            demanded,
            began,
            heard: now,
            removals,
            spoiled: false,
        };
        self.fetches.insert(get, fetch);
    }

    /// Pages to be fetched along: the other half of an 8 KiB page, and what the stream of faults will touch next.
    fn look_ahead(&mut self, place: Place) -> Vec<Wanted> {
        let Some(state) = self.spaces.get_mut(&place.0) else { return Vec::new() };
        // Nobody waits for these pages: without a look at their markers it would not be known whether they still belong there.
        if state.space.page_tables.get().is_none() {
            return Vec::new();
        }
        let (from, window) = state.prefetch.on_fault(place.1);
        state.count_hits(&self.shared);
        let half = (self.shared.config.page_shift == 13)
            .then(|| PageAddr::containing(place.1.get() ^ PAGE));
        let mut more = window.pages(from).peekable();
        match half.is_none() && more.peek().is_none() {
            true => Vec::new(),
            false => self.begin_ahead(place.0, half, more),
        }
    }

    /// Those of the pages that are remote: the other half of a page, and of `more` as many as there is room for, less the one which the
    /// prefetcher leaves out. They are marked, so that threads which fault on them wait for this fetch.
    fn begin_ahead(
        &mut self,
        id: SpaceId,
        half: Option<PageAddr>,
        more: impl Iterator<Item = PageAddr>,
    ) -> Vec<Wanted> {
        let Some(state) = self.spaces.get_mut(&id) else { return Vec::new() };
        let mut tables = lock(&self.shared.tables);
        // What is under way will need room too.
        let taken = self.shared.sizes.room_kept + tables.prefetching() as u64;
        let room = self.shared.room().saturating_sub(taken) as usize;
        // What a thread waits for comes by itself. It may have to be made, and what is on its way from its agent is not.
        let is_free = |page: &PageAddr| !self.pending.contains_key(&(id, *page));
        let half = tables.begin_prefetch(id, half.into_iter().filter(is_free), 1);
        let mut ahead = tables.begin_prefetch(id, more.filter(is_free), room);
        let pages: Vec<PageAddr> = ahead.iter().map(|&(page, _)| page).collect();
        if let Some(marker) = state.prefetch.leave_out(&pages) {
            ahead.remove(marker);
            tables.end_prefetch((id, pages[marker]));
        }
        let wanted = |(page, content)| Wanted { place: (id, page), content };
        half.into_iter().chain(ahead).map(wanted).collect()
    }

    pub(super) fn wake(&self, place: Place) {
        if let Some(space) = self.space_of(place.0) {
            space.faults.wake(place.1.get()..place.1.get() + PAGE);
        }
    }

    // ---- and back

    /// True if anything came or was due.
    pub fn network(&mut self, clock: &impl Fn() -> Instant) -> bool {
        self.trace(Trace::receiving);
        let now = clock();
        let busy = self.agents.drive(now).unwrap_or_else(|error| {
            self.shared.fail(format!("receiving from the agents failed: {error}"));
            false
        });
        self.handle_events(now, clock);
        busy
    }

    pub(super) fn handle_events(&mut self, now: Instant, clock: &impl Fn() -> Instant) {
        while let Some(event) = self.agents.poll(now) {
            torture::at(Point::BeforeReply);
            let event = self.decoder.handle(now, event, &mut self.agents, &self.shared);
            let Some(event) = event else { continue };
            match event {
                ClientEvent::Answered { get, control } => self.answered(now, get, &control),
                ClientEvent::Arrived { get, pages, bytes } => {
                    self.arrived(clock, get, pages, &bytes);
                }
                ClientEvent::Wrong { get, page } => self.mismatch(now, get, page),
                ClientEvent::Failed { get, pages, failure } => {
                    self.forsake(now, get, pages, Some(failure));
                }
                ClientEvent::Ended { get } => drop(self.fetches.remove(&get)),
                ClientEvent::Up { agent, session } => self.link_changed(agent, Some(session)),
                ClientEvent::Down { agent, .. } => self.link_changed(agent, None),
                ClientEvent::Stored { .. } | ClientEvent::Members { .. } => {}
            }
            torture::at(Point::AfterReply);
        }
        self.wake_installed(clock);
    }

    /// Wakes the threads whose pages were installed without a word.
    fn wake_installed(&mut self, clock: &impl Fn() -> Instant) {
        for (space, range, began) in std::mem::take(&mut self.installed) {
            space.faults.wake(range);
            self.served.push(clock().saturating_duration_since(began));
        }
    }

    /// The agent can be used, with this session, or cannot.
    fn link_changed(&mut self, agent: AgentId, session: Option<u64>) {
        self.shared.homes.tell_link(self.thread, agent, session.is_some());
        let Some(session) = session else { return };
        // Pages may wait for a place.
        self.shared.kick_evict();
        self.shared.agent_up(agent, self.agents.lane().name(agent), session);
    }

    fn answered(&mut self, now: Instant, get: GetId, control: &Control) {
        let Some(fetch) = self.fetches.get_mut(&get) else { return };
        (fetch.heard, fetch.spoiled) = (now, false);
        if let Some(trace) = &mut self.trace {
            let feedback = control.feedback();
            trace.answered(fetch.pages[0].place, feedback.queue_ns, feedback.service_ns);
        }
    }

    /// Pages have come. The one for which a thread waits comes by itself.
    fn arrived(
        &mut self,
        clock: &impl Fn() -> Instant,
        get: GetId,
        pages: Range<usize>,
        bytes: &Bytes,
    ) {
        let Some(mut fetch) = self.fetches.remove(&get) else { return };
        fetch.came(clock(), pages.clone());
        match fetch.is_awaited(pages.start) {
            true => self.install_awaited(clock, get, &fetch, bytes),
            false => self.install_ahead(clock, &fetch.pages[pages], bytes),
        }
        self.fetches.insert(get, fetch);
    }

    /// Installs the page for which a thread waits, which wakes it.
    fn install_awaited(
        &mut self,
        clock: &impl Fn() -> Instant,
        get: GetId,
        fetch: &Fetch,
        bytes: &[u8],
    ) {
        let wanted = fetch.pages[0];
        let place = wanted.place;
        self.end_rivals(clock(), place, get);
        self.trace(|trace| trace.opened(place));
        let (shared, space) = (self.shared.clone(), self.space_of(place.0).cloned());
        let unread = space.as_ref().and_then(|space| self.keep_unread(clock, space, true));
        // The lock is held from the look to the copy: in between nobody may install, change and evict a page, or forget that it is being removed.
        let mut tables = lock(&shared.tables);
        let now = clock();
        // Where several threads wait, those that are woken would take the CPU from the pages of the others: they are woken together.
        let quiet = self.pending.len() > 1;
        let range = place.1.get()..place.1.get() + PAGE;
        let outcome = match &space {
            Some(space) if self.prove_awaited(now, &mut tables, space, fetch) => {
                space.faults.copy_run(range.clone(), bytes, !quiet).1
            }
            _ => Installed::Gone,
        };
        let waited = self.note_outcome(now, &mut tables, wanted, outcome);
        drop((tables, unread));
        self.trace(|trace| trace.installed(place, outcome == Installed::Done || !waited));
        match (space, outcome) {
            (Some(space), Installed::Done) if quiet => {
                self.installed.push((space, range, fetch.began));
            }
            (_, Installed::Done) => {
                self.served.push(clock().saturating_duration_since(fetch.began));
            }
            _ if waited => self.wake(place),
            _ => {}
        }
    }

    /// Whether the page for which a thread waits may be installed: it is still at the agent, and its address has a marker. That has been looked for after
    /// the page was asked for, and is again unless that was just now. If nothing can be known now, the thread faults again.
    fn prove_awaited(
        &mut self,
        now: Instant,
        tables: &mut Tables,
        space: &Space,
        fetch: &Fetch,
    ) -> bool {
        let Wanted { place, content } = fetch.pages[0];
        let at = self.unproved.iter().position(|unproved| unproved.0 == place);
        let unproved = at.map(|at| self.unproved.swap_remove(at)).is_some();
        // Before what was read is applied it may be another page's place by now.
        let may = !self.shared.has_failed() && space.ungated.is_applied();
        if !may || !tables.is_remote(place, content) {
            return false;
        }
        let old = fetch.removals != space.removals.load(Ordering::Relaxed)
            || now.saturating_duration_since(fetch.began) > PROOF_LASTS;
        let is_proved = !unproved && !old && !tables.is_being_removed(place);
        is_proved || self.prove_again(tables, space, place)
    }

    fn prove_again(&self, tables: &mut Tables, space: &Space, place: Place) -> bool {
        let probe = look_for_marker(tables, space, place);
        if probe == Probe::Absent {
            self.shared.count_zeros(1, false);
        }
        probe == Probe::Occupied
    }

    /// Looks for the markers of the pages which were asked for just now, while the agent works. What has none was discarded by the program. Where several
    /// threads wait, what will have come soon is looked for then.
    pub(super) fn prove_demanded(&mut self, now: Instant) {
        for at in (0..self.unproved.len()).rev() {
            let (place, content, asked) = self.unproved[at];
            let comes_soon = now.saturating_duration_since(asked) < SOON
                && self.agents.lane().is_any_up(content.holders);
            if (self.crowd || self.pending.len() > 1) && comes_soon {
                continue;
            }
            if self.prove(place, content) {
                self.unproved.swap_remove(at);
            }
        }
    }

    /// False if that cannot be known before an event is read.
    pub(super) fn prove(&mut self, place: Place, content: Content) -> bool {
        let Some(space) = self.space_of(place.0) else { return true };
        let unread = self.guests.contains_key(&place.0).then(|| space.keep_unread(|| false));
        if !space.ungated.is_applied() {
            return false;
        }
        let mut tables = lock(&self.shared.tables);
        if !tables.is_remote(place, content) {
            return true;
        }
        let probe = look_for_marker(&mut tables, space, place);
        drop((tables, unread));
        if probe == Probe::Absent {
            self.shared.count_zeros(1, false);
        }
        if matches!(probe, Probe::Absent | Probe::Taken) {
            self.wake(place);
        }
        probe != Probe::Changing
    }

    /// Since when a page that somebody waits for cannot be installed, if it cannot.
    fn note_refusal(&mut self, now: Instant, tables: &Tables, wanted: Wanted, outcome: Installed) {
        let id = wanted.place.0;
        let Some(space) = self.space_of(id) else { return };
        let good = matches!(outcome, Installed::Done | Installed::Exists);
        // Not one that has been discarded meanwhile, or is there: nobody is to be stopped for that.
        let refused = !good && tables.is_remote(wanted.place, wanted.content);
        if space.only_home.load(Ordering::Relaxed) || refused {
            let keep = refused || self.guests.contains_key(&id);
            space.only_home.store(keep, Ordering::Relaxed);
        }
        let Some(state) = self.spaces.get_mut(&id) else { return };
        state.refused = refused.then_some(now);
        if refused {
            self.waiting.insert(id);
        }
    }

    /// Notes what became of a page for which a thread waits; returns whether it waits still, or did.
    fn note_outcome(
        &mut self,
        now: Instant,
        tables: &mut Tables,
        wanted: Wanted,
        outcome: Installed,
    ) -> bool {
        let Wanted { place, content } = wanted;
        self.note_refusal(now, tables, wanted, outcome);
        tables.end_loan(place);
        let demand = self.pending.remove(&place);
        let (waited, lacks_copy) = (demand.is_some(), demand.is_some_and(|d| d.lacks_copy));
        self.crowd = !(self.pending.is_empty() && self.installed.is_empty());
        if matches!(outcome, Installed::Done | Installed::Exists) {
            match lacks_copy {
                // It is as good as changed: written anew, to as many agents as it should be at.
                true => tables.discarded(place),
                false => tables.fetched(place, content, waited),
            };
        }
        if outcome == Installed::Done {
            let is_lent = self.guests.contains_key(&place.0);
            self.shared.lent_faults.fetch_add(u64::from(is_lent), Ordering::Relaxed);
            self.shared.count_installed(1);
        }
        waited
    }

    /// Installs pages that were fetched ahead, those that are adjacent in one call.
    fn install_ahead(&mut self, clock: &impl Fn() -> Instant, pages: &[Wanted], bytes: &[u8]) {
        let follows = |one: &Wanted, next: &Wanted| next.place.1.get() == one.place.1.get() + PAGE;
        let mut bytes = bytes;
        for run in pages.chunk_by(follows) {
            let (these, rest) = bytes.split_at(run.len() * PAGE as usize);
            self.install_run(clock, run, these);
            bytes = rest;
        }
    }

    /// Installs adjacent pages that were fetched ahead.
    fn install_run(&mut self, clock: &impl Fn() -> Instant, run: &[Wanted], bytes: &[u8]) {
        let (id, start) = (run[0].place.0, run[0].place.1.get());
        self.trace(|trace| trace.opened(run[0].place));
        let (shared, space) = (self.shared.clone(), self.space_of(id).cloned());
        let unread = space.as_ref().and_then(|space| self.keep_unread(clock, space, false));
        // As for a page that is awaited.
        let mut tables = lock(&shared.tables);
        let proved = match &space {
            Some(space) if !shared.has_failed() && space.ungated.is_applied() => {
                proved_ahead(&tables, space, start..start + bytes.len() as u64)
            }
            _ => RangeSet::default(),
        };
        let mut wake = Vec::new();
        let mut at = 0;
        while at < run.len() {
            let remote = |wanted: &&Wanted| {
                proved.contains(wanted.place.1.get())
                    && tables.is_remote(wanted.place, wanted.content)
            };
            let remote = run[at..].iter().take_while(remote).count();
            let (copied, outcome) = match &space {
                Some(space) if remote > 0 => {
                    let from = start + at as u64 * PAGE;
                    let range = from..from + remote as u64 * PAGE;
                    space.faults.copy_run(range, &bytes[at * PAGE as usize..], true)
                }
                _ => (0, Installed::Gone),
            };
            let end = at + copied as usize;
            for (i, wanted) in run.iter().enumerate().take(end.max(at + 1)).skip(at) {
                let done = i < end || outcome == Installed::Done;
                let waited = tables.end_prefetch(wanted.place);
                if done || outcome == Installed::Exists {
                    tables.fetched(wanted.place, wanted.content, waited);
                }
                match done {
                    true => {
                        shared.count_installed(1);
                        shared.prefetched.fetch_add(1, Ordering::Relaxed);
                    }
                    false if waited => wake.push(wanted.place),
                    false => {}
                }
            }
            at = end.max(at + 1);
        }
        drop((tables, unread));
        self.trace(|trace| trace.installed(run[0].place, wake.is_empty()));
        wake.into_iter().for_each(|place| self.wake(place));
    }
}

/// Those of the addresses to which may be installed what nobody waits for: they have markers, and are not about to lose them.
fn proved_ahead(tables: &Tables, space: &Space, range: Range<u64>) -> RangeSet {
    if tables.has_quarantine(space.id, &range) {
        return RangeSet::default();
    }
    space.page_tables.get().and_then(|t| t.marked(range).ok()).unwrap_or_default()
}

/// What is at the address of a page which the tables know. If nothing was, the program has discarded the page: the probe has put zeros there,
/// and the tables are told. A page in the range of a removal that was reported and may not be done yet went out before the report: its marker
/// is taken away first, so that it counts as discarded. `Changing` if an event must be read before that can be known.
pub(crate) fn look(tables: &mut Tables, space: &Space, place: Place) -> Probe {
    let range = place.1.get()..place.1.get() + PAGE;
    if tables.is_being_removed(place)
        && space.faults.mark(range.clone(), false) == Err(Errno::EAGAIN)
    {
        return Probe::Changing;
    }
    let probe = space.faults.probe(range.start);
    if probe == Probe::Absent {
        tables.discarded(place);
        tables.zeroed(place.0, range);
    }
    probe
}

/// Whether an evicted page's address still has its marker (`Occupied`). A guard (MADV_GUARD_INSTALL), which comes without an event, is no marker: a copy would
/// overwrite it with bytes that the program has given up. Without page tables, of a child that nobody has met yet, it cannot be told from one.
pub(crate) fn look_for_marker(tables: &mut Tables, space: &Space, place: Place) -> Probe {
    let is_removed = tables.is_being_removed(place);
    // Asked once: the child may be met from one moment to the next.
    let is_marked = space.is_marked(place.1);
    if !is_removed && is_marked == Some(true) {
        return Probe::Occupied;
    }
    // A marker that has just moved away with its memory shows as a change: that begins before the move, and ends when its event has been read.
    match look(tables, space, place) {
        // In quarantine the look has taken the marker away, if there was one.
        Probe::Occupied if is_removed || is_marked.is_some() => {
            tables.discarded(place);
            Probe::Taken
        }
        probe => probe,
    }
}

#[cfg(test)]
mod tests;
