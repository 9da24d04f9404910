//! The command line of `gms-agent` and its configuration file.

use crate::agent::Config;
use crate::limits::{DRAIN_MAX, SPIN_MAX};
use clap::{ArgAction, Parser};
use gms_policy::{Bytes, Size};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use std::fmt::Display;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// Grace of a drain unless `--drain` says otherwise.
const DRAIN_DEFAULT: Duration = Duration::from_secs(2);
/// Longest spin that may be configured.
const SPIN_LIMIT: Duration = Duration::from_millis(10);
/// Longest configuration file, in bytes.
const CONFIG_LEN_MAX: u64 = 1 << 20;

/// Exports idle memory of this machine to programs run by `gms` on other machines.
///
/// Pages are kept in memory only, apart for each workload, and freed when it ends. Clients are accepted if their
/// certificate is of the same authority as the one in the key directory (see `gms keys init`).
#[derive(Debug, Default, Parser, Deserialize)]
#[command(name = "gms-agent", version, max_term_width = 100, after_help = EXAMPLES)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Args {
    /// Address and UDP port to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<SocketAddr>,
    /// Memory to export: 512M, 4G, or a share of the memory available at the start, as 80%
    #[arg(long, value_name = "SIZE")]
    #[serde(deserialize_with = "from_text")]
    export: Option<Size>,
    /// Directory with ca.pem, node.pem and node-key.pem
    #[arg(long, value_name = "DIR")]
    keys: Option<PathBuf>,
    /// Address and TCP port to serve metrics on, at /metrics, for Prometheus [default: none]
    #[arg(long, value_name = "ADDR:PORT")]
    metrics: Option<SocketAddr>,
    /// Export huge pages of 2 MiB; as many must be free (vm.nr_hugepages)
    #[arg(long)]
    huge: bool,
    /// Longest spin before blocking, in microseconds; 0 never spins [default: 50]
    #[arg(long, value_name = "MICROSECONDS")]
    spin: Option<u32>,
    /// On SIGTERM or SIGINT wait so long for workloads to take their pages away [default: 2]
    #[arg(long, value_name = "SECONDS")]
    drain: Option<u32>,
    /// TOML file with these options as keys, e.g. `export = "4G"`; the command line wins
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    config: Option<PathBuf>,
    /// Log errors only
    #[arg(short, long, conflicts_with = "verbose")]
    quiet: bool,
    /// Log more; twice for everything
    #[arg(short, long, action = ArgAction::Count)]
    verbose: u8,
}

const EXAMPLES: &str = "\
Examples:
  gms keys init keys
  gms-agent --listen 0.0.0.0:7400 --export 8G --keys keys
  gms-agent --config /etc/gms/agent.toml --metrics 127.0.0.1:9400

Exit status: 0 after SIGTERM or SIGINT, 1 when the agent cannot be started or fails, 2 for wrong options.";

/// Wrong options; the message says which.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    /// An option without which there is no agent.
    #[error(
        "--{option} is missing, on the command line and in the configuration file (see --help)"
    )]
    Missing {
        /// Its long name.
        option: &'static str,
    },
    /// Beyond its limit.
    #[error("--{option} must be at most {most}")]
    TooLarge {
        /// Its long name.
        option: &'static str,
        /// The limit, in its unit.
        most: u128,
    },
    /// The file cannot be read.
    #[error("{}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// The file is wrong.
    #[error("{}:{line}: {message}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Its line, from 1.
        line: usize,
        /// What is wrong there.
        message: String,
    },
}

/// What command line and file say together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Where to listen.
    pub listen: SocketAddr,
    /// What to export.
    pub export: Size,
    /// The key directory.
    pub keys: PathBuf,
    /// Where to serve metrics.
    pub metrics: Option<SocketAddr>,
    /// Whether to export huge pages.
    pub huge: bool,
    /// Longest spin.
    pub spin: Duration,
    /// Grace of a drain.
    pub drain: Duration,
    /// Log level.
    pub level: tracing::Level,
}

impl Args {
    /// Reads the configuration file, if one is named, and fills in what the command line leaves open.
    pub fn resolve(self) -> Result<Options, UsageError> {
        let file = match &self.config {
            Some(path) => read(path)?,
            None => Args::default(),
        };
        let (quiet, verbose) = match (self.quiet, self.verbose) {
            (false, 0) => (file.quiet, file.verbose),
            given => given,
        };
        let duration = |option, value: Option<u32>, unit: Duration, usual, most: Duration| {
            let duration = value.map_or(usual, |value| unit * value);
            let too_large =
                UsageError::TooLarge { option, most: most.as_nanos() / unit.as_nanos() };
            if duration > most { Err(too_large) } else { Ok(duration) }
        };
        let (micro, second) = (Duration::from_micros(1), Duration::from_secs(1));
        Ok(Options {
            listen: need("listen", self.listen.or(file.listen))?,
            export: need("export", self.export.or(file.export))?,
            keys: need("keys", self.keys.or(file.keys))?,
            metrics: self.metrics.or(file.metrics),
            huge: self.huge || file.huge,
            spin: duration("spin", self.spin.or(file.spin), micro, SPIN_MAX, SPIN_LIMIT)?,
            drain: duration("drain", self.drain.or(file.drain), second, DRAIN_DEFAULT, DRAIN_MAX)?,
            level: match (quiet, verbose) {
                (true, _) => tracing::Level::ERROR,
                (false, 0) => tracing::Level::INFO,
                (false, 1) => tracing::Level::DEBUG,
                (false, _) => tracing::Level::TRACE,
            },
        })
    }
}

