//! The page map: 16 bytes for each page that the pager holds something about, in a memfd.
//!
//! Chunks of [`CHUNK_PAGES`] entries lie one behind the other; an index says which chunk covers which addresses of which space: a space has
//! *shelves* of 1 GiB of addresses, a shelf has chunks. A forked space begins with the shelves of its parent: shelf and chunk are copied
//! when one of those who share them changes an entry ([`PageMap::put`]). So a fork, an exit and an unmap take time by the GiB, not by the page.
//!
//! An entry says by a number which agents hold the page ([`Placements`]), so that the loss of an agent changes no entry. The content id is unique for the
//! life of the workload, so that it can serve as the nonce of a per-workload AEAD key.

mod words;

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use gms_policy::eviction::Mark;
use gms_policy::ids::{ContentId, PageAddr, SpaceId};
use gms_policy::redundancy::{AgentSet, PlacementId, Placements};
use memmap2::{MmapMut, UncheckedAdvice};
use nix::sys::memfd::{MFdFlags, memfd_create};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

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
/// Chunks that eviction leaves to changes of the address space, which cannot be refused.
const CHUNKS_KEPT: u32 = CHUNKS_MAX / 16;
const WARM_MAX: usize = 64;
/// Chunks at which [`PageMap::not_away`] looks: a few microseconds.
const CHUNKS_JUDGED: u64 = 64;
const CHUNK_LEN: usize = CHUNK_PAGES as usize * size_of::<Entry>();

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
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Entry {
    word: u64,
    hash: u64,
}
const _: () = assert!(size_of::<Entry>() == 16, "16 bytes a page are promised");

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
}

/// A chunk, by its number.
pub type Chunk = u32;

/// Chunks by the first address that they cover.
type Shelf = BTreeMap<u64, Chunk>;

/// What a space has given up, for [`PageMap::bury`].
#[derive(Debug)]
pub struct Grave(Remains);

#[derive(Debug)]
enum Remains {
    Shelf(Arc<Shelf>),
    Chunk(Chunk),
}

/// The map has no room left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// The map of every space of a workload.
pub struct PageMap {
    /// Of the memory.
    file: File,
    memory: MmapMut,
    headers: Vec<Header>,
    index: BTreeMap<SpaceId, BTreeMap<u64, Arc<Shelf>>>,
    /// First addresses of chunks that name slots, of any space, and how many chunks there do.
    slotted: BTreeMap<u64, u32>,
    /// Free chunks without memory.
    free: Vec<Chunk>,
    /// Free chunks that still have theirs, at most [`WARM_MAX`]: pages that go out and come back use the same few again and again.
    warm: Vec<Chunk>,
    limit: u32,
    /// Who holds the pages.
    pub placements: Placements,
    /// Entries that are `Slot` or `Remote`, in shared chunks counted once.
    away: u64,
}

impl PageMap {
    /// An empty map of `limit` chunks at most.
    pub fn new(limit: u32) -> std::io::Result<PageMap> {
        let file = File::from(memfd_create("gms-page-map", MFdFlags::MFD_CLOEXEC)?);
        file.set_len(u64::from(limit) * CHUNK_LEN as u64)?;
        PageMap::of(file, limit)
    }

    /// The same, whose entries are those in the file.
    fn of(file: File, limit: u32) -> std::io::Result<PageMap> {
        // SAFETY: the memfd is ours alone; nobody else maps, writes or truncates it while this mapping lives.
        let memory = unsafe { MmapMut::map_mut(&file)? };
        let (headers, free, warm) = (Vec::new(), Vec::new(), Vec::new());
        let (index, slotted) = (BTreeMap::new(), BTreeMap::new());
        let placements = Placements::default();
        let away = 0;
        Ok(PageMap { file, memory, headers, index, slotted, free, warm, limit, placements, away })
    }

    /// Whether there is no room left for pages that go out. What is left is for changes of the address space.
    pub fn is_full(&self) -> bool {
        self.chunks_used() + CHUNKS_KEPT.min(self.limit / 16) >= self.limit
    }

