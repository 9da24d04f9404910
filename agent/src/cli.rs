//! The command line of `gms-agent` and its configuration file.

use crate::agent::Config;
use crate::limits::{DRAIN_MAX, SPIN_MAX, THREADS_MAX, THREADS_USUAL};
use crate::members::Joining;
use clap::{ArgAction, Parser};
use gms_policy::{Bytes, Export, Size};
use gms_transport::message::{Version, Zone};
use serde::Deserialize;
use serde::de::{self, Deserializer, Error as _, Visitor};
use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// Grace of a drain unless `--drain` says otherwise.
const DRAIN_DEFAULT: Duration = Duration::from_secs(60);
/// For testers: if it is set, the version before this one's is spoken, as an older agent does.
const OLD: &str = "GMS_AGENT_OLD_PROTOCOL";
/// Longest spin that may be configured.
const SPIN_LIMIT: Duration = Duration::from_millis(10);
/// Longest configuration file, in bytes.
const CONFIG_LEN_MAX: u64 = 1 << 20;

/// Exports idle memory of this machine to programs run by `gms` on other machines
///
/// Pages are kept in memory only, apart for each workload, and freed when it ends. Clients are accepted if their
/// certificate is of the same authority as the one in the key directory (see `gms keys init`), and was not revoked.
#[derive(Debug, Default, Parser, Deserialize)]
#[command(name = "gms-agent", version, max_term_width = 100, after_help = EXAMPLES)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Args {
    /// Address or host name, and UDP port, to listen on; port 0 takes a free one
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<HostPort>,
    /// Memory to export: 512M, 4G, or a share of all memory (of the machine, or what its cgroup allows), as 40%; or auto,
    /// what the host can spare from moment to moment, as auto:1G..16G at least and at most so much
    #[arg(long, value_name = "SIZE|N%|auto[:MIN..MAX]")]
    #[serde(deserialize_with = "export")]
    export: Option<Export>,
    /// Directory with ca.pem, node.pem, node-key.pem; revoked.txt if somebody was revoked, allowed.txt if not everybody may use it
    #[arg(long, value_name = "DIR", env = "GMS_KEYS")]
    keys: Option<PathBuf>,
    /// Address or host name, and TCP port, to serve metrics on, at /metrics, for Prometheus [default: none]
    #[arg(long, value_name = "HOST:PORT")]
    metrics: Option<HostPort>,
    /// Agents of the cluster to become a member with; may be given several times, and each may be a name with many addresses.
    /// Without it the agent is a member that others join
    #[arg(long, value_name = "HOST:PORT")]
    join: Vec<HostPort>,
    /// Where this machine stands, as rack-7: members are told [default: none]
    #[arg(long, value_name = "LABEL")]
    #[serde(deserialize_with = "zone")]
    zone: Option<Zone>,
    /// Export huge pages of 2 MiB; as many must be free (vm.nr_hugepages)
    #[arg(long)]
    huge: bool,
    /// Threads that serve, 1 to 16, each kept to one NUMA node if there are several; links are divided among them [default:
    /// half of the CPUs that the agent may use, at least 1 and at most 8]
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
    /// Longest spin before blocking, in microseconds; 0 never spins [default: 50]
    #[arg(long, value_name = "MICROSECONDS")]
    spin: Option<u32>,
    /// On SIGTERM or SIGINT wait so long for workloads to end or to take their pages away [default: 60]
    #[arg(long, value_name = "SECONDS")]
    drain: Option<u32>,
    /// Say what the agent would lack with these options, and what to do, instead of serving
    #[arg(long)]
    #[serde(skip)]
    check: bool,
    /// TOML file with these options as keys, e.g. `export = "4G"`; the command line wins
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    config: Option<PathBuf>,
    /// Log errors only
    #[arg(short, long, conflicts_with = "verbose")]
    quiet: bool,
    /// Log more; twice for everything
    #[arg(short, long, action = ArgAction::Count)]
    #[serde(deserialize_with = "level")]
    verbose: u8,
}

