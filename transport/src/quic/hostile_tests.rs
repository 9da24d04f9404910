//! Peers that break rules or lag behind: each costs itself, not others.

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use quinn_proto::{ConnectionIdGenerator, Dir};
use rustls::pki_types::{ServerName, UnixTime};
use zerocopy::IntoBytes;

use super::admission::Source;
use super::tests::*;
use super::*;
use crate::keys::{self, verify};
use crate::message::{PAGE_LEN, PageDescriptor, Status};

/// Has the server answer a request whose reply its full socket does not take.
fn stall(pair: &mut Pair) -> ExchangeId {
    let link = pair.connect();
    let now = Instant::now();
    let asked = pair.client.request(now, link, &Control::get(1, WORKLOAD, 1), &[]).unwrap();
    let (exchange, request) = pair.server_sees(control);
    pair.server.socket.room.set(Some(0));
    let mut reply = request.reply(Status::Ok);
    reply = reply.with_done(1);
    pair.server.reply(now, exchange, &reply, &[&[7; PAGE_LEN]]).unwrap();
    pair.server.flush(now).unwrap();
    assert!(pair.server.stalled.is_some());
    asked
}

/// A datagram of a link that `server` once had: it is answered by a stateless reset.
fn stale_datagram(identity: &Identity, server: &Quic) -> Vec<u8> {
    let (_, id_key) = tls::endpoint_keys(identity, server.local_addr(), 0);
    let id = HashedConnectionIdGenerator::from_key(id_key).generate_cid();
    let mut datagram = vec![0x40];
    datagram.extend_from_slice(&id);
    datagram.resize(100, 0x55);
    datagram
}

/// A long header of a version that nobody speaks: it is answered by version negotiation.
fn foreign_version() -> Vec<u8> {
    let mut datagram = vec![0xc0, 0xba, 0xba, 0xba, 0xba, 8];
    datagram.resize(1200, 0x11);
    datagram
}

#[test]
fn answers_to_strangers_leave_a_stalled_datagram_as_it_is() {
    let (node, client) = keys::ephemeral().unwrap();
    let mut pair = Pair::of(&node, &client);
    let asked = stall(&mut pair);
    let stranger = UdpSocket::bind(any()).unwrap();
    for datagram in [stale_datagram(&node, &pair.server), foreign_version()] {
        stranger.send_to(&datagram, pair.server.local_addr()).unwrap();
        while !pair.server.drive(Instant::now()).unwrap() {}
    }
    pair.server.socket.room.set(None);
    pair.client_sees(complete);
    assert_eq!(payload(&mut pair.seen, asked), [7; PAGE_LEN]);
    // Resets are rare by intent: the next one is due a while later.
    let later = Instant::now() + Duration::from_secs(1);
    stranger.send_to(&stale_datagram(&node, &pair.server), pair.server.local_addr()).unwrap();
    stranger.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    while !pair.server.drive(later).unwrap() {}
    assert!(stranger.recv(&mut [0; 200]).unwrap() > 0, "a reset is sent when there is room");
}

#[test]
fn agents_of_one_key_do_not_tell_each_others_reset_tokens() {
    let (node, _) = keys::ephemeral().unwrap();
    let (mut one, mut other) =
        (Quic::server(any(), &node).unwrap(), Quic::server(any(), &node).unwrap());
    let datagram = stale_datagram(&node, &one);
    let stranger = UdpSocket::bind(any()).unwrap();
    // An agent does not answer for another: that is not waited for long.
    stranger.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    // It ends in the token.
    let token = |server: &mut Quic| {
        stranger.send_to(&datagram, server.local_addr()).unwrap();
        while !server.drive(Instant::now()).unwrap() {}
        let mut answer = [0; 200];
        let len = stranger.recv(&mut answer).ok()?;
        Some(answer[len - 16..len].to_vec())
    };
    let own = token(&mut one);
    assert!(own.is_some(), "an agent resets what was its own");
    assert_ne!(token(&mut other), own);
}

#[test]
fn a_full_socket_is_not_polled_without_pause() {
    let mut pair = Pair::new();
    stall(&mut pair);
    let mut now = Instant::now();
    let end = now + limits::IDLE + Duration::from_secs(1);
    let mut turns = 0;
    while now < end {
        pair.server.drive(now).unwrap();
        while pair.server.poll(now).is_some() {}
        pair.server.flush(now).unwrap();
        let deadline = pair.server.deadline().expect("it tries again");
        assert!(deadline > now, "{:?} ago", now - deadline);
        now = deadline;
        turns += 1;
    }
    assert!(turns < 10_000, "{turns}");
}

