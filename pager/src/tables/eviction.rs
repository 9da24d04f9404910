//! A page's way out: chosen, leaving, in its slot, at an agent.

use std::ops::Range;

use gms_policy::eviction::Mark;
use gms_policy::ids::{AgentId, ContentId, PageAddr, SpaceId};
use gms_policy::redundancy::AgentSet;

use super::{EvictOutcome, Owner, Phase, Place, SpaceState, Tables, WriteOutcome};
use crate::page_map::{CONTENT_ID_MAX, Content, State};

impl Tables {
    /// Slots free for pages on their way out.
    pub fn free_slots(&self) -> usize {
        self.free.len().saturating_sub(self.kept_slots())
    }

    /// Whether no page is in the write-back buffer, or on its way there.
    pub fn is_buffer_free(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// Whether the page is ours to take: in a registered range, not being removed, not being fetched.
    fn is_evictable(&self, place: Place) -> bool {
        self.spaces.get(&place.0).is_some_and(|s| s.is_evictable(place.1))
            && !self.prefetching.contains(&place)
    }

    /// Removals begun in a space so far.
    pub fn removals(&self, space: SpaceId) -> u64 {
        self.spaces.get(&space).map_or(0, |s| s.removals)
    }

    /// Addresses seen with neither page nor marker: removals there are over, if none has begun since the look (`removals` then).
    pub fn seen_absent(&mut self, space: SpaceId, range: Range<u64>, removals: u64) {
        if self.removals(space) == removals {
            self.zeroed(space, range);
        }
    }

    /// Whether anything of the range is in quarantine.
    pub fn has_quarantine(&self, space: SpaceId, range: &Range<u64>) -> bool {
        self.spaces.get(&space).is_some_and(|s| s.has_quarantine(range))
    }

    /// Begins to prove that the removals of a space are over; false if there are none. Those that come later are not meant.
    pub fn age_quarantine(&mut self, space: SpaceId) -> bool {
        self.spaces.get_mut(&space).is_some_and(SpaceState::age)
    }

    /// It has been proved.
    pub fn end_quarantine(&mut self, space: SpaceId) {
        if let Some(state) = self.spaces.get_mut(&space) {
            state.end_aging();
        }
    }

    /// See [`PageMap::not_away`](crate::page_map::PageMap::not_away).
    pub fn not_away(&self, space: SpaceId, range: Range<u64>) -> Range<u64> {
        self.map.not_away(space, range)
    }

    /// Cools resident pages which a search for victims has met; returns those without heat.
    pub fn cool(&mut self, space: SpaceId, window: &[PageAddr]) -> Vec<PageAddr> {
        self.map.cool(space, window)
    }

    /// Notes pages as leaving; appends the slot for each that may go. Pages which are in quarantine, or on their way already, are left out, and
    /// all of them when the page map has no room.
    pub fn begin_evict(
        &mut self,
        space: SpaceId,
        pages: &[PageAddr],
        out: &mut Vec<(PageAddr, u32)>,
    ) {
        for &page in pages {
            let place = (space, page);
            let (kept, was_remote) = match self.map.get(space, page) {
                State::Empty => (None, false),
                State::Kept(content) => (Some(content), false),
                State::Remote(content) => (Some(content), true),
                State::Slot(_) => continue,
            };
            if !self.is_evictable(place) || self.map.is_full() {
                continue;
            }
            let Some(&index) = self.free.last().filter(|_| self.free_slots() > 0) else { return };
            if self.put(place, State::Slot(index)).is_err() {
                continue;
            }
            self.free.pop();
            self.leaving.push(index);
            let slot = &mut self.slots[index as usize];
            slot.phase = Phase::Leaving;
            slot.owners.push(Owner { place, marked: false });
            slot.kept = kept;
            slot.was_remote = was_remote;
            slot.private = false;
            slot.mark = self.clock.evict();
            out.push((page, index));
        }
    }

    /// Memory of the page map, in bytes.
    pub fn map_bytes(&self) -> u64 {
        self.map.bytes()
    }

    /// Children that are forked before this leaving page has a marker do not inherit it.
    pub fn make_private(&mut self, index: u32) {
        self.slots[index as usize].private = true;
    }

    /// The addresses of a leaving slot's page that have no marker yet.
    pub fn unmarked(&self, index: u32) -> impl Iterator<Item = Place> + '_ {
        let owners = self.slots[index as usize].owners.iter();
        owners.filter(|owner| !owner.marked).map(|owner| owner.place)
    }

