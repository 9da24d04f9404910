//! Which pages come in ahead of their faults: Leap (Al Maruf and Chowdhury, "Effectively Prefetching Remote
//! Memory with Leap", ATC'20).
//!
//! A stream is a run of faults near each other. Its trend is the majority of its recent deltas, found by
//! Boyer and Moore's vote over a history which is looked at in doubling lengths; so a few stray faults do not
//! hide a stride. The window doubles with hits and halves with misses.
//!
//! Prefetched pages are installed, so their use is not seen. It is inferred: a stream whose next fault is
//! exactly behind its window has used all of it; one which faults within the window has used what is before.
//! All windows of an address space share a throttle, their recent hit ratio.

use crate::ids::PageAddr;
use crate::limits::{
    AHEAD_MIN, FRAME_BYTES, OUTCOME_WINDOW, STREAM_REACH_PAGES, STREAMS_MAX, TREND_HISTORY,
    TREND_MIN, WINDOW_MAX,
};

/// Pages to fetch together with the one which faulted: `count` of them, each `stride` bytes after the last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Distance of the pages in bytes; may be negative.
    pub stride: i64,
    /// Number of pages, the one which faulted not counted: 0 to [`WINDOW_MAX`].
    pub count: u32,
}

impl Window {
    /// The pages of the window behind `trigger`; it ends early at the end of the address range.
    pub fn pages(self, trigger: PageAddr) -> impl Iterator<Item = PageAddr> {
        (1..=i64::from(self.count)).map_while(move |n| trigger.offset(self.stride.checked_mul(n)?))
    }
}

/// A prefetcher of one address space.
pub trait Prefetch {
    /// `page` faulted and must be fetched: what else to fetch with it.
    fn on_fault(&mut self, page: PageAddr) -> Window;

    /// A thread waits for `page`, which is being fetched ahead: what to fetch now, counted from the returned page, so that the stream
    /// goes on while the rest of its window is used.
    fn on_wait(&mut self, page: PageAddr) -> Option<(PageAddr, Window)>;

    /// Of `issued` prefetched pages, `hits` were used. The prefetcher infers this from the faults by itself;
    /// the driver may add what only it knows (a window dropped, pages evicted untouched).
    fn on_outcome(&mut self, hits: u32, issued: u32);
}

/// Up to [`STREAMS_MAX`] streams, the least recently used making place for a new one.
#[derive(Clone, Debug)]
pub struct Streams {
    page_bytes: i64,
    /// Most recently used first.
    streams: Vec<Stream>,
    throttle: Throttle,
    hits_total: u64,
    issued_total: u64,
}

impl Streams {
    /// A prefetcher for pages of 2^`page_shift` bytes (12 or 13); it starts without any window.
    pub fn new(page_shift: u8) -> Self {
        let page_bytes = i64::from(page_shift == 13) * FRAME_BYTES as i64 + FRAME_BYTES as i64;
        let streams = Vec::with_capacity(STREAMS_MAX);
        Self { page_bytes, streams, throttle: Throttle::default(), hits_total: 0, issued_total: 0 }
    }

    /// Pages prefetched so far, and how many of those were used: (issued, hits).
    pub fn totals(&self) -> (u64, u64) {
        (self.issued_total, self.hits_total)
    }

    /// The stream that a fault at `page` (a page number) continues, and how many strides on.
    fn continued(&self, page: i64) -> Option<(usize, u32)> {
        self.streams
            .iter()
            .enumerate()
            .find_map(|(at, stream)| stream.steps_to(page).map(|steps| (at, steps)))
    }

    /// The stream without a trend which was last near `page`.
    fn near(&self, page: i64) -> Option<usize> {
        let distance = |stream: &Stream| (page - stream.last).abs();
        (0..self.streams.len())
            .filter(|&at| self.streams[at].stride == 0)
            .filter(|&at| distance(&self.streams[at]) <= STREAM_REACH_PAGES)
            .min_by_key(|&at| distance(&self.streams[at]))
    }

    /// Moves the stream `at` to the front, and a new one there if there is none to use.
    fn touch(&mut self, at: Option<usize>, page: i64) -> &mut Stream {
        match at {
            Some(at) => self.streams[..=at].rotate_right(1),
            None => {
                if self.streams.len() == STREAMS_MAX
                    && let Some(oldest) = self.streams.pop()
                {
                    self.on_outcome(0, oldest.count);
                }
                self.streams.insert(0, Stream::new(page));
            }
        }
        &mut self.streams[0]
    }
}

