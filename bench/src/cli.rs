//! The command line.

use std::cmp::Reverse;
use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::network::Kind;
use crate::placement::Wait;

/// Measures gms, and what this machine can do at best.
#[derive(Debug, Parser)]
#[command(name = "gms-bench", version)]
pub(crate) struct Cli {
    /// Write the report as JSON to FILE (`-`: standard output, instead of the text)
    #[arg(long, global = true, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// End after this many seconds whatever happens [default: 900, of app, peers and shape 7200]
    #[arg(long = "limit", global = true, value_name = "SECONDS")]
    limit_s: Option<u32>,
    /// What to measure.
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// When to end whatever happens.
    pub(crate) fn limit_s(&self) -> u32 {
        let is_long =
            matches!(self.command, Command::App(_) | Command::Peers(_) | Command::Shape(_));
        self.limit_s.unwrap_or(if is_long { 7200 } else { 900 })
    }
}

/// What can be measured.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// The least that a fault and an exchange cost on this machine
    Floor(Effort),
    /// Random remote faults through the whole stack, beside the floors of the same run
    Fault(FaultOptions),
    /// Scans of remote memory, with and without prefetch, beside the bulk throughput of the same run
    Scan(ScanOptions),
    /// Write-back, beside the bulk throughput of the same run, and remote faults while another thread causes it
    Evict(EvictOptions),
    /// More threads, more pagers on one agent, more agents of one pager: throughput and fairness
    Scale(ScaleOptions),
    /// CPU time of all processes for a remote fault, a page scanned and a page written back, beside that of the floors
    Cost(CostOptions),
    /// Remote faults and write-back with copies of pages, and with sealing, beside the same without
    Redundancy(RedundancyOptions),
    /// What changes, looks, forks, exits and a detach cost with many threads, mappings, processes and pages
    Shape(ShapeOptions),
    /// What `gms run` costs a program which stays under its budget
    IdleCost(IdleOptions),
    /// CPU time that gms takes while a program sleeps of which most is away
    IdleCpu(IdleCpuOptions),
    /// gms beside swap on a disk, on zram, on NBD and on NVMe/TCP: the same programs, with the same memory
    Peers(PeersOptions),
    /// A program that fills its host's memory, alone and beside an agent that follows the host
    Pressure(PressureOptions),
    /// What a client reads from an agent of which another takes all that it gets
    Hostile(HostileOptions),
    /// Real programs with less and less memory of their own, under gms, disk swap and zram
    App(AppOptions),
    /// One HTML page with plots from the JSON files of other commands
    Report(PageOptions),
    /// The other end of an exchange
    #[command(hide = true)]
    Peer(PeerOptions),
    /// The first process of a guest
    #[command(hide = true)]
    GuestInit,
    /// What a guest measures
    #[command(hide = true)]
    RemoteSwap(RemoteSwapOptions),
    /// Undoes what was set up, when its input ends
    #[command(hide = true)]
    Undo,
    /// A program which runs under gms
    #[command(hide = true)]
    Workload {
        /// What to do, as JSON
        orders: String,
        /// File for what was found
        found: PathBuf,
    },
    /// The program which stays under its budget
    #[command(hide = true)]
    IdleWorkload {
        /// Its memory
        mib: usize,
    },
}

impl Command {
    /// Where the programs of gms are, if the command runs them.
    pub(crate) fn programs(&self) -> Option<&Programs> {
        match self {
            Command::Fault(options) => Some(&options.paging.programs),
            Command::Scan(options) => Some(&options.paging.programs),
            Command::Evict(options) => Some(&options.paging.programs),
            Command::Scale(options) => Some(&options.paging.programs),
            Command::Cost(options) => Some(&options.paging.programs),
            Command::Redundancy(options) => Some(&options.paging.programs),
            Command::Peers(options) => Some(&options.paging.programs),
            Command::Shape(options) => Some(&options.programs),
            Command::IdleCost(options) => Some(&options.programs),
            Command::IdleCpu(options) => Some(&options.programs),
            Command::App(options) => Some(&options.programs),
            Command::Pressure(options) => Some(&options.programs),
            Command::Hostile(options) => Some(&options.programs),
            _ => None,
        }
    }
}

/// How much to measure.
#[derive(Args, Clone, Debug)]
pub(crate) struct Effort {
    /// Runs, of which the medians are reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// One small run: shows that the benchmark works, and no more
    #[arg(long)]
    quick: bool,
}

impl Effort {
    /// Five runs.
    #[cfg(test)]
    pub(crate) fn usual() -> Effort {
        Effort { runs: 5, quick: false }
    }

    /// Number of runs.
    pub(crate) fn runs(&self) -> u32 {
        if self.quick { 1 } else { self.runs }
    }

