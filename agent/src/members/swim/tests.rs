//! Several agents, a network that delivers at once, and members that lie.

use super::*;
use bytes::BufMut;
use foca::{Codec, Header, Member};
use gms_transport::message::Zone;
use proptest::prelude::*;

const STEP: Duration = Duration::from_millis(50);

struct Net {
    now: Instant,
    swims: Vec<Swim>,
    /// Neither hears nor is heard.
    silent: Vec<bool>,
}

fn node(number: u8, incarnation: u64) -> Node {
    let addr = ([10, 0, 0, number], 7400).into();
    Node { id: [number; 16], addr, incarnation, zone: Zone::default() }
}

/// By whom, and to whom, and what of third nodes.
fn packet(src: Node, dst: Node, message: Message<Node>, updates: &[Member<Node>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let head = Header { src, src_incarnation: 0, dst, message };
    Wire.encode_header(&head, &mut bytes).expect("room");
    bytes.put_u16(updates.len() as u16);
    updates.iter().for_each(|update| Wire.encode_member(update, &mut bytes).expect("room"));
    bytes
}

impl Net {
    /// So many, all of which have joined the first.
    fn of(count: u8) -> Self {
        let now = Instant::now();
        let swims = (0..count).map(|number| Swim::new(now, node(number, 1000), number.into()));
        let mut net = Self { now, swims: swims.collect(), silent: vec![false; count.into()] };
        for number in 1..count.into() {
            net.swims[number].announce(now, Node { incarnation: 0, ..node(0, 0) });
        }
        net.run_until("all to see all", |net| {
            (0..count.into()).all(|number| net.seen_by(number).len() == usize::from(count))
        });
        net
    }

    /// The numbers of the members, as one believes.
    fn seen_by(&mut self, number: usize) -> Vec<u8> {
        let now = self.now;
        let mut seen: Vec<u8> =
            self.swims[number].members(now).iter().map(|member| member.node[0]).collect();
        seen.sort_unstable();
        seen
    }

    /// The incarnation of `whom`, as one believes.
    fn incarnation(&mut self, number: usize, whom: u8) -> Option<u64> {
        let now = self.now;
        let members = self.swims[number].members(now);
        members.iter().find(|member| member.node == [whom; 16]).map(|member| member.incarnation)
    }

    fn deliver(&mut self, from: usize, to: usize, mut packet: Vec<u8>) {
        if self.silent[from] || self.silent[to] {
            return;
        }
        let sender = (node(from as u8, 0).id, node(from as u8, 0).addr.ip());
        let known = self.incarnation(to, from as u8);
        let _ = self.swims[to].handle_packet(self.now, sender, &mut packet);
        let reply = (GossipReply::new(9, known), Feedback::default());
        self.swims[from].handle_reply(self.now, node(to as u8, 0).id, reply);
    }

    fn step(&mut self) {
        self.now += STEP;
        for number in 0..self.swims.len() {
            self.swims[number].handle_timeout(self.now);
            while let Some((to, packet)) = self.swims[number].poll_packet() {
                if usize::from(to.id[0]) < self.swims.len() {
                    self.deliver(number, to.id[0].into(), packet);
                }
            }
        }
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.step();
        }
    }

    /// Returns how long it took.
    fn run_until(&mut self, what: &str, done: impl Fn(&mut Self) -> bool) -> Duration {
        let began = self.now;
        while !done(self) {
            assert!(self.now - began < Duration::from_secs(60), "waited in vain for {what}");
            self.step();
        }
        self.now - began
    }
}

#[test]
fn agents_that_join_one_know_all_and_their_loads() {
    let mut net = Net::of(5);
    net.run(Duration::from_secs(20));
    let now = net.now;
    for number in 0..5 {
        assert_eq!(net.seen_by(number), [0, 1, 2, 3, 4]);
        let members = net.swims[number].members(now);
        assert!(members[1..].iter().all(|member| member.frames == 9), "{members:?}");
    }
}

