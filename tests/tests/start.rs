//! What is found before a command starts: missing rights, agents that are away, files that cannot be written, a gms around this one, and
//! the limits of a cgroup.

use std::fs;
use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use gms_pager::kernel::proc;
use gms_tests::*;

/// As the user nobody, without capabilities.
const AS_NOBODY: &str = "setpriv --reuid=65534 --regid=65534 --clear-groups";
/// With the capabilities that Docker leaves to root.
const AS_DOCKER: &str = "setpriv --inh-caps=-all --bounding-set=-all,+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,\
    +setuid,+setpcap,+net_bind_service,+net_raw,+sys_chroot,+mknod,+audit_write,+setfcap";

/// A shell script in the directory of `stage`, which everybody may write, with a copy of gms that everybody may execute.
fn script(stage: &Stage, text: &str) -> Program {
    let all = fs::Permissions::from_mode(0o777);
    fs::set_permissions(stage.dir(), all.clone()).expect("permissions");
    for name in ["gms", "verify"] {
        let copy = stage.path(name);
        // What still runs of it cannot be overwritten.
        if copy.exists() {
            continue;
        }
        let from = if name == "gms" { gms_binary() } else { c_program(name) };
        fs::copy(from, &copy).expect("copy");
        fs::set_permissions(&copy, all.clone()).expect("permissions");
    }
    Program::new([tool("sh").into_os_string(), "-c".into(), text.into()])
        .dir(stage.dir())
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
}

/// Runs a line that has `verify 96 1` paged within 32 MiB and `figures` written.
fn paged(stage: &Stage, line: &str) -> Outcome {
    let figures = stage.path("figures");
    enough_in_time(
        |stats| stats.pages_out > 8000,
        || {
            let _ = fs::remove_file(&figures);
            let mut outcome = script(stage, line).finish().expect_code(0);
            outcome.stats = Some(Stats::read(&figures).expect("figures"));
            outcome
        },
    )
}

fn lines(text: &str) -> Vec<&str> {
    text.lines().filter(|line| !line.trim().is_empty()).collect()
}

#[test]
fn without_the_capability_no_command_is_started() {
    let Some(stage) = Stage::set() else { return };
    for user in [AS_NOBODY, AS_DOCKER, "unshare -r"] {
        let line = format!("{user} ./gms run --local 32M --export 64M -- touch started");
        let refused = script(&stage, &line).finish().expect_code(125);
        let told = lines(&refused.stderr);
        let cures = ["CAP_SYS_PTRACE", "SYS_PTRACE", "outside of the user namespace"];
        if told.len() != 1
            || !cures.iter().any(|cure| told[0].contains(cure))
            || !told[0].contains("cure: ")
            || !told[0].contains("--best-effort")
        {
            refused.fail(&format!("one line with the cure: {user}"));
        }
        assert!(!stage.path("started").exists(), "the command was started: {user}");
        let line =
            format!("{user} ./gms run --best-effort --local 32M -- sh -c 'echo ran; exit 7'");
        let unpaged = script(&stage, &line).finish().expect_code(7);
        let told = lines(&unpaged.stderr);
        assert!(
            unpaged.text() == "ran\n" && told.len() == 1 && told[0].contains("without paging"),
            "{user}: {}{}",
            unpaged.text(),
            unpaged.stderr
        );
    }
    let line = format!("{AS_NOBODY} ./gms run --best-effort --local 32M -- no-such-command");
    script(&stage, &line).finish().expect_code(127);
    let line =
        format!("sleep 60 & {AS_NOBODY} ./gms attach $! --local 32M; s=$?; kill $!; exit $s");
    script(&stage, &line).finish().expect_code(125);
    let line =
        format!("sleep 60 & {AS_DOCKER} ./gms attach $! --local 32M; s=$?; kill $!; exit $s");
    let refused = script(&stage, &line).finish().expect_code(125);
    assert!(refused.stderr.contains("cannot be paged: CAP_SYS_PTRACE"), "{}", refused.stderr);
    let doctor = script(&stage, &format!("{AS_NOBODY} ./gms doctor")).finish().expect_code(1);
    let failed: Vec<String> =
        doctor.text().lines().filter(|line| line.starts_with("FAIL")).map(String::from).collect();
    assert!(failed.len() == 1 && failed[0].contains("userfaultfd: CAP_SYS_PTRACE"), "{failed:?}");
}

