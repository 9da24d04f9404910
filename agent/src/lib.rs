//! gms-agent: exports a node's idle memory to the pagers of its cluster.

mod ages;
pub mod core;
mod exchange;
pub mod limits;
pub mod slab;
pub mod stats;
pub mod store;
pub mod tenants;
