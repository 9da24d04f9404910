//! Tests of a lane: links, sessions, and what is told of agents.

use std::time::{Duration, Instant};

use gms_policy::ids::{AgentId, ContentId};
use gms_policy::placement::AgentView;

use super::{Lane, RETRY};
use crate::client::script::Script;
use crate::client::{Checksum, Client, ClientEvent, Owner, PutId, Urgency, Wanted};
use crate::message::{Control, Feedback, HelloRequest, Op, Status, WorkloadId};
use crate::{
    AbortReason, CloseReason, Event, ExchangeId, Fingerprint, PeerId, PeerIdentity, TransportError,
};

const A: AgentId = AgentId(0);
const B: AgentId = AgentId(1);
const CHECKSUM: Checksum = Checksum::new(7);

/// A client, whose lane is looked at, and the time.
struct Play {
    client: Client<Script>,
    now: Instant,
}

impl Play {
    /// A lane to as many agents, none of them up.
    fn new(agents: u16) -> Play {
        let now = Instant::now();
        Play { client: Client::new(Lane::scripted(now, agents), CHECKSUM), now }
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

    fn drive(&mut self) -> Vec<ClientEvent> {
        self.client.drive(self.now).expect("the script does not fail");
        std::iter::from_fn(|| self.client.poll(self.now)).collect()
    }

    fn wait(&mut self, time: Duration) {
        self.now += time;
    }

    /// The link comes up and the hello is answered.
    fn connect(&mut self, agent: AgentId, session: u64) -> Vec<ClientEvent> {
        let hello = self.greet(agent);
        self.reply(hello, Status::Ok, |control| control.session = session)
    }

    /// The link comes up; returns the hello.
    fn greet(&mut self, agent: AgentId) -> ExchangeId {
        let (exchange, control) = self.client.come_up(self.now, agent);
        assert_eq!((control.op(), exchange.link), (Some(Op::Hello), self.client.lane.link(agent)));
        exchange
    }

    fn event(&mut self, event: Event) -> Vec<ClientEvent> {
        self.client.play(event);
        self.drive()
    }

    /// The agent answers, with room for 1000 pages.
    fn reply(
        &mut self,
        exchange: ExchangeId,
        status: Status,
        edit: impl FnOnce(&mut Control),
    ) -> Vec<ClientEvent> {
        let sent = self.client.lane.transport.sent.iter().find(|(id, _)| *id == exchange);
        let request = *sent.expect("it was asked");
        self.client.play_reply(&request, status, edit);
        self.drive()
    }

    fn send(&mut self, agent: AgentId, make: fn(u64, WorkloadId) -> Control) -> ExchangeId {
        self.try_send(agent, make, Owner::Nobody).expect("it is up")
    }

    fn try_send(
        &mut self,
        agent: AgentId,
        make: impl FnOnce(u64, WorkloadId) -> Control,
        owner: Owner,
    ) -> Result<ExchangeId, TransportError> {
        let control = make(self.client.next_request, self.client.lane.workload);
        self.client.send(self.now, agent, control, &[], owner)
    }

    /// The link comes up, and this node is at its other end.
    fn meet(&mut self, agent: AgentId, id: PeerId) -> Vec<ClientEvent> {
        let addr = self.client.lane.peers[usize::from(agent.0)].address.socket;
        let peer = PeerIdentity { id, fingerprint: Fingerprint([9; 32]), addr, is_node: true };
        let link = self.client.lane.link(agent);
        self.event(Event::Connected { link, peer })
    }

    /// The node answers the last hello.
    fn accept(&mut self, agent: AgentId) -> Vec<ClientEvent> {
        let link = self.client.lane.link(agent);
        let mut sent = self.client.lane.transport.sent.iter().rev();
        let hello = sent.find(|(id, _)| id.link == link).expect("a hello").0;
        self.reply(hello, Status::Ok, |control| control.session = 1)
    }

    /// The link to the agent was lost, and is asked for again.
    fn again(&mut self, agent: AgentId) {
        self.close(agent);
        self.wait(RETRY);
        self.drive();
    }

    fn close(&mut self, agent: AgentId) -> Vec<ClientEvent> {
        let addr = self.client.lane.peers[usize::from(agent.0)].address.socket;
        let link = self.client.lane.link(agent);
        self.event(Event::Closed { link, reason: CloseReason::Lost { addr } })
    }

    fn view(&self, agent: AgentId) -> AgentView {
        self.client.lane.views()[usize::from(agent.0)]
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
    assert!(!play.client.lane.is_up(A) && !play.client.lane.has_been_up(A));
    let events = play.reply(hello, Status::Ok, |control| control.session = 5);
    assert!(matches!(events[..], [ClientEvent::Up { agent: A, session: 5 }]), "{events:?}");
    assert!(play.client.lane.is_up(A) && !play.client.lane.is_up(B));
    assert!(play.try_send(B, get, Owner::Nobody).is_err(), "B is not up");
}

/// What went wrong before must not be given as the cause of what goes wrong later.
#[test]
fn an_agent_that_is_up_again_has_no_reason_to_be_down() {
    let mut play = Play::new(1);
    assert_eq!(play.client.lane.reason(A), "not connected yet");
    play.drive();
    play.meet(A, PeerId::Issued([A.0; 16]));
    let (hello, _) = *play.client.lane.transport.sent.last().expect("a hello");
    play.reply(hello, Status::Full, |_| ());
    assert!(play.client.lane.failure(A).is_some_and(|reason| reason.contains("refused")));
    play.again(A);
    play.meet(A, PeerId::Issued([A.0; 16]));
    play.accept(A);
    assert_eq!((play.client.lane.failure(A), play.client.lane.reason(A)), (None, super::SILENT));
}

#[test]
fn each_greeting_tells_its_session() {
    let mut play = Play::up(1);
    for expected in [1, 2, 2] {
        play.close(A);
        play.wait(RETRY);
        play.drive();
        let events = play.connect(A, expected);
        assert!(
            matches!(events[..], [ClientEvent::Up { agent: A, session }] if session == expected),
            "{events:?}"
        );
    }
}

#[test]
fn another_node_at_an_agents_address_is_not_the_agent() {
    let mut play = Play::up(1);
    let before = play.client.lane.transport.sent.len();
    let certificate = PeerId::Certificate(Fingerprint([9; 32]));
    for other in [PeerId::Issued([9; 16]), certificate] {
        play.again(A);
        let events = play.meet(A, other);
        assert!(matches!(events[..], [ClientEvent::Down { agent: A, .. }]), "{events:?}");
        assert_eq!(play.client.lane.transport.sent.len(), before, "it is not even greeted");
        let reason = play.client.lane.reason(A);
        let (known, address) = (PeerId::Issued([A.0; 16]), "127.0.0.1:7400 is another node now");
        assert!(
            reason.contains(address) && reason.contains(&format!("({other}, it was {known})")),
            "{reason}"
        );
        play.wait(RETRY);
        play.drive();
    }
    // The agent itself is as welcome as before.
    let events = play.connect(A, 1);
    assert!(matches!(events[..], [ClientEvent::Up { agent: A, session: 1 }]), "{events:?}");
}

#[test]
fn lanes_to_one_agent_know_the_same_node() {
    let mut play = Play::up(1);
    let address = play.client.lane.peers[0].address.clone();
    let lane = Lane::new(play.now, Script::new(), WorkloadId([7; 16]), &[address]);
    play.client = Client::new(lane, CHECKSUM);
    play.drive();
    assert!(matches!(play.meet(A, PeerId::Issued([9; 16]))[..], [ClientEvent::Down { .. }]));
    play.wait(RETRY);
    play.drive();
    assert!(matches!(play.connect(A, 1)[..], [ClientEvent::Up { .. }]));
}

#[test]
fn a_pager_says_that_it_comes_after_another() {
    let mut play = Play::new(1);
    let address = play.client.lane.peers[0].address.clone();
    let lane = || {
        let addresses = std::slice::from_ref(&address);
        Lane::new(play.now, Script::new(), WorkloadId([7; 16]), addresses)
    };
    for (lane, incarnation) in [(lane(), 1), (lane().resuming(65_537, |_| Some(1)), 65_537)] {
        play.client = Client::new(lane, CHECKSUM);
        play.drive();
        play.meet(A, PeerId::Issued([8; 16]));
        let (_, hello) = *play.client.lane.transport.sent.last().expect("a hello");
        assert_eq!(hello.body::<HelloRequest>().incarnation, incarnation);
    }
}

/// One that leaves, say: whoever takes its place at the address is the agent.
#[test]
fn a_node_that_refuses_the_workload_is_not_yet_the_agent() {
    let mut play = Play::new(1);
    play.drive();
    play.meet(A, PeerId::Issued([8; 16]));
    let (hello, _) = *play.client.lane.transport.sent.last().expect("a hello");
    play.reply(hello, Status::Draining, |_| ());
    play.again(A);
    play.meet(A, PeerId::Issued([9; 16]));
    assert!(
        matches!(play.accept(A)[..], [ClientEvent::Up { agent: A, .. }]),
        "{}",
        play.client.lane.reason(A)
    );
    play.again(A);
    assert!(matches!(play.meet(A, PeerId::Issued([8; 16]))[..], [ClientEvent::Down { .. }]));
}

/// Two lanes reach different nodes behind one address at once.
#[test]
fn the_first_node_that_takes_the_workload_is_the_agent() {
    let (mut play, mut other) = (Play::new(1), Play::new(1));
    other.client.lane.peers[0].address = play.client.lane.peers[0].address.clone();
    for (play, id) in [(&mut play, [8; 16]), (&mut other, [9; 16])] {
        play.drive();
        play.meet(A, PeerId::Issued(id));
    }
    assert!(matches!(play.accept(A)[..], [ClientEvent::Up { agent: A, .. }]));
    let events = other.accept(A);
    assert!(matches!(events[..], [ClientEvent::Down { agent: A, .. }]), "{events:?}");
    assert!(
        other.client.lane.reason(A).contains("is another node now"),
        "{}",
        other.client.lane.reason(A)
    );
    assert!(!other.client.lane.has_been_up(A));
}

#[test]
fn an_agent_without_an_id_may_get_one() {
    let mut play = Play::new(1);
    play.drive();
    for certificate in [[1; 32], [2; 32]] {
        play.meet(A, PeerId::Certificate(Fingerprint(certificate)));
        assert_eq!(play.client.lane.transport.closed, [], "{}", play.client.lane.reason(A));
        play.accept(A);
        play.again(A);
    }
    play.meet(A, PeerId::Issued([3; 16]));
    assert_eq!(play.client.lane.transport.closed, []);
    play.accept(A);
    play.again(A);
    // From then on it is bound to that.
    play.meet(A, PeerId::Certificate(Fingerprint([2; 32])));
    assert_eq!(play.client.lane.transport.closed.len(), 1);
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
            _ => drop(play.client.abandon(play.now, exchange)),
        }
        assert_eq!(play.view(A).inflight, 3 - n as u32, "after exchange {n}");
    }
    play.client.abandon(play.now, exchanges[3]);
    assert_eq!(play.view(A).inflight, 0);
}

