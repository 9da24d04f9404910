//! Attaching to what runs, letting it go again, and waits that must not notice.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use gms_tests::*;
use nix::sys::signal::Signal;

/// How long an attach, a detach or a change of state may take.
const SOON: Duration = Duration::from_secs(30);

/// A program that verifies round after round until its input ends, in its second round.
fn running_program(mib: u64) -> Proc {
    let proc = Program::new([c_program("verify")])
        .args([mib.to_string().as_str(), "forever"])
        .stdin_open()
        .spawn();
    proc.wait_output(0, "round 1\n");
    proc
}

fn wait_two_rounds(proc: &Proc) {
    for _ in 0..2 {
        proc.wait_output(proc.output_len(), "round ");
    }
}

/// So many children, one after the other, then a word; each has memory of its own.
const FORKS: &str = r#"
import os, sys
memory = bytearray(os.urandom(1 << 20) * 64)
sys.stdin.readline()
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        memory[0] = 1
        os._exit(0)
    os.wait()
print("forked", flush=True)
sys.stdin.readline()
"#;

/// Whether another pager could go on or, as here, none.
#[test]
fn nothing_is_left_open_of_children_that_have_ended() {
    const CHILDREN: usize = 150;
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(512));
    let program = Program::new(["python3", "-c", FORKS]).args([CHILDREN]).stdin_open();
    let gms = Gms::run(&stage, &program).local(Mib(32)).agents(&[&agent]).arg("--no-takeover");
    let mut proc = gms.spawn();
    let paged = wait_paged(&mut proc, Mib(24));
    proc.write_stdin(b"\n");
    proc.wait_output(0, "forked");
    poll_until("an end of what was open", SOON, || {
        (userfaultfds(paged.supervisor_pid) < CHILDREN / 10).then_some(())
    });
    proc.close_stdin();
    gms.finish_proc(proc).expect_code(0);
}

/// Each thread has filters of its own: what one may not call another may.
#[test]
fn a_thread_under_a_filter_is_not_made_to_call_anything() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(256));
    let program = Program::new([c_program("filtered")]).args([64]);
    let outcome = Gms::run(&stage, &program).local(Mib(16)).agents(&[&agent]).finish();
    let outcome = outcome.expect_code(0);
    assert!(outcome.stats().pages_out > 1000, "it was not paged");
}

fn end_well(mut proc: Proc) {
    wait_two_rounds(&proc);
    proc.close_stdin();
    let outcome = proc.finish().expect_code(0);
    assert!(outcome.text().ends_with("ended, every page right\n"), "{}", outcome.text());
}

/// Nearly all of a working set: some of it is the program's own to touch.
fn assert_home(pid: i32, working_set: Mib) {
    assert_let_go(pid, working_set.percent(95));
}

fn attach_and_detach(percent: u64) {
    let Some(stage) = Stage::set() else { return };
    let working_set = Mib(128);
    let agent = AgentProc::start(Mib(512));
    let proc = running_program(working_set.0);
    let before = Before::of(proc.pid());
    // Twice: the second attach finds a program which was paged before.
    for _ in 0..2 {
        let attach =
            Gms::attach(&stage, proc.pid()).local(working_set.percent(percent)).agents(&[&agent]);
        let mut pager = attach.spawn();
        wait_paged(&mut pager, Mib((working_set.0 - working_set.percent(percent).0) / 2));
        wait_two_rounds(&proc);
        let (resident, budget) = (rss_anon(proc.pid()), working_set.percent(percent));
        let most = budget.bytes() + overshoot(budget);
        assert!(resident.is_some_and(|bytes| bytes <= most), "{resident:?} B of {budget:?}");
        Gms::line(["detach"]).arg(proc.pid().to_string()).finish().expect_code(0);
        let outcome = attach.finish_proc(pager).expect_code(0);
        assert_paged(&outcome, working_set, working_set.percent(percent));
        assert_home(proc.pid(), working_set);
        before.assert_unchanged();
        assert!(status_of(proc.pid()).is_none(), "still listed");
    }
    end_well(proc);
}

