//! The agents: the real ones, of one thread or two, on the network in memory.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gms_agent::core::Core;
use gms_agent::driver::Driver;
use gms_agent::renewal::Renewal;
use gms_agent::shared::Shared;
use gms_agent::slab::Slab;
use gms_agent::stats::Gauges;
use gms_agent::stop::Stop;
use gms_agent::store::Store;
use gms_policy::Bytes;
use gms_tests::Dice;
use gms_transport::sim::{Net, Sim};
use gms_transport::{
    CloseCode, Control, Event, ExchangeId, LinkId, PathStats, Transport, TransportError,
};
use nix::sys::eventfd::EventFd;

/// One agent, running or not.
pub(crate) struct SimAgent {
    pub addr: SocketAddr,
    frames: u64,
    threads: usize,
    /// Which thread gets a link, and when each comes on.
    dice: Dice,
    gauges: Arc<Gauges>,
    drivers: Vec<Driver<Door>>,
    /// It does not run before this.
    pub paused_until: Instant,
}

impl SimAgent {
    /// An agent of `frames` frames.
    pub(crate) fn new(
        net: &Net,
        now: Instant,
        number: u8,
        frames: u64,
        mut dice: Dice,
    ) -> SimAgent {
        let addr = SocketAddr::from(([10, 0, 0, number], 7070));
        let mut agent = SimAgent {
            addr,
            frames,
            threads: 1 + dice.place(2),
            dice,
            gauges: Arc::default(),
            drivers: Vec::new(),
            paused_until: now,
        };
        agent.start(net, now);
        agent
    }

    /// Starts, with nothing in it.
    pub(crate) fn start(&mut self, net: &Net, now: Instant) {
        let slab = Slab::new(Bytes(self.frames * 4096), false).expect("memory");
        let store = Store::new(slab, self.threads).expect("memory");
        let shared = Arc::new(Shared::new(now, store));
        self.gauges = shared.gauges.clone();
        let node = net.node(self.addr, self.addr.port() as u8).expect("a descriptor");
        let house = House {
            node,
            dice: Dice::new(self.dice.bits()),
            doors: BTreeMap::new(),
            events: (0..self.threads).map(|_| VecDeque::new()).collect(),
        };
        let house = Rc::new(RefCell::new(house));
        let driver = |thread| {
            let core = Core::new(now, shared.clone(), thread, Arc::default());
            let stop = Arc::new(Stop::new().expect("a descriptor"));
            let renewal = Arc::new(Renewal::new().expect("a descriptor"));
            let fd = EventFd::new().expect("a descriptor");
            let door = Door { house: house.clone(), thread, fd };
            Driver::new(door, core, stop, renewal, Duration::ZERO)
        };
        self.drivers = (0..self.threads).map(driver).collect();
    }

    /// Ends without a word.
    pub(crate) fn crash(&mut self, net: &Net, now: Instant) {
        net.crash(now, self.addr);
        self.drivers.clear();
    }

    pub(crate) fn is_up(&self) -> bool {
        !self.drivers.is_empty()
    }

    /// Frames that hold something.
    pub(crate) fn used(&self) -> u64 {
        self.frames - self.gauges.frames_free.value()
    }

    /// A turn of its loops: of one always, of two in any order, and now and then one of them is late.
    pub(crate) fn turn(&mut self, now: Instant) {
        if now < self.paused_until {
            return;
        }
        let mut order: Vec<usize> = (0..self.drivers.len()).collect();
        if order.len() > 1 {
            self.dice.shuffle(&mut order);
            order.retain(|_| self.dice.below(8) > 0);
        }
        for thread in order {
            self.drivers[thread].turn(|| now).expect("a socket in memory does not fail");
        }
    }
}

/// The endpoint of an agent, whose links are its threads' by chance, as those of sockets that share a port.
struct House {
    node: Sim,
    dice: Dice,
    /// By link the thread that serves it.
    doors: BTreeMap<LinkId, usize>,
    /// What threads have not taken yet.
    events: Vec<VecDeque<Event>>,
}

impl House {
    /// Hands out what came.
    fn sort(&mut self, now: Instant) {
        while let Some(event) = self.node.poll(now) {
            let thread = match &event {
                Event::Connected { link, .. } => {
                    let thread = self.dice.place(self.events.len());
                    self.doors.insert(*link, thread);
                    Some(thread)
                }
                Event::Closed { link, .. } => self.doors.remove(link),
                event => event.exchange().and_then(|of| self.doors.get(&of.link).copied()),
            };
            self.events[thread.expect("a link that is up")].push_back(event);
        }
    }
}

/// A thread's part of a [`House`].
struct Door {
    house: Rc<RefCell<House>>,
    thread: usize,
    /// Never readable: virtual time brings everything.
    fd: EventFd,
}

impl Transport for Door {
    fn connect(&mut self, now: Instant, addr: SocketAddr) -> Result<LinkId, TransportError> {
        self.house.borrow_mut().node.connect(now, addr)
    }

    fn request(
        &mut self,
        now: Instant,
        link: LinkId,
        control: &Control,
        payload: &[&[u8]],
    ) -> Result<ExchangeId, TransportError> {
        self.house.borrow_mut().node.request(now, link, control, payload)
    }

    fn reply(
        &mut self,
        now: Instant,
        exchange: ExchangeId,
        control: &Control,
        payload: &[&[u8]],
    ) -> Result<(), TransportError> {
        self.house.borrow_mut().node.reply(now, exchange, control, payload)
    }

    fn abandon(&mut self, exchange: ExchangeId) {
        self.house.borrow_mut().node.abandon(exchange);
    }

    fn drive(&mut self, now: Instant) -> io::Result<bool> {
        self.house.borrow_mut().node.drive(now)
    }

    fn poll(&mut self, now: Instant) -> Option<Event> {
        let mut house = self.house.borrow_mut();
        house.sort(now);
        house.events[self.thread].pop_front()
    }

    fn flush(&mut self, now: Instant) -> io::Result<()> {
        self.house.borrow_mut().node.flush(now)
    }

    fn deadline(&self) -> Option<Instant> {
        self.house.borrow().node.deadline()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn path(&self, link: LinkId) -> Option<PathStats> {
        self.house.borrow().node.path(link)
    }

    fn close(&mut self, now: Instant, link: LinkId, code: CloseCode) {
        self.house.borrow_mut().node.close(now, link, code);
    }
}
