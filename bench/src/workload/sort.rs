//! Fills memory with numbers and sorts them: a small job, for which the time as a whole counts.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::pattern;
use crate::error::BenchError;
use crate::region::{WORDS, pages};

/// What to do.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Orders {
    /// Memory.
    pub mib: usize,
}

/// What was found.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Found {
    /// For filling, sorting and checking.
    pub seconds: f64,
}

/// Does it.
pub(crate) fn run(orders: Orders) -> Result<Found, BenchError> {
    let count = pages(orders.mib) * WORDS;
    let start = Instant::now();
    let mut numbers: Vec<u64> = (0..count).map(|n| pattern(n / WORDS, n % WORDS)).collect();
    let digest = |numbers: &[u64]| numbers.iter().fold(0u64, |sum, one| sum.wrapping_add(*one));
    let before = digest(&numbers);
    numbers.sort_unstable();
    if !numbers.is_sorted() || digest(&numbers) != before {
        return Err(BenchError::WrongBytes("the sorted numbers".into()));
    }
    Ok(Found { seconds: start.elapsed().as_secs_f64() })
}
