//! An attached process: its evictor, its outbox and its mappings.

mod confine;
mod record;
mod refusals;
mod register;
mod set_up;

use std::collections::BTreeSet;
use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gms_policy::ids::PageAddr;
use linux_raw_sys::general as sys;
use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

pub(crate) use self::record::ProcessRecord;
use self::refusals::Refusals;
use self::register::UNPAGEABLE_AFTER;
use self::set_up::{SetUp, failed};
use crate::board;
use crate::evictor::{Call, Ending, Evictor, Injected};
use crate::inject::{Frozen, remove_blob, stop_beside};
use crate::kernel::PageTables;
use crate::kernel::pagemap::Pagemap;
use crate::kernel::pidfd::{self, has_ended, same_memory};
use crate::kernel::proc::{self, Measure, Statm};
use crate::kernel::uffd::{UFFDIO_MOVE, UFFDIO_REGISTER, UFFDIO_UNREGISTER};
use crate::page_map::PAGE;
use crate::shared::Shared;
use crate::space::Space;
use crate::stopped::{InjectError, Stopped, release_late};
use crate::sync::lock;
use crate::target::Target;
use crate::torture;
use crate::victims::{BATCH, Evicted, MovedPages, Sweep, runs};

/// Pages that find room before the outbox must be cleared, which takes a list of its own, and the address space's lock for writing.
const OUTBOX_PAGES: usize = 4 * BATCH;
const OUTBOX_LEN: u64 = OUTBOX_PAGES as u64 * PAGE;
const MOVE_LEN: usize = size_of::<sys::uffdio_move>();
const CLEAR_CALLS: usize = 4;
const MODE_MISSING: u64 = sys::UFFDIO_REGISTER_MODE_MISSING as u64;
/// UFFDIO_MOVE_MODE_DONTWAKE.
const DONTWAKE: u64 = 1;
/// Under torture the kernel forgets to tell of one move in this many.
const UNTOLD_ONE_IN: u64 = 16;
const MADV_POPULATE_WRITE: u64 = sys::MADV_POPULATE_WRITE as u64;
/// Mappings are read again after this, although nothing tells of new ones, if resident memory has changed by more than `SCAN_GROWTH` bytes.
const SCAN_EVERY: Duration = Duration::from_millis(100);
/// Growth of the address space by more than this (bytes) has them read at once.
const SCAN_GROWTH: u64 = 1 << 20;
/// If resident memory has not changed so, they are read again this much later than that: `SCAN_EVERY + SCAN_CALM` after the last time.
const SCAN_CALM: Duration = Duration::from_millis(900);
/// Least value of that delay, as a multiple of the time that reading them took.
const SCAN_CALM_TIMES: u32 = 1000;
/// Of changes that cannot have brought much new memory: a look at the mappings is followed by so many times its own time without one, so that a
/// program with very many mappings costs no more than one with few.
const SCAN_PAUSE: u32 = 8;
/// It is asked of the kernel at most this often whether anybody still has an address space.
const PROOF_EVERY: Duration = Duration::from_millis(20);
/// For a killed process to let its memory go after its evictor was killed with it.
const END_DEADLINE: Duration = Duration::from_secs(1);
/// All processes that are released have a thread stopped, which unmaps the blob, within this time together; and how often it is tried.
const RELEASE_DEADLINE: Duration = Duration::from_secs(1);
const STOP_EVERY: Duration = Duration::from_millis(1);

