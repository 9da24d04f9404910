//! Asks the agent's threads to end, whether they spin or block.

use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// A request to stop, given once.
#[derive(Debug)]
pub struct Stop {
    requested: AtomicBool,
    grace_ms: AtomicU64,
    /// Readable from the request on.
    wake: EventFd,
}

impl Stop {
    /// Not requested yet.
    pub fn new() -> io::Result<Self> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self { requested: AtomicBool::new(false), grace_ms: AtomicU64::new(0), wake })
    }

    /// Asks to stop; workloads get `grace` to take their pages away. A second request can shorten it.
    pub fn request(&self, grace: Duration) {
        self.grace_ms.store(grace.as_millis().try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
        self.requested.store(true, Ordering::Release);
        // Fails only when its count is full, and then it is readable, which is all that is wanted.
        let _ = self.wake.write(1);
    }

    /// The grace, once stopping was requested.
    pub fn requested(&self) -> Option<Duration> {
        let requested = self.requested.load(Ordering::Acquire);
        requested.then(|| Duration::from_millis(self.grace_ms.load(Ordering::Relaxed)))
    }
}

impl AsFd for Stop {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
