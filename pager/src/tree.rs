//! The processes of a workload: everything below the root, without our own evictors. Ids are names which may mean somebody else a moment later:
//! a process belongs here because its parent does, which is checked while its id cannot be given to another.
//!
//! New members are found by the ids that the system has given since the last look: what that takes is in proportion to the births on the machine,
//! not to the processes and threads of the workload. Where ids do not tell (they have begun anew, or very many were given) all lists of children
//! are read, and every [`WALK_EVERY`] in any case.

mod record;

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Resource, getrlimit};

pub(crate) use self::record::TreeRecord;
use crate::kernel::pidfd::{has_ended, kill, pidfd_open};
use crate::kernel::proc;
use crate::target::Target;

/// Where the tree begins.
#[derive(Debug)]
pub enum Root {
    /// A command and all else that is below its parent: a subreaper, so that none gets lost, which has no other children.
    Command {
        /// The command's process id.
        pid: i32,
        /// Its parent's.
        reaper: i32,
    },
    /// A process that was running before; descendants whose parent ends stay known, but not *their* later children.
    Process(Target),
}

impl Root {
    /// Its process id.
    pub fn pid(&self) -> i32 {
        match self {
            Root::Command { pid, .. } => *pid,
            Root::Process(target) => target.pid(),
        }
    }
}

/// Processes known to be alive, or not yet seen to have ended.
pub(crate) struct Tree {
    root: Root,
    /// The first process, to be told of to another pager; and the command's parent, if there is one and it lived.
    first: Option<OwnedFd>,
    reaper: Option<OwnedFd>,
    members: BTreeMap<i32, Member>,
    seen: u64,
    /// How often in a row nobody was found.
    empty: u32,
    births: proc::Births,
    /// The id given last when members were looked for, and how often it has been that.
    last_pid: (Option<i32>, u32),
    /// Ids up to this one have been looked at.
    known_pid: Option<i32>,
    /// Ids that had been given and were nobody's yet, and how often they have been looked at.
    unborn: Vec<(i32, u32)>,
    next_walk: Instant,
    /// Somebody was born since all lists of children were read.
    walk_owed: bool,
}

struct Member {
    process: OwnedFd,
    /// Who it was a child of when it was met.
    parent: i32,
    /// Kept open, as it is read at every look.
    size: Option<proc::Measure>,
    /// What it said last.
    resident: Cell<u64>,
}

/// More ids given since the last look are not looked at one by one.
const IDS_MAX: i32 = 512;
/// Most members that are added at a time: those who are known must be looked at meanwhile.
const BORN_MAX: u64 = 32;
/// Ids which may have been given just before all lists of children were read, to somebody who was not in them yet.
const IDS_BEFORE_WALK: i32 = 32;
/// All lists of children are read this often if anybody was born: an id may have been chosen (clone3's set_tid), or have been looked for too early.
const WALK_EVERY: Duration = Duration::from_secs(5);

/// Looks after the last birth in the system: a process has its id some moments before it is among its parent's children.
const LOOKS_AFTER_BIRTH: u32 = 3;

/// Whether the newest descriptor, and all that are in use, are among the first `share` quarters of those that this process may have. The lowest that is
/// free is given, so that the newest alone tells little when some have been closed.
pub(crate) fn are_in_quarters(newest: &OwnedFd, share: u64) -> bool {
    let most = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(most, _)| most);
    let edge = (most / 4 * share) as RawFd;
    let next = fcntl(newest, FcntlArg::F_DUPFD_CLOEXEC(edge));
    // SAFETY: a new descriptor, which nobody else knows of.
    let next = next.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    newest.as_raw_fd() < edge && next.is_ok_and(|next| next.as_raw_fd() == edge)
}

impl Tree {
    /// A tree of which only the first process is known yet.
    pub(crate) fn new(root: Root) -> Tree {
        let mut tree = Tree::of_nobody(root);
        match &tree.root {
            // It may have ended, and its id be another's by now.
            &Root::Command { pid, .. } => {
                tree.add(pid, |tree| tree.parent_of(pid));
                tree.first =
                    tree.process(pid).and_then(|process| process.try_clone_to_owned().ok());
            }
            Root::Process(target) => {
                let (pid, process) = (target.pid(), target.process().try_clone_to_owned());
                if let Some(process) = process.ok().filter(|process| !has_ended(process.as_fd())) {
                    tree.insert(pid, process, 0);
                }
            }
        }
        tree
    }

