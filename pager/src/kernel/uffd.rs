//! userfaultfd from outside the workload: the ioctls, each outcome decoded once.
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

use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::{Arc, OnceLock};

use gms_policy::ids::{PageAddr, SpaceId};
use linux_raw_sys::general as sys;
use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};
use userfaultfd::{RegisterMode, Uffd};

use super::journal::{Caveat, Journal, Line, Message, READ_MAX, read_unkept};
use super::{Event, Faults, Installed, Messages, PageFault, Probe, ReadError, Registration};
use crate::page_map::PAGE;
use crate::tables::{Change, Remap};
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

/// Kinds of messages.
const PAGE_FAULT: u8 = sys::UFFD_EVENT_PAGEFAULT as u8;
const FORK: u8 = sys::UFFD_EVENT_FORK as u8;
const REMAP: u8 = sys::UFFD_EVENT_REMAP as u8;
const REMOVE: u8 = sys::UFFD_EVENT_REMOVE as u8;
const UNMAP: u8 = sys::UFFD_EVENT_UNMAP as u8;

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
}
pub use requests::uffdio_api;
use requests::{uffdio_copy, uffdio_poison, uffdio_writeprotect, uffdio_zeropage};

/// Whether a descriptor of this process is a userfaultfd.
pub fn is_userfaultfd(number: RawFd) -> bool {
    let name = std::fs::read_link(format!("/proc/self/fd/{number}")).unwrap_or_default();
    name.as_os_str() == "anon_inode:[userfaultfd]"
}

/// See [`Faults`].
pub struct Userfaultfd {
    /// Where what was read is kept, if it is. It must not name a descriptor that is closed.
    line: Option<Line>,
    uffd: Uffd,
    /// See [`Faults::take_left`].
    left: Vec<Event>,
}

impl Userfaultfd {
    /// Enables a new userfaultfd with [`FEATURES`].
    pub fn enable(fd: OwnedFd) -> nix::Result<Userfaultfd> {
        let mut api = sys::uffdio_api { api: 0xAA, features: FEATURES, ioctls: 0 };
        // SAFETY: `api` is a live struct of the layout which the request expects.
        unsafe { uffdio_api(fd.as_raw_fd(), &raw mut api)? };
        // SAFETY: the descriptor is a userfaultfd which we own and give away here.
        let uffd = unsafe { Uffd::from_raw_fd(fd.into_raw_fd()) };
        Ok(Userfaultfd::of_child(uffd))
    }

    /// The userfaultfd of a child, enabled by the kernel as its parent's.
    pub fn of_child(uffd: Uffd) -> Userfaultfd {
        Userfaultfd { uffd, line: None, left: Vec::new() }
    }

    /// The same, of which what is read is kept, and what is read of its children.
    pub fn kept(self, journal: &Arc<Journal>) -> Userfaultfd {
        Userfaultfd { line: journal.line(), ..self }
    }

    /// That of a pager which has died, with what it has kept.
    pub(crate) fn left(uffd: Uffd, line: Line, left: Vec<Event>) -> Userfaultfd {
        Userfaultfd { uffd, line: Some(line), left }
    }

    #[cfg(test)]
    pub(super) fn line(&self) -> Option<&Line> {
        self.line.as_ref()
    }