/// Each way that gms-run(1) tells of, tried.
#[test]
fn each_cure_lets_a_user_page() {
    let Some(stage) = Stage::set() else { return };
    let native = script(&stage, "./verify 96 1").finish().expect_code(0);
    let run = "run --local 32M --export 256M --stats figures -- ./verify 96 1";
    let setcap = "cp gms gms-cap; setcap cap_sys_ptrace=ep gms-cap";
    // In a mount namespace, so that the device of this machine stays as it is.
    let device = "mkdir dev; mount -t tmpfs none dev; mknod dev/uffd c $(stat -c '0x%t 0x%T' /dev/userfaultfd | \
                  { read a b; echo $((a)) $((b)); }); chgrp 65534 dev/uffd; chmod 660 dev/uffd; mount --bind dev/uffd /dev/userfaultfd";
    let cures = [
        format!("{AS_NOBODY} --inh-caps=+sys_ptrace --ambient-caps=+sys_ptrace ./gms {run}"),
        format!(
            "capsh --keep=1 --user=nobody --inh=cap_sys_ptrace --addamb=cap_sys_ptrace -- -c './gms {run}'"
        ),
        format!("{AS_DOCKER},+sys_ptrace ./gms {run}"),
        format!("{setcap}; unshare -m sh -c \"{device}; {AS_NOBODY} ./gms-cap {run}\""),
    ];
    for cure in cures {
        let cure = cure.replace("$(stat", "\\$(stat").replace("$((", "\\$((");
        assert_eq!(paged(&stage, &cure).stdout, native.stdout, "{cure}");
    }
    // With the file's capability alone gms may page, but the command may not be paged.
    let line = format!("{setcap}; {AS_NOBODY} ./gms-cap {run}");
    let refused = script(&stage, &line).finish();
    let allowed = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    if allowed.is_ok_and(|text| text.trim() == "0") {
        let refused = refused.expect_code(125);
        assert!(refused.stderr.contains("/dev/userfaultfd"), "{}", refused.stderr);
    }
}

/// CAP_DAC_OVERRIDE, CAP_KILL, CAP_SYS_PTRACE and CAP_SYS_NICE.
const PAGER_KEEPS: u64 = 1 << 1 | 1 << 5 | 1 << 19 | 1 << 23;
/// It may have to start a pager.
const KEEPER_KEEPS: u64 = PAGER_KEEPS;
const SOON: Duration = Duration::from_secs(30);

#[test]
fn gms_gives_up_what_it_does_not_need_and_the_command_keeps_its_own() {
    let Some(stage) = Stage::set() else { return };
    let ours = capabilities(std::process::id() as i32, "CapEff")[0];
    assert_eq!(ours & PAGER_KEEPS, PAGER_KEEPS, "the tests run as root");
    assert_ne!(ours & !PAGER_KEEPS, 0, "there is something to give up");
    let agent = AgentProc::start(Mib(256));
    let disk = ["--disk", "/var/tmp", "--disk-size", "128M"];
    for agents in [&[&agent][..], &[]] {
        let program = Program::new([c_program("verify")]).args(["96", "forever"]).stdin_open();
        let gms = Gms::run(&stage, &program).local(Mib(32)).arg("--fault-threads").arg("2");
        let gms = match agents {
            [] => gms,
            agents => disk.iter().fold(gms.agents(agents), |gms, arg| gms.arg(arg)),
        };
        let mut proc = gms.spawn();
        proc.wait_output(0, "round 0\n");
        let status = status_of(proc.pid()).expect("a workload");
        let (front, pager) = (proc.pid(), status.supervisor_pid);
        let find = |wanted: &str| descendants(front).into_iter().find(|&pid| name(pid) == wanted);
        let named = |wanted: &str| find(wanted).expect(wanted);
        // In its own process it takes its name, then gives up rights. Nobody waits for that.
        let keeper = poll_until("a keeper that has given up rights", SOON, || {
            let sets =
                |&pid: &i32| ["CapEff", "CapPrm", "CapBnd"].map(|set| capabilities(pid, set));
            find("far-keeper")
                .filter(|pid| sets(pid).concat().iter().all(|&set| set == KEEPER_KEEPS))
        });
        let mut parts = vec![
            (pager, PAGER_KEEPS),
            (keeper, KEEPER_KEEPS),
            (front, 1 << 5),
            (proc::status_field(status.pid, "PPid:").expect("a parent") as i32, 1 << 5),
        ];
        parts.push(match agents {
            [] => (named("far-agent"), 0),
            _ => (named("far-disk"), 1 << 1),
        });
        for (pid, kept) in parts {
            for set in ["CapEff", "CapPrm", "CapBnd"] {
                let sets = capabilities(pid, set);
                assert!(
                    sets.iter().all(|&found| found == kept),
                    "{set} of {pid}: {sets:x?} {kept:x}"
                );
            }
        }
        assert!(capabilities(pager, "CapEff").len() >= 4, "all threads are looked at");
        for set in ["CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb"] {
            let own = capabilities(std::process::id() as i32, set)[0];
            assert_eq!(capabilities(status.pid, set), [own], "{set} of the command");
        }
        proc.close_stdin();
        gms.finish_proc(proc).expect_code(0);
    }
}

