//! An agent of several threads: links land on all of them, and each sees what the others hold.

mod common;

use common::program::{Agent as Program, Keys, Log};
use common::{Client, LIMIT, WORKLOAD, content};
use gms_agent::limits::LINKS_MAX;
use gms_agent::{Agent, AgentError, Config};
use gms_policy::Bytes;
use gms_transport::keys::{self, Identity, Role, ephemeral};
use gms_transport::message::{Control, Op, PagesReply, Status};
use gms_transport::{CloseCode, CloseReason, Event, Quic, Transport};
use nix::sys::signal::Signal;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::process::{ChildStderr, Stdio};
use std::time::{Duration, Instant};

const THREADS: usize = 4;
/// That all of them land on one thread happens once in 4^15 times.
const LINKS: usize = 16;

fn config(addr: SocketAddr, threads: usize) -> Config {
    Config { threads, ..Config::new(addr, Bytes(8 << 20)) }
}

fn any() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

/// Threads that have links.
fn at_work(agent: &Agent) -> usize {
    agent.stats().iter().filter(|thread| thread.links.value() > 0).count()
}

fn connect(addr: SocketAddr, identity: &Identity) -> Vec<Client> {
    let mut clients: Vec<Client> = (0..LINKS).map(|_| Client::connect(addr, identity)).collect();
    clients.iter_mut().for_each(|client| assert_eq!(client.hello().status(), Status::Ok));
    clients
}

#[test]
fn what_is_put_on_one_link_is_read_on_all() {
    let (node, key) = ephemeral().expect("keys");
    let agent = Agent::spawn(&config(any(), THREADS), &node).expect("an agent");
    let mut clients = connect(agent.addr(), &key);
    assert!(at_work(&agent) > 1, "{:?}", agent.stats());
    for writer in 0..LINKS {
        let first = 100 * writer as u64;
        assert_eq!(clients[writer].put(first, 50).answer::<PagesReply>().done, (1 << 50) - 1);
        for page in [first, first + 49] {
            for reader in &mut clients {
                let (control, bytes) = reader.ask(&Control::get(page, WORKLOAD, page), &[]);
                assert!(bytes == content(page), "page {page}: {:?}", control.status());
            }
        }
    }
    // Whatever is free can be had on any link: all 2048 frames.
    let mut full = 0;
    for page in (10_000..).step_by(50) {
        let reply = clients[page as usize / 50 % LINKS].put(page, 50);
        if reply.status() == Status::Full {
            full += 1;
            assert_eq!(reply.feedback().frames_free, 0);
        }
        if full == LINKS {
            break;
        }
    }
    // A goodbye ends the session of all links.
    let goodbye = Control::request(Op::Goodbye, 1, WORKLOAD);
    assert_eq!(clients[0].ask(&goodbye, &[]).0.status(), Status::Ok);
    for client in &mut clients {
        let get = client.ask(&Control::get(1, WORKLOAD, 0), &[]).0;
        assert_eq!(get.status(), Status::Denied);
    }
    let status = Control::request(Op::Status, 1, WORKLOAD);
    let end = Instant::now() + LIMIT;
    while clients[1].ask(&status, &[]).0.feedback().frames_free < 2048 {
        assert!(Instant::now() < end, "the frames of an ended workload come free");
    }
    assert!(agent.stop(Duration::ZERO).is_ok());
    for mut client in clients {
        client.until("close", |client| client.closed.is_some());
        let draining = Some(CloseCode::Draining);
        let closed = client.closed;
        let is_told =
            |reason| matches!(reason, CloseReason::ByPeer { code, .. } if code == draining);
        assert!(closed.clone().is_some_and(is_told), "{closed:?}");
    }
}

#[test]
fn a_client_has_its_share_of_the_links_of_all_threads() {
    let (node, key) = ephemeral().expect("keys");
    let agent = Agent::spawn(&config(any(), THREADS), &node).expect("an agent");
    let mut quic = Quic::client(any(), &key).expect("a socket");
    let (mut up, mut down, end) = (0, 0, Instant::now() + LIMIT);
    // One socket is one thread's: others are there as well.
    let mut others = connect(agent.addr(), &key);
    let serves = |client: &mut Client| client.put(0, 1).status() == Status::Ok;
    for link in 0..LINKS_MAX - LINKS {
        // One that nobody drives for 5 s would take its link for lost.
        if link % 32 == 0 {
            assert!(others.iter_mut().all(serves));
        }
        quic.connect(Instant::now(), agent.addr()).expect("an address");
        let before = up + down;
        while up + down == before {
            assert!(Instant::now() < end, "links are neither made nor refused");
            quic.drive(Instant::now()).expect("drive");
            while let Some(event) = quic.poll(Instant::now()) {
                up += usize::from(matches!(event, Event::Connected { .. }));
                down += usize::from(matches!(event, Event::Closed { .. }));
            }
            quic.flush(Instant::now()).expect("flush");
        }
    }
    let of_threads = agent.stats().iter().map(|thread| thread.links.value()).sum::<u64>();
    assert!(down > 0 && of_threads as usize <= LINKS_MAX / 2, "{of_threads}: {up} up, {down} down");
    assert!(others.iter_mut().all(serves));
}

