//! userfaultfd and PAGEMAP_SCAN from outside the workload: the ioctls, each outcome decoded once.
//!
//! Hazards, from the kernel's source (fs/userfaultfd.c, mm/userfaultfd.c):
//! * While an event (fork, remap, remove, unmap) has not been read, COPY, ZEROPAGE and MOVE give EAGAIN. That is what makes it
//!   safe to decide by the page map: no page goes in or out across a change of the address space that we have not seen.
//! * REMOVE is sent *before* the pages go: after it has been read there is a window in which they are still present. Such ranges
//!   are quarantined (see `tables`).
//! * MOVE takes pages from any writable mapping, registered or not: the caller must exclude event reads (the *gate*).
//!
//! **Markers.** Where a page was moved out, a write-protect marker is left in the page table (UFFDIO_WRITEPROTECT of an absent page, under
//! WP_UNPOPULATED). The kernel moves markers with mremap, copies them at fork where the child inherits, and drops them with munmap, MADV_DONTNEED and
//! MADV_GUARD_INSTALL. So the address space itself proves where evicted pages belong, whatever was told, in whatever order, or not at all
//! (guards raise no event): a page that should be away and has no marker has been discarded by the program and is zeros.

use std::fs::File;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use linux_raw_sys::general as sys;
use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};
use userfaultfd::{Event, EventBuffer, RegisterMode, Uffd};

use crate::page_map::PAGE;
use crate::proc::{self, Mapping};
use crate::range_set::RangeSet;
use crate::torture::{self, Point};

/// Features without which a workload cannot be paged.
pub const FEATURES: u64 = (sys::UFFD_FEATURE_EVENT_FORK
    | sys::UFFD_FEATURE_EVENT_REMAP
    | sys::UFFD_FEATURE_EVENT_REMOVE
    | sys::UFFD_FEATURE_EVENT_UNMAP
    | sys::UFFD_FEATURE_THREAD_ID
    | sys::UFFD_FEATURE_MOVE
    | sys::UFFD_FEATURE_PAGEFAULT_FLAG_WP
    | sys::UFFD_FEATURE_WP_UNPOPULATED
    | sys::UFFD_FEATURE_POISON) as u64;

const UFFD_TYPE: u8 = 0xAA;
/// Request code of UFFDIO_MOVE, which the evictor issues inside the workload.
pub const UFFDIO_MOVE: u64 =
    nix::request_code_readwrite!(UFFD_TYPE, 0x05, size_of::<sys::uffdio_move>());
/// Request codes by which the evictor takes the outbox out of its userfaultfd and puts it back.
pub const UFFDIO_UNREGISTER: u64 =
    nix::request_code_read!(UFFD_TYPE, 0x01, size_of::<sys::uffdio_range>());
/// See [`UFFDIO_UNREGISTER`].
pub const UFFDIO_REGISTER: u64 =
    nix::request_code_readwrite!(UFFD_TYPE, 0x00, size_of::<sys::uffdio_register>());
/// Request code of USERFAULTFD_IOC_NEW on /dev/userfaultfd.
pub const USERFAULTFD_IOC_NEW: u64 = nix::request_code_none!(UFFD_TYPE, 0x00);
/// UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES: absent pages in the middle of a range do not end the call.
pub const MOVE_ALLOW_HOLES: u64 = 2;

/// UFFDIO_WRITEPROTECT_MODE_WP: leave markers; without it they are taken away.
const WRITEPROTECT_MODE_WP: u64 = 1;
/// UFFDIO_WRITEPROTECT_MODE_DONTWAKE.
const WRITEPROTECT_MODE_DONTWAKE: u64 = 2;