/// What docs/cli.md says of each capability.
#[test]
fn root_pages_with_the_one_capability_that_is_needed() {
    let Some(stage) = Stage::set() else { return };
    let run = "run --local 32M --export 256M --stats figures -- ./verify 96 1";
    let line = format!("setpriv --inh-caps=-all --bounding-set=-all,+sys_ptrace ./gms {run}");
    paged(&stage, &line);
    let line = "setpriv --inh-caps=-all --bounding-set=-all,+sys_ptrace ./gms doctor";
    let told = script(&stage, line).finish().expect_code(0).text();
    let told = told.lines().find(|line| line.starts_with("WARN capabilities: without "));
    for missing in ["CAP_DAC_OVERRIDE", "CAP_KILL", "CAP_SYS_NICE"] {
        assert!(told.is_some_and(|line| line.contains(missing)), "{told:?}");
    }
    let line = format!("setpriv --inh-caps=-all --bounding-set=-sys_ptrace ./gms {run}");
    let refused = script(&stage, &line).finish().expect_code(125);
    assert!(refused.stderr.contains("CAP_SYS_PTRACE is missing"), "{}", refused.stderr);
}

#[test]
fn a_program_that_changes_its_user_is_paged_by_roots_gms() {
    let Some(stage) = Stage::set() else { return };
    let line =
        format!("./gms run --local 32M --export 256M --stats figures -- {AS_NOBODY} ./verify 96 1");
    paged(&stage, &line);
}

#[test]
fn an_agent_that_is_away_at_the_start_is_told_and_used_later() {
    let Some(stage) = Stage::set() else { return };
    let there = AgentProc::start(Mib(512));
    // Bound, so that nothing answers and nobody else gets the port.
    let place = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let away = place.local_addr().expect("its address");
    let program = Program::new([c_program("verify")]).args(["96", "forever"]).stdin_open();
    let gms = Gms::run(&stage, &program)
        .local(Mib(32))
        .agents(&[&there])
        .arg("--agent")
        .arg(away.to_string())
        .arg("--agent")
        .arg("no-such-host.invalid:7");
    let mut proc = gms.spawn();
    proc.wait_output(0, "round 0\n");
    let told = proc.errors();
    let told = lines(&told);
    let of = |name: &str| told.iter().filter(|line| line.contains(name)).count();
    // The last comes when the first page has gone out.
    let [unanswered, unknown, few] =
        [away.to_string().as_str(), "no-such-host.invalid:7", "fewer than 2 copies"].map(of);
    assert!(unanswered == 1 && unknown == 1 && few <= 1 && told.len() == 2 + few, "{told:?}");
    drop(place);
    let late = AgentSetup::new(Mib(512)).listen(away).start();
    poll_until("pages at the agent that came late", Duration::from_secs(60), || {
        let status = status_of(proc.pid())?;
        status
            .agents
            .iter()
            .find(|agent| agent.addr == late.addr())
            .filter(|a| a.pages > 0)
            .cloned()
    });
    proc.close_stdin();
    let outcome = gms.finish_proc(proc).expect_code(0);
    assert!(outcome.text().ends_with("every page right\n"), "{}", outcome.text());
}

#[test]
fn without_any_agent_nothing_is_started() {
    let Some(stage) = Stage::set() else { return };
    let places = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").expect("a port"));
    let mut gms = Gms::line(["run", "--local", "64M", "--keys"]).arg(stage.path("keys"));
    Gms::line(["keys", "init"]).arg(stage.path("keys")).finish().expect_code(0);
    for place in &places {
        gms = gms.arg("--agent").arg(place.local_addr().expect("its address").to_string());
    }
    let mark = stage.path("started");
    let refused = gms.arg("--").arg(tool("touch")).arg(&mark).finish_as_is().expect_code(125);
    assert_eq!(lines(&refused.stderr).len(), 1, "{}", refused.stderr);
    assert!(refused.stderr.contains("and 1 more"), "{}", refused.stderr);
    assert!(!mark.exists());
}