    fn of_nobody(root: Root) -> Tree {
        let reaper = match root {
            Root::Command { reaper, .. } => pidfd_open(reaper).ok(),
            Root::Process(_) => None,
        };
        Tree {
            root,
            first: None,
            reaper,
            members: BTreeMap::new(),
            seen: 0,
            empty: 0,
            births: proc::Births::watch(),
            last_pid: (None, 0),
            known_pid: None,
            unborn: Vec::new(),
            next_walk: Instant::now(),
            walk_owed: true,
        }
    }

    /// The process that gms was told to attach to, if this is it.
    pub(crate) fn target(&self, pid: i32) -> Option<&Target> {
        match &self.root {
            Root::Process(target) if target.pid() == pid => Some(target),
            _ => None,
        }
    }

    /// Adds a process, if what was opened under its id has a parent by which it belongs here.
    fn add(&mut self, pid: i32, parent: impl FnOnce(&Tree) -> Option<i32>) -> bool {
        let Ok(process) = pidfd_open(pid) else { return false };
        // While it has not ended its id is no other process's: what was looked up by that is true of this one.
        let parent = parent(self).filter(|_| !has_ended(process.as_fd()));
        if let Some(parent) = parent {
            self.insert(pid, process, parent);
        }
        parent.is_some()
    }

    fn insert(&mut self, pid: i32, process: OwnedFd, parent: i32) {
        self.seen += 1;
        // Half of the descriptors are left to what cannot do without.
        let spare = are_in_quarters(&process, 2);
        let size = spare.then(|| proc::Measure::open(pid).ok()).flatten();
        self.members.insert(pid, Member { process, parent, size, resident: Cell::new(0) });
    }

    /// The parent of a process, if that is a member that has not ended, or the subreaper of the members' children.
    fn parent_of(&self, pid: i32) -> Option<i32> {
        let parent_now = || proc::status_field(pid, "PPid:").map(|parent| parent as i32);
        let has_ended = |parent: i32| match self.members.get(&parent) {
            _ if self.reaper() == Some(parent) => Some(false),
            member => member.map(|member| has_ended(member.process.as_fd())),
        };
        living_parent(parent_now, has_ended)
    }

    /// Who adopts the members' children, as long as that lives: after that its id may be another's.
    fn reaper(&self) -> Option<i32> {
        let lives = || self.reaper.as_ref().is_some_and(|process| !has_ended(process.as_fd()));
        match self.root {
            Root::Command { reaper, .. } => Some(reaper).filter(|_| lives()),
            Root::Process(_) => None,
        }
    }

    /// Adds a process that is known to belong here, and looks for its children.
    pub(crate) fn add_known(&mut self, pid: i32, process: BorrowedFd<'_>, parent: i32) {
        if self.contains(pid) || has_ended(process) {
            return;
        }
        if let Ok(process) = process.try_clone_to_owned() {
            self.insert(pid, process, parent);
            (self.next_walk, self.walk_owed) = (Instant::now(), true);
        }
    }

    /// Finds new members and drops those that have ended, unless nobody was born and not `all` is asked for: then it returns false.
    pub(crate) fn refresh(&mut self, evictors: &[i32], all: bool) -> bool {
        let grown = self.may_have_grown();
        if !grown && !all {
            return false;
        }
        self.drop_ended();
        if !self.members.is_empty() && !grown {
            return true;
        }
        match self.new_ids().filter(|_| !self.members.is_empty()) {
            Some(ids) => self.add_born(ids, evictors),
            None => self.walk(evictors),
        }
        self.empty = if self.members.is_empty() { self.empty + 1 } else { 0 };
        true
    }

    /// Whether more were born than have been looked at: to be refreshed again at once.
    pub(crate) fn is_behind(&self) -> bool {
        self.unborn.len() > BORN_MAX as usize
    }

