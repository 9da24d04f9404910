//! Detaching: every page comes home, then nothing is registered and no evictor is left.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use gms_transport::Transport;

use super::{EvictThread, PREFETCHES_MAX};
use crate::page_map::PAGE;
use crate::session::Outcome;
use crate::shared::{Space, lock};
use crate::uffd::Installed;

impl<T: Transport> EvictThread<T> {
    /// Brings pages home a step further; when all are, lets the workload go.
    pub(super) fn bring_home(&mut self, now: Instant) -> bool {
        self.shared.ceiling.store(i64::MAX, Ordering::Relaxed);
        let spaces: Vec<Arc<Space>> = self.spaces.values().cloned().collect();
        let mut busy = false;
        for space in spaces {
            busy |= self.bring_home_buffered(&space);
            let mut from = 0;
            while self.ahead.len() < PREFETCHES_MAX {
                let pages = lock(&self.shared.tables).remote_pages_from(space.id, from, 64);
                let Some(last) = pages.last() else { break };
                from = last.get() + PAGE;
                self.fetch(now, space.id, &pages);
            }
        }
        let home = lock(&self.shared.tables).is_all_home();
        if home && self.ahead.is_empty() {
            self.let_go();
        }
        busy
    }

    fn bring_home_buffered(&mut self, space: &Arc<Space>) -> bool {
        let _gate = lock(&space.gate);
        let mut tables = lock(&self.shared.tables);
        let buffered = tables.buffered_pages(space.id);
        for &(page, slot) in &buffered {
            let outcome = space.faults.copy(page.get(), self.shared.frames.read(slot));
            if matches!(outcome, Installed::Done | Installed::Exists) {
                tables.second_chance((space.id, page));
            }
        }
        !buffered.is_empty()
    }

    fn let_go(&mut self) {
        for (_, process) in std::mem::take(&mut self.processes) {
            let id = process.space.id;
            lock(&self.shared.evictors).retain(|&e| e != process.evictor_pid());
            process.release(&self.shared);
            self.drop_space(id);
        }
        for space in std::mem::take(&mut self.orphans) {
            for range in lock(&self.shared.tables).registered(space.id).iter() {
                let _ = space.faults.unregister(range);
            }
            self.drop_space(space.id);
        }
        self.publish();
        self.shared.finish(Outcome::Detached);
    }
}
