//! Peers that were revoked, on links that are up, in their handshake, or yet to be made.

use super::*;
use crate::Fingerprint;
use crate::keys::revoked::Revoked;
use crate::keys::{Allowed, Quota, Trust};

/// The same identity, which revokes `peers`.
fn revoking(identity: &Identity, peers: &[PeerId]) -> Identity {
    let revoked = Some(Arc::new(Revoked::from_iter(peers.iter().copied())));
    let trust = Trust { revoked, ..identity.trust.clone() };
    Identity { trust, ..identity.clone() }
}

/// The same identity, which lets in these clients only.
fn allowing(identity: &Identity, clients: &[PeerId]) -> Identity {
    let named = clients.iter().map(|&client| (client, Quota::default()));
    let allowed = Some(Arc::new(Allowed::from_iter(named)));
    let trust = Trust { allowed, ..identity.trust.clone() };
    Identity { trust, ..identity.clone() }
}

#[test]
fn who_is_not_on_the_list_is_not_let_in_or_no_longer() {
    let (node, client) = keys::ephemeral().unwrap();
    let others = [node.id(), PeerId::Certificate(client.fingerprint())];
    let mut pair = Pair::of(&allowing(&node, &others), &client);
    let reason = pair.refusal();
    assert!(matches!(reason, CloseReason::NotAllowedByPeer { .. }), "{reason}");
    let told = pair.until(|pair| pair.server.failures.all.pop_front());
    assert!(matches!(told, CloseReason::NotAllowed { .. }), "{told}");
    // Whoever is on it stays until it is renewed without.
    let mut pair = Pair::of(&allowing(&node, &[client.id()]), &client);
    pair.connect();
    pair.server.expel(Instant::now(), SystemTime::now());
    pair.server.renew(&allowing(&node, &others)).unwrap();
    pair.server.expel(Instant::now(), SystemTime::now());
    let reason = pair.server_sees(closed);
    assert!(matches!(reason, CloseReason::NotAllowed { .. }), "{reason}");
    let reason = pair.client_sees(closed).to_string();
    assert!(reason.contains("this key is let in no longer"), "{reason}");
    let reason = pair.refusal();
    assert!(matches!(reason, CloseReason::NotAllowedByPeer { .. }), "{reason}");
}

#[test]
fn an_agent_beside_a_client_lets_in_that_client_alone() {
    let authority = Authority::generate().unwrap();
    let now = SystemTime::now();
    let identity = |role| authority.identity(role, [now - HOUR, now + HOUR]).unwrap();
    let client = identity(Role::Client);
    let (node, trusting) = keys::beside(&client).unwrap();
    Pair::of(&node, &trusting).connect();
    for other in [Role::Client, Role::Node].map(identity) {
        // It trusts that node as the client does.
        let other = Identity { trust: trusting.trust.clone(), ..other };
        let reason = Pair::of(&node, &other).refusal();
        assert!(matches!(reason, CloseReason::NotAllowedByPeer { .. }), "{reason}");
    }
    // The agents of the client are not concerned.
    Pair::of(&identity(Role::Node), &trusting).connect();
}

#[test]
fn who_was_revoked_is_refused_on_either_side() {
    let (node, client) = keys::ephemeral().unwrap();
    for peer in [node.id(), PeerId::Certificate(node.fingerprint())] {
        let reason = Pair::of(&node, &revoking(&client, &[peer])).refusal();
        assert!(matches!(reason, CloseReason::Revoked { .. }), "{reason}");
    }
    for peer in [client.id(), PeerId::Certificate(client.fingerprint())] {
        let mut pair = Pair::of(&revoking(&node, &[peer]), &client);
        let reason = pair.refusal();
        assert!(matches!(reason, CloseReason::RevokedByPeer { .. }), "{reason}");
        let told = pair.until(|pair| pair.server.failures.all.pop_front());
        assert!(matches!(told, CloseReason::Revoked { .. }), "{told}");
    }
    // Others, and oneself, are not concerned.
    let others = [PeerId::Issued([1; 16]), PeerId::Certificate(Fingerprint([1; 32]))];
    Pair::of(&revoking(&node, &[others[0], node.id()]), &revoking(&client, &others)).connect();
}

