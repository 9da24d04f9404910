//! The programs, and their jobs.

use std::env;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use gms_tests::Dice;

use super::job::Job;
use super::redis::{self, VALUE};
use crate::cli::Program;
use crate::error::{BenchError, Trying};
use crate::graph::Graph;
use crate::scratch::Scratch;
use crate::undo::{Step, Undo};
use crate::workload::bfs;

/// Where programs are besides PATH.
const PLACES: [&str; 3] = ["/usr/bin", "/bin", "/usr/sbin"];
/// Lines of sort's input for each MiB of its memory, of 24 to 32 bytes.
const LINES: usize = 12_000;
/// Rows of sqlite's table for each MiB.
const ROWS: usize = 3_300;
/// Functions to compile for each MiB.
const FUNCTIONS: usize = 13;
/// Bytes which redis needs for a key besides its value.
const KEY: usize = 280;
/// Requests to redis for each of its keys.
const REQUESTS: usize = 3;
/// Searches in the graph.
const SEARCHES: u32 = 20;
/// Neighbours in each MiB of a graph.
const NEIGHBOURS: usize = (1 << 20) / size_of::<u32>();
/// Bounds of the number of neighbours that a node has on average.
const DEGREE: usize = 64;

/// Files which jobs read. Go when this is dropped, and when gms-bench is killed.
pub(crate) struct Inputs {
    scratch: Scratch,
    undo: Undo,
}

impl Inputs {
    /// None yet.
    pub(crate) fn new() -> Result<Inputs, BenchError> {
        let mut inputs = Inputs { scratch: Scratch::new()?, undo: Undo::new()? };
        inputs.undo.add(&Step::RemoveDir(inputs.scratch.as_ref().to_owned()))?;
        Ok(inputs)
    }

    fn path(&mut self, name: &str) -> Result<PathBuf, BenchError> {
        let path = self.scratch.path(name);
        self.undo.add(&Step::RemoveFile(path.clone()))?;
        Ok(path)
    }

    fn write(&mut self, name: &str, text: &str) -> Result<PathBuf, BenchError> {
        let path = self.path(name)?;
        fs::write(&path, text).trying(&path.display().to_string())?;
        Ok(path)
    }
}

impl Program {
    /// As the command line and the report have it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Program::Redis => "redis",
            Program::Sort => "sort",
            Program::Numpy => "numpy",
            Program::Sqlite => "sqlite",
            Program::Gcc => "gcc",
            Program::Bfs => "bfs",
        }
    }

    /// Where it is; an error that names the package if it is not installed.
    pub(crate) fn find(self) -> Result<PathBuf, BenchError> {
        match self {
            Program::Redis => installed("redis-server", "redis-server", |_| true),
            Program::Sort => installed("sort", "coreutils", |_| true),
            Program::Numpy => installed("python3", "python3-numpy", has_numpy),
            Program::Sqlite => installed("sqlite3", "sqlite3", |_| true),
            Program::Gcc => installed("gcc", "gcc", |_| true),
            Program::Bfs => env::current_exe().trying("cannot find gms-bench"),
        }
    }

    /// A job for which it needs about `mib` MiB.
    pub(crate) fn prepare(self, mib: u32, inputs: &mut Inputs) -> Result<Job, BenchError> {
        let (program, mib) = (self.find()?, mib as usize);
        let line = |options: &[&str], last: &Path| {
            let mut line: Vec<OsString> = vec![program.clone().into()];
            line.extend(options.iter().map(OsString::from));
            line.push(last.into());
            line
        };
        Ok(match self {
            Program::Redis => Job::Serve(redis::Job {
                socket: inputs.path("redis.socket")?,
                keys: (mib << 20) / (VALUE + KEY),
                requests: REQUESTS * (mib << 20) / (VALUE + KEY),
                program,
            }),
            Program::Sort => {
                let input = inputs.write("lines", &lines(mib * LINES))?;
                // More than it needs, so that it uses no files.
                let size = format!("{}M", 4 * mib);
                Job::Print(line(&["-S", &size, "--parallel=2"], &input))
            }
            Program::Numpy => {
                let script = inputs.write("job.py", include_str!("job.py"))?;
                let mut line = line(&[], &script);
                line.push(mib.to_string().into());
                Job::Print(line)
            }
            Program::Sqlite => {
                let rows = (mib * ROWS).to_string();
                let script = include_str!("job.sql").replace("{rows}", &rows);
                let input = inputs.write("job.sql", &script)?;
                let read = format!(".read {}", input.display());
                Job::Print(line(&["-batch", ":memory:"], Path::new(&read)))
            }
            Program::Gcc => {
                let input = inputs.write("job.c", &functions(mib * FUNCTIONS))?;
                Job::Print(line(&["-O0", "-S", "-o", "-"], &input))
            }
            Program::Bfs => {
                let graph = inputs.path("graph")?;
                let scale = (mib * NEIGHBOURS / DEGREE).max(2).ilog2();
                Graph::kronecker(scale, mib * NEIGHBOURS / 2).write(&graph)?;
                let orders = bfs::Orders { graph, searches: SEARCHES };
                Job::Search(orders, inputs.path("found.json")?)
            }
        })
    }
}

