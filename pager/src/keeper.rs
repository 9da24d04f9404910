//! A process beside the pager that shares its table of descriptors. If the pager is killed the userfaultfds stay open in it, so that
//! nobody reads zeros where pages are away. If it has left what that takes, the keeper starts another pager, which goes on. Else evictors kill their processes,
//! and the keeper kills those that have none (forked children not met
//! yet, or not attachable) as soon as they fault. Whose memory that is has to be proved: the thread id in a fault may be one of another PID namespace.

use std::fs;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use gms_transport::client::LEASE;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, clone};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{Pid, pipe2};
use serde::{Deserialize, Serialize};
use userfaultfd::Uffd;

use crate::board::{self, Board};
use crate::handed::{self, Descriptors, Number};
use crate::kernel::pagemap::Pagemap;
use crate::kernel::pidfd::{self, has_ended, kill, pidfd_open};
use crate::kernel::proc;
use crate::kernel::proc::self_pid;
use crate::kernel::uffd::{Userfaultfd, is_userfaultfd};
use crate::kernel::{Event, Faults, Installed, Messages, PageFault, PageTables};
use crate::page_map::PAGE;
use crate::privilege::Part;
use crate::shared::Outcome;
use crate::speech::{self, note};

/// Its name: not one by which people end gms, because it must outlive the pager.
const NAME: &std::ffi::CStr = c"far-keeper";
/// Pause between two looks at what is left: evictors, which can say more, go first.
const LOOK_MS: u8 = 20;
/// Between two looks whether another binary of the pager has gone on.
const HAND_OVER_LOOK_MS: u16 = 5000;
/// Looks after which one that has not is given up: 30 to 35 s.
const HAND_OVER_LOOKS: u32 = 7;
/// Looks, each [`LOOK_MS`] after the one before, after which a pager that was to go on and has not is given up: 40 s. It waits for what evictors were told, which
/// a fork of a large process holds up for seconds, and counts all pages that are away; agents keep those for [`LEASE`]. And how many are tried.
const HEIR_LOOKS: u32 = 2000;
const _: () = assert!(HEIR_LOOKS as u64 * LOOK_MS as u64 + 20_000 <= LEASE.as_secs() * 1000);
const TRIES_MAX: u32 = 5;
/// Where programs can have memory.
pub(crate) const USER_SPACE: Range<u64> = 1 << 16..(1 << 47) - PAGE;
const STACK_LEN: usize = 256 << 10;
/// Bytes read at once of what evictors write: all that the pipe holds.
const READ_MAX: usize = 64 << 10;
/// Bytes that are passed on of all that they write: the last words of some hundred.
const WORDS_MAX: usize = 16 << 10;
/// Fields of /proc/PID/stat, counted from behind the command's name, before the start and the end of the arguments.
const ARG_START: usize = 45;

/// The kernel's bound of a process's descriptors (fs.nr_open), unless somebody has raised it.
const FILES_MAX: u64 = 1 << 20;

static PIPE: OnceLock<Pipe> = OnceLock::new();

/// What evictors write, to the keeper.
#[derive(Debug)]
struct Pipe {
    words: OwnedFd,
    outlet: OwnedFd,
}

/// What is handed to the next binary of the pager.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct KeeperRecord {
    words: Number,
    outlet: Number,
    process: Number,
}

/// What the next binary needs to have a keeper of its own, and to end this one, whose process is `process`.
pub(crate) fn hand_over(process: &OwnedFd, to: &mut Descriptors) -> Option<KeeperRecord> {
    let pipe = PIPE.get()?;
    let [words, outlet] = [&pipe.words, &pipe.outlet].map(|end| to.give(end));
    Some(KeeperRecord { words, outlet, process: to.give(process) })
}

/// The keeper of the binary that this process executed before, which holds all that the pager had then.
pub(crate) fn again(record: &KeeperRecord) -> io::Result<OwnedFd> {
    let pipe = Pipe { words: record.words.take()?, outlet: record.outlet.take()? };
    // Nobody has set it in this process.
    let _ = PIPE.set(pipe);
    record.process.take()
}

