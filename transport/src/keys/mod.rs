//! A cluster's keys: its authority, and the certificates of agents (nodes) and pagers (clients).
//!
//! A key directory holds `ca.pem` and, by role, `node.pem` + `node-key.pem` or `client.pem` + `client-key.pem`.
//! [`init`] makes one with everything, including `ca-key.pem`, which alone can issue more and needs to be on one
//! machine only. [`issue`] makes a directory of its own (`DIR/NAME/`, same file names, without `ca-key.pem`) to be
//! copied to another machine.
//!
//! The authority gives each node and each client an id, which [`renew`] keeps. A node certificate is good for serving
//! and for connecting, since agents may connect to agents; a client certificate for connecting only, so that a pager's
//! key which leaks cannot pose as an agent. Whom `revoked.txt` names is refused by who holds that list, and an agent that
//! holds `allowed.txt` lets in only whom that names.

mod allowed;
mod authority;
pub(crate) mod bearer;
mod error;
mod expiry;
mod files;
mod handed;
mod listing;
pub(crate) mod revoked;
#[cfg(test)]
mod tests;
pub(crate) mod verify;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::RootCertStore;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};

use crate::{Fingerprint, PeerId};
pub use allowed::{Allowed, Quota};
#[cfg(test)]
pub(crate) use authority::Authority;
pub use authority::{Renewed, beside, ephemeral, init, issue, issue_for, renew, renew_for};
use bearer::Bearer;
pub use error::KeysError;
pub use expiry::{Ending, NOTICE};
pub use listing::{Listed, Listing, State, list};
use revoked::Revoked;
pub use revoked::{Revocation, revoke};
use verify::Verdict;

/// Name in every node certificate: the node that answers is an agent, whichever it is.
pub const NODE_NAME: &str = "agent.gms";
/// How long an authority is valid.
pub const CA_LIFETIME: Duration = Duration::from_secs(10 * 365 * 86400);
/// How long an issued certificate is valid.
pub const LIFETIME: Duration = Duration::from_secs(2 * 365 * 86400);
/// Most characters in the name of an issued directory.
const NAME_MAX: usize = 64;

const CA: &str = "ca.pem";
const CA_KEY: &str = "ca-key.pem";
/// The list of who was revoked.
pub const REVOKED: &str = "revoked.txt";
/// The list of who may use an agent.
pub const ALLOWED: &str = "allowed.txt";

/// What a certificate is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Serving pages, and connecting to other agents: `gms-agent`.
    Node,
    /// Connecting to agents: `gms`.
    Client,
}

impl Role {
    const BOTH: [Role; 2] = [Role::Node, Role::Client];

    /// As the command line has it.
    pub fn name(self) -> &'static str {
        match self {
            Role::Node => "node",
            Role::Client => "client",
        }
    }

    fn files(self) -> [String; 2] {
        [format!("{}.pem", self.name()), format!("{}-key.pem", self.name())]
    }

    /// Certificates without an id which were renewed: those after have one, but do not tell whose these are.
    fn file_before(self) -> String {
        format!("{}-before.pem", self.name())
    }
}

/// Whose certificates are good: those of an authority, but for whom a list names.
#[derive(Clone, Debug)]
pub(crate) struct Trust {
    pub roots: Arc<RootCertStore>,
    pub revoked: Option<Arc<Revoked>>,
    /// Who may connect; everybody without it. A pager has none: it chooses its agents.
    pub allowed: Option<Arc<Allowed>>,
}

/// A checked certificate with its private key, and what peers are checked against.
pub struct Identity {
    pub(crate) role: Role,
    pub(crate) cert: CertificateDer<'static>,
    pub(crate) key: PrivateKeyDer<'static>,
    pub(crate) bearer: Bearer,
    pub(crate) trust: Trust,
    /// Seconds from 1970: until when its authority is good.
    pub(crate) authority_until: u64,
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        let Self { role, cert, key, bearer, trust, authority_until } = self;
        let (cert, key, trust) = (cert.clone(), key.clone_key(), trust.clone());
        let (role, bearer, authority_until) = (*role, *bearer, *authority_until);
        Self { role, cert, key, bearer, trust, authority_until }
    }
}

impl Identity {
    /// What the certificate is good for.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Until when peers accept the certificate.
    pub fn expires(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(self.bearer.until)
    }

    /// By what peers know it.
    pub fn id(&self) -> PeerId {
        self.bearer.id
    }

    /// Of this certificate; a renewed one has another.
    pub fn fingerprint(&self) -> Fingerprint {
        self.bearer.fingerprint
    }

    /// Lines of its list that name somebody.
    pub fn revoked(&self) -> usize {
        self.trust.revoked.as_ref().map_or(0, |revoked| revoked.len())
    }

