//! A session: one workload (a process tree) paged under one budget by this process.

use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use crate::stats::Stats;

/// What the user asked for, parsed and validated.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// Budget for resident anonymous memory of the whole tree, in bytes.
    pub budget_bytes: u64,
    /// log2 of the unit which is fetched: 12 or 13.
    pub page_shift: u8,
    /// `HOST:PORT` as given; empty = start an embedded agent.
    pub agents: Vec<String>,
    /// Keys of the cluster; needed when `agents` is not empty.
    pub keys: Option<PathBuf>,
    /// Size of the embedded agent in bytes.
    pub export_bytes: u64,
    /// Say what happens on stderr.
    pub verbose: bool,
}

/// Why a session cannot start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// An agent could not be used; the text names it and says what to do.
    #[error("agent {addr}: {reason}")]
    Agent {
        /// Address as given.
        addr: String,
        /// What went wrong and what to do.
        reason: String,
    },
    /// The process cannot be paged.
    #[error("process {pid}: {reason}")]
    Process {
        /// The process.
        pid: i32,
        /// What went wrong and what to do.
        reason: String,
    },
    /// Anything else that ends the session.
    #[error("{0}")]
    Fatal(String),
}

/// How a session ended by itself.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// No process of the tree is left.
    TreeGone,
    /// All pages are home, nothing is registered any more: the workload runs on by itself.
    Detached,
    /// Data could not be had or kept; the workload was killed. The text says why.
    Killed(String),
}

/// One workload under one budget.
pub struct Session {}

impl Session {
    /// Connects to every agent (or starts the embedded one) before the command starts. Bounded by a deadline of 5 s.
    pub fn prepare(_config: SessionConfig) -> Result<Session, SessionError> {
        Err(SessionError::Fatal("not built yet".into()))
    }

    /// Begins to page the tree below `root`. `attached` says that it was running before (`gms attach`): then a
    /// process that cannot be paged is an error instead of being left resident.
    pub fn adopt(&self, _root: i32, _attached: bool) -> Result<(), SessionError> {
        Ok(())
    }

    /// Asks for all pages to be brought home and the workload to be left running; `fd` becomes readable when done.
    pub fn detach(&self) {}

    /// Readable once [`Session::outcome`] is set.
    pub fn fd(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&*Box::leak(Box::new(std::io::stdin())))
    }

    /// How the session ended, if it did.
    pub fn outcome(&self) -> Option<Outcome> {
        None
    }

    /// The figures now. Cheap enough for once a second.
    pub fn stats(&self) -> Stats {
        Stats::default()
    }

    /// Ends the threads, frees the workload's frames at the agents (deadline 2 s) and returns the last figures.
    pub fn finish(self) -> Stats {
        Stats::default()
    }
}
