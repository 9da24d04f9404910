//! Whose turn it is among clients that have links. One that sends without end would have nearly all of a thread: its datagrams fill the socket, and what
//! each asks for may cost a hundred times what another's does. So while more than one client sends, what comes waits in a lane for each, and it is the
//! turn of the one for which least was done of late.
//!
//! What is done for a client is measured, and owed: it is paid by the time that passes, of which a part is everybody's. Who asks for one thing after the
//! other would always find that something was begun for another since it was answered. So it is expected to ask again, and meanwhile little is begun for those
//! that owe more.

use std::collections::VecDeque;
use std::collections::hash_map::HashMap;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};

use super::limits::{
    ANSWERED, BURST_CONTENDED, BURST_EXPECTED, CLIENT_PART, CONTENDED, EXPECTED, EXPECTED_LEAST,
    EXPECTED_PART, LANES_MAX, OWES_LITTLE, OWES_MORE, OWES_MOST, OWES_MUCH, QUIET_MAX,
    STRANGER_LEAST,
};
use super::strangers::Datagram;
use crate::PeerId;

/// Clients with links, what waits of each, and what was done for each.
#[derive(Debug, Default)]
pub(super) struct Turns {
    clients: HashMap<PeerId, Client>,
    /// Who was active last.
    last: Option<PeerId>,
    /// Until when clients have their turns, if no two are active any more.
    contended_until: Option<Instant>,
    /// For whom something is done, and since when.
    measured: Option<(PeerId, Instant)>,
    /// Since when something is received, of whom is not known yet.
    received_since: Option<Instant>,
    /// CPU time of the thread when this turn of the loop began, or clients began to have turns.
    cpu_time: Duration,
    /// Of all lanes.
    weight: usize,
    /// When this turn of the loop began.
    now: Option<Instant>,
    /// Who owes little and may ask again, and until when.
    expected: Option<(PeerId, Instant)>,
    /// Until when that one was just answered.
    answered_until: Option<Instant>,
}

#[derive(Debug, Default)]
struct Client {
    links: usize,
    lane: VecDeque<Datagram>,
    weight: usize,
    /// When what was done for it is paid.
    paid_at: Option<Instant>,
    /// It was active until then: it has asked for something, or sent more than who keeps a link does.
    active_until: Option<Instant>,
    /// Receptions since then, which is not long ago.
    received: (Option<Instant>, u32),
    /// When it had an answer to all that it had asked for, if it has asked for nothing since.
    answered_at: Option<Instant>,
    /// A bit for each of the last times that it asked then: whether it did so soon.
    asked_soon: u8,
}

/// CPU time of this thread; longer than any other if it cannot be told.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::MAX, Duration::from)
}

impl Turns {
    /// A link of the client is up.
    pub(super) fn enter(&mut self, client: PeerId) {
        self.clients.entry(client).or_default().links += 1;
    }

