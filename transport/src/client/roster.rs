//! The agents of a session, for all its lanes: those that the user named, and those that agents have told of.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use gms_policy::limits::AGENTS_MAX;

use crate::PeerId;
use crate::message::MemberEntry;

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
    /// The first that has taken the workload, in any lane: the only one that is taken for the agent from then on.
    node: Arc<OnceLock<PeerId>>,
}

impl AgentAddress {
    /// An agent of which no node is known yet. All lanes to it are made from one such value.
    pub fn new(name: String, socket: SocketAddr) -> AgentAddress {
        let (learned_from, last_resort) = (None, false);
        AgentAddress { name, socket, learned_from, last_resort, node: Arc::default() }
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

    /// The same, bound to a node.
    pub fn of_node(self, id: [u8; 16]) -> AgentAddress {
        self.bind(PeerId::Issued(id));
        self
    }

    /// The node has taken the workload: it is the agent from now on. A certificate without an id binds the address to no node. Returns why it is not,
    /// if another was the first.
    fn bind(&self, node: PeerId) -> Option<String> {
        if matches!(node, PeerId::Issued(_)) {
            self.node.get_or_init(|| node);
        }
        self.refusal(node)
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
    /// How many they are, for who looks often.
    count: AtomicUsize,
}

impl Roster {
    /// Of these agents.
    pub fn new(agents: &[AgentAddress]) -> Roster {
        let (agents, count) = (Mutex::new(agents.to_vec()), agents.len().into());
        Roster(Arc::new(Inner { agents, count }))
    }

    fn agents(&self) -> MutexGuard<'_, Vec<AgentAddress>> {
        self.0.agents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many agents there are.
    pub fn count(&self) -> usize {
        self.0.count.load(Ordering::Acquire)
    }

    /// The agents but the first `known`.
    pub fn since(&self, known: usize) -> Vec<AgentAddress> {
        self.agents().get(known..).unwrap_or_default().to_vec()
    }

    /// The names of those that the user has not named.
    pub fn learned(&self) -> Vec<String> {
        let agents = self.agents();
        let learned = agents.iter().filter(|agent| agent.learned_from.is_some());
        learned.map(|agent| agent.name.clone()).collect()
    }

    /// Agent `from` has told of these. Adds those that are not here yet, each bound to the node that it is said to be: nobody else is taken for it.
    pub fn learn(&self, from: &str, members: &[MemberEntry]) {
        let mut agents = self.agents();
        for member in members {
            let (socket, node) = (member.addr(), PeerId::Issued(member.node));
            let is_known = agents
                .iter()
                .any(|agent| agent.socket == socket || agent.node.get() == Some(&node));
            // Where it was asked itself is known already.
            let is_nowhere = socket.ip().is_unspecified() || socket.ip().is_multicast();
            if is_known || is_nowhere || member.is_suspect() || agents.len() == AGENTS_MAX {
                continue;
            }
            let learned_from = Some(from.to_owned());
            let address = AgentAddress::new(socket.to_string(), socket);
            address.bind(node);
            agents.push(AgentAddress { learned_from, ..address });
        }
        self.0.count.store(agents.len(), Ordering::Release);
    }

    /// As [`AgentAddress::bind`]. An agent that was learned of is not used by another address too: copies of a page would be at the same one.
    pub(super) fn bind(&self, address: &AgentAddress, node: PeerId) -> Option<String> {
        let agents = self.agents();
        let is_other = |other: &&AgentAddress| {
            let is_learned = other.learned_from.is_some() || address.learned_from.is_some();
            is_learned
                && !Arc::ptr_eq(&other.node, &address.node)
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
        let learned = roster.since(2).remove(0);
        assert_eq!(learned.learned_from.as_deref(), Some("a:1"));
        assert!(learned.refusal(PeerId::Issued([5; 16])).is_some());
        assert_eq!(roster.bind(&learned, PeerId::Issued([3; 16])), None);
        // The second, which had not answered, is the third.
        let refused = roster.bind(&second, PeerId::Issued([3; 16])).expect("a reason");
        assert!(refused.contains("10.0.0.1:3"), "{refused}");
        let many: Vec<_> = (10..200).map(|n| member(n, n.into())).collect();
        roster.learn("a:1", &many);
        assert_eq!(roster.count(), AGENTS_MAX);
    }
}
