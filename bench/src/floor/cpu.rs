//! What the CPU does to every page: encryption as the transport has it, and the checksum as the pager has it.

use std::hint::black_box;
use std::time::Instant;

use aws_lc_rs::aead::{AES_128_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::error::Unspecified;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::error::BenchError;
use crate::region::PAGE;
use crate::samples::Samples;

/// Bytes which are authenticated only: about those of a QUIC header.
const HEADER: [u8; 12] = [5; 12];

/// Latencies of `count` seals and of as many opens of a page, after a tenth as many to warm up.
pub(crate) fn aead(count: usize) -> Result<(Samples, Samples), BenchError> {
    let key = UnboundKey::new(&AES_128_GCM, &[9; 16]).map_err(failed)?;
    let key = LessSafeKey::new(key);
    let (mut seals, mut opens) = (Samples::new(), Samples::new());
    let mut page = Vec::with_capacity(PAGE + AES_128_GCM.tag_len());
    let warm_up = count / 10;
    for number in 0..count + warm_up {
        let nonce = || {
            let mut nonce = [0; NONCE_LEN];
            nonce[..8].copy_from_slice(&(number as u64).to_le_bytes());
            Nonce::assume_unique_for_key(nonce)
        };
        page.clear();
        page.resize(PAGE, 7);
        let start = Instant::now();
        key.seal_in_place_append_tag(nonce(), Aad::from(HEADER), &mut page).map_err(failed)?;
        let sealed = start.elapsed();
        let start = Instant::now();
        let opened = key.open_in_place(nonce(), Aad::from(HEADER), &mut page).map_err(failed)?;
        let took = start.elapsed();
        if opened.len() != PAGE || opened[number % PAGE] != 7 {
            return Err(BenchError::WrongBytes("of a page that was sealed and opened".into()));
        }
        if number >= warm_up {
            seals.add(sealed);
            opens.add(took);
        }
    }
    Ok((seals, opens))
}

/// Latencies of `count` checksums of a page, after a tenth as many to warm up.
pub(crate) fn checksums(count: usize) -> Samples {
    let page = [7; PAGE];
    let mut samples = Samples::new();
    let warm_up = count / 10;
    for number in 0..count + warm_up {
        let start = Instant::now();
        black_box(xxh3_64_with_seed(black_box(&page), number as u64));
        let took = start.elapsed();
        if number >= warm_up {
            samples.add(took);
        }
    }
    samples
}

fn failed(_: Unspecified) -> BenchError {
    BenchError::Program { program: "AES-128-GCM".into(), problem: "failed".into() }
}