/// See the module's documentation.
pub(crate) struct Process {
    /// Its process id.
    pub pid: i32,
    /// Its memory.
    pub space: Arc<Space>,
    /// Its size at the last look.
    pub size: Statm,
    /// What may be evicted, and what is to go next.
    pub sweep: Sweep,
    /// Pages that must stay because the kernel itself writes there, without waiting for them.
    pub pinned: BTreeSet<PageAddr>,
    /// A thread which had this memory when last looked at.
    witness: i32,
    next_proof: Instant,
    /// When its threads may be stopped again for those who wait for pages.
    pub calm_at: Instant,
    measure: Measure,
    pidfd: OwnedFd,
    evictor: Evictor,
    uffd_number: u64,
    outbox: u64,
    /// Places used since it was cleared.
    outbox_used: usize,
    /// Pages which have just been unshared.
    unshared: Vec<PageAddr>,
    /// What the kernel does not move.
    locked: Refusals,
    /// Pinned (io_uring, RDMA).
    busy: Refusals,
    attached_at: Instant,
    seen_changes: u64,
    seen_size: u64,
    seen_resident: u64,
    next_scan: Instant,
    next_change: Instant,
    next_calm: Instant,
    /// Anonymous bytes that cannot be paged, as counted last.
    unpageable: u64,
    next_unpageable: Instant,
}

/// A process whose address space is gone.
pub(crate) struct Buried {
    pub(crate) ending: Ending,
    pub(crate) space: Arc<Space>,
    _kept: (Measure, OwnedFd),
}

/// What an attach has set up.
struct Parts {
    page_tables: Pagemap,
    measure: Measure,
    evictor: Evictor,
    outbox: u64,
    space: Arc<Space>,
    uffd_number: u64,
}

impl Process {
    /// Attaches a process which has been frozen, and had not ended then. `orphans` are spaces of forked children whose process is not known yet: if this process
    /// is one of them, its space is taken from there. `target` is what is known of it if gms was told to attach to it.
    pub(crate) fn attach(
        shared: &Shared,
        (pid, pidfd, target): (i32, OwnedFd, Option<&Target>),
        frozen: &mut Frozen,
        orphans: &mut Vec<Arc<Space>>,
    ) -> Result<Process, InjectError> {
        let may_be = |tid| {
            // Numbers: a thread that has stopped keeps its own, and while the process has not ended nobody else is called like that.
            if proc::status_field(tid, "Tgid:") != Some(pid.into()) || has_ended(pidfd.as_fd()) {
                return Err(InjectError::Gone);
            }
            target.map_or(Ok(()), |target| target.check_again(tid))
        };
        let injected = frozen.inject(may_be)?;
        let evictor_pid = injected.evictor.as_raw();
        lock(&shared.evictors).push(evictor_pid);
        let mut mapped = vec![(injected.base, crate::arch::BLOB_LEN as u64)];
        let parts = Process::set_up(shared, pid, &injected, &mut mapped, orphans);
        if parts.is_err() {
            // Nothing of ours stays. The evictor ends first: it runs in what is unmapped then, and would execute its will if its socket closed.
            pidfd::end(&injected.process);
            board::set_attaching(None);
            frozen.unmap(&mapped, may_be);
            lock(&shared.evictors).retain(|&pid| pid != evictor_pid);
        }
        let Parts { page_tables, measure, evictor, outbox, space, uffd_number } =
            parts.map_err(|(error, _evictor)| error)?;
        let (own_id, tid_address) = (injected.own_id, injected.tid_address);
        space.pid.store(pid, Ordering::Relaxed);
        space.evictor.store(own_id, Ordering::Relaxed);
        space.same_ids.store(proc::shares_pid_namespace(pid), Ordering::Relaxed);
        // Set before only if the space was met twice, which cannot be.
        let _ = space.page_tables.set(Box::new(page_tables));
        // What a child has inherited is proved anew.
        lock(&shared.tables).unregister(space.id, 0..u64::MAX);
        let kernel_writes = tid_address.map(PageAddr::containing);
        let mut process = Process::of(pid, space, measure, pidfd, evictor);
        (process.pinned, process.witness) = (kernel_writes.into_iter().collect(), frozen.witness());
        (process.uffd_number, process.outbox) = (uffd_number, outbox);
        Ok(process)
    }

