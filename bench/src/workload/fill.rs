//! Fills memory at a pace, and keeps it until it is told to end.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::BenchError;
use crate::gate;
use crate::region::{Region, pages};

/// What the longest time is of, in MiB.
const STEP_MIB: usize = 2;

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Orders {
    /// Memory.
    pub mib: usize,
    /// MiB per second, at most.
    pub pace: f64,
    /// Where to wait when it is filled: see [`gate`].
    pub gate: PathBuf,
}

/// What was found.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Found {
    /// Time for all.
    pub seconds: f64,
    /// The longest for 2 MiB.
    pub longest_ms: f64,
}

/// Does it.
pub(crate) fn run(orders: &Orders) -> Result<Found, BenchError> {
    let region = Region::new(pages(orders.mib))?;
    let (start, mut before, mut longest) = (Instant::now(), Instant::now(), Duration::ZERO);
    for page in 0..region.pages() {
        region.store(page, 0, 1);
        if (page + 1) % pages(STEP_MIB) == 0 {
            longest = longest.max(before.elapsed());
            let due =
                start + Duration::from_secs_f64((page + 1) as f64 / pages(1) as f64 / orders.pace);
            while Instant::now() < due {
                std::hint::spin_loop();
            }
            before = Instant::now();
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    gate::pass(&orders.gate)?;
    Ok(Found { seconds, longest_ms: longest.as_secs_f64() * 1e3 })
}
