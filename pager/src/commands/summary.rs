//! What a session says when it ends: the paragraph on stderr, and the `--stats` file.

use std::io;
use std::path::Path;

use gms_policy::{Budget, Bytes};

use crate::handed::Descriptors;
use crate::json;
use crate::output::{Output, OutputRecord};
use crate::size::Human;
use crate::speech::say;
use crate::stats::{AgentStats, Stats};

/// The figures of a session for people.
pub(super) fn paragraph(stats: &Stats) -> String {
    let (peak, budget) = (Human(stats.resident_peak_bytes), Human(stats.budget_bytes));
    let unpaged = stats.pages_out == 0 && stats.clean_drops == 0 && stats.zero_drops == 0;
    let within = stats.resident_peak_bytes <= Budget::new(Bytes(stats.budget_bytes)).ceiling().0;
    if unpaged && within && stats.agents_full_s == 0.0 {
        return format!("never needed paging: resident at most {peak}, budget {budget}");
    }
    let latency = &stats.fault_us;
    let mut lines = vec![
        format!(
            "resident at most {peak}, budget {budget}; remote at most {}",
            Human(stats.remote_peak_bytes)
        ),
        format!(
            "{} faults, {} second chances; pages fetched for a thread: p50 {:.1} us, p99 {:.1} us, longest {:.0} us",
            stats.faults, stats.second_chances, latency.p50, latency.p99, latency.max
        ),
        format!(
            "{} pages out, {} in ({} ahead, {} of those used); {} clean and {} zero pages dropped",
            stats.pages_out,
            stats.pages_in,
            stats.prefetched,
            stats.prefetch_hits,
            stats.clean_drops,
            stats.zero_drops
        ),
    ];
    if stats.agents_full_s > 0.0 {
        lines.push(format!(
            "for {:.1} s no agent took pages, being full or away: add one, or give them more with --export",
            stats.agents_full_s
        ));
    }
    lines.push(match stats.sealed {
        true => "pages were sealed: agents saw none of them".into(),
        false => "pages were not sealed (--seal off): agents saw them".into(),
    });
    if stats.unpageable_bytes > 0 {
        lines.push(format!("{} could not be paged", Human(stats.unpageable_bytes)));
    }
    lines.extend(redundancy(stats));
    let teller = |one: &AgentStats| Some(&stats.agents.get(one.learned_from?)?.addr);
    lines.extend(stats.agents.iter().map(|one| agent(one, teller(one))));
    lines.join("\n")
}

/// How many copies there are of each page, where there are several agents.
fn redundancy(stats: &Stats) -> Option<String> {
    let short = match stats.short_bytes {
        0 => String::new(),
        bytes => format!(", of {} fewer", Human(bytes)),
    };
    if let Some(shape) = &stats.parity {
        let made = match stats.pages_made {
            0 => String::new(),
            pages => format!(", {pages} pages made of it"),
        };
        return Some(format!("parity {shape} of each page{short}{made}"));
    }
    let copies = match (stats.copies, stats.disk) {
        (0 | 1, false) => "one copy of each page: it is lost with its agent".into(),
        (0 | 1, true) => format!("one copy of each page at an agent, and one on the disk{short}"),
        (copies, false) => format!("{copies} copies of each page{short}"),
        (copies, true) => format!("{copies} copies of each page, and one on the disk{short}"),
    };
    (stats.agents.len() > 1).then_some(copies)
}

fn agent(agent: &AgentStats, teller: Option<&String>) -> String {
    let AgentStats { addr, pages, rtt_us, queue_us, refusals, up, draining, reason, .. } = agent;
    let refused = if *refusals > 0 { format!(", {refusals} refused") } else { String::new() };
    let state = match (up, draining) {
        (false, true) => ", it has drained and ended",
        (false, false) => ", connection lost",
        (true, true) => ", draining: it is about to end",
        (true, false) => "",
    };
    let because = match (up, draining, reason.as_str()) {
        (true, ..) | (_, true, _) | (.., "") => String::new(),
        (.., reason) => format!(" ({reason})"),
    };
    let zone = zone_of(agent, ", ");
    let teller = teller.map_or_else(String::new, |teller| format!(" (told of by {teller})"));
    format!(
        "agent {addr}{zone}{teller}: {pages} pages, round trip {rtt_us:.0} us, queue {queue_us:.0} us{refused}{state}{because}"
    )
}

/// The zone of an agent that has one, behind a separator.
pub(super) fn zone_of(agent: &AgentStats, separator: &str) -> String {
    match agent.zone.as_str() {
        "" => String::new(),
        zone => format!("{separator}zone {zone}"),
    }
}

/// Where `--stats` goes. Whatever goes wrong with it is told, and has no influence on the workload or on the exit status.
pub(super) struct StatsFile(Option<Output>);

