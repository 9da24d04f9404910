//! Pages for which threads wait: whom they have been asked of, and who is asked next when an agent does not give a page, gives a wrong one, or takes long.
//! A fault without surprises only passes `demand`, `note_demanded` and `end_rivals`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gms_policy::ids::AgentId;
use gms_policy::limits::HEDGE_AFTER_MAX;
use gms_policy::redundancy::{AgentSet, HOLDERS_MAX};
use gms_transport::Transport;
use gms_transport::client::{Failure, GetId, RETRY};
use gms_transport::message::Status;

use super::FaultCore;
use super::fetch::{Fetch, look_for_marker};
use crate::decode::End;
use crate::kernel::Probe;
use crate::loans::Wanted;
use crate::page_map::Content;
use crate::space::Space;
use crate::sync::lock;
use crate::tables::Place;

/// Pause before it is looked again whether another agent can be asked.
const HEDGE_PAUSE: Duration = Duration::from_millis(10);

/// Pause before it is looked again whether threads wait for pages ahead of which nothing comes.
const SILENCE_PAUSE: Duration = Duration::from_millis(50);

/// A page for which threads wait. Left when it is installed, when nobody can give it, or when it is no longer wanted.
#[derive(Debug)]
pub(super) struct Demand {
    content: Content,
    /// The gets by which it is asked for, and the agents: one, and others when those before took long.
    asked: [Option<(GetId, AgentId)>; HOLDERS_MAX],
    /// Agents that have not given it when they were asked.
    failed: AgentSet,
    /// One of those that should have it has not got it, or has it wrong: there are fewer copies than are counted.
    pub lacks_copy: bool,
    /// When it was asked for first, and the removals in its space by then: its marker was looked for after that, perhaps not since.
    pub began: Instant,
    pub removals: u64,
    /// When another agent is to be asked too, if any has it.
    hedge_at: Option<Instant>,
}

impl Demand {
    fn new(now: Instant, content: Content, removals: u64) -> Demand {
        let failed = AgentSet::EMPTY;
        Demand {
            content,
            asked: [None; HOLDERS_MAX],
            failed,
            lacks_copy: false,
            began: now,
            removals,
            hedge_at: None,
        }
    }

    /// It is asked for by this get, too.
    fn note(&mut self, get: GetId, agent: AgentId) {
        let place = self.asked.iter_mut().find(|asked| asked.is_none());
        *place.expect("no agent is asked twice") = Some((get, agent));
    }

    /// A get of it has ended without it; false if it was no get of it.
    fn end(&mut self, get: GetId) -> bool {
        let found = self.asked.iter_mut().find(|asked| asked.is_some_and(|(id, _)| id == get));
        let agent = found.and_then(Option::take).map(|(_, agent)| AgentSet::of(agent));
        self.failed = self.failed.union(agent.unwrap_or_default());
        agent.is_some()
    }

    /// The gets by which it is asked for.
    pub(super) fn gets(&self) -> impl Iterator<Item = GetId> + use<> {
        self.asked.into_iter().flatten().map(|(get, _)| get)
    }

    fn asked_of(&self) -> AgentSet {
        self.asked.iter().flatten().map(|&(_, agent)| agent).collect()
    }
}

impl<T: Transport> FaultCore<T> {
    /// A thread waits for a page, for which nobody has waited yet, since `began`.
    pub(super) fn demand(&mut self, began: Instant, Wanted { place, content }: Wanted) {
        let removals = |space: &Arc<Space>| space.removals.load(Ordering::Relaxed);
        let removals = self.space_of(place.0).map_or(0, removals);
        self.pending.insert(place, Demand::new(began, content, removals));
    }

    /// What was asked for is not waited for any more: what faults on it from now on asks anew.
    pub(super) fn end_demand(&mut self, place: Place) {
        self.pending.remove(&place);
        self.crowd &= !self.pending.is_empty();
        lock(&self.shared.tables).end_loan(place);
    }

