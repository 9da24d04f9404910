//! Who owns pages: a tenant is a client and one of its workloads. Its lease runs while it has no link.

use crate::clients::{Bounded, ClientId, Clients};
use crate::limits::{LEASE_DEFAULT, LEASE_MAX, LEASE_MIN};
use crate::store::TenantId;
use gms_transport::PeerId;
use gms_transport::message::{Status, WorkloadId};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// What names a tenant. The client's id comes from the link's handshake, never from a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TenantKey {
    /// The client.
    pub client: PeerId,
    /// Its workload.
    pub workload: WorkloadId,
}

/// A tenant as a link knows it. Its number alone may be another tenant's later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// The tenant.
    pub tenant: TenantId,
    /// The number of its session: another one tells the workload that its pages are gone.
    pub number: u64,
    /// Which pager of the workload the link is of, as that says; 0 if it does not.
    pub incarnation: u64,
}

/// Where a tenant stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Has `links` links; until the last closes or the workload says goodbye. None, where leases do not end.
    Linked { links: u32 },
    /// Has none; until one comes back or the lease ends.
    Leased { until: Instant },
    /// Ended: no longer found by its key; until its last page is freed, and nobody holds it.
    Dead,
}

#[derive(Debug)]
struct Tenant {
    key: TenantKey,
    client: ClientId,
    session: u64,
    /// The latest that any link has said.
    incarnation: u64,
    lease: Duration,
    pages: u64,
    /// Requests and sweeps at work on its pages, outside of the lock that guards all this.
    holders: usize,
    state: State,
}

impl Tenant {
    /// Whether a pager of the workload has come after that one.
    fn has_outlived(&self, incarnation: u64) -> bool {
        incarnation != 0 && incarnation < self.incarnation
    }
}

/// All tenants. Their pages are counted here, so that a number is used again only when the last page under it is
/// gone, and whoever works with them [holds](Tenants::hold) the number.
#[derive(Debug, Default)]
pub struct Tenants {
    /// Whose they are, and what else clients hold.
    pub clients: Clients,
    /// Leases do not end: a tenant with pages stays until it says goodbye.
    pub endless: bool,
    entries: Vec<Option<Tenant>>,
    free: Vec<u16>,
    by_key: HashMap<TenantKey, TenantId>,
    dead_pages: u64,
    leased: usize,
    last_session: u64,
}

impl Tenants {
    /// No tenants. Sessions are numbered from `first_session` on: a random number, so that those of a restarted agent are others.
    pub fn new(first_session: u64) -> Tenants {
        Tenants { last_session: first_session, ..Tenants::default() }
    }

    /// A new link of `key`, of its pager `incarnation`, which asks for `lease_ms` (0: the default). The session, and the lease granted.
    ///
    /// # Errors
    /// `Full`: there are too many tenants. `Denied`: a later pager of the workload has come.
    pub fn link(
        &mut self,
        key: TenantKey,
        incarnation: u64,
        lease_ms: u64,
    ) -> Result<(Session, Duration), Status> {
        let lease = lease_of(lease_ms);
        let id = match self.by_key.get(&key) {
            Some(&id) => id,
            None => self.insert(key).ok_or(Status::Full)?,
        };
        let tenant = self.entries[usize::from(id.0)].as_mut().ok_or(Status::Full)?;
        if tenant.has_outlived(incarnation) {
            return Err(Status::Denied);
        }
        tenant.incarnation = tenant.incarnation.max(incarnation);
        tenant.lease = lease;
        tenant.state = match tenant.state {
            State::Linked { links } => State::Linked { links: links + 1 },
            _ => {
                self.leased -= 1;
                State::Linked { links: 1 }
            }
        };
        Ok((Session { tenant: id, number: tenant.session, incarnation }, lease))
    }

    /// A link of the tenant asks again for a lease: the one granted.
    pub fn renew(&mut self, session: Session, lease_ms: u64) -> Duration {
        let lease = lease_of(lease_ms);
        if let Some(tenant) = self.live_mut(session) {
            tenant.lease = lease;
        }
        lease
    }

    /// A link of the tenant closed. One without pages has nothing to lease and ends with its last link.
    pub fn unlink(&mut self, now: Instant, session: Session) {
        let endless = self.endless;
        let Some(tenant) = self.live_mut(session) else { return };
        match tenant.state {
            State::Linked { links: 0 | 1 } if tenant.pages == 0 => self.end(session.tenant),
            State::Linked { links: 0 | 1 } if endless => tenant.state = State::Linked { links: 0 },
            State::Linked { links: 0 | 1 } => {
                tenant.state = State::Leased { until: now + tenant.lease };
                self.leased += 1;
            }
            State::Linked { links } => tenant.state = State::Linked { links: links - 1 },
            State::Leased { .. } | State::Dead => {}
        }
    }

