//! The agent's core without sockets: simulated links and time, against a plain map.

#![allow(clippy::result_large_err, reason = "a refusal is the reply itself")]

mod bed;
mod discards;

use bed::{
    Bed, WORKLOADS, fetch, fetch_sized, got, hello, length_of, put, put_payload, sized_payload,
};
use gms_agent::core::{Answer, At};
use gms_agent::limits::{
    EXCHANGE_TIMEOUT, EXCHANGES_MAX, FRAME_LEN, LEASE_MIN, LINKS_MAX, PAGE_LEN_MAX, TENANTS_MAX,
    TRIM_IDLE,
};
use gms_policy::limits::{RECALL_MIN, RECALL_SAMPLE};
use gms_transport::message::{
    CONTROL_LEN, Control, HelloReply, Op, PageDescriptor, PagesReply, PagesRequest, Status,
    StatusReply, WorkloadId,
};
use gms_transport::{CloseCode, ExchangeId, LinkId};
use nix::time::{ClockId, clock_gettime};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use zerocopy::IntoBytes;

#[derive(Clone, Debug)]
enum Step {
    /// By whom, which, whether they have lengths of their own, and in which pieces they come.
    Put(usize, Vec<(u64, u8)>, bool, usize),
    AbortPut(usize, Vec<(u64, u8)>, prop::sample::Index),
    Discard(usize, Vec<u64>),
    Goodbye(usize),
    Reconnect(usize, bool),
}

fn pages() -> impl Strategy<Value = Vec<(u64, u8)>> {
    prop::collection::vec((0..30u64, 1..255u8), 1..12)
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..4usize, pages(), any::<bool>(), 1..9000usize)
            .prop_map(|(l, p, sized, c)| Step::Put(l, p, sized, c)),
        2 => (0..4usize, pages(), any::<prop::sample::Index>()).prop_map(|(l, p, at)| Step::AbortPut(l, p, at)),
        3 => (0..4usize, prop::collection::vec(0..30u64, 1..20)).prop_map(|(l, p)| Step::Discard(l, p)),
        1 => (0..4usize).prop_map(Step::Goodbye),
        2 => (0..4usize, any::<bool>()).prop_map(|(l, late)| Step::Reconnect(l, late)),
    ]
}

