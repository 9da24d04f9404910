//! The page map: 16 bytes for each page that the pager holds something about, in a memfd.
//!
//! Chunks of [`CHUNK_PAGES`] entries lie one behind the other; behind them lies which chunk covers which addresses of which space: a space has
//! *shelves* of 1 GiB of addresses, a shelf has chunks. A forked space begins with the shelves of its parent: shelf and chunk are copied
//! when one of those who share them changes an entry ([`PageMap::put`]). So a fork, an exit and an unmap take time by the GiB, not by the page, and a move
//! of memory by the chunk ([`PageMap::shift`]).
//!
//! The memory tells all that the map knows, as of the last [`PageMap::commit`], whenever the process dies ([`PageMap::recover`]); beside it there are only
//! counts and indexes. A chunk that is on no shelf, and has entries, waits to be buried.
//!
//! An entry says by a number which agents hold the page ([`Placements`]), so that the loss of an agent changes no entry. The content id is unique for the
//! life of the workload, so that it can serve as the nonce of a per-workload AEAD key.

mod recover;
mod shelves;
mod words;

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;

use gms_policy::eviction::Mark;
use gms_policy::ids::{ContentId, PageAddr, SpaceId};
use gms_policy::redundancy::{AgentSet, PlacementId, Placements};
use nix::sys::memfd::{MFdFlags, memfd_create};
use zerocopy::FromBytes;

use self::shelves::{SHELF_WORDS, ShelfId, Shelves, USES_WORDS, covered, shelf_of};
use crate::arena::Arena;

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Entries of a chunk: 2 MiB of address space.
pub const CHUNK_PAGES: u64 = 512;
/// Address space that a chunk covers, in bytes.
const CHUNK_SPAN: u64 = CHUNK_PAGES * PAGE;
/// Address space that a shelf covers, in bytes.
const SHELF_SPAN: u64 = 512 * CHUNK_SPAN;
/// Most chunks: 2 TiB of tracked memory, shared chunks counted once. The memfd is sparse, so that this costs nothing until it is used.
pub const CHUNKS_MAX: u32 = 1 << 20;
const WARM_MAX: usize = 64;
/// Chunks at which [`PageMap::not_away`] looks: a few microseconds.
const CHUNKS_JUDGED: u64 = 64;
const CHUNK_LEN: usize = CHUNK_PAGES as usize * size_of::<Entry>();
const CHUNK_WORDS: usize = CHUNK_PAGES as usize * ENTRY_WORDS;
const ENTRY_WORDS: usize = 2;

/// Where a page is, as far as the pager knows. (A page without an entry is the kernel's: resident, or never touched.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Nothing is known: resident and dirty, or never touched. A fault gives zeros.
    Empty,
    /// In the write-back buffer (or on its way there) at this slot; left when an agent has it.
    Slot(u32),
    /// At an agent only.
    Remote(Content),
    /// Resident, and the agent still has the copy it was installed from.
    Kept(Content),
}

/// A page's bytes at agents. Contents of one id are the same.
#[derive(Clone, Copy, Debug)]
pub struct Content {
    /// Name of the bytes.
    pub id: ContentId,
    /// Number of the set of agents that hold them.
    pub placement: PlacementId,
    /// Those agents that have all of them, as of the look at the page map: some may have lost them since. With parity it is one, or none.
    pub holders: AgentSet,
    /// Checksum (XXH3-64 under the workload's secret seed).
    pub hash: u64,
}

impl PartialEq for Content {
    fn eq(&self, other: &Content) -> bool {
        self.id == other.id
    }
}

impl Eq for Content {}

/// Entry as stored: bits 0..3 state, 3..13 placement, 13..20 mark, 20..64 content id or slot; then the checksum.
#[derive(Clone, Copy, Default, FromBytes)]
#[repr(C)]
struct Entry {
    word: u64,
    hash: u64,
}
const _: () = assert!(size_of::<Entry>() == ENTRY_WORDS * 8, "16 bytes a page are promised");

