//! Who may begin a handshake: links that are not established are counted apart from those that are.
//!
//! A QUIC Initial costs its sender one datagram, whose source may be false. So below a mark of handshakes any
//! Initial begins one; above it only those whose sender has shown by a Retry token (RFC 9000, section 8.1.2) that it
//! receives at its address. One whose first packet already fails, or which its sender ends by its second, has cost a
//! key exchange, and counts for [`HANDSHAKE`] like one that is never finished.
//!
//! A site whose address was proved may hold as many handshakes as are still free, so that one alone gets half (dynamic
//! thresholds, Choudhury and Hahne, 1998). Several together fill them all, and who has addresses enough is several
//! sites: one that finds no room, and holds less than another by two or holds none, takes the place of the other's
//! oldest. So all of them come to equal shares, and an honest handshake, which takes two round trips, is over long
//! before it is the oldest. Each such step makes the shares more equal, so their number is bounded, except by more
//! sites than there are places: by the first of the two conditions alone none of those would get in. Within a site the
//! sources come to equal shares likewise. Who holds most may itself be a client with a stranger at its address: it
//! takes the place of one of its own site's that [`is_slow`].

use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::time::Instant;

use super::limits::{HANDSHAKE, HANDSHAKE_SLOW};

/// What to do about an Initial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// Begin the handshake.
    Accept,
    /// Have the sender prove its address first. Keeps no state.
    Retry,
    /// Begin the handshake in the place of the oldest of the source with the greatest [`Admission::share`].
    Replace,
    /// The same of its own site's sources.
    ReplaceNeighbour,
    /// Begin the handshake in the place of one of its own site's that [`is_slow`]; refuse it if there is none.
    ReplaceOwn,
    /// Tell the sender that there is no room for it.
    Refuse,
}

/// Where an Initial comes from: an IPv4 address, or the /64 of an IPv6 address, which one host can have whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Source(IpAddr);

impl Source {
    /// The source of datagrams from `addr`.
    pub(super) fn of(addr: IpAddr) -> Self {
        match addr.to_canonical() {
            IpAddr::V6(ip) => {
                Self(Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX)).into())
            }
            v4 => Self(v4),
        }
    }

    /// The /48 of an IPv6 source: one site, and often one host, can have so much.
    pub(super) fn site(self) -> Self {
        match self.0 {
            IpAddr::V6(ip) => Self(Ipv6Addr::from_bits(ip.to_bits() >> 80 << 80).into()),
            v4 => Self(v4),
        }
    }
}

/// Whether a handshake that counts until `until` is older than honest ones are when they are over.
pub(super) fn is_slow(now: Instant, until: Instant) -> bool {
    until + HANDSHAKE_SLOW <= now + HANDSHAKE
}

/// Counts of links that are in their handshake, or were never more, or are being closed.
#[derive(Debug)]
pub(super) struct Admission {
    /// Most of them.
    most: usize,
    /// With so many, addresses are proved before another begins.
    retry_mark: usize,
    total: usize,
    sources: HashMap<Source, usize>,
    sites: HashMap<Source, usize>,
    /// Handshakes that failed and are gone, and until when they count: the next to be forgotten first.
    failed: VecDeque<(Instant, Source)>,
}

impl Admission {
    /// None yet; see [`HANDSHAKES_MAX`](super::limits::HANDSHAKES_MAX) and [`RETRY_MARK`](super::limits::RETRY_MARK).
    pub(super) fn new(most: usize, retry_mark: usize) -> Self {
        Self {
            most,
            retry_mark,
            total: 0,
            sources: HashMap::new(),
            sites: HashMap::new(),
            failed: VecDeque::new(),
        }
    }

    /// Decides about an Initial of `source`; `proved`: its address is the sender's.
    pub(super) fn decide(&self, source: Source, proved: bool) -> Decision {
        if !proved {
            return if self.total < self.retry_mark { Decision::Accept } else { Decision::Retry };
        }
        let (of_site, own) = self.share(source);
        if of_site < self.most.saturating_sub(self.total) {
            return Decision::Accept;
        }
        let (most_of_site, _) = self.greatest(|_| true);
        let (_, most) = self.greatest(|other| other.site() == source.site());
        // Shares that only change places would do so for ever.
        match () {
            () if of_site == 0 || of_site + 1 < most_of_site => Decision::Replace,
            () if own + 1 < most => Decision::ReplaceNeighbour,
            () => Decision::ReplaceOwn,
        }
    }

    /// The greatest share of those sources.
    fn greatest(&self, those: impl Fn(Source) -> bool) -> (usize, usize) {
        let shares = self.sources.keys().filter(|of| those(**of)).map(|of| self.share(*of));
        shares.max().unwrap_or_default()
    }

    /// How many there are.
    pub(super) fn total(&self) -> usize {
        self.total
    }

    /// How many the site of `source` holds, and how many of those are its own.
    pub(super) fn share(&self, source: Source) -> (usize, usize) {
        let held = |counts: &HashMap<Source, usize>, of| counts.get(&of).copied().unwrap_or(0);
        (held(&self.sites, source.site()), held(&self.sources, source))
    }

