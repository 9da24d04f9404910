//! Sizes of memory.

/// Mebibytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mib(
    /// How many.
    pub u64,
);

impl Mib {
    /// In bytes.
    pub fn bytes(self) -> u64 {
        self.0 << 20
    }

    /// So many percent of it, whole.
    pub fn percent(self, percent: u64) -> Mib {
        Mib(self.0 * percent / 100)
    }
}
