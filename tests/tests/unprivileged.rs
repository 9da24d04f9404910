//! An agent that may do nothing but what its packaged unit lets it do; gms where each sees its own processes alone; and a program that gives its rights up.

use std::fs;
use std::net::UdpSocket;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};

use gms_tests::*;

const NOBODY: u32 = 65534;

/// A copy of gms-agent that everybody can execute, and keys that are nobody's.
fn for_nobody(stage: &Stage) -> (PathBuf, PathBuf) {
    let all = fs::Permissions::from_mode(0o755);
    fs::set_permissions(stage.dir(), all.clone()).expect("permissions");
    let (copy, dir) = (stage.path("gms-agent"), stage.path("keys"));
    fs::copy(gms_binary().with_file_name("gms-agent"), &copy).expect("a copy");
    fs::set_permissions(&copy, all).expect("permissions");
    Gms::line(["keys", "init"]).arg(&dir).finish().expect_code(0);
    for file in ["", "ca.pem", "node.pem", "node-key.pem"] {
        chown(dir.join(file), Some(NOBODY), Some(NOBODY)).expect("an owner");
    }
    (copy, dir)
}

#[test]
fn an_agent_without_any_right_serves() {
    let Some(stage) = Stage::set() else { return };
    let (copy, dir) = for_nobody(&stage);
    let agent = AgentSetup::new(Mib(256)).keys(&dir).as_nobody(copy).start();
    for set in ["CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb"] {
        assert!(capabilities(agent.pid(), set).iter().all(|&set| set == 0), "{set}");
    }
    let program = Program::new([c_program("verify")]).args(["96", "2"]);
    let gms = Gms::run(&stage, &program).local(Mib(32)).arg("--agent").arg(agent.addr());
    let gms = gms.arg("--keys").arg(&dir);
    paged_in_time(Mib(96), Mib(32), || gms.finish().expect_code(0));
    agent.terminate().expect_code(0);
}

/// What an evictor executes lies in memory that its process can write to, and a process may be attached as root and give its rights up.
#[test]
fn who_takes_its_evictor_over_gets_no_rights_back_that_it_has_given_up() {
    let Some(stage) = Stage::set() else { return };
    let path = stage.path("made");
    for child in [None, Some("child")] {
        let program = Program::new([c_program("captor")]).args([path.display()]).args(child);
        let gms = Gms::run(&stage, &program).local(Mib(32)).arg("--export").arg("256M");
        // Its evictor answers no more, for which the workload may be killed.
        let outcome = gms.finish();
        assert!(outcome.text().starts_with("refused\n"), "{} {}", outcome.text(), outcome.stderr);
        assert!(!path.exists());
    }
}

/// `gms-agent --check` as nobody, with these options.
fn check<const N: usize>(copy: &Path, options: [&str; N]) -> Outcome {
    let argv = std::iter::once(tool("setpriv").into_os_string());
    let argv = argv.chain(RIGHTLESS.split(' ').map(Into::into)).chain([copy.into()]);
    Program::new(argv.chain(options.map(Into::into)).chain(["--check".into()])).finish()
}

