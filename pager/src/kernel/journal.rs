//! What is read of userfaultfds, in memory that outlives this process.
//!
//! A thread that forks, unmaps or moves memory goes on as soon as its message is read, also if the reader dies in that moment. So the kernel itself writes the
//! messages to where they are kept. Each userfaultfd has a line of that memory for what was read and is not applied, and a generation, which changes when all of it is:
//! whoever finds another one noted in the tables (`Tables::note_applied`) knows that they have it already.
//!
//! A line names the space and the descriptor that it is of, as long as the descriptor is open. Of a child whose birth is among what is kept, and not applied, the
//! tables do not know: its line is as good as none.
//!
//! The kernel takes a message from its queue before it copies it. For a copy that cannot fail the line is filled with memory, and locked if that is allowed.

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, compiler_fence};
use std::sync::{Arc, Mutex};

use gms_policy::ids::SpaceId;
use memmap2::{MmapOptions, MmapRaw};
use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{mlock, munlock};

use crate::sync::lock;

/// Userfaultfds that have a line; of others nothing is kept.
pub(crate) const LINES_MAX: usize = 4096;
/// Messages of a line. Behind as many that are not applied others are not kept.
pub(crate) const MESSAGES_MAX: usize = 255;
/// Messages that are read at once, at most.
pub(crate) const READ_MAX: usize = 32;
const MESSAGE_LEN: usize = size_of::<Message>();
/// A head, as long as a message, and the messages.
const LINE_LEN: usize = (1 + MESSAGES_MAX) * MESSAGE_LEN;
/// Words of the head.
const GENERATION: usize = 0;
/// A byte for each [`Caveat`].
const CAVEATS: usize = 1;
/// 0 if it is nobody's.
const SPACE: usize = 2;
const DESCRIPTOR: usize = 3;

/// `struct uffd_msg`: its kind in the lowest byte of the first word, and what it says in the others.
pub(crate) type Message = [u64; 4];

/// Why what is kept is not all that an heir needs to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caveat {
    /// More was read than is kept.
    Incomplete,
    /// Something is, or was, read without the gate, and may be a change: pages that were being moved out then may be others than were meant.
    Ungated,
    /// Something was taken out of the userfaultfd. For the gate's holder.
    Relieved,
}

/// See the module's documentation.
pub struct Journal {
    /// Open as long as anybody has a descriptor of it.
    file: File,
    memory: MmapRaw,
    free: Mutex<Vec<u32>>,
    /// Whether what is kept of userfaultfds that are closed is of no use to anybody: another pager may have to go on in the place of one that does not.
    is_ours: AtomicBool,
}

impl Journal {
    /// An empty one.
    pub fn new() -> std::io::Result<Arc<Journal>> {
        let file = File::from(memfd_create("gms-events", MFdFlags::MFD_CLOEXEC)?);
        file.set_len((LINES_MAX * LINE_LEN) as u64)?;
        let memory = MmapOptions::new().len(LINES_MAX * LINE_LEN).map_raw(&file)?;
        let free = Mutex::new((0..LINES_MAX as u32).rev().collect());
        Ok(Arc::new(Journal { file, memory, free, is_ours: AtomicBool::new(true) }))
    }

    /// This pager goes on.
    pub(crate) fn begin(&self) {
        self.is_ours.store(true, Ordering::Relaxed);
    }

    /// The memory with all lines.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// That of a pager which has died, and what it has kept there for whom. `generation` tells which of a line the tables know: of another all is applied.
    ///
    /// # Errors
    /// If it is none.
    pub(crate) fn again(
        file: File,
        generation: impl Fn(u32) -> u64,
    ) -> std::io::Result<(Arc<Journal>, Vec<Left>)> {
        if file.metadata()?.len() < (LINES_MAX * LINE_LEN) as u64 {
            return Err(std::io::ErrorKind::InvalidData.into());
        }
        let memory = MmapOptions::new().len(LINES_MAX * LINE_LEN).map_raw(&file)?;
        let (free, is_ours) = (Mutex::default(), AtomicBool::new(false));
        let journal = Arc::new(Journal { file, memory, free, is_ours });
        let mut left = Vec::new();
        for number in (0..LINES_MAX as u32).rev() {
            match Left::of(&journal, number, generation(number)) {
                Some(one) => left.push(one),
                None => lock(&journal.free).push(number),
            }
        }
        Ok((journal, left))
    }

