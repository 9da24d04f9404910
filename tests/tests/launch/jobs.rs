//! Job control without a shell, with one that is killed, and with commands that leave the job.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;

use nix::pty::openpty;

use super::*;

/// A loop that ends by a trap.
const LOOP: &str = "echo up; while :; do sleep 0.05; done";

/// Starts a command as the leader of a session with a terminal, on which `typed` was typed before. SIGINT is blocked until that has come, and stays so if
/// there is any.
fn lead_session(words: &[&str], typed: &'static [u8]) -> (Child, File) {
    let pty = openpty(None, None).unwrap();
    let (master, slave) = (File::from(pty.master), File::from(pty.slave));
    let (keyboard, terminal) = (master.as_raw_fd(), slave.as_raw_fd());
    let mut command = gms(words);
    let begin = move || {
        // SAFETY: system calls with descriptors of this process and memory of this frame.
        unsafe {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            libc::setsid();
            libc::ioctl(terminal, libc::TIOCSCTTY, 0);
            libc::alarm(60);
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigaddset(&raw mut set, libc::SIGINT);
            if !typed.is_empty() {
                libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
                libc::write(keyboard, typed.as_ptr().cast(), typed.len());
                while !is_pending() {
                    libc::sched_yield();
                }
            }
            libc::close(keyboard);
            libc::alarm(0);
        }
        Ok(())
    };
    // SAFETY: async-signal-safe calls alone.
    unsafe { command.pre_exec(begin) };
    (command.spawn().unwrap(), master)
}

fn is_pending() -> bool {
    // SAFETY: writes to the set of this frame alone.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigpending(&raw mut set) == 0 && libc::sigismember(&raw const set, libc::SIGINT) == 1
    }
}

/// Waits until a process has nothing to do.
#[track_caller]
fn until_idle(pid: i32) {
    let mut calm = 0;
    until("it comes to rest", || {
        calm = if proc::state(pid) == Some('S') { calm + 1 } else { 0 };
        calm == 5
    });
}

/// As under `ssh -t host 'gms run ...'`: the kernel tells the leader of the session alone.
#[test]
fn the_end_of_the_terminal_reaches_the_command_of_a_session_leader() {
    let _turn = turn();
    let script = format!("trap 'exit 6' HUP; {LOOP}");
    let (mut child, master) = lead_session(&["bash", "-c", &script], b"");
    until_up(&mut child);
    drop(master);
    assert_eq!(finish(child).status.code(), Some(6));
}

#[test]
fn an_alarm_that_was_set_before_gms_was_executed_reaches_the_command() {
    let _turn = turn();
    let mut command = gms(&["sleep", "100"]);
    // SAFETY: one system call.
    let set = || unsafe {
        // Not before gms has blocked it.
        libc::alarm(5);
        Ok(())
    };
    // SAFETY: it is async-signal-safe.
    unsafe { command.pre_exec(set) };
    assert_eq!(output(command).status.code(), Some(128 + libc::SIGALRM));
}

/// There nobody would continue it, and a terminal does not stop it.
#[test]
fn a_terminal_stops_no_job_that_no_shell_would_continue() {
    let _turn = turn();
    let script = format!("trap 'exit 3' INT; {LOOP}");
    let (mut child, mut master) = lead_session(&["bash", "-c", &script], b"");
    until_up(&mut child);
    for key in [b"\x1a", b"\x03"] {
        master.write_all(key).unwrap();
        let echo = format!("^{}", char::from(key[0] + b'@'));
        let mut shown = [0; 2];
        master.read_exact(&mut shown).unwrap();
        assert_eq!(text(&shown), echo);
    }
    assert_eq!(finish(child).status.code(), Some(3));
}

