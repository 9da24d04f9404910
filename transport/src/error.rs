//! Why calls fail, links close and exchanges are aborted.

use std::io;
use std::net::SocketAddr;

use crate::message::{DecodeError, VERSION_MAX, VERSION_MIN};

/// What one side tells the other when it closes a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum CloseCode {
    /// Done; nothing is wrong.
    Goodbye = 0,
    /// A message of another protocol version.
    Version = 1,
    /// A malformed message.
    Malformed = 2,
    /// More queued than the bounds allow, or too many links.
    Overload = 3,
    /// The agent leaves.
    Draining = 4,
    /// The lease ran out. Reserved: nobody sends it.
    Lease = 5,
}

impl CloseCode {
    /// The code with this number.
    pub fn from_u64(code: u64) -> Option<Self> {
        use CloseCode::{Draining, Goodbye, Lease, Malformed, Overload, Version};
        [Goodbye, Version, Malformed, Overload, Draining, Lease]
            .into_iter()
            .find(|known| *known as u64 == code)
    }
}

/// What is said after "closed the link": the code's meaning, the cure if there is one, and the peer's own words.
fn by_peer(code: Option<CloseCode>, detail: &str) -> String {
    let meaning = match code {
        Some(CloseCode::Goodbye) => "",
        Some(CloseCode::Version) => " over a message of another version of the protocol",
        Some(CloseCode::Malformed) => " over a message that it finds malformed",
        Some(CloseCode::Overload) if detail.is_empty() => {
            ": this key has its share of links there; give each machine a key of its own, or use fewer --fault-threads"
        }
        Some(CloseCode::Overload) => " because it has too much to do",
        Some(CloseCode::Draining) => ": it is being stopped",
        Some(CloseCode::Lease) => ": the lease ran out",
        None => " for a reason that only a later version knows",
    };
    format!("{meaning}{}{detail}", if detail.is_empty() { "" } else { ": " })
}

/// Why a link ended or could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CloseReason {
    /// No answer within the handshake's deadline.
    #[error(
        "{addr} does not answer: check the address, that gms-agent runs there, and that UDP to it is not blocked"
    )]
    Unreachable {
        /// Where it should be.
        addr: SocketAddr,
    },
    /// A client began a handshake and did not go on with it (told to agents).
    #[error(
        "{addr} began a handshake and fell silent: it ended, packets were lost, or its address is false"
    )]
    Unfinished {
        /// Where it claimed to be.
        addr: SocketAddr,
    },
    /// It answered once, then fell silent for longer than the idle time-out.
    #[error("{addr} fell silent: the process, its machine or the network is down")]
    Lost {
        /// Where it was.
        addr: SocketAddr,
    },
    /// Its certificate is not of our cluster's authority.
    #[error(
        "{addr} has a certificate of another authority: use keys of the same `gms keys init` on both sides"
    )]
    WrongCa {
        /// The peer.
        addr: SocketAddr,
    },
    /// Its certificate has expired, or is not valid yet.
    #[error(
        "{addr} has an expired certificate (or one of the two clocks is wrong): renew it by `gms keys renew` where it was issued"
    )]
    Expired {
        /// The peer.
        addr: SocketAddr,
    },
    /// Its certificate is of the wrong role, e.g. a client's where an agent should be.
    #[error(
        "{addr} has no certificate of the right role: agents need a node key, pagers a client key"
    )]
    WrongRole {
        /// The peer.
        addr: SocketAddr,
    },
    /// The peer refuses our certificate.
    #[error(
        "{addr} refuses our certificate ({detail}): use keys of the same `gms keys init` on both sides"
    )]
    Refused {
        /// The peer.
        addr: SocketAddr,
        /// What is wrong with it.
        detail: &'static str,
    },
    /// The peer refuses our certificate, which has expired.
    #[error(
        "{addr} refuses our certificate (it has expired, or its clock is wrong): renew it by `gms keys renew` where it was issued"
    )]
    ExpiredByPeer {
        /// The peer.
        addr: SocketAddr,
    },
    /// Our list of who was revoked names the peer.
    #[error(
        "{addr} has a certificate that was revoked (see revoked.txt in the key directory): issue it another one by `gms keys issue`"
    )]
    Revoked {
        /// The peer.
        addr: SocketAddr,
    },
    /// The peer's list of who was revoked names us.
    #[error(
        "{addr} refuses our certificate, which was revoked: have another one issued by `gms keys issue`, under another name"
    )]
    RevokedByPeer {
        /// The peer.
        addr: SocketAddr,
    },
    /// Our list of who may use this agent does not name the peer (told to agents).
    #[error(
        "{addr} has a certificate that allowed.txt in the key directory does not name: add a line with its id (`gms keys list` shows it) and send SIGHUP"
    )]
    NotAllowed {
        /// The peer.
        addr: SocketAddr,
    },
    /// The agent's list of who may use it does not name us.
    #[error(
        "{addr} does not let this key in: have its id (`gms keys list` shows it) added to allowed.txt there, or use another agent"
    )]
    NotAllowedByPeer {
        /// The agent.
        addr: SocketAddr,
    },
    /// The two sides speak different versions.
    #[error(
        "{addr} speaks another version of the protocol (ours are {VERSION_MIN} to {VERSION_MAX}): use gms releases that are next to each other"
    )]
    Version {
        /// The peer.
        addr: SocketAddr,
    },
    /// The peer sent something malformed; we closed the link.
    #[error("{addr} sent a malformed message: {error}")]
    Malformed {
        /// The peer.
        addr: SocketAddr,
        /// What is wrong with it.
        error: DecodeError,
    },
    /// The peer does not read its replies; we closed the link.
    #[error("{addr} lets its replies pile up; the link was closed")]
    Overload {
        /// The peer.
        addr: SocketAddr,
    },
    /// The peer closed the link.
    #[error("{addr} closed the link{}", by_peer(*code, detail))]
    ByPeer {
        /// The peer.
        addr: SocketAddr,
        /// Its code, if it is one of this version.
        code: Option<CloseCode>,
        /// Its explanation, at most [`CloseReason::DETAIL_MAX`] printable characters.
        detail: String,
    },
    /// The peer no longer knows the link: it has restarted.
    #[error("{addr} has restarted")]
    Reset {
        /// The peer.
        addr: SocketAddr,
    },
    /// We closed it.
    #[error("closed")]
    Local,
    /// Anything else that the transport found.
    #[error("the link to {addr} failed: {detail}")]
    Failed {
        /// The peer.
        addr: SocketAddr,
        /// What it says, at most [`CloseReason::DETAIL_MAX`] printable characters.
        detail: String,
    },
}

