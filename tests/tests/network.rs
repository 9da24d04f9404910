//! Networks that lose, spoil and cut, and agents that stop, lie or die: the program's bytes are right, or it is ended with a message.

use std::time::Duration;

use gms_tests::*;
use nix::sys::signal::Signal;

const SOON: Duration = Duration::from_secs(30);
/// Links that are cut, and agents that are stopped, for less than the 15 s after which a page counts as lost.
const SLOW: Duration = Duration::from_secs(120);

/// A program that checks its memory round after round until its input ends, and the gms that pages it on agents at these addresses.
/// Each page is at one of them.
fn start(stage: &Stage, addresses: &[String]) -> (Gms, Proc) {
    let program = Program::new([c_program("verify")]).args(["64", "forever"]).stdin_open();
    let mut gms =
        Gms::run(stage, &program.limit(SLOW)).local(Mib(24)).agents(&[]).redundancy("none");
    for address in addresses {
        gms = gms.arg("--agent").arg(address);
    }
    let mut proc = gms.spawn();
    proc.wait_output(0, "round 1\n");
    wait_paged(&mut proc, Mib(24));
    (gms, proc)
}

fn end_well(gms: &Gms, proc: Proc) -> Outcome {
    end_verified(gms, proc, Mib(64), Mib(24))
}

/// It was killed, was told why in one line that says `words`, and read nothing wrong.
fn assert_killed(outcome: &Outcome, words: &[&str]) {
    assert_eq!(outcome.code, Some(125), "{}", outcome.stderr);
    assert!(outcome.drained, "somebody still runs: {}", outcome.stderr);
    let wrong = ["MISMATCH", "ZERO PAGE"].iter().any(|word| outcome.stderr.contains(word));
    assert!(!wrong, "{}", outcome.stderr);
    let told = outcome.stderr.lines().find(|line| line.starts_with("gms: workload killed: "));
    let holds = told.is_some_and(|line| words.iter().all(|word| line.contains(word)));
    assert!(holds, "{words:?} in {}", outcome.stderr);
}

fn wait_until_up(proc: &Proc, address: &str, up: bool) {
    poll_until(if up { "the agent to be back" } else { "the agent to be missed" }, SOON, || {
        let status = status_of(proc.pid())?;
        status.agents.iter().find(|agent| agent.addr == address).filter(|agent| agent.up == up)?;
        Some(())
    });
}

#[test]
fn a_network_that_loses_and_spoils_datagrams_costs_time_only() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agent = AgentProc::start(Mib(256));
    let relay = Relay::to(&agent.addr());
    let (gms, proc) = start(&stage, &[relay.addr()]);
    relay.set(Weather { lost: 5, spoiled: 5, repeated: 20, overtaken: 20 });
    poll_until("bad weather", SLOW, || {
        relay.counts().iter().all(|count| *count > 20).then_some(())
    });
    wait_rounds(&proc, 1);
    relay.set(Weather::default());
    end_well(&gms, proc);
}

#[test]
fn a_program_waits_while_its_agent_cannot_be_reached() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agent = AgentProc::start(Mib(256));
    let relay = Relay::to(&agent.addr());
    let (gms, proc) = start(&stage, &[relay.addr()]);
    for _ in 0..2 {
        relay.set(Weather::CUT);
        wait_until_up(&proc, &relay.addr(), false);
        relay.set(Weather::default());
        wait_until_up(&proc, &relay.addr(), true);
        wait_rounds(&proc, 1);
    }
    end_well(&gms, proc);
}

#[test]
fn a_program_ends_when_its_agent_cannot_be_reached_any_more() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let (far, near) = (AgentProc::start(Mib(256)), AgentProc::start(Mib(256)));
    let relay = Relay::to(&far.addr());
    let (gms, proc) = start(&stage, &[relay.addr(), near.addr()]);
    relay.set(Weather::CUT);
    assert_killed(&gms.finish_proc(proc), &[&relay.addr(), "does not give a page back"]);
}

#[test]
fn a_program_waits_for_an_agent_that_is_stopped_and_goes_on() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agent = AgentProc::start(Mib(256));
    let (gms, proc) = start(&stage, &[agent.addr()]);
    agent.signal(Signal::SIGSTOP);
    wait_until_up(&proc, &agent.addr(), false);
    agent.signal(Signal::SIGCONT);
    wait_rounds(&proc, 2);
    end_well(&gms, proc);
}

#[test]
fn a_program_ends_when_its_agent_has_been_restarted() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let (first, other) = (AgentProc::start(Mib(256)), AgentProc::start(Mib(256)));
    let address = first.addr();
    let (gms, proc) = start(&stage, &[address.clone(), other.addr()]);
    first.kill();
    let _again = AgentSetup::new(Mib(256)).listen(address.parse().expect("an address")).start();
    assert_killed(
        &gms.finish_proc(proc),
        &[&address, "has lost the workload's pages", "no link to gms for over a minute"],
    );
}

#[test]
fn a_program_ends_before_it_reads_what_an_agent_has_spoiled() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agent = AgentProc::start(Mib(256));
    let (gms, proc) = start(&stage, &[agent.addr()]);
    agent.spoil_frames();
    assert_killed(&gms.finish_proc(proc), &[&agent.addr(), "wrong seal"]);
}
