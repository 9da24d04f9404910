//! How much memory there is for this process: the machine's, or less where a cgroup (a container, a systemd unit) limits it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A v1 limit from here on is none: LONG_MAX rounded down to pages.
const UNLIMITED_V1: u64 = (i64::MAX as u64) & !0xffff;
/// Most cgroups above one another that are looked at.
const DEPTH_MAX: usize = 64;

/// In bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// `MemTotal`, or the cgroup's limit if that is less: what a percentage of `--local` and `--export` is of.
    pub total_bytes: u64,
    /// `MemAvailable`, or what the cgroup's limit leaves if that is less.
    pub available_bytes: u64,
    /// `SwapTotal`, or the cgroup's limit on swap if that is less.
    pub swap_bytes: u64,
    /// The cgroup's limit, where it is less than the machine's memory.
    pub cgroup_limit_bytes: Option<u64>,
}

impl Memory {
    /// Reads this process's.
    pub fn read() -> io::Result<Memory> {
        let machine = Memory::parse(&fs::read_to_string("/proc/meminfo")?)
            .ok_or_else(|| io::Error::other("/proc/meminfo has no MemTotal or MemAvailable"))?;
        let text = |path| fs::read_to_string(path).unwrap_or_default();
        let groups = groups(&text("/proc/self/cgroup"), &text("/proc/self/mountinfo"));
        Ok(groups.iter().fold(machine, |memory, group| memory.within(group)))
    }

    fn parse(text: &str) -> Option<Memory> {
        let field = |name: &str| -> Option<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
        };
        Some(Memory {
            total_bytes: field("MemTotal:")?,
            available_bytes: field("MemAvailable:")?,
            swap_bytes: field("SwapTotal:").unwrap_or(0),
            cgroup_limit_bytes: None,
        })
    }

    /// What is left of it inside a cgroup.
    fn within(self, group: &Group) -> Memory {
        let limits = group.limits();
        // To sum up a group's use takes the kernel a while, and matters only under a limit.
        let used = if limits.memory < self.total_bytes { group.used() } else { 0 };
        let left = limits.memory.saturating_sub(used);
        Memory {
            total_bytes: self.total_bytes.min(limits.memory),
            available_bytes: self.available_bytes.min(left),
            swap_bytes: self.swap_bytes.min(limits.swap),
            cgroup_limit_bytes: if limits.memory < self.total_bytes {
                Some(limits.memory)
            } else {
                self.cgroup_limit_bytes
            },
        }
    }
}

/// A memory cgroup that this process is in.
#[derive(Debug, PartialEq, Eq)]
enum Group {
    V1(PathBuf),
    V2(PathBuf),
}

/// In bytes; no limit is `u64::MAX`.
struct Limits {
    memory: u64,
    swap: u64,
}

impl Group {
    /// Bytes charged now, without file pages which the kernel can drop at once.
    fn used(&self) -> u64 {
        let (dir, charged, droppable) = match self {
            Group::V1(dir) => (dir, "memory.usage_in_bytes", "total_inactive_file"),
            Group::V2(dir) => (dir, "memory.current", "inactive_file"),
        };
        number(dir, charged).unwrap_or(0).saturating_sub(stat(dir, droppable).unwrap_or(0))
    }

    fn limits(&self) -> Limits {
        let unlimited = |limit: Option<u64>| limit.unwrap_or(u64::MAX);
        match self {
            Group::V1(dir) => {
                let memory = number(dir, "memory.limit_in_bytes").filter(|&n| n < UNLIMITED_V1);
                let both = number(dir, "memory.memsw.limit_in_bytes").filter(|&n| n < UNLIMITED_V1);
                // Of all groups above too, also those that a container does not see.
                let above = stat(dir, "hierarchical_memory_limit").filter(|&n| n < UNLIMITED_V1);
                let swap = both.map(|both| both.saturating_sub(memory.unwrap_or(both)));
                Limits { memory: unlimited(memory).min(unlimited(above)), swap: unlimited(swap) }
            }
            Group::V2(dir) => {
                let (max, high) = (number(dir, "memory.max"), number(dir, "memory.high"));
                Limits {
                    memory: unlimited(max).min(unlimited(high)),
                    swap: unlimited(number(dir, "memory.swap.max")),
                }
            }
        }
    }
}

/// A file with one number; `None` also for `max`.
fn number(dir: &Path, file: &str) -> Option<u64> {
    fs::read_to_string(dir.join(file)).ok()?.trim().parse().ok()
}

fn stat(dir: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(dir.join("memory.stat")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    line.trim().parse().ok()
}

/// The process's memory cgroups, from its own up to the root of what is mounted, by the texts of /proc/self/cgroup and mountinfo.
fn groups(cgroup: &str, mountinfo: &str) -> Vec<Group> {
    let mut found = Vec::new();
    for line in cgroup.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let v2 = controllers.is_empty();
        if !v2 && !controllers.split(',').any(|controller| controller == "memory") {
            continue;
        }
        let Some((root, mount)) = mount_of(mountinfo, v2) else { continue };
        // In a container without a cgroup namespace the mount shows the part below `root`; elsewhere the root is "/".
        let below = Path::new(path).strip_prefix(&root).unwrap_or(Path::new(""));
        let dir = mount.join(below.strip_prefix("/").unwrap_or(below));
        let dirs = dir.ancestors().take_while(|dir| dir.starts_with(&mount)).take(DEPTH_MAX);
        let group = if v2 { Group::V2 } else { Group::V1 };
        found.extend(dirs.map(|dir| group(dir.to_path_buf())));
    }
    found
}

