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
use crate::kernel::{Event, Faults};
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

impl SpaceRecord {
    /// Of a child that nobody has met yet.
    pub(crate) fn of_orphan(id: SpaceId, faults: Number) -> SpaceRecord {
        SpaceRecord {
            id: id.0,
            faults,
            pid: 0,
            evictor: 0,
            same_ids: false,
            threaded: true,
            relieved: RangeSet::default(),
            unrecorded: RangeSet::default(),
        }
    }

    /// A duplicate of its userfaultfd.
    pub(crate) fn userfaultfd(&self) -> io::Result<Uffd> {
        let fd = self.faults.take()?;
        if !is_userfaultfd(fd.as_raw_fd()) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: a userfaultfd which we own and give away here.
        Ok(unsafe { Uffd::from_raw_fd(fd.into_raw_fd()) })
    }
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
        let faults = Userfaultfd::of_child(record.userfaultfd()?).kept(journal);
        Ok(Space::restored(record, faults))
    }

    /// The space of a pager that has died, and what that had read of its changes and not applied. Whether it has more than one thread is not known, nor what is
    /// registered.
    pub(crate) fn left(record: SpaceRecord, faults: Userfaultfd) -> (Space, Vec<Event>) {
        let mut faults = faults;
        let events = faults.take_left();
        let space = Space::restored(record, faults);
        space.threaded.store(true, Ordering::Relaxed);
        *lock(&space.relieved) = RangeSet::default();
        lock(&space.unrecorded).insert(0..u64::MAX);
        if !events.is_empty() {
            space.ungated.hold();
        }
        (space, events)
    }

    fn restored(record: SpaceRecord, faults: Userfaultfd) -> Space {
        let space = Space::new(SpaceId(record.id), Box::new(faults));
        space.pid.store(record.pid, Ordering::Relaxed);
        space.evictor.store(record.evictor, Ordering::Relaxed);
        space.same_ids.store(record.same_ids, Ordering::Relaxed);
        space.threaded.store(record.threaded, Ordering::Relaxed);
        *lock(&space.relieved) = record.relieved;
        *lock(&space.unrecorded) = record.unrecorded;
        space
    }
}
