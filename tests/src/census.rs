//! What a tree holds, measured from outside: an opinion independent of gms's own statistics, and of how it measures.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::procfs;

/// Pause between two looks: to look takes a CPU from those that are looked at.
const PAUSE: Duration = Duration::from_millis(4);

/// Highest anonymous memory of a whole tree, watched by a thread while the tree runs.
pub struct Census {
    over: Arc<AtomicBool>,
    found: Arc<Found>,
    thread: JoinHandle<()>,
}

#[derive(Default)]
struct Found {
    pss: AtomicU64,
    looks: AtomicU64,
}

/// The highest figures that were seen, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Peak {
    /// Sum of `Pss_Anon` of the tree's processes: what processes share after a fork is counted once.
    pub pss: u64,
    /// How often it was measured.
    pub looks: u64,
}

impl Census {
    /// Watches all that runs below the process `pid`, which is a gms: its own processes are not counted.
    pub fn below(pid: i32) -> Census {
        let (over, found) = (Arc::new(AtomicBool::new(false)), Arc::new(Found::default()));
        let (ended, into) = (over.clone(), found.clone());
        let thread = thread::spawn(move || {
            let mut before = BTreeMap::new();
            while !ended.load(Ordering::Relaxed) {
                before = look(pid, &before, &into);
                thread::park_timeout(PAUSE);
            }
        });
        Census { over, found, thread }
    }

    /// Ends the watch.
    pub fn end(self) -> Peak {
        self.over.store(true, Ordering::Relaxed);
        self.thread.thread().unpark();
        self.thread.join().expect("the census");
        let load = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        Peak { pss: load(&self.found.pss), looks: load(&self.found.looks) }
    }
}

/// Memory that one process gives back and another takes while they are looked at would be counted twice: of each process counts what it had at
/// two looks in a row.
fn look(pager: i32, before: &BTreeMap<i32, u64>, found: &Found) -> BTreeMap<i32, u64> {
    let own = procfs::executable(pager);
    let tree: Vec<i32> = procfs::descendants(pager)
        .into_iter()
        .filter(|&pid| procfs::executable(pid) != own && !is_evictor(pid))
        .collect();
    let share = |pid: &i32| Some((*pid, procfs::pss_anon(*pid)?));
    let now: BTreeMap<i32, u64> = tree.iter().filter_map(share).collect();
    let both = now.iter().map(|(pid, &bytes)| bytes.min(before.get(pid).copied().unwrap_or(0)));
    found.pss.fetch_max(both.sum(), Ordering::Relaxed);
    found.looks.fetch_add(u64::from(!tree.is_empty()), Ordering::Relaxed);
    now
}

/// Evictors share the memory of the processes which they serve: it would be counted twice.
fn is_evictor(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().starts_with("far-")
}
