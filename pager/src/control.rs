//! The control socket of a pager: `gms status`, `gms top`, `gms detach` and `gms upgrade` talk to it.
//!
//! One Unix socket for each pager, `PID.sock` in a directory which only its user can enter. A client sends one line of
//! JSON (`{"op":"status"}`, `{"op":"detach"}` or `{"op":"upgrade","binary":FILE}`) and reads one line; to a detach and an
//! upgrade the answer comes when it is done.

mod above;
mod access;
mod doors;
mod upgrade;

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gms_policy::limits::AGENTS_MAX;
use gms_transport::text::{cut, printable};
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::socket::{getsockopt, sockopt};
use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};

use crate::kernel::proc::{ancestors, self_pid};
use crate::shared::Outcome;
use crate::stats::{AgentStats, Stats};
pub use above::pager_above;
use access::may_upgrade;
use doors::Door;
pub use upgrade::{ServerRecord, upgrade};

/// Longest request: a path in JSON, whose characters are escaped at worst.
const REQUEST_BYTES_MAX: usize = libc::PATH_MAX as usize * JSON_CHAR + 256;
/// Longest answer read.
const REPLY_BYTES_MAX: usize = 192 << 10;
/// Longest command line that a pager tells, in characters.
const COMMAND_CHARS_MAX: usize = 4096;
/// Longest name of an agent that it tells, in characters.
const AGENT_CHARS_MAX: usize = 256;
/// Longest reason for which an agent is away that it tells, in characters.
const REASON_CHARS_MAX: usize = 144;
/// Most bytes of a character in JSON.
const JSON_CHAR: usize = 6;
/// The same of one that is not escaped.
const PRINTABLE_CHAR: usize = 4;
/// Most bytes of all else of an agent in JSON.
const JSON_AGENT: usize = 512;
/// The same of a workload.
const JSON_WORKLOAD: usize = 4096;
/// What is kept of the answers of one user's pagers, in bytes.
const KEPT_BYTES_MAX: usize = 2 << 20;
/// Clients served at a time; more are turned away.
const CLIENTS_MAX: usize = 16;
/// For a client to send its request, and for a pager to answer it.
const REQUEST_DEADLINE: Duration = Duration::from_secs(2);
/// For all pagers to answer, however many.
const ALL_DEADLINE: Duration = Duration::from_secs(4);
/// Pagers asked at a time: two full directories.
const ASKED_MAX: usize = 2 * doors::SOCKETS_MAX;
/// For the next page to come home, or to be given up.
const DETACH_DEADLINE: Duration = Duration::from_secs(120);
/// Longest text shown of what a pager says of its detach.
const TEXT_CHARS_MAX: usize = 2048;
/// What is told of a pager that closed its socket instead of answering to a detach.
const NO_WORD: &str = "it ended before the detach was done, and did not say how; if it was killed another may have gone on: see gms status";
/// How often it is asked how far a detach has come.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

// What a pager tells is read whole, and fits into the socket: its client may read it later.
const _: () = {
    let texts = AGENT_CHARS_MAX * JSON_CHAR + REASON_CHARS_MAX * PRINTABLE_CHAR;
    let agents = AGENTS_MAX * (texts + JSON_AGENT);
    let told = COMMAND_CHARS_MAX * JSON_CHAR + agents + JSON_WORKLOAD;
    assert!(
        told <= REPLY_BYTES_MAX && REPLY_BYTES_MAX < 200_000,
        "net.core.wmem_default is 212,992"
    );
};

/// What a client asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase", deny_unknown_fields)]
enum Request {
    Status,
    Detach,
    Upgrade { binary: PathBuf },
}

/// What a pager answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Reply {
    Workload(Box<Workload>),
    Detached,
    /// The same, but for pages that nobody has any more.
    Lost(String),
    /// The binary that was asked for has gone on in the place of the one before, in so many milliseconds.
    Upgraded(f64),
    /// No process of the workload is left: it ended by itself.
    Ended,
    /// gms had to kill the workload: why.
    Killed(String),
    Error(String),
}

