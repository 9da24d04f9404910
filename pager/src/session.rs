//! A session: one workload (a process tree) paged under one budget by this process.
//!
//! Threads do it: `fault` threads serve, `evict` measures and makes room. They share the tables behind one short-held lock (`shared`), and each
//! has its own client of the agents. Each address space is served by one fault thread (`homes`).

mod figures;
mod hand_over;
mod lanes;

use std::collections::BTreeMap;
use std::net::ToSocketAddrs;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use crossbeam_channel::{Receiver, Sender, unbounded};
use gms_policy::ids::{AgentId, Bytes};
use gms_transport::client::{AgentAddress, Client, ClientEvent, Roster, Seal};
use gms_transport::keys::{self, Identity, Role};
use gms_transport::message::WorkloadId;
use gms_transport::quic::Quic;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use self::figures::stats;
pub use self::hand_over::SessionRecord;
pub(crate) use self::hand_over::{Leave, Resumed};
use self::lanes::{Lanes, Secrets, sockets};
use crate::board;
use crate::config::{Disk, SessionConfig};
use crate::evict::EvictThread;
use crate::evictor;
use crate::fault::FaultThread;
use crate::homes::FaultCommand;
use crate::kernel::proc;
use crate::own_agent::{Kind, OwnAgent};
use crate::privilege::Part;
use crate::pulse::Pulse;
use crate::reminder::Reminder;
use crate::shared::{Commands, Gauges, Outcome, Shared};
use crate::speech::{self, note, say};
use crate::stats::Stats;
use crate::stopped;
use crate::sync::lock;
use crate::trace::Trace;
use crate::tree::Root;

/// Name of the embedded agent.
const EMBEDDED: &str = "embedded";
/// For an agent to answer before the command starts.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// For the other agents to answer once one has.
const OTHERS_DEADLINE: Duration = Duration::from_secs(1);
/// Between two looks at the links' timers; packets wake at once.
const CONNECT_LOOK_MS: u8 = 5;
/// Between two looks whether a thread has ended.
const JOIN_LOOK: Duration = Duration::from_micros(500);
/// For the threads to end: longer than all that the end of one waits for, and what it may have begun before.
const END_DEADLINE: Duration = Duration::from_secs(20);
/// For the report of a panic to be read: the workload waits for its pages meanwhile.
const REPORT_DEADLINE: Duration = Duration::from_secs(1);

/// Why a session cannot start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// An agent could not be used; the text names it and says what to do.
    #[error("agent {addr}: {reason}")]
    Agent {
        /// Address as given.
        addr: String,
        /// What went wrong and what to do.
        reason: String,
    },
    /// The process cannot be paged.
    #[error("process {pid}: {reason}")]
    Process {
        /// The process.
        pid: i32,
        /// What went wrong and what to do.
        reason: String,
    },
    /// Anything else that ends the session.
    #[error("{0}")]
    Fatal(String),
}

/// What the threads start with.
struct Parts {
    commands: Commands,
    trace: Option<Trace>,
    reminder: Option<Reminder>,
    /// Of each fault thread.
    demand: Vec<Client<Quic>>,
    bulk: Client<Quic>,
}

/// All threads, before they run.
struct Threads {
    evict: EvictThread<Quic>,
    /// Of each fault thread.
    fault: Vec<Receiver<FaultCommand>>,
    demand: Vec<Client<Quic>>,
    trace: Option<Trace>,
}

/// Threads that wait to begin.
struct Ready {
    gate: Sender<()>,
    count: usize,
}

impl Ready {
    fn begin(self) {
        for _ in 0..self.count {
            // Fails only if all have ended.
            let _ = self.gate.send(());
        }
    }
}

/// One workload under one budget.
pub struct Session {
    shared: Arc<Shared>,
    parts: Mutex<Option<Parts>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    own: Option<(AgentId, Arc<OwnAgent>)>,
    secrets: Arc<Secrets>,
}

