//! What a LAN asks of QUIC: losses found in a millisecond, packets that overtake others, and urgent messages that overtake bulk.

use std::collections::VecDeque;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use zerocopy::IntoBytes;

use super::tests::{PATIENCE, Pair, WORKLOAD, any, complete, control, take};
use super::*;
use crate::message::{Op, PAGE_LEN, PAGES_MAX, PageDescriptor, Priority, Status};

/// Between two steps of the time that both ends are told.
const STEP: Duration = Duration::from_micros(100);
/// Gets under way at once, more than a packet may be late by.
const GETS: u64 = 24;
/// Descriptors of a vector, and the pages.
const VECTOR: usize = PAGES_MAX * (PageDescriptor::LEN + PAGE_LEN);

/// A pair whose link has settled: the round-trip time is known, and nothing is under way.
fn settled() -> (Pair, LinkId, Instant) {
    let mut pair = Pair::new();
    let link = pair.connect();
    let start = Instant::now();
    let mut now = start;
    // The handshake took longer than a round trip does.
    for _ in 0..100 {
        now += STEP;
        ask_and_answer(&mut pair, link, now);
        pair.until(|pair| {
            pair.step(now);
            take(&mut pair.seen, complete)
        });
        pair.seen.clear();
    }
    (0..1000).for_each(|step| pair.step(now + step * STEP));
    (pair, link, now + 1000 * STEP)
}

/// What the server knows of the path of its only link.
fn server_path(pair: &Pair) -> PathStats {
    pair.server.links.iter().flatten().next().unwrap().path()
}

/// Waits until the kernel has handed on what was sent to an end.
fn arrives(end: &Quic) {
    let mut fds = [PollFd::new(end.fd(), PollFlags::POLLIN)];
    let patience = PollTimeout::try_from(PATIENCE).unwrap();
    assert_eq!(poll(&mut fds, patience), Ok(1), "nothing arrives");
}

/// Asks for a page, and has the server answer at `now`. The client has not received it yet.
fn ask_and_answer(pair: &mut Pair, link: LinkId, now: Instant) {
    pair.client.request(now, link, &Control::get(1, WORKLOAD, 7), &[]).unwrap();
    pair.client.flush(now).unwrap();
    let mut request = None;
    while request.is_none() {
        arrives(&pair.server);
        pair.server.drive(now).unwrap();
        while let Some(event) = pair.server.poll(now) {
            request = request.or(control(&event));
        }
    }
    let (exchange, request) = request.unwrap();
    let reply = request.reply(Status::Ok).with_done(1);
    pair.server.reply(now, exchange, &reply, &[&[5; PAGE_LEN]]).unwrap();
    pair.server.flush(now).unwrap();
}

/// An end does not receive what has been sent to it.
fn lose(end: &mut Quic, now: Instant) {
    arrives(end);
    end.socket.lose_every = Some(1);
    end.drive(now).unwrap();
    end.socket.lose_every = None;
}

/// How long after `start` the client has its reply, if that is before `most`.
fn replied_after(pair: &mut Pair, start: Instant, most: Duration) -> Option<Duration> {
    let mut now = start;
    while now <= start + most {
        pair.step(now);
        if take(&mut pair.seen, complete).is_some() {
            return Some(now - start);
        }
        now += STEP;
    }
    None
}

#[test]
fn a_lost_reply_comes_again_within_a_millisecond_and_a_half() {
    let (mut pair, link, now) = settled();
    ask_and_answer(&mut pair, link, now);
    lose(&mut pair.client, now);
    let most = Duration::from_micros(1500);
    assert!(replied_after(&mut pair, now, most).is_some());
    assert!(server_path(&pair).packets.unwrap().lost > 0);
}

#[test]
fn a_lost_request_comes_again_within_a_millisecond_and_a_half() {
    let (mut pair, link, now) = settled();
    pair.client.request(now, link, &Control::get(1, WORKLOAD, 7), &[]).unwrap();
    pair.client.flush(now).unwrap();
    lose(&mut pair.server, now);
    let mut at = now;
    while take(&mut pair.served, control).is_none() {
        at += STEP;
        pair.step(at);
        assert!(at <= now + Duration::from_micros(1500));
    }
}

