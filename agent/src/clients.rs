//! What each client holds of what is bounded. A client is who has its id (or certificate), which pagers of many machines may share.
//!
//! A client may take another of something as long as it holds less than what is free (dynamic thresholds, Choudhury
//! and Hahne, 1998): a client alone gets half, each of n greedy ones 1/(n+1), and a newcomer always finds room.
//! Whoever exceeds that is refused; nobody else notices. Frames are shared by [`Clients::room`]. A client to which the
//! agent's list gives a quota has that as a bound besides, however much is free.

use crate::limits::{
    CREDITS_MAX, EXCHANGES_MAX, FRAME_LEN, HEADS_MAX, LINKS_MAX, NODE_LINKS_MAX, RESERVE_SHARE,
    TENANTS_MAX,
};
use gms_policy::Bytes;
use gms_transport::keys::{Allowed, Quota};
use gms_transport::{PeerId, PeerIdentity};
use std::collections::HashMap;
use std::sync::Arc;

/// A client which has a link or a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClientId(u16);

const _: () =
    assert!(LINKS_MAX + TENANTS_MAX < u16::MAX as usize, "each client has one or the other");

/// Something of which there is a bounded number for all clients together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bounded {
    /// Open links.
    Link,
    /// Workloads, those whose frames are being freed included.
    Tenant,
    /// Requests that have begun and not come whole.
    Exchange,
    /// Bytes set aside for their descriptors and page ids.
    Head,
    /// Those of the open links that agents have made.
    NodeLink,
}

impl Bounded {
    const MOST: [usize; 5] = [LINKS_MAX, TENANTS_MAX, EXCHANGES_MAX, HEADS_MAX, NODE_LINKS_MAX];
    const NONE: [usize; 5] = [0; 5];
}

/// What a workload is told of the room for it, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// It may put now.
    pub credits: u64,
    /// Are free, for all clients or for its own, whichever is less.
    pub free: u64,
}

#[derive(Debug)]
struct Client {
    key: PeerId,
    quota: Quota,
    held: [usize; Bounded::MOST.len()],
    /// Workloads that have not ended.
    live: usize,
    /// Frames with its pages, and those set aside for puts that are coming in.
    frames: u64,
}

impl Client {
    /// Most of `what` by its quota.
    fn most(&self, what: Bounded) -> usize {
        let bound = match what {
            Bounded::Link => self.quota.links,
            Bounded::Exchange => self.quota.requests,
            Bounded::Tenant | Bounded::Head | Bounded::NodeLink => None,
        };
        bound.map_or(usize::MAX, |bound| bound as usize)
    }

    /// Frames, of `frames` that there are, which its quota leaves.
    fn left(&self, frames: u64) -> u64 {
        let export = Bytes(frames * FRAME_LEN as u64);
        let most = self.quota.memory.map_or(u64::MAX, |memory| memory.of(export).pages().0);
        most.saturating_sub(self.frames)
    }
}

/// All clients, and what they hold together.
#[derive(Debug, Default)]
pub struct Clients {
    entries: Vec<Option<Client>>,
    free: Vec<u16>,
    by_key: HashMap<PeerId, ClientId>,
    /// Who has which quota, if there is a list.
    allowed: Option<Arc<Allowed>>,
    held: [usize; Bounded::MOST.len()],
    /// Clients with a workload that has not ended.
    active: usize,
}

impl Clients {
    /// From now on clients have the quotas of this list; without one they have none. A client that has more than its quota
    /// keeps it.
    pub fn set_allowed(&mut self, allowed: Option<Arc<Allowed>>) {
        self.allowed = allowed;
        let allowed = self.allowed.as_deref();
        let clients = self.entries.iter_mut().flatten();
        clients.for_each(|client| client.quota = quota(allowed, &client.key));
    }

    /// The client, if it has a link or a workload.
    pub fn find(&self, key: &PeerId) -> Option<ClientId> {
        self.by_key.get(key).copied()
    }

