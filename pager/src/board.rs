//! What the processes of one `gms run` or `gms attach` share: one page of memory, which is there before the first of them is forked. It tells how far the command is
//! and who holds its pages, also to one of them that was stopped meanwhile, or comes late.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap};
use nix::sys::stat::fstat;
use nix::unistd::ftruncate;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// By itself, with this status.
    Exited(u8),
    /// By this signal.
    Killed(i32),
}

/// This process's.
static BOARD: OnceLock<(OwnedFd, &'static Board)> = OnceLock::new();

/// Added to a status or signal, so that no end is zero.
const EXITED: u32 = 1 << 8;
const KILLED: u32 = 2 << 8;
/// Of an estate: there is none, and will be none.
const WITHDRAWN: i32 = -1;
/// So many pagers go on in a row, each of which has died within `ROW` (ms).
const ROW_MAX: u32 = 20;
const ROW: u64 = 100;

impl End {
    /// The exit status as a shell gives it.
    pub(crate) fn status(self) -> u8 {
        match self {
            End::Exited(status) => status,
            End::Killed(signal) => 128_u8.wrapping_add(signal as u8),
        }
    }

    fn to_word(self) -> u32 {
        match self {
            End::Exited(status) => EXITED | u32::from(status),
            End::Killed(signal) => KILLED | signal as u32,
        }
    }

    fn of_word(word: u32) -> Option<End> {
        let low = word & (EXITED - 1);
        match word - low {
            EXITED => Some(End::Exited(low as u8)),
            KILLED => Some(End::Killed(low as i32)),
            _ => None,
        }
    }
}

/// The process id of the command's parent, in a pager beside which there is one. Both are children of the front.
pub(crate) fn reaper() -> Option<i32> {
    let pid = BOARD.get()?.1.reaper.load(Ordering::Acquire);
    (pid != 0).then_some(pid)
}

/// The evictor of a process that is being attached, by the number of its process's descriptor; `None` when that process is attached, or will not be.
pub(crate) fn set_attaching(evictor: Option<i32>) {
    let word = evictor.map_or(0, |number| number + 1);
    BOARD.get().into_iter().for_each(|(_, board)| board.attaching.store(word, Ordering::SeqCst));
}

/// What this process's pager has left is not true any more.
pub(crate) fn leave_nothing() {
    BOARD.get().into_iter().for_each(|(_, board)| board.leave(None));
}

/// The pager of this process dies on purpose, or is not to be trusted: no other goes on for it. Also for handlers of signals.
pub(crate) fn withdraw() {
    BOARD.get().into_iter().for_each(|(_, board)| board.estate.store(WITHDRAWN, Ordering::SeqCst));
}

/// A pager that ends by an error of its own is not to be trusted.
pub(crate) fn withdraw_on_errors() {
    extern "C" fn end(signal: libc::c_int) {
        withdraw();
        // SAFETY: it is as if there had been no handler.
        unsafe { libc::raise(signal) };
    }
    use libc::{SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP};
    for signal in [SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP] {
        // SAFETY: all zeros is such a struct.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = end as extern "C" fn(libc::c_int) as usize;
        action.sa_flags = libc::SA_RESETHAND | libc::SA_NODEFER | libc::SA_ONSTACK;
        // SAFETY: the kernel reads one live struct. The handler makes system calls and stores to an atomic alone.
        unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
    }
}

/// The memory of this process's board.
pub(crate) fn memory() -> Option<BorrowedFd<'static>> {
    BOARD.get().map(|(memory, _)| memory.as_fd())
}

/// The page. All zero before anything has happened. Another binary goes on with it: its layout may only grow, and what has grown is zero then.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Board {
    over: AtomicBool,
    keeper: AtomicI32,
    reaper: AtomicI32,
    command: AtomicI32,
    end: AtomicU32,
    childless: AtomicBool,
    /// Odd while another binary is to go on; grows whenever that changes.
    handed: AtomicU32,
    /// The pager, and behind it the keeper that has another one go on for it.
    who: AtomicU64,
    /// The descriptor of what the pager leaves if it dies, and one; 0 if there is nothing.
    estate: AtomicI32,
    /// How many have gone on in a row, and when the last began.
    row: AtomicU32,
    begun: AtomicU64,
    /// The descriptor of the evictor of a process that is being attached, and one.
    attaching: AtomicI32,
}