    /// A link of `source` begins its handshake, or its end.
    pub(super) fn enter(&mut self, source: Source) {
        self.total += 1;
        *self.sources.entry(source).or_default() += 1;
        *self.sites.entry(source.site()).or_default() += 1;
    }

    /// The first packet of a handshake of `source` failed: there is no link, and there was work.
    pub(super) fn fail(&mut self, now: Instant, source: Source) {
        self.enter(source);
        self.linger(now + HANDSHAKE, source);
    }

    /// A link of `source` is gone that was never established: it counts until `until`.
    pub(super) fn linger(&mut self, until: Instant, source: Source) {
        let at = self.failed.partition_point(|(other, _)| *other <= until);
        self.failed.insert(at, (until, source));
    }

    /// Forgets the oldest failure of a source with the greatest share among those. False if they have none: the link of
    /// such a source is to make room.
    pub(super) fn forget_failure(&mut self, those: impl Fn(Source) -> bool) -> bool {
        let greatest = self.greatest(&those);
        let at = self.failed.iter().position(|(_, of)| those(*of) && self.share(*of) == greatest);
        self.forget(at)
    }

    /// Forgets the oldest failure of the site of `source`, if it [`is_slow`]; false if not.
    pub(super) fn forget_own(&mut self, now: Instant, source: Source) -> bool {
        let own =
            |(until, of): &(Instant, Source)| of.site() == source.site() && is_slow(now, *until);
        self.forget(self.failed.iter().position(own))
    }

    /// Forgets a failure, of which nothing is left but its count; false if there is none.
    fn forget(&mut self, at: Option<usize>) -> bool {
        let failure = at.and_then(|at| self.failed.remove(at));
        failure.inspect(|(_, source)| self.leave(*source)).is_some()
    }

    /// Forgets the failures that are over. To be called before [`Admission::decide`].
    pub(super) fn expire(&mut self, now: Instant) {
        while self.failed.front().is_some_and(|(until, _)| *until <= now) {
            self.forget(Some(0));
        }
    }

