//! A program's fixed job: how long it takes in a room, and whether its result is right.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Instant;

use serde_json::Value;
use xxhash_rust::xxh3::Xxh3;

use super::redis;
use crate::error::{BenchError, Trying};
use crate::room::{Room, Running, SECONDS_MAX, Used};
use crate::stack::read;
use crate::workload::{Orders, bfs};

/// How often a job is run again of which the kernel has killed a part: see `peers::race`.
const STARVED_MAX: u32 = 8;

/// What is run.
pub(crate) enum Job {
    /// This command; its time is that from start to end, its result what it prints.
    Print(Vec<OsString>),
    /// gms-bench's own searches in a graph; their time and result are what they say.
    Search(bfs::Orders, PathBuf),
    /// A server and a client; the time is that of the client's requests, the result all replies.
    Serve(redis::Job),
}

/// What one run of a job gave.
pub(crate) struct Outcome {
    /// How long it took.
    pub seconds: f64,
    /// Of its result.
    pub digest: u64,
    /// See [`Used::anon_mib`].
    pub anon_mib: f64,
    /// See [`Used::charged_mib`].
    pub charged_mib: f64,
    /// gms's own figures.
    pub gms: Option<Value>,
    /// How often it was run again because the kernel had killed a part of it.
    pub starved: u32,
}

/// How a run ended.
pub(crate) enum Ended {
    /// Well.
    Done(Outcome),
    /// It was killed, for this reason.
    Killed(String),
}

impl Ended {
    /// What it gave; that it was killed is an error.
    pub(crate) fn done(self) -> Result<Outcome, BenchError> {
        match self {
            Ended::Done(outcome) => Ok(outcome),
            Ended::Killed(why) => Err(failed(why)),
        }
    }
}

impl Job {
    /// Runs it.
    pub(crate) fn run(&self, room: Room) -> Result<Ended, BenchError> {
        for starved in 0..STARVED_MAX {
            let (result, used) = match self {
                Job::Print(line) => print(line, room)?,
                Job::Search(orders, found) => search(orders, found, room)?,
                Job::Serve(job) => serve(job, room)?,
            };
            if used.late {
                return Ok(Ended::Killed(format!("was not done in {SECONDS_MAX} s")));
            }
            if used.starved && matches!(room, Room::Swap(_)) {
                continue;
            }
            let (seconds, digest) = result?;
            if !used.status.success() {
                return Err(failed(format!("ended with {}", used.status)));
            }
            let Used { anon_mib, charged_mib, gms, .. } = used;
            return Ok(Ended::Done(Outcome {
                seconds,
                digest,
                anon_mib,
                charged_mib,
                gms,
                starved,
            }));
        }
        let text = format!("was killed {STARVED_MAX} times for want of memory: see dmesg");
        Ok(Ended::Killed(text))
    }
}

fn failed(problem: String) -> BenchError {
    BenchError::Program { program: "the job".into(), problem }
}

/// Time and digest, which count only if the program ended well, and how it ended.
type Run = (Result<(f64, u64), BenchError>, Used);

fn print(line: &[OsString], room: Room) -> Result<Run, BenchError> {
    let start = Instant::now();
    let mut running = room.start(room.command(line).stdout(Stdio::piped()))?;
    let mut digest = Xxh3::new();
    if let Some(mut printed) = running.process.0.stdout.take() {
        let mut part = vec![0; 1 << 16];
        loop {
            match printed.read(&mut part).trying("cannot read what the job prints")? {
                0 => break,
                count => digest.update(&part[..count]),
            }
        }
    }
    let used = running.finish()?;
    Ok((Ok((start.elapsed().as_secs_f64(), digest.digest())), used))
}

fn search(orders: &bfs::Orders, path: &Path, room: Room) -> Result<Run, BenchError> {
    let line = Orders::Bfs(orders.clone()).command(path)?;
    let used = room.start(&mut room.command(&line))?.finish()?;
    Ok((read(path).map(|found: bfs::Found| (found.seconds, found.digest)), used))
}

fn serve(job: &redis::Job, room: Room) -> Result<Run, BenchError> {
    let mut running: Running = room.start(room.command(&job.server()).stdout(Stdio::piped()))?;
    let result = job.talk(&mut running.process.0);
    if result.is_err() {
        running.kill()?;
    }
    Ok((result, running.finish()?))
}
