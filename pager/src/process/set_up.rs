//! Setting an evictor up: its descriptors, its outbox, its userfaultfd and its will.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;

use nix::errno::Errno;

use super::OUTBOX_LEN;
use super::confine::confine;
use crate::evictor::{Call, Evictor, Injected};
use crate::inject::random_address;
use crate::keeper;
use crate::kernel::Faults;
use crate::kernel::pidfd::pidfd_getfd;
use crate::kernel::proc;
use crate::kernel::uffd::{USERFAULTFD_IOC_NEW, Userfaultfd, is_userfaultfd};
use crate::shared::Shared;
use crate::space::Space;
use crate::stopped::InjectError;

/// What an attach fails with that fails in this.
pub(super) fn failed(what: &'static str) -> impl Fn(Errno) -> InjectError {
    move |errno| InjectError::Os { what, errno }
}

/// The evictor's descriptors and memory while it is being set up.
pub(super) struct SetUp {
    pub(super) outbox: u64,
    pidfd_number: u64,
    /// Whether descriptor 2 is /dev/userfaultfd.
    device: bool,
}

impl SetUp {
    /// Gives the evictor its outlet (descriptor 1), /dev/userfaultfd if we may open it (2), an outbox and a descriptor of its process.
    pub(super) fn new(
        evictor: &mut Evictor,
        pid: i32,
        mapped: &mut Vec<(u64, u64)>,
    ) -> nix::Result<SetUp> {
        let device = File::options().read(true).write(true).open("/dev/userfaultfd").ok();
        let outlet = keeper::outlet().ok_or(Errno::EBADF)?;
        let mut fds: Vec<RawFd> = vec![outlet.as_raw_fd()];
        fds.extend(device.as_ref().map(AsRawFd::as_raw_fd));
        let own_id = proc::own_id(pid).ok_or(Errno::ESRCH)?;
        let outbox = random_address();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let mmap = [outbox, OUTBOX_LEN, access as u64, flags as u64, u64::MAX, 0];
        let mut calls = [
            Call::new(libc::SYS_mmap, &mmap),
            Call::new(libc::SYS_madvise, &[outbox, OUTBOX_LEN, libc::MADV_NOHUGEPAGE as u64]),
            Call::new(libc::SYS_madvise, &[outbox, OUTBOX_LEN, libc::MADV_DONTFORK as u64]),
            // Process ids are those of the workload's PID namespace.
            Call::new(libc::SYS_pidfd_open, &[own_id as u64, 0]),
            // Under MCL_FUTURE it would be locked, and take no pages of other mappings.
            Call::new(libc::SYS_munlock, &[outbox, OUTBOX_LEN]),
        ];
        evictor.run(&mut calls, &mut [], &fds)?;
        calls[0].outcome()?;
        mapped.push((outbox, OUTBOX_LEN));
        calls[2].outcome()?;
        Ok(SetUp { outbox, pidfd_number: calls[3].outcome()?, device: device.is_some() })
    }

    /// The device is not left within the workload's reach.
    fn close_device(&self) -> Vec<Call> {
        let close = Call::new(libc::SYS_close, &[2]);
        if self.device { vec![close] } else { Vec::new() }
    }

    /// The outbox lies at a random address, so that only the right child's userfaultfd can register it.
    pub(super) fn adopt_orphan(
        &self,
        evictor: &mut Evictor,
        orphans: &mut Vec<Arc<Space>>,
    ) -> Option<Result<(Arc<Space>, u64), InjectError>> {
        let outbox = self.outbox..self.outbox + OUTBOX_LEN;
        let at = orphans.iter().position(|space| space.faults.register_outbox(outbox.clone()))?;
        let fd = orphans[at].faults.as_fd().as_raw_fd();
        let number = self.pidfd_number + 1;
        let sent = evictor.run(&mut self.close_device(), &mut [], &[fd]);
        let sent = sent.map_err(failed("handing the child's userfaultfd over"));
        let confined = sent.and_then(|()| self.confine(evictor, number));
        Some(confined.map(|()| (orphans.swap_remove(at), number)))
    }

    fn confine(&self, evictor: &mut Evictor, uffd: u64) -> Result<(), InjectError> {
        confine(evictor, uffd, self.pidfd_number).map_err(failed("confining the evictor"))
    }

    pub(super) fn new_space(
        &self,
        shared: &Shared,
        evictor: &mut Evictor,
    ) -> Result<(Arc<Space>, u64), InjectError> {
        let made = self.new_userfaultfd(shared, evictor);
        let (faults, number) = made.map_err(failed("making a userfaultfd"))?;
        // From here on the journal names it, and whoever goes on for this pager knows of it.
        let space = Arc::new(Space::new(shared.new_space(), Box::new(faults)));
        self.confine(evictor, number)?;
        Ok((space, number))
    }

    fn new_userfaultfd(
        &self,
        shared: &Shared,
        evictor: &mut Evictor,
    ) -> nix::Result<(Userfaultfd, u64)> {
        const FLAGS: u64 = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
        let make = match self.device {
            true => Call::new(libc::SYS_ioctl, &[2, USERFAULTFD_IOC_NEW, FLAGS]),
            false => Call::new(libc::SYS_userfaultfd, &[FLAGS]),
        };
        let mut calls = vec![make];
        calls.extend(self.close_device());
        evictor.run(&mut calls, &mut [], &[])?;
        let number = calls[0].outcome()?;
        let uffd = pidfd_getfd(evictor.process(), number as RawFd)?;
        // The number comes from the workload's memory: it may name anything there.
        if !is_userfaultfd(uffd.as_raw_fd()) {
            return Err(Errno::EBADF);
        }
        let faults = Userfaultfd::enable(uffd)?.kept(&shared.journal);
        let outbox = self.outbox..self.outbox + OUTBOX_LEN;
        if !faults.register_outbox(outbox) {
            return Err(Errno::EINVAL);
        }
        Ok((faults, number))
    }

    /// If we die and no other pager goes on the evictor says so and kills the workload, before it could read zeros where pages were.
    pub(super) fn make_will(
        &self,
        evictor: &Evictor,
        injected: &Injected,
        pid: i32,
    ) -> nix::Result<()> {
        let text = format!(
            "the pager has died: process {pid} is killed, because its evicted pages are lost\n"
        );
        let write = [1, evictor.will_aux_address(2), text.len() as u64];
        let calls = [
            Call::new(
                libc::SYS_pidfd_send_signal,
                &[self.pidfd_number, libc::SIGKILL as u64, 0, 0],
            ),
            Call::new(libc::SYS_write, &write),
        ];
        evictor.set_will(&injected.memory, &calls, text.as_bytes())
    }
}