    /// Who may connect, if a list says so.
    pub fn allowed(&self) -> Option<&Arc<Allowed>> {
        self.trust.allowed.as_ref()
    }

    /// Clients that this list names; `None` without one.
    pub fn allowed_clients(&self) -> Option<usize> {
        self.allowed().map(|allowed| allowed.len())
    }

    /// Whether its own list names it, so that whoever has the same list refuses it.
    pub fn is_revoked(&self) -> bool {
        self.trust.revoked.as_ref().is_some_and(|revoked| revoked.names(&self.bearer))
    }

    /// Loads what may have changed in `dir`, as [`load`] does. That this identity was revoked itself is no error: what else the list
    /// says is to count.
    ///
    /// # Errors
    /// As [`load`], and if a list of who was revoked, or of who is let in, is gone.
    pub fn reload(&self, dir: &Path) -> Result<Identity, KeysError> {
        let identity = read(dir, self.role)?;
        if self.trust.revoked.is_some() && identity.trust.revoked.is_none() {
            return Err(KeysError::ListGone { path: dir.join(REVOKED) });
        }
        if self.trust.allowed.is_some() && identity.trust.allowed.is_none() {
            return Err(KeysError::AllowedGone { path: dir.join(ALLOWED) });
        }
        Ok(identity)
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {}", self.role, self.id())
    }
}

/// Loads the key of `role` from `dir` and checks it: what this accepts, peers with the same authority and list accept.
pub fn load(dir: &Path, role: Role) -> Result<Identity, KeysError> {
    let identity = read(dir, role)?;
    let [path, _] = role.files().map(|file| dir.join(file));
    if identity.is_revoked() { Err(KeysError::Revoked { path }) } else { Ok(identity) }
}

/// Why there is no certificate of `role`, if there is one of another.
fn is_of_other(dir: &Path, wanted: Role) -> Option<KeysError> {
    let is = Role::BOTH.into_iter().find(|is| dir.join(&is.files()[0]).exists())?;
    Some(KeysError::OtherRole { dir: dir.to_owned(), is, wanted })
}

/// Loads and checks all but whether the identity itself was revoked.
fn read(dir: &Path, role: Role) -> Result<Identity, KeysError> {
    let [cert_path, key_path] = role.files().map(|file| dir.join(file));
    let (ca, ca_path) = (load_cert(&dir.join(CA))?, dir.join(CA));
    let authority_until = ends(&ca, &ca_path)?;
    let roots = roots(ca, &ca_path)?;
    let allowed = match role {
        Role::Node => Allowed::read(dir)?.map(Arc::new),
        Role::Client => None,
    };
    let trust = Trust { roots, revoked: Revoked::read(dir)?.map(Arc::new), allowed };
    let cert = load_cert(&cert_path).map_err(|error| match error {
        KeysError::Missing { .. } => is_of_other(dir, role).unwrap_or(error),
        error => error,
    })?;
    let key = load_key(&key_path)?;
    let checked =
        owns(&cert, &key).and_then(|()| check(&trust.roots, role, &cert, UnixTime::now()));
    match checked {
        Ok(bearer) => Ok(Identity { role, cert, key, bearer, trust, authority_until }),
        Err(Fault::Mismatch) => Err(KeysError::Mismatch { cert: cert_path, key: key_path }),
        Err(fault) => Err(fault.of_cert(cert_path, role)),
    }
}

/// What can be wrong with a certificate and its key.
enum Fault {
    Mismatch,
    Expired,
    WrongCa,
    WrongRole,
    Other(String),
}

impl Fault {
    fn other(error: impl ToString) -> Fault {
        Fault::Other(error.to_string())
    }

    /// The fault of the certificate at `path`.
    fn of_cert(self, path: PathBuf, role: Role) -> KeysError {
        match self {
            Fault::Expired => KeysError::Expired { path },
            Fault::WrongCa => KeysError::WrongCa { path },
            Fault::WrongRole => KeysError::WrongRole { path, role },
            Fault::Mismatch => invalid(path, "certificate", "its key is another"),
            Fault::Other(detail) => invalid(path, "certificate", detail),
        }
    }
}

/// Checks that a private key is that of a certificate.
fn owns(cert: &CertificateDer<'static>, key: &PrivateKeyDer<'static>) -> Result<(), Fault> {
    let signing = verify::provider().key_provider.load_private_key(key.clone_key());
    let signing = signing.map_err(Fault::other)?;
    let pair = rustls::sign::CertifiedKey::new(vec![cert.clone()], signing);
    pair.keys_match().map_err(|_| Fault::Mismatch)
}