at_25_and_50_percent! {
    attach_pages_a_running_program_and_detach_brings_it_home => attach_and_detach;
}

/// The end of its terminal does not, under nohup.
#[test]
fn ctrl_c_of_attach_detaches() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(512));
    let proc = running_program(80);
    let before = Before::of(proc.pid());
    let attach = Gms::attach(&stage, proc.pid()).local(Mib(20)).agents(&[&agent]).by("nohup");
    let mut pager = attach.spawn();
    wait_paged(&mut pager, Mib(48));
    pager.signal(Signal::SIGHUP);
    wait_two_rounds(&proc);
    assert!(status_of(proc.pid()).is_some(), "it has detached");
    pager.signal(Signal::SIGINT);
    attach.finish_proc(pager).expect_code(0);
    assert_home(proc.pid(), Mib(80));
    before.assert_unchanged();
    end_well(proc);
}

/// As one in a container, whose control socket is in another directory. Failed when two pagers each waited for the other's evictor when the program had ended.
#[test]
fn a_program_whose_pager_cannot_be_asked_is_refused() {
    let Some(stage) = Stage::set() else { return };
    let proc = running_program(64);
    let hidden = stage.path("hidden");
    fs::create_dir(&hidden).expect("a folder");
    let words = ["attach", &proc.pid().to_string(), "--local", "24M", "--export", "256M"];
    let first = Program::new([gms_binary()]).args(words).env("XDG_RUNTIME_DIR", hidden).spawn();
    poll_until("it to be paged", SOON, || has_uffd(proc.pid()).then_some(()));
    let second = Gms::attach(&stage, proc.pid()).local(Mib(24)).arg("--export").arg("256M");
    let refused = second.limit(SOON).finish().expect_code(125);
    assert!(refused.stderr.contains("is its evictor"), "{}", refused.stderr);
    end_well(proc);
    first.finish().expect_code(0);
}

#[test]
fn detach_leaves_a_program_of_gms_run_running() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(512));
    let program = Program::new([c_program("verify")]).args(["80", "forever"]).stdin_open();
    let gms = Gms::run(&stage, &program).local(Mib(20)).agents(&[&agent]);
    let mut proc = gms.spawn();
    // All of it has been filled.
    proc.wait_output(0, "round 1\n");
    wait_paged(&mut proc, Mib(48));
    let workload = status_of(proc.pid()).unwrap_or_else(|| proc.fail("not listed")).pid;
    Gms::line(["detach"]).arg(proc.pid().to_string()).finish().expect_code(0);
    assert_home(workload, Mib(80));
    wait_two_rounds(&proc);
    proc.close_stdin();
    let outcome = gms.finish_proc(proc).expect_code(0);
    assert!(outcome.text().ends_with("ended, every page right\n"), "{}", outcome.text());
}

#[test]
fn attach_ends_with_its_program() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(512));
    let proc = running_program(80);
    let attach = Gms::attach(&stage, proc.pid()).local(Mib(20)).agents(&[&agent]);
    let mut pager = attach.spawn();
    wait_paged(&mut pager, Mib(48));
    end_well(proc);
    attach.finish_proc(pager).expect_code(0);
}

/// Those of a tree that have threads: neither evictors nor children that do not last.
fn threaded(root: i32) -> Vec<i32> {
    let threads = |pid: &i32| fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    let all = std::iter::once(root).chain(descendants(root));
    all.filter(|pid| threads(pid) > 1).collect()
}