const TAGS: u64 = 7;
const SLOT: u64 = 1;
const REMOTE: u64 = 2;
const KEPT: u64 = 3;
const PLACEMENT_SHIFT: u32 = 3;
const MARK_SHIFT: u32 = PLACEMENT_SHIFT + PlacementId::BITS;
const ID_SHIFT: u32 = MARK_SHIFT + Mark::BITS;
/// Largest content id that fits.
pub const CONTENT_ID_MAX: u64 = (1 << (u64::BITS - ID_SHIFT)) - 1;

impl Entry {
    fn encode(state: State, mark: Mark) -> Entry {
        let (tag, low, id, hash) = match state {
            State::Empty => return Entry::default(),
            State::Slot(slot) => (SLOT, 0, u64::from(slot), 0),
            State::Remote(c) => (REMOTE, c.placement.bits(), c.id.0, c.hash),
            State::Kept(c) => (KEPT, c.placement.bits(), c.id.0, c.hash),
        };
        let marked = tag | low << PLACEMENT_SHIFT | mark.bits() << MARK_SHIFT;
        Entry { word: marked | id << ID_SHIFT, hash }
    }

    fn is_slot(self) -> bool {
        self.word & TAGS == SLOT
    }

    fn is_away(self) -> bool {
        matches!(self.word & TAGS, SLOT | REMOTE)
    }

    fn mark(self) -> Mark {
        Mark::from_bits(self.word >> MARK_SHIFT)
    }

    fn has_content(self) -> bool {
        matches!(self.word & TAGS, REMOTE | KEPT)
    }

    /// Takes heat from a resident page whose copy is at an agent. False if there is none to be taken.
    fn cool(&mut self) -> bool {
        let mut mark = self.mark();
        let hot = self.word & TAGS == KEPT && mark.cool();
        if hot {
            self.word = (self.word & !(Mark::MASK << MARK_SHIFT)) | (mark.bits() << MARK_SHIFT);
        }
        hot
    }

    fn decode(self, placements: &Placements) -> State {
        let placement = PlacementId::from_bits(self.word >> PLACEMENT_SHIFT);
        let content = || {
            let id = ContentId(self.word >> ID_SHIFT);
            let holders = placements.holders(placement, id);
            Content { id, placement, holders, hash: self.hash }
        };
        match self.word & TAGS {
            SLOT => State::Slot((self.word >> ID_SHIFT) as u32),
            REMOTE => State::Remote(content()),
            KEPT => State::Kept(content()),
            _ => State::Empty,
        }
    }
}

/// What is known of a chunk besides its entries.
#[derive(Clone, Copy, Default)]
struct Header {
    /// Shelves which have it; 0 = free.
    owners: u32,
    /// Entries that are not empty.
    used: u16,
    /// Entries that name a slot.
    slots: u16,
    /// Entries whose page is not in memory.
    away: u16,
    /// Whether it was allocated after the last commit, so that nothing refers to it that was committed: its entries need no notes.
    is_new: bool,
}

/// A chunk, by its number.
pub type Chunk = u32;

/// What a space has given up, for [`PageMap::bury`].
#[derive(Debug)]
pub struct Grave(Remains);

#[derive(Debug)]
enum Remains {
    /// The shelf, and the first address that it covers.
    Shelf(ShelfId, u64),
    Chunk(Chunk),
}

/// What the map has no room left for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// Chunks.
    Pages,
    /// Shelves, or uses of them.
    Addresses,
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Full::Pages => "the page map is full (2 TiB): raise --local, or run less at a time",
            Full::Addresses => {
                "the page map is full (1 PiB of addresses of all processes together): run fewer processes at a time"
            }
        })
    }
}

