//! `gms detach`.

use super::{EXIT_NO, Failure, say};
use crate::control::{self, DetachEnd};

/// Brings all pages of a workload home and waits for that.
pub fn detach(pid: i32) -> Result<u8, Failure> {
    let Some(workload) = control::find(pid) else { return Err(no_workload(pid)) };
    match control::detach(&workload)? {
        DetachEnd::Detached => {}
        DetachEnd::Ended => say("the workload ended before all its pages were home"),
    }
    Ok(0)
}

/// Nothing is paged under this process id.
pub fn no_workload(pid: i32) -> Failure {
    let text = format!("no workload of gms has the process id {pid}: 'gms status' lists them");
    Failure::new(EXIT_NO, text)
}
