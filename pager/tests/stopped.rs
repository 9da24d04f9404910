//! Threads that are traced and end, execute another program, or do not stop: nobody waits for them in vain. Traces children of this test only.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::IntoRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use gms_pager::inject::{Frozen, InjectError, stop_beside};
use gms_pager::proc;
use gms_pager::stopped::{Stopped, reap_ended, release_late};
use memmap2::MmapMut;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, clone, unshare};
use nix::unistd::{Pid, gettid};
use userfaultfd::UffdBuilder;

/// Environment: what the child process does.
const ROLE: &str = "GMS_TEST_ROLE";
/// For anything that is awaited.
const DEADLINE: Duration = Duration::from_secs(20);

/// The child process: does nothing in an ordinary run of the tests.
#[test]
fn child() {
    match std::env::var(ROLE).as_deref() {
        Ok("threads") => {
            thread::spawn(|| {
                tell("idle");
                wait_for_byte(libc::STDERR_FILENO);
            });
            tell("executes");
            wait_for_byte(libc::STDIN_FILENO);
            panic!("true: {}", Command::new("true").exec());
        }
        Ok("exec") => {
            let faults = UffdBuilder::new().user_mode_only(false).create().unwrap();
            let page = MmapMut::map_anon(4096).unwrap();
            faults.register(page.as_ptr() as *mut _, page.len()).unwrap();
            // To execute a program is to look at this list, of which nobody hands the page over.
            // SAFETY: the kernel reads the list when the thread ends, and copes with what it finds.
            unsafe { libc::syscall(libc::SYS_set_robust_list, page.as_ptr(), 24) };
            panic!("true: {}", Command::new("true").exec());
        }
        Ok("takes over") => {
            let faults = UffdBuilder::new().user_mode_only(false).create().unwrap();
            let page = MmapMut::map_anon(4096).unwrap();
            faults.register(page.as_ptr() as *mut _, page.len()).unwrap();
            let name = page.as_ptr() as usize;
            thread::spawn(move || {
                tell("executes");
                let arguments = [name as *const libc::c_char, std::ptr::null()];
                // SAFETY: the list is ended, and so is the name, an empty one, once the page is there.
                unsafe { libc::execv(c"/bin/true".as_ptr(), arguments.as_ptr()) };
                panic!("true: {}", std::io::Error::last_os_error());
            });
            thread::spawn(move || {
                wait_for_byte(libc::STDIN_FILENO);
                // SAFETY: it is the page that was registered.
                unsafe { faults.zeropage(name as *mut _, 4096, true) }.unwrap();
            });
            loop {
                std::hint::spin_loop();
            }
        }
        Ok("threads exec") => {
            let script = script_of_a_dead_interpreter();
            for _ in 0..8 {
                thread::spawn(|| {
                    loop {
                        std::hint::spin_loop();
                    }
                });
            }
            panic!("a script: {}", Command::new(script).exec());
        }
        Ok("vfork") => {
            tell("forks");
            let child = Box::new(|| {
                wait_for_byte(libc::STDIN_FILENO);
                0
            });
            let mut stack = vec![0; 64 << 10];
            // SAFETY: the child has a copy of all memory, and only reads a byte.
            unsafe { clone(child, &mut stack, CloneFlags::CLONE_VFORK, None) }.unwrap();
        }
        _ => {}
    }
}

/// A directory of a subject of this test.
fn dir_of(pid: u32) -> PathBuf {
    std::env::temp_dir().join(format!("gms-stopped-{pid}"))
}

/// Whoever executes it waits for a filesystem that nobody serves.
fn script_of_a_dead_interpreter() -> PathBuf {
    let dir = dir_of(std::process::id());
    let (dead, script) = (dir.join("dead"), dir.join("script"));
    fs::create_dir_all(&dead).unwrap();
    fs::write(&script, format!("#!{}/x\n", dead.display())).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
    let fuse = fs::File::options().read(true).write(true).open("/dev/fuse").unwrap();
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", fuse.into_raw_fd());
    let kind = Some("fuse");
    mount(Some("dead"), &dead, kind, MsFlags::empty(), Some(options.as_str())).unwrap();
    script
}

