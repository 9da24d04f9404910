//! Programs: described once, run natively or under gms, captured, watched and never left behind.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::census::{Census, PAUSES, Peak, Watch};
use crate::memcg::MemoryGroup;
use crate::procfs;
use crate::stats::Stats;
use crate::stream::Stream;

/// How often state that nothing announces is looked at.
const POLL: Duration = Duration::from_millis(5);
/// Longest pause after a look that took long.
const POLL_MAX: Duration = Duration::from_millis(100);
/// How long a program may take when the test does not say.
const LIMIT: Duration = Duration::from_secs(300);
/// How long output may still come after the program has ended (its children may hold the pipe).
const DRAIN: Duration = Duration::from_secs(3);

/// A whole number: how many times slower than a machine this one is (a guest under emulation). Deadlines are as many times longer.
const SLOW: &str = "GMS_TESTS_SLOW";

/// A deadline as it is on this machine.
pub fn patience(limit: Duration) -> Duration {
    let times = std::env::var(SLOW).ok().map(|text| text.parse::<u32>().expect(SLOW));
    limit * times.unwrap_or(1).max(1)
}

/// Looks at `probe` until it gives something; fails the test at the deadline.
pub fn poll_until<T>(what: &str, limit: Duration, mut probe: impl FnMut() -> Option<T>) -> T {
    let limit = patience(limit);
    let deadline = Instant::now() + limit;
    loop {
        let began = Instant::now();
        if let Some(found) = probe() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited {limit:?} in vain for {what}");
        // A probe that starts a program takes a CPU from what is waited for.
        thread::sleep((began.elapsed() * PAUSES).clamp(POLL, POLL_MAX));
    }
}

/// Stops a process, all of its threads, while `act` looks at its memory or changes it: what it would do about that meanwhile is not of the test.
pub fn while_stopped<T>(pid: i32, act: impl FnOnce() -> T) -> T {
    let send = |signal| kill(Pid::from_raw(pid), signal).expect("a process");
    let is_stopped = |thread: fs::DirEntry| {
        let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
    };
    send(Signal::SIGSTOP);
    poll_until("the stop of a process", Duration::from_secs(10), || {
        let mut threads = fs::read_dir(format!("/proc/{pid}/task")).expect("a process").flatten();
        threads.all(is_stopped).then_some(())
    });
    let result = act();
    send(Signal::SIGCONT);
    result
}

/// Path of an installed program; fails with the way to get it.
pub fn tool(name: &str) -> PathBuf {
    let system = ["/usr/bin", "/bin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    system
        .into_iter()
        .chain(std::env::split_paths(&path).collect::<Vec<_>>())
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
        .unwrap_or_else(|| panic!("{name} is not installed: run tests/setup.sh as root"))
}

/// The end of an output, for a report.
fn tail(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(2000)..]).into_owned()
}

/// A command line with its surroundings.
#[derive(Clone)]
pub struct Program {
    argv: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    dir: Option<PathBuf>,
    stdin: Option<Vec<u8>>,
    stdin_open: bool,
    stdout: Option<PathBuf>,
    limit: Duration,
    watch: Watch,
}

impl Program {
    /// A command line with an empty standard input.
    pub fn new<I: IntoIterator<Item = S>, S: Into<OsString>>(argv: I) -> Program {
        let argv = argv.into_iter().map(Into::into).collect();
        let (env, dir, stdin, stdin_open, stdout) = (Vec::new(), None, None, false, None);
        Program { argv, env, dir, stdin, stdin_open, stdout, limit: LIMIT, watch: Watch::Tree }
    }

    /// The command line, for a report.
    pub fn line(&self) -> String {
        let words: Vec<_> = self.argv.iter().map(|word| word.to_string_lossy()).collect();
        words.join(" ")
    }

    /// Adds arguments.
    pub fn args<I: IntoIterator<Item = S>, S: ToString>(mut self, args: I) -> Program {
        self.argv.extend(args.into_iter().map(|arg| arg.to_string().into()));
        self
    }

    /// Chooses whose memory is looked at.
    pub(crate) fn watch(mut self, watch: Watch) -> Program {
        self.watch = watch;
        self
    }

