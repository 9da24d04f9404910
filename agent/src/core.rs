//! The agent's state machine. It knows neither sockets nor clocks: time is an argument, answers are returned.
//!
//! A request passes three gates: the link must be known, the link must have a session (hello) of the workload that
//! the request names, and the operation must be one that this agent does. The tenant always comes from the session,
//! which the link's certificate vouches for. Whatever the request, there is one answer, and a failed request has
//! changed nothing.

use crate::clients::{Bounded, ClientId};
use crate::exchange::Exchange;
use crate::limits::{EXCHANGE_TIMEOUT, FRAME_LEN, SWEEP_PAUSE, SWEEP_SHARE, TICK, TRIM_IDLE};
use crate::quota::Quota;
use crate::stats::Stats;
use crate::store::{Found, Store, TenantId};
use crate::tenants::{TenantKey, Tenants};
use gms_policy::ContentId;
use gms_transport::message::{
    Control, Feedback, HelloReply, HelloRequest, Op, PAGE_SHIFT, PAGES_MAX, PageDescriptor,
    PagesReply, PagesRequest, Status, StatusReply, WorkloadId,
};
use gms_transport::{CloseCode, ExchangeId, LinkId, PeerIdentity};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// When something is handled.
#[derive(Clone, Copy, Debug)]
pub struct At {
    /// Now.
    pub now: Instant,
    /// When the packets which brought it were received.
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
    payload: Option<&'a Core>,
}

impl<'a> Reply<'a> {
    /// The payload's slices, in order, and how many of the array they are.
    pub fn payload(&self) -> ([&'a [u8]; PAGES_MAX + 1], usize) {
        let (mut slices, mut used) = ([&[][..]; PAGES_MAX + 1], 0);
        if let Some(core) = self.payload {
            let descriptors = core.descriptors.as_slice().as_bytes();
            let head = (!descriptors.is_empty()).then_some(descriptors);
            for slice in
                head.into_iter().chain(core.found.iter().map(|&page| core.store.read(page)))
            {
                slices[used] = slice;
                used += 1;
            }
        }
        (slices, used)
    }
}

/// What is known of a link.
#[derive(Debug)]
struct Link {
    peer: PeerIdentity,
    client: ClientId,
    session: Option<TenantId>,
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

/// The state of an agent.
pub struct Core {
    store: Store,
    tenants: Tenants,
    links: BTreeMap<LinkId, Link>,
    exchanges: BTreeMap<ExchangeId, Exchange>,
    /// Pages of the reply at hand, and their descriptors if it has any.
    found: Vec<Found>,
    descriptors: Vec<PageDescriptor>,
    stats: Arc<Stats>,
    started: Instant,
    last_put: Instant,
    tick_at: Option<Instant>,
    /// When few dead pages are looked for next.
    sweep_at: Instant,
    trimming: bool,
    /// Requests which have not come whole in time, to be answered.
    stalled: Vec<ExchangeId>,
    draining: bool,
    quota: Quota,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core")
            .field("links", &self.links.len())
            .field("tenants", &self.tenants.len())
            .field("exchanges", &self.exchanges.len())
            .field("frames_free", &self.store.frames_free())
            .finish_non_exhaustive()
    }
}

impl Core {
    /// An agent which exports the frames of `store`.
    pub fn new(now: Instant, store: Store, stats: Arc<Stats>) -> Self {
        let core = Self {
            store,
            // The standard library's hashers are the random numbers which it has.
            tenants: Tenants::new(RandomState::new().build_hasher().finish()),
            links: BTreeMap::new(),
            exchanges: BTreeMap::new(),
            found: Vec::with_capacity(PAGES_MAX),
            descriptors: Vec::with_capacity(PAGES_MAX),
            stats,
            started: now,
            last_put: now,
            tick_at: None,
            sweep_at: now,
            trimming: false,
            stalled: Vec::new(),
            draining: false,
            quota: Quota::default(),
        };
        core.publish(now);
        core
    }

    /// Whether there may be another line of the log about what a client does.
    pub fn may_log(&mut self, now: Instant) -> bool {
        self.quota.admits(now)
    }

