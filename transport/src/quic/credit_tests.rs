//! Peers that allow little at a time of what they have asked for.

use std::time::Instant;

use zerocopy::IntoBytes;

use super::tests::*;
use super::*;
use crate::message::{PAGE_LEN, PAGES_MAX, PageDescriptor, Status};

/// A link whose client takes `window` bytes of a reply ahead, and allows more as it reads.
fn connect_narrow(pair: &mut Pair, window: u32) -> LinkId {
    let (now, client) = (Instant::now(), &mut pair.client);
    let mut transport = client.transport(limits::MTU_LOOPBACK, 0, 1 << 20);
    let narrow = Arc::get_mut(&mut transport).expect("nobody else has it");
    narrow.stream_receive_window(window.into());
    let mut config = client.client.clone().expect("a client");
    config.transport_config(transport);
    let remote = pair.server.local_addr();
    let (handle, conn) = client.endpoint.connect(now, config, remote, NODE_NAME).unwrap();
    let link = client.add(now, handle, conn, 1 << 20);
    pair.client_sees(|event| connected(event).filter(|(l, _)| *l == link));
    pair.server_sees(connected);
    link
}

/// Asks for as many pages as may be, which the server answers.
fn ask_for_many(pair: &mut Pair, link: LinkId) {
    let names = [PageDescriptor::new(1, 1); PAGES_MAX];
    let now = Instant::now();
    let many = Control::get_many(1, WORKLOAD, PAGES_MAX as u16);
    pair.client.request(now, link, &many, &[names.as_bytes()]).unwrap();
    let exchange = pair.server_sees(complete);
    let (_, request) = pair.server_sees(control);
    let reply = request.reply(Status::Ok).with_done(u64::MAX);
    let page = [7; PAGE_LEN];
    let mut payload = vec![names.as_bytes()];
    payload.extend([&page[..]; PAGES_MAX]);
    pair.server.reply(now, exchange, &reply, &payload).unwrap();
}

/// QUIC keeps each piece that it was handed, and looks through all of them for each byte that it sends.
#[test]
fn one_that_takes_a_reply_in_bytes_is_disconnected() {
    let mut pair = Pair::new();
    let link = connect_narrow(&mut pair, 1);
    ask_for_many(&mut pair, link);
    let why = pair.server_sees(closed);
    assert!(matches!(why, CloseReason::Overload { .. }), "{why}");
}

#[test]
fn one_that_has_little_room_gets_all_of_a_reply() {
    let mut pair = Pair::new();
    let link = connect_narrow(&mut pair, 2 * PAGE_LEN as u32);
    ask_for_many(&mut pair, link);
    pair.client_sees(complete);
}
