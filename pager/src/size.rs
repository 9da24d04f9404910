//! How much memory this machine has, and sizes as people read them (`62.9 MiB`).

use std::fmt;
use std::fs;
use std::io;

/// What `/proc/meminfo` says, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// `MemTotal`.
    pub total_bytes: u64,
    /// `MemAvailable`.
    pub available_bytes: u64,
    /// `SwapTotal`.
    pub swap_bytes: u64,
}

impl Memory {
    /// Reads this machine's.
    pub fn read() -> io::Result<Memory> {
        Memory::parse(&fs::read_to_string("/proc/meminfo")?)
            .ok_or_else(|| io::Error::other("/proc/meminfo has no MemTotal or MemAvailable"))
    }

    fn parse(text: &str) -> Option<Memory> {
        let field = |name: &str| -> Option<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
        };
        Some(Memory {
            total_bytes: field("MemTotal:")?,
            available_bytes: field("MemAvailable:")?,
            swap_bytes: field("SwapTotal:").unwrap_or(0),
        })
    }
}

/// Shows bytes with three significant digits: `62.9 MiB`.
pub struct Human(
    /// Bytes.
    pub u64,
);

impl fmt::Display for Human {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
        if self.0 < 1024 {
            return f.pad(&format!("{} B", self.0));
        }
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        while value >= 999.5 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        let decimals = usize::from(value < 99.95 && value.fract() >= 0.05 && value.fract() < 0.95);
        f.pad(&format!("{value:.decimals$} {}", UNITS[unit]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_in_kibibytes() {
        let text = "MemTotal:  2000 kB\nMemFree: 1 kB\nMemAvailable:    1000 kB\nSwapTotal: 3 kB\n";
        let memory =
            Memory { total_bytes: 2_048_000, available_bytes: 1_024_000, swap_bytes: 3072 };
        assert_eq!(Memory::parse(text), Some(memory));
        assert_eq!(Memory::parse("MemTotal: 2000 kB\n"), None);
        assert_eq!(Memory::parse("MemTotal: x kB\nMemAvailable: 1 kB\n"), None);
    }

    #[test]
    fn people_read_three_digits() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (64 << 20, "64 MiB"),
            (65_955_430, "62.9 MiB"),
            (1 << 40, "1 TiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(Human(bytes).to_string(), text);
        }
    }
}
