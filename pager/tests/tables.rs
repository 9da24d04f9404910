//! The tables against a slow, obvious model of a kernel, of agents and of what each process must see.
//!
//! In the model a page's bytes are a number, and 0 is a page of zeros. What happens between REMOVE's event and the moment when the
//! pages go is modelled: a page then may read as it was, as zero, or as what was written meanwhile, but later only as one of the last two.
//! (If a page was written, evicted, fetched and written again while another thread's removal of it was under way, the first of the
//! writes may come back: the tables then still name the agent's copy. Only the kernel's own zap could tell them.)

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use gms_pager::page_map::{Content, PAGE};
use gms_pager::tables::{EvictOutcome, FaultAction, Place, Tables};
use gms_policy::ids::{AgentId, ContentId, PageAddr, SpaceId};
use proptest::prelude::*;

const SLOTS: u32 = 6;
const PAGES: u64 = 24;
const AGENTS: u8 = 2;
const SPACES_MAX: usize = 5;
/// The pages lie on both sides of a chunk's border.
const BASE: u64 = (7 << 21) - PAGES / 2 * PAGE;

fn at(page: u64) -> PageAddr {
    PageAddr::containing(BASE + page * PAGE)
}

fn span(from: u64, pages: u64) -> Range<u64> {
    at(from).get()..at((from + pages).min(PAGES)).get()
}