impl Prefetch for Streams {
    fn on_fault(&mut self, page: PageAddr) -> Window {
        let page = (page.get() / self.page_bytes as u64) as i64;
        let hits = match self.continued(page) {
            Some((at, steps)) => {
                let stream = self.touch(Some(at), page);
                let (issued, hits) = (stream.count, (steps - 1).min(stream.count));
                stream.follow(page);
                match issued {
                    // Nothing was fetched ahead, but it would have been of use: that opens the throttle.
                    0 => self.throttle.add(1, 1),
                    _ => self.on_outcome(hits, issued),
                }
                Some(hits)
            }
            None => {
                let at = self.near(page);
                self.touch(at, page).wander(page).then_some(0)
            }
        };
        let (cap, page_bytes) = (self.throttle.cap(), self.page_bytes);
        let stream = &mut self.streams[0];
        let count = hits.map_or(0, |hits| stream.grown(hits)).min(cap);
        stream.count = count;
        self.issued_total += u64::from(count);
        Window { stride: stream.stride * page_bytes, count }
    }

    fn on_wait(&mut self, page: PageAddr) -> Option<(PageAddr, Window)> {
        let number = (page.get() / self.page_bytes as u64) as i64;
        let (at, steps) = self.continued(number)?;
        let Stream { last, stride, count, .. } = self.streams[at];
        if !(count / 8..=count).contains(&steps) || count < AHEAD_MIN {
            return None;
        }
        let end = page.offset(stride * self.page_bytes * i64::from(count - steps))?;
        // The rest of the window counts as used: the stream is as it will be when its last page is touched.
        self.on_outcome(count, count);
        let (cap, page_bytes) = (self.throttle.cap(), self.page_bytes);
        let stream = self.touch(Some(at), number);
        stream.follow(last + stride * i64::from(count));
        stream.count = stream.grown(count).min(cap);
        let window = Window { stride: stride * page_bytes, count: stream.count };
        self.issued_total += u64::from(window.count);
        (window.count > 0).then_some((end, window))
    }

    fn on_outcome(&mut self, hits: u32, issued: u32) {
        let hits = hits.min(issued);
        self.hits_total += u64::from(hits);
        self.throttle.add(hits, issued);
    }
}

/// One run of faults; distances in pages.
#[derive(Clone, Debug)]
struct Stream {
    last: i64,
    /// Zero: no trend.
    stride: i64,
    /// Pages fetched ahead at the last fault.
    count: u32,
    deltas: [i64; TREND_HISTORY],
    /// Deltas recorded so far; the next goes to `recorded % TREND_HISTORY`.
    recorded: usize,
}

impl Stream {
    fn new(page: i64) -> Self {
        Self { last: page, stride: 0, count: 0, deltas: [0; TREND_HISTORY], recorded: 0 }
    }

    /// How many strides `page` is ahead, if that is within the window, right behind it, or so little further
    /// that pages which needed no fetching explain it.
    fn steps_to(&self, page: i64) -> Option<u32> {
        let distance = page - self.last;
        if self.stride == 0 || distance % self.stride != 0 {
            return None;
        }
        let reach = i64::from(2 * (self.count + 1));
        let steps = distance / self.stride;
        (1..=reach).contains(&steps).then_some(steps as u32)
    }

    /// The stream went on as predicted.
    fn follow(&mut self, page: i64) {
        self.record(self.stride);
        self.last = page;
    }

    /// A stream without a trend faulted at `page`; true if it now has one, which this fault followed.
    fn wander(&mut self, page: i64) -> bool {
        let delta = page - self.last;
        if delta == 0 {
            return false;
        }
        self.record(delta);
        self.last = page;
        self.stride = self.trend().filter(|&trend| trend == delta).unwrap_or(0);
        self.stride != 0
    }

    fn record(&mut self, delta: i64) {
        self.deltas[self.recorded % TREND_HISTORY] = delta;
        self.recorded += 1;
    }