/// Puts pages in pieces of `chunk` bytes, as frames or (`sized`) with lengths of their own, as many as the agent grants
/// of the `room` that there is. Returns those that it has stored: fill and length.
fn put_within(
    bed: &mut Bed,
    link: LinkId,
    workload: WorkloadId,
    pages: &[(u64, u8)],
    (sized, chunk): (bool, usize),
    room: usize,
) -> Vec<(u64, (u8, usize))> {
    let grant = bed.ask(link, Control::grant(2, workload, 1), &[], 1).control;
    let granted = grant.feedback().credits_put as usize;
    assert!(granted <= room);
    let control = Control::put(5, workload, pages.len() as u16);
    let (control, payload) = match sized {
        true => (control.with_lengths(), sized_payload(pages)),
        false => (control, put_payload(pages)),
    };
    let reply = bed.ask(link, control, &payload, chunk).control;
    let stored = pages.len().min(granted);
    assert_eq!(reply.answer::<PagesReply>().done, (1u64 << stored) - 1);
    let status = if stored == pages.len() { Status::Ok } else { Status::Full };
    assert_eq!(reply.status(), status);
    let length = |fill| if sized { length_of(fill) } else { FRAME_LEN };
    pages[..stored].iter().map(|&(page, fill)| (page, (fill, length(fill)))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Four tenants (two clients which use the same two workload ids) on an agent too small for them: it holds what
    /// a map holds, refuses when that is full, and never shows a page to another tenant.
    #[test]
    fn equals_a_map(threads in 1..4usize, steps in prop::collection::vec(step(), 1..60)) {
        const FRAMES: usize = 48;
        let mut bed = Bed::of(threads, FRAMES as u64);
        let mut oracle: BTreeMap<(usize, u64), (u8, usize)> = BTreeMap::new();
        let tenant = |index: usize| (index as u8 / 2, WORKLOADS[index % 2]);
        let mut links: Vec<LinkId> = (0..4).map(|i| bed.connect(i as u32, tenant(i).0)).collect();
        (0..4).for_each(|i| assert_eq!(hello(&mut bed, links[i], tenant(i).1).status(), Status::Ok));
        for step in steps {
            match step {
                Step::Put(i, pages, sized, chunk) => {
                    let room = FRAMES - oracle.len();
                    let held = put_within(&mut bed, links[i], tenant(i).1, &pages, (sized, chunk), room);
                    oracle.extend(held.into_iter().map(|(page, what)| ((i, page), what)));
                }
                Step::AbortPut(i, pages, at) => {
                    let payload = put_payload(&pages);
                    let mut control = Control::put(5, tenant(i).1, pages.len() as u16);
                    if let Ok(id) = bed.begin(links[i], &mut control, &payload) {
                        bed.pay(id, &payload[..at.index(payload.len())], 1000);
                        bed.core_of(id.link).handle_aborted(id);
                    }
                }
                Step::Discard(i, pages) => {
                    let ids: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
                    bed.ask(links[i], Control::discard(3, tenant(i).1, pages.len() as u16), &ids, 5);
                    pages.iter().for_each(|&page| { oracle.remove(&(i, page)); });
                }
                Step::Goodbye(i) => {
                    bed.ask(links[i], Control::request(Op::Goodbye, 4, tenant(i).1), &[], 1);
                    let denied = bed.ask(links[i], Control::get(8, tenant(i).1, 1), &[], 1).control;
                    prop_assert_eq!(denied.status(), Status::Denied);
                    oracle.retain(|&(t, _), _| t != i);
                    bed.settle();
                    prop_assert_eq!(hello(&mut bed, links[i], tenant(i).1).status(), Status::Ok);
                }
                Step::Reconnect(i, late) => {
                    let now = bed.now;
                    bed.core_of(links[i]).handle_closed(now, links[i]);
                    bed.advance(Duration::from_secs(if late { 6 } else { 4 }));
                    oracle.retain(|&(t, _), _| !late || t != i);
                    links[i] = bed.connect(bed.exchanges as u32 + 10, tenant(i).0);
                    prop_assert_eq!(hello(&mut bed, links[i], tenant(i).1).status(), Status::Ok);
                }
            }
            let status = bed.ask(links[0], Control::request(Op::Status, 6, tenant(0).1), &[], 1).control;
            prop_assert_eq!(status.feedback().frames_free as usize, FRAMES - oracle.len());
        }
        let all: Vec<u64> = (0..30).collect();
        for (i, &link) in links.iter().enumerate() {
            let held = oracle.range((i, 0)..(i + 1, 0));
            let held: Vec<_> = held.map(|(&(_, page), &(fill, length))| (page, fill, length)).collect();
            prop_assert_eq!(&fetch_sized(&mut bed, link, tenant(i).1, &all), &held);
            let frames = held.iter().filter(|held| held.2 == FRAME_LEN).map(|held| (held.0, held.1));
            prop_assert_eq!(fetch(&mut bed, link, tenant(i).1, &all), frames.collect::<Vec<_>>());
        }
    }
}

/// Whatever the lengths say: it is refused or stored whole, what was there before stays, and all frames come back.
#[test]
fn lengths_that_contradict_are_refused() {
    let mut bed = Bed::new(8);
    let link = bed.connect(1, 1);
    hello(&mut bed, link, WORKLOADS[0]);
    put(&mut bed, link, WORKLOADS[0], &[(1, 11), (2, 12)]);
    let over = PAGE_LEN_MAX as u16 + 1;
    // Lengths that the descriptors name, and bytes that follow.
    let cases: [([u16; 2], usize); 6] = [
        ([over, 100], PAGE_LEN_MAX + 101),
        ([u16::MAX, 1], 8000),
        ([100, 100], 201),
        ([100, 100], 199),
        ([0, 0], 8191),
        ([1, 0], 4098),
    ];
    for (lengths, bytes) in cases {
        for chunk in [1, 33, 10_000] {
            let heads =
                [1, 2].map(|n: u64| PageDescriptor::new(n, n).with_length(lengths[n as usize - 1]));
            let payload = [heads.as_bytes(), &vec![9; bytes]].concat();
            let control = Control::put(1, WORKLOADS[0], 2).with_lengths();
            let reply = bed.ask(link, control, &payload, chunk).control;
            assert_eq!(reply.status(), Status::Invalid, "{lengths:?} {bytes} by {chunk}");
            assert_eq!((reply.answer::<PagesReply>().done, reply.feedback().frames_free), (0, 6));
        }
    }
    assert_eq!(fetch(&mut bed, link, WORKLOADS[0], &[1, 2]), [(1, 11), (2, 12)]);
    // Without the flag no descriptor has one, nor does one of a get.
    let head = PageDescriptor::new(1, 1).with_length(FRAME_LEN as u16);
    let payload = [head.as_bytes(), &[9; FRAME_LEN]].concat();
    let plain = bed.ask(link, Control::put(1, WORKLOADS[0], 1), &payload, 100).control;
    assert_eq!(plain.status(), Status::Invalid);
    let get = Control::get_many(1, WORKLOADS[0], 2).with_lengths();
    let asked = bed.ask(link, get, [head, head].as_bytes(), 100).control;
    assert_eq!(asked.status(), Status::Invalid);
    // Zero is a whole frame.
    let heads = [PageDescriptor::new(1, 7), PageDescriptor::new(3, 8).with_length(1)];
    let payload = [heads.as_bytes(), &[7; FRAME_LEN], &[8]].concat();
    let reply =
        bed.ask(link, Control::put(1, WORKLOADS[0], 2).with_lengths(), &payload, 50).control;
    assert_eq!((reply.status(), reply.answer::<PagesReply>().done), (Status::Ok, 3));
    let held = fetch_sized(&mut bed, link, WORKLOADS[0], &[1, 2, 3]);
    assert_eq!(held, [(1, 7, FRAME_LEN), (2, 12, FRAME_LEN), (3, 8, 1)]);
}

#[test]
fn a_workload_id_opens_nothing_without_its_certificate() {
    let mut bed = Bed::new(8);
    let (owner, thief) = (bed.connect(1, 1), bed.connect(2, 2));
    hello(&mut bed, owner, WORKLOADS[0]);
    put(&mut bed, owner, WORKLOADS[0], &[(7, 77)]);
    let denied = bed.ask(thief, Control::get(1, WORKLOADS[0], 7), &[], 1);
    assert_eq!((denied.control.status(), denied.payload.len()), (Status::Denied, 0));
    hello(&mut bed, thief, WORKLOADS[0]);
    assert_eq!(fetch(&mut bed, thief, WORKLOADS[0], &[7, 8]), []);
    // A session of one workload does not open another of the same client.
    let second = bed.connect(3, 1);
    hello(&mut bed, second, WORKLOADS[1]);
    assert_eq!(
        bed.ask(second, Control::get(1, WORKLOADS[0], 7), &[], 1).control.status(),
        Status::Denied
    );
    assert_eq!(hello(&mut bed, second, WORKLOADS[0]).status(), Status::Invalid);
    assert_eq!(fetch(&mut bed, owner, WORKLOADS[0], &[7, 8]), [(7, 77)]);
}

#[test]
fn a_full_agent_refuses_before_the_payload_and_feeds_back() {
    let mut bed = Bed::new(4);
    let link = bed.connect(1, 1);
    hello(&mut bed, link, WORKLOADS[0]);
    let reply = put(&mut bed, link, WORKLOADS[0], &[(1, 1), (2, 2), (3, 3)]);
    assert_eq!((reply.feedback().frames_free, reply.feedback().credits_put), (1, 1));
    let reply = put(&mut bed, link, WORKLOADS[0], &[(4, 4), (5, 5)]);
    assert_eq!(
        (reply.status(), reply.answer::<PagesReply>().done, reply.feedback().frames_free),
        (Status::Full, 1, 0)
    );
    let payload = put_payload(&[(6, 6)]);
    let refused = bed.begin(link, &mut Control::put(1, WORKLOADS[0], 1), &payload);
    assert_eq!(refused.err().map(|got| got.control.status()), Some(Status::Full));
    assert_eq!(bed.stats.refusals.value(), 2);
    bed.advance(Duration::from_secs(3));
    let at = At { now: bed.now, received: bed.now - Duration::from_micros(5) };
    let id = ExchangeId::new(link, 999);
    bed.core().handle_control(at, id, Control::get(1, WORKLOADS[0], 4));
    let reply = got(bed.core().handle_complete(at, id)).control;
    assert_eq!((reply.feedback().queue_ns, reply.feedback().oldest_age_ms), (5000, 3000));
}

#[test]
fn a_put_replaces_only_once_it_is_whole() {
    let mut bed = Bed::new(8);
    let link = bed.connect(1, 1);
    hello(&mut bed, link, WORKLOADS[0]);
    put(&mut bed, link, WORKLOADS[0], &[(1, 11)]);
    let payload = put_payload(&[(1, 22)]);
    let id =
        bed.begin(link, &mut Control::put(2, WORKLOADS[0], 1), &payload).ok().expect("admitted");
    bed.pay(id, &payload[..payload.len() - 1], 64);
    assert_eq!(fetch(&mut bed, link, WORKLOADS[0], &[1, 2]), [(1, 11)]);
    // What is not whole is not stored, whatever the transport says.
    assert!(matches!(bed.complete(id), Answer::Close(CloseCode::Malformed)));
    assert_eq!(fetch(&mut bed, link, WORKLOADS[0], &[1, 2]), [(1, 11)]);
    put(&mut bed, link, WORKLOADS[0], &[(1, 22)]);
    let reply = put(&mut bed, link, WORKLOADS[0], &[(1, 22)]);
    assert_eq!((reply.status(), reply.feedback().frames_free), (Status::Ok, 7));
    assert_eq!(fetch(&mut bed, link, WORKLOADS[0], &[1, 2]), [(1, 22)]);
}

#[test]
fn a_stalled_request_is_answered_and_its_frames_come_back() {
    let mut bed = Bed::new(8);
    let link = bed.connect(1, 1);
    hello(&mut bed, link, WORKLOADS[0]);
    let payload = put_payload(&[(1, 1), (2, 2)]);
    let id =
        bed.begin(link, &mut Control::put(2, WORKLOADS[0], 2), &payload).ok().expect("admitted");
    bed.pay(id, &payload[..5000], 64);
    bed.advance(Duration::from_secs(29));
    assert!(bed.cores[0].poll_stalled(bed.now).is_none());
    bed.advance(Duration::from_secs(2));
    assert!(matches!(bed.core().handle_payload(id, 5000, &payload[5000..]), Answer::Nothing));
    assert!(matches!(bed.complete(id), Answer::Nothing));
    let status = bed.ask(link, Control::request(Op::Status, 6, WORKLOADS[0]), &[], 1).control;
    assert_eq!((status.feedback().frames_free, status.answer::<StatusReply>().frames), (8, 8));
}

#[test]
fn gaps_and_wrong_requests_are_refused() {
    let mut bed = Bed::new(8);
    let link = bed.connect(1, 1);
    hello(&mut bed, link, WORKLOADS[0]);
    let payload = put_payload(&[(1, 1)]);
    let id =
        bed.begin(link, &mut Control::put(2, WORKLOADS[0], 1), &payload).ok().expect("admitted");
    assert!(matches!(
        bed.core().handle_payload(id, 8, &payload),
        Answer::Close(CloseCode::Malformed)
    ));
    let wide = Control::get(2, WORKLOADS[0], 1);
    let mut pages: PagesRequest = wide.body();
    pages.page_shift = 13;
    let wide = wide.with(pages);
    assert_eq!(bed.ask(link, wide, &[], 1).control.status(), Status::Invalid);
    for op in [Op::Delegate, Op::Epoch, Op::Atomic, Op::Block] {
        let reply = bed.ask(link, Control::request(op, 1, WORKLOADS[0]), &[], 1).control;
        assert_eq!(reply.status(), Status::Unsupported);
    }
    assert_eq!(bed.stats.denied.value(), 5);
    let grant = bed.ask(link, Control::grant(1, WORKLOADS[0], 4), &[], 1).control;
    assert_eq!(grant.feedback().credits_put, 8);
    // Of a later build, on a link without a session, too.
    let mut later = [0; CONTROL_LEN];
    later.copy_from_slice(Control::request(Op::Status, 1, WORKLOADS[0]).as_bytes());
    later[5] = 200;
    let later = Control::decode(&later).expect("passed on");
    for link in [link, bed.connect(9, 9)] {
        assert_eq!(bed.ask(link, later, &[1; 700], 1).control.status(), Status::Unsupported);
    }
    // What was asked for in a session that has ended is not met by the next one.
    let other = Control::get(2, WORKLOADS[0], 1).with_session(u64::MAX);
    assert_eq!(bed.ask(link, other, &[], 1).control.status(), Status::Denied);
}

#[test]
fn a_draining_agent_gives_but_does_not_take() {
    let mut bed = Bed::new(8);
    let link = bed.connect(1, 1);
    hello(&mut bed, link, WORKLOADS[0]);
    put(&mut bed, link, WORKLOADS[0], &[(1, 11)]);
    let in_use = |bed: &Bed| bed.cores[0].shared().accounts().held() > 0;
    assert!(bed.cores[0].shared().drain() && in_use(&bed));
    assert_eq!(put(&mut bed, link, WORKLOADS[0], &[(2, 22)]).status(), Status::Draining);
    assert_eq!(fetch(&mut bed, link, WORKLOADS[0], &[1, 2]), [(1, 11)]);
    assert_eq!(bed.try_connect(2, 2), Err(CloseCode::Draining));
    // Whom it waits for may come back.
    assert_eq!(
        bed.cores[0].handle_closed(bed.now, link).map(|gone| gone.workload),
        Some(Some((WORKLOADS[0], 1)))
    );
    assert!(in_use(&bed));
    let link = bed.connect(3, 1);
    assert_eq!(hello(&mut bed, link, WORKLOADS[1]).status(), Status::Draining);
    assert_eq!(hello(&mut bed, link, WORKLOADS[0]).status(), Status::Ok);
    assert_eq!(fetch(&mut bed, link, WORKLOADS[0], &[1, 2]), [(1, 11)]);
    bed.ask(link, Control::request(Op::Goodbye, 4, WORKLOADS[0]), &[], 1);
    assert!(!in_use(&bed));
}

/// Who holds nothing is not waited for: another thread may have ended by then.
#[test]
fn what_is_on_its_way_when_an_agent_begins_to_drain_is_refused() {
    let mut bed = Bed::new(8);
    let link = bed.connect(1, 1);
    hello(&mut bed, link, WORKLOADS[0]);
    let payload = put_payload(&[(1, 11), (2, 22)]);
    let id = bed.begin(link, &mut Control::put(2, WORKLOADS[0], 2), &payload).ok().expect("begun");
    bed.pay(id, &payload, 4096);
    assert!(bed.cores[0].shared().drain());
    let Answer::Reply(reply) = bed.complete(id) else { panic!("no reply") };
    let (status, done) = (reply.control.status(), reply.control.answer::<PagesReply>().done);
    assert_eq!((status, done), (Status::Draining, 0));
    drop(reply);
    assert_eq!(bed.cores[0].shared().accounts().held(), 0);
    let free = bed.ask(link, Control::request(Op::Status, 6, WORKLOADS[0]), &[], 1).control;
    assert_eq!(free.feedback().frames_free, 8);
}

#[test]
fn a_repeated_hello_is_granted_its_lease_again() {
    let mut bed = Bed::new(8);
    let link = bed.connect(1, 1);
    let first = hello(&mut bed, link, WORKLOADS[0]);
    let again = hello(&mut bed, link, WORKLOADS[0]);
    let lease = |reply: &Control| reply.answer::<HelloReply>().lease_ms;
    assert_eq!((again.status(), lease(&again), again.session), (Status::Ok, 5000, first.session));
    let longer = bed.ask(link, Control::hello(1, WORKLOADS[0], 9000), &[], 1).control;
    assert_eq!(lease(&longer), 9000);
    put(&mut bed, link, WORKLOADS[0], &[(1, 1)]);
    bed.cores[0].handle_closed(bed.now, link);
    bed.advance(Duration::from_secs(8));
    assert_eq!(bed.stats.expired.value(), 0, "the lease asked for last runs");
    bed.advance(Duration::from_secs(2));
    assert_eq!(bed.stats.expired.value(), 1);
}

#[test]
fn a_client_which_takes_all_it_gets_leaves_room_for_another() {
    let mut bed = Bed::new(20_000);
    // Links.
    let mut links = Vec::new();
    let refused = loop {
        match bed.try_connect(links.len() as u32, 1) {
            Ok(link) => links.push(link),
            Err(code) => break code,
        }
    };
    assert_eq!((refused, links.len()), (CloseCode::Overload, LINKS_MAX / 2));
    let other = bed.connect(9999, 2);
    hello(&mut bed, other, WORKLOADS[0]);
    // Workloads, of which each keeps a page.
    let workload = |n: usize| WorkloadId((n as u128 + 7).to_le_bytes());
    let link = links[0];
    let mut made = 0;
    while hello(&mut bed, link, workload(made)).status() == Status::Ok {
        put(&mut bed, link, workload(made), &[(1, 1)]);
        bed.cores[0].handle_closed(bed.now, link);
        made += 1;
        assert_eq!(bed.connect(0, 1), link);
    }
    assert!((1000..TENANTS_MAX * 2 / 3).contains(&made), "{made}");
    // Requests that are never whole: their frames are taken from nobody else.
    let payload = put_payload(&[(1, 1); 64]);
    hello(&mut bed, link, workload(0));
    let begin = |bed: &mut Bed| bed.begin(link, &mut Control::put(2, workload(0), 64), &payload);
    let begun = std::iter::from_fn(|| begin(&mut bed).ok()).count();
    assert!(begun > 0);
    let second = bed.connect(9998, 2);
    assert_eq!(hello(&mut bed, second, WORKLOADS[1]).status(), Status::Ok);
    let pages: Vec<(u64, u8)> = (0..64).map(|page| (page, 2)).collect();
    for _ in 0..20 {
        assert_eq!(put(&mut bed, other, WORKLOADS[0], &pages).status(), Status::Ok);
        assert_eq!(put(&mut bed, second, WORKLOADS[1], &pages).status(), Status::Ok);
    }
}

#[test]
fn requests_that_never_end_are_refused_to_their_client_only() {
    let mut bed = Bed::new(64);
    let (greedy, other) = (bed.connect(1, 1), bed.connect(2, 2));
    hello(&mut bed, greedy, WORKLOADS[0]);
    hello(&mut bed, other, WORKLOADS[0]);
    let names = [0; 64 * PageDescriptor::LEN];
    let many = |workload| Control::get_many(1, workload, 64);
    let begun = std::iter::from_fn(|| bed.begin(greedy, &mut many(WORKLOADS[0]), &names).ok());
    let begun: Vec<ExchangeId> = begun.collect();
    assert_eq!(begun.len(), EXCHANGES_MAX / 2);
    let refused = bed.ask(greedy, Control::get(1, WORKLOADS[0], 1), &[], 1).control;
    assert_eq!(refused.status(), Status::Denied);
    assert_eq!(fetch(&mut bed, other, WORKLOADS[0], &[1, 2]), []);
    // All of them expire, each once.
    bed.advance(EXCHANGE_TIMEOUT - Duration::from_secs(1));
    assert!(bed.cores[0].poll_stalled(bed.now).is_none());
    bed.now += Duration::from_secs(2);
    bed.cores[0].handle_timeout(bed.now);
    // Of this thread: others may run instead of it.
    let cpu = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap());
    let (started, mut expired) = (cpu(), 0);
    while let Some(reply) = bed.cores[0].poll_stalled(bed.now) {
        assert_eq!(reply.control.status(), Status::Failed);
        expired += 1;
    }
    assert_eq!(expired, begun.len());
    let took = cpu() - started;
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert_eq!(fetch(&mut bed, greedy, WORKLOADS[0], &[1, 2]), []);
}

