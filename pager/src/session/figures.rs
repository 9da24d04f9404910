//! The figures of a session.

use std::sync::atomic::Ordering;
use std::time::SystemTime;

use crate::page_map::PAGE;
use crate::shared::Shared;
use crate::stats::{FaultLatency, Stats};
use crate::sync::lock;

/// Now.
pub(super) fn stats(shared: &Shared) -> Stats {
    let gauges = lock(&shared.gauges).clone();
    let (counters, [remote, away], map_bytes, [peak, taken, taken_peak]) = {
        let tables = lock(&shared.tables);
        let (taken, taken_peak) = (tables.frames_taken(), tables.frames_taken_peak());
        let peaks = [tables.remote_pages_peak, taken, taken_peak];
        (tables.counters, [tables.remote_pages(), tables.away_pages()], tables.map_bytes(), peaks)
    };
    let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    Stats {
        pid: gauges.root,
        supervisor_pid: std::process::id() as i32,
        command: gauges.command,
        elapsed_s: shared.started.elapsed().as_secs_f64(),
        faults: load(&shared.faults),
        fault_us: latency(shared),
        zero_fills: load(&shared.zero_fills),
        pages_out: counters.pages_out,
        pages_in: load(&shared.pages_in),
        clean_drops: counters.clean_drops,
        zero_drops: counters.zero_drops,
        second_chances: counters.second_chances,
        prefetched: load(&shared.prefetched),
        // Inferred for whole windows, of which some pages may have been resident already.
        prefetch_hits: load(&shared.prefetch_hits).min(load(&shared.prefetched)),
        lent_faults: load(&shared.lent_faults),
        lent_hedges: load(&shared.lent_hedges),
        resident_bytes: shared.resident.load(Ordering::Relaxed).max(0) as u64,
        resident_peak_bytes: gauges.resident_peak,
        remote_bytes: remote * PAGE,
        remote_peak_bytes: peak * PAGE,
        away_bytes: away * PAGE,
        map_bytes,
        agents_full: gauges.full,
        agents_full_s: gauges.full_time.as_secs_f64(),
        copies: shared.copies,
        parity: shared.config.redundancy.shape().map(|shape| shape.to_string()),
        taken_bytes: taken * PAGE,
        taken_peak_bytes: taken_peak * PAGE,
        pages_made: load(&shared.pages_made),
        disk: shared.config.disk.is_some(),
        short_bytes: gauges.short * PAGE,
        detaching: shared.detaching.load(Ordering::Relaxed),
        sealed: shared.config.seal,
        key_days_left: gauges.key_until.map(|until| {
            let left = until.duration_since(SystemTime::now()).unwrap_or_default();
            left.as_secs() / 86400
        }),
        budget_bytes: shared.config.budget_bytes,
        unpageable_bytes: gauges.unpageable,
        attach_us: gauges.attach.as_secs_f64() * 1e6,
        looks: gauges.looks,
        looks_cpu_us: gauges.looks_cpu.as_secs_f64() * 1e6,
        processes: gauges.processes,
        attached: gauges.attached,
        agents: gauges.agents,
    }
}

fn latency(shared: &Shared) -> FaultLatency {
    let histogram = lock(&shared.latency);
    let at = |quantile| histogram.value_at_quantile(quantile) as f64 / 1000.0;
    FaultLatency {
        p50: at(0.5),
        p90: at(0.9),
        p99: at(0.99),
        p999: at(0.999),
        max: histogram.max() as f64 / 1000.0,
    }
}
