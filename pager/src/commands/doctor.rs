//! `gms doctor`: whether this machine can page programs, and what to do if not.

use std::fmt::Write;
use std::fs;
use std::io;
use std::path::Path;
use std::time::SystemTime;

use gms_agent::memory::Memory;
use gms_transport::keys::{self, Role};
use gms_transport::quic::limits::SOCKET_BUFFER;
use serde::Serialize;

use super::{Failure, print};
use crate::cli::DoctorArgs;
use crate::config::{LOCAL_BYTES_MIN, SessionConfig};
use crate::exit::EXIT_NO;
use crate::json;
use crate::privilege;
use crate::probe;
use crate::session::{Session, SessionError};
use crate::size::Human;

/// First kernel with UFFDIO_MOVE.
const KERNEL_MIN: (u32, u32) = (6, 8);
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
enum Verdict {
    Ok,
    /// gms works, but less well or not for everything.
    Warn,
    /// gms does not work.
    Fail,
}

/// One finding.
#[derive(Debug, Serialize)]
struct Check {
    name: String,
    verdict: Verdict,
    finding: String,
    /// What to do; empty when all is well.
    cure: String,
}

fn check(name: &str, verdict: Verdict, finding: impl ToString, cure: &str) -> Check {
    let cure = if verdict == Verdict::Ok { "" } else { cure };
    Check { name: name.into(), verdict, finding: finding.to_string(), cure: cure.into() }
}

fn needed(name: &str, good: bool, finding: impl ToString, cure: &str) -> Check {
    check(name, if good { Verdict::Ok } else { Verdict::Fail }, finding, cure)
}

fn wished(name: &str, good: bool, finding: impl ToString, cure: &str) -> Check {
    check(name, if good { Verdict::Ok } else { Verdict::Warn }, finding, cure)
}

/// Prints every check; exit status 0 if nothing that is needed fails.
pub(super) fn doctor(args: &DoctorArgs) -> Result<u8, Failure> {
    let mut checks = vec![architecture(), kernel()];
    checks.extend(paging()?);
    checks.extend([capabilities(), device(), memory()?, swap()?, direct_reads()]);
    checks.extend([udp_buffer(), processors()]);
    checks.extend(args.keys.as_deref().map(keys));
    checks.extend(args.agents.iter().map(|addr| agent(addr, args)));
    if args.json {
        print(&json::lines(&checks)?)?;
    } else {
        print(report(&checks).as_bytes())?;
    }
    Ok(if checks.iter().any(|check| check.verdict == Verdict::Fail) { EXIT_NO } else { 0 })
}

fn report(checks: &[Check]) -> String {
    let mut text = String::new();
    for Check { name, verdict, finding, cure } in checks {
        let verdict = format!("{verdict:?}").to_uppercase();
        let _ = write!(text, "{verdict:<5}{name}: {finding}");
        let _ = if cure.is_empty() { writeln!(text) } else { writeln!(text, "; cure: {cure}") };
    }
    text
}

fn architecture() -> Check {
    let machine =
        nix::sys::utsname::uname().map(|name| name.machine().to_string_lossy().into_owned());
    let machine = machine.unwrap_or_default();
    needed("architecture", machine == "x86_64", &machine, "gms runs on x86-64 only, so far")
}

fn kernel() -> Check {
    let release = release();
    let good = version(&release).is_some_and(|version| version >= KERNEL_MIN);
    needed(
        "kernel",
        good,
        &release,
        "boot Linux 6.8 or later (Debian 12: apt install linux-image-amd64 from bookworm-backports)",
    )
}

fn release() -> String {
    let name = nix::sys::utsname::uname();
    name.map(|name| name.release().to_string_lossy().into_owned()).unwrap_or_default()
}

/// Major and minor number of `6.12.3-amd64`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Whether UFFDIO_MOVE may take a wrong page from the swap cache, as far as the number tells ("mm: userfaultfd: fix race of userfaultfd_move and swap cache",
/// of 6.16 and some before).
fn mistakes_swapped_pages(release: &str) -> bool {
    let patch = release.split(|c: char| !c.is_ascii_digit()).nth(2);
    let patch = patch.and_then(|patch| patch.parse().ok()).unwrap_or(0);
    match version(release) {
        Some((6, 12)) => patch < 37,
        Some((6, 15)) => patch < 6,
        version => version < Some((6, 16)),
    }
}

