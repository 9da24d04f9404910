//! Torture: real programs and other projects' own tests while random pages leave all the time and the pager's threads are delayed
//! wherever they can race. Results must be those without gms.
//!
//! Each run prints its seed and how to replay it; see `torture_seeds` and tests/torture.sh.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use gms_tests::*;

/// A run that takes longer hangs. Without gms the longest takes some seconds, some ten on a busy machine.
const LIMIT: Duration = Duration::from_secs(150);

fn each_seed(stage: Option<Stage>, body: impl Fn(&Stage, &Torture)) {
    let Some(stage) = stage else { return };
    for seed in torture_seeds() {
        let torture = Torture::new(&stage, seed);
        body(&stage, &torture);
        torture.finish();
    }
}

// ---- programs that know what every page must hold

#[test]
fn programs_find_every_page_right() {
    each_seed(Stage::set_beside_others(), |_, torture| {
        let fuzz_seed = (torture.seed() % 1_000_000).to_string();
        let c: [(&str, &[&str]); 15] = [
            ("verify", &["48", "2"]),
            ("threads", &["16"]),
            ("crowd", &["32", "600"]),
            ("forkcow", &["32"]),
            ("places", &["24"]),
            ("vforks", &["4", "4"]),
            ("kills", &["200"]),
            ("daemons", &["60"]),
            ("pingpong", &["150", "150"]),
            ("follow", &["150"]),
            ("traced", &["30"]),
            ("promises", &["rooms", "8"]),
            ("mapfuzz", &[&fuzz_seed, "400", "64"]),
            ("firsts", &["128", "400"]),
            ("firsts", &["1024", "24"]),
        ];
        for (name, args) in c {
            let program = Program::new([c_program(name)]).args(args);
            torture.same_output(&format!("{name} {args:?}"), &program, LIMIT);
        }
        for (name, args) in [("threads", "16"), ("comings", "6000")] {
            let program = Program::new([musl_program(name)]).args([args]);
            torture.same_output(&format!("{name} {args}, musl"), &program, LIMIT);
        }
    });
}

#[test]
fn languages_with_collectors_find_their_memory_right() {
    each_seed(Stage::set_beside_others(), |_, torture| {
        let python = Program::new([tool("python3"), source("churn.py")]).args(["24"]);
        torture.same_output("churn.py", &python, LIMIT);
        let go = Program::new([go_program()]).args(["24"]);
        torture.same_output("churn.go", &go, LIMIT);
        let java = Program::new([tool("java")])
            .args(["-XX:+UseSerialGC", "-Xmx96m", "-XX:TieredStopAtLevel=1", "-cp"])
            .args([java_classes().display()])
            .args(["Churn", "24"]);
        torture.same_output("Churn.java", &java, LIMIT);
    });
}

// ---- CPython's regression tests

/// Modules of CPython's regression tests heavy in memory, threads, forks, mappings and subprocesses, and what chooses among their tests
/// where all of them take too long. Left out: tests of timing, which fail on a busy machine without gms too, and those that spend
/// their time asleep.
const PYTHON_TESTS: &[(&str, &[&str])] = &[
    ("test_gc", &["GCTests", "GCCallbackTests"]),
    ("test_mmap", &[]),
    ("test_thread", &[]),
    ("test_threading", &["ThreadTests", "ThreadJoinOnShutdown", "CRLockTests", "BarrierTests"]),
    ("test_threadsignals", &[]),
    ("test_fork1", &["test_threaded_import_lock_fork", "test_nested_import_lock_fork"]),
    ("test_ctypes", &[]),
    ("test_bytes", &["ByteArrayTest"]),
    ("test_tracemalloc", &[]),
    ("test_zlib", &[]),
    ("test_subprocess", &["POSIXProcessTestCase", "ContextManagerTests"]),
    (
        "test_multiprocessing_fork",
        &[
            "WithProcessesTestPipe",
            "WithProcessesTestQueue",
            "WithProcessesTestHeap",
            "WithProcessesTestSharedMemory",
            "WithProcessesTestSharedCTypes",
            "WithThreadsTestPool",
        ],
    ),
    (
        "test_concurrent_futures",
        &["ProcessPoolForkProcessPoolShutdownTest", "ProcessPoolForkExecutorDeadlockTest"],
    ),
    ("test_asyncio", &["SubprocessPidfdWatcherTests", "TestEPollLoop"]),
];

/// Tests that fail on a busy machine without gms too: a signal, five threads at a barrier, a timer and the end of a pool are each expected in less than 0.1
/// to 2 s.
const PYTHON_TESTS_OF_TIMING: &[&str] = &[
    "test_shared_memory_SharedMemoryServer_ignores_sigint",
    "test_default_timeout",
    "test_run_until_complete",
    "test_terminate",
];