impl Session {
    /// Connects to the agents before the command starts, with a deadline of 5 s, or starts the embedded one, for whose links nobody waits.
    /// An agent that does not answer is told and used once it does, as long as another answers.
    pub fn prepare(mut config: SessionConfig) -> Result<Session, SessionError> {
        abort_on_panic();
        // Before there is a key: it is in no core dump, and no other process of the user reads it.
        nix::sys::prctl::set_dumpable(false)
            .map_err(|e| SessionError::Fatal(format!("gms cannot guard its memory: {e}")))?;
        let trace = config.trace.as_deref().and_then(open_trace);
        let Peers { identity, agents, own } = peers(&config)?;
        // Sockets first, then all rights that nothing needs any more are given up, and only then threads are started.
        let sockets = sockets(&identity, &agents, 1 + config.fault_threads)?;
        // Keys made for an embedded agent are nobody's to renew.
        let reminder =
            (!config.is_embedded()).then(|| Reminder::new(Instant::now(), identity.clone()));
        give_up_rights()?;
        let mut random = [0u8; 24];
        // SAFETY: the kernel fills the array, which is live and of this length.
        if unsafe { libc::getrandom(random.as_mut_ptr().cast(), random.len(), 0) } != 24 {
            return Err(SessionError::Fatal("the kernel gives no random numbers".into()));
        }
        let mut workload = WorkloadId([0; 16]);
        workload.0.copy_from_slice(&random[..16]);
        let seed = random[16..].iter().fold(0, |seed, &byte| seed << 8 | u64::from(byte));
        // Every lane has the same key, and nobody else has it.
        let seal = config.seal.then(|| Seal::new(workload).map(Arc::new)).transpose();
        let seal = seal.map_err(|e| SessionError::Fatal(format!("no key for the pages: {e}")))?;
        let roster = Roster::new(&agents);
        let lanes = Lanes { workload, agents: &agents, roster: &roster, seal: seal.as_ref() };
        let client = |socket| lanes.client(socket, seed, |lane| lane);
        let mut greetings = Vec::new();
        let mut clients: Vec<Client<Quic>> = sockets.into_iter().map(client).collect();
        if !config.is_embedded() {
            let missing = connect(&mut clients, &mut greetings)?;
            config.agents.extend(roster.learned());
            warn_of(&missing, roster.count(), config.quiet);
            are_enough(&config)?;
        }
        let bulk = clients.remove(0);
        let demand = clients;
        let (shared, commands) = Shared::new(config, seed)
            .map_err(|e| SessionError::Fatal(format!("cannot set up the page map: {e}")))?;
        for (agent, session) in greetings {
            shared.agent_up(agent, bulk.lane().name(agent), session);
        }
        let parts = Mutex::new(Some(Parts { commands, trace, reminder, demand, bulk }));
        // Whoever was told of meanwhile comes behind it.
        let own = own.map(|own| (AgentId((agents.len() - 1) as u8), Arc::new(own)));
        let secrets = Arc::new(Secrets { identity, workload, seal, roster });
        Ok(Session { shared, parts, threads: Mutex::default(), own, secrets })
    }

    /// Begins to page the tree below `root`. If that was running before (`gms attach`), a process that cannot be paged
    /// is an error instead of being left resident.
    pub fn adopt(&self, root: Root) -> Result<(), SessionError> {
        let Some(parts) = lock(&self.parts).take() else {
            return Err(SessionError::Fatal("the session has a workload already".into()));
        };
        let pid = root.pid();
        let Parts { commands, trace, reminder, demand, bulk } = parts;
        let (command, key_until) =
            (proc::command_line(pid), reminder.as_ref().map(Reminder::expires));
        let gauges = Gauges { root: pid, command, key_until, ..Gauges::default() };
        *lock(&self.shared.gauges) = gauges.clone();
        let mut evict = EvictThread::new(self.shared.clone(), commands.evict, bulk, root, gauges);
        evict.reminder = reminder;
        evict.watch(self.own.clone());
        self.ready(Threads { evict, fault: commands.fault, demand, trace })?.begin();
        Ok(())
    }

