//! The QUIC backend: quinn-proto's state machine over one UDP socket, driven by the owner's loop. A listener may have
//! several endpoints, each with a socket and an owner of its own.
//!
//! Each exchange is a bidirectional stream of its own, so that a lost packet of one holds up no other. Nothing on
//! the path of an exchange takes a lock, changes threads or waits.

mod admission;
mod close;
mod congestion;
#[cfg(test)]
mod credit_tests;
mod crowd;
mod failures;
mod handshakes;
#[cfg(test)]
mod hostile_tests;
#[cfg(test)]
mod lan_tests;
pub mod limits;
mod link;
mod outgoing;
mod receive;
mod sieve;
mod socket;
#[cfg(test)]
mod stranger_tests;
mod strangers;
mod stream_hasher;
#[cfg(test)]
mod tests;
pub(crate) mod tls;
mod transmit;
mod turns;
#[cfg(test)]
mod turns_tests;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use quinn_proto::{
    AckFrequencyConfig, ClientConfig, Connection, ConnectionHandle, Endpoint, EndpointConfig,
    EndpointEvent, HashedConnectionIdGenerator, MtuDiscoveryConfig, ServerConfig, Transmit,
    TransportConfig, VarInt,
};
use rustls::pki_types::UnixTime;
use rustls::server::danger::ClientCertVerifier;

use crate::keys::{Identity, NODE_NAME, Role, verify};
use crate::message::Version;
use crate::{
    CloseCode, CloseReason, Control, Event, ExchangeId, LinkId, PathStats, PeerId, Transport,
    TransportError,
};
use admission::Admission;
use crowd::Crowd;
use failures::Failures;
use link::Link;
use receive::Stall;
use sieve::Sieve;
use socket::Socket;
use strangers::Strangers;
use turns::Turns;

/// A QUIC endpoint: one UDP socket and its links.
pub struct Quic {
    endpoint: Endpoint,
    socket: Socket,
    client: Option<ClientConfig>,
    server: Option<ServerConfig>,
    /// The protocols that it offers or accepts, the best first.
    alpn: &'static [&'static [u8]],
    /// Whose clients are served.
    verifier: Option<Arc<dyn ClientCertVerifier>>,
    /// Makes connection ids that are known again.
    ids: Option<HashedConnectionIdGenerator>,
    /// By QUIC connection handle.
    links: Vec<Option<Link>>,
    /// Links made so far.
    generation: u32,
    events: VecDeque<Event>,
    /// Handshakes under way and links being closed.
    admission: Admission,
    /// Established links.
    established: usize,
    peers: HashMap<SocketAddr, Peer>,
    strangers: Strangers,
    sieve: Sieve,
    /// Turns in which only links had something, since strangers had theirs.
    turns_of_links: u32,
    /// Whose turn it is among clients.
    turns: Turns,
    stall: Stall,
    /// The other endpoints of the listener.
    crowd: Crowd,
    /// Established links of theirs by which windows were shared last.
    others: usize,
    /// Links which may have something to transmit, in the order in which it is their turn.
    dirty: VecDeque<usize>,
    /// Links which hold back requests until replies have gone.
    held: VecDeque<usize>,
    /// Whether some were read in this turn of the loop, and when others may be that could be.
    has_resumed: bool,
    resumes_at: Option<Instant>,
    /// When the first timer of all links is due.
    timeout: Option<Instant>,
    /// Links whose clients stand back with what they have to transmit, and until when.
    standing: Vec<usize>,
    standing_until: Option<Instant>,
    /// When more may be transmitted, where clients have their turns.
    transmits_at: Option<Instant>,
    /// What was being sent when the socket took no more, and when to try again.
    stalled: Option<(Transmit, Instant)>,
    /// Datagrams of links being built, or the stalled ones.
    buffer: Vec<u8>,
    /// Why handshakes failed.
    failures: Failures,
    /// A datagram of the endpoint itself being built: an answer to a stranger is made although others are stalled.
    answer: Vec<u8>,
}

/// An address from which there are links.
#[derive(Debug, Default)]
struct Peer {
    /// Those that have begun, and are not forgotten.
    links: usize,
    /// Of them, those that are or were up.
    up: usize,
    /// Whose they are: the first that was up.
    client: Option<PeerId>,
    /// The largest datagram that its route carries.
    len_max: usize,
}

