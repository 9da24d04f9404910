//! A userfaultfd with something that happens at calls: what another thread may do between two of them, in a test.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use nix::errno::Errno;

use super::uffd::Userfaultfd;
use super::{Faults, Installed, Messages, Probe, ReadError, Registration};

type Hook = Box<dyn Fn() + Send + Sync>;

pub(crate) struct Hooked {
    pub faults: Userfaultfd,
    pub before_probe: Option<Hook>,
    pub after_has_event: Option<Hook>,
}

impl Hooked {
    pub(crate) fn new(faults: Userfaultfd) -> Hooked {
        Hooked { faults, before_probe: None, after_has_event: None }
    }
}

impl AsFd for Hooked {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.faults.as_fd()
    }
}

impl Faults for Hooked {
    fn read(&self, several: bool, into: &mut Messages) -> Result<(), ReadError> {
        self.faults.read(several, into)
    }

    fn has_event(&self) -> bool {
        let has_event = self.faults.has_event();
        self.after_has_event.iter().for_each(|hook| hook());
        has_event
    }

    fn is_alive(&self) -> bool {
        self.faults.is_alive()
    }

    fn register(&self, range: Range<u64>) -> bool {
        self.faults.register(range)
    }

    fn register_outbox(&self, range: Range<u64>) -> bool {
        self.faults.register_outbox(range)
    }

    fn unregister(&self, range: Range<u64>) -> bool {
        self.faults.unregister(range)
    }

    fn registration(&self, range: Range<u64>) -> Registration {
        self.faults.registration(range)
    }

    fn mark(&self, range: Range<u64>, marked: bool) -> Result<(), Errno> {
        self.faults.mark(range, marked)
    }

    fn probe(&self, page: u64) -> Probe {
        self.before_probe.iter().for_each(|hook| hook());
        self.faults.probe(page)
    }

    fn wake(&self, range: Range<u64>) {
        self.faults.wake(range);
    }

    fn copy_run(&self, range: Range<u64>, bytes: &[u8], wake: bool) -> (u64, Installed) {
        self.faults.copy_run(range, bytes, wake)
    }

    fn zero(&self, range: Range<u64>) -> (u64, Installed) {
        self.faults.zero(range)
    }

    fn poison(&self, page: u64) -> Installed {
        self.faults.poison(page)
    }
}
