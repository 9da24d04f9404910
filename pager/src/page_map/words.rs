//! The index of the page map as words; its entries stay in their file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::Arc;

use gms_policy::ids::SpaceId;
use gms_policy::redundancy::Placements;

use super::{CHUNK_LEN, Chunk, Grave, Header, PageMap, Remains, Shelf};
use crate::words::{Words, put_list};

impl PageMap {
    /// The memory with the entries.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// All but the entries, with what waits for [`PageMap::bury`].
    pub fn put_words(&self, graves: &[Grave], out: &mut Vec<u64>) {
        out.push(self.limit.into());
        let header = |header: &Header| {
            let Header { owners, used, slots, away } = *header;
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
        let buried = graves.iter().filter_map(|grave| match &grave.0 {
            Remains::Shelf(shelf) => Some(shelf),
            Remains::Chunk(_) => None,
        });
        let mut numbers: BTreeMap<*const Shelf, u64> = BTreeMap::new();
        let mut shelves = Vec::new();
        for shelf in self.index.values().flat_map(BTreeMap::values).chain(buried) {
            numbers.entry(Arc::as_ptr(shelf)).or_insert_with(|| {
                shelves.push(shelf);
                shelves.len() as u64 - 1
            });
        }
        out.push(shelves.len() as u64);
        for shelf in shelves {
            put_list(out, shelf.iter().flat_map(|(&base, &chunk)| [base, chunk.into()]));
        }
        out.push(self.index.len() as u64);
        for (space, shelves) in &self.index {
            out.push(space.0);
            let numbered =
                |(&base, shelf): (&u64, &Arc<Shelf>)| [base, numbers[&Arc::as_ptr(shelf)]];
            put_list(out, shelves.iter().flat_map(numbered));
        }
        let grave = |grave: &Grave| match &grave.0 {
            Remains::Shelf(shelf) => [0, numbers[&Arc::as_ptr(shelf)]],
            Remains::Chunk(chunk) => [1, u64::from(*chunk)],
        };
        put_list(out, graves.iter().flat_map(grave));
    }

    /// A map as it was, whose entries are in `file`.
    ///
    /// # Errors
    /// If the words do not fit, or the memory cannot be had.
    pub fn from_words(file: File, words: &mut Words<'_>) -> io::Result<(PageMap, Vec<Grave>)> {
        let odd = || io::Error::from(io::ErrorKind::InvalidData);
        let limit = words.word().and_then(|limit| limit.try_into().ok()).ok_or_else(odd)?;
        if file.metadata()?.len() < u64::from(limit) * CHUNK_LEN as u64 {
            return Err(odd());
        }
        let mut map = PageMap::of(file, limit)?;
        let graves = map.read(words).ok_or_else(odd)?;
        Ok((map, graves))
    }

    fn read(&mut self, words: &mut Words<'_>) -> Option<Vec<Grave>> {
        let header = |pair: &[u64]| Header {
            owners: (pair[0] >> 32) as u32,
            used: (pair[0] >> 16) as u16,
            slots: pair[0] as u16,
            away: pair[1] as u16,
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
            let shelf: Option<Shelf> = pairs.map(|pair| Some((pair[0], chunk(pair[1])?))).collect();
            Some(Arc::new(shelf?))
        })?;
        let shelf = |number: u64| shelves.get(usize::try_from(number).ok()?).cloned();
        let spaces = words.several(|words| {
            let space = SpaceId(words.word()?);
            let pairs = words.list()?.chunks_exact(2);
            let shelves = pairs.map(|pair| Some((pair[0], shelf(pair[1])?)));
            Some((space, shelves.collect::<Option<_>>()?))
        })?;
        self.index = spaces.into_iter().collect();
        let graves = words.list()?.chunks_exact(2).map(|pair| match pair[0] {
            0 => shelf(pair[1]).map(|shelf| Grave(Remains::Shelf(shelf))),
            _ => chunk(pair[1]).map(|chunk| Grave(Remains::Chunk(chunk))),
        });
        graves.collect()
    }
}
