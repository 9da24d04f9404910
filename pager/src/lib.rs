//! gms-pager
