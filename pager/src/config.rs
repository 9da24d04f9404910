//! The configuration file, and the options of a session put together from it and the command line.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use gms_agent::memory::Memory;
use gms_policy::limits::AGENTS_MAX;
use gms_policy::{Bytes, Redundancy, Size, WhenFull};
use serde::{Deserialize, Serialize};

use crate::cli::PagingArgs;
use crate::cli::values::{PageSize, Sealing};
use crate::size::Human;

/// Least workable `--local`: below it a fault's own batch would not fit.
pub const LOCAL_BYTES_MIN: u64 = 4 << 20;
/// Least workable `--export`.
pub const EXPORT_BYTES_MIN: u64 = 1 << 20;
/// Most threads that serve faults: each has a link to every agent.
const FAULT_THREADS_MAX: usize = 16;
/// Largest configuration file read.
const CONFIG_BYTES_MAX: u64 = 1 << 20;
/// Default `--local`, in percent of the memory available.
const LOCAL_PERCENT: u8 = 80;
/// Default `--export`, in percent of the memory available.
const EXPORT_PERCENT: u8 = 50;
/// Least workable `--disk-size`: below it the file would have no room for all that may be on its way there.
const DISK_BYTES_MIN: u64 = 4 << 20;
/// Default `--disk-size`, in all memory of the machine, if half of what is free there is not less: the index of the file's frames takes a part of memory.
const DISK_MEMORIES: u64 = 4;
/// `--local` is rounded down to pages.
const PAGE_BYTES: u64 = 4096;

/// What is wrong with the options or the configuration file.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("configuration file {}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A line of the file is wrong.
    #[error("{}:{line}: {reason}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong, naming the key.
        reason: String,
    },
    /// The options do not make sense together.
    #[error("{0}")]
    Options(String),
}

/// What the user asked for, parsed and validated.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SessionConfig {
    /// Budget for resident anonymous memory of the whole tree, in bytes.
    pub budget_bytes: u64,
    /// log2 of the unit which is fetched: 12 or 13.
    pub page_shift: u8,
    /// Threads that serve faults, at least 1.
    pub fault_threads: usize,
    /// `HOST:PORT` as given; empty = start an embedded agent.
    pub agents: Vec<String>,
    /// Keys of the cluster; needed when `agents` is not empty.
    pub keys: Option<PathBuf>,
    /// Whether agents hold pages sealed.
    pub seal: bool,
    /// Size of the embedded agent in bytes.
    pub export_bytes: u64,
    /// What happens when no agent has room for pages that must go.
    #[serde(with = "WhenFullRecord")]
    pub when_full: WhenFull,
    /// How many agents are to have each page.
    #[serde(with = "redundancy_record")]
    pub redundancy: Redundancy,
    /// A file that is to have each page too.
    pub disk: Option<Disk>,
    /// File for the time stamps of sampled faults.
    pub trace: Option<PathBuf>,
    /// Say what happens on stderr.
    pub verbose: bool,
    /// Give no notices on stderr either.
    pub quiet: bool,
}

impl SessionConfig {
    /// Whether the session's agent is one of its own, the embedded one, and no other is used.
    pub fn is_embedded(&self) -> bool {
        self.agents.is_empty()
    }
}

/// [`WhenFull`] for the next binary of the pager.
#[derive(Serialize, Deserialize)]
#[serde(remote = "WhenFull")]
enum WhenFullRecord {
    Wait,
    Grow,
    Kill,
}

/// [`Redundancy`] for the same, as the command line has it.
mod redundancy_record {
    use super::*;
    use serde::de::Error;

    pub(super) fn serialize<S: serde::Serializer>(
        redundancy: &Redundancy,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_str(redundancy)
    }

    pub(super) fn deserialize<'de, D: serde::Deserializer<'de>>(
        from: D,
    ) -> Result<Redundancy, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// Where the last copies are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// The directory of the file.
    pub dir: PathBuf,
    /// Its length, in bytes.
    pub bytes: u64,
}

/// What a session does beside paging, and how it pages.
#[derive(Clone, Debug)]
pub struct Options {
    /// For the session.
    pub session: SessionConfig,
    /// `--stats`.
    pub stats: Option<PathBuf>,
    /// `--best-effort`.
    pub best_effort: bool,
    /// Not `--no-takeover`.
    pub takeover: bool,
    /// `--quiet`.
    pub quiet: bool,
}

