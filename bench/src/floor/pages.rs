//! Pages that the ends of a floor send.

use gms_transport::message::{PAGE_LEN, PAGES_MAX};

/// Bytes of the pages of one exchange.
pub(super) const PAGES_LEN: usize = PAGES_MAX * PAGE_LEN;
/// More memory than caches hold, as gms's pages come from memory too: a multiple of the pages of an exchange.
const SOURCE_LEN: usize = 64 << 20;
/// Every byte of the pages which are sent.
pub(super) const PAGE_BYTE: u8 = 7;

/// Pages to send.
pub(super) struct Pages(Vec<u8>);

impl Pages {
    /// Fills them.
    pub(super) fn new() -> Pages {
        Pages(vec![PAGE_BYTE; SOURCE_LEN])
    }

    /// `count` pages for exchange `number`: each time other ones.
    pub(super) fn of(&self, number: u64, count: usize) -> &[u8] {
        let at = number as usize % (SOURCE_LEN / PAGES_LEN) * PAGES_LEN;
        &self.0[at..at + count * PAGE_LEN]
    }
}
