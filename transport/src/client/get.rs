//! A get, from its request to its last page: up to 64 pages that one agent holds, asked for in one request, checked and handed
//! on as they arrive. Replies to other requests come the same way, and are the parent's.
//!
//! [`Client::get`] -> `send_get` -> `send` ... [`Client::poll`] -> `handle_reply` -> `handle_payload` -> `poll_step`.
//!
//! A page is open until it has arrived or it is certain that this get does not bring it. A thread may wait for the
//! first page. While that page is open, a request without an answer is repeated for it alone; pages ahead of need are
//! given up at the first failure, because whoever needs one of them meanwhile asks for it again.

use std::ops::Range;
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes, BytesMut};
use gms_policy::ids::{AgentId, ContentId};
use zerocopy::IntoBytes;

use super::seal::Envelope;
use super::{
    Client, ClientEvent, DENIED_PAUSE, Failure, GetId, Owner, PUT_DEADLINE, RETRY, Request,
};
use crate::message::{Control, PAGE_LEN, PAGES_MAX, PageDescriptor, PagesReply, Priority, Status};
use crate::{Event, ExchangeId, Transport, TransportError};

/// A page as its agent knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Names its content.
    pub id: ContentId,
    /// Checksum of its bytes, see [`Checksum`](super::Checksum). `None` if none was kept: then its seal alone says that these are the bytes which were put, and
    /// without a seal nothing does.
    pub check: Option<u64>,
}

/// Whether somebody waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// A thread waits for the first page; the others are fetched ahead of need.
    Demand,
    /// Nobody waits: fetched ahead of need.
    Ahead,
    /// Nobody waits, and it may take long.
    Bulk,
}

/// Where a get stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// There was no link, or no room on it. Left by `handle_sent`, or at the deadline.
    Unsent,
    /// Left by the reply, by its failure, or at the retry time.
    Sent(ExchangeId),
    /// The agent has said which pages it sends. Left by their end, as above.
    Receiving(ExchangeId),
    /// What comes is not used: the agent has no session for us yet, or its bytes do not fit. Left as above.
    Refused(ExchangeId),
}

/// What the bytes of a reply amount to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// These pages, whole, in order and right.
    Arrived(Range<usize>, Bytes),
    /// This page's bytes are not those that were put.
    Wrong(usize),
}

impl<T: Transport> Client<T> {
    /// Asks an agent for 1 to [`PAGES_MAX`] pages. What cannot be sent now is sent when its link takes it.
    pub fn get(
        &mut self,
        now: Instant,
        agent: AgentId,
        pages: Vec<Wanted>,
        urgency: Urgency,
    ) -> GetId {
        let (id, mut get) = (GetId(self.take_id()), Get::new(now, agent, pages, urgency));
        self.has_unsent |= !self.send_get(now, id, &mut get);
        self.gets.insert(id, get);
        id
    }

    /// Sends a get. False if its agent's link does not take it.
    pub(super) fn send_get(&mut self, now: Instant, id: GetId, get: &mut Get) -> bool {
        if !self.lane.is_up(get.agent) {
            return false;
        }
        get.end_pause();
        let (request, workload) = (self.next_request, self.lane.workload);
        let (control, heads) = match get.asks_for() {
            [page] => (Control::get(request, workload, page.id.0), Vec::new()),
            pages => {
                let heads = pages.iter().map(|page| PageDescriptor::new(page.id.0, 0)).collect();
                (Control::get_many(request, workload, pages.len() as u16), heads)
            }
        };
        let control = self.envelope.with_lengths(control.with_priority(get.priority()));
        let sent = self.send(now, get.agent, control, &[heads.as_bytes()], Owner::Get(id));
        sent.map(|exchange| get.handle_sent(now, exchange)).is_ok()
    }

    /// Sends a request, which is the [next](Client::next_request).
    pub(super) fn send(
        &mut self,
        now: Instant,
        agent: AgentId,
        control: Control,
        payload: &[&[u8]],
        owner: Owner,
    ) -> Result<ExchangeId, TransportError> {
        let (transport, peer) =
            (&mut self.lane.transport, &mut self.lane.peers[usize::from(agent.0)]);
        let (link, session) = peer.link().ok_or(TransportError::Busy)?;
        self.next_request += 1;
        let sent = transport.request(now, link, &control.with_session(session), payload);
        let exchange = sent.inspect_err(|_| peer.feedback.on_refusal())?;
        let (op, pages) = (control.op().expect("made here"), control.count());
        peer.note_sent(op, pages);
        let request = Request { agent, op, pages, owner, sent: now, answered: false, done: 0 };
        self.requests.insert(exchange, request);
        Ok(exchange)
    }

