//! `gms detach`.

use std::time::Instant;

use super::Failure;
use super::progress::Progress;
use crate::control::{self, DetachEnd};
use crate::exit::{EXIT_GMS, EXIT_NO};
use crate::speech::say;

/// Brings all pages of a workload home and waits for that.
pub(super) fn detach(pid: i32) -> Result<u8, Failure> {
    let Some(workload) = control::find(pid) else { return Err(no_workload(pid)) };
    let mut progress = Progress::new(false);
    let end = control::detach(&workload, |stats| progress.show(Instant::now(), stats.away_bytes));
    progress.end();
    match end? {
        DetachEnd::Detached => {}
        DetachEnd::Lost(text) => return Err(Failure::new(EXIT_GMS, text)),
        DetachEnd::Killed(reason) => {
            return Err(Failure::new(EXIT_GMS, format!("workload killed: {reason}")));
        }
        DetachEnd::Ended => say("the workload ended before all its pages were home"),
    }
    Ok(0)
}

/// Nothing is paged under this process id.
pub(super) fn no_workload(pid: i32) -> Failure {
    let text = format!("no workload of gms has the process id {pid}: 'gms status' lists them");
    Failure::new(EXIT_NO, text)
}
