//! Discards are done in steps.

use crate::bed::{Bed, WORKLOADS, fetch, got, hello, put};
use gms_agent::core::{Answer, At};
use gms_agent::limits::DISCARD_STEP;
use gms_transport::message::{Control, Status};

#[test]
fn others_are_served_between_the_steps_of_a_discard() {
    let mut bed = Bed::new(4096);
    let (one, other) = (bed.connect(1, 1), bed.connect(2, 2));
    hello(&mut bed, one, WORKLOADS[0]);
    hello(&mut bed, other, WORKLOADS[0]);
    put(&mut bed, other, WORKLOADS[0], &[(1, 11)]);
    let step = DISCARD_STEP as u64;
    let count = 2 * step + 1;
    let all: Vec<(u64, u8)> = (0..count).map(|page| (page, 2)).collect();
    for pages in all.chunks(64) {
        put(&mut bed, one, WORKLOADS[0], pages);
    }
    let held = |bed: &Bed| bed.cores[0].shared().accounts().held();
    assert_eq!(held(&bed), count + 1);
    let ids: Vec<u8> = (0..count).flat_map(u64::to_le_bytes).collect();
    let mut discard = Control::discard(4, WORKLOADS[0], count as u16);
    let id = bed.begin(one, &mut discard, &ids).ok().expect("admitted");
    assert!(!bed.core().discards_part(id) && !bed.core().is_for_later(id), "it is not whole");
    bed.pay(id, &ids, 100);
    assert!(bed.core().is_for_later(id) && !bed.core().is_for_later(id));
    assert_eq!((bed.core().poll_unfinished(), held(&bed)), (Some(id), count + 1));
    for left in [count - step, count - 2 * step] {
        assert!(bed.core().discards_part(id));
        assert_eq!(held(&bed), left + 1);
        assert_eq!(fetch(&mut bed, other, WORKLOADS[0], &[1, 2]), [(1, 11)]);
        assert_eq!(bed.core().poll_unfinished(), Some(id));
    }
    assert!(!bed.core().discards_part(id));
    assert_eq!(got(bed.complete(id)).control.status(), Status::Ok);
    assert_eq!((held(&bed), bed.core().poll_unfinished()), (1, None));
}

#[test]
fn a_discard_whose_link_ends_between_its_steps_leaves_nothing() {
    let mut bed = Bed::new(4096);
    let link = bed.connect(1, 1);
    hello(&mut bed, link, WORKLOADS[0]);
    let ids: Vec<u8> = (0..600u64).flat_map(u64::to_le_bytes).collect();
    let mut discard = Control::discard(4, WORKLOADS[0], 600);
    let id = bed.begin(link, &mut discard, &ids).ok().expect("admitted");
    bed.pay(id, &ids, 4096);
    assert!(bed.core().discards_part(id));
    bed.core().handle_aborted(id);
    let now = bed.now;
    bed.core().handle_closed(now, link);
    assert_eq!(bed.core().poll_unfinished(), None);
    assert!(!bed.core().discards_part(id));
    assert!(matches!(bed.core().handle_complete(At { now, received: now }, id), Answer::Nothing));
}
