//! The threads of a pager come to rest all together, so that another binary can go on where they stand; if it cannot be executed, they do themselves.
//!
//! The main thread asks. The evict thread brings what is under way to its end and begins nothing new; then it has the fault threads rest, each at a moment
//! at which it has applied all that it has read, and tells what there is. Whoever rests stays so until the exec ends it, or until it is let go.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::handed::Descriptors;
use crate::sync::lock;

/// Nothing is asked.
const OFF: u8 = 0;
/// The evict thread is to bring everything to rest.
const ASKED: u8 = 1;
/// The fault threads are to rest.
const RESTING: u8 = 2;

/// What the evict thread tells when all rest.
pub(crate) struct Told {
    /// Since when the fault threads rest, on the clock that goes on whatever is executed.
    pub(crate) since: Duration,
    pub(crate) descriptors: Descriptors,
    pub(crate) record: Value,
    pub(crate) words: Vec<u64>,
}

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct Handover {
    stage: AtomicU8,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Fault threads that rest.
    resting: usize,
    /// What is not at rest yet.
    waits_for: &'static str,
    told: Option<Result<Told, String>>,
}

impl Handover {
    /// For the main thread: all are to come to rest.
    pub(crate) fn ask(&self) {
        let mut state = lock(&self.state);
        (state.told, state.waits_for) = (None, "it does not answer");
        self.stage.store(ASKED, Ordering::SeqCst);
    }

    /// Whether nothing new is to be begun.
    pub(crate) fn is_asked(&self) -> bool {
        self.stage.load(Ordering::Relaxed) != OFF
    }

    /// Whether fault threads are to rest.
    pub(crate) fn is_resting(&self) -> bool {
        self.stage.load(Ordering::Relaxed) == RESTING
    }

    /// For the main thread: what the evict thread has told, if it does within `limit`. `meanwhile` is called now and then.
    ///
    /// # Errors
    /// Why it has not; then all are let go.
    pub(crate) fn await_told(&self, limit: Duration, meanwhile: impl Fn()) -> Result<Told, String> {
        let deadline = Instant::now() + limit;
        let mut state = lock(&self.state);
        loop {
            if let Some(told) = state.told.take() {
                drop(state);
                return told.inspect_err(|_| self.let_go());
            }
            if Instant::now() > deadline {
                let reason = format!("{}: try again", state.waits_for);
                drop(state);
                self.let_go();
                return Err(reason);
            }
            state = self.wait(state, Duration::from_millis(1));
            meanwhile();
        }
    }

    /// For the main thread: everybody goes on.
    pub(crate) fn let_go(&self) {
        let _state = lock(&self.state);
        self.stage.store(OFF, Ordering::SeqCst);
        self.changed.notify_all();
    }

    // ---- the evict thread

    /// Something is not at rest.
    pub(crate) fn waits_for(&self, what: &'static str) {
        lock(&self.state).waits_for = what;
    }

    /// Has `count` fault threads rest, which `kick` wakes. False if one of them cannot within `limit`: then all go on.
    pub(crate) fn rest(&self, count: usize, limit: Duration, kick: impl FnOnce()) -> bool {
        let deadline = Instant::now() + limit;
        if self.stage.compare_exchange(ASKED, RESTING, Ordering::SeqCst, Ordering::SeqCst).is_err()
        {
            return false;
        }
        kick();
        let mut state = lock(&self.state);
        while state.resting < count && self.is_resting() && Instant::now() < deadline {
            state = self.wait(state, limit);
        }
        let all = state.resting == count && self.is_resting();
        drop(state);
        if !all {
            self.go_on();
        }
        all
    }

    /// What was at rest is not: the fault threads go on until it is tried again.
    pub(crate) fn go_on(&self) {
        let _ = self.stage.compare_exchange(RESTING, ASKED, Ordering::SeqCst, Ordering::SeqCst);
        let mut state = lock(&self.state);
        self.changed.notify_all();
        // Each has to have its turn before it rests again.
        while state.resting > 0 {
            state = self.wait(state, Duration::from_millis(1));
        }
    }

    /// Tells the main thread, and rests until it lets everybody go. What is told too late, when they have been let go, is of no use to anybody: fault
    /// threads have run since, whatever is asked by now.
    pub(crate) fn tell(&self, told: Result<Told, String>) {
        let mut state = lock(&self.state);
        if self.is_resting() {
            state.told = Some(told);
        }
        self.changed.notify_all();
        while self.is_resting() {
            state = self.wait(state, Duration::from_secs(1));
        }
    }

    // ---- fault threads

    /// Rests.
    pub(crate) fn park(&self) {
        let mut state = lock(&self.state);
        state.resting += 1;
        self.changed.notify_all();
        while self.is_resting() {
            state = self.wait(state, Duration::from_secs(1));
        }
        state.resting -= 1;
        self.changed.notify_all();
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, limit: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn nothing() -> Told {
        Told {
            since: Duration::ZERO,
            descriptors: Descriptors::default(),
            record: Value::Null,
            words: Vec::new(),
        }
    }

    #[test]
    fn all_rest_until_they_are_let_go() {
        let handover = Handover::default();
        std::thread::scope(|scope| {
            let fault = || {
                while !handover.is_resting() {
                    std::thread::yield_now();
                }
                handover.park();
            };
            handover.ask();
            let faults = [scope.spawn(fault), scope.spawn(fault)];
            let evict = scope.spawn(|| {
                assert!(handover.rest(2, LONG, || ()));
                handover.tell(Ok(nothing()));
            });
            assert!(handover.await_told(LONG, || ()).is_ok());
            assert!(!evict.is_finished() && faults.iter().all(|fault| !fault.is_finished()));
            handover.let_go();
            evict.join().expect("let go");
        });
        assert!(!handover.is_asked() && !handover.rest(0, LONG, || ()), "nobody has asked");
    }

    #[test]
    fn what_is_told_too_late_answers_no_later_question() {
        let handover = Handover::default();
        handover.ask();
        assert!(handover.rest(0, LONG, || ()));
        assert!(handover.await_told(Duration::ZERO, || ()).is_err(), "nobody has told");
        handover.ask();
        std::thread::scope(|scope| {
            let evict = scope.spawn(|| handover.tell(Ok(nothing())));
            let answer = handover.await_told(Duration::from_millis(50), || ());
            handover.let_go();
            assert!(answer.is_err(), "nobody rests");
            evict.join().expect("not kept");
        });
        handover.ask();
        handover.tell(Ok(nothing()));
        assert!(handover.is_asked(), "it is free for the next attempt");
    }

    #[test]
    fn who_cannot_rest_is_told_and_the_others_go_on() {
        let handover = Handover::default();
        handover.ask();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !handover.is_resting() {
                    std::thread::yield_now();
                }
                handover.park();
            });
            let one_rests = || {
                while lock(&handover.state).resting == 0 {
                    std::thread::yield_now();
                }
            };
            assert!(!handover.rest(2, Duration::from_millis(1), one_rests));
        });
        handover.waits_for("a process is being born");
        let reason = handover.await_told(Duration::ZERO, || ()).err().expect("nobody tells");
        assert_eq!(reason, "a process is being born: try again");
        assert!(!handover.is_asked());
    }
}
