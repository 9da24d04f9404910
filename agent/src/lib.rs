//! gms-agent: exports a node's idle memory to the pagers of its cluster.

mod ages;
pub mod limits;
pub mod slab;
pub mod store;
