//! Which frame holds which page: (tenant, page id) -> frame, check and age.
//!
//! A chained hash table whose links lie in a frame-indexed array: 28 bytes an entry and 4 a bucket, so 32 a page,
//! all set aside at the start (zeroed lazily by the kernel). Nothing is allocated and nothing rehashed later.
//! A frame is free, reserved (a page is coming in, seen by nobody), or stored. An ended tenant's frames are found
//! by a sweep over the array in bounded steps, which costs a busy agent less than a list for each tenant would.

use crate::ages::Ages;
use crate::limits::{SWEEP_STEP, TRIM_CALLS, TRIM_FRAMES, TRIM_STEP};
use crate::slab::Slab;
use gms_policy::ContentId;
use std::hash::{BuildHasher, RandomState};
use std::io;
use zerocopy::FromZeros;

/// A tenant, as numbered by [`crate::tenants::Tenants`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TenantId(pub u16);

/// A frame taken for a page which is coming in. Must go to [`Store::commit`] or [`Store::release`].
#[derive(Debug)]
#[must_use]
pub struct Reserved(u32);

/// A stored page, as found by [`Store::find`]; holds until the store is next changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    frame: u32,
    /// The requester's checksum, as it was put.
    pub check: u64,
}

/// What is known of one frame. Frames are named by their number plus one in links, so that zero is none.
#[derive(Clone, Copy, FromZeros)]
#[repr(C, packed(4))]
struct Entry {
    page: u64,
    check: u64,
    /// Stored: the next in the bucket. Free: the next free one.
    next: u32,
    /// Second in which it was stored.
    stored: u32,
    /// Tenant plus one; zero: not stored.
    tenant: u16,
    /// Bits [`BACKED`] and [`FREE`].
    flags: u16,
}

/// The frame was written since the kernel last had its memory.
const BACKED: u16 = 1;
/// The frame is in the list of free ones.
const FREE: u16 = 2;

const _: () = assert!(size_of::<Entry>() + size_of::<u32>() == 32, "bytes for each page");

/// The pages of all tenants.
pub struct Store {
    slab: Slab,
    entries: Vec<Entry>,
    /// Frame plus one of the first entry of each bucket.
    buckets: Vec<u32>,
    hasher: RandomState,
    ages: Ages,
    /// Frame plus one of the first free frame which was used before.
    free_list: u32,
    /// Frames from here on were never used.
    fresh: u32,
    free: u32,
    free_backed: u32,
    sweep_hand: u32,
    trim_hand: u32,
}

impl Store {
    /// An empty store over `slab`.
    pub fn new(slab: Slab) -> io::Result<Self> {
        let frames = slab.frames();
        let out_of_memory = |_| io::Error::from(io::ErrorKind::OutOfMemory);
        Ok(Self {
            entries: Entry::new_vec_zeroed(frames as usize).map_err(out_of_memory)?,
            buckets: u32::new_vec_zeroed(frames as usize).map_err(out_of_memory)?,
            slab,
            hasher: RandomState::new(),
            ages: Ages::default(),
            free_list: 0,
            fresh: 0,
            free: frames,
            free_backed: 0,
            sweep_hand: 0,
            trim_hand: 0,
        })
    }

    /// Frames of the slab.
    pub fn frames(&self) -> u32 {
        self.slab.frames()
    }

    /// Frames free.
    pub fn frames_free(&self) -> u32 {
        self.free
    }

    /// Age of the oldest page at second `now`, in seconds.
    pub fn oldest_age(&self, now: u32) -> u32 {
        self.ages.oldest(now)
    }

    /// Takes a frame; `None` when all are in use.
    pub fn reserve(&mut self) -> Option<Reserved> {
        let frame = match self.free_list {
            0 if self.fresh == self.frames() => return None,
            0 => {
                self.slab.used_to(self.fresh);
                self.fresh += 1;
                self.fresh - 1
            }
            first => {
                self.free_list = self.entries[first as usize - 1].next;
                first - 1
            }
        };
        let entry = &mut self.entries[frame as usize];
        self.free_backed -= u32::from(entry.flags & BACKED != 0);
        entry.flags = BACKED;
        self.free -= 1;
        Some(Reserved(frame))
    }

