//! How pages travel to agents, lie there and are proved when they come back: under a checksum, and sealed, that is, encrypted
//! and authenticated under a key of the workload's own, which no agent ever sees.
//!
//! AES-128-GCM (NIST SP 800-38D). The nonce is the page's content id, which is given once in a workload's life and names
//! the same bytes for ever, so no nonce meets two pages. Workload and page length are authenticated with the page.
//! So the bytes of one id open under no other id, in no other workload and at no other length.

use std::fmt;
use std::sync::Arc;

use aws_lc_rs::aead::{AES_128_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use bytes::{Bytes, BytesMut};
use gms_policy::ids::ContentId;

use super::Wanted;
use crate::message::{Control, PAGE_LEN, PAGES_MAX, TAG_LEN, WorkloadId};

/// Bytes of a sealed page: the ciphertext, then the tag.
pub const SEALED_LEN: usize = PAGE_LEN + TAG_LEN;
/// Bytes of the key.
const KEY_LEN: usize = 16;
const _: () = assert!(SEALED_LEN <= u16::MAX as usize, "a descriptor's length holds it");

/// The system gives no random numbers for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the system gives no random numbers")]
pub struct NoRandomness;

/// The bytes are not those that were sealed under this id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken;

/// A workload's key. All clients of a workload share one.
pub struct Seal {
    key: LessSafeKey,
    /// For [`Seal::secret`].
    bytes: [u8; KEY_LEN],
    workload: WorkloadId,
}

impl Seal {
    /// With a new random key, which nothing but this value has. It is told by [`Seal::secret`] only.
    ///
    /// # Errors
    /// If the system gives no random numbers.
    pub fn new(workload: WorkloadId) -> Result<Seal, NoRandomness> {
        let mut bytes = [0; KEY_LEN];
        aws_lc_rs::rand::fill(&mut bytes).map_err(|_| NoRandomness)?;
        Seal::from_secret(bytes, workload).ok_or(NoRandomness)
    }

    /// With the key of another one, whose ids it may not use again. `None` if the bytes cannot be a key.
    pub fn from_secret(bytes: [u8; KEY_LEN], workload: WorkloadId) -> Option<Seal> {
        let key = UnboundKey::new(&AES_128_GCM, &bytes).ok()?;
        Some(Seal { key: LessSafeKey::new(key), bytes, workload })
    }

    /// The key, for the next binary of this process and nobody else.
    pub fn secret(&self) -> [u8; KEY_LEN] {
        self.bytes
    }

    /// Seals the bytes that `id` names into `out`, which is [`TAG_LEN`] bytes longer. No other bytes may ever be sealed
    /// under that id.
    pub fn seal(&self, id: ContentId, page: &[u8], out: &mut [u8]) {
        assert_eq!(out.len(), page.len() + TAG_LEN, "bytes of a sealed page");
        let (text, tag) = out.split_at_mut(page.len());
        let aad = self.associated(page.len());
        let sealed = self.key.seal_out_of_place_scatter(nonce(id), aad, page, text, &[], tag);
        sealed.expect("a page is shorter than what AES-GCM can seal");
    }

    /// Opens what was sealed under `id` into `out`, which is [`TAG_LEN`] bytes shorter.
    ///
    /// # Errors
    /// If they are other bytes; what is in `out` then is not to be used.
    pub fn open(&self, id: ContentId, sealed: &[u8], out: &mut [u8]) -> Result<(), Broken> {
        let (text, tag) = sealed.split_at_checked(out.len()).ok_or(Broken)?;
        let aad = self.associated(out.len());
        self.key.open_separate_gather(nonce(id), aad, text, tag, out).map_err(|_| Broken)
    }

    /// Authenticated with each page: 16 bytes of the workload's id, 4 of the page's length.
    fn associated(&self, length: usize) -> Aad<[u8; 20]> {
        let mut bytes = [0; 20];
        bytes[..16].copy_from_slice(&self.workload.0);
        bytes[16..].copy_from_slice(&(length as u32).to_le_bytes());
        Aad::from(bytes)
    }
}

impl Drop for Seal {
    fn drop(&mut self) {
        self.bytes.fill(0);
        // Else the compiler may leave out what nobody reads.
        std::hint::black_box(&self.bytes);
    }
}

/// Without the key.
impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seal").finish_non_exhaustive()
    }
}

