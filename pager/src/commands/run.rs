//! `gms run`.

use super::summary::StatsFile;
use super::{Failure, say, summary};
use crate::cli::RunArgs;
use crate::config;
use crate::launch::{self, Side};
use crate::session::{Outcome, Session};
use crate::size::Memory;

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
    if let Outcome::Killed(reason) = &finished.outcome {
        say(format!("workload killed: {reason}"));
    }
    if !options.quiet {
        say(summary::paragraph(&finished.stats));
    }
    stats_file.write(&finished.stats)?;
    Ok(finished.status)
}
