//! What a program has to run in: all memory, or part of what it would use.

use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::cli::PageSize;
use crate::error::{BenchError, Trying};
use crate::memcg::Memcg;
use crate::peer::Process;
use crate::stack::{Stack, read};

/// Between two looks at how much memory is resident.
const LOOK: Duration = Duration::from_millis(10);
/// A program which takes longer is killed: some 200 times what the longest job takes without a limit.
pub(crate) const SECONDS_MAX: u64 = 480;
/// What makes results the same everywhere.
const ENVIRONMENT: [(&str, &str); 3] =
    [("LC_ALL", "C"), ("OPENBLAS_NUM_THREADS", "1"), ("OMP_NUM_THREADS", "1")];

/// The room. Each program is in a cgroup of its own, by which its memory is measured.
#[derive(Clone, Copy)]
pub(crate) enum Room<'a> {
    /// All memory.
    Free,
    /// All memory, and it is looked how much of it is used. That takes time: it is not for what is timed.
    Sized,
    /// gms keeps so many MiB resident.
    Gms(&'a Stack, u32),
    /// The cgroup's limit is so many MiB, the kernel's own memory for the program included.
    Swap(u32),
}

/// A program in a room.
pub(crate) struct Running {
    /// It, or the `gms run` around it.
    pub process: Process,
    memcg: Arc<Memcg>,
    stop: Sender<()>,
    meter: JoinHandle<Result<Metered, BenchError>>,
    stats: Option<PathBuf>,
}

struct Metered {
    anon: u64,
    late: bool,
}

/// How a program ended, and what it used.
pub(crate) struct Used {
    /// How it ended.
    pub status: ExitStatus,
    /// Whether it was killed because it took too long.
    pub late: bool,
    /// Whether the kernel killed some of it because it found no page to evict.
    pub starved: bool,
    /// The most anonymous memory that was resident, in MiB: looked at in [`Room::Sized`] only, else 0.
    pub anon_mib: f64,
    /// The most that its cgroup was charged, in MiB: under gms with all of gms's own processes.
    pub charged_mib: f64,
    /// gms's own figures.
    pub gms: Option<Value>,
}

impl Room<'_> {
    /// Starts `line`, with the environment that all programs get.
    pub(crate) fn start(&self, line: &mut Command) -> Result<Running, BenchError> {
        let memcg = Arc::new(match self {
            Room::Swap(mib) => Memcg::new(*mib)?,
            Room::Free | Room::Sized | Room::Gms(..) => Memcg::unlimited()?,
        });
        let stats = match self {
            Room::Gms(stack, _) => Some(stack.path("stats.json")),
            Room::Free | Room::Sized | Room::Swap(_) => None,
        };
        memcg.enter(line);
        let process = Process::start(line.envs(ENVIRONMENT))?;
        let (stop, stopped) = channel();
        let (began, metered) = (Instant::now(), Arc::clone(&memcg));
        let looks = matches!(self, Room::Sized);
        let meter = thread::spawn(move || {
            let mut seen = Metered { anon: 0, late: false };
            while stopped.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                if looks {
                    seen.anon = seen.anon.max(metered.anon()?);
                }
                if began.elapsed().as_secs() >= SECONDS_MAX {
                    seen.late = true;
                    metered.kill()?;
                }
            }
            Ok(seen)
        });
        Ok(Running { process, memcg, stop, meter, stats })
    }

    /// The command line `line` for this room; options may be added to it.
    pub(crate) fn command(&self, line: &[impl AsRef<std::ffi::OsStr>]) -> Command {
        match self {
            Room::Free | Room::Sized | Room::Swap(_) => {
                let mut command = Command::new(&line[0]);
                command.args(&line[1..]);
                command
            }
            Room::Gms(stack, mib) => {
                let stats = stack.path("stats.json");
                let mut command = stack.command::<&str>(&[], PageSize::Small, *mib, &stats);
                command.args(line);
                command
            }
        }
    }
}

impl Running {
    /// Its processes, under gms with gms's own.
    pub(crate) fn pids(&self) -> Result<Vec<u32>, BenchError> {
        self.memcg.pids()
    }

    /// Ends it with all that it has started.
    pub(crate) fn kill(&self) -> Result<(), BenchError> {
        self.memcg.kill()
    }

    /// Waits for its end.
    pub(crate) fn finish(mut self) -> Result<Used, BenchError> {
        let status = self.process.0.wait().trying("cannot wait for the program")?;
        drop(self.stop);
        let metered = self.meter.join().map_err(|_| BenchError::Invalid("no meter".into()))??;
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let stats = self.stats.filter(|_| status.success());
        Ok(Used {
            status,
            late: metered.late,
            starved: self.memcg.kills()? > 0,
            anon_mib: mib(metered.anon),
            charged_mib: mib(self.memcg.peak()?),
            gms: stats.map(|path| read(&path)).transpose()?,
        })
    }
}
