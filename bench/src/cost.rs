//! `gms-bench cost`: CPU time of all processes for a remote fault, a page scanned and a page written back, with one thread and with several,
//! beside that of the floors.
//!
//! The workload waits at a gate before it is measured and at another one afterwards; in between nothing ends, so that /proc
//! knows the time of each thread.

use std::fs;
use std::ops::Sub;

use crate::cli::{CostOptions, Effort, PageSize, Protocol};
use crate::error::BenchError;
use crate::fault::WARM_UP_TIMES;
use crate::floor::bulk::{self, Bulk};
use crate::floor::uffd::{Answer, Handler, faults};
use crate::floor::{self, quic, quinn, udp};
use crate::gate::{Gate, Gates};
use crate::memory;
use crate::network::Network;
use crate::placement::{Placement, placements};
use crate::procfs::cpu_us;
use crate::region::pages;
use crate::report::{Report, Target};
use crate::scratch::Scratch;
use crate::stack::{Session, Stack};
use crate::turn::rotated;
use crate::workload::{Orders, dirty, fault, scan};

/// Threads of the workload.
const THREADS: [usize; 2] = [1, 8];
/// Samples of a floor in each run, usual and `--quick`.
const FLOORS: (usize, usize) = (20_000, 300);
/// Exchanges of 64 pages of a floor in each run.
const BULK: (usize, usize) = (4000, 100);
/// Faults of each run, all threads together.
const FAULTS: (usize, usize) = (40_000, 2_000);
/// What is dirtied, as a multiple of the memory that is faulted.
const DIRTY_TIMES: u32 = 4;
/// Most CPU time of a fault, of a page scanned and of a page written back, in us.
const FAULT_MAX: f64 = 35.0;
const SCAN_MAX: f64 = 7.0;
const WRITE_BACK_MAX: f64 = 3.0;

/// What a workload does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Job {
    Fault,
    Scan,
    WriteBack,
}

/// CPU time in us.
#[derive(Clone, Copy, Debug)]
struct Cpu {
    /// Of the program, and of the evictor that gms has in it.
    program: f64,
    /// Of the processes of `gms run`.
    pager: f64,
    agents: f64,
}

impl Cpu {
    fn now(stack: &Stack, session: &Session) -> Cpu {
        let is_pager = |pid: &u32| {
            let program = fs::read_link(format!("/proc/{pid}/exe"));
            program.is_ok_and(|program| program.file_name() == Some("gms".as_ref()))
        };
        let (pager, program): (Vec<u32>, Vec<u32>) =
            session.pids().into_iter().partition(|pid| is_pager(pid));
        let sum = |pids: Vec<u32>| pids.into_iter().map(cpu_us).sum();
        Cpu { program: sum(program), pager: sum(pager), agents: sum(stack.agent_pids()) }
    }

    fn all(&self) -> f64 {
        self.program + self.pager + self.agents
    }
}

impl Sub for Cpu {
    type Output = Cpu;

    fn sub(self, before: Cpu) -> Cpu {
        Cpu {
            program: self.program - before.program,
            pager: self.pager - before.pager,
            agents: self.agents - before.agents,
        }
    }
}

/// Measures.
pub(crate) fn run(
    options: &CostOptions,
    network: &Network,
    report: &mut Report,
) -> Result<(), BenchError> {
    let jobs = [Job::Fault, Job::Scan, Job::WriteBack];
    let subjects = || jobs.into_iter().flat_map(|job| THREADS.map(|threads| (job, threads)));
    for run in 0..options.effort.runs() {
        floor::zero_fill(&options.effort, report)?;
        report.run("the floors", |report| floors(network, &options.effort, report))?;
        for (job, threads) in rotated(subjects(), run) {
            let name = format!("{}, threads: {threads}", job.name());
            let seed = u64::from(run) + 1;
            report.run(&name, |report| {
                measure(options, network, (job, threads), seed, &name, report)
            })?;
        }
    }
    Ok(())
}

/// The least that the parts cost: on one CPU, where nobody spins.
fn floors(network: &Network, effort: &Effort, report: &mut Report) -> Result<(), BenchError> {
    let keys = Scratch::new()?;
    quic::make_keys(keys.as_ref())?;
    let (blocking, count) = (&placements()?[0], effort.count(FLOORS.0, FLOORS.1));
    let mut figure = |name: &str, cpu_us: f64| {
        report.figure(&format!("floor: {name}, {}: CPU", blocking.name), "us", cpu_us);
    };
    let faults = faults(blocking, Handler::Thread, Answer::Copy, count)?.cpu_us;
    figure("uffd fault + COPY", faults);
    figure("UDP 128/4224 B", udp::exchanges(network, blocking, Protocol::Udp, count)?.cpu_us);
    figure("QUIC 128/4224 B", quic::exchanges(network, blocking, keys.as_ref(), count)?.cpu_us);
    let quinn = quinn::exchanges(network, blocking, keys.as_ref(), count)?.cpu_us;
    figure("QUIC by the quinn crate, 128/4224 B", quinn);
    for bulk in [Bulk::Get, Bulk::Put] {
        figure(
            &format!("{}, a page", bulk.name()),
            bulk_us(network, effort, blocking, &keys, bulk)?,
        );
    }
    Ok(())
}