/// Starts the keeper, as a sibling of this process or as its child, and returns its process. This process must have one thread only.
pub(crate) fn spawn(board: &'static Board, sibling: bool) -> nix::Result<OwnedFd> {
    raise_descriptor_limit();
    if PIPE.get().is_none() {
        let (words, outlet) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
        let _ = PIPE.set(Pipe { words, outlet });
    }
    let words = &PIPE.get().ok_or(Errno::EBADF)?.words;
    let pids = (self_pid(), board.pager());
    let pager = pidfd_open(pids.0)?;
    let mut stack = vec![0; STACK_LEN];
    let mut flags = CloneFlags::CLONE_FILES;
    flags.set(CloneFlags::CLONE_PARENT, sibling);
    let keep = Box::new(|| {
        keep((pids, &pager), board, words);
        speech::end();
        // SAFETY: it does not return. To return would end this thread only, and the process wait for the one that writes.
        unsafe { libc::_exit(0) }
    });
    // SAFETY: there is no other thread whose locks the child could miss; it has a copy of the stack, as of all memory.
    let pid = unsafe { clone(keep, &mut stack, flags, None)? };
    // Its descriptor must stay open: the table is shared.
    std::mem::forget(pager);
    let process = pidfd_open(pid.as_raw());
    // Nobody could end it later. Its parent reaps it, so that its number is nobody else's yet.
    let process = process.inspect_err(|_| {
        let _ = nix::sys::signal::kill(pid, Signal::SIGKILL);
    })?;
    board.set_keeper(pid.as_raw());
    Ok(process)
}

/// The session has ended. Unless the workload had to be killed, no process depends on a page any more, and the keeper ends.
pub(crate) fn dismiss(board: &Board, outcome: &Outcome) {
    if !matches!(outcome, Outcome::Killed(_)) {
        board.set_over();
    }
}

/// Where an evictor writes what it has done after the end of the pager. Not our standard error: whoever controls the workload's memory controls
/// the evictor too, and may be another user than the one to whom that terminal belongs.
pub(crate) fn outlet() -> Option<BorrowedFd<'static>> {
    PIPE.get().map(|pipe| pipe.outlet.as_fd())
}

/// A descriptor or more for each process of the workload: as many as the system lets us have.
fn raise_descriptor_limit() {
    if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // Best effort.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
    }
}

/// Waits for the end of the pager; then, if no other goes on, kills who faults, until the address spaces have gone.
fn keep((pids, pager): ((i32, i32), &OwnedFd), board: &Board, words: &OwnedFd) {
    // Best effort, like all here: signals and job control are for the pager.
    let _ = SigSet::all().thread_block();
    let _ = nix::unistd::setpgid(Pid::from_raw(0), Pid::from_raw(0));
    let _ = nix::sys::prctl::set_name(NAME);
    hide_command_line();
    let _ = Part::Keeper.give_up_rest();
    let hangs = await_end(pager, board);
    if board.is_over() {
        return;
    }
    let reason = match hangs {
        true => {
            Some("the binary that was to go on in the pager has not begun for 30 s: it is killed")
        }
        false => match another_goes_on(board, pids) {
            Ok(()) => return,
            Err(reason) => reason,
        },
    };
    let (mut left, mut told) = (inherit(words.as_raw_fd()), Told::default());
    // Nobody who reads what is said is waited for.
    speech::begin();
    reason.into_iter().for_each(note);
    // The pager may have read of faults which it did not get to serve: they are made anew.
    left.iter().for_each(|faults| faults.wake(USER_SPACE));
    loop {
        left.retain(|faults| faults.is_alive());
        // An evictor has written when its memory is gone.
        pass_on(words, &mut told);
        if left.is_empty() {
            return;
        }
        let _ = poll(&mut [], PollTimeout::from(LOOK_MS));
        let mut born = Vec::new();
        for faults in &left {
            let mut messages = Messages::default();
            // What cannot be read has ended, or waits for the next turn.
            let _ = faults.read(true, &mut messages);
            for fault in messages.faults {
                stop_at_fault(faults.as_ref(), fault);
            }
            for event in messages.events {
                if let Event::Fork(child) = event {
                    born.push(child);
                }
            }
        }
        left.extend(born);
    }
}

/// Waits for the end of the pager, and kills one in which another binary was to go on and does not: then the workload ends, instead of waiting for ever.
/// Returns whether it has. Looks are counted and not time, of which much may pass while all are frozen.
fn await_end(pager: &OwnedFd, board: &Board) -> bool {
    let (mut handing, mut looks, mut hangs) = (None, 0, false);
    while !has_ended(pager.as_fd()) {
        let timeout = PollTimeout::from(HAND_OVER_LOOK_MS);
        let _ = poll(&mut [PollFd::new(pager.as_fd(), PollFlags::POLLIN)], timeout);
        let now = board.handing_over();
        looks = if now.is_some() && now == handing { looks + 1 } else { 0 };
        handing = now;
        if looks == HAND_OVER_LOOKS {
            kill(pager);
            hangs = true;
        }
    }
    hangs
}

