//! Threads free and move memory, and what they did is told late and in another order: the tables must still know which page is where.
//!
//! The model has addresses, blocks of memory that belong to threads, and for each thread at most one change that has been made and not been told of
//! (the kernel lets a thread go on only when its change has been read). Threads use only what is theirs, or free. What has been told is applied when
//! nothing is untold. Forks are told like changes; a child has its parent's memory as it was at that moment.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use gms_pager::page_map::{Content, PAGE};
use gms_pager::range_set::RangeSet;
use gms_pager::tables::{
    Ask, Change, EvictOutcome, FaultAction, Remap, Tables, contested, drop_echoes,
};
use gms_policy::ids::{AgentId, ContentId, PageAddr, SpaceId};
use proptest::prelude::*;
use proptest::test_runner::{FileFailurePersistence, TestRunner};

const SPACE: SpaceId = SpaceId(1);
const CHILD: SpaceId = SpaceId(2);
const AGENT: AgentId = AgentId(0);
const PAGES: u64 = 32;
const THREADS: usize = 3;

fn at(page: u64) -> u64 {
    (1 << 30) + page * PAGE
}

fn span(pages: &Range<u64>) -> Range<u64> {
    at(pages.start)..at(pages.end)
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

fn concerned(changes: &[Change]) -> impl Iterator<Item = Range<u64>> {
    changes.iter().flat_map(Change::left_and_reached)
}

fn hash(tag: u64) -> u64 {
    tag.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

#[derive(Clone, Debug)]
enum Op {
    Map(usize, u64, u64),
    Evict(usize, u32),
    Unmap(usize),
    Remap(usize, u64),
    Give(usize, usize),
    /// In place, of which nothing is told.
    Grow(usize, u64),
    Discard(usize, u32),
    Fork(usize),
    /// Of these changes that wait to be told, the one at this place is told next.
    Tell(usize),
    /// All that wait are told, in this order.
    TellAll(usize),
}

struct Block {
    pages: Range<u64>,
    owner: usize,
    /// The kernel tells nothing of memory that is not.
    registered: bool,
}

/// A child's memory.
#[derive(Clone, Default)]
struct Memory {
    registered: RangeSet,
    /// Of that what has grown since all was told that had begun: nobody was served there.
    grown: RangeSet,
    away: BTreeMap<u64, u64>,
}

#[derive(Clone)]
enum Event {
    Change(Change),
    Fork(Memory),
}

impl Event {
    fn change(&self) -> Option<Change> {
        match self {
            Event::Change(change) => Some(change.clone()),
            Event::Fork(_) => None,
        }
    }
}

impl Memory {
    fn has(&self, at: u64, probed: &mut BTreeSet<u64>) -> Option<bool> {
        let mapped = self.registered.contains(at);
        let there = self.away.contains_key(&at) || mapped && !self.grown.contains(at);
        let there = there || probed.contains(&at);
        // A probe leaves zeros.
        probed.insert(at);
        mapped.then_some(there)
    }
}

struct Model {
    tables: Tables,
    blocks: Vec<Block>,
    /// What pages hold that are away, by address: their markers are there.
    away: BTreeMap<u64, u64>,
    agent: BTreeMap<ContentId, u64>,
    untold: Vec<(usize, Event)>,
    told: Vec<Event>,
    next_tag: u64,
    /// Pages of children that were found, and children of which nothing could be said.
    inherited: u32,
    doubts: u32,
    /// Some memory has grown, and which of it since all was told.
    grown: bool,
    fresh: RangeSet,
    /// The workload was stopped.
    ended: bool,
}

impl Model {
    fn new() -> Model {
        let mut tables = Tables::new(PAGES as u32, 8).unwrap();
        tables.add_space(SPACE);
        let (away, agent) = (BTreeMap::new(), BTreeMap::new());
        let (blocks, untold, told) = (Vec::new(), Vec::new(), Vec::new());
        let fresh = RangeSet::default();
        Model {
            tables,
            blocks,
            away,
            agent,
            untold,
            told,
            next_tag: 1,
            inherited: 0,
            doubts: 0,
            fresh,
            grown: false,
            ended: false,
        }
    }

    fn is_free(&self, pages: &Range<u64>) -> bool {
        pages.end <= PAGES && !self.blocks.iter().any(|block| overlap(&block.pages, pages))
    }

    fn is_idle(&self, thread: usize) -> bool {
        self.untold.iter().all(|(t, _)| *t != thread)
    }

    fn block(&self, index: usize) -> Option<usize> {
        let index = index.checked_rem(self.blocks.len())?;
        self.is_idle(self.blocks[index].owner).then_some(index)
    }

    fn marked(&self, range: Range<u64>) -> RangeSet {
        let mut set = RangeSet::default();
        self.away.range(range).for_each(|(&address, _)| set.insert(address..address + PAGE));
        set
    }

    /// What is mapped is registered, as far as the kernel proves it: not while a change is untold.
    fn register(&mut self) {
        self.blocks.iter_mut().for_each(|block| block.registered = true);
        let mapped: Vec<Range<u64>> = self.blocks.iter().map(|block| span(&block.pages)).collect();
        for range in mapped {
            for part in self.tables.unregistered_parts(SPACE, range) {
                let marked = self.marked(part.clone());
                self.tables.register(SPACE, part, &marked);
            }
        }
    }

    fn evict(&mut self, block: usize, which: u32) {
        // MOVE is refused while a change is untold.
        if !self.untold.is_empty() {
            return;
        }
        self.register();
        let pages = self.blocks[block].pages.clone();
        let victims: Vec<PageAddr> = pages
            .filter(|page| which >> (page % 32) & 1 == 1 && !self.away.contains_key(&at(*page)))
            .map(|page| PageAddr::containing(at(page)))
            .collect();
        let mut leaving = Vec::new();
        self.tables.begin_evict(SPACE, &victims, &mut leaving);
        assert_eq!(leaving.len(), victims.len(), "what is mapped is registered");
        for (page, slot) in leaving {
            let tag = self.next_tag;
            self.next_tag += 1;
            self.away.insert(page.get(), tag);
            self.tables.marked(slot, (SPACE, page));
            self.tables.finish_evict(slot, EvictOutcome::Moved(hash(tag)), &mut Vec::new());
            for (slot, id, check) in self.tables.start_write(AGENT, 1) {
                assert_eq!(check, hash(tag));
                self.agent.insert(id, tag);
                self.tables.written(slot, true);
            }
        }
    }

    fn unmap(&mut self, block: usize) {
        let Block { pages, owner, registered } = self.blocks.swap_remove(block);
        self.fresh.remove(span(&pages));
        self.away.retain(|address, _| !span(&pages).contains(address));
        if registered {
            self.untold.push((owner, Event::Change(Change::Unmap(span(&pages)))));
        }
    }

    fn remap(&mut self, block: usize, to: u64) {
        let Block { pages: from, owner, registered } = &self.blocks[block];
        let (from, owner, registered) = (from.clone(), *owner, *registered);
        let target = to..to + (from.end - from.start);
        if !self.is_free(&target) {
            return;
        }
        let length = (from.end - from.start) * PAGE;
        let remap = Remap { from: at(from.start), to: at(to), length };
        let moved: Vec<(u64, u64)> =
            self.away.range(remap.source()).map(|(&address, &tag)| (address, tag)).collect();
        for (address, _) in &moved {
            self.away.remove(address);
        }
        self.away.extend(moved.into_iter().map(|(a, tag)| (a - remap.from + remap.to, tag)));
        self.blocks[block].pages = target;
        let fresh: Vec<Range<u64>> = self.fresh.overlaps(remap.source()).collect();
        self.fresh.remove(remap.source());
        let there = |address| address - remap.from + remap.to;
        fresh.into_iter().for_each(|r| self.fresh.insert(there(r.start)..there(r.end)));
        if registered {
            self.untold.push((owner, Event::Change(Change::Remap(remap))));
        }
    }

    fn grow(&mut self, block: usize, pages: u64) {
        let end = self.blocks[block].pages.end;
        if self.is_free(&(end..end + pages)) {
            self.blocks[block].pages.end += pages;
            // Elsewhen it may have been touched.
            if self.blocks[block].registered && !(self.untold.is_empty() && self.told.is_empty()) {
                self.fresh.insert(at(end)..at(end + pages));
            }
            self.grown = true;
        }
    }

    fn discard(&mut self, block: usize, which: u32) {
        for page in self.blocks[block].pages.clone().filter(|page| which >> (page % 32) & 1 == 1) {
            self.away.remove(&at(page));
        }
    }

    fn fork(&mut self, thread: usize) {
        let (away, grown) = (self.away.clone(), self.fresh.clone());
        let mut memory = Memory { away, grown, ..Memory::default() };
        for block in self.blocks.iter().filter(|block| block.registered) {
            memory.registered.insert(span(&block.pages));
        }
        self.untold.push((thread, Event::Fork(memory)));
    }

    /// `made`: the changes as they were made, and when they were told.
    fn be_born(&mut self, memory: &Memory, told: usize, made: &[(usize, Change)]) {
        let (order, changes): (Vec<usize>, Vec<Change>) = made.iter().cloned().unzip();
        let before: Vec<bool> = order.iter().map(|&order| order < told).collect();
        let mut inherited = vec![false; changes.len()];
        let mut probed = BTreeSet::new();
        for birth in self.tables.births(CHILD, &changes, &before) {
            let ask = |ask: Ask| match ask {
                Ask::Registered(part) => Some(memory.registered.contains(part.start)),
                Ask::Page(at) => memory.has(at, &mut probed),
            };
            match birth.inherited(ask) {
                Ok(made) => made.into_iter().for_each(|index| inherited[index] = true),
                Err(_) => {
                    self.ended = true;
                    self.doubts += 1;
                    return;
                }
            }
        }
        for (change, _) in changes.iter().zip(inherited).filter(|(_, inherited)| *inherited) {
            self.apply(CHILD, change);
        }
        for (&address, &tag) in &memory.away {
            match self.tables.fault((CHILD, PageAddr::containing(address))) {
                FaultAction::Fetch(content) => {
                    assert_eq!(content.hash, hash(tag), "a child has wrong bytes at {address:x}");
                    self.inherited += 1;
                }
                // It is seen, and ends the workload.
                FaultAction::Zero if self.grown => self.ended = true,
                other => panic!("{address:x} is away in a child, but to the tables {other:?}"),
            }
        }
        self.tables.drop_space(CHILD);
    }

    fn apply(&mut self, space: SpaceId, change: &Change) {
        match change {
            Change::Unmap(range) => self.tables.unmap(space, range.clone()),
            Change::Remap(remap) => self.tables.remap(space, *remap),
        }
    }

    fn marked_in(&self, changes: &[Change]) -> RangeSet {
        let mut marked = RangeSet::default();
        for range in concerned(changes) {
            self.marked(range).iter().for_each(|range| marked.insert(range));
        }
        marked
    }

    fn tell(&mut self, which: usize) {
        let Some(index) = which.checked_rem(self.untold.len()) else { return };
        let (thread, change) = self.untold.remove(index);
        if let Event::Change(Change::Remap(remap)) = &change {
            // Of what has been left it tells next.
            self.untold.push((thread, Event::Change(Change::Unmap(remap.source()))));
        }
        self.told.push(change);
        if !self.untold.is_empty() {
            return;
        }
        self.fresh = RangeSet::default();
        let mut events = std::mem::take(&mut self.told);
        drop_echoes(&mut events, Event::change);
        let numbered = || events.iter().enumerate();
        let told: Vec<(usize, Change)> =
            numbered().filter_map(|(told, event)| Some((told, event.change()?))).collect();
        let changes: Vec<Change> = told.iter().map(|(_, change)| change.clone()).collect();
        let marked = self.marked_in(&changes);
        let Ok(order) = self.tables.order(SPACE, &changes, &marked) else {
            self.ended = true;
            return;
        };
        let made: Vec<(usize, Change)> =
            order.into_iter().map(|index| told[index].clone()).collect();
        for (told, event) in numbered() {
            if let Event::Fork(memory) = event {
                self.tables.fork(SPACE, CHILD);
                self.be_born(memory, told, &made);
            }
        }
        made.iter().for_each(|(_, change)| self.apply(SPACE, change));
        for range in contested(&changes).iter() {
            self.tables.forget_unmarked(SPACE, range, &marked);
        }
    }

    fn tell_all(&mut self, first: usize) {
        while !self.untold.is_empty() {
            self.tell(first);
        }
    }

    fn step(&mut self, op: &Op) {
        if self.ended {
            return;
        }
        match *op {
            Op::Map(thread, from, count) => {
                let pages = from..from + count;
                if self.is_free(&pages) {
                    self.blocks.push(Block { pages, owner: thread, registered: false });
                }
            }
            Op::Evict(block, which) => {
                if let Some(block) = self.block(block) {
                    self.evict(block, which);
                }
            }
            Op::Unmap(block) => {
                if let Some(block) = self.block(block) {
                    self.unmap(block);
                }
            }
            Op::Remap(block, to) => {
                if let Some(block) = self.block(block) {
                    self.remap(block, to);
                }
            }
            Op::Give(block, thread) => {
                if let Some(block) = self.block(block) {
                    self.blocks[block].owner = thread;
                }
            }
            Op::Grow(block, pages) => {
                if let Some(block) = self.block(block) {
                    self.grow(block, pages);
                }
            }
            Op::Discard(block, which) => {
                if let Some(block) = self.block(block) {
                    self.discard(block, which);
                }
            }
            Op::Fork(thread) if self.is_idle(thread) => self.fork(thread),
            Op::Fork(_) => {}
            Op::Tell(which) => self.tell(which),
            Op::TellAll(first) => self.tell_all(first),
        }
    }

    fn check(&mut self) {
        self.tell_all(0);
        if self.ended {
            return;
        }
        self.register();
        // What was discarded.
        let all = at(0)..at(PAGES);
        self.tables.forget_unmarked(SPACE, all.clone(), &self.marked(all));
        let mut contents = BTreeSet::new();
        for (&address, &tag) in &self.away {
            let page = PageAddr::containing(address);
            match self.tables.fault((SPACE, page)) {
                FaultAction::Fetch(Content { id, hash: check, .. }) => {
                    assert_eq!(
                        (self.agent[&id], check),
                        (tag, hash(tag)),
                        "wrong bytes at {page:?}"
                    );
                    contents.insert(id);
                }
                // What grew without a word is not told apart from what was there before. Its marker is seen, and ends the workload.
                FaultAction::Zero if self.grown => self.ended = true,
                other => panic!("{page:?} is away, but to the tables it is {other:?}"),
            }
        }
        while self.tables.bury(1) {}
        assert_eq!(self.tables.remote_pages(), contents.len() as u64, "contents leak");
        assert_eq!(self.tables.free_slots(), PAGES as usize, "slots leak");
    }
}

fn op() -> impl Strategy<Value = Op> {
    let any_block = || 0..8usize;
    prop_oneof![
        6 => (0..THREADS, 0..PAGES, 1..8u64).prop_map(|(t, f, n)| Op::Map(t, f, n)),
        6 => (any_block(), any::<u32>()).prop_map(|(b, w)| Op::Evict(b, w)),
        2 => any_block().prop_map(|b| Op::Evict(b, u32::MAX)),
        5 => any_block().prop_map(Op::Unmap),
        8 => (any_block(), 0..PAGES).prop_map(|(b, to)| Op::Remap(b, to)),
        2 => (any_block(), 0..THREADS).prop_map(|(b, t)| Op::Give(b, t)),
        1 => (any_block(), 1..4u64).prop_map(|(b, n)| Op::Grow(b, n)),
        1 => (any_block(), any::<u32>()).prop_map(|(b, w)| Op::Discard(b, w)),
        4 => (0..THREADS).prop_map(Op::Fork),
        5 => (0..THREADS).prop_map(Op::Tell),
        3 => (0..THREADS).prop_map(Op::TellAll),
    ]
}

/// Whether the workload was not stopped, for a doubt about what has moved where.
fn run(ops: &[Op]) -> bool {
    !play(ops).ended
}

fn play(ops: &[Op]) -> Model {
    let mut model = Model::new();
    ops.iter().for_each(|op| model.step(op));
    model.check();
    model
}

#[test]
fn pages_are_found_in_whatever_order_changes_are_told() {
    let default = ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource(
            "proptest-regressions",
        ))),
        ..ProptestConfig::default()
    };
    let config = ProptestConfig { cases: default.cases.max(4000), ..default };
    let (inherited, doubts) = (Cell::new(0), Cell::new(0));
    let cases = (any::<bool>(), prop::collection::vec(op(), 1..60));
    let result = TestRunner::new(config).run(&cases, |(grow, mut ops)| {
        // With growth a page may not be found, which is seen. Without it all are.
        ops.retain(|op| grow || !matches!(op, Op::Grow(..)));
        let model = play(&ops);
        inherited.set(inherited.get() + model.inherited);
        doubts.set(doubts.get() + model.doubts);
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    let (inherited, doubts) = (inherited.get(), doubts.get());
    assert!(doubts * 1000 < inherited, "{doubts} doubts, {inherited} pages of children");
}

/// Two blocks of two threads, both away: the first is freed, and the second moves into the hole.
fn freed_and_refilled(then: &[Op]) {
    let mut ops =
        vec![Op::Map(0, 0, 4), Op::Map(1, 8, 4), Op::Evict(0, u32::MAX), Op::Evict(1, u32::MAX)];
    ops.extend_from_slice(then);
    assert!(run(&ops), "the workload was stopped");
}

#[test]
fn a_block_that_moved_to_where_another_was_freed_is_there_in_both_orders() {
    for first in [0, 1] {
        freed_and_refilled(&[Op::Unmap(0), Op::Remap(0, 0), Op::Tell(first)]);
        freed_and_refilled(&[Op::Unmap(0), Op::Remap(0, 0), Op::TellAll(first)]);
    }
}

#[test]
fn two_blocks_that_moved_one_behind_the_other_are_there_in_both_orders() {
    for first in [0, 1] {
        freed_and_refilled(&[Op::Remap(0, 20), Op::Remap(1, 0), Op::Tell(first)]);
        freed_and_refilled(&[Op::Remap(0, 20), Op::Remap(1, 0), Op::TellAll(first)]);
    }
}

/// One thread moves its block away and back without end, while another makes a change that is told late.
#[test]
fn a_block_that_comes_and_goes_is_where_it_is() {
    for moves in 1..7 {
        let mut ops =
            vec![Op::Map(0, 0, 4), Op::Map(1, 8, 4), Op::Evict(0, u32::MAX), Op::Unmap(1)];
        for n in 0..moves {
            // Of the two changes that are untold the second is told.
            ops.extend([Op::Remap(0, [20, 0][n % 2]), Op::Tell(1)]);
        }
        assert!(run(&ops), "the workload was stopped after {moves} moves");
    }
}

/// Three threads: what there is at first and second, what is done, and where in between another forks. Whenever its fork is told.
fn forked_beside(blocks: &[Op], done: &[Op]) {
    for forked in 0..=done.len() {
        for first in 0..4 {
            let mut ops = blocks.to_vec();
            ops.extend([Op::Evict(0, u32::MAX), Op::Evict(1, u32::MAX)]);
            ops.extend_from_slice(&done[..forked]);
            ops.push(Op::Fork(2));
            ops.extend_from_slice(&done[forked..]);
            ops.push(Op::TellAll(first));
            let model = play(&ops);
            assert!(!model.ended, "fork {forked}, told from {first}: the workload was stopped");
            assert!(model.inherited > 0);
        }
    }
}

#[test]
fn a_child_has_what_its_parent_had_when_it_was_born() {
    let two = [Op::Map(0, 0, 4), Op::Map(1, 8, 4)];
    forked_beside(&two, &[Op::Remap(0, 20)]);
    // To where another was freed, or went away.
    forked_beside(&two, &[Op::Unmap(0), Op::Remap(0, 0)]);
    forked_beside(&two, &[Op::Remap(0, 20), Op::Remap(1, 0)]);
    // A block that grows, and moves on.
    forked_beside(&two, &[Op::Grow(0, 2), Op::Remap(0, 20)]);
}

#[test]
fn a_child_has_blocks_that_were_freed_one_after_another_since() {
    let mut ops: Vec<Op> = (0..8).map(|n| Op::Map(0, n, 1)).collect();
    ops.push(Op::Map(1, 16, 8));
    ops.extend((0..9).map(|n| Op::Evict(n, u32::MAX)));
    ops.push(Op::Fork(2));
    // All are told before the fork. The last block comes to be the first of the list.
    ops.extend([Op::Unmap(0), Op::Tell(1)]);
    ops.extend((1..8).rev().flat_map(|n| [Op::Unmap(n), Op::Tell(1)]));
    ops.extend([Op::Remap(0, 0), Op::TellAll(1)]);
    let model = play(&ops);
    assert_eq!((model.doubts, model.inherited), (0, 16));
}

/// A fork may be told of long after it was made.
#[test]
fn a_child_has_a_block_that_came_and_went_thousands_of_times_since() {
    let mut ops = vec![Op::Map(0, 0, 4), Op::Evict(0, u32::MAX), Op::Fork(2)];
    for n in 0..5001 {
        // Of what it has left it tells too.
        ops.extend([Op::Remap(0, [20, 0][n % 2]), Op::Tell(1), Op::Tell(1)]);
    }
    ops.push(Op::TellAll(0));
    let model = play(&ops);
    assert_eq!((model.doubts, model.inherited), (0, 4));
}

/// The hole that a block has left looks as if it were there.
#[test]
fn what_grew_into_a_hole_is_not_taken_for_what_left_it() {
    let ops = [
        Op::Map(0, 0, 4),
        Op::Map(1, 4, 4),
        Op::Map(2, 20, 4),
        Op::Evict(1, u32::MAX),
        Op::Evict(2, u32::MAX),
        Op::Unmap(2),
        Op::Remap(1, 20),
        Op::Grow(0, 4),
        Op::Fork(0),
        Op::TellAll(0),
    ];
    assert_eq!(play(&ops).doubts, 1);
}