    /// A link of `source` is established, or gone after it was.
    pub(super) fn leave(&mut self, source: Source) {
        if self.share(source).1 == 0 {
            return;
        }
        self.total -= 1;
        for (counts, of) in [(&mut self.sources, source), (&mut self.sites, source.site())] {
            if let Entry::Occupied(mut held) = counts.entry(of) {
                *held.get_mut() -= 1;
                if *held.get() == 0 {
                    held.remove();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::limits::{HANDSHAKES_MAX, RETRY_MARK};
    use super::*;

    fn admission() -> Admission {
        Admission::new(HANDSHAKES_MAX, RETRY_MARK)
    }

    fn source(n: u8) -> Source {
        Source::of([10, 0, 0, n].into())
    }

    #[test]
    fn false_sources_fill_only_the_part_below_the_mark() {
        let mut admission = admission();
        for n in 0..RETRY_MARK {
            assert_eq!(admission.decide(source(n as u8), false), Decision::Accept);
            admission.enter(source(n as u8));
        }
        assert_eq!(admission.decide(source(99), false), Decision::Retry);
        assert_eq!(admission.decide(source(99), true), Decision::Accept);
        admission.leave(source(0));
        assert_eq!(admission.decide(source(99), false), Decision::Accept);
    }

    #[test]
    fn a_source_leaves_room_for_others() {
        let mut admission = admission();
        for n in 0..HANDSHAKES_MAX {
            let mut taken = 0;
            while admission.decide(source(n as u8), true) == Decision::Accept {
                admission.enter(source(n as u8));
                taken += 1;
            }
            let free = HANDSHAKES_MAX - admission.total;
            assert!(taken <= free + 1, "{taken} of {free}");
            if free <= 1 {
                return;
            }
            assert!(taken > 0);
        }
        panic!("room without end");
    }

    #[test]
    fn a_host_has_one_source_however_many_addresses() {
        let of = |text: &str| Source::of(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
    }

    #[test]
    fn nobody_is_locked_out_by_who_holds_more() {
        let mut admission = admission();
        let of = |text: &str| Source::of(text.parse().unwrap());
        // All /64s of one /48.
        for n in 0.. {
            let source = of(&format!("2001:db8:7:{n:x}::1"));
            if admission.decide(source, true) != Decision::Accept {
                break;
            }
            admission.enter(source);
        }
        assert_eq!(admission.total, HANDSHAKES_MAX / 2);
        let hog = of("2001:db8:7:0::1");
        assert_eq!(admission.decide(of("2001:db8:7:ffff::1"), true), Decision::ReplaceOwn);
        admission.enter(hog);
        assert_eq!(admission.share(hog), (HANDSHAKES_MAX / 2 + 1, 2));
        assert_eq!(admission.decide(of("2001:db8:7:ffff::1"), true), Decision::ReplaceNeighbour);
        assert_eq!(admission.decide(hog, true), Decision::ReplaceOwn);
        (admission.total..HANDSHAKES_MAX).for_each(|n| admission.enter(source(n as u8)));
        assert_eq!(admission.decide(source(255), true), Decision::Replace);
    }

    /// Offers an Initial as the endpoint does, of a handshake that fails at once. Returns whether it began.
    fn offer(admission: &mut Admission, now: Instant, source: Source) -> bool {
        let begins = match admission.decide(source, true) {
            Decision::Accept => true,
            Decision::Replace => admission.forget_failure(|_| true),
            Decision::ReplaceNeighbour => {
                admission.forget_failure(|other| other.site() == source.site())
            }
            Decision::ReplaceOwn => admission.forget_own(now, source),
            Decision::Retry | Decision::Refuse => false,
        };
        if begins {
            admission.fail(now, source);
        }
        begins
    }

    /// `n`th /64 of a /48.
    fn part(site: u16, n: u16) -> Source {
        Source::of(Ipv6Addr::new(0x2001, 0xdb8, site, n, 0, 0, 0, 1).into())
    }

    #[test]
    fn who_takes_turns_begins_no_more_handshakes_than_there_are_places() {
        let now = Instant::now();
        // By the number of the offer: two addresses, one and an IPv6 /48, two /48, and all of these.
        let turns: [fn(u16) -> Source; 5] = [
            |n| source(n as u8 % 2),
            |n| if n % 2 == 0 { source(0) } else { part(1, n) },
            |n| part(n % 2, n),
            |n| if n % 3 == 0 { part(1, 0) } else { part(n % 3, n) },
            |n| if n % 5 < 3 { source(n as u8 % 5) } else { part(n % 5, n % 64) },
        ];
        for most in [8, 16, 32, 64, 128] {
            for (turn, of) in turns.iter().enumerate() {
                let mut admission = Admission::new(most, 0);
                let begun = (0..10_000).filter(|&n| offer(&mut admission, now, of(n))).count();
                assert!(begun <= 2 * most, "{begun} of {most} by turn {turn}");
            }
        }
    }

    #[test]
    fn a_failure_of_who_holds_most_makes_room() {
        let (mut admission, now) = (Admission::new(8, 0), Instant::now());
        [1, 2, 2, 3, 3, 3, 4].into_iter().for_each(|n| admission.fail(now, source(n)));
        admission.enter(source(4));
        assert!(offer(&mut admission, now, source(5)));
        let held = |n| admission.share(source(n)).1;
        assert_eq!([1, 2, 3, 4, 5].map(held), [1, 2, 2, 2, 1]);
    }

    #[test]
    fn who_holds_nothing_gets_in_however_many_hold_one_each() {
        let (mut admission, now) = (Admission::new(8, 0), Instant::now());
        assert!((0..8).all(|n| offer(&mut admission, now, source(n))));
        assert!(offer(&mut admission, now, source(8)));
        assert!(!offer(&mut admission, now, source(8)), "as many as any other");
    }

    #[test]
    fn counts_end_at_nothing() {
        let mut admission = admission();
        admission.enter(source(1));
        admission.enter(source(2));
        admission.enter(source(1));
        [1, 1, 2, 2].into_iter().for_each(|n| admission.leave(source(n)));
        assert_eq!((admission.total, admission.sources.len(), admission.sites.len()), (0, 0, 0));
    }

    #[test]
    fn only_slow_ones_of_ones_own_site_make_room() {
        let (mut admission, now) = (admission(), Instant::now());
        let of = |text: &str| Source::of(text.parse().unwrap());
        let (own, neighbour) = (of("2001:db8:7:1::1"), of("2001:db8:7:2::1"));
        admission.fail(now, of("2001:db8:8:1::1"));
        (0..2).for_each(|_| admission.fail(now, neighbour));
        let later = now + HANDSHAKE_SLOW;
        admission.fail(later, own);
        assert!(!admission.forget_own(later - Duration::from_nanos(1), own));
        assert!(admission.forget_own(later, own));
        assert_eq!((admission.share(own), admission.share(neighbour)), ((2, 1), (2, 1)));
        assert!(admission.forget_own(later, own));
        assert!(!admission.forget_own(later, own), "what has just begun stays");
        assert!(admission.forget_own(later + HANDSHAKE_SLOW, own));
        assert!(!admission.forget_own(later + HANDSHAKE_SLOW, own), "another site's");
        assert_eq!((admission.total, admission.failed.len()), (1, 1));
    }

    #[test]
    fn failures_count_for_a_while() {
        let (mut admission, now) = (admission(), Instant::now());
        (0..RETRY_MARK).for_each(|n| admission.fail(now, source(n as u8)));
        admission.expire(now);
        assert_eq!(admission.decide(source(99), false), Decision::Retry);
        admission.expire(now + HANDSHAKE);
        assert_eq!(admission.decide(source(99), false), Decision::Accept);
        assert_eq!((admission.total, admission.failed.len()), (0, 0));
    }
}
