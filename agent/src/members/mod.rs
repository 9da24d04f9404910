//! Membership: a thread that gossips with the other agents over links of its own, and the list of members that anybody may ask for.
//!
//! Not in the loops that serve pages: it looks up names, which blocks, and no page is to wait for a handshake. The loops hand it what
//! comes from other agents ([`Bulletin`]); what it believes is in [`swim`], how that travels in [`codec`].

mod codec;
mod swim;

use crate::bulletin::Bulletin;
use crate::limits::{
    BLOCK_MAX, JOIN_EVERY, LEAVE, PACKETS_BEHIND_MAX, PEER_LINK_IDLE, PEER_LINKS_MAX, SEEDS_MAX,
    UNITE_EVERY,
};
use crate::renewal::{Offer, Renewal};
use crate::shared::Shared;
use crate::stop::Stop;
use codec::Node;
use gms_transport::keys::Identity;
use gms_transport::message::members::{GOSSIP_LEN_MAX, is_of_host};
use gms_transport::message::{Control, GossipReply, Op, Status, WorkloadId, Zone};
use gms_transport::{CloseCode, Event, LinkId, PeerId, Quic, Transport, TransportError};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Instant, SystemTime};
use swim::{Change, Swim};

/// How an agent is to be a member.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Joining {
    /// `HOST:PORT` of agents that are members, each a name with any number of addresses.
    pub seeds: Vec<String>,
    /// Where the agent stands.
    pub zone: Zone,
}

/// Why an agent cannot be a member.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// An old certificate.
    #[error("its certificate has no id: issue it anew (gms keys renew)")]
    NoId,
    /// No socket for links to other agents.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// Anything else.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// The thread. It ends when the agent is asked to stop.
#[derive(Debug)]
pub(crate) struct Members {
    thread: JoinHandle<()>,
    renewal: Arc<Renewal>,
}

impl Members {
    /// Begins to gossip, for the agent at `listen`.
    pub(crate) fn spawn(
        (shared, stop): (Arc<Shared>, Arc<Stop>),
        identity: &Identity,
        listen: SocketAddr,
        joining: Joining,
    ) -> Result<Self, JoinError> {
        let PeerId::Issued(id) = identity.id() else { return Err(JoinError::NoId) };
        let Joining { seeds, zone } = joining;
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let incarnation = since_1970.map_or(0, |since| since.as_nanos() as u64);
        let (now, node) = (Instant::now(), Node { id, addr: listen, incarnation, zone });
        // The standard library's hashers are the random numbers which it has.
        let swim = Swim::new(now, node, RandomState::new().build_hasher().finish());
        let transport = Quic::client(SocketAddr::new(listen.ip(), 0), identity)?;
        let renewal = Arc::new(Renewal::new()?);
        let fresh = Arc::new(Bulletin::new()?);
        let bulletin = shared.bulletin.get_or_init(|| fresh).clone();
        let mut gossip = Gossip {
            shared,
            bulletin,
            stop,
            renewal: renewal.clone(),
            transport,
            swim,
            links: BTreeMap::new(),
            seeds,
            seek_at: now,
            seeks: false,
            told: BTreeSet::new(),
            requests: 0,
            open: 0,
        };
        gossip.publish(now);
        let run = move || {
            if let Err(error) = gossip.run() {
                tracing::error!(%error, "the agent is no member any more");
            }
        };
        let thread = std::thread::Builder::new().name("members".into()).spawn(run)?;
        Ok(Self { thread, renewal })
    }

    /// Has it take new keys.
    pub(crate) fn renew(&self, offer: Arc<Offer>) {
        self.renewal.offer(offer);
    }

    /// Waits for its end, after the request to stop.
    pub(crate) fn join(self) {
        if self.thread.join().is_err() {
            tracing::error!("the thread that gossips panicked");
        }
    }
}

