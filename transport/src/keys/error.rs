//! What is wrong with keys, and what to do about it.

use std::io;
use std::path::PathBuf;

use super::{CA, NAME_MAX, Role};

/// Why keys cannot be made or used.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// A file is not there.
    #[error("{} does not exist: make keys by `gms keys init DIR`, or copy a directory made by `gms keys issue`", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// A directory with a key of the other kind.
    #[error(
        "{} holds the key of a {}, not of a {}: make one by `gms keys issue DIR {} NAME` where the authority's is",
        dir.display(), is.name(), wanted.name(), wanted.name()
    )]
    OtherRole {
        /// The directory.
        dir: PathBuf,
        /// Whose key it holds.
        is: Role,
        /// Whose is needed.
        wanted: Role,
    },
    /// A directory of which nothing can be renewed.
    #[error("{} holds no certificate: `gms keys list` with the authority's directory shows which there are", dir.display())]
    NoBearer {
        /// The directory.
        dir: PathBuf,
    },
    /// A file cannot be read.
    #[error("cannot read {}: {error}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// A file is longer than any that is read.
    #[error(
        "{} is longer than {max} bytes: if it is a list of who was revoked, take out who expired long ago",
        path.display()
    )]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The bound.
        max: u64,
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
    /// A file that would take the place of a link to another, which stays as it is.
    #[error("{} is a symbolic link: give the directory that holds the file itself", path.display())]
    Link {
        /// The link.
        path: PathBuf,
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
    #[error("{} has expired or is not valid yet: check the clock, or renew it by `gms keys renew` where it was issued", path.display())]
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
    /// The certificate, or the id in it, was revoked.
    #[error("{} was revoked: issue another one by `gms keys issue`, under another name", path.display())]
    Revoked {
        /// The certificate.
        path: PathBuf,
    },
    /// A line of a list of who was revoked is something else.
    #[error(
        "{}, line {line}: an id (32 hexadecimal digits), a fingerprint (64), or nothing may stand before a `#`",
        path.display()
    )]
    BadLine {
        /// The list.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
    },
    /// A list of who was revoked is not as `gms keys revoke` has written it.
    #[error(
        "{} is not whole: copy it again, or, if it was changed by hand and is right, take out its first line",
        path.display()
    )]
    PartOfList {
        /// The list.
        path: PathBuf,
    },
    /// A list of who was revoked was there before.
    #[error("{} is gone or empty: bring it back, or leave a comment in it to revoke nobody", path.display())]
    ListGone {
        /// The list.
        path: PathBuf,
    },
    /// A line of a list of who may use an agent is something else.
    #[error("{}, line {line}: {detail}", path.display())]
    BadAllowance {
        /// The list.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What should be there.
        detail: &'static str,
    },
    /// A list of who may use an agent lets nobody in.
    #[error(
        "{} names nobody: write the ids of clients in it, or `*` for all of the authority, or remove it before the agent starts",
        path.display()
    )]
    AllowsNobody {
        /// The list.
        path: PathBuf,
    },
    /// A list of who may use an agent was there before.
    #[error("{} is gone: bring it back, or write `*` in it to let in every client of the authority", path.display())]
    AllowedGone {
        /// The list.
        path: PathBuf,
    },
    /// Nobody is known by that name.
    #[error(
        "`{name}` is no id, and {} holds no certificate: give a name, id or fingerprint that `gms keys list` shows",
        path.display()
    )]
    Unknown {
        /// What was given.
        name: String,
        /// Where its certificate would be.
        path: PathBuf,
    },
    /// Another command changes the directory.
    #[error("another `gms keys` changes {}: try again when it has ended", path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// More directories than are looked at.
    #[error("{} has more than {max} entries: no directory of keys is so large", path.display())]
    Crowded {
        /// The directory.
        path: PathBuf,
        /// The bound.
        max: usize,
    },
    /// The name cannot be a directory's.
    #[error(
        "`{0}` cannot be a key's name: use 1 to {NAME_MAX} letters, digits, `-`, `_` or `.`, not first a `.`, and nothing that reads as an id"
    )]
    Name(String),
    /// The library which makes keys failed.
    #[error("cannot make a key: {0}")]
    Generate(#[from] rcgen::Error),
}
