//! What was measured: as a table, and as JSON for other programs.

use std::fmt::{self, Write as _};
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{BenchError, Trying};
use crate::machine::Machine;
use crate::samples::{Latency, median_and_spread};
use crate::slow_down::{self, Run, SlowDown};
use crate::svg::digits;

/// A report in the making.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    /// Where and when it was made.
    pub machine: Machine,
    /// The command line.
    pub command: Vec<String>,
    /// What else must be known of the figures.
    #[serde(default)]
    pub notes: Vec<String>,
    /// All latencies.
    pub latencies: Vec<LatencyRow>,
    /// Programs with less memory of their own.
    #[serde(default)]
    pub slow_downs: Vec<SlowDown>,
    /// All else.
    pub figures: Vec<Figure>,
}

/// Latencies of one subject, in us.
#[derive(Debug, Serialize, Deserialize)]
pub struct LatencyRow {
    /// The subject.
    pub name: String,
    /// Of each quantile its median over the runs.
    pub median: Latency,
    /// The least and the greatest p50 of the runs.
    p50_spread: (f64, f64),
    runs: Vec<Latency>,
}

/// Any other figure.
#[derive(Debug, Serialize, Deserialize)]
pub struct Figure {
    /// What it is.
    pub name: String,
    /// Of all values.
    pub unit: String,
    /// Over the runs.
    pub median: f64,
    /// The least and the greatest of the runs.
    pub spread: (f64, f64),
    /// Where the median should lie.
    pub target: Option<Target>,
    runs: Vec<f64>,
}

/// Where a figure should lie.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// Here or below.
    AtMost(f64),
    /// Here or above.
    AtLeast(f64),
}

impl Target {
    /// Whether `value` lies there.
    pub fn is_met(self, value: f64) -> bool {
        match self {
            Target::AtMost(most) => value <= most,
            Target::AtLeast(least) => value >= least,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::AtMost(most) => write!(f, "at most {most}"),
            Target::AtLeast(least) => write!(f, "at least {least}"),
        }
    }
}

impl Report {
    /// Empty, with this machine in its header.
    pub fn new() -> Report {
        let command = std::env::args().skip(1).collect();
        Report {
            machine: Machine::now(),
            command,
            notes: Vec::new(),
            latencies: Vec::new(),
            slow_downs: Vec::new(),
            figures: Vec::new(),
        }
    }

    /// Adds the latencies of one run of the subject `name`.
    pub fn latency(&mut self, name: &str, latency: Latency) {
        let at = self.latencies.iter().position(|row| row.name == name).unwrap_or_else(|| {
            self.latencies.push(LatencyRow {
                name: name.to_owned(),
                median: latency,
                p50_spread: (latency.p50, latency.p50),
                runs: Vec::new(),
            });
            self.latencies.len() - 1
        });
        let row = &mut self.latencies[at];
        row.runs.push(latency);
        let of = |field: fn(&Latency) -> f64| {
            median_and_spread(&row.runs.iter().map(field).collect::<Vec<f64>>())
        };
        row.median = Latency {
            count: of(|run| run.count as f64).0 as u64,
            p50: of(|run| run.p50).0,
            p90: of(|run| run.p90).0,
            p99: of(|run| run.p99).0,
            p999: of(|run| run.p999).0,
            max: of(|run| run.max).0,
        };
        row.p50_spread = of(|run| run.p50).1;
    }

    /// Adds one run of a program, under what pages it, with a share of its memory.
    pub fn slow_down(&mut self, of: (&str, &str, u32), run: Run) {
        slow_down::add(&mut self.slow_downs, of, run);
    }

    /// Adds one run's value of the figure `name`.
    pub fn figure(&mut self, name: &str, unit: &str, value: f64) {
        self.judged(name, unit, value, None);
    }

    /// Adds one run's value of a figure whose median has a `target`.
    pub fn judged(&mut self, name: &str, unit: &str, value: f64, target: Option<Target>) {
        let at = self.figures.iter().position(|row| row.name == name).unwrap_or_else(|| {
            let (name, unit, spread) = (name.to_owned(), unit.to_owned(), (value, value));
            self.figures.push(Figure { name, unit, median: value, spread, target, runs: vec![] });
            self.figures.len() - 1
        });
        let row = &mut self.figures[at];
        row.runs.push(value);
        (row.median, row.spread) = median_and_spread(&row.runs);
    }

