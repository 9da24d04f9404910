//! C programs that know what every page must hold, in address spaces that change under the pager.

use std::time::Duration;

use gms_tests::*;

const SOON: Duration = Duration::from_secs(30);

fn run_c(name: &str, args: &[&str], working_set: Option<Mib>, percent: u64) {
    let Some(stage) = Stage::set() else { return };
    pages_like_native(&stage, &Program::new([c_program(name)]).args(args), working_set, percent);
}

at_25_and_50_percent! {
    every_page_of_a_static_program_is_right => |percent| run_c("verify", &["96", "2"], Some(Mib(96)), percent);
    four_threads_lose_no_write_while_threads_come_and_go => threads;
    fork_copies_on_write_in_parent_child_and_grandchild => |percent| run_c("forkcow", &["64"], Some(Mib(64)), percent);
    what_takes_the_place_of_memory_untold_is_right => |percent| run_c("shmover", &["48"], Some(Mib(48)), percent);
    every_kind_of_memory_survives_pressure => places;
    random_address_space_changes_match_their_mirror => |percent| {
        for seed in seeds(percent) {
            run_c("mapfuzz", &[&seed, "600", "128"], None, percent);
        }
    };
}

/// Locked memory, which the kernel does not move, keeps nothing else from leaving.
fn places(percent: u64) {
    has_huge_pages();
    let Some(stage) = Stage::set() else { return };
    let program = Program::new([c_program("places")]).args(["64"]);
    let paged = pages_like_native(&stage, &program, Some(Mib(64)), percent);
    assert!(!paged.stderr.contains("nothing more can be evicted"), "{}", paged.stderr);
}

/// The program locks all that it has when it is paged already, what gms has there too.
#[test]
fn memory_beside_what_is_locked_while_it_is_paged_is_right() {
    beside_fixed("locked", 32, Mib(48));
}

/// Pinned memory (io_uring, RDMA), which the kernel does not move either, keeps nothing else from leaving.
#[test]
fn memory_beside_what_is_pinned_is_right() {
    let told = beside_fixed("pinned", 16, Mib(24)).unwrap_or_default();
    assert!(!told.contains("nothing more can be evicted"), "{told}");
}

/// What gms says.
fn beside_fixed(how: &str, mib: u64, budget: Mib) -> Option<String> {
    let stage = Stage::set()?;
    let agent = AgentProc::start(Mib(384));
    let program = Program::new([c_program("fixed")]).args([how]).args([mib, 64]);
    let gms = Gms::run(&stage, &program).local(budget).agents(&[&agent]);
    let paged = gms.finish().expect_code(0);
    assert!(paged.stats().pages_out > 2048, "{:?}", paged.stats());
    Some(paged.stderr)
}

/// Its threads have all CPUs before gms has looked at it once: how much is resident then is nobody's promise (docs/design.md, weakness 8).
fn threads(percent: u64) {
    let Some(stage) = Stage::set() else { return };
    let program = Program::new([c_program("threads")]).args(["48"]);
    let native = program.finish().expect_code(0);
    let (working_set, agent) = (Mib(48), AgentProc::start(Mib(384)));
    let budget = working_set.percent(percent);
    let gms = Gms::run(&stage, &program).local(budget).agents(&[&agent]);
    let paged = paged_in_time(working_set, budget, || {
        let paged = gms.finish().expect_code(0);
        assert_eq!(paged.text(), native.text());
        paged
    });
    assert!(paged.peak.looks > 0, "nobody looked at its memory");
}

/// Another seed for each share of memory. `GMS_FUZZ_SEED=N` replays one seed; `GMS_FUZZ_SEEDS=N` runs so many.
fn seeds(percent: u64) -> Vec<String> {
    if let Ok(seed) = std::env::var("GMS_FUZZ_SEED") {
        return vec![seed];
    }
    let count = std::env::var("GMS_FUZZ_SEEDS").ok().and_then(|count| count.parse().ok());
    let seeds = count.map_or(percent..=percent, |count: u64| 1..=count);
    seeds.map(|seed| seed.to_string()).collect()
}

