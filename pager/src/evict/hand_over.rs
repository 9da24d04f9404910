//! The evict thread brings everything to rest for another binary of this pager, tells it what there is, and in the other binary takes it up again.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use gms_policy::ids::{AgentId, SpaceId};
use gms_transport::Transport;
use gms_transport::client::Client;
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::EvictThread;
use crate::handed::Descriptors;
use crate::handover::Told;
use crate::keeper::USER_SPACE;
use crate::own_agent::{OwnAgent, OwnAgentRecord};
use crate::process::{Process, ProcessRecord};
use crate::shared::{EvictCommand, Shared};
use crate::space::{Space, SpaceRecord};
use crate::stopped::release_late;
use crate::sync::lock;
use crate::tree::{Tree, TreeRecord};

/// Between two looks whether everything is at rest.
const LOOK: Duration = Duration::from_millis(1);
/// For agents to answer what was put. What they have not answered then is put again by the next binary, under other ids.
const PUTS_PATIENCE: Duration = Duration::from_millis(200);
/// What another pager needs if this one dies is written down again after that, and after so many times the time that it took; and not for more processes.
const ESTATE_PAUSE: Duration = Duration::from_millis(1);
const ESTATE_TIMES: u32 = 10;
const HEIRS_MAX: usize = 64;
/// For the fault threads to rest, before they go on until the next attempt.
const REST_MAX: Duration = Duration::from_millis(100);

/// Everything that the evict thread knows, or looks up for all.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct EvictRecord {
    settled: bool,
    tree: TreeRecord,
    pub(super) spaces: Vec<SpaceRecord>,
    pub(super) processes: Vec<ProcessRecord>,
    /// Spaces of which no process is known.
    pub(super) orphans: Vec<u64>,
    /// Spaces that have ended, and are not forgotten yet.
    pub(super) gone: Vec<u64>,
    /// Processes with pages in their outboxes.
    outboxes: Vec<i32>,
    given: Vec<(u8, u64)>,
    full: Duration,
    own: Option<(u8, OwnAgentRecord)>,
}

impl EvictRecord {
    /// The session's own agent.
    pub(crate) fn own(&self) -> io::Result<Option<(AgentId, Arc<OwnAgent>)>> {
        let own = self.own.as_ref();
        own.map(|(agent, own)| Ok((AgentId(*agent), Arc::new(OwnAgent::again(own)?)))).transpose()
    }
}

impl<T: Transport> EvictThread<T> {
    /// If it is asked for: brings everything to rest, a step each turn, and then tells what there is and rests until it is let go.
    pub(super) fn hand_over(&mut self, now: Instant) {
        let shared = self.shared.clone();
        if !shared.handover.is_asked() {
            self.handing_since = None;
            return;
        }
        let since = *self.handing_since.get_or_insert(now);
        self.next_look = self.next_look.min(now + LOOK);
        if let Some(reason) = self.under_way(now.duration_since(since)) {
            return shared.handover.waits_for(reason);
        }
        let begun = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
        shared.handover.waits_for("it changes its address spaces without pause");
        if !shared.handover.rest(shared.config.fault_threads, REST_MAX, || shared.homes.kick_all())
        {
            return;
        }
        // What they have told until now.
        self.obey(now);
        let reason = self.under_way(PUTS_PATIENCE).or_else(|| {
            shared.homes.has_commands().then_some("a process of it is being born, or ends")
        });
        if let Some(reason) = reason {
            shared.handover.waits_for(reason);
            return shared.handover.go_on();
        }
        self.write_back.give_puts_up();
        let told = self.told(begun);
        shared.handover.tell(told);
        // From here on as if nothing had been.
        self.handing_since = None;
    }

    /// Whether pages may be put to agents.
    pub(super) fn may_put(&self) -> bool {
        !self.is_detaching() && !self.shared.handover.is_asked()
    }

