//! The pager is killed, again and again: another goes on, and no page is lost or wrong.

use std::time::{Duration, Instant};

use gms_pager::kernel::proc;
use gms_tests::*;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const SOON: Duration = Duration::from_secs(30);
/// Snapshots that are made meanwhile.
const SAVES: usize = 2;
/// Of redis; of others fewer.
const KILLS: usize = 50;
const KILLS_FEW: usize = 15;
/// For a named step to be met.
const TRIES: u64 = 8;
/// Faults that are to be served between some of them.
const FAULTS: u64 = 500;

fn verify(mib: u64) -> Program {
    Program::new([c_program("verify")]).args([mib.to_string().as_str(), "forever"]).stdin_open()
}

/// The status of a workload whose pager may just be taken over from.
fn status(root: i32) -> Status {
    poll_until("the workload", SOON, || status_of(root))
}

/// Kills the pager while `verify`, or a program that speaks like it, reads and writes its pages all the time.
fn killed_under_verify(gms: &Gms, seed: u64) {
    let mut proc = gms.spawn();
    let before = wait_paged(&mut proc, Mib(24));
    let mut killer = Killer::new(proc.pid(), seed);
    for turn in 0..KILLS_FEW {
        if !killer.kill() {
            proc.fail("gms ended early");
        }
        if turn % 5 == 0 {
            let pager = killer.await_next().expect("another pager");
            let first = status(before.pid);
            assert_eq!(first.supervisor_pid, pager);
            poll_until("more faults", SOON, || {
                (status(before.pid).faults >= first.faults + FAULTS).then_some(())
            });
        }
    }
    killer.await_next().expect("another pager");
    wait_rounds(&proc, 1);
    poll_until("no keepers of former pagers", SOON, || {
        let below = descendants(proc.pid());
        (below.iter().filter(|&&pid| name(pid) == "far-keeper").count() == 1).then_some(())
    });
    proc.close_stdin();
    let outcome = gms.finish_proc(proc).expect_code(0);
    assert!(outcome.text().ends_with("ended, every page right\n"), "{}", outcome.text());
    assert!(outcome.drained, "somebody of gms is left");
    let told = outcome.stderr.matches("gms: the pager was killed; another goes on").count();
    // One that is killed at once says nothing.
    assert!((KILLS_FEW / 2..=KILLS_FEW).contains(&told), "{}", outcome.stderr);
}

#[test]
fn a_program_goes_on_when_its_pager_is_killed_with_two_agents() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agents = [AgentProc::start(Mib(512)), AgentProc::start(Mib(512))];
    let gms = Gms::run(&stage, &verify(64)).local(Mib(20)).agents(&[&agents[0], &agents[1]]);
    killed_under_verify(&gms, 1);
}

#[test]
fn a_program_goes_on_when_its_pager_is_killed_with_an_agent_of_its_own_and_a_disk() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let gms = Gms::run(&stage, &verify(64)).local(Mib(20)).arg("--export").arg("512M");
    killed_under_verify(&gms, 2);
    let agent = AgentProc::start(Mib(512));
    let gms = Gms::run(&stage, &verify(64)).local(Mib(20)).agents(&[&agent]);
    let gms = gms.arg("--disk").arg(stage.dir()).arg("--disk-size").arg("512M");
    killed_under_verify(&gms, 3);
}

/// A thread that faults in the kernel with a signal pending can neither be stopped nor asked what it is in.
#[test]
fn a_program_whose_system_calls_fault_while_signals_come_goes_on_when_its_pager_is_killed() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let program = Program::new([c_program("alarms")]).args(["64"]).stdin_open();
    let gms = Gms::run(&stage, &program).local(Mib(20)).arg("--export").arg("512M");
    killed_under_verify(&gms, 10);
}