#[test]
fn lists_of_pages_that_never_end_are_bounded_in_bytes() {
    let mut bed = Bed::new(64);
    let (greedy, other) = (bed.connect(1, 1), bed.connect(2, 2));
    hello(&mut bed, greedy, WORKLOADS[0]);
    hello(&mut bed, other, WORKLOADS[0]);
    let ids = [0; 4096 * 8];
    let mut begun = 0;
    while let Ok(id) = bed.begin(greedy, &mut Control::discard(1, WORKLOADS[0], 4096), &ids) {
        bed.pay(id, &ids[..ids.len() - 1], ids.len());
        begun += 1;
    }
    assert!(begun * ids.len() <= 32 << 20, "{begun} lists are held");
    let refused = bed.ask(greedy, Control::discard(1, WORKLOADS[0], 4096), &ids, 1).control;
    assert_eq!(refused.status(), Status::Denied);
    let discard = bed.ask(other, Control::discard(1, WORKLOADS[0], 4096), &ids, ids.len()).control;
    assert_eq!(discard.status(), Status::Ok);
    // What expires makes room.
    bed.advance(EXCHANGE_TIMEOUT);
    while bed.cores[0].poll_stalled(bed.now).is_some() {}
    let discard = bed.ask(greedy, Control::discard(1, WORKLOADS[0], 4096), &ids, ids.len()).control;
    assert_eq!(discard.status(), Status::Ok);
}

