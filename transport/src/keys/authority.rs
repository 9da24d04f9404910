//! The authority of a cluster, which issues certificates and gives ids.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};

use super::allowed::Allowed;
use super::bearer::{self, Bearer};
use super::files::{self, File, Lock};
use super::revoked::Revoked;
use super::{
    CA, CA_KEY, CA_LIFETIME, Identity, KeysError, LIFETIME, NODE_NAME, Role, Trust, check,
    check_name, invalid, load_bearer, load_cert, roots,
};
use crate::{Fingerprint, PeerId};

/// Certificates begin this long ago, for clocks that are behind.
pub(super) const CLOCK_SKEW: Duration = Duration::from_secs(3600);

/// Makes a new authority with a first node and a first client key in `dir`, which is created if need be.
pub fn init(dir: &Path) -> Result<(), KeysError> {
    let authority = Authority::generate()?;
    let mut files = vec![
        File::public(dir.join(CA), authority.pem.as_str()),
        File::private(dir.join(CA_KEY), authority.issuer.key().serialize_pem()),
    ];
    for role in Role::BOTH {
        files.extend(authority.issue(role, new_id()?, valid_for(LIFETIME))?.files(dir, role));
    }
    files::write_new(dir, &files)
}

/// Issues a key of `role` by the authority in `dir` into the new directory `dir/name`, whose path it returns.
/// Called for both roles with one name, it completes the directory.
pub fn issue(dir: &Path, role: Role, name: &str) -> Result<PathBuf, KeysError> {
    issue_for(dir, role, name, LIFETIME)
}

/// As [`issue`], for another time than [`LIFETIME`].
pub fn issue_for(
    dir: &Path,
    role: Role,
    name: &str,
    lifetime: Duration,
) -> Result<PathBuf, KeysError> {
    check_name(name)?;
    if name.parse::<PeerId>().is_ok() {
        return Err(KeysError::Name(name.to_owned()));
    }
    let authority = Authority::load(dir)?;
    let target = dir.join(name);
    let issued = authority.issue(role, new_id()?, valid_for(lifetime))?;
    let mut files = Vec::from(issued.files(&target, role));
    match files::read(&target.join(CA)) {
        Ok(pem) if pem == authority.pem.as_bytes() => {}
        Ok(_) => return Err(KeysError::Exists { path: target.join(CA) }),
        Err(_) => files.push(File::public(target.join(CA), authority.pem)),
    }
    files::write_new(&target, &files)?;
    Ok(target)
}

/// A key pair that took the place of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Renewed {
    /// Its directory.
    pub dir: PathBuf,
    /// What it is good for.
    pub role: Role,
    /// Whose it is.
    pub id: PeerId,
    /// Whether the certificate before had that id too. Without, its holder is another one now.
    pub kept_id: bool,
    /// The certificate before, which is good until it expires.
    pub before: Fingerprint,
}

/// Makes a new key pair and certificate in the place of each that was issued as `dir/name`, or without a name of those
/// that [`init`] made in `dir` itself. Who held the one before is the same node or client with the new one.
pub fn renew(dir: &Path, name: Option<&str>) -> Result<Vec<Renewed>, KeysError> {
    renew_for(dir, name, LIFETIME)
}

/// As [`renew`], for another time than [`LIFETIME`].
pub fn renew_for(
    dir: &Path,
    name: Option<&str>,
    lifetime: Duration,
) -> Result<Vec<Renewed>, KeysError> {
    name.map_or(Ok(()), check_name)?;
    let authority = Authority::load(dir)?;
    let _lock = Lock::of(dir)?;
    let revoked = Revoked::read(dir)?.unwrap_or_default();
    let target = name.map_or(dir.to_owned(), |name| dir.join(name));
    let roots = roots(load_cert(&dir.join(CA))?, &dir.join(CA))?;
    let mut held = Vec::new();
    for role in Role::BOTH {
        let Some(bearer) = load_bearer(&target, role)? else { continue };
        let path = target.join(&role.files()[0]);
        // One that has expired was good once.
        let then = UnixTime::since_unix_epoch(Duration::from_secs(bearer.until));
        check(&roots, role, &load_cert(&path)?, then)
            .map_err(|fault| fault.of_cert(path.clone(), role))?;
        // If only this certificate was revoked, its holder is to have another.
        if matches!(bearer.id, PeerId::Issued(_)) && revoked.names_id(bearer.id) {
            return Err(KeysError::Revoked { path });
        }
        held.push((role, bearer));
    }
    if held.is_empty() {
        return Err(KeysError::NoBearer { dir: target });
    }
    let mut files = Vec::new();
    let succeed = |(role, bearer)| authority.succeed((&target, role), bearer, lifetime, &mut files);
    let renewed = held.into_iter().map(succeed).collect::<Result<_, _>>()?;
    files::replace(&files)?;
    Ok(renewed)
}

