//! Which fault thread serves which address space. One does: it alone reads the space's userfaultfd and applies what that tells.
//!
//! Where more faults wait than its home can serve, others fetch pages for it: its workers (`loans.rs`).
//!
//! A new space goes to the thread with the fewest. A child is born on its parent's thread, and moves when nothing of it is under way.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crossbeam_channel::{Receiver, Sender, unbounded};
use gms_policy::ids::{AgentId, SpaceId};
use gms_policy::limits::AGENTS_MAX;
use gms_policy::redundancy::AgentSet;
use nix::sys::eventfd::EventFd;

use crate::kernel::Event;
use crate::loans::{Loan, Loans};
use crate::space::Space;
use crate::sync::{event_fd, lock};

/// For a fault thread.
pub enum FaultCommand {
    /// Serve this space too.
    Add(Arc<Space>),
    /// The same, of which a pager that has died had read this and not applied it.
    Inherit(Arc<Space>, Vec<Event>),
    /// The space has ended.
    Drop(SpaceId),
}

/// A fault thread's index, from 0.
pub(crate) type ThreadIndex = usize;

/// See the module's documentation.
pub struct Homes {
    inboxes: Vec<Inbox>,
    table: Mutex<Table>,
}

struct Inbox {
    commands: Sender<FaultCommand>,
    kick: EventFd,
    /// The agents that the thread has a link to, a bit each.
    links: AtomicU64,
    loans: Loans,
}

const _: () = assert!(AGENTS_MAX <= u64::BITS as usize);

#[derive(Default)]
struct Table {
    homes: BTreeMap<SpaceId, ThreadIndex>,
    /// Spaces of each thread.
    counts: Vec<u64>,
}

impl Table {
    fn fewest(&self) -> ThreadIndex {
        (0..self.counts.len()).min_by_key(|&thread| self.counts[thread]).unwrap_or(0)
    }

    fn settle(&mut self, id: SpaceId, thread: ThreadIndex) {
        self.counts[thread] += 1;
        if let Some(before) = self.homes.insert(id, thread) {
            self.counts[before] -= 1;
        }
    }
}

impl Homes {
    /// Of so many threads, and what each of them receives.
    ///
    /// # Errors
    /// If no descriptor is left.
    pub fn new(threads: usize) -> io::Result<(Homes, Vec<Receiver<FaultCommand>>)> {
        let (mut inboxes, mut receivers) = (Vec::new(), Vec::new());
        for _ in 0..threads {
            // Commands concern address spaces, each of which needs a descriptor: that is their bound.
            let (commands, receiver) = unbounded();
            let (kick, links) = (event_fd()?, AtomicU64::new(u64::MAX));
            inboxes.push(Inbox { commands, kick, links, loans: Loans::new() });
            receivers.push(receiver);
        }
        let table = Table { homes: BTreeMap::new(), counts: vec![0; threads] };
        Ok((Homes { inboxes, table: Mutex::new(table) }, receivers))
    }

    /// A thread has a link to an agent, or none.
    pub fn tell_link(&self, thread: ThreadIndex, agent: AgentId, up: bool) {
        let (links, bit) = (&self.inboxes[thread].links, 1 << agent.0);
        match up {
            true => links.fetch_or(bit, Ordering::Relaxed),
            false => links.fetch_and(!bit, Ordering::Relaxed),
        };
    }

    /// Whether every thread has a link to the agent: what is put there can be fetched by each.
    pub fn all_reach(&self, agent: AgentId) -> bool {
        self.inboxes.iter().all(|inbox| inbox.reaches(agent))
    }

    /// Whether any thread has one.
    pub fn any_reaches(&self, agent: AgentId) -> bool {
        self.inboxes.iter().any(|inbox| inbox.reaches(agent))
    }

    /// The thread that a page may be lent to which one of `holders` has: the one that fetches the fewest, if those are fewer than `fetched`.
    pub fn worker(
        &self,
        home: ThreadIndex,
        holders: AgentSet,
        fetched: usize,
    ) -> Option<ThreadIndex> {
        let others = self.inboxes.iter().enumerate().filter(|&(thread, _)| thread != home);
        let loads = others.map(|(thread, inbox)| (inbox.loans.load(), thread));
        let reaches =
            |thread: ThreadIndex| holders.agents().any(|agent| self.inboxes[thread].reaches(agent));
        let free = loads.filter(|&(load, thread)| load < fetched && reaches(thread));
        free.min().map(|(_, thread)| thread)
    }

    /// What the thread may be lent.
    pub fn loans(&self, thread: ThreadIndex) -> &Loans {
        &self.inboxes[thread].loans
    }

    /// Takes what the thread was lent next.
    pub fn take_loan(&self, thread: ThreadIndex) -> Option<Loan> {
        self.inboxes[thread].loans.take()
    }

    /// Wakes a thread.
    pub fn kick(&self, thread: ThreadIndex) {
        self.inboxes[thread].kick();
    }

