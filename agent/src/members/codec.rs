//! How SWIM's packets travel: every part has one length, so that nothing which comes from outside says how much is to be
//! set aside for it.
//!
//! | bytes | node | | bytes | head of a packet | | bytes | update |
//! |---:|---|---|---:|---|---|---:|---|
//! | 16 | id, as in its certificate | | 67 | who sends it | | 67 | the node |
//! | 16 | IP address (IPv4 as IPv6) | | 2 | SWIM's count of refuted suspicions | | 2 | that count |
//! | 8 | incarnation | | 67 | to whom | | 1 | alive, suspect, down |
//! | 2 | UDP port | | 1, 1 | message, number of the probe | | | |
//! | 1, 24 | zone: length, label | | 0 or 67 | the third node, where there is one | | | |
//!
//! Numbers are little-endian. Behind the head come the number of updates (2, big-endian: foca's own) and the updates.

use bytes::{Buf, BufMut};
use foca::{Codec, Header, Identity, Member, Message, State};
use gms_transport::message::Zone;
use gms_transport::message::members::{
    GOSSIP_LEN_MAX, MEMBERS_MAX, ZONE_LEN_MAX, addr_of, ip_bytes,
};
use std::net::SocketAddr;

/// Bytes of a node.
pub(crate) const NODE_LEN: usize = 16 + 16 + 8 + 2 + 1 + ZONE_LEN_MAX;
const HEAD_LEN: usize = NODE_LEN + 2 + NODE_LEN + 2;
const UPDATE_LEN: usize = NODE_LEN + 3;

const _: () = assert!(HEAD_LEN + NODE_LEN + 2 + MEMBERS_MAX * UPDATE_LEN <= GOSSIP_LEN_MAX);

/// An agent in one of its lives, as members know it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Node {
    /// Its id, as in its certificate.
    pub id: [u8; 16],
    /// Where it listens.
    pub addr: SocketAddr,
    /// Nanoseconds from 1970 to its start, and one more each time that it had to contradict others. Numbers go round: whatever others
    /// say, there is a later one.
    pub incarnation: u64,
    /// Where it stands.
    pub zone: Zone,
}

/// By which members tell lives of nodes apart. What foca keeps and tells of the rest is what it heard first; see `Swim::proved`.
impl PartialEq for Node {
    fn eq(&self, other: &Self) -> bool {
        (self.id, self.incarnation) == (other.id, other.incarnation)
    }
}

impl Eq for Node {}

/// Whether incarnation `a` is later than `b`, on a circle (RFC 1982).
pub(crate) fn is_later(a: u64, b: u64) -> bool {
    a.wrapping_sub(b).cast_signed() > 0
}

/// How far two incarnations are from each other, on that circle.
pub(crate) fn distance(a: u64, b: u64) -> u64 {
    a.wrapping_sub(b).cast_signed().unsigned_abs()
}

impl Identity for Node {
    type Addr = [u8; 16];

    fn renew(&self) -> Option<Self> {
        Some(Self { incarnation: self.incarnation.wrapping_add(1), ..*self })
    }

    fn addr(&self) -> [u8; 16] {
        self.id
    }

    fn win_addr_conflict(&self, adversary: &Self) -> bool {
        is_later(self.incarnation, adversary.incarnation)
    }
}

/// Bytes that are no packet, or no room for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no packet of SWIM")]
pub(crate) struct Malformed;

/// The codec.
pub(crate) struct Wire;

impl Codec<Node> for Wire {
    type Error = Malformed;

    fn encode_header(
        &mut self,
        header: &Header<Node>,
        mut buf: impl BufMut,
    ) -> Result<(), Malformed> {
        let (tag, probe, third) = parts(&header.message);
        let length = HEAD_LEN + third.map_or(0, |_| NODE_LEN);
        if buf.remaining_mut() < length {
            return Err(Malformed);
        }
        put_node(&header.src, &mut buf);
        buf.put_u16_le(header.src_incarnation);
        put_node(&header.dst, &mut buf);
        buf.put_slice(&[tag, probe]);
        if let Some(third) = third {
            put_node(third, &mut buf);
        }
        Ok(())
    }

