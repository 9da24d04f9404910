//! Agents: the real `gms-agent`, each in a process of its own.

use std::ffi::OsString;
use std::net::{SocketAddr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::census::Watch;
use crate::keys::keys;
use crate::memcg::MemoryGroup;
use crate::mib::Mib;
use crate::netns::Namespace;
use crate::procfs;
use crate::program::{Outcome, Proc, Program, poll_until, tool, while_stopped};
use crate::stage::binary;

/// An agent that does not listen by then is broken.
const READY_LIMIT: Duration = Duration::from_secs(10);

/// No test needs an agent for longer.
const AGENT_LIMIT: Duration = Duration::from_secs(600);

/// Options of setpriv: as nobody, without any capability, now or later.
pub const RIGHTLESS: &str =
    "--reuid=65534 --regid=65534 --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs";

/// How an agent is to be started.
pub struct AgentSetup<'a> {
    export: Vec<OsString>,
    listen: String,
    keys: PathBuf,
    namespace: Option<&'a Namespace>,
    group: Option<&'a MemoryGroup>,
    /// The program that runs it, with its arguments.
    through: Vec<OsString>,
    args: Vec<String>,
    old: bool,
    limit: Duration,
    /// A copy of the program that everybody can execute, to be run by nobody.
    unprivileged: Option<PathBuf>,
}

impl<'a> AgentSetup<'a> {
    /// On a free port of the loopback, with the keys of the tests.
    pub fn new(export: Mib) -> AgentSetup<'a> {
        let listen = "127.0.0.1:0".to_string();
        let (keys, args, through) = (keys().to_path_buf(), Vec::new(), Vec::new());
        let export = vec!["--export".into(), format!("{}M", export.0).into()];
        let (namespace, group, old, limit, unprivileged) = (None, None, false, AGENT_LIMIT, None);
        AgentSetup {
            export,
            listen,
            keys,
            namespace,
            group,
            through,
            args,
            old,
            limit,
            unprivileged,
        }
    }

    /// Which follows its host, up to an amount.
    pub fn auto(ceiling: Mib) -> AgentSetup<'a> {
        let export = format!("auto:..{}M", ceiling.0);
        AgentSetup { export: vec!["--export".into(), export.into()], ..AgentSetup::new(ceiling) }
    }

    /// Whose export is told by a configuration file.
    pub fn configured(file: &Path) -> AgentSetup<'a> {
        let export = vec!["--config".into(), file.into()];
        AgentSetup { export, ..AgentSetup::new(Mib(0)) }
    }

    /// In a memory cgroup.
    pub fn within(mut self, group: &'a MemoryGroup) -> AgentSetup<'a> {
        self.group = Some(group);
        self
    }

    /// Inside a network namespace, on its address.
    pub fn inside(mut self, namespace: &'a Namespace) -> AgentSetup<'a> {
        self.listen = format!("{}:7400", namespace.inner_addr());
        self.namespace = Some(namespace);
        self
    }

    /// On this address.
    pub fn listen(mut self, addr: SocketAddr) -> AgentSetup<'a> {
        self.listen = addr.to_string();
        self
    }

    /// With the keys of another cluster.
    pub fn keys(mut self, dir: impl Into<PathBuf>) -> AgentSetup<'a> {
        self.keys = dir.into();
        self
    }

    /// Which speaks the version of the protocol before this one's.
    pub fn old(mut self) -> AgentSetup<'a> {
        self.old = true;
        self
    }

    /// For longer than most tests need one.
    pub fn limit(mut self, limit: Duration) -> AgentSetup<'a> {
        self.limit = self.limit.max(limit);
        self
    }

    /// As the user nobody, without any capability, now or later. `copy` is the program, the keys are nobody's.
    pub fn as_nobody(mut self, copy: PathBuf) -> AgentSetup<'a> {
        self.unprivileged = Some(copy);
        self
    }

    /// Run by another program, which is given its command line.
    pub fn through(
        mut self,
        line: impl IntoIterator<Item = impl Into<OsString>>,
    ) -> AgentSetup<'a> {
        self.through = line.into_iter().map(Into::into).collect();
        self
    }

    /// With further options.
    pub fn args<const N: usize>(mut self, args: [&str; N]) -> AgentSetup<'a> {
        self.args.extend(args.map(String::from));
        self
    }

    /// Starts it and waits until it listens.
    pub fn start(self) -> AgentProc {
        let mut argv: Vec<OsString> = Vec::new();
        if let Some(namespace) = self.namespace {
            argv.extend(namespace.enter());
        }
        argv.extend(self.group.iter().flat_map(|group| group.enter()));
        argv.extend(self.through);
        match self.unprivileged {
            None => argv.push(binary("gms-agent").into()),
            Some(copy) => {
                argv.push(tool("setpriv").into());
                argv.extend(RIGHTLESS.split(' ').map(Into::into));
                argv.push(copy.into());
            }
        }
        argv.extend(self.export);
        argv.extend(["--listen", &self.listen, "--keys"].map(Into::into));
        argv.push(self.keys.into());
        argv.extend(self.args.iter().map(Into::into));
        // No test waits for the default of a minute.
        if !self.args.iter().any(|arg| arg == "--drain") {
            argv.extend(["--drain", "2"].map(Into::into));
        }
        let program = Program::new(argv).env("NO_COLOR", "1").watch(Watch::Nobody);
        let program = if self.old { program.env("GMS_AGENT_OLD_PROTOCOL", "1") } else { program };
        let proc = program.limit(self.limit).spawn();
        let addr = proc.wait_error("where it listens", READY_LIMIT, |log| {
            log.split_inclusive('\n')
                .filter(|line| line.ends_with('\n') && line.contains("listening"))
                .find_map(address_in)
        });
        AgentProc { proc, addr }
    }
}

