//! Looking: how much the tree holds, who belongs to it, what must be paged and how much must go.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use gms_policy::budget::Decision;
use gms_policy::ids::{Bytes, SpaceId};
use gms_transport::Transport;

use super::EvictThread;
use super::presence::UNREACHED;
use crate::board;
use crate::inject::Frozen;
use crate::kernel::pidfd::has_ended;
use crate::kernel::proc;
use crate::process::{Buried, Process};
use crate::shared::Outcome;
use crate::space::Space;
use crate::stats::AgentStats;
use crate::stopped::InjectError;
use crate::sync::lock;
use crate::torture::{self, Point};
use crate::tree::are_in_quarters;
use crate::victims::Evicted;

/// The tree's processes are looked for this often, and more often once some are paged: another may need it soon.
const TREE_EVERY: Duration = Duration::from_millis(20);
const TREE_EVERY_PAGED: Duration = Duration::from_millis(5);
/// While nothing grows and nobody is born, it is seen this often who has ended or executes something else.
const TREE_EVERY_CALM: Duration = Duration::from_millis(50);
/// Between looks while faults wait for room.
pub(super) const LOOK_CROWDED: Duration = Duration::from_millis(1);
/// The time between looks grows step by step while they find nothing new, a step after so many, up to what the budget allows.
const CALM_LOOKS: u32 = 16;
/// What may have grown unseen from one look to the next, the outbox included.
const GROWTH_CALM: i64 = 3 << 19;
/// How often figures are published, and it is measured whether processes share memory.
const MEASURE_EVERY: Duration = Duration::from_millis(50);
/// The same of those that do.
const SHARING_EVERY: Duration = Duration::from_millis(4);
/// Agents are asked for their state this often: one that needs memory back has it within a second though its pagers are idle.
const STATUS_EVERY: Duration = Duration::from_millis(500);
/// So many processes are stopped before it is measured what they share, unless that would take long: 5 ms for so many bytes.
const MANY: u32 = 16;
const QUICK: u64 = 640 << 20;
/// Growth of the sum after which sharing is measured again at once.
const SHARING_GROWTH: u64 = 4 << 20;
/// A process that could not be attached is tried again after this, and after twice the time each time. At first sooner, if the reason may pass.
const ATTACH_RETRY: Duration = Duration::from_millis(100);
const ATTACH_RETRY_SOON: Duration = Duration::from_millis(2);
const ATTACH_RETRY_MAX: Duration = Duration::from_secs(30);
/// Processes smaller than this are not worth an attach.
const ATTACH_MIN: u64 = 256 << 10;

/// A process that could not be attached.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refusal {
    /// The program that it runs: another one may well be attached.
    image: Option<u64>,
    /// Never, if the reason lasts as long as the program.
    try_again: Option<Instant>,
    pause: Duration,
    /// Whether the reason is known.
    told: bool,
    /// The process whose memory it has, because of which it is not attached.
    host: Option<i32>,
}

impl Refusal {
    /// The pause doubles: what lasts costs little, what passes is over soon.
    fn after(before: Option<Refusal>, pid: i32, passing: bool) -> Refusal {
        let least = if passing { ATTACH_RETRY_SOON } else { ATTACH_RETRY };
        let most = if passing { ATTACH_RETRY } else { ATTACH_RETRY_MAX };
        let pause = before.map_or(least, |refusal| (refusal.pause * 2).clamp(least, most));
        let try_again = Some(Instant::now() + pause);
        Refusal { image: proc::image(pid), try_again, pause, told: !passing, host: None }
    }

    fn of_vfork_child(pid: i32, host: i32) -> Refusal {
        let try_again = Some(Instant::now() + ATTACH_RETRY);
        let image = proc::image(pid);
        Refusal { image, try_again, pause: ATTACH_RETRY, told: true, host: Some(host) }
    }

    fn stands(&self, now: Instant, pid: i32) -> bool {
        self.try_again.is_none_or(|at| now < at) && self.image == proc::image(pid)
    }
}