mod requests {
    #![allow(missing_docs, reason = "the kernel's names")]
    use super::{UFFD_TYPE, sys};
    nix::ioctl_readwrite!(uffdio_api, UFFD_TYPE, 0x3F, sys::uffdio_api);
    nix::ioctl_readwrite!(uffdio_copy, UFFD_TYPE, 0x03, sys::uffdio_copy);
    nix::ioctl_readwrite!(uffdio_zeropage, UFFD_TYPE, 0x04, sys::uffdio_zeropage);
    nix::ioctl_readwrite!(uffdio_writeprotect, UFFD_TYPE, 0x06, sys::uffdio_writeprotect);
    nix::ioctl_readwrite!(uffdio_poison, UFFD_TYPE, 0x08, sys::uffdio_poison);
    nix::ioctl_readwrite!(pagemap_scan, b'f', 16, sys::pm_scan_arg);
}
pub use requests::{pagemap_scan, uffdio_api};
use requests::{uffdio_copy, uffdio_poison, uffdio_writeprotect, uffdio_zeropage};

/// Whether a descriptor of this process is a userfaultfd.
pub fn is_userfaultfd(number: RawFd) -> bool {
    let name = std::fs::read_link(format!("/proc/self/fd/{number}")).unwrap_or_default();
    name.as_os_str() == "anon_inode:[userfaultfd]"
}

/// What an address range is to a userfaultfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Registration {
    /// One mapping, registered, and all events have been read.
    Whole,
    /// Not so: not mapped, not registered, or several mappings.
    Not,
    /// An event must be read first.
    Changing,
}

/// What an attempt to put the shared zero page somewhere has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// Neither page nor marker was there: now zeros are. Nobody has been woken.
    Absent,
    /// A page or a marker is there.
    Occupied,
    /// An event must be read first.
    Changing,
    /// No such mapping any more, or the process has ended.
    Gone,
}

/// How an attempt to install a page ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Installed {
    /// The page is there now and its waiters are awake.
    Done,
    /// A page was there already (another thread's fault was served first).
    Exists,
    /// An event must be read first.
    Changing,
    /// No such mapping any more, or the process has ended.
    Gone,
}

/// The userfaultfd of one address space.
pub struct Faults {
    uffd: Uffd,
}

impl Faults {
    /// Enables a new userfaultfd with [`FEATURES`].
    pub fn enable(fd: OwnedFd) -> nix::Result<Faults> {
        let mut api = sys::uffdio_api { api: 0xAA, features: FEATURES, ioctls: 0 };
        // SAFETY: `api` is a live struct of the layout which the request expects.
        unsafe { uffdio_api(fd.as_raw_fd(), &raw mut api)? };
        // SAFETY: the descriptor is a userfaultfd which we own and give away here.
        let uffd = unsafe { Uffd::from_raw_fd(fd.into_raw_fd()) };
        Ok(Faults { uffd })
    }

    /// The userfaultfd of a child, enabled by the kernel as its parent's.
    pub fn of_child(uffd: Uffd) -> Faults {
        Faults { uffd }
    }

    /// Reads what is there. Events and faults come in the order in which the kernel queues them: faults first, so
    /// the caller must handle events before faults.
    pub fn read(
        &self,
        buffer: &mut EventBuffer,
        into: &mut Vec<Event>,
    ) -> Result<(), userfaultfd::Error> {
        for event in self.uffd.read_events(buffer)? {
            into.push(event?);
        }
        Ok(())
    }

    /// Registers whole mappings: their missing pages fault to us from now on, and can be marked.
    pub fn register(&self, range: Range<u64>) -> Result<(), userfaultfd::Error> {
        self.register_for(range, RegisterMode::MISSING | RegisterMode::WRITE_PROTECT)
    }

    /// Registers memory of ours, which is never marked.
    pub fn register_outbox(&self, range: Range<u64>) -> Result<(), userfaultfd::Error> {
        self.register_for(range, RegisterMode::MISSING)
    }

    fn register_for(
        &self,
        range: Range<u64>,
        mode: RegisterMode,
    ) -> Result<(), userfaultfd::Error> {
        let (start, length) = (range.start as *mut _, (range.end - range.start) as usize);
        let registered = self.uffd.register_with_mode(start, length, mode);
        torture::at(Point::AfterRegister);
        registered.map(drop)
    }