#[test]
fn links_send_in_turn() {
    let mut pair = Pair::new();
    let links: Vec<LinkId> = (0..3).map(|_| pair.connect()).collect();
    let (now, again) = (Instant::now(), links.clone());
    let names = [PageDescriptor::new(1, 1); 64];
    for link in links.into_iter().chain(again) {
        let many = Control::get_many(1, WORKLOAD, 64);
        pair.client.request(now, link, &many, &[names.as_bytes()]).unwrap();
    }
    pair.until(|pair| {
        let came = pair.served.iter().filter(|event| complete(event).is_some()).count();
        (came == 6).then_some(())
    });
    let sent = |pair: &Pair| -> Vec<u64> {
        let sent = |link: &Link| link.path().packets.unwrap().sent;
        pair.server.links.iter().flatten().map(sent).collect()
    };
    // Each has more to send than the socket takes now.
    let before = sent(&pair);
    answer_all(&mut pair, &[7; PAGE_LEN]);
    pair.server.socket.room.set(Some(3 * limits::TRANSMIT_BURST));
    pair.server.flush(now).unwrap();
    let served: Vec<u64> =
        sent(&pair).iter().zip(before).map(|(now, before)| now - before).collect();
    assert!(served.iter().all(|sent| *sent >= 2), "{served:?}");
}

#[test]
fn handshakes_that_strangers_begin_lock_nobody_out() {
    let (node, client) = keys::ephemeral().unwrap();
    let mut pair = Pair::of(&node, &client);
    // Initials whose senders never answer: their sources may be false.
    let now = Instant::now();
    let server = pair.server.local_addr();
    let mut strangers = Vec::new();
    for _ in 0..2 {
        let mut stranger = Quic::client(any(), &client).unwrap();
        for _ in 0..200 {
            stranger.connect(now, server).unwrap();
            stranger.flush(now).unwrap();
            pair.server.drive(now).unwrap();
            pair.server.flush(now).unwrap();
        }
        strangers.push(stranger);
    }
    assert!(pair.server.links() < 100, "{}", pair.server.links());
    pair.connect();
}

/// Begins a handshake from `source`, shows that it receives there if that is asked for, and says nothing more.
fn begin(pair: &mut Pair, now: Instant, source: SocketAddr, identity: &Identity) {
    let before = pair.server.generation;
    let mut stranger = Quic::client(source, identity).unwrap();
    stranger.connect(now, pair.server.local_addr()).unwrap();
    stranger.flush(now).unwrap();
    pair.server.strangers.forgive();
    while !pair.server.drive(now).unwrap() {}
    if pair.server.generation == before {
        while !stranger.drive(now).unwrap() {}
        stranger.flush(now).unwrap();
        pair.server.strangers.forgive();
        while !pair.server.drive(now).unwrap() {}
    }
    pair.server.flush(now).unwrap();
}

/// Begins as many handshakes from `source` as it may have at once.
fn begin_all(pair: &mut Pair, now: Instant, source: SocketAddr, identity: &Identity) {
    // Packets of those before may come in between, and one begins nothing though it might have.
    let mut refused = 0;
    while refused < 3 {
        let before = pair.server.links();
        begin(pair, now, source, identity);
        refused = if pair.server.links() == before { refused + 1 } else { 0 };
    }
}

#[test]
fn sources_that_hold_every_handshake_lock_nobody_out() {
    let (node, client) = keys::ephemeral().unwrap();
    let mut pair = Pair::of(&node, &client);
    let now = Instant::now();
    for source in (1..=8).map(|n| SocketAddr::from(([127, 0, 1, n], 0))) {
        begin_all(&mut pair, now, source, &client);
    }
    assert_eq!(pair.server.links(), limits::HANDSHAKES_MAX);
    pair.connect();
}