#[test]
fn workloads_that_end_again_and_again_do_not_keep_the_loop_busy() {
    let mut bed = Bed::new(1 << 16);
    let (much, little) = (bed.connect(1, 1), bed.connect(2, 2));
    hello(&mut bed, much, WORKLOADS[0]);
    for first in (0..1 << 15).step_by(64) {
        let pages: Vec<(u64, u8)> = (first..first + 64).map(|page| (page, 1)).collect();
        put(&mut bed, much, WORKLOADS[0], &pages);
    }
    let free = |bed: &mut Bed| {
        let status = Control::request(Op::Status, 5, WORKLOADS[0]);
        bed.ask(much, status, &[], 1).control.feedback().frames_free
    };
    let (mut steps, before) = (0, free(&mut bed));
    for _ in 0..100 {
        hello(&mut bed, little, WORKLOADS[1]);
        put(&mut bed, little, WORKLOADS[1], &[(1, 1)]);
        bed.ask(little, Control::request(Op::Goodbye, 4, WORKLOADS[1]), &[], 1);
        // What the driver does between two requests: as much as is due.
        while bed.cores[0].deadline(bed.now).is_some_and(|at| at <= bed.now) && steps < 1000 {
            bed.cores[0].handle_timeout(bed.now);
            steps += 1;
        }
    }
    assert!(steps < 10, "{steps} steps of housekeeping for 100 pages, in no time");
    // And yet all of them come free soon.
    let start = bed.now;
    while free(&mut bed) != before {
        bed.now = bed.cores[0].deadline(bed.now).expect("something to do");
        bed.cores[0].handle_timeout(bed.now);
        assert!(bed.now < start + LEASE_MIN, "{}", free(&mut bed));
    }
}

