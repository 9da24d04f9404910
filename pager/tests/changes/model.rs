//! The model: one address space of several threads, as the kernel changes it and tells of it, and what its pages hold.
//!
//! What the kernel does here (fs/userfaultfd.c, mm/mremap.c, mm/mmap.c):
//! - A change is made under the mmap lock and told of after it (`userfaultfd_unmap_complete`, `mremap_userfaultfd_complete`,
//!   `dup_userfaultfd_complete`), and its thread sleeps in `userfaultfd_event_wait_completion` until that has been read: one untold change a
//!   thread, and those of several threads in any order. Mremap tells of the move first, then that its source is not mapped.
//! - Memory without a userfaultfd tells nothing (`userfaultfd_unmap_prep`, `mremap_userfaultfd_prep`). Memory that grows in place tells nothing
//!   either and is of the same userfaultfd (mremap's `expand_vma` keeps the context and raises no event).
//! - While a change is untold (`mmap_changing`), COPY, ZEROPAGE and MOVE fail with EAGAIN: no page of registered memory comes or goes.
//! - MADV_DONTNEED takes pages and markers, and is no change (`userfaultfd_remove` tells of it by itself).
//! - A child has its parent's memory and markers as they are at the fork (`dup_userfaultfd`, `copy_page_range`).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use gms_pager::page_map::{Content, PAGE};
use gms_pager::range_set::RangeSet;
use gms_pager::tables::{
    Ask, Change, EvictOutcome, FaultAction, Others, Place, Remap, Seen, Tables, WriteOutcome,
    contested, drop_echoes,
};
use gms_policy::ids::{AgentId, ContentId, PageAddr, SpaceId};
use gms_policy::redundancy::AgentSet;

use crate::histories::Known;

const SPACE: SpaceId = SpaceId(1);
const CHILD: SpaceId = SpaceId(2);
const AGENT: AgentId = AgentId(0);
pub(crate) const PAGES: u64 = 32;
pub(crate) const THREADS: usize = 3;

pub(crate) fn at(page: u64) -> u64 {
    (1 << 30) + page * PAGE
}

