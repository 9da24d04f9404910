//! Spaces of which a fork could not be read: the kernel had no descriptor left for the userfaultfd of the child. It keeps the message, and the
//! thread that forked sleeps, until processes that end have given descriptors back.

use std::time::{Duration, Instant};

use gms_policy::ids::SpaceId;
use gms_transport::Transport;
use nix::sys::epoll::{EpollEvent, EpollFlags};
use userfaultfd::Event;

use super::{AGAIN, FaultThread, SPACES};
use crate::shared::Space;

/// For a descriptor to be given back.
const UNREAD_MAX: Duration = Duration::from_secs(5);

/// Since when something of a space cannot be read, and when that is tried again.
pub(super) struct Unread {
    pub(super) since: Instant,
    next: Instant,
}

impl<T: Transport> FaultThread<T> {
    /// For want of a descriptor, nothing of the space was read. It is not asked for what is readable meanwhile: that would not let the thread rest.
    pub(super) fn leave_unread(&mut self, space: &Space) {
        let now = Instant::now();
        let first = !self.unread.contains_key(&space.id);
        let unread = self.unread.entry(space.id).or_insert(Unread { since: now, next: now });
        unread.next = now + AGAIN;
        if now.duration_since(unread.since) > UNREAD_MAX {
            self.shared.fail(format!(
                "{} forks, and no descriptor is left for that: raise the limit (ulimit -Hn)",
                space.name()
            ));
        }
        if first {
            self.listen(space, EpollFlags::empty());
        }
    }

    /// Something of the space was read, perhaps the fork.
    pub(super) fn end_unread(&mut self, space: &Space, messages: &[Event]) {
        let Some(unread) = self.unread.get_mut(&space.id) else { return };
        if messages.iter().any(|message| matches!(message, Event::Fork { .. })) {
            unread.since = Instant::now();
        }
        if !space.faults.has_event() {
            self.unread.remove(&space.id);
            self.listen(space, EpollFlags::EPOLLIN);
        }
    }

    fn listen(&self, space: &Space, to: EpollFlags) {
        // Fails only if it has been let go.
        let _ = self.epoll.modify(&space.faults, &mut EpollEvent::new(to, SPACES + space.id.0));
    }

    /// Those that are to be tried again.
    pub(super) fn unread_again(&mut self, now: Instant) {
        let due = self.unread.iter().filter(|(_, unread)| now >= unread.next);
        self.readable.extend(due.map(|(&id, _)| id));
    }

    /// The space has ended.
    pub(super) fn forget_unread(&mut self, id: SpaceId) {
        self.unread.remove(&id);
    }
}
