//! Room for faults: who is woken when there is some, and what happens when none can be made because no agent takes pages.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gms_policy::full::{FullAction, WhenFull};
use gms_transport::Transport;

use super::look::LOOK_CROWDED;
use super::{EvictThread, STUCK};
use crate::sync::lock;
use crate::tables::Place;
use crate::victims::BATCH;

/// Step by which the ceiling rises when nothing can be evicted.
const STUCK_STEP: i64 = 1 << 20;

/// How long after a spell was told another one may be.
const TELL_EVERY: Duration = Duration::from_secs(300);
/// A pause of a spell that was told is its end if it lasts longer.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// For how long no agent has taken pages that should go.
#[derive(Debug, Default)]
pub(super) struct Fullness {
    since: Option<Instant>,
    /// In all earlier spells together.
    before: Duration,
    /// When the user was told of a spell last.
    told_at: Option<Instant>,
    /// The end of that spell has not been told.
    is_told: bool,
    /// Since when the spell that was told seems to be over.
    over_since: Option<Instant>,
}

impl Fullness {
    /// There have been spells of so long together before.
    pub(super) fn begin_after(&mut self, before: Duration) {
        self.before = before;
    }

    fn update(&mut self, now: Instant, full: bool) {
        if full {
            self.since.get_or_insert(now);
        } else {
            self.before += self.spell(now).unwrap_or_default();
            self.since = None;
        }
    }

    /// Whether to tell of the present spell now.
    fn tells(&mut self, now: Instant) -> bool {
        let tells = !self.is_told && self.told_at.is_none_or(|at| now >= at + TELL_EVERY);
        if tells {
            (self.told_at, self.is_told) = (Some(now), true);
        }
        tells
    }

    /// Whether to tell that the spell that was told is over.
    fn ends(&mut self, now: Instant) -> bool {
        let over = self.is_told && self.since.is_none();
        self.over_since = over.then(|| self.over_since.unwrap_or(now));
        let ends = self.over_since.is_some_and(|since| now > since + PAUSE_MAX);
        self.is_told &= !ends;
        ends
    }

    /// For so long it was not looked whether it is so.
    pub(super) fn excuse(&mut self, missed: Duration) {
        self.since = self.since.map(|since| since + missed);
    }

    /// How long the present spell has lasted, if it is one and no mere hiccup.
    pub(super) fn spell(&self, now: Instant) -> Option<Duration> {
        let spell = now.saturating_duration_since(self.since?);
        (spell > STUCK).then_some(spell)
    }

    /// All spells together.
    pub(super) fn total(&self, now: Instant) -> Duration {
        self.before + self.spell(now).unwrap_or_default()
    }
}

impl<T: Transport> EvictThread<T> {
    /// Wakes the faults that wait for room, if there is some also for first touches, or if none can be made.
    pub(super) fn make_room(&mut self, now: Instant) {
        if self.is_detaching() {
            // Everything will be resident: nobody waits.
            self.shared.ceiling.store(i64::MAX, Ordering::Relaxed);
            return self.wake_roomless(usize::MAX);
        }
        let ceiling = self.budget.ceiling().0 as i64;
        let resident = self.shared.resident.load(Ordering::Relaxed);
        let waiting = lock(&self.shared.tables).roomless();
        let grows = self.react_to_full(now, waiting > 0 || resident > ceiling);
        // Who may grow does so at once while it is known that no agent takes pages.
        let stuck = self.stuck_at.is_some_and(|at| now > at) || self.full.spell(now).is_some();
        if waiting == 0 {
            if resident < ceiling {
                self.stuck_at = None;
                self.shared.ceiling.store(ceiling, Ordering::Relaxed);
            }
            return;
        }
        if stuck && grows && !self.shared.has_room(waiting + self.shared.sizes.room_kept) {
            self.shared.ceiling.store(resident.max(ceiling) + STUCK_STEP, Ordering::Relaxed);
            self.stuck_at = None;
            self.warn_stuck(now);
        }
        // Waited for until there is some for several, so that it is not given out page by page.
        let room = self.shared.room().saturating_sub(self.shared.sizes.room_kept + self.granted);
        if room >= waiting.min(BATCH as u64) {
            self.wake_roomless(room as usize);
        }
    }

    /// As many as there is room for, the oldest first: the others would only fault in vain.
    fn wake_roomless(&mut self, max: usize) {
        let places = lock(&self.shared.tables).take_roomless(max);
        if !places.is_empty() {
            // What they take is known at the next look.
            self.granted += places.len() as u64;
            self.next_look = self.next_look.min(Instant::now() + LOOK_CROWDED);
        }
        self.wake(&places);
    }