fn bulk_us(
    network: &Network,
    effort: &Effort,
    placement: &Placement,
    keys: &Scratch,
    bulk: Bulk,
) -> Result<f64, BenchError> {
    let count = effort.count(BULK.0, BULK.1);
    Ok(bulk::throughput(network, placement, keys.as_ref(), bulk, count)?.cpu_us)
}

fn measure(
    options: &CostOptions,
    network: &Network,
    (job, threads): (Job, usize),
    seed: u64,
    name: &str,
    report: &mut Report,
) -> Result<(), BenchError> {
    let (local, all) = options.paging.mib(&options.effort, 64);
    let mib = if job == Job::WriteBack { DIRTY_TIMES * all } else { all };
    memory::touch(2 * local + mib)?;
    let _losing = network.losing()?;
    let programs = options.paging.programs.dir();
    let stack = Stack::start_over(network, None, programs, 1, local + mib)?;
    let (before, after) = (stack.path("before"), stack.path("after"));
    let closed = (Gate::new(&before)?, Gate::new(&after)?);
    let gates = Gates { before: Some(before), after: Some(after) };
    let orders = job.orders(options, (local, mib), threads, seed, gates);
    let mut session = stack.spawn(PageSize::Small, local, &orders)?;
    let cpu = between(&stack, &mut session, closed)?;
    let (count, seconds) = job.found(session)?;
    if count == 0 {
        return Err(BenchError::Refused(format!("{name}: no page")));
    }
    let each = |us: f64| us / count as f64;
    // The bound of a fault is for several threads: one waits for the other end most of the time.
    let judged = job != Job::Fault || threads > 1;
    let target = judged.then_some(Target::AtMost(job.most()));
    report.judged(&format!("{name}: CPU of all processes"), "us", each(cpu.all()), target);
    report.figure(&format!("{name}: CPU of the program"), "us", each(cpu.program));
    report.figure(&format!("{name}: CPU of gms run"), "us", each(cpu.pager));
    report.figure(&format!("{name}: CPU of gms-agent"), "us", each(cpu.agents));
    report.figure(&format!("{name}: rate"), "1/s", count as f64 / seconds);
    Ok(())
}

/// CPU time from one gate to the other.
fn between(
    stack: &Stack,
    session: &mut Session,
    (before, after): (Gate, Gate),
) -> Result<Cpu, BenchError> {
    let waiting = before.gather(1, || session.check_alive())?;
    let start = Cpu::now(stack, session);
    waiting.open()?;
    let waiting = after.gather(1, || session.check_alive())?;
    let cpu = Cpu::now(stack, session) - start;
    waiting.open()?;
    Ok(cpu)
}

impl Job {
    fn name(self) -> &'static str {
        match self {
            Job::Fault => "remote fault",
            Job::Scan => "page scanned",
            Job::WriteBack => "page written back",
        }
    }

    fn most(self) -> f64 {
        match self {
            Job::Fault => FAULT_MAX,
            Job::Scan => SCAN_MAX,
            Job::WriteBack => WRITE_BACK_MAX,
        }
    }

    fn orders(
        self,
        options: &CostOptions,
        (local, mib): (u32, u32),
        threads: usize,
        seed: u64,
        gates: Gates,
    ) -> Orders {
        let mib = mib as usize;
        let faults = options.effort.count(FAULTS.0, FAULTS.1).div_ceil(threads);
        match self {
            Job::Fault => Orders::Fault(fault::Orders {
                mib,
                threads,
                warm_up: (WARM_UP_TIMES * pages(local as usize)).div_ceil(threads),
                measured: fault::Measured::Faults(faults as u64),
                seed,
                gates,
                manner: fault::Manner::default(),
            }),
            Job::Scan => {
                Orders::Scan(scan::Orders { mib, threads, stride: 1, shuffled: false, gates })
            }
            Job::WriteBack => {
                let untimed_mib = local as usize;
                Orders::Dirty(dirty::Orders { mib, untimed_mib, threads, gates })
            }
        }
    }

    /// How many faults or pages were measured, and the seconds that they took.
    fn found(self, session: Session) -> Result<(u64, f64), BenchError> {
        match self {
            Job::Fault => {
                let (found, _): (fault::Found, _) = session.finish()?;
                Ok((found.faults(), found.seconds))
            }
            Job::Scan => {
                let (found, _): (scan::Found, _) = session.finish()?;
                Ok((found.absent as u64, found.seconds))
            }
            Job::WriteBack => {
                let (found, _): (dirty::Found, _) = session.finish()?;
                Ok((found.evicted as u64, found.seconds))
            }
        }
    }
}
