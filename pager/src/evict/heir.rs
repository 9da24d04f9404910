//! An evict thread that goes on for one which has died. What was leaving then is found first, then it is proved that nothing is being removed any more of which
//! the dead one was told. Until then no page is moved out, and none that is away comes back.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use gms_policy::ids::{AgentId, SpaceId};
use gms_transport::Transport;
use gms_transport::client::Client;
use userfaultfd::Uffd;

use super::{EvictRecord, EvictThread, PROOF_EVERY};
use crate::handed::Number;
use crate::inject::Outside;
use crate::kernel::journal::{Caveat, Journal, Left, Line};
use crate::kernel::pidfd::is_same_file;
use crate::kernel::uffd::{Userfaultfd, events_of};
use crate::kernel::{Event, Faults};
use crate::own_agent::OwnAgent;
use crate::page_map::PAGE;
use crate::process::Process;
use crate::shared::{EvictCommand, Shared};
use crate::space::{Space, SpaceRecord};
use crate::sync::lock;
use crate::tables::{EvictOutcome, Tables};
use crate::victims::{Fates, settle_zeros, take_up};

/// For all to be known: for a removal that is under way to end, and for changes without pause to leave a moment.
const PROOF_DEADLINE: Duration = Duration::from_secs(10);

/// A space of a pager that has died.
pub(super) struct Heir {
    /// What was read of it and is to be applied.
    events: Vec<Event>,
    /// Pages that have perhaps left it, and are zeros then.
    zeros: Vec<u32>,
}

impl Heir {
    fn of((space, events): (Space, Vec<Event>)) -> (Arc<Space>, Heir) {
        (Arc::new(space), Heir { events, zeros: Vec::new() })
    }
}

/// Spaces of a pager that has died, of which not all is known yet.
#[derive(Default)]
pub(super) struct Heirs {
    spaces: BTreeMap<SpaceId, Heir>,
    /// When it is to be.
    until: Option<Instant>,
    /// What has become of the pages that were leaving.
    left: Fates,
    /// Threads that were seen outside madvise since the other pager died.
    outside: Outside,
    /// What is kept of userfaultfds that are nobody's any more, until this pager has begun.
    former: Vec<Line>,
}

impl Heirs {
    pub(super) fn is_empty(&self) -> bool {
        self.spaces.is_empty()
    }

    /// This pager begins: nobody else needs what is nobody's.
    pub(super) fn begin(&mut self, journal: &Journal) {
        journal.begin();
        self.former.clear();
    }

    /// What is to be applied to a space, once.
    pub(super) fn take_events(&mut self, id: SpaceId) -> Vec<Event> {
        self.spaces.get_mut(&id).map(|heir| std::mem::take(&mut heir.events)).unwrap_or_default()
    }

    /// This process did not run for so long.
    pub(super) fn excuse(&mut self, missed: Duration) {
        self.until = self.until.map(|until| until + missed);
    }
}

/// Whether the userfaultfd's memory is there. One that cannot be asked counts.
fn is_alive(stray: &OwnedFd) -> bool {
    let uffd = stray.try_clone().map(|fd| {
        // SAFETY: a userfaultfd which we own and give away here.
        Userfaultfd::of_child(unsafe { Uffd::from_raw_fd(fd.into_raw_fd()) })
    });
    uffd.map_or(true, |uffd| uffd.is_alive())
}

/// The ids by which threads have told of faults in those spaces.
fn told_in(faulting: &BTreeSet<(SpaceId, i32)>, is_its: impl Fn(SpaceId) -> bool) -> BTreeSet<i32> {
    faulting.iter().filter(|(space, _)| is_its(*space)).map(|(_, tid)| *tid).collect()
}

/// Why it cannot be gone on.
fn refuse(reason: &str) -> io::Error {
    io::Error::other(reason.to_owned())
}

/// What a pager that has died has left of its userfaultfds, until each is somebody's.
struct Estate {
    /// What is kept of each.
    left: BTreeMap<SpaceId, Left>,
    /// Those of which its record does not tell, by number: of children that were just born, and of processes that were being attached.
    strays: BTreeMap<RawFd, OwnedFd>,
    /// Of which the record tells: there what the journal names may be the number of a duplicate, in the table of who has died before it had begun.
    recorded: BTreeSet<SpaceId>,
    /// Where what is read of a child is kept of which nothing was read yet.
    journal: Arc<Journal>,
}

/// Each with what is to be done.
type Spaces = BTreeMap<SpaceId, (Arc<Space>, Heir)>;