    /// Leaves markers at absent pages, or takes them away without waking anybody. The caller has made sure that no page of the range is present.
    pub fn mark(&self, range: Range<u64>, marked: bool) -> nix::Result<()> {
        let mode = match marked {
            true => WRITEPROTECT_MODE_WP,
            false => WRITEPROTECT_MODE_DONTWAKE,
        };
        let range = sys::uffdio_range { start: range.start, len: range.end - range.start };
        let mut protect = sys::uffdio_writeprotect { range, mode };
        torture::at(Point::BeforeMark);
        // SAFETY: `protect` is a live struct of the layout which the request expects; the kernel only reads it.
        let done = unsafe { uffdio_writeprotect(self.uffd.as_raw_fd(), &raw mut protect) };
        torture::at(Point::AfterMark);
        done.map(drop)
    }

    /// What is at a page for which a thread waits, or has waited.
    pub fn probe(&self, page: u64) -> Probe {
        match self.zero_errno(page) {
            None => Probe::Absent,
            Some(Errno::EEXIST) => Probe::Occupied,
            Some(Errno::EAGAIN) => Probe::Changing,
            // See `registration`.
            Some(_) if self.has_event() => Probe::Changing,
            Some(_) => Probe::Gone,
        }
    }

    /// Gives a range back to the kernel.
    pub fn unregister(&self, range: Range<u64>) -> Result<(), userfaultfd::Error> {
        self.uffd.unregister(range.start as *mut _, (range.end - range.start) as usize)
    }

    /// Lets the threads that wait for a page of the range try again.
    pub fn wake(&self, range: Range<u64>) {
        // Fails only if the process has gone.
        let _ = self.uffd.wake(range.start as *mut _, (range.end - range.start) as usize);
    }

    /// Installs one page.
    pub fn copy(&self, page: u64, bytes: &[u8]) -> Installed {
        self.copy_run(page..page + PAGE, bytes, true).1
    }

    /// Installs the pages of the range from `bytes`, up to the first that is present; returns how many, and why it stopped if not
    /// at the end. Without `wake`, the threads that wait for them sleep on.
    pub fn copy_run(&self, range: Range<u64>, bytes: &[u8], wake: bool) -> (u64, Installed) {
        let mode = if wake { 0 } else { sys::UFFDIO_COPY_MODE_DONTWAKE.into() };
        let length = range.end - range.start;
        assert!(length <= bytes.len() as u64);
        let mut copied = 0;
        loop {
            let mut copy = sys::uffdio_copy {
                dst: range.start + copied,
                src: bytes.as_ptr() as u64 + copied,
                len: length - copied,
                mode,
                copy: 0,
            };
            torture::at(Point::BeforeCopy);
            // SAFETY: the kernel reads `len` bytes of the slice (checked above), and writes only to `copy` and to the workload.
            let result = unsafe { uffdio_copy(self.uffd.as_raw_fd(), &raw mut copy) };
            torture::at(Point::AfterCopy);
            copied += copy.copy.max(0) as u64;
            if copied == length || copy.copy <= 0 {
                return (copied / PAGE, decode(result));
            }
        }
    }

    /// Installs zero pages from the start of the range up to the first page that is present; returns how many, and
    /// why it stopped if not at the end.
    pub fn zero(&self, range: Range<u64>) -> (u64, Installed) {
        let mut installed = 0;
        loop {
            let start = range.start + installed * PAGE;
            let length = range.end - start;
            if length == 0 {
                return (installed, Installed::Done);
            }
            let mut zero = sys::uffdio_zeropage {
                range: sys::uffdio_range { start, len: length },
                mode: 0,
                zeropage: 0,
            };
            torture::at(Point::BeforeCopy);
            // SAFETY: the kernel writes only to `zero` and to the workload's pages.
            let result = unsafe { uffdio_zeropage(self.uffd.as_raw_fd(), &raw mut zero) };
            torture::at(Point::AfterCopy);
            if zero.zeropage > 0 {
                installed += zero.zeropage as u64 / PAGE;
                continue;
            }
            return (installed, decode(result));
        }
    }