/// A page of memory.
const LEN: i64 = 4096;
const _: () = assert!(size_of::<Board>() <= LEN as usize);

impl Board {
    /// The board of this process, and of those that are forked from now on. It is empty: there is one for the life of a process.
    pub(crate) fn new() -> nix::Result<&'static Board> {
        let memory = memfd_create("gms-board", MFdFlags::MFD_CLOEXEC)?;
        ftruncate(&memory, LEN)?;
        Board::on(memory)
    }

    /// The board that this process had before it executed this binary.
    pub(crate) fn again(memory: OwnedFd) -> io::Result<&'static Board> {
        // That of a binary before is as short as its type was.
        if fstat(&memory)?.st_size < LEN {
            ftruncate(&memory, LEN)?;
        }
        Ok(Board::on(memory)?)
    }

    fn on(memory: OwnedFd) -> nix::Result<&'static Board> {
        let length = std::num::NonZeroUsize::MIN;
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping; it is never unmapped, the file is as long as the type, and what boards have been written with, or all zeros, is a value of
        // the type.
        let board = unsafe {
            let page = mmap(None, length, access, MapFlags::MAP_SHARED, &memory, 0)?;
            page.cast::<Board>().as_ref()
        };
        Ok(BOARD.get_or_init(|| (memory, board)).1)
    }

    /// Whether the session has ended such that no process depends on a page any more.
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Says so.
    pub(crate) fn set_over(&self) {
        self.over.store(true, Ordering::Release);
    }

    /// The keeper's process id; zero before it has been started.
    pub(crate) fn keeper(&self) -> i32 {
        self.keeper.load(Ordering::Acquire)
    }

    /// Notes the keeper's process id.
    pub(crate) fn set_keeper(&self, pid: i32) {
        self.keeper.store(pid, Ordering::Release);
    }

    /// The pager's process id.
    pub(crate) fn pager(&self) -> i32 {
        self.who().0
    }

    /// The keeper that has another pager go on for this one, which has died.
    pub(crate) fn adopter(&self) -> Option<i32> {
        Some(self.who().1).filter(|pid| *pid != 0)
    }

    fn who(&self) -> (i32, i32) {
        let word = self.who.load(Ordering::SeqCst);
        ((word >> 32) as i32, word as i32)
    }

    /// Whether nobody had changed that: the pager, and the keeper that has another go on.
    fn change(&self, from: (i32, i32), to: (i32, i32)) -> bool {
        let word = |(pager, adopter): (i32, i32)| (pager as u64) << 32 | adopter as u64;
        self.who.compare_exchange(word(from), word(to), Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// The first pager.
    pub(crate) fn set_pager(&self, pid: i32) {
        self.who.store((pid as u64) << 32, Ordering::SeqCst);
    }

    /// This process goes on for the pager, at a time in milliseconds, unless it is given up. What the one before has left is good until this one leaves something
    /// else.
    pub(crate) fn begin(&self, pid: i32, now: u64) -> bool {
        let (pager, adopter) = self.who();
        self.begun.store(now, Ordering::SeqCst);
        adopter != 0 && self.estate().is_some() && self.change((pager, adopter), (pid, 0))
    }

    /// The keeper `adopter` has another pager go on for `pager`, at a time in milliseconds; before, `former` was to. False if somebody else has changed that, or too
    /// many have gone on in a row.
    pub(crate) fn adopt(&self, pager: i32, former: i32, adopter: i32, now: u64) -> bool {
        let is_in_row = now < self.begun.load(Ordering::SeqCst) + ROW;
        let row = if is_in_row { self.row.load(Ordering::SeqCst) + 1 } else { 1 };
        if row > ROW_MAX || !self.change((pager, former), (pager, adopter)) {
            return false;
        }
        self.row.store(row, Ordering::SeqCst);
        true
    }

    /// No pager goes on for `pager`, as far as `adopter` is concerned. False if one has.
    pub(crate) fn stop_adopting(&self, pager: i32, adopter: i32) -> bool {
        let is_over = adopter == 0 || self.change((pager, adopter), (pager, 0));
        if is_over {
            self.give_up();
        }
        is_over
    }

    /// Where that is written what the pager leaves if it dies, or that nothing is. For the pager only.
    pub(crate) fn leave(&self, estate: Option<i32>) {
        let word = estate.map_or(0, |number| number + 1);
        let leave = |now: i32| (now != WITHDRAWN).then_some(word);
        let _ = self.estate.fetch_update(Ordering::SeqCst, Ordering::SeqCst, leave);
    }

    /// What it has left.
    pub(crate) fn estate(&self) -> Option<i32> {
        Some(self.estate.load(Ordering::SeqCst) - 1).filter(|number| *number >= 0)
    }

    /// See [`set_attaching`].
    pub(crate) fn attaching(&self) -> Option<i32> {
        Some(self.attaching.load(Ordering::SeqCst) - 1).filter(|number| *number >= 0)
    }

    /// No other pager goes on.
    pub(crate) fn give_up(&self) {
        self.estate.store(WITHDRAWN, Ordering::SeqCst);
    }

    /// Notes that another binary of the pager is to go on, or that this one does. For the pager only.
    pub(crate) fn hand_over(&self, is: bool) {
        let handed = self.handed.load(Ordering::Acquire);
        if (handed % 2 == 1) != is {
            self.handed.store(handed.wrapping_add(1), Ordering::Release);
        }
    }

    /// While another binary is to go on: a number of its own for each time.
    pub(crate) fn handing_over(&self) -> Option<u32> {
        Some(self.handed.load(Ordering::Acquire)).filter(|handed| handed % 2 == 1)
    }

    /// Whether another binary was to go on once.
    pub(crate) fn was_handed_over(&self) -> bool {
        self.handed.load(Ordering::Acquire) != 0
    }

    /// The process ids of the command and of its parent, or the error because of which there is no command; `None` before that is known.
    pub(crate) fn command(&self) -> Option<nix::Result<(i32, i32)>> {
        match self.command.load(Ordering::Acquire) {
            0 => None,
            pid @ 1.. => Some(Ok((pid, self.reaper.load(Ordering::Relaxed)))),
            errno => Some(Err(nix::errno::Errno::from_raw(-errno))),
        }
    }

    /// Notes that.
    pub(crate) fn set_command(&self, command: nix::Result<i32>, reaper: i32) {
        self.reaper.store(reaper, Ordering::Release);
        let pid = command.unwrap_or_else(|errno| -(errno as i32));
        self.command.store(pid, Ordering::Release);
    }

    /// How the command ended, once it did; its background children may live on.
    pub(crate) fn end(&self) -> Option<End> {
        End::of_word(self.end.load(Ordering::Acquire))
    }

    /// Notes that.
    pub(crate) fn set_end(&self, end: End) {
        self.end.store(end.to_word(), Ordering::Release);
    }

    /// Whether nothing is left of the command's tree. Then also its end is known.
    pub(crate) fn is_childless(&self) -> bool {
        self.childless.load(Ordering::Acquire)
    }

    /// Notes that.
    pub(crate) fn set_childless(&self) {
        self.childless.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::errno::Errno;

    #[test]
    fn what_is_noted_is_what_is_read() {
        let board = Board::default();
        assert_eq!((board.end(), board.command()), (None, None));
        for end in [End::Exited(0), End::Exited(255), End::Killed(1), End::Killed(64)] {
            board.set_end(end);
            assert_eq!(board.end(), Some(end));
        }
        assert!(board.handing_over().is_none() && !board.was_handed_over());
        board.hand_over(true);
        let first = board.handing_over();
        board.hand_over(true);
        assert!(first.is_some() && board.handing_over() == first);
        board.hand_over(false);
        assert!(board.handing_over().is_none() && board.was_handed_over());
        board.hand_over(true);
        assert_ne!(board.handing_over(), first);
        board.set_command(Err(Errno::EAGAIN), 7);
        assert_eq!(board.command(), Some(Err(Errno::EAGAIN)));
        board.set_command(Ok(8), 7);
        assert_eq!(board.command(), Some(Ok((8, 7))));
    }
}
