//! A thread which sleeps on an idle CPU is woken from another one: what each hand-over between CPUs costs if nobody spins.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::BenchError;
use crate::placement::{Pinned, two_cpus};
use crate::samples::Samples;

/// Long enough for the other CPU to become idle.
const IDLE: Duration = Duration::from_micros(200);

/// `count` wakes, from just before the system call (a futex) to the first instruction of the one who slept, and a tenth as many before
/// them to warm up. `None` where there is only one CPU.
pub(super) fn wakes(count: usize) -> Result<Option<Samples>, BenchError> {
    let Some((one, two)) = two_cpus()? else { return Ok(None) };
    let _pinned = Pinned::to(Some(one))?;
    let warm_up = count / 10;
    let base = Instant::now();
    let now = || base.elapsed().as_nanos() as u64;
    // When the sleeper was woken last, and when it ran, in ns.
    let (called, ran) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            // The waker waits for each answer, so there is one even if the CPU cannot be chosen.
            let pinned = Pinned::to(Some(two));
            let mut last = 0;
            for _ in 0..count + warm_up {
                while called.load(Ordering::Acquire) == last {
                    thread::park();
                }
                last = called.load(Ordering::Acquire);
                ran.store(now().max(last + 1), Ordering::Release);
            }
            pinned.map(drop)
        });
        let mut samples = Samples::new();
        for number in 0..count + warm_up {
            let start = Instant::now();
            while start.elapsed() < IDLE {
                std::hint::spin_loop();
            }
            let at = now();
            called.store(at, Ordering::Release);
            sleeper.thread().unpark();
            let took = loop {
                let ran = ran.load(Ordering::Acquire);
                if ran > at {
                    break ran - at;
                }
                std::hint::spin_loop();
            };
            if number >= warm_up {
                samples.add(Duration::from_nanos(took));
            }
        }
        let panicked = |_| Err(BenchError::Invalid("a thread panicked".into()));
        sleeper.join().unwrap_or_else(panicked)?;
        Ok(Some(samples))
    })
}
