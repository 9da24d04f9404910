//! Strangers beside links.

use std::time::Instant;

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

/// Bytes that wait in the socket of an end, as the kernel counts them.
fn queued(end: &Quic) -> u64 {
    let port = format!(":{:04X} ", end.local_addr().port());
    let sockets = std::fs::read_to_string("/proc/net/udp").unwrap();
    let socket = sockets.lines().find(|line| line.contains(&port)).expect("our socket");
    let (_, queue) = socket.split_whitespace().nth(4).unwrap().split_once(':').unwrap();
    u64::from_str_radix(queue, 16).unwrap()
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