    /// One of its links is gone.
    pub(super) fn leave(&mut self, client: PeerId) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        state.links -= 1;
        if state.links == 0 {
            self.weight -= state.weight;
            self.clients.remove(&client);
        }
    }

    /// Whether more than one client is active.
    pub(super) fn is_contended(&self) -> bool {
        self.contended_until.is_some()
    }

    /// A turn begins: is one client left, it has the thread for itself.
    pub(super) fn begin(&mut self, now: Instant) {
        self.now = Some(now);
        if self.contended_until.is_some_and(|until| until <= now) {
            self.contended_until = None;
        }
        if self.is_contended() {
            self.cpu_time = cpu_time();
        }
    }

    /// The client has asked for something.
    pub(super) fn asked(&mut self, now: Instant, client: PeerId) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        state.active_until = Some(now + CONTENDED);
        if let Some(at) = state.answered_at.take() {
            state.asked_soon = state.asked_soon << 1 | u8::from(now <= at + EXPECTED);
        }
        let last = self.last.replace(client).filter(|last| *last != client);
        let last = last.and_then(|last| self.clients.get(&last)?.active_until);
        if last.is_some_and(|until| now < until) {
            if !self.is_contended() {
                // Of a turn in which nothing was measured before.
                self.cpu_time = cpu_time();
            }
            self.contended_until = Some(now + CONTENDED);
        }
    }

    /// The client has its answers, as often before, and asked again each time.
    #[cfg(test)]
    pub(super) fn expect(&mut self, now: Instant, client: PeerId) {
        for _ in 0..EXPECTED_LEAST {
            self.answered(now, client);
            self.asked(now, client);
        }
        self.answered(now, client);
    }

    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.weight
    }

    /// Whether anything waits.
    pub(super) fn are_waiting(&self) -> bool {
        self.weight > 0
    }

    /// The client has sent something, in another reception if it is the `first`: whether it must wait for its turn.
    pub(super) fn must_wait(&mut self, now: Instant, client: PeerId, first: bool) -> bool {
        let Some(state) = self.clients.get_mut(&client) else { return false };
        let (since, count) = &mut state.received;
        if since.is_none_or(|since| now > since + CONTENDED) {
            (*since, *count) = (Some(now), 0);
        }
        *count += u32::from(first);
        // What waits goes first.
        let behind = !state.lane.is_empty();
        if *count > QUIET_MAX {
            self.asked(now, client);
        }
        behind || self.is_contended()
    }

    /// Has a datagram of a client wait. If there is no room, the last one of the longest lane is lost.
    pub(super) fn push(&mut self, client: PeerId, datagram: Datagram) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        let weight = datagram.bytes.len().max(STRANGER_LEAST);
        state.weight += weight;
        self.weight += weight;
        state.lane.push_back(datagram);
        while self.weight > LANES_MAX {
            let Some(longest) = self.clients.values_mut().max_by_key(|client| client.weight) else {
                return;
            };
            let Some(lost) = longest.lane.pop_back() else { return };
            let weight = lost.bytes.len().max(STRANGER_LEAST);
            longest.weight -= weight;
            self.weight -= weight;
        }
    }

    /// Of those that may, the client for which least was done of late; it has something that waits.
    pub(super) fn next(&self, now: Instant) -> Option<PeerId> {
        let waiting = self.clients.iter().filter(|(_, state)| !state.lane.is_empty());
        let (client, _) = waiting.min_by_key(|(_, state)| state.paid_at)?;
        self.stands_back_until(now, *client).is_none().then_some(*client)
    }

    /// The first datagram that waits of a client.
    pub(super) fn take(&mut self, client: PeerId) -> Option<Datagram> {
        let state = self.clients.get_mut(&client)?;
        let datagram = state.lane.pop_front()?;
        let weight = datagram.bytes.len().max(STRANGER_LEAST);
        state.weight -= weight;
        self.weight -= weight;
        Some(datagram)
    }

    /// When the next datagram that waits may be handled; perhaps long ago.
    pub(super) fn due(&self) -> Option<Instant> {
        let now = self.now.filter(|_| self.weight > 0)?;
        let waiting = self.clients.iter().filter(|(_, state)| !state.lane.is_empty());
        waiting.map(|(client, _)| self.stands_back_until(now, *client).unwrap_or(now)).min()
    }

    /// The time now, where clients have their turns, and otherwise that at which this turn of the loop began.
    pub(super) fn time(&self, began: Instant) -> Instant {
        if self.is_contended() { began.max(Instant::now()) } else { began }
    }

    /// Until when nothing is begun for a client, because one that owes less is expected to ask again: who reads one page after the other would find something
    /// begun each time (anticipatory scheduling, Iyer and Druschel, 2001). What is begun as soon as that one is answered is done when it asks.
    pub(super) fn stands_back_until(&self, now: Instant, client: PeerId) -> Option<Instant> {
        let (expected, until) = self.expected(now)?;
        let least = self.paid_at(Some(expected)).map_or(now, |at| at.max(now));
        let more = self.paid_at(Some(client))?.saturating_duration_since(least);
        let may = more <= OWES_MORE || more <= OWES_MUCH && self.is_just_answered(now);
        (!may).then_some(until)
    }

    /// Who is expected to ask again, and until when.
    pub(super) fn expected(&self, now: Instant) -> Option<(PeerId, Instant)> {
        self.expected.filter(|(_, until)| *until > now && self.is_contended())
    }

    /// Whether that one had no time yet to ask again.
    pub(super) fn is_just_answered(&self, now: Instant) -> bool {
        self.answered_until.is_some_and(|until| until > now)
    }

    /// Whether it has.
    pub(super) fn has_asked_again(&self, now: Instant) -> bool {
        let state = self.expected(now).and_then(|(expected, _)| self.clients.get(&expected));
        state.is_some_and(|state| !state.lane.is_empty())
    }

    /// The client has all the answers of a link: it is expected to ask again, if it does so and owes little, and less than who is expected now.
    pub(super) fn answered(&mut self, now: Instant, client: PeerId) {
        let owes_of = |state: &Client| state.paid_at.map_or(now, |at| at.max(now));
        let other = self.expected(now).and_then(|(other, _)| self.clients.get(&other));
        let other = other.map(owes_of);
        let Some(state) = self.clients.get_mut(&client).filter(|_| self.contended_until.is_some())
        else {
            return;
        };
        state.answered_at = Some(now);
        let owes = owes_of(state);
        let is_less = owes <= now + OWES_LITTLE && other.is_none_or(|other| owes <= other);
        if is_less && state.asked_soon.count_ones() >= EXPECTED_LEAST {
            self.expected = Some((client, now + EXPECTED));
            self.answered_until = Some(now + ANSWERED);
        }
    }

    /// Bytes that are sent for a client together; of replies, those that its requests may ask for.
    pub(super) fn burst(&self, now: Instant, client: Option<PeerId>) -> Option<usize> {
        let expected = self.expected(now).filter(|(expected, _)| Some(*expected) != client);
        let burst = if expected.is_some() { BURST_EXPECTED } else { BURST_CONTENDED };
        self.is_contended().then_some(burst)
    }

    /// Of two clients less was done of late for the one of which this is earlier.
    pub(super) fn paid_at(&self, client: Option<PeerId>) -> Option<Instant> {
        self.clients.get(&client?)?.paid_at
    }

    /// Something is received: it is known later for whom.
    pub(super) fn work_for_sender(&mut self) {
        self.work_for(None);
        self.received_since = self.is_contended().then(Instant::now);
    }

    /// What is done from now on, or since something is received, is done for this client, or for none. Nothing is measured while there is one only.
    pub(super) fn work_for(&mut self, client: Option<PeerId>) {
        let client = client.filter(|_| self.is_contended());
        let received_since = self.received_since.take();
        if self.measured.map(|(measured, _)| measured) == client {
            return;
        }
        let now = Instant::now();
        if let Some((measured, since)) = self.measured.take() {
            let mut took = now.saturating_duration_since(since);
            if took > OWES_LITTLE / 2 {
                // The thread may not have run.
                took = took.min(cpu_time().saturating_sub(self.cpu_time));
            }
            self.charge(now, measured, took);
        }
        self.measured = client.map(|client| (client, received_since.unwrap_or(now)));
    }

    /// So long was worked for a client, until now.
    pub(super) fn charge(&mut self, now: Instant, client: PeerId, took: Duration) {
        let expected = self.expected(now).map(|(expected, _)| expected);
        let owes = match expected {
            None => took * CLIENT_PART,
            Some(expected) if expected == client => took * EXPECTED_PART / (EXPECTED_PART - 1),
            Some(_) => took * EXPECTED_PART,
        };
        let Some(state) = self.clients.get_mut(&client) else { return };
        let began = now.checked_sub(took).unwrap_or(now);
        let from = state.paid_at.map_or(began, |paid| paid.max(began));
        state.paid_at = Some((from + owes).min(now + OWES_MOST));
        if expected == Some(client) {
            self.answered_until = None;
        }
    }
}

