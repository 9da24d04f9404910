//! A transport whose peers are the test, for tests of a client and of its owners: no socket, no clock.

use std::collections::{BTreeMap, VecDeque};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use gms_policy::ids::AgentId;
use nix::sys::eventfd::EventFd;

use super::lane::{Lane, RETRY};
use super::{AgentAddress, Checksum, Client, ClientEvent};
use crate::message::{Control, Feedback, HelloReply, HelloRequest, Op, Status, WorkloadId};
use crate::{
    CloseCode, CloseReason, Event, ExchangeId, Fingerprint, LinkId, PathStats, PeerId,
    PeerIdentity, Transport, TransportError,
};

/// See the module's documentation.
pub struct Script {
    fd: EventFd,
    pub(super) links: u32,
    pub(super) streams: u64,
    /// Links that were asked for.
    pub(super) connecting: Vec<(LinkId, SocketAddr)>,
    /// Requests sent, in order.
    pub(super) sent: Vec<(ExchangeId, Control)>,
    /// Of the last of them.
    pub(super) payload: Vec<u8>,
    pub(super) abandoned: Vec<ExchangeId>,
    pub(super) closed: Vec<(LinkId, CloseCode)>,
    /// Links on which nothing more can be sent.
    pub(super) busy: Vec<LinkId>,
    /// Pages that agents want taken away.
    recalls: BTreeMap<AgentId, u32>,
    /// Pages for which agents have room, if not for 1000.
    rooms: BTreeMap<AgentId, u32>,
    pub(super) events: VecDeque<Event>,
}

impl Script {
    pub(super) fn new() -> Script {
        Script {
            fd: EventFd::new().expect("a descriptor"),
            links: 0,
            streams: 0,
            connecting: Vec::new(),
            sent: Vec::new(),
            payload: Vec::new(),
            abandoned: Vec::new(),
            closed: Vec::new(),
            busy: Vec::new(),
            recalls: BTreeMap::new(),
            rooms: BTreeMap::new(),
            events: VecDeque::new(),
        }
    }
}

impl Transport for Script {
    fn connect(&mut self, _: Instant, addr: SocketAddr) -> Result<LinkId, TransportError> {
        self.links += 1;
        let link = LinkId::new(self.links, self.links);
        self.connecting.push((link, addr));
        Ok(link)
    }

    fn request(
        &mut self,
        _: Instant,
        link: LinkId,
        control: &Control,
        payload: &[&[u8]],
    ) -> Result<ExchangeId, TransportError> {
        if self.busy.contains(&link) {
            return Err(TransportError::Busy);
        }
        self.streams += 1;
        let exchange = ExchangeId::new(link, self.streams);
        self.sent.push((exchange, *control));
        self.payload = payload.concat();
        Ok(exchange)
    }

    fn reply(
        &mut self,
        _: Instant,
        _: ExchangeId,
        _: &Control,
        _: &[&[u8]],
    ) -> Result<(), TransportError> {
        unreachable!("a lane only asks")
    }

    fn abandon(&mut self, exchange: ExchangeId) {
        self.abandoned.push(exchange);
    }

    fn drive(&mut self, _: Instant) -> std::io::Result<bool> {
        Ok(!self.events.is_empty())
    }

    fn poll(&mut self, _: Instant) -> Option<Event> {
        self.events.pop_front()
    }

    fn flush(&mut self, _: Instant) -> std::io::Result<()> {
        Ok(())
    }

    fn deadline(&self) -> Option<Instant> {
        None
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn path(&self, _: LinkId) -> Option<PathStats> {
        None
    }

    fn close(&mut self, _: Instant, link: LinkId, code: CloseCode) {
        self.closed.push((link, code));
        self.events.push_back(Event::Closed { link, reason: CloseReason::Local });
    }
}

impl Lane<Script> {
    /// A lane to as many agents, none of them up.
    pub(super) fn scripted(now: Instant, agents: u16) -> Lane<Script> {
        let address = |n: u16| {
            let socket = SocketAddr::from((Ipv4Addr::LOCALHOST, 7400 + n));
            AgentAddress::new(format!("agent-{n}"), socket)
        };
        let agents: Vec<AgentAddress> = (0..agents).map(address).collect();
        Lane::new(now, Script::new(), WorkloadId([7; 16]), &agents)
    }

    /// The link that was asked for last.
    pub(super) fn link(&self, agent: AgentId) -> LinkId {
        let socket = self.peers[usize::from(agent.0)].address.socket;
        let asked = self.transport.connecting.iter().rev().find(|(_, addr)| *addr == socket);
        asked.expect("a link was asked for").0
    }

