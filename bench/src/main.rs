//! `gms-bench`: what this machine can do at best, and what gms does with it. Method and figures: docs/benchmarks.md.
//!
//! A command measures each of its subjects once a run, one after the other, so that a machine which drifts drifts for all of them;
//! the report gives medians over the runs and how far they lie apart.

mod cli;
mod error;
mod evict;
mod fault;
mod floor;
mod gate;
mod idle_cost;
mod machine;
mod page;
mod peer;
mod placement;
mod region;
mod report;
mod samples;
mod scale;
mod scan;
mod scratch;
mod stack;
mod svg;
mod workload;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};
use error::BenchError;
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
    nix::unistd::alarm::set(cli.limit_s);
    let mut report = Report::new();
    match &cli.command {
        Command::Floor(options) => floor::run(options, &mut report)?,
        Command::Fault(options) => fault::run(options, &mut report)?,
        Command::Scan(options) => scan::run(options, &mut report)?,
        Command::Evict(options) => evict::run(options, &mut report)?,
        Command::Scale(options) => scale::run(options, &mut report)?,
        Command::IdleCost(options) => idle_cost::run(options, &mut report)?,
        Command::Report(options) => return page::run(options),
        Command::Peer(options) => return peer::serve(options),
        Command::Workload { orders, found } => return workload::run(orders, found),
        Command::IdleWorkload { mib } => return idle_cost::workload(*mib),
    }
    report.publish(cli.json.as_deref())
}
