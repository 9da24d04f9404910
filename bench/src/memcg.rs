//! A cgroup whose memory is limited, of version 2 or 1.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::error::{BenchError, Trying};
use crate::undo::{Step, Undo};

/// Joined by who writes 0 to it.
const PROCS: &str = "cgroup.procs";

/// The cgroup. Goes when it is dropped, and when this process is killed; its processes must have ended.
pub(crate) struct Memcg {
    path: PathBuf,
    tree: Tree,
    procs: Arc<File>,
    _undo: Undo,
}

/// The tree of cgroups which has the memory controller.
#[derive(Debug, PartialEq)]
struct Tree {
    root: PathBuf,
    /// File of the limit in bytes.
    limit: &'static str,
    /// File of the most that was ever charged, in bytes.
    peak: &'static str,
    /// File of what is charged, in bytes.
    used: &'static str,
    /// Key of memory.stat: anonymous memory in bytes.
    anon: &'static str,
    /// File which counts the processes that were killed for want of memory.
    kills: &'static str,
}

/// Of [`Tree`]: limit, peak, used, anon and kills.
type Names = [&'static str; 5];
const ONE: Names = [
    "memory.limit_in_bytes",
    "memory.max_usage_in_bytes",
    "memory.usage_in_bytes",
    "rss",
    "memory.oom_control",
];
const TWO: Names = ["memory.max", "memory.peak", "memory.current", "anon", "memory.events"];

impl Memcg {
    /// With a limit of `mib` MiB; what is above goes to swap.
    pub(crate) fn new(mib: u32) -> Result<Memcg, BenchError> {
        let memcg = Memcg::unlimited()?;
        let path = memcg.path.join(memcg.tree.limit);
        let what = path.display().to_string();
        fs::write(&path, (u64::from(mib) << 20).to_string()).trying(&what)?;
        Ok(memcg)
    }

    /// Without a limit: to see what is used.
    pub(crate) fn unlimited() -> Result<Memcg, BenchError> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let mounts = fs::read_to_string("/proc/self/mountinfo").trying("/proc/self/mountinfo")?;
        let tree = Tree::of(&mounts).ok_or_else(|| {
            BenchError::Needs("no cgroup of version 2, nor of version 1 with memory".into())
        })?;
        let mut undo = Undo::new()?;
        if tree.limit == TWO[0] {
            tree.give_memory(&mut undo)?;
        }
        let path = tree.root.join(format!("gms-bench-{}-{count}", std::process::id()));
        let what = path.display().to_string();
        undo.add(&Step::RemoveDir(path.clone()))?;
        fs::create_dir(&path).trying(&what)?;
        let procs = File::options().write(true).open(path.join(PROCS)).trying(&what)?;
        Ok(Memcg { path, tree, procs: Arc::new(procs), _undo: undo })
    }

    /// Resident anonymous memory of its processes in bytes.
    pub(crate) fn anon(&self) -> Result<u64, BenchError> {
        self.value("memory.stat", self.tree.anon)
    }

    /// Processes which the kernel killed because it found no page to evict.
    pub(crate) fn kills(&self) -> Result<u64, BenchError> {
        self.value(self.tree.kills, "oom_kill")
    }

    /// What a file of lines `KEY VALUE` says of `key`.
    fn value(&self, file: &str, key: &str) -> Result<u64, BenchError> {
        let text = self.read(file)?;
        let mut lines = text.lines().filter_map(|line| line.split_once(' '));
        let value = lines.find(|line| line.0 == key).and_then(|line| line.1.parse().ok());
        value.ok_or_else(|| BenchError::Invalid(format!("no {key} in {file}")))
    }

    /// The most that was charged so far in bytes: anonymous memory, the kernel's for it, and files that it read first.
    pub(crate) fn peak(&self) -> Result<u64, BenchError> {
        self.number(self.tree.peak)
    }

    /// What is charged in MiB: also what the kernel has for its processes.
    pub(crate) fn used_mib(&self) -> Result<f64, BenchError> {
        Ok(self.number(self.tree.used)? as f64 / f64::from(1 << 20))
    }

    fn number(&self, file: &str) -> Result<u64, BenchError> {
        let text = self.read(file)?;
        text.trim().parse().map_err(|_| BenchError::Invalid(format!("{file}: {text}")))
    }

    /// Its processes.
    pub(crate) fn pids(&self) -> Result<Vec<u32>, BenchError> {
        Ok(self.read(PROCS)?.lines().filter_map(|line| line.parse().ok()).collect())
    }

    /// Kills its processes.
    pub(crate) fn kill(&self) -> Result<(), BenchError> {
        for pid in self.pids()? {
            // It may have ended meanwhile.
            let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
        }
        Ok(())
    }

    fn read(&self, name: &str) -> Result<String, BenchError> {
        let path = self.path.join(name);
        fs::read_to_string(&path).trying(&path.display().to_string())
    }

    /// `command` will run in it.
    pub(crate) fn enter(&self, command: &mut Command) {
        let procs = Arc::clone(&self.procs);
        let join = move || nix::unistd::write(procs.as_fd(), b"0").map(drop).map_err(Into::into);
        // SAFETY: between fork and exec the child only makes a system call.
        unsafe { command.pre_exec(join) };
    }
}

impl Tree {
    fn new(root: PathBuf, [limit, peak, used, anon, kills]: Names) -> Tree {
        Tree { root, limit, peak, used, anon, kills }
    }

    /// From the content of /proc/self/mountinfo.
    fn of(mounts: &str) -> Option<Tree> {
        let mut unified = None;
        for line in mounts.lines() {
            let Some((mount, system)) = line.split_once(" - ") else { continue };
            let Some(root) = mount.split(' ').nth(4).map(PathBuf::from) else { continue };
            let mut system = system.split(' ');
            match (system.next(), system.next_back()) {
                (Some("cgroup"), Some(options)) if options.split(',').any(|o| o == "memory") => {
                    return Some(Tree::new(root, ONE));
                }
                (Some("cgroup2"), _) => unified = Some(Tree::new(root, TWO)),
                _ => {}
            }
        }
        unified
    }

    /// Makes sure that its children have the memory controller.
    fn give_memory(&self, undo: &mut Undo) -> Result<(), BenchError> {
        let path = self.root.join("cgroup.subtree_control");
        let what = path.display().to_string();
        let given = fs::read_to_string(&path).trying(&what)?;
        if given.split_whitespace().any(|controller| controller == "memory") {
            return Ok(());
        }
        undo.add(&Step::Write(path.clone(), "-memory".into()))?;
        fs::write(&path, "+memory").trying(&what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_with_memory_is_found() {
        let two = "26 1 0:22 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";
        let found = Tree::of(two).expect("version 2");
        assert_eq!(found, Tree::new("/sys/fs/cgroup".into(), TWO));
        let one = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                   36 31 0:33 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices\n\
                   41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw";
        let found = Tree::of(one).expect("version 1, of which memory is");
        assert_eq!(found, Tree::new("/sys/fs/cgroup/memory".into(), ONE));
        assert_eq!(Tree::of("23 1 254:0 / / rw - ext4 /dev/vda rw"), None);
    }
}
