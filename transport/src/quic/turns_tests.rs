//! Clients beside one that sends without end.

use std::time::{Duration, Instant, SystemTime};

use zerocopy::IntoBytes;

use super::tests::*;
use super::*;
use crate::keys::{Authority, Role};
use crate::message::{Op, PAGE_LEN, PageDescriptor, Status};

const HOUR: Duration = Duration::from_secs(3600);
/// Where a moment must not be over: it is to come, but so soon that no timer is due before.
const HENCE: Duration = Duration::from_millis(500);

/// Two clients with a link each.
struct Two {
    pair: Pair,
    link: LinkId,
    other: Quic,
    other_link: LinkId,
}

impl Two {
    fn new() -> Two {
        let authority = Authority::generate().unwrap();
        let now = SystemTime::now();
        let identity = |role| authority.identity(role, [now - HOUR, now + HOUR]).unwrap();
        let mut pair = Pair::of(&identity(Role::Node), &identity(Role::Client));
        let link = pair.connect();
        let mut other = Quic::client(any(), &identity(Role::Client)).unwrap();
        let other_link = other.connect(Instant::now(), pair.server.local_addr()).unwrap();
        let start = Instant::now();
        let mut up = false;
        while !up || take(&mut pair.served, connected).is_none() {
            pair.step(Instant::now());
            let now = Instant::now();
            other.drive(now).unwrap();
            up |= std::iter::from_fn(|| other.poll(now)).any(|event| connected(&event).is_some());
            other.flush(now).unwrap();
            assert!(start.elapsed() < PATIENCE);
        }
        // What is left of the handshakes.
        (0..100).for_each(|_| pair.step(Instant::now()));
        Two { pair, link, other, other_link }
    }

    /// As many gets as a link takes lie in the server's socket, and behind them one of the other client.
    fn flood(&mut self, now: Instant) {
        let get = |request| Control::get(request, WORKLOAD, 1);
        // Both have sent just now.
        self.other.request(now, self.other_link, &get(3), &[]).unwrap();
        self.other.flush(now).unwrap();
        let mut sent = 0;
        while self.pair.client.request(now, self.link, &get(1), &[]).is_ok() {
            sent += 1;
            if sent == 1 {
                self.pair.client.flush(now).unwrap();
            }
        }
        // In one datagram.
        self.pair.client.flush(now).unwrap();
        assert!(sent > 100);
        self.other.request(now, self.other_link, &get(2), &[]).unwrap();
        self.other.flush(now).unwrap();
    }

    /// Both clients are active.
    fn both_ask(&mut self, now: Instant) {
        let server = &mut self.pair.server;
        for client in server.links.iter().flatten().filter_map(|link| link.client) {
            server.turns.asked(now, client);
        }
    }

    /// Answers what comes until the request of the other client has; returns how many others were before it.
    fn answer_until_other(&mut self, now: Instant) -> usize {
        let (mut before, mut turns) = (0, 0);
        loop {
            turns += 1;
            self.pair.server.drive(now).unwrap();
            while let Some(event) = self.pair.server.poll(now) {
                let Event::Control { exchange, control } = event else { continue };
                if control.request == 2 {
                    return before;
                }
                before += 1;
                let reply = control.reply(Status::Denied);
                self.pair.server.reply(now, exchange, &reply, &[]).unwrap();
            }
            self.pair.server.flush(now).unwrap();
            assert!(turns < 10_000, "it is never answered");
        }
    }
}

#[test]
fn a_request_does_not_wait_for_all_that_another_client_has_sent_before() {
    let mut two = Two::new();
    let now = Instant::now();
    two.flood(now);
    let before = two.answer_until_other(now);
    let most = limits::BURST_CONTENDED / limits::REPLY_LEAST;
    // And one of each that was sent before.
    assert!(before <= most + 2, "{before} before it");
}

#[test]
fn what_a_client_asks_for_is_read_as_its_replies_go() {
    let mut two = Two::new();
    let now = Instant::now();
    two.flood(now);
    two.answer_until_other(now);
    let mut seen = 0;
    let start = Instant::now();
    while seen < 100 {
        let now = Instant::now();
        two.pair.server.drive(now).unwrap();
        let mut of_turn = 0;
        while let Some(event) = two.pair.server.poll(now) {
            let Event::Control { exchange, control } = event else { continue };
            two.pair.server.reply(now, exchange, &control.reply(Status::Denied), &[]).unwrap();
            of_turn += 1;
        }
        two.pair.server.flush(now).unwrap();
        two.pair.client.drive(now).unwrap();
        while two.pair.client.poll(now).is_some() {}
        two.pair.client.flush(now).unwrap();
        seen += of_turn;
        if two.pair.server.turns.is_contended() {
            let most = 2 * limits::BURST_CONTENDED / limits::REPLY_LEAST;
            assert!(of_turn <= most, "{of_turn} in a turn");
        }
        assert!(start.elapsed() < PATIENCE, "{seen} requests are read");
    }
}

