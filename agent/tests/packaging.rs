//! What `packaging/` says of gms-agent is what its options say.

use clap::{CommandFactory, Parser};
use clap_complete::Shell;
use gms_agent::cli::Args;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The part of the man page that options do not tell.
const TAIL: &str = r#".SH SIGNALS
.TP
SIGTERM, SIGINT
Drain: take no new workloads and pages, serve those which have pages here until they have none or the time of
\fB\-\-drain\fR is over, then close all links and exit. A second one ends the agent at once.
.TP
SIGHUP
Read the export again, and apply it, up to what the agent was started with: pages beyond it are to be taken away by their
workloads, and stay until they are. Read the keys again, for links that are made from then on, and the lists of who was
revoked and of who may use the agent. Links of peers that are no longer good are closed. If something of it cannot be used, or a list that was there is gone, a line in the log says why,
and the agent goes on with all that it has.
.SH "FOLLOWING THE HOST"
With \fB\-\-export auto\fR the agent exports what the machine, or the memory cgroup that it is in, can spare. It leaves a reserve of a
sixteenth of all memory (64 MiB to 2 GiB), shrinks at once when programs need memory, and grows slowly when it has been idle for
10 seconds. Memory without pages goes back at once; pages are taken to other agents by their workloads, and stay, which the log
tells, if none has room.
.PP
The memory of pages is locked, so that it is not swapped out, if the agent may: LimitMEMLOCK=infinity in a unit, ulimit \-l, or
CAP_IPC_LOCK.
.SH "EXIT STATUS"
.TP
0
After SIGTERM or SIGINT.
.TP
1
The agent could not be started, or failed; with \fB\-\-check\fR: it could not.
.TP
2
Wrong options or configuration.
.SH ENVIRONMENT
.TP
GMS_KEYS
The key directory, unless \fB\-\-keys\fR names one.
.TP
NO_COLOR, TERM
The log is in colours on a terminal, but not if NO_COLOR is set and not empty, or TERM is "dumb".
.SH FILES
.TP
/etc/gms/agent.toml
Configuration of the packaged service: the long options as keys. A size is a string ("4G", "40%") or a whole number of
bytes; an export may be "auto" or "auto:1G..8G" too. Relative paths start at the directory of the file.
.TP
/etc/gms/keys
Keys of the packaged service, made by \fBgms keys issue\fR(1): ca.pem, node.pem and node\-key.pem. The private key must be
its owner's alone (mode 600), or root's and its group's (mode 640). With them revoked.txt, if somebody was revoked: see
\fBgms\-keys\-revoke\fR(1); and allowed.txt, if not every client may use the agent, or some have a quota. A line of it is
an id as \fBgms keys list\fR shows it, or * for all others, then memory=SIZE or memory=N%, links=N, requests=N, as far as
they are to be bounded, and a comment after #.
.SH EXAMPLES
Keys of a cluster, with one of its own for a node, and an agent there:
.PP
.nf
    gms keys init keys
    gms keys issue keys node node1
    ssh node1 mkdir \-p /etc/gms/keys
    scp keys/node1/* node1:/etc/gms/keys/
    gms\-agent \-\-listen 0.0.0.0:7400 \-\-export 8G \-\-keys /etc/gms/keys
.fi
.PP
The packaged service, with metrics for Prometheus:
.PP
.nf
    gms\-agent \-\-config /etc/gms/agent.toml \-\-keys /etc/gms/keys \-\-metrics 127.0.0.1:9400
.fi
.SH "SEE ALSO"
\fBgms\fR(1), \fBgms\-keys\-issue\fR(1), \fBgms\-keys\-revoke\fR(1), \fBgms\-run\fR(1)
"#;

fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging")
}

fn man_page() -> Vec<u8> {
    // Its own sections tell what the help tells in short.
    let command = Args::command().after_help(None::<&str>);
    let page = clap_mangen::Man::new(command).section("8").manual("gms");
    let page = page.source(concat!("gms ", env!("CARGO_PKG_VERSION")));
    let mut text = Vec::new();
    page.render_title(&mut text).expect("a title");
    page.render_name_section(&mut text).expect("a name");
    page.render_synopsis_section(&mut text).expect("a synopsis");
    page.render_description_section(&mut text).expect("a description");
    page.render_options_section(&mut text).expect("options");
    text.extend_from_slice(TAIL.as_bytes());
    text
}

/// `GMS_RENEW=1 cargo test -p gms-agent --test packaging` writes them.
#[test]
fn man_page_and_completions_are_current() {
    let mut files = vec![("man/gms-agent.8".to_owned(), man_page())];
    let shells = [
        (Shell::Bash, "gms-agent.bash"),
        (Shell::Zsh, "_gms-agent"),
        (Shell::Fish, "gms-agent.fish"),
    ];
    for (shell, name) in shells {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Args::command(), "gms-agent", &mut script);
        files.push((format!("completions/{name}"), script));
    }
    for (file, text) in files {
        let file = packaging().join(file);
        if std::env::var_os("GMS_RENEW").is_some() {
            std::fs::write(&file, &text).expect("packaging");
        }
        let kept = std::fs::read(&file).unwrap_or_default();
        assert!(kept == text, "{} is not what the options say", file.display());
    }
}

#[test]
fn the_packaged_configuration_is_accepted() {
    // It gets as far as the keys, which are not there.
    let mut command = Command::new(env!("CARGO_BIN_EXE_gms-agent"));
    command.arg("--config").arg(packaging().join("agent.toml"));
    let output = command.args(["--keys", "/no/such/keys"]).output().expect("gms-agent");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && text.contains("/no/such/keys/ca.pem"), "{text}");
}

/// What the unit's comments and settings promise of the agent.
#[test]
fn the_unit_is_true() {
    let unit = packaging().join("systemd/gms-agent.service");
    let unit = std::fs::read_to_string(unit).expect("the unit");
    let config =
        std::fs::read_to_string(packaging().join("agent.toml")).expect("the configuration");
    let number = |text: &str, key: &str| -> u64 {
        let line = text.lines().find_map(|line| line.strip_prefix(key)).expect(key);
        line.trim().trim_end_matches('s').parse().expect("a number")
    };
    // The service manager waits longer than the agent drains.
    assert!(number(&unit, "TimeoutStopSec=") > number(&config, "drain = "));
    assert!(unit.contains("Documentation=man:gms-agent(8)") && unit.contains("ExecReload="));
    // What is looked at before is what is started.
    let options = |key: &str| words_of(&unit, key).split_off(1);
    assert_eq!(options("ExecStartPre"), [&options("ExecStart")[..], &["--check".into()]].concat());
}

fn unit() -> PathBuf {
    packaging().join("systemd/gms-agent.service")
}

/// The words behind `KEY=` in the unit.
fn words_of(unit: &str, key: &str) -> Vec<String> {
    let value = unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    value.expect(key).split_whitespace().map(String::from).collect()
}

/// The packages install `packaging/agent.toml` as the configuration that the unit names, and the man page tells of both paths.
#[test]
fn the_unit_starts_the_agent_as_its_options_allow() {
    let unit = std::fs::read_to_string(unit()).expect("the unit");
    let start = words_of(&unit, "ExecStart");
    assert_eq!(start[0], format!("/usr/bin/{}", Args::command().get_name()));
    Args::try_parse_from(&start).expect("options that gms-agent has");
    let page = String::from_utf8(man_page()).expect("UTF-8");
    let files: Vec<&str> =
        start[1..].iter().map(String::as_str).filter(|w| w.starts_with('/')).collect();
    assert_eq!(files, ["/etc/gms/keys", "/etc/gms/agent.toml"]);
    assert!(files.iter().all(|file| page.contains(&format!("\n{file}\n"))), "{files:?}");
    assert!(packaging().join("agent.toml").is_file());
    // It drains on this signal, and reads its keys on that.
    assert_eq!(words_of(&unit, "KillSignal"), ["SIGTERM"]);
    assert_eq!(words_of(&unit, "ExecReload")[1..], ["-HUP", "$MAINPID"]);
}

/// Says of unknown settings, values and sections that they are ignored, and ends well.
#[test]
fn systemd_understands_all_of_the_unit() {
    let dir = std::env::temp_dir().join(format!("gms-unit-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a directory");
    let copy = dir.join("gms-agent.service");
    // The program as it was built: that it can be executed is looked at too.
    let unit = std::fs::read_to_string(unit()).expect("the unit");
    let built = unit.replace("/usr/bin/gms-agent", env!("CARGO_BIN_EXE_gms-agent"));
    assert_ne!(built, unit);
    std::fs::write(&copy, built).expect("a copy");
    // What the man pages are is not installed here.
    let found = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&copy).output();
    let _ = std::fs::remove_dir_all(&dir);
    let Ok(found) = found else {
        return eprintln!("SKIPPED: systemd-analyze is not installed");
    };
    let said = String::from_utf8_lossy(&found.stderr);
    let of_ours: Vec<&str> = said.lines().filter(|line| line.contains("gms-agent")).collect();
    assert!(found.status.success() && of_ours.is_empty(), "{said}");
}

/// How much an agent that was taken over could do: the score of systemd's own review, from 0 (nothing) to 10.
#[test]
fn the_sandbox_of_the_unit_is_tight() {
    const SCORE_MAX: &str = "--threshold=20"; // tenths
    let args = ["security", "--offline=true", "--no-pager", SCORE_MAX];
    let found = Command::new("systemd-analyze").args(args).arg(unit()).output();
    let Ok(found) = found else {
        return eprintln!("SKIPPED: systemd-analyze is not installed");
    };
    let said = String::from_utf8_lossy(&found.stdout);
    assert!(found.status.success(), "{said}{}", String::from_utf8_lossy(&found.stderr));
}
