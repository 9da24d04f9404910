//! What every test needs before it begins: privilege, binaries, its turn, a directory of its own.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use nix::unistd::geteuid;

use crate::program::poll_until;

/// How long a test waits for its turn: longer than the whole suite takes.
const TURN_LIMIT: Duration = Duration::from_secs(45 * 60);
/// Set to 1 to let tests that need root pass without running. They say so on standard error.
const SKIP: &str = "GMS_TESTS_SKIP_PRIVILEGED";

/// Held by a test while it runs.
pub struct Stage {
    dir: PathBuf,
    /// Made by [`Stage::new_path`].
    paths: AtomicU32,
    _turn: Flock<File>,
}

/// `target/release`, where this test and the binaries are.
pub(crate) fn release_dir() -> PathBuf {
    let exe = std::env::current_exe().expect("path of the test executable");
    exe.ancestors().nth(2).expect("target/release/deps/test").to_path_buf()
}

/// A binary of the workspace.
pub(crate) fn binary(name: &str) -> PathBuf {
    let path = release_dir().join(name);
    let build = "run 'cargo build --release --workspace --bins' (or tests/run.sh)";
    assert!(path.is_file(), "{} is missing: {build}", path.display());
    if let Some(source) = newer_source(&path) {
        panic!("{} is older than {source}: {build}", path.display());
    }
    path
}

/// A source from which the binary was built and which was changed since: `cargo test` alone does not build the binaries anew. Cargo lists them
/// beside it, as make's rules are written (a space in a name has a backslash before it).
fn newer_source(binary: &Path) -> Option<String> {
    let rule = fs::read_to_string(binary.with_extension("d")).ok()?;
    let built = binary.metadata().and_then(|file| file.modified()).ok()?;
    let (_, sources) = rule.lines().next()?.split_once(": ")?;
    let names = sources.replace("\\ ", "\0");
    let mut names = names.split(' ').map(|name| name.replace('\0', " "));
    names.find(|name| {
        let changed = fs::metadata(name).and_then(|file| file.modified());
        changed.is_ok_and(|changed| changed > built)
    })
}

/// Directory for what may be used again by later tests.
pub(crate) fn cache_dir() -> PathBuf {
    let dir = release_dir().join("gms-tests");
    fs::create_dir_all(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    dir
}

/// Says that a test, or a part of it, did not run.
pub fn skipped(why: &str) {
    told(&format!("SKIPPED, {why}"));
}

/// Says what must be known of a test that passes. Straight to the descriptor: the test runner would swallow eprintln.
pub fn told(what: &str) {
    let name = std::thread::current().name().unwrap_or("a test").to_string();
    let _ = writeln!(std::io::stderr(), "{what}: {name}");
}

/// Whether programs can have huge pages; says so where they cannot.
pub fn has_huge_pages() -> bool {
    let setting = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    let has = setting.is_ok_and(|text| !text.contains("[never]"));
    if !has {
        skipped("transparent huge pages are off");
    }
    has
}

impl Stage {
    /// Waits until no other test runs. `None` only where the user asked for privileged tests to be skipped.
    pub fn set() -> Option<Stage> {
        Stage::in_turn(FlockArg::LockExclusiveNonblock)
    }

    /// The same beside others that are set so: for a test that claims nothing of how long something takes or how much memory is held for a moment, and
    /// writes no program that it executes (whoever is forked meanwhile holds the file open, and it is busy).
    pub fn set_beside_others() -> Option<Stage> {
        Stage::in_turn(FlockArg::LockSharedNonblock)
    }

    fn in_turn(kind: FlockArg) -> Option<Stage> {
        if !geteuid().is_root() {
            let skip = std::env::var_os(SKIP).is_some_and(|value| value == "1");
            assert!(
                skip,
                "needs root (userfaultfd, ptrace, network namespaces): run as root, or set {SKIP}=1"
            );
            skipped("not root");
            return None;
        }
        binary("gms");
        binary("gms-agent");
        // Whoever is next has the turn before all that come later: else those that run beside each other would keep it from one that runs alone, which
        // keeps a thread of the runner meanwhile.
        let _next = take_turn(&cache_dir().join("next.lock"), FlockArg::LockExclusiveNonblock);
        let turn = take_turn(&cache_dir().join("turn.lock"), kind);
        Some(Stage { dir: new_dir(), paths: AtomicU32::new(0), _turn: turn })
    }

    /// A path in this test's own directory, which goes when the test ends.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Another path at each call: what an earlier run in the same test wrote must not be taken for this one's.
    pub fn new_path(&self, name: &str) -> PathBuf {
        self.path(&format!("{}-{name}", self.paths.fetch_add(1, Ordering::Relaxed)))
    }

    /// The directory itself.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // What is left is the system's to clean.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn take_turn(path: &Path, kind: FlockArg) -> Flock<File> {
    poll_until("the turn of this test", TURN_LIMIT, || {
        let file = File::create(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Flock::lock(file, kind).ok()
    })
}

fn new_dir() -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let dir = std::env::temp_dir().join(format!("gms-test-{}-{count}", std::process::id()));
    fs::create_dir_all(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    dir
}