const HINT: &str = "see gms-agent --help";

const EXAMPLES: &str = "\
Examples:
  gms keys init keys && gms keys issue keys node node1
  gms-agent --listen 0.0.0.0:7400 --export 8G --keys keys/node1
  gms-agent --listen 0.0.0.0:7400 --export auto:2G..24G --keys keys/node1
  gms-agent --config /etc/gms/agent.toml --keys /etc/gms/keys --metrics 127.0.0.1:9400
  gms-agent --config /etc/gms/agent.toml --keys /etc/gms/keys --check

Signals: SIGTERM and SIGINT drain and end it, a second one ends it at once; SIGHUP reads the keys and the export again.
Exit status: 0 after SIGTERM or SIGINT, 1 when the agent cannot be started (also with --check) or fails, 2 for wrong options.";

/// A host, by name or address, and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPort(String);

impl FromStr for HostPort {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = "not HOST:PORT, as in 0.0.0.0:7400, [::]:7400 or node1:7400";
        let (host, port) = text.rsplit_once(':').ok_or(wrong)?;
        let bare_ipv6 = host.contains(':') && !(host.starts_with('[') && host.ends_with(']'));
        match port.parse::<u16>() {
            Ok(_) if !host.is_empty() && !bare_ipv6 => Ok(Self(text.to_owned())),
            _ => Err(wrong),
        }
    }
}

impl HostPort {
    /// The first address that the name has.
    fn resolve(&self) -> Result<SocketAddr, NameError> {
        let fail = |detail: String| NameError { name: self.0.clone(), detail };
        let mut addrs = self.0.to_socket_addrs().map_err(|error| fail(error.to_string()))?;
        addrs.next().ok_or_else(|| fail("it has no address".into()))
    }
}

impl<'de> Deserialize<'de> for HostPort {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|error| D::Error::custom(format!("'{text}' is {error}")))
    }
}

/// A host name that cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {name}: {detail}; give an address of this machine, or a name of one")]
pub struct NameError {
    name: String,
    detail: String,
}

/// Why there are no options to run with.
#[derive(Debug)]
pub enum Refusal {
    /// Help or version were asked for.
    Help(clap::Error),
    /// The options are wrong: how, in one line.
    Usage(String),
}

/// Wrong options; the message says which.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    /// An option without which there is no agent.
    #[error(
        "--{option} is missing, on the command line and in the configuration file (see gms-agent --help)"
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
    /// Two that exclude each other.
    #[error("--export auto cannot give huge pages back: leave --huge out, or name an amount")]
    Huge,
    /// Not so many threads.
    #[error("--threads must be between 1 and {THREADS_MAX}")]
    Threads,
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
    pub listen: HostPort,
    /// What to export.
    pub export: Export,
    /// The key directory.
    pub keys: PathBuf,
    /// Where to serve metrics.
    pub metrics: Option<HostPort>,
    /// Whom to join, and where the agent stands.
    pub joining: Joining,
    /// Whether to export huge pages.
    pub huge: bool,
    /// Threads that serve.
    pub threads: usize,
    /// Longest spin.
    pub spin: Duration,
    /// Grace of a drain.
    pub drain: Duration,
    /// The latest version of the protocol to speak.
    pub protocol: Version,
    /// Whether to say what is missing only.
    pub check: bool,
    /// Log level.
    pub level: tracing::Level,
}

