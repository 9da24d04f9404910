//! Copies are made anew: of pages of which there are too few, because an agent was lost, or is about to leave, and of pages which an agent that stays wants
//! taken away, because its host needs the memory. Of those as many are under way as it wants, and no more but for a get or two: it wants others as they go.
//!
//! `repair` searches the tables -> gets the pages of an agent that has them -> `arrived` puts them into the write-back buffer, as if they had just been
//! evicted. It is slow on purpose: evictions and faults go first.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

use gms_policy::ids::{AgentId, ContentId, SpaceId};
use gms_policy::pace::Pace;
use gms_policy::redundancy::{AgentSet, Copies, Shortage};
use gms_policy::spread::Spread;
use gms_policy::stripes::{AgentsNow, Read};
use gms_transport::Transport;
use gms_transport::client::{self, ClientEvent, Failure, GetId, Urgency};
use gms_transport::message::{Op, PAGES_MAX, Status};

use super::{PUTS_MAX, WriteBack};
use crate::page_map::{Content, PAGE};
use crate::shared::NEW_DISK;
use crate::speech::note;
use crate::sync::lock;
use crate::tables::Place;

/// Pages fetched a second: 100 MB.
const PAGES_PER_S: u32 = 25_600;
/// The same while an agent's host waits for the memory, and of stripes, most of which go because dead pages take it: 400 MB.
const RECALLED_PER_S: u32 = 102_400;
/// Gets under way.
const GETS_MAX: usize = 2;
/// Entries of the page map looked at while the tables are locked: about 20 us.
const ENTRIES_MAX: usize = 2048;
/// Contents that are remembered because agents were blamed for them.
const BLAMED_MAX: usize = 1024;
/// Stripes looked at before each search of everything.
const STRIPES_MAX: usize = 1024;
/// How often it is looked whether there are too few copies of anything.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Pause while the write-back buffer is more than half full.
const PAUSE: Duration = Duration::from_millis(10);
/// Pause between two searches of everything.
const PASS_PAUSE: Duration = Duration::from_secs(1);
/// A shortage that is over sooner is not told.
const TOLD_AFTER: Duration = Duration::from_secs(1);
/// The first page of all.
const START: (SpaceId, u64) = (SpaceId(0), 0);

/// Pages asked of an agent.
struct Fetch {
    agent: AgentId,
    pages: Vec<(Place, Content)>,
}

/// See the module's documentation.
pub(super) struct Repair {
    /// Where the search goes on.
    from: (SpaceId, u64),
    /// Pages found and not asked for yet.
    found: VecDeque<(Place, Content)>,
    pass_began: Instant,
    /// Whether this search is for pages that are only at agents which leave: they go first.
    only_there: bool,
    /// Those agents.
    leaving: AgentSet,
    /// When it is looked next whether any of them may go.
    next_leave: Instant,
    gets: BTreeMap<GetId, Fetch>,
    /// What agents have been blamed for.
    blamed: BTreeSet<(AgentId, ContentId)>,
    next: Instant,
    /// Pages of which there are too few copies, or that are to be taken away.
    left: u64,
    /// Whether there are some of the latter.
    recalled: bool,
    /// Too few copies.
    few: Lack,
    /// Copies that are not as far apart as they could be.
    near: Lack,
    /// Pages that nobody can make.
    lost: Lack,
}

/// Something that copies lack, which is told once it has lasted, and when it is over.
#[derive(Default)]
pub(super) struct Lack {
    since: Option<Instant>,
    told: bool,
    pace: Pace,
}

impl Lack {
    /// Whether it is to be told now that it is so, or that it is over.
    pub(super) fn note(&mut self, now: Instant, is_so: bool) -> Option<bool> {
        self.since = is_so.then(|| self.since.unwrap_or(now));
        let has_lasted = self.since.is_some_and(|since| now.duration_since(since) > TOLD_AFTER);
        // Its end is told whenever its beginning was.
        let is_news = self.told != is_so && (!is_so || has_lasted && self.pace.allows(now));
        self.told = if is_news { is_so } else { self.told };
        is_news.then_some(is_so)
    }
}

