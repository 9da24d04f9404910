//! The command line of `gms`: its grammar, and the man pages and completions made from it.

mod man;
mod pids;
pub mod values;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueHint};
use clap_complete::engine::ArgValueCompleter;
use clap_complete::env::Shells;
use gms_policy::{Redundancy, Size};
use serde::Deserialize;

use self::values::{KeyRole, OnFull, PageSize, Sealing, parse_agent};
use crate::torture::Death;

pub use man::man_pages;

/// Completion scripts call gms with this variable in its environment.
pub const COMPLETE_VARIABLE: &str = "_GMS_COMPLETE";

const EXIT_STATUS: &str = "Exit status: the command's own (128+N when signal N ended it); 125 when gms itself fails, \
126 when the command cannot be executed, 127 when it is not found, 2 for a wrong command line.";

/// Of commands that ask something.
const EXIT_STATUS_OF_QUESTIONS: &str = "Exit status: 0; 1 when there is no such workload, or something needed is missing; \
125 when gms itself fails, 2 for a wrong command line.";

/// Run programs bigger than your machine's memory.
#[derive(Debug, Parser)]
#[command(name = "gms", version, about, long_about = None, after_help = EXIT_STATUS)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub action: Action,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Action {
    /// Run a command with a limit on its resident memory; the rest of its memory lives on agents
    #[command(after_help = EXIT_STATUS, override_usage = "gms run [OPTIONS] -- COMMAND [ARG]...")]
    Run(RunArgs),
    /// Page a process which runs already, and the processes below it, until it ends
    ///
    /// Ctrl-C, the end of its terminal (but under nohup) or `gms detach PID` brings all pages home and leaves it running.
    Attach(AttachArgs),
    /// Bring all pages of a workload home and leave it running
    #[command(after_help = EXIT_STATUS_OF_QUESTIONS)]
    Detach {
        /// Root process of the workload, or the gms which pages it
        #[arg(value_name = "PID", value_parser = clap::value_parser!(i32).range(1..),
              add = ArgValueCompleter::new(pids::of_workloads))]
        pid: i32,
    },
    /// Have another binary of gms go on with a workload: the pager executes it, the programs run on
    ///
    /// Faults wait for some milliseconds. What goes wrong before the other binary has begun is told, and the pager goes on as it was; if the other
    /// one crashes or hangs in that moment, the workload is killed.
    #[command(after_help = EXIT_STATUS_OF_QUESTIONS)]
    Upgrade {
        /// Root process of the workload, or the gms which pages it
        #[arg(value_name = "PID", value_parser = clap::value_parser!(i32).range(1..),
              add = ArgValueCompleter::new(pids::of_workloads))]
        pid: i32,
        /// The binary [default: the one that this command is]
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        binary: Option<PathBuf>,
    },
    /// For pagers: go on with what another binary of gms was doing
    #[command(hide = true)]
    Adopt(AdoptArgs),
    /// Show the workloads which gms pages on this machine
    #[command(after_help = EXIT_STATUS_OF_QUESTIONS)]
    Status {
        /// Only this one: its root process, or the gms which pages it
        #[arg(value_name = "PID", value_parser = clap::value_parser!(i32).range(1..),
              add = ArgValueCompleter::new(pids::of_workloads))]
        pid: Option<i32>,
        /// A JSON list with one object for each workload
        #[arg(long)]
        json: bool,
    },
    /// Watch the workloads live: scroll by arrows, sort by letters, quit by q
    Top,
    /// Check whether this machine can run gms; each finding comes with its cure
    #[command(after_help = EXIT_STATUS_OF_QUESTIONS)]
    Doctor(DoctorArgs),
    /// Show the agents of a cluster, as one of them knows them
    Members(MembersArgs),
    /// Make, renew, revoke and show the keys of a cluster
    #[command(subcommand)]
    Keys(KeysAction),
    /// Print the completion script of a shell
    Completion {
        /// The shell
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
    /// Write the man pages of gms into a directory
    Man {
        /// The directory; it must exist
        dir: PathBuf,
    },
}

