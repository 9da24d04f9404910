//! `gms run`.

use gms_agent::memory::Memory;

use super::summary::StatsFile;
use super::{Failure, summary};
use crate::cli::RunArgs;
use crate::exit::EXIT_GMS;
use crate::kernel::proc::self_pid;
use crate::launch::{self, Side};
use crate::session::Session;
use crate::shared::Outcome;
use crate::speech::say;
use crate::{config, control, probe, torture};

/// Status of a command that SIGBUS ended.
const BUS_ERROR: u8 = 128 + libc::SIGBUS as u8;

/// Runs the command; all processes of gms return from here, see [`launch::split`].
pub(super) fn run(args: RunArgs) -> Result<u8, Failure> {
    let mut paging = args.paging;
    paging.best_effort = args.best_effort;
    let options = config::resolve(paging, &Memory::read()?, false)?;
    if let Some(reason) = why_unpaged()? {
        return run_unpaged(&args.command, &reason, options.best_effort);
    }
    if let Some(seed) = args.torture {
        torture::start(seed);
    }
    let stats_file = StatsFile::open(options.stats.as_deref());
    let (link, signals) = match launch::split()? {
        Side::Front(front) => return Ok(front.stand_in()),
        Side::Reaper(reaper) => {
            reaper.serve(&args.command);
            return Ok(0);
        }
        Side::Pager(link, signals) => (link, signals),
    };
    let config = options.session;
    let finished = launch::run(&args.command, link, signals, || Session::prepare(config))?;
    match &finished.outcome {
        Outcome::Killed(reason) => say(format!("workload killed: {reason}")),
        // Told when that happened; told again to whoever wonders why the command has ended so.
        Outcome::Detached { lost: Some(text), .. } if finished.status == BUS_ERROR => {
            say(format!("the command got SIGBUS: {text}"));
        }
        _ => {}
    }
    if !options.quiet {
        say(summary::paragraph(&finished.stats));
    }
    stats_file.write(&finished.stats);
    Ok(finished.status)
}

/// Why no command that is started here could be paged, if so.
fn why_unpaged() -> Result<Option<String>, Failure> {
    if let Some(pager) = control::pager_above(self_pid()) {
        return Ok(Some(format!(
            "this is inside a workload that gms pages already (process {pager}), which pages whatever runs here: \
             leave out this 'gms run', or 'gms detach {pager}' first"
        )));
    }
    Ok(probe::problem()?.map(|problem| format!("no program can be paged here: {problem}")))
}

fn run_unpaged(
    command: &[std::ffi::OsString],
    reason: &str,
    best_effort: bool,
) -> Result<u8, Failure> {
    if !best_effort {
        let hint = "or run it without paging: --best-effort";
        return Err(Failure::new(EXIT_GMS, format!("{reason}; {hint}")));
    }
    say(format!("the command runs without paging and without a limit: {reason}"));
    Err(launch::execute(command).into())
}
