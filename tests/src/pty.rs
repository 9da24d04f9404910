//! A terminal with an interactive shell in it, for what only a person at a terminal meets.

use std::fs::File;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::pty::openpty;

use crate::program::{patience, tool};
use crate::stream::Stream;

/// How long the terminal may take to show what is expected.
const LIMIT: Duration = Duration::from_secs(20);

/// An interactive bash on a pseudo-terminal.
pub struct Terminal {
    shell: Child,
    keyboard: File,
    screen: Stream,
    seen: usize,
}

impl Terminal {
    /// Opens it, with a prompt that says `READY`.
    pub fn open() -> Terminal {
        let pty = openpty(None, None).expect("a pseudo-terminal");
        // Not for what other tests start meanwhile.
        for end in [&pty.master, &pty.slave] {
            fcntl(end, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).expect("descriptor of the terminal");
        }
        let side = || pty.slave.try_clone().expect("descriptor of the terminal");
        let mut command = Command::new(tool("bash"));
        command.args(["--norc", "--noprofile", "-i"]).env("PS1", "READY ").env("TERM", "dumb");
        command.stdin(side()).stdout(side()).stderr(side());
        // SAFETY: between fork and exec only async-signal-safe calls are made, for the child itself and on its descriptor 0.
        unsafe {
            command.pre_exec(|| {
                // Ignored where the tests were started in the background; then nothing that the shell starts would heed Ctrl-C.
                for signal in [libc::SIGINT, libc::SIGQUIT] {
                    libc::signal(signal, libc::SIG_DFL);
                }
                nix::unistd::setsid()?;
                match libc::ioctl(0, libc::TIOCSCTTY, 0) {
                    -1 => Err(std::io::Error::last_os_error()),
                    _ => Ok(()),
                }
            });
        }
        let shell = command.spawn().expect("bash");
        let keyboard = File::from(pty.master);
        let screen = Stream::capture(keyboard.try_clone().expect("descriptor of the terminal"));
        Terminal { shell, keyboard, screen, seen: 0 }
    }

    /// Types; `\x03` is Ctrl-C, `\x1a` is Ctrl-Z.
    pub fn type_in(&mut self, keys: &str) {
        self.seen = self.screen.bytes().len();
        self.keyboard.write_all(keys.as_bytes()).expect("the terminal");
    }

    /// Waits until `text` shows up after what was typed last.
    pub fn expect(&self, text: &str) {
        let found = self.screen.wait_for(self.seen, Instant::now() + patience(LIMIT), |screen| {
            screen.contains(text).then_some(())
        });
        assert!(found.is_some(), "the terminal never showed {text:?}:\n{}", self.screen.text());
    }

    /// Process id of the shell.
    pub fn shell(&self) -> i32 {
        self.shell.id() as i32
    }

    /// The process group in the foreground.
    pub fn foreground(&self) -> Option<i32> {
        nix::unistd::tcgetpgrp(&self.keyboard).ok().map(nix::unistd::Pid::as_raw)
    }

    /// All that it has shown.
    pub fn text(&self) -> String {
        self.screen.text()
    }

    /// Whether `text` has shown up after what was typed last.
    pub fn shows(&self, text: &str) -> bool {
        let screen = self.screen.bytes();
        let since = screen.get(self.seen..).unwrap_or_default();
        String::from_utf8_lossy(since).contains(text)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Closing the terminal hangs up whatever still runs in it.
        let _ = self.keyboard.write_all(b"\x03\nexit\n");
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}