    /// The address of a leaving page, if it has just one owner.
    pub fn only_owner(&self, index: u32) -> Option<Place> {
        match self.slots[index as usize].owners[..] {
            [owner] => Some(owner.place),
            _ => None,
        }
    }

    /// A leaving page's address has its marker.
    pub fn marked(&mut self, index: u32, place: Place) {
        let owners = self.slots[index as usize].owners.iter_mut();
        owners.filter(|owner| owner.place == place).for_each(|owner| owner.marked = true);
    }

    /// There is no such address any more, so that nobody owns a leaving page there.
    pub fn unowned(&mut self, place: Place) {
        self.disown(place);
    }

    /// A leaving page has stayed, or all of its addresses have markers (none if it is `Zero`). Appends the places whose threads must be woken.
    pub fn finish_evict(&mut self, index: u32, outcome: EvictOutcome, wake: &mut Vec<Place>) {
        let slot = &mut self.slots[index as usize];
        debug_assert_eq!(slot.phase, Phase::Leaving);
        if let Some(at) = self.leaving.iter().position(|&leaving| leaving == index) {
            self.leaving.swap_remove(at);
        }
        let (kept, was_remote) = (slot.kept.take(), slot.was_remote);
        let is_owned = !slot.owners.is_empty();
        if !self.waiters.is_empty() {
            let places = slot.owners.iter().map(|owner| owner.place);
            wake.extend(places.filter(|place| self.waiters.remove(place)));
        }
        let state = match (outcome, kept) {
            (EvictOutcome::Stayed, Some(content)) if was_remote => State::Remote(content),
            (EvictOutcome::Stayed, Some(content)) => State::Kept(content),
            (EvictOutcome::Moved(hash), Some(content))
                if hash == content.hash && !self.is_short(content) =>
            {
                self.counters.clean_drops += 1;
                State::Remote(content)
            }
            (EvictOutcome::Moved(hash), _) if is_owned => {
                return self.make_ready(index, kept, hash);
            }
            (EvictOutcome::Zero, _) => {
                self.counters.zero_drops += 1;
                State::Empty
            }
            _ => State::Empty,
        };
        self.settle(index, state, kept);
    }

    fn make_ready(&mut self, index: u32, kept: Option<Content>, hash: u64) {
        if let Some(old) = kept {
            self.release(old);
        }
        let slot = &mut self.slots[index as usize];
        slot.owners.iter_mut().for_each(|owner| owner.marked = true);
        (slot.phase, slot.hash) = (Phase::Ready, hash);
        self.ready.push_back(index);
    }

    /// Gives every owner the final state and frees the slot. `reference` is the reference which the slot held on a content.
    pub(super) fn settle(&mut self, index: u32, state: State, reference: Option<Content>) {
        let mut owners = std::mem::take(&mut self.slots[index as usize].owners);
        let keeps = matches!(state, State::Kept(_) | State::Remote(_));
        if let Some(content) = reference {
            match (keeps, owners.len() as u32) {
                (true, n) if n > 0 => self.share(content.id, n - 1),
                _ => self.release(content),
            }
        }
        let mark = match state {
            State::Remote(_) => self.slots[index as usize].mark,
            _ => Mark::COLD,
        };
        for owner in owners.drain(..) {
            if let Err(full) = self.put_marked(owner.place, state, mark) {
                self.exhausted = Some(full);
            }
        }
        let slot = &mut self.slots[index as usize];
        slot.phase = Phase::Free;
        slot.kept = None;
        slot.owners = owners;
        self.free.push(index);
    }

