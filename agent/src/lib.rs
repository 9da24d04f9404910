//! gms-agent: exports a node's idle memory to the pagers of its cluster.
//!
//! | layer | modules |
//! |---|---|
//! | memory | [`slab`] (frames), `warmer`, [`store`] (which page is where) |
//! | decisions, without sockets or clocks | [`core`], [`clients`], [`tenants`], `exchange` |
//! | the loop, the only user of the transport | [`driver`], [`spin`] |
//! | reports | [`stats`], [`metrics`], [`log`] |
//! | the program | [`agent`], [`cli`] |

pub mod agent;
mod ages;
pub mod cli;
pub mod clients;
pub mod core;
pub mod driver;
mod exchange;
pub mod limits;
pub mod log;
pub mod memory;
pub mod metrics;
mod quota;
pub mod renewal;
pub mod slab;
pub mod spin;
pub mod stats;
pub mod stop;
pub mod store;
pub mod tenants;
mod warmer;

pub use agent::{Agent, AgentError, Config};
