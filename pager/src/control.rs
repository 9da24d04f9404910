//! The control socket of a pager: `gms status`, `gms top` and `gms detach` talk to it.
//!
//! One Unix socket for each pager, `PID.sock` in a directory which only its user can enter. A client sends one line of
//! JSON (`{"op":"status"}` or `{"op":"detach"}`) and reads one line; to a detach the answer comes when it is done.

use std::env;
use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt,
};
use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};

use crate::proc;
use crate::stats::Stats;
use crate::target::{ancestors, descends, self_pid};

/// Longest request.
const REQUEST_BYTES_MAX: usize = 256;
/// Longest answer read.
const REPLY_BYTES_MAX: u64 = 1 << 20;
/// Clients served at a time; more are turned away.
const CLIENTS_MAX: usize = 16;
/// Sockets looked at in a directory.
const SOCKETS_MAX: usize = 4096;
/// For a client to send its request, and for a pager to answer it.
const REQUEST_DEADLINE: Duration = Duration::from_secs(2);
/// For the next page to come home, or to be given up.
const DETACH_DEADLINE: Duration = Duration::from_secs(120);
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
        for dir in own_directories() {
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
            _ => check_private(dir)?,
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
    let mut workloads: Vec<Workload> =
        sockets().iter().filter_map(|path| ask_status(path).ok()).collect();
    workloads.sort_by_key(|workload| workload.stats.pid);
    workloads.dedup_by_key(|workload| workload.stats.supervisor_pid);
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

/// The pager of the workload to which a process of any user's belongs, without asking anybody: one of the process's ancestors is the
/// pager, or the root of a workload.
pub fn pager_above(pid: i32) -> Option<i32> {
    let sockets = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let bound: Vec<(i32, i32)> = bound(&sockets).collect();
    // Ids of another PID namespace that shares this network (a pod) may look like ours.
    let is_gms = |pager: i32| proc::thread_name(pager).is_some_and(|name| name.starts_with("gms"));
    let above = if bound.is_empty() { Vec::new() } else { ancestors(pid) };
    let around = |(pager, root): &(i32, i32)| above.contains(pager) || above.contains(root);
    bound.into_iter().filter(around).map(|(pager, _)| pager).find(|&pager| is_gms(pager))
}

/// Pager and root process of every workload, by the text of /proc/net/unix: a control socket keeps the name there that it had first.
fn bound(sockets: &str) -> impl Iterator<Item = (i32, i32)> {
    sockets.lines().filter_map(|line| {
        let (dir, file) = line.split_whitespace().nth(7)?.rsplit_once('/')?;
        let dir = dir.rsplit('/').next()?;
        let (pager, root) = file.strip_prefix('.')?.split_once('.')?;
        let ours = dir == "gms" || dir.starts_with("gms-");
        Some((pager.parse().ok()?, root.parse().ok()?)).filter(|_| ours)
    })
}

/// Asks a pager to bring all pages home and waits until it has; `progress` is called now and then meanwhile.
pub fn detach(
    workload: &Workload,
    mut progress: impl FnMut(&Stats),
) -> Result<DetachEnd, ControlError> {
    let pid = workload.stats.supervisor_pid;
    let failed = |reason: String| ControlError::NoAnswer { pid, reason };
    let name = format!("{pid}.sock");
    let path =
        sockets().into_iter().find(|path| path.file_name().is_some_and(|file| *file == *name));
    let path = path.ok_or_else(|| failed("its socket is gone".into()))?;
    let mut last = (u64::MAX, Instant::now());
    let mut patient = || {
        // A pager that is busy may answer the next time.
        if let Ok(now) = ask_status(&path) {
            progress(&now.stats);
            if now.stats.away_bytes != last.0 {
                last = (now.stats.away_bytes, Instant::now());
            }
        }
        last.1.elapsed() < DETACH_DEADLINE
    };
    match ask_patiently(&path, Request::Detach, PROGRESS_EVERY, &mut patient) {
        Ok(Reply::Detached) => Ok(DetachEnd::Detached),
        Ok(Reply::Lost(text)) => Ok(DetachEnd::Lost(text)),
        Ok(Reply::Error(reason)) => Err(failed(reason)),
        Ok(Reply::Workload(_)) => Err(failed("it is of another version".into())),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(DetachEnd::Ended),
        Err(error) => Err(failed(error.to_string())),
    }
}

fn ask_status(path: &Path) -> io::Result<Workload> {
    match ask(path, Request::Status, REQUEST_DEADLINE) {
        Ok(Reply::Workload(workload)) => Ok(*workload),
        Ok(_) => Err(ErrorKind::InvalidData.into()),
        Err(error) => {
            if error.kind() == ErrorKind::ConnectionRefused {
                let _ = fs::remove_file(path);
            }
            Err(error)
        }
    }
}

fn ask(path: &Path, request: Request, patience: Duration) -> io::Result<Reply> {
    ask_patiently(path, request, patience, &mut || false)
}

/// The same; `patient` says after each `period` whether to go on waiting.
fn ask_patiently(
    path: &Path,
    request: Request,
    period: Duration,
    patient: &mut dyn FnMut() -> bool,
) -> io::Result<Reply> {
    let mut deadline = Instant::now() + period;
    let mut stream = connect_now(path)?;
    stream.write_all(&line_of(&request))?;
    let mut line = Vec::new();
    let mut bytes = [0; 4096];
    loop {
        let mut left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() && patient() {
            (deadline, left) = (Instant::now() + period, period);
        }
        if left.is_zero() || line.len() as u64 > REPLY_BYTES_MAX {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => line.extend_from_slice(&bytes[..count]),
            Err(error)
                if [ErrorKind::Interrupted, ErrorKind::WouldBlock].contains(&error.kind()) => {}
            Err(error) => return Err(error),
        }
        if line.ends_with(b"\n") {
            return Ok(serde_json::from_slice(&line)?);
        }
    }
}

/// Connects without waiting for a pager whose queue is full.
fn connect_now(path: &Path) -> io::Result<UnixStream> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(std::os::fd::AsRawFd::as_raw_fd(&fd), &UnixAddr::new(path)?)?;
    let stream = UnixStream::from(fd);
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(REQUEST_DEADLINE))?;
    Ok(stream)
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

