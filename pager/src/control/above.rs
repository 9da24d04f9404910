//! Whether a process is inside of a workload.

use std::fs;

use crate::proc;
use crate::target::ancestors;

/// The pager of the workload to which a process of any user's belongs, without asking anybody: one of the process's ancestors is the
/// pager, or the root of a workload.
pub fn pager_above(pid: i32) -> Option<i32> {
    let sockets = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let bound: Vec<(i32, i32)> = bound(&sockets).collect();
    // Ids of another PID namespace that shares this network (a pod) may look like ours.
    let is_gms = |pager: i32| proc::thread_name(pager).is_some_and(|name| name.starts_with("gms"));
    let above = if bound.is_empty() { Vec::new() } else { ancestors(pid) };
    let around = |(pager, root): &(i32, i32)| above.contains(pager) || above.contains(root);
    bound.into_iter().filter(around).map(|(pager, _)| pager).find(|&pager| is_gms(pager))
}

/// Pager and root process of every workload, by the text of /proc/net/unix: a control socket keeps the name there that it had first.
fn bound(sockets: &str) -> impl Iterator<Item = (i32, i32)> {
    sockets.lines().filter_map(|line| {
        let (dir, file) = line.split_whitespace().nth(7)?.rsplit_once('/')?;
        let dir = dir.rsplit('/').next()?;
        let (pager, root) = file.strip_prefix('.')?.split_once('.')?;
        let ours = dir == "gms" || dir.starts_with("gms-");
        Some((pager.parse().ok()?, root.parse().ok()?)).filter(|_| ours)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Server;
    use crate::control::tests::scratch;
    use crate::target::self_pid;

    #[test]
    fn sockets_of_pagers_are_known_by_their_first_name() {
        let dir = scratch("gms").join("gms");
        let server = Server::open_in(&dir, nix::unistd::getppid().as_raw()).unwrap();
        let sockets = fs::read_to_string("/proc/net/unix").unwrap();
        let parent = nix::unistd::getppid().as_raw();
        assert!(bound(&sockets).any(|found| found == (self_pid(), parent)), "{sockets}");
        assert_eq!(pager_above(self_pid()), Some(self_pid()), "the pager is above");
        assert_eq!(pager_above(parent), Some(self_pid()), "the root is above");
        assert_ne!(pager_above(1), Some(self_pid()));
        drop(server);
        // Other tests of this process have sockets at the same time, of other roots.
        let sockets = fs::read_to_string("/proc/net/unix").unwrap();
        assert!(!bound(&sockets).any(|found| found == (self_pid(), parent)), "{sockets}");
        let line = "0: 00000002 0 00010000 0001 01 99 ";
        let of = |path: &str| bound(&format!("Num\n{line}{path}\n")).next();
        assert_eq!(of("/tmp/gms-7/.12.13"), Some((12, 13)));
        for other in ["/tmp/x/.12.13", "/tmp/gms-7/.12", "/tmp/gms/12.sock", ".12.13", ""] {
            assert_eq!(of(other), None, "{other}");
        }
        fs::remove_dir_all(dir.parent().unwrap()).unwrap();
    }
}