    /// A page for which a thread waits is asked of an agent. Returns when it was asked for first, and the removals in its space by then.
    pub(super) fn note_demanded(
        &mut self,
        now: Instant,
        place: Place,
        get: GetId,
        agent: AgentId,
    ) -> (Instant, u64) {
        let after = self.hedge.after();
        let answers = self.agents.answers(now, agent);
        let is_able = self.decoder.is_able();
        let Some(demand) = self.pending.get_mut(&place) else { return (now, 0) };
        demand.note(get, agent);
        let others = !demand.content.holders.without(demand.asked_of()).is_empty() || is_able;
        demand.hedge_at = others.then(|| if answers { now + after } else { now });
        (demand.began, demand.removals)
    }

    /// A page does not come by a get for which a thread waits; `failure` is none if it is no longer wanted. It is asked of another agent that has it. If
    /// there is none, and none is being asked, it is lost.
    pub(super) fn not_given(
        &mut self,
        now: Instant,
        get: GetId,
        wanted: Wanted,
        failure: Option<Failure>,
    ) {
        let Wanted { place, content } = wanted;
        let agent = self.fetches.get(&get).map(|fetch| fetch.agent);
        let Some(demand) = self.pending.get_mut(&place).filter(|demand| demand.content == content)
        else {
            return;
        };
        if !demand.end(get) {
            return;
        }
        let is_absent = failure == Some(Failure::NotHeld(Status::NotFound));
        demand.lacks_copy |= is_absent;
        let (failed, asked) = (demand.failed, demand.asked_of());
        let tables = lock(&self.shared.tables);
        let is_wanted = failure.is_some() && tables.is_remote(place, content);
        let holders = tables.holders(content);
        let others = holders.without(failed).without(asked);
        drop(tables);
        if let Some(agent) = agent
            && is_absent
            && is_wanted
            && holders.has(agent)
            && (self.decoder.is_able() || !(others.is_empty() && asked.is_empty()))
        {
            // It has said that it had stored it, and was not restarted since.
            self.shared.blame(agent, self.agents.lane().name(agent), "has lost a page", true);
        }
        if !is_wanted {
            self.end_demand(place);
            return self.wake(place);
        }
        if !others.is_empty() {
            return self.ask(now, self.agents.lane().nearest(others), vec![wanted], true);
        }
        if !asked.is_empty() {
            return;
        }
        if self.decoder.is_able() {
            return self.make(now, wanted);
        }
        self.end_demand(place);
        // While the workload is being let go, a page that its agent does not give back is the evict thread's to poison; its thread sleeps
        // until then.
        if self.shared.detaching.load(Ordering::Relaxed) {
            return;
        }
        if !self.is_missed(wanted) {
            return self.wake(place);
        }
        let Some(agent) = agent else { return };
        let (name, reason) = (self.agents.lane().name(agent), self.agents.lane().reason(agent));
        self.shared.fail(match failure {
            Some(Failure::NotHeld(status)) => {
                format!("agent {name} has lost a page ({status:?}), and no other agent has it")
            }
            _ => format!("agent {name} does not give a page back: {reason}"),
        });
    }

    /// Whether the program misses a page that nobody gives. What it has discarded untold it does not: there is no marker; nor anything if it has ended. If that
    /// cannot be known yet, whoever waits for the page is to fault again.
    fn is_missed(&mut self, Wanted { place, content }: Wanted) -> bool {
        if !self.prove(place, content) {
            return false;
        }
        let Some(space) = self.space_of(place.0).filter(|space| space.faults.is_alive()) else {
            return false;
        };
        let mut tables = lock(&self.shared.tables);
        tables.is_remote(place, content)
            && look_for_marker(&mut tables, space, place) == Probe::Occupied
    }

    /// The agent of a page does not give it: it is made of the other parts of its stripe. Who faults on it waits for that; a worker leaves it to the home.
    pub(super) fn make(&mut self, now: Instant, Wanted { place, content }: Wanted) {
        if self.guests.contains_key(&place.0) {
            return self.give_back(now, place);
        }
        let asked = self.pending.get(&place).map(|demand| demand.failed.union(demand.asked_of()));
        self.end_demand(place);
        self.unproved.retain(|unproved| unproved.0 != place);
        lock(&self.shared.tables).begin_loan(place);
        self.decoder.begin(now, place, content, asked.unwrap_or_default());
    }

