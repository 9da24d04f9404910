//! `gms-bench peers`: gms beside other ways to have more memory than there is.

mod foreign;
mod guest;
pub(crate) mod init;
mod initramfs;
mod kernel;
mod race;
pub(crate) mod remote_swap;

use crate::cli::{Part, PeersOptions, Under};
use crate::error::BenchError;
use crate::report::Report;
use foreign::Foreign;
use kernel::Needs;
use race::Race;

/// Faults measured in each run, usual and `--quick`.
const FAULTS: (usize, usize) = (20_000, 400);
/// The subjects on this machine. Not among them is zram with its pool charged: the pages are random
/// numbers, which take as much room in a pool.
const HOST: [Under; 5] =
    [Under::Gms, Under::Zram, Under::ZramReadahead, Under::Disk, Under::DiskReadahead];

/// Measures.
pub(crate) fn run(options: &PeersOptions, report: &mut Report) -> Result<(), BenchError> {
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
    let subjects = HOST.map(|under| under.subject(&options.disk)).to_vec();
    let mib = options.paging.mib(effort, 64);
    let faults = effort.count(FAULTS.0, FAULTS.1);
    let race = Race::new("", (effort, &options.paging.programs), mib, faults, subjects);
    for run in 0..effort.runs() {
        race.run(run, report)?;
        foreign.run(&race, u64::from(run) + 1, report)?;
    }
    Ok(())
}
