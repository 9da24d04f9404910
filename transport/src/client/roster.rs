//! The agents of a session, for all its lanes: those that the user named, and those that agents have told of.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use gms_policy::limits::AGENTS_MAX;
use gms_policy::spread::Site;

use crate::PeerId;
use crate::message::{MemberEntry, Zone};

/// Agents of which one has told and which have not been reached yet: it may have made them up, and they keep their places.
const HEARSAY_MAX: usize = AGENTS_MAX / 4;

/// An agent's address, its name for messages, and which node is there.
#[derive(Clone, Debug)]
pub struct AgentAddress {
    /// As the user gave it.
    pub name: String,
    /// Resolved.
    pub socket: SocketAddr,
    /// The agent that told of it; `None` if the user did.
    pub learned_from: Option<String>,
    /// See [`AgentView::last_resort`](gms_policy::placement::AgentView::last_resort).
    pub(super) last_resort: bool,
    /// Where it stands, as far as is known.
    pub(super) zone: Zone,
    /// It has said so itself: no other agent's word counts any more.
    has_told_zone: bool,
    /// The first that has taken the workload, in any lane: the only one that is taken for the agent from then on.
    node: Arc<OnceLock<PeerId>>,
    /// That one has answered here; else it is only said to be here.
    is_proved: Arc<AtomicBool>,
}

impl AgentAddress {
    /// An agent of which no node is known yet. All lanes to it are made from one such value.
    pub fn new(name: String, socket: SocketAddr) -> AgentAddress {
        AgentAddress {
            name,
            socket,
            learned_from: None,
            last_resort: false,
            zone: Zone::default(),
            has_told_zone: false,
            node: Arc::default(),
            is_proved: Arc::default(),
        }
    }

    /// The same of an agent that is asked when no other one can give a page.
    pub fn last_resort(self) -> AgentAddress {
        AgentAddress { last_resort: true, ..self }
    }

    /// Whether it is asked only when no other one can give a page.
    pub fn is_last_resort(&self) -> bool {
        self.last_resort
    }

    /// The id of the node that is the agent, if that is known.
    pub fn node(&self) -> Option<[u8; 16]> {
        match self.node.get()? {
            PeerId::Issued(id) => Some(*id),
            PeerId::Certificate(_) => None,
        }
    }

    /// The same, bound to a node that has answered there.
    pub fn of_node(self, id: [u8; 16]) -> AgentAddress {
        self.bind(PeerId::Issued(id));
        self
    }

    /// The same, of which others say that this node is there.
    pub fn said_to_be(self, id: [u8; 16]) -> AgentAddress {
        self.hear(PeerId::Issued(id));
        self
    }

    /// Where it stands, as far as is known, and whether it has said so itself.
    pub fn zone(&self) -> (Zone, bool) {
        (self.zone, self.has_told_zone)
    }

    /// The same, at a place that it has told itself (`is_own_word`), or others.
    pub fn at(mut self, zone: Zone, is_own_word: bool) -> AgentAddress {
        self.note_zone(zone, is_own_word);
        self
    }

    /// The node has taken the workload: it is the agent from now on. A certificate without an id binds the address to no node. Returns why it is not,
    /// if another was the first.
    fn bind(&self, node: PeerId) -> Option<String> {
        self.hear(node);
        let refusal = self.refusal(node);
        if refusal.is_none() {
            self.is_proved.store(true, Ordering::Relaxed);
        }
        refusal
    }

    /// The node is said to be the agent.
    fn hear(&self, node: PeerId) {
        if matches!(node, PeerId::Issued(_)) {
            self.node.get_or_init(|| node);
        }
    }

    /// Whether a node has answered there as the agent.
    pub fn is_proved(&self) -> bool {
        self.is_proved.load(Ordering::Relaxed)
    }

    /// It is only said to be there, by that agent.
    fn is_hearsay_of(&self, from: &str) -> bool {
        !self.is_proved() && self.learned_from.as_deref() == Some(from)
    }

    /// Takes note of where it stands, by its own word or by another agent's. Returns whether that is news.
    fn note_zone(&mut self, zone: Zone, is_own_word: bool) -> bool {
        let is_news = zone != self.zone && (is_own_word || !self.has_told_zone);
        if is_news {
            self.zone = zone;
        }
        self.has_told_zone |= is_own_word;
        is_news
    }

    /// Why a node that answers at the address is not the agent. A certificate without an id does not fit where a node is known.
    pub(super) fn refusal(&self, node: PeerId) -> Option<String> {
        let known = self.node.get().filter(|known| **known != node)?;
        Some(format!(
            "{} is another node now ({node}, it was {known}), which never had the workload's pages: start the former one there again",
            self.socket
        ))
    }
}

/// See the module. It only grows: an agent keeps its number.
#[derive(Clone, Debug, Default)]
pub struct Roster(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    agents: Mutex<Vec<AgentAddress>>,
    /// Counts what was learned, for who looks often.
    version: AtomicUsize,
}