/// The first IPv4 socket address in a line.
fn address_in(line: &str) -> Option<SocketAddr> {
    let words = line.split(|c: char| !c.is_ascii_digit() && c != '.' && c != ':');
    words
        .filter_map(|word| word.trim_matches(':').parse::<SocketAddrV4>().ok())
        .map(SocketAddr::V4)
        .next()
}

/// A running agent; killed when dropped.
pub struct AgentProc {
    proc: Proc,
    addr: SocketAddr,
}

impl AgentProc {
    /// An agent with room for `export` of pages, on the loopback.
    pub fn start(export: Mib) -> AgentProc {
        AgentSetup::new(export).start()
    }

    /// `HOST:PORT`, as `--agent` takes it.
    pub fn addr(&self) -> String {
        self.addr.to_string()
    }

    /// Its log so far.
    pub fn log(&self) -> String {
        self.proc.errors()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        self.proc.signal(signal);
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.proc.pid()
    }

    /// Puts a wrong byte into every page that it holds; of what comes later into none, so that pages are waited for before.
    pub fn spoil_frames(&self) {
        // Else its pager might see the first and let go of the rest.
        let spoil = || while_stopped(self.pid(), || procfs::spoil(self.pid())).expect("its memory");
        let some = || Some(spoil()).filter(|&count| count > 0);
        let spoiled = poll_until("pages in the agent's memory", Duration::from_secs(10), some);
        assert!(spoiled > 1000, "it holds {spoiled} pages only");
    }

    /// How many pieces of what the C programs write (`check.h`) are in its memory.
    pub fn plaintext(&self) -> u64 {
        while_stopped(self.pid(), || procfs::patterns(self.pid())).expect("its memory")
    }

    /// Kills it without warning.
    pub fn kill(self) {
        self.proc.signal(Signal::SIGKILL);
        self.proc.finish();
    }

    /// Asks it to end, and waits.
    pub fn terminate(self) -> Outcome {
        self.proc.signal(Signal::SIGTERM);
        self.proc.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_found_in_any_log_format() {
        let expected = Some("127.0.0.1:7400".parse().unwrap());
        for line in [
            "INFO listening addr=127.0.0.1:7400 export=64M",
            "{\"level\":\"INFO\",\"message\":\"listening\",\"addr\":\"127.0.0.1:7400\"}",
            "\u{1b}[32m INFO\u{1b}[0m listening on 127.0.0.1:7400: 3 frames",
        ] {
            assert_eq!(address_in(line), expected, "{line}");
        }
        assert_eq!(address_in("listening at 10:20:30 with 1.2.3"), None);
    }
}
