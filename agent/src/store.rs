//! Which frame holds which page: (tenant, page id) -> frame, check and age.
//!
//! A chained hash table whose links lie in a frame-indexed array: 48 bytes an entry and 4 a bucket, so 52 a page,
//! all set aside at the start (zeroed lazily by the kernel). Nothing is allocated and nothing rehashed later.
//! A page has 1 to [`PAGE_LEN_MAX`](crate::limits::PAGE_LEN_MAX) bytes: the first of them, up to a frame, lie in its frame; what is more (the tag of a
//! page that was sealed) is its *tail*, in the entry.
//! A frame is free, reserved (a page is coming in, seen by nobody), or stored. An ended tenant's frames are found
//! by a sweep over the array in bounded steps, which costs a busy agent less than a list for each tenant would.
//!
//! Threads share it. The buckets lie in *shards*, by a hash of tenant and page, and the free frames in *pools*, one a
//! thread, which takes from the others when its own is empty; each has a lock, held for one page or one frame. An entry
//! belongs to whoever reserved its frame, to the shard in which it is stored, or to its pool; it is of atomics so that the
//! sweep may look at entries of others, whose finds it then proves. Who reads a page *pins* its frame: a page that is
//! discarded meanwhile is found no more, and its frame is freed when the last reader has let go. So no lock is held while
//! bytes are copied. Locks are leaves: none is taken while another one here is held, but for the one of chores.

use crate::ages::{Ages, Oldest};
use crate::limits::{
    FRAME_LEN, SHARDS_PER_THREAD, SWEEP_STEP, TAIL_LEN, TRIM_CALLS, TRIM_FRAMES, TRIM_RUN,
    TRIM_STEP,
};
use crate::slab::Slab;
use gms_policy::ContentId;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Mutex, MutexGuard, TryLockError};
use zerocopy::FromZeros;

/// A tenant, as numbered by [`crate::tenants::Tenants`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TenantId(pub u16);

/// A frame taken for a page which is coming in. Must go to [`Store::commit`] or [`Store::release`].
#[derive(Debug)]
#[must_use]
pub struct Reserved {
    frame: u32,
    tail: [u8; TAIL_LEN],
}

/// What is known of a page that was put.
#[derive(Clone, Copy, Debug)]
pub struct Put {
    /// Its bytes: 1 to [`PAGE_LEN_MAX`](crate::limits::PAGE_LEN_MAX).
    pub length: u16,
    /// The requester's checksum.
    pub check: u64,
}

/// A stored page, as found by [`Store::find`], whose frame stays as it is until [`Store::unpin`].
#[derive(Debug)]
#[must_use]
pub struct Found {
    frame: u32,
    /// Bytes of the page.
    pub length: u16,
    tail: [u8; TAIL_LEN],
    /// The requester's checksum, as it was put.
    pub check: u64,
}

/// What is known of one frame. Frames are named by their number plus one in links, so that zero is none.
#[derive(FromZeros)]
#[repr(C)]
struct Entry {
    /// The lower 32 bits of the page id.
    page: AtomicU32,
    /// Bits 0-15: the upper ones; 16-31: tenant plus one; zero: not stored.
    owner: AtomicU32,
    check: AtomicU64,
    tail: [AtomicU64; TAIL_LEN / 8],
    /// Stored: the next in the bucket. Free: the next free one.
    next: AtomicU32,
    /// Second in which it was stored.
    stored: AtomicU32,
    /// Bits [`BACKED`], [`FREE`] and [`DOOMED`], and how many readers it has, in units of [`PIN`].
    state: AtomicU32,
    /// Bytes of the page.
    length: AtomicU32,
}

/// The frame was written since the kernel last had its memory.
const BACKED: u32 = 1;
/// The frame is in the list of free ones.
const FREE: u32 = 2;
/// The page is no longer stored: its last reader frees the frame.
const DOOMED: u32 = 4;
/// One reader.
const PIN: u32 = 8;

const _: () = assert!(size_of::<Entry>() + size_of::<u32>() == 52, "bytes for each page");

