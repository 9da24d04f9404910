//! The memory of the frames: one anonymous mapping, in a part for each thread that serves; or a mapping of a file, on a disk.

use crate::limits::{FRAME_LEN, FRAMES_MAX, WARM_STEP};
use crate::numa::Nodes;
use crate::warmer::Warmer;
use crate::write_behind::WriteBehind;
use gms_policy::{Bytes, PageCount};
use memmap2::{Advice, MmapOptions, MmapRaw};
use nix::errno::Errno;
use nix::fcntl::FallocateFlags;
use std::fs::OpenOptions;
use std::io;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

/// log2 of the bytes of a huge page.
const HUGE_SHIFT: u8 = 21;
/// Frames of an extent.
const EXTENT_FRAMES: u32 = (1 << HUGE_SHIFT) / FRAME_LEN as u32;

/// Why there is no slab.
#[derive(Debug, thiserror::Error)]
pub enum SlabError {
    /// No whole frame, or too many.
    #[error("cannot export {} bytes: between one frame of 4 KiB and 4 TiB are possible", .0.0)]
    Size(Bytes),
    /// The huge pages are not there.
    #[error(
        "no {needed} huge pages of 2 MiB are free: raise /proc/sys/vm/nr_hugepages or leave --huge out ({error})"
    )]
    Huge {
        /// Huge pages that the export needs.
        needed: u64,
        /// What the kernel says.
        error: io::Error,
    },
    /// The file is not there.
    #[error("cannot set {} MiB aside in {}: {error}", .bytes.0 >> 20, dir.display())]
    File {
        /// The directory of the file.
        dir: PathBuf,
        /// Its length.
        bytes: Bytes,
        /// What the kernel says.
        error: io::Error,
    },
    /// Anything else.
    #[error("cannot set {} bytes of memory aside for the export: {error}", .bytes.0)]
    Memory {
        /// The export.
        bytes: Bytes,
        /// What the kernel says.
        error: io::Error,
    },
}

/// Frames of 4 KiB. Memory is taken from the kernel when a frame is first written, and given back by
/// [`Slab::give_back`]. Who may use which frame is for the caller to keep apart.
#[derive(Debug)]
pub struct Slab {
    /// One a part, or none. Before `map`, so that they are dropped first.
    warmers: Vec<Warmer>,
    /// Of a file. Before `map`, likewise.
    write_behind: Option<WriteBehind>,
    map: MmapRaw,
    frames: u32,
    huge: bool,
}

impl Slab {
    /// A slab of `export` bytes, cut to whole frames (to whole huge pages of 2 MiB when `huge`, which are
    /// reserved at once).
    pub fn new(export: Bytes, huge: bool) -> Result<Self, SlabError> {
        let unit = if huge { 1 << HUGE_SHIFT } else { FRAME_LEN as u64 };
        let (bytes, frames) = whole(export, unit)?;
        let map = map(bytes, huge).map_err(|error| match huge {
            true => SlabError::Huge { needed: bytes.0 >> HUGE_SHIFT, error },
            false => SlabError::Memory { bytes, error },
        })?;
        Ok(Self { warmers: Vec::new(), write_behind: None, map, frames, huge })
    }

