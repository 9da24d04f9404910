//! The lock of the tables.
//!
//! What a thread changes while it holds it are the changes of one transaction: if the process dies before the guard is dropped, none of them was made.
//!
//! So whoever adopts the tables goes on with what they say between two holds, with the page tables, and with the events that nobody has read or that are in the
//! journal ([`crate::kernel::journal`]). What is being removed the dead alone knew: nothing that is away is served until it is proved that nothing is (`adoption.rs`).
//! Lost with it are
//! - events that were read and not applied, if they were more than the journal keeps;
//! - pages that are about to be poisoned;
//! - with parity, the stripes.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard};

use super::Tables;
use crate::sync::{Lock, lock};

/// See the module's documentation.
pub struct TablesLock(Mutex<Tables>);

impl TablesLock {
    /// Nobody holds it.
    pub fn new(tables: Tables) -> TablesLock {
        TablesLock(Mutex::new(tables))
    }

    /// Whether somebody holds it.
    pub fn is_held(&self) -> bool {
        self.0.try_lock().is_err()
    }
}

impl Lock for TablesLock {
    type Guard<'a> = TablesGuard<'a>;

    fn hold(&self) -> TablesGuard<'_> {
        TablesGuard { tables: lock(&self.0), has_changes: false }
    }
}

/// Tables that are held. They are committed when they are let go.
pub struct TablesGuard<'a> {
    tables: MutexGuard<'a, Tables>,
    has_changes: bool,
}

impl Deref for TablesGuard<'_> {
    type Target = Tables;

    fn deref(&self) -> &Tables {
        &self.tables
    }
}

impl DerefMut for TablesGuard<'_> {
    fn deref_mut(&mut self) -> &mut Tables {
        self.has_changes = true;
        &mut self.tables
    }
}

impl Drop for TablesGuard<'_> {
    fn drop(&mut self) {
        // What a panic has left half done is not to be found by anybody.
        if self.has_changes && !std::thread::panicking() {
            self.tables.commit();
        }
    }
}
