//! Pairs of endpoints over loopback, stepped by the test; time is an argument, so nothing waits for a time-out.

use std::collections::HashMap;
use std::net::UdpSocket;
use std::time::{Duration, Instant, SystemTime};

use quinn_proto::{Dir, VarInt};
use zerocopy::IntoBytes;

use super::*;
use crate::keys::{self, Authority, Role};
use crate::message::{
    DecodeError, Feedback, Op, PAGE_LEN, PageDescriptor, PagesReply, PagesRequest, Status, Version,
    WorkloadId,
};
use crate::{AbortReason, PeerId, PeerIdentity};

mod revocation_tests;

pub(super) const WORKLOAD: WorkloadId = WorkloadId([3; 16]);
/// Real time that a test may take to see what it waits for.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);
const HOUR: Duration = Duration::from_secs(3600);

pub(super) fn any() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

/// A server and a client; the events of each that no one has looked for yet.
pub(super) struct Pair {
    pub server: Quic,
    pub client: Quic,
    pub served: VecDeque<Event>,
    pub seen: VecDeque<Event>,
}

impl Pair {
    pub(super) fn of(node: &Identity, client: &Identity) -> Self {
        Self::between(Quic::server(any(), node).unwrap(), Quic::client(any(), client).unwrap())
    }

    pub(super) fn between(server: Quic, client: Quic) -> Self {
        Self { server, client, served: VecDeque::new(), seen: VecDeque::new() }
    }

    pub(super) fn new() -> Self {
        let (node, client) = keys::ephemeral().unwrap();
        Self::of(&node, &client)
    }

    pub(super) fn step(&mut self, now: Instant) {
        for (end, events) in
            [(&mut self.client, &mut self.seen), (&mut self.server, &mut self.served)]
        {
            end.drive(now).unwrap();
            while let Some(event) = end.poll(now) {
                events.push_back(event);
            }
            end.flush(now).unwrap();
        }
    }

    /// Steps until `found` takes an event of the client.
    pub(super) fn client_sees<T>(&mut self, found: impl Fn(&Event) -> Option<T>) -> T {
        self.until(|pair| take(&mut pair.seen, &found))
    }

    /// Steps until `found` takes an event of the server.
    pub(super) fn server_sees<T>(&mut self, found: impl Fn(&Event) -> Option<T>) -> T {
        self.until(|pair| take(&mut pair.served, &found))
    }

    pub(super) fn until<T>(&mut self, mut found: impl FnMut(&mut Self) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(found) = found(self) {
                return found;
            }
            self.step(Instant::now());
            assert!(start.elapsed() < PATIENCE, "{:?} {:?}", self.seen, self.served);
        }
    }

    pub(super) fn connect(&mut self) -> LinkId {
        let link = self.client.connect(Instant::now(), self.server.local_addr()).unwrap();
        self.client_sees(|event| connected(event).filter(|(l, _)| *l == link));
        self.server_sees(connected);
        link
    }

    /// Why the client's link to the server is not made.
    pub(super) fn refusal(&mut self) -> CloseReason {
        self.client.connect(Instant::now(), self.server.local_addr()).unwrap();
        self.client_sees(closed)
    }

    /// Sends raw bytes on a stream of their own.
    pub(super) fn send_raw(&mut self, link: LinkId, bytes: &[u8], finish: bool) -> ExchangeId {
        let conn = &mut self.client.busy_link(link).unwrap().conn;
        let stream = conn.streams().open(Dir::Bi).unwrap();
        conn.send_stream(stream).write(bytes).unwrap();
        if finish {
            conn.send_stream(stream).finish().unwrap();
        }
        ExchangeId::new(link, VarInt::from(stream).into_inner())
    }
}

/// Takes the first event that `found` accepts.
pub(super) fn take<T>(
    events: &mut VecDeque<Event>,
    found: impl Fn(&Event) -> Option<T>,
) -> Option<T> {
    let (at, found) = events.iter().enumerate().find_map(|(at, e)| Some((at, found(e)?)))?;
    events.remove(at);
    Some(found)
}

pub(super) fn connected(event: &Event) -> Option<(LinkId, PeerIdentity)> {
    if let Event::Connected { link, peer } = event { Some((*link, *peer)) } else { None }
}