#[test]
fn a_port_in_use_is_refused_however_many_threads_share_it() {
    let (node, _) = ephemeral().expect("keys");
    for threads in [1, THREADS] {
        let agent = Agent::spawn(&config(any(), threads), &node).expect("an agent");
        for again in [1, THREADS] {
            let error = Agent::spawn(&config(agent.addr(), again), &node).expect_err("in use");
            assert!(matches!(error, AgentError::Listen { .. }), "{error}");
            let everywhere = SocketAddr::from(([0; 4], agent.addr().port()));
            let error = Agent::spawn(&config(everywhere, again), &node).expect_err("in use");
            assert!(matches!(error, AgentError::Listen { .. }), "{error}");
        }
        assert!(UdpSocket::bind(agent.addr()).is_err());
        // Free again when it has ended.
        let addr = agent.addr();
        agent.stop(Duration::ZERO).expect("ended");
        // A child that another test starts has our sockets, too, until it executes its program.
        let end = Instant::now() + LIMIT;
        while let Err(error) = Agent::spawn(&config(addr, threads), &node) {
            assert!(Instant::now() < end, "{error}");
            std::thread::yield_now();
        }
    }
}

/// The program with keys of `dir`, its log, and where it listens and serves metrics.
fn serve(dir: &Keys, listen: &str) -> (Program, Log<ChildStderr>, Vec<SocketAddr>) {
    let args = ["--listen", listen, "--export", "8M", "--keys", dir.text(), "--threads", "4"];
    let args = [&args[..], &["--metrics", "127.0.0.1:0"]].concat();
    let mut agent = Program::start(&args, Stdio::piped());
    let mut log = Log::new(agent.stderr());
    let addrs = log.address(&["addr=", "metrics="]);
    (agent, log, addrs)
}

#[test]
fn keys_are_renewed_and_an_end_is_told_on_all_threads() {
    let (dir, other) = (Keys::new("threads"), Keys::new("threads-renewed"));
    let (agent, mut log, addrs) = serve(&dir, "127.0.0.1:0");
    let mut former = connect(addrs[0], &keys::load(&dir.0, Role::Client).expect("a key"));
    let links = |metrics: &str| -> Vec<u64> {
        let lines = metrics.lines().filter(|line| line.starts_with("gms_agent_thread_links{"));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse().expect("a number")).collect()
    };
    let told = links(&metrics(addrs[1]));
    assert_eq!((told.len(), told.iter().sum()), (THREADS, LINKS as u64), "{told:?}");
    for file in ["ca.pem", "node.pem", "node-key.pem"] {
        std::fs::copy(other.0.join(file), dir.0.join(file)).expect("copied");
    }
    agent.signal(Signal::SIGHUP);
    let node = keys::load(&other.0, Role::Node).expect("a key").fingerprint().to_string();
    // Once all threads have them.
    log.line_with(&["keys renewed", &node]);
    let mut clients = connect(addrs[0], &keys::load(&other.0, Role::Client).expect("a key"));
    for client in &mut former {
        client.until("close", |client| client.closed.is_some());
    }
    clients[0].put(0, 8);
    agent.signal(Signal::SIGTERM);
    log.line_with(&["draining"]);
    // Who looks at it sees that as well.
    let drains = metrics(addrs[1]);
    assert!(drains.contains("\ngms_agent_draining 1\n"), "{drains}");
    for client in &mut clients {
        client.until("close", |client| client.closed.is_some());
    }
    assert_eq!(agent.wait().code(), Some(0));
}

fn metrics(addr: SocketAddr) -> String {
    let mut http = TcpStream::connect(addr).expect("metrics");
    http.set_read_timeout(Some(LIMIT)).expect("a deadline");
    http.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n").expect("request");
    let mut text = String::new();
    http.read_to_string(&mut text).expect("answer");
    text
}

#[test]
fn after_a_restart_every_link_is_reset_at_once() {
    let dir = Keys::new("threads-restart");
    let (agent, _, addrs) = serve(&dir, "127.0.0.1:0");
    let mut clients = connect(addrs[0], &keys::load(&dir.0, Role::Client).expect("a key"));
    // Each on its own: one that nobody drives for 5 s would take its link for lost.
    let wait = |client: &mut Client| client.until("close", |client| client.closed.is_some());
    std::thread::scope(|scope| {
        let pinging: Vec<_> =
            clients.iter_mut().map(|client| scope.spawn(|| wait(client))).collect();
        agent.signal(Signal::SIGKILL);
        agent.wait();
        let (_again, _, _) = serve(&dir, &addrs[0].to_string());
        pinging.into_iter().for_each(|client| client.join().expect("a reset"));
    });
    for client in &clients {
        assert!(matches!(client.closed, Some(CloseReason::Reset { .. })), "{:?}", client.closed);
    }
}
