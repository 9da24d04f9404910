//! Agents that refuse, fill up, slow down, drain and die.

use std::fs;
use std::time::Duration;

use gms_tests::*;

fn verify(mib: u64) -> Program {
    Program::new([c_program("verify")]).args([mib, 2])
}

#[test]
fn an_agent_that_refuses_is_replaced_by_another() {
    let Some(stage) = Stage::set() else { return };
    let native = verify(160).finish().expect_code(0);
    // Where each page is to be at two agents, one without room is done without. Where it is to be at one, which one is chosen by the room that is left alone.
    for redundancy in ["auto", "none"] {
        let (tiny, large) = (AgentProc::start(Mib(16)), AgentProc::start(Mib(512)));
        let gms = Gms::run(&stage, &verify(160)).local(Mib(40)).agents(&[&tiny, &large]);
        let paged = gms.redundancy(redundancy).finish().expect_code(0);
        assert_eq!(paged.stdout, native.stdout);
        assert_paged(&paged, Mib(160), Mib(40));
        let stats = paged.stats();
        let (tiny, large) = (stats.agent(&tiny.addr()), stats.agent(&large.addr()));
        // It says in every reply how much room is left, so that it is filled, and seldom has to refuse: at most the eight lists that were under way.
        let filled = tiny.refusals > 0 || tiny.pages * 4096 >= 12 << 20;
        assert!(filled, "the tiny agent was not used up to its size: {stats:?}");
        assert!(tiny.refusals <= 8 * 64, "it is asked again and again: {stats:?}");
        assert!(large.pages > tiny.pages && large.refusals == 0, "{stats:?}");
    }
}

#[test]
fn full_agents_leave_the_program_resident_and_right() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let native = verify(128).finish().expect_code(0);
    let (a, b) = (AgentProc::start(Mib(16)), AgentProc::start(Mib(16)));
    let paged = Gms::run(&stage, &verify(128))
        .local(Mib(32))
        .agents(&[&a, &b])
        .redundancy("none")
        .finish()
        .expect_code(0);
    assert_eq!(paged.stdout, native.stdout);
    assert!(
        paged.stderr.contains("full"),
        "gms says why memory stays over the budget: {}",
        paged.stderr
    );
    let stats = paged.stats();
    assert!(stats.remote_peak_bytes <= Mib(32).bytes() && stats.pages_out > 4000, "{stats:?}");
}

#[test]
fn a_killed_agent_ends_the_program_before_it_reads_a_wrong_page() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let agent = AgentProc::start(Mib(512));
    let addr = agent.addr();
    let program = Program::new([c_program("verify")]).args(["128", "forever"]).stdin_open();
    let gms = Gms::run(&stage, &program).local(Mib(32)).agents(&[&agent]);
    let proc = gms.spawn();
    proc.wait_output(0, "round 0\n");
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
    let agents = spaces.each_ref().map(|space| AgentSetup::new(Mib(512)).inside(space).start());
    spaces[1].slow_down(400);
    let native = verify(160).finish().expect_code(0);
    let paged = Gms::run(&stage, &verify(160))
        .local(Mib(40))
        .agents(&[&agents[0], &agents[1]])
        .redundancy("none")
        .finish()
        .expect_code(0);
    assert_eq!(paged.stdout, native.stdout);
    assert_paged(&paged, Mib(160), Mib(40));
    let stats = paged.stats();
    let (fast, slow) = (stats.agent(&agents[0].addr()), stats.agent(&agents[1].addr()));
    // It gets four times as much; twice if only the slow agent's window held that one back.
    assert!(
        fast.pages > slow.pages * 3,
        "the fast agent gets at least three times as much: {:?}",
        stats.agents
    );
}

#[test]
fn two_equal_agents_share_the_pages() {
    let Some(stage) = Stage::set() else { return };
    let agents = [AgentProc::start(Mib(512)), AgentProc::start(Mib(512))];
    let paged = Gms::run(&stage, &verify(160))
        .local(Mib(40))
        .agents(&[&agents[0], &agents[1]])
        .redundancy("none")
        .finish()
        .expect_code(0);
    assert_paged(&paged, Mib(160), Mib(40));
    let shares = agents.each_ref().map(|agent| paged.stats().agent(&agent.addr()).pages);
    let (least, most) = (shares[0].min(shares[1]), shares[0].max(shares[1]));
    assert!(least * 4 > most, "neither gets less than a quarter of the other: {shares:?}");
}

#[test]
fn an_old_and_a_new_agent_serve_one_pager() {
    let Some(stage) = Stage::set() else { return };
    let old = AgentSetup::new(Mib(512)).old().start();
    let new = AgentProc::start(Mib(512));
    let native = verify(96).finish().expect_code(0);
    let gms = Gms::run(&stage, &verify(96)).local(Mib(24)).agents(&[&old, &new]);
    let paged = gms.redundancy("none").arg("--seal").arg("off").finish().expect_code(0);
    assert_eq!(paged.stdout, native.stdout);
    assert_paged(&paged, Mib(96), Mib(24));
    let shares = [&old, &new].map(|agent| paged.stats().agent(&agent.addr()).pages);
    assert!(shares[0].min(shares[1]) * 4 > shares[0].max(shares[1]), "{shares:?}");
    for agent in [&old, &new] {
        assert!(!agent.log().contains("Malformed"), "{}", agent.log());
    }
}

#[test]
fn two_workloads_share_an_agent_without_mixing_pages() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let native = verify(96).finish().expect_code(0);
    // Of several threads, among which the links of both are divided by chance.
    let agent = AgentSetup::new(Mib(512)).args(["--threads", "4"]).start();
    let gms = || Gms::run(&stage, &verify(96)).local(Mib(24)).agents(&[&agent]);
    let both = [gms(), gms()].map(|gms| (gms.spawn(), gms));
    for (proc, gms) in both {
        let outcome = gms.finish_proc(proc).expect_code(0);
        assert_eq!(outcome.stdout, native.stdout);
        assert_paged(&outcome, Mib(96), Mib(24));
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
    let program = verify(96);
    let native = program.finish().expect_code(0);
    let gms = Gms::run(&stage, &program).local(Mib(24)).agents(&[&agent]);
    let paged = gms.finish().expect_code(0);
    assert_eq!(paged.stdout, native.stdout);
    assert_paged(&paged, Mib(96), Mib(24));
    // It keeps them when the workload has gone. 72 MiB were there at least.
    let used = in_use() - before;
    assert!((36..=64).contains(&used), "{used} huge pages are in use");
    drop((agent, pages));
}
