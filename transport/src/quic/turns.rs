//! Whose turn it is among clients that have links. One that sends without end would have nearly all of a thread: its datagrams fill the socket, and what
//! each asks for may cost a hundred times what another's does. So while more than one client sends, what comes waits in a lane for each, and it is the
//! turn of the one for which least was done of late.
//!
//! What is done for a client is measured, and owed: it is paid by the time that passes, of which a part is everybody's. Who owes waits, even if nobody
//! else has anything just now: otherwise whoever comes next would wait for the end of what one had begun, always.

use std::collections::VecDeque;
use std::collections::hash_map::HashMap;
use std::time::{Duration, Instant};

use super::limits::{
    CLIENT_AHEAD, CLIENT_BEHIND, CLIENT_PART, CONTENDED, LANES_MAX, STRANGER_LEAST,
};
use super::strangers::Datagram;
use crate::PeerId;

/// Clients with links, what waits of each, and what was done for each.
#[derive(Debug, Default)]
pub(super) struct Turns {
    clients: HashMap<PeerId, Client>,
    /// Who has sent last.
    last: Option<PeerId>,
    /// Until when clients have their turns, if no two send any more.
    contended_until: Option<Instant>,
    /// For whom something is done, and since when.
    measured: Option<(PeerId, Instant)>,
    /// Of all lanes.
    weight: usize,
    /// When this turn of the loop began.
    now: Option<Instant>,
}

#[derive(Debug, Default)]
struct Client {
    links: usize,
    lane: VecDeque<Datagram>,
    weight: usize,
    /// When what was done for it is paid.
    paid_at: Option<Instant>,
    /// When it has sent something last.
    sent_at: Option<Instant>,
}

