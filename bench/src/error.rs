//! Why a benchmark could not be carried out.

use std::io;

/// See the module's documentation.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    /// The system refused something.
    #[error("{what}: {error}")]
    System {
        /// What was tried.
        what: String,
        /// What the system says.
        error: io::Error,
    },
    /// A program did not do what it should.
    #[error("{program} {problem}")]
    Program {
        /// Its name.
        program: String,
        /// What went wrong.
        problem: String,
    },
    /// A page or a reply had other bytes than it should.
    #[error("wrong bytes: {0}")]
    WrongBytes(String),
    /// A file is not what it should be.
    #[error("{file} is not a report which gms-bench wrote by --json: {problem}")]
    NoReport {
        /// Its path.
        file: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The machine is not prepared.
    #[error("this cannot be measured here: {0}")]
    Needs(String),
    /// The figures cannot be trusted.
    #[error("the measurement is not valid: {0}")]
    Invalid(String),
    /// gms died, or was not done in time, or the rest could not be measured.
    #[error("not all was measured: {0}")]
    Failed(String),
    /// The figures of this run cannot be trusted, as other work or the kernel disturbed it.
    #[error("refused: {0}")]
    Refused(String),
}

/// Says what was tried when the system refused it.
pub(crate) trait Trying<T> {
    /// `what` was tried.
    fn trying(self, what: &str) -> Result<T, BenchError>;
}

impl<T, E: Into<io::Error>> Trying<T> for Result<T, E> {
    fn trying(self, what: &str) -> Result<T, BenchError> {
        self.map_err(|error| BenchError::System { what: what.into(), error: error.into() })
    }
}
