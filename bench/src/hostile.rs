//! `gms-bench hostile`: what a client reads from an agent of which another one takes all that it gets, each with a key of its own.
//!
//! Three machines on two CPUs: the agent has one of them, the clients share the other, on which the neighbour goes first whenever it has something to do.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gms_transport::keys::{self, Role};
use gms_transport::message::{DISCARD_MAX, PAGE_LEN, PAGES_MAX, Status, WorkloadId};
use gms_transport::{Control, Event, LinkId, Quic, Transport};
use nix::errno::Errno;
use nix::time::{ClockId, clock_gettime};

use crate::cli::{Asks, HostileOptions};
use crate::error::{BenchError, Trying};
use crate::floor::quic::{bad_keys, failed, pause, unexpected};
use crate::network::Network;
use crate::placement::{Pinned, Wait, two_cpus};
use crate::report::{Report, Target};
use crate::samples::Samples;
use crate::stack::Stack;
use crate::turn::rotated;

/// Least part of its reads that a neighbour keeps, beside who takes as much of the CPUs and asks nothing of the agent.
const KEPT: f64 = 0.8;
/// Pages of each client.
const PAGES: u64 = 2048;
/// Time of one measurement, usual and `--quick`, in ms.
const SLICE_MS: (usize, usize) = (2000, 200);
/// For the agent to get over what was asked for before.
const PAUSE: Duration = Duration::from_millis(200);
/// An exchange, or a handshake, that takes longer has failed.
const LOST: Duration = Duration::from_secs(10);
/// Who takes CPU time does so in periods of this length.
const PERIOD: Duration = Duration::from_millis(1);
/// Reads one after the other, each so long after the one before. The first is not measured.
#[derive(Clone, Copy)]
struct Rhythm {
    reads: u32,
    apart: Duration,
}

/// Of a neighbour that works on what it has read, of one that hardly does, and of one that works on each page.
const RHYTHMS: [Rhythm; 3] = [
    Rhythm { reads: 4, apart: Duration::ZERO },
    Rhythm { reads: 64, apart: Duration::ZERO },
    Rhythm { reads: 16, apart: Duration::from_micros(100) },
];
/// Of who reads a page now and then.
const NOW_AND_THEN: Rhythm = Rhythm { reads: 1, apart: Duration::ZERO };
/// The time after them in which others have the CPU.
const REST: Duration = Duration::from_micros(200);
/// Memory of the agent in MiB.
const EXPORT_MIB: u32 = 256;

impl Asks {
    const ALL: [Asks; 5] = [Asks::Gets, Asks::Scans, Asks::Puts, Asks::Discards, Asks::Sessions];

    fn name(self) -> &'static str {
        match self {
            Asks::Gets => "gets",
            Asks::Scans => "scans",
            Asks::Puts => "puts",
            Asks::Discards => "discards",
            Asks::Sessions => "sessions",
        }
    }
}

/// Measures.
pub(crate) fn run(
    options: &HostileOptions,
    network: &Network,
    report: &mut Report,
) -> Result<(), BenchError> {
    let slice = Duration::from_millis(options.effort.count(SLICE_MS.0, SLICE_MS.1) as u64);
    for run in 0..options.effort.runs() {
        let kinds =
            Asks::ALL.into_iter().filter(|kind| options.only.is_none_or(|only| only == *kind));
        for kind in rotated(kinds, run) {
            report.run(kind.name(), |report| once(options, (network, kind), slice, report))?;
        }
    }
    Ok(())
}

