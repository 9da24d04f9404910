//! The control socket of a pager: `gms status`, `gms top` and `gms detach` talk to it.
//!
//! One Unix socket for each pager, `PID.sock` in a directory which only its user can enter. A client sends one line of
//! JSON (`{"op":"status"}` or `{"op":"detach"}`) and reads one line; to a detach the answer comes when it is done.

mod above;
mod doors;

use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gms_transport::text::printable;
use nix::sys::socket::{getsockopt, sockopt};
use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};

use crate::kernel::proc::{descends, self_pid};
use crate::stats::Stats;
pub use above::pager_above;
use doors::Door;

/// Longest request.
const REQUEST_BYTES_MAX: usize = 256;
/// Longest answer read.
const REPLY_BYTES_MAX: usize = 1 << 20;
/// Clients served at a time; more are turned away.
const CLIENTS_MAX: usize = 16;
/// For a client to send its request, and for a pager to answer it.
const REQUEST_DEADLINE: Duration = Duration::from_secs(2);
/// Pagers asked at a time: two full directories, half of the descriptors that a process may have by default.
const ASKED_MAX: usize = 2 * doors::SOCKETS_MAX;
/// For an answer that is there at the deadline to be read.
const LAST_LOOK: Duration = Duration::from_millis(1);
/// For the next page to come home, or to be given up.
const DETACH_DEADLINE: Duration = Duration::from_secs(120);
/// Longest text shown of what a pager says of its detach.
const TEXT_CHARS_MAX: usize = 2048;
/// How often it is asked how far a detach has come.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

/// What a client asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase", deny_unknown_fields)]
enum Request {
    Status,
    Detach,
}

/// What a pager answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Reply {
    Workload(Box<Workload>),
    Detached,
    /// The same, but for pages that nobody has any more.
    Lost(String),
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

/// Why a pager cannot be asked.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No directory for the socket.
    #[error("no control socket ({0}), so gms status and gms detach will not find this workload")]
    NoSocket(String),
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
    /// The workload ended before.
    Ended,
}

/// A pager's side of its socket.
pub struct Server {
    listener: UnixListener,
    path: PathBuf,
    clients: Vec<Client>,
}

