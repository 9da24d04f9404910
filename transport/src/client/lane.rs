//! One endpoint and a link to each agent, kept up; what agents say of themselves, and which requests they have not answered.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use gms_policy::ids::{AgentId, PageCount};
use gms_policy::placement::{AgentView, Feedback, Reply, nearest};
use gms_policy::redundancy::AgentSet;

use crate::message::{Control, HelloReply, Op, PagesReply, Status, WorkloadId};
use crate::{CloseCode, CloseReason, Event, ExchangeId, LinkId, PeerId, Transport, TransportError};

/// How long an agent keeps the workload's pages when it hears nothing.
pub const LEASE: Duration = Duration::from_secs(60);
/// Pause before an agent that could not be reached is tried again.
pub(super) const RETRY: Duration = Duration::from_millis(300);
/// For an agent to answer the hello of a link that is up.
const HELLO_DEADLINE: Duration = Duration::from_secs(3);
/// An agent that leaves a request unanswered for this long is not trusted with the only copy of a page: it may be down without the link
/// knowing it yet.
const SUSPECT: Duration = Duration::from_secs(1);
/// Why an agent without [`FEATURE_LENGTHS`](crate::message::FEATURE_LENGTHS), the only feature that is ever required, is not used.
const NO_LENGTHS: &str = "it cannot hold sealed pages: upgrade it, or run with --seal off";

/// An agent's address, its name for messages, and which node is there.
#[derive(Clone, Debug)]
pub struct AgentAddress {
    /// As the user gave it.
    pub name: String,
    /// Resolved.
    pub socket: SocketAddr,
    /// The first that has taken the workload, in any lane: the only one that is taken for the agent from then on.
    node: Arc<OnceLock<PeerId>>,
}

impl AgentAddress {
    /// An agent of which no node is known yet. All lanes to it are made from one such value.
    pub fn new(name: String, socket: SocketAddr) -> AgentAddress {
        AgentAddress { name, socket, node: Arc::default() }
    }

    /// The node has taken the workload: it is the agent from now on. A certificate without an id binds the address to no node. Returns why it is not,
    /// if another was the first.
    fn bind(&self, node: PeerId) -> Option<String> {
        if matches!(node, PeerId::Issued(_)) {
            self.node.get_or_init(|| node);
        }
        self.refusal(node)
    }

    /// Why a node that answers at the address is not the agent. A certificate without an id does not fit where a node is known.
    fn refusal(&self, node: PeerId) -> Option<String> {
        let known = self.node.get().filter(|known| **known != node)?;
        Some(format!(
            "{} is another node now ({node}, it was {known}), which never had the workload's pages: start the former one there again",
            self.socket
        ))
    }
}

/// What a lane tells its owner.
#[derive(Debug)]
pub enum LaneEvent {
    /// The agent can be used.
    Up {
        /// The agent.
        agent: AgentId,
        /// Its session: what it is given belongs to that, and what it was given in another is lost.
        session: u64,
    },
    /// The agent cannot be used for now; exchanges with it were answered by `Failed`.
    Down {
        /// The agent.
        agent: AgentId,
        /// Why; names it and says what to do.
        reason: String,
    },
    /// The reply's control message; its payload follows.
    Reply {
        /// What it answers.
        exchange: ExchangeId,
        /// The message.
        control: Box<Control>,
    },
    /// A piece of its payload.
    Payload {
        /// Of which reply.
        exchange: ExchangeId,
        /// Where in its payload.
        offset: usize,
        /// The bytes, in the buffer in which they were received.
        bytes: Bytes,
    },
    /// The reply is whole.
    Complete {
        /// Which.
        exchange: ExchangeId,
    },
    /// No reply will come.
    Failed {
        /// To what.
        exchange: ExchangeId,
    },
}

pub(super) enum Phase {
    /// Left by `connect`.
    Down { retry_at: Instant },
    /// Left by `greet` or `closed`, which the transport promises within a bounded time.
    Connecting,
    /// Left by `greeted`, by `closed`, or at the deadline.
    Greeting { link: LinkId, node: PeerId, hello: ExchangeId, deadline: Instant },
    /// Left by `closed`.
    Up(LinkId),
}