    fn chunks_used(&self) -> u32 {
        (self.headers.len() - self.free.len() - self.warm.len()) as u32
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
        let shelf = self.index.get(&space).and_then(|shelves| shelves.get(&shelf_of(base)));
        let found = shelf.and_then(|shelf| shelf.get(&base)).copied();
        let knows = |chunk: Chunk| self.entries(chunk)[slot_of(page.get())].word != 0;
        if state == State::Empty && !found.is_some_and(knows) {
            return Ok(None);
        }
        let alone = shelf.is_some_and(|shelf| Arc::strong_count(shelf) == 1);
        match found {
            Some(chunk) if alone && self.headers[chunk as usize].owners == 1 => {
                self.set(space, page, chunk, entry);
                Ok(None)
            }
            shared => {
                let own = self.allocate()?;
                if let Some(shared) = shared {
                    self.copy(space, base, shared, own);
                }
                self.own_shelf(space, base).insert(base, own);
                self.set(space, page, own, entry);
                Ok(shared)
            }
        }
    }

    /// The space leaves a chunk to others, of which `own` becomes a copy.
    fn copy(&mut self, space: SpaceId, base: u64, shared: Chunk, own: Chunk) {
        self.own_shelf(space, base);
        let at = |chunk: Chunk| chunk as usize * CHUNK_LEN;
        self.memory.copy_within(at(shared)..at(shared) + CHUNK_LEN, at(own));
        self.headers[shared as usize].owners -= 1;
        let copied = Header { owners: 1, ..self.headers[shared as usize] };
        self.headers[own as usize] = copied;
        self.away += u64::from(copied.away);
        if copied.slots > 0 {
            *self.slotted.entry(base).or_default() += 1;
        }
    }

    /// The shelf of the space, for it alone.
    fn own_shelf(&mut self, space: SpaceId, base: u64) -> &mut Shelf {
        let shelf = self.index.entry(space).or_default().entry(shelf_of(base)).or_default();
        if Arc::strong_count(shelf) > 1 {
            // The copy has each chunk, too.
            shelf.values().for_each(|&chunk| self.headers[chunk as usize].owners += 1);
        }
        Arc::make_mut(shelf)
    }

    /// Sets an entry of a chunk that the space has for itself.
    fn set(&mut self, space: SpaceId, page: PageAddr, chunk: Chunk, entry: Entry) {
        let place = &mut self.entries_mut(chunk)[slot_of(page.get())];
        let was = std::mem::replace(place, entry);
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
        if empty {
            self.own_shelf(space, base).remove(&base);
            self.drop_empty_shelf(space, base);
            self.release_empty(chunk);
        }
    }