#[cfg(test)]
mod tests {
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
        (0..clients).for_each(|n| turns.enter(client(n)));
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
        turns.enter(client(1));
        turns.enter(client(2));
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
        for (n, took) in [(0, OWES_MOST / 4), (1, OWES_MOST * 100)] {
            turns.charge(now, client(n), took);
            turns.push(client(n), datagram(1));
        }
        // What was done long ago is forgotten.
        assert_eq!(turns.paid_at(Some(client(1))), Some(now + OWES_MOST));
        for n in [0, 1] {
            assert_eq!((turns.next(now), turns.due()), (Some(client(n)), Some(now)));
            assert!(turns.take(client(n)).is_some());
        }
    }

    #[test]
    fn one_that_takes_all_gets_a_third_beside_one_that_asks_again_at_once() {
        for (pause, least) in [(6, 0.5), (45, 0.11)] {
            let shares = shares(10 * US, 1, &[pause]);
            assert!((0.30..0.38).contains(&shares[0]) && shares[1] > least, "{shares:?}");
        }
        // And what is left by one that asks later than it is expected.
        let shares = shares(10 * US, 1, &[60]);
        assert!(shares[0] > 0.8, "{shares:?}");
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
        // Another that owes more does not take its place, and one that owes as little does.
        turns.charge(now, client(1), OWES_LITTLE / 4);
        turns.expect(now, client(1));
        assert_eq!(expected(&turns), Some(client(0)));
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
        let now = Instant::now();
        let mut turns = contended(now, 2);
        turns.work_for(Some(client(1)));
        // What is looked at is a thread that does not run, if only for a short time.
        std::thread::sleep(OWES_MUCH);
        turns.work_for(None);
        let gone = now.elapsed();
        let paid_at = turns.paid_at(Some(client(1))).expect("it owes something");
        assert!(paid_at < now + gone + OWES_LITTLE, "{:?}", paid_at - now);
    }

    #[test]
    fn what_takes_long_to_receive_is_owed_by_who_has_sent_it() {
        let mut turns = contended(Instant::now(), 2);
        turns.work_for(Some(client(0)));
        turns.work_for_sender();
        let now = Instant::now();
        while now.elapsed() < OWES_MUCH {}
        turns.work_for(Some(client(1)));
        turns.work_for(None);
        let owed = |n| turns.paid_at(Some(client(n))).expect("it owes something") - now;
        assert!(
            owed(0) < OWES_MUCH && owed(1) >= OWES_MUCH * CLIENT_PART,
            "{:?}",
            [0, 1].map(owed)
        );
        // And what is nobody's by nobody.
        turns.work_for_sender();
        turns.work_for(None);
        assert!(turns.measured.is_none() && turns.received_since.is_none());
    }

    #[test]
    fn who_keeps_a_link_is_not_active() {
        let now = Instant::now();
        let mut turns = Turns::default();
        (0..2).for_each(|n| turns.enter(client(n)));
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
        turns.leave(client(0));
        assert_eq!((turns.weight, turns.take(client(0)).is_some()), (100_000, false));
        turns.push(client(0), datagram(9));
        assert_eq!(turns.weight, 100_000);
    }
}
