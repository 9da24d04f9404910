//! Whom this agent calls by what it heard of addresses, which may be lies: not too many, and nobody in vain again and again.

use crate::limits::{PEER_CALL_EVERY, PEER_CALLS, PEER_SHUN};
use crate::pace::Pace;
use gms_transport::message::members::MEMBERS_MAX;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

/// The calls of late.
pub(super) struct Calls {
    pace: Pace,
    /// Addresses that are not called until then.
    shunned: BTreeMap<SocketAddr, Instant>,
}

impl Calls {
    pub(super) fn new(now: Instant) -> Self {
        Self { pace: Pace::new(now), shunned: BTreeMap::new() }
    }

    /// Whether this address may be called now.
    pub(super) fn admits(&mut self, now: Instant, addr: SocketAddr) -> bool {
        let is_shunned = self.shunned.get(&addr).is_some_and(|until| now < *until);
        !is_shunned && self.pace.admits(now, PEER_CALL_EVERY, PEER_CALLS)
    }

    /// Nobody was there, or somebody else.
    pub(super) fn shun(&mut self, now: Instant, addr: SocketAddr) {
        self.shunned.retain(|_, until| now < *until);
        if self.shunned.len() < MEMBERS_MAX {
            self.shunned.insert(addr, now + PEER_SHUN);
        }
    }

    /// The node that says to be there has called.
    pub(super) fn trust(&mut self, addr: SocketAddr) {
        self.shunned.remove(&addr);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn nobody_is_called_in_vain_again_and_again_unless_it_calls_itself() {
        let now = Instant::now();
        let mut calls = Calls::new(now);
        let addrs = [7, 8].map(|port| SocketAddr::from(([10, 0, 0, 1], port)));
        assert!(calls.admits(now, addrs[0]));
        calls.shun(now, addrs[0]);
        assert!(!calls.admits(now, addrs[0]) && calls.admits(now, addrs[1]));
        calls.trust(addrs[0]);
        assert!(calls.admits(now, addrs[0]));
        calls.shun(now, addrs[0]);
        assert!(calls.admits(now + PEER_SHUN, addrs[0]));
    }

    #[test]
    fn invented_addresses_have_an_agent_make_a_bounded_number_of_calls() {
        let (mut now, mut made) = (Instant::now(), 0u32);
        let mut calls = Calls::new(now);
        for invented in 0..10_000u32 {
            now += Duration::from_millis(1);
            let addr = SocketAddr::from((invented.to_be_bytes(), 7));
            if calls.admits(now, addr) {
                made += 1;
                calls.shun(now, addr);
            }
        }
        assert!(made <= PEER_CALLS + 10_000 / PEER_CALL_EVERY.as_millis() as u32, "{made}");
        assert!(calls.shunned.len() <= MEMBERS_MAX);
    }
}
