//! The pager dies, or the agent of its own: no page may ever read as zero.

use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::Duration;

use gms_pager::kernel::proc;
use gms_tests::*;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::{Pid, pipe2, write};

/// Starts `program` under gms, for which no other pager goes on, and waits until much of it is at the agents.
fn start_paged(stage: &Stage, program: &Program, budget: Mib, agent: &AgentProc) -> (Proc, Status) {
    start(Gms::run(stage, program).arg("--no-takeover").local(budget).agents(&[agent]))
}

fn start(gms: Gms) -> (Proc, Status) {
    let mut gms = gms.spawn();
    let status = poll_until("pages at the agents", Duration::from_secs(30), || {
        if gms.poll().is_some() {
            gms.fail("gms ended early");
        }
        status_of(gms.pid()).filter(|status| status.remote_bytes > Mib(32).bytes())
    });
    (gms, status)
}

/// For what is seen at once, where to wait for a lost agent would take 15 s.
const AT_ONCE: Duration = Duration::from_secs(5);

/// Starts it with an agent of gms's own, and waits for its pages to be there; and the process of that agent.
fn start_embedded(gms: Gms, remote: Mib) -> (Proc, Status, i32) {
    let mut proc = gms.arg("--export").arg("512M").spawn();
    let status = poll_until("pages at the agent", Duration::from_secs(30), || {
        if proc.poll().is_some() {
            proc.fail("gms ended early");
        }
        status_of(proc.pid()).filter(|status| status.remote_bytes >= remote.bytes())
    });
    let below = descendants(proc.pid());
    let agent = below.into_iter().find(|&pid| name(pid) == "far-agent");
    (proc, status, agent.expect("a process beside the pager"))
}

fn wait_end(what: &str, pid: i32) {
    poll_until(what, AT_ONCE, || (!exists(pid)).then_some(()));
}

fn kill_now(pid: i32) {
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap_or_else(|error| panic!("kill {pid}: {error}"));
}

fn keeper_of(gms: &Proc) -> i32 {
    let below = descendants(gms.pid());
    below.into_iter().find(|&pid| name(pid) == "far-keeper").expect("a keeper")
}

fn assert_told(outcome: &Outcome) {
    assert_eq!(outcome.code, Some(125), "{}", outcome.stderr);
    assert!(
        outcome.stderr.contains("gms: the pager has died: process"),
        "the end is explained on stderr: {:?}",
        outcome.stderr
    );
}

fn assert_nothing_wrong_was_read(outcome: &Outcome) {
    assert!(outcome.drained, "somebody still runs and holds the output: {}", outcome.stderr);
    for word in ["ZERO PAGE", "MISMATCH"] {
        assert!(!outcome.stderr.contains(word), "{}", outcome.stderr);
    }
}

#[test]
fn killing_the_pager_kills_the_workload_with_a_message() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(512));
    let program = Program::new([c_program("verify")]).args(["128", "forever"]).stdin_open();
    for _ in 0..3 {
        let (gms, status) = start_paged(&stage, &program, Mib(32), &agent);
        assert!(exists(status.pid));
        kill_now(status.supervisor_pid);
        poll_until("the end of the workload", Duration::from_secs(10), || {
            (!exists(status.pid)).then_some(())
        });
        let outcome = gms.finish();
        assert_nothing_wrong_was_read(&outcome);
        assert_told(&outcome);
    }
}

/// As after an error of its own, behind which nothing is to be trusted: no other goes on. (Signals that people send are for the command.)
#[test]
fn an_end_of_the_pager_by_itself_kills_the_workload_with_a_message() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(512));
    let program = Program::new([c_program("verify")]).args(["128", "forever"]).stdin_open();
    for signal in [Signal::SIGILL, Signal::SIGFPE, Signal::SIGSEGV] {
        let (gms, status) = start(Gms::run(&stage, &program).local(Mib(32)).agents(&[&agent]));
        kill(Pid::from_raw(status.supervisor_pid), signal).expect("the pager");
        let outcome = gms.finish();
        assert_nothing_wrong_was_read(&outcome);
        assert_told(&outcome);
    }
}

/// Memory that goes bad: a thread meets an entry of the page map which cannot be, and panics. What the others do must not matter.
#[test]
fn a_panic_in_one_thread_of_the_pager_kills_the_workload_with_a_message() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(512));
    let program = Program::new([c_program("verify")]).args(["128", "forever"]).stdin_open();
    let program = program.limit(Duration::from_secs(60));
    let (gms, status) = start(Gms::run(&stage, &program).local(Mib(32)).agents(&[&agent]));
    let pager = status.supervisor_pid;
    let spoiled = while_stopped(pager, || spoil_page_map(pager)).expect("the page map");
    assert!(spoiled > 1000, "{spoiled} pages are at the agent");
    let outcome = gms.finish();
    assert_nothing_wrong_was_read(&outcome);
    assert_told(&outcome);
    assert!(outcome.stderr.contains("panicked at"), "{}", outcome.stderr);
}

