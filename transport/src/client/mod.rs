//! The agents as any of their users sees them.
//!
//! A [`Client`] sends gets, puts and discards over its [`Lane`], which keeps a link to each agent, checks what comes back
//! and repeats what is not answered. It is driven like a [`Transport`]: `drive`, `poll` until empty, [`Client::expire`], `poll`,
//! [`Client::send_unsent`], `poll`, then `flush`; it reads no clock.
//! Requests are named by ids of the client's own, which are never used again: an agent, a link or an exchange may
//! come and go behind them.

mod get;
mod lane;
mod roster;
#[cfg(any(test, feature = "script"))]
pub mod script;
mod seal;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use gms_policy::ids::{AgentId, ContentId};
use zerocopy::IntoBytes;

use self::get::Get;
pub use self::get::{Urgency, Wanted};
pub use self::lane::{LEASE, Lane};
pub use self::roster::{AgentAddress, Roster};
use self::seal::Envelope;
pub use self::seal::{Checksum, NoRandomness, SEALED_LEN, Seal};
use crate::message::{
    Control, DISCARD_MAX, FEATURE_LENGTHS, MemberEntry, Op, PAGES_MAX, PageDescriptor, PagesReply,
    Priority, Status,
};
use crate::{CloseCode, ExchangeId, LinkId, Transport, TransportError};

/// A get without a reply, or without the rest of it, is repeated or given up after this.
pub const RETRY: Duration = Duration::from_secs(2);
/// What an agent has denied is not asked of it again before.
pub const DENIED_PAUSE: Duration = Duration::from_millis(1);
/// A demanded page that has not come after this is not asked for again, and reported as [`Failure::Unanswered`] when the
/// request under way has ended: after [`RETRY`] at the latest.
pub const GET_DEADLINE: Duration = Duration::from_secs(15);
/// The same for a get of [`Urgency::Bulk`], for a put and for any other request.
pub const PUT_DEADLINE: Duration = Duration::from_secs(5);
/// An agent that leaves a request unanswered for this long is not trusted with the only copy of a page: it may be down
/// without the link knowing it yet.
const SUSPECT: Duration = Duration::from_secs(1);
/// The same of one that has answered nothing else for so long either, though another agent has answered since.
const QUIET: Duration = Duration::from_millis(300);
/// Who has left a request unanswered for this long when it was given up, and for so many times what its answers usually take, is not waited for until it
/// answers, but no longer than until its link would have been lost.
const SILENCE: Duration = Duration::from_millis(100);
const SILENCE_TIMES: u32 = 4;
const SILENCE_LASTS: Duration = Duration::from_secs(6);
/// Times are compared with these limits this often, however many turns the owner's loop takes.
const EXPIRE_EVERY: Duration = Duration::from_millis(10);
const _: () = assert!(RETRY.as_secs() < PUT_DEADLINE.as_secs());
const _: () = assert!(PUT_DEADLINE.as_secs() < GET_DEADLINE.as_secs());

/// Names a get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GetId(u64);

/// Names a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PutId(u64);

/// Why pages do not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The agent answered so: it does not have them.
    NotHeld(Status),
    /// The agent was not reached, or sent wrong bytes, and no thread waits for them by this get.
    GivenUp,
    /// A thread waits for the page, and the agent has not given it for [`GET_DEADLINE`].
    Unanswered,
}

/// What a client reports. Sets of pages are masks: bit i is page i of the get or put.
#[derive(Debug)]
pub enum ClientEvent {
    /// The agent can be used.
    Up {
        /// The agent.
        agent: AgentId,
        /// Its session: what it is given belongs to that.
        session: u64,
    },
    /// The agent cannot be used for now.
    Down {
        /// The agent.
        agent: AgentId,
        /// Why; names it and says what to do.
        reason: String,
    },
    /// The agent has begun to answer.
    Answered {
        /// The get.
        get: GetId,
        /// The reply's control message.
        control: Box<Control>,
    },
    /// Pages have come, whole and right.
    Arrived {
        /// The get.
        get: GetId,
        /// Which of its pages.
        pages: Range<usize>,
        /// Their bytes, one page behind the other.
        bytes: Bytes,
    },
    /// A page has come which is not the one that was put: its seal or its checksum is wrong.
    Wrong {
        /// The get.
        get: GetId,
        /// Which of its pages.
        page: usize,
    },
    /// Pages do not come by this get.
    Failed {
        /// The get.
        get: GetId,
        /// Which of its pages.
        pages: u64,
        /// Why.
        failure: Failure,
    },
    /// The last event of a get.
    Ended {
        /// The get.
        get: GetId,
    },
    /// The only event of a put.
    Stored {
        /// The put.
        put: PutId,
        /// The pages that the agent has stored.
        pages: u64,
    },
    /// What an agent says of who is a member; none if it does not say.
    Members {
        /// The agent.
        agent: AgentId,
        /// The members.
        members: Vec<MemberEntry>,
    },
}