impl Quic {
    /// An endpoint that connects to agents from `bind`. An IPv6 socket reaches IPv4 agents too.
    pub fn client(bind: SocketAddr, identity: &Identity) -> Result<Self, TransportError> {
        Self::client_of(bind, identity, &tls::ALPN)
    }

    /// An endpoint that accepts clients of the identity's authority at `addr`.
    pub fn server(addr: SocketAddr, identity: &Identity) -> Result<Self, TransportError> {
        Self::server_of(addr, identity, tls::alpn(Version::V2))
    }

    /// `count` endpoints of one listener at `addr`, for a thread each: the kernel divides clients among them, and all
    /// packets of a client's port come to the same endpoint. They speak no later version than `version`. Their bounds are
    /// together those of one, but for socket buffers and for lines of the log about failed handshakes.
    pub fn servers(
        addr: SocketAddr,
        identity: &Identity,
        version: Version,
        count: usize,
    ) -> Result<Vec<Self>, TransportError> {
        let sockets = Socket::bind_group(addr, count)
            .map_err(|error| TransportError::Socket { addr, error })?;
        let sockets = sockets.into_iter().zip(Crowd::of(count));
        sockets
            .map(|(socket, crowd)| Self::serve(socket, crowd, identity, tls::alpn(version)))
            .collect()
    }

