//! A network between a pager and an agent that loses, spoils, repeats and delays datagrams, or everything: a relay of UDP, because not every kernel
//! has a queueing discipline for it (netem).

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::dice::Dice;

/// Largest datagram.
const DATAGRAM_MAX: usize = 65_536;
/// Between two looks whether the relay is over.
const LOOK_MS: u8 = 20;
/// Datagrams of one socket before the next has its turn.
const TURN: usize = 64;
/// Senders on the pager's side: it has two lanes, and another two after each new start.
const SENDERS_MAX: usize = 64;

/// What becomes of datagrams, in both directions.
#[derive(Clone, Copy, Debug, Default)]
pub struct Weather {
    /// Of 1000 so many are lost.
    pub lost: u64,
    /// Of 1000 so many have a wrong bit.
    pub spoiled: u64,
    /// Of 1000 so many come twice.
    pub repeated: u64,
    /// Of 1000 so many come after the next one.
    pub overtaken: u64,
}

impl Weather {
    /// Nothing gets through.
    pub const CUT: Weather = Weather { lost: 1000, spoiled: 0, repeated: 0, overtaken: 0 };

    fn pack(self) -> u64 {
        self.lost | self.spoiled << 16 | self.repeated << 32 | self.overtaken << 48
    }

    fn unpack(packed: u64) -> Weather {
        let part = |shift: u32| packed >> shift & 0xFFFF;
        Weather { lost: part(0), spoiled: part(16), repeated: part(32), overtaken: part(48) }
    }
}

/// The relay; ends when dropped.
pub struct Relay {
    addr: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    over: AtomicBool,
    weather: AtomicU64,
    /// Of datagrams lost, spoiled, repeated and overtaken.
    counts: [AtomicU64; 4],
}

impl Relay {
    /// Passes datagrams on to `agent` (`HOST:PORT`), all of them at first.
    pub fn to(agent: &str) -> Relay {
        let agent: SocketAddr = agent.parse().expect("an address");
        let front = bind().expect("a socket");
        let addr = front.local_addr().expect("its address");
        let shared = Arc::new(Shared::default());
        let of_thread = shared.clone();
        let thread = thread::spawn(move || {
            Passing {
                front,
                agent,
                shared: of_thread,
                senders: HashMap::new(),
                dice: Dice::new(1),
                late: None,
            }
            .run();
        });
        Relay { addr, shared, thread: Some(thread) }
    }

    /// What to give gms as the agent's address.
    pub fn addr(&self) -> String {
        self.addr.to_string()
    }

    /// From now on.
    pub fn set(&self, weather: Weather) {
        self.shared.weather.store(weather.pack(), Ordering::Relaxed);
    }

    /// Datagrams that were lost, spoiled, repeated and overtaken here.
    pub fn counts(&self) -> [u64; 4] {
        self.shared.counts.each_ref().map(|count| count.load(Ordering::Relaxed))
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(thread::panicking() || matches!(ended, Some(Ok(()))), "the relay panicked");
    }
}

fn bind() -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

struct Passing {
    front: UdpSocket,
    agent: SocketAddr,
    shared: Arc<Shared>,
    /// Who sends to the front, and the socket that stands for them towards the agent.
    senders: HashMap<SocketAddr, UdpSocket>,
    dice: Dice,
    /// What is overtaken by the next datagram.
    late: Option<(SocketAddr, bool, Vec<u8>)>,
}

impl Passing {
    fn run(mut self) {
        let mut buffer = vec![0; DATAGRAM_MAX];
        while !self.shared.over.load(Ordering::Relaxed) {
            self.wait();
            for _ in 0..TURN {
                let Ok((count, sender)) = self.front.recv_from(&mut buffer) else { break };
                if !self.senders.contains_key(&sender) && self.senders.len() < SENDERS_MAX {
                    self.senders.insert(sender, bind().expect("a socket"));
                }
                self.pass(sender, true, &mut buffer[..count]);
            }
            let senders: Vec<SocketAddr> = self.senders.keys().copied().collect();
            for sender in senders {
                for _ in 0..TURN {
                    let Ok((count, _)) = self.senders[&sender].recv_from(&mut buffer) else {
                        break;
                    };
                    self.pass(sender, false, &mut buffer[..count]);
                }
            }
        }
    }

    fn wait(&self) {
        let sockets = std::iter::once(&self.front).chain(self.senders.values());
        let mut fds: Vec<PollFd> =
            sockets.map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN)).collect();
        // An error only makes the next look early.
        let _ = poll(&mut fds, PollTimeout::from(LOOK_MS));
    }

    fn pass(&mut self, sender: SocketAddr, to_agent: bool, bytes: &mut [u8]) {
        let weather = Weather::unpack(self.shared.weather.load(Ordering::Relaxed));
        let mut happens = |of_1000| self.dice.below(1000) < of_1000;
        let (lost, spoiled) = (happens(weather.lost), happens(weather.spoiled));
        let (repeated, overtaken) = (happens(weather.repeated), happens(weather.overtaken));
        let count = |n: usize| self.shared.counts[n].fetch_add(1, Ordering::Relaxed);
        if lost {
            count(0);
            return;
        }
        if spoiled && !bytes.is_empty() {
            let bit = self.dice.below(bytes.len() as u64 * 8) as usize;
            bytes[bit / 8] ^= 1 << (bit % 8);
            count(1);
        }
        if overtaken && self.late.is_none() {
            count(3);
            self.late = Some((sender, to_agent, bytes.to_vec()));
            return;
        }
        self.send(sender, to_agent, bytes);
        if repeated {
            self.shared.counts[2].fetch_add(1, Ordering::Relaxed);
            self.send(sender, to_agent, bytes);
        }
        if let Some((sender, to_agent, bytes)) = self.late.take() {
            self.send(sender, to_agent, &bytes);
        }
    }

    /// What the kernel does not take is lost: as in a network.
    fn send(&self, sender: SocketAddr, to_agent: bool, bytes: &[u8]) {
        let _ = match (to_agent, self.senders.get(&sender)) {
            (true, Some(socket)) => socket.send_to(bytes, self.agent),
            (true, None) => return,
            (false, _) => self.front.send_to(bytes, sender),
        };
    }
}
