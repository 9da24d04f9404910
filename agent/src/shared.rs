//! What the threads of an agent share: the pages, the accounts of their owners, and what is told of both.
//!
//! Accounts have one lock, held for tens of nanoseconds two or three times a request, and never over work on pages: whoever does that
//! [holds](Tenants::hold) the tenant meanwhile. Lock order: accounts, or any lock of the [`Store`]; never both.

use crate::bulletin::Bulletin;
use crate::limits::TRIM_IDLE;
use crate::quota::Quota;
use crate::stats::Gauges;
use crate::store::{Store, lock};
use crate::tenants::{Session, Tenants};
use gms_policy::{PageCount, Recall};
use gms_transport::PeerId;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

/// The state of an agent that is not of one thread.
pub struct Shared {
    /// The pages.
    pub store: Store,
    /// What is told of all threads together.
    pub gauges: Arc<Gauges>,
    /// Once the agent is a member.
    pub(crate) bulletin: OnceLock<Arc<Bulletin>>,
    accounts: Mutex<Tenants>,
    /// What every turn of a loop asks of the accounts, without their lock.
    dead_pages: AtomicU64,
    leased: AtomicUsize,
    quota: Mutex<Quota>,
    recall: Mutex<Recall>,
    started: Instant,
    /// Since `started`.
    last_put_ms: AtomicU64,
    draining: AtomicBool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("gauges", &self.gauges).finish_non_exhaustive()
    }
}

impl Shared {
    /// An agent which exports the frames of `store`.
    pub fn new(now: Instant, store: Store) -> Self {
        Self {
            store,
            gauges: Arc::default(),
            bulletin: OnceLock::new(),
            // The standard library's hashers are the random numbers which it has.
            accounts: Tenants::new(RandomState::new().build_hasher().finish()).into(),
            dead_pages: 0.into(),
            leased: 0.into(),
            quota: Mutex::default(),
            recall: Mutex::default(),
            started: now,
            last_put_ms: 0.into(),
            draining: false.into(),
        }
    }

    /// The accounts, locked.
    pub fn accounts(&self) -> Accounts<'_> {
        Accounts { tenants: lock(&self.accounts), shared: self }
    }

    /// Pages of ended tenants that are still to be swept.
    pub fn dead_pages(&self) -> u64 {
        self.dead_pages.load(Relaxed)
    }

    /// Tenants without a link, whose lease runs.
    pub fn leased(&self) -> usize {
        self.leased.load(Relaxed)
    }

    /// Whether there may be another line of the log about what a client does.
    pub fn may_log(&self, now: Instant, client: Option<PeerId>) -> bool {
        lock(&self.quota).admits(now, client)
    }

    /// Seconds since the start.
    pub fn seconds(&self, now: Instant) -> u32 {
        now.saturating_duration_since(self.started).as_secs() as u32
    }

    fn millis(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.started).as_millis() as u64
    }

    /// A page was put.
    pub fn note_put(&self, now: Instant) {
        let now = self.millis(now);
        if self.last_put_ms.load(Relaxed) < now {
            self.last_put_ms.store(now, Relaxed);
        }
    }

    /// Whether free memory is to be given back step by step: no page has been put for [`TRIM_IDLE`], or there are more than are exported.
    pub fn rests(&self, now: Instant) -> bool {
        self.store.frames_over() > 0
            || self.millis(now) >= self.last_put_ms.load(Relaxed) + TRIM_IDLE.as_millis() as u64
    }

    /// Exports so many frames from now on.
    pub fn set_frames(&self, frames: u32) {
        self.store.set_frames(frames);
        self.publish_frames();
    }

    /// Tells how many frames there are, and are in use.
    fn publish_frames(&self) {
        let (store, gauges) = (&self.store, &self.gauges);
        gauges.frames_total.set(store.frames().into());
        gauges.frames_free.set(store.frames_free().into());
        gauges.frames_used.set(store.frames_used().into());
        gauges.frames_over.set(store.frames_over().into());
    }

    /// Tells all that is told of all threads together.
    pub fn publish(&self, now: Instant) {
        self.publish_frames();
        self.gauges.oldest_age_s.set(u64::from(self.store.oldest_age(self.seconds(now))));
        self.gauges.tenants.set(self.accounts().len() as u64);
    }

    /// Pages that a workload is to take away now: its part of those that are asked for, and more as they go.
    pub fn recall(&self, now: Instant, session: Option<Session>) -> u32 {
        let (over, used) = (self.store.frames_over(), self.store.frames_used());
        let session = session.filter(|_| over > 0);
        let pages = session.and_then(|session| self.accounts().key(session)).map_or(0, |key| key.1);
        if pages == 0 {
            return 0;
        }
        let (held, over) = (PageCount(used.into()), PageCount(over.into()));
        let asked = lock(&self.recall).ask(now, held, over);
        let part = (u128::from(pages) * u128::from(asked.0)).div_ceil(used.max(1).into());
        part.try_into().unwrap_or(u32::MAX)
    }

    /// From now on pages are served but none taken, and no new workload. False if that was so already.
    pub fn drain(&self) -> bool {
        self.gauges.draining.set(1);
        !self.draining.swap(true, Relaxed)
    }

    /// Whether it drains.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Relaxed)
    }
}

/// The accounts, for as long as this is there.
pub struct Accounts<'a> {
    tenants: MutexGuard<'a, Tenants>,
    shared: &'a Shared,
}

impl Deref for Accounts<'_> {
    type Target = Tenants;

    fn deref(&self) -> &Tenants {
        &self.tenants
    }
}

impl DerefMut for Accounts<'_> {
    fn deref_mut(&mut self) -> &mut Tenants {
        &mut self.tenants
    }
}

impl Drop for Accounts<'_> {
    fn drop(&mut self) {
        let (dead, leased) = (self.tenants.dead_pages(), self.tenants.leased());
        // Written only when they change: all threads read them, again and again.
        if self.shared.dead_pages() != dead {
            self.shared.dead_pages.store(dead, Relaxed);
        }
        if self.shared.leased() != leased {
            self.shared.leased.store(leased, Relaxed);
        }
    }
}
