//! Stripes as words, for who goes on with them: a number, and the rest in a second word.

use std::collections::BTreeMap;

use super::closing::Closing;
use super::{Phase, Stripe, Stripes};
use crate::ids::AgentId;
use crate::redundancy::{PlacementId, Placements};
use crate::shape::{Shape, StripeId};

/// Where in the second word things are; the number of the set is in the lowest bits.
const LIVE_AT: u32 = 16;
const PAGES_AT: u32 = 32;
const PHASE_AT: u32 = 40;
const _: () = assert!(PlacementId::BITS <= LIVE_AT);

/// Numbers beyond this are no stripes', whatever their shape.
const NUMBER_MAX: u64 = u64::MAX >> 8;

/// Phases that are told of, by their numbers.
const PHASES: [Phase; 4] = [Phase::Safe, Phase::Closing, Phase::Stuck, Phase::Lost];

impl Stripes {
    /// All of them as words, for [`Stripes::from_words`]. None may be being written, and no part may wait to be forgotten: of those nothing is told.
    pub fn words(&self) -> Vec<u64> {
        let pairs = self.stripes.iter().filter_map(|(id, stripe)| {
            let phase = PHASES.iter().position(|phase| *phase == stripe.phase)? as u64;
            let (live, pages) = (u64::from(stripe.live), u64::from(stripe.pages));
            let rest = live << LIVE_AT | pages << PAGES_AT | phase << PHASE_AT;
            Some([id.0, stripe.placement.bits() | rest])
        });
        [self.next.0, self.parts_peak].into_iter().chain(pairs.flatten()).collect()
    }

    /// What [`Stripes::words`] has told of stripes at these sets; `None` of other words. So many numbers are left out, so that none is used again that
    /// whoever told it may have used since.
    pub fn from_words(words: &[u64], placements: &Placements, skipped: u64) -> Option<Stripes> {
        let (&[next, parts_peak], pairs) = words.split_first_chunk()?;
        let mut stripes = Stripes { parts_peak, ..Stripes::new(placements.shape()?) };
        stripes.next = StripeId(next.checked_add(skipped).filter(|next| *next <= NUMBER_MAX)?);
        let pair = |pair: &[u64]| {
            let (&[id, rest], true) = (pair.first_chunk()?, pair[0] < next) else { return None };
            Some((StripeId(id), stripe(stripes.shape, placements, rest)?))
        };
        let pairs = pairs.chunks(2).map(|words| (words.len() == 2).then(|| pair(words))?);
        stripes.stripes = pairs.collect::<Option<BTreeMap<_, _>>>()?;
        stripes.count(placements);
        Some(stripes)
    }

    /// Counts what is counted of each.
    fn count(&mut self, placements: &Placements) {
        self.closing = Closing::default();
        for (&id, stripe) in &self.stripes {
            self.closing.replace(self.shape, id, None, Some(stripe));
            let live = u64::from(stripe.live.count_ones());
            if stripe.phase == Phase::Lost {
                self.given_up += live;
                continue;
            }
            self.live += live;
            let members = placements.members(stripe.placement);
            let holders = placements.agents(stripe.placement);
            for part in self.shape.contents(id, stripe.pages) {
                self.parts += 1;
                let part = self.shape.part(part, members).map(|part| part.agent);
                let holder: Option<AgentId> = part.filter(|&agent| holders.has(agent));
                holder.into_iter().for_each(|agent| *self.held.entry(agent).or_default() += 1);
            }
        }
    }
}

/// A stripe, if the word is of one.
fn stripe(shape: Shape, placements: &Placements, word: u64) -> Option<Stripe> {
    let placement = PlacementId::from_bits(word);
    let (live, pages) = ((word >> LIVE_AT) as u16, (word >> PAGES_AT) as u8);
    let phase = *PHASES.get(usize::try_from(word >> PHASE_AT).ok()?)?;
    let members = placements.members(placement).len() as usize;
    let fits = members <= shape.parts() && (1..=shape.data_at(members)).contains(&pages.into());
    // One that fits has no more pages than can be shifted by.
    let is_one = fits && live != 0 && u32::from(live) >> pages == 0;
    is_one.then_some(Stripe { placement, live, pages, phase })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redundancy::AgentSet;
    use crate::stripes::Answer;
    use proptest::prelude::*;

    fn words() -> (Vec<u64>, Placements) {
        let shape = Shape::new(2, 1).expect("a shape");
        let (mut stripes, mut placements) = (Stripes::new(shape), Placements::striped(shape));
        for agents in [[0, 1, 2], [1, 2, 3]] {
            let members: AgentSet = agents.into_iter().map(AgentId).collect();
            let (_, parts) = stripes.deal(&mut placements, members, 2).expect("a stripe");
            for part in parts {
                stripes.answered(&mut placements, part.id, Answer::Stored);
            }
        }
        (stripes.words(), placements)
    }

    proptest! {
        #[test]
        fn other_words_are_refused_or_of_stripes_that_can_be(
            at in 0..6usize, bit in 0..64u32, cut in 0..6usize
        ) {
            let (mut words, placements) = words();
            prop_assert_eq!(words.len(), 6);
            let cut = &words[..cut];
            prop_assert!(cut.len() % 2 == 0 || Stripes::from_words(cut, &placements, 1).is_none());
            words[at] ^= 1 << bit;
            let Some(stripes) = Stripes::from_words(&words, &placements, 1) else { return Ok(()) };
            for (id, stripe) in &stripes.stripes {
                prop_assert!(*id < stripes.next && stripe.live != 0 && stripe.pages <= 2);
            }
            prop_assert!(stripes.live() <= 4 && stripes.parts() <= 6);
        }
    }
}