/// When who has paid by `paid_at` may have something done again.
fn due(paid_at: Option<Instant>) -> Option<Instant> {
    paid_at.map(|at| at.checked_sub(CLIENT_AHEAD * CLIENT_PART).unwrap_or(at))
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

    /// Whether more than one client sends.
    pub(super) fn is_contended(&self) -> bool {
        self.contended_until.is_some()
    }

    /// A turn begins: is one client left, it has the thread for itself.
    pub(super) fn begin(&mut self, now: Instant) {
        self.now = Some(now);
        if self.contended_until.is_some_and(|until| until <= now) && self.weight == 0 {
            self.contended_until = None;
        }
    }

    /// The client has sent something: whether it must wait for its turn.
    pub(super) fn must_wait(&mut self, now: Instant, client: PeerId) -> bool {
        if let Some(state) = self.clients.get_mut(&client) {
            state.sent_at = Some(now);
        }
        let last = self.last.replace(client);
        if last.is_some_and(|last| last != client && self.clients.contains_key(&last)) {
            self.contended_until = Some(now + CONTENDED);
        }
        self.is_contended()
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
        self.waits_until(now, *client).is_none().then_some(*client)
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
        waiting.map(|(client, _)| self.waits_until(now, *client).unwrap_or(now)).min()
    }

    /// When something may be done for a client, if that is not now: it owes, and less was done for another that sends.
    pub(super) fn waits_until(&self, now: Instant, client: PeerId) -> Option<Instant> {
        let state = self.clients.get(&client).filter(|_| self.is_contended())?;
        let due = due(state.paid_at).filter(|due| *due > now)?;
        let sends = |other: &&Client| other.sent_at.is_some_and(|at| now <= at + CONTENDED);
        let mut others = self.clients.values().filter(sends);
        others.any(|other| other.paid_at < state.paid_at).then_some(due)
    }

    /// Of two clients less was done of late for the one of which this is earlier.
    pub(super) fn paid_at(&self, client: Option<PeerId>) -> Option<Instant> {
        self.clients.get(&client?)?.paid_at
    }

    /// What is done from now on is done for this client, or for none. Nothing is measured while there is one only.
    pub(super) fn work_for(&mut self, client: Option<PeerId>) {
        let client = client.filter(|_| self.is_contended());
        if self.measured.map(|(measured, _)| measured) == client {
            return;
        }
        let now = Instant::now();
        if let Some((measured, since)) = self.measured.take() {
            self.charge(now, measured, now.saturating_duration_since(since));
        }
        self.measured = client.map(|client| (client, now));
    }

    /// So long was worked for a client, until now. It owes no more than it soon pays, whatever one datagram has cost.
    fn charge(&mut self, now: Instant, client: PeerId, took: Duration) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        let began = now.checked_sub(took).unwrap_or(now);
        let from = state.paid_at.map_or(began, |paid| paid.max(began));
        let most = now + CLIENT_AHEAD * CLIENT_PART + CLIENT_BEHIND;
        state.paid_at = Some((from + took * CLIENT_PART).min(most));
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

    /// Clients with a link each, of which two have just sent.
    fn contended(now: Instant, clients: u8) -> Turns {
        let mut turns = Turns::default();
        (0..clients).for_each(|n| turns.enter(client(n)));
        turns.begin(now);
        assert!(!turns.must_wait(now, client(0)));
        assert!(turns.must_wait(now, client(1)));
        turns
    }

    /// What each of the clients is given in a second, of which one has work of 100 us always, and others work of 10 us each so many us.
    fn shares(always: u8, now_and_then: &[u32]) -> Vec<f64> {
        let start = Instant::now();
        let count = always + now_and_then.len() as u8;
        let mut turns = contended(start, count.max(2));
        let (mut now, mut next) = (start, vec![start; now_and_then.len()]);
        let mut given = vec![Duration::ZERO; count.into()];
        while now < start + Duration::from_secs(1) {
            turns.begin(now);
            for n in 0..count {
                let due = n.checked_sub(always).map(|n| &mut next[usize::from(n)]);
                let has = !turns.clients[&client(n)].lane.is_empty();
                if due.as_ref().is_none_or(|due| **due <= now) && !has {
                    turns.must_wait(now, client(n));
                    turns.push(client(n), datagram(100));
                }
                // It asks again that long after it was answered.
                if let Some(due) = due.filter(|due| **due <= now) {
                    *due = now + US * now_and_then[usize::from(n - always)];
                }
            }
            let Some(one) = turns.next(now) else {
                now += US;
                continue;
            };
            turns.take(one).expect("it waits");
            let n = (0..count).find(|n| client(*n) == one).expect("one of them");
            let took = if n < always { 100 * US } else { 10 * US };
            now += took;
            given[usize::from(n)] += took;
            turns.charge(now, one, took);
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
            assert!(!turns.must_wait(now, client(1)));
            turns.work_for(Some(client(1)));
        }
        assert!(turns.measured.is_none() && turns.clients[&client(1)].paid_at.is_none());
        // The other sends once, and not again.
        let later = now + Duration::from_millis(100);
        turns.begin(later);
        assert!(turns.must_wait(later, client(2)) && turns.must_wait(later, client(1)));
        turns.begin(later + CONTENDED);
        assert!(!turns.must_wait(later + CONTENDED, client(1)));
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
    fn one_that_takes_all_gets_half_beside_one_that_needs_little() {
        let shares = shares(1, &[200]);
        assert!((0.45..0.52).contains(&shares[0]), "{shares:?}");
        // Of 200 us each time it is kept waiting for some of the 100.
        assert!(shares[1] > 0.035, "{shares:?}");
    }

    #[test]
    fn those_that_take_all_share_all_equally() {
        for count in [2, 3, 5] {
            let shares = shares(count, &[]);
            let fair = 1.0 / f64::from(count);
            assert!(shares.iter().all(|share| (share / fair - 1.0).abs() < 0.02), "{shares:?}");
        }
    }

    #[test]
    fn one_for_which_least_was_done_does_not_wait_for_what_it_owes() {
        let now = Instant::now();
        let mut turns = contended(now, 2);
        turns.charge(now, client(0), 10_000 * US);
        turns.charge(now, client(1), 20_000 * US);
        assert_eq!(turns.waits_until(now, client(0)), None);
        let waits = turns.waits_until(now, client(1)).expect("it owes more");
        assert_eq!(waits, now + 20_000 * US - CLIENT_AHEAD * CLIENT_PART);
        turns.push(client(1), datagram(1));
        assert_eq!((turns.next(now), turns.due()), (None, Some(waits)));
        // Nobody else sends any more.
        let later = now + CONTENDED + US;
        turns.must_wait(later, client(1));
        assert_eq!(turns.next(later), Some(client(1)));
    }

    #[test]
    fn what_is_owed_is_bounded() {
        let now = Instant::now();
        let mut turns = contended(now, 2);
        turns.charge(now, client(1), Duration::from_secs(3600));
        turns.charge(now, client(0), US);
        let waits = turns.waits_until(now, client(1)).expect("it owes");
        assert!(waits <= now + CLIENT_BEHIND, "{:?}", waits - now);
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