    /// Leap's FindTrend: the majority of the last 4 deltas, else of 8, 16, 32.
    fn trend(&self) -> Option<i64> {
        let mut length = TREND_MIN;
        while length <= self.recorded.min(TREND_HISTORY) {
            let recent = (1..=length).map(|n| self.deltas[(self.recorded - n) % TREND_HISTORY]);
            if let Some(trend) = majority(recent) {
                return Some(trend);
            }
            length *= 2;
        }
        None
    }

    /// The next window after `hits` pages of the last were used: Leap's sizes, the page which faulted and
    /// its window being a power of two. Without a hit twice over the stream has lost its
    /// trend.
    fn grown(&mut self, hits: u32) -> u32 {
        if self.count == 0 {
            return 1;
        }
        let together = match hits {
            0 => self.count.div_ceil(2),
            _ => (2 * (hits + 1).next_power_of_two()).max(self.count.div_ceil(2)),
        };
        if together < 2 {
            *self = Self::new(self.last);
            return 0;
        }
        together.min(WINDOW_MAX + 1) - 1
    }
}

/// The value which more than half of `values` have (Boyer and Moore, "MJRTY", 1981).
fn majority(values: impl Iterator<Item = i64> + Clone) -> Option<i64> {
    let (mut candidate, mut votes, mut total) = (0, 0usize, 0usize);
    for value in values.clone() {
        total += 1;
        match (votes, value == candidate) {
            (0, _) => (candidate, votes) = (value, 1),
            (_, true) => votes += 1,
            (_, false) => votes -= 1,
        }
    }
    (2 * values.filter(|&value| value == candidate).count() > total).then_some(candidate)
}

/// The recent hit ratio of an address space, older outcomes counting less and less.
#[derive(Clone, Copy, Debug, Default)]
struct Throttle {
    hits: u32,
    issued: u32,
}

impl Throttle {
    fn add(&mut self, hits: u32, issued: u32) {
        self.hits = self.hits.saturating_add(hits);
        self.issued = self.issued.saturating_add(issued);
        while self.issued > OUTCOME_WINDOW {
            self.hits /= 2;
            self.issued /= 2;
        }
    }