    /// Adds the rows of another machine; `note` tells what is to be known of them.
    pub fn absorb(&mut self, other: Report, note: &str) {
        let Machine { cpu, cpus, kernel, .. } = &other.machine;
        self.notes.push(format!("{note} ({cpu}, {cpus} CPUs, Linux {kernel})"));
        self.latencies.extend(other.latencies);
        self.figures.extend(other.figures);
    }

    /// The median of the figure `name` so far; not a number if there is none.
    pub fn median(&self, name: &str) -> f64 {
        self.figures.iter().find(|row| row.name == name).map_or(f64::NAN, |row| row.median)
    }

    /// Prints it, and writes it as JSON if asked to.
    pub fn publish(&self, json: Option<&Path>) -> Result<(), BenchError> {
        let text = serde_json::to_string_pretty(self)
            .map_err(|error| BenchError::Invalid(error.to_string()))?;
        match json {
            Some(path) if path == Path::new("-") => println!("{text}"),
            Some(path) => {
                fs::write(path, text).trying(&path.display().to_string())?;
                print!("{}", self.text());
            }
            None => print!("{}", self.text()),
        }
        Ok(())
    }

    /// As a table.
    pub fn text(&self) -> String {
        let Machine { date, commit, cpu, cpus, kernel, warning, .. } = &self.machine;
        let mut out = String::new();
        // Writing to a string does not fail.
        let _ = writeln!(out, "gms-bench {}", self.command.join(" "));
        let _ = writeln!(out, "{date}, commit {commit}, {cpu}, {cpus} CPUs, Linux {kernel}");
        if let Some(warning) = warning {
            let _ = writeln!(out, "WARNING: {warning}");
        }
        for note in &self.notes {
            let _ = writeln!(out, "{note}");
        }
        if !self.latencies.is_empty() {
            let heads = ["p50", "p90", "p99", "p99.9", "p50 of the runs"];
            let _ = writeln!(out, "\n{:52}{}", "latency in us", columns(&heads));
        }
        for row in &self.latencies {
            let (m, spread) = (&row.median, row.p50_spread);
            let cells = [m.p50, m.p90, m.p99, m.p999].map(digits);
            let [p50, p90, p99, p999] = &cells;
            let spread = format!("{}-{}", digits(spread.0), digits(spread.1));
            let _ = writeln!(out, "{:52}{}", row.name, columns(&[p50, p90, p99, p999, &spread]));
        }
        if !self.slow_downs.is_empty() {
            out.push_str(&slow_down::text(&self.slow_downs));
        }
        if !self.figures.is_empty() {
            let _ = writeln!(out, "\n{:52}{}", "figure", columns(&["median", "", "spread"]));
        }
        for row in &self.figures {
            let spread = format!("{}-{}", digits(row.spread.0), digits(row.spread.1));
            let cells = columns(&[&digits(row.median), &row.unit, &spread]);
            let _ = writeln!(out, "{:52}{cells}{}", row.name, row.verdict());
        }
        out
    }
}

impl Figure {
    fn verdict(&self) -> String {
        match self.target {
            Some(target) if target.is_met(self.median) => format!("  (target: {target})"),
            Some(target) => format!("  (MISSED the target: {target})"),
            None => String::new(),
        }
    }
}

fn columns(cells: &[&str]) -> String {
    cells.iter().map(|cell| format!(" {cell:>9}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missed_target_is_shouted() {
        let mut report = Report::new();
        report.judged("cost", "x", 3.0, Some(Target::AtMost(2.5)));
        assert!(report.text().contains("MISSED the target: at most 2.5"));
        report.judged("cost", "x", 2.0, Some(Target::AtMost(2.5)));
        assert!(!report.text().contains("MISSED"));
        report.judged("gain", "x", 0.5, Some(Target::AtLeast(0.6)));
        assert!(report.text().contains("MISSED the target: at least 0.6"));
    }
}