    /// A client of another version: for tests.
    #[doc(hidden)]
    pub fn client_of(
        bind: SocketAddr,
        identity: &Identity,
        alpn: &'static [&'static [u8]],
    ) -> Result<Self, TransportError> {
        let client = ClientConfig::new(tls::client(identity, alpn)?);
        let socket = Socket::bind(bind, false)
            .map_err(|error| TransportError::Socket { addr: bind, error })?;
        Ok(Self { client: Some(client), ..Self::open(socket, Crowd::alone(), identity, None) })
    }

    fn server_of(
        addr: SocketAddr,
        identity: &Identity,
        alpn: &'static [&'static [u8]],
    ) -> Result<Self, TransportError> {
        let socket =
            Socket::bind(addr, true).map_err(|error| TransportError::Socket { addr, error })?;
        Self::serve(socket, Crowd::alone(), identity, alpn)
    }

    fn serve(
        socket: Socket,
        crowd: Crowd,
        identity: &Identity,
        alpn: &'static [&'static [u8]],
    ) -> Result<Self, TransportError> {
        let server = Self::server_config(identity, alpn)?;
        let verifier = Some(verify::client_verifier(&identity.trust)?);
        let endpoint = Self::open(socket, crowd, identity, Some(server.clone()));
        Ok(Self { server: Some(server), verifier, alpn, ..endpoint })
    }

    fn server_config(identity: &Identity, alpn: &[&[u8]]) -> Result<ServerConfig, TransportError> {
        let mut server = ServerConfig::with_crypto(tls::server(identity, alpn)?);
        server.migration(false);
        Ok(server)
    }

    fn open(
        socket: Socket,
        crowd: Crowd,
        identity: &Identity,
        server: Option<ServerConfig>,
    ) -> Self {
        let (mut config, mut ids) = (EndpointConfig::default(), None);
        if server.is_some() {
            // An agent which restarts knows by its keys the links of its former life, and resets them at once.
            let (reset_key, id_key) = tls::endpoint_keys(identity, socket.local(), crowd.index);
            config.reset_key(Arc::new(reset_key)).min_reset_interval(limits::RESET_INTERVAL);
            config.cid_generator(move || Box::new(HashedConnectionIdGenerator::from_key(id_key)));
            ids = Some(HashedConnectionIdGenerator::from_key(id_key));
        }
        config.max_udp_payload_size(limits::MTU_MAX).expect("a valid UDP payload size");
        let (handshakes, retry_mark) = crowd.handshakes();
        Self {
            endpoint: Endpoint::new(
                Arc::new(config),
                server.map(Arc::new),
                socket.probes_mtu(),
                None,
            ),
            socket,
            client: None,
            server: None,
            alpn: &tls::ALPN,
            verifier: None,
            ids,
            links: Vec::new(),
            generation: 0,
            events: VecDeque::new(),
            admission: Admission::new(handshakes, retry_mark),
            established: 0,
            peers: HashMap::new(),
            strangers: Strangers::default(),
            sieve: Sieve::default(),
            turns_of_links: 0,
            turns: Turns::default(),
            stall: Stall::default(),
            crowd,
            others: 0,
            dirty: VecDeque::new(),
            held: VecDeque::new(),
            has_resumed: false,
            resumes_at: None,
            timeout: None,
            standing: Vec::new(),
            standing_until: None,
            transmits_at: None,
            stalled: None,
            buffer: Vec::new(),
            answer: Vec::new(),
            failures: Failures::default(),
        }
    }

    /// Where the socket is bound.
    pub fn local_addr(&self) -> SocketAddr {
        self.socket.local()
    }

    /// Links there are, also those in their handshake or being closed.
    pub fn links(&self) -> usize {
        self.endpoint.open_connections()
    }

    /// Bytes of one link that a peer may send ahead of us, if it has the endpoint for itself.
    fn receive_window(&self) -> u64 {
        let window = u32::try_from(self.socket.receive_buffer()).unwrap_or(u32::MAX);
        window.clamp(*limits::RECEIVE_WINDOW.start(), *limits::RECEIVE_WINDOW.end()).into()
    }

    /// The share of [`limits::RECEIVE_WINDOWS`] that one of `links` has.
    fn receive_share(&self, links: usize) -> u64 {
        (limits::RECEIVE_WINDOWS / links.max(1) as u64).min(self.receive_window())
    }

    /// The share of a link that begins now. All others count, since all others may be up before it is.
    fn first_share(&mut self) -> u64 {
        let others = self.crowd.begin();
        self.receive_share(self.established + self.admission.total() + 1 + others)
    }

    /// The transport configuration for a path whose first hop carries `mtu` bytes, to who may send `receive` bytes ahead of us.
    fn transport(&self, mtu: u16, exchanges: u32, receive: u64) -> Arc<TransportConfig> {
        // Only the loopback interface carries 64 KiB: there, what the route says holds for the whole path.
        let (sure, least) = match mtu {
            limits::MTU_LOOPBACK.. => (mtu, limits::MTU_LOOPBACK_MIN),
            _ => (limits::MTU_MIN, limits::MTU_MIN),
        };
        let mut discovery = MtuDiscoveryConfig::default();
        discovery.upper_bound(mtu).black_hole_cooldown(limits::MTU_RETRY);
        let mut acks = AckFrequencyConfig::default();
        acks.ack_eliciting_threshold(limits::ACK_THRESHOLD.into())
            .max_ack_delay(Some(limits::ACK_DELAY))
            .reordering_threshold(limits::ACK_GAP.into());
        let mut config = TransportConfig::default();
        config
            .max_concurrent_bidi_streams(exchanges.into())
            .max_concurrent_uni_streams(0u32.into())
            .datagram_receive_buffer_size(None)
            .max_idle_timeout(limits::IDLE.try_into().ok())
            .stream_receive_window(limits::STREAM_WINDOW.into())
            .receive_window(VarInt::from_u64(receive).unwrap_or(VarInt::MAX))
            .send_window(limits::SEND_WINDOW)
            .send_fairness(false)
            .packet_threshold(limits::REORDERED_MAX)
            .initial_rtt(limits::INITIAL_RTT)
            .initial_mtu(sure)
            .min_mtu(least)
            .mtu_discovery_config(Some(discovery))
            .ack_frequency_config(Some(acks))
            .congestion_controller_factory(Arc::new(congestion::Config));
        if exchanges == 0 {
            config.keep_alive_interval(Some(limits::KEEP_ALIVE));
        }
        Arc::new(config)
    }

    /// Link `id`, which will have something to transmit.
    fn busy_link(&mut self, id: LinkId) -> Result<&mut Link, TransportError> {
        let link = self.links.get_mut(id.index()).and_then(Option::as_mut);
        let link = link.filter(|link| link.id == id).ok_or(TransportError::LinkClosed)?;
        link.mark(&mut self.dirty);
        Ok(link)
    }

    fn add(
        &mut self,
        now: Instant,
        handle: ConnectionHandle,
        conn: Connection,
        receive: u64,
    ) -> LinkId {
        self.generation += 1;
        let id = LinkId::new(handle.0 as u32, self.generation);
        if self.links.len() <= handle.0 {
            self.links.resize_with(handle.0 + 1, || None);
        }
        self.peers.entry(conn.remote_address()).or_default().links += 1;
        let mut link = Link::new(now, id, conn, receive);
        self.admission.enter(link.source());
        link.mark(&mut self.dirty);
        self.links[handle.0] = Some(link);
        id
    }

    /// Sends a datagram that the endpoint made; it is lost if the socket is full.
    fn send_answer(&mut self, transmit: Option<Transmit>) {
        if let Some(transmit) = transmit.filter(|_| self.stalled.is_none())
            && self.socket.takes_answers()
        {
            self.socket.send(&transmit, &self.answer);
        }
        self.answer.clear();
    }

    /// Runs timers that are due. True if there were any.
    fn run_timers(&mut self, now: Instant) -> bool {
        if self.timeout.is_none_or(|timeout| now < timeout) {
            return false;
        }
        for link in self.links.iter_mut().flatten() {
            if link.timeout.is_some_and(|timeout| timeout <= now) {
                link.handle_timeout(now, &mut self.events);
                // Now, not when it has transmitted: that may have to wait for the socket.
                link.update_timeout();
                link.mark(&mut self.dirty);
            }
        }
        let gone = |link: &&Link| link.gone_at.is_some_and(|at| at <= now);
        let gone: Vec<usize> =
            self.links.iter().flatten().filter(gone).map(|link| link.id.index()).collect();
        for index in gone {
            self.endpoint.handle_event(ConnectionHandle(index), EndpointEvent::drained());
            self.forget(index);
        }
        self.timeout = self.links.iter().flatten().filter_map(|link| link.timeout).min();
        true
    }

    /// Why a link whose peer was let in is not to be, by the keys that are used now.
    fn objection(&self, link: &Link, today: UnixTime) -> Option<CloseReason> {
        let cert = tls::peer_certificate(&link.conn)?;
        let error = verify::verify_again(self.verifier.as_deref()?, &cert, today).err()?;
        Some(close::expelled(link.addr, &error))
    }

    /// Ends link `index` if its handshake, which is over now, began under other keys that are no longer good. It is not open yet: its requests are not read.
    fn recheck(&mut self, now: Instant, index: usize) {
        let link = self.links.get(index).and_then(Option::as_ref);
        let link = link.filter(|link| link.precedes_keys && link.is_opening());
        let found = link.and_then(|link| Some((link.id, self.objection(link, UnixTime::now())?)));
        if let Some((id, why)) = found {
            self.end(now, id, CloseCode::Goodbye, why);
        }
    }

    fn client_of_link(&self, id: LinkId) -> Option<PeerId> {
        let link = self.links.get(id.index()).and_then(Option::as_ref);
        link.filter(|link| link.id == id).and_then(|link| link.client)
    }

    fn end(&mut self, now: Instant, id: LinkId, code: CloseCode, why: CloseReason) {
        let link = self.links.get_mut(id.index()).and_then(Option::as_mut);
        if let Some(link) = link.filter(|link| link.id == id) {
            link.mark(&mut self.dirty);
            link.close(now, code, why, &mut self.events);
            self.settle(now, id.index());
        }
    }

    /// Takes the events of links that were touched.
    fn pump(&mut self, now: Instant) {
        for turn in 0..self.dirty.len() {
            let index = self.dirty[turn];
            self.recheck(now, index);
            let Some(link) = self.links.get_mut(index).and_then(Option::as_mut) else { continue };
            self.turns.work_for(link.client);
            link.pump(now, &mut self.events);
            let mut drained = false;
            while let Some(event) = link.conn.poll_endpoint_events() {
                drained |= event.is_drained();
                if let Some(event) = self.endpoint.handle_event(ConnectionHandle(index), event) {
                    link.ids_given += 1;
                    link.conn.handle_event(event);
                }
            }
            if link.ids_given > limits::IDS_GIVEN_MAX {
                let why = CloseReason::Overload { addr: link.addr };
                link.close(now, CloseCode::Overload, why, &mut self.events);
            }
            self.settle(now, index);
            if drained {
                self.forget(index);
            }
        }
        self.turns.work_for(None);
    }

    /// Nothing is left of link `index`.
    fn forget(&mut self, index: usize) {
        let Some(link) = self.links[index].take() else { return };
        self.held.retain(|held| *held != index);
        self.part(&link);
        match link.counts_until {
            Some(until) => self.admission.linger(until, link.source()),
            None => self.admission.leave(link.source()),
        }
    }

    /// A link is gone.
    fn part(&mut self, link: &Link) {
        let addr = link.conn.remote_address();
        if let Some(client) = link.client.filter(|_| link.was_up) {
            self.turns.leave(client, link.id.index());
        }
        if let Some(peer) = self.peers.get_mut(&addr) {
            peer.links -= 1;
            peer.up -= usize::from(link.was_up);
            if peer.links == 0 {
                self.peers.remove(&addr);
            } else if peer.client == link.client {
                let is_there = |other: &&Link| other.was_up && other.conn.remote_address() == addr;
                peer.client =
                    self.links.iter().flatten().find(is_there).and_then(|other| other.client);
            }
        }
    }

    /// Counts link `index` where it now belongs: established, or beginning or ending.
    fn settle(&mut self, now: Instant, index: usize) {
        let Some(link) = self.links.get_mut(index).and_then(Option::as_mut) else { return };
        link.note_end(now);
        if let Some(reason) = link.failure.take() {
            self.failures.tell(now, link.source(), reason);
        }
        if link.holds_back() && !std::mem::replace(&mut link.noted_held, true) {
            self.held.push_back(index);
        }
        if link.is_open() == link.counted_open {
            return;
        }
        link.counted_open = link.is_open();
        match link.counted_open {
            true => {
                self.admission.leave(link.source());
                self.established += 1;
                link.was_up = true;
                let peer = self.peers.entry(link.conn.remote_address()).or_default();
                peer.up += 1;
                peer.client = peer.client.or(link.client);
                link.client.into_iter().for_each(|client| self.turns.enter(client, index));
            }
            false => {
                self.admission.enter(link.source());
                self.established -= 1;
            }
        }
        self.tell_crowd();
        self.share_windows();
    }

    fn tell_crowd(&mut self) {
        self.crowd.tell(self.established, self.established + self.admission.total());
    }

    /// Gives each established link its share of what all may hold.
    fn share_windows(&mut self) {
        let links = (self.established + self.others).max(1);
        let send = (limits::SEND_WINDOWS / links as u64)
            .clamp(limits::SEND_WINDOW_MIN, limits::SEND_WINDOW);
        let receive = self.receive_share(links);
        for link in self.links.iter_mut().flatten().filter(|link| link.counted_open) {
            link.set_windows(send, receive);
        }
    }
}