    /// Whether figures do not matter.
    pub(crate) fn is_quick(&self) -> bool {
        self.quick
    }

    /// How often to repeat something within a run.
    pub(crate) fn count(&self, usual: usize, quick: usize) -> usize {
        if self.quick { quick } else { usual }
    }
}

/// Where the programs are.
#[derive(Args, Clone, Debug)]
pub(crate) struct Programs {
    /// Folder of `gms` and `gms-agent` [default: that of gms-bench]
    #[arg(long, value_name = "DIR")]
    pub programs: Option<PathBuf>,
}

impl Programs {
    /// The folder, if one was named.
    pub(crate) fn dir(&self) -> Option<&Path> {
        self.programs.as_deref()
    }
}

/// What is paged.
#[derive(Args, Clone, Debug)]
pub(crate) struct Paging {
    /// Where the programs are.
    #[command(flatten)]
    pub programs: Programs,
    /// The budget [default: 64, of scale 16, of --quick 8]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(4..=65536))]
    local: Option<u32>,
    /// The workload's memory as a multiple of the budget
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=64))]
    times: u32,
}

impl Paging {
    /// Budget and memory of a workload in MiB; `usual` is the budget unless the user or `--quick` say otherwise.
    pub(crate) fn mib(&self, effort: &Effort, usual: u32) -> (u32, u32) {
        let local = self.local.unwrap_or(if effort.is_quick() { 8 } else { usual });
        (local, local * self.times)
    }
}

/// Where the agents are.
#[derive(Args, Clone, Debug)]
pub(crate) struct Route {
    /// What lies between gms and its agents: loopback, or veth:MTU or veth:MTU:LOSS%, which loses so many of the agents' packets
    #[arg(long, value_name = "NETWORK", default_value = "loopback")]
    pub network: Kind,
}

/// Memory that faults bring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PageSize {
    /// 4 KiB
    #[value(name = "4k")]
    Small,
    /// 8 KiB
    #[value(name = "8k")]
    Large,
}

impl PageSize {
    /// As `gms` takes it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            PageSize::Small => "4k",
            PageSize::Large => "8k",
        }
    }
}

/// `gms-bench fault`.
#[derive(Args, Debug)]
pub(crate) struct FaultOptions {
    /// How much to measure.
    #[command(flatten)]
    pub effort: Effort,
    /// What is paged.
    #[command(flatten)]
    pub paging: Paging,
    /// Where the agents are.
    #[command(flatten)]
    pub route: Route,
    /// Memory that a fault brings
    #[arg(long, value_enum, default_value = "4k")]
    pub page_size: PageSize,
    /// Threads which fault
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub threads: u32,
    /// Agents over which the pages are spread
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    pub agents: u32,
    /// Touch pages in strides instead of at random
    #[arg(long, value_name = "PAGES", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub stride: Option<u32>,
    /// Share of the touches that write
    #[arg(long, value_name = "PERCENT", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub writes: u32,
    /// Tell where the time of a fault goes
    #[arg(long)]
    pub stages: bool,
    /// Let the scheduler place the only thread and the agents
    #[arg(long)]
    pub unpinned: bool,
}

/// `gms-bench scan`.
#[derive(Args, Debug)]
pub(crate) struct ScanOptions {
    /// How much to measure.
    #[command(flatten)]
    pub effort: Effort,
    /// What is paged.
    #[command(flatten)]
    pub paging: Paging,
    /// Where the agents are.
    #[command(flatten)]
    pub route: Route,
    /// Pages from one read to the next
    #[arg(long, value_name = "PAGES", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub stride: u32,
}

/// `gms-bench evict`.
#[derive(Args, Debug)]
pub(crate) struct EvictOptions {
    /// How much to measure.
    #[command(flatten)]
    pub effort: Effort,
    /// What is paged.
    #[command(flatten)]
    pub paging: Paging,
    /// Where the agents are.
    #[command(flatten)]
    pub route: Route,
}

/// `gms-bench scale`.
#[derive(Args, Debug)]
pub(crate) struct ScaleOptions {
    /// How much to measure.
    #[command(flatten)]
    pub effort: Effort,
    /// What each pager pages.
    #[command(flatten)]
    pub paging: Paging,
}

/// `gms-bench cost`.
#[derive(Args, Debug)]
pub(crate) struct CostOptions {
    /// How much to measure.
    #[command(flatten)]
    pub effort: Effort,
    /// What is paged.
    #[command(flatten)]
    pub paging: Paging,
    /// Where the agents are.
    #[command(flatten)]
    pub route: Route,
}

/// `gms-bench redundancy`.
#[derive(Args, Debug)]
pub(crate) struct RedundancyOptions {
    /// How much to measure.
    #[command(flatten)]
    pub effort: Effort,
    /// What is paged.
    #[command(flatten)]
    pub paging: Paging,
    /// Where the agents are.
    #[command(flatten)]
    pub route: Route,
    /// Agents over which the pages are spread
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(5..=8))]
    pub agents: u32,
}

