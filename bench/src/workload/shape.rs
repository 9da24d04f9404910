//! Takes a shape (many threads, mappings, processes, or far apart pages), then changes its address space, forks and exits when told to, and
//! times that.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Barrier};
use std::thread::Builder;
use std::time::{Duration, Instant};

use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork, pipe, read};
use serde::{Deserialize, Serialize};

use crate::error::{BenchError, Trying};
use crate::region::{PAGE, Region, pages};
use crate::samples::Samples;

/// Pages of one mapping among many.
const MAPPING_PAGES: usize = 1;
/// Bytes of a thread's stack.
const STACK: usize = 64 << 10;
/// Between two slow changes.
const SLOWLY: Duration = Duration::from_millis(2);
/// For gms to register the memory whose changes are timed.
const REGISTERED: Duration = Duration::from_secs(20);

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Orders {
    /// The shape.
    pub shape: Shape,
    /// Memory that is filled, what the other processes have included, so that the budget is exceeded.
    pub filled_mib: usize,
    /// Changes of each kind.
    pub events: usize,
    /// Forks.
    pub forks: usize,
    /// Whether gms pages it.
    pub paged: bool,
    /// Where orders come from.
    pub socket: PathBuf,
}

/// How much there is of what can be much.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Shape {
    /// Threads, which sleep.
    pub threads: usize,
    /// Mappings of one page each, with gaps between them.
    pub mappings: usize,
    /// Processes, which sleep.
    pub processes: usize,
    /// Pages, one in each 2 MiB of address space: each takes a chunk of the page map.
    pub chunks: usize,
}

/// One order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// Discard and unmap pages.
    Change,
    /// Map, touch and unmap a page now and then, so that gms looks in between.
    ChangeSlowly,
    /// Fork children that exit at once.
    Fork,
    /// End.
    End,
}

/// The first line sent: the shape has been taken.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ready {
    /// Process id as this process knows it.
    pub pid: u32,
}

/// What was found. Latencies: see [`Samples::counts`].
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Found {
    /// MADV_DONTNEED of a page.
    pub discard: Vec<(u64, u64)>,
    /// munmap of a page.
    pub unmap: Vec<(u64, u64)>,
    /// fork, until the parent goes on.
    pub fork: Vec<(u64, u64)>,
    /// MADV_DONTNEED of a page right behind a fork: it is told only after the fork has been dealt with.
    pub behind: Vec<(u64, u64)>,
    /// From the moment that lets a child exit until the parent has waited for it.
    pub exit: Vec<(u64, u64)>,
}

/// Does it.
pub(crate) fn run(orders: &Orders) -> Result<Found, BenchError> {
    let Shape { threads, mappings, processes, chunks } = orders.shape;
    let (sleeping, _mapped) = (Sleepers::start(processes)?, scattered(mappings)?);
    start_threads(threads)?;
    let changed = Region::new(2 * orders.events + orders.forks)?;
    fill(&changed);
    let sparse = Region::sparse(chunks)?;
    (0..chunks).for_each(|chunk| sparse.store(chunk * Region::CHUNK_PAGES, 0, chunk as u64 + 1));
    let filled = Region::new(pages(orders.filled_mib).saturating_sub(sleeping.pages()).max(1))?;
    fill(&filled);
    if orders.paged {
        await_registration(&changed)?;
    }
    let mut found = obey(orders, changed)?;
    found.check(orders)?;
    for chunk in (0..chunks).step_by(chunks / 64 + 1) {
        if sparse.load(chunk * Region::CHUNK_PAGES, 0) != chunk as u64 + 1 {
            return Err(BenchError::WrongBytes(format!("chunk {chunk}")));
        }
    }
    found.exit.shrink_to_fit();
    Ok(found)
}

impl Found {
    fn check(&self, orders: &Orders) -> Result<(), BenchError> {
        let count = |counts: &[(u64, u64)]| counts.iter().map(|c| c.1).sum::<u64>() as usize;
        match count(&self.unmap) == orders.events && count(&self.exit) == orders.forks {
            true => Ok(()),
            false => Err(BenchError::Invalid("the workload was not asked for all".into())),
        }
    }
}

/// Carries out orders, one after the other, and says when each is done.
fn obey(orders: &Orders, mut changed: Region) -> Result<Found, BenchError> {
    let mut socket = UnixStream::connect(&orders.socket).trying("cannot reach the benchmark")?;
    say(&mut socket, &Ready { pid: std::process::id() })?;
    let mut lines = BufReader::new(socket.try_clone().trying("no second socket")?).lines();
    let mut found = Found::default();
    loop {
        let line = lines.next().unwrap_or(Ok(String::new())).trying("no order")?;
        let ask = serde_json::from_str(&line);
        match ask.map_err(|error| BenchError::Invalid(format!("order {line:?}: {error}")))? {
            Ask::Change => change(orders, &mut changed, &mut found)?,
            Ask::ChangeSlowly => change_slowly(orders)?,
            Ask::Fork => forks(orders, &changed, &mut found)?,
            Ask::End => return Ok(found),
        }
        say(&mut socket, &ask_done())?;
    }
}

/// What is said when an order has been carried out.
fn ask_done() -> &'static str {
    "done"
}

fn say(socket: &mut UnixStream, what: &impl Serialize) -> Result<(), BenchError> {
    let text = serde_json::to_string(what).map_err(|e| BenchError::Invalid(e.to_string()))?;
    writeln!(socket, "{text}").trying("cannot answer")
}