fn tell(what: &str) {
    let line = format!("{what} {}\n", gettid());
    // SAFETY: a live buffer of this length. Not println, of which the test runner knows.
    unsafe { libc::write(libc::STDOUT_FILENO, line.as_ptr().cast(), line.len()) };
}

fn wait_for_byte(fd: i32) {
    let mut byte = 0u8;
    // SAFETY: one byte into a live one.
    unsafe { libc::read(fd, (&raw mut byte).cast(), 1) };
}

/// A child process, what it reads, and the end of the watch over the test.
struct Subject {
    process: Child,
    stdin: ChildStdin,
    out: BufReader<std::process::ChildStdout>,
    _over: Sender<()>,
}

impl Subject {
    fn start(role: &str) -> Subject {
        let (over, watch) = channel();
        // Whatever hangs cannot be ended from here: it sleeps in the kernel.
        thread::spawn(move || {
            if watch.recv_timeout(DEADLINE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                eprintln!("waited {DEADLINE:?} in vain");
                std::process::abort();
            }
        });
        // Of its standard error nobody holds the other end, so that to read it is to wait for ever.
        let (end, error) = nix::unistd::pipe().unwrap();
        std::mem::forget(error);
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["child", "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(end);
        // Not a child of the thread that traces, as nobody is of gms's.
        let mut process = thread::spawn(move || command.spawn().unwrap()).join().unwrap();
        let (stdin, out) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        Subject { process, stdin, out: BufReader::new(out), _over: over }
    }

    fn pid(&self) -> i32 {
        self.process.id() as i32
    }

    /// The thread that says this.
    fn thread(&mut self, what: &str) -> i32 {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.out.read_line(&mut line).unwrap(), 0, "{what} is not told");
            if let Some((_, tid)) = line.trim().split_once(&format!("{what} ")) {
                return tid.parse().unwrap();
            }
        }
    }
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !holds() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        thread::yield_now();
    }
}

#[test]
fn a_thread_that_dies_stopped_is_reaped() {
    let mut subject = Subject::start("threads");
    let idle = subject.thread("idle");
    let stopped = Stopped::new(idle).unwrap();
    subject.process.kill().unwrap();
    until("it is dead", || proc::state(idle) == Some('Z'));
    stopped.let_go();
    assert_eq!(release_late(), None);
    subject.process.wait().unwrap();
}

#[test]
fn an_exec_does_not_wait_for_the_dead_while_its_process_is_seized() {
    let mut subject = Subject::start("threads");
    let (pid, idle) = (subject.pid(), subject.thread("idle"));
    let stopped = Stopped::new(idle).unwrap();
    subject.stdin.write_all(&[1]).unwrap();
    until("it is dead", || proc::state(idle) == Some('Z'));
    let tracer = gettid().as_raw();
    let reaper = thread::spawn(move || {
        until("the tracer sleeps", || proc::blocked_in(tracer) == Some(libc::SYS_ptrace));
        reap_ended();
    });
    // Only the end of the exec lets this return.
    let seized = Stopped::new(pid);
    reaper.join().unwrap();
    seized.into_iter().for_each(Stopped::let_go);
    stopped.let_go();
    assert!(subject.process.wait().unwrap().success());
}

/// A process whose first thread spins while another executes a program, which goes on as soon as it is told to: that one has been asked to stop.
fn about_to_take_over() -> (Subject, Stopped) {
    let mut subject = Subject::start("takes over");
    let executes = subject.thread("executes");
    until("it sleeps in exec", || proc::blocked_in(executes) == Some(libc::SYS_execve));
    let late = Stopped::seize(executes).unwrap();
    (subject, late)
}

/// The other takes over the id of the first one.
fn take_over(subject: &mut Subject) {
    subject.stdin.write_all(&[1]).unwrap();
    let pid = subject.pid();
    until("the other is the first one", || {
        proc::threads(pid) == [pid] && proc::state(pid) == Some('t')
    });
}

fn all_are_let_go(mut subject: Subject) {
    until("all are let go", || release_late().is_none());
    let status = subject.process.wait().unwrap();
    assert!(status.success(), "{status}: it has got what was another's");
}

#[test]
fn whoever_takes_over_the_id_of_a_thread_does_not_get_its_registers() {
    let (mut subject, late) = about_to_take_over();
    let first = Stopped::new(subject.pid());
    take_over(&mut subject);
    first.into_iter().for_each(|mut first| {
        // Fails if it is known that it is another.
        let _ = first.restore();
        first.let_go();
    });
    late.let_go();
    all_are_let_go(subject);
}