/// Runs a program that ends by itself, and kills its pagers meanwhile.
fn killed_until_the_end(gms: &Gms, seed: u64) -> Outcome {
    let mut proc = gms.spawn();
    wait_paged(&mut proc, Mib(4));
    let (mut killer, mut killed) = (Killer::new(proc.pid(), seed), 0);
    while proc.poll().is_none() && killed < KILLS && killer.kill() {
        killed += 1;
    }
    assert!(killed > 0, "no kill was in time");
    gms.finish_proc(proc)
}

#[test]
fn threads_served_by_several_fault_threads_go_on_when_their_pager_is_killed() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agent = AgentProc::start(Mib(512));
    let program = Program::new([c_program("threads")]).args([96]);
    let gms = Gms::run(&stage, &program).local(Mib(20)).agents(&[&agent]);
    killed_until_the_end(&gms.arg("--fault-threads").arg("3"), 4).expect_code(0);
}

#[test]
fn programs_that_fork_go_on_when_their_pager_is_killed() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agent = AgentProc::start(Mib(512));
    let forkcow = Program::new([c_program("forkcow")]).args([64]);
    let gms = Gms::run(&stage, &forkcow).local(Mib(32)).agents(&[&agent]);
    killed_until_the_end(&gms, 8).expect_code(0);
}

/// Failed when children of a process of which nothing was away were not known to whoever went on: all of the workload was killed.
#[test]
fn children_that_were_just_born_go_on_when_their_pager_is_killed() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agent = AgentProc::start(Mib(512));
    let program = Program::new([c_program("sprouts")]).args(["64"]).stdin_open();
    let gms = Gms::run(&stage, &program).local(Mib(24)).agents(&[&agent]);
    let mut proc = gms.spawn();
    proc.wait_output(0, "ready\n");
    wait_paged(&mut proc, Mib(24));
    let mut killer = Killer::new(proc.pid(), 9);
    for _ in 0..KILLS_FEW {
        if !killer.kill() {
            proc.fail("gms ended early");
        }
        proc.wait_output(proc.output_len(), "forked ");
    }
    proc.close_stdin();
    let outcome = gms.finish_proc(proc).expect_code(0);
    assert!(outcome.text().ends_with("every page right\n"), "{}", outcome.text());
}

#[test]
fn redis_and_its_snapshots_keep_their_digest_when_the_pager_is_killed_fifty_times_under_load() {
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
    wait_paged(&mut proc, Mib(24));
    let mut killer = Killer::new(proc.pid(), 5);
    let (mut saver, mut killed) = (Redis::connect(&mut proc, &socket), 0);
    std::thread::scope(|scope| {
        let saver = scope.spawn(|| (0..SAVES).for_each(|_| saver.background_save()));
        let slowest = redis.check_while(DATA, || {
            while killed < KILLS || !saver.is_finished() {
                assert!(killer.kill(), "after {killed} kills nothing is left of gms");
                killed += 1;
            }
            killer.await_next().expect("another pager");
        });
        told(&format!("the slowest request took {slowest:?} beside {killed} kills"));
    });
    redis.check(DATA, 500);
    assert_eq!(redis.digest(), expected);
    redis.shut_down();
    assert_eq!(Redis::digest_of_snapshot(&stage, "paged"), expected);
    let outcome = gms.finish_proc(proc).expect_code(0);
    let told = outcome.stderr.matches("another goes on").count();
    assert!((killed / 2..=killed).contains(&told), "{}", outcome.stderr);
}

/// What a run of `mapfuzz` says of the bytes that it has read.
fn digest_of(outcome: &Outcome) -> String {
    let text = outcome.text();
    text.lines().last().unwrap_or_default().to_owned()
}

/// Between the two sides of what must not be assumed to be one step.
const POINTS: [&str; 24] = [
    "before-read",
    "between-look-and-read",
    "after-read",
    "before-gate-opens",
    "after-decision",
    "before-copy",
    "after-copy",
    "after-register",
    "before-scan",
    "after-scan",
    "before-move",
    "after-move",
    "before-mark",
    "after-mark",
    "before-outbox-read",
    "before-eviction-is-noted",
    "before-unshare",
    "before-reply",
    "after-reply",
    "before-written-is-noted",
    "before-fork",
    "before-attach",
    "while-attaching",
    "after-attach",
];

