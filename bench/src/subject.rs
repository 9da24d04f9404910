//! What pages programs, each with the same memory.
//!
//! Memory is what the cgroup of a program is charged at most: anonymous memory, page tables and all
//! else that the kernel needs for it, and under gms all processes of gms on this machine. Swap is
//! held to it by the cgroup's limit. gms limits the program's anonymous memory only, so its
//! `--local` is lowered until all together is within the limit; zram's pool is charged to nobody,
//! so where it is to count the cgroup's limit is lowered until both are: see [`settle`].

use std::path::{Path, PathBuf};

use crate::cli::{Effort, Under};
use crate::error::BenchError;
use crate::machine::{Machine, disk};
use crate::room::Room;
use crate::stack::Stack;
use crate::swap::{Backing, Readahead, Swap};

/// Swap is so many times a program's memory, so that it is less than half full: see [`Swap::on`].
const SWAP_TIMES: f64 = 3.0;
/// The same of the agent.
const AGENT_TIMES: f64 = 2.0;
/// Runs in which a setting is looked for, usual and `--quick`: the latter shows that a setting is tried, not that one is found.
const TRIES: (usize, usize) = (6, 1);
/// Where a peak must lie, as a multiple of the limit, for its setting to be taken.
const FITS: (f64, f64) = (0.95, 1.0);
/// A run that takes more than this, as a multiple of the limit, is refused.
const REFUSED: f64 = 1.02;
/// Least setting, as a multiple of the limit.
const SETTING_MIN: f64 = 0.2;
/// Least `--local` that gms takes.
const LOCAL_MIN_MIB: u32 = 4;
/// Least growth of the peak with the setting that is reckoned with.
const SLOPE_MIN: f64 = 0.3;

impl Under {
    /// For the report.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Under::Gms => "gms",
            Under::Zram => "zram swap",
            Under::ZramReadahead => "zram swap, readahead",
            Under::ZramCharged => "zram swap, pool charged",
            Under::Disk => "disk swap",
            Under::DiskReadahead => "disk swap, readahead",
        }
    }

    /// With swap files in the directory `disk`.
    pub(crate) fn subject(self, disk: &Path) -> Subject {
        let (backing, readahead) = match self {
            Under::Gms => return Subject::Gms,
            Under::Zram | Under::ZramCharged => (Backing::Zram, Readahead::None),
            Under::ZramReadahead => (Backing::Zram, Readahead::Default),
            Under::Disk => (Backing::Disk(disk.to_owned()), Readahead::None),
            Under::DiskReadahead => (Backing::Disk(disk.to_owned()), Readahead::Default),
        };
        let charged = self == Under::ZramCharged;
        Subject::Swap { name: self.name(), backing, readahead, charged }
    }
}

/// What pages programs on any machine.
#[derive(Clone, Debug)]
pub(crate) enum Subject {
    /// gms, with an agent of its own.
    Gms,
    /// The kernel's swap.
    Swap {
        /// For the report.
        name: &'static str,
        /// What it writes to.
        backing: Backing,
        /// What it reads besides.
        readahead: Readahead,
        /// Whether zram's pool counts.
        charged: bool,
    },
}

impl Subject {
    /// Both ways to read from a block device.
    pub(crate) fn device([plain, ahead]: [&'static str; 2], path: PathBuf) -> [Subject; 2] {
        [(plain, Readahead::None), (ahead, Readahead::Default)].map(|(name, readahead)| {
            Subject::Swap {
                name,
                backing: Backing::Device(path.clone()),
                readahead,
                charged: false,
            }
        })
    }

    /// For the report.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Subject::Gms => Under::Gms.name(),
            Subject::Swap { name, .. } => name,
        }
    }

    /// Whether pages come that no fault asked for.
    pub(crate) fn reads_ahead(&self) -> bool {
        matches!(self, Subject::Swap { readahead: Readahead::Default, .. })
    }
}

/// A subject that is set up.
pub(crate) enum Pager {
    /// gms on these agents.
    Gms(Stack),
    /// Swap; whether zram's pool counts.
    Swap(Swap, bool),
}

impl Pager {
    /// Sets up `subject` for programs of `mib` MiB.
    pub(crate) fn set_up(
        subject: &Subject,
        programs: Option<&Path>,
        mib: f64,
        machine: &mut Machine,
    ) -> Result<Pager, BenchError> {
        let Subject::Swap { backing, readahead, charged, .. } = subject else {
            return Ok(Pager::Gms(Stack::start(programs, 1, (AGENT_TIMES * mib).ceil() as u32)?));
        };
        let swap = Swap::on(backing, *readahead, (SWAP_TIMES * mib).ceil() as u32)?;
        if let Backing::Disk(dir) = backing {
            machine.disk = disk(dir);
        }
        if let Some(algorithm) = swap.algorithm()? {
            machine.zram = algorithm;
        }
        Ok(Pager::Swap(swap, *charged))
    }