/// The kernel ends stopped jobs that nobody will continue.
#[test]
fn a_stopped_job_ends_with_its_shell() {
    let _turn = turn();
    let mut terminal = Terminal::open();
    terminal.expect("READY");
    terminal.type_in(&format!("{GMS} sleep 100\n"));
    until("gms runs", || !proc::children(terminal.shell()).is_empty());
    let front = proc::children(terminal.shell())[0];
    let Behind { command, .. } = behind(front);
    terminal.type_in("\x1a");
    terminal.expect("Stopped");
    kill(Pid::from_raw(terminal.shell()), Signal::SIGKILL).unwrap();
    let ended = || [front, command].iter().all(|&pid| matches!(proc::state(pid), None | Some('Z')));
    let deadline = Instant::now() + patience(DEADLINE);
    while !ended() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(2));
    }
    let lives = !ended();
    if lives {
        kill_tree(front as u32);
    }
    assert!(!lives, "it is stopped for ever");
}

/// `timeout` makes a group of its own, daemons a session: the terminal reaches gms alone.
#[test]
fn a_terminal_reaches_a_command_that_has_left_the_job() {
    let _turn = turn();
    let mut terminal = Terminal::open();
    terminal.expect("READY");
    for words in ["timeout 60 sleep 101", "setsid sleep 101"] {
        terminal.type_in(&format!("{GMS} {words}\n"));
        let mut front = 0;
        until("it has left the job", || {
            front = proc::children(terminal.shell()).first().copied().unwrap_or(0);
            let Behind { command, .. } = family(front);
            let below = [command].into_iter().chain(proc::children(command));
            let sleeps = |pid| proc::command_line(pid).trim() == "sleep 101";
            front > 0 && command > 0 && below.into_iter().any(sleeps)
        });
        terminal.type_in("\x1a");
        terminal.expect("Stopped");
        terminal.type_in("fg\n");
        until("the job is in the foreground", || terminal.foreground() == Some(front));
        until("gms goes on", || proc::state(front) == Some('S'));
        terminal.type_in("\x03");
        until("gms ends", || proc::state(front).is_none());
        terminal.type_in("echo status $?\n");
        terminal.expect("status 130");
    }
}

/// What it has left there is reached by the terminal itself.
#[test]
fn a_terminal_reaches_a_command_that_has_left_the_job_but_for_a_child() {
    let _turn = turn();
    let mut terminal = Terminal::open();
    terminal.expect("READY");
    terminal.type_in(&format!("{GMS} bash -c \"(sleep 102 &); exec setsid sleep 101\"\n"));
    let (mut front, mut left) = (0, 0);
    until("both are there", || {
        front = proc::children(terminal.shell()).first().copied().unwrap_or(0);
        let all = proc::children(family(front).reaper);
        let of = |words| all.iter().copied().find(|&pid| proc::command_line(pid).trim() == words);
        left = of("sleep 102").unwrap_or(0);
        left > 0 && of("sleep 101").is_some()
    });
    terminal.type_in("\x1a");
    terminal.expect("Stopped");
    terminal.type_in("fg\n");
    until("the job is in the foreground", || terminal.foreground() == Some(front));
    until("all go on", || [front, left].iter().all(|&pid| proc::state(pid) == Some('S')));
    terminal.type_in("\x03");
    until("the command ends", || proc::children(family(front).reaper) == [left]);
    kill(Pid::from_raw(left), Signal::SIGTERM).unwrap();
    until("gms ends", || proc::state(front).is_none());
    terminal.type_in("echo status $?\n");
    terminal.expect("status 130");
}

/// Before there is a command.
#[test]
fn a_terminal_reaches_a_command_that_is_not_there_yet() {
    let _turn = turn();
    let (child, _master) = lead_session(&["sleep", "100"], b"\x03");
    let front = child.id() as i32;
    let pending = |pid| {
        let bits = proc::status_line(pid, "ShdPnd:").unwrap_or_default();
        u64::from_str_radix(bits.trim(), 16).is_ok_and(|bits| bits & 1 << (libc::SIGINT - 1) > 0)
    };
    until("it has the signal", || pending(family(front).command));
    kill(Pid::from_raw(front), Signal::SIGTERM).unwrap();
    assert_eq!(finish(child).status.code(), Some(143));
}