impl Roster {
    /// Of these agents.
    pub fn new(agents: &[AgentAddress]) -> Roster {
        Roster(Arc::new(Inner { agents: Mutex::new(agents.to_vec()), version: 1.into() }))
    }

    fn agents(&self) -> MutexGuard<'_, Vec<AgentAddress>> {
        self.0.agents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many agents there are.
    pub fn count(&self) -> usize {
        self.agents().len()
    }

    /// The agents, for all that is known of them.
    pub fn all(&self) -> Vec<AgentAddress> {
        self.agents().clone()
    }

    /// Another number when something was learned since; never 0.
    pub(super) fn version(&self) -> usize {
        self.0.version.load(Ordering::Acquire)
    }

    /// The agents, and the site of each. The same IP address is the same host.
    pub(super) fn sited(&self) -> Vec<(AgentAddress, Site)> {
        let agents = self.agents();
        let place = |agent: &AgentAddress| (agent.zone, agent.socket.ip().to_canonical());
        let sites = Site::number(&Vec::from_iter(agents.iter().map(place)));
        agents.iter().cloned().zip(sites).collect()
    }

    /// The names of those that the user has not named.
    pub fn learned(&self) -> Vec<String> {
        let agents = self.agents();
        let learned = agents.iter().filter(|agent| agent.learned_from.is_some());
        learned.map(|agent| agent.name.clone()).collect()
    }

    /// Agent `from` has told of these, of itself first. Adds those that are not here yet, each bound to the node that it is said to be: nobody else is taken
    /// for it. One that is said to be at several addresses is the one that answers first.
    pub fn learn(&self, from: &str, members: &[MemberEntry]) {
        let mut agents = self.agents();
        let mut has_news = false;
        for (number, member) in members.iter().enumerate() {
            let (socket, node) = (member.addr(), PeerId::Issued(member.node));
            let is_own_word = number == 0;
            let is_it = |agent: &&mut AgentAddress| match agent.node.get() {
                Some(known) => *known == node && (!is_own_word || agent.name == from),
                None => agent.socket == socket && !is_own_word,
            };
            if let Some(agent) = agents.iter_mut().find(is_it) {
                has_news |= agent.note_zone(member.zone(), is_own_word);
            }
            let is_known = agents.iter().any(|agent| {
                let is_node = agent.node.get() == Some(&node);
                agent.socket == socket
                    || is_node && (agent.is_proved() || agent.is_hearsay_of(from))
            });
            let hearsay = agents.iter().filter(|agent| agent.is_hearsay_of(from)).count();
            // Where it was asked itself is known already.
            let is_nowhere = socket.ip().is_unspecified() || socket.ip().is_multicast();
            if is_known || is_nowhere || member.is_suspect() {
                continue;
            }
            if agents.len() == AGENTS_MAX || hearsay >= HEARSAY_MAX {
                continue;
            }
            let learned_from = Some(from.to_owned());
            let address = AgentAddress::new(socket.to_string(), socket);
            address.hear(node);
            agents.push(AgentAddress { learned_from, zone: member.zone(), ..address });
            has_news = true;
        }
        if has_news {
            self.0.version.fetch_add(1, Ordering::Release);
        }
    }