impl Transport for Quic {
    fn connect(&mut self, now: Instant, addr: SocketAddr) -> Result<LinkId, TransportError> {
        let failed =
            |detail: &dyn ToString| TransportError::Address { addr, detail: detail.to_string() };
        let mut config =
            self.client.clone().ok_or_else(|| failed(&"this endpoint only accepts"))?;
        if self.links() >= limits::LINKS_MAX {
            return Err(TransportError::Links { max: limits::LINKS_MAX });
        }
        let remote = match (addr.ip(), self.socket.local()) {
            (IpAddr::V4(ip), SocketAddr::V6(_)) => {
                SocketAddr::new(ip.to_ipv6_mapped().into(), addr.port())
            }
            (IpAddr::V6(_), SocketAddr::V4(_)) => {
                return Err(failed(&"this endpoint has an IPv4 socket"));
            }
            _ => addr,
        };
        let receive = self.first_share();
        let mtu = socket::route_mtu(addr).unwrap_or(limits::MTU_MIN);
        config.transport_config(self.transport(mtu, 0, receive));
        let (handle, conn) = self
            .endpoint
            .connect(now, config, remote, NODE_NAME)
            .map_err(|error| failed(&error))?;
        Ok(self.add(now, handle, conn, receive))
    }

    fn request(
        &mut self,
        now: Instant,
        link: LinkId,
        control: &Control,
        payload: &[&[u8]],
    ) -> Result<ExchangeId, TransportError> {
        self.busy_link(link)?.request(now, control, payload)
    }

