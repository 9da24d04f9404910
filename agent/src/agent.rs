//! An agent in threads of its own: for the program `gms-agent`, or, in one, for a pager's own agent.

use crate::core::Core;
use crate::driver::{Driver, seconds_since_1970};
use crate::follower::Follower;
use crate::limits::{SPIN_MAX, THREADS_MAX};
use crate::members::{JoinError, Joining, Members};
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::numa::{Nodes, stay_on};
use crate::renewal::{Offer, Renewal};
use crate::shared::Shared;
use crate::slab::{Slab, SlabError};
use crate::stats::{Gauges, Report, Stats};
use crate::stop::Stop;
use crate::store::Store;
use gms_policy::{Bytes, ExportRange, PageCount};
use gms_transport::TransportError;
use gms_transport::keys::Identity;
use gms_transport::message::Version;
use gms_transport::quic::Quic;
use nix::sched::CpuSet;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What an agent is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where it listens; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Memory that it exports: between two amounts it follows what the host can spare.
    pub export: ExportRange,
    /// Whether that is never to be swapped out, where this is allowed.
    pub lock: bool,
    /// Whether the export is of huge pages, which must be reserved in the kernel.
    pub huge: bool,
    /// Threads that serve, at most [`THREADS_MAX`].
    pub threads: usize,
    /// Longest spin before a loop blocks; zero: never spin.
    pub spin: Duration,
    /// Where it serves metrics.
    pub metrics: Option<SocketAddr>,
    /// The latest version of the protocol that it speaks.
    pub protocol: Version,
    /// Whether a workload's pages stay however long it has no link: of an agent that ends with its only client.
    pub endless_leases: bool,
}

impl Config {
    /// An agent of `export` bytes at `listen`, in one thread, all else as usual.
    pub fn new(listen: SocketAddr, export: Bytes) -> Self {
        let (spin, protocol) = (SPIN_MAX, Version::V2);
        let export = ExportRange::fixed(export);
        let (lock, huge, metrics, endless_leases) = (false, false, None, false);
        Self { listen, export, lock, huge, threads: 1, spin, metrics, protocol, endless_leases }
    }
}

/// Why an agent could not be started.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// More than the machine has.
    #[error(
        "cannot export {} MiB: {} {} MiB of memory, of which {} MiB are available; export less",
        .export.0 >> 20, .memory.whose(), .memory.total_bytes >> 20, .memory.available_bytes >> 20
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
    shared: Arc<Shared>,
    export: Option<ExportRange>,
    follower: Option<Follower>,
    stats: Vec<Arc<Stats>>,
    stop: Arc<Stop>,
    /// Of the loops that serve: the last of them says that the keys are renewed.
    renewals: Vec<Arc<Renewal>>,
    /// Readable when a loop has ended.
    ended: Arc<Stop>,
    threads: Vec<JoinHandle<Ended>>,
    metrics: Option<Metrics>,
    members: Option<Members>,
}

/// A loop that has ended, and why. Its socket is closed only when all have ended: until then the kernel divides the
/// packets of all clients among the sockets that there are.
type Ended = (io::Result<()>, Driver<Quic>);

impl Agent {
    /// Starts an agent which accepts the clients of `identity`'s authority. When this returns, it listens.
    pub fn spawn(config: &Config, identity: &Identity) -> Result<Self, AgentError> {
        Self::spawn_bound(config, identity, || Ok(()))
    }

    /// As [`Agent::spawn`]. Calls `bound` when it has its sockets and no thread yet: what this thread gives up there, no
    /// thread of the agent has.
    pub fn spawn_bound(
        config: &Config,
        identity: &Identity,
        bound: impl FnOnce() -> io::Result<()>,
    ) -> Result<Self, AgentError> {
        Self::spawn_with(config, identity, bound, || {
            let memory = Self::look_at_memory(config.export.floor)?;
            // Beyond all memory there is nothing to grow to.
            let most = Bytes(config.export.ceiling.0.min(memory.total_bytes));
            let slab = Slab::new(most, config.huge)?;
            if config.lock && !config.huge {
                lock(&slab, &memory);
            }
            Ok(slab)
        })
    }