/// A link to another agent.
struct Peer {
    /// The address that it is called by.
    addr: SocketAddr,
    /// Who it is, once the link is up.
    id: Option<[u8; 16]>,
    /// Whether it was asked to let this agent in.
    is_seed: bool,
    /// What is sent when it is up, and to whom.
    behind: Vec<([u8; 16], Vec<u8>)>,
    used_at: Instant,
}

struct Gossip {
    shared: Arc<Shared>,
    bulletin: Arc<Bulletin>,
    stop: Arc<Stop>,
    renewal: Arc<Renewal>,
    transport: Quic,
    swim: Swim,
    links: BTreeMap<LinkId, Peer>,
    seeds: Vec<String>,
    seek_at: Instant,
    /// Whether they are being looked up.
    seeks: bool,
    /// What the log has said of them since a member joined.
    told: BTreeSet<String>,
    requests: u64,
    /// Requests without a reply.
    open: usize,
}

impl Gossip {
    fn run(&mut self) -> io::Result<()> {
        let mut leaves_by: Option<Instant> = None;
        loop {
            let now = Instant::now();
            if leaves_by.is_none() && self.stop.requested().is_some() {
                self.bulletin.leave();
                self.swim.leave(now);
                leaves_by = Some(now + LEAVE);
            }
            let busy = self.turn(now)?;
            let waits = self.open > 0 || self.links.values().any(|peer| !peer.behind.is_empty());
            if leaves_by.is_some_and(|end| now >= end || !waits) {
                break;
            }
            if !busy {
                self.block(now, leaves_by)?;
            }
        }
        self.hang_up(Instant::now())
    }

    /// Closes all links.
    fn hang_up(&mut self, now: Instant) -> io::Result<()> {
        for link in std::mem::take(&mut self.links).into_keys() {
            self.transport.close(now, link, CloseCode::Goodbye);
        }
        self.transport.flush(now)
    }

    /// One turn of the loop; true if anything came.
    fn turn(&mut self, now: Instant) -> io::Result<bool> {
        self.renew(now)?;
        let mut busy = self.transport.drive(now)?;
        while let Some(event) = self.transport.poll(now) {
            busy = true;
            self.handle(now, event);
        }
        let mail = self.bulletin.take();
        for letter in mail.letters {
            let from = (letter.from, letter.ip);
            if let Err(error) = self.swim.handle_packet(now, from, &letter.packet) {
                let node = PeerId::Issued(letter.from);
                tracing::debug!(%node, %error, "a packet of gossip is refused");
            }
        }
        if let Some((found, problems)) = mail.seeds {
            self.seeks = false;
            problems.into_iter().for_each(|problem| self.tell_once(problem));
            self.join(now, found);
        }
        self.swim.handle_timeout(now);
        if now >= self.seek_at && self.stop.requested().is_none() {
            self.seek(now);
        }
        while let Some((to, packet)) = self.swim.poll_packet() {
            self.send(now, to, packet);
        }
        self.close_idle(now);
        self.publish(now);
        self.transport.flush(now)?;
        Ok(busy)
    }

    /// Takes new keys, if there are any: by new links.
    fn renew(&mut self, now: Instant) -> io::Result<()> {
        let Some(offer) = self.renewal.take() else { return Ok(()) };
        let bind = SocketAddr::new(self.swim.node().addr.ip(), 0);
        match Quic::client(bind, &offer.identity) {
            Ok(transport) => {
                self.hang_up(now)?;
                (self.transport, self.open) = (transport, 0);
            }
            Err(error) => tracing::error!(%error, "gossip goes on with the keys before"),
        }
        Ok(())
    }

