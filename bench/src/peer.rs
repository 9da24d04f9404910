//! The other end of an exchange, in a process of its own: this program again, as `gms-bench peer`.

use std::io::{BufRead, BufReader, ErrorKind};
use std::net::{SocketAddr, UdpSocket};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;

use crate::cli::Protocol;
use crate::error::{BenchError, Trying};
use crate::network::Network;
use crate::placement::{Placement, Wait};

/// Bytes of a request.
pub(crate) const REQUEST_LEN: usize = 128;

impl Protocol {
    /// As the command line has it.
    fn name(self) -> &'static str {
        match self {
            Protocol::Udp => "udp",
            Protocol::Udp8k => "udp8k",
            Protocol::Quic => "quic",
            Protocol::Quinn => "quinn",
        }
    }

    /// Bytes of a reply: a control message and a page.
    pub(crate) fn reply_len(self) -> usize {
        match self {
            Protocol::Udp | Protocol::Quic | Protocol::Quinn => 128 + 4096,
            Protocol::Udp8k => 128 + 8192,
        }
    }
}

/// A process that ends with this object, and with this process.
pub(crate) struct Process(pub Child);

impl Process {
    /// Starts it.
    pub(crate) fn start(command: &mut Command) -> Result<Process, BenchError> {
        let what = format!("cannot start {}", command.get_program().display());
        // SAFETY: between fork and exec the child only makes a system call.
        let command = unsafe {
            command.pre_exec(|| Ok(set_pdeathsig(Signal::SIGKILL)?)).stdin(Stdio::null())
        };
        Ok(Process(command.spawn().trying(&what)?))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Fails if it has ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running peer.
pub(crate) struct Peer {
    /// Where it listens.
    pub addr: SocketAddr,
    process: Process,
}

impl Peer {
    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.process.0.id()
    }

    /// Starts the peer of `placement` at the far end of `network` and waits until it listens. `keys`: of QUIC.
    pub(crate) fn start(
        network: &Network,
        protocol: Protocol,
        placement: &Placement,
        keys: Option<&Path>,
    ) -> Result<Peer, BenchError> {
        let mut command = Command::new(std::env::current_exe().trying("cannot find gms-bench")?);
        command.args(["peer", protocol.name(), placement.wait.name()]).stdout(Stdio::piped());
        if let Some((_, cpu)) = placement.cpus {
            command.args(["--cpu", &cpu.to_string()]);
        }
        if let Some(keys) = keys {
            command.arg("--keys").arg(keys);
        }
        command.args(["--bind", &network.far().to_string()]);
        if let Some(mtu) = network.mtu() {
            command.args(["--mtu", &mtu.to_string()]);
        }
        network.place(&mut command)?;
        let mut process = Process::start(&mut command)?;
        let mut line = String::new();
        if let Some(stdout) = process.0.stdout.take() {
            BufReader::new(stdout).read_line(&mut line).trying("cannot read from the peer")?;
        }
        let problem = "did not say where it listens".to_owned();
        let addr = line.trim().parse();
        let addr = addr.map_err(|_| BenchError::Program { program: "peer".into(), problem })?;
        Ok(Peer { addr, process })
    }
}

/// Waits for a datagram; returns its length.
pub(crate) fn receive(
    socket: &UdpSocket,
    wait: Wait,
    into: &mut [u8],
) -> Result<usize, BenchError> {
    loop {
        match socket.recv(into) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait.pause(),
            other => return other.trying("cannot receive"),
        }
    }
}
