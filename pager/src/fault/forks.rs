//! Forks: which pages a child has.
//!
//! Here, as in `read_changes` (events.rs), the core waits; and here alone it reads the clock by itself: a child is looked at, which may be
//! changing its memory already, and its parent sleeps meanwhile.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gms_policy::ids::SpaceId;
use gms_transport::Transport;

use super::{Fault, FaultCore, Listen, Told};
use crate::board;
use crate::keeper::USER_SPACE;
use crate::kernel::{Event, Faults, Installed, Probe, Registration};
use crate::page_map::PAGE;
use crate::range_set::RangeSet;
use crate::space::Space;
use crate::speech::note;
use crate::sync::lock;
use crate::tables::{Ask, Change, Doubt, Others, Step, Tables};
use crate::torture::{self, Point};

/// For a forked child to stop changing its address space.
const CHILD_DEADLINE: Duration = Duration::from_secs(2);
/// For one of which it is not known what it has to execute another program.
const EXEC_PATIENCE: Duration = Duration::from_millis(100);

impl<T: Transport> FaultCore<T> {
    /// A child of which nothing is known until its parent's changes are applied.
    pub(super) fn bear(&mut self, mut faults: Box<dyn Faults>) -> Arc<Space> {
        torture::at(Point::BeforeFork);
        let left = faults.take_left();
        let child = Arc::new(Space::new(self.shared.new_space(), faults));
        if child.faults.next_generation().is_none() {
            // Who goes on for this pager would not know of it.
            board::withdraw();
        }
        self.shared.homes.bear(child.id, self.thread);
        self.add(child.clone());
        if let Some(state) = self.spaces.get_mut(&child.id) {
            state.unborn = true;
        }
        if !left.is_empty() {
            self.take_up(&child, left);
        }
        // What a pager that has died had read of its faults is told again: no message of them is kept.
        child.faults.wake(USER_SPACE);
        child
    }

    /// A child that its parent's thread has told all of may be served by another one from now on.
    pub(super) fn send_away(&mut self, child: &Arc<Space>) {
        let id = child.id;
        let idle = self.spaces.get(&id).is_some_and(|state| state.backlog.is_empty());
        let unfinished = self.stuck.contains_key(&id) || self.unread.contains_key(&id);
        // At the end that one may have ended, with what it is told.
        let stays = !idle || unfinished || self.shared.has_failed();
        if stays || !self.shared.homes.leaves(child, self.thread) {
            return;
        }
        self.listen.extend(self.spaces.remove(&id).map(|state| Listen::End(state.space)));
        self.waiting.remove(&id);
        // What has been read of its faults is told again to whom they are for now.
        let (away, again) = self.again.drain(..).partition(|fault| fault.place.0 == id);
        self.again = again;
        let away: Vec<Fault> = away;
        for fault in away {
            child.faults.wake(fault.place.1.get()..fault.place.1.get() + PAGE);
        }
    }

    /// Which of its parent's changes, read together with the fork, were made before it: of each change that is no removal. One thread (`alone`) tells what it does
    /// in its order; else the child's memory tells. `others`: orders in which they may have been made besides.
    pub(super) fn inherited(
        &mut self,
        parent: &Space,
        child: &Arc<Space>,
        (birth, others): (usize, &Others),
        events: &[(usize, Event)],
        alone: bool,
    ) -> Vec<bool> {
        let changed =
            |(order, event): &(usize, Event)| Some((*order < birth, event.change()?.clone()));
        let (told, changes): (Vec<bool>, Vec<Change>) = events.iter().filter_map(changed).unzip();
        if alone { told } else { self.made(parent, child, (&changes, &told, others)) }
    }

    /// Which of several threads' changes were made before the fork, as far as they concern what is known. What was only unmapped has no markers in the child.
    fn made(
        &mut self,
        parent: &Space,
        child: &Arc<Space>,
        (changes, told, others): (&[Change], &[bool], &Others),
    ) -> Vec<bool> {
        let mut made = vec![false; changes.len()];
        let births = lock(&self.shared.tables).births(parent.id, changes, told, others);
        for birth in births {
            let ask = |ask| match ask {
                Ask::Registered(part) => self.was_registered(parent, child, part),
                Ask::Page(at) => self.had(child, at),
                Ask::Grown(at) => has(parent, at),
            };
            match birth.inherited(ask) {
                Ok(inherited) => inherited.into_iter().for_each(|index| made[index] = true),
                Err(Doubt) if self.lasts(child) => self.shared.fail(
                    "memory was moved about while a process forked, and it is not known which pages its child has where",
                ),
                Err(Doubt) => {}
            }
        }
        made
    }

