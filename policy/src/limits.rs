//! Every bound of the policies, and the relations which must hold between them.

use std::time::Duration;

const MIB: u64 = 1 << 20;

/// Most agents of one session.
pub const AGENTS_MAX: usize = 64;

/// Bytes of a page frame.
pub const FRAME_BYTES: u64 = 4096;

/// Most pages among which victims are chosen at a time.
pub const SCAN_WINDOW_MAX: usize = 512;

/// An exchange carries so many pages at most.
pub const EXCHANGE_PAGES_MAX: u32 = 64;
/// Most pages of a prefetch window, apart from the page which faulted: some exchanges, which are under way together.
pub const WINDOW_MAX: u32 = 4 * EXCHANGE_PAGES_MAX - 1;
/// One page of a window of at least this many is left out, to see whether the window is used.
pub const LEFT_OUT_MIN: u32 = 7;
/// It is in the first of this many parts of the window.
pub const LEFT_OUT_PART: u64 = 4;
/// Percentage of prefetched pages which must be used for windows of any size.
pub const FRUGAL: u32 = 95;
/// Below this nothing is prefetched. A page fetched ahead costs a fifth of a fault; one fetched in vain that, and soon a fault.
pub const WASTEFUL: u32 = 70;
/// Streams which a prefetcher tells apart in one address space.
pub const STREAMS_MAX: usize = 16;
/// Deltas remembered of each stream (Leap's H_size).
pub const TREND_HISTORY: usize = 32;
/// Deltas in which a majority is sought first; doubled until one is found.
pub const TREND_MIN: usize = 4;
/// A fault further than this from a stream's last belongs to another stream, in pages.
pub const STREAM_REACH_PAGES: i64 = 512;
/// Prefetched pages after which older outcomes count half.
pub const OUTCOME_WINDOW: u32 = 4096;

/// Weight of a new sample in a moving average: 1/8 (RFC 6298's for round trips).
pub const EWMA_SHIFT: u32 = 3;
/// Least share of the pages that an eligible agent gets when compared with any other: 1/64, so that a
/// slow one is measured again and can recover.
pub const EXPLORE_SHARE: f64 = 1.0 / 64.0;
/// Soonest that a read is asked of a second agent: a busy CPU alone delays one by that much.
pub const HEDGE_AFTER_MIN: Duration = Duration::from_millis(1);
/// Latest that it is.
pub const HEDGE_AFTER_MAX: Duration = Duration::from_millis(200);
/// Reads that may be hedged one after another.
pub const HEDGE_CREDIT_MAX: u32 = 16;
/// Agents with which an agent holds pages together.
pub const NEIGHBOURS: usize = 4;
/// An agent's cost doubles with each refusal in a row, up to 2^16.
pub const REFUSAL_DOUBLINGS_MAX: u32 = 16;
/// Costs below this are the same: clocks and schedulers are no finer, in ns.
pub const COST_NS_MIN: u64 = 1_000;

/// Least budget that can be kept: two slacks must fit several times.
pub const BUDGET_MIN: u64 = 4 * MIB;
/// Least and most slack below the budget (see [`crate::Budget`]).
pub const SLACK_MIN: u64 = MIB;
/// See [`SLACK_MIN`].
pub const SLACK_MAX: u64 = 64 * MIB;
/// A workload is paged when no more than this is left, whatever the budget.
pub const PAGE_HEADROOM_MIN: u64 = 16 * MIB;
/// A workload is assumed to allocate no faster than this, in bytes per second: some threads that fill huge pages.
pub const ALLOCATION_BYTES_PER_S: u64 = 16 << 30;
/// A workload in which nothing has grown unseen for a while is assumed to allocate no faster than this when it begins again.
pub const CALM_BYTES_PER_S: u64 = 3 << 30;
/// Soonest next look at the resident bytes.
pub const LOOK_MIN: Duration = Duration::from_millis(1);
/// Latest next look at the resident bytes.
pub const LOOK_MAX: Duration = Duration::from_millis(50);
/// Overshoot which is allowed in any case (the other bound is a tenth of the budget).
pub const OVERSHOOT_MIN: u64 = 32 * MIB;

/// An agent that follows its host leaves it one part in so many of its memory,
pub const RESERVE_PART: u64 = 16;
/// at least this,
pub const RESERVE_MIN: u64 = 64 * MIB;
/// and at most this.
pub const RESERVE_MAX: u64 = 2048 * MIB;
/// Its export neither grows nor shrinks for less than one part in so many of the reserve.
pub const EXPORT_BAND_PART: u64 = 8;
/// It grows when more could be spared for this long without a break (tasks that have waited for memory count for as long),
pub const EXPORT_CALM: Duration = Duration::from_secs(10);
/// by as large a part of what it could be a second as one is of this.
pub const EXPORT_GROW_TIME: Duration = Duration::from_secs(30);
/// A program of the host is assumed to fill memory no faster than this, in bytes per second: two threads that fill pages of 4 KiB.
pub const FILL_BYTES_PER_S: u64 = 4 << 30;
/// Soonest next look at the host's memory.
pub const HOST_LOOK_MIN: Duration = Duration::from_millis(5);
/// Latest next look at it.
pub const HOST_LOOK_MAX: Duration = Duration::from_millis(250);

/// Fewest pages that an agent asks its clients to take away at a time, where so many are to go: without any under way nothing can be measured.
pub const RECALL_MIN: u64 = 1024;
/// Most of them: 512 MiB.
pub const RECALL_MAX: u64 = 512 * MIB / FRAME_BYTES;
/// It is measured this often how many go.
pub const RECALL_SAMPLE: Duration = Duration::from_millis(100);
/// A measurement that was begun longer ago counts for nothing. Pagers with nothing to do hear of what is asked for once a second.
pub const RECALL_STALE: Duration = Duration::from_secs(3);

const _: () = {
    assert!(RECALL_MIN >= 4 * EXCHANGE_PAGES_MAX as u64 && RECALL_MIN < RECALL_MAX);
    assert!(RECALL_SAMPLE.as_millis() < RECALL_STALE.as_millis());
    // What is filled between two looks is there: half of the reserve at least.
    assert!(FILL_BYTES_PER_S / 1000 * (HOST_LOOK_MIN.as_millis() as u64) < RESERVE_MIN / 2);
    assert!(EXPORT_BAND_PART >= 4 && RESERVE_MIN < RESERVE_MAX);
    // A page is at an agent and some of its neighbours: with up to two of those so many sets have a number each, those that are left when agents are lost too.
    assert!(AGENTS_MAX * (1 + NEIGHBOURS + NEIGHBOURS * (NEIGHBOURS - 1) / 2) <= 1 << 10);
    assert!(FRAME_BYTES.is_power_of_two());
    assert!(EXCHANGE_PAGES_MAX.is_power_of_two() && WINDOW_MAX < OUTCOME_WINDOW);
    assert!(TREND_MIN <= TREND_HISTORY && TREND_HISTORY.is_multiple_of(TREND_MIN));
    assert!(STREAM_REACH_PAGES > 2 * WINDOW_MAX as i64);
    assert!(EXPLORE_SHARE > 0.0 && EXPLORE_SHARE < 0.5);
    assert!(SLACK_MIN <= SLACK_MAX && 4 * SLACK_MIN <= BUDGET_MIN);
    // What is allocated between two looks stays below the overshoot allowed.
    assert!(ALLOCATION_BYTES_PER_S / 1000 * (LOOK_MIN.as_millis() as u64) < OVERSHOOT_MIN);
    assert!(SLACK_MAX / FRAME_BYTES > EXCHANGE_PAGES_MAX as u64);
};
