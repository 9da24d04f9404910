//! The command line: what passes through, what is refused, and how it is said.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use gms_tests::*;
use nix::sys::signal::Signal;
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, Issuer, KeyPair};

/// A command line of gms which must fail.
struct Bad {
    line: String,
    code: i32,
    says: &'static str,
}

fn bad(line: impl Into<String>, code: i32, says: &'static str) -> Bad {
    Bad { line: line.into(), code, says }
}

/// Runs each through a shell, so that the table reads like what people type; `gms` is the binary.
fn refuse(stage: &Stage, table: Vec<Bad>) {
    let marker = stage.path("started");
    for Bad { line, code, says } in table {
        let script = format!("gms() {{ {} \"$@\"; }}; {line}", gms_binary().display());
        let program = Program::new([tool("sh").into_os_string(), "-c".into(), script.into()]);
        let outcome = program
            .dir(stage.dir())
            .env("MARK", &marker)
            .limit(Duration::from_secs(15))
            .finish()
            .expect_code(code);
        let told: Vec<&str> =
            outcome.stderr.lines().filter(|text| !text.trim().is_empty()).collect();
        if told.len() != 1 || !told[0].contains(says) {
            outcome.fail(&format!("expected one line on stderr which contains {says:?}: {line}"));
        }
        assert!(!marker.exists(), "the command was started: {line}");
    }
}

#[test]
fn wrong_command_lines_are_usage_errors() {
    let Some(stage) = Stage::set() else { return };
    refuse(
        &stage,
        vec![
            bad("gms run --bogus -- touch $MARK", 2, "--bogus"),
            bad("gms run --local 12Q -- touch $MARK", 2, "12Q"),
            bad("gms run --local 1k -- touch $MARK", 2, "--local is 1 KiB"),
            bad("gms run --local 0% -- touch $MARK", 2, "0%"),
            bad("gms run --local 64M", 2, "COMMAND"),
            bad("gms run --page-size 16k -- touch $MARK", 2, "16k"),
            bad("gms run --fault-threads 17 -- touch $MARK", 2, "between 1 and 16"),
            bad("gms run --export x -- touch $MARK", 2, "'x'"),
            bad("gms run --agent nowhere --keys . -- touch $MARK", 2, "nowhere"),
            bad("gms run --local 64M --agent 127.0.0.1:1 -- touch $MARK", 2, "--keys"),
            bad("gms frobnicate", 2, "frobnicate"),
            bad("gms attach abc --local 64M", 2, "abc"),
            bad("gms attach 0 --local 64M", 2, "0"),
            bad("gms attach $$", 2, "--local"),
            bad(
                "printf 'local = \"64M\"\\nlocla = 1\\n' >c.toml; gms run --config c.toml -- touch $MARK",
                2,
                "locla",
            ),
            bad(
                "printf 'local = \"64M\"\\nlocla = 1\\n' >c.toml; gms run --config c.toml -- touch $MARK",
                2,
                "c.toml:2",
            ),
            bad(
                "echo 'local = true' >c.toml; gms run --config c.toml -- touch $MARK",
                2,
                "c.toml:1: local: ",
            ),
            bad(
                "echo 'local = 4096' >c.toml; gms run --config c.toml -- touch $MARK",
                2,
                "--local is 4 KiB",
            ),
            bad("gms top </dev/null", 2, "gms status"),
            bad("gms run --config no-such-file.toml -- touch $MARK", 2, "no-such-file.toml"),
        ],
    );
}

#[test]
fn commands_that_cannot_start_are_126_and_127() {
    let Some(stage) = Stage::set() else { return };
    fs::write(stage.path("plain"), "not a program").expect("file");
    refuse(
        &stage,
        vec![
            bad("gms run --local 64M -- no-such-command-anywhere", 127, "no-such-command-anywhere"),
            bad("gms run --local 64M -- ./no-such-file", 127, "./no-such-file"),
            bad("gms run --local 64M -- ./plain", 126, "./plain"),
            bad("gms run --local 64M -- /", 126, "/"),
        ],
    );
}

#[test]
fn agents_and_keys_that_do_not_work_are_named() {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(64));
    let addr = agent.addr();
    Gms::line(["keys", "init"]).arg(stage.path("keys")).finish().expect_code(0);
    Gms::line(["keys", "init"]).arg(stage.path("other")).finish().expect_code(0);
    Gms::line(["keys", "init"]).arg(stage.path("old")).finish().expect_code(0);
    expire(&stage.path("old"));
    // Port 9 (discard) of the loopback: nothing answers there.
    refuse(
        &stage,
        vec![
            bad(
                "gms run --local 64M --keys keys --agent 127.0.0.1:9 -- touch $MARK",
                125,
                "127.0.0.1:9",
            ),
            bad(
                format!("gms run --local 64M --keys other --agent {addr} -- touch $MARK"),
                125,
                "certificate",
            ),
            bad(
                "gms run --local 64M --keys keys --agent no-such-host.invalid:7 -- touch $MARK",
                125,
                "no-such-host.invalid",
            ),
            bad(
                format!("gms run --local 64M --keys nowhere --agent {addr} -- touch $MARK"),
                125,
                "nowhere",
            ),
            bad("gms keys init keys", 125, "exist"),
        ],
    );
    assert_eq!(agent.terminate().code, Some(0), "the agent outlives clients of another cluster");
}

