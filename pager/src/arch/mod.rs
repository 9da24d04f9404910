//! Everything that depends on the architecture of the workload: registers and the injected blob.
#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;
#[cfg(not(target_arch = "x86_64"))]
compile_error!("gms pages x86-64 workloads only: add src/arch/<arch>.rs with the same items");
