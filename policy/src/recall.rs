//! How many of the pages beyond its export an agent asks its clients to take away now.
//!
//! A page that is asked for is on its way for a while: its owner reads it, writes it elsewhere, and tells the agent that it may forget it. An owner that is
//! asked for all of them has all on its way, whatever else it has to do, and cannot stop when the agent wants them no more. So the agent has no more in
//! flight than go in a second, as it has measured, and asks for more as they go. Where an owner's way takes less than a second, that holds up none: what
//! goes is then more than what is asked for at a time, and the next measurement allows more, up to what owners and networks can.

use crate::ids::PageCount;
use crate::limits::{RECALL_MAX, RECALL_MIN, RECALL_SAMPLE, RECALL_STALE};
use std::time::Instant;

/// See the module's documentation.
#[derive(Clone, Debug, Default)]
pub struct Recall {
    /// Pages that go in a second.
    rate: u64,
    /// When that was measured last, and how many pages there were then.
    seen: Option<(Instant, PageCount)>,
}

impl Recall {
    /// Pages to be asked for now, of all clients together, while the agent holds `held` and `over` of them are beyond its export. What is asked for is in
    /// place of what was before, not in addition.
    pub fn ask(&mut self, now: Instant, held: PageCount, over: PageCount) -> PageCount {
        let (at, before) = *self.seen.get_or_insert((now, held));
        let elapsed = now.saturating_duration_since(at);
        if elapsed >= RECALL_SAMPLE {
            self.seen = Some((now, held));
            // If nobody has looked for that long, nobody was asked either.
            if elapsed < RECALL_STALE {
                let gone = u128::from(before.0.saturating_sub(held.0));
                let measured = gone * 1_000_000 / elapsed.as_micros();
                // One absurd look is not to decide for long.
                self.rate = (self.rate + measured.min(RECALL_MAX.into()) as u64) / 2;
            }
        }
        PageCount(over.0.min(self.rate.clamp(RECALL_MIN, RECALL_MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    const TICK: Duration = Duration::from_millis(10);

    /// An agent and the owner of its pages, stepped in simulated time.
    struct Play {
        now: Instant,
        recall: Recall,
        held: u64,
        export: u64,
        /// Taken by the owner and not gone yet, by when they were.
        flight: std::collections::VecDeque<(Instant, u64)>,
    }

    impl Play {
        fn new(held: u64) -> Play {
            let recall = Recall::default();
            Play { now: Instant::now(), recall, held, export: 0, flight: Default::default() }
        }

        fn in_flight(&self) -> u64 {
            self.flight.iter().map(|taken| taken.1).sum()
        }

        /// The owner takes what it is asked for; `pace` pages a second go, each not before `way` is over.
        fn step(&mut self, pace: u64, way: Duration) {
            let over = PageCount(self.held.saturating_sub(self.export));
            let asked = self.recall.ask(self.now, PageCount(self.held), over).0;
            let more = asked.saturating_sub(self.in_flight());
            self.flight.push_back((self.now, more));
            self.now += TICK;
            let mut left = pace * TICK.as_millis() as u64 / 1000;
            while let Some(first) =
                self.flight.front_mut().filter(|first| first.0 + way <= self.now)
            {
                let go = first.1.min(left);
                (first.1, left, self.held) = (first.1 - go, left - go, self.held - go);
                if first.1 > 0 {
                    break;
                }
                self.flight.pop_front();
            }
        }
    }

    proptest! {
        /// However slow an owner is, what it has on its way is done in little more than a second; however fast, it is not held up for long.
        #[test]
        fn no_more_is_in_flight_than_goes_in_a_second(
            pace in 1000..100_000u64, way_ms in 0..500u64, held in 1..1_000_000u64,
        ) {
            let (mut play, way) = (Play::new(held), Duration::from_millis(way_ms));
            let (most, began) = (pace + pace / 5 + RECALL_MIN, play.now);
            while play.held > 0 {
                play.step(pace, way);
                prop_assert!(play.in_flight() <= most, "{} at {pace}", play.in_flight());
                let least = Duration::from_secs(held / pace);
                let took = play.now - began;
                prop_assert!(took < least * 2 + Duration::from_secs(10), "{took:?}, not {least:?}");
            }
        }

        /// Whatever is told, what is asked for is within its bounds.
        #[test]
        fn bounds_hold(looks in prop::collection::vec((0..10_000u64, any::<u64>(), any::<u64>()), 1..50)) {
            let (mut recall, mut now) = (Recall::default(), Instant::now());
            for (pause, held, over) in looks {
                now += Duration::from_millis(pause);
                let asked = recall.ask(now, PageCount(held), PageCount(over)).0;
                prop_assert!((over.min(RECALL_MIN)..=over.min(RECALL_MAX)).contains(&asked));
            }
        }
    }

    #[test]
    fn an_owner_that_slows_down_is_asked_for_less_and_one_that_takes_nothing_for_a_little() {
        let (mut play, way) = (Play::new(10_000_000), 10 * TICK);
        let run = |play: &mut Play, pace| (0..500).for_each(|_| play.step(pace, way));
        run(&mut play, 100_000);
        assert!(play.in_flight() > 50_000, "{}", play.in_flight());
        for pace in [10_000, 0] {
            run(&mut play, pace);
            let (over, held) = (PageCount(play.held), PageCount(play.held));
            let asked = play.recall.ask(play.now, held, over).0;
            assert!(asked <= (pace + pace / 5).max(RECALL_MIN), "{asked} at {pace}");
        }
    }

    #[test]
    fn the_last_pages_are_asked_for_exactly() {
        let mut play = Play::new(300_000);
        play.export = 200_000;
        (0..2000).for_each(|_| play.step(50_000, 10 * TICK));
        assert_eq!((play.held, play.in_flight()), (200_000, 0));
    }
}