    /// A link came up.
    pub fn handle_connected(
        &mut self,
        now: Instant,
        link: LinkId,
        peer: PeerIdentity,
    ) -> Answer<'static> {
        // A draining agent waits for the workloads which have pages here: they may come back for them.
        let known = self.tenants.clients.find(&peer.id);
        if self.draining && known.is_none_or(|client| self.tenants.clients.live(client) == 0) {
            return Answer::Close(CloseCode::Draining);
        }
        let Some(client) = self.tenants.clients.take(peer.id, Bounded::Link) else {
            return Answer::Close(CloseCode::Overload);
        };
        self.links.insert(link, Link { peer, client, session: None });
        self.publish(now);
        Answer::Nothing
    }

    /// A link ended; its exchanges have been aborted before. Whose it was, unless it had been refused.
    pub fn handle_closed(&mut self, now: Instant, link: LinkId) -> Option<Departure> {
        let Link { peer, client, session } = self.links.remove(&link)?;
        let named = |tenant| Some((self.tenants.key(tenant)?.workload, self.tenants.pages(tenant)));
        let workload = session.and_then(named);
        if let Some(tenant) = session {
            self.tenants.unlink(now, tenant);
        }
        self.tenants.clients.give(client, Bounded::Link, 1);
        self.publish(now);
        Some(Departure { peer, workload })
    }

    /// A request begins. It is answered at once if it is to be refused.
    pub fn handle_control(&mut self, at: At, exchange: ExchangeId, control: Control) -> Answer<'_> {
        let (client, tenant) = match self.admit(exchange.link, &control) {
            Ok(admitted) => admitted,
            Err(status) => return self.refuse(at, exchange, None, &control, status),
        };
        let mut request = Exchange::new(at.now, client, control);
        if let (Some(Op::Put), Some(tenant)) = (control.op(), tenant) {
            let most = self.credits(Some(tenant));
            let taken = request.set_aside(&mut self.store, most);
            if taken == 0 {
                return self.refuse(at, exchange, Some(tenant), &control, Status::Full);
            }
            self.tenants.clients.take_frames(client, taken);
        }
        if !self.tenants.clients.take_more(client, Bounded::Head, request.head_len()) {
            self.free(request);
            return self.refuse_for_now(at, exchange, tenant, &control);
        }
        if !self.tenants.clients.take_more(client, Bounded::Exchange, 1) {
            self.tenants.clients.give(client, Bounded::Head, request.head_len());
            self.free(request);
            return self.refuse_for_now(at, exchange, tenant, &control);
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
        match deposit.deposit(&mut self.store, offset, bytes) {
            Ok(()) => Answer::Nothing,
            Err(_) => {
                self.handle_aborted(exchange);
                Answer::Close(CloseCode::Malformed)
            }
        }
    }

