//! Real agents with keys made for the run, and `gms run` around workloads.

use std::cell::Cell;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, Command, Stdio};

use gms_tests::Stats;
use serde::de::DeserializeOwned;

use crate::cli::PageSize;
use crate::error::{BenchError, Trying};
use crate::floor::quic::make_keys;
use crate::memcg::Memcg;
use crate::network::Network;
use crate::peer::Process;
use crate::placement::Pinned;
use crate::procfs;
use crate::scratch::Scratch;
use crate::workload::Orders;

/// Lines which an agent may log before it listens.
const LOG_LINES_MAX: usize = 20;

/// Agents which run, and how to run workloads on them.
pub(crate) struct Stack {
    gms: PathBuf,
    scratch: Scratch,
    agents: Vec<Agent>,
    /// Sessions so far.
    sessions: Cell<u32>,
}

struct Agent {
    addr: String,
    process: Process,
    /// Held open for what the agent logs later, which is little.
    _log: Option<BufReader<ChildStderr>>,
}

/// A workload under its own `gms run`.
pub(crate) struct Session {
    process: Process,
    found: PathBuf,
    stats: PathBuf,
}

/// Faults that were met by the write-back buffer, in percent of all that brought a page back.
pub(crate) fn second_percent(stats: &Stats) -> f64 {
    let all = stats.pages_in + stats.second_chances;
    100.0 * stats.second_chances as f64 / all.max(1) as f64
}

/// The least and the greatest share of the pages that an agent was given, as a multiple of the fair one.
pub(crate) fn agent_shares(stats: &Stats) -> (f64, f64) {
    let all: u64 = stats.agents.iter().map(|agent| agent.pages).sum();
    let fair = all.max(1) as f64 / stats.agents.len().max(1) as f64;
    let shares = || stats.agents.iter().map(|agent| agent.pages as f64 / fair);
    (shares().fold(f64::INFINITY, f64::min), shares().fold(0.0, f64::max))
}

/// Checks that `counted` faults were remote, but for `local_max` percent. Two threads may have met at a page.
pub(crate) fn check_remote(stats: &Stats, counted: u64, local_max: f64) -> Result<(), BenchError> {
    let (brought, percent) = (stats.pages_in + stats.second_chances, second_percent(stats));
    if brought < counted - counted / 100 {
        let text = format!("{counted} faults were counted, but gms brought {brought} pages");
        return Err(BenchError::Invalid(text));
    }
    if percent > local_max {
        let text = format!(
            "{percent:.1} % of the faults were not remote but met by the write-back buffer, more than {local_max} %"
        );
        return Err(BenchError::Refused(text));
    }
    Ok(())
}

impl Agent {
    /// `cpu`: where it stays; `None`: where the scheduler likes. `host`: what it is in.
    fn start(
        network: &Network,
        program: &Path,
        keys: &Path,
        export: &str,
        cpu: Option<usize>,
        host: Option<&Memcg>,
    ) -> Result<Agent, BenchError> {
        // What is started inherits it.
        let _pinned = Pinned::to(cpu)?;
        let listen = format!("{}:0", network.far());
        let mut command = Command::new(program);
        host.inspect(|host| host.enter(&mut command));
        command.args(["--listen", &listen, "--export", export, "--keys"]).arg(keys);
        network.place(command.env("NO_COLOR", "1").stderr(Stdio::piped()))?;
        let mut process = Process::start(&mut command)?;
        let mut log = process.0.stderr.take().map(BufReader::new);
        let addr = log.as_mut().and_then(|log| {
            let lines = log.lines().take(LOG_LINES_MAX).map_while(Result::ok);
            lines.filter(|line| line.contains("listening")).find_map(|line| address_in(&line))
        });
        let problem = "did not say where it listens".to_owned();
        let addr = addr.ok_or(BenchError::Program { program: "gms-agent".into(), problem })?;
        Ok(Agent { addr, process, _log: log })
    }
}

impl Stack {
    /// Makes keys and starts `agents` agents, each with room for `export_mib`, where the scheduler likes.
    pub(crate) fn start(
        programs: Option<&Path>,
        agents: usize,
        export_mib: u32,
    ) -> Result<Stack, BenchError> {
        Stack::start_over(&Network::LOOPBACK, None, programs, agents, export_mib)
    }

    /// As [`Stack::start`], with the agents at the far end of `network`, and on `cpu` if one is named.
    pub(crate) fn start_over(
        network: &Network,
        cpu: Option<usize>,
        programs: Option<&Path>,
        agents: usize,
        export_mib: u32,
    ) -> Result<Stack, BenchError> {
        let scratch = Scratch::new()?;
        let keys = scratch.path("keys");
        make_keys(&keys)?;
        let agent = program(programs, "gms-agent")?;
        let agents = (0..agents)
            .map(|_| Agent::start(network, &agent, &keys, &format!("{export_mib}M"), cpu, None))
            .collect::<Result<_, _>>()?;
        let gms = program(programs, "gms")?;
        Ok(Stack { gms, scratch, agents, sessions: Cell::new(0) })
    }

