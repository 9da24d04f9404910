//! Memory of this machine, before it is measured.

use std::fs;

use crate::error::{BenchError, Trying};
use crate::region::{Region, pages};

/// What a run needs besides what its subjects name: programs, buffers, page tables.
const SLACK_MIB: u64 = 64;

/// Touches `mib` MiB and frees them, but at most half of what is available. A virtual machine may have given free pages back to its
/// host (free page reporting); then the first touch of each costs a fault there (11 us), which would be counted as gms's.
pub(crate) fn touch(mib: u32) -> Result<(), BenchError> {
    let file = "/proc/meminfo";
    let info = fs::read_to_string(file).trying(file)?;
    let available = available_kib(&info)
        .ok_or_else(|| BenchError::Invalid(format!("{file} has no MemAvailable")))?;
    let mib = (u64::from(mib) + SLACK_MIB).min(available / 2 / 1024).max(1);
    let region = Region::new(pages(mib as usize))?;
    (0..region.pages()).for_each(|page| region.store(page, 0, 1));
    Ok(())
}

fn available_kib(info: &str) -> Option<u64> {
    let rest = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    rest.trim().strip_suffix(" kB")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_available_is_found() {
        let info = "MemTotal:       24683876 kB\nMemAvailable:   23614512 kB\n";
        assert_eq!(available_kib(info), Some(23_614_512));
        assert_eq!(available_kib("MemTotal: 1 kB\n"), None);
    }
}
