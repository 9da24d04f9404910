//! What is received: a link's datagrams are handled at once, or when it is their client's turn; those of strangers wait for theirs.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use quinn_proto::{
    ConnectionId, ConnectionIdGenerator, DatagramEvent, HashedConnectionIdGenerator,
};

use super::sieve::LONG;
use super::socket::{Received, route_mtu};
use super::strangers::Datagram;
use super::{Quic, limits};
use crate::PeerId;

/// Has timers wait after a time in which the loop was not run: what has come meanwhile is heard first.
#[derive(Debug, Default)]
pub(super) struct Stall {
    before: Option<Instant>,
    /// Until when timers wait, unless all has been heard before.
    until: Option<Instant>,
}

impl Stall {
    /// Whether timers may run. `received`: there may be more to be heard.
    pub(super) fn is_over(&mut self, now: Instant, received: bool) -> bool {
        let before = self.before.replace(now);
        if before.is_some_and(|before| now.saturating_duration_since(before) > limits::STALL) {
            self.until = Some(now + limits::STALL_CAUGHT_UP);
        }
        if !received || self.until.is_some_and(|until| until <= now) {
            self.until = None;
        }
        self.until.is_none()
    }
}

/// Who has sent something.
#[derive(Clone, Copy)]
enum Sender {
    /// A client with a link.
    Client(Option<PeerId>),
    /// Who has begun a handshake, or not.
    Stranger { has_begun: bool },
    /// No client: another pretends to be at its address, or it is too large.
    Nobody,
}

impl Quic {
    /// Takes what has come. Returns whether anything has, and whether anything was a link's.
    pub(super) fn receive(&mut self, now: Instant) -> io::Result<(bool, bool)> {
        let (mut any, mut of_link, began) = (false, false, Instant::now());
        for count in 0..limits::RECEIVE_CONTENDED {
            if count > 0 && self.is_enough(count, began.elapsed()) {
                break;
            }
            self.turns.work_for_sender();
            let Some(received) = self.socket.receive()? else { break };
            any = true;
            // A short message is worth answering before the next is looked for.
            let is_short = received.len < limits::BULK;
            if self.take(now, &received, began + limits::TURN_ALONE) {
                of_link = true;
                if is_short && !self.turns.is_contended() {
                    break;
                }
            }
            if is_short && self.turns.has_asked_again(now) {
                break;
            }
        }
        self.turns.work_for(None);
        if self.turns.are_waiting() {
            // Of several only if it took long to receive: who floods the socket takes no more than half.
            let took = began.elapsed();
            let until = began + took + took.saturating_sub(limits::CLIENT_TURN);
            while let Some(client) = self.turns.next(self.turns.time(now)) {
                (any, of_link) = (true, true);
                self.serve_lane(now, client);
                if until <= Instant::now() {
                    break;
                }
            }
            self.turns.work_for(None);
        }
        Ok((any, of_link))
    }

    /// Whether so many receptions, which took so long, are enough for one turn.
    fn is_enough(&self, count: usize, took: Duration) -> bool {
        match self.turns.is_contended() {
            true => took >= limits::RECEIVE_TURN,
            false => count >= limits::RECEIVE_BATCH || took >= limits::TURN_ALONE,
        }
    }

    /// Handles what waits of one client, for a short time; more than comes in a turn, where no other is active any more.
    fn serve_lane(&mut self, now: Instant, client: PeerId) {
        self.turns.work_for(Some(client));
        let contended = self.turns.is_contended();
        let most = if contended { limits::CLIENT_TURN } else { limits::TURN_ALONE };
        let until = Instant::now() + most;
        while let Some(next) = self.turns.take(client) {
            self.handle(now, next.from, next.to, next.bytes);
            if until <= Instant::now() {
                break;
            }
        }
    }

    /// Takes what was received: gives it to the links until `late`, or has it wait. True if anything was handled that was a link's.
    fn take(&mut self, now: Instant, received: &Received, late: Instant) -> bool {
        let Received { from, to, len, stride } = *received;
        let (mut index, mut any, mut is_first) = (0, false, true);
        while let Some(bytes) = self.socket.datagram(received, index) {
            index += 1;
            match self.sender(from, &bytes) {
                Sender::Client(Some(client)) => {
                    let waits = self.turns.must_wait(now, client, is_first);
                    is_first = false;
                    if waits || len > stride && Instant::now() > late {
                        self.turns.work_for(Some(client));
                        self.turns.push(client, Datagram { from, to, bytes });
                    } else {
                        self.handle(now, from, to, bytes);
                        any = true;
                    }
                }
                Sender::Client(None) => {
                    self.handle(now, from, to, bytes);
                    any = true;
                }
                Sender::Stranger { has_begun } => {
                    self.turns.work_for(None);
                    self.sieve.count(now, &bytes);
                    self.strangers.push(Datagram { from, to, bytes }, has_begun);
                }
                Sender::Nobody => self.turns.work_for(None),
            }
        }
        any
    }

