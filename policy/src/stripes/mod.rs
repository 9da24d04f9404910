//! Parity: evicted pages are dealt out in *stripes*, each page to another agent, with parity parts at further ones (Zhou et al., "Carbink", OSDI'22), so that a
//! page is read from one agent, and from the others' parts only after a loss.
//!
//! A stripe takes K+M content ids that follow each other: those of its pages, then those of its parity parts. So a page's entry in the page map is as it is
//! without parity, a content id and the number of a set of agents: from these follow the stripe, the part and the agent ([`Shape::part`]). What is kept
//! here is a few bytes a stripe (`STRIPE_BYTES_MAX`).
//!
//! Life of a stripe: [`Stripes::deal`] says which part goes to which agent -> *writing*, until [`Stripes::answered`] has heard of each -> *safe*, and only then
//! may the local frames of its pages be given up -> pages die ([`Stripes::dead`]) -> *closing*, if it is chosen to be ([`Stripes::close`]): its live pages are
//! read and dealt anew -> gone, when no page is live. A stripe of which a part was not stored, or was lost before all were, is given up as a whole and its
//! pages are dealt anew.
//!
//! There is no stripe that fills: pages wait in the write-back buffer until there are K, and are dealt together. Where fewer than K+M agents can be used, fewer
//! are dealt, so that each part is at another agent all the same: the pages that are missing count as zeros, and nobody stores those.
//!
//! **A dead page stays part of the sums**, so its agent must keep its bytes until the stripe is gone. Nothing is discarded before: [`Stripes::take_discards`]
//! gives all parts of a stripe at once. Memory that dead pages take is bounded by closing stripes (`closing.rs`).

mod closing;
mod codec;
mod words;

pub use crate::shape::{DATA_MAX, PARITY_MAX, Part, Role, Shape, StripeId};
pub use closing::{AgentsNow, PARTS_MORE_MAX, PARTS_PERCENT_MAX};
pub use codec::{Codec, CodecError};

use self::closing::Closing;
use crate::ids::{AgentId, ContentId};
use crate::redundancy::{AgentSet, PlacementId, Placements};
use std::collections::BTreeMap;

/// Where a stripe is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Its parts were put. Left when each was answered: for `Safe`, or the stripe is gone.
    Writing { unanswered: u16, has_failed: bool },
    /// Each agent had its part. Left by `close`, or the stripe is gone because no page is live.
    Safe,
    /// Its live pages are to be dealt anew. Left by `close` when none can be read, or the stripe is gone because no page is live.
    Closing,
    /// Agents are away, and none of its live pages can be read. Left by `close` when one can, or as `Closing` is.
    Stuck,
    /// More parts are lost than there is parity, and so are all live pages: no agent needs to keep anything. Gone when no page is live.
    Lost,
}

#[derive(Clone, Copy, Debug)]
struct Stripe {
    /// Agents that its parts were written to.
    placement: PlacementId,
    /// Its live pages, a bit for each.
    live: u16,
    /// Pages with which it was dealt.
    pages: u8,
    phase: Phase,
}

/// Most bytes that are kept of a stripe: 14 a page with 4+1 where stripes are full of live pages. They are in a tree, whose leaves have room for 11 of them and
/// hold 5 at least, as its other nodes do, which have 12 pointers more.
const STRIPE_BYTES_MAX: usize = 56;
const LEAF_BYTES: usize = 11 * (size_of::<Stripe>() + size_of::<StripeId>()) + 16;
const _: () = assert!(LEAF_BYTES + (LEAF_BYTES + 12 * 8) / 5 <= 5 * STRIPE_BYTES_MAX);

impl Stripe {
    fn is_live(&self, role: Role) -> bool {
        matches!(role, Role::Data(page) if self.live >> page & 1 == 1)
    }
}

/// What has come of a part's write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The agent has it.
    Stored,
    /// The agent has refused it, has not answered (then it may have it), or has not been asked.
    Failed,
}