    /// Next event, if any.
    pub fn poll(&mut self, now: Instant) -> Option<ClientEvent> {
        loop {
            if let Some(event) = self.events.pop_front().or_else(|| self.poll_arriving()) {
                return Some(event);
            }
            match self.lane.transport.poll(now)? {
                Event::Connected { link, peer } => self.lane.handle_connected(now, link, peer.id),
                Event::Closed { link, reason } => {
                    self.events.extend(self.lane.handle_closed(now, link, &reason));
                }
                Event::Control { exchange, control } => self.handle_reply(now, exchange, control),
                Event::Payload { exchange, offset, bytes } => {
                    self.handle_payload(exchange, offset as usize, bytes);
                }
                Event::Complete { exchange } => {
                    self.end(exchange).into_iter().for_each(|request| self.finish(request));
                }
                Event::Aborted { exchange, .. } => self.handle_aborted(exchange),
            }
        }
    }

    fn handle_reply(&mut self, now: Instant, exchange: ExchangeId, control: Control) {
        let Some(request) = self.requests.get_mut(&exchange) else {
            return self.events.extend(self.lane.handle_reply(now, exchange, &control));
        };
        self.lane.peer(request.agent).note_reply(now, request, &control);
        request.handle_reply(&control);
        let Owner::Get(id) = request.owner else { return };
        let Some(get) = self.gets.get_mut(&id) else { return };
        let pages = get.handle_reply(now, &control, self.envelope.page_len());
        let (failure, control) = (Failure::NotHeld(control.status()), Box::new(control));
        self.events.push_back(ClientEvent::Answered { get: id, control });
        if pages != 0 {
            self.events.push_back(ClientEvent::Failed { get: id, pages, failure });
        }
    }

    fn handle_payload(&mut self, exchange: ExchangeId, offset: usize, bytes: Bytes) {
        match self.requests.get_mut(&exchange).map(|request| &mut request.owner) {
            Some(Owner::Get(id)) => {
                if let Some(get) = self.gets.get_mut(id) {
                    get.handle_payload(offset, bytes);
                    self.arriving = Some(*id);
                }
            }
            // As much as its control message has announced.
            Some(Owner::Members(told)) => told.extend_from_slice(&bytes),
            _ => {}
        }
    }

    fn poll_arriving(&mut self) -> Option<ClientEvent> {
        let id = self.arriving?;
        let envelope = &mut self.envelope;
        let step = self.gets.get_mut(&id).and_then(|get| get.poll_step(envelope));
        if step.is_none() {
            self.arriving = None;
        }
        step.map(|step| match step {
            Step::Arrived(pages, bytes) => ClientEvent::Arrived { get: id, pages, bytes },
            Step::Wrong(page) => ClientEvent::Wrong { get: id, page },
        })
    }

    fn handle_aborted(&mut self, exchange: ExchangeId) {
        let Some(request) = self.end(exchange) else { return };
        self.lane.peer(request.agent).feedback.on_refusal();
        self.fail(request);
    }

    /// The exchange is over: the only place where a request stops to be under way.
    pub(super) fn end(&mut self, exchange: ExchangeId) -> Option<Request> {
        let request = self.requests.remove(&exchange)?;
        self.lane.peer(request.agent).inflight -= 1;
        Some(request)
    }

    /// A get's exchange is over; it goes on if a page is open for which a thread waits.
    pub(super) fn end_request(&mut self, id: GetId) {
        let Some(get) = self.gets.get_mut(&id) else { return };
        let pages = get.handle_end();
        self.has_unsent |= !get.is_closed();
        self.close(id, pages, Failure::GivenUp);
    }

    /// Pages of a get do not come.
    pub(super) fn close(&mut self, id: GetId, pages: u64, failure: Failure) {
        if pages != 0 {
            self.events.push_back(ClientEvent::Failed { get: id, pages, failure });
        }
        if self.gets.get(&id).is_some_and(Get::is_closed) {
            self.gets.remove(&id);
            self.events.push_back(ClientEvent::Ended { get: id });
        }
    }
}