impl Estate {
    /// What is kept, if each is named once.
    fn of(
        all: Vec<Left>,
        strays: BTreeMap<RawFd, OwnedFd>,
        journal: Arc<Journal>,
        record: &EvictRecord,
    ) -> io::Result<Estate> {
        let recorded = record.spaces.iter().map(|space| space.id).chain(record.gone.clone());
        let recorded: BTreeSet<SpaceId> = recorded.map(SpaceId).collect();
        let others = all.iter().filter(|left| !recorded.contains(&left.space));
        let numbers: Vec<RawFd> = others.map(|left| left.descriptor).collect();
        let named: BTreeSet<RawFd> = numbers.iter().copied().collect();
        let count = all.len();
        let left: BTreeMap<SpaceId, Left> =
            all.into_iter().map(|left| (left.space, left)).collect();
        match left.len() == count && named.len() == numbers.len() {
            true => Ok(Estate { left, strays, recorded, journal }),
            false => Err(refuse("what its processes have told is named twice")),
        }
    }

    /// A userfaultfd with what is kept of it, and whether changes were read that the dead one may not have seen in time.
    fn userfaultfd(&mut self, uffd: Uffd, left: Left) -> io::Result<(Userfaultfd, bool)> {
        let Left { line, messages, caveats, .. } = left;
        if caveats.iter().any(|caveat| *caveat != Caveat::Ungated) {
            return Err(refuse("not all is known of what a process of it has told"));
        }
        let events = events_of(&messages, |number| self.child(number));
        let events = events.ok_or_else(|| refuse("a process of it was being born"))?;
        let is_torn = !events.is_empty() && !caveats.is_empty();
        Ok((Userfaultfd::left(uffd, line, events), is_torn))
    }

    /// That of a child, of which its parent has told and which is in no tables yet.
    fn child(&mut self, number: RawFd) -> Option<Userfaultfd> {
        let uffd = self.stray(number)?;
        let is_its = |(id, left): &(&SpaceId, &Left)| {
            left.descriptor == number && !self.recorded.contains(id)
        };
        let id = self.left.iter().find(is_its).map(|(&id, _)| id);
        match id.and_then(|id| self.left.remove(&id)) {
            Some(left) => self.userfaultfd(uffd, left).ok().map(|(faults, _)| faults),
            None => Some(Userfaultfd::of_child(uffd).kept(&self.journal)),
        }
    }

    /// It keeps its number, by which whoever goes on for this pager finds it.
    fn stray(&mut self, number: RawFd) -> Option<Uffd> {
        let fd = self.strays.remove(&number)?;
        // SAFETY: a userfaultfd which we own and give away here.
        Some(unsafe { Uffd::from_raw_fd(fd.into_raw_fd()) })
    }

    /// Whether somebody lives who is none of these.
    fn has_lost(&self, spaces: &Spaces) -> bool {
        let is_known = |stray: &OwnedFd| {
            spaces.values().any(|(space, _)| is_same_file(stray.as_fd(), space.faults.as_fd()))
        };
        self.strays.values().any(|stray| !is_known(stray) && is_alive(stray))
    }

    /// Of somebody of whom neither the record nor the tables tell: nothing of his is away. If he lives, what there is to be done.
    fn untold(
        &mut self,
        id: SpaceId,
        left: Left,
        former: &mut Vec<Left>,
    ) -> io::Result<Option<(Arc<Space>, Heir)>> {
        if !self.strays.get(&left.descriptor).is_some_and(is_alive) {
            former.push(left);
            return Ok(None);
        }
        self.orphan(id, left).map(Some)
    }

    /// A child, or a process that was being attached, of which no process is known: the one of whom it is will be attached.
    fn orphan(&mut self, id: SpaceId, left: Left) -> io::Result<(Arc<Space>, Heir)> {
        let lost = || refuse("a process of it had just been born");
        let uffd = self.stray(left.descriptor).ok_or_else(lost)?;
        let (faults, _) = self.userfaultfd(uffd, left)?;
        let orphan = SpaceRecord::of_orphan(id, Number::of(faults.as_fd()));
        Ok(Heir::of(Space::left(orphan, faults)))
    }

