//! A process as the next binary of its pager is told of it.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use gms_policy::ids::{PageAddr, SpaceId};
use serde::{Deserialize, Serialize};

use super::{OUTBOX_PAGES, Process};
use crate::evictor::{Evictor, EvictorRecord};
use crate::handed::{Descriptors, Number};
use crate::kernel::pagemap::Pagemap;
use crate::kernel::proc::Measure;
use crate::space::Space;

/// See [`Process`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ProcessRecord {
    pub(crate) pid: i32,
    space: u64,
    witness: i32,
    pinned: Vec<u64>,
    page_tables: Number,
    measure: Number,
    pidfd: Number,
    evictor: EvictorRecord,
    uffd_number: u64,
    outbox: u64,
    outbox_used: usize,
}

impl Process {
    /// What the next binary needs. `None` if it is not known by what its page tables are read.
    pub(crate) fn hand_over(&self, to: &mut Descriptors) -> Option<ProcessRecord> {
        Some(ProcessRecord {
            pid: self.pid,
            space: self.space.id.0,
            witness: self.witness,
            pinned: self.pinned.iter().map(|page| page.get()).collect(),
            page_tables: to.give(self.page_tables()?.file()?),
            measure: to.give(self.measure.file()),
            pidfd: to.give(&self.pidfd),
            evictor: self.evictor.hand_over(to),
            uffd_number: self.uffd_number,
            outbox: self.outbox,
            outbox_used: self.outbox_used,
        })
    }

    /// The process again, whose memory is one of `spaces`.
    pub(crate) fn again(
        record: ProcessRecord,
        spaces: &BTreeMap<SpaceId, Arc<Space>>,
    ) -> io::Result<Process> {
        let space = spaces.get(&SpaceId(record.space)).ok_or(io::ErrorKind::InvalidData)?.clone();
        let evictor = Evictor::again(&record.evictor)?;
        let page_tables = Pagemap::of(evictor.pid().as_raw(), record.page_tables.take()?);
        // Nobody else has set it: one process has the space.
        let _ = space.page_tables.set(Box::new(page_tables));
        let (measure, pidfd) = (Measure::of(record.measure.take()?), record.pidfd.take()?);
        let process = Process::of(record.pid, space, measure, pidfd, evictor);
        Ok(Process {
            witness: record.witness,
            pinned: record.pinned.into_iter().map(PageAddr::containing).collect(),
            uffd_number: record.uffd_number,
            outbox: record.outbox,
            outbox_used: record.outbox_used.min(OUTBOX_PAGES),
            ..process
        })
    }

    /// The same of a pager that has died, when it is over what that had it told. What is in its outbox is not known.
    pub(crate) fn left(
        record: ProcessRecord,
        spaces: &BTreeMap<SpaceId, Arc<Space>>,
    ) -> io::Result<Process> {
        let mut process = Process { outbox_used: OUTBOX_PAGES, ..Process::again(record, spaces)? };
        match process.evictor.drain() {
            Err(errno) if !process.evictor_died() => Err(errno.into()),
            _ => Ok(process),
        }
    }
}
