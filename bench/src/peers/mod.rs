//! `gms-bench peers`: gms beside other ways to have more memory than there is.

mod foreign;
mod guest;
pub mod init;
mod initramfs;
mod kernel;
mod race;
pub mod remote_swap;

use crate::cli::{Part, PeersOptions};
use crate::error::BenchError;
use crate::report::{Report, Target};
use crate::swap::Backing;
use foreign::Foreign;
use kernel::Needs;
use race::Race;

/// Faults measured in each run, usual and `--quick`.
const FAULTS: (usize, usize) = (20_000, 400);
/// Faults before them.
const WARM_UP: (usize, usize) = (4_000, 100);
/// p50 of a fault as a multiple of that of swap on a disk.
const OF_DISK_MAX: f64 = 0.25;
/// p99 of a fault as a multiple of that of swap on zram.
const OF_ZRAM_MAX: f64 = 1.0;

/// Measures.
pub fn run(options: &PeersOptions, report: &mut Report) -> Result<(), BenchError> {
    let in_guest = options.only != Some(Part::Host);
    let foreign = Foreign::find(options.umap.as_deref(), options.fltrace.as_deref())?;
    // First, as what is missing should be said at once.
    let needs = in_guest.then(|| Needs::find(options.kernel.as_deref())).transpose()?;
    if options.only != Some(Part::Guest) {
        host(options, &foreign, report)?;
    }
    needs.map_or(Ok(()), |needs| guest::run(&needs, options, report))
}

/// Swap on a disk and on zram, on this machine.
fn host(options: &PeersOptions, foreign: &Foreign, report: &mut Report) -> Result<(), BenchError> {
    let effort = &options.effort;
    let race = Race {
        prefix: "",
        effort,
        programs: &options.paging.programs,
        mib: options.paging.mib(effort, 64),
        faults: (effort.count(FAULTS.0, FAULTS.1) as u64, effort.count(WARM_UP.0, WARM_UP.1)),
    };
    for run in 0..effort.runs() {
        let seed = u64::from(run) + 1;
        let gms = race.gms(seed, report)?;
        let zram = race.swap("zram swap", &Backing::Zram, seed, report)?;
        let target = Some(Target::AtMost(OF_ZRAM_MAX));
        report.judged("p99, gms / zram swap", "x", gms.p99 / zram.p99, target);
        report.figure("p50, gms / zram swap", "x", gms.p50 / zram.p50);
        let disk = race.swap("disk swap", &Backing::Disk(options.disk.clone()), seed, report)?;
        let target = Some(Target::AtMost(OF_DISK_MAX));
        report.judged("p50, gms / disk swap", "x", gms.p50 / disk.p50, target);
        report.figure("p99, gms / disk swap", "x", gms.p99 / disk.p99);
        foreign.run(&race, seed, report)?;
    }
    Ok(())
}
