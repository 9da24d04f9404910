//! In which order changes of an address space were made.
//!
//! Unmaps and remaps are told after the kernel has let its locks go: of several threads' changes a later one may be told first. What programs do with
//! memory that is theirs leads to one kind of surprise: a range that one thread has given up (by an unmap, or a remap to elsewhere), of which is told
//! late, has meanwhile become the target of another's remap. So changes are looked at when all that had begun have been told, together. The order in
//! which they were told is tried first; a remap to where something still is was made after one of those told later that made way for it,
//! and a remap of what is not known after one of those that brought something there. An order must lead pages to where the markers are now,
//! but for those that are to get theirs, which must be led to where memory is. If two do, and with different pages, it cannot be known what is where; of
//! those that lead the same ones there that counts which differs least from the one told (a child that was forked meanwhile may show more). No marker tells
//! where a page is that is to get one, or that it was unmapped: where there are such pages, orders that lead them elsewhere are tried in any case.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::page_map::PAGE;
use crate::range_set::RangeSet;

use gms_policy::ids::PageAddr;

/// Changes told late are looked for among so many of a group at most, and in so many steps.
const SEARCHED_MAX: usize = 64;
const STEPS_MAX: usize = 4096;
/// Most orders of a group that are told apart for the births of children.
const ORDERS_MAX: usize = 64;

/// Orders in which changes may have been made besides the one in which they are given: of those that concern one another, by the least place of one of them, the places
/// of all in each order; `None` if there are too many.
pub type Others = BTreeMap<usize, Option<Vec<Vec<usize>>>>;

/// The order in which changes were made, as far as it can be known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Orders {
    /// Indices of the changes, which are given in the order in which they were told: of the orders that lead to what is seen that which differs least from it.
    pub first: Vec<usize>,
    /// Others that lead to the same.
    pub others: Others,
}

impl Orders {
    /// As they were told.
    pub(super) fn as_told(count: usize) -> Orders {
        Orders { first: (0..count).collect(), others: Others::new() }
    }

    /// The same, but they may have been made in any other.
    pub fn unknown(changes: &[Change]) -> Orders {
        let others = contests(changes).into_iter().map(|group| (group[0], None)).collect();
        Orders { others, ..Orders::as_told(changes.len()) }
    }

    /// Of those at these places, as they were told, the order is another.
    pub(super) fn set(&mut self, group: &[usize], (first, others): GroupOrders) {
        for (&place, &member) in group.iter().zip(&first) {
            self.first[place] = group[member];
        }
        let others = others.map(|others| {
            let placed =
                |other: Vec<usize>| other.into_iter().map(|member| group[member]).collect();
            others.into_iter().map(placed).collect()
        });
        self.others.insert(group[0], others);
    }
}

/// Of changes that concern one another: the order, as indices, and others, as places in that.
pub(super) type GroupOrders = (Vec<usize>, Option<Vec<Vec<usize>>>);

/// It cannot be known which pages a remap has moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doubt;

/// A part of an address space that has moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remap {
    /// Where it was.
    pub from: u64,
    /// Where it is.
    pub to: u64,
    /// Bytes.
    pub length: u64,
}

impl Remap {
    /// The addresses that have been left.
    pub fn source(&self) -> Range<u64> {
        self.from..self.from + self.length
    }

    /// The addresses now.
    pub fn target(&self) -> Range<u64> {
        self.to..self.to + self.length
    }

    /// Where a page of the source is now.
    pub fn moved(&self, page: PageAddr) -> PageAddr {
        PageAddr::containing(page.get() - self.from + self.to)
    }
}

/// What has been told of where pages are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The range is no longer mapped.
    Unmap(Range<u64>),
    /// A part has moved.
    Remap(Remap),
}

impl Change {
    /// The addresses that have been left.
    pub fn left(&self) -> Range<u64> {
        match self {
            Change::Unmap(range) => range.clone(),
            Change::Remap(remap) => remap.source(),
        }
    }

    /// Those that have been reached.
    pub fn reached(&self) -> Option<Range<u64>> {
        match self {
            Change::Unmap(_) => None,
            Change::Remap(remap) => Some(remap.target()),
        }
    }

    /// Both.
    pub fn left_and_reached(&self) -> impl Iterator<Item = Range<u64>> {
        std::iter::once(self.left()).chain(self.reached())
    }
}

