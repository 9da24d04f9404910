//! The agents as any of their users sees them.
//!
//! A [`Client`] keeps a link to each agent, sends gets, puts and discards, checks what comes back and repeats what is
//! not answered. It is driven like a [`Transport`]: `drive`, `poll` until empty, [`Client::expire`], `poll`,
//! [`Client::send_unsent`], `poll`, then `flush`; it reads no clock.
//! Requests are named by ids of the client's own, which are never used again: an agent, a link or an exchange may
//! come and go behind them.

mod envelope;
mod get;
mod lane;
mod put;
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

use self::envelope::Envelope;
use self::get::{Get, Step};
pub use self::get::{Urgency, Wanted};
pub use self::lane::{AgentAddress, LEASE, Lane, LaneEvent};
use self::put::Put;
pub use self::seal::{NoRandomness, SEALED_LEN, Seal};
use crate::message::{
    Control, DISCARD_MAX, FEATURE_LENGTHS, Op, PAGES_MAX, PageDescriptor, Priority, Status,
    WorkloadId,
};
use crate::{ExchangeId, Transport, TransportError};

/// A get without a reply, or without the rest of it, is repeated or given up after this.
pub const RETRY: Duration = Duration::from_secs(2);
/// What an agent has denied is not asked of it again before.
pub const DENIED_PAUSE: Duration = Duration::from_millis(1);
/// A demanded page that has not come after this is not asked for again, and reported as [`Failure::Unanswered`] when the
/// request under way has ended: after [`RETRY`] at the latest.
pub const GET_DEADLINE: Duration = Duration::from_secs(15);
/// The same for a get of [`Urgency::Bulk`], for a put and for any other request.
pub const PUT_DEADLINE: Duration = Duration::from_secs(5);
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

/// The checksum of a page, under a seed that agents do not know.
#[derive(Clone, Copy, Debug)]
pub struct Checksum {
    seed: u64,
}

impl Checksum {
    /// `seed` is to be random, and the workload's own.
    pub fn new(seed: u64) -> Checksum {
        Checksum { seed }
    }

    /// The checksum of `page`.
    pub fn of(&self, page: &[u8]) -> u64 {
        xxhash_rust::xxh3::xxh3_64_with_seed(page, self.seed)
    }
}

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
}

/// What an exchange is about.
#[derive(Debug)]
enum Request {
    Get(GetId),
    Put(PutId),
    /// Nothing is done about its reply; if there is none, see [`Client::take_unheard`].
    Discard(AgentId, Vec<ContentId>),
    /// Nothing is done about its reply.
    Other,
}

/// See the module's documentation.
pub struct Client<T> {
    lane: Lane<T>,
    envelope: Envelope,
    gets: BTreeMap<GetId, Get>,
    puts: BTreeMap<PutId, Put>,
    requests: BTreeMap<ExchangeId, Request>,
    /// The get whose bytes came last: they may hold more than one step.
    arriving: Option<GetId>,
    events: VecDeque<ClientEvent>,
    /// Discards that were not answered.
    unheard: Vec<(AgentId, Vec<ContentId>)>,
    /// Whether a get may be unsent.
    has_unsent: bool,
    next_expiry: Option<Instant>,
    next_id: u64,
}

impl<T: Transport> Client<T> {
    /// A client whose links are yet to be made: [`Client::drive`] does it.
    pub fn new(lane: Lane<T>, checksum: Checksum) -> Client<T> {
        Client {
            lane,
            envelope: Envelope::plain(checksum),
            gets: BTreeMap::new(),
            puts: BTreeMap::new(),
            requests: BTreeMap::new(),
            arriving: None,
            events: VecDeque::new(),
            unheard: Vec::new(),
            has_unsent: false,
            next_expiry: None,
            next_id: 0,
        }
    }

    /// The same, of pages that travel and lie at agents sealed. Agents that cannot hold them are not used.
    pub fn sealed(mut self, seal: Arc<Seal>) -> Client<T> {
        self.lane.require(FEATURE_LENGTHS);
        Client { envelope: self.envelope.sealed(seal), ..self }
    }

