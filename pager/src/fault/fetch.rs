//! Pages from the agents: what is asked for, sent again, and installed as it arrives.
//!
//! `fetch` -> `send` ... `network` -> `reply` -> `payload` -> `install`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gms_policy::ids::{AgentId, PageAddr, SpaceId};
use gms_policy::prefetch::Prefetch;
use gms_transport::message::{Control, PAGES_MAX, PageDescriptor, Status};
use gms_transport::{ExchangeId, Transport};
use zerocopy::IntoBytes;

use super::{FETCH_DEADLINE, FETCH_RETRY, FaultThread, ROOM_KEPT, SpaceFaults, look};
use crate::commands::note;
use crate::lane::LaneEvent;
use crate::page_map::{Content, PAGE};
use crate::range_set::RangeSet;
use crate::shared::{Shared, Space, lock};
use crate::tables::{Place, Tables};
use crate::torture::{self, Point};
use crate::trace::Trace;
use crate::uffd::{Installed, Probe};

/// A marker was there a moment ago. A guard may have come in its place since, which raises no event, and which a copy would overwrite.
const PROOF_LASTS: Duration = Duration::from_micros(100);

/// So many wrong pages of one agent end the workload.
const MISMATCHES_MAX: u32 = 3;

/// One page of a fetch.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    place: Place,
    content: Content,
}

/// A fetch in flight or waiting to be sent.
pub(super) struct Fetch {
    pages: Vec<Wanted>,
    /// Whether a thread waits for the first page. All others are fetched ahead.
    demanded: bool,
    began: Instant,
    /// For so long this process did not run meanwhile.
    missed: Duration,
    /// Removals in all spaces when it began.
    removals: u64,
    sent: Instant,
    /// Bytes of the payload that came.
    received: usize,
    /// The beginning of a page whose end has not come yet.
    part: Vec<u8>,
    /// Pages installed so far.
    installed: usize,
    accepted: bool,
}

impl Fetch {
    fn new(now: Instant, removals: u64, pages: Vec<Wanted>, demanded: bool) -> Fetch {
        Fetch {
            pages,
            demanded,
            began: now,
            missed: Duration::ZERO,
            removals,
            sent: now,
            received: 0,
            part: Vec::new(),
            installed: 0,
            accepted: false,
        }
    }

    /// Whether a thread waits for the next page.
    fn is_awaited(&self) -> bool {
        self.demanded && self.installed == 0
    }

    /// Bytes of descriptors before the first page.
    fn head(&self) -> usize {
        if self.pages.len() > 1 { self.pages.len() * size_of::<PageDescriptor>() } else { 0 }
    }

    /// As exchanges, which have room for so many pages only.
    fn split(self) -> impl Iterator<Item = Fetch> {
        let (now, removals, mut demanded) = (self.began, self.removals, self.demanded);
        let mut rest = self.pages;
        std::iter::from_fn(move || {
            let more = rest.split_off(rest.len().min(PAGES_MAX));
            let pages = std::mem::replace(&mut rest, more);
            let first = std::mem::take(&mut demanded);
            (!pages.is_empty()).then(|| Fetch::new(now, removals, pages, first))
        })
    }

    /// Forgets what came of a reply, but for the pages that are installed; `None` if those are all.
    fn restart(&mut self) -> Option<()> {
        self.demanded = self.is_awaited();
        self.pages.drain(..self.installed);
        self.installed = 0;
        self.received = 0;
        self.part.clear();
        self.accepted = false;
        (!self.pages.is_empty()).then_some(())
    }

    /// Bytes of the whole payload.
    fn payload(&self) -> usize {
        self.head() + self.pages.len() * PAGE as usize
    }
}

impl<T: Transport> FaultThread<T> {
    /// Fetches the page, and behind it in the same exchange what will be needed next: the faulting thread is woken as soon as its own
    /// page is there.
    pub(super) fn fetch(&mut self, place: Place, content: Content) {
        if !self.pending.insert(place) {
            return;
        }
        self.unproved.push((place, content));
        self.trace(|trace| trace.looked_up(place));
        let now = Instant::now();
        let ahead = self.look_ahead(place);
        let demanded = Wanted { place, content };
        if ahead.is_empty() {
            return self.send(now, Fetch::new(now, self.removals, vec![demanded], true));
        }
        self.fetch_all(now, Some(demanded), ahead);
    }

