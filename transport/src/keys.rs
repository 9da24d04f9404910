//! A cluster's keys: its authority, and the certificates of agents (nodes) and pagers (clients).
//!
//! A key directory holds `ca.pem` and, by role, `node.pem` + `node-key.pem` or `client.pem` + `client-key.pem`.
//! [`init`] makes one with everything, including `ca-key.pem`, which alone can issue more and needs to be on one
//! machine only. [`issue`] makes a directory of its own (`DIR/NAME/`, same file names, without `ca-key.pem`) to be
//! copied to another machine. A node certificate is good for serving only and a client certificate for connecting
//! only, so that a pager's key which leaks cannot pose as an agent.

use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use crate::Fingerprint;
use crate::quic::tls::{self, Verdict};

/// Name in every node certificate: agents are known by their cluster's authority, not by their address.
pub const NODE_NAME: &str = "agent.gms";
/// How long an authority is valid.
pub const CA_LIFETIME: Duration = Duration::from_secs(10 * 365 * 86400);
/// How long an issued certificate is valid.
pub const LIFETIME: Duration = Duration::from_secs(2 * 365 * 86400);
/// Certificates begin this long ago, for clocks that are behind.
const CLOCK_SKEW: Duration = Duration::from_secs(3600);
/// Most characters in the name of an issued directory.
const NAME_MAX: usize = 64;
/// Most bytes of a key file.
const FILE_MAX: u64 = 64 * 1024;

const CA: &str = "ca.pem";
const CA_KEY: &str = "ca-key.pem";

/// What a certificate is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Serving pages: `gms-agent`.
    Node,
    /// Connecting to agents: `gms`.
    Client,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Role::Node => "node",
            Role::Client => "client",
        }
    }

    fn files(self) -> [String; 2] {
        [format!("{}.pem", self.name()), format!("{}-key.pem", self.name())]
    }
}

/// Why keys cannot be made or used.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// A file is not there.
    #[error("{} does not exist: make keys by `gms keys init DIR`, or copy a directory made by `gms keys issue`", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// A file cannot be read.
    #[error("cannot read {}: {error}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// A private key which others than its owner may read.
    #[error(
        "{} can be read by others (mode {mode:04o}): chmod 600 it, or give it to root and chmod 640",
        path.display()
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// A file cannot be written.
    #[error("cannot write {}: {error}", path.display())]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// A file is there already.
    #[error("{} exists already and is not overwritten: choose another directory or name", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// A file holds something else.
    #[error("{} holds no valid PEM {what}: {detail}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        what: &'static str,
        /// What is wrong.
        detail: String,
    },
    /// The private key belongs to another certificate.
    #[error("{} and {} do not belong together: copy both from the same directory", cert.display(), key.display())]
    Mismatch {
        /// The certificate.
        cert: PathBuf,
        /// The key.
        key: PathBuf,
    },
    /// The certificate has expired or is not valid yet.
    #[error("{} has expired or is not valid yet: check the clock, or issue a new one by `gms keys issue`", path.display())]
    Expired {
        /// The certificate.
        path: PathBuf,
    },
    /// The certificate is of another authority.
    #[error("{} was not issued by the {CA} beside it: copy both from the same directory", path.display())]
    WrongCa {
        /// The certificate.
        path: PathBuf,
    },
    /// The certificate is of the other role.
    #[error("{} is no {} certificate", path.display(), role.name())]
    WrongRole {
        /// The certificate.
        path: PathBuf,
        /// The role it should have.
        role: Role,
    },
    /// The name cannot be a directory's.
    #[error(
        "`{0}` cannot be a key's name: use 1 to {NAME_MAX} letters, digits, `-`, `_` or `.`, not first a `.`"
    )]
    Name(String),
    /// The library which makes keys failed.
    #[error("cannot make a key: {0}")]
    Generate(#[from] rcgen::Error),
}

/// A checked certificate with its private key and the authority that peers are checked against.
pub struct Identity {
    pub(crate) role: Role,
    pub(crate) cert: CertificateDer<'static>,
    pub(crate) key: PrivateKeyDer<'static>,
    pub(crate) roots: Arc<RootCertStore>,
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        let Self { role, cert, key, roots } = self;
        Self { role: *role, cert: cert.clone(), key: key.clone_key(), roots: roots.clone() }
    }
}

