//! Seeds are tried on all CPUs, and a watchdog looks on: virtual time stands still in a loop that does not end, so real time bounds each seed.

use std::fmt::Write;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gms_pager::sync::lock;

use crate::machine::{Handle, Machine};

/// Longest that a seed may take in real time. It takes 0.1 s where nothing else runs.
const SEED_MAX: Duration = Duration::from_secs(30);
/// How often it is looked whether one takes longer.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The seed that a thread is at, since when, and its machine as soon as there is one.
#[derive(Default)]
pub(crate) struct Trial(Mutex<Option<(u64, Instant, Option<Handle>)>>);

impl Trial {
    /// The machine of this seed has been made.
    pub(crate) fn shows(&self, machine: Handle) {
        if let Some((.., shown)) = &mut *lock(&self.0) {
            *shown = Some(machine);
        }
    }

    /// Why the seed counts as one that hangs.
    fn hangs(&self) -> Option<String> {
        let trial = lock(&self.0);
        let (seed, began, machine) = trial.as_ref()?;
        if began.elapsed() <= SEED_MAX {
            return None;
        }
        let failure = format!("seed {seed}: it hangs, for longer than {SEED_MAX:?} of real time");
        // Whoever hangs may hold the machine for ever.
        let machine = machine.as_ref().and_then(Handle::try_lock);
        Some(match machine {
            Some(machine) => told(&failure, &machine),
            None => format!("{failure}, in a step of its machine"),
        })
    }
}

/// A failure, with the story of its seed and its last steps.
pub(crate) fn told(failure: &str, machine: &Machine) -> String {
    let mut text = format!("{failure}\n");
    for step in machine.story.iter().cloned().chain(machine.log()) {
        let _ = writeln!(text, "{step}");
    }
    text
}

/// Has `outcome` try each seed, and hands what it returns to `each`.
///
/// # Panics
/// If a seed hangs: what hangs cannot be ended, so its thread stays until the process ends.
pub(crate) fn try_all<T: Send + 'static>(
    seeds: Vec<u64>,
    outcome: fn(u64, &Trial) -> T,
    mut each: impl FnMut(u64, T),
) {
    let count = seeds.len();
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(count);
    let (seeds, (ends, ended)) = (Arc::new(seeds), mpsc::channel());
    let begin = |thread| {
        let (trial, seeds, ends) = (Arc::new(Trial::default()), seeds.clone(), ends.clone());
        let own = trial.clone();
        std::thread::spawn(move || {
            for &seed in seeds.iter().skip(thread).step_by(threads) {
                *lock(&own.0) = Some((seed, Instant::now(), None));
                // Fails only if whoever waits for it has failed.
                let _ = ends.send((seed, outcome(seed, &own)));
            }
            *lock(&own.0) = None;
        });
        trial
    };
    let trials: Vec<Arc<Trial>> = (0..threads).map(begin).collect();
    drop(ends);
    let (mut tried, mut next_look) = (0, Instant::now() + LOOK_EVERY);
    loop {
        match ended.recv_timeout(LOOK_EVERY) {
            Ok((seed, end)) => {
                tried += 1;
                each(seed, end);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if Instant::now() >= next_look {
            next_look = Instant::now() + LOOK_EVERY;
            if let Some(failure) = trials.iter().find_map(|trial| trial.hangs()) {
                panic!("{failure}");
            }
        }
    }
    assert_eq!(tried, count, "a thread has panicked beside its seeds");
}