/// Options which `run`, `attach` and the configuration file share.
#[derive(Args, Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct PagingArgs {
    /// Resident anonymous memory of the whole process tree, on average (512M, 4G, or a share of all memory: 40%)
    ///
    /// While memory is allocated at full speed, up to a tenth or 32 MiB more is resident for a moment. A share is of the machine's whole memory, or of the cgroup's limit if that is less. For `gms run` the default is
    /// 80 % of the memory available now. At least 4 MiB.
    #[arg(long, value_name = "SIZE|N%")]
    #[serde(deserialize_with = "values::size")]
    pub local: Option<Size>,
    /// Memory fetched for one fault [default: 4k]
    #[arg(long, value_name = "SIZE", value_enum)]
    #[serde(deserialize_with = "values::page_size")]
    pub page_size: Option<PageSize>,
    /// Threads that serve page faults, each those of some processes, and of others where too many wait [default: 1]
    ///
    /// At most 16. Each of them has a link to every agent.
    #[arg(long, value_name = "N")]
    pub fault_threads: Option<u32>,
    /// An agent which holds pages; may be given several times. Without any, gms starts one of its own
    ///
    /// One is enough if agents of the cluster know each other (`gms-agent --join`): it tells of the others, and of those that come later.
    ///
    /// One that does not answer at the start is told, and used once it does, as long as another answers.
    #[arg(long = "agent", value_name = "HOST:PORT", value_parser = parse_agent)]
    #[serde(rename = "agent", deserialize_with = "values::agents")]
    pub agents: Vec<String>,
    /// Directory with the keys of the cluster (see `gms keys init`); needed with --agent
    #[arg(long, value_name = "DIR", env = "GMS_KEYS")]
    pub keys: Option<PathBuf>,
    /// Whether agents hold pages sealed: encrypted and authenticated under a key that they never see [default: on]
    ///
    /// `off` is for agents of the release before, which cannot hold sealed pages, or where all of them are trusted: they,
    /// and whoever reads their memory, see what the program has in its own.
    #[arg(long, value_name = "on|off", value_enum, hide_possible_values = true)]
    #[serde(deserialize_with = "values::sealing")]
    pub seal: Option<Sealing>,
    /// Size of gms's own agent, used without --agent [default: half of the memory available]
    ///
    /// A share (40%) is of the same as that of --local.
    #[arg(long, value_name = "SIZE|N%")]
    #[serde(deserialize_with = "values::size")]
    pub export: Option<Size>,
    /// What happens while no agent takes pages that must go (all are full, or away) [default: grow]
    #[arg(long, value_name = "WHAT", value_enum)]
    #[serde(deserialize_with = "values::when_full")]
    pub when_full: Option<OnFull>,
    /// Agents that get each page: auto, none (one), replica:N (N of them, 2 to 4) or parity:K+M [default: auto]
    ///
    /// With auto it is two where two or more agents are known, else one. With two a workload outlives the loss of either agent, and each can be stopped or
    /// upgraded under it: pages of which there are too few copies are copied anew in the background. It takes twice the memory at the agents, and twice
    /// the traffic for what is written to them.
    #[arg(long, value_name = "WHAT")]
    #[serde(deserialize_with = "values::redundancy")]
    pub redundancy: Option<Redundancy>,
    /// Keep one more copy of each page in a file in DIR, on a local disk
    ///
    /// It is read only when no agent can give the page, and written behind. With it a workload outlives the loss of its only agent, or of all of them, and
    /// goes on at the pace of the disk. The file has no name, and is gone with gms.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub disk: Option<PathBuf>,
    /// Length of that file, all of which is taken at the start [default: half of what is free in DIR, at most four times this machine's memory]
    #[arg(long, value_name = "SIZE")]
    #[serde(deserialize_with = "values::size")]
    pub disk_size: Option<Size>,
    /// Write the figures of the session to FILE as JSON when it ends
    #[arg(long, value_name = "FILE")]
    pub stats: Option<PathBuf>,
    /// Write the time stamps of sampled remote faults to FILE as CSV when the session ends
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Read options from FILE (TOML with the names of the long options); the command line wins
    #[arg(long, value_name = "FILE", env = "GMS_CONFIG")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
    /// For `gms run`, which has the option; here for the configuration file.
    #[arg(skip)]
    pub best_effort: bool,
    /// The same.
    #[arg(skip)]
    pub no_takeover: bool,
    /// Print no summary and no notices, only errors
    #[arg(short, long, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Also say which processes are paged
    #[arg(short, long)]
    pub verbose: bool,
}