#[test]
fn processes_that_cannot_be_paged_are_refused_untouched() {
    let Some(stage) = Stage::set() else { return };
    let gone = Program::new([tool("true")]).spawn();
    let gone_pid = gone.pid();
    gone.finish().expect_code(0);
    let mut old = Program::new([thirty_two_bit_program()]).spawn();
    old.wait_output(0, "ready");
    let mut paged =
        Program::new([c_program("verify")]).args(["64", "forever"]).stdin_open().spawn();
    paged.wait_output(0, "round 0");
    let agent = AgentProc::start(Mib(256));
    let mut pager = Gms::attach(&stage, paged.pid()).local(Mib(32)).agents(&[&agent]).spawn();
    poll_until("the first attach", Duration::from_secs(20), || status_of(pager.pid()));
    let mut lines = vec![
        bad(format!("gms attach {gone_pid} --local 64M"), 125, "process"),
        bad(format!("gms attach {} --local 64M", old.pid()), 125, "32-bit"),
        bad(format!("gms attach {} --local 64M", paged.pid()), 125, "already"),
        bad(format!("gms detach {gone_pid}"), 1, "no workload"),
        bad(format!("gms status {gone_pid}"), 1, "no workload"),
    ];
    match fs::read_to_string("/proc/2/comm").is_ok_and(|name| name.trim() == "kthreadd") {
        true => lines.push(bad("gms attach 2 --local 64M", 125, "kernel thread")),
        // A container's.
        false => skipped("no kernel threads are in this PID namespace"),
    }
    refuse(&stage, lines);
    assert!(
        old.poll().is_none() && paged.poll().is_none() && pager.poll().is_none(),
        "a refusal touched its process"
    );
    paged.close_stdin();
    paged.finish().expect_code(0);
    pager.finish().expect_code(0);
}

#[test]
fn processes_of_another_user_are_refused() {
    let Some(stage) = Stage::set() else { return };
    let copy = stage.path("gms");
    fs::copy(gms_binary(), &copy).expect("copy of gms");
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).expect("permissions");
    let sleeper = Program::new([tool("sleep")]).args([60]).spawn();
    // Without the capability to page at all, and with it.
    let capable = ["--inh-caps=+sys_ptrace", "--ambient-caps=+sys_ptrace"];
    for (more, says) in [(&[][..], "CAP_SYS_PTRACE"), (&capable[..], "belongs to another user")] {
        let attach = Program::new([tool("setpriv")])
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .args(more)
            .args([copy.display().to_string().as_str(), "attach"])
            .args([sleeper.pid().to_string().as_str(), "--local", "64M"])
            .dir(stage.dir());
        let outcome = attach.finish().expect_code(125);
        let told = (outcome.stderr.lines().count(), outcome.stderr.contains(says));
        assert_eq!(told, (1, true), "{says}: {}", outcome.stderr);
    }
    assert!(exists(sleeper.pid()));
}

