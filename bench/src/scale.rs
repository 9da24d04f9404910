//! `gms-bench scale`: more threads, more pagers, more agents.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use crate::cli::{Effort, PageSize, ScaleOptions};
use crate::error::BenchError;
use crate::fault::{LOCAL_PERCENT_MAX, WARM_UP_TIMES};
use crate::floor;
use crate::gate::{Gate, Gates};
use crate::memory;
use crate::region::pages;
use crate::report::{Report, Target};
use crate::samples::Samples;
use crate::stack::{Session, Stack, agent_shares, check_remote};
use crate::turn::rotated;
use crate::workload::Orders;
use crate::workload::fault::{self as workload, Found};

/// How many of each, usual and `--quick`.
const COUNTS: [&[usize]; 2] = [&[1, 2, 4, 8], &[1, 2]];
/// The count which the targets are for.
const JUDGED: usize = 8;
/// Seconds measured of each subject, usual and `--quick`.
const SECONDS: [f64; 2] = [2.0, 1.0];
/// What 8 threads should reach, as a multiple of one.
const THREADS_MIN: f64 = 2.5;
/// What 8 pagers on one agent should reach together, as a multiple of one.
const PAGERS_MIN: f64 = 1.0;
/// Bounds of a pager's share, as a multiple of the fair one.
const SHARE: (f64, f64) = (0.8, 1.2);

/// One subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Subject {
    threads: usize,
    pagers: usize,
    agents: usize,
}

/// What is made more and more of, and the subject with `count` of it. Threads for many agents are `most`: one would wait for one
/// agent at a time.
type Series = (&'static str, fn(count: usize, most: usize) -> Subject);
const THREADS: Series = ("threads", |threads, _| Subject { threads, pagers: 1, agents: 1 });
const PAGERS: Series =
    ("pagers on one agent", |pagers, _| Subject { threads: 1, pagers, agents: 1 });
const AGENTS: Series =
    ("agents of one pager", |agents, threads| Subject { threads, pagers: 1, agents });

/// What came out.
struct Rates {
    /// Faults/s of each pager.
    each: Vec<f64>,
    samples: Samples,
    /// The least and the greatest share of the pages that an agent of the last pager was given.
    agents: (f64, f64),
}

impl Rates {
    fn total(&self) -> f64 {
        self.each.iter().sum()
    }
}

/// Measures.
pub(crate) fn run(options: &ScaleOptions, report: &mut Report) -> Result<(), BenchError> {
    let counts = COUNTS[usize::from(options.effort.is_quick())];
    for run in 0..options.effort.runs() {
        floor::zero_fill(&options.effort, report)?;
        report.run("a run of all subjects", |report| once(options, counts, run, report))?;
    }
    Ok(())
}

/// All subjects once.
fn once(
    options: &ScaleOptions,
    counts: &[usize],
    run: u32,
    report: &mut Report,
) -> Result<(), BenchError> {
    let most = counts[counts.len() - 1];
    let mut measured: BTreeMap<Subject, Rates> = BTreeMap::new();
    for (what, subject) in rotated([THREADS, PAGERS, AGENTS], run) {
        for &count in rotated(counts, run) {
            // What belongs to two series is measured once.
            let rates = match measured.entry(subject(count, most)) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => {
                    let rates = measure(options, new.key(), u64::from(run) + 1)?;
                    new.insert(rates)
                }
            };
            let latency = rates.samples.latency();
            report.latency(&format!("remote fault, {what}: {count}"), latency);
            report.figure(&format!("faults/s, {what}: {count}"), "1/s", rates.total());
        }
    }
    for &count in &counts[1..] {
        let of = |series: Series, count| &measured[&(series.1)(count, most)];
        judge(count, of, report);
    }
    Ok(())
}

/// What has come of `count`, beside what has come of one.
fn judge<'a>(count: usize, of: impl Fn(Series, usize) -> &'a Rates, report: &mut Report) {
    let mut figure = |name: String, unit: &str, value: f64, target: Option<Target>| {
        report.judged(&name, unit, value, target.filter(|_| count == JUDGED));
    };
    let of_one = |series| of(series, count).total() / of(series, 1).total();
    let target = Some(Target::AtLeast(THREADS_MIN));
    figure(format!("{count} threads / 1"), "x", of_one(THREADS), target);
    figure(format!("{count} agents / 1"), "x", of_one(AGENTS), None);
    let target = Some(Target::AtLeast(PAGERS_MIN));
    figure(format!("{count} pagers / 1, total"), "x", of_one(PAGERS), target);
    let pagers = of(PAGERS, count);
    let shares = || pagers.each.iter().map(|one| one * count as f64 / pagers.total());
    let (least, greatest) = (shares().fold(f64::INFINITY, f64::min), shares().fold(0.0, f64::max));
    let target = Some(Target::AtLeast(SHARE.0));
    figure(format!("{count} pagers: least / fair share"), "x", least, target);
    let target = Some(Target::AtMost(SHARE.1));
    figure(format!("{count} pagers: greatest / fair share"), "x", greatest, target);
    let (least, greatest) = of(AGENTS, count).agents;
    figure(format!("{count} agents: least / fair share of the pages"), "x", least, None);
    figure(format!("{count} agents: greatest / fair share of the pages"), "x", greatest, None);
    let longest = pagers.samples.latency().max / 1e3;
    figure(format!("{count} pagers: longest fault of all"), "ms", longest, None);
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
            gates: Gates { before: Some(path.clone()), after: None },
            manner: workload::Manner::default(),
        };
        stack.spawn(PageSize::Small, local, &Orders::Fault(orders))
    };
    let mut sessions = (0..subject.pagers).map(spawn).collect::<Result<Vec<Session>, _>>()?;
    let count = sessions.len();
    gate.gather(count, || sessions.iter_mut().try_for_each(Session::check_alive))?.open()?;
    let mut rates = Rates { each: Vec::new(), samples: Samples::new(), agents: (1.0, 1.0) };
    for session in sessions {
        let (found, stats): (Found, _) = session.finish()?;
        let counted = found.faults() + (subject.threads * warm_up) as u64;
        check_remote(&stats, counted, LOCAL_PERCENT_MAX[quick])?;
        rates.each.push(found.faults() as f64 / found.seconds);
        rates.samples.merge(&found.samples()?);
        rates.agents = agent_shares(&stats);
    }
    Ok(rates)
}
