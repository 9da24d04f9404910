//! `gms-agent`: see `gms-agent --help`.

use clap::Parser;
use gms_agent::agent::{Agent, AgentError};
use gms_agent::cli::{Args, Options};
use gms_agent::memory::Memory;
use gms_transport::keys::{self, KeysError, Role};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::process::ExitCode;

/// Why the agent did not run, or ended.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Keys(#[from] KeysError),
    #[error(transparent)]
    Agent(#[from] AgentError),
    #[error("the agent failed: {0}")]
    System(#[from] io::Error),
}

fn main() -> ExitCode {
    let options = match Args::parse().resolve() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("gms-agent: {error}");
            return ExitCode::from(2);
        }
    };
    let colours = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    // Failures to write are not reported: that would be to stderr, and must not end the agent when nobody reads it any more.
    let log = tracing_subscriber::fmt().with_writer(io::stderr).with_ansi(colours);
    log.log_internal_errors(false).with_max_level(options.level).init();
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("gms-agent: {failure}");
            ExitCode::from(1)
        }
    }
}

fn run(options: &Options) -> Result<(), Failure> {
    // Blocked before any thread starts, so that all of them inherit it.
    let ends: SigSet = [Signal::SIGTERM, Signal::SIGINT].into_iter().collect();
    ends.thread_block().map_err(io::Error::from)?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    let signals = SignalFd::with_flags(&ends, flags).map_err(io::Error::from)?;

    let identity = keys::load(&options.keys, Role::Node)?;
    let agent = Agent::spawn(&options.agent(Memory::read()?.available), &identity)?;
    tracing::info!(
        addr = %agent.addr(),
        export_mib = agent.frames().bytes().0 >> 20,
        frames = agent.frames().0,
        node = %identity.fingerprint(),
        metrics = agent.metrics_addr().map(tracing::field::display),
        "listening"
    );
    wait(&signals, &agent)?;
    // A second signal ends the process at once, as it would any other.
    signals.read_signal().map_err(io::Error::from)?;
    ends.thread_unblock().map_err(io::Error::from)?;
    agent.stop(options.drain)?;
    tracing::info!("stopped");
    Ok(())
}

/// Waits for a signal, or for the agent to end by itself.
fn wait(signals: &SignalFd, agent: &Agent) -> io::Result<()> {
    let mut fds = [signals.as_fd(), agent.ended()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
    loop {
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