#[test]
fn links_of_who_was_revoked_are_closed_when_the_list_is_renewed() {
    let authority = Authority::generate().unwrap();
    let now = SystemTime::now();
    let identity = |role| authority.identity(role, [now - HOUR, now + HOUR]).unwrap();
    let (node, client, other) =
        (identity(Role::Node), identity(Role::Client), identity(Role::Node));
    let mut pair = Pair::of(&node, &client);
    let link = pair.connect();
    let mut stays = Quic::client(any(), &other).unwrap();
    std::mem::swap(&mut pair.client, &mut stays);
    let kept = pair.connect();
    std::mem::swap(&mut pair.client, &mut stays);
    pair.server.renew(&revoking(&node, &[client.id()])).unwrap();
    pair.server.expel(Instant::now(), SystemTime::now());
    let reason = pair.server_sees(closed);
    assert!(matches!(reason, CloseReason::Revoked { .. }), "{reason}");
    let reason = pair.client_sees(closed).to_string();
    assert!(reason.contains("the certificate was revoked"), "{reason}");
    assert!(pair.client.path(link).is_none() && stays.path(kept).is_some());
    assert_eq!(pair.server.established, 1);
    let reason = pair.refusal();
    assert!(matches!(reason, CloseReason::RevokedByPeer { .. }), "{reason}");
}

#[test]
fn a_handshake_that_began_before_the_list_was_renewed_makes_no_link() {
    let (node, client) = keys::ephemeral().unwrap();
    let mut pair = Pair::of(&node, &client);
    let link = pair.client.connect(Instant::now(), pair.server.local_addr()).unwrap();
    // The server has accepted the handshake, by the configuration that it has now, and not seen the certificate.
    pair.until(|pair| Some(()).filter(|()| pair.server.links() == 1));
    assert_eq!(pair.server.established, 0);
    pair.server.renew(&revoking(&node, &[client.id()])).unwrap();
    pair.server.expel(Instant::now(), SystemTime::now());
    // Its last packets bring a request too.
    let start = Instant::now();
    while pair.client.links[0].as_ref().unwrap().conn.is_handshaking() {
        pair.client.drive(Instant::now()).unwrap();
        assert!(start.elapsed() < PATIENCE);
    }
    pair.send_raw(link, Control::get(1, WORKLOAD, 1).as_bytes(), true);
    let reason = pair.client_sees(closed).to_string();
    assert!(reason.contains("the certificate was revoked"), "{reason}");
    assert!(pair.served.is_empty(), "{:?}", pair.served);
    let told = pair.server.failures.all.pop_front();
    assert!(matches!(told, Some(CloseReason::Revoked { .. })), "{told:?}");
    assert_eq!((pair.server.established, pair.server.admission.total()), (0, 1));
    // Who is not on the list goes on.
    let (node, client) = keys::ephemeral().unwrap();
    let mut pair = Pair::of(&node, &client);
    pair.client.connect(Instant::now(), pair.server.local_addr()).unwrap();
    pair.until(|pair| Some(()).filter(|()| pair.server.links() == 1));
    pair.server.renew(&revoking(&node, &[node.id()])).unwrap();
    pair.client_sees(connected);
}

#[test]
fn a_clock_that_goes_back_ends_no_link_but_of_who_was_revoked() {
    let (node, client) = keys::ephemeral().unwrap();
    let mut pair = Pair::of(&node, &client);
    let link = pair.connect();
    let before = SystemTime::now() - 48 * HOUR;
    pair.server.expel(Instant::now(), before);
    pair.step(Instant::now());
    assert!(pair.client.path(link).is_some() && pair.served.is_empty(), "{:?}", pair.served);
    pair.server.renew(&revoking(&node, &[client.id()])).unwrap();
    pair.server.expel(Instant::now(), before);
    let reason = pair.server_sees(closed);
    assert!(matches!(reason, CloseReason::Revoked { .. }), "{reason}");
}