/// mremap is reported as REMAP, then as UNMAP of its source. That UNMAP says nothing new, and applied late could hit memory mapped there since:
/// removes it from `told`. `change` tells what change an element is, if it is one.
pub fn drop_echoes<T>(told: &mut Vec<T>, change: impl Fn(&T) -> Option<Change>) {
    let mut echoes: Vec<Range<u64>> = Vec::new();
    told.retain(|one| match change(one) {
        Some(Change::Remap(remap)) => {
            echoes.push(remap.source());
            true
        }
        Some(Change::Unmap(range)) => match echoes.iter().position(|echo| *echo == range) {
            Some(at) => {
                echoes.remove(at);
                false
            }
            None => true,
        },
        None => true,
    });
}

/// The changes that concern one another, by way of others too. Indices, in order.
pub(super) fn groups(changes: &[Change]) -> Vec<Vec<usize>> {
    let mut ranges: Vec<(Range<u64>, usize)> = Vec::new();
    for (index, change) in changes.iter().enumerate() {
        ranges.extend(change.left_and_reached().map(|range| (range, index)));
    }
    ranges.sort_unstable_by_key(|(range, _)| range.start);
    // Of each change the first of its group that is known; of that itself.
    let mut first: Vec<usize> = (0..changes.len()).collect();
    let find = |first: &[usize], mut index: usize| {
        while first[index] != index {
            index = first[index];
        }
        index
    };
    let (mut end, mut last) = (0, 0);
    for (range, index) in ranges {
        if range.start < end {
            let (one, other) = (find(&first, last), find(&first, index));
            first[one.max(other)] = one.min(other);
        }
        end = end.max(range.end);
        last = index;
    }
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for index in 0..changes.len() {
        groups.entry(find(&first, index)).or_default().push(index);
    }
    groups.into_values().collect()
}

/// Those whose order matters: one has reached what another has left, or reached.
pub(super) fn contests(changes: &[Change]) -> Vec<Vec<usize>> {
    let mut groups = groups(changes);
    groups.retain(|group| meet(group.iter().map(|&index| &changes[index])));
    groups
}

/// What these concern.
pub fn contested(changes: &[Change]) -> RangeSet {
    let mut contested = RangeSet::default();
    for change in contests(changes).into_iter().flatten().map(|index| &changes[index]) {
        change.left_and_reached().for_each(|range| contested.insert(range));
    }
    contested
}

fn meet<'a>(changes: impl Iterator<Item = &'a Change> + Clone) -> bool {
    let (mut others, mut left) = (RangeSet::default(), RangeSet::default());
    changes.clone().for_each(|change| others.insert(change.left()));
    let meets = |set: &RangeSet, range: Range<u64>| set.overlaps(range).next().is_some();
    // What two have left, one of them a remap, has grown again between them.
    let mut twice = false;
    for change in changes.clone().filter(|change| change.reached().is_some()) {
        twice |= meets(&left, change.left());
        left.insert(change.left());
    }
    let unmapped = changes.clone().filter(|change| change.reached().is_none());
    twice |= unmapped.map(Change::left).any(|range| meets(&left, range));
    twice || {
        let mut reached = changes.filter_map(Change::reached);
        reached.any(|reached| {
            let is_met = meets(&others, reached.clone());
            others.insert(reached);
            is_met
        })
    }
}

/// What was in the range that the change at this place unmaps, if it was not made, nor those at the places `unmade`: where it is now. The changes were made in this order.
pub fn if_unmade(changes: &[Change], place: usize, unmade: &BTreeSet<usize>) -> Vec<Part> {
    let mut places = Places { away: vec![(0..u64::MAX, 0)], ..Places::default() };
    let made = |place: &usize| !unmade.contains(place);
    (0..place).filter(made).for_each(|place| places.make(&changes[place]));
    places.away = places.away_in(&changes[place].left());
    // What a later one unmaps has no markers.
    let remaps = changes[place + 1..].iter().filter(|change| change.reached().is_some());
    remaps.for_each(|remap| places.make(remap));
    places.away
}

/// Addresses of pages, and where the first of them was before the changes.
pub type Part = (Range<u64>, u64);

/// What is known of where pages are.
#[derive(Clone, Default)]
pub(super) struct Places {
    away: Vec<Part>,
    /// Pages among them that have no markers yet, where they were before the changes.
    leaving: RangeSet,
    registered: RangeSet,
    concerned: RangeSet,
}

impl Places {
    /// Pages that are away, those of them that have no markers yet, and what is registered, of what the changes concern.
    pub(super) fn new(
        away: impl Iterator<Item = PageAddr>,
        leaving: impl Iterator<Item = PageAddr>,
        registered: RangeSet,
        concerned: RangeSet,
    ) -> Places {
        let away = set_of(away).iter().map(|range| (range.clone(), range.start)).collect();
        Places { away, leaving: set_of(leaving), registered, concerned }
    }

