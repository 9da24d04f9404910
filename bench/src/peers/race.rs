//! The same programs, with the same memory, under whatever pages them.

use std::cell::Cell;

use gms_tests::Stats;
use serde::de::DeserializeOwned;

use crate::cli::{Effort, Programs, Under};
use crate::error::BenchError;
use crate::fault::{LOCAL_PERCENT_MAX, WARM_UP_TIMES};
use crate::gate::Gates;
use crate::region::pages;
use crate::report::{Report, Target};
use crate::room::{Room, SECONDS_MAX, Used};
use crate::samples::Latency;
use crate::scratch::Scratch;
use crate::stack::{check_remote, read};
use crate::subject::{Pager, Settled, Subject, lowered, settle};
use crate::turn::rotated;
use crate::workload::{Orders, fault, sort};
use crate::{floor, memory};

/// Least share of the faults, in percent, that must have read from the swap device.
const MAJOR_PERCENT_MIN: f64 = 90.0;
/// Memory of the small job, in halves of the budget.
const JOB_HALVES: u32 = 3;
/// How often a workload may be killed: see [`Race::ran`].
const KILLED_MAX: u32 = 5;
/// p50 of gms's faults as a multiple of that of swap on a disk, p99 of that of swap on zram.
const OF_DISK_MAX: f64 = 0.25;
const OF_ZRAM_MAX: f64 = 1.0;

/// One part of the comparison.
pub(super) struct Race<'a> {
    /// Begins the names of all rows.
    prefix: &'static str,
    effort: &'a Effort,
    programs: &'a Programs,
    /// Limit of all that is taken, and memory of the workload, in MiB.
    pub mib: (u32, u32),
    /// Faults measured in each run.
    pub faults: usize,
    subjects: Vec<Subject>,
    /// gms's `--local` in MiB, once it is settled.
    local: Cell<Option<u32>>,
}

/// A run that was killed each time.
struct Killed;