#[test]
fn killing_an_evictor_kills_the_workload_with_a_message() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(512));
    let program = Program::new([c_program("verify")]).args(["128", "forever"]).stdin_open();
    let (gms, status) = start_paged(&stage, &program, Mib(32), &agent);
    kill_now(evictor_of(status.pid));
    let outcome = gms.finish();
    assert_nothing_wrong_was_read(&outcome);
    assert_eq!(outcome.code, Some(125), "{}", outcome.stderr);
    let told = format!("gms: workload killed: the evictor of process {}", status.pid);
    assert!(outcome.stderr.contains(&told), "{}", outcome.stderr);
}

#[test]
fn killing_the_pager_kills_forked_children_too() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(512));
    let verify = c_program("verify");
    let script =
        format!("exec 3<&0; {0} 96 forever <&3 & {0} 96 forever <&3; wait", verify.display());
    let program =
        Program::new([tool("sh").into_os_string(), "-c".into(), script.into()]).stdin_open();
    let (gms, status) = start_paged(&stage, &program, Mib(48), &agent);
    kill_now(status.supervisor_pid);
    let outcome = gms.finish();
    assert_nothing_wrong_was_read(&outcome);
    assert_told(&outcome);
}

/// Nobody is left to print what evictors say, but each kills its process.
#[test]
fn killing_pager_and_keeper_kills_the_workload() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(512));
    let program = Program::new([c_program("verify")]).args(["128", "forever"]).stdin_open();
    for keeper_first in [true, false] {
        let (gms, status) = start_paged(&stage, &program, Mib(32), &agent);
        let keeper = keeper_of(&gms);
        let pager = status.supervisor_pid;
        let order = if keeper_first { [keeper, pager] } else { [pager, keeper] };
        order.into_iter().for_each(kill_now);
        wait_end("the end of the workload", status.pid);
        let outcome = gms.finish();
        assert_nothing_wrong_was_read(&outcome);
        assert_eq!(outcome.code, Some(125), "{}", outcome.stderr);
        let told = "the pager was ended by signal 9, so the command was killed";
        assert!(outcome.stderr.contains(told), "{}", outcome.stderr);
    }
}

/// Evictors see the end of the pager by what it closes, and kill. Until its last thread is gone it has not ended; but that of the command is its doing.
#[test]
fn a_command_killed_while_the_pager_still_ends_was_killed_for_want_of_it() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(512));
    let program = Program::new([c_program("verify")]).args(["128", "forever"]).stdin_open();
    let (gms, status) = start_paged(&stage, &program, Mib(32), &agent);
    let pager = status.supervisor_pid;
    let thread = proc::threads(pager).into_iter().find(|&tid| tid != pager).expect("a thread");
    let thread = Pid::from_raw(thread);
    // A thread that is traced is there until its tracer has seen it end.
    ptrace::seize(thread, ptrace::Options::empty()).expect("a thread of the pager");
    [keeper_of(&gms), pager].into_iter().for_each(kill_now);
    poll_until("the command is reaped", AT_ONCE, || {
        proc::state(status.pid).is_none().then_some(())
    });
    assert_eq!(name(pager), "gms", "the pager is there");
    waitpid(thread, Some(WaitPidFlag::__WALL)).expect("the end of the thread");
    let outcome = gms.finish();
    assert_nothing_wrong_was_read(&outcome);
    assert_eq!(outcome.code, Some(125), "{}", outcome.stderr);
}

/// Children under seccomp have no evictor which would kill them.
#[test]
fn killing_the_pager_kills_children_without_an_evictor() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(512));
    let program = Program::new([c_program("sandboxed")]).args(["96"]).stdin_open();
    for _ in 0..4 {
        let (gms, status) = start_paged(&stage, &program, Mib(32), &agent);
        kill_now(status.supervisor_pid);
        let outcome = gms.finish();
        assert_nothing_wrong_was_read(&outcome);
        assert_told(&outcome);
    }
}

