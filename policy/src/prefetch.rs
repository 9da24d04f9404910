//! Which pages come in ahead of their faults: Leap (Al Maruf and Chowdhury, "Effectively Prefetching Remote
//! Memory with Leap", ATC'20).
//!
//! A stream is a run of faults near each other. Its trend is the majority of its recent deltas, found by
//! Boyer and Moore's vote over a history which is looked at in doubling lengths; so a few stray faults do not
//! hide a stride. The window doubles with hits and halves with misses.
//!
//! Prefetched pages are installed, so their use is not seen. So one page of each larger window is left out, anywhere in the first part.
//! If it faults, the window is of use, and the next one is fetched while the rest of this is used (as by Linux's readahead
//! marker); if the stream goes on behind the window without that, it is not: programs skip pages, and what they skip should stay away.
//! A small window has been used up to the next fault. All windows of an address space share a throttle, their recent hit ratio.

use crate::ids::PageAddr;
use crate::limits::{
    FRAME_BYTES, FRUGAL, LEFT_OUT_MIN, LEFT_OUT_PART, OUTCOME_WINDOW, STREAM_REACH_PAGES,
    STREAMS_MAX, TREND_HISTORY, TREND_MIN, WASTEFUL, WINDOW_MAX,
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

/// The prefetcher of one address space: up to [`STREAMS_MAX`] streams, the least recently used making place for a new one. It starts without any
/// window.
#[derive(Clone, Debug, Default)]
pub struct Streams {
    /// Most recently used first.
    streams: Vec<Stream>,
    throttle: Throttle,
    hits_total: u64,
    issued_total: u64,
}

impl Streams {
    /// `page` faulted and must be fetched: what else to fetch with it, counted from the returned page.
    pub fn on_fault(&mut self, page: PageAddr) -> (PageAddr, Window) {
        let number = (page.get() / FRAME_BYTES) as i64;
        let left_out = self.streams.iter().position(|stream| stream.left_out == Some(number));
        let grown = match (left_out, self.continued(number)) {
            (Some(at), _) => self.reach_left_out(at, number),
            (None, Some((at, steps))) => self.follow(at, number, steps),
            (None, None) => {
                let at = self.near(number);
                match self.touch(at, number).wander(number) {
                    true => Growth::Used(0),
                    false => return (page, Window::default()),
                }
            }
        };
        let (cap, page_bytes) = (self.throttle.cap(), FRAME_BYTES as i64);
        let stream = &mut self.streams[0];
        stream.count = stream.grown(grown).min(cap);
        let ahead = (stream.last - number) * page_bytes;
        match page.offset(ahead) {
            Some(from) => {
                (from, Window { stride: stream.stride * page_bytes, count: stream.count })
            }
            None => (page, Window::default()),
        }
    }

    /// The fault at `number` is on the page that the stream `at` has left out.
    fn reach_left_out(&mut self, at: usize, number: i64) -> Growth {
        let stream = self.touch(Some(at), number);
        let issued = stream.issued;
        stream.follow(stream.end());
        self.on_outcome(issued, issued);
        Growth::Used(self.streams[0].count)
    }

    /// The fault at `number` continues the stream `at`, so many steps on.
    fn follow(&mut self, at: usize, number: i64, steps: u32) -> Growth {
        let stream = self.touch(Some(at), number);
        let (count, issued) = (stream.count, stream.issued);
        let growth = stream.used(number, steps);
        stream.follow(number);
        match growth {
            // Nothing was fetched ahead, but it would have been of use: that opens the throttle.
            Growth::Used(_) if count == 0 => self.throttle.add(1, 1),
            Growth::Used(hits) => self.on_outcome(hits.min(issued), issued),
            Growth::Missed => self.on_outcome(0, issued),
        }
        growth
    }

    /// Of the window which was returned last these pages must be fetched, in this order: the one to be left out, if any.
    pub fn leave_out(&mut self, pages: &[PageAddr]) -> Option<usize> {
        let stream = self.streams.first_mut()?;
        let leaves = stream.count >= LEFT_OUT_MIN && !pages.is_empty();
        // Not always the same place of a window: programs have their habits. (Fibonacci hashing.)
        let random = (stream.last as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        let at = leaves.then(|| (random % (pages.len() as u64 / LEFT_OUT_PART + 1)) as usize);
        stream.left_out = at.map(|at| (pages[at].get() / FRAME_BYTES) as i64);
        stream.issued = pages.len() as u32 - u32::from(leaves);
        if let Some(last) = pages.last() {
            let last = (last.get() / FRAME_BYTES) as i64;
            stream.reach = stream.steps_to(last).unwrap_or(stream.count);
        }
        self.issued_total += u64::from(stream.issued);
        at
    }

    /// Pages prefetched so far, and how many of those were used: (issued, hits).
    pub fn totals(&self) -> (u64, u64) {
        (self.issued_total, self.hits_total)
    }

    /// Of `issued` prefetched pages, `hits` were used.
    fn on_outcome(&mut self, hits: u32, issued: u32) {
        let hits = hits.min(issued);
        self.hits_total += u64::from(hits);
        self.throttle.add(hits, issued);
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
                    self.on_outcome(0, oldest.issued);
                }
                self.streams.insert(0, Stream::new(page));
            }
        }
        &mut self.streams[0]
    }
}

