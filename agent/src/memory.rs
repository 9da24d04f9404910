//! How much memory there is for this process: the machine's, or what its cgroups leave of it.
//!
//! In a container `/proc/meminfo` tells the host's memory; the limit is that of the memory cgroup, and of each cgroup
//! above it that can be seen. Version 2 keeps it in `memory.max`, version 1 in `memory.limit_in_bytes`.

use gms_policy::Bytes;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

/// Memory that this process may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// All of it.
    pub total: Bytes,
    /// What can be used without swapping.
    pub available: Bytes,
    /// Whether a cgroup's limit is less than what the machine has.
    pub limited: bool,
}

impl Memory {
    /// Reads `/proc/meminfo`, and the limits of this process's cgroups.
    ///
    /// # Errors
    /// If `/proc/meminfo` cannot be read. A cgroup that cannot be read limits nothing.
    pub fn read() -> io::Result<Self> {
        Self::under(Path::new("/"))
    }

    /// As [`Memory::read`], in a system whose files are below `root`.
    fn under(root: &Path) -> io::Result<Self> {
        let text = fs::read_to_string(root.join("proc/meminfo"))?;
        let machine = Self::parse(&text).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "/proc/meminfo is not understood")
        })?;
        Ok(limits(root).into_iter().fold(machine, Self::limit))
    }

    /// What a cgroup of this limit and use leaves of it.
    fn limit(self, cgroup: Limit) -> Self {
        let left = Bytes(cgroup.limit.saturating_sub(cgroup.used));
        Self {
            total: self.total.min(Bytes(cgroup.limit)),
            available: self.available.min(left),
            limited: self.limited || cgroup.limit < self.total.0,
        }
    }

    /// Whose memory it is, as the subject of a sentence.
    pub fn whose(&self) -> &'static str {
        if self.limited { "this process's cgroup has" } else { "this machine has" }
    }

    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
            kib.checked_mul(1024).map(Bytes)
        };
        let (total, available) = (field("MemTotal:")?, field("MemAvailable:")?);
        Some(Self { total, available, limited: false })
    }
}

/// A cgroup's limit, and how much of it cannot be reclaimed, in bytes.
#[derive(Clone, Copy, Debug)]
struct Limit {
    limit: u64,
    used: u64,
}

/// The limits of the cgroups that this process is in.
fn limits(root: &Path) -> Vec<Limit> {
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let (cgroups, mounts) = (read("proc/self/cgroup"), read("proc/self/mountinfo"));
    cgroups
        .lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            let version = match controllers {
                "" => Version::Two,
                _ if controllers.split(',').any(|name| name == "memory") => Version::One,
                _ => return None,
            };
            let (mount, base) = mounts.lines().find_map(|line| version.mount(line))?;
            // In a container the mount often begins at the container's own cgroup.
            let below = Path::new(path).strip_prefix(base).unwrap_or(Path::new(""));
            let is_plain = |part: &Component<'_>| matches!(part, Component::Normal(_));
            let below: PathBuf = below.components().filter(is_plain).collect();
            let mount = root.join(mount.trim_start_matches('/'));
            let dirs: Vec<PathBuf> = below.ancestors().map(|dir| mount.join(dir)).collect();
            Some(dirs.into_iter().filter_map(move |dir| version.limit(&dir)))
        })
        .flatten()
        .collect()
}

/// The two kinds of cgroups.
#[derive(Clone, Copy)]
enum Version {
    One,
    Two,
}

impl Version {
    /// Mount point, and the cgroup that is mounted there, if a line of mountinfo is of the memory controller.
    fn mount(self, line: &str) -> Option<(&str, &str)> {
        let (mount, kind) = line.split_once(" - ")?;
        let mut kind = kind.split(' ');
        let is_it = match (self, kind.next()?) {
            (Version::Two, "cgroup2") => true,
            (Version::One, "cgroup") => kind.nth(1)?.split(',').any(|option| option == "memory"),
            _ => false,
        };
        let mut fields = mount.split(' ').skip(3);
        let (base, point) = (fields.next()?, fields.next()?);
        is_it.then_some((point, base))
    }

    /// The limit of the cgroup in `dir`, if it has one.
    fn limit(self, dir: &Path) -> Option<Limit> {
        let (limit, used, file) = match self {
            Version::One => {
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            }
            Version::Two => ("memory.max", "memory.current", "inactive_file"),
        };
        let number = |file| fs::read_to_string(dir.join(file)).ok()?.trim().parse::<u64>().ok();
        // "max", which is no number, is no limit.
        let (limit, used) = (number(limit)?, number(used).unwrap_or(0));
        // The page cache of files that are not in use goes as soon as somebody needs the memory.
        let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
        let cache = stat
            .lines()
            .find_map(|line| line.strip_prefix(file)?.strip_prefix(' ')?.parse::<u64>().ok());
        Some(Limit { limit, used: used.saturating_sub(cache.unwrap_or(0)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read() {
        let text = "MemTotal:       100 kB\nMemFree:         1 kB\nMemAvailable:    50 kB\n";
        let expected = Memory { total: Bytes(102_400), available: Bytes(51_200), limited: false };
        assert_eq!(Memory::parse(text), Some(expected));
        assert_eq!(Memory::parse("MemTotal: 100 kB\n"), None);
        assert!(Memory::read().is_ok_and(|memory| memory.available <= memory.total));
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
            let memory = Memory::under(&self.0).expect("meminfo");
            (memory.total.0 >> 20, memory.available.0 >> 20, memory.limited)
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
