//! The processes of a workload: everything below the root, without our own evictors. Ids are names which may mean somebody else a moment later:
//! a process belongs here because its parent does, which is checked while its id cannot be given to another.

use std::collections::{BTreeMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::evictor::{has_ended, kill, pidfd_open};
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
        tree.add(first, |_| true);
        tree
    }

    /// Adds a process, if what was opened under its id `belongs`.
    fn add(&mut self, pid: i32, belongs: impl FnOnce(&Tree) -> bool) -> bool {
        let Ok(process) = pidfd_open(pid) else { return false };
        // While it has not ended its id is no other process's: what was looked up by that is true of this one.
        let added = belongs(self) && !has_ended(process.as_fd());
        if added {
            self.seen += 1;
            self.members.insert(pid, process);
        }
        added
    }

    /// Whether the parent of a process is a member that has not ended, or this process, as a subreaper of the members' children.
    fn is_child(&self, pid: i32) -> bool {
        let Some(parent) = proc::status_field(pid, "PPid:").map(|parent| parent as i32) else {
            return false;
        };
        let adopted =
            matches!(self.root, Root::OwnChildren(_)) && parent == std::process::id() as i32;
        adopted || self.members.get(&parent).is_some_and(|process| !has_ended(process.as_fd()))
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
            if !self.members.contains_key(&pid) && !self.add(pid, |tree| tree.is_child(pid)) {
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

    /// A descriptor of a member that has not ended when last looked at: its id may be another's now.
    pub fn process(&self, pid: i32) -> Option<BorrowedFd<'_>> {
        self.members.get(&pid).map(AsFd::as_fd)
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
        self.members.values().for_each(kill);
    }
}
