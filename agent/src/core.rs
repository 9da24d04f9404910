//! The agent's state machine, one for each thread that serves; what they have in common is [`Shared`]. It knows neither
//! sockets nor clocks: time is an argument, answers are returned.
//!
//! A request passes three gates: the link must be known, the link must have a session (hello) of the workload that
//! the request names, and the operation must be one that this agent does. The tenant always comes from the session,
//! which the link's certificate vouches for. Whatever the request, there is one answer, and a failed request has
//! changed nothing.

use crate::clients::{ClientId, Room};
use crate::exchange::Exchange;
use crate::limits::{EXCHANGE_TIMEOUT, FRAME_LEN, SWEEP_PAUSE, SWEEP_SHARE, TICK};
use crate::shared::Shared;
use crate::stats::Stats;
use crate::store::{Found, Store, TenantId};
use crate::tenants::{Session, TenantKey, Tenants};
use gms_policy::ContentId;
use gms_transport::message::{
    Control, FEATURE_RECALL, Feedback, HelloReply, HelloRequest, MemberEntry, Op, PAGE_SHIFT,
    PAGES_MAX, PageDescriptor, PagesRequest, Status, StatusReply, WorkloadId,
};
use gms_transport::{CloseCode, ExchangeId, LinkId, PeerId, PeerIdentity};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

mod discard;
mod members;
#[cfg(test)]
mod tests;

/// Most slices of a reply's payload: the descriptors (or members), and of each page what its frame holds and its tail.
const SLICES_MAX: usize = 1 + 2 * PAGES_MAX;

/// When something is handled.
#[derive(Clone, Copy, Debug)]
pub struct At {
    /// Now.
    pub now: Instant,
    /// Start of the turn that received the packets which brought it.
    pub received: Instant,
}

/// What to do about an event.
#[derive(Debug)]
pub enum Answer<'a> {
    /// Nothing.
    Nothing,
    /// Send this; the exchange is over.
    Reply(Reply<'a>),
    /// Close the event's link with this code.
    Close(CloseCode),
}

/// A reply, complete but for its service time.
#[derive(Debug)]
pub struct Reply<'a> {
    /// What it answers.
    pub exchange: ExchangeId,
    /// The message; `service_ns` is for the driver, which has a clock, to set.
    pub control: Control,
    pages: Pages<'a>,
}

impl Reply<'_> {
    /// Pages that it carries.
    pub fn pages(&self) -> usize {
        self.pages.found.len()
    }

    /// The payload's slices, in order, and how many of the array they are.
    pub fn payload(&self) -> ([&[u8]; SLICES_MAX], usize) {
        let (mut slices, mut used) = ([&[][..]; SLICES_MAX], 0);
        let Pages { store, found, head } = &self.pages;
        let pages = found.iter().flat_map(|page| store.read(page));
        for slice in std::iter::once(*head).chain(pages) {
            if !slice.is_empty() {
                slices[used] = slice;
                used += 1;
            }
        }
        (slices, used)
    }
}

/// Pages that a reply carries, which stay as they are until it is gone.
struct Pages<'a> {
    store: &'a Store,
    found: &'a mut Vec<Found>,
    /// What comes before them: their descriptors, or instead of them the members.
    head: &'a [u8],
}

impl std::fmt::Debug for Pages<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.found.fmt(f)
    }
}

impl Drop for Pages<'_> {
    fn drop(&mut self) {
        self.found.drain(..).for_each(|page| self.store.unpin(page));
    }
}

/// What is known of a link.
#[derive(Debug)]
struct Link {
    peer: PeerIdentity,
    client: ClientId,
    session: Option<Session>,
    /// Whether it is told of pages to be taken away.
    takes_away: bool,
}

/// Whose link has ended, for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departure {
    /// The client.
    pub peer: PeerIdentity,
    /// The workload, if it had said which, and its pages here.
    pub workload: Option<(WorkloadId, u64)>,
}

/// A request that may begin: whose it is, and of which workload.
type Admitted = (ClientId, Option<TenantId>);

/// A reply, and how many pages of the tenant were freed for it.
type Done = (Control, u64);