    fn reply(
        &mut self,
        now: Instant,
        exchange: ExchangeId,
        control: &Control,
        payload: &[&[u8]],
    ) -> Result<(), TransportError> {
        let sent = self.busy_link(exchange.link)?.reply(now, exchange, control, payload);
        if let Err(TransportError::Busy) = sent {
            // More than the request could ask for, which `Link::receive` has bounded.
            let addr = self.busy_link(exchange.link)?.addr;
            self.end(now, exchange.link, CloseCode::Overload, CloseReason::Overload { addr });
        }
        sent
    }

    fn abandon(&mut self, exchange: ExchangeId) {
        if let Ok(link) = self.busy_link(exchange.link) {
            link.abandon(exchange);
        }
        self.events.retain(|event| event.exchange() != Some(exchange));
    }

    fn drive(&mut self, now: Instant) -> io::Result<bool> {
        let others = self.crowd.others();
        if std::mem::replace(&mut self.others, others) != others {
            self.share_windows();
        }
        self.turns.begin(now);
        self.has_resumed = false;
        self.transmit(now);
        let sending = self.transmits_at.is_some_and(|at| at <= now);
        let (received, of_link) = self.receive(now)?;
        if let Some(passes) = self.sieve.turn(now) {
            self.socket.sieve(passes);
        }
        // Before, all links would have ended that were not heard while this thread did not run.
        let more = received || self.turns.due().is_some();
        let timers = self.stall.is_over(now, more) && self.run_timers(now);
        let strangers = self.handle_strangers(now, of_link);
        if !self.dirty.is_empty() {
            self.pump(now);
        }
        self.tell_crowd();
        Ok(received || timers || strangers || sending)
    }

