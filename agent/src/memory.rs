//! How much memory there is for this process: the machine's, or less where a cgroup (a container, a systemd unit) limits it.
//!
//! In a container `/proc/meminfo` tells the host's memory. The limits are those of the memory cgroup, and of each cgroup above it that can be
//! seen: version 2's `memory.max` and `memory.high`, version 1's `memory.limit_in_bytes` and `hierarchical_memory_limit`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::cgroup::{self, Group};

/// A v1 limit from here on is none: LONG_MAX rounded down to pages.
const UNLIMITED_V1: u64 = (i64::MAX as u64) & !0xffff;

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
    /// Reads `/proc/meminfo`, and the limits of this process's cgroups.
    ///
    /// # Errors
    /// If `/proc/meminfo` cannot be read. A cgroup that cannot be read limits nothing.
    pub fn read() -> io::Result<Memory> {
        Host::find().memory()
    }

    /// Whose memory it is, as the subject of a sentence.
    pub fn whose(&self) -> &'static str {
        match self.cgroup_limit_bytes {
            Some(_) => "this process's cgroup has",
            None => "this machine has",
        }
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
        let group = Limited(group);
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

/// The machine and the cgroups in it that this process is in, to be read again and again.
#[derive(Debug)]
pub struct Host {
    root: PathBuf,
    groups: Vec<Group>,
}

impl Host {
    /// Looks which cgroups this process is in.
    pub fn find() -> Host {
        Host::under(Path::new("/"))
    }

    /// As [`Host::find`], in a system whose files are below `root`.
    fn under(root: &Path) -> Host {
        Host { root: root.into(), groups: cgroup::under(root, "self", "memory") }
    }

    /// Its memory now.
    ///
    /// # Errors
    /// As [`Memory::read`].
    pub fn memory(&self) -> io::Result<Memory> {
        let text = fs::read_to_string(self.root.join("proc/meminfo"))?;
        let machine = Memory::parse(&text)
            .ok_or_else(|| io::Error::other("/proc/meminfo has no MemTotal or MemAvailable"))?;
        Ok(self.groups.iter().fold(machine, |memory, group| memory.within(group)))
    }

    /// The file that tells who waits for memory (PSI): of the innermost cgroup of version 2 that has a limit, or of the machine.
    pub fn pressure_file(&self) -> PathBuf {
        let limited = |group: &&Group| Limited(group).limits().memory != u64::MAX;
        let dir = self.groups.iter().filter(limited).find_map(|group| match group {
            Group::V2(dir) => Some(dir.join("memory.pressure")),
            Group::V1(_) => None,
        });
        dir.unwrap_or_else(|| self.root.join("proc/pressure/memory"))
    }
}

/// In bytes; no limit is `u64::MAX`.
struct Limits {
    memory: u64,
    swap: u64,
}

/// A memory cgroup that this process is in.
struct Limited<'a>(&'a Group);

impl Limited<'_> {
    /// Bytes charged now, without file pages which the kernel can drop at once.
    fn used(&self) -> u64 {
        let (dir, charged, droppable) = match self.0 {
            Group::V1(dir) => (dir, "memory.usage_in_bytes", "total_inactive_file"),
            Group::V2(dir) => (dir, "memory.current", "inactive_file"),
        };
        number(dir, charged).unwrap_or(0).saturating_sub(stat(dir, droppable).unwrap_or(0))
    }

    fn limits(&self) -> Limits {
        let unlimited = |limit: Option<u64>| limit.unwrap_or(u64::MAX);
        match self.0 {
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

    /// A system of which only these files are there; the machine has 8 GiB, of which 6 are available.
    struct System(PathBuf);

    impl System {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let dir =
                std::env::temp_dir().join(format!("gms-memory-{name}-{}", std::process::id()));
            let meminfo = ("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\n");
            for (path, text) in files.iter().chain([&meminfo]) {
                let path = dir.join(path);
                fs::create_dir_all(path.parent().expect("a folder")).expect("folder");
                fs::write(path, text).expect("file");
            }
            Self(dir)
        }

        fn mib(&self) -> (u64, u64, bool) {
            let memory = Host::under(&self.0).memory().expect("meminfo");
            (
                memory.total_bytes >> 20,
                memory.available_bytes >> 20,
                memory.cgroup_limit_bytes.is_some(),
            )
        }
    }

    impl Drop for System {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const V2_MOUNT: &str =
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn limits_of_version_2_hold_from_the_top_down() {
        let system = System::new(
            "v2",
            &[
                ("proc/self/cgroup", "0::/pod/app\n"),
                ("proc/self/mountinfo", V2_MOUNT),
                ("sys/fs/cgroup/pod/memory.max", "1073741824\n"),
                ("sys/fs/cgroup/pod/memory.current", "536870912\n"),
                ("sys/fs/cgroup/pod/memory.stat", "anon 1\ninactive_file 268435456\n"),
                ("sys/fs/cgroup/pod/app/memory.max", "max\n"),
            ],
        );
        assert_eq!(system.mib(), (1024, 768, true));
    }

    #[test]
    fn limits_of_version_1_are_those_of_the_memory_controller() {
        let mounts = "31 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
            32 23 0:28 /docker/c1 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        let system = System::new(
            "v1",
            &[
                ("proc/self/cgroup", "5:cpu:/docker/c1\n4:memory:/docker/c1\n0::/\n"),
                ("proc/self/mountinfo", mounts),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2147483648\n"),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1048576\n"),
            ],
        );
        assert_eq!(system.mib(), (2048, 2047, true));
    }

    #[test]
    fn without_a_limit_it_is_the_machine_that_counts() {
        let unlimited = System::new(
            "none",
            &[
                ("proc/self/cgroup", "4:memory:/\n0::/user\n"),
                ("proc/self/mountinfo", V2_MOUNT),
                ("sys/fs/cgroup/user/memory.max", "max\n"),
            ],
        );
        assert_eq!(unlimited.mib(), (8192, 6144, false));
        assert_eq!(System::new("bare", &[]).mib(), (8192, 6144, false));
        let huge = System::new(
            "huge",
            &[
                ("proc/self/cgroup", "0::/../..\n"),
                ("proc/self/mountinfo", V2_MOUNT),
                ("sys/fs/cgroup/memory.max", "9223372036854771712\n"),
            ],
        );
        assert_eq!(huge.mib(), (8192, 6144, false));
    }
}