    /// Starts the threads, which wait until they are to begin, and end if that is never.
    fn ready(&self, threads: Threads) -> Result<Ready, SessionError> {
        let Threads { evict, fault, demand, mut trace } = threads;
        let mut faults = Vec::new();
        for (n, (commands, client)) in fault.into_iter().zip(demand).enumerate() {
            // The first fault thread keeps the trace.
            let fault = FaultThread::new(self.shared.clone(), n, commands, client, trace.take())
                .map_err(|e| SessionError::Fatal(format!("cannot wait for faults: {e}")))?;
            faults.push(fault);
        }
        let (gate, awaits) = unbounded();
        let count = faults.len() + 1;
        for (n, fault) in faults.into_iter().enumerate() {
            let name = if n == 0 { "fault".into() } else { format!("fault-{n}") };
            self.spawn(&name, awaits.clone(), move || fault.run())?;
        }
        self.spawn("evict", awaits, move || evict.run())?;
        Ok(Ready { gate, count })
    }

    fn spawn(
        &self,
        name: &str,
        awaits: Receiver<()>,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<(), SessionError> {
        let begin = move || {
            if awaits.recv().is_ok() {
                run();
            }
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(begin);
        let thread =
            thread.map_err(|e| SessionError::Fatal(format!("cannot start a thread: {e}")))?;
        lock(&self.threads).push(thread);
        Ok(())
    }

    /// Asks for all pages to be brought home and the workload to be left running; `fd` becomes readable when done.
    pub fn detach(&self) {
        self.shared.detaching.store(true, Ordering::Relaxed);
        board::withdraw();
        self.shared.kick_evict();
    }

    /// Has the workload killed.
    pub fn fail(&self, reason: &str) {
        self.shared.fail(reason);
    }

    /// Readable once [`Session::outcome`] is set.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.shared.done_fd()
    }

    /// How the session ended, if it did.
    pub fn outcome(&self) -> Option<Outcome> {
        self.shared.outcome()
    }

    /// The figures now. Cheap enough for once a second.
    pub fn stats(&self) -> Stats {
        stats(&self.shared)
    }

    /// Ends the threads, frees the workload's frames at the agents (deadline 2 s) and returns the last figures. If a thread does not end, the process
    /// does.
    pub fn finish(self) -> Stats {
        board::withdraw();
        self.shared.stop.store(true, Ordering::Relaxed);
        evictor::hurry();
        self.shared.homes.kick_all();
        self.shared.kick_evict();
        join(lock(&self.threads).drain(..), END_DEADLINE);
        // A command that ended before it was adopted had no fault thread, which writes the trace otherwise.
        let trace = lock(&self.parts).take().and_then(|parts| parts.trace);
        if let Some(Err(error)) = trace.map(Trace::write) {
            say(format!("--trace: cannot be written: {error}"));
        }
        stats(&self.shared)
    }
}

/// Waits for the threads. One that sleeps in the kernel may never end: then this process does, no other goes on, and wills and keeper end the workload.
fn join(threads: impl Iterator<Item = JoinHandle<()>>, limit: Duration) {
    let now = Instant::now();
    let (mut pulse, mut deadline) = (Pulse::new(now), now + limit);
    for thread in threads {
        while !thread.is_finished() {
            // It may need that (see there).
            stopped::reap_ended();
            std::thread::park_timeout(JOIN_LOOK);
            let now = Instant::now();
            deadline += pulse.beat(now, JOIN_LOOK);
            if now > deadline {
                let name = thread.thread().name().unwrap_or_default();
                give_up(&format!("the {name} thread does not end: gms ends without it"));
            }
        }
        // A panic has aborted the process already.
        let _ = thread.join();
    }
}

/// Ends the process at once, but for the time in which what it says can be read.
fn give_up(reason: &str) -> ! {
    die_alone();
    speech::begin();
    note(reason);
    speech::end();
    std::process::abort()
}

/// No other pager goes on. The workload is ended when our descriptors are closed, which a core dump delays.
fn die_alone() {
    board::withdraw();
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel reads one live rlimit.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const none) };
}