    /// Whether bytes wait to be written.
    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Takes up to `max` slots to be written to each of these agents (slot, content id, checksum), or none if that set can have no number. Each time a page
    /// is written its bytes get another id, so that what came of an earlier try can be forgotten at any time.
    pub fn start_write(&mut self, agents: AgentSet, max: usize) -> Vec<(u32, ContentId, u64)> {
        let mut started = Vec::new();
        while started.len() < max
            && let Some(index) = self.ready.pop_front()
        {
            let slot = &mut self.slots[index as usize];
            if slot.phase != Phase::Ready || slot.owners.is_empty() {
                continue;
            }
            let Some(placement) = self.map.placements.begin_write(agents, 1) else {
                self.ready.push_front(index);
                break;
            };
            let id = ContentId(self.next_content);
            assert!(id.0 <= CONTENT_ID_MAX, "2^44 writes in one workload");
            self.next_content += 1;
            let (reached, unanswered, stored) = (agents, agents, AgentSet::default());
            slot.phase = Phase::Sent { placement, to: agents, reached, unanswered, stored };
            slot.id = id;
            started.push((index, id, slot.hash));
        }
        started
    }

    /// What came of a write to one agent. The page has gone out when all to whom it was written have it.
    pub fn written(&mut self, index: u32, agent: AgentId, outcome: WriteOutcome) {
        let slot = &mut self.slots[index as usize];
        let Phase::Sent { placement, to, reached, unanswered, stored } = &mut slot.phase else {
            return;
        };
        let agent = AgentSet::of(agent);
        *unanswered = unanswered.without(agent);
        match outcome {
            WriteOutcome::Stored => *stored = stored.union(agent),
            // It may have stored it all the same.
            WriteOutcome::Failed => {}
            WriteOutcome::Unsent => *reached = reached.without(agent),
        }
        if !unanswered.is_empty() {
            return;
        }
        let (placement, to, reached, stored) = (*placement, *to, *reached, *stored);
        // Of what was written before an agent was restarted nothing is believed, though its word may come later.
        let is_gone = stored == to && self.map.placements.agents(placement) == to;
        if is_gone {
            self.counters.pages_out += 1;
            let content = Content { id: slot.id, placement, holders: to, hash: slot.hash };
            self.map.placements.end_write(placement, true);
            self.remote_pages_peak = self.remote_pages_peak.max(self.remote_pages());
            return self.settle(index, State::Remote(content), Some(content));
        }
        self.map.placements.end_write(placement, false);
        let (id, is_owned) = (slot.id, !slot.owners.is_empty());
        reached.agents().for_each(|agent| self.may_forget(agent, id));
        if is_owned {
            self.slots[index as usize].phase = Phase::Ready;
            self.ready.push_front(index);
        } else {
            self.settle(index, State::Empty, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page_map::PAGE;
    use crate::range_set::RangeSet;
    use crate::tables::FaultAction;
    use gms_policy::redundancy::Copies;
    use gms_policy::stripes::{Answer, Shape};

    fn evict(tables: &mut Tables, page: PageAddr, hash: u64) {
        let (mut leaving, mut wake) = (Vec::new(), Vec::new());
        tables.begin_evict(SpaceId(1), &[page], &mut leaving);
        tables.finish_evict(leaving[0].1, EvictOutcome::Moved(hash), &mut wake);
    }

    fn write_all(tables: &mut Tables, agent: AgentId) -> Vec<ContentId> {
        let started = tables.start_write(AgentSet::of(agent), 64);
        started.iter().for_each(|&(slot, ..)| tables.written(slot, agent, WriteOutcome::Stored));
        started.into_iter().map(|(_, id, _)| id).collect()
    }

    #[test]
    fn an_unchanged_page_is_not_left_to_an_agent_that_is_away() {
        let (space, page) = (SpaceId(1), PageAddr::containing(PAGE));
        let mut tables = Tables::new(2, 1024).expect("a memfd");
        tables.add_space(space);
        tables.register(space, 0..4 * PAGE, &RangeSet::default());
        evict(&mut tables, page, 7);
        write_all(&mut tables, AgentId(0));
        let FaultAction::Fetch(first) = tables.fault((space, page)) else { panic!("not away") };
        assert!(tables.fetched((space, page), first, true));
        tables.distrust(AgentSet::of(AgentId(0)), Copies::at_agents(1));
        evict(&mut tables, page, 7);
        assert!(matches!(tables.fault((space, page)), FaultAction::Buffered(_)), "it was dropped");
        let second = write_all(&mut tables, AgentId(1));
        assert_eq!(second.len(), 1);
        let FaultAction::Fetch(now) = tables.fault((space, page)) else { panic!("not away") };
        assert_eq!((now.holders, now.id), (AgentSet::of(AgentId(1)), second[0]));
        assert_eq!(tables.take_discards(AgentId(0), 9), [first.id]);
        // Trusted again, it is as good as any.
        assert!(tables.fetched((space, page), now, true));
        tables.distrust(AgentSet::of(AgentId(0)), Copies::at_agents(1));
        evict(&mut tables, page, 7);
        assert_eq!(tables.counters.clean_drops, 1);
    }

    /// A loss takes a stripe's parity; then its pages come back, and leave unchanged.
    #[test]
    fn an_unchanged_page_is_not_left_to_a_stripe_that_has_lost_its_parity() {
        let (space, pages) = (SpaceId(1), [PAGE, 2 * PAGE].map(PageAddr::containing));
        let tables = Tables::new(2, 1024).expect("a memfd");
        let mut tables = tables.striped(Shape::new(2, 1).expect("a shape"));
        tables.add_space(space);
        tables.register(space, 0..4 * PAGE, &RangeSet::default());
        pages.into_iter().for_each(|page| evict(&mut tables, page, 7));
        let dealt = tables.deal((0..3).map(AgentId).collect(), 1);
        let parts = &dealt[0].parts;
        parts.iter().for_each(|part| tables.answered(part.id, Answer::Stored));
        for page in pages {
            let FaultAction::Fetch(content) = tables.fault((space, page)) else {
                panic!("not away")
            };
            assert!(tables.fetched((space, page), content, true));
        }
        evict(&mut tables, pages[0], 7);
        assert_eq!(tables.counters.clean_drops, 1, "it is as safe as it was");
        tables.lose(parts[2].agent);
        evict(&mut tables, pages[1], 7);
        assert!(matches!(tables.fault((space, pages[1])), FaultAction::Buffered(_)));
    }

    #[test]
    fn a_page_that_came_back_at_once_is_spared_and_one_that_was_guessed_is_not() {
        let (space, pages) = (SpaceId(1), [PAGE, 2 * PAGE].map(PageAddr::containing));
        let mut tables = Tables::new(2, 1024).expect("a memfd");
        tables.add_space(space);
        tables.register(space, 0..4 * PAGE, &RangeSet::default());
        let (mut leaving, mut wake) = (Vec::new(), Vec::new());
        tables.begin_evict(space, &pages, &mut leaving);
        for &(page, slot) in &leaving {
            tables.finish_evict(slot, EvictOutcome::Moved(page.get()), &mut wake);
        }
        for (slot, _, _) in tables.start_write(AgentSet::of(AgentId(0)), 2) {
            tables.written(slot, AgentId(0), WriteOutcome::Stored);
        }
        for page in pages {
            let FaultAction::Fetch(content) = tables.fault((space, page)) else {
                panic!("not away")
            };
            assert!(tables.fetched((space, page), content, page == pages[0]));
        }
        assert_eq!(tables.cool(space, &pages), [pages[1]]);
        let cools = (0..100).any(|_| !tables.cool(space, &pages[..1]).is_empty());
        assert!(cools, "it never cools");
    }
}
