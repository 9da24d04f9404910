//! Every history that somebody who sees what gms sees must think possible: whether a workload that was stopped for a doubt was stopped for a reason.

use std::collections::{BTreeMap, BTreeSet};

use gms_pager::page_map::PAGE;
use gms_pager::tables::Change;

use crate::model::Memory;

/// More changes than this are too many to try all orders of.
const CHANGES_MAX: usize = 7;

/// What was known before some changes, and what may have happened beside them.
#[derive(Clone, Default)]
pub(crate) struct Known {
    before: Memory,
    /// Some memory has grown, and nobody was told.
    pub has_grown: bool,
}

/// Which page is at which address: of those that have markers, and of those that are to get them.
type Places = [BTreeMap<u64, u64>; 2];

impl Known {
    pub(crate) fn new(before: &Memory) -> Known {
        Known { before: before.clone(), has_grown: false }
    }

    /// Whether several orders of the changes lead to the markers that there are now, with different pages.
    pub(crate) fn order_is_in_doubt(&self, changes: &[Change], now: &Memory) -> bool {
        let mut found = BTreeSet::new();
        let all = self.histories(changes, now, |states| {
            let Some(last) = states.last() else { return };
            found.insert(places(last, |address| now.away.contains_key(&address)));
        });
        let is = places(now, |_| true);
        assert!(!all || found.contains(&is), "what has happened is not among {found:?}");
        !all || found.len() > 1
    }

    /// Whether the pages of the child can lie in several ways.
    pub(crate) fn birth_is_in_doubt(
        &self,
        changes: &[Change],
        now: &Memory,
        child: &Memory,
    ) -> bool {
        let is_there =
            |address: u64| child.away.contains_key(&address) || child.present.contains(&address);
        let mut found = BTreeSet::new();
        let all = self.histories(changes, now, |states| {
            let moments = states.iter().filter(|state| self.may_be(state, child, is_there));
            found.extend(moments.map(|state| places(state, is_there)));
        });
        let is = places(child, |_| true);
        assert!(!all || found.contains(&is), "what the child has is not among {found:?}");
        !all || found.len() > 1
    }

    /// Whether a child that was born when its parent had `state` can be this one. It may have more, if that is empty: what has grown meanwhile. It may
    /// lack what its parent had (`dup_mmap` skips VM_DONTCOPY), but for pages that are away: gms takes it that those are inherited (docs/design.md,
    /// weakness 16). That nothing is there where its parent had a page refutes nothing: MADV_GUARD_INSTALL zaps pages and markers without an event.
    fn may_be(&self, state: &Memory, child: &Memory, is_there: impl Fn(u64) -> bool) -> bool {
        let mut pages = state.away.keys().chain(state.leaving.keys());
        let has = pages.all(|&address| child.registered.contains(address));
        let more = child.registered.iter().flat_map(|part| state.registered.gaps(part));
        has && more.flat_map(|part| part.step_by(PAGE as usize)).all(|at| !is_there(at))
    }

    /// Visits the states of each possible history, from before the changes to now. False if there are too many to try.
    fn histories(
        &self,
        changes: &[Change],
        now: &Memory,
        mut visit: impl FnMut(&[Memory]),
    ) -> bool {
        if changes.len() > CHANGES_MAX {
            return false;
        }
        let mut left: Vec<&Change> = changes.iter().collect();
        self.follow(&mut vec![self.before.clone()], &mut left, now, &mut visit);
        true
    }

    fn follow(
        &self,
        states: &mut Vec<Memory>,
        left: &mut Vec<&Change>,
        now: &Memory,
        visit: &mut impl FnMut(&[Memory]),
    ) {
        let Some(state) = states.last().cloned() else { return };
        // There may be fewer markers than pages, see `may_be`.
        if left.is_empty() && now.away.keys().all(|address| state.away.contains_key(address)) {
            visit(states);
        }
        for index in 0..left.len() {
            let change = left.remove(index);
            if let Some(then) = self.after(&state, change) {
                states.push(then);
                self.follow(states, left, now, visit);
                states.pop();
            }
            left.insert(index, change);
        }
    }

    /// The memory after the change; `None` if the kernel could not have made it then. A remap leads to where nothing is: what was there would have
    /// been unmapped by it, and told of before it (`uf_unmap_early`). What it leaves need not have been known, because memory grows in place without a word;
    /// and an unmap may span holes (`userfaultfd_unmap_prep` tells of the whole range).
    fn after(&self, state: &Memory, change: &Change) -> Option<Memory> {
        let taken = |range| state.registered.overlaps(range).next().is_some();
        if change.reached().is_some_and(taken) {
            return None;
        }
        let mut then = state.clone();
        match change {
            Change::Unmap(range) => then.unmap(range),
            Change::Remap(remap) => {
                then.registered.insert(remap.source());
                then.remap(remap);
            }
        }
        Some(then)
    }
}

fn places(memory: &Memory, seen: impl Fn(u64) -> bool) -> Places {
    let marked = memory.away.iter().filter(|(address, _)| seen(**address));
    [marked.map(|(a, tag)| (*a, *tag)).collect(), memory.leaving.clone()]
}