#[test]
fn a_page_that_is_not_found_is_no_timeout() {
    let mut play = Play::up(1);
    let before = play.view(A);
    let exchange = play.send(A, get);
    let other = play.send(A, get);
    play.reply(exchange, Status::NotFound, |_| ());
    play.client.abandon(play.now, exchange);
    let view = play.view(A);
    assert_eq!(view.refusals, before.refusals, "it has answered, and refused nothing");
    assert_eq!(view.inflight, 1, "the other one");
    play.wait(Duration::from_secs(2));
    play.client.abandon(play.now, other);
    assert!(play.view(A).refusals > before.refusals, "that one was not answered");
}

#[test]
fn pages_that_were_promised_and_do_not_come_are_a_timeout() {
    let mut play = Play::up(1);
    let wanted = vec![Wanted { id: ContentId(9), check: Some(0) }];
    for (status, promised) in [(Status::Ok, 1), (Status::NotFound, 0)] {
        let get = play.client.get(play.now, A, wanted.clone(), Urgency::Ahead);
        let (exchange, _) = *play.client.lane.transport.sent.last().expect("a get");
        play.reply(exchange, status, |control| *control = control.with_done(promised));
        assert_eq!(play.view(A).refusals, 0, "it has answered");
        play.client.cancel(play.now, get);
        assert_eq!(u64::from(play.view(A).refusals), promised, "{status:?}");
        assert_eq!(play.view(A).inflight, 0);
    }
}