/// What the processes of the tree share after forks.
pub(super) struct Sharing {
    /// Sum of their resident bytes when it was measured.
    pub sum: u64,
    /// How much of that was counted more than once.
    pub shared: u64,
    /// It is not measured again before, however much has grown.
    pub earliest: Instant,
    pub expires: Instant,
}

impl<T: Transport> EvictThread<T> {
    pub(super) fn look(&mut self, now: Instant) {
        if now >= self.next_tree {
            self.refresh_tree(now);
        }
        let measure = now >= self.next_measure;
        let resident = self.measure(now);
        self.granted = 0;
        let counted = self.shared.resident.swap(resident as i64, Ordering::Relaxed);
        // A program attached, or being let go, was or will be resident as a whole.
        self.settled |= resident <= self.budget.bytes().0;
        if !self.is_detaching() {
            let before = if self.settled { self.gauges.resident_peak } else { 0 };
            self.gauges.resident_peak = before.max(resident);
        }
        let took = now.elapsed();
        let decision = self.budget.decide(Bytes(resident));
        // At once: what else a look does takes time in which the tree would grow.
        self.hold_back(now);
        if !self.is_detaching() {
            self.act(now, decision);
        }
        if measure {
            self.next_measure = now + MEASURE_EVERY;
            self.publish();
            self.tell_presence(now);
            self.reconcile();
        }
        let agents = self.write_back.agents.lane().agents().count();
        if std::mem::replace(&mut self.agents_told, agents) != agents {
            self.shared.estate.extend();
        }
        if now >= self.next_status {
            self.next_status = now + STATUS_EVERY;
            self.write_back.agents.ask_status(now);
            // The embedded agent knows no other.
            if !self.shared.config.is_embedded() {
                self.write_back.agents.ask_members(now);
            }
            let reminder = self.reminder.as_mut();
            let told = reminder.map(|reminder| reminder.poll(now, SystemTime::now()));
            told.iter().flatten().for_each(|text| self.notice(format_args!("{text}")));
        }
        let crowded = lock(&self.shared.tables).roomless() > 0;
        let calm = resident as i64 - counted < GROWTH_CALM && !self.halt.is_wary(now);
        self.calm = if calm { self.calm + 1 } else { 0 };
        let calm = self.budget.calm().min(decision.look_again * (1 + self.calm / CALM_LOOKS));
        let pause = match (self.is_detaching(), crowded) {
            // It only shows how far that is.
            (true, _) => MEASURE_EVERY,
            (false, true) => LOOK_CROWDED,
            (false, false) => decision.look_again.max(calm),
        };
        // A look at many processes takes long: as much time again is for making room.
        self.next_look = match took < pause {
            true => now + torture::shorten(pause),
            false => now + took * 2,
        };
    }

    fn act(&mut self, now: Instant, decision: Decision) {
        if self.halt.is_on() {
            // One step after the other: see `hold_back`.
        } else if decision.page || torture::is_on() {
            self.attach_candidates(now);
            for process in self.processes.values_mut() {
                if let Some(unpageable) = process.register_new(&self.shared, now) {
                    self.unpageable.insert(process.pid, unpageable);
                }
            }
        }
        self.goal = decision.evict.0;
    }

