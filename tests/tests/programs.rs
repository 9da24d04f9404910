//! Programs that people run: shells, sort, Python, Go, Java.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Duration;

use gms_tests::*;

const SOON: Duration = Duration::from_secs(30);

at_25_and_50_percent! {
    python_collects_forks_and_runs_subprocesses => python;
    a_static_go_program_collects_its_garbage => go;
    java_with_the_g1_collector => |percent| java("-XX:+UseG1GC", percent);
    shell_chains_fork_and_exec => shell;
}

fn python(percent: u64) {
    let Some(stage) = Stage::set() else { return };
    let program = Program::new([tool("python3"), source("churn.py")]).args(["80"]);
    let paged = pages_like_native(&stage, &program, None, percent);
    assert!(
        paged.stats().processes >= 4,
        "the subprocess and the pool's workers were seen: {:?}",
        paged.stats()
    );
}

fn go(percent: u64) {
    let Some(stage) = Stage::set() else { return };
    pages_like_native(&stage, &Program::new([go_program()]).args(["64"]), None, percent);
}

fn java(collector: &str, percent: u64) {
    let Some(stage) = Stage::set() else { return };
    let program = Program::new([tool("java")])
        .args([collector, "-Xmx192m", "-Xss512k", "-XX:TieredStopAtLevel=1", "-cp"])
        .args([java_classes().display()])
        .args(["Churn", "56"]);
    pages_like_native(&stage, &program, None, percent);
}

#[test]
fn java_with_the_serial_collector_with_25_percent_resident() {
    java("-XX:+UseSerialGC", 25);
}

/// Lines of random letters, the same each time.
fn write_lines(path: &Path, count: u64) {
    let mut file = BufWriter::new(File::create(path).expect("input of sort"));
    let mut dice = Dice::new(1);
    for _ in 0..count {
        writeln!(file, "{:016x}{:016x}{:020}", dice.bits(), dice.bits(), dice.bits())
            .expect("input of sort");
    }
    file.flush().expect("input of sort");
}

#[test]
fn sort_of_a_large_file_is_the_same_with_25_percent_resident() {
    let Some(stage) = Stage::set() else { return };
    let (input, native_output, output) =
        (stage.path("input"), stage.path("native"), stage.path("paged"));
    write_lines(&input, 500_000);
    let sort = |to: &Path| {
        let argv = [
            tool("sort").into_os_string(),
            "-S".into(),
            "512M".into(),
            "--parallel=2".into(),
            input.clone().into(),
        ];
        Program::new(argv).env("LC_ALL", "C").stdout_to(to)
    };
    let native = sort(&native_output).finish().expect_code(0);
    let working_set = Mib(native.peak.bytes >> 20);
    let budget = working_set.percent(25);
    let agent = AgentProc::start(Mib(1024));
    let sum = |path: &Path| {
        let text = Program::new([tool("sha256sum").as_path(), path]).finish().expect_code(0).text();
        text.split_whitespace().next().map(String::from)
    };
    paged_in_time(working_set, budget, || {
        let gms = Gms::run(&stage, &sort(&output)).local(budget).agents(&[&agent]);
        let paged = gms.finish().expect_code(0);
        assert_eq!(sum(&output), sum(&native_output), "checksums of the sorted files");
        paged
    });
}

fn shell(percent: u64) {
    let Some(stage) = Stage::set() else { return };
    let verify = c_program("verify");
    let script = format!(
        "set -e; v={}; a=$($v 48 1); (exec sh -c \"exec $v 64 1\"); $v 32 1 | cat & wait $!; \
         for i in 1 2 3; do sh -c 'true'; done; echo $a; exec $v 96 1",
        verify.display()
    );
    let program = Program::new([tool("sh").into_os_string(), "-c".into(), script.into()]);
    pages_like_native(&stage, &program, Some(Mib(96)), percent);
}

#[test]
fn a_daemon_is_paged_after_its_starter_has_ended() {
    let Some(stage) = Stage::set() else { return };
    let verify = c_program("verify");
    let native = Program::new([verify.clone()]).args(["128", "1"]).finish().expect_code(0);
    let output = stage.path("daemon");
    let script =
        format!("setsid {} 128 1 >{} 2>&1 </dev/null & exit 3", verify.display(), output.display());
    let program = Program::new([tool("sh").into_os_string(), "-c".into(), script.into()]);
    let agent = AgentProc::start(Mib(512));
    let gms = Gms::run(&stage, &program).local(Mib(32)).agents(&[&agent]);
    paged_in_time(Mib(128), Mib(32), || {
        let paged = gms.finish().expect_code(3);
        // gms ends when nobody of the tree is left.
        let text = std::fs::read(&output).expect("what the daemon printed");
        assert_eq!(text, native.stdout, "{}", String::from_utf8_lossy(&text));
        paged
    });
}

/// As on a busy machine: the command has ended, and its daemon runs, when the pager gets a CPU.
#[test]
fn a_daemon_is_paged_whose_starter_has_ended_before_gms_has_met_it() {
    let Some(stage) = Stage::set() else { return };
    let output = stage.path("daemon");
    let verify = c_program("verify");
    let (verify, to) = (verify.display(), output.display());
    let script = format!("exec 3<&0; {verify} 128 forever <&3 >{to} & exit 3");
    let gms = Program::new([env!("CARGO_BIN_EXE_gms-unpaged"), "sh", "-c", &script]);
    let mut proc = gms.env("GMS_TEST_PLAY", "late").stdin_open().spawn();
    let least = (128 - 32) * 256;
    poll_until("pages that go and come back", SOON, || {
        let status = status_of(proc.pid())?;
        (status.pages_out >= least && status.pages_in > 0).then_some(())
    });
    proc.close_stdin();
    let late = proc.finish().expect_code(3);
    let text = std::fs::read_to_string(&output).expect("what the daemon printed");
    assert!(text.ends_with("ended, every page right\n"), "{text}");
    let figures = late.stderr.lines().find_map(|line| line.strip_prefix("gms: {"));
    let figures = figures.unwrap_or_else(|| late.fail("gms says no figures"));
    let stats: Stats = serde_json::from_str(&format!("{{{figures}")).expect("figures");
    assert!(stats.pages_out >= least && stats.pages_in > 0, "{stats:?}");
}