#[test]
fn a_client_that_waits_for_long_asks_few_times_and_an_idle_one_never() {
    let (mut pair, link, now) = settled();
    let sent = |pair: &Pair| pair.client.path(link).unwrap().packets.unwrap().sent;
    // The agent takes its time: no packet is lost.
    let before = sent(&pair);
    pair.client.request(now, link, &Control::get(1, WORKLOAD, 7), &[]).unwrap();
    (0..1000).for_each(|step| pair.step(now + step * STEP));
    let asked = sent(&pair) - before;
    // The request, pings after 0.5, 1.5, 3.5 and 7.5 ms and whenever they were acknowledged, and the acknowledgements of their answers.
    assert!((2..60).contains(&asked), "{asked} packets in 100 ms");
    let (exchange, request) = take(&mut pair.served, control).unwrap();
    let now = now + 1000 * STEP;
    pair.server.reply(now, exchange, &request.reply(Status::NotFound), &[]).unwrap();
    assert!(replied_after(&mut pair, now, STEP).is_some());
    let before = sent(&pair);
    (1..1000).for_each(|step| pair.step(now + step * STEP));
    assert!(
        sent(&pair) <= before + 1,
        "more than the acknowledgement, though it waits for nothing"
    );
    // The next request asks no more than that, however long ago the last one was.
    let pings = |pair: &Pair| pair.client.links[link.index()].as_ref().unwrap().pings();
    let (before, now) = (pings(&pair), now + 1000 * STEP);
    assert!(before > 0);
    ask_and_answer(&mut pair, link, now);
    assert!(replied_after(&mut pair, now, STEP).is_some());
    assert_eq!(pings(&pair), before);
}

/// Passes datagrams on between a client and a server; of those to the client some are overtaken by others.
struct Relay {
    front: UdpSocket,
    back: UdpSocket,
    server: SocketAddr,
    client: Option<SocketAddr>,
    /// What waits until others have passed, and how many.
    late: Option<(Vec<u8>, usize)>,
    /// Datagrams that others have overtaken.
    overtaken: usize,
}

impl Relay {
    fn to(server: SocketAddr) -> Relay {
        let bind = || {
            let socket = UdpSocket::bind(any()).unwrap();
            socket.set_nonblocking(true).unwrap();
            socket
        };
        Relay { front: bind(), back: bind(), server, client: None, late: None, overtaken: 0 }
    }

    /// Each datagram that nothing has overtaken lately waits for `behind` others.
    fn pass(&mut self, behind: usize) {
        let mut buffer = [0; 1 << 16];
        while let Ok((len, from)) = self.front.recv_from(&mut buffer) {
            self.client = Some(from);
            self.back.send_to(&buffer[..len], self.server).unwrap();
        }
        let Some(client) = self.client else { return };
        while let Ok(len) = self.back.recv(&mut buffer) {
            if self.late.is_none() && behind > 0 {
                self.late = Some((buffer[..len].to_vec(), behind));
                continue;
            }
            self.front.send_to(&buffer[..len], client).unwrap();
            let Some((late, left)) = &mut self.late else { continue };
            *left -= 1;
            if *left == 0 {
                self.front.send_to(late, client).unwrap();
                self.late = None;
                self.overtaken += 1;
            }
        }
    }

    /// Nothing waits any more.
    fn let_go(&mut self) {
        if let (Some((late, _)), Some(client)) = (self.late.take(), self.client) {
            self.front.send_to(&late, client).unwrap();
        }
    }
}

#[test]
fn packets_that_others_overtake_are_not_lost() {
    let mut pair = Pair::new();
    let mut relay = Relay::to(pair.server.local_addr());
    let addr = relay.front.local_addr().unwrap();
    let link = pair.client.connect(Instant::now(), addr).unwrap();
    pair.until(|pair| {
        relay.pass(0);
        take(&mut pair.seen, super::tests::connected)
    });
    let lost = |pair: &Pair| server_path(pair).packets.unwrap().lost;
    // The handshake took real time.
    let before = lost(&pair);
    // Nobody waits for a millisecond: what is taken for lost is so by its number.
    let (begun, mut now) = (Instant::now(), Instant::now());
    for behind in [3, 4, 8, 15].into_iter().cycle().take(40) {
        for number in 0..GETS {
            pair.client.request(now, link, &Control::get(number, WORKLOAD, 7), &[]).unwrap();
        }
        let mut completed = 0;
        for step in 0.. {
            assert!(begun.elapsed() < PATIENCE, "{completed} replies have come");
            // Half a millisecond. The kernel hands packets on later than that on a busy machine: time stands still for those.
            match step < 50 {
                true => now += STEP / 10,
                false => std::thread::yield_now(),
            }
            pair.step(now);
            relay.pass(behind);
            // A packet for each reply.
            while let Some((exchange, request)) = take(&mut pair.served, control) {
                let reply = request.reply(Status::Ok).with_done(1);
                pair.server.reply(now, exchange, &reply, &[&[6; PAGE_LEN]]).unwrap();
                pair.server.flush(now).unwrap();
                relay.pass(behind);
            }
            relay.let_go();
            while take(&mut pair.seen, complete).is_some() {
                completed += 1;
            }
            if completed == GETS {
                break;
            }
        }
        pair.served.clear();
        pair.seen.clear();
    }
    assert!(relay.overtaken >= 40, "{}", relay.overtaken);
    // The kernel itself reorders when a thread changes its CPU: a few can be overtaken by more than the relay lets by.
    let lost = lost(&pair) - before;
    assert!(lost <= relay.overtaken as u64 / 20, "{lost} of {} overtaken", relay.overtaken);
}

