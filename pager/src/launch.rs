//! `gms run`: starts a command, pages its tree and stands for it towards the shell.
//!
//! Two processes of gms take part, see [`front`]; what is below runs in the pager. Order matters: the command's process
//! is forked first, when gms has changed and opened nothing that it could inherit; then agents are connected; only
//! then the command is executed and adopted.

mod child;
mod front;
mod signals;
mod upgrade;

use std::ffi::OsString;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{Pid, getpgid};

use child::{End, State};
pub use front::{Front, Link, Side, split};
pub use signals::{Arrival, Signals, note_inheritance};
pub use upgrade::{Adopted, adopt, answer_probe};

use crate::control::{self, Workload};
use crate::exit::EXIT_GMS;
use crate::handed::Descriptors;
use crate::kernel::pidfd::has_ended;
use crate::kernel::proc;
use crate::kernel::proc::self_pid;
use crate::session::{Session, SessionError, SessionRecord};
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
    /// See [`Session::fd`].
    fn fd(&self) -> BorrowedFd<'_>;
    /// See [`Session::outcome`].
    fn outcome(&self) -> Option<Outcome>;
    /// See [`Session::evictors`].
    fn evictors(&self) -> Vec<i32>;
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
    /// See [`Session::go_on`].
    fn go_on(&self) {}
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
    fn fd(&self) -> BorrowedFd<'_> {
        Session::fd(self)
    }
    fn outcome(&self) -> Option<Outcome> {
        Session::outcome(self)
    }
    fn evictors(&self) -> Vec<i32> {
        Session::evictors(self)
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
    fn go_on(&self) {
        Session::go_on(self);
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

    /// Serves control clients; tells how the session ended, if it did.
    pub fn serve(&mut self) -> Option<Outcome> {
        let Paged { session, control, who, front_pid, asked } = self;
        if let Some(server) = control {
            let workload =
                || Workload { stats: named(session.stats(), who), front_pid: *front_pid };
            *asked = server.serve(Instant::now(), workload, || session.detach());
        }
        let outcome = session.outcome()?;
        if let (Some(server), Outcome::Detached { lost }) = (control, &outcome) {
            server.detached(lost.as_deref());
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

/// Runs a command to its end, in the pager process behind [`split`]. `prepare` makes the session; `rest` is for another binary that goes on meanwhile.
pub fn run<P: Paging>(
    command: &[OsString],
    link: Link,
    signals: Signals,
    rest: Rest<'_>,
    prepare: impl FnOnce() -> Result<P, SessionError>,
) -> Result<Finished, LaunchError> {
    let front_pid = nix::unistd::getppid().as_raw();
    let inherited = signals.inherited();
    nix::sys::prctl::set_child_subreaper(true).map_err(io::Error::from)?;
    let held = child::hold(command, &inherited)?;
    // Out of the shell's job, so that stopping it does not stop the pager; the command stays in it.
    nix::unistd::setpgid(Pid::this(), Pid::from_raw(0)).map_err(io::Error::from)?;
    let session = prepare()?;
    let words: Vec<_> = command.iter().map(|word| word.to_string_lossy()).collect();
    let root = held.pid;
    let paged = Paged::new(session, root, words.join(" "), front_pid);
    let mut running = Running {
        root,
        front_pid,
        end: None,
        launched: None,
        paged: Some(paged),
        past: None,
        stopped: false,
        front_alive: true,
        children_left: true,
        link,
        signals,
        rest: Some(rest),
    };
    // What came meanwhile is for the command, which can still be kept from beginning.
    running.heed();
    running.launched = Some(held.launch());
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

/// A command and its tree.
struct Running<'a, P> {
    root: i32,
    front_pid: i32,
    /// How the command ended, once it did; its background children may live on.
    end: Option<End>,
    /// Until the command was executed.
    launched: Option<child::Launched>,
    /// Until the session ended.
    paged: Option<Paged<P>>,
    /// How the session ended, its last figures and when.
    past: Option<(Outcome, Stats, Instant)>,
    stopped: bool,
    front_alive: bool,
    children_left: bool,
    link: Link,
    signals: Signals,
    rest: Option<Rest<'a>>,
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
        match &self.past {
            None | Some((Outcome::Detached { .. } | Outcome::Refused(_), ..)) => {
                !self.children_left
            }
            // An evictor may be left which has not yet seen the end of its process.
            Some((Outcome::TreeGone, ..)) => self.end.is_some() || !self.children_left,
            Some((Outcome::Killed(_), _, since)) => {
                self.end.is_some() || !self.children_left || since.elapsed() > KILL_DEADLINE
            }
        }
    }

    /// Waits for something to happen and acts on it.
    fn turn(&mut self) -> Result<(), LaunchError> {
        let executed = self.wait();
        let child_changed = self.heed();
        let (root, end) = (self.root, &mut self.end);
        self.children_left = child::reap(|pid, how| {
            if pid == root {
                *end = Some(how);
            }
        });
        if child_changed {
            stopped::reap_ended();
        }
        self.mirror_stop(child_changed);
        // One that has ended had executed it, or could not.
        if executed || self.end.is_some() {
            self.adopt()?;
        }
        if let Some(outcome) = self.paged.as_mut().and_then(Paged::serve) {
            let stats = self.paged.take().map(Paged::finish).unwrap_or_default();
            self.link.dismiss_keeper(&outcome);
            if let Outcome::Detached { lost: Some(text) } = &outcome {
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

    /// Passes on the signals that have come, and the end of the front. True if they tell of a child.
    fn heed(&mut self) -> bool {
        let (mut child_changed, mut continued) = (false, false);
        while let Some(arrival) = self.signals.next() {
            child_changed |= arrival.number == libc::SIGCHLD;
            continued |= arrival.tells_of_continuation();
            let stale = arrival.number == libc::SIGCONT && self.stopped_since(continued);
            if arrival.is_for_the_command(self_pid()) && !stale {
                self.pass_on(arrival.number);
            }
        }
        if self.front_alive && has_ended(self.link.fd()) {
            self.front_alive = false;
            self.pass_on(libc::SIGKILL);
        }
        child_changed
    }

    /// True when the command was executed, or could not be.
    fn wait(&mut self) -> bool {
        let mut fds = self.paged.as_ref().map(Paged::fds).unwrap_or_default();
        let last = fds.len();
        fds.push(PollFd::new(std::os::fd::AsFd::as_fd(&self.signals), PollFlags::POLLIN));
        fds.extend(
            self.launched.iter().map(|launched| PollFd::new(launched.report(), PollFlags::POLLIN)),
        );
        if self.front_alive {
            fds.push(PollFd::new(self.link.fd(), PollFlags::POLLIN));
        }
        wait(&mut fds);
        let ready = |fd: &PollFd<'_>| fd.any().unwrap_or(false);
        self.launched.is_some() && fds.get(last + 1).is_some_and(ready)
    }

    /// To the command; once it has ended, to what it left in the background.
    fn pass_on(&self, signal: i32) {
        if !self.has_ended() {
            return child::send(self.root, signal);
        }
        self.orphans().into_iter().for_each(|orphan| child::send(orphan, signal));
    }

    /// Whether the command has ended, which need not have been reaped.
    fn has_ended(&self) -> bool {
        self.end.is_some() || matches!(child::state(self.root), State::Ended(_))
    }

    /// What the command has left.
    fn orphans(&self) -> Vec<i32> {
        let ours = self.paged.as_ref().map(|paged| paged.session().evictors());
        let mut orphans = proc::children(self_pid());
        orphans.retain(|orphan| !ours.iter().flatten().any(|evictor| evictor == orphan));
        orphans
    }

    /// Whether the command is stopped; once it has ended, what it left in the shell's job, all of it.
    fn is_stopped(&self) -> bool {
        let is_stopped = |pid| matches!(child::state(pid), State::Stopped(_));
        if !self.has_ended() {
            return is_stopped(self.root);
        }
        let group = |pid| getpgid(Some(Pid::from_raw(pid))).ok();
        let job = group(self.front_pid);
        let mut of_job = self.orphans();
        of_job.retain(|&pid| job.is_some() && group(pid) == job);
        !of_job.is_empty() && of_job.into_iter().all(is_stopped)
    }

    /// Whether the command is stopped, but not by the stop that was mirrored last. A shell continues its whole job,
    /// command and front: the SIGCONT of the front, passed on, would undo a stop that the user asked for since.
    fn stopped_since(&self, continued: bool) -> bool {
        self.is_stopped() && (continued || !self.stopped)
    }

    /// Stops and continues the front with the command, so that the shell sees it. A change may have been followed by
    /// its opposite before this looks.
    fn mirror_stop(&mut self, child_changed: bool) {
        let stopped = self.is_stopped();
        if stopped && (child_changed || !self.stopped) {
            self.link.send(libc::SIGSTOP);
        } else if !stopped && self.stopped {
            self.link.send(libc::SIGCONT);
        }
        self.stopped = stopped;
    }

    fn adopt(&mut self) -> Result<(), LaunchError> {
        let Some(launched) = self.launched.take() else { return Ok(()) };
        launched.executed().map_err(|reason| {
            child::kill_all(&self.signals, &[], Duration::ZERO);
            LaunchError::NotExecutable { command: String::new(), reason }
        })?;
        // It may have ended already, and have left children, which are to be paged.
        let Some(paged) = self.paged.as_ref().filter(|_| self.children_left) else { return Ok(()) };
        paged.session().adopt(Root::OwnChildren(self.root)).map_err(|error| {
            child::kill_all(&self.signals, &[], Duration::ZERO);
            error.into()
        })
    }

    fn finish(mut self) -> Result<Finished, LaunchError> {
        let (outcome, stats) = match (self.past.take(), self.paged.take()) {
            (Some((outcome, stats, _)), _) => (outcome, stats),
            (None, Some(paged)) => {
                let stats = paged.finish();
                self.link.dismiss_keeper(&Outcome::TreeGone);
                (Outcome::TreeGone, stats)
            }
            (None, None) => (Outcome::TreeGone, Stats::default()),
        };
        let status = match (&outcome, self.end) {
            (Outcome::Killed(_), _) => EXIT_GMS,
            (_, Some(end)) => end.status(),
            (_, None) => return Err(LaunchError::StatusLost),
        };
        Ok(Finished { stats, status, outcome })
    }
}
