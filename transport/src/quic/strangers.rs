//! What comes from who has no link. A stranger's datagram can cost a key exchange, a hundred times what one of a link does, and anybody can send it; so
//! those wait here, in a lane for each source, and are handled in a part of the time while there are links.

use std::collections::VecDeque;
use std::collections::hash_map::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use bytes::BytesMut;

use super::admission::Source;
use super::limits::{
    MTU_MIN, STRANGER_LEAST, STRANGERS_AHEAD, STRANGERS_BEHIND, STRANGERS_MAX, STRANGERS_PART,
};

/// As it was received.
#[derive(Debug)]
pub(super) struct Datagram {
    pub from: SocketAddr,
    /// Our address that it was sent to.
    pub to: Option<IpAddr>,
    pub bytes: BytesMut,
}

/// How far the sender of a datagram has come. Each standing has an equal part of the room and of the turns: who is nearly let in does not wait for all who
/// have sent nothing but one packet, whose source may be false.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Its handshake has begun.
    Begun,
    /// It shows a token, which may be a good one.
    Token,
    /// Neither.
    None,
}

const STANDINGS: usize = 3;

impl Datagram {
    fn source(&self) -> Source {
        Source::of(self.from.ip())
    }

    /// What it counts for: a buffer of its own costs something too.
    fn weight(&self) -> usize {
        self.bytes.len().max(STRANGER_LEAST)
    }

    /// Of who has not begun a handshake; `None` of an Initial that is too short to begin one (RFC 9000, section 14.1).
    fn standing(&self) -> Option<Standing> {
        match token_length(&self.bytes) {
            Some(_) if self.bytes.len() < MTU_MIN.into() => None,
            None | Some(0) => Some(Standing::None),
            Some(_) => Some(Standing::Token),
        }
    }
}

/// The first byte of the length of an Initial's token (RFC 9000, section 17.2.2); `None` of other packets.
pub(super) fn token_length(packet: &[u8]) -> Option<u8> {
    // Long header, fixed bit, type 0; a version.
    let (first, rest) = packet.split_first()?;
    let (version, mut rest) = rest.split_at_checked(4)?;
    if first & 0xf0 != 0xc0 || version == [0; 4] {
        return None;
    }
    for _ in 0..2 {
        let (length, id) = rest.split_first()?;
        rest = id.get(usize::from(*length)..)?;
    }
    rest.first().copied()
}

/// Datagrams that wait, and what has been done for their senders.
#[derive(Debug, Default)]
pub(super) struct Strangers {
    /// By [`Standing`].
    lanes: [Lanes; STANDINGS],
    /// Whose turn it is, if it has any.
    turn: usize,
    /// When what has been done will have been a part of the time.
    paid_at: Option<Instant>,
    random: Random,
}

/// Those of one standing.
#[derive(Debug, Default)]
struct Lanes {
    by_source: HashMap<Source, Lane>,
    /// The sources that have a lane, in the order in which it is their turn.
    turns: VecDeque<Source>,
    weight: usize,
}

#[derive(Debug, Default)]
struct Lane {
    waiting: VecDeque<Datagram>,
    weight: usize,
}

/// Marsaglia's xorshift64: what is lost is no secret.
#[derive(Debug)]
struct Random(u64);

impl Default for Random {
    fn default() -> Self {
        Self(0x9E37_79B9_7F4A_7C15)
    }
}

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as usize % bound.max(1)
    }
}

impl Lanes {
    fn push(&mut self, datagram: Datagram, random: &mut Random) {
        let (source, weight) = (datagram.source(), datagram.weight());
        let lane = self.by_source.entry(source).or_default();
        if lane.waiting.is_empty() {
            self.turns.push_back(source);
        }
        lane.weight += weight;
        lane.waiting.push_back(datagram);
        self.weight += weight;
        while self.weight > STRANGERS_MAX / STANDINGS {
            self.lose_one(random);
        }
    }

