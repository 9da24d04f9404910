//! The evict thread and the agents: pages are put and discarded.
//!
//! `write_back` puts what is ready -> `handle` -> `settle`. What is fetched is on its way home: see `detach`.

use std::collections::BTreeSet;
use std::time::Instant;

use gms_policy::ids::AgentId;
use gms_policy::placement::{Placement, TwoChoices};
use gms_transport::Transport;
use gms_transport::client::ClientEvent;
use gms_transport::message::Op;

use super::{
    DISCARDS_BATCH, DISCARDS_KEPT, DISCARDS_MAX, EvictThread, WRITE_PAGES, WRITES_MAX, Write,
};
use crate::shared::lock;
use crate::torture::{self, Point};

impl<T: Transport> EvictThread<T> {
    /// Sends what is ready to be written, and what agents may forget.
    pub(super) fn write_back(&mut self, now: Instant) -> bool {
        let mut busy = false;
        let mut passed_over: BTreeSet<AgentId> = BTreeSet::new();
        // On its way home a page in the buffer is at its end.
        while !self.is_detaching() && lock(&self.shared.tables).has_ready() {
            let mut views = self.agents.lane().views();
            let writes = |agent| self.agents.lane().under_way(agent, Op::Put);
            views.retain(|v| writes(v.id) < WRITES_MAX && v.credits.0 >= WRITE_PAGES as u64);
            views.retain(|v| !passed_over.contains(&v.id));
            let random = self.next_random();
            let Some(agent) = TwoChoices.choose(&views, random) else { break };
            match self.write(now, agent) {
                true => busy = true,
                // Its link takes nothing now: the others' may.
                false => drop(passed_over.insert(agent)),
            }
        }
        self.discard(now);
        busy
    }

    fn write(&mut self, now: Instant, agent: AgentId) -> bool {
        let batch = lock(&self.shared.tables).start_write(agent, WRITE_PAGES);
        if batch.is_empty() {
            return false;
        }
        let pages = batch.iter().map(|&(slot, id, _)| (id, self.shared.frames.read(slot)));
        let put = self.agents.put(now, agent, pages);
        let slots: Vec<u32> = batch.iter().map(|b| b.0).collect();
        match put {
            Ok(put) => drop(self.writes.insert(put, Write { agent, slots })),
            Err(_) => self.settle(agent, &slots, 0),
        }
        put.is_ok()
    }

    fn settle(&mut self, agent: AgentId, slots: &[u32], stored: u64) {
        torture::at(Point::BeforeWrittenIsNoted);
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
        let lane = self.agents.lane();
        let agents: Vec<AgentId> = lane.agents().filter(|&a| lane.is_up(a)).collect();
        for agent in agents {
            let may_ask = self.agents.lane().under_way(agent, Op::Discard) < DISCARDS_MAX;
            if !may_ask && lock(&self.shared.tables).discards_of(agent) < DISCARDS_KEPT {
                continue;
            }
            let ids = lock(&self.shared.tables).take_discards(agent, DISCARDS_BATCH * 8);
            if ids.is_empty() || !may_ask {
                continue;
            }
            // What is not sent stays at the agent until the workload ends.
            let _ = self.agents.discard(now, agent, &ids);
        }
    }

    pub(super) fn network(&mut self, now: Instant) -> bool {
        let busy = self.agents.drive(now).unwrap_or_else(|error| {
            self.shared.fail(format!("receiving from the agents failed: {error}"));
            false
        });
        self.handle_events(now) || busy
    }

    /// True if there were any.
    pub(super) fn handle_events(&mut self, now: Instant) -> bool {
        let mut busy = false;
        while let Some(event) = self.agents.poll(now) {
            busy = true;
            torture::at(Point::BeforeReply);
            self.handle(now, event);
            torture::at(Point::AfterReply);
        }
        busy
    }

    fn handle(&mut self, now: Instant, event: ClientEvent) {
        let lane = self.agents.lane();
        match event {
            ClientEvent::Stored { put, pages } => {
                if let Some(write) = self.writes.remove(&put) {
                    self.settle(write.agent, &write.slots, pages);
                }
            }
            ClientEvent::Arrived { get, pages, bytes } => self.arrived(get, pages, &bytes),
            ClientEvent::Wrong { get, page } => self.wrong(get, page),
            ClientEvent::Failed { get, pages, failure } => self.missed(get, pages, failure),
            ClientEvent::Ended { get } => self.ended(now, get),
            ClientEvent::Answered { .. } => {}
            // Nobody waited for the embedded agent; of others one was up before the command was started.
            ClientEvent::Down { agent, reason }
                if self.shared.config.agents.is_empty() && !lane.has_been_up(agent) =>
            {
                self.shared.fail(format!("agent {}: {reason}", lane.name(agent)));
            }
            ClientEvent::Down { .. } => {}
            ClientEvent::Up { agent, session, lost } => {
                self.shared.agent_up(agent, lane.name(agent), session, lost);
            }
        }
    }

