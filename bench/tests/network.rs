//! `gms-bench --network`: what is set up, that everything crosses it, and that nothing of it stays.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Set to 1 to let tests that need root pass without running, as in the integration tests.
const SKIP: &str = "GMS_TESTS_SKIP_PRIVILEGED";
/// Real time that something may take to come or to go.
const PATIENCE: Duration = Duration::from_secs(30);

/// Starts `gms-bench ARGS --quick`; `None` where the user asked for privileged tests to be skipped.
fn start(args: &[&str]) -> Option<Child> {
    if !nix::unistd::geteuid().is_root() {
        let skip = std::env::var_os(SKIP).is_some_and(|value| value == "1");
        assert!(skip, "needs root (network namespaces): run as root, or set {SKIP}=1");
        // Straight to the descriptor: the test runner would swallow eprintln of a test that passes.
        let _ = writeln!(std::io::stderr(), "SKIPPED, not root: gms-bench {args:?}");
        return None;
    }
    let mut bench = Command::new(env!("CARGO_BIN_EXE_gms-bench"));
    bench.args(args).args(["--quick", "--json", "-", "--limit", "60"]);
    bench.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Some(bench.spawn().expect("gms-bench"))
}

/// The report, and the process id of the benchmark that has made it.
fn report(args: &[&str]) -> Option<(Value, u32)> {
    let bench = start(args)?;
    let id = bench.id();
    let output = bench.wait_with_output().expect("an end");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {} {errors}", output.status);
    assert!(!errors.contains("could not undo"), "{errors}");
    Some((serde_json::from_slice(&output.stdout).expect("JSON"), id))
}

fn figure(report: &Value, name: &str) -> f64 {
    let rows = report["figures"].as_array().expect("figures");
    let row = rows.iter().find(|row| row["name"] == name);
    row.unwrap_or_else(|| panic!("no figure {name:?} in {rows:#?}"))["median"].as_f64().expect(name)
}

/// What the benchmark of process `id` has set up: a namespace, a device, a table of nftables.
fn there(id: u32) -> [bool; 3] {
    let mut nft = Command::new("nft");
    nft.args(["list", "tables"]).env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin");
    let tables = nft.output().expect("nft: run tests/setup.sh as root");
    let table = format!("table inet gms-bench-{id}");
    [
        Path::new("/run/netns").join(format!("gms-bench-{id}")).exists(),
        Path::new("/sys/class/net").join(format!("gb{id}n")).exists(),
        String::from_utf8_lossy(&tables.stdout).lines().any(|line| line == table),
    ]
}

#[test]
fn remote_pages_cross_a_network_that_loses_packets() {
    let args = ["fault", "--network", "veth:1500:2%"];
    let Some((report, id)) = report(&args) else { return };
    assert_eq!(report["machine"]["network"], "veth:1500:2%");
    // 2000 faults were measured, and more before them to warm up; of the write-back buffer's at most half were not remote.
    let bytes = figure(&report, "network: from the agents") * 1e6;
    assert!(bytes > 1000.0 * 4096.0, "{bytes} bytes");
    let written = figure(&report, "4k: pages written back") * 4096.0;
    assert!(figure(&report, "network: to the agents") * 1e6 > written, "less than was written");
    let packets = figure(&report, "network: packets from the agents");
    assert!(bytes / packets < 1520.0, "{packets} packets of {bytes} bytes are larger than the MTU");
    let lost = figure(&report, "network: of these lost");
    // The floors, whose packets are not lost, are a small part.
    assert!((0.002..0.05).contains(&(lost / packets)), "{lost} of {packets} were lost");
    assert_eq!(there(id), [false; 3]);
    let floor = "floor: UDP 128/4224 B, same CPU, blocking";
    let rows = report["latencies"].as_array().expect("latencies");
    assert!(rows.iter().any(|row| row["name"] == floor), "it crosses the same network");
}

#[test]
fn every_command_that_has_agents_can_have_a_network() {
    for command in ["scan", "evict", "cost"] {
        let args = [command, "--network", "veth:9000"];
        let Some((report, id)) = report(&args) else { return };
        assert_eq!(report["machine"]["network"], "veth:9000", "{command}");
        assert!(figure(&report, "network: from the agents") > 0.1, "{command}");
        assert!(figure(&report, "network: to the agents") > 8.0, "{command}: what was evicted");
        assert_eq!(there(id), [false; 3], "{command}");
    }
}

#[test]
fn a_killed_benchmark_leaves_no_network() {
    let Some(mut bench) = start(&["fault", "--network", "veth:1500:1%"]) else { return };
    let id = bench.id();
    let began = Instant::now();
    let until = |wanted: [bool; 3]| {
        while there(id) != wanted {
            assert!(began.elapsed() < PATIENCE, "{:?} instead of {wanted:?}", there(id));
            std::thread::yield_now();
        }
    };
    until([true; 3]);
    bench.kill().expect("a kill");
    bench.wait().expect("an end");
    until([false; 3]);
    // What a killed benchmark leaves in the temporary directory.
    let mine = format!("gms-bench-{id}-");
    for entry in fs::read_dir(std::env::temp_dir()).expect("the temporary directory").flatten() {
        if entry.file_name().to_string_lossy().starts_with(&mine) {
            fs::remove_dir_all(entry.path()).expect("it goes");
        }
    }
}

#[test]
fn a_network_that_is_none_is_refused_with_what_there_is() {
    let bench = Command::new(env!("CARGO_BIN_EXE_gms-bench"))
        .args(["fault", "--network", "veth:1500:99%"])
        .output()
        .expect("gms-bench");
    let errors = String::from_utf8_lossy(&bench.stderr);
    assert!(!bench.status.success() && errors.contains("0.1 to 50 percent"), "{errors}");
}
