//! What was measured: as a table, and as JSON for other programs.

use std::fmt::{self, Write as _};
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{BenchError, Trying};
use crate::machine::Machine;
use crate::ranking::{self, Ranked, Ranking, few};
use crate::samples::{Latency, median_and_spread};
use crate::slow_down::{self, Run, SlowDown};
use crate::svg::digits;

/// Least samples beyond a quantile that is shown.
const SAMPLES_BEYOND: u64 = 10;
/// How often a run is tried again that was refused.
const TRIES_MAX: u32 = 3;

/// A report in the making.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Where and when it was made.
    pub machine: Machine,
    /// The command line.
    pub command: Vec<String>,
    /// What else must be known of the figures.
    #[serde(default)]
    pub notes: Vec<String>,
    /// What failed: gms died, or was not done in time, or something else ended the measurement.
    #[serde(default)]
    pub failures: Vec<String>,
    /// Runs which were refused, each with the reason. No row has anything of them.
    #[serde(default)]
    pub refused: Vec<String>,
    /// Rows which have nothing of gms in them: their ranges are the noise of the machine.
    #[serde(default)]
    noise: Vec<String>,
    /// Rows to be put in order.
    #[serde(default)]
    rankings: Vec<Ranking>,
    /// All latencies.
    pub latencies: Vec<LatencyRow>,
    /// Programs with less memory of their own.
    #[serde(default)]
    pub slow_downs: Vec<SlowDown>,
    /// All else.
    pub figures: Vec<Figure>,
}

/// Latencies of one subject, in us.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LatencyRow {
    /// The subject.
    pub name: String,
    /// Of each quantile its median over the runs.
    pub median: Latency,
    /// The least and the greatest p50 of the runs.
    p50_spread: (f64, f64),
    /// The same of p99.
    #[serde(default)]
    p99_spread: (f64, f64),
    runs: Vec<Latency>,
}

/// Any other figure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Figure {
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
pub(crate) enum Target {
    /// Here or below.
    AtMost(f64),
    /// Here or above.
    AtLeast(f64),
}