    /// The workload says that it has ended, on a link of this session.
    pub fn goodbye(&mut self, session: Session) {
        if self.live_mut(session).is_some() {
            self.end(session.tenant);
        }
    }

    /// The workload has ended: nobody finds it any more, and its pages are to be swept.
    fn end(&mut self, id: TenantId) {
        let Some(tenant) = &mut self.entries[usize::from(id.0)] else { return };
        if tenant.state == State::Dead {
            return;
        }
        self.leased -= usize::from(matches!(tenant.state, State::Leased { .. }));
        self.by_key.remove(&tenant.key);
        tenant.state = State::Dead;
        self.dead_pages += tenant.pages;
        let client = tenant.client;
        self.clients.set_live(client, false);
        self.remove_if_over(id);
    }

    /// Frees the number of an ended tenant of which nothing is left.
    fn remove_if_over(&mut self, id: TenantId) {
        let over = |tenant: &mut Tenant| {
            tenant.state == State::Dead && tenant.pages == 0 && tenant.holders == 0
        };
        if let Some(tenant) = self.entries[usize::from(id.0)].take_if(over) {
            self.clients.give(tenant.client, Bounded::Tenant, 1);
            self.free.push(id.0);
        }
    }

    /// Ends the tenants whose lease is over, and returns whose they were and how many pages they had.
    pub fn expire(&mut self, now: Instant) -> Vec<(TenantKey, u64)> {
        let over =
            |tenant: &Tenant| matches!(tenant.state, State::Leased { until } if until <= now);
        let ended: Vec<(TenantId, TenantKey, u64)> = self
            .ids()
            .filter(|(_, tenant)| over(tenant))
            .map(|(id, tenant)| (id, tenant.key, tenant.pages))
            .collect();
        ended
            .into_iter()
            .map(|(id, key, pages)| {
                self.end(id);
                (key, pages)
            })
            .collect()
    }

    /// A request of the tenant begins its work in the store: the number stays the tenant's until [`Tenants::let_go`],
    /// also if the workload ends meanwhile. It will store `pages` pages, in frames which the client had taken.
    pub fn hold(&mut self, id: TenantId, pages: u64) {
        let Some(tenant) = &mut self.entries[usize::from(id.0)] else { return };
        tenant.holders += 1;
        tenant.pages += pages;
    }

    /// Such work is over, and has freed `pages` pages of the tenant.
    pub fn let_go(&mut self, id: TenantId, pages: u64) {
        let Some(tenant) = &mut self.entries[usize::from(id.0)] else { return };
        tenant.holders -= 1;
        tenant.pages -= pages;
        self.clients.give_frames(tenant.client, pages);
        if tenant.state == State::Dead {
            self.dead_pages -= pages;
        }
        self.remove_if_over(id);
    }

    /// Holds all ended tenants that have pages, for a sweep: by their number, that nothing was freed of them yet.
    pub fn hold_dead(&mut self) -> Vec<Option<u64>> {
        let hold = |entry: &mut Option<Tenant>| {
            let tenant = entry.as_mut().filter(|tenant| tenant.state == State::Dead)?;
            tenant.holders += 1;
            Some(0)
        };
        self.entries.iter_mut().map(hold).collect()
    }

    /// The sweep is over, and has freed so many pages of them.
    pub fn let_go_dead(&mut self, dead: &[Option<u64>]) {
        for (id, pages) in dead.iter().enumerate() {
            if let Some(pages) = pages {
                self.let_go(TenantId(id as u16), *pages);
            }
        }
    }

    /// The tenant of a session that has not ended.
    fn live(&self, session: Session) -> Option<&Tenant> {
        let tenant = self.entries.get(usize::from(session.tenant.0))?.as_ref()?;
        (tenant.session == session.number && tenant.state != State::Dead).then_some(tenant)
    }

    fn live_mut(&mut self, session: Session) -> Option<&mut Tenant> {
        let tenant = self.entries.get_mut(usize::from(session.tenant.0))?.as_mut()?;
        (tenant.session == session.number && tenant.state != State::Dead).then_some(tenant)
    }

    /// Whose the session is, and how many pages it has, if it has not ended, and no later pager of the workload has come: what comes
    /// of an earlier one is late, and a put would store again what the later one has discarded.
    pub fn key(&self, session: Session) -> Option<(TenantKey, u64)> {
        let tenant = self.live(session)?;
        (!tenant.has_outlived(session.incarnation)).then_some((tenant.key, tenant.pages))
    }

    /// Whether `key` is known.
    pub fn knows(&self, key: &TenantKey) -> bool {
        self.by_key.contains_key(key)
    }