    pub(crate) fn refresh_tree(&mut self, now: Instant) {
        let pause = if self.processes.is_empty() { TREE_EVERY } else { TREE_EVERY_PAGED };
        self.next_tree = now + torture::shorten(pause);
        let all = self.calm < CALM_LOOKS || now >= self.next_all;
        self.see_off(now);
        if !self.tree.refresh(&self.evictors(), all) {
            return;
        }
        if self.tree.is_behind() {
            self.next_tree = now;
        }
        self.next_all = now + TREE_EVERY_CALM;
        let gone: Vec<i32> =
            self.processes.iter_mut().filter_map(|(&pid, p)| p.is_gone().then_some(pid)).collect();
        for pid in gone {
            if let Some(process) = self.processes.remove(&pid) {
                self.drop_space(process.space.id);
                self.ending.push(process.bury());
            }
            self.unpageable.remove(&pid);
        }
        self.find_heirs();
        if let Some(process) = self.processes.values().find(|p| p.evictor_died() && !p.ends()) {
            self.shared.fail(format!(
                "the evictor of process {} was killed: leave processes named far-evictor alone",
                process.pid
            ));
        }
        let dead = |space: &Arc<Space>| !space.faults.is_alive();
        let (gone, orphans) = std::mem::take(&mut self.orphans).into_iter().partition(dead);
        self.orphans = orphans;
        gone.into_iter().for_each(|space: Arc<Space>| self.drop_space(space.id));
        self.refused.retain(|&pid, _| self.tree.contains(pid));
        // While one is leaving, a child of it may still be told of.
        if self.tree.is_gone() && self.spaces.is_empty() && self.leaving.is_empty() {
            self.shared.finish(Outcome::TreeGone);
        }
    }

    /// Takes note of dismissed evictors that have ended. Until then they count as ours: as orphans they may be children of this process, like members.
    pub(super) fn see_off(&mut self, now: Instant) {
        let shared = &self.shared;
        // What was left before its end names its descriptors.
        let is_named = shared.estate.is_due() && !shared.stop.load(Ordering::Relaxed);
        self.ending.retain_mut(|Buried { ending, .. }| {
            let over = ending.is_over(now);
            if over {
                lock(&shared.evictors).retain(|&pid| pid != ending.pid());
            }
            !over || is_named
        });
    }

    /// Memory that was met first as that of a vfork child is its parent's once the child has executed another program, which is to be paged too.
    fn find_heirs(&mut self) {
        let left: Vec<i32> =
            self.processes.iter().filter(|(_, p)| p.has_left()).map(|(&pid, _)| pid).collect();
        for pid in left {
            let Some(process) = self.processes.get(&pid) else { continue };
            let shares = |other: &i32| {
                !self.processes.contains_key(other) && process.shares_memory_with(*other)
            };
            let Some(heir) = self.tree.pids().find(shares) else { continue };
            let pidfd = self.tree.process(heir).and_then(|fd| fd.try_clone_to_owned().ok());
            if let (Some(pidfd), Some(mut process)) = (pidfd, self.processes.remove(&pid)) {
                self.shared.estate.withdraw();
                process.give_to(heir, pidfd);
                self.processes.insert(heir, process);
                self.refused.remove(&heir);
            }
        }
    }

    /// The fault thread lets the tables forget it, after all that it has read.
    pub(crate) fn drop_space(&mut self, id: SpaceId) {
        self.shared.estate.extend();
        self.leaving.extend(self.spaces.remove_entry(&id));
        self.shared.homes.end(id);
    }

    pub(super) fn evictors(&self) -> Vec<i32> {
        lock(&self.shared.evictors).clone()
    }

    /// Resident anonymous bytes of the tree. Memory which processes share after a fork must be counted once: how much that is
    /// takes a walk over the page tables, so that it is measured anew only when it may have changed much.
    fn measure(&mut self, now: Instant) -> u64 {
        let mut sum = 0;
        let mut largest = 0;
        let mut count = 0;
        let mut guests = Vec::new();
        for pid in self.tree.pids() {
            let resident = if let Some(process) = self.processes.get_mut(&pid) {
                process.measure().resident
            } else if self.is_guest(pid) {
                guests.push(pid);
                continue;
            } else {
                self.tree.measure(pid)
            };
            sum += resident;
            largest = largest.max(resident);
            count += u32::from(resident >= ATTACH_MIN);
        }
        let matters = count > 1 && sum > self.budget.low().0 && !self.is_detaching();
        let grown = sum > self.sharing.sum + SHARING_GROWTH;
        if !matters {
            self.sharing = Sharing { sum, shared: 0, earliest: now, expires: now };
        } else if now >= self.sharing.expires || (grown && now >= self.sharing.earliest) {
            if grown && count > MANY && sum < QUICK && self.may_halt(now) {
                // To ask so many what they share takes longer than they need to outgrow the budget.
                let all = self.tree.pids().collect();
                self.halt(now, all);
            }
            let hosts = self.tree.pids().filter(|pid| !guests.contains(pid));
            let proportional: u64 = hosts.filter_map(proc::proportional_anonymous).sum();
            // Sharing that is there can end quickly: look again soon, but do not spend most of the time on it. Where there is none, forks are seen as growth.
            let (took, shared) = (now.elapsed(), sum.saturating_sub(proportional));
            let least = if shared < SHARING_GROWTH { MEASURE_EVERY } else { SHARING_EVERY };
            let pause = least.max(took * 4);
            let (earliest, expires) = (now + took * 3, now + took + pause);
            self.sharing = Sharing { sum, shared, earliest, expires };
        }
        sum.saturating_sub(self.sharing.shared).max(largest)
    }

