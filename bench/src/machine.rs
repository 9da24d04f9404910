//! Where and when a report was made.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, UNIX_EPOCH};

use nix::sys::stat::{major, minor};
use serde::{Deserialize, Serialize};

/// A load average above this says that others used the machine meanwhile.
const LOAD_MAX: f64 = 0.5;
/// Steal above this, in percent of all CPU time, says that the host ran other guests meanwhile.
const STEAL_PERCENT_MAX: f64 = 1.0;

/// The header of a report.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Machine {
    /// UTC.
    pub date: String,
    /// Commit that `gms-bench` was built from, `+` if its sources had been changed since; empty
    /// outside git.
    pub commit: String,
    /// Model of the CPU.
    pub cpu: String,
    /// CPUs that may be used.
    pub cpus: usize,
    /// Release of the kernel.
    pub kernel: String,
    /// Runnable processes over the last minute, before the benchmark began.
    pub load: f64,
    /// Transparent huge pages: always, madvise or never.
    pub thp: String,
    /// Swap devices that were on before the benchmark began, and whether zswap was.
    pub swap: String,
    /// What else decides how Linux swaps: swappiness, and whether it has generations of pages (MGLRU).
    pub reclaim: String,
    /// Where the benchmark swapped to a disk: filesystem, device, and what Linux takes it for; empty if it did not.
    pub disk: String,
    /// Compression of the zram devices that the benchmark made; empty if it made none.
    pub zram: String,
    /// What lies between pager and agents; empty where a command has no choice: loopback.
    pub network: String,
    /// CPU time that the host gave to others during the benchmark, in percent of all.
    pub steal_percent: Option<f64>,
    /// Why the figures may be worth less.
    pub warnings: Vec<String>,
    #[serde(skip)]
    began: CpuTimes,
}

/// CPU times of the whole machine so far, in clock ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct CpuTimes {
    all: u64,
    stolen: u64,
}

impl Machine {
    /// This one, now.
    pub(crate) fn now() -> Machine {
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
            commit: env!("GMS_COMMIT").to_owned(),
            cpu,
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: text("/proc/sys/kernel/osrelease").trim().to_owned(),
            load,
            thp: chosen(&text("/sys/kernel/mm/transparent_hugepage/enabled")),
            swap: swap(),
            reclaim: reclaim(),
            disk: String::new(),
            zram: String::new(),
            network: String::new(),
            steal_percent: None,
            warnings: if load > LOAD_MAX { vec![warning] } else { Vec::new() },
            began: CpuTimes::of(&text("/proc/stat")),
        }
    }

    /// To be called when all is measured.
    pub(crate) fn finish(&mut self) {
        let steal = CpuTimes::of(&text("/proc/stat")).stolen_percent_since(self.began);
        self.steal_percent = Some(steal);
        if steal > STEAL_PERCENT_MAX {
            self.warnings.push(format!("the host gave {steal:.1} % of the CPU time to others"));
        }
    }

    /// Warns if the program at `path` is older than the sources of [`Machine::commit`].
    pub(crate) fn look_at_program(&mut self, path: &Path) {
        let newest = env!("GMS_NEWEST_SOURCE_S").parse().map_or(UNIX_EPOCH, |seconds| {
            // A file's time has fractions of a second.
            UNIX_EPOCH + Duration::from_secs(seconds)
        });
        let built = path.metadata().and_then(|data| data.modified());
        if built.is_ok_and(|built| built < newest) {
            let path = path.display();
            let warning = format!("{path} is older than the sources that gms-bench was built from");
            if !self.warnings.contains(&warning) {
                self.warnings.push(warning);
            }
        }
    }

    /// As the first lines of a report.
    pub(crate) fn text(&self) -> String {
        let Machine { date, commit, cpu, cpus, kernel, load, thp, swap, reclaim, .. } = self;
        let mut out = format!("{date}, commit {commit}, {cpu}, {cpus} CPUs, Linux {kernel}\n");
        out += &format!("load before {load:.2}, THP {thp}, swap before: {swap}, {reclaim}");
        if !self.disk.is_empty() {
            out += &format!(", disk: {}", self.disk);
        }
        if !self.zram.is_empty() {
            out += &format!(", zram {}", self.zram);
        }
        if !self.network.is_empty() {
            out += &format!(", network {}", self.network);
        }
        if let Some(steal) = self.steal_percent {
            out += &format!(", steal {steal:.1} %");
        }
        self.warnings.iter().for_each(|warning| out += &format!("\nWARNING: {warning}"));
        out + "\n"
    }
}

fn reclaim() -> String {
    let generations = text("/sys/kernel/mm/lru_gen/enabled");
    let has_generations = !["", "0x0000", "0", "n"].contains(&generations.trim());
    let generations = if has_generations { "MGLRU" } else { "no MGLRU" };
    format!("swappiness {}, {generations}", text("/proc/sys/vm/swappiness").trim())
}

