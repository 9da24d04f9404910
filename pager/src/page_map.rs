//! The page map: 16 bytes for each page that the supervisor holds something about, in a memfd.
//!
//! The layout is fixed and self-describing, so that a supervisor started anew can adopt the memfd: a superblock, then chunks of
//! [`CHUNK_PAGES`] entries, each behind a header which says what address range of which space it covers. The index over the chunks
//! is not stored; it is rebuilt from the headers.
//!
//! An entry has room for what comes later: `placement` numbers a *set* of locations (today: one agent), and the content id is
//! unique for the life of the workload, so that it can serve as the nonce of a per-workload AEAD key.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use gms_policy::eviction::{MARK_BITS, Mark};
use gms_policy::ids::{AgentId, ContentId, PageAddr, SpaceId};
use memmap2::MmapMut;
use nix::sys::memfd::{MFdFlags, memfd_create};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Entries of a chunk: 2 MiB of address space.
pub const CHUNK_PAGES: u64 = 512;
/// Address space that a chunk covers, in bytes.
const CHUNK_SPAN: u64 = CHUNK_PAGES * PAGE;
/// Most chunks: 2 TiB of tracked memory. The memfd is sparse, so that this costs nothing until it is used.
const CHUNKS_MAX: usize = 1 << 20;
const HEADER_LEN: usize = size_of::<ChunkHeader>();
const CHUNK_LEN: usize = HEADER_LEN + CHUNK_PAGES as usize * size_of::<Entry>();
const SUPERBLOCK_LEN: usize = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"gmsmap01");

/// Where a page is, as far as the supervisor knows. (A page without an entry is the kernel's: resident, or never touched.)
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

/// A page's bytes at an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    /// Name of the bytes.
    pub id: ContentId,
    /// Who holds them.
    pub agent: AgentId,
    /// Checksum (XXH3-64 under the workload's secret seed).
    pub hash: u64,
}

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
const MARK_SHIFT: u32 = 13;
const ID_SHIFT: u32 = MARK_SHIFT + MARK_BITS;
/// Largest content id that fits.
pub const CONTENT_ID_MAX: u64 = (1 << (u64::BITS - ID_SHIFT)) - 1;

impl Entry {
    fn encode(state: State, mark: Mark) -> Entry {
        let marked = |tag: u64| tag | u64::from(mark) << MARK_SHIFT;
        let pack = |tag: u64, c: Content| Entry {
            word: marked(tag) | u64::from(c.agent.0) << 3 | c.id.0 << ID_SHIFT,
            hash: c.hash,
        };
        match state {
            State::Empty => Entry::default(),
            State::Slot(slot) => {
                Entry { word: marked(SLOT) | u64::from(slot) << ID_SHIFT, hash: 0 }
            }
            State::Remote(content) => pack(REMOTE, content),
            State::Kept(content) => pack(KEPT, content),
        }
    }

    fn is_away(self) -> bool {
        matches!(self.word & TAGS, SLOT | REMOTE)
    }

    fn mark(self) -> Mark {
        (self.word >> MARK_SHIFT) as Mark & ((1 << MARK_BITS) - 1)
    }

