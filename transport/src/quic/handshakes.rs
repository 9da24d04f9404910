//! Strangers become links: whose handshake is begun, and what it may cost.

use std::cmp::Reverse;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quinn_proto::{ConnectionHandle, EndpointEvent, Incoming};

use super::admission::{Decision, Source};
use super::link::Link;
use super::{Quic, close, limits, socket};
use crate::CloseReason;

impl Quic {
    /// Handles datagrams of strangers, if any wait and may be. True if it did. What came `of_link` is answered before, but for one turn in some.
    pub(super) fn handle_strangers(&mut self, now: Instant, of_link: bool) -> bool {
        self.turns_of_links =
            if of_link { self.turns_of_links + 1 } else { limits::TURNS_OF_LINKS };
        if self.turns_of_links < limits::TURNS_OF_LINKS {
            return false;
        }
        self.turns_of_links = 0;
        let mut spent = Duration::ZERO;
        while spent < limits::STRANGERS_TURN {
            let Some(next) = self.strangers.next(now, self.established > 0) else { break };
            let began = Instant::now();
            if !Self::is_too_large(next.from, next.bytes.len()) {
                self.handle(now, next.from, next.to, next.bytes);
            }
            let took = began.elapsed().max(Duration::from_nanos(1));
            self.strangers.charge(now, took);
            spent += took;
        }
        !spent.is_zero()
    }

    /// Begins the handshake of a client, has it prove its address, or refuses it.
    pub(super) fn accept(&mut self, now: Instant, incoming: Incoming) {
        let addr = incoming.remote_address();
        let source = Source::of(addr.ip());
        self.admission.expire(now);
        let decision = match self.established + self.others < limits::LINKS_MAX {
            true => self.admission.decide(source, incoming.remote_address_validated()),
            false => Decision::Refuse,
        };
        let near = |other: Source| other.site() == source.site();
        let accepts = match decision {
            Decision::Accept => true,
            Decision::Replace => {
                self.admission.forget_failure(|_| true) || self.drop_handshake(now, |_| true)
            }
            Decision::ReplaceNeighbour => {
                let of_site = |link: &Link| near(link.source());
                self.admission.forget_failure(near) || self.drop_handshake(now, of_site)
            }
            Decision::ReplaceOwn => {
                let own = |link: &Link| near(link.source()) && link.is_slow(now);
                self.admission.forget_own(now, source) || self.drop_handshake(now, own)
            }
            Decision::Retry | Decision::Refuse => false,
        };
        let Some(mut config) = self.server.clone().filter(|_| accepts) else {
            let transmit = match decision {
                Decision::Retry => self.endpoint.retry(incoming, &mut self.answer).ok(),
                _ => Some(self.endpoint.refuse(incoming, &mut self.answer)),
            };
            return self.send_answer(transmit);
        };
        let receive = self.first_share();
        let mtu = socket::route_mtu(addr).unwrap_or(limits::MTU_MIN);
        config.transport_config(self.transport(mtu, limits::EXCHANGES_MAX, receive));
        match self.endpoint.accept(incoming, now, &mut self.answer, Some(Arc::new(config))) {
            Ok((handle, conn)) => {
                let peer = conn.remote_address();
                self.add(now, handle, conn, receive);
                let len_max = usize::from(mtu).max(limits::STRANGER_LEN);
                self.peers.entry(peer).or_default().len_max = len_max;
            }
            Err(error) => {
                self.admission.fail(now, source);
                let addr = SocketAddr::new(addr.ip().to_canonical(), addr.port());
                self.failures.tell(now, source, close::reason(addr, false, &error.cause));
                self.send_answer(error.response);
            }
        }
    }

    /// Of `those`, drops the oldest handshake (or end of a link) of the source that holds most. False if there is none.
    fn drop_handshake(&mut self, now: Instant, those: impl Fn(&Link) -> bool) -> bool {
        let unfinished =
            self.links.iter().flatten().filter(|link| !link.counted_open && those(link));
        let share =
            |link: &&Link| (self.admission.share(link.source()), Reverse(link.id.generation()));
        let Some(index) = unfinished.max_by_key(share).map(|link| link.id.index()) else {
            return false;
        };
        self.endpoint.handle_event(ConnectionHandle(index), EndpointEvent::drained());
        if let Some(link) = self.links[index].take() {
            self.part(&link);
            self.admission.leave(link.source());
            self.failures.tell(now, link.source(), CloseReason::Unfinished { addr: link.addr });
        }
        true
    }
}
