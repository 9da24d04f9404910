//! What the end of a QUIC connection means to a user.

use std::net::SocketAddr;

use quinn_proto::{ConnectionError, TransportErrorCode};
use rustls::AlertDescription;

use crate::keys::verify::Verdict;
use crate::text::printable;
use crate::{CloseCode, CloseReason};

/// First of the 256 QUIC error codes which carry a TLS alert (RFC 9001, section 4.8).
const CRYPTO_BASE: u64 = 0x100;

/// Why the connection to `addr` ended. `up`: it had been established.
pub(super) fn reason(addr: SocketAddr, up: bool, error: &ConnectionError) -> CloseReason {
    let failed = |detail: String| CloseReason::Failed { addr, detail: words(&detail) };
    match error {
        ConnectionError::VersionMismatch => CloseReason::Version { addr },
        ConnectionError::TransportError(found) => match verdict(found.code) {
            Verdict::Expired => CloseReason::Expired { addr },
            Verdict::WrongCa => CloseReason::WrongCa { addr },
            Verdict::WrongRole => CloseReason::WrongRole { addr },
            Verdict::Revoked => CloseReason::Revoked { addr },
            Verdict::NotAllowed => CloseReason::NotAllowed { addr },
            Verdict::Version => CloseReason::Version { addr },
            Verdict::Other => failed(found.to_string()),
        },
        ConnectionError::ConnectionClosed(told) => match verdict(told.error_code) {
            Verdict::Expired => CloseReason::ExpiredByPeer { addr },
            Verdict::WrongCa => refused(addr, "it is of another authority"),
            Verdict::WrongRole => refused(addr, "it is of the wrong role"),
            Verdict::Revoked => CloseReason::RevokedByPeer { addr },
            Verdict::NotAllowed => CloseReason::NotAllowedByPeer { addr },
            Verdict::Version => CloseReason::Version { addr },
            Verdict::Other if told.error_code == TransportErrorCode::CONNECTION_REFUSED => {
                let detail = "too many handshakes are under way there".into();
                CloseReason::ByPeer { addr, code: Some(CloseCode::Overload), detail }
            }
            Verdict::Other => failed(told.to_string()),
        },
        ConnectionError::ApplicationClosed(told) => {
            match CloseCode::from_u64(told.error_code.into_inner()) {
                Some(CloseCode::Version) => CloseReason::Version { addr },
                code => {
                    let detail = words(&String::from_utf8_lossy(&told.reason));
                    CloseReason::ByPeer { addr, code, detail }
                }
            }
        }
        ConnectionError::Reset => CloseReason::Reset { addr },
        ConnectionError::TimedOut if up => CloseReason::Lost { addr },
        ConnectionError::TimedOut => CloseReason::Unreachable { addr },
        ConnectionError::LocallyClosed => CloseReason::Local,
        ConnectionError::CidsExhausted => failed(error.to_string()),
    }
}

/// Why a link ends whose peer's certificate was found to be good before, and is no longer.
pub(super) fn expelled(addr: SocketAddr, error: &rustls::Error) -> CloseReason {
    match Verdict::of(error) {
        Verdict::Expired => CloseReason::Expired { addr },
        Verdict::Revoked => CloseReason::Revoked { addr },
        Verdict::NotAllowed => CloseReason::NotAllowed { addr },
        _ => CloseReason::WrongCa { addr },
    }
}

fn refused(addr: SocketAddr, detail: &'static str) -> CloseReason {
    CloseReason::Refused { addr, detail }
}

fn verdict(code: TransportErrorCode) -> Verdict {
    match u64::from(code).checked_sub(CRYPTO_BASE).and_then(|alert| u8::try_from(alert).ok()) {
        Some(alert) => Verdict::of_alert(AlertDescription::from(alert)),
        None => Verdict::Other,
    }
}

/// Words of a peer, fit to be shown.
fn words(text: &str) -> String {
    printable(text, CloseReason::DETAIL_MAX)
}

#[cfg(test)]
mod tests {
    use quinn_proto::{ApplicationClose, VarInt};

    use super::*;

    #[test]
    fn what_a_peer_says_does_not_control_the_terminal() {
        let said = "\u{1b}[2J\u{9b}2J\u{202e}lufituaeb\u{2028}".repeat(100);
        let told = ApplicationClose { error_code: VarInt::from_u32(7), reason: said.into() };
        let told = ConnectionError::ApplicationClosed(told);
        let reason = reason(([127, 0, 0, 1], 1).into(), true, &told).to_string();
        assert!(reason.contains("?[2J?2J?lufituaeb?"), "{reason:?}");
        assert!(!reason.contains(['\u{1b}', '\u{9b}', '\u{202e}', '\u{2028}']), "{reason:?}");
        assert!(reason.len() < 2 * CloseReason::DETAIL_MAX, "{}", reason.len());
    }
}
