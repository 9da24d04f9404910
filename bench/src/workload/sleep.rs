//! Fills memory, and sleeps until it is told to end.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Memory;
use crate::error::BenchError;
use crate::gate;

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Orders {
    /// Memory.
    pub mib: usize,
    /// Where to sleep: see [`gate`].
    pub gate: PathBuf,
}

/// What was found.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Found {
    /// Pages that were absent when the sleep was over, in percent.
    pub absent_percent: f64,
}

/// Does it.
pub(crate) fn run(orders: &Orders) -> Result<Found, BenchError> {
    let memory = Memory::paged(orders.mib)?;
    gate::pass(&orders.gate)?;
    let absent = memory.absent(0, memory.pages())?.iter().filter(|absent| **absent).count();
    Ok(Found { absent_percent: 100.0 * absent as f64 / memory.pages() as f64 })
}
