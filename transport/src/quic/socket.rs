//! A UDP socket which sends and receives datagrams of up to 64 KiB, by GSO and GRO where segments are smaller.
//!
//! Ancillary data costs 0.7 us an exchange, so there is as little of it as possible: no ECN, no timestamps, and the
//! local address only where an agent listens on all of its addresses.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use bytes::BytesMut;
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, SockaddrStorage, bind, getsockopt,
    sendmsg, setsockopt, socket, sockopt,
};
use quinn_udp::{RecvMeta, UdpSockRef, UdpSocketState};
use socket2::SockRef;

use super::limits::{ANSWERS_PART, EARLY_MAX, MTU_MIN, SOCKET_BUFFER};
use super::sieve::{Passes, filter};

/// The largest datagram, and the most that GSO and GRO put together.
const DATAGRAM_MAX: usize = 65535;

/// A non-blocking UDP socket.
pub(super) struct Socket {
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
pub(super) struct Received {
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
    pub(super) fn bind(addr: SocketAddr, answers: bool) -> io::Result<Self> {
        Self::over(UdpSocket::bind(addr)?, answers)
    }

    /// Binds `count` sockets to `addr`, whose replies come from the address that was asked. The kernel divides the peers
    /// among them by a hash of both addresses and ports (SO_REUSEPORT), as long as all of them are there.
    pub(super) fn bind_group(addr: SocketAddr, count: usize) -> io::Result<Vec<Self>> {
        // As a socket that shares nothing: an address that another process has is refused, though it would share it.
        let first = Self::bind(addr, true)?;
        let addr = first.local;
        let mut sockets = vec![first];
        if count > 1 {
            setsockopt(&sockets[0].udp, sockopt::ReusePort, &true)?;
        }
        let family = if addr.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        while sockets.len() < count {
            let udp = socket(family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
            setsockopt(&udp, sockopt::ReusePort, &true)?;
            bind(udp.as_raw_fd(), &SockaddrStorage::from(addr))?;
            sockets.push(Self::over(udp.into(), true)?);
        }
        if count > 1 {
            // What came before the last was bound may be another's from now on. It is lost, and will be sent again.
            for socket in &mut sockets {
                let mut left = EARLY_MAX;
                while left > 0 && socket.receive()?.is_some() {
                    left -= 1;
                }
            }
        }
        Ok(sockets)
    }

    fn over(udp: UdpSocket, answers: bool) -> io::Result<Self> {
        let addr = udp.local_addr()?;
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
        Ok(Self {
            udp,
            state,
            local: addr,
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
    pub(super) fn local(&self) -> SocketAddr {
        self.local
    }

    /// Descriptor to poll.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.udp.as_fd()
    }

    /// True if oversized datagrams are refused rather than fragmented, so that path MTU can be probed.
    pub(super) fn probes_mtu(&self) -> bool {
        !self.state.may_fragment()
    }

    /// Bytes of payload that the receive buffer holds; the system counts its own overhead as well, so half.
    pub(super) fn receive_buffer(&self) -> usize {
        getsockopt(&self.udp, sockopt::RcvBuf).unwrap_or(0) / 2
    }

    /// Datagrams of `segment` bytes that one `send` may hold.
    pub(super) fn segments(&self, segment: u16) -> usize {
        (DATAGRAM_MAX / usize::from(segment).max(1)).clamp(1, self.state.max_gso_segments())
    }

    /// Next datagrams, `None` if there are none; what cannot be answered has length zero.
    pub(super) fn receive(&mut self) -> io::Result<Option<Received>> {
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
        let (from, to) = (meta.addr, meta.dst_ip);
        // Nothing, rather than the next: a flood of them must not keep the caller here.
        let len = if is_answerable(from, to) { meta.len } else { 0 };
        Ok(Some(Received { from, to, len, stride: meta.stride.max(1) }))
    }

    /// The datagrams received last, each in a buffer of its own: what is kept of one does not keep the others.
    pub(super) fn datagram(&self, received: &Received, index: usize) -> Option<BytesMut> {
        let bytes = self.buffer.get(..received.len)?;
        bytes.chunks(received.stride).nth(index).map(BytesMut::from)
    }

    /// Such parts of what strangers send pass from now on. Where the system refuses, all do.
    pub(super) fn sieve(&self, passes: Passes) {
        let socket = SockRef::from(&self.udp);
        let filter = filter(passes);
        let put_together = setsockopt(&self.udp, sockopt::UdpGroSegment, &filter.is_none());
        let done = match filter {
            Some(filter) => socket.attach_filter(&filter),
            None => socket.detach_filter(),
        };
        if let Err(error) = put_together.map_err(io::Error::from).and(done) {
            tracing::debug!(%error, "no filter of packets");
        }
    }

    /// Whether enough of the send buffer is free for what is not of links.
    pub(super) fn takes_answers(&self) -> bool {
        let mut taken: libc::c_int = 0;
        // SAFETY: the request writes an int where it is told to.
        let rc = unsafe { libc::ioctl(self.udp.as_raw_fd(), libc::TIOCOUTQ, &raw mut taken) };
        let most = getsockopt(&self.udp, sockopt::SndBuf).unwrap_or(0) / ANSWERS_PART;
        rc == 0 && usize::try_from(taken).is_ok_and(|taken| taken < most)
    }

    /// Sends; false if the socket takes no more now. Datagrams that cannot go out are lost, as on any network.
    pub(super) fn send(&self, transmit: &quinn_proto::Transmit, bytes: &[u8]) -> bool {
        #[cfg(test)]
        if let Some(room) = self.room.get() {
            if room == 0 {
                return false;
            }
            self.room.set(Some(room - 1));
        }
        let (contents, destination) = (&bytes[..transmit.size], transmit.destination);
        let segment = transmit.segment_size.filter(|segment| *segment < contents.len());
        let mut sent = self.send_from(transmit.src_ip, destination, contents, segment);
        if let (Some(segment), Err(error)) = (segment, &sent)
            && matches!(error.raw_os_error(), Some(libc::EIO | libc::EINVAL))
        {
            // Some devices take no segments, and some addresses nothing: no reason to send no segments to others. If the
            // socket is full half way, the first ones are sent again later, which QUIC does not mind.
            sent = contents
                .chunks(segment)
                .try_for_each(|one| self.send_from(transmit.src_ip, destination, one, None));
        }
        match sent {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
            Err(error) => {
                tracing::debug!(%error, to = %destination, len = contents.len(), "not sent");
                true
            }
            Ok(()) => true,
        }
    }

    /// Sends from our address `from`, in datagrams of `segment` bytes.
    fn send_from(
        &self,
        from: Option<IpAddr>,
        to: SocketAddr,
        contents: &[u8],
        segment: Option<usize>,
    ) -> io::Result<()> {
        let send = |ancillary: &[ControlMessage]| {
            let (fd, to) = (self.udp.as_raw_fd(), SockaddrStorage::from(to));
            let flags = MsgFlags::MSG_DONTWAIT;
            Ok(sendmsg(fd, &[IoSlice::new(contents)], ancillary, flags, Some(&to)).map(drop)?)
        };
        let segment = segment.map(|segment| u16::try_from(segment).unwrap_or(u16::MAX));
        let (mut v4, mut v6) = (None, None);
        match from {
            Some(IpAddr::V4(ip)) => {
                let ipi_spec_dst = libc::in_addr { s_addr: ip.to_bits().to_be() };
                let ipi_addr = libc::in_addr { s_addr: 0 };
                v4 = Some(libc::in_pktinfo { ipi_ifindex: 0, ipi_spec_dst, ipi_addr });
            }
            // Also an IPv4 address of an IPv6 socket.
            Some(IpAddr::V6(ip)) => {
                let ipi6_addr = libc::in6_addr { s6_addr: ip.octets() };
                v6 = Some(libc::in6_pktinfo { ipi6_addr, ipi6_ifindex: 0 });
            }
            None => {}
        }
        let segment = segment.as_ref().map(ControlMessage::UdpGsoSegments);
        let v4 = v4.as_ref().map(ControlMessage::Ipv4PacketInfo);
        let source = v4.or(v6.as_ref().map(ControlMessage::Ipv6PacketInfo));
        match (segment, source) {
            (None, None) => self.udp.send_to(contents, to).map(drop),
            (Some(segment), Some(source)) => send(&[segment, source]),
            (Some(only), None) | (None, Some(only)) => send(&[only]),
        }
    }
}

/// Whether an answer to what `from` sent `to` our address can go out.
fn is_answerable(from: SocketAddr, to: Option<IpAddr>) -> bool {
    let to_many = |to: IpAddr| match to.to_canonical() {
        IpAddr::V4(ip) => ip.is_multicast() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_multicast(),
    };
    from.port() != 0 && !to.is_some_and(to_many)
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
pub(super) fn route_mtu(mut peer: SocketAddr) -> io::Result<u16> {
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

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use quinn_proto::Transmit;

    use super::*;

    fn transmit(to: SocketAddr, size: usize, segment: usize, from: Option<IpAddr>) -> Transmit {
        let segment_size = Some(segment).filter(|segment| *segment < size);
        Transmit { destination: to, ecn: None, size, segment_size, src_ip: from }
    }

    fn answering(addr: &str) -> Socket {
        Socket::bind(addr.parse().unwrap(), true).unwrap()
    }

    fn receiver() -> UdpSocket {
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        udp.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        udp
    }

    /// Checks that `udp` receives `count` datagrams of `len` bytes of their number each, from port `port`.
    fn arrive(udp: &UdpSocket, count: usize, len: usize, port: u16) {
        for number in 0..count {
            let mut datagram = [0; 2000];
            let (got, from) = udp.recv_from(&mut datagram).unwrap();
            assert_eq!(from, SocketAddr::from(([127, 0, 0, 1], port)));
            assert_eq!(&datagram[..got], &vec![number as u8; len]);
        }
    }

    #[test]
    fn segments_of_an_answer_arrive_as_datagrams() {
        let local: IpAddr = [127, 0, 0, 1].into();
        let mapped: IpAddr = Ipv4Addr::LOCALHOST.to_ipv6_mapped().into();
        for (bind, from) in [("0.0.0.0:0", local), ("[::]:0", mapped)] {
            let (socket, udp) = (answering(bind), receiver());
            let to = SocketAddr::new(from, udp.local_addr().unwrap().port());
            let bytes: Vec<u8> = (0..3u8).flat_map(|number| [number; 1200]).collect();
            assert!(socket.send(&transmit(to, 3600, 1200, Some(from)), &bytes));
            assert!(socket.send(&transmit(to, 3600, 1200, None), &bytes));
            (0..2).for_each(|_| arrive(&udp, 3, 1200, socket.local().port()));
            assert!(socket.send(&transmit(to, 1200, 1200, Some(from)), &bytes));
            arrive(&udp, 1, 1200, socket.local().port());
        }
    }

    #[test]
    fn what_cannot_go_out_leaves_segmentation_as_it_is() {
        let (socket, udp) = (answering("0.0.0.0:0"), receiver());
        let (before, to) = (socket.segments(1200), udp.local_addr().unwrap());
        let local = to.ip();
        let nowhere = SocketAddr::new(local, 0);
        for (to, from) in [(to, [255; 4].into()), (to, [224, 0, 0, 1].into()), (nowhere, local)] {
            for size in [100, 3000] {
                assert!(socket.send(&transmit(to, size, 1200, Some(from)), &[0; 3000]));
                assert_eq!(socket.segments(1200), before, "{from} to {to}");
            }
        }
    }

    #[test]
    fn segments_that_do_not_go_out_together_go_one_by_one() {
        let (socket, udp) = (answering("0.0.0.0:0"), receiver());
        let to = udp.local_addr().unwrap();
        // More than the system takes in one call.
        let bytes: Vec<u8> = (0..200u8).flat_map(|number| [number; 10]).collect();
        assert!(socket.send(&transmit(to, bytes.len(), 10, None), &bytes));
        arrive(&udp, 200, 10, socket.local().port());
    }

    #[test]
    fn only_what_one_host_sent_to_one_is_answerable() {
        let is =
            |from: &str, to: &str| is_answerable(from.parse().unwrap(), Some(to.parse().unwrap()));
        assert!(is("10.0.0.1:1", "10.0.0.2") && is("[::1]:1", "::1"));
        assert!(is_answerable("10.0.0.1:1".parse().unwrap(), None));
        assert!(!is("10.0.0.1:0", "10.0.0.2"));
        for many in [
            "255.255.255.255",
            "224.0.0.1",
            "::ffff:239.1.1.1",
            "::ffff:255.255.255.255",
            "ff02::1",
        ] {
            assert!(!is("10.0.0.1:1", many), "{many}");
        }
    }

    #[test]
    fn what_cannot_be_answered_is_not_received() {
        let group = Ipv4Addr::new(239, 255, 77, 3);
        let mut socket = answering("0.0.0.0:0");
        let port = socket.local().port();
        socket.udp.join_multicast_v4(&group, &Ipv4Addr::LOCALHOST).unwrap();
        let stranger = receiver();
        let lo = libc::in_addr { s_addr: Ipv4Addr::LOCALHOST.to_bits().to_be() };
        // SAFETY: the option's value is an `in_addr`, which outlives the call.
        let rc = unsafe {
            let (level, option) = (libc::IPPROTO_IP, libc::IP_MULTICAST_IF);
            let len = size_of_val(&lo) as libc::socklen_t;
            libc::setsockopt(stranger.as_raw_fd(), level, option, (&raw const lo).cast(), len)
        };
        assert_eq!(rc, 0);
        stranger.send_to(b"to all", (group, port)).unwrap();
        stranger.send_to(b"to one", (Ipv4Addr::LOCALHOST, port)).unwrap();
        let start = Instant::now();
        let mut datagrams = Vec::new();
        while datagrams.is_empty() {
            assert!(start.elapsed() < Duration::from_secs(20));
            let Some(received) = socket.receive().unwrap() else { continue };
            datagrams.extend((0..).map_while(|index| socket.datagram(&received, index)));
        }
        assert_eq!(datagrams, [&b"to one"[..]]);
    }
}
