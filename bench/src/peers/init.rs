//! The first process of a guest: makes the host's files its root, and runs one command there.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::wait::{WaitStatus, wait};
use nix::unistd::{Pid, chdir, chroot};

use crate::error::{BenchError, Trying};

/// Directory of the modules; their names sort in the order in which they are loaded.
pub(crate) const MODULES: &str = "/modules";
/// Its command, as JSON.
pub(crate) const COMMAND: &str = "/command";
/// Where it mounts what the host has shared for the results.
pub(crate) const OUT: &str = "/run/gms-bench";
/// 9p tags of the host's root and of [`OUT`].
pub(crate) const TAGS: [&str; 2] = ["root", "out"];
/// Directories which the archive must have: the host's root, what is written over it, both together.
pub(crate) const DIRS: [&str; 3] = ["/host", "/own", "/both"];

/// Parameters of modules. The RAM disk is what NVMe/TCP exports: as large as memory allows, as it takes only what is written to it.
const PARAMETERS: [(&str, &str); 2] = [("brd", "rd_nr=1 rd_size=1048576"), ("nbd", "nbds_max=1")];

/// MODULE_INIT_COMPRESSED_FILE of the kernel's include/uapi/linux/module.h.
const COMPRESSED: libc::c_int = 4;

/// Does it, and powers off.
pub(crate) fn run() -> Result<(), BenchError> {
    if Pid::this().as_raw() != 1 {
        return Err(BenchError::Invalid("this is for the first process of a guest".into()));
    }
    if let Err(error) = boot() {
        eprintln!("gms-bench: {error}");
    }
    nix::unistd::sync();
    reboot(RebootMode::RB_POWER_OFF).trying("cannot power off").map(|_| ())
}

fn boot() -> Result<(), BenchError> {
    let command = fs::read_to_string(COMMAND).trying(COMMAND)?;
    let command: Vec<String> =
        serde_json::from_str(&command).map_err(|e| BenchError::Invalid(e.to_string()))?;
    let modules = fs::read_dir(MODULES).trying(MODULES)?.filter_map(Result::ok);
    let mut modules: Vec<_> = modules.map(|entry| entry.path()).collect();
    modules.sort();
    modules.iter().try_for_each(|path| load(path))?;
    root()?;
    loopback()?;
    let child = Command::new(&command[0])
        .args(&command[1..])
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .spawn()
        .trying(&command[0])?;
    let child = Pid::from_raw(child.id().cast_signed());
    loop {
        // The first process is the parent of all that have none.
        match wait() {
            Ok(WaitStatus::Exited(pid, 0)) if pid == child => return Ok(()),
            Ok(ended @ (WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..)))
                if pid == child =>
            {
                let problem = format!("ended with {ended:?}");
                return Err(BenchError::Program { program: command[0].clone(), problem });
            }
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error).trying("cannot wait"),
        }
    }
}

fn load(path: &Path) -> Result<(), BenchError> {
    let what = path.display().to_string();
    let file = File::open(path).trying(&what)?;
    let given = PARAMETERS.iter().find(|(name, _)| what.contains(&format!("-{name}.ko")));
    let given = CString::new(given.map_or("", |(_, text)| text)).unwrap_or_default();
    let packed = path.extension().is_some_and(|end| end != "ko");
    let flags = if packed { COMPRESSED } else { 0 };
    // SAFETY: the descriptor is open and the parameters end with a NUL; the kernel checks what it loads.
    let loaded =
        unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), given.as_ptr(), flags) };
    Errno::result(loaded).map(|_| ()).trying(&what)
}

/// Makes what the host shares the root, writable, and mounts what a system has.
fn root() -> Result<(), BenchError> {
    let [host, own, both] = DIRS;
    plan9(TAGS[0], host, MsFlags::MS_RDONLY)?;
    mounted("tmpfs", own, "tmpfs", "")?;
    for dir in ["upper", "work"] {
        fs::create_dir(Path::new(own).join(dir)).trying(dir)?;
    }
    let layers = format!("lowerdir={host},upperdir={own}/upper,workdir={own}/work");
    mounted("overlay", both, "overlay", &layers)?;
    for (kind, at) in [
        ("proc", "proc"),
        ("sysfs", "sys"),
        ("devtmpfs", "dev"),
        ("tmpfs", "run"),
        ("cgroup2", "sys/fs/cgroup"),
        ("configfs", "sys/kernel/config"),
    ] {
        let at = format!("{both}/{at}");
        // Those within others are there.
        let _ = fs::create_dir(&at);
        mounted(kind, &at, kind, "")?;
    }
    chdir(both).trying(both)?;
    let none: Option<&str> = None;
    mount(Some("."), "/", none, MsFlags::MS_MOVE, none).trying("cannot move the root")?;
    chroot(".").trying("chroot")?;
    chdir("/").trying("/")?;
    fs::create_dir(OUT).trying(OUT)?;
    plan9(TAGS[1], OUT, MsFlags::empty())
}

fn mounted(what: &str, at: &str, kind: &str, options: &str) -> Result<(), BenchError> {
    mount(Some(what), at, Some(kind), MsFlags::empty(), Some(options)).trying(at)
}

fn plan9(tag: &str, at: &str, flags: MsFlags) -> Result<(), BenchError> {
    // What lies on the host does not change meanwhile.
    let cache = if flags.contains(MsFlags::MS_RDONLY) { "loose" } else { "none" };
    let options = format!("trans=virtio,version=9p2000.L,msize=262144,cache={cache}");
    mount(Some(tag), at, Some("9p"), flags, Some(options.as_str())).trying(at)
}

/// Brings the interface `lo` up.
fn loopback() -> Result<(), BenchError> {
    let socket = UdpSocket::bind("0.0.0.0:0").trying("no socket")?;
    // SAFETY: all zeros is a valid request.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = libc::IFF_UP as libc::c_short;
    // SAFETY: the request names an interface and the flags that it shall have.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) };
    let result: io::Result<()> = Errno::result(done).map(|_| ()).map_err(Into::into);
    result.trying("cannot bring lo up")
}
