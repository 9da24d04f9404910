//! The program `gms-agent`, run as a user does.

use super::LIMIT;
use gms_transport::keys;
use std::io::BufRead;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Instant;

/// A directory with keys, removed at the end.
pub struct Keys(pub PathBuf);

impl Keys {
    pub fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("gms-agent-{name}-{}", std::process::id()));
        keys::init(&dir).expect("keys");
        Self(dir)
    }

    pub fn text(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        // What is left is the system's to clean.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn start(args: &[&str], stderr: impl Into<Stdio>) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gms-agent"));
    command
        .args(args)
        .env("NO_COLOR", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(stderr);
    command.spawn().expect("gms-agent")
}

/// Its exit status, which is soon.
pub fn wait(mut child: Child) -> ExitStatus {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(status) = child.try_wait().expect("wait") {
            return status;
        }
        if Instant::now() > end {
            child.kill().expect("kill");
            panic!("gms-agent does not end");
        }
        std::thread::yield_now();
    }
}

/// The address after `key` in the line which says that it listens.
pub fn address(log: &mut impl BufRead, keys: &[&str]) -> Vec<SocketAddr> {
    let mut line = String::new();
    while !line.contains("listening") {
        line.clear();
        assert_ne!(log.read_line(&mut line).expect("log"), 0, "it ended");
    }
    let word = |key: &str| {
        line.split_whitespace().find_map(|word| word.strip_prefix(key).map(str::to_owned))
    };
    keys.iter().map(|key| word(key).unwrap_or_default().parse().expect("an address")).collect()
}

/// Reads the log up to the first line which has all of `words`.
pub fn line_with(log: &mut impl BufRead, words: &[&str]) -> String {
    let mut line = String::new();
    while !words.iter().all(|word| line.contains(word)) {
        line.clear();
        assert_ne!(log.read_line(&mut line).expect("log"), 0, "the log ends without {words:?}");
    }
    line
}