/// Pages by their hash.
struct Index {
    /// Frame plus one of the first entry of each bucket.
    buckets: Vec<u32>,
    ages: Ages,
    /// The last second in which a page was stored: clocks of threads may differ by what one is late.
    latest: u32,
}

/// Where a page belongs.
#[derive(Clone, Copy)]
struct Place {
    shard: usize,
    bucket: usize,
}

/// A part of the frames, and which of them are free.
struct Pool {
    frames: Range<u32>,
    free: Mutex<Free>,
}

struct Free {
    /// Frame plus one of the first free frame which was used before.
    list: u32,
    /// Frames from here on were never used.
    fresh: u32,
    count: u32,
    backed: u32,
    trim_hand: u32,
}

/// Where the rounds over all frames are.
#[derive(Debug, Default)]
struct Hands {
    sweep_pool: usize,
    sweep: u32,
    trim_pool: usize,
}

/// The pages of all tenants.
pub struct Store {
    slab: Slab,
    entries: Vec<Entry>,
    shards: Vec<Mutex<Index>>,
    /// What is oldest in each shard.
    oldest: Vec<AtomicU64>,
    pools: Vec<Pool>,
    hasher: RandomState,
    /// Free frames of all pools; of those the ones whose memory could be given back; frames that were ever used.
    free: AtomicU32,
    backed: AtomicU32,
    used: AtomicU32,
    /// Most frames that may be in use, a few more where threads meet.
    export: AtomicU32,
    chores: Mutex<Hands>,
}

/// Takes a lock. Whoever panicked may have left half of a change: then nobody goes on.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no thread of the agent has panicked")
}

impl Store {
    /// An empty store over `slab`, for `threads` threads.
    pub fn new(slab: Slab, threads: usize) -> io::Result<Self> {
        let frames = slab.frames();
        let shards = match threads {
            0 | 1 => 1,
            _ => (threads * SHARDS_PER_THREAD).next_power_of_two(),
        };
        let out_of_memory = |_| io::Error::from(io::ErrorKind::OutOfMemory);
        let buckets = (frames as usize).div_ceil(shards);
        let index = |_| {
            let buckets = u32::new_vec_zeroed(buckets).map_err(out_of_memory)?;
            Ok(Mutex::new(Index { buckets, ages: Ages::default(), latest: 0 }))
        };
        Ok(Self {
            entries: Entry::new_vec_zeroed(frames as usize).map_err(out_of_memory)?,
            shards: (0..shards).map(index).collect::<io::Result<_>>()?,
            oldest: (0..shards).map(|_| Ages::default().oldest().0.into()).collect(),
            pools: slab.parts(threads.max(1)).into_iter().map(Pool::new).collect(),
            slab,
            hasher: RandomState::new(),
            free: frames.into(),
            backed: 0.into(),
            used: 0.into(),
            export: frames.into(),
            chores: Mutex::default(),
        })
    }

    /// Frames exported: as many of the slab's may be in use.
    pub fn frames(&self) -> u32 {
        self.export.load(Relaxed)
    }

    /// Exports up to all frames of the slab from now on. Pages beyond that stay until they are discarded.
    pub fn set_frames(&self, frames: u32) {
        self.export.store(frames.min(self.slab.frames()), Relaxed);
    }

    /// Frames that may be taken.
    pub fn frames_free(&self) -> u32 {
        self.frames().saturating_sub(self.frames_used())
    }

    /// Frames in use.
    pub fn frames_used(&self) -> u32 {
        self.slab.frames() - self.free.load(Relaxed)
    }

    /// Frames in use beyond the export.
    pub fn frames_over(&self) -> u32 {
        self.frames_used().saturating_sub(self.frames())
    }

    /// Frames which have memory of the kernel's: those in use, and free ones that were written and not given back.
    pub fn frames_backed(&self) -> u32 {
        self.frames_used() + self.backed.load(Relaxed)
    }

    /// Age of the oldest page at second `now`, in seconds.
    pub fn oldest_age(&self, now: u32) -> u32 {
        let ages = self.oldest.iter().map(|oldest| Oldest(oldest.load(Relaxed)).age(now));
        ages.max().unwrap_or(0)
    }

