//! The evict thread's lane: pages to the agents, pages ahead from them, discards, and what the agents reply.
//!
//! `write_back` sends what is ready -> `replied` -> `complete` -> `settle`. `fetch` brings pages home -> `install`.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Instant;

use gms_policy::ids::{AgentId, PageAddr, SpaceId};
use gms_policy::placement::{Placement, TwoChoices};
use gms_transport::message::{Control, Op, PageDescriptor, Status};
use gms_transport::{ExchangeId, Transport};
use zerocopy::IntoBytes;

use super::{
    Ahead, DISCARDS_BATCH, EXCHANGE_DEADLINE, EvictThread, WRITE_PAGES, WRITES_MAX, Write,
};
use crate::lane::LaneEvent;
use crate::page_map::{Content, PAGE};
use crate::shared::lock;
use crate::uffd::Installed;

impl<T: Transport> EvictThread<T> {
    /// Sends what is ready to be written, and what agents may forget.
    pub(super) fn write_back(&mut self, now: Instant) -> bool {
        let mut busy = false;
        while lock(&self.shared.tables).has_ready() {
            let mut views = self.lane.views();
            views.retain(|v| v.inflight < WRITES_MAX && v.credits.0 >= WRITE_PAGES as u64);
            let random = self.next_random();
            let Some(agent) = TwoChoices.choose(&views, random) else { break };
            if !self.write(now, agent) {
                break;
            }
            busy = true;
        }
        self.discard(now);
        busy
    }

    fn write(&mut self, now: Instant, agent: AgentId) -> bool {
        let batch = lock(&self.shared.tables).start_write(agent, WRITE_PAGES);
        if batch.is_empty() {
            return false;
        }
        let descriptors: Vec<PageDescriptor> =
            batch.iter().map(|(_, id, hash)| PageDescriptor::new(id.0, *hash)).collect();
        let mut payload: Vec<&[u8]> = vec![descriptors.as_bytes()];
        payload.extend(batch.iter().map(|(slot, ..)| self.shared.frames.read(*slot)));
        let count = batch.len() as u16;
        let make = |request, workload| Control::put(request, workload, count);
        let sent = self.lane.send(now, agent, make, &payload, count.into());
        let slots: Vec<u32> = batch.iter().map(|b| b.0).collect();
        match sent {
            Ok(exchange) => {
                self.writes.insert(exchange, Write { agent, slots, stored: 0, sent: now });
                true
            }
            Err(_) => {
                self.settle(agent, &slots, 0);
                false
            }
        }
    }

    fn settle(&mut self, agent: AgentId, slots: &[u32], stored: u64) {
        let mut tables = lock(&self.shared.tables);
        for (i, &slot) in slots.iter().enumerate().rev() {
            tables.written(slot, stored >> i & 1 == 1);
        }
        drop(tables);
        self.given[usize::from(agent.0)] += u64::from(stored.count_ones());
    }