/// A workload which a pager on this machine pages.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Workload {
    /// Its figures now.
    pub stats: Stats,
    /// The process which the shell sees (`gms run`), or the pager itself (`gms attach`).
    pub front_pid: i32,
}

impl Workload {
    /// The same with texts of bounded length.
    fn cut(mut self) -> Workload {
        self.stats.command = cut(&self.stats.command, COMMAND_CHARS_MAX);
        self.stats.agents.truncate(AGENTS_MAX);
        for one in &mut self.stats.agents {
            one.addr = cut(&one.addr, AGENT_CHARS_MAX);
            one.reason = printable(&one.reason, REASON_CHARS_MAX);
        }
        self
    }

    /// What it takes in memory, in bytes.
    fn len(&self) -> usize {
        let agents = self
            .stats
            .agents
            .iter()
            .map(|one| size_of::<AgentStats>() + one.addr.len() + one.reason.len());
        size_of::<Workload>() + self.stats.command.len() + agents.sum::<usize>()
    }
}

/// Why a pager cannot be asked.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No directory for the socket.
    #[error("no control socket ({0}), so gms status and gms detach will not find this workload")]
    NoSocket(String),
    /// The text says why.
    #[error("not upgraded: {0}; it goes on as it was")]
    NotUpgraded(String),
    /// The pager did not answer as it should.
    #[error("the gms which pages it (process {pid}) does not answer: {reason}")]
    NoAnswer {
        /// The pager.
        pid: i32,
        /// What happened.
        reason: String,
    },
}

/// How a detach ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DetachEnd {
    /// All pages are home and the workload runs on.
    Detached,
    /// The same, but for pages that nobody has any more: what to tell of them.
    Lost(String),
    /// The workload ended before, by itself.
    Ended,
    /// gms had to kill it: why.
    Killed(String),
}

/// A pager's side of its socket.
pub struct Server {
    listener: UnixListener,
    path: PathBuf,
    /// What was there when it began, see [`id_of`].
    file: Option<(u64, u64)>,
    clients: Vec<Client>,
}

struct Client {
    stream: UnixStream,
    line: Vec<u8>,
    deadline: Instant,
    awaits: Awaits,
}

/// What a client is answered by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaits {
    /// Its request, which has not come whole.
    Request,
    /// The end of the detach.
    Detach,
    /// What comes of the upgrade.
    Upgrade,
}

impl Server {
    /// Opens this process's socket, as the pager of the workload of `root`, in the first directory that works.
    pub fn open(root: i32) -> Result<Server, ControlError> {
        let mut reason = String::new();
        for dir in doors::own_directories() {
            match Server::open_in(&dir, root) {
                Ok(server) => return Ok(server),
                Err(error) => reason = format!("{}: {error}", dir.display()),
            }
        }
        Err(ControlError::NoSocket(reason))
    }

