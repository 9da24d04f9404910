//! Other pagers in user space, where the user has them: umap with its own benchmark, and fltrace around ours, as it has none.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::race::Race;
use crate::error::{BenchError, Trying};
use crate::peer::Process;
use crate::region::{PAGE, pages};
use crate::report::Report;
use crate::scratch::Scratch;
use crate::stack::read;
use crate::workload::fault;

/// umap's benchmarks which write and which read.
const UMAP: [&str; 2] = ["pfbenchmark-write", "pfbenchmark-read"];
/// Where they lie below an installation or a build.
const PROGRAMS: [&str; 3] = ["bin", "tests/pfbenchmark", ""];
/// Where umap's library lies below an installation or a build.
const LIBRARIES: [&str; 3] = ["lib", "lib64", "src/umap"];
/// Directory of umap's file: memory, as the others have.
const MEMORY: &str = "/dev/shm";
/// Bytes of output that are read.
const OUTPUT_MAX: usize = 1 << 12;

/// umap's benchmarks.
#[derive(Debug)]
struct Umap {
    write: PathBuf,
    read: PathBuf,
    libraries: OsString,
}

/// Those which were named.
pub(super) struct Foreign {
    umap: Option<Umap>,
    fltrace: Option<PathBuf>,
}

impl Foreign {
    /// `umap` and `fltrace`: where they are installed or were built.
    pub(super) fn find(umap: Option<&Path>, fltrace: Option<&Path>) -> Result<Foreign, BenchError> {
        let umap = umap.map(|dir| {
            let text = format!(
                "{} is not in {}, nor in its bin or tests/pfbenchmark: name by --umap the folder where umap is installed or was \
                 built; cmake leaves the benchmark out where it finds no OpenMP",
                UMAP[1],
                dir.display()
            );
            Umap::find(dir).ok_or(BenchError::Needs(text))
        });
        let fltrace = fltrace.map(|dir| {
            let script = dir.join("fltrace");
            let text = format!(
                "fltrace and fltrace.so are not in {}: build it (make), and name its folder by --fltrace",
                dir.display()
            );
            let found = script.is_file() && dir.join("fltrace.so").is_file();
            found.then_some(script).ok_or(BenchError::Needs(text))
        });
        Ok(Foreign { umap: umap.transpose()?, fltrace: fltrace.transpose()? })
    }

    /// Measures them.
    pub(super) fn run(
        &self,
        race: &Race,
        seed: u64,
        report: &mut Report,
    ) -> Result<(), BenchError> {
        if let Some(found) = &self.umap {
            let mean = umap(found, race.mib)?;
            report.figure("umap's pfbenchmark-read --shuffle, mean", "us", mean);
        }
        if let Some(script) = &self.fltrace {
            let found = fltrace(script, race, seed)?;
            report.latency("fault, fltrace", found.samples()?.latency());
        }
        Ok(())
    }
}

/// One thread writes all pages of a file, another program of umap reads them once in random order; mean time of a read in us.
fn umap(umap: &Umap, mib: (u32, u32)) -> Result<f64, BenchError> {
    let file = Path::new(MEMORY).join(format!("gms-bench-umap-{}", std::process::id()));
    let read = umap
        .run(&umap.write, &file, mib, &[])
        .and_then(|_| umap.run(&umap.read, &file, mib, &["--noinit", "--shuffle"]));
    // What was not made need not be removed.
    let _ = std::fs::remove_file(&file);
    let text = read?;
    let mean = mean_ns(&text).ok_or_else(|| {
        let problem = format!("printed no line umap,shuffle,read,...: {text}");
        BenchError::Program { program: UMAP[1].into(), problem }
    })?;
    Ok(mean / 1e3)
}

impl Umap {
    /// That in `dir`.
    fn find(dir: &Path) -> Option<Umap> {
        let below = |subs: [&str; 3]| subs.map(|sub| dir.join(sub));
        let programs = below(PROGRAMS).into_iter().find(|bin| bin.join(UMAP[1]).is_file())?;
        let [write, read] = UMAP.map(|name| programs.join(name));
        Some(Umap { write, read, libraries: std::env::join_paths(below(LIBRARIES)).ok()? })
    }

