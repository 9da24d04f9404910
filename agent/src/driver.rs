//! The loop of a thread: receive, let the core answer, send; spin briefly when idle, then block. The only reader of the clock
//! and the only user of the transport.

use crate::core::{Answer, At, Core, Departure, Reply};
use crate::limits::{
    BLOCK_MAX, DISCARD_STEPS, DISCARDS_TURN, DRAIN_MAX, EXPEL_EVERY, FAREWELL, FLUSH_EVENTS, TICK,
};
use crate::renewal::Renewal;
use crate::shared::Shared;
use crate::spin::{SLICE, Spin, prefer_latency};
use crate::stats::Stats;
use crate::stop::Stop;
use gms_transport::message::Feedback;
use gms_transport::{CloseCode, CloseReason, Event, LinkId, PeerIdentity, Transport};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sched::sched_yield;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// A transport, a core, and what ends them.
pub struct Driver<T> {
    transport: T,
    core: Core,
    shared: Arc<Shared>,
    stats: Arc<Stats>,
    stop: Arc<Stop>,
    renewal: Arc<Renewal>,
    spin: Spin,
    spin_max: Duration,
    /// When links of peers whose certificates are no longer good are closed next.
    expel_at: Instant,
}

impl<T: Transport> Driver<T> {
    /// Connects a transport which listens with a core; spins for `spin_max` at most.
    pub fn new(
        transport: T,
        core: Core,
        stop: Arc<Stop>,
        renewal: Arc<Renewal>,
        spin_max: Duration,
    ) -> Self {
        let (spin, expel_at) = (Spin::new(), Instant::now() + EXPEL_EVERY);
        let (shared, stats) = (core.shared().clone(), core.stats().clone());
        Self { transport, core, shared, stats, stop, renewal, spin, spin_max, expel_at }
    }

    /// Serves until it is asked to stop, then drains.
    ///
    /// # Errors
    /// When the socket or the clock of the machine fails for good.
    pub fn run(&mut self) -> io::Result<()> {
        prefer_latency(SLICE);
        let mut idle: Option<Idle> = None;
        while self.stop.requested().is_none() {
            self.renew();
            if self.turn(Instant::now)? {
                if idle.take().is_some_and(|idle| idle.spins) {
                    self.spin.report(true);
                }
                continue;
            }
            let now = Instant::now();
            let Idle { since, spins } = *idle.get_or_insert_with(|| Idle {
                since: now,
                spins: !self.spin_max.is_zero() && self.spin.is_worthwhile(),
            });
            if spins && now.duration_since(since) < self.spin_max {
                sched_yield()?;
                continue;
            }
            if spins {
                self.spin.report(false);
            }
            idle = None;
            self.block(now, now + BLOCK_MAX, true)?;
        }
        self.drain()
    }

    /// Takes new keys, if there are any.
    fn renew(&mut self) {
        let Some(offer) = self.renewal.take() else { return };
        let (identity, renewed) = (&offer.identity, self.transport.renew(&offer.identity));
        if renewed.is_ok() {
            self.expel_at = Instant::now();
            // Every loop does so: the last one to come must not be awaited.
            self.shared.accounts().clients.set_allowed(identity.allowed().cloned());
        }
        match offer.note_taken(renewed.is_ok()) {
            None => {}
            Some(true) => {
                let expires = seconds_since_1970(identity.expires());
                self.shared.gauges.certificate_expires_s.set(expires);
                let (node, certificate) = (identity.id(), identity.fingerprint());
                let (revoked, allowed) = (identity.revoked(), identity.allowed_clients());
                tracing::info!(%node, %certificate, expires, revoked, allowed, "keys renewed");
            }
            Some(false) => {
                tracing::error!("not every thread has taken the new keys: restart the agent");
            }
        }
        if let Err(error) = renewed {
            tracing::error!(%error, "the keys of a thread stay as they are");
        }
    }

    /// One turn of the loop; true if anything came. `clock` tells the time: a simulation has its own.
    ///
    /// # Errors
    /// As [`Driver::run`].
    pub fn turn(&mut self, clock: impl Fn() -> Instant) -> io::Result<bool> {
        let received = clock();
        // First: what waits of those who are expelled is not received.
        if received >= self.expel_at {
            self.transport.expel(received, SystemTime::now());
            self.expel_at = received + EXPEL_EVERY;
        }
        let mut busy = self.transport.drive(received)?;
        let mut handled = 0;
        while let Some(event) = self.transport.poll(received) {
            busy = true;
            handled += 1 + self.handle(At { now: clock(), received }, event, &clock);
            // The requester can take pages in while the next are looked up.
            if handled >= FLUSH_EVENTS {
                self.transport.flush(received)?;
                handled = 0;
            }
        }
        if self.core.deadline(received).is_some_and(|deadline| deadline <= received) {
            self.core.handle_timeout(received);
            while let Some(reply) = self.core.poll_stalled(received) {
                busy = true;
                let at = At { now: received, received };
                send(&mut self.transport, &self.stats, (at, received), &reply);
            }
        }
        busy |= self.discard_parts(received, &clock);
        self.transport.flush(received)?;
        Ok(busy)
    }