    /// Takes one of `what` for the client; `None` if that would leave too little to others.
    pub fn take(&mut self, key: PeerId, what: Bounded) -> Option<ClientId> {
        match self.find(&key) {
            Some(id) => self.take_more(id, what, 1).then_some(id),
            None if self.held[what as usize] < Bounded::MOST[what as usize] => {
                let id = self.insert(key);
                self.take_more(id, what, 1).then_some(id)
            }
            None => None,
        }
    }

    /// Takes a link for `peer`; agents leave most of them to pagers.
    pub fn take_link(&mut self, peer: &PeerIdentity) -> Option<ClientId> {
        let id = self.take(peer.id, Bounded::Link)?;
        if peer.is_node && !self.take_more(id, Bounded::NodeLink, 1) {
            self.give(id, Bounded::Link, 1);
            return None;
        }
        Some(id)
    }

    /// Gives a link of `peer` back.
    pub fn give_link(&mut self, id: ClientId, peer: &PeerIdentity) {
        // Before the rest: a client that holds nothing more is forgotten.
        if peer.is_node {
            self.give(id, Bounded::NodeLink, 1);
        }
        self.give(id, Bounded::Link, 1);
    }

    /// As [`Clients::take`] of `count` for a client that is known; false if refused.
    fn take_more(&mut self, id: ClientId, what: Bounded, count: usize) -> bool {
        let (at, total) = (what as usize, &mut self.held[what as usize]);
        let Some(client) = &mut self.entries[usize::from(id.0)] else { return false };
        let allowed =
            client.held[at] + count <= (Bounded::MOST[at] - *total).min(client.most(what));
        if allowed {
            client.held[at] += count;
            *total += count;
        }
        allowed
    }

    /// Gives `count` of `what` back. A client that holds nothing more is forgotten.
    pub fn give(&mut self, id: ClientId, what: Bounded, count: usize) {
        let entry = &mut self.entries[usize::from(id.0)];
        let Some(client) = entry else { return };
        client.held[what as usize] -= count;
        self.held[what as usize] -= count;
        if client.held == Bounded::NONE {
            self.by_key.remove(&client.key);
            *entry = None;
            self.free.push(id.0);
        }
    }

    /// A request of the client begins, with `head` bytes of descriptors and `frames` frames; false if refused.
    pub fn begin(&mut self, id: ClientId, head: usize, frames: u64) -> bool {
        if !self.take_more(id, Bounded::Head, head) {
            return false;
        }
        if !self.take_more(id, Bounded::Exchange, 1) {
            self.give(id, Bounded::Head, head);
            return false;
        }
        self.take_frames(id, frames);
        true
    }

    /// Such a request has ended, which had `frames` frames left.
    pub fn end(&mut self, id: ClientId, head: usize, frames: u64) {
        // Before the rest: a client that holds nothing more is forgotten.
        self.give_frames(id, frames);
        self.give(id, Bounded::Head, head);
        self.give(id, Bounded::Exchange, 1);
    }

    /// A workload of the client lives (`true`), or has ended.
    pub fn set_live(&mut self, id: ClientId, lives: bool) {
        let Some(client) = &mut self.entries[usize::from(id.0)] else { return };
        match lives {
            true => client.live += 1,
            false => client.live -= 1,
        }
        match (lives, client.live) {
            (true, 1) => self.active += 1,
            (false, 0) => self.active -= 1,
            _ => {}
        }
    }

    /// Workloads of the client that have not ended.
    pub fn live(&self, id: ClientId) -> usize {
        self.entries[usize::from(id.0)].as_ref().map_or(0, |client| client.live)
    }

    /// Frames were taken for the client.
    pub fn take_frames(&mut self, id: ClientId, count: u64) {
        if let Some(client) = &mut self.entries[usize::from(id.0)] {
            client.frames += count;
        }
    }