/// What the pager does to a workload, tried.
fn paging() -> io::Result<Vec<Check>> {
    let tried = probe::checks()?.into_iter().map(|tried| match tried.problem {
        None => needed(tried.name, true, tried.good, ""),
        Some(problem) => needed(tried.name, false, problem.finding, &problem.cure),
    });
    Ok(tried.collect())
}

/// The keys of a client in `dir`.
fn keys(dir: &Path) -> Check {
    const CURE: &str = "see 'gms keys --help'";
    match keys::load(dir, Role::Client) {
        Err(error) => needed("keys", false, error, CURE),
        Ok(identity) => {
            let endings = identity.endings(SystemTime::now());
            let ends: Vec<String> = endings.iter().map(ToString::to_string).collect();
            let finding = match ends.is_empty() {
                true => format!("{} is good", dir.display()),
                false => ends.join("; "),
            };
            wished("keys", ends.is_empty(), finding, CURE)
        }
    }
}

/// What gms can do without.
fn capabilities() -> Check {
    let missing = privilege::missing_comforts();
    let finding = match missing.is_empty() {
        true => "all that gms uses".into(),
        false => format!("without {}", missing.join(", ")),
    };
    let cure =
        "only needed for that: give them as CAP_SYS_PTRACE is given (see gms-run(1), PRIVILEGES)";
    wished("capabilities", missing.is_empty(), finding, cure)
}

/// File systems whose direct reads take plain references to pages: such a read writes in vain to a page that is moved out meanwhile.
fn direct_reads() -> Check {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let found = unpinned(&mounts);
    let finding = match found.is_empty() {
        true => "all mounted file systems pin pages".to_string(),
        false => format!("{} do not pin the pages into which they read directly", found.join(", ")),
    };
    let cure = "keep programs that read by O_DIRECT from there out of gms";
    wished("direct reads", found.is_empty(), finding, cure)
}

/// Where such file systems are mounted, by /proc/self/mounts.
fn unpinned(mounts: &str) -> Vec<&str> {
    let place = |line| -> Option<&str> {
        let mut fields = str::split(line, ' ').skip(1);
        let (place, kind) = (fields.next()?, fields.next()?);
        ["nfs", "nfs4", "9p", "ceph"].contains(&kind).then_some(place)
    };
    mounts.lines().filter_map(place).collect()
}

fn device() -> Check {
    let open = fs::OpenOptions::new().read(true).write(true).open(probe::DEVICE);
    let finding = open.as_ref().err().map_or("can be opened".into(), ToString::to_string);
    let cure = "only needed for programs which may not make a userfaultfd themselves (another user's): chgrp and chmod 660 it; in a container give it (docker run --device /dev/userfaultfd)";
    wished(probe::DEVICE, open.is_ok(), finding, cure)
}

/// What shares (40%) and defaults are of.
fn memory() -> io::Result<Check> {
    let Memory { total_bytes, available_bytes, cgroup_limit_bytes, .. } = Memory::read()?;
    let of = if cgroup_limit_bytes.is_some() { "in this cgroup" } else { "in this machine" };
    let finding = format!("{} {of}, {} available", Human(total_bytes), Human(available_bytes));
    let cure = "too little for the least --local: raise the cgroup's limit";
    Ok(needed("memory", total_bytes >= LOCAL_BYTES_MIN, finding, cure))
}

