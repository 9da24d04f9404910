//! What the pager knows of the workload's pages, as a state machine without I/O: the page map, the write-back slots, who shares which
//! content, which ranges are registered, which are quarantined.
//!
//! Life of a page: resident -> `Slot` (marked before the MOVE, so that a fault at any moment finds it) -> `Remote` -> fault ->
//! `Kept` (resident, the agent's copy still good) -> evicted again: unchanged pages go straight back to `Remote`.
//!
//! **Proof.** The address of a page in `Slot` (but for those that are leaving) or `Remote` holds a marker, as long as the page is the workload's
//! (see `uffd`). Whoever is about to serve such a page looks for the marker first: without one the program has discarded the page
//! ([`Tables::discarded`]). So what is told of an address space may come late, in another order (`tables/changes.rs`), or not at all.
//!
//! Pages that are being removed are in quarantine (`tables/space.rs`).

mod adoption;
mod birth;
mod changes;
#[cfg(test)]
mod death;
mod detach;
mod discards;
mod eviction;
mod guard;
mod lent;
mod order;
mod recover;
mod removals;
mod repair;
mod roomless;
mod slots;
mod space;
mod stripes;
mod words;

pub use birth::{Ask, Birth};
pub use guard::{TablesGuard, TablesLock};
pub use order::{
    Change, Doubt, Orders, Others, Part, Remap, Seen, contested, drop_echoes, if_unmade,
};
pub use removals::Step;
pub use repair::Short;
pub(crate) use slots::SLOTS_MAX;
pub use stripes::Dealt;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use gms_policy::eviction::{Clock, Mark};
use gms_policy::ids::{AgentId, ContentId, PageAddr, SpaceId};
use gms_policy::redundancy::{AgentSet, Copies};
use gms_policy::stripes::Stripes;

use self::discards::Discards;
use self::recover::BESIDE_WORDS;
use self::roomless::Roomless;
use self::slots::{Phase, Slots};
use self::space::SpaceState;
use crate::page_map::{CHUNKS_MAX, Content, Full, Grave, PAGE, PageMap, State};
use crate::range_set::RangeSet;

/// Sessions remembered of one agent: more restarts than a lane could be behind.
const SESSIONS_MAX: usize = 16;

/// Content ids, or stripes, that are left out, so that no id is used again though the process before may have used some after it wrote this.
const IDS_SKIPPED: u64 = 1 << 16;

/// A page of a space.
pub type Place = (SpaceId, PageAddr);

/// What to do about a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultAction {
    /// Nothing was ever there (or it was discarded): install zeros.
    Zero,
    /// It was resident: it still is (a late message of a thread that is served already), or the program has discarded it.
    Resident,
    /// Install the bytes of this write-back slot, then call [`Tables::second_chance`].
    Buffered(u32),
    /// Fetch from the agent, verify, install, then call [`Tables::fetched`].
    Fetch(Content),
    /// The page is on its way (being evicted or prefetched): whoever finishes that wakes the thread.
    Wait,
}

/// What became of a page that should go out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictOutcome {
    /// It stayed where it was (pinned, shared, or the address space was changing).
    Stayed,
    /// It moved out and holds only zeros.
    Zero,
    /// It moved out; its checksum.
    Moved(u64),
}

/// What came of a page's write to an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The agent has it.
    Stored,
    /// The agent has refused it, or not answered: then it may have it.
    Failed,
    /// The agent has not heard of it.
    Unsent,
}

/// Counters of outcomes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Pages which agents acknowledged.
    pub pages_out: u64,
    /// Unchanged pages dropped at eviction.
    pub clean_drops: u64,
    /// Zero pages dropped at eviction.
    pub zero_drops: u64,
    /// Faults served from the write-back buffer.
    pub second_chances: u64,
}

/// A page whose bytes are in a slot.
#[derive(Clone, Copy, Debug)]
struct Owner {
    place: Place,
    /// Whether its address has a marker. All have when they cease to be leaving.
    marked: bool,
}

