//! What of its parent's changes a forked child has inherited.
//!
//! Changes that several threads make while another forks are told when they have been made, and so is the fork: of what is told together it is not known
//! which came first. But a child's memory is that of its parent at one moment. So every moment is tried at which the fork may have been. None is
//! the one that has pages where the child has nothing registered, or that has memory left where there is something: what comes there before all that
//! was told is applied is empty, because nobody is served, and is memory that grew in place, so that the parent still has it. (A page that is not found
//! refutes nothing: it may have been discarded.) What remains must not have two pages at one address. If the changes may have been made in several orders,
//! that is tried with each, and they must agree.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use gms_policy::ids::SpaceId;

use super::Tables;
use super::order::{Change, Doubt, Others, Part, Places, groups, images, now_at};
use crate::page_map::PAGE;
use crate::range_set::RangeSet;

/// So many changes that meet are searched, in so many steps.
const CHANGES_MAX: usize = 1024;
const STEPS_MAX: usize = 4096;
/// Steps of a round that is seen to be done once more.
const ROUND_MAX: usize = 8;
/// Most changes times parts of which pages are away.
const WORK_MAX: usize = 1 << 23;
/// Most moments that differ.
const MOMENTS_MAX: usize = 64;
/// Most parts of which pages are away that are told apart.
const PARTS_MAX: usize = 256;
/// Pages of a part that are looked for.
const SAMPLES: u64 = 8;

/// What is asked of a child's memory, as it was when the child was born.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Ask {
    /// Whether the part is registered, all of it.
    Registered(Range<u64>),
    /// Whether anything is there: a page or a marker. If not, zeros may be left there.
    Page(u64),
    /// Whether its parent has memory registered there now.
    Grown(u64),
}

/// Changes of a parent that concern one another, and where its pages were before them.
pub struct Birth {
    likely: History,
    /// The same changes in other orders; `None`: there are too many.
    others: Option<Vec<History>>,
}

/// Changes in an order in which they may have been made.
struct History {
    /// Indices.
    members: Vec<usize>,
    changes: Vec<Change>,
    /// Which were told before the fork.
    told: Vec<bool>,
    places: Places,
}

impl Tables {
    /// What concerns a child of its parent's changes, which are in the order in which they were made, or in one of `others`; `told`: before the
    /// fork. The child will be given what was known before all of them.
    pub fn births(
        &self,
        parent: SpaceId,
        changes: &[Change],
        told: &[bool],
        others: &Others,
    ) -> Vec<Birth> {
        let private = self.private_of(parent);
        let birth = |group: Vec<usize>| {
            let (_, before) = self.places(parent, changes, &group, &private);
            let history = |members: Vec<usize>| {
                let changes: Vec<Change> = members.iter().map(|&n| changes[n].clone()).collect();
                let mut places = before.clone();
                // What moves is registered.
                places.begin_registered(&changes);
                let told = members.iter().map(|&index| told[index]).collect();
                History { members, changes, told, places }
            };
            let others = match others.get(&group[0]) {
                None => Some(Vec::new()),
                Some(others) => others.clone(),
            };
            let others = others.map(|others| others.into_iter().map(history).collect());
            Birth { likely: history(group), others }
        };
        let mut births: Vec<Birth> = groups(changes).into_iter().map(birth).collect();
        // What was only unmapped before the fork has no markers, and none are to be left.
        births.retain(|Birth { likely, .. }| {
            match likely.changes.iter().any(|change| change.reached().is_some()) {
                true => !likely.places.all().is_empty(),
                false => !likely.places.leaving().is_empty(),
            }
        });
        births
    }
}

/// What has been asked is not asked again: a probe may have left something.
struct Asked<A> {
    ask: A,
    answers: HashMap<Ask, Option<bool>>,
}

impl<A: FnMut(Ask) -> Option<bool>> Asked<A> {
    fn ask(&mut self, what: Ask) -> Option<bool> {
        let Asked { ask, answers } = self;
        *answers.entry(what.clone()).or_insert_with(|| ask(what))
    }
}