/// Puts the options together: the command line wins over the file, the file over the defaults.
/// `local_required` asks for an explicit `--local` (for `gms attach`).
pub fn resolve(
    args: PagingArgs,
    memory: &Memory,
    local_required: bool,
) -> Result<Options, ConfigError> {
    let file = match &args.config {
        Some(path) => load(path)?,
        None => PagingArgs::default(),
    };
    check(merge(args, file), memory, local_required)
}

fn merge(line: PagingArgs, file: PagingArgs) -> PagingArgs {
    PagingArgs {
        local: line.local.or(file.local),
        page_size: line.page_size.or(file.page_size),
        fault_threads: line.fault_threads.or(file.fault_threads),
        agents: if line.agents.is_empty() { file.agents } else { line.agents },
        keys: line.keys.or(file.keys),
        seal: line.seal.or(file.seal),
        export: line.export.or(file.export),
        when_full: line.when_full.or(file.when_full),
        redundancy: line.redundancy.or(file.redundancy),
        disk: line.disk.or(file.disk),
        disk_size: line.disk_size.or(file.disk_size),
        stats: line.stats.or(file.stats),
        trace: line.trace.or(file.trace),
        config: None,
        best_effort: line.best_effort || file.best_effort,
        no_takeover: line.no_takeover || file.no_takeover,
        quiet: line.quiet || (file.quiet && !line.verbose),
        verbose: line.verbose || (file.verbose && !line.quiet),
    }
}

fn check(args: PagingArgs, memory: &Memory, local_required: bool) -> Result<Options, ConfigError> {
    let wrong = |text: String| Err(ConfigError::Options(text));
    if local_required && args.local.is_none() {
        return wrong("--local is missing: say how much may stay resident (--local 512M)".into());
    }
    let bytes = |given: Option<Size>, percent| match given {
        Some(size) => size.of(Bytes(memory.total_bytes)).0,
        None => Size::Percent(percent).of(Bytes(memory.available_bytes)).0,
    };
    let local_bytes = bytes(args.local, LOCAL_PERCENT);
    let budget_bytes = local_bytes / PAGE_BYTES * PAGE_BYTES;
    if budget_bytes < LOCAL_BYTES_MIN {
        let (given, least) = (Human(local_bytes), Human(LOCAL_BYTES_MIN));
        return wrong(format!("--local is {given}, but gms needs at least {least}: give more"));
    }
    if args.agents.len() > AGENTS_MAX {
        return wrong(format!("{} agents given, at most {AGENTS_MAX} work", args.agents.len()));
    }
    if let Some(twice) =
        (1..args.agents.len()).find(|&i| args.agents[..i].contains(&args.agents[i]))
    {
        return wrong(format!("agent {} is given twice: remove one", args.agents[twice]));
    }
    if !args.agents.is_empty() && args.keys.is_none() {
        return wrong("--agent needs --keys DIR (or GMS_KEYS): 'gms keys init DIR' makes keys for agents and pagers".into());
    }
    let export_bytes = bytes(args.export, EXPORT_PERCENT);
    if args.agents.is_empty() && export_bytes < EXPORT_BYTES_MIN {
        let (given, least) = (Human(export_bytes), Human(EXPORT_BYTES_MIN));
        return wrong(format!(
            "--export is {given}, but an agent needs at least {least}: give more"
        ));
    }
    let disk = match args.disk {
        Some(dir) => Some(disk(dir, args.disk_size, args.agents.len(), memory)?),
        None if args.disk_size.is_some() => return wrong("--disk-size needs --disk DIR".into()),
        None => None,
    };
    let is_sealed = args.seal.unwrap_or_default() == Sealing::On;
    let redundancy = redundancy(args.redundancy, args.agents.len())?;
    goes_with(redundancy, disk.is_some(), is_sealed)?;
    let (keys, trace, verbose, quiet) = (args.keys, args.trace, args.verbose, args.quiet);
    let session = SessionConfig {
        budget_bytes,
        page_shift: args.page_size.unwrap_or(PageSize::Small).shift(),
        fault_threads: fault_threads(args.fault_threads)?,
        redundancy,
        disk,
        agents: args.agents,
        keys,
        seal: is_sealed,
        export_bytes,
        when_full: args.when_full.map(Into::into).unwrap_or_default(),
        trace,
        verbose,
        quiet,
    };
    let (best_effort, takeover) = (args.best_effort, !args.no_takeover);
    Ok(Options { session, stats: args.stats, best_effort, takeover, quiet })
}

