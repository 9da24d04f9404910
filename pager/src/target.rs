//! Which processes can be attached to, and that the one which is stopped later is still the one that was looked at.

use std::fs;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::unistd::{Pid, getegid, geteuid};

use crate::control;
use crate::inject::is_named_evictor;
use crate::kernel::pidfd::{has_ended, pidfd_open, same_memory};
use crate::kernel::proc::{self, descends, self_pid};
use crate::privilege::capabilities;
use crate::stopped::InjectError;

/// Flag of kernel threads in field 9 of `/proc/PID/stat` (PF_KTHREAD).
const KERNEL_THREAD: u64 = 0x0020_0000;
/// Byte 4 of an ELF file: 64-bit.
const ELF_CLASS_64: u8 = 2;

/// A process that may be attached to. It is held, so that its number is no other process's as long as it has not ended.
#[derive(Debug)]
pub struct Target {
    pid: i32,
    process: OwnedFd,
    rights: Rights,
}

impl Target {
    /// Checks that a process can be attached to; the error says what it is and what to do.
    pub(crate) fn check(pid: i32) -> Result<Target, String> {
        // What is no process is told by its number.
        let held = pidfd_open(pid);
        check(pid)?;
        let process = held.map_err(|errno| format!("cannot be held ({errno}): try again"))?;
        let rights = Rights::of(pid).ok_or(ENDED)?;
        // What was looked up by the number was true of this process.
        if has_ended(process.as_fd()) {
            return Err(ENDED.into());
        }
        Ok(Target { pid, process, rights })
    }

