//! Sizes as people write them: `512M`, `4G`, `80%`.

use crate::ids::Bytes;
use std::fmt;
use std::str::FromStr;

/// An amount of memory, or a share of some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// An amount.
    Bytes(Bytes),
    /// Percent of what the option in question refers to: 1 to 100.
    Percent(u8),
}

impl Size {
    /// The amount, percentages being of `whole`.
    pub const fn of(self, whole: Bytes) -> Bytes {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) => Bytes((whole.0 as u128 * percent as u128 / 100) as u64),
        }
    }
}

/// Why a text is no size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SizeError {
    /// Not a number with a unit of ours.
    Malformed,
    /// More than 2^64 bytes.
    TooLarge,
    /// Zero, or a percentage beyond 100.
    OutOfRange,
}

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Malformed => {
                "not a size: write a whole number and K, M, G, T or %, as in 512M or 80%"
            }
            Self::TooLarge => "more than 2^64 bytes",
            Self::OutOfRange => "must be more than zero, and at most 100%",
        })
    }
}

impl std::error::Error for SizeError {}

impl FromStr for Size {
    type Err = SizeError;

    /// A whole number followed by nothing (bytes), `K`, `M`, `G`, `T` (powers of 1024; `KiB`, `KB` and lower
    /// case mean the same) or `%`.
    fn from_str(text: &str) -> Result<Self, SizeError> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        if number.is_empty() {
            return Err(SizeError::Malformed);
        }
        let number: u64 = number.parse().map_err(|_| SizeError::TooLarge)?;
        let shift = match unit.to_ascii_lowercase().as_str() {
            "%" if (1..=100).contains(&number) => return Ok(Self::Percent(number as u8)),
            "%" => return Err(SizeError::OutOfRange),
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(SizeError::Malformed),
        };
        match number.checked_mul(1 << shift) {
            Some(0) => Err(SizeError::OutOfRange),
            Some(bytes) => Ok(Self::Bytes(Bytes(bytes))),
            None => Err(SizeError::TooLarge),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        let bytes = |n| Ok(Size::Bytes(Bytes(n)));
        assert_eq!("512M".parse(), bytes(512 << 20));
        assert_eq!("4gib".parse(), bytes(4 << 30));
        assert_eq!("4096".parse(), bytes(4096));
        assert_eq!("80%".parse(), Ok(Size::Percent(80)));
        assert_eq!(Size::Percent(80).of(Bytes(u64::MAX)).0, u64::MAX / 5 * 4);
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for (text, error) in [
            ("", SizeError::Malformed),
            ("M", SizeError::Malformed),
            ("-1", SizeError::Malformed),
            ("1.5G", SizeError::Malformed),
            ("5 G", SizeError::Malformed),
            ("5Q", SizeError::Malformed),
            ("0", SizeError::OutOfRange),
            ("0%", SizeError::OutOfRange),
            ("101%", SizeError::OutOfRange),
            ("99999999999999999999", SizeError::TooLarge),
            ("99999999T", SizeError::TooLarge),
        ] {
            assert_eq!(text.parse::<Size>(), Err(error), "{text}");
        }
    }
}