    fn register_for(&self, range: Range<u64>, mode: RegisterMode) -> bool {
        let (start, length) = (range.start as *mut _, (range.end - range.start) as usize);
        let registered = self.uffd.register_with_mode(start, length, mode);
        torture::at(Point::AfterRegister);
        registered.is_ok()
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

impl Faults for Userfaultfd {
    fn read(&self, several: bool, into: &mut Messages) -> Result<(), ReadError> {
        // One fault is read faster alone.
        let count = if several { READ_MAX } else { 1 };
        let mut unknown = None;
        let take = |message| take_message(message, self.line.as_ref(), into, &mut unknown);
        let read = match &self.line {
            Some(line) => line.fill(self.as_fd(), count, take),
            None => read_unkept(self.as_fd(), count, take),
        };
        read.map_err(not_read).and(unknown.map_or(Ok(()), Err))
    }

    fn belongs_to(&self, space: SpaceId) {
        self.line.iter().for_each(|line| line.name(space, self.as_fd().as_raw_fd()));
    }

    fn next_generation(&self) -> Option<(u32, u64)> {
        self.line.as_ref().map(Line::next_generation)
    }

    fn applied(&self) {
        self.line.iter().for_each(Line::applied);
    }

    fn register(&self, range: Range<u64>) -> bool {
        self.register_for(range, RegisterMode::MISSING | RegisterMode::WRITE_PROTECT)
    }

    fn register_outbox(&self, range: Range<u64>) -> bool {
        self.register_for(range, RegisterMode::MISSING)
    }

    fn mark(&self, range: Range<u64>, marked: bool) -> Result<(), Errno> {
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

    fn probe(&self, page: u64) -> Probe {
        match self.zero_errno(page) {
            None => Probe::Absent,
            Some(Errno::EEXIST) => Probe::Occupied,
            Some(Errno::EAGAIN) => Probe::Changing,
            // See `registration`.
            Some(_) if self.has_event() => Probe::Changing,
            Some(_) => Probe::Gone,
        }
    }

    fn unregister(&self, range: Range<u64>) -> bool {
        self.uffd.unregister(range.start as *mut _, (range.end - range.start) as usize).is_ok()
    }

    fn wake(&self, range: Range<u64>) {
        // Fails only if the process has gone.
        let _ = self.uffd.wake(range.start as *mut _, (range.end - range.start) as usize);
    }

    fn copy_run(&self, range: Range<u64>, bytes: &[u8], wake: bool) -> (u64, Installed) {
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

    fn zero(&self, range: Range<u64>) -> (u64, Installed) {
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

    fn poison(&self, page: u64) -> Installed {
        let range = sys::uffdio_range { start: page, len: PAGE };
        let mut poison = sys::uffdio_poison { range, mode: 0, updated: 0 };
        // SAFETY: the kernel writes only to `poison` and to the workload's page tables.
        decode(unsafe { uffdio_poison(self.uffd.as_raw_fd(), &raw mut poison) })
    }

    fn registration(&self, range: Range<u64>) -> Registration {
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

    fn is_alive(&self) -> bool {
        // Page 1 is never mapped (mmap_min_addr), so that this changes nothing in a live address space.
        !matches!(self.zero_errno(PAGE), Some(Errno::ESRCH))
    }

    fn note(&self, caveat: Caveat, is: bool) {
        self.line.iter().for_each(|line| line.note(caveat, is));
    }

    fn take_left(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.left)
    }

    fn has_event(&self) -> bool {
        matches!(self.zero_errno(PAGE), Some(Errno::EAGAIN))
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }
}

/// Adds what a message tells of; whether it is to be kept: a fault is not. `line` is where.
fn take_message(
    message: Message,
    line: Option<&Line>,
    into: &mut Messages,
    unknown: &mut Option<ReadError>,
) -> bool {
    let [kind, first, second, third] = message;
    into.events.push(match kind as u8 {
        PAGE_FAULT => {
            into.faults.push(PageFault {
                page: PageAddr::containing(second),
                write: first & u64::from(sys::UFFD_PAGEFAULT_FLAG_WRITE) != 0,
                tid: third as i32,
            });
            return false;
        }
        FORK => {
            // SAFETY: the kernel has opened it for whoever reads this message.
            let child = Userfaultfd::of_child(unsafe { Uffd::from_raw_fd(first as RawFd) });
            Event::Fork(Box::new(match line {
                Some(line) => child.kept(line.journal()),
                None => child,
            }))
        }
        _ => match change_of(message) {
            Some(event) => event,
            None => {
                *unknown = Some(ReadError::Failed(format!("a message of kind {kind:#x}")));
                return true;
            }
        },
    });
    true
}

/// The events of which messages tell that outlive who has read them, in order; `child` finds the userfaultfd of a child by its number. `None` if it does not, or a
/// message is of no kind that is known. Whose fault was read faults again.
pub(crate) fn events_of(
    messages: &[Message],
    mut child: impl FnMut(RawFd) -> Option<Userfaultfd>,
) -> Option<Vec<Event>> {
    let kind = |message: &Message| message[0] as u8;
    let events = messages.iter().filter(|message| kind(message) != PAGE_FAULT);
    let event = |message: &Message| match kind(message) {
        FORK => Some(Event::Fork(Box::new(child(message[1] as RawFd)?))),
        _ => change_of(*message),
    };
    events.map(event).collect()
}

/// The event of which a message tells; `None` if that is no change of one address space.
fn change_of([kind, first, second, third]: Message) -> Option<Event> {
    Some(match kind as u8 {
        REMAP => Event::Changed(Change::Remap(Remap { from: first, to: second, length: third })),
        REMOVE => Event::Remove(first..second),
        UNMAP => Event::Changed(Change::Unmap(first..second)),
        _ => return None,
    })
}

fn not_read(errno: Errno) -> ReadError {
    match errno {
        Errno::EMFILE | Errno::ENFILE => ReadError::NoDescriptor,
        errno => ReadError::Failed(errno.to_string()),
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
