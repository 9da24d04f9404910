//! How much longer programs take with less memory of their own: as tables.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ranking::{Ranked, few, order};
use crate::samples::median_and_spread;
use crate::svg::{Series, digits};

/// A program with a share of its memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SlowDown {
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
    /// What it was allowed, and what it took.
    #[serde(flatten)]
    pub memory: Memory,
    /// gms's own figures of the last run.
    pub gms: Option<Value>,
    runs: Vec<f64>,
    runs_s: Vec<f64>,
}

/// Memory in MiB, of the runs of one row the most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Memory {
    /// What may be taken: the same for all that page a program.
    pub limit_mib: f64,
    /// What was set for that: gms's `--local`, or the limit of the cgroup.
    pub set_mib: f64,
    /// What was taken: what the cgroup was charged, in which gms is too, and zram's pool where it
    /// is charged.
    pub peak_mib: f64,
    /// zram's pool.
    pub pool_mib: Option<f64>,
}

impl Memory {
    fn most(self, other: Memory) -> Memory {
        Memory {
            limit_mib: self.limit_mib.max(other.limit_mib),
            set_mib: self.set_mib.max(other.set_mib),
            peak_mib: self.peak_mib.max(other.peak_mib),
            pool_mib: self.pool_mib.into_iter().chain(other.pool_mib).reduce(f64::max),
        }
    }
}

/// One run of it.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    /// Its time.
    pub seconds: f64,
    /// Its time without a limit.
    pub free_s: f64,
    /// What it was allowed, and what it took.
    pub memory: Memory,
    /// gms's own figures.
    pub gms: Option<Value>,
}

/// Adds a run.
pub(crate) fn add(all: &mut Vec<SlowDown>, (program, under, share): (&str, &str, u32), run: Run) {
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
            memory: Memory::default(),
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
    one.memory = one.memory.most(run.memory);
    one.gms = run.gms;
}

/// The shares, the greatest first.
pub(crate) fn shares(all: &[SlowDown]) -> Vec<u32> {
    let mut shares: Vec<u32> = all.iter().map(|one| one.share).collect();
    shares.sort_unstable_by(|a, b| b.cmp(a));
    shares.dedup();
    shares
}

/// Programs, in the order in which they came.
pub(crate) fn programs(all: &[SlowDown]) -> Vec<&str> {
    distinct(all.iter().map(|one| &one.program[..]))
}

/// A line of a plot for each that pages `program`, over [`shares`].
pub(crate) fn series(all: &[SlowDown], program: &str) -> Vec<Series> {
    let of: Vec<&SlowDown> = all.iter().filter(|one| one.program == program).collect();
    let line = |under: &str| {
        let at = |share: u32| of.iter().find(|one| one.under == under && one.share == share);
        let values = shares(all).into_iter().map(|share| Some(at(share)?.median)).collect();
        Series { name: under.to_owned(), values }
    };
    distinct(of.iter().map(|one| &one.under[..])).into_iter().map(line).collect()
}

/// The tables: slow-downs, and what memory they were had with.
pub(crate) fn text(all: &[SlowDown]) -> String {
    let slow_down = |one: &SlowDown| {
        let (least, greatest) = (digits(one.spread.0), digits(one.spread.1));
        Some(format!("{} ({least}-{greatest}){}", digits(one.median), few(one.runs.len())))
    };
    let peak = |one: &SlowDown| {
        let Memory { peak_mib, limit_mib, .. } = one.memory;
        Some(format!("{peak_mib:.0}/{limit_mib:.0} {:.2}x", peak_mib / limit_mib))
    };
    let set = |one: &SlowDown| Some(format!("{:.0}", one.memory.set_mib));
    let pool = |one: &SlowDown| one.memory.pool_mib.map(|mib| format!("{mib:.0}"));
    table(all, "slow-down at local memory of", slow_down)
        + &table(all, "peak / limit, MiB", peak)
        + &table(all, "--local or cgroup's limit, MiB", set)
        + &table(all, "zram's pool, MiB", pool)
}

/// Of each program and share, what pages it from the fastest to the slowest.
pub(crate) fn rankings(all: &[SlowDown], noise: impl Fn(&str) -> f64) -> Vec<String> {
    let mut lines = Vec::new();
    let each = |program| shares(all).into_iter().map(move |share| (program, share));
    for (program, share) in programs(all).into_iter().flat_map(each) {
        let of = all.iter().filter(|one| one.program == program && one.share == share);
        let rows = of.map(|one| Ranked {
            name: &one.under,
            median: one.median,
            spread: one.spread,
            runs: one.runs.len(),
        });
        lines.push(format!("{program} at {share} %: {}", order(rows.collect(), noise(program))));
    }
    lines
}

/// Rows without any cell are left out.
fn table(all: &[SlowDown], head: &str, cell: impl Fn(&SlowDown) -> Option<String>) -> String {
    let all: Vec<SlowDown> = all.iter().filter(|one| cell(one).is_some()).cloned().collect();
    if all.is_empty() {
        return String::new();
    }
    let all = &all[..];
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write!(out, "\n{head:36}");
    let shares = shares(all);
    shares.iter().for_each(|share| out.push_str(&format!(" {:>24}", format!("{share} %"))));
    for program in programs(all) {
        let of: Vec<&SlowDown> = all.iter().filter(|one| one.program == program).collect();
        for under in distinct(of.iter().map(|one| &one.under[..])) {
            let _ = write!(out, "\n{:36}", format!("{program}, {under}"));
            for share in &shares {
                let one = of.iter().find(|one| one.under == under && one.share == *share);
                let _ = write!(
                    out,
                    " {:>24}",
                    one.and_then(|one| cell(one)).unwrap_or_else(|| "-".into())
                );
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
        let run = |seconds: f64, peak_mib: f64, pool_mib: Option<f64>| Run {
            seconds,
            free_s: 2.0,
            memory: Memory { limit_mib: 50.0, set_mib: 40.0, peak_mib, pool_mib },
            gms: None,
        };
        add(&mut all, ("sort", "gms", 50), run(4.0, 51.0, None));
        add(&mut all, ("sort", "gms", 50), run(6.0, 49.0, None));
        add(&mut all, ("sort", "gms", 100), run(2.0, 100.0, None));
        add(&mut all, ("sort", "zram swap", 50), run(5.0, 50.0, Some(11.0)));
        assert_eq!(shares(&all), [100, 50]);
        let text = text(&all);
        let cells = |begin: &str| -> Vec<String> {
            let rows = text.lines().filter(|line| line.starts_with(begin));
            rows.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
        };
        assert_eq!(
            cells("sort, gms"),
            [
                "sort, gms 1.00 (1.00-1.00) [1] 2.50 (2.00-3.00) [2]",
                "sort, gms 100/50 2.00x 51/50 1.02x",
                "sort, gms 40 40"
            ],
            "{text}"
        );
        assert_eq!(cells("sort, zram").last().map(|row| &row[..]), Some("sort, zram swap 11"));
        let lines = series(&all, "sort");
        assert_eq!(lines[0].values, [Some(1.0), Some(2.5)]);
        assert_eq!(
            (&lines[1].name[..], &lines[1].values[..]),
            ("zram swap", &[None, Some(2.5)][..])
        );
        assert_eq!(rankings(&all, |_| 1.0)[1], "sort at 50 %: gms [2] ~ zram swap [1]");
    }
}
