//! Pagers that are asked, and those that do not answer as they should.

use super::*;
use std::cell::Cell;

pub(crate) fn scratch(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("gms-control-test-{}-{name}", self_pid()));
    let _ = fs::remove_dir_all(&dir);
    DirBuilder::new().mode(0o700).create(&dir).unwrap();
    dir
}

fn workload() -> Workload {
    let stats = Stats { pid: 7, supervisor_pid: self_pid(), faults: 9, ..Stats::default() };
    Workload { stats, front_pid: 6 }
}

/// The way to the socket of this process in a directory.
fn door(dir: &Path) -> Door {
    let mut doors = doors::of(dir, &[geteuid().as_raw()]);
    assert_eq!(doors.len(), 1);
    doors.remove(0)
}

fn detached(lost: Option<&str>) -> Outcome {
    Outcome::Detached { lost: lost.map(str::to_owned), is_forced: false }
}

/// Serves `server` until the other thread is done; returns how often a detach was asked for.
fn serve(
    server: &mut Server,
    client: std::thread::JoinHandle<()>,
    outcome: Option<&Outcome>,
) -> u32 {
    let detaches = Cell::new(0);
    while !client.is_finished() {
        server.serve(Instant::now(), workload, || detaches.set(detaches.get() + 1));
        if let Some(outcome) = outcome.filter(|_| detaches.get() > 0) {
            server.ended(outcome);
        }
        std::thread::yield_now();
    }
    client.join().unwrap();
    detaches.get()
}

#[test]
fn status_and_detach_are_answered() {
    let dir = scratch("ask");
    let mut server = Server::open_in(&dir, self_pid()).unwrap();
    let door = door(&dir);
    let client = std::thread::spawn(move || {
        let workload = ask_status(&door).unwrap();
        assert_eq!((workload.stats.pid, workload.stats.faults, workload.front_pid), (7, 9, 6));
        let reply =
            ask_patiently(&door, &Request::Detach, REQUEST_DEADLINE, &mut || false).unwrap();
        assert!(matches!(reply, Reply::Detached), "{reply:?}");
    });
    assert_eq!(serve(&mut server, client, Some(&detached(None))), 1);
    drop(server);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "the socket stayed behind");
    fs::remove_dir(&dir).unwrap();
}

#[test]
fn a_detach_tells_how_the_session_ended() {
    let outcomes = [
        (detached(None), Ok(DetachEnd::Detached)),
        (detached(Some("3 pages")), Ok(DetachEnd::Lost("3 pages".into()))),
        (Outcome::TreeGone, Ok(DetachEnd::Ended)),
        (Outcome::Killed("no agent".into()), Ok(DetachEnd::Killed("no agent".into()))),
        (Outcome::Refused("a tracer".into()), Err("a tracer")),
    ];
    for (number, (outcome, expected)) in outcomes.into_iter().enumerate() {
        let dir = scratch(&format!("end-{number}"));
        let mut server = Server::open_in(&dir, i32::MAX).unwrap();
        let door = door(&dir);
        let client = std::thread::spawn(move || match detach_by(&door, |_| ()) {
            Err(ControlError::NoAnswer { reason, .. }) => assert_eq!(Err(&*reason), expected),
            other => assert_eq!(Ok(other.unwrap()), expected),
        });
        assert_eq!(serve(&mut server, client, Some(&outcome)), 1);
        fs::remove_dir_all(&dir).unwrap();
    }
}

