//! The workload programs: compiled once for each version of their source, shared by all tests.

use std::ffi::OsString;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::program::{Program, tool};
use crate::stage::{cache_dir, skipped};

/// A compiler may be slow on a busy machine.
const COMPILE_LIMIT: Duration = Duration::from_secs(180);

/// A file of `tests/workloads`.
pub fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("workloads").join(name)
}

/// Held while something is built: tests that run beside each other may need the same.
static BUILD: Mutex<()> = Mutex::new(());

/// Builds `output` from `sources` by `argv`, in which `OUT` stands for the output. Done again only for other sources.
fn build(name: &str, sources: &[&str], argv: Vec<OsString>) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    argv.hash(&mut hasher);
    for source_name in sources {
        let path = source(source_name);
        fs::read(&path)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
            .hash(&mut hasher);
    }
    let output = cache_dir().join(format!("{name}-{:016x}", hasher.finish()));
    let _alone = BUILD.lock().unwrap_or_else(PoisonError::into_inner);
    if !output.exists() {
        // Built beside its place and renamed: a compiler that is interrupted leaves nothing that looks finished.
        let draft = output.with_extension(std::process::id().to_string());
        let argv =
            argv.into_iter().map(|arg| if arg == "OUT" { draft.clone().into() } else { arg });
        Program::new(argv)
            .env("GOCACHE", cache_dir().join("go"))
            .env("CGO_ENABLED", "0")
            .env("GO111MODULE", "off")
            .limit(COMPILE_LIMIT)
            .finish()
            .expect_code(0);
        fs::rename(&draft, &output).unwrap_or_else(|error| panic!("{}: {error}", output.display()));
    }
    output
}

fn argv(compiler: &str, options: &[&str], sources: &[&str]) -> Vec<OsString> {
    let options = options.iter().map(OsString::from);
    let sources = sources.iter().map(|name| source(name).into());
    std::iter::once(tool(compiler).into()).chain(options).chain(sources).collect()
}

/// A C program, static and threaded.
pub fn c_program(name: &str) -> PathBuf {
    let file = format!("{name}.c");
    let options =
        ["-O2", "-std=gnu17", "-Wall", "-Wextra", "-Werror", "-pthread", "-static", "-o", "OUT"];
    build(name, &[&file, "check.h", "area.h"], argv("gcc", &options, &[&file]))
}

/// Whether programs can put guards over pages; says so where they cannot.
pub fn has_guards() -> bool {
    let probe = Program::new([c_program("promises")]).args(["has-guards", "1"]);
    let has = probe.finish().expect_code(0).text() == "guards\n";
    if !has {
        skipped("guards need Linux 6.13");
    }
    has
}

/// The same with musl, whose threads share one lock that the kernel opens when they end.
pub fn musl_program(name: &str) -> PathBuf {
    let file = format!("{name}.c");
    let options = ["-O2", "-std=gnu17", "-Wall", "-pthread", "-static", "-o", "OUT"];
    let (compiler, name) = ("musl-gcc", format!("musl-{name}"));
    build(&name, &[&file, "check.h", "area.h"], argv(compiler, &options, &[&file]))
}

/// The Go program: static, without libc.
pub fn go_program() -> PathBuf {
    build("churn-go", &["churn.go"], argv("go", &["build", "-o", "OUT"], &["churn.go"]))
}

/// Directory with the class of the Java program.
pub fn java_classes() -> PathBuf {
    build("churn-java", &["Churn.java"], argv("javac", &["-d", "OUT"], &["Churn.java"]))
}

/// A 32-bit program which waits for a signal.
pub fn thirty_two_bit_program() -> PathBuf {
    let options = ["-m32", "-nostdlib", "-static", "-no-pie", "-o", "OUT"];
    build("pause32", &["pause32.S"], argv("gcc", &options, &["pause32.S"]))
}

/// The tests of a package of Go's standard library, static.
pub fn go_test_binary(package: &str) -> PathBuf {
    let name = format!("{}-test-{}", package.replace('/', "-"), go(&["env", "GOVERSION"]));
    build(&name, &[], argv("go", &["test", "-c", "-o", "OUT", package], &[]))
}

/// Where the source of such a package lies: its tests expect to run there.
pub fn go_source(package: &str) -> PathBuf {
    Path::new(&go(&["env", "GOROOT"])).join("src").join(package)
}

fn go(args: &[&str]) -> String {
    Program::new([tool("go")]).args(args).finish().expect_code(0).text().trim().to_string()
}