pub(super) fn closed(event: &Event) -> Option<CloseReason> {
    if let Event::Closed { reason, .. } = event { Some(reason.clone()) } else { None }
}

pub(super) fn aborted(event: &Event) -> Option<AbortReason> {
    if let Event::Aborted { reason, .. } = event { Some(*reason) } else { None }
}

pub(super) fn complete(event: &Event) -> Option<ExchangeId> {
    if let Event::Complete { exchange } = event { Some(*exchange) } else { None }
}

pub(super) fn control(event: &Event) -> Option<(ExchangeId, Control)> {
    match event {
        Event::Control { exchange, control } => Some((*exchange, *control)),
        _ => None,
    }
}

/// Takes the payload events of `exchange` and puts them together.
pub(super) fn payload(events: &mut VecDeque<Event>, exchange: ExchangeId) -> Vec<u8> {
    let mut all = Vec::new();
    while let Some((offset, bytes)) = take(events, |event| match event {
        Event::Payload { exchange: e, offset, bytes } if *e == exchange => {
            Some((*offset, bytes.clone()))
        }
        _ => None,
    }) {
        assert_eq!(offset as usize, all.len());
        all.extend_from_slice(&bytes);
    }
    all
}

#[test]
fn a_get_and_a_put_carry_their_pages() {
    let mut pair = Pair::new();
    let link = pair.connect();
    let page: Vec<u8> = (0..PAGE_LEN).map(|i| (i * 7) as u8).collect();
    let now = Instant::now();

    let got = pair.client.request(now, link, &Control::get(1, WORKLOAD, 42), &[]).unwrap();
    let (asked, request) = pair.server_sees(control);
    assert_eq!(
        (request.op(), request.body::<PagesRequest>().page, request.workload),
        (Some(Op::Get), 42, WORKLOAD)
    );
    pair.server_sees(complete);
    let mut reply = request.reply(Status::Ok);
    reply = reply.with_done(1);
    reply = reply.with_feedback(Feedback { frames_free: 77, ..Feedback::default() });
    pair.server.reply(now, asked, &reply, &[&page[..1000], &page[1000..]]).unwrap();
    let (answered, answer) = pair.client_sees(control);
    assert_eq!((answered, answer.feedback().frames_free), (got, 77));
    pair.client_sees(complete);
    assert_eq!(payload(&mut pair.seen, got), page);

    let pages = vec![5u8; 64 * PAGE_LEN];
    let names = [PageDescriptor::new(9, 8); 64];
    let put = Control::put(2, WORKLOAD, 64);
    pair.client.request(now, link, &put, &[names.as_bytes(), &pages]).unwrap();
    let (asked, request) = pair.server_sees(control);
    pair.server_sees(complete);
    let came = payload(&mut pair.served, asked);
    assert_eq!(&came[..1024], names.as_bytes());
    assert_eq!(&came[1024..], pages);
    pair.server.reply(now, asked, &request.reply(Status::Full), &[]).unwrap();
    assert_eq!(pair.client_sees(control).1.status(), Status::Full);
    assert!(
        pair.client.path(link).unwrap().packets.unwrap().len_max > 60_000,
        "jumbo packets on loopback"
    );
}

#[test]
fn both_sides_know_each_other_by_certificate() {
    let (node, client) = keys::ephemeral().unwrap();
    let mut pair = Pair::of(&node, &client);
    let link = pair.client.connect(Instant::now(), pair.server.local_addr()).unwrap();
    let (_, agent) = pair.client_sees(connected);
    let (_, pager) = pair.server_sees(connected);
    assert_eq!((agent.id, agent.fingerprint), (node.id(), node.fingerprint()));
    assert_eq!((pager.id, pager.fingerprint), (client.id(), client.fingerprint()));
    assert!(agent.id != pager.id && matches!(agent.id, PeerId::Issued(_)));
    assert_eq!(agent.addr, pair.server.local_addr());
    assert!(pair.client.path(link).is_some());
}