fn check_private(dir: &Path) -> io::Result<()> {
    let meta = fs::symlink_metadata(dir)?;
    if !meta.is_dir() || meta.uid() != geteuid().as_raw() || meta.mode() & 0o077 != 0 {
        return Err(io::Error::other("not a directory of this user's alone"));
    }
    Ok(())
}

/// Where this user's sockets can be, best first.
fn own_directories() -> Vec<PathBuf> {
    let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|dir| dir.is_absolute());
    let mut dirs: Vec<PathBuf> = runtime.map(|dir| dir.join("gms")).into_iter().collect();
    if geteuid().is_root() {
        dirs.push("/run/gms".into());
    }
    dirs.push(format!("/tmp/gms-{}", geteuid()).into());
    dirs
}

/// Every socket which this user may ask: root sees all users'.
fn sockets() -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> =
        own_directories().into_iter().filter(|dir| check_private(dir).is_ok()).collect();
    if geteuid().is_root() {
        dirs.extend(list("/run/user".as_ref()).map(|dir| dir.join("gms")));
        let named = |dir: &PathBuf| dir.to_string_lossy().starts_with("/tmp/gms-");
        dirs.extend(list("/tmp".as_ref()).filter(named));
    }
    dirs.sort();
    dirs.dedup();
    let sockets = dirs.iter().flat_map(|dir| list(dir));
    sockets
        .filter(|path| path.extension().is_some_and(|end| end == "sock"))
        .take(SOCKETS_MAX)
        .collect()
}