/// Without a front, a keeper process holds what the children need.
#[test]
fn killing_an_attached_pager_kills_children_without_an_evictor() {
    let Some(_stage) = Stage::set() else { return };
    let program = Program::new([c_program("sandboxed")]).args(["96"]).stdin_open();
    for _ in 0..4 {
        let workload = program.spawn();
        let pid = workload.pid().to_string();
        let gms = Gms::line(["attach", &pid, "--local", "32M", "--export", "512M"]).spawn();
        poll_until("pages at the agent", Duration::from_secs(30), || {
            status_of(gms.pid()).filter(|status| status.remote_bytes > Mib(32).bytes())
        });
        for _ in 0..2 {
            workload.wait_output(workload.output_len(), "forked ");
        }
        kill_now(gms.pid());
        drop(gms.finish());
        assert_nothing_wrong_was_read(&workload.finish());
    }
}

/// The process which stands for the workload towards the shell is not the one that pages it.
#[test]
fn killing_the_process_before_the_shell_spoils_no_page() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(512));
    let program = Program::new([c_program("verify")]).args(["128", "forever"]).stdin_open();
    let (gms, status) = start_paged(&stage, &program, Mib(32), &agent);
    // Its standard input stays open: it does not end by itself.
    kill_now(gms.pid());
    poll_until("the end of the workload", Duration::from_secs(20), || {
        (!exists(status.pid)).then_some(())
    });
    assert_nothing_wrong_was_read(&gms.finish());
}

#[test]
fn killing_the_commands_parent_spoils_no_page() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(512));
    let program = Program::new([c_program("verify")]).args(["128", "forever"]).stdin_open();
    let (gms, status) = start_paged(&stage, &program, Mib(32), &agent);
    let reaper = proc::status_field(status.pid, "PPid:").expect("a parent") as i32;
    // Nobody kills the workload before the front goes on: until then it is paged. A traced one goes on by no SIGCONT.
    let front = Pid::from_raw(gms.pid());
    ptrace::seize(front, ptrace::Options::empty()).expect("the front");
    ptrace::interrupt(front).expect("the front");
    waitpid(front, None).expect("the front stops");
    kill_now(reaper);
    for _ in 0..2 {
        gms.wait_output(gms.output_len(), "round ");
    }
    assert!(exists(status.supervisor_pid));
    ptrace::detach(front, None).expect("the front");
    wait_end("the end of the workload", status.pid);
    let outcome = gms.finish();
    assert_nothing_wrong_was_read(&outcome);
    assert_eq!(outcome.code, Some(125), "{}", outcome.stderr);
    let told = "the command's parent was ended by signal 9, so the command was killed";
    assert!(outcome.stderr.contains(told), "{}", outcome.stderr);
}

/// A full pipe that nobody reads: whoever waits to write to it is freed by dropping the reader.
fn unread() -> (OwnedFd, OwnedFd) {
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).unwrap();
    while write(&writer, &[b'x'; 4096]).is_ok() {}
    fcntl(&writer, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
    (reader, writer)
}

/// Whether everybody who could write to the pipe has ended.
fn is_left(reader: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(reader.as_fd(), PollFlags::empty())];
    poll(&mut fds, PollTimeout::from(20_000_u16)) == Ok(1)
}

