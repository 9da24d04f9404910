//! Parity: pages in the write-back buffer are dealt out in stripes ([`Stripes`]), each part to another agent.

use gms_policy::ids::{AgentId, ContentId};
use gms_policy::redundancy::{AgentSet, Placements, Shortage};
use gms_policy::stripes::{AgentsNow, Answer, Part, Read, Shape, StripeId, Stripes, Written};

use super::{Phase, Place, Tables};
use crate::page_map::{CONTENT_ID_MAX, Content, State};

/// Slots that are kept for pages that are made of other parts because threads wait for them: those must come in also while no agent takes what goes out. One of
/// so many is, and no more than these.
const KEPT_PART: usize = 8;
const KEPT_MAX: usize = 64;

/// A stripe that was dealt.
pub struct Dealt {
    /// The slots of its pages.
    pub slots: Vec<u32>,
    /// What is to be put where: the pages, in that order, and then the parity parts.
    pub parts: Vec<Part>,
}

impl Tables {
    /// The same, with parity.
    #[must_use]
    pub fn striped(mut self, shape: Shape) -> Tables {
        self.map.placements = Placements::striped(shape);
        self.stripes = Some(Stripes::new(shape));
        self
    }

    /// The shape of the stripes, with parity.
    pub fn shape(&self) -> Option<Shape> {
        self.stripes.as_ref().map(Stripes::shape)
    }

    pub(super) fn kept_slots(&self) -> usize {
        self.stripes.as_ref().map_or(0, |_| KEPT_MAX.min(self.slots.len() / KEPT_PART))
    }

    /// Deals up to `max` stripes to a set of agents. Pages of which there are not enough for a stripe wait in the buffer for others.
    pub fn deal(&mut self, agents: AgentSet, max: usize) -> Vec<Dealt> {
        let (mut all, placements) = (Vec::new(), &mut self.map.placements);
        let Some(stripes) = &mut self.stripes else { return all };
        let pages = stripes.shape().data_at(agents.len() as usize);
        while all.len() < max
            && self.ready.len() >= pages
            && let Some((placement, parts)) = stripes.deal(placements, agents, pages)
        {
            let slots: Vec<u32> = self.ready.drain(..pages).collect();
            for (&index, part) in slots.iter().zip(&parts) {
                assert!(part.id.0 <= CONTENT_ID_MAX, "2^44 writes in one workload");
                let slot = &mut self.slots[index as usize];
                (slot.phase, slot.id) = (Phase::Dealt(placement), part.id);
                self.dealt.insert(part.id, index);
            }
            all.push(Dealt { slots, parts });
        }
        all
    }

    /// What came of the write of a part. The pages of a stripe have gone out when all of its agents have their parts; else they are dealt anew.
    pub fn answered(&mut self, id: ContentId, answer: Answer) {
        let Some(stripes) = &mut self.stripes else { return };
        let ids = stripes.shape().ids_of(id);
        let written = stripes.answered(&mut self.map.placements, id, answer);
        if written == Written::Waits {
            return;
        }
        let pages: Vec<(ContentId, u32)> =
            self.dealt.range(ids).map(|(&id, &index)| (id, index)).collect();
        for (id, index) in pages.into_iter().rev() {
            self.dealt.remove(&id);
            let slot = &mut self.slots[index as usize];
            let Phase::Dealt(placement) = slot.phase else { continue };
            if written == Written::Safe {
                self.counters.pages_out += 1;
                let holders = self.map.placements.holders(placement, id);
                let content = Content { id, placement, holders, hash: slot.hash };
                self.settle(index, State::Remote(content), Some(content));
            } else if slot.owners.is_empty() {
                self.settle(index, State::Empty, None);
            } else {
                slot.phase = Phase::Ready;
                self.ready.push_front(index);
            }
        }
        self.remote_pages_peak = self.remote_pages_peak.max(self.remote_pages());
        self.forget_parts();
    }

    /// Nobody refers to a page of a stripe any more.
    pub(super) fn died(&mut self, id: ContentId) {
        if let Some(stripes) = &mut self.stripes {
            stripes.dead(&mut self.map.placements, id);
        }
        self.forget_parts();
    }

