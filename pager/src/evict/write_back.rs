//! Write-back: pages in the buffer are put to agents, each to as many as are to have it, and agents are told what they may forget.
//!
//! `turn` puts what is ready -> `poll` -> `settle`.

mod deal;
mod repair;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gms_policy::ids::{AgentId, ContentId};
use gms_policy::placement::{AgentView, TwoChoices, choose_set};
use gms_policy::redundancy::{AgentSet, Copies, Redundancy, Shortage};
use gms_policy::spread::Spread;
use gms_transport::Transport;
use gms_transport::client::{Client, ClientEvent, LEASE, PutId, Urgency};
use gms_transport::message::Op;

use self::repair::Repair;
use crate::decode::Decoder;
use crate::page_map::Content;
use crate::shared::Shared;
use crate::sync::lock;
use crate::tables::{Place, WriteOutcome};
use crate::torture::{self, Point};

/// Puts under way to one agent.
const PUTS_MAX: usize = 8;
/// Discards are sent when so many wait, or after the pause.
const DISCARDS_BATCH: usize = 512;
const DISCARDS_PAUSE: Duration = Duration::from_millis(50);
/// Exchanges in flight to one agent that tell it what to discard.
const DISCARDS_MAX: usize = 4;
/// If more wait than this, an agent that does not answer those, or is away, is told of no more: it keeps the pages until the workload ends. (One that no thread
/// has reached for twice its lease has none.)
const DISCARDS_KEPT: usize = 1 << 20;
/// An agent that has been away for this long is not expected back: its pages get other copies. An agent keeps pages for longer ([`LEASE`]).
const GONE_AFTER: Duration = Duration::from_secs(10);
const _: () = assert!(GONE_AFTER.as_secs() < LEASE.as_secs());

/// What was put to one agent.
enum Put {
    /// Pages of these slots.
    Pages(AgentId, Vec<u32>),
    /// Parts of stripes.
    Parts(AgentId, Vec<ContentId>),
}

/// See the module's documentation.
pub struct WriteBack<T> {
    shared: Arc<Shared>,
    /// The agents.
    pub agents: Client<T>,
    puts: BTreeMap<PutId, Put>,
    given: BTreeMap<AgentId, u64>,
    /// Agents of which the tables know that they may be down.
    untrusted: AgentSet,
    /// Agents that can be used now, and to which of them each page is given: to fewer than there are to be while fewer can be used.
    usable: AgentSet,
    copies: Copies,
    /// Since when agents cannot be used.
    away_since: BTreeMap<AgentId, Instant>,
    /// Since when no thread has a link to an agent.
    unlinked_since: BTreeMap<AgentId, Instant>,
    discard_at: Instant,
    repair: Repair,
    /// Makes pages of parity, to be dealt anew or brought home.
    decoder: Decoder,
    /// Pages that could not be made while the workload is let go.
    unmade: Vec<(Place, Content)>,
    random: u64,
}

impl<T: Transport> WriteBack<T> {
    /// Of a session that begins.
    pub fn new(now: Instant, shared: Arc<Shared>, agents: Client<T>) -> WriteBack<T> {
        WriteBack {
            given: BTreeMap::new(),
            agents,
            puts: BTreeMap::new(),
            untrusted: AgentSet::default(),
            usable: AgentSet::EMPTY,
            copies: Copies::at_agents(1),
            away_since: BTreeMap::new(),
            unlinked_since: BTreeMap::new(),
            discard_at: now,
            repair: Repair::new(now),
            decoder: Decoder::new(now, shared.config.redundancy.shape(), Urgency::Bulk),
            unmade: Vec::new(),
            random: shared.seed | 1,
            shared,
        }
    }

    /// Pages that the agent has been given.
    pub fn given(&self, agent: AgentId) -> u64 {
        self.given.get(&agent).copied().unwrap_or(0)
    }

