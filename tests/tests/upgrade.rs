//! `gms upgrade`: another binary goes on with a workload, and no page is lost or wrong.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gms_tests::*;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const SOON: Duration = Duration::from_secs(30);
/// Of redis; of what ends by itself at most twice as many.
const UPGRADES: usize = 10;
/// Of others: the second is of a pager that was upgraded, and the third has a former keeper behind it.
const UPGRADES_FEW: usize = 4;
/// For what an agent had to be written anew: it counts as gone after 10 s.
const PARITY_LIMIT: Duration = Duration::from_secs(200);

/// `gms upgrade PID --binary FILE`.
fn upgrade_line(pid: i32, binary: &Path) -> Gms {
    Gms::line(["upgrade"]).arg(pid.to_string()).arg("--binary").arg(binary)
}

fn upgrade(pid: i32, binary: &Path) -> Outcome {
    upgrade_line(pid, binary).finish()
}

/// Copies of gms, each at a path of its own, the one before removed: that binary cannot be executed by its name any more.
struct Copies<'a> {
    stage: &'a Stage,
    made: usize,
    last: Option<PathBuf>,
}

impl Copies<'_> {
    fn of(stage: &Stage) -> Copies<'_> {
        Copies { stage, made: 0, last: None }
    }

    fn next(&mut self) -> PathBuf {
        self.made += 1;
        let path = self.stage.path(&format!("gms-{}", self.made));
        // By a process that is not forked from this one while it writes: whoever had the file open then would keep it from being executed.
        let words = [tool("cp"), gms_binary(), path.clone()];
        Program::new(words).finish().expect_code(0);
        if let Some(last) = self.last.replace(path.clone()) {
            fs::remove_file(last).expect("the copy before");
        }
        path
    }

    /// Upgrades the pager of the workload to a new copy, and shows that it is what runs.
    fn upgrade(&mut self, workload: &Status) {
        let binary = self.next();
        // What is born or ends all the time can leave no moment for it.
        let done = poll_until("an upgrade", SOON, || {
            let done = upgrade(workload.pid, &binary);
            let again = done.code == Some(125) && done.stderr.contains(": try again;");
            (!again).then_some(done)
        });
        let done = done.expect_code(0);
        let text = done.text();
        assert!(text.starts_with("upgraded in ") && text.ends_with(" ms\n"), "{text:?}");
        let pager = workload.supervisor_pid;
        let exe = fs::read_link(format!("/proc/{pager}/exe")).expect("the pager");
        assert_eq!(exe, binary);
        assert_eq!(name(pager), "gms");
        let now = status_of(workload.pid).expect("the workload is found");
        assert_eq!((now.pid, now.supervisor_pid), (workload.pid, pager));
    }
}

fn verify(mib: u64) -> Program {
    Program::new([c_program("verify")]).args([mib.to_string().as_str(), "forever"]).stdin_open()
}

/// A process that dies closes its pipes before it is gone.
fn wait_gone(pid: i32) {
    poll_until("the end of the workload", SOON, || (!exists(pid)).then_some(()));
}

/// Faults that are to be served between two upgrades.
const FAULTS: u64 = 2000;

/// Upgrades while `verify` reads and writes its pages all the time.
fn upgraded_under_verify(gms: &Gms, stage: &Stage, keepers: usize) {
    let mut proc = gms.spawn();
    let before = wait_paged(&mut proc, Mib(24));
    let mut copies = Copies::of(stage);
    for _ in 0..UPGRADES_FEW {
        copies.upgrade(&before);
        let first = status_of(before.pid).expect("the workload").faults;
        poll_until("more faults", SOON, || {
            let now = status_of(before.pid).unwrap_or_else(|| proc.fail("gms ended early"));
            (now.faults >= first + FAULTS).then_some(())
        });
    }
    let now = status_of(before.pid).expect("the workload");
    assert!(now.pages_out > before.pages_out && now.faults > before.faults, "{now:?}");
    // One that was killed keeps its name until the front has reaped it.
    poll_until("no keepers of former binaries", SOON, || {
        let below = descendants(proc.pid());
        let found = below.iter().filter(|&&pid| name(pid) == "far-keeper").count();
        (found == keepers).then_some(())
    });
    proc.close_stdin();
    let outcome = gms.finish_proc(proc).expect_code(0);
    assert!(outcome.text().ends_with("ended, every page right\n"), "{}", outcome.text());
    assert!(outcome.drained, "somebody of gms is left");
    assert!(outcome.stats().pages_out >= now.pages_out, "figures are of the whole session");
}

