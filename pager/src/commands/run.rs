//! `gms run`.

use gms_agent::memory::Memory;
use serde::{Deserialize, Serialize};

use super::summary::StatsFile;
use super::{Failure, summary};
use crate::cli::RunArgs;
use crate::exit::EXIT_GMS;
use crate::handed::Descriptors;
use crate::kernel::proc::self_pid;
use crate::launch::{self, Finished, Side};
use crate::output::OutputRecord;
use crate::session::Session;
use crate::shared::Outcome;
use crate::speech::say;
use crate::{board, config, control, probe, torture};

/// Status of a command that SIGBUS ended.
const BUS_ERROR: u8 = 128 + libc::SIGBUS as u8;

/// Runs the command; all processes of gms return from here, see [`launch::split`].
pub(super) fn run(args: RunArgs) -> Result<u8, Failure> {
    let mut paging = args.paging;
    (paging.best_effort, paging.no_takeover) = (args.best_effort, args.no_takeover);
    let options = config::resolve(paging, &Memory::read()?, false)?;
    if let Some(reason) = why_unpaged()? {
        return run_unpaged(&args.command, &reason, options.best_effort);
    }
    if let Some(seed) = args.torture {
        torture::start(seed);
    }
    args.die_at.into_iter().for_each(torture::die_at);
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
    let rest = Rest { quiet: options.quiet, torture: args.torture, stats: stats_file };
    let tell = |to: &mut Descriptors| rest.hand_over(to);
    let rest_of_all: (launch::Rest<'_>, bool) = (&tell, options.takeover);
    let prepare = || Session::prepare(config);
    let finished = launch::run(&args.command, link, signals, rest_of_all, prepare)?;
    Ok(rest.end(&finished))
}

/// Goes on with a command that another binary of gms was running; `instead` is why this one is in the place of yet another.
pub(super) fn go_on(number: i32, instead: Option<&str>) -> Result<u8, Failure> {
    let (adopted, rest) = launch::adopt(number, instead, Rest::again)?;
    if let Some(reason) = instead {
        say(format!("another binary could not go on: {reason}; this one does"));
    }
    let tell = |to: &mut Descriptors| rest.hand_over(to);
    let finished = adopted.see_through(&tell)?;
    Ok(rest.end(&finished))
}

/// Goes on with a command for a pager that has died.
pub(super) fn inherit(number: i32, died: u64) -> Result<u8, Failure> {
    let adopted = launch::inherit(number, died, Rest::again);
    let refuse = |error: launch::LaunchError| {
        // Nobody is to try again.
        board::withdraw();
        let reason = format!("another pager cannot go on: {error}");
        Failure::new(EXIT_GMS, reason)
    };
    let (adopted, rest) = adopted.map_err(refuse)?;
    let tell = |to: &mut Descriptors| rest.hand_over(to);
    let finished = adopted.see_through(&tell)?;
    Ok(rest.end(&finished))
}

/// What is left of the command line when the session runs.
struct Rest {
    quiet: bool,
    torture: Option<u64>,
    stats: StatsFile,
}

/// See [`Rest`].
#[derive(Serialize, Deserialize)]
struct RestRecord {
    quiet: bool,
    torture: Option<u64>,
    stats: Option<OutputRecord>,
}

impl Rest {
    fn hand_over(&self, to: &mut Descriptors) -> serde_json::Value {
        let Rest { quiet, torture, ref stats } = *self;
        let record = RestRecord { quiet, torture, stats: stats.hand_over(to) };
        serde_json::to_value(record).unwrap_or_default()
    }

    fn again(record: serde_json::Value) -> std::io::Result<Rest> {
        let RestRecord { quiet, torture, stats } = serde_json::from_value(record)?;
        torture.into_iter().for_each(torture::start);
        Ok(Rest { quiet, torture, stats: StatsFile::again(stats)? })
    }

    /// Tells how it has ended. Returns the exit status.
    fn end(self, finished: &Finished) -> u8 {
        match &finished.outcome {
            Outcome::Killed(reason) => say(format!("workload killed: {reason}")),
            // Told when that happened; told again to whoever wonders why the command has ended so.
            Outcome::Detached { lost: Some(text), .. } if finished.status == BUS_ERROR => {
                say(format!("the command got SIGBUS: {text}"));
            }
            _ => {}
        }
        if !self.quiet {
            say(summary::paragraph(&finished.stats));
        }
        self.stats.write(&finished.stats);
        finished.status
    }
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
