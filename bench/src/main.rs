//! `gms-bench`: what this machine can do at best, and what gms does with it. Method and figures: docs/benchmarks.md.
//!
//! A command measures each of its subjects once a run, one after the other and in another order each run, so that a machine which
//! drifts drifts for all of them; the report gives medians over the runs and how far they lie apart.

mod app;
mod cli;
mod cost;
mod error;
mod evict;
mod fault;
mod floor;
mod gate;
mod graph;
mod hostile;
mod idle_cost;
mod idle_cpu;
mod machine;
mod memcg;
mod memory;
mod netns;
mod network;
mod page;
mod peer;
mod peers;
mod placement;
mod pressure;
mod procfs;
mod ranking;
mod redundancy;
mod region;
mod report;
mod room;
mod samples;
mod scale;
mod scan;
mod scratch;
mod shape;
mod slow_down;
mod stack;
mod stages;
mod subject;
mod svg;
mod swap;
mod turn;
mod undo;
mod workload;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};
use error::BenchError;
use network::{Kind, Network};
use report::Report;

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gms-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<(), BenchError> {
    // A hung subject ends the benchmark; processes which it has started die with it.
    nix::unistd::alarm::set(cli.limit_s());
    match &cli.command {
        Command::Report(options) => page::run(options),
        Command::Peer(options) => floor::serve::serve(options),
        Command::Workload { orders, found } => workload::run(orders, found),
        Command::IdleWorkload { mib } => idle_cost::workload(*mib),
        Command::GuestInit => peers::init::run(),
        Command::Undo => {
            undo::wait();
            Ok(())
        }
        command => measure(&cli, command),
    }
}

/// Only here a report is begun: its header takes other programs, which have no place in what is measured.
fn measure(cli: &Cli, command: &Command) -> Result<(), BenchError> {
    let mut report = Report::new();
    if let Some(programs) = command.programs() {
        for name in ["gms", "gms-agent"] {
            report.machine.look_at_program(&stack::program(programs.dir(), name)?);
        }
    }
    if let Err(error) = subjects(command, &mut report) {
        if report.is_empty() {
            return Err(error);
        }
        // What was measured before stays; that it is not all must not be overlooked.
        report.failures.push(error.to_string());
    }
    report.publish(cli.json.as_deref())
}

fn subjects(command: &Command, report: &mut Report) -> Result<(), BenchError> {
    match command {
        Command::Floor(options) => floor::run(options, report),
        Command::Fault(options) => over(options.route.network, report, |network, report| {
            fault::run(options, network, report)
        }),
        Command::Scan(options) => over(options.route.network, report, |network, report| {
            scan::run(options, network, report)
        }),
        Command::Evict(options) => over(options.route.network, report, |network, report| {
            evict::run(options, network, report)
        }),
        Command::Scale(options) => scale::run(options, report),
        Command::Cost(options) => over(options.route.network, report, |network, report| {
            cost::run(options, network, report)
        }),
        Command::Redundancy(options) => over(options.route.network, report, |network, report| {
            redundancy::run(options, network, report)
        }),
        Command::Shape(options) => shape::run(options, report),
        Command::App(options) => app::run(options, report),
        Command::Peers(options) => peers::run(options, report),
        Command::Pressure(options) => pressure::run(options, report),
        Command::Hostile(options) => over(options.route.network, report, |network, report| {
            hostile::run(options, network, report)
        }),
        Command::RemoteSwap(options) => peers::remote_swap::run(options, report),
        Command::IdleCost(options) => idle_cost::run(options, report),
        Command::IdleCpu(options) => idle_cpu::run(options, report),
        Command::Report(_)
        | Command::Peer(_)
        | Command::Workload { .. }
        | Command::IdleWorkload { .. }
        | Command::GuestInit
        | Command::Undo => Err(BenchError::Invalid("this makes no report".into())),
    }
}

/// Measures over a network of this kind.
fn over(
    kind: Kind,
    report: &mut Report,
    measure: impl FnOnce(&Network, &mut Report) -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    let network = Network::set_up(kind)?;
    report.machine.network = kind.to_string();
    measure(&network, report)?;
    network.report(report)?;
    if kind != Kind::Loopback {
        // Targets were set for loopback.
        report.figures.iter_mut().for_each(|figure| figure.target = None);
    }
    Ok(())
}