    /// Takes a frame, of thread `home`'s pool if it can be; `None` when all are in use.
    pub fn reserve(&self, home: usize) -> Option<Reserved> {
        if self.frames_free() == 0 {
            return None;
        }
        let pools = self.pools.len();
        (home..home + pools).find_map(|pool| self.reserve_of(pool % pools))
    }

    fn reserve_of(&self, part: usize) -> Option<Reserved> {
        let pool = &self.pools[part];
        let mut free = lock(&pool.free);
        let frame = match free.list {
            0 if free.fresh == pool.frames.end => return None,
            0 => {
                self.slab.used_to(part, free.fresh - pool.frames.start);
                free.fresh += 1;
                self.used.fetch_add(1, Relaxed);
                free.fresh - 1
            }
            first => {
                free.list = self.entries[first as usize - 1].next.load(Relaxed);
                first - 1
            }
        };
        let state = &self.entries[frame as usize].state;
        if state.load(Relaxed) & BACKED != 0 {
            free.backed -= 1;
            self.backed.fetch_sub(1, Relaxed);
        }
        state.store(BACKED, Relaxed);
        free.count -= 1;
        self.free.fetch_sub(1, Relaxed);
        Some(Reserved { frame, tail: [0; TAIL_LEN] })
    }

    /// Gives a frame back unused.
    pub fn release(&self, reserved: Reserved) {
        self.free(reserved.frame);
    }

    fn free(&self, frame: u32) {
        let entry = &self.entries[frame as usize];
        let pool = self.pools.partition_point(|pool| pool.frames.end <= frame);
        let mut free = lock(&self.pools[pool].free);
        entry.owner.store(0, Relaxed);
        entry.state.store(FREE | BACKED, Relaxed);
        entry.next.store(free.list, Relaxed);
        free.list = frame + 1;
        free.count += 1;
        free.backed += 1;
        self.backed.fetch_add(1, Relaxed);
        self.free.fetch_add(1, Relaxed);
    }

    /// Bytes of a page that is coming in, from its byte `at` on; they end within [`PAGE_LEN_MAX`](crate::limits::PAGE_LEN_MAX).
    pub fn write(&self, reserved: &mut Reserved, at: usize, bytes: &[u8]) {
        let (head, tail) = bytes.split_at(FRAME_LEN.saturating_sub(at).min(bytes.len()));
        if !head.is_empty() {
            // SAFETY: a frame is reserved once at a time, and neither stored nor free then: it is this token's alone, which
            // is borrowed for as long as the bytes are.
            let frame = unsafe { self.slab.write(reserved.frame) };
            frame[at..at + head.len()].copy_from_slice(head);
        }
        if !tail.is_empty() {
            let at = at.max(FRAME_LEN) - FRAME_LEN;
            reserved.tail[at..at + tail.len()].copy_from_slice(tail);
        }
    }

    /// Makes what was written the content of `page`, at second `now`. True if it replaces an older content.
    pub fn commit(
        &self,
        reserved: Reserved,
        tenant: TenantId,
        page: ContentId,
        put: Put,
        now: u32,
    ) -> bool {
        if usize::from(put.length) < FRAME_LEN {
            // Of what the frame held before, maybe for another tenant, nothing is left.
            // SAFETY: as in `write`.
            unsafe { self.slab.write(reserved.frame)[usize::from(put.length)..].fill(0) };
        }
        let place = self.place(tenant, page);
        let mut index = lock(&self.shards[place.shard]);
        let replaced = self.remove(&mut index, place, tenant, page);
        index.latest = index.latest.max(now);
        let (entry, now) = (&self.entries[reserved.frame as usize], index.latest);
        entry.name(tenant, page);
        entry.describe(put, reserved.tail);
        entry.stored.store(now, Relaxed);
        let first = &mut index.buckets[place.bucket];
        entry.next.store(*first, Relaxed);
        *first = reserved.frame + 1;
        index.ages.add(now);
        self.note_oldest(&index, place);
        drop(index);
        replaced.map(|frame| self.retire(frame)).is_some()
    }

