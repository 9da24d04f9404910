//! The page map of a process that has died.

use std::fs::File;
use std::io;

use gms_policy::eviction::Mark;
use gms_policy::ids::{PageAddr, SpaceId};

use super::{
    CHUNK_SPAN, CHUNK_WORDS, Chunk, Content, Entry, Grave, Header, PageMap, Remains, State,
    words_of,
};
use crate::arena::Arena;

use super::shelves::{Shelves, covered};

impl PageMap {
    /// The map in the memory, as of the last commit, and what waits for [`PageMap::bury`]. Who holds the pages is not told there.
    ///
    /// What was buried shortly before the death may be among that again: its contents are released a second time, and were counted a second time here.
    ///
    /// # Errors
    /// If that is not a map of `limit` chunks, cannot be known, or the memory cannot be had.
    pub fn recover(file: File, limit: u32, beside: usize) -> io::Result<(PageMap, Vec<Grave>)> {
        let mut map = PageMap::of(Arena::recover(file, words_of(limit) + beside)?, limit);
        let chunks = map.memory.filled(0..limit as usize * CHUNK_WORDS)?;
        let known = chunks.last().map_or(0, |part| part.end.div_ceil(CHUNK_WORDS));
        map.headers.resize(known, Header::default());
        let mut places = Vec::new();
        let start = limit as usize * CHUNK_WORDS;
        map.shelves = Shelves::of(&map.memory, start, limit, |base, chunk| {
            places.push((base, chunk));
        })?;
        for (base, chunk) in places {
            let header = map.headers.get_mut(chunk as usize).ok_or(io::ErrorKind::InvalidData)?;
            header.owners += 1;
            if header.owners == 1 {
                map.count(chunk);
                if map.headers[chunk as usize].slots > 0 {
                    *map.slotted.entry(base).or_default() += 1;
                }
            }
        }
        // What has no memory is empty, and need not be looked at.
        map.free =
            (0..known as Chunk).filter(|&chunk| map.headers[chunk as usize].owners == 0).collect();
        let mut graves = Vec::new();
        for chunk in chunks
            .into_iter()
            .flat_map(|part| part.start / CHUNK_WORDS..part.end.div_ceil(CHUNK_WORDS))
        {
            if map.headers[chunk].owners == 0 {
                map.count(chunk as Chunk);
                map.headers[chunk].owners = 1;
                graves.push(Grave(Remains::Chunk(chunk as Chunk)));
            }
        }
        map.free.retain(|&chunk| map.headers[chunk as usize].owners == 0);
        Ok((map, graves))
    }

    /// The spaces of which anything is known.
    pub(crate) fn spaces(&self) -> impl Iterator<Item = SpaceId> + '_ {
        self.shelves.spaces()
    }

    /// The pages of all spaces that are in slots, and those.
    pub(crate) fn slotted(&self) -> Vec<(SpaceId, PageAddr, u32)> {
        let mut found = Vec::new();
        for space in self.shelves.spaces() {
            for (base, shelf) in self.shelves.covering(space, 0..u64::MAX) {
                let chunks = self.shelves.chunks(&self.memory, base, shelf, covered(base));
                let named = chunks.filter(|(_, chunk)| self.headers[*chunk as usize].slots > 0);
                for (base, _) in named {
                    self.visit(space, base..base + CHUNK_SPAN, |page, state| {
                        if let State::Slot(slot) = state {
                            found.push((space, page, slot));
                        }
                        true
                    });
                }
            }
        }
        found
    }

    /// The contents that entries refer to, once for each entry, those of graves among them.
    pub(crate) fn contents(&self) -> impl Iterator<Item = Content> + '_ {
        let used = self.headers.iter().enumerate().filter(|(_, header)| header.owners > 0);
        let states = used.flat_map(|(chunk, _)| self.states(chunk as Chunk));
        states.filter_map(|state| match state {
            State::Remote(content) | State::Kept(content) => Some(content),
            State::Slot(_) | State::Empty => None,
        })
    }

    /// A content as two words, of which the first is not 0.
    pub(crate) fn words_of(content: Content) -> [u64; 2] {
        let Entry { word, hash } = Entry::encode(State::Kept(content), Mark::COLD);
        [word, hash]
    }

    /// What [`PageMap::words_of`] has told; `None` of other words.
    pub(crate) fn content_of_words(&self, [word, hash]: [u64; 2]) -> Option<Content> {
        match (Entry { word, hash }).decode(&self.placements) {
            State::Kept(content) => Some(content),
            _ => None,
        }
    }

    /// Counts the entries of a chunk.
    fn count(&mut self, chunk: Chunk) {
        let entries = self.entries(chunk);
        let count = |is_meant: fn(Entry) -> bool| {
            entries.iter().filter(|entry| is_meant(**entry)).count() as u16
        };
        let used = count(|entry| entry.word != 0);
        let (slots, away) = (count(Entry::is_slot), count(Entry::is_away));
        self.headers[chunk as usize] = Header { used, slots, away, ..self.headers[chunk as usize] };
        self.away += u64::from(away);
    }
}