    /// Tenants which have not ended.
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// True without tenants.
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// Pages of ended tenants which are still to be swept.
    pub fn dead_pages(&self) -> u64 {
        self.dead_pages
    }

    /// Tenants without a link, whose lease runs.
    pub fn leased(&self) -> usize {
        self.leased
    }

    /// Pages of tenants with a link or about to come back: for those a drain waits.
    pub fn held(&self) -> u64 {
        let live = self.ids().filter(|(_, tenant)| tenant.state != State::Dead);
        live.map(|(_, tenant)| tenant.pages).sum()
    }

    fn ids(&self) -> impl Iterator<Item = (TenantId, &Tenant)> {
        self.entries.iter().enumerate().filter_map(|(index, entry)| {
            entry.as_ref().map(|tenant| (TenantId(index as u16), tenant))
        })
    }

    fn insert(&mut self, key: TenantKey) -> Option<TenantId> {
        let client = self.clients.take(key.client, Bounded::Tenant)?;
        self.clients.set_live(client, true);
        // `link` gives it its first link at once.
        let state = State::Linked { links: 0 };
        self.last_session = self.last_session.wrapping_add(1);
        let (session, lease) = (self.last_session, LEASE_DEFAULT);
        let (incarnation, pages, holders) = (0, 0, 0);
        let tenant =
            Some(Tenant { key, client, session, incarnation, lease, pages, holders, state });
        let id = TenantId(self.free.pop().unwrap_or(self.entries.len() as u16));
        match self.entries.get_mut(usize::from(id.0)) {
            Some(entry) => *entry = tenant,
            None => self.entries.push(tenant),
        }
        self.by_key.insert(key, id);
        Some(id)
    }
}

