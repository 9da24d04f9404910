//! Threads that are traced and end, execute another program, or do not stop: nobody waits for them in vain. Traces children of this test only.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use gms_pager::inject::{Frozen, Outside, stop_beside};
use gms_pager::kernel::proc;
use gms_pager::stopped::{InjectError, Stopped, reap_ended, release_late};
use memmap2::MmapMut;
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, clone, unshare};
use nix::sys::epoll::{Epoll, EpollCreateFlags};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction};
use nix::unistd::{Pid, gettid};
use userfaultfd::{FeatureFlags, UffdBuilder};

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
        Ok("takes over") => executes_when_told(),
        Ok("threads exec") => {
            let script = script_of_a_dead_interpreter();
            (0..8).for_each(|_| drop(thread::spawn(spin)));
            panic!("a script: {}", Command::new(script).exec());
        }
        Ok("threads run") => {
            (0..8).for_each(|_| drop(thread::spawn(spin)));
            tell("rests");
            wait_for_byte(libc::STDIN_FILENO);
        }
        Ok("io_uring") => looks_for_work(),
        Ok("epoll") => waits_for_signals(),
        Ok(role @ ("removes" | "advises" | "reads")) => touches_what_nobody_gives(role),
        Ok("descriptors") => thread::spawn(kills_what_it_traces).join().unwrap(),
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

fn executes_when_told() {
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
    spin();
}

fn spin() {
    loop {
        std::hint::spin_loop();
    }
}

