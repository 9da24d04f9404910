//! Keys of real agents and pagers: who is whom, who is renewed, and who is revoked.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gms_tests::*;
use nix::sys::signal::Signal;

const LIMIT: Duration = Duration::from_secs(30);

/// `gms keys COMMAND keys ARG...` in the directory of a stage.
fn keys<const N: usize>(stage: &Stage, command: &str, args: [&str; N]) -> Outcome {
    let line = Gms::line(["keys", command]).arg(stage.path("keys"));
    args.iter().fold(line, |line, arg| line.arg(arg)).finish()
}

/// A cluster in `keys` with these nodes and clients.
fn cluster<const N: usize>(stage: &Stage, issued: [(&str, &str); N]) {
    keys(stage, "init", []).expect_code(0);
    for (role, name) in issued {
        keys(stage, "issue", [role, name]).expect_code(0);
    }
}

fn dir(stage: &Stage, name: &str) -> PathBuf {
    stage.path("keys").join(name)
}

/// The id which `gms keys list` shows for a name and a role.
fn id(stage: &Stage, name: &str, role: &str) -> String {
    let text = keys(stage, "list", []).expect_code(0).text();
    let line = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let found = line.into_iter().find(|words| words[..2] == [name, role]);
    found.unwrap_or_else(|| panic!("no {role} {name}: {text}"))[4].to_owned()
}

fn paged(stage: &Stage, program: &Program, agent: &AgentProc, client: &str) -> Gms {
    let gms = Gms::run(stage, program).local(Mib(32)).arg("--agent").arg(agent.addr());
    gms.arg("--keys").arg(dir(stage, client))
}

fn forever() -> Program {
    let program = Program::new([c_program("verify")]).args(["96", "forever"]).stdin_open();
    program.limit(Duration::from_secs(90))
}

/// What a run of `verify 96 1` leaves that was paged.
fn finish_paged(gms: &Gms) -> Outcome {
    paged_in_time(Mib(96), Mib(32), || gms.finish().expect_code(0))
}

/// Has the agent read its keys again, and waits until its log has as many lines with `told`.
fn reload(agent: &AgentProc, told: &str, times: usize) {
    agent.signal(Signal::SIGHUP);
    poll_until(told, LIMIT, || (agent.log().matches(told).count() >= times).then_some(()));
}

fn assert_nothing_wrong_was_read(outcome: &Outcome) {
    let wrong = ["ZERO PAGE", "MISMATCH"].iter().any(|word| outcome.stderr.contains(word));
    assert!(!wrong, "{}", outcome.stderr);
}

#[test]
fn a_revoked_client_is_cut_off_and_its_workload_ends_with_the_reason() {
    let Some(stage) = Stage::set_beside_others() else { return };
    cluster(&stage, [("node", "n1"), ("client", "desk1"), ("client", "desk2")]);
    let agent = AgentSetup::new(Mib(512)).keys(dir(&stage, "n1")).start();
    let [lost, stays] = ["desk1", "desk2"].map(|client| paged(&stage, &forever(), &agent, client));
    let (mut lost_proc, mut stays_proc) = (lost.spawn(), stays.spawn());
    wait_paged(&mut lost_proc, Mib(32));
    wait_paged(&mut stays_proc, Mib(32));
    let desk1 = id(&stage, "desk1", "client");
    let told = keys(&stage, "revoke", ["desk1"]).expect_code(0).stderr;
    assert!(told.contains(&format!("revoked {desk1} in")) && told.contains("SIGHUP"), "{told}");
    let list = stage.path("keys/revoked.txt");
    fs::copy(&list, dir(&stage, "n1").join("revoked.txt")).expect("the list");
    reload(&agent, "keys renewed", 1);
    let outcome = lost.finish_proc(lost_proc);
    assert_eq!(outcome.code, Some(125), "{}", outcome.stderr);
    assert_nothing_wrong_was_read(&outcome);
    let said = outcome.stderr.lines().find(|line| line.starts_with("gms: workload killed: "));
    let reason = format!("{} refuses our certificate, which was revoked", agent.addr());
    assert!(said.is_some_and(|line| line.contains(&reason)), "{}", outcome.stderr);
    let is_closed = |line: &&str| line.contains("disconnected") && line.contains("was revoked");
    let log = poll_until("the end of both links to be told", LIMIT, || {
        Some(agent.log()).filter(|log| log.lines().filter(is_closed).count() >= 2)
    });
    let closed: Vec<&str> = log.lines().filter(is_closed).collect();
    assert!(closed.len() == 2 && closed.iter().all(|line| line.contains(&desk1)), "{log}");
    let refused = paged(&stage, &forever(), &agent, "desk1").finish().expect_code(125);
    assert!(refused.stderr.contains(&reason), "{}", refused.stderr);
    // A list that is damaged, or was cut behind its first line, lets nobody in again.
    let whole = fs::read_to_string(&list).expect("the list");
    let cut = whole.split_inclusive('\n').next().expect("a line");
    for (times, damaged) in [(1, "desk1\n"), (2, cut)] {
        fs::write(dir(&stage, "n1").join("revoked.txt"), damaged).expect("the list");
        reload(&agent, "the keys stay as they are", times);
        paged(&stage, &forever(), &agent, "desk1").finish().expect_code(125);
    }
    // The other has not noticed anything.
    stays_proc.wait_output(stays_proc.output_len(), "round");
    stays_proc.close_stdin();
    let outcome = stays.finish_proc(stays_proc).expect_code(0);
    assert_nothing_wrong_was_read(&outcome);
    agent.terminate().expect_code(0);
}