    /// Some parts of long discards; true if there were any.
    fn discard_parts(&mut self, received: Instant, clock: &impl Fn() -> Instant) -> bool {
        let mut until = None;
        for _ in 0..DISCARD_STEPS {
            let Some(exchange) = self.core.poll_unfinished() else { break };
            let until = *until.get_or_insert_with(|| clock() + DISCARDS_TURN);
            if !self.transport.begin_work(received, exchange.link) {
                self.core.put_off(exchange);
                continue;
            }
            if !self.core.discards_part(exchange) {
                self.handle(At { now: clock(), received }, Event::Complete { exchange }, clock);
            }
            if clock() >= until {
                break;
            }
        }
        until.is_some()
    }

    /// Handles an event; returns how many pages the answer carries.
    fn handle(&mut self, at: At, event: Event, clock: impl Fn() -> Instant) -> usize {
        let (core, transport) = (&mut self.core, &mut self.transport);
        let (shared, stats) = (&self.shared, &self.stats);
        let (link, answer) = match event {
            Event::Connected { link, peer } => {
                if shared.may_log(at.now, Some(peer.id)) {
                    let PeerIdentity { id, fingerprint, addr, .. } = peer;
                    tracing::info!(%addr, client = %id, certificate = %fingerprint, "connected");
                }
                (link, core.handle_connected(at.now, link, peer))
            }
            Event::Closed { link, reason } => {
                let gone = core.handle_closed(at.now, link);
                if shared.may_log(at.now, gone.map(|gone| gone.peer.id)) {
                    tell_end(gone, &reason);
                }
                return 0;
            }
            Event::Control { exchange, control } => {
                (exchange.link, core.handle_control(at, exchange, control))
            }
            Event::Payload { exchange, offset, bytes } => {
                (exchange.link, core.handle_payload(exchange, offset, &bytes))
            }
            Event::Complete { exchange } if core.is_for_later(exchange) => return 0,
            Event::Complete { exchange } => (exchange.link, core.handle_complete(at, exchange)),
            Event::Aborted { exchange, reason } => {
                tracing::debug!(?exchange, %reason, "request aborted");
                core.handle_aborted(exchange);
                return 0;
            }
        };
        let (pages, code) = answered(answer, |reply| send(transport, stats, (at, clock()), reply));
        if let Some(code) = code {
            if shared.may_log(at.now, core.client_of(link)) {
                tracing::warn!(?link, ?code, "closing a link");
            }
            transport.close(at.now, link, code);
        }
        pages
    }

