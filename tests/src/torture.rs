//! Programs under `gms run --torture`, and the same without gms for comparison.
//!
//! Each run is alone in a PID namespace, which ends with it: whatever a pager gone wrong may attach to, stop or kill is its own.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::agent::AgentSetup;
use crate::census::Watch;
use crate::gms::gms_binary;
use crate::keys::keys;
use crate::mib::Mib;
use crate::program::{Outcome, Program, patience, tool};
use crate::stage::Stage;
use crate::stats::Stats;

/// Budgets of which each run gets one, in MiB: pages that wait for room race with others than those that find it. Suites of tests, whose
/// size nobody knows, are not to be short of memory: they would time out.
const BUDGETS_MIB: [u64; 3] = [16, 48, 2048];
const BUDGETS_OF_SUITES_MIB: [u64; 2] = [512, 2048];
/// Memory of the agent, in MiB.
const EXPORT_MIB: u64 = 3072;
/// Whoever takes longer, gms's start and end included, has been attached and has lost pages.
const SPARED_MAX: Duration = Duration::from_secs(2);
/// Names shown of a long list.
const SHOWN_MAX: usize = 20;

/// The seeds to run: `GMS_TORTURE_SEED=N` replays one, `GMS_TORTURE_SEEDS=N` runs 1 to N, otherwise it is another one each time.
pub fn torture_seeds() -> Vec<u64> {
    let number = |name| std::env::var(name).ok().map(|text| text.parse().expect(name));
    if let Some(seed) = number("GMS_TORTURE_SEED") {
        return vec![seed];
    }
    if let Some(count) = number("GMS_TORTURE_SEEDS") {
        return (1..=count).collect();
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    vec![now.as_secs()]
}

/// What is tortured by one seed.
pub struct Torture<'a> {
    stage: &'a Stage,
    seed: u64,
    replay: String,
    tortured: Cell<Tortured>,
}

/// What one seed did to its programs.
#[derive(Clone, Copy, Debug, Default)]
struct Tortured {
    programs: u64,
    attached: u64,
    pages_out: u64,
    pages_in: u64,
}

