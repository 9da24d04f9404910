//! Pages in stripes with parity: agents are killed, drained and made to lie under a program that checks every byte, as many as there is parity.

use std::time::Duration;

use gms_policy::stripes::{PARTS_MORE_MAX, PARTS_PERCENT_MAX};
use gms_tests::*;

const SLOW: Duration = Duration::from_secs(200);
/// Longer than an agent of a test may live: one that waits for it has not been left by its workload, and fails the test.
const GRACE: [&str; 2] = ["--drain", "1000"];

fn agents<const N: usize>() -> [AgentProc; N] {
    std::array::from_fn(|_| AgentSetup::new(Mib(128)).args(GRACE).start())
}

/// A program that checks its memory round after round until its input ends, paged on these agents.
fn start(stage: &Stage, agents: &[AgentProc], parity: &str) -> (Gms, Proc) {
    let program = Program::new([c_program("verify")]).args(["64", "forever"]).stdin_open();
    let agents: Vec<&AgentProc> = agents.iter().collect();
    let gms = Gms::run(stage, &program.limit(SLOW)).local(Mib(24)).agents(&agents);
    let gms = gms.redundancy(parity);
    let mut proc = gms.spawn();
    proc.wait_output(0, "round 1\n");
    wait_paged(&mut proc, Mib(24));
    wait_until_copied(&proc);
    (gms, proc)
}

/// Waits until nothing is missed any more of what these agents had.
fn wait_rebuilt(proc: &Proc, dead: &[&str]) {
    poll_until("parity at agents that stay", SLOW, || {
        let status = status_of(proc.pid())?;
        let is_left = |agent: &AgentStats| !agent.up && agent.pages_held == 0;
        let mut dead_ones = status.agents.iter().filter(|agent| dead.contains(&&agent.addr[..]));
        (dead_ones.all(is_left) && status.short_bytes == 0).then_some(())
    });
}

fn end_well(gms: &Gms, proc: Proc) -> Outcome {
    end_verified(gms, proc, Mib(64), Mib(24))
}

/// With one agent fewer, stripes are narrower: each of the four that are left may be killed next.
#[test]
fn of_five_agents_each_may_be_killed_and_when_all_is_rebuilt_another() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agents = agents::<5>();
    let (gms, proc) = start(&stage, &agents, "parity:4+1");
    // What is being written is taken, and is not at agents yet: that is over at times.
    poll_until("memory within the law", SLOW, || {
        let status = status_of(proc.pid())?;
        let most = status.remote_bytes / 4 * 5 * PARTS_PERCENT_MAX / 100;
        let besides = 5 * (4 + PARTS_MORE_MAX) * 4096;
        assert!(status.taken_bytes > status.remote_bytes, "{status:?}");
        (status.taken_bytes <= most + besides).then_some(())
    });
    let [first, second, third, fourth, fifth] = agents;
    for agent in [second, fifth] {
        let address = agent.addr();
        agent.kill();
        wait_rounds(&proc, 2);
        wait_rebuilt(&proc, &[&address]);
    }
    let outcome = end_well(&gms, proc);
    drop((first, third, fourth));
    assert!(outcome.stats().pages_made > 0, "{:?}", outcome.stats());
    assert!(outcome.stderr.contains("parity 4+1 of each page"), "{}", outcome.stderr);
    assert_eq!(outcome.stderr.matches(" is away: ").count(), 2, "{}", outcome.stderr);
}

#[test]
fn two_agents_may_be_killed_at_once_where_stripes_have_two_parity_parts() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agents = agents::<5>();
    let (gms, proc) = start(&stage, &agents, "parity:2+2");
    let [first, second, third, fourth, fifth] = agents;
    let dead = [first.addr(), third.addr()];
    first.kill();
    third.kill();
    wait_rounds(&proc, 2);
    wait_rebuilt(&proc, &[&dead[0], &dead[1]]);
    wait_rounds(&proc, 2);
    let outcome = end_well(&gms, proc);
    drop((second, fourth, fifth));
    assert!(outcome.stats().pages_made > 0, "{:?}", outcome.stats());
}

/// One agent is gone, and another gives wrong parts: they are found by their seals, and others taken in their place.
#[test]
fn a_forged_part_is_found_and_its_agent_is_used_no_more() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agents = agents::<5>();
    let (gms, proc) = start(&stage, &agents, "parity:2+2");
    let [first, second, third, fourth, fifth] = agents;
    let forger = second.addr();
    second.spoil_frames();
    first.kill();
    wait_rounds(&proc, 2);
    let outcome = end_well(&gms, proc);
    drop((second, third, fourth, fifth));
    let told = outcome.stderr.lines().find(|line| line.contains("others are used in its place"));
    assert!(told.is_some_and(|line| line.contains(&forger)), "{}", outcome.stderr);
}

#[test]
fn more_losses_than_parity_end_the_workload_and_are_told() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agents = agents::<3>();
    let (gms, proc) = start(&stage, &agents, "parity:2+1");
    let [first, second, third] = agents;
    let again = [first, second].map(|agent| {
        let address = agent.addr();
        agent.kill();
        AgentSetup::new(Mib(128)).listen(address.parse().expect("an address")).start()
    });
    let outcome = gms.finish_proc(proc).expect_code(125);
    drop((third, again));
    assert!(outcome.stderr.contains("a page is lost: more agents"), "{}", outcome.stderr);
    assert!(!outcome.text().contains("wrong"), "{}", outcome.text());
}

/// Its parts move to others before it ends, dead pages among them.
#[test]
fn an_agent_that_drains_is_left_by_its_parts() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agents = agents::<4>();
    let (gms, proc) = start(&stage, &agents, "parity:2+1");
    let [first, second, third, fourth] = agents;
    third.terminate().expect_code(0);
    wait_rounds(&proc, 1);
    end_well(&gms, proc);
    drop((first, second, fourth));
}

/// Pages whose agent is gone are made, also where nobody waits for them.
#[test]
fn a_workload_is_let_go_though_an_agent_is_gone() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agents = agents::<3>();
    let (gms, mut proc) = start(&stage, &agents, "parity:2+1");
    let [first, second, third] = agents;
    first.kill();
    Gms::line(["detach"]).limit(SLOW).arg(proc.pid().to_string()).finish().expect_code(0);
    drop((second, third));
    wait_rounds(&proc, 2);
    proc.close_stdin();
    let outcome = gms.finish_proc(proc).expect_code(0);
    assert!(outcome.text().ends_with("ended, every page right\n"), "{}", outcome.text());
}

#[test]
fn what_parity_does_not_go_with_is_refused() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agents = agents::<2>();
    let agents: Vec<&AgentProc> = agents.iter().collect();
    let program = Program::new(["true"]);
    let gms = Gms::run(&stage, &program).local(Mib(24)).agents(&agents).redundancy("parity:2+1");
    let refused = gms.finish();
    let told = "--redundancy parity:2+1 needs at least 3 agents, 2 are known";
    assert!(refused.code != Some(0) && refused.stderr.contains(told), "{}", refused.stderr);
}