    pub(super) fn concerned(&self) -> impl Iterator<Item = Range<u64>> {
        self.concerned.iter()
    }

    pub(super) fn leaving(&self) -> &RangeSet {
        &self.leaving
    }

    /// Whether there is memory where a page without a marker may have come by the changes, made in any order, and none is now.
    fn may_be_elsewhere(&self, changes: &[Change], seen: &Seen) -> bool {
        let mut elsewhere = images(changes, &self.leaving);
        self.leaving.iter().for_each(|range| elsewhere.insert(range));
        now_at(&self.away, &self.leaving).iter().for_each(|range| elsewhere.remove(range));
        elsewhere.iter().any(|range| seen.mapped.overlaps(range).next().is_some())
    }

    pub(super) fn registered(&self) -> impl Iterator<Item = Range<u64>> {
        self.registered.iter()
    }

    /// What a remap leaves that none has reached was registered before them all.
    pub(super) fn begin_registered(&mut self, changes: &[Change]) {
        let mut reached = RangeSet::default();
        for change in changes {
            if let Some(target) = change.reached() {
                reached.gaps(change.left()).into_iter().for_each(|r| self.registered.insert(r));
                reached.insert(target);
            }
        }
    }

    fn taken(&self, range: Range<u64>) -> RangeSet {
        let mut taken = RangeSet::default();
        self.registered.overlaps(range.clone()).for_each(|part| taken.insert(part));
        self.away_in(&range).into_iter().for_each(|(part, _)| taken.insert(part));
        taken
    }

    pub(super) fn away_in(&self, range: &Range<u64>) -> Vec<Part> {
        let clip = |(at, began): &Part| {
            let part = at.start.max(range.start)..at.end.min(range.end);
            (part.start < part.end).then(|| (part.clone(), began + (part.start - at.start)))
        };
        self.away.iter().filter_map(clip).collect()
    }

    fn clear(&mut self, range: &Range<u64>) {
        let outside = [0..range.start, range.end..u64::MAX];
        self.away = outside.iter().flat_map(|part| self.away_in(part)).collect();
        self.registered.remove(range.clone());
    }

    pub(super) fn make(&mut self, change: &Change) {
        let Some(reached) = change.reached() else { return self.clear(&change.left()) };
        let left = change.left();
        let there = |at: u64| at - left.start + reached.start;
        let moved = self.away_in(&left);
        self.clear(&left);
        self.clear(&reached);
        self.away.extend(moved.into_iter().map(|(at, b)| (there(at.start)..there(at.end), b)));
        self.registered.insert(reached);
    }

    /// Makes the changes; whether there was nothing where they led, and none moved what another was to bring.
    pub(super) fn are_made_way_for(&mut self, changes: &[Change]) -> bool {
        let mut free = true;
        for (n, change) in changes.iter().enumerate() {
            free &= change.reached().is_none_or(|reached| self.taken(reached).is_empty());
            free &= !self.is_brought(change, changes[n + 1..].iter());
            self.make(change);
        }
        free
    }