/// The map of every space of a workload.
pub struct PageMap {
    /// Chunks, shelves, and who uses those.
    memory: Arena,
    shelves: Shelves,
    headers: Vec<Header>,
    /// First addresses of chunks that name slots, of any space, and how many chunks there do.
    slotted: BTreeMap<u64, u32>,
    /// Free chunks without memory.
    free: Vec<Chunk>,
    /// Free chunks that still have theirs, at most [`WARM_MAX`]: pages that go out and come back use the same few again and again.
    warm: Vec<Chunk>,
    /// Free after the next commit, and whether their entries are empty.
    freed: Vec<(Chunk, bool)>,
    /// Those that were allocated after the last commit.
    new: Vec<Chunk>,
    limit: u32,
    /// Who holds the pages.
    pub placements: Placements,
    /// Entries that are `Slot` or `Remote`, in shared chunks counted once.
    away: u64,
}

/// Words of a map of `limit` chunks: those, as many shelves, and uses.
const fn words_of(limit: u32) -> usize {
    limit as usize * (CHUNK_WORDS + SHELF_WORDS) + USES_WORDS
}

impl PageMap {
    /// An empty map of `limit` chunks at most, beside which there are some words ([`PageMap::beside`]).
    pub fn new(limit: u32, beside: usize) -> io::Result<PageMap> {
        let file = File::from(memfd_create("gms-page-map", MFdFlags::MFD_CLOEXEC)?);
        Ok(PageMap::of(Arena::of(file, words_of(limit) + beside)?, limit))
    }

    /// A map that knows nothing of what is in the memory.
    fn of(memory: Arena, limit: u32) -> PageMap {
        PageMap {
            memory,
            shelves: Shelves::new(limit as usize * CHUNK_WORDS, limit),
            headers: Vec::new(),
            slotted: BTreeMap::new(),
            free: Vec::new(),
            warm: Vec::new(),
            freed: Vec::new(),
            new: Vec::new(),
            limit,
            placements: Placements::default(),
            away: 0,
        }
    }

    /// All that was done since the last commit is done: what died before would have left none of it.
    #[inline]
    pub fn commit(&mut self) {
        if self.memory.has_changed() || !self.freed.is_empty() || !self.new.is_empty() {
            self.commit_changes();
        }
    }

    /// See [`Arena::commits`].
    #[cfg(test)]
    pub(crate) fn commits(&self) -> usize {
        self.memory.commits()
    }

    fn commit_changes(&mut self) {
        self.memory.commit();
        self.shelves.commit();
        for chunk in self.new.drain(..) {
            self.headers[chunk as usize].is_new = false;
        }
        for (chunk, is_empty) in std::mem::take(&mut self.freed) {
            if is_empty && self.warm.len() < WARM_MAX {
                self.warm.push(chunk);
            } else {
                let start = chunk as usize * CHUNK_WORDS;
                self.memory.clear(start..start + CHUNK_WORDS);
                self.free.push(chunk);
            }
        }
    }

    /// Writes words beside the map, which are committed with it.
    #[inline]
    pub(crate) fn write_beside(&mut self, at: usize, words: &[u64]) {
        let start = words_of(self.limit) + at;
        words.iter().enumerate().for_each(|(n, &word)| self.memory.set(start + n, word));
    }

    /// Words beside the map: 0, or as they were written.
    pub(crate) fn beside(&self, range: Range<usize>) -> &[u64] {
        let start = words_of(self.limit);
        self.memory.words(start + range.start..start + range.end)
    }

    /// Whether there is no room left for pages that go out. What is left is for forks and changes of the address space, which cannot be refused.
    pub fn is_full(&self) -> bool {
        is_scarce(self.chunks_used(), self.limit) || self.shelves.are_scarce()
    }

    fn chunks_used(&self) -> u32 {
        (self.headers.len() - self.free.len() - self.warm.len() - self.freed.len()) as u32
    }

    /// Memory of the map, in bytes.
    pub fn bytes(&self) -> u64 {
        u64::from(self.chunks_used()) * (CHUNK_LEN + size_of::<Header>()) as u64
    }

    /// What is known of a page.
    pub fn get(&self, space: SpaceId, page: PageAddr) -> State {
        self.entry(space, page).decode(&self.placements)
    }

