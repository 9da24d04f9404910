//! What a pager leaves if it dies, so that another can go on: a record as for `gms upgrade`, beside the memory in which the tables and the journal are.
//!
//! The evict thread writes it anew whenever somebody comes or goes. What it names stays open until then, or it is withdrawn before. Who has come since is in no
//! record: the journal names their spaces, so that the heir finds them, or sees that it cannot go on.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use crate::board;
use crate::handed::Descriptors;
use crate::sync::lock;

/// What the evict thread knows, and the descriptors of that.
pub(crate) type Known = (Value, Descriptors);

/// Writes the record, or forgets what was written before.
pub(crate) type Leave = Box<dyn Fn(Option<Known>) -> io::Result<()> + Send>;

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct Estate {
    leave: Mutex<Option<Leave>>,
    wanted: AtomicBool,
    inherited: AtomicBool,
    due: AtomicBool,
}

impl Estate {
    /// From now on it is written.
    pub(crate) fn begin(&self, leave: Leave) {
        *lock(&self.leave) = Some(leave);
        self.due.store(true, Ordering::Relaxed);
        self.wanted.store(true, Ordering::Release);
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

    /// This pager goes on by what another one has left, which names what is open here too.
    pub(crate) fn inherit(&self) {
        self.inherited.store(true, Ordering::Release);
    }

    /// Whether what is open here may be named in what is left.
    pub(crate) fn may_name(&self) -> bool {
        self.wanted.load(Ordering::Acquire) || self.inherited.load(Ordering::Acquire)
    }

    /// Whether it is to be written anew: not before it is written at all, since what another pager has left is good until then.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.due.load(Ordering::Relaxed) && self.wanted.load(Ordering::Acquire)
    }

    /// What is known from now on is about to be written: who changes it meanwhile has it written again.
    pub(crate) fn begin_writing(&self) {
        self.due.store(false, Ordering::SeqCst);
    }

    /// Writes it. Nothing is left by who cannot.
    pub(crate) fn write(&self, known: Option<Known>) {
        if known.is_none() {
            board::leave_nothing();
        }
        if lock(&self.leave).as_ref().is_none_or(|leave| leave(known).is_err()) {
            board::leave_nothing();
        }
    }
}
