//! Which chunk covers which addresses of which space: shelves of 512 chunks, and who uses them.
//!
//! Shelves and uses lie in the page map's memory; what is kept beside it is counted and found anew from there. A shelf is an array of chunks' numbers, counted
//! from 1; a use is a space, counted from 1, and in one word the first address that the shelf covers there and the shelf's number. 0 is none.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use gms_policy::ids::SpaceId;

use super::{CHUNK_SPAN, Chunk, Full, SHELF_SPAN, is_scarce};
use crate::arena::Arena;

/// Chunks of a shelf.
const CHUNKS: usize = (SHELF_SPAN / CHUNK_SPAN) as usize;
/// Words of a shelf.
pub(super) const SHELF_WORDS: usize = CHUNKS / 2;
/// Words of a use.
const USE_WORDS: usize = 2;
/// Most uses: a thousand processes of a tebibyte each.
const USES_MAX: u32 = 1 << 20;
/// Words of all of them.
pub(super) const USES_WORDS: usize = USES_MAX as usize * USE_WORDS;

/// A shelf, by its number.
pub(super) type ShelfId = u32;

#[derive(Clone, Copy, Debug)]
struct Use {
    /// Its place among the uses.
    at: u32,
    shelf: ShelfId,
}

#[derive(Clone, Copy, Default)]
struct Header {
    /// Uses, and graves; 0 = free.
    owners: u32,
    /// Chunks that are there.
    chunks: u16,
}

/// See the module's documentation.
pub(super) struct Shelves {
    /// Where the shelves begin in the memory, and how many there can be. The uses follow.
    start: usize,
    limit: u32,
    headers: Vec<Header>,
    free: Vec<ShelfId>,
    /// Free after the next commit.
    freed: Vec<ShelfId>,
    index: BTreeMap<SpaceId, BTreeMap<u64, Use>>,
    /// Uses that there have been at once, and those of them that are free.
    uses: u32,
    free_uses: Vec<u32>,
    /// [`USES_MAX`], but for tests.
    pub(super) uses_max: u32,
}

impl Shelves {
    /// None.
    pub(super) fn new(start: usize, limit: u32) -> Shelves {
        Shelves {
            start,
            limit,
            headers: Vec::new(),
            free: Vec::new(),
            freed: Vec::new(),
            index: BTreeMap::new(),
            uses: 0,
            free_uses: Vec::new(),
            uses_max: USES_MAX,
        }
    }

    /// Those in the memory. Calls `each` for every chunk of every shelf.
    pub(super) fn of(
        memory: &Arena,
        start: usize,
        limit: u32,
        mut each: impl FnMut(u64, Chunk),
    ) -> io::Result<Shelves> {
        let odd = || io::Error::from(io::ErrorKind::InvalidData);
        let mut shelves = Shelves::new(start, limit);
        // What has memory need not be empty, though nobody uses it.
        let filled = memory.filled(start..shelves.use_at(0))?;
        let known = filled.last().map_or(0, |part| (part.end - start).div_ceil(SHELF_WORDS));
        shelves.headers.resize(known, Header::default());
        let first = shelves.use_at(0);
        for part in memory.filled(first..first + USES_WORDS)? {
            for at in part.step_by(USE_WORDS) {
                let &[space, place] = memory.words(at..at + USE_WORDS) else { unreachable!() };
                let at = ((at - first) / USE_WORDS) as u32;
                if space == 0 {
                    continue;
                }
                shelves.free_uses.extend(shelves.uses..at);
                shelves.uses = at + 1;
                let (base, shelf) = (shelf_of(place), (place % SHELF_SPAN) as ShelfId);
                // It has a chunk, so it has memory.
                if shelf as usize >= known {
                    return Err(odd());
                }
                if shelves.headers[shelf as usize].owners == 0 {
                    let chunks = shelves.chunks(memory, base, shelf, covered(base));
                    let count = chunks.map(|(base, chunk)| each(base, chunk)).count();
                    shelves.headers[shelf as usize].chunks = count as u16;
                }
                shelves.headers[shelf as usize].owners += 1;
                let space = SpaceId(space - 1);
                shelves.index.entry(space).or_default().insert(base, Use { at, shelf });
            }
        }
        let is_free = |shelf: &ShelfId| shelves.headers[*shelf as usize].owners == 0;
        shelves.free = (0..shelves.headers.len() as ShelfId).filter(is_free).collect();
        Ok(shelves)
    }

    // ---- what is there

    /// The shelf that covers the address.
    pub(super) fn shelf(&self, space: SpaceId, address: u64) -> Option<ShelfId> {
        self.index.get(&space)?.get(&shelf_of(address)).map(|used| used.shelf)
    }

    /// The chunk that covers the address.
    pub(super) fn chunk(&self, memory: &Arena, space: SpaceId, address: u64) -> Option<Chunk> {
        let shelf = self.shelf(space, address)?;
        self.numbers(memory, shelf)[index_of(address)].checked_sub(1)
    }

