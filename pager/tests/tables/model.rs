//! The model: what the kernel, the agents and the processes do.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use gms_pager::page_map::{Content, PAGE};
use gms_pager::range_set::RangeSet;
use gms_pager::tables::{EvictOutcome, FaultAction, Place, Tables};
use gms_policy::ids::{AgentId, ContentId, PageAddr, SpaceId};
use gms_policy::redundancy::{AgentSet, Copies};

use crate::truth::{Call, Truth};

mod agents;
mod moves;

const SLOTS: u32 = 6;
pub(crate) const PAGES: u64 = 24;
pub(crate) const AGENTS: u8 = 3;
pub(crate) const SPACES_MAX: usize = 5;
/// The pages lie on both sides of a border of chunks, and of shelves.
const BASE: u64 = (1 << 30) - PAGES / 2 * PAGE;

pub(crate) fn at(page: u64) -> PageAddr {
    PageAddr::containing(BASE + page * PAGE)
}

pub(crate) fn span(from: u64, pages: u64) -> Range<u64> {
    at(from).get()..at((from + pages).min(PAGES)).get()
}

fn hash(tag: u64) -> u64 {
    tag.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

#[derive(Clone, Default)]
struct Process {
    /// Every mapped (and registered) page.
    truth: BTreeMap<PageAddr, Truth>,
    present: BTreeMap<PageAddr, u64>,
    /// Addresses with a marker.
    marks: BTreeSet<PageAddr>,
}

impl Process {
    fn retain(&mut self, keep: impl Fn(&PageAddr) -> bool) {
        self.truth.retain(|page, _| keep(page));
        self.present.retain(|page, _| keep(page));
        self.marks.retain(|page| keep(page));
    }

    fn is_absent(&self, page: PageAddr) -> bool {
        !self.present.contains_key(&page) && !self.marks.contains(&page)
    }
}

fn ranges<'a>(pages: impl Iterator<Item = &'a PageAddr>) -> RangeSet {
    let mut set = RangeSet::default();
    pages.for_each(|page| set.insert(page.get()..page.get() + PAGE));
    set
}

/// A removal whose event has been read; the pages go later. MADV_FREE's never go.
struct Removal {
    call: Call,
    space: SpaceId,
    range: Range<u64>,
    lazily: bool,
}

struct Moved {
    slot: u32,
    outcome: EvictOutcome,
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Map(usize, u64, u64),
    Read(usize, u64),
    Write(usize, u64),
    Evict(usize, u64, u64, u32, bool),
    Finish,
    /// To the agents whose bits are set.
    StartWrite(u8, usize),
    /// An agent begins anew, empty, unless a page is only there.
    Restart(u8),
    Repair(u64, u32, u8, usize),
    Distrust(u8, u32),
    EndWrite(u32),
    Discard(u8, usize),
    StartFetch(usize, u64),
    EndFetch,
    StartPrefetch(usize, u64, u64),
    EndPrefetch,
    Remove(usize, u64, u64, bool),
    Zap,
    SeeAbsent(usize),
    Prove(usize, bool),
    Unmap(usize, u64, u64),
    Remap(usize, u64, u64, u64),
    /// All of it moves away, and back.
    Shift(usize),
    Fork(usize, u64, u64, bool),
    Guard(usize, u64, u64),
    Reconcile(usize),
    Exit(usize),
}

/// Slots under way to an agent: slot, content, checksum.
type Write = Vec<(u32, ContentId, u64)>;

pub(crate) struct Model {
    tables: Tables,
    processes: BTreeMap<SpaceId, Process>,
    frames: BTreeMap<u32, u64>,
    agents: BTreeMap<AgentId, BTreeMap<ContentId, u64>>,
    removals: Vec<Removal>,
    next_call: Call,
    /// Calls of MADV_FREE that have returned.
    freed: BTreeSet<Call>,
    moved: Vec<Moved>,
    /// Puts under way, and whether the agent will have what it stores: not if it was restarted since.
    writes: Vec<(AgentId, Write, bool)>,
    fetches: Vec<(Place, Content)>,
    prefetches: Vec<(SpaceId, Vec<(PageAddr, Content)>)>,
    blocked: BTreeSet<Place>,
    /// Whether children inherit the page of a slot that has no marker yet.
    inherited: BTreeMap<u32, bool>,
    next_tag: u64,
    next_space: u64,
}

