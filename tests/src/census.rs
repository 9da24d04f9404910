//! What a tree holds, measured from outside: an opinion independent of gms's own statistics, and of how it measures (smaps; of statm, by which gms
//! does, only whether there can be more than was seen: on Linux 6.18 smaps never had more; where statm leaves out what each CPU has counted by itself a peak
//! may be missed by as much).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use crate::procfs;

/// Shortest pause between two looks.
const PAUSE: Duration = Duration::from_millis(4);
/// Of a look that took longer, because others had the CPU, only the largest process counts: in that time a hundred MiB can go from one to another.
const LOOK_MAX: Duration = Duration::from_millis(10);
/// A pause takes at least so many times as long as the look before it: to look takes a CPU from those that are looked at.
pub(crate) const PAUSES: u32 = 3;

/// Whose memory is looked at while a program runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Watch {
    /// Nobody's.
    Nobody,
    /// That of the program and all that it starts.
    Tree,
    /// That of all that it starts, except copies of itself: a pager's workload.
    Below,
}

/// Highest anonymous memory of a whole tree, watched by a thread while the tree runs.
pub(crate) struct Census {
    found: Arc<Found>,
    thread: Option<Thread>,
}

#[derive(Default)]
struct Found {
    over: AtomicBool,
    bytes: AtomicU64,
    looks: AtomicU64,
    whole: AtomicU64,
}

/// The highest figures that were seen.
#[derive(Clone, Copy, Debug)]
pub struct Peak {
    /// Sum of `Pss_Anon` of the tree's processes: what processes share after a fork is counted once.
    pub bytes: u64,
    /// How often it was measured.
    pub looks: u64,
    /// How often all of the tree was, and not the largest process alone.
    pub whole: u64,
}

impl Census {
    /// Watches the tree of `root`.
    pub(crate) fn watch(root: i32, watch: Watch) -> Census {
        let found = Arc::new(Found::default());
        let into = found.clone();
        let look = move || {
            let mut before = BTreeMap::new();
            while !into.over.load(Ordering::Relaxed) {
                let began = Instant::now();
                before = look(root, watch, &before, &into);
                thread::park_timeout(PAUSE.max(began.elapsed() * PAUSES));
            }
        };
        let thread = (watch != Watch::Nobody).then(|| thread::spawn(look).thread().clone());
        Census { found, thread }
    }

    /// Ends the watch.
    pub(crate) fn end(&self) -> Peak {
        self.found.over.store(true, Ordering::Relaxed);
        self.thread.iter().for_each(Thread::unpark);
        self.peak()
    }

    /// The highest so far.
    pub(crate) fn peak(&self) -> Peak {
        let load = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        let Found { bytes, looks, whole, .. } = &*self.found;
        Peak { bytes: load(bytes), looks: load(looks), whole: load(whole) }
    }
}

impl Drop for Census {
    fn drop(&mut self) {
        self.end();
    }
}

/// Memory that one process gives back and another takes while they are looked at would be counted twice: of each process counts what it had at
/// two looks in a row. (What is not measured is less than was seen before: neither that look nor the next could have found more.)
fn look(root: i32, watch: Watch, before: &BTreeMap<i32, u64>, found: &Found) -> BTreeMap<i32, u64> {
    let (own, began) = (procfs::executable(root), Instant::now());
    let is_its = |pid: &i32| watch == Watch::Tree || procfs::executable(*pid) != own;
    // Evictors share the memory of the processes which they serve: it would be counted twice.
    let counts = |pid: &i32| is_its(pid) && !procfs::is_of_gms(*pid);
    let tree = std::iter::once(root).chain(procfs::descendants(root));
    let tree: Vec<i32> = tree.filter(counts).collect();
    // To add up what each shares walks its page tables, with its memory locked: not where all of it is no more than was seen already.
    let all: u64 = tree.iter().filter_map(|&pid| procfs::anon_of_statm(pid)).sum();
    let may_be_more = all > found.bytes.load(Ordering::Relaxed);
    let measured = tree.iter().filter(|_| may_be_more);
    let now: BTreeMap<i32, u64> =
        measured.filter_map(|&pid| Some((pid, procfs::pss_anon(pid)?))).collect();
    let both = now.iter().map(|(pid, &bytes)| bytes.min(before.get(pid).copied().unwrap_or(0)));
    let is_whole = began.elapsed() <= LOOK_MAX;
    let bytes = if is_whole { both.sum() } else { both.max().unwrap_or(0) };
    found.bytes.fetch_max(bytes, Ordering::Relaxed);
    found.looks.fetch_add(u64::from(all > 0), Ordering::Relaxed);
    found.whole.fetch_add(u64::from(is_whole && all > 0), Ordering::Relaxed);
    now
}