/// As many threads as were asked for, within bounds; one otherwise.
fn fault_threads(asked: Option<u32>) -> Result<usize, ConfigError> {
    match asked.map_or(1, |threads| threads as usize) {
        threads @ 1..=FAULT_THREADS_MAX => Ok(threads),
        _ => Err(ConfigError::Options(format!(
            "--fault-threads must be between 1 and {FAULT_THREADS_MAX}"
        ))),
    }
}

/// What was asked for. How many agents there are for it is known when one has told of the others.
fn redundancy(asked: Option<Redundancy>, agents: usize) -> Result<Redundancy, ConfigError> {
    let redundancy = asked.unwrap_or_default();
    let copies = redundancy.copies(agents) as usize;
    if agents == 0 && copies > 1 {
        return Err(ConfigError::Options(format!(
            "--redundancy {redundancy} needs at least {copies} agents, 0 are given: add --agent, or say --redundancy none"
        )));
    }
    Ok(redundancy)
}

/// Stripes have no part on a disk, and without seals it is not known who gives a wrong part.
fn goes_with(redundancy: Redundancy, has_disk: bool, is_sealed: bool) -> Result<(), ConfigError> {
    let other = match (redundancy.shape().is_some(), has_disk, is_sealed) {
        (true, true, _) => "--disk",
        (true, _, false) => "--seal off",
        _ => return Ok(()),
    };
    Err(ConfigError::Options(format!(
        "--redundancy {redundancy} does not work with {other}: leave one of them out"
    )))
}

/// The file that is to have each page too.
fn disk(
    dir: PathBuf,
    asked: Option<Size>,
    agents: usize,
    memory: &Memory,
) -> Result<Disk, ConfigError> {
    let wrong = |reason: String| Err(ConfigError::Options(reason));
    if agents == 0 {
        let reason = "--disk needs --agent: gms's own agent is on the disk's machine";
        return wrong(reason.into());
    }
    if agents == AGENTS_MAX {
        let most = AGENTS_MAX - 1;
        return wrong(format!("with --disk {most} agents work at most, {agents} are given"));
    }
    let found = match nix::sys::statvfs::statvfs(&dir) {
        Ok(found) => found,
        Err(error) => {
            let dir = dir.display();
            return wrong(format!("--disk {dir}: {}: give a directory", error.desc()));
        }
    };
    if is_memory(&dir) {
        return wrong(format!(
            "--disk {}: that is memory: give a directory on a disk",
            dir.display()
        ));
    }
    let free = found.blocks_available() as u64 * found.fragment_size() as u64;
    let usual = Bytes(free / 2).min(Bytes(memory.total_bytes.saturating_mul(DISK_MEMORIES)));
    let bytes = asked.map_or(usual, |size| size.of(Bytes(free))).0;
    if bytes < DISK_BYTES_MIN {
        let least = Human(DISK_BYTES_MIN);
        return wrong(format!(
            "the file of --disk would be of {}, but needs at least {least}: give more by --disk-size",
            Human(bytes)
        ));
    }
    Ok(Disk { dir, bytes })
}

/// Whether files there lie in memory, or in swap.
fn is_memory(dir: &Path) -> bool {
    use nix::sys::statfs::{FsType, TMPFS_MAGIC, statfs};
    const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);
    statfs(dir).is_ok_and(|found| [TMPFS_MAGIC, RAMFS_MAGIC].contains(&found.filesystem_type()))
}