impl Birth {
    /// Indices of the changes that were made before the fork.
    pub fn inherited(self, ask: impl FnMut(Ask) -> Option<bool>) -> Result<Vec<usize>, Doubt> {
        let Birth { likely, others } = self;
        let others = others.ok_or(Doubt)?;
        let mut asked = Asked { ask, answers: HashMap::new() };
        // Where pages without markers may be a probe would leave zeros: in whatever order the changes were made.
        let mut hidden = images(&likely.changes, likely.places.leaving());
        likely.places.leaving().iter().for_each(|range| hidden.insert(range));
        let is_only = others.is_empty();
        let (made, places) = likely.inherited(&mut asked, &hidden, is_only)?.ok_or(Doubt)?;
        for other in others {
            let inherited = other.inherited(&mut asked, &hidden, false)?;
            // If it cannot have been born so, that says nothing.
            if inherited.is_some_and(|(_, others)| others != places) {
                return Err(Doubt);
            }
        }
        Ok(made)
    }
}

/// Indices of the changes that were made before the fork, and where pages are then.
type Inherited = (Vec<usize>, Vec<Part>);

impl History {
    /// `None` if it was at no moment of this history. `hidden`: where nothing is looked for, but if `is_only`, no other history is possible, and it is known where
    /// pages without markers are.
    fn inherited<A: FnMut(Ask) -> Option<bool>>(
        mut self,
        asked: &mut Asked<A>,
        hidden: &RangeSet,
        is_only: bool,
    ) -> Result<Option<Inherited>, Doubt> {
        self.drop_rounds()?;
        // What cannot be known refutes nothing.
        let (mut registered, mut possible) = (RangeSet::default(), RangeSet::default());
        for part in self.parts() {
            let answer = asked.ask(Ask::Registered(part.clone()));
            if answer == Some(true) {
                registered.insert(part.clone());
            }
            if answer != Some(false) {
                possible.insert(part);
            }
        }
        // The child has nothing of it.
        if possible.is_empty() {
            return Ok(Some((Vec::new(), Vec::new())));
        }
        let grown = self.grown(&registered, |at| asked.ask(Ask::Grown(at)));
        let mut hidden = hidden.clone();
        let mut is_there = |page: u64, hidden: &RangeSet| {
            !hidden.contains(page) && asked.ask(Ask::Page(page)) == Some(true)
        };
        let likely = self.images(self.places.all().into_iter().map(|(at, _)| at));
        // What comes to where memory was left is empty.
        let mut is_empty = |range: &Range<u64>, hidden: &RangeSet| {
            let likely = likely.overlaps(range.clone()).take(SAMPLES as usize).flat_map(samples);
            !likely.chain(samples(range.clone())).any(|page| is_there(page, hidden))
        };
        let mut is_left = |left: &RangeSet, hidden: &RangeSet| {
            let left = left.iter().flat_map(|range| registered.overlaps(range).collect::<Vec<_>>());
            left.into_iter().all(|range| grown.contains(range.start) && is_empty(&range, hidden))
        };
        let needs = self.needs();
        let decided = self.decided(&needs, &possible, |left| is_left(left, &hidden));
        let mut moments = Search::moments(&self, &possible, needs, decided).ok_or(Doubt)?;
        moments.retain(|moment| is_left(&moment.left, &hidden));
        if moments.len() > 1 {
            let unmarked = self.unmarked_at(&moments)?;
            if is_only {
                hidden = unmarked;
            }
            moments.retain(|moment| is_left(&moment.left, &hidden));
            rank(&mut moments, |page| is_there(page, &hidden))?;
        }
        let Some(moment) = moments.into_iter().next() else { return Ok(None) };
        // What has been left is there, grown again, or a page that is leaving: the same at another moment.
        let mut again = moment.left.iter().flat_map(|left| registered.overlaps(left));
        if again.any(|range| hidden.overlaps(range).next().is_some()) {
            return Err(Doubt);
        }
        let made = self.members.iter().zip(&moment.made);
        let made = made.filter_map(|(&index, &made)| made.then_some(index)).collect();
        Ok(Some((made, moment.away)))
    }