    /// All are asked in one call.
    fn drop_ended(&mut self) {
        let mut fds: Vec<PollFd<'_>> = self
            .members
            .values()
            .map(|member| PollFd::new(member.process.as_fd(), PollFlags::POLLIN))
            .collect();
        // Fails only for want of memory: then all count as alive until the next look.
        let ended = poll(&mut fds, PollTimeout::ZERO).unwrap_or(0);
        if ended > 0 {
            let ended: HashSet<i32> = self
                .members
                .keys()
                .zip(&fds)
                .filter(|(_, fd)| fd.any().unwrap_or(false))
                .map(|(&pid, _)| pid)
                .collect();
            self.members.retain(|pid, _| !ended.contains(pid));
        }
    }

    /// Ids given since the last look, the lowest first; `None` if they do not tell who was born.
    fn new_ids(&mut self) -> Option<Vec<i32>> {
        let last = self.last_pid.0?;
        let known = self.known_pid.replace(last)?;
        if !(0..=IDS_MAX).contains(&(last - known)) || Instant::now() >= self.next_walk {
            return None;
        }
        let unborn = self.unborn.iter().map(|&(pid, _)| pid);
        Some(unborn.chain(known + 1..=last).collect())
    }

    /// Adds those who have one of these ids and belong here.
    fn add_born(&mut self, ids: Vec<i32>, evictors: &[i32]) {
        let before: HashMap<i32, u32> = std::mem::take(&mut self.unborn).into_iter().collect();
        // Who must wait is known by its parent, which may end meanwhile: only its adoption by the reaper tells then.
        let most = match self.root {
            Root::Command { .. } => self.seen + BORN_MAX,
            Root::Process(_) => u64::MAX,
        };
        for pid in ids {
            if self.members.contains_key(&pid) || evictors.contains(&pid) {
                continue;
            }
            if self.seen >= most {
                self.unborn.push((pid, 0));
                self.last_pid.1 = 0;
                continue;
            }
            match proc::status_field(pid, "Tgid:") {
                Some(leader) if leader != i64::from(pid) => {}
                Some(_) => drop(self.add(pid, |tree| tree.parent_of(pid))),
                // It has its id before it can be found by it. Most have ended already.
                None => {
                    let looks = before.get(&pid).copied().unwrap_or(0);
                    if looks < LOOKS_AFTER_BIRTH {
                        self.unborn.push((pid, looks + 1));
                    }
                }
            }
        }
    }

    /// Reads the lists of children of all members.
    fn walk(&mut self, evictors: &[i32]) {
        self.next_walk = Instant::now() + WALK_EVERY;
        // Who is born from now on has a new id.
        self.walk_owed = false;
        self.known_pid = self.last_pid.0;
        let recent = self.last_pid.0.map(|last| last - IDS_BEFORE_WALK + 1..=last);
        self.unborn = recent.into_iter().flatten().map(|pid| (pid, 0)).collect();
        let start = match self.root {
            Root::Command { .. } => self.reaper().map(proc::children).unwrap_or_default(),
            Root::Process(_) => vec![self.root.pid()],
        };
        let mut queue: Vec<i32> = start.into_iter().chain(self.members.keys().copied()).collect();
        let mut visited: HashSet<i32> = evictors.iter().copied().collect();
        while let Some(pid) = queue.pop() {
            if !visited.insert(pid) {
                continue;
            }
            if !self.members.contains_key(&pid) && !self.add(pid, |tree| tree.parent_of(pid)) {
                continue;
            }
            queue.extend(proc::children(pid));
        }
    }

    fn may_have_grown(&mut self) -> bool {
        let last = self.births.last_pid();
        let looks = if last.is_some() && last == self.last_pid.0 { self.last_pid.1 + 1 } else { 0 };
        self.last_pid = (last, looks);
        self.walk_owed |= looks == 0;
        looks < LOOKS_AFTER_BIRTH || self.walk_owed && Instant::now() >= self.next_walk
    }

