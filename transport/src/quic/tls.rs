//! TLS 1.3 with certificates on both sides, and what its alerts mean to a user.

use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;

use aws_lc_rs::{digest, hmac};
use quinn_proto::Connection;
use quinn_proto::crypto::rustls::{HandshakeData, QuicClientConfig, QuicServerConfig};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs as provided;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    AlertDescription, CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName,
    Error, ServerConfig, SignatureScheme,
};

use crate::keys::bearer::Bearer;
use crate::keys::revoked::Revoked;
use crate::keys::{Identity, Trust};
use crate::message::Version;
use crate::{Fingerprint, TransportError};

/// Application protocols: one a version, the later first, so that versions which cannot talk part in the handshake.
pub static ALPN: [&[u8]; 2] = [b"gms/2", b"gms/1"];

/// Those of a node that speaks no later version than `version`.
pub fn alpn(version: Version) -> &'static [&'static [u8]] {
    match version {
        Version::V1 => &ALPN[1..],
        Version::V2 => &ALPN,
    }
}

/// aws-lc-rs with the one suite which is fastest on CPUs with AES instructions, and which QUIC requires anyway.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider {
        cipher_suites: vec![provided::cipher_suite::TLS13_AES_128_GCM_SHA256],
        ..provided::default_provider()
    })
}

/// Checks the certificates of agents that are connected to.
pub fn server_verifier(trust: &Trust) -> Result<Arc<dyn ServerCertVerifier>, TransportError> {
    let Trust { roots, revoked } = trust.clone();
    let inner = WebPkiServerVerifier::builder_with_provider(roots, provider()).build();
    Ok(Arc::new(Direct { inner: inner.map_err(keys)?, revoked }))
}

/// Checks the certificates of clients and agents that connect.
pub fn client_verifier(trust: &Trust) -> Result<Arc<dyn ClientCertVerifier>, TransportError> {
    let Trust { roots, revoked } = trust.clone();
    let inner = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
    Ok(Arc::new(Direct { inner: inner.map_err(keys)?, revoked }))
}

/// Takes certificates that the authority has issued itself. The search for a chain through others takes seconds where a stranger has made them for that,
/// who need not prove that the first is its own before.
#[derive(Debug)]
struct Direct<V: ?Sized> {
    inner: Arc<V>,
    revoked: Option<Arc<Revoked>>,
}

impl<V: ?Sized> Direct<V> {
    /// Refuses who was revoked. Asked once all else is good, so that nobody learns from us whom the list names.
    fn refuse_revoked(&self, cert: &CertificateDer<'_>) -> Result<(), Error> {
        let refused = |error| Err(Error::InvalidCertificate(error));
        match (Bearer::of(cert), &self.revoked) {
            (Err(_), _) => refused(CertificateError::ApplicationVerificationFailure),
            (Ok(bearer), Some(revoked)) if revoked.names(&bearer) => {
                refused(CertificateError::Revoked)
            }
            _ => Ok(()),
        }
    }
}

fn refuse_chain(others: &[CertificateDer<'_>]) -> Result<(), Error> {
    match others {
        [] => Ok(()),
        _ => Err(Error::InvalidCertificate(CertificateError::UnknownIssuer)),
    }
}

/// What both kinds of verifiers leave to the one within.
macro_rules! as_inner {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.inner.verify_tls12_signature(message, cert, signature)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.inner.verify_tls13_signature(message, cert, signature)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.inner.supported_verify_schemes()
        }
    };
}

impl ServerCertVerifier for Direct<WebPkiServerVerifier> {
    fn verify_server_cert(
        &self,
        own: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        refuse_chain(others)?;
        let verified = self.inner.verify_server_cert(own, others, name, ocsp, now)?;
        self.refuse_revoked(own).map(|()| verified)
    }

    as_inner!();
}

impl ClientCertVerifier for Direct<dyn ClientCertVerifier> {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        own: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        refuse_chain(others)?;
        let verified = self.inner.verify_client_cert(own, others, now)?;
        self.refuse_revoked(own).map(|()| verified)
    }

    as_inner!();
}