/// Replaces the client certificate in `dir` by one of the same authority which has expired.
fn expire(dir: &Path) {
    let read = |name: &str| {
        fs::read_to_string(dir.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    };
    let ca_key = KeyPair::from_pem(&read("ca-key.pem")).expect("key of the authority");
    let issuer =
        Issuer::from_ca_cert_pem(&read("ca.pem"), ca_key).expect("certificate of the authority");
    let mut params = CertificateParams::new(Vec::new()).expect("parameters");
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(2021, 1, 1);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::from_pem(&read("client-key.pem")).expect("key of the client");
    let certificate = params.signed_by(&key, &issuer).expect("certificate of the client");
    fs::write(dir.join("client.pem"), certificate.pem()).expect("client.pem");
}

fn shell(script: &str) -> Program {
    Program::new([tool("sh").to_str().expect("path"), "-c", script])
}

#[test]
fn status_and_streams_are_the_commands_own() {
    let Some(stage) = Stage::set() else { return };
    let run = |program: &Program| {
        Gms::run(&stage, program).local(Mib(64)).arg("--export").arg("64M").finish()
    };
    for (script, code) in [
        ("exit 0", 0),
        ("exit 7", 7),
        ("kill -TERM $$", 143),
        ("kill -SEGV $$", 139),
        ("exit 255", 255),
    ] {
        let outcome = run(&shell(script));
        assert_eq!(outcome.code, Some(code), "{script}: {}", outcome.stderr);
    }
    let input: Vec<u8> =
        (0..1_000_003_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let outcome = run(&Program::new([tool("cat")]).stdin(input.clone())).expect_code(0);
    assert!(outcome.stdout == input, "stdin comes out of cat");
    let outcome = run(&shell("pwd; echo \"$GMS_TEST_WORD\"; echo problem >&2")
        .dir(stage.dir())
        .env("GMS_TEST_WORD", "a b"));
    let dir = fs::canonicalize(stage.dir()).expect("own directory");
    assert_eq!(outcome.text(), format!("{}\na b\n", dir.display()));
    assert!(outcome.stderr.starts_with("problem\n"), "{}", outcome.stderr);
}

#[test]
fn issued_keys_let_a_node_serve_and_a_machine_page_by_a_configuration_file() {
    let Some(stage) = Stage::set() else { return };
    Gms::line(["keys", "init"]).arg(stage.path("keys")).finish().expect_code(0);
    for (role, name) in [("node", "node1"), ("client", "desk1")] {
        let issue = Gms::line(["keys", "issue"]).arg(stage.path("keys")).arg(role).arg(name);
        issue.finish().expect_code(0);
        let there = |file: &str| stage.path("keys").join(name).join(file).exists();
        assert!(there("ca.pem") && !there("ca-key.pem"), "{name}: the authority's key stays");
    }
    let agent = AgentSetup::new(Mib(256)).keys(stage.path("keys/node1")).start();
    refuse(
        &stage,
        vec![bad(
            format!("gms run --keys keys/node1 --agent {} -- touch $MARK", agent.addr()),
            125,
            "client",
        )],
    );
    // Relative paths start at the file, not at the working directory.
    let file = stage.path("gms.toml");
    let text = format!("local = '24M'\nagent = '{}'\nkeys = 'keys/desk1'\n", agent.addr());
    fs::write(&file, text).expect("gms.toml");
    let program = Program::new([c_program("verify")]).args(["96", "1"]).dir("/");
    let gms = || Gms::run(&stage, &program).arg("--config").arg(&file);
    paged_in_time(Mib(96), Mib(24), || gms().finish().expect_code(0));
    // The command line wins.
    paged_in_time(Mib(96), Mib(40), || gms().local(Mib(40)).finish().expect_code(0));
    agent.terminate().expect_code(0);
}

#[test]
fn the_summary_is_one_paragraph_and_quiet_means_quiet() {
    let Some(stage) = Stage::set() else { return };
    let program = Program::new([c_program("verify")]).args(["96", "1"]);
    let gms = || Gms::run(&stage, &program).local(Mib(32)).arg("--export").arg("256M");
    let told = gms().finish().expect_code(0).stderr;
    assert!(told.contains("gms") && !told.trim_end().contains("\n\n"), "{told}");
    let silent = gms().arg("-q").finish().expect_code(0).stderr;
    assert_eq!(silent, "");
}

#[test]
fn signals_to_gms_reach_the_command() {
    let Some(stage) = Stage::set() else { return };
    let program =
        shell("trap 'echo got it; exit 9' TERM; echo ready; while :; do sleep 0.05; done");
    let gms = Gms::run(&stage, &program).local(Mib(64)).arg("--export").arg("64M");
    let proc = gms.spawn();
    proc.wait_output(0, "ready");
    proc.signal(Signal::SIGTERM);
    let outcome = gms.finish_proc(proc).expect_code(9);
    assert_eq!(outcome.text(), "ready\ngot it\n");
}

#[test]
fn job_control_works_at_a_terminal() {
    let Some(_stage) = Stage::set() else { return };
    let mut terminal = Terminal::open();
    terminal.expect("READY");
    terminal.type_in(&format!(
        "{} run --local 64M --export 64M -- \
         sh -c 'trap \"echo ba\"\"ck\" CONT; echo be''gun; while :; do :; done'\n",
        gms_binary().display()
    ));
    terminal.expect("begun");
    terminal.type_in("\x1a");
    terminal.expect("Stopped");
    terminal.type_in("fg\n");
    // Only now has the shell given it the terminal: an earlier Ctrl-C would be the shell's.
    terminal.expect("back");
    terminal.type_in("\x03");
    terminal.expect("READY");
    terminal.type_in("echo status=$?\n");
    terminal.expect("status=130");
    terminal.type_in(&format!(
        "{} run -q --local 64M --export 64M -- tty; echo status=$?\n",
        gms_binary().display()
    ));
    terminal.expect("/dev/pts/");
    terminal.expect("status=0");
}

#[test]
fn doctor_finds_this_machine_fit() {
    let Some(_stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(64));
    let outcome = Gms::line(["doctor"]).agents(&[&agent]).finish().expect_code(0);
    assert!(
        outcome.text().lines().count() >= 5 && outcome.text().contains("kernel"),
        "{}",
        outcome.text()
    );
    let json = Gms::line(["doctor", "--json"]).finish().expect_code(0);
    let checks: Vec<serde_json::Value> = serde_json::from_slice(&json.stdout).expect("a JSON list");
    assert!(checks.len() >= 4, "{checks:?}");
    let lost = Gms::line(["doctor", "--agent", "127.0.0.1:9", "--keys"])
        .arg(Path::new("nowhere"))
        .finish();
    assert_eq!(lost.code, Some(1), "{}", lost.text());
}

#[test]
fn top_shows_workloads_until_it_is_left() {
    let Some(stage) = Stage::set() else { return };
    let program = Program::new([tool("cat")]).stdin_open();
    let mut gms = Gms::run(&stage, &program).local(Mib(64)).arg("--export").arg("64M").spawn();
    let status = poll_until("gms in the list", Duration::from_secs(10), || status_of(gms.pid()));
    let mut terminal = Terminal::open();
    terminal.expect("READY");
    terminal.type_in(&format!("{} top; echo left with $?\n", gms_binary().display()));
    terminal.expect("TERM=dumb");
    terminal.expect("left with 2");
    // A selected row is blue, unless the user wants no colours; an empty NO_COLOR is none.
    const BLUE: &str = ";48;5;4m";
    for (setting, coloured) in [("NO_COLOR=", true), ("NO_COLOR=1", false)] {
        let binary = gms_binary().display().to_string();
        terminal
            .type_in(&format!("{setting} TERM=xterm-256color {binary} top; echo left with $?\n"));
        terminal.expect(&status.pid.to_string());
        terminal.expect("RESIDENT");
        assert_eq!(terminal.shows(BLUE), coloured, "{setting}");
        terminal.type_in("\x1b[B\x1b[6~r");
        terminal.expect("RESIDENT");
        terminal.type_in("q");
        terminal.expect("left with 0");
    }
    gms.close_stdin();
    gms.finish().expect_code(0);
}

#[test]
fn completion_offers_workloads_and_processes() {
    let Some(stage) = Stage::set() else { return };
    let program = Program::new([tool("cat")]).stdin_open();
    let mut gms = Gms::run(&stage, &program).local(Mib(64)).arg("--export").arg("64M").spawn();
    let status = poll_until("gms in the list", Duration::from_secs(10), || status_of(gms.pid()));
    let offered = |words: &str| -> Vec<String> {
        // As bash does at a tab behind these words.
        let script = format!(
            "PATH={}:$PATH; . <(gms completion bash); COMP_WORDS=({words} ''); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             COMP_TYPE=9; _clap_complete_gms gms '' x; printf '%s\n' \"${{COMPREPLY[@]}}\"",
            gms_binary().parent().expect("a directory").display()
        );
        let shell = Program::new([tool("bash").into_os_string(), "-c".into(), script.into()]);
        shell.finish().expect_code(0).text().lines().map(|line| line.trim().to_string()).collect()
    };
    for words in ["gms detach", "gms status", "gms attach"] {
        let offered = offered(words);
        assert!(offered.contains(&status.pid.to_string()), "{words}: {offered:?}");
    }
    assert!(offered("gms").contains(&"detach".to_string()));
    let page_sizes = offered("gms run --page-size");
    assert!(page_sizes.contains(&"8k".to_string()), "{page_sizes:?}");
    gms.close_stdin();
    gms.finish().expect_code(0);
}

#[test]
fn status_knows_what_is_paged_and_what_is_not() {
    let Some(stage) = Stage::set() else { return };
    assert!(status_of(std::process::id() as i32).is_none());
    let program = Program::new([tool("cat")]).stdin_open();
    let mut gms = Gms::run(&stage, &program).local(Mib(64)).arg("--export").arg("64M").spawn();
    let status = poll_until("gms in the list, with a program", Duration::from_secs(10), || {
        status_of(gms.pid()).filter(|status| status.resident_bytes > 0)
    });
    assert_eq!(status.budget_bytes, Mib(64).bytes());
    assert_eq!((status.remote_bytes, status.faults), (0, 0));
    assert!(exists(status.pid) && exists(status.supervisor_pid), "{status:?}");
    gms.close_stdin();
    gms.finish().expect_code(0);
    assert!(status_of(status.pid).is_none());
}