    /// A process with an evictor, of which nothing else is known yet.
    fn of(
        pid: i32,
        space: Arc<Space>,
        measure: Measure,
        pidfd: OwnedFd,
        evictor: Evictor,
    ) -> Process {
        let now = Instant::now();
        Process {
            pid,
            space,
            size: Statm::default(),
            sweep: Sweep::default(),
            pinned: BTreeSet::new(),
            witness: pid,
            next_proof: now,
            calm_at: now,
            measure,
            pidfd,
            evictor,
            uffd_number: 0,
            outbox: 0,
            outbox_used: 0,
            unshared: Vec::new(),
            locked: Refusals::none(now),
            busy: Refusals::none(now),
            attached_at: now,
            seen_changes: u64::MAX,
            seen_size: 0,
            seen_resident: 0,
            next_scan: now,
            next_change: now,
            next_calm: now,
            unpageable: 0,
            next_unpageable: now + UNPAGEABLE_AFTER,
        }
    }

    /// Adds what it maps to `mapped`. On failure the evictor is returned too: it executes its will when its socket is closed.
    fn set_up(
        shared: &Shared,
        pid: i32,
        injected: &Injected,
        mapped: &mut Vec<(u64, u64)>,
        orphans: &mut Vec<Arc<Space>>,
    ) -> Result<Parts, (InjectError, Option<Evictor>)> {
        let gone = |_| (InjectError::Gone, None);
        // By the evictor, which has the memory for as long as it lives: the first thread of a process may end before the others.
        let page_tables = Pagemap::open(injected.evictor.as_raw()).map_err(gone)?;
        let measure = Measure::open(injected.evictor.as_raw()).map_err(gone)?;
        let mut evictor = Evictor::connect(injected).map_err(|error| (error, None))?;
        let mut set_up = || {
            let set_up =
                SetUp::new(&mut evictor, pid, mapped).map_err(failed("setting the evictor up"))?;
            board::set_attaching(Some(evictor.process().as_raw_fd()));
            // Before it can hold anything: whatever fails later, the will stands.
            set_up
                .make_will(&evictor, injected, pid)
                .map_err(failed("preparing for the pager's end"))?;
            let (space, uffd_number) = match set_up.adopt_orphan(&mut evictor, orphans) {
                Some(adopted) => adopted?,
                None => set_up.new_space(shared, &mut evictor)?,
            };
            Ok((set_up.outbox, space, uffd_number))
        };
        match set_up() {
            Ok((outbox, space, uffd_number)) => {
                Ok(Parts { page_tables, measure, evictor, outbox, space, uffd_number })
            }
            Err(error) => Err((error, Some(evictor))),
        }
    }

    /// Whether nobody has the address space any more: neither the process nor anybody who shares its memory (a thread that outlives the
    /// first one, a vfork child whose parent was killed, any CLONE_VM child).
    pub(crate) fn is_gone(&mut self) -> bool {
        if self.evictor_died() {
            return !self.space.faults.is_alive();
        }
        if self.shares_memory_with(self.witness) || Instant::now() < self.next_proof {
            return false;
        }
        let threads = proc::threads(self.pid);
        if let Some(tid) = threads.into_iter().find(|&tid| self.shares_memory_with(tid)) {
            self.witness = tid;
            return false;
        }
        self.next_proof = Instant::now() + PROOF_EVERY;
        // The kernel lets a process unshare its memory, which changes nothing then, only if nobody shares it.
        let mut unshare = [Call::new(libc::SYS_unshare, &[libc::CLONE_VM as u64])];
        match self.evictor.run(&mut unshare, &mut [], &[]) {
            Ok(()) => unshare[0].outcome().is_ok(),
            Err(_) => self.ends(),
        }
    }

    /// Whether it has left its memory to others: a vfork child that executes another program, or has ended.
    pub(crate) fn has_left(&self) -> bool {
        let shares = |tid: &i32| self.shares_memory_with(*tid);
        !shares(&self.witness) && !proc::threads(self.pid).iter().any(shares)
    }

    /// The memory is found to be another process's. Should the pager die and no other go on, not the evictor's will but the keeper is for that.
    pub(crate) fn give_to(&mut self, pid: i32, pidfd: OwnedFd) {
        (self.pid, self.witness, self.pidfd) = (pid, pid, pidfd);
        self.space.pid.store(pid, Ordering::Relaxed);
    }

