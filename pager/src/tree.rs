//! The processes of a workload: everything below the root, without our own evictors.

use std::collections::{BTreeMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};

use crate::evictor::{has_ended, pidfd_open};
use crate::proc;

/// Where the tree begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Root {
    /// Our own children: we are their subreaper, so that none gets lost.
    OwnChildren,
    /// A process that was running before; descendants whose parent ends stay known, but not *their* later children.
    Process(i32),
}

/// Processes known to be alive, or not yet seen to have ended.
pub struct Tree {
    root: Root,
    members: BTreeMap<i32, OwnedFd>,
    seen: u64,
}

impl Tree {
    /// A tree in which nobody has been looked for yet.
    pub fn new(root: Root) -> Tree {
        Tree { root, members: BTreeMap::new(), seen: 0 }
    }

    /// Finds new members and drops those that have ended.
    pub fn refresh(&mut self, evictors: &[i32]) {
        self.members.retain(|_, process| !has_ended(process.as_fd()));
        let start = match self.root {
            Root::OwnChildren => proc::children(std::process::id() as i32),
            Root::Process(pid) => vec![pid],
        };
        let mut queue: Vec<i32> = start.into_iter().chain(self.members.keys().copied()).collect();
        let mut visited: HashSet<i32> = evictors.iter().copied().collect();
        while let Some(pid) = queue.pop() {
            if !visited.insert(pid) {
                continue;
            }
            if !self.members.contains_key(&pid) {
                let Ok(process) = pidfd_open(pid) else { continue };
                if has_ended(process.as_fd()) {
                    continue;
                }
                self.members.insert(pid, process);
                self.seen += 1;
            }
            queue.extend(proc::children(pid));
        }
    }

    /// Process ids of the members.
    pub fn pids(&self) -> impl Iterator<Item = i32> + '_ {
        self.members.keys().copied()
    }

    /// Whether the process is a member.
    pub fn contains(&self, pid: i32) -> bool {
        self.members.contains_key(&pid)
    }

    /// Whether nobody is left.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Members ever seen.
    pub fn seen(&self) -> u64 {
        self.seen
    }

    /// Kills every member that is known now.
    pub fn kill(&self) {
        use std::os::fd::AsRawFd;
        for process in self.members.values() {
            // SAFETY: pidfd_send_signal reads no memory when the info is null; a member that is gone already is what we want.
            unsafe {
                libc::syscall(
                    libc::SYS_pidfd_send_signal,
                    process.as_raw_fd(),
                    libc::SIGKILL,
                    0usize,
                    0,
                );
            }
        }
    }
}