    /// As [`Agent::spawn_bound`], of an agent whose export lies in a file in `dir`: see [`Slab::in_file`].
    pub fn spawn_in_file(
        config: &Config,
        identity: &Identity,
        bound: impl FnOnce() -> io::Result<()>,
        dir: &Path,
        failed: impl FnOnce(io::Error) + Send + 'static,
    ) -> Result<Self, AgentError> {
        Self::spawn_with(config, identity, bound, || {
            Ok(Slab::in_file(dir, config.export.ceiling, failed)?)
        })
    }

    fn look_at_memory(floor: Bytes) -> Result<Memory, AgentError> {
        let memory = Memory::read()?;
        if floor.0 > memory.total_bytes {
            return Err(AgentError::TooLarge { export: floor, memory });
        }
        if floor.0 > memory.available_bytes {
            tracing::warn!(
                export = floor.0,
                available = memory.available_bytes,
                "exports more than is available now"
            );
        }
        Ok(memory)
    }

    fn spawn_with(
        config: &Config,
        identity: &Identity,
        bound: impl FnOnce() -> io::Result<()>,
        slab: impl FnOnce() -> Result<Slab, AgentError>,
    ) -> Result<Self, AgentError> {
        let threads = config.threads.clamp(1, THREADS_MAX);
        let servers = Quic::servers(config.listen, identity, config.protocol, threads);
        let servers = servers.map_err(|error| match error {
            TransportError::Socket { addr, error } => AgentError::Listen { addr, error },
            other => AgentError::Transport(other),
        })?;
        bound()?;
        // The first threads may be the slab's.
        let mut slab = slab()?;
        // One thread uses all memory, and is not kept anywhere.
        let nodes = if threads > 1 { Nodes::read() } else { Nodes::default() };
        slab.warm_ahead(threads, &nodes)?;
        let shared = Arc::new(Shared::new(Instant::now(), Store::new(slab, threads)?));
        shared.accounts().clients.set_allowed(identity.allowed().cloned());
        shared.accounts().endless = config.endless_leases;
        shared.gauges.certificate_expires_s.set(seconds_since_1970(identity.expires()));
        let mut agent = Self {
            addr: servers[0].local_addr(),
            shared: shared.clone(),
            export: None,
            follower: None,
            stats: (0..threads).map(|_| Arc::default()).collect(),
            stop: Arc::new(Stop::new()?),
            renewals: Vec::new(),
            ended: Arc::new(Stop::new()?),
            threads: Vec::new(),
            metrics: None,
            members: None,
        };
        agent.set_export(config.export)?;
        if let Some(addr) = config.metrics {
            let report = Report::of(shared.gauges.clone(), agent.stats.clone());
            let metrics = Metrics::spawn(addr, report);
            agent.metrics = Some(metrics.map_err(|error| AgentError::Listen { addr, error })?);
        }
        for (number, server) in servers.into_iter().enumerate() {
            let stats = agent.stats[number].clone();
            let core = Core::new(Instant::now(), shared.clone(), number, stats);
            agent.serve(server, core, nodes.of_thread(number), config.spin)?;
        }
        Ok(agent)
    }

    /// Starts the next thread.
    fn serve(
        &mut self,
        server: Quic,
        core: Core,
        cpus: Option<CpuSet>,
        spin: Duration,
    ) -> io::Result<()> {
        let (stop, renewal) = (self.stop.clone(), Arc::new(Renewal::new()?));
        let mut driver = Driver::new(server, core, stop, renewal.clone(), spin);
        let end = self.ended.clone();
        let run = move || {
            // Announced whatever happens, a panic included.
            let _announce = Announce(end);
            stay_on(cpus);
            (driver.run(), driver)
        };
        self.threads.push(std::thread::Builder::new().name("agent".into()).spawn(run)?);
        self.renewals.push(renewal);
        Ok(())
    }

