//! `gms-agent --check`: what an agent with these options would lack. Nothing is served; each finding says what to do.

use crate::cli::Options;
use crate::follower;
use crate::limits::FRAME_LEN;
use crate::memory::{Host, Memory};
use gms_policy::{Bytes, ExportRange};
use gms_transport::keys::{self, Role};
use gms_transport::quic::limits::SOCKET_BUFFER;
use nix::sys::resource::{Resource, getrlimit};
use std::fmt;
use std::fs;
use std::net::{TcpListener, UdpSocket};

/// Bytes of a huge page.
const HUGE_LEN: u64 = 2 << 20;
/// Bit of CAP_IPC_LOCK in a capability set.
const IPC_LOCK: u32 = 14;

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
        found.push(needed("huge pages", huge_pages(config.export.ceiling)));
    } else {
        let most = Bytes(config.export.ceiling.0.min(memory.total_bytes));
        found.push(wished("swap", swap(most, memory)));
    }
    if config.export.is_auto() {
        found.push(wished("pressure", pressure()));
    }
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

/// What it is never less than must be there; beyond that it follows the host.
fn export(export: ExportRange, memory: &Memory) -> Check {
    let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
    let (floor, ceiling) = (mib(export.floor.0), mib(export.ceiling.0));
    let amount = if export.is_auto() { format!("{floor} to {ceiling}") } else { floor };
    let of = format!(
        "{amount}: {} {}, {} of it available",
        memory.whose(),
        mib(memory.total_bytes),
        mib(memory.available_bytes)
    );
    let verdict = match export.floor.0 {
        _ if export.ceiling.0 < FRAME_LEN as u64 => {
            return check("export", Verdict::Fail, "less than a page; export more");
        }
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

/// The agent locks all that it may export, `most`, if it may; otherwise nothing of it is swapped out only where there is no swap.
fn swap(most: Bytes, memory: &Memory) -> Result<String, String> {
    let swap_mib = memory.swap_bytes >> 20;
    if memory.swap_bytes == 0 {
        return Ok("none: nothing of the export can be swapped out".into());
    }
    let (lockable, _) = getrlimit(Resource::RLIMIT_MEMLOCK).unwrap_or((0, 0));
    match lockable >= most.0 || capabilities() >> IPC_LOCK & 1 == 1 {
        true => Ok(format!("{swap_mib} MiB, but the export can be locked in memory")),
        false => Err(format!(
            "{swap_mib} MiB, and {} MiB may be locked, so the kernel may swap pages of clients out; set LimitMEMLOCK=infinity in the unit, ulimit -l unlimited, or swapoff -a",
            lockable >> 20
        )),
    }
}

/// Whether the kernel tells an agent that follows its host of tasks that wait for memory.
fn pressure() -> Result<String, String> {
    let path = Host::find().pressure_file();
    let cure = "boot with psi=1, and let the file be written (no ProcSubset=pid)";
    match follower::watch(&path) {
        Ok(_) => Ok(format!("{} tells of tasks that wait for memory", path.display())),
        Err(error) => Err(format!(
            "{} cannot be watched ({error}), so it is only looked how much is available; {cure}",
            path.display()
        )),
    }
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
    let user = nix::unistd::geteuid();
    match (user.is_root(), capabilities() != 0) {
        (false, false) => Ok(format!("user {user}, no capabilities: none is needed")),
        (root, _) => {
            let what = if root { "it runs as root" } else { "it has capabilities" };
            Err(format!(
                "{what}, and needs neither; give it a user of its own, as the packaged unit does"
            ))
        }
    }
}

/// The effective capabilities of this process.
fn capabilities() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
}

/// A file with one number.
fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: Memory = Memory {
        total_bytes: 8 << 30,
        available_bytes: 4 << 30,
        swap_bytes: 1 << 30,
        cgroup_limit_bytes: None,
    };

    #[test]
    fn what_an_export_is_never_less_than_must_be_there() {
        let range = |floor, ceiling| ExportRange { floor: Bytes(floor), ceiling: Bytes(ceiling) };
        for (asked, verdict) in [
            (ExportRange::fixed(Bytes(1 << 30)), Verdict::Ok),
            (ExportRange::fixed(Bytes(6 << 30)), Verdict::Warn),
            (ExportRange::fixed(Bytes(9 << 30)), Verdict::Fail),
            (ExportRange::fixed(Bytes(4095)), Verdict::Fail),
            (range(0, 8 << 30), Verdict::Ok),
            (range(6 << 30, 8 << 30), Verdict::Warn),
            (range(9 << 30, 10 << 30), Verdict::Fail),
            (range(0, 4095), Verdict::Fail),
        ] {
            assert_eq!(export(asked, &MEMORY).verdict, verdict, "{asked:?}");
        }
        assert_eq!(
            export(range(1 << 30, 2 << 30), &MEMORY).finding,
            "1024 MiB to 2048 MiB: this machine has 8192 MiB, 4096 MiB of it available"
        );
    }

    #[test]
    fn what_can_be_locked_is_not_swapped_out() {
        assert!(swap(Bytes(4096), &MEMORY).is_ok());
        let none = Memory { swap_bytes: 0, ..MEMORY };
        assert!(swap(Bytes(1 << 50), &none).is_ok());
    }
}
