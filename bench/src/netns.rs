//! A network namespace of a benchmark: its names, and the programs that make and remove it.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{BenchError, Trying};

/// Where `ip` keeps namespaces.
pub(crate) const SPACES: &str = "/run/netns";

/// What is set up is named after the benchmark's process.
pub(crate) struct Names {
    /// Of the namespace, and of the table of nftables.
    pub space: String,
    /// Of this end of the pair.
    pub near: String,
    /// Of the agents' end.
    pub far: String,
}

impl Names {
    /// Those of a process.
    pub(crate) fn of(process: u32) -> Names {
        let name = |end| format!("gb{process}{end}");
        Names { space: format!("gms-bench-{process}"), near: name("n"), far: name("f") }
    }
}

/// Undoes what the benchmark of this process set up, as far as it did.
pub(crate) fn remove(process: u32) -> std::io::Result<()> {
    let names = Names::of(process);
    let failed = |error: BenchError| std::io::Error::other(error.to_string());
    if tool("nft", "nftables").is_ok() {
        // A table that is added first is always there to be deleted.
        let table = format!("inet {}", names.space);
        nft(&format!("add table {table}\ndelete table {table}\n")).map_err(failed)?;
    }
    if Path::new("/sys/class/net").join(&names.near).exists() {
        ip(&format!("link del {}", names.near)).map_err(failed)?;
    }
    if Path::new(SPACES).join(&names.space).exists() {
        ip(&format!("netns del {}", names.space)).map_err(failed)?;
    }
    Ok(())
}

/// Path of an installed program of Debian's `package`.
pub(crate) fn tool(name: &str, package: &str) -> Result<PathBuf, BenchError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/sbin", "/sbin", "/usr/bin"].map(PathBuf::from);
    let found = std::env::split_paths(&path).chain(usual).map(|dir| dir.join(name));
    let text = format!("--network veth takes {name}: install the package {package}");
    found.into_iter().find(|file| file.is_file()).ok_or(BenchError::Needs(text))
}

/// Runs `ip`; returns what it prints.
pub(crate) fn ip(line: &str) -> Result<String, BenchError> {
    let mut command = Command::new(tool("ip", "iproute2")?);
    command.args(line.split_whitespace());
    output(command, "", &format!("ip {line}"))
}

/// Runs a script of nftables.
pub(crate) fn nft(script: &str) -> Result<String, BenchError> {
    let mut command = Command::new(tool("nft", "nftables")?);
    command.args(["-f", "-"]);
    output(command, script, &format!("nft: {}", script.trim_end()))
}

/// What a command prints that reads `input`.
fn output(mut command: Command, input: &str, what: &str) -> Result<String, BenchError> {
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().trying(what)?;
    if let Some(mut stdin) = child.stdin.take() {
        // Who does not read it fails, and says why.
        let _ = stdin.write_all(input.as_bytes());
    }
    let ran = child.wait_with_output().trying(what)?;
    if ran.status.success() {
        return Ok(String::from_utf8_lossy(&ran.stdout).into_owned());
    }
    let problem = format!("failed: {}", String::from_utf8_lossy(&ran.stderr).trim());
    Err(BenchError::Program { program: format!("`{what}`"), problem })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_not_there_is_named_with_its_package() {
        let error = tool("no-such-program", "a-package").expect_err("none").to_string();
        assert!(error.contains("no-such-program") && error.contains("a-package"), "{error}");
    }
}