pub(super) struct Peer {
    pub address: AgentAddress,
    phase: Phase,
    feedback: Feedback,
    /// The session that the agent gave us last.
    session: Option<u64>,
    /// Entries of `Lane::open`.
    inflight: u32,
    /// Pages refused.
    refusals: u64,
    /// It serves pages and takes none, because it is about to end. Told by the replies to puts and status requests.
    draining: bool,
    /// Pages that it wants taken away, as its last reply said.
    recall: u32,
    /// Why it was last down.
    reason: String,
}

/// A request whose reply has not come whole.
pub(super) struct Open {
    agent: AgentId,
    sent: Instant,
    pages: u32,
    op: Op,
    /// The reply's control message came: whatever happens now, it is no time-out, unless pages were to follow (`gives`).
    answered: bool,
    gives: bool,
}

/// See the module's documentation.
pub struct Lane<T> {
    pub(super) transport: T,
    workload: WorkloadId,
    /// Features without which an agent is not used.
    required: u64,
    pub(super) peers: Vec<Peer>,
    pub(super) links: BTreeMap<LinkId, AgentId>,
    pub(super) open: BTreeMap<ExchangeId, Open>,
    pub(super) events: VecDeque<LaneEvent>,
    next_request: u64,
}

impl<T: Transport> Lane<T> {
    /// A lane whose links are yet to be made: [`Lane::drive`] does it.
    pub fn new(
        now: Instant,
        transport: T,
        workload: WorkloadId,
        agents: &[AgentAddress],
    ) -> Lane<T> {
        let peer = |address: &AgentAddress| Peer {
            address: address.clone(),
            phase: Phase::Down { retry_at: now },
            feedback: Feedback::default(),
            session: None,
            inflight: 0,
            refusals: 0,
            draining: false,
            recall: 0,
            reason: "not connected yet".into(),
        };
        Lane {
            transport,
            workload,
            required: 0,
            peers: agents.iter().map(peer).collect(),
            links: BTreeMap::new(),
            open: BTreeMap::new(),
            events: VecDeque::new(),
            next_request: 1,
        }
    }

    /// Agents whose links come up from now on are not used if they cannot do this (`FEATURE_...`).
    pub(super) fn require(&mut self, feature: u64) {
        self.required |= feature;
    }

    /// Number of agents, up or not.
    pub fn agents(&self) -> impl Iterator<Item = AgentId> + use<T> {
        (0..self.peers.len() as u8).map(AgentId)
    }

    /// The name of an agent.
    pub fn name(&self, agent: AgentId) -> &str {
        &self.peers[usize::from(agent.0)].address.name
    }

    /// Why the agent is, or was last, not usable.
    pub fn reason(&self, agent: AgentId) -> &str {
        &self.peers[usize::from(agent.0)].reason
    }

    /// Whether requests can be sent to the agent.
    pub fn is_up(&self, agent: AgentId) -> bool {
        matches!(self.peers[usize::from(agent.0)].phase, Phase::Up(_))
    }

    /// Whether the agent has said that it is about to end.
    pub fn is_draining(&self, agent: AgentId) -> bool {
        self.peers[usize::from(agent.0)].draining
    }

    /// Pages which the agent, that stays, wants taken away.
    pub fn recalled(&self, agent: AgentId) -> u32 {
        self.peers[usize::from(agent.0)].recall
    }

    /// Whether requests can be sent to one of them.
    pub fn is_any_up(&self, agents: AgentSet) -> bool {
        agents.agents().any(|agent| self.is_up(agent))
    }

    /// Whether requests could ever be sent to the agent.
    pub fn has_been_up(&self, agent: AgentId) -> bool {
        self.peers[usize::from(agent.0)].session.is_some()
    }