/// See the module's documentation. Sets of pages are masks: bit i is page i.
#[derive(Debug)]
pub(super) struct Get {
    pub agent: AgentId,
    pages: Vec<Wanted>,
    urgency: Urgency,
    state: State,
    began: Instant,
    sent: Instant,
    /// It was denied, and is not sent again before.
    pause: Option<Instant>,
    /// Pages that may still arrive.
    open: u64,
    /// Pages that the request under way names: the first so many.
    asked: usize,
    /// Pages whose bytes are still to come, of those that the agent sends.
    coming: u64,
    /// Bytes of descriptors before the first page.
    head: usize,
    /// Bytes of the whole payload, and of it received.
    payload: usize,
    received: usize,
    /// The payload has the length of the pages that the agent says it sends.
    fits: bool,
    /// Received and not looked at.
    chunk: Bytes,
    /// The beginning of a page whose end has not come.
    part: BytesMut,
}

impl Get {
    /// `pages` are 1 to [`PAGES_MAX`].
    pub(super) fn new(now: Instant, agent: AgentId, pages: Vec<Wanted>, urgency: Urgency) -> Get {
        assert!((1..=PAGES_MAX).contains(&pages.len()));
        Get {
            agent,
            open: first(pages.len()),
            asked: pages.len(),
            pages,
            urgency,
            state: State::Unsent,
            began: now,
            sent: now,
            pause: None,
            coming: 0,
            head: 0,
            payload: 0,
            received: 0,
            fits: false,
            chunk: Bytes::new(),
            part: BytesMut::new(),
        }
    }

    /// Whether a thread waits for the first page.
    pub(super) fn is_awaited(&self) -> bool {
        self.urgency == Urgency::Demand && self.open & 1 == 1
    }

    /// How urgent its next request is.
    pub(super) fn priority(&self) -> Priority {
        match self.urgency {
            _ if self.is_awaited() => Priority::Demand,
            Urgency::Demand | Urgency::Ahead => Priority::Ahead,
            Urgency::Bulk => Priority::Bulk,
        }
    }

    pub(super) fn is_unsent(&self) -> bool {
        self.state == State::Unsent
    }

    /// Until when it is not to be sent, if it was denied.
    pub(super) fn pause(&self) -> Option<Instant> {
        self.pause
    }

    /// It is about to be sent, if that can be.
    pub(super) fn end_pause(&mut self) {
        self.pause = None;
    }

    pub(super) fn exchange(&self) -> Option<ExchangeId> {
        match self.state {
            State::Unsent => None,
            State::Sent(id) | State::Receiving(id) | State::Refused(id) => Some(id),
        }
    }

    /// The pages that the next request names.
    pub(super) fn asks_for(&self) -> &[Wanted] {
        &self.pages[..self.asked]
    }

