//! Messages between pagers and agents, and the transports which carry them.
//!
//! A [`Transport`] is a non-blocking endpoint which its owner drives: no threads, no async tasks, no clock of its
//! own. The owner's loop is `drive`, then `poll` until empty (answering by `request` and `reply`), then `flush`;
//! when nothing happened it spins or waits for `fd` to become readable, no longer than until `deadline`.
//! [`Quic`] is one backend, `sim` (a network in memory) the other; `conformance_tests` tries both. The trait says nothing of
//! either: a `SocketAddr` is the name of a node, as it is for connections over RDMA too, and [`PathStats`] has what is
//! known of packets, if anything is. Payloads to send are borrowed for the call alone.

pub mod client;
#[cfg(test)]
mod conformance_tests;
mod error;
pub mod heap;
pub mod keys;
mod link;
pub mod message;
pub mod quic;
pub mod reader;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
pub mod text;

use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::time::{Instant, SystemTime};

use bytes::Bytes;

pub use error::{AbortReason, CloseCode, CloseReason, TransportError};
pub use link::{
    ExchangeId, Fingerprint, LinkId, NoPeerId, PacketStats, PathStats, PeerId, PeerIdentity,
};
pub use message::Control;
pub use quic::Quic;

/// What happened at an endpoint.
///
/// Of an exchange come, in this order: one `Control`, any number of `Payload`s, then `Complete`; or at any point
/// `Aborted`, after which nothing comes. When a link ends, its open exchanges are aborted before its `Closed`.
#[derive(Debug)]
pub enum Event {
    /// The link is up; both sides have accepted each other's certificate.
    Connected {
        /// The link.
        link: LinkId,
        /// Who is at the other end.
        peer: PeerIdentity,
    },
    /// The link ended, or could not be made. Its id will not be used again.
    Closed {
        /// The link.
        link: LinkId,
        /// Why; the message names the address and what to do.
        reason: CloseReason,
    },
    /// A checked request (at the responder) or the reply to a request (at the requester).
    Control {
        /// The exchange; new at the responder.
        exchange: ExchangeId,
        /// The message.
        control: Control,
    },
    /// Payload bytes as they arrived: in order, without gaps, never beyond `payload_len`.
    Payload {
        /// The exchange.
        exchange: ExchangeId,
        /// Where in the payload `bytes` begin.
        offset: u32,
        /// The bytes, in the buffer in which they were received.
        bytes: Bytes,
    },
    /// Control message and payload have come whole. A responder replies after this (or earlier, when it refuses).
    Complete {
        /// The exchange.
        exchange: ExchangeId,
    },
    /// The rest of the message will not come; what came of its payload must not be used.
    Aborted {
        /// The exchange.
        exchange: ExchangeId,
        /// Why.
        reason: AbortReason,
    },
}

impl Event {
    /// The link that the event is of.
    pub fn link(&self) -> LinkId {
        match *self {
            Event::Connected { link, .. } | Event::Closed { link, .. } => link,
            Event::Control { exchange, .. }
            | Event::Payload { exchange, .. }
            | Event::Complete { exchange }
            | Event::Aborted { exchange, .. } => exchange.link,
        }
    }

    /// The exchange that the event is of, if it is of one.
    pub fn exchange(&self) -> Option<ExchangeId> {
        match *self {
            Event::Connected { .. } | Event::Closed { .. } => None,
            Event::Control { exchange, .. }
            | Event::Payload { exchange, .. }
            | Event::Complete { exchange }
            | Event::Aborted { exchange, .. } => Some(exchange),
        }
    }
}

/// An endpoint for exchanges: a request with a payload one way, a reply with a payload back.
///
/// Only the side which connected sends requests. All calls return at once.
pub trait Transport {
    /// Begins to connect to the agent that is called `addr`; ends in `Connected` or `Closed` within a bounded time.
    fn connect(&mut self, now: Instant, addr: SocketAddr) -> Result<LinkId, TransportError>;

    /// Queues a request. `payload` is the concatenation of its slices; its length is set in the message sent.
    /// When the call returns, the slices are the caller's again: it may change them.
    ///
    /// [`TransportError::Busy`] when the link's bound of exchanges or queued bytes is met: retry after a `Complete`.
    fn request(
        &mut self,
        now: Instant,
        link: LinkId,
        control: &Control,
        payload: &[&[u8]],
    ) -> Result<ExchangeId, TransportError>;

    /// Queues the reply to a request; the slices are as in [`Transport::request`]. The exchange ends for the responder:
    /// another reply is [`TransportError::ExchangeEnded`].
    fn reply(
        &mut self,
        now: Instant,
        exchange: ExchangeId,
        control: &Control,
        payload: &[&[u8]],
    ) -> Result<(), TransportError>;

    /// Gives an exchange up (the requester's deadline passed): no event of it will come, the responder sees
    /// `Aborted` if it still receives. Unknown exchanges are ignored.
    fn abandon(&mut self, exchange: ExchangeId);

    /// Receives what is there, runs timers that are due and transmits. True if anything came or was due.
    fn drive(&mut self, now: Instant) -> io::Result<bool>;

    /// Next event, if any.
    fn poll(&mut self, now: Instant) -> Option<Event>;

    /// What is done until the next call is done for this link, where the time of a thread is divided among clients. False if it is not its client's turn.
    fn begin_work(&mut self, now: Instant, link: LinkId) -> bool {
        let _ = (now, link);
        true
    }

    /// Transmits what `request`, `reply` and `close` queued.
    fn flush(&mut self, now: Instant) -> io::Result<()>;

    /// When `drive` must be called although nothing arrives.
    fn deadline(&self) -> Option<Instant>;

    /// Becomes readable when something arrives.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Measurements of the link's path; `None` once it is closed.
    fn path(&self, link: LinkId) -> Option<PathStats>;

    /// Uses `identity` for the links that are accepted from now on; see [`Transport::expel`] for those which are up.
    ///
    /// # Errors
    /// If the transport does not accept links, or the identity cannot serve.
    fn renew(&mut self, identity: &keys::Identity) -> Result<(), TransportError> {
        let _ = identity;
        Err(TransportError::Keys("this transport cannot renew its keys".into()))
    }

    /// Closes the links of peers whose certificates are no longer good at the time `today`: they have expired, were
    /// revoked, or are of another authority than the identity is now.
    fn expel(&mut self, now: Instant, today: SystemTime) {
        let _ = (now, today);
    }

    /// Ends a link and tells the peer `code`. Open exchanges are aborted, and a `Closed` follows.
    fn close(&mut self, now: Instant, link: LinkId, code: CloseCode);
}