/// See the module's documentation.
pub struct Tables {
    map: PageMap,
    spaces: BTreeMap<SpaceId, SpaceState>,
    /// Chunks of which nobody needs to know any more, but their contents are to be released.
    graveyard: Vec<Grave>,
    slots: Slots,
    free: Vec<u32>,
    /// Slots which are leaving: few.
    leaving: Vec<u32>,
    ready: VecDeque<u32>,
    clock: Clock,
    /// With parity: the stripes, and the slots of pages that are being written.
    stripes: Option<Stripes>,
    dealt: BTreeMap<ContentId, u32>,
    /// Contents with more than one entry.
    shared: HashMap<ContentId, u32>,
    /// Threads that have faulted while it is not proved of each space of a dead pager that nothing is being removed there: where last, and how often there.
    faulted: Option<BTreeMap<(SpaceId, i32), (PageAddr, u32)>>,
    /// Faults that wait for somebody else's work.
    waiters: HashSet<Place>,
    /// Faults that wait until room is made.
    roomless: Roomless,
    /// Pages which are being prefetched.
    prefetching: HashSet<Place>,
    /// Pages that a worker fetches because a thread waits for them.
    lent: HashSet<Place>,
    /// Pages that nobody has any more, and whose markers have been taken away: they are about to be poisoned.
    doomed: HashSet<Place>,
    /// Agents whose copies do not count, and which copies there must be at others of a page that is not written anew.
    untrusted: AgentSet,
    copies: Copies,
    /// Those of each agent, the latest last: a lane may tell of an earlier one after another has told of a restart.
    sessions: BTreeMap<AgentId, VecDeque<u64>>,
    /// Agents that have lost what they had, and how often.
    losers: AgentSet,
    /// Contents that agents may forget.
    discards: Discards,
    next_content: u64,
    /// The last space that began.
    newest: SpaceId,
    /// The change of sets that was written down last, and the agents whose sessions have changed since.
    sets_written: u64,
    greeted: AgentSet,
    /// Highest number of pages at agents.
    pub remote_pages_peak: u64,
    /// The page map was full when an entry had to be changed: the workload cannot go on. The entry may say that a slot has the page which has another's
    /// by now.
    pub exhausted: Option<Full>,
    /// Outcomes so far.
    pub counters: Counters,
}

impl Tables {
    /// Empty tables with a write-back buffer of `slots` pages, for a budget of `budget` pages.
    pub fn new(slots: u32, budget: u64) -> std::io::Result<Tables> {
        Ok(Tables {
            map: PageMap::new(CHUNKS_MAX, BESIDE_WORDS)?,
            spaces: BTreeMap::new(),
            graveyard: Vec::new(),
            slots: Slots::new(slots),
            free: (0..slots).rev().collect(),
            leaving: Vec::new(),
            ready: VecDeque::new(),
            clock: Clock::new(budget),
            stripes: None,
            dealt: BTreeMap::new(),
            shared: HashMap::new(),
            faulted: None,
            waiters: HashSet::new(),
            roomless: Roomless::default(),
            prefetching: HashSet::new(),
            lent: HashSet::new(),
            doomed: HashSet::new(),
            untrusted: AgentSet::default(),
            copies: Copies::at_agents(1),
            sessions: BTreeMap::new(),
            losers: AgentSet::EMPTY,
            discards: Discards::default(),
            next_content: 1,
            newest: SpaceId(0),
            sets_written: 0,
            greeted: AgentSet::EMPTY,
            remote_pages_peak: 0,
            exhausted: None,
            counters: Counters::default(),
        })
    }

    // ---- spaces and ranges

    /// A space begins.
    pub fn add_space(&mut self, space: SpaceId) {
        self.spaces.entry(space).or_default();
        self.note_newest(space);
    }