#[test]
fn figures_that_cannot_be_written_change_nothing() {
    let Some(stage) = Stage::set() else { return };
    let told = |line: &str, count: usize| {
        let outcome = script(&stage, line).finish().expect_code(7);
        let told = lines(&outcome.stderr);
        assert!(outcome.text() == "ran\n" && told.len() == count, "{line}: {told:?}");
        assert!(told.iter().all(|line| line.contains("cannot be written")), "{line}: {told:?}");
    };
    let run = "./gms run -q --local 64M --export 64M";
    let command = "-- sh -c 'echo ran; exit 7'";
    told(&format!("{run} --stats no/such/s --trace no/such/t {command}"), 2);
    told(&format!("{run} --stats . {command}"), 1);
    told(&format!("{run} --stats /dev/full --trace /dev/full {command}"), 2);
    told(&format!("mkfifo pipe; {run} --stats pipe {command}"), 1);
    // Found only at the end.
    let gone = "-- sh -c 'rm -r dir; echo ran; exit 7'";
    told(&format!("mkdir dir; {run} --stats dir/s --trace dir/t {gone}"), 2);
    // And what can be written is.
    told(&format!("{run} --stats s --trace t {command}"), 0);
    assert!(Stats::read(&stage.path("s")).is_ok());
    assert!(fs::read_to_string(stage.path("t")).is_ok_and(|text| text.starts_with("page,")));
}

#[test]
fn gms_inside_gms_is_refused_and_names_the_outer() {
    let Some(stage) = Stage::set() else { return };
    let run = "./gms run -q --local 64M --export 64M";
    for user in ["", &format!("{AS_NOBODY} --inh-caps=+sys_ptrace --ambient-caps=+sys_ptrace")] {
        // The pager is the front's first child; the command's parent is another.
        let pager = "front=$(sed -n \"s/^PPid:[^0-9]*//p\" /proc/$PPID/status); \
                     read pager others </proc/$front/task/$front/children; echo $pager";
        let line = format!("{run} -- sh -c '{pager}; {user} {run} -- touch started'");
        let refused = script(&stage, &line).finish().expect_code(125);
        let pager = refused.text().trim().to_string();
        let told = lines(&refused.stderr);
        assert!(told.len() == 1 && told[0].contains(&format!("process {pager}")), "{told:?}");
        assert!(!stage.path("started").exists());
        let line = format!("{run} -- sh -c '{user} {run} --best-effort -- sh -c \"exit 9\"'");
        let inner = script(&stage, &line).finish().expect_code(9);
        assert!(inner.stderr.contains("without paging"), "{}", inner.stderr);
    }
    // Two beside each other do not disturb one another.
    script(&stage, &format!("{run} -- {} & {run} -- true && wait", "sleep 0.1"))
        .finish()
        .expect_code(0);
}

#[test]
fn shares_are_of_the_cgroups_limit() {
    let Some(stage) = Stage::set() else { return };
    let Some(group) = MemoryGroup::new(Mib(256)) else {
        skipped("no memory cgroup can be made here");
        return;
    };
    let within = format!("echo $$ >{}/cgroup.procs", group.dir().display());
    let run = "./gms run -q --local 50% --export 64M --stats figures -- true";
    script(&stage, &format!("{within}; {run}")).finish().expect_code(0);
    let stats = Stats::read(&stage.path("figures")).expect("figures");
    assert_eq!(stats.budget_bytes, Mib(128).bytes());
    let run = "./gms run -q --stats figures -- true";
    script(&stage, &format!("{within}; {run}")).finish().expect_code(0);
    let stats = Stats::read(&stage.path("figures")).expect("figures");
    let most = Mib(256).bytes() / 5 * 4;
    assert!((most / 2..=most).contains(&stats.budget_bytes), "{}", stats.budget_bytes);
    let doctor = script(&stage, &format!("{within}; ./gms doctor")).finish().expect_code(0);
    assert!(doctor.text().contains("256 MiB in this cgroup"), "{}", doctor.text());
}

/// `gms run -v ... 2>&1 | head -1`: what cannot be told changes nothing.
#[test]
fn nobody_needs_to_read_what_gms_says() {
    let Some(stage) = Stage::set() else { return };
    // A pipe whose only reader is closed before gms starts.
    let line = "mkfifo p; exec 3<>p 2>p 3>&-; \
        ./gms run -v --local 16M --export 64M --trace trace -- sh -c './verify 64 1; exit 7'";
    script(&stage, line).finish().expect_code(7);
    assert!(fs::metadata(stage.path("trace")).is_ok_and(|file| file.len() > 0), "no trace");
}