    /// Notes an absent page, whose marker has been taken away, as lost: whoever touches it gets SIGBUS, as for a memory error of the hardware. That outlives the
    /// registration and is inherited by forked children; unmapping or discarding the page ends it. Linux 6.6 has it without being asked.
    pub fn poison(&self, page: u64) -> Installed {
        let range = sys::uffdio_range { start: page, len: PAGE };
        let mut poison = sys::uffdio_poison { range, mode: 0, updated: 0 };
        // SAFETY: the kernel writes only to `poison` and to the workload's page tables.
        decode(unsafe { uffdio_poison(self.uffd.as_raw_fd(), &raw mut poison) })
    }

    /// Whether the range is registered, proved by the kernel: a copy from an unreadable source checks the destination first, and then fails
    /// without touching it.
    pub fn registration(&self, range: Range<u64>) -> Registration {
        let Some(source) = unreadable() else { return Registration::Not };
        let (dst, len) = (range.start, range.end - range.start);
        let mut copy = sys::uffdio_copy { dst, src: source, len, mode: 0, copy: 0 };
        // SAFETY: nothing can be read at `source`, so that nothing is written but `copy`.
        match unsafe { uffdio_copy(self.uffd.as_raw_fd(), &raw mut copy) } {
            Err(Errno::EFAULT | Errno::EEXIST) => Registration::Whole,
            Err(Errno::EAGAIN) => Registration::Changing,
            // The kernel asks whether anything is changing before it looks what is there.
            _ if self.has_event() => Registration::Changing,
            _ => Registration::Not,
        }
    }

    /// Whether the address space still exists.
    pub fn is_alive(&self) -> bool {
        // Page 1 is never mapped (mmap_min_addr), so that this changes nothing in a live address space.
        !matches!(self.zero_errno(PAGE), Some(Errno::ESRCH))
    }

    /// Whether an event has not been read yet.
    pub fn has_event(&self) -> bool {
        matches!(self.zero_errno(PAGE), Some(Errno::EAGAIN))
    }

    fn zero_errno(&self, page: u64) -> Option<Errno> {
        let mut zero = sys::uffdio_zeropage {
            range: sys::uffdio_range { start: page, len: PAGE },
            mode: u64::from(sys::UFFDIO_ZEROPAGE_MODE_DONTWAKE),
            zeropage: 0,
        };
        // SAFETY: the kernel writes only to `zero`; no mapping is at `page`.
        unsafe { uffdio_zeropage(self.uffd.as_raw_fd(), &raw mut zero) }.err()
    }
}

impl AsFd for Faults {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }
}

/// An address of this process that nobody can read, low enough for a long range to begin there.
fn unreadable() -> Option<u64> {
    static PAGE_NONE: OnceLock<Option<u64>> = OnceLock::new();
    *PAGE_NONE.get_or_init(|| {
        let hint = NonZeroUsize::new(1 << 30);
        let length = NonZeroUsize::new(PAGE as usize)?;
        // SAFETY: a new mapping, without MAP_FIXED; it is never unmapped and never accessed.
        let page =
            unsafe { mmap_anonymous(hint, length, ProtFlags::PROT_NONE, MapFlags::MAP_PRIVATE) };
        page.ok().map(|address| address.as_ptr() as u64)
    })
}

fn decode(result: nix::Result<libc::c_int>) -> Installed {
    match result {
        Ok(_) => Installed::Done,
        Err(Errno::EEXIST) => Installed::Exists,
        Err(Errno::EAGAIN) => Installed::Changing,
        Err(_) => Installed::Gone,
    }
}

