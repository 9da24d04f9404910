//! The sums that parity parts are: a Cauchy Reed-Solomon code over GF(2^8) (Blömer et al., "An XOR-Based Erasure-Resilient Coding Scheme", 1995), as a table of
//! coefficients. Its columns are scaled so that the first parity part is the plain XOR of the pages: with one parity part nothing is multiplied.
//!
//! Why no crate does it, and figures: docs/decisions.md.

use crate::shape::{DATA_MAX, PARITY_MAX, Role, Shape};
use std::fmt;

/// Powers of the generator 2 modulo x^8 + x^4 + x^3 + x^2 + 1, twice over, and their logarithms.
const TABLES: ([u8; 510], [u8; 256]) = {
    let (mut powers, mut logs) = ([0; 510], [0; 256]);
    let (mut power, mut n) = (1u16, 0);
    while n < 255 {
        powers[n] = power as u8;
        powers[n + 255] = power as u8;
        logs[power as usize] = n as u8;
        power <<= 1;
        if power > 0xff {
            power ^= 0x11d;
        }
        n += 1;
    }
    (powers, logs)
};

fn multiply(a: u8, b: u8) -> u8 {
    let (powers, logs) = &TABLES;
    if a == 0 || b == 0 {
        return 0;
    }
    powers[usize::from(logs[usize::from(a)]) + usize::from(logs[usize::from(b)])]
}

/// 1/a of an `a` that is not zero.
fn invert(a: u8) -> u8 {
    TABLES.0[255 - usize::from(TABLES.1[usize::from(a)])]
}

/// What a page is multiplied by for a parity part: (y + x0) / (y + x), of Cauchy's matrix 1 / (y + x) with its columns scaled by the first row, where x0 = 0 and
/// no x is a y. Every square part of such a matrix can be inverted.
fn coefficient(row: u8, column: u8) -> u8 {
    let y = PARITY_MAX as u8 + column;
    multiply(y, invert(y ^ row))
}
const _: () = assert!(PARITY_MAX.is_power_of_two() && DATA_MAX + PARITY_MAX <= 256);

/// Adds `from`, multiplied by `by`, to `into`.
fn accumulate(into: &mut [u8], from: &[u8], by: u8) {
    if by == 1 {
        into.iter_mut().zip(from).for_each(|(into, from)| *into ^= from);
        return;
    }
    let mut products = [0; 256];
    for bit in 0..8 {
        let (known, more) = products.split_at_mut(1 << bit);
        let product = multiply(by, 1 << bit);
        known.iter().zip(more).for_each(|(known, new)| *new = known ^ product);
    }
    into.iter_mut().zip(from).for_each(|(into, from)| *into ^= products[usize::from(*from)]);
}

/// Makes parity of pages, and pages of parity.
#[derive(Clone, Copy, Debug)]
pub struct Codec {
    shape: Shape,
}

/// Parts from which nothing can be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodecError {
    /// So many pages are no stripe.
    Pages(usize),
    /// The parts are not of one length.
    Length,
    /// There are too few parts, or too many.
    Count {
        /// How many there are.
        given: usize,
        /// How many there are to be.
        needed: usize,
    },
    /// There is no such part in the stripe, or it was given twice, or it is the one that is to be made.
    Part(Role),
}

impl fmt::Display for CodecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CodecError::Pages(pages) => write!(f, "no stripe has {pages} pages"),
            CodecError::Length => f.write_str("the parts of a stripe are of one length"),
            CodecError::Count { given, needed } => {
                write!(f, "a page is made of {needed} other parts of its stripe, not of {given}")
            }
            CodecError::Part(role) => write!(f, "{role:?} is not one of the other parts"),
        }
    }
}

impl std::error::Error for CodecError {}

/// Fails if the parts are not all of one length.
fn length<'a>(mut parts: impl Iterator<Item = &'a [u8]>) -> Result<usize, CodecError> {
    let first = parts.next().ok_or(CodecError::Length)?.len();
    parts.all(|part| part.len() == first).then_some(first).ok_or(CodecError::Length)
}

impl Codec {
    /// For stripes of a shape.
    pub const fn new(shape: Shape) -> Codec {
        Codec { shape }
    }

    fn check(self, pages: usize) -> Result<(), CodecError> {
        let fits = (1..=self.shape.data()).contains(&pages);
        fits.then_some(()).ok_or(CodecError::Pages(pages))
    }