/// Counts the lines of a log.
#[derive(Default)]
struct Lines(AtomicUsize);

impl Write for &Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_client_that_says_hello_and_goodbye_for_ever_does_not_fill_the_log() {
    let mut bed = Bed::new(64);
    let lines = Arc::new(Lines::default());
    let log = tracing_subscriber::fmt().with_writer(lines.clone()).finish();
    let _log = tracing::subscriber::set_default(log);
    let link = bed.connect(1, 1);
    for _ in 0..10_000 {
        assert_eq!(hello(&mut bed, link, WORKLOADS[0]).status(), Status::Ok);
        bed.ask(link, Control::request(Op::Goodbye, 4, WORKLOADS[0]), &[], 1);
    }
    let said = |lines: &Lines| lines.0.load(Ordering::Relaxed);
    assert!((10..200).contains(&said(&lines)), "{} lines in no time", said(&lines));
    // Later it is said how many were left out, and what happens then.
    let before = said(&lines);
    bed.advance(Duration::from_secs(1));
    hello(&mut bed, link, WORKLOADS[0]);
    assert_eq!(said(&lines), before + 2);
}

#[test]
fn an_idle_agent_rests_and_keeps_no_memory() {
    let mut bed = Bed::new(64);
    let link = bed.connect(1, 1);
    hello(&mut bed, link, WORKLOADS[0]);
    let pages: Vec<(u64, u8)> = (0..60).map(|page| (page, 1)).collect();
    put(&mut bed, link, WORKLOADS[0], &pages);
    bed.ask(link, Control::request(Op::Goodbye, 4, WORKLOADS[0]), &[], 1);
    bed.advance(TRIM_IDLE + LEASE_MIN);
    assert_eq!(bed.cores[0].deadline(bed.now), None);
    assert_eq!(bed.core().shared().gauges.frames_free.value(), 64);
}