impl Model {
    pub(crate) fn new() -> Model {
        let mut model = Model {
            tables: Tables::new(SLOTS, 8).unwrap(),
            processes: BTreeMap::new(),
            frames: BTreeMap::new(),
            agents: (0..AGENTS).map(|a| (AgentId(a), BTreeMap::new())).collect(),
            removals: Vec::new(),
            next_call: 0,
            freed: BTreeSet::new(),
            moved: Vec::new(),
            writes: Vec::new(),
            fetches: Vec::new(),
            prefetches: Vec::new(),
            blocked: BTreeSet::new(),
            inherited: BTreeMap::new(),
            next_tag: 1,
            next_space: 2,
        };
        model.tables.add_space(SpaceId(1));
        model.processes.insert(SpaceId(1), Process::default());
        model
    }

    fn space(&self, index: usize) -> Option<SpaceId> {
        self.processes.keys().copied().nth(index % self.processes.len())
    }

    fn process(&mut self, space: SpaceId) -> &mut Process {
        self.processes.get_mut(&space).expect("asked for a live space")
    }

    /// The calls that remove the page.
    fn removals_of(&self, place: Place) -> BTreeSet<Call> {
        let of = |r: &&Removal| r.space == place.0 && r.range.contains(&place.1.get());
        self.removals.iter().filter(of).map(|removal| removal.call).collect()
    }

    fn wake_range(&mut self, space: SpaceId, range: &Range<u64>) {
        self.blocked.retain(|place| place.0 != space || !range.contains(&place.1.get()));
    }

    // ---- the kernel and the processes

    pub(crate) fn map(&mut self, space: SpaceId, range: Range<u64>) {
        for part in self.tables.unregistered_parts(space, range) {
            let marked = ranges(self.processes[&space].marks.iter());
            self.tables.register(space, part.clone(), &marked);
            for page in part.step_by(PAGE as usize).map(PageAddr::containing) {
                // A call under way removes what it finds at its addresses, whenever that was mapped.
                let truth = Truth::of(0, self.removals_of((space, page)));
                self.process(space).truth.insert(page, truth);
            }
        }
    }

    /// Makes the page present as the fault thread would; false if the thread must wait.
    fn touch(&mut self, place: Place) -> bool {
        if self.process(place.0).present.contains_key(&place.1) {
            return true;
        }
        match self.tables.fault(place) {
            FaultAction::Zero => {
                assert!(
                    !self.process(place.0).marks.contains(&place.1),
                    "a page was lost track of"
                );
                let one = place.1.get()..place.1.get() + PAGE;
                // Upwards from some pages, downwards from others.
                let wanted = match place.1.get() / PAGE % 2 {
                    0 => one.start..one.start + 4 * PAGE,
                    _ => one.end.saturating_sub(4 * PAGE)..one.end,
                };
                let run = self.tables.empty_run(place.0, wanted, &one);
                assert!(run.start <= one.start && one.end <= run.end, "{run:?} without {one:?}");
                if self.fill(place.0, run) <= one.start {
                    assert_eq!(self.fill(place.0, one.clone()), one.end);
                }
            }
            action if self.process(place.0).is_absent(place.1) && action != FaultAction::Wait => {
                assert!(
                    self.tables.discarded(place),
                    "{action:?} of a page of which nothing is known"
                );
                assert_eq!(
                    self.fill(place.0, place.1.get()..place.1.get() + PAGE),
                    place.1.get() + PAGE
                );
            }
            FaultAction::Resident => panic!("{place:?} has a marker and is thought to be resident"),
            FaultAction::Buffered(slot) => {
                let tag = self.frames[&slot];
                self.arrive(place, tag);
                self.tables.second_chance(place);
            }
            FaultAction::Fetch(content) => self.install(place, content),
            FaultAction::Wait => {
                self.blocked.insert(place);
                return false;
            }
        }
        true
    }

