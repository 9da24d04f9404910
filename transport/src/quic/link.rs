//! One QUIC connection: its exchanges, and what QUIC's events mean for them.

use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasherDefault;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use quinn_proto::{
    Connection, ConnectionEvent, Dir, Event as QuicEvent, ReadError, Side, StreamEvent, StreamId,
    VarInt, WriteError,
};

use super::admission::{Source, is_slow};
use super::limits::{
    CLOSING, HANDSHAKE, HEAD, PROBE, PROBE_MAX, PROBE_RTTS, QUEUE_MAX, REPLY_LEAST, SEND_WINDOW,
};
use super::outgoing::Outgoing;
use super::stream_hasher::StreamHasher;
use super::{close, tls};
use crate::keys::{Role, bearer::Bearer};
use crate::message::{DecodeError, Priority, Version};
use crate::reader::{MessageReader, Piece};
use crate::{
    AbortReason, CloseCode, CloseReason, Control, Event, ExchangeId, LinkId, PacketStats,
    PathStats, PeerId, PeerIdentity, TransportError,
};

/// Stream error code of an exchange which was given up.
const ABANDONED: VarInt = VarInt::from_u32(0);

/// Where a link stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Until the handshake is confirmed by both sides, or its deadline.
    Handshake { deadline: Instant },
    /// Until either side closes or the path fails.
    Open,
    /// QUIC still tells the peer so; the owner has been told.
    Closed,
}

/// A link and its exchanges.
pub(super) struct Link {
    pub id: LinkId,
    pub conn: Connection,
    /// The peer's address, IPv4 as such.
    pub addr: SocketAddr,
    state: State,
    /// What both ends speak: known when the link is up.
    version: Version,
    exchanges: HashMap<u64, Exchange, BuildHasherDefault<StreamHasher>>,
    /// Bytes which wait in the exchanges' `unsent`.
    queued: usize,
    /// Bytes of replies that the requests told to the owner, and not yet answered, may ask for.
    promised: usize,
    /// The same of requests that have come whole, each at least [`REPLY_LEAST`].
    asked: usize,
    /// Where other clients have turns too: bytes of replies that may be asked for, beyond which no further request is read.
    burst: Option<usize>,
    /// Whether it was answered since the endpoint has looked.
    pub has_replied: bool,
    /// Whether the endpoint has noted that it holds requests back.
    pub noted_held: bool,
    /// Bound of `queued` and `promised` beyond which no further request is read.
    backlog_max: usize,
    /// The least share of the receive windows that it has had.
    receive: u64,
    /// Whether a message is taken in too many pieces.
    is_crumbled: bool,
    /// Streams of requests which are not read before replies have gone.
    held: VecDeque<StreamId>,
    /// When requests without a whole control message are looked for next.
    heads_at: Option<Instant>,
    probe: Probe,
    /// When its timers want to be looked at.
    pub timeout: Option<Instant>,
    /// Whether the endpoint has noted that there may be something to transmit.
    pub marked: bool,
    /// Whether the endpoint has noted that its client stands back with it.
    pub stands_back: bool,
    /// Whether it began before the keys were renewed that are used now: asked for until it is up.
    pub precedes_keys: bool,
    /// Whether the endpoint counts it as established.
    pub counted_open: bool,
    /// Whether it ever did.
    pub was_up: bool,
    /// Whose it is, once it is up; of those that were accepted.
    pub client: Option<PeerId>,
    /// Until when an accepted link that was never up counts as a handshake, even if it is gone.
    pub counts_until: Option<Instant>,
    /// When it is forgotten, if it has ended.
    pub gone_at: Option<Instant>,
    /// Connection ids that its peer was given.
    pub ids_given: u32,
    /// Why an accepted link was never up: of that the owner is not told.
    pub failure: Option<CloseReason>,
}

/// Finds that the last packets of a message were lost, sooner than QUIC does: that waits for the longest time that an
/// acknowledgement may be held back, and some round trips. A packet that comes after lost ones is acknowledged at once, so
/// a client that waits for a reply sends one, and an agent answers it by another.
#[derive(Default)]
struct Probe {
    /// Of a client that waits for replies: when it pings.
    due: Option<Instant>,
    /// How long it has waited in vain.
    waited: Duration,
    /// Of an agent: pings that have come.
    seen: u64,
    /// Of an agent: when it has replied last.
    replied: Option<Instant>,
}

