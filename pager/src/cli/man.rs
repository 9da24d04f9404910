//! The man pages: what clap knows of the options, and what only prose can say.

use clap::CommandFactory;

use super::Cli;

/// Paragraphs of a section: what stands out at the left, if anything, and the text.
type Entries = &'static [(&'static str, &'static str)];

/// Sections of a page that clap does not write, in order.
struct Prose {
    page: &'static str,
    sections: &'static [(&'static str, Entries)],
}

const PRIVILEGES: Entries = &[
    (
        "",
        "gms needs CAP_SYS_PTRACE, in the first user namespace: to be told of forks by userfaultfd(2), and to stop a program's \
         thread for a moment. What is missing is found before the command starts: gms exits with status 125 and says what to \
         do (see gms-doctor(1)); with --best-effort it runs the command unpaged. Whoever has the capability can read the memory \
         of other users' programs.",
    ),
    ("As root", "Nothing else is needed."),
    (
        "As a user, for one command",
        "setpriv --reuid=USER --regid=GROUP --init-groups --inh-caps=+sys_ptrace --ambient-caps=+sys_ptrace gms run -- COMMAND \
         (as root); or capsh --keep=1 --user=USER --inh=cap_sys_ptrace --addamb=cap_sys_ptrace -- -c 'gms run -- COMMAND'. \
         The command has the capability too.",
    ),
    (
        "As a user, for good",
        "setcap cap_sys_ptrace=ep /usr/bin/gms gives it to gms alone. The command must then be able to have a userfaultfd made: \
         let the users open /dev/userfaultfd (chgrp GROUP /dev/userfaultfd; chmod 660 /dev/userfaultfd, by a udev rule to \
         stay), or set sysctl vm.unprivileged_userfaultfd=1. Let only that group execute such a gms: it pages, and so sends to \
         an agent of the user's choice, also programs that gain rights (sudo).",
    ),
    (
        "In a systemd unit",
        "User=USER and AmbientCapabilities=CAP_SYS_PTRACE in [Service]; CapabilityBoundingSet=, if it is set, must contain it. \
         PrivateUsers=, SystemCallFilter= and what implies a seccomp filter (LockPersonality=, RestrictNamespaces=, \
         MemoryDenyWriteExecute= and others) must be off; NoNewPrivileges= may be on.",
    ),
    (
        "In a container",
        "docker run --cap-add SYS_PTRACE --security-opt seccomp=unconfined, and gms as root in it; Kubernetes: \
         securityContext: {capabilities: {add: [SYS_PTRACE]}, seccompProfile: {type: Unconfined}}. Rootless containers \
         cannot page, as their capabilities are those of another user namespace.",
    ),
];

const CONFIGURATION: (&str, &str) = (
    "the file of --config",
    "TOML. Keys are the long options without the dashes: local, page-size, fault-threads, agent (a string or a list), keys, seal, export, \
     when-full, redundancy, disk, disk-size, stats, trace, best-effort, no-takeover, quiet, verbose. A size is a string or a number of bytes. Relative paths start at the file's directory.",
);
const SOCKET: (&str, &str) = (
    "$XDG_RUNTIME_DIR/gms/PID.sock, /run/gms/PID.sock (root), /tmp/gms-UID/PID.sock",
    "Control socket of the pager with this process id, in the first of these directories that works; gms-status(1), gms-top(1) \
     and gms-detach(1) look for it.",
);
const KEYS: (&str, &str) = (
    "ca.pem, client.pem, client-key.pem in the directory of --keys",
    "The cluster's authority, and this machine's certificate and private key (see gms-keys(1)).",
);
const MEMORY: (&str, &str) = (
    "/proc/meminfo and the memory cgroup of gms",
    "The memory of which shares (40%) and defaults are: a cgroup's limit where it is less than the machine's memory.",
);
const PAGING_FILES: Entries = &[CONFIGURATION, KEYS, SOCKET, MEMORY];
const PAGING_ENVIRONMENT: Entries = &[
    ("GMS_CONFIG", "Configuration file, unless --config names one."),
    (
        "GMS_KEYS",
        "Directory of the keys, unless --keys names one. It wins over the configuration file.",
    ),
    ("XDG_RUNTIME_DIR", "Where the control socket goes."),
];
const COLOURS: (&str, &str) =
    ("NO_COLOR, TERM", "Without colours if NO_COLOR is set and not empty, or TERM is dumb.");

