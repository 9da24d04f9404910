//! The other end of an exchange: what the process of a [`crate::peer::Peer`] does.

use std::net::UdpSocket;

use super::{quic, quinn};
use crate::cli::{PeerOptions, Protocol};
use crate::error::{BenchError, Trying};
use crate::peer::{REQUEST_LEN, receive};
use crate::placement::{Pinned, Wait};

/// `gms-bench peer`: serves one requester until it is killed.
pub(crate) fn serve(options: &PeerOptions) -> Result<(), BenchError> {
    let _pinned = Pinned::to(options.cpu)?;
    match (options.protocol, &options.keys) {
        (Protocol::Udp | Protocol::Udp8k, _) => serve_udp(options, options.protocol.reply_len()),
        (Protocol::Quic, Some(keys)) => quic::serve(options.bind, options.wait, keys),
        (Protocol::Quinn, Some(keys)) => quinn::serve(options.bind, options.mtu, keys),
        (Protocol::Quic | Protocol::Quinn, None) => {
            Err(BenchError::Invalid("this protocol needs --keys".into()))
        }
    }
}

fn serve_udp(options: &PeerOptions, reply_len: usize) -> Result<(), BenchError> {
    let wait = options.wait;
    let socket = UdpSocket::bind((options.bind, 0)).trying("cannot bind a UDP socket")?;
    println!("{}", socket.local_addr().trying("no local address")?);
    let (mut request, reply) = ([0; REQUEST_LEN], vec![7; reply_len]);
    let (_, requester) = socket.recv_from(&mut request).trying("cannot receive")?;
    socket.connect(requester).trying("cannot connect")?;
    socket.set_nonblocking(wait != Wait::Block).trying("cannot set the socket's mode")?;
    loop {
        socket.send(&reply).trying("cannot send")?;
        receive(&socket, wait, &mut request)?;
    }
}