/// `gms run`.
#[derive(Args, Debug)]
pub struct RunArgs {
    /// The shared options.
    #[command(flatten)]
    pub paging: PagingArgs,
    /// Where gms may not page (rights, kernel, inside another gms), run the command without it, and say so
    #[arg(long)]
    pub best_effort: bool,
    /// Kill the command if the pager is killed, instead of having another pager go on
    #[arg(long)]
    pub no_takeover: bool,
    /// For testers: make races likely, by choices that come from the number SEED (see docs/cli.md, "--torture SEED")
    #[arg(long, value_name = "SEED")]
    pub torture: Option<u64>,
    /// For testers: the pager dies at a point (see docs/cli.md, "--torture SEED")
    #[arg(long, value_name = "POINT:N", hide = true)]
    pub die_at: Option<Death>,
    /// The command and its arguments, after `--`
    #[arg(last = true, required = true, value_name = "COMMAND", value_hint = ValueHint::CommandWithArguments)]
    pub command: Vec<OsString>,
}

/// `gms attach`.
#[derive(Args, Debug)]
pub struct AttachArgs {
    /// The process
    #[arg(value_name = "PID", value_parser = clap::value_parser!(i32).range(1..),
          add = ArgValueCompleter::new(pids::to_attach))]
    pub pid: i32,
    /// The shared options.
    #[command(flatten)]
    pub paging: PagingArgs,
}

/// `gms adopt`.
#[derive(Args, Debug)]
pub struct AdoptArgs {
    /// The descriptor of what is handed over
    #[arg(value_parser = clap::value_parser!(i32).range(0..), required_unless_present = "probe")]
    pub number: Option<i32>,
    /// Say whether this binary could, with these capabilities
    #[arg(long, value_name = "CAPABILITIES")]
    pub probe: Option<u64>,
    /// When the pager died for which this one goes on, in ms
    #[arg(long, value_name = "MS")]
    pub died: Option<u64>,
    /// Why the binary for which this one goes on could not
    #[arg(long, value_name = "REASON")]
    pub instead: Option<String>,
}

/// `gms doctor`.
#[derive(Args, Debug)]
pub struct DoctorArgs {
    /// A JSON list with one object for each check
    #[arg(long)]
    pub json: bool,
    /// Also check that this agent answers
    #[arg(long = "agent", value_name = "HOST:PORT", value_parser = parse_agent)]
    pub agents: Vec<String>,
    /// Also check these keys
    #[arg(long, value_name = "DIR", env = "GMS_KEYS")]
    pub keys: Option<PathBuf>,
}

/// `gms members`.
#[derive(Args, Debug)]
pub struct MembersArgs {
    /// The agent that is asked; any of the cluster
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_agent)]
    pub agent: String,
    /// Directory with the keys of the cluster
    #[arg(long, value_name = "DIR", env = "GMS_KEYS")]
    pub keys: PathBuf,
    /// A JSON list with one object for each member
    #[arg(long)]
    pub json: bool,
}

/// `gms keys`.
#[derive(Debug, Subcommand)]
pub enum KeysAction {
    /// Make a cluster: a certificate authority with a first node key and a first client key
    Init {
        /// Where to put them; made if it does not exist
        dir: PathBuf,
    },
    /// Make one more key of a cluster, for a node or a client that has none yet
    Issue {
        /// Directory which `gms keys init` made
        dir: PathBuf,
        /// Who will hold it
        #[arg(value_enum)]
        role: KeyRole,
        /// Name of the directory of the new key, in DIR
        name: String,
        /// For how many days it is good, 1 to 730 [default: 730]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=730))]
        days: Option<u32>,
    },
    /// Make new keys in the place of those which were issued, for the same nodes and clients
    ///
    /// Whoever has a renewed key is the same node or client as before, to agents and pagers. The certificate before is good
    /// until it expires, so that both can be used for a time.
    Renew {
        /// Directory which `gms keys init` made
        dir: PathBuf,
        /// Name under which they were issued [default: those which `gms keys init` made]
        name: Option<String>,
        /// For how many days they are good, 1 to 730 [default: 730]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=730))]
        days: Option<u32>,
    },
    /// Have a node or a client refused, by an entry in the list DIR/revoked.txt
    ///
    /// Copy the list into the key directory of every agent, and send the agents SIGHUP: they close the links of who is on
    /// it, and make no new ones. Pagers read theirs when they start.
    Revoke {
        /// A key directory
        dir: PathBuf,
        /// Name under which it was issued, its id, or the fingerprint of one certificate
        who: String,
    },
    /// Show the keys in DIR and its directories: name, role, expiry, whether they are good, id
    List {
        /// Directory which `gms keys init` made
        dir: PathBuf,
    },
}

