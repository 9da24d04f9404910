//! Registering the mappings of a process, and proving it.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::{OUTBOX_LEN, Process};
use crate::kernel::journal::Caveat;
use crate::kernel::proc::{self, Mapping};
use crate::kernel::{Occupant, Registration};
use crate::page_map::PAGE;
use crate::range_set::RangeSet;
use crate::shared::Shared;
use crate::sync::lock;

/// Attempts to register what is mapped before that changes.
const REGISTER_TRIES: usize = 3;
/// Top of a thread's stack, where the C library keeps the thread's own data. The kernel writes the end of the thread there and does
/// not wait for a page then (handle_userfault refuses exiting threads), so that a join would wait for ever.
const THREAD_TOP: u64 = 2 * PAGE;
/// Guard areas below thread stacks are at most this long.
const GUARD_MAX: u64 = 1 << 20;
/// What cannot be paged is counted only so often, and not while the process is stopped for its attach: many mappings take long.
const UNPAGEABLE_EVERY: Duration = Duration::from_secs(1);
pub(super) const UNPAGEABLE_AFTER: Duration = Duration::from_millis(50);

impl Process {
    /// Registers what is mapped, and chooses what is swept. Returns anonymous bytes that cannot be paged.
    pub(super) fn register_mappings(&mut self, shared: &Shared) -> Option<u64> {
        let mappings = self.register_spans(shared)?;
        self.locked.expire(Instant::now());
        self.busy.expire(Instant::now());
        let registered = lock(&shared.tables).registered(self.space.id);
        let mut sweep = RangeSet::default();
        let counts = Instant::now() >= self.next_unpageable;
        let mut unpageable = 0;
        let (mut guarded, mut guards) = (RangeSet::default(), Vec::new());
        for (i, mapping) in mappings.iter().enumerate() {
            if !self.is_ours_to_page(mapping) {
                continue;
            }
            let spared: Vec<Range<u64>> =
                self.sweep.guarded.overlaps(mapping.range.clone()).collect();
            if !mapping.is_writable() {
                self.locked.forgive(mapping.range.clone());
            }
            let pageable = registered.gaps(mapping.range.clone()).is_empty()
                && !self.locked.are_of(&mapping.range)
                && mapping.is_writable()
                && !mapping.is_executable();
            if pageable {
                sweep.insert(mapping.range.clone());
                // A guard at its beginning makes it a stack, perhaps a large one.
                let is_guarded = spared.first().is_some_and(|s| s.start == mapping.range.start);
                if is_guarded || i > 0 && is_thread_stack(&mappings[i - 1], mapping) {
                    sweep.remove(mapping.range.end - THREAD_TOP..mapping.range.end);
                }
            }
            if counts && pageable {
                // No search goes there: others may be beside it.
                let resident =
                    spared.iter().map(|range| self.resident_in(range.clone(), &mut guards));
                unpageable += resident.sum::<u64>();
            } else if counts {
                unpageable += self.resident_in(mapping.range.clone(), &mut Vec::new());
            }
            spared.into_iter().for_each(|range| guarded.insert(range));
        }
        for page in &self.pinned {
            sweep.remove(page.get()..page.get() + PAGE);
        }
        self.busy.lasting().for_each(|range| sweep.remove(range));
        guarded.iter().for_each(|range| sweep.remove(range));
        self.sweep.guarded = guarded;
        self.sweep.victims.retain(|page| sweep.contains(page.get()));
        self.sweep.ranges = sweep;
        guards.into_iter().for_each(|guard| self.sweep.spare_guarded(guard));
        if counts {
            self.next_unpageable = Instant::now() + UNPAGEABLE_EVERY;
            self.unpageable = unpageable;
        }
        Some(self.unpageable)
    }

    fn is_ours_to_page(&self, mapping: &Mapping) -> bool {
        mapping.is_anonymous() && !self.is_ours(mapping)
    }

    fn is_ours(&self, mapping: &Mapping) -> bool {
        let blob = self.evictor.base();
        let overlaps = |start: u64, length: u64| {
            mapping.range.start < start + length && start < mapping.range.end
        };
        overlaps(blob, crate::arch::BLOB_LEN as u64) || overlaps(self.outbox, OUTBOX_LEN)
    }

    /// Bytes there; notes guards.
    fn resident_in(&self, range: Range<u64>, guards: &mut Vec<Range<u64>>) -> u64 {
        let mut regions = Vec::new();
        let mut at = range.start;
        let Some(page_tables) = self.page_tables() else { return 0 };
        while at < range.end {
            match page_tables.occupied(at..range.end, 0, &mut regions) {
                Ok(end) if end > at => at = end,
                _ => break,
            }
        }
        let guarded = regions.iter().filter(|region| region.by == Occupant::Guard);
        guards.extend(guarded.map(|region| region.range.clone()));
        let present = regions.iter().filter(|region| region.by == Occupant::Present);
        present.map(|region| region.range.end - region.range.start).sum()
    }