    /// A space has ended.
    pub fn drop_space(&mut self, space: SpaceId) {
        self.forget(space, 0..u64::MAX);
        self.spaces.remove(&space);
        self.waiters.retain(|w| w.0 != space);
        self.roomless.forget(space);
        self.prefetching.retain(|w| w.0 != space);
        self.lent.retain(|w| w.0 != space);
    }

    /// A range is registered, all of it is one mapping. Of what is known there the pages with a marker (`marked`) belong to it, the others
    /// to an older mapping.
    pub fn register(&mut self, space: SpaceId, range: Range<u64>, marked: &RangeSet) {
        self.forget_unmarked(space, range.clone(), marked);
        if let Some(state) = self.spaces.get_mut(&space) {
            state.register(range);
        }
    }

    /// The range is not registered, or it is not known whether it is.
    pub fn unregister(&mut self, space: SpaceId, range: Range<u64>) {
        if let Some(state) = self.spaces.get_mut(&space) {
            state.unregister(range);
        }
    }

    /// Whether anything is known of pages in the range.
    pub fn knows(&self, space: SpaceId, range: Range<u64>) -> bool {
        self.map.knows(space, range)
    }

    /// The registered ranges of a space.
    pub fn registered(&self, space: SpaceId) -> Arc<RangeSet> {
        self.spaces.get(&space).map(|s| s.registered.clone()).unwrap_or_default()
    }

    /// The parts of a range that are not registered yet.
    pub fn unregistered_parts(&self, space: SpaceId, range: Range<u64>) -> Vec<Range<u64>> {
        self.spaces.get(&space).map(|s| s.registered.gaps(range)).unwrap_or_default()
    }

    /// The registered range around an address.
    pub fn registered_around(&self, space: SpaceId, page: PageAddr) -> Option<Range<u64>> {
        self.spaces.get(&space)?.registered.containing(page.get())
    }

    // ---- faults

    /// A thread waits for this page.
    pub fn fault(&mut self, place: Place) -> FaultAction {
        let waits = self.exhausted.is_some()
            || self.prefetching.contains(&place)
            || self.doomed.contains(&place);
        let action = match self.map.get(place.0, place.1) {
            _ if waits => FaultAction::Wait,
            State::Empty => FaultAction::Zero,
            State::Kept(_) => FaultAction::Resident,
            state if self.is_under_way(place, state) => FaultAction::Wait,
            State::Remote(content) => FaultAction::Fetch(content),
            State::Slot(slot) => FaultAction::Buffered(slot),
        };
        if action == FaultAction::Wait {
            self.waiters.insert(place);
        }
        action
    }

    /// Whether somebody else is at a page that is away, or nobody may be yet.
    fn is_under_way(&self, place: Place, state: State) -> bool {
        match state {
            _ if self.is_unproved(place.0) => true,
            State::Remote(_) => self.is_lent(place),
            State::Slot(slot) => self.slots[slot as usize].phase == Phase::Leaving,
            State::Kept(_) | State::Empty => false,
        }
    }

    /// The address of a page of which something was known has neither page nor marker, and all events have been read: the program has discarded
    /// it. False if nothing was known after all, or the page is leaving.
    pub fn discarded(&mut self, place: Place) -> bool {
        let known = self.map.get(place.0, place.1) != State::Empty;
        if !known || self.is_leaving(place) || self.doomed.contains(&place) {
            return false;
        }
        self.forget(place.0, place.1.get()..place.1.get() + PAGE);
        true
    }

    /// Whether the page is being evicted: its marker need not have been left.
    pub fn is_leaving(&self, place: Place) -> bool {
        matches!(self.map.get(place.0, place.1), State::Slot(slot) if self.slots[slot as usize].phase == Phase::Leaving)
    }

    /// Whether nothing is known of the page.
    pub fn is_empty(&self, place: Place) -> bool {
        self.map.get(place.0, place.1) == State::Empty
    }