#[test]
fn pages_of_8_kib_are_right_too() {
    let Some(stage) = Stage::set() else { return };
    let program = Program::new([c_program("verify")]).args(["96", "2"]);
    let native = program.finish().expect_code(0);
    let agent = AgentProc::start(Mib(512));
    let gms =
        Gms::run(&stage, &program).local(Mib(24)).agents(&[&agent]).arg("--page-size").arg("8k");
    let paged = paged_in_time(Mib(96), Mib(24), || gms.finish().expect_code(0));
    assert_eq!(paged.stdout, native.stdout);
}

/// Pages that came with the other page of their pair of 8 KiB, of 2000 that were touched alone.
fn together(stage: &Stage, page_size: &str) -> u32 {
    let program = Program::new([c_program("pairs")]).args(["96"]);
    let gms = Gms::run(stage, &program).local(Mib(16)).arg("--export").arg("256M");
    let outcome = gms.arg("--page-size").arg(page_size).finish().expect_code(0);
    let told = outcome.text();
    let count = told.trim().strip_prefix("pairs 2000 together ").and_then(|n| n.parse().ok());
    count.unwrap_or_else(|| outcome.fail("it said something else"))
}

#[test]
fn a_fault_brings_as_much_as_the_page_size_says() {
    let Some(stage) = Stage::set() else { return };
    let (small, large) = (together(&stage, "4k"), together(&stage, "8k"));
    assert!(small < 100 && large > 1900, "of 2000: {small} with 4k, {large} with 8k");
}

/// What is read again and again is sent once: the agent's copy stays good, and the page is dropped.
#[test]
fn unchanged_pages_are_dropped_instead_of_sent() {
    let Some(stage) = Stage::set() else { return };
    let program = Program::new([c_program("still")]).args(["96", "sleep"]).stdin_open();
    let gms = Gms::run(&stage, &program).local(Mib(32)).arg("--export").arg("256M");
    let mut proc = gms.spawn();
    proc.wait_output(0, "ready\n");
    poll_until("most of it to go out", SOON, || {
        (status_of(proc.pid())?.away_bytes >= Mib(60).bytes()).then_some(())
    });
    for _ in 0..4 {
        let from = proc.output_len();
        proc.write_stdin(b"\n");
        proc.wait_output(from, "right\n");
    }
    proc.close_stdin();
    let outcome = gms.finish_proc(proc).expect_code(0);
    let (stats, pages) = (outcome.stats(), Mib(96).bytes() / 4096);
    // Of three passes at least two thirds were away each time.
    assert!(stats.clean_drops > 2 * pages && stats.pages_in > 2 * pages, "{stats:?}");
    assert!(stats.pages_out < pages * 5 / 4, "each was changed once: {stats:?}");
    // Read in order, they are fetched ahead, and used.
    assert!(stats.prefetched > pages && stats.prefetched <= stats.pages_in, "{stats:?}");
    let hits = stats.prefetch_hits as f64 / stats.prefetched as f64;
    assert!((0.8..=1.0).contains(&hits), "{hits} of those fetched ahead were used: {stats:?}");
    let us = &stats.fault_us;
    assert!(us.p50 > 0.1 && [us.p50, us.p90, us.p99, us.p999, us.max].is_sorted(), "{stats:?}");
    let agent = stats.agent("embedded");
    assert_eq!(agent.pages, stats.pages_out, "{stats:?}");
    assert!(agent.rtt_us > 0.1 && agent.up, "{stats:?}");
}

/// Parent, child and grandchild, each with some pages of its own and some that are another's too.
#[test]
fn processes_of_a_tree_are_served_by_several_threads() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agent = AgentProc::start(Mib(1024));
    let program = Program::new([c_program("forkcow")]).args(["64", "held"]);
    let native = program.clone().stdin("\n").finish().expect_code(0);
    let program = program.stdin_open();
    for (threads, readers) in [("1", 1..=1), ("3", 2..=3)] {
        let gms = Gms::run(&stage, &program).local(Mib(24)).agents(&[&agent]);
        let gms = gms.arg("--fault-threads").arg(threads);
        let mut proc = gms.spawn();
        proc.wait_output(0, "held\n");
        poll_until("threads that read faults", SOON, || {
            let pager = status_of(proc.pid())?.supervisor_pid;
            readers.contains(&fault_readers(pager)).then_some(())
        });
        proc.write_stdin(b"\n");
        let outcome = gms.finish_proc(proc).expect_code(0);
        assert_eq!(outcome.stdout, native.stdout);
    }
}