    /// What placement may know of every agent.
    pub fn views(&self) -> Vec<AgentView> {
        self.agents().zip(&self.peers).map(|(id, peer)| self.view(id, peer)).collect()
    }

    /// Whom of those that hold a page to ask for it.
    ///
    /// # Panics
    /// If nobody does.
    pub fn nearest(&self, holders: AgentSet) -> AgentId {
        let mut agents = holders.agents();
        let found = match (agents.next(), agents.next()) {
            (only, None) => only,
            _ => nearest(holders.agents().map(|id| self.view(id, &self.peers[usize::from(id.0)]))),
        };
        found.expect("somebody holds it")
    }

    fn view(&self, id: AgentId, peer: &Peer) -> AgentView {
        peer.feedback.view(id, self.is_up(id) && !peer.draining, peer.inflight)
    }

    /// Pages which the agent has refused so far.
    pub fn refusals(&self, agent: AgentId) -> u64 {
        self.peers[usize::from(agent.0)].refusals
    }

    /// Sends a request which concerns `pages` pages.
    pub fn send(
        &mut self,
        now: Instant,
        agent: AgentId,
        make: impl FnOnce(u64, WorkloadId) -> Control,
        payload: &[&[u8]],
        pages: u32,
    ) -> Result<ExchangeId, TransportError> {
        let Phase::Up(link) = self.peers[usize::from(agent.0)].phase else {
            return Err(TransportError::Busy);
        };
        let peer = &mut self.peers[usize::from(agent.0)];
        let session = peer.session.unwrap_or_default();
        let control = make(self.next_request, self.workload).with_session(session);
        self.next_request += 1;
        let op = control.op().expect("made here");
        let sent = self.transport.request(now, link, &control, payload);
        let exchange = sent.inspect_err(|_| peer.feedback.on_refusal())?;
        peer.inflight += 1;
        if op == Op::Put {
            peer.feedback.on_put(PageCount(pages.into()));
        }
        let open = Open { agent, sent: now, pages, op, answered: false, gives: false };
        self.open.insert(exchange, open);
        Ok(exchange)
    }

    /// Whether the agent can be trusted to keep the only copy of a page: it is up, does not drain, and answers.
    pub fn keeps(&self, now: Instant, agent: AgentId) -> bool {
        let silent = |open: &Open| {
            open.agent == agent && !open.answered && now.duration_since(open.sent) > SUSPECT
        };
        let peer = &self.peers[usize::from(agent.0)];
        self.is_up(agent) && !peer.draining && !self.open.values().any(silent)
    }

    /// Whether any reply has not come whole.
    pub fn awaits(&self) -> bool {
        !self.open.is_empty()
    }

    /// Requests of this kind whose replies have not come whole.
    pub fn under_way(&self, agent: AgentId, op: Op) -> usize {
        self.open.values().filter(|open| open.agent == agent && open.op == op).count()
    }

    /// Requests whose replies have not come whole within `limit`.
    pub fn sent_before(&self, now: Instant, limit: Duration) -> Vec<ExchangeId> {
        let late = |open: &Open| now.saturating_duration_since(open.sent) > limit;
        self.open.iter().filter(|(_, open)| late(open)).map(|(&exchange, _)| exchange).collect()
    }

    /// This process did not run for `missed`: agents are not blamed for that.
    pub fn excuse(&mut self, now: Instant, missed: Duration) {
        self.open.values_mut().for_each(|open| open.sent = now.min(open.sent + missed));
    }

    /// Gives up waiting for a reply, or for the rest of it.
    pub fn abandon(&mut self, now: Instant, exchange: ExchangeId) {
        self.transport.abandon(exchange);
        // Who has begun to give pages, and not gone on, has not given them.
        let is_late = |open: &Open| !open.answered || open.gives;
        if let Some(open) = self.end(exchange).filter(is_late) {
            let waited = now.saturating_duration_since(open.sent);
            self.peers[usize::from(open.agent.0)].feedback.on_timeout(waited);
        }
    }

