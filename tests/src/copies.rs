//! What a paged workload's status says of the copies of its pages.

use std::time::Duration;

use crate::gms::status_of;
use crate::program::{Proc, poll_until};
use crate::stats::Status;

/// Copying everything anew takes a few seconds; an agent counts as gone after 10.
const COPIED_LIMIT: Duration = Duration::from_secs(200);

fn wait_status(what: &str, proc: &Proc, is_so: impl Fn(&Status) -> bool) {
    poll_until(what, COPIED_LIMIT, || is_so(&status_of(proc.pid())?).then_some(()));
}

/// All agents are used, and each page has as many copies as it is to have.
pub fn wait_until_copied(proc: &Proc) {
    wait_status("copies of every page", proc, |status| {
        let used = status.agents.iter().all(|agent| agent.up && agent.pages_held > 0);
        used && status.short_bytes == 0
    });
}

/// The agent's death is known. Until then it passes for one that has all the pages which it was given.
pub fn wait_until_missed(proc: &Proc, agent: &str) {
    wait_status("the loss of an agent", proc, |status| {
        status.agents.iter().any(|of| of.addr == agent && !of.up)
    });
}
