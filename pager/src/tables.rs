//! What the supervisor knows of the workload's pages, as a state machine without I/O: the page map, the write-back slots, who shares which
//! content, which ranges are registered, which are quarantined.
//!
//! Life of a page: resident -> `Slot` (marked before the MOVE, so that a fault at any moment finds it) -> `Remote` -> fault ->
//! `Kept` (resident, the agent's copy still good) -> evicted again: unchanged pages go straight back to `Remote`.
//!
//! An entry exists only inside a registered range. Everything that happens to the address space arrives as an event before it can
//! be observed through a fault, because the kernel refuses COPY, ZEROPAGE and MOVE while an event is unread.
//!
//! Pages that are being removed are in quarantine (`tables/space.rs`).

mod eviction;
mod home;
mod roomless;
mod space;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::ops::Range;

use gms_policy::eviction::{Ages, Mark};
use gms_policy::ids::{AgentId, ContentId, PageAddr, SpaceId};

use self::roomless::Roomless;
use self::space::SpaceState;
use crate::page_map::{Content, PAGE, PageMap, State};
use crate::range_set::RangeSet;

/// A page of a space.
pub type Place = (SpaceId, PageAddr);

/// What to do about a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultAction {
    /// Nothing was ever there (or it was discarded): install zeros.
    Zero,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Free,
    /// Marked; the MOVE is to come or under way. Left by `finish_evict`.
    Leaving,
    /// The bytes are in the buffer. Left by `start_write`, or when no owner is left.
    Ready,
    /// Written to this agent, not yet acknowledged. Left by `written`.
    Sent(AgentId),
}

struct Slot {
    phase: Phase,
    /// The pages whose bytes these are: one, or several after forks.
    owners: Vec<Place>,
    /// The agent's copy of the page before it changed.
    kept: Option<Content>,
    /// Whether the entry said that the page was only there.
    was_remote: bool,
    /// When the page went out.
    mark: Mark,
    id: ContentId,
    hash: u64,
}

/// See the module's documentation.
pub struct Tables {
    map: PageMap,
    spaces: BTreeMap<SpaceId, SpaceState>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    ready: VecDeque<u32>,
    ages: Ages,
    /// Contents with more than one entry.
    shared: HashMap<ContentId, u32>,
    /// Faults that wait for somebody else's work.
    waiters: HashSet<Place>,
    /// Faults that wait until room is made.
    roomless: Roomless,
    /// Pages which are being prefetched.
    prefetching: HashSet<Place>,
    /// Agents that are not trusted with the only copy of a page.
    untrusted: BTreeSet<AgentId>,
    /// Contents that agents may forget.
    discards: BTreeMap<AgentId, Vec<ContentId>>,
    next_content: u64,
    remote_pages: u64,
    held: BTreeMap<AgentId, u64>,
    /// Highest number of pages at agents.
    pub remote_pages_peak: u64,
    /// The page map was full when an entry had to be made: the workload cannot go on.
    pub exhausted: bool,
    /// Outcomes so far.
    pub counters: Counters,
}

impl Tables {
    /// Empty tables with a write-back buffer of `slots` pages, for a budget of `budget` pages.
    pub fn new(slots: u32, budget: u64) -> std::io::Result<Tables> {
        let slot = |_| Slot {
            phase: Phase::Free,
            owners: Vec::new(),
            kept: None,
            was_remote: false,
            mark: 0,
            id: ContentId(0),
            hash: 0,
        };
        Ok(Tables {
            map: PageMap::new()?,
            spaces: BTreeMap::new(),
            slots: (0..slots).map(slot).collect(),
            free: (0..slots).rev().collect(),
            ready: VecDeque::new(),
            ages: Ages::new(budget),
            shared: HashMap::new(),
            waiters: HashSet::new(),
            roomless: Roomless::default(),
            prefetching: HashSet::new(),
            untrusted: BTreeSet::new(),
            discards: BTreeMap::new(),
            next_content: 1,
            remote_pages: 0,
            held: BTreeMap::new(),
            remote_pages_peak: 0,
            exhausted: false,
            counters: Counters::default(),
        })
    }

    // ---- spaces and ranges

    /// A space begins.
    pub fn add_space(&mut self, space: SpaceId) {
        self.spaces.entry(space).or_default();
    }

    /// A space has ended.
    pub fn drop_space(&mut self, space: SpaceId) {
        self.forget(space, 0..u64::MAX);
        self.spaces.remove(&space);
        self.waiters.retain(|w| w.0 != space);
        self.roomless.forget(space);
        self.prefetching.retain(|w| w.0 != space);
    }