impl Args {
    /// The options of this process: its command line, environment and configuration file.
    pub fn read() -> Result<Options, Refusal> {
        match Self::try_parse() {
            Ok(args) => args.resolve().map_err(|error| Refusal::Usage(error.to_string())),
            Err(error) if error.use_stderr() => Err(Refusal::Usage(one_line(&error, HINT))),
            Err(help) => Err(Refusal::Help(help)),
        }
    }

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
        let export = need("export", self.export.or(file.export));
        if (self.huge || file.huge) && matches!(export, Ok(Export::Auto { .. })) {
            return Err(UsageError::Huge);
        }
        let join = if self.join.is_empty() { file.join } else { self.join };
        Ok(Options {
            listen: need("listen", self.listen.or(file.listen))?,
            export: export?,
            keys: need("keys", self.keys.or(file.keys))?,
            metrics: self.metrics.or(file.metrics),
            joining: Joining {
                seeds: join.into_iter().map(|HostPort(name)| name).collect(),
                zone: self.zone.or(file.zone).unwrap_or_default(),
            },
            huge: self.huge || file.huge,
            threads: threads(self.threads.or(file.threads))?,
            spin: duration("spin", self.spin.or(file.spin), micro, SPIN_MAX, SPIN_LIMIT)?,
            drain: duration("drain", self.drain.or(file.drain), second, DRAIN_DEFAULT, DRAIN_MAX)?,
            protocol: if std::env::var_os(OLD).is_some() { Version::V1 } else { Version::V2 },
            check: self.check,
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
    /// The agent's configuration, percentages being of `memory`.
    ///
    /// # Errors
    /// If a host name has no address.
    pub fn agent(&self, memory: Bytes) -> Result<Config, NameError> {
        Ok(Config {
            listen: self.listen.resolve()?,
            export: self.export.of(memory),
            lock: true,
            huge: self.huge,
            threads: self.threads,
            spin: self.spin,
            protocol: self.protocol,
            metrics: self.metrics.as_ref().map(HostPort::resolve).transpose()?,
            endless_leases: false,
        })
    }
}

/// What clap says of a wrong command line, in one line that ends with a `hint` in brackets.
pub fn one_line(error: &clap::Error, hint: &str) -> String {
    let text = error.to_string();
    let report = text.split("Usage:").next().unwrap_or_default();
    let report = report.split("For more information").next().unwrap_or_default();
    let words: Vec<&str> = report.split_whitespace().filter(|word| *word != "error:").collect();
    format!("{} ({hint})", words.join(" ").replace(" tip: ", "; "))
}

/// As many threads as were asked for; otherwise half of the CPUs, within bounds.
fn threads(asked: Option<u32>) -> Result<usize, UsageError> {
    let Some(asked) = asked else {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        return Ok((cpus / 2).clamp(1, THREADS_USUAL));
    };
    let asked = usize::try_from(asked).unwrap_or(usize::MAX);
    (1..=THREADS_MAX).contains(&asked).then_some(asked).ok_or(UsageError::Threads)
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
    let args = toml::from_str(&text);
    // Relative paths start at the file's directory.
    let base = path.parent().unwrap_or(Path::new(""));
    let args = args.map(|args: Args| Args { keys: args.keys.map(|keys| base.join(keys)), ..args });
    args.map_err(|error: toml::de::Error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        let message = error.message().lines().collect::<Vec<_>>().join("; ");
        UsageError::Config { path: path.into(), line, message }
    })
}

/// Reads a zone from a configuration file.
///
/// # Errors
/// If it is none.
fn zone<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Zone>, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(|error| D::Error::custom(format!("'{text}' is {error}")))
}

/// Reads a size from a configuration file: a string, or a whole number of bytes.
///
/// # Errors
/// If it is neither, or no size.
pub fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Size>, D::Error> {
    struct AsSize;
    impl Visitor<'_> for AsSize {
        type Value = Size;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a size ('512M', '40%' or bytes)")
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
            text.parse().map_err(|error| E::custom(format!("'{text}' is {error}")))
        }

        fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Size, E> {
            self.visit_str(&bytes.to_string())
        }
    }
    deserializer.deserialize_any(AsSize).map(Some)
}

/// Reads an export from a configuration file: as [`size`], or `auto` with or without bounds.
fn export<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Export>, D::Error> {
    struct AsExport;
    impl Visitor<'_> for AsExport {
        type Value = Export;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a size ('512M', '40%' or bytes) or 'auto'")
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<Export, E> {
            text.parse().map_err(|error| E::custom(format!("'{text}' is {error}")))
        }

        fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Export, E> {
            self.visit_str(&bytes.to_string())
        }
    }
    deserializer.deserialize_any(AsExport).map(Some)
}