/// One exchange, from its first byte until both messages have gone over to QUIC.
struct Exchange {
    /// `None` once the peer's message is complete, or no longer wanted.
    reader: Option<MessageReader>,
    /// What is left of our message; `None` as long as there is no reply to send.
    unsent: Option<Outgoing>,
    /// Bytes of a reply that the request may ask for, until there is one.
    promised: usize,
    /// Its part of the link's `asked`.
    asked: usize,
    /// Until when the control message must have come; `None` when it has, or while it is held back.
    head_until: Option<Instant>,
}

impl Exchange {
    fn new(reader: MessageReader, unsent: Option<Outgoing>, head_until: Option<Instant>) -> Self {
        Self { reader: Some(reader), unsent, promised: 0, asked: 0, head_until }
    }

    /// Of a request that is still being read: whether its requester has said that it wants no reply.
    fn is_stopped(&self) -> bool {
        self.reader.is_some() && self.unsent.is_some()
    }
}

impl Link {
    /// A link that begins; `receive` bytes may be sent ahead of us.
    pub(super) fn new(now: Instant, id: LinkId, conn: Connection, receive: u64) -> Self {
        let remote = conn.remote_address();
        let counts_until = conn.side().is_server().then_some(now + HANDSHAKE);
        Self {
            id,
            addr: SocketAddr::new(remote.ip().to_canonical(), remote.port()),
            conn,
            state: State::Handshake { deadline: now + HANDSHAKE },
            version: Version::V2,
            exchanges: HashMap::default(),
            queued: 0,
            promised: 0,
            asked: 0,
            burst: None,
            has_replied: false,
            noted_held: false,
            backlog_max: SEND_WINDOW as usize / 2,
            receive,
            is_crumbled: false,
            held: VecDeque::new(),
            heads_at: None,
            probe: Probe::default(),
            timeout: Some(now),
            marked: false,
            stands_back: false,
            precedes_keys: false,
            counted_open: false,
            was_up: false,
            client: None,
            counts_until,
            gone_at: None,
            ids_given: 0,
            failure: None,
        }
    }

    /// Notes in `dirty` that there may be something to transmit.
    pub(super) fn mark(&mut self, dirty: &mut VecDeque<usize>) {
        if !std::mem::replace(&mut self.marked, true) {
            dirty.push_back(self.id.index());
        }
    }

    /// Where the peer is, for bounds.
    pub(super) fn source(&self) -> Source {
        Source::of(self.addr.ip())
    }

    /// Whether it is in its handshake for longer than honest links are.
    pub(super) fn is_slow(&self, now: Instant) -> bool {
        self.counts_until.is_some_and(|until| is_slow(now, until))
    }

    /// Whether requests wait until replies have gone.
    pub(super) fn holds_back(&self) -> bool {
        !self.held.is_empty()
    }

    /// Bounds what may be under way in each direction, in bytes.
    ///
    /// What the peer may send ahead never grows again: QUIC cannot take back what it has allowed, so a window that
    /// shrinks does so by what is read, but one that grows does so at once. With a peer whose streams are not read, each
    /// turn of the two would add their difference.
    pub(super) fn set_windows(&mut self, send: u64, receive: u64) {
        self.conn.set_send_window(send);
        if receive < self.receive {
            self.receive = receive;
            self.conn.set_receive_window(VarInt::from_u64(receive).unwrap_or(VarInt::MAX));
        }
        self.backlog_max = send as usize / 2;
    }

    pub(super) fn is_open(&self) -> bool {
        self.state == State::Open
    }

    #[cfg(test)]
    pub(super) fn open_exchanges(&self) -> usize {
        self.exchanges.len()
    }

    #[cfg(test)]
    pub(super) fn pings(&self) -> u64 {
        self.conn.stats().frame_tx.ping
    }

    #[cfg(test)]
    pub(super) fn queued(&self) -> usize {
        self.queued
    }

    pub(super) fn path(&self) -> PathStats {
        let path = self.conn.stats().path;
        PathStats {
            rtt: path.rtt,
            packets: Some(PacketStats {
                sent: path.sent_packets,
                lost: path.lost_packets,
                len_max: path.current_mtu.into(),
            }),
        }
    }

