//! Locks and event counters.

use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use nix::sys::eventfd::{EfdFlags, EventFd};

/// An event counter at 0, which does not block.
pub fn event_fd() -> nix::Result<EventFd> {
    EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
}

/// What one thread at a time holds.
pub trait Lock {
    /// Held until it is dropped.
    type Guard<'a>
    where
        Self: 'a;

    /// See [`lock`].
    fn hold(&self) -> Self::Guard<'_>;
}

impl<T> Lock for Mutex<T> {
    type Guard<'a>
        = MutexGuard<'a, T>
    where
        T: 'a;

    fn hold(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Locks; a panic of another thread ends the process anyway (see `session`).
pub fn lock<L: Lock>(lock: &L) -> L::Guard<'_> {
    lock.hold()
}

/// Locks with others who do so; as [`lock`].
pub fn lock_shared<T>(rwlock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    rwlock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Locks alone; as [`lock`].
pub fn lock_alone<T>(rwlock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    rwlock.write().unwrap_or_else(PoisonError::into_inner)
}

/// Empties an event counter.
pub fn drain(event: &EventFd) {
    let mut count = [0u8; 8];
    // Fails with EAGAIN when it is empty already.
    let _ = nix::unistd::read(event.as_fd(), &mut count);
}