    /// One agent in `host`, which follows that up to `mib` MiB; and, if there is to be `another`, one elsewhere with as much.
    pub(crate) fn beside(
        programs: Option<&Path>,
        host: &Memcg,
        mib: u32,
        another: bool,
    ) -> Result<Stack, BenchError> {
        let others = Stack::start(programs, usize::from(another), mib)?;
        let (agent, keys) = (program(programs, "gms-agent")?, others.path("keys"));
        let (export, network) = (format!("auto:..{mib}M"), Network::LOOPBACK);
        let first = Agent::start(&network, &agent, &keys, &export, None, Some(host))?;
        Ok(Stack { agents: [first].into_iter().chain(others.agents).collect(), ..others })
    }

    /// Where the first agent listens.
    pub(crate) fn addr(&self) -> Result<SocketAddr, BenchError> {
        let addr = self.agents.first().and_then(|agent| agent.addr.parse().ok());
        addr.ok_or_else(|| BenchError::Invalid("there is no agent with an address".into()))
    }

    /// A path in the stack's own directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }

    /// Process ids of the agents.
    pub(crate) fn agent_pids(&self) -> Vec<u32> {
        self.agents.iter().map(|agent| agent.process.0.id()).collect()
    }

    /// Runs a workload on all agents: what it found, and gms's own figures.
    pub(crate) fn run<F: DeserializeOwned>(
        &self,
        size: PageSize,
        local_mib: u32,
        orders: &Orders,
    ) -> Result<(F, Stats), BenchError> {
        self.run_with::<_, &str>(&[], size, local_mib, orders)
    }

    /// As [`Stack::run`], with further options of `gms run`.
    pub(crate) fn run_with<F: DeserializeOwned, O: AsRef<OsStr>>(
        &self,
        options: &[O],
        size: PageSize,
        local_mib: u32,
        orders: &Orders,
    ) -> Result<(F, Stats), BenchError> {
        self.spawn_with(options, size, local_mib, orders)?.finish()
    }

    /// Starts a workload on all agents.
    pub(crate) fn spawn(
        &self,
        size: PageSize,
        local_mib: u32,
        orders: &Orders,
    ) -> Result<Session, BenchError> {
        self.spawn_with::<&str>(&[], size, local_mib, orders)
    }

    fn spawn_with<O: AsRef<OsStr>>(
        &self,
        options: &[O],
        size: PageSize,
        local_mib: u32,
        orders: &Orders,
    ) -> Result<Session, BenchError> {
        let number = self.sessions.replace(self.sessions.get() + 1);
        let found = self.path(&format!("found-{number}.json"));
        let stats = self.path(&format!("stats-{number}.json"));
        let mut command = self.command(options, size, local_mib, &stats);
        command.args(orders.command(&found)?);
        Ok(Session { process: Process::start(&mut command)?, found, stats })
    }

    /// `gms run` on all agents, with further options; what to run is to be added.
    pub(crate) fn command<O: AsRef<OsStr>>(
        &self,
        options: &[O],
        size: PageSize,
        local_mib: u32,
        stats: &Path,
    ) -> Command {
        let mut command = Command::new(&self.gms);
        command.args(["run", "-q", "--page-size", size.name(), "--keys"]).arg(self.path("keys"));
        for agent in &self.agents {
            command.args(["--agent", &agent.addr]);
        }
        command
            .args(options)
            .args(["--local", &format!("{local_mib}M"), "--stats"])
            .arg(stats)
            .arg("--");
        command
    }
}

impl Session {
    /// Its processes.
    pub(crate) fn pids(&self) -> Vec<u32> {
        procfs::tree(self.process.0.id())
    }

    /// An error if it has ended already.
    pub(crate) fn check_alive(&mut self) -> Result<(), BenchError> {
        match self.process.0.try_wait().trying("cannot ask for gms")? {
            None => Ok(()),
            Some(ended) => Err(failed(format!("ended too early with {ended}"))),
        }
    }

    /// Waits for its end.
    pub(crate) fn finish<F: DeserializeOwned>(mut self) -> Result<(F, Stats), BenchError> {
        let ended = self.process.0.wait().trying("cannot wait for gms")?;
        if !ended.success() {
            return Err(failed(format!("ended with {ended}")));
        }
        Ok((read(&self.found)?, Stats::read(&self.stats).map_err(BenchError::Invalid)?))
    }
}

fn failed(problem: String) -> BenchError {
    BenchError::Program { program: "gms run".into(), problem }
}

/// A program of gms, in `dir` or beside this one.
pub(crate) fn program(dir: Option<&Path>, name: &str) -> Result<PathBuf, BenchError> {
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

/// Reads JSON.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<T, BenchError> {
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
