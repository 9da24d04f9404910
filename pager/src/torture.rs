//! Torture, for testers: makes the pager's races likely. `gms run --torture SEED` attaches at once, evicts random pages whatever the
//! budget, and delays threads at the [`Point`]s between whose sides another thread, the kernel or the workload can change something.
//!
//! All choices come from the seed, by a stream of random numbers for each thread (its name tells them apart). How threads interleave
//! is still the scheduler's: a seed makes a failure likely to come back, not certain.
//!
//! `gms run --die-at POINT:N` kills the pager when it comes to a point for the Nth time; who goes on for it does not die so.
//!
//! Off (always, but for these options) a point is one relaxed load and a branch that is not taken. The switch is one static of the
//! process, because a process pages one workload and the points lie in types that know of no session.

use std::cell::RefCell;
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use nix::unistd::Pid;

/// Where a thread can be delayed, or the pager die: between the two sides of what must not be assumed to be one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Point {
    BeforeRead,
    BetweenLookAndRead,
    AfterRead,
    BeforeGateOpens,
    AfterDecision,
    BeforeCopy,
    AfterCopy,
    AfterRegister,
    BeforeScan,
    AfterScan,
    BeforeMove,
    AfterMove,
    BeforeMark,
    AfterMark,
    BeforeOutboxRead,
    BeforeEvictionIsNoted,
    BeforeUnshare,
    BeforeReply,
    AfterReply,
    BeforeWrittenIsNoted,
    BeforeFork,
    BeforeAttach,
    WhileAttaching,
    AfterAttach,
}

const POINTS: u64 = Point::AfterAttach as u64 + 1;
/// One visit in this many gives up the CPU, or sleeps, wherever it is.
const YIELD_ONE_IN: u64 = 16;
const SLEEP_ONE_IN: u64 = 128;
const SLEEP_MAX_US: u64 = 100;
/// Visits of a thread during which one point is delayed far more than the others: races with two windows need that.
const FAVOUR_VISITS: u64 = 1024;
const FAVOURED_SLEEP_ONE_IN: u64 = 3;
const FAVOURED_MAX_US: u64 = 400;
/// One favoured delay in this many is long enough for whole system calls of the workload.
const LONG_ONE_IN: u64 = 64;
const LONG_MAX_US: u64 = 6000;
/// Evictions: longest time until the next, most pages of one, and longest time before it changes between storm and calm. A storm takes
/// pages faster than a small program can fetch them again; without the calm it would not come forward.
const STORM: Weather = Weather { pause_us: 4000, pages: 128, lasts_us: 30_000 };
const CALM: Weather = Weather { pause_us: 20_000, pages: 16, lasts_us: 40_000 };
/// A calm begins when as many faults were served as the storm took pages: on a slow machine that takes longer than any calm lasts, and
/// a program would stand still. It begins sooner if nobody faults for a while, and has to at last.
const NOBODY_FAULTS: Duration = Duration::from_millis(10);
const RECOVERY_MAX: Duration = Duration::from_secs(5);
/// Longest pause between two looks at the tree.
const LOOK_PAUSE_US: u64 = 3000;

/// Seed of the session, never `OFF` while it is tortured.
static SEED: AtomicU64 = AtomicU64::new(OFF);
const OFF: u64 = 0;
/// Where the pager dies, and how often it has been there.
static DEATH: OnceLock<Death> = OnceLock::new();
/// Who dies: the process of the first visit, not one that does something apart for it.
static WHO: OnceLock<Pid> = OnceLock::new();
static VISITS: AtomicU64 = AtomicU64::new(0);
/// Whether anything happens at points.
static WATCHED: AtomicBool = AtomicBool::new(false);

/// `--die-at`: a point, and the visit of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Death(Point, u64);

impl FromStr for Death {
    type Err = String;

    fn from_str(text: &str) -> Result<Death, String> {
        let (point, visit) = text.split_once(':').ok_or("give POINT:N, as before-move:3")?;
        let visit = visit.parse().ok().filter(|visit| *visit > 0);
        Ok(Death(Point::from_str(point, false)?, visit.ok_or("N is a number from 1 on")?))
    }
}

