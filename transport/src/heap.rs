//! The process's heap.

/// Freed memory that stays with the process, in bytes, for each arena (each thread has one of its own, usually): all messages of a link or two.
#[cfg(target_env = "gnu")]
const KEPT: libc::c_int = 16 << 20;
/// What is larger is mapped for itself: no message is.
#[cfg(target_env = "gnu")]
const MAPPED: libc::c_int = 1 << 20;
#[cfg(target_env = "gnu")]
const _: () = assert!(crate::message::PAYLOAD_MAX < MAPPED as usize);

/// Keeps what is freed for what comes next. Otherwise glibc gives the memory of large messages back and takes it anew for each: of 64 pages that costs an
/// agent half as much again as all else that it does for them. Call it first.
pub fn keep_freed() {
    // SAFETY: it changes two parameters of malloc, under its lock. It is only slower if that fails.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED);
    }
}
