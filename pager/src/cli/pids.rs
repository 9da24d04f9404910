//! Process ids for the completion of a command line.

use std::ffi::OsStr;

use clap_complete::engine::CompletionCandidate;
use gms_transport::text::printable;
use nix::unistd::geteuid;

use crate::control;
use crate::kernel::proc;
use crate::kernel::proc::self_pid;

/// Most processes offered.
const CANDIDATES_MAX: usize = 512;
/// Longest command line shown beside a process id.
const COMMAND_CHARS_MAX: usize = 60;

/// Workloads that are paged now.
pub(super) fn of_workloads(typed: &OsStr) -> Vec<CompletionCandidate> {
    let workloads = control::workloads().into_iter();
    candidates(typed, workloads.map(|one| (one.stats.pid, one.stats.command)))
}

/// Processes of this user (of everybody, for root) that have memory of their own.
pub(super) fn to_attach(typed: &OsStr) -> Vec<CompletionCandidate> {
    let user = geteuid();
    let ours = |pid: &i32| {
        user.is_root() || proc::status_field(*pid, "Uid:") == Some(i64::from(user.as_raw()))
    };
    let pids = proc::all().into_iter().filter(|&pid| pid != self_pid()).filter(ours);
    let named = pids.map(|pid| (pid, proc::command_line(pid)));
    // Kernel threads and what has ended have no command line.
    candidates(typed, named.filter(|(_, command)| !command.is_empty()))
}

fn candidates(
    typed: &OsStr,
    processes: impl Iterator<Item = (i32, String)>,
) -> Vec<CompletionCandidate> {
    let typed = typed.to_string_lossy();
    let fitting = processes.filter(|(pid, _)| pid.to_string().starts_with(&*typed));
    let candidate = |(pid, command): (i32, String)| {
        let help = printable(&command, COMMAND_CHARS_MAX);
        CompletionCandidate::new(pid.to_string()).help(Some(help.into()))
    };
    fitting.take(CANDIDATES_MAX).map(candidate).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_offered_by_what_was_typed() {
        let parent = nix::unistd::getppid().to_string();
        let offered = |typed: &str| {
            let found = to_attach(OsStr::new(typed));
            found.iter().any(|one| one.get_value() == OsStr::new(&parent))
        };
        assert!(offered(&parent) && offered(&parent[..1]) && offered("") && !offered("x"));
        let this = self_pid().to_string();
        assert!(
            to_attach(OsStr::new(&this)).iter().all(|one| one.get_value() != OsStr::new(&this))
        );
    }
}
