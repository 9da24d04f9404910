//! Which stripes are closed, so that their live pages are dealt anew: those of which an agent has lost its part, or leaves with it; and, while dead pages take
//! too much memory, those with the fewest live pages.
//!
//! **The law**: if what is closing is dealt anew, K pages at a time but for the last, agents hold no more parts than [`PARTS_PERCENT_MAX`] percent of K+M for
//! each K live pages, and besides (K+M) x (K+[`PARTS_MORE_MAX`]).
//!
//! Why it holds. A stripe without dead pages takes (K+M)/K parts a page. What all take beyond that, their *waste*, is allowed to be 15 % and one stripe. If it is
//! more, some stripe is not full of live pages, and to deal anew the pages of as many such stripes as are in a batch makes fewer stripes, whose waste is that of
//! the one which is not full. Until a closing stripe has no live page it takes memory, and so do the copies of those that were dealt anew: what may be closing at
//! a time is bounded by a 32nd of all parts, or those of K full stripes.
//!
//! **Which first**: of the stripes that lack agents those of which the most parts cannot be read any more, and no others meanwhile: they are next to be lost.
//! But a stripe of which not all pages can be read now, with one agent lost and another away, keeps nobody waiting. What can be read of it is dealt anew; then
//! it is *stuck*, until somebody is back.
//!
//! Stripes are looked at in the order of their numbers, a few at a time, round and round: but for counters nothing is kept to find them by, other than the
//! numbers of those that are closing.

use super::{Phase, Read, Stripe, Stripes};
use crate::ids::ContentId;
use crate::redundancy::{AgentSet, PlacementId, Placements};
use crate::shape::{DATA_MAX, Shape, StripeId};
use std::collections::BTreeSet;

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
    pub(super) by_live: [u64; DATA_MAX + 1],
    /// Stripes that are closing.
    pub(super) stripes: BTreeSet<StripeId>,
    /// Their parts.
    pub(super) parts: u64,
    /// Where the search goes on.
    from: StripeId,
}

impl Closing {
    /// A stripe has changed, or is gone.
    pub(super) fn replace(
        &mut self,
        shape: Shape,
        id: StripeId,
        before: Option<&Stripe>,
        after: Option<&Stripe>,
    ) {
        let closes = |stripe: Option<&Stripe>| stripe.is_some_and(|s| s.phase == Phase::Closing);
        match (closes(before), closes(after)) {
            (false, true) => drop(self.stripes.insert(id)),
            (true, false) => drop(self.stripes.remove(&id)),
            _ => {}
        }
        after.into_iter().for_each(|after| self.count(shape, after, u64::wrapping_add));
        before.into_iter().for_each(|before| self.count(shape, before, u64::wrapping_sub));
    }

