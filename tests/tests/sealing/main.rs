//! Agents that see nothing, and agents that lie: what they hold is sealed, and what they forge is never read.

mod hostile;

use std::time::Duration;

use gms_tests::*;

use crate::hostile::{HostileAgent, Lie};

const SOON: Duration = Duration::from_secs(30);

/// A program that checks its memory round after round, under gms with these options, and some of its pages at agents.
fn start(stage: &Stage, agents: &[&AgentProc], options: &[&str]) -> (Gms, Proc) {
    let program = Program::new([c_program("verify")]).args(["64", "forever"]).stdin_open();
    let program = program.limit(Duration::from_secs(120));
    let mut gms = Gms::run(stage, &program).local(Mib(24)).agents(agents);
    for option in options {
        gms = gms.arg(*option);
    }
    let mut proc = gms.spawn();
    proc.wait_output(0, "round 1\n");
    wait_paged(&mut proc, Mib(24));
    (gms, proc)
}

fn end_well(gms: &Gms, proc: Proc) -> Outcome {
    end_verified(gms, proc, Mib(64), Mib(24))
}

#[test]
fn agents_never_see_the_program_s_memory() {
    let Some(stage) = Stage::set() else { return };
    // The same twice: what is not found in the one must be found in the other, or the search is blind.
    for (seal, sealed) in [("on", true), ("off", false)] {
        let agent = AgentProc::start(Mib(128));
        let (gms, proc) = start(&stage, &[&agent], &["--seal", seal]);
        let status = poll_until("pages at the agent", SOON, || {
            status_of(proc.pid()).filter(|status| status.agents[0].pages_held > 5000)
        });
        assert_eq!(status.sealed, sealed);
        let held = status.agents[0].pages_held;
        let plaintext = agent.plaintext();
        match sealed {
            true => assert_eq!(plaintext, 0, "pieces of 64 bytes in {held} pages"),
            false => assert!(plaintext > held * 32, "{plaintext} pieces in {held} pages"),
        }
        let outcome = end_well(&gms, proc);
        assert_eq!(outcome.stats().sealed, sealed);
        let said = if sealed { "pages were sealed" } else { "pages were not sealed" };
        assert!(outcome.stderr.contains(said), "{}", outcome.stderr);
    }
}

#[test]
fn what_a_hostile_agent_forges_is_never_read() {
    let Some(stage) = Stage::set() else { return };
    for (lie, seal, mark) in [
        (Lie::Flip, "on", "wrong seal"),
        (Lie::Another, "on", "wrong seal"),
        (Lie::Tag, "on", "wrong seal"),
        (Lie::Short, "on", "wrong seal"),
        (Lie::Flip, "off", "wrong checksum"),
        (Lie::Another, "off", "wrong checksum"),
    ] {
        let agent = HostileAgent::start(Mib(256));
        let (gms, proc) = start(&stage, &[], &["--seal", seal, "--agent", &agent.addr()]);
        agent.lie(lie);
        let outcome = gms.finish_proc(proc);
        assert!(agent.lies() > 0, "{lie:?}: it was not asked");
        assert_eq!(outcome.code, Some(125), "{lie:?}: {}", outcome.stderr);
        let wrong = ["MISMATCH", "ZERO PAGE"].iter().any(|word| outcome.stderr.contains(word));
        assert!(!wrong, "{lie:?}: {}", outcome.stderr);
        let told = outcome.stderr.lines().find(|line| line.starts_with("gms: workload killed: "));
        let told = told.is_some_and(|line| line.contains(mark) && line.contains(&agent.addr()));
        assert!(told, "{lie:?}: {}", outcome.stderr);
    }
}

/// One wrong page is no more than told: it is asked for again.
#[test]
fn a_page_that_was_forged_once_is_asked_for_again() {
    let Some(stage) = Stage::set() else { return };
    let agent = HostileAgent::start(Mib(256));
    let (gms, proc) = start(&stage, &[], &["--agent", &agent.addr()]);
    agent.lie(Lie::Once);
    poll_until("a forged page", SOON, || (agent.lies() == 1).then_some(()));
    wait_rounds(&proc, 2);
    let outcome = end_well(&gms, proc);
    assert!(outcome.stderr.contains("gives back a page with a wrong seal"), "{}", outcome.stderr);
    assert_eq!(agent.lies(), 1);
}

#[test]
fn an_agent_that_cannot_hold_sealed_pages_is_refused() {
    let Some(stage) = Stage::set() else { return };
    let (old, new) = (AgentSetup::new(Mib(128)).old().start(), AgentProc::start(Mib(128)));
    let program = Program::new([c_program("verify")]).args([48, 2]);
    let refused = Gms::run(&stage, &program).local(Mib(16)).agents(&[&old]).finish();
    assert_eq!(refused.code, Some(125), "{}", refused.stderr);
    let told = format!("agent {}: it cannot hold sealed pages: upgrade it", old.addr());
    assert!(refused.stderr.contains(&told), "{}", refused.stderr);
    assert!(refused.stderr.contains("--seal off") && refused.stdout.is_empty());
    // Another one is enough, and gets all.
    let gms = Gms::run(&stage, &program).local(Mib(16)).agents(&[&old, &new]);
    enough_in_time(
        |stats| stats.agent(&new.addr()).pages > 0,
        || {
            let paged = gms.finish().expect_code(0);
            assert!(paged.stderr.contains(&told), "{}", paged.stderr);
            assert_eq!(paged.stats().agent(&old.addr()).pages, 0, "{:?}", paged.stats());
            paged
        },
    );
}
