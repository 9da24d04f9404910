//! Every bound and interval of the QUIC backend.

use std::time::Duration;

use crate::message::{CONTROL_LEN, PAYLOAD_MAX};

/// Established links of one listener, or of one connecting endpoint.
pub const LINKS_MAX: usize = 256;
/// Links of one listener that are in their handshake or being closed, beside the established ones; each of its endpoints
/// has an equal part.
pub const HANDSHAKES_MAX: usize = 128;
/// With so many handshakes under way, a client must prove its address before another begins; each of a listener's
/// endpoints has an equal part.
pub const RETRY_MARK: usize = 16;
/// Lines of the log a second about handshakes that failed: strangers can cause them.
pub const FAILURES_LOGGED_MAX: u32 = 10;
/// Kinds of failed handshakes, each of one source, whose lines are counted.
pub const FAILURE_KINDS_MAX: usize = 256;
/// Exchanges of one link that may be under way at once.
pub const EXCHANGES_MAX: u32 = 256;
/// Bytes of requests that may wait on one link for the peer to make room; more is
/// [`Busy`](crate::TransportError::Busy).
pub const QUEUE_MAX: usize = 8 << 20;
/// Pieces of one message that the peer may allow at a time, and a few more, before the link is closed. An honest one has room for a whole message of each
/// stream: only what all streams have together cuts one, into some hundred.
pub const PIECES_MAX: u32 = 1024;
/// Bytes of one link sent and not yet acknowledged, at most. A responder reads no further requests while
/// their replies, and those which wait for room in this window, would be more than half as much again.
pub const SEND_WINDOW: u64 = 4 << 20;
/// Send windows of all links together; beyond so many links each has less, but [`SEND_WINDOW_MIN`].
pub const SEND_WINDOWS: u64 = 256 << 20;
/// See [`SEND_WINDOWS`].
pub const SEND_WINDOW_MIN: u64 = SEND_WINDOWS / LINKS_MAX as u64;
/// Bytes of one link that a peer may send ahead of us, by the size of our socket's buffer.
pub const RECEIVE_WINDOW: std::ops::RangeInclusive<u32> = 128 << 10..=4 << 20;
/// What the receive windows of all links share: the `n`th to begin has at most an `n`th of it, and keeps the least share
/// that it has had. So all together have [`RECEIVED_AHEAD_MAX`].
pub const RECEIVE_WINDOWS: u64 = 256 << 20;
/// Bytes that the peers of all links together may send ahead of us, where the socket's buffer is large.
pub const RECEIVED_AHEAD_MAX: u64 = 714 << 20;
/// Bytes of one stream that a peer may send ahead of us: a whole message.
pub const STREAM_WINDOW: u32 = (CONTROL_LEN + PAYLOAD_MAX) as u32;
/// What a link may send before the first acknowledgement, in bytes: a LAN's path is short.
pub const INITIAL_WINDOW: u64 = 512 << 10;
/// What a link may have under way whatever was lost, in bytes: what 10 Gb/s carry in 50 us.
pub const WINDOW_MIN: u64 = 64 << 10;
/// Socket buffers asked for, in bytes (granted in full to root only).
pub const SOCKET_BUFFER: usize = 8 << 20;

/// What is done for strangers (who have no link) takes at most one part of so many of the time, while there are links.
pub const STRANGERS_PART: u32 = 8;
/// So much may be done for them at once, if nothing was before: some hundred handshakes.
pub const STRANGERS_AHEAD: Duration = Duration::from_millis(100);
/// No stranger waits longer than this for what was done before, whatever that was.
pub const STRANGERS_BEHIND: Duration = Duration::from_millis(100);
/// One turn may work so long for them, and one datagram more.
pub const STRANGERS_TURN: Duration = Duration::from_micros(20);
/// Turns of links after which strangers have one although links have something.
pub const TURNS_OF_LINKS: u32 = 8;
/// Bytes of strangers' datagrams that wait, at most: a third of each standing.
pub const STRANGERS_MAX: usize = 256 << 10;
/// Of more strangers' packets of one kind in a [`SIEVE_TURN`] than these the kernel loses a part: to receive so many takes a tenth of a CPU.
pub const SIEVE_MOST: u32 = 500;
/// What the kernel loses is reckoned anew so often.
pub const SIEVE_TURN: Duration = Duration::from_millis(10);
/// Answers to strangers are lost while so large a part of the socket's send buffer is taken: what is sent to an address at which nobody is stays there for seconds.
pub const ANSWERS_PART: usize = 4;
/// A short one counts for so many.
pub const STRANGER_LEAST: usize = 512;

