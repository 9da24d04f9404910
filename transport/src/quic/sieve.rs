//! What the kernel loses of a flood. A packet that is received costs some 2 us, and those behind it wait: where strangers send faster than a thread
//! receives, the socket's buffer stands full, and what comes of links waits or is lost like theirs. So of more than a thread may well receive the kernel
//! loses a part at random, by a filter of the socket that only looks at headers (cBPF, `SO_ATTACH_FILTER`). No packet with a short header is touched: meanwhile
//! the kernel puts none together (`UDP_GRO`), so that each is judged by itself.

use std::time::Instant;

use libc::{
    BPF_ABS, BPF_ADD, BPF_ALU, BPF_AND, BPF_B, BPF_IND, BPF_JEQ, BPF_JGE, BPF_JGT, BPF_JMP,
    BPF_JSET, BPF_K, BPF_LD, BPF_LEN, BPF_MISC, BPF_RET, BPF_TAX, BPF_W, BPF_X, SKF_AD_OFF,
    SKF_AD_RANDOM,
};
use socket2::SockFilter;

use super::limits::{MTU_MIN, SIEVE_MOST, SIEVE_TURN};
use super::strangers::token_length;

/// What packets with long headers are. Each kind is counted and lost by itself: who has shown its address, or whose handshake goes on, is not lost among
/// those who have sent nothing but a first packet. As [`filter`] sees them.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// An Initial with a token, which may be a good one.
    Token,
    /// An Initial without.
    First,
    /// Also an Initial that is too short to begin anything.
    Other,
}

impl Kind {
    /// `None` of a short header.
    fn of(packet: &[u8]) -> Option<Kind> {
        let is_long = packet.first().is_some_and(|first| first & LONG != 0);
        let begins = packet.len() >= MTU_MIN.into();
        is_long.then(|| match token_length(packet).filter(|_| begins) {
            Some(0) => Kind::First,
            Some(_) => Kind::Token,
            None => Kind::Other,
        })
    }
}

const KINDS: usize = 3;

/// No less of a kind passes.
const LEAST: f64 = (1 << 16) as f64;

/// Of each kind the part that passes, of `u32::MAX`.
pub(super) type Passes = [u32; KINDS];

#[derive(Debug)]
pub(super) struct Sieve {
    passes: Passes,
    /// Since when packets are counted, and how many have come.
    since: Option<Instant>,
    came: [u32; KINDS],
}

impl Default for Sieve {
    fn default() -> Self {
        Self { passes: [u32::MAX; KINDS], since: None, came: [0; KINDS] }
    }
}

impl Sieve {
    /// A stranger's packet has come.
    pub(super) fn count(&mut self, now: Instant, packet: &[u8]) {
        if let Some(kind) = Kind::of(packet) {
            self.since.get_or_insert(now);
            self.came[kind as usize] += 1;
        }
    }

    fn loses(&self) -> bool {
        self.passes != [u32::MAX; KINDS]
    }

    /// When to call [`Self::turn`], if not before the next packet.
    pub(super) fn due(&self) -> Option<Instant> {
        self.since.filter(|_| self.loses()).map(|since| since + SIEVE_TURN)
    }

    /// What passes from now on, if that changes.
    pub(super) fn turn(&mut self, now: Instant) -> Option<Passes> {
        let took = now.saturating_duration_since(self.since?);
        if took < SIEVE_TURN {
            return None;
        }
        let most = f64::from(SIEVE_MOST) * took.as_secs_f64() / SIEVE_TURN.as_secs_f64();
        let mut passes = self.passes;
        for (pass, came) in passes.iter_mut().zip(std::mem::take(&mut self.came)) {
            let part = f64::from(*pass);
            // Who sends now and then is not let in as a whole each time.
            let fits = (part * most / f64::from(came.max(1))).clamp(LEAST, 2.0 * part);
            // What came is a sample: nothing is changed for a little.
            if fits < part * 0.8 || fits > part * 1.25 || fits >= f64::from(u32::MAX) {
                *pass = fits as u32;
            }
        }
        let changes = std::mem::replace(&mut self.passes, passes) != passes;
        self.since = self.loses().then_some(now);
        changes.then_some(passes)
    }
}

