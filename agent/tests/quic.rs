//! An agent in a thread, over real QUIC on the loopback.

mod common;

use common::{Client, LIMIT, WORKLOAD, content};
use gms_agent::{Agent, AgentError, Config};
use gms_policy::Bytes;
use gms_transport::keys::ephemeral;
use gms_transport::message::{Control, HelloReply, Op, PageDescriptor, PagesReply, Status};
use gms_transport::{CloseCode, CloseReason, Transport};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

const LOOPBACK: std::net::IpAddr = std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

fn config(export: u64) -> Config {
    Config::new(SocketAddr::new(LOOPBACK, 0), Bytes(export))
}

#[test]
fn pages_come_back_as_they_were() {
    let (node, key) = ephemeral().expect("keys");
    let agent = Agent::spawn(&config(16 << 20), &node).expect("an agent");
    let mut client = Client::connect(agent.addr(), &key);
    let hello = client.hello();
    assert_eq!(
        (hello.status(), hello.feedback().frames_free, hello.answer::<HelloReply>().lease_ms),
        (Status::Ok, 4096, 2000)
    );
    for first in (0..4000).step_by(50) {
        assert_eq!(client.put(first, 50).answer::<PagesReply>().done, (1 << 50) - 1);
    }
    for page in (0..4000).step_by(37) {
        let (control, bytes) = client.ask(&Control::get(page, WORKLOAD, page), &[]);
        assert!(
            bytes == content(page) && control.answer::<PagesReply>().check == !page,
            "page {page}"
        );
        assert_eq!(control.feedback().frames_free, 96);
    }
    let wanted: Vec<PageDescriptor> =
        (3990..4054).map(|page| PageDescriptor::new(page, 0)).collect();
    let (control, bytes) = client.ask(&Control::get_many(1, WORKLOAD, 64), &[wanted.as_bytes()]);
    assert_eq!(
        (control.status(), control.answer::<PagesReply>().done),
        (Status::NotFound, (1 << 10) - 1)
    );
    let (heads, pages) = bytes.split_at(10 * PageDescriptor::LEN);
    let heads = <[PageDescriptor]>::ref_from_bytes(heads).expect("descriptors");
    for (head, bytes) in heads.iter().zip(pages.chunks(4096)) {
        assert_eq!((head.check(), bytes), (!head.page(), &content(head.page())[..]));
    }
    let stats = agent.stats()[0].clone();
    assert_eq!((stats.puts.value(), stats.misses.value()), (4000, 54));
    assert!(agent.stop(Duration::ZERO).is_ok());
    client.until("close", |client| client.closed.is_some());
    let closed = client.closed;
    assert!(
        matches!(closed, Some(CloseReason::ByPeer { code: Some(CloseCode::Draining), .. })),
        "{closed:?}"
    );
}

#[test]
fn frames_are_freed_when_the_lease_is_lost_and_when_the_workload_ends() {
    let (node, key) = ephemeral().expect("keys");
    let agent = Agent::spawn(&config(1 << 20), &node).expect("an agent");
    let mut client = Client::connect(agent.addr(), &key);
    client.hello();
    client.put(0, 64);
    let since = Instant::now();
    drop(client);
    let mut other = Client::connect(agent.addr(), &key);
    // Silence is noticed by the transport, then the lease of 2 s runs.
    let status = Control::request(Op::Status, 1, WORKLOAD);
    other.until("freed frames", |_| {
        agent.gauges().frames_free.value() == 256 || since.elapsed() > LIMIT
    });
    assert!(since.elapsed() >= Duration::from_secs(2));
    assert_eq!(agent.stats()[0].expired.value(), 1);
    assert_eq!(other.ask(&status, &[]).0.feedback().frames_free, 256);
    other.hello();
    assert_eq!(other.ask(&Control::get(1, WORKLOAD, 1), &[]).0.status(), Status::NotFound);
    other.put(0, 64);
    other.ask(&Control::request(Op::Goodbye, 2, WORKLOAD), &[]);
    let freed = |other: &mut Client| other.ask(&status, &[]).0.feedback().frames_free == 256;
    let end = Instant::now() + LIMIT;
    while !freed(&mut other) {
        assert!(Instant::now() < end);
    }
}

#[test]
fn pages_of_an_endless_lease_are_there_when_a_longer_one_has_ended() {
    let (node, key) = ephemeral().expect("keys");
    let endless = Config { endless_leases: true, ..config(1 << 20) };
    let leases = [(endless, 1000), (config(1 << 20), 2000)];
    let [kept, lost] = leases.map(|(config, lease_ms)| {
        let agent = Agent::spawn(&config, &node).expect("an agent");
        let mut client = Client::connect(agent.addr(), &key);
        client.ask(&Control::hello(1, WORKLOAD, lease_ms), &[]);
        client.put(0, 64);
        client.quic.close(Instant::now(), client.link, CloseCode::Goodbye);
        client.until("close", |client| client.closed.is_some());
        agent
    });
    let mut other = Client::connect(kept.addr(), &key);
    other.until("an end of a lease", |_| lost.stats()[0].expired.value() == 1);
    other.hello();
    assert_eq!(other.ask(&Control::get(1, WORKLOAD, 1), &[]).0.status(), Status::Ok);
    assert_eq!(kept.stats()[0].expired.value(), 0);
}

#[test]
fn an_agent_which_cannot_start_says_why() {
    let (node, _) = ephemeral().expect("keys");
    let agent = Agent::spawn(&config(1 << 20), &node).expect("an agent");
    let taken = Config { listen: agent.addr(), ..config(1 << 20) };
    let error = Agent::spawn(&taken, &node).expect_err("the port is in use");
    assert!(matches!(error, AgentError::Listen { .. }), "{error}");
    let error = Agent::spawn(&config(u64::MAX), &node).expect_err("too large");
    assert!(matches!(error, AgentError::TooLarge { .. }), "{error}");
}

/// CPU time of this process's threads named `agent`, in clock ticks.
fn agent_ticks() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("proc");
    let stat = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("stat")).ok();
    let of_agents = tasks.flatten().filter_map(stat).filter(|stat| stat.contains("(agent)"));
    of_agents
        .map(|stat| {
            let fields: Vec<&str> =
                stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
            fields[11].parse::<u64>().expect("utime") + fields[12].parse::<u64>().expect("stime")
        })
        .sum()
}

#[test]
fn an_idle_agent_uses_no_cpu() {
    // In a process of its own, as other tests' agents are not idle.
    if std::env::var_os("GMS_IDLE_TEST").is_none() {
        let test = std::env::current_exe().expect("this test");
        let args = ["--exact", "an_idle_agent_uses_no_cpu"];
        let status = std::process::Command::new(test).args(args).env("GMS_IDLE_TEST", "1").status();
        assert!(status.is_ok_and(|status| status.success()));
        return;
    }
    let (node, key) = ephemeral().expect("keys");
    let agent = Agent::spawn(&config(1 << 20), &node).expect("an agent");
    let mut client = Client::connect(agent.addr(), &key);
    client.hello();
    client.put(0, 64);
    let (before, start) = (agent_ticks(), Instant::now());
    client.until("3 s", |_| start.elapsed() > Duration::from_secs(3));
    let used = agent_ticks() - before;
    assert!(client.closed.is_none() && used <= 3, "{used} ticks of 10 ms in 3 s");
}