impl Identity {
    /// What the certificate is good for.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Until when peers accept the certificate.
    pub fn expires(&self) -> SystemTime {
        // Zero for one that cannot be read; `load` has read it.
        let seconds = X509Certificate::from_der(&self.cert)
            .map_or(0, |(_, cert)| cert.validity().not_after.timestamp());
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds.try_into().unwrap_or(0))
    }

    /// By what peers know it.
    pub fn fingerprint(&self) -> Fingerprint {
        tls::fingerprint(&self.cert)
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {}", self.role, self.fingerprint())
    }
}

/// Makes a new authority with a first node and a first client key in `dir`, which is created if need be.
pub fn init(dir: &Path) -> Result<(), KeysError> {
    let authority = Authority::generate()?;
    let mut files = vec![
        (dir.join(CA), authority.pem.clone(), false),
        (dir.join(CA_KEY), authority.issuer.key().serialize_pem(), true),
    ];
    for role in [Role::Node, Role::Client] {
        files.extend(authority.issue(role, valid_for(LIFETIME))?.files(dir, role));
    }
    write_new(dir, &files)
}

/// Issues a key of `role` by the authority in `dir` into the new directory `dir/name`, whose path it returns.
/// Called for both roles with one name, it completes the directory.
pub fn issue(dir: &Path, role: Role, name: &str) -> Result<PathBuf, KeysError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > NAME_MAX || name.starts_with('.') || !name.chars().all(plain)
    {
        return Err(KeysError::Name(name.to_owned()));
    }
    let authority = Authority::load(dir)?;
    let target = dir.join(name);
    let mut files: Vec<_> = authority.issue(role, valid_for(LIFETIME))?.files(&target, role).into();
    match read(&target.join(CA)) {
        Ok(pem) if pem == authority.pem.as_bytes() => {}
        Ok(_) => return Err(KeysError::Exists { path: target.join(CA) }),
        Err(_) => files.push((target.join(CA), authority.pem, false)),
    }
    write_new(&target, &files)?;
    Ok(target)
}

/// Loads the key of `role` from `dir` and checks it: what this accepts, peers of the same authority accept.
pub fn load(dir: &Path, role: Role) -> Result<Identity, KeysError> {
    let [cert_path, key_path] = role.files().map(|file| dir.join(file));
    let roots = roots(load_cert(&dir.join(CA))?, &dir.join(CA))?;
    let (cert, key) = (load_cert(&cert_path)?, load_key(&key_path)?);
    let identity = Identity { role, cert, key, roots };
    identity.check().map_err(|fault| match fault {
        Fault::Mismatch => KeysError::Mismatch { cert: cert_path, key: key_path },
        Fault::Expired => KeysError::Expired { path: cert_path },
        Fault::WrongCa => KeysError::WrongCa { path: cert_path },
        Fault::WrongRole => KeysError::WrongRole { path: cert_path, role },
        Fault::Other(detail) => KeysError::Invalid { path: cert_path, what: "certificate", detail },
    })?;
    Ok(identity)
}

/// Makes a throw-away authority in memory with one node and one client key, for an agent embedded in a pager.
pub fn ephemeral() -> Result<(Identity, Identity), KeysError> {
    let authority = Authority::generate()?;
    let make = |role| authority.identity(role, valid_for(LIFETIME));
    Ok((make(Role::Node)?, make(Role::Client)?))
}

/// What can be wrong with an identity.
enum Fault {
    Mismatch,
    Expired,
    WrongCa,
    WrongRole,
    Other(String),
}