/// What is known of a stripe's write now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// Other parts are still to be answered, or the stripe is no longer being written.
    Waits,
    /// All agents have their parts: the local frames of its pages may be given up.
    Safe,
    /// Some have not. The stripe is gone, and its pages are to be dealt anew.
    Failed,
}

/// How a page can be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Read {
    /// From the agent that has it.
    At(Part),
    /// From these other parts of the stripe, by [`Codec::decode`]; with them goes the number of its pages.
    Decode(usize, Vec<Part>),
    /// Not from the agents that can be asked now.
    Later,
    /// Not at all: more parts of its stripe are lost than there is parity, and its own is.
    Lost,
    /// It is not live, or not safe: then its bytes are still here.
    Unknown,
}

/// The stripes of a session. Everything that is done with them is told to the session's [`Placements`] here too: a write of each page, and each page that is
/// stored, at the set of its stripe.
#[derive(Clone, Debug)]
pub struct Stripes {
    shape: Shape,
    stripes: BTreeMap<StripeId, Stripe>,
    next: StripeId,
    /// Parts that agents have, or may have.
    parts: u64,
    /// The most that they have been.
    parts_peak: u64,
    /// Those of each agent, but for what it has lost.
    held: BTreeMap<AgentId, u64>,
    /// Live pages, but for those found to be lost.
    live: u64,
    /// Those found to be lost.
    given_up: u64,
    closing: Closing,
    /// Parts that their agents may forget.
    discards: Vec<Part>,
}

impl Stripes {
    /// None, of a shape.
    pub fn new(shape: Shape) -> Stripes {
        Stripes {
            shape,
            stripes: BTreeMap::new(),
            // No content has the id 0.
            next: StripeId(1),
            parts: 0,
            parts_peak: 0,
            held: BTreeMap::new(),
            live: 0,
            given_up: 0,
            closing: Closing::default(),
            discards: Vec::new(),
        }
    }

    /// Their shape.
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// First content id of the stripe that is dealt next.
    pub const fn next_id(&self) -> ContentId {
        ContentId(self.next.0.saturating_mul(self.shape.parts() as u64))
    }

    /// Deals a stripe of 1 to K pages to a set of K+M agents, or to fewer agents than that fewer pages ([`Shape::data_at`]). Returns what is to be put where: the pages, in order, and then the parity parts, which
    /// [`Codec::encode`] makes of them. `None` if the set or the number of pages does not fit, or the set can have no number now.
    pub fn deal(
        &mut self,
        placements: &mut Placements,
        members: AgentSet,
        pages: usize,
    ) -> Option<(PlacementId, Vec<Part>)> {
        let agents = members.len() as usize;
        let fits = (1..=self.shape.data_at(agents)).contains(&pages);
        if !fits || agents > self.shape.parts() {
            return None;
        }
        let placement = placements.begin_write(members, pages as u64)?;
        let id = self.next;
        self.next = StripeId(id.0 + 1);
        let contents = self.shape.contents(id, pages as u8);
        let parts: Vec<Part> = contents.filter_map(|id| self.shape.part(id, members)).collect();
        let bit = |part: &Part| 1 << (part.id.0 % self.shape.parts() as u64);
        let unanswered = parts.iter().map(bit).sum();
        let phase = Phase::Writing { unanswered, has_failed: false };
        let live = (1 << pages) - 1;
        self.stripes.insert(id, Stripe { placement, live, pages: pages as u8, phase });
        self.parts += parts.len() as u64;
        self.parts_peak = self.parts_peak.max(self.parts);
        parts.iter().for_each(|part| *self.held.entry(part.agent).or_default() += 1);
        self.live += pages as u64;
        Some((placement, parts))
    }

