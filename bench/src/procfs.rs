//! What the kernel says of processes.

use std::fs;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

use crate::error::{BenchError, Trying};

/// CPU time of all threads of a process so far, in us; of one that has ended 0.
pub(crate) fn cpu_us(pid: u32) -> f64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"));
    let of = |task: fs::DirEntry| {
        // A thread may have ended.
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    };
    tasks.into_iter().flatten().flatten().filter_map(of).sum::<f64>() / 1e3
}

/// A process and all that it has started, as far as they have not ended.
pub(crate) fn tree(root: u32) -> Vec<u32> {
    let mut found = vec![root];
    let mut looked_at = 0;
    while let Some(&pid) = found.get(looked_at) {
        looked_at += 1;
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        for task in tasks {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            found.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
    }
    found
}

/// Measures the CPU time of this process and of another one, its peer.
pub(crate) struct Meter {
    peer: Option<u32>,
    before_us: f64,
}

impl Meter {
    /// From now on.
    pub(crate) fn start(peer: Option<u32>) -> Result<Meter, BenchError> {
        Ok(Meter { peer, before_us: Meter::now_us(peer)? })
    }

    /// Since the start, in us.
    pub(crate) fn us(&self) -> Result<f64, BenchError> {
        Ok(Meter::now_us(self.peer)? - self.before_us)
    }

    /// Threads of this process that have ended count, too.
    fn now_us(peer: Option<u32>) -> Result<f64, BenchError> {
        let own = getrusage(UsageWho::RUSAGE_SELF).trying("no usage of resources")?;
        let own = own.user_time() + own.system_time();
        Ok(own.num_microseconds() as f64 + peer.map_or(0.0, cpu_us))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn what_runs_takes_time() {
        let own = std::process::id();
        let (before, began) = (cpu_us(own), Instant::now());
        // The scheduler updates it at its ticks.
        while cpu_us(own) - before <= 1_000.0 {
            assert!(began.elapsed() < Duration::from_secs(20), "{before}");
        }
        assert_eq!(cpu_us(u32::MAX), 0.0, "no such process");
    }

    #[test]
    fn what_a_process_has_started_is_found() {
        let mut child = std::process::Command::new("cat");
        let piped = std::process::Stdio::piped;
        let mut child = child.stdin(piped()).stdout(piped()).spawn().expect("cat");
        let tree = tree(std::process::id());
        assert_eq!(tree[0], std::process::id());
        assert!(tree.contains(&child.id()), "{tree:?}");
        drop(child.stdin.take());
        child.wait().expect("cat ends");
    }
}