    /// A room for a run, with gms's `--local` or the limit of the cgroup at `setting` MiB.
    pub(crate) fn room(&self, setting: u32) -> Result<Room<'_>, BenchError> {
        match self {
            Pager::Gms(stack) => Ok(Room::Gms(stack, setting)),
            Pager::Swap(swap, _) => swap.forget_pool().map(|()| Room::Swap(setting)),
        }
    }

    /// Whether the setting must be looked for by which it keeps a limit.
    pub(crate) fn settles(&self) -> bool {
        matches!(self, Pager::Gms(_) | Pager::Swap(_, true))
    }

    /// zram's pool in the last run, in MiB.
    pub(crate) fn pool_mib(&self) -> Result<Option<f64>, BenchError> {
        match self {
            Pager::Gms(_) => Ok(None),
            Pager::Swap(swap, _) => swap.pool_mib(),
        }
    }

    /// What the last run took in MiB, if its cgroup was charged `charged_mib`.
    pub(crate) fn peak_mib(&self, charged_mib: f64) -> Result<f64, BenchError> {
        let pool = if let Pager::Swap(_, true) = self { self.pool_mib()? } else { None };
        Ok(charged_mib + pool.unwrap_or(0.0))
    }
}

/// What a setting must be lowered to after a run in which `peak_mib` were taken; `None` if that was
/// within the limit. gms can overshoot in one run and not in another.
pub(crate) fn lowered(setting: u32, peak_mib: f64, limit_mib: f64) -> Option<u32> {
    let excess = (peak_mib - limit_mib).ceil() as u32;
    (peak_mib > REFUSED * limit_mib).then(|| setting.saturating_sub(excess).max(LOCAL_MIN_MIB))
}

/// What came of looking for a setting.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Settled {
    /// It is this, in MiB.
    At(u32),
    /// There is none, for this reason.
    Nowhere(String),
}

/// Looks for the setting in MiB with which a peak is just within `limit_mib`, from `first_mib` on.
/// `peak` runs with a setting and says what was taken at most, in MiB, or why it was killed.
///
/// The first correction is by what was too much: gms's own memory hardly depends on `--local`. A
/// pool grows by a part of what the limit shrinks by, so that further ones go by the secant.
pub(crate) fn settle(
    effort: &Effort,
    limit_mib: f64,
    first_mib: f64,
    mut peak: impl FnMut(u32) -> Result<Result<f64, String>, BenchError>,
) -> Result<Settled, BenchError> {
    let mut setting = first_mib;
    let mut last: Option<(f64, f64)> = None;
    let mut best = None;
    let mut seen = String::new();
    for _ in 0..effort.count(TRIES.0, TRIES.1) {
        if setting < (SETTING_MIN * limit_mib).max(LOCAL_MIN_MIB.into()) {
            break;
        }
        let at = setting.floor();
        let now = match peak(at as u32)? {
            Ok(now) => now,
            Err(why) => {
                seen = why;
                break;
            }
        };
        seen = format!("{now:.0} MiB were taken at {at:.0} MiB");
        let fits = now <= FITS.1 * limit_mib;
        if fits {
            best = best.max(Some(at as u32));
        }
        // What needs less than it may have has no reason to take more.
        if fits && (last.is_none() || now >= FITS.0 * limit_mib) {
            break;
        }
        let slope = last.map_or(1.0, |(before, then)| (now - then) / (at - before));
        let slope = if slope.is_finite() { slope.clamp(SLOPE_MIN, 1.0) } else { 1.0 };
        last = Some((at, now));
        setting = at - (now - limit_mib) / slope;
    }
    let none = || Settled::Nowhere(format!("{limit_mib:.0} MiB cannot be kept: {seen}"));
    Ok(best.map_or_else(none, Settled::At))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What [`settle`] finds, and after how many runs, where `peak` gives what is taken.
    fn settled(peak: impl Fn(f64) -> f64) -> (Settled, u32) {
        let mut runs = 0;
        let settled = settle(&Effort::usual(), 100.0, 100.0, |setting| {
            runs += 1;
            Ok(Ok(peak(f64::from(setting))))
        });
        (settled.expect("no error"), runs)
    }

    #[test]
    fn a_setting_is_found_that_keeps_the_limit() {
        assert_eq!(settled(|_| 60.0), (Settled::At(100), 1), "a program that needs less");
        assert_eq!(settled(|local| local + 12.0), (Settled::At(88), 2), "gms");
        // A program of 200 MiB which compresses to a quarter: 200 / 3 and the pool are 100.
        let (found, runs) = settled(|limit| limit + (200.0 - limit) / 4.0);
        assert!(matches!(found, Settled::At(65..=68)) && runs <= 4, "{found:?} in {runs}");
        let (found, _) = settled(|limit| limit + (200.0 - limit) * 0.6);
        assert!(matches!(found, Settled::Nowhere(_)), "the pool alone takes the most: {found:?}");
        assert_eq!((lowered(88, 101.5, 100.0), lowered(88, 103.2, 100.0)), (None, Some(84)));
        let killed = settle(&Effort::usual(), 100.0, 100.0, |_| Ok(Err("was killed".into())))
            .expect("no error");
        assert_eq!(killed, Settled::Nowhere("100 MiB cannot be kept: was killed".into()));
    }
}
