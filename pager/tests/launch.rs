//! `gms run` towards the shell: exit status, signals, job control, descriptors, orphans. Real processes and a real
//! terminal, with a session that pages nothing in the real one's place. Runs itself as that `gms run`.

use std::ffi::OsString;
use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use gms_pager::commands::{Failure, say};
use gms_pager::control::{self, DetachEnd};
use gms_pager::launch::{self, Paging, Side, note_inheritance};
use gms_pager::proc;
use gms_pager::session::{Outcome, SessionError};
use gms_pager::stats::Stats;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::pty::openpty;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, pipe, setsid};

/// How this binary is told to be `gms run`.
const AS_GMS: &str = "as-gms";
/// Environment: what the fake session does when it adopts the command.
const PLAY: &str = "GMS_TEST_PLAY";
/// For anything that is awaited.
const DEADLINE: Duration = Duration::from_secs(20);

/// As in the binary.
#[used]
// SAFETY: the loader calls it once; it makes system calls and sets an atomic.
#[unsafe(link_section = ".init_array")]
static NOTE_INHERITANCE: extern "C" fn() = note_inheritance;

/// A session that pages nothing.
struct Fake {
    outcome: Mutex<Option<Outcome>>,
    done: (OwnedFd, Mutex<Option<OwnedFd>>),
}

impl Fake {
    fn end(&self, outcome: Outcome) {
        *self.outcome.lock().unwrap() = Some(outcome);
        // End of file is readable.
        self.done.1.lock().unwrap().take();
    }
}

impl Paging for Fake {
    fn adopt(&self, root: i32, attached: bool) -> Result<(), SessionError> {
        assert!(!attached);
        match std::env::var(PLAY).as_deref() {
            Ok("kill") => {
                kill(Pid::from_raw(root), Signal::SIGKILL).unwrap();
                self.end(Outcome::Killed("the test says so".into()));
            }
            Ok("refuse") => return Err(SessionError::Fatal("cannot be adopted".into())),
            _ => {}
        }
        Ok(())
    }
    fn detach(&self) {
        self.end(Outcome::Detached { lost: None });
    }
    fn fd(&self) -> BorrowedFd<'_> {
        self.done.0.as_fd()
    }
    fn outcome(&self) -> Option<Outcome> {
        self.outcome.lock().unwrap().clone()
    }
    fn evictors(&self) -> Vec<i32> {
        Vec::new()
    }
    fn stats(&self) -> Stats {
        Stats { faults: 42, ..Stats::default() }
    }
    fn finish(self) -> Stats {
        self.stats()
    }
}

fn prepare() -> Result<Fake, SessionError> {
    if std::env::var(PLAY).as_deref() == Ok("unprepared") {
        return Err(SessionError::Fatal("no agent".into()));
    }
    let (read, write) = pipe().unwrap();
    Ok(Fake { outcome: Mutex::new(None), done: (read, Mutex::new(Some(write))) })
}