impl<'a> Torture<'a> {
    /// Says on standard error how to do it again.
    pub fn new(stage: &'a Stage, seed: u64) -> Torture<'a> {
        let test = std::thread::current().name().unwrap_or_default().to_string();
        let replay =
            format!("GMS_TORTURE_SEED={seed} tests/run.sh -p gms-tests --test torture {test}");
        // Straight to the descriptor: the test runner would swallow eprintln of a test that passes.
        let _ = writeln!(std::io::stderr(), "seed {seed}; replay: {replay}");
        Torture { stage, seed, replay, tortured: Cell::default() }
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Fails the test unless something was tortured.
    pub fn finish(self) {
        let tortured = self.tortured.get();
        let _ = writeln!(std::io::stderr(), "  seed {}: {tortured:?}", self.seed);
        assert!(tortured.programs > 0, "GMS_TORTURE_ONLY leaves nothing");
        assert!(tortured.pages_out > 0, "no page went out: {tortured:?}");
    }

    /// Adds what gms says that it did to a program; fails the test if that has lived long and was spared.
    fn tally(&self, name: &str, outcome: &Outcome, stats: &Path) {
        let stats = Stats::read(stats).unwrap_or_else(|error| self.fail(name, outcome, &error));
        let Stats { attached, pages_out, pages_in, .. } = stats;
        let (took, sum) = (outcome.elapsed, self.tortured.get());
        let _ = writeln!(
            std::io::stderr(),
            "  {name}: {took:?}, {attached} attached, {pages_out} pages out, {pages_in} in"
        );
        if took > patience(SPARED_MAX) && (attached == 0 || pages_out == 0) {
            self.fail(name, outcome, "was not attached, or no page of it went out");
        }
        self.tortured.set(Tortured {
            programs: sum.programs + 1,
            attached: sum.attached + attached,
            pages_out: sum.pages_out + pages_out,
            pages_in: sum.pages_in + pages_in,
        });
    }

    /// The program without gms.
    fn native(&self, program: &Program) -> Outcome {
        self.isolated(program, Vec::new()).finish()
    }

    /// The program under torture, within `limit`, under one of these budgets; `native` is how it went without. The name tells runs of one seed apart.
    fn torture(
        &self,
        name: &str,
        program: &Program,
        native: &Outcome,
        limit: Duration,
        budgets_mib: &[u64],
    ) -> Outcome {
        let mut hasher = DefaultHasher::new();
        (self.seed, name).hash(&mut hasher);
        let number = hasher.finish();
        let budget = budgets_mib[(number >> 8) as usize % budgets_mib.len()];
        let page_size = if number >> 16 & 3 == 0 { "8k" } else { "4k" };
        let stats = self.stage.new_path("torture.json");
        // Now and then its pages are at an agent of several threads, else at the one inside it.
        let agent = (number >> 18 & 3 == 0)
            .then(|| AgentSetup::new(Mib(EXPORT_MIB)).args(["--threads", "4"]).start());
        let place = match &agent {
            Some(agent) => format!("--agent {} --keys {}", agent.addr(), keys().display()),
            None => format!("--export {EXPORT_MIB}M"),
        };
        let threads = 1 << (number >> 20 & 3).min(2);
        let line = format!(
            "run --torture {number} --local {budget}M --page-size {page_size} --fault-threads {threads} {place}"
        );
        let mut argv = vec![tortured_binary().into_os_string()];
        argv.extend(line.split_whitespace().map(OsString::from));
        argv.extend(["--stats".into(), stats.clone().into(), "--".into()]);
        let _ = writeln!(std::io::stderr(), "  {name}: {line} ({:?} without gms)", native.elapsed);
        let tortured = self.isolated(program, argv).limit(limit).finish();
        if tortured.stderr.contains("gms: workload killed") || !tortured.drained {
            self.fail(name, &tortured, "was killed by gms, or left processes behind");
        }
        self.tally(name, &tortured, &stats);
        tortured
    }

    /// Fails the test unless the program ends as it does without gms and prints the same.
    pub fn same_output(&self, name: &str, program: &Program, limit: Duration) {
        if !is_chosen(name) {
            return;
        }
        let native = self.native(program).expect_code(0);
        let tortured = self.torture(name, program, &native, limit, &BUDGETS_MIB);
        if (tortured.code, &tortured.stdout) != (Some(0), &native.stdout) {
            let expected =
                format!("ended or printed otherwise than without gms:\n{}", native.text());
            self.fail(name, &tortured, &expected);
        }
    }

    /// Fails the test unless the program ends as it does without gms, and at least the same tests pass. `passed` reads their names.
    pub fn same_tests(
        &self,
        name: &str,
        program: &Program,
        limit: Duration,
        passed: impl Fn(&Outcome) -> BTreeSet<String>,
    ) {
        if !is_chosen(name) {
            return;
        }
        let native = self.native(program);
        let expected = passed(&native);
        if expected.is_empty() || native.code != Some(0) {
            self.fail(name, &native, "fails, or has no test that passes, without gms too");
        }
        let tortured = self.torture(name, program, &native, limit, &BUDGETS_OF_SUITES_MIB);
        let found = passed(&tortured);
        let missing: Vec<&String> = expected.difference(&found).collect();
        if tortured.code != Some(0) || !missing.is_empty() {
            let mut text = format!("{} of {} tests do not pass", missing.len(), expected.len());
            missing.iter().take(SHOWN_MAX).for_each(|test| text += &format!("\n  {test}"));
            self.fail(name, &tortured, &text);
        }
    }

    fn fail(&self, name: &str, outcome: &Outcome, what: &str) -> ! {
        outcome.fail(&format!("{name}: {what}\n  replay: {}", self.replay))
    }

    /// In a PID namespace whose first process is a shell, because signals do to a first process less than to others.
    fn isolated(&self, program: &Program, pager: Vec<OsString>) -> Program {
        let shell = ["-pf", "--kill-child", "--mount-proc", "sh", "-c", "\"$@\"; exit $?", "sh"];
        let mut argv: Vec<OsString> = vec![tool("unshare").into()];
        argv.extend(shell.map(OsString::from));
        argv.extend(pager);
        // Control sockets are named by process id, which is not unique here.
        program
            .wrapped(argv)
            .env("XDG_RUNTIME_DIR", self.stage.dir())
            .env("TMPDIR", self.stage.dir())
            .watch(Watch::Nobody)
    }
}

/// `GMS_TORTURE_ONLY` leaves out all runs but those whose name contains it.
fn is_chosen(name: &str) -> bool {
    std::env::var("GMS_TORTURE_ONLY").map_or(true, |only| name.contains(&only))
}

/// `GMS_TORTURE_BINARY` names a gms built otherwise: tests/plants.sh gives one with a bug.
fn tortured_binary() -> PathBuf {
    std::env::var_os("GMS_TORTURE_BINARY").map_or_else(gms_binary, PathBuf::from)
}