/// A tree that runs in several threads of each process; if there are several they fork all the time, before, while and after they are attached.
fn attach_to_a_grove(processes: u64, mib: u64, budget: Mib) {
    let Some(stage) = Stage::set() else { return };
    let bystander = running_program(16);
    let program = Program::new([c_program("grove")]).args([processes, 3, mib]);
    let mut proc = program.stdin_open().spawn();
    proc.wait_output(0, "ready\n");
    let members = threaded(proc.pid());
    assert_eq!(members.len() as u64, processes);
    let before: Vec<Before> = members.iter().map(|&pid| Before::of(pid)).collect();
    let attach = Gms::attach(&stage, proc.pid()).local(budget).arg("--export").arg("1G");
    let mut pager = attach.spawn();
    wait_paged(&mut pager, Mib((processes * mib - budget.0) / 2));
    poll_until("the tree to be within its budget", SOON, || {
        status_of(pager.pid()).filter(|status| status.resident_bytes <= status.budget_bytes)
    });
    proc.watch_anew();
    wait_two_rounds(&proc);
    wait_two_rounds(&proc);
    poll_until("looks at all of the tree", SOON, || (proc.peak().whole > 10).then_some(()));
    let (peak, most) = (proc.peak(), budget.bytes() + overshoot(budget));
    eprintln!("{processes} processes under {budget:?}: {peak:?}, of at most {most}");
    assert!(peak.bytes <= most, "the tree held more");
    assert!(members.iter().all(|&pid| has_uffd(pid)), "not all are paged");
    assert!(!has_uffd(bystander.pid()), "somebody else is paged");
    Gms::line(["detach"]).arg(proc.pid().to_string()).finish().expect_code(0);
    let outcome = attach.finish_proc(pager).expect_code(0);
    assert!(outcome.stats().processes >= processes, "{:?}", outcome.stats());
    members.iter().for_each(|&pid| assert_home(pid, Mib(mib)));
    before.iter().for_each(Before::assert_unchanged);
    wait_two_rounds(&proc);
    proc.close_stdin();
    let outcome = proc.finish().expect_code(0);
    assert!(outcome.text().ends_with("ended, every page right\n"), "{}", outcome.text());
    end_well(bystander);
}

#[test]
fn attach_pages_a_program_of_several_threads() {
    attach_to_a_grove(1, 128, Mib(32));
}

#[test]
fn attach_pages_a_tree_of_threaded_processes_that_fork_on() {
    attach_to_a_grove(3, 48, Mib(36));
}

/// Threads that end while they are stopped for an attach must be reaped (pager/tests/stopped.rs has the single cases): else their process does
/// not end, or an exec of it does not, for which the next attach waits.
#[test]
fn attach_ends_with_a_program_whose_threads_end_all_the_time() {
    let Some(stage) = Stage::set() else { return };
    let mut proc =
        Program::new([c_program("brief")]).args(["60"]).stdin_open().limit(2 * SOON).spawn();
    let attach =
        Gms::attach(&stage, proc.pid()).local(Mib(16)).arg("--export").arg("256M").limit(2 * SOON);
    let mut pager = attach.spawn();
    wait_paged(&mut pager, Mib(4));
    proc.close_stdin();
    assert_eq!(proc.finish().expect_code(0).text(), "brief ok\n");
    attach.finish_proc(pager).expect_code(0);
}

fn niceness(pid: i32) -> String {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("stat");
    let (_, fields) = stat.rsplit_once(')').expect("a name");
    fields.split_whitespace().nth(16).expect("a niceness").to_string()
}