    /// What came of the write of a part, a page's or a parity part. Of what was written before an agent has lost its parts nothing is believed, though its word
    /// may come later.
    pub fn answered(
        &mut self,
        placements: &mut Placements,
        id: ContentId,
        answer: Answer,
    ) -> Written {
        let number = self.shape.stripe_of(id);
        let Some(stripe) = self.stripes.get_mut(&number) else { return Written::Waits };
        let Phase::Writing { unanswered, has_failed } = &mut stripe.phase else {
            return Written::Waits;
        };
        *unanswered &= !(1 << (id.0 % self.shape.parts() as u64));
        *has_failed |= answer == Answer::Failed;
        if *unanswered != 0 {
            return Written::Waits;
        }
        let placement = stripe.placement;
        let is_whole = placements.agents(placement) == placements.members(placement);
        let is_safe = !*has_failed && is_whole;
        let stripe = *stripe;
        (0..stripe.pages).for_each(|_| placements.end_write(placement, is_safe));
        if !is_safe {
            self.end(placements, number);
            return Written::Failed;
        }
        let dead = u32::from(stripe.pages) - stripe.live.count_ones();
        (0..dead).for_each(|_| placements.release(placement));
        self.enter(number, Phase::Safe);
        self.end_if_dead(placements, number);
        Written::Safe
    }

    /// Nobody refers to a page any more. False if it was not live.
    pub fn dead(&mut self, placements: &mut Placements, id: ContentId) -> bool {
        let (number, role) = (self.shape.stripe_of(id), self.shape.role_of(id));
        let Some(stripe) = self.stripes.get_mut(&number) else { return false };
        let (true, Role::Data(page)) = (stripe.is_live(role), role) else { return false };
        let before = *stripe;
        stripe.live &= !(1 << page);
        let after = *stripe;
        match after.phase {
            Phase::Lost => self.given_up -= 1,
            _ => self.live -= 1,
        }
        self.closing.replace(self.shape, number, Some(&before), Some(&after));
        if !matches!(after.phase, Phase::Writing { .. }) {
            placements.release(after.placement);
            self.end_if_dead(placements, number);
        }
        true
    }

    /// How a page can be read if these agents can be asked: those that are connected, without any that has just said not to have it.
    pub fn read(&self, placements: &Placements, id: ContentId, askable: AgentSet) -> Read {
        let number = self.shape.stripe_of(id);
        let Some(stripe) = self.stripes.get(&number) else { return Read::Unknown };
        let is_written = !matches!(stripe.phase, Phase::Writing { .. });
        if !is_written || !stripe.is_live(self.shape.role_of(id)) {
            return Read::Unknown;
        }
        let (members, holders) =
            (placements.members(stripe.placement), placements.agents(stripe.placement));
        let all = self.shape.contents(number, stripe.pages);
        let all = all.filter_map(|id| self.shape.part(id, members));
        let kept: Vec<Part> = all.filter(|part| holders.has(part.agent)).collect();
        let own = kept.iter().find(|part| part.id == id);
        let others = kept.iter().filter(|part| part.id != id);
        let needed = usize::from(stripe.pages);
        if stripe.phase == Phase::Lost || own.is_none() && kept.len() < needed {
            return Read::Lost;
        }
        if let Some(own) = own.filter(|own| askable.has(own.agent)) {
            return Read::At(*own);
        }
        let asked = others.filter(|part| askable.has(part.agent)).take(needed);
        let asked: Vec<Part> = asked.copied().collect();
        if asked.len() == needed { Read::Decode(needed, asked) } else { Read::Later }
    }

    /// Live pages that are lost.
    pub fn lost(&self, placements: &Placements) -> impl Iterator<Item = ContentId> {
        let stripes = self
            .stripes
            .iter()
            .filter(|(_, stripe)| self.is_beyond_parity(placements, stripe.placement));
        let ids = stripes.flat_map(|(&id, stripe)| self.shape.contents(id, stripe.pages));
        ids.filter(|&id| self.read(placements, id, AgentSet::EMPTY) == Read::Lost)
    }

