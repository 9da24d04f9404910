//! Between the threads that serve and the one that gossips: packets one way, the list of members the other.

use crate::limits::{PACKET_EVERY, PACKETS_MAX, PACKETS_OF_ONE_MAX};
use crate::pace::Pace;
use crate::store::{Store, lock};
use gms_transport::message::{MemberEntry, Status};
use gms_transport::{PeerId, PeerIdentity};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// A packet of gossip, and on whose link it came.
#[derive(Debug)]
pub(crate) struct Letter {
    pub from: [u8; 16],
    pub ip: IpAddr,
    pub packet: Vec<u8>,
}

/// What has come for the thread that gossips.
#[derive(Debug, Default)]
pub(crate) struct Mail {
    pub letters: Vec<Letter>,
    /// For each of the names after `--join` that was looked up, its addresses, or what is wrong.
    pub seeds: Vec<Result<Vec<SocketAddr>, String>>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Bulletin {
    mail: Mutex<Mail>,
    /// Of each sender of late.
    paces: Mutex<BTreeMap<[u8; 16], Pace>>,
    members: Mutex<Arc<[MemberEntry]>>,
    lives: Mutex<Vec<([u8; 16], u64)>>,
    has_left: AtomicBool,
    /// Readable while there is mail.
    wake: EventFd,
}

impl Bulletin {
    /// Without members yet.
    pub(crate) fn new() -> io::Result<Self> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let (members, has_left) = (Mutex::new(Arc::new([]) as Arc<[_]>), false.into());
        let (mail, paces, lives) = (Mutex::default(), Mutex::default(), Mutex::default());
        Ok(Self { mail, paces, members, lives, has_left, wake })
    }

    /// Takes a packet that came on a link of `peer`. One that is lost is answered by ok as well: SWIM asks others then.
    pub(crate) fn post(&self, now: Instant, peer: &PeerIdentity, packet: &[u8]) -> Status {
        let (PeerId::Issued(from), true) = (peer.id, peer.is_node) else { return Status::Denied };
        if self.has_left.load(Relaxed) {
            return Status::Draining;
        }
        if !self.admits(now, from) {
            return Status::Ok;
        }
        let letters = &mut lock(&self.mail).letters;
        let of_one = letters.iter().filter(|letter| letter.from == from).count();
        if letters.len() < PACKETS_MAX && of_one < PACKETS_OF_ONE_MAX {
            let ip = peer.addr.ip().to_canonical();
            letters.push(Letter { from, ip, packet: packet.to_vec() });
            self.wake();
        }
        Status::Ok
    }

    /// Whether a packet of this sender is read: some a second are.
    fn admits(&self, now: Instant, from: [u8; 16]) -> bool {
        let paces = &mut lock(&self.paces);
        if !paces.contains_key(&from) {
            paces.retain(|_, pace| !pace.is_full(now));
        }
        let pace = paces.entry(from).or_insert_with(|| Pace::new(now));
        pace.admits(now, PACKET_EVERY, PACKETS_OF_ONE_MAX as u32)
    }

    /// A name after `--join` has been looked up.
    pub(crate) fn post_seeds(&self, found: Result<Vec<SocketAddr>, String>) {
        lock(&self.mail).seeds.push(found);
        self.wake();
    }

    fn wake(&self) {
        // Fails only when its count is full, and then it is readable, which is all that is wanted.
        let _ = self.wake.write(1);
    }

    /// What has come since.
    pub(crate) fn take(&self) -> Mail {
        // Fails only when it was not readable.
        let _ = self.wake.read();
        std::mem::take(&mut *lock(&self.mail))
    }

    /// Tells the threads that serve who is a member, and which incarnation of each known node must be outlived.
    pub(crate) fn publish(&self, members: Vec<MemberEntry>, lives: Vec<([u8; 16], u64)>) {
        if self.has_left.load(Relaxed) {
            return;
        }
        *lock(&self.members) = members.into();
        *lock(&self.lives) = lives;
    }

