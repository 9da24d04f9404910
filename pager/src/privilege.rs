//! What a process must be given so that it can page programs, in the words of whatever started it.

use std::fs;
use std::path::Path;

/// Bit of CAP_SYS_PTRACE in a capability set.
const SYS_PTRACE: u32 = 19;
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

/// A capability set of this process, by its name in /proc/PID/status.
pub(crate) fn capabilities(set: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
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
    fn capabilities_are_read() {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("CapBnd:")).unwrap();
        let bits = u64::from_str_radix(line.split_whitespace().nth(1).unwrap(), 16).unwrap();
        assert_eq!(capabilities("CapBnd:"), bits);
        assert_eq!(capabilities("CapXyz:"), 0);
    }
}