    /// How many of those are of no stripe of which others can be read, or could be: nothing is left to be done for them.
    pub fn given_up(&self) -> u64 {
        self.given_up
    }

    /// Whether more agents of a set have lost their parts than there is parity.
    fn is_beyond_parity(&self, placements: &Placements, placement: PlacementId) -> bool {
        let lost = placements.members(placement).without(placements.agents(placement));
        lost.len() as usize > self.shape.parity()
    }

    /// Parts that their agents may forget, since their stripes are gone.
    pub fn take_discards(&mut self) -> Vec<Part> {
        std::mem::take(&mut self.discards)
    }

    /// Live pages, but for those that were found to be lost.
    pub fn live(&self) -> u64 {
        self.live
    }

    /// Parts that agents have, or may have, other than those in [`Stripes::take_discards`]: the memory that is taken, in pages. Those that an agent has lost are
    /// counted until their stripes are gone.
    pub fn parts(&self) -> u64 {
        self.parts
    }

    /// The most that they have been.
    pub fn parts_peak(&self) -> u64 {
        self.parts_peak
    }

    /// Parts of one agent, but for those that it has lost.
    pub fn held_by(&self, agent: AgentId) -> u64 {
        self.held.get(&agent).copied().unwrap_or(0)
    }

    /// The agent has lost every part that was dealt to it before, of which [`Placements::lose`] was told.
    pub fn lose(&mut self, agent: AgentId) {
        self.held.remove(&agent);
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.stripes.len()
    }

    /// Whether there is no stripe.
    pub fn is_empty(&self) -> bool {
        self.stripes.is_empty()
    }

    fn enter(&mut self, number: StripeId, phase: Phase) {
        let Some(stripe) = self.stripes.get_mut(&number) else { return };
        let before = std::mem::replace(stripe, Stripe { phase, ..*stripe });
        let after = *stripe;
        self.closing.replace(self.shape, number, Some(&before), Some(&after));
    }

    /// No live page is left that could be read: its agents may forget all parts.
    fn give_up(&mut self, placements: &Placements, number: StripeId) {
        self.enter(number, Phase::Lost);
        if let Some(stripe) = self.stripes.get(&number).copied() {
            self.given_up += u64::from(stripe.live.count_ones());
            self.forget(placements, number, &stripe);
        }
    }

    fn end_if_dead(&mut self, placements: &Placements, number: StripeId) {
        if self.stripes.get(&number).is_some_and(|stripe| stripe.live == 0) {
            self.end(placements, number);
        }
    }

    fn end(&mut self, placements: &Placements, number: StripeId) {
        let Some(stripe) = self.stripes.remove(&number) else { return };
        self.closing.replace(self.shape, number, Some(&stripe), None);
        // Of what is lost no part is left since that was found.
        if stripe.phase != Phase::Lost {
            self.forget(placements, number, &stripe);
        }
    }

    /// No part is of use any more: each agent that has not lost its own may forget it. One that was restarted while a part was on its way may have got it since.
    fn forget(&mut self, placements: &Placements, number: StripeId, stripe: &Stripe) {
        self.live -= u64::from(stripe.live.count_ones());
        let members = placements.members(stripe.placement);
        let holders = placements.agents(stripe.placement);
        self.parts -= self.shape.contents(number, stripe.pages).count() as u64;
        let parts = self.shape.contents(number, stripe.pages);
        let parts = parts.filter_map(|id| self.shape.part(id, members));
        let was_written = !matches!(stripe.phase, Phase::Writing { .. });
        for part in parts {
            let is_held = holders.has(part.agent);
            if is_held {
                self.held.entry(part.agent).and_modify(|held| *held -= 1);
            }
            if is_held || !was_written {
                self.discards.push(part);
            }
        }
    }
}

#[cfg(test)]
mod tests;