    /// A range has been registered, of which nothing was registered before: whatever was known of its addresses is of an
    /// older mapping.
    pub fn register(&mut self, space: SpaceId, range: Range<u64>) {
        self.forget(space, range.clone());
        if let Some(state) = self.spaces.get_mut(&space) {
            state.renew(range.clone());
            state.registered.insert(range);
        }
    }

    /// The registered ranges of a space.
    pub fn registered(&self, space: SpaceId) -> RangeSet {
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
        if self.prefetching.contains(&place) {
            self.waiters.insert(place);
            return FaultAction::Wait;
        }
        match self.map.get(place.0, place.1) {
            State::Empty => FaultAction::Zero,
            // The page came and changed while a removal was under way, and that has taken it now.
            State::Kept(content) if self.is_being_removed(place) => {
                self.put(place, State::Empty);
                self.release(content);
                FaultAction::Zero
            }
            // Kept: a late message of a thread that is served already (then the copy finds the page there), or we are wrong:
            // fetching is right in both cases.
            State::Remote(content) | State::Kept(content) => FaultAction::Fetch(content),
            State::Slot(slot) if self.slots[slot as usize].phase == Phase::Leaving => {
                self.waiters.insert(place);
                FaultAction::Wait
            }
            State::Slot(slot) => FaultAction::Buffered(slot),
        }
    }