#[test]
fn the_end_of_the_commands_parent_is_told_while_the_job_is_stopped() {
    let _turn = turn();
    let child = gms(&["sleep", "100"]).spawn().unwrap();
    let front = child.id() as i32;
    let Behind { reaper, command, .. } = behind(front);
    kill(Pid::from_raw(command), Signal::SIGSTOP).unwrap();
    until("the front stops", || proc::state(front) == Some('T'));
    kill(Pid::from_raw(reaper), Signal::SIGKILL).unwrap();
    let spoken = finish(child);
    assert_eq!(spoken.status.code(), Some(125));
    assert!(text(&spoken.stderr).contains("the command's parent"), "{}", text(&spoken.stderr));
}

/// It is paged no more, and needs no pager.
#[test]
fn a_detached_command_outlives_the_pager() {
    let _turn = turn();
    let mut command = gms(&["sh", "-c", "read line; (sleep 0.2; echo late) & exit 5"]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let Behind { pager, reaper, command: root } = behind(child.id() as i32);
    let workload = control::find(root).expect("not in the list");
    assert_eq!(control::detach(&workload, |_| ()).unwrap(), DetachEnd::Detached);
    until("it is no longer listed", || control::find(root).is_none());
    until_idle(pager);
    kill(Pid::from_raw(pager), Signal::SIGKILL).unwrap();
    until("the pager is reaped", || proc::state(pager).is_none());
    until_idle(reaper);
    drop(child.stdin.take());
    let ended = finish(child);
    assert_eq!((text(&ended.stdout).as_str(), ended.status.code()), ("late", Some(5)));
    assert_eq!(text(&ended.stderr), "");
}

#[test]
fn a_pager_that_is_killed_after_the_commands_end_changes_nothing() {
    let _turn = turn();
    let mut command = gms(&["sh", "-c", "read line; exit 7"]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let Behind { pager, reaper, command } = behind(child.id() as i32);
    kill(Pid::from_raw(pager), Signal::SIGSTOP).unwrap();
    until("the pager stops", || proc::state(pager) == Some('T'));
    drop(child.stdin.take());
    until("the command is reaped", || proc::state(command).is_none());
    until_idle(reaper);
    kill(Pid::from_raw(pager), Signal::SIGKILL).unwrap();
    let ended = finish(child);
    assert_eq!((text(&ended.stderr).as_str(), ended.status.code()), ("", Some(7)));
}

/// It may have ended before, and its number be another's.
#[test]
fn nobody_is_spared_for_the_number_that_the_keeper_had() {
    if !nix::unistd::geteuid().is_root() {
        return println!("skipped: a PID namespace needs root");
    }
    let _turn = turn();
    let script = format!(
        "set -e\ncd $(mktemp -d)\nmkfifo go\n{GMS} bash -c 'echo $PPID >reaper; read line <go; sleep 102 & echo $! >pid; wait' & g=$!\n\
         until [ -s reaper ] && k=$(pgrep -x far-keeper); do sleep 0.1; done\n\
         kill -9 $k; until ! [ -e /proc/$k ]; do sleep 0.1; done\n\
         echo $((k - 1)) >/proc/sys/kernel/ns_last_pid; echo >go\nuntil [ -s pid ]; do :; done\n\
         kill -9 $(<reaper)\nwait $g || true\nif [ $(<pid) = $k ]; then echo same; fi\nif kill -0 $k; then echo spared; fi\nrm -r $PWD",
    );
    let words = ["unshare", "-pf", "--kill-child", "--mount-proc", "bash", "-c", &script];
    let spoken = output(plain(&words));
    assert_eq!(text(&spoken.stdout), "same", "{}", text(&spoken.stderr));
}