fn once(
    options: &HostileOptions,
    (network, kind): (&Network, Asks),
    slice: Duration,
    report: &mut Report,
) -> Result<(), BenchError> {
    let cpus = two_cpus()?.ok_or_else(|| BenchError::Refused("there is one CPU only".into()))?;
    let dir = options.programs.dir();
    let stack = Stack::start_over(network, Some(cpus.0), dir, 1, EXPORT_MIB)?;
    let _pinned = Pinned::to(Some(cpus.1))?;
    let (addr, dir) = (stack.addr()?, stack.path("keys"));
    let near = network.near();
    let mut neighbour = Client::new((near, addr), &dir, "neighbour")?;
    neighbour.begin()?;
    let mut attacker = Client::new((near, addr), &dir, "attacker")?;
    attacker.begin()?;
    let alone = neighbour.reads(slice, RHYTHMS[0])?;
    report.latency("alone", alone.latency());
    for rhythm in RHYTHMS {
        beside_it((&mut neighbour, &mut attacker), (kind, rhythm), slice, report)?;
    }
    now_and_then((&mut neighbour, &mut attacker), (kind, alone.latency().mean), slice, report)?;
    drop(neighbour);
    // What it costs that there are turns: two that both take all, and one alone.
    let mut another = Client::new((near, addr), &dir, "another")?;
    another.begin()?;
    let one = attacker.attack_for(kind, slice)?;
    let attack = |over: &AtomicBool| another.attack(kind, || over.load(Ordering::Relaxed));
    let (both, _) = beside(attack, || attacker.attack_for(kind, slice))?;
    let together = (both + another.answered) / one;
    report.figure(&format!("{}: two, of what one is answered", kind.name()), "x", together);
    Ok(())
}

/// What one that takes all keeps beside one that reads a page now and then, which takes so many us.
fn now_and_then(
    (light, heavy): (&mut Client, &mut Client),
    (kind, read_us): (Asks, f64),
    slice: Duration,
    report: &mut Report,
) -> Result<(), BenchError> {
    let attack = |over: &AtomicBool| heavy.attack(kind, || over.load(Ordering::Relaxed));
    beside(attack, || light.reads(slice, NOW_AND_THEN))?;
    let with = heavy.answered;
    let read = Duration::from_secs_f64(read_us / 1e6);
    let attack = |over: &AtomicBool| heavy.attack(kind, || over.load(Ordering::Relaxed));
    beside(attack, || burn_first(slice, read))?;
    let name = format!("{}: kept beside one that reads now and then", kind.name());
    report.judged(&name, "x", with / heavy.answered, Some(Target::AtLeast(KEPT)));
    Ok(())
}

/// Takes the CPU as one that reads a page now and then does, and asks for nothing.
fn burn_first(time: Duration, read: Duration) -> Result<(), BenchError> {
    let (_first, start) = (First::new()?, Instant::now());
    while start.elapsed() < time {
        spin(read);
        thread::sleep(REST);
    }
    Ok(())
}

fn spin(time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

/// What the neighbour keeps of its reads beside the other one.
fn beside_it(
    (neighbour, attacker): (&mut Client, &mut Client),
    (kind, rhythm): (Asks, Rhythm),
    slice: Duration,
    report: &mut Report,
) -> Result<(), BenchError> {
    let attack = |over: &AtomicBool| attacker.attack(kind, || over.load(Ordering::Relaxed));
    let (attacked, share) = beside(attack, || neighbour.reads(slice, rhythm))?;
    // Not counted: meanwhile the agent gets over what the other has asked for.
    neighbour.reads(PAUSE, rhythm)?;
    let (burdened, _) = beside(|over| burn(over, share), || neighbour.reads(slice, rhythm))?;
    let apart = rhythm.apart.as_micros();
    let apart = if apart > 0 { format!(", {apart} us apart") } else { String::new() };
    let name = format!("{}, {} in a row{apart}", kind.name(), rhythm.reads);
    report.latency(&format!("{name}: beside CPU taken"), burdened.latency());
    report.latency(&format!("{name}: beside it"), attacked.latency());
    report.figure(&format!("{name}: answered"), "/s", attacker.answered);
    report.figure(&format!("{name}: takes of a CPU"), "", share);
    let a_read = |samples: &Samples| rhythm.apart.as_micros() as f64 + samples.latency().mean;
    let kept = a_read(&burdened) / a_read(&attacked);
    report.judged(&format!("{name}: reads kept"), "x", kept, Some(Target::AtLeast(KEPT)));
    Ok(())
}

/// What `measure` finds while another thread does `work`, and the share of a CPU that it takes.
fn beside<T>(
    work: impl FnOnce(&AtomicBool) -> Result<(), BenchError> + Send,
    measure: impl FnOnce() -> Result<T, BenchError>,
) -> Result<(T, f64), BenchError> {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let (began, before) = (Instant::now(), cpu_time()?);
            work(&over)?;
            Ok((cpu_time()? - before).as_secs_f64() / began.elapsed().as_secs_f64())
        });
        let found = measure();
        over.store(true, Ordering::Relaxed);
        let share = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok((found?, share?))
    })
}

