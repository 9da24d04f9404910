//! `gms-bench remote-swap`: within a guest, gms beside swap on block devices of the network, all over its loopback.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::race::Race;
use crate::cli::{Protocol, RemoteSwapOptions};
use crate::error::{BenchError, Trying};
use crate::floor::uffd::{self, Answer, Handler};
use crate::floor::{cpu, quic, udp};
use crate::network::Network;
use crate::page::GUEST;
use crate::peer::Process;
use crate::placement::placements;
use crate::report::Report;
use crate::samples::Samples;
use crate::scratch::Scratch;
use crate::subject::Subject;

/// Limit and memory in MiB, usual and `--quick`: an emulated CPU is slow, but gms itself takes 11.
const MIB: [(u32, u32); 2] = [(48, 144), (8, 24)];
/// Faults measured in each run, usual and `--quick`.
const FAULTS: (usize, usize) = (3_000, 400);
/// What the network's devices hold, in MiB: more than twice of what is swapped.
const DEVICE_MIB: u64 = 512;
/// Ports of both.
const PORTS: [u16; 2] = [10809, 4420];
/// Name of the NVMe subsystem.
const SUBSYSTEM: &str = "nqn.2026-01.gms:bench";
/// A device or a server must be there in this time.
const READY: Duration = Duration::from_secs(60);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(50);

/// Measures.
pub(crate) fn run(options: &RemoteSwapOptions, report: &mut Report) -> Result<(), BenchError> {
    let effort = &options.effort;
    let quick = usize::from(effort.is_quick());
    let mut subjects = vec![Subject::Gms];
    subjects.extend(Subject::device(["NBD swap", "NBD swap, readahead"], nbd()?));
    subjects.extend(Subject::device(["NVMe/TCP swap", "NVMe/TCP swap, readahead"], nvme()?));
    let faults = effort.count(FAULTS.0, FAULTS.1);
    let race = Race::new(GUEST, (effort, &options.programs), MIB[quick], faults, subjects);
    for run in 0..effort.runs() {
        floors(faults, report)?;
        race.run(run, report)?;
    }
    Ok(())
}

/// What gms's faults consist of: emulation makes some things dearer than others, encryption above all.
fn floors(count: usize, report: &mut Report) -> Result<(), BenchError> {
    let keys = Scratch::new()?;
    quic::make_keys(keys.as_ref())?;
    let same = placements()?[0];
    let mut row = |name: &str, samples: Samples| {
        report.latency(&format!("{GUEST}floor: {name}, {}", same.name), samples.latency());
    };
    row("uffd fault + COPY", uffd::faults(&same, Handler::Thread, Answer::Copy, count)?);
    row("UDP 128/4224 B", udp::exchanges(&Network::LOOPBACK, &same, Protocol::Udp, count)?);
    row("QUIC 128/4224 B", quic::exchanges(&Network::LOOPBACK, &same, keys.as_ref(), count)?);
    let (seals, _) = cpu::aead(count)?;
    report.latency(&format!("{GUEST}AES-128-GCM, seal 4 KiB"), seals.latency());
    Ok(())
}

/// A file in a tmpfs, by NBD over TCP. Server and client go on by themselves.
fn nbd() -> Result<PathBuf, BenchError> {
    let file = Path::new("/run/nbd");
    let made = fs::File::create(file).and_then(|file| file.set_len(DEVICE_MIB << 20));
    made.trying("cannot make the file of NBD")?;
    let port = PORTS[0].to_string();
    let server = format!("127.0.0.1@{port}");
    quiet("nbd-server", &[&server, "/run/nbd", "-C", "/dev/null"])?;
    let client = ["127.0.0.1", &port, "/dev/nbd0", "-swap", "-b", "4096"];
    until("nbd-server", || quiet("nbd-client", &client).is_ok())?;
    let device = PathBuf::from("/dev/nbd0");
    until("/dev/nbd0", || has_size(&device))?;
    Ok(device)
}

/// Runs a program; what it says would cost time on the emulated console.
fn quiet(program: &str, args: &[&str]) -> Result<(), BenchError> {
    let mut command = Command::new(program);
    command.args(args).stdout(Stdio::null()).stderr(Stdio::null());
    let ended = Process::start(&mut command)?.0.wait().trying(program)?;
    match ended.success() {
        true => Ok(()),
        false => {
            let problem = format!("ended with {ended}");
            Err(BenchError::Program { program: program.into(), problem })
        }
    }
}

/// A RAM disk, by NVMe/TCP: both ends are the kernel's own.
fn nvme() -> Result<PathBuf, BenchError> {
    let root = Path::new("/sys/kernel/config/nvmet");
    let write = |path: &Path, text: &str| fs::write(path, text).trying(&path.display().to_string());
    let make = |path: &Path| fs::create_dir(path).trying(&path.display().to_string());
    let subsystem = root.join("subsystems").join(SUBSYSTEM);
    make(&subsystem)?;
    write(&subsystem.join("attr_allow_any_host"), "1")?;
    let namespace = subsystem.join("namespaces/1");
    make(&namespace)?;
    write(&namespace.join("device_path"), "/dev/ram0")?;
    write(&namespace.join("enable"), "1")?;
    let port = root.join("ports/1");
    make(&port)?;
    let service = PORTS[1].to_string();
    for (name, text) in
        [("adrfam", "ipv4"), ("trtype", "tcp"), ("traddr", "127.0.0.1"), ("trsvcid", &service)]
    {
        write(&port.join(format!("addr_{name}")), text)?;
    }
    let link = port.join("subsystems").join(SUBSYSTEM);
    std::os::unix::fs::symlink(&subsystem, link).trying("cannot export by NVMe/TCP")?;
    let fabrics = Path::new("/dev/nvme-fabrics");
    until("/dev/nvme-fabrics", || fabrics.exists())?;
    let wish = format!("transport=tcp,traddr=127.0.0.1,trsvcid={service},nqn={SUBSYSTEM}");
    let opened = fs::File::options().read(true).write(true).open(fabrics);
    let mut control = opened.trying("/dev/nvme-fabrics")?;
    control.write_all(wish.as_bytes()).trying("cannot connect by NVMe/TCP")?;
    let mut answer = [0; 256];
    let _ = control.read(&mut answer).trying("no answer of NVMe/TCP")?;
    let device = PathBuf::from("/dev/nvme0n1");
    until("/dev/nvme0n1", || has_size(&device))?;
    Ok(device)
}

/// Whether a block device is there and ready.
fn has_size(device: &Path) -> bool {
    let name = device.file_name().map(|name| Path::new("/sys/block").join(name).join("size"));
    let size = name.and_then(|path| fs::read_to_string(path).ok());
    size.is_some_and(|text| text.trim().parse().is_ok_and(|sectors: u64| sectors > 0))
}

fn until(what: &str, is_ready: impl Fn() -> bool) -> Result<(), BenchError> {
    let began = Instant::now();
    while !is_ready() {
        if began.elapsed() > READY {
            let problem = format!("was not ready after {} s", READY.as_secs());
            return Err(BenchError::Program { program: what.into(), problem });
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}
