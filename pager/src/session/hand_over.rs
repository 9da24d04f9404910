//! A session that goes on in another binary of its pager.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use gms_policy::ids::AgentId;
use gms_transport::client::{AgentAddress, Client, Lane, Roster, Seal};
use gms_transport::keys::Identity;
use gms_transport::message::WorkloadId;
use gms_transport::quic::Quic;
use serde::{Deserialize, Serialize};

use super::lanes::{Lanes, Secrets, sockets};
use super::{Ready, Session, SessionError, Threads, abort_on_panic, give_up_rights};
use crate::evict::{EvictRecord, EvictThread};
use crate::handed::Descriptors;
use crate::own_agent::OwnAgent;
use crate::reminder::Reminder;
use crate::shared::{Commands, EvictCommand, Shared, SharedRecord};
use crate::stopped;
use crate::sync::lock;
use crate::words::Words;

/// For all threads to come to rest.
const REST_DEADLINE: Duration = Duration::from_secs(2);

/// What the next binary is told of a session, beside the words of the tables.
#[derive(Debug, Serialize, Deserialize)]
pub struct SessionRecord {
    since: Duration,
    shared: SharedRecord,
    evict: EvictRecord,
    workload: [u8; 16],
    seal: Option<[u8; 16]>,
    identity: Vec<u8>,
    agents: Vec<AgentRecord>,
}

#[derive(Debug, Serialize, Deserialize)]
struct AgentRecord {
    name: String,
    socket: SocketAddr,
    learned_from: Option<String>,
    last_resort: bool,
    node: Option<[u8; 16]>,
    /// The node has answered there, and is not only said to be there.
    #[serde(default = "yes")]
    is_proved: bool,
    /// Empty if it is not known, and whether the agent has said so itself.
    zone: (String, bool),
}

/// Writes down what another pager needs if this one dies: what there is to be said of the session is given.
pub(crate) type Leave = Box<dyn Fn(Option<(SessionRecord, Descriptors)>) -> io::Result<()> + Send>;

impl SessionRecord {
    /// Since when faults wait, on the clock that goes on whatever is executed.
    pub(crate) fn since(&self) -> Duration {
        self.since
    }
}

impl Session {
    /// Brings all threads to rest, and tells what there is; they rest until [`Session::go_on`], or until another binary is executed.
    ///
    /// # Errors
    /// Why it cannot be handed over. Then all goes on.
    pub(crate) fn hand_over(
        &self,
        to: &mut Descriptors,
    ) -> Result<(SessionRecord, Vec<u64>), String> {
        if lock(&self.parts).is_some() {
            return Err("its command has not begun yet: try again".into());
        }
        if self.shared.detaching.load(Ordering::Relaxed) {
            return Err("its pages are being brought home".into());
        }
        if self.shared.outcome().is_some() {
            return Err("it has ended".into());
        }
        if self.shared.config.trace.is_some() {
            return Err("it writes a --trace, which would be lost".into());
        }
        // In a time for which faults can wait.
        if let Some(reason) = lock(&self.shared.tables).vast() {
            return Err(reason.into());
        }
        let handover = &self.shared.handover;
        handover.ask();
        self.shared.kick_evict();
        let told = handover.await_told(REST_DEADLINE, stopped::reap_ended)?;
        to.add(told.descriptors);
        let shared = self.shared.hand_over(to);
        let record = self.secrets.record(told.since, shared, told.record);
        let record = record.map_err(|error| error.to_string());
        let record = record.inspect_err(|_| handover.let_go())?;
        Ok((record, told.words))
    }

    /// How many threads page the workload.
    pub(crate) fn threads(&self) -> usize {
        1 + self.shared.config.fault_threads
    }

    /// No other binary is executed after all.
    pub(crate) fn go_on(&self) {
        self.shared.handover.let_go();
    }

    /// What is needed if this pager dies is given to `leave` from now on, whenever that changes. Not where it could not be gone on with that: with parity, or a trace.
    /// False then.
    pub(crate) fn bequeath(&self, leave: Leave) -> bool {
        let config = &self.shared.config;
        if config.redundancy.shape().is_some() || config.trace.is_some() {
            return false;
        }
        let (shared, secrets) = (Arc::downgrade(&self.shared), self.secrets.clone());
        self.shared.estate.begin(Box::new(move |known| {
            let Some((evict, mut descriptors)) = known else { return leave(None) };
            let shared = shared.upgrade().ok_or(io::ErrorKind::NotFound)?;
            let shared = shared.leave(&mut descriptors);
            leave(Some((secrets.record(Duration::ZERO, shared, evict)?, descriptors)))
        }));
        self.shared.kick_evict();
        true
    }

    /// The session in this binary, with its threads. Nothing is done yet, but that who waits for a page faults again: all else begins by
    /// [`Resumed::begin`].
    pub(crate) fn again(record: SessionRecord, words: &[u64]) -> Result<Resumed, SessionError> {
        abort_on_panic();
        let mut words = Words::new(words);
        let (shared, commands) = Shared::again(record.shared, &mut words).map_err(odd)?;
        let rest = (record.identity, record.workload, record.seal, record.agents);
        Session::restored((shared, commands), record.evict, rest, EvictThread::again)
    }

