//! The pager's endpoint, with a ledger of what is put: a content id names the same bytes for ever, since it is the nonce under which they are sealed.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use gms_pager::sync::lock;
use gms_transport::message::{Op, PageDescriptor};
use gms_transport::sim::Sim;
use gms_transport::{
    CloseCode, Control, Event, ExchangeId, LinkId, PathStats, Transport, TransportError,
};

/// The lane of the thread that writes back, whose endpoint has a ledger.
pub(crate) const LANE_OF_WRITES: usize = 1;

/// See the module's documentation.
pub(crate) struct Ledger {
    node: Sim,
    put: Puts,
}

/// By content id a hash of the bytes that travelled.
pub(crate) type Puts = Arc<Mutex<BTreeMap<u64, u64>>>;

impl Ledger {
    /// Of an endpoint, after others of the same workload.
    pub(crate) fn new(node: Sim, put: Puts) -> Ledger {
        Ledger { node, put }
    }

    fn note(&mut self, control: &Control, payload: &[&[u8]]) {
        let payload = payload.concat();
        let (heads, pages) = payload.split_at(usize::from(control.count()) * PageDescriptor::LEN);
        let page_len = pages.len() / usize::from(control.count());
        let heads = heads.chunks_exact(PageDescriptor::LEN);
        for (head, page) in heads.zip(pages.chunks_exact(page_len)) {
            let id = head.first_chunk().map(|id| u64::from_le_bytes(*id)).unwrap_or_default();
            let id = id & (PageDescriptor::ID_END - 1);
            let mut hasher = DefaultHasher::new();
            page.hash(&mut hasher);
            let hash = hasher.finish();
            let noted = *lock(&*self.put).entry(id).or_insert(hash);
            assert!(noted == hash, "two contents are put under the id {id}");
        }
    }
}

impl Transport for Ledger {
    fn connect(&mut self, now: Instant, addr: SocketAddr) -> Result<LinkId, TransportError> {
        self.node.connect(now, addr)
    }

    fn request(
        &mut self,
        now: Instant,
        link: LinkId,
        control: &Control,
        payload: &[&[u8]],
    ) -> Result<ExchangeId, TransportError> {
        if control.op() == Some(Op::Put) {
            self.note(control, payload);
        }
        self.node.request(now, link, control, payload)
    }

    fn reply(
        &mut self,
        now: Instant,
        exchange: ExchangeId,
        control: &Control,
        payload: &[&[u8]],
    ) -> Result<(), TransportError> {
        self.node.reply(now, exchange, control, payload)
    }

    fn abandon(&mut self, exchange: ExchangeId) {
        self.node.abandon(exchange);
    }

    fn drive(&mut self, now: Instant) -> io::Result<bool> {
        self.node.drive(now)
    }

    fn poll(&mut self, now: Instant) -> Option<Event> {
        self.node.poll(now)
    }

    fn flush(&mut self, now: Instant) -> io::Result<()> {
        self.node.flush(now)
    }

    fn deadline(&self) -> Option<Instant> {
        self.node.deadline()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.node.fd()
    }

    fn path(&self, link: LinkId) -> Option<PathStats> {
        self.node.path(link)
    }

    fn close(&mut self, now: Instant, link: LinkId, code: CloseCode) {
        self.node.close(now, link, code);
    }
}