    /// As [`AgentAddress::bind`]. An agent that was learned of is not used by another address too: copies of a page would be at the same one. The first at which
    /// it answers is its address, wherever it is said to be.
    pub(super) fn bind(&self, address: &AgentAddress, node: PeerId) -> Option<String> {
        let agents = self.agents();
        let is_other = |other: &&AgentAddress| {
            let is_learned = other.learned_from.is_some() || address.learned_from.is_some();
            is_learned
                && !Arc::ptr_eq(&other.node, &address.node)
                && other.is_proved()
                && other.node.get() == Some(&node)
        };
        match agents.iter().find(is_other) {
            Some(other) => Some(format!("it is the agent at {}, by another address", other.name)),
            None => address.bind(node),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Zone;

    fn address(port: u16) -> AgentAddress {
        AgentAddress::new(format!("a:{port}"), ([10, 0, 0, 1], port).into())
    }

    fn member(node: u8, port: u16) -> MemberEntry {
        MemberEntry::new([node; 16], ([10, 0, 0, 1], port).into(), 1, Zone::default())
    }

    #[test]
    fn an_agent_is_learned_of_once_and_is_the_node_that_it_was_said_to_be() {
        let (first, second) = (address(1), address(2));
        let roster = Roster::new(&[first.clone(), second.clone()]);
        assert_eq!(roster.bind(&first, PeerId::Issued([1; 16])), None);
        // The first by another address, the second by its own, a third, and one that does not answer.
        let told = [member(1, 9), member(2, 2), member(3, 3), member(4, 4).suspected()];
        roster.learn("a:1", &told);
        roster.learn("a:1", &told);
        assert_eq!((roster.count(), roster.learned()), (3, vec!["10.0.0.1:3".to_owned()]));
        let learned = roster.sited().remove(2).0;
        assert_eq!(learned.learned_from.as_deref(), Some("a:1"));
        assert!(learned.refusal(PeerId::Issued([5; 16])).is_some());
        assert_eq!(roster.bind(&learned, PeerId::Issued([3; 16])), None);
        // The second, which had not answered, is the third.
        assert!(learned.is_proved());
        let refused = roster.bind(&second, PeerId::Issued([3; 16])).expect("a reason");
        assert!(refused.contains("10.0.0.1:3"), "{refused}");
        let version = roster.version();
        roster.learn("a:1", &told);
        assert_eq!(roster.version(), version, "nothing is new");
    }

    #[test]
    fn one_that_makes_agents_up_leaves_places_for_others() {
        let roster = Roster::new(&[address(1), address(2)]);
        let many: Vec<_> = (10..200).map(|n| member(n, n.into())).collect();
        roster.learn("a:1", &many);
        roster.learn("a:1", &many);
        assert_eq!(roster.count(), 2 + HEARSAY_MAX);
        roster.learn("a:2", &[member(2, 2), member(201, 201)]);
        assert_eq!(roster.count(), 3 + HEARSAY_MAX);
        // Those that are there are as many as there may be.
        while roster.count() < AGENTS_MAX {
            let before = roster.count();
            for agent in roster.all().iter().filter(|agent| !agent.is_proved()) {
                let node = agent.node.get().copied().unwrap_or(PeerId::Issued([250; 16]));
                assert_eq!(roster.bind(agent, node), None);
            }
            roster.learn("a:1", &many);
            assert!(roster.count() > before);
        }
        roster.learn("a:1", &many);
        assert_eq!(roster.count(), AGENTS_MAX);
    }

    /// Who says that another is where it is not does not shut it out.
    #[test]
    fn an_agent_is_where_it_answers_and_not_where_it_is_said_to_be() {
        let (first, named) = (address(1), address(2));
        let roster = Roster::new(&[first, named.clone()]);
        // Before it has answered itself, which it does later.
        roster.learn("a:1", &[member(1, 1), member(2, 8), member(3, 9)]);
        assert_eq!(roster.bind(&named, PeerId::Issued([2; 16])), None);
        roster.learn("a:2", &[member(2, 2), member(3, 3)]);
        let at = |port: u16| {
            let agents = roster.all();
            agents.into_iter().find(|agent| agent.socket.port() == port).expect("it is known")
        };
        assert_eq!(roster.count(), 5, "nobody has answered at 9");
        assert_eq!(roster.bind(&at(3), PeerId::Issued([3; 16])), None);
        // Copies of a page would be at the same one.
        for (port, node) in [(8, 2), (9, 3)] {
            assert!(roster.bind(&at(port), PeerId::Issued([node; 16])).is_some());
        }
        roster.learn("a:1", &[member(1, 1), member(3, 11)]);
        assert_eq!(roster.count(), 5, "where it answers is known");
    }

    #[test]
    fn an_agent_stands_where_it_says_itself_and_until_then_where_others_say() {
        let zone = |label: &str| label.parse::<Zone>().expect("a zone");
        let of = |node: u8, port, label| {
            MemberEntry::new([node; 16], ([10, 0, 0, 1], port).into(), 1, zone(label))
        };
        let (first, second) = (address(1), address(2));
        let roster = Roster::new(&[first.clone(), second]);
        assert_eq!(roster.bind(&first, PeerId::Issued([1; 16])), None);
        let zones =
            || Vec::from_iter(roster.sited().iter().map(|(agent, _)| agent.zone.to_string()));
        // It is asked at an address that it does not know, and tells of one that has not answered yet, and of a third.
        roster.learn("a:1", &[of(1, 9, "x"), of(2, 2, "y"), of(3, 3, "z")]);
        assert_eq!(zones(), ["x", "y", "z"]);
        // One may say it of others that have not said it themselves, in its own name only of itself.
        roster.learn("10.0.0.1:3", &[of(3, 3, "u"), of(1, 1, "v"), of(2, 2, "w")]);
        assert_eq!(zones(), ["x", "w", "u"]);
        roster.learn("a:2", &[of(1, 1, "v")]);
        roster.learn("a:1", &[of(1, 1, "r")]);
        assert_eq!(zones(), ["r", "w", "u"]);
    }

    #[test]
    fn agents_at_one_ip_address_are_on_one_host() {
        let at =
            |ip: &str| AgentAddress::new(ip.into(), format!("{ip}:7").parse().expect("an address"));
        let roster = Roster::new(&["10.0.0.1", "[::ffff:10.0.0.1]", "10.0.0.2"].map(at));
        let sites = Vec::from_iter(roster.sited().iter().map(|(_, site)| *site));
        assert!(sites[0] == sites[1] && sites[0] != sites[2]);
    }
}
