//! What threads of a pager share, as its next binary is told of it. Nothing is under way.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gms_policy::ids::{AgentId, SpaceId};
use serde::{Deserialize, Serialize};

use super::{Commands, Gauges, Shared, Sizes};
use crate::config::SessionConfig;
use crate::frames::Frames;
use crate::handed::{Descriptors, Number};
use crate::inject::is_named_evictor;
use crate::kernel::journal::{Journal, Left};
use crate::page_map::PAGE;
use crate::sync::lock;
use crate::tables::Tables;
use crate::words::Words;

/// See [`Shared`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SharedRecord {
    config: SessionConfig,
    seed: u64,
    map: Number,
    frames: Number,
    journal: Number,
    resident: i64,
    evictors: Vec<i32>,
    next_space: u64,
    blamed: Vec<(u8, u32)>,
    restarts: Vec<(u8, u32)>,
    unsound: u64,
    emptied: u64,
    ended: Option<u8>,
    counts: Vec<u64>,
    latency: Vec<(u64, u64)>,
    gauges: Gauges,
    elapsed: Duration,
}

fn numbered(counts: &BTreeMap<AgentId, u32>) -> Vec<(u8, u32)> {
    counts.iter().map(|(agent, &count)| (agent.0, count)).collect()
}

fn by_agent(counts: Vec<(u8, u32)>) -> BTreeMap<AgentId, u32> {
    counts.into_iter().map(|(agent, count)| (AgentId(agent), count)).collect()
}

impl Shared {
    /// Figures that only grow.
    fn counts(&self) -> [&AtomicU64; 8] {
        [
            &self.faults,
            &self.zero_fills,
            &self.pages_in,
            &self.prefetched,
            &self.prefetch_hits,
            &self.lent_faults,
            &self.lent_hedges,
            &self.pages_made,
        ]
    }

    /// What the next binary needs beside the words of the tables.
    pub(crate) fn hand_over(&self, to: &mut Descriptors) -> SharedRecord {
        let values = lock(&self.latency);
        let values =
            values.iter_recorded().map(|one| (one.value_iterated_to(), one.count_at_value()));
        SharedRecord { latency: values.collect(), ..self.leave(to) }
    }

    /// What another pager needs if this one dies. It counts latencies anew.
    pub(crate) fn leave(&self, to: &mut Descriptors) -> SharedRecord {
        SharedRecord {
            config: self.config.clone(),
            seed: self.seed,
            map: to.give(lock(&self.tables).file()),
            frames: to.give(self.frames.file()),
            journal: to.give(self.journal.file()),
            resident: self.resident.load(Ordering::Relaxed),
            evictors: lock(&self.evictors).clone(),
            next_space: self.next_space.load(Ordering::Relaxed),
            blamed: numbered(&lock(&self.blamed)),
            restarts: numbered(&lock(&self.losses)),
            unsound: self.unsound.load(Ordering::Relaxed),
            emptied: self.emptied.load(Ordering::Relaxed),
            ended: lock(&self.ended).map(|agent| agent.0),
            counts: self.counts().iter().map(|count| count.load(Ordering::Relaxed)).collect(),
            latency: Vec::new(),
            gauges: lock(&self.gauges).clone(),
            elapsed: self.started.elapsed(),
        }
    }

    /// All of it again, with the tables that `words` tell of.
    pub(crate) fn again(
        record: SharedRecord,
        words: &mut Words<'_>,
    ) -> io::Result<(Arc<Shared>, Commands)> {
        let budget = record.config.budget_bytes / PAGE;
        let mut tables = Tables::from_words(record.map.take()?.into(), budget, words)?;
        // The one says how pages are written, the other how they are read.
        if tables.shape() != record.config.redundancy.shape() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        tables.note_newest(SpaceId(record.next_space.saturating_sub(1)));
        let frames = Frames::of(record.frames.take()?.into(), tables.slots())?;
        let journal = Journal::new()?;
        Shared::restored(record, tables, frames, journal)
    }

    /// All of it, and what is kept in the journal, of a pager that has died.
    pub(crate) fn inherited(
        record: SharedRecord,
    ) -> io::Result<(Arc<Shared>, Commands, Vec<Left>)> {
        let tables = Tables::recover(record.map.take()?.into(), record.config.budget_bytes / PAGE)?;
        let frames = Frames::of(record.frames.take()?.into(), tables.slots())?;
        let generation = |line| tables.generation(line);
        let (journal, left) = Journal::again(record.journal.take()?.into(), generation)?;
        // A name that is in the journal is nobody else's.
        let named = left.iter().map(|left| left.space.0 + 1).max().unwrap_or(0);
        let record = SharedRecord { next_space: record.next_space.max(named), ..record };
        let (shared, commands) = Shared::restored(record, tables, frames, journal)?;
        shared.estate.inherit();
        Ok((shared, commands, left))
    }

    fn restored(
        record: SharedRecord,
        tables: Tables,
        frames: Frames,
        journal: Arc<Journal>,
    ) -> io::Result<(Arc<Shared>, Commands)> {
        let newest = tables.newest().0;
        let sizes = Sizes { slots: tables.slots(), ..Sizes::default() };
        let (mut shared, commands) = Shared::of(record.config, record.seed, sizes, tables, frames)?;
        shared.journal = journal;
        shared.resident = record.resident.into();
        shared.next_space = record.next_space.max(newest + 1).into();
        shared.unsound = record.unsound.into();
        shared.emptied = record.emptied.into();
        shared.started = Instant::now().checked_sub(record.elapsed).unwrap_or(shared.started);
        // One that had been dismissed has ended since, and its id may be a program's.
        let evictors = record.evictors.into_iter().filter(|&pid| is_named_evictor(pid));
        *lock(&shared.evictors) = evictors.collect();
        *lock(&shared.gauges) = record.gauges;
        *lock(&shared.blamed) = by_agent(record.blamed);
        *lock(&shared.losses) = by_agent(record.restarts);
        *lock(&shared.ended) = record.ended.map(AgentId);
        for (count, before) in shared.counts().into_iter().zip(record.counts) {
            count.store(before, Ordering::Relaxed);
        }
        let mut latency = lock(&shared.latency);
        record.latency.iter().for_each(|&(value, count)| latency.saturating_record_n(value, count));
        drop(latency);
        Ok((Arc::new(shared), commands))
    }
}
