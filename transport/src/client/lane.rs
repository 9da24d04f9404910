//! One endpoint and a link to each agent, kept up; and what agents say of themselves.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use gms_policy::ids::{AgentId, PageCount};
use gms_policy::placement::{AgentView, Feedback, Reply, nearest};
use gms_policy::redundancy::AgentSet;
use gms_policy::spread::Site;

use super::roster::{AgentAddress, Roster};
use super::{ClientEvent, Request};
use crate::message::{Control, HelloReply, Op, PagesReply, Status, WorkloadId, Zone};
use crate::{CloseCode, CloseReason, ExchangeId, LinkId, PeerId, Transport};

/// How long an agent keeps the workload's pages when it hears nothing.
pub const LEASE: Duration = Duration::from_secs(60);
/// Pause before an agent that could not be reached is tried again.
pub(super) const RETRY: Duration = Duration::from_millis(300);
/// For an agent to answer the hello of a link that is up.
const HELLO_DEADLINE: Duration = Duration::from_secs(3);
/// Why an agent without [`FEATURE_LENGTHS`](crate::message::FEATURE_LENGTHS), the only feature that is ever required, is not used.
const NO_LENGTHS: &str = "it cannot hold sealed pages: upgrade it, or run with --seal off";

/// What is said of an agent that gives nothing, though nothing is wrong with its link.
const SILENT: &str = "its link is up, but it does not answer in time";

enum Phase {
    /// Left by `connect`.
    Down { retry_at: Instant },
    /// Left by `handle_connected` or `handle_closed`, which the transport promises within a bounded time.
    Connecting,
    /// Left by `handle_reply`, by `handle_closed`, or at the deadline.
    Greeting { link: LinkId, node: PeerId, hello: ExchangeId, deadline: Instant },
    /// Left by `handle_closed`.
    Up(LinkId),
}

pub(super) struct Peer {
    pub address: AgentAddress,
    site: Site,
    phase: Phase,
    pub feedback: Feedback,
    /// The session that the agent gave us last.
    session: Option<u64>,
    /// Requests whose replies have not come whole.
    pub inflight: u32,
    /// When it answered last.
    pub heard: Option<Instant>,
    /// When the last that it has answered was asked.
    asked: Option<Instant>,
    /// It has left a request unanswered for long, and not answered any since: until then it is not waited for.
    pub silent_until: Option<Instant>,
    /// Pages refused.
    refusals: u64,
    /// Since when it serves pages and takes none, because it is about to end. Told by the replies to puts and status requests.
    draining: Option<Instant>,
    /// Pages that it wants taken away, as its last reply said.
    recall: u32,
    /// Why it cannot be used; none once it can, and before it was called.
    reason: Option<String>,
}

impl Peer {
    fn new(now: Instant, address: AgentAddress) -> Peer {
        Peer {
            address,
            site: Site::default(),
            phase: Phase::Down { retry_at: now },
            feedback: Feedback::default(),
            session: None,
            inflight: 0,
            heard: None,
            asked: None,
            silent_until: None,
            refusals: 0,
            draining: None,
            recall: 0,
            reason: None,
        }
    }

    /// The link and the session on it, if the agent can be used.
    pub(super) fn link(&self) -> Option<(LinkId, u64)> {
        match self.phase {
            Phase::Up(link) => Some((link, self.session.unwrap_or_default())),
            Phase::Down { .. } | Phase::Connecting | Phase::Greeting { .. } => None,
        }
    }

    /// A request of `pages` pages is under way.
    pub(super) fn note_sent(&mut self, op: Op, pages: u16) {
        self.inflight += 1;
        if op == Op::Put {
            self.feedback.on_put(PageCount(pages.into()));
        }
    }

    /// What the reply to a request tells of the agent.
    pub(super) fn note_reply(&mut self, now: Instant, request: &Request, control: &Control) {
        let (op, pages) = (request.op, request.pages);
        let elapsed = now.saturating_duration_since(request.sent);
        let mut reply = reply_of(control, elapsed);
        if op == Op::Put {
            let done = control.answer::<PagesReply>().done;
            let refused = u32::from(pages).saturating_sub(done.count_ones());
            reply.refused = refused > 0;
            self.refusals += u64::from(refused);
        }
        // Pages that it should have, and does not give now: others that have them are asked first.
        reply.refused |= op == Op::Get && control.status() == Status::Denied;
        if matches!(op, Op::Put | Op::Status) {
            let is_so = control.status() == Status::Draining;
            self.draining = is_so.then(|| self.draining.unwrap_or(now));
        }
        self.asked = self.asked.max(Some(request.sent));
        self.recall = control.feedback().recall;
        (self.heard, self.silent_until) = (Some(now), None);
        self.feedback.on_reply(reply);
    }
}