/// Writes the list of who may use the agent `n1`.
fn allow(stage: &Stage, lines: &[String]) {
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(dir(stage, "n1").join("allowed.txt"), text).expect("the list");
}

#[test]
fn who_is_let_in_no_longer_is_cut_off_and_its_workload_ends_with_the_reason() {
    let Some(stage) = Stage::set_beside_others() else { return };
    cluster(&stage, [("node", "n1"), ("client", "desk1"), ("client", "desk2")]);
    let [desk1, desk2] = ["desk1", "desk2"].map(|name| id(&stage, name, "client"));
    allow(&stage, &[format!("{desk1} # desk1"), desk2.clone()]);
    let agent = AgentSetup::new(Mib(512)).keys(dir(&stage, "n1")).start();
    assert!(agent.log().contains("allowed=2"), "{}", agent.log());
    let [lost, stays] = ["desk1", "desk2"].map(|client| paged(&stage, &forever(), &agent, client));
    let (mut lost_proc, mut stays_proc) = (lost.spawn(), stays.spawn());
    wait_paged(&mut lost_proc, Mib(32));
    wait_paged(&mut stays_proc, Mib(32));
    // A list that is damaged or gone shuts nobody out.
    for (times, damaged) in [(1, "desk2"), (2, "#")] {
        allow(&stage, &[damaged.into()]);
        reload(&agent, "the keys stay as they are", times);
    }
    assert!(agent.log().contains("allowed.txt, line 1: an id"), "{}", agent.log());
    fs::remove_file(dir(&stage, "n1").join("allowed.txt")).expect("the list");
    reload(&agent, "allowed.txt is gone", 1);
    for proc in [&lost_proc, &stays_proc] {
        proc.wait_output(proc.output_len(), "round");
    }
    allow(&stage, &[desk2]);
    reload(&agent, "keys renewed", 1);
    let outcome = lost.finish_proc(lost_proc);
    assert_eq!(outcome.code, Some(125), "{}", outcome.stderr);
    assert_nothing_wrong_was_read(&outcome);
    let said = outcome.stderr.lines().find(|line| line.starts_with("gms: workload killed: "));
    let reason = format!("{} does not let this key in: have its id", agent.addr());
    assert!(said.is_some_and(|line| line.contains(&reason)), "{}", outcome.stderr);
    let refused = paged(&stage, &forever(), &agent, "desk1").finish().expect_code(125);
    assert!(refused.stderr.contains(&reason), "{}", refused.stderr);
    assert_eq!(refused.stderr.lines().count(), 1, "{}", refused.stderr);
    stays_proc.wait_output(stays_proc.output_len(), "round");
    stays_proc.close_stdin();
    assert_nothing_wrong_was_read(&stays.finish_proc(stays_proc).expect_code(0));
    agent.terminate().expect_code(0);
}

