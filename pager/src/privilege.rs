//! The capabilities of gms: what it must be given so that it can page programs, in the words of whatever started it, and what
//! it gives up once it has started.

use std::ffi::CString;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;

use nix::errno::Errno;

/// Bit of CAP_SYS_PTRACE in a capability set.
const SYS_PTRACE: u32 = 19;
/// Files of processes that belong to other users (`/proc/PID/mem`, `pagemap`), and a file on a local disk.
const DAC_OVERRIDE: u32 = 1;
/// To kill such processes.
const KILL: u32 = 5;
/// Niceness of stopped threads, and of eviction.
const SYS_NICE: u32 = 23;
/// Highest number that a capability can have.
const CAPABILITY_MAX: u32 = u64::BITS - 1;

/// A process of gms, which keeps what it needs of the capabilities that gms was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Pages the workload.
    Pager,
    /// Starts another pager when one has died; kills who faults if no other goes on.
    Keeper,
    /// Holds pages in memory, where no other agent is given.
    Agent,
    /// Holds the copies on a local disk.
    Disk,
    /// Front and reaper: pass signals on, and kill the tree when the pager has died and no other goes on.
    Front,
}

impl Part {
    /// What it keeps, as a capability set.
    fn kept(self) -> u64 {
        let set = |capabilities: &[u32]| capabilities.iter().fold(0, |set, bit| set | 1 << bit);
        match self {
            // The keeper may have to start a pager.
            Part::Pager | Part::Keeper => set(&[DAC_OVERRIDE, KILL, SYS_PTRACE, SYS_NICE]),
            Part::Agent => 0,
            // For the file in the directory that it is given.
            Part::Disk => set(&[DAC_OVERRIDE]),
            Part::Front => set(&[KILL]),
        }
    }

    /// Gives all other capabilities up, for this thread and those that it will start: also from the bounding set, as far as
    /// CAP_SETPCAP allows that. Where it stays and the pager is root, the binary of a `gms upgrade` has what is in it: only who has all that the pager has
    /// may choose that, and others than root cannot write to its file.
    pub(crate) fn give_up_rest(self) -> nix::Result<()> {
        let kept = self.kept();
        for bit in (0..=CAPABILITY_MAX).filter(|bit| kept >> bit & 1 == 0) {
            // SAFETY: no pointer is passed. EINVAL: the kernel has no such capability.
            unsafe { libc::prctl(libc::PR_CAPBSET_DROP, libc::c_ulong::from(bit), 0, 0, 0) };
        }
        let (effective, permitted) = (capabilities("CapEff:"), capabilities("CapPrm:"));
        // What is ambient is inheritable, and goes with that. What the keeper starts needs it.
        let inheritable = if self == Part::Keeper { capabilities("CapInh:") & kept } else { 0 };
        set_capabilities(effective & kept, permitted & kept, inheritable)
    }
}

/// What gms can do without, and what it does less well then: the names of those which this process has not.
pub(crate) fn missing_comforts() -> Vec<&'static str> {
    let effective = capabilities("CapEff:");
    let comforts = [
        (DAC_OVERRIDE, "CAP_DAC_OVERRIDE (to page processes that change their user)"),
        (KILL, "CAP_KILL (to end those if their pages are lost)"),
        (SYS_NICE, "CAP_SYS_NICE (to attach and evict quickly on a busy machine)"),
    ];
    let missing = comforts.into_iter().filter(|(bit, _)| effective >> bit & 1 == 0);
    missing.map(|(_, name)| name).collect()
}

/// The names of capabilities, for people.
pub(crate) fn named(set: u64) -> String {
    let name = |bit: u32| match bit {
        SYS_PTRACE => "CAP_SYS_PTRACE".into(),
        DAC_OVERRIDE => "CAP_DAC_OVERRIDE".into(),
        KILL => "CAP_KILL".into(),
        SYS_NICE => "CAP_SYS_NICE".into(),
        bit => format!("capability {bit}"),
    };
    let bits = (0..=CAPABILITY_MAX).filter(|bit| set >> bit & 1 == 1);
    bits.map(name).collect::<Vec<String>>().join(", ")
}

/// What whoever executes this file gets by it in the first user namespace. Capabilities for another namespace (VFS_CAP_REVISION_3) are
/// none: its root gives them, who may be anybody here.
pub(crate) fn file_capabilities(file: &File) -> u64 {
    let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap_or_default();
    let mut value = [0u8; 24];
    // SAFETY: both names end with a zero, and the kernel writes no more than the array's length.
    let length = unsafe {
        let name = c"security.capability".as_ptr();
        libc::getxattr(path.as_ptr(), name, value.as_mut_ptr().cast(), value.len())
    };
    usize::try_from(length).map_or(0, |length| capabilities_of(&value[..length.min(value.len())]))
}

/// The same by the attribute, struct vfs_cap_data of linux/capability.h.
fn capabilities_of(value: &[u8]) -> u64 {
    const REVISION_MASK: u32 = 0xff00_0000;
    const REVISION_2: u32 = 0x0200_0000;
    let (words, rest) = value.as_chunks();
    let words: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
    match words[..] {
        [magic, low, _, high, _] if rest.is_empty() && magic & REVISION_MASK == REVISION_2 => {
            u64::from(high) << u32::BITS | u64::from(low)
        }
        _ => 0,
    }
}

