//! Counters, each written by one loop, and gauges of all of them; read by whoever reports them.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use std::fmt::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A number that only its loop adds to.
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

    /// Tells those of all threads together.
    fn encode<'a>(
        out: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        threads: impl Iterator<Item = &'a Self> + Clone,
    ) -> fmt::Result {
        let bound = |index: usize| match index {
            Self::BOUNDS => f64::INFINITY,
            _ => (1u64 << (Self::FIRST_SHIFT + index as u32)) as f64 / 1e9,
        };
        let count = |i: usize| threads.clone().map(|thread| thread.buckets[i].value()).sum();
        let buckets: Vec<(f64, u64)> = (0..=Self::BOUNDS).map(|i| (bound(i), count(i))).collect();
        let count = buckets.iter().map(|(_, count)| count).sum();
        let seconds = threads.map(|thread| thread.sum_ns.value()).sum::<u64>() as f64 / 1e9;
        let mut metric = out.encode_descriptor(name, help, None, MetricType::Histogram)?;
        metric.encode_histogram::<NoLabelSet>(seconds, count, &buckets, None)
    }
}

/// Which agent this is.
const BUILD: [(&str, &str); 1] = [("version", env!("CARGO_PKG_VERSION"))];

macro_rules! numbers {
    ($($gauge:ident $gauge_name:literal $gauge_help:literal,)* ; $($kind:ident $name:ident $metric:literal $help:literal,)*) => {
        /// What an agent holds, all threads together.
        #[derive(Debug, Default)]
        pub struct Gauges {
            $(#[doc = $gauge_help] pub $gauge: Counter,)*
        }

        /// What a thread of an agent has done and holds.
        #[derive(Debug, Default)]
        pub struct Stats {
            $(#[doc = $help] pub $name: Counter,)*
            /// Time that requests waited from their receipt until they were handled.
            pub queue: Histogram,
            /// Time from a request's handling to its reply.
            pub service: Histogram,
        }

        impl Collector for Source {
            fn encode(&self, mut out: DescriptorEncoder<'_>) -> fmt::Result {
                let threads = || self.threads.iter();
                $(gauge(&mut out, $gauge_name, $gauge_help, self.gauges.$gauge.value())?;)*
                $($kind(&mut out, $metric, $help, threads().map(|thread| thread.$name.value()).sum())?;)*
                Histogram::encode(&mut out, "queue_seconds",
                    "Time that requests waited from their receipt until they were handled",
                    threads().map(|thread| &thread.queue))?;
                Histogram::encode(&mut out, "service_seconds",
                    "Time from a request's handling to its reply",
                    threads().map(|thread| &thread.service))?;
                let help = "Links open, by the thread that serves them";
                let mut links = out.encode_descriptor("thread_links", help, None, MetricType::Gauge)?;
                for (number, thread) in threads().enumerate() {
                    links.encode_family(&[("thread", number)])?.encode_gauge(&thread.links.value())?;
                }
                let help = "The version that runs; the value is 1";
                let mut info = out.encode_descriptor("build_info", help, None, MetricType::Gauge)?;
                info.encode_family(&BUILD)?.encode_gauge(&1u64)
            }
        }
    };
}

/// What is reported.
#[derive(Debug)]
struct Source {
    gauges: Arc<Gauges>,
    threads: Vec<Arc<Stats>>,
}

fn gauge(out: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: u64) -> fmt::Result {
    out.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)
}

fn counter(out: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: u64) -> fmt::Result {
    let mut metric = out.encode_descriptor(name, help, None, MetricType::Counter)?;
    metric.encode_counter::<NoLabelSet, _, u64>(&value, None)
}

/// The forms in which metrics are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The text format of Prometheus, version 0.0.4.
    Prometheus,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl Format {
    /// For the HTTP header `Content-Type`.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// What [`Gauges`] and the [`Stats`] of all threads say, as text.
#[derive(Debug)]
pub struct Report(Registry);

impl Report {
    /// Reports of an agent with these threads.
    pub fn of(gauges: Arc<Gauges>, threads: Vec<Arc<Stats>>) -> Self {
        let mut registry = Registry::with_prefix("gms_agent");
        registry.register_collector(Box::new(Source { gauges, threads }));
        Self(registry)
    }

    /// The metrics as they are now.
    pub fn text(&self, format: Format) -> String {
        let mut text = String::with_capacity(16 << 10);
        // Writing to a String cannot fail.
        let _ = text::encode(&mut text, &self.0);
        match format {
            Format::OpenMetrics => text,
            Format::Prometheus => classic(&text),
        }
    }
}

/// OpenMetrics names a counter without the suffix of its sample, and has an end; the text format of Prometheus else
/// is the same for what is told here.
fn classic(text: &str) -> String {
    let counters: Vec<&str> = text.lines().filter_map(counter_of).collect();
    let mut out = String::with_capacity(text.len());
    for line in text.lines().filter(|line| *line != "# EOF") {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some(what), Some(name), Some(rest)) if counters.contains(&name) => {
                let _ = writeln!(out, "# {what} {name}_total {rest}");
            }
            _ => {
                let _ = writeln!(out, "{line}");
            }
        }
    }
    out
}