/// Has another pager go on for the one that has died, `watched`, if that has left what it takes; `before` was the pager when this keeper began.
///
/// # Errors
/// If none does; and why, if that is to be told.
fn another_goes_on(
    board: &Board,
    (watched, before): (i32, i32),
) -> Result<(), Option<&'static str>> {
    let (own, died) = (self_pid(), now());
    let (pager, former) = (board.pager(), board.adopter().unwrap_or(0));
    // The one that has died was to go on and had not begun, or has been taken over from: others see to that, if they live.
    if pager != watched && (lives(pager) || lives(former)) {
        return Ok(());
    }
    // What a later one has left is in another table.
    if pager != watched && pager != before {
        return Err(None);
    }
    let (mut adopter, mut reason) = (former, None);
    for _ in 0..TRIES_MAX {
        // Without the command's parent nobody sees how it fares.
        let reaper = board::reaper().is_some_and(lives);
        let Some(estate) = board.estate().filter(|_| reaper) else { break };
        if !board.adopt(pager, adopter, own, now()) {
            reason = Some("pagers that were to go on have died one after the other");
            break;
        }
        adopter = own;
        board.set_keeper(own);
        end_attach(board, estate);
        reason = match start_heir(estate, died).map(|(pid, heir)| await_begin(board, pid, &heir)) {
            Ok(true) => return Ok(()),
            Ok(false) => Some("a pager that was to go on has not begun"),
            Err(_) => Some("no pager that could go on can be started"),
        };
        let _ = poll(&mut [], PollTimeout::from(LOOK_MS));
    }
    if board.stop_adopting(pager, adopter) { Err(reason) } else { Ok(()) }
}

/// Waits until a pager has begun; false if it has ended instead, or does not begin, in which case it is killed.
fn await_begin(board: &Board, pid: i32, heir: &OwnedFd) -> bool {
    let mut looks = 0;
    while board.pager() != pid && !has_ended(heir.as_fd()) {
        looks += 1;
        if looks > HEIR_LOOKS {
            pidfd::end(heir);
        }
        let timeout = PollTimeout::from(LOOK_MS);
        let _ = poll(&mut [PollFd::new(heir.as_fd(), PollFlags::POLLIN)], timeout);
    }
    board.pager() == pid
}

fn lives(pid: i32) -> bool {
    pid != 0 && !matches!(proc::state(pid), None | Some('Z' | 'X'))
}

/// Milliseconds on the clock that goes on whatever is executed.
fn now() -> u64 {
    clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map_or(0, |now| std::time::Duration::from(now).as_millis() as u64)
}

/// Ends the evictor of a process that was being attached, unless that is known already: else it would execute its will. The process can be attached again.
fn end_attach(board: &Board, estate: RawFd) {
    let is_known = |number: &RawFd| handed::names(estate, *number).unwrap_or(false);
    if let Some(number) = board.attaching().filter(|number| !is_known(number)) {
        // SAFETY: whoever owned it is gone; it is not closed here.
        let evictor = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) });
        pidfd::end(&evictor);
        board::set_attaching(None);
    }
}

/// Starts the pager that is to go on. It has a table of its own, with what this one has.
fn start_heir(estate: RawFd, died: u64) -> io::Result<(i32, OwnedFd)> {
    let mut stack = vec![0; STACK_LEN];
    let execute = Box::new(|| {
        // Also of children that were just born.
        for number in userfaultfds() {
            // SAFETY: a flag of a descriptor changes, which is not closed here.
            unsafe { libc::fcntl(number, libc::F_SETFD, 0) };
        }
        let _ = handed::execute_heir(estate, died);
        // SAFETY: it does not return.
        unsafe { libc::_exit(1) }
    });
    // SAFETY: there is no other thread whose locks the child could miss; it has a copy of the stack, as of all memory.
    let pid = unsafe { clone(execute, &mut stack, CloneFlags::CLONE_PARENT, None)? };
    // As in `spawn`.
    let heir = pidfd_open(pid.as_raw()).inspect_err(|_| {
        let _ = nix::sys::signal::kill(pid, Signal::SIGKILL);
    })?;
    Ok((pid.as_raw(), heir))
}

/// Tells what evictors have written, as far as there is room for it. What there is no room for is read too: none may wait.
fn pass_on(words: &OwnedFd, told: &mut Told) {
    let mut bytes = vec![0; READ_MAX];
    let read = nix::unistd::read(words, &mut bytes).unwrap_or(0);
    if let Some(text) = told.pass(&bytes[..read]) {
        note(text);
    }
}

/// What was passed on: whoever controls an evictor can write without end.
#[derive(Default)]
struct Told {
    bytes: usize,
    /// It was said that there was more.
    is_cut: bool,
}

impl Told {
    /// What is to be passed on of what was written, if anything.
    fn pass(&mut self, written: &[u8]) -> Option<String> {
        let fits = written.len().min(WORDS_MAX - self.bytes);
        self.bytes += fits;
        let mut text = String::from_utf8_lossy(&written[..fits]).into_owned();
        if fits < written.len() && !std::mem::replace(&mut self.is_cut, true) {
            text += "\nthe evictors have said more, which is left out";
        }
        Some(text).filter(|text| !text.is_empty())
    }
}

