//! `gms run` with a session that pages nothing in the real one's place, for tests/launch.rs: what gms is towards the shell is the same.

use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::ExitCode;
use std::sync::Mutex;

use gms_pager::commands::{Failure, say};
use gms_pager::launch::{self, Paging, Side, note_inheritance};
use gms_pager::session::{Outcome, SessionError};
use gms_pager::stats::Stats;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, pipe};

/// Environment: what the session does when it adopts the command.
const PLAY: &str = "GMS_TEST_PLAY";

/// As in the binary.
#[used]
// SAFETY: the loader calls it once; it makes system calls and sets an atomic.
#[unsafe(link_section = ".init_array")]
static NOTE_INHERITANCE: extern "C" fn() = note_inheritance;

/// A session that pages nothing.
struct Fake {
    outcome: Mutex<Option<Outcome>>,
    done: (OwnedFd, Mutex<Option<OwnedFd>>),
}

impl Fake {
    fn end(&self, outcome: Outcome) {
        *self.outcome.lock().expect("no thread panics") = Some(outcome);
        // End of file is readable.
        self.done.1.lock().expect("no thread panics").take();
    }
}

impl Paging for Fake {
    fn adopt(&self, root: i32, attached: bool) -> Result<(), SessionError> {
        assert!(!attached);
        match std::env::var(PLAY).as_deref() {
            Ok("kill") => {
                kill(Pid::from_raw(root), Signal::SIGKILL).expect("the command");
                self.end(Outcome::Killed("the test says so".into()));
            }
            Ok("refuse") => return Err(SessionError::Fatal("cannot be adopted".into())),
            _ => {}
        }
        Ok(())
    }
    fn detach(&self) {
        self.end(Outcome::Detached { lost: None });
    }
    fn fd(&self) -> BorrowedFd<'_> {
        self.done.0.as_fd()
    }
    fn outcome(&self) -> Option<Outcome> {
        self.outcome.lock().expect("no thread panics").clone()
    }
    fn evictors(&self) -> Vec<i32> {
        Vec::new()
    }
    fn stats(&self) -> Stats {
        Stats { faults: 42, ..Stats::default() }
    }
    fn finish(self) -> Stats {
        self.stats()
    }
}

fn prepare() -> Result<Fake, SessionError> {
    if std::env::var(PLAY).as_deref() == Ok("unprepared") {
        return Err(SessionError::Fatal("no agent".into()));
    }
    let (read, write) = pipe().expect("a pipe");
    Ok(Fake { outcome: Mutex::new(None), done: (read, Mutex::new(Some(write))) })
}

fn run(command: &[OsString]) -> u8 {
    let (link, signals) = match launch::split().expect("two processes") {
        Side::Front(front) => return front.stand_in(),
        Side::Pager(link, signals) => (link, signals),
    };
    match launch::run(command, link, signals, prepare) {
        Ok(finished) => finished.status,
        Err(error) => {
            let failure = Failure::from(error);
            say(&failure);
            failure.status
        }
    }
}

fn main() -> ExitCode {
    let command: Vec<OsString> = std::env::args_os().skip(1).collect();
    ExitCode::from(run(&command))
}
