//! A swap device for the time of a measurement.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use gms_tests::mix;
use nix::fcntl::{FallocateFlags, PosixFadviseAdvice, fallocate, posix_fadvise};

use crate::error::{BenchError, Trying};
use crate::machine::chosen;
use crate::region::PAGE;
use crate::undo::{Step, Undo, swap_on};

/// Pages which the kernel reads at most at a swap fault, as a power of two.
const PAGE_CLUSTER: &str = "/proc/sys/vm/page-cluster";
/// Bytes written at once.
const PART: usize = 1 << 20;
/// Where zram devices are made and unmade.
const ZRAM_CONTROL: &str = "/sys/class/zram-control";

/// What lies behind the swap.
#[derive(Clone, Debug)]
pub(crate) enum Backing {
    /// A file in this directory, which must be on a disk.
    Disk(PathBuf),
    /// Memory of this machine, compressed.
    Zram,
    /// This block device, whose content is lost.
    Device(PathBuf),
}

/// What the kernel reads beside the page of a swap fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Readahead {
    /// Nothing.
    None,
    /// What Linux does unless told otherwise: up to eight pages.
    Default,
}

impl Readahead {
    fn page_cluster(self) -> &'static str {
        match self {
            Readahead::None => "0",
            Readahead::Default => "3",
        }
    }
}

/// Swap which is on. Goes when it is dropped, and when this process is killed.
pub(crate) struct Swap {
    /// Directory of the zram device in sysfs, if it is one.
    zram: Option<PathBuf>,
    _undo: Undo,
}

impl Swap {
    /// Of `mib` MiB; a device is taken whole. Refuses where swap is on already: it would be used, too.
    ///
    /// A swap which is more than half full forgets what it holds of pages that have come back, and must write them again: give it
    /// more than twice of what it will hold.
    pub(crate) fn on(
        backing: &Backing,
        readahead: Readahead,
        mib: u32,
    ) -> Result<Swap, BenchError> {
        let swaps = fs::read_to_string("/proc/swaps").trying("no /proc/swaps")?;
        if let Some(line) = swaps.lines().nth(1) {
            let path = line.split_whitespace().next().unwrap_or_default();
            let text = format!("swap is on already ({path}): switch it off (swapoff -a) meanwhile");
            return Err(BenchError::Needs(text));
        }
        let mut undo = Undo::new()?;
        let cluster = fs::read_to_string(PAGE_CLUSTER).trying(PAGE_CLUSTER)?;
        undo.add(&Step::Write(PAGE_CLUSTER.into(), cluster))?;
        fs::write(PAGE_CLUSTER, readahead.page_cluster()).trying(PAGE_CLUSTER)?;
        let (path, zram) = match backing {
            Backing::Disk(dir) => (file(dir, mib, &mut undo)?, None),
            Backing::Zram => {
                let name = zram(mib, &mut undo)?;
                (Path::new("/dev").join(&name), Some(Path::new("/sys/block").join(&name)))
            }
            Backing::Device(path) => (path.clone(), None),
        };
        make(&path)?;
        undo.add(&Step::SwapOff(path.clone()))?;
        swap_on(&path).trying(&format!("cannot swap on {}", path.display()))?;
        Ok(Swap { zram, _undo: undo })
    }

    /// How zram compresses; `None` if this is no zram.
    pub(crate) fn algorithm(&self) -> Result<Option<String>, BenchError> {
        let Some(zram) = &self.zram else { return Ok(None) };
        let choices = fs::read_to_string(zram.join("comp_algorithm")).trying("comp_algorithm")?;
        Ok(Some(chosen(&choices)))
    }

    /// From now on [`Swap::pool_mib`] says what is the most; nothing if this is no zram.
    pub(crate) fn forget_pool(&self) -> Result<(), BenchError> {
        let Some(zram) = &self.zram else { return Ok(()) };
        fs::write(zram.join("mem_used_max"), "0").trying("mem_used_max")
    }

    /// The most memory that zram's pool took, in MiB; `None` if this is no zram.
    pub(crate) fn pool_mib(&self) -> Result<Option<f64>, BenchError> {
        let Some(zram) = &self.zram else { return Ok(None) };
        let text = fs::read_to_string(zram.join("mm_stat")).trying("mm_stat")?;
        let bytes = pool_max_bytes(&text);
        let bytes = bytes.ok_or_else(|| BenchError::Invalid(format!("mm_stat: {text}")))?;
        Ok(Some(bytes / f64::from(1 << 20)))
    }
}

/// From zram's mm_stat, of which it is the fifth field (the kernel's admin-guide/blockdev/zram).
fn pool_max_bytes(mm_stat: &str) -> Option<f64> {
    mm_stat.split_whitespace().nth(4)?.parse().ok()
}

fn file(dir: &Path, mib: u32, undo: &mut Undo) -> Result<PathBuf, BenchError> {
    let path = dir.join(format!("gms-bench-swap-{}", std::process::id()));
    undo.add(&Step::RemoveFile(path.clone()))?;
    let what = format!("cannot make {}", path.display());
    let mut new = File::options();
    let file = new.read(true).write(true).create_new(true).mode(0o600).open(&path).trying(&what)?;
    fallocate(&file, FallocateFlags::empty(), 0, i64::from(mib) << 20).trying(&what)?;
    // As it will be once it has been used: whoever provides the disk may find room for a block when it is written first.
    let mut part = vec![0; PART];
    for at in 0..u64::from(mib) {
        part.chunks_exact_mut(size_of::<u64>()).zip(at << 32..).for_each(|(word, number)| {
            word.copy_from_slice(&mix(number).to_ne_bytes());
        });
        file.write_all_at(&part, at * PART as u64).trying(&what)?;
    }
    file.sync_all().trying(&what)?;
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).trying(&what)?;
    Ok(path)
}

/// The name of a new device.
fn zram(mib: u32, undo: &mut Undo) -> Result<String, BenchError> {
    let control = Path::new(ZRAM_CONTROL);
    let number = fs::read_to_string(control.join("hot_add")).map_err(|error| {
        BenchError::Needs(format!("no zram ({ZRAM_CONTROL}/hot_add: {error}): modprobe zram"))
    })?;
    let number = number.trim();
    undo.add(&Step::Write(control.join("hot_remove"), number.to_owned()))?;
    let size = format!("/sys/block/zram{number}/disksize");
    fs::write(&size, format!("{mib}M")).trying(&size)?;
    Ok(format!("zram{number}"))
}

/// Writes what `mkswap` writes: `union swap_header` of the kernel's include/linux/swap.h.
fn make(path: &Path) -> Result<(), BenchError> {
    let what = path.display().to_string();
    let mut file = File::options().read(true).write(true).open(path).trying(&what)?;
    let bytes = file.seek(SeekFrom::End(0)).trying(&what)?;
    let pages = u32::try_from(bytes / PAGE as u64).unwrap_or(u32::MAX);
    if pages < 10 {
        return Err(BenchError::Invalid(format!("{what} is too small for swap: {bytes} bytes")));
    }
    let mut header = [0; PAGE];
    // Version, and the last page.
    header[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
    header[1028..1032].copy_from_slice(&(pages - 1).to_ne_bytes());
    header[PAGE - 10..].copy_from_slice(b"SWAPSPACE2");
    file.write_all_at(&header, 0).trying(&what)?;
    file.sync_all().trying(&what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_is_the_fifth_field() {
        let text = " 4096 2048 12288 0 1048576 0 0 0 0\n";
        assert_eq!(pool_max_bytes(text), Some(1_048_576.0));
        assert_eq!(pool_max_bytes("4096 2048"), None);
    }
}