    /// Asks an agent for 1 to [`PAGES_MAX`] pages. What cannot be sent now is sent when its link takes it.
    pub fn get(
        &mut self,
        now: Instant,
        agent: AgentId,
        pages: Vec<Wanted>,
        urgency: Urgency,
    ) -> GetId {
        let id = GetId(self.take_id());
        self.gets.insert(id, Get::new(now, agent, pages, urgency));
        self.has_unsent |= !self.send_get(now, id);
        id
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
        let (sealed, length) = (self.envelope.is_sealed(), self.envelope.page_len() as u16);
        let named = |id: &ContentId| match sealed {
            true => PageDescriptor::new(id.0, 0).with_length(length),
            false => PageDescriptor::new(id.0, 0),
        };
        let heads: Vec<PageDescriptor> = ids.iter().map(named).collect();
        let pages = self.envelope.wrap(&ids, frames);
        let payload: Vec<&[u8]> = std::iter::once(heads.as_bytes()).chain(pages).collect();
        let count = ids.len() as u16;
        let make = |request, workload| {
            let control = Control::put(request, workload, count).with_priority(Priority::Bulk);
            if sealed { control.with_lengths() } else { control }
        };
        let exchange = self.lane.send(now, agent, make, &payload, count.into())?;
        let id = PutId(self.take_id());
        self.puts.insert(id, Put { stored: 0 });
        self.requests.insert(exchange, Request::Put(id));
        Ok(id)
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
        let make = |request, workload| Control::discard(request, workload, count);
        let exchange = self.send_bulk(now, agent, make, &[&bytes])?;
        self.requests.insert(exchange, Request::Discard(agent, ids.to_vec()));
        Ok(())
    }

    /// Pages that agents were to forget, and may not have heard of: their links were lost, or they did not answer. To be discarded again.
    pub fn take_unheard(&mut self) -> Vec<(AgentId, Vec<ContentId>)> {
        std::mem::take(&mut self.unheard)
    }

    /// Asks every agent for its state, of which [`Lane::views`] tells.
    pub fn ask_status(&mut self, now: Instant) {
        let agents: Vec<AgentId> = self.lane.agents().filter(|&a| self.lane.is_up(a)).collect();
        for agent in agents {
            let make = |request, workload| Control::request(Op::Status, request, workload);
            // One that cannot be asked now is asked the next time.
            let _ = self.send_other(now, agent, make, &[]);
        }
    }

    fn send_other(
        &mut self,
        now: Instant,
        agent: AgentId,
        make: impl FnOnce(u64, WorkloadId) -> Control,
        payload: &[&[u8]],
    ) -> Result<(), TransportError> {
        let exchange = self.send_bulk(now, agent, make, payload)?;
        self.requests.insert(exchange, Request::Other);
        Ok(())
    }

    fn send_bulk(
        &mut self,
        now: Instant,
        agent: AgentId,
        make: impl FnOnce(u64, WorkloadId) -> Control,
        payload: &[&[u8]],
    ) -> Result<ExchangeId, TransportError> {
        let make = |request, workload| make(request, workload).with_priority(Priority::Bulk);
        self.lane.send(now, agent, make, payload, 0)
    }

    fn take_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Sends a get. False if its agent's link does not take it.
    fn send_get(&mut self, now: Instant, id: GetId) -> bool {
        let Some(get) = self.gets.get_mut(&id) else { return true };
        if !self.lane.is_up(get.agent) {
            return false;
        }
        get.end_pause();
        let wanted = get.asks_for();
        let descriptors: Vec<PageDescriptor> = match wanted {
            [_] => Vec::new(),
            pages => pages.iter().map(|page| PageDescriptor::new(page.id.0, 0)).collect(),
        };
        let first = wanted[0].id.0;
        let (priority, sealed) = (get.priority(), self.envelope.is_sealed());
        let make = |request, workload| {
            let control = match descriptors.len() {
                0 => Control::get(request, workload, first),
                n => Control::get_many(request, workload, n as u16),
            };
            let control = control.with_priority(priority);
            if sealed { control.with_lengths() } else { control }
        };
        let pages = wanted.len() as u32;
        let sent = self.lane.send(now, get.agent, make, &[descriptors.as_bytes()], pages);
        let Ok(exchange) = sent else { return false };
        get.handle_sent(now, exchange);
        self.requests.insert(exchange, Request::Get(id));
        true
    }

