//! Lanes to the agents of a session, and what they are made of.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use gms_transport::TransportError;
use gms_transport::client::{AgentAddress, Checksum, Client, Lane, Roster, Seal};
use gms_transport::keys::Identity;
use gms_transport::message::WorkloadId;
use gms_transport::quic::Quic;

use super::SessionError;

/// What another binary of the pager needs to be known to the agents as this one is.
pub(super) struct Secrets {
    pub(super) identity: Identity,
    pub(super) workload: WorkloadId,
    pub(super) seal: Option<Arc<Seal>>,
    pub(super) roster: Roster,
}

/// Of what lanes to the agents are made.
pub(super) struct Lanes<'a> {
    pub(super) workload: WorkloadId,
    pub(super) agents: &'a [AgentAddress],
    pub(super) roster: &'a Roster,
    pub(super) seal: Option<&'a Arc<Seal>>,
}

impl Lanes<'_> {
    /// A client on a socket; `prepare` may change its lane.
    pub(super) fn client(
        &self,
        socket: Quic,
        seed: u64,
        prepare: impl FnOnce(Lane<Quic>) -> Lane<Quic>,
    ) -> Client<Quic> {
        let lane = Lane::new(Instant::now(), socket, self.workload, self.agents);
        let lane = prepare(lane).following(self.roster.clone());
        let client = Client::new(lane, Checksum::new(seed));
        match self.seal {
            Some(seal) => client.sealed(seal.clone()),
            None => client,
        }
    }
}

/// Sockets for `count` lanes to these agents.
pub(super) fn sockets(
    identity: &Identity,
    agents: &[AgentAddress],
    count: usize,
) -> Result<Vec<Quic>, SessionError> {
    let v4 = agents.iter().all(|a| a.socket.is_ipv4());
    let any =
        if v4 { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { IpAddr::V6(Ipv6Addr::UNSPECIFIED) };
    let socket = |_| Quic::client(SocketAddr::new(any, 0), identity);
    let sockets: Result<_, _> = (0..count).map(socket).collect();
    sockets.map_err(|e: TransportError| SessionError::Fatal(e.to_string()))
}
