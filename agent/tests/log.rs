//! The log of `gms-agent` under peers that would fill it, and when nobody reads it.

mod common;

use common::program::{Agent, Keys, Log};
use common::{Client, WORKLOAD};
use gms_transport::keys::{self, Identity, Role};
use gms_transport::message::{Control, Op, PagesReply, Status};
use gms_transport::{Quic, Transport};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use rustls::Side;
use rustls::crypto::aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256;
use rustls::quic::Version;
use std::io::{BufRead, PipeReader, PipeWriter, Write, pipe};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::Instant;

/// An agent whose log is a pipe of which the test has both ends.
struct Logged {
    agent: Agent,
    log: Log<PipeReader>,
    end: PipeWriter,
    addr: SocketAddr,
}

fn serve(keys: &Keys) -> Logged {
    let (log, end) = pipe().expect("a pipe");
    let args = ["--listen", "127.0.0.1:0", "--export", "8388608", "--keys", keys.text()];
    let agent = Agent::start(&args, end.try_clone().expect("a descriptor"));
    let mut log = Log::new(log);
    let addr = log.address(&["addr="])[0];
    Logged { agent, log, end, addr }
}

fn stop(agent: Agent) {
    agent.signal(Signal::SIGTERM);
    assert_eq!(agent.wait().code(), Some(0));
}

fn client(keys: &Keys) -> Identity {
    keys::load(&keys.0, Role::Client).expect("a client key")
}

/// The first datagram of a client of the agent, which never answers.
fn initial(identity: &Identity) -> Vec<u8> {
    let sink = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let mut quic = Quic::client(([127, 0, 0, 1], 0).into(), identity).expect("a socket");
    quic.connect(Instant::now(), sink.local_addr().expect("bound")).expect("an address");
    quic.flush(Instant::now()).expect("flush");
    let mut datagram = vec![0; 1 << 16];
    let (len, _) = sink.recv_from(&mut datagram).expect("an Initial");
    datagram.truncate(len);
    datagram
}

/// An Initial packet to the connection id that `first` chose: a PING, and a token which was never given (RFC 9000,
/// section 17.2.2, and RFC 9001, section 5).
fn initial_with_token(first: &[u8], number: u16) -> Vec<u8> {
    let id = &first[6..6 + usize::from(first[5])];
    let suite = TLS13_AES_128_GCM_SHA256.tls13().expect("TLS 1.3").quic_suite().expect("of QUIC");
    let keys = suite.keys(id, Side::Client, Version::V1).local;
    let (token, mut payload) = ([7], [1u8, 0, 0, 0]);
    // Long header, Initial, a packet number of two bytes.
    let mut packet = vec![0xc1, 0, 0, 0, 1, id.len() as u8];
    packet.extend_from_slice(id);
    packet.extend_from_slice(&[0, token.len() as u8, token[0]]);
    packet.push((2 + payload.len() + 16) as u8);
    let number_at = packet.len();
    packet.extend_from_slice(&number.to_be_bytes());
    let tag =
        keys.packet.encrypt_in_place(number.into(), &packet, &mut payload).expect("encrypted");
    packet.extend_from_slice(&payload);
    packet.extend_from_slice(tag.as_ref());
    let (head, rest) = packet.split_at_mut(number_at);
    let (number, sampled) = rest.split_at_mut(2);
    let sample = &sampled[2..2 + keys.header.sample_len()];
    keys.header.encrypt_in_place(sample, &mut head[0], number).expect("protected");
    packet
}

#[test]
fn packets_of_strangers_are_not_logged_one_by_one() {
    let keys = Keys::new("log-strangers");
    let Logged { agent, log, end, addr } = serve(&keys);
    drop(end);
    let log = log.into_reader();
    let lines =
        std::thread::spawn(|| log.lines().map(|line| line.expect("log")).collect::<Vec<_>>());
    let first = initial(&client(&keys));
    let stranger = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    stranger.send_to(&first, addr).expect("send");
    let packets: Vec<Vec<u8>> = (100..10_100).map(|n| initial_with_token(&first, n)).collect();
    for datagram in packets.chunks(25) {
        stranger.send_to(&datagram.concat(), addr).expect("send");
    }
    // Who comes after them is served after them.
    let mut honest = Client::connect(addr, &client(&keys));
    assert_eq!(honest.hello().status(), Status::Ok);
    stop(agent);
    let lines = lines.join().expect("the log");
    assert!(lines.iter().any(|line| line.contains("workload connected")), "{lines:?}");
    assert!(lines.len() < 50, "{} lines: {:?}", lines.len(), &lines[..10]);
}

/// Fills the pipe: whoever writes to it then waits.
fn fill(pipe: &mut PipeWriter) {
    let page = [b'\n'; 4096];
    loop {
        let mut fds = [PollFd::new(pipe.as_fd(), PollFlags::POLLOUT)];
        if poll(&mut fds, PollTimeout::ZERO).expect("poll") == 0 {
            return;
        }
        pipe.write_all(&page).expect("a page");
    }
}

#[test]
fn a_log_that_nobody_reads_delays_nobody() {
    let keys = Keys::new("log-unread");
    let Logged { agent, mut log, mut end, addr } = serve(&keys);
    fill(&mut end);
    let mut honest = Client::connect(addr, &client(&keys));
    assert_eq!(honest.hello().status(), Status::Ok);
    assert_eq!(honest.put(0, 8).answer::<PagesReply>().done, 0xff);
    let goodbye = Control::request(Op::Goodbye, 9, WORKLOAD);
    assert_eq!(honest.ask(&goodbye, &[]).0.status(), Status::Ok);
    // What was said meanwhile comes when it is read.
    log.line_with(&["workload connected"]);
    log.line_with(&["workload ended"]);
    // Nor does it keep the agent from ending.
    fill(&mut end);
    stop(agent);
}