    /// Whether no other thread than this one has a space.
    pub fn serves_alone(&self, thread: ThreadIndex) -> bool {
        let others = |(other, &count): (usize, &u64)| other == thread || count == 0;
        self.inboxes.len() == 1 || self.table().counts.iter().enumerate().all(others)
    }

    /// A space begins: the thread with the fewest is told.
    pub fn add(&self, space: Arc<Space>) {
        self.inherit(space, Vec::new());
    }

    /// A space is that of a pager that has died: the thread with the fewest is told, also what is to be applied.
    pub(crate) fn inherit(&self, space: Arc<Space>, events: Vec<Event>) {
        let mut table = self.table();
        let thread = table.fewest();
        table.settle(space.id, thread);
        self.send(
            thread,
            match events.is_empty() {
                true => FaultCommand::Add(space),
                false => FaultCommand::Inherit(space, events),
            },
        );
    }

    /// A child was born on this thread.
    pub fn bear(&self, child: SpaceId, thread: ThreadIndex) {
        self.table().settle(child, thread);
    }

    /// Whether another thread than `from`, which serves the space, is to; it is told, and `from` must serve it no more.
    pub fn leaves(&self, space: &Arc<Space>, from: ThreadIndex) -> bool {
        let mut table = self.table();
        let to = table.fewest();
        if table.counts[to] + 1 >= table.counts[from] {
            return false;
        }
        table.settle(space.id, to);
        self.send(to, FaultCommand::Add(space.clone()));
        true
    }

    /// A space has ended: its thread is told.
    pub fn end(&self, id: SpaceId) {
        let table = self.table();
        if let Some(&thread) = table.homes.get(&id) {
            self.send(thread, FaultCommand::Drop(id));
        }
    }

    /// Whether a space of whose end `thread` was told lives with another by now, which is told instead. Else its home is forgotten.
    pub fn has_left(&self, id: SpaceId, thread: ThreadIndex) -> bool {
        let mut table = self.table();
        match table.homes.get(&id) {
            Some(&home) if home != thread => {
                self.send(home, FaultCommand::Drop(id));
                true
            }
            _ => {
                if table.homes.remove(&id).is_some() {
                    table.counts[thread] -= 1;
                }
                false
            }
        }
    }

    /// Whether a thread has been told something that it has not heard yet.
    pub fn has_commands(&self) -> bool {
        self.inboxes.iter().any(|inbox| !inbox.commands.is_empty())
    }

    /// Wakes all threads.
    pub fn kick_all(&self) {
        self.inboxes.iter().for_each(Inbox::kick);
    }

    /// What a thread's kicks arrive on.
    pub fn kicks(&self, thread: ThreadIndex) -> &EventFd {
        &self.inboxes[thread].kick
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }

    /// With the table locked, so that a thread is told in the order in which homes change.
    fn send(&self, thread: ThreadIndex, command: FaultCommand) {
        // The receiver lives as long as the thread: nobody needs to be told any more.
        let _ = self.inboxes[thread].commands.send(command);
        self.inboxes[thread].kick();
    }
}

impl Inbox {
    fn reaches(&self, agent: AgentId) -> bool {
        self.links.load(Ordering::Relaxed) >> agent.0 & 1 == 1
    }

    fn kick(&self) {
        // The counter can only be full if the thread is awake anyway.
        let _ = self.kick.write(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::tests::own_userfaultfd;
    use crate::kernel::uffd::Userfaultfd;

    fn counts(homes: &Homes) -> Vec<u64> {
        homes.table().counts.clone()
    }

    fn space(id: SpaceId) -> Arc<Space> {
        Arc::new(Space::new(id, Box::new(Userfaultfd::of_child(own_userfaultfd()))))
    }

    #[test]
    fn the_thread_with_the_fewest_spaces_gets_the_next() {
        let (homes, told) = Homes::new(3).expect("descriptors");
        (1..=7).for_each(|n| homes.bear(SpaceId(n), 0));
        assert!(homes.serves_alone(0) && !homes.serves_alone(1));
        let spaces: Vec<Arc<Space>> = (1..=7).map(|n| space(SpaceId(n))).collect();
        let left: Vec<bool> = spaces.iter().map(|space| homes.leaves(space, 0)).collect();
        assert_eq!(left, [true, true, true, true, false, false, false]);
        assert_eq!(counts(&homes), [3, 2, 2]);
        assert!(!homes.serves_alone(0));
        assert_eq!(told.iter().map(Receiver::len).collect::<Vec<_>>(), [0, 2, 2]);
        homes.end(SpaceId(7));
        assert!(matches!(told[0].try_recv(), Ok(FaultCommand::Drop(SpaceId(7)))));
        assert!(!homes.has_left(SpaceId(7), 0) && !homes.has_left(SpaceId(7), 0));
        assert!(homes.has_left(SpaceId(1), 0), "it has left");
        assert_eq!(counts(&homes), [2, 2, 2]);
    }
}
