//! `gms run` towards the shell: exit status, signals, job control, descriptors, orphans. Real processes and a real
//! terminal, with a session that pages nothing in the real one's place (src/bin/gms-unpaged.rs).

use std::fs;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use gms_pager::control::{self, DetachEnd};
use gms_pager::kernel::proc;
use gms_tests::{Terminal, patience};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigHandler, Signal, kill, signal};
use nix::unistd::Pid;

#[path = "launch/jobs.rs"]
mod jobs;

/// `gms run` without options.
const GMS: &str = env!("CARGO_BIN_EXE_gms-unpaged");
/// Environment: what the session does when it adopts the command.
const PLAY: &str = "GMS_TEST_PLAY";
/// For anything that is awaited.
const DEADLINE: Duration = Duration::from_secs(20);

/// Held by a test: descriptors and signal settings of this process are compared, and others' children would inherit them.
static TURN: Mutex<()> = Mutex::new(());

/// Signals that are ignored where the tests were started in the background are not, in what they start.
fn turn() -> MutexGuard<'static, ()> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    for heeded in [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT] {
        // SAFETY: no handler is installed.
        unsafe { signal(heeded, SigHandler::SigDfl) }.unwrap();
    }
    turn
}

fn plain(words: &[&str]) -> Command {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn gms(words: &[&str]) -> Command {
    plain(&[&[GMS], words].concat())
}

fn output(mut command: Command) -> Output {
    let child = command.spawn().unwrap();
    finish(child)
}

fn kill_tree(root: u32) {
    let mut tree = vec![root as i32];
    while let Some(one) = tree.pop() {
        tree.extend(proc::children(one));
        let _ = kill(Pid::from_raw(one), Signal::SIGKILL);
    }
}

/// The end of a child, and of all that hold its output. One that does not end is killed, and fails the test.
#[track_caller]
fn finish(child: Child) -> Output {
    let root = child.id();
    let (over, ended) = mpsc::channel();
    thread::spawn(move || over.send(child.wait_with_output()));
    let Ok(output) = ended.recv_timeout(patience(DEADLINE)) else {
        kill_tree(root);
        panic!("in vain: the end of the command, and of all that hold its output");
    };
    output.unwrap()
}

/// Waits until the command says "up". One that does not is killed, and fails the test.
#[track_caller]
fn until_up(child: &mut Child) {
    let (deadline, mut said) = (Instant::now() + patience(DEADLINE), Vec::new());
    let root = child.id();
    let out = child.stdout.as_mut().unwrap();
    while said != b"up\n" {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(out.as_fd(), PollFlags::POLLIN)];
        let ready = poll(&mut fds, PollTimeout::try_from(left).unwrap()).unwrap();
        let mut byte = [0];
        if ready == 0 || out.read(&mut byte).unwrap() == 0 {
            kill_tree(root);
            panic!("in vain: the command is up; it said {:?}", text(&said));
        }
        said.push(byte[0]);
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim().to_string()
}

#[track_caller]
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + patience(DEADLINE);
    while !holds() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// The processes behind a front.
#[derive(Clone, Copy, Default)]
struct Behind {
    pager: i32,
    /// The command's parent.
    reaper: i32,
    command: i32,
}

/// The same before the command is executed, or after; zero is nobody.
fn family(front: i32) -> Behind {
    let beside = proc::children(front);
    let pager = beside.first().copied().unwrap_or(0);
    let ours = |&pid: &i32| pid != pager && proc::command_line(pid).contains(GMS);
    let reaper = beside.into_iter().find(ours).unwrap_or(0);
    let command = proc::children(reaper).first().copied().unwrap_or(0);
    Behind { pager, reaper, command }
}

#[track_caller]
fn behind(front: i32) -> Behind {
    let mut found = Behind::default();
    until("the command runs", || {
        found = family(front);
        let words = proc::command_line(found.command);
        found.command > 0 && !words.is_empty() && !words.contains(GMS)
    });
    found
}

fn status_of(words: &[&str]) -> Option<i32> {
    output(gms(words)).status.code()
}

#[test]
fn exit_status_is_the_commands_own() {
    let _turn = turn();
    assert_eq!(status_of(&["true"]), Some(0));
    assert_eq!(status_of(&["sh", "-c", "exit 7"]), Some(7));
    assert_eq!(status_of(&["sh", "-c", "kill -TERM $$"]), Some(128 + 15));
    assert_eq!(status_of(&["sh", "-c", "kill -KILL $$"]), Some(128 + 9));
    let spoken = output(gms(&["echo", "a b", "--c"]));
    assert_eq!((text(&spoken.stdout).as_str(), text(&spoken.stderr).as_str()), ("a b --c", ""));
}

#[test]
fn failures_of_gms_have_their_own() {
    let _turn = turn();
    let failed = output(gms(&["no-such-command-here"]));
    assert_eq!(failed.status.code(), Some(127));
    assert_eq!(
        text(&failed.stderr),
        "gms: no-such-command-here: not found: check its name and PATH"
    );
    assert_eq!(status_of(&["/"]), Some(126));
    for (play, reason) in [("unprepared", "no agent"), ("refuse", "cannot be adopted")] {
        let mut command = gms(&["sh", "-c", "sleep 100; echo ran"]);
        let failed = output({
            command.env(PLAY, play);
            command
        });
        assert_eq!(failed.status.code(), Some(125), "{play}");
        assert_eq!(text(&failed.stderr), format!("gms: {reason}"));
        assert_eq!(text(&failed.stdout), "");
    }
    let mut command = gms(&["sleep", "100"]);
    command.env(PLAY, "kill");
    assert_eq!(output(command).status.code(), Some(125));
}

#[test]
fn background_children_keep_it_alive() {
    let _turn = turn();
    let spoken = output(gms(&["sh", "-c", "(sleep 0.3; echo late) & echo early; exit 3"]));
    assert_eq!(spoken.status.code(), Some(3));
    assert_eq!(text(&spoken.stdout), "early\nlate");
    // Seen by the time it took, not only by the pipe being held open.
    let start = Instant::now();
    assert_eq!(status_of(&["sh", "-c", "sleep 0.4 >/dev/null 2>&1 & exit 0"]), Some(0));
    assert!(start.elapsed() >= Duration::from_millis(400));
}

#[test]
fn descriptors_and_directory_pass_through() {
    let _turn = turn();
    let look = [
        "sh",
        "-c",
        "pwd; ls -l /proc/self/fd | sed 's/.* \\([0-9]* -> \\)/\\1/; s/[0-9]*\\]//; s/[0-9]*.fd$//'; umask; env | grep -v '^_='",
    ];
    let inside = |mut command: Command| {
        command.current_dir("/usr");
        text(&output(command).stdout)
    };
    let (bare, under) = (inside(plain(&look)), inside(gms(&look)));
    assert!(bare.starts_with("/usr\n") && bare.contains("2 -> pipe"), "{bare}");
    assert_eq!(bare, under);
}

#[test]
fn closed_streams_stay_closed() {
    let _turn = turn();
    let script = |prefix: &str| format!("exec 0<&- 2>&- 7</dev/null; {prefix} ls /proc/self/fd");
    let bare = output(plain(&["sh", "-c", &script("exec")]));
    let under = output(plain(&["sh", "-c", &script(&format!("exec {GMS}"))]));
    let open = text(&bare.stdout);
    // 0 is what ls reads.
    assert!(["0", "1", "7"].iter().all(|fd| open.lines().any(|line| line == *fd)), "{open}");
    assert!(open.lines().all(|line| line != "2"), "{open}");
    assert_eq!(text(&bare.stdout), text(&under.stdout));
    assert_eq!(under.status.code(), Some(0));
}

#[test]
fn signal_settings_pass_through() {
    let _turn = turn();
    for trap in ["", "trap '' PIPE;", "trap '' CHLD INT HUP;", "trap '' TERM USR1 TSTP;"] {
        let script = |prefix: &str| format!("{trap} exec {prefix} grep ^Sig[IB] /proc/self/status");
        // Rust's Command resets SIGPIPE and the mask for the shell.
        let bare = output(plain(&["bash", "-c", &script("")]));
        let under = output(plain(&["bash", "-c", &script(GMS)]));
        assert_eq!(text(&bare.stdout).lines().count(), 2);
        assert_eq!(text(&bare.stdout), text(&under.stdout), "{trap}");
    }
}

#[test]
fn limits_pass_through() {
    let _turn = turn();
    let limits = "ulimit -Sn 256; exec $0 bash -c 'ulimit -Sa; ulimit -Ha'";
    let bare = output(plain(&["bash", "-c", limits, "env"]));
    let under = output(plain(&["bash", "-c", limits, GMS]));
    assert!(text(&bare.stdout).contains("256"), "{}", text(&bare.stdout));
    assert_eq!(text(&bare.stdout), text(&under.stdout));
}

#[test]
fn signals_are_passed_on() {
    let _turn = turn();
    for (signal, status) in
        [(Signal::SIGTERM, 9), (Signal::SIGINT, 8), (Signal::SIGUSR1, 7), (Signal::SIGHUP, 6)]
    {
        // A shell cannot trap what it was started to ignore, as under nohup.
        // SAFETY: the default action runs no code of ours.
        unsafe { nix::sys::signal::signal(signal, nix::sys::signal::SigHandler::SigDfl) }.unwrap();
        let traps = "trap 'exit 9' TERM; trap 'exit 8' INT; trap 'exit 7' USR1; trap 'exit 6' HUP; echo up; while :; do sleep 0.05; done";
        let mut child = gms(&["sh", "-c", traps]).spawn().unwrap();
        until_up(&mut child);
        kill(Pid::from_raw(child.id() as i32), signal).unwrap();
        assert_eq!(finish(child).status.code(), Some(status), "{signal}");
    }
}

#[test]
fn signals_of_the_tree_are_not_echoed() {
    let _turn = turn();
    // A command that signals its whole group reaches gms too, which must not send it a second time.
    let script = "trap 'echo got' USR1; kill -USR1 0; sleep 0.2; sleep 0.2; exit 4";
    let mut command = gms(&["sh", "-c", script]);
    let spoken = output({
        command.process_group(0);
        command
    });
    assert_eq!((text(&spoken.stdout).as_str(), spoken.status.code()), ("got", Some(4)));
}

/// The shell from which gms was executed may have left children to it.
#[test]
fn children_that_gms_was_born_with_are_no_part_of_the_command() {
    let _turn = turn();
    let is = |pid: &i32, words| proc::command_line(*pid).trim() == words;
    let below = |pid, words| proc::children(pid).into_iter().find(|child| is(child, words));
    let reaper =
        |pid| proc::children(pid).into_iter().find(|&pid| below(pid, "sleep 101").is_some());

    let told =
        format!("exec 3<&0; (read line <&3; kill -TERM $$) & echo up; exec {GMS} sleep 101 3<&-");
    let mut child = plain(&["bash", "-c", &told]).stdin(Stdio::piped()).spawn().unwrap();
    until_up(&mut child);
    until("the command runs", || reaper(child.id() as i32).is_some());
    drop(child.stdin.take());
    assert_eq!(finish(child).status.code(), Some(143), "its signal is for the command");

    let beside = format!("sleep 100 >/dev/null 2>&1 & echo up; exec {GMS} sleep 101");
    let mut child = plain(&["bash", "-c", &beside]).spawn().unwrap();
    until_up(&mut child);
    let front = child.id() as i32;
    until("the command runs", || reaper(front).is_some());
    let foreign = below(front, "sleep 100").unwrap();
    kill(Pid::from_raw(reaper(front).unwrap()), Signal::SIGKILL).unwrap();
    assert_eq!(finish(child).status.code(), Some(125));
    let lives = is(&foreign, "sleep 100");
    assert!(kill(Pid::from_raw(foreign), Signal::SIGKILL).is_ok() && lives, "it was killed");
}

/// As on a busy machine: the command's parent gets no CPU while the command ends.
#[test]
fn a_signal_reaches_what_a_command_leaves_that_has_just_ended() {
    let _turn = turn();
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let mut command = gms(&["sh", "-c", "sleep 100 & echo up; read line; exit 3"]);
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        until_up(&mut child);
        let front = child.id() as i32;
        let Behind { reaper, command: shell, .. } = behind(front);
        let left = proc::children(shell)[0];
        kill(Pid::from_raw(reaper), Signal::SIGSTOP).unwrap();
        drop(child.stdin.take());
        until("the shell ends", || proc::state(shell) == Some('Z'));
        kill(Pid::from_raw(front), signal).unwrap();
        let waits = || {
            let bits = proc::status_line(reaper, "ShdPnd:").unwrap();
            u64::from_str_radix(bits.trim(), 16).unwrap() & 1 << (Signal::SIGTERM as u32 - 1) > 0
        };
        match signal {
            Signal::SIGTERM => until("the front passes it on", waits),
            _ => until("the front ends", || proc::state(front) == Some('Z')),
        }
        kill(Pid::from_raw(reaper), Signal::SIGCONT).unwrap();
        until("what was left ends", || matches!(proc::state(left), None | Some('Z')));
        let status = finish(child).status;
        assert!(signal == Signal::SIGKILL || status.code() == Some(3), "{status}");
    }
}