fn hash(tag: u64) -> u64 {
    tag.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// What a page may hold.
#[derive(Clone, Debug)]
struct Truth {
    allowed: BTreeSet<u64>,
    /// What came there while a removal was under way.
    written: BTreeSet<u64>,
}

impl Truth {
    fn of(tag: u64) -> Truth {
        Truth { allowed: BTreeSet::from([tag]), written: BTreeSet::new() }
    }
}

#[derive(Clone, Default)]
struct Process {
    /// Every mapped (and registered) page.
    truth: BTreeMap<PageAddr, Truth>,
    present: BTreeMap<PageAddr, u64>,
}

/// A removal whose event has been read; the pages go later. MADV_FREE's never go.
struct Removal {
    space: SpaceId,
    range: Range<u64>,
    lazily: bool,
}

struct Moved {
    slot: u32,
    outcome: EvictOutcome,
}

#[derive(Clone, Debug)]
enum Op {
    Map(usize, u64, u64),
    Read(usize, u64),
    Write(usize, u64),
    Evict(usize, u64, u64, u32),
    Finish,
    StartWrite(u8, usize),
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
    Fork(usize, u64, u64),
    Exit(usize),
}

/// Slots under way to an agent: slot, content, checksum.
type Write = Vec<(u32, ContentId, u64)>;

struct Model {
    tables: Tables,
    processes: BTreeMap<SpaceId, Process>,
    frames: BTreeMap<u32, u64>,
    agents: BTreeMap<AgentId, BTreeMap<ContentId, u64>>,
    removals: Vec<Removal>,
    moved: Vec<Moved>,
    writes: Vec<(AgentId, Write)>,
    fetches: Vec<(Place, Content)>,
    prefetches: Vec<(SpaceId, Vec<(PageAddr, Content)>)>,
    blocked: BTreeSet<Place>,
    next_tag: u64,
    next_space: u32,
}

impl Model {
    fn new() -> Model {
        let mut model = Model {
            tables: Tables::new(SLOTS, 8).unwrap(),
            processes: BTreeMap::new(),
            frames: BTreeMap::new(),
            agents: (0..AGENTS).map(|a| (AgentId(a), BTreeMap::new())).collect(),
            removals: Vec::new(),
            moved: Vec::new(),
            writes: Vec::new(),
            fetches: Vec::new(),
            prefetches: Vec::new(),
            blocked: BTreeSet::new(),
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

    fn is_being_removed(&self, place: Place) -> bool {
        self.removals.iter().any(|r| r.space == place.0 && r.range.contains(&place.1.get()))
    }

    fn wake_range(&mut self, space: SpaceId, range: &Range<u64>) {
        self.blocked.retain(|place| place.0 != space || !range.contains(&place.1.get()));
    }

    // ---- the kernel and the processes

    fn map(&mut self, space: SpaceId, range: Range<u64>) {
        for part in self.tables.unregistered_parts(space, range) {
            self.tables.register(space, part.clone());
            for address in part.step_by(PAGE as usize) {
                self.process(space).truth.insert(PageAddr::containing(address), Truth::of(0));
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
            FaultAction::Buffered(slot) => {
                let tag = self.frames[&slot];
                self.process(place.0).present.insert(place.1, tag);
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

    /// Makes pages present up to the first that is already, or is not mapped; returns where.
    fn fill(&mut self, space: SpaceId, run: Range<u64>) -> u64 {
        let process = self.process(space);
        let mut end = run.start;
        while end < run.end {
            let page = PageAddr::containing(end);
            if process.present.contains_key(&page) || !process.truth.contains_key(&page) {
                break;
            }
            process.present.insert(page, 0);
            end += PAGE;
        }
        self.tables.installed(space, run.start..end);
        end
    }

    /// The reply to a fetch has come.
    fn install(&mut self, place: Place, content: Content) {
        if !self.tables.is_remote(place, content) {
            return;
        }
        let tag = *self.agents[&content.agent].get(&content.id).expect("referenced but discarded");
        assert_eq!(hash(tag), content.hash, "an agent has other bytes under this name");
        let process = self.process(place.0);
        assert!(process.truth.contains_key(&place.1), "content of a page that is not mapped");
        process.present.entry(place.1).or_insert(tag);
        assert!(self.tables.fetched(place, content, true));
    }

    fn read(&mut self, place: Place) {
        if !self.touch(place) {
            return;
        }
        let process = self.process(place.0);
        let (seen, truth) = (process.present[&place.1], &process.truth[&place.1]);
        assert!(truth.allowed.contains(&seen), "{place:?} reads {seen}, may be {truth:?}");
    }

    fn write(&mut self, place: Place) {
        if !self.touch(place) {
            return;
        }
        let removed = self.is_being_removed(place);
        let tag = self.next_tag;
        self.next_tag += 1;
        let process = self.process(place.0);
        process.present.insert(place.1, tag);
        if let Some(truth) = process.truth.get_mut(&place.1) {
            truth.allowed = BTreeSet::from([tag]);
            if removed {
                truth.allowed.insert(0);
                truth.written.insert(tag);
            }
        }
    }

    // ---- eviction

    fn evict(&mut self, space: SpaceId, from: u64, pages: u64, pinned: u32) {
        let present = &self.processes[&space].present;
        let range = span(from, pages);
        let victims: Vec<PageAddr> =
            present.keys().copied().filter(|p| range.contains(&p.get())).collect();
        let (mut chosen, mut leaving) = (VecDeque::new(), Vec::new());
        while chosen.is_empty() && !victims.is_empty() {
            self.tables.choose(space, &victims, &mut chosen);
        }
        self.tables.begin_evict(space, chosen.make_contiguous(), &mut leaving);
        for (i, (page, slot)) in leaving.into_iter().enumerate() {
            let stays = pinned >> (i % 32) & 1 == 1;
            let tag = if stays { None } else { self.process(space).present.remove(&page) };
            let outcome = match tag {
                None => EvictOutcome::Stayed,
                Some(0) => EvictOutcome::Zero,
                Some(tag) => EvictOutcome::Moved(hash(tag)),
            };
            self.frames.insert(slot, tag.unwrap_or(u64::MAX));
            self.moved.push(Moved { slot, outcome });
        }
    }

    fn finish(&mut self) {
        let mut wake = Vec::new();
        for Moved { slot, outcome } in std::mem::take(&mut self.moved) {
            self.tables.finish_evict(slot, outcome, &mut wake);
        }
        self.blocked.retain(|place| !wake.contains(place));
    }

    fn end_write(&mut self, stored: u32) {
        if self.writes.is_empty() {
            return;
        }
        let (agent, batch) = self.writes.remove(0);
        for (i, (slot, id, check)) in batch.into_iter().enumerate() {
            let stored = stored >> (i % 32) & 1 == 1;
            if stored {
                let tag = self.frames[&slot];
                assert_eq!(hash(tag), check, "a slot was reused before its write ended");
                let before = self.agents.get_mut(&agent).unwrap().insert(id, tag);
                assert!(before.is_none_or(|b| b == tag), "a content id was used twice");
            }
            self.tables.written(slot, stored);
        }
    }

    fn discard(&mut self, agent: AgentId, max: usize) {
        for id in self.tables.take_discards(agent, max) {
            self.agents.get_mut(&agent).unwrap().remove(&id);
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
        self.tables.remove(space, range.clone());
        self.wake_range(space, &range);
        for (_, truth) in self.process(space).truth.range_mut(pages(&range)) {
            truth.allowed.insert(0);
        }
        self.removals.push(Removal { space, range, lazily });
    }

    /// The oldest removal that fits goes through, at the addresses as they are mapped by then.
    fn zap(&mut self, of: impl Fn(&Removal) -> bool) -> bool {
        let Some(index) = self.removals.iter().position(of) else { return false };
        let removal = self.removals.remove(index);
        if removal.lazily {
            return true;
        }
        let others: Vec<Range<u64>> = self
            .removals
            .iter()
            .filter(|r| r.space == removal.space)
            .map(|r| r.range.clone())
            .collect();
        let Some(process) = self.processes.get_mut(&removal.space) else { return true };
        process.present.retain(|page, _| !removal.range.contains(&page.get()));
        for (page, truth) in process.truth.range_mut(pages(&removal.range)) {
            truth.allowed = truth.written.iter().copied().chain([0]).collect();
            if !others.iter().any(|range| range.contains(&page.get())) {
                truth.written.clear();
            }
        }
        true
    }

    fn see_absent(&mut self, space: SpaceId) {
        let process = &self.processes[&space];
        let absent: Vec<u64> = process
            .truth
            .keys()
            .filter(|page| !process.present.contains_key(page))
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
        self.evict(space, 0, PAGES, 0);
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
        let process = self.process(space);
        process.truth.retain(|page, _| !range.contains(&page.get()));
        process.present.retain(|page, _| !range.contains(&page.get()));
    }

    fn remap(&mut self, space: SpaceId, from: u64, to: u64, count: u64) {
        let count = count.min(PAGES - from).min(PAGES - to);
        let whole = (from..from + count).all(|p| self.processes[&space].truth.contains_key(&at(p)));
        // A program that moves pages to where it is removing pages has no claim to any bytes.
        let removed = (to..to + count).any(|p| self.is_being_removed((space, at(p))));
        if count == 0 || from.abs_diff(to) < count || !whole || removed {
            return;
        }
        self.unmap(space, span(to, count));
        self.tables.remap(space, at(from).get(), at(to).get(), count * PAGE);
        self.wake_range(space, &span(from, count));
        for i in 0..count {
            let (source, target) = (at(from + i), at(to + i));
            let process = self.process(space);
            if let Some(mut truth) = process.truth.remove(&source) {
                truth.written.clear();
                process.truth.insert(target, truth);
            }
            if let Some(tag) = process.present.remove(&source) {
                process.present.insert(target, tag);
            }
        }
    }

    fn fork(&mut self, parent: SpaceId, from: u64, count: u64) {
        if self.processes.len() >= SPACES_MAX {
            return;
        }
        let child = SpaceId(self.next_space);
        self.next_space += 1;
        let lacking = span(from, count);
        self.tables.fork(parent, child, std::slice::from_ref(&lacking));
        let mut process = self.processes[&parent].clone();
        process.truth.retain(|page, _| !lacking.contains(&page.get()));
        process.present.retain(|page, _| !lacking.contains(&page.get()));
        process.truth.values_mut().for_each(|truth| truth.written.clear());
        self.processes.insert(child, process);
    }

    fn exit(&mut self, space: SpaceId) {
        self.tables.drop_space(space);
        self.blocked.retain(|place| place.0 != space);
        self.processes.remove(&space);
        self.removals.retain(|removal| removal.space != space);
    }

    fn step(&mut self, op: &Op) {
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
        | Op::Fork(i, ..)
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
            Op::Evict(_, from, count, pinned) => self.evict(space, from, count, pinned),
            Op::StartFetch(_, page)
                if mapped(page) && !self.processes[&space].present.contains_key(&at(page)) =>
            {
                match self.tables.fault((space, at(page))) {
                    FaultAction::Fetch(content) => self.fetches.push(((space, at(page)), content)),
                    FaultAction::Wait => {
                        self.blocked.insert((space, at(page)));
                    }
                    FaultAction::Zero | FaultAction::Buffered(_) => {}
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
            Op::Fork(_, from, count) => self.fork(space, from, count),
            Op::Exit(_) if self.processes.len() > 1 => self.exit(space),
            _ => {}
        }
    }

    fn step_elsewhere(&mut self, op: &Op) {
        match *op {
            Op::Finish => self.finish(),
            Op::StartWrite(agent, max) => {
                let batch = self.tables.start_write(AgentId(agent), max);
                self.writes.push((AgentId(agent), batch));
            }
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

    fn check_remote(&mut self) {
        (0..AGENTS).for_each(|agent| self.discard(AgentId(agent), usize::MAX));
        let held: usize = self.agents.values().map(BTreeMap::len).sum();
        assert_eq!(self.tables.remote_pages(), held as u64, "pages at agents");
    }

    fn end(mut self) {
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
        assert!(!self.tables.has_ready() && !self.tables.exhausted);
    }
}

fn pages(range: &Range<u64>) -> Range<PageAddr> {
    PageAddr::containing(range.start)..PageAddr::containing(range.end)
}

fn op() -> impl Strategy<Value = Op> {
    let space = 0..SPACES_MAX;
    let page = 0..PAGES;
    let area = (0..PAGES, 1..=PAGES / 2);
    let space = move || space.clone();
    let page = move || page.clone();
    let area = move || area.clone();
    prop_oneof![
        2 => (space(), area()).prop_map(|(s, (f, n))| Op::Map(s, f, n)),
        8 => (space(), page()).prop_map(|(s, p)| Op::Read(s, p)),
        12 => (space(), page()).prop_map(|(s, p)| Op::Write(s, p)),
        12 => (space(), area(), any::<u32>(), any::<u32>())
            .prop_map(|(s, (f, n), a, b)| Op::Evict(s, f, n, a & b)),
        10 => Just(Op::Finish),
        6 => (0..AGENTS, 1..5usize).prop_map(|(a, n)| Op::StartWrite(a, n)),
        6 => any::<u32>().prop_map(Op::EndWrite),
        3 => (0..AGENTS, 1..9usize).prop_map(|(a, n)| Op::Discard(a, n)),
        3 => (space(), page()).prop_map(|(s, p)| Op::StartFetch(s, p)),
        3 => Just(Op::EndFetch),
        2 => (space(), area()).prop_map(|(s, (f, n))| Op::StartPrefetch(s, f, n)),
        2 => Just(Op::EndPrefetch),
        2 => (space(), area(), any::<bool>()).prop_map(|(s, (f, n), l)| Op::Remove(s, f, n, l)),
        2 => Just(Op::Zap),
        1 => space().prop_map(Op::SeeAbsent),
        1 => (space(), any::<bool>()).prop_map(|(s, d)| Op::Prove(s, d)),
        1 => (space(), area()).prop_map(|(s, (f, n))| Op::Unmap(s, f, n)),
        2 => (space(), page(), page(), 1..PAGES / 2).prop_map(|(s, f, t, n)| Op::Remap(s, f, t, n)),
        2 => (space(), page(), 0..3u64).prop_map(|(s, f, n)| Op::Fork(s, f, n)),
        1 => space().prop_map(Op::Exit),
    ]
}

fn run(ops: &[Op]) {
    let mut model = Model::new();
    model.map(SpaceId(1), span(0, PAGES));
    ops.iter().for_each(|op| model.step(op));
    model.end();
}

/// PROPTEST_CASES asks for more.
fn cases() -> u32 {
    ProptestConfig::default().cases.max(4000)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_process_sees_its_own_bytes(ops in prop::collection::vec(op(), 1..150)) {
        run(&ops);
    }
}

// ---- cases worth a name

/// REMOVE's event has been read, the pages are still there: evicted now, they would come back after the removal.
#[test]
fn a_page_is_not_evicted_while_it_is_being_removed() {
    run(&[
        Op::Write(0, 3),
        Op::Remove(0, 3, 1, false),
        Op::Evict(0, 3, 1, 0),
        Op::Finish,
        Op::Zap,
        Op::Read(0, 3),
    ]);
}

#[test]
fn a_page_removed_between_its_move_and_the_end_of_it_reads_as_zeros() {
    run(&[
        Op::Write(0, 3),
        Op::Evict(0, 3, 1, 0),
        Op::Read(0, 3),
        Op::Remove(0, 3, 1, false),
        Op::Finish,
        Op::Zap,
        Op::Read(0, 3),
    ]);
}

#[test]
fn a_child_forked_while_a_page_leaves_keeps_it() {
    for end in [Op::Unmap(0, 3, 1), Op::Write(0, 3), Op::Exit(0)] {
        run(&[
            Op::Write(0, 3),
            Op::Evict(0, 3, 1, 0),
            Op::Fork(0, 0, 0),
            Op::Finish,
            Op::StartWrite(0, 4),
            end,
            Op::EndWrite(u32::MAX),
            Op::Discard(0, 9),
            Op::Read(1, 3),
        ]);
    }
}

#[test]
fn a_copy_is_kept_until_the_last_of_a_family_lets_it_go() {
    run(&[
        Op::Write(0, 3),
        Op::Evict(0, 3, 1, 0),
        Op::Finish,
        Op::StartWrite(0, 4),
        Op::EndWrite(u32::MAX),
        Op::Fork(0, 0, 0),
        Op::Fork(0, 0, 0),
        Op::Write(0, 3),
        Op::Evict(0, 3, 1, 0),
        Op::Finish,
        Op::Exit(1),
        Op::Discard(0, 9),
        Op::Read(0, 3),
        Op::Read(1, 3),
    ]);
}

#[test]
fn a_fetch_that_a_remap_overtakes_brings_nothing_to_the_old_place() {
    run(&[
        Op::Write(0, 3),
        Op::Evict(0, 3, 1, 0),
        Op::Finish,
        Op::StartWrite(0, 4),
        Op::EndWrite(u32::MAX),
        Op::StartFetch(0, 3),
        Op::Remap(0, 3, 20, 1),
        Op::Map(0, 3, 1),
        Op::EndFetch,
        Op::Read(0, 3),
        Op::Read(0, 20),
    ]);
}