    /// The parity parts of a stripe of these pages, which are of one length. Pages that a stripe could have and has not count as zeros.
    pub fn encode(self, pages: &[&[u8]]) -> Result<Vec<Vec<u8>>, CodecError> {
        self.check(pages.len())?;
        let length = length(pages.iter().copied())?;
        let row = |row| {
            let mut sum = vec![0; length];
            for (column, page) in (0..).zip(pages) {
                accumulate(&mut sum, page, coefficient(row, column));
            }
            sum
        };
        Ok((0..self.shape.parity() as u8).map(row).collect())
    }

    /// A page of a stripe of so many pages, made of as many others of its parts. Whether those are what was once put together only a checksum or seal of the
    /// page can tell.
    pub fn decode(
        self,
        pages: usize,
        wanted: u8,
        parts: &[(Role, &[u8])],
    ) -> Result<Vec<u8>, CodecError> {
        self.check(pages)?;
        if usize::from(wanted) >= pages {
            return Err(CodecError::Part(Role::Data(wanted)));
        }
        if parts.len() != pages {
            return Err(CodecError::Count { given: parts.len(), needed: pages });
        }
        let length = length(parts.iter().map(|part| part.1))?;
        for (n, &(role, _)) in parts.iter().enumerate() {
            let exists = match role {
                Role::Data(column) => usize::from(column) < pages && column != wanted,
                Role::Parity(row) => usize::from(row) < self.shape.parity(),
            };
            if !exists || parts[..n].iter().any(|part| part.0 == role) {
                return Err(CodecError::Part(role));
            }
        }
        let rows = rows_for(pages as u8, wanted, parts);
        let mut page = vec![0; length];
        for &(role, bytes) in parts {
            let by = match role {
                Role::Parity(row) => rows.iter().find(|known| known.0 == row).map_or(0, |r| r.1),
                Role::Data(column) => rows.iter().fold(0, |sum, &(row, factor)| {
                    sum ^ multiply(factor, coefficient(row, column))
                }),
            };
            accumulate(&mut page, bytes, by);
        }
        Ok(page)
    }
}