impl Race<'_> {
    /// Of `subjects`, the first of which is gms.
    pub(super) fn new<'a>(
        prefix: &'static str,
        (effort, programs): (&'a Effort, &'a Programs),
        mib: (u32, u32),
        faults: usize,
        subjects: Vec<Subject>,
    ) -> Race<'a> {
        Race { prefix, effort, programs, mib, faults, subjects, local: Cell::new(None) }
    }

    /// Measures each subject once.
    pub(super) fn run(&self, run: u32, report: &mut Report) -> Result<(), BenchError> {
        self.noise(report)?;
        let mut measured: Vec<(&'static str, Latency)> = Vec::new();
        for subject in rotated(&self.subjects, run) {
            let name = subject.name();
            let latency = report.run(name, |report| self.once(subject, run, report))?;
            measured.extend(latency.map(|latency| (name, latency)));
        }
        let prefix = self.prefix;
        let names = |begin: &str| -> Vec<String> {
            let names = self.subjects.iter().map(Subject::name);
            names.map(|name| format!("{prefix}{begin}, {name}")).collect()
        };
        report.rank(&format!("{prefix}p50 of faults"), &names("fault"));
        report.rank(&format!("{prefix}job"), &names("job"));
        let gms = measured.iter().find(|one| one.0 == Under::Gms.name());
        let Some((gms_name, gms)) = gms else { return Ok(()) };
        for (name, other) in measured.iter().filter(|one| one.0 != *gms_name) {
            let target = |under: Under, most| {
                let is_judged = prefix.is_empty() && *name == under.name();
                is_judged.then_some(Target::AtMost(most))
            };
            let (p50, p99) = (gms.p50 / other.p50, gms.p99 / other.p99);
            let row = |of: &str| format!("{prefix}{of}, gms / {name}");
            report.judged(&row("p50"), "x", p50, target(Under::Disk, OF_DISK_MAX));
            report.judged(&row("p99"), "x", p99, target(Under::Zram, OF_ZRAM_MAX));
        }
        Ok(())
    }

    /// What has neither gms nor a limit: a fault of the kernel's own, and the job.
    fn noise(&self, report: &mut Report) -> Result<(), BenchError> {
        if self.prefix.is_empty() {
            floor::zero_fill(self.effort, report)?;
        }
        let scratch = Scratch::new()?;
        let found = scratch.path("found.json");
        let line = self.job().command(&found)?;
        Room::Free.start(&mut Room::Free.command(&line))?.finish()?;
        let job: sort::Found = read(&found)?;
        let row = format!("{}job, no limit", self.prefix);
        report.figure(&row, "s", job.seconds);
        report.noise(&row);
        Ok(())
    }

    /// One subject: latency of its faults.
    fn once(
        &self,
        subject: &Subject,
        run: u32,
        report: &mut Report,
    ) -> Result<Latency, BenchError> {
        let (limit, mib) = self.mib;
        let name = subject.name();
        let pager =
            Pager::set_up(subject, self.programs.dir(), f64::from(mib), &mut report.machine)?;
        let setting = self.setting(&pager)?;
        let orders = self.fault_orders(u64::from(run) + 1);
        let (found, used, killed) = self.ran::<fault::Found>(&pager, setting, &orders)?;
        let found = found.map_err(|Killed| {
            let text = format!("was killed {KILLED_MAX} times for want of memory: see dmesg");
            BenchError::Refused(text)
        })?;
        let pool = pager.pool_mib()?;
        let (job, job_used, again) = self.ran::<sort::Found>(&pager, setting, &self.job())?;
        let peak = pager.peak_mib(used.charged_mib.max(job_used.charged_mib))?;
        let mut figure = |what: &str, unit: &str, value: f64| {
            report.figure(&format!("{}{name}: {what}", self.prefix), unit, value);
        };
        figure("--local or limit of the cgroup", "MiB", f64::from(setting));
        figure("peak of memory", "MiB", peak);
        figure("peak of memory / limit", "x", peak / f64::from(limit));
        if let Some(pool) = pool {
            figure("zram's pool, not charged", "MiB", pool);
        }
        self.check(subject, &found, used, &mut figure)?;
        let is_settled = pager.settles() && !self.effort.is_quick();
        if let Some(lower) = lowered(setting, peak, f64::from(limit)).filter(|_| is_settled) {
            self.local.set(Some(lower));
            let text = format!("{peak:.0} MiB were taken, which is above {limit}");
            return Err(BenchError::Refused(text));
        }
        if !matches!(subject, Subject::Gms) {
            figure("killed for want of memory, and run again", "x", f64::from(killed + again));
        }
        let prefix = self.prefix;
        let latency = found.samples()?.latency();
        report.latency(&format!("{prefix}fault, {name}"), latency);
        if let Ok(job) = job {
            report.figure(&format!("{prefix}job, {name}"), "s", job.seconds);
        }
        Ok(latency)
    }

    /// Whether the faults were what they should be.
    fn check(
        &self,
        subject: &Subject,
        found: &fault::Found,
        used: Used,
        figure: &mut impl FnMut(&str, &str, f64),
    ) -> Result<(), BenchError> {
        if let Some(stats) = used.gms {
            let stats: Stats = serde_json::from_value(stats)
                .map_err(|error| BenchError::Invalid(format!("gms --stats: {error}")))?;
            let counted = found.faults() + self.warm_up() as u64;
            return check_remote(
                &stats,
                counted,
                LOCAL_PERCENT_MAX[usize::from(self.effort.is_quick())],
            );
        }
        let major = found.major_percent();
        figure("faults which read from it", "%", major);
        // Pages read ahead need no read of their own.
        let must_read = !self.effort.is_quick() && !subject.reads_ahead();
        if must_read && major < MAJOR_PERCENT_MIN {
            let text = format!("only {major:.0} % of the faults read from {}", subject.name());
            return Err(BenchError::Refused(text));
        }
        Ok(())
    }

    /// gms's `--local`, or the limit of the cgroup, with which the limit is kept.
    fn setting(&self, pager: &Pager) -> Result<u32, BenchError> {
        let limit = self.mib.0;
        if !pager.settles() {
            return Ok(limit);
        }
        if let Some(known) = self.local.get() {
            return Ok(known);
        }
        // Brings programs and libraries into memory, which would be charged.
        self.ran::<sort::Found>(pager, limit, &Orders::Sort(sort::Orders { mib: 1 }))?.0.ok();
        let settled = settle(self.effort, f64::from(limit), f64::from(limit), |setting| {
            let (_, used, _) = self.ran::<fault::Found>(pager, setting, &self.fault_orders(0))?;
            Ok(Ok(used.charged_mib))
        })?;
        let setting = match settled {
            Settled::At(setting) => setting,
            Settled::Nowhere(_) if self.effort.is_quick() => limit.div_ceil(2),
            Settled::Nowhere(why) => {
                return Err(BenchError::Needs(format!("gms: {why}: choose a larger --local")));
            }
        };
        self.local.set(Some(setting));
        Ok(setting)
    }

    /// Touches before those that are measured: then clean pages have taken the place of all that
    /// the filling has left dirty.
    fn warm_up(&self) -> usize {
        WARM_UP_TIMES * pages(self.mib.0 as usize)
    }

    /// What is measured of each.
    pub(super) fn fault_orders(&self, seed: u64) -> Orders {
        Orders::Fault(fault::Orders {
            mib: self.mib.1 as usize,
            threads: 1,
            warm_up: self.warm_up(),
            measured: fault::Measured::Faults(self.faults as u64),
            seed,
            gates: Gates::default(),
            manner: fault::Manner::default(),
        })
    }

    fn job(&self) -> Orders {
        Orders::Sort(sort::Orders { mib: (JOB_HALVES * self.mib.0 / 2) as usize })
    }

    /// Runs a workload; also what it used, and how often the kernel killed it because it found no
    /// page to evict.
    ///
    /// Linux 6.18 does so now and then while swap is free (traced: 17 reclaims of nothing within 0.3 ms, no active page made inactive,
    /// as if the statistics of its lists of pages were old). That is no fault of the workload.
    fn ran<F: DeserializeOwned>(
        &self,
        pager: &Pager,
        setting: u32,
        orders: &Orders,
    ) -> Result<(Result<F, Killed>, Used, u32), BenchError> {
        let scratch = Scratch::new()?;
        let found = scratch.path("found.json");
        let line = orders.command(&found)?;
        let mut killed = 0;
        loop {
            memory::touch(self.mib.0 + self.mib.1)?;
            let room = pager.room(setting)?;
            let used = room.start(&mut room.command(&line))?.finish()?;
            match used.status.success() {
                true => return Ok((Ok(read(&found)?), used, killed)),
                false if used.late => {
                    return Err(failed(format!("was not done in {SECONDS_MAX} s")));
                }
                false if !used.starved => {
                    return Err(failed(format!("ended with {}", used.status)));
                }
                false => killed += 1,
            }
            if killed == KILLED_MAX {
                return Ok((Err(Killed), used, killed));
            }
        }
    }
}

fn failed(problem: String) -> BenchError {
    BenchError::Program { program: "the workload".into(), problem }
}