    /// A page takes the place of its marker.
    fn arrive(&mut self, place: Place, tag: u64) {
        let process = self.process(place.0);
        process.marks.remove(&place.1);
        process.present.entry(place.1).or_insert(tag);
    }

    /// Makes pages present up to the first that is already, has a marker, or is not mapped; returns where.
    fn fill(&mut self, space: SpaceId, run: Range<u64>) -> u64 {
        let process = self.process(space);
        let mut end = run.start;
        while end < run.end {
            let page = PageAddr::containing(end);
            if !process.is_absent(page) || !process.truth.contains_key(&page) {
                break;
            }
            process.present.insert(page, 0);
            end += PAGE;
        }
        self.tables.zeroed(space, run.start..end);
        end
    }

    /// The reply to a fetch has come.
    fn install(&mut self, place: Place, content: Content) {
        let there = self.processes.get(&place.0).is_some_and(|p| p.marks.contains(&place.1));
        if !there || !self.tables.is_remote(place, content) {
            return;
        }
        let held = |agent| self.agents[&agent].get(&content.id).expect("referenced but discarded");
        let holders = self.tables.holders(content);
        let tags: BTreeSet<u64> = holders.agents().map(|agent| *held(agent)).collect();
        let tag = *tags.first().expect("somebody holds it");
        assert_eq!(tags.len(), 1, "its holders have different bytes");
        assert_eq!(hash(tag), content.hash, "an agent has other bytes under this name");
        assert!(self.process(place.0).truth.contains_key(&place.1), "a page that is not mapped");
        self.arrive(place, tag);
        assert!(self.tables.fetched(place, content, true));
    }

    fn read(&mut self, place: Place) {
        if !self.touch(place) {
            return;
        }
        let process = self.process(place.0);
        let seen = process.present[&place.1];
        let truth = process.truth.get_mut(&place.1).expect("asked for a mapped page");
        let before = truth.clone();
        assert!(truth.read(seen), "{place:?} reads {seen}, may be {before:?}");
    }

    fn write(&mut self, place: Place) {
        if !self.touch(place) {
            return;
        }
        let (tag, freed) = (self.next_tag, self.freed.clone());
        self.next_tag += 1;
        let process = self.process(place.0);
        process.present.insert(place.1, tag);
        if let Some(truth) = process.truth.get_mut(&place.1) {
            truth.write(tag, &freed);
        }
    }

    // ---- eviction

    /// `late` says that the address space is being changed when markers are to be left.
    fn evict(&mut self, space: SpaceId, from: u64, pages: u64, pinned: u32, late: bool) {
        let present = &self.processes[&space].present;
        let range = span(from, pages);
        let victims: Vec<PageAddr> =
            present.keys().copied().filter(|p| range.contains(&p.get())).collect();
        let (mut cold, mut leaving) = (Vec::new(), Vec::new());
        while cold.is_empty() && !victims.is_empty() {
            cold = self.tables.cool(space, &victims);
        }
        self.tables.begin_evict(space, &cold, &mut leaving);
        for (i, (page, slot)) in leaving.into_iter().enumerate() {
            let stays = pinned >> (i % 32) & 1 == 1;
            let tag = if stays { None } else { self.process(space).present.remove(&page) };
            let outcome = match tag {
                None => EvictOutcome::Stayed,
                Some(0) => EvictOutcome::Zero,
                Some(tag) => EvictOutcome::Moved(hash(tag)),
            };
            if tag.is_some() && !late {
                self.process(space).marks.insert(page);
                self.tables.marked(slot, (space, page));
            }
            self.frames.insert(slot, tag.unwrap_or(u64::MAX));
            self.moved.push(Moved { slot, outcome });
        }
    }

    fn finish(&mut self) {
        let mut wake = Vec::new();
        for Moved { slot, mut outcome } in std::mem::take(&mut self.moved) {
            if outcome == EvictOutcome::Zero {
                match self.tables.only_owner(slot) {
                    Some(place) => drop(self.process(place.0).marks.remove(&place.1)),
                    None => outcome = EvictOutcome::Moved(hash(0)),
                }
            }
            let unmarked: Vec<Place> = self.tables.unmarked(slot).collect();
            for place in unmarked {
                if matches!(outcome, EvictOutcome::Moved(_)) {
                    assert!(self.processes[&place.0].truth.contains_key(&place.1));
                    self.process(place.0).marks.insert(place.1);
                    self.tables.marked(slot, place);
                }
            }
            self.inherited.remove(&slot);
            self.tables.finish_evict(slot, outcome, &mut wake);
        }
        self.blocked.retain(|place| !wake.contains(place));
    }