    fn fetch_all(&mut self, now: Instant, demanded: Option<Wanted>, ahead: Vec<Wanted>) {
        let mut by_agent: BTreeMap<AgentId, Vec<Wanted>> = BTreeMap::new();
        for wanted in demanded.into_iter().chain(ahead) {
            by_agent.entry(wanted.content.agent).or_default().push(wanted);
        }
        let first = demanded.and_then(|d| by_agent.remove(&d.content.agent));
        let new = |pages, demanded| Fetch::new(now, self.removals, pages, demanded);
        let first = first.map(|pages| new(pages, true));
        let ahead: Vec<Fetch> = by_agent.into_values().map(|pages| new(pages, false)).collect();
        for fetch in first.into_iter().chain(ahead) {
            fetch.split().for_each(|fetch| self.send(now, fetch));
        }
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
        let taken = ROOM_KEPT + tables.prefetching() as u64;
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

    fn send(&mut self, now: Instant, mut fetch: Fetch) {
        if fetch.restart().is_none() {
            return;
        }
        let first = &fetch.pages[0].content;
        let descriptors: Vec<PageDescriptor> = match fetch.pages.len() {
            1 => Vec::new(),
            _ => fetch.pages.iter().map(|p| PageDescriptor::new(p.content.id.0, 0)).collect(),
        };
        let sent = self.lane.send(
            now,
            first.agent,
            |request, workload| match descriptors.len() {
                0 => Control::get(request, workload, first.id.0),
                n => Control::get_many(request, workload, n as u16),
            },
            &[descriptors.as_bytes()],
            fetch.pages.len() as u32,
        );
        fetch.sent = now;
        match sent {
            Ok(exchange) => drop(self.inflight.insert(exchange, fetch)),
            Err(_) => self.unsent.push(fetch),
        }
    }

    /// Agents are not blamed for the time in which this process was stopped.
    pub(super) fn excuse(&mut self, now: Instant) {
        let missed = self.pulse.beat(now, FETCH_RETRY);
        if missed.is_zero() {
            return;
        }
        for fetch in self.inflight.values_mut().chain(&mut self.unsent) {
            fetch.missed += missed;
            fetch.sent = now.min(fetch.sent + missed);
        }
        self.unread.values_mut().for_each(|unread| unread.since += missed);
        for late in self.spaces.values_mut().filter_map(|state| state.late.as_mut()) {
            *late += missed;
        }
    }

    /// Sends what could not be sent, or was not answered.
    pub(super) fn send_again(&mut self, now: Instant) {
        let late = |fetch: &Fetch| now.duration_since(fetch.sent) > FETCH_RETRY;
        if !self.inflight.is_empty() && self.inflight.values().any(late) {
            let exchanges: Vec<ExchangeId> =
                self.inflight.iter().filter(|(_, f)| late(f)).map(|(e, _)| *e).collect();
            for exchange in exchanges {
                self.lane.abandon(now, exchange);
                let late = self.inflight.remove(&exchange);
                self.requeue(late);
            }
        }
        for fetch in std::mem::take(&mut self.unsent) {
            if !fetch.demanded {
                self.give_up(&fetch.pages);
                continue;
            }
            let Wanted { place, content } = fetch.pages[0];
            let agent = content.agent;
            if !lock(&self.shared.tables).is_remote(place, content) {
                // Discarded meanwhile, or its process has ended.
                self.pending.remove(&place);
                self.give_up(&fetch.pages[1..]);
                self.wake(place);
                continue;
            }
            if now.duration_since(fetch.began) > FETCH_DEADLINE + fetch.missed {
                if self.leave_to_detach(&fetch) {
                    continue;
                }
                let (name, reason) = (self.lane.name(agent), self.lane.reason(agent));
                self.shared.fail(format!("agent {name} does not give a page back: {reason}"));
            }
            if self.lane.is_up(agent) {
                self.send(now, fetch);
            } else {
                self.unsent.push(fetch);
            }
        }
    }

    /// While the workload is being let go, a page that its agent does not give back is the evict thread's to poison; its thread sleeps until
    /// then. False at any other time.
    fn leave_to_detach(&mut self, fetch: &Fetch) -> bool {
        let detaching = self.shared.detaching.load(Ordering::Relaxed);
        if detaching {
            self.pending.remove(&fetch.pages[0].place);
            self.give_up(&fetch.pages[1..]);
        }
        detaching
    }

    /// What is missing of a fetch is to be sent again.
    fn requeue(&mut self, fetch: Option<Fetch>) {
        if let Some(mut fetch) = fetch
            && fetch.restart().is_some()
        {
            self.unsent.push(fetch);
        }
    }

    /// Pages fetched ahead do not come: threads that wait for them try by themselves.
    fn give_up(&self, pages: &[Wanted]) {
        for page in pages {
            let waited = lock(&self.shared.tables).end_prefetch(page.place);
            if waited {
                self.wake(page.place);
            }
        }
    }

    pub(super) fn wake(&self, place: Place) {
        if let Some(state) = self.spaces.get(&place.0) {
            state.space.faults.wake(place.1.get()..place.1.get() + PAGE);
        }
    }

    // ---- and back

    /// True if anything came or was due.
    pub(super) fn network(&mut self, now: Instant) -> bool {
        self.trace(Trace::receiving);
        let busy = self.lane.drive(now).unwrap_or_else(|error| {
            self.shared.fail(format!("receiving from the agents failed: {error}"));
            false
        });
        while let Some(event) = self.lane.poll(now) {
            torture::at(Point::BeforeReply);
            match event {
                LaneEvent::Reply { exchange, control } => self.reply(now, exchange, &control),
                LaneEvent::Payload { exchange, offset, bytes } => {
                    self.payload(exchange, offset, &bytes);
                }
                LaneEvent::Complete { exchange } => self.complete(exchange),
                LaneEvent::Failed { exchange } => {
                    let failed = self.inflight.remove(&exchange);
                    self.requeue(failed);
                }
                LaneEvent::Up { agent, session, lost } => {
                    self.shared.agent_up(agent, self.lane.name(agent), session, lost);
                }
                LaneEvent::Down { .. } => {}
            }
            torture::at(Point::AfterReply);
        }
        busy
    }

    fn reply(&mut self, now: Instant, exchange: ExchangeId, control: &Control) {
        let Some(fetch) = self.inflight.get_mut(&exchange) else { return };
        if let Some(trace) = &mut self.trace {
            let (queue, service) = (control.queue_ns.get(), control.service_ns.get());
            trace.answered(fetch.pages[0].place, queue, service);
        }
        let all = u64::MAX >> (64 - fetch.pages.len());
        match control.status {
            Status::Ok if control.done.get() == all => fetch.accepted = true,
            // No session (yet): asked again when the link is up.
            Status::Denied => {}
            _ => self.lost(now, exchange, control),
        }
    }

    /// The agent does not have every page that was asked for.
    fn lost(&mut self, now: Instant, exchange: ExchangeId, control: &Control) {
        let Some(mut fetch) = self.inflight.remove(&exchange) else { return };
        self.lane.abandon(now, exchange);
        if fetch.restart().is_none() {
            return;
        }
        if !fetch.demanded {
            return self.give_up(&fetch.pages);
        }
        if fetch.pages.len() > 1 {
            // Perhaps only pages for which nobody waits: ask for the other alone.
            self.give_up(&fetch.pages.split_off(1));
            return self.unsent.push(fetch);
        }
        if self.leave_to_detach(&fetch) {
            return;
        }
        let Wanted { place, content } = fetch.pages[0];
        self.pending.remove(&place);
        if lock(&self.shared.tables).is_remote(place, content) {
            let name = self.lane.name(content.agent);
            self.shared.fail(format!("agent {name} has lost a page ({:?})", control.status));
        } else {
            self.wake(place);
        }
    }

    /// Bytes of pages, as they arrive. Pages which are whole in what was received are installed from there.
    fn payload(&mut self, exchange: ExchangeId, offset: usize, bytes: &[u8]) {
        let Some(mut fetch) = self.inflight.remove(&exchange) else { return };
        if fetch.accepted && offset == fetch.received && offset + bytes.len() <= fetch.payload() {
            fetch.received += bytes.len();
            let descriptors = fetch.head().saturating_sub(offset).min(bytes.len());
            // After a wrong page the rest is asked for again.
            fetch.accepted = self.take_in(&mut fetch, &bytes[descriptors..]);
        }
        self.inflight.insert(exchange, fetch);
    }

    /// Takes in the next bytes of a fetch's pages; false if one of them is wrong.
    fn take_in(&mut self, fetch: &mut Fetch, mut bytes: &[u8]) -> bool {
        let page = PAGE as usize;
        if !fetch.part.is_empty() {
            let missing = (page - fetch.part.len()).min(bytes.len());
            fetch.part.extend_from_slice(&bytes[..missing]);
            bytes = &bytes[missing..];
            if fetch.part.len() < page {
                return true;
            }
            let part = std::mem::take(&mut fetch.part);
            if !self.install(fetch, &part) {
                return false;
            }
        }
        let whole = bytes.len() - bytes.len() % page;
        let good = self.install(fetch, &bytes[..whole]);
        fetch.part.extend_from_slice(&bytes[whole..]);
        good
    }

    /// Installs the next pages of the fetch; false if one must be fetched again.
    fn install(&mut self, fetch: &mut Fetch, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            let good = self.next_run(fetch, bytes);
            if good == 0 {
                return self.mismatch(fetch);
            }
            let (run, rest) = bytes.split_at(good * PAGE as usize);
            self.install_run(fetch, good, run);
            fetch.installed += good;
            bytes = rest;
        }
        true
    }

