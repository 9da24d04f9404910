//! The index of the page map as words; its entries stay in their file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;

use gms_policy::ids::SpaceId;
use gms_policy::redundancy::Placements;

use super::shelves::{ShelfId, covered, shelf_of};
use super::{CHUNK_LEN, CHUNK_WORDS, Chunk, Grave, Header, PageMap, Remains, words_of};
use crate::arena::Arena;
use crate::words::{Words, put_list};

impl PageMap {
    /// The memory with the entries.
    pub fn file(&self) -> &File {
        self.memory.file()
    }

    /// All but the entries, with what waits for [`PageMap::bury`].
    pub fn put_words(&self, graves: &[Grave], out: &mut Vec<u64>) {
        debug_assert!(self.freed.is_empty(), "what is told has been committed");
        out.push(self.limit.into());
        let header = |header: &Header| {
            let Header { owners, used, slots, away, .. } = *header;
            [u64::from(owners) << 32 | u64::from(used) << 16 | u64::from(slots), away.into()]
        };
        put_list(out, self.headers.iter().flat_map(header));
        for list in [&self.free, &self.warm] {
            put_list(out, list.iter().copied().map(u64::from));
        }
        out.push(self.away);
        put_list(out, self.slotted.iter().flat_map(|(&base, &count)| [base, count.into()]));
        put_list(out, self.placements.words());
        self.put_shelves(graves, out);
    }

    /// Each shelf once, whoever shares it.
    fn put_shelves(&self, graves: &[Grave], out: &mut Vec<u64>) {
        let buried = graves.iter().filter_map(|grave| match grave.0 {
            Remains::Shelf(shelf, base) => Some((base, shelf)),
            Remains::Chunk(_) => None,
        });
        let all = 0..u64::MAX;
        let used =
            self.shelves.spaces().flat_map(|space| self.shelves.covering(space, all.clone()));
        let mut numbers: BTreeMap<ShelfId, u64> = BTreeMap::new();
        let mut shelves = Vec::new();
        for (base, shelf) in used.chain(buried) {
            numbers.entry(shelf).or_insert_with(|| {
                shelves.push((base, shelf));
                shelves.len() as u64 - 1
            });
        }
        out.push(shelves.len() as u64);
        for (base, shelf) in shelves {
            let chunks = self.shelves.chunks(&self.memory, base, shelf, covered(base));
            put_list(out, chunks.flat_map(|(base, chunk)| [base, chunk.into()]));
        }
        out.push(self.shelves.spaces().count() as u64);
        for space in self.shelves.spaces() {
            out.push(space.0);
            let shelves = self.shelves.covering(space, all.clone());
            put_list(out, shelves.flat_map(|(base, shelf)| [base, numbers[&shelf]]));
        }
        let grave = |grave: &Grave| match &grave.0 {
            Remains::Shelf(shelf, _) => [0, numbers[shelf]],
            Remains::Chunk(chunk) => [1, u64::from(*chunk)],
        };
        put_list(out, graves.iter().flat_map(grave));
    }

    /// A map as it was, whose entries are in `file`.
    ///
    /// # Errors
    /// If the words do not fit, or the memory cannot be had.
    pub fn from_words(
        file: File,
        words: &mut Words<'_>,
        beside: usize,
    ) -> io::Result<(PageMap, Vec<Grave>)> {
        let odd = || io::Error::from(io::ErrorKind::InvalidData);
        let limit = words.word().and_then(|limit| limit.try_into().ok()).ok_or_else(odd)?;
        if file.metadata()?.len() < u64::from(limit) * CHUNK_LEN as u64 {
            return Err(odd());
        }
        let mut memory = Arena::of(file, words_of(limit) + beside)?;
        // What is there besides the entries may be another version's.
        memory.forget(limit as usize * CHUNK_WORDS);
        let mut map = PageMap::of(memory, limit);
        let graves = map.read(words).ok_or_else(odd)?;
        map.commit();
        Ok((map, graves))
    }

    fn read(&mut self, words: &mut Words<'_>) -> Option<Vec<Grave>> {
        let header = |pair: &[u64]| Header {
            owners: (pair[0] >> 32) as u32,
            used: (pair[0] >> 16) as u16,
            slots: pair[0] as u16,
            away: pair[1] as u16,
            is_new: false,
        };
        self.headers = words.list()?.chunks_exact(2).map(header).collect();
        let most = self.headers.len();
        let chunk = |word: u64| (word < most as u64).then_some(word as Chunk);
        if most > self.limit as usize {
            return None;
        }
        self.free = words.list()?.iter().map(|&word| chunk(word)).collect::<Option<_>>()?;
        self.warm = words.list()?.iter().map(|&word| chunk(word)).collect::<Option<_>>()?;
        self.away = words.word()?;
        let slotted = words.list()?.chunks_exact(2);
        self.slotted = slotted.map(|pair| (pair[0], pair[1] as u32)).collect();
        self.placements = Placements::from_words(words.list()?)?;
        let shelves = words.several(|words| {
            let pairs = words.list()?.chunks_exact(2);
            pairs.map(|pair| Some((pair[0], chunk(pair[1])?))).collect::<Option<Vec<_>>>()
        })?;
        // Those that are in use, or wait to be buried.
        let mut known: BTreeMap<u64, (ShelfId, u64)> = BTreeMap::new();
        let (memory, all) = (&mut self.memory, &mut self.shelves);
        let mut shelf = |number: u64| {
            if let Some(&(shelf, base)) = known.get(&number) {
                all.share(shelf);
                return Some((shelf, base));
            }
            let chunks = shelves.get(usize::try_from(number).ok()?)?;
            let base = shelf_of(chunks.first()?.0);
            let shelf = all.add(memory, chunks)?;
            known.insert(number, (shelf, base));
            Some((shelf, base))
        };
        let spaces = words.several(|words| Some((SpaceId(words.word()?), words.list()?)))?;
        let mut uses = Vec::new();
        for (space, pairs) in spaces {
            for pair in pairs.chunks_exact(2) {
                uses.push((space, pair[0], shelf(pair[1])?.0));
            }
        }
        let graves = words.list()?.chunks_exact(2).map(|pair| match pair[0] {
            0 => shelf(pair[1]).map(|(shelf, base)| Grave(Remains::Shelf(shelf, base))),
            _ => chunk(pair[1]).map(|chunk| Grave(Remains::Chunk(chunk))),
        });
        let graves = graves.collect::<Option<_>>()?;
        for (space, base, shelf) in uses {
            self.shelves.add_use(&mut self.memory, space, base, shelf)?;
        }
        Some(graves)
    }
}