/// `gms-bench shape`.
#[derive(Args, Debug)]
#[command(mut_arg("runs", |runs| runs.default_value("3")))]
pub(crate) struct ShapeOptions {
    /// How much to measure.
    #[command(flatten)]
    pub effort: Effort,
    /// Where the programs are.
    #[command(flatten)]
    pub programs: Programs,
    /// What there is more and more of; give it once for each [default: all]
    #[arg(long = "of", value_enum, value_name = "NAME")]
    only: Vec<Dimension>,
}

impl ShapeOptions {
    /// Those to measure.
    pub(crate) fn dimensions(&self) -> Vec<Dimension> {
        if self.only.is_empty() { Dimension::value_variants().to_vec() } else { self.only.clone() }
    }
}

/// `gms-bench idle-cost`.
#[derive(Args, Debug)]
pub(crate) struct IdleOptions {
    /// How much to measure.
    #[command(flatten)]
    pub effort: Effort,
    /// Where the programs are.
    #[command(flatten)]
    pub programs: Programs,
    /// The budget, which the command must stay under [default: gms's own]
    #[arg(long, value_name = "SIZE")]
    pub local: Option<String>,
    /// The command [default: fills, sorts and walks 256 MiB]
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// `gms-bench idle-cpu`.
#[derive(Args, Debug)]
pub(crate) struct IdleCpuOptions {
    /// How much to measure.
    #[command(flatten)]
    pub effort: Effort,
    /// Where the programs are.
    #[command(flatten)]
    pub programs: Programs,
    /// A budget; give it once for each [default: 64 128 512, of --quick 8]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(4..=65536))]
    local: Vec<u32>,
    /// The program's memory as a multiple of the budget
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=64))]
    pub times: u32,
    /// How long it is looked at [default: 20, of --quick 1]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=90))]
    seconds: Option<u32>,
}

impl IdleCpuOptions {
    /// Budgets in MiB.
    pub(crate) fn budgets(&self) -> Vec<u32> {
        match (&self.local[..], self.effort.is_quick()) {
            ([], false) => vec![64, 128, 512],
            ([], true) => vec![8],
            (budgets, _) => budgets.to_vec(),
        }
    }

    /// How long the program is looked at.
    pub(crate) fn looked_at(&self) -> Duration {
        let usual = if self.effort.is_quick() { 1 } else { 20 };
        Duration::from_secs(u64::from(self.seconds.unwrap_or(usual)))
    }
}

/// Where gms is compared with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// On this machine: swap on a disk and on zram.
    Host,
    /// In a virtual machine under emulation: swap on NBD and on NVMe/TCP.
    Guest,
}

/// `gms-bench peers`.
#[derive(Args, Debug)]
pub(crate) struct PeersOptions {
    /// How much to measure.
    #[command(flatten)]
    pub effort: Effort,
    /// What is paged.
    #[command(flatten)]
    pub paging: Paging,
    /// Leave out the other part
    #[arg(long, value_enum, value_name = "PART")]
    pub only: Option<Part>,
    /// Directory on a disk, for the swap file
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub disk: PathBuf,
    /// Where a package of a kernel for the guest was unpacked [default: those installed, in /boot and /lib/modules]
    #[arg(long, value_name = "DIR", env = "GMS_BENCH_KERNEL")]
    pub kernel: Option<PathBuf>,
    /// Where umap is installed: runs its pfbenchmark-read, too
    #[arg(long, value_name = "DIR")]
    pub umap: Option<PathBuf>,
    /// Where fltrace was built: runs the same faults under it, too
    #[arg(long, value_name = "DIR")]
    pub fltrace: Option<PathBuf>,
}

/// `gms-bench remote-swap`.
#[derive(Args, Debug)]
pub(crate) struct RemoteSwapOptions {
    /// How much to measure.
    #[command(flatten)]
    pub effort: Effort,
    /// Where the programs are.
    #[command(flatten)]
    pub programs: Programs,
}

/// `gms-bench app`.
#[derive(Args, Debug)]
#[command(mut_arg("runs", |runs| runs.default_value("3")))]
pub(crate) struct AppOptions {
    /// How much to measure.
    #[command(flatten)]
    pub effort: Effort,
    /// Where the programs of gms are.
    #[command(flatten)]
    pub programs: Programs,
    /// A program to measure; give it once for each [default: all]
    #[arg(long = "program", value_enum, value_name = "NAME")]
    only: Vec<Program>,
    /// What pages it; give it once for each [default: all]
    #[arg(long = "under", value_enum, value_name = "NAME")]
    under: Vec<Under>,
    /// Memory in percent of what the program uses; give it once for each [default: 100 75 50 25, of --quick 50]
    #[arg(long = "share", value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(5..=100))]
    shares: Vec<u32>,
    /// About what each program uses [default: 200, of --quick 32]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(32..=4096))]
    memory: Option<u32>,
    /// Directory for the file of the disk swap
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub disk: PathBuf,
}

