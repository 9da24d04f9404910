//! A real agent with keys of its own, and `gms run` around the workload.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, Command, Stdio};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::cli::{PageSize, WorkloadOptions};
use crate::error::{BenchError, Trying};
use crate::fault::workload::Found;
use crate::floor::quic::make_keys;
use crate::peer::Process;
use crate::scratch::Scratch;

/// Lines which the agent may log before it listens.
const LOG_LINES_MAX: usize = 20;

/// An agent which runs, and how to run programs on it.
pub struct Stack {
    gms: PathBuf,
    scratch: Scratch,
    local_mib: u32,
    addr: String,
    _agent: Process,
    /// Held open for what the agent logs later, which is little.
    _log: Option<BufReader<ChildStderr>>,
}

/// Of gms's own figures those which matter here.
#[derive(Debug, Deserialize)]
pub struct Stats {
    /// Latency of remote faults, from the read of the message to the wake.
    pub fault_us: FaultLatency,
    /// Pages fetched.
    pub pages_in: u64,
    /// Pages written.
    pub pages_out: u64,
    /// Pages evicted without a transfer.
    pub clean_drops: u64,
    /// Faults met by the write-back buffer.
    pub second_chances: u64,
}

/// See [`Stats::fault_us`].
#[derive(Debug, Deserialize)]
pub struct FaultLatency {
    /// Median.
    pub p50: f64,
    /// 99 %.
    pub p99: f64,
}

impl Stats {
    /// Faults that were met by the write-back buffer, in percent of all that brought a page back.
    pub fn second_percent(&self) -> f64 {
        let all = self.pages_in + self.second_chances;
        100.0 * self.second_chances as f64 / all.max(1) as f64
    }

    /// Checks that what was counted as remote faults was just that, but for `local_max` percent.
    pub fn check(&self, orders: &WorkloadOptions, local_max: f64) -> Result<(), BenchError> {
        let counted = (orders.threads * (orders.warm_up + orders.faults)) as u64;
        if self.pages_in + self.second_chances < counted {
            let brought = self.pages_in + self.second_chances;
            let text = format!("{counted} faults were counted, but gms brought {brought} pages");
            return Err(BenchError::Invalid(text));
        }
        if self.second_percent() > local_max {
            let text = format!("{:.1} % of the faults were not remote", self.second_percent());
            return Err(BenchError::Invalid(text));
        }
        Ok(())
    }
}

impl Stack {
    /// Makes keys and starts an agent with room for `times` the budget.
    pub fn start(programs: Option<&Path>, local_mib: u32, times: u32) -> Result<Stack, BenchError> {
        let scratch = Scratch::new()?;
        let keys = scratch.path("keys");
        make_keys(&keys)?;
        let export = format!("{}M", local_mib * (times + 1));
        let mut agent = Process::start(
            Command::new(program(programs, "gms-agent")?)
                .args(["--listen", "127.0.0.1:0", "--export", &export, "--keys"])
                .arg(&keys)
                .env("NO_COLOR", "1")
                .stderr(Stdio::piped()),
        )?;
        let mut log = agent.0.stderr.take().map(BufReader::new);
        let addr = log.as_mut().and_then(|log| {
            let lines = log.lines().take(LOG_LINES_MAX).map_while(Result::ok);
            lines.filter(|line| line.contains("listening")).find_map(|line| address_in(&line))
        });
        let problem = "did not say where it listens".to_owned();
        let addr = addr.ok_or(BenchError::Program { program: "gms-agent".into(), problem })?;
        let gms = program(programs, "gms")?;
        Ok(Stack { gms, scratch, local_mib, addr, _agent: agent, _log: log })
    }

    /// A path in the stack's own directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }

    /// Runs the workload under gms.
    pub fn run(
        &self,
        size: PageSize,
        orders: &WorkloadOptions,
    ) -> Result<(Found, Stats), BenchError> {
        let stats = self.scratch.path("stats.json");
        let mut command = Command::new(&self.gms);
        command
            .args(["run", "-q", "--page-size", size.name(), "--agent", &self.addr, "--keys"])
            .arg(self.scratch.path("keys"))
            .args(["--local", &format!("{}M", self.local_mib), "--stats"])
            .arg(&stats)
            .arg("--")
            .arg(std::env::current_exe().trying("cannot find gms-bench")?)
            .args(orders.command_line());
        let mut process = Process::start(&mut command)?;
        let ended = process.0.wait().trying("cannot wait for gms")?;
        if !ended.success() {
            let problem = format!("ended with {ended}");
            return Err(BenchError::Program { program: "gms run".into(), problem });
        }
        Ok((read(&orders.found)?, read(&stats)?))
    }
}

/// A program of gms, in `dir` or beside this one.
pub fn program(dir: Option<&Path>, name: &str) -> Result<PathBuf, BenchError> {
    let own = std::env::current_exe().trying("cannot find gms-bench")?;
    let dir = dir.or(own.parent()).unwrap_or(Path::new("."));
    let path = dir.join(name);
    if path.is_file() {
        return Ok(path);
    }
    let problem = format!(
        "is not in {}: build it (cargo build --release --workspace --bins), or name its folder by --programs",
        dir.display()
    );
    Err(BenchError::Program { program: name.into(), problem })
}

fn address_in(line: &str) -> Option<String> {
    let (_, rest) = line.split_once("addr=")?;
    rest.split_whitespace().next().map(str::to_owned)
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T, BenchError> {
    let what = path.display().to_string();
    let text = fs::read_to_string(path).trying(&what)?;
    serde_json::from_str(&text).map_err(|error| BenchError::Invalid(format!("{what}: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_found() {
        let line = "INFO gms_agent: listening addr=127.0.0.1:7400 export_mib=64";
        assert_eq!(address_in(line).as_deref(), Some("127.0.0.1:7400"));
        assert_eq!(address_in("listening"), None);
    }
}
