//! Where the time of a fault goes: gms's stamps of some faults, joined with those of the workload. Both are CLOCK_MONOTONIC.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use crate::error::{BenchError, Trying};
use crate::report::Report;
use crate::samples::Samples;
use crate::workload::fault::Stamp;

/// The stages of a fault, in their order; their sum is what the touch took.
const STAGES: [&str; 9] = [
    "kernel to handler",
    "lookup",
    "encode, encrypt, send",
    "wire, agent's wait and send",
    "agent: receive, decrypt",
    "agent: serve",
    "receive, decrypt, check",
    "COPY",
    "wake",
];
/// Begin the names of the rows: `stage, WHAT: NAME` and, of the slowest hundredth of the faults, `slowest 1 %, WHAT: NAME`.
pub(crate) const ROWS: [&str; 2] = ["stage, ", "slowest 1 %, "];
/// First line of gms's file; units are ns but for the address.
const HEADER: &str = "page,read,looked_up,sent,received,queue,service,opened,installed";
/// Of so many measured faults gms must have followed one at least: it follows each fourth, but only one at a time.
const FOLLOWED_MIN: usize = 50;

/// A fault: how long each stage took, in ns. The last ones can be below zero, if the thread ran on before gms looked at the clock.
type Fault = [i64; STAGES.len()];

/// Adds the stages of the faults of `what` to the report: gms's file `trace` joined with the workload's own `stamps`.
pub(crate) fn report(
    what: &str,
    trace: &Path,
    stamps: &[Stamp],
    report: &mut Report,
) -> Result<(), BenchError> {
    let file = trace.display().to_string();
    let text = std::fs::read_to_string(trace).trying(&file)?;
    let mut faults = join(&text, stamps)?;
    if faults.len() * FOLLOWED_MIN < stamps.len() || faults.is_empty() {
        let (followed, all) = (faults.len(), stamps.len());
        let text = format!("the stages of only {followed} of {all} faults are known");
        return Err(BenchError::Refused(text));
    }
    for (stage, name) in STAGES.iter().enumerate() {
        let mut samples = Samples::new();
        faults.iter().for_each(|f| samples.add(Duration::from_nanos(f[stage].max(0) as u64)));
        report.latency(&format!("{}{what}: {name}", ROWS[0]), samples.latency());
    }
    faults.sort_by_key(|fault| fault.iter().sum::<i64>());
    let slowest = &faults[faults.len() - faults.len().div_ceil(100)..];
    for (stage, name) in STAGES.iter().enumerate() {
        let sum: i64 = slowest.iter().map(|fault| fault[stage]).sum();
        let mean = sum as f64 / slowest.len() as f64 / 1e3;
        report.figure(&format!("{}{what}: {name}", ROWS[1]), "us", mean);
    }
    Ok(())
}

/// The faults that both sides know.
fn join(trace: &str, stamps: &[Stamp]) -> Result<Vec<Fault>, BenchError> {
    let wrong = |line: &str| BenchError::Invalid(format!("gms wrote to --trace: {line:?}"));
    let mut lines = trace.lines();
    let header = lines.next().unwrap_or("");
    if header != HEADER {
        return Err(wrong(header));
    }
    let mut of_page: HashMap<u64, Vec<&Stamp>> = HashMap::new();
    stamps.iter().for_each(|stamp| of_page.entry(stamp.page).or_default().push(stamp));
    let mut faults = Vec::new();
    for line in lines {
        let numbers: Result<Vec<u64>, _> = line.split(',').map(str::parse).collect();
        let numbers = numbers.ok().and_then(|numbers| numbers.try_into().ok());
        let followed: [u64; STAGES.len()] = numbers.ok_or_else(|| wrong(line))?;
        let [page, read, ..] = followed;
        let of_page = of_page.get(&page).into_iter().flatten();
        // The message was read while the touch went on: so it is the touch's own.
        let touch = of_page.copied().find(|touch| (touch.before..=touch.after).contains(&read));
        faults.extend(touch.map(|touch| stages(followed, touch)));
    }
    Ok(faults)
}

fn stages(followed: [u64; STAGES.len()], touch: &Stamp) -> Fault {
    let [_, read, looked_up, sent, received, queue, service, opened, installed] =
        followed.map(|stamp| stamp as i64);
    [
        read - touch.before as i64,
        looked_up - read,
        sent - looked_up,
        received - sent - queue - service,
        queue,
        service,
        opened - received,
        installed - opened,
        touch.after as i64 - installed,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOUCHES: [Stamp; 3] = [
        Stamp { page: 4096, before: 100, after: 200 },
        Stamp { page: 8192, before: 1000, after: 31_000 },
        Stamp { page: 4096, before: 41_000, after: 70_000 },
    ];

    #[test]
    fn stages_sum_up_to_the_touch() {
        let trace = format!(
            "{HEADER}\n4096,44000,45000,48000,60000,2000,3000,62000,71000\n\
             8192,500,600,700,800,1,2,900,950\n12288,44000,45000,48000,60000,2000,3000,62000,71000\n"
        );
        let faults = join(&trace, &TOUCHES).expect("a trace");
        let expected = [3000, 1000, 3000, 7000, 2000, 3000, 2000, 9000, -1000];
        assert_eq!(faults, [expected], "of what was not touched or before nothing counts");
        assert_eq!(expected.iter().sum::<i64>(), 70_000 - 41_000);
    }

    #[test]
    fn what_is_no_trace_is_refused() {
        for trace in ["", "page,read", &format!("{HEADER}\n1,2,3\n"), &format!("{HEADER}\nx\n")] {
            assert!(join(trace, &TOUCHES).is_err(), "{trace:?}");
        }
    }
}
