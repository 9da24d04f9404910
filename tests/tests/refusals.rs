//! Processes that cannot be paged, or end while they are about to be: they run on as without gms, and nothing of gms stays behind.

use std::fs;
use std::time::Duration;

use gms_tests::*;

/// How long a program may take that works for less than a second.
const SOON: Duration = Duration::from_secs(30);
/// Lengths of mappings of gms in a process: the memory of its code, and the outbox.
const MAPPINGS_OF_GMS: [u64; 2] = [0xA000, 0x80000];

/// A shell's command line in a PID namespace, which ends with it.
fn alone(stage: &Stage, line: &str) -> Program {
    let unshare = ["-pfm", "--kill-child", "--mount-proc", "sh", "-c"];
    Program::new([tool("unshare")])
        .args(unshare)
        .args([format!("{line}; exit $?")])
        .dir(stage.dir())
        .env("XDG_RUNTIME_DIR", stage.dir())
        .limit(SOON)
}

fn gms_run(options: &str) -> String {
    format!("{} run {options} --", gms_binary().display())
}

/// Failed when evictors of processes that were killed meanwhile stayed: gms paged them in turn, and never ended.
#[test]
fn nothing_stays_of_a_process_killed_during_its_attach() {
    let Some(stage) = Stage::set() else { return };
    let gms = gms_run("--torture 4646804835357587434 --local 48M --export 3072M");
    let line = format!("{gms} {} 200", c_program("kills").display());
    alone(&stage, &line).limit(2 * SOON).finish().expect_code(0);
}

/// As where a container has no /dev/userfaultfd: gms has the right to make a userfaultfd, but a program that gives its rights up has not.
/// Failed when the end of the evictor that could not be set up was taken for the pager's, and killed the process.
#[test]
fn a_program_without_the_right_to_be_paged_stays_resident() {
    let Some(stage) = Stage::set() else { return };
    // A device on a file system mounted without devices cannot be opened by anybody.
    let device = "mkdir d && mount -t tmpfs -o nodev none d && mknod d/uffd c 1 3 && mount --bind d/uffd /dev/userfaultfd";
    let (gms, verify) = (gms_run("--local 32M --export 256M"), stage.path("verify"));
    fs::copy(c_program("verify"), &verify).expect("a copy that everybody may execute");
    let user = "setpriv --reuid=65534 --clear-groups";
    let line = format!("{device} && {gms} {user} {} 96 forever", verify.display());
    let mut proc = alone(&stage, &line).stdin_open().spawn();
    proc.wait_error("that it stays resident", SOON, |text| {
        text.contains("stays resident").then_some(())
    });
    wait_rounds(&proc, 1);
    proc.close_stdin();
    let outcome = proc.finish().expect_code(0);
    assert!(outcome.text().ends_with("every page right\n"), "{}", outcome.text());
}

/// Failed when such a process was stopped for two seconds again and again, or collected mappings of gms until the kernel allowed no more.
#[test]
fn a_program_without_descriptors_for_gms_runs_on_with_nothing_of_gms_in_it() {
    let Some(stage) = Stage::set() else { return };
    for descriptors in [1, 2, 3, 4] {
        let program = Program::new([tool("prlimit")])
            .args([format!("--nofile={descriptors}"), c_program("verify").display().to_string()])
            .args(["64", "forever"])
            .stdin_open()
            .limit(SOON);
        let gms = Gms::run(&stage, &program).local(Mib(16)).arg("--export").arg("256M");
        let mut proc = gms.spawn();
        proc.wait_error("that it stays resident", SOON, |text| {
            text.contains("stays resident").then_some(())
        });
        for _ in 0..3 {
            proc.wait_output(proc.output_len(), "round ");
        }
        let workload = status_of(proc.pid()).unwrap_or_else(|| proc.fail("not listed")).pid;
        // While it is tried once more, there may be some.
        poll_until("no mapping of gms", Duration::from_secs(2), || {
            (mappings(workload).iter().all(|length| !MAPPINGS_OF_GMS.contains(length)))
                .then_some(())
        });
        proc.close_stdin();
        let outcome = gms.finish_proc(proc).expect_code(0);
        assert!(outcome.text().ends_with("every page right\n"), "{}", outcome.text());
    }
}

/// Failed when memory that was met first in a vfork child stayed that child's after its exec: the program that it executed was never paged.
#[test]
fn what_a_vfork_child_executes_is_paged_though_it_was_met_in_the_memory_of_its_parent() {
    let Some(stage) = Stage::set() else { return };
    let verify = c_program("verify").display().to_string();
    let program = Program::new([c_program("vforks")])
        .args(["into", "24", &verify, "96", "forever"])
        .stdin_open();
    let gms = Gms::run(&stage, &program).local(Mib(16)).arg("--export").arg("512M");
    let mut proc = gms.spawn();
    // More than the parent has.
    poll_until("pages of the program to go", SOON, || {
        status_of(proc.pid()).filter(|status| status.pages_out > 48 << 8)
    });
    proc.close_stdin();
    let outcome = gms.finish_proc(proc).expect_code(0);
    assert!(outcome.text().ends_with("every page right\n"), "{}", outcome.text());
}

/// Failed when all descriptors of gms were used for processes that were paged already: a fork of one of those could not be read then.
#[test]
fn forks_find_a_descriptor_where_many_processes_are_paged() {
    let Some(stage) = Stage::set() else { return };
    let (gms, brood) = (gms_run("--local 36M --export 1G"), c_program("brood"));
    let line = format!("ulimit -n 256; {gms} {} 40 60 1", brood.display());
    let outcome = alone(&stage, &line).limit(2 * SOON).finish().expect_code(0);
    assert!(outcome.text().starts_with("brood ok"), "{}", outcome.text());
    assert!(outcome.stderr.contains("too few descriptors"), "{}", outcome.stderr);
}

/// Lengths of the anonymous mappings of a process.
fn mappings(pid: i32) -> Vec<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let anonymous = maps.lines().filter(|line| line.split_whitespace().count() == 5);
    let ends = anonymous.filter_map(|line| line.split_whitespace().next()?.split_once('-'));
    let number = |text| u64::from_str_radix(text, 16).expect("an address");
    ends.map(|(start, end)| number(end) - number(start)).collect()
}
