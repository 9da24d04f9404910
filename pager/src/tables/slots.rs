//! The slots of the write-back buffer, as they are and as they are written down.

use std::ops::{Deref, Index, IndexMut};

use gms_policy::eviction::Mark;
use gms_policy::ids::{ContentId, SpaceId};
use gms_policy::redundancy::{AgentSet, PlacementId};

use super::{Owner, Place};
use crate::page_map::{Content, PageMap};

/// More slots than any binary has.
pub(crate) const SLOTS_MAX: u32 = 1 << 16;
/// Words of a slot that is written down.
pub(super) const SLOT_WORDS: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Free,
    /// The MOVE is to come or under way, or a marker could not be left yet. Left by `finish_evict`.
    Leaving,
    /// The bytes are in the buffer. Left by `start_write` or `deal`, or when no owner is left.
    Ready,
    /// A part of a stripe that is being written. Left by `answered`, when each of its agents has answered.
    Dealt(PlacementId),
    /// Written to these agents. Left by `written`, when each has answered.
    Sent {
        placement: PlacementId,
        to: AgentSet,
        /// Those of them that may have it.
        reached: AgentSet,
        unanswered: AgentSet,
        stored: AgentSet,
    },
}

pub(super) struct Slot {
    pub(super) phase: Phase,
    /// The pages whose bytes these are: one, or several after forks.
    pub(super) owners: Vec<Owner>,
    /// The agent's copy of the page before it changed.
    pub(super) kept: Option<Content>,
    /// Whether the entry said that the page was only there.
    pub(super) was_remote: bool,
    /// The space whose outbox it goes to, and where in that, while it leaves.
    pub(super) outbox: SpaceId,
    pub(super) place: u32,
    /// Whether all its addresses had markers when it was written down, or none, while it leaves; `None` if some had.
    pub(super) had_markers: Option<bool>,
    /// Whether children forked while it leaves do not inherit it.
    pub(super) private: bool,
    /// When the page went out.
    pub(super) mark: Mark,
    pub(super) id: ContentId,
    pub(super) hash: u64,
    /// Whether it is among those that have changed.
    has_changed: bool,
}

const LEAVING: u64 = 1;
const READY: u64 = 2;
const SENT: u64 = 3;
const WAS_REMOTE: u64 = 1 << 8;
const PRIVATE: u64 = 1 << 9;
const MARKED: u64 = 1 << 10;
const SOME_MARKED: u64 = 1 << 11;
const MARK_SHIFT: u32 = 16;

impl Slot {
    fn free() -> Slot {
        Slot {
            phase: Phase::Free,
            owners: Vec::new(),
            kept: None,
            was_remote: false,
            outbox: SpaceId(0),
            place: 0,
            had_markers: Some(false),
            private: false,
            mark: Mark::COLD,
            id: ContentId(0),
            hash: 0,
            has_changed: false,
        }
    }

    /// All but its owners, whose entries name it. Of a page that is being written: that it may be at some agents, of whom none counts.
    fn words(&self) -> [u64; SLOT_WORDS] {
        let (phase, reached) = match self.phase {
            Phase::Free => return [0; SLOT_WORDS],
            Phase::Leaving => (LEAVING, AgentSet::EMPTY),
            Phase::Ready | Phase::Dealt(_) => (READY, AgentSet::EMPTY),
            Phase::Sent { reached, .. } => (SENT, reached),
        };
        let flag = |is_set: bool, bit: u64| if is_set { bit } else { 0 };
        let is_marked = phase == LEAVING && self.owners.iter().all(|owner| owner.marked);
        let is_some = phase == LEAVING && self.owners.iter().any(|owner| owner.marked);
        let flags = flag(self.was_remote, WAS_REMOTE)
            | flag(self.private, PRIVATE)
            | flag(is_marked, MARKED)
            | flag(is_some, SOME_MARKED);
        let kept = self.kept.map_or([0; 2], PageMap::words_of);
        let first = phase | flags | self.mark.bits() << MARK_SHIFT;
        let (outbox, place) = (self.outbox.0, self.place.into());
        [first, self.hash, kept[0], kept[1], self.id.0, reached.bits(), place, outbox]
    }
}