/// Root and mount point of the hierarchy: v2's, or that of v1's memory controller.
fn mount_of(mountinfo: &str, v2: bool) -> Option<(PathBuf, PathBuf)> {
    mountinfo.lines().find_map(|line| {
        let (mount, filesystem) = line.split_once(" - ")?;
        let mut filesystem = filesystem.split(' ');
        let (kind, options) = (filesystem.next()?, filesystem.nth(1)?);
        let wanted = match v2 {
            true => kind == "cgroup2",
            false => kind == "cgroup" && options.split(',').any(|option| option == "memory"),
        };
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        wanted.then(|| (unescape(root), unescape(point)))
    })
}

/// Blanks in mountinfo are octal.
fn unescape(text: &str) -> PathBuf {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: Memory = Memory {
        total_bytes: 10 << 30,
        available_bytes: 8 << 30,
        swap_bytes: 1 << 30,
        cgroup_limit_bytes: None,
    };

    fn group_dir(name: &str, files: &[(&str, &str)]) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("gms-memory-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).unwrap();
        files.iter().for_each(|(file, text)| fs::write(dir.join(file), text).unwrap());
        dir
    }

    #[test]
    fn meminfo_is_in_kibibytes() {
        let text = "MemTotal:  2000 kB\nMemFree: 1 kB\nMemAvailable:    1000 kB\nSwapTotal: 3 kB\n";
        let memory = Memory {
            total_bytes: 2_048_000,
            available_bytes: 1_024_000,
            swap_bytes: 3072,
            cgroup_limit_bytes: None,
        };
        assert_eq!(Memory::parse(text), Some(memory));
        assert_eq!(Memory::parse("MemTotal: 2000 kB\n"), None);
        assert_eq!(Memory::parse("MemTotal: x kB\nMemAvailable: 1 kB\n"), None);
        assert!(Memory::read().is_ok_and(|memory| memory.available_bytes <= memory.total_bytes));
    }

    #[test]
    fn a_v2_cgroup_limits() {
        let dir = group_dir(
            "v2",
            &[
                ("memory.max", "2147483648\n"),
                ("memory.high", "max\n"),
                ("memory.current", "1073741824\n"),
                ("memory.swap.max", "0\n"),
                ("memory.stat", "anon 5\ninactive_file 536870912\nactive_file 7\n"),
            ],
        );
        let memory = MACHINE.within(&Group::V2(dir.clone()));
        assert_eq!(memory.total_bytes, 2 << 30);
        assert_eq!(memory.available_bytes, (1 << 30) + (512 << 20));
        assert_eq!((memory.swap_bytes, memory.cgroup_limit_bytes), (0, Some(2 << 30)));
        fs::write(dir.join("memory.high"), "1073741824").unwrap();
        assert_eq!(MACHINE.within(&Group::V2(dir.clone())).total_bytes, 1 << 30);
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(MACHINE.within(&Group::V2(dir)), MACHINE);
    }

    #[test]
    fn a_v1_cgroup_limits() {
        let none = "9223372036854771712\n";
        let dir = group_dir(
            "v1",
            &[
                ("memory.limit_in_bytes", none),
                ("memory.memsw.limit_in_bytes", none),
                ("memory.usage_in_bytes", "1048576"),
                (
                    "memory.stat",
                    "hierarchical_memory_limit 9223372036854771712\ntotal_inactive_file 0\n",
                ),
            ],
        );
        assert_eq!(MACHINE.within(&Group::V1(dir.clone())), MACHINE);
        let stat = "hierarchical_memory_limit 4294967296\ntotal_inactive_file 1048576\n";
        fs::write(dir.join("memory.stat"), stat).unwrap();
        let memory = MACHINE.within(&Group::V1(dir.clone()));
        assert_eq!((memory.total_bytes, memory.available_bytes), (4 << 30, 4 << 30));
        assert_eq!(memory.swap_bytes, 1 << 30);
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn cgroups_are_found_where_they_are_mounted() {
        let v2 = "30 25 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        let dirs = |dirs: &[&str]| dirs.iter().map(|dir| Group::V2(dir.into())).collect::<Vec<_>>();
        assert_eq!(
            groups("0::/a.slice/b.scope\n", v2),
            dirs(&["/sys/fs/cgroup/a.slice/b.scope", "/sys/fs/cgroup/a.slice", "/sys/fs/cgroup"])
        );
        // Inside a container with a cgroup namespace.
        assert_eq!(groups("0::/\n", v2), dirs(&["/sys/fs/cgroup"]));
        // v1, without a cgroup namespace, beside a v2 without the controller.
        let v1 =
            "41 32 0:37 /docker/c1 /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory\n";
        assert_eq!(
            groups("9:name=systemd:/\n4:memory:/docker/c1\n0::/x\n", v1),
            [Group::V1("/sys/fs/cgroup/memory".into())]
        );
        assert!(groups("", v2).is_empty() && groups("0::/a\n", "").is_empty());
    }
}
