//! redis-server with a data set several times its budget.

use std::time::Duration;

use gms_tests::*;

/// Data set, as redis accounts for it roughly.
const DATA: Mib = Mib(128);

/// What a run of the server proves about its data.
#[derive(Debug, PartialEq)]
struct Proofs {
    digest: String,
    digest_of_snapshot: String,
}

/// Fills, benchmarks, snapshots and reads the server that `proc` runs, and ends it.
fn exercise(stage: &Stage, proc: &mut Proc, socket: &std::path::Path, name: &str) -> Proofs {
    let mut redis = Redis::connect(proc, socket);
    redis.fill(DATA);
    redis.benchmark(5_000);
    redis.background_save();
    redis.check(DATA, 5_000);
    let digest = redis.digest();
    let info = redis.ask(&["INFO"]).text();
    assert!(info.contains("rdb_last_bgsave_status:ok") && info.contains("db0:keys="), "{info}");
    redis.shut_down();
    Proofs { digest, digest_of_snapshot: Redis::digest_of_snapshot(stage, name) }
}

fn redis(percent: u64) {
    let Some(stage) = Stage::set() else { return };
    let (server, socket) = Redis::server(&stage, "native");
    let mut proc = server.spawn();
    let expected = exercise(&stage, &mut proc, &socket, "native");
    proc.finish().expect_code(0);

    let agents = [AgentProc::start(Mib(512)), AgentProc::start(Mib(512))];
    let budget = DATA.percent(percent);
    let paged = within_bound(budget, || {
        // What an earlier one has saved, it would load.
        let _ = std::fs::remove_file(stage.path("paged.rdb"));
        let (server, socket) = Redis::server(&stage, "paged");
        let gms = Gms::run(&stage, &server).local(budget).agents(&[&agents[0], &agents[1]]);
        let mut proc = gms.spawn();
        let proofs = exercise(&stage, &mut proc, &socket, "paged");
        assert_eq!(proofs, expected);
        assert_eq!(proofs.digest, proofs.digest_of_snapshot);
        gms.finish_proc(proc).expect_code(0)
    });
    assert_paged(&paged, DATA, budget);
    for agent in &agents {
        let share = paged.stats().agent(&agent.addr());
        assert!(share.pages > 1000, "both agents are used: {:?}", paged.stats().agents);
    }
}

at_25_and_50_percent! {
    redis_keeps_its_digest_through_benchmark_and_bgsave => redis;
}

/// The longest that one request may take while agents are replaced.
const STALL_MAX: Duration = Duration::from_secs(1);
/// Longer than an agent may live: one that waits for it has not been left by the workload, and fails the test.
const GRACE: [&str; 2] = ["--drain", "3600"];

/// Fails the test unless no request takes too long; since the client may have to wait for a CPU too, in one of some runs.
fn rolling_drain(redundancy: &str) {
    let Some(stage) = Stage::set() else { return };
    let lack = |slowest: &Duration| {
        let is_late = *slowest >= patience(STALL_MAX);
        is_late.then(|| format!("the slowest request took {slowest:?}"))
    };
    let found = attempts(|| drained_in_turn(&stage, redundancy), lack);
    let slowest = found.unwrap_or_else(|(_, lack)| panic!("{lack}"));
    told(&format!("{redundancy}: the slowest request took {slowest:?}"));
}

/// As an administrator upgrades a cluster: each agent in turn is asked to end, and another takes its place when it has gone. Returns how long the slowest
/// request of a client took meanwhile.
fn drained_in_turn(stage: &Stage, redundancy: &str) -> Duration {
    let mut agents: Vec<AgentProc> =
        (0..4).map(|_| AgentSetup::new(DATA).args(GRACE).start()).collect();
    let (server, socket) = Redis::server(stage, "rolling");
    let gms = Gms::run(stage, &server).local(DATA.percent(25));
    let gms = gms.agents(&agents.iter().collect::<Vec<_>>()).redundancy(redundancy);
    let mut proc = gms.spawn();
    let mut redis = Redis::connect(&mut proc, &socket);
    redis.fill(DATA);
    let digest = redis.digest();
    let slowest = redis.check_while(DATA, || {
        for turn in 0..agents.len() {
            wait_until_copied(&proc);
            let listen = agents[turn].addr().parse().expect("an address");
            agents.remove(turn).terminate().expect_code(0);
            agents.insert(turn, AgentSetup::new(DATA).listen(listen).args(GRACE).start());
        }
        wait_until_copied(&proc);
    });
    assert_eq!(redis.digest(), digest);
    redis.shut_down();
    let paged = gms.finish_proc(proc).expect_code(0);
    assert!(paged.stats().pages_in > 1000, "{:?}", paged.stats());
    slowest
}

#[test]
fn a_rolling_upgrade_of_four_agents_stops_no_client_of_redis_for_a_second() {
    rolling_drain("auto");
}

#[test]
fn nor_does_it_where_each_page_is_at_one_agent_alone() {
    rolling_drain("none");
}
