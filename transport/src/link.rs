//! Names of links, exchanges and peers.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
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

/// SHA-256 of an end-entity certificate (DER) without its signature.
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

/// By what a node or a client is known: certificates with the same one are of the same node or client.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PeerId {
    /// The id that the authority gave it; a renewed certificate has it too.
    Issued([u8; 16]),
    /// Its certificate, which has no id.
    Certificate(Fingerprint),
}

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PeerId::Issued(id) => id.iter().try_for_each(|byte| write!(f, "{byte:02x}")),
            PeerId::Certificate(fingerprint) => fmt::Display::fmt(fingerprint, f),
        }
    }
}

impl fmt::Debug for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Text which is neither an id nor a fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no id (32 hexadecimal digits) and no fingerprint (64)")]
pub struct NoPeerId;

impl FromStr for PeerId {
    type Err = NoPeerId;

    fn from_str(text: &str) -> Result<Self, NoPeerId> {
        match text.len() {
            32 => Ok(PeerId::Issued(unhex(text)?)),
            64 => Ok(PeerId::Certificate(Fingerprint(unhex(text)?))),
            _ => Err(NoPeerId),
        }
    }
}

/// The bytes which twice as many digits stand for.
fn unhex<const N: usize>(text: &str) -> Result<[u8; N], NoPeerId> {
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8).ok_or(NoPeerId);
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Ok(bytes)
}

/// Who is at the other end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerIdentity {
    /// Who it is.
    pub id: PeerId,
    /// The certificate that it proved to own.
    pub fingerprint: Fingerprint,
    /// Where it is.
    pub addr: SocketAddr,
    /// Whether its certificate is a node's, with an id: then it is an agent.
    pub is_node: bool,
}

/// Measurements of a link's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathStats {
    /// Smoothed round-trip time.
    pub rtt: Duration,
    /// What became of the packets; `None` where the transport does not see them (in hardware, or without any).
    pub packets: Option<PacketStats>,
}

/// Packets of a link's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketStats {
    /// Packets sent.
    pub sent: u64,
    /// Packets lost of those.
    pub lost: u64,
    /// Bytes that a packet may have now.
    pub len_max: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_and_a_fingerprint_are_told_apart_by_their_length() {
        let id = PeerId::Issued(std::array::from_fn(|n| 0x10 * n as u8 + 1));
        let fingerprint = PeerId::Certificate(Fingerprint([0xfe; 32]));
        for id in [id, fingerprint] {
            assert_eq!(
                (id.to_string().parse(), id.to_string().to_uppercase().parse()),
                (Ok(id), Ok(id))
            );
        }
        for bad in ["", "ab", &"a".repeat(31), &"a".repeat(33), &"a".repeat(65), &"g".repeat(32)] {
            assert_eq!(bad.parse::<PeerId>(), Err(NoPeerId), "{bad}");
        }
        // 32 and 64 bytes, but no digits.
        for bad in ["é".repeat(16), "é".repeat(32), format!("+{}", "a".repeat(31))] {
            assert_eq!(bad.parse::<PeerId>(), Err(NoPeerId), "{bad}");
        }
    }
}