#[test]
fn what_an_agent_lacks_is_told_before_it_starts() {
    let Some(stage) = Stage::set() else { return };
    let (copy, dir) = for_nobody(&stage);
    let keys = dir.to_str().expect("UTF-8");
    let good = ["--listen", "127.0.0.1:0", "--export", "8M", "--keys", keys];
    let outcome = check(&copy, good).expect_code(0);
    let text = outcome.text();
    let has = |text: &str, start: &str| text.lines().any(|line| line.starts_with(start));
    for start in [
        "OK   keys: ",
        "OK   clients: every client",
        "OK   listen: ",
        "OK   export: 8 MiB",
        "OK   rights: user 65534",
    ] {
        assert!(has(&text, start), "{start}: {text}");
    }
    for line in text.lines().filter(|line| !line.starts_with("OK   ")) {
        assert!(line.starts_with("WARN ") && line.contains("; "), "a cure: {line}");
    }
    let auto = ["--listen", "127.0.0.1:0", "--export", "auto:8M..16M", "--keys", keys];
    let text = check(&copy, auto).expect_code(0).text();
    assert!(has(&text, "OK   export: 8 MiB to 16 MiB") && text.contains(" pressure: "), "{text}");
    // One thing at a time keeps it from serving, and the agent itself does not start either.
    let taken = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let taken = taken.local_addr().expect("an address").to_string();
    let cases = [
        (["--listen", &taken, "--export", "8M", "--keys", keys], "FAIL listen: "),
        (["--listen", "127.0.0.1:0", "--export", "900T", "--keys", keys], "FAIL export: "),
        (["--listen", "127.0.0.1:0", "--export", "8M", "--keys", "/no/such"], "FAIL keys: "),
        (["--listen", "no-such-host.invalid:0", "--export", "8M", "--keys", keys], "FAIL listen: "),
    ];
    for (options, start) in cases {
        let text = check(&copy, options).expect_code(1).text();
        assert!(has(&text, start), "{start}: {text}");
        assert_eq!(text.matches("FAIL ").count(), 1, "{text}");
        Program::new([copy.as_os_str()]).args(options).finish().expect_code(1);
    }
    fs::write(dir.join("allowed.txt"), "desk1\n").expect("a list");
    assert!(has(&check(&copy, good).expect_code(1).text(), "FAIL keys: "));
    // Root's file, which nobody cannot read.
    fs::write(dir.join("allowed.txt"), "*\n").expect("a list");
    fs::set_permissions(dir.join("allowed.txt"), fs::Permissions::from_mode(0o600)).expect("mode");
    assert!(has(&check(&copy, good).expect_code(1).text(), "FAIL keys: cannot read"));
}

/// A shell script in which gms is to run as nobody, where processes that have more rights are hidden: `$as gms ...`.
fn where_processes_are_hidden(stage: &Stage, script: &str) -> Outcome {
    let all = fs::Permissions::from_mode(0o755);
    fs::set_permissions(stage.dir(), all.clone()).expect("permissions");
    let home = stage.path("home");
    for (name, from) in [("gms", gms_binary()), ("verify", c_program("verify"))] {
        fs::copy(from, stage.path(name)).expect("a copy");
        fs::set_permissions(stage.path(name), all.clone()).expect("permissions");
    }
    fs::create_dir(&home).expect("a folder");
    chown(&home, Some(NOBODY), Some(NOBODY)).expect("an owner");
    let script = format!(
        "mount -t proc -o hidepid=2 proc /proc && export HOME={} && cd {} && as='setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups \
         --inh-caps +sys_ptrace --ambient-caps +sys_ptrace'\n{script}",
        home.display(),
        stage.dir().display(),
    );
    let argv = [tool("unshare").into_os_string()].into_iter();
    let argv =
        argv.chain(["-m", "-pf", "--kill-child", "--mount-proc", "sh", "-c"].map(Into::into));
    Program::new(argv.chain([script.into()])).finish()
}

/// What has fewer capabilities than the pager (the command's parent, say) sees nothing of it.
#[test]
fn the_exit_status_is_known_where_processes_are_hidden() {
    let Some(stage) = Stage::set() else { return };
    let line = "exec $as ./gms run --local 64M --export 128M -- sh -c 'exit 7'";
    where_processes_are_hidden(&stage, line).expect_code(7);
}

/// The keeper, whose rights the reaper has not, is hidden from that.
#[test]
fn another_pager_goes_on_where_processes_are_hidden() {
    let Some(stage) = Stage::set() else { return };
    let script = "mkfifo in; $as ./gms run --local 24M --export 256M -- ./verify 96 forever <in >out 2>err & g=$!\n\
        exec 8>in; until grep -q 'round 1' out; do sleep 0.1; done\n\
        w=$(pgrep -n verify); r=$(awk '/^PPid/ {print $2}' /proc/$w/status); p=$(pgrep -P $g -x gms | grep -vx $r)\n\
        kill -9 $p; until grep -q 'another goes on' err; do kill -0 $g || break; sleep 0.1; done\n\
        exec 8>&-; wait $g; s=$?; cat out err; exit $s";
    let outcome = where_processes_are_hidden(&stage, script).expect_code(0);
    let text = outcome.text();
    assert!(text.contains("ended, every page right"), "{text}");
    assert!(text.contains("another goes on"), "{text}");
}
