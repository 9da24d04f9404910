//! Pages of which there are too few copies: found, and written anew.

use gms_policy::eviction::Mark;
use gms_policy::ids::SpaceId;
use gms_policy::redundancy::{AgentSet, Shortage};

use super::{Owner, Phase, Place, Tables};
use crate::page_map::{Content, PAGE, State};

/// What one look for pages with too few copies has found.
#[derive(Debug, Default)]
pub struct Short {
    /// Pages that are only at agents.
    pub pages: Vec<(Place, Content)>,
    /// Where the next look begins; `None` if all spaces have been seen.
    pub next: Option<(SpaceId, u64)>,
}

impl Tables {
    /// Who has the bytes by now.
    pub fn holders(&self, content: Content) -> AgentSet {
        self.map.placements.holders(content.placement, content.id)
    }

    /// Whether there are fewer copies than there are to be, or a part of the stripe is lost.
    pub(super) fn is_short(&self, content: Content) -> bool {
        self.is_closing(content)
            || self.has_lost_a_part(content)
            || !self.copies.are_at(self.holders(content).without(self.untrusted))
    }

    /// Whether a page is, or is being written, at some of these agents and at no other.
    pub fn rests_on(&self, agents: AgentSet) -> bool {
        self.map.placements.rests_on(agents)
    }

    /// Pages of which there are too few copies, or of whose stripes some agent has lost its part or leaves with it, but for those that are lost.
    pub fn short_of(&self, shortage: &Shortage) -> u64 {
        match self.stripes {
            Some(_) => self.map.placements.lacking(shortage.leaving) - self.lost_pages(),
            None => self.map.placements.short_of(shortage),
        }
    }

    /// Looks at up to `entries` entries from a page on for such pages, until there are `max`. Resident pages among them are taken for changed from now on,
    /// so that they are written when they are evicted.
    pub fn find_short(
        &mut self,
        from: (SpaceId, u64),
        shortage: &Shortage,
        (mut entries, max): (usize, usize),
    ) -> Short {
        let (mut found, mut kept) = (Short::default(), Vec::new());
        let last = self.last_to_renew();
        let is_meant = |content: Content| match &self.stripes {
            Some(stripes) => {
                let stripe = stripes.shape().stripe_of(content.id);
                last.is_some_and(|last| stripe <= last) && stripes.is_closing(content.id)
            }
            None => shortage.is_of(content.holders),
        };
        let spaces: Vec<SpaceId> = self.spaces.range(from.0..).map(|(&id, _)| id).collect();
        for space in spaces {
            let begin = if space == from.0 { from.1 } else { 0 };
            self.map.visit(space, begin..u64::MAX, |page, state| {
                match state {
                    State::Remote(content) if is_meant(content) => {
                        found.pages.push(((space, page), content));
                    }
                    State::Kept(content) if is_meant(content) => {
                        kept.push((space, page));
                    }
                    State::Remote(_) | State::Kept(_) | State::Slot(_) | State::Empty => {}
                }
                entries = entries.saturating_sub(1);
                let more = entries > 0 && found.pages.len() < max;
                found.next = (!more).then_some((space, page.get() + PAGE));
                more
            });
            if found.next.is_some() {
                break;
            }
        }
        kept.into_iter().for_each(|place| self.disbelieve(place));
        found
    }

    /// A resident page's copies are no longer good.
    fn disbelieve(&mut self, place: Place) {
        if let State::Kept(content) = self.map.get(place.0, place.1)
            && self.put(place, State::Empty).is_ok()
        {
            self.release(content);
        }
    }

    /// The bytes of a page that is only at agents are here: takes a slot for them, from which the page is written anew, as one that has just been evicted.
    /// The copies at agents may be forgotten. `None`, and nothing has changed, if the page is no longer there, or no slot is left.
    pub fn rewrite(&mut self, place: Place, content: Content) -> Option<u32> {
        let (State::Remote(known), mark) = self.map.get_marked(place.0, place.1) else {
            return None;
        };
        if known != content || self.doomed.contains(&place) || self.prefetching.contains(&place) {
            return None;
        }
        // Not one that was given up in this hold: if the process dies in it, the page is in that slot again, and its bytes are needed.
        let at = self.free.iter().rposition(|&index| !self.slots.has_changed(index))?;
        let index = self.free[at];
        self.put_marked(place, State::Slot(index), Mark::COLD).ok()?;
        self.free.swap_remove(at);
        self.release(content);
        let slot = &mut self.slots[index as usize];
        slot.owners.push(Owner { place, marked: true });
        (slot.kept, slot.was_remote, slot.private, slot.mark) = (None, false, false, mark);
        (slot.phase, slot.hash) = (Phase::Ready, content.hash);
        self.ready.push_back(index);
        Some(index)
    }
}