    /// Runs the timers which are due.
    pub(super) fn handle_timeout(&mut self, now: Instant, events: &mut VecDeque<Event>) {
        self.conn.handle_timeout(now);
        if matches!(self.state, State::Handshake { deadline } if deadline <= now) {
            self.conn.close(now, VarInt::from_u32(CloseCode::Goodbye as u32), Bytes::new());
            self.end(self.silence(), events);
        }
        if self.heads_at.is_some_and(|at| at <= now) {
            self.expire_heads(now);
        }
        if self.probe_at().is_some_and(|due| due <= now) {
            self.conn.ping();
            self.probe.waited *= 2;
            self.probe.due = (self.probe.waited <= PROBE_MAX).then_some(now + self.probe.waited);
        }
    }

    /// Takes what the endpoint has received for this link.
    pub(super) fn handle_event(&mut self, now: Instant, event: ConnectionEvent) {
        self.conn.handle_event(event);
        // A part of a reply begins its wait anew, see `receive`; an acknowledgement puts the next ping off.
        if let Some(due) = &mut self.probe.due {
            *due = now + self.probe.waited;
        }
    }

    /// An agent answers a client that waits, which may have lost what it has been sent last.
    fn answer_ping(&mut self, now: Instant) {
        let pings = self.conn.stats().frame_rx.ping;
        let waits = std::mem::replace(&mut self.probe.seen, pings) != pings;
        if waits && self.probe.replied.is_some_and(|at| now <= at + PROBE_MAX) {
            self.conn.ping();
        }
    }

    /// When it pings, if it still waits for a reply.
    fn probe_at(&self) -> Option<Instant> {
        self.probe.due.filter(|_| !self.exchanges.is_empty())
    }

    /// A client that waits for a reply will ping, unless something comes before.
    fn await_reply(&mut self, now: Instant) {
        if self.probe_at().is_none() && self.conn.side() == Side::Client {
            self.probe.waited = PROBE.max(self.conn.rtt() * PROBE_RTTS);
            self.probe.due = Some(now + self.probe.waited);
        }
    }

    /// It has ended: it will be forgotten.
    pub(super) fn note_end(&mut self, now: Instant) {
        if self.state == State::Closed {
            self.gone_at.get_or_insert(now + CLOSING);
        }
    }

    /// Why a handshake was not completed in time.
    fn silence(&self) -> CloseReason {
        match self.conn.side() {
            Side::Client => CloseReason::Unreachable { addr: self.addr },
            Side::Server => CloseReason::Unfinished { addr: self.addr },
        }
    }

    /// Gives up requests whose control message has not come in time. The owner has not heard of them.
    fn expire_heads(&mut self, now: Instant) {
        let late = |e: &Exchange| e.head_until.is_some_and(|until| until <= now);
        let late: Vec<u64> =
            self.exchanges.iter().filter(|(_, e)| late(e)).map(|(number, _)| *number).collect();
        for number in late {
            tracing::debug!(client = %self.addr, "a request without a control message was given up");
            self.abandon(ExchangeId::new(self.id, number));
        }
        self.heads_at = self.exchanges.values().filter_map(|exchange| exchange.head_until).min();
    }

    /// Looks up when the next timer is due. Returns when it was and when it is.
    pub(super) fn update_timeout(&mut self) -> (Option<Instant>, Option<Instant>) {
        let own = match self.state {
            State::Handshake { deadline } => Some(deadline),
            State::Open => None,
            State::Closed => self.gone_at,
        };
        let next = [own, self.heads_at, self.probe_at(), self.conn.poll_timeout()]
            .into_iter()
            .flatten()
            .min();
        (std::mem::replace(&mut self.timeout, next), next)
    }

    /// Opens an exchange by a request.
    pub(super) fn request(
        &mut self,
        now: Instant,
        control: &Control,
        payload: &[&[u8]],
    ) -> Result<ExchangeId, TransportError> {
        if !self.is_open() {
            return Err(TransportError::LinkClosed);
        }
        let (control, message) = Outgoing::new(self.version, control, payload)?;
        if self.queued + message.len() > QUEUE_MAX {
            return Err(TransportError::Busy);
        }
        let stream = self.conn.streams().open(Dir::Bi).ok_or(TransportError::Busy)?;
        let number = u64::from(VarInt::from(stream));
        let reader = MessageReader::reply_to(self.version, control);
        self.set_priority(stream, control.priority());
        self.queued += message.len();
        // Before it is one of them: an older time is of replies that have come.
        self.await_reply(now);
        self.exchanges.insert(number, Exchange::new(reader, Some(message), None));
        self.send(stream);
        Ok(ExchangeId::new(self.id, number))
    }