fn udp_buffer() -> Check {
    let limit = |name| {
        let text = fs::read_to_string(format!("/proc/sys/net/core/{name}"));
        text.ok().and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    let least = limit("rmem_max").min(limit("wmem_max"));
    let cure =
        format!("sysctl net.core.rmem_max={SOCKET_BUFFER} net.core.wmem_max={SOCKET_BUFFER}");
    let is_enough = least >= SOCKET_BUFFER as u64;
    wished("UDP buffers", is_enough, format!("at most {}", Human(least)), &cure)
}

fn processors() -> Check {
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    wished(
        "processors",
        count >= 2,
        count,
        "with one processor, eviction takes time from the program: give it two",
    )
}

fn swap() -> io::Result<Check> {
    let swap = Memory::read()?.swap_bytes;
    let finding = if swap == 0 { "none".into() } else { Human(swap).to_string() };
    Ok(wished("swap", swap == 0, finding, swap_cure(&release())))
}

fn swap_cure(release: &str) -> &'static str {
    if mistakes_swapped_pages(release) {
        "this kernel may take a wrong page where gms moves one that is swapped: swapoff -a, a cgroup with memory.swap.max=0, or Linux 6.16 (6.15.6, 6.12.37)"
    } else {
        "the kernel may swap what gms keeps local: swapoff -a, or a cgroup with memory.swap.max=0"
    }
}

fn agent(addr: &str, args: &DoctorArgs) -> Check {
    let name = format!("agent {addr}");
    let Some(keys) = &args.keys else {
        return needed(&name, false, "cannot be asked without keys", "give --keys DIR");
    };
    let config = SessionConfig {
        budget_bytes: LOCAL_BYTES_MIN,
        page_shift: 12,
        fault_threads: 1,
        agents: vec![addr.to_string()],
        keys: Some(keys.clone()),
        seal: true,
        export_bytes: 0,
        when_full: Default::default(),
        redundancy: Default::default(),
        disk: None,
        trace: None,
        verbose: false,
        quiet: true,
    };
    let cure = "start it (gms-agent), open its UDP port, use keys of one 'gms keys init'";
    match Session::prepare(config) {
        Ok(session) => {
            session.finish();
            needed(&name, true, "answers", "")
        }
        Err(SessionError::Agent { reason, .. }) => needed(&name, false, reason, cure),
        Err(error) => needed(&name, false, error, cure),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_compared_by_number() {
        assert_eq!(version("6.12.3-amd64"), Some((6, 12)));
        assert_eq!(version("6.8"), Some((6, 8)));
        assert!(version("6.12.3").unwrap() >= KERNEL_MIN);
        assert!(version("6.1.0-18-amd64").unwrap() < KERNEL_MIN);
        assert!(version("5.15").unwrap() < KERNEL_MIN);
        assert_eq!(version("linux"), None);
    }

    #[test]
    fn kernels_that_mistake_swapped_pages_are_told() {
        for release in ["6.8.0-60-generic", "6.12.36", "6.12.9-amd64", "6.13.12", "6.15.5", "linux"]
        {
            assert!(swap_cure(release).contains("wrong page"), "{release}");
        }
        for release in ["6.12.37", "6.12.48+deb13-amd64", "6.15.6", "6.16.0", "6.18.44-v1", "7.0"] {
            assert!(!swap_cure(release).contains("wrong page"), "{release}");
        }
    }

    #[test]
    fn every_finding_but_good_ones_has_a_cure() {
        let args = DoctorArgs { json: false, agents: vec!["a:1".into()], keys: None };
        let mut checks = vec![architecture(), kernel()];
        checks.extend(paging().unwrap());
        checks.extend([
            capabilities(),
            device(),
            memory().unwrap(),
            swap().unwrap(),
            direct_reads(),
            udp_buffer(),
            processors(),
            agent("a:1", &args),
        ]);
        for check in &checks {
            assert_eq!(check.cure.is_empty(), check.verdict == Verdict::Ok, "{check:?}");
        }
        let text = report(&checks);
        assert_eq!(text.lines().count(), checks.len());
        assert!(text.lines().last().unwrap().starts_with("FAIL agent a:1: "), "{text}");
    }

    #[test]
    fn file_systems_that_do_not_pin_pages_are_found() {
        let mounts = "a:/x /home nfs4 rw 0 0\n/dev/vda / ext4 rw 0 0\nshare /mnt 9p rw 0 0\nbad\n";
        assert_eq!(unpinned(mounts), ["/home", "/mnt"]);
    }
}