#[test]
fn two_sources_that_take_turns_begin_no_more_than_there_are_places() {
    let (node, client) = keys::ephemeral().unwrap();
    let mut pair = Pair::of(&node, &client);
    let now = Instant::now();
    let [first, sources @ ..] = [3, 1, 2].map(|n| SocketAddr::from(([127, 0, 1, n], 0)));
    // These two leave the others an odd number: one more for one of them.
    (0..2).for_each(|_| begin(&mut pair, now, first, &client));
    sources.iter().for_each(|source| begin_all(&mut pair, now, *source, &client));
    for _ in 0..limits::HANDSHAKES_MAX {
        sources.iter().for_each(|source| begin(&mut pair, now, *source, &client));
    }
    let begun = pair.server.generation as usize;
    assert!(begun <= limits::HANDSHAKES_MAX, "{begun}");
}

#[test]
fn a_stranger_at_a_clients_own_address_does_not_lock_it_out() {
    let (node, client) = keys::ephemeral().unwrap();
    let mut pair = Pair::of(&node, &client);
    let (start, half) = (Instant::now(), limits::HANDSHAKES_MAX / 2);
    begin_all(&mut pair, start, any(), &client);
    assert_eq!(pair.server.links(), half);
    // Whether the client's link is made, by packets which take no time.
    let connects = |pair: &mut Pair, now| {
        let link = pair.client.connect(now, pair.server.local_addr()).unwrap();
        let real = Instant::now();
        loop {
            pair.server.strangers.forgive();
            pair.step(now);
            if take(&mut pair.seen, connected).is_some_and(|(up, _)| up == link) {
                return true;
            }
            if take(&mut pair.seen, closed).is_some() {
                return false;
            }
            assert!(real.elapsed() < Duration::from_secs(20));
        }
    };
    assert!(!connects(&mut pair, start), "what has just begun may be honest");
    let later = start + limits::HANDSHAKE_SLOW;
    assert!(connects(&mut pair, later));
    // Of the strangers' own, no more begin for it.
    let before = pair.server.generation as usize;
    (0..2 * half).for_each(|_| begin(&mut pair, later, any(), &client));
    let begun = pair.server.generation as usize - before;
    assert!((1..=half).contains(&begun), "{begun}");
}

#[test]
fn handshakes_that_fail_at_once_are_bounded_too() {
    let (node, client) = keys::ephemeral().unwrap();
    let mut pair = Pair::of(&node, &client);
    let now = Instant::now();
    let mut strangers = Quic::client_of(any(), &client, &[b"x"]).unwrap();
    for _ in 0..64 {
        strangers.connect(now, pair.server.local_addr()).unwrap();
        strangers.flush(now).unwrap();
        while !pair.server.drive(now).unwrap() {}
    }
    let failed = &pair.server.failures.all;
    assert_eq!(failed.len(), limits::RETRY_MARK, "beyond, addresses are proved first");
    assert!(failed.iter().all(|reason| matches!(reason, CloseReason::Version { .. })));
    pair.connect();
}

/// The client begins a handshake, and ends it by its next packet.
fn begin_and_end(pair: &mut Pair, now: Instant) {
    let before = pair.server.generation;
    let link = pair.client.connect(now, pair.server.local_addr()).unwrap();
    pair.client.flush(now).unwrap();
    while !pair.server.drive(now).unwrap() {}
    pair.server.flush(now).unwrap();
    if pair.server.generation == before {
        // It has to prove its address, or is refused.
        while !pair.client.drive(now).unwrap() {}
        pair.client.flush(now).unwrap();
        pair.server.drive(now).unwrap();
        pair.server.flush(now).unwrap();
    }
    pair.client.close(now, link, CloseCode::Goodbye);
    (0..3).for_each(|_| pair.step(now));
}

#[test]
fn handshakes_that_are_ended_by_who_began_them_are_bounded_too() {
    let mut pair = Pair::new();
    let start = Instant::now();
    let (slow, half) = (limits::HANDSHAKE_SLOW, limits::HANDSHAKES_MAX / 2);
    for now in (0..8).map(|n| start + slow / 2 * n) {
        (0..half + 6).for_each(|_| begin_and_end(&mut pair, now));
    }
    let begun = pair.server.generation as usize;
    assert!((1..=4 * half).contains(&begun), "{begun} of one source");
    assert!(pair.served.iter().all(|event| connected(event).is_none()), "{:?}", pair.served);
    // They do not count for longer than one that is never finished.
    begin_and_end(&mut pair, start + limits::HANDSHAKE * 2);
    assert_eq!(pair.server.generation as usize, begun + 1);
    assert_eq!((pair.server.links(), pair.server.admission.total()), (1, 1));
}