#[test]
fn a_client_holds_no_more_at_an_agent_than_its_quota() {
    let Some(stage) = Stage::set_beside_others() else { return };
    cluster(&stage, [("node", "n1"), ("client", "desk1"), ("client", "desk2")]);
    let [desk1, desk2] = ["desk1", "desk2"].map(|name| id(&stage, name, "client"));
    allow(&stage, &[format!("{desk1} memory=25M"), format!("{desk2} memory=50%")]);
    let agent = AgentSetup::new(Mib(256)).keys(dir(&stage, "n1")).start();
    let limited = paged(&stage, &forever(), &agent, "desk1");
    let mut proc = limited.spawn();
    wait_paged(&mut proc, Mib(20));
    proc.wait_error("why memory stays over the budget", LIMIT, |log| {
        log.contains("full").then_some(())
    });
    proc.close_stdin();
    let peak = limited.finish_proc(proc).expect_code(0).stats().remote_peak_bytes;
    // A slot more, as always, is being written: it is counted before it is refused.
    assert!(peak <= Mib(25).bytes(), "{peak} bytes");
    let program = Program::new([c_program("verify")]).args(["96", "1"]);
    finish_paged(&paged(&stage, &program, &agent, "desk2"));
    agent.terminate().expect_code(0);
}

#[test]
fn a_revoked_agent_is_refused_and_another_one_used() {
    let Some(stage) = Stage::set_beside_others() else { return };
    cluster(&stage, [("node", "n1"), ("node", "n2"), ("client", "desk1")]);
    let agents = ["n1", "n2"].map(|n| AgentSetup::new(Mib(256)).keys(dir(&stage, n)).start());
    keys(&stage, "revoke", [&id(&stage, "n1", "node")]).expect_code(0);
    let list = dir(&stage, "desk1").join("revoked.txt");
    fs::copy(stage.path("keys/revoked.txt"), &list).expect("the list");
    let program = Program::new([c_program("verify")]).args(["96", "1"]);
    let alone = paged(&stage, &program, &agents[0], "desk1").finish().expect_code(125);
    assert!(alone.stderr.contains("has a certificate that was revoked"), "{}", alone.stderr);
    let gms = paged(&stage, &program, &agents[0], "desk1").arg("--agent").arg(agents[1].addr());
    let outcome = finish_paged(&gms);
    assert!(outcome.stderr.contains("has a certificate that was revoked"), "{}", outcome.stderr);
    assert_eq!(outcome.stats().agent(&agents[0].addr()).pages, 0);
    fs::write(&list, "\n\nn1\n").expect("the list");
    let damaged = paged(&stage, &program, &agents[1], "desk1").finish().expect_code(125);
    assert!(damaged.stderr.contains("revoked.txt, line 3"), "{}", damaged.stderr);
}

#[test]
fn renewed_keys_are_of_the_same_client_and_node_beside_those_before() {
    let Some(stage) = Stage::set_beside_others() else { return };
    cluster(&stage, [("node", "n1"), ("client", "desk1")]);
    let agent = AgentSetup::new(Mib(512)).keys(dir(&stage, "n1")).start();
    let before = paged(&stage, &forever(), &agent, "desk1");
    let mut proc = before.spawn();
    proc.wait_output(0, "round 0\n");
    let ids = [("desk1", "client"), ("n1", "node")].map(|(name, role)| id(&stage, name, role));
    for (name, id) in [("desk1", &ids[0]), ("n1", &ids[1])] {
        let old = fs::read(dir(&stage, name).join("ca.pem")).expect("an authority");
        let told = keys(&stage, "renew", [name]).expect_code(0).stderr;
        assert!(told.contains(&format!("with the id {id}, as it was")), "{told}");
        assert_eq!(fs::read(dir(&stage, name).join("ca.pem")).expect("an authority"), old);
    }
    reload(&agent, "keys renewed", 1);
    let program = Program::new([c_program("verify")]).args(["96", "1"]);
    finish_paged(&paged(&stage, &program, &agent, "desk1"));
    proc.close_stdin();
    assert_nothing_wrong_was_read(&before.finish_proc(proc).expect_code(0));
    let log = poll_until("all links to be told", LIMIT, || {
        Some(agent.log()).filter(|log| log.matches(": connected ").count() >= 4)
    });
    let word = |line: &str, key: &str| {
        line.split_whitespace().find_map(|word| word.strip_prefix(key)).unwrap_or("").to_owned()
    };
    let connected = || log.lines().filter(|line| line.contains(": connected "));
    let clients: Vec<String> = connected().map(|line| word(line, "client=")).collect();
    let mut certificates: Vec<String> =
        connected().map(|line| word(line, "certificate=")).collect();
    certificates.dedup();
    assert!(clients.len() >= 4 && clients.iter().all(|client| *client == ids[0]), "{log}");
    assert_eq!(certificates.len(), 2, "one after the other: {log}");
    let renewed = log.lines().find(|line| line.contains("keys renewed")).unwrap_or_default();
    assert_eq!(word(renewed, "node="), ids[1], "{log}");
    agent.terminate().expect_code(0);
}

