//! Spaces of which a fork could not be read: the kernel had no descriptor left for the userfaultfd of the child. It keeps the message, and the
//! thread that forked sleeps, until processes that end have given descriptors back.

use std::time::{Duration, Instant};

use gms_policy::ids::SpaceId;
use gms_transport::Transport;

use super::{AGAIN, FaultCore, Listen};
use crate::kernel::Event;
use crate::space::Space;

/// For a descriptor to be given back.
const UNREAD_MAX: Duration = Duration::from_secs(5);

/// Since when something of a space cannot be read, and when that is tried again.
pub(super) struct Unread {
    pub(super) since: Instant,
    next: Instant,
}

impl<T: Transport> FaultCore<T> {
    /// For want of a descriptor, nothing of the space was read. It is not asked for what is readable meanwhile: that would not let the thread rest.
    pub(super) fn leave_unread(&mut self, now: Instant, space: &Space) {
        // Time in which this process was stopped does not count.
        self.excuse(now);
        let first = !self.unread.contains_key(&space.id);
        let unread = self.unread.entry(space.id).or_insert(Unread { since: now, next: now });
        unread.next = now + AGAIN;
        if now.duration_since(unread.since) > UNREAD_MAX {
            self.shared.fail(format!(
                "{} forks, and no descriptor is left for that: raise the limit (ulimit -Hn)",
                space.name()
            ));
        }
        if first && let Some(state) = self.spaces.get(&space.id) {
            self.listen.push(Listen::Pause(state.space.clone()));
        }
    }

    /// Something of the space was read, perhaps the fork.
    pub(super) fn end_unread(&mut self, now: Instant, space: &Space, events: &[Event]) {
        let Some(unread) = self.unread.get_mut(&space.id) else { return };
        if events.iter().any(|event| matches!(event, Event::Fork(_))) {
            unread.since = now;
        }
        if !space.faults.has_event() {
            self.unread.remove(&space.id);
            let state = self.spaces.get(&space.id);
            self.listen.extend(state.map(|state| Listen::Resume(state.space.clone())));
        }
    }

    /// Those that are to be tried again.
    pub(super) fn unread_again(&mut self, clock: &impl Fn() -> Instant) {
        if self.unread.is_empty() {
            return;
        }
        let now = clock();
        let due = self.unread.iter().filter(|(_, unread)| now >= unread.next);
        let due: Vec<SpaceId> = due.map(|(&id, _)| id).collect();
        due.into_iter().for_each(|id| self.handle_readable(clock, id));
    }

    /// The space has ended.
    pub(super) fn forget_unread(&mut self, id: SpaceId) {
        self.unread.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::tests::{ID, Play};

    #[test]
    fn forks_that_wait_for_a_descriptor_are_not_blamed_for_a_stop_of_the_pager() {
        let (mut play, mut now) = (Play::with(None, 1, 1), Instant::now());
        let space = play.fault.spaces[&ID].space.clone();
        play.fault.leave_unread(now, &space);
        now += UNREAD_MAX * 10;
        play.fault.leave_unread(now, &space);
        assert!(!play.shared.has_failed(), "it was stopped for that time");
        let until = now + UNREAD_MAX * 2;
        while now < until {
            now += AGAIN;
            play.fault.leave_unread(now, &space);
        }
        assert!(play.shared.has_failed());
    }
}
