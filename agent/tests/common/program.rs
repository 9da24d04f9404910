//! The program `gms-agent`, run as a user does.

use super::LIMIT;
use gms_transport::keys;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

/// A directory with keys, removed at the end.
pub(crate) struct Keys(pub PathBuf);

impl Keys {
    pub(crate) fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("gms-agent-{name}-{}", std::process::id()));
        keys::init(&dir).expect("keys");
        Self(dir)
    }

    pub(crate) fn text(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        // What is left is the system's to clean.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The program as it runs. Killed when dropped, so that a test that fails leaves none behind.
pub(crate) struct Agent(Child);

impl Agent {
    pub(crate) fn start(args: &[&str], stderr: impl Into<Stdio>) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gms-agent"));
        if !args.contains(&"--drain") {
            // No test waits for the default of a minute.
            command.args(["--drain", "2"]);
        }
        command
            .args(args)
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr);
        Self(command.spawn().expect("gms-agent"))
    }

    /// The end of its standard error that was asked for as a pipe.
    pub(crate) fn stderr(&mut self) -> ChildStderr {
        self.0.stderr.take().expect("piped")
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id() as i32), signal).expect("kill");
    }

    /// Its exit status, if it has ended.
    pub(crate) fn poll(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().expect("wait")
    }

    /// Its exit status, which is soon.
    pub(crate) fn wait(mut self) -> ExitStatus {
        let end = Instant::now() + LIMIT;
        loop {
            if let Some(status) = self.poll() {
                return status;
            }
            assert!(Instant::now() < end, "gms-agent does not end");
            thread::yield_now();
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // It may have ended, and been waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the program logs. Read only when asked, by a thread, so that no wait is without end.
pub(crate) struct Log<R>(Option<BufReader<R>>);

impl<R: Read + Send + 'static> Log<R> {
    pub(crate) fn new(from: R) -> Self {
        Self(Some(BufReader::new(from)))
    }

    /// What has not been read yet.
    pub(crate) fn into_reader(self) -> BufReader<R> {
        self.0.expect("a log that was not waited for in vain")
    }

    /// The address after each key in the line which says that it listens.
    pub(crate) fn address(&mut self, keys: &[&str]) -> Vec<SocketAddr> {
        let line = self.line_with(&["listening"]);
        let word = |key: &str| {
            line.split_whitespace().find_map(|word| word.strip_prefix(key).map(str::to_owned))
        };
        keys.iter().map(|key| word(key).unwrap_or_default().parse().expect("an address")).collect()
    }

    /// Reads up to the first line which has all of `words`.
    pub(crate) fn line_with(&mut self, words: &[&str]) -> String {
        let mut log = self.0.take().expect("a log that was not waited for in vain");
        let wanted: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        let (found, line) = channel();
        thread::spawn(move || {
            let mut line = String::new();
            // An empty line is the end.
            while log.read_line(&mut line).is_ok_and(|length| length > 0)
                && !wanted.iter().all(|word| line.contains(word))
            {
                line.clear();
            }
            // Nobody waits any more if it took too long.
            let _ = found.send((log, line));
        });
        let (log, line) = line
            .recv_timeout(LIMIT)
            .unwrap_or_else(|_| panic!("no line with {words:?} in {LIMIT:?}"));
        assert!(!line.is_empty(), "the log ends without {words:?}");
        self.0 = Some(log);
        line
    }
}
