//! Who owns pages: a tenant is a client and one of its workloads. Its lease runs while it has no link.

use crate::clients::{Bounded, ClientId, Clients};
use crate::limits::{LEASE_DEFAULT, LEASE_MAX, LEASE_MIN};
use crate::store::TenantId;
use gms_transport::PeerId;
use gms_transport::message::WorkloadId;
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

/// Where a tenant stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Has `links` links; until the last closes or the workload says goodbye.
    Linked { links: u32 },
    /// Has none; until one comes back or the lease ends.
    Leased { until: Instant },
    /// Ended: no longer found by its key; until its last page is freed.
    Dead,
}

#[derive(Debug)]
struct Tenant {
    key: TenantKey,
    client: ClientId,
    session: u64,
    lease: Duration,
    pages: u64,
    state: State,
}

/// All tenants. Their pages are counted here, so that a number is used again only when the last page under it is
/// gone.
#[derive(Debug, Default)]
pub struct Tenants {
    /// Whose they are, and what else clients hold.
    pub clients: Clients,
    slots: Vec<Option<Tenant>>,
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

    /// The number of a tenant's session: another one tells the workload that its pages are gone.
    pub fn session(&self, id: TenantId) -> u64 {
        self.slots[usize::from(id.0)].as_ref().map_or(0, |tenant| tenant.session)
    }

    /// A new link of `key`, which asks for `lease_ms` (0: the default). The tenant, and the lease granted; `None` if
    /// there are too many.
    pub fn link(&mut self, key: TenantKey, lease_ms: u64) -> Option<(TenantId, Duration)> {
        let lease = lease_of(lease_ms);
        let id = match self.by_key.get(&key) {
            Some(&id) => id,
            None => self.insert(key)?,
        };
        let tenant = self.slots[usize::from(id.0)].as_mut()?;
        tenant.lease = lease;
        tenant.state = match tenant.state {
            State::Linked { links } => State::Linked { links: links + 1 },
            _ => {
                self.leased -= 1;
                State::Linked { links: 1 }
            }
        };
        Some((id, lease))
    }

    /// A link of the tenant asks again for a lease: the one granted.
    pub fn renew(&mut self, id: TenantId, lease_ms: u64) -> Duration {
        let lease = lease_of(lease_ms);
        if let Some(tenant) = &mut self.slots[usize::from(id.0)] {
            tenant.lease = lease;
        }
        lease
    }

    /// A link of the tenant closed. One without pages has nothing to lease and ends with its last link.
    pub fn unlink(&mut self, now: Instant, id: TenantId) {
        let Some(tenant) = &mut self.slots[usize::from(id.0)] else { return };
        match tenant.state {
            State::Linked { links: 0 | 1 } if tenant.pages == 0 => self.end(id),
            State::Linked { links: 0 | 1 } => {
                tenant.state = State::Leased { until: now + tenant.lease };
                self.leased += 1;
            }
            State::Linked { links } => tenant.state = State::Linked { links: links - 1 },
            State::Leased { .. } | State::Dead => {}
        }
    }

    /// The workload has ended: nobody finds it any more, and its pages are to be swept.
    pub fn end(&mut self, id: TenantId) {
        let Some(tenant) = &mut self.slots[usize::from(id.0)] else { return };
        if tenant.state == State::Dead {
            return;
        }
        self.leased -= usize::from(matches!(tenant.state, State::Leased { .. }));
        self.by_key.remove(&tenant.key);
        tenant.state = State::Dead;
        self.dead_pages += tenant.pages;
        let (client, pages) = (tenant.client, tenant.pages);
        self.clients.set_live(client, false);
        if pages == 0 {
            self.remove(id);
        }
    }

