//! The supervisor dies: no page may ever read as zero.

use std::time::Duration;

use gms_tests::*;
use nix::sys::signal::Signal;

/// The one process that gms runs, when it runs one program.
fn workload_of(supervisor: &mut Proc) -> i32 {
    poll_until("pages at the agents", Duration::from_secs(30), || {
        if supervisor.poll().is_some() {
            supervisor.fail("gms ended early");
        }
        status_of(supervisor.pid()).filter(|status| status.remote_bytes > Mib(32).bytes())
    })
    .pid
}

fn kill_the_supervisor(program: &str, args: &[&str]) {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(512));
    for _ in 0..3 {
        let program = Program::new([c_program(program)]).args(args).stdin_open();
        let mut supervisor = Gms::run(&stage, &program).local(Mib(32)).agents(&[&agent]).spawn();
        let workload = workload_of(&mut supervisor);
        assert!(exists(workload));
        supervisor.signal(Signal::SIGKILL);
        poll_until("the workload to be killed", Duration::from_secs(10), || {
            (!exists(workload)).then_some(())
        });
        let outcome = supervisor.finish();
        assert_eq!(outcome.signal, Some(Signal::SIGKILL as i32));
        assert!(outcome.drained, "somebody still holds the output");
        assert!(
            !outcome.stderr.contains("ZERO PAGE") && !outcome.stderr.contains("MISMATCH"),
            "{}",
            outcome.stderr
        );
        assert!(
            outcome.stderr.contains("gms"),
            "the end is explained on stderr: {:?}",
            outcome.stderr
        );
    }
}

#[test]
fn killing_the_supervisor_kills_the_workload_with_a_message() {
    kill_the_supervisor("verify", &["128", "forever"]);
}

#[test]
fn killing_the_supervisor_kills_forked_children_too() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(512));
    let verify = c_program("verify");
    let script = format!("{0} 96 forever <&0 & {0} 96 forever <&0; wait", verify.display());
    let program =
        Program::new([tool("sh").into_os_string(), "-c".into(), script.into()]).stdin_open();
    let mut supervisor = Gms::run(&stage, &program).local(Mib(48)).agents(&[&agent]).spawn();
    workload_of(&mut supervisor);
    supervisor.signal(Signal::SIGKILL);
    let outcome = supervisor.finish();
    assert!(outcome.drained, "somebody still runs: {}", outcome.stderr);
    assert!(
        !outcome.stderr.contains("ZERO PAGE") && !outcome.stderr.contains("MISMATCH"),
        "{}",
        outcome.stderr
    );
}