#[test]
fn many_exchanges_at_once_all_complete_and_no_more_than_the_bound() {
    let mut pair = Pair::new();
    let link = pair.connect();
    let now = Instant::now();
    let mut open = HashMap::new();
    for number in 0..u64::from(limits::EXCHANGES_MAX) {
        let request = Control::get(number, WORKLOAD, number);
        open.insert(pair.client.request(now, link, &request, &[]).unwrap(), number);
    }
    let one_more = pair.client.request(now, link, &Control::get(0, WORKLOAD, 0), &[]);
    assert!(matches!(one_more, Err(TransportError::Busy)), "{one_more:?}");
    while !open.is_empty() {
        let next = pair.until(|pair| {
            if let Some((exchange, request)) = take(&mut pair.served, control) {
                let mut reply = request.reply(Status::Ok);
                reply = reply.with_done(1);
                let page = [request.body::<PagesRequest>().page as u8; PAGE_LEN];
                pair.server.reply(Instant::now(), exchange, &reply, &[&page]).unwrap();
            }
            take(&mut pair.seen, complete)
        });
        let number = open.remove(&next).unwrap();
        assert_eq!(payload(&mut pair.seen, next), [number as u8; PAGE_LEN]);
    }
    pair.client.request(now, link, &Control::get(0, WORKLOAD, 0), &[]).unwrap();
}

#[test]
fn lost_packets_delay_pages_but_damage_none() {
    let mut pair = Pair::new();
    let link = pair.connect();
    pair.client.socket.lose_every = Some(7);
    pair.server.socket.lose_every = Some(5);
    for number in 0..200u8 {
        let now = Instant::now();
        let names = [PageDescriptor::new(1, 2); 3];
        let many = Control::get_many(u64::from(number), WORKLOAD, 3);
        let asked = pair.client.request(now, link, &many, &[names.as_bytes()]).unwrap();
        let (exchange, request) = pair.server_sees(control);
        pair.server_sees(complete);
        assert_eq!(payload(&mut pair.served, exchange), names.as_bytes());
        let mut reply = request.reply(Status::Ok);
        reply = reply.with_done(0b111);
        let pages = [number; 3 * PAGE_LEN];
        pair.server.reply(Instant::now(), exchange, &reply, &[names.as_bytes(), &pages]).unwrap();
        pair.client_sees(complete);
        let came = payload(&mut pair.seen, asked);
        assert_eq!((&came[..48], &came[48..]), (names.as_bytes(), &pages[..]));
        pair.seen.clear();
    }
    assert!(pair.client.path(link).unwrap().packets.unwrap().lost > 0);
}

#[test]
fn another_authority_is_refused_on_either_side() {
    let (node, client) = keys::ephemeral().unwrap();
    let (_, stranger) = keys::ephemeral().unwrap();
    let reason = Pair::of(&node, &stranger).refusal();
    assert!(matches!(reason, CloseReason::WrongCa { .. }), "{reason}");
    // A client which trusts the agent, but is not trusted by it.
    let trust = client.trust.clone();
    let reason = Pair::of(&node, &Identity { trust, ..stranger }).refusal();
    let text = reason.to_string();
    assert!(text.contains("refuses our certificate (it is of another authority)"), "{text}");
    assert!(text.starts_with("127.0.0.1:"), "{text}");
}

#[test]
fn expired_certificates_are_refused_on_either_side() {
    let authority = Authority::generate().unwrap();
    let now = SystemTime::now();
    let (valid, over) = ([now - HOUR, now + HOUR], [now - 2 * HOUR, now - HOUR]);
    let identity = |role, valid| authority.identity(role, valid).unwrap();
    let reason = Pair::of(&identity(Role::Node, over), &identity(Role::Client, valid)).refusal();
    assert!(matches!(reason, CloseReason::Expired { .. }), "{reason}");
    let reason = Pair::of(&identity(Role::Node, valid), &identity(Role::Client, over)).refusal();
    assert!(matches!(reason, CloseReason::ExpiredByPeer { .. }), "{reason}");
    let text = reason.to_string();
    assert!(text.contains("expired") && text.contains("gms keys renew"), "{text}");
}