    /// Whose datagram it may be: what begins or ends a handshake has a long header (RFC 8999).
    fn sender(&self, from: SocketAddr, datagram: &[u8]) -> Sender {
        if self.server.is_none() {
            return Sender::Client(None);
        }
        let is_long = datagram.first().is_none_or(|first| first & LONG != 0);
        match self.peers.get(&from) {
            Some(peer) if !is_long && peer.up > 0 => {
                let is_good = datagram.len() <= peer.len_max && self.is_of_ours(datagram);
                if is_good { Sender::Client(peer.client) } else { Sender::Nobody }
            }
            found => Sender::Stranger { has_begun: found.is_some() },
        }
    }

    #[cfg(test)]
    pub(super) fn is_of_client(&self, from: SocketAddr, datagram: &[u8]) -> bool {
        matches!(self.sender(from, datagram), Sender::Client(_))
    }

    /// Whether a datagram with a short header names a connection id that may be one of ours.
    fn is_of_ours(&self, datagram: &[u8]) -> bool {
        let id = |ids: &HashedConnectionIdGenerator| {
            let id = datagram.get(1..1 + ids.cid_len()).map(ConnectionId::new);
            id.is_some_and(|id| ids.validate(&id).is_ok())
        };
        self.ids.as_ref().is_none_or(id)
    }

    /// Whether a stranger may have sent a datagram of so many bytes: only the loopback interface carries large ones from the first on.
    pub(super) fn is_too_large(from: SocketAddr, len: usize) -> bool {
        let is_near = || route_mtu(from).is_ok_and(|mtu| mtu >= limits::MTU_LOOPBACK);
        len > limits::STRANGER_LEN && !is_near()
    }

    /// Feeds a datagram to its link, if it has one.
    pub(super) fn handle(
        &mut self,
        now: Instant,
        from: SocketAddr,
        to: Option<IpAddr>,
        bytes: BytesMut,
    ) {
        match self.endpoint.handle(now, from, to, None, bytes, &mut self.answer) {
            Some(DatagramEvent::ConnectionEvent(handle, event)) => {
                if let Some(link) = self.links.get_mut(handle.0).and_then(Option::as_mut) {
                    link.set_burst(self.turns.burst(now, link.client));
                    link.handle_event(now, event);
                    link.mark(&mut self.dirty);
                }
            }
            Some(DatagramEvent::NewConnection(incoming)) => self.accept(now, incoming),
            Some(DatagramEvent::Response(transmit)) => self.send_answer(Some(transmit)),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_wait_for_what_came_while_the_loop_was_not_run() {
        let (mut stall, now) = (Stall::default(), Instant::now());
        assert!(stall.is_over(now, true), "the first turn of all");
        let soon = now + limits::STALL;
        assert!(stall.is_over(soon, true), "a turn like any other");
        let late = soon + limits::STALL * 2;
        assert!(!stall.is_over(late, true) && !stall.is_over(late, true));
        assert!(stall.is_over(late, false), "all is heard");
        assert!(stall.is_over(late, true));
        // Whoever sends without end does not keep them.
        let later = late + limits::STALL * 2;
        assert!(!stall.is_over(later, true));
        assert!(stall.is_over(later + limits::STALL_CAUGHT_UP, true));
        assert!(stall.is_over(later + limits::STALL * 4, false), "nothing has come");
    }

    #[test]
    fn strangers_send_large_datagrams_over_loopback_only() {
        let (near, far) = ("127.0.0.1:7".parse().unwrap(), "192.0.2.1:7".parse().unwrap());
        let (usual, large) = (limits::STRANGER_LEN, limits::STRANGER_LEN + 1);
        assert!(!Quic::is_too_large(near, usual) && !Quic::is_too_large(near, 65_000));
        assert!(!Quic::is_too_large(far, usual) && Quic::is_too_large(far, large));
    }
}
