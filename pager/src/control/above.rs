//! Whether a process is inside of a workload.

use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::kernel::proc;
use crate::kernel::proc::ancestors;

/// The pager of the workload to which a process of any user's belongs, without asking anybody: one of the process's ancestors is the
/// pager, the reaper beside it, or a process that the pager was told to attach to.
pub fn pager_above(pid: i32) -> Option<i32> {
    pagers_above(pid).into_iter().next()
}

fn pagers_above(pid: i32) -> Vec<i32> {
    let sockets = bound_sockets();
    let bound: Vec<(i32, i32)> = bound(&sockets).collect();
    let above = if bound.is_empty() { Vec::new() } else { ancestors(pid) };
    let pages_us = |&(pager, root): &(i32, i32)| {
        above.contains(&pager)
            || is_launched_beside(pager, &above)
            || above.contains(&root) && has_attached(pager, root)
    };
    let pagers = bound.into_iter().filter(pages_us).map(|(pager, _)| pager);
    pagers.filter(|&pager| is_gms(pager)).collect()
}

/// A socket's name alone proves nothing.
fn is_gms(pid: i32) -> bool {
    proc::thread_name(pid).is_some_and(|name| name.starts_with("gms"))
}

/// Whether one of these, a process and those above it, is the reaper beside the pager, which has the same front. What the front had before is not below that.
pub(super) fn is_launched_beside(pager: i32, above: &[i32]) -> bool {
    let front = proc::status_field(pager, "PPid:").map(|front| front as i32);
    let Some(front) = front.filter(|&front| is_gms(front)) else { return false };
    let mut parents = above.iter().skip(1).zip(above.iter().skip(2));
    parents.any(|(&reaper, &parent)| parent == front && is_gms(reaper))
}

/// The text of /proc/net/unix. Any user can bind a socket with a name like ours, or one that is no text.
fn bound_sockets() -> String {
    String::from_utf8_lossy(&fs::read("/proc/net/unix").unwrap_or_default()).into_owned()
}

/// Whether the process can have attached to `root`, and says in its command line that it does: a socket's name alone proves nothing.
fn has_attached(pager: i32, root: i32) -> bool {
    let user = |pid| proc::status_field(pid, "Uid:");
    let line = proc::command_line(pager);
    let mut words = line.split(' ');
    (user(pager) == Some(0) || user(pager) == user(root))
        && words.any(|word| word == "attach")
        && words.any(|word| word.parse() == Ok(root))
}

/// The name that the control socket of a pager has first. Its PID namespace belongs to that: another one with the same network (a pod) has processes of the same
/// numbers.
pub(super) fn first_name(pager: i32, root: i32) -> String {
    format!(".{pager}.{root}.{}", pid_namespace())
}

fn pid_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino())
}

/// Pager and root process of every workload of this PID namespace, by the text of /proc/net/unix: a control socket keeps the name there that it had first.
fn bound(sockets: &str) -> impl Iterator<Item = (i32, i32)> {
    let own = pid_namespace();
    sockets.lines().filter_map(move |line| {
        let (dir, file) = line.split_whitespace().nth(7)?.rsplit_once('/')?;
        let dir = dir.rsplit('/').next()?;
        let (pager, rest) = file.strip_prefix('.')?.split_once('.')?;
        // Without a namespace: of gms before it told that.
        let (root, namespace) =
            rest.split_once('.').map_or((rest, Ok(own)), |(root, of)| (root, of.parse()));
        let ours = (dir == "gms" || dir.starts_with("gms-")) && namespace == Ok(own);
        Some((pager.parse().ok()?, root.parse().ok()?)).filter(|_| ours)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Server;
    use crate::control::tests::scratch;
    use crate::kernel::proc::self_pid;
    use nix::unistd::geteuid;
    use std::ffi::OsStr;
    use std::io::ErrorKind;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    #[test]
    fn sockets_of_pagers_are_known_by_their_first_name() {
        let dir = scratch("gms").join("gms");
        let server = Server::open_in(&dir, nix::unistd::getppid().as_raw()).unwrap();
        let sockets = bound_sockets();
        let parent = nix::unistd::getppid().as_raw();
        assert!(bound(&sockets).any(|found| found == (self_pid(), parent)), "{sockets}");
        // Other tests of this process have sockets at the same time, and there may be pagers of their own.
        let is_above = |pid| pagers_above(pid).contains(&self_pid());
        assert!(is_above(self_pid()), "the pager is above");
        assert!(!is_above(parent), "this process has not attached to its parent");
        assert!(!is_above(1));
        drop(server);
        // A child that another test forks holds it until it executes something.
        let since = Instant::now();
        while bound(&bound_sockets()).any(|found| found == (self_pid(), parent)) {
            assert!(since.elapsed() < Duration::from_secs(10), "{}", bound_sockets());
            std::thread::yield_now();
        }
        let line = "0: 00000002 0 00010000 0001 01 99 ";
        let of = |path: &str| bound(&format!("Num\n{line}{path}\n")).next();
        assert_eq!(of("/tmp/gms-7/.12.13"), Some((12, 13)));
        let here = format!("/tmp/gms-7/{}", first_name(12, 13));
        assert_eq!(of(&here), Some((12, 13)));
        let there = format!("{here}0");
        let others = ["/tmp/x/.12.13", "/tmp/gms-7/.12", "/tmp/gms/12.sock", ".12.13", "", &there];
        for other in others {
            assert_eq!(of(other), None, "{other}");
        }
        fs::remove_dir_all(dir.parent().unwrap()).unwrap();
    }

    /// Whether a process of `user` called gms, with a control socket that says that it pages `root` and a socket of no name in text beside, is taken
    /// for a pager above this process.
    fn is_believed(user: u32, command: &str, root: i32) -> bool {
        let dir = scratch(&format!("gms-{user}-{command}-{root}")).join("gms-x");
        fs::create_dir(&dir).unwrap();
        let program = dir.with_file_name("gms");
        fs::copy("/bin/sh", &program).unwrap();
        fs::set_permissions(dir.parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
        let mut start = Command::new(&program);
        start.args(["-c", "read line", command, &root.to_string()]);
        start.stdin(Stdio::piped()).uid(user);
        let since = Instant::now();
        let mut pager = loop {
            match start.spawn() {
                // A child that another test forked meanwhile has it open for writing until it executes something.
                Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => {
                    assert!(since.elapsed() < Duration::from_secs(10), "{error}");
                }
                started => break started.unwrap(),
            }
        };
        let pid = pager.id() as i32;
        let text = UnixListener::bind(dir.join(format!(".{pid}.{root}"))).unwrap();
        let none = UnixListener::bind(dir.join(OsStr::from_bytes(b"\xff"))).unwrap();
        let found = pagers_above(self_pid());
        drop((text, none));
        pager.kill().unwrap();
        pager.wait().unwrap();
        fs::remove_dir_all(dir.parent().unwrap()).unwrap();
        found.contains(&pid)
    }

    #[test]
    fn strangers_page_nobody_by_the_name_of_a_socket() {
        if !geteuid().is_root() {
            return eprintln!("SKIPPED: only root can start processes of another user");
        }
        let parent = nix::unistd::getppid().as_raw();
        let is_own = is_believed(0, "attach", parent);
        assert!(is_own, "a socket whose name is no text hides no other");
        for (user, command, root) in
            [(65534, "attach", 1), (65534, "attach", parent), (0, "run", parent)]
        {
            assert!(!is_believed(user, command, root), "{user} {command} {root}");
        }
    }
}