#[test]
fn a_client_key_cannot_serve_and_a_node_key_can_connect() {
    let authority = Authority::generate().unwrap();
    let now = SystemTime::now();
    let identity = |role| authority.identity(role, [now - HOUR, now + HOUR]).unwrap();
    let (node, client) = (identity(Role::Node), identity(Role::Client));
    let reason = Pair::of(&client, &client).refusal();
    assert!(matches!(reason, CloseReason::WrongRole { .. }), "{reason}");
    let mut pair = Pair::of(&node, &identity(Role::Node));
    pair.connect();
    // A node key as they were before could serve only.
    let before = authority.identity_before_ids(Role::Node);
    let reason = Pair::of(&node, &before).refusal();
    assert!(reason.to_string().contains("wrong role"), "{reason}");
    let mut pair = Pair::of(&before, &authority.identity_before_ids(Role::Client));
    let link = pair.client.connect(Instant::now(), pair.server.local_addr()).unwrap();
    let (_, agent) = pair.client_sees(connected);
    let (_, pager) = pair.server_sees(connected);
    assert_eq!(agent.id, PeerId::Certificate(before.fingerprint()));
    assert_eq!(pager.id, PeerId::Certificate(pager.fingerprint));
    assert!(pair.client.path(link).is_some());
}

#[test]
fn versions_that_differ_say_so() {
    let (node, client) = keys::ephemeral().unwrap();
    let newer = Quic::server_of(any(), &node, &[b"gms/3"]).unwrap();
    let reason = Pair::between(newer, Quic::client(any(), &client).unwrap()).refusal();
    assert!(matches!(reason, CloseReason::Version { .. }), "{reason}");

    let mut pair = Pair::new();
    let link = pair.connect();
    let mut bytes = Control::get(1, WORKLOAD, 1).as_bytes().to_vec();
    bytes[4] = 9;
    pair.send_raw(link, &bytes, true);
    let (ours, theirs) = (pair.server_sees(closed), pair.client_sees(closed));
    assert!(matches!(ours, CloseReason::Version { .. }), "{ours}");
    assert!(matches!(theirs, CloseReason::Version { .. }), "{theirs}");
}

/// A put and a get between ends of which one speaks version 1 only.
fn exchange_with(server: &'static [&'static [u8]], client: &'static [&'static [u8]]) {
    let (node_keys, client_keys) = keys::ephemeral().unwrap();
    let server = Quic::server_of(any(), &node_keys, server).unwrap();
    let client = Quic::client_of(any(), &client_keys, client).unwrap();
    let mut pair = Pair::between(server, client);
    let link = pair.connect();
    let pages = vec![5; PageDescriptor::LEN + PAGE_LEN];
    let put = Control::put(2, WORKLOAD, 1);
    let put = pair.client.request(Instant::now(), link, &put, &[&pages]).unwrap();
    let (exchange, asked) = pair.server_sees(control);
    assert_eq!((asked.op(), asked.count(), asked.request), (Some(Op::Put), 1, 2));
    pair.server_sees(complete);
    assert_eq!(payload(&mut pair.served, exchange), pages);
    let feedback = Feedback { credits_put: 17, ..Feedback::default() };
    let reply = asked.reply(Status::Ok).with_done(1).with_feedback(feedback);
    pair.server.reply(Instant::now(), exchange, &reply, &[]).unwrap();
    let (answered, reply) = pair.client_sees(control);
    assert_eq!((answered, reply.feedback().credits_put), (put, 17));
    assert_eq!(reply.answer::<PagesReply>().done, 1);
    let get = Control::get(3, WORKLOAD, 42).with_session(9);
    let get = pair.client.request(Instant::now(), link, &get, &[]).unwrap();
    let (exchange, asked) = pair.server_sees(control);
    let page = [6; PAGE_LEN];
    let reply = asked.reply(Status::Ok).with_done(1);
    pair.server.reply(Instant::now(), exchange, &reply, &[&page]).unwrap();
    let reply = pair.client_sees(|event| control(event).filter(|(answered, _)| *answered == get));
    assert_eq!(reply.1.session, 9, "also where the message does not carry it");
    pair.client_sees(|event| complete(event).filter(|answered| *answered == get));
    assert_eq!(payload(&mut pair.seen, get), page);
}

#[test]
fn an_end_of_the_version_before_is_understood() {
    let (both, old) = (tls::alpn(Version::V2), tls::alpn(Version::V1));
    exchange_with(both, old);
    exchange_with(old, both);
    exchange_with(old, old);
}