    /// Whether a page was moved out and has no marker yet.
    fn is_unmarked(&self, place: Place) -> bool {
        self.moved.iter().any(|moved| self.tables.unmarked(moved.slot).any(|p| p == place))
    }

    /// Guards are installed and removed again: zeros, without an event. (In the microsecond between a page's move and its marker that would not be seen.)
    fn guard(&mut self, space: SpaceId, range: &Range<u64>) {
        let freed = self.freed.clone();
        for address in range.clone().step_by(PAGE as usize) {
            let page = PageAddr::containing(address);
            if self.is_unmarked((space, page)) || !self.processes[&space].truth.contains_key(&page)
            {
                continue;
            }
            let process = self.process(space);
            process.present.remove(&page);
            process.marks.remove(&page);
            // A call under way may still come, and remove what is written before it does.
            if let Some(truth) = process.truth.get_mut(&page) {
                truth.write(0, &freed);
            }
        }
    }

    fn reconcile(&mut self, space: SpaceId) {
        let process = &self.processes[&space];
        let marked = ranges(process.marks.iter());
        let taken = ranges(process.marks.iter().chain(process.present.keys()));
        for range in self.tables.take_stale(space).iter() {
            self.tables.reconcile(space, range, &marked, &taken);
        }
    }

    fn end_prefetch(&mut self) {
        if self.prefetches.is_empty() {
            return;
        }
        let (space, pages) = self.prefetches.remove(0);
        for (page, content) in pages {
            self.install((space, page), content);
            if self.tables.end_prefetch((space, page)) {
                self.blocked.remove(&(space, page));
            }
        }
    }

    // ---- events

    fn remove(&mut self, space: SpaceId, range: Range<u64>, lazily: bool) {
        let leaving: BTreeSet<PageAddr> = range
            .clone()
            .step_by(PAGE as usize)
            .map(PageAddr::containing)
            .filter(|&page| self.is_unmarked((space, page)))
            .collect();
        self.tables.remove(space, range.clone());
        self.wake_range(space, &range);
        let call = self.next_call;
        self.next_call += 1;
        for (page, truth) in self.process(space).truth.range_mut(pages(&range)) {
            truth.begin(call, leaving.contains(page));
        }
        self.removals.push(Removal { call, space, range, lazily });
    }

    /// The oldest removal that fits goes through, at the addresses as they are mapped by then, and returns.
    fn zap(&mut self, of: impl Fn(&Removal) -> bool) -> bool {
        let Some(index) = self.removals.iter().position(of) else { return false };
        let removal = self.removals.remove(index);
        if removal.lazily {
            self.freed.insert(removal.call);
            return true;
        }
        let Some(process) = self.processes.get_mut(&removal.space) else { return true };
        process.present.retain(|page, _| !removal.range.contains(&page.get()));
        process.marks.retain(|page| !removal.range.contains(&page.get()));
        for (_, truth) in process.truth.range_mut(pages(&removal.range)) {
            truth.end(removal.call);
        }
        true
    }

    fn see_absent(&mut self, space: SpaceId) {
        let process = &self.processes[&space];
        let absent: Vec<u64> = process
            .truth
            .keys()
            .filter(|page| process.is_absent(**page))
            .map(|page| page.get())
            .collect();
        for address in absent {
            let removals = self.tables.removals(space);
            self.tables.seen_absent(space, address..address + PAGE, removals);
        }
    }

    /// What the evict thread does about old quarantines; a removal may begin while it looks.
    fn prove(&mut self, space: SpaceId, disturbed: bool) {
        let begun = self.tables.age_quarantine(space);
        self.evict(space, 0, PAGES, 0, false);
        while self.zap(|removal| removal.space == space) {}
        if disturbed {
            self.remove(space, span(0, PAGES), false);
        }
        if begun {
            self.tables.end_quarantine(space);
        }
    }