fn load(path: &Path) -> Result<PagingArgs, ConfigError> {
    let failed = |reason: String| ConfigError::File { path: path.to_path_buf(), reason };
    let file = fs::File::open(path).map_err(|error| failed(error.to_string()))?;
    let mut text = String::new();
    file.take(CONFIG_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(|error| failed(error.to_string()))?;
    if text.len() as u64 > CONFIG_BYTES_MAX {
        return Err(failed(format!("larger than {}", Human(CONFIG_BYTES_MAX))));
    }
    parse(path, &text)
}

/// Reads the text of a configuration file; relative paths in it start at the file's own directory.
fn parse(path: &Path, text: &str) -> Result<PagingArgs, ConfigError> {
    let wrong = |offset: usize, reason: &str| {
        let line = 1 + text.bytes().take(offset).filter(|&byte| byte == b'\n').count();
        let key = key_at(text, line).filter(|key| !reason.contains(&format!("`{key}`")));
        let mut reason = reason.lines().collect::<Vec<_>>().join("; ");
        if let Some(key) = key {
            reason.insert_str(0, &format!("{key}: "));
        }
        ConfigError::Line { path: path.to_path_buf(), line, reason }
    };
    let mut args: PagingArgs = toml::from_str(text)
        .map_err(|error| wrong(error.span().map_or(0, |span| span.start), error.message()))?;
    if args.quiet && args.verbose {
        let offset = text.find("verbose").unwrap_or(0);
        return Err(wrong(offset, "quiet and verbose exclude each other"));
    }
    let base = path.parent().unwrap_or(Path::new(""));
    for file in
        [&mut args.keys, &mut args.stats, &mut args.trace, &mut args.disk].into_iter().flatten()
    {
        *file = base.join(&*file);
    }
    Ok(args)
}

/// The key to which a line (from 1) belongs: its own, or that of a list which began above.
fn key_at(text: &str, line: usize) -> Option<&str> {
    let lines: Vec<&str> = text.lines().take(line).collect();
    lines.into_iter().rev().find_map(|line| {
        let key = line.split_once('=')?.0.trim();
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        (!key.is_empty() && key.chars().all(plain)).then_some(key)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: Memory = Memory {
        total_bytes: 10 << 30,
        available_bytes: 5 << 30,
        swap_bytes: 0,
        cgroup_limit_bytes: None,
    };

    fn options(file: &str, line: PagingArgs) -> Result<Options, String> {
        let file = parse(Path::new("etc/gms.toml"), file).map_err(|error| error.to_string())?;
        check(merge(line, file), &MEMORY, false).map_err(|error| error.to_string())
    }

    fn options_of(file: &str) -> Options {
        options(file, PagingArgs::default()).unwrap()
    }

    #[test]
    fn defaults_are_shares_of_available_memory() {
        let options = options("", PagingArgs::default()).unwrap();
        assert_eq!(options.session.budget_bytes, (5 << 30) / 5 * 4 / 4096 * 4096);
        assert_eq!(options.session.export_bytes, (5 << 30) / 2);
        assert_eq!(options.session.page_shift, 12);
        assert!(options.session.seal);
    }

    #[test]
    fn a_file_says_what_the_line_says() {
        let text = "local = '40%'\npage-size = \"8k\"\nagent = [\"a:1\", \"b:2\"]\nkeys = 'k'\nexport = 2097152\nseal = 'off'\n\
                    best-effort = true\nno-takeover = true\nstats = '/s.json'\nverbose = true\n";
        let options = options(text, PagingArgs::default()).unwrap();
        assert_eq!(options.session.budget_bytes, (10 << 30) / 5 * 2 / 4096 * 4096);
        assert_eq!(options.session.page_shift, 13);
        assert_eq!(options.session.agents, ["a:1", "b:2"]);
        assert_eq!(options.session.keys.as_deref(), Some(Path::new("etc/k")));
        assert_eq!(options.session.export_bytes, 2 << 20);
        assert!(!options.session.seal);
        assert_eq!(options.stats.as_deref(), Some(Path::new("/s.json")));
        assert!(options.session.verbose && options.best_effort && !options.quiet);
        assert!(!options.takeover);
        let lean = options_of("agent = 'a:1'\nkeys = 'k'\npage-size = 8192\nlocal = '1g'\n");
        assert_eq!((lean.session.page_shift, lean.session.budget_bytes), (13, 1 << 30));
        assert_eq!(lean.session.agents, ["a:1"]);
    }

    #[test]
    fn the_line_wins() {
        let line = PagingArgs {
            local: Some(Size::Bytes(Bytes(8 << 20))),
            agents: vec!["c:3".into()],
            keys: Some("l".into()),
            seal: Some(Sealing::On),
            quiet: true,
            ..PagingArgs::default()
        };
        let file = "local = '1G'\nagent = 'a:1'\nkeys = 'k'\nseal = 'off'\nverbose = true";
        let options = options(file, line).unwrap();
        assert!(options.session.seal);
        assert_eq!(options.session.budget_bytes, 8 << 20);
        assert_eq!(options.session.agents, ["c:3"]);
        assert_eq!(options.session.keys.as_deref(), Some(Path::new("l")));
        assert!(options.quiet && !options.session.verbose);
    }

    #[test]
    fn errors_name_file_line_and_key() {
        let cases = [
            (
                "local = '1G'\nlocl = 3",
                "etc/gms.toml:2: unknown field `locl`, expected one of `local`",
            ),
            ("\n\nlocal = '12Q'", "etc/gms.toml:3: local: '12Q' is not a size"),
            ("local = -4", "etc/gms.toml:1: local: '-4' is not a size"),
            (
                "local = true",
                "etc/gms.toml:1: local: invalid type: boolean `true`, expected a size",
            ),
            (
                "local = 1.5",
                "etc/gms.toml:1: local: invalid type: floating point `1.5`, expected a size",
            ),
            ("agent = 'b'", "etc/gms.toml:1: agent: 'b' is not HOST:PORT"),
            ("quiet = true\nagent = ['a:1',\n 'b']", "etc/gms.toml:2: agent: 'b' is not HOST:PORT"),
            (
                "agent = 7",
                "etc/gms.toml:1: agent: invalid type: integer `7`, expected HOST:PORT or a list",
            ),
            (
                "quiet = 'yes'",
                "etc/gms.toml:1: quiet: invalid type: string \"yes\", expected a boolean",
            ),
            ("seal = 'no'", "etc/gms.toml:1: seal: 'no' is not on or off"),
            (
                "seal = true",
                "etc/gms.toml:1: seal: invalid type: boolean `true`, expected on or off",
            ),
            ("page-size = '16k'", "etc/gms.toml:1: page-size: '16k' is not 4k or 8k"),
            ("fault-threads = 0", "--fault-threads must be between 1 and 16"),
            ("fault-threads = 17", "--fault-threads must be between 1 and 16"),
            ("redundancy = 'raid'", "etc/gms.toml:1: redundancy: \"raid\" is none of auto, none"),
            ("redundancy = 'replica:3'", "--redundancy replica:3 needs at least 3 agents, 0 are"),
            ("disk = '/'", "--disk needs --agent"),
            ("disk-size = '1G'", "--disk-size needs --disk DIR"),
            (
                "agent = 'a:1'\nkeys = 'k'\ndisk = 'none'",
                "--disk etc/none: No such file or directory: give a directory",
            ),
            ("keys = 3", "etc/gms.toml:1: keys: invalid type: integer `3`, expected path string"),
            ("quiet = true\nverbose = true", "etc/gms.toml:2: verbose: quiet and verbose exclude"),
            ("local = '1G'\nlocal = '2G'", "etc/gms.toml:2: local: duplicate key"),
            ("local = '1G'\n[agents]\n", "etc/gms.toml:2: unknown field `agents`"),
            ("config = 'x'", "etc/gms.toml:1: unknown field `config`"),
            ("local '1G'", "etc/gms.toml:1: "),
        ];
        for (text, start) in cases {
            let error = options(text, PagingArgs::default()).expect_err(text);
            assert!(error.starts_with(start) && !error.contains('\n'), "{text:?}: {error}");
        }
    }

    #[test]
    fn parity_that_cannot_work_is_refused() {
        let agent = "agent = 'a:1'\nkeys = 'k'\nredundancy = 'parity:4+1'";
        for (text, start) in [
            ("redundancy = 'parity:1+1'", "etc/gms.toml:1: redundancy: \"parity:1+1\" is none of"),
            ("redundancy = 'parity:4+1'", "--redundancy parity:4+1 needs at least 5 agents, 0 are"),
            (&format!("{agent}\ndisk = '/'"), "--redundancy parity:4+1 does not work with --disk"),
            (
                &format!("{agent}\nseal = 'off'"),
                "--redundancy parity:4+1 does not work with --seal off",
            ),
        ] {
            let error = options(text, PagingArgs::default()).expect_err(text);
            assert!(error.starts_with(start), "{text:?}: {error}");
        }
        assert!(options(agent, PagingArgs::default()).is_ok());
    }

    #[test]
    fn options_which_cannot_work_are_refused() {
        let local =
            |bytes| PagingArgs { local: Some(Size::Bytes(Bytes(bytes))), ..PagingArgs::default() };
        assert!(options("", local(LOCAL_BYTES_MIN)).is_ok());
        assert!(options("", local(LOCAL_BYTES_MIN - 1)).unwrap_err().contains("at least 4 MiB"));
        let small = options("", local(1024)).unwrap_err();
        assert!(small.contains("--local is 1 KiB,"), "{small}");
        let small = options("local = 1", PagingArgs::default()).unwrap_err();
        assert!(small.contains("--local is 1 B,"), "{small}");
        assert!(
            options("agent = 'a:1'", PagingArgs::default()).unwrap_err().contains("gms keys init")
        );
        assert!(
            options("agent = ['a:1', 'a:1']\nkeys = 'k'", PagingArgs::default())
                .unwrap_err()
                .contains("twice")
        );
        assert!(options("export = 5", PagingArgs::default()).unwrap_err().contains("--export"));
        assert!(check(PagingArgs::default(), &MEMORY, true).is_err());
    }
}