#[test]
fn malformed_messages_close_their_link_only() {
    let mut pair = Pair::new();
    let good = pair.connect();
    let get = Control::get(1, WORKLOAD, 1).as_bytes().to_vec();
    let with = |at: usize, byte: u8| {
        let mut bytes = get.clone();
        bytes[at] = byte;
        bytes
    };
    let cases: [(Vec<u8>, DecodeError); 5] = [
        (with(0, b'X'), DecodeError::Magic),
        (with(7, 0x80), DecodeError::Reserved),
        (with(47, 0xff), DecodeError::PayloadLen { op: 2, len: 0xff00_0000, expected: 0 }),
        ([&get[..], b"more"].concat(), DecodeError::Trailing),
        (get[..100].to_vec(), DecodeError::Truncated { got: 100, expected: 128 }),
    ];
    for (bytes, error) in cases {
        let bad = pair.connect();
        pair.send_raw(bad, &bytes, true);
        let ours = pair.server_sees(closed);
        assert!(matches!(&ours, CloseReason::Malformed { error: e, .. } if *e == error), "{ours}");
        let theirs = pair.client_sees(closed);
        let code = Some(CloseCode::Malformed);
        assert!(matches!(&theirs, CloseReason::ByPeer { code: c, .. } if *c == code), "{theirs}");
        assert!(theirs.to_string().contains(&error.to_string()), "{theirs}");
        let late = pair.client.request(Instant::now(), bad, &Control::get(1, WORKLOAD, 1), &[]);
        assert!(matches!(late, Err(TransportError::LinkClosed)), "{late:?}");
    }
    pair.served.clear();
    pair.client.request(Instant::now(), good, &Control::get(7, WORKLOAD, 1), &[]).unwrap();
    assert_eq!(pair.server_sees(control).1.request, 7);
}

#[test]
fn a_message_which_breaks_the_rules_is_not_sent() {
    let mut pair = Pair::new();
    let link = pair.connect();
    let put = Control::put(1, WORKLOAD, 2);
    let sent = pair.client.request(Instant::now(), link, &put, &[&[0; PAGE_LEN]]);
    assert!(
        matches!(sent, Err(TransportError::Message(DecodeError::PayloadLen { .. }))),
        "{sent:?}"
    );
}

#[test]
fn giving_up_half_way_aborts_the_exchange_at_the_responder_only() {
    let mut pair = Pair::new();
    let link = pair.connect();
    let mut put = Control::put(1, WORKLOAD, 1);
    put.payload_len = (PageDescriptor::LEN + PAGE_LEN) as u32;
    let half = pair.send_raw(link, &[put.as_bytes(), &[1; 1000]].concat(), false);
    let (asked, _) = pair.server_sees(control);
    pair.until(|pair| Some(()).filter(|()| payload(&mut pair.served, asked).len() == 1000));
    let stream = VarInt::from_u64(half.stream()).unwrap().into();
    let conn = &mut pair.client.busy_link(link).unwrap().conn;
    conn.send_stream(stream).reset(VarInt::from_u32(0)).unwrap();
    assert_eq!(pair.server_sees(aborted), AbortReason::Peer);
    let late = pair.server.reply(Instant::now(), asked, &put.reply(Status::Ok), &[]);
    assert!(matches!(late, Err(TransportError::ExchangeEnded)), "{late:?}");

    // Given up while the reply is due: the requester hears no more of it, and the link lives on.
    let given_up =
        pair.client.request(Instant::now(), link, &Control::get(2, WORKLOAD, 1), &[]).unwrap();
    let (asked, request) = pair.server_sees(control);
    pair.client.abandon(given_up);
    let mut reply = request.reply(Status::Ok);
    reply = reply.with_done(1);
    let _ = pair.server.reply(Instant::now(), asked, &reply, &[&[0; PAGE_LEN]]);
    pair.client.request(Instant::now(), link, &Control::get(3, WORKLOAD, 1), &[]).unwrap();
    let (asked, request) = pair.server_sees(|e| control(e).filter(|(_, c)| c.request == 3));
    pair.server.reply(Instant::now(), asked, &request.reply(Status::NotFound), &[]).unwrap();
    pair.client_sees(complete);
    assert!(pair.seen.iter().all(|event| event.exchange() != Some(given_up)), "{:?}", pair.seen);
}