/// The largest datagram of a stranger that is handled, unless its route is the loopback interface: an honest one begins with [`MTU_MIN`]. One of 64 KiB whose
/// frames leave gaps costs QUIC a second.
pub const STRANGER_LEN: usize = 1500;

/// What is done for one client takes one part in so many of the time, while another sends: it owes what is more.
pub const CLIENT_PART: u32 = 2;
/// The same while another is expected, which has the rest.
pub const EXPECTED_PART: u32 = 3;
/// What a client owed before counts no more: in time that pays, of which work takes [`CLIENT_PART`] times as much. So who owes much more has had a single
/// piece of work that was long.
pub const OWES_MOST: Duration = Duration::from_millis(4);
/// One turn may take in so much of a client, or send for so long, and one datagram more.
pub const CLIENT_TURN: Duration = Duration::from_micros(10);
/// The same where only one is active.
pub const TURN_ALONE: Duration = Duration::from_micros(200);
/// One turn receives for so long, where clients have their turns, and one reception more.
pub const RECEIVE_TURN: Duration = Duration::from_micros(30);
/// A client that was answered is expected for so long, where clients have their turns: it may ask for the next page at once.
pub const EXPECTED: Duration = Duration::from_micros(50);
/// More, if meanwhile something was done for others: so much at most.
pub const UNSEEN_MOST: Duration = Duration::from_micros(100);
/// What it takes longer than this to ask is owed by it.
pub const EXPECTED_FREE: Duration = Duration::from_micros(10);
/// It is expected, if so many of the last eight times it did,
pub const EXPECTED_LEAST: u32 = 4;
/// and if it owes so little.
pub const OWES_LITTLE: Duration = Duration::from_micros(250);
/// Meanwhile nothing is begun for a client that owes so much more, unless that one was just answered.
pub const OWES_MORE: Duration = Duration::from_micros(20);
/// Nothing at all for one that owes so much more.
pub const OWES_MUCH: Duration = Duration::from_millis(1);
/// It was just answered for so long: to ask again takes longer.
pub const ANSWERED: Duration = Duration::from_micros(3);
/// Bytes that are sent together, where clients have their turns, and of replies that requests of one link which have come whole may ask for, beyond which no
/// further request is read. (Those that have not come whole do not count: what they wait for may be behind what is not read.)
pub const BURST_CONTENDED: usize = 32 << 10;
/// The same while another is expected: it is sent in the time in which that one has its answer.
pub const BURST_EXPECTED: usize = 8 << 10;
/// A client in so many of whose receptions in [`CONTENDED`] was no request only keeps its links.
pub const QUIET_MAX: u32 = 3;
/// A client that has asked for something is active for so long.
pub const CONTENDED: Duration = Duration::from_millis(10);
/// Bytes of datagrams of clients that wait for their turn.
pub const LANES_MAX: usize = 16 << 20;
/// Receptions in one `drive`, where clients wait for their turn: the socket's buffer, which all share, is to be empty.
pub const RECEIVE_CONTENDED: usize = 64;
/// A reply counts for so many at least: its request costs something too.
pub const REPLY_LEAST: usize = 2 << 10;
/// Timers wait so long at most for what came while the thread did not run for [`STALL`].
pub const STALL_CAUGHT_UP: Duration = Duration::from_secs(1);
/// A loop that was not run for so long hears what has come before it ends a link by a timer.
pub const STALL: Duration = Duration::from_secs(1);