/// The session waits for its agents while the command waits to be executed.
#[test]
fn a_command_is_not_executed_that_was_told_to_end_before() {
    let _turn = turn();
    let mut command = gms(&["sh", "-c", "echo ran"]);
    let child = command.env(PLAY, "slow").spawn().unwrap();
    let front = child.id() as i32;
    until("it waits for its agents", || {
        let Behind { pager, command, .. } = family(front);
        command > 0 && proc::state(pager) == Some('T')
    });
    let Behind { pager, command, .. } = family(front);
    kill(Pid::from_raw(front), Signal::SIGTERM).unwrap();
    until("the command has ended", || proc::state(command).is_none());
    kill(Pid::from_raw(pager), Signal::SIGCONT).unwrap();
    let ended = finish(child);
    assert_eq!((text(&ended.stdout).as_str(), ended.status.code()), ("", Some(143)));
}

#[test]
fn orphans_are_reaped() {
    let _turn = turn();
    let script = "for i in $(seq 50); do sh -c 'sleep 0.05 &'; done; wait; echo up; read line";
    let mut command = gms(&["sh", "-c", script]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    until_up(&mut child);
    let Behind { reaper, command: shell, .. } = behind(child.id() as i32);
    until("only the shell is left", || proc::children(reaper) == [shell]);
    drop(child.stdin.take());
    assert_eq!(finish(child).status.code(), Some(1));
}

#[test]
fn a_killed_front_takes_the_command_along() {
    let _turn = turn();
    let mut child = gms(&["sleep", "100"]).spawn().unwrap();
    let Behind { pager, command, .. } = behind(child.id() as i32);
    child.kill().unwrap();
    child.wait().unwrap();
    until("the command ends", || proc::state(command).is_none());
    until("the pager ends", || matches!(proc::state(pager), None | Some('Z')));
}

#[test]
fn a_killed_pager_is_told() {
    let _turn = turn();
    let child = gms(&["sleep", "100"]).spawn().unwrap();
    let Behind { pager, command, .. } = behind(child.id() as i32);
    kill(Pid::from_raw(pager), Signal::SIGKILL).unwrap();
    let spoken = finish(child);
    assert_eq!(spoken.status.code(), Some(125));
    assert!(text(&spoken.stderr).contains("ended by signal 9"), "{}", text(&spoken.stderr));
    until("the command ends", || matches!(proc::state(command), None | Some('Z')));
}

/// Anybody can have the name of an evictor or of the keeper.
#[test]
fn no_name_outlives_the_pager() {
    let _turn = turn();
    for name in ["far-evictor", "far-keeper"] {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::copy("/bin/sleep", &path).unwrap();
        let child = gms(&[path.to_str().unwrap(), "100"]).spawn().unwrap();
        let Behind { pager, command, .. } = behind(child.id() as i32);
        until("it has its name", || proc::thread_name(command).is_some_and(|n| n.trim() == name));
        kill(Pid::from_raw(pager), Signal::SIGKILL).unwrap();
        assert_eq!(finish(child).status.code(), Some(125));
        let ended = || matches!(proc::state(command), None | Some('Z'));
        let outlived = !ended() && kill(Pid::from_raw(command), Signal::SIGKILL).is_ok();
        assert!(!outlived, "{name} was spared");
    }
}

#[test]
fn a_stop_is_mirrored() {
    let _turn = turn();
    // A job of this process: one that is nobody's is not stopped by SIGTSTP.
    let child = gms(&["sleep", "100"]).process_group(0).spawn().unwrap();
    let front = child.id() as i32;
    let Behind { pager, command, .. } = behind(front);
    for _ in 0..20 {
        kill(Pid::from_raw(command), Signal::SIGSTOP).unwrap();
        until("the front stops", || proc::state(front) == Some('T'));
        assert_ne!(proc::state(pager), Some('T'));
        kill(Pid::from_raw(command), Signal::SIGCONT).unwrap();
        until("the front continues", || proc::state(front) != Some('T'));
    }
    // Who continues gms alone continues the command.
    kill(Pid::from_raw(front), Signal::SIGTSTP).unwrap();
    until("all stop", || [front, command].map(proc::state) == [Some('T'); 2]);
    kill(Pid::from_raw(front), Signal::SIGCONT).unwrap();
    until("the command goes on", || proc::state(command) == Some('S'));
    kill(Pid::from_raw(front), Signal::SIGTERM).unwrap();
    assert_eq!(finish(child).status.code(), Some(143));
}

/// As on a busy machine, or while another pager takes over: job control and the command's end need no pager.
#[test]
fn the_command_is_seen_to_while_the_pager_gets_no_cpu() {
    let _turn = turn();
    for (signal, status) in [(Signal::SIGKILL, 137), (Signal::SIGTERM, 143)] {
        let child = gms(&["sleep", "100"]).spawn().unwrap();
        let front = child.id() as i32;
        let Behind { pager, command, .. } = behind(front);
        kill(Pid::from_raw(pager), Signal::SIGSTOP).unwrap();
        until("the pager stops", || proc::state(pager) == Some('T'));
        for _ in 0..3 {
            kill(Pid::from_raw(command), Signal::SIGSTOP).unwrap();
            until("the front stops", || proc::state(front) == Some('T'));
            kill(Pid::from_raw(command), Signal::SIGCONT).unwrap();
            until("the front continues", || proc::state(front) != Some('T'));
        }
        // To the front, which cannot pass on what nobody can block.
        let to = if signal == Signal::SIGKILL { command } else { front };
        kill(Pid::from_raw(to), signal).unwrap();
        until("the command is reaped", || proc::state(command).is_none());
        kill(Pid::from_raw(pager), Signal::SIGCONT).unwrap();
        assert_eq!(finish(child).status.code(), Some(status));
    }
}

/// The shell is told of the end of a job that it has stopped.
#[test]
fn a_pager_that_is_killed_while_the_job_is_stopped_is_told() {
    let _turn = turn();
    let child = gms(&["sleep", "100"]).spawn().unwrap();
    let front = child.id() as i32;
    let Behind { pager, command, .. } = behind(front);
    kill(Pid::from_raw(command), Signal::SIGSTOP).unwrap();
    until("the front stops", || proc::state(front) == Some('T'));
    kill(Pid::from_raw(pager), Signal::SIGKILL).unwrap();
    let spoken = finish(child);
    assert_eq!(spoken.status.code(), Some(125));
    assert!(text(&spoken.stderr).contains("ended by signal 9"), "{}", text(&spoken.stderr));
    assert!(matches!(proc::state(command), None | Some('Z')), "the command lives");
}

/// Nobody mirrors its stops any more, or would tell how it ends.
#[test]
fn a_command_whose_parent_is_killed_is_killed_too() {
    let _turn = turn();
    let child = gms(&["sleep", "100"]).spawn().unwrap();
    let Behind { pager, reaper, command } = behind(child.id() as i32);
    kill(Pid::from_raw(reaper), Signal::SIGKILL).unwrap();
    let spoken = finish(child);
    assert_eq!(spoken.status.code(), Some(125));
    let told = text(&spoken.stderr);
    assert!(told.contains("the command's parent was ended by signal 9"), "{told}");
    for pid in [pager, command] {
        until("both end", || matches!(proc::state(pid), None | Some('Z')));
    }
}

/// A shell has one job, which is stopped when all of it is: also when the command has ended and its children live on.
#[test]
fn a_stop_of_what_the_command_has_left_is_mirrored() {
    let _turn = turn();
    let mut terminal = Terminal::open();
    terminal.expect("READY");
    terminal.type_in(&format!("{GMS} sh -c \"sleep 100 & setsid sleep 100 & exit 0\"\n"));
    let mut job = (0, Vec::new());
    until("only the two are left", || {
        let front = proc::children(terminal.shell()).first().copied().unwrap_or(0);
        job = (front, proc::children(family(front).reaper));
        job.1.len() == 2 && job.1.iter().all(|&pid| proc::command_line(pid).trim() == "sleep 100")
    });
    let (front, left) = job;
    for _ in 0..2 {
        let from = terminal.text().matches("Stopped").count();
        terminal.type_in("\x1a");
        until("it is told", || terminal.text().matches("Stopped").count() > from);
        assert_eq!(proc::state(front), Some('T'));
        assert_eq!(left.iter().filter(|&&pid| proc::state(pid) == Some('T')).count(), 1);
        terminal.type_in("fg\n");
        until("the job goes on", || terminal.foreground() == Some(front));
        until("all go on", || left.iter().all(|&pid| proc::state(pid) == Some('S')));
    }
    left.iter().for_each(|&pid| kill(Pid::from_raw(pid), Signal::SIGTERM).unwrap());
    until("gms ends", || proc::state(front).is_none());
    terminal.type_in("echo status $?\n");
    terminal.expect("status 0");
}

#[test]
fn a_detached_command_runs_on() {
    let _turn = turn();
    let mut command = gms(&["sh", "-c", "read line; exit 5"]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let front = child.id() as i32;
    let Behind { pager, command: root, .. } = behind(front);
    let workload = control::find(root).expect("not in the list");
    assert_eq!(
        (workload.stats.supervisor_pid, workload.front_pid, workload.stats.faults),
        (pager, front, 42)
    );
    assert_eq!(workload.stats.command, "sh -c read line; exit 5");
    assert!(control::find(pager).is_some() && control::find(front).is_some());
    assert_eq!(control::pager_of(root).map(|workload| workload.stats.pid), Some(root));
    assert_eq!(control::detach(&workload, |_| ()).unwrap(), DetachEnd::Detached);
    until("it is no longer listed", || control::find(root).is_none());
    until("it waits for its line", || proc::state(root) == Some('S'));
    drop(child.stdin.take());
    assert_eq!(finish(child).status.code(), Some(5));
}

#[test]
fn a_terminal_stops_and_continues_the_job() {
    let _turn = turn();
    let mut terminal = Terminal::open();
    terminal.expect("READY");
    // Not dash: it forks by vfork, and a stop between that and the exec hangs it, with or without gms.
    let script = "trap 'echo inter''rupted' INT; echo st''arted; while :; do sleep 0.05; done";
    terminal.type_in(&format!("{GMS} bash -c \"{script}\"\n"));
    terminal.expect("started");
    let front = proc::children(terminal.shell())[0];
    let Behind { pager, command, .. } = behind(front);
    // Once by the terminal, not again by gms.
    terminal.type_in("\x03");
    terminal.expect("interrupted");
    terminal.type_in("\x1a");
    terminal.expect("Stopped");
    until("both stop", || [front, command].map(proc::state) == [Some('T'); 2]);
    assert!(matches!(proc::state(pager), Some('S' | 'R')));
    terminal.type_in("fg\n");
    // Nobody types faster than gms needs to see it: not before all have come to rest.
    let mut calm = 0;
    until("both go on", || {
        let rests = [front, pager].map(proc::state) == [Some('S'); 2];
        calm = if rests && proc::state(command) != Some('T') { calm + 1 } else { 0 };
        calm == 5
    });
    terminal.type_in("\x1a");
    until("both stop again", || [front, command].map(proc::state) == [Some('T'); 2]);
    terminal.type_in("bg\n");
    until("both go on in the background", || {
        [front, command].iter().all(|&pid| proc::state(pid) != Some('T'))
    });
    terminal.type_in("fg\n");
    until("the job is in the foreground", || terminal.foreground() == Some(front));
    kill(Pid::from_raw(command), Signal::SIGTERM).unwrap();
    until("gms ends", || proc::state(front).is_none());
    terminal.type_in("echo status $?\n");
    terminal.expect("status 143");
    assert_eq!(terminal.text().matches("interrupted").count(), 1);
}
