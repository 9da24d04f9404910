//! Membership: a thread that gossips with the other agents over links of its own, and the list of members that anybody may ask for.
//!
//! Not in the loops that serve pages: it looks up names, which blocks, and no page is to wait for a handshake. The loops hand it what
//! comes from other agents ([`Bulletin`]); what it believes is in [`swim`], how that travels in [`codec`], whom it calls for that in [`calls`].

mod calls;
mod codec;
mod swim;

use crate::bulletin::Bulletin;
use crate::limits::{
    BLOCK_MAX, JOIN_EVERY, LEAVE, PACKET_REPLY, PACKETS_BEHIND_MAX, PACKETS_OPEN_MAX,
    PEER_LINK_IDLE, PEER_LINKS_MAX, SEEDS_MAX, UNITE_EVERY,
};
use crate::quota::Quota;
use crate::renewal::{Offer, Renewal};
use crate::shared::Shared;
use crate::stop::Stop;
use calls::Calls;
use codec::Node;
use gms_transport::keys::Identity;
use gms_transport::message::members::{GOSSIP_LEN_MAX, is_of_host};
use gms_transport::message::{Control, GossipReply, Op, Status, WorkloadId, Zone};
use gms_transport::{
    CloseCode, Event, ExchangeId, LinkId, PeerId, Quic, Transport, TransportError,
};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Instant, SystemTime};
use swim::{Change, Refused, Swim};

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
            seeks: None,
            told: BTreeSet::new(),
            has_told_twin: false,
            requests: 0,
            calls: Calls::new(now),
            lines: Quota::default(),
        };
        gossip.publish(now);
        let run = move || {
            // Whatever happens, a panic included: a list that nobody keeps up is not to be told.
            let _leave = Leave(gossip.shared.clone());
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

/// Says that the agent is no member any more.
struct Leave(Arc<Shared>);

impl Drop for Leave {
    fn drop(&mut self) {
        if let Some(bulletin) = self.0.bulletin.get() {
            bulletin.leave();
        }
        self.0.gauges.members.set(0);
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
    /// Requests without a reply, and when each was sent.
    open: Vec<(ExchangeId, Instant)>,
    used_at: Instant,
}

impl Peer {
    /// When the link is to be closed: a node that does not answer must not have more and more kept for it.
    fn ends_at(&self) -> Instant {
        self.open.first().map_or(self.used_at + PEER_LINK_IDLE, |(_, sent)| *sent + PACKET_REPLY)
    }
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
    /// Looks them up, if it has not ended.
    seeks: Option<JoinHandle<()>>,
    /// What the log has said of them since a member joined.
    told: BTreeSet<String>,
    has_told_twin: bool,
    requests: u64,
    /// To others than seeds.
    calls: Calls,
    /// What the log says of members.
    lines: Quota,
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
            let mut peers = self.links.values();
            let waits = peers.any(|peer| !(peer.open.is_empty() && peer.behind.is_empty()));
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
            let (node, from) = (PeerId::Issued(letter.from), (letter.from, letter.ip));
            match self.swim.handle_packet(now, from, &letter.packet) {
                // It is there now, whoever was there before.
                Ok(()) => {
                    let addr = self.swim.addr(letter.from);
                    addr.into_iter().for_each(|addr| self.calls.trust(addr));
                }
                Err(Refused::Twin) => self.tell_twin(letter.ip),
                Err(error) => tracing::debug!(%node, %error, "a packet of gossip is refused"),
            }
        }
        for found in mail.seeds {
            match found {
                Ok(addrs) => self.join(now, addrs),
                Err(problem) => self.tell_once(problem),
            }
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
                self.transport = transport;
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
                Some(Peer { id: None, addr, .. }) => {
                    tracing::debug!(%reason, "another agent cannot be called");
                    self.calls.shun(now, addr);
                }
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
            Event::Complete { exchange } | Event::Aborted { exchange, .. } => {
                if let Some(peer) = self.links.get_mut(&exchange.link) {
                    peer.open.retain(|(open, _)| *open != exchange);
                }
            }
        }
    }

    /// A link is up.
    fn meet(&mut self, now: Instant, link: LinkId, id: PeerId) {
        let Some(peer) = self.links.get_mut(&link) else { return };
        let (addr, is_seed) = (peer.addr, peer.is_seed);
        let id = match id {
            PeerId::Issued(id) if is_seed || peer.behind.iter().any(|(to, _)| *to == id) => id,
            // Somebody else is there.
            _ => {
                self.calls.shun(now, addr);
                return self.close(now, link);
            }
        };
        (peer.id, peer.used_at) = (Some(id), now);
        let behind = std::mem::take(&mut peer.behind);
        let up = self.links.iter().filter(|(_, peer)| peer.id.is_some());
        let oldest = up.clone().min_by_key(|(_, peer)| peer.used_at).map(|(link, _)| *link);
        if let Some(oldest) = oldest.filter(|_| up.count() > PEER_LINKS_MAX) {
            self.close(now, oldest);
        }
        for (to, packet) in behind {
            // A seed may be another agent now.
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
        let own = self.swim.node();
        // A name may be of all agents, this one among them.
        if id == own.id {
            if is_of_host(own.addr) && addr != own.addr {
                self.tell_twin(addr.ip());
            }
        } else {
            self.swim.announce(now, Node { id, addr, incarnation: 0, zone: Zone::default() });
        }
    }

    /// Warns, once, that there are two of the same id: others take each for a new life of the other.
    fn tell_twin(&mut self, ip: IpAddr) {
        if !std::mem::replace(&mut self.has_told_twin, true) {
            let cure = "issue keys for each agent (gms keys issue)";
            tracing::warn!(%ip, cure, "an agent elsewhere has the id of this one");
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
        let link = begun.or_else(|| {
            let admits = self.calls.admits(now, to.addr);
            admits.then(|| self.connect(now, to.addr, false)).flatten()
        });
        let peer = link.and_then(|link| self.links.get_mut(&link));
        if let Some(peer) = peer.filter(|peer| peer.behind.len() < PACKETS_BEHIND_MAX) {
            peer.behind.push((to.id, packet));
        }
    }

    fn request(&mut self, now: Instant, link: LinkId, packet: &[u8]) {
        debug_assert!(packet.len() <= GOSSIP_LEN_MAX);
        let Some(peer) = self.links.get_mut(&link) else { return };
        if peer.open.len() >= PACKETS_OPEN_MAX {
            return self.close(now, link);
        }
        self.requests += 1;
        let control = Control::request(Op::Gossip, self.requests, WorkloadId::default());
        match self.transport.request(now, link, &control, &[packet]) {
            Ok(exchange) => peer.open.push((exchange, now)),
            Err(error) => tracing::debug!(%error, "a packet of gossip is lost"),
        }
        peer.used_at = now;
    }

    fn connect(&mut self, now: Instant, addr: SocketAddr, is_seed: bool) -> Option<LinkId> {
        if self.links.values().filter(|peer| peer.id.is_none()).count() >= PEER_LINKS_MAX {
            return None;
        }
        let link = self.transport.connect(now, addr);
        let link =
            link.inspect_err(|error| tracing::debug!(%error, "cannot call an agent")).ok()?;
        let (behind, open) = (Vec::new(), Vec::new());
        let peer = Peer { addr, id: None, is_seed, behind, open, used_at: now };
        self.links.insert(link, peer);
        Some(link)
    }

    fn close(&mut self, now: Instant, link: LinkId) {
        self.links.remove(&link);
        self.transport.close(now, link, CloseCode::Goodbye);
    }

    /// Closes links that are not used, and those to whom does not answer.
    fn close_idle(&mut self, now: Instant) {
        let idle = self.links.iter().filter(|(_, peer)| now >= peer.ends_at());
        let idle: Vec<LinkId> = idle.map(|(link, _)| *link).collect();
        idle.into_iter().for_each(|link| self.close(now, link));
    }

    /// Has the names after `--join` looked up, by a thread that may block.
    fn seek(&mut self, now: Instant) {
        self.seek_at = now + if self.swim.is_alone() { JOIN_EVERY } else { UNITE_EVERY };
        // One at a time.
        if self.seeds.is_empty() || self.seeks.as_ref().is_some_and(|seeks| !seeks.is_finished()) {
            return;
        }
        let (names, bulletin) = (self.seeds.clone(), self.bulletin.clone());
        let look_up = move || look_up(names, |found| bulletin.post_seeds(found));
        match std::thread::Builder::new().name("seeds".into()).spawn(look_up) {
            Ok(thread) => self.seeks = Some(thread),
            Err(error) => self.tell_once(format!("no thread to look names up: {error}")),
        }
    }

    /// Asks agents at these addresses to be let in, unless they are members.
    fn join(&mut self, now: Instant, found: Vec<SocketAddr>) {
        if self.stop.requested().is_some() {
            return;
        }
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
            if !self.lines.admits(now, None) {
                continue;
            }
            let (id, addr, zone) = (PeerId::Issued(node.id), node.addr, node.zone);
            match change {
                Change::Joined(_) => tracing::info!(node = %id, %addr, %zone, "member joined"),
                Change::Gone(_) => tracing::info!(node = %id, %addr, "member gone"),
                Change::Restarted(_) => tracing::info!(node = %id, %addr, "member restarted"),
            }
        }
        self.bulletin.publish(self.swim.members(now), self.swim.lives());
        self.shared.gauges.members.set(self.bulletin.members().len() as u64);
    }

    /// Waits for packets, mail, new keys, a deadline, or (unless it came already) the request to stop.
    fn block(&mut self, now: Instant, leaves_by: Option<Instant>) -> io::Result<()> {
        let idle = self.links.values().map(Peer::ends_at).min();
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

/// Looks up one name after the other, those that are addresses first: a server of names may be slow. Each has its part of [`SEEDS_MAX`].
fn look_up(mut names: Vec<String>, mut post: impl FnMut(Result<Vec<SocketAddr>, String>)) {
    names.sort_by_key(|name| name.parse::<SocketAddr>().is_err());
    let share = (SEEDS_MAX / names.len().max(1)).max(1);
    for name in names.iter().take(SEEDS_MAX) {
        let found = name.to_socket_addrs().map(|addrs| addrs.take(share).collect());
        post(found.map_err(|error| format!("{name}: {error}")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_posted_before_names_and_each_by_itself() {
        let names = ["nobody.invalid:1", "127.0.0.1:7", "127.0.0.2:7"].map(String::from).to_vec();
        let mut posted = Vec::new();
        look_up(names, |found| posted.push(found));
        let addr = |host| Ok(vec![([127, 0, 0, host], 7).into()]);
        assert_eq!(posted[..2], [addr(1), addr(2)]);
        assert!(posted[2].as_ref().is_err_and(|problem| problem.starts_with("nobody.invalid:1: ")));
    }
}