    /// A slab of `bytes` bytes, cut to whole frames, in a file without a name in `dir`, all of whose room is taken at once. `failed` is called, once at
    /// most, when the disk fails to take what was written; where it fails to give it back the kernel sends SIGBUS.
    pub fn in_file(
        dir: &Path,
        bytes: Bytes,
        failed: impl FnOnce(io::Error) + Send + 'static,
    ) -> Result<Self, SlabError> {
        let (bytes, frames) = whole(bytes, FRAME_LEN as u64)?;
        let fail = |error| SlabError::File { dir: dir.to_owned(), bytes, error };
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE);
        let file = options.open(dir).map_err(fail)?;
        let length = i64::try_from(bytes.0).map_err(|error| fail(io::Error::other(error)))?;
        nix::fcntl::fallocate(&file, FallocateFlags::empty(), 0, length)
            .map_err(|error| fail(error.into()))?;
        let map = MmapOptions::new().len(bytes.0 as usize).map_raw(&file).map_err(fail)?;
        [Advice::DontFork, Advice::DontDump, Advice::Random]
            .into_iter()
            .try_for_each(|advice| map.advise(advice))
            .map_err(fail)?;
        let memory = (map.as_mut_ptr(), map.len());
        // SAFETY: the mapping is dropped after it: fields are dropped in order.
        let write_behind = unsafe { WriteBehind::spawn(file, memory, failed) }.map_err(fail)?;
        let write_behind = Some(write_behind);
        Ok(Self { warmers: Vec::new(), write_behind, map, frames, huge: false })
    }

    /// The frames of each of `parts` parts, as equal as can be; fewer parts if there are not so many frames.
    pub fn parts(&self, parts: usize) -> Vec<Range<u32>> {
        let (frames, parts) = (u64::from(self.frames), (parts as u64).min(self.frames.into()));
        let start = |part| (frames * part / parts) as u32;
        (0..parts).map(|part| start(part)..start(part + 1)).collect()
    }

    /// From the first use on takes memory of each part from the kernel a little ahead of its use, in a thread a part, on
    /// the CPUs of that part's node. Huge pages and files need it not.
    pub fn warm_ahead(&mut self, parts: usize, nodes: &Nodes) -> io::Result<()> {
        let needed = self.can_give_back();
        for (number, part) in self.parts(parts).into_iter().enumerate().filter(|_| needed) {
            if let Some(base) = NonNull::new(self.frame(part.start)) {
                // SAFETY: the part lies in the mapping, which is dropped after the warmer: fields are dropped in order.
                self.warmers.push(unsafe {
                    Warmer::spawn(base, part.len() as u32, nodes.of_thread(number))?
                });
            }
        }
        Ok(())
    }

    /// Of part `part` the frames from its `next` on will be used next.
    pub fn used_to(&self, part: usize, next: u32) {
        if let Some(warmer) = self.warmers.get(part).filter(|_| next.is_multiple_of(WARM_STEP)) {
            warmer.used_to(next);
        }
    }

    /// Frames of the slab.
    pub fn frames(&self) -> u32 {
        self.frames
    }

    /// Content of `frame`.
    ///
    /// # Safety
    /// As long as the reference lives nobody writes the frame or gives it back.
    pub unsafe fn read(&self, frame: u32) -> &[u8] {
        // SAFETY: the frame lies in the mapping, all of whose bytes can be read; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.frame(frame), FRAME_LEN) }
    }

    /// Content of `frame`, to be written.
    ///
    /// # Safety
    /// As long as the reference lives nobody else reads or writes the frame, or gives it back.
    #[allow(
        clippy::mut_from_ref,
        reason = "frames are apart, and the caller has this one for itself"
    )]
    pub unsafe fn write(&self, frame: u32) -> &mut [u8] {
        // SAFETY: the frame lies in the mapping, all of whose bytes can be written; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.frame(frame), FRAME_LEN) }
    }

    /// Where a frame begins.
    fn frame(&self, frame: u32) -> *mut u8 {
        assert!(frame < self.frames, "a frame of this slab");
        self.map.as_mut_ptr().wrapping_add(frame as usize * FRAME_LEN)
    }

    /// Whether [`Slab::give_back`] does anything: huge pages and files stay.
    pub fn can_give_back(&self) -> bool {
        !self.huge && self.write_behind.is_none()
    }

    /// Those of `frames` that fill whole extents: 2 MiB of memory that may be one page of the kernel's.
    pub fn extents(&self, frames: &Range<u32>) -> impl Iterator<Item = Range<u32>> + use<> {
        let unit = EXTENT_FRAMES as usize * FRAME_LEN;
        let before =
            (self.map.as_ptr() as usize).next_multiple_of(unit) - self.map.as_ptr() as usize;
        // The kernel maps whole pages.
        let phase = (before / FRAME_LEN) as u32;
        let end = frames.end;
        let first = frames.start.saturating_sub(phase).next_multiple_of(EXTENT_FRAMES) + phase;
        let extents = (first..end).step_by(EXTENT_FRAMES as usize);
        extents.map(|start| start..start + EXTENT_FRAMES).filter(move |extent| extent.end <= end)
    }

    /// Has the kernel never swap a frame out. Takes no memory.
    ///
    /// # Errors
    /// If this process may not lock so much memory.
    pub fn keep_resident(&self) -> io::Result<()> {
        let (start, len) = (self.map.as_mut_ptr().cast(), self.map.len());
        // SAFETY: the range is that of the mapping; no byte of it changes.
        let locked = unsafe { libc::mlock2(start, len, libc::MLOCK_ONFAULT as libc::c_uint) };
        Errno::result(locked).map_err(io::Error::from).map(drop)
    }

    /// Gives the memory of `frames` back to the kernel; they read as zero then.
    ///
    /// # Safety
    /// Nobody holds a reference to one of them.
    pub unsafe fn give_back(&self, frames: Range<u32>) -> io::Result<()> {
        let (start, len) = (frames.start as usize * FRAME_LEN, frames.len() * FRAME_LEN);
        assert!(frames.start <= frames.end && frames.end <= self.frames, "frames of this slab");
        let start = self.map.as_mut_ptr().wrapping_add(start).cast();
        // SAFETY: the range lies in the mapping, the bytes become zeros, and the caller has promised that nobody looks.
        // It may be locked, which MADV_DONTNEED refuses.
        let given = unsafe { libc::madvise(start, len, libc::MADV_DONTNEED_LOCKED) };
        Errno::result(given).map_err(io::Error::from).map(drop)
    }
}

