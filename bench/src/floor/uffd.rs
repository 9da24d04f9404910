//! A fault served from local memory by userfaultfd: what remains of a remote fault if the network costs nothing.

use std::ffi::c_void;
use std::os::fd::AsRawFd;
use std::time::Instant;

use linux_raw_sys::general as sys;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use userfaultfd::{Event, FeatureFlags, RegisterMode, Uffd, UffdBuilder};

use crate::error::{BenchError, Trying};
use crate::placement::{Pinned, Placement, Wait};
use crate::procfs::Meter;
use crate::region::{PAGE, Region};
use crate::samples::Samples;

/// What a page begins with.
const WORD: u64 = 0x0706_0504_0302_0107;

/// Who serves the faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Handler {
    /// A thread of the same process.
    Thread,
    /// Another process, as the pager is.
    Process,
}

impl Handler {
    /// For the report.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Handler::Thread => "thread",
            Handler::Process => "process",
        }
    }
}

/// How faults are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// By a copy of a page.
    Copy,
    /// By the page which the page cache has.
    Continue,
    /// By a page which lay elsewhere in the same address space: for [`Handler::Thread`] only.
    Move,
}

impl Answer {
    /// For the report.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Answer::Copy => "COPY",
            Answer::Continue => "CONTINUE",
            Answer::Move => "MOVE",
        }
    }
}

/// `count` faults, and a tenth as many before them to warm up.
pub(crate) fn faults(
    placement: &Placement,
    by: Handler,
    answer: Answer,
    count: usize,
) -> Result<Samples, BenchError> {
    let warm_up = count / 10;
    let pages = count + warm_up;
    let (region, mode) = match answer {
        Answer::Continue => (Region::cached(pages, WORD)?, sys::UFFDIO_REGISTER_MODE_MINOR),
        _ => (Region::with_tables(pages)?, sys::UFFDIO_REGISTER_MODE_MISSING),
    };
    let uffd = open(answer, placement.wait != Wait::Block)?;
    let mode = RegisterMode::from_bits_retain(u64::from(mode));
    uffd.register_with_mode(region.start(), region.len(), mode).map_err(failed)?;
    let store = &filled(if answer == Answer::Move { pages } else { 1 })?;
    let cpus = placement.cpus.unzip();
    let wait = placement.wait;
    let serve = move || {
        let _pinned = Pinned::to(cpus.1)?;
        // The handler owns the descriptor: if it fails, the faults go back to the kernel and bring zeros.
        serve(uffd, wait, pages, |uffd, number, to| match answer {
            Answer::Copy => copy(uffd, store, to),
            Answer::Continue => proceed(uffd, to),
            Answer::Move => move_page(uffd, store.word(number, 0) as u64, to),
        })
    };
    match by {
        Handler::Thread => std::thread::scope(|scope| {
            let server = scope.spawn(serve);
            let samples = touch(&region, cpus.0, warm_up, None);
            server.join().unwrap_or_else(|_| Err(ended("panicked")))?;
            samples
        }),
        Handler::Process => {
            in_a_process(serve, |child| touch(&region, cpus.0, warm_up, Some(child)))
        }
    }
}

/// Runs `serve` in a child which shares the descriptors, `touch` here.
fn in_a_process(
    serve: impl FnOnce() -> Result<(), BenchError>,
    touch: impl FnOnce(u32) -> Result<Samples, BenchError>,
) -> Result<Samples, BenchError> {
    // SAFETY: this process has one thread now, so the child's memory is in order.
    match unsafe { fork() }.trying("cannot fork")? {
        ForkResult::Child => {
            let code = i32::from(serve().is_err());
            // SAFETY: ends the child without running what the parent has registered to run at its exit.
            unsafe { libc::_exit(code) }
        }
        ForkResult::Parent { child } => {
            drop(serve);
            let samples = touch(child.as_raw() as u32);
            match waitpid(child, None).trying("cannot wait for the handler")? {
                WaitStatus::Exited(_, 0) => samples,
                other => Err(ended(&format!("ended with {other:?}"))),
            }
        }
    }
}

/// `handler`: the other process that answers, if one does.
fn touch(
    region: &Region,
    cpu: Option<usize>,
    warm_up: usize,
    handler: Option<u32>,
) -> Result<Samples, BenchError> {
    let _pinned = Pinned::to(cpu)?;
    let mut samples = Samples::new();
    let mut meter = Meter::start(handler)?;
    for page in 0..region.pages() {
        if page == warm_up {
            meter = Meter::start(handler)?;
        }
        let start = Instant::now();
        let word = region.load(page, 0);
        let took = start.elapsed();
        if word != WORD {
            return Err(BenchError::WrongBytes(format!("page {page} begins with {word:x}")));
        }
        if page >= warm_up {
            samples.add(took);
        }
    }
    samples.cpu_us = meter.us()? / (region.pages() - warm_up) as f64;
    Ok(samples)
}