    /// From now on this agent is no member, and names none. Called by the thread that [publishes](Bulletin::publish).
    pub(crate) fn leave(&self) {
        self.publish(Vec::new(), Vec::new());
        self.has_left.store(true, Relaxed);
    }

    /// The members, this agent the first; none once it has left.
    pub(crate) fn members(&self) -> Arc<[MemberEntry]> {
        lock(&self.members).clone()
    }

    /// The same with what this agent knows of itself.
    pub(crate) fn list(&self, store: &Store) -> Option<Vec<MemberEntry>> {
        let mut members = self.members().to_vec();
        let own = members.first_mut()?;
        (own.frames, own.frames_free) = (store.frames(), store.frames_free());
        own.load_age_ms = 0;
        Some(members)
    }

    /// The incarnation in which `peer` is known; one more than that if this is over.
    pub(crate) fn incarnation(&self, peer: PeerId) -> Option<u64> {
        let lives = lock(&self.lives);
        lives.iter().find(|(id, _)| PeerId::Issued(*id) == peer).map(|(_, life)| *life)
    }
}

impl AsFd for Bulletin {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gms_transport::Fingerprint;
    use gms_transport::message::Zone;
    use std::time::Duration;

    fn peer(id: u8, is_node: bool) -> PeerIdentity {
        let (id, addr) = (PeerId::Issued([id; 16]), ([127, 0, 0, 1], 7).into());
        PeerIdentity { id, fingerprint: Fingerprint([0; 32]), addr, is_node }
    }

    #[test]
    fn gossip_is_of_nodes_only_and_one_node_does_not_take_the_place_of_others() {
        let (bulletin, now) = (Bulletin::new().expect("a descriptor"), Instant::now());
        assert_eq!(bulletin.post(now, &peer(1, false), &[0]), Status::Denied);
        for _ in 0..2 * PACKETS_MAX {
            assert_eq!(bulletin.post(now, &peer(2, true), &[0]), Status::Ok);
        }
        assert_eq!(bulletin.post(now, &peer(3, true), &[0]), Status::Ok);
        let letters = bulletin.take().letters;
        assert_eq!(letters.len(), PACKETS_OF_ONE_MAX + 1);
        assert_eq!(letters.last().map(|letter| letter.from), Some([3; 16]));
        assert!(bulletin.take().letters.is_empty());
    }

    #[test]
    fn one_node_has_no_more_than_some_packets_a_second_read_however_fast_it_sends() {
        let (bulletin, mut now) = (Bulletin::new().expect("a descriptor"), Instant::now());
        let mut read = 0;
        for _ in 0..10_000 {
            now += Duration::from_millis(1);
            bulletin.post(now, &peer(2, true), &[0]);
            read += bulletin.take().letters.len();
        }
        assert!((400..=600).contains(&read), "{read} packets in 10 s");
        // Those who are quiet take no memory.
        bulletin.post(now + Duration::from_secs(9), &peer(3, true), &[0]);
        assert_eq!(lock(&bulletin.paces).len(), 1);
    }

    #[test]
    fn an_agent_that_has_left_names_nobody() {
        let (bulletin, now) = (Bulletin::new().expect("a descriptor"), Instant::now());
        let entry = MemberEntry::new([3; 16], ([127, 0, 0, 1], 7).into(), 5, Zone::default());
        let publish = || bulletin.publish(vec![entry], vec![([3; 16], 5)]);
        publish();
        assert_eq!(bulletin.incarnation(PeerId::Issued([3; 16])), Some(5));
        bulletin.leave();
        for _ in 0..2 {
            assert!(bulletin.members().is_empty());
            assert_eq!(bulletin.incarnation(PeerId::Issued([3; 16])), None);
            publish();
        }
        assert_eq!(bulletin.post(now, &peer(3, true), &[0]), Status::Draining);
    }
}
