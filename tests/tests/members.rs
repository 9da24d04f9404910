//! Agents that find each other: real ones, each with a node key of its own.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gms_tests::*;
use gms_transport::keys::{self, Role};
use gms_transport::message::{Control, MemberEntry, Op, Status, WorkloadId};
use gms_transport::{CloseCode, Event, LinkId, Quic, Transport};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const SOON: Duration = Duration::from_secs(30);
/// A member that does not answer is suspect for this long before it is gone.
const SUSPECT: Duration = Duration::from_secs(3);

/// A cluster's keys, removed at the end.
struct Cluster(PathBuf);

impl Cluster {
    /// With node keys of these names.
    fn new(name: &str, nodes: &[&str]) -> Cluster {
        let dir = std::env::temp_dir().join(format!("gms-members-{name}-{}", std::process::id()));
        keys::init(&dir).expect("keys");
        nodes.iter().for_each(|node| drop(keys::issue(&dir, Role::Node, node).expect("keys")));
        Cluster(dir)
    }

    fn agent(&self, node: &str) -> AgentSetup<'static> {
        self.large_agent(node, Mib(16))
    }

    fn large_agent(&self, node: &str, export: Mib) -> AgentSetup<'static> {
        AgentSetup::new(export).keys(self.0.join(node))
    }

    /// What the agent at `addr` says of the members; `None` while it does not answer.
    fn members(&self, addr: &str) -> Option<Vec<MemberEntry>> {
        let ask = Control::request(Op::Members, 1, WorkloadId::default());
        let (reply, payload) = Caller::call(&self.0, addr)?.ask(&ask, &[])?;
        assert_eq!(reply.status(), Status::Ok);
        MemberEntry::read_all(&payload)
    }

    fn addrs(&self, of: &str) -> Vec<String> {
        let members = self.members(of).unwrap_or_default();
        let mut addrs: Vec<String> = members.iter().map(|m| m.addr().to_string()).collect();
        addrs.sort();
        addrs
    }

    /// Waits until each of these agents names just these as members.
    fn wait_until_members(&self, agents: &[&AgentProc]) -> Duration {
        let began = Instant::now();
        let mut all: Vec<String> = agents.iter().map(|agent| agent.addr()).collect();
        all.sort();
        poll_until("members", SOON, || {
            all.iter().all(|addr| self.addrs(addr) == all).then_some(())
        });
        began.elapsed()
    }

    /// In which life the agent at `of` knows the one at `whom`.
    fn incarnation(&self, of: &AgentProc, whom: &str) -> Option<u64> {
        let members = self.members(&of.addr())?;
        let found = members.iter().find(|member| member.addr().to_string() == whom);
        found.map(|member| member.incarnation)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // What is left is the system's to clean.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A client, which asks one question.
struct Caller {
    quic: Quic,
    link: LinkId,
}

impl Caller {
    fn call(keys: &Path, addr: &str) -> Option<Caller> {
        let identity = keys::load(keys, Role::Client).expect("keys");
        let mut quic = Quic::client(([127, 0, 0, 1], 0).into(), &identity).expect("a socket");
        let addr: SocketAddr = addr.parse().expect("an address");
        let link = quic.connect(Instant::now(), addr).expect("an address");
        let mut caller = Caller { quic, link };
        let up = caller.wait(|event| match event {
            Event::Connected { .. } => Some(true),
            Event::Closed { .. } => Some(false),
            _ => None,
        });
        (up == Some(true)).then_some(caller)
    }

    fn ask(&mut self, request: &Control, payload: &[u8]) -> Option<(Control, Vec<u8>)> {
        self.quic.request(Instant::now(), self.link, request, &[payload]).expect("room");
        let (mut reply, mut bytes) = (None, Vec::new());
        let whole = self.wait(|event| match event {
            Event::Control { control, .. } => {
                reply = Some(control);
                None
            }
            Event::Payload { bytes: more, .. } => {
                bytes.extend_from_slice(&more);
                None
            }
            Event::Complete { .. } => Some(true),
            Event::Aborted { .. } | Event::Closed { .. } => Some(false),
            Event::Connected { .. } => None,
        });
        reply.filter(|_| whole == Some(true)).map(|reply| (reply, bytes))
    }

    /// Drives the endpoint until `take` says what came; `None` after some seconds.
    fn wait<T>(&mut self, mut take: impl FnMut(Event) -> Option<T>) -> Option<T> {
        let end = Instant::now() + Duration::from_secs(5);
        loop {
            let now = Instant::now();
            self.quic.drive(now).expect("a socket");
            while let Some(event) = self.quic.poll(now) {
                if let Some(taken) = take(event) {
                    return Some(taken);
                }
            }
            self.quic.flush(now).expect("a socket");
            if now >= end {
                return None;
            }
            let until = self.quic.deadline().unwrap_or(end).min(end);
            let ms = until.saturating_duration_since(now).as_millis().min(100) as u16;
            poll(&mut [PollFd::new(self.quic.fd(), PollFlags::POLLIN)], PollTimeout::from(ms))
                .expect("poll");
        }
    }
}

/// A link that is not closed counts at the agent until it has been silent for seconds, and a client may have so many.
impl Drop for Caller {
    fn drop(&mut self) {
        self.quic.close(Instant::now(), self.link, CloseCode::Goodbye);
        // The agent may have gone.
        let _ = self.quic.flush(Instant::now());
    }
}

#[test]
fn agents_find_each_other_by_any_of_the_addresses_that_they_are_told() {
    let Some(_stage) = Stage::set() else { return };
    let cluster = Cluster::new("find", &["a", "b", "c"]);
    let port = free_port();
    let metrics = format!("127.0.0.1:{port}");
    let a = cluster.agent("a").args(["--zone", "rack-1", "--metrics", &metrics]).start();
    let b = cluster.agent("b").args(["--join", &a.addr(), "--zone", "rack-2"]).start();
    // Nobody is at the first address; at the second there is one that has joined another itself.
    let nobody = format!("127.0.0.1:{}", free_port());
    let c = cluster.agent("c").args(["--join", &nobody, "--join", &b.addr()]).start();
    cluster.wait_until_members(&[&a, &b, &c]);
    let mut zones: Vec<String> = cluster
        .members(&c.addr())
        .expect("an answer")
        .iter()
        .map(|member| member.zone().to_string())
        .collect();
    zones.sort();
    assert_eq!(zones, ["", "rack-1", "rack-2"]);
    // Each tells the others what it has.
    poll_until("the loads of all", SOON, || {
        let members = cluster.members(&c.addr())?;
        members
            .iter()
            .all(|member| member.frames == 4096 && member.frames_free == 4096)
            .then_some(())
    });
    assert_eq!(metric(port, "gms_agent_members"), Some(3.0));
    poll_until("both joins to be told", SOON, || {
        (a.log().matches("member joined").count() >= 2).then_some(())
    });
}

#[test]
fn members_are_shown_by_a_command_and_its_errors_say_what_to_do() {
    let Some(_stage) = Stage::set() else { return };
    let cluster = Cluster::new("command", &["a", "b"]);
    let a = cluster.agent("a").args(["--zone", "rack-1"]).start();
    let b = cluster.agent("b").args(["--join", &a.addr()]).start();
    cluster.wait_until_members(&[&a, &b]);
    let ask = |addr: &str| Gms::line(["members", "--agent", addr, "--keys"]).arg(&cluster.0);
    let shown = ask(&a.addr()).finish().expect_code(0).text();
    let lines = Vec::from_iter(shown.lines());
    assert_eq!(lines.len(), 3, "{shown}");
    for part in [a.addr(), "rack-1".into(), "alive".into(), "16 MiB".into()] {
        assert!(lines[1].contains(&part), "{shown}");
    }
    assert!(lines[2].contains(&b.addr()), "{shown}");
    let json = ask(&b.addr()).arg("--json").finish().expect_code(0);
    let members: Vec<serde_json::Value> = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!((&members[0]["address"], &members[0]["zone"]), (&b.addr().into(), &().into()));
    assert_eq!((&members[1]["address"], &members[1]["zone"]), (&a.addr().into(), &"rack-1".into()));
    let gone = format!("127.0.0.1:{}", free_port());
    let failed = ask(&gone).finish().expect_code(125);
    assert!(failed.stderr.contains(&format!("gms: agent {gone}: ")), "{}", failed.stderr);
    Gms::line(["members", "--agent", &gone]).finish().expect_code(2);
}

#[test]
fn a_killed_agent_is_gone_and_known_by_another_incarnation_when_it_is_back() {
    let Some(_stage) = Stage::set() else { return };
    let cluster = Cluster::new("kill", &["a", "b", "c"]);
    let a = cluster.agent("a").start();
    let b = cluster.agent("b").args(["--join", &a.addr()]).start();
    let c = cluster.agent("c").args(["--join", &a.addr()]).start();
    cluster.wait_until_members(&[&a, &b, &c]);
    let before = cluster.incarnation(&b, &a.addr()).expect("a member");
    // The one that the others were told of, and which is told of nobody.
    let addr: SocketAddr = a.addr().parse().expect("an address");
    a.kill();
    let took = cluster.wait_until_members(&[&b, &c]);
    assert!(took < patience(Duration::from_secs(15)), "{took:?}");
    let a = cluster.agent("a").listen(addr).start();
    cluster.wait_until_members(&[&a, &b, &c]);
    for of in [&b, &c] {
        let after = cluster.incarnation(of, &a.addr()).expect("a member");
        assert_ne!(before, after, "it has lost its pages");
    }
    // Without its being missed in between.
    let before = cluster.incarnation(&b, &a.addr());
    a.kill();
    let a = cluster.agent("a").listen(addr).start();
    poll_until("another incarnation", SOON, || {
        let after = cluster.incarnation(&b, &a.addr())?;
        (Some(after) != before && cluster.addrs(&a.addr()).len() == 3).then_some(())
    });
}

#[test]
fn an_agent_that_is_asked_to_end_is_gone_at_once() {
    let Some(_stage) = Stage::set() else { return };
    let cluster = Cluster::new("leave", &["a", "b", "c"]);
    let a = cluster.agent("a").start();
    let b = cluster.agent("b").args(["--join", &a.addr()]).start();
    let c = cluster.agent("c").args(["--join", &a.addr()]).start();
    cluster.wait_until_members(&[&a, &b, &c]);
    c.signal(Signal::SIGTERM);
    let took = cluster.wait_until_members(&[&a, &b]);
    assert!(took < patience(SUSPECT), "it was missed, it did not say so: {took:?}");
}

#[test]
fn all_addresses_of_a_name_are_asked() {
    let Some(_stage) = Stage::set() else { return };
    let cluster = Cluster::new("name", &["a", "b"]);
    let listen = ([127, 0, 0, 9], 0).into();
    let a = cluster.agent("a").listen(listen).start();
    let port = a.addr().parse::<SocketAddr>().expect("an address").port();
    let hosts = cluster.0.join("hosts");
    // The resolver has the nearest first, and nobody is there.
    fs::write(&hosts, "127.0.0.1 seeds.gms.test\n127.0.0.9 seeds.gms.test\n").expect("a file");
    // In a mount namespace of its own, where that is /etc/hosts.
    let line = "mount --bind \"$1\" /etc/hosts && shift && exec \"$@\"";
    let setup = cluster.agent("b").args(["--join", &format!("seeds.gms.test:{port}")]);
    let hosts = hosts.to_str().expect("UTF-8");
    let b = setup.through(["unshare", "-m", "sh", "-c", line, "sh", hosts]).start();
    cluster.wait_until_members(&[&a, &b]);
}

#[test]
fn a_client_may_ask_who_is_a_member_and_not_say_it() {
    let Some(_stage) = Stage::set() else { return };
    let cluster = Cluster::new("client", &["a"]);
    let a = cluster.agent("a").start();
    let gossip = Control::request(Op::Gossip, 1, WorkloadId::default());
    let mut caller = Caller::call(&cluster.0, &a.addr()).expect("a link");
    let (reply, _) = caller.ask(&gossip, &[0; 138]).expect("a reply");
    assert_eq!(reply.status(), Status::Denied);
    assert_eq!(cluster.addrs(&a.addr()), [a.addr()]);
}

#[test]
fn a_pager_told_of_one_agent_uses_all_and_those_that_join_later_and_outlives_the_one() {
    let Some(stage) = Stage::set() else { return };
    let cluster = Cluster::new("pager", &["a", "b", "c", "d"]);
    let start = |node, seed: &AgentProc| {
        cluster.large_agent(node, Mib(128)).args(["--join", &seed.addr()]).start()
    };
    let a = cluster.large_agent("a", Mib(128)).start();
    let (b, c) = (start("b", &a), start("c", &a));
    cluster.wait_until_members(&[&a, &b, &c]);
    let program = Program::new([c_program("verify")]).args(["64", "forever"]).stdin_open();
    let gms = Gms::run(&stage, &program.limit(Duration::from_secs(200))).local(Mib(24));
    let gms =
        gms.arg("--agent").arg(a.addr()).arg("--keys").arg(&cluster.0).redundancy("replica:2");
    let mut proc = gms.spawn();
    proc.wait_output(0, "round 1\n");
    let wait_until_used = |agents: &[&AgentProc]| {
        poll_until("all agents to have pages", SOON, || {
            let used = status_of(proc.pid())?.agents;
            let is_used = |agent: &&AgentProc| {
                let found = used.iter().find(|used| used.addr == agent.addr());
                found.is_some_and(|found| found.up && found.pages_held > 0)
            };
            (used.len() == agents.len() && agents.iter().all(is_used)).then_some(())
        });
    };
    wait_until_used(&[&a, &b, &c]);
    let d = start("d", &b);
    wait_until_used(&[&a, &b, &c, &d]);
    wait_until_copied(&proc);
    let seed = a.addr();
    a.kill();
    for _ in 0..2 {
        proc.wait_output(proc.output_len(), "round ");
    }
    wait_until_missed(&proc, &seed);
    proc.wait_output(proc.output_len(), "round ");
    proc.close_stdin();
    let outcome = gms.finish_proc(proc).expect_code(0);
    assert!(outcome.text().ends_with("ended, every page right\n"), "{}", outcome.text());
    assert_paged(&outcome, Mib(64), Mib(24));
    let told = format!("agent {} (told of by {seed}): ", b.addr());
    assert!(outcome.stderr.contains(&told), "{}", outcome.stderr);
}

/// Of two zones of two agents each. Without them a third of the pages would be in one zone alone.
#[test]
fn a_zone_that_is_lost_as_a_whole_has_no_page_that_the_other_has_not() {
    let Some(stage) = Stage::set() else { return };
    let cluster = Cluster::new("zones", &["a", "b", "c", "d"]);
    let start = |node, zone| cluster.large_agent(node, Mib(128)).args(["--zone", zone]);
    let a = start("a", "north").start();
    let join = |node, zone| start(node, zone).args(["--join", &a.addr()]).start();
    let (b, c, d) = (join("b", "north"), join("c", "south"), join("d", "south"));
    cluster.wait_until_members(&[&a, &b, &c, &d]);
    let program = Program::new([c_program("verify")]).args(["64", "forever"]).stdin_open();
    let gms = Gms::run(&stage, &program.limit(Duration::from_secs(200))).local(Mib(24));
    let gms =
        gms.arg("--agent").arg(c.addr()).arg("--keys").arg(&cluster.0).redundancy("replica:2");
    let mut proc = gms.spawn();
    proc.wait_output(0, "round 1\n");
    wait_until_copied(&proc);
    let agents = status_of(proc.pid()).expect("a status").agents;
    let mut zones = Vec::from_iter(agents.iter().map(|agent| agent.zone.as_str()));
    zones.sort_unstable();
    assert_eq!(zones, ["north", "north", "south", "south"]);
    let lost = [a.addr(), b.addr()];
    a.kill();
    b.kill();
    for _ in 0..2 {
        proc.wait_output(proc.output_len(), "round ");
    }
    lost.iter().for_each(|agent| wait_until_missed(&proc, agent));
    proc.wait_output(proc.output_len(), "round ");
    proc.wait_error("what gms says of the zone", SOON, |log| {
        log.contains("pages have copies in one zone").then_some(())
    });
    proc.close_stdin();
    let outcome = gms.finish_proc(proc).expect_code(0);
    assert!(outcome.text().ends_with("ended, every page right\n"), "{}", outcome.text());
    assert_paged(&outcome, Mib(64), Mib(24));
    assert!(
        outcome.stderr.contains(&format!("agent {}, zone south: ", c.addr())),
        "{}",
        outcome.stderr
    );
}

/// Agents that were told of come behind the session's own in its list.
#[test]
fn the_end_of_a_disk_is_not_taken_for_that_of_an_agent_which_was_told_of() {
    let Some(stage) = Stage::set() else { return };
    let cluster = Cluster::new("disk", &["a", "b"]);
    let a = cluster.large_agent("a", Mib(128)).start();
    let b = cluster.large_agent("b", Mib(128)).args(["--join", &a.addr()]).start();
    cluster.wait_until_members(&[&a, &b]);
    let program = Program::new([c_program("verify")]).args(["32", "forever"]).stdin_open();
    let gms = Gms::run(&stage, &program.limit(Duration::from_secs(200))).local(Mib(12));
    let gms = gms.arg("--agent").arg(a.addr()).arg("--keys").arg(&cluster.0);
    let gms = gms.arg("--disk").arg("/var/tmp").arg("--disk-size").arg("256M");
    let mut proc = gms.spawn();
    proc.wait_output(0, "round 1\n");
    wait_until_copied(&proc);
    let disk = descendants(proc.pid()).into_iter().find(|&pid| name(pid) == "far-disk");
    kill(Pid::from_raw(disk.expect("it runs beside the pager")), Signal::SIGKILL).expect("a kill");
    wait_until_missed(&proc, "on the disk at /var/tmp");
    for _ in 0..2 {
        proc.wait_output(proc.output_len(), "round ");
    }
    proc.close_stdin();
    let outcome = gms.finish_proc(proc).expect_code(0);
    assert!(outcome.text().ends_with("ended, every page right\n"), "{}", outcome.text());
    for told in [
        format!("agent {} (told of by {}): ", b.addr(), a.addr()),
        "agent on the disk at /var/tmp: its process ".into(),
    ] {
        assert!(outcome.stderr.contains(&told), "{told} is not in {}", outcome.stderr);
    }
}