fn be_gms(command: &[OsString]) -> u8 {
    let (link, signals) = match launch::split().unwrap() {
        Side::Front(front) => return front.stand_in(),
        Side::Pager(link, signals) => (link, signals),
    };
    match launch::run(command, link, signals, prepare) {
        Ok(finished) => finished.status,
        Err(error) => {
            let failure = Failure::from(error);
            say(&failure);
            failure.status
        }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    if arguments.first().is_some_and(|word| word == AS_GMS) {
        return ExitCode::from(be_gms(&arguments[1..]));
    }
    let wanted = arguments.iter().find(|word| !word.to_string_lossy().starts_with('-'));
    let tests: [(&str, fn()); 15] = [
        ("exit_status_is_the_commands_own", exit_status_is_the_commands_own),
        ("failures_of_gms_have_their_own", failures_of_gms_have_their_own),
        ("background_children_keep_it_alive", background_children_keep_it_alive),
        ("descriptors_and_directory_pass_through", descriptors_and_directory_pass_through),
        ("closed_streams_stay_closed", closed_streams_stay_closed),
        ("signal_settings_pass_through", signal_settings_pass_through),
        ("signals_are_passed_on", signals_are_passed_on),
        ("signals_of_the_tree_are_not_echoed", signals_of_the_tree_are_not_echoed),
        ("orphans_are_reaped", orphans_are_reaped),
        ("a_killed_front_takes_the_command_along", a_killed_front_takes_the_command_along),
        ("a_killed_pager_is_told", a_killed_pager_is_told),
        ("no_name_outlives_the_pager", no_name_outlives_the_pager),
        ("a_stop_is_mirrored", a_stop_is_mirrored),
        ("a_detached_command_runs_on", a_detached_command_runs_on),
        ("a_terminal_stops_and_continues_the_job", a_terminal_stops_and_continues_the_job),
    ];
    if arguments.iter().any(|word| word == "--list") {
        tests.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    isolate();
    for (name, test) in tests {
        if wanted.is_none_or(|wanted| name.contains(&*wanted.to_string_lossy())) {
            println!("test {name} ...");
            test();
        }
    }
    println!("test result: ok");
    ExitCode::SUCCESS
}

/// Control sockets of these tests are among themselves.
fn isolate() {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("run");
    fs::create_dir_all(&dir).unwrap();
    // SAFETY: there is no other thread yet.
    unsafe { std::env::set_var("XDG_RUNTIME_DIR", dir) };
}

fn plain(words: &[&str]) -> Command {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn gms(words: &[&str]) -> Command {
    let own = std::env::current_exe().unwrap();
    let mut all = vec![own.to_str().unwrap(), AS_GMS];
    all.extend(words);
    plain(&all)
}

fn output(mut command: Command) -> Output {
    let child = command.spawn().unwrap();
    finish(child)
}

/// The end of a child; a child which does not end is killed, and fails the test.
fn finish(child: Child) -> Output {
    let pid = Pid::from_raw(child.id() as i32);
    let ended = std::sync::Arc::new(Mutex::new(false));
    let watch = ended.clone();
    thread::spawn(move || {
        thread::sleep(DEADLINE);
        if !*watch.lock().unwrap() {
            let _ = kill(pid, Signal::SIGKILL);
        }
    });
    let output = child.wait_with_output().unwrap();
    *ended.lock().unwrap() = true;
    output
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim().to_string()
}

#[track_caller]
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !holds() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Process ids of the pager and the command behind a front.
#[track_caller]
fn behind(front: i32) -> (i32, i32) {
    let mut found = (0, 0);
    until("the command runs", || {
        let pager = proc::children(front).first().copied().unwrap_or(0);
        let command = proc::children(pager).first().copied().unwrap_or(0);
        found = (pager, command);
        let words = proc::command_line(command);
        command > 0 && !words.is_empty() && !words.contains(AS_GMS)
    });
    found
}

fn status_of(words: &[&str]) -> Option<i32> {
    output(gms(words)).status.code()
}

fn exit_status_is_the_commands_own() {
    assert_eq!(status_of(&["true"]), Some(0));
    assert_eq!(status_of(&["sh", "-c", "exit 7"]), Some(7));
    assert_eq!(status_of(&["sh", "-c", "kill -TERM $$"]), Some(128 + 15));
    assert_eq!(status_of(&["sh", "-c", "kill -KILL $$"]), Some(128 + 9));
    let spoken = output(gms(&["echo", "a b", "--c"]));
    assert_eq!((text(&spoken.stdout).as_str(), text(&spoken.stderr).as_str()), ("a b --c", ""));
}

fn failures_of_gms_have_their_own() {
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

fn background_children_keep_it_alive() {
    let spoken = output(gms(&["sh", "-c", "(sleep 0.3; echo late) & echo early; exit 3"]));
    assert_eq!(spoken.status.code(), Some(3));
    assert_eq!(text(&spoken.stdout), "early\nlate");
    // Seen by the time it took, not only by the pipe being held open.
    let start = Instant::now();
    assert_eq!(status_of(&["sh", "-c", "sleep 0.4 >/dev/null 2>&1 & exit 0"]), Some(0));
    assert!(start.elapsed() >= Duration::from_millis(400));
}

fn descriptors_and_directory_pass_through() {
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

fn closed_streams_stay_closed() {
    let own = std::env::current_exe().unwrap();
    let script = |prefix: &str| format!("exec 0<&- 2>&- 7</dev/null; {prefix} ls /proc/self/fd");
    let bare = output(plain(&["sh", "-c", &script("exec")]));
    let under = output(plain(&["sh", "-c", &script(&format!("exec {} {AS_GMS}", own.display()))]));
    let open = text(&bare.stdout);
    // 0 is what ls reads.
    assert!(["0", "1", "7"].iter().all(|fd| open.lines().any(|line| line == *fd)), "{open}");
    assert!(open.lines().all(|line| line != "2"), "{open}");
    assert_eq!(text(&bare.stdout), text(&under.stdout));
    assert_eq!(under.status.code(), Some(0));
}

fn signal_settings_pass_through() {
    for trap in ["", "trap '' PIPE;", "trap '' CHLD INT HUP;", "trap '' TERM USR1 TSTP;"] {
        let own = std::env::current_exe().unwrap();
        let script = |prefix: &str| format!("{trap} exec {prefix} grep ^Sig[IB] /proc/self/status");
        // Rust's Command resets SIGPIPE and the mask for the shell.
        let bare = output(plain(&["bash", "-c", &script("")]));
        let under = output(plain(&["bash", "-c", &script(&format!("{} {AS_GMS}", own.display()))]));
        assert_eq!(text(&bare.stdout).lines().count(), 2);
        assert_eq!(text(&bare.stdout), text(&under.stdout), "{trap}");
    }
}

fn signals_are_passed_on() {
    for (signal, status) in
        [(Signal::SIGTERM, 9), (Signal::SIGINT, 8), (Signal::SIGUSR1, 7), (Signal::SIGHUP, 6)]
    {
        // A shell cannot trap what it was started to ignore, as under nohup.
        // SAFETY: the default action runs no code of ours.
        unsafe { nix::sys::signal::signal(signal, nix::sys::signal::SigHandler::SigDfl) }.unwrap();
        let traps = "trap 'exit 9' TERM; trap 'exit 8' INT; trap 'exit 7' USR1; trap 'exit 6' HUP; echo up; while :; do sleep 0.05; done";
        let mut child = gms(&["sh", "-c", traps]).spawn().unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0; 3]).unwrap();
        kill(Pid::from_raw(child.id() as i32), signal).unwrap();
        assert_eq!(finish(child).status.code(), Some(status), "{signal}");
    }
}

fn signals_of_the_tree_are_not_echoed() {
    // A command that signals its whole group reaches gms too, which must not send it a second time.
    let script = "trap 'echo got' USR1; kill -USR1 0; sleep 0.2; sleep 0.2; exit 4";
    let mut command = gms(&["sh", "-c", script]);
    let spoken = output({
        command.process_group(0);
        command
    });
    assert_eq!((text(&spoken.stdout).as_str(), spoken.status.code()), ("got", Some(4)));
}

fn orphans_are_reaped() {
    let script = "for i in $(seq 50); do sh -c 'sleep 0.05 &'; done; wait; echo up; read line";
    let mut command = gms(&["sh", "-c", script]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 3]).unwrap();
    let (pager, shell) = behind(child.id() as i32);
    until("only the shell is left", || proc::children(pager) == [shell]);
    drop(child.stdin.take());
    assert_eq!(finish(child).status.code(), Some(1));
}

fn a_killed_front_takes_the_command_along() {
    let mut child = gms(&["sleep", "100"]).spawn().unwrap();
    let (pager, command) = behind(child.id() as i32);
    child.kill().unwrap();
    child.wait().unwrap();
    until("the command ends", || proc::state(command).is_none());
    until("the pager ends", || matches!(proc::state(pager), None | Some('Z')));
}

fn a_killed_pager_is_told() {
    let child = gms(&["sleep", "100"]).spawn().unwrap();
    let (pager, command) = behind(child.id() as i32);
    kill(Pid::from_raw(pager), Signal::SIGKILL).unwrap();
    let spoken = finish(child);
    assert_eq!(spoken.status.code(), Some(125));
    assert!(text(&spoken.stderr).contains("ended by signal 9"), "{}", text(&spoken.stderr));
    until("the command ends", || matches!(proc::state(command), None | Some('Z')));
}

/// Anybody can have the name of an evictor or of the keeper.
fn no_name_outlives_the_pager() {
    for name in ["far-evictor", "far-keeper"] {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::copy("/bin/sleep", &path).unwrap();
        let child = gms(&[path.to_str().unwrap(), "100"]).spawn().unwrap();
        let (pager, command) = behind(child.id() as i32);
        until("it has its name", || proc::thread_name(command).is_some_and(|n| n.trim() == name));
        kill(Pid::from_raw(pager), Signal::SIGKILL).unwrap();
        assert_eq!(finish(child).status.code(), Some(125));
        let ended = || matches!(proc::state(command), None | Some('Z'));
        let outlived = !ended() && kill(Pid::from_raw(command), Signal::SIGKILL).is_ok();
        assert!(!outlived, "{name} was spared");
    }
}

fn a_stop_is_mirrored() {
    let child = gms(&["sleep", "0.5"]).spawn().unwrap();
    let front = child.id() as i32;
    let (pager, command) = behind(front);
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
    assert_eq!(finish(child).status.code(), Some(0));
}

fn a_detached_command_runs_on() {
    let mut command = gms(&["sh", "-c", "read line; exit 5"]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let front = child.id() as i32;
    let (pager, root) = behind(front);
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

/// A shell with job control on a terminal of its own.
struct Terminal {
    shell: Child,
    keys: fs::File,
    seen: std::sync::Arc<Mutex<String>>,
}

impl Terminal {
    fn open() -> Terminal {
        let pty = openpty(None, None).unwrap();
        fcntl(&pty.master, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).unwrap();
        let mut command = Command::new("bash");
        command.args(["--norc", "--noprofile", "-i"]).env("PS1", "$ ");
        command
            .stdin(pty.slave.try_clone().unwrap())
            .stdout(pty.slave.try_clone().unwrap())
            .stderr(pty.slave);
        // SAFETY: setsid and ioctl may be called between fork and exec.
        unsafe {
            command.pre_exec(|| {
                setsid()?;
                nix::errno::Errno::result(libc::ioctl(0, libc::TIOCSCTTY, 0))?;
                Ok(())
            });
        }
        let shell = command.spawn().unwrap();
        drop(command);
        let keys = fs::File::from(pty.master);
        let seen = std::sync::Arc::new(Mutex::new(String::new()));
        let (mut screen, log) = (keys.try_clone().unwrap(), seen.clone());
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = screen.read(&mut bytes) {
                log.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..count]));
            }
        });
        Terminal { shell, keys, seen }
    }

    fn type_in(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    #[track_caller]
    fn await_text(&self, text: &str) {
        until(&format!("{text:?} in {:?}", self.seen.lock().unwrap()), || {
            self.seen.lock().unwrap().contains(text)
        });
    }
}

