//! Who is a member, as this agent believes it: SWIM (Das, Gupta and Motivala, 2002; the crate foca), without sockets or clocks.
//!
//! Each second one member is probed, and others for it if it does not answer. Who does not is suspect, and gone unless it contradicts
//! in time. What changed travels with the probes. A packet is believed to be its sender's, because the link proves that; what it says
//! of third nodes is hearsay, and may be a lie: see `docs/security.md`. Hearsay gives no one a life which it cannot outlive
//! ([`Node::incarnation`]), takes a bounded amount of memory, and makes no page believed: pagers ask the agent itself.

use super::codec::{Node, Packet, SENDER_IP, Wire, is_later};
use crate::limits::{
    GONE_FOR, GOSSIP_EVERY, GOSSIP_TIMES, PACKETS_MAX, PROBE_EVERY, PROBE_RTT, PROBES_INDIRECT,
    RENEW_EVERY, SUSPECT_FOR, UNITE_EVERY,
};
use foca::{Config, Foca, Identity, Message, Notification, PeriodicParams, Runtime, State, Timer};
use gms_transport::message::members::{GOSSIP_LEN_MAX, MEMBERS_MAX, ip_bytes};
use gms_transport::message::{Feedback, GossipReply, MemberEntry};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::num::{NonZeroU8, NonZeroUsize};
use std::time::{Duration, Instant};

/// What has changed, for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// A node is a member now.
    Joined(Node),
    /// It is none any more: it left, or does not answer.
    Gone(Node),
    /// It has started anew, or contradicted others.
    Restarted(Node),
}

/// Why a packet was not acted upon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    #[error("it is no packet of SWIM")]
    Malformed,
    #[error("it names another sender than the link's")]
    Forged,
    #[error("it names more nodes than there may be members")]
    TooMany,
}

/// What a member said of its memory.
#[derive(Clone, Copy, Debug)]
struct Load {
    at: Instant,
    frames: u32,
    frames_free: u32,
}

/// What foca wants done.
struct Effects {
    now: Instant,
    timers: Vec<(Instant, Timer<Node>)>,
    /// And whether they go to nodes that are not known yet too.
    packets: VecDeque<(Node, Vec<u8>, bool)>,
    calls: bool,
    changes: VecDeque<Change>,
}

impl Effects {
    /// Forgets the timers of a life that is over: foca ignores them, and makes new ones each time that it begins another.
    fn forget_timers(&mut self) {
        self.timers.retain(|(_, timer)| matches!(timer, Timer::RemoveDown(_)));
    }

    fn change(&mut self, change: Change) {
        // Who logs them does so at once.
        if self.changes.len() < PACKETS_MAX {
            self.changes.push_back(change);
        }
    }
}

impl Runtime<Node> for Effects {
    fn notify(&mut self, notification: Notification<'_, Node>) {
        match notification {
            Notification::MemberUp(node) => self.change(Change::Joined(*node)),
            Notification::MemberDown(node) => self.change(Change::Gone(*node)),
            Notification::Rename(_, node) => self.change(Change::Restarted(*node)),
            Notification::Active => {}
            Notification::Idle | Notification::Defunct | Notification::Rejoin(_) => {
                self.forget_timers();
            }
        }
    }

    fn send_to(&mut self, to: Node, data: &[u8]) {
        if self.packets.len() < PACKETS_MAX {
            self.packets.push_back((to, data.to_vec(), self.calls));
        }
    }

    fn submit_after(&mut self, event: Timer<Node>, after: Duration) {
        // A node has one entry, which is removed once.
        if let Timer::RemoveDown(node) = &event {
            let same = |timer: &Timer<Node>| matches!(timer, Timer::RemoveDown(other) if other.id == node.id);
            self.timers.retain(|(_, timer)| !same(timer));
        }
        self.timers.push((self.now + after, event));
    }
}

/// The state machine.
pub(crate) struct Swim {
    foca: Foca<Node, Wire, SmallRng, foca::NoCustomBroadcast>,
    effects: Effects,
    loads: BTreeMap<[u8; 16], Load>,
    /// Before then it does not contradict what is said of its incarnation.
    renews_at: Instant,
}