    /// Whether the other process or thread has the same memory.
    pub(crate) fn shares_memory_with(&self, pid: i32) -> bool {
        matches!(same_memory(Pid::from_raw(pid), self.evictor.pid()), Ok(true))
    }

    /// Whether the evictor has been killed, which leaves nobody to evict, or to stop the workload if we die.
    pub(crate) fn evictor_died(&self) -> bool {
        has_ended(self.evictor.process())
    }

    /// Whether the process has ended. Its memory may live on.
    pub(crate) fn has_ended(&self) -> bool {
        has_ended(self.pidfd.as_fd())
    }

    /// The process itself.
    pub(crate) fn process(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Its page tables.
    pub(crate) fn page_tables(&self) -> Option<&dyn PageTables> {
        self.space.page_tables.get().map(AsRef::as_ref)
    }

    /// Process id of the evictor.
    pub(crate) fn evictor_pid(&self) -> i32 {
        self.evictor.pid().as_raw()
    }

    /// Measures its size; all zero once it is gone.
    pub(crate) fn measure(&mut self) -> Statm {
        self.size = self.measure.take().unwrap_or_default();
        self.size
    }

    // ---- mappings

    /// Registers what has been mapped since the last time, if anything may have been. Returns anonymous bytes that cannot be paged.
    pub(crate) fn register_new(&mut self, shared: &Shared, now: Instant) -> Option<u64> {
        let size = self.size.pages;
        let changes = self.space.changes.load(Ordering::Relaxed);
        let grown = self.size.resident.abs_diff(self.seen_resident) > SCAN_GROWTH;
        let due = if grown { self.next_scan } else { self.next_calm };
        let changed = (size, changes) != (self.seen_size, self.seen_changes);
        let much = size > self.seen_size + SCAN_GROWTH / PAGE;
        let needed = much || changed && now >= self.next_change || now >= due;
        if !needed && !torture::one_in(8) {
            return None;
        }
        let began = Instant::now();
        let unpageable = self.register_mappings(shared)?;
        (self.seen_size, self.seen_changes) = (size, changes);
        self.seen_resident = self.size.resident;
        self.next_change = Instant::now() + began.elapsed() * SCAN_PAUSE;
        // Mappings of equal size may have come and gone unseen: look again in any case, but spend little on it.
        let took = began.elapsed();
        self.next_scan = Instant::now() + (took * 50).max(SCAN_EVERY);
        self.next_calm = self.next_scan + (took * SCAN_CALM_TIMES).max(SCAN_CALM);
        Some(unpageable)
    }

    // ---- eviction

    /// The kernel does not move this page: it is left out until the mappings are read again, or for longer if it is locked, with its mapping, or pinned.
    fn leave_out(&mut self, page: PageAddr, errno: Errno) {
        let range = page.get()..page.get() + PAGE;
        self.sweep.ranges.remove(range.clone());
        if errno == Errno::EBUSY {
            self.busy.note(Instant::now(), range);
        } else if self.locked.note(Instant::now(), range) {
            // Soon, but no more often than of changes.
            self.next_scan = self.next_scan.min(self.next_change);
            self.next_calm = self.next_calm.min(self.next_change);
        }
    }

    /// Gives the process copies of its own of pages that it shares since a fork, so that they can be moved next. Not under the gate: a page
    /// that has gone meanwhile faults, and is served like any other.
    pub(crate) fn unshare(&mut self, pages: &[PageAddr]) -> nix::Result<()> {
        let populate = |page: &PageAddr| {
            Call::new(libc::SYS_madvise, &[page.get(), PAGE, MADV_POPULATE_WRITE])
        };
        // Those which cannot be populated will not move either.
        let mut calls: Vec<Call> = pages.iter().map(populate).collect();
        self.evictor.run(&mut calls, &mut [], &[])?;
        self.unshared = pages.to_vec();
        pages.iter().rev().for_each(|&page| self.sweep.victims.push_front(page));
        Ok(())
    }

    /// Moves runs of adjacent pages (index, count); each page's place in the outbox is its index behind `first`. Returns the pages that did
    /// not move.
    fn move_runs(
        &mut self,
        pages: &[PageAddr],
        runs: &[(usize, usize)],
        first: usize,
        moved: &mut MovedPages,
    ) -> nix::Result<Vec<(usize, Errno)>> {
        let count = runs.len();
        let mut calls = Vec::with_capacity(count);
        let mut aux = Vec::with_capacity(count * MOVE_LEN);
        for (n, &(index, length)) in runs.iter().enumerate() {
            let (source, bytes) = (pages[index].get(), length as u64 * PAGE);
            let argument = self.evictor.aux_address(count) + (n * MOVE_LEN) as u64;
            calls.push(Call::new(libc::SYS_ioctl, &[self.uffd_number, UFFDIO_MOVE, argument]));
            let place = self.outbox + (first + index) as u64 * PAGE;
            for word in [place, source, bytes, DONTWAKE, 0] {
                aux.extend_from_slice(&word.to_le_bytes());
            }
        }
        self.evictor.run(&mut calls, &mut aux, &[])?;
        let mut failed = Vec::new();
        for (n, &(index, length)) in runs.iter().enumerate() {
            let word = &aux[(n + 1) * MOVE_LEN - 8..(n + 1) * MOVE_LEN];
            let result = i64::from_le_bytes([
                word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7],
            ]);
            let mut done = (result.max(0) as u64 / PAGE) as usize;
            if done > length {
                // It has been changed in the workload's memory.
                return Err(Errno::EPROTO);
            }
            if torture::one_in(UNTOLD_ONE_IN) {
                done = 0;
            }
            for i in index..index + done {
                moved.places[i] = Some((first + i) as u32);
            }
            let errno = if result < 0 { Errno::from_raw(-result as i32) } else { Errno::EAGAIN };
            failed.extend((index + done..index + length).map(|i| (i, errno)));
        }
        Ok(failed)
    }