#[test]
fn a_program_goes_on_through_upgrades_with_two_agents() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agents = [AgentProc::start(Mib(512)), AgentProc::start(Mib(512))];
    let gms = Gms::run(&stage, &verify(64)).local(Mib(20)).agents(&[&agents[0], &agents[1]]);
    upgraded_under_verify(&gms, &stage, 1);
}

#[test]
fn a_program_goes_on_through_upgrades_with_an_agent_of_its_own_and_a_disk() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let gms = Gms::run(&stage, &verify(64)).local(Mib(20)).arg("--export").arg("512M");
    upgraded_under_verify(&gms, &stage, 1);
    let agent = AgentProc::start(Mib(512));
    let gms = Gms::run(&stage, &verify(64)).local(Mib(20)).agents(&[&agent]);
    let gms = gms.arg("--disk").arg(stage.dir()).arg("--disk-size").arg("512M");
    upgraded_under_verify(&gms, &stage, 1);
}

/// An agent is killed after an upgrade: pages are made of the other parts by a binary that has not dealt their stripes, and the next one goes on with that.
#[test]
fn a_program_with_parity_goes_on_through_upgrades_and_the_loss_of_an_agent() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let [first, second, third, fourth] =
        [(); 4].map(|()| AgentSetup::new(Mib(256)).args(["--drain", "1000"]).start());
    let gms = Gms::run(&stage, &verify(64)).local(Mib(20)).redundancy("parity:2+1");
    let gms = gms.agents(&[&first, &second, &third, &fourth]);
    let mut proc = gms.spawn();
    let before = wait_paged(&mut proc, Mib(24));
    wait_until_copied(&proc);
    let mut copies = Copies::of(&stage);
    copies.upgrade(&before);
    let address = second.addr();
    second.kill();
    wait_until_missed(&proc, &address);
    copies.upgrade(&before);
    wait_rounds(&proc, 2);
    // Until it is rebuilt, and a while longer.
    poll_until("what the agent had elsewhere", PARITY_LIMIT, || {
        let status = status_of(before.pid)?;
        let dead = status.agents.iter().find(|agent| agent.addr == address)?;
        (dead.pages_held == 0 && status.short_bytes == 0).then_some(())
    });
    copies.upgrade(&before);
    wait_rounds(&proc, 1);
    let outcome = end_verified(&gms, proc, Mib(64), Mib(20));
    assert!(outcome.stats().pages_made > 0, "{:?}", outcome.stats());
    drop((first, third, fourth));
}

/// Runs a program that ends by itself, with as many upgrades meanwhile as there is time for, and one at least. With `told` it must say that at its end.
fn upgraded_until_the_end(gms: &Gms, stage: &Stage) -> Outcome {
    let mut proc = gms.spawn();
    let before = wait_paged(&mut proc, Mib(4));
    let (mut copies, mut done) = (Copies::of(stage), 0);
    while proc.poll().is_none() && done < 2 * UPGRADES {
        let outcome = upgrade(before.pid, &copies.next());
        let said = |what| outcome.stderr.contains(what);
        match outcome.code {
            Some(0) => done += 1,
            _ if said(": try again;") => {}
            _ if said("it goes on as it was") && !said("it has ended") => {
                outcome.fail("an upgrade failed");
            }
            // It ends just now.
            _ => {
                poll_until("its end", SOON, || proc.poll());
            }
        }
    }
    assert!(done > 0, "no upgrade was in time");
    gms.finish_proc(proc).expect_code(0)
}

