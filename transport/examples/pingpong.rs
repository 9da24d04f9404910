//! Latency and throughput of exchanges over loopback, encrypted: 128 B -> 128 + 4096 B, and puts of 64 pages.
//!
//! Two threads, each with an endpoint of its own. `spin`: both poll on different CPUs; `block`: both wait in poll(2),
//! pinned to one CPU; `apart`: both wait, on different CPUs. Usage: `pingpong [spin|block|apart|bulk]... [-n COUNT]`

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gms_transport::message::{Op, PAGE_LEN, PAGES_MAX, PageDescriptor, Status, WorkloadId};
use gms_transport::{CloseCode, Control, Event, ExchangeId, LinkId, Quic, Transport, keys};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::time::TimeSpec;
use nix::unistd::Pid;
use zerocopy::IntoBytes;

const WORKLOAD: WorkloadId = WorkloadId([1; 16]);
/// Puts under way at once in `bulk`.
const DEPTH: usize = 4;
/// Bytes of a put, its descriptors included.
const MESSAGE: usize = PAGES_MAX * (PAGE_LEN + PageDescriptor::LEN);
/// Memory that puts are taken from and laid in.
const MEMORY: usize = 64 << 20;
const WARMUP: usize = 1000;
const LIMIT: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let count = match args.iter().position(|arg| arg == "-n") {
        Some(at) => args.get(at + 1).ok_or("-n needs a number")?.parse()?,
        None => 100_000,
    };
    let modes: Vec<&str> = args
        .iter()
        .map(String::as_str)
        .filter(|a| a.parse::<usize>().is_err() && *a != "-n")
        .collect();
    let modes = if modes.is_empty() { vec!["spin", "block", "apart", "bulk"] } else { modes };
    for mode in modes {
        run(mode, count)?;
    }
    Ok(())
}

fn run(mode: &str, count: usize) -> Result<(), Box<dyn std::error::Error>> {
    let (node, client) = keys::ephemeral()?;
    let any: SocketAddr = "127.0.0.1:0".parse()?;
    let mut agent = Quic::server(any, &node)?;
    let mut pager = Quic::client(any, &client)?;
    let addr = agent.local_addr();
    let (blocking, cpus) = match mode {
        "spin" | "bulk" => (false, [0, 1]),
        "block" => (true, [0, 0]),
        "apart" => (true, [0, 1]),
        _ => return Err(format!("no mode `{mode}`").into()),
    };
    let done = Arc::new(AtomicBool::new(false));
    let stop = done.clone();
    let serving = thread::spawn(move || {
        pin(cpus[1]);
        let mut serving = Agent::new();
        while !stop.load(Ordering::Relaxed) {
            if blocking {
                wait(&agent);
            }
            serving.answer(&mut agent);
        }
    });
    pin(cpus[0]);
    let link = connect(&mut pager, addr, blocking);
    match mode {
        "bulk" => bulk(&mut pager, link, count / 10),
        _ => pings(&mut pager, link, mode, blocking, count),
    }
    println!("       {:?}", pager.path(link));
    pager.close(Instant::now(), link, CloseCode::Goodbye);
    pager.flush(Instant::now())?;
    done.store(true, Ordering::Relaxed);
    serving.join().map_err(|_| "the agent thread failed")?;
    Ok(())
}

/// Replies to gets with a page, and puts the payload of puts away.
struct Agent {
    asked: HashMap<ExchangeId, Control>,
    page: [u8; PAGE_LEN],
    /// Where puts are laid, one after the other: more than the caches hold.
    slab: Vec<u8>,
    put: usize,
}

impl Agent {
    fn new() -> Self {
        Self { asked: HashMap::new(), page: [7; PAGE_LEN], slab: vec![1; MEMORY], put: 0 }
    }

    fn answer(&mut self, end: &mut Quic) {
        let now = Instant::now();
        end.drive(now).expect("drive");
        while let Some(event) = end.poll(now) {
            match event {
                Event::Control { control, exchange } => drop(self.asked.insert(exchange, control)),
                Event::Payload { offset, bytes, .. } => {
                    let at = self.put % (MEMORY / MESSAGE) * MESSAGE + offset as usize;
                    self.slab[at..at + bytes.len()].copy_from_slice(&bytes);
                }
                Event::Complete { exchange } => self.reply(now, end, exchange),
                _ => {}
            }
        }
        end.flush(now).expect("flush");
    }

