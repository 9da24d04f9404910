//! Which edges of the program were taken, and about how often: counters that LLVM increments (`-sanitizer-coverage-inline-8bit-counters`).

use std::collections::BTreeSet;
use std::sync::Mutex;

/// Addresses of each module's counters, from and to.
static COUNTERS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// Called before main, for each module.
#[unsafe(no_mangle)]
extern "C" fn __sanitizer_cov_8bit_counters_init(from: *mut u8, to: *mut u8) {
    COUNTERS.lock().expect("one thread").push((from as usize, to as usize));
}

/// Addresses of all counters.
fn all() -> Vec<*mut u8> {
    let modules = COUNTERS.lock().expect("one thread");
    modules.iter().flat_map(|&(from, to)| (from..to).map(|at| at as *mut u8)).collect()
}

/// Sets all to zero.
pub fn clear() {
    // SAFETY: the compiler's own counters, which only this thread increments; none of them is borrowed.
    all().into_iter().for_each(|counter| unsafe { counter.write_volatile(0) });
}

/// Adds what was taken since: each edge with the power of two up to which its count reaches.
pub fn collect(ways: &mut BTreeSet<(usize, u32)>) {
    for counter in all() {
        // SAFETY: as above.
        let count = unsafe { counter.read_volatile() };
        if count > 0 {
            ways.insert((counter as usize, count.ilog2()));
        }
    }
}