#[test]
fn a_refusal_before_all_of_a_put_has_come_reaches_the_requester() {
    let mut pair = Pair::new();
    let link = pair.connect();
    let now = Instant::now();
    let pages = vec![1u8; 64 * (PageDescriptor::LEN + PAGE_LEN)];
    for number in 0..20 {
        pair.client.request(now, link, &Control::put(number, WORKLOAD, 64), &[&pages]).unwrap();
        let (asked, request) = pair.server_sees(control);
        pair.server.reply(Instant::now(), asked, &request.reply(Status::Full), &[]).unwrap();
        assert_eq!(pair.client_sees(control).1.status(), Status::Full);
        pair.client_sees(complete);
    }
    let link = pair.client.links[link.index()].as_ref().unwrap();
    assert_eq!((link.open_exchanges(), link.queued()), (0, 0));
}

#[test]
fn a_reply_to_something_else_closes_the_link() {
    let mut pair = Pair::new();
    let link = pair.connect();
    pair.client.request(Instant::now(), link, &Control::get(1, WORKLOAD, 1), &[]).unwrap();
    let (asked, _) = pair.server_sees(control);
    let other = Control::get(1, WORKLOAD, 2).reply(Status::NotFound);
    pair.server.reply(Instant::now(), asked, &other, &[]).unwrap();
    assert_eq!(pair.client_sees(aborted), AbortReason::LinkClosed);
    let reason = pair.client_sees(closed);
    let error = DecodeError::Mismatch;
    assert!(matches!(reason, CloseReason::Malformed { error: e, .. } if e == error), "{reason}");
}

#[test]
fn a_silent_agent_is_lost_and_its_exchanges_aborted() {
    let mut pair = Pair::new();
    let link = pair.connect();
    let now = Instant::now();
    pair.client.request(now, link, &Control::get(1, WORKLOAD, 1), &[]).unwrap();
    pair.client.flush(now).unwrap();
    let mut later = now;
    let lost = loop {
        later += Duration::from_millis(100);
        pair.client.drive(later).unwrap();
        while let Some(event) = pair.client.poll(later) {
            pair.seen.push_back(event);
        }
        if let Some(reason) = take(&mut pair.seen, closed) {
            break reason;
        }
        assert!(later < now + 2 * limits::IDLE);
    };
    assert!(matches!(lost, CloseReason::Lost { .. }), "{lost}");
    assert_eq!(take(&mut pair.seen, aborted), Some(AbortReason::LinkClosed));
    assert!(later >= now + limits::IDLE - Duration::from_secs(1), "{:?}", later - now);
}

#[test]
fn an_idle_link_stays_up() {
    let mut pair = Pair::new();
    let link = pair.connect();
    let now = Instant::now();
    for step in 0..200 {
        pair.step(now + step * Duration::from_millis(100));
    }
    assert!(pair.client.path(link).is_some(), "{:?}", pair.seen);
}

#[test]
fn nobody_there_is_unreachable_by_the_deadline() {
    let silent = UdpSocket::bind(any()).unwrap();
    let (_, client) = keys::ephemeral().unwrap();
    let mut client = Quic::client(any(), &client).unwrap();
    let now = Instant::now();
    client.connect(now, silent.local_addr().unwrap()).unwrap();
    client.drive(now).unwrap();
    client.drive(now + limits::HANDSHAKE - Duration::from_millis(1)).unwrap();
    assert!(client.poll(now).is_none());
    assert!(client.deadline().unwrap() <= now + limits::HANDSHAKE);
    client.drive(now + limits::HANDSHAKE).unwrap();
    let reason = closed(&client.poll(now).unwrap()).unwrap();
    assert!(matches!(reason, CloseReason::Unreachable { .. }), "{reason}");
}

#[test]
fn a_restarted_agent_resets_its_former_links() {
    let (node, client) = keys::ephemeral().unwrap();
    let mut pair = Pair::of(&node, &client);
    let link = pair.connect();
    pair.until(|pair| {
        // Until the client has got the reset token of the id which it uses, which comes with the handshake.
        Some(()).filter(|()| pair.client.path(link).unwrap().packets.unwrap().sent > 3)
    });
    let addr = pair.server.local_addr();
    pair.server = Quic::client(any(), &client).unwrap();
    pair.server = Quic::server(addr, &node).unwrap();
    pair.client.request(Instant::now(), link, &Control::get(1, WORKLOAD, 1), &[]).unwrap();
    let reason = pair.client_sees(closed);
    assert!(matches!(reason, CloseReason::Reset { .. }), "{reason}");
}

