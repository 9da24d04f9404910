//! Whose turn it is, by a clock of the tests.

use std::net::Ipv4Addr;

use bytes::BytesMut;

use super::*;

const US: Duration = Duration::from_micros(1);

fn client(n: u8) -> PeerId {
    PeerId::Issued([n; 16])
}

fn datagram(length: usize) -> Datagram {
    let from = (Ipv4Addr::LOCALHOST, 7).into();
    Datagram { from, to: None, bytes: BytesMut::zeroed(length) }
}

/// The client has asked for something: whether what it sends next must wait.
fn hears(turns: &mut Turns, now: Instant, n: u8) -> bool {
    turns.asked(now, client(n));
    turns.must_wait(now, client(n), true)
}

/// Clients with a link each, of which two have just asked for something.
fn contended(now: Instant, clients: u8) -> Turns {
    let mut turns = Turns::default();
    (0..clients).for_each(|n| turns.enter(client(n), n.into()));
    turns.begin(now);
    assert!(!hears(&mut turns, now, 0));
    assert!(hears(&mut turns, now, 1));
    turns
}

/// What each of the clients is given in a second, of which some have work of `step` always, and others work of 10 us so many us after they were answered.
fn shares(step: Duration, always: u8, now_and_then: &[u32]) -> Vec<f64> {
    let start = Instant::now();
    let count = always + now_and_then.len() as u8;
    let mut turns = contended(start, count.max(2));
    let (mut now, mut next) = (start, vec![start; now_and_then.len()]);
    let mut given = vec![Duration::ZERO; count.into()];
    while now < start + Duration::from_secs(1) {
        turns.begin(now);
        for n in 0..count {
            let due = n.checked_sub(always).map(|n| next[usize::from(n)]);
            let has = !turns.clients[&client(n)].lane.is_empty();
            if due.is_none_or(|due| due <= now) && !has {
                hears(&mut turns, now, n);
                turns.push(client(n), datagram(100));
            }
        }
        let Some(one) = turns.next(now) else {
            now += US;
            continue;
        };
        turns.take(one).expect("it waits");
        let n = (0..count).find(|n| client(*n) == one).expect("one of them");
        let took = if n < always { step } else { 10 * US };
        now += took;
        given[usize::from(n)] += took;
        turns.charge(now, one, took);
        if let Some(n) = n.checked_sub(always).map(usize::from) {
            turns.answered(now, one);
            next[n] = now + US * now_and_then[n];
        }
    }
    given.iter().map(Duration::as_secs_f64).collect()
}

#[test]
fn one_that_sends_alone_never_waits() {
    let (mut turns, now) = (Turns::default(), Instant::now());
    turns.enter(client(1), 1);
    turns.enter(client(2), 2);
    for ms in 0..100 {
        let now = now + Duration::from_millis(ms);
        turns.begin(now);
        assert!(!hears(&mut turns, now, 1));
        turns.work_for(Some(client(1)));
    }
    assert!(turns.measured.is_none() && turns.clients[&client(1)].paid_at.is_none());
    // The other sends once, and not again.
    let later = now + Duration::from_millis(100);
    turns.begin(later);
    assert!(hears(&mut turns, later, 2) && hears(&mut turns, later, 1));
    turns.begin(later + CONTENDED);
    assert!(!hears(&mut turns, later + CONTENDED, 1));
}

#[test]
fn the_one_for_which_least_was_done_comes_first() {
    let now = Instant::now();
    let mut turns = contended(now, 3);
    for n in [0, 0, 1, 2, 2] {
        turns.push(client(n), datagram(100));
    }
    turns.charge(now, client(0), 30 * US);
    turns.charge(now, client(2), 20 * US);
    let mut order = Vec::new();
    while let Some(one) = turns.next(now) {
        assert!(turns.take(one).is_some());
        order.push(one);
    }
    assert_eq!(order, [1, 2, 2, 0, 0].map(client));
    assert_eq!((turns.weight, turns.due()), (0, None));
}