    /// A fork is told after it is made, a removal before: what was told to be removed before the fork was told may have been removed after it. Nothing tells of
    /// pages without markers: a child that uses one gets SIGBUS.
    pub(super) fn doubt_removals(
        &mut self,
        (parent, child): (SpaceId, &Arc<Space>),
        birth: usize,
        events: &[(usize, Event)],
    ) {
        let steps = events.iter().filter_map(|(order, event)| match event {
            Event::Remove(range) if *order < birth => Some(Step::Remove(range)),
            Event::Remove(_) | Event::Fork(_) => None,
            Event::Changed(change) => Some(Step::Change(change)),
        });
        let removed = lock(&self.shared.tables).removed_unmarked(parent, steps);
        let pages = removed.iter().flat_map(RangeSet::iter);
        let pages = pages.flat_map(|part| part.step_by(PAGE as usize));
        let kept: Option<usize> = pages.map(|at| self.keep_from(child, at)).sum();
        match kept.filter(|_| removed.is_ok()) {
            Some(kept) if kept == 0 || self.shared.config.quiet => {}
            Some(kept) => note(format_args!(
                "memory was removed while a process forked: its child gets SIGBUS if it uses one of {kept} pages that it may have or not"
            )),
            None if self.lasts(child) => self.shared.fail(
                "memory was removed while a process forked, and it is not known which pages its child has",
            ),
            None => {}
        }
    }

    /// Has whoever uses the child's page get SIGBUS: how many pages that are, none if it has it anew. `None` if it cannot be done, or if there may be others: a
    /// child of its own has the page too, and what it has moved is elsewhere.
    pub(super) fn keep_from(&mut self, child: &Arc<Space>, at: u64) -> Option<usize> {
        let poisoned =
            self.when_settled(child, |core, faults| match core.has_changed(child.id, at) {
                // A fork, or a move, that was before its removal may be told later.
                true => (!faults.has_event()).then_some(None),
                false => Some(faults.poison(at)).filter(|p| *p != Installed::Changing).map(Some),
            })?;
        // What has begun before that is read then.
        let is_left_out = poisoned == Some(Installed::Gone)
            && self.registration(child, at..at + PAGE) != Registration::Not;
        let forked = |told: &Told| matches!(told.event, Event::Fork(_));
        let has_forked = self.spaces.get(&child.id)?.backlog.iter().any(forked);
        let is_sure = !is_left_out && !has_forked && self.first_change(child.id, at).is_none();
        is_sure.then_some(usize::from(poisoned == Some(Installed::Done)))
    }

    /// Not if it ends, or executes another program, at once, and has no children.
    fn lasts(&mut self, child: &Arc<Space>) -> bool {
        let deadline = Instant::now() + EXEC_PATIENCE;
        while child.faults.is_alive() {
            if Instant::now() > deadline {
                return true;
            }
            let faults = self.read_faults(&Instant::now, child.id, true);
            self.again.extend(faults.into_iter().flatten());
            std::thread::yield_now();
        }
        let forked = |told: &Told| matches!(told.event, Event::Fork(_));
        self.spaces.get(&child.id).is_some_and(|state| state.backlog.iter().any(forked))
    }

    /// Whether a part of its parent's memory was registered when the child was born; `None` if it may have been, or not with what the parent's tables know.
    fn was_registered(
        &mut self,
        parent: &Space,
        child: &Arc<Space>,
        part: Range<u64>,
    ) -> Option<bool> {
        // Events of its own are read first.
        let at = part.start;
        let is_registered = self.registration(child, at..at + PAGE) == Registration::Whole;
        let was = match self.first_change(child.id, at) {
            // An unmap tells nothing of holes in its range.
            Some(Change::Unmap(_)) => return None,
            Some(Change::Remap(remap)) => remap.source().contains(&at),
            None => is_registered,
        };
        let meets = |set: &Mutex<RangeSet>| lock(set).overlaps(part.clone()).next().is_some();
        // What has ended has nothing registered, and may have children.
        let unknown = match was {
            true => meets(&parent.unrecorded),
            false => !child.faults.is_alive(),
        };
        (!unknown && !meets(&parent.relieved)).then_some(was)
    }