    fn unmap(&mut self, space: SpaceId, range: Range<u64>) {
        self.tables.unmap(space, range.clone());
        self.wake_range(space, &range);
        self.process(space).retain(|page| !range.contains(&page.get()));
    }

    /// The child does not have some pages, or has zeros there.
    fn fork(&mut self, parent: SpaceId, from: u64, count: u64, wiped: bool) {
        if self.processes.len() >= SPACES_MAX {
            return;
        }
        let child = SpaceId(self.next_space);
        self.next_space += 1;
        let lacking = span(from, count);
        let unmarked: Vec<(u32, Place)> = self
            .moved
            .iter()
            .flat_map(|moved| self.tables.unmarked(moved.slot).map(|place| (moved.slot, place)))
            .collect();
        // What is inherited is a matter of the mapping, and does not change within the moment in which a page has no marker.
        let is_lacking = |place: &Place| place.0 == parent && lacking.contains(&place.1.get());
        let changed = |(slot, place): &(u32, Place)| {
            place.0 == parent && self.inherited.get(slot).is_some_and(|i| *i == is_lacking(place))
        };
        if unmarked.iter().any(changed) {
            return;
        }
        for (slot, place) in unmarked.into_iter().filter(|(_, place)| place.0 == parent) {
            self.inherited.insert(slot, !is_lacking(&place));
            if is_lacking(&place) {
                self.tables.make_private(slot);
            }
        }
        self.tables.fork(parent, child);
        let mut process = self.processes[&parent].clone();
        let wiped: Vec<PageAddr> = process
            .truth
            .keys()
            .copied()
            .filter(|page| wiped && lacking.contains(&page.get()))
            .collect();
        process.retain(|page| !lacking.contains(&page.get()));
        process.truth.extend(wiped.into_iter().map(|page| (page, Truth::of(0, BTreeSet::new()))));
        let registered = self.tables.registered(child);
        self.tables.unregister(child, 0..u64::MAX);
        let marked = ranges(process.marks.iter());
        for page in process.truth.keys().filter(|page| registered.contains(page.get())) {
            self.tables.register(child, page.get()..page.get() + PAGE, &marked);
        }
        process.truth.values_mut().for_each(|truth| truth.leave(&self.freed));
        self.processes.insert(child, process);
    }

    fn exit(&mut self, space: SpaceId) {
        self.tables.drop_space(space);
        self.tables.bury(1);
        self.blocked.retain(|place| place.0 != space);
        self.processes.remove(&space);
        self.removals.retain(|removal| removal.space != space);
    }

    pub(crate) fn step(&mut self, op: &Op) {
        self.tables.commit();
        let (Op::Map(i, ..)
        | Op::Read(i, _)
        | Op::Write(i, _)
        | Op::Evict(i, ..)
        | Op::StartFetch(i, _)
        | Op::StartPrefetch(i, ..)
        | Op::Remove(i, ..)
        | Op::SeeAbsent(i)
        | Op::Prove(i, _)
        | Op::Unmap(i, ..)
        | Op::Remap(i, ..)
        | Op::Shift(i)
        | Op::Fork(i, ..)
        | Op::Guard(i, ..)
        | Op::Reconcile(i)
        | Op::Exit(i)) = op
        else {
            return self.step_elsewhere(op);
        };
        let Some(space) = self.space(*i) else { return };
        let mapped = |page: u64| self.processes[&space].truth.contains_key(&at(page));
        match *op {
            Op::Map(_, from, count) => self.map(space, span(from, count)),
            Op::Read(_, page) if mapped(page) => self.read((space, at(page))),
            Op::Write(_, page) if mapped(page) => self.write((space, at(page))),
            Op::Evict(_, from, count, pinned, late) => {
                self.evict(space, from, count, pinned, late);
            }
            Op::StartFetch(_, page)
                if mapped(page) && !self.processes[&space].present.contains_key(&at(page)) =>
            {
                match self.tables.fault((space, at(page))) {
                    FaultAction::Fetch(content) => self.fetches.push(((space, at(page)), content)),
                    FaultAction::Wait => {
                        self.blocked.insert((space, at(page)));
                    }
                    FaultAction::Zero | FaultAction::Resident | FaultAction::Buffered(_) => {}
                }
            }
            Op::StartPrefetch(_, from, count) => {
                let pages: Vec<PageAddr> = (from..(from + count).min(PAGES)).map(at).collect();
                let begun = self.tables.begin_prefetch(space, pages.into_iter(), usize::MAX);
                self.prefetches.push((space, begun));
            }
            Op::Remove(_, from, count, lazily) => self.remove(space, span(from, count), lazily),
            Op::SeeAbsent(_) => self.see_absent(space),
            Op::Prove(_, disturbed) => self.prove(space, disturbed),
            Op::Unmap(_, from, count) => self.unmap(space, span(from, count)),
            Op::Remap(_, from, to, count) => self.remap(space, from, to, count),
            Op::Shift(_) => self.shift(space),
            Op::Fork(_, from, count, wiped) => self.fork(space, from, count, wiped),
            Op::Guard(_, from, count) => self.guard(space, &span(from, count)),
            Op::Reconcile(_) => self.reconcile(space),
            Op::Exit(_) if self.processes.len() > 1 => self.exit(space),
            _ => {}
        }
    }

