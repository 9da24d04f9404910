//! Who may begin a handshake: links that are not established are counted apart from those that are.
//!
//! A QUIC Initial costs its sender one datagram, whose source may be false. So below [`RETRY_MARK`] handshakes any
//! Initial begins one; above it only those whose sender has shown by a Retry token (RFC 9000, section 8.1.2) that it
//! receives at its address. One whose first packet already fails has cost a key exchange, and counts for
//! [`HANDSHAKE`] like one that is never finished. A source that was proved may hold a share: as many handshakes as are still free, so that
//! each of n busy sources gets 1/(n+1) and another source always finds room (dynamic thresholds, Choudhury and
//! Hahne, 1998).

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};
use std::time::Instant;

use super::limits::{HANDSHAKE, HANDSHAKES_MAX, RETRY_MARK};

/// What to do about an Initial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Begin the handshake.
    Accept,
    /// Have the sender prove its address first. Keeps no state.
    Retry,
    /// Tell the sender that there is no room for it.
    Refuse,
}

/// Where an Initial comes from: an IPv4 address, or the /64 of an IPv6 address, which one host can have whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Source(IpAddr);

impl Source {
    /// The source of datagrams from `addr`.
    pub fn of(addr: IpAddr) -> Self {
        match addr.to_canonical() {
            IpAddr::V6(ip) => {
                Self(Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX)).into())
            }
            v4 => Self(v4),
        }
    }
}

/// Counts of links that are in their handshake, or were never more, or are being closed.
#[derive(Debug, Default)]
pub struct Admission {
    total: usize,
    sources: HashMap<Source, usize>,
    /// Handshakes that failed by their first packet, and until when they count.
    failed: VecDeque<(Instant, Source)>,
}

impl Admission {
    /// Decides about an Initial of `source`; `proved`: its address is the sender's.
    pub fn decide(&self, source: Source, proved: bool) -> Decision {
        let held = self.sources.get(&source).copied().unwrap_or(0);
        let free = HANDSHAKES_MAX.saturating_sub(self.total);
        match proved {
            false if self.total < RETRY_MARK => Decision::Accept,
            false => Decision::Retry,
            true if held < free => Decision::Accept,
            true => Decision::Refuse,
        }
    }

    /// A link of `source` begins its handshake, or its end.
    pub fn enter(&mut self, source: Source) {
        self.total += 1;
        *self.sources.entry(source).or_default() += 1;
    }

    /// The first packet of a handshake of `source` failed: there is no link, and there was work.
    pub fn fail(&mut self, now: Instant, source: Source) {
        self.enter(source);
        self.failed.push_back((now + HANDSHAKE, source));
    }

    /// Forgets the failures that are over. To be called before [`Admission::decide`].
    pub fn expire(&mut self, now: Instant) {
        while let Some(&(until, source)) = self.failed.front()
            && until <= now
        {
            self.failed.pop_front();
            self.leave(source);
        }
    }

    /// A link of `source` is established, or gone.
    pub fn leave(&mut self, source: Source) {
        let Some(held) = self.sources.get_mut(&source) else { return };
        *held -= 1;
        self.total -= 1;
        if *held == 0 {
            self.sources.remove(&source);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(n: u8) -> Source {
        Source::of([10, 0, 0, n].into())
    }

    #[test]
    fn false_sources_fill_only_the_part_below_the_mark() {
        let mut admission = Admission::default();
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
        let mut admission = Admission::default();
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
    fn counts_end_at_nothing() {
        let mut admission = Admission::default();
        admission.enter(source(1));
        admission.enter(source(2));
        admission.enter(source(1));
        [1, 1, 2, 2].into_iter().for_each(|n| admission.leave(source(n)));
        assert_eq!((admission.total, admission.sources.len()), (0, 0));
    }

    #[test]
    fn failures_count_for_a_while() {
        let (mut admission, now) = (Admission::default(), Instant::now());
        (0..RETRY_MARK).for_each(|n| admission.fail(now, source(n as u8)));
        admission.expire(now);
        assert_eq!(admission.decide(source(99), false), Decision::Retry);
        admission.expire(now + HANDSHAKE);
        assert_eq!(admission.decide(source(99), false), Decision::Accept);
        assert_eq!((admission.total, admission.failed.len()), (0, 0));
    }
}