    /// One of the heavier lane of two that are drawn by lot, so that who sends from many addresses gains little (Mitzenmacher, 2001): of those drawn there,
    /// one of a port of which another was drawn.
    fn lose_one(&mut self, random: &mut Random) {
        let (lanes, first) = (self.turns.len(), random.below(self.turns.len()));
        let drawn = [first, (first + 1 + random.below(lanes - 1)) % lanes];
        let weight = |&turn: &usize| self.by_source[&self.turns[turn]].weight;
        let turn = drawn.into_iter().max_by_key(weight).unwrap_or_default();
        let waiting = &self.by_source[&self.turns[turn]].waiting;
        let lots = [(); 4].map(|()| random.below(waiting.len()));
        let port = |at: usize| waiting[at].from.port();
        let alike = |one: usize, other: usize| one != other && port(one) == port(other);
        let again = |&n: &usize| lots[..n].iter().any(|&other| alike(other, lots[n]));
        let at = (1..lots.len()).find(again).unwrap_or_default();
        self.take(turn, lots[at]);
    }

    /// The datagram `at` in the lane whose turn is at `turn`: it keeps that if it has another.
    fn take(&mut self, turn: usize, at: usize) -> Option<Datagram> {
        let source = *self.turns.get(turn)?;
        let lane = self.by_source.get_mut(&source)?;
        let datagram = lane.waiting.remove(at)?;
        lane.weight -= datagram.weight();
        self.weight -= datagram.weight();
        if lane.waiting.is_empty() {
            self.by_source.remove(&source);
            self.turns.remove(turn);
        }
        Some(datagram)
    }

    /// The next one, each source in its turn.
    fn next(&mut self) -> Option<Datagram> {
        let source = self.turns.pop_front()?;
        self.turns.push_back(source);
        self.take(self.turns.len() - 1, 0)
    }
}

impl Strangers {
    /// Has a datagram wait; `has_begun`: who sends it has begun a handshake. If there is no room, one is lost: perhaps this one.
    pub(super) fn push(&mut self, datagram: Datagram, has_begun: bool) {
        let standing = if has_begun { Some(Standing::Begun) } else { datagram.standing() };
        if let Some(standing) = standing {
            self.lanes[standing as usize].push(datagram, &mut self.random);
        }
    }

    fn are_waiting(&self) -> bool {
        self.lanes.iter().any(|lanes| lanes.weight > 0)
    }

    /// The next one to be handled. `beside`: others have links, so that what was done must be paid for.
    pub(super) fn next(&mut self, now: Instant, beside: bool) -> Option<Datagram> {
        if beside && self.due().is_some_and(|due| now < due) {
            return None;
        }
        let turn = (1..=STANDINGS).map(|n| (self.turn + n) % STANDINGS);
        self.turn = turn.into_iter().find(|&turn| self.lanes[turn].weight > 0)?;
        self.lanes[self.turn].next()
    }

    /// So long was worked for one, from `now` on. They owe no more than they soon pay: also what was done while nobody else was there counts, and a clock
    /// that went on while this thread did not.
    pub(super) fn charge(&mut self, now: Instant, took: Duration) {
        let from = self.paid_at.map_or(now, |paid| paid.max(now));
        let most = now + took + STRANGERS_AHEAD * STRANGERS_PART + STRANGERS_BEHIND;
        self.paid_at = Some((from + took * STRANGERS_PART).min(most));
    }

    /// Nothing has been done for them.
    #[cfg(test)]
    pub(super) fn forgive(&mut self) {
        self.paid_at = None;
    }

