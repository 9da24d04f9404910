//! What one thread knows of another's work.

use gms_policy::Bytes;

use super::*;
use crate::slab::Slab;
use crate::store::{Reserved, Store};

#[test]
fn a_thread_rests_when_another_has_given_the_last_frame_back() {
    const FRAMES: u64 = 4096;
    let now = Instant::now();
    let slab = Slab::new(Bytes(FRAMES * 4096), false).expect("memory");
    let shared = Arc::new(Shared::new(now, Store::new(slab, 2).expect("a clock")));
    let store = &shared.store;
    let frames: Vec<Reserved> = (0..FRAMES).map(|_| store.reserve(0).expect("a frame")).collect();
    frames.into_iter().for_each(|frame| store.release(frame));
    let mut cores = [0, 1].map(|home| Core::new(now, shared.clone(), home, Arc::default()));
    // Long after the last put.
    let begun = now + std::time::Duration::from_secs(60);
    assert!(cores.iter_mut().all(|core| core.deadline(begun) == Some(begun + TICK)));
    let tick = begun + TICK;
    cores.iter_mut().for_each(|core| core.handle_timeout(tick));
    assert_eq!(cores[1].deadline(tick), Some(tick), "more is to be given back");
    while store.can_trim() {
        cores[0].handle_timeout(tick);
    }
    assert!(cores[1].deadline(tick).is_none_or(|due| due > tick));
}
