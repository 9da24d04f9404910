//! Undoes what a benchmark sets up on the system, even when the benchmark is killed: a process of its own waits for its end.

use std::ffi::CString;
use std::fs;
use std::io::{BufRead, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use crate::error::{BenchError, Trying};
use crate::netns;

/// How long a step is tried again while the kernel says that something is busy: processes end, udev closes a device.
const BUSY: Duration = Duration::from_secs(10);
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(10);

/// Something to be undone.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Step {
    /// Swap on this device or file ends.
    SwapOff(PathBuf),
    /// The file goes.
    RemoveFile(PathBuf),
    /// The empty directory, or the cgroup, goes.
    RemoveDir(PathBuf),
    /// The file gets this content.
    Write(PathBuf, String),
    /// What the benchmark of this process set up for `--network` goes.
    RemoveNetwork(u32),
}

impl Step {
    fn undo(&self) -> std::io::Result<()> {
        match self {
            Step::SwapOff(path) => swap_off(path),
            Step::RemoveFile(path) => fs::remove_file(path),
            Step::RemoveDir(path) => fs::remove_dir(path),
            Step::Write(path, text) => fs::write(path, text),
            Step::RemoveNetwork(process) => netns::remove(*process),
        }
    }
}

/// What is to be undone when this is dropped, the last first.
pub(crate) struct Undo(Child);

impl Undo {
    /// Nothing yet.
    pub(crate) fn new() -> Result<Undo, BenchError> {
        let own = std::env::current_exe().trying("cannot find gms-bench")?;
        // A group of its own: a Ctrl-C is for gms-bench only.
        let mut command = Command::new(own);
        command.arg("undo").stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0);
        Ok(Undo(command.spawn().trying("cannot start gms-bench undo")?))
    }

    /// To be called before that is done which `step` undoes: a step which fails in the end is one that was not needed.
    pub(crate) fn add(&mut self, step: &Step) -> Result<(), BenchError> {
        let mut line = serde_json::to_vec(step).map_err(|e| BenchError::Invalid(e.to_string()))?;
        line.push(b'\n');
        let stdin = self.0.stdin.as_mut();
        stdin.map_or(Ok(()), |stdin| stdin.write_all(&line)).trying("gms-bench undo has ended")
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// `gms-bench undo`: reads steps until its input ends, then takes them back.
pub(crate) fn wait() {
    // It may last longer than any limit of a benchmark.
    nix::unistd::alarm::cancel();
    let lines = std::io::stdin().lock().lines().map_while(Result::ok);
    let steps: Vec<Step> = lines.filter_map(|line| serde_json::from_str(&line).ok()).collect();
    for step in steps.iter().rev() {
        let began = Instant::now();
        while let Err(error) = step.undo() {
            let busy = error.raw_os_error() == Some(Errno::EBUSY as i32);
            if busy && began.elapsed() < BUSY {
                std::thread::sleep(PAUSE);
                continue;
            }
            // What was not done yet need not be undone.
            let is_done = [Errno::ENOENT, Errno::EINVAL].map(|errno| errno as i32);
            if !error.raw_os_error().is_some_and(|errno| is_done.contains(&errno)) {
                eprintln!("gms-bench: could not undo {step:?}: {error}");
                if matches!(step, Step::SwapOff(_)) {
                    // The rest is what it still uses.
                    return;
                }
            }
            break;
        }
    }
}

/// Swap on `path` begins.
pub(crate) fn swap_on(path: &Path) -> std::io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the path ends with a NUL and lives on.
    Errno::result(unsafe { libc::swapon(path.as_ptr(), 0) }).map(drop).map_err(Into::into)
}

fn swap_off(path: &Path) -> std::io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the path ends with a NUL and lives on.
    Errno::result(unsafe { libc::swapoff(path.as_ptr()) }).map(drop).map_err(Into::into)
}