#[test]
fn a_goodbye_closes_both_sides_and_frees_the_link() {
    let mut pair = Pair::new();
    let link = pair.connect();
    pair.client.request(Instant::now(), link, &Control::get(1, WORKLOAD, 1), &[]).unwrap();
    pair.client.close(Instant::now(), link, CloseCode::Goodbye);
    assert_eq!(pair.client_sees(aborted), AbortReason::LinkClosed);
    assert_eq!(pair.client_sees(closed), CloseReason::Local);
    let reason = pair.server_sees(closed);
    let code = Some(CloseCode::Goodbye);
    assert!(matches!(&reason, CloseReason::ByPeer { code: c, .. } if *c == code), "{reason}");
    pair.until(|pair| Some(()).filter(|()| pair.client.links() + pair.server.links() == 0));
    let again = pair.connect();
    assert_ne!(again, link);
    let stale = pair.client.request(Instant::now(), link, &Control::get(1, WORKLOAD, 1), &[]);
    assert!(matches!(stale, Err(TransportError::LinkClosed)), "{stale:?}");
}

#[test]
fn an_ipv6_socket_reaches_ipv4_agents() {
    let (node, client) = keys::ephemeral().unwrap();
    let client = Quic::client("[::]:0".parse().unwrap(), &client).unwrap();
    let mut pair = Pair::between(Quic::server(any(), &node).unwrap(), client);
    let addr = pair.server.local_addr();
    pair.client.connect(Instant::now(), addr).unwrap();
    assert_eq!(pair.client_sees(connected).1.addr, addr);
}

#[test]
fn endpoints_of_a_listener_share_its_port_and_its_bounds_but_no_keys() {
    let (node, client) = keys::ephemeral().unwrap();
    let mut servers = Quic::servers(any(), &node, Version::V2, 2).unwrap();
    let addr = servers[0].local_addr();
    assert_eq!(addr, servers[1].local_addr());
    let again = Quic::servers(addr, &node, Version::V2, 2).err();
    assert!(matches!(again, Some(TransportError::Socket { .. })), "{again:?}");
    // By a key of another endpoint a stranger would be told how to reset a link.
    let ids = [0, 1].map(|index| tls::endpoint_keys(&node, addr, index).1);
    assert_ne!(ids[0], ids[1]);
    // Each client's port is one endpoint's.
    let (mut clients, start) = (Vec::new(), Instant::now());
    for _ in 0..16 {
        let mut quic = Quic::client(any(), &client).unwrap();
        quic.connect(start, addr).unwrap();
        clients.push((quic, false));
    }
    let links = |servers: &[Quic]| servers.iter().map(Quic::links).collect::<Vec<_>>();
    // A client knows that its link is up before the server has read its last packet; what a late one has sent twice may begin another, for a while.
    while clients.iter().any(|(_, up)| !up) || links(&servers).iter().sum::<usize>() != 16 {
        assert!(start.elapsed() < PATIENCE);
        for (end, up) in &mut clients {
            end.drive(Instant::now()).unwrap();
            *up |= end.poll(Instant::now()).is_some_and(|event| connected(&event).is_some());
            end.flush(Instant::now()).unwrap();
        }
        for server in &mut servers {
            server.drive(Instant::now()).unwrap();
            server.flush(Instant::now()).unwrap();
        }
    }
    let links = links(&servers);
    assert!(links.iter().all(|&links| links > 0), "{links:?}");
    for server in &mut servers {
        server.drive(Instant::now()).unwrap();
    }
    assert_eq!([0, 1].map(|end: usize| servers[end].others), [links[1], links[0]]);
    servers[0].established = 1000;
    servers[0].tell_crowd();
    let begun = 1000 + links[1] as u64 + 1;
    assert_eq!(servers[1].first_share(), limits::RECEIVE_WINDOWS / begun);
}