    /// Takes out what was done once more, step by step, from where everything was as before: so long as a fork is not told of, a thread may move a block there
    /// and back thousands of times.
    fn drop_rounds(&mut self) -> Result<(), Doubt> {
        let max = CHANGES_MAX.min(WORK_MAX / self.places.all().len().max(1));
        let mut places = self.places.clone();
        let mut kept: Vec<usize> = Vec::new();
        let mut states = vec![places.all()];
        for index in 0..self.changes.len() {
            places.make(&self.changes[index]);
            kept.push(index);
            states.push(places.all());
            let steps = kept.len();
            let again = |round: &usize| {
                let ends = [steps - round, steps].map(|end| &states[end]);
                let steps_of =
                    |from: usize| kept[from..from + round].iter().map(|&n| &self.changes[n]);
                ends[0] == ends[1] && steps_of(steps - 2 * round).eq(steps_of(steps - round))
            };
            if let Some(round) = (1..=ROUND_MAX.min(steps / 2)).find(again) {
                kept.truncate(steps - round);
                states.truncate(steps + 1 - round);
            }
            if kept.len() > max {
                return Err(Doubt);
            }
        }
        self.members = kept.iter().map(|&index| self.members[index]).collect();
        self.told = kept.iter().map(|&index| self.told[index]).collect();
        self.changes = kept.into_iter().map(|index| self.changes[index].clone()).collect();
        Ok(())
    }

    /// What its parent may have had again when the child was born, of what had been left: it still has, or has left once more. Of what a remap had left the
    /// child's own pages tell: it may have grown there by itself, and of that nobody tells either.
    fn grown(&self, registered: &RangeSet, mut ask: impl FnMut(u64) -> Option<bool>) -> RangeSet {
        let mut once = RangeSet::default();
        let mut grown = RangeSet::default();
        for change in &self.changes {
            let twice: Vec<Range<u64>> = once.overlaps(change.left()).collect();
            twice.into_iter().for_each(|range| grown.insert(range));
            match change {
                Change::Unmap(range) => once.insert(range.clone()),
                Change::Remap(remap) => grown.insert(remap.source()),
            }
        }
        // It grows from where a range begins on.
        let parts = self.parts().into_iter().filter(|part| {
            registered.contains(part.start)
                && once.contains(part.start)
                && !grown.contains(part.start)
        });
        for part in parts.collect::<Vec<_>>() {
            if ask(part.start) != Some(false) {
                grown.insert(part);
            }
        }
        grown
    }

    /// Where the pages without markers are, if that is the same at all these moments: the fork was at one of them.
    fn unmarked_at(&self, moments: &[Moment]) -> Result<RangeSet, Doubt> {
        let leaving = self.places.leaving();
        let mut places = moments.iter().map(|moment| now_at(&moment.away, leaving));
        let first = places.next().ok_or(Doubt)?;
        places.all(|other| other == first).then_some(first).ok_or(Doubt)
    }

    /// Wherever what is there now may have come.
    fn images(&self, ranges: impl Iterator<Item = Range<u64>>) -> RangeSet {
        let mut images = RangeSet::default();
        ranges.for_each(|range| images.insert(range));
        for change in &self.changes {
            if let Change::Remap(remap) = change {
                let there = |at: u64| at - remap.from + remap.to;
                for part in images.overlaps(remap.source()).collect::<Vec<_>>() {
                    images.insert(there(part.start)..there(part.end));
                }
            }
        }
        images
    }

    /// Of each change the earlier ones that it meets: none is made without them.
    fn needs(&self) -> Vec<Vec<usize>> {
        let overlap = |x: &Range<u64>, y: Range<u64>| x.start < y.end && y.start < x.end;
        // Which of two unmaps came first makes no difference.
        let meet = |a: &Change, b: &Change| {
            (a.reached().is_some() || b.reached().is_some())
                && a.left_and_reached().any(|a| b.left_and_reached().any(|b| overlap(&a, b)))
        };
        let changes = &self.changes;
        let earlier = |n: usize| (0..n).filter(|&m| meet(&changes[m], &changes[n])).collect();
        (0..changes.len()).map(earlier).collect()
    }