/// What a window was good for.
#[derive(Clone, Copy, Debug)]
enum Growth {
    /// So many of its pages were used.
    Used(u32),
    /// The page left out was not.
    Missed,
}

/// One run of faults; distances in pages.
#[derive(Clone, Debug)]
struct Stream {
    last: i64,
    /// Zero: no trend.
    stride: i64,
    /// Pages of the window.
    count: u32,
    /// Those of them which were fetched, and how far those reach.
    issued: u32,
    reach: u32,
    /// The page left out.
    left_out: Option<i64>,
    deltas: [i64; TREND_HISTORY],
    /// Deltas recorded so far; the next goes to `recorded % TREND_HISTORY`.
    recorded: usize,
}

impl Stream {
    fn new(page: i64) -> Self {
        Self {
            last: page,
            stride: 0,
            count: 0,
            issued: 0,
            reach: 0,
            left_out: None,
            deltas: [0; TREND_HISTORY],
            recorded: 0,
        }
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

    /// The last page that was fetched.
    fn end(&self) -> i64 {
        self.last + self.stride * i64::from(self.reach)
    }

    /// What a fault on another page than the one left out, so many steps on, tells of the window.
    fn used(&self, page: i64, steps: u32) -> Growth {
        let passed = |left_out: i64| (page - left_out) * self.stride > 0;
        match self.left_out.is_some_and(passed) {
            true => Growth::Missed,
            false => Growth::Used((steps - 1).min(self.count)),
        }
    }

    /// The stream went on as predicted.
    fn follow(&mut self, page: i64) {
        self.record(self.stride);
        self.last = page;
        (self.issued, self.left_out) = (0, None);
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

    /// The next window after the use that the last had: Leap's sizes, the page which faulted and its window being a power of two.
    /// One that was not used is cut to a sixteenth; without a hit again and again the stream has lost its trend.
    fn grown(&mut self, growth: Growth) -> u32 {
        if self.count == 0 {
            return 1;
        }
        let together = match growth {
            Growth::Missed => self.count.div_ceil(16),
            Growth::Used(0) => self.count.div_ceil(2),
            Growth::Used(hits) => (2 * (hits + 1).next_power_of_two()).max(self.count.div_ceil(2)),
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

    /// Most pages that a window may have now: all while nearly all are used, then less, down to none. What is fetched in vain takes the
    /// place of a page that is needed.
    fn cap(self) -> u32 {
        if self.issued <= WINDOW_MAX {
            return WINDOW_MAX;
        }
        let percent = 100 * self.hits / self.issued;
        WINDOW_MAX * percent.clamp(WASTEFUL, FRUGAL).abs_diff(WASTEFUL) / (FRUGAL - WASTEFUL)
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

    /// A fault: what is fetched along with it.
    fn fault(
        streams: &mut Streams,
        page: PageAddr,
        away: impl Fn(PageAddr) -> bool,
    ) -> Vec<PageAddr> {
        let (from, window) = streams.on_fault(page);
        let mut pages: Vec<_> = window.pages(from).filter(|&page| away(page)).collect();
        if let Some(at) = streams.leave_out(&pages) {
            pages.remove(at);
        }
        pages
    }

    /// Touches pages as a program would: only those not yet fetched fault. Returns the faults.
    fn run(streams: &mut Streams, pages: impl Iterator<Item = i64>) -> u32 {
        let (mut present, mut faults) = (HashSet::new(), 0);
        for page in pages.map(at) {
            if present.insert(page) {
                faults += 1;
                let ahead = fault(streams, page, |page| !present.contains(&page));
                present.extend(ahead);
            }
        }
        faults
    }

    #[test]
    fn a_scan_soon_faults_once_in_256_pages() {
        for stride in [1, -1, 3, -7] {
            let mut streams = Streams::default();
            let faults = run(&mut streams, (0..10_000).map(|n| 1_000_000 + n * stride));
            assert!(faults < 5 + 9 + 10_000 / 256, "stride {stride}: {faults} faults");
            let (issued, hits) = streams.totals();
            assert!(hits >= issued - 512, "{hits} of {issued}");
        }
    }

    #[test]
    fn a_scan_is_fetched_on_while_its_window_is_used() {
        for stride in [1i64, -1, 3] {
            let (mut streams, start) = (Streams::default(), 1 << 20);
            let (mut present, mut least) = (HashSet::new(), u32::MAX);
            for n in 0..10_000 {
                let page = at(start + n * stride);
                if present.insert(page) {
                    let ahead =
                        (1..).take_while(|i| present.contains(&at(start + (n + i) * stride)));
                    least = if n > 2000 { least.min(ahead.count() as u32) } else { least };
                    let more = fault(&mut streams, page, |page| !present.contains(&page));
                    present.extend(more);
                }
            }
            assert!((100..WINDOW_MAX).contains(&least), "stride {stride}: {least} pages left");
        }
    }

    #[test]
    fn what_a_program_skips_stays_away() {
        let (mut streams, mut present, mut x) = (Streams::default(), HashSet::new(), 1u64);
        let (mut vain, mut fetched) = (0, 0);
        for n in 0..200_000 {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let used = x >> 62 == 0 || n < 1000;
            match (used, present.contains(&at(n))) {
                (true, false) => {
                    let ahead = fault(&mut streams, at(n), |page| !present.contains(&page));
                    fetched += 1 + ahead.len();
                    present.extend(ahead);
                }
                (true, true) => {}
                (false, there) => vain += usize::from(there),
            }
        }
        assert!(4 * vain < fetched, "{vain} of {fetched} fetched in vain");
    }

    #[test]
    fn a_window_which_cannot_be_fetched_whole_is_gone_on_with_where_it_ends() {
        let mut streams = Streams::default();
        run(&mut streams, 0..2000);
        let mut n = 2000;
        let (from, window) = loop {
            let (from, window) = streams.on_fault(at(n));
            if window.count == WINDOW_MAX {
                break (from, window);
            }
            n += i64::from(window.count) + 1;
        };
        let pages: Vec<_> = window.pages(from).take(40).collect();
        let left_out = streams.leave_out(&pages).map(|at| pages[at]).expect("the window is large");
        assert_eq!(streams.on_fault(left_out).0, pages[39]);
    }

    #[test]
    fn windows_start_off_and_double() {
        let mut streams = Streams::default();
        let mut page = 100;
        let counts: Vec<u32> = (0..13)
            .map(|_| {
                let count = streams.on_fault(at(page)).1.count;
                page += i64::from(count) + 1;
                count
            })
            .collect();
        assert_eq!(counts, [0, 0, 0, 0, 1, 3, 7, 15, 31, 63, 127, 255, 255]);
    }

    #[test]
    fn concurrent_scans_are_told_apart() {
        let mut streams = Streams::default();
        let pages = (0..2000).flat_map(|n| (0..8).map(move |s| s * 1_000_000 + n));
        let faults = run(&mut streams, pages);
        assert!(faults < 8 * (13 + 2000 / 64), "{faults}");
    }

    #[test]
    fn stray_faults_do_not_hide_a_stride() {
        let mut streams = Streams::default();
        let pages =
            (0..4000).map(|n| if n % 5 == 4 { 5_000_000 + n * n * 7919 % 100_000 } else { n });
        let faults = run(&mut streams, pages);
        assert!(faults < 1400, "800 strays, {faults} faults of 4000");
    }

    #[test]
    fn random_faults_fetch_nothing_ahead() {
        let mut streams = Streams::default();
        let mut x = 1u64;
        for _ in 0..100_000 {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            streams.on_fault(at((x >> 40) as i64));
        }
        assert!(streams.totals().0 < 1000, "{:?}", streams.totals());
    }

    #[test]
    fn a_window_which_is_never_used_closes_the_stream() {
        let mut streams = Streams::default();
        run(&mut streams, 0..1000);
        // The pages come in and go out again before their use: every page faults.
        let counts: Vec<_> =
            (1024..1400).map(|page| fault(&mut streams, at(page), |_| true).len()).collect();
        assert!(counts.iter().skip(64).sum::<usize>() < 2 * 300, "{counts:?}");
    }

    #[test]
    fn bad_outcomes_close_the_throttle_and_trends_open_it() {
        let mut streams = Streams::default();
        streams.on_outcome(0, 4000);
        let first: u32 = (0..10).map(|page| streams.on_fault(at(page)).1.count).sum();
        assert_eq!(first, 0);
        let later = (10..6000).map(|page| streams.on_fault(at(page)).1.count).max();
        assert!(later > Some(0));
    }

    proptest! {
        /// No sequence of faults and outcomes breaks the bounds.
        #[test]
        fn bounds_hold(pages in prop::collection::vec(prop_oneof![any::<u64>(), 0..1u64 << 20], 0..300),
                       outcomes in prop::collection::vec(any::<(u32, u32)>(), 0..10)) {
            let mut streams = Streams::default();
            for (hits, issued) in outcomes {
                streams.on_outcome(hits, issued);
            }
            for page in pages.into_iter().map(PageAddr::containing) {
                let (from, window) = streams.on_fault(page);
                prop_assert!(window.count <= WINDOW_MAX);
                prop_assert!(window.count == 0 || window.stride != 0);
                prop_assert!(window.pages(from).all(|p| p != page));
                prop_assert!(streams.streams.len() <= STREAMS_MAX);
                let pages: Vec<_> = window.pages(from).collect();
                if window.count > 0 && let Some(at) = streams.leave_out(&pages) {
                    let (end, next) = streams.on_fault(pages[at]);
                    prop_assert!(next.count <= WINDOW_MAX);
                    prop_assert!(next.count == 0 || Some(&end) == pages.last());
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
