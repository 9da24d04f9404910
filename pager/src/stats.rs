//! What a session measured: the `--stats` file, the summary paragraph and `gms status` are all made of it.

use serde::{Deserialize, Serialize};

/// Distribution of the latencies of faults that needed a page from an agent, in us: from the request of the page until it is installed and its
/// thread woken.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct FaultLatency {
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// Longest.
    pub max: f64,
}

/// One agent as the session saw it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct AgentStats {
    /// Address as the user gave it (`embedded` for the embedded agent).
    pub addr: String,
    /// Which agent of this list, from 0, told of it; none if the user named it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learned_from: Option<usize>,
    /// Its zone (`gms-agent --zone`); none if it has none, or has not told it yet.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub zone: String,
    /// Pages which it was given over the whole session.
    pub pages: u64,
    /// Pages which it holds now.
    pub pages_held: u64,
    /// Smoothed round-trip time in us.
    pub rtt_us: f64,
    /// Smoothed queue delay which the agent reported, in us.
    pub queue_us: f64,
    /// Pages which it refused.
    pub refusals: u64,
    /// Whether the connection is up.
    pub up: bool,
    /// The agent is about to end: it serves pages and takes none. Or (`up` is false) it has ended so.
    #[serde(default)]
    pub draining: bool,
    /// Why the agent cannot be used; empty if it can, or if that is not known yet.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// Counters and gauges of a session.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Stats {
    /// Root process of the workload.
    pub pid: i32,
    /// Process which pages it.
    pub supervisor_pid: i32,
    /// The command line of the root process.
    pub command: String,
    /// Seconds since the session began.
    pub elapsed_s: f64,
    /// Page faults handled.
    pub faults: u64,
    /// Latency of those that needed a page from an agent.
    pub fault_us: FaultLatency,
    /// First touches filled with zeros (pages, including those around the fault).
    pub zero_fills: u64,
    /// Pages written to agents.
    pub pages_out: u64,
    /// Pages fetched from agents.
    pub pages_in: u64,
    /// Pages dropped at eviction because the agents' copy was still good.
    pub clean_drops: u64,
    /// Pages dropped at eviction because they held only zeros.
    pub zero_drops: u64,
    /// Faults served from the write-back buffer.
    pub second_chances: u64,
    /// Pages fetched ahead.
    pub prefetched: u64,
    /// Pages fetched ahead which the workload then used (inferred from the stream's continuation).
    pub prefetch_hits: u64,
    /// Faults whose pages another fault thread fetched than the home of their address space.
    #[serde(default)]
    pub lent_faults: u64,
    /// Of the pages that were lent, how often one that took long was asked of another agent too.
    #[serde(default)]
    pub lent_hedges: u64,
    /// Resident anonymous memory of the tree now, in bytes.
    pub resident_bytes: u64,
    /// Highest resident anonymous memory of the tree seen, in bytes.
    pub resident_peak_bytes: u64,
    /// Workload memory held by agents now, in bytes.
    pub remote_bytes: u64,
    /// Highest of the same.
    pub remote_peak_bytes: u64,
    /// Memory that is not in the workload now: only at agents, or on its way there, in bytes.
    #[serde(default)]
    pub away_bytes: u64,
    /// Memory of the page map, which is gms's own and not a part of the budget, in bytes.
    #[serde(default)]
    pub map_bytes: u64,
    /// No agent takes pages now, though some must go.
    #[serde(default)]
    pub agents_full: bool,
    /// For how many seconds that was so.
    #[serde(default)]
    pub agents_full_s: f64,
    /// Agents that are to have each page, or with parity a part of its stripe.
    #[serde(default)]
    pub copies: u32,
    /// Pages and parity parts of each stripe (`4+1`), if there are stripes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parity: Option<String>,
    /// With parity: memory that the workload takes at agents, parity and dead pages of stripes included, in bytes.
    #[serde(default)]
    pub taken_bytes: u64,
    /// Highest of the same.
    #[serde(default)]
    pub taken_peak_bytes: u64,
    /// With parity: pages that were made of other parts of their stripes, because their agents did not give them.
    #[serde(default)]
    pub pages_made: u64,
    /// A local disk is to have each page too.
    #[serde(default)]
    pub disk: bool,
    /// Memory of which agents that stay, or the disk, have fewer copies than that, in bytes: more are made once there are agents for them. With parity:
    /// of which an agent of the stripe has lost its part, or leaves with it.
    #[serde(default)]
    pub short_bytes: u64,
    /// All pages are being brought home.
    #[serde(default)]
    pub detaching: bool,
    /// Whether agents hold the pages sealed (`--seal`).
    #[serde(default)]
    pub sealed: bool,
    /// Whole days until the certificate of `--keys` ends (none without agents).
    #[serde(default)]
    pub key_days_left: Option<u64>,
    /// `--local`.
    pub budget_bytes: u64,
    /// Anonymous memory which cannot be paged now (shared, locked, pinned, read-only ...), in bytes.
    pub unpageable_bytes: u64,
    /// Longest stop of a workload thread for an attach, in us (0 if nothing was attached).
    pub attach_us: f64,
    /// Looks at the tree's size.
    #[serde(default)]
    pub looks: u64,
    /// CPU time of those, in us.
    #[serde(default)]
    pub looks_cpu_us: f64,
    /// Processes of the tree seen.
    pub processes: u64,
    /// Processes attached.
    pub attached: u64,
    /// The agents.
    pub agents: Vec<AgentStats>,
}
