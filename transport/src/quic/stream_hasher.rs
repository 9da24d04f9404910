//! Where an exchange is found by the number of its stream.

use std::hash::Hasher;

use super::limits::EXCHANGES_MAX;

/// Stream numbers are small, dense and bounded by [`EXCHANGES_MAX`]: one multiplication spreads them.
#[derive(Default)]
pub(super) struct StreamHasher(u64);

const _: () = assert!(EXCHANGES_MAX <= 1 << 16);

impl Hasher for StreamHasher {
    fn write_u64(&mut self, number: u64) {
        self.0 = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(self.0 ^ u64::from(*byte)));
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
