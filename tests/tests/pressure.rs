//! Agents give their hosts' memory back: a cgroup stands for a host, with an agent and a program that fills memory in it.

use std::fs;
use std::time::{Duration, Instant};

use gms_tests::*;
use nix::sys::signal::Signal;

const SLOW: Duration = Duration::from_secs(200);
const SOON: Duration = Duration::from_secs(30);
/// As the program is to fill memory, in MiB per second.
const PACE: u64 = 2048;
const HOST: Mib = Mib(1024);
/// The least that an agent leaves to its host.
const RESERVE: u64 = 64;

fn host() -> Option<MemoryGroup> {
    let host = MemoryGroup::new(HOST);
    if host.is_none() {
        skipped("no memory cgroup can be made here");
    }
    host
}

fn hog(host: &MemoryGroup) -> Proc {
    let hog = Program::new([c_program("hog")]).args([PACE]).stdin_open();
    hog.within(host).limit(SLOW).spawn()
}

/// Has the hog fill some more memory; returns what it says: the time that took, and the longest for 2 MiB, in us.
fn fill(hog: &mut Proc, size: Mib) -> (u64, u64) {
    let from = hog.output_len();
    hog.write_stdin(format!("{}\n", size.0).as_bytes());
    hog.wait_output(from, "longest ");
    hog.wait_output(from, "\n");
    let text = hog.output();
    let last = text.trim_end().rsplit('\n').next().unwrap_or_default();
    let numbers: Vec<u64> = last.split([' ', ',']).filter_map(|word| word.parse().ok()).collect();
    let &[filled, time, longest] = &numbers[..] else { hog.fail("it said something else") };
    assert_eq!(filled, size.0);
    (time, longest)
}

fn used(port: u16) -> Option<u64> {
    Some(metric(port, "gms_agent_frames_used")? as u64 / 256)
}

/// What pages have left behind goes back at once, at the pace at which a program asks for it.
#[test]
fn free_frames_go_back_to_a_program_that_fills_its_hosts_memory() {
    let Some(stage) = Stage::set() else { return };
    let Some(host) = host() else { return };
    let size = Mib(HOST.0 - RESERVE - 64);
    let alone = {
        let mut hog = hog(&host);
        let told = fill(&mut hog, size);
        hog.close_stdin();
        hog.finish().expect_code(0);
        told
    };
    let agent = AgentSetup::auto(HOST).within(&host).start();
    let program = Program::new([c_program("still")]).args(["640", "sleep"]).stdin_open();
    let gms = Gms::run(&stage, &program.limit(SLOW)).local(Mib(64)).agents(&[&agent]);
    let mut proc = gms.spawn();
    proc.wait_output(0, "ready\n");
    let is_given = || (host.used() > Mib(500)).then_some(());
    poll_until("the agent to have most of it", SLOW, is_given);
    proc.close_stdin();
    gms.finish_proc(proc).expect_code(0);
    // Most of it would go back after 10 s.
    assert!(is_given().is_some(), "the agent has {:?} only", host.used());
    let mut hog = hog(&host);
    let (time, longest) = fill(&mut hog, size);
    println!("{size:?}: {time} us, 2 MiB at most {longest} us; without an agent {alone:?}");
    assert_eq!(host.oom_kills(), 0);
    // The machine may be busy: what is far from the 10 s tells.
    assert!(time < 2 * alone.0 + 5_000_000, "{time} us");
    hog.close_stdin();
    hog.finish().expect_code(0);
    agent.terminate().expect_code(0);
}

/// Pages move to another agent, without a wrong one, until the host has its reserve again, however much it needs.
#[test]
fn pages_go_elsewhere_while_a_program_fills_their_hosts_memory() {
    let Some(stage) = Stage::set() else { return };
    let Some(host) = host() else { return };
    let ports = [free_port(), free_port()];
    let metrics = ports.map(|port| format!("127.0.0.1:{port}"));
    let agent = AgentSetup::auto(HOST).within(&host).args(["--metrics", &metrics[0]]);
    let (agent, other) = (agent.start(), AgentProc::start(Mib(1024)));
    let program = Program::new([c_program("verify")]).args(["320", "forever"]).stdin_open();
    let gms = Gms::run(&stage, &program.limit(SLOW)).local(Mib(64)).agents(&[&agent, &other]);
    let mut proc = gms.redundancy("none").spawn();
    // All of it: the agent takes no more while the host's memory is filled.
    proc.wait_output(0, "round 0\n");
    let before = used(ports[0]).expect("metrics");
    assert!(before > 64, "only {before} MiB are there");
    let mut hog = hog(&host);
    // All but a part of the reserve, and from then on piece by piece what pages had.
    let first = HOST.0 - host.used().0 - RESERVE / 2;
    let pieces =
        std::iter::once(first).chain(std::iter::repeat_n(RESERVE / 2, before as usize / 64));
    for piece in pieces {
        fill(&mut hog, Mib(piece));
        let began = Instant::now();
        let reserve = RESERVE - RESERVE / 8 - 2;
        poll_until("the host's reserve", SOON, || {
            (host.used().0 + reserve <= HOST.0).then_some(())
        });
        println!("{piece} MiB: the reserve is back after {:?}", began.elapsed());
        assert_eq!(host.oom_kills(), 0);
    }
    let after = used(ports[0]).expect("metrics");
    assert!(after < before / 2 + 16, "{before} MiB before, {after} MiB after");
    proc.wait_output(proc.output_len(), "round ");
    hog.close_stdin();
    hog.finish().expect_code(0);
    proc.close_stdin();
    let outcome = gms_end(proc);
    assert!(outcome.text().ends_with("ended, every page right\n"), "{}", outcome.text());
}

