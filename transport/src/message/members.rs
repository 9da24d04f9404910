//! Which agents there are: what agents tell each other (gossip), and what anybody may ask one of them for.

use std::fmt;
use std::net::{Ipv6Addr, SocketAddr};
use std::str::FromStr;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Body;

/// Most agents that one knows of, itself included, those that have gone lately too.
pub const MEMBERS_MAX: usize = 256;
/// Most bytes of a packet of gossip: one names every member.
pub const GOSSIP_LEN_MAX: usize = 20 << 10;
/// Most bytes of a zone's label.
pub const ZONE_LEN_MAX: usize = 24;

const _: () = assert!(MEMBERS_MAX * MemberEntry::LEN <= super::PAYLOAD_MAX);
const _: () = assert!(GOSSIP_LEN_MAX <= super::PAYLOAD_MAX && MEMBERS_MAX <= u16::MAX as usize);

/// What follows the feedback in the reply to a gossip.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
#[repr(C)]
pub struct GossipReply {
    /// The incarnation in which the agent knows the one that asks, if it `knows` it; one more than that, if it takes this life of it to be over. The
    /// one that asks takes a later one than this if it has fallen behind.
    pub incarnation: u64,
    /// Frames exported; how many are free is in the feedback.
    pub frames: u32,
    /// 1 if the agent knows the one that asks.
    pub knows: u32,
    pub(super) zero: [u64; 4],
}

impl GossipReply {
    /// Of an agent that exports `frames`.
    pub fn new(frames: u32, incarnation: Option<u64>) -> GossipReply {
        let knows = incarnation.is_some().into();
        GossipReply { incarnation: incarnation.unwrap_or(0), frames, knows, zero: [0; 4] }
    }

    /// The incarnation in which the sender of the request is known.
    pub fn known(&self) -> Option<u64> {
        (self.knows == 1).then_some(self.incarnation)
    }
}

impl Body for GossipReply {
    fn is_valid(&self) -> bool {
        self.knows <= 1 && (self.knows == 1 || self.incarnation == 0) && self.zero == [0; 4]
    }
}

/// What follows the feedback in the reply to the question who is a member.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
#[repr(C)]
pub struct MembersReply {
    /// Members in the payload, a [`MemberEntry`] each.
    pub count: u16,
    pub(super) zero: [u16; 23],
}

impl MembersReply {
    /// With so many entries.
    pub fn new(count: u16) -> MembersReply {
        MembersReply { count, zero: [0; 23] }
    }
}

impl Body for MembersReply {
    fn is_valid(&self) -> bool {
        usize::from(self.count) <= MEMBERS_MAX && self.zero == [0; 23]
    }
}

/// A member as it travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct MemberEntry {
    /// Its id, as in its certificate.
    pub node: [u8; 16],
    ip: [u8; 16],
    /// Counts its starts: a later one has forgotten every page.
    pub incarnation: u64,
    /// Frames that it exports, when it last said so.
    pub frames: u32,
    /// Frames of those that were free.
    pub frames_free: u32,
    /// Time since it said so; all ones if it has not.
    pub load_age_ms: u32,
    port: u16,
    suspect: u8,
    zone_len: u8,
    zone: [u8; ZONE_LEN_MAX],
}

impl MemberEntry {
    /// Bytes that it takes.
    pub const LEN: usize = 80;

    /// A member of which no load is known.
    pub fn new(node: [u8; 16], addr: SocketAddr, incarnation: u64, zone: Zone) -> MemberEntry {
        MemberEntry {
            node,
            ip: ip_bytes(addr),
            incarnation,
            frames: 0,
            frames_free: 0,
            load_age_ms: u32::MAX,
            port: addr.port(),
            suspect: 0,
            zone_len: zone.len,
            zone: zone.bytes,
        }
    }

    /// The same member with what it said of its memory, so long ago.
    pub fn with_load(self, frames: u32, frames_free: u32, load_age_ms: u32) -> MemberEntry {
        MemberEntry { frames, frames_free, load_age_ms, ..self }
    }

    /// The same member, which does not answer for the moment.
    pub fn suspected(self) -> MemberEntry {
        MemberEntry { suspect: 1, ..self }
    }

    /// Whether it does not answer, and is gone soon unless it does.
    pub fn is_suspect(&self) -> bool {
        self.suspect == 1
    }

    /// Where it listens. Without a host's address: where the agent was asked.
    pub fn addr(&self) -> SocketAddr {
        addr_of(self.ip, self.port)
    }

    /// Its zone.
    pub fn zone(&self) -> Zone {
        Zone { len: self.zone_len, bytes: self.zone }
    }