    /// Tells the tables which agents may be down: an unchanged page is not left to those.
    pub(super) fn distrust_agents(&mut self, now: Instant) {
        let lane = self.agents.lane();
        let untrusted: BTreeSet<AgentId> = lane.agents().filter(|&a| !lane.keeps(now, a)).collect();
        if untrusted != self.untrusted {
            self.untrusted.clone_from(&untrusted);
            lock(&self.shared.tables).distrust(untrusted);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gms_policy::ids::{PageAddr, SpaceId};

    use super::*;
    use crate::fault::tests::shared;
    use crate::page_map::PAGE;
    use crate::range_set::RangeSet;
    use crate::shared::Gauges;
    use crate::tables::{EvictOutcome, FaultAction};
    use crate::tree::Root;
    use gms_transport::ExchangeId;
    use gms_transport::client::script::Script;
    use gms_transport::client::{Checksum, Client, PUT_DEADLINE};
    use gms_transport::message::Control;

    const ID: SpaceId = SpaceId(1);

    fn thread(agents: u16) -> EvictThread<Script> {
        let (shared, commands) = shared();
        lock(&shared.tables).add_space(ID);
        lock(&shared.tables).register(ID, 0..PAGE << 20, &RangeSet::default());
        let (root, agents) = (Root::Process(i32::MAX), Client::scripted(agents, Checksum::new(7)));
        let mut thread = EvictThread::new(shared, commands.evict, agents, root, Gauges::default());
        thread.agents.take_sent();
        thread
    }

    /// Moves some pages to the write-back buffer.
    fn evict(thread: &EvictThread<Script>, pages: impl Iterator<Item = u64>) {
        let pages: Vec<PageAddr> = pages.map(|n| PageAddr::containing(n * PAGE)).collect();
        let (mut leaving, mut wake) = (Vec::new(), Vec::new());
        let mut tables = lock(&thread.shared.tables);
        tables.begin_evict(ID, &pages, &mut leaving);
        for (page, slot) in leaving {
            tables.finish_evict(slot, EvictOutcome::Moved(page.get()), &mut wake);
        }
    }

    /// The agents answer what was sent, but for some operations; true if a write was among that.
    fn answer(thread: &mut EvictThread<Script>, now: Instant, mute: &[Op]) -> bool {
        let mut sent = thread.agents.take_sent();
        sent.retain(|request| !mute.iter().any(|op| request.1.op() == Some(*op)));
        sent.iter().for_each(|request| thread.agents.answer(request, Vec::new()));
        thread.network(now);
        sent.iter().any(|request| request.1.op() == Some(Op::Put))
    }

    #[test]
    fn what_is_not_answered_is_given_up_whatever_it_is() {
        // As many requests for its state as one deadline holds.
        let open_max = DISCARDS_MAX + PUT_DEADLINE.as_secs() as usize + 1;
        for mute in [&[Op::Status][..], &[Op::Discard], &[Op::Status, Op::Discard]] {
            let (mut thread, start) = (thread(1), Instant::now());
            evict(&thread, 0..256);
            thread.write_back(start);
            answer(&mut thread, start, &[]);
            let mut last_write = Duration::ZERO;
            for step in 0..240 {
                let time = Duration::from_millis(50) * step;
                let now = start + time;
                let page = PageAddr::containing(u64::from(step) * PAGE);
                lock(&thread.shared.tables).discarded((ID, page));
                evict(&thread, std::iter::once(256 + u64::from(step)));
                thread.next_measure = now;
                thread.agents.expire(now);
                thread.agents.send_unsent(now);
                if step % 20 == 0 {
                    thread.agents.ask_status(now);
                }
                thread.write_back(now);
                if answer(&mut thread, now, mute) {
                    last_write = time;
                }
                assert!(thread.agents.open() <= open_max, "{mute:?}: {}", thread.agents.open());
            }
            assert!(
                last_write > Duration::from_secs(11),
                "{mute:?}: no write after {last_write:?}"
            );
        }
    }

    #[test]
    fn an_agent_to_which_nothing_can_be_sent_holds_up_no_other() {
        let (mut thread, now) = (thread(2), Instant::now());
        thread.agents.block(AgentId(0));
        let batches = WRITES_MAX;
        evict(&thread, 0..(batches * WRITE_PAGES) as u64);
        assert!(thread.write_back(now));
        let sent = thread.agents.take_sent();
        let to_other = |(exchange, control): &(ExchangeId, Control)| {
            control.op() == Some(Op::Put) && thread.agents.agent_of(*exchange) == AgentId(1)
        };
        assert_eq!(sent.iter().filter(|sent| to_other(sent)).count(), batches);
        let views = thread.agents.lane().views();
        assert!(views[0].refusals > 0 && views[1].refusals == 0, "{views:?}");
    }

    /// Each lane hears of it, the one some time after the other.
    #[test]
    fn a_restart_of_an_agent_is_for_the_lane_that_sees_it_first() {
        let (mut thread, now, agent) = (thread(1), Instant::now(), AgentId(0));
        let other_lane = |thread: &EvictThread<Script>, session| {
            thread.shared.agent_up(agent, "a", session, session > 1);
        };
        // A page comes back, and the agent has a copy.
        evict(&thread, 1..2);
        thread.write_back(now);
        answer(&mut thread, now, &[]);
        let place = (ID, PageAddr::containing(PAGE));
        let FaultAction::Fetch(content) = lock(&thread.shared.tables).fault(place) else {
            panic!("not written")
        };
        assert!(lock(&thread.shared.tables).fetched(place, content, true));
        thread.agents.restart(agent, 2);
        thread.network(now);
        evict(&thread, 1..2);
        assert!(
            lock(&thread.shared.tables).has_ready(),
            "it was left to an agent that has lost it"
        );
        thread.write_back(now);
        answer(&mut thread, now, &[]);
        assert!(!lock(&thread.shared.tables).has_ready());
        other_lane(&thread, 2);
        assert!(!thread.shared.has_failed(), "what it has it was given after the restart");
        other_lane(&thread, 3);
        assert!(thread.shared.has_failed());
    }
}