    /// Whether it has been waiting for a reply, or for the rest of it, for too long.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        let limit = match self.urgency {
            Urgency::Demand | Urgency::Ahead => RETRY,
            Urgency::Bulk => PUT_DEADLINE,
        };
        !self.is_unsent() && now.saturating_duration_since(self.sent) > limit
    }

    /// Whether it has taken longer than `limit` altogether.
    pub(super) fn is_over(&self, now: Instant, limit: Duration) -> bool {
        now.saturating_duration_since(self.began) > limit
    }

    /// This process did not run for `missed`.
    pub(super) fn excuse(&mut self, now: Instant, missed: Duration) {
        // What has begun since is not older than that.
        self.began = now.min(self.began + missed);
        self.sent = now.min(self.sent + missed);
    }

    // ---- input

    pub(super) fn handle_sent(&mut self, now: Instant, exchange: ExchangeId) {
        self.sent = now;
        self.state = State::Sent(exchange);
    }

    /// The reply's control message; pages travel as `page_len` bytes. Returns the pages that the agent does not have.
    pub(super) fn handle_reply(&mut self, now: Instant, control: &Control, page_len: usize) -> u64 {
        let State::Sent(exchange) = self.state else { return 0 };
        let done = match control.status() {
            Status::Ok | Status::NotFound => {
                control.answer::<PagesReply>().done & first(self.asked)
            }
            status if status == Status::Denied || self.asked > 1 => {
                return self.refuse(now, exchange, status);
            }
            _ => 0,
        };
        let count = done.count_ones() as usize;
        self.coming = done;
        self.head = if self.asked > 1 { count * PageDescriptor::LEN } else { 0 };
        self.payload = control.payload_len as usize;
        self.fits = self.payload == self.head + count * page_len;
        self.state = State::Receiving(exchange);
        self.end(self.open & first(self.asked) & !done)
    }

    /// Without a session (yet), or with too much under way, the agent may have the pages later; and what failed with others may be had alone.
    fn refuse(&mut self, now: Instant, exchange: ExchangeId, status: Status) -> u64 {
        if status == Status::Denied {
            self.pause = Some(now + DENIED_PAUSE);
        }
        self.state = State::Refused(exchange);
        0
    }

    /// The next bytes of the reply's payload. [`Get::poll_step`] tells what they are.
    pub(super) fn handle_payload(&mut self, offset: usize, mut bytes: Bytes) {
        let State::Receiving(exchange) = self.state else { return };
        if offset != self.received || offset + bytes.len() > self.payload {
            self.state = State::Refused(exchange);
            return;
        }
        self.received += bytes.len();
        bytes.advance(self.head.saturating_sub(offset).min(bytes.len()));
        self.chunk = bytes;
    }

    /// No (more) bytes come. Returns the pages that are given up; the others, if any, are to be asked for again.
    pub(super) fn handle_end(&mut self) -> u64 {
        self.state = State::Unsent;
        (self.asked, self.coming, self.received) = (1, 0, 0);
        self.chunk = Bytes::new();
        self.part.clear();
        let awaited = u64::from(self.is_awaited());
        self.end(self.open & !awaited)
    }

    /// Nobody wants its pages any more, or it took too long. Returns those that were open.
    pub(super) fn close(&mut self) -> u64 {
        self.end(self.open)
    }

    fn end(&mut self, pages: u64) -> u64 {
        self.open &= !pages;
        pages
    }

    /// Whether every page has arrived, or does not come.
    pub(super) fn is_closed(&self) -> bool {
        self.open == 0
    }

    // ---- output

    /// What has come since the last call. The page for which a thread waits is a step of its own, so that it does not
    /// wait for the checks of the others.
    pub(super) fn poll_step(&mut self, envelope: &mut Envelope) -> Option<Step> {
        if !matches!(self.state, State::Receiving(_)) || self.coming == 0 {
            return None;
        }
        if !self.fits {
            // Which bytes are whose is not known: none of its pages is right.
            return Some(self.step(Bytes::new()));
        }
        let (next, page_len) = (self.coming.trailing_zeros() as usize, envelope.page_len());
        if !self.part.is_empty() || self.chunk.len() < page_len {
            let whole = self.gather(page_len)?;
            let right = envelope.unwrap(&self.pages[next..], whole);
            return Some(self.step(right));
        }
        let run = (self.coming >> next).trailing_ones() as usize;
        let most = if self.is_awaited() { 1 } else { run.min(self.chunk.len() / page_len) };
        let right = envelope.unwrap(&self.pages[next..], self.chunk.slice(..most * page_len));
        self.chunk.advance((right.len() / PAGE_LEN).max(1) * page_len);
        Some(self.step(right))
    }

    /// The next page, if it is whole now, of which only a part had come at once.
    fn gather(&mut self, page_len: usize) -> Option<Bytes> {
        let missing = (page_len - self.part.len()).min(self.chunk.len());
        self.part.extend_from_slice(&self.chunk[..missing]);
        self.chunk.advance(missing);
        (self.part.len() == page_len).then(|| self.part.split().freeze())
    }

    /// The next pages have come, and these are the first of them that are right; if none is, the next one is wrong.
    fn step(&mut self, right: Bytes) -> Step {
        let from = self.coming.trailing_zeros() as usize;
        let count = right.len() / PAGE_LEN;
        let taken = first(count.max(1)) << from;
        self.coming &= !taken;
        if count == 0 {
            return Step::Wrong(from);
        }
        self.end(taken);
        Step::Arrived(from..from + count, right)
    }
}

/// The first `count` pages.
fn first(count: usize) -> u64 {
    u64::MAX.checked_shr(64 - count as u32).unwrap_or(0)
}