    /// Ends an exchange by a reply.
    pub(super) fn reply(
        &mut self,
        now: Instant,
        exchange: ExchangeId,
        control: &Control,
        payload: &[&[u8]],
    ) -> Result<(), TransportError> {
        if !self.is_open() {
            return Err(TransportError::LinkClosed);
        }
        if self.exchanges.get(&exchange.stream()).is_some_and(Exchange::is_stopped) {
            // Neither side wants more of it: the rest of the request might never come.
            self.abandon(exchange);
        }
        let ours = self.exchanges.get_mut(&exchange.stream()).filter(|e| e.unsent.is_none());
        let ours = ours.ok_or(TransportError::ExchangeEnded)?;
        let (_, message) = Outgoing::new(self.version, control, payload)?;
        if self.queued + message.len() > QUEUE_MAX {
            return Err(TransportError::Busy);
        }
        self.has_replied = true;
        self.promised -= std::mem::take(&mut ours.promised);
        self.asked -= std::mem::take(&mut ours.asked);
        let stream = stream_id(exchange.stream());
        if ours.reader.take().is_some() {
            let _ = self.conn.recv_stream(stream).stop(ABANDONED);
        }
        self.queued += message.len();
        ours.unsent = Some(message);
        self.probe.replied = Some(now);
        self.set_priority(stream, control.priority());
        self.send(stream);
        Ok(())
    }

    /// What is more urgent goes first, whatever else waits. A stream is born with the greatest priority there is.
    fn set_priority(&mut self, stream: StreamId, priority: Priority) {
        if priority == Priority::default() {
            return;
        }
        let _ = self.conn.send_stream(stream).set_priority(-(priority as i32));
    }

    /// Gives an exchange up.
    pub(super) fn abandon(&mut self, exchange: ExchangeId) {
        if !self.forget(exchange.stream()) {
            return;
        }
        let stream = stream_id(exchange.stream());
        let _ = self.conn.send_stream(stream).reset(ABANDONED);
        let _ = self.conn.recv_stream(stream).stop(ABANDONED);
    }

    /// Closes the link for the reason `why`, which the peer is told by `code`.
    pub(super) fn close(
        &mut self,
        now: Instant,
        code: CloseCode,
        why: CloseReason,
        events: &mut VecDeque<Event>,
    ) {
        if self.state == State::Closed {
            return;
        }
        let detail = match &why {
            CloseReason::Malformed { error, .. } => error.to_string(),
            CloseReason::Revoked { .. } => "the certificate was revoked".into(),
            CloseReason::NotAllowed { .. } => "this key is let in no longer".into(),
            CloseReason::Expired { .. } => "the certificate has expired".into(),
            CloseReason::WrongCa { .. } => "the certificate is of another authority".into(),
            CloseReason::Overload { .. } => "what was sent was not read".into(),
            _ => String::new(),
        };
        self.conn.close(now, VarInt::from_u32(code as u32), detail.into());
        self.end(why, events);
    }

    /// Turns QUIC's events into ours. Of a link nothing is told before it is up, nor after it is closed.
    pub(super) fn pump(&mut self, now: Instant, events: &mut VecDeque<Event>) {
        // The packet which completes the handshake may carry requests too.
        self.confirm(now, events);
        if self.probe.replied.is_some() {
            self.answer_ping(now);
        }
        while let Some(event) = self.conn.poll() {
            match event {
                QuicEvent::ConnectionLost { reason } => {
                    let reason = match close::reason(self.addr, self.is_open(), &reason) {
                        CloseReason::Unreachable { .. } => self.silence(),
                        reason => reason,
                    };
                    self.end(reason, events);
                }
                QuicEvent::Stream(StreamEvent::Opened { dir: Dir::Bi }) => self.accept(now, events),
                QuicEvent::Stream(StreamEvent::Readable { id }) => self.receive(now, id, events),
                QuicEvent::Stream(StreamEvent::Writable { id }) => self.send(id),
                QuicEvent::Stream(StreamEvent::Stopped { id, .. }) => self.stopped(id),
                _ => {}
            }
        }
        if self.is_crumbled {
            self.close(now, CloseCode::Overload, CloseReason::Overload { addr: self.addr }, events);
        }
    }

    /// Whether all its requests have been answered.
    pub(super) fn is_answered(&self) -> bool {
        self.exchanges.is_empty() && self.held.is_empty()
    }

    /// Whether there is room again for what was held back.
    pub(super) fn may_resume(&self) -> bool {
        self.holds_back() && self.has_room()
    }

    /// Other clients wait for their turn, or not any more: then no more is read of this one's requests than can be answered soon.
    pub(super) fn set_burst(&mut self, burst: Option<usize>) {
        self.burst = burst;
    }