/// What has gone before an urgent message is sent, and what is received with it in one turn.
const UNDER_WAY: usize =
    limits::INITIAL_WINDOW as usize + limits::RECEIVE_BATCH * limits::MTU_MAX as usize;

/// Bytes of payload among `events`, until one that is `wanted`.
fn payload_before(events: &VecDeque<Event>, wanted: impl Fn(&Event) -> bool) -> Option<usize> {
    let at = events.iter().position(wanted)?;
    let len = |event: &Event| match event {
        Event::Payload { bytes, .. } => bytes.len(),
        _ => 0,
    };
    Some(events.iter().take(at).map(len).sum())
}

#[test]
fn an_urgent_request_overtakes_the_puts_that_wait_on_its_link() {
    // Within QUIC's windows, and far more than they hold: then it waits until the server allows more, behind what QUIC has been handed already.
    let handed_over = *limits::RECEIVE_WINDOW.end() as usize;
    for (puts, most) in [(8, UNDER_WAY), (28, UNDER_WAY + handed_over)] {
        let (mut pair, link, now) = settled();
        let pages = vec![1u8; VECTOR];
        for number in 0..puts {
            let put = Control::put(number, WORKLOAD, PAGES_MAX as u16);
            let put = put.with_priority(Priority::Bulk);
            pair.client.request(now, link, &put, &[&pages]).unwrap();
        }
        pair.client.flush(now).unwrap();
        let get = Control::get(1000, WORKLOAD, 7).with_priority(Priority::Demand);
        pair.client.request(now, link, &get, &[]).unwrap();
        pair.client.flush(now).unwrap();
        let is_get = |event: &Event| matches!(event, Event::Control { control, .. } if control.op() == Some(Op::Get));
        let before = pair.until(|pair| payload_before(&pair.served, is_get));
        assert!(before <= most, "{before} bytes came before it, behind {puts} puts");
    }
}

#[test]
fn an_urgent_reply_overtakes_the_replies_that_wait_on_its_link() {
    let (mut pair, link, now) = settled();
    let names = [PageDescriptor::new(1, 2); PAGES_MAX];
    let pages = vec![6; PAGES_MAX * PAGE_LEN];
    for number in 0..7 {
        let many = Control::get_many(number, WORKLOAD, PAGES_MAX as u16);
        let many = many.with_priority(Priority::Ahead);
        pair.client.request(now, link, &many, &[names.as_bytes()]).unwrap();
    }
    let get = Control::get(1000, WORKLOAD, 7).with_priority(Priority::Demand);
    let get = pair.client.request(now, link, &get, &[]).unwrap();
    let mut asked = Vec::new();
    pair.until(|pair| {
        asked.extend(take(&mut pair.served, control));
        (asked.len() == 8).then_some(())
    });
    // The urgent one is answered last.
    asked.sort_by_key(|(_, request)| request.request);
    for (exchange, request) in asked {
        let reply = request.reply(Status::Ok);
        let sent = match request.count() {
            1 => pair.server.reply(now, exchange, &reply.with_done(1), &[&[5; PAGE_LEN]]),
            _ => {
                let reply = reply.with_done(u64::MAX);
                pair.server.reply(now, exchange, &reply, &[names.as_bytes(), &pages])
            }
        };
        sent.unwrap();
        pair.server.flush(now).unwrap();
    }
    let is_reply = |event: &Event| complete(event) == Some(get);
    let before = pair.until(|pair| payload_before(&pair.seen, is_reply));
    assert!(before <= UNDER_WAY, "{before} bytes came before it");
}
