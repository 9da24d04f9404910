//! Harness of the integration tests: real kernel, real programs, real agents in processes of their own.
//!
//! A test sets a [`Stage`] (which checks privilege and binaries and waits for its turn: a test that claims anything of times or
//! memory runs alone however the runner schedules it, others beside each other), describes a [`Program`], runs it natively for the reference and under
//! [`Gms`] for the comparison. Every wait has a deadline, and what a test started is killed when it is dropped.

mod agent;
mod census;
mod copies;
mod dice;
mod gms;
mod keys;
mod killer;
mod memcg;
mod metrics;
mod mib;
mod netns;
mod pages;
mod procfs;
mod program;
mod pty;
mod redis;
mod relay;
mod resp;
mod rounds;
mod stage;
mod stats;
mod stream;
mod torture;
mod traces;
mod workload;

pub use agent::{AgentProc, AgentSetup, RIGHTLESS};
pub use census::Peak;
pub use copies::{wait_until_copied, wait_until_missed};
pub use dice::{Dice, mix};
pub use gms::{Gms, gms_binary, status_of};
pub use keys::keys;
pub use killer::Killer;
pub use memcg::MemoryGroup;
pub use metrics::{free_port, metric};
pub use mib::Mib;
pub use netns::Namespace;
pub use pages::{
    ATTEMPTS, assert_paged, attempts, enough_in_time, overshoot, paged_in_time, pages_like_native,
    within_bound,
};
pub use procfs::{
    capabilities, descendants, evictor_of, exists, fault_readers, has_uffd, is_of_gms, name,
    rss_anon, spoil_page_map, userfaultfds, write_memory,
};
pub use program::{Outcome, Proc, Program, patience, poll_until, tool, while_stopped};
pub use pty::Terminal;
pub use redis::Redis;
pub use relay::{Relay, Weather};
pub use resp::{Connection, Reply};
pub use rounds::{end_verified, wait_paged, wait_rounds};
pub use stage::{Stage, has_huge_pages, skipped, told};
pub use stats::{AgentStats, Stats, Status};
pub use torture::{Torture, torture_seeds};
pub use traces::{Before, assert_let_go};
pub use workload::{
    c_program, go_program, go_source, go_test_binary, has_guards, java_classes, musl_program,
    source, thirty_two_bit_program,
};

/// Makes two tests of one function of the percentage of the working set that may stay resident.
#[macro_export]
macro_rules! at_25_and_50_percent {
    ($($name:ident => $body:expr;)*) => {$(
        mod $name {
            use super::*;
            #[test]
            fn with_25_percent_resident() { ($body)(25); }
            #[test]
            fn with_50_percent_resident() { ($body)(50); }
        }
    )*};
}
