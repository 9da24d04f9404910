//! `gms` command lines.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use crate::agent::AgentProc;
use crate::census::Watch;
use crate::keys::keys;
use crate::mib::Mib;
use crate::program::{Outcome, Proc, Program};
use crate::stage::{Stage, binary};
use crate::stats::{Stats, Status};

/// How long the short commands (`keys`, `status`, `detach`) may take.
const SHORT_LIMIT: Duration = Duration::from_secs(20);

/// The `gms` binary.
pub fn gms_binary() -> PathBuf {
    binary("gms")
}

/// A command line of gms.
pub struct Gms {
    before: Vec<OsString>,
    program: Program,
    stats: Option<PathBuf>,
}

impl Gms {
    /// `gms run ... -- PROGRAM`, with its statistics in the directory of `stage`.
    pub fn run(stage: &Stage, program: &Program) -> Gms {
        let stats = stage.new_path("stats.json");
        let gms = Gms {
            before: vec![gms_binary().into(), "run".into()],
            program: program.clone(),
            stats: None,
        };
        Gms { stats: Some(stats.clone()), ..gms.arg("--stats").arg(stats) }
    }

    /// `gms attach PID --local ...`, with its statistics in the directory of `stage`.
    pub fn attach(stage: &Stage, pid: i32) -> Gms {
        let stats = stage.new_path("stats.json");
        let gms = Gms::line(["attach"]).arg(pid.to_string()).arg("--stats").arg(&stats);
        Gms { stats: Some(stats), program: Program::new::<_, OsString>([]), ..gms }
    }

    /// Any other command line.
    pub fn line<S: Into<OsString>>(args: impl IntoIterator<Item = S>) -> Gms {
        let before =
            std::iter::once(gms_binary().into()).chain(args.into_iter().map(Into::into)).collect();
        Gms { before, program: Program::new::<_, OsString>([]).limit(SHORT_LIMIT), stats: None }
    }

    /// Begun by a command that executes what follows, such as nohup.
    pub fn by(mut self, command: &str) -> Gms {
        self.before.insert(0, command.into());
        self
    }

    /// Adds an argument of gms.
    pub fn arg(mut self, arg: impl Into<OsString>) -> Gms {
        self.before.push(arg.into());
        self
    }

    /// With another limit on its time than such commands have.
    pub fn limit(mut self, limit: Duration) -> Gms {
        self.program = self.program.limit(limit);
        self
    }

    /// `--local`.
    pub fn local(self, budget: Mib) -> Gms {
        self.arg("--local").arg(format!("{}M", budget.0))
    }

    /// `--agent` for each, and their keys.
    pub fn agents(mut self, agents: &[&AgentProc]) -> Gms {
        for agent in agents {
            self = self.arg("--agent").arg(agent.addr());
        }
        self.arg("--keys").arg(keys())
    }

    /// `--redundancy`.
    pub fn redundancy(self, what: &str) -> Gms {
        self.arg("--redundancy").arg(what)
    }

    /// Starts it.
    pub fn spawn(&self) -> Proc {
        let mut before = self.before.clone();
        if before[1] == "run" {
            before.push("--".into());
        }
        self.program.wrapped(before).watch(Watch::Below).spawn()
    }

    /// Runs it to its end and reads its statistics.
    pub fn finish(&self) -> Outcome {
        self.finish_proc(self.spawn())
    }

    /// Runs a line that has its command already.
    pub fn finish_as_is(&self) -> Outcome {
        self.program.wrapped(self.before.clone()).watch(Watch::Below).finish()
    }

    /// Waits for the end of `proc`, which [`Gms::spawn`] started, and reads its statistics.
    pub fn finish_proc(&self, proc: Proc) -> Outcome {
        let mut outcome = proc.finish();
        if let Some(file) = self.stats.as_ref().filter(|file| file.exists()) {
            outcome.stats = Some(Stats::read(file).unwrap_or_else(|error| outcome.fail(&error)));
        }
        outcome
    }
}

/// What `gms status PID --json` says: `pid` is the root of a workload, its pager, or the gms that was started.
pub fn status_of(pid: i32) -> Option<Status> {
    let outcome = Gms::line(["status", "--json"]).arg(pid.to_string()).finish();
    if outcome.code == Some(1) {
        return None; // nothing is paged under this process id
    }
    let outcome = outcome.expect_code(0);
    let list: Vec<Status> = serde_json::from_slice(&outcome.stdout)
        .unwrap_or_else(|error| outcome.fail(&error.to_string()));
    list.into_iter().next()
}
