//! `gms-bench scale`: more threads, more pagers, more agents.

use crate::cli::{Effort, PageSize, ScaleOptions};
use crate::error::BenchError;
use crate::fault::{LOCAL_PERCENT_MAX, WARM_UP_TIMES};
use crate::gate::Gate;
use crate::memory;
use crate::region::pages;
use crate::report::{Report, Target};
use crate::samples::Samples;
use crate::stack::{Session, Stack};
use crate::workload::Orders;
use crate::workload::fault::{self as workload, Found};

/// How many of each, usual and `--quick`.
const COUNTS: [&[usize]; 2] = [&[1, 2, 4, 8], &[1, 2]];
/// The count which the targets are for.
const JUDGED: usize = 8;
/// Seconds measured of each subject, usual and `--quick`.
const SECONDS: [f64; 2] = [2.0, 0.2];
/// What 8 threads should reach, as a multiple of one.
const THREADS_MIN: f64 = 2.5;
/// What 8 pagers on one agent should reach together, as a multiple of one.
const PAGERS_MIN: f64 = 1.0;
/// Bounds of a pager's share, as a multiple of the fair one.
const SHARE: (f64, f64) = (0.8, 1.2);

/// One subject.
struct Subject {
    threads: usize,
    pagers: usize,
    agents: usize,
}

/// What came out.
struct Rates {
    /// Faults/s of each pager.
    each: Vec<f64>,
    samples: Samples,
}

impl Rates {
    fn total(&self) -> f64 {
        self.each.iter().sum()
    }
}

/// Measures.
pub fn run(options: &ScaleOptions, report: &mut Report) -> Result<(), BenchError> {
    let counts = COUNTS[usize::from(options.effort.is_quick())];
    for run in 0..options.effort.runs() {
        let seed = u64::from(run) + 1;
        let mut measure = |what: &str, threads, pagers, agents| {
            let subject = Subject { threads, pagers, agents };
            let rates = measure(options, &subject, seed)?;
            report.latency(&format!("remote fault, {what}"), rates.samples.latency());
            report.figure(&format!("faults/s, {what}"), "1/s", rates.total());
            Ok::<Rates, BenchError>(rates)
        };
        let (mut threads, mut pagers, mut agents) = (vec![], vec![], vec![]);
        for &count in counts {
            threads.push(measure(&format!("threads: {count}"), count, 1, 1)?);
        }
        for &count in counts {
            pagers.push(measure(&format!("pagers on one agent: {count}"), 1, count, 1)?);
        }
        // One thread would wait for one agent at a time.
        let many = counts[counts.len() - 1];
        for &count in counts {
            agents.push(measure(&format!("agents of one pager: {count}"), many, 1, count)?);
        }
        let judged = |count, target| (count == JUDGED).then_some(target);
        for (at, &count) in counts.iter().enumerate().skip(1) {
            let of_one = |rates: &[Rates]| rates[at].total() / rates[0].total();
            let target = judged(count, Target::AtLeast(THREADS_MIN));
            report.judged(&format!("{count} threads / 1"), "x", of_one(&threads), target);
            let target = judged(count, Target::AtLeast(PAGERS_MIN));
            report.judged(&format!("{count} pagers / 1, total"), "x", of_one(&pagers), target);
            report.figure(&format!("{count} agents / 1"), "x", of_one(&agents));
            let each = &pagers[at].each;
            let fair = pagers[at].total() / count as f64;
            let least = each.iter().copied().fold(f64::INFINITY, f64::min) / fair;
            let greatest = each.iter().copied().fold(0.0, f64::max) / fair;
            let target = judged(count, Target::AtLeast(SHARE.0));
            report.judged(&format!("{count} pagers: least / fair share"), "x", least, target);
            let target = judged(count, Target::AtMost(SHARE.1));
            report.judged(&format!("{count} pagers: greatest / fair share"), "x", greatest, target);
            let longest = pagers[at].samples.latency().max / 1e3;
            report.figure(&format!("{count} pagers: longest fault of all"), "ms", longest);
        }
    }
    Ok(())
}

/// Runs the pagers of a subject side by side for a while.
fn measure(options: &ScaleOptions, subject: &Subject, seed: u64) -> Result<Rates, BenchError> {
    let effort: &Effort = &options.effort;
    let quick = usize::from(effort.is_quick());
    let (local, mib) = options.paging.mib(effort, 16);
    let room = (local + mib) * subject.pagers as u32;
    memory::touch(room + local * subject.pagers as u32)?;
    let stack = Stack::start(options.paging.programs.dir(), subject.agents, room)?;
    let path = stack.path("gate");
    let gate = Gate::new(&path)?;
    let warm_up = (WARM_UP_TIMES * pages(local as usize)).div_ceil(subject.threads);
    let spawn = |pager: usize| {
        let orders = workload::Orders {
            mib: mib as usize,
            threads: subject.threads,
            warm_up,
            measured: workload::Measured::Seconds(SECONDS[quick]),
            seed: seed << 8 | pager as u64,
            gate: Some(path.clone()),
            manner: workload::Manner::default(),
        };
        stack.spawn(PageSize::Small, local, &Orders::Fault(orders))
    };
    let mut sessions = (0..subject.pagers).map(spawn).collect::<Result<Vec<Session>, _>>()?;
    gate.open(&mut sessions)?;
    let mut rates = Rates { each: Vec::new(), samples: Samples::new() };
    for session in sessions {
        let (found, stats): (Found, _) = session.finish()?;
        let counted = found.faults() + (subject.threads * warm_up) as u64;
        stats.check(counted, LOCAL_PERCENT_MAX[quick])?;
        rates.each.push(found.faults() as f64 / found.seconds);
        rates.samples.merge(&found.samples()?);
    }
    Ok(rates)
}
