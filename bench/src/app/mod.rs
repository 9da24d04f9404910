//! `gms-bench app`: programs as they are, with less and less memory of their own: under gms, and under the kernel's swap.

mod job;
mod program;
mod redis;

use std::collections::HashMap;

use crate::cli::{AppOptions, Under};
use crate::error::BenchError;
use crate::memory;
use crate::report::{Report, Target};
use crate::room::Room;
use crate::slow_down::{Memory, Run};
use crate::subject::{Pager, Settled, lowered, settle};
use crate::turn::rotated;
use job::{Ended, Job, Outcome};
use program::Inputs;

/// What takes longer in one run is not measured again in the next ones.
const LONG_S: f64 = 20.0;
/// The share at which the targets are set, in percent.
const JUDGED: u32 = 50;
/// Time under gms at that share, as a multiple of that under swap.
const TARGETS: [(Under, f64); 2] = [(Under::Zram, 1.3), (Under::Disk, 1.0)];
/// What gms may cost where the program has all its memory, in percent.
const COST_MAX: f64 = 1.0;

/// Measures.
pub(crate) fn run(options: &AppOptions, report: &mut Report) -> Result<(), BenchError> {
    let programs = options.programs();
    // First, as what is missing should be said at once.
    programs.iter().try_for_each(|program| program.find().map(drop))?;
    let mut inputs = Inputs::new()?;
    for program in programs {
        let job = program.prepare(options.mib(), &mut inputs)?;
        // The first one brings the program and its inputs into memory, which would be charged.
        job.run(Room::Free)?.done()?;
        let free = job.run(Room::Sized)?.done()?;
        let mut trial = Trial::new(options, program.name(), job, &free);
        for run in 0..options.effort.runs() {
            trial.run(run, report)?;
        }
    }
    Ok(())
}

/// A program's job in all rooms.
struct Trial<'a> {
    options: &'a AppOptions,
    name: &'static str,
    job: Job,
    /// Of the right result.
    digest: u64,
    /// Anonymous memory that it uses without a limit, and what the kernel needs for it, in MiB.
    anon_mib: f64,
    kernel_mib: f64,
    /// With which setting each keeps its limit: see [`settle`].
    settings: HashMap<(Under, u32), u32>,
    /// What cannot be measured here, and from which share on in percent.
    left_out: Vec<(Under, u32)>,
    /// What took long: see [`LONG_S`].
    long: Vec<(Under, u32)>,
}

/// One measured share of a run.
struct Measured {
    under: Under,
    share: u32,
    seconds: f64,
    memory: Memory,
    gms: Option<serde_json::Value>,
}