    /// Attaches those who are to be, or the largest of them.
    fn attach_candidates(&mut self, now: Instant) {
        if self.shared.handover.is_asked() || !self.heirs.is_empty() {
            return;
        }
        let candidates = self.tree.pids().filter(|&pid| self.is_candidate(now, pid));
        let mut candidates: Vec<i32> = candidates.collect();
        let largest = candidates.iter().copied().max_by_key(|&pid| self.tree.resident(pid));
        // While one is attached, which may take long, the others must not outgrow the budget. For those with whom that failed, not again.
        candidates.retain(|pid| !self.refused.contains_key(pid));
        let Some(largest) = largest else { return };
        let alone = candidates.is_empty() || self.tree.pids().nth(1).is_none();
        if !alone && self.may_halt(now) {
            self.halt(now, candidates);
        } else if !self.is_vfork_child(now, largest)
            && let Err(error) = self.attach(largest)
        {
            self.not_attached(largest, error);
        }
    }

    /// Whether the process is to be attached.
    pub(super) fn is_candidate(&self, now: Instant, pid: i32) -> bool {
        !self.processes.contains_key(&pid)
            && (self.tree.resident(pid) >= ATTACH_MIN || self.halt.holds(pid) || torture::is_on())
            && !self.refused.get(&pid).is_some_and(|refusal| refusal.stands(now, pid))
    }

    /// A vfork child is not attached until it executes something else.
    pub(super) fn refuse_vfork_child(&mut self, pid: i32, host: i32) {
        self.refused.insert(pid, Refusal::of_vfork_child(pid, host));
    }

    /// Whether a process that is not paged has the memory of one that is: a vfork child, before it executes something else. As far as is seen
    /// at once: without waiting for what has not been told yet.
    pub(super) fn is_guest(&self, pid: i32) -> bool {
        let refused = self.refused.get(&pid).and_then(|refusal| refusal.host);
        let host = refused.or_else(|| self.tree.parent(pid));
        let host = host.and_then(|host| self.processes.get(&host));
        host.is_some_and(|host| host.shares_memory_with(pid))
    }

    /// Starts to page a process. It does not run until all of its memory is registered: from then on its faults wait for room.
    pub(super) fn attach(&mut self, pid: i32) -> Result<(), InjectError> {
        torture::at(Point::BeforeAttach);
        self.attach_frozen(pid, &mut Frozen::new(pid)?)
    }

