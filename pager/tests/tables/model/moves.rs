//! Memory that moves.

use gms_pager::page_map::{CHUNK_PAGES, PAGE};
use gms_pager::tables::Remap;
use gms_policy::ids::SpaceId;

use super::{Model, PAGES, at, span};

/// The chunks in which the pages are, and where they go.
const CHUNK: u64 = CHUNK_PAGES * PAGE;
const HERE: u64 = (1 << 30) - CHUNK;
const THERE: u64 = 7 << 30;

impl Model {
    pub(super) fn remap(&mut self, space: SpaceId, from: u64, to: u64, count: u64) {
        let count = count.min(PAGES - from).min(PAGES - to);
        let whole = (from..from + count).all(|p| self.processes[&space].truth.contains_key(&at(p)));
        // A program that moves pages to where it is removing pages has no claim to any bytes.
        let removed = (to..to + count).any(|p| !self.removals_of((space, at(p))).is_empty());
        if count == 0 || from.abs_diff(to) < count || !whole || removed {
            return;
        }
        self.unmap(space, span(to, count));
        let remap = Remap { from: at(from).get(), to: at(to).get(), length: count * PAGE };
        self.tables.remap(space, remap);
        self.wake_range(space, &span(from, count));
        let freed = self.freed.clone();
        for i in 0..count {
            let (source, target) = (at(from + i), at(to + i));
            let process = self.process(space);
            if let Some(mut truth) = process.truth.remove(&source) {
                truth.leave(&freed);
                process.truth.insert(target, truth);
            }
            if let Some(tag) = process.present.remove(&source) {
                process.present.insert(target, tag);
            }
            if process.marks.remove(&source) {
                process.marks.insert(target);
            }
        }
    }

    /// All of it, with the chunks around it, to another place and back.
    pub(super) fn shift(&mut self, space: SpaceId) {
        let is_mapped = |page| self.processes[&space].truth.contains_key(&at(page));
        let is_removed = |page| !self.removals_of((space, at(page))).is_empty();
        if !(0..PAGES).all(is_mapped) || (0..PAGES).any(is_removed) {
            return;
        }
        for (from, to) in [(HERE, THERE), (THERE, HERE)] {
            self.tables.remap(space, Remap { from, to, length: 2 * CHUNK });
        }
        let all = span(0, PAGES);
        self.tables.unregister(space, HERE..all.start);
        self.tables.unregister(space, all.end..HERE + 2 * CHUNK);
        self.wake_range(space, &all);
        let freed = self.freed.clone();
        self.process(space).truth.values_mut().for_each(|truth| truth.leave(&freed));
    }
}