impl Repair {
    pub(super) fn new(now: Instant) -> Repair {
        Repair {
            from: START,
            found: VecDeque::new(),
            pass_began: now,
            only_there: false,
            leaving: AgentSet::EMPTY,
            next_leave: now,
            gets: BTreeMap::new(),
            blamed: BTreeSet::new(),
            next: now,
            left: 0,
            recalled: false,
            few: Lack::default(),
            near: Lack::default(),
            lost: Lack::default(),
        }
    }

    /// Pages of which there are too few copies, as of the last look.
    pub(super) fn left(&self) -> u64 {
        self.left
    }

    /// When there is something to be done next.
    pub(super) fn due(&self) -> Option<Instant> {
        // What is under way comes by itself.
        (self.left > 0 && self.gets.len() < GETS_MAX).then_some(self.next)
    }

    /// Whether a search of everything is about to begin.
    fn begins_pass(&self) -> bool {
        self.from == START && self.found.is_empty()
    }

    /// No more copies are made.
    pub(super) fn stop(&mut self) {
        self.left = 0;
        self.found.clear();
    }

    /// Pages that one agent has, of those that were found.
    fn take(&mut self, mut has: impl FnMut(&Content) -> bool) -> Vec<(Place, Content)> {
        let mut taken = Vec::new();
        self.found.retain(|page| {
            let take = taken.len() < PAGES_MAX && has(&page.1);
            if take {
                taken.push(*page);
            }
            !take
        });
        taken
    }
}

impl<T: Transport> WriteBack<T> {
    /// A step further, if one is due. True if anything was done.
    pub(super) fn repair(&mut self, now: Instant) -> bool {
        if now < self.repair.next {
            return false;
        }
        let shortage = self.shortage(now);
        if self.repair.begins_pass() {
            let able = self.copies.agents as usize;
            let agents = AgentsNow { askable: shortage.sources, leaving: shortage.leaving, able };
            lock(&self.shared.tables).close_stripes(agents, STRIPES_MAX);
            self.repair.pass_began = now;
        }
        self.note_shortage(now, &shortage);
        self.note_spread(now);
        self.note_lost(now);
        if now >= self.repair.next_leave {
            self.repair.next_leave = now + LOOK_EVERY;
            self.take_leave(now, &shortage);
        }
        if self.repair.left == 0 {
            self.repair.next = now + LOOK_EVERY;
            self.repair.found.clear();
            // Stripes are chosen where a pass begins.
            self.repair.from = START;
            return false;
        }
        if !self.has_room() || self.would_be_in_vain(&shortage) {
            self.repair.next = now + PAUSE;
            return false;
        }
        if self.repair.found.is_empty() && self.repair.gets.len() < GETS_MAX {
            self.search(now, &shortage);
        }
        let mut fetched = self.make_short(now);
        while self.repair.gets.len() < GETS_MAX && self.fetch_short(now) {
            fetched = true;
        }
        fetched
    }

    /// Whether there is room for pages that are to be written anew. Where agents are full it is closing that makes some.
    fn has_room(&self) -> bool {
        let tables = lock(&self.shared.tables);
        match self.agents_are_full() {
            true => self.has_parity() && tables.room_to_renew() > 0,
            false => tables.free_slots() >= self.shared.sizes.slots as usize / 2,
        }
    }

    /// Whether only last resorts lack pages, none of which takes any now.
    fn would_be_in_vain(&self, shortage: &Shortage) -> bool {
        let takes = |&agent: &AgentId| self.agents.under_way(agent, Op::Put) < PUTS_MAX / 2;
        let copies = shortage.copies;
        let due: AgentSet = copies.due.agents().filter(takes).collect();
        let now = Shortage { copies: Copies { due, ..copies }, ..*shortage };
        due != copies.due && lock(&self.shared.tables).short_of(&now) == 0
    }