    /// Of `wanted` the pages around the page `one`, the first or last of it, that have no entry and lie in the same registered range.
    pub fn empty_run(&self, space: SpaceId, wanted: Range<u64>, one: &Range<u64>) -> Range<u64> {
        let Some(around) = self.registered_around(space, PageAddr::containing(one.start)) else {
            return one.clone();
        };
        let (start, end) = (wanted.start.max(around.start), wanted.end.min(around.end));
        let mut run = start..end;
        self.map.visit(space, start..end, |known, _| {
            let known = known.get();
            match known < one.start {
                true => run.start = known + PAGE,
                false => run.end = run.end.min(known),
            }
            known < one.start
        });
        run.start..run.end.max(one.end)
    }

    /// Zeros were installed at these addresses: removals there are over, or take zeros.
    pub fn zeroed(&mut self, space: SpaceId, range: Range<u64>) {
        if let Some(state) = self.spaces.get_mut(&space) {
            state.release(range);
        }
    }

    /// The page was installed from its write-back slot: it is the workload's again, as if it had never left.
    pub fn second_chance(&mut self, place: Place) {
        self.counters.second_chances += 1;
        self.disown(place);
    }

    /// The page was installed from `content`, because a thread waits for it or ahead of its use. False if the entry has changed meanwhile.
    pub fn fetched(&mut self, place: Place, content: Content, waited: bool) -> bool {
        let heat = match self.map.get_marked(place.0, place.1) {
            (State::Remote(known), mark) if known == content && waited => self.clock.refault(mark),
            (State::Remote(known), _) if known == content => Mark::COLD,
            // By somebody else, meanwhile.
            (State::Kept(known), mark) if known == content => mark,
            _ => return false,
        };
        // Without room for the change the entry stays `Remote`; if the page is discarded some day, its missing marker tells.
        self.put_marked(place, State::Kept(content), heat).is_ok()
    }

    /// A removal of the page has been told and may not be done yet. If the page is away, it was before.
    pub fn is_being_removed(&self, place: Place) -> bool {
        self.spaces.get(&place.0).is_some_and(|s| s.is_quarantined(place.1))
    }

    /// Whether the page still is where the fetch went to look for it.
    pub fn is_remote(&self, place: Place, content: Content) -> bool {
        self.map.get(place.0, place.1) == State::Remote(content) && !self.doomed.contains(&place)
    }

    /// A fault waits until room is made.
    pub fn wait_for_room(&mut self, place: Place) {
        self.roomless.push(place);
    }

    /// Number of faults which wait for room.
    pub fn roomless(&self) -> u64 {
        self.roomless.len() as u64
    }

    /// Up to `max` of the faults that wait for room, the oldest first: woken, they fault again.
    pub fn take_roomless(&mut self, max: usize) -> Vec<Place> {
        self.roomless.take(max)
    }

    // ---- prefetch

    /// The pages which of these are only at an agent and not yet on their way, `max` at most; they are marked as being fetched.
    pub fn begin_prefetch(
        &mut self,
        space: SpaceId,
        mut pages: impl Iterator<Item = PageAddr>,
        max: usize,
    ) -> Vec<(PageAddr, Content)> {
        let mut begun = Vec::new();
        while begun.len() < max
            && let Some(page) = pages.next()
        {
            if let State::Remote(content) = self.map.get(space, page)
                && !content.holders.is_empty()
                && !self.doomed.contains(&(space, page))
                && !self.is_lent((space, page))
                && self.prefetching.insert((space, page))
            {
                begun.push((page, content));
            }
        }
        begun
    }

    /// Pages which are being prefetched.
    pub fn prefetching(&self) -> usize {
        self.prefetching.len()
    }

    /// Whether a fault waits for the prefetch of a page.
    pub fn is_prefetch_awaited(&self, place: Place) -> bool {
        self.prefetching.contains(&place) && self.waiters.contains(&place)
    }

    /// The prefetch of a page is over; returns whether a fault waits for it.
    pub fn end_prefetch(&mut self, place: Place) -> bool {
        self.prefetching.remove(&place);
        self.waiters.remove(&place)
    }