/// A request of one that owes so much is answered while another is expected.
fn beside_expected(owes: Duration) -> (Two, Instant) {
    let mut two = Two::new();
    // It is not over before it is looked at.
    let (link, now) = (two.link, Instant::now() + HENCE);
    two.pair.client.request(now, link, &Control::get(1, WORKLOAD, 1), &[]).unwrap();
    two.pair.client.flush(now).unwrap();
    let exchange = loop {
        two.pair.server.drive(now).unwrap();
        let event = two.pair.server.poll(now);
        if let Some(Event::Control { exchange, .. }) = event {
            break exchange;
        }
        assert!(now.elapsed() < PATIENCE);
    };
    let addr = two.pair.client.local_addr();
    two.both_ask(now);
    let server = &mut two.pair.server;
    let client = server.peers[&addr].client.expect("it has a link");
    let light = server.peers.values().find_map(|peer| peer.client.filter(|other| *other != client));
    // Nothing else is left to be sent.
    server.flush(now).unwrap();
    let reply = Control::get(1, WORKLOAD, 1).reply(Status::Denied);
    server.reply(now, exchange, &reply, &[]).unwrap();
    server.turns.charge(now, client, owes);
    server.turns.expect(now, light.expect("another"));
    (two, now)
}

/// Sends all that does not stand back: a turn ends after some us.
fn flush_all(server: &mut Quic, now: Instant) {
    server.flush(now).unwrap();
    while !server.dirty.is_empty() {
        server.flush(now).unwrap();
    }
}

/// The reply comes.
fn take_reply(two: &mut Two) {
    let (has_come, start) = (|event| matches!(event, Some(Event::Control { .. })), Instant::now());
    while !has_come(two.pair.client.poll(start)) {
        two.pair.client.drive(Instant::now()).unwrap();
        assert!(start.elapsed() < PATIENCE);
    }
}

#[test]
fn what_is_sent_to_one_that_owes_much_waits_while_another_is_expected() {
    let (mut two, now) = beside_expected(limits::OWES_MOST);
    let server = &mut two.pair.server;
    flush_all(server, now);
    assert!(!server.standing.is_empty(), "it is sent at once");
    assert_eq!(server.deadline(), Some(now + limits::EXPECTED));
    // Meanwhile nobody looks at it.
    assert!(!server.drive(now).unwrap() && server.dirty.is_empty());
    flush_all(server, now + limits::EXPECTED);
    assert!(server.standing.is_empty(), "it is not sent then");
    take_reply(&mut two);
}

#[test]
fn what_stood_back_is_sent_just_after_the_other_was_answered() {
    let (mut two, now) = beside_expected(limits::OWES_MUCH / 2);
    let late = now + limits::ANSWERED;
    let server = &mut two.pair.server;
    flush_all(server, late);
    assert!(!server.standing.is_empty(), "it is sent while the other is expected");
    let (other, _) = server.turns.expected(late).expect("it is");
    server.turns.answered(late, other);
    flush_all(server, late);
    assert!(server.standing.is_empty(), "it is not sent then");
    take_reply(&mut two);
}

#[test]
fn nothing_is_begun_for_others_before_the_answer_of_one_that_is_expected_has_left() {
    let (mut two, now) = beside_expected(Duration::ZERO);
    let server = &mut two.pair.server;
    flush_all(server, now);
    let (other, _) = server.turns.expected(now).expect("it is");
    let of = |server: &Quic, is: bool| {
        let mut links = server.links.iter().flatten();
        links.find(|link| (link.client == Some(other)) == is).expect("a link").id
    };
    let [light, link] = [true, false].map(|is| of(server, is));
    assert!(server.begin_work(now, link));
    server.busy_link(light).unwrap();
    assert!(!server.begin_work(now, link) && server.begin_work(now, light));
    flush_all(server, now);
    assert!(server.begin_work(now, link));
}