/// Eight bytes of the id, four of zero.
fn nonce(id: ContentId) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes[..8].copy_from_slice(&id.0.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// The checksum of a page, under a seed that agents do not know.
#[derive(Clone, Copy, Debug)]
pub struct Checksum {
    seed: u64,
}

impl Checksum {
    /// `seed` is to be random, and the workload's own.
    pub const fn new(seed: u64) -> Checksum {
        Checksum { seed }
    }

    /// The checksum of `page`.
    pub fn of(&self, page: &[u8]) -> u64 {
        xxhash_rust::xxh3::xxh3_64_with_seed(page, self.seed)
    }
}

/// Wraps pages for agents, and unwraps and checks what comes back.
pub(super) struct Envelope {
    checksum: Checksum,
    seal: Option<Arc<Seal>>,
    /// Where pages are opened. Its memory is used again when whoever was given them has let go.
    opened: BytesMut,
}

impl Envelope {
    /// Of pages that travel as they are.
    pub(super) fn plain(checksum: Checksum) -> Envelope {
        Envelope { checksum, seal: None, opened: BytesMut::new() }
    }

    /// Of pages that travel sealed.
    pub(super) fn sealed(self, seal: Arc<Seal>) -> Envelope {
        Envelope { seal: Some(seal), ..self }
    }

    /// Bytes of a page as it travels.
    pub(super) fn page_len(&self) -> usize {
        if self.seal.is_some() { SEALED_LEN } else { PAGE_LEN }
    }

    /// A request for or with such pages.
    pub(super) fn with_lengths(&self, control: Control) -> Control {
        if self.seal.is_some() { control.with_lengths() } else { control }
    }

    /// What the descriptor of such a page says of its length, in bytes; 0 is a frame's.
    pub(super) fn length(&self) -> u16 {
        if self.seal.is_some() { SEALED_LEN as u16 } else { 0 }
    }

    /// Pages of [`PAGE_LEN`] bytes as they travel, in slices: of `buffer`, which grows to hold them, if they are sealed.
    pub(super) fn wrap<'a>(
        &self,
        ids: &[ContentId],
        pages: Vec<&'a [u8]>,
        buffer: &'a mut Vec<u8>,
    ) -> Vec<&'a [u8]> {
        let Some(seal) = &self.seal else { return pages };
        let length = pages.len() * SEALED_LEN;
        if buffer.len() < length {
            buffer.resize(length, 0);
        }
        let sealed = &mut buffer[..length];
        for ((&id, page), out) in ids.iter().zip(pages).zip(sealed.chunks_exact_mut(SEALED_LEN)) {
            seal.seal(id, page, out);
        }
        vec![sealed]
    }

    /// `bytes` are pages as they travelled, at most [`PAGES_MAX`], the first of those that are `wanted`. Returns the
    /// first of them, unwrapped, as far as they are right.
    pub(super) fn unwrap(&mut self, wanted: &[Wanted], bytes: Bytes) -> Bytes {
        let Some(seal) = &self.seal else { return self.check(wanted, &bytes) };
        if self.opened.capacity() == 0 {
            self.opened.reserve(PAGES_MAX * PAGE_LEN);
        }
        self.opened.reserve(bytes.len() / SEALED_LEN * PAGE_LEN);
        for (sealed, wanted) in bytes.chunks_exact(SEALED_LEN).zip(wanted) {
            let from = self.opened.len();
            self.opened.resize(from + PAGE_LEN, 0);
            let page = &mut self.opened[from..];
            // The seal says that these are the bytes which were put; the checksum, that they were the page's then.
            let is_open = seal.open(wanted.id, sealed, page).is_ok();
            if !is_open || !is_right(self.checksum, page, wanted) {
                self.opened.truncate(from);
                break;
            }
        }
        self.opened.split().freeze()
    }

    /// The same of pages that are not sealed.
    fn check(&self, wanted: &[Wanted], bytes: &Bytes) -> Bytes {
        let pages = bytes.chunks_exact(PAGE_LEN).zip(wanted);
        let right = |(page, wanted): &(&[u8], &Wanted)| is_right(self.checksum, page, wanted);
        bytes.slice(..pages.take_while(right).count() * PAGE_LEN)
    }
}