#[test]
fn what_a_link_takes_with_it_is_failed_once() {
    let mut play = Play::up(1);
    let owner = Owner::Put(PutId(9));
    let exchange = play.try_send(A, put, owner).expect("it is up");
    play.client.play(Event::Aborted { exchange, reason: AbortReason::LinkClosed });
    let events = play.close(A);
    let [ClientEvent::Stored { put: PutId(9), pages: 0 }, ClientEvent::Down { agent: A, .. }] =
        events[..]
    else {
        panic!("{events:?}")
    };
    assert_eq!(play.view(A).inflight, 0);
    play.wait(RETRY);
    play.drive();
    play.connect(A, 1);
    let again = play.send(A, get);
    assert_eq!(play.view(A).inflight, 1);
    play.client.abandon(play.now, exchange);
    assert_eq!(play.view(A).inflight, 1, "an exchange of the old link is not of the new one");
    play.client.abandon(play.now, again);
}

#[test]
fn an_agent_that_drained_and_came_back_gets_pages_again() {
    let mut play = Play::up(1);
    let exchange = play.send(A, put);
    play.reply(exchange, Status::Draining, |control| {
        *control = control.with_feedback(Feedback::default());
    });
    play.event(Event::Complete { exchange });
    assert!(play.client.lane.is_up(A) && !play.view(A).up, "it gives pages back, and takes none");
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
    assert!(matches!(events[..], [ClientEvent::Down { agent: A, .. }]), "{events:?}");
    assert!(play.client.lane.reason(A).contains("refused"), "{}", play.client.lane.reason(A));
    assert_eq!(play.client.lane.transport.closed.len(), 1);
}

#[test]
fn a_hello_without_an_answer_is_given_up() {
    let mut play = Play::new(1);
    play.drive();
    play.greet(A);
    for step in ["the hello", "the pause"] {
        let deadline = play.client.deadline().expect("the wait has a deadline");
        assert!(deadline <= play.now + Duration::from_secs(5), "{step}");
        play.now = deadline;
        play.drive();
    }
    assert_eq!(play.client.lane.transport.closed.len(), 1, "the link was closed");
    assert_eq!(play.client.lane.transport.connecting.len(), 2, "it was tried again");
    assert!(play.client.lane.reason(A).contains("hello"), "{}", play.client.lane.reason(A));
}

#[test]
fn refused_pages_are_counted() {
    let mut play = Play::up(1);
    let make = |request, workload| Control::put(request, workload, 3);
    let exchange = play.try_send(A, make, Owner::Nobody).expect("it is up");
    play.reply(exchange, Status::Full, |control| {
        *control = control.with_done(0b101);
    });
    play.event(Event::Complete { exchange });
    assert_eq!(play.client.lane.refusals(A), 1);
    assert_eq!(play.view(A).refusals, 1);
}
