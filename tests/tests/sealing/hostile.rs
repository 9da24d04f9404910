//! An agent that is real in all but the pages that it gives back.

use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gms_agent::core::Core;
use gms_agent::driver::Driver;
use gms_agent::renewal::Renewal;
use gms_agent::shared::Shared;
use gms_agent::slab::Slab;
use gms_agent::stop::Stop;
use gms_agent::store::Store;
use gms_policy::Bytes;
use gms_tests::{Mib, keys};
use gms_transport::keys::Role;
use gms_transport::message::{Op, PageDescriptor, PagesReply};
use gms_transport::{
    CloseCode, Control, Event, ExchangeId, LinkId, PathStats, Quic, Transport, TransportError,
};

/// What it does with the pages that it gives back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Lie {
    /// Nothing.
    None,
    /// A bit of the first is another, within what was the page.
    Flip,
    /// The last bit of the first is another: of its tag, if it has one.
    Tag,
    /// In place of the first is one that it has given back before, for another id, whole and with its tag.
    Another,
    /// The first is a byte shorter than it was, and says so.
    Short,
    /// As `Flip`, and from then on nothing.
    Once,
}

impl Lie {
    const ALL: [Lie; 6] = [Lie::None, Lie::Flip, Lie::Tag, Lie::Another, Lie::Short, Lie::Once];
}

/// The agent; ends when dropped.
pub(crate) struct HostileAgent {
    addr: SocketAddr,
    orders: Arc<Orders>,
    stop: Arc<Stop>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

#[derive(Default)]
struct Orders {
    lie: AtomicU8,
    lies: AtomicU64,
}

impl HostileAgent {
    /// One that is honest so far.
    pub(crate) fn start(export: Mib) -> HostileAgent {
        let identity = gms_transport::keys::load(keys(), Role::Node).expect("keys");
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let quic = Quic::server(any, &identity).expect("a socket");
        let (addr, orders) = (quic.local_addr(), Arc::new(Orders::default()));
        let slab = Slab::new(Bytes(export.bytes()), false).expect("memory");
        let store = Store::new(slab, 1).expect("memory");
        let now = Instant::now();
        let core = Core::new(now, Arc::new(Shared::new(now, store)), 0, Arc::default());
        let stop = Arc::new(Stop::new().expect("a descriptor"));
        let renewal = Arc::new(Renewal::new().expect("a descriptor"));
        let liar = Liar { quic, orders: orders.clone(), former: None };
        let mut driver = Driver::new(liar, core, stop.clone(), renewal, Duration::ZERO);
        let thread = std::thread::spawn(move || driver.run());
        HostileAgent { addr, orders, stop, thread: Some(thread) }
    }

    /// `HOST:PORT`, as `--agent` takes it.
    pub(crate) fn addr(&self) -> String {
        self.addr.to_string()
    }

    /// From now on.
    pub(crate) fn lie(&self, lie: Lie) {
        self.orders.lie.store(lie as u8, Ordering::Relaxed);
    }

    /// Replies in which it has lied.
    pub(crate) fn lies(&self) -> u64 {
        self.orders.lies.load(Ordering::Relaxed)
    }
}

impl Drop for HostileAgent {
    fn drop(&mut self) {
        self.stop.request(Duration::ZERO);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || matches!(ended, Some(Ok(Ok(())))), "{ended:?}");
    }
}

/// QUIC, on which pages are forged as they leave.
struct Liar {
    quic: Quic,
    orders: Arc<Orders>,
    /// A page given back before, and its id.
    former: Option<(u64, Vec<u8>)>,
}

/// The ids of the pages of a reply, and those pages.
fn pages_of(control: &Control, payload: &[u8]) -> Vec<(u64, Vec<u8>)> {
    let reply: PagesReply = control.answer();
    let count = reply.done.count_ones() as usize;
    let head = if reply.count > 1 { count * PageDescriptor::LEN } else { 0 };
    let ids = payload[..head].chunks(PageDescriptor::LEN);
    let ids =
        ids.map(|head| u64::from_le_bytes(head[..8].try_into().expect("8 bytes")) << 16 >> 16);
    let ids = if head == 0 { vec![reply.page; count] } else { ids.collect() };
    let pages = payload[head..].chunks(((payload.len() - head) / count.max(1)).max(1));
    ids.into_iter().zip(pages.map(<[u8]>::to_vec)).collect()
}

impl Liar {
    /// The reply as it is sent, and whether that is a lie.
    fn forge(&mut self, lie: Lie, control: &Control, payload: &[u8]) -> (Control, Vec<u8>, bool) {
        let mut forged = payload.to_vec();
        let pages = pages_of(control, payload);
        let Some((id, page)) = pages.first().cloned() else { return (*control, forged, false) };
        let at = payload.len() - pages.len() * page.len();
        let former = self.former.replace((id, page.clone()));
        match (lie, former) {
            (Lie::Flip | Lie::Once, _) => forged[at + 100] ^= 4,
            (Lie::Tag, _) => forged[at + page.len() - 1] ^= 1,
            (Lie::Another, Some((other, former))) if other != id && former != page => {
                forged[at..at + page.len()].copy_from_slice(&former);
            }
            (Lie::Short, _) => {
                forged.remove(at);
                let length = page.len() as u16 - 1;
                if pages.len() > 1 || at > 0 {
                    // The upper two bytes of the first descriptor's first word.
                    forged[6..8].copy_from_slice(&length.to_le_bytes());
                    return (*control, forged, true);
                }
                return (control.with_length(length), forged, true);
            }
            _ => return (*control, forged, false),
        }
        (*control, forged, true)
    }
}

impl Transport for Liar {
    fn connect(&mut self, now: Instant, addr: SocketAddr) -> Result<LinkId, TransportError> {
        self.quic.connect(now, addr)
    }

    fn request(
        &mut self,
        now: Instant,
        link: LinkId,
        control: &Control,
        payload: &[&[u8]],
    ) -> Result<ExchangeId, TransportError> {
        self.quic.request(now, link, control, payload)
    }

    fn reply(
        &mut self,
        now: Instant,
        exchange: ExchangeId,
        control: &Control,
        payload: &[&[u8]],
    ) -> Result<(), TransportError> {
        let lie = Lie::ALL[usize::from(self.orders.lie.load(Ordering::Relaxed))];
        if control.op() != Some(Op::Get) {
            return self.quic.reply(now, exchange, control, payload);
        }
        let (control, payload, lied) = self.forge(lie, control, &payload.concat());
        self.orders.lies.fetch_add(u64::from(lied), Ordering::Relaxed);
        if lied && lie == Lie::Once {
            self.orders.lie.store(Lie::None as u8, Ordering::Relaxed);
        }
        self.quic.reply(now, exchange, &control, &[&payload])
    }

    fn abandon(&mut self, exchange: ExchangeId) {
        self.quic.abandon(exchange);
    }

    fn drive(&mut self, now: Instant) -> io::Result<bool> {
        self.quic.drive(now)
    }

    fn poll(&mut self, now: Instant) -> Option<Event> {
        self.quic.poll(now)
    }

    fn flush(&mut self, now: Instant) -> io::Result<()> {
        self.quic.flush(now)
    }

    fn deadline(&self) -> Option<Instant> {
        self.quic.deadline()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.quic.fd()
    }

    fn path(&self, link: LinkId) -> Option<PathStats> {
        self.quic.path(link)
    }

    fn close(&mut self, now: Instant, link: LinkId, code: CloseCode) {
        self.quic.close(now, link, code);
    }
}
