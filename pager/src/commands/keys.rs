//! `gms keys`.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use gms_transport::PeerId;
use gms_transport::keys::{self, KeysError, Listed, Listing, Renewed, Revocation, Role, State};
use gms_transport::text::printable;

use super::{Failure, print};
use crate::cli::KeysAction;
use crate::cli::values::KeyRole;
use crate::exit::EXIT_GMS;
use crate::speech::say;

/// Most characters of a name that are shown: all of one that gms has made.
const NAME_CHARS_MAX: usize = 64;

/// Makes, revokes or shows keys, and says what to do next.
pub(super) fn keys(action: &KeysAction) -> Result<u8, Failure> {
    let failed = |error: KeysError| Failure::new(EXIT_GMS, error);
    match action {
        KeysAction::Init { dir } => {
            keys::init(dir).map_err(failed)?;
            let dir = dir.display();
            say(format!(
                "made keys in {dir}: 'gms-agent --keys {dir}' and 'gms run --keys {dir}' accept it as it is"
            ));
        }
        KeysAction::Issue { dir, role, name, days } => {
            let role = match role {
                KeyRole::Node => Role::Node,
                KeyRole::Client => Role::Client,
            };
            let made = keys::issue_for(dir, role, name, lifetime(*days)).map_err(failed)?;
            say(format!(
                "made {}: copy it to the machine that needs it{}",
                made.display(),
                list(dir)
            ));
        }
        KeysAction::Renew { dir, name, days } => {
            for renewed in keys::renew_for(dir, name.as_deref(), lifetime(*days)).map_err(failed)? {
                tell_renewed(dir, &renewed);
            }
        }
        KeysAction::Revoke { dir, who } => {
            tell_revoked(who, &keys::revoke(dir, who).map_err(failed)?);
        }
        KeysAction::List { dir } => {
            let Listing { certificates, faults } = keys::list(dir).map_err(failed)?;
            print(table(&certificates).as_bytes())?;
            faults.iter().for_each(say);
            return Ok(if faults.is_empty() { 0 } else { EXIT_GMS });
        }
    }
    Ok(0)
}

/// Of a certificate, as `--days` says.
fn lifetime(days: Option<u32>) -> Duration {
    days.map_or(keys::LIFETIME, |days| Duration::from_secs(u64::from(days) * 86400))
}

/// What goes with new keys.
fn list(dir: &Path) -> String {
    let list = dir.join(keys::REVOKED);
    if list.exists() { format!(", and {} with it", list.display()) } else { String::new() }
}

fn tell_renewed(dir: &Path, renewed: &Renewed) {
    let Renewed { dir: target, role, id, kept_id, before } = renewed;
    let kept = if *kept_id { "as it was" } else { "which it did not have before" };
    say(format!(
        "renewed the {} key in {}, with the id {id}, {kept}: copy it to its machine{}; the certificate before, {before}, \
         is good until it expires, unless it is revoked",
        role.name(),
        target.display(),
        list(dir)
    ));
}

fn tell_revoked(who: &str, Revocation { list, added }: &Revocation) {
    if added.is_empty() {
        return say(format!("{} names {who} already", list.display()));
    }
    let added: Vec<String> = added.iter().map(PeerId::to_string).collect();
    say(format!(
        "revoked {} in {}: copy that file into the key directory of every agent, and send the agents SIGHUP; pagers \
         read theirs when they start",
        added.join(" and "),
        list.display()
    ));
}

fn table(listed: &[Listed]) -> String {
    let name = |listed: &Listed| {
        listed.name.as_deref().map_or("-".into(), |name| printable(name, NAME_CHARS_MAX))
    };
    let wide = listed.iter().map(|listed| name(listed).chars().count()).max().unwrap_or(0).max(4);
    let mut text =
        format!("{:wide$}  {:6}  {:10}  {:7}  {}\n", "NAME", "ROLE", "EXPIRES", "STATE", "ID");
    for listed in listed {
        let state = match listed.state {
            State::Good => "good",
            State::Ending => "ending",
            State::Expired => "expired",
            State::Revoked => "revoked",
        };
        let (role, expires) = (listed.role.name(), &listed.expires);
        let line =
            format!("{:wide$}  {role:6}  {expires:10}  {state:7}  {}", name(listed), listed.id);
        // Writing to memory does not fail.
        let _ = writeln!(text, "{line}");
    }
    text
}