    /// The spaces of which the dead pager has told, and children which it had no time to tell of.
    fn spaces(
        mut self,
        tables: &mut Tables,
        record: &mut EvictRecord,
    ) -> io::Result<(Spaces, Vec<Line>)> {
        let mut spaces = BTreeMap::new();
        for space in record.spaces.drain(..) {
            let id = SpaceId(space.id);
            let unkept = || refuse("what a process of it told was not kept");
            let left = self.left.remove(&id).ok_or_else(unkept)?;
            let (faults, is_torn) = self.userfaultfd(space.userfaultfd()?, left)?;
            if is_torn && !tables.left_leaving(id).is_empty() {
                return Err(refuse("its memory changed under an eviction"));
            }
            spaces.insert(id, Heir::of(Space::left(space, faults)));
        }
        let mut former = Vec::new();
        // Those that have ended may have forked.
        for id in record.gone.drain(..).map(SpaceId) {
            let forks = |left: &Left| {
                left.caveats.contains(&Caveat::Incomplete)
                    || events_of(&left.messages, |_| None).is_none()
            };
            former.extend(self.left.remove(&id));
            if former.last().is_some_and(forks) {
                return Err(refuse("a process of it was being born"));
            }
            tables.drop_space(id);
        }
        let is_known = tables.all_spaces();
        // In the order of their births: who was just born may have children too.
        while let Some((id, left)) = self.left.pop_first() {
            let orphan = match is_known.contains(&id) {
                true => Some(self.orphan(id, left)?),
                false => self.untold(id, left, &mut former)?,
            };
            record.orphans.extend(orphan.is_some().then_some(id.0));
            spaces.extend(orphan.map(|orphan| (id, orphan)));
        }
        spaces.keys().for_each(|&id| tables.adopt_space(id));
        if tables.all_spaces().iter().any(|id| !spaces.contains_key(id)) {
            return Err(refuse("it is not known whose some of its pages are"));
        }
        if self.has_lost(&spaces) {
            return Err(refuse("not all of its processes are known"));
        }
        Ok((spaces, former.into_iter().map(|left| left.line).collect()))
    }
}

impl<T: Transport> EvictThread<T> {
    /// The thread of a pager that has died, as far as it goes on. `left` is what is kept of its userfaultfds, and `strays` those of which it has not told; what
    /// else it had is in `shared`.
    ///
    /// # Errors
    /// Why it cannot be gone on: then the workload ends.
    pub(crate) fn inherited(
        shared: Arc<Shared>,
        commands: Receiver<EvictCommand>,
        agents: Client<T>,
        mut record: EvictRecord,
        own: Option<(AgentId, Arc<OwnAgent>)>,
        (left, strays): (Vec<Left>, BTreeMap<RawFd, OwnedFd>),
    ) -> io::Result<EvictThread<T>> {
        let estate = Estate::of(left, strays, shared.journal.clone(), &record)?;
        let mut tables = lock(&shared.tables);
        let (made, former) = estate.spaces(&mut tables, &mut record)?;
        let (leaving, is_known) = (tables.leaving_spaces(), tables.are_leaving_known());
        let are_known = tables.are_known(agents.lane().agents().count());
        drop(tables);
        let (mut spaces, mut heirs) = (BTreeMap::new(), Heirs::default());
        for (id, (space, heir)) in made {
            spaces.insert(id, space);
            heirs.spaces.insert(id, heir);
        }
        let processes = record.processes.drain(..).map(|process| {
            let process = Process::left(process, &spaces)?;
            Ok((process.pid, process))
        });
        let mut processes: BTreeMap<i32, Process> = processes.collect::<io::Result<_>>()?;
        let paged: BTreeSet<SpaceId> = processes.values().map(|process| process.space.id).collect();
        if !is_known || !leaving.is_subset(&paged) {
            return Err(refuse("pages were leaving a process that was being born, or ended"));
        }
        let unmet = record.orphans.iter().map(|id| SpaceId(*id)).filter(|id| !paged.contains(id));
        if unmet.count() + paged.len() < spaces.len() {
            return Err(refuse("a process of it is not known"));
        }
        if !are_known {
            return Err(refuse("pages are at agents of which it was just told"));
        }
        lock(&shared.tables).end_unowned();
        let zero_hash = shared.checksum(&[0; PAGE as usize]);
        for process in processes.values_mut() {
            let (fates, zeros) = take_up(&shared, process, zero_hash).map_err(refuse)?;
            heirs.left.extend(fates);
            let heir = heirs.spaces.get_mut(&process.space.id);
            heir.into_iter().for_each(|heir| heir.zeros.clone_from(&zeros));
        }
        let made = (spaces, processes);
        let mut thread = EvictThread::restored(shared, commands, agents, record, own, made)?;
        thread.heirs = heirs;
        thread.heirs.former = former;
        thread.heirs.until = Some(Instant::now() + PROOF_DEADLINE);
        thread.orphans.retain(|space| !paged.contains(&space.id));
        thread.outboxes = thread.processes.keys().copied().collect();
        Ok(thread)
    }

