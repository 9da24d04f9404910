//! The program `gms-agent`: its options, its failures, its end.

mod common;

use common::program::{Agent, Keys, Log};
use common::{Client, LIMIT, WORKLOAD, content};
use gms_transport::keys::{self, Role};
use gms_transport::message::{Control, HelloReply, PagesReply, Status};
use gms_transport::{CloseCode, CloseReason, Transport};
use nix::sys::signal::Signal;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::process::{ChildStderr, Stdio};
use std::time::Instant;

#[test]
fn it_serves_until_sigterm_and_tells_its_clients() {
    let dir = Keys::new("serve");
    let args = [
        "--listen",
        "127.0.0.1:0",
        "--export",
        "8M",
        "--keys",
        dir.text(),
        "--metrics",
        "127.0.0.1:0",
    ];
    let mut agent = Agent::start(&args, Stdio::piped());
    let mut log = Log::new(agent.stderr());
    let addrs = log.address(&["addr=", "metrics="]);
    let identity = keys::load(&dir.0, Role::Client).expect("a client key");
    let mut client = Client::connect(addrs[0], &identity);
    assert_eq!(client.hello().feedback().frames_free, 2048);
    client.put(0, 8);
    let mut http = TcpStream::connect(addrs[1]).expect("metrics");
    http.set_read_timeout(Some(LIMIT)).expect("a deadline");
    http.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n").expect("request");
    let mut metrics = String::new();
    http.read_to_string(&mut metrics).expect("answer");
    assert!(metrics.contains("\ngms_agent_page_puts_total 8\n"), "{metrics}");
    // It waits for the pages' owner until the grace is over.
    let asked = Instant::now();
    agent.signal(Signal::SIGTERM);
    client.until("close", |client| client.closed.is_some());
    let closed = &client.closed;
    assert!(
        matches!(closed, Some(CloseReason::ByPeer { code: Some(CloseCode::Draining), .. })),
        "{closed:?}"
    );
    log.line_with(&["did not take all of their pages away", "pages=8"]);
    assert_eq!(agent.wait().code(), Some(0));
    assert!(asked.elapsed().as_secs_f64() >= 1.5, "{:?}", asked.elapsed());
}

/// Runs to the end, and returns exit code and standard error.
fn fails(args: &[&str]) -> (Option<i32>, String) {
    let mut agent = Agent::start(args, Stdio::piped());
    let mut stderr = agent.stderr();
    let code = agent.wait().code();
    let mut text = String::new();
    stderr.read_to_string(&mut text).expect("log");
    (code, text)
}

#[test]
fn failures_are_one_clear_line() {
    let dir = Keys::new("fail");
    let socket = UdpSocket::bind("127.0.0.1:0").expect("socket");
    let taken = socket.local_addr().expect("bound").to_string();
    let missing = Path::new(dir.text()).join("none").to_str().expect("UTF-8").to_owned();
    let cases: [(&[&str], i32, &str); 6] = [
        (
            &["--listen", &taken, "--export", "8M", "--keys", dir.text()],
            1,
            "cannot listen on 127.0.0.1:",
        ),
        (&["--listen", "127.0.0.1:0", "--export", "8M", "--keys", &missing], 1, "ca.pem"),
        (
            &["--listen", "127.0.0.1:0", "--export", "4000G", "--keys", dir.text()],
            1,
            "cannot export 4096000 MiB",
        ),
        (
            &["--listen", "127.0.0.1:0", "--export", "1K", "--keys", dir.text()],
            1,
            "cannot export 1024 bytes",
        ),
        (&["--listen", "127.0.0.1:0", "--keys", dir.text()], 2, "--export is missing"),
        (&["--config", &missing], 2, "No such file"),
    ];
    for (args, code, message) in cases {
        let (status, text) = fails(args);
        assert_eq!(status, Some(code), "{args:?}: {text}");
        let last = text.lines().last().unwrap_or_default();
        assert!(last.starts_with("gms-agent: ") && last.contains(message), "{args:?}: {text}");
        assert!(
            text.lines().filter(|line| !line.contains("WARN")).count() == 1,
            "{args:?}: {text}"
        );
    }
    for args in
        [&["--exprot", "8M"][..], &["--export", "8Q"], &["--listen", "nowhere"], &["-q", "-v"]]
    {
        let (status, text) = fails(args);
        assert_eq!(status, Some(2), "{args:?}: {text}");
        assert!(text.starts_with("gms-agent: ") && text.lines().count() == 1, "{text}");
    }
    let (status, text) =
        fails(&["--listen", "no-such-host.invalid:7400", "--export", "8M", "--keys", dir.text()]);
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains("cannot listen on no-such-host.invalid:7400: "), "{text}");
}

