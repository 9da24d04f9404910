//! Tests of the store.

use super::*;
use crate::limits::PAGE_LEN_MAX;
use gms_policy::Bytes;
use proptest::prelude::*;
use std::collections::HashMap;

fn store(frames: u64, threads: usize) -> Store {
    let slab = Slab::new(Bytes(frames * FRAME_LEN as u64), false).expect("memory");
    Store::new(slab, threads).expect("memory")
}

/// Sweeps for `tenant` until nothing more is freed.
fn kill(store: &Store, tenant: u16) {
    let dead = || (0..=tenant).map(|id| (id == tenant).then_some(0)).collect();
    while store.sweep(dead).expect("nobody else sweeps")[usize::from(tenant)] != Some(0) {}
}

fn put(store: &Store, home: usize, tenant: u16, page: u64, fill: u8) -> Option<bool> {
    let mut frame = store.reserve(home)?;
    let length = length_of(fill);
    // The parts meet within the frame, at its end, or within the tail.
    let (first, second) = (length * 2 / 3, length - length * 2 / 3);
    store.write(&mut frame, 0, &vec![fill; first]);
    store.write(&mut frame, first, &vec![fill; second]);
    let put = Put { length: length as u16, check: fill.into() };
    Some(store.commit(frame, TenantId(tenant), ContentId(page), put, page as u32))
}

/// Pages of all lengths: of one byte, less than a frame, a frame, with all or part of a tail.
fn length_of(fill: u8) -> usize {
    const LENGTHS: [usize; 6] = [1, 100, FRAME_LEN, FRAME_LEN + 1, PAGE_LEN_MAX - 1, PAGE_LEN_MAX];
    LENGTHS[usize::from(fill) % LENGTHS.len()]
}

fn content(store: &Store, tenant: u16, page: u64) -> Option<u8> {
    let found = store.find(TenantId(tenant), ContentId(page))?;
    let bytes = store.read(&found).concat();
    let fill = bytes[0];
    assert!(bytes.iter().all(|&b| b == fill) && found.check == u64::from(fill));
    assert_eq!(bytes.len(), length_of(fill));
    store.unpin(found);
    Some(fill)
}

#[derive(Clone, Debug)]
enum Op {
    Put(usize, u16, u64, u8),
    Abort,
    Discard(u16, u64),
    Kill(u16),
    Trim,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..4usize, 0..3u16, 0..40u64, any::<u8>()).prop_map(|(h, t, p, f)| Op::Put(h, t, p, f)),
        1 => Just(Op::Abort),
        2 => (0..3u16, 0..40u64).prop_map(|(t, p)| Op::Discard(t, p)),
        1 => (0..3u16).prop_map(Op::Kill),
        1 => Just(Op::Trim),
    ]
}