    /// Takes for moved what is in its place in the outbox and not where it was, whatever was told of it. A MOVE that tries a page again (the workload has
    /// touched it, or the kernel migrates it) does not count what it moves then, and ends with EEXIST at its own work (Linux 6.18: `move_pages` keeps the
    /// EAGAIN). Taken for one that has stayed, such a page would be zeros. Those places were empty; but whoever reads or locks all memory (gcore, mlockall)
    /// fills them with zeros. So what is zero has stayed: if it has moved, nothing is where it was, and that is zeros too.
    fn find_moved(
        &self,
        pages: &[PageAddr],
        first: usize,
        failed: &mut Vec<(usize, Errno)>,
        moved: &mut MovedPages,
    ) -> nix::Result<()> {
        let (Some(&(low, _)), Some(&(high, _))) = (failed.first(), failed.last()) else {
            return Ok(());
        };
        let place = |i: usize| self.outbox + (first + i) as u64 * PAGE;
        let page_tables = self.page_tables().ok_or(Errno::ESRCH)?;
        let there = page_tables.taken(place(low)..place(high + 1))?;
        for &(i, _) in failed.iter().filter(|&&(i, _)| there.contains(place(i))) {
            let (page, mut bytes) = (pages[i].get(), [0; PAGE as usize]);
            if page_tables.taken(page..page + PAGE)?.is_empty() {
                self.read_outbox(&[(first + i) as u32], &mut [&mut bytes])?;
                moved.places[i] = bytes.iter().any(|&byte| byte > 0).then_some((first + i) as u32);
            }
        }
        failed.retain(|&(i, _)| moved.places[i].is_none());
        Ok(())
    }

    /// The calls that free the pages in the outbox. It is not registered meanwhile, or the kernel would report the removal to us and block
    /// the evictor until we had read that. `argument` is the address of a `uffdio_register` for the outbox.
    fn clear_calls(&self, argument: u64) -> [Call; CLEAR_CALLS] {
        let ioctl = |request| Call::new(libc::SYS_ioctl, &[self.uffd_number, request, argument]);
        let advice = libc::MADV_DONTNEED_LOCKED as u64;
        [
            // The program may have locked all that it has (mlockall), and may do so at any moment: then what it has locked would be moved.
            Call::new(libc::SYS_munlock, &[self.outbox, OUTBOX_LEN]),
            // Takes the range, with which the argument begins.
            ioctl(UFFDIO_UNREGISTER),
            Call::new(libc::SYS_madvise, &[self.outbox, OUTBOX_LEN, advice]),
            ioctl(UFFDIO_REGISTER),
        ]
    }

