//! gms-tests