    /// The same with the page's mark, which is zero if nothing is known.
    pub fn get_marked(&self, space: SpaceId, page: PageAddr) -> (State, Mark) {
        let entry = self.entry(space, page);
        (entry.decode(&self.placements), entry.mark())
    }

    /// Pages that are not in the workload's memory, in all spaces together.
    pub fn away(&self) -> u64 {
        self.away
    }

    fn entry(&self, space: SpaceId, page: PageAddr) -> Entry {
        let Some(chunk) = self.find(space, page.get()) else { return Entry::default() };
        self.entries(chunk)[slot_of(page.get())]
    }

    /// Sets what is known of a page, for this space alone. Returns the chunk that was copied for it, if one was: each of its contents has another
    /// reference.
    pub fn put(
        &mut self,
        space: SpaceId,
        page: PageAddr,
        state: State,
        mark: Mark,
    ) -> Result<Option<Chunk>, Full> {
        let entry = Entry::encode(state, mark);
        let base = page.get() & !(CHUNK_SPAN - 1);
        let shelf = self.shelves.shelf(space, base);
        let found = self.find(space, base);
        let knows = |chunk: Chunk| self.entries(chunk)[slot_of(page.get())].word != 0;
        if state == State::Empty && !found.is_some_and(knows) {
            return Ok(None);
        }
        let alone = shelf.is_some_and(|shelf| self.shelves.is_alone(shelf));
        match found {
            Some(chunk) if alone && self.headers[chunk as usize].owners == 1 => {
                self.set(space, page, chunk, entry);
                Ok(None)
            }
            shared => {
                if !self.shelves.can_own(space, base) {
                    return Err(Full::Addresses);
                }
                let own = self.allocate()?;
                let shelf = self.own_shelf(space, base);
                if let Some(shared) = shared {
                    self.copy(base, shared, own);
                }
                self.shelves.set(&mut self.memory, shelf, base, Some(own));
                self.set(space, page, own, entry);
                Ok(shared)
            }
        }
    }

    /// A space leaves a chunk to others, of which `own` becomes a copy.
    fn copy(&mut self, base: u64, shared: Chunk, own: Chunk) {
        let at = |chunk: Chunk| chunk as usize * CHUNK_WORDS;
        self.memory.copy_fresh(at(shared)..at(shared) + CHUNK_WORDS, at(own));
        self.headers[shared as usize].owners -= 1;
        let copied = Header { owners: 1, is_new: true, ..self.headers[shared as usize] };
        self.headers[own as usize] = copied;
        self.away += u64::from(copied.away);
        if copied.slots > 0 {
            *self.slotted.entry(base).or_default() += 1;
        }
    }

    /// The shelf of the space, for it alone. There is room for one.
    fn own_shelf(&mut self, space: SpaceId, base: u64) -> ShelfId {
        let headers = &mut self.headers;
        // A copy has each chunk, too.
        let share = |chunk: Chunk| headers[chunk as usize].owners += 1;
        self.shelves.own(&mut self.memory, space, base, share)
    }

    /// Sets an entry of a chunk that the space has for itself.
    fn set(&mut self, space: SpaceId, page: PageAddr, chunk: Chunk, entry: Entry) {
        let was = self.entries(chunk)[slot_of(page.get())];
        let (at, is_new) = (entry_at(chunk, page), self.headers[chunk as usize].is_new);
        let mut write = |at, word| match is_new {
            true => self.memory.set_fresh(at, word),
            false => self.memory.set(at, word),
        };
        // Nobody reads the checksum of another.
        if entry.has_content() {
            write(at + 1, entry.hash);
        }
        write(at, entry.word);
        self.away = self.away + u64::from(entry.is_away()) - u64::from(was.is_away());
        let header = &mut self.headers[chunk as usize];
        assert_eq!(header.owners, 1, "a shared chunk was changed");
        let count = |set: bool| u16::from(set);
        header.used = header.used + count(entry.word != 0) - count(was.word != 0);
        header.away = header.away + count(entry.is_away()) - count(was.is_away());
        let slots = header.slots;
        header.slots = header.slots + count(entry.is_slot()) - count(was.is_slot());
        let (now, empty) = (header.slots, header.used == 0);
        let base = page.get() & !(CHUNK_SPAN - 1);
        match (slots, now) {
            (0, 1..) => *self.slotted.entry(base).or_default() += 1,
            (1.., 0) => self.unslot(base),
            _ => {}
        }
        if empty && let Some(shelf) = self.shelves.shelf(space, base) {
            self.shelves.set(&mut self.memory, shelf, base, None);
            self.shelves.drop_empty(&mut self.memory, space, base);
            self.headers[chunk as usize] = Header::default();
            self.freed.push((chunk, true));
        }
    }