    /// Gives the pages in the outbox back: all of them have been read.
    pub(crate) fn clear_outbox(&mut self) -> nix::Result<()> {
        if std::mem::take(&mut self.outbox_used) == 0 {
            return Ok(());
        }
        let mut calls = self.clear_calls(self.evictor.aux_address(CLEAR_CALLS));
        let words = [self.outbox, OUTBOX_LEN, MODE_MISSING, 0];
        let mut aux: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.evictor.run(&mut calls, &mut aux, &[])?;
        calls.iter().try_for_each(|call| call.outcome().map(drop))
    }

    // ---- the end

    /// Leaves the process as it was found: no evictor, no mapping of ours, nothing registered. All pages must be home. `began`: when the first of all that
    /// are released was; threads that do not stop are waited for no longer than [`RELEASE_DEADLINE`] from then.
    pub(crate) fn release(mut self, shared: &Shared, began: Instant) {
        for range in lock(&shared.tables).registered(self.space.id).iter() {
            // A range that has gone meanwhile needs no unregistering.
            let _ = self.space.faults.unregister(range);
        }
        let outbox = self.outbox..self.outbox + OUTBOX_LEN;
        let _ = self.space.faults.unregister(outbox);
        let unmap = Call::new(libc::SYS_munmap, &[self.outbox, OUTBOX_LEN]);
        let _ = self.evictor.run(&mut [unmap], &mut [], &[]);
        let base = self.evictor.base();
        // While the evictor can prove whose memory it is.
        let thread = self.stop_beside(began + RELEASE_DEADLINE);
        // The blob is unmapped next, in which it runs.
        self.evictor.dismiss().wait();
        // 44 KiB of address space stay behind if no thread can be stopped for it.
        let _ = thread.and_then(|thread| remove_blob(thread, base));
    }

    /// Stops a thread of the process. None may be able to stop at once: they have got no CPU, or tell of a change that is being read.
    fn stop_beside(&self, until: Instant) -> Result<Stopped, InjectError> {
        loop {
            let thread = stop_beside(self.witness, self.evictor.pid());
            // One that stops late is still traced, by us.
            let is_late =
                matches!(thread, Err(InjectError::Unstoppable | InjectError::NotPermitted(_)));
            if !is_late || self.has_ended() || Instant::now() > until {
                return thread;
            }
            release_late();
            std::thread::park_timeout(STOP_EVERY);
        }
    }

    /// The address space is gone: lets its evictor end, which takes as long as the kernel needs to free that. Whoever closed the userfaultfd before
    /// might do that work in its stead. All descriptors stay open until that is dropped.
    pub(crate) fn bury(self) -> Buried {
        let Process { space, measure, pidfd, evictor, .. } = self;
        Buried { ending: evictor.dismiss(), space, _kept: (measure, pidfd) }
    }
}

impl Evicted for Process {
    fn space(&self) -> &Arc<Space> {
        &self.space
    }

    fn sweep(&mut self) -> &mut Sweep {
        &mut self.sweep
    }

    fn make_way(&mut self, count: usize) -> Result<(), Errno> {
        if self.outbox_used + count <= OUTBOX_PAGES {
            return Ok(());
        }
        self.evictor.come_here();
        self.clear_outbox()
    }

    fn next_place(&self) -> u32 {
        self.outbox_used as u32
    }

    fn find_left(&self, places: &[u32]) -> Result<MovedPages, Errno> {
        let page_tables = self.page_tables().ok_or(Errno::ESRCH)?;
        let taken = page_tables.taken(self.outbox..self.outbox + OUTBOX_LEN)?;
        let is_taken = |place: u32| taken.contains(self.outbox + u64::from(place) * PAGE);
        let places = places.iter().map(|&place| is_taken(place).then_some(place)).collect();
        Ok(MovedPages { places, ..MovedPages::none(0) })
    }