impl Identity {
    /// Checks the certificate as a peer will, and that the key is its own.
    fn check(&self) -> Result<(), Fault> {
        let other = |error: &dyn ToString| Fault::Other(error.to_string());
        let signing = tls::provider().key_provider.load_private_key(self.key.clone_key());
        let signing = signing.map_err(|e| other(&e))?;
        let pair = rustls::sign::CertifiedKey::new(vec![self.cert.clone()], signing);
        pair.keys_match().map_err(|_| Fault::Mismatch)?;
        let verified = match self.role {
            Role::Node => {
                let name = ServerName::try_from(NODE_NAME).map_err(|e| other(&e))?;
                tls::server_verifier(self)
                    .map_err(|e| other(&e))?
                    .verify_server_cert(&self.cert, &[], &name, &[], UnixTime::now())
                    .map(drop)
            }
            Role::Client => tls::client_verifier(self)
                .map_err(|e| other(&e))?
                .verify_client_cert(&self.cert, &[], UnixTime::now())
                .map(drop),
        };
        verified.map_err(|error| match Verdict::of(&error) {
            Verdict::Expired => Fault::Expired,
            Verdict::WrongCa => Fault::WrongCa,
            Verdict::WrongRole => Fault::WrongRole,
            _ => Fault::Other(error.to_string()),
        })
    }
}

/// Files to be written: path, content, private.
type Files<const N: usize> = [(PathBuf, String, bool); N];

/// A certificate and its key in PEM.
struct Issued {
    cert: rcgen::Certificate,
    key: KeyPair,
}

impl Issued {
    fn files(&self, dir: &Path, role: Role) -> Files<2> {
        let [cert, key] = role.files().map(|file| dir.join(file));
        [(cert, self.cert.pem(), false), (key, self.key.serialize_pem(), true)]
    }
}

/// An authority that can issue.
pub(crate) struct Authority {
    pem: String,
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

    fn load(dir: &Path) -> Result<Self, KeysError> {
        let (cert_path, key_path) = (dir.join(CA), dir.join(CA_KEY));
        let invalid = |path: &Path, what, error: &dyn ToString| KeysError::Invalid {
            path: path.to_owned(),
            what,
            detail: error.to_string(),
        };
        let pem = String::from_utf8(read(&cert_path)?)
            .map_err(|e| invalid(&cert_path, "certificate", &e))?;
        let key = String::from_utf8(read_private(&key_path)?)
            .map_err(|e| invalid(&key_path, "private key", &e))?;
        let key = KeyPair::from_pem(&key).map_err(|e| invalid(&key_path, "private key", &e))?;
        let issuer = Issuer::from_ca_cert_pem(&pem, key)
            .map_err(|e| invalid(&cert_path, "certificate", &e))?;
        Ok(Self { pem, issuer })
    }

    fn issue(&self, role: Role, valid: [SystemTime; 2]) -> Result<Issued, KeysError> {
        let key = KeyPair::generate()?;
        let mut params = params(&format!("gms {}", role.name()), valid);
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        params.extended_key_usages = vec![match role {
            Role::Node => ExtendedKeyUsagePurpose::ServerAuth,
            Role::Client => ExtendedKeyUsagePurpose::ClientAuth,
        }];
        if role == Role::Node {
            params.subject_alt_names = vec![rcgen::SanType::DnsName(NODE_NAME.try_into()?)];
        }
        Ok(Issued { cert: params.signed_by(&key, &self.issuer)?, key })
    }

    pub(crate) fn identity(
        &self,
        role: Role,
        valid: [SystemTime; 2],
    ) -> Result<Identity, KeysError> {
        let Issued { cert, key } = self.issue(role, valid)?;
        let ca = CertificateDer::from_pem_slice(self.pem.as_bytes())
            .map_err(|_| rcgen::Error::CouldNotParseCertificate)?;
        let key = PrivateKeyDer::try_from(key.serialize_der())
            .map_err(|_| rcgen::Error::CouldNotParseKeyPair)?;
        Ok(Identity { role, cert: cert.der().clone(), key, roots: roots(ca, Path::new(CA))? })
    }
}

fn valid_for(lifetime: Duration) -> [SystemTime; 2] {
    let now = SystemTime::now();
    [now - CLOCK_SKEW, now + lifetime]
}

fn params(name: &str, [from, until]: [SystemTime; 2]) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = from.into();
    params.not_after = until.into();
    params
}

fn roots(ca: CertificateDer<'static>, path: &Path) -> Result<Arc<RootCertStore>, KeysError> {
    let mut roots = RootCertStore::empty();
    roots.add(ca).map_err(|error| KeysError::Invalid {
        path: path.to_owned(),
        what: "certificate",
        detail: error.to_string(),
    })?;
    Ok(Arc::new(roots))
}