fn config() -> Config {
    let count = |count| NonZeroUsize::new(count).unwrap_or(NonZeroUsize::MIN);
    let every =
        |frequency, members| Some(PeriodicParams { frequency, num_members: count(members) });
    Config {
        probe_period: PROBE_EVERY,
        probe_rtt: PROBE_RTT,
        num_indirect_probes: count(PROBES_INDIRECT),
        max_transmissions: NonZeroU8::new(GOSSIP_TIMES).unwrap_or(NonZeroU8::MAX),
        suspect_to_down_after: SUSPECT_FOR,
        remove_down_after: Some(GONE_FOR),
        max_packet_size: count(GOSSIP_LEN_MAX),
        notify_down_members: true,
        periodic_announce: every(UNITE_EVERY, 1),
        periodic_announce_to_down_members: every(UNITE_EVERY, 1),
        periodic_gossip: every(GOSSIP_EVERY, PROBES_INDIRECT),
    }
}

impl Swim {
    /// This agent, alone. `seed` is for choices that need not be foretold.
    pub(crate) fn new(now: Instant, node: Node, seed: u64) -> Self {
        let foca = Foca::new(node, config(), SmallRng::seed_from_u64(seed), Wire);
        let (timers, packets, changes) = (Vec::new(), VecDeque::new(), VecDeque::new());
        let effects = Effects { now, timers, packets, calls: false, changes };
        Self { foca, effects, loads: BTreeMap::new(), renews_at: now }
    }

    /// This agent.
    pub(crate) fn node(&self) -> Node {
        *self.foca.identity()
    }

    /// Whether it knows no other member.
    pub(crate) fn is_alone(&self) -> bool {
        self.foca.num_members() == 0
    }

    /// Asks `to` to be let in. What is known of it is its id and its address.
    pub(crate) fn announce(&mut self, now: Instant, to: Node) {
        self.effects.now = now;
        self.effects.calls = true;
        let done = self.foca.announce(to, &mut self.effects);
        self.effects.calls = false;
        self.settle(done);
    }

    /// A packet came on a link of node `from`, which is at `ip`.
    pub(crate) fn handle_packet(
        &mut self,
        now: Instant,
        (from, ip): ([u8; 16], IpAddr),
        packet: &mut [u8],
    ) -> Result<(), Refused> {
        self.effects.now = now;
        let Packet { mut head, updates } = Packet::read(packet).map_err(|_| Refused::Malformed)?;
        if head.src.id != from || from == self.node().id {
            return Err(Refused::Forged);
        }
        let named = updates.iter().map(|update| update.id().id).chain([from]);
        let strangers = named.filter(|id| self.entry(*id).is_none()).count();
        // One is this agent.
        if self.foca.iter_membership_state().len() + strangers >= MEMBERS_MAX {
            return Err(Refused::TooMany);
        }
        // An agent which listens at all addresses does not know its own.
        if head.src.addr.ip().is_unspecified() {
            head.src.addr.set_ip(ip);
            packet[SENDER_IP].copy_from_slice(&ip_bytes(head.src.addr));
        }
        let done = self.foca.handle_data(packet, &mut self.effects);
        self.settle(done);
        // Whoever addresses a life of this agent that is over does not know of this one. Who addresses a later one than there is, or
        // tells of one, has heard a lie.
        let (own, addressed) = (self.node(), head.dst);
        if addressed.id == own.id && head.message != Message::Announce {
            match is_later(own.incarnation, addressed.incarnation) {
                true => self.announce(now, head.src),
                false => self.outlive(now, addressed.incarnation),
            }
        }
        let said = self.entry(self.node().id).map(|member| member.id().incarnation);
        if let Some(said) = said {
            self.outlive(now, said);
        }
        Ok(())
    }

    /// Node `from` replied to a packet.
    pub(crate) fn handle_reply(
        &mut self,
        now: Instant,
        from: [u8; 16],
        (reply, feedback): (GossipReply, Feedback),
    ) {
        let (frames, frames_free) = (reply.frames, feedback.frames_free);
        if self.entry(from).is_some() {
            self.loads.insert(from, Load { at: now, frames, frames_free });
        }
        if let Some(known) = reply.known() {
            self.outlive(now, known);
        }
    }