    /// Agents that drain, and of whose pages there are enough copies elsewhere, need not wait any longer: not for others' pages, nor until copies are farther apart.
    fn take_leave(&mut self, now: Instant, shortage: &Shortage) {
        let copies = shortage.copies;
        // Where it stands in for agents the disk is to have them first.
        let due = if copies.agents < self.shared.copies { copies.due } else { AgentSet::EMPTY };
        let copies = Copies { due, spread: Spread::default(), ..copies };
        let few = Shortage { copies, recalling: AgentSet::EMPTY, ..*shortage };
        let few = (self.repair.left > 0).then_some(&few);
        let lane = self.agents.lane();
        let up = lane.agents().filter(|&agent| lane.is_up(agent));
        let leaving = up.filter_map(|agent| Some((agent, lane.draining_since(agent)?)));
        for (agent, since) in leaving.collect::<Vec<_>>() {
            let under_way = |agent, op| self.agents.under_way(agent, op);
            // What is being put may be stored yet; and who has not heard the goodbye is told again.
            if under_way(agent, Op::Put) + under_way(agent, Op::Goodbye) > 0 {
                continue;
            }
            // One that has died in the meantime, whose link has not ended yet, may have been asked for its state together with this one.
            let unheard = self.agents.lane().unheard(since);
            let mut tables = lock(&self.shared.tables);
            if tables.may_leave(agent, self.untrusted.union(unheard), few) {
                let had_pages = tables.leave(agent);
                drop(tables);
                if had_pages {
                    self.shared.note_loss(agent, self.agents.lane().name(agent));
                }
                self.agents.goodbye_to(now, agent);
            }
        }
    }

    fn search(&mut self, now: Instant, shortage: &Shortage) {
        let is_striped = self.has_parity();
        let repair = &mut self.repair;
        if repair.leaving != shortage.leaving {
            repair.leaving = shortage.leaving;
            (repair.from, repair.only_there) = (START, !is_striped);
        }
        let alone = shortage.of_all();
        let meant = if repair.only_there { &alone } else { shortage };
        let short =
            lock(&self.shared.tables).find_short(repair.from, meant, (ENTRIES_MAX, PAGES_MAX));
        // Those that are on their way are found again until they are here.
        let under_way: BTreeSet<Place> =
            repair.gets.values().flat_map(|get| &get.pages).map(|&(place, _)| place).collect();
        repair
            .found
            .extend(short.pages.into_iter().filter(|(place, _)| !under_way.contains(place)));
        repair.from = short.next.unwrap_or(START);
        if short.next.is_none() && !std::mem::take(&mut repair.only_there) {
            // Dead pages of stripes take memory as fast as others are written: then half of the time is for searches, if need be.
            let took = now.saturating_duration_since(repair.pass_began);
            let pause = if is_striped { took.clamp(PAUSE, PASS_PAUSE) } else { PASS_PAUSE };
            repair.next = now + pause;
        }
    }

    /// Has those pages made that were found and whose agents do not give them; false if there are none.
    fn make_short(&mut self, now: Instant) -> bool {
        let (Some(read), unsound) =
            (self.reader(now, Duration::ZERO), self.shared.unsound_agents())
        else {
            return false;
        };
        let tables = lock(&self.shared.tables);
        let found = std::mem::take(&mut self.repair.found);
        let mut others = Vec::new();
        for page in found {
            match read(&tables, page.1) {
                Read::At(part) if !unsound.has(part.agent) => self.repair.found.push_back(page),
                Read::At(_) | Read::Decode(..) => others.push(page),
                // Somebody may be there the next time.
                Read::Later | Read::Lost | Read::Unknown => {}
            }
        }
        drop(tables);
        let pause = Duration::from_secs(1) * self.shared.copies / PAGES_PER_S;
        let mut made = false;
        for (place, content) in others {
            if self.make(now, place, content, unsound) {
                self.repair.next = self.repair.next.max(now) + pause;
                made = true;
            }
        }
        made
    }

    /// Asks an agent for pages that were found; false if there are none.
    fn fetch_short(&mut self, now: Instant) -> bool {
        while let Some(&(_, content)) = self.repair.found.front() {
            let random = self.next_random() as usize;
            // From the choice to the list of its pages no agent is to lose any.
            let tables = lock(&self.shared.tables);
            let holders = tables.holders(content);
            let lane = self.agents.lane();
            let up: AgentSet = holders.agents().filter(|&agent| lane.is_up(agent)).collect();
            // Rather not of those that give wrong pages, nor of a last resort.
            let but = |set: AgentSet, those| match set.without(those) {
                AgentSet::EMPTY => set,
                others => others,
            };
            let up = but(but(up, self.shared.unsound_agents()), lane.last_resorts());
            let sources: Vec<AgentId> = up.agents().collect();
            let Some(&agent) = sources.get(random % sources.len().max(1)) else {
                // Somebody may be there the next time.
                self.repair.found.pop_front();
                continue;
            };
            let pages = self.repair.take(|content| tables.holders(*content).has(agent));
            drop(tables);
            let wanted = pages
                .iter()
                .map(|(_, content)| client::Wanted { id: content.id, check: Some(content.hash) })
                .collect();
            let is_urgent = self.repair.recalled || self.has_parity();
            let pace = if is_urgent { RECALLED_PER_S } else { PAGES_PER_S };
            let pause = Duration::from_secs(1) * pages.len() as u32 / pace;
            self.repair.next = self.repair.next.max(now + pause);
            let get = self.agents.get(now, agent, wanted, Urgency::Bulk);
            self.repair.gets.insert(get, Fetch { agent, pages });
            return true;
        }
        false
    }