    /// A step to where nothing is in doubt. True if anything has come of it.
    pub(super) fn inherit(&mut self, now: Instant) -> bool {
        let mut left = std::mem::take(&mut self.heirs.left);
        let has_ended = |(id, _): &(&SpaceId, &mut Heir)| !self.spaces.contains_key(id);
        let ended = self.heirs.spaces.iter_mut().filter(has_ended);
        for slot in ended.flat_map(|(_, heir)| std::mem::take(&mut heir.zeros)).collect::<Vec<_>>()
        {
            if lock(&self.shared.tables).is_owned(slot) {
                self.shared.fail("only a child has a page of zeros that was perhaps evicted");
            }
            left.push((slot, EvictOutcome::Stayed));
        }
        let spaces = &self.spaces;
        self.heirs.spaces.retain(|id, _| spaces.contains_key(id));
        for process in self.processes.values() {
            let heir = self.heirs.spaces.get_mut(&process.space.id);
            let Some(heir) = heir.filter(|heir| !heir.zeros.is_empty()) else { continue };
            match settle_zeros(&self.shared, process, &heir.zeros) {
                Ok(Some(fates)) => {
                    heir.zeros.clear();
                    left.extend(fates);
                }
                Ok(None) => {}
                Err(reason) => self.shared.fail(reason),
            }
        }
        let is_busy = !left.is_empty();
        if is_busy {
            self.finish(left, now);
        }
        if now >= self.next_proof {
            self.next_proof = now + PROOF_EVERY;
            self.prove();
        }
        if self.heirs.is_empty() {
            self.heirs.outside = Outside::default();
            lock(&self.shared.tables).forget_faulted();
        } else if self.heirs.until.is_some_and(|until| now > until) {
            self.shared.fail("it is not known what was under way when its pager was killed");
        }
        self.next_look = self.next_look.min(self.next_proof);
        is_busy
    }

    /// Whether all who have the memory of a process (a vfork child has it too) have been outside madvise, of those in the tree as it was looked at last.
    pub(super) fn are_outside_madvise(&self, process: &Process, outside: &mut Outside) -> bool {
        // Its first thread may have ended before the others.
        let is_own = |pid: i32| pid == process.pid && !process.has_ended();
        let sharers =
            self.tree.pids().filter(|&pid| is_own(pid) || process.shares_memory_with(pid));
        let mut sharers = sharers.peekable();
        sharers.peek().is_some() && sharers.all(|pid| outside.has(pid))
    }

    /// Removals of which the dead pager was told are over when each thread has been outside madvise since.
    fn prove(&mut self) {
        self.tree.refresh(&self.evictors(), true);
        let mut outside = std::mem::take(&mut self.heirs.outside);
        let faulting = lock(&self.shared.tables).faulting();
        let mut proved = Vec::new();
        for process in self.processes.values() {
            let id = process.space.id;
            let heir = self.heirs.spaces.get(&id);
            if heir.is_none_or(|heir| !heir.zeros.is_empty()) {
                continue;
            }
            outside.faulting = told_in(&faulting, |space| space == id);
            if self.are_outside_madvise(process, &mut outside) {
                proved.push(id);
            }
        }
        // Any of them may have the memory of a child that nobody has met yet.
        let mut all = self.tree.pids().peekable();
        let orphans = self.orphans.iter().map(|space| space.id);
        let orphans = orphans.filter(|id| self.heirs.spaces.contains_key(id)).collect::<Vec<_>>();
        let is_outside = |pid: i32| {
            let own = self.processes.get(&pid).map(|process| process.space.id);
            let is_its = |space| own.map_or(orphans.contains(&space), |own| own == space);
            outside.faulting = told_in(&faulting, is_its);
            outside.has(pid)
        };
        if !orphans.is_empty() && all.peek().is_some() && all.all(is_outside) {
            proved.extend(orphans);
        }
        self.heirs.outside = outside;
        for id in proved {
            let waiting = lock(&self.shared.tables).prove(id);
            self.shared.wake(&self.spaces, &waiting);
            self.heirs.spaces.remove(&id);
        }
    }
}