/// This process dies so.
pub(crate) fn die_at(death: Death) {
    let _ = DEATH.set(death);
    WATCHED.store(true, Ordering::Relaxed);
}

thread_local! {
    static STREAM: RefCell<Option<Stream>> = const { RefCell::new(None) };
}

/// Tortures this process from now on. To be called before the session's threads start.
pub(crate) fn start(seed: u64) {
    SEED.store(mix(seed).max(OFF + 1), Ordering::Relaxed);
    WATCHED.store(true, Ordering::Relaxed);
}

/// Whether this process is tortured.
#[inline]
pub(crate) fn is_on() -> bool {
    SEED.load(Ordering::Relaxed) != OFF
}

/// Delays the thread, perhaps; or the pager dies.
#[inline]
pub(crate) fn at(point: Point) {
    if WATCHED.load(Ordering::Relaxed) {
        visit(point);
    }
}

#[cold]
fn visit(point: Point) {
    let who = WHO.get_or_init(Pid::this);
    if let Some(&Death(_, visit)) = DEATH.get().filter(|death| death.0 == point)
        && VISITS.fetch_add(1, Ordering::Relaxed) + 1 == visit
    {
        let _ = nix::sys::signal::kill(*who, nix::sys::signal::Signal::SIGKILL);
    }
    if is_on() {
        delay(point);
    }
}

/// True in one call of `n`; never if nothing is tortured.
#[inline]
pub(crate) fn one_in(n: u64) -> bool {
    is_on() && with_stream(|stream| stream.below(n) == 0)
}

/// Raises `goal`, the bytes to be evicted, now and then to a few pages. `faults` have been served so far.
#[inline]
pub(crate) fn raise_goal(goal: &mut u64, faults: u64) {
    if is_on() && *goal == 0 {
        let pages = with_stream(|stream| stream.eviction(Instant::now(), faults));
        *goal = pages * crate::page_map::PAGE;
    }
}

/// The pause before the next look: a short one.
#[inline]
pub(crate) fn shorten(pause: Duration) -> Duration {
    if !is_on() {
        return pause;
    }
    pause.min(Duration::from_micros(with_stream(|stream| stream.below(LOOK_PAUSE_US))))
}

/// Puts candidates into random order.
#[inline]
pub(crate) fn shuffle<T>(items: &mut [T]) {
    if is_on() {
        with_stream(|stream| stream.shuffle(items));
    }
}

/// A random part of the pages in random order, however hot they are; `None` if nothing is tortured.
#[inline]
pub(crate) fn sample<T: Copy>(pages: &[T]) -> Option<Vec<T>> {
    is_on().then(|| with_stream(|stream| stream.sample(pages)))
}

#[cold]
fn delay(point: Point) {
    let pause = with_stream(|stream| stream.pause(point));
    match pause {
        None => {}
        Some(Duration::ZERO) => std::thread::yield_now(),
        Some(pause) => std::thread::sleep(pause),
    }
}

fn with_stream<R>(use_it: impl FnOnce(&mut Stream) -> R) -> R {
    STREAM.with_borrow_mut(|stream| {
        let new = || {
            let thread = std::thread::current();
            Stream::new(SEED.load(Ordering::Relaxed), thread.name().unwrap_or_default())
        };
        use_it(stream.get_or_insert_with(new))
    })
}

/// How much is evicted, see [`STORM`].
#[derive(Clone, Copy)]
struct Weather {
    pause_us: u64,
    pages: u64,
    lasts_us: u64,
}

/// What the program has to fetch again after a storm.
#[derive(Clone, Copy)]
struct Recovery {
    /// Over when so many faults have been served.
    target: u64,
    /// Or at this time.
    until: Instant,
    /// Faults served when last looked at, and when they last became more.
    faults: u64,
    faulted: Instant,
}

