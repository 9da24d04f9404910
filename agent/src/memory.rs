//! How much memory this machine has.

use gms_policy::Bytes;
use std::io;

/// What the kernel says of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// All of it.
    pub total: Bytes,
    /// What can be used without swapping.
    pub available: Bytes,
}

impl Memory {
    /// Reads `/proc/meminfo`.
    pub fn read() -> io::Result<Self> {
        Self::parse(&std::fs::read_to_string("/proc/meminfo")?).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "/proc/meminfo is not understood")
        })
    }

    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
            kib.checked_mul(1024).map(Bytes)
        };
        Some(Self { total: field("MemTotal:")?, available: field("MemAvailable:")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read() {
        let text = "MemTotal:       100 kB\nMemFree:         1 kB\nMemAvailable:    50 kB\n";
        let expected = Memory { total: Bytes(102_400), available: Bytes(51_200) };
        assert_eq!(Memory::parse(text), Some(expected));
        assert_eq!(Memory::parse("MemTotal: 100 kB\n"), None);
        assert!(Memory::read().is_ok_and(|memory| memory.available <= memory.total));
    }
}
