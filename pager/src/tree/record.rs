//! The tree below a command of `gms run` as the next binary of its pager is told of it.

use std::cell::Cell;
use std::io;
use std::os::fd::AsFd;

use serde::{Deserialize, Serialize};

use super::{Member, Root, Tree};
use crate::handed::{Descriptors, Number};
use crate::kernel::pidfd::has_ended;
use crate::kernel::proc;

/// See [`Tree`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct TreeRecord {
    command: i32,
    reaper: i32,
    seen: u64,
    members: Vec<MemberRecord>,
    /// The first process: it is killed if nobody is left to tell of it.
    #[serde(default)]
    first: Option<Number>,
}

#[derive(Debug, Serialize, Deserialize)]
struct MemberRecord {
    pid: i32,
    parent: i32,
    process: Number,
}

impl TreeRecord {
    /// Where it begins.
    pub(crate) fn root(&self) -> Root {
        Root::Command { pid: self.command, reaper: self.reaper }
    }
}

impl Tree {
    /// What the next binary needs; `None` of a tree that was running before.
    pub(crate) fn hand_over(&self, to: &mut Descriptors) -> Option<TreeRecord> {
        let Root::Command { pid: command, reaper } = self.root else { return None };
        let member = |(&pid, member): (&i32, &Member)| MemberRecord {
            pid,
            parent: member.parent,
            process: to.give(&member.process),
        };
        let members = self.members.iter().map(member).collect();
        let first = self.first.as_ref().map(|first| to.give(first));
        Some(TreeRecord { command, reaper, seen: self.seen, members, first })
    }

    /// What another pager needs if this one dies. Members come and go all the time: it looks for them itself.
    pub(crate) fn leave(&self, to: &mut Descriptors) -> Option<TreeRecord> {
        let Root::Command { pid: command, reaper } = self.root else { return None };
        let first = self.first.as_ref().map(|first| to.give(first));
        Some(TreeRecord { command, reaper, seen: self.seen, members: Vec::new(), first })
    }

    /// The tree again. Who was born meanwhile is found by the lists of children.
    pub(crate) fn again(record: TreeRecord) -> io::Result<Tree> {
        let mut tree = Tree::of_nobody(record.root());
        let (command, reaper) = (record.command, record.reaper);
        tree.seen = record.seen;
        for MemberRecord { pid, parent, process } in record.members {
            let process = process.take()?;
            let size = proc::Measure::open(pid).ok();
            // What was opened under its id is its own if it has not ended since.
            let size = size.filter(|_| !has_ended(process.as_fd()));
            tree.members.insert(pid, Member { process, parent, size, resident: Cell::new(0) });
        }
        tree.first = record.first.map(|first| first.take()).transpose()?;
        if let Some(first) = tree.first.as_ref().and_then(|first| first.try_clone().ok()) {
            tree.add_known(command, first.as_fd(), reaper);
        }
        // A binary before this one may not have told of it.
        if tree.first.is_none() {
            tree.first = tree.process(command).and_then(|first| first.try_clone_to_owned().ok());
        }
        Ok(tree)
    }
}