/// Whoever ends gms by its command line must not end the keeper with it.
fn hide_command_line() {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(')').map(|(_, rest)| rest.split_ascii_whitespace());
    let mut addresses = fields.into_iter().flatten().skip(ARG_START).map(str::parse::<usize>);
    if let (Some(Ok(start)), Some(Ok(end))) = (addresses.next(), addresses.next())
        && start != 0
        && start < end
    {
        // SAFETY: the kernel tells where our arguments lie, on the stack that this process has a copy of; nobody reads them any more.
        unsafe { std::ptr::write_bytes(start as *mut u8, 0, end - start) };
    }
}

/// The userfaultfds of the table. All else is closed but for stderr and the pipe, which ends the evictors' sockets: their wills are executed.
fn inherit(words: RawFd) -> Vec<Box<dyn Faults>> {
    let mut left: Vec<Box<dyn Faults>> = Vec::new();
    let kept = [libc::STDERR_FILENO, words];
    for number in descriptors().into_iter().filter(|number| !kept.contains(number)) {
        if is_userfaultfd(number) {
            // SAFETY: the pager, which owned the descriptor, is gone.
            let uffd = unsafe { Uffd::from_raw_fd(number) };
            left.push(Box::new(Userfaultfd::of_child(uffd)));
        } else {
            // SAFETY: as above. One is closed already: that of the directory.
            unsafe { libc::close(number) };
        }
    }
    left
}

/// Whether a process lives whose memory this process serves.
pub(crate) fn serves_memory() -> bool {
    let is_alive = |number| {
        // SAFETY: it is not closed here. Another thread may close it meanwhile: then nothing is asked for, or another of its kind.
        let uffd = unsafe { Uffd::from_raw_fd(number) };
        ManuallyDrop::new(Userfaultfd::of_child(uffd)).is_alive()
    };
    userfaultfds().into_iter().any(is_alive)
}

/// The userfaultfds of this process.
pub(crate) fn userfaultfds() -> Vec<RawFd> {
    descriptors().into_iter().filter(|&number| is_userfaultfd(number)).collect()
}

fn descriptors() -> Vec<RawFd> {
    let Ok(entries) = fs::read_dir("/proc/self/fd") else {
        // There is none left to look with: all that there may be.
        let most = getrlimit(Resource::RLIMIT_NOFILE).map_or(FILES_MAX, |(most, _)| most);
        return (0..most.min(FILES_MAX) as RawFd).collect();
    };
    entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok()).collect()
}

/// Kills the process that faults, or lets it get SIGBUS: its page is lost.
fn stop_at_fault(faults: &dyn Faults, fault: PageFault) {
    let page = fault.page.get();
    let hint = proc::status_field(fault.tid, "Tgid:").map(|tgid| tgid as i32);
    let found = hint.into_iter().chain(proc::all()).find_map(|pid| {
        let process = pidfd_open(pid).ok()?;
        (pid != self_pid() && has_memory(pid, faults, page)).then_some((pid, process))
    });
    match found {
        Some((pid, process)) => {
            kill(&process);
            note(format!(
                "the pager has died: process {pid} is killed, because its evicted pages are lost"
            ));
        }
        None => {
            // A page that is not mapped any more needs no poison. While the address space is being changed nothing can be told: who faults does so again then.
            let _ = faults.mark(page..page + PAGE, false);
            if !matches!(faults.poison(page), Installed::Done | Installed::Exists) {
                faults.wake(page..page + PAGE);
            }
        }
    }
}

/// Whether a process has the memory of this userfaultfd: markers that are set and taken away through the one are seen to come and go in the other.
fn has_memory(pid: i32, faults: &dyn Faults, page: u64) -> bool {
    let Ok(page_tables) = Pagemap::open(pid) else { return false };
    let range = page..page + PAGE;
    [true, false, true, false, true].into_iter().all(|marked| {
        let seen = || page_tables.marked(range.clone()).is_ok_and(|found| !found.is_empty());
        faults.mark(range.clone(), marked).is_ok() && seen() == marked
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_evictors_say_is_bounded() {
        let mut told = Told::default();
        assert_eq!(told.pass(b""), None);
        assert_eq!(told.pass(b"killed\n").as_deref(), Some("killed\n"));
        let said: Vec<String> = (0..100).filter_map(|_| told.pass(&[b'x'; READ_MAX])).collect();
        assert!((WORDS_MAX - 7..WORDS_MAX + 80).contains(&said.concat().len()), "{}", said.len());
        assert_eq!(said.concat().matches("left out").count(), 1);
        // What ends just at the bound is not cut.
        let mut told = Told::default();
        let all = "y".repeat(WORDS_MAX);
        assert_eq!(told.pass(all.as_bytes()), Some(all));
        assert_eq!(told.pass(b""), None);
        assert!(told.pass(b"z").is_some_and(|text| text.contains("left out")));
    }
}
