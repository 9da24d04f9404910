//! The program that checks its memory round after round until its input ends (`verify ... forever`).

use std::time::Duration;

use crate::gms::{Gms, status_of};
use crate::mib::Mib;
use crate::pages::assert_paged;
use crate::program::{Outcome, Proc, poll_until};
use crate::stats::Status;

const PAGED_LIMIT: Duration = Duration::from_secs(30);

/// Waits until so much of the workload of `proc` is away: what is said of rounds can come before the pager has met the program.
pub fn wait_paged(proc: &mut Proc, remote: Mib) -> Status {
    poll_until("pages at the agents", PAGED_LIMIT, || {
        if proc.poll().is_some() {
            proc.fail("gms ended early");
        }
        status_of(proc.pid()).filter(|status| status.remote_bytes >= remote.bytes())
    })
}

/// Waits until it has ended so many more rounds.
pub fn wait_rounds(proc: &Proc, count: usize) {
    for _ in 0..count {
        proc.wait_output(proc.output_len(), "round ");
    }
}

/// Ends its input; fails the test unless it found every page right, and so much of its memory was paged.
pub fn end_verified(gms: &Gms, mut proc: Proc, working_set: Mib, budget: Mib) -> Outcome {
    proc.close_stdin();
    let outcome = gms.finish_proc(proc).expect_code(0);
    assert!(outcome.text().ends_with("ended, every page right\n"), "{}", outcome.text());
    assert_paged(&outcome, working_set, budget);
    outcome
}
