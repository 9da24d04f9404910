//! Which stripes are closed, so that their live pages are dealt anew: those of which an agent has lost its part, or leaves with it; and, while dead pages take
//! too much memory, those with the fewest live pages.
//!
//! **The law**: if what is closing is dealt anew, K pages at a time but for the last, agents hold no more parts than [`PARTS_PERCENT_MAX`] percent of K+M for
//! each K live pages, and besides (K+M) x (K+[`PARTS_MORE_MAX`]).
//!
//! Why it holds. A stripe without dead pages takes (K+M)/K parts a page. What all take beyond that, their *waste*, is allowed to be 15 % and one stripe. If it is
//! more, some stripe is not full of live pages, and to deal anew the pages of as many such stripes as are in a batch makes fewer stripes, whose waste is that of
//! the one which is not full. Until a closing stripe has no live page it takes memory, and so do the copies of those that were dealt anew: what may be closing at
//! a time is bounded by a 32nd of all stripes, or K of them.
//!
//! Stripes are looked at in the order of their numbers, a few at a time, round and round: nothing but counters is kept to find them by.

use super::{Phase, Read, Stripe, Stripes};
use crate::ids::ContentId;
use crate::redundancy::{AgentSet, PlacementId, Placements};
use crate::shape::{DATA_MAX, StripeId};

/// Parts that agents hold at most, of those that hold as many live pages without a dead one, in percent.
pub const PARTS_PERCENT_MAX: u64 = 120;
/// See the module's documentation: for what is closing, and the stripe that is not full.
pub const PARTS_MORE_MAX: u64 = 2;

/// Waste that is allowed, in percent of the parts that hold as many live pages without a dead one.
const WASTE_PERCENT: u64 = 15;
/// One stripe of so many may be closing.
const CLOSING_PART: u64 = 32;
const _: () = assert!(
    100 + WASTE_PERCENT + PARTS_PERCENT_MAX / CLOSING_PART < PARTS_PERCENT_MAX,
    "what is closing has room beside the waste"
);

/// What is known of the stripes to choose from them.
#[derive(Clone, Debug, Default)]
pub(super) struct Closing {
    /// Safe stripes, by the number of their live pages.
    by_live: [u64; DATA_MAX + 1],
    /// Stripes that are closing.
    count: u64,
    /// Where the search goes on.
    from: StripeId,
}

impl Closing {
    /// A stripe has changed, or is gone.
    pub(super) fn replace(&mut self, before: Option<&Stripe>, after: Option<&Stripe>) {
        if let Some(count) = after.and_then(|after| self.count_of(after)) {
            *count += 1;
        }
        if let Some(count) = before.and_then(|before| self.count_of(before)) {
            *count -= 1;
        }
    }

    /// Where a stripe is counted.
    fn count_of(&mut self, stripe: &Stripe) -> Option<&mut u64> {
        match stripe.phase {
            Phase::Safe => Some(&mut self.by_live[stripe.live.count_ones() as usize]),
            Phase::Closing => Some(&mut self.count),
            Phase::Writing { .. } | Phase::Lost => None,
        }
    }

    /// The least number of live pages so that a batch of stripes has no more.
    fn fewest_live(&self, batch: u64) -> usize {
        let mut left = batch;
        let enough = self.by_live.iter().position(|&count| {
            left = left.saturating_sub(count);
            left == 0
        });
        enough.unwrap_or(DATA_MAX)
    }
}

/// Which stripes are to be closed now.
#[derive(Clone, Copy, Debug)]
struct Aim {
    /// Agents that leave.
    leaving: AgentSet,
    /// Those of sets that lack so many agents, if any: more than others do, but no more than there is parity.
    missing: usize,
    /// If there are none, those with no more live pages than this.
    live: usize,
    /// How many may be closing.
    most: u64,
}

