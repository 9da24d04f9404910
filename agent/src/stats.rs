//! Counters, written by the loop and read by whoever reports them.

use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A number that only its loop writes.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        // One writer: a load and a store cost less than a locked addition.
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// Sets it.
    pub fn set(&self, n: u64) {
        self.0.store(n, Relaxed);
    }

    /// Its value.
    pub fn value(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Durations counted in buckets of powers of two, from 1 us to 32 ms and beyond.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [Counter; Self::BOUNDS + 1],
    sum_ns: Counter,
}

impl Histogram {
    /// Buckets with an upper bound: 2^10 ns (about 1 us) and each the double of the one before.
    const BOUNDS: usize = 16;
    const FIRST_SHIFT: u32 = 10;

    /// Counts a duration.
    pub fn observe(&self, ns: u64) {
        let above = ns.saturating_sub(1) >> Self::FIRST_SHIFT;
        let bucket = (u64::BITS - above.leading_zeros()) as usize;
        self.buckets[bucket.min(Self::BOUNDS)].add(1);
        self.sum_ns.add(ns);
    }

    fn write(&self, out: &mut String, name: &str, help: &str) -> fmt::Result {
        writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram")?;
        let mut count = 0;
        for (index, bucket) in self.buckets.iter().enumerate() {
            count += bucket.value();
            match index {
                Self::BOUNDS => writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {count}")?,
                _ => {
                    let bound = (1u64 << (Self::FIRST_SHIFT + index as u32)) as f64 / 1e9;
                    writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {count}")?;
                }
            }
        }
        let seconds = self.sum_ns.value() as f64 / 1e9;
        writeln!(out, "{name}_sum {seconds}\n{name}_count {count}")
    }
}

macro_rules! stats {
    ($($kind:ident $name:ident $metric:literal $help:literal,)*) => {
        /// What an agent has done and holds.
        #[derive(Debug, Default)]
        pub struct Stats {
            $(#[doc = $help] pub $name: Counter,)*
            /// Time that requests waited from their receipt until they were handled.
            pub queue: Histogram,
            /// Time from a request's handling to its reply.
            pub service: Histogram,
        }

        impl Stats {
            /// In the text format of Prometheus, version 0.0.4.
            pub fn prometheus(&self) -> String {
                let mut out = String::with_capacity(8192);
                // Writing to a String cannot fail.
                $(let _ = writeln!(out, "# HELP gms_agent_{0} {1}\n# TYPE gms_agent_{0} {2}\ngms_agent_{0} {3}",
                    $metric, $help, stringify!($kind), self.$name.value());)*
                let _ = self.queue.write(&mut out, "gms_agent_queue_seconds",
                    "Time that requests waited from their receipt until they were handled");
                let _ = self.service.write(&mut out, "gms_agent_service_seconds",
                    "Time from a request's handling to its reply");
                out
            }
        }
    };
}

stats! {
    gauge frames_total "frames_total" "Frames of 4096 bytes exported",
    gauge frames_free "frames_free" "Frames free",
    gauge frames_used "frames_used" "Frames in use",
    gauge oldest_age_s "oldest_page_age_seconds" "Age of the oldest page",
    gauge tenants "tenants" "Workloads which have not ended",
    gauge links "links" "Links open",
    gauge draining "draining" "1 from the request to stop on, else 0",
    counter gets "page_gets_total" "Pages asked for",
    counter misses "page_misses_total" "Pages asked for and not there",
    counter puts "page_puts_total" "Pages stored",
    counter refusals "page_refusals_total" "Pages refused because all frames were in use",
    counter discards "page_discards_total" "Pages freed one by one",
    counter bytes_in "received_bytes_total" "Bytes of pages received",
    counter bytes_out "sent_bytes_total" "Bytes of pages sent",
    counter denied "denied_requests_total" "Requests refused: no session, invalid, or draining",
    counter aborted "aborted_requests_total" "Requests which did not come whole",
    counter expired "expired_leases_total" "Workloads ended because their lease ran out",
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_bounds_inclusive() {
        let stats = Stats::default();
        for ns in [0, 1024, 1025, 2048, u64::MAX / 4] {
            stats.service.observe(ns);
        }
        stats.puts.add(7);
        let text = stats.prometheus();
        for line in [
            "gms_agent_service_seconds_bucket{le=\"0.000001024\"} 2",
            "gms_agent_service_seconds_bucket{le=\"0.000002048\"} 4",
            "gms_agent_service_seconds_bucket{le=\"+Inf\"} 5",
            "gms_agent_service_seconds_count 5",
            "# TYPE gms_agent_page_puts_total counter",
            "gms_agent_page_puts_total 7",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in:\n{text}");
        }
    }
}