#[test]
fn one_that_is_silent_is_gone_in_some_seconds_and_found_again() {
    let mut net = Net::of(3);
    net.silent[2] = true;
    let both = |net: &mut Net| (0..2).all(|number| net.seen_by(number) == [0, 1]);
    let took = net.run_until("the silent one to be gone", both);
    assert!(took < Duration::from_secs(9), "{took:?}");
    net.silent[2] = false;
    net.run_until("all to see all again", |net| {
        (0..3).all(|number| net.seen_by(number).len() == 3)
    });
}

#[test]
fn one_that_leaves_is_gone_at_once() {
    let mut net = Net::of(4);
    let now = net.now;
    net.swims[3].leave(now);
    let took = net.run_until("it to be gone", |net| (0..3).all(|n| net.seen_by(n) == [0, 1, 2]));
    assert!(took <= GOSSIP_EVERY * 3, "{took:?}");
}

/// Also one whose clock has gone back, and which is told of nobody to join.
#[test]
fn one_that_starts_anew_is_known_by_its_new_life() {
    for incarnation in [5000, 3] {
        let mut net = Net::of(3);
        net.swims[0] = Swim::new(net.now, node(0, incarnation), 7);
        let took = net.run_until("its new life to be known", |net| {
            let own = net.swims[0].node().incarnation;
            let known = (0..3).all(|number| net.incarnation(number, 0) == Some(own));
            known && own != 1000 && net.seen_by(0).len() == 3
        });
        assert!(took < Duration::from_secs(9), "{took:?}");
    }
}

/// What no other member believes of it must not keep an agent out.
#[test]
fn no_lie_about_an_incarnation_keeps_a_member_out() {
    for lie in [u64::MAX, 1000 + (i64::MAX as u64), 1001] {
        for state in [State::Alive, State::Suspect, State::Down] {
            let mut net = Net::of(4);
            let about = Member::new(node(1, lie), u16::MAX, state);
            for to in [0, 1, 2] {
                let (from, dst) = (net.swims[3].node(), net.swims[to].node());
                net.deliver(
                    3,
                    to,
                    packet(from, dst, Message::Gossip, std::slice::from_ref(&about)),
                );
            }
            net.run(RENEW_EVERY);
            net.run_until("the truth to be known", |net| {
                let own = net.swims[1].node().incarnation;
                let known = (0..4).all(|number| net.incarnation(number, 1) == Some(own));
                known && is_later(own, lie) && net.seen_by(1).len() == 4
            });
        }
    }
}

/// SWIM's own count ends at the greatest number too.
#[test]
fn no_suspicion_keeps_a_member_out() {
    for state in [State::Suspect, State::Down] {
        let mut net = Net::of(4);
        let about = Member::new(net.swims[1].node(), u16::MAX, state);
        let (from, dst) = (net.swims[3].node(), net.swims[0].node());
        net.deliver(3, 0, packet(from, dst, Message::Gossip, &[about]));
        net.run(SUSPECT_FOR * 3);
        net.run_until("all to see all", |net| (0..4).all(|number| net.seen_by(number).len() == 4));
    }
}

#[test]
fn a_packet_in_the_name_of_another_is_refused() {
    let mut net = Net::of(3);
    let (forged, dst) = (net.swims[1].node(), net.swims[0].node());
    let sender = (node(2, 0).id, node(2, 0).addr.ip());
    let mut bytes = packet(forged, dst, Message::Gossip, &[Member::down(forged)]);
    let now = net.now;
    assert_eq!(net.swims[0].handle_packet(now, sender, &mut bytes), Err(Refused::Forged));
    assert_eq!(net.seen_by(0), [0, 1, 2]);
}

#[test]
fn an_agent_that_does_not_know_its_address_is_known_by_where_it_calls_from() {
    let mut net = Net::of(2);
    let anywhere = Node { addr: ([0, 0, 0, 0], 7400).into(), ..node(2, 1000) };
    net.swims.push(Swim::new(net.now, anywhere, 2));
    net.silent.push(false);
    let now = net.now;
    net.swims[2].announce(now, node(0, 0));
    net.run_until("all to see all", |net| (0..3).all(|number| net.seen_by(number).len() == 3));
    for number in 0..2 {
        let members = net.swims[number].members(now);
        let found = members.iter().find(|member| member.node == [2; 16]).expect("a member");
        assert_eq!(found.addr(), node(2, 0).addr);
    }
}