#[test]
fn an_agent_uses_renewed_keys_for_new_links_and_its_workloads_go_on() {
    let Some(stage) = Stage::set_beside_others() else { return };
    cluster(&stage, [("node", "n1"), ("client", "desk1"), ("client", "desk2")]);
    let agent = AgentSetup::new(Mib(512)).keys(dir(&stage, "n1")).start();
    let running = paged(&stage, &forever(), &agent, "desk1");
    let mut proc = running.spawn();
    proc.wait_output(0, "round 0\n");
    let told = keys(&stage, "renew", ["n1"]).expect_code(0).stderr;
    let before = told.split("the certificate before, ").nth(1).and_then(|text| text.get(..64));
    // Whoever starts now takes the certificate before for a lost one, and no other.
    let list = dir(&stage, "desk2").join("revoked.txt");
    fs::write(list, format!("{}\n", before.expect("a fingerprint"))).expect("the list");
    let program = Program::new([c_program("verify")]).args(["96", "1"]);
    let old = paged(&stage, &program, &agent, "desk2").finish().expect_code(125);
    assert!(old.stderr.contains("has a certificate that was revoked"), "{}", old.stderr);
    reload(&agent, "keys renewed", 1);
    finish_paged(&paged(&stage, &program, &agent, "desk2"));
    proc.wait_output(proc.output_len(), "round");
    proc.close_stdin();
    assert_nothing_wrong_was_read(&running.finish_proc(proc).expect_code(0));
    let cut = |line: &&str| line.contains("disconnected") && !line.contains("closed the link");
    assert_eq!(agent.log().lines().find(cut), None, "no link was cut");
    agent.terminate().expect_code(0);
}

#[test]
fn keys_that_end_within_a_month_are_told_everywhere() {
    let Some(stage) = Stage::set_beside_others() else { return };
    cluster(&stage, [("node", "n2"), ("client", "desk2")]);
    for (role, name) in [("node", "n1"), ("client", "desk1")] {
        keys(&stage, "issue", [role, name, "--days", "20"]).expect_code(0);
    }
    let agent = AgentSetup::new(Mib(256)).keys(dir(&stage, "n1")).start();
    let told = |log: &str| log.matches("node.pem expires on 20").count();
    assert_eq!(told(&agent.log()), 1, "{}", agent.log());
    // Twenty, less what has passed since.
    let left = ["in 19 days: renew it by", "in 20 days: renew it by"];
    assert!(left.iter().any(|left| agent.log().contains(left)), "{}", agent.log());
    reload(&agent, "node.pem expires on", 2);
    let program = Program::new([c_program("verify")]).args(["96", "1"]);
    let lines = |outcome: &Outcome| outcome.stderr.matches("client.pem expires on 20").count();
    let soon = paged(&stage, &program, &agent, "desk1").finish().expect_code(0);
    assert_eq!(lines(&soon), 1, "{}", soon.stderr);
    let quiet = paged(&stage, &program, &agent, "desk1").arg("-q").finish().expect_code(0);
    assert_eq!(quiet.stderr, "");
    let running = paged(&stage, &forever(), &agent, "desk1");
    let mut proc = running.spawn();
    proc.wait_output(0, "round 0\n");
    let left = status_of(proc.pid()).and_then(|status| status.key_days_left);
    assert!(matches!(left, Some(19 | 20)), "{left:?}");
    proc.close_stdin();
    running.finish_proc(proc).expect_code(0);
    let late = paged(&stage, &program, &agent, "desk2").finish().expect_code(0);
    assert_eq!(lines(&late), 0, "{}", late.stderr);
    for (name, verdict) in [("desk1", "WARN keys: client.pem expires on"), ("desk2", "OK   keys: ")]
    {
        let doctor = Gms::line(["doctor", "--keys"]).arg(dir(&stage, name)).finish();
        assert!(doctor.text().lines().any(|line| line.starts_with(verdict)), "{}", doctor.text());
    }
    let text = keys(&stage, "list", []).expect_code(0).text();
    let ending = text.lines().filter(|line| line.contains(" ending ")).count();
    assert_eq!(ending, 2, "{text}");
    // Renewed, for the usual time, nobody is told any more.
    keys(&stage, "renew", ["n1"]).expect_code(0);
    reload(&agent, "keys renewed", 2);
    assert_eq!(told(&agent.log()), 2, "{}", agent.log());
    agent.terminate().expect_code(0);
}