/// Set in the first byte of a packet with a long header (RFC 8999).
pub(super) const LONG: u8 = 0x80;
/// Before a datagram's bytes the filter sees the header of UDP.
const UDP: u32 = 8;
/// Return values: bytes of the packet that are kept.
const LOST: u32 = 0;
const KEPT: u32 = u32::MAX;

/// The filter; `None` if all pass.
pub(super) fn filter(passes: Passes) -> Option<Vec<SockFilter>> {
    if passes == [u32::MAX; KINDS] {
        return None;
    }
    let op = |code: u32, k: u32| SockFilter::new(code as u16, 0, 0, k);
    let jump = |code: u32, k: u32, yes: u8, no: u8| {
        SockFilter::new((BPF_JMP | code | BPF_K) as u16, yes, no, k)
    };
    let byte = |at: u32| op(BPF_LD | BPF_B | BPF_ABS, at);
    let byte_behind_x = |at: u32| op(BPF_LD | BPF_B | BPF_IND, at);
    let add = |bytes: u32| op(BPF_ALU | BPF_ADD | BPF_K, bytes);
    let ret = |kept: u32| op(BPF_RET | BPF_K, kept);
    // As long as the instructions of one kind.
    let kinds = |kind: Kind| kind as u8 * 4;
    let other = kinds(Kind::Other);
    let mut program = vec![
        byte(UDP),
        jump(BPF_JSET, LONG.into(), 1, 0),
        ret(KEPT),
        op(BPF_ALU | BPF_AND | BPF_K, 0xf0),
        jump(BPF_JEQ, 0xc0, 0, 12 + other),
        // The ids have 255 bytes at most: the token's length lies within so much.
        op(BPF_LD | BPF_W | BPF_LEN, 0),
        jump(BPF_JGE, UDP + u32::from(MTU_MIN), 0, 10 + other),
        op(BPF_LD | BPF_W | BPF_ABS, UDP + 1),
        jump(BPF_JEQ, 0, 8 + other, 0),
        // Behind the version an id, and another one; then the token (RFC 9000, section 17.2.2).
        byte(UDP + 5),
        add(UDP + 6),
        op(BPF_MISC | BPF_TAX, 0),
        byte_behind_x(0),
        op(BPF_ALU | BPF_ADD | BPF_X, 0),
        op(BPF_MISC | BPF_TAX, 0),
        byte_behind_x(1),
        jump(BPF_JEQ, 0, kinds(Kind::First), kinds(Kind::Token)),
    ];
    for pass in passes {
        program.extend([
            op(BPF_LD | BPF_W | BPF_ABS, (SKF_AD_OFF + SKF_AD_RANDOM) as u32),
            jump(BPF_JGT, pass, 0, 1),
            ret(LOST),
            ret(KEPT),
        ]);
    }
    Some(program)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Packets of each kind, with ids of such lengths.
    fn packets(ids: (u8, u8)) -> [Vec<u8>; KINDS] {
        let initial = |token: u8| {
            let mut packet = vec![0xc3, 0, 0, 0, 1, ids.0];
            packet.resize(packet.len() + usize::from(ids.0), 0xaa);
            packet.push(ids.1);
            packet.resize(packet.len() + usize::from(ids.1), 0xbb);
            packet.push(token);
            packet.resize(1200, 0xcc);
            packet
        };
        let other = [&[0xe3, 0, 0, 0, 1][..], &[0; 40]].concat();
        [initial(9), initial(0), other]
    }

    /// A socket that has the filter, and one that sends to it.
    struct Sieved(std::net::UdpSocket, std::net::UdpSocket);

    impl Sieved {
        fn new() -> Sieved {
            let receiver = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            receiver.set_nonblocking(true).unwrap();
            let sender = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            sender.connect(receiver.local_addr().unwrap()).unwrap();
            Sieved(receiver, sender)
        }

        fn set(&self, passes: Passes) {
            let filter = filter(passes).unwrap();
            socket2::SockRef::from(&self.0).attach_filter(&filter).unwrap();
        }

        fn passes(&self, packet: &[u8]) -> bool {
            self.1.send(packet).unwrap();
            let mut buffer = [0; 2000];
            let got = self.0.recv(&mut buffer).ok();
            assert!(got.is_none_or(|len| &buffer[..len] == packet));
            got.is_some()
        }

        /// The kinds of which so few as none must be lost for the packet to pass.
        fn kinds(&self, packet: &[u8]) -> Vec<usize> {
            let open = |&kind: &usize| {
                let mut parts = [0; KINDS];
                parts[kind] = u32::MAX;
                self.set(parts);
                self.passes(packet)
            };
            (0..KINDS).filter(open).collect()
        }
    }

    #[test]
    fn the_kernel_loses_packets_by_the_kind_by_which_they_are_counted() {
        let sieved = Sieved::new();
        let mut all: Vec<Vec<u8>> =
            [(8, 8), (0, 0), (20, 3), (8, 0), (255, 255)].into_iter().flat_map(packets).collect();
        for (index, kind) in [Kind::Token, Kind::First, Kind::Other].into_iter().enumerate() {
            assert_eq!(Kind::of(&all[index]), Some(kind));
        }
        for packet in all.clone() {
            // A link's is let in whatever is lost; then an Initial of version 0, and some that end too soon.
            all.push([&[0x43][..], &packet[1..]].concat());
            all.push([&packet[..1], &[0; 4], &packet[5..]].concat());
            all.extend([1, 5, 6, 7, 30, 1199].map(|len| packet[..len.min(packet.len())].to_vec()));
        }
        for packet in all {
            let expected = Kind::of(&packet).map_or(vec![0, 1, 2], |kind| vec![kind as usize]);
            assert_eq!(sieved.kinds(&packet), expected, "{:x?}", &packet[..packet.len().min(40)]);
        }
        sieved.set([u32::MAX / 2; KINDS]);
        let [packet, ..] = packets((8, 8));
        let passed = (0..1000).filter(|_| sieved.passes(&packet)).count();
        assert!((350..650).contains(&passed), "{passed} of 1000");
        assert!(filter([u32::MAX; KINDS]).is_none());
    }

    #[test]
    fn so_much_of_each_kind_passes_as_a_thread_may_well_receive() {
        let (mut sieve, mut now) = (Sieve::default(), Instant::now());
        let (packets, mut passes) = (packets((8, 8)), [u32::MAX; KINDS]);
        let mut send = |sieve: &mut Sieve, count: [u32; KINDS]| {
            let part = passes.map(|pass| f64::from(pass) / f64::from(u32::MAX));
            let came: Vec<u32> =
                (0..KINDS).map(|kind| (f64::from(count[kind]) * part[kind]) as u32).collect();
            for (packet, count) in packets.iter().zip(&came) {
                (0..*count).for_each(|_| sieve.count(now, packet));
            }
            now += SIEVE_TURN;
            passes = sieve.turn(now).unwrap_or(passes);
            (came, passes)
        };
        // What is usual costs nothing, not even a wake-up.
        assert_eq!(send(&mut sieve, [1, SIEVE_MOST, 3]).1, [u32::MAX; KINDS]);
        assert_eq!(sieve.due(), None);
        // Of a flood as much comes as should, and of other kinds all.
        let flood = [5, 30 * SIEVE_MOST, SIEVE_MOST / 2];
        send(&mut sieve, flood);
        for _ in 0..5 {
            let (came, passes) = send(&mut sieve, flood);
            assert!(came[1].abs_diff(SIEVE_MOST) <= SIEVE_MOST / 4, "{came:?}");
            assert_eq!((passes[0], passes[2]), (u32::MAX, u32::MAX));
        }
        // It is over: soon all pass, though nothing comes.
        let turns =
            (0..20).take_while(|_| sieve.due().is_some() && send(&mut sieve, [0; 3]).1 != [0; 3]);
        assert!((4..=6).contains(&turns.count()));
        assert!(!sieve.loses() && sieve.due().is_none());
    }

    #[test]
    fn a_thread_that_was_not_run_takes_what_waited_for_no_flood() {
        let (mut sieve, now) = (Sieve::default(), Instant::now());
        let [packet, ..] = packets((8, 8));
        (0..5 * SIEVE_MOST).for_each(|_| sieve.count(now, &packet));
        assert_eq!(sieve.turn(now + Duration::from_secs(1)), None);
        assert!(!sieve.loses());
    }
}