    /// The same of all agents.
    pub(super) fn all_given(&self) -> impl Iterator<Item = (AgentId, u64)> + '_ {
        self.given.iter().map(|(&agent, &pages)| (agent, pages))
    }

    /// What agents were given by the binary before this one.
    pub(super) fn begin_given(&mut self, given: BTreeMap<AgentId, u64>) {
        self.given = given;
    }

    /// Whether a put is under way.
    pub(super) fn has_puts(&self) -> bool {
        !self.puts.is_empty()
    }

    /// What is under way counts as failed, whatever agents answer.
    pub(super) fn give_puts_up(&mut self) {
        self.return_unheard();
        let puts: Vec<PutId> = self.puts.keys().copied().collect();
        puts.into_iter().for_each(|put| self.stored(put, 0));
    }

    /// What agents were told to forget, and have not answered yet.
    pub(super) fn unheard_discards(&self) -> impl Iterator<Item = (AgentId, &[ContentId])> {
        self.agents.unanswered_discards()
    }

    /// Pages of which there are fewer copies than were asked for.
    pub fn short(&self, now: Instant) -> u64 {
        let shortage = self.lacking(now, Spread::default());
        lock(&self.shared.tables).short_of(&shortage)
    }

    /// What too few copies are, whoever could take more, and how far apart they are to be.
    fn lacking(&self, now: Instant, spread: Spread) -> Shortage {
        let lane = self.agents.lane();
        let copies = Copies {
            agents: self.shared.copies,
            last_resorts: lane.last_resorts(),
            due: lane.last_resorts(),
            sites: self.copies.sites,
            spread,
        };
        let sources = lane.agents().collect();
        Shortage { copies, leaving: self.leaving(now), recalling: AgentSet::EMPTY, sources }
    }

    /// Pages of which more copies are to be made now, and when another step is due to make more.
    pub fn shortage_left(&self) -> (u64, Option<Instant>) {
        let due = self.repair.due().into_iter().chain(self.decoder.due()).min();
        (self.repair.left(), due)
    }

    /// Sends what is ready to be written (`puts`), and what agents may forget. True if it put anything.
    pub fn turn(&mut self, now: Instant, puts: bool) -> bool {
        let mut busy = false;
        let mut passed_over = AgentSet::default();
        self.distrust_agents(now);
        self.make_on(now);
        match puts {
            true => busy |= self.repair(now),
            false => self.repair.stop(),
        }
        while puts && lock(&self.shared.tables).has_ready() {
            let views = self.takers(passed_over);
            let random = self.next_random();
            let agents = choose_set(&TwoChoices, &views, self.copies.agents, random);
            let set = agents.iter().copied().collect();
            // Who is far enough away has no place for a batch now, and is waited for.
            if agents.is_empty() || !self.are_enough(set) || !self.copies.are_apart(set) {
                break;
            }
            let put = match self.decoder.is_able() {
                true => self.deal(now, &agents),
                false => self.put(now, agents),
            };
            match put {
                Ok(()) => busy = true,
                // Its link takes nothing now: the others' may.
                Err(Some(agent)) => passed_over = passed_over.union(AgentSet::of(agent)),
                Err(None) => break,
            }
        }
        self.discard(now);
        busy
    }

    /// A last resort that has no place for a batch now gets its pages later, by repair. But where it stands in for one of the agents that were asked for, it
    /// is waited for.
    fn are_enough(&self, agents: AgentSet) -> bool {
        let due = self.copies.due;
        let stands_in = self.takes_all() && self.copies.agents < self.shared.copies;
        !stands_in || due.is_empty() || due.without(agents) != due
    }

    /// Whether a number of copies was asked for: who has not asked gets as many as there is room for, in all that may be under way, since what one agent
    /// refuses is written anew to all.
    fn takes_all(&self) -> bool {
        self.shared.config.redundancy != Redundancy::Auto
    }

    /// The agents that may be given pages now.
    fn takers(&self, passed_over: AgentSet) -> Vec<AgentView> {
        let mut views = self.views();
        // One that is silent, or has little room, is given nothing while there is another: a page would be there alone.
        if !self.usable.is_empty() {
            views.retain(|view| self.usable.has(view.id));
        }
        let under_way = |agent| self.agents.under_way(agent, Op::Put);
        let least = self.least_room();
        views.retain(|v| under_way(v.id) < PUTS_MAX && v.credits.0 >= least);
        views.retain(|v| !passed_over.has(v.id));
        views
    }

    /// Pages that an agent must take at least to be given any: a whole batch. Full agents have room for a few parts at a time when stripes are closed, and
    /// nobody could close the next ones if those were not dealt.
    fn least_room(&self) -> u64 {
        if self.has_parity() { 1 } else { self.shared.sizes.put_pages as u64 }
    }

    /// Puts a batch to each of some agents; fails with the one whose link does not take it, or with none if no set of them can be noted.
    fn put(&mut self, now: Instant, mut agents: Vec<AgentId>) -> Result<(), Option<AgentId>> {
        let mut batch = Vec::new();
        // Where that many sets are in use, fewer agents must do, until one is free.
        while batch.is_empty() && !agents.is_empty() {
            let set = agents.iter().copied().collect();
            batch = lock(&self.shared.tables).start_write(set, self.shared.sizes.put_pages);
            if batch.is_empty() {
                agents.pop();
            }
        }
        let slots: Vec<u32> = batch.iter().map(|b| b.0).collect();
        if agents.is_empty() {
            return Err(None);
        }
        let mut refused = None;
        for &agent in &agents {
            let pages = batch.iter().map(|&(slot, id, _)| (id, self.shared.frames.read(slot)));
            let put = refused.is_none().then(|| self.agents.put(now, agent, pages));
            match put {
                Some(Ok(put)) => {
                    self.puts.insert(put, Put::Pages(agent, slots.clone()));
                }
                _ => {
                    refused.get_or_insert(agent);
                    self.settle(agent, &slots, |_| WriteOutcome::Unsent);
                }
            }
        }
        refused.map_or(Ok(()), |agent| Err(Some(agent)))
    }

    fn settle(&mut self, agent: AgentId, slots: &[u32], outcome: impl Fn(usize) -> WriteOutcome) {
        torture::at(Point::BeforeWrittenIsNoted);
        let mut tables = lock(&self.shared.tables);
        for (i, &slot) in slots.iter().enumerate().rev() {
            tables.written(slot, agent, outcome(i));
        }
    }

    /// An agent has stored these pages of a put, and no others.
    fn stored(&mut self, put: PutId, pages: u64) {
        let is_stored = |page: usize| pages >> page & 1 == 1;
        let agent = match self.puts.remove(&put) {
            Some(Put::Pages(agent, slots)) => {
                self.settle(agent, &slots, |page| match is_stored(page) {
                    true => WriteOutcome::Stored,
                    false => WriteOutcome::Failed,
                });
                agent
            }
            Some(Put::Parts(agent, parts)) => {
                self.settle_parts(&parts, is_stored);
                agent
            }
            None => return,
        };
        *self.given.entry(agent).or_default() += u64::from(pages.count_ones());
    }

    /// What agents may not have heard of is told again.
    fn return_unheard(&mut self) {
        for (agent, ids) in self.agents.take_unheard() {
            lock(&self.shared.tables).return_discards(agent, ids, DISCARDS_KEPT);
        }
    }

    fn discard(&mut self, now: Instant) {
        self.return_unheard();
        let lane = self.agents.lane();
        let tables = lock(&self.shared.tables);
        let up = lane.agents().filter(|&agent| lane.is_up(agent));
        let waiting: usize = up.map(|agent| tables.discards_of(agent)).sum();
        drop(tables);
        if waiting < DISCARDS_BATCH && now < self.discard_at {
            return;
        }
        self.discard_at = now + DISCARDS_PAUSE;
        if self.agents.unanswered_discards().next().is_none() {
            lock(&self.shared.tables).discards_heard();
        }
        let lane = self.agents.lane();
        let agents: Vec<(AgentId, bool)> = lane.agents().map(|a| (a, lane.is_up(a))).collect();
        for (agent, is_up) in agents {
            let reached = is_up || self.shared.homes.any_reaches(agent);
            let unlinked = self.unlinked_since.entry(agent).or_insert(now);
            *unlinked = if reached { now } else { *unlinked };
            if now.duration_since(*unlinked) > 2 * LEASE {
                lock(&self.shared.tables).forget_discards(agent);
            }
            let may_ask = is_up && self.agents.under_way(agent, Op::Discard) < DISCARDS_MAX;
            if !may_ask && lock(&self.shared.tables).discards_of(agent) < DISCARDS_KEPT {
                continue;
            }
            let ids = lock(&self.shared.tables).take_discards(agent, DISCARDS_BATCH * 8);
            if ids.is_empty() || !may_ask {
                continue;
            }
            if self.agents.discard(now, agent, &ids).is_err() {
                lock(&self.shared.tables).return_discards(agent, ids, DISCARDS_KEPT);
            }
        }
    }

    /// The next event of the agents. Of what was put, and of agents that came up, note has been taken.
    pub fn poll(&mut self, now: Instant) -> Option<ClientEvent> {
        let event = loop {
            let event = self.agents.poll(now)?;
            let Some(event) = self.note_part(now, event) else { continue };
            if let Some(event) = self.repaired(now, event) {
                break event;
            }
        };
        torture::at(Point::BeforeReply);
        match event {
            ClientEvent::Stored { put, pages } => self.stored(put, pages),
            ClientEvent::Members { agent, ref members } => {
                let lane = self.agents.lane();
                lane.roster().learn(lane.name(agent), members);
            }
            ClientEvent::Up { agent, session } => {
                self.shared.agent_up(agent, self.agents.lane().name(agent), session);
            }
            _ => {}
        }
        torture::at(Point::AfterReply);
        Some(event)
    }

    /// Tells the tables which agents may be down: an unchanged page is not left to those.
    pub fn distrust_agents(&mut self, now: Instant) {
        let (agents, shared) = (&self.agents, &self.shared);
        let unsound = shared.unsound_agents();
        let trusted = |&agent: &AgentId| {
            agents.keeps(now, agent) && shared.homes.all_reach(agent) && !unsound.has(agent)
        };
        let untrusted: AgentSet = agents.lane().agents().filter(|agent| !trusted(agent)).collect();
        let (views, last_resorts) = (agents.lane().views(), agents.lane().last_resorts());
        let pages = (self.shared.sizes.put_pages * PUTS_MAX) as u64;
        // One that wants pages taken away is short of memory, whatever room it claims to have.
        let has_room = |view: &AgentView| {
            view.free_frames.0.min(view.credits.0) >= pages && agents.lane().recalled(view.id) == 0
        };
        let is_usable =
            |view: &&AgentView, takes_all| !untrusted.has(view.id) && (takes_all || has_room(view));
        let due = views.iter().filter(|view| view.last_resort && is_usable(view, false));
        let due: AgentSet = due.map(|view| view.id).collect();
        // With room at a last resort, none of the others needs to be waited for.
        let takes_all = self.takes_all() && due.is_empty();
        let others = views.iter().filter(|view| !view.last_resort && is_usable(view, takes_all));
        let others: AgentSet = others.map(|view| view.id).collect();
        // An agent that is given pages is not relieved of any: whatever it asks for, it would be asked for ever.
        let staying = others.without(self.recalling());
        let others = if staying.len() >= self.shared.copies { staying } else { others };
        self.usable = others.union(due);
        // A stripe has a page at least, and all of its parity.
        let shape = self.shared.config.redundancy.shape();
        let least = shape.map_or(u32::from(due.is_empty()), |shape| shape.parity() as u32 + 1);
        let copies = self.shared.copies.min(others.len()).max(least);
        let sites = views.iter().map(|view| (view.id, view.site)).collect();
        // Where there is room, or may be once an answer has come. No page waits for room in another zone.
        let takes = |view: &&AgentView| has_room(view) || agents.under_way(view.id, Op::Put) > 0;
        let takers = views.iter().filter(|view| others.has(view.id)).filter(takes);
        let spread = Spread::of(takers.map(|view| view.site)).of_any(copies);
        let copies = Copies { agents: copies, last_resorts, due, sites, spread };
        for agent in agents.lane().agents() {
            match agents.lane().is_up(agent) && shared.homes.all_reach(agent) {
                true => drop(self.away_since.remove(&agent)),
                false => drop(self.away_since.entry(agent).or_insert(now)),
            }
        }
        if (self.untrusted, self.copies) != (untrusted, copies) {
            (self.untrusted, self.copies) = (untrusted, copies);
            // Of a stripe each page is at one agent. That all of its agents are left is seen to by closing it.
            let copies = if shape.is_some() { Copies::at_agents(1) } else { copies };
            lock(&self.shared.tables).distrust(untrusted, copies);
        }
    }

    /// How long an agent has been away, for some thread at least.
    fn away(&self, now: Instant, agent: AgentId) -> Duration {
        let since = self.away_since.get(&agent);
        since.map_or(Duration::ZERO, |&since| now.saturating_duration_since(since))
    }

    /// Agents whose pages others are to have: they drain, have been away for long, or give wrong pages.
    fn leaving(&self, now: Instant) -> AgentSet {
        let lane = self.agents.lane();
        let leaves =
            |&agent: &AgentId| lane.is_draining(agent) || self.away(now, agent) > GONE_AFTER;
        let leaving: AgentSet = lane.agents().filter(leaves).collect();
        leaving.union(self.shared.unsound_agents())
    }

    /// Agents that want pages taken away, of those to which pages can be asked for.
    fn recalling(&self) -> AgentSet {
        let lane = self.agents.lane();
        lane.agents().filter(|&agent| lane.is_up(agent) && lane.recalled(agent) > 0).collect()
    }

    /// Whether too few agents take pages.
    pub fn agents_are_full(&self) -> bool {
        let least = self.least_room();
        // Of several, one that does not answer is soon done without.
        let asked = self.copies.agents;
        let waits = |agent| asked > 1 && self.agents.under_way(agent, Op::Put) > 0;
        let is_meant = |view: &&AgentView| view.last_resort == (asked == 0);
        let takes = |view: &&AgentView| view.up && (view.credits.0 >= least || waits(view.id));
        let views = self.views();
        (views.iter().filter(is_meant).filter(takes).count() as u32) < asked.max(1)
    }

    /// Whether so few agents answer that no stripe can be dealt to them.
    pub fn too_few_answer(&self) -> bool {
        let usable = self.usable.len();
        self.has_parity() && (1..self.copies.agents).contains(&usable)
    }

    /// The agents as placement is to see them: nothing is put where a fault thread could not fetch it, or where wrong pages came from.
    fn views(&self) -> Vec<AgentView> {
        let mut views = self.agents.lane().views();
        let unsound = self.shared.unsound_agents();
        views.iter_mut().for_each(|v| {
            v.up &= self.shared.homes.all_reach(v.id) && !unsound.has(v.id);
        });
        views
    }

    /// A number that does not repeat soon.
    pub fn next_random(&mut self) -> u64 {
        // xorshift64 (Marsaglia 2003): placement needs no more.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }
}

#[cfg(test)]
mod tests;