/// A handshake that takes longer has failed.
pub const HANDSHAKE: Duration = Duration::from_secs(3);
/// A handshake that takes longer may have to make room for another of its site. An honest one takes two round trips, and
/// whoever holds all places of a site has no more than them replaced in this time: some 4 % of a CPU.
pub const HANDSHAKE_SLOW: Duration = Duration::from_secs(1);
/// What is left of a link that has ended is forgotten after this. QUIC would keep it as long as its peer says that acknowledgements may take.
pub const CLOSING: Duration = Duration::from_secs(1);
/// Connection ids that a peer may ask for. One that gives them up without end, and acknowledges none of the new ones, would have all of those kept. Ours
/// gives none up.
pub const IDS_GIVEN_MAX: u32 = 64;
/// A request whose control message has not come whole by then is given up.
pub const HEAD: Duration = Duration::from_secs(10);
/// A link on which nothing came for this long is lost.
pub const IDLE: Duration = Duration::from_secs(5);
/// A quiet client pings the agent this often.
pub const KEEP_ALIVE: Duration = Duration::from_millis(1500);
/// An agent sends one stateless reset in this time: all links of its former life have theirs well before [`IDLE`].
pub const RESET_INTERVAL: Duration = Duration::from_millis(1);
/// Round-trip time assumed before the first sample.
pub const INITIAL_RTT: Duration = Duration::from_millis(20);
/// The longest that an acknowledgement may be held back.
pub const ACK_DELAY: Duration = Duration::from_millis(5);
/// Packets that may come before an acknowledgement is due at once: in an exchange the next message carries it.
pub const ACK_THRESHOLD: u32 = 10;
/// A packet that comes this many after the one that was expected is acknowledged at once, so that the sender learns of the gap.
pub const ACK_GAP: u32 = 1;
/// A packet is lost if it was not acknowledged, but one sent this many packets later. Networks that spread packets over
/// several paths or queues let some overtake others; what was sent 1 ms before an acknowledged one is lost in any case.
pub const REORDERED_MAX: u32 = 16;
/// A client to which nothing has come for this long, though it waits for a reply, pings the agent, which shows what was lost.
pub const PROBE: Duration = Duration::from_micros(500);
/// The same in round trips, where they are long.
pub const PROBE_RTTS: u32 = 2;
/// Each further ping of one reply takes twice as long; after this QUIC's own probes do as well.
pub const PROBE_MAX: Duration = Duration::from_millis(8);
/// After a path proved to carry less than thought, larger packets are tried again so soon.
pub const MTU_RETRY: Duration = Duration::from_secs(2);
/// A socket which took no more bytes is tried again after this.
pub const SOCKET_RETRY: Duration = Duration::from_millis(1);

/// Smallest UDP payload that every path carries (RFC 9000).
pub const MTU_MIN: u16 = 1200;
/// A first hop that carries this much is the loopback interface.
pub const MTU_LOOPBACK: u16 = 60_000;
/// What losses on the loopback interface, which are of full buffers, may reduce packets to.
pub const MTU_LOOPBACK_MIN: u16 = 9_000;
/// Datagrams that may wait in a socket from before all of its listener's sockets are bound.
pub const EARLY_MAX: usize = 16_384;
/// Largest UDP payload that we receive.
pub const MTU_MAX: u16 = 65527;
/// Received together, so many bytes are bulk: `drive` goes on receiving.
pub const BULK: usize = 16 << 10;
/// Transmissions (of up to 64 KiB) of one link before it is another's turn.
pub const TRANSMIT_BURST: usize = 4;
/// Datagrams received in one `drive`, so that sending is never put off for long.
pub const RECEIVE_BATCH: usize = 16;

const _: () = {
    // Those in their handshake may all be up in the end.
    let (mut link, mut sum) = (1, 0);
    while link <= (LINKS_MAX + HANDSHAKES_MAX) as u64 {
        let share = RECEIVE_WINDOWS / link;
        let most = *RECEIVE_WINDOW.end() as u64;
        sum += if share < most { share } else { most };
        link += 1;
    }
    assert!(sum <= RECEIVED_AHEAD_MAX && sum > RECEIVED_AHEAD_MAX - (2 << 20));
};
const _: () =
    assert!(KEEP_ALIVE.as_millis() * 3 <= IDLE.as_millis(), "two lost pings are no lost link");
const _: () = assert!(WINDOW_MIN < INITIAL_WINDOW && INITIAL_WINDOW < SEND_WINDOW_MIN);
const _: () = assert!(REORDERED_MAX > 3 && PROBE.as_micros() < ACK_DELAY.as_micros());
const _: () = assert!(QUEUE_MAX >= 2 * (CONTROL_LEN + PAYLOAD_MAX));
const _: () = assert!(RETRY_MARK < HANDSHAKES_MAX / 2 && SEND_WINDOW_MIN < SEND_WINDOW);
const _: () = assert!(SEND_WINDOW_MIN as usize / 2 >= PAYLOAD_MAX / 2);