/// Makes a throw-away authority in memory with one node and one client key, for an agent embedded in a pager.
pub fn ephemeral() -> Result<(Identity, Identity), KeysError> {
    let authority = Authority::generate()?;
    let make = |role| authority.identity(role, valid_for(LIFETIME));
    Ok((make(Role::Node)?, make(Role::Client)?))
}

/// Makes a key for an agent that a pager with the identity `client` starts beside itself. The node lets in the bearer of that
/// identity alone. Returns it, and a `client` which trusts that node too, and nobody more: the authority which signed it is
/// gone.
pub fn beside(client: &Identity) -> Result<(Identity, Identity), KeysError> {
    let authority = Authority::generate()?;
    let node = authority.identity(Role::Node, valid_for(LIFETIME))?;
    let mut roots = RootCertStore::clone(&client.trust.roots);
    roots.roots.extend(node.trust.roots.roots.iter().cloned());
    let trust = Trust { roots: Arc::new(roots), ..client.trust.clone() };
    let allowed = Some(Arc::new(Allowed::only(client.id())));
    let node = Identity { trust: Trust { allowed, ..client.trust.clone() }, ..node };
    Ok((node, Identity { trust, ..client.clone() }))
}

/// A certificate and its key in PEM.
pub(super) struct Issued {
    cert: rcgen::Certificate,
    key: KeyPair,
}

impl Issued {
    /// The key first.
    pub(super) fn files(&self, dir: &Path, role: Role) -> [File; 2] {
        let [cert, key] = role.files().map(|file| dir.join(file));
        [File::private(key, self.key.serialize_pem()), File::public(cert, self.cert.pem())]
    }
}

/// An authority that can issue.
pub(crate) struct Authority {
    pub(super) pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub(crate) fn generate() -> Result<Self, KeysError> {
        let key = KeyPair::generate()?;
        // The name is unique, so that a certificate of another cluster is seen to be of an unknown issuer, not forged.
        let id: String =
            key.public_key_raw().iter().skip(1).take(8).map(|b| format!("{b:02x}")).collect();
        let mut params = params(&format!("gms cluster {id}"), valid_for(CA_LIFETIME));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let pem = params.self_signed(&key)?.pem();
        Ok(Self { pem, issuer: Issuer::new(params, key) })
    }

    pub(super) fn load(dir: &Path) -> Result<Self, KeysError> {
        let (cert_path, key_path) = (dir.join(CA), dir.join(CA_KEY));
        let pem = String::from_utf8(files::read(&cert_path)?)
            .map_err(|e| invalid(cert_path.clone(), "certificate", e))?;
        let key = String::from_utf8(files::read_private(&key_path)?)
            .map_err(|e| invalid(key_path.clone(), "private key", e))?;
        let key = KeyPair::from_pem(&key).map_err(|e| invalid(key_path, "private key", e))?;
        let issuer = Issuer::from_ca_cert_pem(&pem, key)
            .map_err(|e| invalid(cert_path, "certificate", e))?;
        Ok(Self { pem, issuer })
    }

    pub(super) fn issue(
        &self,
        role: Role,
        id: [u8; 16],
        valid: [SystemTime; 2],
    ) -> Result<Issued, KeysError> {
        let mut usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let mut names = vec![bearer::name(role, id)];
        if role == Role::Node {
            usages.push(ExtendedKeyUsagePurpose::ServerAuth);
            names.push(NODE_NAME.to_owned());
        }
        self.sign(params(&format!("gms {}", role.name()), valid), usages, &names)
    }

