//! A network in memory, for simulation: it is driven by virtual time, and what happens to a message is drawn from a seed.
//!
//! Nodes have addresses and an endpoint each ([`Sim`], a [`Transport`]), all of one [`Net`]. A message arrives when its delay
//! and the time that the bandwidth allows have passed: the control message first, then its payload piece by piece. It may be
//! lost (nothing comes, and nobody is told: worse than any network under QUIC), come twice, or be overtaken by a later one.
//! Nodes that are [cut off](Net::cut) from each other, or are [down](Net::crash), lose their links after [`IDLE`]. A link
//! that is not up by then, or is asked for meanwhile, comes up soon after the end of that, if it was not given up.

mod conditions;
mod net;
#[cfg(test)]
mod tests;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use nix::sys::eventfd::EventFd;

pub use self::conditions::{Conditions, Fate};
pub use self::net::{IDLE, Net};
use crate::message::Control;
use crate::{CloseCode, Event, ExchangeId, LinkId, PathStats, Transport, TransportError};

/// A node's endpoint. See the module's documentation.
pub struct Sim {
    net: Net,
    addr: SocketAddr,
    /// Never readable: virtual time brings everything.
    fd: EventFd,
}

impl Sim {
    pub(super) fn new(net: Net, addr: SocketAddr) -> io::Result<Sim> {
        Ok(Sim { net, addr, fd: EventFd::new()? })
    }

    /// Where it is.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Transport for Sim {
    fn connect(&mut self, now: Instant, addr: SocketAddr) -> Result<LinkId, TransportError> {
        Ok(self.net.state().connect(now, self.addr, addr))
    }

    fn request(
        &mut self,
        now: Instant,
        link: LinkId,
        control: &Control,
        payload: &[&[u8]],
    ) -> Result<ExchangeId, TransportError> {
        self.net.state().request(now, self.addr, link, control, payload)
    }

    fn reply(
        &mut self,
        now: Instant,
        exchange: ExchangeId,
        control: &Control,
        payload: &[&[u8]],
    ) -> Result<(), TransportError> {
        self.net.state().reply(now, self.addr, exchange, control, payload)
    }

    fn abandon(&mut self, exchange: ExchangeId) {
        self.net.state().abandon(self.addr, exchange);
    }

    fn drive(&mut self, now: Instant) -> io::Result<bool> {
        Ok(self.net.state().advance(now, self.addr))
    }

    fn poll(&mut self, _: Instant) -> Option<Event> {
        self.net.state().poll(self.addr)
    }

    fn flush(&mut self, _: Instant) -> io::Result<()> {
        Ok(())
    }

    fn deadline(&self) -> Option<Instant> {
        self.net.state().deadline(self.addr)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn path(&self, link: LinkId) -> Option<PathStats> {
        self.net.state().path(self.addr, link)
    }

    fn close(&mut self, now: Instant, link: LinkId, code: CloseCode) {
        self.net.state().close(now, self.addr, link, code);
    }
}