/// What to multiply each of the parity parts by, so that their sum has the wanted page once and no other one that is missing: as many equations as there are
/// pages missing, solved by elimination. No pivot is zero, since every square part of the matrix can be inverted.
fn rows_for(pages: u8, wanted: u8, parts: &[(Role, &[u8])]) -> Vec<(u8, u8)> {
    let is_missing = |&column: &u8| parts.iter().all(|part| part.0 != Role::Data(column));
    let rows: Vec<u8> = parts
        .iter()
        .filter_map(|part| match part.0 {
            Role::Parity(row) => Some(row),
            Role::Data(_) => None,
        })
        .collect();
    // An equation for each missing page: its coefficients in the rows, and whether it is wanted.
    let mut equations: Vec<Vec<u8>> = (0..pages)
        .filter(is_missing)
        .map(|column| {
            let left = rows.iter().map(|&row| coefficient(row, column));
            left.chain([u8::from(column == wanted)]).collect()
        })
        .collect();
    for pivot in 0..rows.len() {
        let by = invert(equations[pivot][pivot]);
        equations[pivot].iter_mut().for_each(|entry| *entry = multiply(*entry, by));
        let solved = equations[pivot].clone();
        for equation in (0..rows.len()).filter(|&n| n != pivot) {
            let by = equations[equation][pivot];
            accumulate(&mut equations[equation], &solved, by);
        }
    }
    rows.into_iter().zip(equations.iter().map(|equation| equation[equation.len() - 1])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn page(seed: u8, length: usize) -> Vec<u8> {
        (0..length).map(|n| (n as u8).wrapping_mul(31) ^ seed.wrapping_mul(97)).collect()
    }

    /// Each way to take `count` of `roles`.
    fn choices(roles: &[Role], count: usize) -> Vec<Vec<Role>> {
        let bits = 0..1u32 << roles.len();
        let chosen = bits.filter(|bits| bits.count_ones() as usize == count);
        let of = |bits: u32| (0..roles.len()).filter(move |n| bits >> n & 1 == 1).map(|n| roles[n]);
        chosen.map(|bits| of(bits).collect()).collect()
    }

    #[test]
    fn a_page_comes_back_from_any_parts_that_are_enough() {
        for (data, parity) in [(2, 1), (4, 1), (4, 2), (8, 2), (12, 4)] {
            let shape = Shape::new(data, parity).expect("a shape");
            for pages in [1, 2, data] {
                let bytes: Vec<Vec<u8>> = (0..pages).map(|n| page(n, 6)).collect();
                let borrowed: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
                let sums = Codec::new(shape).encode(&borrowed).expect("parity");
                let part = |role: Role| match role {
                    Role::Data(n) => (role, borrowed[usize::from(n)]),
                    Role::Parity(n) => (role, sums[usize::from(n)].as_slice()),
                };
                let (wanted, others) = (pages / 2, 0..pages);
                let others = others.filter(|&n| n != wanted).map(Role::Data);
                let others: Vec<Role> = others.chain((0..parity).map(Role::Parity)).collect();
                for chosen in choices(&others, usize::from(pages)) {
                    let parts: Vec<(Role, &[u8])> = chosen.iter().map(|&r| part(r)).collect();
                    let made = Codec::new(shape).decode(pages.into(), wanted, &parts);
                    assert_eq!(made.as_deref(), Ok(borrowed[usize::from(wanted)]), "{chosen:?}");
                }
            }
        }
    }

    #[test]
    fn what_is_no_stripe_s_is_refused() {
        let codec = Codec::new(Shape::new(4, 2).expect("a shape"));
        let (long, short) = (page(1, 8), page(2, 6));
        let (long, short) = (long.as_slice(), short.as_slice());
        assert_eq!(codec.encode(&[]), Err(CodecError::Pages(0)));
        assert_eq!(codec.encode(&[long; 5]), Err(CodecError::Pages(5)));
        assert_eq!(codec.encode(&[long, short]), Err(CodecError::Length));
        let data = |n| (Role::Data(n), long);
        let parity = |n| (Role::Parity(n), long);
        let count = |given| Err(CodecError::Count { given, needed: 3 });
        let refused = |role| Err(CodecError::Part(role));
        for (pages, wanted, parts, error) in [
            (3, 0, vec![], count(0)),
            (3, 0, vec![data(1), data(2)], count(2)),
            (3, 0, vec![data(1), data(2), parity(0), parity(1)], count(4)),
            (5, 0, vec![data(1); 5], Err(CodecError::Pages(5))),
            (0, 0, vec![], Err(CodecError::Pages(0))),
            (3, 3, vec![data(1), data(2), parity(0)], refused(Role::Data(3))),
            (3, 0, vec![data(1), data(1), parity(0)], refused(Role::Data(1))),
            (3, 0, vec![data(0), data(1), parity(0)], refused(Role::Data(0))),
            (3, 0, vec![data(1), data(3), parity(0)], refused(Role::Data(3))),
            (3, 0, vec![data(1), data(2), parity(2)], refused(Role::Parity(2))),
            (3, 0, vec![data(1), parity(1), parity(1)], refused(Role::Parity(1))),
            (3, 0, vec![data(1), data(2), (Role::Parity(0), short)], Err(CodecError::Length)),
        ] {
            assert_eq!(codec.decode(pages, wanted, &parts), error, "{wanted} of {parts:?}");
        }
    }

    proptest! {
        #[test]
        fn any_losses_are_made_good(
            (data, parity) in (2..=DATA_MAX as u8, 1..=PARITY_MAX as u8),
            seed in any::<u64>(),
            bytes in prop::collection::vec(any::<u8>(), DATA_MAX * 16),
        ) {
            let codec = Codec::new(Shape::new(data, parity).expect("a shape"));
            let pages = 1 + (seed % u64::from(data)) as u8;
            let borrowed: Vec<&[u8]> = bytes.chunks(16).take(pages.into()).collect();
            let sums = codec.encode(&borrowed).expect("parity");
            let mut parts: Vec<(Role, &[u8])> = (0..).map(Role::Data).zip(borrowed.iter().copied()).collect();
            parts.extend((0..).map(Role::Parity).zip(sums.iter().map(Vec::as_slice)));
            // As many are lost as may be, by Fisher and Yates.
            let mut random = seed | 1;
            for lost in 0..usize::from(parity) {
                random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1442695040888963407);
                let left = parts.len() - lost;
                parts.swap(lost, lost + (random >> 33) as usize % left);
            }
            let (lost, left) = parts.split_at(parity.into());
            for &(role, page) in lost {
                if let Role::Data(wanted) = role {
                    let made = codec.decode(pages.into(), wanted, left);
                    prop_assert_eq!(made.as_deref(), Ok(page));
                }
            }
        }
    }
}
