//! Follows the host: looks at its memory, sets the export accordingly, and gives memory back, in a thread of its own, so that it does not wait for the
//! loops. What is decided is in [`ExportLaw`]. The thread sleeps until the next look, or until the kernel says that tasks wait for memory (PSI).

use crate::limits::FRAME_LEN;
use crate::memory::Host;
use crate::shared::Shared;
use crate::spin::{SLICE, prefer_latency};
use crate::stop::Stop;
use gms_policy::limits::HOST_LOOK_MAX;
use gms_policy::{Bytes, ExportLaw, ExportRange, HostView};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Tasks wait for so many of so many us: the shortest window, and the shortest one that needs no privilege.
const STALLS: [(u32, u32); 2] = [(10_000, 500_000), (40_000, 2_000_000)];
/// Pages beyond the export are told of when none has gone for this long.
const TOLD_AFTER: Duration = Duration::from_secs(2);
/// Between two lines of the log about the export.
const LINES_EVERY: Duration = Duration::from_secs(1);

/// The thread. It ends when dropped, and the export stays as it is then.
#[derive(Debug)]
pub(crate) struct Follower {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

impl Follower {
    /// Sets the export to what the host can spare now, and follows it from then on.
    pub(crate) fn spawn(shared: Arc<Shared>, range: ExportRange) -> io::Result<Self> {
        let stop = Arc::new(Stop::new()?);
        let mut follow = Follow::new(Instant::now(), shared, range)?;
        let end = stop.clone();
        let run = move || follow.run(&end);
        let thread = std::thread::Builder::new().name("follower".into()).spawn(run)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.stop.request(Duration::ZERO);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that follows the host panicked");
        }
    }
}

struct Follow {
    host: Host,
    shared: Arc<Shared>,
    law: ExportLaw,
    stalls: Option<File>,
    told: Told,
}

/// What the log has said.
struct Told {
    at: Instant,
    export: u64,
    /// Since when there are pages beyond the export and none of them goes, and how many there are.
    stuck: Option<(Instant, u32)>,
    is_stuck: bool,
    error: bool,
}

impl Follow {
    fn new(now: Instant, shared: Arc<Shared>, range: ExportRange) -> io::Result<Self> {
        let host = Host::find();
        let memory = host.memory()?;
        let law = ExportLaw::new(
            now,
            range,
            Bytes(memory.total_bytes),
            view(&shared, memory.available_bytes, false),
        );
        let stalls = watch(&host.pressure_file())
            .inspect_err(|error| tracing::debug!(%error, "no word of tasks that wait for memory"));
        let export = law.export().0;
        let told = Told { at: now, export, stuck: None, is_stuck: false, error: false };
        let follow = Self { host, shared, law, stalls: stalls.ok(), told };
        follow.set(export);
        let mib = |bytes: u64| bytes >> 20;
        tracing::info!(
            export_mib = mib(export),
            floor_mib = mib(range.floor.0),
            ceiling_mib = mib(range.ceiling.0),
            reserve_mib = mib(follow.law.reserve().0),
            "the export follows the host"
        );
        Ok(follow)
    }

    fn run(&mut self, stop: &Stop) {
        prefer_latency(SLICE);
        let mut stalls = false;
        while stop.requested().is_none() {
            let pause = match self.look(Instant::now(), stalls) {
                Ok(pause) => pause,
                Err(error) => {
                    if !std::mem::replace(&mut self.told.error, true) {
                        tracing::error!(%error, "cannot follow the host: the export stays as it is");
                    }
                    HOST_LOOK_MAX
                }
            };
            stalls = self.wait(stop, pause);
        }
    }

    /// Looks at the host, and does what is to be done; returns when to look again.
    fn look(&mut self, now: Instant, stalls: bool) -> io::Result<Duration> {
        let available = self.host.memory()?.available_bytes;
        let verdict = self.law.handle_look(now, view(&self.shared, available, stalls));
        self.set(verdict.export.0);
        if verdict.pressed {
            self.shared.store.give_back()?;
        }
        self.tell(now, available);
        Ok(verdict.look_again)
    }

    fn set(&self, export: u64) {
        self.shared.set_frames((export / FRAME_LEN as u64).try_into().unwrap_or(u32::MAX));
    }

