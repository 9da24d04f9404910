//! Pages from the agents: which are fetched, and where what arrives is installed.
//!
//! `fetch` -> `ask` ... `network` -> `arrived` -> `install_run`. How they are asked for, repeated and checked is the client's.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use gms_policy::ids::{AgentId, PageAddr, SpaceId};
use gms_transport::Transport;
use gms_transport::client::{self, ClientEvent, Failure, GetId, RETRY, Urgency};
use gms_transport::message::{Control, PAGES_MAX};
use nix::errno::Errno;

use super::FaultCore;
use crate::kernel::{Installed, Probe};
use crate::loans::Wanted;
use crate::page_map::{Content, PAGE};
use crate::range_set::RangeSet;
use crate::shared::Shared;
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
    /// Removals in the space when it began.
    removals: u64,
    /// A wrong page has come in the reply under way.
    spoiled: bool,
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
    fn is_awaited(&self, page: usize) -> bool {
        self.demanded && page == 0
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
        self.fetch_all(now, Some(demanded), ahead);
    }

    fn fetch_all(&mut self, now: Instant, demanded: Option<Wanted>, ahead: Vec<Wanted>) {
        let source = |wanted: Wanted| self.source(wanted.content);
        let first = demanded.and_then(source);
        if let (Some(demanded), None) = (demanded, first) {
            self.give_up(&ahead);
            return match self.decoder.is_able() {
                true => self.make(now, demanded),
                false => self.lost(demanded.place),
            };
        }
        if let (Some(demanded), Some(agent), true) = (demanded, first, ahead.is_empty()) {
            return self.ask(now, agent, vec![demanded], true);
        }
        let mut by_agent: BTreeMap<AgentId, Vec<Wanted>> = BTreeMap::new();
        for wanted in demanded.into_iter().chain(ahead) {
            // Of those who have it too, the one that is asked already.
            let same = first.filter(|&first| wanted.content.holders.has(first));
            if let Some(agent) = same.or_else(|| source(wanted)) {
                by_agent.entry(agent).or_default().push(wanted);
            }
        }
        let pages = first.and_then(|agent| Some((agent, by_agent.remove(&agent)?)));
        let mut awaited = pages.is_some();
        for (agent, pages) in pages.into_iter().chain(by_agent) {
            for pages in pages.chunks(PAGES_MAX) {
                let demanded = std::mem::take(&mut awaited);
                self.ask(now, agent, pages.to_vec(), demanded);
            }
        }
    }

    /// Whom of those that have a page to ask for it, if anybody has. Who gives wrong pages is asked where nobody else can be.
    fn source(&self, content: Content) -> Option<AgentId> {
        let sound = content.holders.without(self.shared.unsound_agents());
        let holders = if sound.is_empty() { content.holders } else { sound };
        (!holders.is_empty()).then(|| self.agents.lane().nearest(holders))
    }

    /// The only agents that had a page have lost it.
    fn lost(&mut self, place: Place) {
        self.end_demand(place);
        self.unproved.retain(|unproved| unproved.0 != place);
        // While the workload is being let go, the evict thread poisons it, which wakes the thread.
        if !self.shared.detaching.load(Ordering::Relaxed) {
            self.shared.fail("a page is lost: every agent that had it was restarted");
        }
    }

    /// Asks an agent for pages; a thread waits for the first of those that are `demanded`.
    pub(super) fn ask(&mut self, now: Instant, agent: AgentId, pages: Vec<Wanted>, demanded: bool) {
        let wanted =
            |page: &Wanted| client::Wanted { id: page.content.id, check: Some(page.content.hash) };
        let urgency = if demanded { Urgency::Demand } else { Urgency::Ahead };
        let get = self.agents.get(now, agent, pages.iter().map(wanted).collect(), urgency);
        let demand = self.pending.get(&pages[0].place).filter(|_| demanded);
        let (began, removals) = demand.map_or((now, 0), |demand| (demand.began, demand.removals));
        if demanded {
            self.note_demanded(now, pages[0].place, get, agent);
        }
        let fetch = Fetch {
            agent,
            open: u64::MAX >> (64 - pages.len()),
            pages,
            demanded,
            began,
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
        let half = (self.shared.config.page_shift == 13)
            .then(|| PageAddr::containing(place.1.get() ^ PAGE));
        self.begin_ahead(place.0, half, window.pages(from))
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
        let (issued, hits) = state.prefetch.totals();
        let (_, hits_before) = std::mem::replace(&mut state.prefetch_totals, (issued, hits));
        self.shared.prefetch_hits.fetch_add(hits - hits_before, Ordering::Relaxed);
        let mut more = more.peekable();
        if half.is_none() && more.peek().is_none() {
            return Vec::new();
        }
        let mut tables = lock(&self.shared.tables);
        // What is under way will need room too.
        let taken = self.shared.sizes.room_kept + tables.prefetching() as u64;
        let room = self.shared.room().saturating_sub(taken) as usize;
        let half = tables.begin_prefetch(id, half.into_iter(), 1);
        let mut ahead = tables.begin_prefetch(id, more, room);
        let pages: Vec<PageAddr> = ahead.iter().map(|&(page, _)| page).collect();
        if let Some(marker) = state.prefetch.leave_out(&pages) {
            ahead.remove(marker);
            tables.end_prefetch((id, pages[marker]));
        }
        let wanted = |(page, content)| Wanted { place: (id, page), content };
        half.into_iter().chain(ahead).map(wanted).collect()
    }

    /// Agents are not blamed for the time in which this process was stopped.
    pub(super) fn excuse(&mut self, now: Instant) {
        let missed = self.pulse.beat(now, RETRY);
        if missed.is_zero() {
            return;
        }
        self.agents.excuse(now, missed);
        self.unread.values_mut().for_each(|unread| unread.since += missed);
        for late in self.spaces.values_mut().filter_map(|state| state.late.as_mut()) {
            *late += missed;
        }
    }

    /// Sends what could not be sent, or was not answered.
    pub(super) fn repeat(&mut self, now: Instant, clock: &impl Fn() -> Instant) {
        self.agents.expire(now);
        self.handle_events(now, clock);
        self.cancel_discarded(now);
        self.agents.send_unsent(now);
        self.give_back_unsent(now);
        self.handle_events(now, clock);
    }

    /// Pages that have been discarded, or whose process has ended, while their agent was away: nobody is to wait for them.
    fn cancel_discarded(&mut self, now: Instant) {
        let unsent: Vec<GetId> = self.agents.unsent().collect();
        for get in unsent {
            let Some(fetch) = self.fetches.get(&get) else { continue };
            let Wanted { place, content } = fetch.pages[0];
            if fetch.demanded && !lock(&self.shared.tables).is_remote(place, content) {
                self.agents.cancel(now, get);
                self.forsake(now, get, u64::MAX, None);
                self.fetches.remove(&get);
            }
        }
    }

    /// Pages do not come by this get. Whoever waits for a page ahead of need faults again, and so does whoever waits for one that is no
    /// longer wanted (no `failure`).
    fn forsake(&mut self, now: Instant, get: GetId, pages: u64, failure: Option<Failure>) {
        let Some(fetch) = self.fetches.get_mut(&get) else { return };
        let closed = fetch.close(pages);
        let awaited =
            closed.first().filter(|&&page| fetch.is_awaited(page)).map(|&page| fetch.pages[page]);
        let ahead: Vec<Wanted> = closed
            .iter()
            .filter(|&&page| !fetch.is_awaited(page))
            .map(|&page| fetch.pages[page])
            .collect();
        self.give_up(&ahead);
        if let Some(wanted) = awaited {
            self.not_given(now, get, wanted, failure);
        }
    }

    /// Pages fetched ahead do not come: threads that wait for them try by themselves.
    pub(super) fn give_up(&self, pages: &[Wanted]) {
        for page in pages {
            let waited = lock(&self.shared.tables).end_prefetch(page.place);
            if waited {
                self.wake(page.place);
            }
        }
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

    fn handle_events(&mut self, now: Instant, clock: &impl Fn() -> Instant) {
        while let Some(event) = self.agents.poll(now) {
            torture::at(Point::BeforeReply);
            let event = self.decoder.handle(now, event, &mut self.agents, &self.shared);
            let Some(event) = event else { continue };
            match event {
                ClientEvent::Answered { get, control } => self.answered(get, &control),
                ClientEvent::Arrived { get, pages, bytes } => {
                    self.arrived(clock, get, pages, &bytes);
                }
                ClientEvent::Wrong { get, page } => self.mismatch(now, get, page),
                ClientEvent::Failed { get, pages, failure } => {
                    self.forsake(now, get, pages, Some(failure));
                }
                ClientEvent::Ended { get } => drop(self.fetches.remove(&get)),
                ClientEvent::Up { agent, session } => {
                    self.shared.homes.tell_link(self.thread, agent, true);
                    // Pages may wait for a place.
                    self.shared.kick_evict();
                    self.shared.agent_up(agent, self.agents.lane().name(agent), session);
                }
                ClientEvent::Down { agent, .. } => {
                    self.shared.homes.tell_link(self.thread, agent, false);
                }
                ClientEvent::Stored { .. } | ClientEvent::Members { .. } => {}
            }
            torture::at(Point::AfterReply);
        }
        for (space, range, began) in std::mem::take(&mut self.installed) {
            space.faults.wake(range);
            self.served.push(clock().saturating_duration_since(began));
        }
    }

    fn answered(&mut self, get: GetId, control: &Control) {
        let Some(fetch) = self.fetches.get_mut(&get) else { return };
        fetch.spoiled = false;
        if let Some(trace) = &mut self.trace {
            let feedback = control.feedback();
            trace.answered(fetch.pages[0].place, feedback.queue_ns, feedback.service_ns);
        }
    }

    /// Pages have come. Those that are adjacent are installed in one call.
    fn arrived(
        &mut self,
        clock: &impl Fn() -> Instant,
        get: GetId,
        pages: Range<usize>,
        bytes: &Bytes,
    ) {
        let Some(mut fetch) = self.fetches.remove(&get) else { return };
        if fetch.is_awaited(pages.start) {
            self.end_rivals(clock(), fetch.pages[0].place, get);
        }
        let mut from = pages.start;
        while from < pages.end {
            let first = fetch.pages[from].place.1.get();
            let follows =
                |(n, wanted): &(usize, &Wanted)| wanted.place.1.get() == first + *n as u64 * PAGE;
            let run = fetch.pages[from..pages.end].iter().enumerate().take_while(follows).count();
            let offset = (from - pages.start) * PAGE as usize;
            self.install_run(
                clock,
                &fetch,
                from..from + run,
                &bytes[offset..offset + run * PAGE as usize],
            );
            from += run;
        }
        pages.for_each(|page| fetch.open &= !(1 << page));
        self.fetches.insert(get, fetch);
    }

    /// A page has come that is not the one which was put. Counted once a reply, also where nobody waits for the page.
    fn mismatch(&mut self, now: Instant, get: GetId, page: usize) {
        let Some(fetch) = self.fetches.get_mut(&get) else { return };
        let agent = fetch.agent;
        let was_spoiled = std::mem::replace(&mut fetch.spoiled, true);
        if fetch.is_awaited(page) {
            let place = fetch.pages[page].place;
            self.doubt(now, place, agent);
        }
        if !was_spoiled {
            let mark = if self.shared.config.seal { "seal" } else { "checksum" };
            let what = format!("gives back a page with a wrong {mark}");
            self.shared.blame(agent, self.agents.lane().name(agent), &what);
        }
    }

    /// Installs adjacent pages of a fetch.
    fn install_run(
        &mut self,
        clock: &impl Fn() -> Instant,
        fetch: &Fetch,
        pages: Range<usize>,
        bytes: &[u8],
    ) {
        let (run, awaited) = (&fetch.pages[pages.clone()], fetch.is_awaited(pages.start));
        let (id, start) = (run[0].place.0, run[0].place.1.get());
        self.trace(|trace| trace.opened(run[0].place));
        let (shared, space) = (self.shared.clone(), self.space_of(id).cloned());
        let unread = space.as_ref().and_then(|space| self.keep_unread(clock, space, awaited));
        // The lock is held from the look to the copy: in between nobody may install, change and evict a page, or forget that it is being removed.
        let mut tables = lock(&shared.tables);
        let now = clock();
        let proved = self.prove_run(now, &mut tables, fetch, run, awaited);
        // Where several threads wait, those that are woken would take the CPU from the pages of the others: they are woken together.
        let quiet = awaited && self.pending.len() > 1;
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
                    space.faults.copy_run(range, &bytes[at * PAGE as usize..], !quiet)
                }
                _ => (0, Installed::Gone),
            };
            if awaited {
                self.note_refusal(now, &tables, run[at], outcome);
            }
            let end = at + copied as usize;
            for (i, wanted) in run.iter().enumerate().take(end.max(at + 1)).skip(at) {
                let outcome = if i < end { Installed::Done } else { outcome };
                let waited = self.note_outcome(&mut tables, *wanted, outcome, awaited);
                match (outcome, &space) {
                    (Installed::Done, Some(space)) if quiet => {
                        let page = wanted.place.1.get()..wanted.place.1.get() + PAGE;
                        self.installed.push((space.clone(), page, fetch.began));
                    }
                    (Installed::Done, _) if awaited => {
                        self.served.push(clock().saturating_duration_since(fetch.began));
                    }
                    (Installed::Done, _) => {}
                    _ if waited => wake.push(wanted.place),
                    _ => {}
                }
            }
            at = end.max(at + 1);
        }
        drop((tables, unread));
        self.trace(|trace| trace.installed(run[0].place, wake.is_empty()));
        wake.into_iter().for_each(|place| self.wake(place));
    }

    /// Looks for the markers of the pages which were asked for just now, while the agent works. What has none was discarded by the program. Where several
    /// threads wait, what will have come soon is looked for then.
    pub(super) fn prove_demanded(&mut self, now: Instant) {
        for at in (0..self.unproved.len()).rev() {
            let (place, content, asked) = self.unproved[at];
            let comes_soon = now.saturating_duration_since(asked) < SOON
                && self.agents.lane().is_any_up(content.holders);
            if self.pending.len() > 1 && comes_soon {
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
        let is_guest = self.guests.contains_key(&place.0);
        let unread = is_guest.then(|| space.keep_unread(|| false));
        if !space.ungated.is_applied() {
            return false;
        }
        let mut tables = lock(&self.shared.tables);
        if !tables.is_remote(place, content) {
            return true;
        }
        let probe = look_for_marker(&mut tables, space, place);
        drop(tables);
        drop(unread);
        if probe == Probe::Absent {
            self.shared.count_zeros(1, false);
        }
        if matches!(probe, Probe::Absent | Probe::Taken) {
            self.wake(place);
        }
        probe != Probe::Changing
    }

    /// Where pages of the run may be installed.
    fn prove_run(
        &mut self,
        now: Instant,
        tables: &mut Tables,
        fetch: &Fetch,
        run: &[Wanted],
        awaited: bool,
    ) -> RangeSet {
        let (id, start) = (run[0].place.0, run[0].place.1.get());
        let at = self.unproved.iter().position(|(place, ..)| awaited && *place == run[0].place);
        let unproved = at.map(|at| self.unproved.swap_remove(at)).is_some();
        match self.space_of(id) {
            Some(_) if self.shared.has_failed() => RangeSet::default(),
            // It may be another page's place by now.
            Some(space) if !space.ungated.is_applied() => RangeSet::default(),
            Some(space) if awaited => {
                let old = fetch.removals != space.removals.load(Ordering::Relaxed)
                    || now.saturating_duration_since(fetch.began) > PROOF_LASTS;
                prove_awaited(&self.shared, tables, space, run[0], unproved || old)
            }
            Some(space) => proved_ahead(tables, space, start..start + run.len() as u64 * PAGE),
            None => RangeSet::default(),
        }
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

    /// Notes what became of a page; returns whether a thread waits for it.
    fn note_outcome(
        &mut self,
        tables: &mut Tables,
        wanted: Wanted,
        outcome: Installed,
        awaited: bool,
    ) -> bool {
        let waited = match awaited {
            true => {
                tables.end_loan(wanted.place);
                self.pending.remove(&wanted.place).is_some()
            }
            false => tables.end_prefetch(wanted.place),
        };
        if matches!(outcome, Installed::Done | Installed::Exists) {
            tables.fetched(wanted.place, wanted.content, waited);
        }
        if outcome == Installed::Done {
            let is_lent = awaited && self.guests.contains_key(&wanted.place.0);
            self.shared.lent_faults.fetch_add(u64::from(is_lent), Ordering::Relaxed);
            self.count_installed(awaited);
        }
        waited
    }

    fn count_installed(&self, awaited: bool) {
        self.shared.count_resident(1);
        self.shared.pages_in.fetch_add(1, Ordering::Relaxed);
        if !awaited {
            self.shared.prefetched.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The address of a page for which a thread waits, if it may be installed. Its marker has been looked for after it was asked for, and is again
/// unless that was just now (`again`). If nothing can be known now, the thread faults again.
fn prove_awaited(
    shared: &Shared,
    tables: &mut Tables,
    space: &Space,
    wanted: Wanted,
    again: bool,
) -> RangeSet {
    let place = wanted.place;
    let mut proved = RangeSet::default();
    if !tables.is_remote(place, wanted.content) {
        return proved;
    }
    let probe = match again || tables.is_being_removed(place) {
        true => look_for_marker(tables, space, place),
        false => Probe::Occupied,
    };
    match probe {
        Probe::Occupied => proved.insert(place.1.get()..place.1.get() + PAGE),
        Probe::Absent => shared.count_zeros(1, false),
        Probe::Taken | Probe::Changing | Probe::Gone => {}
    }
    proved
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