/// Connects the client up to where its next packets complete the handshake at the server.
fn almost_connected(pair: &mut Pair) -> LinkId {
    let now = Instant::now();
    let link = pair.client.connect(now, pair.server.local_addr()).unwrap();
    let start = Instant::now();
    pair.client.flush(now).unwrap();
    loop {
        pair.server.drive(now).unwrap();
        pair.server.flush(now).unwrap();
        pair.client.drive(now).unwrap();
        if !pair.client.busy_link(link).unwrap().conn.is_handshaking() {
            return link;
        }
        pair.client.flush(now).unwrap();
        assert!(start.elapsed() < Duration::from_secs(20));
    }
}

#[test]
fn a_link_is_told_before_its_requests() {
    let mut pair = Pair::new();
    let link = almost_connected(&mut pair);
    pair.send_raw(link, Control::get(1, WORKLOAD, 1).as_bytes(), true);
    pair.client.flush(Instant::now()).unwrap();
    pair.until(|pair| pair.served.iter().find_map(complete));
    assert!(connected(&pair.served[0]).is_some(), "{:?}", pair.served);
}

#[test]
fn nothing_is_told_of_a_closed_link() {
    let mut pair = Pair::new();
    let link = pair.connect();
    let mut bad = Control::get(1, WORKLOAD, 1).as_bytes().to_vec();
    bad[0] = b'X';
    pair.send_raw(link, &bad, true);
    for number in 0..9 {
        pair.send_raw(link, Control::get(number, WORKLOAD, 1).as_bytes(), true);
    }
    pair.until(|pair| pair.served.iter().find_map(closed));
    assert!(closed(pair.served.back().unwrap()).is_some(), "{:?}", pair.served);
}

#[test]
fn a_half_sent_control_message_expires() {
    let mut pair = Pair::new();
    let link = pair.connect();
    let head = Control::get(1, WORKLOAD, 1);
    for _ in 0..limits::EXCHANGES_MAX {
        pair.send_raw(link, &head.as_bytes()[..100], false);
    }
    let open =
        |pair: &Pair| pair.server.links.iter().flatten().map(Link::open_exchanges).sum::<usize>();
    pair.until(|pair| Some(()).filter(|()| open(pair) == limits::EXCHANGES_MAX as usize));
    let start = Instant::now();
    let mut now = start;
    while now < start + Duration::from_secs(30) {
        now += Duration::from_millis(100);
        pair.step(now);
    }
    assert_eq!(open(&pair), 0usize);
    assert!(pair.client.path(link).is_some(), "{:?}", pair.seen);
}

#[test]
fn an_exchange_that_its_requester_stopped_is_forgotten() {
    let mut pair = Pair::new();
    let link = pair.connect();
    for number in 0..10 {
        let now = Instant::now();
        let put = Control::get_many(number, WORKLOAD, 2);
        let names = [PageDescriptor::new(1, 1); 2];
        let mut control_message = put;
        control_message.payload_len = names.as_bytes().len() as u32;
        let half = pair.send_raw(link, control_message.as_bytes(), false);
        let (asked, request) = pair.server_sees(control);
        let stream = quinn_proto::VarInt::from_u64(half.stream()).unwrap().into();
        let conn = &mut pair.client.busy_link(link).unwrap().conn;
        conn.recv_stream(stream).stop(0u32.into()).unwrap();
        let mut steps = 0;
        pair.until(|_| {
            steps += 1;
            (steps == 20).then_some(())
        });
        let conn = &mut pair.client.busy_link(link).unwrap().conn;
        conn.send_stream(stream).write(names.as_bytes()).unwrap();
        conn.send_stream(stream).finish().unwrap();
        pair.server_sees(complete);
        let late = pair.server.reply(now, asked, &request.reply(Status::NotFound), &[]);
        assert!(matches!(late, Err(TransportError::ExchangeEnded)), "{late:?}");
    }
    let open: usize = pair.server.links.iter().flatten().map(Link::open_exchanges).sum::<usize>();
    assert_eq!(open, 0);
}

