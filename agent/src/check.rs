//! `gms-agent --check`: what an agent with these options would lack. Nothing is served; each finding says what to do.

use crate::cli::Options;
use crate::memory::Memory;
use gms_policy::Bytes;
use gms_transport::keys::{self, Role};
use gms_transport::quic::limits::SOCKET_BUFFER;
use nix::sys::resource::{Resource, getrlimit};
use std::fmt;
use std::fs;
use std::net::{TcpListener, UdpSocket};

/// Bytes of a huge page.
const HUGE_LEN: u64 = 2 << 20;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// The agent serves, but less well or less safely.
    Warn,
    /// The agent does not start.
    Fail,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// How bad it is.
    pub verdict: Verdict,
    /// What was found, and what to do unless all is well.
    pub finding: String,
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match self.verdict {
            Verdict::Ok => "OK",
            Verdict::Warn => "WARN",
            Verdict::Fail => "FAIL",
        };
        write!(f, "{verdict:<5}{}: {}", self.name, self.finding)
    }
}

fn check(name: &'static str, verdict: Verdict, finding: impl ToString) -> Check {
    Check { name, verdict, finding: finding.to_string() }
}

/// Either the finding, or what is wrong with it.
fn needed<E: ToString>(name: &'static str, found: Result<String, E>) -> Check {
    match found {
        Ok(finding) => check(name, Verdict::Ok, finding),
        Err(problem) => check(name, Verdict::Fail, problem),
    }
}

fn wished(name: &'static str, found: Result<String, String>) -> Check {
    match found {
        Ok(finding) => check(name, Verdict::Ok, finding),
        Err(problem) => check(name, Verdict::Warn, problem),
    }
}

/// All findings about an agent with these options, on a machine (or in a cgroup) with this memory.
pub fn checks(options: &Options, memory: &Memory) -> Vec<Check> {
    let mut found = key_files(options);
    let config = match options.agent(Bytes(memory.total_bytes)) {
        Ok(config) => config,
        Err(error) => {
            found.push(check("listen", Verdict::Fail, error));
            return found;
        }
    };
    let busy = "choose an address of this machine and a free port";
    let free = |addr, error| format!("cannot listen on {addr}: {error}; {busy}");
    let udp = UdpSocket::bind(config.listen).map_err(|e| free(config.listen, e));
    found.push(needed("listen", udp.map(|_| format!("UDP {} is free", config.listen))));
    if let Some(addr) = config.metrics {
        let tcp = TcpListener::bind(addr).map_err(|e| free(addr, e));
        found.push(needed("metrics", tcp.map(|_| format!("TCP {addr} is free"))));
    }
    found.push(export(config.export, memory));
    if config.huge {
        found.push(needed("huge pages", huge_pages(config.export)));
    }
    found.push(wished("swap", swap(config.export, memory)));
    found.push(wished("pressure", pressure()));
    found.push(wished("UDP buffers", udp_buffers()));
    found.push(wished("rights", rights()));
    found
}

/// Whether the agent would serve.
pub fn can_serve(checks: &[Check]) -> bool {
    checks.iter().all(|check| check.verdict != Verdict::Fail)
}

/// The keys and both lists.
fn key_files(options: &Options) -> Vec<Check> {
    let identity = match keys::load(&options.keys, Role::Node) {
        Ok(identity) => identity,
        Err(error) => return vec![check("keys", Verdict::Fail, error)],
    };
    let endings = identity.endings(std::time::SystemTime::now());
    let ends: Vec<String> = endings.iter().map(ToString::to_string).collect();
    let good = format!("{} is good, for node {}", options.keys.display(), identity.id());
    let clients = match identity.allowed_clients() {
        Some(count) => format!("{} names {count} clients", keys::ALLOWED),
        None => format!("every client of the authority: there is no {}", keys::ALLOWED),
    };
    let keys = if ends.is_empty() { Ok(good) } else { Err(ends.join("; ")) };
    vec![wished("keys", keys), check("clients", Verdict::Ok, clients)]
}

fn export(export: Bytes, memory: &Memory) -> Check {
    let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
    let of = format!(
        "{}: {} {}, {} of it available",
        mib(export.0),
        memory.whose(),
        mib(memory.total_bytes),
        mib(memory.available_bytes)
    );
    let verdict = match export.0 {
        0..4096 => return check("export", Verdict::Fail, "less than a page; export more"),
        bytes if bytes > memory.total_bytes => Verdict::Fail,
        bytes if bytes > memory.available_bytes => Verdict::Warn,
        _ => return check("export", Verdict::Ok, of),
    };
    check("export", verdict, format!("{of}; export less, or raise the cgroup's limit"))
}

fn huge_pages(export: Bytes) -> Result<String, String> {
    let needed = export.0 / HUGE_LEN;
    let free = number("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").unwrap_or(0);
    match free >= needed.max(1) {
        true => Ok(format!("{needed} are needed, {free} are free")),
        false => Err(format!(
            "{needed} are needed, {free} are free; raise /proc/sys/vm/nr_hugepages, or leave --huge out"
        )),
    }
}

/// The agent does not lock its memory itself, so only where there is no swap nothing of it is swapped out.
fn swap(export: Bytes, memory: &Memory) -> Result<String, String> {
    if memory.swap_bytes == 0 {
        return Ok("none: nothing of the export can be swapped out".into());
    }
    let (lockable, _) = getrlimit(Resource::RLIMIT_MEMLOCK).unwrap_or((0, 0));
    let lock = if lockable < export.0 {
        "less than the export may be locked"
    } else {
        "all may be locked"
    };
    Err(format!(
        "{} MiB, so the kernel may swap pages of clients out ({lock}); set MemorySwapMax=0 and LimitMEMLOCK=infinity in the unit, or swapoff -a",
        memory.swap_bytes >> 20
    ))
}

fn pressure() -> Result<String, String> {
    let read = fs::read_to_string("/proc/pressure/memory");
    let cure = "boot with psi=1, and let /proc/pressure be seen (no ProcSubset=pid)";
    read.map(|_| "/proc/pressure/memory can be read".into())
        .map_err(|error| format!("/proc/pressure/memory cannot be read ({error}); {cure}"))
}

fn udp_buffers() -> Result<String, String> {
    let limit = |name| number(&format!("/proc/sys/net/core/{name}")).unwrap_or(0);
    let least = limit("rmem_max").min(limit("wmem_max"));
    match least >= SOCKET_BUFFER as u64 {
        true => Ok(format!("{} KiB at most", least >> 10)),
        false => Err(format!(
            "{} KiB at most, so bursts are lost and sent again; sysctl net.core.rmem_max={SOCKET_BUFFER} net.core.wmem_max={SOCKET_BUFFER}",
            least >> 10
        )),
    }
}

/// An agent needs no right but to read its keys: no capability, no user namespace.
fn rights() -> Result<String, String> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let has_some = capabilities.is_none_or(|set| set.trim().bytes().any(|digit| digit != b'0'));
    let user = nix::unistd::geteuid();
    match (user.is_root(), has_some) {
        (false, false) => Ok(format!("user {user}, no capabilities: none is needed")),
        (root, _) => {
            let what = if root { "it runs as root" } else { "it has capabilities" };
            Err(format!(
                "{what}, and needs neither; give it a user of its own, as the packaged unit does"
            ))
        }
    }
}

/// A file with one number.
fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}
