//! How far apart the agents are that have a page: those of one host fail together, and the hosts of one zone may. More zones go before more hosts.

use crate::ids::AgentId;
use crate::limits::AGENTS_MAX;

/// Where an agent is. Its zone and its host have numbers, which only tell whether those of two agents are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Site {
    zone: u8,
    host: u8,
}

const _: () = assert!(AGENTS_MAX <= u64::BITS as usize, "a bit for each zone and each host");

impl Site {
    /// The sites of agents whose zones and hosts are these, at most [`AGENTS_MAX`]. A host that is said to be in two zones counts as two.
    pub fn number<Z: PartialEq, H: PartialEq>(agents: &[(Z, H)]) -> Vec<Site> {
        let first =
            |is_it: &dyn Fn(&(Z, H)) -> bool| agents.iter().position(is_it).unwrap_or(0) as u8;
        let site = |agent: &(Z, H)| Site {
            zone: first(&|other| other.0 == agent.0),
            host: first(&|other| other == agent),
        };
        agents.iter().take(AGENTS_MAX).map(site).collect()
    }

    /// How far it is from those of some others: whether none of them is in its zone, and whether none is on its host. More is farther.
    pub(crate) fn distance(self, others: &[Site]) -> (bool, bool) {
        let is_new = |part: fn(&Site) -> u8| others.iter().all(|other| part(other) != part(&self));
        (is_new(|site| site.zone), is_new(|site| site.host))
    }

    /// An order in which zones alternate, and hosts: sites that were numbered together go by how many before them are on their host, then in their zone.
    pub(crate) fn alternation(sites: &[Site]) -> Vec<(u8, u8)> {
        let (mut hosts, mut zones) = ([0; AGENTS_MAX], [0; AGENTS_MAX]);
        let next = |counts: &mut [u8; AGENTS_MAX], of: u8| {
            let count = &mut counts[usize::from(of)];
            std::mem::replace(count, count.saturating_add(1))
        };
        sites
            .iter()
            .map(|site| (next(&mut hosts, site.host), next(&mut zones, site.zone)))
            .collect()
    }
}

/// In how many zones, and on how many hosts, some agents are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Spread {
    zones: u32,
    hosts: u32,
}

impl Spread {
    /// Of agents at these sites.
    pub fn of(sites: impl IntoIterator<Item = Site>) -> Spread {
        let add = |(zones, hosts): (u64, u64), site: Site| {
            (zones | 1 << site.zone, hosts | 1 << site.host)
        };
        let (zones, hosts) = sites.into_iter().fold((0, 0), add);
        Spread { zones: zones.count_ones(), hosts: hosts.count_ones() }
    }

    /// The most that any `count` of those agents can have.
    pub fn of_any(self, count: u32) -> Spread {
        Spread { zones: self.zones.min(count), hosts: self.hosts.min(count) }
    }
}

/// The site of each agent of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sites([Site; AGENTS_MAX]);

impl Sites {
    /// All at one site.
    pub const ONE: Sites = Sites([Site { zone: 0, host: 0 }; AGENTS_MAX]);

    /// How far apart some of them are.
    pub fn spread(&self, agents: impl Iterator<Item = AgentId>) -> Spread {
        Spread::of(agents.map(|agent| self.0[usize::from(agent.0)]))
    }
}

impl FromIterator<(AgentId, Site)> for Sites {
    fn from_iter<I: IntoIterator<Item = (AgentId, Site)>>(agents: I) -> Sites {
        let mut sites = Sites::ONE;
        agents.into_iter().for_each(|(agent, site)| sites.0[usize::from(agent.0)] = site);
        sites
    }
}