proptest! {
    /// Equals a map, when full too; no tenant ever sees another's page.
    #[test]
    fn equals_a_map(threads in 1..5usize, ops in prop::collection::vec(op(), 0..200)) {
        let (store, mut oracle) = (store(32, threads), HashMap::new());
        for op in ops {
            match op {
                Op::Put(home, t, p, fill) => match put(&store, home % threads, t, p, fill) {
                    Some(replaced) => prop_assert_eq!(oracle.insert((t, p), fill).is_some(), replaced),
                    None => prop_assert_eq!(oracle.len(), 32),
                },
                Op::Abort => if let Some(mut frame) = store.reserve(0) {
                    store.write(&mut frame, 0, &[0xEE; PAGE_LEN_MAX]);
                    store.release(frame);
                },
                Op::Discard(t, p) => {
                    let there = oracle.remove(&(t, p)).is_some();
                    prop_assert_eq!(store.discard(TenantId(t), ContentId(p)), there);
                }
                Op::Kill(t) => {
                    kill(&store, t);
                    oracle.retain(|&(tenant, _), _| tenant != t);
                }
                Op::Trim => {
                    assert!(store.trim().expect("punch"));
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
    let store = store(frames, 1);
    (0..frames).for_each(|page| assert_eq!(put(&store, 0, 1, page, 1), Some(false)));
    let mut steps = 0;
    while store.frames_free() < store.frames() {
        store.sweep(|| vec![None, Some(0)]).expect("nobody else sweeps");
        steps += 1;
    }
    assert_eq!(steps, 3);
}

#[test]
fn a_page_that_is_read_stays_as_it_is() {
    let store = store(2, 2);
    assert_eq!(put(&store, 0, 1, 7, 11), Some(false));
    let found = store.find(TenantId(1), ContentId(7)).expect("stored");
    let again = store.find(TenantId(1), ContentId(7)).expect("stored");
    assert!(store.discard(TenantId(1), ContentId(7)));
    assert_eq!((content(&store, 1, 7), store.frames_free()), (None, 1));
    // The other frame is all that is left.
    assert_eq!(put(&store, 0, 1, 8, 22), Some(false));
    assert_eq!(put(&store, 0, 1, 9, 33), None);
    store.unpin(again);
    assert!(store.read(&found).concat().iter().all(|&b| b == 11) && store.reserve(0).is_none());
    store.unpin(found);
    assert_eq!(put(&store, 1, 1, 9, 33), Some(false));
}

/// Threads that put, get and discard the same pages of the same tenants, while ended ones are swept and memory is given
/// back: each page read is whole and one that was put, and at the end every frame is there.
#[test]
fn threads_never_see_anything_but_whole_pages() {
    const THREADS: u64 = 4;
    let store = store(96, THREADS as usize);
    let work = |seed: u64| {
        let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        for _ in 0..20_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(seed | 1);
            let (tenant, page) = ((random >> 33) as u16 % 3, (random >> 40) % 50);
            let named = (TenantId(tenant), ContentId(page));
            match (random >> 60) % 8 {
                0..3 => drop(put_named(&store, seed as usize, tenant, page)),
                3..6 => {
                    let Some(found) = store.find(named.0, named.1) else { continue };
                    let expected = fill_of(tenant, page);
                    assert!(store.read(&found).concat().iter().all(|&byte| byte == expected));
                    assert_eq!(usize::from(found.length), length_of(expected));
                    assert_eq!(found.check, u64::from(expected));
                    store.unpin(found);
                }
                6 => drop(store.discard(named.0, named.1)),
                _ if random >> 52 & 15 > 0 => drop(store.trim().expect("advice")),
                _ => drop(store.sweep(|| vec![None, None, Some(0)])),
            }
        }
    };
    std::thread::scope(|scope| {
        (0..THREADS).for_each(|seed| drop(scope.spawn(move || work(seed))));
    });
    (0..3).for_each(|tenant| kill(&store, tenant));
    assert_eq!((store.frames_free(), store.oldest_age(100)), (96, 0));
    assert_eq!(std::iter::from_fn(|| store.reserve(0)).count(), 96);
}

fn fill_of(tenant: u16, page: u64) -> u8 {
    (tenant * 60 + page as u16 + 1) as u8
}

fn put_named(store: &Store, home: usize, tenant: u16, page: u64) -> Option<bool> {
    put(store, home, tenant, page, fill_of(tenant, page))
}

#[test]
fn of_what_a_frame_held_for_another_tenant_nothing_is_left() {
    let store = store(1, 1);
    let mut frame = store.reserve(0).expect("a frame");
    store.write(&mut frame, 0, &[0xAA; PAGE_LEN_MAX]);
    let put = |length: usize| Put { length: length as u16, check: 0 };
    let whole = put(PAGE_LEN_MAX);
    let _ = store.commit(frame, TenantId(0), ContentId(1), whole, 0);
    assert!(store.discard(TenantId(0), ContentId(1)));
    let mut frame = store.reserve(0).expect("a frame");
    store.write(&mut frame, 0, &[0xBB; 100]);
    let number = frame.frame;
    let _ = store.commit(frame, TenantId(1), ContentId(1), put(100), 0);
    // SAFETY: nobody writes it.
    let bytes = unsafe { store.slab.read(number) };
    assert!(bytes[..100].iter().all(|&b| b == 0xBB) && bytes[100..].iter().all(|&b| b == 0));
    let found = store.find(TenantId(1), ContentId(1)).expect("it was put");
    assert_eq!(found.tail, [0; TAIL_LEN]);
    store.unpin(found);
}

#[test]
fn all_free_memory_goes_back_around_the_pages_that_stay() {
    const FRAMES: u64 = 4096;
    for threads in [1, 3] {
        let store = store(FRAMES, threads);
        for page in 0..FRAMES {
            assert_eq!(put(&store, page as usize % threads, 0, page, 2), Some(false));
        }
        assert_eq!(store.frames_backed(), FRAMES as u32);
        // Some extents are free as a whole, in others pages stay.
        let stays = |page: &u64| page.is_multiple_of(97) && *page < FRAMES / 2;
        for page in (0..FRAMES).filter(|page| !stays(page)) {
            assert!(store.discard(TenantId(0), ContentId(page)));
        }
        store.give_back().expect("advice");
        let kept: Vec<u64> = (0..FRAMES).filter(stays).collect();
        assert_eq!(store.frames_backed() as usize, kept.len());
        assert!(kept.iter().all(|&page| content(&store, 0, page) == Some(2)));
        // What was given back is as good as new.
        assert_eq!(put(&store, 0, 1, 5, 7), Some(false));
        assert_eq!(content(&store, 1, 5), Some(7));
        assert_eq!(store.frames_backed() as usize, kept.len() + 1);
    }
}