    /// How many pages can be installed in one call: they are adjacent and their checksums right. The page for which a thread waits is one
    /// for itself, so that it does not wait for the others.
    fn next_run(&mut self, fetch: &Fetch, bytes: &[u8]) -> usize {
        let pages = &fetch.pages[fetch.installed..];
        let most = if fetch.is_awaited() { 1 } else { pages.len() };
        let first = pages[0].place.1.get();
        let adjacent = |i: usize| pages[i].place.1.get() == first + i as u64 * PAGE;
        let good = |i: usize, page: &[u8]| self.shared.checksum(page) == pages[i].content.hash;
        let each = bytes.chunks_exact(PAGE as usize).take(most).enumerate();
        each.take_while(|&(i, page)| adjacent(i) && good(i, page)).count()
    }

    /// Counted for each agent, also where nobody waits for the page: its first wrong page is told, and another few end the workload.
    fn mismatch(&mut self, fetch: &Fetch) -> bool {
        let agent = fetch.pages[0].content.agent;
        let count = self.mismatches.entry(agent).or_default();
        *count += 1;
        let text =
            format!("agent {} gives back a page with a wrong checksum", self.lane.name(agent));
        match *count {
            1 => note(text),
            // While the workload is being let go, it is asked for again until the deadline.
            MISMATCHES_MAX.. if !self.shared.detaching.load(Ordering::Relaxed) => {
                self.shared.fail(text);
            }
            _ => {}
        }
        false
    }