const PROSE: &[Prose] = &[
    Prose {
        page: "gms",
        sections: &[
            ("FILES", &[CONFIGURATION, KEYS, SOCKET]),
            ("ENVIRONMENT", &[("GMS_CONFIG, GMS_KEYS", "See gms-run(1)."), COLOURS]),
            (
                "EXAMPLES",
                &[
                    (
                        "gms run --local 4G -- redis-server",
                        "Keeps 4 GiB of redis resident; the rest goes to gms's own agent.",
                    ),
                    (
                        "gms doctor --agent node1:7400 --keys keys",
                        "Tells what this machine lacks, and whether that agent answers.",
                    ),
                    (
                        "source <(gms completion bash)",
                        "Completion in bash; gms completion fish | source; zsh as bash.",
                    ),
                ],
            ),
        ],
    },
    Prose {
        page: "gms-run",
        sections: &[
            ("PRIVILEGES", PRIVILEGES),
            ("FILES", PAGING_FILES),
            ("ENVIRONMENT", PAGING_ENVIRONMENT),
            (
                "EXAMPLES",
                &[
                    (
                        "gms run --local 4G --agent node1:7400 --agent node2:7400 --keys keys -- redis-server",
                        "Pages redis to two agents.",
                    ),
                    (
                        "gms run --local 40% --stats stats.json -- python3 job.py",
                        "Keeps 40 % of the machine's memory (or of the container's) resident, and writes figures at the end.",
                    ),
                    (
                        "gms run --best-effort --config /etc/gms/gms.toml -- make -j8",
                        "Runs make also where gms may not page.",
                    ),
                ],
            ),
        ],
    },
    Prose {
        page: "gms-attach",
        sections: &[
            ("PRIVILEGES", &[("", "As of gms-run(1).")]),
            ("FILES", PAGING_FILES),
            ("ENVIRONMENT", PAGING_ENVIRONMENT),
            (
                "EXAMPLES",
                &[(
                    "gms attach $(pidof -s postgres) --local 2G --agent node1:7400 --keys keys",
                    "Pages a program that runs already, until Ctrl-C or gms detach.",
                )],
            ),
        ],
    },
    Prose {
        page: "gms-detach",
        sections: &[
            ("FILES", &[SOCKET]),
            ("EXAMPLES", &[("gms detach 4711", "Brings all pages of process 4711 home.")]),
        ],
    },
    Prose {
        page: "gms-status",
        sections: &[
            ("FILES", &[SOCKET]),
            (
                "EXAMPLES",
                &[(
                    "gms status --json | jq '.[].resident_bytes'",
                    "How much is resident, workload by workload.",
                )],
            ),
        ],
    },
    Prose {
        page: "gms-top",
        sections: &[
            (
                "KEYS",
                &[
                    (
                        "up, down, Page Up, Page Down, Home, End (k, j, g, G)",
                        "Move to another workload.",
                    ),
                    (
                        "p, r, m, f, l, s, c",
                        "Sort by process id, resident, remote, faults a second, p99 latency, state, command; again: the other way round.",
                    ),
                    ("q, Ctrl-C", "Quit."),
                ],
            ),
            ("FILES", &[SOCKET]),
            (
                "ENVIRONMENT",
                &[
                    ("TERM", "dumb cannot show it: use gms-status(1)."),
                    ("NO_COLOR", "If set and not empty: no colours."),
                ],
            ),
        ],
    },
    Prose {
        page: "gms-doctor",
        sections: &[
            ("FILES", &[KEYS, MEMORY]),
            ("ENVIRONMENT", &[("GMS_KEYS", "Directory of the keys, unless --keys names one.")]),
            (
                "EXAMPLES",
                &[(
                    "gms doctor --json | jq '.[] | select(.verdict != \"OK\")'",
                    "Only what is not well.",
                )],
            ),
        ],
    },
    Prose {
        page: "gms-members",
        sections: &[
            ("FILES", &[KEYS]),
            ("ENVIRONMENT", &[("GMS_KEYS", "Directory of the keys, unless --keys names one.")]),
            (
                "EXAMPLES",
                &[(
                    "gms members --agent node1:7400 --keys keys --json | jq 'map(.free_bytes) | add'",
                    "How much memory is free in the cluster.",
                )],
            ),
        ],
    },
    Prose {
        page: "gms-keys",
        sections: &[(
            "FILES",
            &[
                ("ca.pem, ca-key.pem", "The authority. Its private key stays where it was made."),
                ("node.pem, node-key.pem", "Of an agent."),
                ("client.pem, client-key.pem", "Of a pager."),
                (
                    "revoked.txt",
                    "Who is refused by who has this list: a line for each, with an id (32 hexadecimal digits, as gms-keys-list(1) shows) or \
                     the fingerprint of one certificate (64), and comments after #. A line that is something else is an error. An \
                     agent reads it at the start and on SIGHUP, a pager at the start.",
                ),
            ],
        )],
    },
];