    /// Gives a frame back unused.
    pub fn release(&mut self, Reserved(frame): Reserved) {
        let entry = &mut self.entries[frame as usize];
        entry.tenant = 0;
        entry.flags |= FREE;
        entry.next = self.free_list;
        self.free_backed += u32::from(entry.flags & BACKED != 0);
        self.free_list = frame + 1;
        self.free += 1;
    }

    /// The content of a frame that is coming in.
    pub fn write(&mut self, frame: &Reserved) -> &mut [u8] {
        self.slab.write(frame.0)
    }

    /// Makes `frame` the content of `page`, at second `now`. True if it replaces an older content.
    pub fn commit(
        &mut self,
        frame: Reserved,
        tenant: TenantId,
        page: ContentId,
        check: u64,
        now: u32,
    ) -> bool {
        let replaced = self.discard(tenant, page);
        let bucket = self.bucket(tenant, page);
        let entry = &mut self.entries[frame.0 as usize];
        entry.page = page.0;
        entry.check = check;
        entry.stored = now;
        entry.tenant = tenant.0 + 1;
        entry.next = self.buckets[bucket];
        self.buckets[bucket] = frame.0 + 1;
        self.ages.add(now);
        replaced
    }

    /// The page, if the tenant has it.
    pub fn find(&self, tenant: TenantId, page: ContentId) -> Option<Found> {
        let mut link = self.buckets[self.bucket(tenant, page)];
        while link != 0 {
            let entry = &self.entries[link as usize - 1];
            if entry.is(tenant, page) {
                return Some(Found { frame: link - 1, check: entry.check });
            }
            link = entry.next;
        }
        None
    }

    /// The content of a page found.
    pub fn read(&self, found: Found) -> &[u8] {
        self.slab.read(found.frame)
    }

    /// Frees the page's frame. False if the tenant has no such page.
    pub fn discard(&mut self, tenant: TenantId, page: ContentId) -> bool {
        let bucket = self.bucket(tenant, page);
        let (mut before, mut link) = (0, self.buckets[bucket]);
        while link != 0 {
            let entry = self.entries[link as usize - 1];
            if entry.is(tenant, page) {
                match before {
                    0 => self.buckets[bucket] = entry.next,
                    _ => self.entries[before as usize - 1].next = entry.next,
                }
                self.ages.remove(entry.stored);
                self.release(Reserved(link - 1));
                return true;
            }
            (before, link) = (link, entry.next);
        }
        false
    }

    /// Frames that a round of [`Store::sweep`] looks at: those which have ever been used.
    pub fn frames_swept(&self) -> u32 {
        self.fresh
    }

    /// One bounded step of a round over all frames, freeing the pages of those tenants for which `dead` is true;
    /// it is called once for each page stored.
    pub fn sweep(&mut self, mut dead: impl FnMut(TenantId) -> bool) {
        for _ in 0..SWEEP_STEP.min(self.fresh) {
            if self.sweep_hand >= self.fresh {
                self.sweep_hand = 0;
            }
            let Entry { tenant, page, .. } = self.entries[self.sweep_hand as usize];
            self.sweep_hand += 1;
            if let Some(tenant) = tenant.checked_sub(1).map(TenantId)
                && dead(tenant)
            {
                self.discard(tenant, ContentId(page));
            }
        }
    }

    /// Whether there are free frames to give back to the kernel.
    pub fn can_trim(&self) -> bool {
        self.slab.can_give_back() && self.free_backed > 0
    }

    /// One bounded step of giving the memory of free frames back, runs of neighbours in one call.
    pub fn trim(&mut self) -> io::Result<()> {
        let (mut looked, mut given, mut calls) = (0, 0, 0);
        while looked < TRIM_STEP.min(self.fresh) && given < TRIM_FRAMES && calls < TRIM_CALLS {
            if self.trim_hand >= self.fresh {
                self.trim_hand = 0;
            }
            let start = self.trim_hand;
            let most = TRIM_FRAMES.min(self.fresh - start);
            let idle = |entry: &&mut Entry| entry.flags == FREE | BACKED;
            let run = self.entries[start as usize..(start + most) as usize].iter_mut();
            let run = run.take_while(idle).map(|entry| entry.flags = FREE).count() as u32;
            if run > 0 {
                self.free_backed -= run;
                self.slab.give_back(start..start + run)?;
                calls += 1;
            }
            self.trim_hand = start + run.max(1);
            looked += run.max(1);
            given += run;
        }
        if self.free == self.frames() && self.free_backed == 0 {
            // Nothing is left of anything: begin anew, where frames are warmed ahead.
            (self.free_list, self.fresh, self.sweep_hand, self.trim_hand) = (0, 0, 0, 0);
            self.slab.used_to(0);
        }
        Ok(())
    }

