//! `gms status`.

use std::fmt::Write;

use gms_transport::text::printable;

use super::detach::no_workload;
use super::{Failure, print};
use crate::control::{self, Workload};
use crate::json;
use crate::size::Human;
use crate::speech::say;
use crate::stats::Stats;

/// Longest command line shown.
const COMMAND_CHARS_MAX: usize = 48;

/// Prints the workloads of this machine, or one of them.
pub(super) fn status(pid: Option<i32>, json: bool) -> Result<u8, Failure> {
    let workloads = match pid {
        Some(pid) => vec![control::find(pid).ok_or_else(|| no_workload(pid))?],
        None => control::workloads(),
    };
    if json {
        let list: Vec<&Stats> = workloads.iter().map(|workload| &workload.stats).collect();
        print(&json::lines(&list)?)?;
    } else if workloads.is_empty() {
        say("nothing is paged on this machine now");
    } else {
        print(table(&workloads).as_bytes())?;
    }
    Ok(0)
}

fn table(workloads: &[Workload]) -> String {
    let mut text = format!(
        "{:>8} {:>8} {:>10} {:>10} {:>10} {:>12} {:>8} {:>8}  {:<12}  {}\n",
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
            "{:>8} {:>8} {:>10} {:>10} {:>10} {:>12} {:>8.1} {:>8.1}  {:<12}  {}",
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
pub(super) fn state(stats: &Stats) -> &'static str {
    let drains = stats.agents.iter().any(|agent| agent.up && agent.draining);
    let down = stats.agents.iter().any(|agent| !agent.up && !agent.draining);
    match stats {
        Stats { detaching: true, .. } => "detaching",
        Stats { agents_full: true, .. } => "agents full",
        _ if drains => "agent drains",
        _ if down => "agent down",
        Stats { short_bytes: 1.., parity: Some(_), .. } => "rebuilding",
        Stats { short_bytes: 1.., .. } => "few copies",
        _ => "ok",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::AgentStats;

    #[test]
    fn a_workload_is_one_line() {
        let stats =
            Stats { pid: 7, command: "x\ny".into(), budget_bytes: 64 << 20, ..Stats::default() };
        let text = table(&[Workload { stats, front_pid: 6 }]);
        assert_eq!(text.lines().count(), 2);
        assert!(text.contains("64 MiB") && text.contains("  ok  "), "{text}");
    }

    #[test]
    fn an_agent_that_drains_is_seen() {
        let drains = AgentStats { up: true, draining: true, ..AgentStats::default() };
        let stats = Stats { agents: vec![drains, AgentStats::default()], ..Stats::default() };
        assert_eq!(state(&stats), "agent drains");
        assert_eq!(state(&Stats { agents_full: true, ..stats }), "agents full");
    }

    #[test]
    fn full_agents_are_seen() {
        let stats = Stats { agents_full: true, ..Stats::default() };
        let text = table(&[Workload { stats: stats.clone(), front_pid: 6 }]);
        assert!(text.contains("agents full"), "{text}");
        assert_eq!(state(&Stats { detaching: true, ..stats }), "detaching");
        let short = Stats { short_bytes: 4096, ..Stats::default() };
        assert_eq!(state(&short), "few copies");
        let parity = Some("4+1".into());
        assert_eq!(state(&Stats { parity, ..short.clone() }), "rebuilding");
        assert_eq!(state(&Stats { agents: vec![AgentStats::default()], ..short }), "agent down");
    }
}