    /// The first address of the range of which something is known, or its end.
    pub fn next_known(&self, space: SpaceId, range: Range<u64>) -> u64 {
        let mut next = range.end;
        self.map.visit(space, range, |page, _| {
            next = page.get();
            false
        });
        next
    }

    /// The first page of the range that has a marker, if it is the workload's.
    pub fn first_evicted(&self, space: SpaceId, range: Range<u64>) -> Option<PageAddr> {
        let mut found = None;
        self.map.visit(space, range, |page, state| {
            let evicted = match state {
                State::Remote(_) => true,
                State::Slot(_) => !self.is_leaving((space, page)),
                State::Kept(_) | State::Empty => false,
            };
            found = evicted.then_some(page);
            !evicted
        });
        found
    }

    // ---- agents

    /// Pages of the workload at one agent, or parts of stripes, dead pages among them.
    pub fn held_by(&self, agent: AgentId) -> u64 {
        match &self.stripes {
            Some(stripes) => stripes.held_by(agent),
            None => self.map.placements.held_by(agent),
        }
    }

    /// Pages at agents.
    pub fn remote_pages(&self) -> u64 {
        self.map.placements.pages()
    }

    /// An unchanged page is left to the agents that have it only if `copies` of them are not among these, which are away, leaving or silent.
    pub fn distrust(&mut self, agents: AgentSet, copies: Copies) {
        (self.untrusted, self.copies) = (agents, copies);
    }

    /// An agent greets a lane. True if it is news that it has lost what it was given: it had other sessions with the workload, and this was not one.
    pub fn begin_session(&mut self, agent: AgentId, session: u64) -> bool {
        let sessions = self.sessions.entry(agent).or_default();
        if sessions.contains(&session) {
            return false;
        }
        if sessions.len() == SESSIONS_MAX {
            sessions.pop_front();
        }
        sessions.push_back(session);
        self.greeted = self.greeted.union(AgentSet::of(agent));
        sessions.len() > 1
    }

    /// Whether any page is only at this agent. (With parity none is; what is lost with more agents than that makes good is found out when it is wanted.)
    pub fn depends_on(&self, agent: AgentId) -> bool {
        self.depends_on_one_of(agent, AgentSet::EMPTY)
    }

    /// Whether any page is at this agent and, if at others, only at such of those.
    fn depends_on_one_of(&self, agent: AgentId, others: AgentSet) -> bool {
        let all = others.union(AgentSet::of(agent));
        let rests = |holders: AgentSet| holders.has(agent) && holders.without(all).is_empty();
        // Those may all be of pages that are resident.
        self.stripes.is_none()
            && self.map.placements.rests_on(all)
            && self.spaces.keys().any(|&space| {
                let mut found = false;
                self.map.visit(space, 0..u64::MAX, |_, state| {
                    found = matches!(state, State::Remote(content) if rests(content.holders));
                    !found
                });
                found
            })
    }

    /// Agents that have lost everything at least once.
    pub fn losers(&self) -> AgentSet {
        self.losers
    }

    /// The agent has lost everything: its copies are no longer good. Whether it had any, or some were being written.
    pub fn lose(&mut self, agent: AgentId) -> bool {
        self.losers = self.losers.union(AgentSet::of(agent));
        self.leave(agent)
    }

    /// The copies of an agent that is about to end, on which nobody depends, are no longer counted on. Whether there were any, or were being written.
    pub fn leave(&mut self, agent: AgentId) -> bool {
        let had_pages = self.map.placements.lose(agent);
        self.stripes.iter_mut().for_each(|stripes| stripes.lose(agent));
        self.discards.forget(agent);
        had_pages
    }

    // ---- references

    /// Nothing is known of the range any more. Whole chunks only wait for [`Tables::bury`].
    fn forget(&mut self, space: SpaceId, range: Range<u64>) {
        self.reprieve(space, &range);
        let graves = self.map.take(space, range.clone());
        self.graveyard.extend(graves);
        for (page, state) in self.map.known(space, range) {
            self.forget_page((space, page), state);
        }
    }

