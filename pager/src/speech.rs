//! What gms says on standard error. It may be closed, full or without a reader, and nobody's paging must wait for that: while a workload is
//! paged, a thread writes what the others say.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use gms_transport::text::plain;

/// What may wait to be written.
const WAITING_MAX: usize = 64;
/// For the reader to take what may not be left out.
const PATIENCE: Duration = Duration::from_secs(2);

enum Item {
    Text(String),
    /// All before it has been written.
    End(Sender<()>),
}

static LEFT_OUT: AtomicU64 = AtomicU64::new(0);

/// Of the process in which the thread runs, which its forked children have not.
static QUEUE: OnceLock<Option<(u32, Sender<Item>)>> = OnceLock::new();

/// From now on a thread writes what this process says.
pub fn begin() {
    QUEUE.get_or_init(|| {
        let (sender, items) = bounded(WAITING_MAX);
        let writer = std::thread::Builder::new().name("speech".into());
        // Without the thread everybody writes, as before.
        writer.spawn(move || write_all(&items)).ok()?;
        Some((std::process::id(), sender))
    });
}

fn queue() -> Option<&'static Sender<Item>> {
    let (pid, sender) = QUEUE.get()?.as_ref()?;
    (*pid == std::process::id()).then_some(sender)
}

fn write_all(items: &Receiver<Item>) {
    for item in items {
        match item {
            Item::Text(text) => write(&text),
            Item::End(written) => drop(written.send(())),
        }
        let left_out = LEFT_OUT.swap(0, Ordering::Relaxed);
        if left_out > 0 {
            write(&lines(format_args!("{left_out} messages are left out here: nobody read them")));
        }
    }
}

/// `eprintln` would panic where this fails, which in a pager ends the workload; and it would hold a lock that a panic needs.
fn write(text: &str) {
    let mut left = text.as_bytes();
    while !left.is_empty() {
        match nix::unistd::write(std::io::stderr(), left) {
            Ok(written) => left = &left[written..],
            Err(nix::errno::Errno::EINTR) => {}
            Err(_) => break,
        }
    }
}

/// Names and reasons in a text may be another user's, or an agent's: they do not control the terminal.
fn lines(text: impl std::fmt::Display) -> String {
    let line = |line: &str| format!("gms: {}\n", line.chars().map(plain).collect::<String>());
    text.to_string().lines().map(line).collect()
}

/// Says something to the user. Every line begins with `gms: `.
pub fn say(text: impl std::fmt::Display) {
    say_within(PATIENCE, &lines(text));
}

/// The same for a thread that must not wait: left out if too much waits to be read.
pub fn note(text: impl std::fmt::Display) {
    say_within(Duration::ZERO, &lines(text));
}

#[cfg(test)]
thread_local! {
    /// What this thread has said.
    pub static SAID: std::cell::RefCell<String> = const { std::cell::RefCell::new(String::new()) };
}

fn say_within(patience: Duration, text: &str) {
    #[cfg(test)]
    SAID.with_borrow_mut(|said| said.push_str(text));
    let Some(queue) = queue() else { return write(text) };
    if queue.send_timeout(Item::Text(text.into()), patience).is_err() {
        LEFT_OUT.fetch_add(1, Ordering::Relaxed);
    }
}

/// Waits until all that was said is written, if somebody reads it. To be called before the process ends.
pub fn end() {
    let (written, all) = bounded(1);
    if queue().is_some_and(|queue| queue.send_timeout(Item::End(written), PATIENCE).is_ok()) {
        // Too late, it is lost.
        let _ = all.recv_timeout(PATIENCE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_does_not_control_the_terminal() {
        assert_eq!(lines("a\x1b]0;x\x07\u{9b}J\nb\r\u{202e}c"), "gms: a?]0;x??J\ngms: b??c\n");
    }
}
