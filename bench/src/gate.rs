//! Lets workloads which were started one by one begin to measure together.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Barrier;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Deserialize, Serialize};

use crate::error::{BenchError, Trying};

/// How often sessions are looked at which have not come.
const LOOK_MS: u16 = 200;

/// Where workloads wait.
pub(crate) struct Gate(UnixListener);

/// Workloads which wait at a gate.
pub(crate) struct Waiting(Vec<UnixStream>);

impl Gate {
    /// A closed one at `path`.
    pub(crate) fn new(path: &Path) -> Result<Gate, BenchError> {
        Ok(Gate(UnixListener::bind(path).trying("no gate")?))
    }

    /// Returns when `count` workloads are there. Now and then `check` says whether they still can
    /// come.
    pub(crate) fn gather(
        self,
        count: usize,
        mut check: impl FnMut() -> Result<(), BenchError>,
    ) -> Result<Waiting, BenchError> {
        let mut there: Vec<UnixStream> = Vec::new();
        while there.len() < count {
            let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, PollTimeout::from(LOOK_MS)) {
                Ok(0) => check()?,
                Ok(_) => there.push(self.0.accept().trying("no one at the gate")?.0),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error).trying("cannot wait for the workloads"),
            }
        }
        Ok(Waiting(there))
    }
}

impl Waiting {
    /// They go on.
    pub(crate) fn open(mut self) -> Result<(), BenchError> {
        self.0.iter_mut().try_for_each(|one| one.write_all(&[1])).trying("cannot open the gate")
    }
}

/// Gates at which a workload waits.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Gates {
    /// Before it is measured.
    pub before: Option<PathBuf>,
    /// When it has been measured: its processes are looked at.
    pub after: Option<PathBuf>,
}

/// The threads of a workload meet, and one of them passes the gate at `path`, if there is one, for all.
pub(crate) fn pass_together(threads: &Barrier, path: Option<&PathBuf>) -> Result<(), BenchError> {
    let passed = match (threads.wait().is_leader(), path) {
        (true, Some(path)) => pass(path),
        _ => Ok(()),
    };
    threads.wait();
    passed
}

/// Waits, as a workload, at the gate at `path`.
pub(crate) fn pass(path: &Path) -> Result<(), BenchError> {
    let mut gate = UnixStream::connect(path).trying("cannot reach the gate")?;
    gate.read_exact(&mut [0]).trying("the gate did not open")
}