    fn reply(&mut self, now: Instant, end: &mut Quic, exchange: ExchangeId) {
        let request = self.asked.remove(&exchange).expect("control comes before complete");
        let mut reply = request.reply(Status::Ok);
        let payload: &[&[u8]] = if request.op == Op::Get {
            reply.done.set(1);
            &[&self.page]
        } else {
            reply.done.set(u64::MAX);
            self.put += 1;
            &[]
        };
        end.reply(now, exchange, &reply, payload).expect("reply");
    }
}

fn pings(pager: &mut Quic, link: LinkId, mode: &str, blocking: bool, count: usize) {
    let mut page = [0u8; PAGE_LEN];
    let mut times = Vec::with_capacity(count);
    for number in 0..count + WARMUP {
        let start = Instant::now();
        let request = Control::get(number as u64, WORKLOAD, 5);
        pager.request(start, link, &request, &[]).expect("request");
        pager.flush(start).expect("flush");
        let mut complete = false;
        while !complete {
            assert!(start.elapsed() < LIMIT, "no reply");
            if blocking {
                wait(pager);
            }
            let now = Instant::now();
            pager.drive(now).expect("drive");
            while let Some(event) = pager.poll(now) {
                match event {
                    Event::Payload { offset, bytes, .. } => {
                        page[offset as usize..offset as usize + bytes.len()]
                            .copy_from_slice(&bytes);
                    }
                    Event::Complete { .. } => complete = true,
                    Event::Control { .. } => {}
                    other => panic!("{other:?}"),
                }
            }
        }
        if number >= WARMUP {
            times.push(start.elapsed());
        }
        assert_eq!(page[number % PAGE_LEN], 7);
    }
    times.sort_unstable();
    let at =
        |quantile: f64| times[(times.len() as f64 * quantile) as usize].as_nanos() as f64 / 1e3;
    println!(
        "{mode:6} p50 {:.1} us  p90 {:.1}  p99 {:.1}  p99.9 {:.1}",
        at(0.5),
        at(0.9),
        at(0.99),
        at(0.999)
    );
}

fn bulk(pager: &mut Quic, link: LinkId, count: usize) {
    let pages = vec![3u8; MEMORY];
    let descriptors = [PageDescriptor::new(9, 9); PAGES_MAX];
    let (mut sent, mut complete) = (0, 0);
    let start = Instant::now();
    while complete < count {
        let now = Instant::now();
        while sent < count && sent - complete < DEPTH {
            let put = Control::put(sent as u64, WORKLOAD, PAGES_MAX as u16);
            let from = &pages[sent % (MEMORY / MESSAGE) * MESSAGE..][..PAGES_MAX * PAGE_LEN];
            pager.request(now, link, &put, &[descriptors.as_bytes(), from]).expect("put");
            sent += 1;
        }
        pager.flush(now).expect("flush");
        pager.drive(now).expect("drive");
        while let Some(event) = pager.poll(now) {
            match event {
                Event::Complete { .. } => complete += 1,
                Event::Control { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        assert!(start.elapsed() < LIMIT, "only {complete} of {count} puts");
    }
    let bytes = (count * PAGES_MAX * PAGE_LEN) as f64;
    println!(
        "bulk   {:.2} GB/s in puts of 64 pages, {DEPTH} under way",
        bytes / start.elapsed().as_secs_f64() / 1e9
    );
}

fn connect(pager: &mut Quic, addr: SocketAddr, blocking: bool) -> LinkId {
    let start = Instant::now();
    let link = pager.connect(start, addr).expect("connect");
    loop {
        assert!(start.elapsed() < LIMIT, "no link");
        let now = Instant::now();
        pager.drive(now).expect("drive");
        match pager.poll(now) {
            Some(Event::Connected { .. }) => return link,
            Some(other) => panic!("{other:?}"),
            None => {}
        }
        pager.flush(now).expect("flush");
        if blocking {
            wait(pager);
        }
    }
}

/// Waits until something arrives or is due, at most 100 ms.
fn wait(endpoint: &Quic) {
    let fd: BorrowedFd<'_> = endpoint.fd();
    let due = endpoint.deadline().map(|at| at.saturating_duration_since(Instant::now()));
    let timeout = TimeSpec::from_duration(due.unwrap_or(LIMIT).min(Duration::from_millis(100)));
    ppoll(&mut [PollFd::new(fd, PollFlags::POLLIN)], Some(timeout), None).expect("ppoll");
}

fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu).expect("cpu");
    sched_setaffinity(Pid::from_raw(0), &set).expect("affinity");
}
