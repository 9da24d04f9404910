//! A guest under emulation: boots a kernel on the host's own files, runs `gms-bench remote-swap` there, and fetches its report.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::init::{COMMAND, DIRS, MODULES, OUT, TAGS};
use super::initramfs::Initramfs;
use super::kernel::Needs;
use crate::cli::PeersOptions;
use crate::error::{BenchError, Trying};
use crate::peer::Process;
use crate::report::Report;
use crate::scratch::Scratch;
use crate::stack::read;

/// Memory of the guest in MiB: enough for swap to need none of the host's, or it could wait for itself.
const MEMORY_MIB: u32 = 3072;
/// CPUs of the guest.
const CPUS: u32 = 2;
/// Lines of the console that an error shows.
const LINES_SHOWN: usize = 12;
/// What the kernel is told. Clocks are those of the emulated CPU, which the emulator keeps steady.
const KERNEL_LINE: &str =
    "console=ttyS0 quiet panic=-1 nokaslr tsc=reliable rdinit=/gms-bench -- guest-init";
/// Its report.
const REPORT: &str = "report.json";

/// Measures in a guest, and adds what it found.
pub(super) fn run(
    needs: &Needs,
    options: &PeersOptions,
    report: &mut Report,
) -> Result<(), BenchError> {
    let scratch = Scratch::new()?;
    let out = scratch.path("out");
    fs::create_dir(&out).trying("no directory for the guest's results")?;
    let initramfs = scratch.path("initramfs");
    fs::write(&initramfs, archive(needs, options)?).trying("cannot write the initramfs")?;
    let console = scratch.path("console");
    let ended = Process::start(&mut qemu(needs, &initramfs, &console, &out))?.0.wait();
    let ended = ended.trying("cannot wait for qemu")?;
    if !ended.success() || !out.join(REPORT).exists() {
        let text = String::from_utf8_lossy(&fs::read(&console).unwrap_or_default()).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        let last = lines[lines.len().saturating_sub(LINES_SHOWN)..].join("\n  ");
        let problem = format!("made no report ({ended}); the end of its console:\n  {last}");
        return Err(BenchError::Program { program: "the guest".into(), problem });
    }
    report.absorb(read(&out.join(REPORT))?, "guest: under emulation; only ratios mean something");
    Ok(())
}

fn qemu(needs: &Needs, initramfs: &Path, console: &Path, out: &Path) -> Command {
    let share = |dir: &Path, tag: &str, readonly: &str| {
        let dir = dir.display();
        format!(
            "local,path={dir},mount_tag={tag},security_model=none,multidevs=remap,readonly={readonly}"
        )
    };
    let mut command = Command::new(&needs.qemu);
    command
        .args(["-nodefaults", "-display", "none", "-no-reboot", "-cpu", "max"])
        .args(["-accel", "tcg,thread=multi"])
        .args(["-smp", &CPUS.to_string(), "-m", &format!("{MEMORY_MIB}M")])
        .arg("-kernel")
        .arg(&needs.kernel.image)
        .arg("-initrd")
        .arg(initramfs)
        .args(["-append", KERNEL_LINE])
        .args(["-serial", &format!("file:{}", console.display())])
        .args(["-virtfs", &share(Path::new("/"), TAGS[0], "on")])
        .args(["-virtfs", &share(out, TAGS[1], "off")])
        .stdout(Stdio::null());
    command
}

/// The first root: this program with its libraries, as the first process; modules; and what to run.
fn archive(needs: &Needs, options: &PeersOptions) -> Result<Vec<u8>, BenchError> {
    let content = |path: &Path| fs::read(path).trying(&path.display().to_string());
    let mut archive = Initramfs::default();
    DIRS.iter().for_each(|dir| archive.dir(dir));
    let own = std::env::current_exe().trying("cannot find gms-bench")?;
    archive.file("/gms-bench", &content(&own)?);
    ["/lib", "/lib64"].iter().for_each(|dir| archive.dir(dir));
    for library in libraries()? {
        let name = library.file_name().map(|name| name.display().to_string()).unwrap_or_default();
        let dir = if name.starts_with("ld-") { "/lib64" } else { "/lib" };
        archive.file(&format!("{dir}/{name}"), &content(&library)?);
    }
    archive.dir(MODULES);
    for (at, module) in needs.kernel.modules.iter().enumerate() {
        let name = module.file_name().map(|name| name.display().to_string()).unwrap_or_default();
        archive.file(&format!("{MODULES}/{at:02}-{name}"), &content(module)?);
    }
    let command =
        serde_json::to_vec(&command(&own, options)).map_err(|e| BenchError::Invalid(e.to_string()));
    archive.file(COMMAND, &command?);
    Ok(archive.finish())
}

/// What the guest runs.
fn command(own: &Path, options: &PeersOptions) -> Vec<String> {
    let mut words = vec![own.display().to_string(), "remote-swap".into()];
    words.extend(["--json".into(), format!("{OUT}/{REPORT}")]);
    words.extend(["--limit".into(), u32::MAX.to_string()]);
    words.extend(["--runs".into(), options.effort.runs().to_string()]);
    if options.effort.is_quick() {
        words.push("--quick".into());
    }
    if let Some(dir) = options.paging.programs.dir() {
        let dir = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
        words.extend(["--programs".into(), dir.display().to_string()]);
    }
    words
}

/// Files of the libraries of this process, and of its loader.
fn libraries() -> Result<Vec<PathBuf>, BenchError> {
    let maps = fs::read_to_string("/proc/self/maps").trying("/proc/self/maps")?;
    let mut files: Vec<PathBuf> = maps
        .lines()
        .filter_map(|line| line.split_once('/'))
        .map(|(_, path)| PathBuf::from(format!("/{path}")))
        .filter(|path| path.to_str().is_some_and(|path| path.contains(".so")))
        .collect();
    files.sort();
    files.dedup();
    Ok(files)
}