    /// Process ids of the members.
    pub(crate) fn pids(&self) -> impl Iterator<Item = i32> + '_ {
        self.members.keys().copied()
    }

    /// A descriptor of a member that has not ended when last looked at: its id may be another's now.
    pub(crate) fn process(&self, pid: i32) -> Option<BorrowedFd<'_>> {
        self.members.get(&pid).map(|member| member.process.as_fd())
    }

    /// Whose child a member was when it was met.
    pub(crate) fn parent(&self, pid: i32) -> Option<i32> {
        self.members.get(&pid).map(|member| member.parent)
    }

    /// Measures the resident anonymous memory of a member, in bytes.
    pub(crate) fn measure(&self, pid: i32) -> u64 {
        let Some(member) = self.members.get(&pid) else { return 0 };
        let taken = match &member.size {
            Some(size) => size.take().map(|size| size.resident),
            None => proc::resident_anonymous(pid),
        };
        member.resident.set(taken.unwrap_or(0));
        member.resident.get()
    }

    /// What [`Tree::measure`] found last.
    pub(crate) fn resident(&self, pid: i32) -> u64 {
        self.members.get(&pid).map_or(0, |member| member.resident.get())
    }

    /// Whether the process is a member.
    pub(crate) fn contains(&self, pid: i32) -> bool {
        self.members.contains_key(&pid)
    }

    /// Whether nobody is left. A list of children can miss some while others end, so that one look is not enough.
    pub(crate) fn is_gone(&self) -> bool {
        self.empty > 1
    }

    /// Members ever seen.
    pub(crate) fn seen(&self) -> u64 {
        self.seen
    }

    /// Kills every member that is known now.
    pub(crate) fn kill(&self) {
        self.members.values().for_each(|member| kill(&member.process));
    }
}

/// The parent of a process, as `parent_now` tells it, if that is one of those of whom `has_ended` knows, and lives.
fn living_parent(
    parent_now: impl Fn() -> Option<i32>,
    has_ended: impl Fn(i32) -> Option<bool>,
) -> Option<i32> {
    let mut parent = parent_now()?;
    // It may have ended since its id was read. Before anybody can know, its children are somebody else's.
    while has_ended(parent)? {
        let before = parent;
        parent = parent_now().filter(|&now| now != before)?;
    }
    Some(parent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_child_of_one_that_ends_while_it_is_looked_at_belongs_to_whom_it_is_given() {
        let parents = |told: &[i32]| {
            let told = told.iter().copied().map(Some).collect::<Vec<_>>();
            let next = Cell::new(0);
            let parent_now = || told.get(next.replace(next.get() + 1)).copied().flatten();
            // 1 has adopted, 2 and 3 have ended, 4 lives; 5 is a stranger.
            let has_ended = |pid| {
                [(1, false), (2, true), (3, true), (4, false)]
                    .into_iter()
                    .find(|one| one.0 == pid)
                    .map(|one| one.1)
            };
            living_parent(parent_now, has_ended)
        };
        assert_eq!(parents(&[4]), Some(4));
        assert_eq!(parents(&[2, 1]), Some(1), "its parent has ended, and we have adopted it");
        assert_eq!(parents(&[2, 3, 1]), Some(1));
        assert_eq!(parents(&[5]), None);
        assert_eq!(parents(&[2, 5]), None);
        assert_eq!(parents(&[2, 2]), None, "the id is another's by now");
        assert_eq!(parents(&[2]), None, "it has ended");
    }

    /// Whoever was missed is found although nobody is born any more.
    #[test]
    fn all_lists_of_children_are_read_once_more_after_the_last_birth() {
        let sleep = || Command::new("sleep").arg("100").spawn().unwrap();
        let mut members = [sleep(), sleep()];
        let [first, missed] = [0, 1].map(|one| members[one].id() as i32);
        let reaper = std::process::id() as i32;
        let mut tree = Tree::new(Root::Command { pid: first, reaper });
        let last = tree.births.last_pid();
        (tree.last_pid, tree.known_pid) = ((last, LOOKS_AFTER_BIRTH), last);
        assert!(tree.refresh(&[], false) && tree.contains(missed));
        for member in &mut members {
            member.kill().unwrap();
            member.wait().unwrap();
        }
    }
}