    /// Waits for the next look. True if tasks wait for memory.
    fn wait(&mut self, stop: &Stop, pause: Duration) -> bool {
        let mut fds = vec![PollFd::new(stop.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.stalls.as_ref().map(|file| PollFd::new(file.as_fd(), PollFlags::POLLPRI)));
        let told = match ppoll(&mut fds, Some(pause.into()), None) {
            Ok(_) | Err(Errno::EINTR) => {
                fds.get(1).and_then(PollFd::revents).unwrap_or(PollFlags::empty())
            }
            Err(_) => PollFlags::POLLERR,
        };
        if told.contains(PollFlags::POLLERR) {
            // The cgroup is gone, say.
            self.stalls = None;
        }
        told.contains(PollFlags::POLLPRI)
    }

    /// Says how much is exported, when that is something else than before, and that pages do not go.
    fn tell(&mut self, now: Instant, available: u64) {
        let (export, told) = (self.law.export().0, &mut self.told);
        let over = self.shared.store.frames_over();
        let mib = |frames: u32| (frames as usize * FRAME_LEN) >> 20;
        let much = self.law.reserve().0.max(told.export / 8);
        if export.abs_diff(told.export) >= much && now >= told.at + LINES_EVERY {
            (told.at, told.export) = (now, export);
            let used_mib = mib(self.shared.store.frames_used());
            tracing::info!(
                export_mib = export >> 20,
                used_mib,
                available_mib = available >> 20,
                "the export follows the host"
            );
        }
        match told.stuck {
            _ if over == 0 => {
                told.stuck = None;
                if std::mem::take(&mut told.is_stuck) {
                    tracing::info!("no page is beyond the export any more");
                }
            }
            Some((since, before)) if over >= before => {
                if now >= since + TOLD_AFTER && !std::mem::replace(&mut told.is_stuck, true) {
                    tracing::warn!(
                        over_mib = mib(over),
                        "the host needs memory in which pages are that nobody takes away: they stay until another agent has room, or their workloads end"
                    );
                }
            }
            _ => told.stuck = Some((now, over)),
        }
    }
}

fn view(shared: &Shared, available: u64, stalls: bool) -> HostView {
    let occupied = u64::from(shared.store.frames_backed()) * FRAME_LEN as u64;
    HostView { available: Bytes(available), occupied: Bytes(occupied), stalls }
}

/// A file that polls as urgent when tasks have waited for memory: a trigger of PSI.
pub(crate) fn watch(path: &Path) -> io::Result<File> {
    let mut failure = io::ErrorKind::NotFound.into();
    for (stall_us, window_us) in STALLS {
        let open = || {
            let mut file = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_NONBLOCK)
                .open(path)?;
            file.write_all(format!("some {stall_us} {window_us}\0").as_bytes())?;
            Ok(file)
        };
        match open() {
            Ok(file) => return Ok(file),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::Slab;
    use crate::store::Store;

    fn follow(frames: u64) -> Follow {
        let now = Instant::now();
        let slab = Slab::new(Bytes(frames << 12), false).expect("memory");
        let shared = Arc::new(Shared::new(now, Store::new(slab, 2).expect("memory")));
        let range = ExportRange { floor: Bytes(0), ceiling: Bytes(frames << 12) };
        Follow::new(now, shared, range).expect("a host")
    }

    #[test]
    fn the_export_is_set_before_anything_is_taken_and_memory_given_back_when_it_is_short() {
        let follow = follow(4096);
        let store = &follow.shared.store;
        assert_eq!(store.frames(), (follow.law.export().0 / FRAME_LEN as u64) as u32);
        assert_eq!(follow.shared.gauges.frames_total.value(), u64::from(store.frames()));
        follow.set(10 * FRAME_LEN as u64 + 1);
        let taken: Vec<_> = (0..20).map_while(|_| store.reserve(1)).collect();
        assert_eq!((taken.len(), store.frames_free(), store.frames_backed()), (10, 0, 10));
        follow.set(4 * FRAME_LEN as u64);
        assert_eq!((store.frames_over(), store.frames_used()), (6, 10));
        taken.into_iter().for_each(|frame| store.release(frame));
        assert_eq!((store.frames_over(), store.frames_free(), store.frames_backed()), (0, 4, 10));
        store.give_back().expect("advice");
        assert_eq!(store.frames_backed(), 0);
    }

    #[test]
    fn the_kernel_is_asked_to_tell_of_stalls() {
        let path = Path::new("/proc/pressure/memory");
        if let Err(error) = watch(path) {
            assert!(!path.exists() || !nix::unistd::geteuid().is_root(), "{error}");
            eprintln!("SKIPPED: no pressure is told here: {error}");
        }
        assert!(watch(Path::new("/no/such/file")).is_err());
    }
}
