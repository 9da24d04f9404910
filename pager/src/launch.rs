//! `gms run`: starts a command, pages its tree and stands for it towards the shell.
//!
//! Three processes of gms take part, see [`front`]; what is below runs in the pager. Order matters: the command's process
//! is forked first, from a process that has changed and opened nothing that it could inherit; then agents are connected; only
//! then the command is executed and adopted.

mod binary;
mod child;
mod front;
mod reaper;
mod signals;
mod upgrade;

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::Pid;

pub use front::{Front, Link, Side, split};
pub use reaper::Reaper;
pub use signals::{Arrival, Signals, note_inheritance};
pub use upgrade::{Adopted, adopt, answer_probe, inherit};

use crate::control::{self, Workload};
use crate::exit::EXIT_GMS;
use crate::handed::Descriptors;
use crate::keeper;
use crate::kernel::proc::self_pid;
use crate::session::{Leave, Session, SessionError, SessionRecord};
use crate::shared::Outcome;
use crate::speech::say;
use crate::stats::Stats;
use crate::stopped;
use crate::tree::Root;

/// Looks at everything at least this often, in case a notice is lost, and for the deadlines of control clients.
const LOOK_MS: u16 = 1000;
/// For the command's end to be seen after the session killed it.
const KILL_DEADLINE: Duration = Duration::from_secs(5);

/// What the loops need of a [`Session`]; tests put another in its place.
pub trait Paging {
    /// See [`Session::adopt`].
    fn adopt(&self, root: Root) -> Result<(), SessionError>;
    /// See [`Session::detach`].
    fn detach(&self);
    /// See [`Session::fail`].
    fn fail(&self, reason: &str);
    /// See [`Session::fd`].
    fn fd(&self) -> BorrowedFd<'_>;
    /// See [`Session::outcome`].
    fn outcome(&self) -> Option<Outcome>;
    /// See [`Session::stats`].
    fn stats(&self) -> Stats;
    /// See [`Session::finish`].
    fn finish(self) -> Stats;
    /// See [`Session::hand_over`].
    ///
    /// # Errors
    /// As there.
    fn hand_over(&self, _to: &mut Descriptors) -> Result<(SessionRecord, Vec<u64>), String> {
        Err("it cannot be handed over".into())
    }
    /// See [`Session::threads`].
    fn threads(&self) -> usize {
        0
    }
    /// See [`Session::go_on`].
    fn go_on(&self) {}
    /// See [`Session::bequeath`].
    fn bequeath(&self, _leave: Leave) -> bool {
        false
    }
}

/// Tells what the rest of the command line is, for another binary that goes on.
pub type Rest<'a> = &'a dyn Fn(&mut Descriptors) -> serde_json::Value;

impl Paging for Session {
    fn adopt(&self, root: Root) -> Result<(), SessionError> {
        Session::adopt(self, root)
    }
    fn detach(&self) {
        Session::detach(self);
    }
    fn fail(&self, reason: &str) {
        Session::fail(self, reason);
    }
    fn fd(&self) -> BorrowedFd<'_> {
        Session::fd(self)
    }
    fn outcome(&self) -> Option<Outcome> {
        Session::outcome(self)
    }
    fn stats(&self) -> Stats {
        Session::stats(self)
    }
    fn finish(self) -> Stats {
        Session::finish(self)
    }
    fn hand_over(&self, to: &mut Descriptors) -> Result<(SessionRecord, Vec<u64>), String> {
        Session::hand_over(self, to)
    }
    fn threads(&self) -> usize {
        Session::threads(self)
    }
    fn go_on(&self) {
        Session::go_on(self);
    }
    fn bequeath(&self, leave: Leave) -> bool {
        Session::bequeath(self, leave)
    }
}

/// Why gms could not start the command, or not see it through.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A system call failed which should not.
    #[error("cannot start the command: {0}")]
    System(#[from] io::Error),
    /// Agents or the process cannot be used.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// No such command.
    #[error("{0}: not found: check its name and PATH")]
    NotFound(String),
    /// There, but it cannot be executed.
    #[error("{command}: cannot be executed: {reason}")]
    NotExecutable {
        /// The command.
        command: String,
        /// What the system says.
        reason: io::Error,
    },
    /// The command's end was not seen.
    #[error("the command's exit status was lost")]
    StatusLost,
}

/// A session and its control socket.
pub struct Paged<P> {
    session: P,
    control: Option<control::Server>,
    /// Root process and command line, for `gms status`.
    who: (i32, String),
    front_pid: i32,
    /// The binary that is to go on.
    asked: Option<PathBuf>,
}

/// What came of a workload.
#[derive(Debug)]
pub struct Finished {
    /// The last figures.
    pub stats: Stats,
    /// The command's exit status, for `gms run`.
    pub status: u8,
    /// How the session ended.
    pub outcome: Outcome,
}