/// Has a pager die at each named step, by runs to which that is given. What comes seldom comes once at least.
fn die_at_each_step(seed: u64, run: impl Fn(String) -> Outcome) {
    let mut dice = Dice::new(seed);
    for point in POINTS {
        // At the first visit of some nobody can go on: a process of which nothing is known yet has been registered.
        let visits = [1 + dice.below(8), 2].into_iter().chain(std::iter::repeat(1));
        let met = visits.take(TRIES as usize).any(|visit| {
            // Shown if it fails: the command may end in the midst of what is asked of it.
            println!("to die at {point}:{visit}");
            let outcome = run(format!("{point}:{visit}")).expect_code(0);
            assert!(!outcome.stderr.contains("ZERO") && !outcome.stderr.contains("MISMATCH"));
            outcome.stderr.contains("another goes on")
        });
        assert!(met, "{point} is never met");
    }
}

/// By a program that changes its memory in all ways.
#[test]
fn a_pager_may_die_at_every_named_step() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agent = AgentProc::start(Mib(512));
    let program = Program::new([c_program("mapfuzz")]).args(["7", "400", "64"]);
    let expected = digest_of(&program.finish().expect_code(0));
    assert!(expected.contains("mapfuzz ok"), "{expected}");
    die_at_each_step(9, |step| {
        let gms = Gms::run(&stage, &program).local(Mib(16)).agents(&[&agent]);
        let outcome = gms.arg("--die-at").arg(&step).finish().expect_code(0);
        assert_eq!(digest_of(&outcome), expected, "{step}");
        outcome
    });
}

#[test]
fn redis_keeps_its_digest_when_its_pager_dies_at_any_named_step() {
    let Some(stage) = Stage::set_beside_others() else { return };
    const DATA: Mib = Mib(16);
    let expected = Redis::digest_without_gms(&stage, DATA);
    let agents = [AgentProc::start(Mib(512)), AgentProc::start(Mib(512))];
    die_at_each_step(11, |step| {
        let _ = std::fs::remove_file(stage.path("paged.rdb"));
        let (server, socket) = Redis::server(&stage, "paged");
        let gms = Gms::run(&stage, &server).local(Mib(8)).agents(&[&agents[0], &agents[1]]);
        let gms = gms.arg("--die-at").arg(&step);
        let mut proc = gms.spawn();
        let mut redis = Redis::connect(&mut proc, &socket);
        redis.fill(DATA);
        redis.background_save();
        redis.check(DATA, 500);
        assert_eq!(redis.digest(), expected, "{step}");
        redis.shut_down();
        let outcome = gms.finish_proc(proc);
        assert_eq!(Redis::digest_of_snapshot(&stage, "paged"), expected, "{step}");
        outcome
    });
}

/// Whoever is to go on is killed too, before it does, or at once.
#[test]
fn a_pager_that_is_killed_while_it_takes_over_is_taken_over_from() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agent = AgentProc::start(Mib(512));
    let gms = Gms::run(&stage, &verify(64)).local(Mib(20)).agents(&[&agent]);
    let mut proc = gms.spawn();
    wait_paged(&mut proc, Mib(24));
    let (mut killer, mut dice) = (Killer::new(proc.pid(), 6), Dice::new(6));
    let mut early = 0;
    for _ in 0..KILLS_FEW {
        let before = proc::children(proc.pid());
        if !killer.kill() {
            proc.fail("gms ended early");
        }
        let heir = poll_until("who is to go on", SOON, || {
            if proc.poll().is_some() {
                proc.fail("gms ended early");
            }
            let now = proc::children(proc.pid()).into_iter();
            now.into_iter().find(|pid| !before.contains(pid) && exists(*pid))
        });
        let until = Instant::now() + Duration::from_micros(dice.below(40_000));
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        early += u32::from(killer.pager() != Some(heir));
        let _ = kill(Pid::from_raw(heir), Signal::SIGKILL);
        killer.note(heir);
        killer.await_next().unwrap_or_else(|| proc.fail("gms ended early"));
    }
    told(&format!("{early} of {KILLS_FEW} had not begun"));
    wait_rounds(&proc, 1);
    proc.close_stdin();
    let outcome = gms.finish_proc(proc).expect_code(0);
    assert!(outcome.text().ends_with("ended, every page right\n"), "{}", outcome.text());
}