    /// What `program` prints.
    fn run(
        &self,
        program: &Path,
        file: &Path,
        (local, mib): (u32, u32),
        more: &[&str],
    ) -> Result<String, BenchError> {
        let mut command = Command::new(program);
        command
            .args(["-t", "1", "-p", &pages(mib as usize).to_string(), "-f"])
            .arg(file)
            .args(more)
            .env("UMAP_PAGESIZE", PAGE.to_string())
            .env("UMAP_BUFSIZE", pages(local as usize).to_string())
            .env("LD_LIBRARY_PATH", &self.libraries)
            .stdin(Stdio::null());
        let output = command.output().trying("cannot run umap's benchmark")?;
        let text = |bytes: &[u8]| {
            String::from_utf8_lossy(&bytes[..bytes.len().min(OUTPUT_MAX)]).into_owned()
        };
        if !output.status.success() {
            let (all, more) = (text(&output.stdout), text(&output.stderr));
            let problem = format!("ended with {}: {all}{more}", output.status);
            return Err(BenchError::Program { program: program.display().to_string(), problem });
        }
        Ok(text(&output.stdout))
    }
}

/// From its line `umap,shuffle,read,THREADS,FILLERS,NANOSECONDS`.
fn mean_ns(output: &str) -> Option<f64> {
    let line = output.lines().rfind(|line| line.starts_with("umap,shuffle,read,"))?;
    line.rsplit(',').next()?.trim().parse().ok()
}

/// The faults of [`Race`]; what is evicted stays in this machine's memory.
fn fltrace(script: &Path, race: &Race, seed: u64) -> Result<fault::Found, BenchError> {
    let scratch = Scratch::new()?;
    let found = scratch.path("found.json");
    let (local, mib) = race.mib;
    // One sample a second: what it is made for, a trace of all faults, is not what is compared.
    let mut command = Command::new(std::path::absolute(script).trying("the path of fltrace")?);
    command
        .args(["record", &format!("-L={local}"), &format!("-M={}", 2 * mib), "-S=1", "--"])
        .args(race.fault_orders(seed).command(&found)?)
        .current_dir(&scratch)
        .stdout(Stdio::null())
        .stderr(File::create(scratch.path("log")).trying("no log of fltrace")?);
    let ended = Process::start(&mut command)?.0.wait().trying("cannot wait for fltrace")?;
    if !ended.success() {
        let log = std::fs::read_to_string(scratch.path("log")).unwrap_or_default();
        let problem = format!("ended with {ended}: {log}");
        return Err(BenchError::Program { program: "fltrace".into(), problem });
    }
    read(&found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn script(path: &Path, text: &str) {
        fs::write(path, format!("#!/bin/sh\n{text}\n")).expect("a script");
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("its mode");
    }

    #[test]
    fn what_umap_prints_is_its_figure() {
        let dir = Scratch::new().expect("a directory");
        let named = || Foreign::find(Some(dir.as_ref()), None).map(|foreign| foreign.umap);
        let error = named().expect_err("nothing is there").to_string();
        assert!(error.contains("pfbenchmark-read is not in"), "{error}");
        let [write, read] = UMAP.map(|name| dir.path(name));
        script(&write, "echo $UMAP_BUFSIZE > $6; echo umap,seq,write,1,2,99");
        script(&read, "test $(cat $6)$4$7 = 10244096--noinit && echo umap,shuffle,read,1,2,12345");
        let found = named().expect("found").expect("umap");
        assert_eq!(umap(&found, (4, 16)).map_err(|error| error.to_string()), Ok(12.345));
        script(&read, "echo umap,shuffle,read,1,2,x");
        let error = umap(&found, (4, 16)).expect_err("no number").to_string();
        assert!(error.contains("printed no line"), "{error}");
        script(&read, "echo wrong; exit 3");
        let error = umap(&found, (4, 16)).expect_err("a failure").to_string();
        assert!(error.contains("exit status: 3: wrong"), "{error}");
    }

    #[test]
    fn fltrace_needs_its_library() {
        let dir = Scratch::new().expect("a directory");
        script(&dir.path("fltrace"), "true");
        assert!(Foreign::find(None, Some(dir.as_ref())).is_err());
        script(&dir.path("fltrace.so"), "");
        assert!(Foreign::find(None, Some(dir.as_ref())).is_ok_and(|all| all.fltrace.is_some()));
    }
}
