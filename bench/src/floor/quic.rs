//! The same exchange over gms-transport: encrypted, a stream for each exchange, and nothing behind it.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::{Duration, Instant};

use gms_transport::keys::{self, KeysError, Role};
use gms_transport::message::{Op, PAGE_LEN, PAGES_MAX, PageDescriptor, Status, WorkloadId};
use gms_transport::{Control, Event, ExchangeId, LinkId, Quic, Transport, TransportError};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use super::pages::Pages;
use crate::cli::Protocol;
use crate::error::{BenchError, Trying};
use crate::network::Network;
use crate::peer::Peer;
use crate::placement::{Pinned, Placement, Wait};
use crate::procfs::Meter;
use crate::samples::Samples;

/// An exchange, or a handshake, that takes longer has failed.
const LOST: Duration = Duration::from_secs(5);

/// Makes the keys of both ends.
pub(crate) fn make_keys(dir: &Path) -> Result<(), BenchError> {
    keys::init(dir).map_err(bad_keys)
}

/// `count` exchanges, and a tenth as many before them to warm up.
pub(crate) fn exchanges(
    network: &Network,
    placement: &Placement,
    keys: &Path,
    count: usize,
) -> Result<Samples, BenchError> {
    let (mut end, peer) = Requester::start(network, placement, keys)?;
    let _pinned = Pinned::to(placement.cpus.map(|cpus| cpus.0))?;
    let mut samples = Samples::new();
    let warm_up = count / 10;
    let mut meter = Meter::start(Some(peer.pid()))?;
    for number in 0..count + warm_up {
        if number == warm_up {
            meter = Meter::start(Some(peer.pid()))?;
        }
        end.page[number % PAGE_LEN] = 0;
        let start = Instant::now();
        end.exchange(start, number as u64)?;
        let took = start.elapsed();
        if end.page[number % PAGE_LEN] != 7 {
            return Err(BenchError::WrongBytes(format!("reply {number}")));
        }
        if number >= warm_up {
            samples.add(took);
        }
    }
    samples.cpu_us = meter.us()? / count as f64;
    Ok(samples)
}

/// This end of the link.
pub(crate) struct Requester {
    /// The endpoint.
    pub quic: Quic,
    /// Its link.
    pub link: LinkId,
    wait: Wait,
    page: [u8; PAGE_LEN],
}

impl Requester {
    /// Starts a peer and connects to it.
    pub(crate) fn start(
        network: &Network,
        placement: &Placement,
        keys: &Path,
    ) -> Result<(Requester, Peer), BenchError> {
        let peer = Peer::start(network, Protocol::Quic, placement, Some(keys))?;
        let identity = keys::load(keys, Role::Client).map_err(bad_keys)?;
        let mut quic = Quic::client((network.near(), 0).into(), &identity).map_err(failed)?;
        let start = Instant::now();
        let link = quic.connect(start, peer.addr).map_err(failed)?;
        let mut end = Requester { quic, link, wait: placement.wait, page: [0; PAGE_LEN] };
        match end.event(start)? {
            Event::Connected { .. } => Ok((end, peer)),
            other => Err(unexpected(&other)),
        }
    }

    fn exchange(&mut self, start: Instant, number: u64) -> Result<(), BenchError> {
        let request = Control::get(number, WorkloadId([1; 16]), 5);
        self.quic.request(start, self.link, &request, &[]).map_err(failed)?;
        self.quic.flush(start).trying("cannot send")?;
        loop {
            match self.event(start)? {
                Event::Control { .. } => {}
                Event::Payload { offset, bytes, .. } => {
                    // The transport promises that payloads stay within the length that was checked: a page.
                    let at = offset as usize;
                    self.page[at..at + bytes.len()].copy_from_slice(&bytes);
                }
                Event::Complete { .. } => return Ok(()),
                other => return Err(unexpected(&other)),
            }
        }
    }

    /// Waits for the next event; too long after `since` the link has failed.
    pub(crate) fn event(&mut self, since: Instant) -> Result<Event, BenchError> {
        if let Some(event) = self.quic.poll(since) {
            return Ok(event);
        }
        loop {
            let now = Instant::now();
            if now.duration_since(since) > LOST {
                return Err(BenchError::Invalid("no reply".into()));
            }
            let busy = self.quic.drive(now).trying("cannot receive")?;
            if let Some(event) = self.quic.poll(now) {
                return Ok(event);
            }
            self.quic.flush(now).trying("cannot send")?;
            if !busy {
                pause(&self.quic, self.wait, now)?;
            }
        }
    }
}

/// Replies to every request with the pages it asks for, until it is killed.
pub(crate) fn serve(bind: Ipv4Addr, wait: Wait, keys: &Path) -> Result<(), BenchError> {
    let identity = keys::load(keys, Role::Node).map_err(bad_keys)?;
    let mut quic = Quic::server((bind, 0).into(), &identity).map_err(failed)?;
    println!("{}", quic.local_addr());
    let (descriptors, pages) = ([0; PAGES_MAX * PageDescriptor::LEN], Pages::new());
    let mut asked: HashMap<ExchangeId, Control> = HashMap::new();
    loop {
        let now = Instant::now();
        let busy = quic.drive(now).trying("cannot receive")?;
        while let Some(event) = quic.poll(now) {
            match event {
                Event::Control { exchange, control } => drop(asked.insert(exchange, control)),
                Event::Complete { exchange } => {
                    let Some(request) = asked.remove(&exchange) else { continue };
                    let count = usize::from(request.count());
                    let done = u64::MAX >> (PAGES_MAX - count);
                    let reply = request.reply(Status::Ok).with_done(done);
                    let pages = pages.of(request.request, count);
                    let payload: &[&[u8]] = match (request.op(), count) {
                        (Some(Op::Get), 1) => &[pages],
                        (Some(Op::Get), _) => &[&descriptors[..count * PageDescriptor::LEN], pages],
                        _ => &[],
                    };
                    quic.reply(now, exchange, &reply, payload).map_err(failed)?;
                }
                _ => {}
            }
        }
        quic.flush(now).trying("cannot send")?;
        if !busy {
            pause(&quic, wait, now)?;
        }
    }
}

/// Waits for packets, for a deadline of the endpoint, or as long as `wait` says.
pub(crate) fn pause(quic: &Quic, wait: Wait, now: Instant) -> Result<(), BenchError> {
    if wait != Wait::Block {
        wait.pause();
        return Ok(());
    }
    let due = quic.deadline().map_or(LOST, |due| due.saturating_duration_since(now));
    let mut fds = [PollFd::new(quic.fd(), PollFlags::POLLIN)];
    match ppoll(&mut fds, Some(TimeSpec::from_duration(due.min(LOST))), None) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(error) => Err(error).trying("cannot wait"),
    }
}

/// An error of the transport.
pub(crate) fn failed(error: TransportError) -> BenchError {
    BenchError::Program { program: "the transport".into(), problem: format!("failed: {error}") }
}

/// An error of the keys.
pub(crate) fn bad_keys(error: KeysError) -> BenchError {
    BenchError::Program { program: "the key maker".into(), problem: format!("failed: {error}") }
}

/// An event for which nothing was done.
pub(crate) fn unexpected(event: &Event) -> BenchError {
    BenchError::Program { program: "the peer".into(), problem: format!("caused {event:?}") }
}
