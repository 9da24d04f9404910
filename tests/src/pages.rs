//! The check that most tests make: the same result as without gms, and the memory really was elsewhere.

use crate::agent::AgentProc;
use crate::gms::Gms;
use crate::mib::Mib;
use crate::program::{Outcome, Program};
use crate::stage::{Stage, told};
use crate::stats::Stats;

/// How far resident memory may exceed the budget: the larger of 10 % and 32 MiB.
pub fn overshoot(budget: Mib) -> u64 {
    (budget.bytes() / 10).max(Mib(32).bytes())
}

/// The most that may ever be resident. Each process that begins to allocate must be found and attached: a tree may overshoot twice as far.
fn most(outcome: &Outcome, budget: Mib) -> u64 {
    budget.bytes() + overshoot(budget) * outcome.stats().processes.clamp(1, 2)
}

/// The most that was resident, by gms's own account or by what /proc says of the whole tree.
fn held(outcome: &Outcome) -> u64 {
    outcome.stats().resident_peak_bytes.max(outcome.peak.bytes)
}

/// Fails the test unless `outcome` paged a working set under `budget`: enough pages went out and came back, and neither gms's account of resident memory
/// nor what /proc says was far beyond it. Of one run no more is asked than twice the overshoot: see [`within_bound`].
pub fn assert_paged(outcome: &Outcome, working_set: Mib, budget: Mib) {
    if let Some(lack) = lack_of_paging(outcome, working_set, budget) {
        outcome.fail(&lack);
    }
}

/// The first claim of [`assert_paged`] that does not hold.
fn lack_of_paging(outcome: &Outcome, working_set: Mib, budget: Mib) -> Option<String> {
    let stats = outcome.stats();
    let least = (working_set.bytes() - budget.bytes()) / 4096 / 2;
    let claims = [
        (stats.budget_bytes == budget.bytes(), "budget_bytes is what --local said".to_string()),
        (stats.pages_out >= least, format!("pages_out >= {least}")),
        (stats.pages_in > 0 && stats.faults > 0, "pages came back by faults".into()),
        (stats.remote_peak_bytes > 0, "remote_peak_bytes > 0".into()),
        (stats.resident_peak_bytes > 0, "resident_peak_bytes > 0".into()),
        (
            held(outcome) <= budget.bytes() + 2 * overshoot(budget),
            format!("{} B and {:?} are far beyond", stats.resident_peak_bytes, outcome.peak),
        ),
        (stats.agents.iter().any(|agent| agent.pages > 0), "an agent was given pages".into()),
        (stats.processes > 0 && stats.attach_us > 0.0, "a process was attached".into()),
    ];
    let lacking = claims.into_iter().find(|(holds, _)| !holds);
    lacking.map(|(_, claim)| format!("does not hold: {claim}\n{stats:?}"))
}

/// How often a run is tried that depends on when gms gets a CPU, two of which it shares with the workload, the agent and the test: nothing holds a program
/// back that begins, and fills its memory, before the pager has met it, or while the evict thread waits (docs/design.md, weakness 8).
pub const ATTEMPTS: usize = 3;

/// The first run that lacks nothing. If there is none: the last, and what it lacks.
pub fn attempts<T>(
    run: impl Fn() -> T,
    lack: impl Fn(&T) -> Option<String>,
) -> Result<T, (T, String)> {
    for attempt in 1.. {
        let ran = run();
        match lack(&ran) {
            None => return Ok(ran),
            Some(lack) if attempt == ATTEMPTS => return Err((ran, lack)),
            Some(lack) => told(&format!("ONCE MORE, {lack}")),
        }
    }
    unreachable!("attempts end")
}

fn attempts_or_fail(
    run: impl Fn() -> Outcome,
    lack: impl Fn(&Outcome) -> Option<String>,
) -> Outcome {
    attempts(run, lack).unwrap_or_else(|(outcome, lack)| outcome.fail(&lack))
}

/// What is told of a run that was beyond the bound.
fn excess(outcome: &Outcome, budget: Mib) -> Option<String> {
    let (held, most) = (held(outcome), most(outcome, budget));
    let lack = || format!("{held} B of at most {most}: {:?}", outcome.peak);
    (held > most).then(lack)
}

/// The first run that keeps within the bound; fails the test if none does.
pub fn within_bound(budget: Mib, run: impl Fn() -> Outcome) -> Outcome {
    attempts_or_fail(run, |outcome| excess(outcome, budget))
}

/// The first run of which [`assert_paged`] is true; fails the test if it is of none. For programs that can have filled all of their memory, or ended, before
/// the pager has met them.
pub fn paged_in_time(working_set: Mib, budget: Mib, run: impl Fn() -> Outcome) -> Outcome {
    attempts_or_fail(run, |outcome| lack_of_paging(outcome, working_set, budget))
}

/// The first run whose figures are enough; fails the test if none has such. For the same programs.
pub fn enough_in_time(enough: impl Fn(&Stats) -> bool, run: impl Fn() -> Outcome) -> Outcome {
    attempts_or_fail(run, |outcome| {
        let stats = outcome.stats();
        (!enough(stats)).then(|| format!("hardly anything was away: {stats:?}"))
    })
}

/// Runs `program` natively and under gms with `percent` of its working set resident (`None`: what it is seen to use
/// natively) and one agent; fails the test unless output and status are equal and paging happened.
pub fn pages_like_native(
    stage: &Stage,
    program: &Program,
    working_set: Option<Mib>,
    percent: u64,
) -> Outcome {
    let size_of = |native: &Outcome| working_set.unwrap_or(Mib(native.peak.bytes >> 20));
    // Who looked at it may have had no CPU while it had most.
    let native = attempts_or_fail(
        || program.finish().expect_code(0),
        |native| {
            let size = size_of(native);
            (size < Mib(32)).then(|| format!("a working set of {size:?} tests nothing"))
        },
    );
    let working_set = size_of(&native);
    let budget = working_set.percent(percent);
    let agent = AgentProc::start(Mib(working_set.0 * 4));
    let run = || {
        let gms = Gms::run(stage, program).local(budget).agents(&[&agent]);
        let paged = gms.finish().expect_code(0);
        if paged.stdout != native.stdout {
            paged.fail(&format!("printed something else than without gms:\n{}", native.text()));
        }
        paged
    };
    let paged = attempts_or_fail(run, |paged| {
        excess(paged, budget).or_else(|| lack_of_paging(paged, working_set, budget))
    });
    assert!(paged.peak.looks > 0, "nobody looked at its memory");
    paged
}
