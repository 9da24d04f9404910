//! Another binary goes on in the place of this one: the pager executes it, and keeps its process, its children and what it has open.
//!
//! The binary is asked first whether it could. Then all threads come to rest, what they know is written down, and it is executed. Until then nothing has
//! changed, and if it cannot be executed all go on. A binary that cannot use what it is given executes the one before, with the same. Faults wait meanwhile,
//! and the keeper holds all that it did.

use std::convert::Infallible;
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::{Duration, Instant};

use gms_transport::text::printable;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, clone};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{AccessFlags, access, pipe2};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::front::{Link, LinkRecord};
use super::signals::Signals;
use super::{Finished, LaunchError, Paged, Paging, Rest, Running};
use crate::control::{Server, ServerRecord};
use crate::handed::{self, Descriptors, Number, VERSION};
use crate::kernel::pidfd::kill;
use crate::privilege::capabilities;
use crate::session::{Resumed, Session, SessionRecord};
use crate::speech::{self, say};

/// For a binary to say whether it could go on.
const PROBE_DEADLINE: Duration = Duration::from_secs(3);
/// What is read of what it says, in bytes.
const PROBE_BYTES_MAX: usize = 4096;
/// What is shown of that, in characters.
const PROBE_CHARS_MAX: usize = 200;
const STACK_LEN: usize = 64 << 10;
/// What a binary says which can go on; the versions that it knows follow.
const KNOWS: &str = "knows versions:";

/// All that the next binary is told, beside the words of the tables.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    version: u32,
    descriptors: Descriptors,
    /// The binary before.
    before: Number,
    /// When faults have begun to wait.
    since: Duration,
    root: i32,
    reaper: i32,
    front_pid: i32,
    command: String,
    link: LinkRecord,
    server: Option<ServerRecord>,
    session: SessionRecord,
    rest: Value,
}

/// A pager that is about to go on in this binary.
pub struct Adopted {
    running: Running<'static, Session>,
    /// What was handed over, open until all of it is taken.
    descriptors: Descriptors,
    /// What the rest of the command line is, as it was told.
    pub rest: Value,
}

impl<P: Paging> Running<'_, P> {
    /// Executes another binary in the place of this one. Returns only if that cannot be: why.
    pub(super) fn upgrade(&mut self, path: &Path) -> Result<Infallible, String> {
        let cannot = |error: io::Error| format!("{}: {error}", path.display());
        let binary = open(path).map_err(cannot)?;
        probe(&binary).map_err(|reason| format!("{}: {reason}", path.display()))?;
        let before =
            File::open("/proc/self/exe").map_err(|error| format!("its binary: {error}"))?;
        speech::end();
        let mut descriptors = Descriptors::default();
        let paged = self.paged.as_ref().ok_or("its session has ended")?;
        let (session, words) = paged.session().hand_over(&mut descriptors)?;
        let failed =
            self.record(session, &before, descriptors).and_then(|(record, descriptors)| {
                let handed = handed::write(&record, &words)?;
                descriptors.outlive_exec(true)?;
                let failed = execute(&binary, &handed, None);
                descriptors.outlive_exec(false)?;
                Err::<Infallible, _>(failed)
            });
        paged.session().go_on();
        failed.map_err(cannot)
    }

    fn record(
        &self,
        session: SessionRecord,
        before: &File,
        mut descriptors: Descriptors,
    ) -> io::Result<(Record, Descriptors)> {
        let to = &mut descriptors;
        let paged = self.paged.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let mut record = Record {
            version: VERSION,
            before: to.give(before),
            since: session.since(),
            root: self.root,
            reaper: self.reaper,
            front_pid: paged.front_pid,
            command: paged.who.1.clone(),
            link: self.link.hand_over(to).ok_or(io::ErrorKind::NotFound)?,
            server: paged.control.as_ref().map(|server| server.hand_over(to)),
            session,
            rest: self.rest.map(|rest| rest(to)).unwrap_or_default(),
            descriptors: Descriptors::default(),
        };
        let descriptors = descriptors.once();
        record.descriptors = descriptors.clone();
        Ok((record, descriptors))
    }
}