    /// A line for another userfaultfd; `None` if there are too many.
    pub(crate) fn line(self: &Arc<Journal>) -> Option<Line> {
        let number = lock(&self.free).pop()?;
        let line = Line { journal: self.clone(), number, end: AtomicUsize::new(0) };
        // All of its memory is there from now on.
        (0..MESSAGES_MAX).for_each(|index| line.clear(index));
        line.write(CAVEATS, 0);
        // SAFETY: the line is mapped as long as the journal lives.
        let _ = unsafe { mlock(line.at(0).cast(), LINE_LEN) };
        Some(line)
    }
}

/// What the pager before has kept of a userfaultfd.
pub(crate) struct Left {
    pub(crate) line: Line,
    pub(crate) space: SpaceId,
    pub(crate) descriptor: RawFd,
    /// What was read and is not applied, and faults.
    pub(crate) messages: Vec<Message>,
    pub(crate) caveats: Vec<Caveat>,
}

impl Left {
    /// That of a line, unless it is nobody's.
    fn of(journal: &Arc<Journal>, number: u32, generation: u64) -> Option<Left> {
        let head = number as usize * LINE_LEN;
        // SAFETY: within the mapping, and aligned.
        let head = unsafe { journal.memory.as_mut_ptr().add(head).cast::<u64>() };
        // SAFETY: a word of the head.
        let space = SpaceId(unsafe { head.add(SPACE).read() });
        if space.0 == 0 {
            return None;
        }
        let (journal, end) = (journal.clone(), AtomicUsize::new(MESSAGES_MAX));
        let line = Line { journal, number, end };
        if line.read(GENERATION) != generation {
            line.empty();
            line.write(GENERATION, generation);
        }
        // SAFETY: a message of this line.
        let message = |index: usize| unsafe { line.at(1 + index).read() };
        let kept = |index: &usize| message(*index)[0] != 0;
        let messages: Vec<Message> = (0..MESSAGES_MAX).filter(kept).map(message).collect();
        let end = (0..MESSAGES_MAX).rev().find(kept).map_or(0, |last| last + 1);
        let all = [Caveat::Incomplete, Caveat::Ungated, Caveat::Relieved];
        // SAFETY: a byte of the head.
        let is_there =
            |caveat: &Caveat| unsafe { line.caveats().add(*caveat as usize).read() } != 0;
        let caveats = all.into_iter().filter(is_there).collect();
        let descriptor = line.read(DESCRIPTOR) as RawFd;
        line.end.store(end, Ordering::Relaxed);
        // SAFETY: the line is mapped as long as the journal lives.
        let _ = unsafe { mlock(line.at(0).cast(), LINE_LEN) };
        Some(Left { line, space, descriptor, messages, caveats })
    }
}

/// What is kept of one userfaultfd. It has one reader at a time.
pub(crate) struct Line {
    journal: Arc<Journal>,
    number: u32,
    /// Behind the last message that is kept.
    end: AtomicUsize,
}

impl Line {
    /// Where the userfaultfd of a child has its own.
    pub(crate) fn journal(&self) -> &Arc<Journal> {
        &self.journal
    }

    /// Whose line it is from now on.
    pub(crate) fn name(&self, space: SpaceId, descriptor: RawFd) {
        self.write(DESCRIPTOR, descriptor as u64);
        compiler_fence(Ordering::SeqCst);
        self.write(SPACE, space.0);
    }

    /// Which line it is, and its generation when all that was read is applied.
    pub(crate) fn next_generation(&self) -> (u32, u64) {
        (self.number, self.read(GENERATION).wrapping_add(1))
    }

    /// Reads up to `count` messages, and gives each to `take`, which tells whether it is to be kept. Nothing is read if there is none.
    pub(crate) fn fill(
        &self,
        fd: BorrowedFd<'_>,
        count: usize,
        mut take: impl FnMut(Message) -> bool,
    ) -> nix::Result<()> {
        let end = self.end.load(Ordering::Relaxed);
        let ungated = count == 1;
        // The kernel gives faults before events: what is read together may leave holes.
        let count = if end > MESSAGES_MAX / 2 { 1 } else { count };
        let room = count.min(MESSAGES_MAX - end);
        if room == 0 {
            self.note(Caveat::Incomplete, true);
            return read_unkept(fd, count, take);
        }
        if ungated {
            self.note(Caveat::Ungated, true);
        }
        let first = self.at(1 + end);
        // SAFETY: there is room for so many messages.
        let read = unsafe { libc::read(fd.as_raw_fd(), first.as_ptr().cast(), room * MESSAGE_LEN) };
        let read = messages(read);
        for index in end..end + *read.as_ref().unwrap_or(&0) {
            // SAFETY: a message of this line, which the kernel has written.
            match take(unsafe { self.at(1 + index).read() }) {
                true => self.end.store(index + 1, Ordering::Relaxed),
                false => self.clear(index),
            }
        }
        if ungated && self.end.load(Ordering::Relaxed) == end {
            self.note(Caveat::Ungated, false);
        }
        read.map(drop)
    }