fn load_cert(path: &Path) -> Result<CertificateDer<'static>, KeysError> {
    CertificateDer::from_pem_slice(&read(path)?).map_err(|error| KeysError::Invalid {
        path: path.to_owned(),
        what: "certificate",
        detail: error.to_string(),
    })
}

fn load_key(path: &Path) -> Result<PrivateKeyDer<'static>, KeysError> {
    PrivateKeyDer::from_pem_slice(&read_private(path)?).map_err(|error| KeysError::Invalid {
        path: path.to_owned(),
        what: "private key",
        detail: error.to_string(),
    })
}

fn read(path: &Path) -> Result<Vec<u8>, KeysError> {
    contents(path).map(|(bytes, _)| bytes)
}

/// Reads a private key, which must be its owner's alone; one of root may be shared with its group, so that a service
/// can be given a key which it cannot change.
fn read_private(path: &Path) -> Result<Vec<u8>, KeysError> {
    let (bytes, metadata) = contents(path)?;
    let mode = metadata.mode() & 0o777;
    let shared = if metadata.uid() == 0 { 0o037 } else { 0o077 };
    match mode & shared {
        0 => Ok(bytes),
        _ => Err(KeysError::Exposed { path: path.to_owned(), mode }),
    }
}

fn contents(path: &Path) -> Result<(Vec<u8>, fs::Metadata), KeysError> {
    let read = || {
        let (file, mut bytes) = (fs::File::open(path)?, Vec::new());
        let metadata = file.metadata()?;
        io::Read::read_to_end(&mut io::Read::take(file, FILE_MAX), &mut bytes)?;
        Ok((bytes, metadata))
    };
    read().map_err(|error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => KeysError::Missing { path: path.to_owned() },
        _ => KeysError::Unreadable { path: path.to_owned(), error },
    })
}

