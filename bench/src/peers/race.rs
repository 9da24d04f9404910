//! The same programs, with the same memory, under whatever pages them.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use serde::de::DeserializeOwned;

use crate::cli::{Effort, PageSize, Programs};
use crate::error::{BenchError, Trying};
use crate::fault::LOCAL_PERCENT_MAX;
use crate::memcg::Memcg;
use crate::peer::Process;
use crate::report::Report;
use crate::samples::Latency;
use crate::scratch::Scratch;
use crate::stack::{Stack, read};
use crate::swap::{Backing, Swap};
use crate::workload::{Orders, fault, sort};

/// The swap is so many times the memory, so that it is less than half full: see [`Swap::on`].
const SWAP_TIMES: u32 = 3;
/// Least share of the faults, in percent, that must have read from the swap device.
const MAJOR_PERCENT_MIN: f64 = 90.0;
/// Memory of the small job, in halves of the budget.
const JOB_HALVES: u32 = 3;

/// How often a workload may be killed: see [`limited`].
const KILLED_MAX: u32 = 5;

/// One part of the comparison.
pub struct Race<'a> {
    /// Begins the names of all rows.
    pub prefix: &'static str,
    /// How much to measure.
    pub effort: &'a Effort,
    /// Where gms is.
    pub programs: &'a Programs,
    /// Budget and memory in MiB.
    pub mib: (u32, u32),
    /// Faults measured in each run, and before them.
    pub faults: (u64, usize),
}

impl Race<'_> {
    /// gms, with an agent of its own: latency of its faults.
    pub fn gms(&self, seed: u64, report: &mut Report) -> Result<Latency, BenchError> {
        let (local, mib) = self.mib;
        let stack = Stack::start(self.programs.dir(), 1, local + mib)?;
        let size = PageSize::Small;
        let (found, stats): (fault::Found, _) = stack.run(size, local, &self.fault_orders(seed))?;
        let counted = found.faults() + self.faults.1 as u64;
        stats.check(counted, LOCAL_PERCENT_MAX[usize::from(self.effort.is_quick())])?;
        let (job, _): (sort::Found, _) = stack.run(size, local, &self.job())?;
        self.rows("gms", &found, Some(job), report)
    }

    /// Swap, with the budget as limit of a memcg: latency of its faults.
    pub fn swap(
        &self,
        name: &str,
        backing: &Backing,
        seed: u64,
        report: &mut Report,
    ) -> Result<Latency, BenchError> {
        let (local, mib) = self.mib;
        let scratch = Scratch::new()?;
        let _swap = Swap::on(backing, SWAP_TIMES * mib)?;
        let memcg = Memcg::new(local)?;
        let (found, killed) = limited(&memcg, &self.fault_orders(seed), &scratch)?;
        let found: fault::Found = found.ok_or_else(|| {
            failed(format!("was killed {KILLED_MAX} times in a memcg with {name}: see dmesg"))
        })?;
        let major = found.major_percent();
        report.figure(&format!("{}{name}: faults which read from it", self.prefix), "%", major);
        if major < MAJOR_PERCENT_MIN && !self.effort.is_quick() {
            let text = format!("only {major:.0} % of the faults read from {name}");
            return Err(BenchError::Invalid(text));
        }
        let (job, again): (Option<sort::Found>, u32) = limited(&memcg, &self.job(), &scratch)?;
        let kills = f64::from(killed + again);
        report.figure(
            &format!("{}{name}: killed for want of memory, and run again", self.prefix),
            "x",
            kills,
        );
        self.rows(name, &found, job, report)
    }

    /// What is measured of each.
    pub fn fault_orders(&self, seed: u64) -> Orders {
        Orders::Fault(fault::Orders {
            mib: self.mib.1 as usize,
            threads: 1,
            warm_up: self.faults.1,
            measured: fault::Measured::Faults(self.faults.0),
            seed,
            gate: None,
            manner: fault::Manner::default(),
        })
    }

    fn job(&self) -> Orders {
        Orders::Sort(sort::Orders { mib: (JOB_HALVES * self.mib.0 / 2) as usize })
    }

    fn rows(
        &self,
        name: &str,
        found: &fault::Found,
        job: Option<sort::Found>,
        report: &mut Report,
    ) -> Result<Latency, BenchError> {
        let prefix = self.prefix;
        let latency = found.samples()?.latency();
        report.latency(&format!("{prefix}fault, {name}"), latency);
        if let Some(job) = job {
            report.figure(&format!("{prefix}job, {name}"), "s", job.seconds);
        }
        Ok(latency)
    }
}

/// Runs a workload within a memcg; also, how often the kernel killed it because it found no page to evict. Nothing is found where it
/// was killed each time.
///
/// Linux 6.18 does so now and then while swap is free (traced: 17 reclaims of nothing within 0.3 ms, no active page made inactive,
/// as if the statistics of its lists of pages were old). That is no fault of the workload.
fn limited<F: DeserializeOwned>(
    memcg: &Memcg,
    orders: &Orders,
    scratch: &Scratch,
) -> Result<(Option<F>, u32), BenchError> {
    let found = scratch.path("found.json");
    let line = orders.command(&found)?;
    for killed in 0..KILLED_MAX {
        let mut command = Command::new(&line[0]);
        memcg.enter(command.args(&line[1..]));
        let mut process = Process::start(&mut command)?;
        let ended = process.0.wait().trying("cannot wait for the workload")?;
        match ended.signal() {
            _ if ended.success() => return Ok((Some(read(&found)?), killed)),
            Some(libc::SIGKILL) => {}
            _ => return Err(failed(format!("ended with {ended} in a memcg"))),
        }
    }
    Ok((None, KILLED_MAX))
}

fn failed(problem: String) -> BenchError {
    BenchError::Program { program: "the workload".into(), problem }
}
