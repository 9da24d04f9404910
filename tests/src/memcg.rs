//! Memory cgroups of tests, which stand for small machines.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::mib::Mib;

/// A memory cgroup below (version 2: beside) this test's own, with a limit; removed when dropped.
pub struct MemoryGroup {
    dir: PathBuf,
    is_v2: bool,
}

impl MemoryGroup {
    /// With a limit; `None` if there can be none here.
    pub fn new(limit: Mib) -> Option<MemoryGroup> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let own = fs::read_to_string("/proc/self/cgroup").expect("/proc/self/cgroup");
        let path =
            |line: &str| line.splitn(3, ':').nth(2).map(|p| p.trim_start_matches('/').to_string());
        let v1 = own.lines().find(|line| line.split(':').nth(1) == Some("memory")).and_then(path);
        let (parent, file, is_v2) = match v1 {
            Some(path) => {
                (PathBuf::from("/sys/fs/cgroup/memory").join(path), "memory.limit_in_bytes", false)
            }
            None => {
                let v2 = own.lines().find(|line| line.starts_with("0::")).and_then(path)?;
                // A group with processes of its own has no children with controllers: beside it.
                let own = PathBuf::from("/sys/fs/cgroup").join(v2);
                (own.parent().unwrap_or(&own).to_path_buf(), "memory.max", true)
            }
        };
        let name = format!("gms-test-{}-{}", std::process::id(), MADE.fetch_add(1, Relaxed));
        let dir = parent.join(name);
        fs::create_dir(&dir).ok()?;
        let group = MemoryGroup { dir, is_v2 };
        fs::write(group.dir.join(file), limit.bytes().to_string()).ok()?;
        Some(group)
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What a command line begins with whose program is to run in it.
    pub fn enter(&self) -> [OsString; 4] {
        let script = format!("echo $$ >{}/cgroup.procs; exec \"$@\"", self.dir.display());
        ["sh".into(), "-c".into(), script.into(), "sh".into()]
    }

    /// Memory that its processes have.
    pub fn used(&self) -> Mib {
        let file = if self.is_v2 { "memory.current" } else { "memory.usage_in_bytes" };
        let text = fs::read_to_string(self.dir.join(file)).expect("a cgroup's file");
        Mib(text.trim().parse::<u64>().expect("bytes") >> 20)
    }

    /// How often the kernel has killed one of its processes for want of memory.
    pub fn oom_kills(&self) -> u64 {
        let file = if self.is_v2 { "memory.events" } else { "memory.oom_control" };
        let text = fs::read_to_string(self.dir.join(file)).expect("a cgroup's file");
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.expect("oom_kill").trim().parse().expect("a count")
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.dir);
    }
}