#[test]
fn nor_if_that_had_stopped_before() {
    let mut subject = Subject::start("takes over");
    let executes = subject.thread("executes");
    let mut first = Stopped::new(subject.pid()).unwrap();
    first.restore().unwrap();
    until("it sleeps in exec", || proc::blocked_in(executes) == Some(libc::SYS_execve));
    let late = Stopped::seize(executes).unwrap();
    take_over(&mut subject);
    if first.block_signals().is_ok() {
        first.restore().unwrap();
    }
    first.let_go();
    late.let_go();
    all_are_let_go(subject);
}

#[test]
fn nobody_waits_for_an_exec_that_does_not_end() {
    let mut subject = Subject::start("exec");
    let pid = subject.pid();
    until("it sleeps in exec", || proc::blocked_in(pid) == Some(libc::SYS_execve));
    assert!(matches!(Stopped::new(pid), Err(InjectError::Unstoppable)));
    assert_eq!(release_late(), None);
    subject.process.kill().unwrap();
    subject.process.wait().unwrap();
}

/// Of a process one thread of which executes a program: that is waited for once, not with each of its threads.
#[test]
fn nobody_waits_for_each_thread_of_an_exec_that_does_not_end() {
    let mut subject = Subject::start("threads exec");
    let pid = subject.pid();
    let executes = |tid: &i32| proc::blocked_in(*tid) == Some(libc::SYS_execve);
    until("it sleeps in exec", || proc::threads(pid).iter().any(executes));
    let began = Instant::now();
    let frozen = Frozen::new(pid);
    let took = began.elapsed();
    let given_up = matches!(frozen, Err(InjectError::Unstoppable));
    drop(frozen);
    subject.process.kill().unwrap();
    subject.process.wait().unwrap();
    fs::remove_dir_all(dir_of(pid as u32)).unwrap();
    assert!(given_up && release_late().is_none());
    assert!(took < Duration::from_secs(1), "given up after {took:?}");
}

#[test]
fn a_thread_that_does_not_stop_is_looked_at_less_and_less_often() {
    let mut subject = Subject::start("vfork");
    let forks = subject.thread("forks");
    until("it waits for its child", || proc::state(forks) == Some('D'));
    assert!(matches!(Stopped::new(forks), Err(InjectError::Unstoppable)));
    let (mut looks, start) = (0, Instant::now());
    while start.elapsed() < Duration::from_millis(500) {
        let pause = release_late().expect("it cannot have stopped");
        assert!(pause >= Duration::from_millis(1));
        thread::park_timeout(pause);
        looks += 1;
    }
    assert!(looks < 50, "{looks} looks");
    subject.stdin.write_all(&[1]).unwrap();
    until("it is let go", || release_late().is_none());
    assert!(subject.process.wait().unwrap().success());
}

#[test]
fn our_own_tracing_is_not_taken_for_a_debugger() {
    let mut subject = Subject::start("threads");
    subject.thread("idle");
    let stopped = Stopped::new(subject.pid()).unwrap();
    assert!(matches!(Frozen::new(subject.pid()), Err(InjectError::Unstoppable)));
    stopped.let_go();
    subject.process.kill().unwrap();
    subject.process.wait().unwrap();
}

#[test]
fn whoever_has_got_the_id_of_a_thread_is_not_stopped_for_it() {
    let (mut subject, mut stranger) = (Subject::start("threads"), Subject::start("threads"));
    let (evictor, foreign) = (Pid::from_raw(subject.thread("idle")), stranger.thread("idle"));
    assert!(stop_beside(foreign, evictor).is_err());
    let tracer = |tid| proc::status_field(tid, "TracerPid:");
    assert_eq!((tracer(foreign), tracer(stranger.pid())), (Some(0), Some(0)));
    let thread = stop_beside(subject.pid(), evictor).unwrap();
    assert_eq!(
        proc::threads(subject.pid()).iter().filter(|tid| tracer(**tid) != Some(0)).count(),
        1
    );
    thread.let_go();
    for subject in [&mut subject, &mut stranger] {
        subject.process.kill().unwrap();
        subject.process.wait().unwrap();
    }
}