#[test]
fn threads_served_by_several_fault_threads_go_on_through_upgrades() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agent = AgentProc::start(Mib(512));
    let program = Program::new([c_program("threads")]).args([96]);
    let gms = Gms::run(&stage, &program).local(Mib(20)).agents(&[&agent]);
    upgraded_until_the_end(&gms.arg("--fault-threads").arg("3"), &stage);
}

#[test]
fn programs_that_fork_go_on_through_upgrades() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agent = AgentProc::start(Mib(512));
    let forkcow = Program::new([c_program("forkcow")]).args([64]);
    let brood = Program::new([c_program("brood")]).args([4, 200, 8]);
    for (program, budget) in [(forkcow, Mib(32)), (brood, Mib(16))] {
        let gms = Gms::run(&stage, &program).local(budget).agents(&[&agent]);
        upgraded_until_the_end(&gms, &stage);
    }
}

/// Each has 1 MiB of its own until its input ends.
const MANY: &str = r#"
import os, sys
def own():
    memory = bytearray(os.urandom(1 << 20))
    return memory
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        memory = own()
        os.read(0, 1)
        os._exit(0)
memory = own()
print("forked", flush=True)
os.read(0, 1)
"#;

/// Of so many nothing is written down from which another pager could go on.
#[test]
fn what_was_handed_over_is_closed_however_many_processes_there_are() {
    const PROCESSES: usize = 80;
    let Some(stage) = Stage::set_beside_others() else { return };
    let agent = AgentProc::start(Mib(512));
    let many = PROCESSES.to_string();
    let program = Program::new(["python3", "-c", MANY, many.as_str()]).stdin_open();
    let gms = Gms::run(&stage, &program).local(Mib(24)).agents(&[&agent]);
    let mut proc = gms.spawn();
    proc.wait_output(0, "forked");
    let before = wait_paged(&mut proc, Mib(24));
    let open = |at_least: usize| {
        let count = userfaultfds(before.supervisor_pid);
        (count > at_least).then_some(count)
    };
    let first = poll_until("all to be attached", SOON, || open(PROCESSES));
    Copies::of(&stage).upgrade(&before);
    let now = poll_until("those that are needed", SOON, || open(PROCESSES));
    poll_until(&format!("{first}, not {now} userfaultfds"), SOON, || {
        (userfaultfds(before.supervisor_pid) <= first).then_some(())
    });
    proc.close_stdin();
    gms.finish_proc(proc).expect_code(0);
}

#[test]
fn redis_keeps_its_digest_through_upgrades_under_load_and_a_snapshot() {
    let Some(stage) = Stage::set_beside_others() else { return };
    const DATA: Mib = Mib(96);
    let expected = Redis::digest_without_gms(&stage, DATA);
    let agents = [AgentProc::start(Mib(512)), AgentProc::start(Mib(512))];
    let (server, socket) = Redis::server(&stage, "paged");
    let gms = Gms::run(&stage, &server).local(DATA.percent(33));
    let gms = gms.agents(&[&agents[0], &agents[1]]);
    let mut proc = gms.spawn();
    let mut redis = Redis::connect(&mut proc, &socket);
    redis.fill(DATA);
    let before = wait_paged(&mut proc, Mib(24));
    let mut copies = Copies::of(&stage);
    for turn in 0..UPGRADES {
        std::thread::scope(|scope| {
            let upgrade = scope.spawn(|| copies.upgrade(&before));
            if turn == UPGRADES / 2 {
                redis.background_save();
            }
            redis.check_while(DATA, || upgrade.join().expect("an upgrade"));
        });
        redis.check(DATA, 500);
    }
    assert_eq!(redis.digest(), expected);
    redis.shut_down();
    gms.finish_proc(proc).expect_code(0);
}

/// A file with this content that can be executed.
fn script(stage: &Stage, name: &str, text: &str) -> PathBuf {
    let path = stage.path(name);
    fs::write(&path, text).expect("a file");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("its mode");
    path
}