    /// The page, if the tenant has it.
    pub fn find(&self, tenant: TenantId, page: ContentId) -> Option<Found> {
        let place = self.place(tenant, page);
        let index = lock(&self.shards[place.shard]);
        let mut link = index.buckets[place.bucket];
        while link != 0 {
            let entry = &self.entries[link as usize - 1];
            if entry.is(tenant, page) {
                // Before the lock is given up, so that nobody frees it.
                entry.state.fetch_add(PIN, Relaxed);
                return Some(entry.found(link - 1));
            }
            link = entry.next.load(Relaxed);
        }
        None
    }

    /// The content of a page found: what lies in its frame, and its tail.
    pub fn read<'a>(&'a self, found: &'a Found) -> [&'a [u8]; 2] {
        let length = usize::from(found.length);
        // SAFETY: the frame is pinned for as long as `found` is there, so it is neither reserved nor free; stored frames
        // are not written. What was written before came with the shard's lock.
        let frame = unsafe { self.slab.read(found.frame) };
        [&frame[..length.min(FRAME_LEN)], &found.tail[..length.saturating_sub(FRAME_LEN)]]
    }

    /// Lets go of a page found.
    pub fn unpin(&self, found: Found) {
        let before = self.entries[found.frame as usize].state.fetch_sub(PIN, AcqRel);
        if before & DOOMED != 0 && before < 2 * PIN {
            self.free(found.frame);
        }
    }

    /// Frees the page's frame. False if the tenant has no such page.
    pub fn discard(&self, tenant: TenantId, page: ContentId) -> bool {
        let place = self.place(tenant, page);
        let mut index = lock(&self.shards[place.shard]);
        let removed = self.remove(&mut index, place, tenant, page);
        if removed.is_some() {
            self.note_oldest(&index, place);
        }
        drop(index);
        removed.map(|frame| self.retire(frame)).is_some()
    }

    /// Takes the page out of its shard; returns its frame.
    fn remove(
        &self,
        index: &mut Index,
        place: Place,
        tenant: TenantId,
        page: ContentId,
    ) -> Option<u32> {
        let (mut before, mut link) = (0, index.buckets[place.bucket]);
        while link != 0 {
            let entry = &self.entries[link as usize - 1];
            let next = entry.next.load(Relaxed);
            if entry.is(tenant, page) {
                match before {
                    0 => index.buckets[place.bucket] = next,
                    _ => self.entries[before as usize - 1].next.store(next, Relaxed),
                }
                index.ages.remove(entry.stored.load(Relaxed));
                return Some(link - 1);
            }
            (before, link) = (link, next);
        }
        None
    }

    /// Frees a frame whose page was removed, or leaves that to its last reader.
    fn retire(&self, frame: u32) {
        // No reader comes any more, since the page cannot be found.
        if self.entries[frame as usize].state.fetch_or(DOOMED, AcqRel) < PIN {
            self.free(frame);
        }
    }

    fn note_oldest(&self, index: &Index, place: Place) {
        let (told, now) = (&self.oldest[place.shard], index.ages.oldest().0);
        if told.load(Relaxed) != now {
            told.store(now, Relaxed);
        }
    }

    /// Frames that a round of [`Store::sweep`] looks at: those which have ever been used.
    pub fn frames_swept(&self) -> u32 {
        self.used.load(Relaxed)
    }

    /// One bounded step of a round over all frames, freeing the pages of the tenants that have ended. `dead` says by their
    /// number which have; their numbers must not be given to others meanwhile. Returns how many pages of each were freed, or
    /// `None` if another thread is at it.
    pub fn sweep(&self, dead: impl FnOnce() -> Vec<Option<u64>>) -> Option<Vec<Option<u64>>> {
        let mut hands = self.try_chores()?;
        let mut dead = dead();
        let ends: Vec<u32> = self.pools.iter().map(|pool| lock(&pool.free).fresh).collect();
        let used = self.pools.iter().zip(&ends).map(|(pool, end)| end - pool.frames.start);
        for _ in 0..SWEEP_STEP.min(used.sum()) {
            while hands.sweep >= ends[hands.sweep_pool] {
                hands.sweep_pool = (hands.sweep_pool + 1) % self.pools.len();
                hands.sweep = self.pools[hands.sweep_pool].frames.start;
            }
            let named = self.entries[hands.sweep as usize].named();
            hands.sweep += 1;
            // Another thread may have changed the entry just now, or be about to: only a page that is there is freed.
            if let Some((tenant, page)) = named
                && let Some(Some(freed)) = dead.get_mut(usize::from(tenant.0))
                && self.discard(tenant, page)
            {
                *freed += 1;
            }
        }
        Some(dead)
    }

    /// Whether there are free frames to give back to the kernel.
    pub fn can_trim(&self) -> bool {
        self.slab.can_give_back() && self.backed.load(Relaxed) > 0
    }

    /// One bounded step of giving the memory of free frames back, runs of neighbours in one call. Does nothing while
    /// another thread is at it, which it tells by false.
    pub fn trim(&self) -> io::Result<bool> {
        let Some(mut hands) = self.try_chores() else { return Ok(false) };
        let mut left = Trim { looks: TRIM_STEP, frames: TRIM_FRAMES, calls: TRIM_CALLS };
        for _ in 0..self.pools.len() {
            self.trim_pool(hands.trim_pool, &mut left)?;
            if left.is_over() {
                break;
            }
            hands.trim_pool = (hands.trim_pool + 1) % self.pools.len();
        }
        Ok(true)
    }

    /// The same for one pool, whose lock is held for a call at a time.
    fn trim_pool(&self, part: usize, left: &mut Trim) -> io::Result<()> {
        let Pool { frames, free } = &self.pools[part];
        let mut looked = 0;
        loop {
            let mut free = lock(free);
            let is_used = free.fresh > frames.start;
            if is_used && free.count == frames.len() as u32 && free.backed == 0 {
                // Nothing is left of anything: begin anew, where frames are warmed ahead.
                self.used.fetch_sub(free.fresh - frames.start, Relaxed);
                (free.list, free.fresh, free.trim_hand) = (0, frames.start, frames.start);
                self.slab.used_to(part, 0);
            }
            if left.is_over() || looked >= free.fresh - frames.start {
                return Ok(());
            }
            if free.trim_hand >= free.fresh {
                free.trim_hand = frames.start;
            }
            let (from, state) = (free.trim_hand, |frame: u32| &self.entries[frame as usize].state);
            let idle = |frame: &u32| state(*frame).load(Relaxed) == FREE | BACKED;
            let end = free.fresh.min(from + TRIM_FRAMES);
            let start = (from..end).find(idle).unwrap_or(end);
            let run = (start..free.fresh.min(start + TRIM_RUN)).take_while(idle).count() as u32;
            free.trim_hand = start + run;
            looked += start + run - from;
            left.looks = left.looks.saturating_sub(start + run - from);
            if run > 0 {
                (start..start + run).for_each(|frame| state(frame).store(FREE, Relaxed));
                free.backed -= run;
                self.backed.fetch_sub(run, Relaxed);
                left.frames = left.frames.saturating_sub(run);
                left.calls -= 1;
                // SAFETY: the frames are free, and stay so while this pool is locked: nobody holds a reference.
                unsafe { self.slab.give_back(start..start + run)? };
            }
        }
    }

    /// Gives the memory of all free frames back, of whole extents first. Another thread that takes or frees a frame waits for one call of the kernel's at
    /// most: some 0.3 ms for an extent.
    pub fn give_back(&self) -> io::Result<()> {
        if !self.can_trim() {
            return Ok(());
        }
        for part in 0..self.pools.len() {
            self.give_back_extents(part)?;
        }
        for part in 0..self.pools.len() {
            let mut left = Trim { looks: u32::MAX, frames: u32::MAX, calls: u32::MAX };
            self.trim_pool(part, &mut left)?;
        }
        Ok(())
    }

    fn give_back_extents(&self, part: usize) -> io::Result<()> {
        let pool = &self.pools[part];
        let state = |frame: u32| &self.entries[frame as usize].state;
        for extent in self.slab.extents(&pool.frames) {
            let mut free = lock(&pool.free);
            if extent.start >= free.fresh {
                break;
            }
            let used = extent.start..extent.end.min(free.fresh);
            if !used.clone().all(|frame| state(frame).load(Relaxed) & !BACKED == FREE) {
                continue;
            }
            let backed = used.filter(|&frame| state(frame).swap(FREE, Relaxed) & BACKED != 0);
            let backed = backed.count() as u32;
            if backed > 0 {
                free.backed -= backed;
                self.backed.fetch_sub(backed, Relaxed);
                // SAFETY: the frames are free or were never used, and stay so while this pool is locked: nobody holds a reference.
                unsafe { self.slab.give_back(extent)? };
            }
        }
        Ok(())
    }

    fn try_chores(&self) -> Option<MutexGuard<'_, Hands>> {
        match self.chores.try_lock() {
            Ok(hands) => Some(hands),
            Err(TryLockError::WouldBlock) => None,
            Err(TryLockError::Poisoned(_)) => panic!("a thread of the agent has panicked"),
        }
    }

    fn place(&self, tenant: TenantId, page: ContentId) -> Place {
        // Keyed (SipHash), as clients choose the ids; multiply-shift maps it to the buckets (Lemire, 2019).
        let hash = self.hasher.hash_one((tenant.0, page.0));
        let shard = hash as usize & (self.shards.len() - 1);
        let buckets = (self.entries.len()).div_ceil(self.shards.len());
        Place { shard, bucket: ((u128::from(hash) * buckets as u128) >> 64) as usize }
    }
}

