//! Bakes into `gms-bench` which sources it was built from: a report must name the commit that was
//! measured, wherever the program lies and whatever has been committed since.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::UNIX_EPOCH;

/// What `gms`, `gms-agent` and `gms-bench` are built from, below the workspace.
const SOURCES: [&str; 9] = [
    "agent",
    "bench",
    "pager",
    "policy",
    "transport",
    "tests/src",
    "tests/Cargo.toml",
    "Cargo.toml",
    "Cargo.lock",
];
/// Of these, what `gms` and `gms-agent` are built from.
const MEASURED: [&str; 4] = ["agent/src", "pager/src", "policy/src", "transport/src"];

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let git = |args: &[&str]| {
        let ran = Command::new("git").arg("-C").arg(&root).args(args).output();
        let printed = ran.ok().filter(|ran| ran.status.success()).map(|ran| ran.stdout);
        printed.map(|text| String::from_utf8_lossy(&text).trim().to_owned())
    };
    // Cargo runs this again when one of these changes: a source, or what is checked out.
    SOURCES.iter().for_each(|path| println!("cargo:rerun-if-changed=../{path}"));
    if let Some(log) = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"]) {
        println!("cargo:rerun-if-changed={log}");
    }
    let commit = git(&["rev-parse", "--short", "HEAD"]).unwrap_or_default();
    let changes = git(&[&["status", "--porcelain", "--"][..], &SOURCES].concat());
    let mark = if changes.is_none_or(|changes| changes.is_empty()) { "" } else { "+" };
    println!("cargo:rustc-env=GMS_COMMIT={commit}{mark}");
    let newest = MEASURED.iter().map(|dir| newest_s(&root.join(dir))).max().unwrap_or(0);
    println!("cargo:rustc-env=GMS_NEWEST_SOURCE_S={newest}");
}

/// When the newest file below `path` was written, in seconds since 1970.
fn newest_s(path: &Path) -> u64 {
    if let Ok(entries) = path.read_dir() {
        let below: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        return below.iter().map(|path| newest_s(path)).max().unwrap_or(0);
    }
    let written = path.metadata().and_then(|data| data.modified()).ok();
    written.and_then(|at| at.duration_since(UNIX_EPOCH).ok()).map_or(0, |since| since.as_secs())
}
