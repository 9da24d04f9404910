//! The end of a session: nobody may outlive a userfaultfd with pages away, who would read zeros.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use gms_transport::Transport;
use gms_transport::client::Client;
use gms_transport::message::Op;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::EvictThread;
use super::halt::Halt;
use crate::process::Process;
use crate::shared::Outcome;
use crate::stopped::{release_all, release_late};
use crate::sync::drain;

/// For killed processes to end.
const KILL_DEADLINE: Duration = Duration::from_secs(5);
/// For evictors to end, and to be killed if they do not.
const ENDING_DEADLINE: Duration = Duration::from_secs(2);
const ENDING_LOOK_MS: u8 = 10;
/// Between two looks for threads that have stopped late.
const IDLE_LOOK_MS: u8 = 1;
/// For agents to free the workload's frames.
const GOODBYE_DEADLINE: Duration = Duration::from_secs(2);

impl<T: Transport> EvictThread<T> {
    /// Kills who is known to be of the workload now. Who is paged need not be found in its tree, if gms's own processes were killed.
    pub(super) fn kill_members(&mut self) {
        for process in self.processes.values() {
            self.tree.add_known(process.pid, process.process(), 0);
        }
        self.tree.refresh(&self.evictors(), true);
        self.tree.kill();
    }

    /// The session has ended, and this thread is about to be stopped: nobody is attached any more and no page evicted, who would have to be let go; and
    /// nobody stays stopped.
    pub(super) fn idle(&mut self, now: Instant) {
        self.halt = Halt::default();
        release_late();
        self.obey(now);
        self.network(now);
        // An agent that cannot be told of the end sees it by its leases.
        let _ = self.write_back.agents.flush(now);
        // Whoever stops it kicks it.
        let kicks = self.shared.evict_kicks();
        if poll(&mut [PollFd::new(kicks.as_fd(), PollFlags::POLLIN)], IDLE_LOOK_MS) == Ok(1) {
            drain(kicks);
        }
    }

    pub(super) fn end(mut self) {
        // Nobody stays stopped.
        self.halt = Halt::default();
        release_all(ENDING_DEADLINE);
        self.publish();
        if !self.kill_remaining() {
            // Nothing is closed, here or by the end of this process: evictors and the keeper, which has its descriptors, kill what is left.
            return std::mem::forget(self);
        }
        self.say_goodbye();
        if self.shared.has_failed() {
            // What may still come of the fault threads is not closed either.
            std::mem::forget(self);
        }
    }

    /// Kills what is left, unless it has been let go, and has evictors end; false if somebody does not.
    fn kill_remaining(&mut self) -> bool {
        if matches!(self.shared.outcome(), Some(Outcome::Detached { .. } | Outcome::Refused(_))) {
            self.bury_all();
            return true;
        }
        let deadline = Instant::now() + KILL_DEADLINE;
        let has_ended = |thread: &mut Self| {
            // One that does not end holds no others up: their evictors have their memory.
            let (ended, others): (BTreeMap<_, _>, _) = std::mem::take(&mut thread.processes)
                .into_iter()
                .partition(|(_, process)| process.has_ended());
            thread.processes = others;
            thread.ending.extend(ended.into_values().map(Process::bury));
            thread.tree.is_gone() && thread.processes.is_empty()
        };
        if !self.kill_until(deadline, has_ended) {
            return false;
        }
        // Evictors have the memory too.
        self.bury_all();
        self.kill_until(deadline, |thread: &mut Self| {
            let mut spaces = thread.spaces.values().chain(thread.leaving.values());
            !spaces.any(|space| space.faults.is_alive())
        })
    }

    fn kill_until(&mut self, deadline: Instant, is_over: impl Fn(&mut Self) -> bool) -> bool {
        while !is_over(self) {
            // Of a child that it was told of it is known now.
            self.obey(Instant::now());
            if Instant::now() > deadline {
                return false;
            }
            self.kill_members();
            let _ = poll(&mut [], PollTimeout::from(1u8));
        }
        true
    }

    /// When evictors have ended nothing of ours is left, and the memory is free.
    fn bury_all(&mut self) {
        for (_, process) in std::mem::take(&mut self.processes) {
            self.ending.push(process.bury());
        }
        let deadline = Instant::now() + ENDING_DEADLINE;
        while !self.ending.is_empty() && Instant::now() < deadline {
            self.see_off(Instant::now());
            let endings = self.ending.iter().map(|buried| buried.ending.as_fd());
            let mut fds = Vec::from_iter(endings.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
            let _ = poll(&mut fds, PollTimeout::from(ENDING_LOOK_MS));
        }
    }

    fn say_goodbye(&mut self) {
        let deadline = Instant::now() + GOODBYE_DEADLINE;
        // The embedded agent ends with the session.
        if !self.shared.config.is_embedded() {
            self.write_back.agents.goodbye(Instant::now());
        }
        let is_awaited = |agents: &Client<T>| {
            agents.lane().agents().any(|agent| agents.under_way(agent, Op::Goodbye) > 0)
        };
        while is_awaited(&self.write_back.agents) && Instant::now() < deadline {
            let now = Instant::now();
            if self
                .write_back
                .agents
                .flush(now)
                .and_then(|()| self.write_back.agents.drive(now))
                .is_err()
            {
                break;
            }
            while self.write_back.agents.poll(now).is_some() {}
            let mut fds = [PollFd::new(self.write_back.agents.fd(), PollFlags::POLLIN)];
            let _ = poll(&mut fds, PollTimeout::from(1u8));
        }
        self.write_back.agents.close_links(Instant::now());
    }
}
