//! Who was revoked: a list in the key directory, of ids and of fingerprints of certificates, one a line.
//!
//! An id revokes every certificate that has it, also those yet to come; a fingerprint that one certificate. Whoever
//! holds a list refuses those whom it names, and nobody else knows of it: it goes to each key directory by hand.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::bearer::Bearer;
use super::files::{self, Lock};
use super::{CA, KeysError, REVOKED, Role, check_name, load_bearer};
use crate::PeerId;

/// Most bytes of a list: some ten thousand lines with a comment each.
pub(super) const LIST_MAX: u64 = 1 << 20;

/// A list of who was revoked.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Revoked(BTreeSet<PeerId>);

#[cfg(test)]
impl FromIterator<PeerId> for Revoked {
    fn from_iter<I: IntoIterator<Item = PeerId>>(ids: I) -> Revoked {
        Revoked(ids.into_iter().collect())
    }
}

impl Revoked {
    /// The list of the key directory `dir`; `None` if it has none.
    pub(super) fn read(dir: &Path) -> Result<Option<Revoked>, KeysError> {
        text(dir)?.map(|text| parse(dir, &text)).transpose()
    }

    /// How many lines name somebody.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it names who has this id.
    pub fn names_id(&self, id: PeerId) -> bool {
        self.0.contains(&id)
    }

    /// Whether it names the bearer, or this certificate.
    pub fn names(&self, bearer: &Bearer) -> bool {
        self.names_id(bearer.id) || self.names_id(PeerId::Certificate(bearer.fingerprint))
    }
}

/// The bytes of the list, none of which may be left out.
fn text(dir: &Path) -> Result<Option<Vec<u8>>, KeysError> {
    let path = dir.join(REVOKED);
    match files::read_up_to(&path, LIST_MAX + 1) {
        Ok(text) if text.len() as u64 > LIST_MAX => Err(KeysError::LongList { path }),
        Ok(text) => Ok(Some(text)),
        Err(KeysError::Missing { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

fn parse(dir: &Path, text: &[u8]) -> Result<Revoked, KeysError> {
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
    let mut text = text(dir)?.unwrap_or_default();
    let known = parse(dir, &text)?;
    let new = |(id, _): &(PeerId, String)| !known.0.contains(id);
    let named: Vec<(PeerId, String)> = named.into_iter().filter(new).collect();
    for (id, comment) in &named {
        if !text.is_empty() && !text.ends_with(b"\n") {
            text.push(b'\n');
        }
        text.extend_from_slice(format!("{id}{comment}\n").as_bytes());
    }
    let list = dir.join(REVOKED);
    if text.len() as u64 > LIST_MAX {
        return Err(KeysError::LongList { path: list });
    }
    if !named.is_empty() {
        files::replace(&[(list.clone(), &text, false)])?;
    }
    Ok(Revocation { list, added: named.into_iter().map(|(id, _)| id).collect() })
}

/// Whom `who` means, and what the list is to say of them.
fn named(dir: &Path, who: &str) -> Result<Vec<(PeerId, String)>, KeysError> {
    if let Ok(id) = who.parse() {
        return Ok(vec![(id, String::new())]);
    }
    check_name(who)?;
    let mut found = Vec::new();
    for role in Role::BOTH {
        if let Some(bearer) = load_bearer(&dir.join(who), role)? {
            found.push((bearer.id, format!(" # {} {who}", role.name())));
        }
    }
    match found.is_empty() {
        true => Err(KeysError::Unknown { name: who.to_owned(), path: dir.join(who) }),
        false => Ok(found),
    }
}
