//! A last copy of each page on a local disk: a program outlives all its agents, and a disk that fails outlives nobody.

use std::time::Duration;

use gms_tests::*;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const SLOW: Duration = Duration::from_secs(200);
/// Of a file system that is no memory.
const DIR: &str = "/var/tmp";

/// A program that checks its memory round after round until its input ends, paged on these agents and a disk.
fn start(stage: &Stage, agents: &[&AgentProc], size: &str) -> (Gms, Proc) {
    let program = Program::new([c_program("verify")]).args(["32", "forever"]).stdin_open();
    let gms = Gms::run(stage, &program.limit(SLOW)).local(Mib(12)).agents(agents);
    let gms = gms.arg("--disk").arg(DIR).arg("--disk-size").arg(size);
    let proc = gms.spawn();
    proc.wait_output(0, "round 1\n");
    (gms, proc)
}

fn end_well(gms: &Gms, proc: Proc) -> Outcome {
    end_verified(gms, proc, Mib(32), Mib(12))
}

/// The process below gms whose name begins so.
fn below(proc: &Proc, begins: &str) -> i32 {
    let found = descendants(proc.pid()).into_iter().find(|&pid| name(pid).starts_with(begins));
    found.expect("it runs")
}

/// As [`wait_until_copied`], of a program that stands still, and gms has looked again since the last page went out.
fn wait_until_all_is_copied(proc: &Proc) {
    let mut before: Option<Status> = None;
    poll_until("copies of every page", SLOW, || {
        let now = status_of(proc.pid())?;
        let rests = before.as_ref().filter(|before| before.pages_out == now.pages_out);
        let used = now.agents.iter().all(|agent| agent.up && agent.pages_held > 0);
        let copied = used && now.short_bytes == 0;
        let has_looked = rests.is_some_and(|before| before.looks < now.looks);
        if rests.is_none() {
            before = Some(now);
        }
        (copied && has_looked).then_some(())
    });
}

#[test]
fn the_only_agent_is_killed_and_the_disk_has_every_page_until_it_is_back() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentSetup::new(Mib(256)).start();
    let (gms, proc) = start(&stage, &[&agent], "256M");
    let address = agent.addr();
    // What goes out while the disk is slow is at the agent alone at first.
    while_stopped(below(&proc, "verify"), || {
        wait_until_all_is_copied(&proc);
        agent.kill();
        wait_until_missed(&proc, &address);
    });
    wait_rounds(&proc, 2);
    let agent = AgentSetup::new(Mib(256)).listen(address.parse().expect("an address")).start();
    wait_until_copied(&proc);
    kill(Pid::from_raw(below(&proc, "far-disk")), Signal::SIGKILL).expect("it runs");
    wait_until_missed(&proc, &format!("on the disk at {DIR}"));
    wait_rounds(&proc, 2);
    let outcome = end_well(&gms, proc);
    for told in ["at an agent, and one on the disk", "(far-disk) has ended: the workload goes on"] {
        assert!(outcome.stderr.contains(told), "{}", outcome.stderr);
    }
    drop(agent);
}

/// What the disk has no room for is at the agent alone, and that is told.
#[test]
fn a_disk_that_is_full_is_done_without() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentSetup::new(Mib(256)).start();
    let (gms, proc) = start(&stage, &[&agent], "8M");
    poll_until("what has no copy to be told", SLOW, || {
        let status = status_of(proc.pid())?;
        (status.short_bytes > 8 << 20 && status.agents[1].pages_held > 0).then_some(())
    });
    wait_rounds(&proc, 1);
    end_well(&gms, proc);
}

#[test]
fn a_disk_takes_what_a_full_agent_has_no_room_for() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentSetup::new(Mib(8)).start();
    let (gms, mut proc) = start(&stage, &[&agent], "256M");
    wait_paged(&mut proc, Mib(16));
    wait_rounds(&proc, 1);
    end_well(&gms, proc);
}

#[test]
fn a_disk_that_cannot_be_used_is_refused_before_anything_starts() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentSetup::new(Mib(16)).start();
    let mark = stage.path("started");
    let program = Program::new([tool("touch")]).args([mark.display()]);
    let run = |args: &[&str], agents: &[&AgentProc]| {
        let gms = Gms::run(&stage, &program).agents(agents);
        args.iter().fold(gms, |gms, arg| gms.arg(arg)).finish()
    };
    let cases: [(&[&str], i32, &str); 5] = [
        (&["--disk", "/nowhere"], 2, "--disk /nowhere: No such file or directory"),
        (&["--disk", DIR, "--disk-size", "1K"], 2, "at least 4 MiB"),
        (&["--disk", "/dev/shm"], 2, "/dev/shm: that is memory"),
        (&["--disk-size", "1G"], 2, "--disk-size needs --disk DIR"),
        (&["--disk", DIR, "--disk-size", "3000G"], 125, "give another directory, or less"),
    ];
    for (args, code, reason) in cases {
        let refused = run(args, &[&agent]).expect_code(code);
        assert!(refused.stderr.contains(reason), "{args:?}: {}", refused.stderr);
    }
    let refused = run(&["--disk", DIR], &[]).expect_code(2);
    assert!(refused.stderr.contains("--disk needs --agent"), "{}", refused.stderr);
    assert!(!mark.exists());
}