/// Whom a reply is for.
#[derive(Debug)]
enum Owner {
    Get(GetId),
    Put(PutId),
    /// Nobody, but if none comes, see [`Client::take_unheard`].
    Discard(Vec<ContentId>),
    /// A question who is a member, and what has come of the answer.
    Members(Vec<u8>),
    Nobody,
}

/// A request whose reply has not come whole.
#[derive(Debug)]
struct Request {
    agent: AgentId,
    op: Op,
    /// Pages that it names.
    pages: u16,
    owner: Owner,
    sent: Instant,
    /// The reply's control message has come.
    answered: bool,
    /// Pages that the agent, by that, sends (of a get) or has stored (of a put). Bit i is page i.
    done: u64,
}

impl Request {
    /// The reply's control message has come.
    fn handle_reply(&mut self, control: &Control) {
        let (status, done) = (control.status(), control.answer::<PagesReply>().done);
        self.answered = true;
        self.done = match self.owner {
            Owner::Get(_) => done,
            Owner::Put(_) if matches!(status, Status::Ok | Status::Full | Status::Draining) => done,
            // Else it had no room for the request, and does not know of it.
            Owner::Discard(_) if !matches!(status, Status::Denied | Status::Failed) => u64::MAX,
            Owner::Members(_) if status == Status::Ok => 1,
            Owner::Put(_) | Owner::Discard(_) | Owner::Members(_) | Owner::Nobody => 0,
        };
    }
}

/// See the module's documentation.
pub struct Client<T> {
    lane: Lane<T>,
    envelope: Envelope,
    /// For the sealed pages of a put: kept, so that no put takes memory.
    sealed: Vec<u8>,
    gets: BTreeMap<GetId, Get>,
    requests: BTreeMap<ExchangeId, Request>,
    /// The get whose bytes came last: they may hold more than one step.
    arriving: Option<GetId>,
    events: VecDeque<ClientEvent>,
    /// Discards that were not answered.
    unheard: Vec<(AgentId, Vec<ContentId>)>,
    /// Whether a get may be unsent.
    has_unsent: bool,
    next_expiry: Option<Instant>,
    /// Of a get or a put.
    next_id: u64,
    /// Of a message.
    next_request: u64,
}

impl<T: Transport> Client<T> {
    /// A client whose links are yet to be made: [`Client::drive`] does it.
    pub fn new(lane: Lane<T>, checksum: Checksum) -> Client<T> {
        Client {
            lane,
            envelope: Envelope::plain(checksum),
            sealed: Vec::new(),
            gets: BTreeMap::new(),
            requests: BTreeMap::new(),
            arriving: None,
            events: VecDeque::new(),
            unheard: Vec::new(),
            has_unsent: false,
            next_expiry: None,
            next_id: 0,
            next_request: 1,
        }
    }

    /// The same, of pages that travel and lie at agents sealed. Agents that cannot hold them are not used.
    pub fn sealed(mut self, seal: Arc<Seal>) -> Client<T> {
        self.lane.require(FEATURE_LENGTHS);
        Client { envelope: self.envelope.sealed(seal), ..self }
    }

    /// The agents and their links.
    pub fn lane(&self) -> &Lane<T> {
        &self.lane
    }

    /// Receives, runs timers and keeps the links up. True if anything happened.
    pub fn drive(&mut self, now: Instant) -> io::Result<bool> {
        self.lane.keep_up(now);
        self.lane.transport.drive(now)
    }

    /// Transmits what was queued.
    pub fn flush(&mut self, now: Instant) -> io::Result<()> {
        self.lane.transport.flush(now)
    }

