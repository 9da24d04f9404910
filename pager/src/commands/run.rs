//! `gms run`.

use super::summary::StatsFile;
use super::{Failure, say, summary};
use crate::cli::RunArgs;
use crate::config;
use crate::launch::{self, Side};
use crate::session::{Outcome, Session};
use crate::size::Memory;

/// Status of a command that SIGBUS ended.
const BUS_ERROR: u8 = 128 + libc::SIGBUS as u8;

/// Runs the command; both processes of gms return from here, see [`launch::split`].
pub fn run(args: RunArgs) -> Result<u8, Failure> {
    let options = config::resolve(args.paging, &Memory::read()?, false)?;
    let stats_file = StatsFile::open(options.stats.as_deref())?;
    let (link, signals) = match launch::split()? {
        Side::Front(front) => return Ok(front.stand_in()),
        Side::Pager(link, signals) => (link, signals),
    };
    let config = options.session;
    let finished = launch::run(&args.command, link, signals, || Session::prepare(config))?;
    match &finished.outcome {
        Outcome::Killed(reason) => say(format!("workload killed: {reason}")),
        // Told when that happened; told again to whoever wonders why the command has ended so.
        Outcome::Detached { lost: Some(text) } if finished.status == BUS_ERROR => {
            say(format!("the command got SIGBUS: {text}"));
        }
        _ => {}
    }
    if !options.quiet {
        say(summary::paragraph(&finished.stats));
    }
    stats_file.write(&finished.stats)?;
    Ok(finished.status)
}
