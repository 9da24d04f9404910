//! `gms keys`.

use gms_transport::keys::{self, KeysError, Role};

use super::{EXIT_GMS, Failure, say};
use crate::cli::{KeyRole, KeysAction};

/// Makes keys and says what to do with them.
pub fn keys(action: &KeysAction) -> Result<u8, Failure> {
    make(action).map_err(|error| Failure::new(EXIT_GMS, error))
}

fn make(action: &KeysAction) -> Result<u8, KeysError> {
    match action {
        KeysAction::Init { dir } => {
            keys::init(dir)?;
            let dir = dir.display();
            say(format!(
                "made keys in {dir}: 'gms-agent --keys {dir}' and 'gms run --keys {dir}' accept it as it is"
            ));
        }
        KeysAction::Issue { dir, role, name } => {
            let role = match role {
                KeyRole::Node => Role::Node,
                KeyRole::Client => Role::Client,
            };
            let made = keys::issue(dir, role, name)?;
            say(format!("made {}: copy it to the machine that needs it", made.display()));
        }
    }
    Ok(0)
}