impl Pool {
    fn new(frames: Range<u32>) -> Self {
        let (start, count) = (frames.start, frames.len() as u32);
        let free = Free { list: 0, fresh: start, count, backed: 0, trim_hand: start };
        Self { frames, free: Mutex::new(free) }
    }
}

/// What a step of [`Store::trim`] may still do.
struct Trim {
    looks: u32,
    frames: u32,
    calls: u32,
}

impl Trim {
    fn is_over(&self) -> bool {
        self.looks == 0 || self.frames == 0 || self.calls == 0
    }
}

impl Entry {
    fn is(&self, tenant: TenantId, page: ContentId) -> bool {
        self.page.load(Relaxed) == page.0 as u32 && self.owner.load(Relaxed) == owner(tenant, page)
    }

    /// Whose page it holds, if it holds one.
    fn named(&self) -> Option<(TenantId, ContentId)> {
        let (page, owner) = (self.page.load(Relaxed), self.owner.load(Relaxed));
        let tenant = TenantId(((owner >> 16) as u16).checked_sub(1)?);
        Some((tenant, ContentId(u64::from(owner & 0xffff) << 32 | u64::from(page))))
    }

    fn name(&self, tenant: TenantId, page: ContentId) {
        self.page.store(page.0 as u32, Relaxed);
        self.owner.store(owner(tenant, page), Relaxed);
    }

    fn describe(&self, put: Put, tail: [u8; TAIL_LEN]) {
        self.check.store(put.check, Relaxed);
        self.length.store(put.length.into(), Relaxed);
        for (word, bytes) in self.tail.iter().zip(tail.as_chunks().0) {
            word.store(u64::from_ne_bytes(*bytes), Relaxed);
        }
    }

    fn found(&self, frame: u32) -> Found {
        let mut tail = [0; TAIL_LEN];
        for (word, bytes) in self.tail.iter().zip(tail.as_chunks_mut().0) {
            *bytes = word.load(Relaxed).to_ne_bytes();
        }
        let (length, check) = (self.length.load(Relaxed) as u16, self.check.load(Relaxed));
        Found { frame, length, tail, check }
    }
}

/// See [`Entry::owner`]. Page ids have 48 bits: of a longer one nobody is the owner.
fn owner(tenant: TenantId, page: ContentId) -> u32 {
    match page.0 >> 48 {
        0 => u32::from(tenant.0 + 1) << 16 | (page.0 >> 32) as u32,
        _ => 0,
    }
}

#[cfg(test)]
mod tests;