    /// Waits for packets, new keys, a deadline, `latest`, or (unless it came already) the request to stop.
    fn block(&mut self, now: Instant, latest: Instant, stoppable: bool) -> io::Result<()> {
        let deadlines = [self.transport.deadline(), self.core.deadline(now), Some(latest)];
        let deadline = deadlines.into_iter().flatten().min().unwrap_or(latest);
        let timeout = deadline.saturating_duration_since(now);
        if timeout.is_zero() {
            return Ok(());
        }
        let fds = [self.transport.fd(), self.renewal.as_fd(), self.stop.as_fd()];
        let mut fds = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let fds = if stoppable { &mut fds[..] } else { &mut fds[..2] };
        match ppoll(fds, Some(timeout.into()), None) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Serves workloads which still have pages here until they have gone or their grace is over, then closes all
    /// links and says so.
    fn drain(&mut self) -> io::Result<()> {
        let began = Instant::now();
        if self.shared.drain() {
            tracing::info!("draining");
        }
        loop {
            let grace = self.stop.requested().unwrap_or_default().min(DRAIN_MAX);
            let now = Instant::now();
            if now >= began + grace || self.shared.accounts().held() == 0 {
                break;
            }
            self.renew();
            if !self.turn(Instant::now)? {
                // A second request may shorten the grace: look for it now and then.
                self.block(now, (began + grace).min(now + TICK), false)?;
            }
        }
        let end = Instant::now() + FAREWELL;
        let links: Vec<LinkId> = self.core.links().collect();
        for link in links {
            self.transport.close(Instant::now(), link, CloseCode::Draining);
        }
        self.transport.flush(Instant::now())?;
        // Where clients have their turns, not all that is to be sent leaves in one.
        let mut busy = true;
        while (busy || self.core.links().next().is_some()) && Instant::now() < end {
            busy = self.turn(Instant::now)?;
            if !busy {
                sched_yield()?;
            }
        }
        self.transport.flush(Instant::now())
    }
}

/// For metrics and logs; zero for times before.
pub fn seconds_since_1970(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Nothing came since.
#[derive(Clone, Copy)]
struct Idle {
    since: Instant,
    spins: bool,
}

/// Sends what is to be sent. Returns how many pages that carries, and why the link is to be closed, if it is.
fn answered(
    answer: Answer<'_>,
    send: impl FnOnce(&Reply<'_>) -> usize,
) -> (usize, Option<CloseCode>) {
    match answer {
        Answer::Nothing => (0, None),
        Answer::Reply(reply) => (send(&reply), None),
        Answer::Close(code) => (0, Some(code)),
    }
}

/// Stamps a reply with its service time and sends it. Returns how many pages it carries.
fn send<T: Transport>(
    transport: &mut T,
    stats: &Stats,
    (at, now): (At, Instant),
    reply: &Reply<'_>,
) -> usize {
    let service_ns = now.saturating_duration_since(at.now).as_nanos() as u64;
    stats.service.observe(service_ns);
    let service_ns = service_ns.try_into().unwrap_or(u32::MAX);
    let feedback = Feedback { service_ns, ..reply.control.feedback() };
    let control = reply.control.with_feedback(feedback);
    let (slices, used) = reply.payload();
    // The requester retries: its exchange has a deadline.
    if let Err(error) = transport.reply(now, reply.exchange, &control, &slices[..used]) {
        tracing::debug!(exchange = ?reply.exchange, %error, "reply not sent");
    }
    reply.pages()
}

/// Logs that a link has ended.
fn tell_end(gone: Option<Departure>, reason: &CloseReason) {
    let client = gone.map(|gone| tracing::field::display(gone.peer.id));
    let workload = gone.and_then(|gone| gone.workload);
    let pages = workload.map(|(_, pages)| pages);
    let workload = workload.map(|(workload, _)| tracing::field::display(workload));
    tracing::info!(client, workload, pages, %reason, "disconnected");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::renewal::Offer;
    use crate::slab::Slab;
    use crate::store::Store;
    use gms_policy::Bytes;
    use gms_transport::Quic;
    use gms_transport::keys::{self, Role};
    use gms_transport::message::{Control, WorkloadId};
    use std::path::PathBuf;

    /// A directory of the test's own, removed with all that is in it.
    struct Dir(PathBuf);

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_request_that_waits_when_its_client_is_revoked_is_not_executed() {
        let now = Instant::now();
        let dir = Dir(std::env::temp_dir().join(format!("gms-driver-{}", std::process::id())));
        keys::init(&dir.0).expect("keys");
        let load = |role| keys::load(&dir.0, role).expect("keys");
        let (node, client) = (load(Role::Node), load(Role::Client));
        let any = "127.0.0.1:0".parse().expect("an address");
        let server = Quic::server(any, &node).expect("a socket");
        let mut pager = Quic::client(any, &client).expect("a socket");
        let link = pager.connect(now, server.local_addr()).expect("a link");
        let store = Store::new(Slab::new(Bytes(16 << 12), false).expect("memory"), 1);
        let shared = Arc::new(Shared::new(now, store.expect("memory")));
        let (stats, renewal) = (Arc::new(Stats::default()), Arc::new(Renewal::new().expect("one")));
        let (core, stop) =
            (Core::new(now, shared, 0, stats.clone()), Arc::new(Stop::new().expect("one")));
        let mut driver = Driver::new(server, core, stop, renewal.clone(), Duration::ZERO);
        let turn = |driver: &mut Driver<Quic>, pager: &mut Quic| {
            pager.drive(Instant::now()).expect("a socket");
            driver.turn(Instant::now).expect("a socket");
            assert!(now.elapsed() < Duration::from_secs(20), "no event");
            pager.poll(Instant::now())
        };
        // Without a session it is denied.
        let get = Control::get(1, WorkloadId([3; 16]), 1);
        while !matches!(turn(&mut driver, &mut pager), Some(Event::Connected { .. })) {}
        pager.request(Instant::now(), link, &get, &[]).expect("room");
        while !matches!(turn(&mut driver, &mut pager), Some(Event::Complete { .. })) {}
        assert_eq!(stats.denied.value(), 1);
        keys::revoke(&dir.0, &client.id().to_string()).expect("a list");
        renewal.offer(Offer::new(node.reload(&dir.0).expect("keys"), 1));
        pager.request(Instant::now(), link, &get, &[]).expect("room");
        pager.flush(Instant::now()).expect("a socket");
        driver.renew();
        while !matches!(turn(&mut driver, &mut pager), Some(Event::Closed { .. })) {}
        assert_eq!(stats.denied.value(), 1);
    }
}