/// The lease granted to a workload which asks for `ms`; 0: for none in particular.
fn lease_of(ms: u64) -> Duration {
    match ms {
        0 => LEASE_DEFAULT,
        _ => Duration::from_millis(ms).clamp(LEASE_MIN, LEASE_MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::TENANTS_MAX;

    fn key(n: u8) -> TenantKey {
        TenantKey { client: PeerId::Issued([n; 16]), workload: WorkloadId([1; 16]) }
    }

    /// Stores a page in a frame taken for it.
    fn hold_page(tenants: &mut Tenants, session: Session) {
        let client = tenants.key(session).and_then(|(key, _)| tenants.clients.find(&key.client));
        tenants.clients.take_frames(client.expect("known"), 1);
        tenants.hold(session.tenant, 1);
        tenants.let_go(session.tenant, 0);
    }

    #[test]
    fn what_an_earlier_pager_sends_is_late_once_a_later_one_has_come() {
        let mut tenants = Tenants::default();
        let (first, _) = tenants.link(key(1), 1, 0).expect("room");
        let (unknown, _) = tenants.link(key(1), 0, 0).expect("room");
        assert!(tenants.key(first).is_some());
        let (heir, _) = tenants.link(key(1), 65_537, 0).expect("room");
        assert!(tenants.key(first).is_none() && tenants.key(heir).is_some());
        assert_eq!(tenants.link(key(1), 1, 0), Err(Status::Denied));
        assert!(tenants.key(unknown).is_some(), "one that says nothing is of no time");
        // Its links are counted all the same: without one the workload would have a lease.
        for session in [first, unknown, heir] {
            assert_eq!(tenants.leased(), 0);
            hold_page(&mut tenants, heir);
            tenants.unlink(Instant::now(), session);
        }
        assert_eq!(tenants.leased(), 1);
        assert!(tenants.link(key(2), 1, 0).is_ok(), "another workload's");
    }

    #[test]
    fn a_lease_runs_only_without_links() {
        let (mut tenants, start) = (Tenants::default(), Instant::now());
        let (id, lease) = tenants.link(key(1), 0, 5000).expect("room");
        assert_eq!(
            (lease, tenants.link(key(1), 0, 5000)),
            (Duration::from_secs(5), Ok((id, lease)))
        );
        hold_page(&mut tenants, id);
        tenants.unlink(start, id);
        assert!(tenants.expire(start + LEASE_MAX).is_empty());
        tenants.unlink(start, id);
        assert_eq!(
            (tenants.leased(), tenants.expire(start + lease - Duration::from_nanos(1)).len()),
            (1, 0)
        );
        assert_eq!(tenants.link(key(1), 0, 5000), Ok((id, lease)));
        tenants.unlink(start, id);
        assert_eq!(
            (tenants.expire(start + lease), tenants.leased(), tenants.dead_pages()),
            (vec![(key(1), 1)], 0, 1)
        );
        assert!(tenants.key(id).is_none() && !tenants.knows(&key(1)));
    }

    #[test]
    fn an_endless_lease_lasts_until_the_goodbye() {
        let (mut tenants, start) =
            (Tenants { endless: true, ..Tenants::default() }, Instant::now());
        let (id, lease) = tenants.link(key(1), 0, 1000).expect("room");
        hold_page(&mut tenants, id);
        tenants.unlink(start, id);
        assert_eq!((tenants.leased(), tenants.expire(start + LEASE_MAX * 1000)), (0, vec![]));
        assert_eq!(tenants.link(key(1), 0, 1000), Ok((id, lease)), "the same session");
        tenants.goodbye(id);
        assert_eq!((tenants.dead_pages(), tenants.knows(&key(1))), (1, false));
        // Without pages there is nothing to keep.
        let (empty, _) = tenants.link(key(2), 0, 1000).expect("room");
        tenants.unlink(start, empty);
        assert!(!tenants.knows(&key(2)));
    }

    #[test]
    fn a_number_is_free_only_with_its_last_page() {
        let mut tenants = Tenants::default();
        let (id, _) = tenants.link(key(1), 0, 0).expect("room");
        hold_page(&mut tenants, id);
        tenants.goodbye(id);
        let (other, _) = tenants.link(key(1), 0, 0).expect("room");
        assert_ne!(id.tenant, other.tenant);
        let swept = [Some(1), None];
        assert_eq!(tenants.hold_dead(), [Some(0), None]);
        // Nor while somebody is at work on it.
        tenants.hold(id.tenant, 0);
        tenants.let_go_dead(&swept);
        assert_eq!(tenants.link(key(2), 0, 0).map(|(id, _)| id.tenant), Ok(TenantId(2)));
        tenants.let_go(id.tenant, 0);
        assert_eq!(tenants.link(key(3), 0, 0).map(|(id, _)| id.tenant), Ok(id.tenant));
    }

    #[test]
    fn a_session_that_has_ended_says_nothing_about_the_next_one() {
        let (mut tenants, start) = (Tenants::default(), Instant::now());
        let (old, _) = tenants.link(key(1), 0, 0).expect("room");
        tenants.goodbye(old);
        let (new, _) = tenants.link(key(2), 0, 0).expect("room");
        assert_eq!((old.tenant, tenants.key(old)), (new.tenant, None));
        // Links of the old one end, or say goodbye, or ask for a lease.
        tenants.unlink(start, old);
        tenants.goodbye(old);
        tenants.renew(old, 1);
        assert_eq!(tenants.key(new), Some((key(2), 0)));
    }

    #[test]
    fn pages_that_come_in_as_their_workload_ends_are_swept() {
        let mut tenants = Tenants::default();
        let (id, _) = tenants.link(key(1), 0, 0).expect("room");
        let client = tenants.clients.find(&key(1).client).expect("known");
        tenants.clients.take_frames(client, 2);
        tenants.hold(id.tenant, 2);
        tenants.goodbye(id);
        assert_eq!(tenants.dead_pages(), 2);
        tenants.let_go(id.tenant, 1);
        assert_eq!(tenants.dead_pages(), 1);
        let mut dead = tenants.hold_dead();
        dead[0] = Some(1);
        tenants.let_go_dead(&dead);
        assert_eq!((tenants.dead_pages(), tenants.clients.find(&key(1).client)), (0, None));
    }

    #[test]
    fn a_session_is_the_same_until_its_pages_are_gone() {
        let (mut tenants, start) = (Tenants::new(7), Instant::now());
        let (id, lease) = tenants.link(key(1), 0, 0).expect("room");
        hold_page(&mut tenants, id);
        tenants.unlink(start, id);
        let again = tenants.link(key(1), 0, 0).expect("known");
        assert_eq!(again.0, id);
        tenants.unlink(start, id);
        assert_eq!(tenants.expire(start + lease).len(), 1);
        let (next, _) = tenants.link(key(1), 0, 0).expect("room");
        assert_ne!(next.number, id.number);
    }

    #[test]
    fn leases_and_numbers_are_bounded() {
        let mut tenants = Tenants::default();
        assert_eq!(tenants.link(key(0), 0, 1).map(|(_, lease)| lease), Ok(LEASE_MIN));
        assert_eq!(tenants.link(key(0), 0, u64::MAX).map(|(_, lease)| lease), Ok(LEASE_MAX));
        let workload = |n: usize| WorkloadId((n as u128).to_le_bytes());
        let mut many =
            (0..TENANTS_MAX).map(|n| TenantKey { workload: workload(n + 1000), ..key(0) });
        let refused = many.position(|key| tenants.link(key, 0, 0) == Err(Status::Full));
        // One client leaves room for another.
        assert_eq!(refused, Some(TENANTS_MAX / 2 - 1));
        assert!(tenants.link(key(9), 0, 0).is_ok());
    }
}
