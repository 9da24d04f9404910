//! Clients and strangers that break rules or take all they get: what an honest client reads meanwhile.

mod common;

use common::{Client, LIMIT, WORKLOAD, content};
use gms_agent::{Agent, Config};
use gms_policy::Bytes;
use gms_transport::keys::{Identity, Role, init, load};
use gms_transport::message::{Control, PageDescriptor, Status, WorkloadId};
use gms_transport::{Event, ExchangeId, LinkId, Quic, Transport, TransportError};
use std::net::{SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Least part of its throughput that an honest client keeps.
const KEPT: f64 = 0.8;
/// Time of one measurement; with and without the attack in turn.
const SLICE: Duration = Duration::from_millis(250);
const ROUNDS: usize = 8;
const ATTEMPTS: usize = 3;
/// Pages that the honest client reads at random.
const PAGES: u64 = 512;

/// Longer than a link outlives silence.
const FLOOD: Duration = Duration::from_secs(6);
/// The same where a sender has a CPU to itself: an eighth of it would be left if strangers had what they ask for.
const KEPT_IN_FLOOD: f64 = 0.3;

/// Held by a test: what another does to its reads is no part of the attack.
static ALONE: Mutex<()> = Mutex::new(());

/// A cluster: a node, and clients of the same authority, each with a certificate of its own.
struct Cluster(PathBuf);

impl Cluster {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("gms-hostile-{name}-{}", std::process::id()));
        init(&dir).expect("keys");
        Self(dir)
    }

    fn node(&self) -> Identity {
        load(&self.0, Role::Node).expect("a node key")
    }

    fn client(&self, name: &str) -> Identity {
        let dir = gms_transport::keys::issue(&self.0, Role::Client, name).expect("a client key");
        load(&dir, Role::Client).expect("a client key")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // What is left is the system's to clean.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An endpoint of an attacker: drives many links, and reads what it must.
struct Attacker {
    quic: Quic,
    up: Vec<LinkId>,
    closed: usize,
}

impl Attacker {
    fn new(identity: &Identity) -> Self {
        let quic = Quic::client(([127, 0, 0, 1], 0).into(), identity).expect("a socket");
        Self { quic, up: Vec::new(), closed: 0 }
    }

    fn turn(&mut self) {
        let now = Instant::now();
        self.quic.drive(now).expect("drive");
        while let Some(event) = self.quic.poll(now) {
            match event {
                Event::Connected { link, .. } => self.up.push(link),
                Event::Closed { link, .. } => {
                    self.up.retain(|up| *up != link);
                    self.closed += 1;
                }
                _ => {}
            }
        }
        self.quic.flush(now).expect("flush");
    }

    /// Opens as many links as it gets, and says hello on each for a workload of its own.
    fn open(&mut self, addr: SocketAddr, links: usize) {
        let end = Instant::now() + LIMIT;
        for _ in 0..links {
            let before = self.up.len() + self.closed;
            if self.quic.connect(Instant::now(), addr).is_err() {
                break;
            }
            while self.up.len() + self.closed == before {
                self.turn();
                assert!(Instant::now() < end, "links are neither made nor refused");
            }
        }
        for link in self.up.clone() {
            let hello = Control::hello(1, workload(link), 600_000);
            self.quic.request(Instant::now(), link, &hello, &[]).expect("hello");
            self.turn();
        }
    }
}

fn workload(link: LinkId) -> WorkloadId {
    let mut id = [9; 16];
    let text = format!("{link:?}");
    id.iter_mut().zip(text.bytes().filter(u8::is_ascii_digit)).for_each(|(to, byte)| *to = byte);
    WorkloadId(id)
}

/// Random reads a second of `client` for `time`.
fn reads(client: &mut Client, time: Duration, seed: &mut u64) -> f64 {
    let (start, mut count) = (Instant::now(), 0);
    while start.elapsed() < time {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let page = (*seed >> 33) % PAGES;
        let (control, bytes) = client.ask(&Control::get(count, WORKLOAD, page), &[]);
        assert_eq!(control.status(), Status::Ok);
        assert!(bytes == content(page), "page {page}");
        count += 1;
    }
    count as f64 / start.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Is true from when it goes: also if what goes on beside a thread panics, which would wait for that thread for ever.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `attack` in turns of a thread of its own, paced to one each `pause`, and compares what an honest client reads
/// meanwhile with what it reads without. `prepare` is done once before.
fn keeps_its_throughput<S: Send>(
    name: &str,
    pause: Duration,
    prepare: impl FnOnce(&Cluster, SocketAddr) -> S,
    mut attack: impl FnMut(&mut S, SocketAddr) + Send,
) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let cluster = Cluster::new(name);
    let config = Config::new(([127, 0, 0, 1], 0).into(), Bytes(64 << 20));
    let agent = Agent::spawn(&config, &cluster.node()).expect("an agent");
    let addr = agent.addr();
    let mut state = prepare(&cluster, addr);
    // Not before: who is not driven for 5 s loses its link, and to prepare may take longer.
    let mut honest = Client::connect(addr, &cluster.client("honest"));
    honest.hello();
    (0..PAGES).step_by(64).for_each(|first| assert_eq!(honest.put(first, 64).status(), Status::Ok));
    let mut seed = 1;
    reads(&mut honest, SLICE, &mut seed);
    let (on, over, turns) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
    let kept = std::thread::scope(|scope| {
        let _over = Over(&over);
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                std::thread::park_timeout(pause);
                if on.load(Ordering::Relaxed) {
                    attack(&mut state, addr);
                    turns.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        let mut measure = || {
            let (mut without, mut with) = (Vec::new(), Vec::new());
            for _ in 0..ROUNDS {
                without.push(reads(&mut honest, SLICE, &mut seed));
                on.store(true, Ordering::Relaxed);
                with.push(reads(&mut honest, SLICE, &mut seed));
                on.store(false, Ordering::Relaxed);
            }
            let (without, with) = (median(without), median(with));
            println!("{name}: {without:.0} reads/s without, {with:.0} with: {:.2}", with / without);
            with / without
        };
        // Others use the machine as well: what is lost to the attack is lost each time.
        (0..ATTEMPTS).map(|_| measure()).find(|kept| *kept >= KEPT)
    });
    assert!(honest.closed.is_none(), "{:?}", honest.closed);
    assert!(turns.load(Ordering::Relaxed) > ROUNDS as u64, "the attack took place");
    // Who comes anew is served too, and may store pages.
    let mut newcomer = Client::connect(addr, &cluster.client("newcomer"));
    assert_eq!(newcomer.hello().status(), Status::Ok);
    assert_eq!(newcomer.put(0, 64).status(), Status::Ok);
    assert!(kept.is_some(), "{name}: in {ATTEMPTS} measurements less than {KEPT} of the reads");
}

#[test]
fn strangers_who_begin_handshakes() {
    // 400 a second, from ports which never answer: as if their sources were false.
    let prepare = |cluster: &Cluster, _| (cluster.client("spoofer"), Vec::new());
    keeps_its_throughput("initials", Duration::from_millis(50), prepare, |state, addr| {
        let (identity, spoofers): &mut (Identity, Vec<Quic>) = state;
        let mut spoofer = Quic::client(([127, 0, 0, 1], 0).into(), identity).expect("a socket");
        let now = Instant::now();
        (0..20).for_each(|_| drop(spoofer.connect(now, addr)));
        spoofer.flush(now).expect("flush");
        spoofers.push(spoofer);
    });
}

/// As fast as a thread can send: who has a link keeps it, and who comes is let in.
#[test]
fn strangers_who_send_handshakes_without_pause() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let cluster = Cluster::new("flood");
    let config = Config::new(([127, 0, 0, 1], 0).into(), Bytes(64 << 20));
    let agent = Agent::spawn(&config, &cluster.node()).expect("an agent");
    let addr = agent.addr();
    let mut honest = Client::connect(addr, &cluster.client("honest"));
    honest.hello();
    (0..PAGES).step_by(64).for_each(|first| assert_eq!(honest.put(first, 64).status(), Status::Ok));
    let packets = initials(&cluster.client("strangers"), 1000, Quic::client);
    // Takes the same CPU time and harms nobody.
    let unread = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let elsewhere = unread.local_addr().expect("an address");
    let (over, aside) = (AtomicBool::new(false), AtomicBool::new(true));
    std::thread::scope(|scope| {
        let _over = Over(&over);
        scope.spawn(|| {
            let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
            for packet in packets.iter().cycle() {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                let to = if aside.load(Ordering::Relaxed) { elsewhere } else { addr };
                socket.send_to(packet, to).expect("send");
            }
        });
        let (mut seed, mut kept) = (1, 0.0);
        for _ in 0..ATTEMPTS {
            aside.store(true, Ordering::Relaxed);
            let without = reads(&mut honest, FLOOD / 3, &mut seed);
            aside.store(false, Ordering::Relaxed);
            let with = reads(&mut honest, FLOOD, &mut seed);
            kept = with / without;
            println!("flood: {without:.0} reads/s beside its sender, {with:.0} in it: {kept:.2}");
            if kept >= KEPT_IN_FLOOD {
                break;
            }
        }
        assert!(kept >= KEPT_IN_FLOOD, "in {ATTEMPTS} measurements less");
        let identity = cluster.client("newcomer");
        let mut attempts = (0..10).map(|_| Client::connect(addr, &identity));
        let mut newcomer =
            attempts.find(|client| client.closed.is_none()).expect("a newcomer is let in");
        assert_eq!(newcomer.hello().status(), Status::Ok);
    });
    assert!(honest.closed.is_none(), "{:?}", honest.closed);
}

/// First packets of handshakes, each of another endpoint.
fn initials(
    identity: &Identity,
    count: usize,
    open: impl Fn(SocketAddr, &Identity) -> Result<Quic, TransportError>,
) -> Vec<Vec<u8>> {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let addr = socket.local_addr().expect("an address");
    let packet = |_| {
        let mut stranger = open(([127, 0, 0, 1], 0).into(), identity).expect("a socket");
        stranger.connect(Instant::now(), addr).expect("an address");
        stranger.flush(Instant::now()).expect("flush");
        let mut packet = vec![0; 1 << 16];
        let (len, _) = socket.recv_from(&mut packet).expect("an Initial");
        packet.truncate(len);
        packet
    };
    (0..count).map(packet).collect()
}

#[test]
fn strangers_whose_first_packet_fails() {
    // Those of a version that the agent does not speak: TLS finds that after it has exchanged keys.
    let prepare = |cluster: &Cluster, _| {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let open = |any, identity: &Identity| Quic::client_of(any, identity, &[b"x"]);
        (socket, initials(&cluster.client("versions"), 40, open))
    };
    // 4000 a second.
    let pause = Duration::from_millis(10);
    keeps_its_throughput("versions", pause, prepare, |(socket, packets), addr| {
        for packet in packets {
            socket.send_to(packet, addr).expect("send");
        }
    });
}

#[test]
fn strangers_who_send_anything() {
    let prepare = |_: &Cluster, _| (UdpSocket::bind("127.0.0.1:0").expect("a socket"), 7u64);
    keeps_its_throughput("garbage", Duration::from_millis(10), prepare, |(socket, seed), addr| {
        for _ in 0..20 {
            let mut datagram = [0; 1300];
            for byte in &mut datagram {
                *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(3);
                *byte = (*seed >> 40) as u8;
            }
            // Long and short headers, of this version and others.
            let version: [u8; 4] = if *seed & 1 << 50 == 0 { [0, 0, 0, 1] } else { [9; 4] };
            datagram[1..5].copy_from_slice(&version);
            socket.send_to(&datagram, addr).expect("send");
        }
    });
}

#[test]
fn a_client_that_takes_every_link_and_workload() {
    let prepare = |cluster: &Cluster, addr| {
        let mut attacker = Attacker::new(&cluster.client("greedy"));
        attacker.open(addr, 200);
        assert!(attacker.closed > 0, "some links are refused");
        attacker
    };
    keeps_its_throughput("links", Duration::from_millis(20), prepare, |attacker, addr| {
        // Refused ones are tried again and again.
        let _ = attacker.quic.connect(Instant::now(), addr);
        attacker.turn();
    });
}

#[test]
fn a_client_whose_requests_are_never_whole() {
    let prepare = |cluster: &Cluster, addr| {
        let mut attacker = Attacker::new(&cluster.client("halves"));
        attacker.open(addr, 16);
        (attacker, 0)
    };
    let pages = vec![7; 64 * (PageDescriptor::LEN + 4096)];
    let attack = move |(attacker, turn): &mut (Attacker, usize), _| {
        // Given up when a part of each has been sent.
        *turn += 1;
        let link = attacker.up[*turn % attacker.up.len()];
        let put = Control::put(1, workload(link), 64);
        let now = Instant::now();
        let begin = |_| attacker.quic.request(now, link, &put, &[&pages]).ok();
        let begun: Vec<ExchangeId> = (0..4).filter_map(begin).collect();
        attacker.quic.flush(now).expect("flush");
        begun.into_iter().for_each(|exchange| attacker.quic.abandon(exchange));
        attacker.turn();
    };
    keeps_its_throughput("halves", Duration::from_millis(10), prepare, attack);
}

#[test]
fn a_client_that_reads_no_replies() {
    let prepare = |cluster: &Cluster, addr| {
        let mut attacker = Attacker::new(&cluster.client("deaf"));
        attacker.open(addr, 4);
        let page = vec![5; PageDescriptor::LEN + 4096];
        for link in attacker.up.clone() {
            let put = Control::put(1, workload(link), 1);
            attacker.quic.request(Instant::now(), link, &put, &[&page]).expect("put");
        }
        (0..1000).for_each(|_| attacker.turn());
        attacker
    };
    let names = [PageDescriptor::new(0x0505_0505_0505, 0); 64];
    keeps_its_throughput("deaf", Duration::from_millis(20), prepare, move |attacker, _| {
        for link in attacker.up.clone() {
            for _ in 0..64 {
                let many = Control::get_many(1, workload(link), 64);
                let _ = attacker.quic.request(Instant::now(), link, &many, &[names.as_bytes()]);
            }
        }
        // Sends, and never receives.
        attacker.quic.flush(Instant::now()).expect("flush");
    });
}