    fn discard(&mut self, now: Instant) {
        let waiting = lock(&self.shared.tables).discards_waiting();
        if waiting < DISCARDS_BATCH && now < self.next_measure {
            return;
        }
        let agents: Vec<AgentId> = self.lane.agents().filter(|&a| self.lane.is_up(a)).collect();
        for agent in agents {
            let ids = lock(&self.shared.tables).take_discards(agent, DISCARDS_BATCH * 8);
            if ids.is_empty() {
                continue;
            }
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.0.to_le_bytes()).collect();
            let count = ids.len() as u16;
            let make = |request, workload| Control::discard(request, workload, count);
            // What is not sent stays at the agent until the workload ends.
            let _ = self.lane.send(now, agent, make, &[&bytes], 0);
        }
    }

    pub(super) fn ask_status(&mut self, now: Instant) {
        let agents: Vec<AgentId> = self.lane.agents().filter(|&a| self.lane.is_up(a)).collect();
        for agent in agents {
            let make = |request, workload| Control::request(Op::Status, request, workload);
            let _ = self.lane.send(now, agent, make, &[], 0);
        }
    }

    /// Fetches pages home, before the workload is let go.
    pub(super) fn fetch(&mut self, now: Instant, space: SpaceId, pages: &[PageAddr]) {
        let begun =
            lock(&self.shared.tables).begin_prefetch(space, pages.iter().copied(), pages.len());
        let mut by_agent: BTreeMap<AgentId, Vec<(PageAddr, Content)>> = BTreeMap::new();
        for (page, content) in begun {
            by_agent.entry(content.agent).or_default().push((page, content));
        }
        for (agent, pages) in by_agent {
            let ids: Vec<PageDescriptor> =
                pages.iter().map(|(_, content)| PageDescriptor::new(content.id.0, 0)).collect();
            let make = |request, workload| match ids.len() {
                1 => Control::get(request, workload, ids[0].page.get()),
                n => Control::get_many(request, workload, n as u16),
            };
            let payload = if ids.len() == 1 { &[][..] } else { ids.as_bytes() };
            let sent = self.lane.send(now, agent, make, &[payload], ids.len() as u32);
            let ahead = Ahead { space, pages, bytes: Vec::new(), done: 0, sent: now };
            match sent {
                Ok(exchange) => drop(self.ahead.insert(exchange, ahead)),
                Err(_) => self.give_up(ahead),
            }
        }
    }

    /// The pages do not come: faults that wait for them try by themselves.
    fn give_up(&mut self, ahead: Ahead) {
        let mut tables = lock(&self.shared.tables);
        let mut wake = Vec::new();
        for (page, _) in ahead.pages {
            if tables.end_prefetch((ahead.space, page)) {
                wake.push((ahead.space, page));
            }
        }
        drop(tables);
        self.shared.wake(&self.spaces, &wake);
    }

    pub(super) fn network(&mut self, now: Instant) -> bool {
        let mut busy = match self.lane.drive(now) {
            Ok(busy) => busy,
            Err(error) => {
                self.shared.fail(format!("receiving from the agents failed: {error}"));
                false
            }
        };
        while let Some(event) = self.lane.poll(now) {
            busy = true;
            match event {
                LaneEvent::Reply { exchange, control } => self.replied(exchange, &control),
                LaneEvent::Payload { exchange, bytes, .. } => {
                    if let Some(ahead) = self.ahead.get_mut(&exchange) {
                        ahead.bytes.extend_from_slice(&bytes);
                    }
                }
                LaneEvent::Complete { exchange } => self.complete(exchange),
                LaneEvent::Failed { exchange } => self.failed(exchange),
                // Nobody waited for the embedded agent; of others one was up before the command was started.
                LaneEvent::Down { agent, reason }
                    if self.shared.config.agents.is_empty() && !self.lane.has_been_up(agent) =>
                {
                    self.shared.fail(format!("agent {}: {reason}", self.lane.name(agent)));
                }
                LaneEvent::Up { .. } | LaneEvent::Down { .. } => {}
            }
        }
        busy
    }

    fn replied(&mut self, exchange: ExchangeId, control: &Control) {
        if let Some(write) = self.writes.get_mut(&exchange)
            && matches!(control.status, Status::Ok | Status::Full | Status::Draining)
        {
            write.stored = control.done.get();
        }
        if let Some(ahead) = self.ahead.get_mut(&exchange) {
            ahead.done = control.done.get();
        }
    }

    fn complete(&mut self, exchange: ExchangeId) {
        if let Some(write) = self.writes.remove(&exchange) {
            self.settle(write.agent, &write.slots, write.stored);
        }
        if let Some(ahead) = self.ahead.remove(&exchange) {
            self.install(ahead);
        }
    }

    fn failed(&mut self, exchange: ExchangeId) {
        if let Some(write) = self.writes.remove(&exchange) {
            self.settle(write.agent, &write.slots, 0);
        }
        if let Some(ahead) = self.ahead.remove(&exchange) {
            self.give_up(ahead);
        }
    }

    /// Installs pages that were fetched ahead. The gate is closed, so that no removal comes in between.
    fn install(&mut self, ahead: Ahead) {
        let page_len = PAGE as usize;
        let several = ahead.pages.len() > 1;
        let found = ahead.done.count_ones() as usize;
        let head = if several { found * size_of::<PageDescriptor>() } else { 0 };
        let Some(space) = self.spaces.get(&ahead.space).cloned() else {
            return self.give_up(ahead);
        };
        if ahead.bytes.len() != head + found * page_len || !self.shared.has_room(found as u64) {
            return self.give_up(ahead);
        }
        let mut at = head;
        let mut wake = Vec::new();
        let gate = lock(&space.gate);
        let intact = space.ungated.is_intact();
        for (i, &(page, content)) in ahead.pages.iter().enumerate() {
            let place = (ahead.space, page);
            let mut tables = lock(&self.shared.tables);
            let mut outcome = Installed::Gone;
            if intact && ahead.done >> i & 1 == 1 {
                let bytes = &ahead.bytes[at..at + page_len];
                at += page_len;
                // A wrong checksum is left to the demand fetch, which asks again or stops the workload.
                if tables.is_remote(place, content) && self.shared.checksum(bytes) == content.hash {
                    outcome = space.faults.copy(page.get(), bytes);
                }
            }
            if matches!(outcome, Installed::Done | Installed::Exists) {
                tables.fetched(place, content, false);
            }
            let waited = tables.end_prefetch(place);
            drop(tables);
            if outcome == Installed::Done {
                self.shared.count_resident(1);
                self.shared.pages_in.fetch_add(1, Ordering::Relaxed);
                self.shared.prefetched.fetch_add(1, Ordering::Relaxed);
            } else if waited {
                wake.push(place);
            }
        }
        if intact && !space.ungated.is_intact() {
            self.shared.fail("the workload's memory changed while its pages were brought home");
        }
        drop(gate);
        self.shared.wake(&self.spaces, &wake);
    }

    /// Gives up exchanges that were not answered in time.
    pub(super) fn expire(&mut self, now: Instant) {
        let late = |sent: Instant| now.duration_since(sent) > EXCHANGE_DEADLINE;
        let writes = self.writes.iter().filter(|(_, w)| late(w.sent)).map(|(e, _)| *e);
        let ahead = self.ahead.iter().filter(|(_, a)| late(a.sent)).map(|(e, _)| *e);
        let expired: Vec<ExchangeId> = writes.chain(ahead).collect();
        for exchange in expired {
            self.lane.abandon(exchange);
            self.failed(exchange);
        }
    }
}