#[test]
fn a_request_that_its_requester_stopped_and_never_ends_is_forgotten_when_it_is_answered() {
    let mut pair = Pair::new();
    let link = pair.connect();
    let mut put = Control::get_many(1, WORKLOAD, 2);
    put.payload_len = 2 * PageDescriptor::LEN as u32;
    let half = pair.send_raw(link, put.as_bytes(), false);
    let (asked, request) = pair.server_sees(control);
    let stream = quinn_proto::VarInt::from_u64(half.stream()).unwrap().into();
    let conn = &mut pair.client.busy_link(link).unwrap().conn;
    conn.recv_stream(stream).stop(0u32.into()).unwrap();
    let open =
        |pair: &Pair| pair.server.links.iter().flatten().map(Link::open_exchanges).sum::<usize>();
    let stops = |pair: &Pair| {
        let links = pair.server.links.iter().flatten();
        links.map(|link| link.conn.stats().frame_rx.stop_sending).sum::<u64>()
    };
    pair.until(|pair| Some(()).filter(|()| stops(pair) == 1));
    assert_eq!(open(&pair), 1, "the rest of the request may come");
    // The agent waits no longer for it.
    let late = pair.server.reply(Instant::now(), asked, &request.reply(Status::Failed), &[]);
    assert!(matches!(late, Err(TransportError::ExchangeEnded)), "{late:?}");
    assert_eq!(open(&pair), 0);
    pair.until(|pair| {
        let conn = &mut pair.client.busy_link(link).unwrap().conn;
        conn.send_stream(stream).write(&[0]).is_err().then_some(())
    });
}

/// Answers every request that the server has been told of by as many pages as it asks for; returns how many.
fn answer_all(pair: &mut Pair, page: &[u8]) -> usize {
    let mut answered = 0;
    while let Some((exchange, request)) = take(&mut pair.served, control) {
        let count = usize::from(request.count());
        let mut reply = request.reply(Status::Ok);
        reply = reply.with_done(u64::MAX >> (64 - count));
        let names = vec![0; count * PageDescriptor::LEN];
        let pages = vec![page; count];
        let payload: Vec<&[u8]> = std::iter::once(&names[..]).chain(pages).collect();
        pair.server.reply(Instant::now(), exchange, &reply, &payload).unwrap();
        answered += 1;
    }
    answered
}

#[test]
fn a_requester_that_lags_behind_is_pushed_back_and_not_cut_off() {
    let mut pair = Pair::new();
    let link = pair.connect();
    let now = Instant::now();
    let names = [PageDescriptor::new(1, 1); 64];
    let all = limits::EXCHANGES_MAX as usize;
    for number in 0..all as u64 {
        let many = Control::get_many(number, WORKLOAD, 64);
        pair.client.request(now, link, &many, &[names.as_bytes()]).unwrap();
    }
    // The client receives nothing: of what it asks for, 64 MiB, the server makes no more than is bounded.
    let (mut answered, mut idle) = (0, 0);
    while idle < 1000 {
        pair.client.flush(Instant::now()).unwrap();
        let mut busy = pair.server.drive(Instant::now()).unwrap();
        while let Some(event) = pair.server.poll(Instant::now()) {
            pair.served.push_back(event);
            answered += answer_all(&mut pair, &[9; PAGE_LEN]);
            busy = true;
        }
        pair.server.flush(Instant::now()).unwrap();
        idle = if busy { 0 } else { idle + 1 };
    }
    let reply = CONTROL_AND_PAGES;
    let most = limits::SEND_WINDOW as usize / 2 * 3 + reply;
    assert!((1..=most / reply + 1).contains(&answered), "{answered} of {all}");
    // When it reads again, all comes.
    let mut complete_seen = 0;
    pair.until(|pair| {
        answer_all(pair, &[9; PAGE_LEN]);
        pair.served.clear();
        complete_seen += pair.seen.iter().filter(|event| complete(event).is_some()).count();
        pair.seen.clear();
        (complete_seen == all).then_some(())
    });
}

/// Has the server read no further stream of `link`: the owner answers nothing of what was asked for before.
fn hold(pair: &mut Pair, link: LinkId) {
    let names = [PageDescriptor::new(1, 1); 64];
    for number in 0..16 {
        let many = Control::get_many(number, WORKLOAD, 64);
        pair.client.request(Instant::now(), link, &many, &[names.as_bytes()]).unwrap();
    }
    pair.until(|pair| {
        Some(()).filter(|()| pair.server.links.iter().flatten().any(Link::holds_back))
    });
}

