//! `gms-bench app`: programs as they are, with less and less memory of their own: under gms, and under the kernel's swap.

mod job;
mod program;
mod redis;
mod room;

use clap::ValueEnum;

use crate::cli::AppOptions;
use crate::error::BenchError;
use crate::memory;
use crate::report::{Report, Target};
use crate::slow_down::Run;
use crate::stack::Stack;
use crate::swap::{Backing, Swap};
use job::{Ended, Job, Outcome};
use program::Inputs;
pub use program::Program;
use room::Room;

/// Swap is so many times a program's memory, so that it is less than half full: see [`Swap::on`].
const SWAP_TIMES: f64 = 3.0;
/// The same of the agent.
const AGENT_TIMES: f64 = 2.0;
/// What takes longer in one run is not measured again in the next ones.
const LONG_S: f64 = 8.0;
/// The share at which gms is compared with others, in percent.
const COMPARED: u32 = 50;
/// Time under gms at that share, as a multiple of that under swap on a disk and on zram.
const OF_DISK_MAX: f64 = 1.0;
const OF_ZRAM_MAX: f64 = 1.3;
/// What gms may cost where the program has all its memory, in percent.
const COST_MAX: f64 = 1.0;

/// What pages a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Under {
    /// gms, with an agent of its own.
    Gms,
    /// Swap to a file on a disk.
    Disk,
    /// Swap to compressed memory.
    Zram,
}

impl Under {
    fn name(self) -> &'static str {
        match self {
            Under::Gms => "gms",
            Under::Disk => "disk swap",
            Under::Zram => "zram swap",
        }
    }
}

/// Measures.
pub fn run(options: &AppOptions, report: &mut Report) -> Result<(), BenchError> {
    let programs = options.programs();
    // First, as what is missing should be said at once.
    programs.iter().try_for_each(|program| program.find().map(drop))?;
    let mut inputs = Inputs::new()?;
    for program in programs {
        let job = program.prepare(options.mib(), &mut inputs)?;
        let warm = job.run(Room::Free)?.done()?;
        let (name, digest) = (program.name(), warm.digest);
        let mut trial =
            Trial { options, name, job, digest, left_out: Vec::new(), long: Vec::new() };
        for _ in 0..options.effort.runs() {
            trial.run(report)?;
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
    /// What cannot be measured here, and from which share on in percent.
    left_out: Vec<(Under, u32)>,
    /// What took long: see [`LONG_S`].
    long: Vec<(Under, u32)>,
}

impl Trial<'_> {
    /// Measures each room once.
    fn run(&mut self, report: &mut Report) -> Result<(), BenchError> {
        let (name, free) = (self.name, self.free(report)?);
        let gms = self.under(Under::Gms, &free, report)?;
        for (under, most) in [(Under::Zram, OF_ZRAM_MAX), (Under::Disk, OF_DISK_MAX)] {
            let other = self.under(under, &free, report)?;
            if let (Some(gms), Some(other)) = (at(&gms, COMPARED), at(&other, COMPARED)) {
                let row = format!("{name}, {COMPARED} % local: gms / {}", under.name());
                report.judged(&row, "x", gms / other, Some(Target::AtMost(most)));
            }
        }
        if let Some(gms) = at(&gms, 100) {
            // The one before may have been luckier.
            let again = self.free(report)?.seconds;
            let cost = (2.0 * gms / (free.seconds + again) - 1.0) * 100.0;
            let row = format!("{name}, 100 % local: cost of gms");
            report.judged(&row, "%", cost, Some(Target::AtMost(COST_MAX)));
        }
        Ok(())
    }

    /// Runs the job in memory that the machine has, also that of an agent.
    fn run_in(&self, room: Room) -> Result<Ended, BenchError> {
        memory::touch(2 * self.options.mib())?;
        self.job.run(room)
    }

    /// Measures it without a limit.
    fn free(&self, report: &mut Report) -> Result<Outcome, BenchError> {
        let free = self.run_in(Room::Free)?.done()?;
        self.check(&free, "without a limit")?;
        report.figure(&format!("{}, no limit", self.name), "s", free.seconds);
        report.figure(&format!("{}, no limit: resident", self.name), "MiB", free.anon_mib);
        Ok(free)
    }

    /// Measures all shares; the time in s of each that could be measured.
    fn under(
        &mut self,
        under: Under,
        free: &Outcome,
        report: &mut Report,
    ) -> Result<Vec<(u32, f64)>, BenchError> {
        let shares = if self.options.is_asked(under) { self.options.shares() } else { vec![] };
        let is_left_out =
            |share: u32| self.left_out.iter().any(|out| out.0 == under && share <= out.1);
        let is_over = |share: &u32| is_left_out(*share) || self.long.contains(&(under, *share));
        let shares: Vec<u32> = shares.into_iter().filter(|share| !is_over(share)).collect();
        let mut times = Vec::new();
        if shares.is_empty() {
            return Ok(times);
        }
        let swap_mib = (SWAP_TIMES * free.anon_mib).ceil() as u32;
        let swap = match under {
            Under::Gms => None,
            Under::Disk => Some(Swap::on(&Backing::Disk(self.options.disk.clone()), swap_mib)),
            Under::Zram => Some(Swap::on(&Backing::Zram, swap_mib)),
        };
        let _swap = match swap.transpose() {
            Ok(swap) => swap,
            Err(BenchError::Needs(why)) => {
                self.leave_out(under, 100, &why, report);
                return Ok(times);
            }
            Err(error) => return Err(error),
        };
        let agent_mib = (AGENT_TIMES * free.anon_mib).ceil() as u32;
        let stack = match under {
            Under::Gms => Some(Stack::start(self.options.programs.dir(), 1, agent_mib)?),
            Under::Disk | Under::Zram => None,
        };
        for share in shares {
            let budget = free.anon_mib * f64::from(share) / 100.0;
            let room = match &stack {
                Some(stack) => Room::Gms(stack, budget.ceil() as u32),
                // What the kernel needs besides is not part of the share.
                None => Room::Swap((free.charged_mib - free.anon_mib + budget).ceil() as u32),
            };
            match self.one(under, share, budget, room, free, report)? {
                Some(seconds) => times.push((share, seconds)),
                None => break,
            }
        }
        Ok(times)
    }

    /// Measures one share: its time in s, or `None` if it was killed.
    fn one(
        &mut self,
        under: Under,
        share: u32,
        budget_mib: f64,
        room: Room,
        free: &Outcome,
        report: &mut Report,
    ) -> Result<Option<f64>, BenchError> {
        let outcome = match self.run_in(room)? {
            Ended::Killed(why) if under != Under::Gms => {
                self.leave_out(under, share, &why, report);
                return Ok(None);
            }
            ended => ended.done()?,
        };
        let name = format!("{}, {} at {share} %", self.name, under.name());
        self.check(&outcome, &name)?;
        if outcome.starved > 0 {
            let row = format!("{name}: killed for want of memory, and run again");
            report.figure(&row, "x", f64::from(outcome.starved));
        }
        let Outcome { seconds, anon_mib, gms, .. } = outcome;
        eprintln!("{name}: {seconds:.2} s, {:.2} x", seconds / free.seconds);
        let run = Run { seconds, free_s: free.seconds, budget_mib, peak_mib: anon_mib, gms };
        report.slow_down((self.name, under.name(), share), run);
        if seconds > LONG_S {
            self.long.push((under, share));
        }
        Ok(Some(seconds))
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

fn at(times: &[(u32, f64)], share: u32) -> Option<f64> {
    times.iter().find(|time| time.0 == share).map(|time| time.1)
}