    /// Adds a stripe, or takes it away, where it is counted.
    fn count(&mut self, shape: Shape, stripe: &Stripe, by: fn(u64, u64) -> u64) {
        match stripe.phase {
            Phase::Safe => {
                let count = &mut self.by_live[stripe.live.count_ones() as usize];
                *count = by(*count, 1);
            }
            Phase::Closing => {
                let parts = usize::from(stripe.pages) + shape.parity();
                self.parts = by(self.parts, parts as u64);
            }
            Phase::Writing { .. } | Phase::Stuck | Phase::Lost => {}
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

/// What there is to know of the agents.
#[derive(Clone, Copy, Debug)]
pub struct AgentsNow {
    /// Those that can be asked.
    pub askable: AgentSet,
    /// Those that are to have no part in the end.
    pub leaving: AgentSet,
    /// How many take parts, K+M if there are as many or more.
    pub able: usize,
}

/// What a set of agents lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lack {
    /// 0 if it lacks none, 1 if all parts can be read though some are at agents that leave, and 1 more for each part that cannot: it is lost, or its agent
    /// leaves and cannot be asked.
    rank: usize,
    /// Whether each page can be read now.
    is_readable: bool,
}

/// Which stripes are to be closed now.
#[derive(Clone, Copy, Debug)]
struct Aim {
    agents: AgentsNow,
    /// Those of sets of this rank, if any has one: the greatest of those whose pages can all be read.
    rank: usize,
    /// If there are none, those with no more live pages than this.
    live: usize,
    /// How many parts may be of closing stripes.
    most: u64,
}

impl Stripes {
    /// Looks at up to `look` stripes, where the last look has ended, and closes those that should be, as long as few are. To be called again and again, also
    /// while stripes are closing.
    pub fn close(&mut self, placements: &Placements, agents: AgentsNow, look: usize) {
        let Some(aim) = self.aim(placements, agents) else { return };
        let from = self.closing.from;
        let round = self.stripes.range(from..).chain(self.stripes.range(..from));
        let seen: Vec<StripeId> = round.take(look).map(|(&id, _)| id).collect();
        self.closing.from = seen.last().map_or(from, |last| StripeId(last.0 + 1));
        let next = |&id: &StripeId| Some((id, self.next_phase(placements, id, &aim)?));
        let (closing, others): (Vec<_>, Vec<_>) =
            seen.iter().filter_map(next).partition(|&(_, phase)| phase == Phase::Closing);
        // They may have been closing, and make room.
        for (id, phase) in others {
            match phase {
                Phase::Lost => self.give_up(placements, id),
                phase => self.enter(id, phase),
            }
        }
        for (id, phase) in closing {
            if self.may_close(&aim) {
                self.enter(id, phase);
            }
        }
    }

    /// Whether there is room for another full stripe among those that are closing.
    fn may_close(&self, aim: &Aim) -> bool {
        self.closing.parts + self.shape.parts() as u64 <= aim.most
    }

    /// Whether a page is to be dealt anew.
    pub fn is_closing(&self, id: ContentId) -> bool {
        let stripe = self.stripes.get(&self.shape.stripe_of(id));
        stripe.is_some_and(|stripe| stripe.phase == Phase::Closing)
    }

    /// Stripes that are closing.
    pub fn closing(&self) -> u64 {
        self.closing.stripes.len() as u64
    }

    /// The last of those stripes that are closing which, with those before it, have no more live pages than that; `None` if the first has more, or none is closing.
    pub fn closing_within(&self, pages: usize) -> Option<StripeId> {
        let mut live = 0;
        let fits = |id: &&StripeId| {
            live += self.stripes.get(id).map_or(0, |stripe| stripe.live.count_ones() as usize);
            live <= pages
        };
        self.closing.stripes.iter().take_while(fits).last().copied()
    }

    /// What to look for; `None` if nothing is to be found.
    fn aim(&self, placements: &Placements, agents: AgentsNow) -> Option<Aim> {
        let full = self.shape.parts() as u64;
        let most = (self.parts / CLOSING_PART).max(self.shape.data() as u64 * full);
        let room = most.saturating_sub(self.closing.parts) / full;
        let lacks = placements.in_use().map(|set| self.lack(placements, set, agents));
        let (readable, others): (Vec<Lack>, Vec<Lack>) = lacks.partition(|lack| lack.is_readable);
        let rank = readable.into_iter().map(|lack| lack.rank).max().unwrap_or(0);
        let data = self.shape.data_at(agents.able);
        let live = match rank == 0 && self.is_wasteful(data) {
            true => self.closing.fewest_live(room).min(data - 1),
            false => 0,
        };
        let is_due = room > 0 && (rank > 0 || live > 0) || !others.is_empty();
        is_due.then_some(Aim { agents, rank, live, most })
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
        let (Phase::Safe | Phase::Closing | Phase::Stuck) = stripe.phase else { return None };
        let lack = self.lack(placements, stripe.placement, aim.agents);
        let any = |is_meant: fn(Read) -> bool| {
            let mut ids = self.shape.contents(id, stripe.pages);
            ids.any(|id| is_meant(self.read(placements, id, aim.agents.askable)))
        };
        let comes = |read| matches!(read, Read::At(_) | Read::Decode(..));
        let closes = match aim.rank {
            _ if stripe.phase == Phase::Closing => true,
            _ if !lack.is_readable && lack.rank > 0 => true,
            0 => stripe.live.count_ones() as usize <= aim.live,
            rank => lack.rank == rank,
        };
        let next = match lack.is_readable || any(comes) {
            true if closes => Phase::Closing,
            true => Phase::Safe,
            false if any(|read| read == Read::Later) => Phase::Stuck,
            false => Phase::Lost,
        };
        (next != stripe.phase).then_some(next)
    }

    /// What stripes of a set lack.
    fn lack(&self, placements: &Placements, set: PlacementId, agents: AgentsNow) -> Lack {
        let (members, kept) = (placements.members(set), placements.agents(set));
        let readable = kept.without(kept.without(agents.askable));
        let staying = kept.without(agents.leaving);
        let gone = members.without(staying.union(readable)).len() as usize;
        let rank = if staying == members { 0 } else { 1 + gone };
        let unread = members.without(readable).len() as usize;
        Lack { rank, is_readable: unread <= self.shape.parity() }
    }
}