    /// What can be said of single changes.
    fn decided(
        &self,
        needs: &[Vec<usize>],
        possible: &RangeSet,
        mut is_left: impl FnMut(&RangeSet) -> bool,
    ) -> Vec<Option<bool>> {
        let mut decided = vec![None; self.changes.len()];
        for index in (0..self.changes.len()).rev() {
            if decided[index].is_some() {
                continue;
            }
            let mut left = RangeSet::default();
            left.insert(self.changes[index].left());
            let concerned = |set: &mut RangeSet, others: Range<usize>, decided: &[Option<bool>]| {
                let others = others.filter(|&other| decided[other] != Some(false));
                others
                    .flat_map(|other| self.changes[other].left_and_reached())
                    .for_each(|range| set.remove(range));
            };
            concerned(&mut left, index + 1..self.changes.len(), &decided);
            if !is_left(&left) {
                decided[index] = Some(false);
                for later in index + 1..needs.len() {
                    if needs[later].iter().any(|&need| decided[need] == Some(false)) {
                        decided[later] = Some(false);
                    }
                }
                continue;
            }
            concerned(&mut left, 0..index, &decided);
            let mut away = left.iter().flat_map(|range| self.places.away_in(&range));
            if away.any(|(at, _)| !possible.gaps(at).is_empty()) {
                decided[index] = Some(true);
                for earlier in (0..=index).rev() {
                    if decided[earlier] == Some(true) {
                        needs[earlier].iter().for_each(|&need| decided[need] = Some(true));
                    }
                }
            }
        }
        decided
    }

    /// Addresses of which all of a part are registered at any moment, or none.
    fn parts(&self) -> Vec<Range<u64>> {
        let mut ends = BTreeSet::new();
        let changed = self.changes.iter().flat_map(|change| change.left_and_reached());
        let away = self.places.all().into_iter().map(|(at, _)| at).take(PARTS_MAX);
        for range in changed.chain(self.places.registered()).chain(away) {
            ends.extend([range.start, range.end]);
        }
        let mut parts = Vec::new();
        for range in self.places.concerned() {
            let mut start = range.start;
            let within = ends.range(range.start + 1..range.end).copied();
            for end in within.chain([range.end]) {
                parts.push(start..end);
                start = end;
            }
        }
        parts
    }
}

/// Some pages of a range.
fn samples(range: Range<u64>) -> impl Iterator<Item = u64> {
    let stride = (range.end - range.start).div_ceil(SAMPLES * PAGE).max(1) * PAGE;
    range.step_by(stride as usize)
}

/// The best comes to be the first.
fn rank(moments: &mut [Moment], mut is_there: impl FnMut(u64) -> bool) -> Result<(), Doubt> {
    if contradict(moments) {
        return Err(Doubt);
    }
    let mut found = |moment: &Moment| {
        let parts = moment.away.iter().take(PARTS_MAX);
        parts.flat_map(|(at, _)| samples(at.clone())).filter(|&page| is_there(page)).count()
    };
    moments.sort_by_cached_key(|moment| (moment.missing, Reverse(found(moment))));
    Ok(())
}

/// Whether two of them have different pages at one address.
fn contradict(moments: &[Moment]) -> bool {
    let mut parts: Vec<&Part> = moments.iter().flat_map(|moment| &moment.away).collect();
    parts.sort_unstable_by_key(|(at, _)| at.start);
    let shift = |(at, began): &Part| at.start.wrapping_sub(*began);
    let (mut end, mut last) = (0, 0);
    parts.into_iter().any(|part| {
        let differs = part.0.start < end && shift(part) != last;
        (end, last) = (end.max(part.0.end), shift(part));
        differs
    })
}

/// When the fork may have been.
struct Moment {
    made: Vec<bool>,
    /// Where pages are then.
    away: Vec<Part>,
    /// To what has been left then nothing has come.
    left: RangeSet,
    /// Bytes that would be registered then, and are not.
    missing: u64,
}