    /// Becomes a member of the cluster: finds the other agents, and is found by them, until it is asked to stop.
    ///
    /// # Errors
    /// If it cannot; it serves all the same.
    pub fn join(&mut self, identity: &Identity, joining: Joining) -> Result<(), JoinError> {
        let parts = (self.shared.clone(), self.stop.clone());
        self.members = Some(Members::spawn(parts, identity, self.addr, joining)?);
        Ok(())
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Where it serves metrics.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(|metrics| metrics.addr)
    }

    /// Frames that it exports now.
    pub fn frames(&self) -> PageCount {
        PageCount(self.shared.store.frames().into())
    }

    /// Exports this from now on, up to what it was started with at most. Where that is less than before, free memory is given back at once, and workloads are asked
    /// to take away the pages that are too many.
    ///
    /// # Errors
    /// If the host's memory cannot be read; the export stays as it is then.
    pub fn set_export(&mut self, export: ExportRange) -> io::Result<()> {
        if self.export == Some(export) {
            return Ok(());
        }
        // One at a time has its hand on the export.
        (self.export, self.follower) = (None, None);
        if export.is_auto() {
            self.follower = Some(Follower::spawn(self.shared.clone(), export)?);
        } else {
            let frames = export.ceiling.pages().0;
            self.shared.set_frames(frames.try_into().unwrap_or(u32::MAX));
            self.shared.store.give_back()?;
        }
        self.export = Some(export);
        Ok(())
    }

    /// Pages of workloads that have not ended.
    pub fn held(&self) -> PageCount {
        PageCount(self.shared.accounts().held())
    }

    /// What it holds, all threads together.
    pub fn gauges(&self) -> &Gauges {
        &self.shared.gauges
    }

    /// What each thread has done, still counting.
    pub fn stats(&self) -> &[Arc<Stats>] {
        &self.stats
    }

    /// Uses `identity` for links that are made from now on, and closes those of peers that are no longer good.
    pub fn renew(&self, identity: Identity) {
        let offer = Offer::new(identity, self.renewals.len());
        self.renewals.iter().for_each(|renewal| renewal.offer(offer.clone()));
        if let Some(members) = &self.members {
            members.renew(offer);
        }
    }

    /// Has it drain, and then end, as [`Agent::stop`] does, without waiting: it takes [new keys](Agent::renew) meanwhile.
    pub fn drain(&self, grace: Duration) {
        self.stop.request(grace);
    }

    /// Becomes readable when the agent has ended, by itself or when it had drained: [`Agent::stop`] tells whether by an error.
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
        if let Some(members) = self.members.take() {
            members.join();
        }
        let ended: Vec<_> = self.threads.drain(..).map(JoinHandle::join).collect();
        if let Some(metrics) = self.metrics.take() {
            metrics.end();
        }
        let failed = |_| Err(io::Error::other("a thread of the agent panicked"));
        ended.into_iter().try_for_each(|ended| ended.map_or_else(failed, |(result, _)| result))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if !(self.threads.is_empty() && self.metrics.is_none())
            && let Err(error) = self.finish(Duration::ZERO)
        {
            tracing::error!(%error, "the agent had failed");
        }
    }
}

/// Keeps the slab from being swapped out, if that is allowed.
fn lock(slab: &Slab, memory: &Memory) {
    let Err(error) = slab.keep_resident() else { return };
    let cure = "allow it to be locked: LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited";
    // Without swap, nothing is lost.
    match memory.swap_bytes {
        0 => tracing::debug!(%error, cure, "the memory of pages is not locked"),
        _ => tracing::warn!(%error, cure, "the memory of pages may be swapped out"),
    }
}

/// Tells that a thread has ended.
struct Announce(Arc<Stop>);

impl Drop for Announce {
    fn drop(&mut self) {
        self.0.request(Duration::ZERO);
    }
}