/// A pager thread that panics must not leave the workload waiting for ever, or half served: the process ends, no other goes on,
/// and the evictors stop the workload.
fn abort_on_panic() {
    board::withdraw_on_errors();
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        die_alone();
        // Perhaps nobody reads the report.
        let _ = std::thread::Builder::new().spawn(|| {
            std::thread::sleep(REPORT_DEADLINE);
            std::process::abort();
        });
        report(info);
        std::process::abort();
    }));
}

/// A file that cannot be written is told, and changes nothing else.
fn open_trace(path: &Path) -> Option<Trace> {
    let cannot = |error: &std::io::Error| {
        say(format!("--trace: {} cannot be written: {error}", path.display()));
    };
    Trace::create(path).inspect_err(cannot).ok()
}

/// The agents to use, and the key for them.
struct Peers {
    identity: Identity,
    agents: Vec<AgentAddress>,
    /// The last of the agents, if it is the session's own.
    own: Option<OwnAgent>,
}

fn peers(config: &SessionConfig) -> Result<Peers, SessionError> {
    if config.is_embedded() {
        return embedded(config.export_bytes);
    }
    let fatal = |reason: String| SessionError::Fatal(reason);
    let dir =
        config.keys.as_ref().ok_or_else(|| fatal("agents need keys: give --keys DIR".into()))?;
    let mut identity = keys::load(dir, Role::Client).map_err(|e| fatal(e.to_string()))?;
    let ends = identity.endings(SystemTime::now());
    ends.iter().filter(|_| !config.quiet).for_each(say);
    let (mut agents, mut unknown) = (Vec::<AgentAddress>::new(), Vec::new());
    for name in &config.agents {
        match resolve(name) {
            Ok(address) => {
                // It would count as two copies of a page.
                if let Some(same) = agents.iter().find(|same| same.socket == address.socket) {
                    return Err(fatal(format!(
                        "agents {} and {name} are one: both are {}; name it once",
                        same.name, address.socket
                    )));
                }
                agents.push(address);
            }
            Err(error) => unknown.push(error),
        }
    }
    let quiet = config.quiet || agents.is_empty();
    unknown.iter().filter(|_| !quiet).for_each(|error| say(format!("{error}; left out")));
    match unknown.into_iter().next() {
        Some(error) if agents.is_empty() => return Err(error),
        _ => {}
    }
    let mut own = None;
    if let Some(disk) = &config.disk {
        let (process, address, trusting) = on_disk(disk, &identity)?;
        (own, identity) = (Some(process), trusting);
        agents.push(address);
    }
    Ok(Peers { identity, agents, own })
}

/// The embedded agent alone.
fn embedded(bytes: u64) -> Result<Peers, SessionError> {
    let failed = |reason: String| SessionError::Agent { addr: EMBEDDED.into(), reason };
    let (node, identity) = keys::ephemeral().map_err(|e| failed(e.to_string()))?;
    let own = OwnAgent::spawn(Kind::Embedded, Bytes(bytes), &node).map_err(failed)?;
    let agents = vec![AgentAddress::new(EMBEDDED.into(), own.addr)];
    Ok(Peers { identity, agents, own: Some(own) })
}

/// An agent on a local disk, and our identity, which trusts it.
fn on_disk(
    disk: &Disk,
    client: &Identity,
) -> Result<(OwnAgent, AgentAddress, Identity), SessionError> {
    let name = format!("on the disk at {}", disk.dir.display());
    let failed = |reason: String| SessionError::Agent { addr: name.clone(), reason };
    let (node, client) = keys::beside(client).map_err(|e| failed(e.to_string()))?;
    let process =
        OwnAgent::spawn(Kind::Disk(&disk.dir), Bytes(disk.bytes), &node).map_err(failed)?;
    let address = AgentAddress::new(name, process.addr).last_resort();
    Ok((process, address, client))
}