fn is_right(checksum: Checksum, page: &[u8], wanted: &Wanted) -> bool {
    wanted.check.is_none_or(|check| checksum.of(page) == check)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ID: ContentId = ContentId(7);
    const WORKLOAD: WorkloadId = WorkloadId([3; 16]);

    fn with_key(key: [u8; KEY_LEN], workload: WorkloadId) -> Seal {
        Seal::from_secret(key, workload).expect("a key")
    }

    fn seal() -> Seal {
        with_key([9; KEY_LEN], WORKLOAD)
    }

    fn sealed(seal: &Seal, id: ContentId, page: &[u8]) -> Vec<u8> {
        let mut out = vec![0; page.len() + TAG_LEN];
        seal.seal(id, page, &mut out);
        out
    }

    fn opened(seal: &Seal, id: ContentId, bytes: &[u8], length: usize) -> Option<Vec<u8>> {
        let mut out = vec![0; length];
        seal.open(id, bytes, &mut out).ok().map(|()| out)
    }

    proptest! {
        #[test]
        fn a_page_opens_under_its_own_name_only(
            fill in any::<u64>(), id in 0u64..1 << 44, other in 0u64..1 << 44, bit in 0..SEALED_LEN * 8,
            cut in 1..SEALED_LEN, workload in any::<[u8; 16]>(), key in any::<[u8; KEY_LEN]>(),
        ) {
            let page: Vec<u8> = (0..PAGE_LEN as u64).map(|n| (fill.rotate_left(n as u32 % 64) ^ n) as u8).collect();
            let (seal, id, other) = (seal(), ContentId(id), ContentId(other));
            let mut bytes = sealed(&seal, id, &page);
            prop_assert_eq!(opened(&seal, id, &bytes, PAGE_LEN), Some(page));
            prop_assert!(id == other || opened(&seal, other, &bytes, PAGE_LEN).is_none());
            let of_another = with_key([9; KEY_LEN], WorkloadId(workload));
            prop_assert!(workload == WORKLOAD.0 || opened(&of_another, id, &bytes, PAGE_LEN).is_none());
            let with_another = with_key(key, WORKLOAD);
            prop_assert!(key == [9; KEY_LEN] || opened(&with_another, id, &bytes, PAGE_LEN).is_none());
            for length in [cut, PAGE_LEN - 1, 0] {
                prop_assert!(opened(&seal, id, &bytes[..length], length.saturating_sub(TAG_LEN)).is_none());
            }
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(opened(&seal, id, &bytes, PAGE_LEN).is_none());
        }
    }

    #[test]
    fn a_page_of_another_length_does_not_open() {
        let seal = seal();
        let short = sealed(&seal, ID, &[1; 100]);
        assert_eq!(opened(&seal, ID, &short, 100), Some(vec![1; 100]));
        let long = [&short[..], &[0; TAG_LEN]].concat();
        assert_eq!(opened(&seal, ID, &long, 116), None);
        assert_eq!(opened(&seal, ID, &short, 99), None);
        assert_eq!(opened(&seal, ID, &[], 0), None);
    }

    /// NIST's test vector would have another associated data: this fixes ours, so that it is not changed unawares.
    #[test]
    fn the_form_stays_what_it_is() {
        let mut expected = vec![0; SEALED_LEN];
        let mut iv = [0; NONCE_LEN];
        iv[0] = 7;
        let mut aad = [3; 20];
        aad[16..].copy_from_slice(&[0, 16, 0, 0]);
        let key = LessSafeKey::new(UnboundKey::new(&AES_128_GCM, &[9; KEY_LEN]).expect("a key"));
        let (text, tag) = expected.split_at_mut(PAGE_LEN);
        text.fill(5);
        let iv = Nonce::assume_unique_for_key(iv);
        key.seal_in_place_scatter(iv, Aad::from(aad), text, &[], tag).expect("sealed");
        assert_eq!(sealed(&seal(), ID, &[5; PAGE_LEN]), expected);
    }

    #[test]
    fn a_key_is_new_each_time_and_not_printed() {
        let two = [0, 1].map(|_| Seal::new(WORKLOAD).expect("random numbers"));
        let [a, b] = two.each_ref().map(|seal| sealed(seal, ID, &[5; PAGE_LEN]));
        assert_ne!(a, b);
        assert_eq!(format!("{:?}", two[0]), "Seal { .. }");
    }
}