#[test]
fn huge_pages_that_are_not_there_are_told_with_their_cure() {
    let dir = Keys::new("huge");
    let text = std::fs::read_to_string("/proc/meminfo").expect("meminfo");
    let field = |name: &str| -> u64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).expect(name);
        line.split_whitespace().next().expect("a number").parse().expect("a number")
    };
    // What is free, and one more.
    let export = format!("{}M", 2 * (field("HugePages_Free:") + 1));
    let args = ["--listen", "127.0.0.1:0", "--export", &export, "--huge", "--keys", dir.text()];
    let (status, text) = fails(&args);
    let told = "huge pages of 2 MiB are free: raise /proc/sys/vm/nr_hugepages";
    assert!(status == Some(1) && text.contains(told), "{status:?}: {text}");
}

/// The agent with keys of `dir`, its log, and where it listens.
fn serve(dir: &Keys) -> (Agent, Log<ChildStderr>, SocketAddr) {
    serve_with(dir, &[])
}

fn serve_with(dir: &Keys, args: &[&str]) -> (Agent, Log<ChildStderr>, SocketAddr) {
    let usual = ["--listen", "localhost:0", "--export", "8388608", "--keys", dir.text()];
    let mut agent = Agent::start(&[&usual, args].concat(), Stdio::piped());
    let mut log = Log::new(agent.stderr());
    let addr = log.address(&["addr="])[0];
    (agent, log, addr)
}

#[test]
fn it_renews_its_keys_on_sighup_and_does_not_end() {
    let (dir, other) = (Keys::new("renew"), Keys::new("renewed"));
    let (mut agent, mut log, addr) = serve(&dir);
    let mut client = Client::connect(addr, &keys::load(&dir.0, Role::Client).expect("a key"));
    client.hello();
    client.put(0, 8);
    for file in ["ca.pem", "node.pem", "node-key.pem"] {
        std::fs::copy(other.0.join(file), dir.0.join(file)).expect("copied");
    }
    agent.signal(Signal::SIGHUP);
    let node = keys::load(&other.0, Role::Node).expect("a key").id().to_string();
    log.line_with(&["keys renewed", &node]);
    // Clients of the authority before are expelled.
    client.until("close", |client| client.closed.is_some());
    log.line_with(&["disconnected", "another authority"]);
    let mut client = Client::connect(addr, &keys::load(&other.0, Role::Client).expect("a key"));
    assert_eq!(client.hello().answer::<HelloReply>().lease_ms, 2000);
    // Those of the same one stay.
    agent.signal(Signal::SIGHUP);
    log.line_with(&["keys renewed", &node]);
    assert_eq!(client.put(8, 8).answer::<PagesReply>().done, 0xff);
    // Keys which cannot be used change nothing.
    std::fs::remove_file(dir.0.join("node.pem")).expect("removed");
    agent.signal(Signal::SIGHUP);
    log.line_with(&["the keys stay as they are", "key of a client, not of a node"]);
    assert_eq!(client.put(16, 8).answer::<PagesReply>().done, 0xff);
    // Nor while it drains: the grace is the time that it has.
    agent.signal(Signal::SIGTERM);
    log.line_with(&["draining"]);
    agent.signal(Signal::SIGHUP);
    client.until("close", |client| client.closed.is_some());
    assert!(agent.poll().is_none_or(|status| status.success()));
    assert_eq!(agent.wait().code(), Some(0));
}

