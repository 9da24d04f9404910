//! Strangers beside links.

use std::io::IoSlice;
use std::os::fd::AsRawFd;
use std::time::Instant;

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

use super::tests::*;
use super::*;
use crate::keys;

#[test]
fn links_are_served_while_strangers_wait_for_their_turn() {
    let (node, client) = keys::ephemeral().unwrap();
    let mut pair = Pair::of(&node, &client);
    let link = pair.connect();
    let now = Instant::now();
    pair.server.strangers.forgive();
    pair.server.strangers.charge(now, 3 * limits::STRANGERS_AHEAD);
    let mut newcomer = Quic::client(any(), &client).unwrap();
    newcomer.connect(now, pair.server.local_addr()).unwrap();
    newcomer.flush(now).unwrap();
    let due = pair.until(|pair| pair.server.strangers.due());
    assert_eq!(due, now + 3 * limits::STRANGERS_AHEAD + limits::STRANGERS_BEHIND);
    pair.client.request(now, link, &Control::get(1, WORKLOAD, 1), &[]).unwrap();
    pair.server_sees(control);
    assert_eq!(pair.server.generation, 1, "no handshake was begun");
    assert!(pair.server.deadline().is_some_and(|deadline| deadline <= due));
    let mut turns = 0;
    while pair.server.generation == 1 {
        pair.server.drive(due).unwrap();
        turns += 1;
        // What is left of the link's goes first.
        assert!(turns <= 2 * limits::TURNS_OF_LINKS, "no handshake");
    }
}

/// Bytes that wait in the socket of an end, and datagrams that it has lost, as the kernel counts them.
fn counts(end: &Quic) -> (u64, u64) {
    let port = format!(":{:04X}", end.local_addr().port());
    let find = || {
        let sockets = std::fs::read_to_string("/proc/net/udp").unwrap();
        let sockets = sockets.lines().map(|line| line.split_whitespace().map(String::from));
        sockets.map(Vec::from_iter).find(|fields: &Vec<String>| fields[1].ends_with(&port))
    };
    // The list is read in parts: while sockets come and go, others' lines may be missed.
    let fields = (0..1000).find_map(|_| find()).expect("our socket");
    let (_, queue) = fields[4].split_once(':').unwrap();
    (u64::from_str_radix(queue, 16).unwrap(), fields[12].parse().unwrap())
}

fn queued(end: &Quic) -> u64 {
    counts(end).0
}

/// What has been sent to an end may take its time.
fn more_waits(end: &Quic, before: u64) {
    let start = Instant::now();
    while queued(end) <= before {
        assert!(start.elapsed() < PATIENCE, "nothing comes");
        std::thread::yield_now();
    }
}

#[test]
fn a_request_goes_before_a_stranger_that_came_first() {
    let (node, client) = keys::ephemeral().unwrap();
    let mut pair = Pair::of(&node, &client);
    let (link, now) = (pair.connect(), Instant::now());
    let mut newcomer = Quic::client(any(), &client).unwrap();
    newcomer.connect(now, pair.server.local_addr()).unwrap();
    let before = queued(&pair.server);
    newcomer.flush(now).unwrap();
    more_waits(&pair.server, before);
    pair.client.request(now, link, &Control::get(1, WORKLOAD, 1), &[]).unwrap();
    let before = queued(&pair.server);
    pair.client.flush(now).unwrap();
    more_waits(&pair.server, before);
    // What is left of the handshake of before may come first.
    let mut turns = 0;
    while !std::iter::from_fn(|| pair.server.poll(now)).any(|event| control(&event).is_some()) {
        pair.server.drive(now).unwrap();
        turns += 1;
        assert!(turns < limits::TURNS_OF_LINKS, "no request");
    }
    assert_eq!(pair.server.generation, 1, "a handshake was begun before");
    while pair.server.generation == 1 {
        pair.server.drive(now).unwrap();
        turns += 1;
        assert!(turns <= 2 * limits::TURNS_OF_LINKS, "no handshake");
    }
}

#[test]
fn a_link_outlives_a_time_in_which_the_loop_was_not_run() {
    let (node, client) = keys::ephemeral().unwrap();
    let mut pair = Pair::of(&node, &client);
    let (link, now) = (pair.connect(), Instant::now());
    pair.client.request(now, link, &Control::get(1, WORKLOAD, 1), &[]).unwrap();
    pair.client.flush(now).unwrap();
    let late = now + limits::IDLE + limits::STALL;
    pair.server.drive(late).unwrap();
    let events: Vec<Event> = std::iter::from_fn(|| pair.server.poll(late)).collect();
    assert!(events.iter().any(|event| control(event).is_some()), "{events:?}");
    assert!(events.iter().all(|event| closed(event).is_none()), "{events:?}");
    // What is silent is lost all the same.
    let later = late + limits::IDLE + limits::STALL;
    let mut drives = (0..3).map(|_| {
        pair.server.drive(later).unwrap();
        std::iter::from_fn(|| pair.server.poll(later)).any(|event| closed(&event).is_some())
    });
    assert!(drives.any(|closed| closed));
}

#[test]
fn the_kernel_loses_part_of_a_flood_until_it_is_over() {
    let (node, client) = keys::ephemeral().unwrap();
    let mut server = Pair::of(&node, &client).server;
    let stranger = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    stranger.connect(server.local_addr()).unwrap();
    let mut packet = [0; 1200];
    packet[..5].copy_from_slice(&[0xc0, 0, 0, 0, 1]);
    // How many of so many are lost.
    let lost = |server: &mut Quic, count: u32, now| {
        let (_, before) = counts(server);
        for _ in 0..count.div_ceil(100) {
            (0..100).for_each(|_| assert_eq!(stranger.send(&packet).unwrap(), 1200));
            while queued(server) > 0 {
                server.drive(now).unwrap();
            }
        }
        counts(server).1 - before
    };
    let mut now = Instant::now();
    assert_eq!(lost(&mut server, 4 * limits::SIEVE_MOST, now), 0);
    now += limits::SIEVE_TURN;
    server.drive(now).unwrap();
    let part = lost(&mut server, 1000, now);
    assert!((650..850).contains(&part), "{part} of 1000");
    // A train of packets is not judged by its first one: those of links are not behind it.
    let train = [&packet[..], &[0x40; 1200].repeat(20)].concat();
    let transmit = ControlMessage::UdpGsoSegments(&1200);
    for _ in 0..20 {
        let (fd, flags) = (stranger.as_raw_fd(), MsgFlags::empty());
        let sent = sendmsg::<()>(fd, &[IoSlice::new(&train)], &[transmit], flags, None);
        assert_eq!(sent.unwrap(), train.len());
        assert!(queued(&server) >= 20 * 1200, "lost with its first packet");
        while queued(&server) > 0 {
            server.drive(now).unwrap();
        }
    }
    // Nothing more comes.
    let mut turns = 0;
    while let Some(due) = server.sieve.due() {
        assert!(server.deadline().is_some_and(|deadline| deadline <= due));
        turns += 1;
        now = due;
        server.drive(now).unwrap();
    }
    assert!((2..=4).contains(&turns), "{turns}");
    assert_eq!(lost(&mut server, 100, now), 0);
}