/// The first program of this name that will do.
fn installed(name: &str, package: &str, will_do: fn(&Path) -> bool) -> Result<PathBuf, BenchError> {
    let path = env::var_os("PATH").unwrap_or_default();
    let places = env::split_paths(&path).chain(PLACES.map(PathBuf::from));
    let mut found = places.map(|place| place.join(name));
    found.find(|path| path.is_file() && will_do(path)).ok_or_else(|| BenchError::Program {
        program: package.into(),
        problem: format!(
            "is not installed: apt-get install {package}, or choose other programs by --program"
        ),
    })
}

fn has_numpy(python: &Path) -> bool {
    let mut import = Command::new(python);
    import.args(["-c", "import numpy"]).stdin(Stdio::null()).stderr(Stdio::null());
    import.status().is_ok_and(|status| status.success())
}

/// Lines of text in no order.
fn lines(count: usize) -> String {
    let (mut dice, mut text) = (Dice::of_thread(1, 0), String::with_capacity(32 * count));
    for number in 0..count {
        let _ = writeln!(text, "{:016x} name{number}", dice.bits());
    }
    text
}

/// Functions in C, each with a type of its own.
fn functions(count: usize) -> String {
    let mut dice = Dice::of_thread(1, 0);
    let mut text =
        String::from("struct s0 { int a; };\nlong f0(struct s0 *p, long x) { return p->a + x; }\n");
    for n in 1..count {
        let (a, b, c) = (1 + dice.place(999), 1 + dice.place(31), 1 + dice.place(999));
        let (longs, shift, callee) = (a % 7 + 1, b % 13, dice.place(n));
        let _ = write!(
            text,
            "struct s{n} {{ int a; long b[{longs}]; struct s{n} *next; }};
long f{n}(struct s{n} *p, long x) {{
  long sum = {c};
  for (int i = 0; i < {a}; i++) {{
    if ((x ^ i) & {b}) sum += p->b[i % {longs}] * x; else {{ p->a ^= i << {shift}; sum -= p->a; }}
    switch (i & 7) {{
      case 0: x += {c}; break;
      case 3: x ^= sum; break;
      case 5: p = p->next ? p->next : p; break;
      default: sum ^= x >> 3;
    }}
  }}
  return sum + f{callee}((void *)p, x - 1);
}}
"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_named_with_its_package() {
        let error = installed("no-such-program", "a-package", |_| true).expect_err("missing");
        assert!(error.to_string().contains("apt-get install a-package"), "{error}");
        assert!(installed("sh", "dash", |_| false).is_err(), "none of them will do");
        assert!(installed("sh", "dash", |_| true).is_ok());
    }
}