/// A process of many threads, which also change its memory, has more faults than its home fetches pages for.
#[test]
fn one_process_of_many_threads_is_served_by_several() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agent = AgentProc::start(Mib(256));
    let program = Program::new([c_program("crowd")]).args(["48", "800", "held"]);
    let native = program.clone().stdin("\n").finish().expect_code(0);
    let program = program.stdin_open();
    for (threads, is_lent) in [("1", false), ("4", true)] {
        let gms = Gms::run(&stage, &program).local(Mib(16)).agents(&[&agent]);
        let gms = gms.arg("--fault-threads").arg(threads);
        let mut proc = gms.spawn();
        proc.wait_output(0, "held\n");
        poll_until("most of it to go out", SOON, || {
            (status_of(proc.pid())?.away_bytes > Mib(24).bytes()).then_some(())
        });
        proc.write_stdin(b"\n");
        let outcome = gms.finish_proc(proc).expect_code(0);
        assert_eq!(outcome.stdout, native.stdout);
        let stats = outcome.stats();
        assert_eq!(stats.lent_faults > 0, is_lent, "{stats:?}");
    }
}

#[test]
fn the_embedded_agent_serves_without_keys() {
    let Some(stage) = Stage::set() else { return };
    let program = Program::new([c_program("verify")]).args(["128", "1"]);
    let native = program.finish().expect_code(0);
    let gms = Gms::run(&stage, &program).local(Mib(32)).arg("--export").arg("512M");
    let paged = paged_in_time(Mib(128), Mib(32), || gms.finish().expect_code(0));
    assert_eq!(paged.stdout, native.stdout);
}

#[test]
fn allocating_at_full_speed_overshoots_within_the_bound() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(1024));
    let small = ["4k", "huge", "threads"].map(|how| (how, 64, 256));
    for (how, budget, mib) in small.into_iter().chain([("4k", 384, 512)]) {
        if how == "huge" && !has_huge_pages() {
            continue;
        }
        let program = Program::new([c_program("fastalloc")]).args([mib.to_string().as_str(), how]);
        let gms = Gms::run(&stage, &program).local(Mib(budget)).agents(&[&agent]);
        let paged = within_bound(Mib(budget), || gms.finish().expect_code(0));
        assert_paged(&paged, Mib(mib), Mib(budget));
    }
}

#[test]
fn a_program_under_its_budget_is_left_alone() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(256));
    let program = Program::new([c_program("verify")]).args(["64", "2"]);
    let outcome =
        Gms::run(&stage, &program).local(Mib(256)).agents(&[&agent]).finish().expect_code(0);
    let stats = outcome.stats();
    assert_eq!((stats.pages_out, stats.faults, stats.remote_peak_bytes), (0, 0, 0), "{stats:?}");
    assert_eq!(stats.attach_us, 0.0, "attached although nothing had to go: {stats:?}");
}

/// The checker itself must be able to fail: a page overwritten from outside is found and named.
#[test]
fn a_wrong_page_is_found() {
    let Some(_stage) = Stage::set_beside_others() else { return };
    for (bytes, expected) in [(vec![0; 4096], "ZERO PAGE"), (vec![0xA5; 8], "MISMATCH")] {
        let mut proc =
            Program::new([c_program("verify")]).args(["32", "forever"]).stdin_open().spawn();
        proc.wait_output(0, "round 1\n");
        // It may be rewritten before it is read: spoil it until it is noticed.
        poll_until("the program to notice", SOON, || {
            let _ = write_memory(proc.pid(), &bytes);
            proc.poll()
        });
        let outcome = proc.finish().expect_code(1);
        assert!(outcome.stderr.contains(expected), "{}", outcome.stderr);
    }
}
