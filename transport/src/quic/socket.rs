//! A UDP socket which sends and receives datagrams of up to 64 KiB, by GSO and GRO where segments are smaller.
//!
//! Ancillary data costs 0.7 us an exchange, so there is as little of it as possible: no ECN, no timestamps, and the
//! local address only where an agent listens on all of its addresses.

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use bytes::BytesMut;
use nix::sys::socket::{getsockopt, setsockopt, sockopt};
use quinn_udp::{RecvMeta, UdpSockRef, UdpSocketState};

use super::limits::{MTU_MIN, SOCKET_BUFFER};

/// The largest datagram, and the most that GSO and GRO put together.
const DATAGRAM_MAX: usize = 65535;

/// A non-blocking UDP socket.
pub struct Socket {
    udp: UdpSocket,
    state: UdpSocketState,
    local: SocketAddr,
    buffer: Box<[u8]>,
    /// Each so many datagrams received one is lost.
    #[cfg(test)]
    pub lose_every: Option<usize>,
    #[cfg(test)]
    received: usize,
    /// Transmissions that the socket takes before its send buffer is full.
    #[cfg(test)]
    pub room: std::cell::Cell<Option<usize>>,
}

/// One or more datagrams of one sender, in the socket's buffer until the next are received.
#[derive(Clone, Copy)]
pub struct Received {
    pub from: SocketAddr,
    /// Our address that it was sent to.
    pub to: Option<IpAddr>,
    /// Bytes of all datagrams.
    pub len: usize,
    /// Length of each datagram but the last, which may be shorter.
    pub stride: usize,
}

impl Socket {
    /// Binds to `addr`. `answers`: replies must come from the address that was asked.
    pub fn bind(addr: SocketAddr, answers: bool) -> io::Result<Self> {
        let udp = UdpSocket::bind(addr)?;
        let state = UdpSocketState::new(UdpSockRef::from(&udp))?;
        // Beyond the system's limit only root may go; others get as much as it allows.
        if setsockopt(&udp, sockopt::RcvBufForce, &SOCKET_BUFFER).is_err() {
            setsockopt(&udp, sockopt::RcvBuf, &SOCKET_BUFFER)?;
        }
        if setsockopt(&udp, sockopt::SndBufForce, &SOCKET_BUFFER).is_err() {
            setsockopt(&udp, sockopt::SndBuf, &SOCKET_BUFFER)?;
        }
        setsockopt(&udp, sockopt::ReceiveTimestampns, &false)?;
        let local_address = answers && addr.ip().is_unspecified();
        if addr.is_ipv4() {
            setsockopt(&udp, sockopt::IpRecvTos, &false)?;
            setsockopt(&udp, sockopt::Ipv4PacketInfo, &local_address)?;
        } else {
            setsockopt(&udp, sockopt::Ipv6RecvPacketInfo, &local_address)?;
        }
        let local = udp.local_addr()?;
        Ok(Self {
            udp,
            state,
            local,
            buffer: vec![0; DATAGRAM_MAX].into_boxed_slice(),
            #[cfg(test)]
            lose_every: None,
            #[cfg(test)]
            received: 0,
            #[cfg(test)]
            room: None.into(),
        })
    }

    /// Where the socket is bound.
    pub fn local(&self) -> SocketAddr {
        self.local
    }

    /// Descriptor to poll.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.udp.as_fd()
    }

    /// True if oversized datagrams are refused rather than fragmented, so that path MTU can be probed.
    pub fn probes_mtu(&self) -> bool {
        !self.state.may_fragment()
    }

    /// Bytes of payload that the receive buffer holds; the system counts its own overhead as well, so half.
    pub fn receive_buffer(&self) -> usize {
        getsockopt(&self.udp, sockopt::RcvBuf).unwrap_or(0) / 2
    }

    /// Datagrams of `segment` bytes that one `send` may hold.
    pub fn segments(&self, segment: u16) -> usize {
        (DATAGRAM_MAX / usize::from(segment).max(1)).clamp(1, self.state.max_gso_segments())
    }

    /// Next datagrams, `None` if there are none.
    pub fn receive(&mut self) -> io::Result<Option<Received>> {
        let mut meta = [RecvMeta::default()];
        let mut buffers = [IoSliceMut::new(&mut self.buffer)];
        match self.state.recv(UdpSockRef::from(&self.udp), &mut buffers, &mut meta) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        }
        let [meta] = meta;
        #[cfg(test)]
        {
            self.received += 1;
            if self.lose_every.is_some_and(|every| self.received.is_multiple_of(every)) {
                return self.receive();
            }
        }
        Ok(Some(Received {
            from: meta.addr,
            to: meta.dst_ip,
            len: meta.len,
            stride: meta.stride.max(1),
        }))
    }

    /// The datagrams received last, each in a buffer of its own: what is kept of one does not keep the others.
    pub fn datagram(&self, received: &Received, index: usize) -> Option<BytesMut> {
        let bytes = self.buffer.get(..received.len)?;
        bytes.chunks(received.stride).nth(index).map(BytesMut::from)
    }

    /// Sends; false if the socket takes no more now. Datagrams that cannot go out are lost, as on any network.
    pub fn send(&self, transmit: &quinn_proto::Transmit, bytes: &[u8]) -> bool {
        #[cfg(test)]
        if let Some(room) = self.room.get() {
            if room == 0 {
                return false;
            }
            self.room.set(Some(room - 1));
        }
        let (contents, destination) = (&bytes[..transmit.size], transmit.destination);
        let sent = match (transmit.segment_size, transmit.src_ip) {
            (None, None) => self.udp.send_to(contents, destination).map(drop),
            (segment_size, src_ip) => {
                let ecn = None;
                let several =
                    quinn_udp::Transmit { destination, ecn, contents, segment_size, src_ip };
                self.state.try_send(UdpSockRef::from(&self.udp), &several)
            }
        };
        match sent {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
            Err(error) => {
                tracing::debug!(%error, to = %destination, len = contents.len(), "not sent");
                true
            }
            Ok(()) => true,
        }
    }
}

/// Path MTU of a connected IPv6 socket; nix knows the option for IPv4 only.
fn ipv6_mtu(socket: &UdpSocket) -> io::Result<i32> {
    let mut mtu: libc::c_int = 0;
    let mut len = size_of_val(&mtu) as libc::socklen_t;
    let (level, option) = (libc::IPPROTO_IPV6, libc::IPV6_MTU);
    // SAFETY: the descriptor is open, `mtu` is writable for `len` bytes, and both outlive the call.
    let rc = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, option, (&raw mut mtu).cast(), &raw mut len)
    };
    if rc == 0 { Ok(mtu) } else { Err(io::Error::last_os_error()) }
}

/// UDP payload bytes that the first hop towards `peer` carries.
pub fn route_mtu(mut peer: SocketAddr) -> io::Result<u16> {
    if let IpAddr::V4(ip) = peer.ip().to_canonical() {
        peer.set_ip(ip.into());
    }
    let (any, headers): (IpAddr, i32) = match peer {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED.into(), 20 + 8),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED.into(), 40 + 8),
    };
    let probe = UdpSocket::bind((any, 0))?;
    probe.connect(peer)?;
    let mtu = match peer {
        SocketAddr::V4(_) => getsockopt(&probe, sockopt::IpMtu)?,
        SocketAddr::V6(_) => ipv6_mtu(&probe)?,
    };
    Ok(u16::try_from(mtu.min(i32::from(u16::MAX)) - headers).unwrap_or(MTU_MIN).max(MTU_MIN))
}
