//! Anonymous memory whose pages can be made to be absent.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::error::{BenchError, Trying};

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;
/// Words of a page.
pub(crate) const WORDS: usize = PAGE / size_of::<u64>();

/// Pages of `mib` MiB.
pub(crate) fn pages(mib: usize) -> usize {
    mib * ((1 << 20) / PAGE)
}

/// Anonymous memory without huge pages.
pub(crate) struct Region {
    start: NonNull<c_void>,
    pages: usize,
}

// SAFETY: the region is plain memory which is reached only by the methods below, each of which says what it needs.
unsafe impl Sync for Region {}

impl Region {
    /// Of `pages` pages, none present.
    pub(crate) fn new(pages: usize) -> Result<Region, BenchError> {
        Region::map(pages, MapFlags::MAP_PRIVATE)
    }

    /// Pages that are covered by one page table, and by one chunk of gms's page map.
    pub(crate) const CHUNK_PAGES: usize = 512;

    /// Address space of `chunks` times [`Region::CHUNK_PAGES`] pages, which is not reserved. At least one.
    pub(crate) fn sparse(chunks: usize) -> Result<Region, BenchError> {
        Region::map(
            chunks.max(1) * Region::CHUNK_PAGES,
            MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE,
        )
    }

    /// Parts of `pages` pages each, of which this region has a whole number.
    pub(crate) fn split(self, pages: usize) -> Vec<Region> {
        let whole = std::mem::ManuallyDrop::new(self);
        assert!(pages > 0 && whole.pages.is_multiple_of(pages));
        let part = |first: usize| {
            // SAFETY: `first` is a page of the mapping, or one before its end.
            let start = unsafe { whole.start.byte_add(first * PAGE) };
            Region { start, pages }
        };
        (0..whole.pages).step_by(pages).map(part).collect()
    }

    /// Of `pages` pages, each beginning with `word`, which are in the kernel's page cache; mapped, but with no page present.
    pub(crate) fn cached(pages: usize, word: u64) -> Result<Region, BenchError> {
        let region = Region::map(pages, MapFlags::MAP_SHARED)?;
        (0..pages).for_each(|page| region.store(page, 0, word));
        region.discard()?;
        Ok(region)
    }

    fn map(pages: usize, flags: MapFlags) -> Result<Region, BenchError> {
        let bytes = pages.checked_mul(PAGE).and_then(NonZeroUsize::new);
        let bytes = bytes.ok_or_else(|| BenchError::Invalid(format!("{pages} pages")))?;
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address which the kernel chooses touches no other memory.
        let start = unsafe { mmap_anonymous(None, bytes, prot, flags) }.trying("no memory")?;
        let region = Region { start, pages };
        region.advise(MmapAdvise::MADV_NOHUGEPAGE)?;
        Ok(region)
    }

    /// Of `pages` pages, none present, but with the page tables that they need: what is measured is a fault, not these.
    pub(crate) fn with_tables(pages: usize) -> Result<Region, BenchError> {
        let region = Region::new(pages)?;
        (0..pages).for_each(|page| region.store(page, 0, 1));
        region.discard()?;
        Ok(region)
    }

    /// Drops all pages; those which no page cache has are zeros when they are touched again.
    pub(crate) fn discard(&self) -> Result<(), BenchError> {
        self.advise(MmapAdvise::MADV_DONTNEED)
    }

    /// Drops one page.
    pub(crate) fn discard_page(&self, page: usize) -> Result<(), BenchError> {
        let start = NonNull::new(self.word(page, 0).cast()).expect("a mapping is not at 0");
        // SAFETY: the page is in this region's mapping; any bytes are valid words.
        unsafe { madvise(start, PAGE, MmapAdvise::MADV_DONTNEED) }.trying("madvise")
    }

    /// Unmaps the last page, which is not the only one.
    pub(crate) fn unmap_last(&mut self) -> Result<(), BenchError> {
        assert!(self.pages > 1);
        let last = NonNull::new(self.word(self.pages - 1, 0).cast()).expect("not at 0");
        self.pages -= 1;
        // SAFETY: the page was this region's, which does not reach there any more.
        unsafe { munmap(last, PAGE) }.trying("munmap")
    }

    fn advise(&self, advice: MmapAdvise) -> Result<(), BenchError> {
        // SAFETY: the range is this region's mapping; any bytes are valid words.
        unsafe { madvise(self.start, self.len(), advice) }.trying("madvise")
    }

    /// Its beginning.
    pub(crate) fn start(&self) -> *mut c_void {
        self.start.as_ptr()
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.pages * PAGE
    }

    /// Pages.
    pub(crate) fn pages(&self) -> usize {
        self.pages
    }

    /// Address of a word; of a page that of its first.
    pub(crate) fn word(&self, page: usize, word: usize) -> *mut u64 {
        assert!(page < self.pages && word < WORDS);
        self.start.as_ptr().cast::<u64>().wrapping_add(page * WORDS + word)
    }

    /// Reads a word: the access that is measured.
    pub(crate) fn load(&self, page: usize, word: usize) -> u64 {
        // SAFETY: `word` gives an aligned address within the live mapping; volatile, so that it happens here and once.
        unsafe { self.word(page, word).read_volatile() }
    }

    /// Writes a word. Callers do so only while no other thread uses it.
    pub(crate) fn store(&self, page: usize, word: usize, value: u64) {
        // SAFETY: as in `load`; nobody else uses the word meanwhile.
        unsafe { self.word(page, word).write_volatile(value) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping is this region's own, and nothing refers to it after this.
        let _ = unsafe { munmap(self.start, self.len()) };
    }
}
