//! A client's identity as bytes, for the next binary of its process: the key directory may hold another by then, or be out of its reach.

use std::sync::Arc;

use rustls::RootCertStore;
use rustls::pki_types::{CertificateDer, Der, PrivateKeyDer, TrustAnchor};

use super::bearer::Bearer;
use super::revoked::Revoked;
use super::{Identity, Role, Trust};
use crate::{Fingerprint, PeerId};

impl Identity {
    /// The certificate of a client, its key, and whom it trusts: to be kept as secret as the key. Whom an agent lets in is not among it.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut add = |part: &[u8]| {
            bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
            bytes.extend_from_slice(part);
        };
        add(&self.authority_until.to_le_bytes());
        add(&self.cert);
        add(self.key.secret_der());
        let revoked = self.trust.revoked.as_ref();
        add(&revoked.map_or(u64::MAX, |revoked| revoked.len() as u64).to_le_bytes());
        for id in revoked.iter().flat_map(|revoked| revoked.ids()) {
            match id {
                PeerId::Issued(id) => add(&id),
                PeerId::Certificate(Fingerprint(digest)) => add(&digest),
            }
        }
        for anchor in &self.trust.roots.roots {
            add(&anchor.subject);
            add(&anchor.subject_public_key_info);
            add(anchor.name_constraints.as_deref().unwrap_or_default());
        }
        bytes
    }

    /// What [`Identity::to_bytes`] has told; `None` of other bytes.
    pub fn from_bytes(mut bytes: &[u8]) -> Option<Identity> {
        let mut next = || {
            let (length, rest) = bytes.split_first_chunk()?;
            let (part, rest) = rest.split_at_checked(u64::from_le_bytes(*length) as usize)?;
            bytes = rest;
            Some(part)
        };
        let number = |part: &[u8]| Some(u64::from_le_bytes(part.try_into().ok()?));
        let authority_until = number(next()?)?;
        let cert = CertificateDer::from(next()?.to_vec());
        let key = PrivateKeyDer::try_from(next()?.to_vec()).ok()?;
        let revoked = match number(next()?)? {
            u64::MAX => None,
            count => {
                let ids = (0..count).map(|_| peer_id(next()?)).collect::<Option<Revoked>>()?;
                Some(Arc::new(ids))
            }
        };
        let mut roots = RootCertStore::empty();
        while let Some(subject) = next() {
            let der = |part: &[u8]| Der::from(part.to_vec());
            let (spki, constraints) = (der(next()?), next()?);
            roots.roots.push(TrustAnchor {
                subject: der(subject),
                subject_public_key_info: spki,
                name_constraints: (!constraints.is_empty()).then(|| der(constraints)),
            });
        }
        let trust = Trust { roots: Arc::new(roots), revoked, allowed: None };
        let bearer = Bearer::of(&cert).ok()?;
        Some(Identity { role: Role::Client, cert, key, bearer, trust, authority_until })
    }
}

fn peer_id(bytes: &[u8]) -> Option<PeerId> {
    let issued = bytes.try_into().map(PeerId::Issued).ok();
    issued.or_else(|| bytes.try_into().map(|digest| PeerId::Certificate(Fingerprint(digest))).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::ephemeral;

    #[test]
    fn an_identity_is_the_same_after_its_way_through_bytes() {
        let (_, client) = ephemeral().expect("keys");
        let revoked = [PeerId::Issued([3; 16]), PeerId::Certificate(Fingerprint([4; 32]))];
        let trust = Trust {
            revoked: Some(Arc::new(revoked.into_iter().collect())),
            ..client.trust.clone()
        };
        for client in [client.clone(), Identity { trust, ..client }] {
            let bytes = client.to_bytes();
            let again = Identity::from_bytes(&bytes).expect("an identity");
            assert_eq!((again.id(), again.expires()), (client.id(), client.expires()));
            assert_eq!(again.trust.revoked, client.trust.revoked);
            assert_eq!(again.trust.roots.roots, client.trust.roots.roots);
            assert_eq!(again.to_bytes(), bytes);
            for cut in 0..bytes.len() {
                // A part of it may be the identity of a client with fewer roots, and never ends this process.
                let _ = Identity::from_bytes(&bytes[..cut]);
            }
        }
    }
}
