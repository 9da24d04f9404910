//! The program's log: its own lines only, written by a thread of its own, so that a reader who is slow, or has
//! stopped, delays nothing.
//!
//! What libraries log is left out: strangers cause some of it with every packet. Lines for which there is no room
//! are lost and counted. `tracing-appender` is not used because at its end it prints to standard output when the
//! log is full, which is often the same pipe.

use crate::limits::{LOG_FAREWELL, LOG_LINES_MAX};
use crossbeam_channel::{Receiver, Sender, bounded};
use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;
use tracing::Level;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// What begins the names of this project's crates, whose lines are written.
const OWN: &str = "gms_";

/// The log, which is written to its end when this is dropped, if that can be done in [`LOG_FAREWELL`].
#[derive(Debug)]
pub struct Log {
    entries: Sender<Entry>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
}

#[derive(Debug)]
enum Entry {
    Line(Vec<u8>),
    End,
}

/// Where lines are put. Never waits.
#[derive(Debug)]
struct Lines {
    entries: Sender<Entry>,
    lost: Arc<AtomicU64>,
}

impl Log {
    /// Sends lines of at least `level` to standard error from now on. Signals which are to be blocked in all threads
    /// must be so already.
    ///
    /// # Errors
    /// When there can be no further thread.
    pub fn start(level: Level) -> io::Result<Self> {
        let (log, lines) = Self::to(io::stderr())?;
        let own = Targets::new().with_target(OWN, level);
        // Failures to write are not reported: that would be to stderr, and must not end the agent when nobody reads
        // it any more.
        let layer = fmt::layer().with_ansi(colours()).log_internal_errors(false);
        tracing_subscriber::registry().with(own).with(layer.with_writer(Arc::new(lines))).init();
        Ok(log)
    }

    fn to(out: impl Write + Send + 'static) -> io::Result<(Self, Lines)> {
        let (entries, written) = bounded(LOG_LINES_MAX);
        let (ends, ended) = bounded(0);
        let lost = Arc::new(AtomicU64::new(0));
        let counted = lost.clone();
        let write = move || {
            write(out, &written, &counted);
            drop(ends);
        };
        std::thread::Builder::new().name("log".into()).spawn(write)?;
        Ok((Self { entries: entries.clone(), ended }, Lines { entries, lost }))
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let end = Instant::now() + LOG_FAREWELL;
        // If there is no room for so long, nobody reads.
        if self.entries.send_deadline(Entry::End, end).is_ok() {
            let _ = self.ended.recv_deadline(end);
        }
    }
}

impl Write for &Lines {
    /// Takes a line whole.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.entries.try_send(Entry::Line(line.to_vec())).is_err() {
            self.lost.fetch_add(1, Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes lines until the end, and how many were lost whenever all others are written.
fn write(mut out: impl Write, entries: &Receiver<Entry>, lost: &AtomicU64) {
    let mut goes_on = true;
    while goes_on {
        match entries.recv() {
            // Nobody may be left to read it.
            Ok(Entry::Line(line)) => drop(out.write_all(&line)),
            Ok(Entry::End) | Err(_) => goes_on = false,
        }
        if !goes_on || entries.is_empty() {
            let lost = lost.swap(0, Relaxed);
            if lost > 0 {
                let _ =
                    writeln!(out, "gms-agent: {lost} lines of the log were lost: nobody read it");
            }
        }
    }
}

/// Whether the log is in colours: on a terminal that can show them, unless NO_COLOR is set and not empty
/// (no-color.org).
fn colours() -> bool {
    let says_no = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    io::stderr().is_terminal() && !says_no && !is_dumb
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Mutex, mpsc};

    /// A writer that says when it is asked to write, and then waits until it is let.
    struct Gate {
        asked: mpsc::Sender<()>,
        open: mpsc::Receiver<()>,
        text: Arc<Mutex<String>>,
    }

    impl Write for Gate {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            let _ = self.asked.send(());
            let _ = self.open.recv();
            self.text.lock().unwrap().push_str(std::str::from_utf8(line).unwrap());
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_without_room_are_counted_and_nobody_waits() {
        let ((asked, is_asked), (opens, open)) = (mpsc::channel(), mpsc::channel());
        let text = Arc::new(Mutex::new(String::new()));
        let (log, lines) = Log::to(Gate { asked, open, text: text.clone() }).unwrap();
        let say = |line: String| (&lines).write_all(line.as_bytes()).unwrap();
        say("first\n".into());
        is_asked.recv().unwrap();
        (0..LOG_LINES_MAX + 10).for_each(|line| say(format!("{line}\n")));
        drop(opens);
        drop(log);
        let text = text.lock().unwrap();
        let mut written = text.lines();
        assert_eq!(written.next(), Some("first"));
        (0..LOG_LINES_MAX).for_each(|line| assert_eq!(written.next(), Some(&*line.to_string())));
        let rest: String = written.collect();
        assert_eq!(rest, "gms-agent: 10 lines of the log were lost: nobody read it");
    }
}