/// See the module's documentation.
pub struct Lane<T> {
    pub(super) transport: T,
    pub(super) workload: WorkloadId,
    incarnation: u64,
    /// Features without which an agent is not used.
    required: u64,
    pub(super) peers: Vec<Peer>,
    /// May know more agents, and more of them, than the peers do: they hear of it when links are looked after.
    roster: Roster,
    /// Which version of it they know.
    version: usize,
    pub(super) links: BTreeMap<LinkId, AgentId>,
}

impl<T: Transport> Lane<T> {
    /// A lane whose links are yet to be made: [`Client::drive`](super::Client::drive) does it.
    pub fn new(
        now: Instant,
        transport: T,
        workload: WorkloadId,
        agents: &[AgentAddress],
    ) -> Lane<T> {
        Lane {
            transport,
            workload,
            incarnation: 1,
            required: 0,
            peers: agents.iter().map(|address| Peer::new(now, address.clone())).collect(),
            roster: Roster::new(agents),
            version: 0,
            links: BTreeMap::new(),
        }
    }

    /// The same, whose agents are the first of `roster`: others may be added there.
    pub fn following(self, roster: Roster) -> Lane<T> {
        Lane { roster, ..self }
    }

    /// The same of a workload that another pager paged before, to which agents had given these sessions. Each pager's `incarnation` is greater than
    /// those of the ones before that have put anything (the first one's is 1): agents deny what comes late of an earlier one.
    pub fn resuming(
        mut self,
        incarnation: u64,
        sessions: impl Fn(AgentId) -> Option<u64>,
    ) -> Lane<T> {
        self.incarnation = incarnation;
        for (index, peer) in self.peers.iter_mut().enumerate() {
            peer.session = sessions(AgentId(index as u8));
        }
        self
    }