    /// Most pages that a window may have now: all while at least half of them hit, then in proportion, down
    /// to none.
    fn cap(self) -> u32 {
        if self.issued <= WINDOW_MAX {
            return WINDOW_MAX;
        }
        (2 * WINDOW_MAX * self.hits / self.issued).min(WINDOW_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn at(page: i64) -> PageAddr {
        PageAddr::containing(page as u64 * FRAME_BYTES)
    }

    /// Touches pages as a program would: only those not yet fetched fault. Returns the faults.
    fn run(streams: &mut Streams, pages: impl Iterator<Item = i64>) -> u32 {
        let (mut present, mut faults) = (HashSet::new(), 0);
        for page in pages.map(at) {
            if present.insert(page) {
                faults += 1;
                present.extend(streams.on_fault(page).pages(page));
            }
        }
        faults
    }

    #[test]
    fn a_scan_soon_faults_once_in_256_pages() {
        for stride in [1, -1, 3, -7] {
            let mut streams = Streams::new(12);
            let faults = run(&mut streams, (0..10_000).map(|n| 1_000_000 + n * stride));
            assert!(faults < 5 + 9 + 10_000 / 256, "stride {stride}: {faults} faults");
            let (issued, hits) = streams.totals();
            assert!(hits >= issued - 256, "{hits} of {issued}");
        }
    }

    #[test]
    fn a_scan_which_overtakes_its_window_is_fetched_ahead_of() {
        for stride in [1i64, -1, 3] {
            let (mut streams, start) = (Streams::new(12), 1 << 20);
            run(&mut streams, (0..512).map(|n| start + n * stride));
            let fault = start + 512 * stride;
            let window = streams.on_fault(at(fault));
            assert_eq!(window.count, 255, "the test is of no use");
            assert_eq!(streams.on_wait(at(fault + 3 * stride)), None, "too early");
            assert_eq!(streams.on_wait(at(fault + 1000 * stride)), None, "not of the window");
            let next = streams.on_wait(at(fault + 130 * stride));
            assert_eq!(next, Some((at(fault + 255 * stride), window)));
            assert_eq!(streams.on_wait(at(fault + 200 * stride)), None, "a second time");
            assert_eq!(streams.on_fault(at(fault + 511 * stride)), window, "it does not go on");
        }
    }

    #[test]
    fn windows_start_off_and_double() {
        let mut streams = Streams::new(12);
        let mut page = 100;
        let counts: Vec<u32> = (0..13)
            .map(|_| {
                let count = streams.on_fault(at(page)).count;
                page += i64::from(count) + 1;
                count
            })
            .collect();
        assert_eq!(counts, [0, 0, 0, 0, 1, 3, 7, 15, 31, 63, 127, 255, 255]);
    }

    #[test]
    fn concurrent_scans_are_told_apart() {
        let mut streams = Streams::new(12);
        let pages = (0..2000).flat_map(|n| (0..8).map(move |s| s * 1_000_000 + n));
        let faults = run(&mut streams, pages);
        assert!(faults < 8 * (13 + 2000 / 64), "{faults}");
    }

    #[test]
    fn stray_faults_do_not_hide_a_stride() {
        let mut streams = Streams::new(12);
        let pages =
            (0..4000).map(|n| if n % 5 == 4 { 5_000_000 + n * n * 7919 % 100_000 } else { n });
        let faults = run(&mut streams, pages);
        assert!(faults < 1400, "800 strays, {faults} faults of 4000");
    }

    #[test]
    fn random_faults_fetch_nothing_ahead() {
        let mut streams = Streams::new(12);
        let mut x = 1u64;
        for _ in 0..100_000 {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            streams.on_fault(at((x >> 40) as i64));
        }
        assert!(streams.totals().0 < 1000, "{:?}", streams.totals());
    }

    #[test]
    fn a_window_which_is_never_used_closes_the_stream() {
        let mut streams = Streams::new(12);
        run(&mut streams, 0..1000);
        // The pages come in and go out again before their use: every page faults.
        let counts: Vec<u32> = (1024..1400).map(|page| streams.on_fault(at(page)).count).collect();
        assert!(counts.iter().skip(64).sum::<u32>() < 2 * 300, "{counts:?}");
    }

    #[test]
    fn bad_outcomes_close_the_throttle_and_trends_open_it() {
        let mut streams = Streams::new(12);
        streams.on_outcome(0, 4000);
        let first: u32 = (0..10).map(|page| streams.on_fault(at(page)).count).sum();
        assert_eq!(first, 0);
        let later = (10..6000).map(|page| streams.on_fault(at(page)).count).max();
        assert!(later > Some(0));
    }

    #[test]
    fn pages_of_8k_are_counted_as_such() {
        let mut streams = Streams::new(13);
        let window = (0..5).map(|n| streams.on_fault(at(2 * n))).last();
        assert_eq!(window, Some(Window { stride: 8192, count: 1 }));
    }

    proptest! {
        /// No sequence of faults and outcomes breaks the bounds.
        #[test]
        fn bounds_hold(pages in prop::collection::vec(prop_oneof![any::<u64>(), 0..1u64 << 20], 0..300),
                       outcomes in prop::collection::vec(any::<(u32, u32)>(), 0..10)) {
            let mut streams = Streams::new(12);
            for (hits, issued) in outcomes {
                streams.on_outcome(hits, issued);
            }
            for page in pages.into_iter().map(PageAddr::containing) {
                let window = streams.on_fault(page);
                prop_assert!(window.count <= WINDOW_MAX);
                prop_assert!(window.count == 0 || window.stride != 0);
                prop_assert!(window.pages(page).all(|p| p != page));
                prop_assert!(streams.streams.len() <= STREAMS_MAX);
                for waited in window.pages(page) {
                    let Some((end, next)) = streams.on_wait(waited) else { continue };
                    prop_assert!(next.count <= WINDOW_MAX && next.stride == window.stride);
                    prop_assert_eq!(Some(end), window.pages(page).last());
                }
            }
        }

        /// The vote equals counting.
        #[test]
        fn majority_equals_counting(values in prop::collection::vec(0..4i64, 1..40)) {
            let count = |v| values.iter().filter(|&&x| x == v).count();
            let expected = (0..4).find(|&v| 2 * count(v) > values.len());
            prop_assert_eq!(majority(values.iter().copied()), expected);
        }
    }
}
