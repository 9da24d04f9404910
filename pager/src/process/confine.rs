//! What an evictor may do once it is set up: a seccomp filter. It has the rights which its process had then, and runs in memory that the process can write to, which may
//! give rights up later.

use std::collections::BTreeMap;

use nix::errno::Errno;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule,
};

use super::{MADV_POPULATE_WRITE, UFFDIO_MOVE, UFFDIO_REGISTER, UFFDIO_UNREGISTER};
use crate::evictor::{Call, Evictor};

/// Of `struct sock_fprog`: the number of its instructions, and where they are.
const PROGRAM_LEN: usize = 16;

/// Lets the evictor make the calls alone that it is needed for: with the userfaultfd and the process that it has under these numbers, with the pager at its socket (0) and
/// the keeper behind its outlet (1), and to its own memory. All others fail with EPERM; one of 32 bits ends it. Whoever sends it another call one day has to add it here.
pub(super) fn confine(evictor: &mut Evictor, uffd: u64, process: u64) -> nix::Result<()> {
    let program = program(uffd, process).map_err(|_| Errno::EINVAL)?;
    let at = evictor.aux_address(2);
    let mut aux = (program.len() as u64).to_le_bytes().to_vec();
    aux.extend_from_slice(&(at + PROGRAM_LEN as u64).to_le_bytes());
    for instruction in &program {
        aux.extend_from_slice(&instruction.code.to_le_bytes());
        aux.extend_from_slice(&[instruction.jt, instruction.jf]);
        aux.extend_from_slice(&instruction.k.to_le_bytes());
    }
    let filter = [libc::SECCOMP_SET_MODE_FILTER.into(), 0, at];
    let mut calls = [
        // Without it only a process with CAP_SYS_ADMIN may have a filter.
        Call::new(libc::SYS_prctl, &[libc::PR_SET_NO_NEW_PRIVS as u64, 1, 0, 0, 0]),
        Call::new(libc::SYS_seccomp, &filter),
    ];
    evictor.run(&mut calls, &mut aux, &[])?;
    calls.iter().try_for_each(|call| call.outcome().map(drop))
}

fn program(uffd: u64, process: u64) -> Result<BpfProgram, BackendError> {
    // Descriptors, signals, commands, advice and flags are 32 bits wide.
    let is = |(argument, value): (u8, u64)| {
        let (width, same) = (SeccompCmpArgLen::Dword, SeccompCmpOp::Eq);
        SeccompCondition::new(argument, width, same, value)
    };
    let rule = |conditions: Vec<(u8, u64)>| {
        SeccompRule::new(conditions.into_iter().map(is).collect::<Result<_, _>>()?)
    };
    // The first arguments.
    let with = |arguments: &[u64]| rule((0..).zip(arguments.iter().copied()).collect());
    let anyhow = Vec::new;
    let commands = [UFFDIO_MOVE, UFFDIO_REGISTER, UFFDIO_UNREGISTER];
    let commands = commands.map(|command| with(&[uffd, command])).into_iter();
    // Others of it poison memory of the machine, for who has CAP_SYS_ADMIN.
    let advice = [MADV_POPULATE_WRITE, libc::MADV_DONTNEED_LOCKED as u64];
    let advice = advice.map(|advice| rule(vec![(2, advice)])).into_iter();
    let rules = BTreeMap::from([
        (libc::SYS_recvmsg, vec![with(&[0])?]),
        (libc::SYS_sendto, vec![with(&[0])?]),
        (libc::SYS_ioctl, commands.collect::<Result<_, _>>()?),
        (libc::SYS_madvise, advice.collect::<Result<_, _>>()?),
        (libc::SYS_munlock, anyhow()),
        (libc::SYS_munmap, anyhow()),
        (libc::SYS_unshare, vec![with(&[libc::CLONE_VM as u64])?]),
        // Without flags: one sends a signal to the group.
        (libc::SYS_pidfd_send_signal, vec![with(&[process, libc::SIGKILL as u64, 0, 0])?]),
        (libc::SYS_write, vec![with(&[1])?]),
        (libc::SYS_getpid, anyhow()),
        (libc::SYS_restart_syscall, anyhow()),
        (libc::SYS_exit_group, anyhow()),
    ]);
    let refused = SeccompAction::Errno(libc::EPERM as u32);
    let arch = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(rules, refused, SeccompAction::Allow, arch)?.try_into()
}