#[test]
fn a_renewed_client_is_the_same_tenant() {
    let dir = Keys::new("same");
    let (agent, mut log, addr) = serve(&dir);
    let before = keys::load(&dir.0, Role::Client).expect("a key");
    let mut old = Client::connect(addr, &before);
    old.hello();
    old.put(0, 8);
    keys::renew(&dir.0, None).expect("renewed");
    let after = keys::load(&dir.0, Role::Client).expect("a key");
    assert_ne!(before.fingerprint(), after.fingerprint());
    let mut new = Client::connect(addr, &after);
    new.hello();
    log.line_with(&["workload connected", &before.id().to_string(), "pages=8"]);
    let (reply, page) = new.ask(&Control::get(1, WORKLOAD, 5), &[]);
    assert!(reply.status() == Status::Ok && page == content(5));
    // Both are one client to its shares: with another, each has half of the frames, whichever key it uses.
    let credits = |client: &mut Client| client.hello().feedback().credits_put;
    assert_eq!([&mut old, &mut new].map(credits), [1024; 2]);
    keys::issue(&dir.0, Role::Client, "other").expect("a key");
    let mut other =
        Client::connect(addr, &keys::load(&dir.0.join("other"), Role::Client).expect("a key"));
    other.hello();
    let shares = [&mut old, &mut new, &mut other].map(credits);
    assert!(shares[0] < 1024 && shares[0] == shares[1] && shares[2] >= shares[0], "{shares:?}");
    // The client id does not open what is another's.
    let (reply, _) = other.ask(&Control::get(1, WORKLOAD, 5), &[]);
    assert_eq!(reply.status(), Status::NotFound);
    agent.signal(Signal::SIGTERM);
    agent.wait();
}

#[test]
fn who_was_revoked_is_expelled_on_sighup_and_a_list_that_cannot_be_read_changes_nothing() {
    let dir = Keys::new("revoked");
    let (agent, mut log, addr) = serve(&dir);
    keys::issue(&dir.0, Role::Client, "other").expect("a key");
    let [identity, other] = [dir.0.clone(), dir.0.join("other")]
        .map(|dir| keys::load(&dir, Role::Client).expect("a key"));
    let mut client = Client::connect(addr, &identity);
    client.hello();
    client.put(0, 8);
    let mut stays = Client::connect(addr, &other);
    stays.hello();
    let name = identity.id().to_string();
    keys::revoke(&dir.0, &name).expect("a list");
    agent.signal(Signal::SIGHUP);
    log.line_with(&["keys renewed", "revoked=1"]);
    client.until("close", |client| client.closed.is_some());
    let told = client.closed.expect("a reason").to_string();
    assert!(told.contains("the certificate was revoked"), "{told}");
    log.line_with(&["disconnected", &name, "pages=8", "has a certificate that was revoked"]);
    let refused = || Client::connect(addr, &identity).closed;
    assert!(matches!(refused(), Some(CloseReason::RevokedByPeer { .. })), "{:?}", refused());
    // Neither without the list nor with one that is damaged is anybody let in again.
    let list = dir.0.join(keys::REVOKED);
    std::fs::remove_file(&list).expect("removed");
    agent.signal(Signal::SIGHUP);
    log.line_with(&["the keys stay as they are", "revoked.txt is gone"]);
    assert!(matches!(refused(), Some(CloseReason::RevokedByPeer { .. })), "{:?}", refused());
    std::fs::write(&list, "# nobody\nnobody\n").expect("written");
    agent.signal(Signal::SIGHUP);
    log.line_with(&["the keys stay as they are", "revoked.txt, line 2"]);
    assert!(matches!(refused(), Some(CloseReason::RevokedByPeer { .. })), "{:?}", refused());
    assert_eq!(stays.put(0, 8).answer::<PagesReply>().done, 0xff, "another client");
    // Its pages are kept for their lease, in case it was revoked by mistake.
    std::fs::write(&list, "# nobody\n").expect("written");
    agent.signal(Signal::SIGHUP);
    log.line_with(&["keys renewed", "revoked=0"]);
    Client::connect(addr, &identity).hello();
    log.line_with(&["workload connected", &name]);
    agent.signal(Signal::SIGTERM);
    agent.wait();
    // An agent does not start with a list that it cannot read, nor if it was revoked itself.
    let args = ["--listen", "127.0.0.1:0", "--export", "8M", "--keys", dir.text()];
    std::fs::write(&list, "nobody\n").expect("written");
    let (status, text) = fails(&args);
    assert!(status == Some(1) && text.contains("revoked.txt, line 1"), "{text}");
    std::fs::write(&list, "").expect("written");
    let own = keys::load(&dir.0, Role::Node).expect("a key").id();
    keys::revoke(&dir.0, &own.to_string()).expect("a list");
    let (status, text) = fails(&args);
    assert!(status == Some(1) && text.contains("node.pem was revoked"), "{text}");
}

