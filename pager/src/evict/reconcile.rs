//! What the workload has discarded: the kernel says so before it is done (MADV_DONTNEED), and markers tell afterwards.

use std::ops::Range;

use gms_transport::Transport;

use super::EvictThread;
use crate::process::Process;
use crate::shared::{Shared, lock};

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
                    if !reconcile(&self.shared, process, at..end) {
                        lock(&self.shared.tables).look_again(process.space.id, at..end);
                    }
                    at = end;
                }
            }
        }
    }
}

/// False if it cannot be known now what is there.
fn reconcile(shared: &Shared, process: &Process, range: Range<u64>) -> bool {
    let space = &process.space;
    let Some(page_tables) = process.page_tables() else { return true };
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