    /// Notes that it is so, or is not any more.
    pub(crate) fn note(&self, caveat: Caveat, is: bool) {
        compiler_fence(Ordering::SeqCst);
        // SAFETY: a byte of the head. Nobody else writes that one: each has its thread.
        unsafe { self.caveats().add(caveat as usize).write_volatile(u8::from(is)) };
        compiler_fence(Ordering::SeqCst);
    }

    fn caveats(&self) -> NonNull<u8> {
        // SAFETY: a word of the head.
        unsafe { self.at(0).cast::<u64>().add(CAVEATS).cast() }
    }

    /// All that was read is applied, and the tables say so.
    pub(crate) fn applied(&self) {
        let generation = self.next_generation().1;
        self.empty();
        // Up to here the tables name another, and nothing that is left counts.
        compiler_fence(Ordering::SeqCst);
        self.write(GENERATION, generation);
    }

    fn empty(&self) {
        (0..self.end.swap(0, Ordering::Relaxed)).for_each(|index| self.clear(index));
        self.note(Caveat::Incomplete, false);
        self.note(Caveat::Ungated, false);
    }

    /// The head, or a message behind it.
    fn at(&self, place: usize) -> NonNull<Message> {
        assert!(place <= MESSAGES_MAX);
        let offset = self.number as usize * LINE_LEN + place * MESSAGE_LEN;
        // SAFETY: within the mapping (there are `LINES_MAX` numbers), which is not at zero, and aligned.
        unsafe { NonNull::new_unchecked(self.journal.memory.as_mut_ptr().add(offset)).cast() }
    }

    fn clear(&self, index: usize) {
        // SAFETY: a message of this line; all zeros is none.
        unsafe { self.at(1 + index).cast::<u64>().write_volatile(0) };
    }

    fn read(&self, word: usize) -> u64 {
        // SAFETY: a word of the head.
        unsafe { self.at(0).cast::<u64>().add(word).read() }
    }

    fn write(&self, word: usize, value: u64) {
        // SAFETY: a word of the head.
        unsafe { self.at(0).cast::<u64>().add(word).write_volatile(value) };
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if !self.journal.is_ours.load(Ordering::Relaxed) {
            return;
        }
        self.write(SPACE, 0);
        // Of this generation, which the tables have, nothing is left to be applied.
        self.empty();
        // SAFETY: it was locked, or could not be.
        let _ = unsafe { munlock(self.at(0).cast(), LINE_LEN) };
        lock(&self.journal.free).push(self.number);
    }
}

/// Reads messages of which nothing is kept.
pub(crate) fn read_unkept(
    fd: BorrowedFd<'_>,
    count: usize,
    mut take: impl FnMut(Message) -> bool,
) -> nix::Result<()> {
    let mut buffer = [Message::default(); READ_MAX];
    let length = count.min(READ_MAX) * MESSAGE_LEN;
    // SAFETY: the buffer is at least so long, and any bytes are a message.
    let read = unsafe { libc::read(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), length) };
    for message in &buffer[..messages(read)?] {
        take(*message);
    }
    Ok(())
}

/// How many messages a read has given.
fn messages(read: isize) -> nix::Result<usize> {
    match Errno::result(read) {
        Err(Errno::EAGAIN) => Ok(0),
        read => Ok(read? as usize / MESSAGE_LEN),
    }
}

#[cfg(test)]
mod tests {
    use std::mem::ManuallyDrop;
    use std::os::fd::AsFd;
    use std::time::{Duration, Instant};

    use nix::fcntl::OFlag;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use nix::sys::signal::{Signal, kill};
    use nix::sys::wait::waitpid;
    use nix::unistd::{ForkResult, Pid, fork, pipe2};
    use zerocopy::IntoBytes;

    use super::*;
    use crate::fault::tests::{map, own_userfaultfd};
    use crate::kernel::uffd::Userfaultfd;
    use crate::kernel::{Event, Faults, Messages};
    use crate::page_map::PAGE;
    use crate::space::Space;