#[test]
fn who_is_revoked_while_an_agent_drains_is_expelled() {
    let dir = Keys::new("revoked-late");
    // It is not to end before it has read the list.
    let (agent, mut log, addr) = serve_with(&dir, &["--drain", "20"]);
    let identity = keys::load(&dir.0, Role::Client).expect("a key");
    let mut client = Client::connect(addr, &identity);
    client.hello();
    client.put(0, 8);
    agent.signal(Signal::SIGTERM);
    log.line_with(&["draining"]);
    keys::revoke(&dir.0, &identity.id().to_string()).expect("a list");
    agent.signal(Signal::SIGHUP);
    client.until("close", |client| client.closed.is_some());
    let told = client.closed.expect("a reason").to_string();
    assert!(told.contains("the certificate was revoked"), "{told}");
    log.line_with(&["keys renewed", "revoked=1"]);
    assert_eq!(agent.wait().code(), Some(0));
}

#[test]
fn its_log_tells_who_came_who_went_and_who_was_refused() {
    let (dir, foreign) = (Keys::new("log"), Keys::new("foreign"));
    let (agent, mut log, addr) = serve(&dir);
    let identity = keys::load(&dir.0, Role::Client).expect("a key");
    let client_name = identity.id().to_string();
    let mut client = Client::connect(addr, &identity);
    let from = format!("addr={}", SocketAddr::new(addr.ip(), 0)).trim_end_matches('0').to_string();
    log.line_with(&[" connected", &client_name, &from]);
    // It is back before its lease is over.
    assert_eq!(client.ask(&Control::hello(1, WORKLOAD, 60_000), &[]).0.status(), Status::Ok);
    log.line_with(&["workload connected", &client_name, "workload=0303030303030303", "pages=0"]);
    client.put(0, 8);
    client.quic.close(Instant::now(), client.link, CloseCode::Goodbye);
    client.until("close", |client| client.closed.is_some());
    let words = ["disconnected", &client_name, "workload=0303030303030303", "pages=8"];
    log.line_with(&words);
    let mut again = Client::connect(addr, &identity);
    again.hello();
    log.line_with(&["workload connected", "pages=8"]);
    let stranger = Client::connect(addr, &keys::load(&foreign.0, Role::Client).expect("a key"));
    assert!(matches!(stranger.closed, Some(CloseReason::WrongCa { .. })), "{:?}", stranger.closed);
    log.line_with(&["no link was made", "another authority"]);
    agent.signal(Signal::SIGTERM);
    agent.wait();
}