/// The whole units of so many bytes, and the frames of those.
fn whole(export: Bytes, unit: u64) -> Result<(Bytes, u32), SlabError> {
    let bytes = Bytes(export.0 / unit * unit);
    match bytes.pages() {
        PageCount(frames @ 1..=FRAMES_MAX) => Ok((bytes, frames as u32)),
        _ => Err(SlabError::Size(export)),
    }
}

fn map(bytes: Bytes, huge: bool) -> io::Result<MmapRaw> {
    let len = usize::try_from(bytes.0).map_err(io::Error::other)?;
    let mut options = MmapOptions::new();
    match huge {
        true => options.len(len).huge(Some(HUGE_SHIFT)),
        false => options.len(len).no_reserve_swap(),
    };
    let map = options.map_anon()?;
    map.advise(Advice::DontFork)?;
    map.advise(Advice::DontDump)?;
    // Of a large page that it has made of frames by itself the kernel keeps what is given back of it. Without such pages it does not know this advice.
    let _ = map.advise(Advice::NoHugePage);
    Ok(map.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::WARM_AHEAD;

    const HUGE_FRAMES: u32 = (1 << HUGE_SHIFT) / FRAME_LEN as u32;

    fn fill(slab: &Slab, frame: u32, byte: u8) {
        // SAFETY: the tests have their slabs for themselves.
        unsafe { slab.write(frame).fill(byte) }
    }

    fn holds(slab: &Slab, frame: u32, byte: u8) -> bool {
        // SAFETY: likewise.
        unsafe { slab.read(frame).iter().all(|&b| b == byte) }
    }

    /// Frames of which the kernel has given the memory.
    fn resident(slab: &Slab) -> usize {
        let mut pages = vec![0; slab.frames as usize];
        let (start, len) = (slab.map.as_ptr() as *mut _, pages.len() * FRAME_LEN);
        // SAFETY: the range is that of the mapping, and there is a byte for each of its pages.
        assert_eq!(unsafe { libc::mincore(start, len, pages.as_mut_ptr()) }, 0);
        pages.iter().filter(|&&page| page & 1 == 1).count()
    }

    #[test]
    fn frames_are_apart_and_given_back() {
        let slab = Slab::new(Bytes(10 * 4096 + 100), false).expect("memory");
        assert_eq!(slab.frames(), 10);
        (0..10).for_each(|frame| fill(&slab, frame, frame as u8 + 1));
        assert!((0..10).all(|frame| holds(&slab, frame, frame as u8 + 1)));
        assert_eq!(resident(&slab), 10);
        // SAFETY: no reference is held.
        unsafe { slab.give_back(2..7).expect("advice") };
        assert_eq!(resident(&slab), 5);
        assert!(holds(&slab, 4, 0) && holds(&slab, 7, 8));
    }

    /// The value of a field of the mapping in /proc/self/smaps.
    fn field(slab: &Slab, name: &str) -> String {
        let smaps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
        let start = format!("{:x}-", slab.map.as_ptr() as usize);
        let lines = smaps.lines().skip_while(|line| !line.starts_with(&start));
        lines.filter_map(|line| line.strip_prefix(name)).next().expect("a field").trim().into()
    }

    #[test]
    fn what_is_locked_takes_no_memory_and_is_given_back_all_the_same() {
        let slab = Slab::new(Bytes(64 << 20), false).expect("memory");
        if let Err(error) = slab.keep_resident() {
            return eprintln!("SKIPPED: memory cannot be locked: {error}");
        }
        let flags = field(&slab, "VmFlags:");
        assert!(["lo", "dd", "dc"].iter().all(|flag| flags.contains(flag)), "{flags}");
        assert_eq!(resident(&slab), 0);
        (0..10).for_each(|frame| fill(&slab, frame, 1));
        // SAFETY: no reference is held.
        unsafe { slab.give_back(2..7).expect("advice") };
        assert_eq!((resident(&slab), holds(&slab, 2, 0)), (5, true));
    }

    #[test]
    fn extents_are_whole_pages_of_2_mib() {
        let slab = Slab::new(Bytes(16 << 20), false).expect("memory");
        let extents: Vec<_> = slab.extents(&(1..slab.frames())).collect();
        assert!((6..8).contains(&extents.len()), "{extents:?}");
        for extent in &extents {
            assert_eq!((slab.frame(extent.start) as usize) % (1 << HUGE_SHIFT), 0);
            assert!(extent.start >= 1 && extent.end <= slab.frames() && extent.len() == 512);
        }
        assert!(extents.is_sorted_by(|a, b| a.end == b.start));
        assert_eq!(slab.extents(&(0..511)).count(), 0);
    }

    #[test]
    fn frames_are_taken_ahead_of_their_use() {
        let mut slab = Slab::new(Bytes(100 << 20), false).expect("memory");
        slab.warm_ahead(1, &Nodes::default()).expect("a thread");
        slab.used_to(0, 0);
        fill(&slab, 0, 7);
        // Huge pages bring more at once.
        let until = |slab: &Slab, frames: u32| {
            let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
            while resident(slab) < frames as usize {
                assert!(std::time::Instant::now() < end);
                std::thread::yield_now();
            }
            assert!(resident(slab) < (frames + 2 * HUGE_FRAMES) as usize);
        };
        until(&slab, WARM_AHEAD);
        slab.used_to(0, HUGE_FRAMES);
        until(&slab, WARM_AHEAD + HUGE_FRAMES);
        assert!(holds(&slab, 0, 7));
    }

    #[test]
    fn frames_in_a_file_are_written_to_the_disk_and_leave_memory() {
        // Not on a tmpfs, which has no other place for them.
        let dir = Path::new("/var/tmp");
        let slab = Slab::in_file(dir, Bytes(64 << 20), |_| {}).expect("a file");
        (0..slab.frames()).for_each(|frame| fill(&slab, frame, frame as u8));
        let end = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while resident(&slab) > slab.frames() as usize / 2 {
            assert!(std::time::Instant::now() < end, "{} frames stay", resident(&slab));
            std::thread::yield_now();
        }
        assert!((0..slab.frames()).all(|frame| holds(&slab, frame, frame as u8)));
    }

    #[test]
    fn a_disk_without_room_is_told_before_anything_is_written() {
        let shm = Path::new("/dev/shm");
        let error = Slab::in_file(shm, Bytes(4 << 40), |_| {}).expect_err("no such memory");
        assert!(error.to_string().contains("4194304 MiB aside in /dev/shm: No space"), "{error}");
        let error = Slab::in_file(Path::new("/nowhere"), Bytes(1 << 20), |_| {});
        assert!(error.is_err_and(|error| error.to_string().contains("/nowhere")));
    }

    #[test]
    fn parts_are_all_of_it() {
        let slab = Slab::new(Bytes(10 << 12), false).expect("memory");
        assert_eq!(slab.parts(4), [0..2, 2..5, 5..7, 7..10]);
        assert_eq!((slab.parts(1)[0].clone(), slab.parts(16).len()), (0..10, 10));
    }

    #[test]
    fn impossible_sizes_are_refused() {
        assert!(matches!(Slab::new(Bytes(4095), false), Err(SlabError::Size(_))));
        assert!(matches!(Slab::new(Bytes(u64::MAX), false), Err(SlabError::Size(_))));
    }
}