impl Recovery {
    fn is_over(&mut self, now: Instant, faults: u64) -> bool {
        if faults != self.faults {
            (self.faults, self.faulted) = (faults, now);
        }
        faults >= self.target || now >= self.until || now >= self.faulted + NOBODY_FAULTS
    }
}

/// The choices of one thread.
struct Stream {
    random: u64,
    /// The point that is delayed most now, if any (`POINTS` and more: none), and for how many visits.
    favoured: u64,
    visits: u64,
    weather: Weather,
    /// When the weather changes, and when something is to be evicted.
    next_weather: Option<Instant>,
    next_eviction: Option<Instant>,
    /// Pages taken by the storm, and the faults served before it.
    taken: u64,
    served: u64,
    recovery: Option<Recovery>,
}

impl Stream {
    fn new(seed: u64, thread: &str) -> Stream {
        let name = thread.bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)));
        Stream {
            random: mix(seed ^ name),
            favoured: POINTS,
            visits: 0,
            weather: CALM,
            next_weather: None,
            next_eviction: None,
            taken: 0,
            served: 0,
            recovery: None,
        }
    }

    fn next(&mut self) -> u64 {
        self.random = self.random.wrapping_add(1);
        mix(self.random)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    /// How long to wait at the point: not at all, or zero for giving up the CPU only.
    fn pause(&mut self, point: Point) -> Option<Duration> {
        if self.visits == 0 {
            self.visits = 1 + self.below(FAVOUR_VISITS);
            self.favoured = self.below(2 * POINTS);
        }
        self.visits -= 1;
        let micros = match point as u64 == self.favoured {
            true if self.below(FAVOURED_SLEEP_ONE_IN) == 0 => match self.below(LONG_ONE_IN) {
                0 => self.below(LONG_MAX_US),
                _ => self.below(FAVOURED_MAX_US),
            },
            _ if self.below(SLEEP_ONE_IN) == 0 => self.below(SLEEP_MAX_US),
            _ if self.below(YIELD_ONE_IN) == 0 => 0,
            _ => return None,
        };
        Some(Duration::from_micros(micros))
    }

    /// Pages to be evicted now. `faults` have been served so far.
    fn eviction(&mut self, now: Instant, faults: u64) -> u64 {
        if let Some(recovery) = &mut self.recovery {
            if !recovery.is_over(now, faults) {
                return 0;
            }
            self.recovery = None;
            self.change_weather(now, CALM);
        } else if self.next_weather.is_none_or(|at| at <= now) {
            if self.taken > 0 {
                let target = self.served + self.taken;
                let until = now + RECOVERY_MAX;
                self.recovery = Some(Recovery { target, until, faults, faulted: now });
                self.taken = 0;
                return 0;
            }
            let weather = if self.below(2) == 0 { STORM } else { CALM };
            self.change_weather(now, weather);
            self.served = faults;
        }
        if self.next_eviction.is_some_and(|at| now < at) {
            return 0;
        }
        self.next_eviction = Some(now + self.micros(self.weather.pause_us));
        let pages = 1 + self.below(self.weather.pages);
        if self.weather.pages == STORM.pages {
            self.taken += pages;
        }
        pages
    }

    fn change_weather(&mut self, now: Instant, weather: Weather) {
        self.weather = weather;
        self.next_weather = Some(now + self.micros(weather.lasts_us));
    }

    fn micros(&mut self, most: u64) -> Duration {
        Duration::from_micros(self.below(most))
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }

    fn sample<T: Copy>(&mut self, pages: &[T]) -> Vec<T> {
        // From nearly all, in runs, to single pages.
        let one_in = 1 << self.below(6);
        let mut sample: Vec<T> =
            pages.iter().filter(|_| self.below(one_in) == 0).copied().collect();
        self.shuffle(&mut sample);
        sample
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014).
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pauses(seed: u64, thread: &str) -> Vec<Option<Duration>> {
        let mut stream = Stream::new(seed, thread);
        (0..20_000).map(|_| stream.pause(Point::BeforeCopy)).collect()
    }

    #[test]
    fn a_seed_gives_each_thread_choices_of_its_own_and_the_same_again() {
        assert_eq!(pauses(1, "fault"), pauses(1, "fault"));
        assert_ne!(pauses(1, "fault"), pauses(2, "fault"));
        assert_ne!(pauses(1, "fault"), pauses(1, "evict"));
    }

    #[test]
    fn delays_are_many_and_short() {
        const VISITS: u32 = 500_000;
        let mut stream = Stream::new(7, "fault");
        let pauses: Vec<Option<Duration>> =
            (0..VISITS).map(|_| stream.pause(Point::BeforeCopy)).collect();
        let slept: Duration = pauses.iter().flatten().sum();
        let mean = slept / VISITS;
        assert!(mean > Duration::from_nanos(500) && mean < Duration::from_micros(20), "{mean:?}");
        assert!(pauses.iter().flatten().all(|p| p.as_micros() < u128::from(LONG_MAX_US)));
        let long = |pause: &&Duration| pause.as_micros() > u128::from(FAVOURED_MAX_US);
        assert!(pauses.iter().flatten().any(|pause| long(&pause)), "no point is ever favoured");
        assert!(pauses.iter().filter(|pause| pause.is_none()).count() > VISITS as usize / 2);
    }

    /// Pages evicted in a second, in which the program faults on what it lost, `faults_per_ms` at most.
    fn evicted_in_a_second(faults_per_ms: u64) -> u64 {
        let mut stream = Stream::new(3, "evict");
        let now = Instant::now();
        let (mut evicted, mut served) = (0, 0);
        for half_ms in 0..2000 {
            evicted += stream.eviction(now + Duration::from_micros(500 * half_ms), served);
            served = evicted.min(served + half_ms % 2 * faults_per_ms);
        }
        evicted
    }

    #[test]
    fn evictions_never_rest_and_take_any_page() {
        let quick = evicted_in_a_second(50);
        assert!((2000..20_000).contains(&quick), "{quick} pages a second");
        let asleep = evicted_in_a_second(0);
        assert!((1000..20_000).contains(&asleep), "{asleep} pages a second of a sleeping program");
        let mut stream = Stream::new(3, "evict");
        let pages: Vec<u64> = (0..512).collect();
        let mut seen = vec![false; pages.len()];
        for _ in 0..200 {
            stream.sample(&pages).into_iter().for_each(|page| seen[page as usize] = true);
        }
        assert!(seen.iter().all(|&seen| seen), "a page is never taken");
        assert!(stream.sample::<u64>(&[]).is_empty());
    }

    /// On a machine that serves a fault in a millisecond a program has all it lost for a part of the time.
    #[test]
    fn a_slow_program_gets_back_what_a_storm_took() {
        let mut stream = Stream::new(3, "evict");
        let now = Instant::now();
        let (mut evicted, mut served, mut whole_ms) = (0, 0, 0);
        for ms in 0..60_000 {
            evicted += stream.eviction(now + Duration::from_millis(ms), served);
            whole_ms += u64::from(served == evicted);
            served = evicted.min(served + 1);
        }
        assert!(evicted > 20_000, "{evicted} pages in a minute");
        assert!(whole_ms > 1000, "{whole_ms} ms of a minute");
    }

    #[test]
    fn a_death_is_a_point_and_a_number() {
        assert_eq!("before-move:3".parse(), Ok(Death(Point::BeforeMove, 3)));
        for text in ["", "before-move", "before-move:0", "before-move:x", "nowhere:1", ":1"] {
            assert!(text.parse::<Death>().is_err(), "{text}");
        }
    }

    #[test]
    fn nothing_happens_without_the_option() {
        let mut goal = 0;
        raise_goal(&mut goal, 0);
        assert_eq!(goal, 0);
        assert!(!is_on() && !one_in(1) && sample(&[1]).is_none());
        assert_eq!(shorten(Duration::from_secs(1)), Duration::from_secs(1));
    }
}