    /// Whether nothing is known of what the change moves, and one of the others brings something there. (What is unmapped need not be known: it may have
    /// grown just before.)
    fn is_brought<'a>(&self, change: &Change, by: impl IntoIterator<Item = &'a Change>) -> bool {
        let left = change.left();
        matches!(change, Change::Remap(_))
            && self.registered.overlaps(left.clone()).next().is_none()
            && by.into_iter().filter_map(Change::reached).any(|r| overlap(r, left.clone()))
    }

    /// Whether one of two takes a page without a marker from where the other takes it, or to where it brings it.
    fn is_taken_along(&self, change: &Change, other: &Change) -> bool {
        let takes = |one: &Change, other: &Change| {
            let Change::Remap(remap) = one else { return false };
            let unmarked = now_at(&self.away_in(&remap.source()), &self.leaving);
            let there = |at: u64| at - remap.from + remap.to;
            let images = |at: Range<u64>| [there(at.start)..there(at.end), at];
            let left = other.left();
            unmarked.iter().flat_map(images).any(|at| overlap(at, left.clone()))
        };
        takes(change, other) || takes(other, change)
    }

    /// Whether the pages that are away in `part` are all in these ranges.
    pub(super) fn lie_within(&self, part: &RangeSet, ranges: &RangeSet) -> bool {
        let away = part.iter().flat_map(|range| self.away_in(&range));
        away.into_iter().all(|(at, _)| ranges.gaps(at).is_empty())
    }

    /// All that is away.
    pub(super) fn all(&self) -> Vec<Part> {
        self.parts_in(&self.concerned)
    }

    /// What came to the markers, and where those are that are to get some; `None` if at a marker there is nothing, or one of those, or no memory where one
    /// of those is.
    fn at(&self, seen: &Seen) -> Option<Vec<Part>> {
        let leaving = now_at(&self.away, &self.leaving);
        let mut places = seen.marked.clone();
        leaving.iter().for_each(|range| places.insert(range));
        let found = self.parts_in(&places);
        let bytes: u64 = found.iter().map(|(at, _)| at.end - at.start).sum();
        let is_mapped = leaving.iter().all(|range| seen.mapped.gaps(range).is_empty());
        (is_mapped && bytes == seen.marked.len() + leaving.len()).then_some(found)
    }

    fn parts_in(&self, marked: &RangeSet) -> Vec<Part> {
        let clip = |(at, began): &Part| {
            let began = began.wrapping_sub(at.start);
            let parts = marked.overlaps(at.clone());
            parts.map(move |part| (part.clone(), began.wrapping_add(part.start)))
        };
        let mut found: Vec<Part> = self.away.iter().flat_map(clip).collect();
        found.sort_unstable_by_key(|(at, _)| at.start);
        // Parts that lie side by side are one if they did before.
        found.dedup_by(|next, last| {
            let one = last.0.end == next.0.start && last.1 + (last.0.end - last.0.start) == next.1;
            if one {
                last.0.end = next.0.end;
            }
            one
        });
        found
    }
}

/// Where pages are that were at these addresses.
pub(super) fn now_at(away: &[Part], before: &RangeSet) -> RangeSet {
    let mut now = RangeSet::default();
    for (at, began) in away {
        for part in before.overlaps(*began..began + (at.end - at.start)) {
            now.insert(part.start - began + at.start..part.end - began + at.start);
        }
    }
    now
}

fn overlap(a: Range<u64>, b: Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

fn set_of(pages: impl Iterator<Item = PageAddr>) -> RangeSet {
    let mut set = RangeSet::default();
    pages.for_each(|page| set.insert(page.get()..page.get() + PAGE));
    set
}

/// What is seen of an address space, in what changes concern.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// The markers.
    pub marked: RangeSet,
    /// Where memory is registered, of the places where pages without markers may be ([`super::Tables::unmarked_places`]).
    pub mapped: RangeSet,
}

/// Where pages may have come that were in these ranges, in whatever order the changes were made. Of more changes than are searched: in this order.
pub(super) fn images(changes: &[Change], of: &RangeSet) -> RangeSet {
    let mut images = RangeSet::default();
    let rounds = if changes.len() > SEARCHED_MAX { 1 } else { changes.len() };
    for _ in 0..rounds {
        let before = images.len();
        for change in changes {
            let Change::Remap(remap) = change else { continue };
            let there = |at: u64| at - remap.from + remap.to;
            let moved = |set: &RangeSet| set.overlaps(remap.source()).collect::<Vec<_>>();
            for part in moved(of).into_iter().chain(moved(&images)) {
                images.insert(there(part.start)..there(part.end));
            }
        }
        if images.len() == before {
            break;
        }
    }
    images
}

/// The order in which the changes, which are in the order in which they were told, were made.
pub(super) fn order(
    places: &Places,
    changes: &[Change],
    seen: &Seen,
) -> Result<GroupOrders, Doubt> {
    let as_told: Vec<usize> = (0..changes.len()).collect();
    if places.away.is_empty() && seen.marked.is_empty() {
        return Ok((as_told, Some(Vec::new())));
    }
    let mut led = places.clone();
    let fits = led.are_made_way_for(changes) && led.at(seen).is_some();
    if fits && places.leaving.is_empty() {
        return Ok((as_told, Some(Vec::new())));
    }
    let search = |wide: bool, found: &dyn Fn() -> Found| {
        let steps = if changes.len() > SEARCHED_MAX { 0 } else { STEPS_MAX };
        let mut search = Search { changes, seen, wide, steps, free: found(), forced: found() };
        search.from(places.clone(), &as_told, 0, Vec::new(), true);
        (search.steps > 0).then_some((search.free, search.forced))
    };
    for wide in [false, true] {
        let Some((free, forced)) = search(wide, &Found::default) else {
            // None other leads a page without a marker to memory. (What a child has is another matter.)
            let is_sure = fits && !led.may_be_elsewhere(changes, seen);
            return is_sure.then_some((as_told, None)).ok_or(Doubt);
        };
        let mut found = if free.places.is_some() { free } else { forced };
        if found.doubt {
            return Err(Doubt);
        }
        if found.places.is_none() {
            continue;
        }
        let first = found.first();
        // Where those pages were meanwhile no marker tells.
        if !wide && !places.leaving.is_empty() {
            let alike = || Found { alike: true, places: found.places.clone(), ..Found::default() };
            match search(true, &alike) {
                Some((free, forced)) => [free, forced].into_iter().for_each(|f| found.extend(f)),
                None => found.too_many = true,
            }
        }
        return Ok(found.orders(first));
    }
    Err(Doubt)
}

