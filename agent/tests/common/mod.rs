//! A client of agents which drives its own endpoint, every wait with a deadline.

#![allow(dead_code, reason = "not every test uses all of it")]

pub(crate) mod program;

use gms_transport::keys::Identity;
use gms_transport::message::{Control, PageDescriptor, WorkloadId};
use gms_transport::{CloseReason, Event, ExchangeId, LinkId, Quic, Transport};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

pub(crate) const WORKLOAD: WorkloadId = WorkloadId([3; 16]);
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

pub(crate) struct Client {
    pub quic: Quic,
    pub link: LinkId,
    pub closed: Option<CloseReason>,
    controls: HashMap<ExchangeId, (Control, Vec<u8>)>,
    done: Vec<ExchangeId>,
    connected: bool,
}

impl Client {
    pub(crate) fn connect(addr: SocketAddr, identity: &Identity) -> Self {
        // `localhost` is ::1 first where the machine has both.
        let own: IpAddr =
            if addr.is_ipv6() { Ipv6Addr::LOCALHOST.into() } else { Ipv4Addr::LOCALHOST.into() };
        let mut quic = Quic::client((own, 0).into(), identity).expect("a socket");
        let link = quic.connect(Instant::now(), addr).expect("an address");
        let (controls, done) = (HashMap::new(), Vec::new());
        let mut client = Self { quic, link, closed: None, controls, done, connected: false };
        client.until("a link", |client| client.connected || client.closed.is_some());
        client
    }

    /// Drives the endpoint until `done`.
    pub(crate) fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let end = Instant::now() + LIMIT;
        while !done(self) {
            let now = Instant::now();
            assert!(now < end, "no {what} in {LIMIT:?}; closed: {:?}", self.closed);
            let mut busy = self.quic.drive(now).expect("drive");
            while let Some(event) = self.quic.poll(now) {
                busy = true;
                self.handle(event);
            }
            self.quic.flush(now).expect("flush");
            if !busy && !done(self) {
                let deadline = self.quic.deadline().unwrap_or(end).min(end);
                let ms = deadline.saturating_duration_since(now).as_millis().min(1000) as u16;
                let mut fds = [PollFd::new(self.quic.fd(), PollFlags::POLLIN)];
                poll(&mut fds, PollTimeout::from(ms)).expect("poll");
            }
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Connected { .. } => self.connected = true,
            Event::Closed { reason, .. } => self.closed = Some(reason),
            Event::Control { exchange, control } => {
                self.controls.insert(exchange, (control, Vec::new()));
            }
            Event::Payload { exchange, offset, bytes } => {
                let payload = &mut self.controls.get_mut(&exchange).expect("control first").1;
                assert_eq!(payload.len(), offset as usize);
                payload.extend_from_slice(&bytes);
            }
            Event::Complete { exchange } => self.done.push(exchange),
            Event::Aborted { exchange, reason } => panic!("{exchange:?} aborted: {reason}"),
        }
    }

    pub(crate) fn send(&mut self, control: &Control, payload: &[&[u8]]) -> ExchangeId {
        let id = self.quic.request(Instant::now(), self.link, control, payload).expect("request");
        self.quic.flush(Instant::now()).expect("flush");
        id
    }

    pub(crate) fn reply(&mut self, exchange: ExchangeId) -> (Control, Vec<u8>) {
        self.until("reply", |client| client.done.contains(&exchange) || client.closed.is_some());
        self.done.retain(|&done| done != exchange);
        self.controls.remove(&exchange).unwrap_or_else(|| panic!("closed: {:?}", self.closed))
    }

    pub(crate) fn ask(&mut self, control: &Control, payload: &[&[u8]]) -> (Control, Vec<u8>) {
        let id = self.send(control, payload);
        self.reply(id)
    }

    pub(crate) fn hello(&mut self) -> Control {
        self.ask(&Control::hello(1, WORKLOAD, 2000), &[]).0
    }

    /// Puts pages `first..first + count`, each filled by [`content`].
    pub(crate) fn put(&mut self, first: u64, count: u16) -> Control {
        let heads: Vec<PageDescriptor> = (first..first + u64::from(count))
            .map(|page| PageDescriptor::new(page, !page))
            .collect();
        let pages: Vec<u8> = heads.iter().flat_map(|head| content(head.page())).collect();
        self.ask(&Control::put(first, WORKLOAD, count), &[heads.as_bytes(), &pages]).0
    }
}

/// Content of a page, different in each.
pub(crate) fn content(page: u64) -> [u8; 4096] {
    std::array::from_fn(|at| (page.wrapping_mul(0x9E37_79B9) >> (at % 4 * 8)) as u8 ^ at as u8)
}