    fn move_out(&mut self, pages: &[PageAddr]) -> Result<MovedPages, Errno> {
        self.evictor.come_here();
        let mut moved = MovedPages::none(pages.len());
        let first = self.outbox_used;
        self.outbox_used = first + pages.len();
        let mut failed = self.move_runs(pages, &runs(pages), first, &mut moved)?;
        self.find_moved(pages, first, &mut failed, &mut moved)?;
        if !failed.is_empty() {
            if failed.iter().any(|f| f.1 == Errno::EINVAL) {
                // It takes no pages of other mappings if it is locked itself (mlockall).
                let unlock = Call::new(libc::SYS_munlock, &[self.outbox, OUTBOX_LEN]);
                self.evictor.run(&mut [unlock], &mut [], &[])?;
            }
            let singles: Vec<(usize, usize)> = failed.iter().map(|&(i, _)| (i, 1)).collect();
            failed = self.move_runs(pages, &singles, first, &mut moved)?;
            self.find_moved(pages, first, &mut failed, &mut moved)?;
        }
        if failed.iter().any(|f| f.1 == Errno::EEXIST) {
            self.outbox_used = OUTBOX_PAGES;
        }
        let unshared = std::mem::take(&mut self.unshared);
        for (page, errno) in failed.into_iter().map(|(i, errno)| (pages[i], errno)) {
            match errno {
                Errno::EBUSY if !unshared.contains(&page) => moved.shared.push(page),
                Errno::EBUSY | Errno::EINVAL => {
                    self.leave_out(page, errno);
                    moved.refused += 1;
                }
                _ => {}
            }
        }
        Ok(moved)
    }

    fn read_outbox(&self, places: &[u32], into: &mut [&mut [u8]]) -> Result<(), Errno> {
        // Neighbours as one: the kernel looks up the memory of each part anew.
        let part = |run: &[u32]| RemoteIoVec {
            base: (self.outbox + u64::from(run[0]) * PAGE) as usize,
            len: run.len() * PAGE as usize,
        };
        let remote: Vec<RemoteIoVec> =
            places.chunk_by(|&place, &next| next == place + 1).map(part).collect();
        let mut local: Vec<IoSliceMut> =
            into.iter_mut().map(|frame| IoSliceMut::new(frame)).collect();
        let wanted = places.len() * PAGE as usize;
        // The workload's process has the same memory, should the evictor have been killed.
        let got = process_vm_readv(self.evictor.pid(), &mut local, &remote).or_else(|errno| {
            match self.has_ended() {
                // Its id may be another's.
                true => Err(errno),
                false => process_vm_readv(Pid::from_raw(self.pid), &mut local, &remote),
            }
        })?;
        if got == wanted { Ok(()) } else { Err(Errno::EFAULT) }
    }

    fn not_inherited(&self) -> Option<Vec<Range<u64>>> {
        proc::not_inherited(self.evictor_pid())
    }

    /// Its evictor was killed together with the process, as the first process of a PID namespace ends all others in it.
    fn ends(&self) -> bool {
        let deadline = Instant::now() + END_DEADLINE;
        while Instant::now() < deadline {
            if self.evictor_died() && !self.space.faults.is_alive() {
                return true;
            }
            std::thread::yield_now();
        }
        false
    }

    fn unanswered(&self, errno: Errno) -> String {
        let (pid, evictor) = (self.pid, self.evictor_pid());
        let state = proc::state(evictor).unwrap_or('-');
        let asleep = proc::asleep_in(evictor).unwrap_or_default();
        format!("the evictor of process {pid} does not answer: {errno} (state {state} {asleep})")
    }

    fn look_again(&mut self) {
        // Before any time at which a look may have begun.
        (self.next_scan, self.next_calm) = (self.attached_at, self.attached_at);
    }
}