    /// The members in the payload of a reply; `None` if they are none. Only the first, who replies, may have no host's address.
    pub fn read_all(payload: &[u8]) -> Option<Vec<MemberEntry>> {
        let entries = payload.chunks(MemberEntry::LEN).enumerate();
        let read = entries.map(|(number, bytes)| {
            let entry = MemberEntry::read_from_bytes(bytes).ok().filter(Self::is_valid)?;
            (number == 0 || is_of_host(entry.addr())).then_some(entry)
        });
        read.collect()
    }

    fn is_valid(&self) -> bool {
        self.suspect <= 1 && self.port != 0 && self.zone().is_valid()
    }
}

const _: () = assert!(size_of::<MemberEntry>() == MemberEntry::LEN);

/// Whether a host can have this address: it is neither all addresses nor a group's.
pub fn is_of_host(addr: SocketAddr) -> bool {
    !(addr.ip().is_unspecified() || addr.ip().is_multicast())
}

/// An IP address as it travels: IPv4 as IPv6.
pub fn ip_bytes(addr: SocketAddr) -> [u8; 16] {
    match addr {
        SocketAddr::V4(addr) => addr.ip().to_ipv6_mapped().octets(),
        SocketAddr::V6(addr) => addr.ip().octets(),
    }
}

/// The reverse of [`ip_bytes`].
pub fn addr_of(ip: [u8; 16], port: u16) -> SocketAddr {
    SocketAddr::new(Ipv6Addr::from(ip).to_canonical(), port)
}

/// Where a node stands, by its administrator's word: a rack, a building, a provider's zone. Nodes of one zone may fail together.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Zone {
    len: u8,
    bytes: [u8; ZONE_LEN_MAX],
}

/// A label that is too long, or has other characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a zone: 1 to {ZONE_LEN_MAX} letters, digits, dots, dashes and underscores")]
pub struct NoZone;

impl Zone {
    /// Its length and its bytes, zero behind that.
    pub fn parts(self) -> (u8, [u8; ZONE_LEN_MAX]) {
        (self.len, self.bytes)
    }

    /// The reverse of [`Zone::parts`].
    pub fn from_parts(len: u8, bytes: [u8; ZONE_LEN_MAX]) -> Option<Zone> {
        Some(Zone { len, bytes }).filter(Zone::is_valid)
    }

    /// The label; empty if there is none.
    pub fn label(&self) -> &str {
        let bytes = self.bytes.get(..self.len.into()).unwrap_or_default();
        std::str::from_utf8(bytes).unwrap_or_default()
    }

    fn is_valid(&self) -> bool {
        let (label, rest) = self.bytes.split_at(usize::from(self.len).min(ZONE_LEN_MAX));
        let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-".contains(byte);
        usize::from(self.len) <= ZONE_LEN_MAX
            && label.iter().all(is_plain)
            && rest.iter().all(|byte| *byte == 0)
    }
}

impl FromStr for Zone {
    type Err = NoZone;

    fn from_str(label: &str) -> Result<Zone, NoZone> {
        let mut bytes = [0; ZONE_LEN_MAX];
        bytes.get_mut(..label.len()).ok_or(NoZone)?.copy_from_slice(label.as_bytes());
        let len = u8::try_from(label.len()).ok().filter(|len| *len > 0).ok_or(NoZone)?;
        Zone::from_parts(len, bytes).ok_or(NoZone)
    }
}

impl fmt::Display for Zone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

impl fmt::Debug for Zone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_member_is_read_as_it_was_written() {
        let zone: Zone = "rack-7".parse().expect("a zone");
        for addr in ["10.0.0.7:7400", "[2001:db8::1]:7400", "0.0.0.0:1", "[ff02::1]:1"] {
            let addr = addr.parse().expect("an address");
            let entry = MemberEntry::new([9; 16], addr, 5, zone).suspected();
            let read = MemberEntry::read_all(&[entry.as_bytes(), entry.as_bytes()].concat());
            assert_eq!(read, is_of_host(addr).then(|| vec![entry; 2]), "{addr}");
            assert_eq!(MemberEntry::read_all(entry.as_bytes()), Some(vec![entry]));
            assert_eq!((entry.addr(), entry.zone().label()), (addr, "rack-7"));
        }
        for bad in ["", "a b", "é", &"x".repeat(ZONE_LEN_MAX + 1), "a\n"] {
            assert_eq!(bad.parse::<Zone>(), Err(NoZone), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn whatever_comes_as_members_is_refused_or_plain(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            for entry in MemberEntry::read_all(&bytes).unwrap_or_default() {
                prop_assert!(entry.zone().label().len() <= ZONE_LEN_MAX && entry.addr().port() != 0);
            }
        }
    }
}
