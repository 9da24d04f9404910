//! Who was issued what, as far as the directory of the authority still tells.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::time::SystemTime;

use super::bearer::Bearer;
use super::expiry::{day, is_near};
use super::revoked::Revoked;
use super::{CA, KeysError, Role, files, load_bearers};
use crate::{Fingerprint, PeerId};

/// Most entries of a directory that are looked at.
const ENTRIES_MAX: usize = 65_536;

/// A certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Under which it was issued; `None` for those that `gms keys init` made.
    pub name: Option<String>,
    /// What it is good for.
    pub role: Role,
    /// Whose it is.
    pub id: PeerId,
    /// Of the certificate.
    pub fingerprint: Fingerprint,
    /// Day on which it expires, in UTC: 2028-11-22.
    pub expires: String,
    /// Whether it is good.
    pub state: State,
}

/// Whether a certificate is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It is.
    Good,
    /// It is, but ends within [`NOTICE`](super::NOTICE).
    Ending,
    /// It has expired: `gms keys renew` makes another.
    Expired,
    /// The directory's list names it, or its holder.
    Revoked,
}

/// What [`list`] has found.
#[derive(Debug)]
pub struct Listing {
    /// By their names.
    pub certificates: Vec<Listed>,
    /// Why others could not be read.
    pub faults: Vec<KeysError>,
}

/// The certificates in `dir` and in its directories.
pub fn list(dir: &Path) -> Result<Listing, KeysError> {
    files::read(&dir.join(CA))?;
    let revoked = Revoked::read(dir)?.unwrap_or_default();
    let now = SystemTime::now();
    let (mut certificates, mut faults) = (Vec::new(), Vec::new());
    for name in std::iter::once(None).chain(directories(dir)?.into_iter().map(Some)) {
        let target = name.as_ref().map_or(dir.to_owned(), |name| dir.join(name));
        for role in Role::BOTH {
            let listed = |bearer: Bearer| Listed {
                name: name.as_ref().map(|name| name.to_string_lossy().into_owned()),
                role,
                id: bearer.id,
                fingerprint: bearer.fingerprint,
                expires: day(bearer.until),
                state: match revoked.names(&bearer) {
                    true => State::Revoked,
                    false => match is_near(bearer.until, now) {
                        Some(0) => State::Expired,
                        Some(_) => State::Ending,
                        None => State::Good,
                    },
                },
            };
            match load_bearers(&target, role) {
                Ok(bearers) => certificates.extend(bearers.into_iter().map(listed)),
                Err(fault) => faults.push(fault),
            }
        }
    }
    Ok(Listing { certificates, faults })
}

fn directories(dir: &Path) -> Result<Vec<OsString>, KeysError> {
    let read = || -> std::io::Result<Option<Vec<OsString>>> {
        let mut names = Vec::new();
        for (count, entry) in fs::read_dir(dir)?.enumerate() {
            if count == ENTRIES_MAX {
                return Ok(None);
            }
            let entry = entry?;
            if entry.path().is_dir() {
                names.push(entry.file_name());
            }
        }
        names.sort();
        Ok(Some(names))
    };
    let path = || dir.to_owned();
    let names = read().map_err(|error| KeysError::Unreadable { path: path(), error })?;
    names.ok_or_else(|| KeysError::Crowded { path: path(), max: ENTRIES_MAX })
}
