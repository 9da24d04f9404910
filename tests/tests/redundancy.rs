//! Pages that several agents have: agents are killed, stopped, restarted empty, drained and made to lie under a program, which loses no page.

use std::time::Duration;

use gms_tests::*;
use nix::sys::signal::Signal;

const SLOW: Duration = Duration::from_secs(200);
/// Longer than an agent of a test may live: one that waits for it has not been left by its workload, and fails the test.
const GRACE: [&str; 2] = ["--drain", "1000"];

/// A program that checks its memory round after round until its input ends, paged on these agents.
fn start(stage: &Stage, agents: &[&AgentProc]) -> (Gms, Proc) {
    let program = Program::new([c_program("verify")]).args(["64", "forever"]).stdin_open();
    let gms = Gms::run(stage, &program.limit(SLOW)).local(Mib(24)).agents(agents);
    let mut proc = gms.spawn();
    proc.wait_output(0, "round 1\n");
    wait_paged(&mut proc, Mib(24));
    wait_until_copied(&proc);
    (gms, proc)
}

fn end_well(gms: &Gms, proc: Proc) -> Outcome {
    end_verified(gms, proc, Mib(64), Mib(24))
}

fn again(agent: &str) -> AgentProc {
    AgentSetup::new(Mib(256)).listen(agent.parse().expect("an address")).args(GRACE).start()
}

fn agents<const N: usize>() -> [AgentProc; N] {
    std::array::from_fn(|_| AgentSetup::new(Mib(256)).args(GRACE).start())
}

/// Waits until gms has said each of these once more than it had `rounds` times.
fn wait_told(proc: &Proc, rounds: usize, what: [&str; 2]) {
    proc.wait_error("what gms says of its agents", SLOW, |log| {
        what.iter().all(|text| log.matches(text).count() > rounds).then_some(())
    });
}

#[test]
fn a_killed_agent_costs_no_page_and_when_it_is_back_the_other_may_be_killed() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let [first, second] = agents();
    let (gms, proc) = start(&stage, &[&first, &second]);
    let mut alive = second;
    let mut dead = first;
    for round in 0..2 {
        let address = dead.addr();
        dead.kill();
        wait_rounds(&proc, 2);
        // Until then it passes for an agent that has every page.
        wait_until_missed(&proc, &address);
        wait_told(
            &proc,
            round,
            [" is away: ", "pages have fewer than 2 copies at agents that stay"],
        );
        dead = again(&address);
        wait_until_copied(&proc);
        wait_told(&proc, round, [" answers again", "every page has 2 copies at agents that stay"]);
        std::mem::swap(&mut dead, &mut alive);
    }
    wait_rounds(&proc, 1);
    let outcome = end_well(&gms, proc);
    assert!(outcome.stderr.contains("2 copies of each page"), "{}", outcome.stderr);
    for change in [" is away: ", " answers again"] {
        assert_eq!(outcome.stderr.matches(change).count(), 2, "{}", outcome.stderr);
    }
}

#[test]
fn a_stopped_agent_is_not_waited_for() {
    let Some(stage) = Stage::set() else { return };
    let [first, second] = agents();
    let (gms, proc) = start(&stage, &[&first, &second]);
    // Of two that are alike one is asked for nearly all pages: it is one of these times.
    for agent in [&first, &second] {
        agent.signal(Signal::SIGSTOP);
        wait_rounds(&proc, 2);
        agent.signal(Signal::SIGCONT);
        wait_until_copied(&proc);
    }
    let outcome = end_well(&gms, proc);
    // Alone, it would have been waited for until its link was given up: 5 s.
    let longest = outcome.stats().fault_us.max;
    assert!(longest < 3e6, "a fault took {longest} us");
}

/// Of one process many threads wait, for which several fault threads ask: each of them asks the other agent when one is killed or stopped.
#[test]
fn workers_ask_another_agent_as_their_home_does() {
    let Some(stage) = Stage::set() else { return };
    let program = Program::new([c_program("crowd")]).args(["48", "5000", "held"]);
    let native = program.clone().stdin("\n").finish().expect_code(0);
    let program = program.stdin_open().limit(SLOW);
    // Of two that are alike one is asked for nearly all pages: it is one of those that are stopped.
    let mut hedges = 0;
    for (signal, who) in [(Signal::SIGKILL, 0), (Signal::SIGSTOP, 0), (Signal::SIGSTOP, 1)] {
        let agents = agents::<2>();
        let gms = Gms::run(&stage, &program).local(Mib(16)).agents(&[&agents[0], &agents[1]]);
        let gms = gms.arg("--fault-threads").arg("3");
        let mut proc = gms.spawn();
        proc.wait_output(0, "held\n");
        wait_until_copied(&proc);
        let before = status_of(proc.pid()).expect("its status").faults;
        proc.write_stdin(b"\n");
        poll_until("faults of the crowd", SLOW, || {
            (status_of(proc.pid())?.faults > before + 2000).then_some(())
        });
        agents[who].signal(signal);
        let outcome = gms.finish_proc(proc).expect_code(0);
        agents[who].signal(Signal::SIGCONT);
        assert_eq!(outcome.stdout, native.stdout);
        let stats = outcome.stats();
        assert!(stats.lent_faults > 0, "{stats:?}");
        if signal == Signal::SIGSTOP {
            assert!(stats.fault_us.max < 3e6, "{stats:?}");
            hedges += stats.lent_hedges;
        }
    }
    // What a worker asks nobody else for it gives back after 2 s, and its home asks: no time tells that from a busy machine.
    assert!(hedges > 0, "workers have waited for an agent that was stopped");
}