    // ---- time

    /// This process did not run for `missed`: agents are not blamed for that.
    pub fn excuse(&mut self, now: Instant, missed: Duration) {
        self.gets.values_mut().for_each(|get| get.excuse(now, missed));
        self.lane.excuse(now, missed);
    }

    /// Receives, runs timers and keeps the links up. True if anything happened.
    pub fn drive(&mut self, now: Instant) -> io::Result<bool> {
        self.lane.drive(now)
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
        for exchange in self.lane.sent_before(now, PUT_DEADLINE) {
            self.lane.abandon(now, exchange);
            self.fail(exchange);
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

    /// Sends what could not be sent before, or is to be repeated: first that for which a thread waits. What nobody waits for
    /// and cannot be sent is given up; what is over is left to [`Client::expire`]. To be called in each turn, after the events of [`Client::expire`] were polled and what is
    /// no longer wanted was [cancelled](Client::cancel).
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
            let sent = self.send_get(now, id);
            if let Some(get) = self.gets.get_mut(&id).filter(|get| !sent && !get.is_awaited()) {
                let pages = get.close();
                self.close(id, pages, Failure::GivenUp);
            }
        }
        self.has_unsent = self.gets.values().any(Get::is_unsent);
    }

    fn abandon(&mut self, now: Instant, exchange: ExchangeId) {
        self.lane.abandon(now, exchange);
        self.requests.remove(&exchange);
    }

    // ---- what comes