impl<P: Paging> Paged<P> {
    /// Opens the control socket; without one the session goes on, with a warning.
    pub fn new(session: P, root: i32, command: String, front_pid: i32) -> Paged<P> {
        let control = control::Server::open(root).inspect_err(|error| say(error)).ok();
        Paged { session, control, who: (root, command), front_pid, asked: None }
    }

    /// The session.
    pub fn session(&self) -> &P {
        &self.session
    }

    /// Descriptors to poll for input before [`Paged::serve`].
    pub fn fds(&self) -> Vec<PollFd<'_>> {
        let control = self.control.iter().flat_map(control::Server::fds);
        let fds = std::iter::once(self.session.fd()).chain(control);
        fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect()
    }

    /// Serves control clients; tells how the session ended, if it did, and `first` before any client.
    pub fn serve(&mut self, first: impl FnOnce(&Outcome)) -> Option<Outcome> {
        let Paged { session, control, who, front_pid, asked } = self;
        if let Some(server) = control {
            let workload =
                || Workload { stats: named(session.stats(), who), front_pid: *front_pid };
            *asked = server.serve(Instant::now(), workload, || session.detach());
        }
        let outcome = session.outcome()?;
        first(&outcome);
        if let Some(server) = control {
            server.ended(&outcome);
        }
        Some(outcome)
    }

    /// The binary that is to go on in the place of this one, if one is asked for. Whoever asks awaits [`Paged::not_upgraded`].
    pub fn asked(&mut self) -> Option<PathBuf> {
        self.asked.take()
    }

    /// Tells who has asked for another binary why that does not go on.
    pub fn not_upgraded(&mut self, reason: String) {
        self.control.iter_mut().for_each(|server| server.upgraded(Err(reason.clone())));
    }

    /// Ends the session of a workload of which nothing is left; who waits for its detach is told. Returns how it has ended.
    fn bury(mut self) -> (Outcome, Stats) {
        let outcome = self.session.outcome().unwrap_or(Outcome::TreeGone);
        if let Some(server) = &mut self.control {
            server.ended(&outcome);
        }
        (outcome, self.finish())
    }

    /// Ends the session; the control socket goes with it.
    pub fn finish(self) -> Stats {
        named(self.session.finish(), &self.who)
    }
}

fn named(mut stats: Stats, (root, command): &(i32, String)) -> Stats {
    (stats.pid, stats.supervisor_pid) = (*root, self_pid());
    stats.command.clone_from(command);
    stats
}