struct Search<'a> {
    birth: &'a History,
    /// Where pages may be.
    possible: &'a RangeSet,
    needs: Vec<Vec<usize>>,
    decided: Vec<Option<bool>>,
    /// Of each change what no later one concerns.
    settled: Vec<RangeSet>,
    steps: usize,
    found: Vec<Moment>,
}

impl<'a> Search<'a> {
    /// One of those each that do not differ in what is where, and where nothing is; `None` if there are too many.
    fn moments(
        birth: &'a History,
        possible: &'a RangeSet,
        needs: Vec<Vec<usize>>,
        decided: Vec<Option<bool>>,
    ) -> Option<Vec<Moment>> {
        let changes = &birth.changes;
        let mut later = RangeSet::default();
        let mut settled = Vec::new();
        for change in changes.iter().rev() {
            let mut last = RangeSet::default();
            let parts = change.left_and_reached().flat_map(|range| later.gaps(range));
            parts.for_each(|part| last.insert(part));
            change.left_and_reached().for_each(|range| later.insert(range));
            settled.push(last);
        }
        settled.reverse();
        let (steps, found) = (STEPS_MAX, Vec::new());
        let mut search = Search { birth, possible, needs, decided, settled, steps, found };
        search.from(&birth.places, &mut Vec::new());
        (search.steps > 0).then_some(search.found)
    }

    fn from(&mut self, places: &Places, made: &mut Vec<bool>) {
        if self.steps == 0 {
            return;
        }
        let next = made.len();
        let Some(change) = self.birth.changes.get(next) else {
            return self.end(places, made);
        };
        let told = self.birth.told[next];
        let decided = self.decided[next];
        for make in [told, !told] {
            if decided.is_some_and(|made| made != make) {
                continue;
            }
            if make && self.needs[next].iter().any(|&need| !made[need]) {
                continue;
            }
            let mut then = None;
            if make {
                then.insert(places.clone()).make(change);
            }
            let then = then.as_ref().unwrap_or(places);
            // What was moved is there, and registered.
            let settled = &self.settled[next];
            let reached = change.reached().filter(|_| make);
            let mut reached = reached.into_iter().flat_map(|range| settled.overlaps(range));
            let is_there = reached.all(|range| self.possible.gaps(range).is_empty());
            drop(reached);
            if is_there && then.lie_within(settled, self.possible) {
                self.steps = self.steps.saturating_sub(usize::from(make && decided.is_none()));
                made.push(make);
                self.from(then, made);
                made.pop();
            }
        }
    }

    fn end(&mut self, places: &Places, made: &[bool]) {
        let mut moment = Moment {
            made: made.to_vec(),
            away: places.all(),
            left: RangeSet::default(),
            missing: 0,
        };
        for (change, _) in self.birth.changes.iter().zip(made).filter(|(_, made)| **made) {
            moment.left.insert(change.left());
            change.reached().into_iter().for_each(|range| moment.left.remove(range));
        }
        let gaps = places.registered().flat_map(|range| self.possible.gaps(range));
        moment.missing = gaps.map(|range| range.end - range.start).sum();
        let same = |other: &Moment| other.away == moment.away && other.left == moment.left;
        if self.found.iter().any(same) {
            return;
        }
        self.found.push(moment);
        if self.found.len() > MOMENTS_MAX {
            self.steps = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use gms_policy::ids::PageAddr;

    use super::*;

    #[test]
    fn a_page_that_children_do_not_inherit_is_not_looked_for_in_one() {
        let (space, page) = (SpaceId(1), PageAddr::containing(PAGE));
        let mut tables = Tables::new(1, 1024).expect("a memfd");
        tables.add_space(space);
        tables.register(space, 0..4 * PAGE, &RangeSet::default());
        let mut leaving = Vec::new();
        tables.begin_evict(space, &[page], &mut leaving);
        let unmap = [Change::Unmap(page.get()..page.get() + PAGE)];
        assert_eq!(tables.births(space, &unmap, &[true], &Others::new()).len(), 1);
        tables.make_private(leaving[0].1);
        assert!(tables.births(space, &unmap, &[true], &Others::new()).is_empty());
    }
}