    fn poll(&mut self, now: Instant) -> Option<Event> {
        if self.events.is_empty() && !self.held.is_empty() {
            self.resume(now);
        }
        let event = self.events.pop_front();
        if let Some(Event::Control { exchange, .. }) = &event
            && let Some(client) = self.client_of_link(exchange.link)
        {
            self.turns.asked(now, client);
        }
        if self.turns.is_contended() {
            let link = event.as_ref().map(Event::link);
            self.turns.work_for(link.and_then(|link| self.client_of_link(link)));
        }
        event
    }

    fn begin_work(&mut self, now: Instant, link: LinkId) -> bool {
        let client = self.client_of_link(link);
        let (now, first) = (self.turns.time(now), self.leaves_first(now));
        let may = client.is_none_or(|client| self.begins_at(now, client, first).is_none());
        self.turns.work_for(client.filter(|_| may));
        may
    }

    fn flush(&mut self, now: Instant) -> io::Result<()> {
        self.transmit(now);
        Ok(())
    }

    fn deadline(&self) -> Option<Instant> {
        let retry = self.stalled.as_ref().map(|(_, retry)| *retry);
        let strangers = [self.strangers.due(), self.sieve.due()];
        let waits = [self.timeout, retry, self.turns.due(), self.resumes_at, self.transmits_at];
        waits.into_iter().chain(strangers).flatten().min()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.fd()
    }

    fn path(&self, link: LinkId) -> Option<PathStats> {
        let link = self.links.get(link.index())?.as_ref().filter(|l| l.id == link)?;
        link.is_open().then(|| link.path())
    }

    fn renew(&mut self, identity: &Identity) -> Result<(), TransportError> {
        if self.server.is_none() || identity.role() != Role::Node {
            return Err(TransportError::Keys("only agents renew theirs, by a node key".into()));
        }
        let server = Self::server_config(identity, self.alpn)?;
        self.verifier = Some(verify::client_verifier(&identity.trust)?);
        self.links.iter_mut().flatten().for_each(|link| link.precedes_keys = true);
        self.endpoint.set_server_config(Some(Arc::new(server.clone())));
        self.server = Some(server);
        Ok(())
    }

    fn expel(&mut self, now: Instant, today: SystemTime) {
        let since = today.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let today = UnixTime::since_unix_epoch(since);
        let verify = |link: &Link| Some((link.id, self.objection(link, today)?));
        let open = self.links.iter().flatten().filter(|link| link.is_open());
        let expelled: Vec<(LinkId, CloseReason)> = open.filter_map(verify).collect();
        for (id, why) in expelled {
            self.end(now, id, CloseCode::Goodbye, why);
        }
    }

    fn close(&mut self, now: Instant, link: LinkId, code: CloseCode) {
        self.end(now, link, code, CloseReason::Local);
    }
}