fn open(answer: Answer, non_blocking: bool) -> Result<Uffd, BenchError> {
    let features = match answer {
        Answer::Copy => 0,
        Answer::Continue => sys::UFFD_FEATURE_MINOR_SHMEM,
        Answer::Move => sys::UFFD_FEATURE_MOVE,
    };
    UffdBuilder::new()
        .close_on_exec(true)
        .non_blocking(non_blocking)
        .user_mode_only(true)
        .require_features(FeatureFlags::from_bits_retain(u64::from(features)))
        .create()
        .map_err(failed)
}

/// `pages` pages which begin with [`WORD`].
fn filled(pages: usize) -> Result<Region, BenchError> {
    let region = Region::new(pages)?;
    (0..pages).for_each(|page| region.store(page, 0, WORD));
    Ok(region)
}

/// Answers faults, the n-th by `answer(uffd, n, page)`.
fn serve(
    uffd: Uffd,
    wait: Wait,
    pages: usize,
    answer: impl Fn(&Uffd, usize, u64) -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    for number in 0..pages {
        let address = loop {
            match uffd.read_event().map_err(failed)? {
                Some(Event::Pagefault { addr, .. }) => break addr,
                _ => wait.pause(),
            }
        };
        answer(&uffd, number, address as u64 & !(PAGE as u64 - 1))?;
    }
    Ok(())
}

fn copy(uffd: &Uffd, from: &Region, to: u64) -> Result<(), BenchError> {
    // SAFETY: `from` has a page; the kernel writes only to the absent page that faulted.
    unsafe { uffd.copy(from.start(), to as *mut c_void, PAGE, true) }.map_err(failed).map(drop)
}

mod requests {
    use super::sys;
    nix::ioctl_readwrite!(uffdio_move, 0xAA, 0x05, sys::uffdio_move);
    nix::ioctl_readwrite!(uffdio_continue, 0xAA, 0x07, sys::uffdio_continue);
}

fn proceed(uffd: &Uffd, to: u64) -> Result<(), BenchError> {
    let range = sys::uffdio_range { start: to, len: PAGE as u64 };
    let mut request = sys::uffdio_continue { range, mode: 0, mapped: 0 };
    // SAFETY: the kernel writes only to `request`, and maps a page of the mapping's own page cache.
    let result = unsafe { requests::uffdio_continue(uffd.as_raw_fd(), &raw mut request) };
    result.trying("UFFDIO_CONTINUE").map(drop)
}

fn move_page(uffd: &Uffd, from: u64, to: u64) -> Result<(), BenchError> {
    let mut request = sys::uffdio_move { dst: to, src: from, len: PAGE as u64, mode: 0, move_: 0 };
    // SAFETY: callers name pages of their own regions, where any bytes are valid words; besides, the kernel writes to `request`.
    let result = unsafe { requests::uffdio_move(uffd.as_raw_fd(), &raw mut request) };
    result.trying("UFFDIO_MOVE").map(drop)
}

/// `count` moves of a page which is in use, as in eviction, and a tenth as many before them to warm up.
pub(crate) fn moves(count: usize) -> Result<Samples, BenchError> {
    let warm_up = count / 10;
    let (from, to) = (filled(count + warm_up)?, Region::with_tables(count + warm_up)?);
    let uffd = open(Answer::Move, true)?;
    uffd.register(to.start(), to.len()).map_err(failed)?;
    let mut samples = Samples::new();
    for page in 0..from.pages() {
        let start = Instant::now();
        move_page(&uffd, from.word(page, 0) as u64, to.word(page, 0) as u64)?;
        let took = start.elapsed();
        if to.load(page, 0) != WORD {
            return Err(BenchError::WrongBytes(format!("page {page} after a move")));
        }
        if page >= warm_up {
            samples.add(took);
        }
    }
    Ok(samples)
}

fn failed(error: userfaultfd::Error) -> BenchError {
    BenchError::Program { program: "userfaultfd".into(), problem: format!("failed: {error}") }
}

fn ended(problem: &str) -> BenchError {
    BenchError::Program { program: "the fault handler".into(), problem: problem.into() }
}