    /// The session of a pager that has died.
    /// `strays` are its userfaultfds of which the record does not tell, by number.
    pub(crate) fn inherited(
        record: SessionRecord,
        strays: BTreeMap<RawFd, OwnedFd>,
    ) -> Result<Resumed, SessionError> {
        abort_on_panic();
        let (shared, commands, left) = Shared::inherited(record.shared).map_err(odd)?;
        let rest = (record.identity, record.workload, record.seal, record.agents);
        Session::restored(
            (shared, commands),
            record.evict,
            rest,
            |shared, evict, bulk, record, own| {
                EvictThread::inherited(shared, evict, bulk, record, own, (left, strays))
            },
        )
    }

    fn restored(
        (shared, commands): (Arc<Shared>, Commands),
        evict: EvictRecord,
        (identity, workload, seal, agents): (Vec<u8>, [u8; 16], Option<[u8; 16]>, Vec<AgentRecord>),
        made: impl FnOnce(
            Arc<Shared>,
            Receiver<EvictCommand>,
            Client<Quic>,
            EvictRecord,
            Option<(AgentId, Arc<OwnAgent>)>,
        ) -> io::Result<EvictThread<Quic>>,
    ) -> Result<Resumed, SessionError> {
        let none = || SessionError::Fatal("what it was handed: no key".into());
        let identity = Identity::from_bytes(&identity).ok_or_else(none)?;
        let workload = WorkloadId(workload);
        let seal = seal.map(|key| Seal::from_secret(key, workload).ok_or_else(none));
        let seal = seal.transpose()?.map(Arc::new);
        let agents: Vec<AgentAddress> = agents.iter().map(address).collect();
        let roster = Roster::new(&agents);
        let sockets = sockets(&identity, &agents, 1 + shared.config.fault_threads)?;
        let lanes = Lanes { workload, agents: &agents, roster: &roster, seal: seal.as_ref() };
        let incarnation = lock(&shared.tables).incarnation();
        let session = |agent: AgentId| lock(&shared.tables).session_of(agent);
        let resuming = |lane: Lane<Quic>| lane.resuming(incarnation, session);
        let client = |socket: Quic| lanes.client(socket, shared.seed, resuming);
        let mut demand: Vec<_> = sockets.into_iter().map(client).collect();
        let bulk = demand.remove(0);
        let reminder =
            (!shared.config.is_embedded()).then(|| Reminder::new(Instant::now(), identity.clone()));
        let own = evict.own().map_err(odd)?;
        let evict = made(shared.clone(), commands.evict, bulk, evict, own.clone());
        let mut evict = evict.map_err(odd)?;
        evict.reminder = reminder;
        let secrets = Arc::new(Secrets { identity, workload, seal, roster });
        let (parts, threads) = (Mutex::new(None), Mutex::default());
        let session = Session { shared, parts, threads, own, secrets };
        evict.wake_all();
        // Last: a binary before this one may need what this one does not.
        give_up_rights()?;
        let ready = session.ready(Threads { evict, fault: commands.fault, demand, trace: None })?;
        Ok(Resumed { session, ready })
    }
}

fn odd(error: io::Error) -> SessionError {
    SessionError::Fatal(format!("what it was handed: {error}"))
}

impl Secrets {
    /// What there is to be said of a session, with what its threads know.
    fn record(
        &self,
        since: Duration,
        shared: SharedRecord,
        evict: serde_json::Value,
    ) -> io::Result<SessionRecord> {
        let agents = self.roster.all().into_iter().map(AgentRecord::of);
        Ok(SessionRecord {
            since,
            shared,
            evict: serde_json::from_value(evict)?,
            workload: self.workload.0,
            seal: self.seal.as_ref().map(|seal| seal.secret()),
            identity: self.identity.to_bytes(),
            agents: agents.collect(),
        })
    }
}

impl AgentRecord {
    fn of(agent: AgentAddress) -> AgentRecord {
        AgentRecord {
            socket: agent.socket,
            last_resort: agent.is_last_resort(),
            node: agent.node(),
            is_proved: agent.is_proved(),
            zone: (agent.zone().0.to_string(), agent.zone().1),
            name: agent.name,
            learned_from: agent.learned_from,
        }
    }
}

/// Those before did not tell.
fn yes() -> bool {
    true
}

fn address(record: &AgentRecord) -> AgentAddress {
    let mut address = AgentAddress::new(record.name.clone(), record.socket);
    address.learned_from.clone_from(&record.learned_from);
    let address = if record.last_resort { address.last_resort() } else { address };
    let (zone, is_own_word) = &record.zone;
    let address = address.at(zone.parse().unwrap_or_default(), *is_own_word);
    match record.node {
        Some(node) if record.is_proved => address.of_node(node),
        Some(node) => address.said_to_be(node),
        None => address,
    }
}

/// A session that is about to go on.
pub(crate) struct Resumed {
    session: Session,
    ready: Ready,
}

impl Resumed {
    /// Pages the workload from now on.
    pub(crate) fn begin(self) -> Session {
        self.ready.begin();
        self.session
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_that_is_only_said_to_be_somewhere_is_not_proved_to_be_by_the_next_pager() {
        let at = |port| AgentAddress::new(format!("a:{port}"), ([10, 0, 0, 1], port).into());
        for agent in [at(1).of_node([1; 16]), at(2).said_to_be([2; 16]), at(3)] {
            let (node, is_proved) = (agent.node(), agent.is_proved());
            let text = serde_json::to_string(&AgentRecord::of(agent)).expect("JSON");
            let record: AgentRecord = serde_json::from_str(&text).expect("as it was written");
            let next = address(&record);
            assert_eq!((next.node(), next.is_proved()), (node, is_proved));
        }
    }
}