    fn unslot(&mut self, base: u64) {
        if let Some(chunks) = self.slotted.get_mut(&base) {
            *chunks -= 1;
            if *chunks == 0 {
                self.slotted.remove(&base);
            }
        }
    }

    /// The next part of the range that is worth a look for pages in memory: without the chunks of which every page is away. Of a long range only the
    /// beginning is judged: if nothing is left of that, the part is empty and ends where to go on.
    pub fn not_away(&self, space: SpaceId, range: Range<u64>) -> Range<u64> {
        let is_away = |base: u64| {
            let chunk = self.find(space, base);
            chunk.is_some_and(|chunk| u64::from(self.headers[chunk as usize].away) == CHUNK_PAGES)
        };
        let limit = range.start.saturating_add(CHUNKS_JUDGED * CHUNK_SPAN).min(range.end);
        let first = range.start & !(CHUNK_SPAN - 1);
        let mut bases = (first..limit).step_by(CHUNK_SPAN as usize);
        let Some(start) = bases.find(|&base| !is_away(base)) else { return limit..limit };
        let end = bases.find(|&base| is_away(base)).unwrap_or(range.end);
        start.max(range.start)..end
    }

    /// Cools each of these pages that is `Kept`; returns the others, and those without heat.
    pub fn cool(&mut self, space: SpaceId, pages: &[PageAddr]) -> Vec<PageAddr> {
        let mut cold = Vec::new();
        let base = |page: &PageAddr| page.get() & !(CHUNK_SPAN - 1);
        for pages in pages.chunk_by(|a, b| base(a) == base(b)) {
            let Some(chunk) = self.find(space, pages[0].get()) else {
                cold.extend(pages);
                continue;
            };
            // A chunk that is shared after a fork is cooled for all who have it: marks are but hints.
            for &page in pages {
                let mut entry = self.entries(chunk)[slot_of(page.get())];
                match entry.cool() {
                    true => self.memory.set_hint(entry_at(chunk, page), entry.word),
                    false => cold.push(page),
                }
            }
        }
        cold
    }

    /// Every page of `range` about which something is known, in address order.
    pub fn known(&self, space: SpaceId, range: Range<u64>) -> Vec<(PageAddr, State)> {
        let mut found = Vec::new();
        self.visit(space, range, |page, state| {
            found.push((page, state));
            true
        });
        found
    }

    /// Whether anything is known of the range.
    pub fn knows(&self, space: SpaceId, range: Range<u64>) -> bool {
        let mut known = false;
        self.visit(space, range, |_, _| {
            known = true;
            false
        });
        known
    }

    /// Calls `each` for every known page of `range` in address order until it returns false.
    pub fn visit(
        &self,
        space: SpaceId,
        range: Range<u64>,
        mut each: impl FnMut(PageAddr, State) -> bool,
    ) {
        for (base, shelf) in self.shelves.covering(space, range.clone()) {
            for (base, chunk) in self.shelves.chunks(&self.memory, base, shelf, range.clone()) {
                let first = range.start.saturating_sub(base).div_ceil(PAGE).min(CHUNK_PAGES);
                let last = (range.end - base).div_ceil(PAGE).min(CHUNK_PAGES);
                let entries = &self.entries(chunk)[first as usize..last as usize];
                // Most of a chunk may be empty: what is behind its last entry is not looked at.
                let mut left = self.headers[chunk as usize].used;
                for (address, entry) in (base + first * PAGE..).step_by(PAGE as usize).zip(entries)
                {
                    if entry.word == 0 {
                        continue;
                    }
                    if !each(PageAddr::containing(address), entry.decode(&self.placements)) {
                        return;
                    }
                    left -= 1;
                    if left == 0 {
                        break;
                    }
                }
            }
        }
    }

