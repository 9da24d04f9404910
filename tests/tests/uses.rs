//! The kernel reads and writes a program's memory for it, stops it, and makes another program of it: with most of the memory away all goes as
//! without gms.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use gms_tests::*;
use nix::sys::statfs::{TMPFS_MAGIC, statfs};

/// Far longer than any takes.
const LIMIT: Duration = Duration::from_secs(90);
/// How long a program stays frozen: longer than an evictor is waited for that wants a CPU, which looks alike in a cgroup of version 1.
const FROZEN: Duration = Duration::from_secs(37);
const SOON: Duration = Duration::from_secs(30);

/// Runs a case of `uses.c`.
fn goes_as_without_gms(case: &str) {
    let Some(stage) = Stage::set_beside_others() else { return };
    if case == "direct" && statfs(stage.dir()).is_ok_and(|fs| fs.filesystem_type() == TMPFS_MAGIC) {
        return skipped(
            "the temporary directory is a tmpfs, which copies what is to be read directly",
        );
    }
    let program = Program::new([c_program("uses")]).args([case, "64"]).dir(stage.dir());
    let native = program.finish().expect_code(0);
    let gms = Gms::run(&stage, &program).local(Mib(24)).arg("--export").arg("1G").limit(LIMIT);
    enough_in_time(
        |stats| stats.pages_out > 10_000 && stats.pages_in > 8192,
        || {
            let paged = gms.finish().expect_code(0);
            assert_eq!(paged.text(), native.text());
            // What is lent, or read into directly, may be all that there is for a moment.
            let may_stay = case != "guarded";
            if !may_stay && paged.stderr.contains("nothing more can be evicted") {
                paged.fail("all stays that is in one piece with a guard");
            }
            paged
        },
    );
}

macro_rules! uses {
    ($($name:ident => $case:literal;)*) => {$(
        #[test]
        fn $name() { goes_as_without_gms($case); }
    )*};
}

uses! {
    direct_io_reads_and_writes_what_is_away => "direct";
    io_uring_reads_and_writes_what_is_away => "uring";
    pages_that_are_lent_to_a_pipe_are_right => "splice";
    signals_are_handled_on_a_stack_that_is_away => "altstack";
    a_program_executed_by_another_thread_than_the_first_is_paged => "exec";
    stops_in_the_midst_of_faults_change_nothing => "stops";
    kills_in_the_midst_of_faults_change_nothing_for_others => "kills";
    unmaps_that_the_kernel_tells_of_and_does_not_make_change_nothing => "refused";
    what_lies_far_from_a_guard_is_paged => "guarded";
}

/// From then on neither its faults nor its evictions stop: by what gms counts while the program waits, before and after it touches all again.
#[test]
fn a_program_that_takes_other_rights_is_paged_on() {
    let Some(stage) = Stage::set() else { return };
    let program = Program::new([c_program("uses")]).args(["rights", "64"]);
    let native = program.clone().stdin("\n\n").finish().expect_code(0);
    let gms = Gms::run(&stage, &program.stdin_open()).local(Mib(24)).arg("--export").arg("1G");
    let gms = gms.limit(LIMIT);
    let mut proc = gms.spawn();
    let status = |proc: &Proc| status_of(proc.pid()).unwrap_or_else(|| proc.fail("not listed"));
    proc.wait_output(0, "has other rights\n");
    let before = status(&proc);
    proc.write_stdin(b"\n");
    proc.wait_output(0, "has touched all of it again\n");
    let after = status(&proc);
    // Each of 16384 pages was read and written, and only 6144 may stay.
    let least = 8192;
    let (out, back) = (after.pages_out - before.pages_out, after.pages_in - before.pages_in);
    let faults = after.faults - before.faults;
    assert!(out > least && back > least && faults > 0, "{out} out, {back} in, {faults} faults");
    proc.write_stdin(b"\n");
    let outcome = gms.finish_proc(proc).expect_code(0);
    assert_eq!(outcome.text(), native.text());
}

/// A cgroup that can be frozen, with all that the workload and gms have put into it; thawed and removed when dropped.
struct Freezer {
    dir: PathBuf,
    /// File, and what to write there to freeze and to thaw.
    words: (&'static str, &'static str, &'static str),
}

impl Freezer {
    fn new() -> Option<Freezer> {
        let name = format!("gms-test-{}", std::process::id());
        let (v1, v2) = (PathBuf::from("/sys/fs/cgroup/freezer"), PathBuf::from("/sys/fs/cgroup"));
        // v2's root has no file to freeze it, but its children have.
        let (parent, kind, words) = match v1.is_dir() {
            true => (v1, "cgroup.procs", ("freezer.state", "FROZEN", "THAWED")),
            false => (v2, "cgroup.controllers", ("cgroup.freeze", "1", "0")),
        };
        let dir = parent.join(name);
        let is_made = parent.join(kind).exists() && fs::create_dir(&dir).is_ok();
        is_made.then(|| Freezer { dir, words })
    }

    fn freeze(&self, freeze: bool) {
        let (file, frozen, thawed) = self.words;
        fs::write(self.dir.join(file), if freeze { frozen } else { thawed }).expect("freezer");
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        self.freeze(false);
        // What still runs in it is killed by the test's end.
        let _ = fs::remove_dir(&self.dir);
    }
}

/// As by `docker pause`: the evictor, which gms has put into the same cgroup, stops too.
#[test]
fn a_program_that_is_frozen_goes_on_when_it_is_thawed() {
    let Some(stage) = Stage::set() else { return };
    let Some(freezer) = Freezer::new() else { return skipped("no cgroup can be frozen here") };
    let script = format!(
        "echo $$ >{}/cgroup.procs; exec {} 84 forever",
        freezer.dir.display(),
        c_program("verify").display()
    );
    let program = Program::new([tool("sh").into_os_string(), "-c".into(), script.into()]);
    let gms = Gms::run(&stage, &program.stdin_open()).local(Mib(24)).arg("--export").arg("256M");
    let mut proc = gms.spawn();
    proc.wait_output(0, "round 1\n");
    // In the midst of an eviction.
    poll_until("more than the budget to be resident", SOON, || {
        status_of(proc.pid()).filter(|status| status.resident_bytes > status.budget_bytes)
    });
    freezer.freeze(true);
    let began = Instant::now();
    poll_until("the end of the pause", FROZEN + SOON, || {
        if proc.poll().is_some() {
            proc.fail("it ended while it was frozen");
        }
        (began.elapsed() > FROZEN).then_some(())
    });
    freezer.freeze(false);
    for _ in 0..2 {
        proc.wait_output(proc.output_len(), "round ");
    }
    proc.close_stdin();
    let outcome = gms.finish_proc(proc).expect_code(0);
    assert!(outcome.text().ends_with("ended, every page right\n"), "{}", outcome.text());
    // All of it may be resident when the pager meets it: that is within the bound.
    assert_paged(&outcome, Mib(84), Mib(24));
}
