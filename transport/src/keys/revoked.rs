//! Who was revoked: a list in the key directory, of ids and of fingerprints of certificates, one a line.
//!
//! An id revokes every certificate that has it, also those yet to come; a fingerprint that one certificate. Whoever
//! holds a list refuses those whom it names, and nobody else knows of it: it goes to each key directory by hand. On its
//! way it may be cut, so the first line of a list that [`revoke`] has written holds the digest of all others.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::bearer::{Bearer, fingerprint};
use super::files::{self, File, Lock};
use super::{CA, KeysError, REVOKED, Role, check_name, load_bearers};
use crate::PeerId;

/// Most bytes of a list: some ten thousand lines with a comment each.
pub(super) const LIST_MAX: u64 = 1 << 20;
/// Begins a list that [`revoke`] has written. The SHA-256 of all lines below follows, in hexadecimal digits.
const SEAL: &[u8] = b"# SHA-256 of all lines below: ";

/// A list of who was revoked.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Revoked(BTreeSet<PeerId>);

impl FromIterator<PeerId> for Revoked {
    fn from_iter<I: IntoIterator<Item = PeerId>>(ids: I) -> Revoked {
        Revoked(ids.into_iter().collect())
    }
}

impl Revoked {
    /// The list of the key directory `dir`; `None` if it has none, or an empty one.
    pub(super) fn read(dir: &Path) -> Result<Option<Revoked>, KeysError> {
        text(dir)?.map(|text| parse(dir, &text)).transpose()
    }

    /// How many lines name somebody.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whom it names.
    pub(super) fn ids(&self) -> impl Iterator<Item = PeerId> + '_ {
        self.0.iter().copied()
    }

    /// Whether it names who has this id.
    pub(crate) fn names_id(&self, id: PeerId) -> bool {
        self.0.contains(&id)
    }

    /// Whether it names the bearer, or this certificate.
    pub(crate) fn names(&self, bearer: &Bearer) -> bool {
        self.names_id(bearer.id) || self.names_id(PeerId::Certificate(bearer.fingerprint))
    }
}

/// The bytes of the list, none of which may be left out.
fn text(dir: &Path) -> Result<Option<Vec<u8>>, KeysError> {
    let path = dir.join(REVOKED);
    match files::read_up_to(&path, LIST_MAX) {
        Ok(text) => Ok(Some(text).filter(|text| !text.is_empty())),
        Err(KeysError::Missing { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The lines of a list without the first, if that is a seal, which must fit.
fn unseal<'a>(dir: &Path, text: &'a [u8]) -> Result<&'a [u8], KeysError> {
    let damaged = || KeysError::PartOfList { path: dir.join(REVOKED) };
    let Some(sealed) = text.strip_prefix(SEAL) else {
        let is_cut = !text.is_empty() && SEAL.starts_with(text);
        return if is_cut { Err(damaged()) } else { Ok(text) };
    };
    let end = sealed.iter().position(|&byte| byte == b'\n').ok_or_else(damaged)?;
    let (seal, lines) = (&sealed[..end], &sealed[end + 1..]);
    if seal == fingerprint(lines).to_string().as_bytes() { Ok(lines) } else { Err(damaged()) }
}

fn parse(dir: &Path, text: &[u8]) -> Result<Revoked, KeysError> {
    unseal(dir, text)?;
    let mut ids = BTreeSet::new();
    for (index, line) in text.split(|&byte| byte == b'\n').enumerate() {
        let line = line.split(|&byte| byte == b'#').next().unwrap_or_default().trim_ascii();
        if line.is_empty() {
            continue;
        }
        let id = str::from_utf8(line).ok().and_then(|line| line.parse().ok());
        let bad = || KeysError::BadLine { path: dir.join(REVOKED), line: index + 1 };
        ids.insert(id.ok_or_else(bad)?);
    }
    Ok(Revoked(ids))
}

/// What [`revoke`] has done.
#[derive(Debug, PartialEq, Eq)]
pub struct Revocation {
    /// The list.
    pub list: PathBuf,
    /// Whom it names now and did not before.
    pub added: Vec<PeerId>,
}

/// Adds `who` to the list of the key directory `dir`: an id, a fingerprint, or the name of keys that were issued there.
/// The list is replaced as a whole, so that nobody reads half of it.
pub fn revoke(dir: &Path, who: &str) -> Result<Revocation, KeysError> {
    // A directory that is none of keys is a slip of the hand.
    files::read(&dir.join(CA))?;
    let _lock = Lock::of(dir)?;
    let named = named(dir, who)?;
    let text = text(dir)?.unwrap_or_default();
    let known = parse(dir, &text)?;
    let mut lines = unseal(dir, &text)?.to_vec();
    let new = |(id, _): &(PeerId, String)| !known.0.contains(id);
    let named: Vec<(PeerId, String)> = named.into_iter().filter(new).collect();
    for (id, comment) in &named {
        if !lines.is_empty() && !lines.ends_with(b"\n") {
            lines.push(b'\n');
        }
        lines.extend_from_slice(format!("{id}{comment}\n").as_bytes());
    }
    let list = dir.join(REVOKED);
    let seal = fingerprint(&lines).to_string();
    let text = [SEAL, seal.as_bytes(), b"\n", &lines].concat();
    if text.len() as u64 > LIST_MAX {
        return Err(KeysError::TooLong { path: list, max: LIST_MAX });
    }
    if !named.is_empty() {
        files::replace(&[File::public(list.clone(), text)])?;
    }
    Ok(Revocation { list, added: named.into_iter().map(|(id, _)| id).collect() })
}

/// Whom `who` means, and what the list is to say of them. A name may read as an id: keys were issued before there were ids.
fn named(dir: &Path, who: &str) -> Result<Vec<(PeerId, String)>, KeysError> {
    check_name(who)?;
    let mut found = Vec::new();
    for role in Role::BOTH {
        let comment = format!(" # {} {who}", role.name());
        let bearers = load_bearers(&dir.join(who), role)?;
        found.extend(bearers.into_iter().map(|bearer| (bearer.id, comment.clone())));
    }
    match who.parse() {
        _ if !found.is_empty() => Ok(found),
        Ok(id) => Ok(vec![(id, String::new())]),
        Err(_) => Err(KeysError::Unknown { name: who.to_owned(), path: dir.join(who) }),
    }
}
