//! `gms man` and `gms completion`.

use std::fs;
use std::path::Path;

use super::{Failure, print};
use crate::cli;
use crate::exit::EXIT_GMS;

/// Writes the man pages into `dir`.
pub(super) fn man(dir: &Path) -> Result<u8, Failure> {
    for (name, text) in cli::man_pages()? {
        let path = dir.join(name);
        let failed =
            |error| Failure::new(EXIT_GMS, format!("cannot write {}: {error}", path.display()));
        fs::write(&path, text).map_err(failed)?;
    }
    Ok(0)
}

/// Prints the completion script.
pub(super) fn completion(shell: clap_complete::Shell) -> Result<u8, Failure> {
    print(&cli::completion(shell))?;
    Ok(0)
}
