//! Every bound of the agent, and the relations between them.

use gms_transport::message::{DISCARD_MAX, PAGES_MAX};
use gms_transport::quic::limits::RETRY_MARK;
use std::time::Duration;

/// Bytes of a frame.
pub const FRAME_LEN: usize = gms_transport::message::PAGE_LEN;
/// Most bytes of a page: what a frame does not hold of it lies beside it in the index.
pub const PAGE_LEN_MAX: usize = FRAME_LEN + TAIL_LEN;
/// Bytes of a page beyond its frame.
pub const TAIL_LEN: usize = gms_transport::message::TAG_LEN;
/// Most frames of a slab: 4 TiB.
pub const FRAMES_MAX: u64 = 1 << 30;
/// Most tenants at a time, those whose frames are being freed included.
pub const TENANTS_MAX: usize = 4096;
/// Most links at a time.
pub const LINKS_MAX: usize = 256;
/// Most of these that agents have made to gossip; the rest is for pagers.
pub const NODE_LINKS_MAX: usize = LINKS_MAX / 4;
/// Most threads that serve.
pub const THREADS_MAX: usize = 16;
/// Most of them unless the user says how many.
pub const THREADS_USUAL: usize = 8;
/// Parts of the index of pages for each thread, where there are several: so two seldom want the same one.
pub const SHARDS_PER_THREAD: usize = 4;
/// Most exchanges whose request is coming in at a time, all links together.
pub const EXCHANGES_MAX: usize = 16_384;
/// Bytes of descriptors and page ids, of requests that are coming in, at a time, all links together.
pub const HEADS_MAX: usize = 32 << 20;
/// An exchange whose request has not come whole by then is given up.
pub const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(30);

/// Lease of a workload which asks for none.
pub const LEASE_DEFAULT: Duration = Duration::from_secs(30);
/// Shortest lease.
pub const LEASE_MIN: Duration = Duration::from_secs(1);
/// Longest lease.
pub const LEASE_MAX: Duration = Duration::from_secs(600);

/// Most credits that one reply grants, in pages.
pub const CREDITS_MAX: u64 = 16 * PAGES_MAX as u64;

/// One part in so many of the frames is left to clients which hold less than an equal share.
pub const RESERVE_SHARE: u64 = 8;

/// Period of housekeeping, while there is any to do.
pub const TICK: Duration = Duration::from_millis(250);
/// Entries looked at in one step of freeing an ended workload's frames: 0.4 ms if all
/// are.
pub const SWEEP_STEP: u32 = 4096;
/// While fewer than one in so many frames are of ended workloads, there is this long between two steps: a client which ends workloads of a page
/// each would otherwise have the loop sweep without end.
pub const SWEEP_PAUSE: Duration = Duration::from_millis(4);
/// See [`SWEEP_PAUSE`].
pub const SWEEP_SHARE: u64 = 16;
/// A discard of so many pages is done as soon as it has come.
pub const DISCARD_AT_ONCE: usize = 64;
/// Pages that a longer one frees in one step: 6 us, about as long as a client that reads one page after the other lets a thread wait for its next request.
pub const DISCARD_STEP: usize = 64;
/// Such steps in one turn of the loop, at most,
pub const DISCARD_STEPS: usize = 8;
/// of which the last begins so soon.
pub const DISCARDS_TURN: Duration = Duration::from_micros(10);
const _: () = assert!(DISCARD_AT_ONCE <= DISCARD_STEP, "it is answered after one step");
/// Entries looked at in one step of giving free frames back to the kernel.
pub const TRIM_STEP: u32 = 16_384;
/// Frames given back in one step, in at most [`TRIM_CALLS`] calls: about 0.4 ms.
pub const TRIM_FRAMES: u32 = 512;
/// Frames given back in one call, while which no other thread takes or frees one of their part: about 50 us.
pub const TRIM_RUN: u32 = 64;
/// See [`TRIM_FRAMES`].
pub const TRIM_CALLS: u32 = 64;
/// Free frames are given back step by step when no page has been put for this long; before that, one step a
/// [`TICK`] (8 MiB/s), so that frames which are soon used again stay warm.
pub const TRIM_IDLE: Duration = Duration::from_secs(10);
/// Frames of a part kept warm ahead of the ones in use, when none that was used before is free: 4 MiB.
pub const WARM_AHEAD: u32 = 1024;
/// Frames warmed in one call.
pub const WARM_STEP: u32 = 64;
/// Seconds for which the ages of pages are told apart; older ones are all as old as this.
pub const AGE_SECONDS_MAX: usize = 1 << 16;

/// Longest spin before the loop blocks.
pub const SPIN_MAX: Duration = Duration::from_micros(50);
/// Events handled, and pages looked up, before replies are sent.
pub const FLUSH_EVENTS: usize = 32;
/// Period at which links are looked over for certificates that have expired.
pub const EXPEL_EVERY: Duration = Duration::from_secs(3600);
/// Period at which the end of certificates is told again, once it is near.
pub const REMIND_EVERY: Duration = Duration::from_secs(86400);
/// Longest block of the loop, whatever the deadlines.
pub const BLOCK_MAX: Duration = Duration::from_secs(60);
/// Longest time that a drain waits for workloads to take their pages away.
pub const DRAIN_MAX: Duration = Duration::from_secs(3600);
/// Time for the last packets of a drain.
pub const FAREWELL: Duration = Duration::from_millis(200);