impl Stripes {
    /// Looks at up to `look` stripes, where the last look has ended, and closes those that should be, as long as few are. Agents that leave are to have no part
    /// in the end; `able` agents take parts, K+M of them if there are as many. To be called again and again, also while stripes are closing.
    pub fn close(&mut self, placements: &Placements, leaving: AgentSet, able: usize, look: usize) {
        let Some(aim) = self.aim(placements, leaving, able) else { return };
        let from = self.closing.from;
        let round = self.stripes.range(from..).chain(self.stripes.range(..from));
        let seen: Vec<StripeId> = round.take(look).map(|(&id, _)| id).collect();
        self.closing.from = seen.last().map_or(from, |last| StripeId(last.0 + 1));
        // First those that are lost: they may have been closing, and make room.
        for &id in &seen {
            if self.next_phase(placements, id, &aim) == Some(Phase::Lost) {
                self.give_up(placements, id);
            }
        }
        for id in seen {
            match self.next_phase(placements, id, &aim) {
                Some(phase) if self.closing.count < aim.most => self.enter(id, phase),
                _ => {}
            }
        }
    }

    /// Whether a page is to be dealt anew.
    pub fn is_closing(&self, id: ContentId) -> bool {
        let stripe = self.stripes.get(&self.shape.stripe_of(id));
        stripe.is_some_and(|stripe| stripe.phase == Phase::Closing)
    }

    /// Stripes that are closing.
    pub fn closing(&self) -> u64 {
        self.closing.count
    }

    /// What to look for; `None` if nothing is to be found.
    fn aim(&self, placements: &Placements, leaving: AgentSet, able: usize) -> Option<Aim> {
        let batch = (self.stripes.len() as u64 / CLOSING_PART).max(self.shape.data() as u64);
        let room = batch.saturating_sub(self.closing.count);
        let (beyond, rest): (Vec<_>, Vec<_>) =
            placements.in_use().partition(|&set| self.is_beyond_parity(placements, set));
        let missing = rest.into_iter().map(|set| missing(placements, set, leaving)).max();
        let missing = missing.unwrap_or(0);
        let data = self.shape.data_at(able);
        let live = match missing == 0 && self.is_wasteful(data) {
            true => self.closing.fewest_live(room).min(data - 1),
            false => 0,
        };
        let is_due = room > 0 && (missing > 0 || live > 0) || !beyond.is_empty();
        is_due.then_some(Aim { leaving, missing, live, most: batch })
    }

    /// Whether dead pages, and stripes with few, take more than they may where stripes can have `data` pages.
    fn is_wasteful(&self, data: usize) -> bool {
        let (data, parts) = (data as u64, (data + self.shape.parity()) as u64);
        if data == 0 {
            return false;
        }
        let dense = parts * self.live;
        let waste = (data * self.parts).saturating_sub(dense);
        waste > dense * WASTE_PERCENT / 100 + parts * data
    }

    /// What a stripe becomes, if anything else.
    fn next_phase(&self, placements: &Placements, id: StripeId, aim: &Aim) -> Option<Phase> {
        let stripe = self.stripes.get(&id)?;
        let (Phase::Safe | Phase::Closing) = stripe.phase else { return None };
        let closes = if self.is_beyond_parity(placements, stripe.placement) {
            let is_left = |&id: &ContentId| {
                let read = self.read(placements, id, placements.agents(stripe.placement));
                !matches!(read, Read::Lost | Read::Unknown)
            };
            if !self.shape.contents(id, stripe.pages).any(|id| is_left(&id)) {
                return Some(Phase::Lost);
            }
            true
        } else if aim.missing > 0 {
            missing(placements, stripe.placement, aim.leaving) == aim.missing
        } else {
            stripe.live.count_ones() as usize <= aim.live
        };
        (closes && stripe.phase == Phase::Safe).then_some(Phase::Closing)
    }
}

/// Agents of a set that have lost their parts, or leave.
fn missing(placements: &Placements, set: PlacementId, leaving: AgentSet) -> usize {
    let staying = placements.agents(set).without(leaving);
    placements.members(set).without(staying).len() as usize
}