    /// Readable when something arrives.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.lane.transport.fd()
    }

    /// When [`Client::drive`] and [`Client::send_unsent`] must be called next although nothing arrives.
    pub fn deadline(&self) -> Option<Instant> {
        // What has no link waits for that.
        let due = self.unsent().filter_map(|id| {
            let get = &self.gets[&id];
            get.pause().filter(|_| self.lane.is_up(get.agent))
        });
        let (links, transport) = (self.lane.deadline(), self.lane.transport.deadline());
        links.into_iter().chain(transport).chain(due).min()
    }

    /// Ends every link.
    pub fn close_links(&mut self, now: Instant) {
        let links: Vec<LinkId> = self.lane.links.keys().copied().collect();
        links.into_iter().for_each(|link| self.lane.transport.close(now, link, CloseCode::Goodbye));
        // The process is about to end: what cannot be sent now, the lease will do.
        let _ = self.flush(now);
    }

    // ---- what comes of a request, and what else is sent

    /// A reply has come whole.
    fn finish(&mut self, request: Request) {
        match request.owner {
            Owner::Get(id) => self.end_request(id),
            Owner::Put(put) => {
                self.events.push_back(ClientEvent::Stored { put, pages: request.done });
            }
            Owner::Discard(ids) if request.done == 0 => self.unheard.push((request.agent, ids)),
            Owner::Members(told) => {
                let members = MemberEntry::read_all(&told).filter(|_| request.done != 0);
                let (agent, members) = (request.agent, members.unwrap_or_default());
                self.events.push_back(ClientEvent::Members { agent, members });
            }
            Owner::Discard(_) | Owner::Nobody => {}
        }
    }

    /// No reply comes, or not all of it. What was put may have been stored: the pages are placed under other names the next time.
    fn fail(&mut self, request: Request) {
        self.finish(Request { done: 0, ..request });
    }

    fn take_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Gives 1 to [`PAGES_MAX`] pages of [`PAGE_LEN`](crate::message::PAGE_LEN) bytes to an agent.
    ///
    /// # Errors
    /// If the agent's link is down, or takes no more for now.
    pub fn put<'a>(
        &mut self,
        now: Instant,
        agent: AgentId,
        pages: impl Iterator<Item = (ContentId, &'a [u8])>,
    ) -> Result<PutId, TransportError> {
        let (ids, frames): (Vec<ContentId>, Vec<&[u8]>) = pages.unzip();
        assert!((1..=PAGES_MAX).contains(&ids.len()));
        let length = self.envelope.length();
        let named = |id: &ContentId| PageDescriptor::new(id.0, 0).with_length(length);
        let heads: Vec<PageDescriptor> = ids.iter().map(named).collect();
        let mut sealed = std::mem::take(&mut self.sealed);
        let pages = self.envelope.wrap(&ids, frames, &mut sealed);
        let payload: Vec<&[u8]> = std::iter::once(heads.as_bytes()).chain(pages).collect();
        let control = Control::put(self.next_request, self.lane.workload, ids.len() as u16);
        let control = self.envelope.with_lengths(control.with_priority(Priority::Bulk));
        let id = PutId(self.take_id());
        let sent = self.send(now, agent, control, &payload, Owner::Put(id));
        self.sealed = sealed;
        sent.map(|_| id)
    }

    /// Lets an agent forget 1 to [`DISCARD_MAX`] pages. [`Client::take_unheard`] tells if it may not have heard of it.
    ///
    /// # Errors
    /// If the agent's link is down, or takes no more for now.
    pub fn discard(
        &mut self,
        now: Instant,
        agent: AgentId,
        ids: &[ContentId],
    ) -> Result<(), TransportError> {
        assert!((1..=DISCARD_MAX).contains(&ids.len()));
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.0.to_le_bytes()).collect();
        let count = ids.len() as u16;
        let control = Control::discard(self.next_request, self.lane.workload, count);
        let control = control.with_priority(Priority::Bulk);
        self.send(now, agent, control, &[&bytes], Owner::Discard(ids.to_vec())).map(drop)
    }

    /// Pages that agents were to forget, and may not have heard of: their links were lost, or they did not answer. To be
    /// discarded again.
    pub fn take_unheard(&mut self) -> Vec<(AgentId, Vec<ContentId>)> {
        std::mem::take(&mut self.unheard)
    }

    /// Pages that agents were told to forget and that they have not answered yet.
    pub fn unanswered_discards(&self) -> impl Iterator<Item = (AgentId, &[ContentId])> {
        self.requests.values().filter_map(|request| match &request.owner {
            Owner::Discard(ids) => Some((request.agent, &ids[..])),
            _ => None,
        })
    }

    /// Asks every agent for its state, of which [`Lane::views`] tells.
    pub fn ask_status(&mut self, now: Instant) {
        self.lane.agents().for_each(|agent| self.tell(now, agent, Op::Status));
    }

    /// Asks an agent who is a member, another one each time; a [`ClientEvent::Members`] follows. False if none can be asked.
    pub fn ask_members(&mut self, now: Instant) -> bool {
        let last = self.lane.last_resorts();
        let up = |agent: &AgentId| self.lane.is_up(*agent) && !last.has(*agent);
        let agents: Vec<AgentId> = self.lane.agents().filter(up).collect();
        let turn = self.next_request as usize % agents.len().max(1);
        let Some(&agent) = agents.get(turn) else { return false };
        let control = Control::request(Op::Members, self.next_request, self.lane.workload);
        let control = control.with_priority(Priority::Bulk);
        self.send(now, agent, control, &[], Owner::Members(Vec::new())).is_ok()
    }

    /// Tells the agents that the workload has ended: its pages are freed. [`Client::under_way`] tells who has not answered. Last resorts end with it.
    pub fn goodbye(&mut self, now: Instant) {
        let last = self.lane.last_resorts();
        let others = self.lane.agents().filter(|&agent| !last.has(agent));
        others.for_each(|agent| self.tell(now, agent, Op::Goodbye));
    }

    /// Tells one agent that the workload has no pages there any more.
    pub fn goodbye_to(&mut self, now: Instant, agent: AgentId) {
        self.tell(now, agent, Op::Goodbye);
    }

    /// Sends a request without pages. An agent that does not take it now is asked for its state the next time, and frees the
    /// pages of a workload that has ended when its lease ends.
    fn tell(&mut self, now: Instant, agent: AgentId, op: Op) {
        let control = Control::request(op, self.next_request, self.lane.workload);
        let control = control.with_priority(Priority::Bulk);
        let _ = self.send(now, agent, control, &[], Owner::Nobody);
    }

    /// Whether any reply has not come whole.
    pub fn awaits(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Requests of this kind whose replies have not come whole.
    pub fn under_way(&self, agent: AgentId, op: Op) -> usize {
        self.requests.values().filter(|request| request.agent == agent && request.op == op).count()
    }

    /// Pages that the agent has been told to forget, and has not said that it has.
    pub fn discards_under_way(&self, agent: AgentId) -> usize {
        let is_one = |request: &&Request| request.agent == agent && request.op == Op::Discard;
        self.requests.values().filter(is_one).map(|request| usize::from(request.pages)).sum()
    }

    /// Whether the agent can be trusted to keep the only copy of a page: it is up, does not drain, and answers.
    pub fn keeps(&self, now: Instant, agent: AgentId) -> bool {
        let heard = self.lane.peers[usize::from(agent.0)].heard;
        let is_quiet = heard.is_none_or(|at| now.saturating_duration_since(at) > QUIET);
        let others_answer = |since| {
            let mut others = self.lane.agents().filter(|other| *other != agent);
            others.any(|other| self.lane.peers[usize::from(other.0)].heard > Some(since))
        };
        let silent = |request: &Request| {
            let waited = now.saturating_duration_since(request.sent);
            request.agent == agent
                && !request.answered
                && (waited > SUSPECT || waited > QUIET && is_quiet && others_answer(request.sent))
        };
        let may = self.answers(now, agent) && !self.lane.is_draining(agent);
        may && !self.requests.values().any(silent)
    }

    /// Whether it is worth waiting for what the agent is asked: it is up, and did not leave the last request unanswered for far longer than usual.
    pub fn answers(&self, now: Instant, agent: AgentId) -> bool {
        let silent_until = self.lane.peers[usize::from(agent.0)].silent_until;
        self.lane.is_up(agent) && silent_until.is_none_or(|until| until <= now)
    }

    // ---- what takes too long, or is not wanted

    /// This process did not run for `missed`: agents are not blamed for that.
    pub fn excuse(&mut self, now: Instant, missed: Duration) {
        self.gets.values_mut().for_each(|get| get.excuse(now, missed));
        let requests = self.requests.values_mut();
        requests.for_each(|request| request.sent = now.min(request.sent + missed));
    }

    /// Gives up waiting for what is not answered in time: it fails, or is [unsent](Client::unsent) again. To be called in
    /// each turn, after [`Client::excuse`].
    pub fn expire(&mut self, now: Instant) {
        if self.next_expiry.is_some_and(|next| now < next) {
            return;
        }
        self.next_expiry = Some(now + EXPIRE_EVERY);
        let late = |get: &Get| get.is_late(now) || get.is_over(now, GET_DEADLINE);
        if self.gets.values().any(late) {
            let ids: Vec<GetId> =
                self.gets.iter().filter(|(_, get)| late(get)).map(|(&id, _)| id).collect();
            ids.into_iter().for_each(|id| self.expire_get(now, id));
        }
        let late = |request: &Request| now.saturating_duration_since(request.sent) > PUT_DEADLINE;
        let sent = self.requests.iter().filter(|(_, request)| late(request));
        let exchanges: Vec<ExchangeId> = sent.map(|(&exchange, _)| exchange).collect();
        for exchange in exchanges {
            if let Some(request) = self.abandon(now, exchange) {
                self.fail(request);
            }
        }
    }

    fn expire_get(&mut self, now: Instant, id: GetId) {
        let Some(get) = self.gets.get_mut(&id) else { return };
        if get.is_late(now)
            && let Some(exchange) = get.exchange()
        {
            self.abandon(now, exchange);
            self.end_request(id);
        }
        let Some(get) = self.gets.get_mut(&id) else { return };
        if get.is_unsent() && get.is_over(now, GET_DEADLINE) {
            let pages = get.close();
            self.close(id, pages, Failure::Unanswered);
        }
    }

    /// Gives a get up: its pages are not wanted any more. No event of it follows.
    pub fn cancel(&mut self, now: Instant, id: GetId) {
        if let Some(get) = self.gets.remove(&id)
            && let Some(exchange) = get.exchange()
        {
            self.abandon(now, exchange);
        }
        self.events.retain(|event| event.get() != Some(id));
    }

    /// Gets that wait until they can be sent.
    pub fn unsent(&self) -> impl Iterator<Item = GetId> {
        let gets = self.has_unsent.then_some(&self.gets).into_iter().flatten();
        gets.filter(|(_, get)| get.is_unsent()).map(|(&id, _)| id)
    }

    /// Sends what could not be sent before, or is to be repeated: first that for which a thread waits. What nobody waits for
    /// and cannot be sent is given up; what is over is left to [`Client::expire`]. To be called in each turn, after the events
    /// of [`Client::expire`] were polled and what is no longer wanted was [cancelled](Client::cancel).
    pub fn send_unsent(&mut self, now: Instant) {
        if !self.has_unsent {
            return;
        }
        let is_due = |id: &GetId| {
            let get = &self.gets[id];
            get.pause().is_none_or(|pause| pause <= now) && !get.is_over(now, GET_DEADLINE)
        };
        let mut unsent: Vec<GetId> = self.unsent().filter(is_due).collect();
        unsent.sort_by_key(|id| !self.gets[id].is_awaited());
        for id in unsent {
            let Some(mut get) = self.gets.remove(&id) else { continue };
            let is_given_up = !self.send_get(now, id, &mut get) && !get.is_awaited();
            let pages = if is_given_up { get.close() } else { 0 };
            self.gets.insert(id, get);
            self.close(id, pages, Failure::GivenUp);
        }
        self.has_unsent = self.gets.values().any(Get::is_unsent);
    }

    /// Gives up waiting for a reply, or for the rest of it.
    fn abandon(&mut self, now: Instant, exchange: ExchangeId) -> Option<Request> {
        self.lane.transport.abandon(exchange);
        let request = self.end(exchange)?;
        // Who has begun to give pages, and not gone on, has not given them.
        if !request.answered || request.op == Op::Get && request.done != 0 {
            let waited = now.saturating_duration_since(request.sent);
            let peer = self.lane.peer(request.agent);
            if !request.answered && waited >= SILENCE.max(peer.feedback.usual() * SILENCE_TIMES) {
                peer.silent_until = Some(now + SILENCE_LASTS);
            }
            peer.feedback.on_timeout(waited);
        }
        Some(request)
    }
}

impl ClientEvent {
    /// The get that it is about.
    pub fn get(&self) -> Option<GetId> {
        match *self {
            ClientEvent::Answered { get, .. }
            | ClientEvent::Arrived { get, .. }
            | ClientEvent::Wrong { get, .. }
            | ClientEvent::Failed { get, .. }
            | ClientEvent::Ended { get } => Some(get),
            ClientEvent::Up { .. }
            | ClientEvent::Down { .. }
            | ClientEvent::Members { .. }
            | ClientEvent::Stored { .. } => None,
        }
    }
}
