//! redis-server with a data set several times its budget.

use gms_tests::*;

/// Data set, as redis accounts for it roughly.
const DATA: Mib = Mib(256);

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
    redis.benchmark(20_000);
    redis.background_save();
    redis.check(DATA, 20_000);
    let digest = redis.digest();
    let info = redis.ask(&["INFO"]).text();
    assert!(info.contains("rdb_last_bgsave_status:ok") && info.contains("db0:keys="), "{info}");
    redis.shut_down();
    Proofs { digest, digest_of_snapshot: digest_of_snapshot(stage, name) }
}

/// The digest of what the forked child wrote, computed by another, native server that loads it.
fn digest_of_snapshot(stage: &Stage, name: &str) -> String {
    let (server, _) = Redis::server(stage, name);
    let socket = stage.path("reader.sock");
    let server = server.args(["--unixsocket".to_string(), socket.display().to_string()]);
    let mut proc = server.spawn();
    let mut redis = Redis::connect(&mut proc, &socket);
    let digest = redis.digest();
    redis.shut_down();
    proc.finish().expect_code(0);
    digest
}

fn redis(percent: u64) {
    let Some(stage) = Stage::set() else { return };
    let (server, socket) = Redis::server(&stage, "native");
    let mut proc = server.spawn();
    let expected = exercise(&stage, &mut proc, &socket, "native");
    proc.finish().expect_code(0);

    let agents = [AgentProc::start(Mib(512)), AgentProc::start(Mib(512))];
    let (server, socket) = Redis::server(&stage, "paged");
    let budget = DATA.percent(percent);
    let gms = Gms::run(&stage, &server).local(budget).agents(&[&agents[0], &agents[1]]);
    let mut proc = gms.spawn();
    let proofs = exercise(&stage, &mut proc, &socket, "paged");
    let paged = gms.finish_proc(proc).expect_code(0);
    assert_eq!(proofs, expected);
    assert_eq!(proofs.digest, proofs.digest_of_snapshot);
    assert_paged(&paged, DATA, budget);
    for agent in &agents {
        let share = paged.stats().agent(&agent.addr());
        assert!(share.pages > 1000, "both agents are used: {:?}", paged.stats().agents);
    }
}

at_25_and_50_percent! {
    redis_keeps_its_digest_through_benchmark_and_bgsave => redis;
}