#[test]
fn of_three_agents_two_may_be_killed_at_once_where_three_have_each_page() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let [first, second, third] = agents();
    let program = Program::new([c_program("verify")]).args(["64", "forever"]).stdin_open();
    let gms = Gms::run(&stage, &program.limit(SLOW)).local(Mib(24));
    let gms = gms.agents(&[&first, &second, &third]).redundancy("replica:3");
    let proc = gms.spawn();
    proc.wait_output(0, "round 1\n");
    wait_until_copied(&proc);
    first.kill();
    third.kill();
    wait_rounds(&proc, 2);
    end_well(&gms, proc);
}

#[test]
fn an_agent_that_gives_wrong_pages_is_used_no_more() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let [first, second] = agents();
    let (gms, proc) = start(&stage, &[&first, &second]);
    let address = first.addr();
    first.spoil_frames();
    wait_rounds(&proc, 2);
    let outcome = end_well(&gms, proc);
    let told = outcome.stderr.lines().find(|line| line.contains("others are used in its place"));
    assert!(told.is_some_and(|line| line.contains(&address)), "{}", outcome.stderr);
}

/// Each agent is asked to end, and replaced by a new one at its address, while redis serves: nobody waits for the agent's grace, and no byte is lost.
#[test]
fn agents_are_upgraded_one_after_the_other_under_redis() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let data = Mib(64);
    let agents: [AgentProc; 2] = agents();
    let (server, socket) = Redis::server(&stage, "upgraded");
    let gms = Gms::run(&stage, &server).local(Mib(24)).agents(&[&agents[0], &agents[1]]);
    let mut proc = gms.spawn();
    let mut redis = Redis::connect(&mut proc, &socket);
    redis.fill(data);
    let digest = redis.digest();
    let mut upgraded = Vec::new();
    for agent in agents {
        wait_until_copied(&proc);
        let address = agent.addr();
        agent.terminate().expect_code(0);
        assert_eq!(redis.digest(), digest, "with one agent");
        upgraded.push(again(&address));
    }
    wait_until_copied(&proc);
    redis.check(data, 1_000);
    assert_eq!(redis.digest(), digest);
    redis.shut_down();
    gms.finish_proc(proc).expect_code(0);
}

/// Without copies, the pages of an agent that is to end move to the other one before it does.
#[test]
fn an_agent_that_drains_is_left_by_its_pages() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let [first, second] = agents();
    let program = Program::new([c_program("verify")]).args(["64", "forever"]).stdin_open();
    let gms = Gms::run(&stage, &program.limit(SLOW)).local(Mib(24));
    let gms = gms.agents(&[&first, &second]).redundancy("none");
    let proc = gms.spawn();
    proc.wait_output(0, "round 0\n");
    wait_until_copied(&proc);
    first.terminate().expect_code(0);
    wait_rounds(&proc, 2);
    end_well(&gms, proc);
}

/// It would count as two.
#[test]
fn an_agent_by_two_names_is_refused_before_anything_starts() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(64));
    let addr = agent.addr();
    let port = addr.rsplit_once(':').expect("a port").1;
    let names = [format!("127.0.0.1:{port}"), format!("127.1:{port}")];
    let mark = stage.path("started");
    let program = Program::new([tool("touch")]).args([mark.display()]);
    let gms = Gms::run(&stage, &program).agents(&[&agent]);
    let outcome = gms.arg("--agent").arg(&names[1]).finish().expect_code(125);
    for words in [&names[0], &names[1], "are one", "name it once"] {
        assert!(outcome.stderr.contains(words), "{words}: {}", outcome.stderr);
    }
    assert!(!mark.exists());
}

#[test]
fn copies_of_which_there_can_be_no_agents_are_refused_before_anything_starts() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let [agent] = agents();
    let mark = stage.path("started");
    let program = Program::new([tool("touch")]).args([mark.display()]);
    let gms = Gms::run(&stage, &program).agents(&[&agent]).redundancy("replica:2");
    let refused = gms.finish().expect_code(125);
    assert!(refused.stderr.contains("needs at least 2 agents"), "{}", refused.stderr);
    assert!(!mark.exists());
}
