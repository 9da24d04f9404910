//! What /proc says of processes.

use std::fs;

/// CPU time of all threads of a process so far, in us; of one that has ended 0.
pub fn cpu_us(pid: u32) -> f64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"));
    let of = |task: fs::DirEntry| {
        // A thread may have ended.
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    };
    tasks.into_iter().flatten().flatten().filter_map(of).sum::<f64>() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn what_runs_takes_time() {
        let own = std::process::id();
        let (before, began) = (cpu_us(own), Instant::now());
        while began.elapsed() < Duration::from_millis(50) {
            std::hint::spin_loop();
        }
        // The scheduler updates it at its ticks.
        assert!(cpu_us(own) - before > 1_000.0, "{before}");
        assert_eq!(cpu_us(u32::MAX), 0.0, "no such process");
    }
}
