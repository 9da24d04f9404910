//! gms-agent: exports a node's idle memory to the pagers of its cluster.
//!
//! | layer | modules |
//! |---|---|
//! | pages | [`slab`] (frames), `warmer`, `write_behind`, [`numa`], [`store`] (which page is where) |
//! | decisions, without sockets or clocks | [`core`] (one a thread), [`shared`] by all of them: [`clients`], [`tenants`]; `exchange` |
//! | the loops, one a thread, the only users of the transport that serves | [`driver`], [`spin`] |
//! | which other agents there are | [`members`], a thread with links of its own; `bulletin` between it and the loops |
//! | reports | [`stats`], [`metrics`], [`log`] |
//! | the machine | [`memory`] (how much there is), [`cgroup`], `follower` (the export follows it) |
//! | the program | [`agent`], [`cli`], [`check`] |

pub mod agent;
mod ages;
mod bulletin;
pub mod cgroup;
pub mod check;
pub mod cli;
pub mod clients;
pub mod core;
pub mod driver;
mod exchange;
mod follower;
pub mod limits;
pub mod log;
pub mod members;
pub mod memory;
pub mod metrics;
pub mod numa;
mod pace;
mod quota;
pub mod renewal;
pub mod shared;
pub mod slab;
pub mod spin;
pub mod stats;
pub mod stop;
pub mod store;
pub mod tenants;
mod warmer;
mod write_behind;

pub use agent::{Agent, AgentError, Config};