    /// What is not at rest, if anything; it was asked for `patience` ago.
    fn under_way(&self, patience: Duration) -> Option<&'static str> {
        match () {
            () if self.shared.outcome().is_some() || self.is_detaching() => Some("it ends"),
            () if self.halt.is_on() => Some("its processes are stopped for a moment"),
            () if release_late().is_some() => Some("threads of it that were stopped are let go"),
            () if !self.leaving.is_empty() || !self.ending.is_empty() => {
                Some("a process of it ends")
            }
            () if self.write_back.has_puts() && patience < PUTS_PATIENCE => {
                Some("pages of it are on their way to agents")
            }
            () => None,
        }
    }

    fn told(&self, since: Duration) -> Result<Told, String> {
        let mut descriptors = Descriptors::default();
        let to = &mut descriptors;
        let mut words = Vec::new();
        let tables = lock(&self.shared.tables);
        if let Some(reason) = tables.unfit() {
            return Err(reason.into());
        }
        tables.put_words(self.write_back.unheard_discards(), &mut words);
        drop(tables);
        let tree = self.tree.hand_over(to);
        let record = self.record(tree, to)?;
        let record = serde_json::to_value(&record).map_err(|error| error.to_string())?;
        Ok(Told { since, descriptors, record, words })
    }

    fn record(
        &self,
        tree: Option<TreeRecord>,
        to: &mut Descriptors,
    ) -> Result<EvictRecord, &'static str> {
        let processes = self.processes.values().map(|process| process.hand_over(to));
        let processes = processes.collect::<Option<_>>().ok_or("its page tables are not known")?;
        let gone = self.ending.iter().map(|buried| &buried.space).chain(self.leaving.values());
        Ok(EvictRecord {
            gone: gone.map(|space| space.id.0).collect(),
            settled: self.settled,
            tree: tree.ok_or("it was running before gms attached to it")?,
            spaces: self.spaces.values().map(|space| space.hand_over(to)).collect(),
            processes,
            orphans: self.orphans.iter().map(|space| space.id.0).collect(),
            outboxes: self.outboxes.iter().copied().collect(),
            given: self.write_back.all_given().map(|(agent, pages)| (agent.0, pages)).collect(),
            full: self.full.total(Instant::now()),
            own: self.own.as_ref().map(|(agent, own)| (agent.0, own.hand_over(to))),
        })
    }

    /// Writes down what another pager needs if this one dies, if that has changed.
    pub(super) fn leave(&mut self, now: Instant) {
        let estate = &self.shared.estate;
        if !estate.is_due() {
            return;
        }
        if now < self.next_estate && !self.is_detaching() {
            self.next_look = self.next_look.min(self.next_estate);
            return;
        }
        estate.begin_writing();
        let began = Instant::now();
        let mut descriptors = Descriptors::default();
        let is_fit = !self.is_detaching()
            && self.processes.len() <= HEIRS_MAX
            && self.spaces.values().all(|space| space.faults.next_generation().is_some());
        let made = |to: &mut Descriptors| {
            let tree = self.tree.leave(to);
            self.record(tree, to).ok()
        };
        let record = is_fit.then(|| made(&mut descriptors)).flatten();
        let record = record.and_then(|record| serde_json::to_value(record).ok());
        self.shared.estate.write(record.map(|record| (record, descriptors)));
        self.former.clear();
        self.next_estate = now + ESTATE_PAUSE.max(began.elapsed() * ESTATE_TIMES);
    }

    /// The thread again, in another binary. `own` is the session's own agent. Whoever waits for a page is to fault again: see [`EvictThread::wake_all`].
    pub(crate) fn again(
        shared: Arc<Shared>,
        commands: Receiver<EvictCommand>,
        agents: Client<T>,
        mut record: EvictRecord,
        own: Option<(AgentId, Arc<OwnAgent>)>,
    ) -> io::Result<EvictThread<T>> {
        let spaces = record.spaces.drain(..).map(|space| {
            let space = Space::again(space, &shared.journal)?;
            Ok((space.id, Arc::new(space)))
        });
        let spaces: BTreeMap<SpaceId, Arc<Space>> = spaces.collect::<io::Result<_>>()?;
        let processes = record.processes.drain(..).map(|process| {
            let process = Process::again(process, &spaces)?;
            Ok((process.pid, process))
        });
        let processes = processes.collect::<io::Result<_>>()?;
        EvictThread::restored(shared, commands, agents, record, own, (spaces, processes))
    }

    /// A thread that goes on with these spaces and processes.
    pub(super) fn restored(
        shared: Arc<Shared>,
        commands: Receiver<EvictCommand>,
        agents: Client<T>,
        record: EvictRecord,
        own: Option<(AgentId, Arc<OwnAgent>)>,
        (spaces, processes): (BTreeMap<SpaceId, Arc<Space>>, BTreeMap<i32, Process>),
    ) -> io::Result<EvictThread<T>> {
        let orphans = record.orphans.iter().filter_map(|id| spaces.get(&SpaceId(*id)).cloned());
        let gauges = lock(&shared.gauges).clone();
        let root = record.tree.root();
        let mut thread = EvictThread::new(shared, commands, agents, root, gauges);
        thread.settled = record.settled;
        thread.tree = Tree::again(record.tree)?;
        thread.orphans = orphans.collect();
        (thread.processes, thread.spaces) = (processes, spaces);
        thread.outboxes = record.outboxes.into();
        thread.full.begin_after(record.full);
        let given = record.given.into_iter().map(|(agent, pages)| (AgentId(agent), pages));
        thread.write_back.begin_given(given.collect());
        thread.own = own;
        // No link is up yet: nobody is believed to have what he had.
        thread.write_back.distrust_agents(Instant::now());
        Ok(thread)
    }

    /// Tells the fault threads of all spaces, and lets everybody try again who waits for a page there.
    pub(crate) fn wake_all(&mut self) {
        for (id, space) in &self.spaces {
            let events = self.heirs.take_events(*id);
            self.shared.homes.inherit(space.clone(), events);
            space.faults.wake(USER_SPACE);
        }
    }
}