/// Goes on in this binary with what the binary before has written into descriptor `number`. If that cannot be, the one before is executed again; `instead`
/// is why this one has been in the place of another.
///
/// # Errors
/// If neither can go on.
pub fn adopt(number: RawFd, instead: Option<&str>) -> Result<Adopted, LaunchError> {
    let mut handed = handed::open(number)?;
    let (record, words): (Record, Vec<u64>) = handed::read(&mut handed)?;
    let (before, descriptors) = (record.before, record.descriptors.clone());
    fcntl(&handed, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).map_err(io::Error::from)?;
    descriptors.outlive_exec(false)?;
    match Prepared::of(record, &words) {
        Ok(prepared) => prepared.begin(instead, descriptors),
        // The one before could not either.
        Err(error) if instead.is_some() => Err(error),
        Err(error) => {
            let before = File::from(before.take()?);
            descriptors.outlive_exec(true)?;
            Err(LaunchError::System(execute(&before, &handed, Some(&error.to_string()))))
        }
    }
}

/// What can fail has been done, and nothing has changed yet, but that there is another keeper.
struct Prepared {
    running: Running<'static, Session>,
    session: Resumed,
    /// The control socket, root process and command line, and the front.
    paged: (Option<ServerRecord>, (i32, String), i32),
    /// The keeper of the binary before.
    keeper: OwnedFd,
    since: Duration,
    rest: Value,
}

impl Prepared {
    /// This process must have one thread only.
    fn of(record: Record, words: &[u64]) -> Result<Prepared, LaunchError> {
        if record.version != VERSION {
            return Err(io::Error::from(io::ErrorKind::InvalidData).into());
        }
        let signals = Signals::block()?;
        let session = Session::again(record.session, words)?;
        let (link, keeper) = Link::again(&record.link)?;
        let Record { root, reaper, front_pid, .. } = record;
        let (launched, past) = (None, None);
        let running =
            Running { root, reaper, launched, paged: None, past, link, signals, rest: None };
        let paged = (record.server, (root, record.command), front_pid);
        Ok(Prepared { running, session, paged, keeper, since: record.since, rest: record.rest })
    }

    fn begin(
        self,
        instead: Option<&str>,
        descriptors: Descriptors,
    ) -> Result<Adopted, LaunchError> {
        let Prepared { mut running, session, paged, keeper, since, rest } = self;
        let (server, who, front_pid) = paged;
        // It has all that the binary before had, and would go on with it if this process ended.
        kill(&keeper);
        let session = session.begin()?;
        let waited = now().saturating_sub(since).as_secs_f64() * 1e3;
        let control = server.map(Server::again).transpose();
        let mut control = control.inspect_err(|error| say(format!("no control socket: {error}")));
        if let Ok(Some(server)) = &mut control {
            server.upgraded(match instead {
                None => Ok(waited),
                Some(reason) => Err(format!("the binary cannot go on: {reason}")),
            });
        }
        let control = control.unwrap_or_default();
        running.paged = Some(Paged { session, control, who, front_pid, asked: None });
        Ok(Adopted { running, descriptors, rest })
    }
}

impl Adopted {
    /// Sees the command through, when all that was handed over is taken; `rest` is as for [`run`](super::run).
    ///
    /// # Errors
    /// As there.
    pub fn see_through(self, rest: Rest<'_>) -> Result<Finished, LaunchError> {
        self.descriptors.close();
        let running = Running { rest: Some(rest), ..self.running };
        running.see_through()
    }
}

/// A file that this process's user may read and execute, whatever its capabilities would allow.
fn open(path: &Path) -> io::Result<File> {
    let wanted = AccessFlags::R_OK | AccessFlags::X_OK;
    access(path, wanted)?;
    let binary = File::open(path)?;
    // Its name may be another's by now.
    access(descriptor_path(&binary).as_str(), wanted)?;
    if binary.metadata()?.is_file() { Ok(binary) } else { Err(io::Error::other("is no file")) }
}

fn descriptor_path(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// On the clock that goes on whatever is executed.
fn now() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default()
}

