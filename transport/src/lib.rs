//! Messages between pagers and agents, and the transports which carry them.
pub mod message;