    pub(super) fn peer(&mut self, agent: AgentId) -> &mut Peer {
        &mut self.peers[usize::from(agent.0)]
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

    /// Where an agent stands, as far as is known.
    pub fn zone(&self, agent: AgentId) -> Zone {
        self.peers[usize::from(agent.0)].address.zone
    }

    /// The agents, for all lanes.
    pub fn roster(&self) -> &Roster {
        &self.roster
    }

    /// The number of the agent that told of it; `None` if the user named it.
    pub fn learned_from(&self, agent: AgentId) -> Option<usize> {
        let teller = self.peers[usize::from(agent.0)].address.learned_from.as_ref()?;
        self.peers.iter().position(|peer| peer.address.name == *teller)
    }

    /// Why the agent cannot be used, or gives nothing.
    pub fn reason(&self, agent: AgentId) -> &str {
        let not_known = if self.is_up(agent) { SILENT } else { "not connected yet" };
        self.failure(agent).unwrap_or(not_known)
    }

    /// Why the agent cannot be used, if it is known.
    pub fn failure(&self, agent: AgentId) -> Option<&str> {
        self.peers[usize::from(agent.0)].reason.as_deref()
    }

    /// Whether requests can be sent to the agent.
    pub fn is_up(&self, agent: AgentId) -> bool {
        matches!(self.peers[usize::from(agent.0)].phase, Phase::Up(_))
    }

    /// Whether the agent has said that it is about to end.
    pub fn is_draining(&self, agent: AgentId) -> bool {
        self.draining_since(agent).is_some()
    }

    /// When the agent was found to be about to end, if it is.
    pub fn draining_since(&self, agent: AgentId) -> Option<Instant> {
        self.peers[usize::from(agent.0)].draining
    }

    /// Agents that have answered nothing that they were asked after `since`.
    pub fn unheard(&self, since: Instant) -> AgentSet {
        let peers = self.agents().zip(&self.peers);
        peers.filter(|(_, peer)| peer.asked <= Some(since)).map(|(agent, _)| agent).collect()
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
        let last_resort = peer.address.last_resort;
        let linked = self.is_up(id);
        let up = linked && peer.draining.is_none();
        let site = peer.site;
        AgentView { last_resort, linked, site, ..peer.feedback.view(id, up, peer.inflight) }
    }

    /// The agents that are asked when no other one can give a page.
    pub fn last_resorts(&self) -> AgentSet {
        let is_last = |agent: &AgentId| self.peers[usize::from(agent.0)].address.last_resort;
        self.agents().filter(is_last).collect()
    }

    /// Pages which the agent has refused so far.
    pub fn refusals(&self, agent: AgentId) -> u64 {
        self.peers[usize::from(agent.0)].refusals
    }

    /// Connects again where it is time, and gives up who does not answer a hello.
    pub(super) fn keep_up(&mut self, now: Instant) {
        if self.roster.version() != self.version {
            self.follow_roster(now);
        }
        for index in 0..self.peers.len() {
            match self.peers[index].phase {
                Phase::Down { retry_at } if retry_at <= now => self.connect(now, index),
                Phase::Greeting { link, deadline, .. } if deadline <= now => {
                    self.peers[index].reason = Some("it does not answer the hello".into());
                    self.transport.close(now, link, CloseCode::Goodbye);
                }
                _ => {}
            }
        }
    }

    fn follow_roster(&mut self, now: Instant) {
        // Before what it says is read: what is learned meanwhile is read again.
        self.version = self.roster.version();
        for (number, (address, site)) in self.roster.sited().into_iter().enumerate() {
            if number == self.peers.len() {
                self.peers.push(Peer::new(now, address.clone()));
            }
            let peer = &mut self.peers[number];
            (peer.address.zone, peer.site) = (address.zone, site);
        }
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
                self.peers[index].reason = Some(error.to_string());
            }
        }
    }

    /// A link is up, and this node at its other end: it is greeted.
    pub(super) fn handle_connected(&mut self, now: Instant, link: LinkId, node: PeerId) {
        let Some(&agent) = self.links.get(&link) else { return };
        let peer = &mut self.peers[usize::from(agent.0)];
        if let Some(reason) = peer.address.refusal(node) {
            peer.reason = Some(reason);
            return self.transport.close(now, link, CloseCode::Goodbye);
        }
        let lease_ms = LEASE.as_millis() as u64;
        let hello = Control::hello_of(0, self.workload, lease_ms, self.incarnation);
        match self.transport.request(now, link, &hello, &[]) {
            Ok(hello) => {
                let deadline = now + HELLO_DEADLINE;
                self.peers[usize::from(agent.0)].phase =
                    Phase::Greeting { link, node, hello, deadline };
            }
            Err(error) => {
                self.peers[usize::from(agent.0)].reason = Some(error.to_string());
                self.transport.close(now, link, CloseCode::Goodbye);
            }
        }
    }

    /// A reply that nobody else awaits has come: that to a hello, or none.
    pub(super) fn handle_reply(
        &mut self,
        now: Instant,
        exchange: ExchangeId,
        control: &Control,
    ) -> Option<ClientEvent> {
        let agent = *self.links.get(&exchange.link)?;
        let peer = &mut self.peers[usize::from(agent.0)];
        let Phase::Greeting { link, node, hello, .. } = peer.phase else { return None };
        if hello != exchange {
            return None;
        }
        let missing = self.required & !control.answer::<HelloReply>().features;
        let refusal = match control.status() {
            Status::Ok if missing != 0 => Some(NO_LENGTHS.into()),
            Status::Ok => self.roster.bind(&peer.address, node),
            status => Some(format!("it refused the workload ({status:?})")),
        };
        if let Some(reason) = refusal {
            peer.reason = Some(reason);
            self.transport.close(now, link, CloseCode::Goodbye);
            return None;
        }
        (peer.heard, peer.silent_until) = (Some(now), None);
        let session = control.session;
        peer.session = Some(session);
        (peer.phase, peer.reason) = (Phase::Up(link), None);
        // An agent that drains takes no hello of a workload without pages, and says so in its next status otherwise.
        peer.draining = None;
        let elapsed = self.transport.path(link).map_or(Duration::ZERO, |path| path.rtt);
        peer.recall = control.feedback().recall;
        peer.feedback.on_reply(reply_of(control, elapsed));
        Some(ClientEvent::Up { agent, session })
    }

    /// A link has ended.
    pub(super) fn handle_closed(
        &mut self,
        now: Instant,
        link: LinkId,
        reason: &CloseReason,
    ) -> Option<ClientEvent> {
        let agent = self.links.remove(&link)?;
        let peer = &mut self.peers[usize::from(agent.0)];
        peer.phase = Phase::Down { retry_at: now + RETRY };
        // Whoever closed it here has said why.
        if *reason != CloseReason::Local || peer.reason.is_none() {
            peer.reason = Some(reason.to_string());
        }
        Some(ClientEvent::Down { agent, reason: peer.reason.clone().unwrap_or_default() })
    }

    /// When [`Lane::keep_up`] has something to do.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let due = self.peers.iter().filter_map(|peer| match peer.phase {
            Phase::Down { retry_at } => Some(retry_at),
            Phase::Greeting { deadline, .. } => Some(deadline),
            Phase::Connecting | Phase::Up(_) => None,
        });
        due.min()
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
