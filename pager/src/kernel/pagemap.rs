//! PAGEMAP_SCAN: what an address space holds where.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use linux_raw_sys::general as sys;
use nix::errno::Errno;

use super::proc::{self, Mapping};
use super::{Occupant, Occupied, PageTables};
use crate::page_map::PAGE;
use crate::range_set::RangeSet;

mod requests {
    #![allow(missing_docs, reason = "the kernel's names")]
    use super::sys;
    nix::ioctl_readwrite!(pagemap_scan, b'f', 16, sys::pm_scan_arg);
}
pub use requests::pagemap_scan;

/// See [`PageTables`].
#[derive(Debug)]
pub struct Pagemap {
    pid: i32,
    pagemap: File,
}

const PRESENT: u64 = sys::PAGE_IS_PRESENT as u64;
const SWAPPED: u64 = sys::PAGE_IS_SWAPPED as u64;
/// Not write-protected by a userfaultfd: all but markers, as we protect nothing else.
const WRITTEN: u64 = sys::PAGE_IS_WRITTEN as u64;
/// Told by Linux 6.15 and later.
const GUARD: u64 = sys::PAGE_IS_GUARD as u64;
/// Regions told by one scan.
const REGIONS: usize = 128;

/// Which pages a scan tells of.
struct Filter {
    /// Categories that count as set where they are not.
    inverted: u64,
    /// All of these must be set.
    all: u64,
    /// At least one of these.
    any: u64,
    /// Told of each region.
    told: u64,
}

/// Markers: where evicted pages belong.
const MARKED: Filter = Filter { inverted: WRITTEN, all: WRITTEN | SWAPPED, any: 0, told: SWAPPED };

impl Pagemap {
    /// Of the process as it is now: an exec leaves this at the old address space.
    pub fn open(pid: i32) -> std::io::Result<Pagemap> {
        Ok(Pagemap { pid, pagemap: File::open(format!("/proc/{pid}/pagemap"))? })
    }

    /// Of the file opened before, of the process that had this id then.
    pub fn of(pid: i32, pagemap: OwnedFd) -> Pagemap {
        Pagemap { pid, pagemap: pagemap.into() }
    }

    fn all(&self, range: Range<u64>, filter: &Filter) -> nix::Result<RangeSet> {
        let mut found = RangeSet::default();
        let mut at = range.start;
        while at < range.end {
            let each = |range, _| found.insert(range);
            let end = self.scan::<REGIONS>(at..range.end, 0, filter, each)?;
            if end <= at {
                break;
            }
            at = end;
        }
        Ok(found)
    }

    /// One PAGEMAP_SCAN; returns where it ended.
    fn scan<const REGIONS: usize>(
        &self,
        range: Range<u64>,
        pages_max: u64,
        filter: &Filter,
        mut each: impl FnMut(Range<u64>, u64),
    ) -> nix::Result<u64> {
        let mut regions = [sys::page_region { start: 0, end: 0, categories: 0 }; REGIONS];
        let mut scan = sys::pm_scan_arg {
            size: size_of::<sys::pm_scan_arg>() as u64,
            flags: 0,
            start: range.start,
            end: range.end,
            walk_end: 0,
            vec: regions.as_mut_ptr() as u64,
            vec_len: regions.len() as u64,
            max_pages: pages_max,
            category_inverted: filter.inverted,
            category_mask: filter.all,
            category_anyof_mask: filter.any,
            return_mask: filter.told,
        };
        // SAFETY: `scan.vec` points to `vec_len` live regions; the kernel writes only to them and to `scan`.
        let found = unsafe { pagemap_scan(self.pagemap.as_raw_fd(), &raw mut scan)? };
        for region in &regions[..found as usize] {
            each(region.start..region.end, region.categories);
        }
        Ok(scan.walk_end)
    }
}

impl PageTables for Pagemap {
    fn occupied(
        &self,
        range: Range<u64>,
        pages_max: u64,
        into: &mut Vec<Occupied>,
    ) -> Result<u64, Errno> {
        const UNWANTED: u64 = (sys::PAGE_IS_PFNZERO | sys::PAGE_IS_FILE) as u64;
        // Kernels which do not know guards refuse to tell of them.
        let guard = if knows_guards() { GUARD } else { 0 };
        let filter = Filter {
            inverted: UNWANTED,
            all: UNWANTED | WRITTEN,
            any: PRESENT | SWAPPED,
            told: PRESENT | SWAPPED | guard,
        };
        self.scan::<REGIONS>(range, pages_max, &filter, |range, categories| {
            let by = match categories {
                c if c & GUARD != 0 => Occupant::Guard,
                c if c & PRESENT != 0 => Occupant::Present,
                _ => Occupant::Elsewhere,
            };
            into.push(Occupied { range, by });
        })
    }

    fn marked(&self, range: Range<u64>) -> Result<RangeSet, Errno> {
        self.all(range, &MARKED)
    }

    fn is_marked(&self, page: u64) -> Result<bool, Errno> {
        let mut is_marked = false;
        self.scan::<1>(page..page + PAGE, 0, &MARKED, |_, _| is_marked = true)?;
        Ok(is_marked)
    }

    fn taken(&self, range: Range<u64>) -> Result<RangeSet, Errno> {
        let filter = Filter { inverted: 0, all: 0, any: PRESENT | SWAPPED, told: PRESENT };
        self.all(range, &filter)
    }

    fn is_anonymous(&self, address: u64) -> bool {
        let Some(mappings) = proc::maps(self.pid) else { return true };
        let mapping = mappings.iter().find(|mapping| mapping.range.contains(&address));
        mapping.is_some_and(Mapping::is_anonymous)
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.pagemap.as_fd())
    }
}

/// Whether PAGEMAP_SCAN of this kernel tells of guards.
fn knows_guards() -> bool {
    static KNOWN: OnceLock<bool> = OnceLock::new();
    *KNOWN.get_or_init(|| {
        let Ok(own) = Pagemap::open(std::process::id() as i32) else { return false };
        let filter = Filter { inverted: 0, all: 0, any: PRESENT, told: PRESENT | GUARD };
        own.scan::<1>(PAGE..2 * PAGE, 0, &filter, |_, _| ()).is_ok()
    })
}
