//! Bare datagrams between two processes: a request of 128 bytes, a reply of 128 bytes and a page of 4 or 8
//! KiB.

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use crate::cli::Protocol;
use crate::error::{BenchError, Trying};
use crate::network::Network;
use crate::peer::{Peer, REQUEST_LEN, receive};
use crate::placement::{Pinned, Placement, Wait};
use crate::procfs::Meter;
use crate::samples::Samples;

/// No datagram takes longer, unless it is lost.
const LOST: Duration = Duration::from_secs(5);

/// `count` exchanges, and a tenth as many before them to warm up.
pub(crate) fn exchanges(
    network: &Network,
    placement: &Placement,
    protocol: Protocol,
    count: usize,
) -> Result<Samples, BenchError> {
    let peer = Peer::start(network, protocol, placement, None)?;
    let _pinned = Pinned::to(placement.cpus.map(|cpus| cpus.0))?;
    let socket = UdpSocket::bind((network.near(), 0)).trying("cannot bind a UDP socket")?;
    socket.connect(peer.addr).trying("cannot connect")?;
    socket.set_read_timeout(Some(LOST)).trying("cannot set a deadline")?;
    socket.set_nonblocking(placement.wait != Wait::Block).trying("cannot set the mode")?;
    let (request, mut reply) = ([3; REQUEST_LEN], vec![0; protocol.reply_len()]);
    let mut samples = Samples::new();
    let warm_up = count / 10;
    let mut meter = Meter::start(Some(peer.pid()))?;
    for number in 0..count + warm_up {
        if number == warm_up {
            meter = Meter::start(Some(peer.pid()))?;
        }
        let start = Instant::now();
        socket.send(&request).trying("cannot send")?;
        let length = receive(&socket, placement.wait, &mut reply)?;
        let took = start.elapsed();
        if length != reply.len() || reply[number % length] != 7 {
            return Err(BenchError::WrongBytes(format!("a reply of {length} bytes")));
        }
        if number >= warm_up {
            samples.add(took);
        }
    }
    samples.cpu_us = meter.us()? / count as f64;
    Ok(samples)
}
