//! A lane over a transport that a script plays: no socket, no clock.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use gms_transport::{AbortReason, Fingerprint, PathStats, PeerIdentity};
use nix::sys::eventfd::EventFd;
use zerocopy::byteorder::little_endian::{U32, U64};

use super::*;

const A: AgentId = AgentId(0);
const B: AgentId = AgentId(1);

/// A transport whose peers are the test.
pub(crate) struct Script {
    fd: EventFd,
    links: u32,
    streams: u64,
    /// Links that were asked for.
    connecting: Vec<(LinkId, SocketAddr)>,
    /// Requests sent, in order.
    sent: Vec<(ExchangeId, Control)>,
    abandoned: Vec<ExchangeId>,
    closed: Vec<(LinkId, CloseCode)>,
    /// Links on which nothing more can be sent.
    busy: Vec<LinkId>,
    events: VecDeque<Event>,
}

impl Script {
    pub(crate) fn new() -> Script {
        Script {
            fd: EventFd::new().expect("a descriptor"),
            links: 0,
            streams: 0,
            connecting: Vec::new(),
            sent: Vec::new(),
            abandoned: Vec::new(),
            closed: Vec::new(),
            busy: Vec::new(),
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
        _: &[&[u8]],
    ) -> Result<ExchangeId, TransportError> {
        if self.busy.contains(&link) {
            return Err(TransportError::Busy);
        }
        self.streams += 1;
        let exchange = ExchangeId::new(link, self.streams);
        self.sent.push((exchange, *control));
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

/// For tests of a lane's owner.
impl Lane<Script> {
    /// A lane to as many agents, all of them up.
    pub(crate) fn up(agents: u16) -> Lane<Script> {
        Play::up(agents).lane
    }

    /// Requests sent since this was called last.
    pub(crate) fn take_sent(&mut self) -> Vec<(ExchangeId, Control)> {
        std::mem::take(&mut self.transport.sent)
    }

    /// A whole reply comes, from an agent with room for 1000 pages.
    pub(crate) fn answer(&mut self, request: &(ExchangeId, Control), payload: Vec<u8>) {
        let (exchange, mut control) = (request.0, request.1.reply(Status::Ok));
        control.done = U64::new(u64::MAX >> (64 - u64::from(control.count.get()).clamp(1, 64)));
        control.frames_free = U64::new(1000);
        control.credits = U32::new(1000);
        self.transport.events.extend([
            Event::Control { exchange, control },
            Event::Payload { exchange, offset: 0, bytes: payload.into() },
            Event::Complete { exchange },
        ]);
    }

    pub(crate) fn agent_of(&self, exchange: ExchangeId) -> AgentId {
        self.links[&exchange.link]
    }

    /// The agent is restarted: its owner hears of that when it looks next.
    pub(crate) fn restart(&mut self, agent: AgentId, session: u64) {
        let now = Instant::now();
        let addr = self.peers[usize::from(agent.0)].address.socket;
        let (&link, _) = self.links.iter().find(|(_, of)| **of == agent).expect("it is up");
        self.transport.events.push_back(Event::Closed { link, reason: CloseReason::Lost { addr } });
        let mut told: Vec<LaneEvent> = std::iter::from_fn(|| self.poll(now)).collect();
        self.drive(now + RETRY).expect("the script does not fail");
        let (link, _) = *self.transport.connecting.last().expect("a link was asked for");
        let peer = PeerIdentity { fingerprint: Fingerprint([0; 32]), addr };
        self.transport.events.push_back(Event::Connected { link, peer });
        told.extend(std::iter::from_fn(|| self.poll(now)));
        let (exchange, hello) = self.transport.sent.pop().expect("a hello");
        let mut control = hello.reply(Status::Ok);
        control.compare = U64::new(session);
        control.frames_free = U64::new(1000);
        control.credits = U32::new(1000);
        self.transport.events.push_back(Event::Control { exchange, control });
        self.events.extend(told);
    }

    /// Requests to an agent that is up cannot be sent from now on.
    pub(crate) fn block(&mut self, agent: AgentId) {
        let (&link, _) = self.links.iter().find(|(_, of)| **of == agent).expect("it is up");
        self.transport.busy.push(link);
    }

    pub(crate) fn open(&self) -> usize {
        self.open.len()
    }
}

/// A lane, its script and the time.
struct Play {
    lane: Lane<Script>,
    now: Instant,
}

impl Play {
    /// A lane to as many agents, none of them up.
    fn new(agents: u16) -> Play {
        let now = Instant::now();
        let address = |n: u16| AgentAddress {
            name: format!("agent-{n}"),
            socket: SocketAddr::from((Ipv4Addr::LOCALHOST, 7400 + n)),
        };
        let agents: Vec<AgentAddress> = (0..agents).map(address).collect();
        let lane = Lane::new(now, Script::new(), WorkloadId([7; 16]), &agents);
        Play { lane, now }
    }

    /// The same with every agent up in session 1.
    fn up(agents: u16) -> Play {
        let mut play = Play::new(agents);
        play.drive();
        for agent in 0..agents as u8 {
            play.connect(AgentId(agent), 1);
        }
        play
    }

    fn drive(&mut self) -> Vec<LaneEvent> {
        self.lane.drive(self.now).expect("the script does not fail");
        std::iter::from_fn(|| self.lane.poll(self.now)).collect()
    }

    fn wait(&mut self, time: Duration) {
        self.now += time;
    }

    fn link(&self, agent: AgentId) -> LinkId {
        let socket = self.lane.peers[usize::from(agent.0)].address.socket;
        let asked = self.lane.transport.connecting.iter().rev().find(|(_, addr)| *addr == socket);
        asked.expect("a link was asked for").0
    }

    /// The link comes up and the hello is answered.
    fn connect(&mut self, agent: AgentId, session: u64) -> Vec<LaneEvent> {
        let hello = self.greet(agent);
        self.reply(hello, Status::Ok, |control| control.compare = U64::new(session))
    }

    /// The link comes up; returns the hello.
    fn greet(&mut self, agent: AgentId) -> ExchangeId {
        let (link, addr) = (self.link(agent), SocketAddr::from((Ipv4Addr::LOCALHOST, 1)));
        let peer = PeerIdentity { fingerprint: Fingerprint([0; 32]), addr };
        self.event(Event::Connected { link, peer });
        let (exchange, control) = self.lane.transport.sent.last().expect("a hello");
        assert_eq!((control.op, exchange.link), (Op::Hello, link));
        *exchange
    }

    fn event(&mut self, event: Event) -> Vec<LaneEvent> {
        self.lane.transport.events.push_back(event);
        self.drive()
    }

    /// The agent answers, with room for 1000 pages.
    fn reply(
        &mut self,
        exchange: ExchangeId,
        status: Status,
        edit: impl FnOnce(&mut Control),
    ) -> Vec<LaneEvent> {
        let sent = self.lane.transport.sent.iter().find(|(id, _)| *id == exchange);
        let mut control = sent.expect("it was asked").1.reply(status);
        control.frames_free = U64::new(1000);
        control.credits = U32::new(1000);
        edit(&mut control);
        self.event(Event::Control { exchange, control })
    }

    fn send(&mut self, agent: AgentId, make: fn(u64, WorkloadId) -> Control) -> ExchangeId {
        self.lane.send(self.now, agent, make, &[], 1).expect("it is up")
    }

    fn close(&mut self, agent: AgentId) -> Vec<LaneEvent> {
        let addr = self.lane.peers[usize::from(agent.0)].address.socket;
        let link = self.link(agent);
        self.event(Event::Closed { link, reason: CloseReason::Lost { addr } })
    }

    fn view(&self, agent: AgentId) -> AgentView {
        self.lane.views()[usize::from(agent.0)]
    }
}

fn get(request: u64, workload: WorkloadId) -> Control {
    Control::get(request, workload, 9)
}

fn put(request: u64, workload: WorkloadId) -> Control {
    Control::put(request, workload, 1)
}

fn status(request: u64, workload: WorkloadId) -> Control {
    Control::request(Op::Status, request, workload)
}

#[test]
fn an_agent_is_up_once_it_has_answered_the_hello() {
    let mut play = Play::new(2);
    assert!(play.drive().is_empty());
    let hello = play.greet(A);
    assert!(!play.lane.is_up(A) && !play.lane.has_been_up(A));
    let events = play.reply(hello, Status::Ok, |control| control.compare = U64::new(5));
    assert!(
        matches!(events[..], [LaneEvent::Up { agent: A, session: 5, lost: false }]),
        "{events:?}"
    );
    assert!(play.lane.is_up(A) && !play.lane.is_up(B));
    assert!(play.lane.send(play.now, B, get, &[], 1).is_err(), "B is not up");
}

#[test]
fn another_session_says_that_the_pages_are_lost() {
    let mut play = Play::up(1);
    for (session, expected) in [(1, false), (2, true), (2, false)] {
        play.close(A);
        play.wait(RETRY);
        play.drive();
        let events = play.connect(A, session);
        assert!(
            matches!(events[..], [LaneEvent::Up { agent: A, lost, .. }] if lost == expected),
            "{session}: {events:?}"
        );
    }
}

#[test]
fn an_exchange_is_in_flight_until_it_is_over_and_counted_once() {
    let mut play = Play::up(1);
    let exchanges: Vec<ExchangeId> = (0..4).map(|_| play.send(A, get)).collect();
    assert_eq!(play.view(A).inflight, 4);
    for (n, &exchange) in exchanges.iter().enumerate().take(3) {
        play.reply(exchange, Status::Ok, |_| ());
        match n {
            0 => drop(play.event(Event::Complete { exchange })),
            1 => drop(play.event(Event::Aborted { exchange, reason: AbortReason::Peer })),
            _ => play.lane.abandon(play.now, exchange),
        }
        assert_eq!(play.view(A).inflight, 3 - n as u32, "after exchange {n}");
    }
    play.lane.abandon(play.now, exchanges[3]);
    assert_eq!(play.view(A).inflight, 0);
}

#[test]
fn a_page_that_is_not_found_is_no_timeout() {
    let mut play = Play::up(1);
    let before = play.view(A);
    let exchange = play.send(A, get);
    let other = play.send(A, get);
    let events = play.reply(exchange, Status::NotFound, |_| ());
    assert!(matches!(events[..], [LaneEvent::Reply { .. }]), "{events:?}");
    play.lane.abandon(play.now, exchange);
    let view = play.view(A);
    assert_eq!(view.refusals, before.refusals, "it has answered, and refused nothing");
    assert_eq!(view.inflight, 1, "the other one");
    play.wait(Duration::from_secs(2));
    play.lane.abandon(play.now, other);
    assert!(play.view(A).refusals > before.refusals, "that one was not answered");
}

#[test]
fn what_a_link_takes_with_it_is_failed_once() {
    let mut play = Play::up(1);
    let exchange = play.send(A, get);
    play.lane
        .transport
        .events
        .push_back(Event::Aborted { exchange, reason: AbortReason::LinkClosed });
    let events = play.close(A);
    assert!(
        matches!(events[..], [LaneEvent::Failed { .. }, LaneEvent::Down { agent: A, .. }]),
        "{events:?}"
    );
    assert_eq!(play.view(A).inflight, 0);
    play.wait(RETRY);
    play.drive();
    play.connect(A, 1);
    let again = play.send(A, get);
    assert_eq!(play.view(A).inflight, 1);
    play.lane.abandon(play.now, exchange);
    assert_eq!(play.view(A).inflight, 1, "an exchange of the old link is not of the new one");
    play.lane.abandon(play.now, again);
}

#[test]
fn an_agent_that_drained_and_came_back_gets_pages_again() {
    let mut play = Play::up(1);
    let exchange = play.send(A, put);
    play.reply(exchange, Status::Draining, |control| control.credits = U32::new(0));
    play.event(Event::Complete { exchange });
    assert!(play.lane.is_up(A) && !play.view(A).up, "it gives pages back, and takes none");
    // A reply that does not say whether it drains changes nothing.
    let exchange = play.send(A, get);
    play.reply(exchange, Status::Ok, |_| ());
    play.event(Event::Complete { exchange });
    assert!(!play.view(A).up);
    play.close(A);
    play.wait(RETRY);
    play.drive();
    play.connect(A, 2);
    assert!(play.view(A).up, "it is a new agent");
}

#[test]
fn an_agent_that_no_longer_drains_says_so_by_its_status() {
    let mut play = Play::up(1);
    for (answer, up) in [(Status::Draining, false), (Status::Ok, true)] {
        let exchange = play.send(A, status);
        play.reply(exchange, answer, |_| ());
        play.event(Event::Complete { exchange });
        assert_eq!(play.view(A).up, up, "{answer:?}");
    }
}

#[test]
fn the_reason_of_a_refusal_outlives_the_link() {
    let mut play = Play::new(1);
    play.drive();
    let hello = play.greet(A);
    let events = play.reply(hello, Status::Full, |_| ());
    assert!(matches!(events[..], [LaneEvent::Down { agent: A, .. }]), "{events:?}");
    assert!(play.lane.reason(A).contains("refused"), "{}", play.lane.reason(A));
    assert_eq!(play.lane.transport.closed.len(), 1);
}

#[test]
fn a_hello_without_an_answer_is_given_up() {
    let mut play = Play::new(1);
    play.drive();
    play.greet(A);
    for step in ["the hello", "the pause"] {
        let deadline = play.lane.deadline().expect("the wait has a deadline");
        assert!(deadline <= play.now + Duration::from_secs(5), "{step}");
        play.now = deadline;
        play.drive();
    }
    assert_eq!(play.lane.transport.closed.len(), 1, "the link was closed");
    assert_eq!(play.lane.transport.connecting.len(), 2, "it was tried again");
    assert!(play.lane.reason(A).contains("hello"), "{}", play.lane.reason(A));
}

#[test]
fn refused_pages_are_counted() {
    let mut play = Play::up(1);
    let make = |request, workload| Control::put(request, workload, 3);
    let exchange = play.lane.send(play.now, A, make, &[], 3).expect("it is up");
    play.reply(exchange, Status::Full, |control| control.done = U64::new(0b101));
    play.event(Event::Complete { exchange });
    assert_eq!(play.lane.refusals(A), 1);
    assert_eq!(play.view(A).refusals, 1);
}
