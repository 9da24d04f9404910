//! `gms`: runs programs with more memory than the machine, or their budget, has.

use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use gms_pager::cli::{self, Cli, one_line};
use gms_pager::commands::dispatch;
use gms_pager::exit::EXIT_USAGE;
use gms_pager::launch::note_inheritance;
use gms_pager::speech::{self, say};

/// Runs before Rust's own start-up, which changes what the command would inherit.
#[used]
// SAFETY: the loader calls every function in this section once; this one makes system calls and sets an atomic.
#[unsafe(link_section = ".init_array")]
static NOTE_INHERITANCE: extern "C" fn() = note_inheritance;

fn main() -> ExitCode {
    gms_transport::heap::keep_freed();
    if cli::complete() {
        return ExitCode::SUCCESS;
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            match error.kind() {
                ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => drop(error.print()),
                _ => say(one_line(&error)),
            }
            return ExitCode::from(EXIT_USAGE);
        }
        Err(help) => {
            // A reader that left early is no failure.
            let _ = help.print();
            return ExitCode::SUCCESS;
        }
    };
    let status = dispatch(cli).unwrap_or_else(|failure| {
        say(&failure);
        failure.status
    });
    speech::end();
    ExitCode::from(status)
}