    /// Reads the requests which were held back, as long as there is room for replies.
    pub(super) fn resume(&mut self, now: Instant, events: &mut VecDeque<Event>) {
        while self.has_room()
            && let Some(stream) = self.held.pop_front()
        {
            self.receive(now, stream, events);
        }
    }

    /// Whether another reply may be asked for. A requester's own bound is that of its requests.
    fn has_room(&self) -> bool {
        let is_soon = self.burst.is_none_or(|burst| self.queued + self.asked < burst);
        self.queued + self.promised < self.backlog_max && is_soon
            || self.conn.side() == Side::Client
    }

    /// True once both sides have accepted each other: a client is "connected" in TLS before the server has seen its
    /// certificate, and knows by HANDSHAKE_DONE only.
    fn is_confirmed(&self) -> bool {
        match self.conn.side() {
            _ if self.conn.is_handshaking() || self.conn.is_closed() => false,
            Side::Server => true,
            Side::Client => self.conn.stats().frame_rx.handshake_done > 0,
        }
    }

    /// Whether its handshake is over and the owner has not heard of it: [`Link::pump`] tells.
    pub(super) fn is_opening(&self) -> bool {
        matches!(self.state, State::Handshake { .. }) && self.is_confirmed()
    }

    /// Tells the owner of the link, once it is up.
    fn confirm(&mut self, now: Instant, events: &mut VecDeque<Event>) {
        if !self.is_opening() {
            return;
        }
        let addr = self.addr;
        let cert = tls::peer_certificate(&self.conn);
        let Some(Ok(bearer)) = cert.as_ref().map(Bearer::of) else {
            return self.close(now, CloseCode::Goodbye, CloseReason::WrongRole { addr }, events);
        };
        self.state = State::Open;
        self.version = tls::version(&self.conn);
        self.counts_until = None;
        let (id, fingerprint) = (bearer.id, bearer.fingerprint);
        self.client = self.conn.side().is_server().then_some(id);
        let is_node = bearer.role == Some(Role::Node);
        let peer = PeerIdentity { id, fingerprint, addr, is_node };
        events.push_back(Event::Connected { link: self.id, peer });
        self.accept(now, events);
    }

    fn accept(&mut self, now: Instant, events: &mut VecDeque<Event>) {
        while self.is_open()
            && let Some(stream) = self.conn.streams().accept(Dir::Bi)
        {
            let exchange =
                Exchange::new(MessageReader::request(self.version), None, Some(now + HEAD));
            self.exchanges.insert(VarInt::from(stream).into_inner(), exchange);
            self.receive(now, stream, events);
        }
    }

    /// Reads what came on a stream.
    fn receive(&mut self, now: Instant, stream: StreamId, events: &mut VecDeque<Event>) {
        self.probe.due = None;
        self.await_reply(now);
        let number = VarInt::from(stream).into_inner();
        let exchange = ExchangeId::new(self.id, number);
        let has_room = self.has_room();
        let Some(ours) = self.exchanges.get_mut(&number).filter(|_| self.state == State::Open)
        else {
            return;
        };
        let Some(reader) = ours.reader.as_mut() else { return };
        if !has_room && !reader.has_control() {
            // Left to QUIC, which pushes the requester back: what is asked for must have room.
            if ours.head_until.take().is_some() {
                self.held.push_back(stream);
            }
            return;
        }
        let mut incoming = self.conn.recv_stream(stream);
        let Ok(mut chunks) = incoming.read(true) else { return };
        let ended = loop {
            match chunks.next(usize::MAX) {
                Ok(Some(chunk)) => {
                    let take = |piece| events.push_back(event(exchange, piece));
                    if let Err(error) = reader.feed(chunk.bytes, take) {
                        break Err(error);
                    }
                }
                Ok(None) => break reader.finish().map(|()| Some(Event::Complete { exchange })),
                Err(ReadError::Blocked) => break Ok(None),
                Err(ReadError::Reset(_)) => {
                    break Ok(Some(Event::Aborted { exchange, reason: AbortReason::Peer }));
                }
            }
        };
        drop(chunks);
        if reader.has_control() {
            ours.head_until = None;
            let due = reader.reply_max() - ours.promised.min(reader.reply_max());
            ours.promised += due;
            self.promised += due;
        } else {
            let until = *ours.head_until.get_or_insert(now + HEAD);
            self.heads_at = Some(self.heads_at.map_or(until, |at| at.min(until)));
        }
        match ended {
            Ok(None) => {}
            Ok(Some(event)) => self.received(number, event, events),
            Err(error) => self.malformed(now, error, events),
        }
    }