    fn decode_header(&mut self, mut buf: impl Buf) -> Result<Header<Node>, Malformed> {
        let src = get_node(&mut buf)?;
        let src_incarnation = buf.try_get_u16_le().map_err(|_| Malformed)?;
        let dst = get_node(&mut buf)?;
        let tag = buf.try_get_u8().map_err(|_| Malformed)?;
        let probe_number = buf.try_get_u8().map_err(|_| Malformed)?;
        let mut third = || get_node(&mut buf);
        let message = match tag {
            0 => Message::Ping(probe_number),
            1 => Message::Ack(probe_number),
            2 => Message::PingReq { target: third()?, probe_number },
            3 => Message::IndirectPing { origin: third()?, probe_number },
            4 => Message::IndirectAck { target: third()?, probe_number },
            5 => Message::ForwardedAck { origin: third()?, probe_number },
            6 => Message::Announce,
            7 => Message::Feed,
            8 => Message::Gossip,
            _ => return Err(Malformed),
        };
        Ok(Header { src, src_incarnation, dst, message })
    }

    fn encode_member(
        &mut self,
        member: &Member<Node>,
        mut buf: impl BufMut,
    ) -> Result<(), Malformed> {
        if buf.remaining_mut() < UPDATE_LEN {
            return Err(Malformed);
        }
        put_node(member.id(), &mut buf);
        buf.put_u16_le(member.incarnation());
        buf.put_u8(match member.state() {
            State::Alive => 0,
            State::Suspect => 1,
            State::Down => 2,
        });
        Ok(())
    }

    fn decode_member(&mut self, mut buf: impl Buf) -> Result<Member<Node>, Malformed> {
        let node = get_node(&mut buf)?;
        let incarnation = buf.try_get_u16_le().map_err(|_| Malformed)?;
        let state = match buf.try_get_u8().map_err(|_| Malformed)? {
            0 => State::Alive,
            1 => State::Suspect,
            2 => State::Down,
            _ => return Err(Malformed),
        };
        Ok(Member::new(node, incarnation, state))
    }
}

/// A message's tag, its probe's number (0 without one), and the third node.
fn parts(message: &Message<Node>) -> (u8, u8, Option<&Node>) {
    match message {
        Message::Ping(number) => (0, *number, None),
        Message::Ack(number) => (1, *number, None),
        Message::PingReq { target, probe_number } => (2, *probe_number, Some(target)),
        Message::IndirectPing { origin, probe_number } => (3, *probe_number, Some(origin)),
        Message::IndirectAck { target, probe_number } => (4, *probe_number, Some(target)),
        Message::ForwardedAck { origin, probe_number } => (5, *probe_number, Some(origin)),
        Message::Announce => (6, 0, None),
        Message::Feed => (7, 0, None),
        // Nothing is broadcast but updates.
        Message::Gossip | Message::Broadcast => (8, 0, None),
        // Not sent, and not read: who is taken for dead learns it from the reply to its own packet, which nobody else can send.
        Message::TurnUndead => (9, 0, None),
    }
}

fn put_node(node: &Node, buf: &mut impl BufMut) {
    let (zone_len, zone) = node.zone.parts();
    buf.put_slice(&node.id);
    buf.put_slice(&ip_bytes(node.addr));
    buf.put_u64_le(node.incarnation);
    buf.put_u16_le(node.addr.port());
    buf.put_u8(zone_len);
    buf.put_slice(&zone);
}

fn get_node(buf: &mut impl Buf) -> Result<Node, Malformed> {
    if buf.remaining() < NODE_LEN {
        return Err(Malformed);
    }
    let (mut id, mut ip, mut zone) = ([0; 16], [0; 16], [0; ZONE_LEN_MAX]);
    buf.copy_to_slice(&mut id);
    buf.copy_to_slice(&mut ip);
    let (incarnation, port, zone_len) = (buf.get_u64_le(), buf.get_u16_le(), buf.get_u8());
    buf.copy_to_slice(&mut zone);
    let zone = Zone::from_parts(zone_len, zone).filter(|_| port != 0).ok_or(Malformed)?;
    Ok(Node { id, addr: addr_of(ip, port), incarnation, zone })
}