#[test]
fn a_binary_that_cannot_go_on_is_refused_before_anything_stops() {
    let Some(stage) = Stage::set() else { return };
    let program = verify(64).env("GMS_TEST_HANGS", "1");
    let gms = Gms::run(&stage, &program).local(Mib(20)).arg("--export").arg("512M");
    let mut proc = gms.spawn();
    let before = wait_paged(&mut proc, Mib(24));
    let data = script(&stage, "data", "no program");
    let plain = stage.path("plain");
    fs::write(&plain, "no program").expect("a file");
    let shared = script(&stage, "shared", "#!/bin/sh\necho knows versions: 4");
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o775)).expect("its mode");
    let fifo = stage.path("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    let cases = [
        (tool("false"), "it says nothing"),
        (tool("echo"), "is no gms that could go on: adopt --probe="),
        (tool("cat"), "is no gms that could go on: "),
        (stage.path("nowhere"), "No such file"),
        (stage.dir().into(), "is no file"),
        (data, "cannot be executed: "),
        (plain, "Permission denied"),
        (fifo, "is no file"),
        (shared, "writable by nobody else"),
        // The last: what this could leave stopped nobody would have go on again.
        (c_program("unable"), "it says nothing for 3s"),
    ];
    for (binary, reason) in cases {
        let outcome = upgrade(before.pid, &binary).expect_code(125);
        let said = &outcome.stderr;
        assert!(said.contains(reason) && said.contains("it goes on as it was"), "{said}");
        assert!(said.contains(&binary.display().to_string()), "{said}");
    }
    proc.wait_output(proc.output_len(), "round ");
    let exe = fs::read_link(format!("/proc/{}/exe", before.supervisor_pid)).expect("the pager");
    assert_eq!(exe, gms_binary());
    proc.close_stdin();
    gms.finish_proc(proc).expect_code(0);
}

#[test]
fn the_binary_before_goes_on_if_the_other_cannot() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let program = verify(64).env("GMS_TEST_BEFORE", gms_binary());
    let gms = Gms::run(&stage, &program).local(Mib(20)).arg("--export").arg("512M");
    let mut proc = gms.spawn();
    let before = wait_paged(&mut proc, Mib(24));
    for _ in 0..3 {
        let outcome = upgrade(before.pid, &c_program("unable")).expect_code(125);
        assert!(outcome.stderr.contains("cannot go on: it is unable"), "{}", outcome.stderr);
        proc.wait_output(proc.output_len(), "round ");
    }
    assert!(proc.errors().contains("another binary could not go on: it is unable; this one does"));
    proc.close_stdin();
    gms.finish_proc(proc).expect_code(0);
}

#[test]
fn who_has_fewer_rights_than_the_pager_does_not_choose_its_binary() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let gms = Gms::run(&stage, &verify(64)).local(Mib(20)).arg("--export").arg("512M");
    let mut proc = gms.spawn();
    let before = wait_paged(&mut proc, Mib(24));
    let words = [tool("setpriv"), "--bounding-set=-all".into(), "--inh-caps=-all".into()];
    let asks = Program::new(words.into_iter().chain([gms_binary(), "upgrade".into()]));
    let outcome = asks.args([before.pid.to_string()]).finish().expect_code(125);
    assert!(outcome.stderr.contains("must have all capabilities"), "{}", outcome.stderr);
    proc.wait_output(proc.output_len(), "round ");
    proc.close_stdin();
    gms.finish_proc(proc).expect_code(0);
}

#[test]
fn a_binary_that_hangs_when_it_takes_over_ends_the_workload_with_a_message() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let program = verify(64).env("GMS_TEST_STALLS", "1");
    let gms = Gms::run(&stage, &program).local(Mib(20)).arg("--export").arg("512M");
    let mut proc = gms.limit(Duration::from_secs(120)).spawn();
    let before = wait_paged(&mut proc, Mib(24));
    // As long as gms upgrade waits, and some time more.
    let line = upgrade_line(before.pid, &c_program("unable"));
    line.limit(Duration::from_secs(60)).finish().expect_code(125);
    let outcome = proc.finish().expect_code(125);
    assert!(outcome.drained, "{}", outcome.stderr);
    wait_gone(before.pid);
    assert!(outcome.stderr.contains("has not begun for 30 s: it is killed"), "{}", outcome.stderr);
}

