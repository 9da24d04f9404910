//! The bytes of the write-back slots: one page a slot, in a memfd, so that they survive a pager that dies.

use std::fs::File;

use memmap2::MmapRaw;
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::page_map::PAGE;

/// Page frames which the evict thread fills, and whoever makes pages of parity, and which all threads read.
///
/// Who may touch a frame follows from the phase of its slot in `Tables`: between `begin_evict` and `finish_evict` only the evict thread,
/// which writes it; afterwards, until the slot is free again, everybody, reading. A free slot becomes a leaving one only through
/// the evict thread itself; whoever has the tables locked also fills a free slot at once ([`Frames::fill`]).
pub struct Frames {
    file: File,
    memory: MmapRaw,
    slots: u32,
}

impl Frames {
    /// `slots` frames.
    pub fn new(slots: u32) -> std::io::Result<Frames> {
        let file = File::from(memfd_create("gms-write-back", MFdFlags::MFD_CLOEXEC)?);
        file.set_len(u64::from(slots) * PAGE)?;
        Frames::of(file, slots)
    }

    /// Those in a file.
    pub fn of(file: File, slots: u32) -> std::io::Result<Frames> {
        if file.metadata()?.len() < u64::from(slots) * PAGE {
            return Err(std::io::ErrorKind::InvalidData.into());
        }
        Ok(Frames { memory: MmapRaw::map_raw(&file)?, file, slots })
    }

    /// The memory with all of them.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The frame of a slot whose bytes are there.
    pub fn read(&self, slot: u32) -> &[u8] {
        assert!(slot < self.slots);
        // SAFETY: in bounds (checked above); nobody writes a frame that may be read, see the type's documentation.
        unsafe {
            std::slice::from_raw_parts(
                self.memory.as_ptr().add(slot as usize * PAGE as usize),
                PAGE as usize,
            )
        }
    }

    /// Fills the frame of a slot that has just been taken, with the tables still locked.
    pub fn fill(&self, slot: u32, page: &[u8]) {
        assert_eq!(page.len(), PAGE as usize);
        // SAFETY: in bounds (checked by `leaving` and above); until the tables are unlocked nobody knows of the slot, see the type's documentation.
        unsafe { std::ptr::copy_nonoverlapping(page.as_ptr(), self.leaving(slot), page.len()) };
    }

    /// Start of the frame of a leaving slot, for the evict thread to write [`PAGE`] bytes to.
    pub fn leaving(&self, slot: u32) -> *mut u8 {
        assert!(slot < self.slots);
        // SAFETY: in bounds (checked above).
        unsafe { self.memory.as_mut_ptr().add(slot as usize * PAGE as usize) }
    }
}
