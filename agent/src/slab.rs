//! The memory of the frames: one memfd, mapped once.

use crate::limits::{FRAME_LEN, FRAMES_MAX, WARM_STEP};
use crate::warmer::Warmer;
use gms_policy::{Bytes, PageCount};
use memmap2::{MmapMut, MmapOptions};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;

/// Bytes of a huge page, when they are used.
const HUGE_LEN: u64 = 2 << 20;

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
/// [`Slab::give_back`].
#[derive(Debug)]
pub struct Slab {
    /// Before `map`, so that it is dropped first.
    warmer: Option<Warmer>,
    file: File,
    map: MmapMut,
    frames: u32,
    huge: bool,
}

impl Slab {
    /// A slab of `export` bytes, cut to whole frames (to whole huge pages of 2 MiB when `huge`, which are
    /// reserved at once).
    pub fn new(export: Bytes, huge: bool) -> Result<Self, SlabError> {
        let unit = if huge { HUGE_LEN } else { FRAME_LEN as u64 };
        let bytes = Bytes(export.0 / unit * unit);
        let PageCount(frames) = bytes.pages();
        if !(1..=FRAMES_MAX).contains(&frames) {
            return Err(SlabError::Size(export));
        }
        let (file, map) = map(bytes, huge).map_err(|error| match huge {
            true => SlabError::Huge { needed: bytes.0 / HUGE_LEN, error },
            false => SlabError::Memory { bytes, error },
        })?;
        Ok(Self { warmer: None, file, map, frames: frames as u32, huge })
    }

    /// From the first use on takes memory from the kernel a little ahead of its use, in a thread. Huge pages need it not.
    pub fn warm_ahead(&mut self) -> io::Result<()> {
        if let (false, Some(base)) = (self.huge, NonNull::new(self.map.as_mut_ptr())) {
            // SAFETY: the mapping is dropped after the warmer: fields are dropped in order.
            self.warmer = Some(unsafe { Warmer::spawn(base, self.frames)? });
        }
        Ok(())
    }

    /// Frames from `next` on will be used next.
    pub fn used_to(&self, next: u32) {
        if let Some(warmer) = self.warmer.as_ref().filter(|_| next.is_multiple_of(WARM_STEP)) {
            warmer.used_to(next);
        }
    }

    /// Frames of the slab.
    pub fn frames(&self) -> u32 {
        self.frames
    }

    /// Content of `frame`.
    pub fn read(&self, frame: u32) -> &[u8] {
        let start = frame as usize * FRAME_LEN;
        &self.map[start..start + FRAME_LEN]
    }

    /// Content of `frame`, to be written.
    pub fn write(&mut self, frame: u32) -> &mut [u8] {
        let start = frame as usize * FRAME_LEN;
        &mut self.map[start..start + FRAME_LEN]
    }

    /// Whether [`Slab::give_back`] does anything: huge pages stay.
    pub fn can_give_back(&self) -> bool {
        !self.huge
    }

    /// Gives the memory of `frames` back to the kernel; they read as zero then.
    pub fn give_back(&mut self, frames: Range<u32>) -> io::Result<()> {
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let offset = |frame: u32| i64::from(frame) * FRAME_LEN as i64;
        let (start, end) = (offset(frames.start), offset(frames.end));
        Ok(fallocate(&self.file, flags, start, end - start)?)
    }
}

fn map(bytes: Bytes, huge: bool) -> io::Result<(File, MmapMut)> {
    let mut flags = MFdFlags::MFD_CLOEXEC;
    if huge {
        flags |= MFdFlags::MFD_HUGETLB | MFdFlags::MFD_HUGE_2MB;
    }
    let file = File::from(memfd_create(c"gms-slab", flags)?);
    file.set_len(bytes.0)?;
    let len = usize::try_from(bytes.0).map_err(io::Error::other)?;
    // SAFETY: the file is a memfd of this process alone (close-on-exec, never passed on), so nobody else
    // changes its length or content while it is mapped; holes are only punched through `&mut self`.
    let map = unsafe { MmapOptions::new().len(len).map_mut(&file)? };
    Ok((file, map))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::WARM_AHEAD;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn frames_are_apart_and_given_back() {
        let mut slab = Slab::new(Bytes(10 * 4096 + 100), false).expect("memory");
        assert_eq!(slab.frames(), 10);
        for frame in 0..10 {
            slab.write(frame).fill(frame as u8 + 1);
        }
        assert!((0..10).all(|frame| slab.read(frame).iter().all(|&b| b == frame as u8 + 1)));
        let blocks = |slab: &Slab| slab.file.metadata().expect("a memfd").blocks() / 8;
        assert_eq!(blocks(&slab), 10);
        slab.give_back(2..7).expect("punch");
        assert_eq!(blocks(&slab), 5);
        assert!(slab.read(4).iter().all(|&b| b == 0) && slab.read(7)[0] == 8);
    }

    #[test]
    fn frames_are_taken_ahead_of_their_use() {
        let mut slab = Slab::new(Bytes(100 << 20), false).expect("memory");
        slab.warm_ahead().expect("a thread");
        slab.used_to(0);
        slab.write(0).fill(7);
        let until = |slab: &Slab, frames| {
            let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
            while slab.file.metadata().expect("a memfd").blocks() / 8 != frames {
                assert!(std::time::Instant::now() < end);
                std::thread::yield_now();
            }
        };
        until(&slab, u64::from(WARM_AHEAD));
        slab.used_to(WARM_STEP);
        until(&slab, u64::from(WARM_AHEAD + WARM_STEP));
        assert!(slab.read(0).iter().all(|&b| b == 7));
    }

    #[test]
    fn impossible_sizes_are_refused() {
        assert!(matches!(Slab::new(Bytes(4095), false), Err(SlabError::Size(_))));
        assert!(matches!(Slab::new(Bytes(u64::MAX), false), Err(SlabError::Size(_))));
    }
}