    /// Frames of the client were freed.
    pub fn give_frames(&mut self, id: ClientId, count: u64) {
        if let Some(client) = &mut self.entries[usize::from(id.0)] {
            client.frames -= count;
        }
    }

    /// What a workload of the client may put now, if `free` of `frames` frames are free: of those an equal share for each
    /// client, of that one for each of its workloads, and no more than the client's quota leaves. While there are several
    /// clients, one which has more than its share of all frames leaves the last part to others; one that is alone may take
    /// all.
    pub fn room(&self, id: Option<ClientId>, free: u64, frames: u64) -> Room {
        let clients = self.active.max(1) as u64;
        let client = id.and_then(|id| self.entries[usize::from(id.0)].as_ref());
        let (live, held) =
            client.map_or((1, 0), |client| (client.live.max(1) as u64, client.frames));
        let reserve =
            if clients > 1 && held >= frames / clients { frames / RESERVE_SHARE } else { 0 };
        let left = client.map_or(u64::MAX, |client| client.left(frames));
        let share = free.saturating_sub(reserve).div_ceil(clients).min(left).div_ceil(live);
        Room { credits: share.min(CREDITS_MAX), free: free.min(left) }
    }

    fn insert(&mut self, key: PeerId) -> ClientId {
        let quota = quota(self.allowed.as_deref(), &key);
        let client = Some(Client { key, quota, held: Bounded::NONE, live: 0, frames: 0 });
        let id = ClientId(self.free.pop().unwrap_or(self.entries.len() as u16));
        match self.entries.get_mut(usize::from(id.0)) {
            Some(entry) => *entry = client,
            None => self.entries.push(client),
        }
        self.by_key.insert(key, id);
        id
    }
}

