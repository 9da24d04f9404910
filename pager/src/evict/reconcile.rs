//! What the workload has discarded: the kernel says so before it is done (MADV_DONTNEED), and markers tell afterwards.

use std::ops::Range;

use gms_transport::Transport;

use super::EvictThread;
use crate::shared::Shared;
use crate::space::Space;
use crate::sync::lock;

/// Memory looked at under the gate.
const STEP: u64 = 64 << 20;

impl<T: Transport> EvictThread<T> {
    /// Lets agents forget what has been discarded. Each removal is looked at once, some time after it was told: what is still there
    /// then (MADV_FREE leaves it) goes when it is touched or unmapped.
    pub(super) fn reconcile(&mut self) {
        for process in self.processes.values() {
            let stale = lock(&self.shared.tables).take_stale(process.space.id);
            for range in stale.iter() {
                let mut at = range.start;
                while at < range.end {
                    let end = range.end.min(at + STEP);
                    if !reconcile(&self.shared, &process.space, at..end) {
                        lock(&self.shared.tables).look_again(process.space.id, at..end);
                    }
                    at = end;
                }
            }
        }
    }
}

/// Compares what is known with what is there. False if that cannot be known now.
pub fn reconcile(shared: &Shared, space: &Space, range: Range<u64>) -> bool {
    let Some(page_tables) = space.page_tables.get() else { return true };
    let _gate = lock(&space.gate);
    let marked = page_tables.marked(range.clone());
    let taken = page_tables.taken(range.clone());
    // While an event is unread, pages may be where we do not know.
    if space.faults.has_event() || !space.ungated.is_intact() {
        return false;
    }
    if let (Ok(marked), Ok(taken)) = (marked, taken) {
        lock(&shared.tables).reconcile(space.id, range, &marked, &taken);
    }
    true
}