/// The evictor runs in the program's memory, with the program's rights: whatever it has, the program can take.
#[test]
fn an_evictor_has_nothing_that_the_program_should_not() {
    let Some(stage) = Stage::set() else { return };
    let verify = stage.path("verify");
    fs::copy(c_program("verify"), &verify).expect("a copy that everybody may execute");
    let user = ["--reuid=65534", "--clear-groups", "nice", "-n", "5"];
    let proc = Program::new([tool("setpriv")])
        .args(user)
        .args([verify.display().to_string().as_str(), "32", "forever"])
        .dir(stage.dir())
        .stdin_open()
        .spawn();
    proc.wait_output(0, "round 1\n");
    let own = niceness(proc.pid());
    let attach = Gms::attach(&stage, proc.pid()).local(Mib(16)).arg("--export").arg("256M");
    let mut pager = attach.spawn();
    wait_paged(&mut pager, Mib(8));
    let evictor = evictor_of(proc.pid());
    let link = |path: String| fs::read_link(path).expect("a link");
    let forbidden = [link(format!("/proc/{}/fd/2", pager.pid())), "/dev/userfaultfd".into()];
    for entry in fs::read_dir(format!("/proc/{evictor}/fd")).expect("its descriptors") {
        let target = link(entry.expect("an entry").path().display().to_string());
        assert!(!forbidden.contains(&target), "{}", target.display());
    }
    assert_eq!(niceness(evictor), own, "the program's own, not that of a program which is stopped");
    // A directory in use cannot be unmounted.
    assert_eq!(link(format!("/proc/{evictor}/cwd")), PathBuf::from("/"));
    end_well(proc);
    attach.finish_proc(pager).expect_code(0);
}

/// Small, it is not stopped yet when gms is told to attach to it. Whoever has executed a program with other rights by the time at which it is, is not
/// who was looked at.
#[test]
fn a_program_that_has_taken_other_rights_since_it_was_looked_at_is_left_alone() {
    let Some(stage) = Stage::set() else { return };
    let verify = stage.path("verify");
    fs::copy(c_program("verify"), &verify).expect("a copy that everybody may execute");
    let (setpriv, verify) = (tool("setpriv"), verify.display());
    let script = format!(
        "read line; exec {} --reuid=65534 --clear-groups {verify} 64 forever",
        setpriv.display()
    );
    let shell = Program::new([tool("sh")]).args(["-c", &script]).dir(stage.dir());
    let mut proc = shell.stdin_open().spawn();
    let attach = Gms::attach(&stage, proc.pid()).local(Mib(32)).arg("--export").arg("256M");
    let attach = attach.limit(SOON);
    let pager = attach.spawn();
    poll_until("gms to have looked at it", SOON, || status_of(pager.pid()));
    proc.write_stdin(b"\n");
    let refused = attach.finish_proc(pager).expect_code(125);
    assert!(refused.stderr.contains("it has other rights now"), "{}", refused.stderr);
    proc.wait_output(0, "round 1\n");
    end_well(proc);
}

fn kinds_of_wait() -> Vec<String> {
    let list = Program::new([c_program("eintr")]).args(["list"]).finish().expect_code(0).text();
    let kinds: Vec<String> = list.lines().map(String::from).collect();
    assert!(kinds.len() > 15, "{list}");
    kinds
}

#[test]
fn no_wait_is_interrupted_when_memory_grows_past_the_budget() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agent = AgentProc::start(Mib(512));
    for kind in kinds_of_wait() {
        let program = Program::new([c_program("eintr")]).args([kind.as_str(), "run", "48"]);
        let gms = Gms::run(&stage, &program.stdin_open()).local(Mib(16)).agents(&[&agent]);
        let mut proc = gms.spawn();
        wait_paged(&mut proc, Mib(20));
        proc.close_stdin();
        let outcome = gms.finish_proc(proc).expect_code(0);
        assert_eq!(outcome.text(), format!("{kind} ok\n"));
    }
}

#[test]
fn no_wait_is_interrupted_by_an_attach() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agent = AgentProc::start(Mib(512));
    for kind in kinds_of_wait() {
        let program = Program::new([c_program("eintr")]).args([kind.as_str(), "attach", "32"]);
        let mut proc = program.stdin_open().spawn();
        proc.wait_output(0, "ready");
        let attach = Gms::attach(&stage, proc.pid()).local(Mib(8)).agents(&[&agent]);
        let mut pager = attach.spawn();
        wait_paged(&mut pager, Mib(16));
        proc.write_stdin(b"\n");
        let outcome = proc.finish().expect_code(0);
        assert_eq!(outcome.text(), format!("ready\n{kind} ok\n"));
        attach.finish_proc(pager).expect_code(0);
    }
}
