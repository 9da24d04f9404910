//! New keys for a running agent, handed from the thread that reads them to the loop.

use gms_transport::keys::Identity;
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// At most one identity that the loop has not taken yet.
#[derive(Debug)]
pub struct Renewal {
    /// Whether there is one, so that the loop need not lock to look.
    pending: AtomicBool,
    identity: Mutex<Option<Identity>>,
    /// Readable while there is one.
    wake: EventFd,
}

impl Renewal {
    /// Nothing to take.
    pub fn new() -> io::Result<Self> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self { pending: AtomicBool::new(false), identity: Mutex::new(None), wake })
    }

    /// Has the loop take `identity`; one which it has not taken yet is replaced.
    pub fn offer(&self, identity: Identity) {
        *self.identity.lock().unwrap_or_else(PoisonError::into_inner) = Some(identity);
        self.pending.store(true, Ordering::Release);
        // Fails only when its count is full, and then it is readable, which is all that is wanted.
        let _ = self.wake.write(1);
    }

    /// What was offered since.
    pub fn take(&self) -> Option<Identity> {
        if !self.pending.load(Ordering::Acquire) {
            return None;
        }
        self.pending.store(false, Ordering::Relaxed);
        // Fails only when it was not readable yet.
        let _ = self.wake.read();
        self.identity.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl AsFd for Renewal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