    /// What is being made comes on. What has been made is in the write-back buffer: its threads are woken, and fault again.
    pub(super) fn make_on(&mut self, now: Instant) {
        for ended in self.decoder.turn(now, &mut self.agents, &self.shared) {
            let (place, content) = (ended.place, ended.content);
            let gets = self.pending.get(&place).map(Demand::gets);
            gets.into_iter().flatten().for_each(|get| self.cancel(now, get));
            self.end_demand(place);
            if ended.end == End::Made {
                self.served.push(ended.took);
            }
            match ended.end.reason() {
                // Then the evict thread poisons it, which wakes the thread.
                Some(_) if self.shared.detaching.load(Ordering::Relaxed) => {}
                Some(reason) if self.is_missed(Wanted { place, content }) => {
                    self.shared.fail(reason);
                }
                _ => self.wake(place),
            }
        }
    }

    /// Nobody has a page for which a thread waits: it is made, with parity, or lost. Who waits for those `ahead` faults again.
    pub(super) fn not_held(&mut self, now: Instant, demanded: Wanted, ahead: &[Wanted]) {
        self.give_up(ahead);
        if self.decoder.is_able() {
            return self.make(now, demanded);
        }
        self.end_demand(demanded.place);
        self.unproved.retain(|unproved| unproved.0 != demanded.place);
        // While the workload is being let go, the evict thread poisons it, which wakes the thread.
        if self.shared.detaching.load(Ordering::Relaxed) {
            return;
        }
        match self.is_missed(demanded) {
            true => self.shared.fail("a page is lost: every agent that had it was restarted"),
            false => self.wake(demanded.place),
        }
    }