/// What a packet says, before SWIM acts upon it.
pub(crate) struct Packet {
    pub head: Header<Node>,
    pub updates: Vec<Member<Node>>,
}

impl Packet {
    /// Reads a packet to its end.
    pub(crate) fn read(mut bytes: &[u8]) -> Result<Packet, Malformed> {
        let head = Wire.decode_header(&mut bytes)?;
        let count = match bytes.is_empty() {
            true => 0,
            false => bytes.try_get_u16().map_err(|_| Malformed)?,
        };
        let updates: Vec<_> =
            (0..count).map_while(|_| Wire.decode_member(&mut bytes).ok()).collect();
        match bytes.is_empty() && updates.len() == usize::from(count) {
            true => Ok(Packet { head, updates }),
            false => Err(Malformed),
        }
    }

    /// The reverse of [`Packet::read`].
    pub(crate) fn write(&self) -> Result<Vec<u8>, Malformed> {
        let mut bytes = Vec::new();
        Wire.encode_header(&self.head, &mut bytes)?;
        // None may have any behind it.
        if self.head.message != Message::Announce {
            bytes.put_u16(self.updates.len().try_into().map_err(|_| Malformed)?);
        }
        self.updates.iter().try_for_each(|update| Wire.encode_member(update, &mut bytes))?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn node() -> impl Strategy<Value = Node> {
        let addr = (any::<[u8; 4]>(), 1u16..).prop_map(SocketAddr::from);
        let zone = "[a-z0-9._-]{1,24}".prop_map(|label| label.parse().expect("a zone"));
        (any::<[u8; 16]>(), addr, any::<u64>(), zone)
            .prop_map(|(id, addr, incarnation, zone)| Node { id, addr, incarnation, zone })
    }

    fn message() -> impl Strategy<Value = Message<Node>> {
        (0u8..9, any::<u8>(), node()).prop_map(|(tag, probe_number, third)| match tag {
            0 => Message::Ping(probe_number),
            1 => Message::Ack(probe_number),
            2 => Message::PingReq { target: third, probe_number },
            3 => Message::IndirectPing { origin: third, probe_number },
            4 => Message::IndirectAck { target: third, probe_number },
            5 => Message::ForwardedAck { origin: third, probe_number },
            6 => Message::Announce,
            7 => Message::Feed,
            _ => Message::Gossip,
        })
    }

    proptest! {
        #[test]
        fn a_packet_is_read_as_it_was_written(
            src in node(), dst in node(), src_incarnation: u16, message in message(),
            updates in prop::collection::vec((node(), any::<u16>()), 0..4),
        ) {
            let head = Header { src, src_incarnation, dst, message };
            let updates: Vec<_> = updates.into_iter().map(|(node, n)| Member::new(node, n, State::Suspect)).collect();
            let mut bytes = Vec::new();
            Wire.encode_header(&head, &mut bytes).expect("room");
            bytes.put_u16(updates.len() as u16);
            updates.iter().for_each(|member| Wire.encode_member(member, &mut bytes).expect("room"));
            let read = Packet::read(&bytes).expect("a packet");
            prop_assert_eq!((read.head.src.addr, read.head.src.zone), (src.addr, src.zone));
            prop_assert_eq!((&read.head, &read.updates), (&head, &updates));
            if read.head.message != Message::Announce {
                prop_assert_eq!(read.write(), Ok(bytes.clone()));
            }
            for cut in 0..bytes.len() {
                let cut = Packet::read(&bytes[..cut]);
                prop_assert!(cut.is_err() || cut.is_ok_and(|cut| cut.updates.is_empty()));
            }
        }

        #[test]
        fn of_two_incarnations_the_later_is_the_one_that_followed(any: u64, steps in 1u64..1 << 62) {
            let next = any.wrapping_add(steps);
            prop_assert!(is_later(next, any) && !is_later(any, next) && !is_later(any, any));
        }
    }
}