impl Options {
    /// The agent's configuration, percentages being of `available`.
    pub fn agent(&self, available: Bytes) -> Config {
        Config {
            listen: self.listen,
            export: self.export.of(available),
            huge: self.huge,
            spin: self.spin,
            metrics: self.metrics,
        }
    }
}

fn need<T>(option: &'static str, value: Option<T>) -> Result<T, UsageError> {
    value.ok_or(UsageError::Missing { option })
}

fn read(path: &Path) -> Result<Args, UsageError> {
    let fail = |error| UsageError::File { path: path.into(), error };
    if std::fs::metadata(path).map_err(fail)?.len() > CONFIG_LEN_MAX {
        return Err(fail(std::io::Error::other(
            "larger than 1 MiB, so it is no configuration file",
        )));
    }
    let text = std::fs::read_to_string(path).map_err(fail)?;
    toml::from_str(&text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        let message = error.message().lines().collect::<Vec<_>>().join("; ");
        UsageError::Config { path: path.into(), line, message }
    })
}

fn from_text<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: Display>,
{
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(|error| D::Error::custom(format!("`{text}` is {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn resolve(args: &[&str], file: &str) -> Result<Options, UsageError> {
        let name =
            format!("gms-agent-cli-{}-{:?}.toml", std::process::id(), std::thread::current().id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, file).expect("a temporary file");
        let path_text = path.to_str().expect("UTF-8").to_owned();
        let args =
            ["gms-agent", "--config", &path_text].iter().chain(args).copied().collect::<Vec<_>>();
        let result = Args::try_parse_from(args).expect("valid options").resolve();
        std::fs::remove_file(&path).expect("remove");
        result
    }

    /// `GMS_RENEW=1 cargo test -p gms-agent packaged` writes them.
    #[test]
    fn packaged_man_page_and_completions_are_current() {
        use clap::CommandFactory;
        use clap_complete::Shell;
        let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging");
        let mut page = Vec::new();
        clap_mangen::Man::new(Args::command()).render(&mut page).expect("a man page");
        let mut files = vec![(packaging.join("man/gms-agent.1"), page)];
        let shells = [
            (Shell::Bash, "gms-agent.bash"),
            (Shell::Zsh, "_gms-agent"),
            (Shell::Fish, "gms-agent.fish"),
        ];
        for (shell, name) in shells {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "gms-agent", &mut script);
            files.push((packaging.join("completions").join(name), script));
        }
        for (file, text) in files {
            if std::env::var_os("GMS_RENEW").is_some() {
                std::fs::write(&file, &text).expect("packaging");
            }
            let kept = std::fs::read(&file).unwrap_or_default();
            assert!(kept == text, "{} is not what the options say", file.display());
        }
    }

    #[test]
    fn the_command_line_wins_over_the_file() {
        let file =
            "listen = \"127.0.0.1:7000\"\nexport = \"4G\"\nkeys = \"k\"\nspin = 0\nverbose = 1\n";
        let options = resolve(&["--export", "80%", "-q"], file).expect("complete");
        assert_eq!(options.export, Size::Percent(80));
        assert_eq!(options.agent(Bytes(1000)).export, Bytes(800));
        assert_eq!((options.spin, options.drain), (Duration::ZERO, DRAIN_DEFAULT));
        assert_eq!(options.level, tracing::Level::ERROR);
        assert_eq!(resolve(&[], file).expect("complete").level, tracing::Level::DEBUG);
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        let message = |file| resolve(&[], file).expect_err("wrong").to_string();
        let typo = message("export = \"4G\"\n\nexprot = \"4G\"\n");
        assert!(typo.contains(".toml:3: ") && typo.contains("`exprot`"), "{typo}");
        let size = message("export = \"4Q\"\n");
        assert!(size.contains(".toml:1: ") && size.contains("`4Q` is not a size"), "{size}");
        let syntax = message("huge = true\nexport 4G\n");
        assert!(syntax.contains(".toml:2: ") && !syntax.contains('\n'), "{syntax}");
        assert!(message("config = \"x\"").contains("`config`"));
        assert!(message("export = \"4G\"").starts_with("--listen is missing"));
        let slow = "listen = \"[::1]:1\"\nexport = \"4G\"\nkeys = \"k\"\nspin = 10001\n";
        assert_eq!(message(slow), "--spin must be at most 10000");
    }

    #[test]
    fn the_command_is_well_formed() {
        Args::command().debug_assert();
    }
}
