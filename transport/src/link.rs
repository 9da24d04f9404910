//! Names of links, exchanges and peers.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

/// A link of an endpoint. The generation makes sure that an old id never means a newer link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId {
    index: u32,
    generation: u32,
}

impl LinkId {
    /// The link in slot `index`, `generation`-th of its endpoint.
    pub fn new(index: u32, generation: u32) -> Self {
        Self { index, generation }
    }

    pub(crate) fn index(self) -> usize {
        self.index as usize
    }

    pub(crate) fn generation(self) -> u32 {
        self.generation
    }
}

/// An exchange on a link: one request and its reply. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExchangeId {
    /// The link which carries it.
    pub link: LinkId,
    stream: u64,
}

impl ExchangeId {
    /// Exchange `stream` of `link`.
    pub fn new(link: LinkId, stream: u64) -> Self {
        Self { link, stream }
    }

    pub(crate) fn stream(self) -> u64 {
        self.stream
    }
}

/// SHA-256 of an end-entity certificate (DER).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(pub [u8; 32]);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Who is at the other end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerIdentity {
    /// The certificate it proved to own; one client key pair is one client.
    pub fingerprint: Fingerprint,
    /// Where it is.
    pub addr: SocketAddr,
}

/// Measurements of a link's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathStats {
    /// Smoothed round-trip time.
    pub rtt: Duration,
    /// Packets sent.
    pub sent_packets: u64,
    /// Packets lost of those.
    pub lost_packets: u64,
    /// UDP payload bytes that a packet may have now.
    pub mtu: u16,
}
