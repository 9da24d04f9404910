//! Where and when a report was made.

use std::fs;
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

/// A load average above this says that others used the machine meanwhile.
const LOAD_MAX: f64 = 0.5;

/// The header of a report.
#[derive(Debug, Serialize, Deserialize)]
pub struct Machine {
    /// UTC.
    pub date: String,
    /// Commit of the sources, `+` if changed since; empty outside git.
    pub commit: String,
    /// Model of the CPU.
    pub cpu: String,
    /// CPUs that may be used.
    pub cpus: usize,
    /// Release of the kernel.
    pub kernel: String,
    /// Runnable processes over the last minute, before the benchmark began.
    pub load: f64,
    /// Why the figures may be worth less.
    pub warning: Option<String>,
}

impl Machine {
    /// This one, now.
    pub fn now() -> Machine {
        let text = |path| fs::read_to_string(path).unwrap_or_default();
        let load = text("/proc/loadavg").split(' ').next().and_then(|one| one.parse().ok());
        let load: f64 = load.unwrap_or(0.0);
        let cpu = text("/proc/cpuinfo")
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
            .map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.to_owned());
        let warning = format!(
            "the load average was {load:.1} before the start: other work shares the machine"
        );
        Machine {
            date: output("date", &["-u", "+%Y-%m-%d %H:%M UTC"]),
            commit: commit(),
            cpu,
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: text("/proc/sys/kernel/osrelease").trim().to_owned(),
            load,
            warning: (load > LOAD_MAX).then_some(warning),
        }
    }
}

fn commit() -> String {
    let Ok(program) = std::env::current_exe() else { return String::new() };
    let Some(dir) = program.parent().and_then(|dir| dir.to_str()) else { return String::new() };
    output("git", &["-C", dir, "describe", "--always", "--dirty=+", "--exclude=*"])
}

/// What a command prints; nothing if it cannot be run or fails.
fn output(program: &str, args: &[&str]) -> String {
    let ran = Command::new(program).args(args).stdin(Stdio::null()).output();
    let printed = ran.ok().filter(|ran| ran.status.success()).map(|ran| ran.stdout);
    String::from_utf8_lossy(&printed.unwrap_or_default()).trim().to_owned()
}