    /// Installs adjacent pages of a fetch.
    fn install_run(&mut self, fetch: &Fetch, count: usize, bytes: &[u8]) {
        let run = &fetch.pages[fetch.installed..fetch.installed + count];
        let (id, start) = (run[0].place.0, run[0].place.1.get());
        self.trace(|trace| trace.opened(run[0].place));
        // The lock is held from the look to the copy: in between nobody may install, change and evict a page, or forget that it is being removed.
        let mut tables = lock(&self.shared.tables);
        let proved = match self.spaces.get(&id) {
            Some(_) if self.shared.has_failed() => RangeSet::default(),
            // It may be another page's place by now.
            Some(state) if !state.backlog.is_empty() => RangeSet::default(),
            Some(state) if fetch.is_awaited() => {
                let at = self.unproved.iter().position(|(place, _)| *place == run[0].place);
                let unproved = at.map(|at| self.unproved.swap_remove(at)).is_some();
                let old = fetch.removals != self.removals || fetch.began.elapsed() > PROOF_LASTS;
                prove_awaited(&self.shared, &mut tables, state, run[0], unproved || old)
            }
            Some(state) => proved_ahead(&tables, &state.space, start..start + count as u64 * PAGE),
            None => RangeSet::default(),
        };
        let space = self.spaces.get(&id).map(|state| state.space.clone());
        let mut wake = Vec::new();
        let mut at = 0;
        while at < count {
            let remote = |wanted: &&Wanted| {
                proved.contains(wanted.place.1.get())
                    && tables.is_remote(wanted.place, wanted.content)
            };
            let remote = run[at..].iter().take_while(remote).count();
            let (copied, outcome) = match &space {
                Some(space) if remote > 0 => {
                    let from = start + at as u64 * PAGE;
                    let range = from..from + remote as u64 * PAGE;
                    space.faults.copy_run(range, &bytes[at * PAGE as usize..])
                }
                _ => (0, Installed::Gone),
            };
            if let Some(state) = self.spaces.get_mut(&id).filter(|_| fetch.is_awaited()) {
                let good = matches!(outcome, Installed::Done | Installed::Exists);
                // Not one that has been discarded meanwhile, or is there: nobody is to be stopped for that.
                let refused = !good && tables.is_remote(run[at].place, run[at].content);
                state.refused = refused.then(Instant::now);
                if refused {
                    self.waiting.insert(id);
                }
            }
            let end = at + copied as usize;
            for (i, wanted) in run.iter().enumerate().take(end.max(at + 1)).skip(at) {
                let outcome = if i < end { Installed::Done } else { outcome };
                let waited = match fetch.is_awaited() {
                    true => self.pending.remove(&wanted.place),
                    false => tables.end_prefetch(wanted.place),
                };
                if matches!(outcome, Installed::Done | Installed::Exists) {
                    tables.fetched(wanted.place, wanted.content, waited);
                }
                if outcome == Installed::Done {
                    self.count_installed(fetch);
                } else if waited {
                    wake.push(wanted.place);
                }
            }
            at = end.max(at + 1);
        }
        drop(tables);
        self.trace(|trace| trace.installed(run[0].place, wake.is_empty()));
        wake.into_iter().for_each(|place| self.wake(place));
    }