    /// Next event, if any.
    pub fn poll(&mut self, now: Instant) -> Option<ClientEvent> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Some(event);
            }
            if let Some(event) = self.poll_arriving() {
                return Some(event);
            }
            match self.lane.poll(now)? {
                LaneEvent::Up { agent, session } => {
                    return Some(ClientEvent::Up { agent, session });
                }
                LaneEvent::Down { agent, reason } => {
                    return Some(ClientEvent::Down { agent, reason });
                }
                LaneEvent::Reply { exchange, control } => self.handle_reply(now, exchange, control),
                LaneEvent::Payload { exchange, offset, bytes } => {
                    if let Some(&Request::Get(id)) = self.requests.get(&exchange)
                        && let Some(get) = self.gets.get_mut(&id)
                    {
                        get.handle_payload(offset, bytes);
                        self.arriving = Some(id);
                    }
                }
                LaneEvent::Complete { exchange } => self.complete(exchange),
                LaneEvent::Failed { exchange } => self.fail(exchange),
            }
        }
    }

    fn poll_arriving(&mut self) -> Option<ClientEvent> {
        let id = self.arriving?;
        let envelope = &mut self.envelope;
        match self.gets.get_mut(&id).and_then(|get| get.poll_step(envelope)) {
            Some(Step::Arrived(pages, bytes)) => {
                Some(ClientEvent::Arrived { get: id, pages, bytes })
            }
            Some(Step::Wrong(page)) => Some(ClientEvent::Wrong { get: id, page }),
            None => {
                self.arriving = None;
                None
            }
        }
    }

    fn handle_reply(&mut self, now: Instant, exchange: ExchangeId, control: Box<Control>) {
        match self.requests.get(&exchange) {
            Some(Request::Get(id)) => {
                let Some(get) = self.gets.get_mut(id) else { return };
                let (get_id, status) = (*id, control.status());
                let pages = get.handle_reply(now, &control, self.envelope.page_len());
                self.events.push_back(ClientEvent::Answered { get: get_id, control });
                if pages != 0 {
                    let failure = Failure::NotHeld(status);
                    self.events.push_back(ClientEvent::Failed { get: get_id, pages, failure });
                }
            }
            Some(Request::Put(id)) => {
                if let Some(put) = self.puts.get_mut(id) {
                    put.handle_reply(&control);
                }
            }
            Some(Request::Discard(..) | Request::Other) | None => {}
        }
    }

    /// A reply has come whole.
    fn complete(&mut self, exchange: ExchangeId) {
        match self.requests.remove(&exchange) {
            Some(Request::Get(id)) => self.end_request(id),
            Some(Request::Put(id)) => self.end_put(id, |put| put.stored),
            Some(Request::Discard(..) | Request::Other) | None => {}
        }
    }

    /// No reply comes, or not all of it.
    fn fail(&mut self, exchange: ExchangeId) {
        match self.requests.remove(&exchange) {
            Some(Request::Get(id)) => self.end_request(id),
            // It may have been stored. The pages are placed under other names the next time.
            Some(Request::Put(id)) => self.end_put(id, |_| 0),
            Some(Request::Discard(agent, ids)) => self.unheard.push((agent, ids)),
            Some(Request::Other) | None => {}
        }
    }

    fn end_put(&mut self, id: PutId, stored: impl FnOnce(&Put) -> u64) {
        if let Some(put) = self.puts.remove(&id) {
            self.events.push_back(ClientEvent::Stored { put: id, pages: stored(&put) });
        }
    }

    /// A get's exchange is over; it goes on if a page is open for which a thread waits.
    fn end_request(&mut self, id: GetId) {
        let Some(get) = self.gets.get_mut(&id) else { return };
        let pages = get.handle_end();
        self.has_unsent |= !get.is_closed();
        self.close(id, pages, Failure::GivenUp);
    }

    /// Pages of a get do not come.
    fn close(&mut self, id: GetId, pages: u64, failure: Failure) {
        if pages != 0 {
            self.events.push_back(ClientEvent::Failed { get: id, pages, failure });
        }
        if self.gets.get(&id).is_some_and(Get::is_closed) {
            self.gets.remove(&id);
            self.events.push_back(ClientEvent::Ended { get: id });
        }
    }

    /// When [`Client::drive`] and [`Client::send_unsent`] must be called next although nothing arrives.
    pub fn deadline(&self) -> Option<Instant> {
        // What has no link waits for that.
        let due = self.unsent().filter_map(|id| {
            let get = &self.gets[&id];
            get.pause().filter(|_| self.lane.is_up(get.agent))
        });
        self.lane.deadline().into_iter().chain(due).min()
    }

    /// Transmits what was queued.
    pub fn flush(&mut self, now: Instant) -> io::Result<()> {
        self.lane.flush(now)
    }

    /// Readable when something arrives.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.lane.fd()
    }

    /// The agents and their links.
    pub fn lane(&self) -> &Lane<T> {
        &self.lane
    }

    /// Tells the agents that the workload has ended: its pages are freed. [`Lane::under_way`] tells who has not answered.
    pub fn goodbye(&mut self, now: Instant) {
        let agents: Vec<AgentId> = self.lane.agents().filter(|&a| self.lane.is_up(a)).collect();
        agents.into_iter().for_each(|agent| self.goodbye_to(now, agent));
    }

    /// Tells one agent that the workload has no pages there any more.
    pub fn goodbye_to(&mut self, now: Instant, agent: AgentId) {
        let make = |request, workload| Control::request(Op::Goodbye, request, workload);
        // One that does not hear of it frees them when the lease ends.
        let _ = self.send_other(now, agent, make, &[]);
    }

    /// Ends every link.
    pub fn close_links(&mut self, now: Instant) {
        self.lane.close(now);
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
            ClientEvent::Up { .. } | ClientEvent::Down { .. } | ClientEvent::Stored { .. } => None,
        }
    }
}