/// Sets this thread's capabilities, by a system call alone: a forked child of a process with threads may call it.
pub(crate) fn set_capabilities(
    effective: u64,
    permitted: u64,
    inheritable: u64,
) -> nix::Result<()> {
    /// Header of capget(2) and capset(2): version 3, this thread.
    #[repr(C)]
    struct Header(u32, i32);
    /// Effective, permitted and inheritable.
    #[repr(C)]
    struct Sets(u32, u32, u32);
    let header = Header(0x2008_0522, 0);
    let half = |shift: u32| {
        let of = |set: u64| (set >> shift) as u32;
        Sets(of(effective), of(permitted), of(inheritable))
    };
    let sets = [half(0), half(u32::BITS)];
    // SAFETY: the kernel reads one header and two sets, which are live.
    Errno::result(unsafe { libc::syscall(libc::SYS_capset, &raw const header, sets.as_ptr()) })
        .map(drop)
}

/// For whom no filter may stand.
pub(crate) const NO_FILTER: &str = "start it without one (docker run --security-opt seccomp=unconfined --cap-add SYS_PTRACE; \
    Kubernetes: securityContext.seccompProfile.type: Unconfined; systemd: no SystemCallFilter=, nor LockPersonality=, RestrictNamespaces= and others that imply one)";
/// Where gms has the capability by its file only: the command has no right of its own to be paged.
pub(crate) const LET_COMMANDS: &str = "let your user open /dev/userfaultfd (as root: chgrp GROUP /dev/userfaultfd; chmod 660 /dev/userfaultfd; \
    to stay, a udev rule), or all users make userfaultfds (sysctl vm.unprivileged_userfaultfd=1)";
const IN_CONTAINER: &str = "start the container with docker run --cap-add SYS_PTRACE --security-opt seccomp=unconfined \
    (Kubernetes: securityContext.capabilities.add: [SYS_PTRACE] and seccompProfile.type: Unconfined), and gms in it as root";
const AS_USER: &str = "run gms as root or with CAP_SYS_PTRACE: by 'setpriv --reuid=USER --regid=GROUP --init-groups \
    --inh-caps=+sys_ptrace --ambient-caps=+sys_ptrace gms run ...' as root, or AmbientCapabilities=CAP_SYS_PTRACE in a \
    systemd unit (see gms-run(1), PRIVILEGES)";
const IN_USER_NAMESPACE: &str = "run gms outside of the user namespace (rootless container) that it is in: \
    the capability counts only in the first one";
const YAMA: &str = "ptrace is switched off (kernel.yama.ptrace_scope=3): set it to 1 or 2 in /etc/sysctl.d and boot";

/// What gives this process what it lacks.
pub(crate) fn cure() -> String {
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let text = match (has_sys_ptrace(), scope.trim()) {
        (_, "3") => YAMA,
        (true, _) if is_in_user_namespace() => IN_USER_NAMESPACE,
        (false, _) if is_in_container() => IN_CONTAINER,
        (false, _) => AS_USER,
        (true, _) => {
            "allow it in the security module (AppArmor, SELinux) and seccomp profile that gms runs under"
        }
    };
    text.into()
}

/// Whether this process has CAP_SYS_PTRACE.
pub(crate) fn has_sys_ptrace() -> bool {
    capabilities("CapEff:") >> SYS_PTRACE & 1 == 1
}

/// A capability set of this thread, by its name in /proc/PID/status.
pub(crate) fn capabilities(set: &str) -> u64 {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let bits = status.lines().find_map(|line| line.strip_prefix(set));
    bits.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0)
}

fn is_in_user_namespace() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_whitespace().ne(["0", "0", "4294967295"])
}

/// Whether this is a container of a usual kind, so that its words are the right ones.
fn is_in_container() -> bool {
    ["/.dockerenv", "/run/.containerenv"].iter().any(|file| Path::new(file).exists())
        || std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_keeps_what_its_part_needs_and_had() {
        for part in [Part::Pager, Part::Keeper, Part::Agent, Part::Disk, Part::Front] {
            let had = capabilities("CapPrm:");
            let (kept, bounding) = std::thread::spawn(move || {
                part.give_up_rest().unwrap();
                // Once more, without CAP_SETPCAP.
                part.give_up_rest().unwrap();
                let sets = ["CapEff:", "CapPrm:", "CapInh:", "CapAmb:"].map(capabilities);
                (sets, capabilities("CapBnd:"))
            })
            .join()
            .unwrap();
            assert_eq!(kept, [had & part.kept(), had & part.kept(), 0, 0], "{part:?}");
            assert!(had >> 8 & 1 == 0 || bounding & !part.kept() == 0, "{part:?}: {bounding:x}");
            assert_eq!(capabilities("CapPrm:"), had, "another thread");
        }
    }

    #[test]
    fn capabilities_of_a_file_count_in_the_first_user_namespace_only() {
        let value = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let of = |words: &[u32]| capabilities_of(&<Vec<u8>>::from_iter::<Vec<u8>>(value(words)));
        let needed = 1 << SYS_PTRACE;
        assert_eq!(of(&[0x0200_0001, needed, 0, 1, 0]), u64::from(needed) | 1 << 32);
        assert_eq!(of(&[0x0300_0001, needed, 0, 0, 0, 1000]), 0, "of another user namespace");
        assert_eq!((of(&[]), of(&[0x0200_0001, needed]), of(&[0x0100_0001, needed, 0])), (0, 0, 0));
        assert_eq!(named(1 << SYS_PTRACE | 1 << 40), "CAP_SYS_PTRACE, capability 40");
    }

    #[test]
    fn capabilities_are_read() {
        let status = fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("CapBnd:")).unwrap();
        let bits = u64::from_str_radix(line.split_whitespace().nth(1).unwrap(), 16).unwrap();
        assert_eq!(capabilities("CapBnd:"), bits);
        assert_eq!(capabilities("CapXyz:"), 0);
    }
}
