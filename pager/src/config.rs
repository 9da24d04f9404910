//! The configuration file, and the options of a session put together from it and the command line.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use gms_policy::{Bytes, Size};
use toml::de::{DeTable, DeValue};

use crate::cli::{OnFull, PageSize, PagingArgs, parse_agent};
use crate::session::SessionConfig;
use crate::size::{Human, Memory};

/// Least workable `--local`: below it a fault's own batch would not fit.
pub const LOCAL_BYTES_MIN: u64 = 4 << 20;
/// Least workable `--export`.
pub const EXPORT_BYTES_MIN: u64 = 1 << 20;
/// Most agents of one session.
pub const AGENTS_MAX: usize = 64;
/// Largest configuration file read.
const CONFIG_BYTES_MAX: u64 = 1 << 20;
/// Default `--local`, in percent of `MemAvailable`.
const LOCAL_PERCENT: u8 = 80;
/// Default `--export`, in percent of `MemAvailable`.
const EXPORT_PERCENT: u8 = 50;
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

/// What a session does beside paging, and how it pages.
#[derive(Clone, Debug)]
pub struct Options {
    /// For the session.
    pub session: SessionConfig,
    /// `--stats`.
    pub stats: Option<PathBuf>,
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
        agents: if line.agents.is_empty() { file.agents } else { line.agents },
        keys: line.keys.or(file.keys),
        export: line.export.or(file.export),
        when_full: line.when_full.or(file.when_full),
        stats: line.stats.or(file.stats),
        trace: line.trace.or(file.trace),
        config: None,
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
    let budget_bytes = bytes(args.local, LOCAL_PERCENT) / PAGE_BYTES * PAGE_BYTES;
    if budget_bytes < LOCAL_BYTES_MIN {
        let (given, least) = (Human(budget_bytes), Human(LOCAL_BYTES_MIN));
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
    let page_shift = args.page_size.unwrap_or(PageSize::Small).shift();
    let (keys, trace, verbose, quiet) = (args.keys, args.trace, args.verbose, args.quiet);
    let session = SessionConfig {
        budget_bytes,
        page_shift,
        agents: args.agents,
        keys,
        export_bytes,
        when_full: args.when_full.map(Into::into).unwrap_or_default(),
        trace,
        verbose,
        quiet,
    };
    Ok(Options { session, stats: args.stats, quiet: args.quiet })
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
    let at = |offset: usize, reason: String| {
        let line = 1 + text.bytes().take(offset).filter(|&byte| byte == b'\n').count();
        ConfigError::Line { path: path.to_path_buf(), line, reason }
    };
    let table = DeTable::parse(text).map_err(|error| {
        at(error.span().map_or(0, |span| span.start), error.message().replace('\n', ", "))
    })?;
    let base = path.parent().unwrap_or(Path::new(""));
    let mut args = PagingArgs::default();
    for (key, value) in table.get_ref() {
        set(&mut args, base, key.get_ref(), value.get_ref())
            .map_err(|reason| at(key.span().start, format!("{}: {reason}", key.get_ref())))?;
    }
    Ok(args)
}

fn set(args: &mut PagingArgs, base: &Path, key: &str, value: &DeValue<'_>) -> Result<(), String> {
    match key {
        "local" => args.local = Some(size(value)?),
        "page-size" => args.page_size = Some(page_size(value)?),
        "agent" => args.agents = agents(value)?,
        "keys" => args.keys = Some(base.join(string(value)?)),
        "export" => args.export = Some(size(value)?),
        "when-full" => args.when_full = Some(when_full(value)?),
        "stats" => args.stats = Some(base.join(string(value)?)),
        "trace" => args.trace = Some(base.join(string(value)?)),
        "quiet" => args.quiet = boolean(value)?,
        "verbose" => args.verbose = boolean(value)?,
        _ => {
            return Err("unknown key; known are local, page-size, agent, keys, export, when-full, stats, trace, quiet, verbose".into());
        }
    }
    if args.quiet && args.verbose {
        return Err("quiet and verbose exclude each other".into());
    }
    Ok(())
}

fn string<'a>(value: &'a DeValue<'_>) -> Result<&'a str, String> {
    value.as_str().ok_or_else(|| format!("expected a string, found {}", value.type_str()))
}

fn boolean(value: &DeValue<'_>) -> Result<bool, String> {
    value.as_bool().ok_or_else(|| format!("expected true or false, found {}", value.type_str()))
}

/// A size is a string or a whole number of bytes.
fn size(value: &DeValue<'_>) -> Result<Size, String> {
    let text = match value {
        DeValue::Integer(number) if number.radix() == 10 => number.as_str(),
        other => string(other)?,
    };
    text.parse().map_err(|error| format!("'{text}' is {error}"))
}

fn page_size(value: &DeValue<'_>) -> Result<PageSize, String> {
    let text = string(value)?;
    clap::ValueEnum::from_str(text, true).map_err(|_| format!("'{text}' is not 4k or 8k"))
}

fn when_full(value: &DeValue<'_>) -> Result<OnFull, String> {
    let text = string(value)?;
    clap::ValueEnum::from_str(text, false)
        .map_err(|_| format!("'{text}' is not wait, grow or kill"))
}

fn agents(value: &DeValue<'_>) -> Result<Vec<String>, String> {
    match value {
        DeValue::Array(list) => {
            list.iter().map(|one| parse_agent(string(one.get_ref())?)).collect()
        }
        one => Ok(vec![parse_agent(string(one)?)?]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gms_policy::WhenFull;

    const MEMORY: Memory =
        Memory { total_bytes: 10 << 30, available_bytes: 5 << 30, swap_bytes: 0 };

    fn options(file: &str, line: PagingArgs) -> Result<Options, String> {
        let file = parse(Path::new("etc/gms.toml"), file).map_err(|error| error.to_string())?;
        check(merge(line, file), &MEMORY, false).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_are_shares_of_available_memory() {
        let options = options("", PagingArgs::default()).unwrap();
        assert_eq!(options.session.budget_bytes, (5 << 30) / 5 * 4 / 4096 * 4096);
        assert_eq!(options.session.export_bytes, (5 << 30) / 2);
        assert_eq!(options.session.page_shift, 12);
        assert_eq!(options.session.when_full, WhenFull::Grow);
    }

    #[test]
    fn a_file_says_what_the_line_says() {
        let text = "local = '40%'\npage-size = \"8k\"\nagent = [\"a:1\", \"b:2\"]\nkeys = 'k'\nexport = 2097152\n\
                    stats = '/s.json'\nverbose = true\nwhen-full = 'wait'\n";
        let options = options(text, PagingArgs::default()).unwrap();
        assert_eq!(options.session.budget_bytes, (10 << 30) / 5 * 2 / 4096 * 4096);
        assert_eq!(options.session.page_shift, 13);
        assert_eq!(options.session.agents, ["a:1", "b:2"]);
        assert_eq!(options.session.keys.as_deref(), Some(Path::new("etc/k")));
        assert_eq!(options.session.export_bytes, 2 << 20);
        assert_eq!(options.stats.as_deref(), Some(Path::new("/s.json")));
        assert!(options.session.verbose && !options.quiet);
        assert_eq!(options.session.when_full, WhenFull::Wait);
    }

    #[test]
    fn the_line_wins() {
        let line = PagingArgs {
            local: Some(Size::Bytes(Bytes(8 << 20))),
            agents: vec!["c:3".into()],
            keys: Some("l".into()),
            quiet: true,
            ..PagingArgs::default()
        };
        let options =
            options("local = '1G'\nagent = 'a:1'\nkeys = 'k'\nverbose = true", line).unwrap();
        assert_eq!(options.session.budget_bytes, 8 << 20);
        assert_eq!(options.session.agents, ["c:3"]);
        assert_eq!(options.session.keys.as_deref(), Some(Path::new("l")));
        assert!(options.quiet && !options.session.verbose);
    }

    #[test]
    fn errors_name_file_line_and_key() {
        let cases = [
            ("local = '1G'\nlocl = 3", "etc/gms.toml:2: locl: unknown key"),
            ("\n\nlocal = '12Q'", "etc/gms.toml:3: local: '12Q' is not a size"),
            ("local = 0x10", "etc/gms.toml:1: local: expected a string"),
            ("local = -4", "etc/gms.toml:1: local: '-4' is not a size"),
            ("local = true", "etc/gms.toml:1: local: expected a string, found boolean"),
            ("agent = ['a:1',\n 'b']", "etc/gms.toml:1: agent: 'b' is not HOST:PORT"),
            ("quiet = 'yes'", "etc/gms.toml:1: quiet: expected true or false"),
            ("when-full = 'stop'", "etc/gms.toml:1: when-full: 'stop' is not wait, grow or kill"),
            ("page-size = '16k'", "etc/gms.toml:1: page-size: '16k' is not 4k or 8k"),
            ("quiet = true\nverbose = true", "etc/gms.toml:2: verbose: quiet and verbose exclude"),
            ("local = '1G'\nlocal = '2G'", "etc/gms.toml:2: duplicate key"),
            ("local = '1G'\n[agents]\n", "etc/gms.toml:2: agents: unknown key"),
            ("local '1G'", "etc/gms.toml:1: "),
        ];
        for (text, start) in cases {
            let error = options(text, PagingArgs::default()).expect_err(text);
            assert!(error.starts_with(start) && !error.contains('\n'), "{text:?}: {error}");
        }
    }

    #[test]
    fn options_which_cannot_work_are_refused() {
        let local =
            |bytes| PagingArgs { local: Some(Size::Bytes(Bytes(bytes))), ..PagingArgs::default() };
        assert!(options("", local(LOCAL_BYTES_MIN)).is_ok());
        assert!(options("", local(LOCAL_BYTES_MIN - 1)).unwrap_err().contains("at least 4 MiB"));
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