/// Writes all files, none of which may exist; private ones are for their owner only.
fn write_new(dir: &Path, files: &[(PathBuf, String, bool)]) -> Result<(), KeysError> {
    let failed = |path: &Path, error| KeysError::Unwritable { path: path.to_owned(), error };
    if let Some((path, ..)) = files.iter().find(|(path, ..)| path.symlink_metadata().is_ok()) {
        return Err(KeysError::Exists { path: path.clone() });
    }
    fs::create_dir_all(dir).map_err(|error| failed(dir, error))?;
    for (path, content, private) in files {
        let mode = if *private { 0o600 } else { 0o644 };
        fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(path)
            .and_then(|mut file| file.write_all(content.as_bytes()).and_then(|()| file.sync_all()))
            .map_err(|error| failed(path, error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// A directory of the test's own, removed with all that is in it.
    struct Dir(PathBuf);

    impl Dir {
        fn new() -> Self {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("gms-keys-{}-{number}", std::process::id());
            Self(std::env::temp_dir().join(name))
        }

        fn with_keys() -> Self {
            let dir = Self::new();
            init(&dir.0).unwrap();
            dir
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn what_init_makes_loads_and_private_keys_are_private() {
        let dir = Dir::with_keys();
        for role in [Role::Node, Role::Client] {
            assert_eq!(load(&dir.0, role).unwrap().role(), role);
        }
        for file in ["ca-key.pem", "node-key.pem", "client-key.pem"] {
            let mode = fs::metadata(dir.0.join(file)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{file}");
        }
    }

    #[test]
    fn a_private_key_that_others_can_read_is_refused() {
        let dir = Dir::with_keys();
        let set = |file: &str, mode| {
            fs::set_permissions(dir.0.join(file), fs::Permissions::from_mode(mode)).unwrap();
        };
        // Of root's keys its group may read; the tests may run as root, or not.
        let of_root = fs::metadata(&dir.0).unwrap().uid() == 0;
        for (mode, good) in
            [(0o600, true), (0o400, true), (0o640, of_root), (0o644, false), (0o660, false)]
        {
            set("node-key.pem", mode);
            let loaded = load(&dir.0, Role::Node);
            assert_eq!(loaded.is_ok(), good, "{mode:o}: {loaded:?}");
            if let Err(error) = loaded {
                assert!(
                    error.to_string().contains(&format!("(mode {mode:04o}): chmod 600")),
                    "{error}"
                );
            }
        }
        set("ca-key.pem", 0o644);
        assert!(matches!(issue(&dir.0, Role::Node, "x"), Err(KeysError::Exposed { .. })));
        set("ca.pem", 0o666);
        set("client.pem", 0o666);
        load(&dir.0, Role::Client).unwrap();
    }

    #[test]
    fn a_certificate_says_until_when_it_is_good() {
        let (node, _) = ephemeral().unwrap();
        let left = node.expires().duration_since(SystemTime::now()).unwrap();
        assert!(left <= LIFETIME && left > LIFETIME - Duration::from_secs(60), "{left:?}");
    }

    #[test]
    fn nothing_is_overwritten() {
        let dir = Dir::with_keys();
        let before = fs::read(dir.0.join("node-key.pem")).unwrap();
        fs::remove_file(dir.0.join(CA)).unwrap();
        assert!(matches!(init(&dir.0), Err(KeysError::Exists { .. })));
        assert_eq!(fs::read(dir.0.join("node-key.pem")).unwrap(), before);
        assert!(!dir.0.join(CA).exists(), "nothing was written beside it");
    }

    #[test]
    fn issued_directories_load_elsewhere_and_cannot_issue() {
        let dir = Dir::with_keys();
        let target = issue(&dir.0, Role::Node, "rack-1.b").unwrap();
        load(&target, Role::Node).unwrap();
        assert!(matches!(load(&target, Role::Client), Err(KeysError::Missing { .. })));
        assert!(matches!(issue(&target, Role::Node, "x"), Err(KeysError::Missing { .. })));
        issue(&dir.0, Role::Client, "rack-1.b").unwrap();
        load(&target, Role::Client).unwrap();
        let again = issue(&dir.0, Role::Node, "rack-1.b");
        assert!(matches!(again, Err(KeysError::Exists { .. })), "{again:?}");
        for name in ["", ".", "..", ".x", "a/b", "a b", &"x".repeat(65)] {
            assert!(matches!(issue(&dir.0, Role::Node, name), Err(KeysError::Name(_))), "{name}");
        }
    }

    #[test]
    fn each_fault_is_named_with_its_file() {
        let (dir, other) = (Dir::with_keys(), Dir::with_keys());
        let copy = |file: &str| fs::copy(other.0.join(file), dir.0.join(file)).unwrap();
        let fault = |role| load(&dir.0, role).unwrap_err();

        copy("node-key.pem");
        assert!(matches!(fault(Role::Node), KeysError::Mismatch { .. }));
        copy("node.pem");
        assert!(matches!(fault(Role::Node), KeysError::WrongCa { .. }));
        fs::copy(dir.0.join("client.pem"), dir.0.join("node.pem")).unwrap();
        fs::copy(dir.0.join("client-key.pem"), dir.0.join("node-key.pem")).unwrap();
        assert!(matches!(fault(Role::Node), KeysError::WrongRole { .. }), "{}", fault(Role::Node));
        fs::write(dir.0.join("client.pem"), "no certificate").unwrap();
        let text = fault(Role::Client).to_string();
        assert!(text.contains("client.pem holds no valid PEM certificate"), "{text}");
        fs::remove_file(dir.0.join("client-key.pem")).unwrap();
        fs::remove_file(dir.0.join("client.pem")).unwrap();
        let text = fault(Role::Client).to_string();
        assert!(text.contains("client.pem does not exist") && text.contains("gms keys"), "{text}");
        assert!(matches!(load(&dir.0.join("none"), Role::Node), Err(KeysError::Missing { .. })));
    }

    #[test]
    fn an_expired_certificate_is_refused_at_once() {
        let dir = Dir::with_keys();
        let authority = Authority::load(&dir.0).unwrap();
        let now = SystemTime::now();
        let over = [now - 3 * CLOCK_SKEW, now - CLOCK_SKEW];
        let target = dir.0.join("old");
        let mut files =
            Vec::from(authority.issue(Role::Node, over).unwrap().files(&target, Role::Node));
        files.push((target.join(CA), authority.pem.clone(), false));
        write_new(&target, &files).unwrap();
        assert!(matches!(load(&target, Role::Node), Err(KeysError::Expired { .. })));
    }
}