/// Orders that lead the same pages to the markers.
#[derive(Default)]
struct Found {
    /// What came to the markers.
    places: Option<Vec<Part>>,
    /// Only those are looked for that lead there.
    alike: bool,
    /// Another order leads other pages there.
    doubt: bool,
    made: BTreeSet<Vec<usize>>,
    too_many: bool,
}

impl Found {
    fn add(&mut self, places: Vec<Part>, made: Vec<usize>) {
        if *self.places.get_or_insert_with(|| places.clone()) != places {
            self.doubt |= !self.alike;
            return;
        }
        self.made.insert(made);
        if self.made.len() > ORDERS_MAX {
            self.too_many = true;
            let last = self.made.iter().max_by_key(|made| inversions(made)).cloned();
            last.iter().for_each(|last| drop(self.made.take(last)));
        }
    }

    /// The other is of orders that are alike.
    fn extend(&mut self, other: Found) {
        self.too_many |= other.too_many || self.made.len() + other.made.len() > ORDERS_MAX;
        self.made.extend(other.made);
    }

    /// That which differs least from the one told.
    fn first(&self) -> Vec<usize> {
        self.made.iter().min_by_key(|made| inversions(made)).cloned().unwrap_or_default()
    }

    fn orders(mut self, first: Vec<usize>) -> GroupOrders {
        self.made.remove(&first);
        let mut places = vec![0; first.len()];
        first.iter().enumerate().for_each(|(place, &index)| places[index] = place);
        let others = self.made.into_iter();
        let others = others.map(|made| made.into_iter().map(|index| places[index]).collect());
        let others = (!self.too_many).then(|| others.collect());
        (first, others)
    }
}

/// How many pairs of changes were told in the other order.
fn inversions(made: &[usize]) -> usize {
    let later =
        |(n, one): (usize, &usize)| made[n + 1..].iter().filter(|other| *other < one).count();
    made.iter().enumerate().map(later).sum()
}

struct Search<'a> {
    changes: &'a [Change],
    seen: &'a Seen,
    /// Whether one comes first also if it left what is not known to be there: grown memory.
    wide: bool,
    steps: usize,
    /// By orders in which nothing is where a remap leads.
    free: Found,
    /// By others. The kernel would have told what they unmapped, so that they count only if there are none of the former.
    forced: Found,
}

impl Search<'_> {
    /// After what is `made`, the first that `wait` comes next, or one that makes way for it, or brings what it moves. The next `held` ones wait for it.
    fn from(
        &mut self,
        mut places: Places,
        wait: &[usize],
        held: usize,
        mut made: Vec<usize>,
        free: bool,
    ) {
        self.steps = self.steps.saturating_sub(1);
        if self.steps == 0 || self.free.doubt {
            return;
        }
        let Some((&next, rest)) = wait.split_first() else {
            return self.end(&places, made, free);
        };
        let change = &self.changes[next];
        let taken = change.reached().map(|range| places.taken(range)).unwrap_or_default();
        for at in 1 + held..wait.len() {
            let other = &self.changes[wait[at]];
            let is_first = taken.overlaps(other.left()).next().is_some();
            let grown = || change.left_and_reached().any(|range| overlap(range, other.left()));
            let makes_way = self.wide && grown();
            let is_first = is_first || makes_way || places.is_taken_along(change, other);
            if is_first || places.is_brought(change, [other]) {
                let mut sooner = wait.to_vec();
                let one = sooner.remove(at);
                sooner.insert(0, one);
                self.from(places.clone(), &sooner, held + 1, made.clone(), free);
            }
        }
        places.make(change);
        made.push(next);
        self.from(places, rest, held.saturating_sub(1), made, free && taken.is_empty());
    }

    fn end(&mut self, places: &Places, made: Vec<usize>, free: bool) {
        let Some(places) = places.at(self.seen) else { return };
        let found = if free { &mut self.free } else { &mut self.forced };
        found.add(places, made);
    }
}
