//! Whom a key directory trusts: verifiers of certificates, for both ends of a link, and what is wrong where they refuse.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs as provided;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    AlertDescription, CertificateError, DigitallySignedStruct, DistinguishedName, Error,
    OtherError, SignatureScheme,
};

use super::bearer::Bearer;
use super::revoked::Revoked;
use super::{Allowed, Trust};
use crate::TransportError;

/// aws-lc-rs with the one suite which is fastest on CPUs with AES instructions, and which QUIC requires anyway.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider {
        cipher_suites: vec![provided::cipher_suite::TLS13_AES_128_GCM_SHA256],
        ..provided::default_provider()
    })
}

/// Checks the certificates of agents that are connected to.
pub(crate) fn server_verifier(
    trust: &Trust,
) -> Result<Arc<dyn ServerCertVerifier>, TransportError> {
    let Trust { roots, revoked, .. } = trust.clone();
    let inner = WebPkiServerVerifier::builder_with_provider(roots, provider()).build();
    Ok(Arc::new(Direct { inner: inner.map_err(keys)?, revoked, allowed: None }))
}

/// Checks the certificates of clients and agents that connect.
pub(crate) fn client_verifier(
    trust: &Trust,
) -> Result<Arc<dyn ClientCertVerifier>, TransportError> {
    let Trust { roots, revoked, allowed } = trust.clone();
    let inner = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
    Ok(Arc::new(Direct { inner: inner.map_err(keys)?, revoked, allowed }))
}

/// Takes certificates that the authority has issued itself. The search for a chain through others takes seconds where a stranger has made them for that,
/// who need not prove that the first is its own before.
#[derive(Debug)]
struct Direct<V: ?Sized> {
    inner: Arc<V>,
    revoked: Option<Arc<Revoked>>,
    allowed: Option<Arc<Allowed>>,
}

impl<V: ?Sized> Direct<V> {
    /// Refuses who was revoked, or is not let in. Asked once all else is good, so that nobody learns from us whom a list names.
    fn refuse_unwanted(&self, cert: &CertificateDer<'_>) -> Result<(), Error> {
        let bearer = Bearer::of(cert)
            .map_err(|unreadable| CertificateError::Other(OtherError(Arc::new(unreadable))))?;
        if self.revoked.as_ref().is_some_and(|revoked| revoked.names(&bearer)) {
            return Err(CertificateError::Revoked.into());
        }
        if self.allowed.as_ref().is_some_and(|allowed| !allowed.admits(&bearer)) {
            return Err(CertificateError::ApplicationVerificationFailure.into());
        }
        Ok(())
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
        self.refuse_unwanted(own).map(|()| verified)
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
        self.refuse_unwanted(own).map(|()| verified)
    }

    as_inner!();
}

/// Verifies again the certificate of a client that was let in. If the clock has gone back since, to before it was issued, all else must be good.
pub(crate) fn verify_again(
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

fn keys(error: impl ToString) -> TransportError {
    TransportError::Keys(error.to_string())
}

/// What is wrong with a certificate or a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Expired or not valid yet.
    Expired,
    /// Not issued by our authority.
    WrongCa,
    /// Of the wrong role, or none at all.
    WrongRole,
    /// On a list of who was revoked.
    Revoked,
    /// Not on the agent's list of who is let in.
    NotAllowed,
    /// No common version of the application protocol.
    Version,
    /// Something else.
    Other,
}

impl Verdict {
    /// What TLS alert `alert` means here (RFC 8446, section 6.2).
    pub(crate) fn of_alert(alert: AlertDescription) -> Self {
        use AlertDescription as A;
        match alert {
            A::CertificateExpired => Verdict::Expired,
            A::UnknownCA | A::DecryptError => Verdict::WrongCa,
            // Of another purpose, of another name than all agents have, or missing.
            A::UnsupportedCertificate | A::BadCertificate | A::CertificateRequired => {
                Verdict::WrongRole
            }
            A::CertificateRevoked => Verdict::Revoked,
            A::AccessDenied => Verdict::NotAllowed,
            A::NoApplicationProtocol => Verdict::Version,
            _ => Verdict::Other,
        }
    }

    /// What a verifier's error means here.
    pub(crate) fn of(error: &rustls::Error) -> Self {
        match error {
            rustls::Error::InvalidCertificate(error) => Self::of_alert(error.clone().into()),
            _ => Verdict::Other,
        }
    }
}