/// A shell with memory of its own that says what it is sent, and ends with a status of its own; then another binary, and a detach.
#[test]
fn signals_upgrades_detaching_and_the_exit_status_are_as_before_the_death() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let script = format!(
        "exec 3<&0; trap 'echo usr1' USR1; trap 'exit 7' TERM; {} 96 forever <&3 & echo ready; while :; do wait; done",
        c_program("verify").display()
    );
    let program = Program::new([tool("sh").into_os_string(), "-c".into(), script.into()]);
    let gms = Gms::run(&stage, &program.stdin_open()).local(Mib(20)).arg("--export").arg("512M");
    let mut proc = gms.spawn();
    let before = wait_paged(&mut proc, Mib(24));
    let mut killer = Killer::new(proc.pid(), 7);
    assert!(killer.kill());
    killer.await_next().expect("another pager");
    proc.signal(Signal::SIGUSR1);
    proc.wait_output(0, "usr1");
    poll_until("an upgrade", SOON, || {
        let done = Gms::line(["upgrade".to_string(), before.pid.to_string()]).finish();
        (done.code == Some(0)).then_some(())
    });
    assert!(killer.kill());
    killer.await_next().expect("another pager");
    status(before.pid);
    Gms::line(["detach".to_string(), before.pid.to_string()]).finish().expect_code(0);
    proc.signal(Signal::SIGTERM);
    proc.close_stdin();
    let outcome = gms.finish_proc(proc).expect_code(7);
    assert!(outcome.drained, "somebody is left");
}

/// The keeper is what starts another pager.
#[test]
fn without_a_keeper_no_other_pager_goes_on() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let gms = Gms::run(&stage, &verify(64)).local(Mib(20)).arg("--export").arg("512M");
    let mut proc = gms.spawn();
    let before = wait_paged(&mut proc, Mib(24));
    let below = descendants(proc.pid());
    let keeper = below.into_iter().find(|&pid| name(pid) == "far-keeper").expect("a keeper");
    for pid in [keeper, before.supervisor_pid] {
        kill(Pid::from_raw(pid), Signal::SIGKILL).expect("it runs");
    }
    let outcome = proc.finish().expect_code(125);
    let told = "the pager was ended by signal 9, so the command was killed";
    assert!(outcome.stderr.contains(told), "{}", outcome.stderr);
    assert!(!outcome.stderr.contains("ZERO PAGE") && !outcome.stderr.contains("MISMATCH"));
}

/// What is known of stripes is in the pager alone.
#[test]
fn with_parity_no_other_pager_goes_on() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agents = [(); 3].map(|()| AgentProc::start(Mib(256)));
    let gms = Gms::run(&stage, &verify(64)).local(Mib(20)).redundancy("parity:2+1");
    let gms = gms.agents(&[&agents[0], &agents[1], &agents[2]]);
    let mut proc = gms.spawn();
    let before = wait_paged(&mut proc, Mib(24));
    kill(Pid::from_raw(before.supervisor_pid), Signal::SIGKILL).expect("the pager");
    let outcome = proc.finish().expect_code(125);
    assert!(outcome.stderr.contains("gms: the pager has died: process"), "{}", outcome.stderr);
    assert!(!outcome.stderr.contains("ZERO PAGE") && !outcome.stderr.contains("MISMATCH"));
}