    fn forget_page(&mut self, place: Place, state: State) {
        self.doomed.remove(&place);
        match state {
            State::Remote(content) | State::Kept(content) => {
                // Without room for the change the entry stays, and so does its reference.
                if self.put(place, State::Empty).is_ok() {
                    self.release(content);
                }
            }
            State::Slot(_) => self.disown(place),
            State::Empty => {}
        }
    }

    /// Nothing is known of evicted pages of the range any more but of those that have a marker, or are leaving. Returns whether there are
    /// any. (A page that is thought to be a clean copy and is not harms nobody: it is compared when it is evicted, and looked for when it faults.)
    pub fn forget_unmarked(
        &mut self,
        space: SpaceId,
        range: Range<u64>,
        marked: &RangeSet,
    ) -> bool {
        let mut left = false;
        for (page, state) in self.map.known(space, range) {
            let place = (space, page);
            match state {
                State::Kept(_) | State::Empty => {}
                _ if marked.contains(page.get()) || self.is_leaving(place) => left = true,
                // It has no marker because it is to be poisoned.
                _ if self.doomed.contains(&place) => left = true,
                _ => self.forget_page(place, state),
            }
        }
        left
    }

    /// Releases the contents of up to `chunks` chunks of which nobody needs to know any more; true if some are left. To be called often: the
    /// end of a large process or mapping must not keep the tables from others.
    pub fn bury(&mut self, chunks: usize) -> bool {
        for _ in 0..chunks {
            let Some(grave) = self.graveyard.pop() else { return false };
            let mut released = Vec::new();
            let chunks = self.map.bury(grave, |state| match state {
                State::Remote(content) | State::Kept(content) => released.push(content),
                State::Slot(_) | State::Empty => {}
            });
            self.graveyard.extend(chunks);
            released.into_iter().for_each(|content| self.release(content));
        }
        !self.graveyard.is_empty()
    }

    /// A page in the write-back buffer is no longer the slot's.
    fn disown(&mut self, place: Place) {
        let State::Slot(index) = self.map.get(place.0, place.1) else { return };
        if let Err(full) = self.put(place, State::Empty) {
            self.exhausted = Some(full);
        }
        let slot = &mut self.slots[index as usize];
        slot.owners.retain(|owner| owner.place != place);
        // Leaving and sent slots are freed when that ends.
        if slot.owners.is_empty() && slot.phase == Phase::Ready {
            self.ready.retain(|&i| i != index);
            self.settle(index, State::Empty, None);
        }
    }

    fn put(&mut self, place: Place, state: State) -> Result<(), Full> {
        self.put_marked(place, state, Mark::COLD)
    }

    /// Changes an entry. If there is no room for that, nothing has changed.
    fn put_marked(&mut self, place: Place, state: State, mark: Mark) -> Result<(), Full> {
        if let Some(chunk) = self.map.put(place.0, place.1, state, mark)? {
            let contents: Vec<Content> = self.map.states(chunk).filter_map(content_of).collect();
            contents.into_iter().for_each(|content| self.share(content.id, 1));
        }
        Ok(())
    }

    fn share(&mut self, id: ContentId, more: u32) {
        if more > 0 {
            *self.shared.entry(id).or_insert(1) += more;
        }
    }

    fn release(&mut self, content: Content) {
        match self.shared.get_mut(&content.id) {
            Some(references) if *references > 2 => *references -= 1,
            Some(_) => drop(self.shared.remove(&content.id)),
            None if self.stripes.is_some() => self.died(content.id),
            None => {
                self.map.placements.release(content.placement);
                let holders = self.map.placements.agents(content.placement);
                holders.agents().for_each(|agent| self.may_forget(agent, content.id));
            }
        }
    }
}

/// The content that an entry refers to.
fn content_of(state: State) -> Option<Content> {
    match state {
        State::Remote(content) | State::Kept(content) => Some(content),
        State::Slot(_) | State::Empty => None,
    }
}
