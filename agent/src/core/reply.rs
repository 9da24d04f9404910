//! What is answered. The pages are not copied: they lie in their frames, pinned, until the requester has them.

use crate::shared::Shared;
use crate::store::Found;
use bytes::Bytes;
use gms_transport::ExchangeId;
use gms_transport::message::Control;
use std::sync::Arc;

/// A reply, complete but for its service time.
#[derive(Debug)]
pub struct Reply<'a> {
    /// What it answers.
    pub exchange: ExchangeId,
    /// The message; `service_ns` is for the driver, which has a clock, to set.
    pub control: Control,
    pub(super) pages: Pages<'a>,
}

impl Reply<'_> {
    /// Pages that it carries.
    pub fn pages(&self) -> usize {
        self.pages.found.len()
    }

    /// The parts of the payload, in order. The pages stay as they are until the last of it is gone.
    pub fn into_payload(mut self) -> Vec<Bytes> {
        let Pages { shared, found, head } = &mut self.pages;
        let mut tails = Vec::new();
        found.iter().for_each(|page| tails.extend_from_slice(shared.store.read(page)[1]));
        let (mut tails, mut parts) = (Bytes::from(tails), Vec::with_capacity(1 + 2 * found.len()));
        parts.push(std::mem::take(head));
        for page in found.drain(..) {
            let tail_len = shared.store.read(&page)[1].len();
            parts.push(Bytes::from_owner(Pinned { shared: shared.clone(), page: Some(page) }));
            parts.push(tails.split_to(tail_len));
        }
        parts.retain(|part| !part.is_empty());
        parts
    }
}

/// Pages that a reply carries, which stay as they are until it is gone.
pub(super) struct Pages<'a> {
    pub shared: &'a Arc<Shared>,
    pub found: &'a mut Vec<Found>,
    /// What comes before them: their descriptors, or instead of them the members.
    pub head: Bytes,
}

impl std::fmt::Debug for Pages<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.found.fmt(f)
    }
}

impl Drop for Pages<'_> {
    fn drop(&mut self) {
        self.found.drain(..).for_each(|page| self.shared.store.unpin(page));
    }
}

/// A page on its way to who has asked for it: what lies in its frame.
struct Pinned {
    shared: Arc<Shared>,
    page: Option<Found>,
}

impl AsRef<[u8]> for Pinned {
    fn as_ref(&self) -> &[u8] {
        self.page.as_ref().map_or(&[], |page| self.shared.store.read(page)[0])
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.page.take().into_iter().for_each(|page| self.shared.store.unpin(page));
    }
}
