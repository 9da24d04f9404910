//! What happens while no agent takes pages: because all are full, or because none is there.

use std::time::Duration;

use gms_tests::*;
use nix::sys::signal::Signal;

const SOON: Duration = Duration::from_secs(30);

fn still(mib: Mib, more: &[&str]) -> Proc {
    let size = mib.0.to_string();
    let argv = [size.as_str(), "sleep"].into_iter().chain(more.iter().copied());
    let proc = Program::new([c_program("still")]).args(argv).stdin_open().spawn();
    proc.wait_output(0, "ready\n");
    proc
}

fn line(proc: &mut Proc, answer: &str) {
    let from = proc.output_len();
    proc.write_stdin(b"\n");
    proc.wait_output(from, answer);
}

/// A program that has all its memory already, and so never waits for room.
#[test]
fn a_budget_that_cannot_be_kept_is_told_at_once() {
    let Some(stage) = Stage::set() else { return };
    let mut proc = still(Mib(128), &[]);
    let attach = Gms::attach(&stage, proc.pid()).local(Mib(16)).arg("--export").arg("32M");
    let pager = attach.spawn();
    pager.wait_error("that the budget is exceeded", SOON, |text| {
        (text.contains("exceeds its budget") && text.contains("full")).then_some(())
    });
    poll_until("the status to say so", SOON, || status_of(pager.pid()).filter(|s| s.agents_full));
    let table = Gms::line(["status"]).finish().expect_code(0).text();
    assert!(table.contains("agents full"), "{table}");
    line(&mut proc, "right\n");
    proc.close_stdin();
    proc.finish().expect_code(0);
    let outcome = attach.finish_proc(pager).expect_code(0);
    assert!(outcome.stats().agents_full_s > 0.0, "{:?}", outcome.stats());
    assert!(!outcome.stderr.contains("never needed paging"), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("no agent took pages"), "{}", outcome.stderr);
}

#[test]
fn a_program_waits_until_an_agent_has_room() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(96));
    // Fills the agent.
    let other = still(Mib(110), &[]);
    let attach = Gms::attach(&stage, other.pid()).local(Mib(16)).agents(&[&agent]);
    let pager = attach.spawn();
    poll_until("the agent to be nearly full", SOON, || {
        status_of(pager.pid()).filter(|status| status.remote_bytes > Mib(80).bytes())
    });
    // All of it may be resident when the pager meets it: that is within the bound.
    let program = Program::new([c_program("verify")]).args(["84", "forever"]).stdin_open();
    let gms =
        Gms::run(&stage, &program).local(Mib(32)).agents(&[&agent]).arg("--when-full").arg("wait");
    let mut waiting = gms.spawn();
    waiting.wait_error("that it waits", SOON, |text| {
        text.contains("the workload waits").then_some(())
    });
    poll_until("the status to say so", SOON, || status_of(waiting.pid()).filter(|s| s.agents_full));
    // Lets the agent's frames go.
    drop(other);
    drop(attach.finish_proc(pager));
    wait_paged(&mut waiting, Mib(40));
    end_verified(&gms, waiting, Mib(84), Mib(32));
}

#[test]
fn a_program_is_killed_if_that_was_asked_for() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(16));
    let program = Program::new([c_program("verify")]).args(["96", "forever"]).stdin_open();
    let gms = Gms::run(&stage, &program).local(Mib(32)).agents(&[&agent]);
    let outcome = gms.arg("--when-full").arg("kill").finish().expect_code(125);
    assert!(outcome.stderr.contains("--when-full is kill"), "{}", outcome.stderr);
    assert!(outcome.drained, "the program still runs");
}

/// Pages that are resident, of which the agent has a copy, are not dropped onto it when it is no longer there.
#[test]
fn unchanged_pages_are_not_left_to_an_agent_that_is_down() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(512));
    let mut proc = still(Mib(96), &["24"]);
    let attach = Gms::attach(&stage, proc.pid()).local(Mib(32)).agents(&[&agent]);
    let pager = attach.spawn();
    poll_until("pages at the agent", SOON, || {
        status_of(pager.pid()).filter(|status| status.remote_bytes > Mib(56).bytes())
    });
    line(&mut proc, "kept\n");
    agent.kill();
    poll_until("the agent to be missed", SOON, || {
        status_of(pager.pid()).filter(|status| !status.agents[0].up)
    });
    // As much again: something has to go.
    proc.write_stdin(b"\n");
    line(&mut proc, "right\n");
    proc.close_stdin();
    proc.finish().expect_code(0);
    // Dropped onto it, they could not be had, and the workload would have been killed.
    attach.finish_proc(pager).expect_code(0);
}

/// An agent that is being stopped still gives pages back: it is told as what it is, and not as lost.
#[test]
fn an_agent_that_drains_is_told_as_such() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentSetup::new(Mib(512)).args(["--drain", "600"]).start();
    let mut proc = still(Mib(96), &[]);
    let attach = Gms::attach(&stage, proc.pid()).local(Mib(32)).agents(&[&agent]);
    let pager = attach.spawn();
    poll_until("pages at the agent", SOON, || {
        status_of(pager.pid()).filter(|status| status.remote_bytes > Mib(56).bytes())
    });
    agent.signal(Signal::SIGTERM);
    poll_until("the drain to be told", SOON, || {
        status_of(pager.pid()).filter(|s| s.agents[0].draining && s.agents[0].up)
    });
    let table = Gms::line(["status"]).finish().expect_code(0).text();
    assert!(table.contains("agent drains"), "{table}");
    line(&mut proc, "right\n");
    proc.close_stdin();
    proc.finish().expect_code(0);
    let outcome = attach.finish_proc(pager).expect_code(0);
    assert!(!outcome.stderr.contains("connection lost"), "{}", outcome.stderr);
}