impl CloseReason {
    /// Most characters of text from a peer that a reason repeats.
    pub const DETAIL_MAX: usize = 120;
}

/// Why the rest of an exchange will not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AbortReason {
    /// The peer gave the exchange up.
    #[error("the peer gave the exchange up")]
    Peer,
    /// The link ended.
    #[error("the link ended")]
    LinkClosed,
}

/// Why a call to a transport failed. Nothing was sent.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The link is closed.
    #[error("the link is closed")]
    LinkClosed,
    /// The exchange has ended or was abandoned.
    #[error("the exchange has ended")]
    ExchangeEnded,
    /// Bounds of exchanges or queued bytes are met.
    #[error("too many exchanges in flight on this link: wait for one to complete")]
    Busy,
    /// Too many links.
    #[error("this endpoint has its {max} links already")]
    Links {
        /// The bound.
        max: usize,
    },
    /// The message breaks the protocol's own rules.
    #[error("refusing to send a message: {0}")]
    Message(#[from] DecodeError),
    /// The address cannot be connected to.
    #[error("cannot connect to {addr}: {detail}")]
    Address {
        /// The address.
        addr: SocketAddr,
        /// Why not.
        detail: String,
    },
    /// The socket failed.
    #[error("UDP socket on {addr}: {error}")]
    Socket {
        /// The local address.
        addr: SocketAddr,
        /// What the system says.
        error: io::Error,
    },
    /// The keys cannot be used.
    #[error("keys cannot be used: {0}")]
    Keys(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_the_peer_has_closed_is_told_in_words() {
        let told = |code: u64, detail: &str| {
            let (addr, code) = (([10, 0, 0, 7], 7400).into(), CloseCode::from_u64(code));
            CloseReason::ByPeer { addr, code, detail: detail.into() }.to_string()
        };
        for code in 0..7 {
            for text in [told(code, ""), told(code, "its words")] {
                assert!(text.starts_with("10.0.0.7:7400 closed the link"), "{text}");
                assert!(!text.contains("Some(") && !text.contains("None"), "{text}");
            }
            assert!(told(code, "its words").ends_with(": its words"));
        }
        assert_eq!(told(0, ""), "10.0.0.7:7400 closed the link");
        assert!(told(3, "").contains("a key of its own, or use fewer --fault-threads"));
        assert!(!told(3, "replies were not read").contains("--fault-threads"));
    }
}