fn gms_end(proc: Proc) -> Outcome {
    proc.finish().expect_code(0)
}

/// Where no other agent has room, a page held is not lost, and the agent says that it cannot give the memory back.
#[test]
fn pages_that_nobody_takes_stay_and_this_is_said() {
    let Some(stage) = Stage::set() else { return };
    let Some(host) = host() else { return };
    let agent = AgentSetup::auto(HOST).within(&host).start();
    let program = Program::new([c_program("verify")]).args(["256", "forever"]).stdin_open();
    let gms = Gms::run(&stage, &program.limit(SLOW)).local(Mib(64)).agents(&[&agent]);
    let mut proc = gms.spawn();
    // What would still come while the host's memory is filled is too much for it.
    proc.wait_output(0, "round 0\n");
    wait_paged(&mut proc, Mib(176));
    let mut hog = hog(&host);
    poll_until("the agent to say so", SOON, || {
        // Pages that the program has itself need not stay at the agent: what they leave behind is taken too, until only others are left.
        let left = HOST.0.saturating_sub(host.used().0 + RESERVE / 2);
        if left > 0 {
            fill(&mut hog, Mib(left));
        }
        agent.log().contains("that nobody takes away").then_some(())
    });
    proc.wait_output(proc.output_len(), "round ");
    assert_eq!(host.oom_kills(), 0);
    proc.close_stdin();
    let outcome = gms_end(proc);
    assert!(outcome.text().ends_with("ended, every page right\n"), "{}", outcome.text());
    poll_until("the agent to be content", SOON, || {
        agent.log().contains("no page is beyond the export").then_some(())
    });
    hog.close_stdin();
    hog.finish().expect_code(0);
}

/// The export of the configuration file holds from SIGHUP on, and pages that are too many leave.
#[test]
fn an_export_that_was_changed_holds_from_sighup_on() {
    let Some(stage) = Stage::set() else { return };
    let (file, ports) = (stage.path("agent.toml"), [free_port(), free_port()]);
    let export = |mib: u64| fs::write(&file, format!("export = \"{mib}M\"\n")).expect("a file");
    export(512);
    let metrics = format!("127.0.0.1:{}", ports[0]);
    let agent = AgentSetup::configured(&file).args(["--metrics", &metrics]).start();
    let other = AgentProc::start(Mib(1024));
    let program = Program::new([c_program("verify")]).args(["256", "forever"]).stdin_open();
    let gms = Gms::run(&stage, &program.limit(SLOW)).local(Mib(64)).agents(&[&agent, &other]);
    let mut proc = gms.redundancy("none").spawn();
    poll_until("pages at the agent", SLOW, || used(ports[0]).filter(|&mib| mib > 64));
    export(32);
    agent.signal(Signal::SIGHUP);
    let began = Instant::now();
    poll_until("pages to leave", SOON, || {
        let exported = metric(ports[0], "gms_agent_frames")?;
        (exported == 32.0 * 256.0 && metric(ports[0], "gms_agent_frames_over")? == 0.0)
            .then_some(())
    });
    println!("pages have left after {:?}", began.elapsed());
    // What is no export changes nothing.
    fs::write(&file, "export = \"many\"\n").expect("a file");
    agent.signal(Signal::SIGHUP);
    poll_until("the agent to say so", SOON, || {
        agent.log().contains("the export stays as it is").then_some(())
    });
    assert_eq!(metric(ports[0], "gms_agent_frames"), Some(32.0 * 256.0));
    proc.wait_output(proc.output_len(), "round ");
    proc.close_stdin();
    let outcome = gms_end(proc);
    assert!(outcome.text().ends_with("ended, every page right\n"), "{}", outcome.text());
}
