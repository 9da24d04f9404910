//! Pages that the home of a space has another fault thread fetch, its *worker*.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};

use crate::page_map::Content;
use crate::space::Lent;
use crate::tables::Place;

/// Loans on their way to one worker.
const QUEUE_MAX: usize = 32;

/// A page to be fetched.
#[derive(Clone, Copy)]
pub struct Wanted {
    /// Where it belongs.
    pub place: Place,
    /// What is fetched.
    pub content: Content,
}

/// A page for which a thread waits, and those that are fetched along.
pub struct Loan {
    /// Its space.
    pub lent: Lent,
    /// The page.
    pub demanded: Wanted,
    /// The others, of the same space.
    pub ahead: Vec<Wanted>,
    /// When its home began to serve the fault.
    pub began: Instant,
}

/// What one fault thread may be lent, and how busy it is.
pub struct Loans {
    into: Sender<Loan>,
    from: Receiver<Loan>,
    /// Pages for which threads wait and that it fetches, as it said last.
    fetched: AtomicUsize,
}

impl Loans {
    /// None.
    pub fn new() -> Loans {
        let (into, from) = bounded(QUEUE_MAX);
        Loans { into, from, fetched: AtomicUsize::new(0) }
    }

    /// Pages that the thread fetches, or is to fetch, because threads wait for them.
    pub fn load(&self) -> usize {
        self.from.len() + self.fetched.load(Ordering::Relaxed)
    }

    /// The thread says how many it fetches.
    pub fn tell_fetched(&self, pages: usize) {
        self.fetched.store(pages, Ordering::Relaxed);
    }

    /// Gives a loan to the thread, or back if too many are on their way.
    ///
    /// # Errors
    /// The loan.
    pub fn give(&self, loan: Loan) -> Result<(), Box<Loan>> {
        self.into.try_send(loan).map_err(|error| match error {
            TrySendError::Full(loan) | TrySendError::Disconnected(loan) => Box::new(loan),
        })
    }

    /// The thread takes one.
    pub fn take(&self) -> Option<Loan> {
        // Asked in each turn: mostly there is none.
        if self.from.is_empty() { None } else { self.from.try_recv().ok() }
    }
}

impl Default for Loans {
    fn default() -> Loans {
        Loans::new()
    }
}
