//! A space as the next binary of its pager is told of it: all that was read is applied, and no worker is under way.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use gms_policy::ids::SpaceId;
use serde::{Deserialize, Serialize};
use userfaultfd::Uffd;

use super::Space;
use crate::handed::{Descriptors, Number};
use crate::kernel::journal::Journal;
use crate::kernel::uffd::{Userfaultfd, is_userfaultfd};
use crate::range_set::RangeSet;
use crate::sync::lock;

/// See [`Space`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SpaceRecord {
    pub(crate) id: u64,
    faults: Number,
    pid: i32,
    evictor: i32,
    same_ids: bool,
    threaded: bool,
    relieved: RangeSet,
    unrecorded: RangeSet,
}

impl Space {
    /// What the next binary needs.
    pub(crate) fn hand_over(&self, to: &mut Descriptors) -> SpaceRecord {
        SpaceRecord {
            id: self.id.0,
            faults: to.give(&self.faults),
            pid: self.pid.load(Ordering::Relaxed),
            evictor: self.evictor.load(Ordering::Relaxed),
            same_ids: self.same_ids.load(Ordering::Relaxed),
            threaded: self.threaded.load(Ordering::Relaxed),
            relieved: lock(&self.relieved).clone(),
            unrecorded: lock(&self.unrecorded).clone(),
        }
    }

    /// The space again. What is read of it is kept in the journal.
    pub(crate) fn again(record: SpaceRecord, journal: &Arc<Journal>) -> io::Result<Space> {
        let fd = record.faults.take()?;
        if !is_userfaultfd(fd.as_raw_fd()) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: a userfaultfd which we own and give away here.
        let uffd = unsafe { Uffd::from_raw_fd(fd.into_raw_fd()) };
        let faults = Userfaultfd::of_child(uffd).kept(journal);
        let space = Space::new(SpaceId(record.id), Box::new(faults));
        space.pid.store(record.pid, Ordering::Relaxed);
        space.evictor.store(record.evictor, Ordering::Relaxed);
        space.same_ids.store(record.same_ids, Ordering::Relaxed);
        space.threaded.store(record.threaded, Ordering::Relaxed);
        *lock(&space.relieved) = record.relieved;
        *lock(&space.unrecorded) = record.unrecorded;
        Ok(space)
    }
}