    /// The same surroundings around another command line.
    pub(crate) fn wrapped(&self, before: Vec<OsString>) -> Program {
        Program { argv: before.into_iter().chain(self.argv.clone()).collect(), ..self.clone() }
    }

    /// The same in a memory cgroup.
    pub fn within(&self, group: &MemoryGroup) -> Program {
        self.wrapped(group.enter().into())
    }

    /// Sets a variable of the environment.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Program {
        self.env.push((name.as_ref().into(), value.as_ref().into()));
        self
    }

    /// Sets the working directory.
    pub fn dir(mut self, dir: impl Into<PathBuf>) -> Program {
        self.dir = Some(dir.into());
        self
    }

    /// Gives it bytes to read, then the end of its input.
    pub fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Program {
        self.stdin = Some(bytes.into());
        self
    }

    /// Leaves its standard input open until [`Proc::close_stdin`].
    pub fn stdin_open(mut self) -> Program {
        self.stdin_open = true;
        self
    }

    /// Sends its standard output to a file instead of capturing it.
    pub fn stdout_to(mut self, file: impl Into<PathBuf>) -> Program {
        self.stdout = Some(file.into());
        self
    }

    /// Gives it another deadline than 300 s.
    pub fn limit(mut self, limit: Duration) -> Program {
        self.limit = limit;
        self
    }

    /// Starts it, in a process group of its own.
    pub fn spawn(&self) -> Proc {
        let name = format!("{:?}", self.argv);
        let mut command = Command::new(&self.argv[0]);
        command.args(&self.argv[1..]).envs(self.env.clone()).process_group(0);
        if let Some(dir) = &self.dir {
            command.current_dir(dir);
        }
        let piped = self.stdin.is_some() || self.stdin_open;
        command.stdin(if piped { Stdio::piped() } else { Stdio::null() });
        let stdout = self.stdout.as_ref().map(|file| File::create(file).expect("output file"));
        command.stdout(stdout.map_or_else(Stdio::piped, Stdio::from)).stderr(Stdio::piped());
        let started = Instant::now();
        let mut child =
            command.spawn().unwrap_or_else(|error| panic!("cannot start {name}: {error}"));
        let mut stdin = child.stdin.take();
        if let (Some(bytes), Some(mut pipe)) =
            (self.stdin.clone(), stdin.take_if(|_| !self.stdin_open))
        {
            // A program may end without reading all of its input.
            thread::spawn(move || drop(pipe.write_all(&bytes)));
        }
        Proc {
            out: child.stdout.take().map(Stream::capture).unwrap_or_default(),
            err: child.stderr.take().map(Stream::capture).unwrap_or_default(),
            deadline: started + patience(self.limit),
            census: Census::watch(child.id() as i32, self.watch),
            status: None,
            name,
            child,
            stdin,
            started,
        }
    }

    /// Runs it to its end.
    pub fn finish(&self) -> Outcome {
        self.spawn().finish()
    }
}

/// A program that runs; killed with everything below it when dropped.
pub struct Proc {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    out: Stream,
    err: Stream,
    started: Instant,
    deadline: Instant,
    status: Option<ExitStatus>,
    census: Census,
}

