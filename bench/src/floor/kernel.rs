//! The kernel's own fault.

use std::time::Instant;

use crate::error::BenchError;
use crate::region::Region;
use crate::samples::Samples;

/// First touches of `count` pages.
pub(crate) fn zero_fill(count: usize) -> Result<Samples, BenchError> {
    let region = Region::with_tables(count)?;
    let mut samples = Samples::new();
    for page in 0..count {
        let start = Instant::now();
        region.store(page, 0, 1);
        samples.add(start.elapsed());
    }
    Ok(samples)
}
