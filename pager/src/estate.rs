//! What a pager leaves if it dies, so that another can go on: a record as for `gms upgrade`, beside the memory in which the tables and the journal are.
//!
//! The evict thread writes it anew whenever it names others. Before a descriptor is closed that it names, it is withdrawn. Who comes later than it is in no
//! record: the journal names their spaces, so that the heir sees that there are some, and does not go on.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use crate::board;
use crate::handed::Descriptors;
use crate::sync::lock;

/// Writes the record: what the evict thread knows, and the descriptors of that, are given.
pub(crate) type Leave = Box<dyn Fn(Value, Descriptors) -> io::Result<()> + Send>;

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct Estate {
    leave: Mutex<Option<Leave>>,
    due: AtomicBool,
}

impl Estate {
    /// From now on it is written.
    pub(crate) fn begin(&self, leave: Leave) {
        *lock(&self.leave) = Some(leave);
        self.due.store(true, Ordering::Relaxed);
    }

    /// What was written is not true any more.
    pub(crate) fn withdraw(&self) {
        board::leave_nothing();
        self.due.store(true, Ordering::Relaxed);
    }

    /// Others have come, who are not named.
    pub(crate) fn extend(&self) {
        self.due.store(true, Ordering::Relaxed);
    }

    /// Whether it is to be written anew.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.due.load(Ordering::Relaxed)
    }

    /// Writes it. Nothing is left by who cannot.
    pub(crate) fn write(&self, known: Option<(Value, Descriptors)>) {
        self.due.store(false, Ordering::Relaxed);
        let leave = lock(&self.leave);
        let (Some(leave), Some((known, descriptors))) = (leave.as_ref(), known) else {
            return board::leave_nothing();
        };
        if leave(known, descriptors).is_err() {
            board::leave_nothing();
        }
    }

    /// Whether anybody is to go on.
    pub(crate) fn is_wanted(&self) -> bool {
        lock(&self.leave).is_some()
    }
}