    fn count_installed(&self, fetch: &Fetch) {
        self.shared.count_resident(1);
        self.shared.pages_in.fetch_add(1, Ordering::Relaxed);
        if fetch.is_awaited() {
            let took = fetch.began.elapsed().as_nanos() as u64;
            lock(&self.shared.latency).saturating_record(took);
        } else {
            self.shared.prefetched.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn complete(&mut self, exchange: ExchangeId) {
        let Some(fetch) = self.inflight.remove(&exchange) else { return };
        // Not all came in good order: ask again for what is missing.
        self.requeue(Some(fetch));
    }
}

/// The address of a page for which a thread waits, if it may be installed. Its marker has been looked for after it was asked for, and is again
/// unless that was just now (`again`). If nothing can be known now, the thread faults again.
fn prove_awaited(
    shared: &Shared,
    tables: &mut Tables,
    state: &SpaceFaults,
    wanted: Wanted,
    again: bool,
) -> RangeSet {
    let place = wanted.place;
    let mut proved = RangeSet::default();
    if !tables.is_remote(place, wanted.content) {
        return proved;
    }
    let probe = match again || tables.is_being_removed(place) {
        true => look(tables, &state.space, place),
        false => Probe::Occupied,
    };
    match probe {
        Probe::Occupied => proved.insert(place.1.get()..place.1.get() + PAGE),
        Probe::Absent => shared.count_zeros(1, false),
        Probe::Changing | Probe::Gone => {}
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::SAID;
    use crate::fault::tests::{ID, Play};
    use crate::session::Outcome;
    use crate::tables::EvictOutcome;

    /// Of 64 pages that are at the agent a thread waits for the first, which comes right, and never for the others, which do not.
    #[test]
    fn wrong_pages_that_nobody_waits_for_are_told_and_end_the_workload() {
        let pages = PAGES_MAX as u64;
        let (mut play, now) = (Play::with(None, 1, pages), Instant::now());
        let right = vec![5; PAGE as usize];
        let hash = play.shared.checksum(&right);
        let all: Vec<PageAddr> =
            (0..pages).map(|n| PageAddr::containing(play.page + n * PAGE)).collect();
        let mut tables = lock(&play.shared.tables);
        let (mut leaving, mut wake) = (Vec::new(), Vec::new());
        tables.begin_evict(ID, &all, &mut leaving);
        for &(_, slot) in &leaving {
            tables.finish_evict(slot, EvictOutcome::Moved(hash), &mut wake);
        }
        for (slot, ..) in tables.start_write(AgentId(0), PAGES_MAX) {
            tables.written(slot, true);
        }
        drop(tables);
        play.fault.lane.take_sent();
        for round in 1..=3 {
            let begun =
                lock(&play.shared.tables).begin_prefetch(ID, all.iter().copied(), PAGES_MAX);
            let mut ahead: Vec<Wanted> = begun
                .into_iter()
                .map(|(page, content)| Wanted { place: (ID, page), content })
                .collect();
            let demanded = (round == 1).then(|| ahead.remove(0));
            play.fault.pending.extend(demanded.map(|wanted| wanted.place));
            play.fault.fetch_all(now, demanded, ahead);
            let sent = play.fault.lane.take_sent();
            let count = usize::from(sent[0].1.count.get());
            let mut payload = vec![0; count * size_of::<PageDescriptor>()];
            payload.extend(demanded.iter().flat_map(|_| right.clone()));
            payload.resize(count * (size_of::<PageDescriptor>() + PAGE as usize), 6);
            play.fault.lane.answer(&sent[0], payload);
            play.fault.network(now);
            play.fault.send_again(now);
            assert_eq!(play.shared.pages_in.load(Ordering::Relaxed), 1, "the one that was right");
            let said = SAID.take();
            assert_eq!(said.contains("wrong checksum"), round == 1, "{round}: {said}");
            assert_eq!(play.shared.has_failed(), round == 3, "{round}");
        }
        let Some(Outcome::Killed(reason)) = play.shared.outcome() else { panic!("it goes on") };
        assert!(reason.contains("agent-0") && reason.contains("wrong checksum"), "{reason}");
    }

    /// A page is asked for; the agent has not answered.
    fn asked(play: &mut Play, now: Instant) {
        let place = (ID, PageAddr::containing(play.page));
        let mut tables = lock(&play.shared.tables);
        let (mut leaving, mut wake) = (Vec::new(), Vec::new());
        tables.begin_evict(ID, &[place.1], &mut leaving);
        tables.finish_evict(leaving[0].1, EvictOutcome::Moved(7), &mut wake);
        for (slot, ..) in tables.start_write(AgentId(0), 1) {
            tables.written(slot, true);
        }
        let content = tables.begin_prefetch(ID, [place.1].into_iter(), 1)[0].1;
        tables.end_prefetch(place);
        drop(tables);
        play.fault.pending.insert(place);
        play.fault.fetch_all(now, Some(Wanted { place, content }), Vec::new());
    }

    /// Turns of the thread at these seconds after the page was asked for; whether the workload was stopped for want of it.
    fn is_stopped_after(turns: impl IntoIterator<Item = u64>) -> bool {
        let (mut play, start) = (Play::with(None, 1, 1), Instant::now());
        asked(&mut play, start);
        for second in turns {
            let now = start + Duration::from_secs(second);
            play.fault.excuse(now);
            play.fault.send_again(now);
        }
        play.shared.has_failed()
    }

    #[test]
    fn an_agent_is_not_blamed_for_the_time_in_which_the_pager_was_stopped() {
        assert!(!is_stopped_after([1, 18, 19]), "it was stopped for 17 s");
        assert!(!is_stopped_after([17, 1000, 1001]), "and at once, and for long");
        assert!(!is_stopped_after([1, 18, 19, 20, 22, 24, 26, 28, 30]), "it had its time before");
        assert!(is_stopped_after(1..=18), "it ran all the time");
        assert!(is_stopped_after([1, 18].into_iter().chain(19..=34)), "and afterwards");
    }
}