    fn decode(self) -> State {
        let content = || Content {
            id: ContentId(self.word >> ID_SHIFT),
            agent: AgentId((self.word >> 3) as u8),
            hash: self.hash,
        };
        match self.word & TAGS {
            SLOT => State::Slot((self.word >> ID_SHIFT) as u32),
            REMOTE => State::Remote(content()),
            KEPT => State::Kept(content()),
            _ => State::Empty,
        }
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct ChunkHeader {
    /// Space + 1; 0 = free.
    owner: u32,
    /// Entries that are not empty.
    used: u32,
    /// First address covered.
    base: u64,
}

/// The map of every space of a workload.
pub struct PageMap {
    memory: MmapMut,
    index: HashMap<SpaceId, BTreeMap<u64, u32>>,
    free: Vec<u32>,
    next: u32,
    /// Entries that are `Slot` or `Remote`.
    away: u64,
}

impl PageMap {
    /// An empty map.
    pub fn new() -> std::io::Result<PageMap> {
        let file = std::fs::File::from(memfd_create("gms-page-map", MFdFlags::MFD_CLOEXEC)?);
        file.set_len((SUPERBLOCK_LEN + CHUNKS_MAX * CHUNK_LEN) as u64)?;
        // SAFETY: the memfd is ours alone; nobody else maps, writes or truncates it while this mapping lives.
        let mut memory = unsafe { MmapMut::map_mut(&file)? };
        memory[..8].copy_from_slice(&MAGIC.to_le_bytes());
        Ok(PageMap { memory, index: HashMap::new(), free: Vec::new(), next: 0, away: 0 })
    }

    /// What is known of a page.
    pub fn get(&self, space: SpaceId, page: PageAddr) -> State {
        self.entry(space, page).decode()
    }

    /// The page's mark; zero if nothing is known.
    pub fn mark(&self, space: SpaceId, page: PageAddr) -> Mark {
        self.entry(space, page).mark()
    }

    /// Pages that are not in the workload's memory, in all spaces together.
    pub fn away(&self) -> u64 {
        self.away
    }

    fn entry(&self, space: SpaceId, page: PageAddr) -> Entry {
        let Some(chunk) = self.find(space, page.get()) else { return Entry::default() };
        self.entries(chunk)[slot_of(page.get())]
    }

    /// Sets what is known of a page. False if the map is full, which changes nothing.
    #[must_use]
    pub fn set(&mut self, space: SpaceId, page: PageAddr, state: State, mark: Mark) -> bool {
        let chunk = match self.find(space, page.get()) {
            Some(chunk) => chunk,
            None if state == State::Empty => return true,
            None => match self.allocate(space, page.get() & !(CHUNK_SPAN - 1)) {
                Some(chunk) => chunk,
                None => return false,
            },
        };
        let (header, entries) = self.chunk_mut(chunk);
        let entry = &mut entries[slot_of(page.get())];
        let (was, is) = (entry.word != 0, state != State::Empty);
        let was_away = entry.is_away();
        *entry = Entry::encode(state, mark);
        let is_away = entry.is_away();
        header.used = header.used + u32::from(is) - u32::from(was);
        let unused = header.used == 0;
        self.away = self.away + u64::from(is_away) - u64::from(was_away);
        if unused {
            self.release(space, chunk);
        }
        true
    }

    /// Takes one from the mark of each of these pages that is `Kept` and has any; calls `cold` for the others.
    pub fn cool(&mut self, space: SpaceId, pages: &[PageAddr], mut cold: impl FnMut(PageAddr)) {
        let base = |page: &PageAddr| page.get() & !(CHUNK_SPAN - 1);
        for pages in pages.chunk_by(|a, b| base(a) == base(b)) {
            let Some(chunk) = self.find(space, pages[0].get()) else {
                pages.iter().for_each(|&page| cold(page));
                continue;
            };
            let (_, entries) = self.chunk_mut(chunk);
            for &page in pages {
                let entry = &mut entries[slot_of(page.get())];
                match entry.word & TAGS {
                    KEPT if entry.mark() > 0 => entry.word -= 1 << MARK_SHIFT,
                    _ => cold(page),
                }
            }
        }
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

    /// Calls `each` for every known page of `range` in address order until it returns false.
    pub fn visit(
        &self,
        space: SpaceId,
        range: Range<u64>,
        mut each: impl FnMut(PageAddr, State) -> bool,
    ) {
        let Some(index) = self.index.get(&space) else { return };
        if range.is_empty() {
            return;
        }
        for (&base, &chunk) in index.range(range.start & !(CHUNK_SPAN - 1)..range.end) {
            for (i, entry) in self.entries(chunk).iter().enumerate() {
                let address = base + i as u64 * PAGE;
                if entry.word != 0
                    && range.contains(&address)
                    && !each(PageAddr::containing(address), entry.decode())
                {
                    return;
                }
            }
        }
    }

    fn find(&self, space: SpaceId, address: u64) -> Option<u32> {
        self.index.get(&space)?.get(&(address & !(CHUNK_SPAN - 1))).copied()
    }

    fn allocate(&mut self, space: SpaceId, base: u64) -> Option<u32> {
        let chunk = match self.free.pop() {
            Some(chunk) => chunk,
            None if (self.next as usize) < CHUNKS_MAX => {
                self.next += 1;
                self.next - 1
            }
            None => return None,
        };
        let (header, _) = self.chunk_mut(chunk);
        *header = ChunkHeader { owner: space.0 + 1, used: 0, base };
        self.index.entry(space).or_default().insert(base, chunk);
        Some(chunk)
    }

    fn release(&mut self, space: SpaceId, chunk: u32) {
        let (header, _) = self.chunk_mut(chunk);
        header.owner = 0;
        let base = header.base;
        if let Some(index) = self.index.get_mut(&space) {
            index.remove(&base);
            if index.is_empty() {
                self.index.remove(&space);
            }
        }
        self.free.push(chunk);
    }

    fn entries(&self, chunk: u32) -> &[Entry] {
        let start = SUPERBLOCK_LEN + chunk as usize * CHUNK_LEN + HEADER_LEN;
        let bytes = &self.memory[start..start + CHUNK_LEN - HEADER_LEN];
        <[Entry]>::ref_from_bytes(bytes).expect("chunks are aligned and a whole number of entries")
    }

    fn chunk_mut(&mut self, chunk: u32) -> (&mut ChunkHeader, &mut [Entry]) {
        let start = SUPERBLOCK_LEN + chunk as usize * CHUNK_LEN;
        let (header, entries) = self.memory[start..start + CHUNK_LEN].split_at_mut(HEADER_LEN);
        let header = ChunkHeader::mut_from_bytes(header).expect("chunks are aligned");
        let entries = <[Entry]>::mut_from_bytes(entries).expect("a whole number of entries");
        (header, entries)
    }
}

fn slot_of(address: u64) -> usize {
    ((address / PAGE) % CHUNK_PAGES) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn state() -> impl Strategy<Value = State> {
        let content =
            (0..=CONTENT_ID_MAX, any::<u8>(), any::<u64>()).prop_map(|(id, agent, hash)| Content {
                id: ContentId(id),
                agent: AgentId(agent),
                hash,
            });
        prop_oneof![
            Just(State::Empty),
            any::<u32>().prop_map(State::Slot),
            content.clone().prop_map(State::Remote),
            content.prop_map(State::Kept),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn behaves_like_a_map(ops in prop::collection::vec((0u32..3, 0u64..2000, state(), 0u8..128), 0..300), from in 0u64..2000, n in 0u64..2000) {
            let mut map = PageMap::new().unwrap();
            let mut oracle = BTreeMap::new();
            for (space, page, state, mark) in ops {
                let page = PageAddr::containing(page * PAGE);
                prop_assert!(map.set(SpaceId(space), page, state, mark));
                prop_assert_eq!(map.mark(SpaceId(space), page), if state == State::Empty { 0 } else { mark });
                oracle.insert((SpaceId(space), page), state);
            }
            for (&(space, page), &state) in &oracle {
                prop_assert_eq!(map.get(space, page), state);
            }
            let away = |state: &&State| matches!(state, State::Slot(_) | State::Remote(_));
            prop_assert_eq!(map.away(), oracle.values().filter(away).count() as u64);
            let range = from * PAGE..(from + n) * PAGE;
            let expected: Vec<_> = oracle.iter()
                .filter(|((s, p), state)| s.0 == 1 && range.contains(&p.get()) && **state != State::Empty)
                .map(|((_, p), state)| (*p, *state)).collect();
            prop_assert_eq!(map.known(SpaceId(1), range), expected);
            let pages: Vec<_> = oracle.keys().filter(|(s, _)| s.0 == 2).map(|(_, p)| *p).collect();
            let before: Vec<_> = pages.iter().map(|&p| (map.get(SpaceId(2), p), map.mark(SpaceId(2), p))).collect();
            let mut cold = Vec::new();
            map.cool(SpaceId(2), &pages, |page| cold.push(page));
            for (&page, (state, mark)) in pages.iter().zip(before) {
                let cools = matches!(state, State::Kept(_)) && mark > 0;
                prop_assert_eq!(map.get(SpaceId(2), page), state);
                prop_assert_eq!(map.mark(SpaceId(2), page), mark - u8::from(cools));
                prop_assert_eq!(cold.contains(&page), !cools);
            }
            for (space, page) in oracle.keys() {
                prop_assert!(map.set(*space, *page, State::Empty, 0));
            }
            prop_assert!(map.index.is_empty() && map.away() == 0);
        }
    }
}