/// A client asks so many times, once it was answered, beside another that is active; whether it is ever expected then. The first `left` requests are without an
/// answer, `on_another` link or the same.
fn is_expected_after(times: u32, left: u32, on_another: bool) -> bool {
    let mut two = Two::new();
    let another = if on_another { two.pair.connect() } else { two.link };
    let (mut is, mut asked, mut answered, start) = (false, 0, 0, Instant::now());
    while answered + left < times {
        let now = Instant::now();
        two.both_ask(now);
        if asked < answered + left + 1 {
            asked += 1;
            let link = if asked <= left { another } else { two.link };
            let get = Control::get(asked.into(), WORKLOAD, 1);
            two.pair.client.request(now, link, &get, &[]).unwrap();
        }
        two.pair.client.flush(now).unwrap();
        two.pair.server.drive(now).unwrap();
        while let Some(event) = two.pair.server.poll(now) {
            let Event::Control { exchange, control } = event else { continue };
            if control.request > left.into() {
                let reply = control.reply(Status::Denied);
                two.pair.server.reply(now, exchange, &reply, &[]).unwrap();
                two.pair.server.flush(now).unwrap();
                answered += 1;
            }
            is |= two.pair.server.turns.expected(Instant::now()).is_some();
        }
        two.pair.client.drive(now).unwrap();
        while two.pair.client.poll(now).is_some() {}
        assert!(start.elapsed() < PATIENCE, "{asked} are asked for");
    }
    is
}

#[test]
fn a_client_that_reads_one_page_after_the_other_is_expected_to_read_another() {
    assert!(is_expected_after(1000, 0, false));
    assert!(!is_expected_after(limits::EXPECTED_LEAST, 0, false));
    // Of one that asks for more before it has its answer there is always something to be done.
    assert!(!is_expected_after(1000, 1, false));
    assert!(!is_expected_after(1000, 1, true));
}

#[test]
fn what_is_held_back_is_read_of_the_client_for_which_least_was_done() {
    let mut two = Two::new();
    let start = Instant::now();
    // Of both more is sent than is read.
    while two.pair.server.held.len() < 2 {
        let now = Instant::now();
        let get = Control::get(1, WORKLOAD, 1);
        while two.pair.client.request(now, two.link, &get, &[]).is_ok() {}
        while two.other.request(now, two.other_link, &get, &[]).is_ok() {}
        for end in [&mut two.other, &mut two.pair.client] {
            end.flush(now).unwrap();
        }
        two.both_ask(now);
        two.pair.server.drive(now).unwrap();
        assert!(start.elapsed() < PATIENCE);
    }
    let server = &mut two.pair.server;
    let now = Instant::now();
    for turn in 1..=4 {
        // Those that were read are answered.
        while let Some(event) = server.events.pop_front() {
            let Event::Control { exchange, control } = event else { continue };
            server.reply(now, exchange, &control.reply(Status::Denied), &[]).unwrap();
        }
        server.flush(now).unwrap();
        // It has waited longest.
        let first = server.client_at(server.held[0]).expect("a client");
        server.turns.charge(now, first, limits::OWES_MUCH * turn);
        server.has_resumed = false;
        server.resume(now);
        let is_its = |event: &Event| server.client_of_link(event.link()) == Some(first);
        assert!(!server.events.is_empty() && server.resumes_at.is_some());
        assert!(!server.events.iter().any(is_its));
    }
}

#[test]
fn a_goodbye_does_not_stand_back() {
    let (mut two, now) = beside_expected(limits::OWES_MOST);
    let server = &mut two.pair.server;
    flush_all(server, now);
    let addr = two.pair.client.local_addr();
    let link = server.links.iter().flatten().find(|link| link.addr == addr).expect("a link").id;
    server.close(now, link, CloseCode::Draining);
    flush_all(server, now);
    let is_over = |event: Option<Event>| matches!(event, Some(Event::Closed { .. }));
    let start = Instant::now();
    while !is_over(two.pair.client.poll(start)) {
        two.pair.client.drive(Instant::now()).unwrap();
        assert!(start.elapsed() < limits::IDLE / 2, "it is not told");
    }
}

/// What they wait for may lie behind others that are not read: then it would never come.
#[test]
fn requests_that_have_not_come_whole_hold_back_no_others() {
    let mut two = Two::new();
    let (link, now) = (two.link, Instant::now());
    let mut put = Control::put(1, WORKLOAD, 64);
    put.payload_len = 64 * (PageDescriptor::LEN + PAGE_LEN) as u32;
    for _ in 0..100 {
        two.pair.send_raw(link, &[put.as_bytes(), &[7; 100]].concat(), false);
    }
    two.flood(now);
    let mut controls = 0;
    let start = Instant::now();
    // All but what the client may have under way without an answer.
    while controls < 2 + limits::EXCHANGES_MAX {
        let now = Instant::now();
        two.both_ask(now);
        two.pair.server.drive(now).unwrap();
        while let Some(event) = two.pair.server.poll(now) {
            let Event::Control { exchange, control } = event else { continue };
            controls += 1;
            if control.op() != Some(Op::Put) {
                let reply = control.reply(Status::Denied);
                two.pair.server.reply(now, exchange, &reply, &[]).unwrap();
            }
        }
        assert!(two.pair.server.turns.is_contended());
        assert!(start.elapsed() < limits::HEAD / 2, "{controls} are read");
    }
}

