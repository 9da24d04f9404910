//! The network's state: nodes, links, and what is under way.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::{Conditions, Fate, Sim};
use crate::message::{Control, PAYLOAD_MAX};
use crate::{
    AbortReason, CloseCode, CloseReason, Event, ExchangeId, Fingerprint, LinkId, PathStats, PeerId,
    PeerIdentity, TransportError,
};

/// A link on which nothing can come is lost after this, and one that cannot be made is given up.
pub const IDLE: Duration = Duration::from_secs(5);
/// A link that was asked for in vain is asked for again after this, then after twice as long and so on, as QUIC does.
const AGAIN: Duration = Duration::from_millis(60);
/// Exchanges of a link that may be under way at once.
const EXCHANGES_MAX: usize = 256;
/// Bytes of a payload that come at once: pages are split.
const PIECE: usize = 10_000;
/// The copy of a request that came twice has this in its number.
const COPY: u64 = 1 << 40;

/// A network. Clones are the same one.
#[derive(Clone)]
pub struct Net(Arc<Mutex<State>>);

impl Net {
    /// A network without nodes. `random` gives random numbers: the same seed, the same fate of each message.
    pub fn new(conditions: Conditions, random: Box<dyn FnMut() -> u64 + Send>) -> Net {
        Net(Arc::new(Mutex::new(State {
            conditions,
            random,
            nodes: BTreeMap::new(),
            under_way: BTreeMap::new(),
            free_at: BTreeMap::new(),
            cuts: BTreeSet::new(),
            now: None,
            sequence: 0,
        })))
    }

    /// A node at `addr`, which has none, or one that is down. Its id and its certificate's fingerprint are made of `identity`.
    ///
    /// # Errors
    /// If there is no descriptor for it.
    pub fn node(&self, addr: SocketAddr, identity: u8) -> io::Result<Sim> {
        let mut state = self.state();
        let links = state.nodes.get(&addr).map_or(0, |node| node.links_made);
        let node = Node {
            up: true,
            identity,
            links_made: links,
            links: BTreeMap::new(),
            events: VecDeque::new(),
        };
        state.nodes.insert(addr, node);
        drop(state);
        Sim::new(self.clone(), addr)
    }

    /// From now on these are the conditions.
    pub fn set_conditions(&self, conditions: Conditions) {
        self.state().conditions = conditions;
    }

    /// Nothing comes from one of these to the other any more; links between them are lost.
    pub fn cut(&self, now: Instant, a: SocketAddr, b: SocketAddr) {
        let mut state = self.state();
        state.cuts.insert((a.min(b), a.max(b)));
        state.lose_links(now, |from, to| (from == a && to == b) || (from == b && to == a));
    }

    /// The cut is mended: new links can be made.
    pub fn mend(&self, a: SocketAddr, b: SocketAddr) {
        self.state().cuts.remove(&(a.min(b), a.max(b)));
    }

    /// A node ends without a word; its peers lose their links to it.
    pub fn crash(&self, now: Instant, addr: SocketAddr) {
        let mut state = self.state();
        if let Some(node) = state.nodes.get_mut(&addr) {
            node.up = false;
            node.events.clear();
        }
        state.lose_links(now, |_, to| to == addr);
        if let Some(node) = state.nodes.get_mut(&addr) {
            node.links.clear();
        }
    }

