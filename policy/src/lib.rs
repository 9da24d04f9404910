//! The policies of gms as pure code: a view in, a decision out. No I/O, no clock, no randomness of their own.
#![forbid(unsafe_code)]