    fn drop_empty_shelf(&mut self, space: SpaceId, base: u64) {
        if let Some(shelves) = self.index.get_mut(&space)
            && shelves.get(&shelf_of(base)).is_some_and(|shelf| shelf.is_empty())
        {
            shelves.remove(&shelf_of(base));
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
            let entries = self.entries_mut(chunk);
            for &page in pages {
                let entry = &mut entries[slot_of(page.get())];
                if !entry.cool() {
                    cold.push(page);
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
        let Some(shelves) = self.index.get(&space) else { return };
        if range.is_empty() {
            return;
        }
        for shelf in shelves.range(shelf_of(range.start)..range.end).map(|(_, shelf)| shelf) {
            for (&base, &chunk) in shelf.range(range.start & !(CHUNK_SPAN - 1)..range.end) {
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
    pub fn fork(&mut self, parent: SpaceId, child: SpaceId) {
        let Some(shelves) = self.index.get(&parent).cloned() else { return };
        self.index.insert(child, shelves);
    }

    /// Takes the chunks of a space away that lie within the range and name no slot. The caller buries them.
    pub fn take(&mut self, space: SpaceId, range: Range<u64>) -> Vec<Grave> {
        let end = range.end & !(CHUNK_SPAN - 1);
        let start = range.start.div_ceil(CHUNK_SPAN).saturating_mul(CHUNK_SPAN);
        let Some(shelves) = self.index.get(&space).filter(|_| start < end) else {
            return Vec::new();
        };
        let known: Vec<u64> = shelves.range(shelf_of(start)..end).map(|(&base, _)| base).collect();
        let mut taken = Vec::new();
        for base in known {
            let covered = base..base.saturating_add(SHELF_SPAN);
            let whole = start <= base && covered.end <= end;
            if whole && self.slotted.range(covered.clone()).next().is_none() {
                let shelf = self.index.get_mut(&space).and_then(|shelves| shelves.remove(&base));
                taken.extend(shelf.map(|shelf| Grave(Remains::Shelf(shelf))));
            } else {
                self.take_chunks(space, start.max(base)..end.min(covered.end), &mut taken);
            }
        }
        if self.index.get(&space).is_some_and(BTreeMap::is_empty) {
            self.index.remove(&space);
        }
        taken
    }

    /// The same of one shelf.
    fn take_chunks(&mut self, space: SpaceId, range: Range<u64>, taken: &mut Vec<Grave>) {
        let Some(shelf) = self.index.get(&space).and_then(|s| s.get(&shelf_of(range.start))) else {
            return;
        };
        let free_of_slots = |&(_, &chunk): &(&u64, &Chunk)| self.headers[chunk as usize].slots == 0;
        let gone = shelf.range(range.clone()).filter(free_of_slots);
        let gone: Vec<(u64, Chunk)> = gone.map(|(&base, &chunk)| (base, chunk)).collect();
        if gone.is_empty() {
            return;
        }
        let shelf = self.own_shelf(space, range.start);
        for (base, _) in &gone {
            shelf.remove(base);
        }
        self.drop_empty_shelf(space, range.start);
        taken.extend(gone.into_iter().map(|(_, chunk)| Grave(Remains::Chunk(chunk))));
    }

    /// Lets what was taken away go. If nobody else has it, calls `each` for every entry and frees the chunk; of a shelf that comes later: its
    /// chunks are returned.
    pub fn bury(&mut self, grave: Grave, mut each: impl FnMut(State)) -> Vec<Grave> {
        let chunk = match grave.0 {
            Remains::Chunk(chunk) => chunk,
            Remains::Shelf(shelf) => {
                let chunks = Arc::into_inner(shelf).unwrap_or_default();
                return chunks.into_values().map(|chunk| Grave(Remains::Chunk(chunk))).collect();
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
        let shelf = self.index.get(&space)?.get(&shelf_of(address))?;
        shelf.get(&(address & !(CHUNK_SPAN - 1))).copied()
    }

    /// A chunk of empty entries with one owner.
    fn allocate(&mut self) -> Result<Chunk, Full> {
        let header = Header { owners: 1, ..Header::default() };
        if let Some(chunk) = self.warm.pop().or_else(|| self.free.pop()) {
            self.headers[chunk as usize] = header;
            return Ok(chunk);
        }
        if self.headers.len() as u32 >= self.limit {
            return Err(Full);
        }
        self.headers.push(header);
        Ok(self.headers.len() as Chunk - 1)
    }

    /// Frees a chunk whose entries are empty.
    fn release_empty(&mut self, chunk: Chunk) {
        if self.warm.len() < WARM_MAX {
            self.headers[chunk as usize] = Header::default();
            self.warm.push(chunk);
        } else {
            self.release(chunk);
        }
    }

    /// Frees a chunk and gives its memory back, which empties its entries.
    fn release(&mut self, chunk: Chunk) {
        self.away -= u64::from(self.headers[chunk as usize].away);
        self.headers[chunk as usize] = Header::default();
        let (offset, length) = (chunk as usize * CHUNK_LEN, CHUNK_LEN);
        // SAFETY: the range is within the mapping, and nothing refers to entries of a chunk that is free.
        let removed =
            unsafe { self.memory.unchecked_advise_range(UncheckedAdvice::Remove, offset, length) };
        if removed.is_err() {
            self.memory[offset..offset + length].fill(0);
        }
        self.free.push(chunk);
    }

    fn entries(&self, chunk: Chunk) -> &[Entry] {
        let start = chunk as usize * CHUNK_LEN;
        let bytes = &self.memory[start..start + CHUNK_LEN];
        <[Entry]>::ref_from_bytes(bytes).expect("chunks are aligned and a whole number of entries")
    }

    fn entries_mut(&mut self, chunk: Chunk) -> &mut [Entry] {
        let start = chunk as usize * CHUNK_LEN;
        let bytes = &mut self.memory[start..start + CHUNK_LEN];
        <[Entry]>::mut_from_bytes(bytes).expect("chunks are aligned and a whole number of entries")
    }
}

/// The first address that is on the same shelf.
fn shelf_of(address: u64) -> u64 {
    address & !(SHELF_SPAN - 1)
}

fn slot_of(address: u64) -> usize {
    ((address / PAGE) % CHUNK_PAGES) as usize
}

#[cfg(test)]
mod tests;
