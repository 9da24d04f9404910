//! Who may use an agent, and how much of it: `allowed.txt` in the agent's key directory, a client a line.
//!
//! A line is an id as `gms keys list` shows it, or `*` for every client that no other line names, and the client's quota:
//! `ID [memory=SIZE|N%] [links=N] [requests=N] # comment`. A fingerprint is an error. Without the file every client of the
//! authority is let in. A file that names nobody is an error, and so is one whose last line does not end: it was cut when
//! it was copied.

use std::collections::BTreeMap;
use std::path::Path;

use gms_policy::Size;

use super::bearer::Bearer;
use super::files;
use super::revoked::LIST_MAX;
use super::{ALLOWED, KeysError};
use crate::PeerId;

/// Stands for every client that no line names.
const OTHERS: &[u8] = b"*";

/// What a client may hold at an agent, all its workloads together. `None`: no bound of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quota {
    /// Memory of its pages; a share is of the export.
    pub memory: Option<Size>,
    /// Links that are up.
    pub links: Option<u32>,
    /// Requests that have begun and not come whole.
    pub requests: Option<u32>,
}

/// A list of who may use an agent.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Allowed {
    named: BTreeMap<PeerId, Quota>,
    /// Of everybody else, if they are let in.
    others: Option<Quota>,
}

#[cfg(test)]
impl FromIterator<(PeerId, Quota)> for Allowed {
    fn from_iter<I: IntoIterator<Item = (PeerId, Quota)>>(named: I) -> Allowed {
        Allowed { named: named.into_iter().collect(), others: None }
    }
}

impl Allowed {
    /// Lets in the client with this id alone, without a quota.
    pub(super) fn only(id: PeerId) -> Allowed {
        Allowed { named: [(id, Quota::default())].into(), others: None }
    }