    /// Whether nobody else has the shelf.
    pub(super) fn is_alone(&self, shelf: ShelfId) -> bool {
        self.headers[shelf as usize].owners == 1
    }

    /// The spaces.
    pub(super) fn spaces(&self) -> impl Iterator<Item = SpaceId> + '_ {
        self.index.keys().copied()
    }

    /// The shelves of a space that cover any of the range, each with its first address.
    pub(super) fn covering(
        &self,
        space: SpaceId,
        range: Range<u64>,
    ) -> impl Iterator<Item = (u64, ShelfId)> + '_ {
        let shelves = self.index.get(&space).filter(|_| !range.is_empty());
        let within = shelves.map(|shelves| shelves.range(shelf_of(range.start)..range.end));
        within.into_iter().flatten().map(|(&base, used)| (base, used.shelf))
    }

    /// Of a shelf, whose first address is `base`, the chunks that cover any of the range, each with its first address.
    pub(super) fn chunks<'a>(
        &self,
        memory: &'a Arena,
        base: u64,
        shelf: ShelfId,
        range: Range<u64>,
    ) -> impl Iterator<Item = (u64, Chunk)> + use<'a> {
        let first = range.start.saturating_sub(base) / CHUNK_SPAN;
        let last = range.end.saturating_sub(base).div_ceil(CHUNK_SPAN).min(CHUNKS as u64);
        let numbers = self.numbers(memory, shelf);
        let chunk = move |index: u64| {
            let chunk = numbers[index as usize].checked_sub(1)?;
            Some((base + index * CHUNK_SPAN, chunk))
        };
        (first..last).filter_map(chunk)
    }

    fn numbers<'a>(&self, memory: &'a Arena, shelf: ShelfId) -> &'a [u32] {
        let at = self.shelf_at(shelf);
        memory.slice(at..at + SHELF_WORDS)
    }

    fn shelf_at(&self, shelf: ShelfId) -> usize {
        self.start + shelf as usize * SHELF_WORDS
    }

    fn use_at(&self, at: u32) -> usize {
        self.start + self.limit as usize * SHELF_WORDS + at as usize * USE_WORDS
    }

    // ---- changes

    /// Whether a space can have the shelf that covers the address for itself.
    pub(super) fn can_own(&self, space: SpaceId, address: u64) -> bool {
        match self.shelf(space, address) {
            Some(shelf) => self.is_alone(shelf) || self.has_shelf(),
            None => self.has_shelf() && self.has_uses(1),
        }
    }

    /// Whether pages that go out may have no more of them.
    pub(super) fn are_scarce(&self) -> bool {
        let shelves = self.headers.len() - self.free.len() - self.freed.len();
        let uses = self.uses - self.free_uses.len() as u32;
        is_scarce(shelves as u32, self.limit) || is_scarce(uses, self.uses_max)
    }

    fn has_shelf(&self) -> bool {
        !self.free.is_empty() || (self.headers.len() as u32) < self.limit
    }

    fn has_uses(&self, uses: usize) -> bool {
        self.free_uses.len() + (self.uses_max - self.uses) as usize >= uses
    }

    /// The shelf of a space, for it alone. There is room for one. Calls `each` for every chunk that the space shares with others from now on.
    pub(super) fn own(
        &mut self,
        memory: &mut Arena,
        space: SpaceId,
        address: u64,
        each: impl FnMut(Chunk),
    ) -> ShelfId {
        let base = shelf_of(address);
        let used = self.index.get(&space).and_then(|shelves| shelves.get(&base)).copied();
        match used {
            Some(used) if self.is_alone(used.shelf) => used.shelf,
            Some(used) => {
                let own = self.allocate();
                let from = self.shelf_at(used.shelf);
                memory.copy_fresh(from..from + SHELF_WORDS, self.shelf_at(own));
                self.chunks(memory, base, own, covered(base))
                    .map(|(_, chunk)| chunk)
                    .for_each(each);
                self.headers[own as usize].chunks = self.headers[used.shelf as usize].chunks;
                self.headers[used.shelf as usize].owners -= 1;
                self.use_shelf(memory, space, base, Use { shelf: own, ..used });
                own
            }
            None => {
                let own = self.allocate_empty(memory);
                let at = self.allocate_use();
                self.use_shelf(memory, space, base, Use { at, shelf: own });
                own
            }
        }
    }

    /// A shelf with one owner, on which anything may be.
    fn allocate(&mut self) -> ShelfId {
        let header = Header { owners: 1, chunks: 0 };
        if let Some(shelf) = self.free.pop() {
            self.headers[shelf as usize] = header;
            return shelf;
        }
        self.headers.push(header);
        self.headers.len() as ShelfId - 1
    }

    /// An empty one.
    fn allocate_empty(&mut self, memory: &mut Arena) -> ShelfId {
        let shelf = self.allocate();
        let at = self.shelf_at(shelf);
        memory.empty_fresh(at..at + SHELF_WORDS);
        shelf
    }

    fn allocate_use(&mut self) -> u32 {
        self.free_uses.pop().unwrap_or_else(|| {
            self.uses += 1;
            self.uses - 1
        })
    }

    fn use_shelf(&mut self, memory: &mut Arena, space: SpaceId, base: u64, used: Use) {
        let at = self.use_at(used.at);
        memory.set(at, space.0 + 1);
        memory.set(at + 1, base | u64::from(used.shelf));
        self.index.entry(space).or_default().insert(base, used);
    }

    /// Sets which chunk covers an address on a shelf that a space has for itself.
    pub(super) fn set(
        &mut self,
        memory: &mut Arena,
        shelf: ShelfId,
        address: u64,
        chunk: Option<Chunk>,
    ) {
        let index = index_of(address);
        let (at, shift) = (self.shelf_at(shelf) + index / 2, index % 2 * 32);
        let word = memory.words(at..at + 1)[0];
        let number = chunk.map_or(0, |chunk| chunk + 1);
        let header = &mut self.headers[shelf as usize];
        debug_assert_eq!(header.owners, 1, "a shared shelf was changed");
        header.chunks =
            header.chunks + u16::from(number > 0) - u16::from((word >> shift) as u32 > 0);
        memory.set(at, word & !(u64::from(u32::MAX) << shift) | u64::from(number) << shift);
    }

    /// The shelf leaves the space, if nothing is there.
    pub(super) fn drop_empty(&mut self, memory: &mut Arena, space: SpaceId, address: u64) {
        let shelf = self.shelf(space, address);
        if shelf.is_some_and(|shelf| self.headers[shelf as usize].chunks == 0)
            && let Some(shelf) = self.take(memory, space, shelf_of(address))
        {
            self.let_go(shelf);
        }
    }

    /// The shelf leaves the space, but keeps its owner, which has to let it go.
    pub(super) fn take(
        &mut self,
        memory: &mut Arena,
        space: SpaceId,
        base: u64,
    ) -> Option<ShelfId> {
        let shelves = self.index.get_mut(&space)?;
        let used = shelves.remove(&base)?;
        if shelves.is_empty() {
            self.index.remove(&space);
        }
        let at = self.use_at(used.at);
        memory.set(at, 0);
        self.free_uses.push(used.at);
        Some(used.shelf)
    }

    /// One owner less; true if it was the last.
    pub(super) fn let_go(&mut self, shelf: ShelfId) -> bool {
        let header = &mut self.headers[shelf as usize];
        header.owners -= 1;
        if header.owners == 0 {
            self.freed.push(shelf);
        }
        header.owners == 0
    }

    /// `child`, which has none, uses the shelves of `parent`.
    pub(super) fn fork(
        &mut self,
        memory: &mut Arena,
        parent: SpaceId,
        child: SpaceId,
    ) -> Result<(), Full> {
        let Some(shelves) = self.index.get(&parent).cloned() else { return Ok(()) };
        if !self.has_uses(shelves.len()) {
            return Err(Full::Addresses);
        }
        for (base, Use { shelf, .. }) in shelves {
            let at = self.allocate_use();
            self.headers[shelf as usize].owners += 1;
            self.use_shelf(memory, child, base, Use { at, shelf });
        }
        Ok(())
    }

    // ---- as told

    /// A shelf with these chunks, which has one owner; `None` if there is no room for it.
    pub(super) fn add(&mut self, memory: &mut Arena, chunks: &[(u64, Chunk)]) -> Option<ShelfId> {
        let shelf = self.has_shelf().then(|| self.allocate_empty(memory))?;
        chunks.iter().for_each(|&(base, chunk)| self.set(memory, shelf, base, Some(chunk)));
        Some(shelf)
    }

    /// A shelf has one more owner.
    pub(super) fn share(&mut self, shelf: ShelfId) {
        self.headers[shelf as usize].owners += 1;
    }

    /// The space is one of the shelf's owners; `None` if that cannot be.
    pub(super) fn add_use(
        &mut self,
        memory: &mut Arena,
        space: SpaceId,
        base: u64,
        shelf: ShelfId,
    ) -> Option<()> {
        let is_possible = space.0 < u64::MAX && base == shelf_of(base) && self.has_uses(1);
        let at = is_possible.then(|| self.allocate_use())?;
        self.use_shelf(memory, space, base, Use { at, shelf });
        Some(())
    }

    /// What was given up can be used anew.
    pub(super) fn commit(&mut self) {
        self.free.append(&mut self.freed);
    }
}

/// The first address that is on the same shelf.
pub(super) fn shelf_of(address: u64) -> u64 {
    address & !(SHELF_SPAN - 1)
}

/// The addresses that a shelf covers whose first is `base`.
pub(super) fn covered(base: u64) -> Range<u64> {
    base..base.saturating_add(SHELF_SPAN)
}

fn index_of(address: u64) -> usize {
    (address % SHELF_SPAN / CHUNK_SPAN) as usize
}