impl AppOptions {
    /// Those to measure.
    pub(crate) fn programs(&self) -> Vec<Program> {
        if self.only.is_empty() { Program::value_variants().to_vec() } else { self.only.clone() }
    }

    /// What is to page them.
    pub(crate) fn under(&self) -> Vec<Under> {
        if self.under.is_empty() { Under::value_variants().to_vec() } else { self.under.clone() }
    }

    /// In percent, the greatest first.
    pub(crate) fn shares(&self) -> Vec<u32> {
        let mut shares = match (&self.shares[..], self.effort.is_quick()) {
            ([], false) => vec![100, 75, 50, 25],
            ([], true) => vec![50],
            (shares, _) => shares.to_vec(),
        };
        shares.sort_unstable_by_key(|share| Reverse(*share));
        shares.dedup();
        shares
    }

    /// About what each program uses, in MiB.
    pub(crate) fn mib(&self) -> u32 {
        self.memory.unwrap_or(if self.effort.is_quick() { 32 } else { 200 })
    }
}

/// What there is more and more of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dimension {
    /// 10, 100 and 1000 threads.
    Threads,
    /// 100, 1000 and 10000 mappings.
    Mappings,
    /// 10, 100 and 1000 processes.
    Processes,
    /// As many chunks of the page map as 1, 10 and 100 GiB have.
    Gib,
}

/// What pages programs on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub(crate) enum Under {
    /// gms, with an agent of its own.
    Gms,
    /// Swap to compressed memory, without readahead.
    Zram,
    /// The same with the kernel's default readahead.
    ZramReadahead,
    /// As zram, with its pool within the limit.
    ZramCharged,
    /// Swap to a file on a disk, without readahead.
    Disk,
    /// The same with the kernel's default readahead.
    DiskReadahead,
}

/// A program with a fixed job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Program {
    /// redis-server, asked by zipfian GETs and SETs.
    Redis,
    /// GNU sort, of text.
    Sort,
    /// Python with numpy: its own objects, then arrays.
    Numpy,
    /// sqlite3, with a database in memory.
    Sqlite,
    /// gcc, of generated C.
    Gcc,
    /// Breadth-first searches in a Kronecker graph.
    Bfs,
}

/// `gms-bench pressure`.
#[derive(Args, Debug)]
pub(crate) struct PressureOptions {
    /// How much to measure.
    #[command(flatten)]
    pub effort: Effort,
    /// Where the programs are.
    #[command(flatten)]
    pub programs: Programs,
}

/// What a client asks for without end.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum Asks {
    /// Pages, one by one.
    Gets,
    /// As many at a time as there may be.
    Scans,
    /// To store as many.
    Puts,
    /// To forget as many as there may be in one request, which are not there.
    Discards,
    /// A workload after the other.
    Sessions,
}

/// `gms-bench hostile`.
#[derive(Args, Debug)]
pub(crate) struct HostileOptions {
    /// What the other asks for, instead of each kind in turn
    #[arg(long, value_name = "KIND")]
    pub only: Option<Asks>,
    /// What lies between.
    #[command(flatten)]
    pub route: Route,
    /// How much to measure.
    #[command(flatten)]
    pub effort: Effort,
    /// Where the programs are.
    #[command(flatten)]
    pub programs: Programs,
}

/// `gms-bench report`.
#[derive(Args, Debug)]
pub(crate) struct PageOptions {
    /// Files which other commands wrote by --json
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// The page
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    pub output: PathBuf,
}

/// What a peer speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Protocol {
    /// Bare datagrams: a page comes back.
    Udp,
    /// The same with a page of 8 KiB.
    Udp8k,
    /// gms-transport.
    Quic,
    /// The quinn crate on its own runtime.
    Quinn,
}

/// `gms-bench peer`.
#[derive(Args, Debug)]
pub(crate) struct PeerOptions {
    /// What to speak
    pub protocol: Protocol,
    /// How to wait
    pub wait: Wait,
    /// Address to listen at
    #[arg(long, default_value_t = Ipv4Addr::LOCALHOST)]
    pub bind: Ipv4Addr,
    /// Largest IP packet of the network, if it is not loopback
    #[arg(long)]
    pub mtu: Option<u16>,
    /// CPU to run on
    #[arg(long)]
    pub cpu: Option<usize>,
    /// Folder with the keys
    #[arg(long)]
    pub keys: Option<PathBuf>,
}