/// clap's report of a wrong command line in one line.
pub fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let usage = text.split_once("Usage:").map_or("", |(_, usage)| usage);
    let unknown = error.kind() == clap::error::ErrorKind::UnknownArgument;
    let hint = match unknown && usage.trim_start().starts_with("gms run") {
        true => "the command goes after '--': gms run [OPTIONS] -- COMMAND",
        false => "see 'gms --help'",
    };
    gms_agent::cli::one_line(error, hint)
}

/// The completion script of a shell. It asks gms itself for what fits, so that process ids can be completed too.
pub fn completion(shell: clap_complete::Shell) -> Vec<u8> {
    let mut text = Vec::new();
    if let Some(shell) = Shells::builtins().completer(&shell.to_string()) {
        // Writing to memory does not fail.
        let _ = shell.write_registration(COMPLETE_VARIABLE, "gms", "gms", "gms", &mut text);
    }
    text
}

/// Answers a completion script, if it is one that calls: then this process has nothing else to do.
pub fn complete() -> bool {
    let answers = clap_complete::CompleteEnv::with_factory(Cli::command).var(COMPLETE_VARIABLE);
    // A script of another version may ask what is not understood: then nothing fits.
    answers.try_complete(std::env::args_os(), None).unwrap_or(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// Set to write what is packaged instead of comparing it.
    const RENEW: &str = "GMS_RENEW";

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split_whitespace())
    }

    #[test]
    fn the_grammar_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_command_keeps_its_own_options() {
        let cli =
            parse("gms run --local 64M --agent a:1 --agent b:2 -- redis --local 3 -- x").unwrap();
        let Action::Run(run) = cli.action else { panic!("not run") };
        assert_eq!(run.command, ["redis", "--local", "3", "--", "x"]);
        assert_eq!(run.paging.local, Some(Size::Bytes(gms_policy::Bytes(64 << 20))));
        assert_eq!(run.paging.agents, ["a:1", "b:2"]);
    }

    #[test]
    fn a_wrong_line_is_told_in_one() {
        let cases = [
            ("gms run --bogus -- true", "--bogus"),
            ("gms run --local 12Q -- true", "'12Q' for '--local <SIZE|N%>': not a size"),
            ("gms run --local 64M", "<COMMAND>"),
            ("gms run true", "goes after '--'"),
            ("gms run -q -v -- true", "cannot be used with"),
            ("gms run --page-size 16k -- true", "16k"),
            ("gms run --seal maybe -- true", "possible values: on, off"),
            ("gms run --when-full stop -- true", "possible values: wait, grow, kill"),
            ("gms run --agent host -- true", "is not HOST:PORT"),
            ("gms attach 12x --local 1G", "12x"),
            ("gms attach 0 --local 1G", "0"),
            ("gms frobnicate", "frobnicate"),
        ];
        for (line, part) in cases {
            let text = one_line(&parse(line).expect_err(line));
            assert!(text.contains(part) && !text.contains('\n'), "{line}: {text}");
            assert!(!text.starts_with("error"), "{text}");
        }
    }

    /// `GMS_RENEW=1 cargo test -p gms-pager packaged` writes them.
    #[test]
    fn packaged_pages_and_completions_are_current() {
        let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging");
        let mut files = Vec::new();
        for (name, text) in man_pages().unwrap() {
            files.push((packaging.join("man").join(name), text));
        }
        for (shell, name) in [
            (clap_complete::Shell::Bash, "gms.bash"),
            (clap_complete::Shell::Zsh, "_gms"),
            (clap_complete::Shell::Fish, "gms.fish"),
        ] {
            files.push((packaging.join("completions").join(name), completion(shell)));
        }
        for (path, text) in files {
            if std::env::var_os(RENEW).is_some() {
                std::fs::write(&path, &text).unwrap();
            }
            let packaged = std::fs::read(&path).unwrap_or_default();
            assert!(packaged == text, "{} is not what this gms prints: renew it", path.display());
        }
    }
}