    fn handle(&mut self, now: Instant, event: Event) {
        match event {
            Event::Connected { link, peer } => self.meet(now, link, peer.id),
            Event::Closed { link, reason } => match self.links.remove(&link) {
                Some(Peer { is_seed: true, id: None, .. }) => self.tell_once(reason.to_string()),
                _ => tracing::debug!(%reason, "a link to another agent ended"),
            },
            Event::Control { exchange, control } => {
                let id = self.links.get(&exchange.link).and_then(|peer| peer.id);
                let (Some(id), Some(Op::Gossip)) = (id, control.op()) else { return };
                match control.status() {
                    Status::Ok => {
                        let said = (control.answer::<GossipReply>(), control.feedback());
                        self.swim.handle_reply(now, id, said);
                    }
                    Status::Unsupported => {
                        let node = PeerId::Issued(id);
                        self.tell_once(format!(
                            "agent {node} knows no members: it is of an older release"
                        ));
                    }
                    status => {
                        tracing::debug!(node = %PeerId::Issued(id), ?status, "gossip refused");
                    }
                }
            }
            Event::Payload { .. } => {}
            Event::Complete { .. } | Event::Aborted { .. } => {
                self.open = self.open.saturating_sub(1);
            }
        }
    }

    /// A link is up.
    fn meet(&mut self, now: Instant, link: LinkId, id: PeerId) {
        let Some(peer) = self.links.get_mut(&link) else { return };
        let PeerId::Issued(id) = id else {
            return self.transport.close(now, link, CloseCode::Goodbye);
        };
        peer.id = Some(id);
        let (addr, is_seed) = (peer.addr, peer.is_seed);
        for (to, packet) in std::mem::take(&mut peer.behind) {
            // Another agent may be there now.
            if to == id {
                self.request(now, link, &packet);
            }
        }
        if is_seed {
            self.announce(now, id, addr);
        }
    }

    /// Asks the agent with this id to be let in.
    fn announce(&mut self, now: Instant, id: [u8; 16], addr: SocketAddr) {
        // A name may be of all agents, this one among them.
        if id != self.swim.node().id {
            self.swim.announce(now, Node { id, addr, incarnation: 0, zone: Zone::default() });
        }
    }

    /// Warns, but not each second of the same.
    fn tell_once(&mut self, problem: String) {
        if self.told.len() < SEEDS_MAX && self.told.insert(problem.clone()) {
            tracing::warn!(problem, "cannot join");
        }
    }

    fn send(&mut self, now: Instant, to: Node, packet: Vec<u8>) {
        let up = self.links.iter().find(|(_, peer)| peer.id == Some(to.id));
        if let Some((link, _)) = up {
            return self.request(now, *link, &packet);
        }
        if !is_of_host(to.addr) {
            return;
        }
        let begun = self.links.iter().find(|(_, peer)| peer.id.is_none() && peer.addr == to.addr);
        let begun = begun.map(|(link, _)| *link);
        let link = begun.or_else(|| self.connect(now, to.addr, false));
        let peer = link.and_then(|link| self.links.get_mut(&link));
        if let Some(peer) = peer.filter(|peer| peer.behind.len() < PACKETS_BEHIND_MAX) {
            peer.behind.push((to.id, packet));
        }
    }

    fn request(&mut self, now: Instant, link: LinkId, packet: &[u8]) {
        debug_assert!(packet.len() <= GOSSIP_LEN_MAX);
        self.requests += 1;
        let control = Control::request(Op::Gossip, self.requests, WorkloadId::default());
        match self.transport.request(now, link, &control, &[packet]) {
            Ok(_) => self.open += 1,
            Err(error) => tracing::debug!(%error, "a packet of gossip is lost"),
        }
        if let Some(peer) = self.links.get_mut(&link) {
            peer.used_at = now;
        }
    }

    fn connect(&mut self, now: Instant, addr: SocketAddr, is_seed: bool) -> Option<LinkId> {
        if self.links.len() >= PEER_LINKS_MAX {
            let oldest = self.links.iter().min_by_key(|(_, peer)| peer.used_at);
            let oldest = oldest.map(|(link, _)| *link)?;
            self.links.remove(&oldest);
            self.transport.close(now, oldest, CloseCode::Goodbye);
        }
        let link = self.transport.connect(now, addr);
        let link =
            link.inspect_err(|error| tracing::debug!(%error, "cannot call an agent")).ok()?;
        let peer = Peer { addr, id: None, is_seed, behind: Vec::new(), used_at: now };
        self.links.insert(link, peer);
        Some(link)
    }