fn give_up_rights() -> Result<(), SessionError> {
    let cannot = |e| SessionError::Fatal(format!("gms cannot give up its capabilities: {e}"));
    Part::Pager.give_up_rest().map_err(cannot)
}

/// The address of an agent.
pub(crate) fn resolve(name: &str) -> Result<AgentAddress, SessionError> {
    let failed = |reason: String| SessionError::Agent { addr: name.to_owned(), reason };
    let mut found = name
        .to_socket_addrs()
        .map_err(|e| failed(format!("cannot be resolved ({e}): give HOST:PORT")))?;
    let socket = found.next().ok_or_else(|| failed("has no address: give HOST:PORT".into()))?;
    Ok(AgentAddress::new(name.to_owned(), socket))
}

/// Whether so many copies as were asked for can be made by the agents that there are.
fn are_enough(config: &SessionConfig) -> Result<(), SessionError> {
    let (redundancy, agents) = (config.redundancy, config.agents.len());
    let copies = redundancy.copies(agents) as usize;
    if copies <= agents {
        return Ok(());
    }
    let known = if agents == 1 { "1 is known" } else { &format!("{agents} are known") };
    Err(SessionError::Fatal(format!(
        "--redundancy {redundancy} needs at least {copies} agents, {known}: add --agent, or say --redundancy none"
    )))
}

/// An agent which does not answer at the start, and why.
struct Missing {
    name: String,
    reason: String,
}

/// Waits until every client has a link to every agent, or for the time that agents have to answer. One agent of each client is enough;
/// the others are returned. Agents that those tell of are used like those that the user named. `greetings` gets the sessions that agents give meanwhile.
fn connect(
    clients: &mut [Client<Quic>],
    greetings: &mut Vec<(AgentId, u64)>,
) -> Result<Vec<Missing>, SessionError> {
    let mut deadline = Instant::now() + CONNECT_DEADLINE;
    let mut failed: BTreeMap<AgentId, String> = BTreeMap::new();
    let (mut usable, mut asked) = (false, false);
    loop {
        let now = Instant::now();
        let mut has_learned = false;
        for client in clients.iter_mut() {
            for event in drive(client, now).map_err(|e| SessionError::Fatal(format!("UDP: {e}")))? {
                match event {
                    ClientEvent::Up { agent, session } => greetings.push((agent, session)),
                    ClientEvent::Down { agent, reason } => drop(failed.insert(agent, reason)),
                    ClientEvent::Members { agent, members } => {
                        let lane = client.lane();
                        lane.roster().learn(lane.name(agent), &members);
                        (asked, has_learned) = (false, true);
                    }
                    _ => {}
                }
            }
        }
        let is_up = |agent| clients.iter().all(|client| client.lane().is_up(agent));
        let (up, away): (Vec<AgentId>, Vec<AgentId>) =
            clients[0].lane().agents().partition(|&a| is_up(a));
        let last = clients[0].lane().last_resorts();
        if up.iter().any(|&agent| !last.has(agent)) && !usable {
            (usable, deadline) = (true, deadline.min(now + OTHERS_DEADLINE));
            asked = clients[0].ask_members(now);
            clients[0].flush(now).map_err(|e| SessionError::Fatal(format!("UDP: {e}")))?;
        }
        // Those that were told of are called in the next turn.
        let waits = asked || has_learned;
        if !waits && away.iter().all(|agent| failed.contains_key(agent)) || now > deadline {
            let name = |agent| clients[0].lane().name(agent).to_owned();
            let missing = away.iter().map(|&agent| {
                let late = || format!("does not answer: {}", clients[0].lane().reason(agent));
                let reason = failed.remove(&agent).unwrap_or_else(late);
                Missing { name: name(agent), reason }
            });
            let missing: Vec<Missing> = missing.collect();
            return if usable { Ok(missing) } else { Err(none_answers(missing)) };
        }
        let mut fds = Vec::from_iter(
            clients.iter().map(|client| PollFd::new(client.fd(), PollFlags::POLLIN)),
        );
        // Woken by a packet; otherwise the transport's timers are looked at.
        let _ = poll(&mut fds, PollTimeout::from(CONNECT_LOOK_MS));
    }
}