/// What an address holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occupant {
    /// A page in memory.
    Present,
    /// A guard of MADV_GUARD_INSTALL (told by Linux 6.15 and later).
    Guard,
    /// A page that was swapped out or is being migrated (or, before Linux 6.15, a guard).
    Elsewhere,
}

/// Addresses which hold the same kind of thing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Occupied {
    /// The addresses.
    pub range: Range<u64>,
    /// What they hold.
    pub by: Occupant,
}

/// The page tables of one address space.
#[derive(Debug)]
pub struct PageTables {
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

impl PageTables {
    /// Of the process as it is now: an exec leaves this at the old address space.
    pub fn open(pid: i32) -> std::io::Result<PageTables> {
        Ok(PageTables { pid, pagemap: File::open(format!("/proc/{pid}/pagemap"))? })
    }

    /// Appends what is there and private (not file-backed, not the shared zero page, no marker) of `range` to `into`, up to
    /// `pages_max`; returns where the scan ended.
    pub fn occupied(
        &self,
        range: Range<u64>,
        pages_max: u64,
        into: &mut Vec<Occupied>,
    ) -> nix::Result<u64> {
        const UNWANTED: u64 = (sys::PAGE_IS_PFNZERO | sys::PAGE_IS_FILE) as u64;
        // Kernels which do not know guards refuse to tell of them.
        let guard = if knows_guards() { GUARD } else { 0 };
        let filter = Filter {
            inverted: UNWANTED,
            all: UNWANTED | WRITTEN,
            any: PRESENT | SWAPPED,
            told: PRESENT | SWAPPED | guard,
        };
        self.scan(range, pages_max, &filter, |range, categories| {
            let by = match categories {
                c if c & GUARD != 0 => Occupant::Guard,
                c if c & PRESENT != 0 => Occupant::Present,
                _ => Occupant::Elsewhere,
            };
            into.push(Occupied { range, by });
        })
    }

    /// The markers in `range`: where evicted pages belong.
    pub fn marked(&self, range: Range<u64>) -> nix::Result<RangeSet> {
        let filter = Filter { inverted: WRITTEN, all: WRITTEN | SWAPPED, any: 0, told: SWAPPED };
        self.all(range, &filter)
    }

    /// What of `range` holds a page (the shared zero page too), a marker, a guard, anything.
    pub fn taken(&self, range: Range<u64>) -> nix::Result<RangeSet> {
        let filter = Filter { inverted: 0, all: 0, any: PRESENT | SWAPPED, told: PRESENT };
        self.all(range, &filter)
    }

    /// Whether private anonymous memory is mapped at the address; in doubt it is.
    pub fn is_anonymous(&self, address: u64) -> bool {
        let Some(mappings) = proc::maps(self.pid) else { return true };
        let mapping = mappings.iter().find(|mapping| mapping.range.contains(&address));
        mapping.is_some_and(Mapping::is_anonymous)
    }

    fn all(&self, range: Range<u64>, filter: &Filter) -> nix::Result<RangeSet> {
        let mut found = RangeSet::default();
        let mut at = range.start;
        while at < range.end {
            let end = self.scan(at..range.end, 0, filter, |range, _| found.insert(range))?;
            if end <= at {
                break;
            }
            at = end;
        }
        Ok(found)
    }

    /// One PAGEMAP_SCAN; returns where it ended.
    fn scan(
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

/// Whether PAGEMAP_SCAN of this kernel tells of guards.
fn knows_guards() -> bool {
    static KNOWN: OnceLock<bool> = OnceLock::new();
    *KNOWN.get_or_init(|| {
        let Ok(own) = PageTables::open(std::process::id() as i32) else { return false };
        let filter = Filter { inverted: 0, all: 0, any: PRESENT, told: PRESENT | GUARD };
        own.scan(PAGE..2 * PAGE, 0, &filter, |_, _| ()).is_ok()
    })
}
