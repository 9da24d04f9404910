//! A fault served from local memory by userfaultfd: what remains of a remote fault if the network costs nothing.

use std::ffi::c_void;
use std::time::Instant;

use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use userfaultfd::{Event, Uffd, UffdBuilder};

use crate::error::{BenchError, Trying};
use crate::placement::{Pinned, Placement, Wait};
use crate::region::{PAGE, Region, WORDS};
use crate::samples::Samples;

/// What every word of the page holds.
const WORD: u64 = 0x0706_0504_0302_0107;

/// Who serves the faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handler {
    /// A thread of the same process.
    Thread,
    /// Another process, as the pager is.
    Process,
}

impl Handler {
    /// For the report.
    pub fn name(self) -> &'static str {
        match self {
            Handler::Thread => "thread",
            Handler::Process => "process",
        }
    }
}

/// `count` faults, and a tenth as many before them to warm up.
pub fn faults(placement: &Placement, by: Handler, count: usize) -> Result<Samples, BenchError> {
    let warm_up = count / 10;
    let region = Region::with_tables(count + warm_up)?;
    let uffd = UffdBuilder::new()
        .close_on_exec(true)
        .non_blocking(placement.wait != Wait::Block)
        .user_mode_only(true)
        .create()
        .map_err(failed)?;
    uffd.register(region.start(), region.len()).map_err(failed)?;
    let cpus = placement.cpus.unzip();
    let (pages, wait) = (region.pages(), placement.wait);
    let serve = move || {
        let _pinned = Pinned::to(cpus.1)?;
        // The handler owns the descriptor: if it fails, the faults go back to the kernel and bring zeros.
        serve(uffd, wait, pages)
    };
    match by {
        Handler::Thread => std::thread::scope(|scope| {
            let server = scope.spawn(serve);
            let samples = touch(&region, cpus.0, warm_up);
            server.join().unwrap_or_else(|_| Err(ended("panicked")))?;
            samples
        }),
        Handler::Process => in_a_process(serve, || touch(&region, cpus.0, warm_up)),
    }
}

/// Runs `serve` in a child which shares the descriptors, `touch` here.
fn in_a_process(
    serve: impl FnOnce() -> Result<(), BenchError>,
    touch: impl FnOnce() -> Result<Samples, BenchError>,
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
            let samples = touch();
            match waitpid(child, None).trying("cannot wait for the handler")? {
                WaitStatus::Exited(_, 0) => samples,
                other => Err(ended(&format!("ended with {other:?}"))),
            }
        }
    }
}

fn touch(region: &Region, cpu: Option<usize>, warm_up: usize) -> Result<Samples, BenchError> {
    let _pinned = Pinned::to(cpu)?;
    let mut samples = Samples::new();
    for page in 0..region.pages() {
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
    Ok(samples)
}

fn serve(uffd: Uffd, wait: Wait, pages: usize) -> Result<(), BenchError> {
    let page = [WORD; WORDS];
    for _ in 0..pages {
        let address = loop {
            match uffd.read_event().map_err(failed)? {
                Some(Event::Pagefault { addr, .. }) => break addr,
                _ => wait.pause(),
            }
        };
        let to = (address as usize & !(PAGE - 1)) as *mut c_void;
        // SAFETY: `page` is a live page; the kernel writes only to the absent page that faulted.
        unsafe { uffd.copy(page.as_ptr().cast(), to, PAGE, true) }.map_err(failed)?;
    }
    Ok(())
}

fn failed(error: userfaultfd::Error) -> BenchError {
    BenchError::Program { program: "userfaultfd".into(), problem: format!("failed: {error}") }
}

fn ended(problem: &str) -> BenchError {
    BenchError::Program { program: "the fault handler".into(), problem: problem.into() }
}
