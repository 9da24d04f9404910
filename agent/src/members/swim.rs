//! Who is a member, as this agent believes it: SWIM (Das, Gupta and Motivala, 2002; the crate foca), without sockets or clocks.
//!
//! Each second one member is probed, and others for it if it does not answer. Who does not is suspect, and gone unless it contradicts
//! in time. What changed travels with the probes. A packet is believed to be its sender's, because the link proves that; what it says
//! of third nodes is hearsay, and may be a lie: see `docs/security.md`. Hearsay gives no one a life which it cannot outlive
//! ([`Node::incarnation`]), takes a bounded amount of memory, and makes no page believed: pagers ask the agent itself.

use super::codec::{Node, Packet, Wire, distance, is_later};
use crate::limits::{
    GONE_FOR, GOSSIP_EVERY, GOSSIP_TIMES, LIFE_DISTANCE_MAX, LIVES_MAX, PACKETS_MAX, PROBE_EVERY,
    PROBE_RTT, PROBES_INDIRECT, RENEW_EVERY, SUSPECT_FOR, UNITE_EVERY,
};
use foca::{
    Config, Foca, Identity, Member, Message, Notification, PeriodicParams, Runtime, State, Timer,
};
use gms_transport::message::members::{GOSSIP_LEN_MAX, MEMBERS_MAX, is_of_host};
use gms_transport::message::{Feedback, GossipReply, MemberEntry};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
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
    #[error("it names this agent as its sender")]
    Twin,
    #[error("there are as many members as there may be")]
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
    /// What known nodes have said of themselves, on links of their own. foca goes by what it heard first.
    proved: BTreeMap<[u8; 16], Node>,
    /// The incarnation in which this agent started.
    start: u64,
    /// Before then it takes no other incarnation.
    renews_at: Instant,
    /// Before then it contradicts no suspicion.
    refutes_at: Instant,
    has_left: bool,
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
        // Anybody could send that: the reply to its packet tells a node.
        notify_down_members: false,
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
        let (loads, proved) = (BTreeMap::new(), BTreeMap::new());
        let (start, has_left) = (node.incarnation, false);
        Self { foca, effects, loads, proved, start, renews_at: now, refutes_at: now, has_left }
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
        packet: &[u8],
    ) -> Result<(), Refused> {
        if self.has_left {
            return Ok(());
        }
        self.effects.now = now;
        let mut packet = Packet::read(packet).map_err(|_| Refused::Malformed)?;
        let own = self.node();
        if from == own.id {
            return Err(Refused::Twin);
        }
        if packet.head.src.id != from {
            return Err(Refused::Forged);
        }
        // An agent which listens at all addresses does not know its own.
        if packet.head.src.addr.ip().is_unspecified() {
            packet.head.src.addr.set_ip(ip);
        }
        let passed = self.sift(now, &mut packet.updates);
        self.bound(from, &mut packet.updates)?;
        let bytes = packet.write().map_err(|_| Refused::Malformed)?;
        let done = self.foca.handle_data(&bytes, &mut self.effects);
        self.settle(done);
        let head = packet.head;
        self.note_proved(head.src);
        // Whoever addresses a life of this agent that is over does not know of this one. Who addresses a later one than there is, or
        // tells of one, has heard a lie.
        if head.dst.id == own.id && head.message != Message::Announce {
            match is_later(own.incarnation, head.dst.incarnation) {
                true => self.announce(now, head.src),
                false => {
                    self.outlive(now, head.dst.incarnation);
                }
            }
        }
        if let Some(passed) = passed {
            self.outlive(now, passed);
        }
        Ok(())
    }

    /// Takes out what nobody believes, and what `updates` say of this agent, but for a suspicion that foca is to contradict. The incarnation that is to be outlived, if
    /// one is: each other life but this one is not the agent's, and this one is over if it is down or suspected beyond contradiction.
    fn sift(&mut self, now: Instant, updates: &mut Vec<Member<Node>>) -> Option<u64> {
        let own = self.node();
        let (mut passed, mut refutes): (Option<u64>, _) = (None, now >= self.refutes_at);
        updates.retain(|update| {
            let (id, said) = (update.id().id, update.id().incarnation);
            // Who was lied to may live a life that is far: what it has said of itself is no hearsay.
            let proved = self.proved.get(&id).or((id == own.id).then_some(&own));
            let is_proved = proved.is_some_and(|proved| proved.incarnation == said);
            if !is_proved && distance(said, self.start) > LIFE_DISTANCE_MAX {
                return false;
            }
            if id != own.id {
                return true;
            }
            let is_over = match update.state() {
                State::Alive => false,
                // foca counts them, from there on in vain.
                State::Suspect => update.incarnation() >= u16::MAX - 1,
                State::Down => true,
            };
            let said = if is_over { said.wrapping_add(1) } else { said };
            if is_later(said, passed.unwrap_or(own.incarnation)) {
                passed = Some(said);
            }
            let is_suspicion = update.id() == &own && update.state() == State::Suspect && !is_over;
            is_suspicion && std::mem::take(&mut refutes)
        });
        if updates.iter().any(|update| update.id().id == own.id) {
            self.refutes_at = now + GOSSIP_EVERY;
        }
        passed
    }

    /// Takes out `updates` of nodes for which there is no room, now that `from` is to have one.
    fn bound(&self, from: [u8; 16], updates: &mut Vec<Member<Node>>) -> Result<(), Refused> {
        let known = self.foca.iter_membership_state().map(|member| member.id().id);
        let mut known: BTreeSet<_> = known.chain([self.node().id]).collect();
        let mut admits =
            |id| known.contains(&id) || (known.len() < MEMBERS_MAX && known.insert(id));
        if !admits(from) {
            return Err(Refused::TooMany);
        }
        updates.retain(|update| admits(update.id().id));
        Ok(())
    }

    /// A known node said this of itself.
    fn note_proved(&mut self, node: Node) {
        let before = self.proved.get(&node.id);
        if self.entry(node.id).is_some()
            && before.is_none_or(|before| !is_later(before.incarnation, node.incarnation))
        {
            self.proved.insert(node.id, node);
        }
    }

    /// What is known of `node` in its incarnation: what it said itself, if it did.
    fn proved<'a>(&'a self, node: &'a Node) -> &'a Node {
        self.proved.get(&node.id).filter(|proved| *proved == node).unwrap_or(node)
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
        // Whoever takes this agent for dead hears of its new life at once, and not when it is that one's turn among all that are gone.
        if reply.known().is_some_and(|known| self.outlive(now, known))
            && let Some(node) = self.entry(from).map(|member| *member.id())
        {
            self.announce(now, node);
        }
    }

    /// Takes a later incarnation than `said`, if others believe that one to be this agent's. They do not believe in one that is further from
    /// their own start, which is no further from that of this agent, but may tell of the end of a life that it took for another lie.
    /// Returns whether it has.
    fn outlive(&mut self, now: Instant, said: u64) -> bool {
        let node = self.node();
        let is_near = distance(said, self.start) <= 2 * LIFE_DISTANCE_MAX
            || distance(said, node.incarnation) <= LIVES_MAX;
        if self.has_left || now < self.renews_at || !is_near || !is_later(said, node.incarnation) {
            return false;
        }
        self.effects.now = now;
        self.renews_at = now + RENEW_EVERY;
        let later = Node { incarnation: said, ..node }.renew().unwrap_or(node);
        self.effects.forget_timers();
        let done = self.foca.change_identity(later, &mut self.effects);
        self.settle(done);
        true
    }

    /// Leaves: members are told at once.
    pub(crate) fn leave(&mut self, now: Instant) {
        self.effects.now = now;
        self.has_left = true;
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
            match self.addr(to.id) {
                Some(addr) => return Some((Node { addr, ..to }, packet)),
                None if calls => return Some((to, packet)),
                None => {}
            }
        }
    }

    /// Where this node is, if it is known.
    pub(crate) fn addr(&self, id: [u8; 16]) -> Option<SocketAddr> {
        self.entry(id).map(|member| self.proved(member.id()).addr)
    }

    /// What has changed, for the log.
    pub(crate) fn poll_change(&mut self) -> Option<Change> {
        self.effects.changes.pop_front()
    }

    /// For each node that is known, also one that is gone: the incarnation that it must have, or outlive, to be heard. A life that is over
    /// counts as one more.
    pub(crate) fn lives(&self) -> Vec<([u8; 16], u64)> {
        let life = |member: &Member<Node>| {
            let is_over = member.state() == State::Down;
            (member.id().id, member.id().incarnation.wrapping_add(is_over.into()))
        };
        self.foca.iter_membership_state().map(life).collect()
    }

    /// All members at addresses which hosts can have, this agent the first.
    pub(crate) fn members(&mut self, now: Instant) -> Vec<MemberEntry> {
        let known: BTreeSet<_> =
            self.foca.iter_membership_state().map(|member| member.id().id).collect();
        self.loads.retain(|id, _| known.contains(id));
        self.proved.retain(|id, _| known.contains(id));
        let entry = |node: &Node| MemberEntry::new(node.id, node.addr, node.incarnation, node.zone);
        let listed =
            self.foca.iter_members().filter(|member| is_of_host(self.proved(member.id()).addr));
        let others = listed.map(|member| {
            let entry = entry(self.proved(member.id()));
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

    fn entry(&self, id: [u8; 16]) -> Option<&Member<Node>> {
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