impl StatsFile {
    /// Tests before the start that the file can be written at the end.
    pub(super) fn open(path: Option<&Path>) -> StatsFile {
        let open = |path: &Path| {
            let cannot = |error: &io::Error| {
                say(format!("--stats: {} cannot be written: {error}", path.display()));
            };
            Output::open(path).inspect_err(cannot).ok()
        };
        StatsFile(path.and_then(open))
    }

    /// What the next binary of the pager needs.
    pub(super) fn hand_over(&self, to: &mut Descriptors) -> Option<OutputRecord> {
        self.0.as_ref().map(|output| output.hand_over(to))
    }

    /// The same again.
    pub(super) fn again(record: Option<OutputRecord>) -> io::Result<StatsFile> {
        Ok(StatsFile(record.map(Output::again).transpose()?))
    }

    /// Writes the figures as JSON.
    pub(super) fn write(self, stats: &Stats) {
        let Some(output) = self.0 else { return };
        let written = output.write(|out| out.write_all(&json::lines(stats)?));
        if let Err(error) = written {
            say(format!("--stats: the figures cannot be written: {error}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::proc::self_pid;
    use std::fs;

    #[test]
    fn a_small_program_gets_one_line() {
        let stats =
            Stats { resident_peak_bytes: 3 << 20, budget_bytes: 64 << 20, ..Stats::default() };
        assert_eq!(paragraph(&stats), "never needed paging: resident at most 3 MiB, budget 64 MiB");
    }

    #[test]
    fn who_exceeded_its_budget_is_not_said_to_have_needed_no_paging() {
        let stats =
            Stats { resident_peak_bytes: 87 << 20, budget_bytes: 16 << 20, ..Stats::default() };
        assert!(paragraph(&stats).starts_with("resident at most 87 MiB, budget 16 MiB"));
        let stats = Stats { agents_full_s: 2.5, budget_bytes: 16 << 20, ..Stats::default() };
        let text = paragraph(&stats);
        assert!(
            text.contains("for 2.5 s no agent took pages") && !text.contains("never"),
            "{text}"
        );
    }

    #[test]
    fn a_paged_program_gets_its_figures() {
        let agents = vec![AgentStats { addr: "a:1".into(), refusals: 3, ..AgentStats::default() }];
        let stats = Stats { pages_out: 5, faults: 4, agents, ..Stats::default() };
        let text = paragraph(&stats);
        assert!(
            text.contains("agent a:1") && text.contains("3 refused") && text.contains("4 faults"),
            "{text}"
        );
        assert!(text.contains("pages were not sealed (--seal off)"), "{text}");
        let text = paragraph(&Stats { sealed: true, ..stats });
        assert!(text.contains("pages were sealed") && !text.contains("--seal off"), "{text}");
    }

    #[test]
    fn with_several_agents_the_copies_are_told() {
        let agents = vec![AgentStats::default(), AgentStats::default()];
        let mut stats = Stats { pages_out: 5, agents, copies: 2, ..Stats::default() };
        assert!(paragraph(&stats).contains("\n2 copies of each page\n"));
        stats.short_bytes = 3 << 20;
        assert!(paragraph(&stats).contains("2 copies of each page, of 3 MiB fewer"));
        stats.copies = 1;
        assert!(paragraph(&stats).contains("one copy of each page"));
        stats.disk = true;
        assert!(paragraph(&stats).contains("and one on the disk, of 3 MiB fewer"));
        stats.agents.pop();
        assert!(!paragraph(&stats).contains("each page"));
        stats.parity = Some("4+1".into());
        assert!(paragraph(&stats).contains("\nparity 4+1 of each page, of 3 MiB fewer\n"));
        stats.pages_made = 7;
        assert!(paragraph(&stats).contains("of 3 MiB fewer, 7 pages made of it"));
    }

    #[test]
    fn an_agent_that_drains_is_not_said_to_be_lost() {
        let told =
            |up, draining| agent(&AgentStats { up, draining, ..AgentStats::default() }, None);
        assert!(told(false, false).ends_with(", connection lost"));
        let reason = String::from("it fell silent");
        let away = agent(&AgentStats { reason, ..AgentStats::default() }, None);
        assert!(away.ends_with(", connection lost (it fell silent)"));
        assert!(told(true, true).ends_with(", draining: it is about to end"));
        assert!(told(false, true).ends_with(", it has drained and ended"));
        assert!(told(true, false).ends_with("queue 0 us"));
    }

    #[test]
    fn the_figures_are_written_and_mistakes_change_nothing() {
        let file = std::env::temp_dir().join(format!("gms-stats-test-{}", self_pid()));
        StatsFile::open(Some(&file)).write(&Stats { faults: 3, ..Stats::default() });
        let stats: Stats = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        assert_eq!(stats.faults, 3);
        fs::remove_file(&file).unwrap();
        StatsFile::open(Some(&file.join("no"))).write(&stats);
        assert!(!file.exists());
    }
}
