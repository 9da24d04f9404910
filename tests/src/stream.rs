//! Output of a running program, captured by a thread so that the program never blocks on a full pipe.

use std::io::Read;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

/// Most bytes kept of one stream; the rest is read and dropped.
const CAPTURE_BYTES_MAX: usize = 64 << 20;

#[derive(Default)]
struct Captured {
    bytes: Vec<u8>,
    ended: bool,
}

/// One captured stream.
#[derive(Clone, Default)]
pub(crate) struct Stream {
    shared: Arc<(Mutex<Captured>, Condvar)>,
}

impl Stream {
    /// Starts to read `from`.
    pub(crate) fn capture(mut from: impl Read + Send + 'static) -> Stream {
        let stream = Stream::default();
        let writer = stream.clone();
        thread::spawn(move || {
            let mut buffer = vec![0; 64 << 10];
            loop {
                let count = from.read(&mut buffer).unwrap_or(0);
                let mut captured = writer.lock();
                let room = CAPTURE_BYTES_MAX - captured.bytes.len();
                captured.bytes.extend_from_slice(&buffer[..count.min(room)]);
                captured.ended = count == 0;
                writer.shared.1.notify_all();
                if count == 0 {
                    return;
                }
            }
        });
        stream
    }

    fn lock(&self) -> MutexGuard<'_, Captured> {
        self.shared.0.lock().expect("no thread panics while it holds this lock")
    }

    /// What came so far.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.lock().bytes.clone()
    }

    /// What came so far, for people.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.lock().bytes).into_owned()
    }

    /// Waits for output beyond its first `from` bytes which `probe` accepts; `None` at the deadline or at the end.
    pub(crate) fn wait_for<T>(
        &self,
        from: usize,
        deadline: Instant,
        mut probe: impl FnMut(&str) -> Option<T>,
    ) -> Option<T> {
        let mut captured = self.lock();
        loop {
            let start = from.min(captured.bytes.len());
            if let Some(found) = probe(&String::from_utf8_lossy(&captured.bytes[start..])) {
                return Some(found);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if captured.ended || left.is_zero() {
                return None;
            }
            captured = self.shared.1.wait_timeout(captured, left).expect("as in lock").0;
        }
    }

    /// Waits until every writer has closed the stream. False if that takes longer than `limit`.
    pub(crate) fn wait_end(&self, limit: Duration) -> bool {
        self.wait_for(usize::MAX, Instant::now() + limit, |_| None::<()>);
        self.lock().ended
    }
}