    /// A request has come whole.
    pub fn handle_complete(&mut self, at: At, exchange: ExchangeId) -> Answer<'_> {
        let Some(mut request) = self.exchanges.remove(&exchange) else { return Answer::Nothing };
        if !request.is_whole() {
            self.end(request);
            return Answer::Close(CloseCode::Malformed);
        }
        let control = request.control;
        // The session may have ended since the request began.
        let admitted = self.admit_session(exchange.link, &control);
        let reply = match admitted {
            Err(status) => control.reply(status),
            // Such a page would be taken for another one.
            Ok(_) if request.descriptors().iter().any(|named| named.length() != 0) => {
                control.reply(Status::Invalid)
            }
            Ok((_, session)) => match (control.op(), session) {
                (Some(Op::Hello), _) => self.hello(at.now, exchange.link, &control),
                (Some(Op::Get), Some(tenant)) => self.get(tenant, &request),
                (Some(Op::Put), Some(tenant)) => self.put(at.now, tenant, &mut request),
                (Some(Op::Discard), Some(tenant)) => self.discard(tenant, &request),
                (Some(Op::Goodbye), Some(tenant)) => self.goodbye(at.now, tenant, &control),
                (Some(Op::Status | Op::Grant), _) => self.status(&control),
                _ => control.reply(Status::Unsupported),
            },
        };
        self.end(request);
        let tenant = admitted.ok().and_then(|(_, tenant)| tenant);
        self.reply(at, exchange, tenant, reply)
    }

    /// The rest of a request will not come.
    pub fn handle_aborted(&mut self, exchange: ExchangeId) {
        if let Some(request) = self.exchanges.remove(&exchange) {
            self.end(request);
            self.stats.aborted.add(1);
        }
    }

    /// Gives back what a request holds.
    fn end(&mut self, request: Exchange) {
        self.tenants.clients.give(request.client, Bounded::Exchange, 1);
        self.tenants.clients.give(request.client, Bounded::Head, request.head_len());
        self.free(request);
    }

    /// Gives back the frames set aside for a request.
    fn free(&mut self, request: Exchange) {
        let client = request.client;
        let freed = request.release(&mut self.store);
        self.tenants.clients.give_frames(client, freed);
    }

    /// Does what is due: a bounded step at a time, never more than about a millisecond.
    pub fn handle_timeout(&mut self, now: Instant) {
        let ticked = self.tick_at.take_if(|tick| *tick <= now).is_some();
        if ticked {
            self.expire(now);
            self.publish(now);
        }
        if self.sweeps_now(now) {
            self.sweep_at = now + SWEEP_PAUSE;
            let tenants = &mut self.tenants;
            self.store.sweep(|tenant| {
                let dead = tenants.is_dead(tenant);
                if dead {
                    tenants.remove_page(tenant);
                }
                dead
            });
        } else if self.tenants.dead_pages() == 0
            && (ticked || self.trimming)
            && self.store.can_trim()
        {
            if let Err(error) = self.store.trim() {
                tracing::warn!(%error, "cannot give free memory back");
            }
            self.trimming = self.store.can_trim() && now >= self.last_put + TRIM_IDLE;
        }
    }

    /// Whether pages of ended workloads are to be looked for at once: when they are many, or it is time.
    fn sweeps_now(&self, now: Instant) -> bool {
        let dead = self.tenants.dead_pages();
        let many = dead >= u64::from(self.store.frames_swept()) / SWEEP_SHARE;
        dead > 0 && (many || now >= self.sweep_at)
    }

    /// Ends leases and finds the requests which take too long.
    fn expire(&mut self, now: Instant) {
        for (TenantKey { client, workload }, pages) in self.tenants.expire(now) {
            if self.quota.admits(now) {
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
        match self.reply(At { now, received: now }, id, None, control.reply(Status::Failed)) {
            Answer::Reply(reply) => Some(reply),
            Answer::Nothing | Answer::Close(_) => None,
        }
    }

    /// When [`Core::handle_timeout`] is to be called at the latest.
    pub fn deadline(&mut self, now: Instant) -> Option<Instant> {
        let dead = self.tenants.dead_pages() > 0;
        if self.sweeps_now(now) || self.trimming && !dead {
            return Some(now);
        }
        let waits =
            !self.exchanges.is_empty() || self.tenants.leased() > 0 || self.store.can_trim();
        // Gauges are right a tick after the last request too.
        let publish = self.stats.frames_free.value() != u64::from(self.store.frames_free());
        if self.tick_at.is_none() && (waits || publish) {
            self.tick_at = Some(now + TICK);
        }
        [self.tick_at, dead.then_some(self.sweep_at)].into_iter().flatten().min()
    }

    /// From now on pages are served but none taken, and no new workload.
    pub fn drain(&mut self) {
        self.draining = true;
        self.stats.draining.set(1);
    }

    /// Whether any workload has pages here.
    pub fn in_use(&self) -> bool {
        self.tenants.in_use() > 0
    }

    /// Links which are open.
    pub fn links(&self) -> impl Iterator<Item = LinkId> {
        self.links.keys().copied()
    }

    /// Whether the request may begin: what is known to fail is refused before its payload comes.
    fn admit(&self, link: LinkId, control: &Control) -> Result<Admitted, Status> {
        match control.op() {
            None | Some(Op::Delegate | Op::Epoch | Op::Atomic | Op::Block) => {
                return Err(Status::Unsupported);
            }
            // Frames hold whole pages so far.
            _ if control.has_lengths() => return Err(Status::Unsupported),
            _ => {}
        }
        let admitted = self.admit_session(link, control)?;
        match control.op() {
            Some(Op::Get | Op::Put) if control.body::<PagesRequest>().page_shift != PAGE_SHIFT => {
                Err(Status::Invalid)
            }
            Some(Op::Put) if self.draining => Err(Status::Draining),
            _ => Ok(admitted),
        }
    }

    /// The client, and the tenant of the link's session if the operation needs one.
    fn admit_session(&self, link: LinkId, control: &Control) -> Result<Admitted, Status> {
        let link = self.links.get(&link).ok_or(Status::Denied)?;
        if matches!(control.op(), Some(Op::Hello | Op::Status)) {
            return Ok((link.client, None));
        }
        let tenant = link.session.ok_or(Status::Denied)?;
        let named = TenantKey { client: link.peer.id, workload: control.workload };
        // A request of a session that has ended must not meet the pages of the next one.
        let is_ours = [0, self.tenants.session(tenant)].contains(&control.session);
        if self.tenants.key(tenant) == Some(named) && is_ours {
            Ok((link.client, Some(tenant)))
        } else {
            Err(Status::Denied)
        }
    }

    fn hello(&mut self, now: Instant, link: LinkId, control: &Control) -> Control {
        let Some(Link { peer, session, .. }) = self.links.get_mut(&link) else {
            return control.reply(Status::Denied);
        };
        let (client, workload) = (peer.id, control.workload);
        let key = TenantKey { client, workload };
        let asked: HelloRequest = control.body();
        let lease_ms = u64::from(asked.lease_ms);
        let greeting = |session, lease: Duration| {
            let lease_ms = lease.as_millis().try_into().unwrap_or(u32::MAX);
            let reply = control.reply(Status::Ok);
            reply.with_session(session).with_answer(HelloReply::new(lease_ms, asked.features))
        };
        if let Some(tenant) = *session
            && let Some(other) = self.tenants.key(tenant)
        {
            // One workload a link: a second hello is a retry of the first.
            if other != key {
                return control.reply(Status::Invalid);
            }
            let lease = self.tenants.renew(tenant, lease_ms);
            return greeting(self.tenants.session(tenant), lease);
        }
        if self.draining && !self.tenants.knows(&key) {
            return control.reply(Status::Draining);
        }
        let Some((tenant, lease)) = self.tenants.link(key, lease_ms) else {
            return control.reply(Status::Full);
        };
        *session = Some(tenant);
        let (addr, pages) = (peer.addr, self.tenants.pages(tenant));
        if self.quota.admits(now) {
            tracing::info!(%client, %workload, %addr, pages, "workload connected");
        }
        self.publish(now);
        greeting(self.tenants.session(tenant), lease)
    }

    /// Credits, and all else that a status tells, are in every reply; only the size of the export is added.
    fn status(&self, control: &Control) -> Control {
        let reply = control.reply(if self.draining { Status::Draining } else { Status::Ok });
        match control.op() {
            Some(Op::Status | Op::Grant) => {
                reply.with_answer(StatusReply::new(self.store.frames().into()))
            }
            _ => reply,
        }
    }

    fn get(&mut self, tenant: TenantId, request: &Exchange) -> Control {
        let control = &request.control;
        let asked: PagesRequest = control.body();
        let count = usize::from(asked.count);
        let mut done = 0u64;
        self.found.clear();
        self.descriptors.clear();
        if count == 1 {
            self.found.extend(self.store.find(tenant, ContentId(asked.page)));
            done = self.found.len() as u64;
        }
        for (index, descriptor) in request.descriptors().iter().enumerate() {
            if let Some(found) = self.store.find(tenant, ContentId(descriptor.page())) {
                self.found.push(found);
                self.descriptors.push(PageDescriptor::new(descriptor.page(), found.check));
                done |= 1 << index;
            }
        }
        self.stats.gets.add(count as u64);
        self.stats.misses.add((count - self.found.len()) as u64);
        self.stats.bytes_out.add((self.found.len() * FRAME_LEN) as u64);
        let status = if self.found.len() == count { Status::Ok } else { Status::NotFound };
        let reply = control.reply(status).with_done(done);
        match self.found.first() {
            Some(found) if count == 1 => reply.with_check(found.check),
            _ => reply,
        }
    }

    fn put(&mut self, now: Instant, tenant: TenantId, request: &mut Exchange) -> Control {
        let (control, seconds) = (request.control, self.seconds(now));
        let mut done = 0u64;
        for index in 0..usize::from(control.count()) {
            let Some(&descriptor) = request.descriptors().get(index) else { break };
            let Some(frame) = request.take_frame(index) else { continue };
            let page = ContentId(descriptor.page());
            if self.store.commit(frame, tenant, page, descriptor.check(), seconds) {
                // The frame of the content before it is free.
                self.tenants.clients.give_frames(request.client, 1);
            } else {
                self.tenants.add_page(tenant);
            }
            done |= 1 << index;
        }
        let stored = u64::from(done.count_ones());
        self.last_put = now;
        self.stats.puts.add(stored);
        self.stats.bytes_in.add(stored * FRAME_LEN as u64);
        self.stats.refusals.add(u64::from(control.count()) - stored);
        let status = if stored == u64::from(control.count()) { Status::Ok } else { Status::Full };
        control.reply(status).with_done(done)
    }

    fn discard(&mut self, tenant: TenantId, request: &Exchange) -> Control {
        for page in request.ids() {
            if self.store.discard(tenant, ContentId(page.get())) {
                self.tenants.remove_page(tenant);
                self.stats.discards.add(1);
            }
        }
        request.control.reply(Status::Ok)
    }

    fn goodbye(&mut self, now: Instant, tenant: TenantId, control: &Control) -> Control {
        if let Some(TenantKey { client, workload }) = self.tenants.key(tenant)
            && self.quota.admits(now)
        {
            let pages = self.tenants.pages(tenant);
            tracing::info!(%client, %workload, pages, "workload ended");
        }
        self.tenants.end(tenant);
        for link in self.links.values_mut().filter(|link| link.session == Some(tenant)) {
            link.session = None;
        }
        control.reply(Status::Ok)
    }

    /// Completes a reply with the feedback that each carries. Pages found become its payload.
    fn reply(
        &mut self,
        at: At,
        exchange: ExchangeId,
        tenant: Option<TenantId>,
        control: Control,
    ) -> Answer<'_> {
        let queue_ns = at.now.saturating_duration_since(at.received).as_nanos() as u64;
        self.stats.queue.observe(queue_ns);
        let feedback = Feedback {
            queue_ns: queue_ns.try_into().unwrap_or(u32::MAX),
            service_ns: 0,
            frames_free: self.store.frames_free(),
            oldest_age_ms: self.store.oldest_age(self.seconds(at.now)).saturating_mul(1000),
            credits_put: self.credits(tenant).try_into().unwrap_or(u32::MAX),
            ..Feedback::default()
        };
        let payload = match control.op() {
            Some(Op::Get) => control.answer::<PagesReply>().done != 0,
            _ => false,
        };
        let control = control.with_feedback(feedback);
        Answer::Reply(Reply { exchange, control, payload: payload.then_some(self) })
    }

    /// Pages that the tenant, or a new one, may put now. They reserve nothing: each put is measured when it begins.
    fn credits(&self, tenant: Option<TenantId>) -> u64 {
        if self.draining {
            return 0;
        }
        let client = tenant.and_then(|tenant| self.tenants.client(tenant));
        let (free, frames) = (self.store.frames_free().into(), self.store.frames().into());
        self.tenants.clients.credits(client, free, frames)
    }

    fn refuse(
        &mut self,
        at: At,
        exchange: ExchangeId,
        tenant: Option<TenantId>,
        control: &Control,
        status: Status,
    ) -> Answer<'_> {
        self.count_refusal(control, status);
        self.reply(at, exchange, tenant, control.reply(status))
    }

    /// Refuses what the client may ask for again when fewer of its requests are under way; others are not concerned.
    fn refuse_for_now(
        &mut self,
        at: At,
        exchange: ExchangeId,
        tenant: Option<TenantId>,
        control: &Control,
    ) -> Answer<'_> {
        let is_put = control.op() == Some(Op::Put);
        let status = if is_put { Status::Full } else { Status::Denied };
        self.refuse(at, exchange, tenant, control, status)
    }

    fn count_refusal(&self, control: &Control, status: Status) {
        match status {
            Status::Full => self.stats.refusals.add(u64::from(control.count())),
            _ => self.stats.denied.add(1),
        }
    }

    fn seconds(&self, now: Instant) -> u32 {
        now.saturating_duration_since(self.started).as_secs() as u32
    }

    fn publish(&self, now: Instant) {
        let (frames, free) = (u64::from(self.store.frames()), u64::from(self.store.frames_free()));
        self.stats.frames_total.set(frames);
        self.stats.frames_free.set(free);
        self.stats.frames_used.set(frames - free);
        self.stats.oldest_age_s.set(u64::from(self.store.oldest_age(self.seconds(now))));
        self.stats.tenants.set(self.tenants.len() as u64);
        self.stats.links.set(self.links.len() as u64);
    }
}