    /// The list of the key directory `dir`; `None` if it has none.
    pub(super) fn read(dir: &Path) -> Result<Option<Allowed>, KeysError> {
        match files::read_up_to(&dir.join(ALLOWED), LIST_MAX) {
            Ok(text) => parse(dir, &text).map(Some),
            Err(KeysError::Missing { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The quota of the client with this id; `None` if it is not let in.
    pub fn quota(&self, id: &PeerId) -> Option<Quota> {
        self.named.get(id).copied().or(self.others)
    }

    /// Whether the bearer of a certificate is let in.
    pub(crate) fn admits(&self, bearer: &Bearer) -> bool {
        self.quota(&bearer.id).is_some()
    }

    /// Lines that name a client; `*` does not count.
    pub(crate) fn len(&self) -> usize {
        self.named.len()
    }
}

fn parse(dir: &Path, text: &[u8]) -> Result<Allowed, KeysError> {
    let path = || dir.join(ALLOWED);
    let mut allowed = Allowed::default();
    for (index, line) in text.split_inclusive(|&byte| byte == b'\n').enumerate() {
        let bad = |detail| KeysError::BadAllowance { path: path(), line: index + 1, detail };
        let whole =
            line.strip_suffix(b"\n").ok_or_else(|| bad("it does not end: copy it again"))?;
        let words = whole.split(|&byte| byte == b'#').next().unwrap_or_default();
        let mut words = words.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
        let Some(who) = words.next() else { continue };
        let quota = quota(words).map_err(bad)?;
        let before = match who {
            OTHERS => allowed.others.replace(quota),
            id => allowed.named.insert(client(id).map_err(bad)?, quota),
        };
        if before.is_some() {
            return Err(bad("it names again who is named above"));
        }
    }
    match (allowed.others, allowed.named.is_empty()) {
        (None, true) => Err(KeysError::AllowsNobody { path: path() }),
        _ => Ok(allowed),
    }
}

/// The client with this id. A fingerprint names none: it is of one certificate, which its client may renew, and may have others beside.
fn client(id: &[u8]) -> Result<PeerId, &'static str> {
    match str::from_utf8(id).ok().and_then(|id| id.parse().ok()) {
        Some(id @ PeerId::Issued(_)) => Ok(id),
        Some(PeerId::Certificate(_)) => Err(
            "a fingerprint names a certificate, not a client: write the client's id instead (`gms keys list`; `gms keys renew` gives one to who has none)",
        ),
        None => Err("an id (32 hexadecimal digits) or `*` comes first"),
    }
}

/// The quota that is written as `memory=SIZE`, `links=N` and `requests=N`, each once at most.
fn quota<'a>(words: impl Iterator<Item = &'a [u8]>) -> Result<Quota, &'static str> {
    const KNOWN: &str =
        "memory=SIZE or memory=N%, links=N and requests=N may follow, each once, none of them zero";
    let mut quota = Quota::default();
    for word in words {
        let (key, value) =
            str::from_utf8(word).ok().and_then(|word| word.split_once('=')).ok_or(KNOWN)?;
        let count = || value.parse().ok().filter(|&count: &u32| count > 0).ok_or(KNOWN);
        let is_again = match key {
            "memory" => quota.memory.replace(value.parse().map_err(|_| KNOWN)?).is_some(),
            "links" => quota.links.replace(count()?).is_some(),
            "requests" => quota.requests.replace(count()?).is_some(),
            _ => return Err(KNOWN),
        };
        if is_again {
            return Err(KNOWN);
        }
    }
    Ok(quota)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gms_policy::Bytes;

    const A: &str = "0123456789abcdef0123456789abcdef";
    const B: &str = "ffff456789abcdef0123456789abcdef";

    fn of(text: &str) -> Result<Allowed, String> {
        parse(Path::new("keys"), text.as_bytes()).map_err(|error| error.to_string())
    }

    fn id(text: &str) -> PeerId {
        text.parse().unwrap()
    }

    #[test]
    fn each_line_lets_a_client_in_with_its_quota() {
        let text = format!("# all\n{A} memory=25% links=8 requests=64 # desk1\r\n\n  {B}\n");
        let allowed = of(&text).unwrap();
        let quota = Quota { memory: Some(Size::Percent(25)), links: Some(8), requests: Some(64) };
        assert_eq!(allowed.quota(&id(A)), Some(quota));
        assert_eq!(allowed.quota(&id(B)), Some(Quota::default()));
        assert_eq!((allowed.quota(&PeerId::Issued([7; 16])), allowed.len()), (None, 2));
        let memory = Some(Size::Bytes(Bytes(1 << 30)));
        let others = of(&format!("* memory=1G\n{A}\n")).unwrap();
        assert_eq!(others.quota(&id(A)), Some(Quota::default()));
        assert_eq!(others.quota(&id(B)), Some(Quota { memory, ..Quota::default() }));
    }

    #[test]
    fn what_is_no_line_of_a_list_is_an_error_with_its_number() {
        for (line, says) in [
            ("desk1", "an id (32 hexadecimal digits) or `*`"),
            ("\u{e9}", "an id"),
            (&"ab".repeat(32), "a fingerprint names a certificate, not a client"),
            (&format!("{A} memory"), "memory=SIZE"),
            (&format!("{A} memory=0"), "memory=SIZE"),
            (&format!("{A} memory=101%"), "memory=SIZE"),
            (&format!("{A} links=0"), "links=N"),
            (&format!("{A} links=-1"), "links=N"),
            (&format!("{A} requests=4294967296"), "requests=N"),
            (&format!("{A} links=1 links=2"), "each once"),
            (&format!("{A} pages=1"), "memory=SIZE"),
            (B, "named above"),
        ] {
            let error = of(&format!("{B}\n{line}\n")).unwrap_err();
            assert!(error.starts_with("keys/allowed.txt, line 2: "), "{line}: {error}");
            assert!(error.contains(says), "{line}: {error}");
        }
    }

    #[test]
    fn a_list_that_was_cut_or_names_nobody_lets_nobody_in() {
        let whole = format!("{A} memory=25G\n{B}\n");
        for cut in 0..whole.len() {
            // At the end of a line it cannot be seen, and lets in fewer.
            let is_seen = of(&whole[..cut]).is_err();
            assert_eq!(is_seen, cut == 0 || !whole[..cut].ends_with('\n'), "{:?}", &whole[..cut]);
        }
        for nobody in ["", "\n", "# nobody\n"] {
            assert!(of(nobody).unwrap_err().contains("names nobody"), "{nobody:?}");
        }
    }
}