/// How much the server lets a client send on streams that it does not read; up to `most`.
fn taken_unread(pair: &mut Pair, link: LinkId, most: u64) -> u64 {
    let (mut taken, mut idle, mut streams) = (0, 0, Vec::new());
    while idle < 1000 && taken <= most {
        let before = taken;
        let conn = &mut pair.client.busy_link(link).unwrap().conn;
        streams.extend(conn.streams().open(Dir::Bi));
        for stream in &streams {
            taken += conn.send_stream(*stream).write(&[5; 16 << 10]).unwrap_or(0) as u64;
        }
        pair.step(Instant::now());
        idle = if taken > before { 0 } else { idle + 1 };
    }
    taken
}

#[test]
fn windows_that_shrink_and_grow_again_let_nobody_send_more() {
    let mut pair = Pair::new();
    let link = pair.connect();
    hold(&mut pair, link);
    for links in [1 << 16, 1].repeat(200) {
        pair.server.established = links;
        pair.server.share_windows();
    }
    let window = pair.server.receive_window();
    let taken = taken_unread(&mut pair, link, 2 * window);
    assert!((window / 2..=window).contains(&taken), "{taken} of {window}");
}

#[test]
fn a_link_begins_with_its_share_of_what_all_may_send_ahead() {
    let mut pair = Pair::new();
    let share = 64 << 10;
    // One makes room for the link.
    let (others, source) = (limits::RECEIVE_WINDOWS / share, Source::of([10, 0, 0, 1].into()));
    (0..others).for_each(|_| pair.server.admission.fail(Instant::now(), source));
    let link = pair.connect();
    hold(&mut pair, link);
    let taken = taken_unread(&mut pair, link, 2 * share);
    assert!((share / 2..=share).contains(&taken), "{taken} of {share}");
}

/// Bytes of a reply of 64 pages.
const CONTROL_AND_PAGES: usize = 128 + 64 * (16 + PAGE_LEN);

#[test]
fn renewed_keys_are_those_of_the_next_links() {
    let (node, client) = keys::ephemeral().unwrap();
    let (other_node, other_client) = keys::ephemeral().unwrap();
    let mut pair = Pair::of(&node, &client);
    let link = pair.connect();
    pair.server.renew(&other_node).unwrap();
    let wrong = pair.server.renew(&other_client).unwrap_err();
    assert!(wrong.to_string().contains("node"), "{wrong}");
    let reason = pair.refusal();
    assert!(matches!(reason, CloseReason::WrongCa { .. }), "{reason}");
    assert!(pair.client.path(link).is_some(), "links that are up stay");
    pair.server.expel(Instant::now(), SystemTime::now());
    let reason = pair.server_sees(closed);
    assert!(matches!(reason, CloseReason::WrongCa { .. }), "{reason}");
    pair.client_sees(closed);
    pair.client = Quic::client(any(), &other_client).unwrap();
    pair.connect();
    let now = Instant::now();
    pair.server.expel(now, SystemTime::now());
    pair.step(now);
    assert!(pair.served.iter().all(|event| closed(event).is_none()), "{:?}", pair.served);
    pair.server.expel(now, SystemTime::now() + keys::LIFETIME + Duration::from_secs(60));
    let reason = pair.server_sees(closed);
    assert!(matches!(reason, CloseReason::Expired { .. }), "{reason}");
}

#[test]
fn a_datagram_that_is_kept_does_not_keep_its_neighbours() {
    let (sender, mut receiver) =
        (Socket::bind(any(), false).unwrap(), Socket::bind(any(), true).unwrap());
    let bytes: Vec<u8> = (0..3000usize).map(|at| (at / 1200) as u8).collect();
    let transmit = Transmit {
        destination: receiver.local(),
        ecn: None,
        size: bytes.len(),
        segment_size: Some(1200),
        src_ip: None,
    };
    assert!(sender.send(&transmit, &bytes));
    let mut datagrams = Vec::new();
    let start = Instant::now();
    while datagrams.len() < 3 {
        assert!(start.elapsed() < Duration::from_secs(20));
        let Some(received) = receiver.receive().unwrap() else { continue };
        datagrams.extend((0..).map_while(|index| receiver.datagram(&received, index)));
    }
    for (index, (datagram, len)) in datagrams.iter().zip([1200, 1200, 600]).enumerate() {
        assert!(datagram.len() == len && datagram.iter().all(|byte| *byte == index as u8));
        assert!(datagram.capacity() < 2 * len, "{}", datagram.capacity());
    }
}