/// Waits for input on any of the descriptors, or for the next look.
pub fn wait(fds: &mut [PollFd<'_>]) {
    wait_ms(fds, LOOK_MS);
}

/// The same for so many milliseconds at most.
pub fn wait_ms(fds: &mut [PollFd<'_>], millis: u16) {
    // An error (a signal, no memory) only makes the next look early.
    let _ = poll(fds, PollTimeout::from(millis));
}

/// Runs a command to its end, in the pager process behind [`split`]. `prepare` makes the session; `rest` is for another binary that goes on meanwhile,
/// or for another pager if this one dies, should one go on (`takeover`).
pub fn run<P: Paging>(
    command: &[OsString],
    mut link: Link,
    signals: Signals,
    (rest, takeover): (Rest<'_>, bool),
    prepare: impl FnOnce() -> Result<P, SessionError>,
) -> Result<Finished, LaunchError> {
    let front_pid = nix::unistd::getppid().as_raw();
    // Out of the shell's job, so that stopping it does not stop the pager.
    nix::unistd::setpgid(Pid::this(), Pid::from_raw(0)).map_err(io::Error::from)?;
    link.spawn_keeper().map_err(io::Error::from)?;
    let (root, reaper) = link.command().map_err(io::Error::from)?;
    let session = prepare()?;
    let words: Vec<_> = command.iter().map(|word| word.to_string_lossy()).collect();
    let paged = Paged::new(session, root, words.join(" "), front_pid);
    let launched = link.take_held().map(child::Held::launch);
    let running = Running {
        root,
        reaper,
        launched,
        paged: Some(paged),
        past: None,
        link,
        signals,
        rest: Some(rest),
        takeover,
    };
    running.see_through().map_err(|error| name_error(error, &command[0]))
}

/// Runs a command without paging it: this process becomes the command. Returns only when that cannot be executed.
pub fn execute(command: &[OsString]) -> LaunchError {
    let reason = child::execute(command);
    name_error(LaunchError::NotExecutable { command: String::new(), reason }, &command[0])
}

fn name_error(error: LaunchError, command: &OsString) -> LaunchError {
    let command = command.to_string_lossy().into_owned();
    match error {
        LaunchError::NotExecutable { reason, .. } if reason.kind() == io::ErrorKind::NotFound => {
            LaunchError::NotFound(command)
        }
        LaunchError::NotExecutable { reason, .. } => LaunchError::NotExecutable { command, reason },
        other => other,
    }
}

/// A command and its tree. Whatever is left of it when this process ends is killed by its parent.
struct Running<'a, P> {
    root: i32,
    reaper: i32,
    /// Until the command was executed.
    launched: Option<child::Launched>,
    /// Until the session ended.
    paged: Option<Paged<P>>,
    /// How the session ended, its last figures and when.
    past: Option<(Outcome, Stats, Instant)>,
    link: Link,
    signals: Signals,
    rest: Option<Rest<'a>>,
    /// Whether another pager is to go on if this one dies.
    takeover: bool,
}

impl<P: Paging> Running<'_, P> {
    fn see_through(mut self) -> Result<Finished, LaunchError> {
        while !self.over() {
            if let Err(error) = self.turn() {
                self.paged.take().map(Paged::finish);
                return Err(error);
            }
        }
        self.finish()
    }

    fn over(&self) -> bool {
        let left = self.link.has_children();
        match &self.past {
            Some(_) if self.link.is_forsaken() => true,
            // Whether it was executed is told by itself, perhaps after its end is. The first process of another PID namespace may have adopted somebody,
            // whose end the session sees.
            None => self.launched.is_none() && !left && !keeper::serves_memory(),
            Some((Outcome::Detached { .. } | Outcome::Refused(_), ..)) => !left,
            // An evictor may be left which has not yet seen the end of its process.
            Some((Outcome::TreeGone, ..)) => self.link.end().is_some() || !left,
            Some((Outcome::Killed(_), _, since)) => {
                self.link.end().is_some() || !left || since.elapsed() > KILL_DEADLINE
            }
        }
    }

    /// Waits for something to happen and acts on it.
    fn turn(&mut self) -> Result<(), LaunchError> {
        let executed = self.wait();
        self.heed();
        self.link.hear();
        self.forsake();
        // One that has ended had executed it, or could not.
        if executed || self.link.end().is_some() {
            self.adopt()?;
        }
        // Before its user is told of a detach: from then on it does not end with this process.
        let dismiss = |outcome: &Outcome| self.link.dismiss_keeper(outcome);
        if let Some(outcome) = self.paged.as_mut().and_then(|paged| paged.serve(dismiss)) {
            let stats = self.paged.take().map(Paged::finish).unwrap_or_default();
            if let Outcome::Detached { lost: Some(text), .. } = &outcome {
                say(text);
            }
            self.past = Some((outcome, stats, Instant::now()));
        }
        if let Some(binary) = self.paged.as_mut().and_then(Paged::asked) {
            let Err(reason) = self.upgrade(&binary);
            self.paged.iter_mut().for_each(|paged| paged.not_upgraded(reason.clone()));
        }
        Ok(())
    }

    /// The end of the front ends the command, and its parent sees to that; or, if that has ended, the front. If both have it is for this process.
    fn forsake(&self) {
        let Some(paged) = self.paged.as_ref().filter(|_| self.link.is_forsaken()) else { return };
        if nix::unistd::getppid().as_raw() != paged.front_pid {
            paged.session().fail("the processes of gms beside its pager were killed");
        }
    }

    /// Signals are for the command, but those that tell of what this process traces.
    fn heed(&self) {
        while let Some(arrival) = self.signals.next() {
            if arrival.number == libc::SIGCHLD {
                stopped::reap_ended();
            } else if arrival.is_for_the_command(self.reaper, || true) {
                child::send(self.reaper, arrival.number);
            }
        }
    }

    /// True when the command was executed, or could not be.
    fn wait(&mut self) -> bool {
        let mut fds = self.paged.as_ref().map(Paged::fds).unwrap_or_default();
        let last = fds.len();
        let launched = self.launched.iter().map(child::Launched::report);
        let others = launched.chain([self.signals.as_fd()]).chain(self.link.news());
        fds.extend(others.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        wait(&mut fds);
        self.launched.is_some() && fds[last].any().unwrap_or(false)
    }

    fn adopt(&mut self) -> Result<(), LaunchError> {
        let Some(launched) = self.launched.take() else { return Ok(()) };
        launched
            .executed()
            .map_err(|reason| LaunchError::NotExecutable { command: String::new(), reason })?;
        // It may have ended already, and have left children, which are to be paged.
        let Some(paged) = self.paged.as_ref().filter(|_| self.link.has_children()) else {
            return Ok(());
        };
        if let Some(leave) = self.estate(Descriptors::default()) {
            paged.session().bequeath(leave);
        }
        Ok(paged.session().adopt(Root::Command { pid: self.root, reaper: self.reaper })?)
    }

    fn finish(mut self) -> Result<Finished, LaunchError> {
        let (outcome, stats) = match (self.past.take(), self.paged.take()) {
            (Some((outcome, stats, _)), _) => (outcome, stats),
            (None, Some(paged)) => {
                let (outcome, stats) = paged.bury();
                self.link.dismiss_keeper(&outcome);
                (outcome, stats)
            }
            (None, None) => (Outcome::TreeGone, Stats::default()),
        };
        let status = match (&outcome, self.link.end()) {
            (Outcome::Killed(_), _) => EXIT_GMS,
            (_, Some(end)) => end.status(),
            (_, None) => return Err(LaunchError::StatusLost),
        };
        Ok(Finished { stats, status, outcome })
    }
}