    /// The peer's message has come whole, or will not.
    fn received(&mut self, number: u64, event: Event, events: &mut VecDeque<Event>) {
        let whole = matches!(event, Event::Complete { .. });
        events.push_back(event);
        let Some(ours) = self.exchanges.get_mut(&number) else { return };
        ours.reader = None;
        if whole && self.conn.side() == Side::Server {
            ours.asked = ours.promised.max(REPLY_LEAST);
            self.asked += ours.asked;
        }
        // A responder's message is not there yet, unless the requester has said that it wants none.
        let over = self.conn.side() == Side::Client || ours.unsent.is_some();
        if over || !whole {
            // An answer which came before all of the request was sent makes the rest of it needless.
            if ours.unsent.as_ref().is_none_or(|unsent| unsent.len() > 0) {
                let _ = self.conn.send_stream(stream_id(number)).reset(ABANDONED);
            }
            self.forget(number);
        }
    }

    fn malformed(&mut self, now: Instant, error: DecodeError, events: &mut VecDeque<Event>) {
        let addr = self.addr;
        let (code, why) = match error {
            DecodeError::Version { .. } => (CloseCode::Version, CloseReason::Version { addr }),
            _ => (CloseCode::Malformed, CloseReason::Malformed { addr, error }),
        };
        self.close(now, code, why, events);
    }

    /// Hands as much of our message to QUIC as it takes.
    fn send(&mut self, stream: StreamId) {
        let number = VarInt::from(stream).into_inner();
        let Some(ours) = self.exchanges.get_mut(&number) else { return };
        let Some(unsent) = ours.unsent.as_mut() else { return };
        let mut out = self.conn.send_stream(stream);
        while unsent.len() > 0 {
            match unsent.write(&mut out) {
                Ok(written) => self.queued -= written,
                Err(WriteError::Blocked) => return self.is_crumbled |= unsent.is_crumbled(),
                Err(WriteError::Stopped(_) | WriteError::ClosedStream) => {
                    return self.stopped(stream);
                }
            }
        }
        let _ = out.finish();
        if ours.reader.is_none() {
            self.exchanges.remove(&number);
        }
    }

    /// The peer wants no more of our message.
    fn stopped(&mut self, stream: StreamId) {
        let number = VarInt::from(stream).into_inner();
        let _ = self.conn.send_stream(stream).reset(ABANDONED);
        let Some(ours) = self.exchanges.get_mut(&number) else { return };
        self.queued -= ours.unsent.replace(Outgoing::default()).map_or(0, |unsent| unsent.len());
        if ours.reader.is_none() {
            self.forget(number);
        }
    }

    /// Removes an exchange; false if it is not there.
    fn forget(&mut self, number: u64) -> bool {
        let Some(ours) = self.exchanges.remove(&number) else { return false };
        self.queued -= ours.unsent.map_or(0, |unsent| unsent.len());
        self.promised -= ours.promised;
        self.asked -= ours.asked;
        true
    }

    /// The link is over: tells the owner, once.
    fn end(&mut self, reason: CloseReason, events: &mut VecDeque<Event>) {
        let link = self.id;
        let was = std::mem::replace(&mut self.state, State::Closed);
        for (number, _) in self.exchanges.drain().filter(|(_, e)| e.reader.is_some()) {
            let exchange = ExchangeId::new(link, number);
            events.push_back(Event::Aborted { exchange, reason: AbortReason::LinkClosed });
        }
        (self.queued, self.promised, self.asked) = (0, 0, 0);
        (self.heads_at, self.probe.due) = (None, None);
        self.held.clear();
        match (was, self.conn.side()) {
            (State::Closed, _) => {}
            // The owner of a server has not heard of it yet.
            (State::Handshake { .. }, Side::Server) => {
                self.failure = Some(reason);
            }
            _ => events.push_back(Event::Closed { link, reason }),
        }
    }
}

fn stream_id(number: u64) -> StreamId {
    VarInt::from_u64(number).unwrap_or(VarInt::MAX).into()
}

fn event(exchange: ExchangeId, piece: Piece) -> Event {
    match piece {
        Piece::Control(control) => Event::Control { exchange, control },
        Piece::Payload { offset, bytes } => Event::Payload { exchange, offset, bytes },
    }
}