    fn remove(&mut self, id: TenantId) {
        if let Some(tenant) = self.slots[usize::from(id.0)].take() {
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

    /// A page of the tenant was stored, in a frame which its client had taken.
    pub fn add_page(&mut self, id: TenantId) {
        if let Some(tenant) = &mut self.slots[usize::from(id.0)] {
            tenant.pages += 1;
        }
    }

    /// A page of the tenant was freed.
    pub fn remove_page(&mut self, id: TenantId) {
        let Some(tenant) = &mut self.slots[usize::from(id.0)] else { return };
        tenant.pages -= 1;
        self.clients.give_frames(tenant.client, 1);
        if tenant.state == State::Dead {
            self.dead_pages -= 1;
            if tenant.pages == 0 {
                self.remove(id);
            }
        }
    }

    /// Whose the tenant is.
    pub fn client(&self, id: TenantId) -> Option<ClientId> {
        self.slots[usize::from(id.0)].as_ref().map(|tenant| tenant.client)
    }

    /// Pages of the tenant.
    pub fn pages(&self, id: TenantId) -> u64 {
        self.slots[usize::from(id.0)].as_ref().map_or(0, |tenant| tenant.pages)
    }

    /// Whether the tenant has ended.
    pub fn is_dead(&self, id: TenantId) -> bool {
        self.slots[usize::from(id.0)].as_ref().is_none_or(|tenant| tenant.state == State::Dead)
    }

    /// The key of a tenant which has not ended.
    pub fn key(&self, id: TenantId) -> Option<TenantKey> {
        let tenant = self.slots[usize::from(id.0)].as_ref()?;
        (tenant.state != State::Dead).then_some(tenant.key)
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

    /// Tenants with pages, with a link or about to come back: those for whom a drain waits.
    pub fn in_use(&self) -> usize {
        self.ids().filter(|(_, tenant)| tenant.pages > 0 && tenant.state != State::Dead).count()
    }

    fn ids(&self) -> impl Iterator<Item = (TenantId, &Tenant)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| {
            slot.as_ref().map(|tenant| (TenantId(index as u16), tenant))
        })
    }

    fn insert(&mut self, key: TenantKey) -> Option<TenantId> {
        let client = self.clients.take(key.client, Bounded::Tenant)?;
        self.clients.set_live(client, true);
        // `link` gives it its first link at once.
        let state = State::Linked { links: 0 };
        self.last_session = self.last_session.wrapping_add(1);
        let (session, lease) = (self.last_session, LEASE_DEFAULT);
        let tenant = Some(Tenant { key, client, session, lease, pages: 0, state });
        let id = TenantId(self.free.pop().unwrap_or(self.slots.len() as u16));
        match self.slots.get_mut(usize::from(id.0)) {
            Some(slot) => *slot = tenant,
            None => self.slots.push(tenant),
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
    fn hold_page(tenants: &mut Tenants, id: TenantId) {
        let client = tenants.key(id).and_then(|key| tenants.clients.find(&key.client));
        tenants.clients.take_frames(client.expect("known"), 1);
        tenants.add_page(id);
    }

    #[test]
    fn a_lease_runs_only_without_links() {
        let (mut tenants, start) = (Tenants::default(), Instant::now());
        let (id, lease) = tenants.link(key(1), 5000).expect("room");
        assert_eq!(
            (lease, tenants.link(key(1), 5000)),
            (Duration::from_secs(5), Some((id, lease)))
        );
        hold_page(&mut tenants, id);
        tenants.unlink(start, id);
        assert!(tenants.expire(start + LEASE_MAX).is_empty());
        tenants.unlink(start, id);
        assert_eq!(
            (tenants.leased(), tenants.expire(start + lease - Duration::from_nanos(1)).len()),
            (1, 0)
        );
        assert_eq!(tenants.link(key(1), 5000), Some((id, lease)));
        tenants.unlink(start, id);
        assert_eq!(
            (tenants.expire(start + lease), tenants.leased(), tenants.dead_pages()),
            (vec![(key(1), 1)], 0, 1)
        );
        assert!(tenants.is_dead(id) && !tenants.knows(&key(1)));
    }

    #[test]
    fn a_number_is_free_only_with_its_last_page() {
        let mut tenants = Tenants::default();
        let (id, _) = tenants.link(key(1), 0).expect("room");
        hold_page(&mut tenants, id);
        tenants.end(id);
        let (other, _) = tenants.link(key(1), 0).expect("room");
        assert_ne!(id, other);
        tenants.remove_page(id);
        assert_eq!(tenants.link(key(2), 0).map(|(id, _)| id), Some(id));
    }

    #[test]
    fn a_session_is_the_same_until_its_pages_are_gone() {
        let (mut tenants, start) = (Tenants::new(7), Instant::now());
        let (id, lease) = tenants.link(key(1), 0).expect("room");
        let first = tenants.session(id);
        hold_page(&mut tenants, id);
        tenants.unlink(start, id);
        let again = tenants.link(key(1), 0).expect("known");
        assert_eq!((again.0, tenants.session(again.0)), (id, first));
        tenants.unlink(start, id);
        assert_eq!(tenants.expire(start + lease).len(), 1);
        let (id, _) = tenants.link(key(1), 0).expect("room");
        assert_ne!(tenants.session(id), first);
    }

    #[test]
    fn leases_and_numbers_are_bounded() {
        let mut tenants = Tenants::default();
        assert_eq!(tenants.link(key(0), 1).map(|(_, lease)| lease), Some(LEASE_MIN));
        assert_eq!(tenants.link(key(0), u64::MAX).map(|(_, lease)| lease), Some(LEASE_MAX));
        let workload = |n: usize| WorkloadId((n as u128).to_le_bytes());
        let mut many =
            (0..TENANTS_MAX).map(|n| TenantKey { workload: workload(n + 1000), ..key(0) });
        let refused = many.position(|key| tenants.link(key, 0).is_none());
        // One client leaves room for another.
        assert_eq!(refused, Some(TENANTS_MAX / 2 - 1));
        assert!(tenants.link(key(9), 0).is_some());
    }
}
