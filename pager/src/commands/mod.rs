//! The commands of `gms`, one file each.

mod attach;
mod detach;
mod doctor;
mod keys;
mod members;
mod pages;
mod progress;
mod run;
mod status;
mod summary;
mod top;
mod upgrade;

use crate::cli::{Action, Cli};
use crate::config::ConfigError;
use crate::control::ControlError;
use crate::exit::{EXIT_GMS, EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, EXIT_USAGE};
use crate::launch::LaunchError;
use crate::session::SessionError;

/// Why a command failed: what to print after `gms: `, and the exit status.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// One line that says what to do.
    pub message: String,
    /// The exit status.
    pub status: u8,
}

impl Failure {
    /// A failure with this message.
    pub fn new(status: u8, error: impl ToString) -> Failure {
        Failure { message: error.to_string(), status }
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Failure {
        Failure::new(EXIT_USAGE, error)
    }
}

impl From<ControlError> for Failure {
    fn from(error: ControlError) -> Failure {
        Failure::new(EXIT_GMS, error)
    }
}

impl From<SessionError> for Failure {
    fn from(error: SessionError) -> Failure {
        Failure::new(EXIT_GMS, error)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Failure {
        Failure::new(EXIT_GMS, error)
    }
}

impl From<LaunchError> for Failure {
    fn from(error: LaunchError) -> Failure {
        let status = match error {
            LaunchError::NotFound(_) => EXIT_NOT_FOUND,
            LaunchError::NotExecutable { .. } => EXIT_NOT_EXECUTABLE,
            _ => EXIT_GMS,
        };
        Failure::new(status, error)
    }
}

/// Does what the command line asks; returns the exit status.
pub fn dispatch(cli: Cli) -> Result<u8, Failure> {
    match cli.action {
        Action::Run(args) => run::run(args),
        Action::Attach(args) => attach::attach(args),
        Action::Detach { pid } => detach::detach(pid),
        Action::Status { pid, json } => status::status(pid, json),
        Action::Upgrade { pid, binary } => upgrade::upgrade(pid, binary),
        Action::Adopt(args) => upgrade::adopt(&args),
        Action::Top => top::top(),
        Action::Doctor(args) => doctor::doctor(&args),
        Action::Members(args) => members::members(&args),
        Action::Keys(action) => keys::keys(&action),
        Action::Completion { shell } => pages::completion(shell),
        Action::Man { dir } => pages::man(&dir),
    }
}

/// Writes to standard output. A reader that left early (`| head`) is no failure.
pub fn print(text: &[u8]) -> Result<(), Failure> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    match out.write_all(text).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::new(EXIT_GMS, format!("cannot write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn failures_have_their_exit_status() {
        let reason = || io::Error::from_raw_os_error(libc::EACCES);
        let status = |error: LaunchError| Failure::from(error).status;
        assert_eq!(status(LaunchError::NotFound("x".into())), 127);
        assert_eq!(
            status(LaunchError::NotExecutable { command: "x".into(), reason: reason() }),
            126
        );
        assert_eq!(status(LaunchError::System(reason())), 125);
        assert_eq!(status(SessionError::Fatal("x".into()).into()), 125);
        assert_eq!(Failure::from(ConfigError::Options("x".into())).status, 2);
    }
}