    fn is_being_removed(&self, place: Place) -> bool {
        self.spaces.get(&place.0).is_some_and(|s| s.is_being_removed(place.1))
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

    /// Zeros (or fetched bytes) were installed at these addresses: removals there are over.
    pub fn installed(&mut self, space: SpaceId, range: Range<u64>) {
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
        let heat = match self.map.get(place.0, place.1) {
            State::Remote(known) if known == content && waited => {
                self.ages.heat(self.map.mark(place.0, place.1))
            }
            State::Remote(known) if known == content => 0,
            // By somebody else, meanwhile.
            State::Kept(known) if known == content => self.map.mark(place.0, place.1),
            _ => return false,
        };
        self.put_marked(place, State::Kept(content), heat);
        self.installed(place.0, place.1.get()..place.1.get() + PAGE);
        true
    }

    /// Whether the page still is where the fetch went to look for it.
    pub fn is_remote(&self, place: Place, content: Content) -> bool {
        let state = self.map.get(place.0, place.1);
        state == State::Remote(content) || state == State::Kept(content)
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

    /// The prefetch of a page is over; returns whether a fault waits for it.
    pub fn end_prefetch(&mut self, place: Place) -> bool {
        self.prefetching.remove(&place);
        self.waiters.remove(&place)
    }

    // ---- agents

    /// Gives up to `max` contents that the agent may forget.
    pub fn take_discards(&mut self, agent: AgentId, max: usize) -> Vec<ContentId> {
        let Some(queue) = self.discards.get_mut(&agent) else { return Vec::new() };
        let rest = queue.len().saturating_sub(max);
        queue.split_off(rest)
    }

    /// Contents that some agent may forget.
    pub fn discards_waiting(&self) -> usize {
        self.discards.values().map(Vec::len).sum()
    }

    /// Pages of the workload at one agent.
    pub fn held_by(&self, agent: AgentId) -> u64 {
        self.held.get(&agent).copied().unwrap_or(0)
    }

    /// Pages at agents.
    pub fn remote_pages(&self) -> u64 {
        self.remote_pages
    }

    /// Agents that are away, leaving or silent: pages of which they have a copy are kept until another agent has one too.
    pub fn distrust(&mut self, agents: BTreeSet<AgentId>) {
        self.untrusted = agents;
    }

    /// Whether any page is only at this agent.
    pub fn depends_on(&self, agent: AgentId) -> bool {
        self.spaces.keys().any(|&space| {
            let mut found = false;
            self.map.visit(space, 0..u64::MAX, |_, state| {
                found = matches!(state, State::Remote(content) if content.agent == agent);
                !found
            });
            found
        })
    }

    /// The agent has lost everything: the copies of resident pages are no longer good.
    pub fn forget_copies(&mut self, agent: AgentId) {
        let spaces: Vec<SpaceId> = self.spaces.keys().copied().collect();
        for space in spaces {
            for (page, state) in self.map.known(space, 0..u64::MAX) {
                if let State::Kept(content) = state
                    && content.agent == agent
                {
                    self.put((space, page), State::Empty);
                    self.release(content);
                }
            }
        }
        for index in 0..self.slots.len() {
            if let Some(content) = self.slots[index].kept.take_if(|kept| kept.agent == agent) {
                self.release(content);
            }
        }
        self.discards.remove(&agent);
    }

    // ---- events

    /// MADV_DONTNEED, MADV_FREE or MADV_REMOVE is about to act on the range.
    pub fn remove(&mut self, space: SpaceId, range: Range<u64>) {
        self.forget(space, range.clone());
        if let Some(state) = self.spaces.get_mut(&space) {
            state.remove(range);
        }
    }

    /// The range is no longer mapped.
    pub fn unmap(&mut self, space: SpaceId, range: Range<u64>) {
        self.forget(space, range.clone());
        if let Some(state) = self.spaces.get_mut(&space) {
            state.registered.remove(range.clone());
            state.renew(range);
        }
    }

    /// The range `from..from + length` has moved to `to`. Threads that wait for a page of either must be woken.
    pub fn remap(&mut self, space: SpaceId, from: u64, to: u64, length: u64) {
        self.forget(space, to..to + length);
        for (page, state) in self.map.known(space, from..from + length) {
            let target = PageAddr::containing(page.get() - from + to);
            let mark = self.map.mark(space, page);
            self.put((space, page), State::Empty);
            self.put_marked((space, target), state, mark);
            if let State::Slot(index) = state {
                let owners = &mut self.slots[index as usize].owners;
                owners.iter_mut().filter(|o| **o == (space, page)).for_each(|o| o.1 = target);
            }
        }
        if let Some(s) = self.spaces.get_mut(&space) {
            s.registered.remove(from..from + length);
            s.registered.insert(to..to + length);
            // A removal that another thread has begun acts on the old addresses, where nothing is any more.
            s.renew(from..from + length);
            s.renew(to..to + length);
        }
    }

    /// `child` begins as a copy of `parent`, less the ranges that children do not inherit.
    pub fn fork(&mut self, parent: SpaceId, child: SpaceId, not_inherited: &[Range<u64>]) {
        let mut registered = self.registered(parent);
        not_inherited.iter().for_each(|range| registered.remove(range.clone()));
        for (page, state) in self.map.known(parent, 0..u64::MAX) {
            if !registered.contains(page.get()) {
                continue;
            }
            match state {
                State::Remote(content) | State::Kept(content) => self.share(content.id, 1),
                State::Slot(index) => self.slots[index as usize].owners.push((child, page)),
                State::Empty => {}
            }
            self.put_marked((child, page), state, self.map.mark(parent, page));
        }
        self.spaces.insert(child, SpaceState::new(registered));
    }

    // ---- references

    /// Nothing is known of the range any more.
    fn forget(&mut self, space: SpaceId, range: Range<u64>) {
        for (page, state) in self.map.known(space, range) {
            match state {
                State::Remote(content) | State::Kept(content) => {
                    self.put((space, page), State::Empty);
                    self.release(content);
                }
                State::Slot(_) => self.disown((space, page)),
                State::Empty => {}
            }
        }
    }

    /// A page in the write-back buffer is no longer the slot's.
    fn disown(&mut self, place: Place) {
        let State::Slot(index) = self.map.get(place.0, place.1) else { return };
        self.put(place, State::Empty);
        let slot = &mut self.slots[index as usize];
        slot.owners.retain(|owner| *owner != place);
        // Leaving and sent slots are freed when that ends.
        if slot.owners.is_empty() && slot.phase == Phase::Ready {
            self.ready.retain(|&i| i != index);
            self.settle(index, Vec::new(), State::Empty, None);
        }
    }

    fn put(&mut self, place: Place, state: State) {
        self.put_marked(place, state, 0);
    }

    fn put_marked(&mut self, place: Place, state: State, mark: Mark) {
        self.exhausted |= !self.map.set(place.0, place.1, state, mark);
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
            None => {
                self.discards.entry(content.agent).or_default().push(content.id);
                self.remote_pages = self.remote_pages.saturating_sub(1);
                if let Some(held) = self.held.get_mut(&content.agent) {
                    *held = held.saturating_sub(1);
                }
            }
        }
    }

    fn count_remote(&mut self, agent: AgentId) {
        *self.held.entry(agent).or_default() += 1;
        self.remote_pages += 1;
        self.remote_pages_peak = self.remote_pages_peak.max(self.remote_pages);
    }
}