    // ---- whole chunks

    /// `child`, of which nothing is known, begins with the shelves of `parent`.
    pub fn fork(&mut self, parent: SpaceId, child: SpaceId) -> Result<(), Full> {
        self.shelves.fork(&mut self.memory, parent, child)
    }

    /// Takes the chunks of a space away that lie within the range and name no slot. The caller buries them.
    pub fn take(&mut self, space: SpaceId, range: Range<u64>) -> Vec<Grave> {
        let Range { start, end } = whole_chunks(&range);
        let known: Vec<u64> =
            self.shelves.covering(space, start..end).map(|(base, _)| base).collect();
        let mut taken = Vec::new();
        for base in known {
            let covered = covered(base);
            let whole = start <= base && covered.end <= end;
            if whole && self.slotted.range(covered.clone()).next().is_none() {
                let shelf = self.shelves.take(&mut self.memory, space, base);
                taken.extend(shelf.map(|shelf| Grave(Remains::Shelf(shelf, base))));
            } else {
                self.take_chunks(space, start.max(base)..end.min(covered.end), &mut taken);
            }
        }
        taken
    }

    /// The same of one shelf.
    fn take_chunks(&mut self, space: SpaceId, range: Range<u64>, taken: &mut Vec<Grave>) {
        let Some(shelf) = self.shelves.shelf(space, range.start) else { return };
        let chunks = self.shelves.chunks(&self.memory, shelf_of(range.start), shelf, range.clone());
        let free_of_slots = |&(_, chunk): &(u64, Chunk)| self.headers[chunk as usize].slots == 0;
        let gone: Vec<(u64, Chunk)> = chunks.filter(free_of_slots).collect();
        // Without room for a copy they stay. An entry alone cannot be emptied then either.
        if gone.is_empty() || !self.shelves.can_own(space, range.start) {
            return;
        }
        let shelf = self.own_shelf(space, range.start);
        for (base, _) in &gone {
            self.shelves.set(&mut self.memory, shelf, *base, None);
        }
        self.shelves.drop_empty(&mut self.memory, space, range.start);
        taken.extend(gone.into_iter().map(|(_, chunk)| Grave(Remains::Chunk(chunk))));
    }

    /// Moves the chunks of a space that lie within the range, name no slot and have none of the pages `but`, to the addresses from `to` on, where nothing
    /// is known. Those that cannot be moved so, and the rest of the range, stay: their entries go one by one.
    pub fn shift(
        &mut self,
        space: SpaceId,
        range: Range<u64>,
        to: u64,
        but: impl Iterator<Item = PageAddr>,
    ) {
        if (range.start ^ to) & (CHUNK_SPAN - 1) != 0 {
            return;
        }
        let whole = whole_chunks(&range);
        let shelves = self.shelves.covering(space, whole.clone());
        let chunks = shelves.flat_map(|(base, shelf)| {
            self.shelves.chunks(&self.memory, base, shelf, whole.clone())
        });
        let stays: HashSet<u64> = but.map(|page| page.get() & !(CHUNK_SPAN - 1)).collect();
        let goes = |&(base, chunk): &(u64, Chunk)| {
            self.headers[chunk as usize].slots == 0 && !stays.contains(&base)
        };
        for (base, chunk) in chunks.filter(goes).collect::<Vec<_>>() {
            self.move_chunk(space, (base, chunk), base - range.start + to);
        }
    }

