//! Agents that refuse, fill up, slow down, drain and die.

use std::fs;
use std::time::Duration;

use gms_tests::*;

const SOON: Duration = Duration::from_secs(30);

fn verify(mib: u64) -> Program {
    Program::new([c_program("verify")]).args([mib, 2])
}

/// Runs `verify` with a quarter of its memory resident on two agents, until they are used as `is_right` says; fails the test if they never are. An agent
/// without a CPU for 20 ms is given few pages for the rest of so short a run.
fn used(
    stage: &Stage,
    mib: u64,
    options: &[&str],
    start: impl Fn() -> [AgentProc; 2],
    is_right: impl Fn(&[AgentStats; 2]) -> bool,
) -> [AgentStats; 2] {
    let native = verify(mib).finish().expect_code(0);
    let run = || {
        let agents = start();
        let gms = Gms::run(stage, &verify(mib)).local(Mib(mib / 4));
        let gms = options.iter().fold(gms, |gms, option| gms.arg(option));
        let gms = gms.agents(&[&agents[0], &agents[1]]);
        let paged = paged_in_time(Mib(mib), Mib(mib / 4), || gms.finish().expect_code(0));
        assert_eq!(paged.stdout, native.stdout);
        for agent in &agents {
            assert!(!agent.log().contains("Malformed"), "{}", agent.log());
        }
        let used = agents.each_ref().map(|agent| paged.stats().agent(&agent.addr()).clone());
        (paged, used)
    };
    let lack = |(_, used): &(Outcome, [AgentStats; 2])| {
        (!is_right(used)).then(|| format!("the agents are used otherwise: {used:?}"))
    };
    let ran = attempts(run, lack);
    ran.unwrap_or_else(|((paged, _), lack)| paged.fail(&lack)).1
}

#[test]
fn an_agent_that_refuses_is_replaced_by_another() {
    let Some(stage) = Stage::set() else { return };
    // Where each page is to be at two agents, one without room is done without. Where it is to be at one, which one is chosen by the room that is left alone.
    for redundancy in ["auto", "none"] {
        let start = || [AgentProc::start(Mib(16)), AgentProc::start(Mib(512))];
        // It says in every reply how much room is left, so that it is filled, and seldom has to refuse: the eight lists that were under way, and some
        // when a page of it becomes free, where the program is slow enough.
        let is_filled =
            |[tiny, _]: &[AgentStats; 2]| tiny.refusals > 0 || tiny.pages * 4096 >= 12 << 20;
        let [tiny, large] = used(&stage, 160, &["--redundancy", redundancy], start, is_filled);
        assert!(tiny.refusals <= 16 * 64, "it is asked again and again: {tiny:?}");
        assert!(large.pages > tiny.pages && large.refusals == 0, "{tiny:?} {large:?}");
    }
}

#[test]
fn full_agents_leave_the_program_resident_and_right() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let (a, b) = (AgentProc::start(Mib(16)), AgentProc::start(Mib(16)));
    let program = Program::new([c_program("verify")]).args(["96", "forever"]).stdin_open();
    let gms = Gms::run(&stage, &program).local(Mib(24)).agents(&[&a, &b]).redundancy("none");
    let mut proc = gms.spawn();
    wait_paged(&mut proc, Mib(16));
    proc.wait_error("why memory stays over the budget", SOON, |log| {
        log.contains("full").then_some(())
    });
    proc.close_stdin();
    let outcome = gms.finish_proc(proc).expect_code(0);
    assert!(outcome.text().ends_with("ended, every page right\n"), "{}", outcome.text());
    let stats = outcome.stats();
    assert!(stats.remote_peak_bytes <= Mib(32).bytes(), "{stats:?}");
}

#[test]
fn a_killed_agent_ends_the_program_before_it_reads_a_wrong_page() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agent = AgentProc::start(Mib(512));
    let addr = agent.addr();
    let program = Program::new([c_program("verify")]).args(["128", "forever"]).stdin_open();
    let gms = Gms::run(&stage, &program).local(Mib(32)).agents(&[&agent]);
    let mut proc = gms.spawn();
    wait_paged(&mut proc, Mib(32));
    agent.kill();
    let outcome = gms.finish_proc(proc);
    assert_eq!(outcome.code, Some(125), "{}", outcome.stderr);
    assert!(
        !outcome.stderr.contains("MISMATCH") && !outcome.stderr.contains("ZERO PAGE"),
        "{}",
        outcome.stderr
    );
    let told = outcome.stderr.lines().find(|line| line.starts_with("gms: workload killed: "));
    assert!(
        told.is_some_and(|line| line.contains(&addr)),
        "gms names the agent that it lost: {}",
        outcome.stderr
    );
}