fn a_terminal_stops_and_continues_the_job() {
    let own = std::env::current_exe().unwrap();
    let mut terminal = Terminal::open();
    // Not dash: it forks by vfork, and a stop between that and the exec hangs it, with or without gms.
    let script = "trap 'echo inter''rupted' INT; echo st''arted; while :; do sleep 0.05; done";
    terminal.type_in(&format!("{} {AS_GMS} bash -c \"{script}\"\n", own.display()));
    terminal.await_text("started");
    let front = proc::children(terminal.shell.id() as i32)[0];
    let (pager, command) = behind(front);
    // Once by the terminal, not again by gms.
    terminal.type_in("\x03");
    terminal.await_text("interrupted");
    terminal.type_in("\x1a");
    terminal.await_text("Stopped");
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
    let group = || nix::unistd::tcgetpgrp(&terminal.keys).map(Pid::as_raw);
    until("the job is in the foreground", || group() == Ok(front));
    kill(Pid::from_raw(command), Signal::SIGTERM).unwrap();
    until("gms ends", || proc::state(front).is_none());
    terminal.type_in("echo status $?\n");
    terminal.await_text("status 143");
    assert_eq!(terminal.seen.lock().unwrap().matches("interrupted").count(), 1);
    terminal.type_in("exit\n");
    terminal.shell.wait().unwrap();
}