/// What the server says of a handshake that failed.
fn failure(pair: &mut Pair) -> String {
    pair.until(|pair| pair.server.failures.all.pop_front().map(|reason| reason.to_string()))
}

#[test]
fn a_handshake_that_fails_is_logged_as_what_it_is() {
    let (node, client) = keys::ephemeral().unwrap();
    let (_, stranger) = keys::ephemeral().unwrap();
    let mut pair = Pair::of(&node, &stranger);
    pair.client.connect(Instant::now(), pair.server.local_addr()).unwrap();
    let text = failure(&mut pair);
    assert!(text.contains("it is of another authority"), "{text}");
    let trust = client.trust.clone();
    let mut pair = Pair::of(&node, &Identity { trust, ..stranger });
    pair.client.connect(Instant::now(), pair.server.local_addr()).unwrap();
    let text = failure(&mut pair);
    assert!(text.contains("has a certificate of another authority"), "{text}");
    // One that says nothing more is not told to check that it runs gms-agent.
    let mut pair = Pair::of(&node, &client);
    let now = Instant::now();
    pair.client.connect(now, pair.server.local_addr()).unwrap();
    pair.client.flush(now).unwrap();
    while pair.server.links() == 0 {
        pair.server.drive(now).unwrap();
    }
    pair.server.flush(now).unwrap();
    pair.server.drive(now + limits::HANDSHAKE).unwrap();
    let text = pair.server.failures.all.pop_front().unwrap().to_string();
    assert!(text.contains("began a handshake and fell silent"), "{text}");
}

/// What a stranger sends as its chain, who need not own any of it.
#[test]
fn a_certificate_that_the_authority_has_not_issued_itself_is_not_looked_at() {
    let (node, client) = keys::ephemeral().unwrap();
    let (now, chain) = (UnixTime::now(), [node.cert.clone()]);
    let clients = verify::client_verifier(&node.trust).unwrap();
    clients.verify_client_cert(&client.cert, &[], now).unwrap();
    assert!(clients.verify_client_cert(&client.cert, &chain, now).is_err());
    let agents = verify::server_verifier(&client.trust).unwrap();
    let name = ServerName::try_from(keys::NODE_NAME).unwrap();
    agents.verify_server_cert(&node.cert, &[], &name, &[], now).unwrap();
    assert!(agents.verify_server_cert(&node.cert, &chain, &name, &[], now).is_err());
}

#[test]
fn a_client_that_gives_up_connection_ids_without_end_is_cut_off() {
    let mut pair = Pair::new();
    let link = pair.connect();
    let given = |pair: &Pair| {
        let links = pair.server.links.iter().flatten();
        links.map(|link| link.conn.stats().frame_tx.new_connection_id).max().unwrap_or(0)
    };
    let reason = pair.until(|pair| {
        if let Ok(link) = pair.client.busy_link(link) {
            link.conn.local_address_changed();
        }
        take(&mut pair.served, closed)
    });
    assert!(matches!(reason, CloseReason::Overload { .. }), "{reason:?}");
    assert!(given(&pair) <= 2 * u64::from(limits::IDS_GIVEN_MAX));
}

/// Its path was slow, or so it says: QUIC would keep what is left for longer.
#[test]
fn a_link_that_has_ended_is_soon_forgotten() {
    let mut pair = Pair::new();
    let mut now = Instant::now();
    pair.client.connect(now, pair.server.local_addr()).unwrap();
    while !pair.served.iter().any(|event| connected(event).is_some()) {
        pair.step(now);
        now += Duration::from_millis(800);
    }
    let link = pair.server.links.iter().flatten().next().unwrap().id;
    pair.server.close(now, link, CloseCode::Goodbye);
    pair.server.flush(now).unwrap();
    assert!(pair.server.links.iter().flatten().next().is_some());
    let wait = pair.server.deadline().unwrap() - now;
    assert!(wait <= limits::CLOSING, "{wait:?}");
    now += limits::CLOSING;
    pair.server.drive(now).unwrap();
    assert!(pair.server.links.iter().flatten().next().is_none());
    pair.step(now);
    pair.connect();
}
