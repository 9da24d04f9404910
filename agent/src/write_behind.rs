//! Writes a file's frames to the disk behind their use, in a thread of its own, and has them leave memory then: what lies there is seldom read.

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::sys::mman::{MmapAdvise, madvise};
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Between two rounds: what was written since waits in memory. The kernel's own bounds (`vm.dirty_ratio`) hold in between.
const ROUND: Duration = Duration::from_millis(500);

/// The thread. It ends when dropped, before the mapping may go.
#[derive(Debug)]
pub(crate) struct WriteBehind {
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl WriteBehind {
    /// Starts the thread for the mapping of `file`: its address and length. It calls `failed` when the disk fails, and ends.
    ///
    /// # Safety
    /// The mapping must stay until this is dropped.
    pub(crate) unsafe fn spawn(
        file: File,
        (base, len): (*mut u8, usize),
        failed: impl FnOnce(io::Error) + Send + 'static,
    ) -> io::Result<Self> {
        let (stop, stopped) = sync_channel(0);
        let base = base as usize;
        let builder = std::thread::Builder::new().name("write-behind".into());
        let thread = builder.spawn(move || {
            if let Err(error) = write(&file, (base, len), &stopped) {
                failed(error);
            }
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for WriteBehind {
    fn drop(&mut self) {
        self.stop = None;
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that writes behind panicked");
        }
    }
}

fn write(file: &File, (base, len): (usize, usize), stopped: &Receiver<()>) -> io::Result<()> {
    let base = NonNull::new(base as *mut c_void).ok_or(io::ErrorKind::InvalidInput)?;
    while stopped.recv_timeout(ROUND) == Err(RecvTimeoutError::Timeout) {
        // It tells, once, of each page that the disk did not take, which is as good as lost.
        file.sync_data()?;
        // SAFETY: the range is that of the mapping, which outlives this thread (the caller of `spawn` promised it, and `drop` joins). It is shared: its
        // pages stay as they are in the file, and are mapped again when they are touched, so the loop's references stay true.
        unsafe { madvise(base, len, MmapAdvise::MADV_DONTNEED)? };
        // Those that are mapped, or were written since, stay.
        posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
    }
    Ok(())
}
