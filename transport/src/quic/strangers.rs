//! What comes from who has no link. A stranger's datagram can cost a key exchange, a hundred times what one of a link does, and anybody can send it; so
//! those wait here, in a lane for each source, and are handled one at a time in a part of the time, while there are links.

use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use bytes::BytesMut;

use super::admission::Source;
use super::limits::{STRANGER_LEAST, STRANGERS_AHEAD, STRANGERS_MAX, STRANGERS_PART};

/// As it was received.
#[derive(Debug)]
pub(super) struct Datagram {
    pub from: SocketAddr,
    /// Our address that it was sent to.
    pub to: Option<IpAddr>,
    pub bytes: BytesMut,
}

impl Datagram {
    fn source(&self) -> Source {
        Source::of(self.from.ip())
    }

    /// What it counts for: a buffer of its own costs something too.
    fn weight(&self) -> usize {
        self.bytes.len().max(STRANGER_LEAST)
    }
}

/// Datagrams that wait, and what has been done for their senders.
#[derive(Debug, Default)]
pub(super) struct Strangers {
    lanes: HashMap<Source, VecDeque<Datagram>>,
    /// The sources that have a lane, in the order in which it is their turn.
    turns: VecDeque<Source>,
    /// Of all that waits.
    weight: usize,
    /// When what has been done will have been a part of the time.
    paid_at: Option<Instant>,
    random: u64,
}

impl Strangers {
    /// Has a datagram wait. If there is no room, one is lost: perhaps this one.
    pub(super) fn push(&mut self, datagram: Datagram) {
        let source = datagram.source();
        self.weight += datagram.weight();
        match self.lanes.entry(source) {
            Entry::Occupied(mut lane) => lane.get_mut().push_back(datagram),
            Entry::Vacant(lane) => {
                lane.insert(VecDeque::from([datagram]));
                self.turns.push_back(source);
            }
        }
        while self.weight > STRANGERS_MAX {
            self.lose_one();
        }
    }

    /// One of the longer lane of two that are drawn by lot, so that who sends from many addresses gains little (Mitzenmacher, 2001): of those drawn there,
    /// one of a port of which another was drawn.
    fn lose_one(&mut self) {
        let (lanes, first) = (self.turns.len(), self.draw(self.turns.len()));
        let drawn = [first, (first + 1 + self.draw(lanes - 1)) % lanes];
        let length = |&turn: &usize| self.lanes[&self.turns[turn]].len();
        let turn = drawn.into_iter().max_by_key(length).unwrap_or_default();
        let source = self.turns[turn];
        let lots = [(); 4].map(|()| self.draw(self.lanes[&source].len()));
        let port = |at: usize| self.lanes[&source][at].from.port();
        let again = |&n: &usize| lots[..n].iter().any(|&other| port(other) == port(lots[n]));
        let at = (1..lots.len()).find(again).unwrap_or_default();
        self.take(turn, source, lots[at]);
    }

    /// The datagram `at` in the lane of `source`, whose turn is at `turn`: it keeps that if it has another.
    fn take(&mut self, turn: usize, source: Source, at: usize) -> Option<Datagram> {
        let lane = self.lanes.get_mut(&source)?;
        let datagram = lane.remove(at)?;
        self.weight -= datagram.weight();
        if lane.is_empty() {
            self.lanes.remove(&source);
            self.turns.remove(turn);
        }
        Some(datagram)
    }

    fn draw(&mut self, below: usize) -> usize {
        // Marsaglia's xorshift64; what it loses is no secret.
        let mut x = if self.random == 0 { 0x9E37_79B9_7F4A_7C15 } else { self.random };
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.random = x;
        (x >> 32) as usize % below.max(1)
    }

    /// The next one to be handled, each source in its turn. `beside`: others have links, so that what was done must be paid for.
    pub(super) fn next(&mut self, now: Instant, beside: bool) -> Option<Datagram> {
        if beside && self.due().is_some_and(|due| now < due) {
            return None;
        }
        let source = self.turns.pop_front()?;
        self.turns.push_back(source);
        self.take(self.turns.len() - 1, source, 0)
    }