    /// Receives, runs timers, keeps the links up. True if anything happened.
    pub fn drive(&mut self, now: Instant) -> std::io::Result<bool> {
        for index in 0..self.peers.len() {
            match self.peers[index].phase {
                Phase::Down { retry_at } if retry_at <= now => self.connect(now, index),
                Phase::Greeting { link, deadline, .. } if deadline <= now => {
                    self.peers[index].reason = "it does not answer the hello".into();
                    self.transport.close(now, link, CloseCode::Goodbye);
                }
                _ => {}
            }
        }
        self.transport.drive(now)
    }

    fn connect(&mut self, now: Instant, index: usize) {
        let address = self.peers[index].address.socket;
        match self.transport.connect(now, address) {
            Ok(link) => {
                self.links.insert(link, AgentId(index as u8));
                self.peers[index].phase = Phase::Connecting;
            }
            Err(error) => {
                self.peers[index].phase = Phase::Down { retry_at: now + RETRY };
                self.peers[index].reason = error.to_string();
            }
        }
    }

    /// Next event, if any.
    pub fn poll(&mut self, now: Instant) -> Option<LaneEvent> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Some(event);
            }
            match self.transport.poll(now)? {
                Event::Connected { link, peer } => self.greet(now, link, peer.id),
                Event::Closed { link, reason } => self.closed(now, link, &reason),
                Event::Control { exchange, control } => self.replied(now, exchange, control),
                Event::Payload { exchange, offset, bytes } if self.is_request(exchange) => {
                    return Some(LaneEvent::Payload { exchange, offset: offset as usize, bytes });
                }
                Event::Complete { exchange } if self.is_request(exchange) => {
                    self.end(exchange);
                    return Some(LaneEvent::Complete { exchange });
                }
                Event::Aborted { exchange, .. } if self.is_request(exchange) => {
                    if let Some(open) = self.end(exchange) {
                        self.peers[usize::from(open.agent.0)].feedback.on_refusal();
                    }
                    return Some(LaneEvent::Failed { exchange });
                }
                Event::Payload { .. } | Event::Complete { .. } | Event::Aborted { .. } => {}
            }
        }
    }

    fn is_request(&self, exchange: ExchangeId) -> bool {
        self.open.contains_key(&exchange)
    }

    /// The exchange is over: the only place where it stops to be in flight.
    fn end(&mut self, exchange: ExchangeId) -> Option<Open> {
        let open = self.open.remove(&exchange)?;
        self.peers[usize::from(open.agent.0)].inflight -= 1;
        Some(open)
    }

    fn greet(&mut self, now: Instant, link: LinkId, node: PeerId) {
        let Some(&agent) = self.links.get(&link) else { return };
        let peer = &mut self.peers[usize::from(agent.0)];
        if let Some(reason) = peer.address.refusal(node) {
            peer.reason = reason;
            return self.transport.close(now, link, CloseCode::Goodbye);
        }
        let hello = Control::hello(0, self.workload, LEASE.as_millis() as u64);
        match self.transport.request(now, link, &hello, &[]) {
            Ok(hello) => {
                let deadline = now + HELLO_DEADLINE;
                self.peers[usize::from(agent.0)].phase =
                    Phase::Greeting { link, node, hello, deadline };
            }
            Err(error) => {
                self.peers[usize::from(agent.0)].reason = error.to_string();
                self.transport.close(now, link, CloseCode::Goodbye);
            }
        }
    }

    /// `node`, at the other end of the link, has answered the hello.
    fn greeted(
        &mut self,
        now: Instant,
        agent: AgentId,
        (link, node): (LinkId, PeerId),
        control: &Control,
    ) {
        let peer = &mut self.peers[usize::from(agent.0)];
        let missing = self.required & !control.answer::<HelloReply>().features;
        let refusal = match control.status() {
            Status::Ok if missing != 0 => Some(NO_LENGTHS.into()),
            Status::Ok => peer.address.bind(node),
            status => Some(format!("it refused the workload ({status:?})")),
        };
        if let Some(reason) = refusal {
            peer.reason = reason;
            return self.transport.close(now, link, CloseCode::Goodbye);
        }
        let session = control.session;
        peer.session = Some(session);
        peer.phase = Phase::Up(link);
        // An agent that drains takes no hello of a workload without pages, and says so in its next status otherwise.
        peer.draining = false;
        let elapsed = self.transport.path(link).map_or(Duration::ZERO, |path| path.rtt);
        peer.recall = control.feedback().recall;
        peer.feedback.on_reply(reply_of(control, elapsed));
        self.events.push_back(LaneEvent::Up { agent, session });
    }

    fn closed(&mut self, now: Instant, link: LinkId, reason: &CloseReason) {
        let Some(agent) = self.links.remove(&link) else { return };
        let peer = &mut self.peers[usize::from(agent.0)];
        peer.phase = Phase::Down { retry_at: now + RETRY };
        // Whoever closed it here has said why.
        if *reason != CloseReason::Local {
            peer.reason = reason.to_string();
        }
        let reason = peer.reason.clone();
        self.events.push_back(LaneEvent::Down { agent, reason });
    }

    fn replied(&mut self, now: Instant, exchange: ExchangeId, control: Control) {
        let Some(&agent) = self.links.get(&exchange.link) else { return };
        let peer = &mut self.peers[usize::from(agent.0)];
        if let Phase::Greeting { link, node, hello, .. } = peer.phase
            && hello == exchange
        {
            return self.greeted(now, agent, (link, node), &control);
        }
        let Some(open) = self.open.get_mut(&exchange) else { return };
        open.answered = true;
        let mut reply = reply_of(&control, now.saturating_duration_since(open.sent));
        if open.op == Op::Put {
            let refused =
                open.pages.saturating_sub(control.answer::<PagesReply>().done.count_ones());
            reply.refused = refused > 0;
            peer.refusals += u64::from(refused);
        }
        if open.op == Op::Get {
            // Pages that it should have, and does not give now: others that have them are asked first.
            reply.refused |= control.status() == Status::Denied;
            open.gives = control.answer::<PagesReply>().done != 0;
        }
        if matches!(open.op, Op::Put | Op::Status) {
            peer.draining = control.status() == Status::Draining;
        }
        peer.recall = control.feedback().recall;
        peer.feedback.on_reply(reply);
        self.events.push_back(LaneEvent::Reply { exchange, control: Box::new(control) });
    }

    /// Transmits what was queued.
    pub fn flush(&mut self, now: Instant) -> std::io::Result<()> {
        self.transport.flush(now)
    }

    /// When [`Lane::drive`] must be called next although nothing arrives.
    pub fn deadline(&self) -> Option<Instant> {
        let retries = self.peers.iter().filter_map(|peer| match peer.phase {
            Phase::Down { retry_at } => Some(retry_at),
            Phase::Greeting { deadline, .. } => Some(deadline),
            Phase::Connecting | Phase::Up(_) => None,
        });
        retries.chain(self.transport.deadline()).min()
    }

    /// Readable when something arrives.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.transport.fd()
    }

    /// Ends every link.
    pub fn close(&mut self, now: Instant) {
        let links: Vec<LinkId> = self.links.keys().copied().collect();
        for link in links {
            self.transport.close(now, link, CloseCode::Goodbye);
        }
        // The process is about to end: what cannot be sent now, the lease will do.
        let _ = self.transport.flush(now);
    }
}

fn reply_of(control: &Control, elapsed: Duration) -> Reply {
    let feedback = control.feedback();
    Reply {
        elapsed,
        queue: Duration::from_nanos(feedback.queue_ns.into()),
        service: Duration::from_nanos(feedback.service_ns.into()),
        frames_free: PageCount(feedback.frames_free.into()),
        credits: PageCount(feedback.credits_put.into()),
        refused: matches!(control.status(), Status::Full | Status::Failed),
    }
}

#[cfg(test)]
mod tests;