    fn step_elsewhere(&mut self, op: &Op) {
        match *op {
            Op::Finish => self.finish(),
            Op::StartWrite(agents, max) => {
                let to: AgentSet =
                    (0..AGENTS).filter(|n| agents >> n & 1 == 1).map(AgentId).collect();
                let batch = self.tables.start_write(to, max);
                self.writes.extend(to.agents().map(|agent| (agent, batch.clone(), true)));
            }
            Op::Repair(space, copies, leaving, max) => {
                let leaving = (0..AGENTS).filter(|n| leaving >> n & 1 == 1).map(AgentId).collect();
                self.repair(SpaceId(space), copies, leaving, max);
            }
            Op::Distrust(agents, copies) => {
                let agents = (0..AGENTS).filter(|n| agents >> n & 1 == 1).map(AgentId).collect();
                self.tables.distrust(agents, Copies::at_agents(copies));
            }
            Op::Restart(agent) => self.restart(AgentId(agent)),
            Op::EndWrite(stored) => self.end_write(stored),
            Op::Discard(agent, max) => self.discard(AgentId(agent), max),
            Op::EndFetch if !self.fetches.is_empty() => {
                let (place, content) = self.fetches.remove(0);
                self.install(place, content);
            }
            Op::EndPrefetch => self.end_prefetch(),
            Op::Zap => {
                self.zap(|_| true);
            }
            _ => {}
        }
    }

    // ---- the end

    /// Whatever is under way ends.
    fn settle(&mut self) {
        while self.zap(|_| true) {}
        self.finish();
        while !self.fetches.is_empty() {
            self.step(&Op::EndFetch);
        }
        while !self.prefetches.is_empty() {
            self.end_prefetch();
        }
        while !self.writes.is_empty() {
            self.end_write(u32::MAX);
        }
        assert!(self.blocked.is_empty(), "{:?} wait for ever", self.blocked);
        self.check_remote();
    }

    pub(crate) fn end(mut self) {
        self.settle();
        let places: Vec<Place> = self
            .processes
            .iter()
            .flat_map(|(space, process)| process.truth.keys().map(|page| (*space, *page)))
            .collect();
        places.into_iter().for_each(|place| self.read(place));
        self.check_remote();
        let spaces: Vec<SpaceId> = self.processes.keys().copied().collect();
        spaces.into_iter().for_each(|space| self.exit(space));
        self.check_remote();
        assert_eq!(self.tables.free_slots(), SLOTS as usize, "slots leak");
        assert_eq!(self.tables.remote_pages(), 0, "contents leak");
        assert!(!self.tables.has_ready() && self.tables.exhausted.is_none());
    }
}

fn pages(range: &Range<u64>) -> Range<PageAddr> {
    PageAddr::containing(range.start)..PageAddr::containing(range.end)
}