fn counter_of(line: &str) -> Option<&str> {
    line.strip_prefix("# TYPE ")?.strip_suffix(" counter")
}

numbers! {
    frames_total "frames" "Frames of 4096 bytes exported now",
    frames_free "frames_free" "Frames free",
    frames_used "frames_used" "Frames in use",
    frames_over "frames_over" "Frames in use beyond the export, which has shrunk: pages that are to go elsewhere",
    oldest_age_s "oldest_page_age_seconds" "Age of the oldest page",
    tenants "tenants" "Workloads which have not ended",
    certificate_expires_s "certificate_expiry_timestamp_seconds" "When the agent's certificate expires, in seconds since 1970",
    members "members" "Agents that are members, this one included; 0: it is none",
    draining "draining" "1 from the request to stop on, else 0",
    ;
    gauge links "links" "Links open",
    counter gets "page_gets" "Pages asked for",
    counter misses "page_misses" "Pages asked for and not there",
    counter puts "page_puts" "Pages stored",
    counter refusals "page_refusals" "Pages refused because all frames were in use",
    counter discards "page_discards" "Pages freed one by one",
    counter bytes_in "received_bytes" "Bytes of pages received",
    counter bytes_out "sent_bytes" "Bytes of pages sent",
    counter denied "denied_requests" "Requests refused: no session, invalid, or draining",
    counter aborted "aborted_requests" "Requests which did not come whole",
    counter expired "expired_leases" "Workloads ended because their lease ran out",
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
        stats.links.set(2);
        let (other, gauges) = (Stats::default(), Gauges::default());
        other.service.observe(1024);
        other.puts.add(10);
        other.links.set(1);
        gauges.certificate_expires_s.set(1_800_000_000);
        let report = Report::of(gauges.into(), vec![stats.into(), other.into()]);
        let text = report.text(Format::Prometheus);
        for line in [
            "gms_agent_service_seconds_bucket{le=\"0.000001024\"} 3",
            "gms_agent_service_seconds_bucket{le=\"0.000002048\"} 5",
            "gms_agent_service_seconds_bucket{le=\"+Inf\"} 6",
            "gms_agent_service_seconds_count 6",
            "# TYPE gms_agent_page_puts_total counter",
            "# HELP gms_agent_page_puts_total Pages stored",
            "gms_agent_page_puts_total 17",
            "gms_agent_certificate_expiry_timestamp_seconds 1800000000",
            "gms_agent_draining 0",
            "gms_agent_links 3",
            "gms_agent_thread_links{thread=\"0\"} 2",
            "gms_agent_thread_links{thread=\"1\"} 1",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in:\n{text}");
        }
        let version = concat!("gms_agent_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"");
        assert!(text.contains(version) && !text.contains("# EOF"), "{text}");
        let open = report.text(Format::OpenMetrics);
        assert!(open.ends_with("# EOF\n") && open.contains("# TYPE gms_agent_page_puts counter\n"));
    }

    /// What Prometheus' own tool thinks of names, types and help.
    #[test]
    fn promtool_has_no_complaint() {
        use std::process::{Command, Stdio};
        let mut command = Command::new("promtool");
        command.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = match command.stderr(Stdio::piped()).spawn() {
            Ok(child) => child,
            Err(error) => {
                assert!(std::env::var_os("CI").is_none(), "promtool: {error}; see tests/setup.sh");
                return eprintln!("SKIPPED: promtool: {error}; tests/setup.sh installs it");
            }
        };
        let text = Report::of(Arc::default(), vec![Arc::default()]).text(Format::Prometheus);
        let mut stdin = child.stdin.take().expect("piped");
        std::io::Write::write_all(&mut stdin, text.as_bytes()).expect("promtool reads");
        drop(stdin);
        let output = child.wait_with_output().expect("promtool");
        let said =
            [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
        assert!(output.status.success() && said.concat().is_empty(), "{said:?}");
    }
}
