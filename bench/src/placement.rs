//! Where the two ends of a measurement run, and how they wait for each other.

use clap::ValueEnum;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::error::{BenchError, Trying};

/// How an end waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Wait {
    /// In the kernel, until it is woken.
    Block,
    /// Asking again and again, giving the CPU to others in between.
    Yield,
    /// Asking again and again.
    Spin,
}

impl Wait {
    /// As the command line has it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Wait::Block => "block",
            Wait::Yield => "yield",
            Wait::Spin => "spin",
        }
    }

    /// One fruitless look is over.
    pub(crate) fn pause(self) {
        match self {
            Wait::Block => {}
            Wait::Yield => std::thread::yield_now(),
            Wait::Spin => std::hint::spin_loop(),
        }
    }
}

/// Two ends on CPUs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placement {
    /// For the report.
    pub name: &'static str,
    /// How both wait.
    pub wait: Wait,
    /// CPU of this end and of the other; `None`: where the scheduler likes.
    pub cpus: Option<(usize, usize)>,
}

impl Placement {
    /// Where the scheduler likes.
    pub(crate) const ANYWHERE: Placement =
        Placement { name: "anywhere, yielding", wait: Wait::Yield, cpus: None };
}

/// The placements to compare on this machine, the one of the ratios first. Those which need a second CPU are left out where there
/// is none.
pub(crate) fn placements() -> Result<Vec<Placement>, BenchError> {
    let one = cpus()?[0];
    let mut all = vec![
        Placement { name: "same CPU, blocking", wait: Wait::Block, cpus: Some((one, one)) },
        Placement { name: "same CPU, yielding", wait: Wait::Yield, cpus: Some((one, one)) },
        Placement::ANYWHERE,
    ];
    if let Some(apart) = two_cpus()? {
        let cpus = Some(apart);
        all.push(Placement { name: "other CPU, spinning", wait: Wait::Spin, cpus });
        all.push(Placement { name: "other CPU, blocking", wait: Wait::Block, cpus });
    }
    Ok(all)
}

/// Two CPUs, if there are so many.
pub(crate) fn two_cpus() -> Result<Option<(usize, usize)>, BenchError> {
    let cpus = cpus()?;
    Ok(cpus.get(1).map(|&two| (cpus[0], two)))
}

/// The CPUs that may be used: at least one.
fn cpus() -> Result<Vec<usize>, BenchError> {
    let allowed = sched_getaffinity(Pid::from_raw(0)).trying("cannot ask for the CPUs")?;
    Ok((0..CpuSet::count()).filter(|&cpu| allowed.is_set(cpu).unwrap_or(false)).collect())
}

/// The calling thread's CPUs; restored when dropped.
pub(crate) struct Pinned(CpuSet);

impl Pinned {
    /// Keeps the calling thread on `cpu`, if one is named.
    pub(crate) fn to(cpu: Option<usize>) -> Result<Pinned, BenchError> {
        let me = Pid::from_raw(0);
        let before = sched_getaffinity(me).trying("cannot ask for the CPUs")?;
        if let Some(cpu) = cpu {
            let mut set = CpuSet::new();
            set.set(cpu).trying("no such CPU")?;
            sched_setaffinity(me, &set).trying("cannot choose a CPU")?;
        }
        Ok(Pinned(before))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // It was allowed before, so it is now.
        let _ = sched_setaffinity(Pid::from_raw(0), &self.0);
    }
}