    /// Faults of a child can be known before the child is: its `Forked` has been sent by then.
    pub(super) fn wake(&mut self, places: &[Place]) {
        if places.iter().any(|place| !self.spaces.contains_key(&place.0)) {
            self.obey(Instant::now());
        }
        self.shared.wake(&self.spaces, places);
    }

    /// No agent takes pages, though some must go: does what `--when-full` says, and tells the user at once. `pressed` says that the budget
    /// is exceeded, or that faults wait. False if the workload may not exceed its budget for that.
    fn react_to_full(&mut self, now: Instant, pressed: bool) -> bool {
        let full = self.goal > 0
            && lock(&self.shared.tables).free_slots() < BATCH
            && self.write_back.agents_are_full();
        self.full.update(now, full);
        if self.full.ends(now) {
            self.notice(format_args!("no page waits for room at an agent any more"));
        }
        let Some(spell) = self.full.spell(now).filter(|_| pressed) else { return !full };
        let when_full = self.shared.config.when_full;
        let action = when_full.action(spell);
        if action == FullAction::Kill {
            let why = self.why_full();
            self.shared.fail(format!("--when-full is kill, and {why}"));
        } else if self.full.tells(now) {
            let consequence = match when_full {
                WhenFull::Grow => "the workload exceeds its budget",
                WhenFull::Wait => "the workload waits until one takes pages",
                WhenFull::Kill => "the workload is killed unless one takes pages soon",
            };
            self.notice(format_args!("{consequence}: {}", self.why_full()));
        }
        action == FullAction::Grow
    }

    /// Why no agent takes pages, and what to do.
    fn why_full(&self) -> String {
        let views = self.write_back.agents.lane().views();
        why_full(views.iter().filter(|view| !view.last_resort).map(|view| view.up))
    }

    fn warn_stuck(&mut self, now: Instant) {
        if self.full.spell(now).is_none() && !std::mem::replace(&mut self.warned, true) {
            let unwritten = lock(&self.shared.tables).free_slots() < BATCH;
            let why = match unwritten {
                true => "the agents do not take pages fast enough",
                false => "nothing more can be evicted",
            };
            self.notice(format_args!("the workload exceeds its budget: {why}"));
        }
    }
}

/// The same, of agents that are up, and neither away nor about to end, or not.
fn why_full(up: impl Iterator<Item = bool>) -> String {
    let (full, away): (Vec<bool>, Vec<bool>) = up.partition(|&up| up);
    let more = "give them more with --export, or have another one join them (gms-agent --join)";
    match (full.len(), away.len()) {
        (_, 0) => format!("the agents are full: {more}"),
        (0, _) => {
            "no agent takes pages: all are away or about to end ('gms status --json' says why)"
                .into()
        }
        (full, away) => format!(
            "{full} agents are full and {away} away or about to end: start those again; or {more}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hiccup_is_no_spell() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut full = Fullness::default();
        full.update(start, true);
        full.update(at(10), true);
        assert_eq!(full.spell(at(10)), None);
        full.update(at(20), false);
        assert_eq!(full.total(at(20)), Duration::ZERO, "{full:?}");
        full.update(at(100), true);
        full.update(at(200), true);
        assert_eq!(full.spell(at(200)), Some(Duration::from_millis(100)));
        full.update(at(300), false);
        assert_eq!((full.spell(at(400)), full.total(at(400))), (None, Duration::from_millis(200)));
    }

    #[test]
    fn each_spell_is_told_with_its_end_but_not_more_than_one_in_some_minutes() {
        let start = Instant::now();
        let mut full = Fullness::default();
        let mut look = |seconds: u64, is_full: bool| {
            let now = start + Duration::from_secs(seconds);
            full.update(now, is_full);
            (is_full && full.tells(now), full.ends(now))
        };
        assert_eq!(look(0, true), (true, false));
        assert_eq!([look(1, true), look(2, false), look(3, true)], [(false, false); 3], "a pause");
        assert_eq!(
            [look(4, false), look(6, false), look(7, false)].map(|told| told.1),
            [false, true, false]
        );
        assert_eq!([look(10, true), look(12, false), look(14, false)], [(false, false); 3], "soon");
        assert_eq!(
            [look(298, true), look(300, true), look(301, true)].map(|told| told.0),
            [false, true, false]
        );
        assert_eq!([look(302, false), look(304, false)].map(|told| told.1), [false, true]);
    }

    #[test]
    fn agents_that_are_away_are_not_said_to_be_full() {
        let away = why_full([false, false].into_iter());
        assert!(away.contains("away") && !away.contains("full") && !away.contains("--export"));
        let full = why_full([true].into_iter());
        assert!(full.contains("full") && !full.contains("away"), "{full}");
        let both = why_full([true, false].into_iter());
        assert!(both.starts_with("1 agents are full and 1 away"), "{both}");
    }
}