    /// Registers what is not yet; returns the mappings.
    ///
    /// A mapping that grows after we have read of it must not be registered in part: it would be split, and fail an mremap of the whole.
    /// So all between two mappings that are not to be registered is, whatever has come there meanwhile, and then mappings are looked at again.
    fn register_spans(&mut self, shared: &Shared) -> Option<Vec<Mapping>> {
        let maps = || proc::maps(self.evictor.pid().as_raw());
        let mut mappings = maps()?;
        self.note_replaced(shared, &mappings);
        for _ in 0..REGISTER_TRIES {
            let spans = self.unregistered_spans(shared, &mappings);
            if spans.is_empty() {
                break;
            }
            // An unmap that we have not seen must not come between a registration and its record.
            let _gate = lock(&self.space.gate);
            if !self.space.ungated.is_intact() {
                return None;
            }
            let note = |note: fn(&mut RangeSet, Range<u64>)| {
                let mut unrecorded = lock(&self.space.unrecorded);
                spans.iter().for_each(|span| note(&mut unrecorded, span.clone()));
            };
            note(RangeSet::insert);
            // Fails if something has come there that cannot be registered: found at the next look.
            for span in &spans {
                self.space.faults.register(span.clone());
            }
            mappings = maps()?;
            self.record(shared, &spans, &mappings);
            if !self.space.faults.has_event() && self.space.ungated.is_intact() {
                note(RangeSet::remove);
            }
        }
        Some(mappings)
    }

    /// Stretches between mappings which are not to be registered, in which something is that should be.
    fn unregistered_spans(&self, shared: &Shared, mappings: &[Mapping]) -> Vec<Range<u64>> {
        let registered = lock(&shared.tables).registered(self.space.id);
        let mut spans = Vec::new();
        let mut start = 0;
        let mut missing = false;
        for mapping in mappings {
            if self.is_ours_to_page(mapping) {
                missing |= !registered.gaps(mapping.range.clone()).is_empty();
                continue;
            }
            spans.extend(missing.then_some(start..mapping.range.start));
            (start, missing) = (mapping.range.end, false);
        }
        let end = mappings.last().map_or(start, |last| last.range.end);
        spans.extend(missing.then_some(start..end));
        spans.iter_mut().for_each(|span| span.start = span.start.max(PAGE));
        spans
    }

    /// The kernel skips holes silently; what it had not registered is unmapped without an event, and not registered in a child whose
    /// fork came first. So only what is proved counts; the rest is tried again at the next look.
    fn record(&self, shared: &Shared, spans: &[Range<u64>], mappings: &[Mapping]) {
        let within = |mapping: &&Mapping| {
            let next = spans.partition_point(|span| span.end < mapping.range.end);
            spans.get(next).is_some_and(|span| span.start <= mapping.range.start)
        };
        for mapping in mappings.iter().filter(within) {
            if !self.is_ours_to_page(mapping) {
                self.give_back(mapping.range.clone());
                continue;
            }
            self.record_mapping(shared, mapping);
        }
    }

    /// What has come where a span was registered, and is none of ours: shared memory is registered like ours. To unregister a mapping takes its markers
    /// away, so that it must not be one of ours that was moved here since: that raises an event, which stays unread while the gate is closed. What
    /// cannot be proved stays registered, and its first touches are filled with zeros like others.
    fn give_back(&self, range: Range<u64>) {
        let faults = &self.space.faults;
        let changes = || faults.has_event() || !self.space.ungated.is_intact();
        if faults.registration(range.clone()) != Registration::Whole || changes() {
            return;
        }
        faults.note(Caveat::Relieved, true);
        if faults.unregister(range.clone()) && changes() {
            // Whether it was moved to just here is seen when it is told.
            lock(&self.space.relieved).insert(range);
        } else {
            faults.note(Caveat::Relieved, false);
        }
    }

    fn record_mapping(&self, shared: &Shared, mapping: &Mapping) {
        let id = self.space.id;
        let range = mapping.range.clone();
        let tables = lock(&shared.tables);
        let parts = tables.unregistered_parts(id, range.clone());
        let known = parts.iter().any(|part| tables.knows(id, part.clone()));
        drop(tables);
        if parts.is_empty() {
            return;
        }
        // With the gate closed nothing comes to be known meanwhile.
        let page_tables = self.page_tables().filter(|_| known);
        let marked = page_tables.map(|tables| tables.marked(range));
        // What cannot be looked at has ended. A change that began while it was looked at fails the proof.
        let Some(marked) = marked.transpose().ok().filter(|_| self.is_registered(mapping)) else {
            return;
        };
        let marked = marked.unwrap_or_default();
        parts.into_iter().for_each(|part| lock(&shared.tables).register(id, part, &marked));
    }

    /// What has taken the place of memory that was registered, and is not ours to page, may have come without an event: shmat with SHM_REMAP
    /// raises none. If it has come by one that is unread, nothing is lost by looking again.
    fn note_replaced(&self, shared: &Shared, mappings: &[Mapping]) {
        let id = self.space.id;
        let mut tables = lock(&shared.tables);
        let registered = tables.registered(id);
        for mapping in mappings.iter().filter(|mapping| !self.is_ours_to_page(mapping)) {
            for part in registered.overlaps(mapping.range.clone()) {
                tables.unregister(id, part.clone());
                tables.look_again(id, part);
            }
        }
    }

    /// Whether the whole mapping is registered, and with us: it could be with a userfaultfd of the program's own, which is refused to us.
    fn is_registered(&self, mapping: &Mapping) -> bool {
        self.space.faults.register(mapping.range.clone())
            && self.space.faults.registration(mapping.range.clone()) == Registration::Whole
    }
}

/// Thread stacks of the C libraries lie right above an inaccessible guard.
fn is_thread_stack(below: &Mapping, mapping: &Mapping) -> bool {
    below.is_anonymous()
        && below.perms[..3] == *b"---"
        && below.range.end == mapping.range.start
        && below.range.end - below.range.start <= GUARD_MAX
}