#[test]
fn one_that_takes_all_gets_what_one_that_needs_little_leaves() {
    let shares = shares(100 * US, 1, &[200]);
    assert!(shares[0] > 0.94, "{shares:?}");
    // Of 200 us each time it is kept waiting for some of the 100.
    assert!(shares[1] > 0.035, "{shares:?}");
}

#[test]
fn those_that_take_all_share_all_equally() {
    for count in [2, 3, 5] {
        let shares = shares(100 * US, count, &[]);
        let fair = 1.0 / f64::from(count);
        assert!(shares.iter().all(|share| (share / fair - 1.0).abs() < 0.02), "{shares:?}");
    }
}

#[test]
fn who_owes_does_not_wait_for_nobody() {
    let now = Instant::now();
    let mut turns = contended(now, 2);
    turns.charge(now, client(0), OWES_MOST / 4);
    (0..1000).for_each(|_| turns.charge(now, client(1), 100 * US));
    (0..2).for_each(|n| turns.push(client(n), datagram(1)));
    // What was done long ago is forgotten.
    assert_eq!(turns.paid_at(Some(client(1))), Some(now + OWES_MOST + 200 * US));
    for n in [0, 1] {
        assert_eq!((turns.next(now), turns.due()), (Some(client(n)), Some(now)));
        assert!(turns.take(client(n)).is_some());
    }
}

#[test]
fn who_has_had_a_long_piece_of_work_waits_while_another_is_active() {
    let now = Instant::now();
    let mut turns = contended(now, 2);
    turns.charge(now, client(1), OWES_MOST);
    turns.push(client(1), datagram(1));
    assert_eq!(turns.next(now), Some(client(1)));
    turns.charge(now, client(1), OWES_MOST * 2);
    // 15 ms, unless the other is silent.
    assert_eq!((turns.next(now), turns.due()), (None, Some(now + CONTENDED)));
    hears(&mut turns, now + CONTENDED / 2, 0);
    assert_eq!(turns.due(), Some(now + CONTENDED * 3 / 2));
    // What it has paid for is done in any case.
    let paid = now + OWES_MOST * 4 - OWES_MUCH;
    hears(&mut turns, paid, 0);
    turns.begin(paid);
    assert_eq!(turns.next(paid), Some(client(1)));
}

#[test]
fn one_that_takes_all_gets_a_third_beside_one_that_asks_again_at_once() {
    let shares = |pause| shares(10 * US, 1, &[pause]);
    let beside = shares(6);
    assert!((0.30..0.36).contains(&beside[0]) && beside[1] > 0.5, "{beside:?}");
    // What one takes to ask counts too.
    let beside = shares(45);
    assert!(beside[0] > 0.4 && beside[1] > 0.11, "{beside:?}");
    // However long a step lasts, in which nobody looks at what has come.
    let beside = super::tests::shares(100 * US, 1, &[6]);
    assert!(beside[0] < 0.55 && beside[1] > 0.3, "{beside:?}");
    // And what is left by one that asks later than it is expected.
    let beside = shares(60);
    assert!(beside[0] > 0.8, "{beside:?}");
}

#[test]
fn one_that_paces_itself_does_not_keep_what_is_expected_from_another() {
    let alone = shares(10 * US, 0, &[1_000_000, 6])[1];
    let beside = shares(10 * US, 0, &[45, 6])[1];
    assert!(beside > 0.8 * alone, "{beside} of {alone}");
}

/// A client that owes so much, of which something waits, and another that is expected.
fn beside_expected(now: Instant, owes: Duration) -> Turns {
    let mut turns = contended(now, 2);
    turns.charge(now, client(1), owes);
    turns.push(client(1), datagram(1));
    assert_eq!(turns.next(now), Some(client(1)));
    turns.expect(now, client(0));
    turns
}