#[test]
fn a_pager_that_ends_without_a_word_has_not_detached() {
    let dir = scratch("wordless");
    let mut server = Server::open_in(&dir, i32::MAX).unwrap();
    let door = door(&dir);
    let client = std::thread::spawn(move || detach_by(&door, |_| ()));
    let asked = Cell::new(false);
    while !asked.get() {
        server.serve(Instant::now(), workload, || asked.set(true));
        std::thread::yield_now();
    }
    drop(server);
    let error = client.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("did not say how"), "{error}");
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn patience_is_asked_for_after_each_period() {
    let dir = scratch("patience");
    let server = Server::open_in(&dir, i32::MAX).unwrap();
    let mut asked = 0;
    let mut patient = || {
        asked += 1;
        asked < 3
    };
    let period = Duration::from_millis(1);
    let error = ask_patiently(&door(&dir), &Request::Detach, period, &mut patient).unwrap_err();
    assert_eq!((error.kind(), asked), (ErrorKind::TimedOut, 3));
    drop(server);
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn nonsense_is_refused_and_bounded() {
    let dir = scratch("nonsense");
    let mut server = Server::open_in(&dir, self_pid()).unwrap();
    let door = door(&dir);
    let client = std::thread::spawn(move || {
        let long = vec![b'x'; REQUEST_BYTES_MAX + 1];
        for line in [&b"{\"op\":\"destroy\"}\n"[..], b"\n", b"\xff\xfe\n", b"[[[[[[\n", &long] {
            let mut stream = door.connect().unwrap();
            stream.write_all(line).unwrap();
            stream.set_read_timeout(Some(REQUEST_DEADLINE)).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert!(answer.starts_with("{\"error\":"), "{line:?}: {answer}");
        }
    });
    assert_eq!(serve(&mut server, client, None), 0);
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn idle_clients_and_crowds_are_turned_away() {
    let dir = scratch("crowd");
    let mut server = Server::open_in(&dir, self_pid()).unwrap();
    let crowd: Vec<_> = (0..CLIENTS_MAX + 9).map(|_| door(&dir).connect().unwrap()).collect();
    let now = Instant::now();
    server.serve(now, workload, || ());
    assert_eq!(server.clients.len(), CLIENTS_MAX);
    server.serve(now + REQUEST_DEADLINE, workload, || ());
    assert_eq!(server.clients.len(), 0);
    drop(crowd);
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn who_never_answers_delays_little() {
    let (dir, own) = (scratch("mute"), geteuid().as_raw());
    // The user's own directory, and what would be it too if numbers could be written otherwise.
    let zeros = (1..20).map(|zeros| format!("gms-{}{own}", "0".repeat(zeros)));
    let names = zeros.chain([format!("gms-+{own}"), format!("gms-{own}")]);
    let dirs: Vec<PathBuf> = names.map(|name| dir.join(name)).collect();
    let mut mute = Vec::new();
    for dir in &dirs {
        DirBuilder::new().mode(0o700).create(dir).unwrap();
        for other in [format!("0{}.sock", self_pid()), format!("+{}.sock", self_pid())] {
            drop(UnixListener::bind(dir.join(other)).unwrap());
        }
        mute.push(UnixListener::bind(dir.join(format!("{}.sock", self_pid()))).unwrap());
    }
    let strangers = (0..20).map(|n| dirs[0].join(format!("{}.sock", 2_000_000_000 + n)));
    mute.extend(strangers.map(|path| UnixListener::bind(path).unwrap()));
    let until = Instant::now() + REQUEST_DEADLINE;
    let found: Vec<_> = doors::numbered(&dir, "gms-", until).collect();
    assert_eq!(found, [(dir.join(format!("gms-{own}")), own)]);
    let doors: Vec<Door> = dirs.iter().flat_map(|dir| doors::of(dir, &[own])).collect();
    assert_eq!(doors.iter().filter(|door| door.pid() == self_pid()).count(), dirs.len());
    let start = Instant::now();
    assert!(ask_all(doors).is_empty());
    assert!(start.elapsed() < 2 * REQUEST_DEADLINE, "{:?}", start.elapsed());
    drop(mute);
    fs::remove_dir_all(&dir).unwrap();
}

/// Directories of this user below `dir` with a socket of this process each, and who listens there.
fn many(dir: &Path, count: usize) -> (Vec<PathBuf>, Vec<UnixListener>) {
    let dirs: Vec<PathBuf> = (0..count).map(|n| dir.join(n.to_string())).collect();
    let listen = |dir: &PathBuf| {
        DirBuilder::new().mode(0o700).create(dir).unwrap();
        UnixListener::bind(dir.join(format!("{}.sock", self_pid()))).unwrap()
    };
    let listeners = dirs.iter().map(listen).collect();
    (dirs, listeners)
}

#[test]
fn many_who_never_answer_delay_little_and_hold_few_descriptors() {
    let dir = scratch("deaf");
    let (dirs, listeners) = many(&dir, 60);
    let (most, mut open) = (10, Vec::new());
    let doors = dirs.iter().flat_map(|dir| doors::of(dir, &[geteuid().as_raw()]));
    let doors = doors.inspect(|door| {
        open.push(door.watch());
        let open = open.iter().filter(|dir| dir.strong_count() > 0).count();
        assert!(open <= most + 1, "{open}");
    });
    let start = Instant::now();
    assert!(ask_in_turns(doors, most).is_empty());
    assert!(start.elapsed() < 2 * ALL_DEADLINE, "{:?}", start.elapsed());
    drop(listeners);
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn of_one_user_a_bounded_number_of_bytes_is_kept() {
    let dir = scratch("hoard");
    let (dirs, listeners) = many(&dir, 60);
    let agent = AgentStats { addr: "\u{1f600}".repeat(200), ..AgentStats::default() };
    let command = "\u{1f600}".repeat(COMMAND_CHARS_MAX);
    let stats = Stats { command, agents: vec![agent; AGENTS_MAX], ..workload().stats };
    let line = line_of(&Reply::Workload(Box::new(Workload { stats, front_pid: self_pid() })));
    assert!(line.len() <= REPLY_BYTES_MAX, "{}", line.len());
    let server = std::thread::spawn(move || {
        for listener in listeners {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; 16]).unwrap();
            // Whoever asks may have given up.
            let _ = stream.write_all(&line);
        }
    });
    let found = ask_all(dirs.iter().flat_map(|dir| doors::of(dir, &[geteuid().as_raw()])));
    server.join().unwrap();
    let kept: usize = found.iter().map(Workload::len).sum();
    assert!((KEPT_BYTES_MAX / 2..=KEPT_BYTES_MAX).contains(&kept), "{kept} of {}", found.len());
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_long_command_line_hides_no_workload() {
    let dir = scratch("long");
    let mut server = Server::open_in(&dir, self_pid()).unwrap();
    let door = door(&dir);
    let long = || {
        let mut workload = workload();
        workload.stats.command = "\u{1}".repeat(1 << 20);
        let agent = AgentStats { addr: "\u{1}".repeat(1 << 10), ..AgentStats::default() };
        workload.stats.agents = vec![agent; AGENTS_MAX];
        workload
    };
    // It comes whole although nobody reads it meanwhile.
    let stream = send(&door, &Request::Status).unwrap();
    let mut serve = || server.serve(Instant::now(), long, || ());
    serve();
    let told = status_of(&door, stream, Instant::now() + REQUEST_DEADLINE).unwrap();
    assert_eq!(told.stats.command.chars().count(), COMMAND_CHARS_MAX);
    assert!(told.stats.command.ends_with("\u{1}..."));
    assert_eq!((told.stats.agents.len(), told.stats.faults), (AGENTS_MAX, 9));
    fs::remove_dir_all(&dir).unwrap();
}

/// Has user 65534 listen as this process's pager and give an answer to what root asks.
fn told<R>(dir: &Path, answer: Vec<u8>, ask: impl FnOnce(Vec<Door>) -> R) -> R {
    std::os::unix::fs::chown(dir, Some(65534), Some(65534)).unwrap();
    let path = dir.join(format!("{}.sock", self_pid()));
    let stranger = std::thread::spawn(move || {
        // SAFETY: the call changes the ids of this thread alone, which ends soon.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, -1, 65534, -1) }, 0);
        UnixListener::bind(path).unwrap()
    });
    let listener = stranger.join().unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 16]).unwrap();
        stream.write_all(&answer).unwrap();
    });
    let found = ask(doors::of(dir, &[65534]));
    server.join().unwrap();
    fs::remove_file(dir.join(format!("{}.sock", self_pid()))).unwrap();
    found
}