/// Lets a client receive and send; returns what it tells.
fn drive(client: &mut Client<Quic>, now: Instant) -> std::io::Result<Vec<ClientEvent>> {
    client.drive(now)?;
    let events = std::iter::from_fn(|| client.poll(now)).collect();
    client.flush(now)?;
    Ok(events)
}

fn none_answers(missing: Vec<Missing>) -> SessionError {
    let others = missing.len().saturating_sub(1);
    match missing.into_iter().next() {
        None => SessionError::Fatal("no agent is given".into()),
        Some(Missing { name, reason }) if others == 0 => SessionError::Agent { addr: name, reason },
        Some(Missing { name, reason }) => {
            let reason = format!("{reason} (and {others} more do not answer)");
            SessionError::Agent { addr: name, reason }
        }
    }
}

fn warn_of(missing: &[Missing], agents: usize, quiet: bool) {
    let answering = agents - missing.len();
    for Missing { name, reason } in missing.iter().filter(|_| !quiet) {
        say(format!(
            "agent {name}: {reason}; going on with {answering} of {agents}, it is used once it answers"
        ));
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};

    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use nix::unistd::{pipe2, write};

    use super::*;

    const TOLD: &str = "GMS_TEST_FAILS";

    /// Nothing, but in the processes that the next tests start.
    #[test]
    fn fails_if_told_to() {
        match std::env::var(TOLD).as_deref() {
            Ok("panic") => {
                abort_on_panic();
                panic!("as told");
            }
            Ok("guard") => {
                let session = Session::prepare(config()).expect("a session of its own agent");
                assert!(!nix::sys::prctl::get_dumpable().expect("an answer"));
                session.finish();
            }
            Ok("stand") => {
                let sleeper = || {
                    loop {
                        std::thread::park();
                    }
                };
                let thread = std::thread::Builder::new().name("evict".into()).spawn(sleeper);
                join(std::iter::once(thread.unwrap()), Duration::from_millis(20));
            }
            _ => {}
        }
    }

    fn config() -> SessionConfig {
        SessionConfig {
            redundancy: Default::default(),
            budget_bytes: 64 << 20,
            page_shift: 12,
            fault_threads: 1,
            agents: Vec::new(),
            keys: None,
            seal: true,
            export_bytes: 1 << 20,
            when_full: Default::default(),
            disk: None,
            trace: None,
            verbose: false,
            quiet: true,
        }
    }

    #[test]
    fn the_key_of_a_session_is_in_no_core_dump() {
        let output = that_fails("guard").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    fn that_fails(how: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "--nocapture", "session::tests::fails_if_told_to"])
            .env(TOLD, how)
            .stdout(Stdio::null());
        command
    }

    #[test]
    fn a_thread_that_does_not_end_is_told_and_ends_the_process() {
        let output = that_fails("stand").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("the evict thread does not end"), "{said}");
        assert_eq!(output.status.signal(), Some(libc::SIGABRT));
    }

    #[test]
    fn a_panic_that_nobody_reads_ends_the_process() {
        ends_unread("panic");
    }

    #[test]
    fn a_thread_that_does_not_end_ends_the_process_though_nobody_reads_it() {
        ends_unread("stand");
    }

    fn ends_unread(how: &str) {
        let (reader, writer) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).unwrap();
        while write(&writer, &[b'x'; 4096]).is_ok() {}
        fcntl(&writer, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
        let mut process = that_fails(how).stderr(writer).spawn().unwrap();
        let mut writers = [PollFd::new(reader.as_fd(), PollFlags::empty())];
        assert_eq!(
            poll(&mut writers, PollTimeout::from(10_000_u16)),
            Ok(1),
            "it waits for a reader"
        );
        assert_eq!(process.wait().unwrap().signal(), Some(libc::SIGABRT));
    }
}
