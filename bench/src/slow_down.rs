//! How much longer programs take with less memory of their own: as tables.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::samples::median_and_spread;
use crate::svg::{Series, digits};

/// A program with a share of its memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SlowDown {
    /// The program.
    pub program: String,
    /// What pages the rest.
    pub under: String,
    /// The share, in percent of the most that is resident without a limit.
    pub share: u32,
    /// Its time over that without a limit in the same run: the median of the runs.
    pub median: f64,
    /// The least and the greatest of the runs.
    pub spread: (f64, f64),
    /// Its time in s, the median of the runs.
    pub seconds: f64,
    /// The share in MiB.
    pub budget_mib: f64,
    /// The most that was resident in any run, in MiB.
    pub peak_mib: f64,
    /// gms's own figures of the last run.
    pub gms: Option<Value>,
    runs: Vec<f64>,
    runs_s: Vec<f64>,
}

/// One run of it.
pub struct Run {
    /// Its time.
    pub seconds: f64,
    /// Its time without a limit.
    pub free_s: f64,
    /// The share in MiB.
    pub budget_mib: f64,
    /// The most that was resident, in MiB.
    pub peak_mib: f64,
    /// gms's own figures.
    pub gms: Option<Value>,
}

/// Adds a run.
pub fn add(all: &mut Vec<SlowDown>, (program, under, share): (&str, &str, u32), run: Run) {
    let is =
        |one: &SlowDown| (&one.program[..], &one.under[..], one.share) == (program, under, share);
    let at = all.iter().position(is).unwrap_or_else(|| {
        all.push(SlowDown {
            program: program.to_owned(),
            under: under.to_owned(),
            share,
            median: 0.0,
            spread: (0.0, 0.0),
            seconds: 0.0,
            budget_mib: 0.0,
            peak_mib: 0.0,
            gms: None,
            runs: Vec::new(),
            runs_s: Vec::new(),
        });
        all.len() - 1
    });
    let one = &mut all[at];
    one.runs.push(run.seconds / run.free_s);
    one.runs_s.push(run.seconds);
    (one.median, one.spread) = median_and_spread(&one.runs);
    one.seconds = median_and_spread(&one.runs_s).0;
    (one.budget_mib, one.peak_mib) = (run.budget_mib, one.peak_mib.max(run.peak_mib));
    one.gms = run.gms;
}

/// The shares, the greatest first.
pub fn shares(all: &[SlowDown]) -> Vec<u32> {
    let mut shares: Vec<u32> = all.iter().map(|one| one.share).collect();
    shares.sort_unstable_by(|a, b| b.cmp(a));
    shares.dedup();
    shares
}

/// Programs, in the order in which they came.
pub fn programs(all: &[SlowDown]) -> Vec<&str> {
    distinct(all.iter().map(|one| &one.program[..]))
}

/// A line of a plot for each that pages `program`, over [`shares`].
pub fn series(all: &[SlowDown], program: &str) -> Vec<Series> {
    let of: Vec<&SlowDown> = all.iter().filter(|one| one.program == program).collect();
    let line = |under: &str| {
        let at = |share: u32| of.iter().find(|one| one.under == under && one.share == share);
        let values = shares(all).into_iter().map(|share| Some(at(share)?.median)).collect();
        Series { name: under.to_owned(), values }
    };
    distinct(of.iter().map(|one| &one.under[..])).into_iter().map(line).collect()
}

/// Both tables: slow-downs, and whether the limits were kept.
pub fn text(all: &[SlowDown]) -> String {
    let slow_down = |one: &SlowDown| {
        let (least, greatest) = (digits(one.spread.0), digits(one.spread.1));
        format!("{} ({least}-{greatest})", digits(one.median))
    };
    let peak = |one: &SlowDown| format!("{:.0}/{:.0}", one.peak_mib, one.budget_mib);
    table(all, "slow-down at local memory of", slow_down)
        + &table(all, "most that was resident / limit, MiB", peak)
}

fn table(all: &[SlowDown], head: &str, cell: impl Fn(&SlowDown) -> String) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write!(out, "\n{head:36}");
    let shares = shares(all);
    shares.iter().for_each(|share| out.push_str(&format!(" {:>20}", format!("{share} %"))));
    for program in programs(all) {
        let of: Vec<&SlowDown> = all.iter().filter(|one| one.program == program).collect();
        for under in distinct(of.iter().map(|one| &one.under[..])) {
            let _ = write!(out, "\n{:36}", format!("{program}, {under}"));
            for share in &shares {
                let one = of.iter().find(|one| one.under == under && one.share == *share);
                let _ = write!(out, " {:>20}", one.map_or_else(|| "-".into(), |one| cell(one)));
            }
        }
    }
    out.push('\n');
    out
}

fn distinct<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut all: Vec<&str> = Vec::new();
    for name in names {
        if !all.contains(&name) {
            all.push(name);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_have_a_cell_for_each_share() {
        let mut all = Vec::new();
        let run = |seconds: f64, peak_mib: f64| Run {
            seconds,
            free_s: 2.0,
            budget_mib: 50.0,
            peak_mib,
            gms: None,
        };
        add(&mut all, ("sort", "gms", 50), run(4.0, 51.0));
        add(&mut all, ("sort", "gms", 50), run(6.0, 49.0));
        add(&mut all, ("sort", "gms", 100), run(2.0, 100.0));
        add(&mut all, ("sort", "zram swap", 50), run(3.0, 50.0));
        assert_eq!(shares(&all), [100, 50]);
        let text = text(&all);
        assert!(text.contains("1.00 (1.00-1.00)     2.50 (2.00-3.00)"), "{text}");
        assert!(text.contains("51/50"), "{text}");
        let lines = series(&all, "sort");
        assert_eq!(lines[0].values, [Some(1.0), Some(2.5)]);
        assert_eq!(
            (&lines[1].name[..], &lines[1].values[..]),
            ("zram swap", &[None, Some(1.5)][..])
        );
    }
}