/// The filesystem and the device of a directory, as [`Machine::disk`].
pub(crate) fn disk(dir: &Path) -> String {
    let Ok(device) = dir.metadata().map(|data| data.dev()) else { return String::new() };
    let id = format!("{}:{}", major(device), minor(device));
    let mounts = text("/proc/self/mountinfo");
    let mount = mounts.lines().find(|line| line.split(' ').nth(2) == Some(&id));
    let kind = mount.and_then(|line| line.split_once(" - ")?.1.split(' ').next());
    // A partition's queue is that of its disk.
    let block = Path::new("/sys/dev/block").join(&id);
    let queue = [block.join("queue"), block.join("../queue")].into_iter().find(|dir| dir.is_dir());
    let told = |name: &str| {
        queue.as_ref().map_or(String::new(), |dir| text(dir.join(name)).trim().to_owned())
    };
    let name = fs::canonicalize(&block).ok().and_then(|path| Some(path.file_name()?.to_owned()));
    format!(
        "{} on {}, rotational {}, scheduler {}",
        kind.unwrap_or("?"),
        name.unwrap_or_default().display(),
        told("rotational"),
        chosen(&told("scheduler"))
    )
}

impl CpuTimes {
    /// From the content of /proc/stat: `cpu user nice system idle iowait irq softirq steal ...`.
    /// What follows is a guest's, and part of user.
    fn of(stat: &str) -> CpuTimes {
        let line = stat.lines().next().and_then(|line| line.strip_prefix("cpu ")).unwrap_or("");
        let times: Vec<u64> =
            line.split_whitespace().take(8).filter_map(|time| time.parse().ok()).collect();
        CpuTimes { all: times.iter().sum(), stolen: times.get(7).copied().unwrap_or(0) }
    }

    fn stolen_percent_since(self, before: CpuTimes) -> f64 {
        let all = self.all.saturating_sub(before.all).max(1);
        100.0 * self.stolen.saturating_sub(before.stolen) as f64 / all as f64
    }
}

/// Of a file like `always [madvise] never` what is in brackets.
pub(crate) fn chosen(choices: &str) -> String {
    let bracketed = choices.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    bracketed.map_or_else(|| "unknown".to_owned(), |(one, _)| one.to_owned())
}

/// Swap devices that are on, and zswap, which would compress what goes to them.
fn swap() -> String {
    let swaps = text("/proc/swaps");
    let names = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    let names: Vec<&str> = names.collect();
    let zswap = text("/sys/module/zswap/parameters/enabled");
    let zswap = if zswap.trim() == "Y" { ", zswap on" } else { "" };
    let names = if names.is_empty() { "off".to_owned() } else { names.join(" ") };
    names + zswap
}

fn text(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// What a command prints; nothing if it cannot be run or fails.
fn output(program: &str, args: &[&str]) -> String {
    let ran = Command::new(program).args(args).stdin(Stdio::null()).output();
    let printed = ran.ok().filter(|ran| ran.status.success()).map(|ran| ran.stdout);
    String::from_utf8_lossy(&printed.unwrap_or_default()).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stolen_time_is_a_share_of_all() {
        let before = CpuTimes::of("cpu  10 0 10 80 0 0 0 0 5 0\ncpu0 1 1 1 1 1 1 1 1\n");
        assert_eq!(before, CpuTimes { all: 100, stolen: 0 }, "a guest's time is in user already");
        let after = CpuTimes::of("cpu  20 0 20 150 0 0 0 10 9 0\n");
        assert!((after.stolen_percent_since(before) - 10.0).abs() < 1e-9);
        assert_eq!(CpuTimes::of("").stolen_percent_since(before), 0.0);
    }

    #[test]
    fn the_choice_is_in_brackets() {
        assert_eq!(chosen("always [madvise] never\n"), "madvise");
        assert_eq!(chosen(""), "unknown");
    }

    #[test]
    fn an_old_program_is_warned_of() {
        let mut machine = Machine::default();
        machine.look_at_program(&std::env::current_exe().expect("this test"));
        assert!(machine.warnings.is_empty(), "it was built from these sources: {machine:?}");
        machine.look_at_program(Path::new("/no/such/program"));
        assert!(machine.warnings.is_empty());
        let old = std::env::temp_dir().join(format!("gms-bench-old-{}", std::process::id()));
        let file = fs::File::create(&old).expect("a file");
        file.set_modified(UNIX_EPOCH).expect("its time");
        (0..2).for_each(|_| machine.look_at_program(&old));
        fs::remove_file(&old).expect("the file goes");
        assert_eq!(machine.warnings.len(), 1, "{machine:?}");
    }
}