    /// Takes a later incarnation than `said`, if others believe that one to be this agent's.
    fn outlive(&mut self, now: Instant, said: u64) {
        let node = self.node();
        if !is_later(said, node.incarnation) || now < self.renews_at {
            return;
        }
        self.effects.now = now;
        self.renews_at = now + RENEW_EVERY;
        let later = Node { incarnation: said, ..node }.renew().unwrap_or(node);
        self.effects.forget_timers();
        let done = self.foca.change_identity(later, &mut self.effects);
        self.settle(done);
    }

    /// Leaves: members are told at once.
    pub(crate) fn leave(&mut self, now: Instant) {
        self.effects.now = now;
        let done = self.foca.leave_cluster(&mut self.effects);
        if let Err(error) = done {
            tracing::debug!(%error, "members were not told");
        }
    }

    /// Does what is due.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        self.effects.now = now;
        while let Some(due) = self.next_timer().filter(|index| self.effects.timers[*index].0 <= now)
        {
            let (_, timer) = self.effects.timers.swap_remove(due);
            let done = self.foca.handle_timer(timer, &mut self.effects);
            self.settle(done);
        }
    }

    /// When [`Swim::handle_timeout`] is to be called.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.next_timer().map(|index| self.effects.timers[index].0)
    }

    fn next_timer(&self) -> Option<usize> {
        let timers = self.effects.timers.iter().enumerate();
        timers.min_by_key(|(_, (at, _))| *at).map(|(index, _)| index)
    }

    /// A packet to be sent, and where: to members, at the address by which they are known, or to whom it was told to
    /// [announce](Swim::announce).
    pub(crate) fn poll_packet(&mut self) -> Option<(Node, Vec<u8>)> {
        loop {
            let (to, packet, calls) = self.effects.packets.pop_front()?;
            // What a packet says of where a node is, whom it wants to be asked, is not followed.
            match self.entry(to.id).map(|member| member.id().addr) {
                Some(addr) => return Some((Node { addr, ..to }, packet)),
                None if calls => return Some((to, packet)),
                None => {}
            }
        }
    }

    /// What has changed, for the log.
    pub(crate) fn poll_change(&mut self) -> Option<Change> {
        self.effects.changes.pop_front()
    }

    /// All members, this agent the first.
    pub(crate) fn members(&mut self, now: Instant) -> Vec<MemberEntry> {
        let known: Vec<_> =
            self.foca.iter_membership_state().map(|member| member.id().id).collect();
        self.loads.retain(|id, _| known.contains(id));
        let entry = |node: &Node| MemberEntry::new(node.id, node.addr, node.incarnation, node.zone);
        let others = self.foca.iter_members().map(|member| {
            let entry = entry(member.id());
            let entry = match member.state() {
                State::Suspect => entry.suspected(),
                State::Alive | State::Down => entry,
            };
            match self.loads.get(&entry.node) {
                None => entry,
                Some(Load { at, frames, frames_free }) => {
                    let age = now.saturating_duration_since(*at).as_millis();
                    let load_age_ms = age.try_into().unwrap_or(u32::MAX);
                    entry.with_load(*frames, *frames_free, load_age_ms)
                }
            }
        });
        std::iter::once(entry(self.foca.identity())).chain(others).collect()
    }

    fn entry(&self, id: [u8; 16]) -> Option<&foca::Member<Node>> {
        self.foca.iter_membership_state().find(|member| member.id().id == id)
    }

    /// After each input: an agent that has another identity now goes on where it was.
    fn settle(&mut self, done: Result<(), foca::Error>) {
        let done =
            done.and_then(|()| self.foca.apply_many(std::iter::empty(), true, &mut self.effects));
        if let Err(error) = done {
            tracing::debug!(%error, "a packet or a timer of SWIM was not acted upon");
        }
    }
}

#[cfg(test)]
mod tests;