struct Client {
    stream: UnixStream,
    line: Vec<u8>,
    deadline: Instant,
    awaits_detach: bool,
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
            _ => drop(doors::private(dir, &[geteuid().as_raw()])?),
        }
        let pager = self_pid();
        let (path, unready) =
            (dir.join(format!("{pager}.sock")), dir.join(format!(".{pager}.{root}")));
        let _ = fs::remove_file(&unready);
        // Named only once it listens: who finds a socket that refuses may remove it. /proc/net/unix keeps the first name, see `bound`.
        let listener = UnixListener::bind(&unready)?;
        listener.set_nonblocking(true)?;
        fs::rename(&unready, &path)?;
        Ok(Server { listener, path, clients: Vec::new() })
    }

    /// Descriptors to poll for input before [`Server::serve`].
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let clients = self.clients.iter().map(|client| client.stream.as_fd());
        std::iter::once(self.listener.as_fd()).chain(clients)
    }

    /// Serves whoever is ready, without waiting. `detach` is called when it is asked for.
    pub fn serve(&mut self, now: Instant, workload: impl Fn() -> Workload, detach: impl Fn()) {
        while let Ok((stream, _)) = self.listener.accept() {
            if self.clients.len() < CLIENTS_MAX
                && may_ask(&stream)
                && stream.set_nonblocking(true).is_ok()
            {
                let deadline = now + REQUEST_DEADLINE;
                let line = Vec::new();
                self.clients.push(Client { stream, line, deadline, awaits_detach: false });
            }
        }
        self.clients.retain_mut(|client| match client.request(now) {
            Ok(None) => true,
            Ok(Some(Request::Status)) => {
                client.answer(&Reply::Workload(Box::new(workload())));
                false
            }
            Ok(Some(Request::Detach)) => {
                client.awaits_detach = true;
                detach();
                true
            }
            Err(reason) => {
                client.answer(&Reply::Error(reason));
                false
            }
        });
    }

    /// Tells those who asked for the detach that it is done, and which pages were `lost`.
    pub fn detached(&mut self, lost: Option<&str>) {
        for mut client in self.clients.drain(..).filter(|client| client.awaits_detach) {
            client.answer(&match lost {
                None => Reply::Detached,
                Some(text) => Reply::Lost(text.to_owned()),
            });
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

impl Client {
    /// A request if it is there; an error ends the client.
    fn request(&mut self, now: Instant) -> Result<Option<Request>, String> {
        let mut bytes = [0; REQUEST_BYTES_MAX];
        match self.stream.read(&mut bytes) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let waits = self.awaits_detach || now < self.deadline;
                return if waits { Ok(None) } else { Err("no request came".into()) };
            }
            Ok(count @ 1..) if !self.awaits_detach => self.line.extend_from_slice(&bytes[..count]),
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
    let mut workloads = ask_all(doors::all());
    workloads.sort_by_key(|workload| workload.stats.pid);
    workloads.dedup_by_key(|workload| workload.stats.supervisor_pid);
    workloads
}

/// The workloads behind the doors. As many as there are descriptors for are asked before the first answer is awaited, so that those who
/// never answer cost one deadline together.
fn ask_all(doors: Vec<Door>) -> Vec<Workload> {
    let mut workloads = Vec::new();
    for doors in doors.chunks(ASKED_MAX) {
        let deadline = Instant::now() + REQUEST_DEADLINE;
        let send = |door| Some((send(door, Request::Status).ok()?, door));
        let asked: Vec<_> = doors.iter().filter_map(send).collect();
        let answer = |(stream, door)| status_of(door, stream, deadline).ok();
        workloads.extend(asked.into_iter().filter_map(answer));
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
    workloads().into_iter().find(|workload| {
        descends(pid, workload.stats.pid) || descends(pid, workload.stats.supervisor_pid)
    })
}

/// Asks a pager to bring all pages home and waits until it has; `progress` is called now and then meanwhile.
pub fn detach(
    workload: &Workload,
    progress: impl FnMut(&Stats),
) -> Result<DetachEnd, ControlError> {
    let pid = workload.stats.supervisor_pid;
    let mut doors = doors::all().into_iter().filter(|door| door.pid() == pid);
    let door = doors.find(|door| door.connect().is_ok());
    let gone = || ControlError::NoAnswer { pid, reason: "its socket is gone".into() };
    detach_by(&door.ok_or_else(gone)?, progress)
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
    match ask_patiently(door, Request::Detach, PROGRESS_EVERY, &mut patient) {
        Ok(Reply::Detached) => Ok(DetachEnd::Detached),
        Ok(Reply::Lost(text)) => Ok(DetachEnd::Lost(said(&text))),
        Ok(Reply::Error(reason)) => Err(failed(&reason)),
        Ok(Reply::Workload(_)) => Err(failed("it is of another version")),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(DetachEnd::Ended),
        Err(error) => Err(failed(&error.to_string())),
    }
}

fn ask_status(door: &Door) -> io::Result<Workload> {
    status_of(door, send(door, Request::Status)?, Instant::now() + REQUEST_DEADLINE)
}

/// The answer to a status. What it claims is checked: `gms attach` and `gms detach` act on it.
fn status_of(door: &Door, stream: UnixStream, deadline: Instant) -> io::Result<Workload> {
    match answer(stream, deadline, &mut || None)? {
        Reply::Workload(workload)
            if workload.stats.supervisor_pid == door.pid()
                && door.may_page(workload.stats.pid)
                && door.may_page(workload.front_pid) =>
        {
            Ok(*workload)
        }
        _ => Err(ErrorKind::InvalidData.into()),
    }
}

fn send(door: &Door, request: Request) -> io::Result<UnixStream> {
    let mut stream = door.connect()?;
    stream.write_all(&line_of(&request))?;
    Ok(stream)
}

/// Asks, and waits; `patient` says after each `period` whether to go on waiting.
fn ask_patiently(
    door: &Door,
    request: Request,
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
        stream.set_read_timeout(Some(left.max(LAST_LOOK)))?;
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
pub(crate) mod tests {
    use super::*;
    use std::cell::Cell;

    pub(crate) fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("gms-control-test-{}-{name}", self_pid()));
        let _ = fs::remove_dir_all(&dir);
        DirBuilder::new().mode(0o700).create(&dir).unwrap();
        dir
    }

    fn workload() -> Workload {
        let stats = Stats { pid: 7, supervisor_pid: self_pid(), faults: 9, ..Stats::default() };
        Workload { stats, front_pid: 6 }
    }

    /// The way to the socket of this process in a directory.
    fn door(dir: &Path) -> Door {
        let mut doors = doors::of(dir, &[geteuid().as_raw()]);
        assert_eq!(doors.len(), 1);
        doors.remove(0)
    }

    /// Serves `server` until the other thread is done; returns how often a detach was asked for.
    fn serve(
        server: &mut Server,
        client: std::thread::JoinHandle<()>,
        done: bool,
        lost: Option<&str>,
    ) -> u32 {
        let detaches = Cell::new(0);
        while !client.is_finished() {
            server.serve(Instant::now(), workload, || detaches.set(detaches.get() + 1));
            if done && detaches.get() > 0 {
                server.detached(lost);
            }
            std::thread::yield_now();
        }
        client.join().unwrap();
        detaches.get()
    }

    #[test]
    fn status_and_detach_are_answered() {
        let dir = scratch("ask");
        let mut server = Server::open_in(&dir, self_pid()).unwrap();
        let door = door(&dir);
        let client = std::thread::spawn(move || {
            let workload = ask_status(&door).unwrap();
            assert_eq!((workload.stats.pid, workload.stats.faults, workload.front_pid), (7, 9, 6));
            let reply =
                ask_patiently(&door, Request::Detach, REQUEST_DEADLINE, &mut || false).unwrap();
            assert!(matches!(reply, Reply::Detached), "{reply:?}");
        });
        assert_eq!(serve(&mut server, client, true, None), 1);
        drop(server);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "the socket stayed behind");
        fs::remove_dir(&dir).unwrap();
    }

    #[test]
    fn lost_pages_are_told() {
        let dir = scratch("lost");
        let mut server = Server::open_in(&dir, i32::MAX).unwrap();
        let door = door(&dir);
        let client = std::thread::spawn(move || {
            let reply =
                ask_patiently(&door, Request::Detach, REQUEST_DEADLINE, &mut || false).unwrap();
            assert!(matches!(&reply, Reply::Lost(text) if text == "3 pages"), "{reply:?}");
        });
        assert_eq!(serve(&mut server, client, true, Some("3 pages")), 1);
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn patience_is_asked_for_after_each_period() {
        let dir = scratch("patience");
        let server = Server::open_in(&dir, i32::MAX).unwrap();
        let mut asked = 0;
        let mut patient = || {
            asked += 1;
            asked < 3
        };
        let period = Duration::from_millis(1);
        let error = ask_patiently(&door(&dir), Request::Detach, period, &mut patient).unwrap_err();
        assert_eq!((error.kind(), asked), (ErrorKind::TimedOut, 3));
        drop(server);
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn nonsense_is_refused_and_bounded() {
        let dir = scratch("nonsense");
        let mut server = Server::open_in(&dir, self_pid()).unwrap();
        let door = door(&dir);
        let client = std::thread::spawn(move || {
            let long = vec![b'x'; REQUEST_BYTES_MAX + 1];
            for line in [&b"{\"op\":\"destroy\"}\n"[..], b"\n", b"\xff\xfe\n", b"[[[[[[\n", &long] {
                let mut stream = door.connect().unwrap();
                stream.write_all(line).unwrap();
                stream.set_read_timeout(Some(REQUEST_DEADLINE)).unwrap();
                let mut answer = String::new();
                stream.read_to_string(&mut answer).unwrap();
                assert!(answer.starts_with("{\"error\":"), "{line:?}: {answer}");
            }
        });
        assert_eq!(serve(&mut server, client, false, None), 0);
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn idle_clients_and_crowds_are_turned_away() {
        let dir = scratch("crowd");
        let mut server = Server::open_in(&dir, self_pid()).unwrap();
        let crowd: Vec<_> = (0..CLIENTS_MAX + 9).map(|_| door(&dir).connect().unwrap()).collect();
        let now = Instant::now();
        server.serve(now, workload, || ());
        assert_eq!(server.clients.len(), CLIENTS_MAX);
        server.serve(now + REQUEST_DEADLINE, workload, || ());
        assert_eq!(server.clients.len(), 0);
        drop(crowd);
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn who_never_answers_delays_little() {
        let (dir, own) = (scratch("mute"), geteuid().as_raw());
        // The user's own directory, and what would be it too if numbers could be written otherwise.
        let zeros = (1..20).map(|zeros| format!("gms-{}{own}", "0".repeat(zeros)));
        let names = zeros.chain([format!("gms-+{own}"), format!("gms-{own}")]);
        let dirs: Vec<PathBuf> = names.map(|name| dir.join(name)).collect();
        let mut mute = Vec::new();
        for dir in &dirs {
            DirBuilder::new().mode(0o700).create(dir).unwrap();
            for other in [format!("0{}.sock", self_pid()), format!("+{}.sock", self_pid())] {
                drop(UnixListener::bind(dir.join(other)).unwrap());
            }
            mute.push(UnixListener::bind(dir.join(format!("{}.sock", self_pid()))).unwrap());
        }
        let strangers = (0..20).map(|n| dirs[0].join(format!("{}.sock", 2_000_000_000 + n)));
        mute.extend(strangers.map(|path| UnixListener::bind(path).unwrap()));
        let found: Vec<_> = doors::numbered(&dir, "gms-").collect();
        assert_eq!(found, [(dir.join(format!("gms-{own}")), own)]);
        let doors: Vec<Door> = dirs.iter().flat_map(|dir| doors::of(dir, &[own])).collect();
        assert_eq!(doors.iter().filter(|door| door.pid() == self_pid()).count(), dirs.len());
        let start = Instant::now();
        assert!(ask_all(doors).is_empty());
        assert!(start.elapsed() < 2 * REQUEST_DEADLINE, "{:?}", start.elapsed());
        drop(mute);
        fs::remove_dir_all(&dir).unwrap();
    }

    /// Has user 65534 listen as this process's pager and give an answer to what root asks.
    fn told<R>(dir: &Path, answer: Vec<u8>, ask: impl FnOnce(Vec<Door>) -> R) -> R {
        std::os::unix::fs::chown(dir, Some(65534), Some(65534)).unwrap();
        let path = dir.join(format!("{}.sock", self_pid()));
        let stranger = std::thread::spawn(move || {
            // SAFETY: the call changes the ids of this thread alone, which ends soon.
            assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, -1, 65534, -1) }, 0);
            UnixListener::bind(path).unwrap()
        });
        let listener = stranger.join().unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; 16]).unwrap();
            stream.write_all(&answer).unwrap();
        });
        let found = ask(doors::of(dir, &[65534]));
        server.join().unwrap();
        fs::remove_file(dir.join(format!("{}.sock", self_pid()))).unwrap();
        found
    }

    fn claimed(dir: &Path, workload: &Workload) -> Vec<Workload> {
        told(dir, line_of(&Reply::Workload(Box::new(workload.clone()))), ask_all)
    }

    #[test]
    fn what_a_pager_says_does_not_control_the_terminal() {
        if !geteuid().is_root() {
            return eprintln!("SKIPPED: only root asks the pagers of others");
        }
        let dir = scratch("words");
        let words = "\u{1b}]0;x\u{7}\u{9b}2J\u{202e}".repeat(1 << 12);
        let unknown = [(&words, 1)].into_iter().collect::<std::collections::BTreeMap<_, _>>();
        let (lost, error) = (Reply::Lost(words.clone()), Reply::Error(words.clone()));
        for answer in [line_of(&lost), line_of(&error), line_of(&unknown)] {
            let text = match told(&dir, answer, |doors| detach_by(&doors[0], |_| ())) {
                Ok(DetachEnd::Lost(text)) => text,
                end => end.unwrap_err().to_string(),
            };
            assert!(text.contains("]0;x"), "{text}");
            assert!(!text.contains(['\u{1b}', '\u{7}', '\u{9b}', '\u{202e}']), "{text:?}");
            assert!(text.len() < 2 * TEXT_CHARS_MAX, "{}", text.len());
        }
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn nobody_claims_the_processes_of_others() {
        if !geteuid().is_root() {
            return eprintln!("SKIPPED: only root asks the pagers of others");
        }
        let dir = scratch("claims");
        let (gone, init) = (i32::MAX, 1);
        let stats = Stats { pid: gone, ..workload().stats };
        let honest = Workload { stats, front_pid: gone };
        assert_eq!(claimed(&dir, &honest).len(), 1, "processes that are gone are nobody's");
        let stats = Stats { pid: init, ..honest.stats.clone() };
        assert!(claimed(&dir, &Workload { stats, ..honest }).is_empty(), "another's root");
        assert!(claimed(&dir, &Workload { front_pid: init, ..honest.clone() }).is_empty());
        let stats = Stats { supervisor_pid: init, ..honest.stats };
        assert!(claimed(&dir, &Workload { stats, front_pid: gone }).is_empty(), "another pager");
        fs::remove_dir_all(&dir).unwrap();
    }
}
