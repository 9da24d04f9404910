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
    /// Packets.
    delivered: usize,
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
        let (swims, silent) = (swims.collect(), vec![false; count.into()]);
        let mut net = Self { now, swims, silent, delivered: 0 };
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

    /// Whether all but the last, which lies, have each other as members.
    fn honest_see_each_other(&mut self) -> bool {
        let honest = 0..self.swims.len() as u8 - 1;
        honest.clone().all(|number| {
            let seen = self.seen_by(number.into());
            honest.clone().all(|other| seen.contains(&other))
        })
    }

    /// The incarnation of `whom`, as one believes.
    fn incarnation(&mut self, number: usize, whom: u8) -> Option<u64> {
        let now = self.now;
        let members = self.swims[number].members(now);
        members.iter().find(|member| member.node == [whom; 16]).map(|member| member.incarnation)
    }

    fn deliver(&mut self, from: usize, to: usize, packet: Vec<u8>) {
        if self.silent[from] || self.silent[to] {
            return;
        }
        self.delivered += 1;
        let sender = (node(from as u8, 0).id, node(from as u8, 0).addr.ip());
        let lives = self.swims[to].lives();
        let known = lives.iter().find(|(id, _)| *id == sender.0).map(|(_, life)| *life);
        let _ = self.swims[to].handle_packet(self.now, sender, &packet);
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
    let half = 1 << 63;
    let far = LIFE_DISTANCE_MAX;
    for lie in [u64::MAX, 999 + half, 1000 + half, 1001 + half, 1000 + far, 1001 + far, 1001] {
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
            let is_known = |net: &mut Net| {
                let own = net.swims[1].node().incarnation;
                let known = (0..4).all(|number| net.incarnation(number, 1) == Some(own));
                known && own != lie && net.seen_by(1).len() == 4
            };
            net.run(RENEW_EVERY);
            net.run_until("the truth to be known", is_known);
            net.run(RENEW_EVERY * 2);
            assert!(is_known(&mut net), "{lie} {state:?}");
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

/// Who tells the others that a later life of a node has ended, and not the node: they hear none of its packets then.
#[test]
fn a_member_that_the_others_take_for_dead_learns_which_life_to_outlive_from_replies() {
    for lie in [1000 + (1 << 62), 1000 + LIFE_DISTANCE_MAX, 1001, 1000] {
        let mut net = Net::of(4);
        for to in [0, 2] {
            let (from, dst) = (net.swims[3].node(), net.swims[to].node());
            let about = Member::down(node(1, lie));
            net.deliver(3, to, packet(from, dst, Message::Gossip, &[about]));
        }
        net.silent[3] = true;
        let (before, began) = (net.delivered, net.now);
        net.run_until("the honest to see each other", Net::honest_see_each_other);
        let took = net.now - began;
        assert!(took < Duration::from_secs(10), "{took:?}");
        net.run(Duration::from_secs(10));
        assert!(net.delivered - before < 1000, "{} packets", net.delivered - before);
    }
}

/// What it has said of itself is believed of it afterwards, however far a lie has led it.
#[test]
fn a_member_that_was_told_a_lie_of_its_life_is_found_again_when_it_was_silent() {
    for lie in [1000 + 2 * LIFE_DISTANCE_MAX, 1001 + LIFE_DISTANCE_MAX, 1000 + LIFE_DISTANCE_MAX] {
        for away in [PROBE_EVERY * 2, Duration::from_secs(9)] {
            let mut net = Net::of(4);
            let reply = (GossipReply::new(9, Some(lie)), Feedback::default());
            let now = net.now;
            net.swims[1].handle_reply(now, node(3, 0).id, reply);
            net.silent[3] = true;
            net.run(Duration::from_secs(10));
            assert!(net.swims[1].node().incarnation > lie && net.honest_see_each_other());
            net.silent[1] = true;
            net.run(away);
            net.silent[1] = false;
            net.run_until("the honest to see each other", Net::honest_see_each_other);
            net.run(Duration::from_secs(20));
            assert!(net.honest_see_each_other(), "{lie} {away:?}");
            // It contradicts who suspects it.
            let (from, own) = (net.swims[0].node(), net.swims[1].node());
            let about = Member::new(own, 7, State::Suspect);
            let (now, ip) = (net.now, from.addr.ip());
            let told = packet(from, own, Message::Ping(1), &[about]);
            net.swims[1].handle_packet(now, (from.id, ip), &told).expect("a packet");
            let (_, answer) = net.swims[1].poll_packet().expect("an answer");
            let counted = Packet::read(&answer).map(|packet| packet.head.src_incarnation);
            assert_eq!(counted, Ok(8), "{lie} {away:?}");
        }
    }
}

#[test]
fn an_agent_that_is_back_with_its_clock_set_back_is_let_in() {
    let mut net = Net::of(3);
    net.silent[2] = true;
    let both = |net: &mut Net| (0..2).all(|number| net.seen_by(number) == [0, 1]);
    net.run_until("the silent one to be gone", both);
    net.swims[2] = Swim::new(net.now, node(2, 999), 7);
    net.silent[2] = false;
    let began = net.now;
    while !(0..3).all(|number| net.seen_by(number) == [0, 1, 2]) {
        assert!(net.now - began < Duration::from_secs(10), "it is not let in");
        let now = net.now;
        net.swims[2].announce(now, node(0, 0));
        net.run(Duration::from_secs(1));
    }
}

#[test]
fn inventions_do_not_part_members_that_know_each_other() {
    let mut net = Net::of(3);
    for round in 0..2000 {
        for to in 0..2u8 {
            for part in 0..10u8 {
                let invented = (0..25u8).map(|number| {
                    let mut id = [0xee; 16];
                    id[13..].copy_from_slice(&[to, part, number]);
                    Member::alive(Node { id, ..node(9, round) })
                });
                let invented: Vec<_> = invented.collect();
                let (from, dst) = (net.swims[2].node(), net.swims[usize::from(to)].node());
                net.deliver(2, to.into(), packet(from, dst, Message::Gossip, &invented));
            }
        }
        net.run(Duration::from_secs(1));
        for (number, other) in [(0, 1), (1, 0)] {
            assert!(net.seen_by(number).contains(&other), "{number} lost {other}");
        }
    }
}

#[test]
fn lies_make_a_member_take_new_lives_at_a_bounded_pace() {
    for message in [Message::Gossip, Message::TurnUndead] {
        for (state, count) in [(State::Down, 0), (State::Suspect, u16::MAX)] {
            let mut net = Net::of(4);
            let end = net.now + RENEW_EVERY * 3;
            while net.now < end {
                let (from, own) = (net.swims[3].node(), net.swims[1].node());
                let about = Member::new(own, count, state);
                net.deliver(3, 1, packet(from, own, message.clone(), &[about]));
                let later = Node { incarnation: own.incarnation + 1, ..own };
                let about = Member::new(later, count, state);
                net.deliver(3, 1, packet(from, own, message.clone(), &[about]));
                net.step();
            }
            let lives = net.swims[1].node().incarnation - 1000;
            assert!(lives <= 4 * 2, "{lives} lives, by {message:?}");
            net.run_until("all to see all", |net| (0..4).all(|n| net.seen_by(n).len() == 4));
        }
    }
}

#[test]
fn what_a_node_says_of_itself_goes_before_what_was_heard_of_it_first() {
    let mut net = Net::of(2);
    let zone = |label: &str| label.parse().expect("a zone");
    let heard = Node { addr: ([10, 9, 9, 9], 9).into(), zone: zone("wrong"), ..node(2, 1000) };
    for to in [0, 1] {
        let (from, dst) = (net.swims[1 - to].node(), net.swims[to].node());
        let gossip = packet(from, dst, Message::Gossip, &[Member::alive(heard)]);
        net.deliver(1 - to, to, gossip);
    }
    let own = Node { zone: zone("right"), ..node(2, 1000) };
    net.swims.push(Swim::new(net.now, own, 2));
    net.silent.push(false);
    let now = net.now;
    net.swims[2].announce(now, node(0, 0));
    net.run_until("all to see all", |net| (0..3).all(|number| net.seen_by(number).len() == 3));
    net.run(Duration::from_secs(5));
    let members = net.swims[0].members(net.now);
    let found = members.iter().find(|member| member.node == own.id).expect("a member");
    assert_eq!((found.addr(), found.zone()), (own.addr, own.zone));
    let now = net.now;
    net.swims[0].leave(now);
    while let Some((to, _)) = net.swims[0].poll_packet() {
        assert!(to.id != own.id || to.addr == own.addr, "{to:?}");
    }
}

#[test]
fn members_at_addresses_that_no_host_has_are_not_listed() {
    let mut net = Net::of(2);
    for (number, ip) in [(7, [0, 0, 0, 0]), (8, [224, 0, 0, 1])] {
        let heard = Node { addr: (ip, 7400).into(), ..node(number, 1000) };
        let (from, dst) = (net.swims[1].node(), net.swims[0].node());
        net.deliver(1, 0, packet(from, dst, Message::Gossip, &[Member::alive(heard)]));
    }
    assert_eq!(net.seen_by(0), [0, 1]);
}

#[test]
fn one_that_has_left_stays_away_whatever_it_is_told() {
    let mut net = Net::of(3);
    let now = net.now;
    net.swims[2].leave(now);
    net.run(Duration::from_secs(1));
    let left = net.swims[2].node();
    let reply = (GossipReply::new(1, Some(left.incarnation + 1)), Feedback::default());
    let now = net.now;
    net.swims[2].handle_reply(now, [0; 16], reply);
    let (from, about) = (net.swims[0].node(), Member::down(left));
    net.deliver(0, 2, packet(from, left, Message::Gossip, &[about]));
    net.run(Duration::from_secs(2));
    assert_eq!(net.swims[2].node(), left);
    assert!((0..2).all(|number| net.seen_by(number) == [0, 1]));
}

#[test]
fn a_packet_in_the_name_of_another_is_refused() {
    let mut net = Net::of(3);
    let (forged, dst) = (net.swims[1].node(), net.swims[0].node());
    let sender = (node(2, 0).id, node(2, 0).addr.ip());
    let bytes = packet(forged, dst, Message::Gossip, &[Member::down(forged)]);
    let now = net.now;
    assert_eq!(net.swims[0].handle_packet(now, sender, &bytes), Err(Refused::Forged));
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