/// Runs a workload at an agent with the keys `n1`, which is replaced by one with `keys` at the same address.
fn replaced(stage: &Stage, keys: &Path) -> (SocketAddr, Outcome) {
    let agent = AgentSetup::new(Mib(512)).keys(dir(stage, "n1")).start();
    let addr: SocketAddr = agent.addr().parse().expect("an address");
    let gms = paged(stage, &forever(), &agent, "desk1");
    let mut proc = gms.spawn();
    wait_paged(&mut proc, Mib(32));
    agent.kill();
    let other = AgentSetup::new(Mib(512)).keys(keys).listen(addr).start();
    let outcome = gms.finish_proc(proc);
    drop(other);
    assert_eq!(outcome.code, Some(125), "{}", outcome.stderr);
    assert_nothing_wrong_was_read(&outcome);
    (addr, outcome)
}

#[test]
fn another_node_at_an_agents_address_is_not_taken_for_it() {
    let Some(stage) = Stage::set_beside_others() else { return };
    cluster(&stage, [("node", "n1"), ("node", "n2"), ("client", "desk1")]);
    let (addr, outcome) = replaced(&stage, &dir(&stage, "n2"));
    let [n1, n2] = ["n1", "n2"].map(|name| id(&stage, name, "node"));
    let reason = format!("{addr} is another node now ({n2}, it was {n1})");
    assert!(outcome.stderr.contains(&reason), "{}", outcome.stderr);
    // The same node is the agent, and says that it has been started anew.
    let (_, outcome) = replaced(&stage, &dir(&stage, "n1"));
    assert!(outcome.stderr.contains("has lost the workload's pages"), "{}", outcome.stderr);
}

#[test]
fn the_commands_for_keys_tell_what_they_did_and_what_is_wrong() {
    let Some(stage) = Stage::set_beside_others() else { return };
    cluster(&stage, [("client", "desk1")]);
    let fails = |command: &str, args: [&str; 1], says: &str| {
        let told = keys(&stage, command, args).expect_code(125).stderr;
        assert!(told.lines().count() == 1 && told.contains(says), "{command} {args:?}: {told}");
    };
    let text = keys(&stage, "list", []).expect_code(0).text();
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["NAME", "ROLE", "EXPIRES", "STATE", "ID"]);
    let seen: Vec<[&str; 3]> = rows[1..].iter().map(|row| [row[0], row[1], row[3]]).collect();
    let init = [["-", "node", "good"], ["-", "client", "good"], ["desk1", "client", "good"]];
    assert_eq!(seen, init, "{text}");
    fails("renew", ["desk2"], "desk2 holds no certificate");
    fails("revoke", ["desk2"], "`desk2` is no id, and");
    fails("revoke", ["a b"], "`a b` cannot be a key's name");
    let told = keys(&stage, "renew", []).expect_code(0).stderr;
    assert_eq!(told.matches("gms: renewed the ").count(), 2, "{told}");
    let told = keys(&stage, "renew", ["desk1"]).expect_code(0).stderr;
    let before = told.split("the certificate before, ").nth(1).and_then(|text| text.get(..64));
    // Only the key before is lost.
    keys(&stage, "revoke", [before.expect("a fingerprint")]).expect_code(0);
    assert!(keys(&stage, "list", []).expect_code(0).text().lines().all(|l| !l.contains("revoked")));
    keys(&stage, "revoke", ["desk1"]).expect_code(0);
    let told = keys(&stage, "revoke", ["desk1"]).expect_code(0).stderr;
    assert!(told.contains("names desk1 already"), "{told}");
    let text = keys(&stage, "list", []).expect_code(0).text();
    assert!(text.lines().last().is_some_and(|line| line.contains("revoked")), "{text}");
    fails("renew", ["desk1"], "client.pem was revoked");
    let told = keys(&stage, "issue", ["client", "desk2"]).expect_code(0).stderr;
    assert!(told.contains("revoked.txt with it"), "{told}");
    fs::write(stage.path("keys/revoked.txt"), "x\n").expect("the list");
    fails("revoke", ["desk2"], "revoked.txt, line 1");
}