/// Memory of which nobody reads what is told: it is removed, or waited for in a system call that could remove some, or in another while signals come.
fn touches_what_nobody_gives(role: &str) {
    extern "C" fn handled(_: libc::c_int) {}
    let removes = FeatureFlags::EVENT_REMOVE;
    let mut faults = UffdBuilder::new();
    let faults = faults.user_mode_only(false).require_features(removes).create().unwrap();
    let page = MmapMut::map_anon(4096).unwrap();
    let at = page.as_ptr() as usize;
    faults.register(page.as_ptr() as *mut _, page.len()).unwrap();
    let action = SigAction::new(SigHandler::Handler(handled), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handler does nothing.
    unsafe { sigaction(Signal::SIGUSR1, &action) }.unwrap();
    let zeros = fs::File::open("/dev/zero").unwrap();
    tell(role);
    // SAFETY: the page is there, and nobody else's.
    unsafe {
        match role {
            "removes" => libc::syscall(libc::SYS_madvise, at, 4096, libc::MADV_DONTNEED),
            "advises" => libc::syscall(libc::SYS_process_madvise, 0, at, 1, libc::MADV_COLD, 0),
            _ => libc::syscall(libc::SYS_read, zeros.as_raw_fd(), at, 4096),
        }
    };
}

fn looks_for_work() {
    // What io_uring_params is needed of: flags (IORING_SETUP_SQPOLL) and how long its thread looks for work, in ms.
    let mut parameters = [0u32; 30];
    (parameters[2], parameters[4]) = (2, 60_000);
    // SAFETY: a live struct io_uring_params, whose other fields are zero.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 8, parameters.as_mut_ptr()) };
    assert!(ring >= 0, "io_uring: {}", std::io::Error::last_os_error());
    // Its thread sleeps at first; IORING_ENTER_SQ_WAKEUP.
    until("it looks for work", || {
        // SAFETY: no memory is involved.
        unsafe { libc::syscall(libc::SYS_io_uring_enter, ring, 0, 0, 2, 0, 0) };
        workers(std::process::id() as i32).iter().any(|&tid| proc::state(tid) == Some('R'))
    });
    tell("rests");
    wait_for_byte(libc::STDIN_FILENO);
}

fn waits_for_signals() {
    extern "C" fn handled(_: libc::c_int) {}
    let action = SigAction::new(SigHandler::Handler(handled), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handler does nothing.
    unsafe { sigaction(Signal::SIGUSR1, &action) }.unwrap();
    // Let through while it waits only, so that none can come before.
    SigSet::from(Signal::SIGUSR1).thread_block().unwrap();
    let none = SigSet::empty();
    let epoll = Epoll::new(EpollCreateFlags::empty()).unwrap();
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    tell("waits");
    loop {
        // SAFETY: room for the one event that it may write.
        let waited =
            unsafe { libc::epoll_pwait(epoll.0.as_raw_fd(), &raw mut event, 1, -1, none.as_ref()) };
        assert_eq!((waited, Errno::last()), (-1, Errno::EINTR));
        tell("interrupted");
    }
}

/// Its child dies traced, when it can open nothing to find out whose child that is: its exit status is not taken for that of a stranger.
fn kills_what_it_traces() {
    let mut sleep = Command::new("sleep");
    let mut sleep = thread::spawn(move || sleep.arg("100").spawn().unwrap()).join().unwrap();
    let pid = sleep.id() as i32;
    until("it sleeps", || proc::state(pid) == Some('S'));
    let stopped = in_time(|| Stopped::new(pid));
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    sleep.kill().unwrap();
    until("it is dead", || proc::state(pid) == Some('Z'));
    setrlimit(Resource::RLIMIT_NOFILE, 0, hard).unwrap();
    stopped.let_go();
    release_late();
    reap_ended();
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    release_late();
    let ended = sleep.wait().unwrap();
    until("it is let go", || release_late().is_none());
    tell(if ended.code().is_none() { "killed" } else { "lost" });
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

impl Drop for Subject {
    fn drop(&mut self) {
        // One of which nobody reads faults runs on by itself. It may have ended.
        let _ = self.process.kill();
    }
}

impl Subject {
    fn start(role: &str) -> Subject {
        let (over, watch) = channel();
        let test = thread::current();
        // Whatever hangs cannot be ended from here: it sleeps in the kernel.
        thread::spawn(move || {
            if watch.recv_timeout(DEADLINE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                // Not eprintln, which the test runner keeps until a test is over.
                let _ =
                    writeln!(std::io::stderr(), "{:?}: waited {DEADLINE:?} in vain", test.name());
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

    fn end(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
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

/// What comes of an attempt to stop threads, which is made again if one of them has got no CPU to stop on in time.
fn in_time<T>(mut attempt: impl FnMut() -> Result<T, InjectError>) -> T {
    let mut done = None;
    until("whoever is to stop does", || {
        // Others may be held meanwhile, so that somebody is always late.
        release_late();
        match attempt() {
            Ok(outcome) => done = Some(outcome),
            // One that is late is traced still, which is not permitted twice.
            Err(InjectError::Unstoppable | InjectError::NotPermitted(_)) => {}
            Err(error) => panic!("{error}"),
        }
        done.is_some()
    });
    done.unwrap()
}

/// Until a look finds all its threads outside madvise: one of the test runner's may be late.
fn until_outside(subject: &Subject) {
    until("it is outside", || release_late().is_none() && Outside::default().has(subject.pid()));
}

#[test]
fn who_removes_memory_is_in_madvise_and_who_waits_for_a_page_is_not() {
    let mut subject = Subject::start("removes");
    let tid = subject.thread("removes");
    until("it removes", || proc::blocked_in(tid) == Some(libc::SYS_madvise));
    assert!(!Outside::default().has(subject.pid()));
    subject.end();
    assert!(Outside::default().has(subject.pid()), "it has ended");
    let mut subject = Subject::start("advises");
    let tid = subject.thread("advises");
    until("it waits", || proc::waits_for_page(tid));
    until_outside(&subject);
    subject.end();
}

/// It faults again and again, and cannot be stopped.
#[test]
fn who_waits_for_a_page_with_a_signal_pending_is_seen_by_its_faults() {
    let mut subject = Subject::start("reads");
    let (tid, mut outside) = (subject.thread("reads"), Outside::default());
    until("it sleeps", || proc::waits_for_page(tid));
    until_outside(&subject);
    signal(subject.pid(), tid);
    until("it runs", || proc::blocked_in(tid).is_none());
    outside.faulting.insert(subject.pid());
    assert!(!outside.has(subject.pid()), "another has told of faults");
    outside.faulting.insert(tid);
    assert!(outside.has(subject.pid()));
    outside.faulting.clear();
    assert!(outside.has(subject.pid()), "it is remembered");
    subject.process.kill().unwrap();
    until("it is let go", || release_late().is_none());
    subject.process.wait().unwrap();
}

#[test]
fn a_thread_that_dies_stopped_is_reaped() {
    let mut subject = Subject::start("threads");
    let idle = subject.thread("idle");
    let stopped = in_time(|| Stopped::new(idle));
    subject.process.kill().unwrap();
    until("it is dead", || proc::state(idle) == Some('Z'));
    stopped.let_go();
    assert_eq!(release_late(), None);
    subject.process.wait().unwrap();
}

#[test]
fn a_status_is_left_to_whoever_waits_for_it_also_without_descriptors() {
    let mut subject = Subject::start("descriptors");
    subject.thread("killed");
    assert!(subject.process.wait().unwrap().success());
}

#[test]
fn an_exec_does_not_wait_for_the_dead_while_its_process_is_seized() {
    let mut subject = Subject::start("threads");
    let (pid, idle) = (subject.pid(), subject.thread("idle"));
    let stopped = in_time(|| Stopped::new(idle));
    subject.stdin.write_all(&[1]).unwrap();
    until("it is dead", || proc::state(idle) == Some('Z'));
    let (tracer, reaped) = (gettid().as_raw(), AtomicBool::new(false));
    let seized = thread::scope(|scope| {
        scope.spawn(|| {
            until("the tracer sleeps", || proc::blocked_in(tracer) == Some(libc::SYS_ptrace));
            reap_ended();
            reaped.store(true, Ordering::Relaxed);
        });
        // Only the end of the exec lets this succeed; it gives up if nobody has reaped for a while, as on a busy machine.
        loop {
            let seized = Stopped::new(pid);
            if seized.is_ok() || reaped.load(Ordering::Relaxed) {
                break seized;
            }
        }
    });
    seized.into_iter().for_each(Stopped::let_go);
    stopped.let_go();
    // It may have been seized and got no CPU to stop on.
    all_are_let_go(subject);
}

/// A process whose first thread spins while another executes a program, which goes on as soon as it is told to: that one has been asked to stop.
fn about_to_take_over() -> (Subject, Stopped) {
    let mut subject = Subject::start("takes over");
    let executes = subject.thread("executes");
    until("it sleeps in exec", || sleeps_in_exec(executes));
    let late = Stopped::seize(executes).unwrap();
    (subject, late)
}

/// Whether a thread that executes a program waits for the page that nobody hands over: it sleeps on its way there too.
fn sleeps_in_exec(tid: i32) -> bool {
    proc::blocked_in(tid) == Some(libc::SYS_execve)
        && proc::asleep_in(tid).as_deref() == Some("handle_userfault")
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
    let mut first = in_time(|| Stopped::new(subject.pid()));
    first.restore().unwrap();
    until("it sleeps in exec", || sleeps_in_exec(executes));
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
    until("it sleeps in exec", || sleeps_in_exec(pid));
    let refused = Stopped::new(pid).map(Stopped::let_go);
    assert!(matches!(refused, Err(InjectError::Unstoppable)), "{refused:?}");
    assert_eq!(release_late(), None);
    subject.end();
}

/// Of a process one thread of which executes a program: that is waited for once, not with each of its threads.
#[test]
fn nobody_waits_for_each_thread_of_an_exec_that_does_not_end() {
    let mut subject = Subject::start("threads exec");
    let pid = subject.pid();
    let executes = |tid: &i32| proc::blocked_in(*tid) == Some(libc::SYS_execve);
    until("it sleeps in exec", || proc::threads(pid).iter().any(executes));
    // Its threads need the CPUs as well: the best of several, as to wait for each of them would take long each time.
    let attempts = [(); 3].map(|()| {
        let began = Instant::now();
        let frozen = Frozen::new(pid);
        let took = began.elapsed();
        (took, matches!(frozen, Err(InjectError::Unstoppable)))
    });
    let took = attempts.map(|(took, _)| took).into_iter().min().unwrap();
    let given_up = attempts.iter().all(|(_, given_up)| *given_up);
    subject.end();
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

/// Of a process with many threads one starts an evictor: all go on.
#[test]
fn all_threads_of_a_process_that_is_injected_into_run_on() {
    let mut subject = Subject::start("threads run");
    subject.thread("rests");
    let pid = subject.pid();
    let running = || proc::in_state(pid, "R", |_| false).len();
    until("its threads run", || running() == 8);
    let (frozen, stopped) = in_time(|| {
        let mut frozen = Frozen::new(pid)?;
        frozen.inject(|_| Ok(()))?;
        Ok((frozen, 8 - running()))
    });
    drop(frozen);
    until("all are let go", || release_late().is_none());
    until("its threads run", || running() == 8);
    subject.end();
    assert!(stopped > 0, "none was stopped any more after the injection");
}

/// Threads of io_uring.
fn workers(pid: i32) -> Vec<i32> {
    let is_one = |tid: &i32| proc::thread_name(*tid).is_some_and(|name| name.starts_with("iou-"));
    proc::threads(pid).into_iter().filter(is_one).collect()
}

/// Whoever runs in the kernel only is left alone: nothing could be injected into it, and it would stay traced.
#[test]
fn threads_of_the_kernel_are_not_stopped() {
    let mut subject = Subject::start("io_uring");
    subject.thread("rests");
    let pid = subject.pid();
    let (frozen, injected) = in_time(|| {
        let mut frozen = Frozen::new(pid)?;
        let injected = frozen.inject(|_| Ok(()))?;
        Ok((frozen, injected))
    });
    let tracers: Vec<_> =
        workers(pid).iter().map(|&tid| proc::status_field(tid, "TracerPid:")).collect();
    drop(frozen);
    let runs = |tid: &i32| proc::state(*tid) == Some('R');
    until("its own threads sleep again", || {
        proc::threads(pid).into_iter().filter(runs).eq(workers(pid))
    });
    let beside = in_time(|| stop_beside(pid, injected.evictor));
    let beside_is_one = workers(pid).contains(&beside.tid.as_raw());
    beside.let_go();
    assert!(!beside_is_one, "its own threads sleep");
    assert_eq!(tracers, [Some(0)]);
    until("all are let go", || release_late().is_none());
    subject.end();
}

#[test]
fn a_process_that_is_stopped_meanwhile_stays_so() {
    // It has one thread, which is to take the signal.
    let mut command = Command::new("sh");
    command.args(["-c", "echo runs; while :; do :; done"]).stdout(Stdio::piped());
    let mut process = thread::spawn(move || command.spawn().unwrap()).join().unwrap();
    let (pid, mut line) = (process.id() as i32, String::new());
    BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let signal = |signal| kill(Pid::from_raw(pid), signal).unwrap();
    let deadline = Instant::now() + DEADLINE / 2;
    let injected = loop {
        let mut frozen = Frozen::new(pid).unwrap();
        signal(Signal::SIGSTOP);
        let injected = frozen.inject(|_| Ok(()));
        drop(frozen);
        until("all are let go", || release_late().is_none());
        // It may have got no CPU to stop on.
        let is_late = matches!(injected, Err(InjectError::Unstoppable));
        if !is_late || Instant::now() > deadline {
            break injected;
        }
        signal(Signal::SIGCONT);
        until("it runs", || proc::state(pid) == Some('R'));
    };
    // It takes the signal as soon as it has a CPU.
    let deadline = Instant::now() + DEADLINE;
    let mut state = None;
    while state != Some('T') && Instant::now() < deadline {
        state = proc::state(pid);
    }
    process.kill().unwrap();
    process.wait().unwrap();
    assert!(injected.is_ok() && state == Some('T'), "{injected:?} {state:?}");
}

/// Signals one thread, not any of its process.
fn signal(pid: i32, tid: i32) {
    // SAFETY: no memory is involved.
    assert_eq!(unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, libc::SIGUSR1) }, 0);
}

/// A call fails for each signal that is handled while it waits, no more and no less, though its thread is stopped all the time.
#[test]
fn calls_fail_as_often_as_signals_are_handled() {
    const SIGNALS: usize = 2000;
    const SIGNALS_MIN: usize = 200;
    let mut subject = Subject::start("epoll");
    let (waits, pid) = (subject.thread("waits"), subject.pid());
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                Stopped::new(waits).into_iter().for_each(Stopped::let_go);
                Stopped::seize(waits).into_iter().for_each(Stopped::let_go);
                release_late();
            }
            until("all are let go", || release_late().is_none());
        });
        let began = Instant::now();
        for sent in 0..SIGNALS {
            // Each needs both to get a CPU: on a busy machine fewer prove as much.
            if sent >= SIGNALS_MIN && began.elapsed() > DEADLINE / 2 {
                break;
            }
            signal(pid, waits);
            subject.thread("interrupted");
        }
        over.store(true, Ordering::Relaxed);
    });
    subject.end();
}

/// A call that is injected and lasts: its thread goes on when that is over as if nothing had been.
#[test]
fn a_thread_that_does_not_come_back_in_time_is_let_go_when_it_does() {
    let mut subject = Subject::start("epoll");
    let waits = subject.thread("waits");
    until("it waits", || proc::blocked_in(waits) == Some(libc::SYS_epoll_pwait));
    let maps = proc::maps(waits).unwrap();
    let vdso = maps.into_iter().find(|mapping| mapping.name == "[vdso]").unwrap().range;
    let mut code = vec![0; (vdso.end - vdso.start) as usize];
    let memory = fs::File::open(format!("/proc/{waits}/mem")).unwrap();
    memory.read_exact_at(&mut code, vdso.start).unwrap();
    let at = code.windows(2).position(|window| window == [0x0f, 0x05]).unwrap();
    let mut stopped = in_time(|| Stopped::new(waits));
    let lasting =
        stopped.syscall(vdso.start + at as u64, "poll", libc::SYS_poll, [0, 0, 6000, 0, 0, 0]);
    assert!(matches!(lasting, Err(InjectError::Unstoppable)), "{lasting:?}");
    assert!(stopped.restore().is_err());
    stopped.let_go();
    assert!(release_late().is_some());
    until("it is let go", || release_late().is_none());
    until("it waits", || proc::blocked_in(waits) == Some(libc::SYS_epoll_pwait));
    signal(subject.pid(), waits);
    subject.thread("interrupted");
    subject.end();
}

#[test]
fn our_own_tracing_is_not_taken_for_a_debugger() {
    let mut subject = Subject::start("threads");
    subject.thread("idle");
    let stopped = in_time(|| Stopped::new(subject.pid()));
    assert!(matches!(Frozen::new(subject.pid()), Err(InjectError::Unstoppable)));
    stopped.let_go();
    subject.end();
}

#[test]
fn whoever_has_got_the_id_of_a_thread_is_not_stopped_for_it() {
    let (mut subject, mut stranger) = (Subject::start("threads"), Subject::start("threads"));
    let (evictor, foreign) = (Pid::from_raw(subject.thread("idle")), stranger.thread("idle"));
    assert!(stop_beside(foreign, evictor).is_err());
    let tracer = |tid| proc::status_field(tid, "TracerPid:");
    assert_eq!((tracer(foreign), tracer(stranger.pid())), (Some(0), Some(0)));
    let thread = in_time(|| stop_beside(subject.pid(), evictor));
    until("that thread alone is traced", || {
        release_late();
        proc::threads(subject.pid()).iter().filter(|tid| tracer(**tid) != Some(0)).count() == 1
    });
    thread.let_go();
    for subject in [&mut subject, &mut stranger] {
        subject.process.kill().unwrap();
        subject.process.wait().unwrap();
    }
}
