//! The program `gms-agent` as a member, and others that misbehave.

mod common;

use common::program::{Agent, Keys, Log};
use common::{Client, LIMIT, WORKLOAD};
use gms_transport::keys::{self, Identity, Role};
use gms_transport::message::{Control, MemberEntry, Op, Status, WorkloadId};
use gms_transport::{CloseCode, CloseReason, Event, Quic, Transport};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use std::net::SocketAddr;
use std::process::{ChildStderr, Stdio};
use std::time::Instant;

/// The agent of `dir`, told to join the one at `seed`; its log and where it listens.
fn join(dir: &Keys, seed: SocketAddr) -> (Agent, Log<ChildStderr>, SocketAddr) {
    let seed = seed.to_string();
    let args = ["--listen", "127.0.0.1:0", "--export", "8M", "--keys", dir.text()];
    // An end that a test waits for does not wait for the grace.
    let args = [&args[..], &["--join", &seed, "--drain", "20"]].concat();
    let mut agent = Agent::start(&args, Stdio::piped());
    let mut log = Log::new(agent.stderr());
    let addr = log.address(&["addr="])[0];
    (agent, log, addr)
}

/// An agent that takes links and requests, and answers none.
struct Mute(Quic);

impl Mute {
    fn start(identity: &Identity) -> Self {
        Self(Quic::server(([127, 0, 0, 1], 0).into(), identity).expect("a socket"))
    }

    /// Drives it until such an event comes.
    fn until(&mut self, what: &str, mut is_it: impl FnMut(Event) -> bool) {
        let end = Instant::now() + LIMIT;
        loop {
            let now = Instant::now();
            assert!(now < end, "no {what} in {LIMIT:?}");
            self.0.drive(now).expect("a socket");
            while let Some(event) = self.0.poll(now) {
                if is_it(event) {
                    return;
                }
            }
            self.0.flush(now).expect("a socket");
            let until = self.0.deadline().unwrap_or(end).min(end);
            let ms = until.saturating_duration_since(now).as_millis().min(100) as u16;
            poll(&mut [PollFd::new(self.0.fd(), PollFlags::POLLIN)], PollTimeout::from(ms))
                .expect("poll");
        }
    }
}

#[test]
fn an_agent_gives_up_a_link_on_which_gossip_is_not_answered() {
    let dir = Keys::new("mute");
    keys::issue(&dir.0, Role::Node, "mute").expect("keys");
    let node = keys::load(&dir.0.join("mute"), Role::Node).expect("a key");
    let mut mute = Mute::start(&node);
    let (_agent, _log, _) = join(&dir, mute.0.local_addr());
    mute.until(
        "gossip",
        |event| matches!(event, Event::Control { control, .. } if control.op() == Some(Op::Gossip)),
    );
    mute.until("end of the link", |event| match event {
        Event::Closed { reason, .. } => {
            let by_peer =
                matches!(reason, CloseReason::ByPeer { code: Some(CloseCode::Goodbye), .. });
            assert!(by_peer, "{reason}");
            true
        }
        _ => false,
    });
}

#[test]
fn a_key_that_two_agents_have_is_told() {
    let dir = Keys::new("twin");
    let mut twin = Mute::start(&keys::load(&dir.0, Role::Node).expect("a key"));
    let (_agent, mut log, _) = join(&dir, twin.0.local_addr());
    twin.until("a link", |event| matches!(event, Event::Connected { .. }));
    twin.0.flush(Instant::now()).expect("a socket");
    log.line_with(&["an agent elsewhere has the id of this one", "127.0.0.1"]);
}

#[test]
fn an_agent_that_drains_names_no_members() {
    let dir = Keys::new("left");
    let nobody = ([127, 0, 0, 1], 9).into();
    let (agent, mut log, addr) = join(&dir, nobody);
    let mut client = Client::connect(addr, &keys::load(&dir.0, Role::Client).expect("a key"));
    client.hello();
    client.put(0, 8);
    let ask = Control::request(Op::Members, 1, WorkloadId::default());
    let (reply, payload) = client.ask(&ask, &[]);
    assert_eq!(reply.status(), Status::Ok);
    assert_eq!(MemberEntry::read_all(&payload).map(|members| members.len()), Some(1));
    // It waits for those who have pages until they say goodbye.
    agent.signal(Signal::SIGTERM);
    log.line_with(&["draining"]);
    let end = Instant::now() + LIMIT;
    loop {
        let (reply, payload) = client.ask(&ask, &[]);
        if reply.status() == Status::Draining {
            assert!(payload.is_empty());
            break;
        }
        assert!(Instant::now() < end, "{:?}", reply.status());
    }
    let goodbye = Control::request(Op::Goodbye, 1, WORKLOAD);
    assert_eq!(client.ask(&goodbye, &[]).0.status(), Status::Ok);
    assert_eq!(agent.wait().code(), Some(0));
}
