//! Who a certificate says that its bearer is.
//!
//! The id stands among the certificate's names as `ID.node.gms` or `ID.client.gms`, ID in 32 hexadecimal digits. Only
//! the authority puts names into certificates, so an id in one that it has signed is authentic.

use aws_lc_rs::digest;
use rustls::pki_types::CertificateDer;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;

use super::Role;
use crate::{Fingerprint, PeerId};

/// What a certificate says. Nothing of it is checked here: verifiers do that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bearer {
    pub id: PeerId,
    pub fingerprint: Fingerprint,
    /// What the name with the id says; `None` without an id, as certificates were before.
    pub role: Option<Role>,
    /// Seconds from 1970: until when it is good.
    pub until: u64,
}

/// A certificate that cannot be read, or whose names contradict each other.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("it cannot be read, or has more than one id, or an id that is none")]
pub(crate) struct Unreadable;

/// The name which gives `id` to who has `role`.
pub(super) fn name(role: Role, id: [u8; 16]) -> String {
    format!("{}.{}", PeerId::Issued(id), suffix(role))
}

fn suffix(role: Role) -> &'static str {
    match role {
        Role::Node => "node.gms",
        Role::Client => "client.gms",
    }
}

impl Bearer {
    pub(crate) fn of(cert: &CertificateDer) -> Result<Bearer, Unreadable> {
        let (_, parsed) = X509Certificate::from_der(cert).map_err(|_| Unreadable)?;
        let names = parsed.subject_alternative_name().map_err(|_| Unreadable)?;
        let names = names.iter().flat_map(|names| &names.value.general_names);
        let mut issued = names.filter_map(|name| match name {
            GeneralName::DNSName(name) => id_in(name),
            _ => None,
        });
        let first = issued.next().transpose()?;
        if issued.next().is_some() {
            return Err(Unreadable);
        }
        // Without the signature: whoever has it can write it in another way (ECDSA: n - s for s), which is as good.
        let fingerprint = fingerprint(parsed.tbs_certificate.as_ref());
        let until = parsed.validity().not_after.timestamp().try_into().unwrap_or(0);
        let (role, id) = first.unzip();
        Ok(Bearer { id: id.unwrap_or(PeerId::Certificate(fingerprint)), fingerprint, role, until })
    }
}

/// SHA-256 of what an authority has signed.
pub(crate) fn fingerprint(signed: &[u8]) -> Fingerprint {
    let digest = digest::digest(&digest::SHA256, signed);
    Fingerprint(digest.as_ref().try_into().expect("SHA-256 has 32 bytes"))
}

/// The role and id in a name, if it is one that holds them.
fn id_in(name: &str) -> Option<Result<(Role, PeerId), Unreadable>> {
    let (label, role) = [Role::Node, Role::Client].into_iter().find_map(|role| {
        let label = name.strip_suffix(suffix(role))?.strip_suffix('.')?;
        Some((label, role))
    })?;
    Some(match label.parse() {
        Ok(id @ PeerId::Issued(_)) => Ok((role, id)),
        _ => Err(Unreadable),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_read_from_its_name_only() {
        let id = [0xab; 16];
        for role in [Role::Node, Role::Client] {
            assert_eq!(id_in(&name(role, id)), Some(Ok((role, PeerId::Issued(id)))));
        }
        for other in ["agent.gms", "node.gms", "", "abab.pager.gms", "xnode.gms"] {
            assert_eq!(id_in(other), None, "{other}");
        }
        let whole = name(Role::Node, id);
        let longer = format!("00{whole}");
        let fingerprint = format!("{}.node.gms", "ab".repeat(32));
        for bad in [&whole[1..], &longer, &fingerprint, ".node.gms", "x.node.gms", "*.client.gms"] {
            assert_eq!(id_in(bad), Some(Err(Unreadable)), "{bad}");
        }
    }

    /// Who was revoked by a fingerprint must not get another by writing the signature anew.
    #[test]
    fn a_fingerprint_is_of_what_was_signed() {
        let (_, client) = crate::keys::ephemeral().expect("keys");
        let mut other = client.cert.to_vec();
        *other.last_mut().expect("a signature") ^= 1;
        assert_eq!(Bearer::of(&other.into()), Ok(client.bearer));
    }

    #[test]
    fn what_is_no_certificate_is_unreadable() {
        for bytes in [&b""[..], b"x", &[0x30, 0x84, 0xff, 0xff, 0xff, 0xff]] {
            assert_eq!(Bearer::of(&CertificateDer::from(bytes)), Err(Unreadable));
        }
    }
}
