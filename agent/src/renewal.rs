//! New keys for a running agent, handed from the thread that reads them to the loops.

use gms_transport::keys::Identity;
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// An identity for all loops.
#[derive(Debug)]
pub struct Offer {
    /// The identity.
    pub identity: Identity,
    /// Loops that have not taken it.
    left: AtomicUsize,
    /// Whether one of them could not.
    failed: AtomicBool,
}

impl Offer {
    /// For `loops` loops.
    pub fn new(identity: Identity, loops: usize) -> Arc<Self> {
        Arc::new(Self { identity, left: loops.into(), failed: AtomicBool::new(false) })
    }

    /// A loop has taken it, or (`ok` is false) could not. The last one is told whether all have.
    pub fn note_taken(&self, ok: bool) -> Option<bool> {
        self.failed.fetch_or(!ok, Ordering::AcqRel);
        let is_last = self.left.fetch_sub(1, Ordering::AcqRel) == 1;
        is_last.then(|| !self.failed.load(Ordering::Acquire))
    }
}

/// At most one offer that a loop has not taken yet.
#[derive(Debug)]
pub struct Renewal {
    /// Whether there is one, so that the loop need not lock to look.
    pending: AtomicBool,
    offer: Mutex<Option<Arc<Offer>>>,
    /// Readable while there is one.
    wake: EventFd,
}

impl Renewal {
    /// Nothing to take.
    pub fn new() -> io::Result<Self> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self { pending: AtomicBool::new(false), offer: Mutex::new(None), wake })
    }

    /// Has the loop take `offer`; one which it has not taken yet is replaced.
    pub fn offer(&self, offer: Arc<Offer>) {
        *self.offer.lock().unwrap_or_else(PoisonError::into_inner) = Some(offer);
        // Fails only when its count is full, and then it is readable, which is all that is wanted. Whoever sees `pending` is to find it written: what is
        // written later nobody would read.
        let _ = self.wake.write(1);
        self.pending.store(true, Ordering::Release);
    }

    /// What was offered since.
    pub fn take(&self) -> Option<Arc<Offer>> {
        if !self.pending.load(Ordering::Acquire) {
            return None;
        }
        self.pending.store(false, Ordering::Relaxed);
        // Fails only when it was not readable yet.
        let _ = self.wake.read();
        self.offer.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl AsFd for Renewal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gms_transport::keys::ephemeral;
    use nix::errno::Errno;

    #[test]
    fn keys_are_renewed_when_the_last_loop_has_taken_them() {
        let (node, _) = ephemeral().expect("keys");
        let loops = [(); 3].map(|()| Renewal::new().expect("a descriptor"));
        let offer = Offer::new(node, loops.len());
        loops.iter().for_each(|renewal| renewal.offer(offer.clone()));
        let last = loops.map(|renewal| renewal.take().expect("an offer").note_taken(true));
        assert_eq!(last, [None, None, Some(true)]);
    }

    #[test]
    fn keys_that_one_loop_could_not_take_are_not_renewed() {
        let (node, _) = ephemeral().expect("keys");
        let offer = Offer::new(node, 3);
        assert_eq!([false, true, true].map(|ok| offer.note_taken(ok)), [None, None, Some(false)]);
    }

    /// A loop that waits would be woken for ever.
    #[test]
    fn nothing_is_readable_when_all_was_taken() {
        const OFFERS: usize = 20_000;
        let (node, _) = ephemeral().expect("keys");
        let (renewal, offer) = (Renewal::new().expect("a descriptor"), Offer::new(node, 1));
        let taken = AtomicUsize::new(0);
        // Counted, and asserted outside: the other thread ends with the last offer only.
        let (mut twice, mut readable) = (0, 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while taken.load(Ordering::SeqCst) < OFFERS {
                    if renewal.take().is_some() {
                        taken.fetch_add(1, Ordering::SeqCst);
                    }
                }
            });
            for round in 1..=OFFERS {
                renewal.offer(offer.clone());
                while taken.load(Ordering::SeqCst) < round {
                    std::thread::yield_now();
                }
                twice += usize::from(renewal.take().is_some());
                readable += usize::from(renewal.wake.read() != Err(Errno::EAGAIN));
            }
        });
        assert_eq!((twice, readable), (0, 0));
    }
}