/// The state of one thread of an agent.
pub struct Core {
    shared: Arc<Shared>,
    /// Which thread it is: where it takes its frames first.
    home: usize,
    links: BTreeMap<LinkId, Link>,
    exchanges: BTreeMap<ExchangeId, Exchange>,
    /// Pages of the reply at hand, and their descriptors if it has any.
    found: Vec<Found>,
    descriptors: Vec<PageDescriptor>,
    /// The members, if the reply at hand tells them.
    members: Vec<MemberEntry>,
    stats: Arc<Stats>,
    tick_at: Option<Instant>,
    /// When few dead pages are looked for next.
    sweep_at: Instant,
    /// The same where they are many.
    sweeps_again_at: Instant,
    trimming: bool,
    /// Requests which have not come whole in time, to be answered.
    stalled: Vec<ExchangeId>,
    /// Discards that are done in steps.
    unfinished: VecDeque<ExchangeId>,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core")
            .field("links", &self.links.len())
            .field("exchanges", &self.exchanges.len())
            .field("frames_free", &self.shared.store.frames_free())
            .finish_non_exhaustive()
    }
}

impl Core {
    /// Thread `home` of an agent.
    pub fn new(now: Instant, shared: Arc<Shared>, home: usize, stats: Arc<Stats>) -> Self {
        let core = Self {
            shared,
            home,
            links: BTreeMap::new(),
            exchanges: BTreeMap::new(),
            found: Vec::with_capacity(PAGES_MAX),
            descriptors: Vec::with_capacity(PAGES_MAX),
            members: Vec::new(),
            stats,
            tick_at: None,
            sweep_at: now,
            sweeps_again_at: now,
            trimming: false,
            stalled: Vec::new(),
            unfinished: VecDeque::new(),
        };
        core.publish(now);
        core
    }

    /// What this thread has done.
    pub fn stats(&self) -> &Arc<Stats> {
        &self.stats
    }

