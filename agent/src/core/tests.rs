//! What one thread knows of another's work.

use gms_policy::Bytes;
use gms_transport::message::Zone;
use gms_transport::{Fingerprint, PeerId};

use super::*;
use crate::bulletin::Bulletin;
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

/// A core of an agent that is a member, and a link of another agent.
fn member() -> (Core, LinkId, Instant) {
    let now = Instant::now();
    let slab = Slab::new(Bytes(64 * 4096), false).expect("memory");
    let shared = Arc::new(Shared::new(now, Store::new(slab, 1).expect("a clock")));
    let bulletin = Arc::new(Bulletin::new().expect("an eventfd"));
    let own = MemberEntry::new([1; 16], ([10, 0, 0, 1], 7400).into(), 1, Zone::default());
    bulletin.publish(vec![own], Vec::new());
    shared.bulletin.set(bulletin).expect("once");
    let mut core = Core::new(now, shared, 0, Arc::default());
    let link = LinkId::new(0, 0);
    let peer = PeerIdentity {
        id: PeerId::Issued([2; 16]),
        fingerprint: Fingerprint([2; 32]),
        addr: ([10, 0, 0, 2], 7400).into(),
        is_node: true,
    };
    assert!(matches!(core.handle_connected(now, link, peer), Answer::Nothing));
    (core, link, now)
}

/// A packet is bytes of which an agent knows nothing before the thread that gossips has read them: none is taken for a list of pages.
#[test]
fn gossip_of_any_length_is_passed_on() {
    let (mut core, link, now) = member();
    let bulletin = core.shared.bulletin.get().expect("a member").clone();
    for length in 1..=1200 {
        let at = At { now: now + TICK * length, received: now + TICK * length };
        let exchange = ExchangeId::new(link, length.into());
        let mut control = Control::request(Op::Gossip, length.into(), WorkloadId::default());
        control.payload_len = length;
        let packet = vec![0xee; length as usize];
        assert!(matches!(core.handle_control(at, exchange, control), Answer::Nothing));
        assert!(matches!(core.handle_payload(exchange, 0, &packet), Answer::Nothing));
        let Answer::Reply(reply) = core.handle_complete(at, exchange) else { panic!("no reply") };
        assert_eq!(reply.control.status(), Status::Ok, "{length} bytes");
        drop(reply);
        let letters = bulletin.take().letters;
        assert!(letters.len() == 1 && letters[0].packet == packet, "{length} bytes");
    }
}

#[test]
fn who_is_not_told_of_the_members_is_answered_all_the_same() {
    let (mut core, link, now) = member();
    let at = At { now, received: now };
    let ask = Control::request(Op::Members, 1, WorkloadId::default());
    let mut asked = 0;
    let mut begin = |core: &mut Core| {
        asked += 1;
        let exchange = ExchangeId::new(link, asked);
        match core.handle_control(at, exchange, ask) {
            Answer::Nothing => Ok(exchange),
            Answer::Reply(reply) => {
                let (slices, _) = reply.payload();
                let length: usize = slices.iter().map(|slice| slice.len()).sum();
                let mut refused = reply.control;
                refused.payload_len = length as u32;
                Err(Box::new(refused))
            }
            Answer::Close(code) => panic!("{code:?}"),
        }
    };
    let first = begin(&mut core).expect("begun");
    let Answer::Reply(reply) = core.handle_complete(at, first) else { panic!("no reply") };
    assert_eq!((reply.control.status(), reply.payload().1), (Status::Ok, 1));
    drop(reply);
    let refused = loop {
        if let Err(refused) = begin(&mut core) {
            break refused;
        }
    };
    assert_eq!((refused.status(), refused.payload_len), (Status::Denied, 0));
    assert_eq!((refused.check(), ask.check_reply(&refused)), (Ok(()), Ok(())));
}