    /// Signs a certificate of a new key with these usages and names.
    pub(super) fn sign(
        &self,
        mut params: CertificateParams,
        usages: Vec<ExtendedKeyUsagePurpose>,
        names: &[String],
    ) -> Result<Issued, KeysError> {
        let key = KeyPair::generate()?;
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        params.extended_key_usages = usages;
        let name = |name: &String| Ok(SanType::DnsName(name.as_str().try_into()?));
        params.subject_alt_names = names.iter().map(name).collect::<Result<_, rcgen::Error>>()?;
        Ok(Issued { cert: params.signed_by(&key, &self.issuer)?, key })
    }

    /// As they were before there were ids.
    #[cfg(test)]
    pub(super) fn issue_before_ids(&self, role: Role) -> Issued {
        let (usage, names) = match role {
            Role::Node => (ExtendedKeyUsagePurpose::ServerAuth, &[NODE_NAME.to_owned()][..]),
            Role::Client => (ExtendedKeyUsagePurpose::ClientAuth, &[][..]),
        };
        self.sign(params("gms", valid_for(LIFETIME)), vec![usage], names).unwrap()
    }

    /// The same as an identity.
    #[cfg(test)]
    pub(crate) fn identity_before_ids(&self, role: Role) -> Identity {
        self.adopt(role, self.issue_before_ids(role)).unwrap()
    }

    /// Adds to `files` what takes the place of the key pair of a role in a directory, which is `bearer`'s.
    fn succeed(
        &self,
        (dir, role): (&Path, Role),
        bearer: Bearer,
        lifetime: Duration,
        files: &mut Vec<File>,
    ) -> Result<Renewed, KeysError> {
        let (id, kept_id) = match bearer.id {
            PeerId::Issued(id) => (id, true),
            PeerId::Certificate(_) => (new_id()?, false),
        };
        if !kept_id {
            // Nothing else will tell by what to revoke it.
            let (path, cert) = (dir.join(role.file_before()), dir.join(&role.files()[0]));
            let mut certs = match files::read(&path) {
                Err(KeysError::Missing { .. }) => Vec::new(),
                read => read?,
            };
            certs.extend(files::read(&cert)?);
            certs.push(b'\n');
            if certs.len() as u64 > files::FILE_MAX {
                return Err(KeysError::TooLong { path, max: files::FILE_MAX });
            }
            // Whatever else is in the file stays as private as it may have been.
            files.push(File::private(path, certs));
        }
        files.extend(self.issue(role, id, valid_for(lifetime))?.files(dir, role));
        let (id, before) = (PeerId::Issued(id), bearer.fingerprint);
        Ok(Renewed { dir: dir.to_owned(), role, id, kept_id, before })
    }

    pub(crate) fn identity(
        &self,
        role: Role,
        valid: [SystemTime; 2],
    ) -> Result<Identity, KeysError> {
        self.adopt(role, self.issue(role, new_id()?, valid)?)
    }

    /// The identity of who holds what was issued, which revokes nobody.
    pub(super) fn adopt(&self, role: Role, issued: Issued) -> Result<Identity, KeysError> {
        let Issued { cert, key } = issued;
        let ca = CertificateDer::from_pem_slice(self.pem.as_bytes())
            .map_err(|_| rcgen::Error::CouldNotParseCertificate)?;
        let key = PrivateKeyDer::try_from(key.serialize_der())
            .map_err(|_| rcgen::Error::CouldNotParseKeyPair)?;
        let bad = |_| rcgen::Error::CouldNotParseCertificate;
        let authority_until = Bearer::of(&ca).map_err(bad)?.until;
        let cert = cert.der().clone();
        let bearer = Bearer::of(&cert).map_err(bad)?;
        let trust = Trust { roots: roots(ca, Path::new(CA))?, revoked: None, allowed: None };
        Ok(Identity { role, cert, key, bearer, trust, authority_until })
    }
}

/// An id that nobody else has.
fn new_id() -> Result<[u8; 16], KeysError> {
    let mut id = [0; 16];
    aws_lc_rs::rand::fill(&mut id).map_err(|_| rcgen::Error::RingUnspecified)?;
    Ok(id)
}

pub(super) fn valid_for(lifetime: Duration) -> [SystemTime; 2] {
    let now = SystemTime::now();
    [now - CLOCK_SKEW, now + lifetime]
}

pub(super) fn params(name: &str, [from, until]: [SystemTime; 2]) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = from.into();
    params.not_after = until.into();
    params
}
