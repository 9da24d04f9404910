//! gms-agent