/// The quota that a list gives a client. Who is on none has no link, so it does not matter which.
fn quota(allowed: Option<&Allowed>, key: &PeerId) -> Quota {
    allowed.and_then(|allowed| allowed.quota(key)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use gms_transport::{Fingerprint, keys};

    fn key(n: u16) -> PeerId {
        PeerId::Issued(u128::from(n).to_le_bytes())
    }

    /// Takes as many as it gets.
    fn grab(clients: &mut Clients, client: u16, what: Bounded) -> usize {
        std::iter::from_fn(|| clients.take(key(client), what)).count()
    }

    fn credits(clients: &Clients, id: ClientId, free: u64, frames: u64) -> u64 {
        clients.room(Some(id), free, frames).credits
    }

    #[test]
    fn a_greedy_client_leaves_room_for_others() {
        for what in [Bounded::Link, Bounded::Tenant, Bounded::Exchange] {
            let most = Bounded::MOST[what as usize];
            let mut clients = Clients::default();
            assert_eq!(grab(&mut clients, 1, what), most / 2);
            assert_eq!(grab(&mut clients, 2, what), most / 4);
            let id = clients.find(&key(1)).expect("known");
            (0..most / 2).for_each(|_| clients.give(id, what, 1));
            assert_eq!(clients.find(&key(1)), None);
            // As if it had been the first: half of what the other leaves.
            assert_eq!(grab(&mut clients, 3, what), (most - most / 4) / 2);
        }
    }

    #[test]
    fn agents_leave_most_links_to_pagers() {
        let mut clients = Clients::default();
        let peer = |n: u16, is_node| PeerIdentity {
            id: key(n),
            fingerprint: Fingerprint([0; 32]),
            addr: ([127, 0, 0, 1], 7).into(),
            is_node,
        };
        let all = 1..LINKS_MAX as u16;
        let agents: Vec<_> = all.filter_map(|n| clients.take_link(&peer(n, true))).collect();
        assert_eq!(agents.len(), NODE_LINKS_MAX);
        let pagers = (1000..2000).filter_map(|n| clients.take_link(&peer(n, false)));
        assert_eq!(pagers.count(), LINKS_MAX - NODE_LINKS_MAX);
        clients.give_link(agents[0], &peer(1, true));
        assert_eq!(clients.find(&key(1)), None);
        assert!(clients.take_link(&peer(900, true)).is_some());
    }

    #[test]
    fn frames_are_shared_by_clients_before_workloads() {
        let mut clients = Clients::default();
        let [a, b] = [1, 2].map(|n| clients.take(key(n), Bounded::Tenant).expect("room"));
        clients.set_live(a, true);
        assert_eq!(credits(&clients, a, 800, 800), 800);
        // Nobody is there for whom the last eighth would be left.
        clients.take_frames(a, 790);
        assert_eq!(credits(&clients, a, 10, 800), 10);
        clients.give_frames(a, 790);
        clients.set_live(b, true);
        // However many workloads a client has, another's credits stay.
        (0..99).for_each(|_| clients.set_live(a, true));
        assert_eq!((credits(&clients, a, 800, 800), credits(&clients, b, 800, 800)), (4, 400));
        // Beyond its share a client leaves the last eighth to those below theirs.
        clients.take_frames(a, 700);
        assert_eq!((credits(&clients, a, 100, 800), credits(&clients, b, 100, 800)), (0, 50));
        clients.give_frames(a, 400);
        assert_eq!(credits(&clients, a, 100, 800), 1);
        (0..100).for_each(|_| clients.set_live(a, false));
        assert_eq!(credits(&clients, b, 1 << 30, 1 << 30), CREDITS_MAX);
    }

    /// A list with these lines, read as an agent reads it.
    fn allowed(lines: &str) -> Option<Arc<Allowed>> {
        let name = format!("gms-quotas-{}-{}", std::process::id(), lines.len());
        let dir = std::env::temp_dir().join(name);
        keys::init(&dir).expect("keys");
        std::fs::write(dir.join(keys::ALLOWED), lines).expect("a list");
        let identity = keys::load(&dir, keys::Role::Node);
        std::fs::remove_dir_all(&dir).expect("remove");
        identity.expect("a good list").allowed().cloned()
    }

    #[test]
    fn a_quota_bounds_a_client_and_no_other() {
        let (a, b) = (key(1), key(2));
        let mut clients = Clients::default();
        clients.set_allowed(allowed(&format!("{a} memory=25% links=3 requests=2\n{b}\n")));
        assert_eq!(grab(&mut clients, 1, Bounded::Link), 3);
        assert_eq!(grab(&mut clients, 1, Bounded::Exchange), 2);
        assert_eq!(grab(&mut clients, 2, Bounded::Link), (LINKS_MAX - 3).div_ceil(2));
        let id = clients.find(&a).expect("known");
        assert!(!clients.begin(id, 0, 0), "a third request");
        assert_eq!(clients.room(Some(id), 800, 800), Room { credits: 200, free: 200 });
        clients.take_frames(id, 150);
        assert_eq!(clients.room(Some(id), 650, 800), Room { credits: 50, free: 50 });
        assert_eq!(clients.room(Some(id), 20, 800), Room { credits: 20, free: 20 });
        let other = clients.find(&b);
        assert_eq!(clients.room(other, 650, 800), Room { credits: 650, free: 650 });
        // Each of its workloads has a part.
        (0..2).for_each(|_| clients.set_live(id, true));
        assert_eq!(clients.room(Some(id), 650, 800).credits, 25);
        // A smaller quota takes nothing away that it has, and gives nothing.
        clients.set_allowed(allowed(&format!("{a} memory=64K links=1\n*\n")));
        assert_eq!(clients.room(Some(id), 650, 800), Room { credits: 0, free: 0 });
        assert_eq!(grab(&mut clients, 1, Bounded::Link), 0);
        clients.give(id, Bounded::Link, 3);
        assert_eq!(grab(&mut clients, 1, Bounded::Link), 1);
        clients.set_allowed(None);
        assert_eq!(clients.room(Some(id), 650, 800).credits, 325);
    }
}
