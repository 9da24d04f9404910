//! `gms run` with a session that pages nothing in the real one's place, for tests/launch.rs: what gms is towards the shell is the same.
//! Or, for tests/programs.rs, with a real one that the pager comes to late.

use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::ExitCode;
use std::sync::{Mutex, Once};
use std::thread::sleep;
use std::time::Duration;

use gms_pager::commands::Failure;
use gms_pager::config::SessionConfig;
use gms_pager::kernel::proc;
use gms_pager::launch::{self, Finished, LaunchError, Paging, Side, note_inheritance};
use gms_pager::session::{Session, SessionError};
use gms_pager::shared::Outcome;
use gms_pager::speech::{self, say};
use gms_pager::stats::Stats;
use gms_pager::tree::Root;
use nix::sys::signal::{Signal, kill, raise};
use nix::unistd::{Pid, getppid, pipe};

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
    command: Option<i32>,
    waited: Once,
}

fn is_played(play: &str) -> bool {
    std::env::var(PLAY).as_deref() == Ok(play)
}

/// The command, which waits to be executed: the only process below one beside this one. None if it has ended already.
fn command() -> Option<i32> {
    let beside = proc::children(getppid().as_raw());
    beside.into_iter().find_map(|pid| proc::children(pid).first().copied())
}

/// The pager gets no CPU until the command has ended.
fn wait_for(command: i32) {
    while proc::state(command).is_some_and(|state| state != 'Z') {
        sleep(Duration::from_millis(1));
    }
}

impl Fake {
    fn end(&self, outcome: Outcome) {
        *self.outcome.lock().expect("no thread panics") = Some(outcome);
        // End of file is readable.
        self.done.1.lock().expect("no thread panics").take();
    }
}

impl Paging for Fake {
    fn adopt(&self, root: Root) -> Result<(), SessionError> {
        let Root::Command { pid: root, .. } = root else { panic!("nobody attaches") };
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
        self.end(Outcome::Detached { lost: None, is_forced: false });
    }
    fn fail(&self, reason: &str) {
        self.end(Outcome::Killed(reason.into()));
    }
    fn fd(&self) -> BorrowedFd<'_> {
        if is_played("slow") {
            self.waited.call_once(|| self.command.into_iter().for_each(wait_for));
        }
        self.done.0.as_fd()
    }
    fn outcome(&self) -> Option<Outcome> {
        self.outcome.lock().expect("no thread panics").clone()
    }
    fn stats(&self) -> Stats {
        Stats { faults: 42, ..Stats::default() }
    }
    fn finish(self) -> Stats {
        self.stats()
    }
}

fn prepare() -> Result<Fake, SessionError> {
    if is_played("unprepared") {
        return Err(SessionError::Fatal("no agent".into()));
    }
    let command = command();
    if is_played("slow") {
        // Until the test has done what is to happen meanwhile.
        raise(Signal::SIGSTOP).expect("this process");
    }
    let (read, write) = pipe().expect("a pipe");
    let done = (read, Mutex::new(Some(write)));
    Ok(Fake { outcome: Mutex::new(None), done, command, waited: Once::new() })
}

/// A session of a pager that gets no CPU until the command has ended.
struct Late {
    session: Session,
    command: Option<i32>,
    waited: Once,
}

impl Late {
    fn prepare() -> Result<Late, SessionError> {
        let config = SessionConfig {
            budget_bytes: 32 << 20,
            page_shift: 12,
            fault_threads: 1,
            agents: Vec::new(),
            keys: None,
            seal: false,
            export_bytes: 512 << 20,
            when_full: Default::default(),
            redundancy: Default::default(),
            disk: None,
            trace: None,
            verbose: false,
            quiet: false,
        };
        let command = command();
        Ok(Late { session: Session::prepare(config)?, command, waited: Once::new() })
    }
}

impl Paging for Late {
    fn adopt(&self, root: Root) -> Result<(), SessionError> {
        self.session.adopt(root)
    }
    fn detach(&self) {
        self.session.detach();
    }
    fn fail(&self, reason: &str) {
        self.session.fail(reason);
    }
    fn fd(&self) -> BorrowedFd<'_> {
        self.waited.call_once(|| self.command.into_iter().for_each(wait_for));
        self.session.fd()
    }
    fn outcome(&self) -> Option<Outcome> {
        self.session.outcome()
    }
    fn stats(&self) -> Stats {
        self.session.stats()
    }
    fn finish(self) -> Stats {
        let stats = self.session.finish();
        say(serde_json::to_string(&stats).expect("figures"));
        stats
    }
}

fn play(
    command: &[OsString],
    link: launch::Link,
    signals: launch::Signals,
) -> Result<Finished, LaunchError> {
    let no_rest = |_: &mut _| serde_json::Value::Null;
    match is_played("late") {
        true => launch::run(command, link, signals, (&no_rest, false), Late::prepare),
        false => launch::run(command, link, signals, (&no_rest, false), prepare),
    }
}

fn run(command: &[OsString]) -> u8 {
    let (link, signals) = match launch::split().expect("two processes") {
        Side::Front(front) => return front.stand_in(),
        Side::Reaper(reaper) => {
            reaper.serve(command);
            return 0;
        }
        Side::Pager(link, signals) => (link, signals),
    };
    match play(command, link, signals) {
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
    let status = run(&command);
    speech::end();
    ExitCode::from(status)
}