    /// What it shares with the agent's other threads.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// A link came up.
    pub fn handle_connected(
        &mut self,
        now: Instant,
        link: LinkId,
        peer: PeerIdentity,
    ) -> Answer<'static> {
        // A draining agent waits for the workloads which have pages here: they may come back for them.
        let mut accounts = self.shared.accounts();
        let clients = &mut accounts.clients;
        let known = clients.find(&peer.id);
        if self.shared.is_draining() && known.is_none_or(|client| clients.live(client) == 0) {
            return Answer::Close(CloseCode::Draining);
        }
        let Some(client) = clients.take_link(&peer) else {
            return Answer::Close(CloseCode::Overload);
        };
        drop(accounts);
        self.links.insert(link, Link { peer, client, session: None, takes_away: false });
        self.publish(now);
        Answer::Nothing
    }

    /// A link ended; its exchanges have been aborted before. Whose it was, unless it had been refused.
    pub fn handle_closed(&mut self, now: Instant, link: LinkId) -> Option<Departure> {
        let Link { peer, client, session, .. } = self.links.remove(&link)?;
        let mut accounts = self.shared.accounts();
        let known = session.and_then(|session| accounts.key(session));
        let workload = known.map(|(key, pages)| (key.workload, pages));
        if let Some(session) = session {
            accounts.unlink(now, session);
        }
        accounts.clients.give_link(client, &peer);
        drop(accounts);
        self.publish(now);
        Some(Departure { peer, workload })
    }

    /// Whose link it is.
    pub fn client_of(&self, link: LinkId) -> Option<PeerId> {
        self.links.get(&link).map(|link| link.peer.id)
    }

    /// A request begins. It is answered at once if it is to be refused.
    pub fn handle_control(&mut self, at: At, exchange: ExchangeId, control: Control) -> Answer<'_> {
        let mut accounts = self.shared.accounts();
        let admitted = self.admit(&accounts, exchange.link, &control);
        let (client, _) = match admitted {
            Ok(admitted) => admitted,
            Err(status) => {
                let room = self.room(&accounts, None);
                drop(accounts);
                return self.refuse(at, exchange, &control, status, room);
            }
        };
        let mut request = Exchange::new(at.now, client, control);
        let is_put = control.op() == Some(Op::Put);
        let room = self.room(&accounts, Some(client));
        let frames = if is_put { room.credits.min(control.count().into()) } else { 0 };
        if (is_put && frames == 0) || !accounts.clients.begin(client, request.head_len(), frames) {
            drop(accounts);
            // The client may ask again when fewer of its requests are under way; others are not concerned.
            let status = if is_put { Status::Full } else { Status::Denied };
            return self.refuse(at, exchange, &control, status, room);
        }
        drop(accounts);
        let missing = frames - request.set_aside(&self.shared.store, self.home, frames);
        if missing > 0 {
            self.shared.accounts().clients.give_frames(client, missing);
            if missing == frames {
                self.end(request);
                return self.refuse(at, exchange, &control, Status::Full, Room::default());
            }
        }
        if let Some(old) = self.exchanges.insert(exchange, request) {
            self.end(old);
            return Answer::Close(CloseCode::Malformed);
        }
        Answer::Nothing
    }

    /// Bytes of a request's payload came.
    pub fn handle_payload(
        &mut self,
        exchange: ExchangeId,
        offset: u32,
        bytes: &[u8],
    ) -> Answer<'static> {
        // A request that was refused may have more of its payload under way.
        let Some(deposit) = self.exchanges.get_mut(&exchange) else { return Answer::Nothing };
        match deposit.deposit(&self.shared.store, offset, bytes) {
            Ok(()) => Answer::Nothing,
            Err(_) => {
                self.handle_aborted(exchange);
                Answer::Close(CloseCode::Malformed)
            }
        }
    }

    /// A request has come whole, and [`Core::discards_part`] has done its part of it.
    pub fn handle_complete(&mut self, at: At, exchange: ExchangeId) -> Answer<'_> {
        let Some(mut request) = self.exchanges.remove(&exchange) else { return Answer::Nothing };
        if !request.is_whole() {
            self.end(request);
            return Answer::Close(CloseCode::Malformed);
        }
        let control = request.control;
        let is_odd = request.is_odd();
        let mut accounts = self.shared.accounts();
        // The session may have ended since the request began, or the agent drains since: who holds nothing here is not waited for.
        let admitted = match self.refuses_to_store(&control) {
            true => Err(Status::Draining),
            false => self.admit_session(&accounts, exchange.link, &control),
        };
        let tenant = admitted.ok().and_then(|(_, tenant)| tenant);
        if let Some(tenant) = tenant {
            let stores = control.op() == Some(Op::Put) && !is_odd;
            accounts.hold(tenant, if stores { request.frames() } else { 0 });
        }
        drop(accounts);
        let (reply, freed) = match admitted {
            Err(status) => (control.reply(status), 0),
            Ok(_) if is_odd => (control.reply(Status::Invalid), 0),
            Ok((_, tenant)) => match (control.op(), tenant) {
                (Some(Op::Hello), _) => (self.hello(at.now, exchange.link, &control), 0),
                (Some(Op::Get), Some(tenant)) => (self.get(tenant, &request), 0),
                (Some(Op::Put), Some(tenant)) => self.put(at.now, tenant, &mut request),
                (Some(Op::Discard), Some(tenant)) => self.discard(tenant, &mut request),
                (Some(Op::Goodbye), Some(_)) => (self.goodbye(at.now, exchange.link, &control), 0),
                (Some(Op::Status | Op::Grant), _) => (self.status(&control), 0),
                (Some(Op::Gossip), _) => (self.gossip(at.now, exchange.link, &request), 0),
                (Some(Op::Members), _) => (self.tell_members(&control), 0),
                _ => (control.reply(Status::Unsupported), 0),
            },
        };
        let room = self.settle(request, tenant, freed);
        self.reply(at, exchange, reply, room)
    }

    /// Gives back what a request of the tenant holds, which has freed some pages; returns the room that there is now.
    fn settle(&self, mut request: Exchange, tenant: Option<TenantId>, freed: u64) -> Room {
        let left = request.release(&self.shared.store);
        let mut accounts = self.shared.accounts();
        if let Some(tenant) = tenant {
            accounts.let_go(tenant, freed);
        }
        accounts.clients.end(request.client, request.head_len(), left);
        self.room(&accounts, Some(request.client))
    }

    /// The rest of a request will not come.
    pub fn handle_aborted(&mut self, exchange: ExchangeId) {
        if let Some(request) = self.exchanges.remove(&exchange) {
            self.end(request);
            self.stats.aborted.add(1);
        }
    }

    /// Gives back what a request holds.
    fn end(&mut self, mut request: Exchange) {
        let left = request.release(&self.shared.store);
        self.shared.accounts().clients.end(request.client, request.head_len(), left);
    }

    /// Does what is due: a bounded step at a time, never more than about a millisecond.
    pub fn handle_timeout(&mut self, now: Instant) {
        let ticked = self.tick_at.take_if(|tick| *tick <= now).is_some();
        if ticked {
            self.expire(now);
            self.publish(now);
        }
        let store = &self.shared.store;
        if self.sweeps_now(now) {
            self.sweep_at = now + SWEEP_PAUSE;
            match store.sweep(|| self.shared.accounts().hold_dead()) {
                Some(freed) => self.shared.accounts().let_go_dead(&freed),
                // Another thread is at it.
                None => self.sweeps_again_at = self.sweep_at,
            }
        } else if self.shared.dead_pages() == 0 && (ticked || self.trimming) && store.can_trim() {
            let is_ours = store.trim().unwrap_or_else(|error| {
                tracing::warn!(%error, "cannot give free memory back");
                true
            });
            // Where another thread is at it, this one looks again at its next tick.
            self.trimming = is_ours && store.can_trim() && self.shared.rests(now);
        }
    }

    /// Whether pages of ended workloads are to be looked for at once: when they are many, or it is time.
    fn sweeps_now(&self, now: Instant) -> bool {
        let dead = self.shared.dead_pages();
        let many = dead >= u64::from(self.shared.store.frames_swept()) / SWEEP_SHARE;
        dead > 0 && (many && now >= self.sweeps_again_at || now >= self.sweep_at)
    }

    /// Ends leases and finds the requests which take too long.
    fn expire(&mut self, now: Instant) {
        let expired = self.shared.accounts().expire(now);
        for (TenantKey { client, workload }, pages) in expired {
            if self.shared.may_log(now, Some(client)) {
                tracing::info!(%client, %workload, pages, "a lease ran out");
            }
            self.stats.expired.add(1);
        }
        let stalled = |exchange: &Exchange| now >= exchange.began + EXCHANGE_TIMEOUT;
        let found = self.exchanges.iter().filter(|(_, exchange)| stalled(exchange));
        self.stalled.extend(found.map(|(id, _)| *id));
    }

    /// An exchange whose request takes too long, answered so that it ends. Ask until there is none.
    pub fn poll_stalled(&mut self, now: Instant) -> Option<Reply<'_>> {
        let (id, control) = loop {
            let id = self.stalled.pop()?;
            if let Some(exchange) = self.exchanges.get(&id) {
                break (id, exchange.control);
            }
        };
        self.handle_aborted(id);
        let room = self.room(&self.shared.accounts(), None);
        match self.reply(At { now, received: now }, id, control.reply(Status::Failed), room) {
            Answer::Reply(reply) => Some(reply),
            Answer::Nothing | Answer::Close(_) => None,
        }
    }

    /// When [`Core::handle_timeout`] is to be called at the latest.
    pub fn deadline(&mut self, now: Instant) -> Option<Instant> {
        let (dead, can_trim) = (self.shared.dead_pages() > 0, self.shared.store.can_trim());
        // Another thread may have given the last frame back.
        self.trimming &= can_trim;
        let waits = !self.exchanges.is_empty() || self.shared.leased() > 0 || can_trim;
        // Gauges are right a tick after the last request too.
        let free = self.shared.store.frames_free();
        let publish = self.shared.gauges.frames_free.value() != u64::from(free);
        if self.tick_at.is_none() && (waits || publish) {
            self.tick_at = Some(now + TICK);
        }
        if self.sweeps_now(now) || self.trimming && !dead {
            return Some(now);
        }
        [self.tick_at, dead.then_some(self.sweep_at)].into_iter().flatten().min()
    }

    /// Links which are open.
    pub fn links(&self) -> impl Iterator<Item = LinkId> {
        self.links.keys().copied()
    }

    /// Whether the request may begin: what is known to fail is refused before its payload comes.
    fn admit(
        &self,
        tenants: &Tenants,
        link: LinkId,
        control: &Control,
    ) -> Result<Admitted, Status> {
        match control.op() {
            None | Some(Op::Delegate | Op::Epoch | Op::Atomic | Op::Block) => {
                return Err(Status::Unsupported);
            }
            Some(Op::Gossip | Op::Members) if self.shared.bulletin.get().is_none() => {
                return Err(Status::Unsupported);
            }
            _ => {}
        }
        let admitted = self.admit_session(tenants, link, control)?;
        match control.op() {
            Some(Op::Get | Op::Put) if control.body::<PagesRequest>().page_shift != PAGE_SHIFT => {
                Err(Status::Invalid)
            }
            _ if self.refuses_to_store(control) => Err(Status::Draining),
            _ => Ok(admitted),
        }
    }

    fn refuses_to_store(&self, control: &Control) -> bool {
        control.op() == Some(Op::Put) && self.shared.is_draining()
    }

    /// The client, and the tenant of the link's session if the operation needs one.
    fn admit_session(
        &self,
        tenants: &Tenants,
        link: LinkId,
        control: &Control,
    ) -> Result<Admitted, Status> {
        let link = self.links.get(&link).ok_or(Status::Denied)?;
        if control.op() == Some(Op::Gossip) && !link.peer.is_node {
            return Err(Status::Denied);
        }
        if matches!(control.op(), Some(Op::Hello | Op::Status | Op::Gossip | Op::Members)) {
            return Ok((link.client, None));
        }
        let session = link.session.ok_or(Status::Denied)?;
        let named = TenantKey { client: link.peer.id, workload: control.workload };
        // A request of a session that has ended must not meet the pages of the next one.
        let is_ours = [0, session.number].contains(&control.session);
        match tenants.key(session) {
            Some((key, _)) if key == named && is_ours => Ok((link.client, Some(session.tenant))),
            _ => Err(Status::Denied),
        }
    }

    fn hello(&mut self, now: Instant, link: LinkId, control: &Control) -> Control {
        let Some(Link { peer, session, takes_away, .. }) = self.links.get_mut(&link) else {
            return control.reply(Status::Denied);
        };
        let (client, workload) = (peer.id, control.workload);
        let key = TenantKey { client, workload };
        let asked: HelloRequest = control.body();
        *takes_away = asked.features & FEATURE_RECALL != 0;
        let lease_ms = u64::from(asked.lease_ms);
        let greeting = |session: Session, lease: Duration| {
            let lease_ms = lease.as_millis().try_into().unwrap_or(u32::MAX);
            let reply = control.reply(Status::Ok);
            reply
                .with_session(session.number)
                .with_answer(HelloReply::new(lease_ms, asked.features))
        };
        let mut accounts = self.shared.accounts();
        if let Some(session) = *session
            && let Some((other, _)) = accounts.key(session)
        {
            // One workload a link: a second hello is a retry of the first.
            if other != key {
                return control.reply(Status::Invalid);
            }
            return greeting(session, accounts.renew(session, lease_ms));
        }
        if self.shared.is_draining() && !accounts.knows(&key) {
            return control.reply(Status::Draining);
        }
        let (begun, lease) = match accounts.link(key, asked.incarnation, lease_ms) {
            Ok(begun) => begun,
            Err(status) => return control.reply(status),
        };
        let pages = accounts.key(begun).map_or(0, |(_, pages)| pages);
        drop(accounts);
        *session = Some(begun);
        let addr = peer.addr;
        if self.shared.may_log(now, Some(client)) {
            tracing::info!(%client, %workload, %addr, pages, "workload connected");
        }
        self.publish(now);
        greeting(begun, lease)
    }

    /// Credits, and all else that a status tells, are in every reply; only the size of the export is added.
    fn status(&self, control: &Control) -> Control {
        let reply =
            control.reply(if self.shared.is_draining() { Status::Draining } else { Status::Ok });
        match control.op() {
            Some(Op::Status | Op::Grant) => {
                reply.with_answer(StatusReply::new(self.shared.store.frames().into()))
            }
            _ => reply,
        }
    }

    fn get(&mut self, tenant: TenantId, request: &Exchange) -> Control {
        let control = &request.control;
        let asked: PagesRequest = control.body();
        let (count, lengths) = (usize::from(asked.count), control.has_lengths());
        self.descriptors.clear();
        let mut done = 0u64;
        let single = (count == 1).then_some(asked.page);
        let many = request.descriptors().iter().map(PageDescriptor::page);
        for (index, page) in single.into_iter().chain(many).enumerate() {
            let Some(found) = self.find(tenant, page, lengths) else { continue };
            if count > 1 {
                let head = PageDescriptor::new(page, found.check);
                self.descriptors.push(head.with_length(if lengths { found.length } else { 0 }));
            }
            self.found.push(found);
            done |= 1 << index;
        }
        self.stats.gets.add(count as u64);
        self.stats.misses.add((count - self.found.len()) as u64);
        let bytes: usize = self.found.iter().map(|found| usize::from(found.length)).sum();
        self.stats.bytes_out.add(bytes as u64);
        let status = if self.found.len() == count { Status::Ok } else { Status::NotFound };
        let reply = control.reply(status).with_done(done);
        let reply = if lengths { reply.with_lengths() } else { reply };
        let Some(found) = self.found.first().filter(|_| count == 1) else { return reply };
        let reply = reply.with_check(found.check);
        if lengths { reply.with_length(found.length) } else { reply }
    }

    /// Who asks without `lengths` takes every page for a frame: what is no frame is not there for him.
    fn find(&self, tenant: TenantId, page: u64, lengths: bool) -> Option<Found> {
        let found = self.shared.store.find(tenant, ContentId(page))?;
        if lengths || usize::from(found.length) == FRAME_LEN {
            return Some(found);
        }
        self.shared.store.unpin(found);
        None
    }

    fn put(&mut self, now: Instant, tenant: TenantId, request: &mut Exchange) -> Done {
        let (control, seconds) = (request.control, self.shared.seconds(now));
        let (mut done, mut replaced, mut bytes) = (0u64, 0, 0);
        for index in 0..usize::from(control.count()) {
            let Some((page, put, frame)) = request.take(index) else { continue };
            let page = ContentId(page);
            // The frame of the content before it is free.
            replaced += u64::from(self.shared.store.commit(frame, tenant, page, put, seconds));
            bytes += u64::from(put.length);
            done |= 1 << index;
        }
        let stored = u64::from(done.count_ones());
        self.shared.note_put(now);
        self.stats.puts.add(stored);
        self.stats.bytes_in.add(bytes);
        self.stats.refusals.add(u64::from(control.count()) - stored);
        let status = if stored == u64::from(control.count()) { Status::Ok } else { Status::Full };
        (control.reply(status).with_done(done), replaced)
    }

    fn goodbye(&mut self, now: Instant, link: LinkId, control: &Control) -> Control {
        let session = self.links.get_mut(&link).and_then(|link| link.session.take());
        let Some(session) = session else { return control.reply(Status::Denied) };
        let mut accounts = self.shared.accounts();
        let ended = accounts.key(session);
        accounts.goodbye(session);
        drop(accounts);
        if let Some((TenantKey { client, workload }, pages)) = ended
            && self.shared.may_log(now, Some(client))
        {
            tracing::info!(%client, %workload, pages, "workload ended");
        }
        control.reply(Status::Ok)
    }

    /// Completes a reply with the feedback that each carries. Pages found become its payload.
    fn reply(&mut self, at: At, exchange: ExchangeId, control: Control, room: Room) -> Answer<'_> {
        let queue_ns = at.now.saturating_duration_since(at.received).as_nanos() as u64;
        self.stats.queue.observe(queue_ns);
        let store = &self.shared.store;
        let seconds = self.shared.seconds(at.now);
        let link = self.links.get(&exchange.link).filter(|link| link.takes_away);
        let feedback = Feedback {
            queue_ns: queue_ns.try_into().unwrap_or(u32::MAX),
            service_ns: 0,
            frames_free: room.free.try_into().unwrap_or(u32::MAX),
            oldest_age_ms: store.oldest_age(seconds).saturating_mul(1000),
            credits_put: room.credits.try_into().unwrap_or(u32::MAX),
            recall: link.map_or(0, |link| self.shared.recall(at.now, link.session)),
            ..Feedback::default()
        };
        let head = match (control.op(), self.found.is_empty()) {
            (Some(Op::Members), _) if control.status() == Status::Ok => self.members.as_bytes(),
            (_, true) => &[],
            (_, false) => self.descriptors.as_bytes(),
        };
        let pages = Pages { store, found: &mut self.found, head };
        let control = control.with_feedback(feedback);
        Answer::Reply(Reply { exchange, control, pages })
    }

    /// The room that a workload of the client, or of a new one, has now. It reserves nothing: each put is measured when it
    /// begins.
    fn room(&self, tenants: &Tenants, client: Option<ClientId>) -> Room {
        let store = &self.shared.store;
        let (free, frames) = (store.frames_free().into(), store.frames().into());
        let room = tenants.clients.room(client, free, frames);
        if self.shared.is_draining() { Room { credits: 0, ..room } } else { room }
    }

    fn refuse(
        &mut self,
        at: At,
        exchange: ExchangeId,
        control: &Control,
        status: Status,
        room: Room,
    ) -> Answer<'_> {
        match status {
            Status::Full => self.stats.refusals.add(u64::from(control.count())),
            _ => self.stats.denied.add(1),
        }
        self.reply(at, exchange, control.reply(status), room)
    }

    fn publish(&self, now: Instant) {
        self.shared.publish(now);
        self.stats.links.set(self.links.len() as u64);
    }
}
