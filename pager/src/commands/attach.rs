//! `gms attach`.

use std::os::fd::AsFd;
use std::time::Instant;

use gms_agent::memory::Memory;
use nix::poll::{PollFd, PollFlags};

use super::progress::{self, Progress};
use super::summary::StatsFile;
use super::{Failure, summary};
use crate::board::Board;
use crate::cli::AttachArgs;
use crate::exit::EXIT_GMS;
use crate::kernel::proc;
use crate::kernel::proc::self_pid;
use crate::launch::{self, Paged, Paging, Signals};
use crate::session::Session;
use crate::shared::Outcome;
use crate::speech::say;
use crate::stats::Stats;
use crate::target::Target;
use crate::tree::Root;
use crate::{config, keeper, probe, stopped};

/// Pages the process until it ends, or until gms is told to leave it.
pub(super) fn attach(args: AttachArgs) -> Result<u8, Failure> {
    let options = config::resolve(args.paging, &Memory::read()?, true)?;
    let cannot = |reason| Failure::new(EXIT_GMS, format!("process {}: {reason}", args.pid));
    if let Some(problem) = probe::problem()? {
        return Err(cannot(format!("cannot be paged: {problem}")));
    }
    let target = Target::check(args.pid).map_err(cannot)?;
    let stats_file = StatsFile::open(options.stats.as_deref());
    let signals = Signals::block()?;
    let board = Board::new().map_err(std::io::Error::from)?;
    board.set_pager(self_pid());
    keeper::spawn(board, false).map_err(std::io::Error::from)?;
    let session = Session::prepare(options.session)?;
    let paged = Paged::new(session, args.pid, proc::command_line(args.pid), self_pid());
    if let Err(error) = paged.session().adopt(Root::Process(target)) {
        paged.finish();
        return Err(error.into());
    }
    let (outcome, stats) = watch(paged, &signals, Progress::new(options.quiet), board);
    if !options.quiet && !matches!(outcome, Outcome::Refused(_)) {
        say(summary::paragraph(&stats));
    }
    stats_file.write(&stats);
    match outcome {
        Outcome::Killed(reason) => {
            Err(Failure::new(EXIT_GMS, format!("workload killed: {reason}")))
        }
        Outcome::Refused(reason) => Err(cannot(reason)),
        Outcome::Detached { lost: Some(text), .. } => Err(Failure::new(EXIT_GMS, text)),
        Outcome::Detached { lost: None, is_forced: true } => Err(Failure::new(
            EXIT_GMS,
            format!(
                "gms's own agent has ended; process {} runs on without gms, with all its pages: attach it again",
                args.pid
            ),
        )),
        Outcome::Detached { lost: None, is_forced: false } if !options.quiet => {
            say(format!("all pages are home; process {} runs on without gms", args.pid));
            Ok(0)
        }
        _ => Ok(0),
    }
}

fn watch<P: Paging>(
    mut paged: Paged<P>,
    signals: &Signals,
    mut progress: Progress,
    board: &Board,
) -> (Outcome, Stats) {
    let mut detaching = false;
    loop {
        let mut fds = paged.fds();
        fds.push(PollFd::new(signals.as_fd(), PollFlags::POLLIN));
        match detaching {
            false => launch::wait(&mut fds),
            true => {
                launch::wait_ms(&mut fds, progress::EVERY.as_millis() as u16);
                progress.show(Instant::now(), paged.session().stats().away_bytes);
            }
        }
        while let Some(arrival) = signals.next() {
            match arrival.number {
                libc::SIGCHLD => stopped::reap_ended(),
                libc::SIGHUP if signals.inherited().ignores_hangup() => {}
                libc::SIGINT | libc::SIGTERM | libc::SIGHUP | libc::SIGQUIT if detaching => {
                    progress.end();
                    say("still bringing pages home; the process must not lose them");
                }
                libc::SIGINT | libc::SIGTERM | libc::SIGHUP | libc::SIGQUIT => {
                    detaching = true;
                    paged.session().detach();
                }
                libc::SIGTSTP => say("cannot be stopped while it pages; Ctrl-C detaches"),
                _ => {}
            }
        }
        if paged.asked().is_some() {
            paged.not_upgraded(
                "the gms of 'gms attach' cannot be upgraded: 'gms detach', and attach with the other binary".into(),
            );
        }
        // Before its user is told of a detach: from then on it does not end with this process.
        if let Some(outcome) = paged.serve(|outcome| keeper::dismiss(board, outcome)) {
            progress.end();
            return (outcome, paged.finish());
        }
    }
}
