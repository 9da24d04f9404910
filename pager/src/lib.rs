//! The pager of gms: runs a program with more memory than its budget, from outside, by userfaultfd.
pub mod session;
pub mod stats;