    fn open_in(dir: &Path, root: i32) -> io::Result<Server> {
        match DirBuilder::new().mode(0o700).create(dir) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            _ if doors::own_in(dir)?.is_anothers() => return Err(ErrorKind::AddrInUse.into()),
            _ => {}
        }
        let pager = self_pid();
        let (path, unready) =
            (dir.join(format!("{pager}.sock")), dir.join(above::first_name(pager, root)));
        let _ = fs::remove_file(&unready);
        // Named only once it listens: who finds a socket that refuses may remove it. /proc/net/unix keeps the first name, see `bound`.
        let listener = UnixListener::bind(&unready)?;
        listener.set_nonblocking(true)?;
        // One of the same id in another PID namespace may be about to do the same.
        let renamed = renameat2(AT_FDCWD, &unready, AT_FDCWD, &path, RenameFlags::RENAME_NOREPLACE);
        renamed.inspect_err(|_| drop(fs::remove_file(&unready)))?;
        Ok(Server { listener, file: id_of(&path), path, clients: Vec::new() })
    }

    /// Descriptors to poll for input before [`Server::serve`].
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let clients = self.clients.iter().map(|client| client.stream.as_fd());
        std::iter::once(self.listener.as_fd()).chain(clients)
    }

    /// Serves whoever is ready, without waiting. `detach` is called when it is asked for. Returns the binary that is asked for, of which
    /// [`Server::upgraded`] is to tell.
    pub fn serve(
        &mut self,
        now: Instant,
        workload: impl Fn() -> Workload,
        detach: impl Fn(),
    ) -> Option<PathBuf> {
        while let Ok((stream, _)) = self.listener.accept() {
            if self.clients.len() < CLIENTS_MAX
                && may_ask(&stream)
                && stream.set_nonblocking(true).is_ok()
            {
                let deadline = now + REQUEST_DEADLINE;
                let line = Vec::new();
                self.clients.push(Client { stream, line, deadline, awaits: Awaits::Request });
            }
        }
        let mut asked = None;
        self.clients.retain_mut(|client| match client.request(now) {
            Ok(None) => true,
            Ok(Some(Request::Status)) => {
                client.answer(&Reply::Workload(Box::new(workload().cut())));
                false
            }
            Ok(Some(Request::Detach)) => {
                client.awaits = Awaits::Detach;
                detach();
                true
            }
            Ok(Some(Request::Upgrade { binary })) if asked.is_none() => {
                match may_upgrade(&client.stream, workload().stats.pid) {
                    Ok(()) => {
                        client.awaits = Awaits::Upgrade;
                        asked = Some(binary);
                    }
                    Err(reason) => client.answer(&Reply::Error(reason)),
                }
                client.awaits == Awaits::Upgrade
            }
            Ok(Some(Request::Upgrade { .. })) => {
                client.answer(&Reply::Error("another upgrade is under way".into()));
                false
            }
            Err(reason) => {
                client.answer(&Reply::Error(reason));
                false
            }
        });
        asked
    }

    /// Tells those who asked for the detach how the session ended.
    pub fn ended(&mut self, outcome: &Outcome) {
        let reply = match outcome {
            Outcome::Detached { lost: None, .. } => Reply::Detached,
            Outcome::Detached { lost: Some(text), .. } => Reply::Lost(text.clone()),
            Outcome::TreeGone => Reply::Ended,
            Outcome::Killed(reason) => Reply::Killed(reason.clone()),
            Outcome::Refused(reason) => Reply::Error(reason.clone()),
        };
        self.answer(Awaits::Detach, &reply);
        self.clients.clear();
    }

    fn answer(&mut self, awaits: Awaits, reply: &Reply) {
        self.clients.retain_mut(|client| {
            let is_meant = client.awaits == awaits;
            if is_meant {
                client.answer(reply);
            }
            !is_meant
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // By now another's may be there, who could not know that it was this process's.
        if id_of(&self.path) == self.file {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Device and inode.
fn id_of(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

impl Client {
    /// A request if it is there; an error ends the client.
    fn request(&mut self, now: Instant) -> Result<Option<Request>, String> {
        let mut bytes = [0; 4096];
        match self.stream.read(&mut bytes) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let waits = self.awaits != Awaits::Request || now < self.deadline;
                return if waits { Ok(None) } else { Err("no request came".into()) };
            }
            Ok(count @ 1..) if self.awaits == Awaits::Request => {
                self.line.extend_from_slice(&bytes[..count]);
            }
            _ => return Err("one request is all that is served".into()),
        }
        match self.line.iter().position(|&byte| byte == b'\n') {
            Some(end) => serde_json::from_slice(&self.line[..end])
                .map(Some)
                .map_err(|error| format!("not a request: {error}")),
            None if self.line.len() > REQUEST_BYTES_MAX => Err("the request is too long".into()),
            None => Ok(None),
        }
    }

    /// A client that does not take its answer at once does not get it.
    fn answer(&mut self, reply: &Reply) {
        let _ = self.stream.write_all(&line_of(reply));
    }
}

/// Every workload paged on this machine which this user may see, by process id. Sockets of dead pagers are removed.
pub fn workloads() -> Vec<Workload> {
    let mut workloads = ask_all(doors::own());
    workloads.extend(ask_all(doors::others(Instant::now() + ALL_DEADLINE)));
    workloads.sort_by_key(|workload| workload.stats.pid);
    workloads.dedup_by_key(|workload| workload.stats.supervisor_pid);
    workloads
}

/// The workloads behind the doors.
fn ask_all(doors: impl IntoIterator<Item = Door>) -> Vec<Workload> {
    // A socket and a directory each; half of the descriptors are for all else.
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(limit, _)| limit);
    ask_in_turns(doors, usize::try_from(limit / 4).unwrap_or(ASKED_MAX).clamp(1, ASKED_MAX))
}

/// Asks `most` at a time before the first answer is awaited, so that those who never answer cost one deadline together:
/// half of what is left of [`ALL_DEADLINE`].
fn ask_in_turns(doors: impl IntoIterator<Item = Door>, most: usize) -> Vec<Workload> {
    let (mut doors, end) = (doors.into_iter().peekable(), Instant::now() + ALL_DEADLINE);
    let (mut workloads, mut kept) = (Vec::new(), BTreeMap::<u32, usize>::new());
    while doors.peek().is_some() {
        let send = |door| Some((send(&door, &Request::Status).ok()?, door));
        let asked: Vec<_> = doors.by_ref().take(most).filter_map(send).collect();
        let now = Instant::now();
        let deadline = now + end.saturating_duration_since(now) / 2;
        for (stream, door) in asked {
            let Ok(workload) = status_of(&door, stream, deadline) else { continue };
            let kept = kept.entry(door.owner()).or_default();
            *kept += workload.len();
            if *kept <= KEPT_BYTES_MAX {
                workloads.push(workload);
            }
        }
    }
    workloads
}

/// The workload with this root process, pager or front.
pub fn find(pid: i32) -> Option<Workload> {
    let has = |workload: &Workload| {
        [workload.stats.pid, workload.stats.supervisor_pid, workload.front_pid].contains(&pid)
    };
    workloads().into_iter().find(has)
}

/// The workload to whose tree a process belongs.
pub fn pager_of(pid: i32) -> Option<Workload> {
    let above = ancestors(pid);
    workloads().into_iter().find(|workload| {
        let pager = workload.stats.supervisor_pid;
        [workload.stats.pid, pager].iter().any(|pid| above.contains(pid))
            || above::is_launched_beside(pager, &above)
    })
}

/// Asks a pager to bring all pages home and waits until it has; `progress` is called now and then meanwhile.
pub fn detach(
    workload: &Workload,
    progress: impl FnMut(&Stats),
) -> Result<DetachEnd, ControlError> {
    detach_by(&door_of(workload)?, progress)
}

/// The way to the pager of a workload.
fn door_of(workload: &Workload) -> Result<Door, ControlError> {
    let pid = workload.stats.supervisor_pid;
    let doors = doors::own().chain(doors::others(Instant::now() + ALL_DEADLINE));
    let door = doors.filter(|door| door.pid() == pid).find(|door| door.connect().is_ok());
    door.ok_or_else(|| ControlError::NoAnswer { pid, reason: "its socket is gone".into() })
}

/// What the pager says may be another user's, and meant for root's terminal.
fn detach_by(door: &Door, mut progress: impl FnMut(&Stats)) -> Result<DetachEnd, ControlError> {
    let said = |text: &str| printable(text, TEXT_CHARS_MAX);
    let failed = |text: &str| ControlError::NoAnswer { pid: door.pid(), reason: said(text) };
    let mut last = (u64::MAX, Instant::now());
    let mut patient = || {
        // A pager that is busy may answer the next time.
        if let Ok(now) = ask_status(door) {
            progress(&now.stats);
            if now.stats.away_bytes != last.0 {
                last = (now.stats.away_bytes, Instant::now());
            }
        }
        last.1.elapsed() < DETACH_DEADLINE
    };
    match ask_patiently(door, &Request::Detach, PROGRESS_EVERY, &mut patient) {
        Ok(Reply::Detached) => Ok(DetachEnd::Detached),
        Ok(Reply::Lost(text)) => Ok(DetachEnd::Lost(said(&text))),
        Ok(Reply::Ended) => Ok(DetachEnd::Ended),
        Ok(Reply::Killed(reason)) => Ok(DetachEnd::Killed(said(&reason))),
        Ok(Reply::Error(reason)) => Err(failed(&reason)),
        Ok(Reply::Workload(_) | Reply::Upgraded(_)) => Err(failed("it is of another version")),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Err(failed(NO_WORD)),
        Err(error) => Err(failed(&error.to_string())),
    }
}

fn ask_status(door: &Door) -> io::Result<Workload> {
    status_of(door, send(door, &Request::Status)?, Instant::now() + REQUEST_DEADLINE)
}

/// The answer to a status. What it claims is checked: `gms attach` and `gms detach` act on it.
fn status_of(door: &Door, stream: UnixStream, deadline: Instant) -> io::Result<Workload> {
    match answer(stream, deadline, &mut || None)? {
        Reply::Workload(workload)
            if workload.stats.supervisor_pid == door.pid()
                && door.may_page(workload.stats.pid)
                && door.may_page(workload.front_pid) =>
        {
            Ok(workload.cut())
        }
        _ => Err(ErrorKind::InvalidData.into()),
    }
}

fn send(door: &Door, request: &Request) -> io::Result<UnixStream> {
    let mut stream = door.connect()?;
    stream.write_all(&line_of(request))?;
    Ok(stream)
}

/// Asks, and waits; `patient` says after each `period` whether to go on waiting.
fn ask_patiently(
    door: &Door,
    request: &Request,
    period: Duration,
    patient: &mut dyn FnMut() -> bool,
) -> io::Result<Reply> {
    let stream = send(door, request)?;
    let mut extend = || patient().then(|| Instant::now() + period);
    answer(stream, Instant::now() + period, &mut extend)
}

/// An answer that comes by the deadline or is there then; `extend` may give another deadline.
fn answer(
    mut stream: UnixStream,
    mut deadline: Instant,
    extend: &mut dyn FnMut() -> Option<Instant>,
) -> io::Result<Reply> {
    let mut line = Vec::new();
    let mut bytes = [0; 4096];
    loop {
        let mut left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero()
            && let Some(later) = extend()
        {
            (deadline, left) = (later, later.saturating_duration_since(Instant::now()));
        }
        // What is there at the deadline is read.
        stream.set_nonblocking(left.is_zero())?;
        if !left.is_zero() {
            stream.set_read_timeout(Some(left))?;
        }
        let count = match stream.read(&mut bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => count,
            Err(error)
                if [ErrorKind::Interrupted, ErrorKind::WouldBlock].contains(&error.kind()) =>
            {
                0
            }
            Err(error) => return Err(error),
        };
        line.extend_from_slice(&bytes[..count]);
        if line.ends_with(b"\n") {
            return Ok(serde_json::from_slice(&line)?);
        }
        let all_read = count < bytes.len();
        if left.is_zero() && all_read || line.len() > REPLY_BYTES_MAX {
            return Err(ErrorKind::TimedOut.into());
        }
    }
}

fn line_of(message: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).unwrap_or_default();
    line.push(b'\n');
    line
}

/// Root and the pager's own user may ask.
fn may_ask(stream: &UnixStream) -> bool {
    let peer = getsockopt(stream, sockopt::PeerCredentials).map(|peer| peer.uid());
    peer.is_ok_and(|uid| uid == 0 || uid == geteuid().as_raw())
}

#[cfg(test)]
pub(crate) mod tests;
