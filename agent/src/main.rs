//! `gms-agent`: see `gms-agent --help`.

use gms_agent::agent::{Agent, AgentError};
use gms_agent::check;
use gms_agent::cli::{Args, NameError, Options, Refusal};
use gms_agent::limits::REMIND_EVERY;
use gms_agent::log::Log;
use gms_agent::memory::Memory;
use gms_policy::Bytes;
use gms_transport::keys::{self, Identity, KeysError, Role};
use gms_transport::message::Version;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Instant, SystemTime};

/// Why the agent did not run, or ended.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Keys(#[from] KeysError),
    #[error(transparent)]
    Name(#[from] NameError),
    #[error(transparent)]
    Agent(#[from] AgentError),
    #[error("the agent failed: {0}")]
    System(#[from] io::Error),
}

fn main() -> ExitCode {
    gms_transport::heap::keep_freed();
    let options = match Args::read() {
        Ok(options) => options,
        Err(Refusal::Help(help)) => {
            // A reader that left early is no failure.
            let _ = help.print();
            return ExitCode::SUCCESS;
        }
        Err(Refusal::Usage(problem)) => {
            eprintln!("gms-agent: {problem}");
            return ExitCode::from(2);
        }
    };
    if options.check {
        return report(&options);
    }
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("gms-agent: {failure}");
            ExitCode::from(1)
        }
    }
}

/// Prints what an agent would lack; fails if it would not serve.
fn report(options: &Options) -> ExitCode {
    let memory = match Memory::read() {
        Ok(memory) => memory,
        Err(error) => {
            eprintln!("gms-agent: {error}");
            return ExitCode::from(1);
        }
    };
    let checks = check::checks(options, &memory);
    let lines: String = checks.iter().map(|check| format!("{check}\n")).collect();
    // A reader that left early is no failure.
    let _ = io::stdout().write_all(lines.as_bytes());
    if check::can_serve(&checks) { ExitCode::SUCCESS } else { ExitCode::from(1) }
}

fn run(options: &Options) -> Result<(), Failure> {
    // Blocked before any thread starts, so that all of them inherit it.
    let ends: SigSet = [Signal::SIGTERM, Signal::SIGINT].into_iter().collect();
    let signals: SigSet = ends.iter().chain([Signal::SIGHUP]).collect();
    signals.thread_block().map_err(io::Error::from)?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    let signals = SignalFd::with_flags(&signals, flags).map_err(io::Error::from)?;

    // Written to its end before a failure is told.
    let _log = Log::start(options.level)?;
    let mut identity = keys::load(&options.keys, Role::Node)?;
    tell_endings(&identity);
    let mut agent = Agent::spawn(&options.agent(Bytes(Memory::read()?.total_bytes))?, &identity)?;
    tracing::info!(
        addr = %agent.addr(),
        export_mib = agent.frames().bytes().0 >> 20,
        frames = agent.frames().0,
        node = %identity.id(),
        certificate = %identity.fingerprint(),
        revoked = identity.revoked(),
        allowed = identity.allowed_clients(),
        metrics = agent.metrics_addr().map(tracing::field::display),
        "listening"
    );
    join(&mut agent, options, &identity);
    wait(&signals, &mut agent, options, &mut identity)?;
    // A second signal ends the process at once, as it would any other. SIGHUP stays blocked.
    ends.thread_unblock().map_err(io::Error::from)?;
    agent.drain(options.drain);
    wait(&signals, &mut agent, options, &mut identity)?;
    let left = agent.held().0;
    agent.stop(options.drain)?;
    if left > 0 {
        let cure = "those of one copy are lost: give it another agent, or longer by --drain";
        tracing::warn!(pages = left, cure, "workloads did not take all of their pages away");
    }
    tracing::info!("stopped");
    Ok(())
}

/// Becomes a member of the cluster. An agent that cannot serves all the same.
fn join(agent: &mut Agent, options: &Options, identity: &Identity) {
    if options.protocol < Version::V2 {
        return;
    }
    if let Err(error) = agent.join(identity, options.joining.clone()) {
        tracing::warn!(%error, "the agent is no member: others do not find it");
    }
}

/// Waits for the request to end, or for the end of the agent. SIGHUP has the keys and the export read again; once a day it is
/// told if the keys end soon.
fn wait(
    signals: &SignalFd,
    agent: &mut Agent,
    options: &Options,
    identity: &mut Identity,
) -> io::Result<()> {
    let mut remind_at = Instant::now() + REMIND_EVERY;
    loop {
        let mut fds = [signals.as_fd(), agent.ended()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let left = remind_at.saturating_duration_since(Instant::now());
        match poll(&mut fds, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let has_ended = fds[1].any().unwrap_or(false);
        if Instant::now() >= remind_at {
            remind_at += REMIND_EVERY;
            tell_endings(identity);
        }
        match signals.read_signal().map_err(io::Error::from)? {
            Some(signal) if signal.ssi_signo == Signal::SIGHUP as u32 => {
                renew(agent, options, identity);
                export_anew(agent);
            }
            Some(_) => return Ok(()),
            None if has_ended => return Ok(()),
            None => {}
        }
    }
}

/// Reads the keys again, and the lists of who was revoked and who is let in. Whatever is wrong with them, the agent goes on with those which it has.
fn renew(agent: &Agent, options: &Options, identity: &mut Identity) {
    match identity.reload(&options.keys) {
        Ok(renewed) => {
            if renewed.is_revoked() {
                tracing::error!("this agent was revoked itself: issue it keys under another name");
            }
            tell_endings(&renewed);
            identity.clone_from(&renewed);
            agent.renew(renewed);
        }
        Err(error) => tracing::error!(%error, "the keys stay as they are"),
    }
}

/// Reads the export again, from the command line and the configuration file. Whatever is wrong there, the agent goes on with what it exports.
fn export_anew(agent: &mut Agent) {
    let options = match Args::read() {
        Ok(options) => options,
        Err(Refusal::Help(_)) => return,
        Err(Refusal::Usage(problem)) => {
            return tracing::error!(problem, "the export stays as it is");
        }
    };
    let set = Memory::read().and_then(|memory| {
        let export = options.export.of(Bytes(memory.total_bytes));
        if export.floor.0 > memory.total_bytes {
            return Err(io::Error::other("it would be more than all memory"));
        }
        agent.set_export(export).map(|()| export)
    });
    let exported = agent.frames().bytes();
    match set {
        Ok(export) if export.floor.pages() > agent.frames() => tracing::warn!(
            export_mib = exported.0 >> 20,
            "exports as much as was set aside at the start: restart it for more"
        ),
        Ok(_) => tracing::info!(export_mib = exported.0 >> 20, "exports"),
        Err(error) => tracing::error!(%error, "the export stays as it is"),
    }
}

/// Says which certificates end soon.
fn tell_endings(identity: &Identity) {
    for ending in identity.endings(SystemTime::now()) {
        tracing::warn!(%ending, "keys end soon");
    }
}