#[test]
fn nothing_is_begun_for_one_that_owes_much_while_another_is_expected() {
    let now = Instant::now();
    let mut turns = beside_expected(now, OWES_MUCH * 2);
    let until = now + EXPECTED;
    assert_eq!((turns.next(now), turns.due()), (None, Some(until)));
    assert_eq!(turns.stands_back_until(now, client(1)), Some(until));
    assert_eq!(turns.next(until), Some(client(1)));
    // What that one asks for is begun, and taken in at once.
    assert!(!turns.has_asked_again(now));
    turns.push(client(0), datagram(1));
    assert!(turns.has_asked_again(now));
    assert_eq!(turns.next(now), Some(client(0)));
    assert!(turns.take(client(0)).is_some());
    // The time that passes pays.
    let paid = now + OWES_MUCH;
    turns.expect(paid, client(0));
    assert_eq!((turns.next(paid - US), turns.next(paid)), (None, Some(client(1))));
}

#[test]
fn something_is_begun_for_one_that_owes_more_just_after_another_was_answered() {
    let now = Instant::now();
    let mut turns = beside_expected(now, OWES_MORE * 3);
    let late = now + ANSWERED;
    assert_eq!((turns.next(now), turns.next(late - US)), (Some(client(1)), Some(client(1))));
    assert_eq!(turns.next(late), None);
    // What is done for it meanwhile counts more.
    turns.charge(now, client(1), 10 * US);
    let owed = OWES_MORE * 3 - 10 * US + 10 * US * EXPECTED_PART;
    assert_eq!(turns.paid_at(Some(client(1))), Some(now + owed + 10 * US));
    // It is no longer so when that one has sent something.
    turns.charge(now, client(0), US);
    assert_eq!(turns.next(now), None);
    turns.answered(now, client(0));
    assert_eq!(turns.next(now), Some(client(1)));
    // And who owes hardly more waits for nobody.
    let turns = beside_expected(now, OWES_MORE);
    assert_eq!(turns.next(late), Some(client(1)));
}

#[test]
fn one_that_is_answered_is_expected_if_it_asks_again_soon_and_owes_little() {
    let now = Instant::now();
    let expected = |turns: &Turns| turns.expected(now).map(|(expected, _)| expected);
    let mut turns = contended(now, 3);
    for _ in 0..EXPECTED_LEAST {
        turns.answered(now, client(0));
        assert_eq!(expected(&turns), None);
        turns.asked(now, client(0));
    }
    turns.answered(now, client(0));
    assert_eq!(expected(&turns), Some(client(0)));
    // Another that owes more does not take its place, but does not stand back either, and one that owes as little does.
    turns.charge(now, client(1), OWES_LITTLE / 4);
    assert!(turns.stands_back_until(now + ANSWERED, client(1)).is_some());
    turns.expect(now, client(1));
    assert_eq!(expected(&turns), Some(client(0)));
    assert_eq!(turns.stands_back_until(now + ANSWERED, client(1)), None);
    turns.charge(now, client(1), US);
    let owes = OWES_LITTLE / 4 * EXPECTED_PART + US * CLIENT_PART;
    assert_eq!(turns.paid_at(Some(client(1))), Some(now + owes - OWES_LITTLE / 4));
    turns.expect(now, client(2));
    assert_eq!(expected(&turns), Some(client(2)));
    // One that owes more than a little never is.
    let mut turns = contended(now, 2);
    turns.charge(now, client(0), OWES_LITTLE + US);
    turns.expect(now, client(0));
    assert_eq!(expected(&turns), None);
    // Nor one that asks later, more often than not.
    let mut turns = contended(now, 2);
    for turn in 0..16 {
        turns.answered(now, client(0));
        let later = if turn % 8 < 5 { EXPECTED + US } else { EXPECTED };
        turns.asked(now + later, client(0));
    }
    turns.answered(now, client(0));
    assert_eq!(expected(&turns), None);
}

#[test]
fn time_in_which_the_thread_does_not_run_is_not_owed() {
    let mut turns = contended(Instant::now(), 2);
    turns.work_for(Some(client(1)));
    // This thread does not run while another one works, which takes far longer than to begin and to end that one.
    let works = || {
        let began = cpu_time();
        while cpu_time() - began < OWES_MOST {}
    };
    std::thread::spawn(works).join().expect("it has worked");
    turns.work_for(None);
    let (now, ran) = (Instant::now(), cpu_time() - turns.cpu_time);
    let paid_at = turns.paid_at(Some(client(1))).expect("it owes something");
    assert!(paid_at <= now + ran * CLIENT_PART, "{:?} of {ran:?}", paid_at - now);
}

