//! `gms doctor`: whether this machine can page programs, and what to do if not.

use std::fmt::Write;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use gms_transport::keys::{self, Role};
use linux_raw_sys::general as sys;
use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::geteuid;
use serde::Serialize;

use crate::cli::DoctorArgs;
use crate::commands::{EXIT_NO, Failure, print};
use crate::evictor::{pidfd_getfd, pidfd_open};
use crate::session::{Session, SessionConfig, SessionError};
use crate::size::{Human, Memory};
use crate::target::self_pid;
use crate::uffd;

/// First kernel with UFFDIO_MOVE.
const KERNEL_MIN: (u32, u32) = (6, 8);
/// Receive buffer in which a burst of full vectors fits.
const RMEM_BYTES_MIN: u64 = 2 << 20;
/// Memory for which gms asks to stay resident itself.
const MEMLOCK_BYTES_MIN: u64 = 64 << 20;
const CAP_SYS_PTRACE: u32 = 19;

const UFFD_NAMES: [(u32, &str); 9] = [
    (sys::UFFD_FEATURE_EVENT_FORK, "EVENT_FORK"),
    (sys::UFFD_FEATURE_EVENT_REMAP, "EVENT_REMAP"),
    (sys::UFFD_FEATURE_EVENT_REMOVE, "EVENT_REMOVE"),
    (sys::UFFD_FEATURE_EVENT_UNMAP, "EVENT_UNMAP"),
    (sys::UFFD_FEATURE_THREAD_ID, "THREAD_ID"),
    (sys::UFFD_FEATURE_MOVE, "MOVE"),
    (sys::UFFD_FEATURE_PAGEFAULT_FLAG_WP, "PAGEFAULT_FLAG_WP"),
    (sys::UFFD_FEATURE_WP_UNPOPULATED, "WP_UNPOPULATED"),
    (sys::UFFD_FEATURE_POISON, "POISON"),
];

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
pub fn doctor(args: &DoctorArgs) -> Result<u8, Failure> {
    let mut checks = vec![
        architecture(),
        kernel(),
        userfaultfd(),
        device(),
        pidfd(),
        pagemap_scan(),
        children(),
    ];
    checks.extend([ptrace(), memlock(), udp_buffer(), processors(), swap()]);
    checks.extend(args.keys.as_deref().map(|dir| {
        let keys = keys::load(dir, Role::Client);
        let finding =
            keys.as_ref().err().map_or(format!("{} is good", dir.display()), ToString::to_string);
        needed("keys", keys.is_ok(), finding, "see 'gms keys --help'")
    }));
    checks.extend(args.agents.iter().map(|addr| agent(addr, args)));
    if args.json {
        let mut text = serde_json::to_vec_pretty(&checks).map_err(io::Error::from)?;
        text.push(b'\n');
        print(&text)?;
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
    let release =
        nix::sys::utsname::uname().map(|name| name.release().to_string_lossy().into_owned());
    let release = release.unwrap_or_default();
    let good = version(&release).is_some_and(|version| version >= KERNEL_MIN);
    needed(
        "kernel",
        good,
        &release,
        "boot Linux 6.8 or later (Debian 12: apt install linux-image-amd64 from bookworm-backports)",
    )
}

/// Major and minor number of `6.12.3-amd64`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn userfaultfd() -> Check {
    let cure = "run gms as root, or allow it to your user: sysctl vm.unprivileged_userfaultfd=1 (and CAP_SYS_PTRACE)";
    let offered = match open_userfaultfd().and_then(|fd| offer(&fd, 0)) {
        Ok(offered) => offered,
        Err(error) => return needed("userfaultfd", false, error, cure),
    };
    let missing = |which: &[(u32, &str)]| -> Vec<String> {
        let absent = which.iter().filter(|(bit, _)| offered & u64::from(*bit) == 0);
        absent.map(|(_, name)| (*name).to_string()).collect()
    };
    let (absent, unneeded) = (missing(&UFFD_NAMES), missing(&UFFD_NAMES[6..]));
    if !absent.is_empty() {
        let finding = format!("without {}", absent.join(", "));
        return needed(
            "userfaultfd",
            false,
            finding,
            "boot Linux 6.8 or later, built with CONFIG_USERFAULTFD",
        );
    }
    // EVENT_FORK is offered to all but granted to the privileged.
    if let Err(error) = open_userfaultfd().and_then(|fd| offer(&fd, uffd::FEATURES)) {
        return needed(
            "userfaultfd",
            false,
            format!("fork events are refused ({error})"),
            "run gms as root or with CAP_SYS_PTRACE",
        );
    }
    let finding = match unneeded.is_empty() {
        true => "all features".to_string(),
        false => format!("without {}: clean pages cannot be told", unneeded.join(", ")),
    };
    wished(
        "userfaultfd",
        unneeded.is_empty(),
        finding,
        "boot Linux 6.8 or later for CONFIG_PTE_MARKER_UFFD_WP",
    )
}

fn open_userfaultfd() -> nix::Result<OwnedFd> {
    // SAFETY: no pointer is passed; the descriptor returned is ours alone.
    let fd = unsafe {
        let fd = Errno::result(libc::syscall(
            libc::SYS_userfaultfd,
            libc::O_CLOEXEC | libc::O_NONBLOCK,
        ))?;
        OwnedFd::from_raw_fd(fd as i32)
    };
    Ok(fd)
}

/// Enables `features`; returns all that the kernel has.
fn offer(fd: &OwnedFd, features: u64) -> nix::Result<u64> {
    let mut api = sys::uffdio_api { api: u64::from(sys::UFFD_API), features, ioctls: 0 };
    // SAFETY: UFFDIO_API reads and writes one uffdio_api.
    unsafe { uffd::uffdio_api(fd.as_raw_fd(), &raw mut api)? };
    Ok(api.features)
}