    /// Chooses stripes whose pages are to be dealt anew, of up to `look`.
    pub fn close_stripes(&mut self, agents: AgentsNow, look: usize) {
        let Some(stripes) = &mut self.stripes else { return };
        stripes.close(&self.map.placements, agents, look);
        self.forget_parts();
    }

    /// Stripes whose pages are to be dealt anew.
    pub fn closing_stripes(&self) -> u64 {
        self.stripes.as_ref().map_or(0, Stripes::closing)
    }

    /// Pages found to be lost, in stripes of which nothing else is left.
    pub fn lost_pages(&self) -> u64 {
        self.stripes.as_ref().map_or(0, Stripes::given_up)
    }

    /// Slots for pages that are to be dealt anew: half of those that are kept stay for threads that wait.
    pub fn room_to_renew(&self) -> usize {
        self.free.len().saturating_sub(self.kept_slots() / 2)
    }

    /// The last stripe whose pages are to be dealt anew now. Its frames at agents are free when all of its live pages are here, and not before: with little room,
    /// and agents that wait for those frames, pages come home of no more stripes than all of those of which have room.
    pub(super) fn last_to_renew(&self) -> Option<StripeId> {
        let is_busy = self.free_slots() < self.slots.len() / 2;
        let room = if is_busy { self.room_to_renew() } else { usize::MAX };
        self.stripes.as_ref().and_then(|stripes| stripes.closing_within(room))
    }

    /// Whether the page is to be dealt anew.
    pub(super) fn is_closing(&self, content: Content) -> bool {
        self.stripes.as_ref().is_some_and(|stripes| stripes.is_closing(content.id))
    }

    /// Whether an agent has lost what was dealt to it of the page's stripe.
    pub(super) fn has_lost_a_part(&self, content: Content) -> bool {
        let (sets, set) = (&self.map.placements, content.placement);
        self.stripes.is_some() && sets.agents(set) != sets.members(set)
    }

    /// Whether an agent is to have a part of a page's stripe: not if the page is somewhere else by now, or lost.
    pub fn needs_part(&self, place: Place, content: Content, agent: AgentId) -> bool {
        let is_held = self.map.placements.agents(content.placement).has(agent);
        let read = self.read(content, AgentSet::EMPTY);
        is_held && self.is_remote(place, content) && !matches!(read, None | Some(Read::Lost))
    }

    /// How a page can be read if these agents can be asked; `None` without parity.
    pub fn read(&self, content: Content, askable: AgentSet) -> Option<Read> {
        let stripes = self.stripes.as_ref()?;
        Some(stripes.read(&self.map.placements, content.id, askable))
    }

    /// Whether a page can be put into the write-back buffer.
    pub fn has_slot(&self) -> bool {
        !self.free.is_empty()
    }

    /// Frames of agents that the workload takes: with parity more than it has pages there.
    pub fn frames_taken(&self) -> u64 {
        self.stripes.as_ref().map_or(0, Stripes::parts)
    }

    /// The most that they have been.
    pub fn frames_taken_peak(&self) -> u64 {
        self.stripes.as_ref().map_or(0, Stripes::parts_peak)
    }

    /// Whether an agent that drains may end: each page there is also at one that is not `untrusted`, and with parity no stripe has a part there. While there is a shortage of
    /// anything, resident pages are not told apart.
    pub fn may_leave(
        &self,
        agent: AgentId,
        untrusted: AgentSet,
        shortage: Option<&Shortage>,
    ) -> bool {
        match (&self.stripes, shortage) {
            (Some(_), _) => self.held_by(agent) == 0,
            (None, None) => !self.depends_on_one_of(agent, untrusted),
            (None, Some(shortage)) => {
                let placements = &self.map.placements;
                !placements.rests_on_with(agent, untrusted)
                    && placements.short_at(agent, shortage) == 0
            }
        }
    }

    fn forget_parts(&mut self) {
        let parts = self.stripes.as_mut().map(Stripes::take_discards).unwrap_or_default();
        parts.into_iter().for_each(|part| self.may_forget(part.agent, part.id));
    }
}