    /// An event of a get for repairs; given back if it is of another.
    pub(super) fn repaired(&mut self, now: Instant, event: ClientEvent) -> Option<ClientEvent> {
        let get = event.get().filter(|get| self.repair.gets.contains_key(get));
        let Some(get) = get else { return Some(event) };
        match event {
            ClientEvent::Arrived { pages, bytes, .. } => self.refill(get, pages, &bytes),
            // Pages that do not come are found again by the next search.
            ClientEvent::Ended { .. } => drop(self.repair.gets.remove(&get)),
            ClientEvent::Wrong { page, .. } => {
                let (_, content) = self.repair.gets[&get].pages[page];
                self.blame(get, content, "gives back a wrong page");
            }
            ClientEvent::Failed { failure: Failure::NotHeld(Status::NotFound), pages, .. } => {
                let asked = &self.repair.gets[&get];
                let mut missed =
                    asked.pages.iter().enumerate().filter(|(n, _)| pages >> n & 1 == 1);
                let held = |(_, page): &(usize, &(Place, Content))| {
                    let tables = lock(&self.shared.tables);
                    tables.is_remote(page.0, page.1) && tables.holders(page.1).has(asked.agent)
                };
                if let Some((_, &(_, content))) = missed.find(held) {
                    self.blame(get, content, "has lost a page");
                }
                self.make_missed(now, get, pages);
            }
            ClientEvent::Failed { pages, .. } => self.make_missed(now, get, pages),
            _ => {}
        }
        None
    }

    /// Pages that do not come by a get are made of other parts, as many as can be now: else an agent that gives none would be asked for them again and again.
    fn make_missed(&mut self, now: Instant, get: GetId, pages: u64) {
        let Fetch { agent, pages: asked } = &self.repair.gets[&get];
        let failed = AgentSet::of(*agent);
        let missed = asked.iter().enumerate().filter(|(n, _)| pages >> n & 1 == 1);
        let missed: Vec<(Place, Content)> = missed.map(|(_, &page)| page).collect();
        let able = self.has_parity();
        for (place, content) in missed.into_iter().take_while(|_| able) {
            self.make(now, place, content, failed);
        }
    }

    /// The agent of a get does not give what it has said to have. Once for each content: it is asked for that again and again, and nobody need be waiting.
    fn blame(&mut self, get: GetId, content: Content, what: &str) {
        let agent = self.repair.gets[&get].agent;
        if self.repair.blamed.len() == BLAMED_MAX {
            self.repair.blamed.clear();
        }
        if self.repair.blamed.insert((agent, content.id)) {
            self.shared.blame(agent, self.agents.lane().name(agent), what, false);
        }
    }

    fn refill(&mut self, get: GetId, pages: Range<usize>, bytes: &[u8]) {
        let came = &self.repair.gets[&get].pages[pages];
        for (&(place, content), bytes) in came.iter().zip(bytes.chunks_exact(PAGE as usize)) {
            // With the tables locked, so that nobody reads the slot before its bytes are there.
            let mut tables = lock(&self.shared.tables);
            if tables.room_to_renew() > 0
                && let Some(slot) = tables.rewrite(place, content)
            {
                self.shared.frames.fill(slot, bytes);
            }
        }
    }