#[test]
fn what_takes_long_to_receive_is_owed_by_who_has_sent_it() {
    let mut turns = contended(Instant::now(), 2);
    turns.work_for(Some(client(0)));
    turns.work_for_sender();
    let (now, began) = (Instant::now(), cpu_time());
    while cpu_time() - began < OWES_MUCH {}
    turns.work_for(Some(client(1)));
    turns.work_for(None);
    let owed = |n| turns.paid_at(Some(client(n))).expect("it owes something") - now;
    assert!(owed(0) < OWES_MUCH && owed(1) >= OWES_MUCH * CLIENT_PART, "{:?}", [0, 1].map(owed));
    // And what is nobody's by nobody.
    turns.work_for_sender();
    turns.work_for(None);
    assert!(turns.measured.is_none() && turns.received_since.is_none());
}

#[test]
fn who_keeps_a_link_is_not_active() {
    let now = Instant::now();
    let mut turns = Turns::default();
    (0..2).for_each(|n| turns.enter(client(n), n.into()));
    turns.begin(now);
    for n in 0..QUIET_MAX {
        let then = now + CONTENDED * 2 * n;
        turns.begin(then);
        assert!(!hears(&mut turns, then, 0));
        assert!(!turns.must_wait(then, client(1), true));
    }
    // More than that in a short time.
    let then = now + CONTENDED * 10;
    turns.begin(then);
    assert!(!hears(&mut turns, then, 0));
    let waits = (0..=QUIET_MAX).map(|_| turns.must_wait(then, client(1), true));
    assert_eq!(waits.collect::<Vec<_>>(), [false, false, false, true]);
    assert!(turns.must_wait(then, client(0), true));
}

#[test]
fn what_waits_goes_before_what_comes_when_one_is_left() {
    let now = Instant::now();
    let mut turns = contended(now, 2);
    turns.push(client(1), datagram(1));
    let later = now + CONTENDED;
    turns.begin(later);
    assert!(!turns.is_contended() && hears(&mut turns, later, 1));
    turns.work_for(Some(client(1)));
    assert!(turns.measured.is_none(), "it is alone");
    assert_eq!(turns.next(later), Some(client(1)));
    assert!(turns.take(client(1)).is_some() && !hears(&mut turns, later, 1));
}

#[test]
fn what_waits_is_bounded_and_the_longest_lane_loses() {
    let now = Instant::now();
    let mut turns = contended(now, 2);
    (0..100).for_each(|_| turns.push(client(1), datagram(1000)));
    (0..1000).for_each(|_| turns.push(client(0), datagram(60_000)));
    (0..10_000).for_each(|_| turns.push(client(0), datagram(0)));
    let lanes = turns.clients.values().map(|client| client.weight);
    assert_eq!(lanes.sum::<usize>(), turns.weight);
    assert!(turns.weight <= LANES_MAX && turns.weight > LANES_MAX - 70_000);
    assert_eq!(turns.clients[&client(1)].lane.len(), 100);
    // Of who is gone nothing waits.
    turns.leave(client(0), 0);
    assert_eq!((turns.weight, turns.take(client(0)).is_some()), (100_000, false));
    turns.push(client(0), datagram(9));
    assert_eq!(turns.weight, 100_000);
}

#[test]
fn who_was_expected_once_owes_nothing_for_what_it_takes_to_ask_when_it_is_alone() {
    let now = Instant::now();
    let mut turns = contended(now, 2);
    turns.expect(now, client(0));
    turns.asked(now + EXPECTED, client(0));
    let owes = turns.paid_at(Some(client(0)));
    assert_eq!(owes, Some(now + EXPECTED * 2 - EXPECTED_FREE));
    let later = now + CONTENDED * 2;
    turns.begin(later);
    assert!(!turns.is_contended());
    for us in 1..100 {
        let now = later + EXPECTED * 2 * us;
        turns.answered(now, client(0));
        turns.asked(now + EXPECTED * 2, client(0));
    }
    assert_eq!(turns.paid_at(Some(client(0))), owes);
}
