//! `gms status`.

use std::fmt::Write;

use super::detach::no_workload;
use super::{Failure, print, say};
use crate::control::{self, Workload};
use crate::size::Human;
use crate::stats::Stats;

/// Longest command line shown.
const COMMAND_CHARS_MAX: usize = 48;

/// Prints the workloads of this machine, or one of them.
pub fn status(pid: Option<i32>, json: bool) -> Result<u8, Failure> {
    let workloads = match pid {
        Some(pid) => vec![control::find(pid).ok_or_else(|| no_workload(pid))?],
        None => control::workloads(),
    };
    if json {
        let list: Vec<&Stats> = workloads.iter().map(|workload| &workload.stats).collect();
        let mut text = serde_json::to_vec_pretty(&list).map_err(std::io::Error::from)?;
        text.push(b'\n');
        print(&text)?;
    } else if workloads.is_empty() {
        say("nothing is paged on this machine now");
    } else {
        print(table(&workloads).as_bytes())?;
    }
    Ok(0)
}

fn table(workloads: &[Workload]) -> String {
    let mut text = format!(
        "{:>8} {:>8} {:>10} {:>10} {:>10} {:>12} {:>8} {:>8}  {:<11}  {}\n",
        "PID",
        "PAGER",
        "RESIDENT",
        "BUDGET",
        "REMOTE",
        "FAULTS",
        "P50 us",
        "P99 us",
        "STATE",
        "COMMAND"
    );
    for Workload { stats, .. } in workloads {
        let _ = writeln!(
            text,
            "{:>8} {:>8} {:>10} {:>10} {:>10} {:>12} {:>8.1} {:>8.1}  {:<11}  {}",
            stats.pid,
            stats.supervisor_pid,
            Human(stats.resident_bytes),
            Human(stats.budget_bytes),
            Human(stats.remote_bytes),
            stats.faults,
            stats.fault_us.p50,
            stats.fault_us.p99,
            state(stats),
            printable(&stats.command, COMMAND_CHARS_MAX),
        );
    }
    text
}

/// What is to be known at once.
fn state(stats: &Stats) -> &'static str {
    match (stats.detaching, stats.agents_full) {
        (true, _) => "detaching",
        (false, true) => "agents full",
        (false, false) => "ok",
    }
}

/// A character from elsewhere, fit for a terminal: none that controls it (C0, C1), or changes the order or the lines of what it shows.
pub fn plain(c: char) -> char {
    match c {
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
            '?'
        }
        c if c.is_control() => '?',
        c => c,
    }
}

/// A text from elsewhere, fit for a terminal: cut, and of [`plain`] characters.
pub fn printable(text: &str, chars_max: usize) -> String {
    match text.char_indices().nth(chars_max) {
        Some(_) => {
            text.chars().take(chars_max.saturating_sub(3)).map(plain).chain("...".chars()).collect()
        }
        None => text.chars().map(plain).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines_cannot_harm_the_terminal() {
        assert_eq!(printable("a\x1b[2Jb\nc", 20), "a?[2Jb?c");
        assert_eq!(printable("a\u{9b}2J\u{202e}b\u{2066}c\u{200f}d\u{2028}", 20), "a?2J?b?c?d?");
        assert_eq!(printable("0123456789", 10), "0123456789");
        assert_eq!(printable("0123456789x", 10), "0123456...");
    }

    #[test]
    fn a_workload_is_one_line() {
        let stats =
            Stats { pid: 7, command: "x\ny".into(), budget_bytes: 64 << 20, ..Stats::default() };
        let text = table(&[Workload { stats, front_pid: 6 }]);
        assert_eq!(text.lines().count(), 2);
        assert!(text.contains("64 MiB") && text.contains("  ok  "), "{text}");
    }

    #[test]
    fn full_agents_are_seen() {
        let stats = Stats { agents_full: true, ..Stats::default() };
        let text = table(&[Workload { stats: stats.clone(), front_pid: 6 }]);
        assert!(text.contains("agents full"), "{text}");
        assert_eq!(state(&Stats { detaching: true, ..stats }), "detaching");
    }
}