    fn bucket(&self, tenant: TenantId, page: ContentId) -> usize {
        // Keyed (SipHash), as clients choose the ids; multiply-shift maps it to the buckets (Lemire, 2019).
        let hash = self.hasher.hash_one((tenant.0, page.0));
        ((u128::from(hash) * self.buckets.len() as u128) >> 64) as usize
    }
}

impl Entry {
    fn is(&self, tenant: TenantId, page: ContentId) -> bool {
        self.page == page.0 && self.tenant == tenant.0 + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::FRAME_LEN;
    use gms_policy::Bytes;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn store(frames: u64) -> Store {
        let slab = Slab::new(Bytes(frames * FRAME_LEN as u64), false).expect("memory");
        Store::new(slab).expect("memory")
    }

    fn put(store: &mut Store, tenant: u16, page: u64, fill: u8) -> Option<bool> {
        let frame = store.reserve()?;
        store.write(&frame).fill(fill);
        Some(store.commit(frame, TenantId(tenant), ContentId(page), u64::from(fill), page as u32))
    }

    fn content(store: &Store, tenant: u16, page: u64) -> Option<u8> {
        let found = store.find(TenantId(tenant), ContentId(page))?;
        let bytes = store.read(found);
        assert!(bytes.iter().all(|&b| b == bytes[0]) && found.check == u64::from(bytes[0]));
        Some(bytes[0])
    }

    #[derive(Clone, Debug)]
    enum Op {
        Put(u16, u64, u8),
        Abort,
        Discard(u16, u64),
        Kill(u16),
        Trim,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (0..3u16, 0..40u64, any::<u8>()).prop_map(|(t, p, f)| Op::Put(t, p, f)),
            1 => Just(Op::Abort),
            2 => (0..3u16, 0..40u64).prop_map(|(t, p)| Op::Discard(t, p)),
            1 => (0..3u16).prop_map(Op::Kill),
            1 => Just(Op::Trim),
        ]
    }

    proptest! {
        /// Equals a map, when full too; no tenant ever sees another's page.
        #[test]
        fn equals_a_map(ops in prop::collection::vec(op(), 0..200)) {
            let (mut store, mut oracle) = (store(32), HashMap::new());
            for op in ops {
                match op {
                    Op::Put(t, p, fill) => match put(&mut store, t, p, fill) {
                        Some(replaced) => prop_assert_eq!(oracle.insert((t, p), fill).is_some(), replaced),
                        None => prop_assert_eq!(oracle.len(), 32),
                    },
                    Op::Abort => if let Some(frame) = store.reserve() {
                        store.write(&frame).fill(0xEE);
                        store.release(frame);
                    },
                    Op::Discard(t, p) => {
                        let there = oracle.remove(&(t, p)).is_some();
                        prop_assert_eq!(store.discard(TenantId(t), ContentId(p)), there);
                    }
                    Op::Kill(t) => {
                        store.sweep(|tenant| tenant.0 == t);
                        oracle.retain(|&(tenant, _), _| tenant != t);
                    }
                    Op::Trim => {
                        store.trim().expect("punch");
                        prop_assert!(!store.can_trim());
                    }
                }
                prop_assert_eq!(store.frames_free() as usize, 32 - oracle.len());
                for t in 0..3 {
                    for p in 0..40 {
                        prop_assert_eq!(content(&store, t, p), oracle.get(&(t, p)).copied());
                    }
                }
            }
        }
    }

    #[test]
    fn ended_tenants_are_swept_in_bounded_steps() {
        let frames = u64::from(SWEEP_STEP) * 2 + 10;
        let mut store = store(frames);
        (0..frames).for_each(|page| assert_eq!(put(&mut store, 1, page, 1), Some(false)));
        let mut steps = 0;
        while store.frames_free() < store.frames() {
            store.sweep(|_| true);
            steps += 1;
        }
        assert_eq!(steps, 3);
    }
}