/// How much is logged: a number, or whether more than usual.
fn level<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u8, D::Error> {
    struct Level;
    impl Visitor<'_> for Level {
        type Value = u8;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("true, false, or 0 to 2")
        }

        fn visit_bool<E: de::Error>(self, more: bool) -> Result<u8, E> {
            Ok(more.into())
        }

        fn visit_i64<E: de::Error>(self, level: i64) -> Result<u8, E> {
            let fits = u8::try_from(level).ok().filter(|level| *level <= 2);
            fits.ok_or_else(|| E::invalid_value(de::Unexpected::Signed(level), &self))
        }
    }
    deserializer.deserialize_any(Level)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use gms_policy::ExportRange;

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

    #[test]
    fn the_command_line_wins_over_the_file() {
        let file =
            "listen = \"127.0.0.1:7000\"\nexport = \"4G\"\nkeys = \"k\"\nspin = 0\nverbose = 1\n";
        let options = resolve(&["--export", "80%", "-q"], file).expect("complete");
        assert_eq!(options.export, Export::Amount(Size::Percent(80)));
        let fixed = ExportRange::fixed(Bytes(800));
        assert_eq!(options.agent(Bytes(1000)).expect("an address").export, fixed);
        let beside = std::env::temp_dir().join("k");
        assert_eq!(options.keys, beside, "relative paths start at the file");
        assert_eq!((options.spin, options.drain), (Duration::ZERO, Duration::from_secs(60)));
        assert_eq!(options.level, tracing::Level::ERROR);
        assert_eq!(resolve(&[], file).expect("complete").level, tracing::Level::DEBUG);
    }

    #[test]
    fn whom_to_join_is_a_list_and_a_zone_a_label() {
        let file = "listen = \"[::1]:1\"\nexport = \"4G\"\nkeys = \"k\"\n";
        let more = format!("{file}join = [\"a:1\", \"b:2\"]\nzone = \"rack-7\"\n");
        let joining = resolve(&[], &more).expect("complete").joining;
        assert_eq!(
            (&joining.seeds[..], joining.zone.label()),
            (&["a:1".into(), "b:2".into()][..], "rack-7")
        );
        let joining =
            resolve(&["--join", "c:3", "--zone", "r.8"], &more).expect("complete").joining;
        assert_eq!((&joining.seeds[..], joining.zone.label()), (&["c:3".into()][..], "r.8"));
        assert_eq!(resolve(&[], file).expect("complete").joining, Joining::default());
        let wrong = resolve(&[], &format!("{file}zone = \"a b\"\n")).expect_err("wrong");
        assert!(wrong.to_string().contains(".toml:4: 'a b' is not a zone"), "{wrong}");
        assert!(resolve(&[], &format!("{file}join = [\"nowhere\"]\n")).is_err());
    }

    #[test]
    fn sizes_are_numbers_or_strings_and_hosts_have_names() {
        let file = "listen = \"localhost:0\"\nexport = 8388608\nkeys = \"/k\"\nverbose = true\n";
        let options = resolve(&["--metrics", "[::1]:9400"], file).expect("complete");
        assert_eq!(options.export, Export::Amount(Size::Bytes(Bytes(8 << 20))));
        assert_eq!((options.level, options.keys), (tracing::Level::DEBUG, "/k".into()));
        let config = resolve(&[], file).expect("complete").agent(Bytes(1)).expect("an address");
        assert!(config.listen.ip().is_loopback());
        let nowhere = file.replace("localhost", "no-such-host.invalid");
        let error = resolve(&[], &nowhere).expect("complete").agent(Bytes(1)).expect_err("no host");
        assert!(error.to_string().contains("cannot listen on no-such-host.invalid:0: "), "{error}");
    }

    #[test]
    fn wrong_options_are_told_in_one_line() {
        for (args, start) in [
            (&["--exprot", "8M"][..], "unexpected argument '--exprot' found"),
            (
                &["--export", "8Q"],
                "invalid value '8Q' for '--export <SIZE|N%|auto[:MIN..MAX]>': not a size",
            ),
            (&["--export", "auto:4G..2G"], "invalid value 'auto:4G..2G' for '--export"),
            (
                &["--listen", "nowhere"],
                "invalid value 'nowhere' for '--listen <HOST:PORT>': not HOST:PORT",
            ),
            (&["--listen", "::1:7400"], "invalid value '::1:7400'"),
            (&["-q", "-v"], "the argument '--quiet' cannot be used with"),
            (&["--spin"], "a value is required for '--spin <MICROSECONDS>'"),
        ] {
            let args = ["gms-agent"].iter().chain(args);
            let text = one_line(&Args::try_parse_from(args).expect_err("wrong"), HINT);
            assert!(text.starts_with(start) && text.ends_with("(see gms-agent --help)"), "{text}");
            assert!(!text.contains('\n'), "{text}");
        }
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        let message = |file| resolve(&[], file).expect_err("wrong").to_string();
        let typo = message("export = \"4G\"\n\nexprot = \"4G\"\n");
        assert!(typo.contains(".toml:3: ") && typo.contains("`exprot`"), "{typo}");
        let size = message("export = \"4Q\"\n");
        assert!(size.contains(".toml:1: ") && size.contains("'4Q' is not a size"), "{size}");
        let negative = message("export = -4\n");
        assert!(
            negative.contains(".toml:1: ") && negative.contains("'-4' is not a size"),
            "{negative}"
        );
        assert!(message("export = true").contains("expected a size"));
        assert!(message("listen = \"a\"").contains("'a' is not HOST:PORT"));
        assert!(message("verbose = 3").contains("0 to 2"));
        let syntax = message("huge = true\nexport 4G\n");
        assert!(syntax.contains(".toml:2: ") && !syntax.contains('\n'), "{syntax}");
        assert!(message("config = \"x\"").contains("`config`"));
        assert!(message("export = \"4G\"").starts_with("--listen is missing"));
        let slow = "listen = \"[::1]:1\"\nexport = \"4G\"\nkeys = \"k\"\nspin = 10001\n";
        assert_eq!(message(slow), "--spin must be at most 10000");
        for none in [
            "listen = \"[::1]:1\"\nexport = \"4G\"\nkeys = \"k\"\nthreads = 0\n",
            "listen = \"[::1]:1\"\nexport = \"4G\"\nkeys = \"k\"\nthreads = 17\n",
        ] {
            assert_eq!(message(none), "--threads must be between 1 and 16");
        }
    }

    #[test]
    fn an_export_may_follow_the_host() {
        let file = "listen = \"[::1]:1\"\nexport = \"auto:10%..50%\"\nkeys = \"k\"\n";
        let export = |options: &Options| options.agent(Bytes(1000)).expect("an address").export;
        let range = |floor, ceiling| ExportRange { floor: Bytes(floor), ceiling: Bytes(ceiling) };
        let options = resolve(&[], file).expect("complete");
        assert_eq!(export(&options), range(100, 500));
        let options = resolve(&["--export", "auto"], file).expect("complete");
        assert_eq!(export(&options), range(0, 1000));
        let refused = resolve(&["--huge"], file).expect_err("both").to_string();
        assert!(refused.contains("huge pages"), "{refused}");
        assert!(resolve(&["--huge", "--export", "4G"], file).is_ok());
        let wrong = resolve(&[], "export = \"auto:\"\n").expect_err("wrong").to_string();
        assert!(wrong.contains("'auto:' is not a size"), "{wrong}");
    }

    #[test]
    fn the_command_is_well_formed() {
        Args::command().debug_assert();
    }
}