#[test]
fn killing_a_pager_that_nobody_listens_to_ends_everything() {
    let Some(_stage) = Stage::set() else { return };
    let (reader, writer) = unread();
    let mut gms = Command::new(gms_binary())
        .args(["run", "--no-takeover", "--local", "32M", "--export", "512M", "--"])
        .arg(c_program("verify"))
        .args(["128", "forever"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(writer)
        .spawn()
        .unwrap();
    let status = poll_until("pages at the agent", Duration::from_secs(30), || {
        status_of(gms.id() as i32).filter(|status| status.remote_bytes > Mib(32).bytes())
    });
    kill_now(status.supervisor_pid);
    assert!(is_left(&reader), "the workload, the keeper or the front still runs");
    assert_eq!(gms.wait().unwrap().code(), Some(125));
}

#[test]
fn a_keeper_that_nobody_listens_to_kills_children_without_an_evictor() {
    let Some(_stage) = Stage::set() else { return };
    let workload = Program::new([c_program("sandboxed")]).args(["96"]).stdin_open().spawn();
    let (reader, writer) = unread();
    let mut gms = Command::new(gms_binary())
        .args(["attach", &workload.pid().to_string(), "--local", "32M", "--export", "512M"])
        .stdout(Stdio::null())
        .stderr(writer)
        .spawn()
        .unwrap();
    poll_until("pages at the agent", Duration::from_secs(30), || {
        status_of(gms.id() as i32).filter(|status| status.remote_bytes > Mib(32).bytes())
    });
    for _ in 0..2 {
        workload.wait_output(workload.output_len(), "forked ");
    }
    kill_now(gms.id() as i32);
    gms.wait().unwrap();
    assert!(is_left(&reader), "the keeper still runs");
    assert_nothing_wrong_was_read(&workload.finish());
}

#[test]
fn a_standard_error_that_nobody_reads_delays_nobody() {
    let Some(_stage) = Stage::set() else { return };
    let (_reader, writer) = unread();
    // Each process that is paged is told of.
    let mut gms = Command::new(gms_binary())
        .args(["run", "--verbose", "--local", "16M", "--export", "128M", "--"])
        .arg(c_program("verify"))
        .args(["32", "2"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(writer)
        .spawn()
        .unwrap();
    // If it does not end, it does when the reader is gone.
    let ended = poll_until("the end of gms", Duration::from_secs(60), || gms.try_wait().unwrap());
    assert_eq!(ended.code(), Some(0));
}

#[test]
fn killing_its_own_agent_kills_the_workload_at_once_with_a_message() {
    let Some(stage) = Stage::set() else { return };
    let program = Program::new([c_program("verify")]).args(["128", "forever"]).stdin_open();
    let gms = Gms::run(&stage, &program).local(Mib(32));
    let (gms, status, agent) = start_embedded(gms, Mib(32));
    kill_now(agent);
    wait_end("the end of the workload", status.pid);
    let outcome = gms.finish();
    assert_nothing_wrong_was_read(&outcome);
    assert_eq!(outcome.code, Some(125), "{}", outcome.stderr);
    let told = format!("agent embedded: its process {agent} (far-agent) has ended, and with it");
    assert!(
        outcome.stderr.contains(&format!("gms: workload killed: {told}")),
        "{}",
        outcome.stderr
    );
}

#[test]
fn a_workload_of_which_its_own_agent_had_no_page_outlives_that() {
    let Some(stage) = Stage::set() else { return };
    let program = Program::new([c_program("verify")]).args(["32", "forever"]).stdin_open();
    let gms = Gms::run(&stage, &program).local(Mib(256));
    let (mut proc, status, agent) = start_embedded(gms, Mib(0));
    kill_now(agent);
    proc.wait_error("the loss", AT_ONCE, |text| {
        text.contains("(far-agent) has ended: the workload goes on").then_some(())
    });
    proc.wait_output(proc.output_len(), "round ");
    assert!(exists(status.pid));
    proc.close_stdin();
    assert!(proc.finish().expect_code(0).text().ends_with("ended, every page right\n"));
}

#[test]
fn attach_fails_when_its_own_agent_has_ended_and_its_process_runs_on() {
    let Some(stage) = Stage::set() else { return };
    let program = Program::new([c_program("verify")]).args(["32", "forever"]).stdin_open();
    let mut workload = program.spawn();
    workload.wait_output(0, "round 1\n");
    let gms = Gms::attach(&stage, workload.pid()).local(Mib(256));
    let (pager, _, agent) = start_embedded(gms, Mib(0));
    kill_now(agent);
    let outcome = pager.finish().expect_code(125);
    assert!(outcome.stderr.contains("gms's own agent has ended; process"), "{}", outcome.stderr);
    workload.wait_output(workload.output_len(), "round ");
    workload.close_stdin();
    assert!(workload.finish().expect_code(0).text().ends_with("ended, every page right\n"));
}

/// Without a front, which would kill what the pager leaves.
#[test]
fn an_agent_ends_with_the_pager_whose_own_it_is() {
    let Some(_stage) = Stage::set() else { return };
    let program = Program::new([c_program("verify")]).args(["96", "forever"]).stdin_open();
    let workload = program.spawn();
    let line = ["attach", &workload.pid().to_string(), "--local", "32M"].map(String::from);
    let (gms, _, agent) = start_embedded(Gms::line(line), Mib(32));
    kill_now(gms.pid());
    wait_end("the end of the agent", agent);
    drop(gms.finish());
    assert_nothing_wrong_was_read(&workload.finish());
}

/// The agent is a process of its own, and goes when its pages have been brought home, though the pager stays.
#[test]
fn an_agent_ends_with_the_session_whose_own_it_is() {
    let Some(stage) = Stage::set() else { return };
    let program = Program::new([c_program("verify")]).args(["96", "forever"]).stdin_open();
    let gms = Gms::run(&stage, &program).local(Mib(32));
    let (mut proc, status, agent) = start_embedded(gms, Mib(32));
    Gms::line(["detach".to_string(), status.pid.to_string()]).finish().expect_code(0);
    wait_end("the end of the agent", agent);
    assert!(exists(status.supervisor_pid) && exists(status.pid));
    proc.close_stdin();
    assert!(proc.finish().expect_code(0).text().ends_with("ended, every page right\n"));
}
