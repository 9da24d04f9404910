//! gms-bench