impl<'a> Trial<'a> {
    fn new(options: &'a AppOptions, name: &'static str, job: Job, free: &Outcome) -> Trial<'a> {
        let kernel_mib = free.charged_mib - free.anon_mib;
        Trial {
            options,
            name,
            job,
            digest: free.digest,
            anon_mib: free.anon_mib,
            kernel_mib,
            settings: HashMap::new(),
            left_out: Vec::new(),
            long: Vec::new(),
        }
    }

    /// Measures each room once, and without a limit before and after.
    fn run(&mut self, run: u32, report: &mut Report) -> Result<(), BenchError> {
        let before = self.free(report)?;
        let mut measured = Vec::new();
        for under in rotated(self.options.under(), run) {
            measured.extend(self.under(under, report)?);
        }
        let free_s = (before + self.free(report)?) / 2.0;
        self.compare(&measured, free_s, report);
        for Measured { under, share, seconds, memory, gms } in measured {
            report
                .slow_down((self.name, under.name(), share), Run { seconds, free_s, memory, gms });
        }
        Ok(())
    }

    /// gms beside the others, and beside no limit.
    fn compare(&self, measured: &[Measured], free_s: f64, report: &mut Report) {
        let at = |under, share| {
            let is = |one: &&Measured| (one.under, one.share) == (under, share);
            measured.iter().find(is).map(|one| one.seconds)
        };
        let name = self.name;
        let others = self.options.under().into_iter().filter(|under| *under != Under::Gms);
        for under in others {
            for share in self.options.shares().into_iter().filter(|share| *share < 100) {
                let (Some(gms), Some(other)) = (at(Under::Gms, share), at(under, share)) else {
                    continue;
                };
                let target = TARGETS.iter().find(|target| (target.0, JUDGED) == (under, share));
                let row = format!("{name}, {share} % local: gms / {}", under.name());
                let target = target.map(|target| Target::AtMost(target.1));
                report.judged(&row, "x", gms / other, target);
            }
        }
        if let Some(gms) = at(Under::Gms, 100) {
            let row = format!("{name}, 100 % local: cost of gms");
            let target = Some(Target::AtMost(COST_MAX));
            report.judged(&row, "%", (gms / free_s - 1.0) * 100.0, target);
        }
    }

    /// Runs the job in memory that the machine has, also that of an agent.
    fn run_in(&self, room: Room) -> Result<Ended, BenchError> {
        memory::touch(2 * self.options.mib())?;
        self.job.run(room)
    }

    /// Measures it without a limit: its time in s.
    fn free(&self, report: &mut Report) -> Result<f64, BenchError> {
        let free = self.run_in(Room::Free)?.done()?;
        self.check(&free, "without a limit")?;
        let row = format!("{}, no limit", self.name);
        report.figure(&row, "s", free.seconds);
        report.noise(&row);
        report.figure(&format!("{row}: anonymous"), "MiB", self.anon_mib);
        report.figure(&format!("{row}: charged"), "MiB", free.charged_mib);
        Ok(free.seconds)
    }

    /// Measures all shares that can be measured.
    fn under(&mut self, under: Under, report: &mut Report) -> Result<Vec<Measured>, BenchError> {
        let is_left_out =
            |share: u32| self.left_out.iter().any(|out| out.0 == under && share <= out.1);
        let is_over = |share: &u32| is_left_out(*share) || self.long.contains(&(under, *share));
        let shares = self.options.shares().into_iter().filter(|share| !is_over(share));
        let shares: Vec<u32> = shares.collect();
        let mut measured = Vec::new();
        if shares.is_empty() {
            return Ok(measured);
        }
        let subject = under.subject(&self.options.disk);
        let programs = self.options.programs.dir();
        let pager = match Pager::set_up(&subject, programs, self.anon_mib, &mut report.machine) {
            Ok(pager) => pager,
            Err(BenchError::Needs(why)) => {
                self.leave_out(under, 100, &why, report);
                return Ok(measured);
            }
            Err(error) => return Err(error),
        };
        for share in shares {
            let name = format!("{}, {} at {share} %", self.name, under.name());
            match report.run(&name, |report| self.one(&pager, under, share, report))? {
                Some(Some(one)) => measured.push(one),
                Some(None) => break,
                // It was refused.
                None => {}
            }
        }
        Ok(measured)
    }

    /// Measures one share; `None` if it was killed, or cannot be had within the limit.
    fn one(
        &mut self,
        pager: &Pager,
        under: Under,
        share: u32,
        report: &mut Report,
    ) -> Result<Option<Measured>, BenchError> {
        let limit_mib = (self.kernel_mib + self.anon_mib * f64::from(share) / 100.0).ceil();
        let Some(setting) = self.setting(pager, under, share, limit_mib, report)? else {
            return Ok(None);
        };
        let outcome = match self.run_in(pager.room(setting)?)? {
            Ended::Done(outcome) => outcome,
            Ended::Killed(why) => {
                if under == Under::Gms {
                    report.failures.push(format!("{} under gms at {share} % {why}", self.name));
                }
                self.leave_out(under, share, &why, report);
                return Ok(None);
            }
        };
        let name = format!("{}, {} at {share} %", self.name, under.name());
        self.check(&outcome, &name)?;
        if outcome.starved > 0 {
            let row = format!("{name}: killed for want of memory, and run again");
            report.figure(&row, "x", f64::from(outcome.starved));
        }
        let Outcome { seconds, charged_mib, gms, .. } = outcome;
        let peak_mib = pager.peak_mib(charged_mib)?;
        let (set_mib, pool_mib) = (f64::from(setting), pager.pool_mib()?);
        eprintln!("{name}: {seconds:.2} s, {peak_mib:.0} of {limit_mib:.0} MiB");
        let is_quick = self.options.effort.is_quick();
        let lower = lowered(setting, peak_mib, limit_mib).filter(|_| pager.settles() && !is_quick);
        if let Some(lower) = lower {
            self.settings.insert((under, share), lower);
            let text = format!("{peak_mib:.0} MiB were taken, which is above {limit_mib:.0}");
            return Err(BenchError::Refused(text));
        }
        if seconds > LONG_S {
            self.long.push((under, share));
        }
        let memory = Memory { limit_mib, set_mib, peak_mib, pool_mib };
        Ok(Some(Measured { under, share, seconds, memory, gms }))
    }

    /// The setting with which `limit_mib` is kept. It is looked for once, in runs that do not count.
    fn setting(
        &mut self,
        pager: &Pager,
        under: Under,
        share: u32,
        limit_mib: f64,
        report: &mut Report,
    ) -> Result<Option<u32>, BenchError> {
        if !pager.settles() {
            return Ok(Some(limit_mib as u32));
        }
        if let Some(known) = self.settings.get(&(under, share)) {
            return Ok(Some(*known));
        }
        let first_mib = if under == Under::Gms { limit_mib - self.kernel_mib } else { limit_mib };
        let settled = settle(&self.options.effort, limit_mib, first_mib, |setting| {
            match self.run_in(pager.room(setting)?)? {
                Ended::Done(outcome) => pager.peak_mib(outcome.charged_mib).map(Ok),
                Ended::Killed(why) => Ok(Err(why)),
            }
        })?;
        let setting = match settled {
            Settled::At(setting) => setting,
            // In so little memory nothing fits that is more than a test of the benchmark.
            Settled::Nowhere(_) if self.options.effort.is_quick() => (limit_mib * 0.75) as u32,
            Settled::Nowhere(why) => {
                self.leave_out(under, share, &why, report);
                return Ok(None);
            }
        };
        self.settings.insert((under, share), setting);
        Ok(Some(setting))
    }

    /// A result must be the same in all rooms.
    fn check(&self, outcome: &Outcome, name: &str) -> Result<(), BenchError> {
        match outcome.digest == self.digest {
            true => Ok(()),
            false => Err(BenchError::WrongBytes(format!("{}: the result {name}", self.name))),
        }
    }

    /// `under` is not measured again with this share or less.
    fn leave_out(&mut self, under: Under, share: u32, why: &str, report: &mut Report) {
        self.left_out.push((under, share));
        let note =
            format!("{} under {}, {share} % and less, is left out: {why}", self.name, under.name());
        eprintln!("gms-bench: {note}");
        report.notes.push(note);
    }
}