impl Proc {
    /// Process id of the first process.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Sends a signal to the first process.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal)
            .unwrap_or_else(|error| self.fail(&format!("{signal}: {error}")));
    }

    /// Fails the test, showing the output so far.
    pub fn fail(&self, what: &str) -> ! {
        let shown = tail(&self.out.bytes());
        panic!("{}: {what}\n--- stdout (end)\n{shown}\n--- stderr\n{}", self.name, self.err.text());
    }

    /// Writes to a standard input left open.
    pub fn write_stdin(&mut self, bytes: &[u8]) {
        self.stdin
            .as_mut()
            .expect("stdin_open")
            .write_all(bytes)
            .expect("write to the program's stdin");
    }

    /// Ends a standard input left open.
    pub fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// Bytes of standard output so far.
    pub fn output_len(&self) -> usize {
        self.out.bytes().len()
    }

    /// Standard output so far.
    pub fn output(&self) -> String {
        String::from_utf8_lossy(&self.out.bytes()).into_owned()
    }

    /// Waits for `text` on standard output beyond its first `from` bytes.
    pub fn wait_output(&self, from: usize, text: &str) {
        if self.out.wait_for(from, self.deadline, |out| out.contains(text).then_some(())).is_none()
        {
            self.fail(&format!("never printed {text:?}"));
        }
    }

    /// Waits for something that `probe` finds in standard error, or (`None`) fails the test.
    pub fn wait_error<T>(
        &self,
        what: &str,
        limit: Duration,
        probe: impl FnMut(&str) -> Option<T>,
    ) -> T {
        let deadline = self.deadline.min(Instant::now() + patience(limit));
        let found = self.err.wait_for(0, deadline, probe);
        found.unwrap_or_else(|| self.fail(&format!("never told {what} on stderr")))
    }

    /// Standard error so far.
    pub fn errors(&self) -> String {
        self.err.text()
    }

    /// Forgets how much memory it has been seen to hold.
    pub fn watch_anew(&mut self) {
        self.census = Census::watch(self.pid(), Watch::Tree);
    }

    /// The most that it has been seen to hold, with all that it has started.
    pub fn peak(&self) -> Peak {
        self.census.peak()
    }

    /// The status, if it has ended.
    pub fn poll(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.child.try_wait().expect("wait for a child");
        }
        self.status
    }

    /// Waits for the end. A program that misses its deadline is killed and fails the test.
    pub fn finish(mut self) -> Outcome {
        let status = loop {
            if let Some(status) = self.poll() {
                break status;
            }
            if Instant::now() > self.deadline {
                let limit = self.deadline - self.started;
                let tasks = procfs::tasks(self.pid());
                self.fail(&format!("did not end within {limit:?}; killed. It was:\n{tasks}"));
            }
            thread::sleep(POLL);
        };
        let elapsed = self.started.elapsed();
        let drained = self.out.wait_end(DRAIN) && self.err.wait_end(DRAIN);
        Outcome {
            name: self.name.clone(),
            code: status.code(),
            signal: status.signal(),
            stdout: self.out.bytes(),
            stderr: self.err.text(),
            drained,
            elapsed,
            peak: self.census.end(),
            stats: None,
        }
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        if self.poll().is_some() {
            return;
        }
        // The workload before its pager, so that no page is asked of a dead one.
        for pid in procfs::descendants(self.pid()) {
            // It may have ended meanwhile.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        let _ = self.child.kill();
        // A gms that fails may trace it, so that it is not seen to end before that gms does.
        let deadline = Instant::now() + DRAIN;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            thread::sleep(POLL);
        }
    }
}

/// How a program ended and what it left.
pub struct Outcome {
    name: String,
    /// Exit status, unless a signal ended it.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// All of its standard output.
    pub stdout: Vec<u8>,
    /// All of its standard error.
    pub stderr: String,
    /// Whether every holder of its output has closed it.
    pub drained: bool,
    /// From start to end.
    pub elapsed: Duration,
    /// Highest resident anonymous memory of the whole workload that was seen.
    pub peak: Peak,
    /// What `--stats` wrote, for gms.
    pub stats: Option<Stats>,
}

impl Outcome {
    /// Fails the test, showing what the program left.
    pub fn fail(&self, what: &str) -> ! {
        let shown = tail(&self.stdout);
        panic!(
            "{}: {what}\n--- exit {:?} signal {:?} after {:?}\n--- stdout (end)\n{shown}\n--- stderr\n{}",
            self.name, self.code, self.signal, self.elapsed, self.stderr
        );
    }

    /// Fails the test unless it ended with this status.
    pub fn expect_code(self, code: i32) -> Outcome {
        if self.code != Some(code) {
            self.fail(&format!("expected exit status {code}"));
        }
        self
    }

    /// Standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// What `--stats` wrote.
    pub fn stats(&self) -> &Stats {
        self.stats.as_ref().unwrap_or_else(|| self.fail("wrote no statistics"))
    }
}