fn span(pages: &Range<u64>) -> Range<u64> {
    at(pages.start)..at(pages.end)
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

fn hash(tag: u64) -> u64 {
    tag.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Map(usize, u64, u64),
    Evict(usize, u32),
    /// As `Evict`, but a change begins before markers are left: they are when it is known what has changed.
    Leave(usize, u32),
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

/// What lies where.
#[derive(Clone, Default)]
pub(crate) struct Memory {
    /// Mapped, and told of.
    pub registered: RangeSet,
    /// What pages hold that are away, by address: their markers are there.
    pub away: BTreeMap<u64, u64>,
    /// The same of pages that have no markers yet.
    pub leaving: BTreeMap<u64, u64>,
    /// Addresses of pages that are in memory.
    pub present: BTreeSet<u64>,
}

impl Memory {
    /// What a probe finds in a child, if it can be made: it leaves zeros where nothing is.
    fn has(&mut self, at: u64) -> Option<bool> {
        assert!(!self.leaving.contains_key(&at), "a probe leaves zeros where a marker is to be");
        let mapped = self.registered.contains(at);
        let there = self.away.contains_key(&at) || !self.present.insert(at);
        mapped.then_some(there)
    }

    pub(crate) fn unmap(&mut self, range: &Range<u64>) {
        self.registered.remove(range.clone());
        for pages in [&mut self.away, &mut self.leaving] {
            pages.retain(|address, _| !range.contains(address));
        }
        self.present.retain(|address| !range.contains(address));
    }

    pub(crate) fn remap(&mut self, remap: &Remap) {
        let there = |address: u64| address - remap.from + remap.to;
        let source = remap.source();
        let registered: Vec<Range<u64>> = self.registered.overlaps(source.clone()).collect();
        let within = |pages: &BTreeMap<u64, u64>| -> Vec<(u64, u64)> {
            pages.range(source.clone()).map(|(a, t)| (there(*a), *t)).collect()
        };
        let (away, leaving) = (within(&self.away), within(&self.leaving));
        let present: Vec<u64> = self.present.range(source.clone()).copied().collect();
        self.unmap(&source);
        registered
            .into_iter()
            .for_each(|part| self.registered.insert(there(part.start)..there(part.end)));
        self.away.extend(away);
        self.leaving.extend(leaving);
        self.present.extend(present.into_iter().map(there));
    }
}

fn is_left_twice(changes: &[Change]) -> bool {
    let mut left = RangeSet::default();
    changes.iter().any(|change| {
        let again = left.overlaps(change.left()).next().is_some();
        left.insert(change.left());
        again
    })
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

/// Why the workload was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Nobody could know what has moved where, or what a child has: several histories that the kernel allows show the same, with different pages.
    Doubt,
    /// Only one history shows this. Gms has not found it: it tries orders in which what was left makes way for what came there, and for a child but one of
    /// those that lead to the same markers. Seldom, and it is an end, not a wrong byte.
    Vain,
    /// A marker of which nothing is known was seen.
    Marker,
}

impl End {
    fn of(in_doubt: bool) -> Option<End> {
        Some(if in_doubt { End::Doubt } else { End::Vain })
    }
}

pub(crate) struct Model {
    tables: Tables,
    blocks: Vec<Block>,
    memory: Memory,
    /// Where the tables may know of a page that is not there: it was away, and was discarded. (That it has no marker is seen before it is used.)
    discarded: BTreeSet<u64>,
    agent: BTreeMap<ContentId, u64>,
    /// Slots of pages that have no markers yet, and what they hold.
    leaving: Vec<(u32, u64)>,
    untold: Vec<(usize, Event)>,
    told: Vec<Event>,
    /// What was known of the memory before all changes that are untold, or told and not applied.
    known: Known,
    /// Where changes have met since what is registered was proved.
    unproved: RangeSet,
    /// Some memory has grown, at any time.
    grows: bool,
    /// Of the changes that were applied last, two have left the same addresses.
    left_twice: bool,
    next_tag: u64,
    /// Pages of children that were found.
    pub inherited: u32,
    /// Moments at which all was told and every page was looked for.
    pub looks: u32,
    pub end: Option<End>,
}

impl Model {
    pub(crate) fn new() -> Model {
        let mut tables = Tables::new(PAGES as u32, 8).unwrap();
        tables.add_space(SPACE);
        Model {
            tables,
            blocks: Vec::new(),
            memory: Memory::default(),
            discarded: BTreeSet::new(),
            agent: BTreeMap::new(),
            leaving: Vec::new(),
            untold: Vec::new(),
            told: Vec::new(),
            known: Known::default(),
            unproved: RangeSet::default(),
            grows: false,
            left_twice: false,
            next_tag: 1,
            inherited: 0,
            looks: 0,
            end: None,
        }
    }

    fn is_quiet(&self) -> bool {
        self.untold.is_empty() && self.told.is_empty()
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
        let away = self.memory.away.range(range);
        away.for_each(|(&address, _)| set.insert(address..address + PAGE));
        set
    }

    /// A change begins.
    fn begin(&mut self) {
        if self.is_quiet() {
            self.known = Known::new(&self.memory);
        }
    }

    /// What is mapped is registered, as far as the kernel proves it: not while a change is untold. What only counts as registered is found by that proof.
    fn register(&mut self) {
        let known = self.tables.registered(SPACE);
        for part in known.iter().flat_map(|range| self.memory.registered.gaps(range)) {
            self.tables.unregister(SPACE, part);
        }
        self.unproved = RangeSet::default();
        for block in &mut self.blocks {
            block.registered = true;
            self.memory.registered.insert(span(&block.pages));
        }
        let mapped: Vec<Range<u64>> = self.blocks.iter().map(|block| span(&block.pages)).collect();
        for range in mapped {
            for part in self.tables.unregistered_parts(SPACE, range) {
                let marked = self.marked(part.clone());
                self.discarded.retain(|address| !part.contains(address));
                self.tables.register(SPACE, part, &marked);
            }
        }
    }

    /// The pages are written to, and then leave.
    fn leave(&mut self, block: usize, which: u32) {
        // MOVE is refused while a change is untold.
        if !self.untold.is_empty() {
            return;
        }
        self.register();
        let pages = self.blocks[block].pages.clone();
        let victims: Vec<PageAddr> = pages
            .filter(|page| which >> (page % 32) & 1 == 1)
            .map(|page| PageAddr::containing(at(page)))
            .filter(|page| !self.memory.away.contains_key(&page.get()))
            .filter(|page| !self.memory.leaving.contains_key(&page.get()))
            .collect();
        let mut leaving = Vec::new();
        self.tables.begin_evict(SPACE, &victims, &mut leaving);
        assert_eq!(leaving.len(), victims.len(), "what is mapped is registered");
        for (page, slot) in leaving {
            let tag = self.next_tag;
            self.next_tag += 1;
            self.memory.leaving.insert(page.get(), tag);
            self.memory.present.remove(&page.get());
            self.discarded.remove(&page.get());
            self.leaving.push((slot, tag));
        }
    }

    /// Pages that have left get their markers, and are written. As `victims::finish`.
    fn finish(&mut self) {
        if !self.is_quiet() || self.end.is_some() {
            return;
        }
        for (slot, tag) in std::mem::take(&mut self.leaving) {
            let unmarked: Vec<Place> = self.tables.unmarked(slot).collect();
            for place in unmarked {
                let address = place.1.get();
                if !self.memory.registered.contains(address) {
                    self.tables.unowned(place);
                    continue;
                }
                let found = self.memory.leaving.remove(&address);
                assert_eq!(found, Some(tag), "a marker is left at {address:x}");
                self.memory.away.insert(address, tag);
                self.tables.marked(slot, place);
            }
            self.tables.finish_evict(slot, EvictOutcome::Moved(hash(tag)), &mut Vec::new());
            for (slot, id, check) in self.tables.start_write(AgentSet::of(AGENT), 1) {
                assert_eq!(check, hash(tag));
                self.agent.insert(id, tag);
                self.tables.written(slot, AGENT, WriteOutcome::Stored);
            }
        }
        assert!(self.memory.leaving.is_empty(), "lost: {:x?}", self.memory.leaving);
    }

    fn unmap(&mut self, block: usize) {
        self.begin();
        let Block { pages, owner, registered } = self.blocks.swap_remove(block);
        let range = span(&pages);
        self.memory.unmap(&range);
        self.discarded.retain(|address| !range.contains(address));
        if registered {
            self.untold.push((owner, Event::Change(Change::Unmap(range))));
        }
    }

    fn remap(&mut self, block: usize, to: u64) {
        let Block { pages: from, owner, registered } = &self.blocks[block];
        let (from, owner, registered) = (from.clone(), *owner, *registered);
        let target = to..to + (from.end - from.start);
        if !self.is_free(&target) {
            return;
        }
        self.begin();
        let length = (from.end - from.start) * PAGE;
        let remap = Remap { from: at(from.start), to: at(to), length };
        self.memory.remap(&remap);
        let moved = |address: u64| match remap.source().contains(&address) {
            true => address - remap.from + remap.to,
            false => address,
        };
        self.discarded = self.discarded.iter().copied().map(moved).collect();
        self.blocks[block].pages = target;
        if registered {
            self.untold.push((owner, Event::Change(Change::Remap(remap))));
        }
    }

    fn grow(&mut self, block: usize, pages: u64) {
        let end = self.blocks[block].pages.end;
        if !self.is_free(&(end..end + pages)) {
            return;
        }
        let grown = end..end + pages;
        self.grows = true;
        if self.blocks[block].registered {
            self.memory.registered.insert(span(&grown));
            self.known.has_grown |= !self.is_quiet();
        }
        if self.is_quiet() {
            // Who touches it is served.
            self.memory.present.extend(grown.map(at));
        }
        self.blocks[block].pages.end += pages;
    }

    fn discard(&mut self, block: usize, which: u32) {
        for page in self.blocks[block].pages.clone().filter(|page| which >> (page % 32) & 1 == 1) {
            self.memory.present.remove(&at(page));
            if self.memory.away.remove(&at(page)).is_some() {
                self.discarded.insert(at(page));
            }
        }
    }

    fn fork(&mut self, thread: usize) {
        self.begin();
        self.untold.push((thread, Event::Fork(self.memory.clone())));
    }

    /// `made`: the changes as they were made, and when they were told.
    fn be_born(&mut self, memory: &Memory, told: usize, made: &[(usize, Change)], others: &Others) {
        let (order, changes): (Vec<usize>, Vec<Change>) = made.iter().cloned().unzip();
        let before: Vec<bool> = order.iter().map(|&order| order < told).collect();
        let mut inherited = vec![false; changes.len()];
        let mut child = memory.clone();
        for birth in self.tables.births(SPACE, &changes, &before, others) {
            let ask = |ask: Ask| match ask {
                Ask::Registered(part) => Some(child.registered.contains(part.start)),
                Ask::Page(at) => child.has(at),
                Ask::Grown(at) => Some(self.memory.registered.contains(at)),
            };
            match birth.inherited(ask) {
                Ok(made) => made.into_iter().for_each(|index| inherited[index] = true),
                Err(_) => {
                    self.end =
                        End::of(self.known.birth_is_in_doubt(&changes, &self.memory, memory));
                    return;
                }
            }
        }
        self.tables.fork(SPACE, CHILD);
        for (change, _) in changes.iter().zip(inherited).filter(|(_, inherited)| *inherited) {
            self.apply(CHILD, change);
        }
        for (&address, &tag) in &memory.away {
            match self.tables.fault((CHILD, PageAddr::containing(address))) {
                FaultAction::Fetch(content) => {
                    assert_eq!(content.hash, hash(tag), "a child has wrong bytes at {address:x}");
                    self.inherited += 1;
                }
                FaultAction::Zero if self.may_be_lost() => self.end = Some(End::Marker),
                other => panic!("{address:x} is away in a child, but to the tables {other:?}"),
            }
        }
        for &(slot, tag) in &self.leaving {
            let unmarked = self.tables.unmarked(slot).filter(|place| place.0 == CHILD);
            let unmarked = unmarked.map(|place| place.1.get());
            // No marker can be left where nothing is.
            let unmarked: Vec<u64> =
                unmarked.filter(|&at| memory.registered.contains(at)).collect();
            let is = memory.leaving.iter().filter(|(_, held)| **held == tag);
            let is: Vec<u64> = is.map(|(address, _)| *address).collect();
            assert_eq!(unmarked, is, "where a page is that is leaving");
        }
        self.tables.drop_space(CHILD);
    }

    fn apply(&mut self, space: SpaceId, change: &Change) {
        match change {
            Change::Unmap(range) => self.tables.unmap(space, range.clone()),
            Change::Remap(remap) => self.tables.remap(space, *remap),
        }
    }

    fn seen(&self, changes: &[Change]) -> Seen {
        let mut seen = Seen::default();
        for range in changes.iter().flat_map(Change::left_and_reached) {
            self.marked(range).iter().for_each(|range| seen.marked.insert(range));
        }
        for range in self.tables.unmarked_places(SPACE, changes).iter() {
            self.memory.registered.overlaps(range).for_each(|range| seen.mapped.insert(range));
        }
        seen
    }

    fn tell(&mut self, which: usize) {
        let Some(index) = which.checked_rem(self.untold.len()) else { return };
        let (thread, change) = self.untold.remove(index);
        if let Event::Change(Change::Remap(remap)) = &change {
            // Of what has been left it tells next.
            self.untold.push((thread, Event::Change(Change::Unmap(remap.source()))));
        }
        self.told.push(change);
        if self.untold.is_empty() {
            self.apply_told();
        }
    }

    /// Whether the tables may know nothing of a page that has a marker, which is seen when it is used, and ends the workload: changes have left the same
    /// memory, without any that led there. Only what grew in place between them makes that possible, and of that the kernel tells nothing: it looks as if
    /// the second had left what the first had.
    fn may_be_lost(&self) -> bool {
        self.known.has_grown && self.left_twice
    }

    /// What has been told is applied when nothing is untold.
    fn apply_told(&mut self) {
        let mut events = std::mem::take(&mut self.told);
        drop_echoes(&mut events, Event::change);
        let numbered = || events.iter().enumerate();
        let told: Vec<(usize, Change)> =
            numbered().filter_map(|(told, event)| Some((told, event.change()?))).collect();
        let changes: Vec<Change> = told.iter().map(|(_, change)| change.clone()).collect();
        self.left_twice = is_left_twice(&changes);
        let seen = self.seen(&changes);
        let Ok(orders) = self.tables.order(SPACE, &changes, &seen) else {
            self.end = End::of(self.known.order_is_in_doubt(&changes, &self.memory));
            return;
        };
        let made: Vec<(usize, Change)> =
            orders.first.iter().map(|&index| told[index].clone()).collect();
        for (told, event) in numbered() {
            if let Event::Fork(memory) = event
                && self.end.is_none()
            {
                self.be_born(memory, told, &made, &orders.others);
            }
        }
        made.iter().for_each(|(_, change)| self.apply(SPACE, change));
        for range in contested(&changes).iter() {
            self.tables.forget_unmarked(SPACE, range.clone(), &seen.marked);
            self.unproved.insert(range);
        }
        self.finish();
        if self.end.is_none() {
            self.look();
        }
    }

    pub(crate) fn tell_all(&mut self, first: usize) {
        while !self.untold.is_empty() {
            self.tell(first);
        }
    }

    pub(crate) fn step(&mut self, op: &Op) {
        if self.end.is_some() {
            return;
        }
        match *op {
            Op::Map(thread, from, count) => {
                let pages = from..from + count;
                if self.is_free(&pages) {
                    // Nobody is told, and who touches it is not kept from it.
                    self.memory.present.extend(pages.clone().map(at));
                    self.blocks.push(Block { pages, owner: thread, registered: false });
                }
            }
            Op::Fork(thread) if self.is_idle(thread) => self.fork(thread),
            Op::Fork(_) => {}
            Op::Tell(which) => self.tell(which),
            Op::TellAll(first) => self.tell_all(first),
            Op::Evict(block, _)
            | Op::Leave(block, _)
            | Op::Unmap(block)
            | Op::Remap(block, _)
            | Op::Give(block, _)
            | Op::Grow(block, _)
            | Op::Discard(block, _) => {
                if let Some(block) = self.block(block) {
                    self.step_with(block, op);
                }
            }
        }
    }

    fn step_with(&mut self, block: usize, op: &Op) {
        match *op {
            Op::Evict(_, which) => {
                self.leave(block, which);
                self.finish();
            }
            Op::Leave(_, which) => self.leave(block, which),
            Op::Unmap(_) => self.unmap(block),
            Op::Remap(_, to) => self.remap(block, to),
            Op::Give(_, thread) => self.blocks[block].owner = thread,
            Op::Grow(_, pages) => self.grow(block, pages),
            Op::Discard(_, which) => self.discard(block, which),
            _ => {}
        }
    }

    /// What counts as registered is, and the other way round. (Where changes have met, an order that leads to the same markers may differ in that: each
    /// batch that is moved out proves its registration, and a fault elsewhere is not told. What has grown is not known yet.)
    fn check_registered(&self) {
        let known = self.tables.registered(SPACE);
        let is = &self.memory.registered;
        let more = known.iter().flat_map(|range| is.gaps(range));
        let less = is.iter().flat_map(|range| known.gaps(range)).filter(|_| !self.grows);
        for part in more.chain(less) {
            let proved = self.unproved.gaps(part);
            assert!(proved.is_empty(), "whether {proved:x?} is registered is not known");
        }
    }

    /// All that was told is applied, and whoever faults is served: every page is where it is, and what it was.
    fn look(&mut self) {
        self.looks += 1;
        self.check_registered();
        for address in (0..PAGES).map(at) {
            let page = PageAddr::containing(address);
            match (self.memory.away.get(&address), self.tables.fault((SPACE, page))) {
                (Some(tag), FaultAction::Fetch(Content { id, hash: check, .. })) => {
                    assert_eq!((self.agent[&id], check), (*tag, hash(*tag)), "bytes at {page:?}");
                }
                (Some(_), FaultAction::Zero) if self.may_be_lost() => {
                    self.end = Some(End::Marker);
                }
                (None, FaultAction::Zero) => {}
                (None, FaultAction::Fetch(_)) if self.discarded.contains(&address) => {}
                // It was taken for moved along.
                (None, FaultAction::Fetch(_)) if self.may_be_lost() => {
                    self.discarded.insert(address);
                }
                (tag, other) => panic!("{page:?} is {tag:?}, but to the tables it is {other:?}"),
            }
        }
    }

    pub(crate) fn check(&mut self) {
        self.tell_all(0);
        if self.end.is_some() {
            return;
        }
        self.register();
        self.finish();
        self.look();
        for address in std::mem::take(&mut self.discarded) {
            self.tables.discarded((SPACE, PageAddr::containing(address)));
        }
        while self.tables.bury(1) {}
        let away = self.memory.away.len();
        assert!(self.end.is_some() || self.tables.remote_pages() == away as u64, "contents leak");
        assert_eq!(self.tables.free_slots(), PAGES as usize, "slots leak");
    }
}
