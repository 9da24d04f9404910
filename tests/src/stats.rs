//! The contract of `--stats` and `gms status --json`: the fields that the tests, and others, may rely on.

use std::path::Path;

use serde::Deserialize;

/// Distribution of fault latencies in microseconds.
#[derive(Clone, Debug, Deserialize)]
pub struct FaultLatency {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

/// One agent.
#[derive(Clone, Debug, Deserialize)]
pub struct AgentStats {
    /// Address as given.
    pub addr: String,
    /// Pages which it was given.
    pub pages: u64,
    /// Pages which it holds now.
    pub pages_held: u64,
    /// `--zone`; empty if there is none.
    #[serde(default)]
    pub zone: String,
    /// Smoothed round trip.
    pub rtt_us: f64,
    /// Smoothed queue delay.
    pub queue_us: f64,
    /// Pages which it refused.
    pub refusals: u64,
    /// Whether the connection is up.
    pub up: bool,
    /// Whether it is about to end.
    pub draining: bool,
}

/// What `--stats FILE` holds at least.
#[derive(Clone, Debug, Deserialize)]
#[expect(missing_docs, reason = "the names are the contract; their meaning is in the manual")]
pub struct Stats {
    pub faults: u64,
    pub fault_us: FaultLatency,
    pub pages_out: u64,
    pub pages_in: u64,
    pub clean_drops: u64,
    pub second_chances: u64,
    pub prefetched: u64,
    pub prefetch_hits: u64,
    /// Not told by builds of before.
    #[serde(default)]
    pub lent_faults: u64,
    #[serde(default)]
    pub lent_hedges: u64,
    pub resident_peak_bytes: u64,
    pub remote_peak_bytes: u64,
    /// Not told by builds of before.
    #[serde(default)]
    pub taken_peak_bytes: u64,
    pub budget_bytes: u64,
    pub unpageable_bytes: u64,
    pub sealed: bool,
    pub attach_us: f64,
    pub agents_full_s: f64,
    pub short_bytes: u64,
    /// Not told by builds of before.
    #[serde(default)]
    pub pages_made: u64,
    pub processes: u64,
    pub attached: u64,
    pub agents: Vec<AgentStats>,
}

impl Stats {
    /// Reads the file. The message names a missing field.
    pub fn read(path: &Path) -> Result<Stats, String> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| format!("{}: {error}", path.display()))?;
        serde_json::from_str(&text).map_err(|error| format!("{error} in {text}"))
    }

    /// The agent at `addr`.
    pub fn agent(&self, addr: &str) -> &AgentStats {
        let found = self.agents.iter().find(|agent| agent.addr == addr);
        found.unwrap_or_else(|| panic!("no agent {addr} in {:?}", self.agents))
    }
}

/// One object of `gms status --json`.
#[derive(Clone, Debug, Deserialize)]
#[expect(missing_docs, reason = "the names are the contract; their meaning is in the manual")]
pub struct Status {
    pub pid: i32,
    pub supervisor_pid: i32,
    pub resident_bytes: u64,
    pub budget_bytes: u64,
    pub remote_bytes: u64,
    pub away_bytes: u64,
    pub short_bytes: u64,
    pub taken_bytes: u64,
    pub agents_full: bool,
    pub detaching: bool,
    pub sealed: bool,
    pub key_days_left: Option<u64>,
    pub faults: u64,
    pub pages_out: u64,
    pub pages_in: u64,
    pub looks: u64,
    pub agents: Vec<AgentStats>,
}
