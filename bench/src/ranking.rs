//! Puts subjects in order, as far as their runs allow it.

use serde::{Deserialize, Serialize};

/// What has fewer runs than this is marked: its range says little.
const RUNS_MIN: usize = 3;

/// Rows to be put in order.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ranking {
    /// What they are compared by.
    pub what: String,
    /// Of the rows.
    pub names: Vec<String>,
}

/// One of those that are put in order.
pub(crate) struct Ranked<'a> {
    /// For the report.
    pub name: &'a str,
    /// Over the runs.
    pub median: f64,
    /// The least and the greatest of the runs.
    pub spread: (f64, f64),
    /// How many.
    pub runs: usize,
}

/// From the least median to the greatest. ` < ` stands where the range of each on its left ends, by more than the factor `noise`,
/// before that of each on its right begins, ` ~ ` where that is not so, and ` ? ` where one of them has too few runs to have a range.
pub(crate) fn order(mut rows: Vec<Ranked<'_>>, noise: f64) -> String {
    rows.sort_by(|a, b| a.median.total_cmp(&b.median));
    let mut out = String::new();
    for (at, row) in rows.iter().enumerate() {
        let (left, right) = rows.split_at(at);
        let greatest = left.iter().map(|row| row.spread.1).fold(f64::NEG_INFINITY, f64::max);
        let least = right.iter().map(|row| row.spread.0).fold(f64::INFINITY, f64::min);
        out += match at {
            0 => "",
            _ if greatest * noise.max(1.0) >= least => " ~ ",
            _ if [left, right].iter().any(|side| has_few(side, greatest, least)) => " ? ",
            _ => " < ",
        };
        out += &format!("{}{}", row.name, few(row.runs));
    }
    out
}

/// Whether one of those that bound the gap has few runs.
fn has_few(side: &[Ranked<'_>], greatest: f64, least: f64) -> bool {
    let bounds = |row: &&Ranked<'_>| row.spread.1 == greatest || row.spread.0 == least;
    side.iter().filter(bounds).any(|row| row.runs < RUNS_MIN)
}

/// Marks what has few runs.
pub(crate) fn few(runs: usize) -> String {
    if runs < RUNS_MIN { format!(" [{runs}]") } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, median: f64, least: f64, greatest: f64) -> Ranked<'_> {
        Ranked { name, median, spread: (least, greatest), runs: 3 }
    }

    #[test]
    fn an_order_is_told_where_no_range_crosses_it() {
        let rows = vec![row("c", 9.0, 8.0, 10.0), row("a", 1.0, 0.5, 2.0), row("b", 3.0, 2.5, 8.0)];
        assert_eq!(order(rows, 1.2), "a < b ~ c");
        let rows = vec![row("a", 1.0, 0.5, 2.0), row("b", 3.0, 2.5, 8.0)];
        assert_eq!(order(rows, 1.3), "a ~ b", "no further apart than what is alike");
        // The range of the last one covers all.
        let rows = vec![row("a", 1.0, 1.0, 2.0), row("b", 3.0, 2.5, 4.0), row("c", 9.0, 1.5, 10.0)];
        assert_eq!(order(rows, 1.0), "a ~ b ~ c");
        let once = Ranked { runs: 1, ..row("a", 1.0, 1.0, 1.0) };
        let rows = vec![row("b", 2.0, 1.5, 2.0), once, row("c", 9.0, 8.0, 9.0)];
        assert_eq!(order(rows, 1.0), "a [1] ? b < c");
    }
}