    /// A reply comes, from an agent with room for 1000 pages unless it has been given another.
    pub(super) fn reply(
        &mut self,
        (exchange, request): &(ExchangeId, Control),
        status: Status,
        edit: impl FnOnce(&mut Control),
    ) {
        let agent = self.links.get(&exchange.link);
        let of = |map: &BTreeMap<AgentId, u32>| agent.and_then(|agent| map.get(agent)).copied();
        let recall = of(&self.transport.recalls).unwrap_or(0);
        let room = of(&self.transport.rooms).unwrap_or(1000);
        let taken = if recall > 0 { 0 } else { room };
        let room =
            Feedback { frames_free: taken, credits_put: taken, recall, ..Feedback::default() };
        let mut control = request.reply(status).with_feedback(room);
        if request.op() == Some(Op::Hello) {
            let asked: HelloRequest = request.body();
            control = control.with_answer(HelloReply::new(asked.lease_ms, asked.features));
        }
        edit(&mut control);
        self.transport.events.push_back(Event::Control { exchange: *exchange, control });
    }
}

impl Client<Script> {
    /// A client of as many agents, all of them up in session 1.
    pub fn scripted(agents: u16, checksum: Checksum) -> Client<Script> {
        let now = Instant::now();
        let mut client = Client::new(Lane::scripted(now, agents), checksum);
        client.drive(now).expect("the script does not fail");
        for agent in 0..agents as u8 {
            let hello = client.come_up(now, AgentId(agent));
            client.play_reply(&hello, Status::Ok, |control| control.session = 1);
            while client.poll(now).is_some() {}
        }
        client.take_sent();
        client
    }

    /// The link comes up; returns the hello. What is told of that, and was to be told before, the owner hears when it looks.
    pub(super) fn come_up(&mut self, now: Instant, agent: AgentId) -> (ExchangeId, Control) {
        let addr = self.lane.peers[usize::from(agent.0)].address.socket;
        let (id, fingerprint) = (PeerId::Issued([agent.0; 16]), Fingerprint([agent.0; 32]));
        let peer = PeerIdentity { id, fingerprint, addr, is_node: true };
        let link = self.lane.link(agent);
        self.play(Event::Connected { link, peer });
        self.settle(now);
        *self.lane.transport.sent.last().expect("a hello")
    }

    /// What the transport has reported is dealt with; the owner hears of it when it looks.
    fn settle(&mut self, now: Instant) {
        let told: Vec<ClientEvent> = std::iter::from_fn(|| self.poll(now)).collect();
        self.events.extend(told);
    }

    /// Requests sent since this was called last.
    pub fn take_sent(&mut self) -> Vec<(ExchangeId, Control)> {
        std::mem::take(&mut self.lane.transport.sent)
    }

    /// A whole reply comes: the agent has all pages.
    pub fn answer(&mut self, request: &(ExchangeId, Control), payload: Vec<u8>) {
        let all = u64::MAX >> (64 - u64::from(request.1.count()).clamp(1, 64));
        self.answer_with(request, Status::Ok, all, payload);
    }

    /// A whole reply comes: the agent has the pages `done`.
    pub fn answer_with(
        &mut self,
        request: &(ExchangeId, Control),
        status: Status,
        done: u64,
        payload: Vec<u8>,
    ) {
        let exchange = request.0;
        self.lane.reply(request, status, |control| {
            *control = control.with_done(done);
            control.payload_len = payload.len() as u32;
        });
        self.lane.transport.events.extend([
            Event::Payload { exchange, offset: 0, bytes: payload.into() },
            Event::Complete { exchange },
        ]);
    }

    /// A reply's control message comes, from an agent with room for 1000 pages.
    pub fn play_reply(
        &mut self,
        request: &(ExchangeId, Control),
        status: Status,
        edit: impl FnOnce(&mut Control),
    ) {
        self.lane.reply(request, status, edit);
    }

    /// What the transport reports next.
    pub fn play(&mut self, event: Event) {
        self.lane.transport.events.push_back(event);
    }

    /// To whom a request was sent.
    pub fn agent_of(&self, exchange: ExchangeId) -> AgentId {
        self.lane.links[&exchange.link]
    }

    /// The agent's link breaks.
    pub fn lose(&mut self, agent: AgentId) {
        let addr = self.lane.peers[usize::from(agent.0)].address.socket;
        let link = self.lane.link(agent);
        self.play(Event::Closed { link, reason: CloseReason::Lost { addr } });
    }

    /// The agent is restarted: the client's owner hears of that when it looks next.
    pub fn restart(&mut self, agent: AgentId, session: u64) {
        let now = Instant::now();
        self.lose(agent);
        self.settle(now);
        self.drive(now + RETRY).expect("the script does not fail");
        let hello = self.come_up(now, agent);
        self.lane.transport.sent.pop();
        self.play_reply(&hello, Status::Ok, |control| control.session = session);
    }

    /// From now on the agent has no room, and wants so many pages taken away; 0: as before.
    pub fn recall(&mut self, agent: AgentId, pages: u32) {
        self.lane.transport.recalls.insert(agent, pages);
    }

    /// From now on the agent has room for so many pages.
    pub fn give_room(&mut self, agent: AgentId, pages: u32) {
        self.lane.transport.rooms.insert(agent, pages);
    }

    /// Requests to an agent that is up cannot be sent from now on.
    pub fn block(&mut self, agent: AgentId) {
        let link = self.lane.link(agent);
        self.lane.transport.busy.push(link);
    }

    /// They can again.
    pub fn unblock(&mut self, agent: AgentId) {
        let link = self.lane.link(agent);
        self.lane.transport.busy.retain(|&busy| busy != link);
    }

    /// Requests without a whole reply.
    pub fn open(&self) -> usize {
        self.requests.len()
    }
}