    /// A page has come that is not the one which was put. Counted once a reply, also where nobody waits for the page.
    pub(super) fn mismatch(&mut self, now: Instant, get: GetId, page: usize) {
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
            self.shared.blame(agent, self.agents.lane().name(agent), &what, true);
        }
    }

    /// Agents are not blamed for the time in which this process was stopped.
    pub(super) fn excuse(&mut self, now: Instant) {
        let missed = self.pulse.beat(now, RETRY);
        if missed.is_zero() {
            return;
        }
        self.agents.excuse(now, missed);
        self.decoder.excuse(missed);
        self.unread.values_mut().for_each(|unread| unread.since += missed);
        self.fetches.values_mut().for_each(|fetch| fetch.heard = now.min(fetch.heard + missed));
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
            if fetch.demanded().is_some() && !lock(&self.shared.tables).is_remote(place, content) {
                self.agents.cancel(now, get);
                self.forsake(now, get, u64::MAX, None);
                self.fetches.remove(&get);
            }
        }
    }

    /// Pages do not come by this get. Whoever waits for a page ahead of need faults again, and so does whoever waits for one that is no
    /// longer wanted (no `failure`).
    pub(super) fn forsake(
        &mut self,
        now: Instant,
        get: GetId,
        pages: u64,
        failure: Option<Failure>,
    ) {
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

    /// When it is due to be looked whether threads wait for what does not come.
    pub(super) fn silence_due(&self) -> Option<Instant> {
        (!self.fetches.is_empty()).then_some(self.silence_at)
    }

    /// Gives up pages ahead of which nothing comes, if a thread waits for one that can be had elsewhere: it faults again, and asks by itself.
    fn give_up_silent(&mut self, now: Instant) {
        if self.silence_due().is_none_or(|due| due > now) {
            return;
        }
        self.silence_at = now + SILENCE_PAUSE;
        let is_silent = |fetch: &Fetch| {
            let waited = now.saturating_duration_since(fetch.heard);
            waited >= HEDGE_AFTER_MAX || !self.agents.answers(now, fetch.agent)
        };
        let fetches = self.fetches.iter().filter(|(_, fetch)| is_silent(fetch));
        let held_up = fetches.filter(|(get, fetch)| self.holds_up(**get, fetch));
        let gets: Vec<GetId> = held_up.map(|(&get, _)| get).collect();
        gets.into_iter().for_each(|get| self.cancel(now, get));
    }

    /// Whether a thread waits for a page ahead that another agent can give. While one waits for the first page, that has a hedge, which ends the get too.
    fn holds_up(&self, get: GetId, fetch: &Fetch) -> bool {
        let demand = fetch.demanded().and_then(|place| self.pending.get(&place));
        if demand.is_some_and(|demand| demand.gets().any(|one| one == get)) {
            return false;
        }
        let tables = lock(&self.shared.tables);
        fetch.open().filter(|wanted| tables.is_prefetch_awaited(wanted.place)).any(|wanted| {
            let others = tables.holders(wanted.content).without(AgentSet::of(fetch.agent));
            self.decoder.is_able() || !others.is_empty()
        })
    }

    /// When a page is due to be asked of another agent.
    pub(super) fn hedge_due(&self) -> Option<Instant> {
        self.pending.values().filter_map(|demand| demand.hedge_at).min()
    }

    /// Asks another agent for what has not come for long, or has whoever waits for it do so.
    pub(super) fn hedge(&mut self, now: Instant) {
        self.give_up_silent(now);
        if self.hedge_due().is_none_or(|due| due > now) {
            return;
        }
        let is_due = |demand: &Demand| demand.hedge_at.is_some_and(|at| at <= now);
        let due: Vec<Place> =
            self.pending.iter().filter(|(_, demand)| is_due(demand)).map(|(&p, _)| p).collect();
        for place in due {
            self.hedge_one(now, place);
        }
    }

    fn hedge_one(&mut self, now: Instant, place: Place) {
        let Some(demand) = self.pending.get_mut(&place) else { return };
        demand.hedge_at = Some(now + HEDGE_PAUSE);
        if self.decoder.makes(place) {
            return;
        }
        let (content, failed, asked) = (demand.content, demand.failed, demand.asked_of());
        let holders = lock(&self.shared.tables).holders(content);
        let lane = self.agents.lane();
        let others = holders.without(failed).without(asked);
        // Nothing is to be hoped for from those that are asked now: that is no hedge.
        let is_vain = !asked.without(failed).agents().any(|agent| self.agents.answers(now, agent));
        let waited = now.saturating_duration_since(demand.began);
        let too_early = match is_vain || waited >= HEDGE_AFTER_MAX {
            true => AgentSet::EMPTY,
            false => lane.last_resorts(),
        };
        let others = others.without(too_early);
        let others: AgentSet = others.agents().filter(|&agent| lane.is_up(agent)).collect();
        if others.is_empty() && !self.decoder.is_able() {
            return;
        }
        if is_vain || self.hedge.take(waited) {
            if others.is_empty() {
                // The other parts of its stripe are asked for, beside the page; by its home.
                return match self.guests.contains_key(&place.0) {
                    true => self.give_back(now, place),
                    false => self.decoder.begin(now, place, content, failed.union(asked)),
                };
            }
            let is_lent = !is_vain && self.guests.contains_key(&place.0);
            self.shared.lent_hedges.fetch_add(is_lent.into(), Ordering::Relaxed);
            let agent = self.agents.lane().nearest(others);
            self.ask(now, agent, vec![Wanted { place, content }], true);
        }
    }

    /// An agent has given a wrong page: another one is asked at once, and whoever comes first with the right one is believed.
    pub(super) fn doubt(&mut self, now: Instant, place: Place, agent: AgentId) {
        let is_able = self.decoder.is_able();
        let Some(demand) = self.pending.get_mut(&place) else { return };
        demand.lacks_copy = true;
        if is_able || !demand.content.holders.without(demand.asked_of()).is_empty() {
            demand.failed = demand.failed.union(AgentSet::of(agent));
            demand.hedge_at = Some(now);
        }
    }

    /// The page comes by one get: the others are given up.
    pub(super) fn end_rivals(&mut self, now: Instant, place: Place, get: GetId) {
        let Some(demand) = self.pending.get(&place) else { return };
        if demand.content.holders.len() > 1 || self.decoder.is_able() {
            self.hedge.on_read(now.saturating_duration_since(demand.began));
        }
        for rival in demand.gets().filter(|&rival| rival != get) {
            self.cancel(now, rival);
        }
    }

    /// Gives up a get; whoever waits for its first page is the caller's to serve. What it was to bring ahead of need does not come soon either: who waits for that faults again, and
    /// asks by itself.
    pub(super) fn cancel(&mut self, now: Instant, get: GetId) {
        self.agents.cancel(now, get);
        let Some(mut fetch) = self.fetches.remove(&get) else { return };
        let closed = fetch.close(u64::MAX);
        let ahead = closed.into_iter().filter(|&page| !fetch.is_awaited(page));
        let ahead: Vec<Wanted> = ahead.map(|page| fetch.pages[page]).collect();
        self.give_up(&ahead);
    }
}