    /// Checks that the process has the rights that it had, and that thread `tid` of it, which has been stopped, has the same: each thread has its own, and one
    /// with others is left alone (`Unstoppable`). Whoever executes another program from now on ends the thread, and what is injected into that fails.
    pub(crate) fn check_again(&self, tid: i32) -> Result<(), InjectError> {
        let has_these = |id| Rights::of(id).as_ref() == Some(&self.rights);
        match (has_these(self.pid), has_these(tid)) {
            (true, true) => Ok(()),
            (true, false) => Err(InjectError::Unstoppable),
            (false, _) => Err(InjectError::Changed(
                "it has other rights now than when gms was told to attach (its user has changed, or it has executed a setuid program): \
                 attach again if it is still the right one"
                    .into(),
            )),
        }
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// The process.
    pub(crate) fn process(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }

    /// One that has ended, under an id that no process has.
    #[cfg(test)]
    pub(crate) fn nobody() -> Target {
        let ended = nix::sys::eventfd::EventFd::from_value(1).expect("a descriptor");
        let rights = Rights::of(self_pid()).expect("our own");
        Target { pid: i32::MAX, process: ended.into(), rights }
    }
}

/// By what the kernel decides what a process or thread may do: the lines of /proc/PID/status.
#[derive(Debug, PartialEq, Eq)]
struct Rights(Vec<String>);

impl Rights {
    const LINES: [&'static str; 4] = ["Uid:", "Gid:", "Groups:", "CapPrm:"];

    fn of(id: i32) -> Option<Rights> {
        let status = fs::read_to_string(format!("/proc/{id}/status")).ok()?;
        let is_one = |line: &&str| Rights::LINES.iter().any(|name| line.starts_with(name));
        let lines: Vec<String> = status.lines().filter(is_one).map(String::from).collect();
        (lines.len() == Rights::LINES.len()).then_some(Rights(lines))
    }
}

const ENDED: &str = "has ended already";

fn check(pid: i32) -> Result<(), String> {
    let field = |name| proc::status_field(pid, name);
    let Some(group) = field("Tgid:") else {
        return Err("there is no such process: look it up by ps".into());
    };
    if group != i64::from(pid) {
        return Err(format!("is a thread: attach to its process {group}"));
    }
    if is_kernel_thread(pid) {
        return Err(
            "is a kernel thread, which has no memory to page: choose a program's process".into()
        );
    }
    if matches!(proc::state(pid), Some('Z' | 'X') | None) {
        return Err(ENDED.into());
    }
    if descends(self_pid(), pid) {
        return Err("is this gms, or started it: attach from another terminal".into());
    }
    let user = geteuid();
    if !user.is_root() {
        let ambient = capabilities("CapAmb:");
        check_rights(pid, user.as_raw(), getegid().as_raw(), ambient)?;
    }
    check_program(pid)?;
    if let Some(workload) = control::pager_of(pid) {
        let pager = workload.stats.supervisor_pid;
        return Err(format!(
            "is paged by gms (process {pager}) already: 'gms detach {pager}' ends that"
        ));
    }
    let shares = |other: &i32| same_memory(Pid::from_raw(*other), Pid::from_raw(pid)) == Ok(true);
    let evictors = proc::all().into_iter().filter(|&other| is_named_evictor(other));
    if let Some(evictor) = evictors.filter(|&other| other != pid).find(shares) {
        return Err(format!(
            "is paged already, by a gms that cannot be asked from here: 'gms detach {pid}' where that was started; leave process {evictor} alone, which is its evictor"
        ));
    }
    // A gms that pages it traces it for moments.
    match field("TracerPid:") {
        Some(tracer @ 1..) => {
            Err(format!("is traced by process {tracer} (a debugger, strace): end that first"))
        }
        _ => Ok(()),
    }
}

/// Whether a process has no rights beyond those of its user and of `ambient`. gms may be able to trace any process, by a capability of
/// its file: its user is not to gain by that what `passwd` or `su` may do while they wait for a password.
fn check_rights(pid: i32, user: u32, group: u32, ambient: u64) -> Result<(), String> {
    let all_are = |name, id: u32| {
        let ids = proc::status_line(pid, name).unwrap_or_default();
        let mut ids = ids.split_ascii_whitespace().peekable();
        ids.peek().is_some() && ids.all(|found| found.parse() == Ok(id))
    };
    if proc::status_field(pid, "Uid:") != Some(i64::from(user)) {
        return Err("belongs to another user: attach as that user or as root".into());
    }
    let permitted = proc::status_line(pid, "CapPrm:").unwrap_or_default();
    let permitted = u64::from_str_radix(permitted.trim(), 16).unwrap_or(u64::MAX);
    if !all_are("Uid:", user) || !all_are("Gid:", group) || permitted & !ambient != 0 {
        return Err("has other rights than your user's (it is setuid or setgid, or has capabilities): attach as root".into());
    }
    Ok(())
}

fn is_kernel_thread(pid: i32) -> bool {
    let stat = fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    let stat = String::from_utf8_lossy(&stat);
    let flags =
        stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(6)?.parse().ok());
    flags.is_some_and(|flags: u64| flags & KERNEL_THREAD != 0)
}

/// Only 64-bit programs have the system calls that paging needs.
fn check_program(pid: i32) -> Result<(), String> {
    let mut head = [0; 5];
    let read =
        fs::File::open(format!("/proc/{pid}/exe")).and_then(|mut exe| exe.read_exact(&mut head));
    match read {
        Ok(()) if head.starts_with(b"\x7fELF") && head[4] != ELF_CLASS_64 => {
            Err("is a 32-bit program, which gms cannot page: run its 64-bit build".into())
        }
        Ok(()) => Ok(()),
        Err(error) => Err(format!("cannot be examined ({error}): attach as its user or as root")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn the_tree_is_known() {
        let parent = nix::unistd::getppid().as_raw();
        assert!(descends(self_pid(), self_pid()));
        assert!(descends(self_pid(), parent));
        assert!(!descends(parent, self_pid()));
        assert!(!descends(0, self_pid()));
        assert!(!descends(i32::MAX, self_pid()));
    }

    #[test]
    fn what_cannot_be_attached_to_is_told() {
        let of = |pid| Target::check(pid).unwrap_err();
        assert!(of(i32::MAX).contains("no such process"));
        assert!(of(self_pid()).contains("is this gms"));
        assert!(of(nix::unistd::getppid().as_raw()).contains("is this gms"));
        assert!(of(1).contains("started it"));
        let thread = std::thread::spawn(move || of(nix::unistd::gettid().as_raw()));
        assert!(thread.join().unwrap().contains("is a thread"));
    }

    fn await_cat(pid: i32) {
        while !proc::thread_name(pid).is_some_and(|name| name.starts_with("cat")) {
            assert_ne!(proc::state(pid), Some('Z'), "setpriv failed");
            std::thread::yield_now();
        }
    }

    /// What user 65534 is told of a process that setpriv starts so.
    fn told_of(options: &[&str], ambient: u64) -> Result<(), String> {
        let mut child = Command::new("setpriv")
            .args(options)
            .args(["--clear-groups", "cat"])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let pid = child.id() as i32;
        await_cat(pid);
        let told = check_rights(pid, 65534, 65534, ambient);
        drop(child.stdin.take());
        child.wait().unwrap();
        told
    }

    #[test]
    fn processes_that_have_gained_rights_are_their_users_no_longer() {
        if !geteuid().is_root() {
            return eprintln!("SKIPPED: only root can start processes of another user");
        }
        let user = ["--reuid=65534", "--regid=65534"];
        let ptrace = "--inh-caps=+sys_ptrace,--ambient-caps=+sys_ptrace";
        let traces: Vec<&str> = user.into_iter().chain(ptrace.split(',')).collect();
        assert_eq!(told_of(&user, 0), Ok(()));
        assert_eq!(told_of(&traces, 1 << 19), Ok(()));
        assert!(told_of(&["--reuid=65533", user[1]], 0).unwrap_err().contains("another user"));
        for gained in [
            &["--ruid=65534", "--euid=0", user[1]][..],
            &[user[0], "--rgid=65534", "--egid=0"],
            &traces,
        ] {
            assert!(told_of(gained, 0).unwrap_err().contains("other rights"), "{gained:?}");
        }
    }

    #[test]
    fn kernel_threads_are_told() {
        assert!(!is_kernel_thread(self_pid()));
        if proc::status_field(2, "PPid:") != Some(0) || !proc::command_line(2).is_empty() {
            return eprintln!("SKIPPED: kthreadd cannot be seen from this PID namespace");
        }
        assert!(check(2).unwrap_err().contains("kernel thread"));
    }

    #[test]
    fn a_program_can_be_attached_to_until_it_ends() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        let target = Target::check(pid).unwrap();
        target.check_again(pid).unwrap();
        child.kill().unwrap();
        while proc::state(pid) != Some('Z') {
            std::thread::yield_now();
        }
        assert!(Target::check(pid).unwrap_err().contains("ended"));
        child.wait().unwrap();
        // Whoever gets the number now is another.
        assert!(has_ended(target.process()) && target.check_again(pid).is_err());
    }

    #[test]
    fn a_thread_with_rights_of_its_own_is_passed_over() {
        if !geteuid().is_root() {
            return eprintln!("SKIPPED: only root can give a thread other groups");
        }
        let pid = self_pid();
        let (process, rights) = (pidfd_open(pid).unwrap(), Rights::of(pid).unwrap());
        let target = Target { pid, process, rights };
        let told = std::thread::spawn(move || {
            let tid = nix::unistd::gettid().as_raw();
            let before = target.check_again(tid);
            let group = 65533u32;
            // SAFETY: it reads one group. The system call is of this thread alone, which ends here.
            let set = unsafe { libc::syscall(libc::SYS_setgroups, 1, &raw const group) };
            (before, set, target.check_again(tid))
        });
        let (before, set, after) = told.join().unwrap();
        assert!(before.is_ok() && set == 0, "{before:?}");
        assert!(matches!(after, Err(InjectError::Unstoppable)), "{after:?}");
    }

    /// It executes another program, with other rights or not, after it was checked.
    #[test]
    fn who_has_taken_other_rights_is_not_who_was_checked() {
        if !geteuid().is_root() {
            return eprintln!("SKIPPED: only root can start processes of another user");
        }
        for (options, is_same) in [
            ("", true),
            ("--reuid=65534", false),
            ("--regid=65534 --keep-groups", false),
            ("--groups=65534", false),
            ("--euid=65534", false),
        ] {
            let script = format!("read line; exec setpriv {options} cat");
            let mut child =
                Command::new("sh").args(["-c", &script]).stdin(Stdio::piped()).spawn().unwrap();
            let pid = child.id() as i32;
            let target = Target::check(pid).unwrap();
            let mut stdin = child.stdin.take().unwrap();
            std::io::Write::write_all(&mut stdin, b"\n").unwrap();
            await_cat(pid);
            assert_eq!(target.check_again(pid).is_ok(), is_same, "{options}");
            drop(stdin);
            child.wait().unwrap();
        }
    }
}