/// Executes a binary with what it is handed in the place of this one. Returns only if that cannot be: why.
fn execute(binary: &File, handed: &File, instead: Option<&str>) -> io::Error {
    let arguments = ["gms", "adopt", &handed.as_raw_fd().to_string()].map(String::from);
    let instead = instead.map(|reason| format!("--instead={}", reason.replace('\0', " ")));
    let words: Result<Vec<CString>, _> =
        arguments.into_iter().chain(instead).map(CString::new).collect();
    let set = |flags| fcntl(handed, FcntlArg::F_SETFD(flags)).map_err(io::Error::from);
    let executed = set(FdFlag::empty()).and_then(|_| {
        let path = CString::new(descriptor_path(binary))?;
        Ok(nix::unistd::execv(&path, &words?)?)
    });
    let _ = set(FdFlag::FD_CLOEXEC);
    match executed {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

/// What [`probe`] asks a binary, with the capabilities that the pager has.
///
/// # Errors
/// What this binary lacks.
pub fn answer_probe(needed: u64) -> Result<String, String> {
    let lacking = needed & !capabilities("CapEff:");
    match lacking {
        0 => Ok(format!("{KNOWS} {VERSION}")),
        _ => Err(format!(
            "it would have fewer capabilities than the pager has (without {lacking:x})"
        )),
    }
}

/// Asks a binary whether it could go on, by executing it in a process of its own: with the same rights as it would have in the place of this one.
fn probe(binary: &File) -> Result<(), String> {
    let failed = |error: io::Error| format!("cannot be asked: {error}");
    let text = said_by(binary).map_err(failed)?;
    let mut versions = text.lines().find_map(|line| line.strip_prefix(KNOWS));
    let own = VERSION.to_string();
    if versions.take().is_some_and(|all| all.split_whitespace().any(|one| one == own)) {
        return Ok(());
    }
    let first = text.lines().next().unwrap_or_default();
    Err(match first {
        "" => "is no gms that could go on: it says nothing".into(),
        first => format!("is no gms that could go on: {}", printable(first, PROBE_CHARS_MAX)),
    })
}

/// What it says, up to some length, until it ends or is killed.
fn said_by(binary: &File) -> io::Result<String> {
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
    let needed = format!("--probe={}", capabilities("CapPrm:"));
    let path = CString::new(descriptor_path(binary))?;
    let words = ["gms", "adopt", &needed].map(CString::new);
    let words = words.into_iter().collect::<Result<Vec<CString>, _>>()?;
    let words: Vec<_> = words.iter().map(|word| word.as_ptr()).chain([std::ptr::null()]).collect();
    let mut stack = vec![0; STACK_LEN];
    let child = Box::new(|| {
        // SAFETY: system calls alone, with memory that the parent, which waits, keeps as it is. The environment is read as it is: no other thread changes it.
        unsafe {
            let mut none: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut none);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
            // Nobody listens any more by then.
            libc::alarm(PROBE_DEADLINE.as_secs() as u32 + 1);
            libc::dup2(writer.as_raw_fd(), libc::STDOUT_FILENO);
            libc::dup2(writer.as_raw_fd(), libc::STDERR_FILENO);
            libc::execv(path.as_ptr(), words.as_ptr());
            libc::_exit(127)
        }
    });
    // A child of the front, which reaps it. It has the memory until it executes the binary, for which this thread waits.
    let flags = CloneFlags::CLONE_VM | CloneFlags::CLONE_VFORK | CloneFlags::CLONE_PARENT;
    // SAFETY: the child only makes system calls on a stack of its own, which lives until it has executed the binary or ended.
    unsafe { clone(child, &mut stack, flags, None)? };
    drop(writer);
    read_all(reader)
}

fn read_all(reader: OwnedFd) -> io::Result<String> {
    let deadline = Instant::now() + PROBE_DEADLINE;
    let (mut reader, mut said) = (File::from(reader), Vec::new());
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut ready = [PollFd::new(reader.as_fd(), PollFlags::POLLIN)];
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
        if poll(&mut ready, timeout)? == 0 {
            return Err(io::Error::other(format!("it says nothing for {PROBE_DEADLINE:?}")));
        }
        let mut bytes = [0; PROBE_BYTES_MAX];
        match reader.read(&mut bytes)? {
            read @ 1.. if said.len() < PROBE_BYTES_MAX => said.extend_from_slice(&bytes[..read]),
            _ => return Ok(String::from_utf8_lossy(&said).into_owned()),
        }
    }
}