impl Target {
    /// Whether `value` lies there.
    pub(crate) fn is_met(self, value: f64) -> bool {
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
    pub(crate) fn new() -> Report {
        let command = std::env::args().skip(1).collect();
        Report {
            machine: Machine::now(),
            command,
            notes: Vec::new(),
            failures: Vec::new(),
            refused: Vec::new(),
            noise: Vec::new(),
            rankings: Vec::new(),
            latencies: Vec::new(),
            slow_downs: Vec::new(),
            figures: Vec::new(),
        }
    }

    /// One run of `what`. If it is refused its rows go, the reason stays, and it is tried again;
    /// `None` if it was refused each time.
    pub(crate) fn run<T>(
        &mut self,
        what: &str,
        mut measure: impl FnMut(&mut Report) -> Result<T, BenchError>,
    ) -> Result<Option<T>, BenchError> {
        for _ in 0..TRIES_MAX {
            let mut tried = self.clone();
            match measure(&mut tried) {
                Ok(value) => {
                    *self = tried;
                    return Ok(Some(value));
                }
                Err(BenchError::Refused(why)) => {
                    eprintln!("gms-bench: a run is refused: {what}: {why}");
                    self.refused.push(format!("{what}: {why}"));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// The row `name` has nothing of gms in it: its range is the noise of the machine.
    pub(crate) fn noise(&mut self, name: &str) {
        if !self.noise.iter().any(|known| known == name) {
            self.noise.push(name.to_owned());
        }
    }

    /// The rows `names`, by their p50 or median, are to be put in order.
    pub(crate) fn rank(&mut self, what: &str, names: &[String]) {
        self.rankings.retain(|ranking| ranking.what != what);
        self.rankings.push(Ranking { what: what.to_owned(), names: names.to_vec() });
    }

    /// Adds the latencies of one run of the subject `name`.
    pub(crate) fn latency(&mut self, name: &str, latency: Latency) {
        let at = self.latencies.iter().position(|row| row.name == name).unwrap_or_else(|| {
            self.latencies.push(LatencyRow {
                name: name.to_owned(),
                median: latency,
                p50_spread: (latency.p50, latency.p50),
                p99_spread: (latency.p99, latency.p99),
                runs: Vec::new(),
            });
            self.latencies.len() - 1
        });
        let row = &mut self.latencies[at];
        row.runs.push(latency);
        let of = |field| over(&row.runs, field);
        row.median = Latency {
            count: of(|run| run.count as f64).0 as u64,
            mean: of(|run| run.mean).0,
            p50: of(|run| run.p50).0,
            p90: of(|run| run.p90).0,
            p99: of(|run| run.p99).0,
            p999: of(|run| run.p999).0,
            max: of(|run| run.max).0,
        };
        row.p50_spread = of(|run| run.p50).1;
        row.p99_spread = of(|run| run.p99).1;
    }

    /// Adds one run of a program, under what pages it, with a share of its memory.
    pub(crate) fn slow_down(&mut self, of: (&str, &str, u32), run: Run) {
        slow_down::add(&mut self.slow_downs, of, run);
    }

    /// Adds one run's value of the figure `name`.
    pub(crate) fn figure(&mut self, name: &str, unit: &str, value: f64) {
        self.judged(name, unit, value, None);
    }

    /// Adds one run's value of a figure whose median has a `target`.
    pub(crate) fn judged(&mut self, name: &str, unit: &str, value: f64, target: Option<Target>) {
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
    pub(crate) fn absorb(&mut self, other: Report, note: &str) {
        self.notes.push(format!("{note}\n{}", other.machine.text().trim_end()));
        self.failures.extend(other.failures);
        self.refused.extend(other.refused);
        self.noise.extend(other.noise);
        self.rankings.extend(other.rankings);
        self.latencies.extend(other.latencies);
        self.figures.extend(other.figures);
    }

    /// What the runs so far have had of the figure `name`.
    pub(crate) fn values(&self, name: &str) -> Vec<f64> {
        self.figures.iter().find(|row| row.name == name).map_or(vec![], |row| row.runs.clone())
    }

    /// Whether nothing was measured.
    pub(crate) fn is_empty(&self) -> bool {
        self.latencies.is_empty() && self.figures.is_empty() && self.slow_downs.is_empty()
    }

    /// Prints it, and writes it as JSON if asked to. An error if it is not all that was to be measured.
    pub(crate) fn publish(mut self, json: Option<&Path>) -> Result<(), BenchError> {
        self.machine.finish();
        let text = serde_json::to_string_pretty(&self)
            .map_err(|error| BenchError::Invalid(error.to_string()))?;
        match json {
            Some(path) if path == Path::new("-") => println!("{text}"),
            Some(path) => {
                fs::write(path, text).trying(&path.display().to_string())?;
                print!("{}", self.text());
            }
            None => print!("{}", self.text()),
        }
        match (self.is_empty(), &self.failures[..]) {
            (_, [first, ..]) => Err(BenchError::Failed(first.clone())),
            (true, []) => Err(BenchError::Refused("each run was refused".into())),
            (false, []) => Ok(()),
        }
    }

    /// As a table.
    pub(crate) fn text(&self) -> String {
        let mut out = format!("gms-bench {}\n{}", self.command.join(" "), self.machine.text());
        self.notes.iter().for_each(|note| out += &format!("{note}\n"));
        self.failures.iter().for_each(|what| out += &format!("FAILED: {what}\n"));
        if !self.refused.is_empty() {
            out +=
                &format!("refused runs: {}; no figure has anything of them\n", self.refused.len());
        }
        self.refused.iter().for_each(|why| out += &format!("  {why}\n"));
        out += &self.noise_text();
        if !self.latencies.is_empty() {
            let heads = ["p50", "p90", "p99", "p99.9", "mean", "samples", "p50 of the runs", "p99"];
            // Writing to a string does not fail.
            let _ = writeln!(out, "\n{:60}{}", "latency in us", columns(&heads));
        }
        for row in &self.latencies {
            let (m, few) = (&row.median, few(row.runs.len()));
            // Of a quantile with few samples beyond it nothing is known.
            let known = |value, beyond| {
                if m.count >= SAMPLES_BEYOND * beyond { digits(value) } else { "-".into() }
            };
            let cells = columns(&[
                &digits(m.p50),
                &known(m.p90, 10),
                &known(m.p99, 100),
                &known(m.p999, 1000),
                &digits(m.mean),
                &m.count.to_string(),
                &format!("{:>15}", range(row.p50_spread)),
                &range(row.p99_spread),
            ]);
            let _ = writeln!(out, "{:60}{cells}{few}", row.name);
        }
        if !self.slow_downs.is_empty() {
            out.push_str(&slow_down::text(&self.slow_downs));
        }
        if !self.figures.is_empty() {
            let _ = writeln!(out, "\n{:60}{}", "figure", columns(&["median", "", "spread"]));
        }
        for row in &self.figures {
            let cells = columns(&[&digits(row.median), &row.unit, &range(row.spread)]);
            let _ = writeln!(out, "{:60}{cells}{}", row.name, row.verdict());
        }
        out + &self.rankings_text()
    }

    /// How far runs differ which have nothing of gms in them: what lies closer is not told apart.
    fn noise_text(&self) -> String {
        let line = |name: &String| {
            let Ranked { spread, runs, .. } = self.ranked(name)?;
            let times = digits(spread.1 / spread.0);
            Some(format!("\n  {name}: {}, {times} x{}", range(spread), few(runs)))
        };
        let lines: String = self.noise.iter().filter_map(line).collect();
        match lines.is_empty() {
            true => lines,
            false => {
                format!("noise of the machine, runs without gms and without a limit:{lines}\n")
            }
        }
    }

    fn rankings_text(&self) -> String {
        let mut lines: Vec<String> = self
            .rankings
            .iter()
            .map(|ranking| {
                let rows = ranking.names.iter().filter_map(|name| self.ranked(name)).collect();
                format!("{}: {}", ranking.what, ranking::order(rows, self.noisiest(|_| true)))
            })
            .collect();
        let noise = |program: &str| self.noisiest(|row| row.starts_with(&format!("{program}, ")));
        lines.extend(slow_down::rankings(&self.slow_downs, noise));
        match lines.is_empty() {
            true => String::new(),
            false => format!(
                "\nfrom the least to the greatest (~: their ranges are no further apart than the noise, so no order; ?: too few runs; [n]: of n runs)\n  {}\n",
                lines.join("\n  ")
            ),
        }
    }

    /// The range of the noisiest of these rows without gms, as a factor.
    fn noisiest(&self, is_of: impl Fn(&str) -> bool) -> f64 {
        let rows = self.noise.iter().filter(|name| is_of(name));
        let ranges =
            rows.filter_map(|name| self.ranked(name).map(|row| row.spread.1 / row.spread.0));
        ranges.fold(1.0, f64::max)
    }

    /// The row `name`, which may be of either kind.
    fn ranked<'a>(&'a self, name: &'a str) -> Option<Ranked<'a>> {
        let latency = self.latencies.iter().find(|row| row.name == name).map(|row| Ranked {
            name,
            median: row.median.p50,
            spread: row.p50_spread,
            runs: row.runs.len(),
        });
        let figure = || {
            let row = self.figures.iter().find(|row| row.name == name)?;
            Some(Ranked { name, median: row.median, spread: row.spread, runs: row.runs.len() })
        };
        latency.or_else(figure)
    }
}

/// Median and range of one of their fields.
fn over(runs: &[Latency], field: fn(&Latency) -> f64) -> (f64, (f64, f64)) {
    median_and_spread(&runs.iter().map(field).collect::<Vec<f64>>())
}

impl Figure {
    /// Says so if some runs meet the target and some do not.
    pub(crate) fn divided(&self) -> &'static str {
        let met = |value: f64| self.target.is_none_or(|target| target.is_met(value));
        if met(self.spread.0) != met(self.spread.1) { ", but not in all runs" } else { "" }
    }

    /// Marks it if it has few runs.
    pub(crate) fn few(&self) -> String {
        few(self.runs.len())
    }

    fn verdict(&self) -> String {
        let Some(target) = self.target else { return self.few() };
        let (divided, few) = (self.divided(), self.few());
        match target.is_met(self.median) {
            true => format!("  (target: {target}{divided}){few}"),
            false => format!("  (MISSED the target: {target}{divided}){few}"),
        }
    }
}

fn range((least, greatest): (f64, f64)) -> String {
    format!("{}-{}", digits(least), digits(greatest))
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
        assert!(report.text().contains("MISSED the target: at most 2.5) [1]"));
        report.judged("cost", "x", 2.0, Some(Target::AtMost(2.5)));
        assert!(report.text().contains(" (target: at most 2.5, but not in all runs) [2]"));
        report.judged("cost", "x", 2.0, None);
        assert!(
            report.text().lines().any(|line| line.ends_with("not in all runs)")),
            "enough runs"
        );
        report.judged("gain", "x", 0.5, Some(Target::AtLeast(0.6)));
        assert!(report.text().contains("MISSED the target: at least 0.6) [1]"));
    }

    #[test]
    fn a_refused_run_leaves_its_reason_only() {
        let mut report = Report::new();
        let mut runs = 0;
        let kept = report.run("swap", |report| {
            runs += 1;
            report.figure("rate", "x", f64::from(runs));
            match runs {
                1 | 2 => Err(BenchError::Refused(format!("noise {runs}"))),
                _ => Ok(runs),
            }
        });
        assert_eq!(kept.expect("no error"), Some(3));
        assert_eq!(report.figures[0].runs, [3.0], "nothing of the refused ones");
        assert_eq!(report.refused, ["swap: noise 1", "swap: noise 2"]);
        let text = report.text();
        assert!(text.contains("refused runs: 2;") && text.contains("swap: noise 2"), "{text}");
        let always = report.run("other", |_| Err::<(), _>(BenchError::Refused("busy".into())));
        assert!(always.expect("no error").is_none() && report.refused.len() == 5);
        let failed = report.run("other", |_| Err::<(), _>(BenchError::Needs("root".into())));
        assert!(failed.is_err() && report.refused.len() == 5);
        assert!(Report::new().publish(None).is_err(), "nothing is left");
        report.failures.push("gms died".into());
        assert!(report.text().contains("\nFAILED: gms died\n"));
        assert!(matches!(report.publish(None), Err(BenchError::Failed(_))));
    }

    #[test]
    fn noise_comes_before_an_order_which_it_may_forbid() {
        let mut report = Report::new();
        for value in [10.0, 12.0, 11.0] {
            report.figure("job, no limit", "s", value);
            report.figure("job, gms", "s", 2.0 * value);
            report.figure("job, swap", "s", 2.1 * value);
            report.figure("job, disk", "s", 2.6 * value);
        }
        report.noise("job, no limit");
        report.noise("job, no limit");
        report.rank("job", &["job, gms".into(), "job, swap".into(), "job, none".into()]);
        report.rank("job", &["job, disk".into(), "job, swap".into(), "job, gms".into()]);
        let text = report.text();
        assert_eq!(text.matches("job, no limit: 10.0-12.0, 1.20 x\n").count(), 1, "{text}");
        let (noise, order) =
            (text.find("noise of"), text.find("job: job, gms ~ job, swap ~ job, disk\n"));
        assert!(order.is_some() && noise < order, "{text}");
    }
}
