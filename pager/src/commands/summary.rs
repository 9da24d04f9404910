//! What a session says when it ends: the paragraph on stderr, and the `--stats` file.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use gms_policy::{Budget, Bytes};
use nix::unistd::{AccessFlags, access};

use super::{EXIT_GMS, EXIT_USAGE, Failure};
use crate::size::Human;
use crate::stats::{AgentStats, Stats};
use crate::target::self_pid;

/// The figures of a session for people.
pub fn paragraph(stats: &Stats) -> String {
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
            "{} faults: p50 {:.1} us, p99 {:.1} us, longest {:.0} us; {} second chances",
            stats.faults, latency.p50, latency.p99, latency.max, stats.second_chances
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
    if stats.unpageable_bytes > 0 {
        lines.push(format!("{} could not be paged", Human(stats.unpageable_bytes)));
    }
    lines.extend(stats.agents.iter().map(agent));
    lines.join("\n")
}

fn agent(agent: &AgentStats) -> String {
    let AgentStats { addr, pages, rtt_us, queue_us, refusals, up, .. } = agent;
    let refused = if *refusals > 0 { format!(", {refusals} refused") } else { String::new() };
    let lost = if *up { "" } else { ", connection lost" };
    format!(
        "agent {addr}: {pages} pages, round trip {rtt_us:.0} us, queue {queue_us:.0} us{refused}{lost}"
    )
}

/// Where `--stats` goes.
pub struct StatsFile(Option<PathBuf>);

impl StatsFile {
    /// Checks before the start that the file can be written at the end.
    pub fn open(path: Option<&Path>) -> Result<StatsFile, Failure> {
        let Some(given) = path else { return Ok(StatsFile(None)) };
        // Through links, so that what they lead to is replaced.
        let path = fs::canonicalize(given).or_else(|_| std::path::absolute(given));
        let path = path.and_then(|path| check_writable(&path).map(|()| path));
        let cannot = |error| format!("--stats: {} cannot be written: {error}", given.display());
        path.map(|path| StatsFile(Some(path)))
            .map_err(|error| Failure::new(EXIT_USAGE, cannot(error)))
    }

    /// Writes the figures as JSON. Readers see the old file or the new one, never a part.
    pub fn write(&self, stats: &Stats) -> Result<(), Failure> {
        let Some(path) = &self.0 else { return Ok(()) };
        let cannot = |error| {
            Failure::new(EXIT_GMS, format!("--stats: cannot write {}: {error}", path.display()))
        };
        let mut text = serde_json::to_vec_pretty(stats).map_err(|error| cannot(error.into()))?;
        text.push(b'\n');
        if is_special(path) {
            return fs::write(path, text).map_err(cannot);
        }
        let mut unready = path.clone().into_os_string();
        unready.push(format!(".{}.tmp", self_pid()));
        let written = fs::write(&unready, text).and_then(|()| fs::rename(&unready, path));
        written.map_err(|error| {
            let _ = fs::remove_file(&unready);
            cannot(error)
        })
    }
}

/// A device or a pipe is written to, not replaced.
fn is_special(path: &Path) -> bool {
    path.exists() && !path.is_file()
}

fn check_writable(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    }
    if is_special(path) {
        return Ok(access(path, AccessFlags::W_OK)?);
    }
    let dir = path.parent().unwrap_or(path);
    Ok(access(dir, AccessFlags::W_OK | AccessFlags::X_OK)?)
}

#[cfg(test)]
mod tests {
    use super::*;

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
    }

    #[test]
    fn the_stats_file_is_replaced_whole() {
        let dir = std::env::temp_dir().join(format!("gms-stats-test-{}", self_pid()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).unwrap();
        let (file, link) = (dir.join("s.json"), dir.join("link"));
        std::os::unix::fs::symlink(&file, &link).unwrap();
        fs::write(&file, "old").unwrap();
        StatsFile::open(Some(&link))
            .unwrap()
            .write(&Stats { faults: 3, ..Stats::default() })
            .unwrap();
        assert!(link.is_symlink(), "the link was replaced");
        let stats: Stats = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        assert_eq!(stats.faults, 3);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 2, "a temporary file stayed");
        assert_eq!(StatsFile::open(Some(&dir)).map(|_| ()).unwrap_err().status, EXIT_USAGE);
        assert!(StatsFile::open(Some(&dir.join("no/s.json"))).is_err());
        StatsFile::open(Some("/dev/null".as_ref())).unwrap().write(&Stats::default()).unwrap();
        assert!(!Path::new("/dev/null").is_file());
        fs::remove_dir_all(&dir).unwrap();
    }
}
