//! Threads free and move memory, and what they did is told late and in another order: the tables must still know which page is where.
//!
//! The model has addresses, blocks of memory that belong to threads, and for each thread at most one change that has been made and not been told of
//! (the kernel lets a thread go on only when its change has been read). Threads use only what is theirs, or free. What has been told is applied when
//! nothing is untold.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use gms_pager::page_map::{Content, PAGE};
use gms_pager::range_set::RangeSet;
use gms_pager::tables::{Change, EvictOutcome, FaultAction, Remap, Tables, contested, drop_echoes};
use gms_policy::ids::{AgentId, ContentId, PageAddr, SpaceId};
use proptest::prelude::*;

const SPACE: SpaceId = SpaceId(1);
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
    changes.iter().flat_map(|change| std::iter::once(change.left()).chain(change.reached()))
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

struct Model {
    tables: Tables,
    blocks: Vec<Block>,
    /// What pages hold that are away, by address: their markers are there.
    away: BTreeMap<u64, u64>,
    agent: BTreeMap<ContentId, u64>,
    untold: Vec<(usize, Change)>,
    told: Vec<Change>,
    next_tag: u64,
    /// The workload was stopped.
    ended: bool,
}

impl Model {
    fn new() -> Model {
        let mut tables = Tables::new(PAGES as u32, 8).unwrap();
        tables.add_space(SPACE);
        let (away, agent) = (BTreeMap::new(), BTreeMap::new());
        let (blocks, untold, told) = (Vec::new(), Vec::new(), Vec::new());
        Model { tables, blocks, away, agent, untold, told, next_tag: 1, ended: false }
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
        self.away.retain(|address, _| !span(&pages).contains(address));
        if registered {
            self.untold.push((owner, Change::Unmap(span(&pages))));
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
        if registered {
            self.untold.push((owner, Change::Remap(remap)));
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
        if let Change::Remap(remap) = &change {
            // Of what has been left it tells next.
            self.untold.push((thread, Change::Unmap(remap.source())));
        }
        self.told.push(change);
        if !self.untold.is_empty() {
            return;
        }
        let mut told = std::mem::take(&mut self.told);
        drop_echoes(&mut told, |change| Some(change.clone()));
        let marked = self.marked_in(&told);
        let order = self.tables.order(SPACE, &told, &marked);
        let Ok(order) = order else {
            self.ended = true;
            return;
        };
        for index in order {
            match &told[index] {
                Change::Unmap(range) => self.tables.unmap(SPACE, range.clone()),
                Change::Remap(remap) => self.tables.remap(SPACE, *remap),
            }
        }
        for range in contested(&told).iter() {
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
        5 => (0..THREADS).prop_map(Op::Tell),
        3 => (0..THREADS).prop_map(Op::TellAll),
    ]
}

/// Whether the workload was not stopped, for a doubt about what has moved where.
fn run(ops: &[Op]) -> bool {
    let mut model = Model::new();
    ops.iter().for_each(|op| model.step(op));
    model.check();
    !model.ended
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(4000), failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn pages_are_found_in_whatever_order_changes_are_told(ops in prop::collection::vec(op(), 1..60)) {
        run(&ops);
    }
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
