//! `gms-bench idle-cost`: a program which stays under its budget, alternately with and without `gms run`.

use std::ffi::OsString;
use std::process::Command;
use std::time::Instant;

use gms_tests::Dice;

use crate::cli::IdleOptions;
use crate::error::{BenchError, Trying};
use crate::peer::Process;
use crate::region::{Region, WORDS, pages};
use crate::report::{Report, Target};
use crate::stack::program;
use crate::turn::rotated;

/// Memory of the default command in MiB, usual and `--quick`.
const MIB: (usize, usize) = (256, 4);
/// What `gms run` may add, in percent.
const COST_MAX: f64 = 2.0;
/// The rows of the command.
const ALONE: &str = "command alone";
const UNDER: &str = "command under gms run";
/// The row of what does not depend on how long the command runs.
const START: &str = "start and end of gms run (an empty command)";

/// Measures.
pub(crate) fn run(options: &IdleOptions, report: &mut Report) -> Result<(), BenchError> {
    let own = std::env::current_exe().trying("cannot find gms-bench")?;
    let mut command = options.command.clone();
    if command.is_empty() {
        let mib = options.effort.count(MIB.0, MIB.1).to_string();
        command = vec![own.clone().into(), "idle-workload".into(), mib.into()];
    }
    let mut gms: Vec<OsString> =
        vec![program(options.programs.dir(), "gms")?.into(), "run".into(), "-q".into()];
    if let Some(local) = &options.local {
        gms.extend(["--local".into(), local.into()]);
    }
    gms.push("--".into());
    let wrapped = |command: &[OsString]| [&gms[..], command].concat();
    let nothing: [OsString; 3] = [own.into(), "idle-workload".into(), "0".into()];
    // Once to bring programs and libraries into memory.
    seconds(&wrapped(&nothing))?;
    seconds(&command)?;
    for run in 0..options.effort.runs() {
        for row in rotated([ALONE, UNDER, START], run) {
            let (unit, value) = match row {
                ALONE => ("s", seconds(&command)?),
                UNDER => ("s", seconds(&wrapped(&command))?),
                _ => ("ms", (seconds(&wrapped(&nothing))? - seconds(&nothing)?) * 1e3),
            };
            report.figure(row, unit, value);
        }
    }
    report.noise(ALONE);
    report.rank("command", &[ALONE, UNDER].map(String::from));
    let [alone, under, start] = [ALONE, UNDER, START].map(|row| report.values(row));
    for ((alone, under), start_ms) in alone.into_iter().zip(under).zip(start) {
        let target = Some(Target::AtMost(COST_MAX));
        report.judged("cost of gms run", "%", (under / alone - 1.0) * 100.0, target);
        let running = (under - start_ms / 1e3) / alone;
        report.figure("cost without start and end", "%", (running - 1.0) * 100.0);
    }
    Ok(())
}

/// How long a command takes from its start to its end.
fn seconds(command: &[OsString]) -> Result<f64, BenchError> {
    let start = Instant::now();
    let mut process = Process::start(Command::new(&command[0]).args(&command[1..]))?;
    let ended = process.0.wait().trying("cannot wait for the command")?;
    let took = start.elapsed().as_secs_f64();
    if !ended.success() {
        let program = command[0].display().to_string();
        return Err(BenchError::Program { program, problem: format!("ended with {ended}") });
    }
    Ok(took)
}

/// `gms-bench idle-workload`: fills memory, sorts part of it, and walks it at random; about 2 s for 256 MiB.
pub(crate) fn workload(mib: usize) -> Result<(), BenchError> {
    if mib == 0 {
        return Ok(());
    }
    let region = Region::new(pages(mib))?;
    let mut dice = Dice::of_thread(1, 0);
    for page in 0..region.pages() {
        (0..WORDS).for_each(|word| region.store(page, word, dice.bits()));
    }
    let mut numbers: Vec<u64> = (0..region.pages() * WORDS / 4).map(|_| dice.bits()).collect();
    numbers.sort_unstable();
    let mut at = 0;
    for number in &numbers {
        let word = region.load(at, *number as usize % WORDS);
        at = (word ^ number) as usize % region.pages();
    }
    std::hint::black_box(at);
    Ok(())
}