/// A member is probed this often.
pub const PROBE_EVERY: Duration = Duration::from_secs(1);
/// If it does not answer by then, others are asked to probe it.
pub const PROBE_RTT: Duration = Duration::from_millis(300);
/// So many others; also to how many at a time changes are told.
pub const PROBES_INDIRECT: usize = 3;
/// A member that did not answer a probe is gone unless it contradicts by then.
pub const SUSPECT_FOR: Duration = Duration::from_secs(3);
/// For how long it is known that a node is gone.
pub const GONE_FOR: Duration = Duration::from_secs(300);
/// Each change is told so many times, at most this often.
pub const GOSSIP_TIMES: u8 = 10;
/// See [`GOSSIP_TIMES`].
pub const GOSSIP_EVERY: Duration = Duration::from_millis(200);
/// Period at which a member, one that is gone, and who is meant by `--join` are asked for members: what a broken network has parted unites.
pub const UNITE_EVERY: Duration = Duration::from_secs(15);
/// The same for who is meant by `--join`, while no member is known.
pub const JOIN_EVERY: Duration = Duration::from_secs(1);
/// Shortest time between two incarnations that an agent takes because others believe in later ones: each begins its probes of others anew.
pub const RENEW_EVERY: Duration = Duration::from_secs(5);
/// Nanoseconds, 73 years: hearsay of incarnations, which are times, that are further from an agent's own start than this is a lie. So all that
/// are believed lie within one half of the circle on which they are compared, whatever the agents' clocks say.
pub const LIFE_DISTANCE_MAX: u64 = 1 << 61;
/// Lives that an agent may take after one which is as far as that.
pub const LIVES_MAX: u64 = 1 << 32;
/// Packets of gossip that wait to be sent, or to be read; more are lost, as SWIM can bear.
pub const PACKETS_MAX: usize = 256;
/// Packets of one node that wait to be read, and that are read at once.
pub const PACKETS_OF_ONE_MAX: usize = 16;
/// Beyond that, one packet of a node is read this often.
pub const PACKET_EVERY: Duration = Duration::from_millis(20);
/// Packets to one node without a reply, and how long one is waited for: then the link is closed.
pub const PACKETS_OPEN_MAX: usize = 32;
/// See [`PACKETS_OPEN_MAX`].
pub const PACKET_REPLY: Duration = Duration::from_secs(5);
/// Packets that wait for one link to come up.
pub const PACKETS_BEHIND_MAX: usize = 8;
/// Links to other agents that are up, and as many that are not yet. Fewer than an agent takes: on average, as many are made to each.
pub const PEER_LINKS_MAX: usize = 48;
/// An agent that is not meant by `--join` is called this often at most, but for the first [`PEER_CALLS`].
pub const PEER_CALL_EVERY: Duration = Duration::from_millis(64);
/// See [`PEER_CALL_EVERY`].
pub const PEER_CALLS: u32 = 32;
/// An address at which nobody, or somebody else, was is not called for this long, unless who is to be there sends a packet.
pub const PEER_SHUN: Duration = Duration::from_secs(15);
/// A link to another agent that has carried nothing for this long is closed.
pub const PEER_LINK_IDLE: Duration = Duration::from_secs(60);
/// Addresses that the names after `--join` may have together.
pub const SEEDS_MAX: usize = 64;
/// Time in which an agent that ends tells members.
pub const LEAVE: Duration = Duration::from_secs(1);

/// Lines of the log that wait to be written; more are lost.
pub const LOG_LINES_MAX: usize = 1024;
/// Lines of the log a second about links and workloads that come and go; as many about members.
pub const LINES_MAX: u32 = 100;
/// Those about one client.
pub const CLIENT_LINES_MAX: u32 = 25;
/// Time for the last lines of the log, if it is not read.
pub const LOG_FAREWELL: Duration = Duration::from_secs(1);

/// Metrics clients at a time; one more takes the place of the oldest.
pub const METRICS_CLIENTS_MAX: usize = 32;
/// A metrics client must have sent its request, and taken the answer, by then.
pub const METRICS_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest metrics request in bytes.
pub const METRICS_REQUEST_MAX: usize = 8192;

const _: () = {
    assert!(FRAMES_MAX < u32::MAX as u64 && FRAME_LEN == 4096);
    assert!(PAGE_LEN_MAX <= u16::MAX as usize);
    assert!(TENANTS_MAX < u16::MAX as usize);
    assert!(TRIM_RUN <= TRIM_FRAMES && TRIM_FRAMES <= TRIM_STEP);
    assert!(SWEEP_STEP as usize >= DISCARD_MAX && TRIM_FRAMES / TRIM_RUN <= TRIM_CALLS);
    // Each has an equal part of what a listener may have of handshakes.
    assert!(THREADS_USUAL <= THREADS_MAX && RETRY_MARK.is_multiple_of(THREADS_MAX));
    assert!(WARM_STEP < WARM_AHEAD && WARM_STEP.is_power_of_two());
    assert!(CREDITS_MAX <= u32::MAX as u64);
    assert!(PROBE_RTT.as_millis() * 3 <= PROBE_EVERY.as_millis());
    assert!(PROBE_EVERY.as_millis() + SUSPECT_FOR.as_millis() <= RENEW_EVERY.as_millis());
    assert!(PACKETS_OF_ONE_MAX < PACKETS_MAX && PEER_LINKS_MAX < NODE_LINKS_MAX);
    assert!(PACKETS_BEHIND_MAX < PACKETS_OPEN_MAX);
    assert!(TICK.as_millis() < LEASE_MIN.as_millis());
    assert!(FAREWELL.as_millis() < LEASE_MIN.as_millis());
};
