//! Latencies of one run.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::error::BenchError;

/// Longer ones are counted as this long.
const LATENCY_MAX: Duration = Duration::from_secs(60);

/// Latencies in ns, told apart to three digits.
pub(crate) struct Samples {
    latencies: Histogram<u64>,
    /// CPU time of both ends for each, in us; 0 where it was not measured.
    pub cpu_us: f64,
}

/// Quantiles of one run, in us.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Latency {
    /// Samples.
    pub count: u64,
    /// Mean.
    #[serde(default)]
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90 %.
    pub p90: f64,
    /// 99 %.
    pub p99: f64,
    /// 99.9 %.
    pub p999: f64,
    /// Greatest.
    pub max: f64,
}

impl Samples {
    /// None yet.
    pub(crate) fn new() -> Samples {
        let most = LATENCY_MAX.as_nanos() as u64;
        let latencies = Histogram::new_with_max(most, 3);
        Samples { latencies: latencies.expect("bounds of the histogram are valid"), cpu_us: 0.0 }
    }

    /// Adds one.
    pub(crate) fn add(&mut self, latency: Duration) {
        self.latencies.saturating_record(latency.as_nanos() as u64);
    }

    /// Adds those of another thread.
    pub(crate) fn merge(&mut self, other: &Samples) {
        self.latencies.add(&other.latencies).expect("histograms have the same bounds");
    }

    /// Their quantiles.
    pub(crate) fn latency(&self) -> Latency {
        let at = |quantile| self.latencies.value_at_quantile(quantile) as f64 / 1e3;
        Latency {
            count: self.latencies.len(),
            mean: self.latencies.mean() / 1e3,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: self.latencies.max() as f64 / 1e3,
        }
    }

    /// Values in ns and how often each came: the form in which a workload hands them over.
    pub(crate) fn counts(&self) -> Vec<(u64, u64)> {
        let recorded = self.latencies.iter_recorded();
        recorded.map(|v| (v.value_iterated_to(), v.count_at_value())).collect()
    }

    /// From the form of [`Samples::counts`].
    pub(crate) fn from_counts(counts: &[(u64, u64)]) -> Result<Samples, BenchError> {
        let mut samples = Samples::new();
        for &(value, count) in counts {
            let recorded = samples.latencies.record_n(value, count);
            recorded.map_err(|_| BenchError::Invalid(format!("a latency of {value} ns")))?;
        }
        Ok(samples)
    }
}

/// Median (of an even number the mean of the two in the middle), least and greatest.
pub(crate) fn median_and_spread(values: &[f64]) -> (f64, (f64, f64)) {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (last, middle) = (sorted.len() - 1, sorted.len() / 2);
    ((sorted[last - middle] + sorted[middle]) / 2.0, (sorted[0], sorted[last]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_in_the_middle() {
        assert_eq!(median_and_spread(&[3.0, 1.0, 2.0]), (2.0, (1.0, 3.0)));
        assert_eq!(median_and_spread(&[4.0, 1.0, 2.0, 3.0]), (2.5, (1.0, 4.0)));
        assert_eq!(median_and_spread(&[7.0]), (7.0, (7.0, 7.0)));
    }

    #[test]
    fn counts_carry_everything_across() {
        let mut samples = Samples::new();
        (1..=1000).for_each(|us| samples.add(Duration::from_micros(us)));
        let other = Samples::from_counts(&samples.counts()).expect("counts");
        assert_eq!(other.latency(), samples.latency());
        assert_eq!(samples.latency().count, 1000);
        assert!((samples.latency().p50 - 500.0).abs() < 1.0);
        assert!(Samples::from_counts(&[(u64::MAX, 1)]).is_err());
    }
}
