//! How pages travel: as they are, or sealed.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use gms_policy::ids::ContentId;

use super::seal::{SEALED_LEN, Seal};
use super::{Checksum, Wanted};
use crate::message::{PAGE_LEN, PAGES_MAX};

/// Wraps pages for agents, and unwraps and checks what comes back. Its buffers are kept, so that no page takes memory.
pub(super) struct Envelope {
    checksum: Checksum,
    seal: Option<Arc<Seal>>,
    /// Sealed pages of the put at hand.
    sealed: Vec<u8>,
    /// Where pages are opened. Its memory is used again when whoever was given them has let go.
    opened: BytesMut,
}

impl Envelope {
    /// Of pages that travel as they are.
    pub(super) fn plain(checksum: Checksum) -> Envelope {
        Envelope { checksum, seal: None, sealed: Vec::new(), opened: BytesMut::new() }
    }

    /// Of pages that travel sealed.
    pub(super) fn sealed(self, seal: Arc<Seal>) -> Envelope {
        Envelope { seal: Some(seal), ..self }
    }

    pub(super) fn is_sealed(&self) -> bool {
        self.seal.is_some()
    }

    /// Bytes of a page as it travels.
    pub(super) fn page_len(&self) -> usize {
        if self.is_sealed() { SEALED_LEN } else { PAGE_LEN }
    }

    /// Pages of [`PAGE_LEN`] bytes as they travel, in slices.
    pub(super) fn wrap<'a>(&'a mut self, ids: &[ContentId], pages: Vec<&'a [u8]>) -> Vec<&'a [u8]> {
        let Some(seal) = &self.seal else { return pages };
        let length = pages.len() * SEALED_LEN;
        if self.sealed.len() < length {
            self.sealed.resize(length, 0);
        }
        let sealed = &mut self.sealed[..length];
        for ((&id, page), out) in ids.iter().zip(pages).zip(sealed.chunks_exact_mut(SEALED_LEN)) {
            seal.seal(id, page, out);
        }
        vec![sealed]
    }

    /// `bytes` are pages as they travelled, at most [`PAGES_MAX`], the first of those that are `wanted`. Returns the
    /// first of them, unwrapped, as far as they are right.
    pub(super) fn unwrap(&mut self, wanted: &[Wanted], bytes: Bytes) -> Bytes {
        let Some(seal) = &self.seal else {
            let pages = bytes.chunks_exact(PAGE_LEN).zip(wanted);
            let right = |(page, wanted): &(&[u8], &Wanted)| self.checksum.of(page) == wanted.check;
            let right = pages.take_while(right).count();
            return bytes.slice(..right * PAGE_LEN);
        };
        if self.opened.capacity() == 0 {
            self.opened.reserve(PAGES_MAX * PAGE_LEN);
        }
        self.opened.reserve(bytes.len() / SEALED_LEN * PAGE_LEN);
        for (sealed, wanted) in bytes.chunks_exact(SEALED_LEN).zip(wanted) {
            let from = self.opened.len();
            self.opened.resize(from + PAGE_LEN, 0);
            let page = &mut self.opened[from..];
            // The seal says that these are the bytes which were put; the checksum, that they were the page's then.
            if seal.open(wanted.id, sealed, page).is_err() || self.checksum.of(page) != wanted.check
            {
                self.opened.truncate(from);
                break;
            }
        }
        self.opened.split().freeze()
    }
}