    /// When the next one may be handled, if any waits and there are links; perhaps long ago.
    pub(super) fn due(&self) -> Option<Instant> {
        let paid = self.paid_at.filter(|_| self.are_waiting())?;
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

    fn sender(datagram: &Datagram) -> u8 {
        match datagram.from.ip() {
            IpAddr::V4(ip) => ip.octets()[3],
            IpAddr::V6(_) => unreachable!("none is made here"),
        }
    }

    fn waiting(strangers: &Strangers, of: impl Fn(&Datagram) -> bool) -> usize {
        let lanes = strangers.lanes.iter().flat_map(|lanes| lanes.by_source.values());
        lanes.flat_map(|lane| &lane.waiting).filter(|one| of(one)).count()
    }

    /// An Initial with a token of so many bytes.
    fn initial(source: u8, token: u8) -> Datagram {
        let mut datagram = datagram(source, 1200);
        datagram.bytes[..15].copy_from_slice(&[0xc3, 0, 0, 0, 1, 4, 9, 9, 9, 9, 3, 8, 8, 8, token]);
        datagram
    }

    #[test]
    fn each_source_has_its_turn() {
        let (mut strangers, now) = (Strangers::default(), Instant::now());
        for source in [1, 1, 1, 1, 2, 2, 3] {
            strangers.push(datagram(source, 100), false);
        }
        let order: Vec<u8> =
            std::iter::from_fn(|| strangers.next(now, true)).map(|next| sender(&next)).collect();
        assert_eq!(order, [1, 2, 3, 1, 2, 1, 1]);
        assert!(!strangers.are_waiting() && strangers.lanes[2].by_source.is_empty());
    }

    #[test]
    fn who_has_come_further_does_not_wait_for_all_others() {
        let (mut strangers, now) = (Strangers::default(), Instant::now());
        for source in 0..50 {
            strangers.push(initial(source, 0), false);
            strangers.push(initial(source, 9), false);
        }
        strangers.push(datagram(200, 1200), true);
        let mut standings = Vec::new();
        while strangers.are_waiting() && standings.len() < 6 {
            let next = strangers.next(now, true).expect("one waits");
            standings.push((sender(&next), next.standing()));
        }
        let (none, token) = (Some(Standing::None), Some(Standing::Token));
        let order = [(0, token), (0, none), (200, none), (1, token), (1, none), (2, token)];
        assert_eq!(standings, order);
    }

    #[test]
    fn tokens_are_found_and_what_begins_nothing_is_dropped() {
        assert_eq!(initial(1, 0).standing(), Some(Standing::None));
        assert_eq!(initial(1, 1).standing(), Some(Standing::Token));
        let mut short = initial(1, 1);
        for length in (0..1200).rev() {
            short.bytes.truncate(length);
            let is_initial = length >= 15;
            assert_eq!(short.standing(), (!is_initial).then_some(Standing::None), "{length}");
        }
        let mut other = initial(1, 1);
        other.bytes[0] = 0xe3;
        assert_eq!(other.standing(), Some(Standing::None), "a handshake packet");
    }

    #[test]
    fn who_sends_most_loses_most_and_what_waits_is_bounded() {
        let mut strangers = Strangers::default();
        for n in 0..50_000 {
            strangers.push(datagram(1, 1200 - n % 1200), false);
            if n % 2000 == 0 {
                strangers.push(datagram(2, 1200), false);
            }
            assert!(strangers.lanes[2].weight <= STRANGERS_MAX / STANDINGS);
        }
        let lanes = &strangers.lanes[2];
        let weights = lanes.by_source.values().map(|lane| lane.weight);
        assert_eq!(weights.sum::<usize>(), lanes.weight);
        assert_eq!(waiting(&strangers, |one| sender(one) == 2), 25);
        // Few, but large.
        let mut strangers = Strangers::default();
        (0..9).for_each(|_| strangers.push(datagram(2, 1200), false));
        (0..1000).for_each(|_| strangers.push(datagram(1, 65_000), false));
        assert_eq!(waiting(&strangers, |one| sender(one) == 2), 9);
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
            strangers.push(of_port(7), false);
            if n % 500 == 0 {
                strangers.push(of_port(8), false);
            }
            // By lot alone it would be gone after some 72.
            let kept = waiting(&strangers, |one| one.from.port() == 8);
            assert!(kept >= 1, "none after {n}");
        }
    }

    #[test]
    fn what_is_done_for_strangers_is_a_part_of_the_time_while_there_are_links() {
        let (mut strangers, start) = (Strangers::default(), Instant::now());
        let (took, mut now, mut spent) = (Duration::from_millis(1), start, Duration::ZERO);
        let end = start + Duration::from_secs(80);
        while now < end {
            strangers.push(datagram(1, 1200), false);
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
    }

    #[test]
    fn strangers_owe_no_more_than_they_soon_pay() {
        let (mut strangers, now) = (Strangers::default(), Instant::now());
        for _ in 0..60 {
            strangers.push(datagram(1, 1200), false);
            assert!(strangers.next(now, false).is_some(), "alone they have it all");
            strangers.charge(now, Duration::from_secs(1));
        }
        strangers.push(datagram(1, 1200), false);
        let end = now + Duration::from_secs(1);
        assert!(strangers.next(end, true).is_none());
        assert!(strangers.next(end + STRANGERS_BEHIND, true).is_some());
    }
}
