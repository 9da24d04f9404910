//! The check that most tests make: the same result as without gms, and the memory really was elsewhere.

use crate::agent::AgentProc;
use crate::gms::Gms;
use crate::mib::Mib;
use crate::program::{Outcome, Program};
use crate::stage::{Stage, told};

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
    let stats = outcome.stats();
    let least = (working_set.bytes() - budget.bytes()) / 4096 / 2;
    for (holds, claim) in [
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
    ] {
        if !holds {
            outcome.fail(&format!("does not hold: {claim}\n{stats:?}"));
        }
    }
}

/// How often a run is tried that is to keep within the bound: the evict thread shares two CPUs with the workload, the agent and the test, and a program
/// that begins to fill memory just when it has to wait for one is ahead of it (docs/design.md, weakness 8).
pub const ATTEMPTS: usize = 3;

/// The first run that keeps within the bound; fails the test if none does.
pub fn within_bound(budget: Mib, run: impl Fn() -> Outcome) -> Outcome {
    for attempt in 1.. {
        let outcome = run();
        let (held, most) = (held(&outcome), most(&outcome, budget));
        if held <= most {
            return outcome;
        }
        if attempt == ATTEMPTS {
            outcome.fail(&format!("{held} B were resident, of at most {most}: {:?}", outcome.peak));
        }
        told(&format!("ONCE MORE, {held} B of at most {most}"));
    }
    unreachable!("attempts end")
}

/// Runs `program` natively and under gms with `percent` of its working set resident (`None`: what it is seen to use
/// natively) and one agent; fails the test unless output and status are equal and paging happened.
pub fn pages_like_native(
    stage: &Stage,
    program: &Program,
    working_set: Option<Mib>,
    percent: u64,
) -> Outcome {
    let native = program.finish().expect_code(0);
    let working_set = working_set.unwrap_or(Mib(native.peak.bytes >> 20));
    assert!(working_set >= Mib(32), "a working set of {working_set:?} tests nothing");
    let budget = working_set.percent(percent);
    let agent = AgentProc::start(Mib(working_set.0 * 4));
    let paged = within_bound(budget, || {
        let gms = Gms::run(stage, program).local(budget).agents(&[&agent]);
        let paged = gms.finish().expect_code(0);
        if paged.stdout != native.stdout {
            paged.fail(&format!("printed something else than without gms:\n{}", native.text()));
        }
        paged
    });
    assert!(paged.peak.looks > 0, "nobody looked at its memory");
    assert_paged(&paged, working_set, budget);
    paged
}