fn device() -> Check {
    let open = fs::OpenOptions::new().read(true).write(true).open("/dev/userfaultfd");
    let finding = open.as_ref().err().map_or("can be opened".into(), ToString::to_string);
    let cure = "only needed for workloads which may not use the system call (not root, seccomp): chgrp and chmod 660 it";
    wished("/dev/userfaultfd", open.is_ok(), finding, cure)
}

fn pidfd() -> Check {
    let copied = pidfd_open(self_pid()).and_then(|process| {
        let pipe = nix::unistd::pipe()?;
        pidfd_getfd(process.as_fd(), pipe.0.as_raw_fd())
    });
    let finding = copied.as_ref().err().map_or("works".into(), ToString::to_string);
    needed(
        "pidfd_getfd",
        copied.is_ok(),
        finding,
        "allow pidfd_open and pidfd_getfd in the container's seccomp profile",
    )
}

fn pagemap_scan() -> Check {
    let scan = || -> io::Result<i32> {
        let pagemap = fs::File::open("/proc/self/pagemap")?;
        let size = size_of::<sys::pm_scan_arg>() as u64;
        // SAFETY: all fields are numbers, for which zero is valid.
        let mut arg: sys::pm_scan_arg = unsafe { std::mem::zeroed() };
        arg.size = size;
        // SAFETY: PAGEMAP_SCAN reads and writes one pm_scan_arg; its range and its vector are empty.
        Ok(unsafe { uffd::pagemap_scan(pagemap.as_raw_fd(), &raw mut arg)? })
    };
    let scanned = scan();
    let finding = scanned.as_ref().err().map_or("works".into(), ToString::to_string);
    needed("PAGEMAP_SCAN", scanned.is_ok(), finding, "boot Linux 6.8 or later, and mount /proc")
}

fn children() -> Check {
    let path = format!("/proc/self/task/{}/children", self_pid());
    let read = fs::read(path);
    let finding = read.as_ref().err().map_or("can be read".into(), ToString::to_string);
    needed(
        "/proc/PID/task/TID/children",
        read.is_ok(),
        finding,
        "boot a kernel with CONFIG_PROC_CHILDREN, and mount /proc",
    )
}

fn ptrace() -> Check {
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    let scope = scope.ok().and_then(|text| text.trim().parse::<u32>().ok()).unwrap_or(0);
    let capable = geteuid().is_root() || has_capability(CAP_SYS_PTRACE);
    let cure = "run gms as root, or: sysctl kernel.yama.ptrace_scope=1";
    match (scope, capable) {
        (0, _) | (1 | 2, true) => check("ptrace", Verdict::Ok, "allowed", ""),
        (1, false) => {
            let cure = "for gms attach: run it as root, or sysctl kernel.yama.ptrace_scope=0";
            check("ptrace", Verdict::Warn, "allowed for gms run, not for gms attach", cure)
        }
        (2, false) => check("ptrace", Verdict::Fail, "allowed to root only (ptrace_scope 2)", cure),
        _ => check(
            "ptrace",
            Verdict::Fail,
            "forbidden until the next boot (ptrace_scope 3)",
            "set kernel.yama.ptrace_scope=1 in /etc/sysctl.d and boot",
        ),
    }
}

fn has_capability(number: u32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0);
    set >> number & 1 == 1
}

fn memlock() -> Check {
    let limit = getrlimit(Resource::RLIMIT_MEMLOCK).map_or(0, |(soft, _)| soft);
    let finding = match limit {
        libc::RLIM_INFINITY => "unlimited".into(),
        limit => Human(limit).to_string(),
    };
    let good = geteuid().is_root() || limit >= MEMLOCK_BYTES_MIN;
    wished("memlock", good, finding, "ulimit -l 65536, or memlock in /etc/security/limits.conf")
}

fn udp_buffer() -> Check {
    let limit = fs::read_to_string("/proc/sys/net/core/rmem_max");
    let limit = limit.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    let cure = format!("sysctl net.core.rmem_max={0} net.core.wmem_max={0}", 2 * RMEM_BYTES_MIN);
    wished("UDP buffers", limit >= RMEM_BYTES_MIN, format!("at most {}", Human(limit)), &cure)
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

fn swap() -> Check {
    let swap = Memory::read().map_or(0, |memory| memory.swap_bytes);
    let finding = if swap == 0 { "none".into() } else { Human(swap).to_string() };
    wished(
        "swap",
        swap == 0,
        finding,
        "the kernel may swap what gms keeps local: swapoff -a, or a cgroup with memory.swap.max=0",
    )
}

fn agent(addr: &str, args: &DoctorArgs) -> Check {
    let name = format!("agent {addr}");
    let Some(keys) = &args.keys else {
        return needed(&name, false, "cannot be asked without keys", "give --keys DIR");
    };
    let config = SessionConfig {
        budget_bytes: crate::config::LOCAL_BYTES_MIN,
        page_shift: 12,
        agents: vec![addr.to_string()],
        keys: Some(keys.clone()),
        export_bytes: 0,
        when_full: Default::default(),
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
    fn every_finding_but_good_ones_has_a_cure() {
        let args = DoctorArgs { json: false, agents: vec!["a:1".into()], keys: None };
        let mut checks =
            vec![architecture(), kernel(), userfaultfd(), device(), pidfd(), pagemap_scan()];
        checks.extend([
            children(),
            ptrace(),
            memlock(),
            udp_buffer(),
            processors(),
            swap(),
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
    fn names_cover_what_the_pager_needs() {
        let named = UFFD_NAMES.iter().fold(0, |bits, (bit, _)| bits | u64::from(*bit));
        assert_eq!(named, uffd::FEATURES);
    }
}