/// The man pages: file name and text of each.
pub fn man_pages() -> std::io::Result<Vec<(String, Vec<u8>)>> {
    let mut root = Cli::command().disable_help_subcommand(true);
    root.build();
    let mut pages = Vec::new();
    render("gms", &root, &mut pages)?;
    Ok(pages)
}

fn render(
    name: &str,
    command: &clap::Command,
    pages: &mut Vec<(String, Vec<u8>)>,
) -> std::io::Result<()> {
    let mut text = Vec::new();
    let page = clap_mangen::Man::new(command.clone().display_name(name)).manual("gms");
    page.source(concat!("gms ", env!("CARGO_PKG_VERSION"))).render(&mut text)?;
    let mut text =
        String::from_utf8_lossy(&text).replace(".SH EXTRA\nExit status: ", ".SH \"EXIT STATUS\"\n");
    for prose in PROSE.iter().filter(|prose| prose.page == name) {
        prose.sections.iter().for_each(|(heading, entries)| section(heading, entries, &mut text));
    }
    pages.push((format!("{name}.1"), text.into_bytes()));
    for child in command.get_subcommands().filter(|child| !child.is_hide_set()) {
        render(&format!("{name}-{}", child.get_name()), child, pages)?;
    }
    Ok(())
}

fn section(heading: &str, entries: Entries, page: &mut String) {
    if !page.ends_with('\n') {
        page.push('\n');
    }
    page.push_str(&format!(".SH {heading}\n"));
    for (left, text) in entries {
        match left.is_empty() {
            true => page.push_str(".PP\n"),
            false => page.push_str(&format!(".TP\n\\fB{}\\fR\n", escape(left))),
        }
        page.push_str(&format!("{}\n", escape(text)));
    }
}

/// Text as roff: nothing in it is a request or a typographic sign.
fn escape(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq");
    if text.starts_with('.') { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(name: &str) -> String {
        let pages = man_pages().unwrap();
        let (_, text) = pages.into_iter().find(|(file, _)| file == name).unwrap();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn the_synopsis_of_run_has_its_dashes() {
        let run = page("gms-run.1");
        let synopsis = run.split(".SH ").find(|part| part.starts_with("SYNOPSIS")).unwrap();
        let plain = synopsis.replace("\\-", "-").replace("\\fB", "").replace("\\fR", "");
        assert!(plain.contains("gms run [OPTIONS] -- COMMAND [ARG]..."), "{plain}");
    }

    #[test]
    fn pages_tell_of_files_environment_and_examples() {
        for name in ["gms.1", "gms-run.1", "gms-attach.1"] {
            let page = page(name);
            for heading in ["FILES", "ENVIRONMENT", "EXAMPLES"] {
                assert_eq!(
                    page.matches(&format!(".SH {heading}\n")).count(),
                    1,
                    "{name}: {heading}"
                );
            }
        }
        assert!(page("gms-run.1").contains("GMS_KEYS"));
        let names: Vec<String> = man_pages().unwrap().into_iter().map(|(file, _)| file).collect();
        for Prose { page, .. } in PROSE {
            assert!(names.contains(&format!("{page}.1")), "{page} is no page");
        }
    }

    #[test]
    fn every_option_that_a_file_may_have_is_told() {
        let keys = CONFIGURATION.1.split_once(": ").unwrap().1.split_once('.').unwrap().0;
        let mut told: Vec<&str> =
            keys.split(", ").filter_map(|key| key.split(' ').next()).collect();
        let command = Cli::command();
        let run = command.find_subcommand("run").unwrap();
        let options = run.get_arguments().filter_map(|option| option.get_long());
        let mut options: Vec<&str> = options
            .filter(|option| !["config", "die-at", "torture", "help"].contains(option))
            .collect();
        options.sort_unstable();
        told.sort_unstable();
        assert_eq!(told, options);
    }

    #[test]
    fn text_is_no_request() {
        assert_eq!(escape(".x 'a' b-c\\"), "\\&.x \\(aqa\\(aq b\\-c\\e");
    }
}