    /// When something arrives next, at any node.
    pub fn deadline(&self) -> Option<Instant> {
        self.state().under_way.first_key_value().map(|((at, _), _)| *at)
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Node {
    up: bool,
    identity: u8,
    links_made: u32,
    links: BTreeMap<LinkId, Link>,
    /// Each with the time at which it came.
    events: VecDeque<(Instant, Event)>,
}

/// One end of a link.
struct Link {
    peer: SocketAddr,
    /// Whether this end has connected: only then it asks.
    connected: bool,
    /// The link as the other end names it, once that has heard of it.
    other: Option<LinkId>,
    up: bool,
    exchanges: BTreeMap<ExchangeId, Exchange>,
    next_stream: u64,
}

/// An exchange at one of its ends.
enum Exchange {
    /// Asked here: the number of the other end's exchange whose reply has begun to come, if any.
    Asked { control: Control, answered_by: Option<u64> },
    /// To be answered here; whether the request has come whole.
    Asking { whole: bool },
}

impl Exchange {
    /// Whether more is to come.
    fn receives(&self) -> bool {
        !matches!(self, Exchange::Asking { whole: true })
    }
}

/// What arrives at an end of a link.
enum Delivery {
    /// The link is asked for; if this does not arrive, again after a time.
    Connect { from: SocketAddr, link: LinkId, again: Duration },
    /// The link is up; `from` names it `other`.
    Accepted { from: SocketAddr, other: LinkId },
    /// Of a request.
    Request(Event),
    /// Of the reply that the exchange `by` of the other end made.
    Reply { by: u64, event: Event },
    /// The other end has given the exchange up.
    Abandoned(ExchangeId),
    /// The other end has closed the link.
    Closed(CloseReason),
    /// Nothing has come for too long.
    Lost(CloseReason),
}

/// The state of a [`Net`].
pub(super) struct State {
    conditions: Conditions,
    random: Box<dyn FnMut() -> u64 + Send>,
    nodes: BTreeMap<SocketAddr, Node>,
    /// In the order of arrival, each with a number of its own.
    under_way: BTreeMap<(Instant, u64), (SocketAddr, Option<LinkId>, Delivery)>,
    /// When what a node has sent to another one has left it.
    free_at: BTreeMap<(SocketAddr, SocketAddr), Instant>,
    /// Pairs between which nothing comes, in order.
    cuts: BTreeSet<(SocketAddr, SocketAddr)>,
    /// The latest time that anybody has named.
    now: Option<Instant>,
    sequence: u64,
}

impl State {
    fn post(&mut self, at: Instant, to: SocketAddr, link: Option<LinkId>, what: Delivery) {
        self.sequence += 1;
        self.under_way.insert((at, self.sequence), (to, link, what));
    }

    fn reaches(&self, from: SocketAddr, to: SocketAddr) -> bool {
        let up = |addr| self.nodes.get(&addr).is_some_and(|node| node.up);
        up(from) && up(to) && !self.cuts.contains(&(from.min(to), from.max(to)))
    }

    fn link(&mut self, addr: SocketAddr, link: LinkId) -> Option<&mut Link> {
        self.nodes.get_mut(&addr)?.links.get_mut(&link)
    }

    fn new_link(&mut self, addr: SocketAddr, peer: SocketAddr, other: Option<LinkId>) -> LinkId {
        let node = self.nodes.get_mut(&addr).expect("a node");
        node.links_made += 1;
        let id = LinkId::new(node.links_made, node.links_made);
        let (exchanges, up, connected) = (BTreeMap::new(), false, other.is_none());
        let link = Link { peer, connected, other, up, exchanges, next_stream: 0 };
        node.links.insert(id, link);
        id
    }

    fn tell(&mut self, at: Instant, addr: SocketAddr, event: Event) {
        if let Some(node) = self.nodes.get_mut(&addr).filter(|node| node.up) {
            node.events.push_back((at, event));
        }
    }

    /// A delay without a fate: of what the transport itself says.
    fn delay(&self) -> Duration {
        Duration::from_micros(*self.conditions.delay_us.start())
    }

    // ---- what an endpoint asks for

    pub(super) fn connect(&mut self, now: Instant, from: SocketAddr, to: SocketAddr) -> LinkId {
        let link = self.new_link(from, to, None);
        let what = Delivery::Connect { from, link, again: AGAIN };
        self.post(now + self.delay(), to, None, what);
        // Whatever becomes of it: a link that is up by then is not told so.
        let reason = CloseReason::Unreachable { addr: to };
        self.post(now + IDLE, from, Some(link), Delivery::Lost(reason));
        link
    }

    pub(super) fn request(
        &mut self,
        now: Instant,
        from: SocketAddr,
        id: LinkId,
        control: &Control,
        payload: &[&[u8]],
    ) -> Result<ExchangeId, TransportError> {
        let (control, payload) = whole(control, payload)?;
        let link = self.link(from, id).filter(|link| link.up).ok_or(TransportError::LinkClosed)?;
        if link.exchanges.len() >= EXCHANGES_MAX || !link.connected {
            return Err(TransportError::Busy);
        }
        link.next_stream += 1;
        let stream = link.next_stream;
        let exchange = ExchangeId::new(id, stream);
        link.exchanges.insert(exchange, Exchange::Asked { control, answered_by: None });
        let (to, other) = (link.peer, link.other.ok_or(TransportError::LinkClosed)?);
        for (copy, arrives) in self.arrivals(now, (from, to), payload.len()) {
            let number = if copy { stream | COPY } else { stream };
            let events = parts(ExchangeId::new(other, number), control, &payload);
            self.send(arrives, (from, to), other, events, Delivery::Request);
        }
        Ok(exchange)
    }

    pub(super) fn reply(
        &mut self,
        now: Instant,
        from: SocketAddr,
        exchange: ExchangeId,
        control: &Control,
        payload: &[&[u8]],
    ) -> Result<(), TransportError> {
        let (control, payload) = whole(control, payload)?;
        let link = self.link(from, exchange.link).filter(|link| link.up);
        let link = link.ok_or(TransportError::LinkClosed)?;
        if !matches!(link.exchanges.get(&exchange), Some(Exchange::Asking { .. })) {
            return Err(TransportError::ExchangeEnded);
        }
        link.exchanges.remove(&exchange);
        let (to, other) = (link.peer, link.other.ok_or(TransportError::LinkClosed)?);
        let by = exchange.stream();
        let asked = ExchangeId::new(other, by & !COPY);
        for (_, arrives) in self.arrivals(now, (from, to), payload.len()).into_iter().take(1) {
            let events = parts(asked, control, &payload);
            self.send(arrives, (from, to), other, events, |event| Delivery::Reply { by, event });
        }
        Ok(())
    }

    pub(super) fn abandon(&mut self, from: SocketAddr, exchange: ExchangeId) {
        if let Some(node) = self.nodes.get_mut(&from) {
            node.events.retain(|(_, event)| event.exchange() != Some(exchange));
        }
        let Some(link) = self.link(from, exchange.link) else { return };
        if link.exchanges.remove(&exchange).is_none() {
            return;
        }
        let (to, Some(other)) = (link.peer, link.other) else { return };
        let number = exchange.stream();
        let numbers =
            if link.connected { vec![number, number | COPY] } else { vec![number & !COPY] };
        // After what is under way there.
        let is_there = |at: &SocketAddr, on: &Option<LinkId>, what: &Delivery| {
            *at == to
                && *on == Some(other)
                && matches!(what, Delivery::Request(_) | Delivery::Reply { .. })
        };
        let under_way = self.under_way.iter().rev();
        let last =
            under_way.filter(|(_, (at, on, what))| is_there(at, on, what)).map(|(key, _)| key.0);
        let Some(at) = last.max().or_else(|| self.now.map(|now| now + self.delay())) else {
            return;
        };
        for number in numbers {
            self.post(at, to, Some(other), Delivery::Abandoned(ExchangeId::new(other, number)));
        }
    }

    pub(super) fn close(&mut self, now: Instant, from: SocketAddr, id: LinkId, code: CloseCode) {
        let Some(link) = self.link(from, id) else { return };
        let (to, other) = (link.peer, link.other);
        self.end_link(now, from, id, CloseReason::Local);
        if let Some(other) = other.filter(|_| self.reaches(from, to)) {
            let detail = String::new();
            let reason = CloseReason::ByPeer { addr: from, code: Some(code), detail };
            self.post(now + self.delay(), to, Some(other), Delivery::Closed(reason));
        }
    }

    pub(super) fn path(&mut self, addr: SocketAddr, link: LinkId) -> Option<PathStats> {
        let rtt = 2 * self.delay();
        self.link(addr, link)?;
        Some(PathStats { rtt, packets: None })
    }

    pub(super) fn poll(&mut self, addr: SocketAddr) -> Option<Event> {
        self.nodes.get_mut(&addr)?.events.pop_front().map(|(_, event)| event)
    }

    /// When something comes here next, or has come.
    pub(super) fn deadline(&self, addr: SocketAddr) -> Option<Instant> {
        let came = self.nodes.get(&addr).and_then(|node| node.events.front());
        let comes = || self.under_way.iter().find(|(_, (to, ..))| *to == addr);
        came.map(|(at, _)| *at).or_else(|| comes().map(|((at, _), _)| *at))
    }

    // ---- what is under way

    /// When a message of so many bytes arrives: never, once, or twice (`true`: the copy).
    fn arrivals(
        &mut self,
        now: Instant,
        (from, to): (SocketAddr, SocketAddr),
        payload: usize,
    ) -> Vec<(bool, [Instant; 2])> {
        let took = (payload + size_of::<Control>()) as u64 * 1_000_000_000;
        let took = Duration::from_nanos(took / self.conditions.bandwidth.max(1));
        let free_at = self.free_at.entry((from, to)).or_insert(now);
        let start = now.max(*free_at);
        *free_at = start + took;
        let fate = self.conditions.draw(&mut *self.random);
        let within = |delay: Duration| [start + delay, start + delay + took];
        match fate {
            _ if !self.reaches(from, to) => Vec::new(),
            Fate::Lost => Vec::new(),
            Fate::Arrives(delay) => vec![(false, within(delay))],
            Fate::Twice(first, second) => vec![(false, within(first)), (true, within(second))],
        }
    }

    /// A message's parts arrive from the one to the other moment.
    fn send(
        &mut self,
        [first, last]: [Instant; 2],
        (_, to): (SocketAddr, SocketAddr),
        link: LinkId,
        events: Vec<Event>,
        what: impl Fn(Event) -> Delivery,
    ) {
        let count = events.len().max(2) as u32 - 1;
        for (number, event) in (0u32..).zip(events) {
            let at = first + (last - first) * number / count;
            self.post(at, to, Some(link), what(event));
        }
    }

    /// Delivers what is due by `now`. True if there is an event for the node.
    pub(super) fn advance(&mut self, now: Instant, addr: SocketAddr) -> bool {
        self.now = self.now.max(Some(now));
        while let Some(entry) = self.under_way.first_entry()
            && entry.key().0 <= now
        {
            let ((at, _), (to, link, what)) = entry.remove_entry();
            match link {
                None => self.deliver_connect(at, to, what),
                Some(link) => self.deliver(at, to, link, what),
            }
        }
        self.nodes.get(&addr).is_some_and(|node| !node.events.is_empty())
    }

    fn deliver_connect(&mut self, at: Instant, to: SocketAddr, what: Delivery) {
        let Delivery::Connect { from, link: asked, again } = what else { return };
        if !self.reaches(from, to) {
            // Unless it was given up.
            if self.link(from, asked).is_some() {
                let what = Delivery::Connect { from, link: asked, again: 2 * again };
                self.post(at + again, to, None, what);
            }
            return;
        }
        let link = self.new_link(to, from, Some(asked));
        self.come_up(at, to, link);
        self.post(
            at + self.delay(),
            from,
            Some(asked),
            Delivery::Accepted { from: to, other: link },
        );
    }

    fn come_up(&mut self, at: Instant, addr: SocketAddr, id: LinkId) {
        let Some(link) = self.link(addr, id) else { return };
        link.up = true;
        let peer = link.peer;
        let identity = self.nodes.get(&peer).map_or(0, |node| node.identity);
        let fingerprint = Fingerprint([identity; 32]);
        let node = PeerId::Issued([identity; 16]);
        let peer = PeerIdentity { id: node, fingerprint, addr: peer, is_node: false };
        self.tell(at, addr, Event::Connected { link: id, peer });
    }

    fn deliver(&mut self, at: Instant, to: SocketAddr, id: LinkId, what: Delivery) {
        let Some(link) = self.link(to, id) else {
            // It was closed before it was up.
            if let Delivery::Accepted { from, other } = what
                && self.reaches(to, from)
            {
                let (code, detail) = (Some(CloseCode::Goodbye), String::new());
                let reason = CloseReason::ByPeer { addr: to, code, detail };
                self.post(at + self.delay(), from, Some(other), Delivery::Closed(reason));
            }
            return;
        };
        match what {
            Delivery::Connect { .. } => {}
            Delivery::Accepted { other, .. } => {
                link.other = Some(other);
                self.come_up(at, to, id);
            }
            Delivery::Lost(CloseReason::Unreachable { .. }) if link.up => {}
            Delivery::Closed(reason) | Delivery::Lost(reason) => self.end_link(at, to, id, reason),
            Delivery::Request(event) => self.deliver_request(at, to, event),
            Delivery::Reply { by, event } => self.deliver_reply(at, to, by, event),
            Delivery::Abandoned(exchange) => {
                let was = link.exchanges.remove(&exchange);
                if was.is_some_and(|exchange| exchange.receives()) {
                    self.tell(at, to, Event::Aborted { exchange, reason: AbortReason::Peer });
                }
            }
        }
    }

    fn deliver_request(&mut self, at: Instant, to: SocketAddr, event: Event) {
        let Some(exchange) = event.exchange() else { return };
        let Some(link) = self.link(to, exchange.link) else { return };
        match (&event, link.exchanges.get_mut(&exchange)) {
            (Event::Control { .. }, _) => {
                link.exchanges.insert(exchange, Exchange::Asking { whole: false });
            }
            (Event::Complete { .. }, Some(Exchange::Asking { whole })) => *whole = true,
            (_, Some(_)) => {}
            // It was answered early, or given up.
            (_, None) => return,
        }
        self.tell(at, to, event);
    }

    fn deliver_reply(&mut self, at: Instant, to: SocketAddr, by: u64, event: Event) {
        let Some(exchange) = event.exchange() else { return };
        let Some(link) = self.link(to, exchange.link) else { return };
        let Some(Exchange::Asked { control, answered_by }) = link.exchanges.get_mut(&exchange)
        else {
            return;
        };
        if *answered_by.get_or_insert(by) != by {
            return;
        }
        match &event {
            Event::Control { control: reply, .. } => {
                if let Err(error) = control.check_reply(reply) {
                    let reason = CloseReason::Malformed { addr: link.peer, error };
                    return self.end_link(at, to, exchange.link, reason);
                }
            }
            Event::Complete { .. } => drop(link.exchanges.remove(&exchange)),
            _ => {}
        }
        self.tell(at, to, event);
    }

    fn end_link(&mut self, at: Instant, addr: SocketAddr, id: LinkId, reason: CloseReason) {
        let Some(link) = self.nodes.get_mut(&addr).and_then(|node| node.links.remove(&id)) else {
            return;
        };
        for (exchange, _) in link.exchanges.into_iter().filter(|(_, open)| open.receives()) {
            self.tell(at, addr, Event::Aborted { exchange, reason: AbortReason::LinkClosed });
        }
        self.tell(at, addr, Event::Closed { link: id, reason });
    }

    /// The ends of such links, from one node to another, hear nothing any more.
    fn lose_links(&mut self, now: Instant, is_lost: impl Fn(SocketAddr, SocketAddr) -> bool) {
        let lost: Vec<(SocketAddr, LinkId, SocketAddr)> = self
            .nodes
            .iter()
            .flat_map(|(&from, node)| node.links.iter().map(move |(&id, l)| (from, id, l.peer)))
            .filter(|&(from, _, to)| is_lost(from, to))
            .collect();
        self.under_way.retain(|_, (to, link, what)| {
            let own = matches!(what, Delivery::Lost(_));
            own || !lost.iter().any(|(from, id, _)| to == from && *link == Some(*id))
        });
        for (from, id, to) in lost {
            // One that is not up yet has its own end (`connect`). If it comes up before, nobody would tell the other end that this one was lost.
            if self.link(from, id).is_some_and(|link| link.up) {
                let reason = CloseReason::Lost { addr: to };
                self.post(now + IDLE, from, Some(id), Delivery::Lost(reason));
            }
        }
    }
}

/// The message as it is sent: with the length of its payload, in one piece.
fn whole(control: &Control, payload: &[&[u8]]) -> Result<(Control, Bytes), TransportError> {
    let payload: Bytes = payload.concat().into();
    let mut control = *control;
    control.payload_len = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    control.check()?;
    debug_assert!(payload.len() <= PAYLOAD_MAX);
    Ok((control, payload))
}

/// What comes of a message.
fn parts(exchange: ExchangeId, control: Control, payload: &Bytes) -> Vec<Event> {
    let pieces = (0..payload.len()).step_by(PIECE).map(|offset| Event::Payload {
        exchange,
        offset: offset as u32,
        bytes: payload.slice(offset..payload.len().min(offset + PIECE)),
    });
    let control = std::iter::once(Event::Control { exchange, control });
    control.chain(pieces).chain([Event::Complete { exchange }]).collect()
}
