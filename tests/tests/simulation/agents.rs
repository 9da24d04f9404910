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
use gms_agent::stop::Stop;
use gms_agent::store::{Reserved, Store};
use gms_policy::Bytes;
use gms_tests::Dice;
use gms_transport::sim::{Net, Sim};
use gms_transport::{
    CloseCode, Control, Event, ExchangeId, LinkId, PathStats, Transport, TransportError,
};
use nix::sys::eventfd::EventFd;

/// Between an agent's last word and its end.
const FAREWELL: Duration = Duration::from_millis(200);

/// One agent, running or not.
pub(crate) struct SimAgent {
    pub addr: SocketAddr,
    frames: u64,
    threads: usize,
    /// Which thread gets a link, and when each comes on.
    dice: Dice,
    run: Option<Run>,
    /// It does not run before this.
    pub paused_until: Instant,
    /// Until when it runs no more often than this.
    pub slow: (Instant, Duration),
    turned: Instant,
}

/// From an agent's start to its end.
struct Run {
    shared: Arc<Shared>,
    house: Rc<RefCell<House>>,
    drivers: Vec<Driver<Door>>,
    /// Frames that are others'.
    hoard: Vec<Reserved>,
    /// When it ends at the latest, if it drains.
    drains_until: Option<Instant>,
    /// When it ends, if it has said so.
    ends: Option<Instant>,
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
            run: None,
            paused_until: now,
            slow: (now, Duration::ZERO),
            turned: now,
        };
        agent.start(net, now);
        agent
    }

    /// Starts, with nothing in it.
    pub(crate) fn start(&mut self, net: &Net, now: Instant) {
        let slab = Slab::new(Bytes(self.frames * 4096), false).expect("memory");
        let store = Store::new(slab, self.threads).expect("memory");
        let shared = Arc::new(Shared::new(now, store));
        let node = net.node(self.addr, self.addr.port() as u8).expect("a descriptor");
        let house = House {
            node,
            dice: Dice::new(self.dice.bits()),
            doors: BTreeMap::new(),
            lies: false,
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
        let drivers = (0..self.threads).map(driver).collect();
        let (hoard, drains_until, ends) = (Vec::new(), None, None);
        self.run = Some(Run { shared, house, drivers, hoard, drains_until, ends });
    }

    /// Ends without a word.
    pub(crate) fn crash(&mut self, net: &Net, now: Instant) {
        net.crash(now, self.addr);
        self.run = None;
    }

    /// Is to end: when its pages have gone, or the grace is over.
    pub(crate) fn drain(&mut self, now: Instant, grace: Duration) {
        if let Some(run) = &mut self.run {
            run.shared.drain();
            run.drains_until = Some(now + grace);
        }
    }

    /// Others take all of its frames but for some, or give them back.
    pub(crate) fn fill(&mut self, left: u32) {
        let Some(run) = &mut self.run else { return };
        let store = &run.shared.store;
        let taken = store.frames_free().saturating_sub(left);
        run.hoard.extend((0..taken).filter_map(|_| store.reserve(0)));
    }

    pub(crate) fn is_filled(&self) -> bool {
        self.run.as_ref().is_some_and(|run| !run.hoard.is_empty())
    }

    pub(crate) fn empty(&mut self) {
        if let Some(run) = &mut self.run {
            run.hoard.drain(..).for_each(|frame| run.shared.store.release(frame));
        }
    }

    /// From now on it gives wrong pages now and then, or does so no more.
    pub(crate) fn lie(&mut self, lies: bool) {
        if let Some(run) = &self.run {
            run.house.borrow_mut().lies = lies;
        }
    }

    pub(crate) fn is_up(&self) -> bool {
        self.run.is_some()
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.run.as_ref().is_some_and(|run| run.drains_until.is_some())
    }

    /// Frames that hold something, or are set aside for what is coming in.
    pub(crate) fn used(&self) -> u64 {
        let used = |run: &Run| {
            let store = &run.shared.store;
            u64::from(store.frames() - store.frames_free()) - run.hoard.len() as u64
        };
        self.run.as_ref().map_or(0, used)
    }

    /// A turn of its loops: of one always, of two in any order, and now and then one of them is late.
    pub(crate) fn turn(&mut self, net: &Net, now: Instant) {
        let (slow_until, pace) = self.slow;
        let is_slow = now < slow_until && now < self.turned + pace;
        let Some(run) = self.run.as_mut().filter(|_| now >= self.paused_until && !is_slow) else {
            return;
        };
        self.turned = now;
        let mut order: Vec<usize> = (0..run.drivers.len()).collect();
        if order.len() > 1 {
            self.dice.shuffle(&mut order);
            order.retain(|_| self.dice.below(8) > 0);
        }
        for thread in order {
            run.drivers[thread].turn(|| now).expect("a socket in memory does not fail");
        }
        if run.is_over(now) {
            self.crash(net, now);
        }
    }
}

impl Run {
    /// As `Driver::drain`; true when it has ended.
    fn is_over(&mut self, now: Instant) -> bool {
        let Some(latest) = self.drains_until else { return false };
        if self.ends.is_none() && (now >= latest || self.shared.accounts().held() == 0) {
            self.ends = Some(now + FAREWELL);
            self.house.borrow_mut().close_all(now);
        }
        self.ends.is_some_and(|ends| now >= ends)
    }
}

/// The endpoint of an agent, whose links are its threads' by chance, as those of sockets that share a port.
struct House {
    node: Sim,
    dice: Dice,
    /// By link the thread that serves it.
    doors: BTreeMap<LinkId, usize>,
    /// Of pages that it gives every other has a wrong bit.
    lies: bool,
    /// What threads have not taken yet.
    events: Vec<VecDeque<Event>>,
}

impl House {
    fn close_all(&mut self, now: Instant) {
        self.doors.keys().for_each(|&link| self.node.close(now, link, CloseCode::Draining));
    }

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
        let mut house = self.house.borrow_mut();
        if !(house.lies && house.dice.below(2) == 0) {
            return house.node.reply(now, exchange, control, payload);
        }
        let mut bytes = payload.concat();
        bytes.last_mut().into_iter().for_each(|byte| *byte ^= 1);
        house.node.reply(now, exchange, control, &[&bytes])
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