#[test]
fn what_one_thread_stores_is_there_for_all_and_a_session_ends_on_all() {
    let mut bed = Bed::of(2, 8);
    let links = [0, 1, 2].map(|index| bed.connect(index, 1));
    let sessions = links.map(|link| hello(&mut bed, link, WORKLOADS[0]).session);
    assert_eq!(sessions, [sessions[0]; 3]);
    // All room there is, of whichever thread it is.
    put(&mut bed, links[0], WORKLOADS[0], &[(1, 11), (2, 12), (3, 13), (4, 14), (5, 15), (6, 16)]);
    let reply = put(&mut bed, links[1], WORKLOADS[0], &[(2, 22), (7, 17)]);
    assert_eq!((reply.status(), reply.feedback().frames_free), (Status::Ok, 1));
    assert_eq!(fetch(&mut bed, links[0], WORKLOADS[0], &[1, 2, 7]), [(1, 11), (2, 22), (7, 17)]);
    let payload = put_payload(&[(8, 18)]);
    let id =
        bed.begin(links[1], &mut Control::put(2, WORKLOADS[0], 1), &payload).ok().expect("room");
    let goodbye = Control::request(Op::Goodbye, 4, WORKLOADS[0]);
    assert_eq!(bed.ask(links[0], goodbye, &[], 1).control.status(), Status::Ok);
    // Of a request that was under way nothing is stored, of others nothing is done.
    bed.pay(id, &payload, payload.len());
    assert_eq!(got(bed.complete(id)).control.status(), Status::Denied);
    for link in links {
        let get = bed.ask(link, Control::get(1, WORKLOADS[0], 1), &[], 1).control;
        assert_eq!(get.status(), Status::Denied);
    }
    let next = hello(&mut bed, links[1], WORKLOADS[0]);
    assert_ne!(next.session, sessions[0]);
    // The links of the former session are none of the next one: it lives as long as its own.
    put(&mut bed, links[1], WORKLOADS[0], &[(1, 31)]);
    bed.cores[0].handle_closed(bed.now, links[0]);
    bed.cores[0].handle_closed(bed.now, links[2]);
    bed.advance(Duration::from_secs(60));
    assert_eq!(fetch(&mut bed, links[1], WORKLOADS[0], &[1, 2, 3]), [(1, 31)]);
    assert_eq!(bed.cores[1].shared().store.frames_free(), 7);
}