fn list(dir: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(dir).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn scratch(name: &str) -> PathBuf {
        let dir = env::temp_dir().join(format!("gms-control-test-{}-{name}", self_pid()));
        let _ = fs::remove_dir_all(&dir);
        DirBuilder::new().mode(0o700).create(&dir).unwrap();
        dir
    }

    fn workload() -> Workload {
        let stats = Stats { pid: 7, supervisor_pid: 8, faults: 9, ..Stats::default() };
        Workload { stats, front_pid: 6 }
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
        let path = server.path.clone();
        let client = std::thread::spawn(move || {
            let workload = ask_status(&path).unwrap();
            assert_eq!((workload.stats.pid, workload.stats.faults, workload.front_pid), (7, 9, 6));
            let reply = ask(&path, Request::Detach, REQUEST_DEADLINE).unwrap();
            assert!(matches!(reply, Reply::Detached), "{reply:?}");
        });
        assert_eq!(serve(&mut server, client, true, None), 1);
        drop(server);
        assert_eq!(list(&dir).count(), 0, "the socket stayed behind");
        fs::remove_dir(&dir).unwrap();
    }

    #[test]
    fn lost_pages_are_told() {
        let dir = scratch("lost");
        let mut server = Server::open_in(&dir, i32::MAX).unwrap();
        let path = server.path.clone();
        let client = std::thread::spawn(move || {
            let reply = ask(&path, Request::Detach, REQUEST_DEADLINE).unwrap();
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
        let error = ask_patiently(&server.path, Request::Detach, period, &mut patient).unwrap_err();
        assert_eq!((error.kind(), asked), (ErrorKind::TimedOut, 3));
        drop(server);
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn nonsense_is_refused_and_bounded() {
        let dir = scratch("nonsense");
        let mut server = Server::open_in(&dir, self_pid()).unwrap();
        let path = server.path.clone();
        let client = std::thread::spawn(move || {
            let long = vec![b'x'; REQUEST_BYTES_MAX + 1];
            for line in [&b"{\"op\":\"destroy\"}\n"[..], b"\n", b"\xff\xfe\n", b"[[[[[[\n", &long] {
                let mut stream = connect_now(&path).unwrap();
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
        let crowd: Vec<_> =
            (0..CLIENTS_MAX + 9).map(|_| connect_now(&server.path).unwrap()).collect();
        let now = Instant::now();
        server.serve(now, workload, || ());
        assert_eq!(server.clients.len(), CLIENTS_MAX);
        server.serve(now + REQUEST_DEADLINE, workload, || ());
        assert_eq!(server.clients.len(), 0);
        drop(crowd);
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn sockets_of_pagers_are_known_by_their_first_name() {
        let dir = scratch("gms").join("gms");
        let server = Server::open_in(&dir, nix::unistd::getppid().as_raw()).unwrap();
        let sockets = fs::read_to_string("/proc/net/unix").unwrap();
        let parent = nix::unistd::getppid().as_raw();
        assert!(bound(&sockets).any(|found| found == (self_pid(), parent)), "{sockets}");
        assert_eq!(pager_above(self_pid()), Some(self_pid()), "the pager is above");
        assert_eq!(pager_above(parent), Some(self_pid()), "the root is above");
        assert_ne!(pager_above(1), Some(self_pid()));
        drop(server);
        // Other tests of this process have sockets at the same time, of other roots.
        let sockets = fs::read_to_string("/proc/net/unix").unwrap();
        assert!(!bound(&sockets).any(|found| found == (self_pid(), parent)), "{sockets}");
        let line = "0: 00000002 0 00010000 0001 01 99 ";
        let of = |path: &str| bound(&format!("Num\n{line}{path}\n")).next();
        assert_eq!(of("/tmp/gms-7/.12.13"), Some((12, 13)));
        for other in ["/tmp/x/.12.13", "/tmp/gms-7/.12", "/tmp/gms/12.sock", ".12.13", ""] {
            assert_eq!(of(other), None, "{other}");
        }
        fs::remove_dir_all(dir.parent().unwrap()).unwrap();
    }

    #[test]
    fn sockets_of_the_dead_are_removed() {
        let dir = scratch("stale");
        let path = dir.join("1.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        assert_eq!(ask_status(&path).map(|_| ()).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert!(!path.exists());
        fs::remove_dir(&dir).unwrap();
    }

    #[test]
    fn only_private_directories_are_used() {
        use std::os::unix::fs::PermissionsExt;
        let dir = scratch("private");
        assert!(check_private(&dir).is_ok());
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(Server::open_in(&dir, i32::MAX).is_err());
        let link = dir.join("link");
        std::os::unix::fs::symlink("/", &link).unwrap();
        assert!(Server::open_in(&link, i32::MAX).is_err());
        fs::remove_dir_all(&dir).unwrap();
    }
}
