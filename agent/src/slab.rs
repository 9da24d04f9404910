//! The memory of the frames: one anonymous mapping.

use crate::limits::{FRAME_LEN, FRAMES_MAX, WARM_STEP};
use crate::warmer::Warmer;
use gms_policy::{Bytes, PageCount};
use memmap2::{Advice, MmapMut, MmapOptions, UncheckedAdvice};
use std::io;
use std::ops::Range;
use std::ptr::NonNull;

/// log2 of the bytes of a huge page.
const HUGE_SHIFT: u8 = 21;

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
    map: MmapMut,
    frames: u32,
    huge: bool,
}

impl Slab {
    /// A slab of `export` bytes, cut to whole frames (to whole huge pages of 2 MiB when `huge`, which are
    /// reserved at once).
    pub fn new(export: Bytes, huge: bool) -> Result<Self, SlabError> {
        let unit = if huge { 1 << HUGE_SHIFT } else { FRAME_LEN as u64 };
        let bytes = Bytes(export.0 / unit * unit);
        let PageCount(frames) = bytes.pages();
        if !(1..=FRAMES_MAX).contains(&frames) {
            return Err(SlabError::Size(export));
        }
        let map = map(bytes, huge).map_err(|error| match huge {
            true => SlabError::Huge { needed: bytes.0 >> HUGE_SHIFT, error },
            false => SlabError::Memory { bytes, error },
        })?;
        Ok(Self { warmer: None, map, frames: frames as u32, huge })
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
        let (start, len) = (frames.start as usize * FRAME_LEN, frames.len() * FRAME_LEN);
        // SAFETY: the bytes become zeros, through `&mut self`: nobody holds a reference to them.
        unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, len) }
    }
}

fn map(bytes: Bytes, huge: bool) -> io::Result<MmapMut> {
    let len = usize::try_from(bytes.0).map_err(io::Error::other)?;
    let mut options = MmapOptions::new();
    match huge {
        true => options.len(len).huge(Some(HUGE_SHIFT)),
        false => options.len(len).no_reserve_swap(),
    };
    let map = options.map_anon()?;
    map.advise(Advice::DontFork)?;
    map.advise(Advice::DontDump)?;
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::WARM_AHEAD;

    const HUGE_FRAMES: u32 = (1 << HUGE_SHIFT) / FRAME_LEN as u32;

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
        let mut slab = Slab::new(Bytes(10 * 4096 + 100), false).expect("memory");
        assert_eq!(slab.frames(), 10);
        for frame in 0..10 {
            slab.write(frame).fill(frame as u8 + 1);
        }
        assert!((0..10).all(|frame| slab.read(frame).iter().all(|&b| b == frame as u8 + 1)));
        assert_eq!(resident(&slab), 10);
        slab.give_back(2..7).expect("advice");
        assert_eq!(resident(&slab), 5);
        assert!(slab.read(4).iter().all(|&b| b == 0) && slab.read(7)[0] == 8);
    }

    #[test]
    fn frames_are_taken_ahead_of_their_use() {
        let mut slab = Slab::new(Bytes(100 << 20), false).expect("memory");
        slab.warm_ahead().expect("a thread");
        slab.used_to(0);
        slab.write(0).fill(7);
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
        slab.used_to(HUGE_FRAMES);
        until(&slab, WARM_AHEAD + HUGE_FRAMES);
        assert!(slab.read(0).iter().all(|&b| b == 7));
    }

    #[test]
    fn impossible_sizes_are_refused() {
        assert!(matches!(Slab::new(Bytes(4095), false), Err(SlabError::Size(_))));
        assert!(matches!(Slab::new(Bytes(u64::MAX), false), Err(SlabError::Size(_))));
    }
}
