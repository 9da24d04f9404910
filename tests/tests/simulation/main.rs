//! Simulation: the pager's tables, its clients of agents and whole agents, on a model kernel and a network in memory, in virtual time. Messages
//! are lost, late and doubled, links are cut, agents stop, slow down, fill up, lie, drain, end and restart empty, all from a seed; programs check every byte that they read.
//!
//! A seed that fails is tried again by `GMS_SIM_SEED=N cargo test --release -p gms-tests --test simulation seeds -- --nocapture`, which tells the last steps.
//! `GMS_SIM_SEEDS=N` tries so many, from a random one on unless that is given too. A seed that does not end in 30 s of real time fails the same way (`trials.rs`).

mod agents;
mod kernel;
mod ledger;
mod machine;
mod owner;
mod program;
mod trials;
mod troubles;
mod workers;
mod world;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use gms_pager::sync::lock;

use crate::machine::Task;
use crate::trials::{Trial, told, try_all};
use crate::world::{End, World, end_of};

/// Seeds tried unless the environment says otherwise.
const SEEDS: u64 = 1000;

/// So seldom that they need not happen, and in no more than one of so many seeds, and one more.
const SELDOM: u64 = 1000;
const IN_DOUBT: &str = "orders that could not be known";
const DENIED: &str = "children that used a page of which nobody knew whether they have it";
const REFUSALS: &str = "pagers that did not go on, as pages were leaving";

/// How a seed ended.
#[derive(Debug, PartialEq)]
struct Ended {
    steps: u64,
    log: Vec<String>,
    /// What happened in it: these and how often.
    happened: Vec<(&'static str, u64)>,
}

/// How a seed ended, or why it failed.
fn outcome(seed: u64, trial: &Trial) -> Result<Ended, String> {
    let mut world = World::new(seed);
    trial.shows(world.handle.clone());
    let run = catch_unwind(AssertUnwindSafe(|| world.run()));
    match run {
        Ok(()) => {
            let (shared, killed) = (&world.owner.shared, world.owner.killed());
            let told_by_faults = world.owner.told_by_faults;
            let counters = lock(&shared.tables).counters;
            let ended = |end| u64::from(killed.as_deref().map(end_of) == Some(end));
            let ahead = shared.prefetched.load(Ordering::Relaxed);
            let machine = world.handle.lock();
            let overtaken = machine.tasks.iter().map(|task| task.kernel.overtaken).sum();
            let tasks_ended = machine.tasks.iter().filter(|task: &&Task| task.kernel.ended).count();
            let denied =
                machine.tasks.iter().filter(|task: &&Task| task.program.was_denied).count();
            let mut happened = vec![
                ("pages put", counters.pages_out),
                ("unchanged pages dropped", counters.clean_drops),
                ("zero pages dropped", counters.zero_drops),
                ("pages that came back from the buffer", counters.second_chances),
                ("pages fetched for a thread", shared.pages_in.load(Ordering::Relaxed) - ahead),
                ("pages fetched ahead", ahead),
                ("pages made of parity", shared.pages_made.load(Ordering::Relaxed)),
                ("pages fetched by workers", shared.lent_faults.load(Ordering::Relaxed)),
                (IN_DOUBT, ended(End::InDoubt)),
                (DENIED, denied as u64),
                (REFUSALS, ended(End::Refused)),
                ("threads of which only faults told that they removed nothing", told_by_faults),
                ("changes told before others that were made before", overtaken),
                ("calls of the pager in which something happened", machine.interrupted),
                ("children that were forked", machine.tasks.len() as u64 - 1),
                ("children that ended", tasks_ended as u64),
                ("workloads ended for what an agent had lost", ended(End::OfAgent)),
            ];
            happened.extend(world.happened.clone());
            Ok(Ended { steps: world.steps, log: machine.log().collect(), happened })
        }
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or_default();
            Err(told(&format!("seed {seed}: {text}"), &world.handle.lock()))
        }
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect(name))
}

#[test]
fn seeds_find_every_byte_right_and_no_thread_hangs() {
    let (first, count) = match (number("GMS_SIM_SEED"), number("GMS_SIM_SEEDS")) {
        (Some(seed), count) => (seed, count.unwrap_or(1)),
        (None, Some(count)) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            (now.as_nanos() as u64, count)
        }
        (None, None) => (1, SEEDS),
    };
    let seeds = (0..count).map(|n| first.wrapping_add(n)).collect();
    let (mut totals, mut failures) = (BTreeMap::new(), Vec::new());
    try_all(seeds, outcome, |_, run| match run {
        Ok(ended) => ended.happened.into_iter().for_each(|(name, times)| {
            *totals.entry(name).or_insert(0) += times;
        }),
        Err(failure) => failures.push(failure),
    });
    if let Some(failure) = failures.first() {
        let others: Vec<&str> = failures.iter().filter_map(|text| text.lines().next()).collect();
        panic!("{failure}\n{} of {count} seeds fail:\n{}", others.len(), others.join("\n"));
    }
    println!("{count} seeds from {first} on: {totals:#?}");
    // A simulation in which nothing happens finds nothing.
    let seldom = [IN_DOUBT, DENIED, REFUSALS];
    for few in [[IN_DOUBT, REFUSALS].as_slice(), &[DENIED]] {
        let in_doubt: u64 = few.iter().map(|name| totals[name]).sum();
        assert!(in_doubt <= 1 + count / SELDOM, "{totals:#?}");
    }
    let happens = |(&name, &times): (&&str, &u64)| times > 0 || seldom.contains(&name);
    assert!(count < SEEDS || totals.iter().all(happens), "{totals:#?}");
}

#[test]
fn a_seed_is_the_same_each_time() {
    let run = || {
        let mut runs = BTreeMap::new();
        try_all((1..=20).collect(), outcome, |seed, run| drop(runs.insert(seed, run)));
        runs
    };
    assert_eq!(run(), run());
}