#[test]
fn a_client_has_one_share_on_all_threads() {
    let mut bed = Bed::of(4, 64);
    let links: Vec<LinkId> = (1..).map_while(|index| bed.try_connect(index, 1).ok()).collect();
    assert_eq!(links.len(), LINKS_MAX / 2);
    assert!(links.iter().all(|&link| hello(&mut bed, link, WORKLOADS[0]).session > 0));
    let (names, mut many) = ([0; 64 * PageDescriptor::LEN], Control::get_many(1, WORKLOADS[0], 64));
    let begins = |link: &&LinkId| bed.begin(**link, &mut many, &names).is_ok();
    let begun = links.iter().cycle().take_while(begins).count();
    assert_eq!(begun, EXCHANGES_MAX / 2);
}

/// Pages beyond the export stay, none is taken, and each workload is told its part: those whose pagers know what that means.
#[test]
fn a_workload_is_told_how_many_pages_it_is_to_take_away() {
    let mut bed = Bed::new(64);
    let links = [bed.connect(1, 1), bed.connect(2, 2)];
    for (link, workload) in links.into_iter().zip(WORKLOADS) {
        assert_eq!(hello(&mut bed, link, workload).answer::<HelloReply>().features, 3);
    }
    let pages = |count: u64| (0..count).map(|page| (page, 2)).collect::<Vec<(u64, u8)>>();
    put(&mut bed, links[0], WORKLOADS[0], &pages(30));
    put(&mut bed, links[1], WORKLOADS[1], &pages(10));
    let ask = |bed: &mut Bed, n: usize| {
        bed.ask(links[n], Control::request(Op::Status, 3, WORKLOADS[n]), &[], 1).control
    };
    assert_eq!(ask(&mut bed, 0).feedback().recall, 0);
    bed.core().shared().set_frames(20);
    let told = [0, 1].map(|n| ask(&mut bed, n));
    assert_eq!(told.map(|reply| reply.feedback().recall), [15, 5]);
    let room = told.map(|reply| (reply.feedback().frames_free, reply.feedback().credits_put));
    assert_eq!((room, told[0].answer::<StatusReply>().frames), ([(0, 0); 2], 20));
    let refused = put(&mut bed, links[1], WORKLOADS[1], &[(40, 2)]);
    assert_eq!(refused.status(), Status::Full);
    let kept: Vec<u64> = (0..30).collect();
    assert_eq!(fetch(&mut bed, links[0], WORKLOADS[0], &kept).len(), 30);
    // They leave, and there is room again.
    let gone: Vec<u8> = (0..25u64).flat_map(u64::to_le_bytes).collect();
    bed.ask(links[0], Control::discard(4, WORKLOADS[0], 25), &gone, 100);
    assert_eq!(ask(&mut bed, 1).feedback().recall, 0);
    assert_eq!(put(&mut bed, links[1], WORKLOADS[1], &[(40, 2)]).status(), Status::Ok);
}

/// However many are beyond the export: of those that have gone it is measured how many that is.
#[test]
fn a_workload_is_asked_for_no_more_pages_at_a_time_than_go_in_a_second() {
    let mut bed = Bed::new(6000);
    let link = bed.connect(1, 1);
    hello(&mut bed, link, WORKLOADS[0]);
    let all: Vec<(u64, u8)> = (0..6000).map(|page| (page, 2)).collect();
    for pages in all.chunks(64) {
        put(&mut bed, link, WORKLOADS[0], pages);
    }
    bed.core().shared().set_frames(100);
    let asked = |bed: &mut Bed| {
        let status = Control::request(Op::Status, 3, WORKLOADS[0]);
        u64::from(bed.ask(link, status, &[], 1).control.feedback().recall)
    };
    assert_eq!(asked(&mut bed), RECALL_MIN);
    let gone: Vec<u8> = (0..400u64).flat_map(u64::to_le_bytes).collect();
    bed.ask(link, Control::discard(4, WORKLOADS[0], 400), &gone, 100);
    bed.now += RECALL_SAMPLE;
    // 4000 a second, after none.
    assert_eq!(asked(&mut bed), 2000);
    bed.core().shared().set_frames(5590);
    assert_eq!(asked(&mut bed), 10);
}
