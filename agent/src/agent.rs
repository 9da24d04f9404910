//! An agent in a thread of its own: for the program `gms-agent`, or embedded in a pager.

use crate::core::Core;
use crate::driver::{Driver, seconds_since_1970};
use crate::limits::SPIN_MAX;
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::renewal::Renewal;
use crate::slab::{Slab, SlabError};
use crate::stats::Stats;
use crate::stop::Stop;
use crate::store::Store;
use gms_policy::{Bytes, PageCount};
use gms_transport::TransportError;
use gms_transport::keys::Identity;
use gms_transport::message::Version;
use gms_transport::quic::Quic;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What an agent is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where it listens; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Memory that it exports.
    pub export: Bytes,
    /// Whether the export is of huge pages, which must be reserved in the kernel.
    pub huge: bool,
    /// Longest spin before the loop blocks; zero: never spin.
    pub spin: Duration,
    /// Where it serves metrics.
    pub metrics: Option<SocketAddr>,
    /// The latest version of the protocol that it speaks.
    pub protocol: Version,
}

impl Config {
    /// An agent of `export` bytes at `listen`, all else as usual.
    pub fn new(listen: SocketAddr, export: Bytes) -> Self {
        Self { listen, export, huge: false, spin: SPIN_MAX, metrics: None, protocol: Version::V2 }
    }
}

/// Why an agent could not be started.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// More than the machine has.
    #[error(
        "cannot export {} MiB: {} {} MiB of memory, of which {} MiB are available; export less",
        .export.0 >> 20, .memory.whose(), .memory.total.0 >> 20, .memory.available.0 >> 20
    )]
    TooLarge {
        /// What was asked for.
        export: Bytes,
        /// What there is.
        memory: Memory,
    },
    /// The slab could not be made.
    #[error(transparent)]
    Slab(#[from] SlabError),
    /// The address cannot be listened on.
    #[error("cannot listen on {addr}: {error}; choose an address of this machine and a free port")]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// What the system says.
        error: io::Error,
    },
    /// The transport has another complaint.
    #[error(transparent)]
    Transport(TransportError),
    /// Anything else.
    #[error("cannot start: {0}")]
    System(#[from] io::Error),
}

/// A running agent. Stops, without grace, when dropped.
#[derive(Debug)]
pub struct Agent {
    addr: SocketAddr,
    frames: PageCount,
    stats: Arc<Stats>,
    stop: Arc<Stop>,
    renewal: Arc<Renewal>,
    /// Readable when the loop has ended.
    ended: Arc<Stop>,
    thread: Option<JoinHandle<io::Result<()>>>,
    metrics: Option<Metrics>,
}

impl Agent {
    /// Starts an agent which accepts the clients of `identity`'s authority. When this returns, it listens.
    pub fn spawn(config: &Config, identity: &Identity) -> Result<Self, AgentError> {
        let memory = Memory::read()?;
        if config.export > memory.total {
            return Err(AgentError::TooLarge { export: config.export, memory });
        }
        if config.export > memory.available {
            tracing::warn!(
                export = config.export.0,
                available = memory.available.0,
                "exports more than is available now"
            );
        }
        let server = Quic::server_up_to(config.listen, identity, config.protocol);
        let transport = server.map_err(|error| match error {
            TransportError::Socket { addr, error } => AgentError::Listen { addr, error },
            other => AgentError::Transport(other),
        })?;
        let mut slab = Slab::new(config.export, config.huge)?;
        slab.warm_ahead()?;
        let (addr, frames) = (transport.local_addr(), PageCount(u64::from(slab.frames())));
        let (stop, ended) = (Arc::new(Stop::new()?), Arc::new(Stop::new()?));
        let renewal = Arc::new(Renewal::new()?);
        let stats = Arc::new(Stats::default());
        stats.certificate_expires_s.set(seconds_since_1970(identity.expires()));
        let core = Core::new(Instant::now(), Store::new(slab)?, stats.clone());
        let listen = |addr| Metrics::spawn(addr, stats.clone(), stop.clone());
        let metrics = match config.metrics {
            Some(addr) => Some(listen(addr).map_err(|error| AgentError::Listen { addr, error })?),
            None => None,
        };
        let (told, renewed) = (stop.clone(), renewal.clone());
        let driver = Driver::new(transport, core, stats.clone(), told, renewed, config.spin);
        let end = ended.clone();
        let run = move || {
            // Announced whatever happens, a panic included.
            let _announce = Announce(end);
            driver.run()
        };
        let thread = Some(std::thread::Builder::new().name("agent".into()).spawn(run)?);
        Ok(Self { addr, frames, stats, stop, renewal, ended, thread, metrics })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Where it serves metrics.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(|metrics| metrics.addr)
    }

    /// Frames that it exports.
    pub fn frames(&self) -> PageCount {
        self.frames
    }

    /// What it has done, still counting.
    pub fn stats(&self) -> &Arc<Stats> {
        &self.stats
    }

    /// Uses `identity` for links that are made from now on, and closes those of peers that are no longer good.
    pub fn renew(&self, identity: Identity) {
        self.renewal.offer(identity);
    }

    /// Becomes readable when the agent has ended by itself, which is an error: [`Agent::stop`] tells which.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    /// Drains and ends it: workloads get up to `grace` to take their pages away, then their links are closed with
    /// the code "draining".
    ///
    /// # Errors
    /// What ended the loop, if it was not this.
    pub fn stop(mut self, grace: Duration) -> io::Result<()> {
        self.finish(grace)
    }

    fn finish(&mut self, grace: Duration) -> io::Result<()> {
        self.stop.request(grace);
        let ended = self.thread.take().map_or(Ok(Ok(())), JoinHandle::join);
        if let Some(metrics) = self.metrics.take() {
            metrics.join();
        }
        ended.unwrap_or_else(|_| Err(io::Error::other("the agent's thread panicked")))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if self.thread.is_some()
            && let Err(error) = self.finish(Duration::ZERO)
        {
            tracing::error!(%error, "the agent had failed");
        }
    }
}

/// Tells that a thread has ended.
struct Announce(Arc<Stop>);

impl Drop for Announce {
    fn drop(&mut self) {
        self.0.request(Duration::ZERO);
    }
}