    /// So long was worked for one, from `now` on.
    pub(super) fn charge(&mut self, now: Instant, took: Duration) {
        let from = self.paid_at.map_or(now, |paid| paid.max(now));
        self.paid_at = Some(from + took * STRANGERS_PART);
    }

    /// Nothing has been done for them.
    #[cfg(test)]
    pub(super) fn forgive(&mut self) {
        self.paid_at = None;
    }

    /// When the next one may be handled, if any waits and there are links; perhaps long ago.
    pub(super) fn due(&self) -> Option<Instant> {
        let paid = self.paid_at.filter(|_| !self.turns.is_empty())?;
        Some(paid.checked_sub(STRANGERS_AHEAD * STRANGERS_PART).unwrap_or(paid))
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn datagram(source: u8, length: usize) -> Datagram {
        let from = SocketAddr::new(Ipv4Addr::new(10, 0, 0, source).into(), 7);
        Datagram { from, to: None, bytes: BytesMut::zeroed(length) }
    }

    #[test]
    fn of_a_source_the_port_that_sends_most_loses_most() {
        let mut strangers = Strangers::default();
        let of_port = |port| {
            let mut datagram = datagram(1, 1200);
            datagram.from.set_port(port);
            datagram
        };
        for n in 0..5_000 {
            strangers.push(of_port(7));
            if n % 500 == 0 {
                strangers.push(of_port(8));
            }
        }
        let kept = strangers.lanes.values().flatten().filter(|one| one.from.port() == 8).count();
        // By lot alone it would be one of 218 at most.
        assert!(kept >= 5, "{kept} of 10");
    }

    fn sender(datagram: &Datagram) -> u8 {
        match datagram.from.ip() {
            IpAddr::V4(ip) => ip.octets()[3],
            IpAddr::V6(_) => unreachable!("none is made here"),
        }
    }

    #[test]
    fn each_source_has_its_turn() {
        let (mut strangers, now) = (Strangers::default(), Instant::now());
        [1, 1, 1, 1, 2, 2, 3].into_iter().for_each(|source| strangers.push(datagram(source, 100)));
        let order: Vec<u8> =
            std::iter::from_fn(|| strangers.next(now, true)).map(|next| sender(&next)).collect();
        assert_eq!(order, [1, 2, 3, 1, 2, 1, 1]);
        assert_eq!((strangers.weight, strangers.lanes.len()), (0, 0));
    }

    #[test]
    fn who_sends_most_loses_most_and_what_waits_is_bounded() {
        let mut strangers = Strangers::default();
        for n in 0..50_000 {
            strangers.push(datagram(1, 1200 - n % 1200));
            if n % 1000 == 0 {
                strangers.push(datagram(2, 1200));
            }
            assert!(strangers.weight <= STRANGERS_MAX);
        }
        let weights = strangers.lanes.values().flatten().map(Datagram::weight);
        assert_eq!(weights.sum::<usize>(), strangers.weight);
        assert_eq!(strangers.lanes[&datagram(2, 1).source()].len(), 50);
    }

    #[test]
    fn what_is_done_for_strangers_is_a_part_of_the_time_while_there_are_links() {
        let (mut strangers, start) = (Strangers::default(), Instant::now());
        let (took, mut now, mut spent) = (Duration::from_millis(1), start, Duration::ZERO);
        let end = start + Duration::from_secs(80);
        while now < end {
            strangers.push(datagram(1, 1200));
            match strangers.next(now, true) {
                Some(_) => {
                    strangers.charge(now, took);
                    (now, spent) = (now + took, spent + took);
                }
                None => {
                    let due = strangers.due().expect("it waits");
                    assert!(due > now);
                    now = due;
                }
            }
        }
        let most = Duration::from_secs(80) / STRANGERS_PART + STRANGERS_AHEAD + took;
        assert!(spent <= most && spent > most - 3 * took, "{spent:?}, {most:?}");
        strangers.charge(now, Duration::from_secs(1));
        assert!(strangers.next(now, true).is_none());
        assert!(strangers.next(now, false).is_some(), "alone they have it all");
    }
}
