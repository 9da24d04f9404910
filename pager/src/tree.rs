//! The processes of a workload: everything below the root, without our own evictors.

use std::collections::{BTreeMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};

use crate::evictor::{has_ended, pidfd_open};
use crate::proc;

/// Where the tree begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Root {
    /// Our own children: we are their subreaper, so that none gets lost. The process is the first of them.
    OwnChildren(i32),
    /// A process that was running before; descendants whose parent ends stay known, but not *their* later children.
    Process(i32),
}

/// Processes known to be alive, or not yet seen to have ended.
pub struct Tree {
    root: Root,
    members: BTreeMap<i32, OwnedFd>,
    seen: u64,
    /// How often in a row nobody was found.
    empty: u32,
    births: proc::Births,
    /// The id given last when members were looked for, and how often it has been that.
    last_pid: (Option<i32>, u32),
}

/// Looks after the last birth in the system: a process has its id some moments before it is among its parent's children.
const LOOKS_AFTER_BIRTH: u32 = 3;

impl Tree {
    /// A tree of which only the first process is known yet.
    pub fn new(root: Root) -> Tree {
        let (Root::OwnChildren(first) | Root::Process(first)) = root;
        let mut tree = Tree {
            root,
            members: BTreeMap::new(),
            seen: 0,
            empty: 0,
            births: proc::Births::watch(),
            last_pid: (None, 0),
        };
        tree.add(first);
        tree
    }

    fn add(&mut self, pid: i32) -> bool {
        let alive = pidfd_open(pid).ok().filter(|process| !has_ended(process.as_fd()));
        let added = alive.is_some();
        self.seen += u64::from(added);
        self.members.extend(alive.map(|process| (pid, process)));
        added
    }

    /// Adds a process that belongs here, wherever its parent is; 0 is none.
    pub fn meet(&mut self, pid: i32) {
        if pid != 0 && !self.members.contains_key(&pid) && self.add(pid) {
            self.empty = 0;
        }
    }

    /// Finds new members and drops those that have ended, unless nobody was born and not `all` is asked for: then it returns false.
    pub fn refresh(&mut self, evictors: &[i32], all: bool) -> bool {
        let grown = self.may_have_grown();
        if !grown && !all {
            return false;
        }
        self.members.retain(|_, process| !has_ended(process.as_fd()));
        if !self.members.is_empty() && !grown {
            return true;
        }
        let start = match self.root {
            Root::OwnChildren(_) => proc::children(std::process::id() as i32),
            Root::Process(pid) => vec![pid],
        };
        let mut queue: Vec<i32> = start.into_iter().chain(self.members.keys().copied()).collect();
        let mut visited: HashSet<i32> = evictors.iter().copied().collect();
        while let Some(pid) = queue.pop() {
            if !visited.insert(pid) {
                continue;
            }
            if !self.members.contains_key(&pid) && !self.add(pid) {
                continue;
            }
            queue.extend(proc::children(pid));
        }
        self.empty = if self.members.is_empty() { self.empty + 1 } else { 0 };
        true
    }

    fn may_have_grown(&mut self) -> bool {
        let last = self.births.last_pid();
        let looks = if last.is_some() && last == self.last_pid.0 { self.last_pid.1 + 1 } else { 0 };
        self.last_pid = (last, looks);
        looks < LOOKS_AFTER_BIRTH
    }

    /// Process ids of the members.
    pub fn pids(&self) -> impl Iterator<Item = i32> + '_ {
        self.members.keys().copied()
    }

    /// Whether the process is a member.
    pub fn contains(&self, pid: i32) -> bool {
        self.members.contains_key(&pid)
    }

    /// Whether nobody is left. A list of children can miss some while others end, so that one look is not enough.
    pub fn is_gone(&self) -> bool {
        self.empty > 1
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