    /// Moves one, if there is room. Whoever shares it has it where it was.
    fn move_chunk(&mut self, space: SpaceId, (from, chunk): (u64, Chunk), to: u64) {
        if self.find(space, to).is_some() || !self.shelves.can_own(space, from) {
            return;
        }
        let source = self.own_shelf(space, from);
        // The copy of a shelf may have taken the room.
        if !self.shelves.can_own(space, to) {
            return;
        }
        let target = self.own_shelf(space, to);
        self.shelves.set(&mut self.memory, target, to, Some(chunk));
        self.shelves.set(&mut self.memory, source, from, None);
        self.shelves.drop_empty(&mut self.memory, space, from);
    }

    /// Lets what was taken away go. If nobody else has it, calls `each` for every entry and frees the chunk; of a shelf that comes later: its
    /// chunks are returned.
    pub fn bury(&mut self, grave: Grave, mut each: impl FnMut(State)) -> Vec<Grave> {
        let chunk = match grave.0 {
            Remains::Chunk(chunk) => chunk,
            Remains::Shelf(shelf, _) if !self.shelves.let_go(shelf) => return Vec::new(),
            Remains::Shelf(shelf, base) => {
                let chunks = self.shelves.chunks(&self.memory, base, shelf, covered(base));
                return chunks.map(|(_, chunk)| Grave(Remains::Chunk(chunk))).collect();
            }
        };
        let header = &mut self.headers[chunk as usize];
        if header.owners > 1 {
            header.owners -= 1;
            return Vec::new();
        }
        self.states(chunk).for_each(&mut each);
        self.release(chunk);
        Vec::new()
    }

    /// The entries of a chunk.
    pub fn states(&self, chunk: Chunk) -> impl Iterator<Item = State> + '_ {
        self.entries(chunk).iter().map(|entry| entry.decode(&self.placements))
    }

    fn find(&self, space: SpaceId, address: u64) -> Option<Chunk> {
        self.shelves.chunk(&self.memory, space, address)
    }

    /// A chunk of empty entries with one owner.
    fn allocate(&mut self) -> Result<Chunk, Full> {
        let header = Header { owners: 1, is_new: true, ..Header::default() };
        let chunk = match self.warm.pop().or_else(|| self.free.pop()) {
            Some(chunk) => chunk,
            None if self.headers.len() as u32 >= self.limit => return Err(Full::Pages),
            None => {
                self.headers.push(header);
                self.headers.len() as Chunk - 1
            }
        };
        self.headers[chunk as usize] = header;
        self.new.push(chunk);
        Ok(chunk)
    }

    /// Frees a chunk; after the next commit its memory is given back, which empties its entries.
    fn release(&mut self, chunk: Chunk) {
        self.away -= u64::from(self.headers[chunk as usize].away);
        self.headers[chunk as usize] = Header::default();
        self.freed.push((chunk, false));
    }

    fn entries(&self, chunk: Chunk) -> &[Entry] {
        let start = chunk as usize * CHUNK_WORDS;
        self.memory.slice(start..start + CHUNK_WORDS)
    }
}

/// Whether pages that go out may use no more of something: the rest is for what cannot be refused.
fn is_scarce(used: u32, limit: u32) -> bool {
    used + limit / 16 >= limit
}

/// The part of a range that consists of whole chunks; it ends before it begins if there is none.
fn whole_chunks(range: &Range<u64>) -> Range<u64> {
    let start = range.start.div_ceil(CHUNK_SPAN).saturating_mul(CHUNK_SPAN);
    start..range.end & !(CHUNK_SPAN - 1)
}

/// Where the entry of a page is in the memory: its word, and then the checksum.
fn entry_at(chunk: Chunk, page: PageAddr) -> usize {
    chunk as usize * CHUNK_WORDS + slot_of(page.get()) * ENTRY_WORDS
}

fn slot_of(address: u64) -> usize {
    ((address / PAGE) % CHUNK_PAGES) as usize
}

#[cfg(test)]
mod tests;