/// Checks a certificate as a peer would at the time `at`, but for lists of who was revoked.
fn check(
    roots: &Arc<RootCertStore>,
    role: Role,
    cert: &CertificateDer<'_>,
    at: UnixTime,
) -> Result<Bearer, Fault> {
    let trust = Trust { roots: roots.clone(), revoked: None, allowed: None };
    let verified = match role {
        Role::Node => {
            let name = ServerName::try_from(NODE_NAME).map_err(Fault::other)?;
            let verifier = verify::server_verifier(&trust).map_err(Fault::other)?;
            verifier.verify_server_cert(cert, &[], &name, &[], at).map(drop)
        }
        Role::Client => {
            let verifier = verify::client_verifier(&trust).map_err(Fault::other)?;
            verifier.verify_client_cert(cert, &[], at).map(drop)
        }
    };
    verified.map_err(|error| match Verdict::of(&error) {
        Verdict::Expired => Fault::Expired,
        Verdict::WrongCa => Fault::WrongCa,
        Verdict::WrongRole => Fault::WrongRole,
        _ => Fault::other(error),
    })?;
    let bearer = Bearer::of(cert).map_err(Fault::other)?;
    // A node may connect, but is no client.
    if bearer.role.is_some_and(|own| own != role) { Err(Fault::WrongRole) } else { Ok(bearer) }
}

/// A name of keys that can be a directory's.
fn check_name(name: &str) -> Result<(), KeysError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let of_role = |role: Role| role.files().contains(&name.into()) || role.file_before() == name;
    let is_file =
        [CA, CA_KEY, REVOKED, ALLOWED].contains(&name) || Role::BOTH.into_iter().any(of_role);
    let is_good = !name.is_empty()
        && name.len() <= NAME_MAX
        && !name.starts_with('.')
        && name.chars().all(plain);
    if is_good && !is_file { Ok(()) } else { Err(KeysError::Name(name.to_owned())) }
}

fn invalid(path: PathBuf, what: &'static str, detail: impl ToString) -> KeysError {
    KeysError::Invalid { path, what, detail: detail.to_string() }
}

fn roots(ca: CertificateDer<'static>, path: &Path) -> Result<Arc<RootCertStore>, KeysError> {
    let mut roots = RootCertStore::empty();
    roots.add(ca).map_err(|error| invalid(path.to_owned(), "certificate", error))?;
    Ok(Arc::new(roots))
}

/// Until when a certificate is good, in seconds from 1970.
fn ends(cert: &CertificateDer<'_>, path: &Path) -> Result<u64, KeysError> {
    let bearer = Bearer::of(cert);
    bearer.map(|b| b.until).map_err(|e| invalid(path.to_owned(), "certificate", e))
}

fn load_cert(path: &Path) -> Result<CertificateDer<'static>, KeysError> {
    CertificateDer::from_pem_slice(&files::read(path)?)
        .map_err(|error| invalid(path.to_owned(), "certificate", error))
}

/// The bearer of the certificate of `role` in `dir`, if there is one. It is not checked.
fn load_bearer(dir: &Path, role: Role) -> Result<Option<Bearer>, KeysError> {
    Ok(bearers_in(&dir.join(&role.files()[0]))?.into_iter().next())
}

/// The same with those of [`Role::file_before`], each once: a renewal that was killed has left the same in both files.
fn load_bearers(dir: &Path, role: Role) -> Result<Vec<Bearer>, KeysError> {
    let mut bearers = Vec::from_iter(load_bearer(dir, role)?);
    for bearer in bearers_in(&dir.join(role.file_before()))? {
        if !bearers.contains(&bearer) {
            bearers.push(bearer);
        }
    }
    Ok(bearers)
}

/// The bearers of all certificates in a file; none without it.
fn bearers_in(path: &Path) -> Result<Vec<Bearer>, KeysError> {
    let pem = match files::read(path) {
        Err(KeysError::Missing { .. }) => return Ok(Vec::new()),
        read => read?,
    };
    let bad = |detail: String| invalid(path.to_owned(), "certificate", detail);
    let bearer = |cert: Result<CertificateDer<'_>, pem::Error>| {
        Bearer::of(&cert.map_err(|e| bad(e.to_string()))?).map_err(|e| bad(e.to_string()))
    };
    let bearers: Vec<Bearer> =
        CertificateDer::pem_slice_iter(&pem).map(bearer).collect::<Result<_, _>>()?;
    if bearers.is_empty() { Err(bad("it holds none".into())) } else { Ok(bearers) }
}

fn load_key(path: &Path) -> Result<PrivateKeyDer<'static>, KeysError> {
    PrivateKeyDer::from_pem_slice(&files::read_private(path)?)
        .map_err(|error| invalid(path.to_owned(), "private key", error))
}