fn fill(region: &Region) {
    (0..region.pages()).for_each(|page| region.store(page, 0, page as u64 + 1));
}

fn timed(
    samples: &mut Samples,
    act: impl FnOnce() -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    let start = Instant::now();
    act()?;
    samples.add(start.elapsed());
    Ok(())
}

/// Discards pages from the beginning, and unmaps them from the end, so that no mapping is split.
fn change(orders: &Orders, region: &mut Region, found: &mut Found) -> Result<(), BenchError> {
    let (mut discard, mut unmap) = (Samples::new(), Samples::new());
    for page in 0..orders.events {
        timed(&mut discard, || region.discard_page(orders.forks + page))?;
        timed(&mut unmap, || region.unmap_last())?;
    }
    (found.discard, found.unmap) = (discard.counts(), unmap.counts());
    Ok(())
}

fn change_slowly(orders: &Orders) -> Result<(), BenchError> {
    for _ in 0..orders.events {
        let region = Region::new(4)?;
        fill(&region);
        std::thread::sleep(SLOWLY);
    }
    Ok(())
}

fn forks(orders: &Orders, region: &Region, found: &mut Found) -> Result<(), BenchError> {
    let (mut forked, mut behind, mut exit) = (Samples::new(), Samples::new(), Samples::new());
    for page in 0..orders.forks {
        let (hold, release) = pipe().trying("no pipe")?;
        let start = Instant::now();
        // SAFETY: the child only makes system calls: read and _exit.
        match unsafe { fork() }.trying("cannot fork")? {
            ForkResult::Child => {
                drop(release);
                let _ = read(&hold, &mut [0]);
                // SAFETY: ends this process; nothing is to be cleaned up in a copy.
                unsafe { libc::_exit(0) };
            }
            ForkResult::Parent { child } => {
                forked.add(start.elapsed());
                timed(&mut behind, || region.discard_page(page))?;
                let start = Instant::now();
                drop(release);
                waitpid(child, None).trying("cannot wait for a child")?;
                exit.add(start.elapsed());
            }
        }
    }
    (found.fork, found.behind, found.exit) = (forked.counts(), behind.counts(), exit.counts());
    Ok(())
}

// ---- shapes

/// Processes that end with this object.
struct Sleepers(Vec<Child>);

impl Sleepers {
    fn start(count: usize) -> Result<Sleepers, BenchError> {
        let mut sleepers = Sleepers(Vec::with_capacity(count));
        for _ in 0..count {
            let mut sleep = Command::new("sleep");
            let sleep = sleep.arg("infinity").stdin(Stdio::null()).spawn();
            sleepers.0.push(sleep.trying("cannot start sleep")?);
        }
        Ok(sleepers)
    }

    /// Their resident anonymous memory.
    fn pages(&self) -> usize {
        let of = |sleeper: &Child| {
            let text = fs::read_to_string(format!("/proc/{}/statm", sleeper.id())).ok()?;
            let mut fields = text.split(' ').map(str::parse::<usize>).skip(1);
            Some(fields.next()?.ok()?.saturating_sub(fields.next()?.ok()?))
        };
        self.0.iter().filter_map(of).sum()
    }
}

impl Drop for Sleepers {
    fn drop(&mut self) {
        for sleeper in &mut self.0 {
            // Fails if it has ended by itself.
            let _ = sleeper.kill();
            let _ = sleeper.wait();
        }
    }
}

/// Mappings of their own, as there are gaps between them.
fn scattered(count: usize) -> Result<Vec<Region>, BenchError> {
    if count == 0 {
        return Ok(Vec::new());
    }
    let whole = Region::new(2 * count * MAPPING_PAGES)?;
    let parts = whole.split(2 * MAPPING_PAGES);
    let mut mapped = Vec::with_capacity(count);
    for mut part in parts {
        part.unmap_last()?;
        fill(&part);
        mapped.push(part);
    }
    Ok(mapped)
}

/// Threads that sleep until this process ends.
fn start_threads(count: usize) -> Result<(), BenchError> {
    let all = Arc::new(Barrier::new(count + 1));
    for _ in 0..count {
        let all = all.clone();
        let body = move || {
            all.wait();
            loop {
                std::thread::park();
            }
        };
        drop(Builder::new().stack_size(STACK).spawn(body).trying("cannot start a thread")?);
    }
    all.wait();
    Ok(())
}

/// Changes are told only of registered memory.
fn await_registration(region: &Region) -> Result<(), BenchError> {
    let start = Instant::now();
    let head = format!("{:x}-", region.start() as usize);
    loop {
        let smaps = fs::read_to_string("/proc/self/smaps").trying("/proc/self/smaps")?;
        let mapping = smaps.lines().skip_while(|line| !line.starts_with(&head));
        let flags = mapping.into_iter().find_map(|line| line.strip_prefix("VmFlags:"));
        if flags.is_some_and(|flags| flags.split(' ').any(|flag| flag == "um")) {
            return Ok(());
        }
        if start.elapsed() > REGISTERED {
            return Err(BenchError::Invalid("gms has not registered the memory".into()));
        }
        std::thread::yield_now();
    }
}

const _: () = assert!(Region::CHUNK_PAGES * PAGE == 2 << 20);