    /// The same, with the threads that ran stopped already.
    pub(super) fn attach_frozen(
        &mut self,
        pid: i32,
        frozen: &mut Frozen,
    ) -> Result<(), InjectError> {
        let member = self.tree.process(pid).ok_or(InjectError::Gone)?;
        let member = member.try_clone_to_owned().map_err(|_| InjectError::Descriptors)?;
        if !are_in_quarters(&member, 3) {
            return Err(InjectError::Descriptors);
        }
        if !self.await_forks(Instant::now()) {
            return Err(InjectError::Forking);
        }
        if has_ended(member.as_fd()) {
            // Whoever has been stopped has got its id since.
            return Err(InjectError::Gone);
        }
        let member = (pid, member, self.tree.target(pid));
        let process = Process::attach(&self.shared, member, frozen, &mut self.orphans)?;
        let space = process.space.clone();
        self.processes.insert(pid, process);
        let is_new = self.spaces.insert(space.id, space.clone()).is_none();
        // Whoever goes on for this pager knows of it before anything is registered.
        self.shared.estate.extend();
        self.next_estate = Instant::now();
        self.leave(self.next_estate);
        board::set_attaching(None);
        if is_new {
            lock(&self.shared.tables).add_space(space.id);
            self.shared.homes.add(space);
        }
        torture::at(Point::AfterAttach);
        let Some(process) = self.processes.get_mut(&pid) else { return Err(InjectError::Gone) };
        process.measure();
        if let Some(unpageable) = process.register_new(&self.shared, Instant::now()) {
            self.unpageable.insert(pid, unpageable);
        }
        let stopped_for = frozen.elapsed();
        self.gauges.attached += 1;
        self.gauges.attach = self.gauges.attach.max(stopped_for);
        if self.shared.config.verbose {
            self.notice(format_args!("paging process {pid} (stopped for {stopped_for:?})"));
        }
        Ok(())
    }

    pub(super) fn not_attached(&mut self, pid: i32, error: InjectError) {
        let image = proc::image(pid);
        let before = self.refused.get(&pid).copied().filter(|refusal| refusal.image == image);
        let told = before.is_some_and(|refusal| refusal.told);
        let passing =
            matches!(error, InjectError::Gone | InjectError::Unstoppable | InjectError::Forking)
                || !matches!(proc::state(pid), Some('R' | 'S' | 'D' | 'T'));
        let mut refusal = Refusal::after(before, pid, passing && !told);
        if error.lasts() {
            refusal.try_again = None;
        }
        self.refused.insert(pid, refusal);
        let reason = match error {
            // By whom is not told each time.
            InjectError::Traced(_) => String::from("traced"),
            _ => error.to_string(),
        };
        // Of others that were paged some pages may be away.
        let is_first = self.gauges.attached == 0 && self.spaces.is_empty();
        if self.tree.target(pid).is_some() && is_first && !passing {
            self.shared.finish(Outcome::Refused(format!("cannot be paged: {error}")));
        } else if !told && !passing && self.unpaged.insert(reason) {
            self.notice(format_args!(
                "process {pid} cannot be paged and stays resident: {error} (others are not named)"
            ));
        }
    }

    pub(super) fn publish(&mut self) {
        let unpageable = self.unpageable.values().sum();
        let lane = self.write_back.agents.lane();
        let paths = lane.views();
        let reached = |id| self.shared.homes.all_reach(id);
        let why = |id| match lane.is_up(id) {
            false => lane.failure(id),
            true => (!reached(id)).then_some(UNREACHED),
        };
        self.gauges.agents = lane
            .agents()
            .zip(&paths)
            .map(|(id, view)| AgentStats {
                addr: lane.name(id).to_owned(),
                learned_from: lane.learned_from(id),
                zone: lane.zone(id).to_string(),
                pages: self.write_back.given(id),
                pages_held: lock(&self.shared.tables).held_by(id),
                rtt_us: view.rtt.as_secs_f64() * 1e6,
                queue_us: view.queue.as_secs_f64() * 1e6,
                refusals: lane.refusals(id),
                up: lane.is_up(id) && (reached(id) || lane.is_draining(id)),
                draining: lane.is_draining(id),
                reason: why(id).unwrap_or_default().to_owned(),
            })
            .collect();
        let now = Instant::now();
        self.gauges.full = self.full.spell(now).is_some();
        self.gauges.full_time = self.full.total(now);
        self.gauges.short = self.write_back.short(now);
        self.gauges.unpageable = unpageable;
        self.gauges.processes = self.tree.seen();
        *lock(&self.shared.gauges) = self.gauges.clone();
    }
}