/// Verifies again the certificate of a client that was let in. If the clock has gone back since, to before it was issued, all else must be good.
pub fn verify_again(
    verifier: &dyn ClientCertVerifier,
    cert: &CertificateDer<'_>,
    today: UnixTime,
) -> Result<(), Error> {
    let verify = |at| verifier.verify_client_cert(cert, &[], at).map(drop);
    match verify(today) {
        Err(Error::InvalidCertificate(CertificateError::NotValidYetContext {
            not_before, ..
        })) => verify(not_before),
        verified => verified,
    }
}

/// Configuration of the connecting side. Sessions are not resumed: each link proves both identities.
pub fn client(
    identity: &Identity,
    alpn: &[&[u8]],
) -> Result<Arc<QuicClientConfig>, TransportError> {
    let mut tls = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(keys)?
        .dangerous()
        .with_custom_certificate_verifier(server_verifier(&identity.trust)?)
        .with_client_auth_cert(vec![identity.cert.clone()], identity.key.clone_key())
        .map_err(keys)?;
    tls.resumption = Resumption::disabled();
    tls.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    Ok(Arc::new(tls.try_into().map_err(keys)?))
}

/// Configuration of the accepting side.
pub fn server(
    identity: &Identity,
    alpn: &[&[u8]],
) -> Result<Arc<QuicServerConfig>, TransportError> {
    let mut tls = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(keys)?
        .with_client_cert_verifier(client_verifier(&identity.trust)?)
        .with_single_cert(vec![identity.cert.clone()], identity.key.clone_key())
        .map_err(keys)?;
    tls.send_tls13_tickets = 0;
    tls.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    Ok(Arc::new(tls.try_into().map_err(keys)?))
}

/// The version of the protocol that both ends have agreed on.
pub fn version(conn: &Connection) -> Version {
    let data = conn.crypto_session().handshake_data();
    let protocol = data.and_then(|data| data.downcast::<HandshakeData>().ok()?.protocol);
    match protocol.as_deref() {
        Some(name) if name == ALPN[1] => Version::V1,
        _ => Version::V2,
    }
}

/// The certificate that the peer has proved to own.
pub fn peer_certificate(conn: &Connection) -> Option<CertificateDer<'static>> {
    let chain = conn.crypto_session().peer_identity()?.downcast::<Vec<CertificateDer>>().ok()?;
    chain.into_iter().next()
}

/// SHA-256 of what an authority has signed.
pub fn fingerprint(signed: &[u8]) -> Fingerprint {
    let digest = digest::digest(&digest::SHA256, signed);
    Fingerprint(digest.as_ref().try_into().expect("SHA-256 has 32 bytes"))
}

/// The key for stateless resets and that for connection ids of endpoint `index` of whoever listens at `addr`. Both are bound to the identity's
/// private key, and to the endpoint: of endpoints that shared them one would tell a stranger by which token the other's links are
/// reset (RFC 9000, section 21.11). What is mixed in for that stays the same when the agent is started again.
pub fn endpoint_keys(identity: &Identity, addr: SocketAddr, index: usize) -> (hmac::Key, u64) {
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

/// What is wrong with a certificate or a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Expired or not valid yet.
    Expired,
    /// Not issued by our authority.
    WrongCa,
    /// Of the wrong role, or none at all.
    WrongRole,
    /// On a list of who was revoked.
    Revoked,
    /// No common version of the application protocol.
    Version,
    /// Something else.
    Other,
}

impl Verdict {
    /// What TLS alert `alert` means here (RFC 8446, section 6.2).
    pub fn of_alert(alert: AlertDescription) -> Self {
        use AlertDescription as A;
        match alert {
            A::CertificateExpired => Verdict::Expired,
            A::UnknownCA | A::DecryptError => Verdict::WrongCa,
            // Of another purpose, of another name than all agents have, or missing.
            A::UnsupportedCertificate | A::BadCertificate | A::CertificateRequired => {
                Verdict::WrongRole
            }
            A::CertificateRevoked => Verdict::Revoked,
            A::NoApplicationProtocol => Verdict::Version,
            _ => Verdict::Other,
        }
    }

    /// What a verifier's error means here.
    pub fn of(error: &rustls::Error) -> Self {
        match error {
            rustls::Error::InvalidCertificate(error) => Self::of_alert(error.clone().into()),
            _ => Verdict::Other,
        }
    }
}