#[test]
fn a_slowed_agent_is_given_fewer_pages() {
    let Some(stage) = Stage::set() else { return };
    let spaces = [Namespace::new(1), Namespace::new(2)];
    spaces[1].slow_down(400);
    let start = || spaces.each_ref().map(|space| AgentSetup::new(Mib(512)).inside(space).start());
    // The fast one gets four times as much, three times where CPUs are slow; twice if only the slow agent's window held that one back.
    let is_fast = |[fast, slow]: &[AgentStats; 2]| fast.pages * 2 > slow.pages * 5;
    used(&stage, 160, &["--redundancy", "none"], start, is_fast);
}

/// Neither gets less than a quarter of the other.
fn is_even([a, b]: &[AgentStats; 2]) -> bool {
    a.pages.min(b.pages) * 4 > a.pages.max(b.pages)
}

#[test]
fn two_equal_agents_share_the_pages() {
    let Some(stage) = Stage::set() else { return };
    let start = || [AgentProc::start(Mib(512)), AgentProc::start(Mib(512))];
    used(&stage, 112, &["--redundancy", "none"], start, is_even);
}

#[test]
fn an_old_and_a_new_agent_serve_one_pager() {
    let Some(stage) = Stage::set() else { return };
    let start = || [AgentSetup::new(Mib(512)).old().start(), AgentProc::start(Mib(512))];
    used(&stage, 96, &["--redundancy", "none", "--seal", "off"], start, is_even);
}

#[test]
fn two_workloads_share_an_agent_without_mixing_pages() {
    let Some(stage) = Stage::set_beside_others() else { return };
    // Of several threads, among which the links of both are divided by chance.
    let agent = AgentSetup::new(Mib(512)).args(["--threads", "4"]).start();
    // All of it may be resident when the pager meets it: that is within the bound.
    let program = Program::new([c_program("verify")]).args(["84", "forever"]).stdin_open();
    let gms = [(); 2].map(|()| Gms::run(&stage, &program).local(Mib(24)).agents(&[&agent]));
    let mut procs = gms.each_ref().map(Gms::spawn);
    for proc in &mut procs {
        wait_paged(proc, Mib(32));
    }
    for proc in &procs {
        wait_rounds(proc, 1);
    }
    for (gms, proc) in gms.iter().zip(procs) {
        end_verified(gms, proc, Mib(84), Mib(24));
    }
}

#[test]
fn an_agent_counts_its_frames_and_frees_them_when_a_workload_ends() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let port = free_port();
    let agent = AgentSetup::new(Mib(512)).args(["--metrics", &format!("127.0.0.1:{port}")]).start();
    let program = Program::new([c_program("verify")]).args(["128", "forever"]).stdin_open();
    let gms = Gms::run(&stage, &program).local(Mib(32)).agents(&[&agent]);
    let mut proc = gms.spawn();
    proc.wait_output(0, "round 0\n");
    let used = || metric(port, "gms_agent_frames_used");
    poll_until("frames in use", Duration::from_secs(10), || used().filter(|used| *used > 10_000.0));
    proc.close_stdin();
    gms.finish_proc(proc).expect_code(0);
    poll_until("the frames to be free again", Duration::from_secs(10), || {
        used().filter(|used| *used == 0.0)
    });
    agent.terminate().expect_code(0);
}

/// Huge pages that the kernel keeps ready; as many as before when it is dropped.
struct HugePages {
    before: u64,
}

const HUGE_PAGES: &str = "/proc/sys/vm/nr_hugepages";

fn huge_pages(field: &str) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").expect("meminfo");
    let line = text.lines().find_map(|line| line.strip_prefix(field)).unwrap_or("0");
    line.trim().parse().expect("a number")
}

impl HugePages {
    fn reserve(count: u64) -> Option<HugePages> {
        let before = fs::read_to_string(HUGE_PAGES).ok()?.trim().parse().ok()?;
        let pages = HugePages { before };
        // The kernel makes as many as it finds memory for.
        fs::write(HUGE_PAGES, (before + count).to_string()).ok()?;
        (huge_pages("HugePages_Free:") >= count).then_some(pages)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // Who lacks memory for it is told by the kernel.
        let _ = fs::write(HUGE_PAGES, self.before.to_string());
    }
}

#[test]
fn an_agent_exports_huge_pages() {
    let Some(stage) = Stage::set() else { return };
    let Some(pages) = HugePages::reserve(64) else { return skipped("no huge pages can be had") };
    let in_use = || huge_pages("HugePages_Total:") - huge_pages("HugePages_Free:");
    let before = in_use();
    let agent = AgentSetup::new(Mib(128)).args(["--huge"]).start();
    let program = Program::new([c_program("verify")]).args(["84", "forever"]).stdin_open();
    let gms = Gms::run(&stage, &program).local(Mib(24)).agents(&[&agent]);
    let mut proc = gms.spawn();
    wait_paged(&mut proc, Mib(52));
    end_verified(&gms, proc, Mib(84), Mib(24));
    // It keeps them when the workload has gone.
    let used = in_use() - before;
    assert!((26..=64).contains(&used), "{used} huge pages are in use");
    drop((agent, pages));
}