fn cpu_time() -> Result<Duration, BenchError> {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).trying("cannot read the clock")?;
    Ok(time.into())
}

/// Takes so much of a CPU.
fn burn(over: &AtomicBool, share: f64) -> Result<(), BenchError> {
    while !over.load(Ordering::Relaxed) {
        spin(PERIOD.mul_f64(share.min(1.0)));
        if share < 1.0 {
            thread::sleep(PERIOD.mul_f64(1.0 - share));
        }
    }
    Ok(())
}

/// The calling thread goes before all others of its CPU that are not like this, until this is dropped.
struct First;

impl First {
    fn set(policy: i32, priority: i32) -> Result<(), BenchError> {
        let param = libc::sched_param { sched_priority: priority };
        // SAFETY: a system call which reads what it is given.
        let rc = unsafe { libc::sched_setscheduler(0, policy, &raw const param) };
        Errno::result(rc).map(drop).trying("cannot go first (CAP_SYS_NICE is needed)")
    }

    fn new() -> Result<First, BenchError> {
        First::set(libc::SCHED_FIFO, 1).map(|()| First)
    }
}

impl Drop for First {
    fn drop(&mut self) {
        // It was so before.
        let _ = First::set(libc::SCHED_OTHER, 0);
    }
}

/// A client of the agent, with a key and a workload of its own.
struct Client {
    quic: Quic,
    link: LinkId,
    workload: WorkloadId,
    number: u64,
    page: Vec<u8>,
    wait: Wait,
    /// Of what it has asked for without end, answers a second.
    answered: f64,
}

impl Client {
    fn new(
        (near, addr): (Ipv4Addr, SocketAddr),
        keys: &Path,
        name: &str,
    ) -> Result<Client, BenchError> {
        let dir = keys::issue(keys, Role::Client, name).map_err(bad_keys)?;
        let identity = keys::load(&dir, Role::Client).map_err(bad_keys)?;
        let mut quic = Quic::client((near, 0).into(), &identity).map_err(failed)?;
        let link = quic.connect(Instant::now(), addr).map_err(failed)?;
        let mut id = [0; 16];
        id.iter_mut().zip(name.bytes()).for_each(|(to, byte)| *to = byte);
        Ok(Client {
            quic,
            link,
            workload: WorkloadId(id),
            number: 0,
            page: Vec::new(),
            wait: Wait::Block,
            answered: 0.0,
        })
    }

    /// Has a session with pages.
    fn begin(&mut self) -> Result<(), BenchError> {
        match self.event()? {
            Event::Connected { .. } => {}
            other => return Err(unexpected(&other)),
        }
        self.ask(&Control::hello(1, self.workload, 60_000), &[])?;
        for first in (0..PAGES).step_by(PAGES_MAX) {
            let (descriptors, pages) = pages(first);
            let put = Control::put(first, self.workload, PAGES_MAX as u16);
            self.ask(&put, &[&descriptors, &pages])?;
        }
        Ok(())
    }

    /// Random reads for `time`, and a rest after some. Meanwhile nobody else has the CPU, so that none but the agent is waited for.
    fn reads(&mut self, time: Duration, rhythm: Rhythm) -> Result<Samples, BenchError> {
        let _first = First::new()?;
        self.wait = Wait::Spin;
        let (start, mut samples, mut seed) = (Instant::now(), Samples::new(), 1_u64);
        while start.elapsed() < time {
            for read in 0..rhythm.reads {
                let began = Instant::now();
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let page = (seed >> 33) % PAGES;
                self.ask(&Control::get(seed, self.workload, page), &[])?;
                if self.page.len() != PAGE_LEN || self.page[page as usize % PAGE_LEN] != byte(page)
                {
                    return Err(BenchError::WrongBytes(format!("page {page}")));
                }
                // The first finds this CPU's caches as the other has left them.
                if read > 0 {
                    samples.add(began.elapsed());
                }
                spin(rhythm.apart);
            }
            thread::sleep(REST);
        }
        Ok(samples)
    }