    fn close_idle(&mut self, now: Instant) {
        let idle = self.links.iter().filter(|(_, peer)| now >= peer.used_at + PEER_LINK_IDLE);
        let idle: Vec<LinkId> = idle.map(|(link, _)| *link).collect();
        for link in idle {
            self.links.remove(&link);
            self.transport.close(now, link, CloseCode::Goodbye);
        }
    }

    /// Has the names after `--join` looked up, by a thread that may block.
    fn seek(&mut self, now: Instant) {
        self.seek_at = now + if self.swim.is_alone() { JOIN_EVERY } else { UNITE_EVERY };
        // One at a time.
        if self.seeds.is_empty() || self.seeks {
            return;
        }
        let (names, bulletin) = (self.seeds.clone(), self.bulletin.clone());
        let look_up = move || bulletin.post_seeds(look_up(&names));
        match std::thread::Builder::new().name("seeds".into()).spawn(look_up) {
            Ok(_) => self.seeks = true,
            Err(error) => self.tell_once(format!("no thread to look names up: {error}")),
        }
    }

    /// Asks agents at these addresses to be let in, unless they are members.
    fn join(&mut self, now: Instant, found: Vec<SocketAddr>) {
        let members = self.bulletin.members();
        for addr in found {
            if members.iter().any(|member| member.addr() == addr) {
                continue;
            }
            match self.links.values().find(|peer| peer.addr == addr).map(|peer| peer.id) {
                Some(id) => id.into_iter().for_each(|id| self.announce(now, id, addr)),
                None => {
                    self.connect(now, addr, true);
                }
            }
        }
    }

    /// Tells the log and the threads that serve what has changed.
    fn publish(&mut self, now: Instant) {
        while let Some(change) = self.swim.poll_change() {
            let (Change::Joined(node) | Change::Gone(node) | Change::Restarted(node)) = change;
            self.told.clear();
            if !self.shared.may_log(now) {
                continue;
            }
            let (id, addr, zone) = (PeerId::Issued(node.id), node.addr, node.zone);
            match change {
                Change::Joined(_) => tracing::info!(node = %id, %addr, %zone, "member joined"),
                Change::Gone(_) => tracing::info!(node = %id, %addr, "member gone"),
                Change::Restarted(_) => tracing::info!(node = %id, %addr, "member restarted"),
            }
        }
        let members = self.swim.members(now);
        self.shared.gauges.members.set(members.len() as u64);
        self.bulletin.publish(members, self.swim.lives());
    }

    /// Waits for packets, mail, new keys, a deadline, or (unless it came already) the request to stop.
    fn block(&mut self, now: Instant, leaves_by: Option<Instant>) -> io::Result<()> {
        let idle = self.links.values().map(|peer| peer.used_at + PEER_LINK_IDLE).min();
        let deadlines = [self.transport.deadline(), self.swim.deadline(), idle, leaves_by];
        let latest = if leaves_by.is_some() { now + BLOCK_MAX } else { self.seek_at };
        let deadline = deadlines.into_iter().flatten().fold(latest, Instant::min);
        let timeout = deadline.saturating_duration_since(now);
        let fds =
            [self.transport.fd(), self.bulletin.as_fd(), self.renewal.as_fd(), self.stop.as_fd()];
        let mut fds = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let fds = if leaves_by.is_some() { &mut fds[..3] } else { &mut fds[..] };
        match ppoll(fds, Some(timeout.into()), None) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// The addresses of these names, and which have none.
fn look_up(names: &[String]) -> (Vec<SocketAddr>, Vec<String>) {
    let (mut found, mut problems) = (Vec::new(), Vec::new());
    for name in names {
        match name.to_socket_addrs() {
            Ok(addrs) => found.extend(addrs.take(SEEDS_MAX)),
            Err(error) => problems.push(format!("{name}: {error}")),
        }
    }
    found.truncate(SEEDS_MAX);
    (found, problems)
}