    /// The first change of its own of which the child has told there.
    fn first_change(&self, child: SpaceId, at: u64) -> Option<Change> {
        let mut changes = self.spaces.get(&child)?.backlog.iter().filter_map(|t| t.event.change());
        changes.find(|change| change.left_and_reached().any(|range| range.contains(&at))).cloned()
    }

    /// Whether a page or a marker of the child was at the address when it was born; `None` if that cannot be known.
    fn had(&mut self, child: &Arc<Space>, at: u64) -> Option<bool> {
        if self.has_changed(child.id, at) {
            return None;
        }
        let probe = self.probe(child, at);
        let known = probe != Probe::Gone && !self.has_changed(child.id, at);
        known.then_some(probe == Probe::Occupied)
    }

    /// Whether the child has told of a change of its own there.
    fn has_changed(&self, child: SpaceId, at: u64) -> bool {
        let removed =
            |told: &Told| matches!(&told.event, Event::Remove(range) if range.contains(&at));
        let state = self.spaces.get(&child);
        state.is_some_and(|state| state.backlog.iter().any(removed))
            || self.first_change(child, at).is_some()
    }

    /// What the range is to a child.
    fn registration(&mut self, child: &Arc<Space>, range: Range<u64>) -> Registration {
        self.when_settled(child, |_, faults| {
            Some(faults.registration(range.clone())).filter(|r| *r != Registration::Changing)
        })
        .unwrap_or(Registration::Not)
    }

    /// What a child has at the address.
    fn probe(&mut self, child: &Arc<Space>, at: u64) -> Probe {
        self.when_settled(child, |_, faults| {
            Some(faults.probe(at)).filter(|probe| *probe != Probe::Changing)
        })
        .unwrap_or(Probe::Gone)
    }

    pub(super) fn when_settled<R>(
        &mut self,
        child: &Arc<Space>,
        look: impl Fn(&Self, &dyn Faults) -> Option<R>,
    ) -> Option<R> {
        let deadline = Instant::now() + CHILD_DEADLINE;
        loop {
            let found = look(self, child.faults.as_ref());
            if found.is_some() {
                return found;
            }
            if Instant::now() > deadline {
                self.shared.fail("a forked child does not stop changing its address space");
                return None;
            }
            // The evict thread does not know it yet, nor its tables what its parent has done: its faults and changes are for later.
            let faults = self.read_faults(&Instant::now, child.id, true);
            self.again.extend(faults.into_iter().flatten());
        }
    }
}

/// A child begins with its parent's tables from before all of these events, to which those are applied that were made before the fork (`made`, of each change that is
/// no removal).
pub(super) fn inherit(
    tables: &mut Tables,
    (parent, child): (SpaceId, SpaceId),
    birth: usize,
    events: &[(usize, Event)],
    made: Vec<bool>,
) {
    tables.fork(parent, child);
    let mut made = made.into_iter();
    for (order, event) in events {
        match event {
            // What was removed before the fork has no markers in the child, and none are to be left.
            Event::Remove(range) if *order < birth => tables.forget_leaving(child, range),
            Event::Changed(change) => match (change, made.next()) {
                (Change::Unmap(range), Some(true)) => tables.unmap(child, range.clone()),
                (Change::Remap(remap), Some(true)) => tables.remap(child, *remap),
                _ => {}
            },
            Event::Remove(_) | Event::Fork(_) => {}
        }
    }
}

/// Whether memory is registered at the address; `None` if that cannot be known.
fn has(space: &Space, at: u64) -> Option<bool> {
    let page = at..at + PAGE;
    let is_known = |set: &Mutex<RangeSet>| lock(set).overlaps(page.clone()).next().is_none();
    let is_there = match space.faults.registration(page.clone()) {
        Registration::Whole => Some(true),
        Registration::Not => Some(false).filter(|_| space.faults.is_alive()),
        Registration::Changing => None,
    };
    is_there.filter(|_| is_known(&space.relieved) && is_known(&space.unrecorded))
}