#[test]
fn what_cannot_be_handed_over_is_refused() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let refused = |gms: &Gms, reason: &str| {
        let mut proc = gms.spawn();
        let before = wait_paged(&mut proc, Mib(24));
        let outcome = upgrade(before.pid, &gms_binary()).expect_code(125);
        assert!(outcome.stderr.contains(reason), "{}", outcome.stderr);
        proc.close_stdin();
        gms.finish_proc(proc).expect_code(0);
    };
    let gms = Gms::run(&stage, &verify(64)).local(Mib(20)).arg("--export").arg("512M");
    refused(&gms.arg("--trace").arg(stage.path("trace.csv")), "--trace");
    let outcome = upgrade(std::process::id() as i32, &gms_binary()).expect_code(1);
    assert!(outcome.stderr.contains("no workload of gms"), "{}", outcome.stderr);
    let mut program = verify(64).spawn();
    program.wait_output(0, "round ");
    let gms = Gms::attach(&stage, program.pid()).local(Mib(20)).arg("--export").arg("512M");
    let mut proc = gms.limit(Duration::from_secs(120)).spawn();
    let before = wait_paged(&mut proc, Mib(24));
    let outcome = upgrade(before.pid, &gms_binary()).expect_code(125);
    assert!(outcome.stderr.contains("gms attach"), "{}", outcome.stderr);
    program.close_stdin();
    program.finish().expect_code(0);
    proc.finish().expect_code(0);
}

#[test]
fn a_pager_that_dies_after_an_upgrade_kills_the_workload_with_a_message() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agent = AgentProc::start(Mib(512));
    let gms = Gms::run(&stage, &verify(64)).local(Mib(20)).agents(&[&agent]);
    let mut proc = gms.arg("--no-takeover").spawn();
    let before = wait_paged(&mut proc, Mib(24));
    let mut copies = Copies::of(&stage);
    copies.upgrade(&before);
    copies.upgrade(&before);
    kill(Pid::from_raw(before.supervisor_pid), Signal::SIGKILL).expect("the pager");
    let outcome = proc.finish().expect_code(125);
    assert!(outcome.drained, "{}", outcome.stderr);
    wait_gone(before.pid);
    assert!(outcome.stderr.contains("gms: the pager has died: process"), "{}", outcome.stderr);
    assert!(!outcome.stderr.contains("ZERO PAGE") && !outcome.stderr.contains("MISMATCH"));
}

/// A shell with memory of its own that says what it is sent, and ends with a status of its own.
#[test]
fn signals_stops_and_the_exit_status_are_the_command_s_after_an_upgrade() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let script = format!(
        "trap 'echo usr1' USR1; trap 'exit 7' TERM; {} 96 forever <&3 & echo ready; while :; do wait; done",
        c_program("verify").display()
    );
    let shell = format!("exec 3<&0; {script}");
    let program = Program::new([tool("sh").into_os_string(), "-c".into(), shell.into()]);
    let gms = Gms::run(&stage, &program.stdin_open()).local(Mib(20)).arg("--export").arg("512M");
    let mut proc = gms.spawn();
    let before = wait_paged(&mut proc, Mib(24));
    Copies::of(&stage).upgrade(&before);
    proc.signal(Signal::SIGUSR1);
    proc.wait_output(0, "usr1");
    let front = proc.pid();
    let state = |wanted: char| {
        poll_until("the front to follow the command", SOON, || {
            let stat = fs::read_to_string(format!("/proc/{front}/stat")).ok()?;
            let state = stat.rsplit_once(") ")?.1.chars().next()?;
            (if wanted == 'T' { state == 'T' } else { state != 'T' }).then_some(())
        });
    };
    kill(Pid::from_raw(before.pid), Signal::SIGSTOP).expect("the command");
    state('T');
    kill(Pid::from_raw(before.pid), Signal::SIGCONT).expect("the command");
    state('S');
    proc.signal(Signal::SIGTERM);
    proc.close_stdin();
    let outcome = gms.finish_proc(proc).expect_code(7);
    assert!(outcome.drained, "somebody is left");
}