    /// Who maps the memory after this process has died.
    struct Heir<'a>(&'a Line);

    impl Heir<'_> {
        fn kept(&self) -> Vec<Message> {
            // SAFETY: a message of this line.
            let message = |index| unsafe { self.0.at(1 + index).read() };
            (0..MESSAGES_MAX).map(message).filter(|message| message[0] != 0).collect()
        }

        fn is_complete(&self) -> bool {
            self.0.read(CAVEATS) == 0
        }

        /// Whose it is, and the number of its descriptor.
        fn name(&self) -> Option<(SpaceId, RawFd)> {
            let space = self.0.read(SPACE);
            (space != 0).then(|| (SpaceId(space), self.0.read(DESCRIPTOR) as RawFd))
        }
    }

    /// Moves pages away, one after the other, as each has been read of.
    fn move_away(start: u64, count: u64) {
        let target = map(count * PAGE);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        for offset in (0..count).map(|page| page * PAGE) {
            let [from, to] = [start, target].map(|base| (base + offset) as *mut libc::c_void);
            // SAFETY: both pages are the test's own.
            unsafe { libc::mremap(from, PAGE as usize, PAGE as usize, flags, to) };
        }
    }

    /// A userfaultfd of this process, of pages that another thread moves away.
    fn moving<R>(count: u64, kept: bool, test: impl FnOnce(&Userfaultfd) -> R) -> R {
        let (start, faults) = (map(count * PAGE), Userfaultfd::of_child(own_userfaultfd()));
        let faults = if kept { faults.kept(&Journal::new().expect("a memfd")) } else { faults };
        assert!(faults.register(start..start + count * PAGE));
        std::thread::scope(|scope| {
            scope.spawn(move || move_away(start, count));
            test(&faults)
        })
    }

    fn read(faults: &Userfaultfd, count: usize) -> Vec<Event> {
        let mut messages = Messages::default();
        while messages.events.len() < count {
            let mut fds = [PollFd::new(faults.as_fd(), PollFlags::POLLIN)];
            assert_eq!(poll(&mut fds, PollTimeout::from(10_000u16)), Ok(1));
            faults.read(true, &mut messages).expect("a message");
        }
        messages.events
    }

    #[test]
    fn what_is_read_is_kept_until_it_is_applied() {
        moving(5, true, |faults| {
            let line = faults.line().expect("a line");
            let generation = line.next_generation();
            assert_eq!(read(faults, 3).len(), 3);
            assert_eq!((Heir(line).kept().len(), faults.next_generation()), (3, Some(generation)));
            faults.applied();
            assert_eq!(Heir(line).kept().len(), 0);
            assert_eq!(faults.next_generation(), Some((generation.0, generation.1 + 1)));
            read(faults, 2);
            assert_eq!(Heir(line).kept().len(), 2);
        });
    }

    #[test]
    fn a_fault_is_not_kept() {
        let (page, faults) = (map(PAGE), Userfaultfd::of_child(own_userfaultfd()));
        let faults = faults.kept(&Journal::new().expect("a memfd"));
        assert!(faults.register(page..page + PAGE));
        std::thread::scope(|scope| {
            // SAFETY: the test's own memory, in which the page comes when it is zeroed.
            scope.spawn(move || unsafe { (page as *const u8).read_volatile() });
            let mut messages = Messages::default();
            while messages.faults.is_empty() {
                faults.read(true, &mut messages).expect("a message");
            }
            assert!(Heir(faults.line().expect("a line")).kept().is_empty());
            faults.zero(page..page + PAGE);
        });
    }

    #[test]
    fn of_more_than_a_line_holds_it_is_said_that_more_was_read() {
        let count = MESSAGES_MAX + 3;
        moving(count as u64, true, |faults| {
            let line = faults.line().expect("a line");
            read(faults, MESSAGES_MAX);
            assert!(Heir(line).is_complete());
            assert_eq!(read(faults, 3).len(), 3);
            assert!(!Heir(line).is_complete());
            faults.applied();
            assert!(Heir(line).is_complete() && Heir(line).kept().is_empty());
        });
    }

    /// Of each 32 that are read together 31 are.
    #[test]
    fn what_is_not_kept_takes_no_room_from_what_is() {
        const ROUNDS: usize = 60;
        let (reader, writer) = pipe2(OFlag::O_NONBLOCK).expect("a pipe");
        let line = Journal::new().expect("a memfd").line().expect("a line");
        for round in 0..ROUNDS {
            let message = |place: usize| [u64::from(place == READ_MAX - 1), round as u64, 0, 0];
            let messages: Vec<u64> = (0..READ_MAX).flat_map(message).collect();
            nix::unistd::write(&writer, messages.as_bytes()).expect("room");
        }
        let mut read = 0;
        while read < ROUNDS * READ_MAX {
            let take = |message: Message| {
                read += 1;
                message[0] != 0
            };
            line.fill(reader.as_fd(), READ_MAX, take).expect("messages");
        }
        assert!(Heir(&line).is_complete());
        let kept: Vec<u64> = Heir(&line).kept().iter().map(|message| message[1]).collect();
        assert_eq!(kept, (0..ROUNDS as u64).collect::<Vec<u64>>());
    }

    #[test]
    fn a_line_is_another_userfaultfds_afterwards() {
        let journal = Journal::new().expect("a memfd");
        let lines: Vec<Line> = (0..LINES_MAX).map(|_| journal.line().expect("a line")).collect();
        assert!(journal.line().is_none());
        let (number, generation) = lines[7].next_generation();
        drop(lines);
        let again: Vec<Line> = (0..LINES_MAX).map(|_| journal.line().expect("a line")).collect();
        let again = again.iter().find(|line| line.number == number).expect("the same");
        assert_eq!(again.next_generation().1, generation, "the tables know of no other");
        // Without a line all is read the same.
        moving(3, false, |faults| {
            assert!(read(faults, 3).len() == 3 && faults.next_generation().is_none());
        });
    }

    /// And not afterwards: its number may be another's then.
    #[test]
    fn a_line_names_its_space_and_its_descriptor_while_that_is_open() {
        let journal = Journal::new().expect("a memfd");
        let first = Line { journal: journal.clone(), number: 0, end: AtomicUsize::new(0) };
        let (first, heir) = (&ManuallyDrop::new(first), |line| Heir(line).name());
        let faults = Userfaultfd::of_child(own_userfaultfd()).kept(&journal);
        assert_eq!(heir(first), None, "nobody has met it");
        let descriptor = faults.as_fd().as_raw_fd();
        let space = Space::new(SpaceId(7), Box::new(faults));
        assert_eq!(heir(first), Some((SpaceId(7), descriptor)));
        drop(space);
        assert_eq!(heir(first), None);
    }

    /// A process that reads until the line is full, and then waits for its end.
    fn reader(line: &Line, fd: BorrowedFd<'_>) -> Pid {
        // SAFETY: the child makes system calls alone, and has a copy of all that is borrowed.
        let forked = unsafe { fork() }.expect("a process");
        let ForkResult::Parent { child } = forked else {
            let mut kept = 0;
            while kept < MESSAGES_MAX {
                let take = |_| {
                    kept += 1;
                    true
                };
                let _ = line.fill(fd, READ_MAX, take);
            }
            loop {
                nix::unistd::pause();
            }
        };
        child
    }

    /// Each goes on as soon as it is read of, whether the reader lives then or not.
    #[test]
    fn no_message_is_lost_when_its_reader_is_killed() {
        const PAGES: u64 = 1500;
        let line = Journal::new().expect("a memfd").line().expect("a line");
        let start = map(PAGES * PAGE);
        let faults = Userfaultfd::of_child(own_userfaultfd());
        assert!(faults.register(start..start + PAGES * PAGE));
        let mover = std::thread::spawn(move || move_away(start, PAGES));
        let (mut told, mut kills, begun) = (Vec::new(), 0, Instant::now());
        while !mover.is_finished() {
            let reader = reader(&line, faults.as_fd());
            let heir = Heir(&line);
            while heir.kept().is_empty() && !mover.is_finished() {
                assert!(begun.elapsed() < Duration::from_secs(60), "{} read", told.len());
                std::hint::spin_loop();
            }
            // Somewhere in the reads of the next 200 us.
            let until = Instant::now() + Duration::from_micros(kills * 37 % 200);
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            kill(reader, Signal::SIGKILL).expect("it lives");
            waitpid(reader, None).expect("it ends");
            kills += 1;
            told.extend(heir.kept());
            line.end.store(MESSAGES_MAX, Ordering::Relaxed);
            line.applied();
        }
        mover.join().expect("all is moved");
        let told: Vec<u64> = told.iter().map(|message| message[1]).collect();
        let all: Vec<u64> = (0..PAGES).map(|page| start + page * PAGE).collect();
        let lost = all.iter().filter(|page| !told.contains(page)).count();
        assert!(told == all, "{lost} of {PAGES} lost, in {kills} kills");
        assert!(kills > 3, "{kills} kills");
    }
}
