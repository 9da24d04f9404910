//! The agents: the real ones, on the network in memory.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gms_agent::core::Core;
use gms_agent::driver::Driver;
use gms_agent::renewal::Renewal;
use gms_agent::slab::Slab;
use gms_agent::stats::Stats;
use gms_agent::stop::Stop;
use gms_agent::store::Store;
use gms_policy::Bytes;
use gms_transport::sim::{Net, Sim};

/// One agent, running or not.
pub struct SimAgent {
    pub addr: SocketAddr,
    frames: u64,
    stats: Arc<Stats>,
    driver: Option<Driver<Sim>>,
    /// It does not run before this.
    pub paused_until: Instant,
}

impl SimAgent {
    /// An agent of `frames` frames.
    pub fn new(net: &Net, now: Instant, number: u8, frames: u64) -> SimAgent {
        let addr = SocketAddr::from(([10, 0, 0, number], 7070));
        let mut agent =
            SimAgent { addr, frames, stats: Arc::default(), driver: None, paused_until: now };
        agent.start(net, now);
        agent
    }

    /// Starts, with nothing in it.
    pub fn start(&mut self, net: &Net, now: Instant) {
        let slab = Slab::new(Bytes(self.frames * 4096), false).expect("memory");
        self.stats = Arc::default();
        let core = Core::new(now, Store::new(slab).expect("a clock"), self.stats.clone());
        let stop = Arc::new(Stop::new().expect("a descriptor"));
        let renewal = Arc::new(Renewal::new().expect("a descriptor"));
        let node = net.node(self.addr, self.addr.port() as u8).expect("a descriptor");
        let driver = Driver::new(node, core, self.stats.clone(), stop, renewal, Duration::ZERO);
        self.driver = Some(driver);
    }

    /// Ends without a word.
    pub fn crash(&mut self, net: &Net, now: Instant) {
        net.crash(now, self.addr);
        self.driver = None;
    }

    pub fn is_up(&self) -> bool {
        self.driver.is_some()
    }

    /// Frames that hold something.
    pub fn used(&self) -> u64 {
        self.frames - self.stats.frames_free.value()
    }

    /// A turn of its loop.
    pub fn turn(&mut self, now: Instant) {
        if let Some(driver) = self.driver.as_mut().filter(|_| now >= self.paused_until) {
            driver.turn(|| now).expect("a socket in memory does not fail");
        }
    }
}
