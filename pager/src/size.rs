//! Sizes as people read them (`62.9 MiB`).

use std::fmt;

/// Shows bytes with three significant digits: `62.9 MiB`.
pub(crate) struct Human(
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