fn claimed(dir: &Path, workload: &Workload) -> Vec<Workload> {
    told(dir, line_of(&Reply::Workload(Box::new(workload.clone()))), ask_all)
}

#[test]
fn what_a_pager_says_does_not_control_the_terminal() {
    if !geteuid().is_root() {
        return eprintln!("SKIPPED: only root asks the pagers of others");
    }
    let dir = scratch("words");
    let words = "\u{1b}]0;x\u{7}\u{9b}2J\u{202e}".repeat(1 << 12);
    let unknown = [(&words, 1)].into_iter().collect::<std::collections::BTreeMap<_, _>>();
    let (lost, error) = (Reply::Lost(words.clone()), Reply::Error(words.clone()));
    for answer in [line_of(&lost), line_of(&error), line_of(&unknown)] {
        let text = match told(&dir, answer, |doors| detach_by(&doors[0], |_| ())) {
            Ok(DetachEnd::Lost(text)) => text,
            end => end.unwrap_err().to_string(),
        };
        assert!(text.contains("]0;x"), "{text}");
        assert!(!text.contains(['\u{1b}', '\u{7}', '\u{9b}', '\u{202e}']), "{text:?}");
        assert!(text.len() < 2 * TEXT_CHARS_MAX, "{}", text.len());
    }
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn nobody_claims_the_processes_of_others() {
    if !geteuid().is_root() {
        return eprintln!("SKIPPED: only root asks the pagers of others");
    }
    let dir = scratch("claims");
    let (gone, init) = (i32::MAX, 1);
    let stats = Stats { pid: gone, ..workload().stats };
    let honest = Workload { stats, front_pid: gone };
    assert_eq!(claimed(&dir, &honest).len(), 1, "processes that are gone are nobody's");
    let stats = Stats { pid: init, ..honest.stats.clone() };
    assert!(claimed(&dir, &Workload { stats, ..honest }).is_empty(), "another's root");
    assert!(claimed(&dir, &Workload { front_pid: init, ..honest.clone() }).is_empty());
    let stats = Stats { supervisor_pid: init, ..honest.stats };
    assert!(claimed(&dir, &Workload { stats, front_pid: gone }).is_empty(), "another pager");
    fs::remove_dir_all(&dir).unwrap();
}