#[test]
fn what_is_held_back_of_one_link_does_not_wait_for_all_of_another() {
    let mut two = Two::new();
    // Both are the one client's, and ask without end.
    let links = [two.link, two.pair.connect()];
    let mut answered = [0; 2];
    let start = Instant::now();
    // One that starves has what it had under way at first, and hardly more (260).
    while answered.iter().any(|count| *count <= 2 * limits::EXCHANGES_MAX) {
        let now = Instant::now();
        let get = |request| Control::get(request, WORKLOAD, 1);
        // There is always another active.
        let _ = two.other.request(now, two.other_link, &get(9), &[]);
        for (number, link) in (0..).zip(links) {
            while two.pair.client.request(now, link, &get(number), &[]).is_ok() {}
        }
        for end in [&mut two.other, &mut two.pair.client] {
            end.drive(now).unwrap();
            while end.poll(now).is_some() {}
            end.flush(now).unwrap();
        }
        two.pair.server.drive(now).unwrap();
        while let Some(event) = two.pair.server.poll(now) {
            let Event::Control { exchange, control } = event else { continue };
            two.pair.server.reply(now, exchange, &control.reply(Status::Denied), &[]).unwrap();
            answered.get_mut(control.request as usize).into_iter().for_each(|count| *count += 1);
        }
        two.pair.server.flush(now).unwrap();
        // Its first requests may go unacknowledged for 25 ms, which allow no more: QUIC's first acknowledgement of all may be put off by one of the handshake.
        assert!(answered.iter().all(|count| *count < 128 * limits::EXCHANGES_MAX), "{answered:?}");
        assert!(start.elapsed() < limits::HEAD / 2, "{answered:?}");
    }
}

#[test]
fn what_another_sends_from_a_clients_address_is_nobodys() {
    let mut two = Two::new();
    let from = two.pair.client.local_addr();
    let peer = two.pair.server.peers.get(&from).expect("it has a link");
    assert!(peer.client.is_some() && peer.len_max >= limits::MTU_LOOPBACK.into());
    let now = Instant::now();
    two.flood(now);
    two.pair.server.turns.begin(now);
    let before = two.pair.server.turns.waiting();
    let forge = |server: &Quic, id: u8| {
        let mut datagram = vec![id; 60];
        datagram[0] = 0x40;
        server.is_of_client(from, &datagram)
    };
    let taken = (0..=255).filter(|id| forge(&two.pair.server, *id)).count();
    assert_eq!((taken, two.pair.server.turns.waiting()), (0, before));
    // Whereas all that it sends itself is its.
    two.answer_until_other(now);
}

/// Its agents are no clients of its.
#[test]
fn a_client_of_two_agents_divides_no_time_among_them() {
    let authority = Authority::generate().unwrap();
    let now = SystemTime::now();
    let identity = |role| authority.identity(role, [now - HOUR, now + HOUR]).unwrap();
    let mut pair = Pair::of(&identity(Role::Node), &identity(Role::Client));
    let mut other = Quic::server(any(), &identity(Role::Node)).unwrap();
    let links = [pair.connect(), pair.client.connect(Instant::now(), other.local_addr()).unwrap()];
    let (mut replies, start) = (0, Instant::now());
    while replies < 40 {
        let now = Instant::now();
        for link in links {
            let _ = pair.client.request(now, link, &Control::get(1, WORKLOAD, 1), &[]);
        }
        pair.client.drive(now).unwrap();
        replies += std::iter::from_fn(|| pair.client.poll(now)).filter_map(|e| control(&e)).count();
        pair.client.flush(now).unwrap();
        for server in [&mut pair.server, &mut other] {
            server.drive(now).unwrap();
            while let Some(event) = server.poll(now) {
                let Event::Control { exchange, control } = event else { continue };
                server.reply(now, exchange, &control.reply(Status::Denied), &[]).unwrap();
            }
            server.flush(now).unwrap();
        }
        assert!(!pair.client.turns.is_contended());
        assert!(start.elapsed() < PATIENCE);
    }
}