#[test]
fn cpython_passes_its_own_tests() {
    // Some of them claim how long something takes.
    each_seed(Stage::set(), |stage, torture| {
        for (module, chosen) in PYTHON_TESTS {
            python_module(stage, torture, module, chosen);
        }
    });
}

fn python_module(stage: &Stage, torture: &Torture, module: &str, chosen: &[&str]) {
    let report = stage.path("report.xml");
    // The interpreter whose tests are installed, which need not be the first in the path.
    let program = Program::new(["/usr/bin/python3", "-m", "test", "-q", "--junit-xml"])
        .args([report.display()])
        .args(chosen.iter().flat_map(|tests| ["-m", tests]))
        .args(PYTHON_TESTS_OF_TIMING.iter().flat_map(|tests| ["-i", tests]))
        .args([module])
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .dir(stage.dir());
    torture.same_tests(module, &program, LIMIT, |_| passed_in_report(&report));
}

/// The test cases of a JUnit report that passed. The report is removed, so that it is not taken for the next.
fn passed_in_report(report: &Path) -> BTreeSet<String> {
    let text = std::fs::read_to_string(report).unwrap_or_default();
    let _ = std::fs::remove_file(report);
    let cases = text.split("<testcase ").skip(1);
    let passed = |case: &&str| {
        let case = case.split("</testcase>").next().unwrap_or_default();
        !["<skipped", "<failure", "<error"].iter().any(|mark| case.contains(mark))
    };
    let name = |case: &str| Some(case.split_once("name=\"")?.1.split('"').next()?.to_string());
    cases.filter(passed).filter_map(name).collect()
}

// ---- Go's own tests

/// Packages of Go's standard library and which of their tests. Left out of runtime: tests that build programs (Go's compiler would be
/// most of the work) or start gdb, and those of timing.
const GO_TESTS: &[(&str, &str)] = &[
    ("sync", "."),
    ("sync/atomic", "."),
    (
        "runtime",
        "^Test(Chan|Map|Mem|Gc|GC|Finalizer|Page|Palloc|Stack|NonEmpty|Goroutine|RW|Parallel|Select|Multi|Heap|Scav|LFStack|Smhasher|String|\
         Slice|Append|Deep|Implicit|Periodic|Nonblock|Pseudo|SelfSelect|Sema|Sync|Hmap|Empty|Negative|Tiny|Large|Alloc|Conc|Shrink|\
         BigStack|Huge|Read)",
    ),
];

#[test]
fn go_passes_its_own_tests() {
    each_seed(Stage::set_beside_others(), |stage, torture| {
        for (package, tests) in GO_TESTS {
            let program = Program::new([go_test_binary(package)])
                .args(["-test.v", "-test.short", "-test.run", tests])
                .env("GOCACHE", stage.path("go"))
                .dir(go_source(package));
            torture.same_tests(package, &program, LIMIT, passed_in_go);
        }
    });
}

fn passed_in_go(outcome: &Outcome) -> BTreeSet<String> {
    let text = outcome.text();
    let passed = text.lines().filter_map(|line| line.trim().strip_prefix("--- PASS: "));
    passed.filter_map(|test| Some(test.split_whitespace().next()?.to_string())).collect()
}

// ---- stress-ng

/// Stressors that verify what they do, each with an amount of work.
const STRESSORS: &[&str] = &[
    "--vm 2 --vm-bytes 16M --vm-ops 100000",
    "--mmap 2 --mmap-bytes 8M --mmap-ops 16",
    "--mremap 2 --mremap-bytes 8M --mremap-ops 300",
    "--fork 2 --fork-ops 800",
    "--clone 2 --clone-ops 300",
    "--madvise 2 --madvise-ops 20",
    "--futex 2 --futex-ops 50000",
    // Not --mutex: its threads, ahead of all others (SCHED_FIFO), can be done before it has seen that they began; then it fails by itself.
    "--pthread 2 --pthread-ops 5000",
];

#[test]
fn stress_ng_verifies_its_memory() {
    each_seed(Stage::set_beside_others(), |stage, torture| {
        for stressor in STRESSORS {
            let program = Program::new([tool("stress-ng")])
                .args(["--verify", "--metrics-brief", "--temp-path"])
                .args([stage.dir().display()])
                .args(stressor.split_whitespace());
            torture.same_tests(stressor, &program, LIMIT, passed_in_stress_ng);
        }
    });
}

/// The stressors that tell their figures (`stress-ng: metrc: [12] vm 60000 ...`), unless one says that it failed.
fn passed_in_stress_ng(outcome: &Outcome) -> BTreeSet<String> {
    let text = outcome.text() + &outcome.stderr;
    if text.contains(": fail:") {
        return BTreeSet::new();
    }
    let figures = text.lines().filter_map(|line| line.split_once("metrc: [")?.1.split_once("] "));
    let stressors = figures.filter_map(|(_, figures)| figures.split_whitespace().next());
    stressors.filter(|name| !["stressor", "(secs)"].contains(name)).map(String::from).collect()
}