#[test]
fn invented_members_take_a_bounded_amount_of_memory() {
    let mut net = Net::of(2);
    let mut invented = 0u64;
    for _ in 0..400 {
        let updates: Vec<_> = std::iter::repeat_with(|| {
            invented += 1;
            let mut id = [0xff; 16];
            id[..8].copy_from_slice(&invented.to_le_bytes());
            let state = if invented.is_multiple_of(3) { State::Down } else { State::Alive };
            Member::new(Node { id, ..node(9, invented) }, 0, state)
        })
        .take(7)
        .collect();
        let (from, dst) = (net.swims[1].node(), net.swims[0].node());
        net.deliver(1, 0, packet(from, dst, Message::Gossip, &updates));
        net.step();
    }
    let swim = &mut net.swims[0];
    assert!(swim.foca.iter_membership_state().len() < MEMBERS_MAX);
    assert!(swim.effects.timers.len() < 2 * MEMBERS_MAX, "{}", swim.effects.timers.len());
    assert!(swim.foca.updates_backlog() < MEMBERS_MAX);
    assert!(net.swims[1].effects.packets.len() <= PACKETS_MAX);
}

fn any_message() -> impl Strategy<Value = Message<Node>> {
    (0..10, any::<u8>(), any_node()).prop_map(|(which, probe_number, third)| match which {
        0 => Message::Ping(probe_number),
        1 => Message::Ack(probe_number),
        2 => Message::PingReq { target: third, probe_number },
        3 => Message::IndirectPing { origin: third, probe_number },
        4 => Message::IndirectAck { target: third, probe_number },
        5 => Message::ForwardedAck { origin: third, probe_number },
        6 => Message::Announce,
        7 => Message::Feed,
        8 => Message::Gossip,
        _ => Message::TurnUndead,
    })
}

fn any_node() -> impl Strategy<Value = Node> {
    (0u8..6, prop_oneof![Just(1000), Just(1001), any::<u64>()])
        .prop_map(|(number, incarnation)| node(number, incarnation))
}

fn any_packet() -> impl Strategy<Value = Vec<u8>> {
    let state = prop_oneof![Just(State::Alive), Just(State::Suspect), Just(State::Down)];
    let update = (any_node(), any::<u16>(), state).prop_map(|(n, i, s)| Member::new(n, i, s));
    let updates = prop::collection::vec(update, 0..6);
    let honest = (any_node(), any_node(), any_message(), updates)
        .prop_map(|(src, dst, message, updates)| packet(src, dst, message, &updates));
    let damage = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    let damaged = (honest, damage).prop_map(|(mut bytes, damage)| {
        damage.into_iter().for_each(|(at, byte)| *at.get_mut(&mut bytes) = byte);
        bytes
    });
    prop_oneof![damaged, prop::collection::vec(any::<u8>(), 0..300)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// No packet ends the agent, and after the last lie all honest agents are members again.
    #[test]
    fn whatever_a_member_says_the_others_find_each_other(
        packets in prop::collection::vec((any_packet(), 0usize..3, any::<u64>()), 1..40),
    ) {
        let mut net = Net::of(4);
        for (bytes, to, said) in packets {
            net.deliver(3, to, bytes);
            let reply = (GossipReply::new(1, Some(said)), Feedback::default());
            let now = net.now;
            net.swims[to].handle_reply(now, [3; 16], reply);
            net.step();
        }
        net.run_until("the honest to see each other", |net| {
            (0..3).all(|number| [0, 1, 2].iter().all(|other| {
                let own = net.swims[usize::from(*other)].node().incarnation;
                net.incarnation(number, *other) == Some(own)
            }))
        });
    }
}
