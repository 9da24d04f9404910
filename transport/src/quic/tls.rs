//! TLS 1.3 with certificates on both sides.

use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;

use aws_lc_rs::hmac;
use quinn_proto::Connection;
use quinn_proto::crypto::rustls::{HandshakeData, QuicClientConfig, QuicServerConfig};
use rustls::client::Resumption;
use rustls::pki_types::CertificateDer;
use rustls::{ClientConfig, ServerConfig};

use crate::TransportError;
use crate::keys::{Identity, verify};
use crate::message::Version;

/// Application protocols: one a version, the later first, so that versions which cannot talk part in the handshake.
pub(crate) static ALPN: [&[u8]; 2] = [b"gms/2", b"gms/1"];

/// Those of a node that speaks no later version than `version`.
pub(crate) fn alpn(version: Version) -> &'static [&'static [u8]] {
    match version {
        Version::V1 => &ALPN[1..],
        Version::V2 => &ALPN,
    }
}

/// Configuration of the connecting side. Sessions are not resumed: each link proves both identities.
pub(crate) fn client(
    identity: &Identity,
    alpn: &[&[u8]],
) -> Result<Arc<QuicClientConfig>, TransportError> {
    let mut tls = ClientConfig::builder_with_provider(verify::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(keys)?
        .dangerous()
        .with_custom_certificate_verifier(verify::server_verifier(&identity.trust)?)
        .with_client_auth_cert(vec![identity.cert.clone()], identity.key.clone_key())
        .map_err(keys)?;
    tls.resumption = Resumption::disabled();
    tls.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    Ok(Arc::new(tls.try_into().map_err(keys)?))
}

/// Configuration of the accepting side.
pub(crate) fn server(
    identity: &Identity,
    alpn: &[&[u8]],
) -> Result<Arc<QuicServerConfig>, TransportError> {
    let mut tls = ServerConfig::builder_with_provider(verify::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(keys)?
        .with_client_cert_verifier(verify::client_verifier(&identity.trust)?)
        .with_single_cert(vec![identity.cert.clone()], identity.key.clone_key())
        .map_err(keys)?;
    tls.send_tls13_tickets = 0;
    tls.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    Ok(Arc::new(tls.try_into().map_err(keys)?))
}

/// The version of the protocol that both ends have agreed on.
pub(crate) fn version(conn: &Connection) -> Version {
    let data = conn.crypto_session().handshake_data();
    let protocol = data.and_then(|data| data.downcast::<HandshakeData>().ok()?.protocol);
    match protocol.as_deref() {
        Some(name) if name == ALPN[1] => Version::V1,
        _ => Version::V2,
    }
}

/// The certificate that the peer has proved to own.
pub(crate) fn peer_certificate(conn: &Connection) -> Option<CertificateDer<'static>> {
    let chain = conn.crypto_session().peer_identity()?.downcast::<Vec<CertificateDer>>().ok()?;
    chain.into_iter().next()
}

/// The key for stateless resets and that for connection ids of endpoint `index` of whoever listens at `addr`. Both are bound to the identity's
/// private key, and to the endpoint: of endpoints that shared them one would tell a stranger by which token the other's links are
/// reset (RFC 9000, section 21.11). What is mixed in for that stays the same when the agent is started again.
pub(crate) fn endpoint_keys(
    identity: &Identity,
    addr: SocketAddr,
    index: usize,
) -> (hmac::Key, u64) {
    let secret = hmac::Key::new(hmac::HMAC_SHA256, identity.key.secret_der());
    // Many listen on all addresses, at the same port; one of the files may be missing, or the same in all containers.
    let machine = ["/etc/machine-id", "/proc/sys/kernel/hostname"]
        .map(|file| fs::read_to_string(file).unwrap_or_default());
    let listener = format!("{addr} {machine:?} {index}");
    let secret =
        hmac::Key::new(hmac::HMAC_SHA256, hmac::sign(&secret, listener.as_bytes()).as_ref());
    let derive = |label: &[u8]| hmac::sign(&secret, label);
    let reset = hmac::Key::new(hmac::HMAC_SHA256, derive(b"gms reset").as_ref());
    let id = derive(b"gms connection id")
        .as_ref()
        .iter()
        .take(8)
        .fold(0, |id, b| id << 8 | u64::from(*b));
    (reset, id)
}

fn keys(error: impl ToString) -> TransportError {
    TransportError::Keys(error.to_string())
}