/// A page that was being written when the process died.
pub(super) struct Unknown {
    pub(super) id: ContentId,
    /// Who may have it.
    pub(super) reached: AgentSet,
}

/// The slots, of which whoever changes one need not write it down himself.
pub(super) struct Slots {
    slots: Vec<Slot>,
    changed: Vec<u32>,
}

impl Slots {
    /// Free ones.
    pub(super) fn new(count: u32) -> Slots {
        Slots { slots: (0..count).map(|_| Slot::free()).collect(), changed: Vec::new() }
    }

    /// Whether the slot has changed since it was written down.
    pub(super) fn has_changed(&self, index: u32) -> bool {
        self.slots[index as usize].has_changed
    }

    /// Owners are not written down, so that a slot that another owner comes to has not changed.
    pub(super) fn owners_mut(&mut self) -> impl Iterator<Item = (&Phase, &mut Vec<Owner>)> {
        self.slots.iter_mut().map(|slot| (&slot.phase, &mut slot.owners))
    }

    /// Writes down what has changed: words of a slot and where they belong, among those of all slots.
    #[inline]
    pub(super) fn write(&mut self, mut each: impl FnMut(usize, &[u64])) {
        for index in self.changed.drain(..) {
            let slot = &mut self.slots[index as usize];
            slot.has_changed = false;
            let words = slot.words();
            // Of a free one the rest is not read.
            let read = if slot.phase == Phase::Free { 1 } else { SLOT_WORDS };
            each(index as usize * SLOT_WORDS, &words[..read]);
        }
    }

    /// Reads one that was written down; `None` if it is none.
    pub(super) fn read(
        &mut self,
        index: u32,
        words: &[u64],
        map: &PageMap,
    ) -> Option<Option<Unknown>> {
        let slot = self.slots.get_mut(index as usize)?;
        let &[first, hash, kept_word, kept_hash, id, reached, place, outbox] = words else {
            return None;
        };
        slot.phase = match first & 7 {
            0 => return Some(None),
            LEAVING => Phase::Leaving,
            READY | SENT => Phase::Ready,
            _ => return None,
        };
        (slot.was_remote, slot.private) = (first & WAS_REMOTE != 0, first & PRIVATE != 0);
        let (is_marked, is_some) = (first & MARKED != 0, first & SOME_MARKED != 0);
        slot.had_markers = (is_marked || !is_some).then_some(is_marked);
        (slot.mark, slot.hash, slot.id) =
            (Mark::from_bits(first >> MARK_SHIFT), hash, ContentId(id));
        slot.kept = map.content_of_words([kept_word, kept_hash]);
        (slot.outbox, slot.place) = (SpaceId(outbox), place as u32);
        let unknown = Unknown { id: slot.id, reached: AgentSet::from_bits(reached) };
        Some((first & 7 == SENT).then_some(unknown))
    }

    /// The page belongs to the slot, which is not free; `None` if it is.
    pub(super) fn own(&mut self, index: u32, place: Place) -> Option<()> {
        let slot = self.slots.get_mut(index as usize).filter(|slot| slot.phase != Phase::Free)?;
        let marked = slot.phase != Phase::Leaving || slot.had_markers == Some(true);
        slot.owners.push(Owner { place, marked });
        Some(())
    }
}

impl Deref for Slots {
    type Target = [Slot];

    fn deref(&self) -> &[Slot] {
        &self.slots
    }
}

impl Index<usize> for Slots {
    type Output = Slot;

    #[inline]
    fn index(&self, index: usize) -> &Slot {
        &self.slots[index]
    }
}

impl IndexMut<usize> for Slots {
    #[inline]
    fn index_mut(&mut self, index: usize) -> &mut Slot {
        let slot = &mut self.slots[index];
        if !slot.has_changed {
            slot.has_changed = true;
            self.changed.push(index as u32);
        }
        slot
    }
}