    /// A request and its reply, whose payload is `self.page`.
    fn ask(&mut self, control: &Control, payload: &[&[u8]]) -> Result<(), BenchError> {
        let now = Instant::now();
        self.quic.request(now, self.link, control, payload).map_err(failed)?;
        self.quic.flush(now).trying("cannot send")?;
        self.page.clear();
        loop {
            match self.event()? {
                Event::Control { control, .. } if control.status() == Status::Ok => {}
                Event::Payload { bytes, .. } => self.page.extend_from_slice(&bytes),
                Event::Complete { .. } => return Ok(()),
                other => return Err(unexpected(&other)),
            }
        }
    }

    fn event(&mut self) -> Result<Event, BenchError> {
        let began = Instant::now();
        loop {
            let now = Instant::now();
            if let Some(event) = self.quic.poll(now) {
                return Ok(event);
            }
            if now.duration_since(began) > LOST {
                return Err(BenchError::Invalid("no reply".into()));
            }
            let busy = self.quic.drive(now).trying("cannot receive")?;
            self.quic.flush(now).trying("cannot send")?;
            if !busy {
                pause(&self.quic, self.wait, now)?;
            }
        }
    }

    /// Attacks for a time; returns how many requests were answered a second.
    fn attack_for(&mut self, kind: Asks, time: Duration) -> Result<f64, BenchError> {
        let end = Instant::now() + time;
        self.attack(kind, || Instant::now() >= end)?;
        Ok(self.answered)
    }

    /// Asks for as much as the transport takes, until it is `over`.
    fn attack(&mut self, kind: Asks, over: impl Fn() -> bool) -> Result<(), BenchError> {
        let ids: Vec<u8> = (0..DISCARD_MAX as u64).flat_map(|n| (n << 20).to_le_bytes()).collect();
        let (descriptors, pages) = pages(0);
        let workload = self.workload;
        let (began, mut done) = (Instant::now(), 0_u64);
        while !over() {
            let now = Instant::now();
            loop {
                self.number += 1;
                let number = self.number;
                let many = PAGES_MAX as u16;
                let sent = match kind {
                    Asks::Gets => {
                        let get = Control::get(number, workload, number % PAGES);
                        self.quic.request(now, self.link, &get, &[])
                    }
                    Asks::Scans => {
                        let get = Control::get_many(number, workload, many);
                        self.quic.request(now, self.link, &get, &[&descriptors])
                    }
                    Asks::Puts => {
                        let put = Control::put(number, workload, many);
                        self.quic.request(now, self.link, &put, &[&descriptors, &pages])
                    }
                    Asks::Discards => {
                        let discard = Control::discard(number, workload, DISCARD_MAX as u16);
                        self.quic.request(now, self.link, &discard, &[&ids])
                    }
                    Asks::Sessions => {
                        let mut id = [7; 16];
                        id[..8].copy_from_slice(&number.to_le_bytes());
                        let hello = Control::hello(number, WorkloadId(id), 1000);
                        self.quic.request(now, self.link, &hello, &[])
                    }
                };
                if sent.is_err() {
                    break;
                }
            }
            self.quic.flush(now).trying("cannot send")?;
            self.quic.drive(now).trying("cannot receive")?;
            while let Some(event) = self.quic.poll(now) {
                match event {
                    Event::Complete { .. } => done += 1,
                    Event::Closed { .. } => return Err(unexpected(&event)),
                    _ => {}
                }
            }
        }
        if done == 0 {
            return Err(BenchError::Invalid(format!("no {} were answered", kind.name())));
        }
        self.answered = done as f64 / began.elapsed().as_secs_f64();
        Ok(())
    }
}

/// The first byte and all others of a page.
fn byte(page: u64) -> u8 {
    (page % 251) as u8 + 1
}

/// Descriptors and bytes of as many pages as a request may have.
fn pages(first: u64) -> (Vec<u8>, Vec<u8>) {
    let numbers = first..first + PAGES_MAX as u64;
    let descriptors = numbers.clone().flat_map(|page| [page.to_le_bytes(), [0; 8]].concat());
    let pages = numbers.flat_map(|page| vec![byte(page); PAGE_LEN]);
    (descriptors.collect(), pages.collect())
}