    fn note_shortage(&mut self, now: Instant, shortage: &Shortage) {
        // Of what was asked for, whoever could take it now.
        let (lacking, has_parity) = (self.short(now), self.has_parity());
        let repair = &mut self.repair;
        let short = Shortage { recalling: AgentSet::EMPTY, ..*shortage };
        let few = Copies { spread: Spread::default(), ..short.copies };
        let few = Shortage { copies: few, ..short };
        // Where there is no agent to take a copy there is nothing to be done.
        let [all, short, few] = match self.usable.is_empty() {
            true => [0; 3],
            false => {
                let tables = lock(&self.shared.tables);
                [shortage, &short, &few].map(|shortage| tables.short_of(shortage))
            }
        };
        let tables = lock(&self.shared.tables);
        let (closing, lost) = (tables.closing_stripes(), tables.lost_pages());
        drop(tables);
        (repair.left, repair.recalled) = (all.max(closing), all > short);
        let news = repair.few.note(now, lacking > 0);
        if self.shared.config.quiet {
            return;
        }
        let copies = self.shared.copies + self.agents.lane().last_resorts().len();
        let [few_of_it, all_of_it] = match (has_parity, copies) {
            (true, _) => ["less than their parity".into(), "its parity".into()],
            (_, 1) => ["fewer than 1 copy".into(), "1 copy".into()],
            _ => [format!("fewer than {copies} copies"), format!("{copies} copies")],
        };
        let made = if has_parity { "rebuilt" } else { "copied" };
        match (news, few) {
            (Some(true), 0) if self.shared.ended_agent().is_some() => note(format_args!(
                "pages have fewer than {copies}, because the disk is lost: {NEW_DISK}"
            )),
            (Some(true), 0) => note(format_args!(
                "pages have {few_of_it} at agents that stay: they are {made} once an agent takes them"
            )),
            (Some(true), _) => note(format_args!(
                "{few} pages have {few_of_it} at agents that stay: they are {made} in the background"
            )),
            (Some(false), _) => {
                let but = if lost > 0 { " that is not lost" } else { "" };
                note(format_args!("every page{but} has {all_of_it} at agents that stay again"));
            }
            (None, _) => {}
        }
    }

    /// Tells of pages that are lost, though the workload runs on until it needs one.
    fn note_lost(&mut self, now: Instant) {
        let lost = lock(&self.shared.tables).lost_pages();
        let is_news = self.repair.lost.note(now, lost > 0) == Some(true);
        if is_news && !self.shared.config.quiet {
            note(format_args!(
                "{lost} pages or more are lost: more agents of their stripes have lost their parts than there is parity; the workload ends if it needs one"
            ));
        }
    }

    /// Tells of copies that are nearer to each other than those of other pages could be, with all the agents of the session.
    fn note_spread(&mut self, now: Instant) {
        let lane = self.agents.lane();
        let sites = lane.views().into_iter().filter(|view| !view.last_resort);
        let spread = Spread::of(sites.map(|view| view.site)).of_any(self.shared.copies);
        let [near, few] = [spread, Spread::default()].map(|spread| self.lacking(now, spread));
        let tables = lock(&self.shared.tables);
        let pages = tables.short_of(&near) - tables.short_of(&few);
        drop(tables);
        match self.repair.near.note(now, pages > 0).filter(|_| !self.shared.config.quiet) {
            Some(true) => note(format_args!(
                "{pages} pages have copies in one zone, or on one host, that could be farther apart: they are moved once agents elsewhere take them"
            )),
            Some(false) => {
                note(format_args!(
                    "the copies of every page are as far apart as they can be again"
                ));
            }
            None => {}
        }
    }

    /// What too few copies are, by now.
    fn shortage(&self, now: Instant) -> Shortage {
        let lane = self.agents.lane();
        let sources: AgentSet = lane.agents().filter(|&agent| lane.is_up(agent)).collect();
        let (leaving, recalling) = (self.leaving(now), self.recalling().without(self.usable));
        let recalling = recalling.agents().filter(|&agent| self.wants_more(agent)).collect();
        Shortage { copies: self.copies, leaving, recalling, sources }
    }

    /// Whether fewer pages are on their way from an agent than it wants taken away. They are until it has said that it has forgotten them.
    fn wants_more(&self, agent: AgentId) -> bool {
        let asked = self.repair.gets.values().filter(|get| get.agent == agent);
        let asked: usize = asked.map(|get| get.pages.len()).sum();
        let told = lock(&self.shared.tables).discards_of(agent);
        let under_way = asked + told + self.agents.discards_under_way(agent);
        under_way < self.agents.lane().recalled(agent) as usize
    }
}

#[cfg(test)]
mod tests;
